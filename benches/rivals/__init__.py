"""Rivals: one small file each, all behind the same two doors (threads and tasks), so that one scenario serves all.

Law: a rival file opens and closes clients, nothing else; loops, clocks and counting live in ``scenarios``. Only the
worker process of that rival imports it, with the environment named here.
"""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol, cast

LEASE = 10
"""Seconds of lease that every rival asks for; no bench holds a lock that long."""

BASELINE = "redis-py"
"""The rival that every ratio is taken against."""


class MakeLock(Protocol):
    """``client.lock`` of a thread client."""

    def __call__(self, name: str, *, timeout: float) -> AbstractContextManager[object]: ...


class MakeAsyncLock(Protocol):
    """``client.lock`` of an asyncio client."""

    def __call__(self, name: str, *, timeout: float) -> AbstractAsyncContextManager[object]: ...


@dataclass(frozen=True)
class Threads:
    """A client opened for threads. ``batch(names)`` locks and frees all names: (acquired, released)."""

    lock: MakeLock | None
    batch: Callable[[Sequence[str]], tuple[int, int]]
    close: Callable[[], object]


@dataclass(frozen=True)
class Tasks:
    """A client opened on the running event loop."""

    lock: MakeAsyncLock
    close: Callable[[], Awaitable[object]]


class Rival(Protocol):
    """What a rival's module offers. ``label`` becomes the connection name, by which the server's list is counted."""

    def versions(self) -> dict[str, str]: ...

    def open_threads(self, url: str, label: str) -> Threads: ...

    async def open_tasks(self, url: str, label: str) -> Tasks: ...


@dataclass(frozen=True)
class Entry:
    """Where a rival lives: its module, the environment of its worker, and the scenarios it can play (none: all)."""

    module: str
    env: dict[str, str] = field(default_factory=dict)
    only: tuple[str, ...] = ()


RIVALS = {
    "fastlock": Entry("fastlock_", {"FASTLOCK_IMPL": "cython"}),
    "fallback": Entry("fastlock_", {"FASTLOCK_IMPL": "python"}),
    BASELINE: Entry("redis_py"),
    "pipeline": Entry("redis_pipeline", only=("batch",)),
}


def load(name: str) -> Rival:
    """Import the rival of that name. Raises ImportError where its library is not installed."""
    return cast(Rival, importlib.import_module(f".{RIVALS[name].module}", __package__))


def redis_url(url: str) -> str:
    """The same URL in the schemes that redis-py knows (it has no ``valkey://``)."""
    return "redis" + url.removeprefix("valkey") if url.startswith("valkey") else url
