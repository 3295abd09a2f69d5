"""How an acquire waits, by canned replies: in the local queue, in the server's queue, and what it leaves in both.

Who is first in the local queue: test_local_queue.py.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from support.run_steps import (
    MINE,
    OTHER,
    After,
    Clock,
    Raise,
    Ran,
    Wakes,
    acquire,
    error,
    joined,
    lost,
    opcodes,
    run_steps,
    undone,
)

from fastlock import _errors as errors
from fastlock._protocol import commands, steps
from fastlock._protocol.acquire import PlainAcquire
from fastlock._protocol.commands import Opcode
from fastlock._protocol.lease import Lease
from fastlock._protocol.local_queue import NEAR, LocalQueues
from fastlock._protocol.moments import LEAST_MOMENT
from fastlock._protocol.steps import Answer
from fastlock._protocol.undo import RELOADS, ScriptUndo, Undo
from fastlock._protocol.waiters import Waiter

LOADING = "LOADING Redis is loading the dataset in memory"

pytestmark = pytest.mark.usefixtures("impl")  # leases are compiled


GRANTED, QUEUED = [[1, 0, 0]], [[0, 5000, 1, NEAR]]


def entered(ran: Ran) -> list[tuple[bytes, ...]]:
    """The enters that were sent."""
    return [
        request.calls[0]
        for request in ran.requests
        if isinstance(request, steps.RawCommands) and request.calls[0][1] == commands.ENTER_LUA.sha
    ]


def address(ran: Ran) -> bytes:
    return ran.queues.address()


def entry_of(call: tuple[bytes, ...]) -> bytes:
    return call[-6]


def test_an_acquire_that_finds_the_name_held_joins_both_queues(clock: Clock) -> None:
    op = acquire(blocking=True)
    ran = run_steps(clock, op, OTHER, After(0.5, GRANTED))
    assert ran.kinds == [PlainAcquire, steps.Enqueue, steps.Enter]
    (call,) = entered(ran)
    entry = entry_of(call)
    assert call == commands.enter(b"name", address(ran), False, True, entry, b"10000")
    assert commands.can_be_contended(entry)
    lease = ran.outcome
    assert (lease.name, lease._key, lease._raw_token, lease.fence) == ("name", b"name", entry, None) and entry != MINE
    assert (lease._deadline, lease._contended) == (clock() - 0.5 + 10, False)
    assert ran.requests[1].needs_push and ran.sleeps == [] and ran.undos == ran.leaves == []
    assert op.undo().tokens == [entry], "it undoes the grant, should the caller be gone"


@pytest.mark.parametrize(("ms", "fenced"), [(0, False), (10_000, True)])
def test_enter_says_how_long_and_whether_with_a_fence(clock: Clock, ms: int, fenced: bool) -> None:
    found = [[OTHER, 77]] if fenced else OTHER
    ran = run_steps(clock, acquire(ms=ms, blocking=True, fenced=fenced), found, [[1, 2, 78 if fenced else 0]])
    (call,) = entered(ran)
    where = commands.address(ran.queues.channel, LEAST_MOMENT, fenced)
    assert call == commands.enter(b"name", where, fenced, True, ran.outcome.token, b"%d" % ms)
    assert (ran.outcome._deadline == math.inf, ran.outcome.fence) == (ms == 0, 78 if fenced else None)
    assert ran.outcome._contended, "others wait"


@pytest.mark.parametrize(
    ("left", "told", "ahead", "sleep", "pause"),
    [
        *((5000, 1, 0, 0.1, 0.2), (5000, 1, 7, 0.1, 0.2), (5000, 1, 8, 0.1, 1.0), (150, 1, 0, 0.1, 0.15)),
        *((300, 1, 8, 0.1, 0.3), (-1, 1, 0, 0.1, 0.2), (-1, 1, 8, 0.1, 1.0), (0, 1, 0, 0.1, 0.001)),
        *((5000, 0, 0, 0.1, 0.1), (50, 0, 0, 0.1, 0.05), (-1, 0, 0, 0.25, 0.25), (-1, 0, 0, 7.0, 1.0)),
    ],
)
def test_a_waiter_rechecks_when_the_lease_ends_or_a_message_may_be_lost(
    clock: Clock, left: int, told: int, ahead: int, sleep: float, pause: float
) -> None:
    times: list[float] = []

    def answer(reply: Any) -> Any:
        return lambda request: times.append(clock()) or reply

    op = acquire(blocking=True, sleep=sleep)
    ran = run_steps(clock, op, OTHER, answer([[0, left, told, ahead]]), answer(GRANTED))
    assert times[1] - times[0] == pytest.approx(pause)
    assert len({entry_of(call) for call in entered(ran)}) == 1, "it keeps its entry"
    assert len(entered(ran)) == 2 and ran.outcome._deadline == clock() + 10


def test_a_grant_message_ends_the_wait(clock: Clock) -> None:
    ran = Ran()
    queues, start = ran.queues, clock()

    def granted() -> None:
        queues.on_grant_message(next(iter(queues.by_entry)))

    ran = run_steps(clock, acquire(blocking=True), OTHER, QUEUED, Wakes(0.25, granted), GRANTED, queues=queues)
    assert ran.outcome is not None and clock() == start + 0.25


def test_a_grant_message_is_a_hint_that_is_never_believed(clock: Clock) -> None:
    queues = Ran().queues
    message = Wakes(0.1, lambda: queues.on_grant_message(next(iter(queues.by_entry))))
    ran = run_steps(clock, acquire(blocking=True), OTHER, QUEUED, message, QUEUED, message, GRANTED, queues=queues)
    assert len(entered(ran)) == 3 and ran.outcome is not None


def test_a_waiter_behind_others_sends_nothing_and_is_handed_the_lease(clock: Clock) -> None:
    queues = Ran().queues
    first = joined(queues, "name", b"name", 10_000, False, None)
    assert queues.may_enter_now(first, clock())
    lease = Lease("name", b"name", first.queue.entry, clock() + 10)
    first.queue.note_granted(first, lease, 0, clock())
    op = acquire(blocking=True)
    ran = run_steps(clock, op, Wakes(0.001, lambda: queues.release(lease, clock())), queues=queues)
    assert ran.requests == [] and ran.kinds == [steps.Enqueue, steps.Wait]
    assert (ran.outcome.token, ran.outcome._deadline) == (lease._raw_token, clock() - 0.001 + 10)
    assert undone(op.undo()) == ([b"name"], [lease._raw_token])


@pytest.mark.parametrize("settings", [{}, {"alone": True}, {"blocking": True, "polls": True}], ids=str)
def test_an_acquire_outside_the_local_queue_sends_its_own_command(clock: Clock, settings: dict[str, Any]) -> None:
    queues = Ran().queues
    joined(queues, "name", b"name", 10_000, False, None)
    ran = run_steps(clock, acquire(**settings), None, queues=queues)
    assert opcodes(ran) == [Opcode.ACQUIRE] and ran.outcome.token == MINE


def test_a_fair_acquire_enters_at_once(clock: Clock) -> None:
    """By its own token; a try outside the queue could find the name free before those who wait are granted it."""
    queues = Ran().queues
    joined(queues, "name", b"name", 10_000, False, None)
    ran = run_steps(clock, acquire(blocking=True, alone=True), [[1, 1, 0]], queues=queues)
    assert entry_of(entered(ran)[0]) == ran.outcome.token == MINE and ran.outcome._contended
    assert len(ran.requests) == 1


def test_an_acquire_with_its_outcome_unknown_enters_by_its_own_token(clock: Clock) -> None:
    """The first try may have been executed; if the key holds its token, the enter by that token is granted."""
    ran = run_steps(clock, acquire(blocking=True), lost(), OTHER, GRANTED)
    assert [entry_of(call) for call in entered(ran)] == [MINE] and ran.outcome.token == MINE
    assert ran.undos == ran.leaves == []


def test_a_waiter_never_waits_past_its_time(clock: Clock) -> None:
    start = clock()
    ran = run_steps(clock, acquire(blocking=True, until=start + 0.25), OTHER, QUEUED, QUEUED)
    assert ran.outcome is None and start + 0.2 < clock() <= start + 0.25
    entry = entry_of(entered(ran)[0])
    assert ran.leaves == [commands.leave(b"name", address(ran) + entry)] and ran.undos == []
    assert not ran.queues.by_key and not ran.queues.by_entry


def test_a_deadline_exceeded_in_the_queue_leaves_it_over_the_same_connection(clock: Clock) -> None:
    """The enter may still be granted: the leave comes behind it."""

    def late(request: Any) -> Any:
        request.connection, request.stale = "the connection", ("broken",)
        clock.go(1.0)
        return Answer.DEADLINE_EXCEEDED

    ran = run_steps(clock, acquire(blocking=True, until=clock() + 1), OTHER, late)
    (leave,) = ran.of(ScriptUndo)
    assert (ran.outcome, leave.connection, leave.stale) == (None, "the connection", ("broken",))
    assert leave.commands(frozenset(), False) == [leave.call]


def test_an_acquire_that_does_not_block_tries_once(clock: Clock) -> None:
    ran = run_steps(clock, acquire(until=clock() + 5), OTHER)
    assert (ran.outcome, ran.sleeps, len(ran.requests)) == (None, [], 1)
    assert not ran.queues.by_key


def test_an_interrupted_waiter_leaves_its_entry_and_needs_no_undo(clock: Clock) -> None:
    for answers in ([QUEUED, Raise(KeyboardInterrupt())], [Raise(KeyboardInterrupt())]):
        for waits in (0, 1):  # in its wait, or while it enters
            answers = [lambda request: Raise(KeyboardInterrupt())] if waits and len(answers) == 1 else answers
            ran = run_steps(clock, acquire(blocking=True), OTHER, *answers)
            assert isinstance(ran.raised, KeyboardInterrupt)
            entries = [commands.leave(b"name", address(ran) + entry_of(call)) for call in entered(ran)[:1]]
            assert (ran.undos, ran.leaves) == ([], entries)
            assert not ran.queues.by_key and not ran.queues.by_entry


def test_a_waiter_interrupted_after_a_handover_gives_the_lease_back(clock: Clock) -> None:
    queues = Ran().queues
    first = joined(queues, "name", b"name", 10_000, False, None)
    queues.may_enter_now(first, clock())
    lease = Lease("name", b"name", first.queue.entry, clock() + 10)
    first.queue.note_granted(first, lease, 0, clock())
    rest = acquire(blocking=True).continue_from(Answer.WAIT_LOCALLY, clock)
    join = rest.send(None)
    queues.enqueue(join.waiter)
    assert type(join) is steps.Enqueue and type(rest.send(None)) is steps.Wait
    clock.go(0.001)
    queues.release(lease, clock())
    undo = rest.throw(KeyboardInterrupt())
    assert type(undo) is Undo and undone(undo) == ([b"name"], [lease._raw_token])
    assert not queues.by_key
    with pytest.raises(KeyboardInterrupt):
        rest.send(None)


def test_a_waiter_whose_generator_is_closed_lets_others_go_on(clock: Clock) -> None:
    """A user or the interpreter may close it: nothing can be sent, but the waiters behind it go on."""
    queues = Ran().queues
    steps = acquire(blocking=True).continue_from(OTHER, clock)
    waiter = steps.send(None).waiter
    queues.enqueue(waiter)
    steps.send(None)
    behind = joined(queues, "name", b"name", 10_000, False, None)
    steps.close()
    assert behind.woken and waiter.queue.first() is behind


@pytest.mark.parametrize(
    "text", ["NOPERM this user has no permissions to run the 'evalsha' command", "ERR ACL failure"]
)
def test_a_user_who_may_not_use_the_queue_polls(clock: Clock, text: str) -> None:
    op = acquire(blocking=True, sleep=0.1)
    ran = run_steps(clock, op, OTHER, [error(text)], OTHER, 5000, OTHER, 50, None)
    assert opcodes(ran) == [
        Opcode.ACQUIRE,
        -1,
        Opcode.ACQUIRE,
        Opcode.PTTL,
        Opcode.ACQUIRE,
        Opcode.PTTL,
        Opcode.ACQUIRE,
    ]
    assert ran.sleeps == [pytest.approx(0.1), pytest.approx(0.05)] and len(entered(ran)) == 1
    assert ran.outcome.token == MINE and not ran.queues.by_key and not ran.queues.by_entry


@pytest.mark.parametrize(
    ("left", "sleep", "pause"),
    [
        *((5000, 0.1, 0.1), (50, 0.1, 0.05), (0, 0.1, 0.001), (-2, 0.1, 0.001), (-1, 0.1, 0.1), (100, 0.0, 0.001)),
        *((3, 7, 0.003), (-1, 0, 0.001), (9_000_000, 30.0, 30.0)),
    ],
)
def test_polling_tries_again_when_the_lease_ends_or_after_sleep(
    clock: Clock, left: int, sleep: float, pause: float
) -> None:
    ran = run_steps(clock, acquire(blocking=True, sleep=sleep, polls=True), OTHER, left, None)
    assert ran.sleeps == [pytest.approx(pause)]
    assert opcodes(ran) == [Opcode.ACQUIRE, Opcode.PTTL, Opcode.ACQUIRE]
    assert ran.outcome._deadline == clock() + 10


def test_polling_never_sleeps_past_its_time(clock: Clock) -> None:
    start = clock()
    op = acquire(blocking=True, until=start + 0.25, polls=True)
    ran = run_steps(clock, op, *[OTHER, 60_000] * 3, OTHER)
    assert ran.outcome is None
    assert clock() <= start + 0.25
    assert sum(ran.sleeps) > 0.2
    assert len(ran.requests) == 7


def test_interrupted_polling_leaves_nothing(clock: Clock) -> None:
    for answers in ([OTHER, 50, Raise(KeyboardInterrupt())], [OTHER, Raise(KeyboardInterrupt())]):
        ran = run_steps(clock, acquire(blocking=True, polls=True), *answers)
        assert isinstance(ran.raised, KeyboardInterrupt)
        assert ran.undos == ran.leaves == []


def test_polling_keeps_an_unknown_outcome_from_one_try_to_the_next(clock: Clock) -> None:
    """The lost command may be executed when the holder has gone: its own token is the waiter's, at any try."""
    ran = run_steps(clock, acquire(blocking=True, polls=True), lost(), OTHER, 50, error("ERR broken"))
    assert isinstance(ran.raised, errors.ResponseError)
    assert len(ran.undos) == 1
    ran = run_steps(clock, acquire(blocking=True, polls=True), lost(), OTHER, 50, MINE, b"OK")
    assert ran.outcome.token == MINE
    assert ran.undos == []


def test_giving_up_with_the_outcome_unknown_leaves_the_queue_and_an_undo(clock: Clock) -> None:
    op = acquire(blocking=True, until=clock() + 0.5)
    ran = run_steps(clock, op, lost(session="one"), OTHER, QUEUED, QUEUED)
    assert ran.outcome is None and [undone(undo) for undo in ran.undos] == [([b"name"], [MINE])]
    assert ran.leaves == [commands.leave(b"name", address(ran) + MINE)]


@pytest.mark.parametrize("text", ["WRONGTYPE Operation against a key", "ERR broken", "OOM command not allowed"])
def test_an_error_of_enter_is_raised_and_the_entry_left(clock: Clock, text: str) -> None:
    ran = run_steps(clock, acquire(blocking=True), OTHER, [error(text)])
    assert isinstance(ran.raised, errors.ResponseError) and len(entered(ran)) == 1
    assert ran.leaves == [commands.leave(b"name", address(ran) + entry_of(entered(ran)[0]))]
    assert not ran.queues.by_key


class Sends:
    """The calls of requests, as they were when they were sent."""

    def __init__(self) -> None:
        self.calls: list[tuple[bytes, ...]] = []

    def then(self, reply: Any) -> Callable[[Any], Any]:
        """Note what is sent, and answer it so."""
        return lambda request: self.calls.append(request.calls[0]) or reply

    @property
    def joins(self) -> list[bool]:
        """Whether each of them joins."""
        return [call[-1] == b"1" for call in self.calls]


def test_an_entry_whose_reply_was_lost_only_looks(clock: Clock) -> None:
    """The server confirms what it had granted; the lease counts from the second send."""
    sends, start = Sends(), clock()
    answers = sends.then(After(2.0, lost(session="one"))), sends.then(After(1.0, [[1, 0, 0]]))
    ran = run_steps(clock, acquire(blocking=True), OTHER, *answers)
    join, look = sends.calls
    assert sends.joins == [True, False] and join[:-1] == look[:-1] and ran.stales[2] == ("one",)
    assert ran.outcome._deadline == start + 2 + 10 and ran.undos == ran.leaves == []
    assert ran.queues.stats.recovered == 1


def test_an_entry_joins_once_and_then_looks_until_it_is_gone(clock: Clock) -> None:
    """Its grant was not confirmed in time, or the queue was lost: it waits by another entry, at the end."""
    sends = Sends()
    replies = QUEUED, QUEUED, [[-1, 0, 0]], QUEUED, GRANTED
    ran = run_steps(clock, acquire(blocking=True), OTHER, *map(sends.then, replies))
    assert sends.joins == [True, False, False, True, False]
    one, other = dict.fromkeys(map(entry_of, sends.calls))
    assert [entry_of(call) for call in sends.calls] == [one] * 3 + [other] * 2 and ran.outcome.token == other
    assert ran.queues.by_entry == {} and ran.leaves == ran.undos == []
    addresses = [call[-5] for call in sends.calls]
    assert addresses[2] == commands.address(ran.queues.channel, LEAST_MOMENT)
    assert addresses[3] == commands.address(ran.queues.channel, 2 * LEAST_MOMENT), "it was too slow for its moment"


def test_a_join_that_was_not_executed_is_sent_again(clock: Clock) -> None:
    sends = Sends()
    unsent = lost(session=None, sent=False)
    for refused in (sends.then([error("NOSCRIPT x")]), [b"sha"] * 7), (sends.then(unsent),):
        run_steps(clock, acquire(blocking=True), OTHER, *refused, sends.then(GRANTED))
    assert sends.joins == [True] * 4


def test_an_entry_given_up_is_left_with_the_broken_connections_ended(clock: Clock) -> None:
    ran = run_steps(clock, acquire(blocking=True), OTHER, lost(session="one"), lost(session="two", final=True))
    assert isinstance(ran.raised, errors.ConnectionError)
    assert [set(leave.stale) for leave in ran.of(ScriptUndo)] == [{"one", "two"}]


@pytest.mark.parametrize(("seconds", "final"), [(0.6, False), (0.1, True)])
def test_a_waiter_whose_time_ends_on_a_broken_connection_fails_alone(clock: Clock, seconds: float, final: bool) -> None:
    """Waiters behind it have their own time; where the server stays away they fail together."""
    queues = LocalQueues(contextlib.nullcontext())
    behind: list[Waiter] = []

    def broken(request: Any) -> Any:
        behind.append(joined(queues, "name", b"name", 10_000, False, None))
        clock.go(seconds)
        return lost(final=final)

    ran = run_steps(clock, acquire(blocking=True, until=clock() + 0.5), OTHER, broken, queues=queues)
    assert isinstance(ran.raised, errors.ConnectionError) and behind[0].woken
    queue: Any = behind[0].queue
    assert isinstance(queue.error, errors.ConnectionError) == final and (b"name" in queues.by_key) != final


@pytest.mark.parametrize("text", [LOADING, "BUSY Redis is busy running a script", "CLUSTERDOWN the cluster is down"])
def test_a_waiter_that_gives_up_on_the_server_fails_with_those_behind_it(clock: Clock, text: str) -> None:
    """A server that goes on refusing counts as one that cannot be reached: no waiter begins to retry anew."""
    queues = LocalQueues(contextlib.nullcontext())
    behind: list[Waiter] = []

    def passing(request: Any) -> Any:
        if not behind:
            behind.append(joined(queues, "name", b"name", 10_000, False, None))
        clock.go(3)
        return [error(text)]

    ran = run_steps(clock, acquire(blocking=True), OTHER, *[passing] * 3, queues=queues)
    assert isinstance(ran.raised, errors.RedisError) and behind[0].woken
    queue: Any = behind[0].queue
    assert type(queue.error) is type(ran.raised) and b"name" not in queues.by_key


def test_scripts_that_were_forgotten_are_loaded_for_the_queue(clock: Clock) -> None:
    ran = run_steps(clock, acquire(blocking=True), OTHER, [error("NOSCRIPT x")], [b"sha"] * 7, GRANTED)
    assert commands.ENTER_LUA.load in ran.requests[2].calls and ran.outcome is not None


def test_a_connection_that_breaks_with_the_scripts_is_one_that_broke(clock: Clock) -> None:
    """It is retried for as long as any, however often; and the command that waited for them was not executed."""
    often = [error("NOSCRIPT x"), lost()] * (RELOADS + 1)
    answers = [step if isinstance(step, steps.ConnectionLost) else [step] for step in often]
    ran = run_steps(clock, acquire(blocking=True), OTHER, *answers, [error("NOSCRIPT x")], [b"sha"] * 7, GRANTED)
    assert ran.outcome is not None and not any(request.maybe_executed for request in ran.requests)
    over = run_steps(clock, acquire(blocking=True), OTHER, [error("NOSCRIPT x")], lost(final=True))
    assert isinstance(over.raised, errors.ConnectionError)


def test_forgotten_scripts_are_waited_for_no_longer_than_for_what_needs_them(clock: Clock) -> None:
    op = acquire(blocking=True, until=clock() + 5)
    ran = run_steps(clock, op, OTHER, [error("NOSCRIPT x")], After(5, Answer.DEADLINE_EXCEEDED))
    assert ran.requests[-1].calls[0][0] == b"SCRIPT" and ran.requests[-1].until == op.until
    assert ran.outcome is None and len(ran.leaves) == 1


@pytest.mark.parametrize("gone", [Answer.DEADLINE_EXCEEDED, Raise(KeyboardInterrupt())])
def test_an_enter_that_was_not_answered_is_not_executed_for_the_next_waiter(clock: Clock, gone: Any) -> None:
    """Its connection may break with it in flight, and the next waiter have another lease by then."""
    queues, session = LocalQueues(contextlib.nullcontext()), object()
    behind: list[Waiter] = []

    def leave(request: Any) -> Any:
        behind.append(joined(queues, "name", b"name", 60_000, False, None))
        request.connection = SimpleNamespace(session=session)
        clock.go(5)
        return gone

    run_steps(clock, acquire(blocking=True, until=clock() + 5), OTHER, leave, queues=queues)
    queue = behind[0].queue
    assert queue is not None and steps.Enter(queue, behind[0], False).stale == (session,)


@pytest.mark.parametrize(
    "reply", [None, 1, b"OK", [], [1], [1, 0], [1, 0, None], [b"1", 0, 0], [1, 0, 0, 0], [True, 0, 0]]
)
def test_a_reply_of_the_wrong_shape_is_never_an_entry(clock: Clock, reply: Any) -> None:
    ran = run_steps(clock, acquire(blocking=True), OTHER, [reply], [reply])
    assert isinstance(ran.raised, errors.InvalidResponse) and len(ran.of(steps.ProtocolViolation)) == 2
    assert len(ran.leaves) == 1


def test_an_entry_granted_too_late_is_released_before_the_next_enter(clock: Clock) -> None:
    """Over the same connection. The next enter has another entry, so the release cannot remove what it is granted."""

    def late(request: Any) -> Any:
        request.connection = "the connection"
        clock.go(0.06)
        return [[1, 1, 0]]

    for alone in (False, True):
        op = acquire(ms=50, blocking=True, alone=alone)
        ran = run_steps(clock, op, *([] if alone else [OTHER]), late, GRANTED)
        (undo,) = ran.undos
        one, other = (entry_of(call) for call in entered(ran))
        assert undone(undo) == ([b"name"], [one]) and (one == MINE) is alone and other != one
        assert undo.connection == "the connection"
        assert ran.steps.index(undo) < ran.steps.index(ran.requests[-1])
        assert ran.outcome.token == other and ran.outcome._deadline == clock() + 0.05
