"""The wakeups of tasks: their results, and in which iteration of the loop tasks are woken. On both loops, with both
kinds of asyncio's tasks: the compiled one, and the one in Python that debuggers use instead."""

from __future__ import annotations

import asyncio
import asyncio.tasks
import contextvars
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import uvloop

from fastlock._transport import internals
from fastlock._transport.internals import Wakeup
from fastlock._transport.wakeups import MAX_WAKEUPS, WakeupQueue

pytestmark = pytest.mark.usefixtures("impl")
TASKS: dict[str, Any] = {"C": asyncio.Task, "Python": asyncio.tasks._PyTask}  # type: ignore[attr-defined]
USER = contextvars.ContextVar("USER", default="nobody")
with_internals = pytest.mark.skipif(not internals.used(), reason="the plain way is a future of asyncio's own")


@pytest.fixture(params=["asyncio", "uvloop"])
def loop(request: pytest.FixtureRequest) -> Iterator[asyncio.AbstractEventLoop]:
    event_loop = asyncio.new_event_loop() if request.param == "asyncio" else uvloop.new_event_loop()
    asyncio.set_event_loop(event_loop)
    yield event_loop
    asyncio.set_event_loop(None)
    event_loop.close()


@pytest.fixture(params=TASKS)
def task(request: pytest.FixtureRequest, loop: asyncio.AbstractEventLoop) -> Callable[[Coroutine[Any, Any, Any]], Any]:
    """A function that makes a task of a coroutine."""
    return lambda work: TASKS[request.param](work, loop=loop)


class Counter:
    """Counts the iterations of a loop."""

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


def test_task_waits_and_gets_the_answer_in_its_own_context(loop: asyncio.AbstractEventLoop, task: Any) -> None:
    async def work() -> None:
        wakeup, seen = Wakeup().arm(WakeupQueue(loop)), list[str]()

        async def wait() -> Any:
            USER.set("the waiter")
            answer = await wakeup
            seen.append(USER.get())
            return answer

        waiting = task(wait())
        await idle()
        assert not waiting.done() and not wakeup.done()
        wakeup.set_result("the answer")
        assert wakeup.done() and not waiting.done(), "the task runs only when the loop runs it"
        assert await waiting == "the answer" and seen == ["the waiter"] and USER.get() == "nobody"
        assert await task(waits(wakeup)) == "the answer", "a second await returns at once"
        wakeup("another answer")
        assert wakeup.result() == "the answer", "only the first answer counts"

    loop.run_until_complete(work())


def test_done_callback_is_called_whenever_it_is_added(loop: asyncio.AbstractEventLoop) -> None:
    """Also if the answer was there before the callback was added."""

    async def work() -> None:
        wakeup, called = Wakeup().arm(WakeupQueue(loop)), list[Any]()
        wakeup.set_result(5)
        wakeup.add_done_callback(called.append)
        assert called == []
        await idle(1)
        assert [each.result() for each in called] == [None] and wakeup.result() == 5
        wakeup.arm(wakeup.wakeups)
        assert not wakeup.done() and wakeup.result() is None and wakeup.get_loop() is loop

    loop.run_until_complete(work())


@pytest.mark.parametrize("message", [None, "a message"])
def test_cancelled_task_wakes_with_the_cancellation(loop: asyncio.AbstractEventLoop, task: Any, message: Any) -> None:
    async def work() -> None:
        wakeup = Wakeup().arm(WakeupQueue(loop))
        waiting = task(waits(wakeup))
        await idle()
        assert waiting.cancel(message)
        if internals.used():
            assert wakeup.done() and not wakeup.cancel()
        wakeup("too late")
        with pytest.raises(asyncio.CancelledError) as caught:
            await waiting
        if internals.used():
            assert wakeup.answer.__traceback__ is None, "a traceback would keep its frames alive"
        assert caught.value.args == (() if message is None else (message,)) and waiting.cancelled()

    loop.run_until_complete(work())


def test_task_cancelled_with_its_answer_set_is_cancelled_once(loop: asyncio.AbstractEventLoop, task: Any) -> None:
    async def work() -> None:
        wakeup, events = Wakeup().arm(WakeupQueue(loop)), list[Any]()

        async def wait() -> None:
            try:
                await wakeup
            except asyncio.CancelledError:
                events.append(wakeup.result())
                await asyncio.sleep(0)
                events.append("goes on")

        waiting = task(wait())
        await idle()
        wakeup.set_result("the answer")
        waiting.cancel()
        await waiting
        assert events == ["the answer", "goes on"]

    loop.run_until_complete(work())


@with_internals
def test_wakeup_is_a_future_only_for_the_task_that_awaits_it(loop: asyncio.AbstractEventLoop) -> None:
    """Otherwise asyncio would take it for a future that is pending already, and would not start a task for it."""

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


def test_all_ready_tasks_wake_in_one_iteration_and_in_order(loop: asyncio.AbstractEventLoop, task: Any) -> None:
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


@with_internals
def test_chain_of_wakeups_runs_in_one_iteration_up_to_a_limit(loop: asyncio.AbstractEventLoop, task: Any) -> None:
    """Without the limit the loop could do nothing else: for ever, if each task waits again."""

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
    """The part of an event loop that WakeupQueue needs, run by hand."""

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


def run_by_hand(loop: asyncio.AbstractEventLoop, *callbacks: Callable[[Any], object]) -> tuple[Queue, list[Wakeup]]:
    """A loop that is run by hand, and a wakeup for each callback."""
    queue: Any = Queue(loop)
    wakeups = WakeupQueue(queue)
    mine = [Wakeup().arm(wakeups) for _ in callbacks]
    for wakeup, callback in zip(mine, callbacks, strict=True):
        wakeup.add_done_callback(callback)
    return queue, mine


def test_later_wakeup_runs_after_callbacks_that_were_queued_before(loop: asyncio.AbstractEventLoop) -> None:
    """Otherwise a flush would wait for the end of the next batch of wakeups, and client and server would alternate."""
    order: list[str] = []

    def first(_: Any) -> None:
        order.append("first")
        queue.call_soon(order.append, "flush")
        mine[2].set_result(None)

    queue, mine = run_by_hand(loop, first, *(lambda _, n=n: order.append(n) for n in ("second", "third", "next")))
    for wakeup in mine[:2]:
        wakeup.set_result(None)
    queue.run_one()
    mine[3].set_result(None)  # its reply is read in the same iteration
    queue.run_all()
    assert order == ["first", "second", "third", "flush", "next"]


def test_wakeup_added_while_the_next_run_is_cancelled_is_woken(loop: asyncio.AbstractEventLoop) -> None:
    """A signal handler adds it: asyncio's handler of Ctrl-C, for one, cancels a task."""
    order: list[str] = []
    queue, mine = run_by_hand(loop, *(lambda _, n=n: order.append(n) for n in ("first", "second", "third")))

    class InterruptedHandle(asyncio.Handle):
        def cancel(self) -> None:
            super().cancel()
            if not mine[2].done():
                mine[2].set_result(None)

    def call_soon(callback: Callable[..., object], *args: Any) -> asyncio.Handle:
        queue.handles.append(InterruptedHandle(callback, args, loop))
        return queue.handles[-1]

    queue.call_soon = call_soon  # type: ignore[method-assign]
    for wakeup in mine[:2]:
        wakeup.set_result(None)
    queue.run_all()
    assert order == ["first", "second", "third"]


class Interrupted(KeyboardInterrupt):
    """The exception of a signal handler."""


@pytest.mark.parametrize("error", [Interrupted, ZeroDivisionError])
def test_callback_that_raises_keeps_no_other_from_waking(
    loop: asyncio.AbstractEventLoop, error: type[BaseException]
) -> None:
    wakeups, called, raised = WakeupQueue(loop), list[Any](), list[Any]()
    loop.set_exception_handler(lambda _, context: raised.append(type(context["exception"])))

    def failing(wakeup: Wakeup) -> None:
        raise error

    async def work() -> None:
        mine = [Wakeup().arm(wakeups) for _ in range(4)]
        for wakeup, callback in zip(mine, [called.append, failing, called.append, called.append], strict=True):
            wakeup.add_done_callback(callback)
            wakeup.set_result(None)
        await idle()

    try:
        loop.run_until_complete(work())
    except Interrupted:
        raised.append(Interrupted)
    loop.run_until_complete(idle())
    assert raised == [error] and len(called) == 3


def test_nested_loop_wakes_the_remaining_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """As in notebooks: a callback runs the ready callbacks before it returns."""
    order: list[str] = []

    def nests(_: Any) -> None:
        order.append("first")
        queue.run_all()
        order.append("the first goes on")

    queue, mine = run_by_hand(loop, nests, *(lambda _, n=n: order.append(n) for n in ("second", "third")))
    for wakeup in mine:
        wakeup.set_result(None)
    queue.run_all()
    assert order == ["first", "second", "third", "the first goes on"]
