"""The plain path: acquires and releases as the protocol has them, carried out by a transport.

All locks work by it; the fast path (`_fastpath/`) has the same functions, and takes short cuts. Never here: decisions.
"""

from __future__ import annotations

import asyncio
from typing import Any

from fastlock._protocol.base_lock import BaseLock
from fastlock._protocol.lease import Lease, now
from fastlock._transport.waiting import take_turn


def take_kept(lock: BaseLock) -> Lease | None:
    """Take the lease of the name for a thread, if the client keeps it, and let another thread run before, if it is its
    turn."""
    lock._transport.begin()
    take_turn(lock._transport)
    return _taken(lock)


def _taken(lock: BaseLock) -> Lease | None:
    """Take the lease of the name, if the client keeps it. What a signal handler raises as compiled code returns to this
    function is raised here, where the lease is released again: the caller would not know of it."""
    owner = lock._owner()
    before = lock._leases.get(owner)
    try:
        return lock._take_kept(owner, now())
    except BaseException as error:
        taken = lock._leases.get(owner)
        if taken is not None and taken is not before:
            lock._transport.finish_release(lock, owner, taken, None, error)
        raise


def acquire(lock: BaseLock, required: bool) -> Any:
    """Acquire with the lock's own settings, for a thread. Outcome and errors are those of `BaseLock._new_acquire`."""
    if lock._keep_ms and (kept := take_kept(lock)) is not None:
        return kept
    if lock._owners is not None and (held := lock._reenter()) is not None:
        return held
    return lock._transport.run(lock._new_acquire(None, required))


def enter_lease(self: Any) -> Any:
    """Acquire, and return the lease. Raises LockError when it was not granted within the lock's blocking_timeout."""
    return acquire(self, True)


def enter_lock(self: Any) -> Any:
    """Acquire, and return the lock. Raises LockError when it was not granted within the lock's blocking_timeout."""
    acquire(self, True)
    return self


def release(lock: BaseLock) -> None:
    """Release the lease of the calling thread. Errors are those of `BaseLock._new_release`."""
    if lock._owners is not None and lock._leave_inner(lock._leases.get(lock._owner())):
        return
    op: Any = None
    try:
        if lock._keep_ms:
            take_turn(lock._transport)
        op = lock._new_release()
        lock._transport.run(op)
    except BaseException as error:  # a signal handler may raise anywhere, and a `with` is left only once
        lock._transport.finish_release(lock, lock._owner(), op and op.lease, op, error)
        raise


def exit_lock(self: Any, kind: object, error: BaseException | None, trace: object) -> None:
    """Release. An error of the release is put where `BaseLock._report_release_error` says, beside the error that ended
    the body of the `with`."""
    if self._owners is not None and self._leave_inner(self._leases.get(self._owner())):
        return  # before the `try`: what is raised from here on must not release what the outer `with` holds
    try:
        if self._keep_ms:
            take_turn(self._transport)
        self._transport.run(self._new_release())
    except BaseException as problem:
        self._exit_failed(error, problem)


async def aio_take_kept(lock: BaseLock) -> Lease | None:
    """Take the lease of the name, if the client keeps it, and let the loop run before, if it is its turn."""
    lock._transport.begin()
    if lock._transport.turn_is_over(now()):
        await asyncio.sleep(0)
    return _taken(lock)


async def aio_acquire(lock: BaseLock, required: bool) -> Lease | None:
    """Acquire with the lock's own settings, for a task. Outcome and errors are those of `BaseLock._new_acquire`."""
    if lock._keep_ms and (kept := await aio_take_kept(lock)) is not None:
        return kept
    lease: Lease | None = await lock._transport.run(lock._new_acquire(None, required))
    return lease


def aio_enter_lease(self: Any) -> Any:
    """Acquire, and return the lease. Raises LockError when it was not granted within the lock's blocking_timeout."""
    return aio_acquire(self, True)


async def aio_release(
    lock: BaseLock, leaving: bool, error: BaseException | None, owner: object = None, noted: Lease | None = None
) -> None:
    """Release the lease of an owner (None: of the task that awaits this), if that is the `noted` one or none was noted.
    Errors are those of `BaseLock._new_release`. Where this is `leaving` a `with`, they go where
    `BaseLock._report_release_error` puts them, beside the `error` that ended its body."""
    if noted is not None and lock._leases.get(owner, noted) is not noted:  # the owner has another now, which stays
        raise lock._not_held("release")
    await lock._transport.release(lock, owner, None, None, leaving, error)


async def aio_exit_lock(self: Any, kind: object, error: BaseException | None, trace: object) -> None:
    """Release. An error of the release is put where `BaseLock._report_release_error` says, beside the error that ended
    the body of the `with`."""
    try:
        await aio_release(self, True, error)
    except BaseException as interrupt:
        try:
            self._transport.finish_release(self, self._owner(), None, None, interrupt)
        except BaseException as again:
            self._transport.finish_release(self, self._owner(), None, None, again)
            raise
        raise
