"""What the locks that several may hold at once, the sides of a read-write lock and a semaphore, have in common for
threads and for asyncio: how they are acquired, and which lease is whose.

Never here: I/O, waiting, the content of commands.
"""

from __future__ import annotations

from typing import Any

from fastlock._errors import LockError
from fastlock._protocol import arguments, commands, describe
from fastlock._protocol.base_lock import BaseLock, LockAcquire, LockRelease
from fastlock._protocol.commands import READER, SEMAPHORE, WRITER
from fastlock._protocol.describe import Found
from fastlock._protocol.lease import ENDED, Lease, is_inherited, new_token, now
from fastlock._protocol.shared import AcquireShared, Downgrade, ReleaseShared
from fastlock._protocol.steps import Steps

MAX_PERMITS = 2**31 - 1
MAX_LEASES = 64  # leases that one semaphore keeps: beyond, ended ones are forgotten, whose owners never released them


class SharedLock(BaseLock):
    """A lock that several may hold at once: its operations."""

    __slots__ = ()
    _mode = b""

    def _shared_token(self) -> bytes:
        """A fresh token to acquire by."""
        return commands.shared_token(new_token(), self._mode)

    def _acquire_by(self, token: bytes, required: bool) -> LockAcquire:
        return AcquireShared(self, token, required)

    def _release_of(self, lease: Lease) -> LockRelease:
        return ReleaseShared(self, lease)

    def _new_acquire(
        self, token: bytes | None = None, required: bool = True, start: float | None = None
    ) -> LockAcquire:
        return super()._new_acquire(token or self._shared_token(), required, start)

    def _acquire_with(
        self, sleep: float | None, blocking: bool | None, blocking_timeout: float | None, token: object
    ) -> LockAcquire:
        op = super()._acquire_with(sleep, blocking, blocking_timeout, None)
        until = op.until
        op.use_token(self._shared_token() if token is None else arguments.as_bytes(token, "token"))
        op.until = until
        return op

    def _is_locked(self) -> Steps[bool]:
        """Ask the server whether anybody holds the lock in its mode."""
        found = yield from describe.find(self._key, now)
        return found.any_of(self._mode)

    def _is_owned(self, lease: Lease | None) -> Steps[bool]:
        """Ask the server whether this lease holds the lock."""
        found = yield from describe.find(self._key, now)
        if lease is None or is_inherited(lease) or lease._deadline == ENDED:
            return False
        return found.has(lease._raw_token)


def is_writer(lease: Lease) -> bool:
    """Whether the lease of a read-write lock is one for writing."""
    return lease._raw_token.endswith(WRITER)


class ReadSide(SharedLock):
    """The side of a read-write lock for readers. Who holds the other side may enter this one, too."""

    __slots__ = ()
    _mode = READER

    def _reenter(self) -> Lease | None:
        lease = self._entered_before()
        if lease is None:
            return None
        if is_writer(lease):
            lease._reads += 1
        else:
            lease._depth += 1
        return lease

    def _is_inner(self, lease: Lease) -> bool:
        """Whether to leave this side takes back one of several acquires only."""
        return bool(lease._reads) if is_writer(lease) else lease._depth > 1

    def _leave_inner(self, lease: Lease | None) -> bool:
        if lease is None or not self._is_inner(lease):
            return False
        if is_writer(lease):
            lease._reads -= 1
        else:
            lease._depth -= 1
        return True

    def _lease_of(self, owner: object) -> Lease | None:
        lease = super()._lease_of(owner)
        return None if lease is None or (is_writer(lease) and not lease._reads) else lease


class WriteSide(SharedLock):
    """The side of a read-write lock for writers. first: whether they wait before all readers."""

    __slots__ = ("first",)
    _mode = WRITER
    first: bool

    def _acquire_by(self, token: bytes, required: bool) -> LockAcquire:
        return AcquireShared(self, token, required, self.first)

    def _release_of(self, lease: Lease) -> LockRelease:
        return Downgrade(self, lease) if lease._reads else super()._release_of(lease)

    def _reenter(self) -> Lease | None:
        lease = self._entered_before()
        if lease is None:
            return None
        if not is_writer(lease):
            why = "its holder reads, and as a writer would wait for itself: release the read lock first"
            raise LockError(self._cannot("acquire", why), lock_name=self._text)
        lease._depth += 1
        return lease

    def _is_inner(self, lease: Lease) -> bool:
        """Whether to leave this side takes back one of several acquires only."""
        return is_writer(lease) and lease._depth > 1

    def _leave_inner(self, lease: Lease | None) -> bool:
        if lease is None or not self._is_inner(lease):
            return False
        lease._depth -= 1
        return True

    def _lease_of(self, owner: object) -> Lease | None:
        lease = super()._lease_of(owner)
        return lease if lease is not None and is_writer(lease) else None


class PermitsSide(SharedLock):
    """A semaphore: each thread or task may hold several leases, of which the last is released first. Where anybody may
    release, a caller that holds none releases the last one of another."""

    __slots__ = ("_held", "n", "permits")
    _mode = SEMAPHORE
    permits: int
    n: int
    _held: dict[Lease, Any]  # the leases that are held, each with its owner, in the order in which they were acquired

    def _set_permits(self, permits: int, n: int) -> None:
        self.permits, self.n, self._held = as_permits(permits, "permits"), as_permits(n, "n"), {}
        self._check_count(n)

    def _check_count(self, n: int) -> int:
        """n, the number of permits to acquire. ValueError or TypeError: it makes no sense."""
        if as_permits(n, "n") > self.permits:
            raise ValueError(f"n must be at most permits, which is {self.permits}: {n} could never be acquired at once")
        return n

    def _shared_token(self, n: int | None = None) -> bytes:
        return commands.shared_token(new_token(), SEMAPHORE, (self.n if n is None else n, self.permits))

    def _acquire_with(
        self, sleep: float | None, blocking: bool | None, blocking_timeout: float | None, n: object
    ) -> LockAcquire:
        token = None if n is None else self._shared_token(self._check_count(n))  # type: ignore[arg-type]  # it checks
        return super()._acquire_with(sleep, blocking, blocking_timeout, token)

    def _keep_lease(self, owner: object, lease: Lease) -> None:
        if len(self._held) >= MAX_LEASES:
            for kept in list(self._held):
                if not kept._time_left():
                    self._held.pop(kept, None)
        self._held[lease] = owner
        if self._renewal is not None:
            self._transport.renew(lease, self._ms, self._renewal, owner if self.thread_local else None)

    def _drop_lease(self, lease: Lease) -> None:
        if lease._renewal is not None:
            lease._renewal.end()
        self._held.pop(lease, None)

    def _leases_of(self, owner: object) -> list[Lease]:
        """The leases that this owner may release, the last one first."""
        held = list(self._held.items())[::-1]
        mine = [lease for lease, its in held if its is owner]
        return mine if mine or self.thread_local else [lease for lease, _ in held]

    def _lease_of(self, owner: object) -> Lease | None:
        leases = self._leases_of(owner)
        return leases[0] if leases else self._orphaned_lease()

    def _new_release(self, owner: object = None) -> LockRelease:
        for lease in self._leases_of(owner or self._owner()):
            if is_inherited(lease) or lease._deadline == ENDED:
                continue
            # No call, in which another thread could release it, is made between the check and the change
            if not lease._releasing:
                lease._releasing = True
                return self._release_of(lease)
        return super()._new_release(owner)  # of one whose release failed before; or an error

    def _is_locked(self) -> Steps[bool]:
        found = yield from describe.find(self._key, now)
        return bool(found.waiters) or self._free(found) < self.n

    def _free(self, found: Found) -> int:
        """How many permits are free."""
        if found.kind not in (None, describe.KINDS[SEMAPHORE]):
            return 0
        return max(0, (self.permits if found.size is None else found.size) - found.permits())

    def _available(self) -> Steps[int]:
        """Ask the server how many permits are free."""
        return self._free((yield from describe.find(self._key, now)))


def as_permits(value: object, what: str) -> int:
    """A number of permits. TypeError: it is no int. ValueError: it is below 1, or over 2**31 - 1."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{what} must be a number of permits (int), not {type(value).__name__}")
    if not 1 <= value <= MAX_PERMITS:
        raise ValueError(f"{what} must be between 1 and {MAX_PERMITS} permits, not {value}")
    return value


def as_preference(prefer: object) -> bool:
    """Whether writers wait before readers. ValueError: `prefer` is neither None nor "writer"."""
    if prefer not in (None, "writer"):
        raise ValueError(f"prefer must be 'writer', or None for the order of arrival, not {prefer!r}")
    return prefer is not None
