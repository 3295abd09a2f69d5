"""Several names acquired as one, by hand: what each reply means, and thousands of seeded runs with what must never be.

One client against a server that loses, delays and reorders (support/server_simulator.py); and many clients at once that
want overlapping sets, on a server that forgets nothing, but whose messages and undos come late: nobody waits for ever,
no name has two holders, nothing is left.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import redis.crc
from hypothesis import given
from hypothesis import strategies as st
from support.functions import in_function
from support.run_steps import CONNECTION, OTHER, After, Clock, Raise, error, lost, run_steps, undone
from support.server_simulator import Gone, ServerSimulator

from fastlock import _errors as errors
from fastlock._protocol import commands, multi
from fastlock._protocol import lease as leases
from fastlock._protocol.extension import Outcome
from fastlock._protocol.lease import ENDED, Lease
from fastlock._protocol.local_queue import RECHECK_SECONDS, LocalQueues
from fastlock._protocol.multi import AcquireAll, MultiLease, extend_all
from fastlock._protocol.steps import Answer, Driver, Enter, RawCommands, Request, Sleep, Wait

pytestmark = pytest.mark.usefixtures("impl")  # leases are compiled
KEYS = [b"a", b"b", b"c"]
ALL, HELD = [[0, None, 0]], [[2, OTHER, 5000]]
EXPECTED = (Gone, errors.ConnectionError, errors.ResponseError)
LITTLE = 1e-6
RUNS = 3000


def acquire(ms: int = 10_000, **settings: Any) -> AcquireAll:
    op = AcquireAll(["A", "B", "C"], list(KEYS), ms)
    for name, value in settings.items():
        setattr(op, name, value)
    return op


def calls(request: Any) -> list[tuple[Any, ...]]:
    """(script, keys, last argument) of each call."""
    return [(call[1], call[3 : 3 + int(call[2])], call[-1]) for call in request.calls]


def noting(seen: list[Any], answer: Any) -> Any:
    """An answer that notes the calls of the request that it answers: an acquire sends one request again, changed."""

    def note(request: Any) -> Any:
        seen.extend(calls(request))
        return answer

    return note


# ----------------------------------------------------------------------------------------------------- canned replies


def test_one_command_acquires_all(clock: Clock) -> None:
    op = acquire()
    ran = run_steps(clock, op, After(0.5, ALL))
    assert [(lease.name, lease._key, lease._raw_token) for lease in ran.outcome] == [
        (name, key, op.tokens[0]) for name, key in zip("ABC", KEYS, strict=True)
    ]
    assert {lease._deadline for lease in ran.outcome} == {clock() - 0.5 + 10}, "counted from before it was sent"
    assert calls(ran.requests[0]) == [(commands.ACQUIRE_ALL_LUA.sha, tuple(KEYS), b"0")] and not ran.undos


def test_leases_without_end(clock: Clock) -> None:
    assert {lease._deadline for lease in run_steps(clock, acquire(0), ALL).outcome} == {math.inf}


@pytest.mark.parametrize(("left", "seconds"), [(5000, 5.0), (-1, None), (0, 0.0)])
def test_a_try_that_fails_says_why_and_leaves_nothing(clock: Clock, left: int, seconds: float | None) -> None:
    op = acquire()
    ran = run_steps(clock, op, [[2, OTHER, left]])
    assert ran.outcome is None and not ran.undos
    assert op.blocked == multi.Blocked("B", "o" * 16, seconds)


@pytest.mark.parametrize("token", [b"by-redis-py", b"fl+" + b"x" * 31, b"fl-" + b"x" * 32, b"", b"\xff" * 35])
def test_a_holder_that_is_not_ours_is_not_shown(token: bytes) -> None:
    assert multi.shown(token) is None


def test_half_of_a_token_is_shown() -> None:
    assert multi.shown(b"fl:0123456789abcdef" + b"f" * 16) == multi.shown(b"fl+0123456789abcdef" + b"f" * 16)
    assert multi.shown(b"fl:0123456789abcdef" + b"f" * 16) == "0123456789abcdef"


def test_it_waits_for_the_one_that_is_held_and_goes_on_with_the_rest(clock: Clock) -> None:
    op, tries = acquire(blocking=True), list[Any]()
    ran = run_steps(clock, op, noting(tries, HELD), [[1, 0, 0]], noting(tries, ALL))
    assert [lease._raw_token for lease in ran.outcome] == op.tokens
    enter = ran.requests[1]
    assert isinstance(enter, Enter) and enter.calls[0][3] == b"b" and op.tokens[1] == enter.queue.entry
    assert [each[2] for each in tries] == [b"0", b"1"], "from now on it holds those before the one that it waits for"
    assert not ran.queues.by_key and not ran.queues.by_entry


def test_what_sorts_behind_the_one_it_waits_for_is_given_up(clock: Clock) -> None:
    """Granted b, it finds a held: who holds a may wait for b."""
    op = acquire(blocking=True)
    ran = run_steps(clock, op, HELD, [[1, 0, 0]], [[1, OTHER, 5000]], [[1, 0, 0]], ALL)
    first = ran.requests[1].queue.entry
    assert [undone(undo) for undo in ran.undos] == [([b"b"], [first])]
    assert ran.outcome is not None and op.tokens[1] != first, "an undo that is late must not release what comes later"
    assert [request.calls[0][3] for request in ran.of(Enter)] == [b"b", b"a"]


def test_what_sorts_before_it_is_kept(clock: Clock) -> None:
    op = acquire(blocking=True)
    ran = run_steps(clock, op, HELD, [[1, 0, 0]], [[3, OTHER, 5000]], [[1, 0, 0]], ALL)
    assert ran.outcome is not None and not ran.undos
    assert [request.calls[0][3] for request in ran.of(Enter)] == [b"b", b"c"]


def test_what_is_held_is_extended_while_it_waits(clock: Clock) -> None:
    """Every third of the lease, also where the other's lease is longer than the wait for a message."""
    op = acquire(1500, blocking=True)
    queued, extended = [[0, 60_000, 1, 9]], [[1, 1]]
    ran = run_steps(
        clock, op, HELD, [[1, 0, 0]], [[3, OTHER, 60_000]],
        queued, queued, extended, queued, extended, [[1, 0, 0]], ALL,
    )  # fmt: skip
    renewals = [request for request in ran.requests if calls(request)[0][0] == commands.RENEW_MANY_LUA.sha]
    assert [calls(request)[0][1:] for request in renewals] == [((b"a", b"b"), b"1500")] * 2
    assert renewals[1].sent - renewals[0].sent == pytest.approx(0.5) == renewals[0].sent - ran.of(Enter)[0].sent
    assert ran.outcome is not None


def test_what_is_lost_while_it_waits_is_extended_no_more(clock: Clock) -> None:
    queued = [[0, 60_000, 1, 9]]
    ran = run_steps(
        clock, acquire(1500, blocking=True), HELD, [[1, 0, 0]], [[3, OTHER, 60_000]],
        queued, queued, [[0, 1]], queued, [[1]], [[1, 0, 0]], ALL,
    )  # fmt: skip
    sent = [call for request in ran.requests for call in calls(request)]
    assert [keys for script, keys, _ in sent if script == commands.RENEW_MANY_LUA.sha] == [(b"a", b"b"), (b"b",)]


def test_nothing_is_extended_where_nothing_is_held(clock: Clock) -> None:
    op = acquire(300, blocking=True)
    ran = run_steps(clock, op, [[2, OTHER, 60_000]], [[0, 60_000, 1, 9]], [[0, 60_000, 1, 9]], [[1, 0, 0]], ALL)
    times = [request.sent for request in ran.of(Enter)]
    assert times[1] - times[0] == times[2] - times[1] == RECHECK_SECONDS


def test_a_lease_that_is_lost_meanwhile_is_acquired_again(clock: Clock) -> None:
    op = acquire(1500, blocking=True)
    ran = run_steps(
        clock, op, HELD, [[1, 0, 0]], [[3, OTHER, 60_000]], [[0, 60_000, 1, 9]], [[0, 60_000, 1, 9]], [[0, 1]],
        [[1, 0, 0]], [[1, OTHER, 5000]], [[1, 0, 0]], ALL,
    )  # fmt: skip
    assert ran.outcome is not None
    assert undone(ran.undos[0])[0] == [b"b", b"c"], "both sort behind a, which it waits for now"
    assert [request.calls[0][3] for request in ran.of(Enter)] == [b"b", b"c", b"c", b"c", b"a"]


def test_a_wait_that_is_too_long_leaves_nothing(clock: Clock) -> None:
    op = acquire(blocking=True, until=clock() + 2)
    queued = [[0, 60_000, 1, 9]]
    ran = run_steps(clock, op, HELD, [[1, 0, 0]], [[3, OTHER, 9000]], queued, queued, queued, [[3, OTHER, 7000]])
    assert ran.outcome is None and ran.leaves[0][3] == b"c"
    assert undone(ran.undos[-1])[0] == KEYS
    assert op.blocked is not None and (op.blocked.name, op.blocked.time_left) == ("C", 7.0), "as it is at the end"
    assert not ran.queues.by_key and not ran.queues.by_entry


def test_the_last_try_uses_a_fresh_token_for_the_name_it_waited_for(clock: Clock) -> None:
    """The command that removes its entry may come late, and would release by that token."""
    op = acquire(blocking=True, until=clock() + 1)
    ran = run_steps(clock, op, HELD, [[0, 60_000, 1, 9]], [[0, 60_000, 1, 9]], ALL)
    assert ran.outcome is not None
    assert ran.leaves[0][5] not in (op.tokens[1], ran.outcome[1]._raw_token) and ran.leaves[0][5] == op.tokens[0]


def test_without_a_queue_it_tries_again_and_holds_nothing_meanwhile(clock: Clock) -> None:
    op, tries = acquire(blocking=True, polls=True, sleep=0.25), list[Any]()
    answers = [HELD, [[1, OTHER, 100]], [[1, OTHER, -1]], ALL]
    ran = run_steps(clock, op, *[noting(tries, answer) for answer in answers])
    assert ran.sleeps == [0.25, 0.1, 0.25] and not ran.undos and ran.outcome is not None
    assert [each[2] for each in tries] == [b"0"] * 4 and op.polled


def test_leases_that_ended_before_the_reply_are_no_success(clock: Clock) -> None:
    op = acquire(1000, blocking=True)
    used = list(op.tokens)
    ran = run_steps(clock, op, After(1.5, ALL), ALL)
    assert [undone(undo) for undo in ran.undos] == [(KEYS, used)] and op.late_grants == 1
    assert not set(used) & {lease._raw_token for lease in ran.outcome}
    once = run_steps(clock, acquire(1000), After(1.5, ALL))
    assert once.outcome is None and undone(once.undos[0])[0] == KEYS


def test_a_lost_reply_is_found_out(clock: Clock) -> None:
    op = acquire()
    ran = run_steps(clock, op, lost(), After(1, ALL))
    assert ran.outcome is not None and op.outcome_unknown and not ran.undos
    assert ran.outcome[0]._deadline == clock() - 1 + 10
    failed = run_steps(clock, acquire(), lost(), HELD)
    assert failed.outcome is None and undone(failed.undos[0])[0] == KEYS


@pytest.mark.parametrize("trouble", [Raise(KeyboardInterrupt()), lost(final=True), error("ERR no")])
def test_a_caller_that_is_gone_leaves_nothing(clock: Clock, trouble: Any) -> None:
    """While it waits for c, and holds a and b."""
    op = acquire(blocking=True)
    ran = run_steps(clock, op, HELD, [[1, 0, 0]], [[3, OTHER, 9000]], trouble)
    assert ran.raised is not None and undone(ran.undos[-1]) == (KEYS, op.tokens)
    assert not ran.queues.by_key and not ran.queues.by_entry
    assert [undone(undo)[0] for undo in op.abandon(ran.queues, clock)][-1] == KEYS
    assert not op.abandon(ran.queues, clock)[:-1] or ran.leaves


def test_an_interrupted_wait_leaves_the_queue(clock: Clock) -> None:
    op = acquire(blocking=True)
    ran = run_steps(clock, op, HELD, [[0, 9000, 1, 9]], Raise(KeyboardInterrupt()))
    assert ran.leaves and ran.leaves[0][3] == b"b" and not ran.undos
    assert not ran.queues.by_key and not ran.queues.by_entry


def test_a_grant_that_nobody_takes_any_more_is_given_back(clock: Clock) -> None:
    op = acquire(blocking=True)
    ran = run_steps(clock, op, HELD, [[1, 0, 0]], Raise(KeyboardInterrupt()))
    assert undone(ran.undos[-1])[0] == KEYS


def test_names_in_several_hash_slots_are_acquired_one_by_one(clock: Clock) -> None:
    op = acquire(blocking=True)
    crossing = [error("CROSSSLOT Keys in request don't hash to the same slot")]
    held = [[0, None, 0], [1, OTHER, 5000], [0, None, 0]]
    tries: list[Any] = []
    ran = run_steps(clock, op, crossing, noting(tries, held), [[1, 0, 0]], [[0, None, 0]] * 3)
    assert [each[1] for each in tries] == [(key,) for key in KEYS] and op.apart
    assert [undone(undo)[0] for undo in ran.undos] == [[b"c"]], "it sorts behind b, which it waits for"
    assert ran.outcome is not None and ran.outcome[0]._raw_token != ran.outcome[2]._raw_token
    once = run_steps(clock, acquire(apart=False), crossing, held)
    assert once.outcome is None and undone(once.undos[-1])[0] == KEYS


def test_a_key_that_is_no_lock_is_named(clock: Clock) -> None:
    for member, kind in ((b"x", "something that is no lock"), (OTHER + b"|r", "a read-write lock")):
        ran = run_steps(clock, acquire(), [[2, None, 0]], [[member]])
        assert isinstance(ran.raised, errors.LockKindError)
        assert str(ran.raised).endswith(f"'B': its name is in use by {kind}")


@pytest.mark.parametrize("senseless", [[[7]], [None], [[0, None]], [[0, 1, 2]], b"OK", [[0, None, 0]] * 2])
def test_a_reply_that_makes_no_sense_is_not_believed(clock: Clock, senseless: Any) -> None:
    ran = run_steps(clock, acquire(), senseless, ALL)
    assert ran.outcome is not None or isinstance(ran.raised, errors.InvalidResponse)


@given(st.binary(min_size=1, max_size=20) | st.lists(st.sampled_from([b"{", b"}", b"x"]), min_size=1).map(b"".join))
def test_hash_slots_are_those_of_redis_py(name: bytes) -> None:
    assert commands.hash_slot(name) == redis.crc.key_slot(name)


# ---------------------------------------------------------------------------------------------------------- the lease


def whole(clock: Clock, *seconds: float) -> MultiLease:
    pairs = zip(KEYS, seconds, strict=False)
    return MultiLease(tuple(Lease(key.decode(), key, b"fl:" + key * 32, clock() + left) for key, left in pairs))


def test_the_first_lease_that_ends_is_the_end_of_all(clock: Clock) -> None:
    lease = whole(clock, 10, 5, 20)
    assert (lease.remaining, lease.valid, lease.names, lease.fence) == (5, True, ("a", "b", "c"), None)
    clock.go(5)
    assert (lease.remaining, lease.valid, lease._ended) == (0, False, False)
    assert "fl:" not in repr(lease)
    with pytest.raises(errors.LockError, match="not renewed"):
        lease.lost  # noqa: B018


def test_an_extension_moves_all_ends_in_one_command(clock: Clock) -> None:
    lease = whole(clock, 10, 10.4, 10)
    ran = run_steps(clock, extend_all(lease.leases, 5000, False, False, clock, False), After(1, [[1, 2, 1]]))
    assert ran.outcome is Outcome.MOVED and len(ran.requests) == 1
    assert {each._deadline for each in lease.leases} == {clock() - 1 + 15}
    apart = run_steps(clock, extend_all(lease.leases, 5000, True, False, clock, True), [[1], [1], [1]])
    assert apart.outcome is Outcome.MOVED and {each._deadline for each in lease.leases} == {clock() + 5}


def test_an_extension_finds_what_was_lost(clock: Clock) -> None:
    lease = whole(clock, 10, 10, 10)
    ran = run_steps(clock, extend_all(lease.leases, 5000, False, False, clock, False), [[1, 0, 1]])
    assert ran.outcome is Outcome.LOST and [each._deadline == ENDED for each in lease.leases] == [False, True, False]
    again = run_steps(clock, extend_all(lease.leases, 5000, False, False, clock, False))
    assert again.outcome is Outcome.GONE


def test_until_an_extension_is_answered_the_earlier_end_holds(clock: Clock) -> None:
    lease = whole(clock, 10, 10, 10)
    ran = run_steps(clock, extend_all(lease.leases, 2000, True, False, clock, False), Raise(KeyboardInterrupt()))
    assert ran.raised is not None and lease.remaining == 2
    assert all(each._extensions == 0 for each in lease.leases)


def test_an_extension_ends_the_sessions_over_which_one_before_may_still_come(clock: Clock) -> None:
    """It would move the ends to where they were to be then, and the next holder's, were the leases handed over."""
    lease = whole(clock, 10, 10, 10)
    steps = extend_all(lease.leases, 5000, False, False, clock, False)
    request: Any = next(steps)
    session: Any = object()
    request.connection, request.sent = SimpleNamespace(session=session), clock()
    with pytest.raises(KeyboardInterrupt):
        steps.throw(KeyboardInterrupt())
    assert all(each._stale_sessions == (session,) and each._token_read for each in lease.leases)
    ran = run_steps(clock, extend_all(lease.leases, 5000, True, False, clock, False), [[1, 1, 1]])
    assert ran.outcome is Outcome.MOVED and all(each._stale_sessions == () for each in lease.leases)
    steps = extend_all(lease.leases, 5000, False, False, clock, False)
    lease.leases[0]._stale_sessions = lease.leases[1]._stale_sessions = (session,)
    again: Any = next(steps)
    assert again.stale == (session,), "ended before it is sent, once"
    steps.close()


def test_leases_without_end_are_extended_only_if_they_are_to_get_one(clock: Clock) -> None:
    lease = whole(clock, math.inf, math.inf)
    ran = run_steps(clock, extend_all(lease.leases, 2000, True, False, clock, False))
    assert ran.outcome is Outcome.ENDLESS and lease.remaining == math.inf
    run_steps(clock, extend_all(lease.leases, 2000, True, True, clock, False), [[1, 1]])
    assert lease.remaining == 2


# --------------------------------------------------------------- one client, and a server that loses, delays, reorders


@pytest.fixture
def simulators(monkeypatch: pytest.MonkeyPatch) -> Iterator[Iterator[ServerSimulator]]:
    """A server for each seed; the leases live by its clock. A failure tells the seed and what was sent."""
    current: list[ServerSimulator] = []
    monkeypatch.setattr(leases, "now", lambda: current[-1].clock())

    def one_of_each_seed() -> Iterator[ServerSimulator]:
        for seed in range(RUNS):
            current.append(ServerSimulator(seed))
            yield current[-1]

    try:
        yield one_of_each_seed()
    finally:
        print(f"seed {len(current) - 1}:", *current[-1].trace, sep="\n  ")


def test_it_holds_all_that_it_says_for_as_long_as_it_says_or_nothing(simulators: Iterator[ServerSimulator]) -> None:
    seen = {"held": 0, "waited": 0, "refused": 0, "raised": 0, "apart": 0}
    for server in simulators:
        rng = server.rng
        server.cluster = rng.random() < 0.2
        ms = rng.choice((50, 300, 1000, 10_000, 0))
        op = acquire(ms, blocking=rng.random() < 0.7, polls=rng.random() < 0.2, sleep=rng.choice((0.001, 0.1)))
        if rng.random() < 0.5:
            op.until = server.clock() + rng.choice((0.05, 0.5, 5))
        server.others_come(KEYS)
        found, ended = None, False
        with suppress(*EXPECTED):
            found, ended = server.run(op, KEYS), True
        if found is not None:
            seen["held"] += 1
            seen["waited"] += op.waited
            seen["apart"] += op.apart
            assert min(lease._deadline for lease in found) > server.clock()
            for settled in (False, True):
                for lease in found:
                    if lease._deadline > server.clock():
                        assert commands.token_matches(server.holder(lease._key), lease._raw_token), f"{settled=}"
                        assert server.end(lease._key) >= lease._deadline - LITTLE
                server.settle_down()
        else:
            seen["refused" if ended else "raised"] += 1
            assert ended or op.abandon(server.queues, server.clock) is not None
            server.settle_down()
            for key in KEYS:
                assert not server.is_ours(key), f"{ended=}"
                assert not server.ours & set(server.server_queues.get(key, [])), "its entry stands in the way of others"
        if found is None or op.waited:
            assert not server.queues.by_key and not server.queues.by_entry
    assert min(seen.values()) > RUNS / 100, seen


MISTAKES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "leases count from the reply": in_function(
        AcquireAll._try_until_granted,
        "(end := lease_end(self.request.sent, self.ms))",
        "(end := lease_end(clock(), self.ms))",
    ),
    "who gives up keeps what it holds": in_function(
        AcquireAll._left, "self.outcome_unknown or any(self.held)", "self.outcome_unknown"
    ),
    "a lost reply is forgotten": in_function(AcquireAll._replies, "|= retry.outcome_unknown", "|= False"),
    "a token that was given up is used again": in_function(
        AcquireAll._give_up, "self.tokens[i], self.held[i] = fresh, False", "self.held[i] = False"
    ),
    "what others hold is taken": in_function(
        AcquireAll._try_until_granted, "if at is None and clock() <", "if clock() <"
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_found(
    simulators: Iterator[ServerSimulator], mistake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    MISTAKES[mistake](monkeypatch)
    with pytest.raises(AssertionError):
        test_it_holds_all_that_it_says_for_as_long_as_it_says_or_nothing(simulators)


# ------------------------------------------------------------------------------------ many clients, overlapping names


class World(ServerSimulator):
    """A server that loses nothing, and clients that want overlapping sets of names, in an order that a seed chooses.

    Undos and messages come late, some messages never.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.scripts, self.native = True, True
        self.late: list[Any] = []
        self.callers: list[Caller] = []
        self.inside: dict[bytes, Caller] = {}

    def hold(self, caller: Caller, found: list[Lease]) -> None:
        for lease in found:
            assert lease._key not in self.inside, f"{lease._key!r} has two holders"
            self.inside[lease._key] = caller

    def step(self) -> None:
        """One of the callers goes on, or something comes that was late, or time passes."""
        ready = [caller for caller in self.callers if not caller.done and caller.ready()]
        if self.pushes and self.rng.random() < 0.5:
            entry = self.pushes.pop(self.rng.randrange(len(self.pushes)))
            if self.rng.random() < 0.9:
                for caller in self.callers:
                    caller.queues.on_grant_message(entry)
        elif self.late and self.rng.random() < 0.3:
            self.late.pop(self.rng.randrange(len(self.late)))()
        elif ready:
            self.clock.go(self.rng.choice((0, 0, 0.0001, 0.001)))
            self.rng.choice(ready).go_on()
        else:
            self.clock.go(self.rng.choice((0.001, 0.01, 0.1)))


class Caller:
    """A client that acquires its names, holds them for a few steps, and releases them, again and again."""

    def __init__(self, world: World, keys: list[bytes], rounds: int, ms: int) -> None:
        self.world, self.keys, self.rounds, self.ms = world, sorted(keys), rounds, ms
        self.queues = LocalQueues(contextlib.nullcontext())
        self.driver: Driver[Any] | None = None
        self.found: list[Lease] | None = None
        self.step: Any = None
        self.answer: Any = None
        self.steps = 0
        self.waits = 0

    @property
    def done(self) -> bool:
        return self.rounds == 0

    def undo(self, undo: Any) -> None:
        def send() -> None:
            for call in undo.commands(frozenset({commands.DELIFEQ}), True):
                self.world.call(call)

        self.world.late.append(send)

    def ready(self) -> bool:
        """Whether it is not asleep."""
        if isinstance(self.step, Wait):
            at = min(self.step.waiter.queue.recheck_time(self.step.waiter), self.step.until or math.inf)
            return self.step.waiter.woken or self.world.clock() >= at
        return not isinstance(self.step, Sleep) or self.world.clock() >= self.answer

    def go_on(self) -> None:
        world = self.world
        if self.found is not None:
            self.release_some_time()
            return
        if self.driver is None:
            self.op = AcquireAll(self.keys, self.keys, self.ms, world.cluster)
            self.op.blocking = True
            self.driver = Driver(self.op.steps(self.queues, world.clock), self.queues.enqueue, self.undo)
            self.step = self.answer = None
        if isinstance(self.step, Wait):
            self.step.waiter.woken, self.answer = False, None
        elif isinstance(self.step, Sleep):
            self.answer = None
        elif isinstance(self.step, Request):
            self.answer = self.executed(self.step)
        self.step = self.driver.next(self.answer)
        self.steps += 1
        self.waits += isinstance(self.step, Enter)
        if isinstance(self.step, Sleep):
            self.answer = world.clock() + self.step.seconds
        if self.step is None:
            self.found, self.driver = self.driver.outcome, None
            assert self.found is not None, "it has no deadline"
            world.hold(self, self.found)

    def executed(self, request: Any) -> Any:
        request.sent, request.connection = self.world.clock(), CONNECTION
        assert isinstance(request, RawCommands)
        return [self.world.call(call) for call in request.calls]

    def release_some_time(self) -> None:
        assert self.found is not None
        if self.world.rng.random() < 0.7 and min(lease._deadline for lease in self.found) > self.world.clock() + 0.2:
            return
        for lease in self.found:
            del self.world.inside[lease._key]
            call = commands.release_all([lease._key], [lease._raw_token])
            self.world.call(call)
        self.found, self.rounds, self.step = None, self.rounds - 1, None


SETS = [[b"a", b"b"], [b"b", b"c"], [b"c", b"a"], [b"a", b"b", b"c"], [b"c"], [b"b", b"d"], [b"a", b"d"], [b"d", b"c"]]


@pytest.mark.parametrize("cluster", [False, True], ids=["one server", "several hash slots"])
def test_overlapping_sets_never_deadlock_and_all_of_them_come_to_an_end(
    cluster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = 0
    for seed in range(150):
        world = World(seed)
        monkeypatch.setattr(leases, "now", world.clock)
        world.cluster = cluster
        sets = world.rng.choices(SETS, k=world.rng.randrange(2, 9))
        ms = world.rng.choice((2000, 10_000, 0))
        world.callers = [Caller(world, keys, 4, ms) for keys in sets]
        for count in itertools.count():
            if all(caller.done for caller in world.callers):
                break
            assert count < 60_000, f"seed {seed}: {[(c.keys, c.rounds, c.step) for c in world.callers]}"
            world.step()
        waits += sum(caller.waits for caller in world.callers)
        while world.late:
            world.late.pop()()
        held = {key: world.holder(key) for key in world.keys if world.holder(key) is not None}
        assert not held and not any(world.server_queues.values()), f"seed {seed}: {held} is left"
        assert not any(caller.queues.by_key or caller.queues.by_entry for caller in world.callers)
    assert waits > 1000, "else they did not stand in each other's way"


def test_it_waits_for_each_name_twice_at_most() -> None:
    """However others come in between: what it has waited for is given up once at most."""
    for seed in range(300):
        rng = random.Random(seed)
        clock, keys = Clock(), [b"%02d" % i for i in range(20)]
        op = AcquireAll(keys, keys, 0)
        op.blocking, waits = True, 0
        queues = LocalQueues(contextlib.nullcontext())
        driver: Driver[Any] = Driver(op.steps(queues, clock, Answer.ASK_SERVER), queues.enqueue, lambda undo: None)
        step = driver.next()
        while step is not None:
            if isinstance(step, Enter):
                waits += 1
                step = driver.next([[1, 0, 0]])
            else:
                free = [i for i, held in enumerate(op.held) if not held]
                at = rng.choice(free) if free and rng.random() < 0.95 else None
                step = driver.next([[0, None, 0]] if at is None else [[at + 1, OTHER, 5000]])
        assert waits <= len(keys) + 1
