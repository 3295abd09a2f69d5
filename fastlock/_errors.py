"""Errors, one per remedy, all subclasses of redis-py's, so that existing `except` clauses keep working.

Lives here: fastlock's own exceptions and the table from a server's error reply to redis-py's exception type.
Never here: any decision what to do about one.
"""

from __future__ import annotations

import builtins
import copy
import re
from typing import Any, TypeVar

from hiredis import ProtocolError
from redis import exceptions

from fastlock._stream_errors import by_handler

RedisError = exceptions.RedisError
ConnectionError = exceptions.ConnectionError
TimeoutError = exceptions.TimeoutError
InvalidResponse = exceptions.InvalidResponse
AuthenticationError = exceptions.AuthenticationError
ResponseError = exceptions.ResponseError


def is_forbidden(error: exceptions.RedisError) -> bool:
    """Whether the server refused because its user lacks permission."""
    return isinstance(error, exceptions.NoPermissionError)


def is_cross_slot(error: BaseException) -> bool:
    """Whether a node of a cluster refused a command, as its names are in several hash slots."""
    return isinstance(error, exceptions.ClusterCrossSlotError)


def is_passing(reply: Exception) -> bool:
    """Whether an error reply says that nothing is executed now, but will be soon: the server loads its data, or looks
    for its master, or runs another client's script."""
    return text_of(reply).partition(" ")[0] in _PASSING


def is_lasting(reply: Exception) -> bool:
    """Whether an error reply says that nothing is executed now, as of `is_passing`, or that the server cannot write for
    a while, as it is a replica or lacks replicas of its own."""
    return is_passing(reply) or text_of(reply).partition(" ")[0] in _LASTING


def is_unreachable(error: exceptions.RedisError) -> bool:
    """Whether the server could not be reached, or kept replying that it can do nothing now, while a caller retried."""
    return isinstance(error, _AWAY) or is_passing(error)


# How error replies of scripts word a lack of permission; old servers word it differently from new ones.
_FORBIDDEN = ("no permission", "ACL failure", "The user executing the script can't")
_PASSING = frozenset(("LOADING", "MASTERDOWN", "TRYAGAIN", "CLUSTERDOWN", "BUSY"))
# For a request such an error is the answer; an undo is sent again until it is done.
_LASTING = frozenset(("NOREPLICAS", "MISCONF", "READONLY"))
_AWAY = (ConnectionError, TimeoutError, exceptions.ClusterDownError, exceptions.TryAgainError)


E = TypeVar("E", bound=Exception)


def is_own(error: BaseException) -> bool:
    """Whether an operation itself raised this error, after it had left its undos. Any other error interrupted it
    (Ctrl-C, what a signal handler raises, a task's cancellation), and nothing else will clean up. The type does not
    tell: a signal handler may raise an error of redis-py's, or use a lock itself."""
    return getattr(error, "_own", False) is True and not by_handler(error)


def as_own(error: E) -> E:
    """Mark an error as one that an operation raises itself."""
    error._own = True  # type: ignore[attr-defined]
    return error


def fresh_copy(error: E) -> E:
    """A copy of an error, to be raised. A raised error keeps the frames that it passes, and all that they refer to: the
    error that a connection keeps would by that keep the connection alive, and several callers would raise the same
    object."""
    again = copy.copy(error)
    again.__cause__ = error.__cause__
    return again


def as_connection_error(error: BaseException, endpoint: str) -> Exception:
    """The redis-py exception for an error that broke a connection, or kept one from coming up."""
    return as_own(_broken(error, endpoint))


def _broken(error: BaseException, endpoint: str) -> Exception:
    if isinstance(error, RedisError) and not by_handler(error):  # a handler's is not for others that wait there
        return error
    if isinstance(error, ProtocolError):
        return InvalidResponse(f"{endpoint}: {error}")
    if isinstance(error, builtins.TimeoutError):
        return TimeoutError(f"{endpoint}: {str(error) or 'timed out'}")
    return ConnectionError(f"{endpoint}: {str(error) or type(error).__name__}")


def senseless_reply(endpoint: str, reply: object) -> InvalidResponse:
    """The error of a reply that makes no sense."""
    return as_own(InvalidResponse(f"{endpoint}: a reply that makes no sense: {reply!r:.80}"))


class LockError(exceptions.LockError):
    """A lock was used in a way its state does not allow. `lock_name` names the lock."""

    __module__ = "fastlock"  # where users find it
    _own = True
    __repr__ = Exception.__repr__  # with its message, which redis-py's leaves out

    def __init__(self, message: str | None = None, lock_name: object = None) -> None:  # redis-py 5.0.0 has no lock_name
        super().__init__(message)
        self.message = message
        self.lock_name: Any = lock_name  # declared by redis-py as a str, whatever the name is


class LockNotAcquiredError(LockError):
    """A `with` was not entered, or a decorated function not called, as the lock was not acquired: somebody else holds
    it. `lock_name` names the lock.

    Of a multi lock: `blocked_by` is the first of its names that somebody else holds, `holder` the beginning of its
    holder's token (None: it is not one of fastlock's), `time_left` for how many seconds still (None: without end).
    """

    __module__ = "fastlock"
    blocked_by: Any = None
    holder: str | None = None
    time_left: float | None = None
    lock_id = 0  # `id` of the lock that raised it: the lock itself could not be pickled with the error


class LockKindError(exceptions.ResponseError, LockError):
    """The name is in use by another kind of lock, or by something that is no lock. `lock_name` names the lock."""

    __module__ = "fastlock"


class LockNotOwnedError(exceptions.LockNotOwnedError, LockError):
    """The lock is no longer the caller's: its lease expired, or the key was deleted or overwritten. `lock_name` names
    the lock."""

    __module__ = "fastlock"


class LockLostError(LockNotOwnedError):
    """The lease of a lock was lost while its holder was at work, which was cancelled for that. `lock_name` names the
    lock."""

    __module__ = "fastlock"


class ClientClosedError(exceptions.ConnectionError):
    """The client was closed, before this call or while it waited."""

    __module__ = "fastlock"
    _own = True
    __repr__ = Exception.__repr__


_BY_CODE: dict[str, type[exceptions.RedisError]] = {
    "OOM": exceptions.OutOfMemoryError,
    "WRONGPASS": exceptions.AuthenticationError,
    "NOAUTH": exceptions.AuthenticationError,
    "NOPERM": exceptions.NoPermissionError,
    "LOADING": exceptions.BusyLoadingError,
    "NOSCRIPT": exceptions.NoScriptError,
    "READONLY": exceptions.ReadOnlyError,
    "EXECABORT": exceptions.ExecAbortError,
    "ASK": exceptions.AskError,
    "MOVED": exceptions.MovedError,
    "TRYAGAIN": exceptions.TryAgainError,
    "CLUSTERDOWN": exceptions.ClusterDownError,
    "CROSSSLOT": exceptions.ClusterCrossSlotError,
    "MASTERDOWN": exceptions.MasterDownError,
}
_SHOWN = 256  # characters of a server's message that an exception repeats: it may be hostile, or hold a megabyte


def text_of(reply: Exception) -> str:
    """The text of an error reply. Redis 6.2 wraps an error inside a script in another one, which says where it was."""
    text = str(reply)
    if text.startswith("ERR Error running script"):
        inner = re.findall(r"@user_script: ?\d+: -?([A-Z]{3,} .*)", text)
        return inner[-1] if inner else text
    return text


def from_reply(reply: Exception) -> exceptions.RedisError:
    """The redis-py exception for an error reply. Its text keeps the error code, unless the type says the same, as in
    redis-py."""
    return as_own(_from_text("".join(char if char.isprintable() else "?" for char in text_of(reply)[:_SHOWN])))


def _from_text(text: str) -> exceptions.RedisError:
    code, _, rest = text.partition(" ")
    kind = _BY_CODE.get(code)
    if kind is not None:
        try:
            return kind(rest)
        except (ValueError, IndexError):  # MOVED and ASK read a hash slot and a node out of the text
            return exceptions.ResponseError(text)
    if text.startswith("ERR max number of clients"):
        return exceptions.ConnectionError(text)
    if any(words in text for words in _FORBIDDEN):  # within a script
        return exceptions.NoPermissionError(text)
    return exceptions.ResponseError(text)
