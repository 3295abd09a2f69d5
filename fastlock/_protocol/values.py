"""Values that one caller makes and others get: how they are encoded, read, kept and discarded.

A value is kept only by who still holds the lock under which it was made, as a script checks. Never here: sockets,
asyncio, threads, sleep, what makes a value.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from fastlock import _errors as errors
from fastlock._limits import MAX_REPLY
from fastlock._protocol import commands
from fastlock._protocol.commands import Opcode, RawCommand, Script
from fastlock._protocol.lease import Lease
from fastlock._protocol.losses import LOG, abbreviated, shown
from fastlock._protocol.release import is_int
from fastlock._protocol.retry import RetryState, execute, resolve, run_script
from fastlock._protocol.steps import Clock, Command, RawCommands, Steps
from fastlock._stream_errors import by_handler

KEEP_LUA = Script("tokens", "no_lock", "keep_value")
DISCARD_LUA = Script("no_lock", "discard_value")
VERSION_KEPT_MS = 86_400_000  # far longer than a value is being made
MOST_READS = 10  # of a long value that is replaced each time while it is read

Dumps = Callable[[Any], bytes | str]
Loads = Callable[[bytes], Any]


class Kept(enum.Enum):
    """What became of a value that was to be kept."""

    KEPT = enum.auto()
    LOST = enum.auto()  # not kept: the lock under which it was made was lost
    OUTDATED = enum.auto()  # not kept: it was discarded while it was made


@dataclass(frozen=True, slots=True)
class Found:
    """What stands on the server for a key: the value or None, the milliseconds for which it will (-1: without end), and
    its version, if that was asked for."""

    raw: bytes | None
    left: int
    version: bytes = b""


@lru_cache(1024)
def result_key(name: bytes) -> bytes:
    """The key of the result that is kept for a name."""
    return commands.beside(b"fastlock:once:", name)


@lru_cache(1024)
def load_key(key: bytes) -> bytes:
    """The name of the lock under which the value of a key is made."""
    return commands.beside(b"fastlock:load:", key)


@lru_cache(1024)
def version_key(key: bytes) -> bytes:
    """The key of a number that grows when the value of `key` is discarded while it is made."""
    return commands.beside(b"fastlock:version:", key)


# ------------------------------------------------------------------------------------------------------------ encoding


class Codec:
    """How values become bytes and come back: as JSON, unless functions are given. ValueError or TypeError: they make no
    sense."""

    def __init__(self, dumps: Dumps | None, loads: Loads | None) -> None:
        if (dumps is None) != (loads is None):
            given, missing = ("dumps", "loads") if loads is None else ("loads", "dumps")
            raise ValueError(f"{given} was given without {missing}: give both, or none for JSON")
        for name, function in (("dumps", dumps), ("loads", loads)):
            if function is not None and not callable(function):
                raise TypeError(f"{name} must be a function, not {type(function).__name__}")
        self.dumps = dumps or _as_json
        self.loads = loads or json.loads

    def encode(self, value: object, name: object) -> bytes:
        """The bytes of a value. TypeError or ValueError of JSON: it cannot be kept so; other errors as of `dumps`."""
        try:
            raw = self.dumps(value)
        except (TypeError, ValueError) as error:
            if by_handler(error):
                raise
            note = "another format is chosen by dumps= and loads=, as dumps=pickle.dumps, loads=pickle.loads"
            error.add_note(f"as the value of {abbreviated(name)} was to be kept; {note}")
            if self.dumps is not _as_json:
                raise
            raise type(error)(f"the value of {abbreviated(name)} cannot be kept as JSON: {error} ({note})") from error
        if isinstance(raw, str):
            return raw.encode()
        if not isinstance(raw, bytes):
            raise TypeError(f"dumps must return bytes or str, not {type(raw).__name__}")
        return raw

    def decode(self, raw: bytes, name: object) -> tuple[Any] | None:
        """(value,), or None for bytes that cannot be read: they count as none. LockKindError: they are a lock's."""
        if commands.as_plain(raw) is not None:
            raise errors.LockKindError(f"No value can be kept under {abbreviated(name)}: the key holds a lock", name)
        try:
            return (self.loads(raw),)
        except Exception as error:
            if by_handler(error):
                raise
            LOG.warning("what is kept for %s cannot be read, and is made anew: %s", abbreviated(name), shown(error))
            return None


def _as_json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


# ------------------------------------------------------------------------------------------------------------- reading


def read(key: bytes, clock: Clock) -> Steps[bytes | None]:
    """The value of a key; None: there is none."""
    raw = yield from execute(Command(Opcode.GET, key), RetryState(clock))
    if raw == b"":
        return (yield from _read_long(key, clock))
    value: bytes | None = raw
    return value


def find(key: bytes, clock: Clock, versioned: bool = False) -> Steps[Found]:
    """The value of a key with its time to live, and with its version."""
    calls: list[RawCommand] = [(b"GET", key), (b"PTTL", key)]
    if versioned:
        calls.append((b"GET", version_key(key)))
    raw, left, *number = yield from _replies(calls, clock, (_NULL_OR_BYTES, (int,), _NULL_OR_BYTES))
    if raw == b"":
        raw = yield from _read_long(key, clock)
    if left == -2:  # it ended between the two commands
        raw = None
    return Found(raw, left, number[0] or b"" if number else b"")


def _read_long(key: bytes, clock: Clock) -> Steps[bytes | None]:
    """The value of a key that is longer than a reply may be, or empty. It is read in parts; WATCH tells whether it was
    replaced meanwhile."""
    for _ in range(MOST_READS):
        (size,) = yield from _replies([(b"STRLEN", key)], clock, ((int,),))
        if not size:
            return b""
        starts = range(0, size, MAX_REPLY)
        parts = [(b"GETRANGE", key, b"%d" % at, b"%d" % (at + MAX_REPLY - 1)) for at in starts]
        calls = [(b"WATCH", key), *parts, (b"MULTI",), (b"EXEC",)]
        kinds = (_BYTES, *[_BYTES] * len(parts), _BYTES, (type(None), list))
        _, *read, _, unchanged = yield from _replies(calls, clock, kinds)
        raw = b"".join(read)
        if unchanged is not None and len(raw) == size:
            return raw
    return None


_BYTES = (bytes,)
_NULL_OR_BYTES = (type(None), bytes)


def _replies(calls: list[RawCommand], clock: Clock, kinds: tuple[tuple[type, ...], ...]) -> Steps[list[Any]]:
    """Send commands that only read; returns the reply to each, which is of one of these types. Raises the exception of
    an error reply."""
    request, retry = RawCommands(calls), RetryState(clock)
    answer: Any = yield from execute(request, retry)
    while len(answer) != len(calls) or any(type(each) not in kind for each, kind in zip(answer, kinds, strict=False)):
        refusals = [each for each in answer if isinstance(each, Exception)]
        answer = yield from resolve(request, refusals[0] if refusals else ("odd", answer), retry)
    replies: list[Any] = answer
    return replies


# ------------------------------------------------------------------------------------------------------------- keeping


def keep(lease: Lease, key: bytes, raw: bytes, ms: int, clock: Clock, version: bytes | None = None) -> Steps[Kept]:
    """Keep a value for `ms` milliseconds, if this lease still holds the lock, and the value has still the version that
    was found before it was made (None: it has none)."""
    try:
        return (yield from _kept(lease, key, raw, ms, clock, version))
    except BaseException:
        # It may be executed later: no other caller may have been handed the lock by then, by the same token
        lease._token_read = True
        raise


def _kept(lease: Lease, key: bytes, raw: bytes, ms: int, clock: Clock, version: bytes | None) -> Steps[Kept]:
    keys = (lease._key, key) if version is None else (lease._key, key, version_key(key))
    given = (lease._raw_token, raw, b"%d" % ms, version or b"")
    request, retry = RawCommands([(b"EVALSHA", KEEP_LUA.sha, b"%d" % len(keys), *keys, *given)]), RetryState(clock)
    reply = yield from _answered(request, key, retry)
    if reply == 1:
        return Kept.KEPT
    if retry.outcome_unknown and (yield from read(key, clock)) == raw:  # kept before the reply was lost
        return Kept.KEPT
    return Kept.OUTDATED if reply == 2 else Kept.LOST


def forget(key: bytes, clock: Clock) -> Steps[bool]:
    """Delete a value. Returns whether there was one."""
    (deleted,) = yield from _replies([(b"DEL", key)], clock, ((int,),))
    return bool(deleted)


def discard(key: bytes, clock: Clock) -> Steps[bool]:
    """Delete a value; one that is being made now will not be kept. Returns whether there was one."""
    call = (b"EVALSHA", DISCARD_LUA.sha, b"3", key, version_key(key), load_key(key), b"%d" % VERSION_KEPT_MS)
    return bool((yield from _answered(RawCommands([call]), key, RetryState(clock))))


def _answered(request: RawCommands, key: bytes, retry: RetryState) -> Steps[int]:
    """The number that a script replies. Raises LockKindError: the key holds a lock, or something else that is no
    value."""
    try:
        return int((yield from run_script(request, (yield request), is_int, retry)))
    except errors.ResponseError as refusal:
        code, _, found = str(refusal).partition(" ")
        if code != "WRONGKIND" or not errors.is_own(refusal):
            raise
        raise errors.LockKindError(f"No value can be kept under {key!r}: the key holds {found}", key) from None
