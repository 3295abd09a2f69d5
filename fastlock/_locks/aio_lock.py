"""The locks for asyncio; `lock.py` is the same for threads. Never here: decisions, frames, replies."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from typing import TYPE_CHECKING, Any, Literal

from fastlock._errors import LockError, LockNotOwnedError
from fastlock._locks import plain
from fastlock._locks.copying import Uncopyable
from fastlock._locks.paths import tasks
from fastlock._locks.reentrant import Owners, Reentrant, fixed_name, refuse_token
from fastlock._locks.settings import MutableSettings
from fastlock._protocol import commands, extension
from fastlock._protocol.base_lock import BaseLock
from fastlock._protocol.commands import Opcode
from fastlock._protocol.lease import ENDED, Lease, now
from fastlock._transport.internals import coroutine_function, running_loop
from fastlock._transport.owners import task_owner
from fastlock._transport.renewing import Body, acquires

_WRONG_API = "this lock is for asyncio: use `async with`, or fastlock for `with`"


class AsyncLock(Uncopyable, BaseLock):
    """What `Lock` and `ClientLock` have in common: everything but how they are made and entered. Owners are tasks."""

    __slots__ = ()  # there may be many locks, one for each caller that waits

    _owner = task_owner

    def _is_inner(self, lease: Lease) -> bool:
        """Whether to leave the lock takes back one of several acquires only."""
        return False

    def _orphaned_lease(self) -> Lease | None:
        # Needed after `wait_for(lock.acquire(), 1)`, which before Python 3.12 acquires in a task of its own; and where
        # no event loop runs, as a coroutine that is closed leaves an `async with`
        closing = running_loop() is None
        found = [lease for task, lease in self._leases.items() if task is not None and (closing or task.done())]
        return found[-1] if found else None

    @acquires
    async def acquire(
        self,
        blocking: bool | None = None,
        blocking_timeout: float | None = None,
        token: str | bytes | None = None,
        sleep: float | None = None,
    ) -> bool:
        """Acquire the lock; afterwards `lease` is what is owned. Returns False when somebody else holds it.

        blocking: whether to wait for it. blocking_timeout: for how many seconds at most. sleep: seconds between two
        tries of a name that is held, where it has to be polled. None takes the lock's own setting. token: the token to
        use instead of a random one; it must be fresh for each acquire.

        Raises ValueError or TypeError for arguments that make no sense; redis-py's exceptions for error replies of the
        server, and ConnectionError or TimeoutError when it stays away: the lock is then not held.
        """
        if sleep is None and blocking is None and blocking_timeout is None and token is None:
            return (await tasks.aio_acquire(self, False)) is not None
        if self._keep_ms and token is None and await plain.aio_take_kept(self) is not None:
            return True
        return (await self._transport.run(self._acquire_with(sleep, blocking, blocking_timeout, token))) is not None

    # The following note the task that calls them, and a release also the lease: `shield`, `gather` and others await
    # their coroutines in another task.

    @coroutine_function
    def release(self) -> Coroutine[Any, Any, None]:
        """Release the lock. Until this returns the lock counts as held: after a ConnectionError it can be called again.

        Raises LockError: the caller holds nothing. LockNotOwnedError: the lock is no longer the caller's.
        """
        owner = self._owner()
        return self._release(owner, self._leases.get(owner))

    async def _release(self, owner: object, lease: Lease | None) -> None:
        await tasks.aio_release(self, False, None, owner, lease)

    @coroutine_function
    def extend(self, additional_time: float, replace_ttl: bool = False) -> Coroutine[Any, Any, Literal[True]]:
        """Move the lease's end by `additional_time` seconds, or with `replace_ttl` to so many seconds from now.

        Raises LockError: the caller holds nothing, or the lock has no timeout, or the lease was acquired without end
        (a drop-in, as redis-py's lock, raises LockNotOwnedError then). LockNotOwnedError: the lock is no longer the
        caller's.
        """
        return self._extend(additional_time, replace_ttl, self._owner())

    async def _extend(self, seconds: float, replace_ttl: bool, owner: object) -> Literal[True]:
        extension = self._extension(seconds, replace_ttl, "extend", owner or self._owner())
        return self._moved("extend", await self._transport.drive(extension))

    @coroutine_function
    def reacquire(self) -> Coroutine[Any, Any, Literal[True]]:
        """Set the lease back to the lock's full timeout, also one that was acquired without end. Errors as `extend`."""
        return self._reacquire(self._owner())

    async def _reacquire(self, owner: object) -> Literal[True]:
        self._lease_for("reacquire", owner := owner or self._owner())
        extension = self._extension(self.timeout or 0, True, "reacquire", owner)
        return self._moved("reacquire", await self._transport.drive(extension))

    async def locked(self) -> bool:
        """Whether anybody holds the lock, asked of the server."""
        return bool(await self._transport.drive(extension.inspect(Opcode.EXISTS, self._key, now)))

    @coroutine_function
    def owned(self) -> Coroutine[Any, Any, bool]:
        """Whether the caller holds the lock, asked of the server."""
        return self._owned(self._owner())

    async def _owned(self, owner: object) -> bool:
        lease = self._lease_of(owner or self._owner())
        token = await self._transport.drive(extension.inspect(Opcode.GET, self._key, now))
        if lease is None or lease.inherited or lease._deadline == ENDED:
            return False
        return commands.token_matches(token, lease._raw_token)

    __aexit__ = tasks.aio_exit_lock

    if not TYPE_CHECKING:  # a type checker refuses these by itself

        def __enter__(self):
            raise TypeError(_WRONG_API)

        def __exit__(self, *exc): ...

        def __await__(self):
            raise TypeError(_WRONG_API)


class ClientLock(MutableSettings, AsyncLock):
    """A lock made by `fastlock.asyncio.Client.lock()`: entering it gives the Lease."""

    __slots__ = ()

    if TYPE_CHECKING:

        def __aenter__(self) -> Awaitable[Lease]: ...

    else:
        __aenter__ = tasks.aio_enter_lease


class Guarded:
    """What a lock with cancel_on_loss does besides: if its lease is lost, the body of the `async with` is cancelled,
    and leaving it raises LockLostError."""

    __slots__ = ()

    if not TYPE_CHECKING:

        async def __aenter__(self):
            lease = await super().__aenter__()
            renewal = lease._renewal
            if renewal is not None and renewal.settings.cancel_on_loss and renewal.body is None:
                renewal.body = Body(asyncio.current_task())
            return lease

        async def __aexit__(self, kind, error, trace):
            lease, lost = self.lease, False
            body = None if lease is None or lease._renewal is None else lease._renewal.body
            if body is not None and not self._is_inner(lease):
                lease._renewal.body = None
                try:
                    lost = await body.was_cancelled(error)
                except asyncio.CancelledError as cancelled:  # by others: the lock is left all the same
                    await super().__aexit__(type(cancelled), cancelled, None)
                    raise
            try:
                await super().__aexit__(kind, error, trace)
            except LockError as problem:
                # Also where nobody has found it before, as the loop was blocked
                lost = lost or (body is not None and isinstance(problem, LockNotOwnedError))
                if not lost:
                    raise
            if lost:
                raise self._lost_in_body() from error


class GuardedLock(Guarded, ClientLock):
    """A lock with cancel_on_loss."""

    __slots__ = ()


class ReentrantLock(Reentrant, ClientLock):
    """A lock that its holder may acquire again, made by `Client.reentrant_lock()`. The holder is a task: all reentrant
    locks of the client on one name are one lock to it. Entered again, it takes no command, and it is released as often
    as it was acquired. On the server it is a lock like any other."""

    __slots__ = ()

    def _is_inner(self, lease: Lease) -> bool:
        return lease._depth > 1

    def _share(self, owners: Owners) -> None:
        """Keep leases where all reentrant locks of the client on this name find them."""
        self._owners, self._leases = owners, owners.leases

    @acquires
    async def acquire(
        self,
        blocking: bool | None = None,
        blocking_timeout: float | None = None,
        token: str | bytes | None = None,
        sleep: float | None = None,
    ) -> bool:
        """As `ClientLock.acquire`; True at once if the running task holds the lock.

        Raises LockNotOwnedError if it does, and its lease has ended: release it first.
        """
        refuse_token(token)
        return self._reenter() is not None or await super().acquire(blocking, blocking_timeout, None, sleep)

    async def _release(self, owner: object, lease: Lease | None) -> None:
        if not self._leave_inner(lease):
            await super()._release(owner, lease)

    if not TYPE_CHECKING:
        name = fixed_name()

        async def __aenter__(self):
            return self._reenter() or await ClientLock.__aenter__(self)

        async def __aexit__(self, kind, error, trace):
            if not self._leave_inner(self._leases.get(self._owner())):
                await ClientLock.__aexit__(self, kind, error, trace)


class GuardedReentrantLock(Guarded, ReentrantLock):
    """A reentrant lock with cancel_on_loss."""

    __slots__ = ()
