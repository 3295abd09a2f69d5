"""Releases of one tick of asyncio, where the server has no compare-and-delete: sent as few scripts, and each caller is
told the truth about its own."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
import redis
from support.apis import Api
from support.faultproxy import FaultProxy, swallow

import fastlock
from fastlock._protocol import commands
from fastlock.embedded import Server

COUNT = 150
both_loops = pytest.mark.parametrize("api", ["asyncio", "asyncio+uvloop"], indirect=True)
without_compare_and_delete = pytest.mark.parametrize("server", ["redis", "floor"], indirect=True)
pytestmark = [pytest.mark.usefixtures("impl"), both_loops, without_compare_and_delete]


async def held(client: Any, count: int = COUNT) -> list[Any]:
    """Locks that are held, of as many names."""
    locks = [client.lock(f"sku:{number}", thread_local=False) for number in range(count)]
    assert all(await asyncio.gather(*(lock.acquire() for lock in locks)))
    return locks


async def released(locks: list[Any]) -> list[Any]:
    """None or the exception of each release; all are sent in one tick."""
    return await asyncio.gather(*(lock.release() for lock in locks), return_exceptions=True)


def scripts_run(probe: redis.Redis) -> int:
    calls: int = probe.info("commandstats").get("cmdstat_evalsha", {}).get("calls", 0)
    return calls


async def test_they_are_sent_as_few_scripts(api: Api, server: Server, probe: redis.Redis) -> None:
    client = api.client(server.unix_url)
    locks = await held(client)
    before, commands = scripts_run(probe), client.get_stats()["commands"]
    assert await released(locks) == [None] * COUNT and probe.keys() == []
    assert (scripts_run(probe) - before, client.get_stats()["commands"] - commands) == (2, 2)


async def test_a_name_that_was_lost_or_is_waited_for_fails_no_other(
    api: Api, server: Server, probe: redis.Redis
) -> None:
    client, other = api.client(server.unix_url), api.client(server.unix_url)
    locks = await held(client)
    probe.delete("sku:3")
    probe.set("sku:4", "somebody else")
    probe.delete("sku:5")
    probe.rpush("sku:5", "no lock at all")
    waits = other.lock("sku:6", blocking_timeout=30)
    waiting = asyncio.ensure_future(waits.acquire())
    while not (probe.get("sku:6") or b"").startswith(b"fl+"):
        await asyncio.sleep(0.001)
    outcomes = await released(locks)
    assert [i for i, outcome in enumerate(outcomes) if outcome is not None] == [3, 4, 5]
    assert {type(outcomes[i]) for i in (3, 4, 5)} == {fastlock.LockNotOwnedError}
    assert await waiting
    await waits.release()
    assert sorted(probe.keys()) == [b"sku:4", b"sku:5"] and probe.get("sku:4") == b"somebody else"
    probe.delete("sku:4", "sku:5")


async def test_the_server_has_forgotten_the_script(api: Api, server: Server, probe: redis.Redis) -> None:
    client = api.client(server.unix_url)
    for _ in range(2):
        locks = await held(client)
        probe.script_flush()
        assert await released(locks) == [None] * COUNT and probe.keys() == []
    locks, before = await held(client), scripts_run(probe)
    assert await released(locks) == [None] * COUNT and scripts_run(probe) - before == 2


@pytest.mark.parametrize("may_not", ["-mget", "~sku:1*"])
async def test_a_user_who_may_not_run_it_releases_each_by_itself(
    api: Api, server: Server, probe: redis.Redis, may_not: str
) -> None:
    """Also where only some of the names are forbidden by now, whose releases fail alone."""
    probe.execute_command("ACL", "SETUSER", "locker", "on", "nopass", "~*", "&*", "+@all")
    client = api.client(f"unix://locker:any@{server.path}")
    locks = await held(client, 30)
    rules = [may_not] if may_not == "-mget" else ["resetkeys", may_not, "~fastlock:*"]
    probe.execute_command("ACL", "SETUSER", "locker", *rules)
    try:
        outcomes = await released(locks)
    finally:
        probe.execute_command("ACL", "SETUSER", "locker", "~*", "+mget")
    forbidden = [] if may_not == "-mget" else [0, *range(2, 10), *range(20, 30)]
    assert [i for i, outcome in enumerate(outcomes) if outcome is not None] == forbidden
    assert all(isinstance(outcomes[i], redis.exceptions.NoPermissionError) for i in forbidden)
    assert await released([locks[i] for i in forbidden]) == [None] * len(forbidden) and probe.keys() == []
    probe.execute_command("ACL", "DELUSER", "locker")


async def test_releases_that_follow_as_a_script_is_refused(api: Api, server: Server, probe: redis.Redis) -> None:
    """In whichever tick its reply comes."""
    probe.execute_command("ACL", "SETUSER", "locker", "on", "nopass", "~*", "&*", "+@all", "-mget")
    client = api.client(f"unix://locker:any@{server.path}")

    async def release_later(lock: Any, ticks: int) -> None:
        for _ in range(ticks):
            await asyncio.sleep(0)
        await lock.release()

    for ticks in range(2, 14):
        locks = await held(client, 7)
        connection = client._transport.connection
        connection.stream.release_script = commands.RELEASE_MANY_LUA.sha  # as on a new connection
        outcomes = await asyncio.gather(
            *(release_later(lock, 0) for lock in locks[:4]), *(release_later(lock, ticks) for lock in locks[4:])
        )
        assert outcomes == [None] * 7 and probe.keys() == []
        assert client._transport.connection is connection, "it did not break"
    probe.execute_command("ACL", "DELUSER", "locker")


async def test_a_lease_is_released_once(api: Api, server: Server, probe: redis.Redis) -> None:
    client = api.client(server.unix_url)
    for _ in range(2):
        lock, *others = await held(client, 3)
        outcomes = await released([lock, others[0], lock, lock, others[1]])
        assert [outcome is None for outcome in outcomes] == [True, True, False, False, True]
        assert {type(outcomes[2]), type(outcomes[3])} == {fastlock.LockNotOwnedError} and probe.keys() == []


@pytest.mark.parametrize("seed", range(5))
async def test_tasks_that_are_cancelled_leave_nothing(
    api: Api, server: Server, probe: redis.Redis, no_leaks: Any, seed: int
) -> None:
    rng, client = random.Random(seed), api.client(server.unix_url)
    for ticks in (0, 1, 2, 3):
        locks = await held(client)
        tasks = [asyncio.ensure_future(lock.release()) for lock in locks]
        for _ in range(ticks):
            await asyncio.sleep(0)
        for task in rng.sample(tasks, COUNT // 3):
            task.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} <= {type(None), asyncio.CancelledError}
        assert await client.lock("barrier").locked() is False  # behind the undos on the same connection
        started = [lock for lock, outcome in zip(locks, outcomes, strict=True) if outcome is None or ticks]
        assert not any(probe.exists(lock.name) for lock in started)
        probe.flushall()  # a task that is cancelled before it begins releases nothing


async def test_a_reply_that_is_lost(
    api: Api, server: Server, probe: redis.Redis, proxy: FaultProxy, no_leaks: Any
) -> None:
    client = api.client(proxy.url)
    locks = await held(client, 30)
    proxy.arm(swallow(replies=1), after=b"EVALSHA", times=1)
    assert await released(locks) == [None] * 30 and probe.keys() == []
    assert client.get_stats()["reconnects"] == 1
