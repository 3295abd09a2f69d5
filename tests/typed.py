"""What a type checker infers in a user's code. `make lint` checks this file; it is never run."""

from __future__ import annotations

import asyncio
from typing import assert_type

import redis
import redis.asyncio

import fastlock
import fastlock.asyncio


def threads(client: fastlock.Client) -> None:
    with client.lock("a") as lease:
        assert_type(lease, fastlock.Lease)
    with fastlock.Lock(redis.Redis(), "a") as lock:
        assert_type(lock, fastlock.Lock)
    with client.multi_lock(["a", b"b"]) as leases:
        assert_type(leases, fastlock.MultiLease)
    assert_type(client.lock("a").acquire(), bool)
    assert_type(client.describe("a"), fastlock.Description)
    assert_type(client.describe("a").holders[0], fastlock.Holder)
    assert_type(client.acquire_many(["a"]), list[fastlock.Lease | None])
    assert_type(client.release_many([lease]), list[bool])

    @client.locked("order:{order}")
    def pay(order: int) -> str:
        return ""

    assert_type(pay(1), str)
    helpers(client)


def helpers(client: fastlock.Client) -> None:
    assert_type(client.once("a", lambda: 1, ttl=60, on_busy="skip"), int)
    assert_type(client.refill("a", lambda: "", 60, stale=5), str)
    client.once("a", lambda: 1, ttl=60, on_bussy="skip")  # type: ignore[call-overload]
    client.refill("a", lambda: 1)  # type: ignore[call-overload]

    @client.refill("user:{number}", ttl=60)
    def user(number: int) -> str:
        return ""

    assert_type(user(1), str)

    @client.every("a", 60, at_once=False)
    def sweep() -> None: ...

    assert_type(sweep, fastlock.Job)
    with client.leader("a", on_gain=lambda lease: lease.fence) as election:
        assert_type(election, fastlock.Election)
        assert_type(election.wait(1), bool)
        assert_type(election.lease, fastlock.Lease | None)
    assert_type(client.invalidate("a") or client.forget("a"), bool)


async def tasks(client: fastlock.asyncio.Client) -> None:
    async with client.lock("a") as lease:
        assert_type(lease, fastlock.Lease)
    async with fastlock.asyncio.Lock(redis.asyncio.Redis(), "a") as lock:
        assert_type(lock, fastlock.asyncio.Lock)
    async with client.multi_lock(["a", b"b"]) as leases:
        assert_type(leases, fastlock.asyncio.MultiLease)
    assert_type(await client.lock("a").acquire(), bool)
    assert_type(await client.acquire_many(["a"]), list[fastlock.Lease | None])

    @client.locked("order:{order}")
    async def pay(order: int) -> str:
        return ""

    assert_type(await pay(1), str)
    assert_type(await asyncio.create_task(pay(1)), str)
    await awaited_helpers(client)


async def awaited_helpers(client: fastlock.asyncio.Client) -> None:
    async def make() -> int:
        return 1

    assert_type(await client.once("a", make, ttl=60), int)
    assert_type(await client.refill("a", make, 60), int)

    @client.once("report:{day}", ttl=60)
    async def report(day: int) -> str:
        return ""

    assert_type(await report(1), str)
    async with client.every("a", 60, make) as job, client.leader("a", on_gain=lambda lease: make()) as election:
        assert_type(job, fastlock.asyncio.Job)
        assert_type(await election.wait(), bool)


async def mixed_up(client: fastlock.Client, other: fastlock.asyncio.Client) -> None:
    async with client.lock("a"):  # type: ignore[attr-defined]
        pass
    with other.lock("a"):  # type: ignore[attr-defined]
        pass
    async with client.multi_lock(["a"]):  # type: ignore[attr-defined]
        pass
    with other.multi_lock(["a"]):  # type: ignore[attr-defined]
        pass
