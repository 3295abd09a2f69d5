"""Law: what an operation on a lock asks, and what it makes of each answer. Written once, for threads and for asyncio.

Outcomes are never guessed. A command whose reply was lost is asked again with the same token: the server's answer then
says whether it is ours. Whoever gives up in doubt leaves an `Undo`, carried out after whatever it undoes. What steps
and answers are: `_steps.py`. Never here: sockets, asyncio, threads, sleep.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import Any

from fastlock import _batch as batch
from fastlock import _commands as say
from fastlock import _errors as errors
from fastlock._extension import Outcome as Outcome
from fastlock._extension import extend as extend
from fastlock._extension import inspect as inspect
from fastlock._extension import prolong as prolong
from fastlock._gate import GONE, HAND_OVER, PASSED, SHORTEST_PAUSE, Gate, Gates, Waiter
from fastlock._lease import ENDED, Lease, new_token
from fastlock._stats import Stats
from fastlock._steps import (
    BEHIND,
    CALLS,
    LATE,
    ONE,
    OVER,
    PASSED_ON,
    Ask,
    AskMany,
    Call,
    Capabilities,
    Clock,
    Join,
    Leave,
    Lost,
    Sleep,
    Steps,
    Trial,
    Undo,
    Wait,
    called,
    or_undo,
    settle,
    settled,
    within,
)

LAST_LOOK = 0.01  # seconds before the end of a blocking_timeout, so that its wait is of some use
RELEASE_CHUNK = 100  # names in one script: a server does nothing else meanwhile (35 us)


class Acquire(Ask):
    """Acquire a name: a step, whose answer goes to `rest`. Waits while its terms allow it. Checked values only: `ms` 0
    means a lease without end.

    The outcome is the Lease, or None: somebody else holds it. Raises redis-py's exception of an error reply;
    ConnectionError or TimeoutError when the server stays away.
    """

    blocking = False
    polls = False  # whether it may not use the queue
    given = False  # whether the caller chose its token
    task = "let a waiter take what it was handed"  # for who reads of a refusal
    scripts = (say.ENTER_LUA,)
    alone = False  # whether it waits by itself, in strict order, or with a token that was given
    sleep = 0.1  # seconds between two looks, where the holder cannot be told that somebody waits
    doubted = False  # a look's reply was lost, once: from then on our own token may turn up at any time
    polled = False  # whether it has waited without a queue
    late_grants = 0  # to it, whose time was over before the reply came
    waiting: Waiter | None = None  # as which it waits, or did
    handed: Lease | None = None  # what waiting gave it
    seen: Any = None  # the last look of the hot path, if the law is to judge its answer: (what was asked, the answer)

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
        return Undo([self.key], [self.token], self.stale)

    def rest(self, answer: Any, clock: Clock) -> Steps:
        """From the first answer to the outcome."""
        lease = yield from or_undo(self._looks(answer, clock), lambda: self.undo() if self.doubted else None)
        if lease is None and self.doubted:
            yield self.undo()
        return lease

    def _looks(self, answer: Any, clock: Clock) -> Steps:
        while True:
            waiter = answer if type(answer) is Waiter else None
            lease = None if waiter is not None or answer is BEHIND else (yield from self._outcome(answer, clock))
            if lease is not None:
                if lease.valid:
                    return lease
                # granted, but its time was over before the reply came: not a success; undone before it is tried again
                self.late_grants += 1
                yield from self._withdraw(clock)
            if not self.blocking or (waiter is None and self._late(clock)):
                return None
            if lease is None and not self.polls:
                lease = yield from self._queue(waiter, clock)
                if lease is not None or not self.polls:
                    return lease
            elif lease is None:
                yield from self._wait_turn(clock)
            answer = yield self

    def local(self, gates: Gates, now: float) -> Any:
        """BEHIND, where it is for the queue to say who is next: no look of its own."""
        if not self.blocking or self.polls:
            return None
        return BEHIND if self.alone or gates.busy(self.key, now) else None

    def _queue(self, waiter: Waiter | None, clock: Clock) -> Steps:
        """Wait: behind those of this client, and with the first of them in the server's queue."""
        self.waiting = waiter = waiter or self.waiter()
        last = None if self.until is None else self.until - LAST_LOOK
        lease = None
        seen, self.seen = self.seen, None
        try:
            if waiter.gate is None:
                yield Join(waiter)
            gate: Any = waiter.gate
            while True:
                if waiter.lease is None and gate.error is not None:
                    raise errors.afresh(gate.error)
                if waiter.lease is None and gate.doubts(waiter, clock()):
                    yield from self._see(gate, clock)
                if seen is not None:
                    ask, answer = seen
                    yield from self._enter(waiter, ask, answer, clock)
                elif waiter.lease is None and gate.gates.ask(waiter, clock()):
                    yield from self._enter(waiter, self._look(gate), None, clock)
                if waiter.place is None and (over := gate.gates.returned(waiter, clock())) is not None:
                    self.late_grants += 1
                    gate = waiter.gate
                    yield Undo([self.key], [over.proof])
                    continue
                lease, waiter.lease = waiter.lease, None  # together: no interrupt comes between
                if lease is not None:
                    self.token, self.sent, self.handed = lease.proof, lease.deadline - self.ms / 1000, lease  # to undo
                    gate.gates.taken(waiter)
                if lease is not None or self.polls or self._late(clock):
                    break
                seen = yield Wait(waiter, last, self._look)
        except GeneratorExit:  # nobody drives these steps any more: nothing can be left
            self.leave(waiter, lease, clock)
            raise
        except BaseException:
            if (left := self.leave(waiter, lease, clock)) is not None:
                yield left
            raise
        if lease is None and (left := self.leave(waiter, None, clock)) is not None:
            yield left
        return lease

    def abandon(self, gates: Gates, clock: Clock) -> list[Undo]:
        """The caller is gone, struck from outside. Returns what is to be undone; asked once more, that again."""
        left = None if self.waiting is None else self.leave(self.waiting, None, clock)
        undos = [] if left is None else [left]
        passed = self.handed is not None and gates.release(self.handed, clock()) in (PASSED, GONE)
        if not passed and (self.sent or self.doubted):
            undos.append(self.undo())
            undos[-1].link = self.link
        return undos

    def _see(self, gate: Gate, clock: Clock) -> Steps:
        """Ask whether what goes round here still holds the name."""
        held, ask = gate.held, Ask(say.GET, self.key)
        ask.until = self.until
        try:
            found = yield from settled(ask, Trial(clock))
        except errors.ResponseError as error:  # who may not ask waits for the end of the lease
            if not errors.own(error):
                raise
            return
        if held is not None and found is not LATE and not say.proves(found, held.proof):
            with gate.gates.mutex:
                gate.disowned(held)

    def waiter(self) -> Waiter:
        """Who waits for this. In a queue its own token is its place, where it is to be told from others of the client,
        or may turn up by itself."""
        own = self.token if self.alone or self.doubted else None
        return Waiter(self.name, self.key, self.ms, self.fenced, own, self.sleep)

    def _wait_turn(self, clock: Clock) -> Steps:
        """Sleep until the holder's lease ends or `sleep` seconds have passed, whichever is first."""
        self.polled = True
        ask = Ask(say.PTTL, self.key)
        ask.until = self.until
        left = yield from settled(ask, Trial(clock))
        pause = self.sleep
        if left is not LATE and left != -1:  # -1: a holder without end
            pause = min(pause, left / 1000)
        last = None if self.until is None else self.until - LAST_LOOK
        yield Sleep(within(max(pause, SHORTEST_PAUSE), last, clock), held=True)

    def _look(self, gate: Gate) -> Call:
        """A look of the first at the server, by the place of its gate."""
        ask = Call([say.enter(self.key, gate.gates.inbox, self.fenced, gate.place, b"%d" % self.ms)])
        ask.ms, ask.until, ask.hears, ask.stale = self.ms, self.until, True, gate.stale
        return ask

    def _enter(self, waiter: Waiter, ask: Ask, answer: Any, clock: Clock) -> Steps:
        """Ask the server for the place of a gate, or go on from its answer: the waiter gets the lease, or is to
        wait."""
        gate: Any = waiter.gate
        trial = Trial(clock)
        try:
            reply = yield from called(ask, (yield ask) if answer is None else answer, _entered, trial)
        except errors.RedisError as error:
            own = errors.own(error)  # else a signal's handler raised it, for this caller alone
            if own and errors.away(error) and (self.until is None or clock() < self.until):
                gate.gates.failed(gate, errors.afresh(error))  # the end of its own time would say nothing to the others
            self.polls = own and errors.forbids(error)
            if not self.polls:
                raise
            if gate.waited:  # it might queue, and may not take what it is handed
                ask.link.refused(self, error)
            return
        finally:
            gate.link, gate.stale = ask.link, ask.stale
        if reply is LATE:
            return
        if not reply[0]:
            left = math.inf if reply[1] < 0 else reply[1] / 1000
            with gate.gates.mutex:
                gate.queued(left, bool(reply[2]), clock())
            return
        lease = Lease(self.name, self.key, gate.place, ask.end(), reply[2] if self.fenced else None)
        lease.contended = reply[1] > 0 or gate.waited
        if lease.valid:
            gate.gates.stats.recovered += trial.doubt
            with gate.gates.mutex:
                waiter.lease = lease  # not before: who is interrupted here leaves its place, or what it was granted
                gate.granted(waiter, lease, reply[1], ask.sent)
            return
        self.late_grants += 1
        undo = Undo([self.key], [gate.place], ask.stale)  # its time was over before the reply came
        undo.link = ask.link  # before the same place is asked for again
        yield undo
        with gate.gates.mutex:
            gate.renew()

    def leave(self, waiter: Waiter, lease: Lease | None, clock: Clock) -> Undo | None:
        """Wait no longer: what was handed over goes to the next, or back."""
        waiter.lease = waiter.lease or lease
        gate = waiter.gate
        if gate is None:
            return None
        handed, place = gate.gates.leave(waiter, clock())
        if handed is not None:
            return Undo([self.key], [handed.proof])
        if place is None:
            return None
        return Leave(say.leave(self.key, place, gate.gates.inbox), gate.stale, gate.link, matters=not self.polls)

    def _withdraw(self, clock: Clock) -> Steps:
        release = Release(Lease(self.name, self.key, self.token, math.inf))  # somebody may wait for it by now
        undo = lambda: Undo([self.key], [self.token], release.stale)  # noqa: E731
        yield from or_undo(release.asked(Trial(clock)), undo)
        if not self.given:  # of the old token something may still be on its way: a release, or where nobody may end it
            self.token, self.doubted = new_token(), False
            if self.fenced:
                self.calls = [say.acquire_fenced(self.key, self.token, self.ms)]

    def _late(self, clock: Clock) -> bool:
        """Whether there is no time for another look."""
        return self.until is not None and clock() >= self.until - LAST_LOOK

    def _lease(self, sent: float, fence: int | None) -> Lease:
        return Lease(self.name, self.key, self.token, sent + self.ms / 1000 if self.ms else math.inf, fence)

    def _outcome(self, answer: Any, clock: Clock) -> Steps:
        """From one answer to what it means. Returns the Lease, in time or not, or None."""
        trial = Trial(clock)
        try:
            if self.fenced:
                answer = yield from called(self, answer, _fenced, trial)
            else:
                answer = yield from settle(self, answer, trial)
        finally:
            self.doubted |= trial.doubt
        if answer is LATE:
            return None
        holder, fence = answer if self.fenced else (answer, None)
        if holder is None:
            return self._lease(self.sent, fence)
        if not self.doubted or not say.proves(holder, self.token):
            return None
        return (yield from self._confirm(fence, clock))

    def _confirm(self, fence: int | None, clock: Clock) -> Steps:
        """Ours since a command whose reply was lost: when, nobody knows. So the lease is set anew and counts from
        that."""
        if not self.ms:
            return self._lease(self.sent, fence)
        sent = yield from extend(self.key, self.token, self.ms, clock)
        return None if sent is None else self._lease(sent, fence)


def _entered(reply: Any) -> bool:
    if type(reply) is not list or len(reply) != 3:
        return False
    return type(reply[0]) is int and type(reply[1]) is int and type(reply[2]) is int


def _fenced(reply: Any) -> bool:
    return type(reply) is list and len(reply) == 2 and type(reply[0]) in (type(None), bytes) and type(reply[1]) is int


class Release(Ask):
    """Let go of a lease. The outcome is whether the lock was the caller's.

    It stays the caller's until the server answered: what raises can be repeated. A key that is gone after a lost reply
    is taken for the work of that lost command, if the lease had not run out before it.
    """

    parting = True
    task = "hand a lock over to the next who waits"  # for who reads of a refusal
    scripts = (say.HAND_OVER_LUA,)

    def __init__(self, lease: Lease) -> None:
        self.verb = say.RELEASE
        self.key = lease.key
        self.token = lease.proof
        self.ms = 0
        self.lease = lease
        lease.parting = True
        if lease.contended:
            self.hand_over()

    def undo(self) -> Undo:
        if self.lease.deadline == ENDED:  # it is another's now, by the same token
            return Undo([], [], self.stale)
        self.lease.doubt_release(self.sent)  # repeated, it may find what this undo has done
        return Undo([self.key], [self.token], self.stale)

    def rest(self, answer: Any, clock: Clock) -> Steps:
        """From the first answer to the outcome."""
        lease = self.lease
        trial = Trial(clock)
        steps = self._ended(answer, trial)
        answer = yield from or_undo(steps, lambda: self._doubted(trial), lambda: self._doubted(trial) or self.undo())
        self._doubted(trial)
        return bool(answer) or lease.release_doubted

    def asked(self, trial: Trial) -> Steps:
        """Ask, and settle the answer."""
        return (yield from self._ended((yield self), trial))

    def local(self, gates: Gates, now: float) -> Any:
        """PASSED_ON, where another of this client has it now; else it goes to who waits elsewhere, if anybody does."""
        what = gates.release(self.lease, now)
        if what == HAND_OVER:
            self.hand_over()
        return PASSED_ON if what == PASSED else OVER if what == GONE else None

    def abandon(self, gates: Gates, clock: Clock) -> list[Undo]:
        """As of an Acquire. It is carried out, also where it has not begun: who leaves a `with` does not try again."""
        gates.release(self.lease, clock())
        self.sent = self.sent or clock()
        return [self.undo()]

    def hand_over(self) -> None:
        """Ask for a release to the next who waits, if anybody does."""
        self.kind, self.verb = CALLS, -1
        self.calls = [say.hand_over(self.key, self.token)]

    def _ended(self, answer: Any, trial: Trial) -> Steps:
        if answer is PASSED_ON or answer is OVER:
            return answer is PASSED_ON
        if self.kind == ONE:
            answer = yield from settle(self, answer, trial)
            if answer or not say.markable(self.token):
                return answer
            self.hand_over()  # somebody waits, or it is not the caller's
            answer = yield self
        try:
            return (yield from called(self, answer, _is_int, trial))
        except errors.ResponseError as error:
            if not errors.forbids(error):
                raise
            released = yield from self._alone(trial)
            if released:  # to those who wait for it, who come to look by themselves
                self.link.refused(self, error)
            return released

    def _alone(self, trial: Trial) -> Steps:
        """By a user who may not hand over: in whichever form the token stands there; those who wait come to look."""
        for _ in range(2):  # it can be marked in between, once
            look = Ask(say.GET, self.key)
            look.parting = self.parting
            held = yield from settled(look, trial)
            if not say.proves(held, self.token):
                break
            ask = Ask(say.RELEASE, self.key, held)
            ask.parting = self.parting
            try:
                if (yield from settled(ask, trial)):
                    return 1
            finally:
                self.stale += ask.stale  # of what broke under it: to be ended before all is undone
        return 0

    def _doubted(self, trial: Trial) -> Undo | None:
        """What went out with its reply lost: it may have been the one that let go."""
        if not trial.doubt:
            return None
        self.lease.doubt_release(trial.doubt_since)
        return Undo([self.key], [self.token], self.stale)


def _is_int(reply: Any) -> bool:
    return type(reply) is int


class AcquireMany(AskMany):
    """Acquire each name that is free, all in one flush with one token: a step, whose answer goes to `rest`. The outcome
    is a list of Lease or None.

    An error reply to one of them releases what the others got, and is raised.
    """

    def __init__(self, names: list[Any], keys: list[bytes], token: bytes, ms: int, stats: Stats) -> None:
        super().__init__(say.ACQUIRE if ms else say.ACQUIRE_ENDLESS, keys, [token] * len(keys), ms)
        self.token = token
        self.given = names
        self.stats = stats

    def local(self, gates: Gates, now: float) -> None:
        """As of an Acquire: it never waits."""

    def rest(self, answer: Any, clock: Clock) -> Steps:
        """From the first answer to the outcome."""
        leases = yield from or_undo(_each(self, answer, self.given, clock), self.undo)
        if clock() >= self.end():
            yield self.undo()
            return [None] * len(self.names)
        return self.stats.acquired(leases)

    def abandon(self, gates: Gates, clock: Clock) -> list[Undo]:
        """As of an Acquire."""
        undo = self.undo()
        undo.link = self.link
        return [undo] if self.sent else []


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
    if say.proves(answer, one.token):  # which is fresh with every batch: whatever became of the replies, it is ours
        return (yield from one._confirm(None, clock))
    return None


def release_many(leases: list[Lease], gates: Gates, clock: Clock, released: list[Any] | None = None) -> Steps:
    """Let go of several, in one flush; those that others wait for, in a second one. Returns `released`, filled: whether
    each was the caller's; None where another thread let go of it meanwhile.

    What was released before it failed for others is told when it is repeated.
    """
    released = [] if released is None else released
    told, rest = batch.reported(leases)
    released += told
    try:
        for i in rest if gates.by_key else ():
            released[i] = gates.release(leases[i], clock()) == PASSED
        session = (yield from look(clock, parting=True)) if not all(released) else None
        # what is over by now was passed on, or another thread released it: its token may be the next holder's already
        sent = batch.unended(leases, rest)
        for i in rest if len(sent) < len(rest) else ():
            released[i] = released[i] or None
        if sent:
            yield from _let_go(leases, sent, released, session, clock)
    except BaseException:
        batch.unreported(leases, released)
        raise
    return released


class LetGo:
    """What is left of a release of many that is struck from outside; and what was released, to be told later."""

    def __init__(self, leases: Iterable[Lease | None], released: list[Any]) -> None:
        self.leases = leases
        self.released = released

    def abandon(self, gates: Gates, clock: Clock) -> list[Undo]:
        """As of a Release, of each that nobody has let go of."""
        if not isinstance(self.leases, Collection):  # an iterator that was not asked, or may fail once more
            return []
        leases = list(self.leases)
        if self.released:
            batch.unreported(leases, self.released)
        mine = batch.owned(leases, [])
        left = [lease for lease in mine if lease.deadline != ENDED]
        return [undo for lease in left for undo in Release(lease).abandon(gates, clock)]


def _let_go(given: list[Lease], at: list[int], released: list[Any], session: Any, clock: Clock) -> Steps:
    leases = given if len(at) == len(given) else [given[i] for i in at]
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
    answers = yield from _asked_to_release(ask, leases)
    if type(answers) is list and type(ask) is Call:
        answers = _flat(answers, len(leases))
    whole = type(answers) is list and len(answers) == len(leases)
    odd = batch.ended(leases, answers if whole else [None] * len(leases), at, released)
    if odd:
        yield from _hand_over([given[i] for i in odd], odd, released, clock)


def _asked_to_release(ask: Ask, leases: list[Lease]) -> Steps:
    """The answers of the server. Whoever does not hear them may find, asking again, what it has released already."""
    ask.parting = doubted = True
    try:
        answers = yield ask
        doubted = type(answers) is Lost and answers.sent
    finally:
        if doubted and ask.sent:
            for lease in leases:
                lease.doubt_release(ask.sent)
    return answers


def _flat(answers: list[Any], count: int) -> list[Any]:
    """The answers of a script for each RELEASE_CHUNK names as one for each name; None where one answered an error."""
    flat: list[Any] = []
    for part in answers:
        size = min(RELEASE_CHUNK, count - len(flat))
        flat += part if type(part) is list and len(part) == size else [None] * size
    return flat


def _hand_over(leases: list[Lease], at: list[int], released: list[Any], clock: Clock) -> Steps:
    """Those of a batch that somebody waits for, or that are not the caller's any more: the script knows."""
    ask = Call([say.hand_over(lease.key, lease.proof) for lease in leases])
    answers = yield from _asked_to_release(ask, leases)
    whole = type(answers) is list and len(answers) == len(leases)
    for lease, i, answer in zip(leases, at, answers if whole else [None] * len(leases), strict=True):
        known = lease.deadline == ENDED
        if _is_int(answer):
            released[i] = bool(answer) or lease.release_doubted
        else:  # lost, or an error: alone, with all that it takes to know the outcome
            again = Release(lease)
            again.hand_over()
            released[i] = yield from again.rest((yield again), clock)
        released[i] = released[i] or (None if known else False)
        lease.deadline = ENDED


def look(clock: Clock, parting: bool = False) -> Steps:
    """The session with the server; connects if need be."""
    trial = Trial(clock)
    while type(answer := (yield Capabilities(parting))) is Lost:
        yield Sleep(trial.pause(answer, parting))
    return answer
