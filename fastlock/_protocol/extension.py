"""How the end of a lease is moved (extension), and the questions to the server that change nothing.

A lease never claims more than the server granted: until an extension is answered the earlier of the two ends holds; of
two extensions at once the earlier end holds; and an extension whose caller gave up is never executed after a later one.
Never here: sockets, asyncio, threads, sleep.
"""

from __future__ import annotations

import enum
import math
from typing import Any

from fastlock import _errors as errors
from fastlock._protocol import commands
from fastlock._protocol.commands import Opcode
from fastlock._protocol.lease import ENDED, Lease
from fastlock._protocol.retry import RetryState, execute, resolve, run_script, with_undo
from fastlock._protocol.steps import Clock, Command, RawCommands, Request, Steps
from fastlock._protocol.undo import Undo


class Outcome(enum.Enum):
    """What became of an extension."""

    MOVED = enum.auto()
    LOST = enum.auto()  # the lease was just found to be not the caller's any more
    GONE = enum.auto()  # the lease was known to be no longer the caller's: released, or a release of it is under way
    ENDLESS = enum.auto()  # the lease has no end, and is left so


class Move:
    """A move of a lease's end that is under way. Of two at once nobody knows which one the server executes last.
    Meanwhile the lease is not handed over locally: the move would be executed for the next holder."""

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        # Before anybody checks whether the lease was released; no call, in which another thread could begin a move
        lease._extensions += 1
        lease._extensions_begun += 1
        self.number = lease._extensions_begun
        self.alone = lease._extensions == 1

    def to(self, end: float) -> None:
        """Set the lease's end; if another move was under way, only to an earlier time. A released lease stays so, and
        one that was told lost: no call, in which another thread could do that, is made between the check and the
        change."""
        lease, renewal = self.lease, self.lease._renewal
        alone = self.alone and lease._extensions_begun == self.number
        kept = lease._deadline != ENDED and (renewal is None or not renewal.lost)
        if kept and (alone or end < lease._deadline):
            lease._deadline = end

    def end(self) -> None:
        """Note that this move is not under way any more."""
        self.lease._extensions -= 1


class Look(RawCommands):
    """Request: a look, behind the one that was posted."""

    needs_push = True


def confirm(lease: Lease, clock: Clock) -> Steps[None]:
    """Wait until a believed grant is confirmed, before the end of its lease is moved."""
    confirmation = lease._confirmation
    if confirmation is None:
        return
    request, began = Look([confirmation.undo().call]), clock()
    reply = yield from run_script(request, (yield request), commands.is_enter_reply, RetryState(clock))
    # The first look that was executed has set the end, which may be the one that was posted, or one of an earlier try
    confirmation.answered(reply, min(confirmation.sent or began, began))
    lease._confirmation = None


def shorten(lease: Lease, end: float, time: float) -> None:
    """Let a lease end then, if not before: until the server has replied, the earlier of the two ends holds."""
    if end < lease._deadline:
        lease._shorten(end)
        if lease._renewal is not None:
            lease._renewal.ends_earlier(lease, time)


def was_told_lost(lease: Lease) -> bool:
    """Whether this lease was renewed, and its holder was told that it is lost, which its end does not show: that is
    told a moment before."""
    return lease._renewal is not None and lease._renewal.lost


def set_expiry(key: bytes, token: bytes, ms: int, clock: Clock, lease: Lease | None = None) -> Steps[float | None]:
    """Have the server end the lease `ms` milliseconds from now. Returns the time when that was sent, or None: the name
    is not held by this token."""
    request: Command | RawCommands = Command(Opcode.EXTEND, key, token, ms)
    if commands.is_shared(token):
        request = RawCommands([commands.renew_many([key], [token], [ms])])
    if lease is not None:
        request.stale, lease._stale_sessions = lease._stale_sessions, ()
    retry = RetryState(clock)
    steps = _extended(request, retry) if isinstance(request, Command) else _extended_by_script(request, retry)
    answer = yield from with_undo(steps, lambda: _given_up(request, lease), lambda: _under_way(request, lease))
    return request.sent if answer == b"OK" or answer == 1 else None


def _extended(request: Command, retry: RetryState) -> Steps[object]:
    """Send an extension, as a native command first, and resolve its answer."""
    answer = yield request
    if answer == b"OK" or answer == 1:
        return answer
    answer = yield from resolve(request, answer, retry)
    if answer is None and commands.can_be_contended(request.token):
        # The token is contended, or the lock is not the caller's
        request.opcode = Opcode.EXTEND_SCRIPT
        try:
            answer = yield from resolve(request, (yield request), retry)
        except errors.ResponseError as error:
            if not errors.is_forbidden(error):
                raise
            return (yield from _extended_as_it_stands(request, retry))
    return answer


def _extended_by_script(request: RawCommands, retry: RetryState) -> Steps[object]:
    """As `_extended`, of a name that several may hold."""
    reply = yield from run_script(request, (yield request), _is_one_number, retry)
    return reply[0] if isinstance(reply, list) else reply


def _is_one_number(reply: object) -> bool:
    return type(reply) is list and len(reply) == 1 and type(reply[0]) is int


def _extended_as_it_stands(request: Command, retry: RetryState) -> Steps[object]:
    """Extend for a user that may not run scripts, by the token as it is on the server: once contended, it stays so."""
    held = yield from execute(Command(Opcode.GET, request.key), retry)
    if not commands.token_matches(held, request.token):
        return None
    request.opcode, request.token = Opcode.EXTEND, held
    return (yield from execute(request, retry))


def _given_up(request: Request, lease: Lease | None) -> Undo | None:
    """The undo of an extension that failed: it must not be executed later, and shorten or extend the lease then."""
    if not request.stale:
        return None
    if lease is not None:
        lease._stale_sessions = request.stale
        lease._token_read = True  # nor may the lease be handed over, to a caller that the extension would hit
    return Undo([], [], request.stale)


def _under_way(request: Request, lease: Lease | None) -> Undo | None:
    """As `_given_up`, for a caller that is gone: the extension may still be in flight on its connection. The next
    extension goes over the same connection, or ends it first."""
    left = _given_up(request, lease)
    if not request.sent or request.connection is None or request.connection.session is None:
        return left
    if lease is not None:
        lease._stale_sessions, lease._token_read = (*request.stale, request.connection.session), True
    return Undo([], [], () if left is None else left.stale, request.connection)


def extend(lease: Lease, ms: int, replace: bool, clock: Clock, anew: bool = False) -> Steps[Outcome]:
    """Move the end of a lease: to `ms` from now (`replace`), or by `ms`, earlier if that is below 0; never into the
    past. Returns an Outcome. `anew`: a lease without end gets one.

    A move by `ms` is sent as an end too, counted from the lease as this process knows it, so that sending it again
    after a lost reply does not add twice. Until the server replied, the earlier of the two ends holds.
    """
    move = Move(lease)
    try:
        yield from confirm(lease, clock)
        if not anew:
            left = yield from _left(lease, replace, clock)
            if left is None:
                return Outcome.ENDLESS
            ms = max(1, ms if replace else ms + left)
        # Another may hold the name by now, by the same token; or a lease would come back that was told lost
        if lease._deadline == ENDED or was_told_lost(lease):
            return Outcome.GONE
        return (yield from _moved(lease, ms, clock, move))
    finally:
        move.end()


def _moved(lease: Lease, ms: int, clock: Clock, move: Move) -> Steps[Outcome]:
    # Until the server replied, the lease may still be without end: it may not be handed over to a waiter that wants one
    if lease._deadline == math.inf:
        lease._token_read = True
    end = clock() + ms / 1000
    try:
        shorten(lease, end, clock())
        sent = yield from set_expiry(lease._key, lease._raw_token, ms, clock, lease)
    except BaseException:
        lease._shorten(end)
        raise
    if sent is None:
        if lease._releasing or lease._deadline == ENDED:
            lease._shorten(clock())  # it is not counted as lost here: the release reports what it finds
            return Outcome.GONE
        lease._found_lost(clock())
        return Outcome.LOST
    move.to(sent + ms / 1000)
    if lease._deadline == ENDED or was_told_lost(lease):  # it was released meanwhile, or told lost
        return Outcome.GONE
    # As with an acquire, a lease that has ended when the reply comes does not count
    return Outcome.MOVED if clock() < lease._deadline else Outcome.LOST


def _left(lease: Lease, replace: bool, clock: Clock) -> Steps[int | None]:
    """Milliseconds until a lease ends, or 0 if the new end does not depend on them; None: the lease has no end. The
    server is asked where this process does not know: for a token from elsewhere, a lease that the server lets live a
    moment longer, or one without end, to which somebody may have given an end."""
    left = lease._time_left()
    if 0 < left < math.inf:
        return int(left * 1000)
    endless = lease._expiry_unknown or left == math.inf
    if replace and not endless:
        return 0
    if commands.is_shared(lease._raw_token):  # the key lives as long as others hold the name
        return None if endless else 0
    found = yield from inspect(Opcode.PTTL, lease._key, clock)
    return None if endless and found == -1 else max(0, found)


def inspect(opcode: int, key: bytes, clock: Clock) -> Steps[Any]:
    """Send a command that only reads the key. Returns the reply."""
    return (yield from execute(Command(opcode, key), RetryState(clock)))
