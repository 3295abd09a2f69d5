"""Like interrupted.py, for asyncio: real signals at random moments of an event loop in which tasks use locks.

    python interrupted_loop.py URL MODE SEED HITS

Each attempt has a client and an event loop of its own; an exception that arrives ends it, as in `asyncio.run`. Some
exceptions that a handler raises never arrive: asyncio logs those raised in its callbacks, and goes on. No task may hang
then. Prints a JSON object: implementation (FASTLOCK_IMPL asks for it), attempts, hits, leaks (keys that stay although
nobody owns them), wrong (what must never happen).
"""

from __future__ import annotations

import asyncio
import contextlib
import dis
import faulthandler
import inspect
import json
import logging
import random
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from types import FrameType
from typing import Any

import redis

import fastlock
import fastlock.asyncio
from support.interrupted import KINDS, LEASE, LONGEST, Handler

# which asyncio takes for its socket's errors: it sends the same bytes again
ASYNCIOS = (BlockingIOError, InterruptedError)
STANDSTILL = 5.0  # seconds after which tasks that use locks hang, and a key that nobody owns counts as left


# An exception that a handler raises here leaves a task that asyncio will never resume.
FORGETS = {
    "base_events.py": ("_run_once", "_run_until_complete_cb"),  # takes a callback out of its list, and then calls it
    "/events.py": ("_run",),  # calls that callback
    "tasks.py": ("_done_callback",),  # of `gather`
    "internals.py": ("_asyncio_future_blocking", "get_loop", "add_done_callback"),  # by which a task begins to wait
}
# Where a task that ends schedules the callbacks of the tasks that wait for it: an interrupt here forgets them.
ASKS = ("call_soon", "_call_soon", "_check_closed", "get_debug", "__init__")
WAKES = ("run_callback", "_finish")  # where a task is woken, which goes on in the first and is scheduled in the second


def in_a_gap(frame: FrameType) -> bool:
    """Whether an exception raised here is lost by Python or asyncio, not by fastlock. README tells of each of these
    gaps."""
    if (gap := GAPS.get(frame.f_code)) is not None:
        return dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith(gap)
    asks = frame
    while asks.f_back is not None and within(asks, "events.py", ASKS):
        asks = asks.f_back
    if asks is not frame and (within(asks, "/events.py", ("_run",)) or within(asks, "internals.py", WAKES)):
        return True
    return any(within(frame, file, functions) for file, functions in FORGETS.items())


def within(frame: FrameType, file: str, functions: Sequence[str]) -> bool:
    return frame.f_code.co_filename.endswith(file) and frame.f_code.co_name in functions


class Elsewhere(Handler):
    """Does not raise in a gap of Python or asyncio: another signal comes a moment later."""

    def __init__(self, sender: Sender) -> None:
        super().__init__([kind for kind in KINDS if kind not in ASYNCIOS])
        self.sender = sender

    def __call__(self, number: int, frame: Any) -> None:
        if in_a_gap(frame):
            self.sender.armed.set()
        else:
            super().__call__(number, frame)


class Sender(threading.Thread):
    """Interrupts the main thread, some random time after `armed` is set."""

    def __init__(self, seed: int) -> None:
        super().__init__(daemon=True)
        self.random = random.Random(seed)
        self.armed = threading.Event()
        self.longest = 0.0005

    def run(self) -> None:
        while self.armed.wait():
            time.sleep(self.random.uniform(0, self.longest))
            if self.armed.is_set():
                self.armed.clear()
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def hold_back() -> None:
    """Block signals from here on; the exception of one that is already on its way is raised here."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])


def let_through() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


async def use(client: Any, name: str, rounds: int = 20, **settings: Any) -> None:
    lock = client.lock(name, timeout=LEASE, sleep=0.001, **settings)
    for _ in range(rounds):
        async with lock:
            pass


async def cohort(client: Any, name: str) -> None:
    found = await asyncio.gather(*(use(client, name, 6) for _ in range(6)), return_exceptions=True)
    for each in found:
        if each is not None:
            raise each


async def many(client: Any, name: str) -> None:
    for _ in range(10):
        await client.release_many(await client.acquire_many([name, name + ":2"], timeout=LEASE))


MODES: dict[str, Callable[[Any, str], Awaitable[None]]] = {
    "with": use,
    "limited": lambda client, name: use(client, name, blocking_timeout=LEASE),
    "fence": lambda client, name: use(client, name, fence=True),
    "fair": lambda client, name: use(client, name, fair=True),
    "unconfirmed": lambda client, name: use(client, name, confirm_release=False),
    "cohort": cohort,
    "many": many,
}


GAPS = {fastlock.asyncio.Client.release_many.__code__: "RESUME"}  # the coroutine has not begun
LEAVES = fastlock.asyncio.ClientLock.__aexit__
if inspect.iscoroutinefunction(LEAVES):  # at the end of a block: `__aexit__` is not awaited yet, or has not begun
    GAPS |= {use.__code__: "CALL", LEAVES.__code__: "RESUME"}


class Run:
    """The attempts of one mode, and their outcome."""

    def __init__(self, url: str, mode: str, seed: int) -> None:
        self.url, self.work = url, MODES[mode]
        self.probe = redis.Redis.from_url(url)
        self.sender = Sender(seed)
        self.sender.longest = 0.002
        self.random = random.Random(seed + 1)
        self.attempts = self.hits = self.leaks = 0
        self.wrong: list[str] = []
        self.handler = Elsewhere(self.sender)
        signal.signal(signal.SIGINT, self.handler)

    def go(self, hits: int) -> None:
        hold_back()
        self.sender.start()
        end = time.monotonic() + LONGEST
        while self.hits < hits and time.monotonic() < end:
            self.attempts += 1
            self.handler.raised, self.handler.left = [], 1
            self.attempt(f"name:{self.attempts}")
            self.hits += bool(self.handler.raised)

    def attempt(self, name: str) -> None:
        client = fastlock.asyncio.Client.from_url(self.url, reply_timeout=1)
        # a loop that was left by KeyboardInterrupt may be told to stop more often than it was started
        with contextlib.suppress(RuntimeError), asyncio.Runner() as runner:
            runner.run(client.server_info())
            with contextlib.suppress(*KINDS):
                try:
                    self.sender.armed.set()
                    let_through()
                    runner.run(self.watched(client, name))
                finally:
                    hold_back()
            with contextlib.suppress(*KINDS):
                hold_back()
            self.sender.armed.clear()
        # the client is not used again; its loop has ended
        end = time.monotonic() + STANDSTILL
        while self.probe.exists(name, name + ":2"):
            if time.monotonic() > end:
                self.leaks += 1
                self.wrong.append(f"a key stays after {self.handler.raised!r}")
                break
        asyncio.run(client.close())

    async def watched(self, client: Any, name: str) -> None:
        task = asyncio.ensure_future(self.work(client, name))
        done, _ = await asyncio.wait([task], timeout=STANDSTILL)
        if not done:
            self.wrong.append(f"tasks hang after {self.handler.raised!r}")
        else:
            task.result()


def main() -> None:
    faulthandler.dump_traceback_later(2 * LONGEST, exit=True)  # for a loop that never ends
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    url, mode, seed, hits = sys.argv[1:]
    run = Run(url, mode, int(seed))
    run.go(int(hits))
    report = {"attempts": run.attempts, "hits": run.hits, "leaks": run.leaks, "wrong": run.wrong[:5]}
    print(json.dumps({"implementation": fastlock.IMPLEMENTATION, **report}))


if __name__ == "__main__":
    main()
