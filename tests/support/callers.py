"""A chaos worker: a process with a few callers, threads or tasks, that acquire a few names in every way.

Each caller writes what it requests and what it gets into the worker's event log, and the judge believes nothing else.
Errors that a caller sees itself (an exception, a lease lost before its end) go into the worker's list of complaints.
The order of the callers' actions comes from the seed, their timing from the machine. Here: callers of plain locks;
`kind_callers.py` has those of the other kinds.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import math
import os
import random
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis
import redis.asyncio
from redis.asyncio.lock import Lock as AsyncRivalLock
from redis.lock import Lock as RivalLock

import fastlock
from fastlock import fencing
from fastlock._protocol.commands import token_matches
from fastlock._protocol.lease import now

from .apis import Api, drive
from .event_log import ENDED, EXTENDED, EXTENDING, FREED, GRANT, RELEASE, VANISHED, EventLog
from .register import Register

SHORTEST, LONGEST = 0.2, 2.0  # seconds of a lease, extensions included
PR_SET_PDEATHSIG = 1  # of prctl
NEARLY = 0.02  # seconds before the end of a blocking_timeout, in which there is no time to ask again
PROBED = 0.3  # part of the holds in which the server is asked for the end of the key
CLOCKS = 0.005  # seconds: the server counts in milliseconds, on a clock that it reads now and then
OVER = "over"  # a file that tells all workers that the run has ended
WIPED = "wiped"  # a file that tells when the server last lost its data
RIVAL = "rival"  # the name of redis-py's connections, which are not cut: redis-py would not know what it holds
ACTED = ("claim", "squat", "fence", "key", "fail", "desert")  # the planted violations that a caller commits itself


@dataclass(frozen=True)
class Plan:
    """What every worker of a run has in common."""

    url: str
    folder: Path
    seed: int
    names: int
    callers: int
    plant: str = ""  # the violation that this worker commits
    shortest: float = SHORTEST  # seconds of a lease
    register: str = ""  # URL of the server on which holders write by their fences
    cut: str = ""  # URL by which clients of fastlock come to the server, over connections that are cut


class Interrupted(Exception):
    """What the signal handler raises."""


class InterruptedInACall(Interrupted, OSError):
    """What the signal handler raises, disguised as the error of a system call."""


class NotedLock(RivalLock):
    """redis-py's lock, which notes when it sent its last request."""

    def do_acquire(self, token: Any) -> bool:
        self.sent = now()
        return bool(super().do_acquire(token))


class AsyncNotedLock(AsyncRivalLock):
    """redis-py's asyncio lock, which notes when it sent its last request."""

    async def do_acquire(self, token: Any) -> bool:
        self.sent = now()
        return bool(await super().do_acquire(token))


class Worker:
    """One process of the chaos."""

    def __init__(self, plan: Plan, number: int, api: str, kind: type[Caller]) -> None:
        self.plan, self.number, self.kind = plan, number, kind
        self.api = Api(api)
        self.log = EventLog(plan.folder / f"{number}.events")
        self.owner = os.getppid()
        self.client: Any = None
        self.rival: Any = None
        self.register: Register | None = None
        self.interrupts = 0

    def over(self) -> bool:
        return (self.plan.folder / OVER).exists() or os.getppid() != self.owner

    def wiped(self, deadline: float) -> bool:
        """Whether the server may have lost its data since the lease with this deadline was granted."""
        path = self.plan.folder / WIPED
        return path.exists() and float(path.read_text() or "inf") > deadline - self.kind.longest

    def complain(self, text: str) -> None:
        with (self.plan.folder / f"{self.number}.wrong").open("a") as file:
            file.write(f"worker {self.number}, {self.api.name}: {text}\n")

    # ------------------------------------------------------------------------------------------------ how they run

    def run(self) -> None:
        """Run until the end of the run. Ctrl-C ends only what the main thread is doing."""
        if sys.platform == "linux":  # a stopped process cannot see by itself that its parent has exited
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        stacks = (self.plan.folder / f"{self.number}.stacks").open("w")
        faulthandler.register(signal.SIGUSR1, stacks)
        try:
            if self.api.is_async:
                while not self.over():
                    with contextlib.suppress(KeyboardInterrupt):
                        asyncio.run(self._tasks())
            else:
                self._threads()
        except BaseException:
            self.complain(traceback.format_exc())

    def interrupt(self, number: int, frame: Any) -> None:
        self.interrupts += 1
        raise (Interrupted, InterruptedInACall)[self.interrupts % 2]

    def _threads(self) -> None:
        signal.signal(signal.SIGALRM, self.interrupt)
        self.client = fastlock.Client.from_url(self.plan.cut or self.plan.url, max_connections=3)
        self.rival = redis.Redis.from_url(self.plan.url, client_name=RIVAL)
        self._open_register(redis.Redis.from_url(self.plan.register or self.plan.url, client_name=RIVAL))
        drive(self._connected())
        callers = [self.kind(self, number) for number in range(self.plan.callers)]
        threads = [threading.Thread(target=drive, args=(each.guarded(),)) for each in callers[1:]]
        for thread in threads:
            thread.start()
        while not self.over():
            with contextlib.suppress(KeyboardInterrupt, Interrupted):
                drive(callers[0].guarded())
        for thread in threads:
            thread.join()
        self.client.close()

    async def _tasks(self) -> None:
        async with (
            self.api.module.Client.from_url(self.plan.cut or self.plan.url) as self.client,
            redis.asyncio.Redis.from_url(self.plan.url, client_name=RIVAL) as self.rival,
            redis.asyncio.Redis.from_url(self.plan.register or self.plan.url, client_name=RIVAL) as writer,
            asyncio.TaskGroup() as group,
        ):  # the group waits for all tasks, also when it is cancelled
            self._open_register(writer)
            await self._connected()
            asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, self._complain_of_tasks)
            for number in range(self.plan.callers):
                group.create_task(self.kind(self, number).guarded())

    def _open_register(self, client: Any) -> None:
        if self.plan.register:
            self.register = Register(client, self.number, self.plan.plant == "stale")

    async def _connected(self) -> None:
        """Make the first connection: one that is cut before counts as a wrong setting, and is not retried."""
        while not self.over():
            with contextlib.suppress(redis.exceptions.ConnectionError):
                await self.api.get(self.client.server_info())
                return

    def _complain_of_tasks(self) -> None:
        """Report where all tasks wait, and the waiters of the client's local queues."""
        for task in asyncio.all_tasks():
            awaited: Any = task.get_coro()
            chain = []
            while awaited is not None:
                chain.append(repr(awaited))
                awaited = getattr(awaited, "cr_await", None)
            self.complain(f"{task.get_name()} waits: " + "\n  ".join(chain))
        transport = self.client._transport
        self.complain(
            f"connection {transport.connection!r}, broken by {getattr(transport.connection, 'error', None)!r}, "
            f"connecting {transport._connecting!r}"
        )
        for queue in {*transport.queues.by_key.values(), *transport.queues.by_entry.values()}:
            state = {
                name: getattr(queue, name)
                for name in ("key", "entry_sent", "recheck_at", "circulating", "error", "shared")
            }
            waiters = [(each.woken, each.wake, each.lease) for each in queue.waiters]
            self.complain(f"at {now():.6f}: local queue {state}, waiters {waiters}")


class Caller:
    """One thread or task of a worker, which does one action after the other."""

    longest = LONGEST  # seconds of a lease on the server
    fair = 0.3  # part of the locks of one name that are in strict order
    renewed = 0.15  # part of them whose leases are renewed

    def __init__(self, worker: Worker, number: int) -> None:
        self.worker, self.number = worker, number
        self.api, self.log, self.plan = worker.api, worker.log, worker.plan
        self.rng = random.Random(f"{self.plan.seed}/{worker.number}/{number}")

    async def guarded(self) -> None:
        while not self.worker.over():
            try:
                await self.turn()
            except Interrupted:
                raise
            except Exception:
                self.worker.complain(traceback.format_exc())
            await self.rest(self.rng.uniform(0, 0.01))

    async def rest(self, seconds: float) -> None:
        if self.api.is_async:
            await asyncio.sleep(seconds)
        else:
            time.sleep(seconds)

    async def turn(self) -> None:
        rng = self.rng.random()
        if self.plan.plant in ACTED and rng < 0.2:
            await self.commit_violation()
        # Ctrl-C inside of redis-py's acquire can leave the key, so the main thread does not call it.
        elif rng < 0.06 and (self.api.is_async or self.number):
            await self.as_rival()
        elif rng < 0.15:
            await self.batch()
        else:
            await self.single()

    def name(self) -> int:
        return self.rng.randrange(self.plan.names)

    def lease(self) -> float:
        """Half of the leases are as short as the plan allows: such a lease may end before its caller runs."""
        short = self.plan.shortest < SHORTEST and self.rng.random() < 0.5
        return self.plan.shortest if short else round(self.rng.uniform(SHORTEST, LONGEST), 3)

    # ----------------------------------------------------------------------------------------------------- one name

    async def single(self) -> None:
        rng, name, lease = self.rng, self.name(), self.lease()
        way = rng.choices(("wait", "limit", "try", "cancel"), (50, 20, 15, 15))[0]
        settings: dict[str, Any] = {"fair": rng.random() < self.fair, "fence": rng.random() < 0.5}
        if rng.random() < self.renewed:
            lease, settings["auto_renew"] = round(rng.uniform(SHORTEST, SHORTEST * 3), 3), True
        limit = rng.uniform(0.005, 1.5) if way == "limit" else None
        if way == "try":
            settings["blocking"] = False
        self.choose(settings)
        lock = self.worker.client.lock(
            f"hot:{name}", timeout=lease, thread_local=False, blocking_timeout=limit, **settings
        )
        request = self.log.begin_request(name, lease + settings.get("keep", 0.0), blocking=way != "try")
        try:
            if not await self.acquire(lock, request, limit, cancel=way == "cancel"):
                self.log.write(ENDED, request)
                if lock.lease is not None:
                    self.worker.complain(f"{lock!r}: not acquired, but there is a lease")
                return
            await self.hold(lock, request, lease)
        except BaseException:  # Ctrl-C: whatever is held is released, which has to be possible
            self.log.write(RELEASE, request)
            if lock.lease is not None:
                self.releases(lock.lease)
                with contextlib.suppress(fastlock.LockNotOwnedError):
                    await self.api.get(lock.release())
            self.log.write(FREED, request)
            self.log.write(ENDED, request)
            raise

    def choose(self, settings: dict[str, Any]) -> None:
        """Choose more settings of a lock."""

    async def acquire(self, lock: Any, request: int, limit: float | None, *, cancel: bool) -> bool:
        """An acquire, which is cancelled half-way if `cancel`."""

        async def noted() -> bool:
            got = await self.api.get(lock.acquire())
            if got:
                self.log.write(GRANT, request, lock.lease._deadline, lock.lease.fence or 0)
            return bool(got)

        if not cancel or not self.api.is_async:
            start = now()
            try:
                return await noted()
            except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError):
                # The connection was cut, or was still coming up, at the very end of the timeout, when nobody could say
                # whether the name was held.
                if limit is None or now() < start + limit - NEARLY:
                    raise
                return False
        task = asyncio.ensure_future(noted())
        timer = asyncio.get_running_loop().call_later(self.rng.choice((0, 0.001, 0.3)) * self.rng.random(), task.cancel)
        try:
            return bool(await task)
        except asyncio.CancelledError:
            me = asyncio.current_task()
            if me is not None and me.cancelling():
                raise
            return False
        finally:
            timer.cancel()

    async def hold(self, lock: Any, request: int, lease: float) -> None:
        """Hold mostly for a moment; some callers extend, some hold beyond the lease, some never release."""
        rng, granted, owned = self.rng, now(), lock.lease
        await self.write(lock.name, request, owned, granted)
        if owned._renewal is not None:
            await self.hold_renewed(owned, request)
            await self.write(lock.name, request, owned, granted)
            await self.claims_no_more(owned)
            self.log.write(RELEASE, request)
            await self.release(lock)
            self.freed(request, lock, owned)
            return
        kinds, late = ("short", "long", "extend", "beyond", "never", "busy"), 40 if self.plan.plant == "stale" else 1.5
        what = rng.choices(kinds, (92, 3, 2, late, 1.5, 2 if lease < SHORTEST else 0))[0]
        if what == "never":
            return
        if what == "extend" and lease < LONGEST / 2:
            await self.rest(rng.uniform(0, lease / 2))
            await self.extend(lock, request, lease)
            await self.rest(rng.uniform(0, lease / 2))
        elif what == "busy":  # keeps the interpreter, so that no other caller of the process runs
            end = now() + rng.uniform(0, 5 * lease)
            while now() < end:
                pass
        else:
            longest = {"short": 0.005, "beyond": lease + 0.5}.get(what, lease / 2)
            await self.rest(rng.uniform(lease if what == "beyond" else 0, longest))
        await self.write(lock.name, request, owned, granted)
        await self.claims_no_more(owned)
        self.log.write(RELEASE, request)
        await self.release(lock)
        self.freed(request, lock, owned)

    async def claims_no_more(self, lease: Any) -> None:
        """A lease may end no later than its key does on the server."""
        deadline = lease._deadline
        if self.rng.random() > PROBED or self.in_main() or not math.isfinite(deadline):
            return
        try:
            holder = await self.api.get(self.worker.rival.get(lease._key))
            left = await self.api.get(self.worker.rival.pttl(lease._key))
        except redis.RedisError:  # the server is restarted
            return
        if token_matches(holder, lease._raw_token) and left >= 0 and now() + left / 1000 + CLOCKS < deadline:
            self.worker.complain(f"{lease._raw_token!r}: the lease claims {deadline - now():.6f} s of {left} ms")

    def in_main(self) -> bool:
        """Whether a signal's handler may raise inside of redis-py, which may leave its locks locked."""
        return not (self.api.is_async or self.number)

    def freed(self, request: int, lock: Any, lease: Any) -> None:
        """Note that a release has returned."""
        self.log.write(FREED, request)

    async def write(self, name: Any, request: int, owned: Any, granted: float) -> None:
        """Write to the register, without a look at the lease, as a holder that was stopped meanwhile does. Only one
        whose lease has ended may be refused."""
        register = self.worker.register
        if register is None or not owned.fence or self.in_main():
            return
        deadline = owned._deadline
        try:
            await self.api.get(register.write(name, request, owned.fence, granted))
        except fencing.StaleFenceError as error:
            self.lost(deadline, f"register: {error}")

    async def hold_renewed(self, lease: Any, request: int) -> None:
        """Hold for longer than a lease, which is renewed; end when it is told lost, which has to be in time."""
        end, seen = now() + self.rng.uniform(0, LONGEST - SHORTEST * 4) * self.rng.choice((0.1, 1)), lease._deadline
        self.log.write(EXTENDING, request, end + LONGEST)
        while now() < end and not lease.lost.is_set():
            await self.rest(0.01)
            if (deadline := lease._deadline) > seen:
                seen = deadline
                self.log.write(EXTENDED, request, seen)
        if lease.lost.is_set():
            self.lost(seen - lease._renewal.margin, "renewal")

    async def extend(self, lock: Any, request: int, lease: float) -> None:
        deadline = lock.lease._deadline
        again = self.rng.random() < 0.5
        self.log.write(EXTENDING, request, (now() if again else max(now(), deadline)) + LONGEST)
        try:
            await self.api.get(lock.reacquire() if again else lock.extend(lease))
        except fastlock.LockNotOwnedError:
            self.lost(deadline, "extend")
        else:
            self.log.write(EXTENDED, request, lock.lease._deadline)

    async def release(self, lock: Any) -> None:
        """Release; sometimes another thread or task releases the same lease at the same moment, and one of them
        succeeds."""
        lease, twice = lock.lease, self.rng.random() < 0.1
        self.releases(lease)
        deadline = lease._deadline

        async def release() -> bool:
            try:
                await self.api.get(lock.release())
            except fastlock.LockError:
                return False
            return True

        async def in_a_batch() -> bool:
            return bool((await self.api.get(self.worker.client.release_many([lease])))[0])

        released = await self.api.together([release, in_a_batch]) if twice else [await release()]
        if not any(released):
            self.lost(deadline, f"release of {lease._raw_token!r}{' twice' if twice else ''}")

    def releases(self, lease: Any) -> None:
        """Note that a lease is about to be released."""

    def lost(self, deadline: float, verb: str) -> None:
        """The server says that the caller no longer holds the name: allowed only after the lease's end."""
        if now() < deadline and not self.worker.wiped(deadline):
            self.worker.complain(f"{verb}: not owned, {deadline - now():.6f} s before the end of the lease")

    # ------------------------------------------------------------------------------------------------- several names

    async def batch(self) -> None:
        names = self.rng.sample(range(self.plan.names), min(self.plan.names, self.rng.randint(2, 4)))
        lease, client = self.lease(), self.worker.client
        requests = [self.log.begin_request(name, lease, blocking=False) for name in names]
        try:
            leases = await self.api.get(client.acquire_many([f"hot:{name}" for name in names], timeout=lease))
        except BaseException:
            for request in requests:
                self.log.write(VANISHED, request)
            raise
        try:
            for request, each in zip(requests, leases, strict=True):
                if each is None:
                    self.log.write(ENDED, request)
                else:
                    self.log.write(GRANT, request, each._deadline)
            await self.rest(self.rng.uniform(0, 0.005))
            await self.release_batch(requests, leases)
        except BaseException:
            for request in requests:
                self.log.write(RELEASE, request)
            await self.api.get(client.release_many(leases))
            for request in requests:
                self.log.write(FREED, request)
                self.log.write(ENDED, request)
            raise

    async def release_batch(self, requests: list[int], leases: list[Any]) -> None:
        deadlines = [each._deadline if each is not None else 0.0 for each in leases]
        for request in requests:
            self.log.write(RELEASE, request)
        released = await self.api.get(self.worker.client.release_many(leases))
        for request, mine, deadline in zip(requests, released, deadlines, strict=True):
            if not mine:
                self.lost(deadline, "release_many")
            self.log.write(FREED, request)

    # ------------------------------------------------------------------------------------------------------- redis-py

    async def as_rival(self) -> None:
        """Use redis-py's lock on the same names: it may come first, but breaks nothing."""
        kind = AsyncNotedLock if self.api.is_async else NotedLock
        name, lease = self.name(), self.lease()
        lock = kind(
            self.worker.rival, f"hot:{name}", timeout=lease, sleep=0.02, blocking_timeout=1.0, thread_local=False
        )
        request = self.log.begin_request(name, lease, blocking=True, rival=True)
        try:
            if not await self.api.get(lock.acquire()):
                self.log.write(ENDED, request)
                return
        except redis.exceptions.ConnectionError:  # cut before the connection had sent its client name
            self.log.write(VANISHED, request)
            return
        except BaseException:
            self.log.write(VANISHED, request)
            raise
        deadline = lock.sent + int(lease * 1000) / 1000
        self.log.write(GRANT, request, deadline)
        await self.rest(self.rng.uniform(0, 0.005))
        self.log.write(RELEASE, request)
        try:
            await self.api.get(lock.release())
        except redis.exceptions.LockNotOwnedError:
            self.lost(deadline, "redis-py's release")
        except redis.exceptions.RedisError:  # cut, or scripts were flushed twice meanwhile: the lease ends by itself
            return
        self.log.write(FREED, request)

    # ------------------------------------------------------------------------------- violations that the judge has to
    # find

    async def commit_violation(self) -> None:
        """Commit the planted violation: `claim` a name without a request, `squat` on one without logging it, report
        an old `fence`, leave a `key`, `fail`, or `desert`: wait without ever sending a request."""
        name, lease, plant = self.name(), self.lease(), self.plan.plant
        key = f"hot:{name}"
        if plant == "squat":
            await self.api.get(self.worker.rival.set(key, "squatter", px=4000))
        elif plant == "key":
            await self.api.get(self.worker.rival.set("hot:forgotten", "for ever"))
        elif plant == "fail":
            raise RuntimeError("planted")
        else:
            request = self.log.begin_request(name, lease, blocking=True)
            if plant == "desert":
                await self.rest(4.0 * LONGEST * self.plan.callers)
            self.log.write(GRANT, request, now() + lease, 1)
            if plant == "fence":
                self.log.write(RELEASE, request)
            await self.rest(lease / 2)
            self.log.write(FREED, request)
