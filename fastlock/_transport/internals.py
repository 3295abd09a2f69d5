"""What fastlock takes from CPython and its asyncio beyond what they promise, each beside the plain way to the same end.

The internals are used on the interpreters in TRIED. Any other one gets the plain way, which is slower, as does one that
runs with FASTLOCK_CPYTHON_INTERNALS=0. `internals.pxd` holds the part in C. No other module names an internal of
asyncio, as a test checks. Never here: which task is woken, and when.
"""

from __future__ import annotations

import asyncio
import asyncio.tasks
import contextlib
import contextvars
import functools
import inspect
import os
import socket
import sys
from collections.abc import Callable, Generator, Sequence
from typing import Any, Self, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
_CancelledError = asyncio.CancelledError  # looked up in the module of asyncio, it takes 2 % of a local handover

TRIED = ((3, 11), (3, 12), (3, 13))  # versions of CPython; a test holds this against those of the matrix
VARIABLE = "FASTLOCK_CPYTHON_INTERNALS"


def may_use(implementation: str, version: Sequence[Any], build: str, asked: str) -> bool:
    """Whether an interpreter is one that was tried, from its `sys.implementation.name`, `sys.version_info` and
    `sys.version`. asked: the value of the variable, "" or "0"; any other one raises ValueError."""
    if asked not in ("", "0"):
        raise ValueError(f"{VARIABLE} is '0' for the plain way or not set, not {asked!r}")
    tried = implementation == "cpython" and tuple(version[:2]) in TRIED and "free-threading" not in build
    return tried and not asked


USED = may_use(sys.implementation.name, sys.version_info, sys.version, os.environ.get(VARIABLE, ""))


def used() -> bool:
    """Whether the internals are used in this process. (Where this is compiled, USED is a variable of C.)"""
    return USED


# Which task runs in a loop. Until 3.12 `current_task` is a function in Python, which asks this.
running_task: Callable[[asyncio.AbstractEventLoop], Any] = (
    asyncio.tasks._current_tasks.get  # type: ignore[attr-defined]
    if USED and sys.version_info < (3, 12)
    else asyncio.current_task
)
# The running loop, or None. No internal for all its name: asyncio exports it, for those who write event loops.
running_loop = asyncio._get_running_loop


class Waker:
    """Wakes the tasks of one event loop: a `WakeupQueue`."""

    __slots__ = ("loop", "resolved")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.resolved = loop.create_future()
        self.resolved.set_result(None)

    def add(self, wakeup: Wakeup) -> None:
        """Have `wakeup.run_callback` called soon."""
        raise NotImplementedError


class Wakeup:
    """What a task awaits: as a pending reply, a reply; as a waiter's `on_wake`, to be woken.

    The task takes it for a future, which asyncio recognises by an attribute, and leaves it a callback. That is called
    at once, in no callback of the loop, with another future, which is resolved: asyncio's task reads the result of what
    it is called with, and of a real future without a call. The plain way is a real future for each wait, which
    schedules the task for the next iteration of the loop.
    """

    __slots__ = ("answer", "blocking", "callback", "context", "ready", "wakeups")

    def arm(self, wakeups: Waker) -> Self:
        """Begin to wait, for the first time or again."""
        self.wakeups = wakeups
        self.answer: Any = None
        self.ready = False
        self.blocking = False
        self.callback: Callable[[Any], object] | None = None
        self.context: Any = None
        return self

    def begin_wait(self) -> Any:
        """Begin to wait in a task; returns what that has to yield."""
        if USED:
            self.blocking = True  # as a future's own iterator does it
            return self
        future = self.wakeups.loop.create_future()
        self.add_done_callback(functools.partial(_finish, future))
        return next(future.__await__())

    def __await__(self) -> Generator[Any, None, Any]:
        if not self.ready:
            yield self.begin_wait()
            if not self.ready:
                raise RuntimeError("it is being awaited already")
        return self.result()

    def done(self) -> bool:
        return self.ready

    def set_result(self, answer: object) -> None:
        self.answer = answer
        self.ready = True
        if self.callback is not None:
            self.wakeups.add(self)

    def set_result_once(self, answer: object) -> None:
        """Set the answer, unless there is one: then add it to be woken, as the caller that set the answer may have been
        interrupted before that."""
        if not self.ready:
            self.set_result(answer)
        elif self.callback is not None:
            self.wakeups.add(self)

    def __call__(self, answer: object) -> None:
        self.set_result_once(answer)

    def run_callback(self) -> None:
        if not self.ready:  # it was added twice, and waits for something else by now
            return
        resolved_ = self if type(self.answer) is _CancelledError else self.wakeups.resolved
        context, self.context = self.context, None
        callback, self.callback = self.callback, None  # last: no signal handler runs between this and the call
        if callback is not None:
            context.run(callback, resolved_)

    # as a task sees a future

    @property
    def _asyncio_future_blocking(self) -> bool | None:
        return self.blocking or None  # None: not a future, except to the task to which it was just yielded

    @_asyncio_future_blocking.setter
    def _asyncio_future_blocking(self, blocking: bool) -> None:
        self.blocking = blocking

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self.wakeups.loop

    def add_done_callback(
        self, callback: Callable[[Any], object], *, context: contextvars.Context | None = None
    ) -> None:
        self.context = contextvars.copy_context() if context is None else context
        self.callback = callback
        if self.ready:
            self.wakeups.add(self)

    def cancel(self, msg: object = None) -> bool:
        if self.ready:
            if self.callback is not None:  # what set the answer may have been interrupted before it added this
                self.wakeups.add(self)
            return False
        self.set_result(asyncio.CancelledError() if msg is None else asyncio.CancelledError(msg))
        return True

    def result(self) -> Any:
        if type(self.answer) is _CancelledError:
            raise asyncio.CancelledError(*self.answer.args)  # a new one: a raised error keeps the frames it passed
        return self.answer


def _finish(future: asyncio.Future[None], _: Any) -> None:
    if not future.done():  # else the task was cancelled
        future.set_result(None)


def reads_at_once(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether a loop asks a BufferedProtocol for its buffer only when data is there, and then reads it at once: what is
    asked for again was then interrupted. There is no plain way to notice that, and a reply that was lost unnoticed
    would be followed by answers to the wrong tasks. So this is taken for true of asyncio's own loop on any interpreter:
    where it were not, each connection would break at its second read."""
    return isinstance(loop, asyncio.BaseEventLoop)


def abort(transport: asyncio.Transport) -> None:
    """Close a connection at once, also after its loop was closed: asyncio's transport cannot do that then. The plain
    way tells the server, and leaves the socket to the transport, which closes it with a ResourceWarning as it is
    collected."""
    try:
        transport.abort()
    except RuntimeError:
        if USED:
            sock = getattr(transport, "_sock", None)
            if sock is not None:
                sock.close()
                transport._sock = None  # type: ignore[attr-defined]
        elif (sock := transport.get_extra_info("socket")) is not None:
            with contextlib.suppress(OSError):  # the server was first
                sock.shutdown(socket.SHUT_RDWR)


def coroutine_function(function: F) -> F:
    """Mark a function as a coroutine function (FastAPI's background tasks ask), though it does something before it
    returns its coroutine. Where there is no way to do that yet it is 3.11, whose asyncio does not change any more."""
    if hasattr(inspect, "markcoroutinefunction"):
        inspect.markcoroutinefunction(function)
    else:
        function._is_coroutine = asyncio.coroutines._is_coroutine  # type: ignore[attr-defined]
    return function
