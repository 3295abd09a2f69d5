"""A proxy between a client and a real server: forwards faithfully until a fault is armed, then breaks things exactly.

Two threads per connection, one per direction; every decision is made and noted under one condition variable, so a
test sees what has happened and waits for it (`wait_for`) instead of sleeping. proxy_connection.py and faults.py decide
what to do.

    with FaultProxy(server.url) as proxy:
        armed = proxy.arm(swallow(), command="SET")  # the next SET is executed, its reply lost, the connection ended
        ... = fastlock.Client.from_url(proxy.url) ...
        armed.wait()
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from urllib.parse import parse_qs, unquote, urlsplit

from support import resp
from support.faults import Close, Fault, Pause, Side, delay, drop, inject, replace, split, stall, swallow
from support.listener import Listener
from support.proxy_connection import Armed, Held, ProxyConnection, Step, Trigger

__all__ = [
    "Armed",
    "Fault",
    "FaultProxy",
    "ProxyConnection",
    "delay",
    "drop",
    "inject",
    "replace",
    "split",
    "stall",
    "swallow",
]


class FaultProxy:
    """Listens as the upstream does (unix socket or TCP; `tcp` overrides) and forwards to it.

    url: where clients connect, with the upstream's credentials and database. upstream: URL of the server; a new value
    holds for later connections. connections: all ever made. accepted: how many, failed ones included.
    requests: all bytes forwarded to the server, in order.
    hanging_up: set it to accept connections and close them at once.
    """

    def __init__(self, upstream: str, *, tcp: bool | None = None) -> None:
        self.upstream = upstream
        self.changed = threading.Condition()
        self.connections: list[ProxyConnection] = []
        self.requests = bytearray()
        self.hanging_up = False
        self.accepted = 0
        self._armed: list[Armed] = []
        self._threads: list[threading.Thread] = []
        parts = urlsplit(upstream)
        is_unix = parts.scheme == "unix"
        self._listener = Listener(self._connected, tcp=not is_unix if tcp is None else tcp)
        database = parse_qs(parts.query).get("db", ["0"])[0] if is_unix else parts.path.strip("/") or "0"
        login, at, _ = parts.netloc.rpartition("@")
        self.url = self._listener.place(login + at, database)

    def arm(
        self,
        fault: Fault,
        *,
        command: str | None = None,
        after: bytes | Callable[[bytes], bool] | None = None,
        on_push: bytes | None = None,
        skip: int = 0,
        new_only: bool = False,
        times: float | None = None,
    ) -> Armed:
        """Arm a fault, from now on; what passed before does not count.

        It begins at the next command whose first word is `command`, or whose raw bytes contain (or satisfy) `after`: a
        fault of requests with the command itself, one of replies with the reply to it. With `on_push` it begins at the
        push that contains these bytes. Without any of the three it begins with the next frame of its side.
        skip: so many commands (or replies) of each connection pass first, such as its handshake. new_only: only
        connections made from now on. times: how often it hits; default once, or without limit for stall, delay, split.
        """
        if sum(each is not None for each in (command, after, on_push)) > 1:
            raise ValueError("arm() takes one of command, after, on_push")
        if on_push is not None and fault.side != "reply":
            raise ValueError(f"on_push is for faults on the side of replies, not for {fault.name}")
        trigger: Trigger = "push" if on_push is not None else "command" if command or after else "frame"
        armed = Armed(self.changed, fault, trigger, _matcher(command, after, on_push))
        armed.skip = skip
        armed.left = armed.left if times is None else times
        with self.changed:
            for connection in self.connections:
                none = float("inf")
                armed.passed[connection] = (
                    (none, none) if new_only else (len(connection.commands), connection.reply_frames)
                )
            self._armed.append(armed)
        return armed

    def inject(self, data: bytes) -> None:
        """Send bytes to every open client now, between two replies."""
        for connection in [each for each in self.connections if not each.dead]:
            self._send(connection, "reply", data)

    def cut(self, *, reset: bool = False) -> None:
        """End all connections now; the server still executes what was forwarded."""
        for connection in list(self.connections):
            self._end(connection, reset)

    def refuse(self) -> None:
        """Refuse new connections (ECONNREFUSED) until admit(); open ones live on."""
        self._listener.refuse()

    def admit(self) -> None:
        """Accept connections again, at the same address."""
        self._listener.admit()

    def wait_for(self, predicate: Callable[[FaultProxy], object], timeout: float = 10.0) -> None:
        """Return when `predicate(proxy)` is true, checked after each event; AssertionError after `timeout` seconds.

        An IndexError in it counts as false, so that it may speak of `connections[0]` before there is one.
        """

        def holds() -> object:
            with contextlib.suppress(IndexError):
                return predicate(self)
            return False

        with self.changed:
            if not self.changed.wait_for(holds, timeout):
                raise AssertionError(f"the predicate was not true within {timeout:g} s: {self!r}")

    def wait_for_request(self, data: bytes, timeout: float = 10.0) -> None:
        """Return when a request containing these bytes was forwarded to the server (also if long ago)."""
        self.wait_for(lambda _: data in self.requests, timeout)

    @property
    def commands(self) -> list[list[bytes]]:
        """All commands that came from clients, connection by connection, as words."""
        with self.changed:
            return [words for connection in self.connections for words in connection.commands]

    @property
    def open(self) -> list[ProxyConnection]:
        """The connections that are open towards their clients."""
        with self.changed:
            return [connection for connection in self.connections if not connection.dead]

    def close(self) -> None:
        """End everything and wait for the threads. Further calls do nothing."""
        self._listener.close()
        self.cut()
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.server.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(5)
            assert not thread.is_alive(), f"a thread of the proxy hangs: {self!r}"

    def __enter__(self) -> FaultProxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"<FaultProxy {self.url} -> {self.upstream}, accepted {self.accepted}, {self.connections}, {self._armed}>"
        )

    # ----------------------------------------------------------------------------------- the proxy's own threads

    def _connected(self, client: socket.socket) -> None:
        try:
            server = None if self.hanging_up else _connect(self.upstream)
        except OSError:
            server = None
        with self.changed:
            self.accepted += 1
            self.changed.notify_all()
            if server is None:
                client.close()
                return
            connection = ProxyConnection(len(self.connections), client, server)
            self.connections.append(connection)
        sides: tuple[Side, Side] = ("request", "reply")
        for side in sides:
            thread = threading.Thread(target=self._pump, args=(connection, side), name=f"proxy-{side}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _pump(self, connection: ProxyConnection, side: Side) -> None:
        source = connection.client if side == "request" else connection.server
        with contextlib.suppress(OSError):
            # After the end of the client's side replies are still read: the server's end shows that it has executed
            # everything.
            while (chunk := source.recv(1 << 16)) and not (connection.dead and side == "request"):
                with self.changed:
                    steps = [] if connection.dead else connection.verdict(side, chunk, self._armed)
                    self.changed.notify_all()
                self._perform(connection, side, steps)
            if not connection.dead and (rest := connection.framers[side].take()):
                self._send(connection, side, rest)
        if side == "reply":
            self._end(connection, reset=False)
        self._retire(connection, side)

    def _perform(self, connection: ProxyConnection, side: Side, steps: Sequence[Step]) -> None:
        for step in _merged(steps):
            if connection.dead:
                return
            if isinstance(step, bytes):
                self._send(connection, side, step)
            elif isinstance(step, Close):
                self._end(connection, step.reset)
            elif isinstance(step, Held):
                self._hold(connection, side, step.armed)
            elif isinstance(step, Pause):
                with self.changed:
                    self.changed.wait_for(lambda: connection.dead, step.seconds)

    def _hold(self, connection: ProxyConnection, side: Side, armed: Armed) -> None:
        with self.changed:
            connection.held.add(side)
            self.changed.notify_all()
            self.changed.wait_for(lambda: armed.resumed or connection.dead)
            connection.held.discard(side)
            self.changed.notify_all()

    def _send(self, connection: ProxyConnection, side: Side, data: bytes) -> None:
        if side == "request":
            with connection.locks["request"]:
                connection.server.sendall(data)
                self._note(
                    data, connection.requests, self.requests
                )  # after the send, so that a test that sees the note may cut the connection
            return
        with connection.locks["request"]:
            pass  # so that a client that receives a reply finds its request noted
        with connection.locks["reply"]:
            # before the send, so that a client that receives a reply finds it noted
            self._note(data, connection.replies)
            connection.client.sendall(data)

    def _note(self, data: bytes, *books: bytearray) -> None:
        with self.changed:
            for book in books:
                book.extend(data)
            self.changed.notify_all()

    def _end(self, connection: ProxyConnection, reset: bool) -> None:
        """End the client's side; towards the server only our direction, so that the server executes what it was
        sent. A connection that is dead has ended: whoever finds it so, need not wait for another thread."""
        with self.changed:
            if connection.dead:
                return
            connection.dead = True
            with contextlib.suppress(OSError):
                if reset and connection.client.family != socket.AF_UNIX:
                    # shutdown() would send the FIN of an orderly end: wake our reader only, its close() sends the RST.
                    connection.client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    connection.client.shutdown(socket.SHUT_RD)
                else:
                    connection.client.shutdown(socket.SHUT_RDWR)
            with contextlib.suppress(OSError):
                connection.server.shutdown(socket.SHUT_WR)
            self.changed.notify_all()

    def _retire(self, connection: ProxyConnection, side: Side) -> None:
        """The last act of a pump thread: pass the end on, close what nobody reads any more."""
        with contextlib.suppress(OSError):
            if side == "request":
                connection.server.shutdown(socket.SHUT_WR)
        with self.changed:
            connection.pumps -= 1
            if connection.pumps == 0 or (connection.dead and side == "request"):
                connection.client.close()
            if connection.pumps == 0:
                connection.server.close()
            connection.done = connection.done or side == "reply"
            self.changed.notify_all()


def _matcher(
    command: str | None, after: bytes | Callable[[bytes], bool] | None, on_push: bytes | None
) -> Callable[[bytes], bool]:
    if command is not None:
        first = command.upper().encode()
        return lambda frame: [word.upper() for word in resp.words(frame)[:1]] == [first]
    if callable(after):
        return after
    wanted = on_push if on_push is not None else after
    return lambda frame: wanted is None or wanted in frame


def _merged(steps: Sequence[Step]) -> Iterator[Step]:
    """Join neighbouring bytes into one write, as they came: splitting would hide how a client reads many frames at
    once."""
    pending: list[bytes] = []
    for step in steps:
        if isinstance(step, bytes):
            pending.append(step)
            continue
        if pending:
            yield b"".join(pending)
            pending.clear()
        yield step
    if pending:
        yield b"".join(pending)


def _connect(url: str) -> socket.socket:
    parts = urlsplit(url)
    if parts.scheme == "unix":
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            server.connect(unquote(parts.path))
        except OSError:
            server.close()
            raise
        return server
    server = socket.create_connection((parts.hostname, parts.port or 6379), timeout=5)
    server.settimeout(None)
    server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return server
