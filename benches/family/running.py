"""What runs in a worker: pairs, the clients of a contest, leases under renewal. For threads and, line by line the same,
for asyncio.

All cases share these loops, clocked in nanoseconds by CLOCK_MONOTONIC, one clock for all processes. What a client of a
contest did is a record of integers (`exclusion.Record`), which the parent judges. Never here: what the cases are.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import threading
import time
from array import array
from dataclasses import dataclass
from itertools import pairwise
from time import monotonic_ns as clock
from typing import Any

from ..measures import percentile
from ..orders import error_text
from ..rivals import LEASE, MakeAsyncLock, MakeLock
from ..scenarios import Client, make_clients, tally, task_client, thread_client
from .cases import SidedTasks, SidedThreads

Answer = dict[str, Any]

LOOKS = 50
"""How often in a period all leases are looked at."""


# ----------------------------------------------------------------------------------------------------------- the pairs


def pairs_in_thread(opened: SidedThreads, key: str, seconds: float) -> Answer:
    """Make pairs of acquire and release, one after the other, in this thread."""
    assert opened.lock is not None, "it has more than batches"
    (client,) = make_clients(1, seconds)
    with opened.outer(key, timeout=LEASE) if opened.outer else contextlib.nullcontext():
        before = opened.sent() if opened.sent else 0
        thread_client(client, opened.lock, key, threading.Barrier(1), int(seconds * 1e9))
        sent = opened.sent() - before if opened.sent else None
    return _pairs(client, sent)


async def pairs_in_task(opened: SidedTasks, key: str, seconds: float) -> Answer:
    """Make pairs of acquire and release, one after the other, in this task."""
    (client,) = make_clients(1, seconds)
    start = asyncio.Event()
    start.set()
    async with opened.outer(key, timeout=LEASE) if opened.outer else contextlib.nullcontext():
        before = opened.sent() if opened.sent else 0
        await task_client(client, opened.lock, key, start, int(seconds * 1e9))
        sent = opened.sent() - before if opened.sent else None
    return _pairs(client, sent)


def _pairs(client: Client, sent: int | None) -> Answer:
    made = tally([client])
    laps = sorted(made.laps)
    return {
        "pairs": made.pairs,
        "acquired": made.acquired,
        "released": made.released,
        "seconds": made.seconds,
        "p50": percentile(laps, 0.5),
        "p99": percentile(laps, 0.99),
        "sent": sent,
        "errors": made.errors,
    }


# -------------------------------------------------------------------------------------------------------- the contests


@dataclass(frozen=True)
class Contest:
    """The part of a contest that one process has: its readers (all that do not write) and writers; from when to when
    they acquire anew, by the clock in nanoseconds; seconds of a hold, of a lease, and of a wait at most."""

    key: str
    readers: int
    writers: int
    start: int
    end: int
    hold: float
    lease: float
    blocking_timeout: float


@dataclass
class Notes:
    """What the clients of one process did."""

    records: array[int]
    errors: list[str]

    def answer(self) -> Answer:
        """The notes as plain values."""
        return {"records": self.records.tolist(), "errors": sorted(set(self.errors))[:3]}


def contest_of_threads(opened: SidedThreads, contest: Contest) -> Answer:
    """Run the clients as threads."""
    assert opened.lock is not None, "it has more than batches"
    read, write, notes = opened.lock, opened.write or opened.lock, Notes(array("q"), [])
    threads = [
        threading.Thread(target=_contend, args=(contest, write if writes else read, writes, notes))
        for writes in [0] * contest.readers + [1] * contest.writers
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return notes.answer()


def _contend(contest: Contest, make: MakeLock, writes: int, notes: Notes) -> None:
    """Acquire, hold and release until the end; then hand in the records."""
    records, hold = array("q"), int(contest.hold * 1e9)
    time.sleep(max(0, contest.start - clock()) / 1e9)
    try:
        while (called := clock()) < contest.end:
            lock = make(contest.key, timeout=contest.lease, blocking_timeout=contest.blocking_timeout)
            if not lock.acquire():
                records.extend((writes, called, 0, clock(), 0))
                continue
            granted = clock()
            time.sleep(max(0, granted + hold - clock()) / 1e9)
            releasing = clock()
            lock.release()
            records.extend((writes, called, granted, releasing, clock()))
    except Exception as error:  # a client reports; the parent decides
        notes.errors.append(error_text(error))
    notes.records.extend(records)


async def contest_of_tasks(opened: SidedTasks, contest: Contest) -> Answer:
    """Run the clients as tasks."""
    read, write, notes = opened.lock, opened.write or opened.lock, Notes(array("q"), [])
    async with asyncio.TaskGroup() as group:
        for writes in [0] * contest.readers + [1] * contest.writers:
            group.create_task(_contend_in_task(contest, write if writes else read, writes, notes))
    return notes.answer()


async def _contend_in_task(contest: Contest, make: MakeAsyncLock, writes: int, notes: Notes) -> None:
    """The same as `_contend`, line by line, for a task."""
    records, hold = array("q"), int(contest.hold * 1e9)
    await asyncio.sleep(max(0, contest.start - clock()) / 1e9)
    try:
        while (called := clock()) < contest.end:
            lock = make(contest.key, timeout=contest.lease, blocking_timeout=contest.blocking_timeout)
            if not await lock.acquire():
                records.extend((writes, called, 0, clock(), 0))
                continue
            granted = clock()
            await asyncio.sleep(max(0, granted + hold - clock()) / 1e9)
            releasing = clock()
            await lock.release()
            records.extend((writes, called, granted, releasing, clock()))
    except Exception as error:  # a client reports; the parent decides
        notes.errors.append(error_text(error))
    notes.records.extend(records)


# --------------------------------------------------------------------------------------------------------- the renewal


def renew_in_thread(opened: SidedThreads, key: str, leases: int, lease: float, periods: int) -> Answer:
    """Hold leases that the library renews. This thread sleeps while the CPU time of so many periods is measured, and
    looks at the leases in one more."""
    assert opened.lock is not None, "it has more than batches"
    locks = [opened.lock(f"{key}:{number}", timeout=lease) for number in range(leases)]
    for lock in locks:
        lock.acquire()
    marks = [_mark(opened)]
    for _ in range(periods):
        time.sleep(lease / 3)
        marks.append(_mark(opened))
    shortest = [_shortest(locks)]
    for _ in range(LOOKS):
        time.sleep(lease / 3 / LOOKS)
        shortest.append(_shortest(locks))
    lost = 0
    for lock in locks:
        try:
            lock.release()
        except Exception:
            lost += 1
    return _renewed(marks, shortest, lost)


async def renew_in_task(opened: SidedTasks, key: str, leases: int, lease: float, periods: int) -> Answer:
    """The same as `renew_in_thread`, line by line, in a task."""
    locks = [opened.lock(f"{key}:{number}", timeout=lease) for number in range(leases)]
    for lock in locks:
        await lock.acquire()
    marks = [_mark(opened)]
    for _ in range(periods):
        await asyncio.sleep(lease / 3)
        marks.append(_mark(opened))
    shortest = [_shortest(locks)]
    for _ in range(LOOKS):
        await asyncio.sleep(lease / 3 / LOOKS)
        shortest.append(_shortest(locks))
    lost = 0
    for lock in locks:
        try:
            await lock.release()
        except Exception:
            lost += 1
    return _renewed(marks, shortest, lost)


def _mark(opened: SidedThreads | SidedTasks) -> tuple[float, float, int, int]:
    """The time, the CPU time of this process, commands sent and leases renewed so far. Where nobody counts commands,
    each renewal is one."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    renewals = opened.renewals() if opened.renewals else 0
    return clock() / 1e9, used.ru_utime + used.ru_stime, opened.sent() if opened.sent else renewals, renewals


def _shortest(locks: list[Any]) -> float | None:
    """The seconds that the lease which ends first has left; None where locks have no leases."""
    return min(lock.lease.remaining for lock in locks) if locks and hasattr(locks[0], "lease") else None


def _renewed(marks: list[tuple[float, float, int, int]], shortest: list[float | None], lost: int) -> Answer:
    periods = [
        dict(zip(("seconds", "cpu", "commands", "renewals"), (b - a for a, b in zip(*each, strict=True)), strict=True))
        for each in pairwise(marks)
    ]
    least = min((each for each in shortest if each is not None), default=None)
    return {"periods": periods, "shortest": least, "lost": lost}
