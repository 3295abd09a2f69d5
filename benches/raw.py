"""A bare blocking socket: the raw round trip beside the table, and bulk keys for the ceiling.

Law: no client library, no TLS: what is measured here is the socket and the scheduler. Who opens it asks ``reachable``
first.
"""

from __future__ import annotations

import socket
from array import array
from collections.abc import Sequence
from time import perf_counter_ns as clock
from typing import Any
from urllib.parse import urlsplit

from redis.connection import parse_url

from .rivals import redis_url

TIMEOUT = 30.0
"""Seconds after which a silent server is given up."""


def address(url: str) -> dict[str, Any]:
    """The parts of the URL: ``path`` of a unix socket, or ``host`` and ``port``; ``db``, ``username``, ``password``."""
    parts: dict[str, Any] = dict(parse_url(redis_url(url)))  # type: ignore[no-untyped-call]
    return parts if "path" in parts else {"host": "localhost", "port": 6379, **parts}


def reachable(url: str) -> bool:
    """Whether a bare socket can talk to that server: no TLS, no password (which a command line would show to all)."""
    return urlsplit(url).scheme not in ("rediss", "valkeys") and not address(url).get("password")


def encode(*args: bytes) -> bytes:
    """One command."""
    return b"*%d\r\n" % len(args) + b"".join([b"$%d\r\n%b\r\n" % (len(arg), arg) for arg in args])


class RawSocket:
    """A connection without any library. Only for commands whose reply is one line."""

    def __init__(self, url: str) -> None:
        where = address(url)
        if "path" in where:
            self._sock = socket.socket(socket.AF_UNIX)
            self._sock.settimeout(TIMEOUT)
            self._sock.connect(where["path"])
        else:
            self._sock = socket.create_connection((where["host"], where["port"]), timeout=TIMEOUT)
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if database := where.get("db"):
            self.call(encode(b"SELECT", b"%d" % database), 1)

    def call(self, commands: bytes, replies: int) -> None:
        """Send, and read as many one-line replies. Raises RuntimeError on an error reply, EOFError at the end."""
        self._sock.sendall(commands)
        while replies:
            data = self._sock.recv(65536)
            if not data:
                raise EOFError("the server closed the connection")
            if data.startswith(b"-") or b"\n-" in data:
                raise RuntimeError(f"the server answers {data!r:.120}")
            replies -= data.count(b"\n")

    def ping_pairs(self, seconds: float) -> array[int]:
        """Two round trips at a time, for so long: nanoseconds of each pair. The socket blocks in the kernel."""
        self._sock.settimeout(None)  # with a timeout Python polls before each recv: one system call more
        ping, send, recv, laps = encode(b"PING"), self._sock.send, self._sock.recv, array("q")
        last = clock()
        end = last + int(seconds * 1e9)
        while last < end:
            send(ping)
            recv(64)
            send(ping)
            recv(64)
            now = clock()
            laps.append(now - last)
            last = now
        self._sock.settimeout(TIMEOUT)
        return laps

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()


def numbered(prefix: str, count: int) -> Sequence[bytes]:
    """Keys as redis-benchmark makes them out of ``__rand_int__``: twelve digits."""
    head = prefix.encode()
    return [b"%b%012d" % (head, number) for number in range(count)]


def fill(sock: RawSocket, keys: Sequence[bytes], token: bytes, milliseconds: int) -> None:
    """Give every key the same value and a lease."""
    lease, step = b"%d" % milliseconds, 1000
    for start in range(0, len(keys), step):
        chunk = keys[start : start + step]
        sock.call(b"".join([encode(b"SET", key, token, b"PX", lease) for key in chunk]), len(chunk))


def remove(sock: RawSocket, keys: Sequence[bytes]) -> None:
    """Remove every key, there or not."""
    step = 1000
    for start in range(0, len(keys), step):
        sock.call(encode(b"UNLINK", *keys[start : start + step]), 1)
