"""The drop-ins for redis-py's locks, for threads and for asyncio: the client behind them, and redis-py's arguments.

One fastlock client serves one connection pool of redis-py's. The pool owns the client: it is made at first use and gone
with the pool. Arguments are taken as redis-py takes them; docs/drop-in.md lists what differs on purpose. Never here:
how to acquire, wait or release.
"""

from __future__ import annotations

import inspect
import itertools
import math
from decimal import Decimal
from numbers import Real
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from fastlock import _native as native
from fastlock._errors import LockError, LockNotOwnedError, RedisError
from fastlock._fork import at_fork, check
from fastlock._locks.aio_client import Client as AsyncClient
from fastlock._locks.aio_lock import AsyncLock
from fastlock._locks.client import Client
from fastlock._locks.lock import SyncLock
from fastlock._locks.paths import tasks, threads
from fastlock._locks.settings import mutable_setting
from fastlock._protocol import arguments, extension
from fastlock._protocol.base_lock import DEFAULT_SLEEP, BaseLock
from fastlock._protocol.lease import ENDED, Lease, now
from fastlock._protocol.steps import Clock, Steps
from fastlock._stream_errors import by_handler
from fastlock._transport.settings import settings_from_pool

# A pool's client is an attribute of the pool: a table would keep a pool alive to which a waiter of its client refers.
CLIENT_ATTRIBUTE = "_fastlock_client"
_MUTEX = native.RLock()  # reentrant: a signal handler may acquire it while its own thread holds it


def _forget_parent() -> None:
    """Make a new mutex in a forked child: a thread of the parent, which the child does not have, may have held it."""
    global _MUTEX
    _MUTEX = native.RLock()


at_fork(_forget_parent)


def sync_client_of(redis: object) -> Any:
    """The `fastlock.Client` of a `redis.Redis`. TypeError: it is something else."""
    return _client(redis, Client, asynchronous=False)


def async_client_of(redis: object) -> Any:
    """The `fastlock.asyncio.Client` of a `redis.asyncio.Redis`. TypeError: it is something else."""
    return _client(redis, AsyncClient, asynchronous=True)


def _client(redis: object, kind: type[Client] | type[AsyncClient], asynchronous: bool) -> Any:
    if _part(redis, "command_stack") is not None:
        raise TypeError(
            "redis is a pipeline, which sends nothing before it is executed, and a lock is acquired at once: "
            "give the client that the pipeline was made from"
        )
    pool = _part(redis, "connection_pool")
    if pool is None or _part(pool, "connection_kwargs") is None:
        ours = "; a fastlock client makes its locks itself: client.lock(name)" if _part(redis, "_transport") else ""
        raise TypeError(f"redis must be a {_kind(asynchronous)} client, not {type(redis).__name__}{ours}")
    if inspect.iscoroutinefunction(pool.disconnect) is not asynchronous:
        right = "fastlock.Lock" if asynchronous else "fastlock.asyncio.Lock"
        raise TypeError(f"redis is a {_kind(not asynchronous)} client: use {right}")
    check()
    owned = vars(pool)
    client = _made(owned)
    if client is None:
        with _MUTEX:
            client = _made(owned) or kind(_settings=settings_from_pool(pool))
            # A signal handler may have made another client meanwhile
            client = owned[CLIENT_ATTRIBUTE] = _made(owned) or client
    return client


def _made(owned: dict[str, Any]) -> Any:
    """The client among a pool's attributes; None: there is none, or it was closed."""
    client = owned.get(CLIENT_ATTRIBUTE)
    return None if client is None or client.closed else client


def _part(whole: object, name: str) -> Any:
    """An attribute, or None if there is none. An AttributeError that a signal handler raises is raised."""
    try:
        return getattr(whole, name)
    except AttributeError as error:
        if by_handler(error):
            raise
        return None


def _kind(asynchronous: bool) -> str:
    return "redis.asyncio.Redis" if asynchronous else "redis.Redis"


# redis-py's arguments


def as_text(value: object) -> Any:
    """A name or token: a number becomes what redis-py's encoder makes of it. All else is left to the checks."""
    return repr(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value


def as_number(value: object) -> Any:
    """Seconds: any real number becomes a float. All else is left to the checks, which refuse it and name it."""
    if value is None or type(value) in (int, float):
        return value
    return float(value) if isinstance(value, (Real, Decimal)) else value


def as_sleep(value: object) -> Any:
    """`sleep` in seconds; None is DEFAULT_SLEEP. redis-py takes None too, and fails when it has to wait."""
    return DEFAULT_SLEEP if value is None else as_number(value)


def as_blocking_timeout(value: object) -> Any:
    """`blocking_timeout` in seconds: below 0 it is 0, one try; above MAX_WAIT it is None, for ever."""
    seconds = as_number(value)
    if not isinstance(seconds, (int, float)) or math.isnan(seconds):
        return seconds
    return None if seconds > arguments.MAX_WAIT else max(0, seconds)


# The parts of redis-py's lock that are not here, each with the method to override instead.
_NOT_HERE = {
    name: action
    for action in ("acquire", "release", "extend", "reacquire")
    for name in (f"do_{action}", f"lua_{action}", f"LUA_{action.upper()}_SCRIPT")
} | {"register_scripts": ""}


def _refusal(name: str) -> str:
    """The text of the error for code that replaces a part of redis-py's lock on one of ours."""
    action = _NOT_HERE[name]
    way = f": override {action!r} itself" if action else ""
    if action == "extend":
        way += ", or set the time that is left by `extend(seconds, replace_ttl=True)`"
    return f"fastlock's locks do not use redis-py's scripts, so {name!r} would be ignored{way}"


class _RefusedAttribute:
    """A descriptor for a part of redis-py's lock: reading it and assigning it raise AttributeError."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, lock: Any, owner: object = None) -> Any:
        raise AttributeError(f"fastlock's locks have no {self.name!r}")

    def __set__(self, lock: Any, value: object) -> None:
        raise AttributeError(_refusal(self.name))


def _set_name(lock: Any, value: object) -> Any:
    lock._key = arguments.as_name(as_text(value), lock._names)
    return value


def _set_timeout(lock: Any, value: object) -> Any:
    seconds = as_number(value)
    lock._ms = 0 if seconds is None else arguments.as_ms(seconds)
    return seconds


def _checked_sleep(lock: Any, value: object) -> Any:
    return arguments.as_wait(as_sleep(value), "sleep")


def _checked_blocking_timeout(lock: Any, value: object) -> Any:
    seconds = as_blocking_timeout(value)
    return seconds if seconds is None else arguments.as_wait(seconds, "blocking_timeout")


class _Whole(type):
    """A class on which such a part cannot be assigned either, as software does that replaces it for all locks."""

    def __setattr__(cls, name: str, value: object) -> None:
        if name in _NOT_HERE:
            raise AttributeError(_refusal(name))
        super().__setattr__(name, value)


class LocalToken:
    """`lock.local` as redis-py has it: the caller's token, to be read, or set to one that was acquired elsewhere."""

    __slots__ = ("_lock",)

    def __init__(self, lock: BaseLock) -> None:
        self._lock = lock

    @property
    def token(self) -> bytes | None:
        lease = self._lock.lease
        return None if lease is None else lease.token

    @token.setter
    def token(self, token: object) -> None:
        lock = self._lock
        if token is None:
            if lock.lease is not None:
                lock._drop_lease(lock.lease)
        else:
            raw_token = lock._as_token(token)
            end = now() if lock._ms else math.inf  # only the server knows when the lease ends
            lease = Lease(lock.name, lock._key, raw_token, end)
            lease._token_read = lease._expiry_unknown = True
            lock._keep_lease(lock._owner(), lease)


class DropIn(BaseLock, metaclass=_Whole):
    """What the drop-ins for threads and for asyncio have in common. Each adds how it waits."""

    if not TYPE_CHECKING:
        name = mutable_setting("name", _set_name)
        timeout = mutable_setting("timeout", _set_timeout)
        sleep = mutable_setting("sleep", _checked_sleep)
        blocking_timeout = mutable_setting("blocking_timeout", _checked_blocking_timeout)
        vars().update({name: _RefusedAttribute(name) for name in _NOT_HERE})

    redis: object
    _names: str  # the encoding of names; that of tokens may be another

    def __init__(
        self,
        redis: Any,
        client: Any,
        names: str,
        name: object,
        timeout: object,
        sleep: object,
        blocking: object,
        blocking_timeout: object,
        thread_local: object,
        raise_on_release_error: object,
        queue: bool = True,
    ) -> None:
        tokens = redis.get_encoder().encoding
        self.redis = redis
        self._names = names
        super().__init__(
            client,
            as_text(name),
            as_number(timeout),
            as_sleep(sleep),
            bool(blocking),
            as_blocking_timeout(blocking_timeout),
            bool(thread_local),
            bool(raise_on_release_error),
            encoding=names,
            queue=queue,
        )
        if tokens != names:
            self._encoding = tokens
        if self.name is not name:
            self.name = name  # type: ignore[assignment]

    def __init_subclass__(cls, **keywords: object) -> None:
        """Let a subclass override what is public, also for `with`; refuse one that defines parts of redis-py's lock, by
        TypeError."""
        super().__init_subclass__(**keywords)
        theirs = itertools.takewhile(lambda base: base.__module__.partition(".")[0] != "fastlock", cls.__mro__)
        defined = {name for base in theirs for name in vars(base)}
        if refused := sorted(defined & _NOT_HERE.keys()):
            raise TypeError(f"{cls.__qualname__}: {_refusal(refused[0])}")
        cls._use_overrides(defined)

    @classmethod
    def _use_overrides(cls, defined: set[str]) -> None:
        """Have a `with` enter and leave by the `acquire` and `release` that the subclass has defined."""

    @property
    def local(self) -> LocalToken:
        """Where redis-py keeps the token: `lock.local.token`."""
        return LocalToken(self)

    def _acquire_with(self, sleep: object, blocking: object, blocking_timeout: object, token: object) -> Any:
        """As `BaseLock._acquire_with`, with the numbers that redis-py takes; None is the lock's own setting."""
        seconds = as_blocking_timeout(blocking_timeout)
        if seconds is None and blocking_timeout is not None:  # to wait for ever, whatever the lock's own setting is
            seconds = arguments.MAX_WAIT
        return super()._acquire_with(as_number(sleep), None if blocking is None else bool(blocking), seconds, token)

    def _check_both(self, blocking: bool) -> None:
        """Allow a blocking_timeout beside blocking=False: it is for a later `acquire(blocking=True)`."""

    def _as_token(self, token: object) -> bytes:
        return arguments.as_bytes(as_text(token), "token", self._encoding)

    def _extension(self, seconds: object, replace_ttl: object, action: str, owner: object) -> Any:
        lease = self._lease_for(action, owner)
        added = as_number(seconds)
        ms = int(arguments.as_number(added, "additional_time") * 1000)
        if ms > 0:
            ms = arguments.as_ms(added, "additional_time")
            return extension.extend(lease, ms, bool(replace_ttl), now, action == "reacquire")
        return shortened(lease, ms, bool(replace_ttl), now)

    def _tells_kind(self) -> bool:
        return False

    def _endless(self, why: str) -> LockError:
        """The error that redis-py raises: its script answers 0 for a lease without end, as for a lost one."""
        return LockNotOwnedError(why, lock_name=self._text)


def shortened(lease: Lease, ms: int, replace: bool, clock: Clock) -> Steps[extension.Outcome]:
    """Move the end of a lease to an earlier time, or to the next millisecond where it would lie in the past."""
    outcome = yield from extension.extend(lease, ms, replace, clock)
    expired = outcome is extension.Outcome.LOST and lease._deadline != ENDED  # the lease ended meanwhile, as asked for
    return extension.Outcome.MOVED if expired else outcome


class Lock(DropIn, SyncLock):
    """Drop-in for `redis.lock.Lock`: the same arguments, results and exceptions, over fastlock's own connections.

    Made from a `redis.Redis` directly, or by `redis.Redis().lock(name, lock_class=fastlock.Lock)`. All locks of one
    redis-py connection pool share one fastlock client. `timeout` None (redis-py's default) is a lease without end.
    What differs from redis-py on purpose: docs/drop-in.md.
    queue: False polls as redis-py's own lock does; for a time in which some of those wait for the same names.
    """

    def __init__(
        self,
        redis: Any,
        name: arguments.Name | float,
        timeout: float | None = None,
        sleep: float | None = DEFAULT_SLEEP,
        blocking: bool = True,
        blocking_timeout: float | None = None,
        thread_local: bool = True,
        raise_on_release_error: bool = True,
        *,
        queue: bool = True,
    ) -> None:
        client = sync_client_of(redis)
        super().__init__(
            redis,
            client,
            "utf-8",  # redis-py sends the names of locks so, whatever encoding its client was given
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
    def _use_overrides(cls, defined: set[str]) -> None:
        if "acquire" in defined and "__enter__" not in defined:
            cls.__enter__ = cls._enter  # type: ignore[method-assign]
        if "release" in defined and "__exit__" not in defined:
            cls.__exit__ = cls._exit

    if TYPE_CHECKING:

        def __enter__(self) -> Self: ...

    else:
        __enter__ = threads.enter_lock

    def _enter(self) -> Self:
        if not self.acquire():
            raise self._not_got()
        return self

    def _exit(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.release()
        except RedisError as problem:
            self._report_release_error(error, problem)


class AsyncioLock(DropIn, AsyncLock):
    """Drop-in for `redis.asyncio.lock.Lock`: the same arguments, results and exceptions, over fastlock's own
    connections.

    Made from a `redis.asyncio.Redis` directly, or by its `lock(name, lock_class=fastlock.asyncio.Lock)`. All locks of
    one redis-py connection pool share one fastlock client. `timeout` None (redis-py's default) is a lease without end.
    What differs from redis-py on purpose: docs/drop-in.md.
    queue: False polls as redis-py's own lock does; for a time in which some of those wait for the same names.
    """

    def __init__(
        self,
        redis: Any,
        name: arguments.Name | float,
        timeout: float | None = None,
        sleep: float | None = DEFAULT_SLEEP,
        blocking: bool = True,
        blocking_timeout: float | None = None,
        thread_local: bool = True,
        raise_on_release_error: bool = True,
        *,
        queue: bool = True,
    ) -> None:
        client = async_client_of(redis)
        super().__init__(
            redis,
            client,
            redis.get_encoder().encoding,
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
    def _use_overrides(cls, defined: set[str]) -> None:
        if "acquire" in defined and "__aenter__" not in defined:
            cls.__aenter__ = cls._enter  # type: ignore[method-assign]
        if "release" in defined and "__aexit__" not in defined:
            cls.__aexit__ = cls._exit

    async def __aenter__(self) -> Self:
        """Acquire. Raises LockError when the lock was not acquired within its blocking_timeout."""
        await tasks.aio_acquire(self, True)
        return self

    async def _enter(self) -> Self:
        if not await self.acquire():
            raise self._not_got()
        return self

    async def _exit(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.release()
        except RedisError as problem:
            self._report_release_error(error, problem)


AsyncioLock.__name__ = AsyncioLock.__qualname__ = "Lock"  # users know it as fastlock.asyncio.Lock
