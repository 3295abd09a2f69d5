"""A worker of a contest: one of a rival's processes (``python -m fastlock.benches.contention.worker MODULE``).

Like ``benches.worker``, it exchanges messages with its parent between runs only. It prepares its clients when ordered
to, and starts them when ordered to; they begin at the time that the log says. The victim of a crash is a child that it
forks for each run, before it has opened anything itself.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from time import monotonic_ns as clock
from typing import Any, Protocol, TypeVar

from ..orders import error_text, main
from ..rivals import AsyncLock, MakeAsyncLock, MakeLock, Rival, SyncLock
from .analysis import promise
from .clients import (
    EARLIEST_NS,
    Early,
    Job,
    arrivals,
    choices,
    exact_sleeps,
    new_loop,
    popularity,
    task_client,
    thread_client,
)
from .contests import Contest
from .log import PID, READY, START, STOP, Client, Log, Shape

Answer = dict[str, Any]
T = TypeVar("T")

CHECK_SECONDS = 0.005
"""Seconds between two checks of a victim, and of its parent, whether the other still runs."""

VICTIM_SECONDS = 30.0
"""Seconds after which a victim that was not killed as planned is killed by its parent."""


class Clients(Protocol):
    """The clients of this process, over what its rival opened for threads or for asyncio."""

    def hold(self, job: Job) -> None: ...

    def arm(self, jobs: Sequence[Job]) -> None: ...

    def go(self, start: int, jobs: Sequence[Job], holder: Job | None) -> None: ...

    def sent(self) -> int | None: ...

    def close(self) -> None: ...


class ThreadClients:
    """Clients that are threads, made before the start."""

    def __init__(self, contest: Contest, rival: Rival, url: str, label: str) -> None:
        self._opened = rival.open_threads(url, label)
        assert self._opened.lock is not None, "this rival has batches only"
        self._make: MakeLock = self._opened.lock
        self._held: list[SyncLock] = []

    def hold(self, job: Job) -> None:
        """Acquire the job's name, until ``go`` releases it or this process ends."""
        name, called = job.names[0], clock()
        lock = self._make(job.keys[name], timeout=job.contest.lease)
        if not lock.acquire():
            raise RuntimeError(f"{job.keys[name]} was not free before the run")
        job.client.granted(name, called, called, clock())
        self._held.append(lock)

    def arm(self, jobs: Sequence[Job]) -> None:
        self._started = threading.Event()
        # Daemons: if the parent dies before the order to go, these threads wait forever and must not keep this process.
        self._threads = [threading.Thread(target=self._run_client, args=(job,), daemon=True) for job in jobs]
        for thread in self._threads:
            thread.start()

    def _run_client(self, job: Job) -> None:
        self._started.wait()
        try:
            thread_client(job, self._make)
        except Exception as error:  # an error of the client itself, which would be lost with its thread
            job.client.errors.append(error_text(error))

    def go(self, start: int, jobs: Sequence[Job], holder: Job | None) -> None:
        for job in jobs:
            job.begin(start)
        self._started.set()
        if holder is not None:
            time.sleep(max(0, start + int(holder.seconds * 1e9) - clock()) / 1e9)
            holder.client.leaving(holder.names[0])
            releasing = clock()
            self._held.pop().release()
            holder.client.released(releasing, clock())
        for thread in self._threads:
            thread.join()

    def sent(self) -> int | None:
        """The number of commands sent until now, where the library counts them."""
        return self._opened.sent() if self._opened.sent else None

    def close(self) -> None:
        self._opened.close()


class Loop:
    """An event loop in a thread of its own, which goes on between two runs, as that of a service does: commands that a
    lock still has to send after a wait that timed out are sent then."""

    def __init__(self, kind: str) -> None:
        started = threading.Event()
        self._kind = kind
        self._thread = threading.Thread(target=self._run, args=(started,), daemon=True)
        self._thread.start()
        started.wait()

    def _run(self, started: threading.Event) -> None:
        with asyncio.Runner(loop_factory=lambda: new_loop(self._kind)) as runner:
            runner.run(self._run_until_closed(started))

    async def _run_until_closed(self, started: threading.Event) -> None:
        self._loop, self._closed = asyncio.get_running_loop(), asyncio.Event()
        started.set()
        await self._closed.wait()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop, and wait for it in the calling thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def close(self) -> None:
        """End the loop, and what still runs on it."""
        self._loop.call_soon_threadsafe(self._closed.set)
        self._thread.join()


class TaskClients:
    """Clients that are tasks, on a loop that runs as long as the rival's client is open."""

    def __init__(self, contest: Contest, rival: Rival, url: str, label: str) -> None:
        self._loop = Loop(contest.loop)
        try:
            self._opened = self._loop.run(rival.open_tasks(url, label))
        except BaseException:
            self._loop.close()
            raise
        self._make: MakeAsyncLock = self._opened.lock
        self._held: list[AsyncLock] = []

    def hold(self, job: Job) -> None:
        """Acquire the job's name, until ``go`` releases it or this process ends."""
        self._loop.run(self._hold(job))

    async def _hold(self, job: Job) -> None:
        name, called = job.names[0], clock()
        lock = self._make(job.keys[name], timeout=job.contest.lease)
        if not await lock.acquire():
            raise RuntimeError(f"{job.keys[name]} was not free before the run")
        job.client.granted(name, called, called, clock())
        self._held.append(lock)

    def arm(self, jobs: Sequence[Job]) -> None:
        """Do nothing: tasks are made by ``go``, which takes no time."""

    def go(self, start: int, jobs: Sequence[Job], holder: Job | None) -> None:
        self._loop.run(self._run_clients(start, jobs, holder))

    async def _run_clients(self, start: int, jobs: Sequence[Job], holder: Job | None) -> None:
        async with asyncio.TaskGroup() as group:
            for job in jobs:
                job.begin(start)
                group.create_task(self._run_client(job))
            if holder is not None:
                await asyncio.sleep(max(0, start + int(holder.seconds * 1e9) - clock()) / 1e9)
                holder.client.leaving(holder.names[0])
                releasing = clock()
                await self._held.pop().release()
                holder.client.released(releasing, clock())

    async def _run_client(self, job: Job) -> None:
        try:
            await task_client(job, self._make)
        except Exception as error:
            job.client.errors.append(error_text(error))

    def sent(self) -> int | None:
        """The number of commands sent until now, where the library counts them."""
        return self._opened.sent() if self._opened.sent else None

    def close(self) -> None:
        async def end() -> None:
            await self._opened.close()

        try:
            self._loop.run(end())
        finally:
            self._loop.close()


CLIENTS: dict[str, Callable[[Contest, Rival, str, str], Clients]] = {"threads": ThreadClients, "tasks": TaskClients}


class Worker:
    """Answers the orders of the parent: open, arm, go, close."""

    def __init__(self, rival: Rival) -> None:
        self._rival = rival
        self._early = Early(EARLIEST_NS)
        self._clients: Clients | None = None
        self._log: Log | None = None
        self._jobs: list[Job] = []
        self._holder: Job | None = None
        self._victim = 0

    def open(self, url: str, label: str, path: str, size: int) -> Answer:
        """Map the log. The rival connects in the first run that needs a connection; keys begin with ``label``."""
        self._url, self._label = url, label
        self._log = Log(path, size)
        self._log.path = ""  # the parent removes the file
        return {}

    def arm(self, contest: dict[str, Any], shape: dict[str, int], process: int, seconds: float, seed: int) -> Answer:
        """Prepare this process's clients for a run; they wait for ``go``."""
        assert self._log is not None, "open comes before arm"
        asked, self._log.shape = Contest(**contest), Shape(**shape)
        keys = [f"{self._label}:{number}" for number in range(asked.cells)]
        early = self._early if asked.names == 1 else Early(0)
        weights, due = popularity(asked.names, asked.zipf), [*arrivals(asked, seed, seconds), *[[]] * asked.holders]

        def job(log: Log, number: int, names: Sequence[int]) -> Job:
            client = Client(log, number, promise(asked.lease), asked.books)
            return Job(client, asked, names, keys, due[number], seconds, early)

        clients = asked.share(process)
        self._jobs = [job(self._log, number, choices(asked, number, seed, weights)) for number in clients]
        held = range(asked.holders) if process == 0 else ()
        holders = [job(self._log, asked.clients + name, (name,)) for name in held]
        if asked.role == "crash" and holders:
            self._victim = self._fork(holders, asked)
            return {}
        if self._clients is None:
            self._clients = CLIENTS[asked.api](asked, self._rival, self._url, self._label)
        self._holder = holders[0] if holders else None
        if self._holder is not None:
            self._clients.hold(self._holder)
        gc.collect()
        self._clients.arm(self._jobs)
        return {}

    def go(self) -> Answer:
        """Start the clients and wait until they are done; or, in a crash, until the victim is dead."""
        assert self._log is not None
        if self._victim:
            self._wait_for_kill()
            return {"cpu": 0.0, "errors": [], "sent": None}  # what the victim sent is not known
        assert self._clients is not None, "arm comes before go"
        sent, before = self._clients.sent(), time.process_time_ns() - self._early.watched
        self._clients.go(self._log.words[START], self._jobs, self._holder)
        cpu = time.process_time_ns() - self._early.watched - before
        now = self._clients.sent()
        clients = [job.client for job in self._jobs]
        for client in [*clients, *([self._holder.client] if self._holder else [])]:
            client.write()
        errors = sorted({text for client in clients for text in client.errors})
        if any(client.full for client in clients):
            errors.append("a client's log was full before the run was over")
        return {"cpu": cpu / 1e9, "errors": errors[:3], "sent": None if now is None else now - (sent or 0)}

    def close(self) -> Answer:
        """Close what is open."""
        self._end_victim()
        clients, self._clients = self._clients, None
        self._jobs, self._holder = [], None
        if clients is not None:
            clients.close()
        if self._log is not None:
            self._log.close()
            self._log = None
        return {}

    def _wait_for_kill(self) -> None:
        """Wait until the parent has killed the victim; kill it here if the parent is gone, or does not."""
        assert self._log is not None
        parent, end = os.getppid(), time.monotonic() + VICTIM_SECONDS
        while not os.waitpid(self._victim, os.WNOHANG)[0]:
            if os.getppid() != parent or time.monotonic() > end or self._log.words[STOP]:
                self._end_victim()
                return
            time.sleep(CHECK_SECONDS)
        self._victim = 0

    def _end_victim(self) -> None:
        if self._victim:
            os.kill(self._victim, signal.SIGKILL)
            os.waitpid(self._victim, 0)
            self._victim = 0

    def _fork(self, holders: Sequence[Job], contest: Contest) -> int:
        """Fork a child that holds all names until it is killed. Returns its process id, once it holds them."""
        assert self._log is not None
        words, parent = self._log.words, os.getpid()
        child = os.fork()
        if not child:
            try:
                self._hold_until_killed(holders, contest, parent)
            except Exception as error:
                print(f"the process to be killed: {error!r}", file=sys.stderr, flush=True)
            finally:
                os._exit(1)
        words[PID], end = child, time.monotonic() + VICTIM_SECONDS
        while words[READY] < len(holders):
            if os.waitpid(child, os.WNOHANG)[0]:
                raise RuntimeError("the process that was to hold the names and be killed ended by itself")
            if time.monotonic() > end or words[STOP]:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                raise RuntimeError("the process that was to hold the names and be killed did not get them")
            time.sleep(CHECK_SECONDS / 5)
        return child

    def _hold_until_killed(self, holders: Sequence[Job], contest: Contest, parent: int) -> None:
        assert self._log is not None
        clients = CLIENTS[contest.api](contest, self._rival, self._url, self._label)
        for holder in holders:
            clients.hold(holder)
            holder.client.write()
            self._log.words[READY] += 1
        while os.getppid() == parent:  # it must not outlive its parent
            time.sleep(CHECK_SECONDS)


def actions(worker: Worker) -> dict[str, Callable[..., Answer]]:
    """The actions that a worker can be ordered to do."""
    return {"open": worker.open, "arm": worker.arm, "go": worker.go, "close": worker.close}


if __name__ == "__main__":
    exact_sleeps()
    sys.exit(main(sys.argv, lambda rival: actions(Worker(rival))))
