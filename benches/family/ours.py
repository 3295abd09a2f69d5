"""Fastlock's own cases: each kind of lock, made by a client for each acquire, as applications make them.

Setting: its defaults. A case has a client of its own, which its threads or tasks share.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import TracebackType
from typing import Any

import fastlock
import fastlock.asyncio

from ..rivals.fastlock_ import versions as versions
from . import cases
from .cases import SidedTasks, SidedThreads

Maker = Callable[..., Any]


def open_case(case: str, url: str, label: str, permits: int) -> SidedThreads:
    """A client for threads, and how to make the case's locks."""
    client = fastlock.Client.from_url(url, client_name=label)
    make, write = makers(client, case, permits, Several)
    outer = functools.partial(client.reentrant_lock, auto_renew=True) if case == cases.INNER else None
    stats = client.get_stats
    return SidedThreads(
        make, None, client.close, lambda: stats()["commands"], write, lambda: stats()["renewals"], outer
    )


async def open_case_in_task(case: str, url: str, label: str, permits: int) -> SidedTasks:
    """A client for asyncio, and how to make the case's locks."""
    client = fastlock.asyncio.Client.from_url(url, client_name=label)
    make, write = makers(client, case, permits, AsyncSeveral)
    outer = functools.partial(client.reentrant_lock, auto_renew=True) if case == cases.INNER else None
    stats = client.get_stats
    return SidedTasks(make, client.close, lambda: stats()["commands"], write, lambda: stats()["renewals"], outer)


def makers(
    client: fastlock.Client | fastlock.asyncio.Client, case: str, permits: int, several: Maker
) -> tuple[Maker, Maker | None]:
    """How to make the locks of a case, and those of its writers, where they are others."""
    if case in (cases.READERS_WRITERS, cases.WRITER_FIRST):
        rw: Maker = client.rw_lock
        first = {"prefer": "writer"} if case == cases.WRITER_FIRST else {}
        return (lambda *args, **more: rw(*args, **more).read), (lambda *args, **more: rw(*args, **first, **more).write)
    return {
        cases.PLAIN: client.lock,
        cases.CONTROL: client.lock,
        cases.REENTRANT: client.reentrant_lock,
        cases.INNER: client.reentrant_lock,
        cases.RENEWED: functools.partial(client.lock, auto_renew=True),
        cases.READ: lambda *args, **more: client.rw_lock(*args, **more).read,
        cases.WRITE: lambda *args, **more: client.rw_lock(*args, **more).write,
        cases.SEMAPHORE: lambda name, **more: client.semaphore(name, permits, **more),
        cases.MULTI_1: lambda name, **more: client.multi_lock([name], **more),
        cases.MULTI_3: lambda name, **more: client.multi_lock(three(name), **more),
        cases.PLAIN_3: lambda name, **more: several(client.lock, three(name), **more),
    }[case], None


@functools.cache
def three(name: str) -> tuple[str, str, str]:
    """The three names of a lock that has several."""
    return f"{name}:a", f"{name}:b", f"{name}:c"


class Several:
    """Plain locks on several names, one after the other: what a multi lock does by one command."""

    def __init__(self, make: Maker, names: tuple[str, ...], **settings: float) -> None:
        self._locks = [make(name, **settings) for name in names]

    def acquire(self) -> bool:
        self.__enter__()
        return True

    def release(self) -> None:
        self.__exit__(None, None, None)

    def __enter__(self) -> Several:
        for lock in self._locks:
            lock.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for lock in reversed(self._locks):
            lock.__exit__(kind, error, trace)


class AsyncSeveral:
    """`Several` for tasks."""

    def __init__(self, make: Maker, names: tuple[str, ...], **settings: float) -> None:
        self._locks = [make(name, **settings) for name in names]

    async def acquire(self) -> bool:
        await self.__aenter__()
        return True

    async def release(self) -> None:
        await self.__aexit__(None, None, None)

    async def __aenter__(self) -> AsyncSeveral:
        for lock in self._locks:
            await lock.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for lock in reversed(self._locks):
            await lock.__aexit__(kind, error, trace)
