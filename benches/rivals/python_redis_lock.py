"""Rival ``python-redis-lock``: SET NX, and for waiters a BLPOP on a list of signals. Threads only.

Setting: as its documentation shows it (``expire``, no renewal), over a client whose pool opens a connection for every
waiter, since each waits in a BLPOP of its own. Its leases and waits are whole seconds, and a wait must not be
longer than the lease: a longer one waits without a limit instead.
"""

from __future__ import annotations

import logging
import math
from functools import partial

import redis
import redis_lock  # type: ignore[import-untyped]

from . import Tasks, Threads, Wrapped, redis_py, redis_url

logging.getLogger("redis_lock").setLevel(logging.ERROR)  # it warns of every try-lock that was refused


def versions() -> dict[str, str]:
    """Versions of python-redis-lock and of redis-py, its client."""
    return {"python-redis-lock": redis_lock.__version__, **redis_py.versions()}


def open_threads(url: str, label: str) -> Threads:
    """One client shared by all threads."""
    client = redis.Redis.from_url(redis_url(url), client_name=label, max_connections=redis_py.PLENTY)

    def lock(name: str, *, timeout: float, blocking: bool = True, blocking_timeout: float | None = None) -> Wrapped:
        made = redis_lock.Lock(client, name, expire=math.ceil(timeout))
        wait = None if blocking_timeout is None else math.ceil(blocking_timeout)
        if not blocking or (wait is not None and wait > timeout):
            wait = None
        return Wrapped(partial(made.acquire, blocking, wait), made.release)

    return Threads(lock, None, client.close)


async def open_tasks(url: str, label: str) -> Tasks:
    """Raise NotImplementedError: python-redis-lock has no asyncio."""
    raise NotImplementedError("python-redis-lock has no asyncio")
