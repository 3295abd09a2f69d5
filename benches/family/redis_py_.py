"""Redis-py's Lock, and what its users do to keep it: a thread, or a task, for each lock that renews it.

Setting: as `rivals.redis_py` opens it. Renewal is the usual recipe: every third of the lease `reacquire`, until the
lock is released or found lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Any

from redis.exceptions import RedisError

from ..rivals import AsyncWrapped, Wrapped, redis_py
from ..rivals.redis_py import versions as versions
from . import cases
from .cases import SidedTasks, SidedThreads


def open_case(case: str, url: str, label: str, permits: int) -> SidedThreads:
    """One client shared by all threads."""
    opened = redis_py.open_threads(url, label)
    assert opened.lock is not None, "it has more than batches"
    if case == cases.REDIS_PY:
        return SidedThreads(opened.lock, None, opened.close)
    plain: Any = opened.lock
    renewals: list[int] = []

    def lock(name: str, *, timeout: float, **waiting: Any) -> Wrapped:
        # The token belongs to the lock and not to the thread, or the thread that renews would not have it.
        made = RenewedByThread(plain(name, timeout=timeout, thread_local=False, **waiting), timeout, renewals)
        return Wrapped(made.acquire, made.release)

    return SidedThreads(lock, None, opened.close, renewals=lambda: len(renewals))


async def open_case_in_task(case: str, url: str, label: str, permits: int) -> SidedTasks:
    """One client shared by all tasks."""
    opened = await redis_py.open_tasks(url, label)
    if case == cases.REDIS_PY:
        return SidedTasks(opened.lock, opened.close)
    plain: Any = opened.lock
    renewals: list[int] = []

    def lock(name: str, *, timeout: float, **waiting: Any) -> AsyncWrapped:
        made = RenewedByTask(plain(name, timeout=timeout, thread_local=False, **waiting), timeout, renewals)
        return AsyncWrapped(made.acquire, made.release)

    return SidedTasks(lock, opened.close, renewals=lambda: len(renewals))


class RenewedByThread:
    """A lock with a thread of its own that renews it. `renewals` gets a 1 for each renewal, which is a command."""

    def __init__(self, lock: Any, timeout: float, renewals: list[int]) -> None:
        self._lock, self._timeout, self._renewals = lock, timeout, renewals
        self._released = threading.Event()

    def acquire(self) -> bool:
        if not self._lock.acquire():
            return False
        self._thread = threading.Thread(target=self._renew, daemon=True)
        self._thread.start()
        return True

    def _renew(self) -> None:
        with contextlib.suppress(RedisError):  # lost: the release says so
            while not self._released.wait(self._timeout / 3):
                self._lock.reacquire()
                self._renewals.append(1)

    def release(self) -> None:
        self._released.set()
        self._thread.join()
        self._lock.release()


class RenewedByTask:
    """`RenewedByThread` in asyncio."""

    def __init__(self, lock: Any, timeout: float, renewals: list[int]) -> None:
        self._lock, self._timeout, self._renewals = lock, timeout, renewals
        self._released = self._sleeps = False

    async def acquire(self) -> bool:
        if not await self._lock.acquire():
            return False
        self._task = asyncio.create_task(self._renew())
        return True

    async def _renew(self) -> None:
        with contextlib.suppress(RedisError):  # lost: the release says so
            while not self._released:
                self._sleeps = True
                await asyncio.sleep(self._timeout / 3)
                self._sleeps = False
                await self._lock.reacquire()
                self._renewals.append(1)

    async def release(self) -> None:
        self._released = True
        if self._sleeps:  # cancelled in the middle of a renewal, the pool may wait for a connection for ever
            self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        await self._lock.release()
