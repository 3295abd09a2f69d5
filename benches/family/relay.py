"""A network in front of the server: a process that forwards each byte in both directions, half a round trip later.

Beside a server on the same machine the round trips decide what a lock costs; this makes them long enough to be seen.
One thread serves all connections, in the order in which things are due, so bytes of one direction never overtake each
other and pipelined commands are delayed side by side. Run as `python -m fastlock.benches.family.relay`, by `Relay`.
"""

from __future__ import annotations

import heapq
import itertools
import select
import socket
from time import monotonic as now
from typing import Any
from urllib.parse import quote

from ..contention.clients import exact_sleeps
from ..processes import Process, end_all, to_parent
from ..raw import address, reachable

START_SECONDS = 30.0
CHUNK = 1 << 16


class Relay:
    """The parent's end: `url` leads to the server through a network with so many seconds of round trip."""

    def __init__(self, url: str, seconds: float) -> None:
        self._process = Process(f"{__package__}.relay")
        where = address(url)
        place = {key: where[key] for key in ("path", "host", "port") if key in where}
        self._process.send({"upstream": place, "seconds": seconds})
        try:
            answer = self._process.receive(START_SECONDS)
            if answer is None:
                raise TimeoutError("the relay did not start")
        except BaseException:
            self.close()
            raise
        login = ":".join(quote(where.get(key) or "", safe="") for key in ("username", "password")).removesuffix(":")
        self.url = f"redis://{login}{login and '@'}127.0.0.1:{answer['port']}/{where.get('db') or 0}"

    def close(self) -> None:
        """End the relay, and with it all connections through it."""
        end_all([self._process])


def usable(url: str) -> bool:
    """Whether there can be a relay: with TLS, clients would see its address where the server's certificate says
    another."""
    return reachable(url)


class Wires:
    """The connections of a relay, and what is on its way."""

    def __init__(self, upstream: dict[str, Any], delay: float) -> None:
        self._upstream, self._delay = upstream, delay
        self._other: dict[socket.socket, socket.socket] = {}
        self._open: set[socket.socket] = set()  # those that may still send
        self._due: list[tuple[float, int, socket.socket, bytes]] = []  # no bytes: the end of what a socket sends
        self._serial = itertools.count()
        self.listener = socket.create_server(("127.0.0.1", 0))

    def serve(self, parent: int) -> None:
        """Forward until the file descriptor `parent` can be read, which says that the parent closed its end."""
        while True:
            left = max(0.0, self._due[0][0] - now()) if self._due else None
            sources: list[Any] = [parent, self.listener, *self._open]
            readable = select.select(sources, [], [], left)[0]
            self._deliver()
            for source in readable:
                if source is parent:
                    return
                if source is self.listener:
                    self._connect()
                elif source in self._open:
                    self._receive(source)

    def _connect(self) -> None:
        client = self.listener.accept()[0]
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            server = self._upstream_socket()
        except OSError:
            client.close()
            return
        self._other |= {client: server, server: client}
        self._open |= {client, server}

    def _upstream_socket(self) -> socket.socket:
        if "path" in self._upstream:
            server = socket.socket(socket.AF_UNIX)
            server.connect(self._upstream["path"])
            return server
        server = socket.create_connection((self._upstream["host"], self._upstream["port"]))
        server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return server

    def _receive(self, source: socket.socket) -> None:
        try:
            data = source.recv(CHUNK)
        except OSError:
            data = b""
        if not data:
            self._open.discard(source)
        heapq.heappush(self._due, (now() + self._delay, next(self._serial), source, data))

    def _deliver(self) -> None:
        while self._due and self._due[0][0] <= now():
            _, _, source, data = heapq.heappop(self._due)
            target = self._other.get(source)
            if target is None:
                continue
            try:
                if not data:
                    raise EOFError
                target.sendall(data)
            except (OSError, EOFError):
                self._end(source, target)

    def _end(self, *both: socket.socket) -> None:
        """End a connection, in both directions."""
        for each in both:
            self._other.pop(each, None)
            self._open.discard(each)
            each.close()


def main() -> None:
    """Serve as the parent's message says, until the parent closes this end."""
    parent = to_parent()
    order = parent.receive() or {}
    exact_sleeps()
    wires = Wires(order["upstream"], order["seconds"] / 2)
    parent.send({"port": wires.listener.getsockname()[1]})
    wires.serve(parent.fileno())


if __name__ == "__main__":
    main()
