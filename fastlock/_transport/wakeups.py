"""Wire: what tasks wait for, and how those whose wait is over are woken: many in one callback of their event loop.

To a task a `Wakeup` is a future (asyncio calls what has these methods future-compatible). A future of asyncio's own is
woken by a callback each, which costs a handover as much as all the rest of it; and where one lock goes from task to
task, by an iteration of the loop each. Never here: commands, locks.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable, Generator
from typing import Any, Self

MAX_WAKEUPS = 32  # woken in one callback, where each that wakes ends the wait of the next


class WakeupQueue:
    """Those of one event loop whose wait is over, in order."""

    __slots__ = ("due", "loop", "resolved", "scheduled")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.due: deque[Wakeup] = deque()
        self.scheduled: asyncio.Handle | None = None  # by which the loop is going to run it
        self.resolved = loop.create_future()
        self.resolved.set_result(None)

    def add(self, wakeup: Wakeup) -> None:
        try:
            self.due.append(wakeup)
            if self.scheduled is None:
                self.scheduled = self.loop.call_soon(self.run)
        except BaseException:  # a handler of signals raised; to be run once more does no harm
            self.reschedule()
            raise

    def reschedule(self) -> None:
        """Whoever was to be woken by now still is: ask the loop once more, which forgets as a handler of signals raises
        in it."""
        if self.due:
            self.scheduled = self.loop.call_soon(self.run)

    def run(self) -> None:
        """Wake those who are here, and up to a crowd of those who come meanwhile."""
        self.scheduled = None
        wakeup: Wakeup | None = None
        try:
            if len(self.due) > 1:  # and a task begins a loop within the loop
                self.scheduled = self.loop.call_soon(self.run)
            for _ in range(max(len(self.due), MAX_WAKEUPS)):
                if not self.due:
                    break
                wakeup = self.due[0]
                self.due.popleft()
                wakeup.run_callback()
        except BaseException:  # a handler of signals raised: nobody else would wake it
            if wakeup is not None and wakeup.callback is not None:
                self.due.appendleft(wakeup)
            if self.scheduled is None:
                self.reschedule()
            raise
        scheduled = self.scheduled
        if not self.due and scheduled is not None:  # who comes next is woken after what was to be sent by then
            self.scheduled = None  # first: a handler of signals may add one while that is cancelled
            scheduled.cancel()


class Wakeup:
    """What a task waits for, once it has begun. As a slot: for a reply; as a waiter's `wake`: for its call."""

    __slots__ = ("answer", "blocking", "callback", "context", "ready", "wakeups")

    def arm(self, wakeups: WakeupQueue) -> Self:
        """Wait, for the first time or once more."""
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
        """That is its answer, unless it has one; then whoever gave that may have been struck before it was to be
        woken."""
        if not self.ready:
            self.set_result(answer)
        elif self.callback is not None:
            self.wakeups.add(self)

    def __call__(self, answer: Any) -> None:
        self.set_result_once(answer)

    def run_callback(self) -> None:
        if not self.ready:  # it was to be woken twice, and waits for something else by now
            return
        # A task asks what it is woken with for its result, and throws that away; of a real future without a call
        resolved_ = self if type(self.answer) is asyncio.CancelledError else self.wakeups.resolved
        context, self.context = self.context, None
        callback, self.callback = self.callback, None  # last: no signal's handler comes between this and the call
        if callback is not None:
            context.run(callback, resolved_)

    # as a task sees a future

    @property
    def _asyncio_future_blocking(self) -> bool | None:
        return self.blocking or None  # None: no future, but for whom it was just given to, to wait for

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
            if self.callback is not None:  # whoever ended its wait may have been struck before it was to be woken
                self.wakeups.add(self)
            return False
        self.set_result(asyncio.CancelledError() if msg is None else asyncio.CancelledError(msg))
        return True

    def result(self) -> Any:
        if type(self.answer) is asyncio.CancelledError:
            raise asyncio.CancelledError(*self.answer.args)  # another: what was raised knows all that its frames did
        return self.answer

    def __await__(self) -> Generator[Any, None, Any]:
        if not self.ready:
            self.blocking = True
            yield self
            if not self.ready:
                raise RuntimeError("it is being awaited already")
        return self.result()
