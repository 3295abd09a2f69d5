"""Clients: what one caller does in a contest, as a thread and as a task, and when.

All rivals share one loop body, clocked in nanoseconds around acquire and around release; what a client did goes to the
log and nowhere else. In open loop a client that is late goes on with the next arrival at once, and the latency counts
from when that arrival was due: a stall is measured although a stalled client sends nothing.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import itertools
import random
import select
import selectors
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic_ns as clock

from ..rivals import MakeAsyncLock, MakeLock
from .contests import Contest
from .log import Client

CHOICES = 4096
"""Names that a client draws beforehand; it repeats them after that."""

FOREVER = 1 << 60

STEP_NS, EARLIEST_NS = 1_000, 100_000
"""Nanoseconds by which sleeps are made to end later or, fourfold, earlier; how early at most."""

SET_TIMERSLACK = 29
"""The option PR_SET_TIMERSLACK of prctl(2); its value is in nanoseconds."""

MOST_FAILURES = 3
"""Failures in a row after which a client stops, which would else retry forever against a server that is gone."""


def popularity(names: int, zipf: float) -> list[float]:
    """Cumulative weights of names by Zipf's law with the exponent ``zipf``; 0: all alike."""
    return list(itertools.accumulate(rank**-zipf for rank in range(1, names + 1)))


def choices(contest: Contest, client: int, seed: int, weights: Sequence[float]) -> Sequence[int]:
    """The names that a client acquires, in this order; the same for every rival."""
    if contest.role == "crash":  # those who wait share the names evenly
        return (client % contest.names,)
    if contest.names <= 1:
        return (0,) if contest.names else (client,)
    return random.Random(f"{seed}:{client}").choices(range(contest.names), cum_weights=weights, k=CHOICES)


def arrivals(contest: Contest, seed: int, seconds: float) -> list[list[int]]:
    """When each client is to acquire, in nanoseconds after the start; empty in a closed loop. The same for every rival.

    A Poisson stream of exactly as many arrivals as the rate promises, each at a random client. Clients that wait for a
    dead holder arrive at any time of the first half of its lease, or all that poll would poll at the same time. Clients
    of a storm arrive in the first half of the time until the release: the order of calls that several processes make at
    the same time is not known, nor whether they were served in it.
    """
    draw = random.Random(f"{seed}:arrivals")
    if contest.role:
        span = (contest.lease if contest.role == "crash" else seconds) / 2
        return [[int(draw.random() * span * 1e9)] for _ in range(contest.clients)]
    found: list[list[int]] = [[] for _ in range(contest.clients)]
    if contest.asking:
        for client in range(1, contest.clients):
            times = (
                (number + 0.25 + draw.random() / 2) / contest.asking
                for number in range(round(contest.asking * seconds))
            )
            found[client] = [int(at * 1e9) for at in times]  # never so close that one waits for the one before
        return found
    for at in sorted(draw.random() * seconds for _ in range(round(contest.rate * seconds))):
        found[draw.randrange(contest.clients)].append(int(at * 1e9))
    return found


class Early:
    """How much too early the sleeps of a process are to end, so that acquires begin when they are due, and holds last
    exactly as long as they should: waking takes time, and the clock is polled for the rest. Learned from sleep to
    sleep: four in five are to wake before the end.

    ``most``: nanoseconds; 0 where several clients may hold at a time, as a thread that polls the clock would keep the
    others from waking. ``watched``: nanoseconds for which the clock was polled, which are no CPU time of the lock's.
    """

    __slots__ = ("most", "ns", "watched")

    def __init__(self, most: int) -> None:
        self.most = most
        self.ns = self.watched = 0

    def watch(self, end: int) -> None:
        """Poll the clock until the end of the sleep, and learn from how early or late the sleep ended."""
        woken = now = clock()
        if now >= end:
            self.ns = min(self.ns + 4 * STEP_NS, self.most)
            return
        self.ns = max(self.ns - STEP_NS, 0)
        while now < end:
            now = clock()
        self.watched += now - woken


@dataclass
class Job:
    """What one client is to do: its part of the log, its names and keys, its arrivals (none: closed loop), the length
    of the run, and how much too early sleeps are to end."""

    client: Client
    contest: Contest
    names: Sequence[int]
    keys: Sequence[str]
    arrivals: Sequence[int]
    seconds: float
    early: Early
    done: int = 0
    failed: int = 0
    over: bool = False

    def begin(self, start: int) -> None:
        """Set the clock time at which the client begins."""
        length = int(self.seconds * 1e9)
        self.wanted = itertools.cycle(self.names)
        contest = self.contest
        self.closed = not (self.arrivals or contest.laps or contest.rate)
        self.blocking_timeout = contest.blocking_timeout if contest.blocking and not contest.cut else None
        self.start, self.end = start, start + length
        given = contest.rate or (contest.asking and self.arrivals)
        self.last = self.end + (FOREVER if contest.laps else length if given else 0)

    def next(self) -> int | None:
        """The time at which the next acquire is due (0: now); None: there are no more. An open loop serves its arrivals
        for twice the length of the run."""
        if self.over or clock() >= self.last or self.client.stopped:
            return None
        if self.closed:
            return 0
        if self.contest.laps and self.done >= self.contest.laps:
            return None
        if not self.arrivals:
            return None if self.contest.rate else 0
        return self.start + self.arrivals[self.done] if self.done < len(self.arrivals) else None

    def time_left(self, called: int) -> float | None:
        """The blocking timeout in seconds of an acquire that is called now, where it is not the same for all: a wait
        ends with the run."""
        if not self.contest.blocking:
            return None
        return max(0.001, (self.contest.deadline(called, self.end) - called) / 1e9)

    def gave_up(self, name: int, due: int, called: int, now: int) -> None:
        """Note that an acquire returned False."""
        if not self.contest.blocking:
            self.client.refused()
            return
        self.client.gave_up(name, due or called, called, now)
        self.over = self.contest.cut_off(called, now, self.end)

    def name(self) -> int:
        """The name to acquire next, which counts as one acquire."""
        self.done += 1
        return next(self.wanted)

    def problem(self, error: Exception) -> None:
        """Note that a call raised."""
        self.failed += 1
        self.over = self.over or self.failed >= MOST_FAILURES
        self.client.failed(error)

    def raised(self, error: Exception, name: int, due: int, called: int) -> None:
        """Note that an acquire raised: it counts as given up."""
        self.problem(error)
        self.client.gave_up(name, due or called, called, max(called + 1, clock()))

    def finish(self) -> None:
        """Note the arrivals that were never served as given up, also those that were due after the client stopped
        early."""
        until = max(clock(), self.last if self.failed >= MOST_FAILURES else self.end)
        for due in self.arrivals[self.done :]:
            if self.client.stopped:
                return
            self.client.gave_up(self.name(), self.start + due, until, until)


def thread_client(job: Job, make: MakeLock, sleep: Callable[[float], object] = time.sleep) -> None:
    """Acquire, hold and release, again and again, until the job has no more."""
    client, contest, keys, blocking_timeout, early = job.client, job.contest, job.keys, job.blocking_timeout, job.early
    hold = int(contest.hold * 1e9)  # counted from the grant, whatever is noted meanwhile
    sleep(max(0, job.start - clock()) / 1e9)
    while (due := job.next()) is not None:
        name = job.name()
        if due and due > (now := clock()):
            sleep(max(0, due - early.ns - now) / 1e9)
            early.watch(due)
        called = clock()
        wait = blocking_timeout if blocking_timeout is not None else job.time_left(called)
        try:
            lock = make(keys[name], timeout=contest.lease, blocking=contest.blocking, blocking_timeout=wait)
            acquired = lock.acquire()
        except Exception as error:  # it is counted, and the next acquire may succeed
            job.raised(error, name, due, called)
            continue
        now = clock()
        if not acquired:
            job.gave_up(name, due, called, now)
            continue
        client.granted(name, due or called, called, now)
        if hold:
            sleep(max(0, now + hold - early.ns - clock()) / 1e9)
            early.watch(now + hold)
        client.leaving(name)
        releasing, released = clock(), 0
        try:
            lock.release()
            released, job.failed = clock(), 0
        except Exception as error:
            job.problem(error)
        client.released(releasing, released)
    job.finish()


async def task_client(job: Job, make: MakeAsyncLock) -> None:
    """The same as ``thread_client``, line by line, for a task."""
    client, contest, keys, blocking_timeout, early = job.client, job.contest, job.keys, job.blocking_timeout, job.early
    hold, sleep = int(contest.hold * 1e9), asyncio.sleep
    await sleep(max(0, job.start - clock()) / 1e9)
    while (due := job.next()) is not None:
        name = job.name()
        if due and due > (now := clock()):
            await sleep(max(0, due - early.ns - now) / 1e9)
            early.watch(due)
        called = clock()
        wait = blocking_timeout if blocking_timeout is not None else job.time_left(called)
        try:
            lock = make(keys[name], timeout=contest.lease, blocking=contest.blocking, blocking_timeout=wait)
            acquired = await lock.acquire()
        except Exception as error:  # it is counted, and the next acquire may succeed
            job.raised(error, name, due, called)
            continue
        now = clock()
        if not acquired:
            job.gave_up(name, due, called, now)
            continue
        client.granted(name, due or called, called, now)
        if hold:
            await sleep(max(0, now + hold - early.ns - clock()) / 1e9)
            early.watch(now + hold)
        client.leaving(name)
        releasing, released = clock(), 0
        try:
            await lock.release()
            released, job.failed = clock(), 0
        except Exception as error:
            job.problem(error)
        client.released(releasing, released)
    job.finish()


def exact_sleeps() -> None:
    """Make the sleeps of this process and its threads exact: Linux adds up to 50 us to each sleep, so that it can end
    several at once, a twentieth of a hold."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(SET_TIMERSLACK, 1, 0, 0, 0)


class _ExactSelector(selectors.DefaultSelector):
    """Epoll with timers to the microsecond: the timeouts of epoll are whole milliseconds, longer than most holds
    here."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout > 0:
            select.select([self.fileno()], [], [], timeout)
            timeout = 0
        return super().select(timeout)


def new_loop(kind: str = "") -> asyncio.AbstractEventLoop:
    """A new event loop: asyncio's own, made exact where it is not; or that of the module ``kind``."""
    if kind:
        loop: asyncio.AbstractEventLoop = importlib.import_module(kind).new_event_loop()
        return loop
    epoll = selectors.DefaultSelector is getattr(selectors, "EpollSelector", None)
    return asyncio.SelectorEventLoop(_ExactSelector() if epoll else None)
