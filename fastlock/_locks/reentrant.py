"""What the reentrant locks of one client share: who holds which name, and how often.

Never here: how a lock is acquired or released.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from fastlock._locks.settings import mutable_setting
from fastlock._protocol.base_lock import BaseLock
from fastlock._protocol.lease import Lease

FEWEST_KEPT = 64


class Owners:
    """The leases of the reentrant locks of one client on one name, by owner."""

    __slots__ = ("__weakref__", "_kept", "_key", "leases")

    def __init__(self, key: bytes, kept: dict[bytes, Owners]) -> None:
        self.leases: dict[Any, Lease] = {}
        self._key = key
        self._kept = kept

    def keep(self) -> None:
        """Keep this while a lease is held, also when nobody refers to the lock that acquired it: another lock of that
        name may be made to release it."""
        self._kept[self._key] = self


class OwnersByName:
    """The `Owners` of each name, as long as a lock refers to them or a lease of theirs is held. mutex: returns what
    keeps other threads out."""

    def __init__(self, mutex: Callable[[], AbstractContextManager[object]]) -> None:
        self._mutex = mutex
        self._by_key: weakref.WeakValueDictionary[bytes, Owners] = weakref.WeakValueDictionary()
        self._kept: dict[bytes, Owners] = {}
        self._most_kept = FEWEST_KEPT  # with more of them, those are forgotten that hold nothing

    def of(self, key: bytes) -> Owners:
        """Those of a name. Two threads that ask at once get the same."""
        with self._mutex():
            if len(self._kept) > self._most_kept:
                for kept, owners in list(self._kept.items()):
                    leases = list(owners.leases.values())
                    if not any(lease._confirmation is not None or lease._time_left() for lease in leases):
                        self._kept.pop(kept, None)
                self._most_kept = max(FEWEST_KEPT, 2 * len(self._kept))
            return self._by_key.setdefault(key, Owners(key, self._kept))


class Reentrant(BaseLock):
    """How a reentrant lock is entered again, for threads and for asyncio."""

    __slots__ = ()

    def _believes(self) -> bool:
        """It waits for the confirmation: its holder may enter again at any time, and is told then what is true."""
        return False

    def _reenter(self) -> Lease | None:
        # Never compiled: signal handlers run as a compiled function returns to Python, and one that raises there would
        # leave a lock that is held once more, and a caller that does not know
        lease = self._entered_before()
        if lease is not None:
            lease._depth += 1  # last: no call, in which a signal handler could raise, comes after it
        return lease


def refuse_token(token: object) -> None:
    """Refuse, by ValueError, a token that the caller chooses: it would not tell who enters again."""
    if token is not None:
        raise ValueError("token must not be given to a reentrant lock, whose holder is known by its thread or task")


def fixed_name() -> Any:
    """The setting `name` of a lock that keeps its name, as it shares with others what it holds."""

    def refuse(lock: Any, value: object) -> Any:
        if lock._owners is not None:
            raise AttributeError("the name of a reentrant or read-write lock cannot be changed: make another lock")
        return value

    return mutable_setting("name", refuse)
