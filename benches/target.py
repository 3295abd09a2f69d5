"""The server under test: a private embedded one or one given by URL, and what it reports about itself.

What lives here: what is read from the server (INFO, CLIENT LIST, SCAN), between runs and not during a measurement, and
the removal of the run's keys. Never here: FLUSH, CONFIG, any write to a key without the run's prefix.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import redis

from fastlock import embedded

from .raw import HOST, address
from .rivals import redis_url

PREFIX = "fastlock-bench"
"""The beginning of all keys, followed by the number of the run; keys of a rival that adds to names contain both."""


@dataclass(frozen=True)
class Meter:
    """Counters of the server. CPU in seconds; ``commands`` and ``changes`` are numbers."""

    cpu: float
    commands: int
    changes: int


class Unusable(Exception):
    """The server cannot be measured: it refuses a command that the benchmark or a rival needs."""


SWEPT = 1000
"""Keys per command or pipeline."""


class Target:
    """The server that is measured. ``private``: only this run uses it."""

    def __init__(self, url: str, private: bool) -> None:
        self.url = url
        self.private = private
        self._redis: Any = redis.Redis.from_url(
            redis_url(url), decode_responses=True
        )  # untyped: replies vary by command
        self._redis.ping()

    def close(self) -> None:
        """Close the connection; the server goes on."""
        self._redis.close()

    def check(self) -> None:
        """Try each command that the harness or a rival needs, on a key of its own. Raises Unusable if the server
        refuses one."""
        key, db = f"{PREFIX}:{os.urandom(6).hex()}:check", self._redis
        needed: dict[str, Callable[[], object]] = {
            "INFO": db.info,
            "CLIENT LIST": db.client_list,
            "SCAN": lambda: db.scan(match=key),
            "SET": lambda: db.set(key, "x", nx=True, px=10_000),
            "GET": lambda: db.get(key),
            "EVALSHA and SCRIPT LOAD": lambda: db.evalsha(db.script_load("return redis.call('get', KEYS[1])"), 1, key),
            "PTTL": lambda: db.pttl(key),
            "PEXPIRE": lambda: db.pexpire(key, 10_000),
            "UNLINK": lambda: db.unlink(key),
            "LPUSH": lambda: db.lpush(key, "x"),
            "BLPOP": lambda: db.blpop([key], timeout=1),
            "DEL": lambda: db.delete(key),
        }
        for command, attempt in needed.items():
            try:
                attempt()
            except redis.ResponseError as error:
                raise Unusable(f"{command}: {error}") from None
        if self.describe()["mode"] == "cluster":
            raise Unusable("a cluster moves names to other servers; give a server of its own")

    def describe(self) -> dict[str, str]:
        """Kind and version of the server, and how it is reached (without credentials)."""
        info = self._redis.info("server")
        kind = "valkey" if "valkey_version" in info else "redis"
        at = address(self.url)
        where = "unix socket" if "path" in at else f"{at['host']}:{at['port']}"
        return {
            "kind": kind,
            "version": str(info.get("valkey_version", info["redis_version"])),
            "mode": str(info.get("server_mode", info.get("redis_mode", "standalone"))),
            "reached_by": "embedded, " + where if self.private else where,
        }

    def read(self) -> Meter:
        """Read the server's counters by one INFO: CPU from its getrusage, to the microsecond, I/O threads included;
        commands; key changes since its last save, one for every acquire, one for every release."""
        info = self._redis.info()
        return Meter(
            cpu=float(info["used_cpu_user"]) + float(info["used_cpu_sys"]),
            commands=int(info["total_commands_processed"]),
            changes=int(info["rdb_changes_since_last_save"]),
        )

    def since(self, before: Meter) -> Meter:
        """What the server has counted since ``before`` was read, without the INFO that read it."""
        now = self.read()
        return Meter(now.cpu - before.cpu, now.commands - before.commands - 1, now.changes - before.changes)

    def connections(self, label: str) -> int:
        """The number of connections whose client name is ``label``."""
        return sum(client.get("name") == label for client in self._redis.client_list())

    @contextlib.contextmanager
    def volatile(self, prefix: str, count: int) -> Iterator[None]:
        """Keep ``count`` other keys that begin with ``prefix`` and expire in an hour or later, each at another time."""
        for first in range(0, count, SWEPT):
            pipe = self._redis.pipeline(transaction=False)
            for number in range(first, min(first + SWEPT, count)):
                pipe.set(f"{prefix}:{number}", "x", px=3_600_000 + 97 * number)
            pipe.execute()
        yield
        # not after an exception: the server may be gone then, and the session removes keys at its end
        for first in range(0, count, SWEPT):
            self._redis.unlink(*(f"{prefix}:{number}" for number in range(first, min(first + SWEPT, count))))

    def leftovers(self, prefix: str, by_design: tuple[str, ...] = ()) -> list[str]:
        """Keys that contain ``prefix`` anywhere (``fastlock:queue:{prefix...}``), on a private server all keys;
        without those that begin with one of ``by_design``."""
        found = self._redis.scan_iter(match="*" if self.private else f"*{prefix}*", count=10_000)
        return [key for key in found if not key.startswith(by_design)]

    def sweep(self, prefix: str) -> None:
        """Remove all keys that contain ``prefix``, also those that a rival derived from a name."""
        found: list[bytes] = []
        for key in self._redis.scan_iter(match=f"*{prefix}*", count=10_000):
            found.append(key)
            if len(found) == SWEPT:
                self._redis.unlink(*found)
                found.clear()
        if found:
            self._redis.unlink(*found)


@contextlib.contextmanager
def open_target(url: str | None, server: str | None, tls: bool = False) -> Iterator[Target]:
    """Open the server at ``url``, else an embedded one (``server``: its program) that ends with the block. tls: reach
    the embedded one by TLS; Unusable: it has none."""
    with contextlib.ExitStack() as stack:
        if url is None:
            if tls and server is None:  # that of pip has none
                server = shutil.which("valkey-server") or "redis-server"
            running = stack.enter_context(embedded.Server(server))
            target = Target(stack.enter_context(_by_tls(running)) if tls else running.url, private=True)
        else:
            target = Target(url, private=False)
        stack.callback(target.close)
        yield target


@contextlib.contextmanager
def _by_tls(server: embedded.Server) -> Iterator[str]:
    """A URL by which a private server is reached by TLS, with a certificate that is made for it."""
    import trustme  # from the extra ``bench``

    with tempfile.TemporaryDirectory() as folder, redis.Redis.from_url(server.url) as db, socket.socket() as free:
        authority, made = trustme.CA(), f"{folder}/server.pem"
        authority.cert_pem.write_to_path(f"{folder}/ca.pem")
        authority.issue_cert(HOST).private_key_and_cert_chain_pem.write_to_path(made)
        free.bind((HOST, 0))
        port = free.getsockname()[1]
        free.close()
        settings = {"tls-auth-clients": "no", "tls-cert-file": made, "tls-key-file": made}
        settings |= {"tls-ca-cert-file": f"{folder}/ca.pem", "tls-port": str(port)}
        try:
            db.execute_command("CONFIG SET", *(word for pair in settings.items() for word in pair))
        except redis.RedisError as error:
            raise Unusable(f"--tls needs a server that was built with TLS, as Debian's redis-server: {error}") from None
        yield f"rediss://{HOST}:{port}/0?ssl_ca_certs={quote(folder, safe='')}%2Fca.pem"
