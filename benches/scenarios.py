"""Scenarios without contention: what every rival does, how it is timed and counted, inside its worker process.

All rivals share one loop body. A lap is one pair (batch: one acquire_many + release_many), clocked in nanoseconds
into an array made beforehand; laps follow each other without a pause, so a lap with 1,000 tasks is mostly queueing:
closed loop. Acquires, releases and laps are counted apart, for the parent to compare.
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
"""Laps per second for which arrays are made, over all clients; later laps are counted but not kept for percentiles."""


@dataclass(frozen=True)
class Scenario:
    """A scenario: ``api`` is threads, tasks or batch; ``clients`` call side by side; ``names`` distinct names."""

    name: str
    api: str
    clients: int
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
class Client:
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
    """The counts of one run over all clients. ``seconds``: from the first start to the last finish."""

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
    """Open ``scenario`` for ``rival``; names begin with ``label``. Raises what the rival raises."""
    keys = [f"{label}:{number}" for number in range(scenario.names)]
    if scenario.api == "tasks":
        return _OnTasks(scenario, rival, url, label, keys)
    threads = rival.open_threads(url, label)
    if scenario.api == "batch":
        assert threads.batch is not None, "this rival has no batches"
        return _Batches(threads.batch, threads.close, keys)
    return _OnThreads(threads, keys)


def thread_client(client: Client, lock: MakeLock, key: str, start: threading.Barrier, span: int) -> None:
    """Make pairs on ``key``, one after another, for ``span`` nanoseconds from when all clients are at ``start``."""
    laps, room, acquired, released = client.laps, len(client.laps), 0, 0
    start.wait()
    client.started = last = clock()
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
    except Exception as error:  # a client reports; the parent fails the run
        client.error = error_text(error)
    client.count, client.acquired, client.released, client.finished = released, acquired, released, last


async def task_client(client: Client, lock: MakeAsyncLock, key: str, start: asyncio.Event, span: int) -> None:
    """The same as ``thread_client``, line by line, for a task."""
    laps, room, acquired, released = client.laps, len(client.laps), 0, 0
    await start.wait()
    client.started = last = clock()
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
    except Exception as error:  # a client reports; the parent fails the run
        client.error = error_text(error)
    client.count, client.acquired, client.released, client.finished = released, acquired, released, last


def batch_client(
    client: Client, batch: Callable[[Sequence[str]], tuple[int, int]], keys: Sequence[str], span: int
) -> None:
    """Make whole batches of ``keys``, one after another, for ``span`` nanoseconds."""
    laps, room = client.laps, len(client.laps)
    client.started = last = clock()
    end = last + span
    try:
        while last < end:
            acquired, released = batch(keys)
            client.acquired += acquired
            client.released += released
            now = clock()
            if client.count < room:
                laps[client.count] = now - last
            client.count += 1
            last = now
    except Exception as error:  # a client reports; the parent fails the run
        client.error = error_text(error)
    client.finished = last


def make_clients(count: int, seconds: float) -> list[Client]:
    """Clients with arrays for twice their fair share of ``ROOM_RATE``."""
    room = 16 + int(2 * seconds * ROOM_RATE / count)
    return [Client(array("q", bytes(8 * room))) for _ in range(count)]


def tally(clients: Iterable[Client], pairs_a_lap: int = 1) -> Tally:
    """Add up the counts of the clients."""
    clients, laps = list(clients), array("q")
    for client in clients:
        laps.extend(client.laps[: client.count])
    return Tally(
        pairs=pairs_a_lap * sum(client.count for client in clients),
        acquired=sum(client.acquired for client in clients),
        released=sum(client.released for client in clients),
        seconds=(max(client.finished for client in clients) - min(client.started for client in clients)) / 1e9,
        laps=laps,
        errors=sorted({client.error for client in clients if client.error}),
    )


class _OnThreads:
    """Clients that are threads, over the rival's client."""

    def __init__(self, threads: Threads, keys: Sequence[str]) -> None:
        if threads.lock is None:
            raise NotImplementedError("this rival has batches only")
        self._lock, self._keys, self._close = threads.lock, keys, threads.close

    def run(self, seconds: float) -> Tally:
        clients, span = make_clients(len(self._keys), seconds), int(seconds * 1e9)
        start = threading.Barrier(len(clients))
        callers = [
            threading.Thread(target=thread_client, args=(client, self._lock, key, start, span))
            for client, key in zip(clients, self._keys, strict=True)
        ]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        return tally(clients)

    def close(self) -> None:
        self._close()


class _Batches:
    """One client, the main thread, which makes batches."""

    def __init__(
        self,
        batch: Callable[[Sequence[str]], tuple[int, int]],
        close: Callable[[], object],
        keys: Sequence[str],
    ) -> None:
        self._batch, self._keys, self._close = batch, keys, close

    def run(self, seconds: float) -> Tally:
        (client,) = make_clients(1, seconds)
        batch_client(client, self._batch, self._keys, int(seconds * 1e9))
        return tally([client], len(self._keys))

    def close(self) -> None:
        self._close()


class _OnTasks:
    """Clients that are tasks, over the rival's client, on a loop that runs as long as it is open."""

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
        return self._runner.run(self._run_clients(seconds))

    async def _run_clients(self, seconds: float) -> Tally:
        clients, span, start = make_clients(len(self._keys), seconds), int(seconds * 1e9), asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for client, key in zip(clients, self._keys, strict=True):
                group.create_task(task_client(client, self._tasks.lock, key, start, span))
            start.set()
        return tally(clients)

    def close(self) -> None:
        async def end() -> None:
            await self._tasks.close()

        with self._runner:
            self._runner.run(end())
