"""What a client counts of its own work, on real servers: each counter counts what its name says, and no more."""

from __future__ import annotations

import time
from typing import Any

import pytest
import redis
from support.apis import Api
from support.faultproxy import FaultProxy, swallow

import fastlock
from fastlock._protocol import local_queue
from fastlock._protocol.stats import COUNTED
from fastlock.embedded import Server

NAME, NAME_IN_COMMAND = "sku", b"\r\nsku\r\n"
NOTHING = {name: 0 for name in COUNTED if name not in ("commands", "flushes")}
MEASURED = ("commands", "flushes", "round_trip_us")


def counted(client: Any) -> dict[str, int]:
    """All counters but commands and flushes, which depend on the server."""
    stats: dict[str, int] = client.get_stats()
    assert 0 <= stats["flushes"] <= stats["commands"]
    return {name: count for name, count in stats.items() if name not in MEASURED}


async def wait_for(api: Api, client: Any, what: str, count: int) -> None:
    """Return when the counter `what` has reached `count`."""
    end = time.monotonic() + 10
    while client.get_stats()[what] < count:
        assert time.monotonic() < end, f"never: {count} {what}"
        await api.checkpoint()
        time.sleep(0.0005)


async def test_new_client_has_counted_nothing(api: Api, server: Server) -> None:
    assert api.client(server.url).get_stats() == {**NOTHING, **dict.fromkeys(MEASURED, 0)}


async def test_acquire_and_release_count_one_acquire_and_two_flushes(api: Api, server: Server) -> None:
    client = api.client(server.url)
    lock = client.lock(NAME)
    await api.get(lock.acquire())
    await api.get(lock.release())
    before = client.get_stats()
    await api.get(lock.acquire())
    await api.get(lock.release())
    after = client.get_stats()
    assert after["round_trip_us"] > 0
    assert {name: after[name] - before[name] for name in after if name != "round_trip_us"} == {
        **NOTHING,
        "acquires": 1,
        "commands": 2,
        "flushes": 2,
    }


async def test_batch_counts_many_acquires_and_one_flush(api: Api, server: Server) -> None:
    client = api.client(server.url)
    other = client.lock("b7")
    await api.get(other.acquire())
    before = client.get_stats()
    leases = await api.get(client.acquire_many([f"b{i}" for i in range(50)]))
    after = client.get_stats()
    assert (after["acquires"] - before["acquires"], after["commands"] - before["commands"]) == (49, 50)
    assert after["flushes"] - before["flushes"] == 1
    assert await api.get(client.release_many(leases)) == [lease is not None for lease in leases]
    await api.get(other.release())


async def test_local_handovers_are_counted(api: Api, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three waiters behind a holder: the server grants the lock to the first of them, which hands it over locally."""
    monkeypatch.setattr(local_queue, "LOCAL_SECONDS", 3600.0)  # however slow the machine
    client, other = api.client(server.url), api.client(server.url)
    holder = other.lock(NAME)
    await api.get(holder.acquire())
    order: list[int] = []

    async def wait_and_release(number: int) -> None:
        lock = client.lock(NAME)
        await api.get(lock.acquire())
        order.append(number)
        await api.get(lock.release())

    jobs = []
    for number in range(3):
        jobs.append(api.start(lambda number=number: wait_and_release(number)))
        await wait_for(api, client, "waits", number + 1)
    await api.get(holder.release())
    for job in jobs:
        await job.get()
    assert order == [0, 1, 2]
    assert counted(client) == {**NOTHING, "acquires": 3, "waits": 3, "remote_handovers": 1, "local_handovers": 2}
    assert counted(other) == {**NOTHING, "acquires": 1}


async def test_strict_order_counts_a_remote_handover_for_each_waiter(api: Api, server: Server) -> None:
    client, other = api.client(server.url), api.client(server.url)
    holder = other.lock(NAME)
    await api.get(holder.acquire())

    async def wait_and_release() -> None:
        lock = client.lock(NAME, fair=True)
        await api.get(lock.acquire())
        await api.get(lock.release())

    jobs = [api.start(wait_and_release) for _ in range(3)]
    await wait_for(api, client, "waits", 3)
    await api.get(holder.release())
    for job in jobs:
        await job.get()
    assert counted(client) == {**NOTHING, "acquires": 3, "waits": 3, "remote_handovers": 3}


async def test_acquire_of_a_free_fair_lock_counts_no_wait(api: Api, server: Server) -> None:
    client = api.client(server.url)
    lock = client.lock(NAME, fair=True)
    for _ in range(5):
        await api.get(lock.acquire())
        await api.get(lock.release())
    assert counted(client) == {**NOTHING, "acquires": 5}


async def test_batch_counts_lost_leases(api: Api, server: Server, probe: redis.Redis) -> None:
    client = api.client(server.url)
    leases = await api.get(client.acquire_many(["b1", "b2", "b3"]))
    probe.delete("b1", "b3")
    assert await api.get(client.release_many(leases)) == [False, True, False]
    assert counted(client) == {**NOTHING, "acquires": 3, "losses": 2}


async def test_wait_that_ends_without_the_lock_counts_as_a_timeout(
    api: Api, server: Server, probe: redis.Redis
) -> None:
    client = api.client(server.url)
    probe.set(NAME, "somebody else", px=10_000)
    assert not await api.get(client.lock(NAME).acquire(blocking=False))
    assert counted(client) == NOTHING, "an acquire that does not wait is no timeout"
    assert not await api.get(client.lock(NAME, blocking_timeout=0.3).acquire())
    assert counted(client) == {**NOTHING, "waits": 1, "timeouts": 1}
    assert not await api.get(client.lock(NAME).acquire(blocking_timeout=0.3, token="given"))
    assert counted(client) == {**NOTHING, "waits": 2, "timeouts": 2}
    probe.delete(NAME)


async def test_lost_lease_is_counted_once(api: Api, server: Server, probe: redis.Redis) -> None:
    client = api.client(server.url)
    lock = client.lock(NAME)
    for call in (lock.release, lambda: lock.extend(5), lock.reacquire):
        await api.get(lock.acquire())
        probe.delete(NAME)
        with pytest.raises(fastlock.LockNotOwnedError):
            await api.get(call())
    assert counted(client) == {**NOTHING, "acquires": 3, "losses": 3}


async def test_resolved_outcome_and_its_new_connection_are_counted(api: Api, proxy: FaultProxy, no_leaks: Any) -> None:
    client = api.client(proxy.url)
    lock = client.lock(NAME)
    await api.get(client.server_info())
    proxy.arm(swallow(), after=NAME_IN_COMMAND, times=1)
    assert await api.get(lock.acquire())
    assert counted(client) == {**NOTHING, "acquires": 1, "recovered": 1, "reconnects": 1}
    proxy.arm(swallow(), after=NAME_IN_COMMAND, times=1)
    await api.get(lock.release())
    assert counted(client) == {**NOTHING, "acquires": 1, "recovered": 2, "reconnects": 2}
    assert client.get_stats()["commands"] > 4, "commands of connections that are gone count too"
