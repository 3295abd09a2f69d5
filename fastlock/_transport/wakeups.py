"""How tasks whose wait has ended are woken: many in one callback of their event loop.

What a task awaits is a `Wakeup`, to the task a future (`internals.py`). Each future of asyncio's own takes a callback
to wake its task, which costs as much as the rest of a handover; and where one lock goes from task to task, an iteration
of the loop. Never here: commands, locks.
"""

from __future__ import annotations

import asyncio
from collections import deque

from fastlock._transport.internals import Waker, Wakeup

MAX_WAKEUPS = 32  # tasks woken in one callback, where each that wakes ends the wait of the next


class WakeupQueue(Waker):
    """The wakeups of one event loop whose wait has ended, in order."""

    __slots__ = ("due", "scheduled")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self.due: deque[Wakeup] = deque()
        self.scheduled: asyncio.Handle | None = None  # by which the loop is going to call `run`

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
