"""Law: what moves the end of a lease, and questions that change nothing. As `_law.py`, of which it is a part.

A lease never claims more than the server granted: until an extension is answered the earlier end holds, of two at once
the earlier one, and what is sent later never comes behind one that nobody waited for. Never here: sockets, asyncio,
threads, sleep.
"""

from __future__ import annotations

import math

from fastlock import _commands as say
from fastlock import _errors as errors
from fastlock._fork import at_fork
from fastlock._lease import ENDED, Lease
from fastlock._steps import Ask, Clock, Steps, Trial, Undo, or_undo, settle, settled


class _Move:
    """An extension that has not ended. Of two at once nobody knows which one the server carries out last."""

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.alone = True
        _MOVES.append(self)  # first: of two that begin at once one sees the other
        for other in tuple(_MOVES):
            if other.lease is lease and other is not self:
                self.alone = other.alone = False

    def to(self, end: float) -> None:
        """The lease ends then; beside another, not later than that one says."""
        self.lease.deadline = end if self.alone else min(self.lease.deadline, end)


_MOVES: list[_Move] = []  # few: one for each thread or task that extends a lease now
at_fork(_MOVES.clear)


def extend(key: bytes, token: bytes, ms: int, clock: Clock, lease: Lease | None = None) -> Steps:
    """A new lease of `ms`. Returns when it was sent, None: not the caller's."""
    ask = Ask(say.EXTEND, key, token, ms)
    if lease is not None:
        ask.stale, lease.stale = lease.stale, ()
    steps = _extended(ask, Trial(clock))
    answer = yield from or_undo(steps, lambda: _given_up(ask, lease), lambda: _under_way(ask, lease))
    return ask.sent if answer == b"OK" or answer == 1 else None


def _extended(ask: Ask, trial: Trial) -> Steps:
    answer = yield ask
    if answer == b"OK" or answer == 1:
        return answer
    answer = yield from settle(ask, answer, trial)
    if answer is None and say.markable(ask.token):  # somebody waits, or it is not the caller's
        ask.verb = say.EXTEND_SCRIPT
        try:
            answer = yield from settle(ask, (yield ask), trial)
        except errors.ResponseError as error:
            if not errors.forbids(error):
                raise
            return (yield from _extended_as_it_stands(ask, trial))
    return answer


def _extended_as_it_stands(ask: Ask, trial: Trial) -> Steps:
    """By a user who may not run scripts: marked once, the token stays so."""
    held = yield from settled(Ask(say.GET, ask.key), trial)
    if not say.proves(held, ask.token):
        return None
    ask.verb, ask.token = say.EXTEND, held
    return (yield from settled(ask, trial))


def _given_up(ask: Ask, lease: Lease | None) -> Undo | None:
    """An extension that was sent must not shorten or prolong the lease later."""
    if not ask.stale:
        return None
    if lease is not None:
        lease.stale, lease.exposed = ask.stale, True  # nor that of another caller, to whom it would pass on
    return Undo([], [], ask.stale)


def _under_way(ask: Ask, lease: Lease | None) -> Undo | None:
    """As `_given_up`, of a caller that is gone: the connection may have it still. The next extension goes over that one
    as well, or ends it."""
    left = _given_up(ask, lease)
    if not ask.sent or ask.link is None or ask.link.session is None:
        return left
    if lease is not None:
        lease.stale, lease.exposed = (*ask.stale, ask.link.session), True
    left = left or Undo([], [])
    left.link = ask.link
    return left


def prolong(lease: Lease, ms: int, replace: bool, clock: Clock, anew: bool = False) -> Steps:
    """Move the end of a lease: to `ms` from now, or `ms` further, or earlier if that is below 0; never into the past.
    Returns whether it was the caller's; None: it has no end, and is left so. `anew`: gives it one.

    "Further" is sent as an end too, counted from the lease as this process knows it, so that asking again after a lost
    reply does not add twice. Until the server answered, the earlier of the two ends holds.
    """
    if not anew:
        left = yield from _left(lease, replace, clock)
        if left is None:
            return None
        ms = max(1, ms if replace else ms + left)
    if lease.deadline == ENDED:  # it may be another's by now, by the same token
        return False
    if lease.deadline == math.inf:  # no other may get it who wants an end: until the server answered it may have none
        lease.exposed = True
    move = _Move(lease)
    end = clock() + ms / 1000
    try:
        lease.deadline = min(lease.deadline, end)
        sent = yield from extend(lease.key, lease.proof, ms, clock, lease)
        if sent is None or lease.deadline == ENDED:  # or it was let go of meanwhile
            lease.deadline = ENDED
            return False
        move.to(sent + ms / 1000)
    except BaseException:
        lease.deadline = min(lease.deadline, end)
        raise
    finally:
        _MOVES.remove(move)
    return clock() < lease.deadline  # as with an acquire, what is over when the reply comes does not count


def _left(lease: Lease, replace: bool, clock: Clock) -> Steps:
    """Milliseconds until a lease ends, if they count; None: it has no end. The server is asked about what this process
    does not know: a token from elsewhere, a lease that the server lets live a moment longer, or one without end, to
    which somebody may have given one."""
    left = lease.remaining
    if 0 < left < math.inf:
        return int(left * 1000)
    endless = lease.foreign or left == math.inf
    if replace and not endless:
        return 0
    found = yield from inspect(say.PTTL, lease.key, clock)
    return None if endless and found == -1 else max(0, found)


def inspect(verb: int, key: bytes, clock: Clock) -> Steps:
    """Ask a question that changes nothing. Returns the reply."""
    ask = Ask(verb, key)
    return (yield from settled(ask, Trial(clock)))
