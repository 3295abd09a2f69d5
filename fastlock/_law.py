"""Law: what an operation on a lock asks, and what it makes of each answer. Written once, for threads and for asyncio.

Each operation is a generator. It yields steps (ask the server, sleep, undo) and is sent answers; how to wait is the wire's
business. An answer is the server's reply (errors are values), `Lost` when it is not known what became of a command, or LATE
when the caller's time ran out. The clock is an argument. Never here: sockets, asyncio, threads, sleep, redis-py.

Outcomes are never guessed. A command whose reply was lost is asked again with the same token: the server's answer then says
whether it is ours. Whoever gives up in doubt leaves an `Undo`, which the wire carries out after whatever it undoes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Generator
from typing import Any

from fastlock import _commands as say
from fastlock import _errors as errors
from fastlock._lease import Lease

Clock = Callable[[], float]
LATE: Any = type("LATE", (), {"__repr__": lambda self: "LATE", "__slots__": ()})()

SHORTEST_PAUSE = 0.001  # seconds: between two looks at a held name, so that no setting makes a busy loop
BACKOFF = 0.01, 1.0  # seconds: the first pause before a new connection, and the longest
RETRY_FOR = 5.0  # seconds: how long an operation goes on asking over new connections, after its first was lost
RELEASE_CHUNK = 100  # names in one script: a server does nothing else meanwhile (35 us)


class Ask:
    """Step: one command of the dialect. `until` is when the caller stops waiting (None: the wire's own timeout only)."""

    __slots__ = ("link", "ms", "name", "sent", "stale", "token", "until", "verb")

    def __init__(self, verb: int, name: bytes, token: bytes = b"", ms: int = 0, until: float | None = None) -> None:
        self.verb = verb
        self.name = name
        self.token = token
        self.ms = ms
        self.until = until
        self.sent = 0.0  # by the law's clock, before the latest send
        self.link: Any = None  # the connection that gave the latest answer
        self.stale: Any = None  # the session that broke under it: to be ended before it is asked again

    @property
    def undone_by_release(self) -> bool:
        return self.verb in say.UNDONE_BY_RELEASE


class AskMany(Ask):
    """Step: one command of the dialect for each name, in one flush; the answer is the list of replies."""

    __slots__ = ("names", "tokens")

    def __init__(self, verb: int, names: list[bytes], tokens: list[bytes], ms: int = 0) -> None:
        super().__init__(verb, b"", b"", ms)
        self.names = names
        self.tokens = tokens


class Call(Ask):
    """Step: any commands, in one flush; the answer is the list of replies. With a name and token, both are undone on leaving."""

    __slots__ = ("calls",)

    def __init__(
        self, calls: list[tuple[bytes, ...]], name: bytes = b"", token: bytes = b"", until: float | None = None
    ) -> None:
        super().__init__(-1, name, token, 0, until)
        self.calls = calls

    @property
    def undone_by_release(self) -> bool:
        return bool(self.token)


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
    """Step: release these names if their tokens still hold them; nobody waits for it. `until`: when it has no more use."""

    __slots__ = ("names", "stale", "tokens", "until")

    def __init__(self, names: list[bytes], tokens: list[bytes], until: float, stale: Any = None) -> None:
        self.names = names
        self.tokens = tokens
        self.until = until
        self.stale = stale  # as of an Ask

    # As a slot of the pipe: its reply interests nobody, but a connection that breaks gives it back, to be done on the next.
    def done(self) -> bool:
        return True


class Lost:
    """Answer: the connection broke. `sent`: the command may have been executed. `final`: do not try again."""

    __slots__ = ("error", "final", "sent")

    def __init__(self, error: Exception, sent: bool, final: bool = False) -> None:
        self.error = error
        self.sent = sent
        self.final = final


Steps = Generator[Any, Any, Any]


class Trial:
    """One operation's patience: what went wrong so far, and how much longer to try."""

    __slots__ = ("clock", "doubt", "failures", "give_up", "loads")

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.doubt = False  # a command with our token was sent and its reply lost
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
            self.give_up = now + RETRY_FOR
        senseless = isinstance(lost.error, errors.InvalidResponse) and self.failures > 1
        if lost.final or senseless or (now >= self.give_up and self.failures > 1):
            raise lost.error
        if self.failures == 1:
            return 0.0
        first, longest = BACKOFF
        return random.uniform(0, min(longest, first * 2.0 ** min(self.failures, 20)))


def settle(ask: Ask, answer: Any, trial: Trial) -> Steps:
    """From an answer that is not plain to one that is: reconnect, load scripts, change to a form the server knows.

    Returns a reply of the right shape, or LATE. Raises the redis-py exception of an error reply, or of a connection that
    stays away.
    """
    while True:
        if type(answer) is Lost:
            yield Sleep(_within(trial.pause(answer), ask.until, trial.clock))
        elif isinstance(answer, Exception):
            yield from _heal(ask, answer, trial)
        elif answer is LATE or type(answer) in _SHAPES[ask.verb]:
            return answer
        else:
            answer = yield Distrust(ask, answer)
            continue
        if ask.until is not None and trial.clock() >= ask.until:
            return LATE
        ask.sent = trial.clock()
        answer = yield ask


_NULL = type(None)
_SHAPES: dict[int, tuple[type, ...]] = {
    **dict.fromkeys((say.ACQUIRE, say.ACQUIRE_ENDLESS, say.ACQUIRE_SCRIPT, say.ACQUIRE_ENDLESS_SCRIPT), (_NULL, bytes)),
    **dict.fromkeys((say.RELEASE, say.RELEASE_SCRIPT, say.EXTEND_SCRIPT, say.ADD, say.PTTL, say.EXISTS), (int,)),
    **{say.EXTEND: (_NULL, bytes, int), say.GET: (_NULL, bytes), -1: (list,)},
}


def _within(pause: float, until: float | None, clock: Clock) -> float:
    return pause if until is None else max(0.0, min(pause, until - clock()))


def _heal(ask: Ask, error: Exception, trial: Trial) -> Steps:
    text = str(error)
    code = text.partition(" ")[0]
    form = say.SCRIPTED.get(ask.verb)
    if code == "NOSCRIPT" and trial.loads < 2:
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


class Claim:
    """What an acquire wants. Checked values only: `ms` 0 means a lease without end, `until` None waits for ever."""

    __slots__ = ("blocking", "fenced", "key", "ms", "name", "sleep", "token", "until")

    def __init__(
        self,
        name: object,
        key: bytes,
        token: bytes,
        ms: int,
        blocking: bool = False,
        until: float | None = None,
        sleep: float = 0.1,
        fenced: bool = False,
    ) -> None:
        self.name = name
        self.key = key
        self.token = token
        self.ms = ms
        self.blocking = blocking
        self.until = until
        self.sleep = sleep
        self.fenced = fenced

    def ask(self) -> Ask:
        if self.fenced:
            return Call([say.acquire_fenced(self.key, self.token, self.ms)], self.key, self.token, self.until)
        return Ask(say.ACQUIRE if self.ms else say.ACQUIRE_ENDLESS, self.key, self.token, self.ms, self.until)

    def end(self, sent: float) -> float:
        return sent + self.ms / 1000 if self.ms else math.inf

    def lease(self, sent: float, fence: int | None = None) -> Lease:
        return Lease(self.name, self.key, self.token, self.end(sent), fence)

    def undo(self, ask: Ask) -> Undo:
        return Undo([self.key], [self.token], self.end(ask.sent), ask.stale)


def acquire(claim: Claim, clock: Clock) -> Steps:
    """Acquire, waiting while the claim allows it. Returns the Lease, or None: somebody else holds it.

    Raises redis-py's exception of an error reply; ConnectionError or TimeoutError when the server stays away.
    """
    while True:
        ask = claim.ask()
        ask.sent = clock()
        answer = yield ask
        if answer is None:  # the hot path: it was free
            lease = claim.lease(ask.sent)
        else:
            lease = yield from _try(claim, ask, answer, clock)
        if lease is not None:
            if lease.valid:
                return lease
            yield claim.undo(ask)  # granted, but its time was over before the reply came: not a success
        if not claim.blocking or (claim.until is not None and clock() >= claim.until):
            return None
        if lease is None:
            yield from _wait_turn(claim, clock)
            if claim.until is not None and clock() >= claim.until:
                return None


def _try(claim: Claim, ask: Ask, answer: Any, clock: Clock) -> Steps:
    """From the first answer to a known outcome. Returns the Lease or None."""
    trial = Trial(clock)
    try:
        answer = yield from settle(ask, answer, trial)
        while claim.fenced and answer is not LATE and not _fenced(answer[0]):
            answer = yield from settle(ask, answer[0], trial)
        if answer is LATE:
            if trial.doubt:
                yield claim.undo(ask)
            return None
        holder, fence = answer[0] if claim.fenced else (answer, None)
        if holder is None:
            return claim.lease(ask.sent, fence)
        if holder != claim.token or not trial.doubt:
            return None
        return (yield from _confirm(claim, ask, fence, clock))
    except GeneratorExit:
        raise
    except BaseException:  # an error, or the caller is gone: cancelled, interrupted
        if trial.doubt:
            yield claim.undo(ask)
        raise


def _fenced(reply: Any) -> bool:
    return type(reply) is list and len(reply) == 2 and type(reply[0]) in (_NULL, bytes) and type(reply[1]) is int


def _confirm(claim: Claim, ask: Ask, fence: int | None, clock: Clock) -> Steps:
    """Ours since a command whose reply was lost: when, nobody knows. So the lease is set anew and counts from that."""
    if not claim.ms:
        return claim.lease(ask.sent, fence)
    sent = yield from extend(claim.key, claim.token, claim.ms, clock=clock)
    return None if sent is None else claim.lease(sent, fence)


def _wait_turn(claim: Claim, clock: Clock) -> Steps:
    """Sleep until the holder's lease ends or `sleep` seconds have passed, whichever is first."""
    ask = Ask(say.PTTL, claim.key, until=claim.until)
    left = yield from settle(ask, (yield ask), Trial(clock))
    pause = claim.sleep
    if left is not LATE and left != -1:  # -1: a holder without end
        pause = min(pause, left / 1000)
    pause = max(pause, SHORTEST_PAUSE)
    yield Sleep(_within(pause, claim.until, clock))


def release(lease: Lease, clock: Clock) -> Steps:
    """Let go. Returns whether the lock was the caller's. It stays the caller's until this returns: what raises can be repeated.

    A key that is gone after a lost reply is taken for the work of that lost command, if the lease had not run out before it.
    """
    ask = Ask(say.RELEASE, lease.key, lease.token)
    started = clock()
    answer = yield ask
    if answer == 1:
        return True
    trial = Trial(clock)
    try:
        answer = yield from settle(ask, answer, trial)
    except Exception:
        if trial.doubt:
            lease.doubt_release(started)
            yield Undo([lease.key], [lease.token], lease.deadline, ask.stale)
        raise
    if trial.doubt:
        lease.doubt_release(started)
    return bool(answer) or lease.release_doubted


def extend(
    key: bytes, token: bytes, ms: int, *, add: bool = False, clock: Clock
) -> Steps:
    """A new lease of `ms`, or with `add` what is left and `ms` more. Returns when it was sent, None: not the caller's."""
    ask = Ask(say.ADD if add else say.EXTEND, key, token, ms)
    ask.sent = clock()
    answer = yield ask
    if answer != b"OK" and answer != 1:
        answer = yield from settle(ask, answer, Trial(clock))
    return ask.sent if answer == b"OK" or answer == 1 else None


def prolong(lease: Lease, ms: int, replace: bool, clock: Clock) -> Steps:
    """Move the end of a lease: to `ms` from now, or `ms` further. Returns whether it was the caller's.

    "Further" is sent as an end too, counted from the lease as this process knows it, so that asking again after a lost reply
    does not add twice. Until the server answered, the earlier of the two ends holds.
    """
    left = lease.remaining
    if replace:
        lease.deadline = min(lease.deadline, clock() + ms / 1000)
    elif left:
        ms += int(left * 1000)
    sent = yield from extend(lease.key, lease.token, ms, add=not replace and not left, clock=clock)
    if sent is None:
        return False
    lease.deadline = sent + ms / 1000
    return True


def inspect(verb: int, key: bytes, clock: Clock) -> Steps:
    """Ask a question that changes nothing. Returns the reply."""
    ask = Ask(verb, key)
    return (yield from settle(ask, (yield ask), Trial(clock)))


def acquire_many(names: list[Any], keys: list[bytes], token: bytes, ms: int, clock: Clock) -> Steps:
    """Acquire each name that is free, all in one flush with one token. Returns a list of Lease or None.

    An error reply to one of them releases what the others got, and is raised.
    """
    ask = AskMany(say.ACQUIRE if ms else say.ACQUIRE_ENDLESS, keys, [token] * len(keys), ms)
    ask.sent = clock()
    answers = yield ask
    trial = Trial(clock)
    try:
        if type(answers) is not list:
            answers = yield from settle(ask, answers, trial)
        end = ask.sent + ms / 1000 if ms else math.inf
        leases: list[Lease | None] = [
            Lease(name, key, token, end) if answer is None else answer
            for name, key, answer in zip(names, keys, answers, strict=True)
        ]
        for i, odd in enumerate(leases):
            if odd is not None and type(odd) is not Lease:
                leases[i] = yield from _again(Claim(names[i], keys[i], token, ms), odd, trial)
    except GeneratorExit:
        raise
    except BaseException:
        yield Undo(keys, ask.tokens, math.inf, ask.stale)
        raise
    if clock() >= end:
        yield Undo(keys, ask.tokens, math.inf)
        return [None] * len(keys)
    return leases


def _again(claim: Claim, answer: Any, trial: Trial) -> Steps:
    """One name of a batch that was not simply free. Asked again on its own where the answer does not say all."""
    if type(answer) is bytes and (answer != claim.token or not trial.doubt):
        return None
    ask = claim.ask()
    ask.sent = trial.clock()
    answer = yield ask
    if answer is None:
        return claim.lease(ask.sent)
    alone = Trial(trial.clock)
    alone.doubt = trial.doubt
    answer = yield from settle(ask, answer, alone)
    if answer is None:
        return claim.lease(ask.sent)
    if answer == claim.token and alone.doubt:
        return (yield from _confirm(claim, ask, None, trial.clock))
    return None


def release_many(leases: list[Lease], clock: Clock) -> Steps:
    """Let go of several, in one flush. Returns a list of bool: whether each was the caller's."""
    session = yield from look(clock)
    names = [lease.key for lease in leases]
    tokens = [lease.token for lease in leases]
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
    ask.sent = clock()
    answers = yield ask
    if type(answers) is list and type(ask) is Call and not any(isinstance(part, Exception) for part in answers):
        answers = [answer for part in answers for answer in part]
    released: list[bool] = []
    for i, lease in enumerate(leases):
        answer = answers[i] if type(answers) is list and len(answers) == len(leases) else None
        if type(answer) is int and (answer or not lease.release_doubted):
            released.append(bool(answer))
        else:  # lost, or an error: alone, with all that it takes to know the outcome
            if type(answers) is Lost:
                lease.doubt_release(ask.sent)
            released.append((yield from release(lease, clock)))
    return released


def look(clock: Clock) -> Steps:
    """The session with the server; connects if need be."""
    trial = Trial(clock)
    while type(answer := (yield Capabilities())) is Lost:
        yield Sleep(trial.pause(answer))
    return answer
