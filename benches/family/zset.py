"""The semaphore that redis-semaphore and many a book have: a sorted set of holders, over redis-py.

A holder adds itself with the time of its own clock, and has a permit if its rank is below their number; else it removes
itself and tries again. Known weaknesses: who adds himself late by an earlier time gets a permit that is in use, so
that more than `permits` may hold one; and nobody is served in order. What it does wrong is counted, and fails no run.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import redis

from ..rivals import AsyncWrapped, Wrapped, redis_py, redis_url
from ..rivals.redis_py import versions as versions
from .cases import SidedTasks, SidedThreads

SLEEP = 0.01
"""Seconds between two tries: a tenth of what redis-py's lock waits, as permits are free again soon."""


def open_case(case: str, url: str, label: str, permits: int) -> SidedThreads:
    """One client shared by all threads."""
    client = redis.Redis.from_url(redis_url(url), client_name=label, max_connections=redis_py.PLENTY)

    def lock(name: str, *, timeout: float, blocking: bool = True, blocking_timeout: float | None = None) -> Wrapped:
        holder = os.urandom(16).hex()

        def acquire() -> bool:
            end = time.monotonic() + (3600 if blocking_timeout is None else blocking_timeout)
            while not ask(client, name, holder, timeout).execute()[-1] < permits:
                client.zrem(name, holder)
                if not blocking or time.monotonic() + SLEEP > end:
                    return False
                time.sleep(SLEEP)
            return True

        return Wrapped(acquire, lambda: client.zrem(name, holder))

    return SidedThreads(lock, None, client.close)


async def open_case_in_task(case: str, url: str, label: str, permits: int) -> SidedTasks:
    """One client shared by all tasks."""
    client = redis_py.async_client(url, label)

    def lock(
        name: str, *, timeout: float, blocking: bool = True, blocking_timeout: float | None = None
    ) -> AsyncWrapped:
        holder = os.urandom(16).hex()

        async def acquire() -> bool:
            end = time.monotonic() + (3600 if blocking_timeout is None else blocking_timeout)
            while not (await ask(client, name, holder, timeout).execute())[-1] < permits:
                await client.zrem(name, holder)
                if not blocking or time.monotonic() + SLEEP > end:
                    return False
                await asyncio.sleep(SLEEP)
            return True

        return AsyncWrapped(acquire, lambda: client.zrem(name, holder))

    return SidedTasks(lock, client.aclose)


def ask(client: Any, name: str, holder: str, timeout: float) -> Any:
    """The transaction of a try: holders whose lease has ended leave, the holder joins, and learns its rank."""
    now = time.time()
    asked = client.pipeline(transaction=True)
    asked.zremrangebyscore(name, "-inf", now - timeout)
    asked.zadd(name, {holder: now})
    asked.zrank(name, holder)
    return asked
