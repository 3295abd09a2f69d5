"""Rival ``redis-py``: its own Lock, for threads and for asyncio, as its documentation shows it."""

from __future__ import annotations

from collections.abc import Sequence

import redis
import redis.asyncio

from . import LEASE, Tasks, Threads, redis_url

PLENTY = 2000
"""Connections that a pool for threads may open: more than there are clients, since a full pool raises."""

ASYNC_CONNECTIONS = 50
"""The default of redis-py's BlockingConnectionPool. Measured with 1,000 tasks: the plain pool refuses more than 100
connections, one connection a task gives 2.2 k pairs/s, 16 to 100 shared ones 5 to 7 k; the rival gets the best."""


def versions() -> dict[str, str]:
    """Versions of redis-py and of the parser that it uses."""
    try:
        import hiredis
    except ImportError:
        return {"redis-py": redis.__version__, "parser": "python"}
    return {"redis-py": redis.__version__, "hiredis": hiredis.__version__}


def open_threads(url: str, label: str) -> Threads:
    """One client shared by all threads; its pool opens a connection for each that is busy."""
    client = redis.Redis.from_url(redis_url(url), client_name=label, max_connections=PLENTY)

    def batch(names: Sequence[str]) -> tuple[int, int]:
        held = [lock for name in names if (lock := client.lock(name, timeout=LEASE)).acquire(blocking=False)]
        for lock in held:
            lock.release()
        return len(held), len(held)

    return Threads(client.lock, batch, client.close)


def async_client(url: str, label: str) -> redis.asyncio.Redis:
    """A client for many tasks, over a pool that waits for a free connection."""
    pool = redis.asyncio.BlockingConnectionPool.from_url(
        redis_url(url), client_name=label, max_connections=ASYNC_CONNECTIONS, timeout=None
    )
    return redis.asyncio.Redis.from_pool(pool)


async def open_tasks(url: str, label: str) -> Tasks:
    """One client shared by all tasks."""
    client = async_client(url, label)
    return Tasks(client.lock, client.aclose)
