"""Law: what moves the end of a lease, and questions that change nothing. As `_law.py`, of which it is a part.

A lease never claims more than the server granted: until an extension is answered the earlier end holds, of two at once
the earlier one, and what is sent later never comes behind one that nobody waited for. Never here: sockets, asyncio,
threads, sleep.
"""

from __future__ import annotations

import enum
import math

from fastlock import _errors as errors
from fastlock._fork import at_fork
from fastlock._protocol import commands
from fastlock._protocol.commands import Opcode
from fastlock._protocol.lease import ENDED, Lease
from fastlock._protocol.retry import RetryState, request, resolve, with_undo
from fastlock._protocol.steps import Clock, Command, Steps, Undo


class Outcome(enum.Enum):
    """What became of an extension."""

    MOVED = enum.auto()
    LOST = enum.auto()  # the lease is not the caller's any more, as is found now
    GONE = enum.auto()  # nor is it here, as is known: it was let go of, or a release of it is under way
    ENDLESS = enum.auto()  # it has no end, and is left so


class _Extension:
    """An extension that has not ended. Of two at once nobody knows which one the server carries out last; and while one
    is under way the lease passes to nobody, for whom it would be carried out."""

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.alone = True
        lease._extensions += 1  # before anybody looks whether it was let go of
        _UNDER_WAY.append(self)  # first: of two that begin at once one sees the other
        for other in tuple(_UNDER_WAY):
            if other.lease is lease and other is not self:
                self.alone = other.alone = False

    def to(self, end: float) -> None:
        """The lease ends then; beside another, not later than that one says. If it was not let go of: between that look
        and the change no call is made, in which another thread could do so."""
        lease, alone = self.lease, self.alone
        if lease._deadline != ENDED and (alone or end < lease._deadline):
            lease._deadline = end

    def end(self) -> None:
        """It is not under way any more."""
        _UNDER_WAY.remove(self)
        self.lease._extensions -= 1


_UNDER_WAY: list[_Extension] = []  # few: one for each thread or task that extends a lease now
at_fork(_UNDER_WAY.clear)


def set_expiry(key: bytes, token: bytes, ms: int, clock: Clock, lease: Lease | None = None) -> Steps:
    """A new lease of `ms`. Returns when it was sent, None: not the caller's."""
    ask = Command(Opcode.EXTEND, key, token, ms)
    if lease is not None:
        ask.stale, lease._stale_sessions = lease._stale_sessions, ()
    steps = _extended(ask, RetryState(clock))
    answer = yield from with_undo(steps, lambda: _given_up(ask, lease), lambda: _under_way(ask, lease))
    return ask.sent if answer == b"OK" or answer == 1 else None


def _extended(ask: Command, retry: RetryState) -> Steps:
    answer = yield ask
    if answer == b"OK" or answer == 1:
        return answer
    answer = yield from resolve(ask, answer, retry)
    if answer is None and commands.can_be_marked(ask.token):  # somebody waits, or it is not the caller's
        ask.opcode = Opcode.EXTEND_SCRIPT
        try:
            answer = yield from resolve(ask, (yield ask), retry)
        except errors.ResponseError as error:
            if not errors.is_forbidden(error):
                raise
            return (yield from _extended_as_it_stands(ask, retry))
    return answer


def _extended_as_it_stands(ask: Command, retry: RetryState) -> Steps:
    """By a user who may not run scripts: marked once, the token stays so."""
    held = yield from request(Command(Opcode.GET, ask.key), retry)
    if not commands.token_matches(held, ask.token):
        return None
    ask.opcode, ask.token = Opcode.EXTEND, held
    return (yield from request(ask, retry))


def _given_up(ask: Command, lease: Lease | None) -> Undo | None:
    """An extension that was sent must not shorten or prolong the lease later."""
    if not ask.stale:
        return None
    if lease is not None:
        lease._stale_sessions = ask.stale
        lease._token_read = True  # nor the lease of another caller, to whom it would be handed over
    return Undo([], [], ask.stale)


def _under_way(ask: Command, lease: Lease | None) -> Undo | None:
    """As `_given_up`, of a caller that is gone: the connection may have it still. The next extension goes over that one
    as well, or ends it."""
    left = _given_up(ask, lease)
    if not ask.sent or ask.connection is None or ask.connection.session is None:
        return left
    if lease is not None:
        lease._stale_sessions, lease._token_read = (*ask.stale, ask.connection.session), True
    left = left or Undo([], [])
    left.connection = ask.connection
    return left


def extend(lease: Lease, ms: int, replace: bool, clock: Clock, anew: bool = False) -> Steps:
    """Move the end of a lease: to `ms` from now, or `ms` further, or earlier if that is below 0; never into the past.
    Returns an Outcome. `anew`: gives one without end an end.

    "Further" is sent as an end too, counted from the lease as this process knows it, so that asking again after a lost
    reply does not add twice. Until the server answered, the earlier of the two ends holds.
    """
    move = _Extension(lease)
    try:
        if not anew:
            left = yield from _left(lease, replace, clock)
            if left is None:
                return Outcome.ENDLESS
            ms = max(1, ms if replace else ms + left)
        if lease._deadline == ENDED:  # it may be another's by now, by the same token
            return Outcome.GONE
        return (yield from _moved(lease, ms, clock, move))
    finally:
        move.end()


def _moved(lease: Lease, ms: int, clock: Clock, move: _Extension) -> Steps:
    if lease._deadline == math.inf:  # no other may get it who wants an end: until the server answered it may have none
        lease._token_read = True
    end = clock() + ms / 1000
    try:
        lease._shorten(end)
        sent = yield from set_expiry(lease._key, lease._raw_token, ms, clock, lease)
    except BaseException:
        lease._shorten(end)
        raise
    if sent is None:
        if lease._releasing or lease._deadline == ENDED:
            lease._shorten(clock())  # and no more: the release tells what it finds
            return Outcome.GONE
        lease._deadline = ENDED
        return Outcome.LOST
    move.to(sent + ms / 1000)
    if lease._deadline == ENDED:  # it was let go of meanwhile
        return Outcome.GONE
    # As with an acquire, what is over when the reply comes does not count
    return Outcome.MOVED if clock() < lease._deadline else Outcome.LOST


def _left(lease: Lease, replace: bool, clock: Clock) -> Steps:
    """Milliseconds until a lease ends, if they count; None: it has no end. The server is asked about what this process
    does not know: a token from elsewhere, a lease that the server lets live a moment longer, or one without end, to
    which somebody may have given one."""
    left = lease.remaining
    if 0 < left < math.inf:
        return int(left * 1000)
    endless = lease._expiry_unknown or left == math.inf
    if replace and not endless:
        return 0
    found = yield from inspect(Opcode.PTTL, lease._key, clock)
    return None if endless and found == -1 else max(0, found)


def inspect(opcode: int, key: bytes, clock: Clock) -> Steps:
    """Ask a question that changes nothing. Returns the reply."""
    ask = Command(opcode, key)
    return (yield from request(ask, RetryState(clock)))
