"""What makes a lock a drop-in for redis-py's, whichever its face: the client behind it, and redis-py's arguments.

One fastlock client serves a connection pool of redis-py's, which owns it: made at first use, gone with the pool.
Arguments are taken as redis-py takes them; docs/drop-in.md lists what differs on purpose. Never here: how to acquire,
wait or release.
"""

from __future__ import annotations

import inspect
import itertools
import math
from decimal import Decimal
from numbers import Real
from typing import TYPE_CHECKING, Any

from fastlock import _checks as checks
from fastlock import _law as law
from fastlock import _native as native
from fastlock import _topology as topology
from fastlock._broken import by_handler
from fastlock._errors import LockError, LockNotOwnedError
from fastlock._fork import at_fork, check
from fastlock._lease import ENDED, Lease, now
from fastlock._steps import Clock, Steps
from fastlock._terms import SLEEP, Local, Terms, setting

OWNED = "_fastlock_client"  # attribute of a pool; a table would keep a pool alive that a waiter of its own client holds
_MUTEX = native.RLock()  # which a handler of signals may want while its thread has it


def _forget_parent() -> None:
    """In a forked child: a thread that is not here any more may have held the mutex."""
    global _MUTEX
    _MUTEX = native.RLock()


at_fork(_forget_parent)


def client_of(redis: Any) -> Any:
    """The `fastlock.Client` of a `redis.Redis`. TypeError: it is something else."""
    from fastlock._client import Client

    return _client(redis, Client, asynchronous=False)


def aio_client_of(redis: Any) -> Any:
    """The `fastlock.asyncio.Client` of a `redis.asyncio.Redis`. TypeError: it is something else."""
    from fastlock._aio_client import Client

    return _client(redis, Client, asynchronous=True)


def _client(redis: Any, kind: Any, asynchronous: bool) -> Any:
    if _part(redis, "command_stack") is not None:
        raise TypeError(
            "redis is a pipeline, which sends nothing before it is executed, and a lock is acquired at once: "
            "give the client that the pipeline was made from"
        )
    pool = _part(redis, "connection_pool")
    if pool is None or _part(pool, "connection_kwargs") is None:
        ours = "; a fastlock client makes its locks itself: client.lock(name)" if _part(redis, "_wire") else ""
        raise TypeError(f"redis must be a {_kind(asynchronous)} client, not {type(redis).__name__}{ours}")
    if inspect.iscoroutinefunction(pool.disconnect) is not asynchronous:
        right = "fastlock.Lock" if asynchronous else "fastlock.asyncio.Lock"
        raise TypeError(f"redis is a {_kind(not asynchronous)} client: use {right}")
    check()
    owned = vars(pool)
    client = _made(owned)
    if client is None:
        with _MUTEX:
            client = _made(owned) or kind(settings=topology.from_pool(pool))
            client = owned[OWNED] = _made(owned) or client  # a handler of signals may have made another meanwhile
    return client


def _made(owned: dict[str, Any]) -> Any:
    """The client of a pool, unless it has none, or closed it."""
    client = owned.get(OWNED)
    return None if client is None or client.retired else client


def _part(whole: Any, name: str) -> Any:
    """An attribute, or None; also where a signal's handler may raise AttributeError."""
    try:
        return getattr(whole, name)
    except AttributeError as error:
        if by_handler(error):
            raise
        return None


def _kind(asynchronous: bool) -> str:
    return "redis.asyncio.Redis" if asynchronous else "redis.Redis"


# redis-py's arguments


def text(value: Any) -> Any:
    """A name or token: of numbers what redis-py's encoder makes of them. All else is left to the checks."""
    return repr(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value


def number(value: Any) -> Any:
    """Seconds: whatever is a real number. Anything else is left to the checks, which refuse it by name."""
    if value is None or type(value) in (int, float):
        return value
    return float(value) if isinstance(value, (Real, Decimal)) else value


def pause(value: Any) -> Any:
    """`sleep`. redis-py takes None and fails when it has to wait."""
    return SLEEP if value is None else number(value)


def patience(value: Any) -> Any:
    """`blocking_timeout`: below 0 there is one look, as with 0; longer than can be waited is for ever."""
    seconds = number(value)
    if not isinstance(seconds, (int, float)) or math.isnan(seconds):
        return seconds
    return None if seconds > checks.MAX_WAIT else max(0, seconds)


# What redis-py's lock is made of, by the method that is there instead.
_INNARDS = {
    name: verb
    for verb in ("acquire", "release", "extend", "reacquire")
    for name in (f"do_{verb}", f"lua_{verb}", f"LUA_{verb.upper()}_SCRIPT")
} | {"register_scripts": ""}


def _foreign(name: str) -> str:
    """Why a part of redis-py's lock cannot be replaced here."""
    verb = _INNARDS[name]
    way = f": override {verb!r} itself" if verb else ""
    if verb == "extend":
        way += ", or set the time that is left by `extend(seconds, replace_ttl=True)`"
    return f"fastlock's locks do not use redis-py's scripts, so {name!r} would be ignored{way}"


class _Innard:
    """A part of redis-py's lock that is not there, and cannot be put there."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, lock: Any, owner: Any = None) -> Any:
        raise AttributeError(f"fastlock's locks have no {self.name!r}")

    def __set__(self, lock: Any, value: Any) -> None:
        raise AttributeError(_foreign(self.name))


def _named(lock: Any, value: Any) -> Any:
    lock.key = checks.as_name(text(value), lock._names)
    return value


def _timed(lock: Any, value: Any) -> Any:
    seconds = number(value)
    lock.ms = 0 if seconds is None else checks.as_ms(seconds)
    return seconds


def _slept(lock: Any, value: Any) -> Any:
    return checks.as_wait(pause(value), "sleep")


def _waited(lock: Any, value: Any) -> Any:
    seconds = patience(value)
    return seconds if seconds is None else checks.as_wait(seconds, "blocking_timeout")


class _Whole(type):
    """A class on which nobody can put such a part either, as software does that replaces it for all locks."""

    def __setattr__(cls, name: str, value: Any) -> None:
        if name in _INNARDS:
            raise AttributeError(_foreign(name))
        super().__setattr__(name, value)


class DropIn(Terms, metaclass=_Whole):
    """What the drop-ins of both faces have in common. Each adds how it waits."""

    if not TYPE_CHECKING:
        name = setting("name", _named)
        timeout = setting("timeout", _timed)
        sleep = setting("sleep", _slept)
        blocking_timeout = setting("blocking_timeout", _waited)
        vars().update({name: _Innard(name) for name in _INNARDS})

    redis: Any
    _names: str  # their encoding; that of tokens may be another

    def __init__(
        self,
        redis: Any,
        client: Any,
        names: str,
        name: Any,
        timeout: Any,
        sleep: Any,
        blocking: Any,
        blocking_timeout: Any,
        thread_local: Any,
        raise_on_release_error: Any,
        queue: bool = True,
    ) -> None:
        tokens = redis.get_encoder().encoding
        self.redis = redis
        self._names = names
        super().__init__(
            client,
            text(name),
            number(timeout),
            pause(sleep),
            bool(blocking),
            patience(blocking_timeout),
            bool(thread_local),
            bool(raise_on_release_error),
            encoding=names,
            queue=queue,
        )
        if tokens != names:
            self._encoding = tokens
        if self.name is not name:
            self.name = name

    def __init_subclass__(cls, **keywords: Any) -> None:
        """A subclass may override what is public, also for `with`; what it defines for redis-py's lock is refused."""
        super().__init_subclass__(**keywords)
        theirs = itertools.takewhile(lambda base: not base.__module__.startswith("fastlock."), cls.__mro__)
        defined = {name for base in theirs for name in vars(base)}
        if innards := sorted(defined & _INNARDS.keys()):
            raise TypeError(f"{cls.__qualname__}: {_foreign(innards[0])}")
        cls._heed(defined)

    @classmethod
    def _heed(cls, defined: set[str]) -> None:
        """Enter and leave a `with` by the subclass's own `acquire` and `release`."""

    @property
    def local(self) -> Local:
        """redis-py's place of the token: `lock.local.token`."""
        return Local(self)

    def taking_with(self, sleep: Any, blocking: Any, blocking_timeout: Any, token: Any) -> Any:
        """As redis-py has it: its numbers, and None for the lock's own setting."""
        seconds = patience(blocking_timeout)
        if seconds is None and blocking_timeout is not None:  # for ever, and not what the lock says
            seconds = checks.MAX_WAIT
        return super().taking_with(number(sleep), blocking, seconds, token)

    def _check_both(self, blocking: bool) -> None:
        """Who does not wait may name a time: `acquire(blocking=True)` means it."""

    def _proof(self, token: Any) -> bytes:
        return checks.as_bytes(text(token), "token", self._encoding)

    def _extension(self, seconds: Any, replace_ttl: Any, verb: str, owner: Any) -> Any:
        lease = self._held(verb, owner)
        added = number(seconds)
        ms = int(checks.as_number(added, "additional_time") * 1000)
        if ms > 0:
            ms = checks.as_ms(added, "additional_time")
            return law.prolong(lease, ms, bool(replace_ttl), now, verb == "reacquire")
        return shortened(lease, ms, bool(replace_ttl), now)

    def _endless(self, why: str) -> LockError:
        """As redis-py's script has it, of whose answers 0 stands for this, too."""
        return LockNotOwnedError(why, lock_name=self._text)


def shortened(lease: Lease, ms: int, replace: bool, clock: Clock) -> Steps:
    """Move the end of a lease to an earlier time, or to the next millisecond where it would lie in the past."""
    outcome = yield from law.prolong(lease, ms, replace, clock)
    over = outcome is law.Outcome.LOST and lease.deadline != ENDED  # by now, as was asked for
    return law.Outcome.MOVED if over else outcome
