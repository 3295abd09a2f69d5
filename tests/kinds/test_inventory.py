"""Which names are held, and what becomes of a lock that an operator takes away from its holders."""

from __future__ import annotations

from typing import Any

import pytest
import redis
from support.apis import Api
from support.child_client import LONG, NAME, QUEUE, SOON, ChildClient, held, queued, until, wait_with

import fastlock
from fastlock._protocol import describe, inventory, renewal
from fastlock._protocol.describe import Found
from fastlock._protocol.lease import now
from fastlock.embedded import Server

pytestmark = pytest.mark.usefixtures("no_leaks")


async def found(api: Api, client: Any) -> Found:
    return await api.get(client._transport.drive(describe.find(NAME.encode(), now)))  # type: ignore[no-any-return]


async def broken(api: Api, client: Any, shown: Found | None = None) -> int:
    """Break the lock, of those who hold it now or held it when it was shown; returns how many held it."""
    shown = shown or await found(api, client)
    return await api.get(client._transport.drive(inventory.break_locks(NAME.encode(), shown, now)))  # type: ignore[no-any-return]


async def lost(api: Api, lock: Any) -> None:
    with pytest.raises(fastlock.LockNotOwnedError):
        await api.get(lock.release())


@pytest.mark.parametrize("settings", [{}, {"fair": True}, {"timeout": None}], ids=str)
async def test_it_is_free_then(api: Api, server: Server, probe: redis.Redis, settings: dict[str, Any]) -> None:
    client, other = api.client(server.url), api.client(server.url)
    lock = await held(api, client, **settings)
    assert await broken(api, other) == 1 and not probe.exists(NAME)
    assert await broken(api, other) == 0
    await lost(api, lock)


async def test_the_next_waiter_has_it_in_one_hop(
    api: Api, server: Server, probe: redis.Redis, no_recheck: None
) -> None:
    """By the message of the grant: nobody rechecks here."""
    clients = [api.client(server.url) for _ in range(4)]
    lock = await held(api, clients[0])
    first, job = wait_with(api, clients[1])
    await queued(api, probe, 1)
    second, last = wait_with(api, clients[2])
    await queued(api, probe, 2)
    assert await broken(api, clients[3]) == 1
    assert await job.get(SOON) and await api.get(first.owned()) and not last.finished.is_set()
    await lost(api, lock)
    assert await api.get(first.owned())
    await api.get(first.release())
    assert await last.get(SOON)
    await api.get(second.release())


async def test_who_came_meanwhile_keeps_it(api: Api, server: Server, probe: redis.Redis) -> None:
    client = api.client(server.url)
    lock = await held(api, client)
    shown = await found(api, client)
    await api.get(lock.release())
    assert await broken(api, client, shown) == 0 and not probe.exists(NAME)
    newer = await held(api, client)
    assert await broken(api, client, shown) == 0 and await api.get(newer.owned())
    await api.get(newer.release())
    async with api.within(client.rw_lock(NAME).read):  # of another kind by now
        assert await broken(api, client, shown) == 0
        assert len((shared := await found(api, client)).holders) == 1
    async with api.within(client.lock(NAME)):
        assert await broken(api, client, shared) == 0
    probe.rpush(NAME, "x")
    assert await broken(api, client, shown) == await broken(api, client, shared) == 0
    probe.delete(NAME)


async def test_a_renewed_lease_is_told_lost(
    api: Api, server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(renewal, "DUE_PART", 0.01)
    client, told = api.client(server.url), []
    lock = client.lock(NAME, 5, auto_renew=True, on_lost=told.append, thread_local=False)
    assert await api.get(lock.acquire())
    lease = lock.lease
    assert await broken(api, api.client(server.url)) == 1
    await until(api, lambda: told == [lease], "the loss")
    assert lease.lost.is_set() and not lease.valid
    with pytest.raises(fastlock.LockError):
        await api.get(lock.release())


async def test_a_holder_that_others_wait_for_since(api: Api, server: Server, probe: redis.Redis) -> None:
    """Its token became a contended one after it was shown."""
    client = api.client(server.url)
    lock = await held(api, client)
    shown = await found(api, client)
    waiting, job = wait_with(api, api.client(server.url))
    await until(api, lambda: (probe.get(NAME) or b"").startswith(b"fl+"), "a contended token")
    assert await broken(api, client, shown) == 1
    assert await job.get(SOON)
    await lost(api, lock)
    await api.get(waiting.release())


async def test_a_lock_of_redis_py(api: Api, server: Server, probe: redis.Redis) -> None:
    client = api.client(server.url)
    theirs = probe.lock(NAME, timeout=LONG)
    assert theirs.acquire()
    waiting, job = wait_with(api, client, sleep=0.01)
    await queued(api, probe, 1)
    assert await broken(api, api.client(server.url)) == 1
    assert await job.get(SOON)
    with pytest.raises(redis.exceptions.LockNotOwnedError):
        theirs.release()
    await api.get(waiting.release())


async def test_all_readers_at_once(api: Api, server: Server, probe: redis.Redis, no_recheck: None) -> None:
    clients = [api.client(server.url) for _ in range(3)]
    sides = [each.rw_lock(NAME, timeout=LONG) for each in clients]
    for side in sides[:2]:
        assert await api.get(side.read.acquire())

    async def write() -> bool:
        async with api.within(sides[2].write):
            return probe.zcard(NAME) == 1

    job = api.start(write)
    await queued(api, probe, 1)
    assert await broken(api, clients[2]) == 2
    assert await job.get(SOON) is True
    for side in sides[:2]:
        await lost(api, side.read)


async def test_a_writer_that_became_a_reader_meanwhile(api: Api, server: Server, probe: redis.Redis) -> None:
    client = api.client(server.url)
    lock = client.rw_lock(NAME, timeout=LONG)
    await api.enter(lock.write)
    await api.enter(lock.read)
    shown = await found(api, client)
    await api.leave(lock.write)
    assert await broken(api, client, shown) == 1 and not probe.exists(NAME)
    await lost(api, lock.read)


async def test_permits(api: Api, server: Server, probe: redis.Redis, no_leaks: Any, no_recheck: None) -> None:
    """Those that were shown are free then, and are granted in order; others stay held."""
    clients = [api.client(server.url) for _ in range(3)]
    semaphores = [each.semaphore(NAME, 3, timeout=LONG, thread_local=False) for each in clients]
    assert await api.get(semaphores[0].acquire(2))
    shown = await found(api, clients[0])
    assert await api.get(semaphores[1].acquire(1))
    jobs = []
    for at in range(2):
        jobs.append(api.start(lambda: semaphores[2].acquire(2)))
        await queued(api, probe, at + 1)
    assert await broken(api, clients[2], shown) == 1
    await until(api, lambda: any(job.finished.is_set() for job in jobs), "a grant")
    assert (await found(api, clients[2])).permits() == 3 and probe.zscore(NAME, "|used") == -3
    await lost(api, semaphores[0])
    await api.get(semaphores[2].release())
    await until(api, lambda: all(job.finished.is_set() for job in jobs), "the other grant")
    for semaphore in semaphores[1:]:
        await api.get(semaphore.release())


# ------------------------------------------------------------------------------------------------------------ all names


async def names(api: Api, client: Any, match: bytes = b"*") -> set[bytes]:
    """All names that are held or waited for."""
    seen: list[bytes] = []
    for pattern in inventory.patterns(match):
        cursor = b""
        while cursor != b"0":
            cursor, more = await api.get(client._transport.drive(inventory.scan(cursor or b"0", pattern, now)))
            seen += more
    return set(seen)


async def test_names_of_every_kind_and_nothing_else(api: Api, server: Server, probe: redis.Redis) -> None:
    client = api.client(server.url)
    odd = [b"\xff\x00", "{tag}x", "a{b}c", "line\nbreak", "*", "[x]"]
    locks = [client.lock(name, thread_local=False) for name in ["plain", *odd]]
    locks += [client.lock("fenced", fence=True), client.reentrant_lock("reentrant"), client.lock("endless", None)]
    locks += [client.rw_lock("read").read, client.rw_lock("write").write, client.semaphore("permits", 3, n=2)]
    for lock in locks:
        await api.enter(lock)
    probe.set("hex", "0" * 35)
    probe.set("like a token", "fl:" + "0" * 31 + "G")
    probe.set("longer", "fl:" + "0" * 33)
    probe.rpush("list", "fl:" + "0" * 32)
    probe.hset("hash", "a", "b")
    probe.zadd("ranks", {"somebody": 1})
    probe.zadd("empty ranks", {"": 1})
    probe.lock("theirs", timeout=LONG).acquire()
    expected = {lock._key for lock in locks}
    assert len(expected) == 13 and await names(api, client) == expected
    assert await names(api, client, b"re*") == {b"read", b"reentrant"}
    assert await names(api, client, b"nothing*") == set()
    for lock in locks:
        await api.leave(lock)
    probe.flushall()


@pytest.mark.parametrize("name", ["sku", "{sku}1", "s{k}u"])
@pytest.mark.parametrize("match", [b"*", b"*k*"])
async def test_a_name_that_is_only_waited_for(
    api: Api, server: Server, probe: redis.Redis, name: str, match: bytes, no_recheck: None
) -> None:
    client = api.client(server.url)
    lock = client.lock(name, timeout=LONG, thread_local=False)
    assert await api.get(lock.acquire())
    waiting = api.client(server.url).lock(name, timeout=LONG, thread_local=False, blocking_timeout=0.5)
    job = api.start(waiting.acquire)
    await until(api, lambda: probe.keys("fastlock:queue:*"), "an entry in the queue")
    probe.delete(name)
    assert await names(api, client, match) == {name.encode()}
    await job.get()
    probe.flushall()


async def test_more_keys_than_one_look_takes(
    api: Api, server: Server, probe: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inventory, "BATCH", 10)
    client = api.client(server.url)
    leases = await api.get(client.acquire_many([f"n{i}" for i in range(100)]))
    probe.mset({f"other{i}": "x" for i in range(100)})
    assert await names(api, client) == {b"n%d" % i for i in range(100)}
    await api.get(client.release_many(leases))
    probe.flushall()


async def test_thousands_of_holders_at_once(api: Api, server: Server, probe: redis.Redis) -> None:
    client = api.client(server.url)
    probe.zadd(NAME, {b"fl:%032x|r" % i: "+inf" for i in range(12_000)})
    assert await broken(api, client) == 12_000 and not probe.exists(NAME)
    leases = await api.get(client.acquire_many([f"{'x' * 900}{i}" for i in range(500)]))
    assert len(await names(api, client)) == 500
    await api.get(client.release_many(leases))


async def test_a_dead_process_is_broken(api: Api, server: Server, probe: redis.Redis) -> None:
    client = api.client(server.url)
    with ChildClient(api, server.url, timeout=None) as child:
        await child.request("acquire", "got")
        child.kill()
    waiting, job = wait_with(api, client)
    await queued(api, probe, 1)
    assert await broken(api, client) == 1
    assert await job.get(SOON) and not probe.exists(QUEUE)
    await api.get(waiting.release())
