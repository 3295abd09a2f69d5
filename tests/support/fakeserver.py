"""A server that sends what a test tells it: a believable handshake, then scripted replies, however broken.

For replies that no real server gives. Whatever a real server can be made to send is tested against a real one.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Literal

from support import resp
from support.listener import Listener

CLOSE: Literal["close"] = "close"
SILENCE: Literal["silence"] = "silence"
Words = list[bytes]
# bytes: sent as they are. tuple: sent one by one. CLOSE: the connection ends. SILENCE: no answer. callable: called.
Reply = bytes | tuple[bytes, ...] | Literal["close", "silence"] | Callable[[Words], bytes]


class FakeServer:
    """Answers the handshake as `kind` `version` would; every other command takes the next of `replies`.

    replies: see Reply; when they run out, commands get SILENCE and are kept in `unexpected`.
    handshake: more or other answers of the handshake table, by the first word or two, as "CLIENT ID"; they never run
    out.
    commands: all that came, as words. Connections share the replies.
    """

    def __init__(
        self,
        replies: Iterable[Reply] = (),
        *,
        kind: Literal["redis", "valkey"] = "redis",
        version: str = "7.0.15",
        tcp: bool = False,
        handshake: Mapping[str, Reply] | None = None,
    ) -> None:
        self.changed = threading.Condition()
        self.commands: list[Words] = []
        self.unexpected: list[Words] = []
        self.accepted = 0
        self._kind, self._version = kind, version
        self._replies = deque(replies)
        self._handshake = {key.upper().encode(): reply for key, reply in (handshake or {}).items()}
        self._ids = itertools.count(1)
        self._connections: list[tuple[socket.socket, threading.Thread]] = []
        self._listener = Listener(self._connected, tcp=tcp)
        self.url = self._listener.place()

    def greeted(self, calls: Iterable[tuple[bytes, ...]]) -> bytes:
        """What the server answers to these commands of a handshake, as a stream."""
        return b"".join(self._choose(list(words), 1) for words in calls)  # type: ignore[misc]

    def say(self, *replies: Reply) -> None:
        """Add replies to the script."""
        with self.changed:
            self._replies.extend(replies)

    def send(self, data: bytes) -> None:
        """Send bytes to every connected client without a request."""
        for connection, _ in list(self._connections):
            with contextlib.suppress(OSError):
                connection.sendall(data)

    def wait_for(self, predicate: Callable[[FakeServer], object], timeout: float = 10.0) -> None:
        """Return when `predicate(server)` is true, checked after each command. AssertionError after the timeout."""
        with self.changed:
            if not self.changed.wait_for(lambda: predicate(self), timeout):
                raise AssertionError(f"the predicate was not true within {timeout:g} s; commands: {self.commands}")

    def close(self) -> None:
        """End all connections and wait for the threads."""
        self._listener.close()
        for connection, thread in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            thread.join(5)
            assert not thread.is_alive(), "a connection of the fake server hangs"

    def __enter__(self) -> FakeServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _connected(self, connection: socket.socket) -> None:
        number = next(self._ids)
        thread = threading.Thread(target=self._serve, args=(connection, number), name="fake-server", daemon=True)
        self._connections.append((connection, thread))
        with self.changed:
            self.accepted += 1
            self.changed.notify_all()
        thread.start()

    def _serve(self, connection: socket.socket, number: int) -> None:
        framer = resp.Framer(resp.command_end)
        with connection, contextlib.suppress(OSError):
            while chunk := connection.recv(1 << 16):
                for frame in framer.feed(chunk):
                    reply = self._choose(resp.words(frame), number)
                    if reply == CLOSE:
                        return
                    for piece in () if reply == SILENCE else reply if isinstance(reply, tuple) else (reply,):
                        connection.sendall(piece)  # type: ignore[arg-type]

    def _choose(self, words: Words, number: int) -> Reply:
        with self.changed:
            self.commands.append(words)
            self.changed.notify_all()
            reply = self._table(words, number)
            if reply is None:
                if not self._replies:
                    self.unexpected.append(words)
                    return SILENCE
                reply = self._replies.popleft()
        return reply(words) if callable(reply) else reply

    def _table(self, words: Words, number: int) -> Reply | None:
        """A real server's answer to a command that clients send when they connect; None: another command."""
        upper = [word.upper() for word in words]
        for key in (b" ".join(upper[:2]), upper[0]):
            if key in self._handshake:
                return self._handshake[key]
        match upper:
            case [b"HELLO", *rest]:
                return self._hello(number, 3 if rest[:1] == [b"3"] else 2)
            case [b"CLIENT", b"ID"]:
                return b":%d\r\n" % number
            case [b"CLIENT", b"KILL", *_]:
                return b":0\r\n"
            case [b"AUTH" | b"SELECT" | b"CLIENT", *_]:
                return b"+OK\r\n"
            case [b"PING"]:
                return b"+PONG\r\n"
            case [b"SUBSCRIBE" | b"SSUBSCRIBE", *_]:
                return b"".join(
                    b">3\r\n" + _bulk(words[0].lower()) + _bulk(name) + b":%d\r\n" % count
                    for count, name in enumerate(words[1:], 1)
                )
            case [b"SCRIPT", b"LOAD", _]:
                return _bulk(hashlib.sha1(words[2]).hexdigest().encode())
            case [b"COMMAND", b"INFO", *names]:
                return b"*%d\r\n" % len(names) + b"_\r\n" * len(names)
            case [b"INFO", *_]:
                return _bulk(b"# Server\r\nrun_id:%040d\r\n" % id(self))
            case [b"CONFIG", b"GET", *_]:
                return b"%1\r\n" + _bulk(b"maxmemory-policy") + _bulk(b"noeviction")
        return None

    def _hello(self, number: int, protocol: int) -> bytes:
        fields = [
            (b"server", _bulk(self._kind.encode())), (b"version", _bulk(self._version.encode())),
            (b"proto", b":%d\r\n" % protocol), (b"id", b":%d\r\n" % number), (b"mode", _bulk(b"standalone")),
            (b"role", _bulk(b"master")), (b"modules", b"*0\r\n"),
        ]  # fmt: skip
        head = b"%%%d\r\n" % len(fields) if protocol == 3 else b"*%d\r\n" % (2 * len(fields))
        return head + b"".join(_bulk(name) + value for name, value in fields)


def _bulk(value: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(value), value)
