"""How a request gets a plain reply where its first answer was none: what is tried again, and for how long.

A request is sent again with the same token after its reply was lost, so that the server's reply says what became of it.
Never here: sockets, asyncio, threads, sleep.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

from fastlock import _errors as errors
from fastlock._protocol import commands
from fastlock._protocol.commands import Opcode
from fastlock._protocol.handshake import Purpose, Session
from fastlock._protocol.steps import (
    Answer,
    Clock,
    Command,
    ConnectionLost,
    GetSession,
    ProtocolViolation,
    RawCommands,
    Request,
    Sleep,
    Steps,
    backoff,
)
from fastlock._protocol.undo import RELOADS, Undo

T = TypeVar("T")


class RetryState:
    """The retries of one operation: what went wrong so far, and how much longer to try."""

    __slots__ = ("clock", "failures", "garbled", "give_up", "loads", "outcome_unknown", "unknown_since")

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.outcome_unknown = False  # whether a command with our token was sent and its reply lost
        self.unknown_since = math.inf  # when the first such command was sent
        self.failures = self.loads = 0
        self.garbled = 0  # replies to this operation that made no sense; those to others do not count
        self.give_up = math.inf  # when the retry time is over

    def pause(self, lost: ConnectionLost, allowed_after_close: bool = False) -> float:
        """Seconds before the next connection. Raises the error when the retry time is over. allowed_after_close: as of
        a Request; that the client was closed meanwhile does not end the retries."""
        now = self.clock()
        self.outcome_unknown |= lost.sent
        self.failures += 1
        if self.failures == 1:
            self.give_up = now + lost.retry_for
        self.garbled += lost.own
        final = lost.final and not (allowed_after_close and isinstance(lost.error, errors.ClientClosedError))
        if final or self.garbled > 1 or (now >= self.give_up and self.failures > 1):
            raise errors.fresh_copy(lost.error)
        return 0.0 if self.failures == 1 else backoff(self.failures)

    def sleep(self, lost: ConnectionLost, request: Request) -> Sleep:
        """The step before a request is sent again. Raises what `pause` raises."""
        closed = request.allowed_after_close
        return Sleep(limited(self.pause(lost, closed), request.until, self.clock), allowed_after_close=closed)


def resolve(request: Request, answer: object, retry: RetryState) -> Steps[Any]:
    """From any answer to a plain reply: reconnect, load scripts, change to a template that the server knows, wait for a
    server that can execute nothing now.

    Returns a reply of the right shape, or DEADLINE_EXCEEDED. Raises the redis-py exception of an error reply, or of a
    connection that stays away.
    """
    while True:
        if isinstance(answer, ConnectionLost):
            if answer.session is not None and answer.session not in request.stale:
                request.stale = (*request.stale, answer.session)
            if answer.sent and not retry.outcome_unknown:
                retry.unknown_since = request.sent
            request.maybe_executed |= answer.sent
            yield retry.sleep(answer, request)
            if request.until is not None and retry.clock() >= request.until:
                raise errors.fresh_copy(answer.error)  # not "held by somebody else", which nobody knows
        elif isinstance(answer, Exception):
            opcode = request.opcode if isinstance(request, Command) else None
            if opcode in _COMPARES and errors.text_of(answer).startswith("WRONGTYPE"):
                return _COMPARES[opcode]  # the key holds something that is no lock at all, so the lock is not ours
            if errors.is_passing(answer):
                assert request.connection is not None, "the reply came over it"
                timeout = request.connection.reply_timeout
                answer = ConnectionLost(errors.from_reply(answer), timeout, sent=False)
                continue
            yield from _recover(request, answer, retry)
        elif answer is Answer.DEADLINE_EXCEEDED:
            return Answer.DEADLINE_EXCEEDED
        elif type(answer) in (_SHAPES[request.opcode] if isinstance(request, Command) else (list,)):
            request.stale = ()
            return answer
        else:
            answer = yield ProtocolViolation(request, answer)
            continue
        if request.until is not None and retry.clock() >= request.until:
            return Answer.DEADLINE_EXCEEDED
        answer = yield request


def execute(request: Request, retry: RetryState) -> Steps[Any]:
    """Send a request, and resolve its answer."""
    return (yield from resolve(request, (yield request), retry))


def run_script(request: Request, answer: object, good: Callable[[object], bool], retry: RetryState) -> Steps[Any]:
    """From the answer to the call of one script to a reply of the right shape. Returns the reply, or
    DEADLINE_EXCEEDED; raises what `resolve` raises."""
    replies = yield from run_scripts(request, answer, good, retry, 1)
    return replies if replies is Answer.DEADLINE_EXCEEDED else replies[0]


def run_scripts(
    request: Request, answer: object, good: Callable[[object], bool], retry: RetryState, count: int
) -> Steps[Any]:
    """As `run_script`, for the calls of `count` scripts, which are all sent again where one of them has to be. Returns
    the list of replies."""
    while type(answer) is not list or len(answer) != count or not all(map(good, answer)):
        if type(answer) is list:
            refusals = [each for each in answer if isinstance(each, Exception)]
            answer = refusals[0] if refusals else ("odd", answer)
        answer = yield from resolve(request, answer, retry)
        if answer is Answer.DEADLINE_EXCEEDED:
            return Answer.DEADLINE_EXCEEDED
    request.stale = ()
    return answer


def with_undo(
    steps: Steps[T], undo: Callable[[], Undo | None], gone: Callable[[], Undo | None] | None = None
) -> Steps[T]:
    """Carry out `steps`; if they fail, yield the undo that `undo` makes, or, if the caller is gone (cancelled,
    interrupted), the one that `gone` makes."""
    try:
        return (yield from steps)
    except GeneratorExit:  # nobody carries out these steps any more, so no undo can be sent
        raise
    except BaseException as error:
        if (left := (undo if gone is None or errors.is_own(error) else gone)()) is not None:
            yield left
        raise


_NULL = type(None)
# The types of a plain reply, by opcode
_SHAPES: dict[int, tuple[type, ...]] = {
    **dict.fromkeys((Opcode.ACQUIRE, Opcode.ACQUIRE_ENDLESS, Opcode.ACQUIRE_OR_RECALL), (_NULL, bytes)),
    **dict.fromkeys((Opcode.ACQUIRE_SCRIPT, Opcode.ACQUIRE_ENDLESS_SCRIPT), (_NULL, bytes)),
    **dict.fromkeys((Opcode.RELEASE, Opcode.RELEASE_SCRIPT, Opcode.EXTEND_SCRIPT, Opcode.PTTL, Opcode.EXISTS), (int,)),
    **{Opcode.EXTEND: (_NULL, bytes, int), Opcode.GET: (_NULL, bytes)},
}


# The opcodes that compare the token, with what WRONGTYPE counts as: the reply for a key that is not ours
_COMPARES: dict[int | None, int | None] = {
    **dict.fromkeys((Opcode.RELEASE, Opcode.RELEASE_SCRIPT, Opcode.EXTEND, Opcode.EXTEND_SCRIPT), 0),
    Opcode.GET: None,
}


def limited(pause: float, until: float | None, clock: Clock) -> float:
    """A pause in seconds, cut off at `until`."""
    return pause if until is None else max(0.0, min(pause, until - clock()))


def _recover(request: Request, error: Exception, retry: RetryState) -> Steps[None]:
    """Make the request one that can be sent again after this error reply, or raise the error."""
    text = errors.text_of(error)
    code = text.partition(" ")[0]
    if code == "NOSCRIPT" and retry.loads < RELOADS:
        retry.loads += 1
        load = RawCommands([script.load for script in commands.SCRIPTS])
        load.allowed_after_close, load.until = request.allowed_after_close, request.until
        answer = yield load
        if isinstance(answer, ConnectionLost):  # with the scripts: that is no load, and the command was not executed
            retry.loads -= 1
            lost = ConnectionLost(answer.error, answer.retry_for, sent=False, final=answer.final)
            yield retry.sleep(lost, request)
        refused = answer[0] if type(answer) is list and isinstance(answer[0], Exception) else None
        if refused is not None and not errors.is_passing(refused):
            if not isinstance(request, Command) or request.opcode != Opcode.ACQUIRE_OR_RECALL:
                raise errors.from_reply(refused)
            request.opcode = Opcode.ACQUIRE  # which needs no script, mostly
    elif isinstance(request, Command) and (other := _other_form(request.opcode, error)) is not None:
        request.opcode = other
    else:
        raised = errors.from_reply(error)
        needed = commands.rights_needed(request.calls[0]) if isinstance(request, RawCommands) else ""
        if needed and errors.is_forbidden(raised):
            raised.add_note(f"Its user needs {needed}")
        raise raised


def warn_refused(request: Request, purpose: Purpose, error: errors.RedisError) -> None:
    """Have the connection of a request warn that the server refuses what that is for."""
    if request.connection is not None:
        request.connection.warn_refused(purpose, error)


def _other_form(opcode: int, refusal: Exception) -> Opcode | None:
    """The opcode of another command that does the same, where the server refuses this one so; or None."""
    text = errors.text_of(refusal)
    if text.startswith(("ERR unknown command", "ERR syntax error")) or errors.is_forbidden(errors.from_reply(refusal)):
        return commands.OTHER_FORMS.get(opcode)
    # A script that only sets a time needs no memory; SET is refused
    return Opcode.EXTEND_SCRIPT if opcode == Opcode.EXTEND and text.partition(" ")[0] == "OOM" else None


def get_session(clock: Clock) -> Steps[Session]:
    """The session with the server; connects if there is none. Raises the error of a connection that stays away."""
    retry = RetryState(clock)
    while isinstance(answer := (yield GetSession()), ConnectionLost):
        yield Sleep(retry.pause(answer))
    session: Session = answer
    return session
