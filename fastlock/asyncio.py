"""fastlock for asyncio: the same names as `fastlock`, awaitable. Nothing else lives here."""

from __future__ import annotations

from fastlock._aio_client import Client
from fastlock._aio_lock import ClientLock, Lock
from fastlock._errors import ClientClosedError, LockError, LockNotOwnedError
from fastlock._lease import Lease

__all__ = ["Client", "ClientClosedError", "ClientLock", "Lease", "Lock", "LockError", "LockNotOwnedError"]
