"""Plain models of reentrant locks, read-write locks and semaphores, and real locks beside them: owners (threads or
tasks) of two clients acquire and release, with and without waiting; keys are deleted, and leases end.

What an owner believes to hold is not always what it holds: each model knows what became of each lease. No decisions
about locks are made here.
"""

from __future__ import annotations

import asyncio
import enum
import time
from typing import Any

import redis
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import fastlock
from fastlock._protocol import commands
from fastlock.embedded import Server
from support.apis import Api
from support.child_client import NAME
from support.told import ToldTask, ToldThread

who = st.integers(0, 3)
BRIEF = 0.005  # seconds: a lease that ends as the test looks at it
LONG = 20.0  # seconds: a wait that ends before
SHORT_WAIT = 0.025  # seconds: in the last 0.01 of a wait nobody tries any more


class Fate(enum.Enum):
    """What became of an owner's lease."""

    HELD = enum.auto()
    DELETED = enum.auto()  # the server does not hold it any more, which the owner does not know
    ENDED = enum.auto()  # its time is over
    FOUND = enum.auto()  # the owner was told that it is gone

    @property
    def valid(self) -> bool:
        return self in (Fate.HELD, Fate.DELETED)


def not_owned(result: object) -> bool:
    return isinstance(result, fastlock.LockNotOwnedError)


def not_held(result: object) -> bool:
    return isinstance(result, fastlock.LockError) and not not_owned(result)


class Machine(RuleBasedStateMachine):
    """Four owners, of two clients."""

    server: Server
    api: Api

    def __init__(self) -> None:
        super().__init__()
        self.probe = redis.Redis(unix_socket_path=self.server.path)
        self.probe.delete(NAME)  # where the walk before has failed
        self.runner = asyncio.Runner() if self.api.is_async else None
        self.clients = [self.api.module.Client.from_url(self.server.url) for _ in range(2)]
        self.owners = [ToldThread() if self.runner is None else ToldTask(self.runner) for _ in range(4)]

    def do(self, me: int, call: Any) -> Any:
        """What came of a call by this owner."""
        return self.owners[me].do(call)

    def acquire_by(self, me: int, lock: Any, waits: bool, fits: bool, *args: Any) -> Any:
        """Have an owner acquire a lock, at once or by waiting, which is in vain unless it fits."""
        options = {"blocking_timeout": LONG if fits else SHORT_WAIT} if waits else {"blocking": False}
        return self.do(me, lambda: lock.acquire(*args, **options))

    def let_end(self, me: int, lock: Any) -> Any:
        """Have an owner's lease end, and wait until it has. Returns what the owner's last extension returned."""
        result = self.do(me, lambda: lock.extend(BRIEF, replace_ttl=True))
        assert result is True or not_owned(result)  # the latter also where the reply comes after that brief lease
        lease = self.do(me, lambda: lock.lease)
        while lease.valid or self.stands(lease._raw_token):
            time.sleep(BRIEF / 5)
        return result

    def stands(self, token: bytes) -> bool:
        """Whether the server holds the name for this token."""
        if self.probe.type(NAME) != b"zset":
            return commands.token_matches(self.probe.get(NAME), token)
        seconds, micros = self.probe.time()
        now = seconds * 1000 + micros // 1000
        # Where all have ended the key goes a moment later: until then they are released, not lost
        return (self.probe.zscore(NAME, token) or 0) > now or not self.probe.zcount(NAME, now + 1, "+inf")

    def give_back(self) -> None:
        """Release all that is held."""
        raise NotImplementedError

    def teardown(self) -> None:
        try:
            self.give_back()
        finally:
            self.close()

    def close(self) -> None:
        for owner in self.owners:
            owner.end()
        for client in self.clients:
            if self.runner is None:
                client.close()
            else:
                self.runner.run(self.api.get(client.close()))
        if self.runner is not None:
            self.runner.close()
        self.probe.close()


class Reentrant(Machine):
    """The model: who holds the name; and of each owner, how often it has acquired, and what became of its lease."""

    def __init__(self) -> None:
        super().__init__()
        self.locks = [self.clients[me // 2].reentrant_lock(NAME, timeout=60) for me in range(4)]
        self.depths, self.fates = [0] * 4, [Fate.HELD] * 4

    @property
    def holder(self) -> int | None:
        return next((me for me in range(4) if self.depths[me] and self.fates[me] is Fate.HELD), None)

    def lock(self, me: int, fresh: bool = False) -> Any:
        """The owner's lock, or another one of its client."""
        return self.clients[me // 2].reentrant_lock(NAME, timeout=60) if fresh else self.locks[me]

    @rule(me=who, fresh=st.booleans(), waits=st.booleans())
    def acquire(self, me: int, fresh: bool, waits: bool) -> None:
        free = self.holder is None
        got = self.acquire_by(me, self.lock(me, fresh), waits and not self.misled(me), free)
        if self.depths[me] and not self.fates[me].valid:
            assert not_owned(got)
        elif self.depths[me]:
            assert got is True
            self.depths[me] += 1
        else:
            assert got is free
            self.depths[me], self.fates[me] = int(got), Fate.HELD

    @precondition(lambda self: self.holder is not None)
    @rule(fresh=st.booleans(), fails=st.booleans())
    def acquire_again(self, fresh: bool, fails: bool) -> None:
        """The holder acquires once more, and enters and leaves."""
        assert self.holder is not None
        self.acquire(self.holder, fresh, False)
        self.enter_and_leave(self.holder, fails)

    def misled(self, me: int) -> bool:
        """Whether the other owner of the client believes to hold the name: who waits here asks the server later."""
        return self.depths[me ^ 1] > 0 and self.fates[me ^ 1] is Fate.DELETED

    @precondition(lambda self: any(self.depths))
    @rule(me=who, fresh=st.booleans())
    def release(self, me: int, fresh: bool) -> None:
        result = self.do(me, self.lock(me, fresh).release)
        if not self.depths[me]:
            assert not_held(result)
            return
        assert result is None if self.depths[me] > 1 or self.fates[me] is Fate.HELD else not_owned(result)
        self.depths[me] -= 1

    @rule(me=who, fails=st.booleans())
    def enter_and_leave(self, me: int, fails: bool) -> None:
        """In a `with`, whose body may raise."""
        lock, free, depth = self.lock(me, fresh=True), self.holder is None, self.depths[me]
        lock.blocking, lock.blocking_timeout = not self.misled(me), LONG if free else SHORT_WAIT

        async def body() -> int:
            async with self.api.within(lock) as lease:
                if fails:
                    raise KeyError
                return int(lease.depth)

        result = self.do(me, self.api.native(body))
        if depth and not self.fates[me].valid:
            assert not_owned(result)
        elif not depth and not free:
            assert isinstance(result, fastlock.LockNotAcquiredError)
        else:
            assert isinstance(result, KeyError) if fails else result == depth + 1

    @precondition(lambda self: self.holder is not None)
    @rule(me=who)
    def hand_over(self, me: int) -> None:
        """One waits, as the holder releases."""
        holder = self.holder
        if holder is None or self.depths[me]:
            return
        self.owners[me].begin(lambda: self.lock(me).acquire(blocking_timeout=LONG))
        while self.depths[holder]:
            self.release(holder, False)
        assert self.owners[me].result() is True
        self.depths[me], self.fates[me] = 1, Fate.HELD

    @precondition(lambda self: self.holder is not None)
    @rule()
    def delete(self) -> None:
        """Somebody deletes the key."""
        self.probe.delete(NAME)
        self.fates = [Fate.DELETED if fate is Fate.HELD else fate for fate in self.fates]

    @precondition(lambda self: any(self.depths))
    @rule(me=who)
    def expire(self, me: int) -> None:
        if not self.depths[me]:
            return
        result = self.let_end(me, self.lock(me))
        assert self.fates[me] is Fate.HELD or not_owned(result)
        self.fates[me] = Fate.ENDED if self.fates[me] is Fate.HELD else Fate.FOUND

    @invariant()
    def both_agree(self) -> None:
        for me in range(4):
            lease, fate = self.do(me, lambda me=me: self.lock(me).lease), self.fates[me]
            assert (lease is not None) is bool(self.depths[me])
            if lease is not None:
                assert (lease.depth, lease.valid) == (0 if fate is Fate.FOUND else self.depths[me], fate.valid)
        assert bool(self.probe.exists(NAME)) is (self.holder is not None)

    def give_back(self) -> None:
        for me in range(4):
            while self.depths[me]:
                self.release(me, False)


class ReadWrite(Machine):
    """The model: how often each owner has acquired each side, and what became of its lease."""

    def __init__(self) -> None:
        super().__init__()
        self.locks = [self.clients[me // 2].rw_lock(NAME, timeout=60) for me in range(4)]
        self.reads, self.writes, self.fates = [0] * 4, [0] * 4, [Fate.HELD] * 4

    def holders(self, but: int | None = None) -> list[int]:
        """Those who hold the name, but for one."""
        return [me for me in range(4) if me != but and self.held(me) and self.fates[me] is Fate.HELD]

    def held(self, me: int) -> int:
        return self.reads[me] + self.writes[me]

    @rule(me=who, waits=st.booleans())
    def acquire_read(self, me: int, waits: bool) -> None:
        fits = not any(self.writes[other] for other in self.holders(but=me))
        got = self.acquire_by(me, self.locks[me].read, waits, fits)
        if self.held(me) and not self.fates[me].valid:
            assert not_owned(got)
            return
        assert got is (fits or self.held(me) > 0)
        self.fates[me] = self.fates[me] if self.held(me) else Fate.HELD
        self.reads[me] += got

    @rule(me=who, waits=st.booleans())
    def acquire_write(self, me: int, waits: bool) -> None:
        fits = not self.holders(but=me)
        got = self.acquire_by(me, self.locks[me].write, waits, fits)
        if self.held(me) and not self.fates[me].valid:
            assert not_owned(got)
        elif self.reads[me] and not self.writes[me]:
            assert not_held(got)
        else:
            assert got is (fits or self.held(me) > 0)
            self.fates[me] = self.fates[me] if self.held(me) else Fate.HELD
            self.writes[me] += got

    @rule(me=who)
    def release_read(self, me: int) -> None:
        result = self.do(me, lambda: self.locks[me].read.release())
        if not self.reads[me]:
            assert not_held(result)
            return
        self.check_release(me, result, inner=self.held(me) > 1)
        self.reads[me] -= 1

    @rule(me=who)
    def release_write(self, me: int) -> None:
        result = self.do(me, lambda: self.locks[me].write.release())
        if not self.writes[me]:
            assert not_held(result)
            return
        self.check_release(me, result, inner=self.writes[me] > 1)
        self.writes[me] -= 1
        if not_owned(result):  # nor does it read any more
            self.reads[me] = 0

    def check_release(self, me: int, result: Any, inner: bool) -> None:
        if inner or self.fates[me] is Fate.HELD:
            assert result is None
        elif not (self.fates[me] is Fate.ENDED and self.holders()):  # else it may be there still, among the others
            assert not_owned(result)

    @precondition(lambda self: self.holders())
    @rule(me=who)
    def hand_over(self, me: int) -> None:
        """One waits to write, as all others release."""
        if self.held(me):
            return
        self.owners[me].begin(lambda: self.locks[me].write.acquire(blocking_timeout=LONG))
        for other in self.holders():
            self.release_all(other)
        assert self.owners[me].result() is True
        self.writes[me], self.fates[me] = 1, Fate.HELD

    def release_all(self, me: int) -> None:
        while self.writes[me]:
            self.release_write(me)
        while self.reads[me]:
            self.release_read(me)

    @precondition(lambda self: self.holders())
    @rule()
    def delete(self) -> None:
        """Somebody deletes the key."""
        self.probe.delete(NAME)
        self.fates = [Fate.DELETED if fate is Fate.HELD else fate for fate in self.fates]

    @precondition(lambda self: any(self.reads) or any(self.writes))
    @rule(me=who)
    def expire(self, me: int) -> None:
        if not self.held(me):
            return
        lock = self.locks[me]
        result = self.let_end(me, lock.write if self.writes[me] else lock.read)
        assert self.fates[me] is Fate.HELD or not_owned(result)
        self.fates[me] = Fate.ENDED if self.fates[me] is Fate.HELD else Fate.FOUND

    @invariant()
    def both_agree(self) -> None:
        for me in range(4):
            lock, fate = self.locks[me], self.fates[me]
            reads, writes = self.do(me, lambda lock=lock: (lock.read.lease, lock.write.lease))
            assert (reads is not None, writes is not None) == (self.reads[me] > 0, self.writes[me] > 0)
            if (lease := reads or writes) is not None:
                assert (lease.depth, lease.valid) == (0 if fate is Fate.FOUND else self.held(me), fate.valid)
        writes = any(self.writes[me] for me in self.holders())
        lock = self.locks[0]
        assert self.do(0, lock.locked) is bool(self.holders())
        assert self.do(0, lock.write.locked) is writes
        assert self.do(0, lock.read.locked) is (bool(self.holders()) and not writes)

    def give_back(self) -> None:
        for me in range(4):
            self.release_all(me)


class Permits(Machine):
    """The model: what each owner has acquired, in order, with what became of it, and how many permits there are."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 5
        self.held: list[list[tuple[int, Fate]]] = [[] for _ in range(4)]
        self.semaphores = [self.clients[me // 2].semaphore(NAME, 5, timeout=60) for me in range(4)]

    @initialize()
    def start(self) -> None:
        self.do(0, lambda: self.semaphores[0].resize(None))

    @property
    def free(self) -> int:
        return max(0, self.size - sum(n for mine in self.held for n, fate in mine if fate is Fate.HELD))

    @rule(me=who, n=st.integers(1, 5), waits=st.booleans())
    def acquire(self, me: int, n: int, waits: bool) -> None:
        got = self.acquire_by(me, self.semaphores[me], waits, n <= self.free, n)
        if n > self.size:
            assert isinstance(got, fastlock.LockError)
        else:
            assert got is (n <= self.free)
            self.held[me] += [(n, Fate.HELD)] * got

    @rule(me=who)
    def release(self, me: int) -> None:
        mine = self.held[me]
        result = self.do(me, self.semaphores[me].release)
        if not mine:
            assert not_held(result)
            return
        known = [at for at, (_, fate) in enumerate(mine) if fate is not Fate.FOUND]
        _, fate = mine.pop(known[-1] if known else -1)
        if fate is Fate.HELD:
            assert result is None
        elif fate is not Fate.ENDED or self.free == self.size:  # else it may be there still, among the others
            assert not_owned(result)

    @precondition(lambda self: self.free < self.size)
    @rule(me=who)
    def hand_over(self, me: int) -> None:
        """One waits for all permits, as all others release."""
        if self.held[me]:
            return
        self.owners[me].begin(lambda: self.semaphores[me].acquire(min(self.size, 5), blocking_timeout=LONG))
        for other in range(4):
            while self.held[other]:
                self.release(other)
        assert self.owners[me].result() is True
        self.held[me].append((min(self.size, 5), Fate.HELD))

    @rule(me=who, size=st.one_of(st.none(), st.integers(1, 7)))
    def resize(self, me: int, size: int | None) -> None:
        self.do(me, lambda: self.semaphores[me].resize(size))
        self.size = size or 5

    @precondition(lambda self: self.free < self.size)
    @rule()
    def delete(self) -> None:
        """Somebody deletes the key."""
        self.probe.delete(NAME)
        gone = lambda fate: Fate.DELETED if fate is Fate.HELD else fate  # noqa: E731
        self.held = [[(n, gone(fate)) for n, fate in mine] for mine in self.held]

    @precondition(lambda self: any(self.held))
    @rule(me=who)
    def expire(self, me: int) -> None:
        """The lease that an owner acquired last ends."""
        if not self.held[me]:
            return
        n, fate = self.held[me][-1]
        result = self.let_end(me, self.semaphores[me])
        assert fate is Fate.HELD or not_owned(result)
        self.held[me][-1] = n, Fate.ENDED if fate is Fate.HELD else Fate.FOUND

    @invariant()
    def both_agree(self) -> None:
        assert self.do(0, self.semaphores[0].available) == self.free
        assert self.do(0, self.semaphores[0].locked) is (self.free == 0)
        for me in range(4):
            lease = self.do(me, lambda me=me: self.semaphores[me].lease)
            assert (lease is not None) is bool(self.held[me])
            assert lease is None or lease.valid is self.held[me][-1][1].valid

    def give_back(self) -> None:
        for me in range(4):
            while self.held[me]:
                self.release(me)
        self.do(0, lambda: self.semaphores[0].resize(None))
