"""Random walks of the helpers `once`, `refill` and `every`: callers of several clients, functions that take their time
or raise, connections that break, processes that stop and die.

Checked after each event: no two functions run by leases that are both believed in; what is kept is kept by who holds
the lock, and is never older than what was kept, or discarded, before; in each period there is one run at most; and what
callers get. At the end, where nothing fails any more: nobody waits for ever, each period has its run, and no lock is
left. No decisions about locks are made here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import fastlock
from fastlock._locks import aio_every
from fastlock._protocol import commands, periods, steps, values
from fastlock._protocol.lease import Lease
from support.run_steps import Clock
from support.walk_clients import Actor, Body, Planned, WalkedClient, perform
from support.walk_server import TOLERANCE, Entry
from support.walks import SOON, Event, Walk

NAME, KEY = "job", b"job"
PERIOD = 8.0  # seconds


@dataclass(eq=False)
class Run:
    """A run of a user's function. number: of this run among all, in order."""

    actor: Actor
    lease: Lease
    number: int


class HelperWalk(Walk):
    """What the walks of all helpers have in common. lock: the name of the lock under which functions run."""

    jumps = (0.01, 0.3, 1.1, 3.0, 6.0)
    lock = KEY

    def __init__(self, path: str, clock: Clock, seed: int) -> None:
        self.reliable = seed % 3 == 0  # whether nothing fails at all
        super().__init__(path, clock, seed, faults=not self.reliable)
        self.running: list[Run] = []
        self.runs = 0
        # How many want the same at once, how often the function raises, and how soon it ends
        self.arrival, self.failing = self.random.choice((0.1, 0.5)), self.random.choice((0.1, 0.6))
        self.pace = self.random.choice((0.15, 0.15, SOON))
        self.complaints: list[str] = []  # of what happened within a function, whose errors are its caller's
        for client in self.clients:
            client.api.lock = self.noted(client.api.lock)

    def noted(self, make: Callable[..., Any]) -> Callable[..., Any]:
        """Have the actor that makes a lock know it."""

        def lock(*args: Any, **settings: Any) -> Any:
            self.current.lock = make(*args, **settings)
            return self.current.lock

        return lock

    async def work(self, actor: Actor) -> int:
        """The user's function."""
        self.runs += 1
        run = Run(actor, actor.lock._leases[None], self.runs)
        self.begins(run)
        self.running.append(run)
        try:
            await perform(Body(self.pace if self.open else SOON))
        finally:
            self.running.remove(run)
        return run.number

    def begins(self, run: Run) -> None:
        """Complain of a run that must not begin."""

    def go_on(self, actor: Actor) -> None:
        self.advance(actor, error=Planned() if self.random.random() < self.failing else None)

    def check(self) -> None:
        assert not self.complaints, self.complaints
        believed = [run for run in self.running if run.lease._deadline > self.clock() + TOLERANCE]
        for run in believed:
            assert self.server.holds(self.lock, run.lease._raw_token), "believed in, and not held"
        assert len(believed) <= 1, "two run at once"

    def run(self) -> None:
        """Walk. AssertionError: a promise was broken."""
        self.wander(220)
        self.until(lambda: not any(client.stopped for client in self.clients), "all go on")
        self.until(self.over, "all callers are served")
        self.check_end()

    def over(self) -> bool:
        return self.idle() and all(actor.client.dead for actor in self.actors)

    def check_end(self) -> None:
        """No lock is left, but what the dead hold, or nobody could release; and nothing when its time has passed."""
        if self.lock in self.server.state:
            excused = "away" in self.log or any(client.dead for client in self.clients)
            assert excused, f"left behind: {self.server.state}"
        self.skip(values.VERSION_KEPT_MS / 1000 + 1)
        assert not self.server.state, f"left behind: {self.server.state}"


class ValueWalk(HelperWalk):
    """What the walks of `once` and of `refill` have in common: values that are kept. key: where."""

    key = KEY

    def __init__(self, path: str, clock: Clock, seed: int) -> None:
        super().__init__(path, clock, seed)
        self.kept: dict[int, float] = {}  # until when each value was there that ever was; infinite: it is there now
        self.last = 0  # the value that was kept last
        # When each call began, the first value that it may get, and how often values had been discarded
        self.timeout = self.random.choice((5, 10))
        self.began: dict[Actor, tuple[float, int, int]] = {}
        self.made: dict[Actor, int] = {}  # the value that a call's own function made
        for _ in range(6):
            self.actors.append(Actor(self.random.choice(self.clients), self.caller))

    async def caller(self, actor: Actor) -> Any:
        """Call the helper, once."""
        raise NotImplementedError

    def begins(self, run: Run) -> None:
        self.made[run.actor] = run.number

    def value(self, state: dict[bytes, Entry]) -> int:
        """The value that is there; 0: none is."""
        return int(state[self.key].value) if self.key in state else 0

    def note(self) -> None:
        """Note what is there now."""
        there = self.value(self.server.state)
        for value, until in self.kept.items():
            if until == math.inf and value != there:
                self.kept[value] = self.clock()
        if there:
            self.kept[there] = math.inf

    def executed(self, call: tuple[bytes, ...], before: dict[bytes, Entry], reply: Any) -> None:
        was, there = self.value(before), self.value(self.server.state)
        if there and there != was:
            assert call[:2] == (b"EVALSHA", values.KEEP_LUA.sha), "another command has made a value"
            held = before.get(self.lock)
            token = call[3 + int(call[2])]
            assert held is not None and commands.token_matches(held.value, token), "kept by who does not hold the lock"
            assert there >= self.last, "an older value has taken the place of a newer one"
            self.last = there
        self.note()

    def skip(self, seconds: float) -> None:
        super().skip(seconds)
        self.note()

    def end(self, actor: Actor, result: Any) -> None:
        super().end(actor, result)
        if actor in self.began:
            self.check_result(actor, result)
            if self.open:
                self.actors.append(Actor(self.random.choice(self.clients), self.caller))

    def check_result(self, actor: Actor, result: Any) -> None:
        """Raise AssertionError if a caller must not get this result, or error."""
        if isinstance(result, fastlock.LockNotAcquiredError):
            assert actor.lock.blocking_timeout is not None or not actor.lock.blocking, "it may wait"
        elif isinstance(result, Exception) and not isinstance(result, Planned):
            assert not self.reliable, f"without a reason: {result!r}"

    def check_known(self, actor: Actor, value: int) -> None:
        """The value was there while the call lasted."""
        assert self.kept.get(value, -math.inf) >= self.began[actor][0], f"{value} was not there"


class OnceWalk(ValueWalk):
    """A walk of `once`."""

    key = values.result_key(KEY)

    async def caller(self, actor: Actor) -> Any:
        self.began[actor] = self.clock(), 0, 0
        limit, busy = self.random.choice((None, None, 4)), self.random.choice(("wait", "wait", "wait", "skip", "raise"))
        ttl = self.random.choice((2, 30))
        options = {"on_busy": busy, "blocking_timeout": limit, "timeout": self.timeout}
        return await actor.client.api.once(NAME, lambda: self.work(actor), ttl=ttl, **options)

    def begins(self, run: Run) -> None:
        super().begins(run)
        if run.lease.valid and self.value(self.server.state):
            self.complaints.append("it runs although its result is there")

    def events(self) -> Iterator[Event]:
        yield from super().events()
        if self.open:
            yield Event("forget", self.forget, 0.03)

    def forget(self) -> None:
        client = self.random.choice(self.clients)
        if client.runs:
            self.begin(Actor(client, lambda _: client.api.forget(NAME)))

    def check_result(self, actor: Actor, result: Any) -> None:
        super().check_result(actor, result)
        if isinstance(result, int):
            self.check_known(actor, result)
        elif isinstance(result, fastlock.LockLostError):
            assert self.kept.get(self.made[actor]) != math.inf, "its result is kept, and it is told otherwise"


class RefillWalk(ValueWalk):
    """A walk of `refill`. stale: seconds for which old values are served."""

    lock = values.load_key(KEY)

    def __init__(self, path: str, clock: Clock, seed: int) -> None:
        super().__init__(path, clock, seed)
        self.stale = self.random.choice((0, 10))
        self.first = 0  # no value before this may be kept, as all were discarded since their loaders began
        self.discards = 0
        self.found_old: dict[Actor, int] = {}  # the old value that a call has found

    async def caller(self, actor: Actor) -> Any:
        self.began[actor] = self.clock(), self.first, self.discards
        options = {"blocking_timeout": self.random.choice((None, None, 4)), "timeout": self.timeout}
        ttl = self.random.choice((2, 10))
        return await actor.client.api.refill(NAME, lambda: self.work(actor), ttl, stale=self.stale, **options)

    def begins(self, run: Run) -> None:
        super().begins(run)
        entry = self.server.state.get(self.key)
        if run.lease.valid and entry is not None and entry.left > (self.stale + TOLERANCE) * 1000:
            self.complaints.append("it loads although a fresh value is there")

    def events(self) -> Iterator[Event]:
        yield from super().events()
        if self.open:
            yield Event("invalidate", self.invalidate, 0.03)

    def invalidate(self) -> None:
        client = self.random.choice(self.clients)
        if client.runs:
            self.begin(Actor(client, lambda _: client.api.invalidate(NAME)))

    def executed(self, call: tuple[bytes, ...], before: dict[bytes, Entry], reply: Any) -> None:
        super().executed(call, before, reply)
        if call[:2] == (b"EVALSHA", values.KEEP_LUA.sha) and self.value(self.server.state) != self.value(before):
            assert self.last >= self.first, "kept although it was discarded as it was loaded"
        elif call[:2] == (b"EVALSHA", values.DISCARD_LUA.sha) and isinstance(reply, int):
            assert not self.value(self.server.state), "not discarded"
            self.first, self.discards = self.runs + 1, self.discards + 1

    def advance(self, actor: Actor, answer: Any = None, error: BaseException | None = None) -> None:
        looks = isinstance(actor.step, steps.RawCommands) and actor.step.calls == [(b"GET", KEY), (b"PTTL", KEY)]
        if looks and type(answer) is list and type(answer[0]) is bytes and 0 <= answer[1] <= self.stale * 1000:
            self.found_old[actor] = int(answer[0])
        super().advance(actor, answer, error)

    def stop_at(self, actor: Actor, step: Any) -> None:
        assert not (isinstance(step, steps.Wait) and actor in self.found_old), "it waits although there is a value"
        super().stop_at(actor, step)

    def check_result(self, actor: Actor, result: Any) -> None:
        super().check_result(actor, result)
        assert actor not in self.found_old or actor.lock is not None, "nobody loads, though the value is old"
        if isinstance(result, int):
            assert result >= self.began[actor][1], "older than a change that came before the call"
            if result != self.made.get(actor):
                self.check_known(actor, result)
            elif self.reliable and self.discards == self.began[actor][2]:
                assert result in self.kept, "not kept"
        elif isinstance(result, Exception) and actor in self.found_old:
            assert self.kept[self.found_old[actor]] < math.inf, f"{result!r} although there is an old value"


class WalkedJob(aio_every.Job):
    """A job whose task the walk carries out."""

    walk: EveryWalk
    rests = False  # whether it waits for the next period

    async def _sleep(self, seconds: float) -> None:
        if not self._stopping:
            self.rests = True
            await self._transport.performed(steps.Sleep(seconds))
            self.rests = False

    def _after_run(self, claim: periods.Claim) -> steps.Steps[float]:
        lease, ended = self._lease, self.walk.server.ms()
        assert lease is not None
        held = lease.valid
        time = yield from super()._after_run(claim)
        if held and lease.valid:
            self.walk.done = max(self.walk.done, ended)
        return time


class EveryWalk(HelperWalk):
    """A walk of `every`."""

    def __init__(self, path: str, clock: Clock, seed: int) -> None:
        super().__init__(path, clock, seed)
        self.claims: dict[int, bytes] = {}  # the token that claimed a period, by the end of that
        self.done = 0.0  # when the last run ended that was carried out as it should be, by the server's time
        self.ran: set[bytes] = set()  # tokens by which the function ran
        self.owners: dict[bytes, Actor] = {}
        self.jobs: dict[Actor, WalkedJob] = {}
        for _ in range(4):
            self.add(self.random.choice(self.clients))

    def add(self, client: WalkedClient) -> None:
        """A process begins with the job."""
        actor = Actor(client, lambda _: job._work())
        actor.patient = True
        timeout, at_once = self.random.choice((None, 3.0)), self.random.random() < 0.7
        job = self.jobs[actor] = WalkedJob(client.api, NAME, PERIOD, lambda: self.work(actor), timeout, at_once)
        job.walk = self
        self.actors.append(actor)

    def begins(self, run: Run) -> None:
        token = run.lease._raw_token
        if not run.lease.valid:
            self.complaints.append("it runs without a lease")
        if token in self.ran:
            self.complaints.append("it runs twice by one claim")
        self.ran.add(token)

    def send(self, actor: Actor, request: Any) -> None:
        if isinstance(request, periods.ClaimPeriod):
            self.owners[request.token] = actor
        super().send(actor, request)

    def executed(self, call: tuple[bytes, ...], before: dict[bytes, Entry], reply: Any) -> None:
        if call[:2] != (b"EVALSHA", periods.CLAIM_LUA.sha) or type(reply) is not list or not reply[0]:
            return
        token, now = call[6], round(self.server.ms() * 1000) // 1000
        if KEY in before and commands.token_matches(before[KEY].value, token):
            return  # it confirms a claim
        assert KEY not in before, "a run has taken the lock of another one"
        end = now + reply[1]
        assert end % (PERIOD * 1000) == 0 and end not in self.claims, "a period is run twice"
        assert end - PERIOD * 1000 >= self.done, "a period is run that began as the job ran before"
        first = self.jobs[self.owners[token]]._first
        assert first <= end - PERIOD * 1000, "a period is run that had begun before the job"
        self.claims[end] = token

    def check(self) -> None:
        super().check()
        if KEY in self.server.state and self.idle() and "away" not in self.log:  # else a lock ends by itself
            owner = self.owners[commands.PLAIN_PREFIX + self.server.state[KEY].value[3:]]
            assert owner.client.dead or not self.jobs[owner].rests, "nobody has the lock"

    def run(self) -> None:
        """Walk. AssertionError: a promise was broken."""
        self.wander(300)
        self.until(lambda: not any(client.stopped for client in self.clients), "all go on")
        self.rest(3)
        begin = self.server.ms()
        self.rest(4)
        if not all(actor.client.dead for actor in self.jobs):
            ran = [end for end, token in self.claims.items() if end > begin and token in self.ran]
            assert len(ran) >= 3, "a period was not run"
        for job in self.jobs.values():
            job._stopping = True
        self.until(self.over, "all jobs have ended")
        self.check_end()

    def rest(self, count: float) -> None:
        """Let so many periods pass."""
        end = self.clock() + count * PERIOD
        self.until(lambda: self.clock() >= end, "time to pass")
