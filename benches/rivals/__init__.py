"""Rivals: one small file each, all behind the same two doors (threads and tasks), so that one scenario serves all.

A rival's file opens and closes clients and gives redis-py's shape to their locks, nothing else; loops, clocks and
counting live in ``scenarios`` and ``contention``. Only the worker processes of that rival import it, with the
environment named here, and each file says in which setting its rival runs.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, Self, cast

LEASE = 10
"""Seconds of lease that every rival asks for, if its scenario says nothing else; no bench holds a lock that long."""

BASELINE = "redis-py"
"""The rival that every ratio is taken against, where it runs."""

FACES = ("threads", "tasks")


class SyncLock(Protocol):
    """A lock for one use: taken and freed by calls, or entered."""

    def acquire(self) -> bool: ...

    def release(self) -> object: ...

    def __enter__(self) -> object: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> object: ...


class AsyncLock(Protocol):
    """The same for tasks."""

    async def acquire(self) -> bool: ...

    async def release(self) -> object: ...

    def __aenter__(self) -> Awaitable[object]: ...

    def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Awaitable[object]: ...


class MakeLock(Protocol):
    """``client.lock`` of a thread client. ``blocking_timeout``: longest wait in seconds, None: as long as it takes."""

    def __call__(
        self, name: str, *, timeout: float, blocking: bool = True, blocking_timeout: float | None = None
    ) -> SyncLock: ...


class MakeAsyncLock(Protocol):
    """``client.lock`` of an asyncio client."""

    def __call__(
        self, name: str, *, timeout: float, blocking: bool = True, blocking_timeout: float | None = None
    ) -> AsyncLock: ...


@dataclass(frozen=True)
class Threads:
    """A client opened for threads. ``batch(names)`` locks and frees all names: (acquired, released); None: has none.
    ``sent()``: commands sent so far, by the library's own count; None: it does not count them."""

    lock: MakeLock | None
    batch: Callable[[Sequence[str]], tuple[int, int]] | None
    close: Callable[[], object]
    sent: Callable[[], int] | None = None


@dataclass(frozen=True)
class Tasks:
    """A client opened on the running event loop; ``sent`` as for threads."""

    lock: MakeAsyncLock
    close: Callable[[], Awaitable[object]]
    sent: Callable[[], int] | None = None


class Rival(Protocol):
    """What a rival's module offers. ``label`` becomes the connection name, by which the server's list is counted."""

    def versions(self) -> dict[str, str]: ...

    def open_threads(self, url: str, label: str) -> Threads: ...

    async def open_tasks(self, url: str, label: str) -> Tasks: ...


@dataclass(frozen=True)
class Entry:
    """What is known of a rival before its worker starts.

    module, env: where it lives, and the environment of its workers. needs: the import that must be there, and the name
    to install. faces: what it can run, of threads, tasks and batch. scenarios: those it runs, where not all. leaves:
    beginnings of keys that it leaves behind by design, to expire. whole_seconds: its leases know no fractions. most:
    waiters that it is asked to stand, 0: any number. passes_on: a lease may go from caller to caller within a process,
    without the server. alone: it runs with one client, whatever the others do.
    """

    module: str
    env: dict[str, str] = field(default_factory=dict)
    needs: tuple[str, str] | None = None
    faces: tuple[str, ...] = FACES
    scenarios: tuple[str, ...] = ()
    leaves: tuple[str, ...] = ()
    whole_seconds: bool = False
    most: int = 0
    passes_on: bool = False
    alone: bool = False

    def lease(self, seconds: float) -> float:
        """The shortest lease of at least so many seconds that this rival can give."""
        return float(math.ceil(seconds)) if self.whole_seconds else seconds


COMPILED = {"FASTLOCK_IMPL": "cython"}

CROWD = 1000
"""Waiters that those are asked to stand who ask the server again and again: ten times as many take longer to ask once
than a run lasts."""

RIVALS = {
    "fastlock": Entry(f"{__package__}.fastlock_", COMPILED, faces=(*FACES, "batch"), passes_on=True),
    "fair": Entry(f"{__package__}.fastlock_fair", COMPILED, scenarios=("hot", "handover", "storm", "waiters")),
    "fallback": Entry(f"{__package__}.fastlock_", {"FASTLOCK_IMPL": "python"}, faces=(*FACES, "batch"), passes_on=True),
    "dropin": Entry(f"{__package__}.fastlock_dropin", COMPILED, passes_on=True),
    BASELINE: Entry(f"{__package__}.redis_py", faces=(*FACES, "batch"), most=CROWD),
    "python-redis-lock": Entry(
        f"{__package__}.python_redis_lock",
        needs=("redis_lock", "python-redis-lock"),
        faces=("threads",),
        leaves=("lock-signal:",),
        whole_seconds=True,
    ),
    "pottery": Entry(f"{__package__}.pottery_", needs=("pottery", "pottery"), most=CROWD),
    "valkey-glide": Entry(f"{__package__}.valkey_glide", needs=("glide", "valkey-glide"), faces=("tasks",), most=CROWD),
    "pipeline": Entry(f"{__package__}.redis_pipeline", faces=("batch",)),
}

ALONE = "alone"
"""A reference, measured beside fastlock: its lock with one holder and nobody else."""

ALONE_ENTRY = Entry(f"{__package__}.fastlock_", COMPILED, passes_on=True, alone=True)

OURS = ("fastlock", "fair", "fallback", "dropin", ALONE)
"""Those whose errors are ours: they fail the run."""


def load(module: str) -> Rival:
    """Import a rival's module. Raises ImportError where its library is not installed."""
    return cast(Rival, importlib.import_module(module))


def redis_url(url: str) -> str:
    """The same URL in the schemes that redis-py knows (it has no ``valkey://``)."""
    return "redis" + url.removeprefix("valkey") if url.startswith("valkey") else url


class Wrapped:
    """Gives redis-py's shape to the lock of another library: ``take`` acquires, ``free`` releases."""

    __slots__ = ("_free", "_take")

    def __init__(self, take: Callable[[], Any], free: Callable[[], Any]) -> None:
        self._take, self._free = take, free

    def acquire(self) -> bool:
        return bool(self._take())

    def release(self) -> None:
        self._free()

    def __enter__(self) -> Self:
        if not self._take():
            raise TimeoutError("not acquired")
        return self

    def __exit__(self, *exc: object) -> None:
        self._free()


class AsyncWrapped:
    """The same for tasks."""

    __slots__ = ("_free", "_take")

    def __init__(self, take: Callable[[], Awaitable[Any]], free: Callable[[], Awaitable[Any]]) -> None:
        self._take, self._free = take, free

    async def acquire(self) -> bool:
        return bool(await self._take())

    async def release(self) -> None:
        await self._free()

    async def __aenter__(self) -> Self:
        if not await self._take():
            raise TimeoutError("not acquired")
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._free()
