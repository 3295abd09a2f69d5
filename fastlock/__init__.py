"""fastlock: locks on Redis and Valkey, fast and true, for threads (here) and for asyncio (`fastlock.asyncio`).

The public names of the thread face; nothing else lives here.
"""

from __future__ import annotations

from fastlock import _impl
from fastlock._client import Client
from fastlock._errors import ClientClosedError, LockError, LockNotOwnedError
from fastlock._lease import Lease
from fastlock._lock import ClientLock, Lock
from fastlock._version import __version__

__all__ = [
    "IMPLEMENTATION",
    "Client",
    "ClientClosedError",
    "ClientLock",
    "Lease",
    "Lock",
    "LockError",
    "LockNotOwnedError",
    "__version__",
]

IMPLEMENTATION: str = _impl.default.IMPLEMENTATION
