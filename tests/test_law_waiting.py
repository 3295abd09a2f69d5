"""How an acquire waits, by canned replies: among others of its client, in the server's queue, and what it leaves there.

Whose turn it is among them: test_gate.py.
"""

from __future__ import annotations

import contextlib
import math
from types import SimpleNamespace
from typing import Any

import pytest
from support.play import (
    MINE,
    OTHER,
    After,
    Clock,
    Played,
    Raise,
    Wakes,
    acquire,
    error,
    joined,
    lost,
    play,
    undone,
    verbs,
)

import fastlock._law as law
from fastlock import _commands as say
from fastlock import _errors as errors
from fastlock import _steps
from fastlock._gate import Gates, Waiter
from fastlock._lease import Lease
from fastlock._session import Session

LOADING = "LOADING Redis is loading the dataset in memory"

pytestmark = pytest.mark.usefixtures("impl")  # leases are compiled


GRANTED, QUEUED = [[1, 0, 0]], [[0, 5000, 1]]


def entered(played: Played) -> list[tuple[bytes, ...]]:
    """What was asked of the server's queue."""
    return [ask.calls[0] for ask in played.asks if ask.kind == _steps.CALLS and ask.calls[0][1] == say.ENTER_LUA.sha]


def place_of(call: tuple[bytes, ...]) -> bytes:
    return call[-5]


def test_who_finds_it_held_joins_those_who_wait_and_enters_the_queue(clock: Clock) -> None:
    played = play(clock, acquire(blocking=True), OTHER, After(0.5, GRANTED))
    assert played.kinds == [law.Acquire, _steps.Join, _steps.Call]
    (call,) = entered(played)
    place = place_of(call)
    assert call == say.enter(b"name", played.gates.inbox, False, place, b"10000") and say.markable(place)
    lease = played.outcome
    assert (lease.name, lease.key, lease.proof, lease.fence) == ("name", b"name", place, None) and place != MINE
    assert (lease.deadline, lease.contended) == (clock() - 0.5 + 10, False)
    assert played.asks[1].hears and played.sleeps == [] and played.undos == played.leaves == []
    assert played.steps[0].token == place, "what undoes it, should the caller be gone"


@pytest.mark.parametrize(("ms", "fenced"), [(0, False), (10_000, True)])
def test_the_queue_is_told_what_is_wanted(clock: Clock, ms: int, fenced: bool) -> None:
    found = [[OTHER, 77]] if fenced else OTHER
    played = play(clock, acquire(ms=ms, blocking=True, fenced=fenced), found, [[1, 2, 78 if fenced else 0]])
    (call,) = entered(played)
    assert call == say.enter(b"name", played.gates.inbox, fenced, played.outcome.token, b"%d" % ms)
    assert (played.outcome.deadline == math.inf, played.outcome.fence) == (ms == 0, 78 if fenced else None)
    assert played.outcome.contended, "others wait"


@pytest.mark.parametrize(
    ("left", "told", "sleep", "pause"),
    [
        *((5000, 1, 0.1, 1.0), (300, 1, 0.1, 0.3), (-1, 1, 0.1, 1.0), (0, 1, 0.1, 0.0), (5000, 0, 0.1, 0.1)),
        *((50, 0, 0.1, 0.05), (-1, 0, 0.25, 0.25), (-1, 0, 7.0, 1.0)),
    ],
)
def test_a_waiter_looks_again_when_the_lease_ends_or_a_message_may_be_lost(
    clock: Clock, left: int, told: int, sleep: float, pause: float
) -> None:
    times: list[float] = []

    def answer(reply: Any) -> Any:
        return lambda ask: times.append(clock()) or reply

    op = acquire(blocking=True, sleep=sleep)
    played = play(clock, op, OTHER, answer([[0, left, told]]), answer(GRANTED))
    assert times[1] - times[0] == pytest.approx(pause)
    assert len({place_of(call) for call in entered(played)}) == 1, "it keeps its place"
    assert len(entered(played)) == 2 and played.outcome.deadline == clock() + 10


def test_a_message_ends_the_wait(clock: Clock) -> None:
    played = Played()
    gates, start = played.gates, clock()

    def granted() -> None:
        gates.hear(next(iter(gates.by_place)))

    played = play(clock, acquire(blocking=True), OTHER, QUEUED, Wakes(0.25, granted), GRANTED, gates=gates)
    assert played.outcome is not None and clock() == start + 0.25


def test_a_message_is_never_believed(clock: Clock) -> None:
    gates = Played().gates
    hear = Wakes(0.1, lambda: gates.hear(next(iter(gates.by_place))))
    played = play(clock, acquire(blocking=True), OTHER, QUEUED, hear, QUEUED, hear, GRANTED, gates=gates)
    assert len(entered(played)) == 3 and played.outcome is not None


def test_who_comes_behind_others_asks_nothing_and_gets_what_is_handed_to_it(clock: Clock) -> None:
    gates = Played().gates
    first = joined(gates, "name", b"name", 10_000, False, None)
    assert gates.ask(first, clock())
    lease = Lease("name", b"name", first.gate.place, clock() + 10)
    first.gate.granted(first, lease, 0, clock())
    op = acquire(blocking=True)
    played = play(clock, op, Wakes(0.001, lambda: gates.release(lease, clock())), gates=gates)
    assert played.asks == [] and played.kinds == [_steps.Join, _steps.Wait]
    assert (played.outcome.token, played.outcome.deadline) == (lease.proof, clock() - 0.001 + 10)
    assert undone(op.undo()) == ([b"name"], [lease.proof])


@pytest.mark.parametrize("terms", [{}, {"alone": True}, {"blocking": True, "polls": True}], ids=str)
def test_who_does_not_wait_among_them_looks_by_itself(clock: Clock, terms: dict[str, Any]) -> None:
    gates = Played().gates
    joined(gates, "name", b"name", 10_000, False, None)
    played = play(clock, acquire(**terms), None, gates=gates)
    assert verbs(played) == [say.ACQUIRE] and played.outcome.token == MINE


def test_who_waits_in_strict_order_asks_the_queue_at_once(clock: Clock) -> None:
    """By its own token; a look of its own could find the name free before those who wait for it are asked."""
    gates = Played().gates
    joined(gates, "name", b"name", 10_000, False, None)
    played = play(clock, acquire(blocking=True, alone=True), [[1, 1, 0]], gates=gates)
    assert place_of(entered(played)[0]) == played.outcome.token == MINE and played.outcome.contended
    assert len(played.asks) == 1


def test_who_was_in_doubt_enters_by_its_own_token(clock: Clock) -> None:
    """Whatever became of the first look: what its token holds then is what it has."""
    played = play(clock, acquire(blocking=True), lost(), OTHER, GRANTED)
    assert [place_of(call) for call in entered(played)] == [MINE] and played.outcome.token == MINE
    assert played.undos == played.leaves == []


def test_a_waiter_never_waits_past_its_time(clock: Clock) -> None:
    start = clock()
    played = play(clock, acquire(blocking=True, until=start + 0.25), OTHER, QUEUED, QUEUED)
    assert played.outcome is None and start + 0.2 < clock() <= start + 0.25
    place = place_of(entered(played)[0])
    assert played.leaves == [say.leave(b"name", place, played.gates.inbox)] and played.undos == []
    assert not played.gates.by_key and not played.gates.by_place


def test_the_wires_late_leaves_the_queue_over_the_same_connection(clock: Clock) -> None:
    """What was sent may still be granted: the leave comes behind it."""

    def late(ask: Any) -> Any:
        ask.link, ask.stale = "the connection", ("broken",)
        clock.go(1.0)
        return _steps.LATE

    played = play(clock, acquire(blocking=True, until=clock() + 1), OTHER, late)
    (leave,) = played.of(_steps.Leave)
    assert (played.outcome, leave.link, leave.stale) == (None, "the connection", ("broken",))
    assert leave.calls == [leave.call]


def test_whoever_does_not_block_looks_once(clock: Clock) -> None:
    played = play(clock, acquire(until=clock() + 5), OTHER)
    assert (played.outcome, played.sleeps, len(played.asks)) == (None, [], 1)
    assert not played.gates.by_key


def test_a_waiter_interrupted_without_doubt_leaves_its_place_and_nothing_else(clock: Clock) -> None:
    for answers in ([QUEUED, Raise(KeyboardInterrupt())], [Raise(KeyboardInterrupt())]):
        for waits in (0, 1):  # in its wait, or while it asks
            answers = [lambda ask: Raise(KeyboardInterrupt())] if waits and len(answers) == 1 else answers
            played = play(clock, acquire(blocking=True), OTHER, *answers)
            assert isinstance(played.raised, KeyboardInterrupt)
            places = [say.leave(b"name", place_of(call), played.gates.inbox) for call in entered(played)[:1]]
            assert (played.undos, played.leaves) == ([], places)
            assert not played.gates.by_key and not played.gates.by_place


def test_who_is_gone_when_it_was_handed_the_lease_gives_it_back(clock: Clock) -> None:
    gates = Played().gates
    first = joined(gates, "name", b"name", 10_000, False, None)
    gates.ask(first, clock())
    lease = Lease("name", b"name", first.gate.place, clock() + 10)
    first.gate.granted(first, lease, 0, clock())
    steps = acquire(blocking=True).rest(_steps.BEHIND, clock)
    join = steps.send(None)
    gates.join(join.waiter)
    assert type(join) is _steps.Join and type(steps.send(None)) is _steps.Wait
    clock.go(0.001)
    gates.release(lease, clock())
    undo = steps.throw(KeyboardInterrupt())
    assert type(undo) is _steps.Undo and undone(undo) == ([b"name"], [lease.proof])
    assert not gates.by_key
    with pytest.raises(KeyboardInterrupt):
        steps.send(None)


def test_a_waiter_that_is_dropped_stands_in_nobodys_way(clock: Clock) -> None:
    """Closed by hand, or by the interpreter: nothing can be sent, but those behind it go on."""
    gates = Played().gates
    steps = acquire(blocking=True).rest(OTHER, clock)
    waiter = steps.send(None).waiter
    gates.join(waiter)
    steps.send(None)
    behind = joined(gates, "name", b"name", 10_000, False, None)
    steps.close()
    assert behind.called and waiter.gate.first() is behind


@pytest.mark.parametrize(
    "text", ["NOPERM this user has no permissions to run the 'evalsha' command", "ERR ACL failure"]
)
def test_who_may_not_use_the_queue_polls(clock: Clock, text: str) -> None:
    op = acquire(blocking=True, sleep=0.1)
    played = play(clock, op, OTHER, [error(text)], OTHER, 5000, OTHER, 50, None)
    assert verbs(played) == [say.ACQUIRE, -1, say.ACQUIRE, say.PTTL, say.ACQUIRE, say.PTTL, say.ACQUIRE]
    assert played.sleeps == [pytest.approx(0.1), pytest.approx(0.05)] and len(entered(played)) == 1
    assert played.outcome.token == MINE and not played.gates.by_key and not played.gates.by_place


@pytest.mark.parametrize(
    ("left", "sleep", "pause"),
    [
        *((5000, 0.1, 0.1), (50, 0.1, 0.05), (0, 0.1, 0.001), (-2, 0.1, 0.001), (-1, 0.1, 0.1), (100, 0.0, 0.001)),
        *((3, 7, 0.003), (-1, 0, 0.001), (9_000_000, 30.0, 30.0)),
    ],
)
def test_who_polls_looks_again_when_the_lease_ends_or_after_sleep(
    clock: Clock, left: int, sleep: float, pause: float
) -> None:
    played = play(clock, acquire(blocking=True, sleep=sleep, polls=True), OTHER, left, None)
    assert played.sleeps == [pytest.approx(pause)]
    assert verbs(played) == [say.ACQUIRE, say.PTTL, say.ACQUIRE]
    assert played.outcome.deadline == clock() + 10


def test_who_polls_never_sleeps_past_its_time(clock: Clock) -> None:
    start = clock()
    op = acquire(blocking=True, until=start + 0.25, polls=True)
    played = play(clock, op, *[OTHER, 60_000] * 3, OTHER)
    assert played.outcome is None
    assert clock() <= start + 0.25
    assert sum(played.sleeps) > 0.2
    assert len(played.asks) == 7


def test_who_polls_is_interrupted_without_doubt_and_leaves_nothing(clock: Clock) -> None:
    for answers in ([OTHER, 50, Raise(KeyboardInterrupt())], [OTHER, Raise(KeyboardInterrupt())]):
        played = play(clock, acquire(blocking=True, polls=True), *answers)
        assert isinstance(played.raised, KeyboardInterrupt)
        assert played.undos == played.leaves == []


def test_who_polls_is_in_doubt_from_one_look_to_the_next(clock: Clock) -> None:
    """The lost command may be executed when the holder has gone: its own token is the waiter's, at any look."""
    played = play(clock, acquire(blocking=True, polls=True), lost(), OTHER, 50, error("ERR broken"))
    assert isinstance(played.raised, errors.ResponseError)
    assert len(played.undos) == 1
    played = play(clock, acquire(blocking=True, polls=True), lost(), OTHER, 50, MINE, b"OK")
    assert played.outcome.token == MINE
    assert played.undos == []


def test_who_gives_up_in_doubt_leaves_the_queue_and_an_undo(clock: Clock) -> None:
    op = acquire(blocking=True, until=clock() + 0.5)
    played = play(clock, op, lost(session="one"), OTHER, QUEUED, QUEUED)
    assert played.outcome is None and [undone(undo) for undo in played.undos] == [([b"name"], [MINE])]
    assert played.leaves == [say.leave(b"name", MINE, played.gates.inbox)]


@pytest.mark.parametrize("text", ["WRONGTYPE Operation against a key", "ERR broken", "OOM command not allowed"])
def test_an_error_in_the_queue_is_raised_and_the_place_left(clock: Clock, text: str) -> None:
    played = play(clock, acquire(blocking=True), OTHER, [error(text)])
    assert isinstance(played.raised, errors.ResponseError) and len(entered(played)) == 1
    assert played.leaves == [say.leave(b"name", place_of(entered(played)[0]), played.gates.inbox)]
    assert not played.gates.by_key


def test_a_place_whose_reply_was_lost_is_asked_for_again_as_the_same(clock: Clock) -> None:
    """The server confirms what it had granted; counted from the second time it was sent."""
    played = play(clock, acquire(blocking=True), OTHER, After(2.0, lost(session="one")), After(1.0, [[1, 0, 0]]))
    calls = [ask.calls[0] for ask in played.asks[1:]]
    assert len(calls) == 2 and calls[0] == calls[1] and played.stales[2] == ("one",)
    assert played.outcome.deadline == clock() - 1 + 10 and played.undos == played.leaves == []
    assert played.gates.stats.recovered == 1


def test_a_place_given_up_in_doubt_is_left_behind_all_that_broke(clock: Clock) -> None:
    played = play(clock, acquire(blocking=True), OTHER, lost(session="one"), lost(session="two", final=True))
    assert isinstance(played.raised, errors.ConnectionError)
    assert [set(leave.stale) for leave in played.of(_steps.Leave)] == [{"one", "two"}]


@pytest.mark.parametrize(("seconds", "final"), [(0.6, False), (0.1, True)])
def test_whose_own_time_ends_in_a_broken_connection_fails_alone(clock: Clock, seconds: float, final: bool) -> None:
    """Those behind it have their own time; where the server stays away they fail together."""
    gates = Gates(contextlib.nullcontext())
    behind: list[Waiter] = []

    def broken(ask: Any) -> Any:
        behind.append(joined(gates, "name", b"name", 10_000, False, None))
        clock.go(seconds)
        return lost(final=final)

    played = play(clock, acquire(blocking=True, until=clock() + 0.5), OTHER, broken, gates=gates)
    assert isinstance(played.raised, errors.ConnectionError) and behind[0].called
    gate: Any = behind[0].gate
    assert isinstance(gate.error, errors.ConnectionError) == final and (b"name" in gates.by_key) != final


@pytest.mark.parametrize("text", [LOADING, "BUSY Redis is busy running a script", "CLUSTERDOWN the cluster is down"])
def test_who_waited_through_what_passes_fails_together_with_those_behind(clock: Clock, text: str) -> None:
    """A server that goes on to say so is as one that stays away: nobody begins to wait for it anew."""
    gates = Gates(contextlib.nullcontext())
    behind: list[Waiter] = []

    def passing(ask: Any) -> Any:
        if not behind:
            behind.append(joined(gates, "name", b"name", 10_000, False, None))
        clock.go(3)
        return [error(text)]

    played = play(clock, acquire(blocking=True), OTHER, *[passing] * 3, gates=gates)
    assert isinstance(played.raised, errors.RedisError) and behind[0].called
    gate: Any = behind[0].gate
    assert type(gate.error) is type(played.raised) and b"name" not in gates.by_key


def test_scripts_that_were_forgotten_are_loaded_for_the_queue(clock: Clock) -> None:
    played = play(clock, acquire(blocking=True), OTHER, [error("NOSCRIPT x")], [b"sha"] * 7, GRANTED)
    assert say.ENTER_LUA.load in played.asks[2].calls and played.outcome is not None


@pytest.mark.parametrize(
    "reply", [None, 1, b"OK", [], [1], [1, 0], [1, 0, None], [b"1", 0, 0], [1, 0, 0, 0], [True, 0, 0]]
)
def test_a_reply_of_the_wrong_shape_is_never_a_place(clock: Clock, reply: Any) -> None:
    played = play(clock, acquire(blocking=True), OTHER, [reply], [reply])
    assert isinstance(played.raised, errors.InvalidResponse) and len(played.of(_steps.Distrust)) == 2
    assert len(played.leaves) == 1


def test_a_place_granted_after_its_lease_is_let_go_before_the_next_look(clock: Clock) -> None:
    """Over the same connection, and of another place: or it could let go of what the next look is granted."""

    def late(ask: Any) -> Any:
        ask.link = "the connection"
        clock.go(0.06)
        return [[1, 1, 0]]

    for alone in (False, True):
        op = acquire(ms=50, blocking=True, alone=alone)
        played = play(clock, op, *([] if alone else [OTHER]), late, GRANTED)
        (undo,) = played.undos
        one, other = (place_of(call) for call in entered(played))
        assert undone(undo) == ([b"name"], [one]) and (one == MINE) is alone and other != one
        assert undo.link == "the connection"
        assert played.steps.index(undo) < played.steps.index(played.asks[-1])
        assert played.outcome.token == other and played.outcome.deadline == clock() + 0.05


# --------------------------------------------------------------------------------------------------------------- undos


class Link:
    """A connection that keeps what was posted on it."""

    def __init__(self, *capabilities: str) -> None:
        self.session = Session({}, frozenset(capabilities), b"1", b"a", "")
        self.posted: list[Any] = []
        self.later: list[Any] = []
        self.heard: list[Exception] = []  # for what it was refused

    def post_later(self, undo: _steps.Undo, seconds: float) -> None:
        self.later.append((undo, seconds))

    def refused(self, undo: _steps.Undo, error: Exception) -> None:
        self.heard.append(error)

    def post(self, undo: _steps.Undo) -> None:
        self.posted.append((undo, undo.calls))


@pytest.mark.parametrize("native", [True, False])
def test_an_undo_lets_go_whether_or_not_somebody_waits_and_once_more_of_what_was_refused(native: bool) -> None:
    """Then behind its scripts, and in whichever form the token stands there, also where it may not ask who waits."""
    link: Any = Link(say.DELIFEQ) if native else Link()
    a, b, c = MINE, OTHER, b"fl:" + b"c" * 32
    undo = _steps.Undo([b"a", b"b", b"c"], [a, b, c], ("one",))
    undo.link = link
    assert undo.kind == _steps.CALLS and not _steps.Said(undo).done()

    def plain(name: bytes, token: bytes) -> tuple[bytes, ...]:
        return (b"DELIFEQ", name, token) if native else (b"EVALSHA", say.RELEASE_LUA.sha, b"1", name, token)

    assert undo.calls[:2] == [say.hand_over(b"a", a), plain(b"a", a)] and len(undo.calls) == 6
    refused, forgotten = error("NOPERM"), error("NOSCRIPT")
    undo.set_result([1, 0, forgotten, 1, forgotten, 0])
    again = [say.hand_over(b"c", c), plain(b"c", c), plain(b"c", b"fl+" + c[3:])]
    assert link.posted == [(undo, [say.HAND_OVER_LUA.load, say.RELEASE_LUA.load, *again])], "only c may still be held"
    assert undo.stale == (), "what broke was ended by then"
    undo.set_result([b"sha", b"sha", refused, 0, 0])
    assert len(link.posted) == 1 and not link.heard, "it is held in neither form"
    undo.set_result([refused, refused, refused, refused, refused])
    (error_of,) = link.heard
    assert len(link.posted) == 1 and isinstance(error_of, errors.ResponseError)


def test_what_becomes_of_an_undo_counts_where_it_was_said_last() -> None:
    """It may be said twice, by one who was interrupted: on two connections that both break, or refuse it."""
    link: Any = Link()
    undo = _steps.Undo([b"a"], [MINE])
    undo.link = link
    first, second = _steps.Said(undo), _steps.Said(undo)
    owed: list[Any] = []
    wire: Any = SimpleNamespace(owe=owed.append)
    for _ in range(2):
        first.lost(wire, "session")
        first.set_result([error(LOADING)] * 2)
    assert owed == link.later == [] and undo.stale == () and undo.said is second
    for _ in range(2):
        second.lost(wire, "session")
    assert link.later == [] and owed == [undo, undo] and undo.stale == ("session",)
    second.set_result([error(LOADING)] * 2)
    second.lost(wire, "another")
    assert [step for step, _ in link.later] == [undo] and owed == [undo, undo], "which had its reply"


def test_an_undo_that_let_go_of_all_is_done() -> None:
    link: Any = Link()
    undo = _steps.Undo([b"a", b"b", b"c"], [b"1", b"2", b"3"])
    undo.link = link
    undo.set_result([1, 0, 0, 1, 0, error("NOSCRIPT")])
    only = _steps.Undo([], [], ("one",))
    only.link = link
    assert only.calls == [(b"PING",)]
    for reply in (b"PONG", error(LOADING)):
        only.set_result([reply])
    leave = _steps.Leave(say.leave(b"a", b"p", b"inbox"), ("two",), link)
    assert (leave.calls, leave.stale, leave.kind, leave.names) == ([leave.call], ("two",), _steps.CALLS, [])
    leave.set_result([0])
    assert link.posted == link.later == link.heard == []


def test_a_leave_whose_script_was_forgotten_is_said_behind_it() -> None:
    for matters in (True, False):
        link: Any = Link()
        leave = _steps.Leave(say.leave(b"a", b"p", b"inbox"), (), link, matters)
        leave.set_result([error("NOSCRIPT")])
        assert link.posted == [(leave, [say.LEAVE_LUA.load, leave.call])]
        leave.set_result([error("NOPERM evalsha")] * 2)
        assert len(link.posted) == 1 and len(link.heard) == matters


def test_who_forgets_scripts_all_the_time_is_given_up() -> None:
    link: Any = Link()
    leave = _steps.Leave(say.leave(b"a", b"p", b"inbox"), (), link)
    for number in range(1, 20):
        leave.set_result([error("NOSCRIPT")])
        assert len(link.posted) == min(number, _steps.RELOADS - 1), number
    assert len(link.heard) == 10


def test_what_nobody_waits_for_is_said_later_to_a_server_that_can_do_nothing_now() -> None:
    link: Any = Link()
    undo, leave = _steps.Undo([b"a"], [MINE]), _steps.Leave(say.leave(b"a", b"p", b"inbox"), (), link)
    undo.link = link
    for _ in range(30):
        undo.set_result([error(LOADING)] * 2)
        leave.set_result([error(LOADING)])
    assert [step for step, _ in link.later] == [undo, leave] * 30 and link.posted == link.heard == []
    seconds = [each for _, each in link.later]
    assert 0 < max(seconds[:4]) < 0.05 and 0.1 < max(seconds) <= 1
    undo.set_result([error("NOSCRIPT")] * 2)
    undo.set_result([error(LOADING)] * 5)
    assert undo.again and len(link.posted) == 1 and len(link.later) == 61
