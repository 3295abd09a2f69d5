"""The read-write lock and the semaphore for threads; `aio_shared.py` is the same for asyncio.

Never here: decisions, frames, replies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastlock._locks import plain
from fastlock._locks.copying import Uncopyable
from fastlock._locks.lock import ClientLock
from fastlock._locks.reentrant import Owners, fixed_name
from fastlock._locks.shared import PermitsSide, ReadSide, SharedLock, WriteSide, as_permits
from fastlock._protocol import describe, shared
from fastlock._protocol.lease import Lease, now
from fastlock._transport.owners import thread_owner


class SharedClientLock(SharedLock, ClientLock):
    """What the sides of a read-write lock and a semaphore have in common, for threads."""

    __slots__ = ()

    def release(self) -> None:
        """Release the lock. Until this returns it counts as held: after a ConnectionError it can be called again.

        Raises LockError: the caller holds nothing. LockNotOwnedError: the lock is no longer the caller's.
        """
        plain.release(self)

    def locked(self) -> bool:
        """Whether anybody holds the lock, asked of the server; of a semaphore: whether to acquire it would wait."""
        return bool(self._transport.drive(self._is_locked()))

    def owned(self) -> bool:
        """Whether the caller holds the lock, asked of the server."""
        return bool(self._transport.drive(self._is_owned(self.lease)))

    __exit__ = plain.exit_lock

    if TYPE_CHECKING:

        def __enter__(self) -> Lease: ...

    else:
        __enter__ = plain.enter_lease


class _Side(SharedClientLock):
    """What both sides of a read-write lock have in common."""

    __slots__ = ()

    def _share(self, owners: Owners) -> None:
        """Keep leases where all read-write locks of the client on this name find them."""
        self._owners, self._leases = owners, owners.leases

    def acquire(  # type: ignore[override]  # no token: the holder is known by its thread
        self, sleep: float | None = None, blocking: bool | None = None, blocking_timeout: float | None = None
    ) -> bool:
        """Acquire this side of the lock; afterwards `lease` is what is owned. Returns False when others hold the lock
        so that it does not fit beside them, and did so for as long as it may wait. True at once, if the calling thread
        holds it.

        blocking: whether to wait for it. blocking_timeout: for how many seconds at most. sleep: seconds between two
        tries, where it has to be polled. None takes the lock's own setting.

        Raises ValueError or TypeError for arguments that make no sense; LockError if the thread holds it for reading
        and would write; LockKindError if the name is in use by another kind of lock; LockNotOwnedError if it holds a
        lease that has ended: release it first; redis-py's exceptions for error replies of the server, and
        ConnectionError or TimeoutError when it stays away: the lock is then not held.
        """
        if self._reenter() is not None:
            return True
        return self._transport.run(self._acquire_with(sleep, blocking, blocking_timeout, None)) is not None

    if not TYPE_CHECKING:
        name = fixed_name()


class ReadLock(ReadSide, _Side):
    """The side of a `ReadWriteLock` for readers, of whom there may be many at once."""

    __slots__ = ()


class WriteLock(WriteSide, _Side):
    """The side of a `ReadWriteLock` for writers: while one writes, nobody reads and nobody else writes."""

    __slots__ = ()


class ReadWriteLock(Uncopyable):
    """A read-write lock, made by `Client.rw_lock()`: `read` and `write` are its two sides, each a lock like any other.

    Its holder is a thread of a client: all read-write locks of the client on one name are one lock to it, and it may
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

    def locked(self) -> bool:
        """Whether anybody reads or writes, asked of the server."""
        return bool(self.read._transport.drive(describe.find(self.read._key, now)).holders)

    def __repr__(self) -> str:
        return f"<ReadWriteLock {self.name!r}>"


class Semaphore(PermitsSide, SharedClientLock):
    """A semaphore, made by `Client.semaphore()`: at most `permits` are held at once, each with a lease of its own.

    A `with` acquires `n` permits in one lease. A thread may acquire several times; a release gives back what it
    acquired last.
    """

    __slots__ = ()

    def _owner(self) -> Any:
        return thread_owner()

    def acquire(  # type: ignore[override]
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
        return self._transport.run(self._acquire_with(sleep, blocking, blocking_timeout, n)) is not None

    def available(self) -> int:
        """How many permits are free, asked of the server."""
        return int(self._transport.drive(self._available()))

    def resize(self, permits: int | None) -> None:
        """Change how many permits there are, for all clients, until it is changed again; None: as many as whoever
        acquires says. Waiters are granted what is free now. Permits that are held stay so, also if there are more of
        them; who waits for more than there are gets a LockError."""
        size = None if permits is None else as_permits(permits, "permits")
        self._transport.drive(shared.resize(self, size, now))
