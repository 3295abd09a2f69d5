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
    """Whether the user may not do this."""
    return isinstance(error, exceptions.NoPermissionError)


def is_passing(reply: Exception) -> bool:
    """Whether an error reply says that nothing is executed now, and will be before long: the server loads its data, or
    looks for its master, or is at somebody's script."""
    return text_of(reply).partition(" ")[0] in _PASSING


def is_lasting(reply: Exception) -> bool:
    """As `passes`, or whether it may take long: the server cannot write, as a replica, or without its own replicas."""
    return is_passing(reply) or text_of(reply).partition(" ")[0] in _LASTING


def is_unreachable(error: exceptions.RedisError) -> bool:
    """Whether the server stayed away, or went on to say that it can do nothing now, for as long as a caller waits."""
    return isinstance(error, _AWAY) or is_passing(error)


# How scripts say so, in other words than commands, and old servers in other ones.
_FORBIDDEN = ("no permission", "ACL failure", "The user executing the script can't")
_PASSING = frozenset(("LOADING", "MASTERDOWN", "TRYAGAIN", "CLUSTERDOWN", "BUSY"))
# For who asks it is an answer; what undoes something is said until it is done.
_LASTING = frozenset(("NOREPLICAS", "MISCONF", "READONLY"))
_AWAY = (ConnectionError, TimeoutError, exceptions.ClusterDownError, exceptions.TryAgainError)


E = TypeVar("E", bound=Exception)


def is_own(error: BaseException) -> bool:
    """Whether an operation itself raised this, after it had left what was to be undone. Anything else struck it from
    outside (Ctrl-C, what a signal's handler raises, a task's cancellation): nobody else will clean up. Its type does
    not tell: a handler may raise one of redis-py's, or use a lock itself."""
    return getattr(error, "_own", False) is True and not by_handler(error)


def as_own(error: E) -> E:
    """Mark an error as one that an operation raises itself."""
    error._own = True  # type: ignore[attr-defined]
    return error


def fresh_copy(error: E) -> E:
    """Another one like it, to be raised. What is raised keeps the frames that it passes, and with them what they use:
    were that the error that a connection keeps, it would keep its connection by that, and several callers would raise
    the same one."""
    again = copy.copy(error)
    again.__cause__ = error.__cause__
    return again


def as_connection_error(error: BaseException, endpoint: str) -> Exception:
    """What broke a connection, or kept one from coming up, as redis-py's exception."""
    return as_own(_broken(error, endpoint))


def _broken(error: BaseException, endpoint: str) -> Exception:
    if isinstance(error, RedisError) and not by_handler(error):  # else it is nobody else's who waits there
        return error
    if isinstance(error, ProtocolError):
        return InvalidResponse(f"{endpoint}: {error}")
    if isinstance(error, builtins.TimeoutError):
        return TimeoutError(f"{endpoint}: {str(error) or 'timed out'}")
    return ConnectionError(f"{endpoint}: {str(error) or type(error).__name__}")


class LockError(exceptions.LockError):
    """A lock was used in a way its state does not allow. `lock_name` names it."""

    __module__ = "fastlock"  # where users find it
    _own = True
    __repr__ = Exception.__repr__  # with its message, which redis-py's leaves out

    def __init__(self, message: str | None = None, lock_name: Any = None) -> None:  # redis-py 5.0.0 has no lock_name
        super().__init__(message)
        self.message = message
        self.lock_name = lock_name


class LockNotOwnedError(exceptions.LockNotOwnedError, LockError):
    """The lock is no longer the caller's: its lease ran out, or somebody took or deleted it. `lock_name` names it."""

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
_SHOWN = 256  # characters of a server's message that are repeated: it may be hostile, or hold a megabyte


def text_of(reply: Exception) -> str:
    """What an error reply says. Redis 6.2 wraps an error inside a script in another one, which says where."""
    text = str(reply)
    if text.startswith("ERR Error running script"):
        inner = re.findall(r"@user_script: ?\d+: -?([A-Z]{3,} .*)", text)
        return inner[-1] if inner else text
    return text


def from_reply(reply: Exception) -> exceptions.RedisError:
    """The redis-py exception for an error reply; its text keeps the code unless the type says it, as redis-py has
    it."""
    return as_own(_from_text("".join(char if char.isprintable() else "?" for char in text_of(reply)[:_SHOWN])))


def _from_text(text: str) -> exceptions.RedisError:
    code, _, rest = text.partition(" ")
    kind = _BY_CODE.get(code)
    if kind is not None:
        try:
            return kind(rest)
        except (ValueError, IndexError):  # MOVED and ASK read a slot and a node out of the text
            return exceptions.ResponseError(text)
    if text.startswith("ERR max number of clients"):
        return exceptions.ConnectionError(text)
    if any(words in text for words in _FORBIDDEN):  # within a script
        return exceptions.NoPermissionError(text)
    return exceptions.ResponseError(text)
