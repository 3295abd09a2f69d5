"""The read-write lock and the semaphore for asyncio; `sync_shared.py` is the same for threads.

Never here: decisions, frames, replies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from typing import TYPE_CHECKING, Any

from fastlock._locks import plain
from fastlock._locks.aio_lock import ClientLock, Guarded
from fastlock._locks.copying import Uncopyable
from fastlock._locks.reentrant import Owners, fixed_name
from fastlock._locks.shared import PermitsSide, ReadSide, SharedLock, WriteSide, as_permits
from fastlock._protocol import describe, shared
from fastlock._protocol.lease import Lease, now
from fastlock._transport.internals import coroutine_function, running_loop
from fastlock._transport.renewing import acquires


class SharedClientLock(SharedLock, ClientLock):
    """What the sides of a read-write lock and a semaphore have in common, for asyncio."""

    __slots__ = ()

    async def _release(self, owner: object, lease: Lease | None) -> None:
        await plain.aio_release(self, False, None, owner, lease)

    async def locked(self) -> bool:
        """Whether anybody holds the lock, asked of the server; of a semaphore: whether to acquire it would wait."""
        return bool(await self._transport.drive(self._is_locked()))

    async def _owned(self, owner: object) -> bool:
        return bool(await self._transport.drive(self._is_owned(self._lease_of(owner or self._owner()))))

    __aexit__ = plain.aio_exit_lock

    if TYPE_CHECKING:

        def __aenter__(self) -> Awaitable[Lease]: ...

    else:
        __aenter__ = plain.aio_enter_lease


class _Side(SharedClientLock):
    """What both sides of a read-write lock have in common."""

    __slots__ = ()

    def _share(self, owners: Owners) -> None:
        """Keep leases where all read-write locks of the client on this name find them."""
        self._owners, self._leases = owners, owners.leases

    @acquires
    async def acquire(  # type: ignore[override]  # no token: the holder is known by its task
        self, blocking: bool | None = None, blocking_timeout: float | None = None, sleep: float | None = None
    ) -> bool:
        """Acquire this side of the lock; afterwards `lease` is what is owned. Returns False when others hold the lock
        so that it does not fit beside them, and did so for as long as it may wait. True at once, if the running task
        holds it.

        blocking: whether to wait for it. blocking_timeout: for how many seconds at most. sleep: seconds between two
        tries, where it has to be polled. None takes the lock's own setting.

        Raises ValueError or TypeError for arguments that make no sense; LockError if the task holds it for reading and
        would write; LockKindError if the name is in use by another kind of lock; LockNotOwnedError if it holds a lease
        that has ended: release it first; redis-py's exceptions for error replies of the server, and ConnectionError or
        TimeoutError when it stays away: the lock is then not held.
        """
        if self._reenter() is not None:
            return True
        return (await self._transport.run(self._acquire_with(sleep, blocking, blocking_timeout, None))) is not None

    async def _release(self, owner: object, lease: Lease | None) -> None:
        if not self._leave_inner(lease):
            await super()._release(owner, lease)

    if not TYPE_CHECKING:
        name = fixed_name()

        async def __aenter__(self):
            return self._reenter() or await plain.aio_acquire(self, True)

        async def __aexit__(self, kind, error, trace):
            if not self._leave_inner(self._leases.get(self._owner())):
                await plain.aio_exit_lock(self, kind, error, trace)


class ReadLock(ReadSide, _Side):
    """The side of a `ReadWriteLock` for readers, of whom there may be many at once."""

    __slots__ = ()


class WriteLock(WriteSide, _Side):
    """The side of a `ReadWriteLock` for writers: while one writes, nobody reads and nobody else writes."""

    __slots__ = ()


class GuardedReadLock(Guarded, ReadLock):
    """The side for readers, with cancel_on_loss."""

    __slots__ = ()


class GuardedWriteLock(Guarded, WriteLock):
    """The side for writers, with cancel_on_loss."""

    __slots__ = ()


class ReadWriteLock(Uncopyable):
    """A read-write lock, made by `Client.rw_lock()`: `read` and `write` are its two sides, each a lock like any other.

    Its holder is a task of a client: all read-write locks of the client on one name are one lock to it, and it may
    enter again, as with a reentrant lock. Who writes may read, and goes on to read when it has released `write`
    (downgrade). Who reads may not write: `write.acquire` raises LockError.
    """

    __slots__ = ("read", "write")

    def __init__(self, read: ReadLock, write: WriteLock) -> None:
        self.read = read
        self.write = write

    @property
    def name(self) -> Any:
        """The name as the caller wrote it."""
        return self.read.name

    async def locked(self) -> bool:
        """Whether anybody reads or writes, asked of the server."""
        return bool((await self.read._transport.drive(describe.find(self.read._key, now))).holders)

    def __repr__(self) -> str:
        return f"<ReadWriteLock {self.name!r}>"


class Semaphore(PermitsSide, SharedClientLock):
    """A semaphore, made by `Client.semaphore()`: at most `permits` are held at once, each with a lease of its own.

    An `async with` acquires `n` permits in one lease. A task may acquire several times; a release gives back what it
    acquired last.
    """

    __slots__ = ()

    def _owner(self) -> Any:
        try:
            return asyncio.current_task()
        except RuntimeError:  # no event loop runs
            return None

    @acquires
    async def acquire(  # type: ignore[override]
        self,
        n: int | None = None,
        blocking: bool | None = None,
        blocking_timeout: float | None = None,
        sleep: float | None = None,
    ) -> bool:
        """Acquire `n` permits, all or none; afterwards `lease` is what is owned. Returns False when there are too few,
        and were for as long as it may wait.

        blocking: whether to wait for them. blocking_timeout: for how many seconds at most. sleep: seconds between two
        tries, where it has to be polled. None takes the semaphore's own setting.

        Raises ValueError or TypeError for arguments that make no sense, as more permits than there are; LockKindError
        if the name is in use by another kind of lock; redis-py's exceptions for error replies of the server, and
        ConnectionError or TimeoutError when it stays away: nothing is held then.
        """
        return (await self._transport.run(self._acquire_with(sleep, blocking, blocking_timeout, n))) is not None

    @coroutine_function
    def release(self) -> Coroutine[Any, Any, None]:
        """Release what the task acquired last. Until this returns it counts as held: after a ConnectionError it can be
        called again.

        Raises LockError: the task holds nothing. LockNotOwnedError: its lease has ended.
        """
        return self._release(self._owner(), None)

    def _orphaned_lease(self) -> Lease | None:
        closing = running_loop() is None  # as a coroutine that is closed leaves an `async with`
        found = [lease for lease, task in self._held.items() if task is not None and (closing or task.done())]
        return found[-1] if found else None

    async def available(self) -> int:
        """How many permits are free, asked of the server."""
        return int(await self._transport.drive(self._available()))

    async def resize(self, permits: int | None) -> None:
        """Change how many permits there are, for all clients, until it is changed again; None: as many as whoever
        acquires says. Waiters are granted what is free now. Permits that are held stay so, also if there are more of
        them; who waits for more than there are gets a LockError."""
        size = None if permits is None else as_permits(permits, "permits")
        await self._transport.drive(shared.resize(self, size, now))


class GuardedSemaphore(Guarded, Semaphore):
    """A semaphore with cancel_on_loss."""

    __slots__ = ()
