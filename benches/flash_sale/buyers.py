"""The buyers of the flash sale: one worker process, full of threads or of asyncio tasks.

What a buyer does is written once, as a generator of steps (`shopping`); a thread calls each step, a task awaits it. The
parent (`workers`) sends the plan as a message (not in argv, where every user of the machine could read the URL's
password), then "go", then perhaps "stop"; the worker sends "ready" and its tally. A parent that is gone means "stop".
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import AsyncExitStack, ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from redis.exceptions import ConnectionError as ConnectionLost

from ..processes import Lines, to_parent
from ..rivals import redis_url
from .shop import Shop

MOST_FAILURES = 3  # failed purchases in a row after which a buyer leaves


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All that a worker needs to know. Times are in seconds."""

    rival: str  # fastlock, redis-py or no-lock; of a "mixed" sale the parent gives every worker one of the first two
    url: str
    path: str  # the shop's file
    prefix: str  # of the lock names: prefix + sku
    worker: int
    buyers: int
    tasks: bool  # asyncio tasks instead of threads
    uvloop: bool
    skus: int
    think: float
    timeout: float  # lease time of the lock


class AnyLock(Protocol):
    """What the locks of all rivals have in common: methods that act, or that return an awaitable in asyncio."""

    def acquire(self) -> Any: ...

    def release(self) -> Any: ...


@dataclass(slots=True)
class Tally:
    """What the buyers of one worker measured; what they bought is in the books."""

    waits: list[float] = field(default_factory=list)  # seconds from the call of acquire to holding the lock
    errors: Counter[str] = field(default_factory=Counter)  # by class name
    examples: dict[str, str] = field(default_factory=dict)  # the first message of each class
    sold_out: set[int] = field(default_factory=set)

    def failed(self, error: Exception) -> None:
        """Count an error: the sale goes on, and reports it."""
        kind = type(error).__name__
        self.errors[kind] += 1
        self.examples.setdefault(kind, str(error))


Step = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Buyer:
    """One customer: a name, a way to get a lock for an article, and a way to think."""

    name: str
    lock: Callable[[int], AnyLock]
    think: Step
    tally: Tally
    stop: threading.Event

    def shopping(self, shop: Shop, skus: int) -> Generator[Step, Any, None]:
        """Buy until all is sold out or `stop` is set. Yields steps; the result or exception of each is sent back."""
        choice = random.Random(self.name)
        failures = 0
        while failures < MOST_FAILURES and not self.stop.is_set():
            wanted = [sku for sku in range(skus) if sku not in self.tally.sold_out]
            if not wanted:
                return
            try:
                yield from self._purchase(shop, choice.choice(wanted))
            except ConnectionLost as error:
                self.tally.failed(error)
                return  # the client has retried for seconds to reach its server, and the next purchase would too
            except Exception as error:
                self.tally.failed(error)
                failures += 1
            else:
                failures = 0

    def _purchase(self, shop: Shop, sku: int) -> Generator[Step, Any, None]:
        lock = self.lock(sku)
        called = time.perf_counter()
        if not (yield lock.acquire):
            raise RuntimeError("acquire() without a limit returned False")
        # A wait for an article that turns out to be sold out counts too: such waits are often the longest.
        self.tally.waits.append(time.perf_counter() - called)
        try:
            pieces = shop.stock(sku)
            if pieces <= 0:
                self.tally.sold_out.add(sku)
            elif not self.stop.is_set():
                yield self.think
                shop.sell(sku, pieces - 1, self.name)
        finally:
            yield lock.release


class NoLock:
    """The rival that does not lock: it shows what the other rivals prevent."""

    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        return None


class NoAsyncLock:
    """`NoLock` for tasks."""

    async def acquire(self) -> bool:
        return True

    async def release(self) -> None:
        return None


def lock_maker(plan: Plan, stack: ExitStack) -> Callable[[int], AnyLock]:
    """A function from sku to a lock of the plan's rival, for threads; its client closes with `stack`."""
    if plan.rival == "no-lock":
        return lambda sku: NoLock()
    if plan.rival == "fastlock":
        import fastlock

        ours = stack.enter_context(fastlock.Client.from_url(plan.url))
        return lambda sku: ours.lock(f"{plan.prefix}{sku}", timeout=plan.timeout)
    import redis

    # A pool smaller than the number of buyers would raise, and the rival is to be measured at its best.
    theirs = stack.enter_context(redis.Redis.from_url(redis_url(plan.url), max_connections=plan.buyers + 1))
    return lambda sku: theirs.lock(f"{plan.prefix}{sku}", timeout=plan.timeout)


async def async_lock_maker(plan: Plan, stack: AsyncExitStack) -> Callable[[int], AnyLock]:
    """`lock_maker` for tasks."""
    if plan.rival == "no-lock":
        return lambda sku: NoAsyncLock()
    if plan.rival == "fastlock":
        import fastlock.asyncio

        ours = await stack.enter_async_context(fastlock.asyncio.Client.from_url(plan.url))
        return lambda sku: ours.lock(f"{plan.prefix}{sku}", timeout=plan.timeout)
    import redis.asyncio

    theirs = redis.asyncio.Redis.from_url(redis_url(plan.url), max_connections=plan.buyers + 1)
    stack.push_async_callback(theirs.aclose)
    return lambda sku: theirs.lock(f"{plan.prefix}{sku}", timeout=plan.timeout)


def names(plan: Plan) -> Iterator[str]:
    """The names of a worker's buyers."""
    return (f"{plan.worker}.{number}" for number in range(plan.buyers))


def sell_to_threads(plan: Plan, tally: Tally, ready: Callable[[], None], stop: threading.Event) -> None:
    """Run a thread with an SQLite connection for each buyer: all are made before `ready`, and buy after it."""
    start = threading.Event()

    def run_buyer(buyer: Buyer) -> None:
        try:
            with closing(Shop(plan.path)) as shop:
                start.wait()
                run_steps(buyer.shopping(shop, plan.skus))
        except Exception as error:  # an error of the shop itself, which would be lost with its thread
            tally.failed(error)

    with ExitStack() as stack:
        lock = lock_maker(plan, stack)
        think = partial(time.sleep, plan.think)
        buyers = [Buyer(name, lock, think, tally, stop) for name in names(plan)]
        threads = [threading.Thread(target=run_buyer, args=(buyer,), name=buyer.name) for buyer in buyers]
        for thread in threads:
            thread.start()
        ready()
        start.set()
        for thread in threads:
            thread.join()


def run_steps(steps: Generator[Step, Any, None]) -> None:
    """Run the steps of `shopping` one by one in this thread."""
    try:
        step = next(steps)
        while True:
            try:
                answer = step()
            except Exception as error:
                step = steps.throw(error)
            else:
                step = steps.send(answer)
    except StopIteration:
        return


async def sell_to_tasks(plan: Plan, tally: Tally, ready: Callable[[], None], stop: threading.Event) -> None:
    """Run a task for each buyer, with one SQLite connection for all.

    The short SQLite statements run on the loop itself: they take some 20 us, where `to_thread` would cost more than
    that and put its small pool of threads between the buyers, a second lock beside the one that is measured.
    """
    async with AsyncExitStack() as stack:
        shop = stack.enter_context(closing(Shop(plan.path)))
        lock = await async_lock_maker(plan, stack)
        think = partial(asyncio.sleep, plan.think)
        buyers = [Buyer(name, lock, think, tally, stop) for name in names(plan)]
        ready()
        await asyncio.gather(*(run_steps_in_task(buyer.shopping(shop, plan.skus)) for buyer in buyers))


async def run_steps_in_task(steps: Generator[Step, Any, None]) -> None:
    """Run the steps of `shopping` one by one in this task."""
    try:
        step = next(steps)
        while True:
            try:
                answer = await step()
            except Exception as error:
                step = steps.throw(error)
            else:
                step = steps.send(answer)
    except StopIteration:
        return


def run_tasks(plan: Plan, tally: Tally, ready: Callable[[], None], stop: threading.Event) -> None:
    """Run `sell_to_tasks` on the loop that the plan asks for."""
    factory = None
    if plan.uvloop:
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(sell_to_tasks(plan, tally, ready, stop))


def main() -> None:
    """Run the worker process: receive the plan, send the tally."""
    parent = to_parent()
    plan = Plan(**(parent.receive() or {}))
    tally, stop = Tally(), threading.Event()

    def ready() -> None:
        parent.send({"event": "ready"})
        if ordered(parent) != "go":
            stop.set()
        threading.Thread(target=watch, name="parent", daemon=True).start()

    def watch() -> None:
        ordered(parent)  # nothing but "stop" comes after "go"
        stop.set()

    (run_tasks if plan.tasks else sell_to_threads)(plan, tally, ready, stop)
    parent.send({"event": "done", "waits": tally.waits, "errors": tally.errors, "examples": tally.examples})


def ordered(parent: Lines) -> str:
    """The next order of the parent: "stop" if it is gone."""
    try:
        order = parent.receive()
    except EOFError:
        return "stop"
    return str(order and order["action"])


if __name__ == "__main__":
    main()
