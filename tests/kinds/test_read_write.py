"""Read-write locks on real servers: who may hold one together, in which order, and what becomes of the dead."""

from __future__ import annotations

import asyncio
import copy
import os
import pickle
import random
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import redis
from support.apis import Api
from support.child_client import NAME, QUEUE, SOON, ChildClient, until
from support.holding import Holder

import fastlock
from fastlock._protocol import commands, renewal
from fastlock._protocol.base_lock import MAX_LEASES
from fastlock.embedded import Server

pytestmark = pytest.mark.usefixtures("no_leaks")
threads_only = pytest.mark.parametrize("api", ["threads"], indirect=True)
tasks_only = pytest.mark.parametrize("api", ["asyncio"], indirect=True)
one_server = pytest.mark.parametrize("server", ["valkey"], indirect=True)  # where its kind makes no difference


async def in_queue(api: Api, probe: redis.Redis, count: int) -> None:
    await until(api, lambda: probe.zcard(QUEUE) == count, f"{count} in the queue")


async def test_many_read_or_one_writes(api: Api, server: Server, probe: redis.Redis) -> None:
    client, stranger = api.client(server.url), api.client(server.url)
    ours, theirs = client.rw_lock(NAME), stranger.rw_lock(NAME)
    async with api.within(ours.read) as lease, api.within(theirs.read) as other:
        assert lease.valid and other.valid and lease.token != other.token
        assert await api.get(api.client(server.url).rw_lock(NAME).write.acquire(blocking=False)) is False
    async with api.within(ours.write) as lease:
        assert lease.valid
        assert await api.get(theirs.read.acquire(blocking=False)) is False
        assert await api.get(theirs.write.acquire(blocking=False)) is False
        assert [await api.get(each.locked()) for each in (ours, ours.read, ours.write)] == [True, False, True]
        assert await api.get(ours.write.owned()) and not await api.get(theirs.write.owned())
    assert not await api.get(ours.locked())


async def test_in_order_of_arrival_and_readers_together(api: Api, server: Server, probe: redis.Redis) -> None:
    """While one reads: a writer, two readers and another writer come. None overtakes, the two readers read together."""
    clients = [api.client(server.url) for _ in range(3)]
    order: list[Any] = []
    first = Holder(api, clients[0].rw_lock(NAME).read, order, "first")
    await first.entered()
    waiting = []
    for i, side in enumerate(("write", "read", "read", "write")):
        waiting.append(Holder(api, getattr(clients[i % 3].rw_lock(NAME), side), order, i))
        await in_queue(api, probe, i + 1)
    assert await api.get(clients[0].rw_lock(NAME).read.acquire(blocking=False)) is False, "it would starve the writer"
    await first.leave()
    await waiting[0].entered()
    assert order == ["first", 0] and probe.zcard(QUEUE) == 3
    await waiting[0].leave()
    await waiting[1].entered()
    await waiting[2].entered()
    assert sorted(order[2:]) == [1, 2] and probe.zcard(QUEUE) == 1
    await waiting[2].leave()
    assert order[4:] == []
    await waiting[1].leave()
    await waiting[3].entered()
    await waiting[3].leave()


async def test_writers_first_where_they_are_preferred(api: Api, server: Server, probe: redis.Redis) -> None:
    client, order = api.client(server.url), []
    first = Holder(api, client.rw_lock(NAME).write, order, "first")
    await first.entered()
    waiting = []
    for i, (side, prefer) in enumerate([("read", None), ("write", None), ("write", "writer"), ("write", "writer")]):
        waiting.append(Holder(api, getattr(client.rw_lock(NAME, prefer=prefer), side), order, i))
        await in_queue(api, probe, i + 1)
    for holder in [first, *waiting]:
        holder.told.set()
    for holder in [first, *waiting]:
        await holder.job.get(SOON)
    assert order == ["first", 2, 3, 0, 1]


async def test_a_writer_that_gives_up_lets_the_readers_behind_it_in(
    api: Api, server: Server, probe: redis.Redis, no_recheck: None
) -> None:
    client = api.client(server.url)
    first = Holder(api, client.rw_lock(NAME).read)
    await first.entered()
    writer = api.start(lambda: api.client(server.url).rw_lock(NAME, blocking_timeout=0.4).write.acquire())
    await in_queue(api, probe, 1)
    reader = Holder(api, client.rw_lock(NAME).read)
    await in_queue(api, probe, 2)
    assert await writer.get(SOON) is False
    await reader.entered()
    await reader.leave()
    await first.leave()


async def test_a_dead_reader_keeps_writers_waiting_for_its_lease_at_most(api: Api, server: Server) -> None:
    client = api.client(server.url)
    with ChildClient(api, server.url, kind="read", timeout=1.0) as child:
        await child.wait_for_line("ready")
        await child.request("acquire", "got")
        child.kill()
        async with api.within(client.rw_lock(NAME).write) as lease:
            assert lease.valid


async def test_a_dead_waiter_is_passed_over(api: Api, server: Server, probe: redis.Redis, no_recheck: None) -> None:
    client = api.client(server.url)
    first = Holder(api, client.rw_lock(NAME).read)
    await first.entered()
    with ChildClient(api, server.url, kind="write") as child:
        await child.wait_for_line("ready")
        child.send("acquire")
        await in_queue(api, probe, 1)
        reader = Holder(api, client.rw_lock(NAME).read)
        await in_queue(api, probe, 2)
        child.kill()
        await first.leave()
        await reader.entered()
        await reader.leave()


async def test_who_reads_may_not_write(api: Api, server: Server) -> None:
    lock = api.client(server.url).rw_lock(NAME)
    async with api.within(lock.read) as lease:
        for _ in range(2):
            with pytest.raises(fastlock.LockError, match="its holder reads, and as a writer would wait for itself"):
                await api.get(lock.write.acquire())
            with pytest.raises(fastlock.LockError, match="release the read lock first"):
                await api.enter(lock.write)
        assert lease.valid and lease.depth == 1


async def test_who_writes_may_read_and_goes_on_to_read(
    api: Api, server: Server, probe: redis.Redis, no_recheck: None
) -> None:
    client = api.client(server.url)
    lock = client.rw_lock(NAME)
    before = None
    async with api.within(lock.write) as lease:
        before = client.get_stats()["commands"]
        async with api.within(lock.read) as same:
            assert same is lease and lease.depth == 2
        assert await api.get(lock.read.acquire()) and client.get_stats()["commands"] == before
        reader = Holder(api, api.client(server.url).rw_lock(NAME).read)
        await in_queue(api, probe, 1)
        writer = Holder(api, api.client(server.url).rw_lock(NAME).write)
        await in_queue(api, probe, 2)
    await reader.entered()
    assert (lease.valid, lease.depth) == (True, 1) and await api.get(lock.read.owned())
    assert lock.write.lease is None and lock.read.lease is lease and not writer.inside.is_set()
    with pytest.raises(fastlock.LockError):
        await api.get(lock.write.release())
    await reader.leave()
    await api.get(lock.read.release())
    await writer.entered()
    await writer.leave()
    assert lease.depth == 0


async def test_the_holder_enters_again(api: Api, server: Server) -> None:
    lock = api.client(server.url).rw_lock(NAME)
    for side in (lock.read, lock.write):
        async with api.within(side) as lease:
            for depth in (2, 3):
                assert await api.enter(side) is lease and lease.depth == depth
            with pytest.raises(KeyError):
                async with api.within(side):
                    raise KeyError
            await api.leave(side)
            await api.leave(side)
            assert lease.depth == 1 and lease.valid
        with pytest.raises(fastlock.LockError, match="not owned or already unlocked"):
            await api.get(side.release())


async def test_one_lock_to_its_owner_however_it_is_made(api: Api, server: Server) -> None:
    client = api.client(server.url)
    async with api.within(client.rw_lock(NAME).write):
        async with api.within(client.rw_lock(NAME).read) as lease:
            assert lease.depth == 2
        assert await api.start(lambda: client.rw_lock(NAME).read.acquire(blocking=False)).get() is False


async def test_release_by_another_owner_is_an_error(api: Api, server: Server) -> None:
    lock = api.client(server.url).rw_lock(NAME)
    for side in (lock.read, lock.write):
        async with api.within(side) as lease:
            with pytest.raises(fastlock.LockError, match="another thread or task acquired it"):
                await api.start(side.release).get()
            assert lease.valid


@one_server
async def test_many_who_have_ended_cost_no_reader_its_lease(api: Api, server: Server) -> None:
    """Nor is one of theirs forgotten before its end."""
    client = api.client(server.url)
    lock = client.rw_lock(NAME).read
    async with api.within(lock) as lease:
        for _ in range(MAX_LEASES + 1):
            assert await api.start(lock.acquire).get() is True
    assert not lease.valid
    left = list(lock._leases.values())
    assert await api.get(client.release_many(left)) == [True] * (MAX_LEASES + 1)


@pytest.mark.parametrize("side", ["read", "write"])
async def test_both_sides_are_renewed(
    api: Api, server: Server, probe: redis.Redis, side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = api.client(server.url)
    async with api.within(getattr(client.rw_lock(NAME, timeout=0.6, auto_renew=True), side)) as lease:
        await until(api, lambda: client.get_stats()["renewals"] >= 3, "renewals")
        assert lease.valid and not lease.lost.is_set() and probe.zcard(NAME) == 1
        probe.delete(NAME)
        await until(api, lease.lost.is_set, "the loss")
        assert not lease.valid
        probe.zadd(NAME, {b"fl:" + b"0" * 32 + b"|r": "inf"})
        monkeypatch.setattr(renewal, "DUE_PART", 0.01)
        with pytest.raises(fastlock.LockNotOwnedError):
            await api.get(getattr(client.rw_lock(NAME), side).release())
        probe.delete(NAME)
        await api.get(getattr(client.rw_lock(NAME), side).acquire())


async def test_a_lease_is_renewed_on_after_a_downgrade(api: Api, server: Server) -> None:
    client = api.client(server.url)
    lock = client.rw_lock(NAME, timeout=0.6, auto_renew=True)
    async with api.within(lock.write) as lease:
        assert await api.get(lock.read.acquire())
    renewed = client.get_stats()["renewals"]
    await until(api, lambda: client.get_stats()["renewals"] >= renewed + 3, "renewals")
    assert lease.valid and not lease.lost.is_set()
    await api.get(lock.read.release())


async def test_a_lease_is_extended_and_reacquired(api: Api, server: Server, probe: redis.Redis) -> None:
    lock = api.client(server.url).rw_lock(NAME, timeout=5)
    for side in (lock.read, lock.write):
        async with api.within(side) as lease:
            assert await api.get(side.extend(10)) and 14 < lease.remaining <= 15 and 14_000 < probe.pttl(NAME) <= 15_001
            assert await api.get(side.extend(20, replace_ttl=True)) and 19 < lease.remaining <= 20
            assert await api.get(side.reacquire()) and 4 < lease.remaining <= 5 and probe.pttl(NAME) <= 5_001
    endless = api.client(server.url).rw_lock(NAME, timeout=None)
    async with api.within(endless.read) as lease, api.within(lock.read):
        assert lease.remaining == float("inf") and probe.pttl(NAME) == -1
    assert not probe.exists(NAME)


async def test_the_key_lives_as_long_as_the_longest_lease(api: Api, server: Server, probe: redis.Redis) -> None:
    long, short = (api.client(server.url).rw_lock(NAME, timeout=seconds) for seconds in (50, 5))
    await api.enter(long.read)
    async with api.within(short.read):
        assert probe.pttl(NAME) > 49_000
    assert probe.pttl(NAME) > 49_000
    await api.enter(short.read)
    await api.leave(long.read)
    assert probe.pttl(NAME) <= 5_001
    await api.leave(short.read)


async def test_fences_grow(api: Api, server: Server, no_leaks: Any) -> None:
    no_leaks.allow("fastlock:fence:*")
    lock, fences = api.client(server.url).rw_lock(NAME, fence=True), []
    for side in (lock.read, lock.write, lock.read, lock.write):
        async with api.within(side) as lease:
            fences.append(lease.fence)
    waiting = Holder(api, lock.write)
    fences.append((await waiting.entered()).fence)
    await waiting.leave()
    assert fences == sorted(set(fences)) and all(fences)


async def test_without_the_queue_it_is_polled(api: Api, server: Server, probe: redis.Redis) -> None:
    client = api.client(server.url)
    first = Holder(api, client.rw_lock(NAME).read)
    await first.entered()
    writer = Holder(api, client.rw_lock(NAME, queue=False, sleep=0.01).write)
    await until(api, lambda: client.get_stats()["commands"] > 6, "tries")
    assert not probe.exists(QUEUE)
    await first.leave()
    await writer.entered()
    await writer.leave()


KINDS: dict[str, Callable[[Any], Any]] = {
    "a lock": lambda client: client.lock(NAME),
    "a read-write lock": lambda client: client.rw_lock(NAME).write,
    "a semaphore": lambda client: client.semaphore(NAME, 2),
}
OTHERS: dict[str, Callable[[Any], Any]] = {
    "reader": lambda client: client.rw_lock(NAME).read,
    "fair": lambda client: client.lock(NAME, fair=True),
    "fenced": lambda client: client.lock(NAME, fence=True),
    "reentrant": lambda client: client.reentrant_lock(NAME),
    "polling": lambda client: client.lock(NAME, queue=False),
    **KINDS,
}


@pytest.mark.parametrize("kind", KINDS)
async def test_a_name_is_of_one_kind(api: Api, server: Server, kind: str) -> None:
    """The error of any other kind names the kind found; nothing of the holder is touched, and nothing is left."""
    client = api.client(server.url)
    async with api.within(KINDS[kind](client)) as lease:
        for other, make in OTHERS.items():
            same = {"a read-write lock": ("reader",), "a lock": ("fair", "fenced", "reentrant", "polling")}
            if other == kind or other in same.get(kind, ()):
                continue
            for blocking in (True, False):
                with pytest.raises(fastlock.LockKindError, match=f"^Cannot acquire lock 'sku': .*in use by {kind}$"):
                    await api.get(make(api.client(server.url)).acquire(blocking=blocking))
        assert lease.valid


async def test_a_name_that_holds_something_else(api: Api, server: Server, probe: redis.Redis) -> None:
    client = api.client(server.url)
    for write in (lambda: probe.rpush(NAME, "x"), lambda: probe.zadd(NAME, {"x": 1})):
        write()
        for lock in (client.rw_lock(NAME).read, client.semaphore(NAME, 1), client.lock(NAME)):
            with pytest.raises(fastlock.LockKindError if probe.type(NAME) == b"zset" else redis.ResponseError):
                await api.get(lock.acquire())
        probe.delete(NAME)


@pytest.mark.parametrize(
    ("keywords", "error", "text"),
    [
        ({"prefer": "reader"}, ValueError, "^prefer must be 'writer', or None"),
        ({"timeout": 0}, ValueError, "^timeout must be at least 0.001"),
        ({"auto_renew": True, "timeout": 0.05}, ValueError, "^timeout must be at least 0.1"),
        ({"auto_renew": True, "timeout": None}, ValueError, "^timeout must be at least 0.1"),
        ({"max_hold": 5}, ValueError, "^max_hold is of leases that are renewed"),
        ({"blocking": False, "blocking_timeout": 1}, ValueError, "^blocking_timeout says how long"),
        ({"fair": True}, TypeError, "fair"),
        ({"token": "x"}, TypeError, "token"),
    ],
)
async def test_settings_that_make_no_sense(api: Api, server: Server, keywords: Any, error: Any, text: str) -> None:
    client = api.client(server.url)
    with pytest.raises(error, match=text):
        client.rw_lock(NAME, **keywords)
    assert client.get_stats()["commands"] == 0


# ------------------------------------------------------------------------------------------- what must never happen


@pytest.mark.parametrize("seed", range(3))
async def test_no_writer_beside_anybody(api: Api, server: Server, probe: redis.Redis, seed: int) -> None:
    """Callers of two clients read, write, read within writing, give up and downgrade."""
    clients = [api.client(server.url) for _ in range(2)]
    inside: list[str] = []

    async def work(who: int) -> None:
        dice = random.Random(f"{seed} {who}")
        for _ in range(25):
            lock = clients[who % 2].rw_lock(NAME, prefer=dice.choice((None, "writer")), blocking_timeout=20)
            if dice.random() < 0.1:
                side = dice.choice((lock.read, lock.write))
                if await api.get(side.acquire(blocking_timeout=0.001)):
                    await api.get(side.release())
            elif dice.random() < 0.6:
                async with api.within(lock.read):
                    await stay("r", dice)
            else:
                async with api.within(lock.write):
                    await stay("w", dice)
                    if downgrades := dice.random() < 0.3:
                        assert await api.get(lock.read.acquire())
                if downgrades:
                    await stay("r", dice)
                    await api.get(lock.read.release())

    async def stay(mode: str, dice: random.Random) -> None:
        inside.append(mode)
        seen = list(inside)
        assert "w" not in seen or len(seen) == 1, seen
        for _ in range(dice.randrange(3)):
            await asyncio.sleep(0) if api.is_async else time.sleep(0)
        inside.remove(mode)

    assert await api.together([lambda who=who: work(who) for who in range(6)]) == [None] * 6
    assert not probe.keys("*")


@tasks_only
async def test_a_cancelled_waiter_leaves_nothing(api: Api, server: Server, probe: redis.Redis) -> None:
    """At each point of an acquire, a release and a downgrade."""
    client = api.client(server.url)
    for ticks in range(25):
        lock = client.rw_lock(NAME)

        async def hold(lock: Any = lock) -> None:
            async with lock.write:
                await lock.read.acquire()
            await lock.read.release()

        first = Holder(api, client.rw_lock(NAME).read)
        if ticks % 2:
            await first.entered()
        job = asyncio.create_task(hold())
        for _ in range(ticks):
            await asyncio.sleep(0)
        job.cancel()
        await asyncio.gather(job, return_exceptions=True)
        await first.entered()
        await first.leave()
        if (lease := lock.read._leases.get(job)) is not None and lease.valid:
            await client.release_many([lease])
        await until(api, lambda: not probe.exists(NAME, QUEUE), "nothing left")


@threads_only
async def test_an_interrupted_holder_of_a_process_leaves_nothing(api: Api, server: Server, probe: redis.Redis) -> None:
    with ChildClient(api, server.url, kind="write") as child:
        await child.wait_for_line("ready")
        async with api.within(api.client(server.url).rw_lock(NAME).read):
            child.send("acquire")
            await in_queue(api, probe, 1)
            child.process.send_signal(signal.SIGINT)
            await child.wait_for_line("interrupted")
            assert not probe.exists(QUEUE)


@threads_only
async def test_a_forked_child_does_not_enter_its_parents_lock(api: Api, server: Server) -> None:
    lock = api.client(server.url).rw_lock(NAME)
    with lock.write as lease:
        if (child := os.fork()) == 0:
            os._exit(1 if lock.read.acquire(blocking=False) or lease.valid else 0)
        assert os.waitpid(child, 0)[1] == 0 and lease.depth == 1


async def test_a_full_server_renews_and_confirms(
    api: Api, server: Server, probe: redis.Redis, server_config: Callable[..., None]
) -> None:
    """Where memory is full, nothing new is acquired; what is held is renewed, extended, downgraded and released."""
    client = api.client(server.url)
    rw, semaphore = client.rw_lock(NAME, timeout=5), client.semaphore(f"{NAME}2", 2, timeout=5)
    plain = client.lock(f"{NAME}3", timeout=5)
    async with api.within(rw.write) as lease, api.within(semaphore) as permit, api.within(plain) as token:
        server_config(maxmemory="1")
        replies = probe.evalsha(
            probe.script_load(commands.RENEW_MANY_LUA.text),
            *(3, NAME, f"{NAME}2", f"{NAME}3"),
            *(lease.token, permit.token, token.token, 9000, 9000, 9000),
        )
        assert replies == [1, 1, 1] and probe.pttl(NAME) > 8000 and probe.pttl(f"{NAME}2") > 8000
        assert await api.get(rw.write.extend(20, replace_ttl=True)) and lease.remaining > 19
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            await api.get(api.client(server.url).rw_lock("new").read.acquire())
        assert await api.get(rw.read.acquire())
    await api.get(rw.read.release())
    assert not probe.exists(NAME)


async def test_it_cannot_be_copied(api: Api, server: Server) -> None:
    lock = api.client(server.url).rw_lock(NAME)
    for each in (lock, lock.read, lock.write):
        with pytest.raises(TypeError):
            copy.copy(each)
        with pytest.raises(TypeError):
            pickle.dumps(each)
