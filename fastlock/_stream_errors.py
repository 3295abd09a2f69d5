"""The errors of a connection that broke, and of scripts; and how to tell an error that a signal handler raised
meanwhile.

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

# How the error replies begin that a script gets again: the user may not run it, or not for all of its names, or these
# are in several slots. The others pass, or go away as scripts are loaded
REFUSALS = ("NOPERM", "CROSSSLOT", "ERR")


class Broken(OSError):
    """A connection cannot be used any more: a system call failed, or the server went away. No other OSError counts as
    that: a signal handler may raise one of its own in the middle of a system call."""


class NoReply(Broken, TimeoutError):
    """The server sent nothing, or took nothing, in time."""


class UnsolicitedData(Broken):
    """Bytes, or the end of the stream, were found on an idle connection: it cannot be used, and nothing was sent."""


def broken(error: OSError) -> Broken:
    """The error of a connection for an error that a system call raised."""
    late = isinstance(error, TimeoutError)
    made = (NoReply if late else Broken)(str(error) or ("timed out" if late else type(error).__name__))
    made.errno = error.errno
    return made


def is_certificate_error(error: BaseException) -> bool:
    """Whether a connection did not come up as the server's certificate cannot be verified."""
    cause = error.__cause__ if isinstance(error, Broken) else None
    return isinstance(error, ssl.SSLCertVerificationError) or isinstance(cause, ssl.SSLCertVerificationError)


def by_handler(error: BaseException) -> bool:
    """Whether a signal handler raised this error, or something that it called. Python calls a handler in the main
    thread, with the interrupted frame as an argument, which no other function gets that raises errors. The place where
    an error was made does not tell: a handler may use sockets and locks itself, and wrappers of sockets and of TLS may
    raise errors of their own."""
    trace = error.__traceback__
    if trace is None or trace.tb_next is None:  # raised where it was caught, as nearly all are
        return False
    if threading.get_ident() != threading.main_thread().ident:
        return False
    # Without the frame that caught the error: until Python 3.13 a frame whose variables were read keeps them alive,
    # here the error, and by that itself; so a socket would stay open until the next garbage collection.
    frames = [frame for frame, _ in traceback.walk_tb(trace.tb_next) if frame.f_code.co_filename != ssl.__file__]
    if not frames:  # as for each read of a TLS connection that finds nothing yet
        return False
    return any(map(_given_a_frame, frames)) or not _codes().isdisjoint(frame.f_code for frame in frames)


def _codes() -> set[CodeType]:
    """The code objects of the signal handlers that are set now: a handler may have deleted its frame argument, as code
    that keeps an exception should."""
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
    """Whether the function of this frame got a frame, as a positional argument or one of `*args`."""
    code, values = frame.f_code, frame.f_locals
    given = [values.get(name) for name in code.co_varnames[: code.co_argcount]]
    if code.co_flags & inspect.CO_VARARGS:
        given += values.get(code.co_varnames[code.co_argcount + code.co_kwonlyargcount], ())
    return any(isinstance(value, FrameType) for value in given)
