"""Rival ``pipeline``: the most that redis-py can do for a batch, SET NX PX and EVALSHA without any Lock.

The pipeline has no waiting, does not load a script that the server lost, and has one token for all: an upper bound, not
a lock library.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import redis
from redis.lock import Lock

from . import LEASE, Tasks, Threads, redis_url
from .redis_py import versions as versions


def open_threads(url: str, label: str) -> Threads:
    """One client, one connection; the script of redis-py's own Lock."""
    client = redis.Redis.from_url(redis_url(url), client_name=label)
    release = str(client.script_load(Lock.LUA_RELEASE_SCRIPT))
    token = os.urandom(16).hex()

    def batch(names: Sequence[str]) -> tuple[int, int]:
        acquire = client.pipeline(transaction=False)
        for name in names:
            acquire.set(name, token, nx=True, px=LEASE * 1000)
        held = [name for name, acquired in zip(names, acquire.execute(), strict=True) if acquired]
        free = client.pipeline(transaction=False)
        for name in held:
            free.evalsha(release, 1, name, token)
        return len(held), sum(free.execute())

    return Threads(None, batch, client.close)


async def open_tasks(url: str, label: str) -> Tasks:
    """Raise NotImplementedError: a pipeline belongs to one caller."""
    raise NotImplementedError("the pipeline runs batches only")
