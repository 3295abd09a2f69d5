"""TLS in front of a server: ends it, and relays the plain bytes to a unix socket. Certificates of the test's own."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

import trustme

_CHUNK = 65536
_TIMEOUT = 10.0


class Authority:
    """A certificate authority that nobody knows, and a certificate of it for some host names."""

    def __init__(self, folder: Path, *hosts: str) -> None:
        authority = trustme.CA()
        self.file = str(folder / "ca.pem")
        authority.cert_pem.write_to_path(self.file)
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert(*hosts).configure_cert(self.context)


class TlsFront:
    """Listens on a free port of 127.0.0.1. `records`: bytes in one write to the client, so how TLS splits replies."""

    def __init__(self, authority: Authority, path: str, *, records: int = _CHUNK) -> None:
        self._authority = authority
        self._path = path
        self._records = records
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._ending, self._end = socket.socketpair()  # readable at the end, for every thread
        self._threads = [threading.Thread(target=self._accept, name="tls front")]
        self.accepted = 0

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.close()
        for thread in self._threads:
            thread.join(2 * _TIMEOUT)
            assert not thread.is_alive()
        self._listener.close()
        self._ending.close()

    def _accept(self) -> None:
        while self._ending not in select.select([self._listener, self._ending], [], [])[0]:
            client, _ = self._listener.accept()
            self.accepted += 1
            thread = threading.Thread(target=self._serve, args=(client,), name="tls connection")
            self._threads.append(thread)
            thread.start()

    def _serve(self, client: socket.socket) -> None:
        client.settimeout(_TIMEOUT)
        # the suppressed error may be a failed handshake
        with client, socket.socket(socket.AF_UNIX) as server, contextlib.suppress(OSError):
            server.connect(self._path)
            with self._authority.context.wrap_socket(client, server_side=True) as tls:
                self._relay(tls, server)

    def _relay(self, tls: ssl.SSLSocket, server: socket.socket) -> None:
        while True:
            ready = [tls] if tls.pending() else select.select([tls, server, self._ending], [], [])[0]
            if self._ending in ready:
                return
            source = tls if tls in ready else server
            if not (data := source.recv(_CHUNK)):
                return
            if source is tls:
                server.sendall(data)
                continue
            for start in range(0, len(data), self._records):
                tls.sendall(data[start : start + self._records])
