"""Wire: what tasks wait for, and how those whose wait is over are woken: many in one callback of their event loop.

To a task a `Turn` is a future (asyncio calls what has these methods future-compatible). A future of asyncio's own is
woken by a callback each, which costs a handover as much as all the rest of it; and where one lock goes from task to
task, by an iteration of the loop each. Never here: commands, locks.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable, Generator
from typing import Any, Self

CROWD = 32  # woken in one callback, where each that wakes ends the wait of the next


class Turns:
    """Those of one event loop whose wait is over, in order."""

    __slots__ = ("loop", "over", "soon", "woken")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.over: deque[Turn] = deque()
        self.soon: asyncio.Handle | None = None  # by which the loop is going to run it
        self.woken = loop.create_future()
        self.woken.set_result(None)

    def add(self, turn: Turn) -> None:
        try:
            self.over.append(turn)
            if self.soon is None:
                self.soon = self.loop.call_soon(self.run)
        except BaseException:  # a handler of signals raised; to be run once more does no harm
            self.again()
            raise

    def again(self) -> None:
        """Whoever was to be woken by now still is: ask the loop once more, which forgets as a handler of signals raises
        in it."""
        if self.over:
            self.soon = self.loop.call_soon(self.run)

    def run(self) -> None:
        """Wake those who are here, and up to a crowd of those who come meanwhile."""
        self.soon = None
        turn: Turn | None = None
        try:
            if len(self.over) > 1:  # and a task begins a loop within the loop
                self.soon = self.loop.call_soon(self.run)
            for _ in range(max(len(self.over), CROWD)):
                if not self.over:
                    break
                turn = self.over[0]
                self.over.popleft()
                turn.wake()
        except BaseException:  # a handler of signals raised: nobody else would wake it
            if turn is not None and turn.callback is not None:
                self.over.appendleft(turn)
            if self.soon is None:
                self.again()
            raise
        soon = self.soon
        if not self.over and soon is not None:  # who comes next is woken after what was to be sent by then
            self.soon = None  # first: a handler of signals may add one while that is cancelled
            soon.cancel()


class Turn:
    """What a task waits for, once it has begun. As a slot: for a reply; as a waiter's `wake`: for its call."""

    __slots__ = ("answer", "blocking", "callback", "context", "ready", "turns")

    def begin(self, turns: Turns) -> Self:
        """Wait, for the first time or once more."""
        self.turns = turns
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
            self.turns.add(self)

    def tell(self, answer: Any) -> None:
        """That is its answer, unless it has one; then whoever gave that may have been struck before it was to be
        woken."""
        if not self.ready:
            self.set_result(answer)
        elif self.callback is not None:
            self.turns.add(self)

    def __call__(self, answer: Any) -> None:
        self.tell(answer)

    def wake(self) -> None:
        if not self.ready:  # it was to be woken twice, and waits for something else by now
            return
        # A task asks what it is woken with for its result, and throws that away; of a real future without a call
        over = self if type(self.answer) is asyncio.CancelledError else self.turns.woken
        context, self.context = self.context, None
        callback, self.callback = self.callback, None  # last: no signal's handler comes between this and the call
        if callback is not None:
            context.run(callback, over)

    # as a task sees a future

    @property
    def _asyncio_future_blocking(self) -> bool | None:
        return self.blocking or None  # None: no future, but for whom it was just given to, to wait for

    @_asyncio_future_blocking.setter
    def _asyncio_future_blocking(self, blocking: bool) -> None:
        self.blocking = blocking

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self.turns.loop

    def add_done_callback(
        self, callback: Callable[[Any], object], *, context: contextvars.Context | None = None
    ) -> None:
        self.context = contextvars.copy_context() if context is None else context
        self.callback = callback
        if self.ready:
            self.turns.add(self)

    def cancel(self, msg: Any = None) -> bool:
        if self.ready:
            if self.callback is not None:  # whoever ended its wait may have been struck before it was to be woken
                self.turns.add(self)
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
