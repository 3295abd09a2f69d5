"""Law: what an operation on a lock asks, and what it makes of each answer. Written once, for threads and for asyncio.

Each operation is a generator. It yields steps (ask the server, sleep, undo) and is sent answers; how to wait is the
wire's business. An answer is the server's reply (errors are values), `Lost` when it is not known what became of a
command, or LATE when the caller's time ran out. The clock is an argument. Never here: sockets, asyncio, threads, sleep.

Outcomes are never guessed. A command whose reply was lost is asked again with the same token: the server's answer then
says whether it is ours. Whoever gives up in doubt leaves an `Undo`, carried out after whatever it undoes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Generator
from typing import Any

from fastlock import _batch as batch
from fastlock import _commands as say
from fastlock import _errors as errors
from fastlock._lease import ENDED, Lease

Clock = Callable[[], float]
LATE: Any = type("LATE", (), {"__repr__": lambda self: "LATE", "__slots__": ()})()

SHORTEST_PAUSE = 0.001  # seconds: between two looks at a held name, so that no setting makes a busy loop
LAST_LOOK = 0.01  # seconds before the end of a blocking_timeout, so that its wait is of some use
BACKOFF = 0.01, 1.0  # seconds: the first pause before a new connection, and the longest
RELOADS = 10  # of scripts for one command: somebody may flush them all the time
RELEASE_CHUNK = 100  # names in one script: a server does nothing else meanwhile (35 us)


ONE, MANY, CALLS, UNDO = range(4)  # how a step is written into the pipe


class Ask:
    """Step: one command of the dialect. The wire notes when it was `sent` and over which connection (`link`)."""

    kind = ONE
    until: float | None = None  # when the caller stops waiting; None: never before the wire's own timeout
    sent = 0.0  # just before the latest send, by the law's clock
    link: Any = None
    stale: tuple[Any, ...] = ()  # sessions that broke under it: to be ended before it is asked again

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
        return Undo(self.names, self.tokens, math.inf, self.stale)


class Call(Ask):
    """Step: any commands, in one flush; the answer is the list of replies."""

    kind = CALLS

    def __init__(self, calls: list[tuple[bytes, ...]]) -> None:
        super().__init__(-1, b"")
        self.calls = calls


class Capabilities:
    """Step: who the server is and what it can do; the answer is a Session, or `Lost`."""

    __slots__ = ()


class Distrust:
    """Step: the reply to this ask makes no sense: end the connection it came from. The answer is `Lost`."""

    __slots__ = ("ask", "reply")

    def __init__(self, ask: Ask, reply: Any) -> None:
        self.ask = ask
        self.reply = reply


class Sleep:
    """Step: wait so many seconds."""

    __slots__ = ("seconds",)

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds


class Undo:
    """Step: release these names if their tokens still hold them; nobody waits for it. `until`: when it has no more
    use."""

    kind = UNDO
    link: Any = None
    scripted = False  # whether the native form was refused

    def __init__(self, names: list[bytes], tokens: list[bytes], until: float, stale: tuple[Any, ...] = ()) -> None:
        self.names = names
        self.tokens = tokens
        self.until = until
        self.stale = stale  # as of an Ask

    # As a slot of the pipe: nobody waits for its replies, but a connection that breaks gives it back, to be done on the
    # next, and where the native form is refused it is done by script.

    def done(self) -> bool:
        return False

    def set_result(self, replies: list[Any]) -> None:
        if not self.scripted and any(isinstance(reply, Exception) for reply in replies):
            self.scripted = True
            self.link.post(self)


class Lost:
    """Answer: the connection broke. `sent`: the command may have been executed. `final`: do not try again."""

    def __init__(
        self, error: Exception, patience: float, *, sent: bool, final: bool = False, session: Any = None
    ) -> None:
        self.patience = patience  # seconds: how long to go on asking over new connections
        self.error = error
        self.sent = sent
        self.final = final
        self.session = session  # which broke


Steps = Generator[Any, Any, Any]


class Trial:
    """One operation's patience: what went wrong so far, and how much longer to try."""

    __slots__ = ("clock", "doubt", "doubt_since", "failures", "give_up", "loads")

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.doubt = False  # a command with our token was sent and its reply lost
        self.doubt_since = math.inf  # when the first such was sent
        self.failures = self.loads = 0
        self.give_up = math.inf

    def pause(self, lost: Lost) -> float:
        """Seconds before the next connection (full jitter, doubling). Raises the error when patience is over.

        Exponential backoff with full jitter: M. Brooker, "Exponential Backoff and Jitter", AWS, 2015.
        """
        now = self.clock()
        self.doubt |= lost.sent
        self.failures += 1
        if self.failures == 1:
            self.give_up = now + lost.patience
        senseless = isinstance(lost.error, errors.InvalidResponse) and self.failures > 1
        if lost.final or senseless or (now >= self.give_up and self.failures > 1):
            raise lost.error
        if self.failures == 1:
            return 0.0
        first, longest = BACKOFF
        return random.uniform(0, min(longest, first * 2.0 ** min(self.failures, 20)))


def settle(ask: Ask, answer: Any, trial: Trial) -> Steps:
    """From an answer that is not plain to one that is: reconnect, load scripts, change to a form the server knows.

    Returns a reply of the right shape, or LATE. Raises the redis-py exception of an error reply, or of a connection
    that stays away.
    """
    while True:
        if type(answer) is Lost:
            if answer.session is not None and answer.session not in ask.stale:
                ask.stale = (*ask.stale, answer.session)
            if answer.sent and not trial.doubt:
                trial.doubt_since = ask.sent
            yield Sleep(_within(trial.pause(answer), ask.until, trial.clock))
            if ask.until is not None and trial.clock() >= ask.until:
                raise answer.error  # not "held by somebody else": nobody could say
        elif isinstance(answer, Exception):
            if ask.verb in _COMPARES and errors.text_of(answer).startswith("WRONGTYPE"):
                return _COMPARES[ask.verb]  # something that is no lock at all stands there: not ours
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


def or_undo(steps: Steps, undo: Callable[[], Undo | None], gone: Callable[[], Undo | None] | None = None) -> Steps:
    """Carry out `steps`; if they fail, leave what undoes them; `gone`: if the caller is (cancelled, interrupted)."""
    try:
        return (yield from steps)
    except GeneratorExit:  # nobody drives these steps any more: nothing can be left
        raise
    except BaseException as error:
        if (left := (undo if gone is None or isinstance(error, Exception) else gone)()) is not None:
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


def _within(pause: float, until: float | None, clock: Clock) -> float:
    return pause if until is None else max(0.0, min(pause, until - clock()))


def _heal(ask: Ask, error: Exception, trial: Trial) -> Steps:
    text = errors.text_of(error)
    code = text.partition(" ")[0]
    form = say.SCRIPTED.get(ask.verb)
    if code == "NOSCRIPT" and trial.loads < RELOADS:
        trial.loads += 1
        answer = yield Call([script.load for script in say.SCRIPTS])
        if type(answer) is list and isinstance(answer[0], Exception):
            raise errors.from_reply(answer[0])
    elif form is not None and text.startswith(("ERR unknown command", "ERR syntax error", "NOPERM")):
        ask.verb = form
    elif code == "OOM" and ask.verb == say.EXTEND:
        ask.verb = say.EXTEND_SCRIPT  # a script that only sets a time needs no memory; SET is refused
    else:
        raise errors.from_reply(error)


class Acquire(Ask):
    """Acquire a name: a step, whose answer goes to `rest`. Waits while its terms allow it. Checked values only: `ms` 0
    means a lease without end.

    The outcome is the Lease, or None: somebody else holds it. Raises redis-py's exception of an error reply;
    ConnectionError or TimeoutError when the server stays away.
    """

    blocking = False
    sleep = 0.1  # seconds between two looks
    doubted = False  # a look's reply was lost, once: from then on our own token may turn up at any time

    def __init__(self, name: object, key: bytes, token: bytes, ms: int, fenced: bool = False) -> None:
        self.name = name
        self.key = key
        self.token = token
        self.ms = ms
        self.verb = say.ACQUIRE if ms else say.ACQUIRE_ENDLESS
        self.fenced = fenced
        if fenced:
            self.kind, self.verb = CALLS, -1
            self.calls = [say.acquire_fenced(key, token, ms)]

    def undo(self) -> Undo:
        return Undo([self.key], [self.token], self.end(), self.stale)

    def rest(self, answer: Any, clock: Clock) -> Steps:
        """From the first answer to the outcome."""
        lease = yield from or_undo(self._looks(answer, clock), lambda: self.undo() if self.doubted else None)
        if lease is None and self.doubted:
            yield self.undo()
        return lease

    def _looks(self, answer: Any, clock: Clock) -> Steps:
        while True:
            lease = yield from self._outcome(answer, clock)
            if lease is not None:
                if lease.valid:
                    return lease
                # granted, but its time was over before the reply came: not a success; undone before it is tried again
                yield from self._withdraw(clock)
            if not self.blocking or self._late(clock):
                return None
            if lease is None:
                yield from self._wait_turn(clock)
            answer = yield self

    def _withdraw(self, clock: Clock) -> Steps:
        release = Ask(say.RELEASE, self.key, self.token)
        undo = lambda: Undo([self.key], [self.token], math.inf, release.stale)  # noqa: E731
        yield from or_undo(settled(release, Trial(clock)), undo)

    def _late(self, clock: Clock) -> bool:
        """Whether there is no time for another look."""
        return self.until is not None and clock() >= self.until - LAST_LOOK

    def _lease(self, sent: float, fence: int | None) -> Lease:
        return Lease(self.name, self.key, self.token, sent + self.ms / 1000 if self.ms else math.inf, fence)

    def _outcome(self, answer: Any, clock: Clock) -> Steps:
        """From one answer to what it means. Returns the Lease, in time or not, or None."""
        trial = Trial(clock)
        try:
            answer = yield from settle(self, answer, trial)
            while self.fenced and answer is not LATE and not _fenced(answer):
                odd = answer[0] if len(answer) == 1 and isinstance(answer[0], Exception) else ("odd", answer)
                answer = yield from settle(self, odd, trial)
        finally:
            self.doubted |= trial.doubt
        if answer is LATE:
            return None
        holder, fence = answer[0] if self.fenced else (answer, None)
        if holder is None:
            return self._lease(self.sent, fence)
        if holder != self.token or not self.doubted:
            return None
        return (yield from self._confirm(fence, clock))

    def _confirm(self, fence: int | None, clock: Clock) -> Steps:
        """Ours since a command whose reply was lost: when, nobody knows. So the lease is set anew and counts from
        that."""
        if not self.ms:
            return self._lease(self.sent, fence)
        sent = yield from extend(self.key, self.token, self.ms, clock)
        return None if sent is None else self._lease(sent, fence)

    def _wait_turn(self, clock: Clock) -> Steps:
        """Sleep until the holder's lease ends or `sleep` seconds have passed, whichever is first."""
        ask = Ask(say.PTTL, self.key)
        ask.until = self.until
        left = yield from settled(ask, Trial(clock))
        pause = self.sleep
        if left is not LATE and left != -1:  # -1: a holder without end
            pause = min(pause, left / 1000)
        last = None if self.until is None else self.until - LAST_LOOK
        yield Sleep(_within(max(pause, SHORTEST_PAUSE), last, clock))


def _fenced(answer: list[Any]) -> bool:
    reply = answer[0] if len(answer) == 1 else None
    return type(reply) is list and len(reply) == 2 and type(reply[0]) in (_NULL, bytes) and type(reply[1]) is int


class Release(Ask):
    """Let go of a lease. The outcome is whether the lock was the caller's.

    It stays the caller's until the server answered: what raises can be repeated. A key that is gone after a lost reply
    is taken for the work of that lost command, if the lease had not run out before it.
    """

    def __init__(self, lease: Lease) -> None:
        self.verb = say.RELEASE
        self.key = lease.key
        self.token = lease.token
        self.ms = 0
        self.lease = lease

    def undo(self) -> Undo:
        self.lease.doubt_release(self.sent)  # repeated, it may find what this undo has done
        return Undo([self.key], [self.token], self.lease.deadline, self.stale)

    def rest(self, answer: Any, clock: Clock) -> Steps:
        """From the first answer to the outcome."""
        lease = self.lease
        trial = Trial(clock)
        steps = settle(self, answer, trial)
        answer = yield from or_undo(steps, lambda: self._doubted(trial), lambda: self._doubted(trial) or self.undo())
        self._doubted(trial)
        return bool(answer) or lease.release_doubted

    def _doubted(self, trial: Trial) -> Undo | None:
        """What went out with its reply lost: it may have been the one that let go."""
        if not trial.doubt:
            return None
        self.lease.doubt_release(trial.doubt_since)
        return Undo([self.key], [self.token], self.lease.deadline, self.stale)


def extend(key: bytes, token: bytes, ms: int, clock: Clock, lease: Lease | None = None) -> Steps:
    """A new lease of `ms`. Returns when it was sent, None: not the caller's."""
    ask = Ask(say.EXTEND, key, token, ms)
    if lease is not None:
        ask.stale, lease.stale = lease.stale, ()
    answer = yield ask
    if answer != b"OK" and answer != 1:
        answer = yield from or_undo(settle(ask, answer, Trial(clock)), lambda: _given_up(ask, lease))
    return ask.sent if answer == b"OK" or answer == 1 else None


def _given_up(ask: Ask, lease: Lease | None) -> Undo | None:
    """An extension that was sent must not shorten or prolong the lease later."""
    if not ask.stale:
        return None
    if lease is not None:
        lease.stale = ask.stale
    return Undo([], [], math.inf, ask.stale)


def prolong(lease: Lease, ms: int, replace: bool, clock: Clock) -> Steps:
    """Move the end of a lease: to `ms` from now, or `ms` further. Returns whether it was the caller's.

    "Further" is sent as an end too, counted from the lease as this process knows it, so that asking again after a lost
    reply does not add twice. Until the server answered, the earlier of the two ends holds.
    """
    if replace:
        lease.deadline = min(lease.deadline, clock() + ms / 1000)
    elif left := lease.remaining:
        ms += int(left * 1000)
    else:  # a token from elsewhere, or a lease that the server lets live a moment longer: it knows
        ms += max(0, (yield from inspect(say.PTTL, lease.key, clock)))
    sent = yield from extend(lease.key, lease.token, ms, clock, lease)
    if sent is None:
        lease.deadline = ENDED
        return False
    lease.deadline = sent + ms / 1000
    return True


def inspect(verb: int, key: bytes, clock: Clock) -> Steps:
    """Ask a question that changes nothing. Returns the reply."""
    ask = Ask(verb, key)
    return (yield from settled(ask, Trial(clock)))


def acquire_many(names: list[Any], keys: list[bytes], token: bytes, ms: int, clock: Clock) -> Steps:
    """Acquire each name that is free, all in one flush with one token. Returns a list of Lease or None.

    An error reply to one of them releases what the others got, and is raised.
    """
    ask = AskMany(say.ACQUIRE if ms else say.ACQUIRE_ENDLESS, keys, [token] * len(keys), ms)
    ask.token = token
    leases = yield from or_undo(_each(ask, (yield ask), names, clock), ask.undo)
    if clock() >= ask.end():
        yield ask.undo()
        return [None] * len(keys)
    return leases


def _each(ask: AskMany, answers: Any, names: list[Any], clock: Clock) -> Steps:
    """From the answers to leases, each name on its own where its answer does not say all."""
    if type(answers) is not list:
        answers = yield from settle(ask, answers, Trial(clock))
    leases, odd = batch.granted(names, ask.names, ask.token, ask.end(), answers)
    for i in odd:
        one = Acquire(names[i], ask.names[i], ask.token, ask.ms)
        try:
            leases[i] = yield from _again(one, clock)
        finally:
            ask.stale += one.stale  # of what broke under it: to be ended before all is undone
    return leases


def _again(one: Acquire, clock: Clock) -> Steps:
    """One name of a batch whose answer does not say all: asked again on its own."""
    answer = yield from settled(one, Trial(clock))
    if answer is None:
        return one._lease(one.sent, None)
    if answer == one.token:  # which is fresh with every batch: whatever became of the replies, it is ours
        return (yield from one._confirm(None, clock))
    return None


def release_many(leases: list[Lease], clock: Clock) -> Steps:
    """Let go of several, in one flush. Returns a list of bool: whether each was the caller's."""
    session = yield from look(clock)
    names, tokens = batch.keys_and_tokens(leases)
    ask: Ask
    if session.capabilities & {say.DELIFEQ, say.DELEX}:
        ask = AskMany(say.RELEASE, names, tokens)
    else:  # one script for many names costs the server a quarter
        ask = Call(
            [
                say.release_many(names[i : i + RELEASE_CHUNK], tokens[i : i + RELEASE_CHUNK])
                for i in range(0, len(names), RELEASE_CHUNK)
            ]
        )
    answers = yield ask
    if type(answers) is list and type(ask) is Call and all(type(part) is list for part in answers):
        answers = [answer for part in answers for answer in part]
    whole = type(answers) is list and len(answers) == len(leases)
    released, odd = batch.ended(leases, answers if whole else [None] * len(leases))
    for i in odd:  # lost, or an error: alone, with all that it takes to know the outcome
        lease = leases[i]
        if type(answers) is Lost:
            lease.doubt_release(ask.sent)
        again = Release(lease)
        released[i] = yield from again.rest((yield again), clock)
        lease.deadline = ENDED
    return released


def look(clock: Clock) -> Steps:
    """The session with the server; connects if need be."""
    trial = Trial(clock)
    while type(answer := (yield Capabilities())) is Lost:
        yield Sleep(trial.pause(answer))
    return answer
