"""Rivals: one small file each, with the same two functions (for threads, for tasks), so that one scenario fits all.

What lives here: the table of the rivals, and their files, which open and close clients and give their locks the methods
of redis-py's. Only the worker processes of a rival import its file, with the environment named here, and each file says
with which settings its rival runs. Never here: loops, clocks and counting, which live in ``scenarios`` and
``contention``.
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

APIS = ("threads", "tasks")


class SyncLock(Protocol):
    """A lock for one use: acquired and released by calls, or entered."""

    def acquire(self) -> bool: ...

    def release(self) -> object: ...

    def __enter__(self) -> object: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> object: ...


class AsyncLock(Protocol):
    """A lock for one use by a task."""

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
    """A client opened for threads. ``batch(names)`` acquires and releases all names: (acquired, released); None: the
    library has no batches. ``sent()``: commands sent so far, by the library's own count; None: it does not count
    them."""

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
    """What a rival's module offers. ``label`` becomes the name of its connections, by which they are counted."""

    def versions(self) -> dict[str, str]: ...

    def open_threads(self, url: str, label: str) -> Threads: ...

    async def open_tasks(self, url: str, label: str) -> Tasks: ...


@dataclass(frozen=True)
class Entry:
    """What is known of a rival before its worker starts.

    module, env: its module, and the environment of its workers. needs: the import that must be there, and the name to
    install. apis: what it can run, of threads, tasks and batch. scenarios: those it runs, where not all. leaves:
    beginnings of keys that it leaves behind by design, to expire. whole_seconds: its leases are whole seconds. most:
    clients that it is run with at most, 0: any number. passes_on: a lease may be handed over within a process, without
    the server. alone: it runs with one client, whatever the others do.
    """

    module: str
    env: dict[str, str] = field(default_factory=dict)
    needs: tuple[str, str] | None = None
    apis: tuple[str, ...] = APIS
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

MOST_POLLING = 1000
"""Clients at most of rivals that poll the server: ten times as many take longer to poll once than a run lasts."""

UNCONFIRMED = "unconfirmed"
"""fastlock with releases that wait for no answer."""

KEPT = "kept"
"""fastlock with leases that are kept after their release."""

RIVALS = {
    "fastlock": Entry(f"{__package__}.fastlock_", COMPILED, apis=(*APIS, "batch"), passes_on=True),
    "fair": Entry(f"{__package__}.fastlock_fair", COMPILED, scenarios=("hot", "handover", "storm", "waiters")),
    UNCONFIRMED: Entry(
        f"{__package__}.fastlock_unconfirmed",
        COMPILED,
        scenarios=("pair", "threads", "tasks", "hot", "handover", "flash-sale"),
        passes_on=True,
    ),
    KEPT: Entry(
        f"{__package__}.fastlock_kept",
        COMPILED,
        scenarios=("pair", "threads", "tasks", "tasks-uvloop", "hot", "handover", "recall", "flash-sale"),
        passes_on=True,
    ),
    "fallback": Entry(f"{__package__}.fastlock_", {"FASTLOCK_IMPL": "python"}, apis=(*APIS, "batch"), passes_on=True),
    "dropin": Entry(f"{__package__}.fastlock_dropin", COMPILED, passes_on=True),
    BASELINE: Entry(f"{__package__}.redis_py", apis=(*APIS, "batch"), most=MOST_POLLING),
    "python-redis-lock": Entry(
        f"{__package__}.python_redis_lock",
        needs=("redis_lock", "python-redis-lock"),
        apis=("threads",),
        leaves=("lock-signal:",),
        whole_seconds=True,
    ),
    "pottery": Entry(f"{__package__}.pottery_", needs=("pottery", "pottery"), most=MOST_POLLING),
    "valkey-glide": Entry(
        f"{__package__}.valkey_glide", needs=("glide", "valkey-glide"), apis=("tasks",), most=MOST_POLLING
    ),
    "pipeline": Entry(f"{__package__}.redis_pipeline", apis=("batch",)),
}

ALONE = "alone"
"""A reference that runs beside fastlock: fastlock's lock with one holder and no other client."""

ALONE_ENTRY = Entry(f"{__package__}.fastlock_", COMPILED, passes_on=True, alone=True)

OURS = ("fastlock", "fair", UNCONFIRMED, KEPT, "fallback", "dropin", ALONE)
"""Rivals that are fastlock: an error of theirs fails the run."""


def load(module: str) -> Rival:
    """Import a rival's module. Raises ImportError where its library is not installed."""
    return cast(Rival, importlib.import_module(module))


def redis_url(url: str) -> str:
    """The same URL in the schemes that redis-py knows (it has no ``valkey://``)."""
    return "redis" + url.removeprefix("valkey") if url.startswith("valkey") else url


class Wrapped:
    """Gives the lock of another library the methods of redis-py's: ``acquire`` and ``release`` are the library's
    calls."""

    __slots__ = ("_acquire", "_release")

    def __init__(self, acquire: Callable[[], Any], release: Callable[[], Any]) -> None:
        self._acquire, self._release = acquire, release

    def acquire(self) -> bool:
        return bool(self._acquire())

    def release(self) -> None:
        self._release()

    def __enter__(self) -> Self:
        if not self._acquire():
            raise TimeoutError("not acquired")
        return self

    def __exit__(self, *exc: object) -> None:
        self._release()


class AsyncWrapped:
    """``Wrapped`` for tasks."""

    __slots__ = ("_acquire", "_release")

    def __init__(self, acquire: Callable[[], Awaitable[Any]], release: Callable[[], Awaitable[Any]]) -> None:
        self._acquire, self._release = acquire, release

    async def acquire(self) -> bool:
        return bool(await self._acquire())

    async def release(self) -> None:
        await self._release()

    async def __aenter__(self) -> Self:
        if not await self._acquire():
            raise TimeoutError("not acquired")
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._release()
