"""What the server knows of a name: who holds it, who waits, as one script reads it.

Never here: sockets, and what the holders' processes know of themselves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from fastlock import _errors as errors
from fastlock._protocol import commands
from fastlock._protocol.losses import abbreviated
from fastlock._protocol.retry import RetryState, execute, run_scripts
from fastlock._protocol.steps import Clock, LongReply, RawCommands, Steps

KINDS = {
    commands.READER: "a read-write lock",
    commands.WRITER: "a read-write lock",
    commands.SEMAPHORE: "a semaphore",
}
PLAIN, OTHER = "a lock", "something that is no lock"


@dataclass(frozen=True, slots=True)
class Found:
    """A name as it stood on the server. kind: "a lock", "a read-write lock", "a semaphore", OTHER, or None: nobody
    holds it. holders: each token, with the seconds until its lease ends (infinite: without end). waiters: each channel,
    with its entry, in order. fence: the last one. size: that a semaphore was changed to."""

    kind: str | None
    holders: list[tuple[bytes, float]] = field(default_factory=list)
    waiters: list[tuple[bytes, bytes]] = field(default_factory=list)
    fence: int | None = None
    size: int | None = None

    def has(self, token: bytes) -> bool:
        """Whether this token holds the name."""
        return any(commands.token_matches(held, token) for held, _ in self.holders)

    def any_of(self, mode: bytes) -> bool:
        """Whether anybody holds the name in this mode."""
        return any(commands.is_shared(held) and commands.mode_of(held) == mode for held, _ in self.holders)

    def permits(self) -> int:
        """How many permits of a semaphore are held."""
        return sum(commands.permits_of(held)[0] for held, _ in self.holders)


def find(key: bytes, clock: Clock) -> Steps[Found]:
    """Ask the server for all that it knows of a name."""
    return (yield from find_all([key], clock))[0]


def find_all(keys: list[bytes], clock: Clock) -> Steps[list[Found]]:
    """Ask the server for all that it knows of several names, in one flush."""
    request = LongReply([commands.describe(key) for key in keys])
    replies = yield from run_scripts(request, (yield request), _is_description, RetryState(clock), len(keys))
    return [_parsed(*reply) for reply in replies]


def _is_description(reply: object) -> bool:
    return type(reply) is list and len(reply) == 7 and type(reply[3]) is list and type(reply[4]) is list


def _parsed(
    type: bytes, time: int, left: int, held: list[Any], queue: list[bytes], fence: bytes | None, size: bytes | None
) -> Found:
    holders, kind = [], None
    if type == b"string":
        kind, holders = PLAIN, [(held[0], math.inf if left < 0 else left / 1000)]
    elif type != b"none":
        pairs = [(token, float(end)) for token, end in zip(held[::2], held[1::2], strict=True)]
        holders = [(token, (end - time) / 1000) for token, end in pairs if end > time]
        kind = kind_of(held[0]) if held else OTHER
    waiters = [(address[: commands.CHANNEL_SIZE], entry) for address, entry in map(commands.split, queue)]
    return Found(kind, holders, waiters, *(None if value is None else int(value) for value in (fence, size)))


def kind_of(member: bytes) -> str:
    """The kind of a name that several may hold, by a member of its zset."""
    if member == b"|used":
        return KINDS[commands.SEMAPHORE]
    return KINDS[commands.mode_of(member)] if commands.is_shared(member) else OTHER


def explain(
    refusal: errors.ResponseError, lock: Any, clock: Clock, action: str = "acquire"
) -> Steps[errors.ResponseError | errors.LockError]:
    """The error of an acquire that the server has refused: one that says what kind of lock the name is, if it is of
    another; else the refusal itself."""
    code, _, rest = str(refusal).partition(" ")
    if code == "PERMITS":
        return errors.LockError(lock._cannot("acquire", f"it has {rest} permits, fewer than asked for"), lock._text)
    if not (_is_of_kind(refusal) and lock._tells_kind()):
        return refusal
    kind = rest if code == "WRONGKIND" else (yield from other_kind(lock._key, clock))
    return errors.LockKindError(lock._cannot(action, f"its name is in use by {kind}"), lock._text)


def explain_name(refusal: errors.ResponseError, name: Any, key: bytes, clock: Clock) -> Steps[errors.ResponseError]:
    """As `explain`, for one of several names that are acquired together."""
    return (yield from wrong_kind(name, key, clock)) if _is_of_kind(refusal) else refusal


def wrong_kind(name: Any, key: bytes, clock: Clock) -> Steps[errors.LockKindError]:
    """The error of an acquire of a name whose key holds no plain lock."""
    kind = yield from other_kind(key, clock)
    return errors.LockKindError(f"Cannot acquire lock {abbreviated(name)}: its name is in use by {kind}", name)


def _is_of_kind(refusal: errors.ResponseError) -> bool:
    """Whether a refusal is the server's, and due to what the key holds."""
    return errors.is_own(refusal) and str(refusal).partition(" ")[0] in ("WRONGTYPE", "WRONGKIND")


def other_kind(key: bytes, clock: Clock) -> Steps[str]:
    """The kind of a name whose key holds no plain lock."""
    replies = yield from execute(RawCommands([(b"ZRANGE", key, b"0", b"0")]), RetryState(clock))
    first = replies[0] if isinstance(replies, list) else None
    return kind_of(first[0]) if isinstance(first, list) and first else OTHER
