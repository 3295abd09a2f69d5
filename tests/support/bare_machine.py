"""Run a program for which redis://localhost:6379/0 is a real server, without touching port 6379 of this machine.

    python bare_machine.py server-binary program.py     in a network namespace of its own: a server listens on that port
    python bare_machine.py 41234 program.py             anywhere: connections to port 6379 go to port 41234 instead

The first form changes nothing that the program sees; `namespace` is the command that creates such a namespace, which
needs no privileges, but not every system allows it. The second form replaces one number in `socket.connect`. Prints
nothing; exits as the program does, or with KEYS_LEFT if the program left keys.
"""

from __future__ import annotations

import _socket
import contextlib
import fcntl
import functools
import runpy
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import redis

PORT = 6379
KEYS_LEFT = 77
_UP = 0x1
_SIOCGIFFLAGS, _SIOCSIFFLAGS = 0x8913, 0x8914


def namespace() -> list[str]:
    """The command to put before one that needs a network and processes of its own; [] where namespaces are not
    allowed."""
    command = ["unshare", "--user", "--map-root-user", "--net", "--pid", "--fork", "--kill-child"]
    try:
        done = subprocess.run([*command, "true"], stdin=subprocess.DEVNULL, capture_output=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return command if done.returncode == 0 else []


def loopback() -> None:
    """Bring the loopback interface up, which is down in a new network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        name, flags = struct.unpack("16sh", fcntl.ioctl(sock, _SIOCGIFFLAGS, struct.pack("16sh", b"lo", 0)))
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sh", name, flags | _UP))


@contextlib.contextmanager
def serving(binary: str) -> Iterator[None]:
    """A server on port 6379; it dies with the namespace if this process is killed."""
    options = ["--port", str(PORT), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    with subprocess.Popen([binary, *options], stdout=subprocess.DEVNULL) as server:
        deadline = time.monotonic() + 10
        while True:
            try:
                socket.create_connection(("127.0.0.1", PORT)).close()
                break
            except ConnectionRefusedError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.005)
        try:
            yield
        finally:
            server.kill()


def redirect(port: int) -> None:
    """Have connections to port 6379 of this machine go to another port of it."""

    def connect(self: Any, address: object, to: Any) -> Any:
        if isinstance(address, tuple) and address[0] in ("127.0.0.1", "::1", "localhost") and address[1] == PORT:
            if self.family != socket.AF_INET:
                raise ConnectionRefusedError("the server of the tests listens on 127.0.0.1 only")
            address = ("127.0.0.1", port)
        return to(self, address)

    names = "connect", "connect_ex"
    changed = {name: functools.partialmethod(connect, to=getattr(socket.socket, name)) for name in names}
    for name in names:
        setattr(socket.socket, name, changed[name])
    _socket.socket = type("socket", (_socket.socket,), changed)  # type: ignore[misc]  # the class that fastlock uses for threads


def main(where: str, program: str) -> int:
    with contextlib.ExitStack() as stack:
        if where.isdigit():
            redirect(int(where))
            runpy.run_path(program, run_name="__main__")
        else:
            loopback()
            stack.enter_context(serving(where))
            if code := subprocess.run([sys.executable, program]).returncode:
                return code
        with redis.Redis() as probe:
            kept = (b"fastlock:fence", b"fastlock:every")  # on purpose, for a while
            left = [key for key in probe.scan_iter() if not key.startswith(kept)]
            return KEYS_LEFT if left else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
