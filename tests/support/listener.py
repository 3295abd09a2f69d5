"""A listening socket with a thread of its own that can refuse connections and come back at the same address.

What is done with a connection is decided elsewhere: it is handed to a callback, in the listener's thread.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable


class Listener:
    """Listens on a unix socket in a private folder, or (tcp=True) on a free port of 127.0.0.1."""

    def __init__(self, on_connection: Callable[[socket.socket], None], *, tcp: bool = False) -> None:
        self._on_connection = on_connection
        self._folder = None if tcp else tempfile.mkdtemp(prefix="fl-")
        self.path = os.path.join(self._folder, "s") if self._folder else None
        self.port = 0
        self._thread: threading.Thread | None = None
        self.admit()

    def place(self, login: str = "", database: str = "0") -> str:
        """The address as a URL. login: such as ":password@"."""
        if self.path:
            return f"unix://{login}{self.path}?db={database}"
        return f"redis://{login}127.0.0.1:{self.port}/{database}"

    def admit(self) -> None:
        """Listen (again), at the same address."""
        if self._thread is not None:
            return
        if self.path:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)
            listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listening.bind(self.path)
            listening.listen(1024)
        else:
            listening = socket.create_server(("127.0.0.1", self.port), backlog=1024)
            self.port = listening.getsockname()[1]
        self._wake, woken = socket.socketpair()
        self._thread = threading.Thread(target=self._accept, args=(listening, woken), name="listener", daemon=True)
        self._thread.start()

    def refuse(self) -> None:
        """Stop listening: clients that connect now get ECONNREFUSED. Returns when the socket is closed."""
        if self._thread is None:
            return
        self._wake.close()
        self._thread.join(5)
        assert not self._thread.is_alive(), "the listener's thread hangs in its callback"
        self._thread = None

    def close(self) -> None:
        """Stop listening for good."""
        self.refuse()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _accept(self, listening: socket.socket, woken: socket.socket) -> None:
        poller = select.poll()
        poller.register(listening, select.POLLIN)
        poller.register(woken, select.POLLIN)
        with listening, woken:
            while all(descriptor != woken.fileno() for descriptor, _ in poller.poll()):
                connection, _ = listening.accept()
                if not self.path:
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._on_connection(connection)
