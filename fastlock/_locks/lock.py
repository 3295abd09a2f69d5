"""The locks for threads; `aio_lock.py` is the same for asyncio. Never here: decisions, frames, replies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from fastlock._errors import RedisError
from fastlock._locks import plain
from fastlock._locks.copying import Uncopyable
from fastlock._locks.paths import threads
from fastlock._locks.reentrant import Owners, Reentrant, fixed_name, refuse_token
from fastlock._locks.settings import MutableSettings
from fastlock._protocol import commands, extension
from fastlock._protocol.base_lock import BaseLock
from fastlock._protocol.commands import Opcode
from fastlock._protocol.lease import ENDED, Lease, now
from fastlock._stream_errors import by_handler
from fastlock._transport.owners import thread_owner

_WRONG_API = "this lock is for threads: use `with`, or fastlock.asyncio for `async with`"


class SyncLock(Uncopyable, BaseLock):
    """What `Lock` and `ClientLock` have in common: everything but how they are made and entered."""

    __slots__ = ()  # there may be many locks, one for each caller that waits

    def _owner(self) -> Any:
        return thread_owner() if self.thread_local else None

    def acquire(
        self,
        sleep: float | None = None,
        blocking: bool | None = None,
        blocking_timeout: float | None = None,
        token: str | bytes | None = None,
    ) -> bool:
        """Acquire the lock; afterwards `lease` is what is owned. Returns False when somebody else holds it.

        blocking: whether to wait for it. blocking_timeout: for how many seconds at most. sleep: seconds between two
        tries of a name that is held, where it has to be polled. None takes the lock's own setting. token: the token to
        use instead of a random one; it must be fresh for each acquire.

        Raises ValueError or TypeError for arguments that make no sense; redis-py's exceptions for error replies of the
        server, and ConnectionError or TimeoutError when it stays away: the lock is then not held.
        """
        if sleep is None and blocking is None and blocking_timeout is None and token is None:
            return threads.acquire(self, False) is not None
        if self._keep_ms and token is None and plain.take_kept(self) is not None:
            return True
        return self._transport.run(self._acquire_with(sleep, blocking, blocking_timeout, token)) is not None

    def release(self) -> None:
        """Release the lock. Until this returns the lock counts as held: after a ConnectionError it can be called again.

        Raises LockError: the caller holds nothing. LockNotOwnedError: the lock is no longer the caller's.
        """
        threads.release(self)

    def extend(self, additional_time: float, replace_ttl: bool = False) -> Literal[True]:
        """Move the lease's end by `additional_time` seconds, or with `replace_ttl` to so many seconds from now.

        Raises LockError: the caller holds nothing, or the lock has no timeout, or the lease was acquired without end
        (a drop-in, as redis-py's lock, raises LockNotOwnedError then). LockNotOwnedError: the lock is no longer the
        caller's.
        """
        extension = self._extension(additional_time, replace_ttl, "extend", self._owner())
        return self._moved("extend", self._transport.drive(extension))

    def reacquire(self) -> Literal[True]:
        """Set the lease back to the lock's full timeout, also one that was acquired without end. Errors as `extend`."""
        me = self._owner()
        self._lease_for("reacquire", me)
        extension = self._extension(self.timeout or 0, True, "reacquire", me)
        return self._moved("reacquire", self._transport.drive(extension))

    def locked(self) -> bool:
        """Whether anybody holds the lock, asked of the server."""
        return bool(self._transport.drive(extension.inspect(Opcode.EXISTS, self._key, now)))

    def owned(self) -> bool:
        """Whether the caller holds the lock, asked of the server."""
        lease = self.lease
        token = self._transport.drive(extension.inspect(Opcode.GET, self._key, now))
        if lease is None or lease.inherited or lease._deadline == ENDED:
            return False
        return commands.token_matches(token, lease._raw_token)

    __exit__ = threads.exit_lock

    def _exit_failed(self, error: BaseException | None, problem: BaseException) -> None:
        """`__exit__` met `problem`: report an error of the release, beside the error that ended the body of the `with`.
        Anything else has interrupted the release, also before it had begun: carry it out, and raise that."""
        if isinstance(problem, RedisError) and not by_handler(problem):
            self._report_release_error(error, problem)
            return
        try:
            self._transport.finish_release(self, self._owner(), None, None, problem)
        except BaseException as again:
            self._transport.finish_release(self, self._owner(), None, None, again)
            raise
        raise problem

    if not TYPE_CHECKING:  # a type checker refuses these by itself

        async def __aenter__(self):
            raise TypeError(_WRONG_API)

        async def __aexit__(self, *exc): ...

        def __await__(self):
            raise TypeError(_WRONG_API)


class ClientLock(MutableSettings, SyncLock):
    """A lock made by `Client.lock()`: entering it gives the Lease."""

    __slots__ = ()

    if TYPE_CHECKING:

        def __enter__(self) -> Lease: ...

    else:
        __enter__ = threads.enter_lease


class ReentrantLock(Reentrant, ClientLock):
    """A lock that its holder may acquire again, made by `Client.reentrant_lock()`. The holder is a thread of a client:
    all reentrant locks of the client on one name are one lock to it. Entered again, it takes no command, and it is
    released as often as it was acquired. On the server it is a lock like any other."""

    __slots__ = ()

    def _share(self, owners: Owners) -> None:
        """Keep leases where all reentrant locks of the client on this name find them."""
        self._owners, self._leases = owners, owners.leases

    def acquire(
        self,
        sleep: float | None = None,
        blocking: bool | None = None,
        blocking_timeout: float | None = None,
        token: str | bytes | None = None,
    ) -> bool:
        """As `ClientLock.acquire`; True at once if the calling thread holds the lock.

        Raises LockNotOwnedError if it does, and its lease has ended: release it first.
        """
        refuse_token(token)
        return self._reenter() is not None or super().acquire(sleep, blocking, blocking_timeout)

    if not TYPE_CHECKING:
        name = fixed_name()
