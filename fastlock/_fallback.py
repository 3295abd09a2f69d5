"""The core in Python: the same names, parameters and behaviour as `_core.pyx`, which says what may live here.

Used where the compiled core is not there, or by FASTLOCK_IMPL=python. Its parts are the modules imported below.
"""

from __future__ import annotations

from fastlock._limits import (
    MAX_DEPTH,
    MAX_DROPPED,
    MAX_FRAME,
    MAX_ITEMS,
    MAX_LONG_ITEMS,
    MAX_LONG_REPLY,
    MAX_REPLY,
    SCRIPT_NAMES,
)
from fastlock._native import RLock
from fastlock._socket_stream import BUSY, SocketStream
from fastlock._stream import PendingReply, Stream, Template
from fastlock._task_stream import TaskStream

__all__ = [
    "BUILD",
    "BUSY",
    "IMPLEMENTATION",
    "MAX_DEPTH",
    "MAX_DROPPED",
    "MAX_FRAME",
    "MAX_ITEMS",
    "MAX_LONG_ITEMS",
    "MAX_LONG_REPLY",
    "MAX_REPLY",
    "SCRIPT_NAMES",
    "SOURCES",
    "Mutex",
    "PendingReply",
    "SocketStream",
    "Stream",
    "TaskStream",
    "Template",
]

IMPLEMENTATION = "python"
BUILD = "release"
SOURCES = ""


class Mutex(RLock):  # type: ignore[misc]
    """The mutex of a client's local queues: its own thread may acquire it again."""

    __slots__ = ()

    def mine(self) -> bool:
        """Whether the calling thread holds the mutex."""
        return bool(self._is_owned())
