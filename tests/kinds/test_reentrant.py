"""Reentrant locks on real servers: who may enter again, what it costs, and that depth is right whatever happens."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from typing import Any

import pytest
import redis
from support.apis import Api
from support.child_client import NAME, SOON, until

import fastlock
import fastlock.asyncio
from fastlock._locks.reentrant import FEWEST_KEPT
from fastlock._protocol import renewal
from fastlock.embedded import Server

pytestmark = pytest.mark.usefixtures("no_leaks")
threads_only = pytest.mark.parametrize("api", ["threads"], indirect=True)
tasks_only = pytest.mark.parametrize("api", ["asyncio"], indirect=True)
one_server = pytest.mark.parametrize("server", ["valkey"], indirect=True)  # where its kind makes no difference


async def test_the_holder_enters_again_without_a_command(api: Api, server: Server, probe: redis.Redis) -> None:
    client = api.client(server.url)
    lock = client.reentrant_lock(NAME)
    lease = await api.enter(lock)
    before = client.get_stats()["commands"]
    for depth in range(2, 50):
        again = lock if depth % 2 else client.reentrant_lock(NAME)  # as a function makes one, which calls another
        assert (await api.enter(again)) is lease and lease.depth == depth
        assert await api.get(again.acquire(blocking=False)) is True and lease.depth == depth + 1
        await api.get(again.release())
    for depth in range(48, 0, -1):
        await api.leave(lock)
        assert lease.depth == depth and lease.valid
    assert client.get_stats()["commands"] == before and probe.exists(NAME)
    await api.leave(lock)
    assert not probe.exists(NAME) and (lease.depth, lease.valid) == (0, False)


async def test_others_are_excluded_until_the_last_release(api: Api, server: Server, probe: redis.Redis) -> None:
    client, stranger = api.client(server.url), api.client(server.url)
    lock = client.reentrant_lock(NAME)
    await api.enter(lock)
    await api.enter(lock)
    others = [client.lock(NAME), stranger.reentrant_lock(NAME), stranger.lock(NAME)]
    assert [await api.get(other.acquire(blocking=False)) for other in others] == [False] * 3
    assert await api.get(api.start(lambda: lock.acquire(blocking=False)).get()) is False, "another thread, or task"
    waiting = api.start(others[1].acquire)
    await api.leave(lock)
    assert not waiting.finished.is_set() and probe.exists(NAME)
    await api.leave(lock)
    assert await waiting.get(SOON) is True
    await api.get(stranger.release_many(list(others[1]._leases.values())))


async def test_redis_pys_lock_excludes_it_and_is_excluded(api: Api, server: Server, probe: redis.Redis) -> None:
    lock, theirs = api.client(server.url).reentrant_lock(NAME), probe.lock(NAME, timeout=30)
    assert theirs.acquire(blocking=False)
    assert await api.get(lock.acquire(blocking=False)) is False
    theirs.release()
    await api.enter(lock)
    await api.enter(lock)
    assert theirs.acquire(blocking=False) is False
    await api.leave(lock)
    await api.leave(lock)


async def test_two_threads_or_tasks_exclude_each_other(api: Api, server: Server) -> None:
    lock, inside, most = api.client(server.url).reentrant_lock(NAME), 0, 0

    async def work() -> None:
        nonlocal inside, most
        for _ in range(20):
            async with api.within(lock), api.within(lock) as lease:
                inside += 1
                most = max(most, inside)
                await asyncio.sleep(0) if api.is_async else time.sleep(0)
                assert lease.depth == 2
                inside -= 1

    assert await api.together([work] * 4) == [None] * 4
    assert most == 1


async def test_an_error_in_the_body_takes_back_one_acquire(api: Api, server: Server, probe: redis.Redis) -> None:
    lock = api.client(server.url).reentrant_lock(NAME)
    lease = await api.enter(lock)
    for _ in range(3):
        with pytest.raises(KeyError):
            async with api.within(lock):
                raise KeyError
    assert lease.depth == 1 and probe.exists(NAME)
    await api.leave(lock)


async def test_the_lock_of_a_closed_client_is_not_entered_again(api: Api, server: Server, probe: redis.Redis) -> None:
    client = api.client(server.url)
    for lock in (client.reentrant_lock(NAME), client.rw_lock("prices").read):
        assert await api.get(lock.acquire())
    await api.get(client.close())
    for lock in (client.reentrant_lock(NAME), client.rw_lock("prices").read):
        with pytest.raises(fastlock.ClientClosedError):
            await api.get(lock.acquire())
    probe.delete(NAME, "prices")


async def test_releasing_too_often_is_an_error(api: Api, server: Server) -> None:
    lock = api.client(server.url).reentrant_lock(NAME)
    for _ in range(2):
        assert await api.get(lock.acquire())
    for _ in range(2):
        await api.get(lock.release())
    with pytest.raises(fastlock.LockError, match="not owned or already unlocked"):
        await api.get(lock.release())


async def test_release_by_another_owner_is_an_error(api: Api, server: Server) -> None:
    lock = api.client(server.url).reentrant_lock(NAME)
    lease = await api.enter(lock)
    await api.enter(lock)
    with pytest.raises(fastlock.LockError, match="another thread or task acquired it"):
        await api.start(lock.release).get()
    assert lease.depth == 2
    await api.leave(lock)
    await api.leave(lock)


async def test_a_lease_that_ended_is_not_entered_again(api: Api, server: Server, probe: redis.Redis) -> None:
    """The outer `with` believes to hold the lock: the inner one must not acquire it anew."""
    lock = api.client(server.url).reentrant_lock(NAME, timeout=0.05)
    lease = await api.enter(lock)
    while lease.valid:
        pass
    for _ in range(2):
        with pytest.raises(fastlock.LockNotOwnedError, match="Cannot acquire lock 'sku': it is no longer owned"):
            await api.enter(lock)
    while probe.exists(NAME):
        pass
    with pytest.raises(fastlock.LockNotOwnedError):
        await api.leave(lock)
    async with api.within(lock) as lease:
        assert lease.depth == 1


async def test_inner_settings_that_the_lease_cannot_keep(
    api: Api, server: Server, no_leaks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renewal, "DUE_PART", 0.01)
    no_leaks.allow("fastlock:fence:*")
    client = api.client(server.url)
    lease = await api.enter(client.reentrant_lock(NAME, timeout=5))  # the lock is forgotten, the lease is not
    with pytest.raises(fastlock.LockError, match="without a fence"):
        await api.enter(client.reentrant_lock(NAME, fence=True))
    inner = client.reentrant_lock(NAME, auto_renew=True, timeout=5)
    assert await api.enter(inner) is lease and not lease.lost.is_set(), "from now on it is renewed"
    await api.leave(inner)
    await api.leave(inner)


async def test_an_inner_renewal_of_a_shorter_lease_is_no_loss(api: Api, server: Server, probe: redis.Redis) -> None:
    """A thirtieth of what it is renewed for is more than the lease has left."""
    client = api.client(server.url)
    outer, inner = client.reentrant_lock(NAME, timeout=0.9), client.reentrant_lock(NAME, auto_renew=True)
    async with api.within(outer) as lease, api.within(inner):
        await until(api, lambda: client.get_stats()["renewals"], "a renewal")
        assert lease.remaining > 25 and probe.pttl(NAME) > 25_000 and not lease.lost.is_set()


@pytest.mark.parametrize(("keywords", "error"), [({"token": "mine"}, ValueError), ({"sleep": -1}, ValueError)])
async def test_arguments_that_make_no_sense(api: Api, server: Server, keywords: Any, error: Any) -> None:
    lock = api.client(server.url).reentrant_lock(NAME)
    with pytest.raises(error, match=f"^{next(iter(keywords))} "):
        await api.get(lock.acquire(**keywords))
    with pytest.raises(AttributeError, match="cannot be changed"):
        lock.name = "another"


async def test_nothing_is_kept_of_names_that_nobody_locks(api: Api, server: Server) -> None:
    client = api.client(server.url)
    for number in range(300):
        async with api.within(client.reentrant_lock(f"{NAME}{number}")):
            pass
    gc.collect()
    assert len(client._owners._by_key) <= 65


# ------------------------------------------------------------------------------------------------------------- threads


@threads_only
async def test_threads_that_make_the_lock_at_once_share_it(api: Api, server: Server) -> None:
    client = api.client(server.url)
    for number in range(50):
        made = await api.together([lambda n=number: [client.reentrant_lock(f"{NAME}{n}")]] * 4)
        assert len({id(lock._owners) for (lock,) in made}) == 1


@threads_only
async def test_a_forked_child_does_not_enter_its_parents_lock(api: Api, server: Server) -> None:
    lock = api.client(server.url).reentrant_lock(NAME)
    with lock as lease:
        if (child := os.fork()) == 0:
            os._exit(1 if lock.acquire(blocking=False) or lease.valid else 0)
        assert os.waitpid(child, 0)[1] == 0 and lease.depth == 1


@threads_only
async def test_a_thread_that_has_the_number_of_another_one_is_another(api: Api, server: Server) -> None:
    lock = api.client(server.url).reentrant_lock(NAME, timeout=30)
    first = threading.Thread(target=lock.acquire)
    first.start()
    first.join()
    second = api.start(lambda: lock.acquire(blocking=False))
    assert await second.get() is False
    assert lock._client.release_many(list(lock._leases.values())) == [True]


# ------------------------------------------------------------------------------------------------------------- asyncio


@tasks_only
async def test_a_cancelled_inner_body_takes_back_its_own_acquire_only(api: Api, server: Server) -> None:
    lock = api.client(server.url).reentrant_lock(NAME)
    async with lock as lease:
        with pytest.raises(asyncio.TimeoutError):
            async with asyncio.timeout(0.01), lock:
                await asyncio.sleep(60)
        assert lease.depth == 1 and lease.valid
        release = lock.release()
        await lock.acquire()
        await release
        assert lease.depth == 1 and lease.valid


# --------------------------------------------------------------------------------------- after a release that was cut


@tasks_only
async def test_a_release_that_was_cancelled_does_not_keep_its_task_out(api: Api, server: Server) -> None:
    """The release is carried out all the same, and the task may acquire again: the server says when."""
    client = api.client(server.url)
    for make in (
        client.reentrant_lock,
        lambda name: client.rw_lock(name).write,
        lambda name: client.rw_lock(name).read,
    ):
        for _ in range(3):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(None) as limit:
                    async with make(NAME):
                        limit.reschedule(0)
            async with make(NAME) as lease:
                assert lease.depth == 1 and lease.valid


async def test_a_batch_releases_however_deep(api: Api, server: Server, probe: redis.Redis) -> None:
    client = api.client(server.url)
    for lock in (client.reentrant_lock(NAME), client.rw_lock(NAME).read, client.rw_lock(NAME).write):
        await api.enter(lock)
        lease = await api.enter(lock)
        assert await api.get(client.release_many([lease])) == [True] and not probe.exists(NAME)
        async with api.within(lock) as again:
            assert again is not lease and again.depth == 1


async def test_who_waited_long_keeps_what_it_acquired(api: Api, server: Server) -> None:
    """Beside many other names, and though nobody refers to the lock that acquired."""
    client, other = api.client(server.url), api.client(server.url)
    lock = other.lock(NAME)
    await api.enter(lock)
    done, told = threading.Event(), threading.Event()

    async def hold() -> None:
        await api.enter(client.reentrant_lock(NAME))
        gc.collect()
        done.set()
        await until(api, told.is_set, "the word") if api.is_async else told.wait(20)
        await api.get(client.reentrant_lock(NAME).release())

    job = api.start(hold)
    await until(api, lambda: client.get_stats()["waits"], "a waiter")
    for number in range(200):
        async with api.within(client.reentrant_lock(f"{NAME}{number}")):
            pass
    await api.leave(lock)
    await until(api, done.is_set, "the lock")
    told.set()
    await job.get()


@one_server
async def test_what_is_held_is_kept_beside_many_other_names(api: Api, server: Server) -> None:
    """Though nobody refers to the lock that acquired it, and somebody who has ended held the name before."""
    client = api.client(server.url)
    for make in (client.reentrant_lock, lambda name: client.rw_lock(name).read):
        ended = await api.start(lambda make=make: api.enter(make(NAME))).get()
        assert await api.get(client.release_many([ended])) == [True]
        await api.enter(make(NAME))
        for number in range(FEWEST_KEPT + 2):
            async with api.within(make(f"{NAME}{number}")):
                pass
        await api.get(make(NAME).release())
