"""How several names are acquired as one, all or none, and what a lease of them all is.

One script acquires all of them, or says which one somebody else holds. The acquire then waits for that one in its
queue, as any waiter does, and goes on with the rest. What it holds while it waits sorts before what it waits for, so no
circle of acquires can wait for each other; and what it has waited for is given up once at most, so each of them comes
to an end. Never here: sockets, asyncio, threads, sleep.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastlock import _errors as errors
from fastlock._protocol import commands, describe
from fastlock._protocol.acquire import Acquire, queue_of
from fastlock._protocol.extension import Move, Outcome, shorten, was_told_lost
from fastlock._protocol.lease import ENDED, Lease, Lost, new_token
from fastlock._protocol.local_queue import SHORTEST_SLEEP, LocalQueues
from fastlock._protocol.renewal import CHUNK, Renewal, RenewalSettings, RenewMany, send_renewals
from fastlock._protocol.retry import RetryState, limited, run_scripts, with_undo
from fastlock._protocol.steps import Answer, Clock, Operation, RawCommands, Sleep, Steps, lease_end
from fastlock._protocol.undo import Undo
from fastlock._protocol.waiters import Waiter

MAX_NAMES = 1000  # of one multi lock: the server does nothing else while it acquires them (1.6 ms)
EXTEND_PART = 1 / 3  # of a lease's time, after which it is extended while its holder waits for another name
SHOWN_DIGITS = 16  # of a holder's token: half of them, which proves nothing


@dataclass(frozen=True, slots=True)
class Blocked:
    """Why several names were not acquired: the first that somebody else holds (`name`, as the caller wrote it), the
    beginning of its `holder`'s token (None: not one of fastlock's), and for how many seconds still (`time_left`; None:
    without end), unless it is released or extended."""

    name: Any
    holder: str | None
    time_left: float | None


class AcquireAll(Operation["list[Lease] | None"]):
    """Acquire several names, all or none, waiting as long as the settings allow. It takes checked values only, and the
    names in the order of their keys; `ms` 0 means leases without end.

    The outcome is a list of leases, or None: `blocked` says why. Raises what `Acquire` does.
    """

    request: TryAll
    blocking = False
    polls = False  # whether it may not use the queue
    sleep = 0.1  # seconds between two tries where it polls
    blocked: Blocked | None = None
    waited = False  # whether it got a name after a wait: from then on it holds all names before that it waits for
    outcome_unknown = False  # whether a try's reply was lost once: any of the names may be held
    polled = False  # whether it has waited without a queue
    late_grants = 0
    inner: Acquire | None = None  # the acquire of the name that it waits for
    extend_at = math.inf  # when what is held is to be extended

    def __init__(self, names: list[Any], keys: list[bytes], ms: int, apart: bool = False) -> None:
        self.names = names
        self.keys = keys
        self.ms = ms
        self.apart = apart  # whether each name needs a script of its own, as their hash slots differ
        self.tokens = [new_token()] * len(keys)
        self.held = [False] * len(keys)  # which of them are held, as far as is known
        self.request = TryAll(self)

    @property
    def until(self) -> float | None:
        """When the caller stops waiting; None: it has no deadline."""
        return self.request.until

    @until.setter
    def until(self, until: float | None) -> None:
        self.request.until = until

    def granted(self, answer: object, now: float) -> list[Lease] | None:
        """The leases that the answer to the first try grants; None: it says anything else, or they have ended."""
        end = lease_end(self.request.sent, self.ms)
        if self.apart or type(answer) is not list or answer != [[0, None, 0]] or now >= end:
            return None
        return [Lease(*each, end) for each in zip(self.names, self.keys, self.tokens, strict=True)]

    def continue_from(self, answer: object, clock: Clock) -> Steps[list[Lease] | None]:
        """Go on from the first answer to the outcome."""
        leases = yield from with_undo(self._try_until_granted(answer, clock), self._left)
        if leases is None and (left := self._left()) is not None:
            yield left
        return leases

    def abandon(self, queues: LocalQueues, clock: Clock) -> list[Undo]:
        """End the acquire of a caller that was interrupted, as `Acquire.abandon` does."""
        undos = [] if self.inner is None else self.inner.abandon(queues, clock)
        if self.request.sent:
            undos.append(Undo(self.keys, list(self.tokens), self.request.stale, self.request.connection))
        return undos

    def _left(self) -> Undo | None:
        """The undo of what an acquire that failed may hold; None: it holds nothing."""
        return self.request.undo() if self.outcome_unknown or any(self.held) else None

    def _try_until_granted(self, answer: object, clock: Clock) -> Steps[list[Lease] | None]:
        while True:
            replies = yield from self._replies(answer, clock)
            if replies is Answer.DEADLINE_EXCEEDED:
                return None  # whoever gave this answer has undone the try
            at = self._judge(replies, clock)
            if at is not None and self.blocked is None:
                raise (yield from describe.wrong_kind(self.names[at], self.keys[at], clock))
            if at is None and clock() < (end := lease_end(self.request.sent, self.ms)):
                return self._leases(end)
            # Granted, but the leases ended before the reply came: no success, and undone before the next try
            self.late_grants += at is None
            yield from self._give_up(0 if at is None or self.polls else at)
            if not self.blocking or self._late(clock):
                return None
            if at is not None and self.polls:
                yield from self._sleep_before_try(clock)
            elif at is not None and not (yield from self._wait_for(at, clock)) and self._late(clock, 0.0):
                return None
            self.request.write(self.waited)
            answer = yield self.request

    def _leases(self, end: float) -> list[Lease]:
        leases = [Lease(*each, end) for each in zip(self.names, self.keys, self.tokens, strict=True)]
        for lease in leases:
            lease._since = self.request.sent
        return leases

    def _replies(self, answer: object, clock: Clock) -> Steps[Any]:
        """From the answer to a try to the replies to its scripts: one for all names, or one for each of them."""
        retry = RetryState(clock)
        try:
            return (yield from run_scripts(self.request, answer, _is_reply, retry, len(self.request.calls)))
        except errors.RedisError as error:
            if not (errors.is_own(error) and errors.is_cross_slot(error)) or self.apart:
                raise
        finally:
            self.outcome_unknown |= retry.outcome_unknown
        self.apart = True
        self.request.write(self.waited)
        return (yield from self._replies((yield self.request), clock))

    def _judge(self, replies: list[Any], clock: Clock) -> int | None:
        """Note what the replies say is held. Returns the index of the first name that somebody else holds, or None."""
        indexes = [i if self.apart else reply[0] - 1 for i, reply in enumerate(replies) if reply[0]]
        at = indexes[0] if indexes else None
        if self.apart:
            self.held = [not reply[0] for reply in replies]
        elif at is None or self.waited:
            last = len(self.keys) if at is None else at
            # Of those behind it, one may still be held: the one it was granted after its first wait
            self.held = [i < last or (i > last and held) for i, held in enumerate(self.held)]
        self.extend_at = self.request.sent + self.ms / 1000 * EXTEND_PART if self.ms else math.inf
        self.blocked = None
        if at is not None:
            _, holder, left = replies[at if self.apart else 0]
            if holder is not None:  # else its key holds something that is no plain lock
                self.blocked = Blocked(self.names[at], shown(holder), None if left < 0 else left / 1000)
        return at

    def _give_up(self, at: int) -> Steps[None]:
        """Release what is held from this index on: nobody may hold a name that sorts after the one he waits for. An
        undo that is late must not release what is acquired later, so that gets another token."""
        given_up = [i for i, held in enumerate(self.held) if held and i >= at]
        if given_up:
            keys, tokens = [self.keys[i] for i in given_up], [self.tokens[i] for i in given_up]
            yield Undo(keys, tokens, self.request.stale, self.request.connection)
            fresh = new_token()
            for i in given_up:
                self.tokens[i], self.held[i] = fresh, False

    def _sleep_before_try(self, clock: Clock) -> Steps[None]:
        """Sleep until the lease of the name that is held ends, or `sleep` seconds have passed, whichever is first."""
        self.polled = True
        assert self.blocked is not None, "a name is held"
        pause = self.sleep if self.blocked.time_left is None else min(self.sleep, self.blocked.time_left)
        yield Sleep(limited(max(pause, SHORTEST_SLEEP), self.until, clock), held=True)

    def _wait_for(self, at: int, clock: Clock) -> Steps[bool]:
        """Wait for one name as a plain acquire does. Returns whether it was granted within the caller's time."""
        self.inner = inner = AcquireOne(self, at)
        try:
            lease = yield from inner.continue_from(Answer.WAIT_LOCALLY, clock)
        except errors.ResponseError as refusal:
            error = yield from describe.explain_name(refusal, self.names[at], self.keys[at], clock)
            if error is refusal:
                raise
            raise error from None
        self.late_grants += inner.late_grants
        self.polled |= inner.polled
        if lease is None:
            self.tokens[at] = new_token()  # its entry leaves the queue with a command that may be late
            return False
        self.tokens[at], self.held[at], self.waited = lease._raw_token, True, True
        self.inner = None
        return True

    def extension_time(self) -> float:
        """When what is held is to be extended; infinite, if nothing is."""
        return self.extend_at if any(self.held) else math.inf

    def extend_held(self, clock: Clock) -> Steps[None]:
        """Extend the leases that are held, if it is time for that. One that was lost is acquired again later."""
        if clock() < self.extension_time():
            return
        at = [i for i, held in enumerate(self.held) if held]
        request = RawCommands(
            [
                commands.renew_many([self.keys[i] for i in some], [self.tokens[i] for i in some], [self.ms] * len(some))
                for some in parts(at, self.apart)
            ]
        )
        request.until = self.until
        replies = yield from run_scripts(request, (yield request), _are_numbers, RetryState(clock), len(request.calls))
        if replies is not Answer.DEADLINE_EXCEEDED:
            for i, reply in zip(at, [each for part in replies for each in part], strict=True):
                self.held[i] = bool(reply)
        self.extend_at = request.sent + self.ms / 1000 * EXTEND_PART

    def _late(self, clock: Clock, before: float = 0.01) -> bool:
        """Whether there is no time for another try."""
        return self.until is not None and clock() >= self.until - before


class TryAll(RawCommands):
    """Request: acquire all names of an acquire, or none; sent again it is changed to what that holds by then."""

    settles = True

    def __init__(self, whole: AcquireAll) -> None:
        self.whole = whole
        self.write(False)

    def write(self, partly: bool) -> None:
        """Make the calls. partly: where a name is held by others, acquire those before it all the same."""
        keys, tokens, ms = self.whole.keys, self.whole.tokens, self.whole.ms
        if self.whole.apart:
            pairs = zip(keys, tokens, strict=True)
            super().__init__([commands.acquire_all([key], [token], ms, False) for key, token in pairs])
        else:
            super().__init__([commands.acquire_all(keys, tokens, ms, partly)])

    def acquires(self) -> Sequence[bytes]:
        return self.whole.keys

    def undo(self) -> Undo:
        return Undo(self.whole.keys, list(self.whole.tokens), self.stale)


class AcquireOne(Acquire):
    """The acquire of the one name that several are waiting for. It has an entry of its own in the server's queue."""

    blocking = True
    alone = True

    def __init__(self, whole: AcquireAll, at: int) -> None:
        super().__init__(whole.names[at], whole.keys[at], whole.tokens[at], whole.ms)
        self.whole = whole
        self.until, self.sleep = whole.until, whole.sleep

    def _enter(self, waiter: Waiter, request: RawCommands, answer: object, clock: Clock) -> Steps[None]:
        yield from super()._enter(waiter, request, answer, clock)
        if waiter.lease is None:
            yield from self.whole.extend_held(clock)
            queue = queue_of(waiter)
            queue.recheck_at = min(queue.recheck_at, self.whole.extension_time())

    def _sleep_before_try(self, clock: Clock) -> Steps[None]:
        yield from self.whole.extend_held(clock)
        self.sleep = min(self.whole.sleep, max(0.0, self.whole.extension_time() - clock()))
        yield from super()._sleep_before_try(clock)


def parts(items: list[Any], apart: bool) -> list[list[Any]]:
    """Items in lists of CHUNK, for one script each; of one, where their hash slots differ."""
    size = 1 if apart else CHUNK
    return [items[i : i + size] for i in range(0, len(items), size)]


def shown(token: bytes) -> str | None:
    """What may be shown of a holder's token: the whole of it proves ownership. None: it is not one of fastlock's."""
    plain = commands.as_plain(token)
    if plain is None:
        return None
    return plain[len(commands.PLAIN_PREFIX) :][:SHOWN_DIGITS].decode("ascii", "replace")


def _is_reply(reply: object) -> bool:
    if type(reply) is not list or len(reply) != 3 or type(reply[0]) is not int or type(reply[2]) is not int:
        return False
    return reply[1] is None or type(reply[1]) is bytes


def _are_numbers(reply: object) -> bool:
    return type(reply) is list and all(type(each) is int for each in reply)


# ------------------------------------------------------------------------------------------------------------ the lease


class MultiLease:
    """What one acquisition of several names owns: a lease of each, in the order in which the names were given. If one
    of them is lost, so is the whole.

    `remaining` and `valid` need no I/O and may be asked often. It is not shared with a forked child.
    """

    __slots__ = ("__weakref__", "_event", "_untold", "leases")
    fence: None = None  # a number for each name would be none for the whole: fences are for plain locks

    def __init__(self, leases: tuple[Lease, ...]) -> None:
        self.leases = leases
        self._event: Lost | None = None  # `lost`, once somebody has asked for it
        self._untold = [True]

    @property
    def names(self) -> tuple[Any, ...]:
        """The names as the caller wrote them."""
        return tuple(lease.name for lease in self.leases)

    @property
    def remaining(self) -> float:
        """Seconds until the first of the leases ends, as of `Lease.remaining`."""
        return min(lease.remaining for lease in self.leases)

    @property
    def valid(self) -> bool:
        """Whether nobody else can have any of the names yet, as of `Lease.valid`."""
        return all(lease.valid for lease in self.leases)

    @property
    def inherited(self) -> bool:
        """Whether this is a forked child's copy of its parent's lease: it owns nothing."""
        return any(lease.inherited for lease in self.leases)

    @property
    def lost(self) -> Lost:
        """The event of a renewed lease of which a name was lost, as of `Lease.lost`."""
        if self._event is None:
            renewals = [lease._renewal for lease in self.leases]
            if None in renewals:
                return self.leases[0].lost  # which raises
            event: Lost = renewals[0].host.new_event(_AnyOf(renewals))
            for renewal in renewals:
                renewal.event = event
            self._event = event
        return self._event

    @property
    def _ended(self) -> bool:
        """Whether it was released, or found lost, as a whole, and this was reported."""
        return all(lease._deadline == ENDED and not lease._unreported for lease in self.leases)

    def renewed_by(self, settings: RenewalSettings) -> RenewalSettings:
        """The settings by which each of the leases is renewed: the loss of the first is that of all."""
        return replace(settings, on_lost=_loss_of(weakref.ref(self), settings.on_lost))

    def _note_loss(self, lost: Lease) -> bool:
        """Note that a name was lost: the others are not renewed any more. Returns whether it is the first."""
        try:
            self._untold.pop()  # one thread only gets it
        except IndexError:
            return False
        for lease in self.leases:
            if lease is not lost and lease._renewal is not None:
                lease._renewal.until, lease._renewal.body = -math.inf, None
        return True

    def __reduce__(self) -> tuple[type[MultiLease], tuple[tuple[Lease, ...]]]:
        return MultiLease, (self.leases,)

    def __repr__(self) -> str:
        return f"<MultiLease of {len(self.leases)} names: {', '.join(map(repr, self.leases[:3]))}>"


class _AnyOf:
    """The renewals of several leases as one, for the event of their loss. It keeps none of the leases alive."""

    def __init__(self, renewals: list[Renewal]) -> None:
        self.renewals = renewals

    def is_lost(self) -> bool:
        return any(renewal.is_lost() for renewal in self.renewals)

    def lost_from(self) -> float:
        return min(renewal.lost_from() for renewal in self.renewals)


def _loss_of(whole: weakref.ref[MultiLease], on_lost: Callable[[Any], object] | None) -> Callable[[Lease], object]:
    """The `on_lost` of each lease of a whole, which is told once. It does not keep that alive."""

    def tell(lease: Lease) -> object:
        group = whole()
        if group is None or not group._note_loss(lease) or on_lost is None:
            return None
        return on_lost(group)

    return tell


def extend_all(leases: tuple[Lease, ...], ms: int, to: bool, anew: bool, clock: Clock, apart: bool) -> Steps[Outcome]:
    """Move the end of several leases by `ms`, or `to` so many milliseconds from now, in one flush. `anew`: those
    without end get one. Returns the outcome, as of `extension.extend`: LOST, if any was found lost just now."""
    moves = [Move(lease) for lease in leases]
    try:
        left = 0.0 if anew else min(lease._time_left() for lease in leases)
        if left == math.inf:
            return Outcome.ENDLESS
        if any(lease._deadline == ENDED or lease._releasing or was_told_lost(lease) for lease in leases):
            return Outcome.GONE
        ms = max(1, ms if to else ms + int(left * 1000))
        return (yield from _moved(leases, ms, clock, moves, apart))
    finally:
        for move in moves:
            move.end()


def _moved(leases: tuple[Lease, ...], ms: int, clock: Clock, moves: list[Move], apart: bool) -> Steps[Outcome]:
    end, answered = clock() + ms / 1000, False
    request = RenewMany([(lease, ms) for lease in leases], 1 if apart else CHUNK)
    for lease in leases:
        request.stale = (*request.stale, *(each for each in lease._stale_sessions if each not in request.stale))
        lease._stale_sessions = ()
        shorten(lease, end, clock())
    try:
        replies = yield from send_renewals(request, RetryState(clock))
        answered = True
    finally:
        for lease in leases if not answered else ():
            lease._shorten(end)
            request.note_unanswered(lease)
    lost = False
    for lease, move, reply in zip(leases, moves, replies or [], strict=True):
        if reply:
            move.to(request.sent + ms / 1000)
        elif lease._deadline != ENDED and not lease._releasing:
            lease._found_lost(clock())
            lost = True
    if lost:
        return Outcome.LOST
    if any(lease._deadline == ENDED or was_told_lost(lease) for lease in leases):  # released meanwhile, or told lost
        return Outcome.GONE
    return Outcome.MOVED if clock() < min(lease._deadline for lease in leases) else Outcome.LOST


def ask_each(command: bytes, keys: list[bytes], clock: Clock) -> Steps[list[Any]]:
    """The replies to a command that only reads, for each of these keys, asked in one flush. None: the key holds
    something else than the command reads."""
    request = RawCommands([(command, key) for key in keys])
    replies = yield from run_scripts(request, (yield request), _is_plain, RetryState(clock), len(keys))
    return [None if isinstance(reply, Exception) else reply for reply in replies]


def _is_plain(reply: object) -> bool:
    if isinstance(reply, Exception):
        return errors.text_of(reply).startswith("WRONGTYPE")
    return reply is None or type(reply) in (int, bytes)
