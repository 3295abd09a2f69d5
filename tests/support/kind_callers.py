"""Chaos callers of the kinds of lock beside plain ones: reentrant, read-write, semaphore, several names as one.

They log and complain as a `Caller` of plain locks does. The holder of such a lock is a thread or a task, so what is
cancelled is a whole turn, a task of its own, at any of its points; and a turn that is interrupted releases whatever it
holds by then. Where the key is that of a plain lock, some turns use plain locks, redis-py's and batches beside.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

import redis

import fastlock
from fastlock._protocol.lease import now

from .callers import LONGEST, NEARLY, SHORTEST, Caller
from .event_log import DOWNGRADE, ENDED, EXTENDED, EXTENDING, FREED, GRANT, RELEASE, WHOLE
from .kind_judges import KEEP, PERMITS

WRITERS, PREFERRED = 0.3, 0.2  # part of the turns that write, and of those that go before all readers
DEEPEST = 4
OFTEN_ENOUGH = 10  # releases after which nothing may be held


class FairCaller(Caller):
    """A caller of locks in strict order."""

    fair = 1.0


class RenewedCaller(Caller):
    """A caller of locks whose leases are renewed."""

    renewed = 1.0


class UnconfirmedCaller(Caller):
    """A caller of locks whose releases wait for no answer. When a name is free again it learns late, or never."""

    def __init__(self, worker: Any, number: int) -> None:
        super().__init__(worker, number)
        self.unanswered: list[tuple[int, bytes, bytes]] = []  # requests whose release was sent: with key and token
        self.deadlines: dict[bytes, float] = {}  # of leases that were released, by token

    def choose(self, settings: dict[str, Any]) -> None:
        settings["confirm_release"] = self.rng.random() < 0.2
        if not settings["confirm_release"]:
            settings["on_lost"] = self.was_lost

    def was_lost(self, lease: Any) -> None:
        verb = f"a release of {lease._raw_token!r} that nobody waited for"
        self.lost(self.deadlines.get(lease._raw_token, -math.inf), verb)

    def releases(self, lease: Any) -> None:
        self.deadlines[lease._raw_token] = lease._deadline  # of a kept lease: that may be earlier than the last time

    async def turn(self) -> None:
        left = []
        for request, key, token in self.unanswered:
            delivery = self.worker.client._transport.unconfirmed.get(key)
            if delivery is not None and delivery.undo.tokens[0] == token:
                left.append((request, key, token))
            else:
                self.log.write(FREED, request)
        self.unanswered = left
        await super().turn()

    def freed(self, request: int, lock: Any, lease: Any) -> None:
        if lock.confirm_release:
            super().freed(request, lock, lease)
        else:
            self.unanswered.append((request, lease._key, lease._raw_token))


class KeptCaller(UnconfirmedCaller):
    """A caller of locks that keep their leases, beside others; releases are not waited for."""

    longest = LONGEST + KEEP
    fair = renewed = 0.05

    def choose(self, settings: dict[str, Any]) -> None:
        super().choose(settings)
        settings["fence"] = self.rng.random() < 0.1
        if not (settings["fence"] or settings["fair"] or settings.get("auto_renew")):
            settings["keep"] = round(self.rng.uniform(0.01, KEEP), 3)


@dataclass
class Turn:
    """What one turn requests, by which lock. limit: its blocking_timeout. sides: where a lease may be found. read: the
    side of a read-write lock for readers."""

    lock: Any
    requests: list[int]
    lease: float
    limit: float | None
    sides: tuple[Any, ...]
    read: Any = None
    granted: float = math.inf

    @property
    def leases(self) -> tuple[Any, ...]:
        owned = self.lock.lease
        return () if owned is None else getattr(owned, "leases", (owned,))

    @property
    def deadlines(self) -> list[float]:
        return [each._deadline for each in self.leases]

    @property
    def deadline(self) -> float:
        """When the first lease ends."""
        return min(self.deadlines, default=-math.inf)


class OwnedCaller(Caller):
    """A caller of locks of which each thread or task holds its own lease."""

    plain = 0.0  # part of the turns that use a plain lock of the same name
    fenced = 0.0  # part of the locks with fences

    async def turn(self) -> None:
        if self.rng.random() < self.plain:
            await super().turn()
        else:
            await self.own_turn()

    async def own_turn(self) -> None:
        way = self.rng.choices(("wait", "limit", "try", "cancel"), (50, 20, 15, 15))[0]
        if way == "cancel" and self.api.is_async:
            await self.cancelled(self.one(way))
        else:
            await self.one(way)

    async def cancelled(self, turn: Coroutine[Any, Any, None]) -> None:
        """Take a turn in a task that is cancelled at some point, if it takes that long."""
        task = asyncio.ensure_future(turn)
        timer = asyncio.get_running_loop().call_later(self.rng.choice((0, 0.001, 0.3)) * self.rng.random(), task.cancel)
        try:
            await task
        except asyncio.CancelledError:
            me = asyncio.current_task()
            if me is not None and me.cancelling():
                raise
        finally:
            timer.cancel()

    async def one(self, way: str) -> None:
        turn = self.ask(way)
        try:
            if await self.got(turn):
                await self.hold_it(turn)
        except BaseException:  # Ctrl-C, or cancelled: whatever is held is released, which has to be possible
            await self.give_back(turn)
            raise

    def settings(self, way: str) -> tuple[float, dict[str, Any]]:
        """Seconds of the lease, and how a lock of any kind is made."""
        rng, lease = self.rng, self.lease()
        settings: dict[str, Any] = {"blocking": way != "try"}
        if way == "limit":
            settings["blocking_timeout"] = rng.uniform(0.005, 1.5)
        if rng.random() < self.renewed:
            lease, settings["auto_renew"] = round(rng.uniform(SHORTEST, SHORTEST * 3), 3), True
        return lease, {**settings, "timeout": lease}

    def ask(self, way: str) -> Turn:
        """Make the lock of a turn, and log that its request begins."""
        raise NotImplementedError

    # ---------------------------------------------------------------------------------------------------- what it does

    async def got(self, turn: Turn) -> bool:
        start = now()
        try:
            got = bool(await self.api.get(turn.lock.acquire()))
        except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError):  # cut when there was no time left
            if turn.limit is None or now() < start + turn.limit - NEARLY:
                raise
            got = False
        except fastlock.LockError as error:
            if not self.may_refuse(error):
                raise
            got = False
        if got:
            self.log.write_all(GRANT, turn.requests, turn.deadlines, turn.leases[0].fence or 0)
            turn.granted = now()
            return True
        self.log.write_all(ENDED, turn.requests)
        if any(side.lease is not None for side in turn.sides):
            self.worker.complain(f"{turn.lock!r}: not acquired, but there is a lease")
        return False

    def may_refuse(self, error: fastlock.LockError) -> bool:
        """Whether the lock may refuse an acquire by this error."""
        return False

    async def hold_it(self, turn: Turn) -> None:
        """Hold, write to the register before and after, and release."""
        await self.write_by(turn)
        await self.pass_time(turn)
        await self.check_owned(turn)
        await self.write_by(turn)
        await self.let(turn)

    async def write_by(self, turn: Turn) -> None:
        if turn.leases:
            await self.write(turn.lock.name, turn.requests[0], turn.leases[0], turn.granted)

    async def pass_time(self, turn: Turn) -> None:
        """Hold mostly for a moment; some callers extend, some hold beyond the lease."""
        rng, lease = self.rng, turn.lease
        if turn.leases and turn.leases[0]._renewal is not None:
            await self.hold_all_renewed(turn)
            return
        late = 40 if self.plan.plant == "stale" else 1.5
        what = rng.choices(("short", "long", "extend", "beyond"), (94, 2, 2, late))[0]
        if what == "extend" and lease < LONGEST / 2:
            await self.rest(rng.uniform(0, lease / 2))
            await self.extend_all(turn)
            await self.rest(rng.uniform(0, lease / 2))
        else:
            longest = {"short": 0.005, "beyond": lease + 0.5}.get(what, lease / 2)
            await self.rest(rng.uniform(lease if what == "beyond" else 0, longest))

    async def hold_all_renewed(self, turn: Turn) -> None:
        """Hold for longer than a lease, which is renewed; end when it is told lost, which has to be in time."""
        leases, owned, seen = turn.leases, turn.lock.lease, turn.deadlines
        end = now() + self.rng.uniform(0, LONGEST - SHORTEST * 4) * self.rng.choice((0.1, 1))
        self.log.write_all(EXTENDING, turn.requests, [end + LONGEST] * len(leases))
        while now() < end and not owned.lost.is_set():
            await self.rest(0.01)
            for at, each in enumerate(leases):
                if (deadline := each._deadline) > seen[at]:
                    seen[at] = deadline
                    self.log.write(EXTENDED, turn.requests[at], deadline)
        if owned.lost.is_set():
            self.lost(min(seen) - max(each._renewal.margin for each in leases), "renewal")

    async def extend_all(self, turn: Turn) -> None:
        before, deadline = turn.deadlines, turn.deadline
        again = self.rng.random() < 0.5
        latest = [(now() if again else max(now(), each)) + LONGEST for each in before]
        self.log.write_all(EXTENDING, turn.requests, latest)
        try:
            await self.api.get(turn.lock.reacquire() if again else turn.lock.extend(turn.lease))
        except fastlock.LockNotOwnedError:
            self.lost(deadline, "extend")
        else:
            self.log.write_all(EXTENDED, turn.requests, turn.deadlines)

    async def check_owned(self, turn: Turn) -> None:
        """Sometimes ask the server, which has to agree that the lock is held."""
        if self.rng.random() < 0.1:
            deadline = turn.deadline
            if not await self.api.get(turn.lock.owned()):
                self.lost(deadline, f"{turn.lock!r} owned")

    async def let(self, turn: Turn) -> None:
        """Release, for good."""
        deadline = turn.deadline
        self.log.write_all(RELEASE, turn.requests)
        try:
            await self.api.get(turn.lock.release())
        except fastlock.LockNotOwnedError:
            self.lost(deadline, "release")
        self.log.write_all(FREED, turn.requests)

    async def give_back(self, turn: Turn) -> None:
        """Release whatever an interrupted turn holds."""
        self.log.write_all(RELEASE, turn.requests)
        for side in turn.sides:
            for _ in range(OFTEN_ENOUGH):
                if side.lease is None:
                    break
                with contextlib.suppress(fastlock.LockNotOwnedError):
                    await self.api.get(side.release())
            else:
                self.worker.complain(f"{side!r}: held after {OFTEN_ENOUGH} releases")
        self.log.write_all(FREED, turn.requests)
        self.log.write_all(ENDED, turn.requests)


class ReentrantCaller(OwnedCaller):
    """A caller that acquires again what it holds, by the same lock or by another one of that name."""

    plain, fenced = 0.2, 0.5

    def ask(self, way: str) -> Turn:
        name, (lease, settings) = self.name(), self.settings(way)
        fence, fair = self.rng.random() < self.fenced, self.rng.random() < self.fair
        lock = self.worker.client.reentrant_lock(f"hot:{name}", fence=fence, fair=fair, **settings)
        request = self.log.begin_request(name, lease, blocking=way != "try")
        return Turn(lock, [request], lease, settings.get("blocking_timeout"), (lock,))

    async def hold_it(self, turn: Turn) -> None:
        locks = [turn.lock]
        await self.write_by(turn)
        for _ in range(self.rng.randrange(DEEPEST)):
            if (inner := await self.enter_again(turn)) is None:
                break
            locks.append(inner)
        await self.pass_time(turn)
        while len(locks) > 1:
            if turn.lock.lease is not None and turn.lock.lease.depth not in (0, len(locks)):
                self.worker.complain(f"depth {turn.lock.lease.depth} of {len(locks)}")
            await self.api.get(locks.pop().release())
            await self.check_owned(turn)
        await self.write_by(turn)
        await self.let(turn)

    async def enter_again(self, turn: Turn) -> Any:
        """Acquire again; returns the lock, or None: the lease has ended, which has to be true."""
        deadline, inner = turn.deadline, turn.lock
        if self.rng.random() < 0.5:
            inner = self.worker.client.reentrant_lock(turn.lock.name, timeout=turn.lease)
        try:
            if not await self.api.get(inner.acquire()):
                self.worker.complain(f"{inner!r}: its holder may not enter again")
        except fastlock.LockNotOwnedError:
            self.lost(deadline, "acquire again")
            return None
        return inner


class ReadWriteCaller(OwnedCaller):
    """A caller that reads or writes, and may go on to read when it has written."""

    fenced = 0.7

    def ask(self, way: str) -> Turn:
        rng, name, (lease, settings) = self.rng, self.name(), self.settings(way)
        writes = rng.random() < WRITERS
        first = writes and rng.random() < PREFERRED
        lock = self.worker.client.rw_lock(
            f"hot:{name}", fence=rng.random() < self.fenced, prefer="writer" if first else None, **settings
        )
        units = WHOLE if writes else 1
        request = self.log.begin_request(name, lease, blocking=way != "try", units=units, first=first)
        sides = (lock.write, lock.read) if rng.random() < 0.5 else (lock.read, lock.write)
        side = lock.write if writes else lock.read
        return Turn(side, [request], lease, settings.get("blocking_timeout"), sides, lock.read)

    async def hold_it(self, turn: Turn) -> None:
        if turn.lock is turn.read:
            await self.try_to_write(turn)
            await self.pass_time(turn)
            await self.check_owned(turn)
            await self.let(turn)
        elif self.rng.random() < 0.5:
            await super().hold_it(turn)
        else:
            await self.downgrade(turn)

    async def try_to_write(self, turn: Turn) -> None:
        """A reader may not write: it would wait for itself."""
        if self.rng.random() < 0.1:
            (write,) = (side for side in turn.sides if side is not turn.lock)
            try:
                await self.api.get(write.acquire())
            except fastlock.LockError:
                return
            self.worker.complain(f"{write!r}: its holder reads, and may write")

    async def downgrade(self, turn: Turn) -> None:
        """Write, then read on."""
        await self.write_by(turn)
        write, deadline = turn.lock, turn.deadline
        try:
            await self.api.get(turn.read.acquire())
        except fastlock.LockNotOwnedError:
            self.lost(deadline, "read as the writer")
            await self.let(turn)
            return
        await self.pass_time(turn)
        await self.write_by(turn)
        deadline = turn.deadline
        self.log.write_all(DOWNGRADE, turn.requests)
        try:
            await self.api.get(write.release())
        except fastlock.LockNotOwnedError:
            self.lost(deadline, "downgrade")
            self.log.write_all(RELEASE, turn.requests)
            self.log.write_all(FREED, turn.requests)
            return
        turn.lock = turn.read
        await self.rest(self.rng.uniform(0, 0.01))
        await self.check_owned(turn)
        await self.let(turn)


class SemaphoreCaller(OwnedCaller):
    """A caller that wants some of the permits of a semaphore, of which there may be fewer meanwhile."""

    def ask(self, way: str) -> Turn:
        name, (lease, settings) = self.name(), self.settings(way)
        n = self.rng.choice((1, 1, 1, 2, 2, 3))
        lock = self.worker.client.semaphore(f"hot:{name}", PERMITS, n, **settings)
        request = self.log.begin_request(name, lease, blocking=way != "try", units=n)
        return Turn(lock, [request], lease, settings.get("blocking_timeout"), (lock,))

    def may_refuse(self, error: fastlock.LockError) -> bool:
        return "permits, fewer than asked for" in str(error)


class MultiCaller(OwnedCaller):
    """A caller that wants two or three names at once, in any order, of which others want some, too."""

    plain = 0.15

    def ask(self, way: str) -> Turn:
        lease, settings = self.settings(way)
        names = self.rng.sample(range(self.plan.names), min(self.plan.names, self.rng.randint(2, 3)))
        lock = self.worker.client.multi_lock([f"hot:{name}" for name in names], **settings)
        requests = self.log.begin_requests(names, lease, blocking=way != "try")
        return Turn(lock, requests, lease, settings.get("blocking_timeout"), (lock,))

    async def write_by(self, turn: Turn) -> None:
        """Several names have no fence."""
