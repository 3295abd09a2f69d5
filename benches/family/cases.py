"""The cases: what is measured, by which module, for threads and for asyncio; and what such a module opens.

Only names and values live here. A case is a kind of lock of fastlock's, or what users have today; its module is
imported by worker processes only, so that a library that is not installed costs its own cases and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ..rivals import APIS, MakeAsyncLock, MakeLock, Tasks, Threads

PLAIN, PLAIN_3, REENTRANT, INNER, RENEWED = "plain", "plain x 3", "reentrant", "reentrant, inner", "plain, renewed"
READ, WRITE, SEMAPHORE, MULTI_1, MULTI_3 = "rw, read", "rw, write", "semaphore", "multi, 1 name", "multi, 3 names"
WRITER_FIRST, READERS_WRITERS = "rw, writers first", "rw"
REDIS_PY, REDIS_PY_RENEWED, PYTHON_REDIS_LOCK = "redis-py", "redis-py, renewed", "python-redis-lock, renewed"
POTTERY, ZSET = "pottery", "zset semaphore"

CONTROL = "plain (2)"
"""The plain lock a second time: how far its ratio lies from 1 is the noise of the run."""

PERMITS = 8
"""Permits of a semaphore, where no option says otherwise."""


@dataclass(frozen=True)
class SidedThreads(Threads):
    """What a module opens for threads. write: how to make a lock for writers, where that differs from `lock`, which
    readers then take. renewals: leases that were given a new end so far; None: the library does not count them.
    outer: a lock to hold, by the same thread, while the pairs of the case are made."""

    write: MakeLock | None = None
    renewals: Callable[[], int] | None = None
    outer: MakeLock | None = None


@dataclass(frozen=True)
class SidedTasks(Tasks):
    """The same for asyncio."""

    write: MakeAsyncLock | None = None
    renewals: Callable[[], int] | None = None
    outer: MakeAsyncLock | None = None


class Library(Protocol):
    """A module of cases. Its functions raise what the library raises."""

    def versions(self) -> dict[str, str]: ...

    def open_case(self, case: str, url: str, label: str, permits: int) -> SidedThreads: ...

    async def open_case_in_task(self, case: str, url: str, label: str, permits: int) -> SidedTasks: ...


@dataclass(frozen=True)
class Case:
    """One thing that is measured. module: of this package. apis: those it has. needs: the import that must be there,
    and the name to install. leaves: beginnings of keys that it leaves behind by design, to expire."""

    name: str
    module: str
    apis: tuple[str, ...] = APIS
    needs: tuple[str, str] | None = None
    leaves: tuple[str, ...] = ()

    @property
    def ours(self) -> bool:
        """Whether it is fastlock: what goes wrong with it fails the run."""
        return self.module == OURS


OURS = "ours"

TODAY = (
    Case(REDIS_PY, "redis_py_"),
    Case(REDIS_PY_RENEWED, "redis_py_"),
    Case(PYTHON_REDIS_LOCK, "python_redis_lock_", ("threads",), ("redis_lock", "python-redis-lock"), ("lock-signal:",)),
    Case(POTTERY, "pottery_", needs=("pottery", "pottery")),
    Case(ZSET, "zset"),
)
"""What users have today."""

PAIRS = (
    *(Case(name, OURS) for name in (PLAIN, CONTROL, REENTRANT, INNER, READ, WRITE, SEMAPHORE)),
    *(Case(name, OURS) for name in (MULTI_1, MULTI_3, PLAIN_3, RENEWED)),
    *TODAY,
)
"""The cases of the first part, in the order of the table: a pair of acquire and release that nobody contends."""

READING = (*(Case(name, OURS) for name in (READERS_WRITERS, WRITER_FIRST, PLAIN)), TODAY[0])
"""The cases of readers and writers. A plain lock knows no readers: it is what they would have without this kind."""

LIMITING = (Case(SEMAPHORE, OURS), TODAY[-1])
"""The cases of many callers and few permits."""

RENEWING = (Case(RENEWED, OURS), TODAY[1])
"""The cases of many leases that are renewed."""

NO_RIVAL = "a read-write lock of others: none of the libraries measured here has one"
