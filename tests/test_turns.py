"""What tasks wait for, and in which iteration of their loop they are woken. On both loops, with both kinds of asyncio's
tasks: the compiled one, and the one in Python that debuggers put in its place."""

from __future__ import annotations

import asyncio
import asyncio.tasks
import contextvars
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import uvloop

from fastlock._transport.wakeups import MAX_WAKEUPS, Wakeup, WakeupQueue

pytestmark = pytest.mark.usefixtures("impl")
TASKS: dict[str, Any] = {"C": asyncio.Task, "Python": asyncio.tasks._PyTask}  # type: ignore[attr-defined]
MARK = contextvars.ContextVar("MARK", default="nobody")


@pytest.fixture(params=["asyncio", "uvloop"])
def loop(request: pytest.FixtureRequest) -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop() if request.param == "asyncio" else uvloop.new_event_loop()
    asyncio.set_event_loop(made)
    yield made
    asyncio.set_event_loop(None)
    made.close()


@pytest.fixture(params=TASKS)
def task(request: pytest.FixtureRequest, loop: asyncio.AbstractEventLoop) -> Callable[[Coroutine[Any, Any, Any]], Any]:
    """Makes a task of a coroutine."""
    return lambda work: TASKS[request.param](work, loop=loop)


class Counter:
    """How many iterations a loop has made."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop, self.number, self.going = loop, 0, True
        self.loop.call_soon(self.count)

    def count(self) -> None:
        self.number += 1
        if self.going:
            self.loop.call_soon(self.count)


async def waits(wakeup: Wakeup) -> Any:
    return await wakeup


async def idle(iterations: int = 3) -> None:
    for _ in range(iterations):
        await asyncio.sleep(0)


def test_a_task_waits_and_gets_the_answer_in_its_own_context(loop: asyncio.AbstractEventLoop, task: Any) -> None:
    async def work() -> None:
        wakeup, seen = Wakeup().arm(WakeupQueue(loop)), list[str]()

        async def wait() -> Any:
            MARK.set("the one who waits")
            answer = await wakeup
            seen.append(MARK.get())
            return answer

        waiting = task(wait())
        await idle()
        assert not waiting.done() and not wakeup.done()
        wakeup.set_result("the answer")
        assert wakeup.done() and not waiting.done(), "not before the loop comes to it"
        assert await waiting == "the answer" and seen == ["the one who waits"] and MARK.get() == "nobody"
        assert await task(waits(wakeup)) == "the answer", "which is there at once, the second time"
        wakeup("another answer")
        assert wakeup.result() == "the answer", "one is enough"

    loop.run_until_complete(work())


def test_a_task_is_told_whenever_it_asks(loop: asyncio.AbstractEventLoop) -> None:
    """Of what was there before it asked, too."""

    async def work() -> None:
        wakeup, heard = Wakeup().arm(WakeupQueue(loop)), list[Any]()
        wakeup.set_result(5)
        wakeup.add_done_callback(heard.append)
        assert heard == []
        await idle(1)
        assert [each.result() for each in heard] == [None] and wakeup.result() == 5
        wakeup.arm(wakeup.wakeups)
        assert not wakeup.done() and wakeup.result() is None and wakeup.get_loop() is loop

    loop.run_until_complete(work())


@pytest.mark.parametrize("message", [None, "a word"])
def test_a_task_that_is_cancelled_wakes_with_that(loop: asyncio.AbstractEventLoop, task: Any, message: Any) -> None:
    async def work() -> None:
        wakeup = Wakeup().arm(WakeupQueue(loop))
        waiting = task(waits(wakeup))
        await idle()
        assert waiting.cancel(message) and wakeup.done() and not wakeup.cancel()
        wakeup("too late")
        with pytest.raises(asyncio.CancelledError) as caught:
            await waiting
        assert wakeup.answer.__traceback__ is None, "which would keep all who were in it"
        assert caught.value.args == (() if message is None else (message,)) and waiting.cancelled()

    loop.run_until_complete(work())


def test_who_is_cancelled_with_its_answer_on_the_way_is_cancelled_once(
    loop: asyncio.AbstractEventLoop, task: Any
) -> None:
    async def work() -> None:
        wakeup, heard = Wakeup().arm(WakeupQueue(loop)), list[Any]()

        async def wait() -> None:
            try:
                await wakeup
            except asyncio.CancelledError:
                heard.append(wakeup.result())
                await asyncio.sleep(0)
                heard.append("goes on")

        waiting = task(wait())
        await idle()
        wakeup.set_result("the answer")
        waiting.cancel()
        await waiting
        assert heard == ["the answer", "goes on"]

    loop.run_until_complete(work())


def test_it_is_a_future_only_for_whom_it_was_given_to(loop: asyncio.AbstractEventLoop) -> None:
    """Else asyncio would take it for one that is under way already, and begin nothing."""

    async def work() -> None:
        wakeup = Wakeup().arm(WakeupQueue(loop))
        assert not asyncio.isfuture(wakeup)
        steps = wakeup.__await__()
        assert next(steps) is wakeup and asyncio.isfuture(wakeup)
        wakeup._asyncio_future_blocking = False
        assert not asyncio.isfuture(wakeup)
        early = Wakeup().arm(wakeup.wakeups).__await__()
        next(early)
        with pytest.raises(RuntimeError, match="being awaited already"):
            next(early)
        loop.call_soon(wakeup.set_result, 1)
        assert await asyncio.wait_for(wakeup, 10) == 1 and await asyncio.gather(wakeup, waits(wakeup)) == [1, 1]
        with pytest.raises(StopIteration):
            next(steps)

    loop.run_until_complete(work())


def test_all_who_are_ready_wake_in_one_iteration_and_in_order(loop: asyncio.AbstractEventLoop, task: Any) -> None:
    async def work() -> None:
        wakeups, order = WakeupQueue(loop), list[tuple[int, int]]()
        mine = [Wakeup().arm(wakeups) for _ in range(5 * MAX_WAKEUPS)]

        async def wait(number: int) -> None:
            await mine[number]
            order.append((number, counter.number))

        tasks = [task(wait(number)) for number in range(len(mine))]
        await idle()
        counter = Counter(loop)
        for wakeup in mine:
            wakeup.set_result(None)
        await asyncio.gather(*tasks)
        counter.going = False
        await idle()
        assert [number for number, _ in order] == list(range(len(mine))) and len({at for _, at in order}) == 1

    loop.run_until_complete(work())


def test_each_who_wakes_the_next_does_so_in_the_same_iteration_up_to_a_crowd(
    loop: asyncio.AbstractEventLoop, task: Any
) -> None:
    """More would keep the loop from all else: for ever, if each comes again."""

    async def work() -> None:
        wakeups, at = WakeupQueue(loop), list[int]()
        ring = [Wakeup().arm(wakeups) for _ in range(7)]

        async def wait(number: int) -> None:
            while len(at) < 10 * MAX_WAKEUPS:
                await ring[number].arm(wakeups)
                at.append(counter.number)
                ring[(number + 1) % len(ring)](None)

        tasks = [task(wait(number)) for number in range(len(ring))]
        await idle()
        counter = Counter(loop)
        ring[0](None)
        while len(at) < 10 * MAX_WAKEUPS:
            await asyncio.sleep(0)
        counter.going = False
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        counts = [at.count(number) for number in dict.fromkeys(at)]
        assert counts[:9] == [MAX_WAKEUPS] * 9

    loop.run_until_complete(work())


class Queue:
    """As much of an event loop, run by hand."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop, self.handles = loop, list[asyncio.Handle]()

    def create_future(self) -> asyncio.Future[Any]:
        return self.loop.create_future()

    def call_soon(self, callback: Callable[..., object], *args: Any) -> asyncio.Handle:
        self.handles.append(asyncio.Handle(callback, args, self.loop))
        return self.handles[-1]

    def run_one(self) -> None:
        handle = self.handles.pop(0)
        if not handle.cancelled():
            handle._run()

    def run_all(self) -> None:
        while self.handles:
            self.run_one()


def turns_by_hand(loop: asyncio.AbstractEventLoop, *callbacks: Callable[[Any], object]) -> tuple[Queue, list[Wakeup]]:
    """One for each callback, which is called when it is woken."""
    queue: Any = Queue(loop)
    wakeups = WakeupQueue(queue)
    mine = [Wakeup().arm(wakeups) for _ in callbacks]
    for wakeup, callback in zip(mine, callbacks, strict=True):
        wakeup.add_done_callback(callback)
    return queue, mine


def test_who_comes_next_is_woken_after_what_the_others_left_to_be_done(loop: asyncio.AbstractEventLoop) -> None:
    """Else what they queued would wait for the end of the next batch, and client and server would work by turns."""
    order: list[str] = []

    def first(_: Any) -> None:
        order.append("first")
        queue.call_soon(order.append, "flush")
        mine[2].set_result(None)

    queue, mine = turns_by_hand(loop, first, *(lambda _, n=n: order.append(n) for n in ("second", "third", "next")))
    for wakeup in mine[:2]:
        wakeup.set_result(None)
    queue.run_one()
    mine[3].set_result(None)  # its reply is read, in the same iteration
    queue.run_all()
    assert order == ["first", "second", "third", "flush", "next"]


def test_who_is_added_while_the_next_run_is_called_off_is_woken(loop: asyncio.AbstractEventLoop) -> None:
    """By a handler of signals, as that of asyncio's Ctrl-C is: it cancels a task."""
    order: list[str] = []
    queue, mine = turns_by_hand(loop, *(lambda _, n=n: order.append(n) for n in ("first", "second", "third")))

    class Interrupted(asyncio.Handle):
        def cancel(self) -> None:
            super().cancel()
            if not mine[2].done():
                mine[2].set_result(None)

    def call_soon(callback: Callable[..., object], *args: Any) -> asyncio.Handle:
        queue.handles.append(Interrupted(callback, args, loop))
        return queue.handles[-1]

    queue.call_soon = call_soon  # type: ignore[method-assign]
    for wakeup in mine[:2]:
        wakeup.set_result(None)
    queue.run_all()
    assert order == ["first", "second", "third"]


class Struck(KeyboardInterrupt):
    """What a handler of signals raises."""


@pytest.mark.parametrize("error", [Struck, ZeroDivisionError])
def test_what_one_callback_raises_the_others_wake(loop: asyncio.AbstractEventLoop, error: type[BaseException]) -> None:
    wakeups, heard, told = WakeupQueue(loop), list[Any](), list[Any]()
    loop.set_exception_handler(lambda _, context: told.append(type(context["exception"])))

    def struck(wakeup: Wakeup) -> None:
        raise error

    async def work() -> None:
        mine = [Wakeup().arm(wakeups) for _ in range(4)]
        for wakeup, callback in zip(mine, [heard.append, struck, heard.append, heard.append], strict=True):
            wakeup.add_done_callback(callback)
            wakeup.set_result(None)
        await idle()

    try:
        loop.run_until_complete(work())
    except Struck:
        told.append(Struck)
    loop.run_until_complete(idle())
    assert told == [error] and len(heard) == 3


def test_a_loop_within_the_loop_wakes_those_who_come_next(loop: asyncio.AbstractEventLoop) -> None:
    """As in notebooks: a callback runs what is ready before it returns."""
    order: list[str] = []

    def nests(_: Any) -> None:
        order.append("first")
        queue.run_all()
        order.append("the first goes on")

    queue, mine = turns_by_hand(loop, nests, *(lambda _, n=n: order.append(n) for n in ("second", "third")))
    for wakeup in mine:
        wakeup.set_result(None)
    queue.run_all()
    assert order == ["first", "second", "third", "the first goes on"]
