"""Who this process is, as its connections tell the server, and which processes are connected, as that tells others.

Each token begins with the id of the process that made it. Each connection tells the server that id, with the host and
the number of the process: as the client's name, unless the user gave it one, and as the name of its library. Never
here: I/O, what the server knows of a lock.
"""

from __future__ import annotations

import os
import platform
import re
from typing import NamedTuple

from fastlock._protocol.lease import ID_DIGITS, process_id

LONGEST_HOST = 64  # characters, as in Linux: longer ones are cut off
_TOLD = re.compile(rb"=fastlock\(([0-9a-f]{%d}):(\d{1,10})@([\w.-]*)\)" % ID_DIGITS)


class Process(NamedTuple):
    """A process that is connected to the server, as it says itself."""

    host: str
    pid: int


def told() -> bytes:
    """What a connection tells the server of this process. Only characters that every server takes."""
    host = re.sub(r"[^A-Za-z0-9_.-]", "_", platform.node())[:LONGEST_HOST]
    return b"fastlock(%s:%d@%s)" % (process_id(), os.getpid(), host.encode())


class Processes(NamedTuple):
    """The processes that are connected to the server, by id. complete: whether these are all: before Redis 7.2 a client
    to which the user gave a name does not tell its process."""

    by_id: dict[str, Process]
    complete: bool


def read_clients(clients: bytes) -> Processes:
    """The processes, from the server's reply to CLIENT LIST."""
    found = {told[1].decode(): Process(told[3].decode(), int(told[2])) for told in _TOLD.finditer(clients)}
    return Processes(found, b" lib-name=" in clients)
