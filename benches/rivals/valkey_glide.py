"""Rival ``valkey-glide``: it has no lock, so the usual recipe: SET NX PX with a random token, a script to release.

Setting: asyncio, one client for all tasks (it multiplexes by itself), its limits of time and of requests in flight set
so high that they are never reached. A waiter tries again every 0.1 s, as redis-py does.
"""

from __future__ import annotations

import asyncio
import os
import time
from importlib.metadata import version
from typing import Any
from urllib.parse import urlsplit

from glide import (
    ConditionalChange,
    ExpirySet,
    ExpiryType,
    GlideClient,
    GlideClientConfiguration,
    NodeAddress,
    Script,
    ServerCredentials,
)

from ..raw import address
from . import AsyncWrapped, Tasks, Threads

RELEASE = "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) else return 0 end"
SLEEP = 0.1
REQUEST_TIMEOUT_MS = 60_000
MOST_REQUESTS = 100_000


def versions() -> dict[str, str]:
    """The version of the client."""
    return {"valkey-glide": version("valkey-glide")}


def open_threads(url: str, label: str) -> Threads:
    """Raise NotImplementedError: the client for threads is another package."""
    raise NotImplementedError("valkey-glide runs tasks only")


async def open_tasks(url: str, label: str) -> Tasks:
    """One client for all tasks, by the unix socket where the URL names one."""
    client = await GlideClient.create(_configuration(url, label))
    script = Script(RELEASE)  # type: ignore[no-untyped-call]

    def lock(
        name: str, *, timeout: float, blocking: bool = True, blocking_timeout: float | None = None
    ) -> AsyncWrapped:
        made = _RecipeLock(client, script, name, timeout, blocking, blocking_timeout)
        return AsyncWrapped(made.acquire, made.release)

    return Tasks(lock, client.close)


def _configuration(url: str, label: str) -> GlideClientConfiguration:
    where = address(url)
    node = NodeAddress(unix_socket_path=where["path"]) if "path" in where else NodeAddress(where["host"], where["port"])
    password = where.get("password")
    return GlideClientConfiguration(
        [node],
        use_tls=urlsplit(url).scheme in ("rediss", "valkeys"),
        credentials=ServerCredentials(password, where.get("username")) if password else None,
        database_id=where.get("db", 0),
        client_name=label,
        request_timeout=REQUEST_TIMEOUT_MS,
        inflight_requests_limit=MOST_REQUESTS,
    )


class _RecipeLock:
    """A lock for one use, by the recipe."""

    __slots__ = ("_blocking", "_client", "_expiry", "_name", "_script", "_token", "_wait")

    def __init__(
        self, client: Any, script: Any, name: str, timeout: float, blocking: bool, blocking_timeout: float | None
    ) -> None:
        self._client, self._script, self._name = client, script, name
        self._expiry = ExpirySet(ExpiryType.MILLSEC, int(timeout * 1000))
        self._blocking, self._wait = blocking, blocking_timeout
        self._token = os.urandom(16).hex()

    async def acquire(self) -> bool:
        end = None if self._wait is None else time.monotonic() + self._wait
        while True:
            acquired = await self._client.set(
                self._name, self._token, conditional_set=ConditionalChange.ONLY_IF_DOES_NOT_EXIST, expiry=self._expiry
            )
            if acquired:
                return True
            if not self._blocking or (end is not None and time.monotonic() + SLEEP > end):
                return False
            await asyncio.sleep(SLEEP)

    async def release(self) -> None:
        if not await self._client.invoke_script(self._script, keys=[self._name], args=[self._token]):
            raise RuntimeError(f"{self._name} is no longer owned")
