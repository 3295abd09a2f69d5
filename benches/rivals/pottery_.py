"""Rival ``pottery``: its Redlock and AIORedlock with one master, as its documentation shows them.

With one master the quorum is that server alone: the same guarantee as every other rival's here. Setting: its defaults;
in asyncio a pool that waits for a free connection, as for redis-py. For threads it starts a thread pool for each
acquire.
"""

from __future__ import annotations

from functools import partial
from importlib.metadata import version

import redis
import redis.asyncio
from pottery import AIORedlock, Redlock

from . import AsyncWrapped, Tasks, Threads, Wrapped, redis_py, redis_url


def versions() -> dict[str, str]:
    """Versions of pottery and of redis-py, its client."""
    return {"pottery": version("pottery"), **redis_py.versions()}


def open_threads(url: str, label: str) -> Threads:
    """One client shared by all threads."""
    client = redis.Redis.from_url(redis_url(url), client_name=label, max_connections=redis_py.PLENTY)
    masters = {client}

    def lock(name: str, *, timeout: float, blocking: bool = True, blocking_timeout: float | None = None) -> Wrapped:
        made = Redlock(key=name, masters=masters, auto_release_time=timeout, raise_on_redis_errors=True)
        wait = -1 if blocking_timeout is None or not blocking else blocking_timeout
        return Wrapped(partial(made.acquire, blocking=blocking, timeout=wait), made.release)

    return Threads(lock, None, client.close)


async def open_tasks(url: str, label: str) -> Tasks:
    """One client shared by all tasks, over redis-py's best pool."""
    client = redis_py.async_client(url, label)
    masters = {client}

    def lock(
        name: str, *, timeout: float, blocking: bool = True, blocking_timeout: float | None = None
    ) -> AsyncWrapped:
        made = AIORedlock(key=name, masters=masters, auto_release_time=timeout, raise_on_redis_errors=True)
        wait = -1 if blocking_timeout is None or not blocking else blocking_timeout
        return AsyncWrapped(partial(made.acquire, blocking=blocking, timeout=wait), made.release)

    return Tasks(lock, client.aclose)
