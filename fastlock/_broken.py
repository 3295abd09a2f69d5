"""Bytes: how a connection ends, and how to tell that from what a signal's handler raises in the middle of it.

Never here: what to do about either.
"""

from __future__ import annotations

import threading

# Modules whose frames make system calls for a connection
_CALLERS = frozenset(("fastlock._fallback", "fastlock._wire", "fastlock._sockets", "socket", "ssl"))
_GREEN = ("gevent.", "eventlet.")  # and their stand-ins for `ssl`


class Broken(OSError):
    """A connection is of no use any more: a system call failed, or the server went away. Nothing else is taken for
    that: a signal's handler may raise an OSError of its own in the middle of a system call."""


class NoReply(Broken, TimeoutError):
    """The server said, or took, nothing in time."""


class Unasked(Broken):
    """Bytes, or the end, lay on an idle connection: it is of no use, and nothing was sent on it."""


def broken(error: OSError) -> Broken:
    """What a system call raised, as an error of the connection."""
    made = (NoReply if isinstance(error, TimeoutError) else Broken)(str(error) or type(error).__name__)
    made.errno = error.errno
    return made


def by_handler(error: BaseException) -> bool:
    """Whether a signal's handler raised this: it runs in the main thread, and its traceback ends in the handler, where
    that of a system call ends in the frame that made it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    module = "" if trace is None else str(trace.tb_frame.f_globals.get("__name__"))
    if trace is None or module in _CALLERS or module.startswith(_GREEN):
        return False
    return threading.get_ident() == threading.main_thread().ident
