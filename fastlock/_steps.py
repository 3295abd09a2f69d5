"""Law: the steps of which operations on locks are made, and how an answer that is not plain becomes one.

An operation is a generator. It yields steps (ask the server, wait, sleep, undo) and is sent answers; how to wait is the
wire's business. An answer is the server's reply (errors are values), `Lost` when it is not known what became of a
command, or LATE when the caller's time ran out. The clock is an argument. Never here: sockets, asyncio, threads, sleep.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Generator
from typing import Any

from fastlock import _commands as say
from fastlock import _errors as errors
from fastlock._gate import Waiter

Clock = Callable[[], float]
LATE: Any = type("LATE", (), {"__repr__": lambda self: "LATE", "__slots__": ()})()
# Answers that need no server: others of this client wait, behind whom to wait; it has passed on to the next of them;
# it was let go of before.
BEHIND: Any = type("BEHIND", (), {"__repr__": lambda self: "BEHIND", "__slots__": ()})()
PASSED_ON: Any = type("PASSED_ON", (), {"__repr__": lambda self: "PASSED_ON", "__slots__": ()})()
OVER: Any = type("OVER", (), {"__repr__": lambda self: "OVER", "__slots__": ()})()

BACKOFF = 0.01, 1.0  # seconds: the first pause before a new connection, and the longest
RELOADS = 10  # of scripts for one command: somebody may flush them all the time


ONE, MANY, CALLS = range(3)  # how a step is written into the pipe


class Ask:
    """Step: one command of the dialect. The wire notes when it was `sent` and over which connection (`link`)."""

    kind = ONE
    calls: list[tuple[bytes, ...]]  # of the kind CALLS
    until: float | None = None  # when the caller stops waiting; None: never before the wire's own timeout
    sent = 0.0  # just before the latest send, by the law's clock
    link: Any = None
    stale: tuple[Any, ...] = ()  # sessions that broke under it: to be ended before it is asked again
    hears = False  # whether it has to go over the connection on which messages come
    parting = False  # whether a client that is closed asks it too: what it held when it was closed may be let go of

    def __init__(self, verb: int, key: bytes, token: bytes = b"", ms: int = 0) -> None:
        self.verb = verb
        self.key = key
        self.token = token
        self.ms = ms

    def undo(self) -> Undo | None:
        """What undoes it for a caller who is gone, whether or not it was carried out; None: there is nothing to
        undo."""
        return None

    def end(self) -> float:
        """When the lease it asks for is over."""
        return self.sent + self.ms / 1000 if self.ms else math.inf


class AskMany(Ask):
    """Step: one command of the dialect for each name, in one flush; the answer is the list of replies."""

    kind = MANY

    def __init__(self, verb: int, names: list[bytes], tokens: list[bytes], ms: int = 0) -> None:
        super().__init__(verb, b"", b"", ms)
        self.names = names
        self.tokens = tokens

    def undo(self) -> Undo:
        return Undo(self.names, self.tokens, self.stale)


class Call(Ask):
    """Step: any commands, in one flush; the answer is the list of replies."""

    kind = CALLS

    def __init__(self, calls: list[tuple[bytes, ...]]) -> None:
        super().__init__(-1, b"")
        self.calls = calls


class Capabilities:
    """Step: who the server is and what it can do; the answer is a Session, or `Lost`."""

    __slots__ = ("parting",)
    until: float | None = None  # as of an Ask

    def __init__(self, parting: bool = False) -> None:
        self.parting = parting  # as of an Ask


class Distrust:
    """Step: the reply to this ask makes no sense: end the connection it came from. The answer is `Lost`."""

    __slots__ = ("ask", "reply")

    def __init__(self, ask: Ask, reply: Any) -> None:
        self.ask = ask
        self.reply = reply


class Join:
    """Step: have the waiter wait behind those of this client who wait for the same name."""

    __slots__ = ("waiter",)

    def __init__(self, waiter: Waiter) -> None:
        self.waiter = waiter


class Wait:
    """Step: sleep until the waiter is called, or it is time for it to look, or to go. `look`: makes its look, for the
    gate; a wire may ask that at once when the first is called. Its answer: (what it has asked, the answer), or None."""

    __slots__ = ("look", "until", "waiter")

    def __init__(self, waiter: Waiter, until: float | None, look: Callable[[Any], Call]) -> None:
        self.waiter = waiter
        self.until = until
        self.look = look


class Sleep:
    """Step: wait so many seconds. `held`: for somebody who holds the lock."""

    __slots__ = ("held", "seconds")

    def __init__(self, seconds: float, held: bool = False) -> None:
        self.seconds = seconds
        self.held = held


class Undo:
    """Step: release these names if their tokens still hold them; nobody waits for it. It is sent however late it gets:
    the server counts a lease from when it executes the command, which may be long after that was sent."""

    kind = CALLS
    again = False  # it is said once more: behind its scripts, which the server may have forgotten
    matters = True  # whether anybody is worse off if it is refused
    refusals = 0
    task = "forget a caller that is gone"  # for who reads of a refusal
    scripts: tuple[say.Script, ...] = (say.HAND_OVER_LUA, say.RELEASE_LUA)

    def __init__(self, names: list[bytes], tokens: list[bytes], stale: tuple[Any, ...] = ()) -> None:
        self.names = names
        self.tokens = tokens
        self.stale = stale  # as of an Ask
        self.link: Any = None  # the connection that it has to go over, while that is there
        self.said: Said | None = None  # what is under way now

    @property
    def calls(self) -> list[tuple[bytes, ...]]:
        if not self.names:
            return [(b"PING",)]  # only to end what is stale
        return say.undo(self.names, self.tokens, self.link.session.capabilities, self.again)

    def outlived(self, session: Any) -> None:
        """A session broke under it: to be ended before it is said again."""
        if session not in self.stale:
            self.stale = (*self.stale, session)

    def set_result(self, replies: list[Any]) -> None:
        """What was an error is said once more."""
        answers = say.undone(replies, len(self.names), self.again)
        left = [i for i, answer in enumerate(answers) if isinstance(answer, Exception)]
        if left:
            self.names, self.tokens = [self.names[i] for i in left], [self.tokens[i] for i in left]
            self._refused(answers[left[0]])

    def _refused(self, reply: Exception) -> None:
        self.stale = ()  # they were ended before
        self.refusals += 1
        if errors.lasts(reply):
            self.link.post_later(self, backoff(self.refusals))
        elif not self.again or (str(reply).startswith("NOSCRIPT") and self.refusals < RELOADS):
            self.again = True
            self.link.post(self)
        elif self.matters:
            self.link.refused(self, errors.from_reply(reply))


class Said:
    """An undo as a slot of the pipe: nobody waits for its replies, but a connection that breaks gives it back, to be
    said on the next. What becomes of it counts no more when the undo is said again, or owed."""

    __slots__ = ("undo",)

    def __init__(self, undo: Undo) -> None:
        self.undo = undo
        undo.said = self

    def done(self) -> bool:
        return False

    def set_result(self, replies: list[Any]) -> None:
        if self.undo.said is self:
            self.undo.set_result(replies)
        if self.undo.said is self:  # still: or the two would keep each other, and the connection over which it went
            self.undo.said = None

    def lost(self, wire: Any, session: Any) -> None:
        """Its connection broke."""
        if self.undo.said is self:
            self.undo.outlived(session)
            wire.owe(self.undo)


class Leave(Undo):
    """Step: wait no longer in the queue. `matters`: as of an Undo; it does not for who may not queue either."""

    scripts = (say.LEAVE_LUA,)

    def __init__(self, call: tuple[bytes, ...], stale: tuple[Any, ...], link: Any, matters: bool = True) -> None:
        super().__init__([], [], stale)
        self.call = call
        self.link = link
        self.matters = matters

    @property
    def calls(self) -> list[tuple[bytes, ...]]:
        return [say.LEAVE_LUA.load, self.call] if self.again else [self.call]

    def set_result(self, replies: list[Any]) -> None:
        if isinstance(replies[-1], Exception):
            self._refused(replies[-1])


class Lost:
    """Answer: the connection broke. `sent`: the command may have been executed. `final`: do not try again. `own`: it
    broke by the reply to this very step, which made no sense."""

    def __init__(
        self,
        error: Exception,
        patience: float,
        *,
        sent: bool,
        final: bool = False,
        session: Any = None,
        own: bool = False,
    ) -> None:
        self.patience = patience  # seconds: how long to go on asking over new connections
        self.error = error
        self.sent = sent
        self.final = final
        self.session = session  # which broke
        self.own = own


Steps = Generator[Any, Any, Any]


class Trial:
    """One operation's patience: what went wrong so far, and how much longer to try."""

    __slots__ = ("clock", "doubt", "doubt_since", "failures", "give_up", "loads", "senseless")

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.doubt = False  # a command with our token was sent and its reply lost
        self.doubt_since = math.inf  # when the first such was sent
        self.failures = self.loads = 0
        self.senseless = 0  # replies of its own that made no sense; what others were answered is borne
        self.give_up = math.inf

    def pause(self, lost: Lost, parting: bool = False) -> float:
        """Seconds before the next connection. Raises the error when patience is over. parting: as of an Ask; that the
        client was closed meanwhile does not end it."""
        now = self.clock()
        self.doubt |= lost.sent
        self.failures += 1
        if self.failures == 1:
            self.give_up = now + lost.patience
        self.senseless += lost.own
        final = lost.final and not (parting and isinstance(lost.error, errors.ClientClosedError))
        if final or self.senseless > 1 or (now >= self.give_up and self.failures > 1):
            raise errors.afresh(lost.error)
        return 0.0 if self.failures == 1 else backoff(self.failures)


def backoff(failures: int) -> float:
    """Seconds before the next try after so many failures.

    Exponential backoff with full jitter: M. Brooker, "Exponential Backoff and Jitter", AWS, 2015.
    """
    first, longest = BACKOFF
    return random.uniform(0, min(longest, first * 2.0 ** min(failures, 20)))


def settle(ask: Ask, answer: Any, trial: Trial) -> Steps:
    """From an answer that is not plain to one that is: reconnect, load scripts, change to a form the server knows, wait
    for one that can do nothing now.

    Returns a reply of the right shape, or LATE. Raises the redis-py exception of an error reply, or of a connection
    that stays away.
    """
    while True:
        if type(answer) is Lost:
            if answer.session is not None and answer.session not in ask.stale:
                ask.stale = (*ask.stale, answer.session)
            if answer.sent and not trial.doubt:
                trial.doubt_since = ask.sent
            yield Sleep(within(trial.pause(answer, ask.parting), ask.until, trial.clock))
            if ask.until is not None and trial.clock() >= ask.until:
                raise errors.afresh(answer.error)  # not "held by somebody else": nobody could say
        elif isinstance(answer, Exception):
            if ask.verb in _COMPARES and errors.text_of(answer).startswith("WRONGTYPE"):
                return _COMPARES[ask.verb]  # something that is no lock at all stands there: not ours
            if errors.passes(answer):
                answer = Lost(errors.from_reply(answer), ask.link.patience, sent=False)
                continue
            yield from _heal(ask, answer, trial)
        elif answer is LATE:
            return LATE
        elif type(answer) in (_SHAPES[ask.verb] if ask.kind != MANY else (list,)):
            ask.stale = ()
            return answer
        else:
            answer = yield Distrust(ask, answer)
            continue
        if ask.until is not None and trial.clock() >= ask.until:
            return LATE
        answer = yield ask


def settled(ask: Ask, trial: Trial) -> Steps:
    """Ask, and settle the answer."""
    return (yield from settle(ask, (yield ask), trial))


def called(ask: Ask, answer: Any, good: Callable[[Any], bool], trial: Trial) -> Steps:
    """From the answer to the call of one script to a reply of the right shape. Returns that, or LATE; raises as
    `settle`."""
    while type(answer) is not list or len(answer) != 1 or not good(answer[0]):
        answer = yield from settle(ask, answer, trial)
        if answer is LATE:
            return LATE
        if len(answer) != 1 or not good(answer[0]):
            answer = answer[0] if len(answer) == 1 and isinstance(answer[0], Exception) else ("odd", answer)
    ask.stale = ()
    return answer[0]


def or_undo(steps: Steps, undo: Callable[[], Undo | None], gone: Callable[[], Undo | None] | None = None) -> Steps:
    """Carry out `steps`; if they fail, leave what undoes them; `gone`: if the caller is (cancelled, interrupted)."""
    try:
        return (yield from steps)
    except GeneratorExit:  # nobody drives these steps any more: nothing can be left
        raise
    except BaseException as error:
        if (left := (undo if gone is None or errors.own(error) else gone)()) is not None:
            yield left
        raise


_NULL = type(None)
_SHAPES: dict[int, tuple[type, ...]] = {
    **dict.fromkeys((say.ACQUIRE, say.ACQUIRE_ENDLESS, say.ACQUIRE_SCRIPT, say.ACQUIRE_ENDLESS_SCRIPT), (_NULL, bytes)),
    **dict.fromkeys((say.RELEASE, say.RELEASE_SCRIPT, say.EXTEND_SCRIPT, say.PTTL, say.EXISTS), (int,)),
    **{say.EXTEND: (_NULL, bytes, int), say.GET: (_NULL, bytes), -1: (list,)},
}


_COMPARES = {
    **dict.fromkeys((say.RELEASE, say.RELEASE_SCRIPT, say.EXTEND, say.EXTEND_SCRIPT), 0),
    say.GET: None,
}


def within(pause: float, until: float | None, clock: Clock) -> float:
    return pause if until is None else max(0.0, min(pause, until - clock()))


def _heal(ask: Ask, error: Exception, trial: Trial) -> Steps:
    text = errors.text_of(error)
    code = text.partition(" ")[0]
    form = say.SCRIPTED.get(ask.verb)
    if code == "NOSCRIPT" and trial.loads < RELOADS:
        trial.loads += 1
        load = Call([script.load for script in say.SCRIPTS])
        load.parting = ask.parting
        answer = yield load
        if type(answer) is list and isinstance(answer[0], Exception) and not errors.passes(answer[0]):
            raise errors.from_reply(answer[0])
    elif form is not None and text.startswith(("ERR unknown command", "ERR syntax error", "NOPERM")):
        ask.verb = form
    elif code == "OOM" and ask.verb == say.EXTEND:
        ask.verb = say.EXTEND_SCRIPT  # a script that only sets a time needs no memory; SET is refused
    else:
        raised = errors.from_reply(error)
        if ask.kind == CALLS and errors.forbids(raised) and (needed := say.needs(ask.calls[0])):
            raised.add_note(f"Its user needs {needed}")
        raise raised
