"""Fences grow from holder to holder whatever the server forgets, and cost locks nothing that do not want one."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import redis
from redis.crc import key_slot
from support.apis import Api

import fastlock
from fastlock.embedded import Server

HOUR = 3_600_000
COUNTER = b"fastlock:fence:{a}"


@pytest.fixture(autouse=True)
def only_counters_may_stay(no_leaks: Any) -> None:
    no_leaks.allow("fastlock:fence:*")


async def hold(api: Api, client: Any, **settings: Any) -> int:
    """Acquire and release the fenced lock `a`; returns its fence."""
    lock = client.lock("a", fence=True, **settings)
    assert await api.get(lock.acquire())
    fence = lock.lease.fence
    await api.get(lock.release())
    assert type(fence) is int and 0 < fence < 2**53
    return fence


async def test_fences_grow_over_clients_and_timeouts(api: Api, server: Server) -> None:
    clients = [api.client(server.unix_url) for _ in range(3)]
    chance = random.Random(7)
    fences = [
        await hold(api, chance.choice(clients), timeout=chance.choice([None, 1, 60]), sleep=0.002) for _ in range(200)
    ]
    assert fences == sorted(set(fences))


async def test_fences_grow_in_the_order_of_holding(api: Api, server: Server) -> None:
    client = api.client(server.unix_url)
    fences: list[int] = []

    async def worker() -> None:
        lock = client.lock("a", fence=True, sleep=0.001)
        for _ in range(20):
            assert await api.get(lock.acquire())
            fences.append(lock.lease.fence)
            await api.get(lock.release())

    assert await api.together([worker] * 6) == [None] * 6
    assert len(fences) == 120 and fences == sorted(set(fences))


def flush(probe: redis.Redis) -> None:
    probe.flushall()


def lose_counter(probe: redis.Redis) -> None:
    assert probe.delete(COUNTER) == 1


def forget_scripts(probe: redis.Redis) -> None:
    probe.script_flush()


@pytest.mark.parametrize("forget", [flush, lose_counter, forget_scripts])
async def test_fences_grow_whatever_is_forgotten(
    api: Api, server: Server, probe: redis.Redis, forget: Callable[[redis.Redis], None]
) -> None:
    client, fences = api.client(server.unix_url), []
    for _ in range(20):
        fences.append(await hold(api, client))
        forget(probe)
    assert fences == sorted(set(fences))


async def test_fences_follow_a_counter_ahead_of_the_clock(api: Api, server: Server, probe: redis.Redis) -> None:
    """The counter is ahead after a failover to a server whose clock is behind."""
    client = api.client(server.unix_url)
    ahead = await hold(api, client) + 3_600_000_000
    probe.set(COUNTER, ahead)
    assert [await hold(api, client) for _ in range(3)] == [ahead + 1, ahead + 2, ahead + 3]


@pytest.mark.parametrize("impl", ["cython"], indirect=True)
async def test_fences_grow_over_a_restart_with_nothing_kept(api: Api, start_server: Callable[..., Server]) -> None:
    fences = []
    for kind in ("valkey", "redis", "floor"):
        server = start_server(kind)
        fences.append(await hold(api, api.client(server.unix_url)))
    assert fences == sorted(set(fences))


async def test_the_counter_outlives_the_lock_but_not_for_ever(api: Api, server: Server, probe: redis.Redis) -> None:
    client = api.client(server.unix_url)
    fence = await hold(api, client)
    assert probe.keys() == [COUNTER] and int(probe.get(COUNTER)) == fence
    assert HOUR - 60_000 < probe.pttl(COUNTER) <= HOUR
    probe.pexpire(COUNTER, 1000)
    assert await hold(api, client) > fence
    assert HOUR - 60_000 < probe.pttl(COUNTER) <= HOUR, "each use must renew it"


async def test_a_refused_acquire_uses_no_fence(api: Api, server: Server, probe: redis.Redis) -> None:
    client = api.client(server.unix_url)
    holder, other = (client.lock("a", fence=True) for _ in range(2))
    await api.get(holder.acquire())
    before = probe.get(COUNTER)
    assert await api.get(other.acquire(blocking=False)) is False and other.lease is None
    assert probe.get(COUNTER) == before
    await api.get(holder.extend(5))
    assert holder.lease.fence == int(before), "the fence is the lease's, however often it is extended"
    await api.get(holder.release())


async def test_plain_and_fenced_locks_exclude_each_other(api: Api, server: Server, probe: redis.Redis) -> None:
    client = api.client(server.unix_url)
    plain, fenced = client.lock("a"), client.lock("a", fence=True)
    for first, second in ((plain, fenced), (fenced, plain)):
        await api.get(first.acquire())
        assert await api.get(second.acquire(blocking=False)) is False
        await api.get(first.release())
        probe.flushall()
    await api.get(plain.acquire())
    assert plain.lease.fence is None and probe.keys() == [b"a"]
    await api.get(plain.release())


@pytest.mark.parametrize("name", ["a", "{t}a", "a{t}b{u}", "{", "a{b", "{{x}}", "sku:42"])
async def test_the_counter_is_in_the_hash_slot_of_its_lock(
    api: Api, server: Server, probe: redis.Redis, name: str
) -> None:
    lock = api.client(server.unix_url).lock(name, fence=True)
    await api.get(lock.acquire())
    await api.get(lock.release())
    (counter,) = probe.keys()
    assert key_slot(counter) == key_slot(name.encode())


def no_number(probe: redis.Redis) -> None:
    probe.set(COUNTER, "what?")


def no_string(probe: redis.Redis) -> None:
    probe.rpush(COUNTER, "what?")


@pytest.mark.parametrize("damage", [no_number, no_string])
async def test_a_damaged_counter_leaves_no_lock_behind(
    api: Api, server: Server, probe: redis.Redis, damage: Callable[[redis.Redis], None]
) -> None:
    client = api.client(server.unix_url)
    first = await hold(api, client)
    probe.delete(COUNTER)
    damage(probe)
    lock = client.lock("a", fence=True)
    try:
        assert await api.get(lock.acquire(blocking=False))
        assert lock.lease.fence > first
        await api.get(lock.release())
    except redis.exceptions.ResponseError:
        assert lock.lease is None
        assert await api.get(client.lock("a").locked()) is False
    with pytest.raises(fastlock.LockError):
        await api.get(lock.release())


@pytest.mark.parametrize("fair", [False, True])
async def test_fences_do_not_run_ahead_of_the_clock(api: Api, server: Server, probe: redis.Redis, fair: bool) -> None:
    """However many are granted: else the next fence would be smaller after a restart that kept nothing."""
    clients = [api.client(server.unix_url) for _ in range(3)]
    fences: list[int] = []

    def worker(client: Any) -> Callable[[], Any]:
        async def work() -> None:
            lock = client.lock("a", fence=True, fair=fair)
            for _ in range(150):
                assert await api.get(lock.acquire())
                fences.append(lock.lease.fence)
                await api.get(lock.release())

        return work

    assert await api.together([worker(clients[at % 3]) for at in range(6)]) == [None] * 6
    seconds, microseconds = probe.time()
    assert fences == sorted(set(fences)) and len(fences) == 900
    assert max(fences[-1], int(probe.get(COUNTER))) <= seconds * 1_000_000 + microseconds


async def test_fenced_locks_are_never_handed_over_locally(api: Api, server: Server, probe: redis.Redis) -> None:
    """The key is lost as the holder releases: the next waiter is granted the name by the server, or not at all."""
    client = api.client(server.unix_url)
    first, second, third = (client.lock("a", fence=True, thread_local=False) for _ in range(3))
    await api.get(first.acquire())
    jobs = []
    for waiting, lock in enumerate((second, third)):
        jobs.append(api.start(lock.acquire))
        while sum(queue.waiters.count for queue in list(client._transport.queued_keys.values())) <= waiting:
            await asyncio.sleep(0.0005) if api.is_async else time.sleep(0.0005)
    await api.get(first.release())
    assert await jobs[0].get() is True
    fence = second.lease.fence
    probe.flushall()
    with pytest.raises(fastlock.LockNotOwnedError):
        await api.get(second.release())
    assert await jobs[1].get() is True
    assert await api.get(third.owned()) and third.lease.fence > fence
    await api.get(third.release())
