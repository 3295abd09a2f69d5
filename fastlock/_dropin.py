"""Which fastlock client serves a redis-py client: one per connection pool, made at first use, gone with the pool."""

from __future__ import annotations

import inspect
import threading
import weakref
from typing import Any

from fastlock import _topology as topology
from fastlock._fork import at_fork, check

_CLIENTS: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
_MUTEX = threading.Lock()


def _forget_parent() -> None:
    """In a forked child: a thread that is not here any more may have held the mutex."""
    global _MUTEX
    _MUTEX = threading.Lock()


at_fork(_forget_parent)


def client_of(redis: Any) -> Any:
    """The `fastlock.Client` of a `redis.Redis`. TypeError: it is something else."""
    from fastlock._client import Client

    return _client(redis, Client, asynchronous=False)


def aio_client_of(redis: Any) -> Any:
    """The `fastlock.asyncio.Client` of a `redis.asyncio.Redis`. TypeError: it is something else."""
    from fastlock._aio_client import Client

    return _client(redis, Client, asynchronous=True)


def _client(redis: Any, kind: Any, asynchronous: bool) -> Any:
    pool = getattr(redis, "connection_pool", None)
    if pool is None or not hasattr(pool, "connection_kwargs"):
        raise TypeError(f"redis must be a {_named(asynchronous)} client, not {type(redis).__name__}")
    if inspect.iscoroutinefunction(pool.disconnect) is not asynchronous:
        right = "fastlock.Lock" if asynchronous else "fastlock.asyncio.Lock"
        raise TypeError(f"redis is a {_named(not asynchronous)} client: use {right}")
    check()
    client = _CLIENTS.get(pool)
    if client is None or client.retired:
        with _MUTEX:
            client = _CLIENTS.get(pool)
            if client is None or client.retired:
                client = _CLIENTS[pool] = kind(settings=topology.from_pool(pool))
    return client


def _named(asynchronous: bool) -> str:
    return "redis.asyncio.Redis" if asynchronous else "redis.Redis"
