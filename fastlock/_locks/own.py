"""The leases of this process, found among all objects when somebody asks for them: no acquire pays for it.

Never here: I/O, what is shown of a lease.
"""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterable
from typing import Any

from fastlock._locks.multi import BaseMultiLock
from fastlock._locks.reentrant import Owners
from fastlock._locks.shared import PermitsSide
from fastlock._protocol.base_lock import BaseLock
from fastlock._protocol.description import Own, secret_of
from fastlock._protocol.lease import ENDED, Lease, is_inherited
from fastlock._protocol.multi import MultiLease
from fastlock._transport.owners import ThreadOwner


def own_leases(keys: Iterable[bytes]) -> dict[tuple[bytes, bytes], Own]:
    """The leases of this process on these keys, by key and secret. It looks at all objects of the process, which takes
    some 0.1 s for a million of them; those that `gc.freeze` has put aside it does not see."""
    wanted, leases, owners = set(keys), {}, {}
    for each in gc.get_objects():
        kind = type(each)  # not `isinstance`: an object may have a `__class__` that runs code
        if kind is Lease:
            if each._key in wanted and each._deadline != ENDED and not is_inherited(each):
                leases[id(each)] = each
        elif kind is Owners or issubclass(kind, (BaseLock, BaseMultiLock)):
            owners.update({id(lease): owner for owner, lease in _kept(each)})
    return {
        (lease._key, secret_of(lease._raw_token)): Own(_name_of(owners.get(at)), lease._since, lease.depth)
        for at, lease in sorted(leases.items(), key=lambda each: each[0] in owners)  # last: copies have no owner
    }


def _kept(keeper: Any) -> list[tuple[Any, Lease]]:
    """The leases that a lock keeps, each with its owner."""
    if isinstance(keeper, Owners):
        return list(keeper.leases.items())
    if isinstance(keeper, PermitsSide):
        held: dict[Lease, Any] = getattr(keeper, "_held", {})
        return [(owner, lease) for lease, owner in list(held.items())]
    kept: list[tuple[Any, Any]] = list(getattr(keeper, "_leases", {}).items())
    return [
        (owner, each) for owner, lease in kept for each in (lease.leases if isinstance(lease, MultiLease) else (lease,))
    ]


def _name_of(owner: object) -> str | None:
    """The name of a thread or task. None: the lease belongs to whoever releases it."""
    if isinstance(owner, ThreadOwner):
        if owner.ended():
            return "a thread that has ended"
        names = [thread.name for thread in threading.enumerate() if thread.ident == owner.ident]
        return names[0] if names else f"thread {owner.ident}"
    return owner.get_name() if isinstance(owner, asyncio.Task) else None
