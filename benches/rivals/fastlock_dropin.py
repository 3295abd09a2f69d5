"""Rival ``dropin``: fastlock's Lock in place of redis-py's, given redis-py's clients, as its documentation shows it.

The clients are redis-py's; of their pools only the settings are used, fastlock opens connections of its own. Setting:
its defaults.
"""

from __future__ import annotations

from functools import partial

import redis
import redis.asyncio

import fastlock
import fastlock.asyncio

from . import Tasks, Threads, redis_py, redis_url
from .fastlock_ import versions as own_versions


def versions() -> dict[str, str]:
    """Version and implementation of fastlock, version of redis-py."""
    return {**own_versions(), **redis_py.versions()}


def open_threads(url: str, label: str) -> Threads:
    """One redis-py client shared by all threads, and the fastlock client that comes with its pool."""
    client = redis.Redis.from_url(redis_url(url), client_name=label)
    return Threads(partial(fastlock.Lock, client), None, client.close)


async def open_tasks(url: str, label: str) -> Tasks:
    """One redis-py client shared by all tasks, and the fastlock client that comes with its pool."""
    client = redis.asyncio.Redis.from_url(redis_url(url), client_name=label)
    return Tasks(partial(fastlock.asyncio.Lock, client), client.aclose)
