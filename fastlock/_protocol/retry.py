"""How a request gets a plain reply where its first answer was none: what is tried again, and for how long.

A command is sent again with the same token after its reply was lost, so that the server's reply says what became of
it. Never here: sockets, asyncio, threads, sleep.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from fastlock import _errors as errors
from fastlock._protocol import commands
from fastlock._protocol.commands import Opcode
from fastlock._protocol.steps import (
    CALLS,
    MANY,
    RELOADS,
    Answer,
    Clock,
    Command,
    ConnectionLost,
    GetSession,
    ProtocolViolation,
    RawCommands,
    Sleep,
    Steps,
    Undo,
    backoff,
)


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
        a Command; that the client was closed meanwhile does not end the retries."""
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


def resolve(ask: Command, answer: Any, retry: RetryState) -> Steps:
    """From any answer to a plain reply: reconnect, load scripts, change to a template that the server knows, wait for a
    server that can execute nothing now.

    Returns a reply of the right shape, or DEADLINE_EXCEEDED. Raises the redis-py exception of an error reply, or of a
    connection that stays away.
    """
    while True:
        if type(answer) is ConnectionLost:
            if answer.session is not None and answer.session not in ask.stale:
                ask.stale = (*ask.stale, answer.session)
            if answer.sent and not retry.outcome_unknown:
                retry.unknown_since = ask.sent
            yield Sleep(limited(retry.pause(answer, ask.allowed_after_close), ask.until, retry.clock))
            if ask.until is not None and retry.clock() >= ask.until:
                raise errors.fresh_copy(answer.error)  # not "held by somebody else", which nobody knows
        elif isinstance(answer, Exception):
            if ask.opcode in _COMPARES and errors.text_of(answer).startswith("WRONGTYPE"):
                return _COMPARES[ask.opcode]  # the key holds something that is no lock at all, so the lock is not ours
            if errors.is_passing(answer):
                answer = ConnectionLost(errors.from_reply(answer), ask.connection.reply_timeout, sent=False)
                continue
            yield from _recover(ask, answer, retry)
        elif answer is Answer.DEADLINE_EXCEEDED:
            return Answer.DEADLINE_EXCEEDED
        elif type(answer) in (_SHAPES[ask.opcode] if ask.kind != MANY else (list,)):
            ask.stale = ()
            return answer
        else:
            answer = yield ProtocolViolation(ask, answer)
            continue
        if ask.until is not None and retry.clock() >= ask.until:
            return Answer.DEADLINE_EXCEEDED
        answer = yield ask


def request(ask: Command, retry: RetryState) -> Steps:
    """Send a command, and resolve its answer."""
    return (yield from resolve(ask, (yield ask), retry))


def run_script(ask: Command, answer: Any, good: Callable[[Any], bool], retry: RetryState) -> Steps:
    """From the answer to the call of one script to a reply of the right shape. Returns the reply, or
    DEADLINE_EXCEEDED; raises what `resolve` raises."""
    while type(answer) is not list or len(answer) != 1 or not good(answer[0]):
        answer = yield from resolve(ask, answer, retry)
        if answer is Answer.DEADLINE_EXCEEDED:
            return Answer.DEADLINE_EXCEEDED
        if len(answer) != 1 or not good(answer[0]):
            answer = answer[0] if len(answer) == 1 and isinstance(answer[0], Exception) else ("odd", answer)
    ask.stale = ()
    return answer[0]


def with_undo(steps: Steps, undo: Callable[[], Undo | None], gone: Callable[[], Undo | None] | None = None) -> Steps:
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
    **dict.fromkeys(
        (Opcode.ACQUIRE, Opcode.ACQUIRE_ENDLESS, Opcode.ACQUIRE_SCRIPT, Opcode.ACQUIRE_ENDLESS_SCRIPT), (_NULL, bytes)
    ),
    **dict.fromkeys((Opcode.RELEASE, Opcode.RELEASE_SCRIPT, Opcode.EXTEND_SCRIPT, Opcode.PTTL, Opcode.EXISTS), (int,)),
    **{Opcode.EXTEND: (_NULL, bytes, int), Opcode.GET: (_NULL, bytes), -1: (list,)},
}


# The opcodes that compare the token, with what WRONGTYPE counts as: the reply for a key that is not ours
_COMPARES: dict[int, int | None] = {
    **dict.fromkeys((Opcode.RELEASE, Opcode.RELEASE_SCRIPT, Opcode.EXTEND, Opcode.EXTEND_SCRIPT), 0),
    Opcode.GET: None,
}


def limited(pause: float, until: float | None, clock: Clock) -> float:
    """A pause in seconds, cut off at `until`."""
    return pause if until is None else max(0.0, min(pause, until - clock()))


def _recover(ask: Command, error: Exception, retry: RetryState) -> Steps:
    """Make the command one that can be sent again after this error reply, or raise the error."""
    text = errors.text_of(error)
    code = text.partition(" ")[0]
    form = commands.SCRIPTED.get(ask.opcode)
    if code == "NOSCRIPT" and retry.loads < RELOADS:
        retry.loads += 1
        load = RawCommands([script.load for script in commands.SCRIPTS])
        load.allowed_after_close = ask.allowed_after_close
        answer = yield load
        if type(answer) is list and isinstance(answer[0], Exception) and not errors.is_passing(answer[0]):
            raise errors.from_reply(answer[0])
    elif form is not None and text.startswith(("ERR unknown command", "ERR syntax error", "NOPERM")):
        ask.opcode = form
    elif code == "OOM" and ask.opcode == Opcode.EXTEND:
        ask.opcode = Opcode.EXTEND_SCRIPT  # a script that only sets a time needs no memory; SET is refused
    else:
        raised = errors.from_reply(error)
        if ask.kind == CALLS and errors.is_forbidden(raised) and (needed := commands.rights_needed(ask.calls[0])):
            raised.add_note(f"Its user needs {needed}")
        raise raised


def get_session(clock: Clock, allowed_after_close: bool = False) -> Steps:
    """The session with the server; connects if there is none. Raises the error of a connection that stays away."""
    retry = RetryState(clock)
    while type(answer := (yield GetSession(allowed_after_close))) is ConnectionLost:
        yield Sleep(retry.pause(answer, allowed_after_close))
    return answer
