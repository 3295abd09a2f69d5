"""Errors, one per remedy, all subclasses of redis-py's, so that existing `except` clauses keep working.

Lives here: fastlock's own exceptions and the table from a server's error reply to redis-py's exception type.
Never here: any decision what to do about one.
"""

from __future__ import annotations

import re

from redis import exceptions

RedisError = exceptions.RedisError
ConnectionError = exceptions.ConnectionError
TimeoutError = exceptions.TimeoutError
InvalidResponse = exceptions.InvalidResponse
AuthenticationError = exceptions.AuthenticationError
ResponseError = exceptions.ResponseError


def forbids(error: exceptions.ResponseError) -> bool:
    """Whether the user may not do this; scripts say so in other words than commands."""
    return (
        isinstance(error, exceptions.NoPermissionError) or "no permission" in str(error) or "ACL failure" in str(error)
    )


def own(error: BaseException) -> bool:
    """Whether an operation itself raised this, after it had left what was to be undone. Anything else struck it from
    outside (Ctrl-C, what another signal's handler raises, a task's cancellation): nobody else will clean up."""
    return isinstance(error, RedisError)


class LockError(exceptions.LockError):
    """A lock was used in a way its state does not allow. `lock_name` names it."""


class LockNotOwnedError(exceptions.LockNotOwnedError, LockError):
    """The lock is no longer the caller's: its lease ran out, or somebody took or deleted it. `lock_name` names it."""


class ClientClosedError(exceptions.ConnectionError):
    """The client was closed, before this call or while it waited."""


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
    text = "".join(char if char.isprintable() else "?" for char in text_of(reply)[:_SHOWN])
    code, _, rest = text.partition(" ")
    kind = _BY_CODE.get(code)
    if kind is not None:
        try:
            return kind(rest)
        except (ValueError, IndexError):  # MOVED and ASK read a slot and a node out of the text
            return exceptions.ResponseError(text)
    if text.startswith("ERR max number of clients"):
        return exceptions.ConnectionError(text)
    return exceptions.ResponseError(text)
