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
    assert_type(client.acquire_many(["a"]), list[fastlock.Lease | None])
    assert_type(client.release_many([lease]), list[bool])

    @client.locked("order:{order}")
    def pay(order: int) -> str:
        return ""

    assert_type(pay(1), str)


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


async def mixed_up(client: fastlock.Client, other: fastlock.asyncio.Client) -> None:
    async with client.lock("a"):  # type: ignore[attr-defined]
        pass
    with other.lock("a"):  # type: ignore[attr-defined]
        pass
    async with client.multi_lock(["a"]):  # type: ignore[attr-defined]
        pass
    with other.multi_lock(["a"]):  # type: ignore[attr-defined]
        pass
