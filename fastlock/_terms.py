"""What the locks of both faces have in common: checked terms, the leases they keep, the texts of their errors. No I/O, no waiting.

A lock is terms plus convenience; what is owned is the lease of one acquisition. Leases are kept by owner (a thread, or a task), so
that a lock shared between owners never lets one of them free what another acquired.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
import string
from collections.abc import Callable, Iterable
from typing import Any

from fastlock import _checks as checks
from fastlock import _law as law
from fastlock._errors import LockError, LockNotOwnedError
from fastlock._lease import Lease, new_token, now

NOT_HELD = {
    "release": "Cannot release a lock that's not owned or is already unlocked.",
    "extend": "Cannot extend an unlocked lock",
    "reacquire": "Cannot reacquire an unlocked lock",
}


class Terms:
    """A lock's name and settings, and the leases acquired through it."""

    def __init__(
        self,
        name: checks.Name,
        timeout: float | None,
        sleep: float,
        blocking: bool,
        blocking_timeout: float | None,
        thread_local: bool,
        raise_on_release_error: bool,
        fence: bool = False,
        encoding: str = "utf-8",
    ) -> None:
        self.name = name
        self.timeout = timeout
        self.sleep = sleep
        self.blocking = blocking
        self.blocking_timeout = blocking_timeout
        self.thread_local = thread_local
        self.raise_on_release_error = raise_on_release_error
        self.fence = fence
        self._encoding = encoding
        self._key = checks.as_name(name, encoding)
        self._ms = 0 if timeout is None else checks.as_ms(timeout)
        self._leases: dict[Any, Lease] = {}
        if sleep != 0.1:
            checks.as_wait(sleep, "sleep")
        if blocking_timeout is not None:
            self._check_wait(blocking, blocking_timeout)

    @staticmethod
    def _owner() -> Any:
        raise NotImplementedError

    @staticmethod
    def _check_wait(blocking: Any, blocking_timeout: Any) -> None:
        checks.as_wait(blocking_timeout, "blocking_timeout")
        if not blocking:
            raise ValueError("blocking_timeout says how long to wait, and blocking=False not to wait at all: give one of them")

    def _claim(self, sleep: Any, blocking: Any, blocking_timeout: Any, token: Any) -> law.Claim:
        """What an acquire with these arguments wants; None stands for the lock's own setting."""
        if blocking is None:
            blocking = self.blocking
        if blocking_timeout is not None:
            self._check_wait(blocking, blocking_timeout)
        elif blocking:
            blocking_timeout = self.blocking_timeout
        until = None
        if blocking_timeout is not None:
            if blocking_timeout:
                until = now() + blocking_timeout
            else:
                blocking = False
        pause = self.sleep if sleep is None else checks.as_wait(sleep, "sleep")
        proof = new_token() if token is None else checks.as_bytes(token, "token", self._encoding)
        return law.Claim(self.name, self._key, proof, self._ms, bool(blocking), until, pause, self.fence)

    @property
    def lease(self) -> Lease | None:
        """The caller's lease (this thread's, or this task's), or None. Ended leases stay until they are released."""
        return self._leases.get(self._me())

    def _me(self) -> Any:
        return self._owner() if self.thread_local else None

    def _keep(self, lease: Lease) -> None:
        self._leases[self._me()] = lease

    def _drop(self, lease: Lease) -> None:
        for owner, kept in list(self._leases.items()):
            if kept is lease:
                del self._leases[owner]

    def _held(self, verb: str) -> Lease:
        """The lease to work on. Raises LockError: there is none, or it has no end to move."""
        lease = self._leases.get(self._me())
        if lease is None:
            raise LockError(NOT_HELD[verb], lock_name=self._text)
        if lease.inherited:
            raise LockError(f"Cannot {verb} a lock that the parent process acquired before it forked", lock_name=self._text)
        if verb != "release" and (not self._ms or lease.deadline == math.inf):
            raise LockError(f"Cannot {verb} a lock with no timeout", lock_name=self._text)
        return lease

    @property
    def _text(self) -> Any:
        return self.name

    def _extension(self, seconds: float, replace_ttl: bool, verb: str) -> Any:
        """The operation that moves the end of the caller's lease."""
        ms = checks.as_ms(seconds, "additional_time")
        return law.prolong(self._held(verb), ms, replace_ttl, now)

    def _not_acquired(self) -> LockError:
        return LockError("Unable to acquire lock within the time specified", lock_name=self._text)

    def _lost(self, verb: str) -> LockNotOwnedError:
        return LockNotOwnedError(f"Cannot {verb} a lock that's no longer owned", lock_name=self._text)

    def _left(self, error: BaseException | None, problem: Exception) -> None:
        """A release failed on leaving a `with`: raise it, log it, or attach it to the exception that ended the body."""
        if error is not None:
            error.add_note(f"fastlock: then the release of {self.name!r} failed: {problem!r}")
        elif isinstance(problem, LockError) and not self.raise_on_release_error:
            logging.getLogger("fastlock").warning("%r was unlocked or no longer owned when its with statement ended", self.name)
        else:
            raise problem

    def __repr__(self) -> str:
        return f"<{type(self).__module__.replace('_lock', '').replace('_aio', 'asyncio')} lock {self.name!r}, timeout {self.timeout!r}>"


class Local:
    """`lock.local` as redis-py has it: the caller's token, to be read, or set to one acquired elsewhere."""

    __slots__ = ("_terms",)

    def __init__(self, terms: Terms) -> None:
        self._terms = terms

    @property
    def token(self) -> bytes | None:
        lease = self._terms.lease
        return None if lease is None else lease.token

    @token.setter
    def token(self, token: Any) -> None:
        terms = self._terms
        if token is None:
            terms._leases.pop(terms._me(), None)
        else:
            proof = checks.as_bytes(token, "token", terms._encoding)
            end = now() if terms._ms else math.inf  # when it ends, only the server knows
            terms._keep(Lease(terms.name, terms._key, proof, end))


def batch(names: Iterable[Any], timeout: float | None) -> tuple[list[Any], list[bytes], int]:
    """The checked arguments of acquire_many: names as given, as keys, and the lease in milliseconds."""
    if isinstance(names, (str, bytes, bytearray, memoryview)):
        raise TypeError("names must be a list of names, not a single one")
    given = list(names)
    keys = [checks.as_name(name) for name in given]
    if len(set(keys)) != len(keys):
        raise ValueError("names must not hold a name twice")
    return given, keys, 0 if timeout is None else checks.as_ms(timeout)


def owned(leases: Iterable[Any]) -> tuple[list[Lease | None], list[Lease]]:
    """The checked argument of release_many: as given, and those that can be released."""
    given = list(leases)
    for lease in given:
        if lease is not None and type(lease) is not Lease:
            raise TypeError(f"leases must be a list of Lease or None, not {type(lease).__name__}")
    return given, [lease for lease in given if lease is not None and not lease.inherited]


def merge(given: list[Lease | None], mine: list[Lease], released: list[bool]) -> list[bool]:
    """One bool for each entry that release_many was given."""
    outcome = {id(lease): done for lease, done in zip(mine, released, strict=True)}
    return [outcome.get(id(lease), False) for lease in given]


def namer(name: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """From a `locked` decorator's name (a template over the call's arguments, or a callable) to a function of the call."""
    if callable(name):
        return name
    if not isinstance(name, str):
        checks.as_name(name)
        return lambda *args, **kwargs: name
    signature = inspect.signature(function)
    fields = [field for _, field, _, _ in string.Formatter().parse(name) if field is not None]
    for field in fields:
        root = field.split(".")[0].split("[")[0]
        if root not in signature.parameters:
            raise ValueError(f"name {name!r} asks for {root!r}, which is no argument of {function.__qualname__}{signature}")
    if not fields:
        fixed = name.format()
        checks.as_name(fixed)
        return lambda *args, **kwargs: fixed

    def from_call(*args: Any, **kwargs: Any) -> str:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        return name.format(**call.arguments)

    return from_call


def wrapped(function: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """functools.wraps, for the decorators of both faces."""
    return functools.wraps(function)
