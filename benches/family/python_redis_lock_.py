"""Python-redis-lock with `auto_renewal=True`: a thread for each lock, which renews it every two thirds of its lease.

Setting: otherwise as in `rivals.python_redis_lock`. Threads only.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import redis
import redis_lock  # type: ignore[import-untyped]

from ..rivals import Wrapped, redis_py, redis_url
from ..rivals.python_redis_lock import versions as versions
from .cases import SidedTasks, SidedThreads


def open_case(case: str, url: str, label: str, permits: int) -> SidedThreads:
    """One client shared by all threads."""
    client = redis.Redis.from_url(redis_url(url), client_name=label, max_connections=redis_py.PLENTY)

    def lock(name: str, *, timeout: float, **waiting: Any) -> Wrapped:
        made = redis_lock.Lock(client, name, expire=math.ceil(timeout), auto_renewal=True)
        return Wrapped(partial(made.acquire, waiting.get("blocking", True)), made.release)

    return SidedThreads(lock, None, client.close)


async def open_case_in_task(case: str, url: str, label: str, permits: int) -> SidedTasks:
    """Raise NotImplementedError: python-redis-lock has no asyncio."""
    raise NotImplementedError("python-redis-lock has no asyncio")
