"""Face for threads: locks. No decisions live here; `_aio_lock.py` is the same for asyncio."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from fastlock import _checks as checks
from fastlock import _commands as say
from fastlock import _dropin as dropin
from fastlock import _hot as hot
from fastlock import _law as law
from fastlock._errors import RedisError
from fastlock._lease import ENDED, Lease, now
from fastlock._terms import SLEEP, Changeable, Terms

_WRONG_FACE = "this lock is for threads: use `with`, or fastlock.asyncio for `async with`"


class BaseLock(Terms):
    """What `Lock` and `ClientLock` have in common: everything but how they are made and entered."""

    __slots__ = ()  # a lock that waits is one of many

    def _me(self) -> Any:
        return hot.thread_owner() if self.thread_local else None

    def acquire(
        self,
        sleep: float | None = None,
        blocking: bool | None = None,
        blocking_timeout: float | None = None,
        token: str | bytes | None = None,
    ) -> bool:
        """Acquire the lock; afterwards `lease` is what is owned. Returns False when somebody else holds it.

        blocking: whether to wait for it. blocking_timeout: for how many seconds at most. sleep: seconds between two
        looks at a name that is held. None takes the lock's own setting. token: proof of ownership instead of a random
        one; it must be fresh for each acquire.

        Raises ValueError or TypeError for arguments that make no sense; redis-py's exceptions for what the server
        answers, and ConnectionError or TimeoutError when it stays away: the lock is then not held.
        """
        if sleep is None and blocking is None and blocking_timeout is None and token is None:
            return hot.take(self, False) is not None
        return self._wire.run(self.taking_with(sleep, blocking, blocking_timeout, token)) is not None

    def release(self) -> None:
        """Let go. Until this returns the lock counts as held: after a ConnectionError it can be called again.

        Raises LockError: the caller holds nothing. LockNotOwnedError: it is no longer the caller's.
        """
        hot.give(self)

    def extend(self, additional_time: float, replace_ttl: bool = False) -> Literal[True]:
        """Move the lease's end by `additional_time` seconds, or with `replace_ttl` to so many seconds from now.

        Raises LockError: nothing held, or a lock without timeout. LockNotOwnedError: it is no longer the caller's.
        A lease that was acquired without end is none to extend: LockError; of a drop-in, as of redis-py's lock,
        LockNotOwnedError.
        """
        extension = self._extension(additional_time, replace_ttl, "extend", self._me())
        return self._moved("extend", self._wire.drive(extension))

    def reacquire(self) -> Literal[True]:
        """Set the lease back to the lock's full timeout, also one that was acquired without end. Errors as `extend`."""
        me = self._me()
        self._held("reacquire", me)
        extension = self._extension(self.timeout or 0, True, "reacquire", me)
        return self._moved("reacquire", self._wire.drive(extension))

    def locked(self) -> bool:
        """Whether anybody holds the lock, asked of the server."""
        return bool(self._wire.drive(law.inspect(say.EXISTS, self.key, now)))

    def owned(self) -> bool:
        """Whether the caller holds the lock, asked of the server."""
        lease = self.lease
        token = self._wire.drive(law.inspect(say.GET, self.key, now))
        if lease is None or lease.inherited or lease.deadline == ENDED:
            return False
        return say.proves(token, lease.proof)

    __exit__ = hot.leave

    if not TYPE_CHECKING:  # which says so itself

        async def __aenter__(self):
            raise TypeError(_WRONG_FACE)

        async def __aexit__(self, *exc): ...

        def __await__(self):
            raise TypeError(_WRONG_FACE)


class ClientLock(Changeable, BaseLock):
    """A lock made by `Client.lock()`: entering it gives the Lease."""

    __slots__ = ()

    if TYPE_CHECKING:

        def __enter__(self) -> Lease: ...

    else:
        __enter__ = hot.enter_lease


class Lock(dropin.DropIn, BaseLock):
    """Drop-in for `redis.lock.Lock`: the same arguments, results and exceptions, over fastlock's own connections.

    Made from a `redis.Redis` directly, or by `redis.Redis().lock(name, lock_class=fastlock.Lock)`. All locks of one
    redis-py connection pool share one fastlock client. `timeout` None (redis-py's default) is a lease without end.
    What differs from redis-py on purpose: docs/drop-in.md.
    queue: False waits as redis-py's own lock does, for as long as some of these wait for the same names.
    """

    def __init__(
        self,
        redis: Any,
        name: checks.Name | float,
        timeout: float | None = None,
        sleep: float | None = SLEEP,
        blocking: bool = True,
        blocking_timeout: float | None = None,
        thread_local: bool = True,
        raise_on_release_error: bool = True,
        *,
        queue: bool = True,
    ) -> None:
        client = dropin.client_of(redis)
        super().__init__(
            redis,
            client,
            "utf-8",  # as redis-py sends names, whatever encoding it was given
            name,
            timeout,
            sleep,
            blocking,
            blocking_timeout,
            thread_local,
            raise_on_release_error,
            queue=queue,
        )

    @classmethod
    def _heed(cls, defined: set[str]) -> None:
        if "acquire" in defined and "__enter__" not in defined:
            cls.__enter__ = cls._enter  # type: ignore[method-assign]
        if "release" in defined and "__exit__" not in defined:
            cls.__exit__ = cls._exit

    if TYPE_CHECKING:

        def __enter__(self) -> Self: ...

    else:
        __enter__ = hot.enter_lock

    def _enter(self) -> Self:
        if not self.acquire():
            raise self._not_got()
        return self

    def _exit(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.release()
        except RedisError as problem:
            self.left(error, problem)
