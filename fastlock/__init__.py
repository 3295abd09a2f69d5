"""fastlock: distributed locks on Redis and Valkey, for threads (here) and for asyncio (`fastlock.asyncio`).

The public names of the API for threads; nothing else lives here.
"""

from __future__ import annotations

from fastlock import _implementation
from fastlock._errors import (
    ClientClosedError,
    LockError,
    LockKindError,
    LockLostError,
    LockNotAcquiredError,
    LockNotOwnedError,
)
from fastlock._locks.client import Client
from fastlock._locks.every import Job
from fastlock._locks.leader import Election
from fastlock._locks.lock import ClientLock, ReentrantLock
from fastlock._locks.multi import MultiLock
from fastlock._locks.redis_py import Lock
from fastlock._locks.sync_shared import ReadWriteLock, Semaphore
from fastlock._protocol.description import Description, Holder, QueuedWaiter
from fastlock._protocol.lease import Lease
from fastlock._protocol.multi import MultiLease
from fastlock._version import __version__

__all__ = [
    "IMPLEMENTATION",
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
    "__version__",
]

for _public in (Client, ClientLock, Election, Job, Lock, MultiLock, ReadWriteLock, ReentrantLock, Semaphore):
    _public.__module__ = __name__  # the module from which users import it, for messages

IMPLEMENTATION: str = _implementation.default.IMPLEMENTATION
