"""redis-py's side of a test: its module for an API, its lock, and how its clients are closed, in every version."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import redis
import redis.asyncio
import redis.asyncio.lock
import redis.lock

from fastlock._locks import redis_py
from support.apis import Api


def module(api: Api) -> Any:
    """redis or redis.asyncio."""
    return redis.asyncio if api.is_async else redis


def theirs(api: Api) -> Any:
    """redis-py's own lock class."""
    return redis.asyncio.lock.Lock if api.is_async else redis.lock.Lock


def end(client: Any) -> Any:
    """Close a redis-py client; the oldest supported version has no aclose."""
    return getattr(client, "aclose", client.close)()


class Inner:
    """The fastlock client behind a redis-py client, which users never see."""

    @staticmethod
    def of(client: Any) -> Any:
        return vars(client.connection_pool).get(redis_py.CLIENT_ATTRIBUTE)


@asynccontextmanager
async def ending(api: Api, client: Any) -> AsyncIterator[Any]:
    """The redis-py client, closed at the end together with the fastlock client behind it."""
    try:
        yield client
    finally:
        if (inner := Inner.of(client)) is not None:
            await api.get(inner.close())
        await api.get(end(client))
        await api.get(client.connection_pool.disconnect())  # a pool that was passed in is not closed with its client
