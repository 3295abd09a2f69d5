"""Bytes: how a connection ends, and how to tell that from what a signal's handler raises in the middle of it.

Never here: what to do about either.
"""

from __future__ import annotations

import functools
import inspect
import signal
import ssl
import threading
import traceback

# `signal.getsignal` makes an enum of what this finds, and swallows a ValueError that another handler raises meanwhile.
from _signal import getsignal  # type: ignore[import-not-found]
from types import CodeType, FrameType
from typing import Any


class Broken(OSError):
    """A connection is of no use any more: a system call failed, or the server went away. Nothing else is taken for
    that: a signal's handler may raise an OSError of its own in the middle of a system call."""


class NoReply(Broken, TimeoutError):
    """The server said, or took, nothing in time."""


class UnsolicitedData(Broken):
    """Bytes, or the end, lay on an idle connection: it is of no use, and nothing was sent on it."""


def broken(error: OSError) -> Broken:
    """What a system call raised, as an error of the connection."""
    late = isinstance(error, TimeoutError)
    made = (NoReply if late else Broken)(str(error) or ("timed out" if late else type(error).__name__))
    made.errno = error.errno
    return made


def by_handler(error: BaseException) -> bool:
    """Whether a signal's handler raised this, or what it called: Python calls a handler, in the main thread, with the
    frame that it interrupted, which nothing else gets that raises errors. Where an error was made does not tell: a
    handler may use sockets and locks itself, and wrappers of sockets and of TLS may raise errors of theirs."""
    trace = error.__traceback__
    if trace is None or trace.tb_next is None:  # raised where it was caught, as nearly all are
        return False
    if threading.get_ident() != threading.main_thread().ident:
        return False
    # Not the frame that caught it: until Python 3.13 one whose variables were read keeps them, here the error and by
    # that itself, and with them a socket stays open until the next collection.
    frames = [frame for frame, _ in traceback.walk_tb(trace.tb_next) if frame.f_code.co_filename != ssl.__file__]
    if not frames:  # as each read of a connection with TLS that finds nothing yet
        return False
    return any(map(_given_a_frame, frames)) or not _codes().isdisjoint(frame.f_code for frame in frames)


def _codes() -> set[CodeType]:
    """Of the handlers that are set now: they may have dropped their frame, as who keeps an exception should."""
    found: set[Any] = set()
    for number in range(1, signal.NSIG):
        handler: Any = getsignal(number)
        while isinstance(handler, functools.partial):
            handler = handler.func
        if callable(handler):
            called = handler if hasattr(handler, "__code__") else getattr(type(handler), "__call__", None)  # noqa: B004
            found.add(getattr(getattr(handler, "__func__", called), "__code__", None))
    return found - {None}


def _given_a_frame(frame: FrameType) -> bool:
    """As a positional argument, or one of `*args`."""
    code, values = frame.f_code, frame.f_locals
    given = [values.get(name) for name in code.co_varnames[: code.co_argcount]]
    if code.co_flags & inspect.CO_VARARGS:
        given += values.get(code.co_varnames[code.co_argcount + code.co_kwonlyargcount], ())
    return any(isinstance(value, FrameType) for value in given)
