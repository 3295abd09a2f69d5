"""Other users of the same server: values that are no locks, clients that subscribe to everything, replies that make no
sense. They affect no other caller, and no answer is made up.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from redis import exceptions
from support.apis import Api
from support.faultproxy import FaultProxy, replace

import fastlock
from fastlock._protocol import commands
from fastlock.embedded import Server

# --------------------------------------------------------------------------------------------- values that are no locks


@pytest.mark.parametrize("size", [65_537, 3 << 20])
async def test_name_with_a_large_value_counts_as_held(
    api: Api, server: Server, probe: Any, no_leaks: Any, size: int
) -> None:
    no_leaks.allow("page", "fastlock:fence:*")
    probe.set("page", b"*9\r\n" * (size // 4 + 1))
    client = api.client(server.url, max_connections=1)
    lock = client.lock("page")
    assert await api.get(lock.acquire(blocking=False)) is False
    assert await api.get(lock.acquire(blocking_timeout=0.05)) is False
    assert await api.get(lock.acquire(token="mine", blocking_timeout=0.05)) is False
    assert await api.get(client.lock("page", fence=True).acquire(blocking=False)) is False
    assert await api.get(client.lock("page", fair=True).acquire(blocking_timeout=0.05)) is False
    assert await api.get(lock.locked())
    free = (await api.get(client.acquire_many(["page", "free"])))[1]
    assert await api.get(client.acquire_many(["page", "free"])) == [None, None]
    assert await api.get(client.release_many([free])) == [True]
    value = probe.get("page")
    for call in (lambda: lock.extend(5), lock.reacquire, lock.release):
        probe.delete("page")
        assert await api.get(lock.acquire(blocking=False))
        probe.set("page", value)
        assert await api.get(lock.owned()) is False
        with pytest.raises(fastlock.LockNotOwnedError):
            await api.get(call())
    waiting = api.start(lambda: client.lock("page", thread_local=False).acquire(blocking_timeout=20))
    while not client.get_stats()["waits"]:
        await api.checkpoint()
    probe.delete("page")
    assert await waiting.get() is True
    probe.delete("page")
    stats = client.get_stats()
    assert (stats["reconnects"], stats["recovered"]) == (0, 0)


async def test_large_value_does_not_affect_other_callers(api: Api, server: Server, probe: Any, no_leaks: Any) -> None:
    no_leaks.allow("page")
    probe.set("page", b"x" * 200_000)
    client = api.client(server.url, max_connections=1)

    async def try_it() -> list[bool]:
        lock = client.lock("page")
        return [await api.get(lock.acquire(blocking=False)) for _ in range(20)]

    async def innocent(number: int) -> None:
        for _ in range(20):
            lock = client.lock(f"innocent:{number}")
            assert await api.get(lock.acquire(blocking=False))
            assert await api.get(lock.owned())
            await api.get(lock.release())

    calls = [try_it, *(lambda number=number: innocent(number) for number in range(20))]
    outcomes = await api.together(calls)
    assert outcomes == [[False] * 20, *[None] * 20]
    assert client.get_stats()["reconnects"] == 0


# -------------------------------------------------------------------------------------------- subscribers to everything


def add_dead_waiters(probe: Any, *entries: bytes) -> None:
    """Put the entries of clients that are gone into the server's queue."""
    probe.execute_command(*commands.ENTER_LUA.load)
    address = commands.address(b"fastlock:" + b"d" * 32, 0.25)
    for entry in entries:
        assert probe.execute_command(*commands.enter(b"sku", address, False, True, entry, b"9000"))[0] == 0


@pytest.mark.parametrize("watched", [True, False], ids=["watched", "unwatched"])
async def test_dead_waiters_are_skipped_though_a_client_subscribes_to_all(
    api: Api, server: Server, probe: Any, watched: bool, no_leaks: Any
) -> None:
    """redis-cli, RedisInsight and tracers subscribe so. One script skips the dead waiters and grants to the next."""
    client = api.client(server.url)
    holder, waiting = client.lock("sku"), api.client(server.url).lock("sku", thread_local=False)
    dead = [b"fl:%032d" % number for number in range(5)]
    with probe.pubsub() as tracer:
        if watched:
            tracer.psubscribe("*")
            assert tracer.get_message(timeout=10) is not None
        await api.get(holder.acquire())
        add_dead_waiters(probe, *dead)
        job = api.start(waiting.acquire)
        while probe.zcard("fastlock:queue:{sku}") < 6:
            await api.checkpoint()
        await api.get(holder.release())
        assert not any(commands.token_matches(probe.get("sku"), entry) for entry in dead)
        assert probe.exists("sku") and probe.zcard("fastlock:queue:{sku}") == 0
        assert await job.get() is True
        await api.get(waiting.release())


async def test_lock_is_free_if_only_a_subscriber_to_everything_is_alive(
    api: Api, server: Server, probe: Any, no_leaks: Any
) -> None:
    client = api.client(server.url)
    with probe.pubsub() as tracer:
        tracer.psubscribe("*")
        assert tracer.get_message(timeout=10) is not None
        lock = client.lock("sku")
        await api.get(lock.acquire())
        add_dead_waiters(probe, b"fl:" + b"0" * 32)
        await api.get(lock.release())
        assert probe.get("sku") is None


# ------------------------------------------------------------------------------------------- replies that make no sense


async def test_invalid_reply_does_not_affect_requests_beside_it(
    api: Api, proxy: FaultProxy, probe: Any, no_leaks: Any
) -> None:
    """Those requests are retried as after any lost connection, and more than once, until the retry time is over."""
    client = api.client(proxy.url, max_connections=1, reply_timeout=20)
    await api.get(client.server_info())
    armed = proxy.arm(replace(b"?nonsense\r\n"), after=b"\r\nbad\r\n", times=5)

    async def use(name: str) -> bool:
        lock = client.lock(name)
        acquired: bool = await api.get(lock.acquire(blocking=False))
        assert acquired and await api.get(lock.owned())
        await api.get(lock.release())
        return acquired

    async def bad() -> None:
        with contextlib.suppress(exceptions.InvalidResponse):  # if it twice had the connection to itself
            await use("bad")

    calls = [bad, *(lambda number=number: use(f"innocent:{number}") for number in range(20))]
    for _ in range(3):
        outcomes = await api.together(calls)
        assert outcomes == [None, *[True] * 20]
    armed.wait()
    assert client.get_stats()["reconnects"] > 1
