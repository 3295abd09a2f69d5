"""Semaphores on real servers: never too many permits, none lost, in order, and what becomes of the dead."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import pytest
import redis
from support.apis import Api
from support.child_client import NAME, QUEUE, SOON, ChildClient, until, waiters_of
from support.holding import Holder

import fastlock
from fastlock._locks.shared import MAX_LEASES
from fastlock.embedded import Server

pytestmark = pytest.mark.usefixtures("no_leaks")
tasks_only = pytest.mark.parametrize("api", ["asyncio"], indirect=True)
one_server = pytest.mark.parametrize("server", ["valkey"], indirect=True)  # where its kind makes no difference


async def in_queue(api: Api, probe: redis.Redis, count: int) -> None:
    await until(api, lambda: probe.zcard(QUEUE) == count, f"{count} in the queue")


async def test_so_many_hold_it_and_no_more(api: Api, server: Server, probe: redis.Redis) -> None:
    semaphores = [api.client(server.url).semaphore(NAME, 3) for _ in range(2)]
    leases = [await api.enter(semaphores[i % 2]) for i in range(3)]
    assert len({lease.token for lease in leases}) == 3 and all(lease.valid for lease in leases)
    for semaphore in semaphores:
        assert await api.get(semaphore.acquire(blocking=False)) is False
        assert await api.get(semaphore.locked()) and await api.get(semaphore.available()) == 0
        assert await api.get(semaphore.owned())
    await api.leave(semaphores[0])
    assert await api.get(semaphores[1].available()) == 1 and not await api.get(semaphores[0].locked())
    async with api.within(semaphores[1]):
        assert await api.get(semaphores[1].available()) == 0
    await api.leave(semaphores[0])
    await api.leave(semaphores[1])
    assert not probe.exists(NAME)
    with pytest.raises(fastlock.LockError, match="not owned or already unlocked"):
        await api.get(semaphores[0].release())


async def test_several_at_once_are_all_or_none(api: Api, server: Server) -> None:
    client = api.client(server.url)
    semaphore = client.semaphore(NAME, 5)
    assert await api.get(semaphore.acquire(3))
    assert await api.get(semaphore.acquire(3, blocking=False)) is False
    async with api.within(client.semaphore(NAME, 5, n=2)):
        assert await api.get(semaphore.available()) == 0
    assert await api.get(semaphore.available()) == 2
    await api.get(semaphore.release())
    assert await api.get(semaphore.available()) == 5


async def test_what_was_acquired_last_is_released_first(api: Api, server: Server) -> None:
    semaphore = api.client(server.url).semaphore(NAME, 10)
    leases = []
    for n in (1, 4, 2):
        assert await api.get(semaphore.acquire(n))
        leases.append(semaphore.lease)
    for free, lease in zip((5, 9, 10), reversed(leases), strict=True):
        assert semaphore.lease is lease
        await api.get(semaphore.release())
        assert await api.get(semaphore.available()) == free and not lease.valid
    assert semaphore.lease is None


async def test_in_order_of_arrival(api: Api, server: Server, probe: redis.Redis) -> None:
    """Who wants few does not overtake who wants many."""
    clients, order = [api.client(server.url) for _ in range(2)], []
    first = Holder(api, clients[0].semaphore(NAME, 3, n=2), order, "first")
    await first.entered()
    many = Holder(api, clients[1].semaphore(NAME, 3, n=3), order, "many")
    await in_queue(api, probe, 1)
    assert await api.get(clients[0].semaphore(NAME, 3).locked()), "one is free, for who waits"
    few = Holder(api, clients[0].semaphore(NAME, 3), order, "few")
    await in_queue(api, probe, 2)
    assert await api.get(clients[0].semaphore(NAME, 3).acquire(blocking=False)) is False and probe.zcard(QUEUE) == 2
    await first.leave()
    await many.entered()
    assert order == ["first", "many"]
    await many.leave()
    await few.entered()
    await few.leave()


async def test_all_that_are_free_are_granted_at_once(
    api: Api, server: Server, probe: redis.Redis, no_recheck: None
) -> None:
    client = api.client(server.url)
    first = Holder(api, client.semaphore(NAME, 3, n=3))
    await first.entered()
    waiting = [Holder(api, client.semaphore(NAME, 3)) for _ in range(4)]
    await in_queue(api, probe, 4)
    await first.leave()
    await until(api, lambda: sum(holder.inside.is_set() for holder in waiting) == 3, "three inside")
    assert probe.zcard(QUEUE) == 1
    for holder in sorted(waiting, key=lambda each: not each.inside.is_set()):
        await holder.entered()
        await holder.leave()


async def test_resize_is_told_to_waiters(api: Api, server: Server, probe: redis.Redis, no_recheck: None) -> None:
    client = api.client(server.url)
    semaphore = client.semaphore(NAME, 2)
    first = Holder(api, client.semaphore(NAME, 2, n=2))
    await first.entered()
    waiting = [Holder(api, api.client(server.url).semaphore(NAME, 2)) for _ in range(3)]
    await in_queue(api, probe, 3)
    await api.get(semaphore.resize(4))
    await until(api, lambda: sum(holder.inside.is_set() for holder in waiting) == 2, "two more inside")
    assert await api.get(semaphore.available()) == 0
    await api.get(semaphore.resize(1))
    assert await api.get(semaphore.available()) == 0, "what is held stays so"
    for holder in [first, *[each for each in waiting if each.inside.is_set()]]:
        await holder.leave()
    (last,) = [each for each in waiting if not each.job.finished.is_set()]
    await last.entered()
    assert await api.get(client.semaphore(NAME, 9).acquire(blocking=False)) is False, "the size that was set counts"
    await last.leave()
    await api.get(semaphore.resize(None))
    assert await api.get(client.semaphore(NAME, 9).available()) == 9


async def test_who_waits_for_more_than_there_are_is_told(
    api: Api, server: Server, probe: redis.Redis, no_recheck: None
) -> None:
    client = api.client(server.url)
    first = Holder(api, client.semaphore(NAME, 3))
    await first.entered()
    many = Holder(api, client.semaphore(NAME, 3, n=3))
    await in_queue(api, probe, 1)
    few = Holder(api, api.client(server.url).semaphore(NAME, 3))
    await in_queue(api, probe, 2)
    await api.get(client.semaphore(NAME, 3).resize(2))
    with pytest.raises(fastlock.LockError, match="it has 2 permits, fewer than asked for"):
        await many.job.get(SOON)
    await few.entered()
    with pytest.raises(fastlock.LockError, match="it has 2 permits"):
        await api.get(client.semaphore(NAME, 3).acquire(3))
    for holder in (first, few):
        await holder.leave()
    await api.get(client.semaphore(NAME, 3).resize(None))


async def test_permits_of_the_dead_come_back(api: Api, server: Server, probe: redis.Redis) -> None:
    client = api.client(server.url)
    with ChildClient(api, server.url, kind="semaphore", permits=2, n=2, timeout=1.0) as child:
        await child.wait_for_line("ready")
        await child.request("acquire", "got")
        child.kill()
        leases = [await api.enter(client.semaphore(NAME, 2)) for _ in range(2)]
        assert await api.get(client.semaphore(NAME, 2).available()) == 0
    assert await api.get(client.release_many(leases)) == [True, True]


async def test_they_are_renewed(api: Api, server: Server, probe: redis.Redis) -> None:
    client = api.client(server.url)
    many = client.semaphore(NAME, 5, n=3, timeout=0.6, auto_renew=True)
    one = client.semaphore(NAME, 5, timeout=0.6, auto_renew=True)
    async with api.within(one) as other:
        assert await api.get(many.acquire())
        lease = many.lease
        await until(api, lambda: client.get_stats()["renewals"] >= 6, "renewals")
        assert lease.valid and await api.get(many.available()) == 1
        assert await api.get(many.extend(5)) and lease.remaining > 5
        probe.zrem(NAME, lease.token)
        probe.zincrby(NAME, 3, "|used")
        assert await api.get(many.available()) == 4
        with pytest.raises(fastlock.LockNotOwnedError):
            await api.get(many.release())
        assert lease.lost.is_set() and not other.lost.is_set()


@one_server
async def test_a_release_ends_the_wait_for_a_loss(api: Api, server: Server) -> None:
    client = api.client(server.url)
    async with api.within(client.semaphore(NAME, 2, auto_renew=True)) as lease:
        job = api.start(lambda: lease.lost.wait())
        await until(api, lambda: len(waiters_of(lease)) == 1, "one that waits")
    assert await job.get(SOON) is False and not client._transport.renewals.added


@one_server
async def test_leases_that_have_ended_are_forgotten_and_no_others(api: Api, server: Server) -> None:
    client = api.client(server.url)
    semaphore = client.semaphore(NAME, 2)
    async with api.within(semaphore) as lease:
        for _ in range(MAX_LEASES + 1):
            assert await api.get(semaphore.acquire())
            assert await api.get(client.release_many([semaphore.lease])) == [True]
        assert len(semaphore._held) <= MAX_LEASES and lease.valid
    assert not lease.valid


async def test_anybody_may_release_where_owners_do_not_count(api: Api, server: Server) -> None:
    semaphore = api.client(server.url).semaphore(NAME, 2, thread_local=False)
    assert await api.start(semaphore.acquire).get()
    await api.get(semaphore.release())
    mine = api.client(server.url).semaphore(NAME, 2)
    assert await api.start(mine.acquire).get()
    if not api.is_async:  # in asyncio, the lease of a task that has ended may be released by any
        with pytest.raises(fastlock.LockError):
            await api.get(mine.release())
        await api.get(mine._client.release_many(list(mine._held)))
    else:
        await api.get(mine.release())


async def test_releases_at_once_give_back_each_permit_once(api: Api, server: Server) -> None:
    """Where anybody may release: no two of them take the same lease, and a `with` gives back its own."""
    semaphore = api.client(server.url).semaphore(NAME, 8, thread_local=False)
    for _ in range(20):
        for _ in range(8):
            assert await api.get(semaphore.acquire(blocking=False))
        assert await api.together([semaphore.release] * 8) == [None] * 8
        assert await api.get(semaphore.available()) == 8

    async def work() -> None:
        for _ in range(10):
            async with api.within(semaphore) as lease:
                await asyncio.sleep(0) if api.is_async else time.sleep(0)
                assert lease.valid
            assert not lease.valid

    assert await api.together([work] * 6) == [None] * 6


@pytest.mark.parametrize(
    ("permits", "n", "error", "text"),
    [
        (0, 1, ValueError, "^permits must be between 1 and 2147483647 permits, not 0"),
        (-1, 1, ValueError, "^permits "),
        (2**31, 1, ValueError, "^permits "),
        (1.5, 1, TypeError, "^permits must be a number of permits"),
        (True, 1, TypeError, "^permits "),
        (3, 0, ValueError, "^n must be between"),
        (3, 4, ValueError, "^n must be at most permits, which is 3: 4 could never be acquired at once"),
        (3, "1", TypeError, "^n must be a number of permits"),
    ],
)
async def test_numbers_that_make_no_sense(
    api: Api, server: Server, permits: Any, n: Any, error: type[Exception], text: str
) -> None:
    client = api.client(server.url)
    with pytest.raises(error, match=text):
        client.semaphore(NAME, permits, n)
    semaphore = client.semaphore(NAME, 3)
    if permits == 3:
        with pytest.raises(error, match=text):
            await api.get(semaphore.acquire(n))
    else:
        with pytest.raises(error, match=text):
            await api.get(semaphore.resize(permits))
    assert client.get_stats()["commands"] == 0


@pytest.mark.parametrize("seed", range(3))
async def test_never_too_many(api: Api, server: Server, probe: redis.Redis, seed: int) -> None:
    """Callers of two clients acquire different numbers, give up, and are resized meanwhile."""
    clients = [api.client(server.url) for _ in range(2)]
    inside: list[int] = []

    async def work(who: int) -> None:
        dice = random.Random(f"{seed} {who}")
        for _ in range(25):
            n = dice.choice((1, 1, 2, 4))
            semaphore = clients[who % 2].semaphore(NAME, 4, n, blocking_timeout=20)
            if dice.random() < 0.15:
                if await api.get(semaphore.acquire(blocking_timeout=0.001)):
                    await api.get(semaphore.release())
                continue
            async with api.within(semaphore):
                inside.append(n)
                assert sum(list(inside)) <= 4
                for _ in range(dice.randrange(3)):
                    await asyncio.sleep(0) if api.is_async else time.sleep(0)
                inside.remove(n)

    assert await api.together([lambda who=who: work(who) for who in range(6)]) == [None] * 6
    assert not probe.keys("*")


@tasks_only
async def test_a_cancelled_waiter_leaves_nothing(api: Api, server: Server, probe: redis.Redis) -> None:
    client = api.client(server.url)
    for ticks in range(20):
        first = Holder(api, client.semaphore(NAME, 2, n=2 - ticks % 2))
        await first.entered()

        async def hold() -> None:
            async with client.semaphore(NAME, 2, n=2):
                await asyncio.sleep(0)

        job = asyncio.create_task(hold())
        for _ in range(ticks):
            await asyncio.sleep(0)
        job.cancel()
        await asyncio.gather(job, return_exceptions=True)
        await first.leave()
        await until(api, lambda: not probe.exists(NAME, QUEUE), "nothing left")


@tasks_only
async def test_the_body_of_a_lost_lease_is_cancelled(api: Api, server: Server, probe: redis.Redis) -> None:
    client = api.client(server.url)
    settings = {"timeout": 0.6, "auto_renew": True, "cancel_on_loss": True}
    rw = client.rw_lock(NAME, **settings)
    for lock in (client.semaphore(NAME, 2, **settings), rw.read, rw.write):
        with pytest.raises(fastlock.LockLostError):
            async with lock:
                probe.delete(NAME)
                await asyncio.sleep(60)
    with pytest.raises(fastlock.LockLostError):
        async with rw.write:
            async with rw.read:
                pass
            probe.delete(NAME)  # the inner one was left, and the body is watched over all the same
            await asyncio.sleep(60)
    reentrant = client.reentrant_lock(NAME, **settings)
    with pytest.raises(fastlock.LockLostError):
        async with reentrant:
            async with reentrant:
                pass
            probe.delete(NAME)
            await asyncio.sleep(60)
    with pytest.raises(fastlock.LockLostError):
        async with reentrant as lease:
            probe.delete(NAME)  # no renewal has found it yet: the body ends by itself
            assert not lease.lost.is_set()
    async with rw.write as lease:
        await rw.read.acquire()
    assert lease._renewal.body is None, "who reads on is in no body"
    await rw.read.release()


async def test_a_dead_waiter_keeps_nobody_waiting(
    api: Api, server: Server, probe: redis.Redis, no_recheck: None
) -> None:
    """Also one that does not fit, of a semaphore or a read-write lock, while the holder goes on."""
    client = api.client(server.url)
    for kind, holds, fits in (
        ({"kind": "semaphore", "permits": 3, "n": 3}, client.semaphore(NAME, 3), client.semaphore(NAME, 3)),
        ({"kind": "write"}, client.rw_lock(NAME).read, api.client(server.url).rw_lock(NAME).read),
    ):
        first = Holder(api, holds)
        await first.entered()
        with ChildClient(api, server.url, **kind) as child:
            await child.wait_for_line("ready")
            child.send("acquire")
            await in_queue(api, probe, 1)
            assert await api.get(fits.acquire(blocking=False)) is False
            child.kill()
        end = time.monotonic() + SOON
        while not await api.get(fits.acquire(blocking=False)):
            assert time.monotonic() < end, "it waits behind a client that is gone"
        await api.get(fits.release())
        await first.leave()


async def test_a_name_of_another_kind_is_not_resized(api: Api, server: Server) -> None:
    client = api.client(server.url)
    async with api.within(client.lock(NAME)):
        with pytest.raises(fastlock.LockKindError, match="Cannot resize lock 'sku': its name is in use by a lock"):
            await api.get(client.semaphore(NAME, 2).resize(3))
