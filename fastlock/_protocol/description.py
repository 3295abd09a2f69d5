"""Who holds a name and who waits for it, as users see it: what the server knows of the name, of the processes that are
connected to it, and what this process knows of its own leases.

The server is asked for this alone: no acquire tells it any of it. A token, which proves ownership, is never shown; its
first half is the id of the process that made it. Never here: sockets, how leases of this process are found.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from fastlock._protocol import commands, describe, identity
from fastlock._protocol.describe import KINDS, OTHER, PLAIN, Found
from fastlock._protocol.identity import Processes
from fastlock._protocol.lease import ID_DIGITS, process_id
from fastlock._protocol.retry import RetryState, execute
from fastlock._protocol.steps import Clock, LongReply, Steps

LOCK, RW_LOCK, SEMAPHORE, NO_LOCK = "lock", "rw_lock", "semaphore", "other"
_KINDS = {PLAIN: LOCK, KINDS[commands.READER]: RW_LOCK, KINDS[commands.SEMAPHORE]: SEMAPHORE, OTHER: NO_LOCK}
_MODES = {b"r": "read", b"w": "write"}
_TOKEN = re.compile(rb"f[lk][:+]([0-9a-f]{%d})[0-9a-f]{%d}(?:\|([rw]|s(\d+)/(\d+)))?" % (ID_DIGITS, ID_DIGITS))
_CHANNEL = re.compile(rb"fastlock:([0-9a-f]{%d})" % ID_DIGITS)


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a name. What is not known is None.

    process: the id of its process, `host` and `pid` where that runs, `connected` whether it is connected to the server
    now. owner: the name of the thread or task; since: when it acquired the name, in seconds since 1970; depth: how
    often (all three are known in its own process only). left: seconds until its lease ends, None: it has no end. mode:
    "read" or "write", of a read-write lock. permits: how many it holds, of a semaphore. mine: whether this process
    holds it. kept: whether its client may keep the lease after it was released, so that nobody may be in its body;
    in its own process `depth` is 0 then.
    """

    process: str | None
    host: str | None
    pid: int | None
    connected: bool | None
    owner: str | None
    since: float | None
    left: float | None
    mode: str | None
    permits: int | None
    depth: int | None
    mine: bool
    kept: bool


@dataclass(frozen=True, slots=True)
class QueuedWaiter:
    """Who waits for a name on the server: one entry in its queue, which the waiters of one client for a plain lock have
    in common. The attributes are those of `Holder`; permits: how many it waits for."""

    process: str | None
    host: str | None
    pid: int | None
    connected: bool | None
    mode: str | None
    permits: int | None
    mine: bool


@dataclass(frozen=True, slots=True)
class Description:
    """A name as it stood on the server at one moment.

    kind: "lock" (also reentrant, and each name of a multi lock), "rw_lock", "semaphore", "other": the key holds
    something else, or None: nobody holds the name. waiters: in order. fence: the last that was given for the name, if
    any was within the last hour. permits, used: how many a semaphore has, and how many of them are held.
    """

    name: Any
    kind: str | None
    holders: tuple[Holder, ...]
    waiters: tuple[QueuedWaiter, ...]
    fence: int | None
    permits: int | None
    used: int | None


@dataclass(frozen=True, slots=True)
class Own:
    """What this process knows of a lease of its own. since: on the clock of leases; 0: not known."""

    owner: str | None
    since: float
    depth: int


# Finds the leases of this process on these keys: by key, and what their tokens have in common in all their forms
OwnLeases = Callable[[Iterable[bytes]], dict[tuple[bytes, bytes], Own]]


def secret_of(token: bytes) -> bytes:
    """What a token has in common in all its forms: plain or contended, a writer's or a reader's."""
    return token[len(commands.PLAIN_PREFIX) : commands.TOKEN_SIZE]


def describe_names(
    names: list[Any], keys: list[bytes], own: OwnLeases, wall: Callable[[], float], clock: Clock
) -> Steps[list[Description]]:
    """What is known of each of these names, asked in two flushes. wall: the time in seconds since 1970. Raises the
    redis-py exception of an error reply."""
    return (yield from describe_found(names, keys, (yield from describe.find_all(keys, clock)), own, wall, clock))


def describe_found(
    names: list[Any], keys: list[bytes], found: list[Found], own: OwnLeases, wall: Callable[[], float], clock: Clock
) -> Steps[list[Description]]:
    """The same, of names that were asked for already."""
    makers = {id for each in found for id in _processes_of(each)}
    processes = (yield from connected(clock)) if makers else None
    leases = own(keys) if process_id().decode() in makers else {}
    ages = {at: wall() - (clock() - lease.since) for at, lease in leases.items() if lease.since}
    return [
        _description(name, key, each, _Known(processes, leases, ages))
        for name, key, each in zip(names, keys, found, strict=True)
    ]


def connected(clock: Clock) -> Steps[Processes | None]:
    """The processes that are connected to the server; None: the user may not list them."""
    replies: Any = yield from execute(LongReply([(b"CLIENT", b"LIST")]), RetryState(clock))
    reply = replies[0] if isinstance(replies, list) else None
    return identity.read_clients(reply) if isinstance(reply, bytes) else None


@dataclass(frozen=True, slots=True)
class _Known:
    """What is known beside what stands under a name. processes: None: nothing. since: by key and secret."""

    processes: Processes | None
    leases: dict[tuple[bytes, bytes], Own]
    since: dict[tuple[bytes, bytes], float]

    def about(self, process: bytes | None) -> dict[str, Any]:
        """The attributes that say which process somebody is."""
        id = None if process is None else process.decode()
        there = None if self.processes is None or id is None else self.processes.by_id.get(id)
        absent = False if id is not None and self.processes is not None and self.processes.complete else None
        return {
            "process": id,
            "host": None if there is None else there.host,
            "pid": None if there is None else there.pid,
            "connected": absent if there is None else True,
            "mine": process == process_id(),
        }


def _processes_of(found: Found) -> set[str]:
    tokens = [_TOKEN.fullmatch(token) for token, _ in found.holders]
    channels = [_CHANNEL.match(channel) for channel, _ in found.waiters]
    return {each[1].decode() for each in (*tokens, *channels) if each}


def _description(name: Any, key: bytes, found: Found, known: _Known) -> Description:
    kind = None if found.kind is None else _KINDS[found.kind]
    holders = () if kind == NO_LOCK else tuple(_holder(key, *each, known) for each in found.holders)
    sizes = [int(each[4]) for token, _ in found.holders if (each := _TOKEN.fullmatch(token)) and each[4]]
    permits = found.size if found.size is not None or kind != SEMAPHORE or not sizes else max(sizes)
    return Description(
        name=name,
        kind=kind if holders or kind == NO_LOCK else None,
        holders=holders,
        waiters=tuple(_waiter(*each, known) for each in found.waiters),
        fence=found.fence,
        permits=permits,
        used=None if permits is None else sum(each.permits or 0 for each in holders),
    )


def _shared(entry: re.Match[bytes] | None) -> dict[str, Any]:
    """The attributes of somebody who is, or wants to be, one of several holders."""
    mode, permits = (None, None) if entry is None else entry.group(2, 3)
    return {"mode": _MODES.get(mode or b""), "permits": None if permits is None else int(permits)}


def _holder(key: bytes, token: bytes, left: float, known: _Known) -> Holder:
    ours, at = _TOKEN.fullmatch(token), (key, secret_of(token))
    lease = known.leases.get(at)
    return Holder(
        owner=None if lease is None else lease.owner,
        since=known.since.get(at),
        left=None if left == math.inf else left,
        depth=None if lease is None else lease.depth,
        kept=token.startswith(commands.KEPT_PREFIX[:2]) and ours is not None,
        **_shared(ours),
        **known.about(None if ours is None else ours[1]),
    )


def _waiter(channel: bytes, entry: bytes, known: _Known) -> QueuedWaiter:
    ours = _CHANNEL.match(channel)
    return QueuedWaiter(**_shared(_TOKEN.fullmatch(entry)), **known.about(None if ours is None else ours[1]))
