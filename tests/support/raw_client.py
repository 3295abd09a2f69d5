"""A raw client for tests of what stands between clients and servers: it sends and receives bytes, no more."""

from __future__ import annotations

import contextlib
import socket
from urllib.parse import urlsplit


class RawClient:
    """A raw client: sends bytes, receives bytes."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme == "unix":
            with contextlib.ExitStack() as undo:
                self.socket = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                self.socket.connect(parts.path)
                undo.pop_all()
        else:
            self.socket = socket.create_connection((parts.hostname, parts.port))
        self.socket.settimeout(20)

    def send(self, *data: bytes) -> None:
        self.socket.sendall(b"".join(data))

    def receive(self, count: int) -> bytes:
        """Exactly so many bytes, or fewer if the connection ends first."""
        received = b""
        while len(received) < count and (chunk := self.socket.recv(count - len(received))):
            received += chunk
        return received

    def receive_end(self) -> bytes:
        """All bytes that come until the connection ends."""
        return self.receive(1 << 20)
