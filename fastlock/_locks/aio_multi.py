"""The lock on several names, all or none, for asyncio; `multi.py` is the same for threads.

Never here: frames, replies, what is decided.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from fastlock._errors import LockError, LockLostError, LockNotOwnedError, RedisError
from fastlock._locks.multi import BaseMultiLock
from fastlock._protocol.multi import MultiLease
from fastlock._transport.internals import coroutine_function, running_loop
from fastlock._transport.renewing import Body, acquires

_WRONG_API = "this lock is for asyncio: use `async with`, or fastlock for `with`"


class MultiLock(BaseMultiLock):
    """A lock on several names, all or none, made by `fastlock.asyncio.Client.multi_lock()`: entering it gives the
    MultiLease. Its `names` are as the caller wrote them; `blocked` says why an acquire failed, after `acquire` returned
    False."""

    def _lease_of(self, owner: object) -> MultiLease | None:
        return self._leases.get(owner) or self._orphaned_lease()

    def _orphaned_lease(self) -> MultiLease | None:
        """A lease whose task is gone and will never release it; see `AsyncLock._orphaned_lease`."""
        closing = running_loop() is None
        found = [lease for task, lease in self._leases.items() if task is not None and (closing or task.done())]
        return found[-1] if found else None

    @acquires
    async def acquire(
        self, blocking: bool | None = None, blocking_timeout: float | None = None, sleep: float | None = None
    ) -> bool:
        """Acquire all names; afterwards `lease` is what is owned. Returns False when somebody else holds one of them:
        `blocked` says which, and then nothing is held.

        blocking: whether to wait. blocking_timeout: for how many seconds at most. sleep: seconds between two tries
        where the lock has to be polled. None takes the lock's own setting. Raises what `ClientLock.acquire` does.
        """
        return (await self._transport.run(self._new_acquire(False, sleep, blocking, blocking_timeout))) is not None

    # The following note the task that calls them, and a release also the lease: `shield`, `gather` and others await
    # their coroutines in another task.

    @coroutine_function
    def release(self) -> Coroutine[Any, Any, None]:
        """Release all names. Until this returns they count as held: after a ConnectionError it can be called again.

        Raises LockError: the caller holds nothing. LockNotOwnedError: some of them, which it names, are no longer the
        caller's; the others are released all the same.
        """
        owner = self._one._owner()
        return self._release(owner, self._leases.get(owner))

    async def _release(self, owner: object, noted: MultiLease | None) -> None:
        if noted is not None and self._leases.get(owner, noted) is not noted:  # the owner has another now, which stays
            raise self._not_held("release")
        transport, released = self._transport, list[Any]()
        owner = owner or self._one._owner()
        try:
            lease = self._lease_for("release", owner)
            transport.begin()
            await transport.complete(self._releases(lease, released))
            self._note_released(lease, released)
        except BaseException as error:  # a signal handler may have raised it
            self._carry_out(owner, released, error)
            await transport.flush_if_closed(error)
            raise

    @coroutine_function
    def extend(self, additional_time: float, replace_ttl: bool = False) -> Coroutine[Any, Any, Literal[True]]:
        """Move the end of all leases by `additional_time` seconds, or with `replace_ttl` to so many seconds from now.

        Raises LockError: the caller holds nothing, or the lock has no timeout. LockNotOwnedError: some of the names,
        which it names, are no longer the caller's.
        """
        return self._extend(additional_time, replace_ttl, self._one._owner())

    async def _extend(self, seconds: float, to: bool, owner: object) -> Literal[True]:
        lease, extension = self._extension(seconds, to, "extend", owner or self._one._owner())
        return self._moved("extend", lease, await self._transport.drive(extension))

    @coroutine_function
    def reacquire(self) -> Coroutine[Any, Any, Literal[True]]:
        """Set all leases back to the lock's full timeout, also those acquired without end. Errors as `extend`."""
        return self._reacquire(self._one._owner())

    async def _reacquire(self, owner: object) -> Literal[True]:
        self._lease_for("reacquire", owner := owner or self._one._owner())
        lease, extension = self._extension(self._one.timeout or 0, True, "reacquire", owner)
        return self._moved("reacquire", lease, await self._transport.drive(extension))

    async def locked(self) -> bool:
        """Whether anybody holds any of the names, asked of the server."""
        return any(await self._transport.drive(self._anybody_holds()))

    @coroutine_function
    def owned(self) -> Coroutine[Any, Any, bool]:
        """Whether the caller holds all of the names, asked of the server."""
        return self._owned(self._one._owner())

    async def _owned(self, owner: object) -> bool:
        lease = self._lease_of(owner or self._one._owner())
        return self._owns(lease, await self._transport.drive(self._tokens()))

    async def __aenter__(self) -> MultiLease:
        op = self._new_acquire(True)
        await self._transport.run(op)
        lease = op.kept
        assert lease is not None, "else an error was raised"
        if self._one._renewal is not None and self._one._renewal.cancel_on_loss:
            self._watch(lease, Body(asyncio.current_task()))  # type: ignore[arg-type]  # as a task runs this
        return lease

    @staticmethod
    def _watch(lease: MultiLease, body: Body | None) -> None:
        """Have the loss of any of the names cancel the body of the `async with`; None: no more."""
        for each in lease.leases:
            each._renewal.body = body

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        lease = self.lease
        bodies = [each._renewal.body for each in lease.leases if each._renewal is not None] if lease is not None else []
        body = next(filter(None, bodies), None)
        if lease is None or body is None:
            await self._leave(error)
            return
        self._watch(lease, None)
        try:
            lost = await body.was_cancelled(error)
        except asyncio.CancelledError as cancelled:  # by others: the lock is left all the same
            await self._leave(cancelled)
            raise
        try:
            await self._leave(error)
        except LockError as problem:
            lost = lost or isinstance(problem, LockNotOwnedError)  # nobody has found it before, as the loop was blocked
            if not lost:
                raise
        if lost:
            why = "one of them could not be renewed in time, or its key was deleted or taken"
            raise LockLostError(f"{self._text} were lost while they were held: {why}", lock_name=self.names) from error

    async def _leave(self, error: BaseException | None) -> None:
        """Release, at the end of an `async with`."""
        owner = self._one._owner()
        try:
            await self._release(owner, None)
        except RedisError as problem:
            self._report_release_error(error, problem)
        except BaseException as interrupt:  # also before `_release` had begun
            self._carry_out(owner, [], interrupt)
            raise

    if not TYPE_CHECKING:  # a type checker refuses these by itself

        def __enter__(self):
            raise TypeError(_WRONG_API)

        def __exit__(self, *exc): ...

        def __await__(self):
            raise TypeError(_WRONG_API)
