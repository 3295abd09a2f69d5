"""Scenarios without contention: what every rival does, how it is clocked and counted, inside its worker process.

Law: one loop body for all rivals. A lap is one pair (batch: one acquire_many + release_many), clocked in nanoseconds
into an array made beforehand; laps follow each other without a pause, so a lap with 1,000 tasks is mostly queueing:
closed loop. Acquired, released and lapped are counted apart, for the parent to compare.
"""

from __future__ import annotations

import asyncio
import importlib
import threading
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from time import perf_counter_ns as clock
from typing import Protocol

from .orders import error_text
from .rivals import LEASE, MakeAsyncLock, MakeLock, Rival, Tasks, Threads

ROOM_RATE = 1_000_000
"""Laps per second for which arrays are made, over all lanes; later laps are counted but not kept for percentiles."""


@dataclass(frozen=True)
class Scenario:
    """Who does what: ``face`` is threads, tasks or batch; ``lanes`` callers side by side; ``names`` distinct names."""

    name: str
    face: str
    lanes: int
    names: int
    loop: str
    title: str


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("pair", "threads", 1, 1, "", "one thread"),
        Scenario("threads", "threads", 16, 16, "", "16 threads, distinct names"),
        Scenario("tasks", "tasks", 1000, 1000, "asyncio", "1,000 tasks, distinct names, closed loop"),
        Scenario("tasks-uvloop", "tasks", 1000, 1000, "uvloop", "1,000 tasks on uvloop, distinct names, closed loop"),
        Scenario("batch", "batch", 1, 500, "", "500 names at once, latency per batch"),
    )
}


@dataclass
class Lane:
    """One caller and what it counted."""

    laps: array[int]
    count: int = 0
    acquired: int = 0
    released: int = 0
    started: int = 0
    finished: int = 0
    error: str = ""


@dataclass
class Tally:
    """One run over all lanes. ``seconds`` from the first start to the last finish."""

    pairs: int
    acquired: int
    released: int
    seconds: float
    laps: array[int]
    errors: list[str] = field(default_factory=list)


class OpenScenario(Protocol):
    """A scenario opened for one rival: run it many times, close it once."""

    def run(self, seconds: float) -> Tally: ...

    def close(self) -> None: ...


def open_scenario(scenario: Scenario, rival: Rival, url: str, label: str) -> OpenScenario:
    """Open ``scenario`` for ``rival``; names begin with ``label``. Raises what its client raises."""
    keys = [f"{label}:{number}" for number in range(scenario.names)]
    if scenario.face == "tasks":
        return _OnTasks(scenario, rival, url, label, keys)
    threads = rival.open_threads(url, label)
    if scenario.face == "batch":
        assert threads.batch is not None, "this rival has no batches"
        return _Batches(threads.batch, threads.close, keys)
    return _OnThreads(threads, keys)


def thread_lane(lane: Lane, lock: MakeLock, key: str, gate: threading.Barrier, span: int) -> None:
    """Pairs on ``key``, one after another, for ``span`` nanoseconds after the gate opens."""
    laps, room, acquired, released = lane.laps, len(lane.laps), 0, 0
    gate.wait()
    lane.started = last = clock()
    end = last + span
    try:
        while last < end:
            with lock(key, timeout=LEASE):
                acquired += 1
            now = clock()
            if released < room:
                laps[released] = now - last
            released += 1
            last = now
    except Exception as error:  # a lane reports; the parent fails the run
        lane.error = error_text(error)
    lane.count, lane.acquired, lane.released, lane.finished = released, acquired, released, last


async def task_lane(lane: Lane, lock: MakeAsyncLock, key: str, gate: asyncio.Event, span: int) -> None:
    """The same for a task: kept line by line beside ``thread_lane``."""
    laps, room, acquired, released = lane.laps, len(lane.laps), 0, 0
    await gate.wait()
    lane.started = last = clock()
    end = last + span
    try:
        while last < end:
            async with lock(key, timeout=LEASE):
                acquired += 1
            now = clock()
            if released < room:
                laps[released] = now - last
            released += 1
            last = now
    except Exception as error:  # a lane reports; the parent fails the run
        lane.error = error_text(error)
    lane.count, lane.acquired, lane.released, lane.finished = released, acquired, released, last


def batch_lane(lane: Lane, batch: Callable[[Sequence[str]], tuple[int, int]], keys: Sequence[str], span: int) -> None:
    """Whole batches of ``keys``, one after another, for ``span`` nanoseconds."""
    laps, room = lane.laps, len(lane.laps)
    lane.started = last = clock()
    end = last + span
    try:
        while last < end:
            acquired, released = batch(keys)
            lane.acquired += acquired
            lane.released += released
            now = clock()
            if lane.count < room:
                laps[lane.count] = now - last
            lane.count += 1
            last = now
    except Exception as error:  # a lane reports; the parent fails the run
        lane.error = error_text(error)
    lane.finished = last


def make_lanes(count: int, seconds: float) -> list[Lane]:
    """Lanes with arrays for twice their fair share of ``ROOM_RATE``."""
    room = 16 + int(2 * seconds * ROOM_RATE / count)
    return [Lane(array("q", bytes(8 * room))) for _ in range(count)]


def tally(lanes: Iterable[Lane], pairs_a_lap: int = 1) -> Tally:
    """Add the lanes up."""
    lanes, laps = list(lanes), array("q")
    for lane in lanes:
        laps.extend(lane.laps[: lane.count])
    return Tally(
        pairs=pairs_a_lap * sum(lane.count for lane in lanes),
        acquired=sum(lane.acquired for lane in lanes),
        released=sum(lane.released for lane in lanes),
        seconds=(max(lane.finished for lane in lanes) - min(lane.started for lane in lanes)) / 1e9,
        laps=laps,
        errors=sorted({lane.error for lane in lanes if lane.error}),
    )


class _OnThreads:
    """A thread a lane, all over one client."""

    def __init__(self, threads: Threads, keys: Sequence[str]) -> None:
        if threads.lock is None:
            raise NotImplementedError("this rival has batches only")
        self._lock, self._keys, self._close = threads.lock, keys, threads.close

    def run(self, seconds: float) -> Tally:
        lanes, span = make_lanes(len(self._keys), seconds), int(seconds * 1e9)
        gate = threading.Barrier(len(lanes))
        callers = [
            threading.Thread(target=thread_lane, args=(lane, self._lock, key, gate, span))
            for lane, key in zip(lanes, self._keys, strict=True)
        ]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        return tally(lanes)

    def close(self) -> None:
        self._close()


class _Batches:
    """The main thread alone."""

    def __init__(
        self,
        batch: Callable[[Sequence[str]], tuple[int, int]],
        close: Callable[[], object],
        keys: Sequence[str],
    ) -> None:
        self._batch, self._keys, self._close = batch, keys, close

    def run(self, seconds: float) -> Tally:
        (lane,) = make_lanes(1, seconds)
        batch_lane(lane, self._batch, self._keys, int(seconds * 1e9))
        return tally([lane], len(self._keys))

    def close(self) -> None:
        self._close()


class _OnTasks:
    """A task a lane, all over one client, on one loop that lives as long as the client."""

    def __init__(self, scenario: Scenario, rival: Rival, url: str, label: str, keys: Sequence[str]) -> None:
        new_loop = importlib.import_module(scenario.loop).new_event_loop
        self._runner = asyncio.Runner(loop_factory=new_loop)
        self._keys = keys
        try:
            self._tasks: Tasks = self._runner.run(rival.open_tasks(url, label))
        except BaseException:
            self._runner.close()
            raise

    def run(self, seconds: float) -> Tally:
        return self._runner.run(self._race(seconds))

    async def _race(self, seconds: float) -> Tally:
        lanes, span, gate = make_lanes(len(self._keys), seconds), int(seconds * 1e9), asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for lane, key in zip(lanes, self._keys, strict=True):
                group.create_task(task_lane(lane, self._tasks.lock, key, gate, span))
            gate.set()
        return tally(lanes)

    def close(self) -> None:
        async def end() -> None:
            await self._tasks.close()

        with self._runner:
            self._runner.run(end())
