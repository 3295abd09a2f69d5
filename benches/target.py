"""The server under test: a private embedded one or one given by URL, and what it tells about itself.

Law: only keys that carry the run's prefix are ever written or removed; never FLUSH, never CONFIG. What is read (INFO,
CLIENT LIST, SCAN) is read between runs, not during a measurement.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import redis

from fastlock import embedded

from .raw import address
from .rivals import redis_url


class Target:
    """A server that may be measured. ``private``: nobody but this run uses it."""

    def __init__(self, url: str, private: bool) -> None:
        self.url = url
        self.private = private
        self._redis: Any = redis.Redis.from_url(
            redis_url(url), decode_responses=True
        )  # untyped: replies vary by command
        self._redis.ping()

    def close(self) -> None:
        """Close the connection; the server stays."""
        self._redis.close()

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

    def cpu(self) -> float:
        """CPU seconds of the server until now: from its getrusage, to the microsecond, I/O threads included."""
        info = self._redis.info("cpu")
        return float(info["used_cpu_user"]) + float(info["used_cpu_sys"])

    def changes(self) -> int:
        """Key changes that the server counted since its last save: one for every lock taken, one for every freed."""
        return int(self._redis.info("persistence")["rdb_changes_since_last_save"])

    def connections(self, label: str) -> int:
        """Connections whose client name is ``label``."""
        return sum(client.get("name") == label for client in self._redis.client_list())

    def leftovers(self, prefix: str) -> list[str]:
        """Keys that mention ``prefix``; on a private server every key there is."""
        return list(self._redis.scan_iter(match="*" if self.private else f"*{prefix}*", count=10_000))

    def sweep(self, prefix: str) -> None:
        """Remove what ``leftovers`` finds under ``prefix`` itself."""
        for key in self._redis.scan_iter(match=f"{prefix}*", count=10_000):
            self._redis.unlink(key)


@contextlib.contextmanager
def open_target(url: str | None, server: str | None) -> Iterator[Target]:
    """The server at ``url``, else an embedded one (``server``: its binary) that ends with the block."""
    with contextlib.ExitStack() as stack:
        if url is None:
            running = stack.enter_context(embedded.Server(server))
            target = Target(running.url, private=True)
        else:
            target = Target(url, private=False)
        stack.callback(target.close)
        yield target
