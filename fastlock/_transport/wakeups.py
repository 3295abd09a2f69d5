"""What tasks wait for, and how tasks whose wait has ended are woken: many in one callback of their event loop.

To a task a `Wakeup` is a future (asyncio calls what has these methods future-compatible). Each future of asyncio's own
takes a callback to wake its task, which costs as much as the rest of a handover; and where one lock goes from task to
task, an iteration of the loop. Never here: commands, locks.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable, Generator
from typing import Any, Self

MAX_WAKEUPS = 32  # tasks woken in one callback, where each that wakes ends the wait of the next


class WakeupQueue:
    """The wakeups of one event loop whose wait has ended, in order."""

    __slots__ = ("due", "loop", "resolved", "scheduled")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.due: deque[Wakeup] = deque()
        self.scheduled: asyncio.Handle | None = None  # by which the loop is going to call `run`
        self.resolved = loop.create_future()
        self.resolved.set_result(None)

    def add(self, wakeup: Wakeup) -> None:
        try:
            self.due.append(wakeup)
            if self.scheduled is None:
                self.scheduled = self.loop.call_soon(self.run)
        except BaseException:  # a signal handler raised; to run twice does no harm
            self.reschedule()
            raise

    def reschedule(self) -> None:
        """Schedule `run` again, if wakeups are due: the loop forgets a callback where a signal handler raises in it."""
        if self.due:
            self.scheduled = self.loop.call_soon(self.run)

    def run(self) -> None:
        """Wake the tasks that are due, and of those that become due meanwhile as many as make MAX_WAKEUPS in all."""
        self.scheduled = None
        wakeup: Wakeup | None = None
        try:
            if len(self.due) > 1:  # the first task may run a loop within the loop, in which the others wake
                self.scheduled = self.loop.call_soon(self.run)
            for _ in range(max(len(self.due), MAX_WAKEUPS)):
                if not self.due:
                    break
                wakeup = self.due[0]
                self.due.popleft()
                wakeup.run_callback()
        except BaseException:  # a signal handler raised: nothing else would wake this task
            if wakeup is not None and wakeup.callback is not None:
                self.due.appendleft(wakeup)
            if self.scheduled is None:
                self.reschedule()
            raise
        scheduled = self.scheduled
        if not self.due and scheduled is not None:  # the next wakeup gets a new callback, behind the flush of this tick
            self.scheduled = None  # first: a signal handler may add a wakeup while this is cancelled
            scheduled.cancel()


class Wakeup:
    """What a task awaits: as a pending reply, a reply; as a waiter's `on_wake`, to be woken."""

    __slots__ = ("answer", "blocking", "callback", "context", "ready", "wakeups")

    def arm(self, wakeups: WakeupQueue) -> Self:
        """Begin to wait, for the first time or again."""
        self.wakeups = wakeups
        self.answer: Any = None
        self.ready = False
        self.blocking = False
        self.callback: Callable[[Any], object] | None = None
        self.context: Any = None
        return self

    def done(self) -> bool:
        return self.ready

    def set_result(self, answer: Any) -> None:
        self.answer = answer
        self.ready = True
        if self.callback is not None:
            self.wakeups.add(self)

    def set_result_once(self, answer: Any) -> None:
        """Set the answer, unless there is one: then add it to be woken, as the caller that set the answer may have been
        interrupted before that."""
        if not self.ready:
            self.set_result(answer)
        elif self.callback is not None:
            self.wakeups.add(self)

    def __call__(self, answer: Any) -> None:
        self.set_result_once(answer)

    def run_callback(self) -> None:
        if not self.ready:  # it was added twice, and waits for something else by now
            return
        # A task reads the result of what it is woken with, and ignores it; that of a real future without a call
        resolved_ = self if type(self.answer) is asyncio.CancelledError else self.wakeups.resolved
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

    def cancel(self, msg: Any = None) -> bool:
        if self.ready:
            if self.callback is not None:  # what set the answer may have been interrupted before it added this
                self.wakeups.add(self)
            return False
        self.set_result(asyncio.CancelledError() if msg is None else asyncio.CancelledError(msg))
        return True

    def result(self) -> Any:
        if type(self.answer) is asyncio.CancelledError:
            raise asyncio.CancelledError(*self.answer.args)  # a new one: a raised error keeps the frames it passed
        return self.answer

    def __await__(self) -> Generator[Any, None, Any]:
        if not self.ready:
            self.blocking = True
            yield self
            if not self.ready:
                raise RuntimeError("it is being awaited already")
        return self.result()
