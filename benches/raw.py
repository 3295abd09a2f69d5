"""A bare blocking socket: the raw round trip beside the table, and bulk keys for the ceiling.

What lives here: what measures the socket and the scheduler only, and the socket's TLS, if the URL has it. Never here: a
client library.
"""

from __future__ import annotations

import socket
import ssl
from array import array
from time import perf_counter_ns as clock
from typing import Any
from urllib.parse import urlsplit

from redis.connection import parse_url

from .rivals import redis_url

HOST = "127.0.0.1"
"""Where a private server is reached by TCP, and a relay."""

TIMEOUT = 30.0
"""Seconds after which a server that does not answer is given up."""


def address(url: str) -> dict[str, Any]:
    """The parts of the URL: ``path`` of a unix socket, or ``host`` and ``port``; ``db``, ``username``, ``password``."""
    parts: dict[str, Any] = dict(parse_url(redis_url(url)))  # type: ignore[no-untyped-call]
    return parts if "path" in parts else {"host": "localhost", "port": 6379, **parts}


def encrypted(url: str) -> bool:
    """Whether the server is reached by TLS."""
    return urlsplit(url).scheme in ("rediss", "valkeys")


def encode(*args: bytes) -> bytes:
    """One command in RESP."""
    return b"*%d\r\n" % len(args) + b"".join([b"$%d\r\n%b\r\n" % (len(arg), arg) for arg in args])


class RawSocket:
    """A connection without any library, only for commands whose reply is one line."""

    def __init__(self, url: str) -> None:
        where = address(url)
        if "path" in where:
            self._sock = socket.socket(socket.AF_UNIX)
            self._sock.settimeout(TIMEOUT)
            self._sock.connect(where["path"])
        else:
            self._sock = socket.create_connection((where["host"], where["port"]), timeout=TIMEOUT)
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if encrypted(url):
                context = ssl.create_default_context(cafile=where.get("ssl_ca_certs"))
                self._sock = context.wrap_socket(self._sock, server_hostname=where["host"])
        if password := where.get("password"):
            login = [text.encode() for text in (where.get("username"), password) if text]
            self.call(encode(b"AUTH", *login), 1)
        if database := where.get("db"):
            self.call(encode(b"SELECT", b"%d" % database), 1)

    def call(self, commands: bytes, replies: int) -> None:
        """Send commands, and read their one-line replies. Raises RuntimeError on an error reply, EOFError if the server
        closes the connection."""
        self._sock.sendall(commands)
        while replies:
            data = self._sock.recv(65536)
            if not data:
                raise EOFError("the server closed the connection")
            if data.startswith(b"-") or b"\n-" in data:
                raise RuntimeError(f"the server answers {data!r:.120}")
            replies -= data.count(b"\n")

    def ping_pairs(self, seconds: float) -> array[int]:
        """Make pairs of round trips for ``seconds``: nanoseconds of each pair. The socket blocks in the kernel."""
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


DIGITS = 12
"""Digits of a number in a key, as redis-benchmark makes it out of ``__rand_int__``."""

STEP = 1000
"""Commands per write, or keys per command."""


def fill(sock: RawSocket, prefix: str, count: int, token: bytes, milliseconds: int) -> None:
    """Set the first ``count`` numbered keys to the same value, with a lease."""
    head, _, tail = encode(b"SET", _key(prefix), token, b"PX", b"%d" % milliseconds).partition(b"0" * DIGITS)
    for start in range(0, count, STEP):
        numbers = range(start, min(start + STEP, count))
        sock.call(b"".join([b"%b%012d%b" % (head, number, tail) for number in numbers]), len(numbers))


def remove(sock: RawSocket, prefix: str, count: int) -> None:
    """Remove the first ``count`` numbered keys, whether they exist or not."""
    start, key = b"$%d\r\n%b" % (len(_key(prefix)), prefix.encode()), b"%b%012d\r\n"
    for first in range(0, count, STEP):
        numbers = range(first, min(first + STEP, count))
        keys = b"".join([key % (start, number) for number in numbers])
        sock.call(b"*%d\r\n$6\r\nUNLINK\r\n%b" % (1 + len(numbers), keys), 1)


def _key(prefix: str) -> bytes:
    return prefix.encode() + b"0" * DIGITS
