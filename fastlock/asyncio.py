"""fastlock for asyncio: the same names as `fastlock`, awaitable. Nothing else lives here."""

from __future__ import annotations

from fastlock._errors import (
    ClientClosedError,
    LockError,
    LockKindError,
    LockLostError,
    LockNotAcquiredError,
    LockNotOwnedError,
)
from fastlock._locks.aio_client import Client
from fastlock._locks.aio_every import Job
from fastlock._locks.aio_leader import Election
from fastlock._locks.aio_lock import ClientLock, ReentrantLock
from fastlock._locks.aio_multi import MultiLock
from fastlock._locks.aio_shared import ReadWriteLock, Semaphore
from fastlock._locks.redis_py import AsyncioLock as Lock
from fastlock._protocol.description import Description, Holder, QueuedWaiter
from fastlock._protocol.lease import Lease
from fastlock._protocol.multi import MultiLease

__all__ = [
    "Client",
    "ClientClosedError",
    "ClientLock",
    "Description",
    "Election",
    "Holder",
    "Job",
    "Lease",
    "Lock",
    "LockError",
    "LockKindError",
    "LockLostError",
    "LockNotAcquiredError",
    "LockNotOwnedError",
    "MultiLease",
    "MultiLock",
    "QueuedWaiter",
    "ReadWriteLock",
    "ReentrantLock",
    "Semaphore",
]

for _public in (Client, ClientLock, Election, Job, Lock, MultiLock, ReadWriteLock, ReentrantLock, Semaphore):
    _public.__module__ = __name__  # the module from which users import it, for messages
