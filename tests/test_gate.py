"""Those who wait in one process for a name, by a clock that the test turns: whose turn it is, what passes on to whom.

By hand; any sequence of what can happen: test_gate_model.py.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.play import Clock, joined

from fastlock import _commands as say
from fastlock._commands import QUEUE_KEPT_MS
from fastlock._gate import (
    BRISK,
    ENOUGH,
    GONE,
    HAND_OVER,
    LOOK,
    PASSED,
    PLAIN,
    ROUND,
    SHORTEST_PAUSE,
    Gates,
    Line,
    Waiter,
)
from fastlock._impl import default
from fastlock._lease import ENDED, Lease

pytestmark = pytest.mark.usefixtures("impl")  # leases are compiled
MS = 10_000
GIVEN = b"a token that was given"


@pytest.fixture
def gates() -> Gates:
    return Gates(contextlib.nullcontext())


def join(gates: Gates, count: int, ms: int = MS, fenced: bool = False, sleep: float = 0.1) -> list[Waiter]:
    return [joined(gates, "name", b"name", ms, fenced, None, sleep) for _ in range(count)]


def grant(gates: Gates, waiter: Waiter, clock: Clock, elsewhere: int = 0, fence: int | None = None) -> Lease:
    """The server grants the name to the first."""
    assert gates.ask(waiter, clock())
    end = clock() + waiter.ms / 1000 if waiter.ms else math.inf
    lease = Lease(waiter.name, waiter.gate.key, waiter.gate.place, end, fence)
    lease.contended = elsewhere > 0
    waiter.gate.granted(waiter, lease, elsewhere, clock())
    clock.go(0.0001)
    return lease


def passed(gates: Gates, lease: Lease, clock: Clock) -> bool:
    return gates.release(lease, clock()) == PASSED


def taken(waiter: Waiter) -> Lease:
    """What was handed to a waiter, as it takes it."""
    assert waiter.called and waiter.lease is not None
    lease, waiter.lease, waiter.called = waiter.lease, None, False
    return lease


def called(waiters: list[Waiter]) -> list[bool]:
    return [waiter.called for waiter in waiters]


def empty(gates: Gates) -> bool:
    return not gates.by_key and not gates.by_place


# --------------------------------------------------------------------------------------------------------- whose turn


def test_only_the_first_is_called_and_only_it_may_ask(gates: Gates, clock: Clock) -> None:
    one, two, three = waiters = join(gates, 3)
    assert called(waiters) == [True, False, False]
    assert one.gate is two.gate is three.gate is gates.by_key[b"name"] and one.gate.first() is one
    assert [gates.ask(waiter, clock()) for waiter in (three, two)] == [False, False] and not gates.by_place
    assert gates.ask(one, clock()) is True and gates.by_place == {one.gate.place: one.gate}
    assert [one.gate.wake_at(waiter) for waiter in waiters] == [0.0, math.inf, math.inf]


def test_each_name_has_a_gate_and_each_gate_a_place_of_its_own(gates: Gates) -> None:
    keys = [b"a", b"b", b"c"]
    for key in keys:
        assert joined(gates, "x", key, MS, False, None).called
    places = {gate.place for gate in gates.by_key.values()}
    assert list(gates.by_key) == keys and len(places) == 3 and all(map(say.markable, places))


def test_the_inbox_is_as_long_as_the_scripts_expect() -> None:
    one, other = (Gates(contextlib.nullcontext()).inbox for _ in range(2))
    assert one != other and one.startswith(b"fastlock:")
    assert b"local INBOX = %d " % len(one) in say.ENTER_LUA.text
    assert b"#token == %d " % say.TOKEN_SIZE in say.ENTER_LUA.text


def test_who_is_called_wakes(gates: Gates, clock: Clock) -> None:
    (waiter,) = join(gates, 1)
    waiter.called, woken = False, []
    waiter.wake = lambda _: woken.append(waiter.called)
    gates.ask(waiter, clock())
    gates.hear(waiter.gate.place)
    assert woken == [True], "what it looks at says so by then"


@pytest.mark.parametrize(
    ("left", "told", "deaf", "sleep", "pause"),
    [
        (5.0, True, False, 0.1, LOOK),  # its message may be lost
        (0.3, True, False, 0.1, 0.3),  # the lease ends
        (math.inf, True, False, 0.1, LOOK),
        (5.0, False, False, 0.1, 0.1),  # a holder that cannot be told that somebody waits
        (0.05, False, False, 0.1, 0.05),
        (5.0, True, True, 0.1, 0.1),  # no messages come here
        (5.0, False, True, 7.0, 5.0),
        (math.inf, False, True, 7.0, 7.0),
        (5.0, False, False, 0.0, SHORTEST_PAUSE),  # no setting makes a busy loop
        (5.0, True, True, 0, SHORTEST_PAUSE),
        (0.0, False, False, 0.0, 0.0),  # the lease ends now
    ],
)
def test_the_first_looks_again_when_it_may_have_changed(
    gates: Gates, clock: Clock, left: float, told: bool, deaf: bool, sleep: float, pause: float
) -> None:
    one, two = join(gates, 2, sleep=sleep)
    gates.set_result(Exception("NOPERM") if deaf else [b"subscribe", gates.inbox, 1])
    assert gates.ask(one, clock())
    one.gate.queued(left, told, clock())
    assert one.gate.wake_at(one) == clock() + pause and one.gate.wake_at(two) == math.inf


def test_the_queue_outlives_the_looks_of_any_crowd(gates: Gates, clock: Clock) -> None:
    waiters = [joined(gates, "x", b"%d" % n, MS, False, None) for n in range(3000)]
    for waiter in waiters:
        gates.ask(waiter, clock())
    waiters[0].gate.queued(math.inf, True, clock())
    assert waiters[0].gate.look_at == clock() + LOOK <= clock() + QUEUE_KEPT_MS / 5000


def test_a_message_calls_the_first_of_that_place_only(gates: Gates, clock: Clock) -> None:
    one, two = join(gates, 2)
    other = joined(gates, "other", b"other", MS, False, None)
    gates.hear(one.gate.place)  # which nobody has asked for yet
    for waiter in (one, other):
        gates.ask(waiter, clock())
        waiter.called = False
    gates.hear(b"fl:" + b"0" * 32)
    assert called([one, two, other]) == [False] * 3
    gates.hear(other.gate.place)
    assert called([one, two, other]) == [False, False, True]
    gates.hear(one.gate.place)
    assert called([one, two, other]) == [True, False, True]


def test_a_message_for_a_place_that_was_granted_is_late(gates: Gates, clock: Clock) -> None:
    one, two = join(gates, 2)
    place = one.gate.place
    grant(gates, one, clock)
    assert gates.by_place == {} and one.gate.place != place
    gates.hear(place)
    assert not two.called


def test_after_a_new_connection_all_who_are_first_look(gates: Gates, clock: Clock) -> None:
    waiters = [joined(gates, "x", key, MS, False, None) for key in (b"a", b"b", b"a")]
    for waiter in waiters:
        gates.ask(waiter, clock())
        waiter.called = False
    gates.reconnected()
    assert called(waiters) == [True, True, False]


# ------------------------------------------------------------------------------------------------------- what passes on


def test_a_lease_goes_round_in_order_without_a_command(gates: Gates, clock: Clock) -> None:
    waiters = join(gates, 4)
    lease = first = grant(gates, waiters[0], clock)
    for waiter in waiters[1:]:
        before = lease
        assert not waiter.called and passed(gates, lease, clock)
        lease = taken(waiter)
        assert (before.deadline, before.valid) == (ENDED, False)
        assert (lease.proof, lease.key, lease.name, lease.valid) == (first.proof, b"name", "name", True)
        assert lease.deadline == clock() - 0.0001 + 10
    assert gates.release(lease, clock()) == PLAIN and empty(gates)


def test_nobody_asks_while_one_of_them_holds(gates: Gates, clock: Clock) -> None:
    one, two, three = join(gates, 3)
    lease = grant(gates, one, clock)
    assert [gates.ask(waiter, clock()) for waiter in (two, three)] == [False, False]
    assert two.gate.wake_at(two) == lease.deadline and two.gate.wake_at(three) == math.inf
    clock.go(9.999)
    assert gates.ask(two, clock()) is False
    clock.go(0.001)
    assert gates.ask(three, clock()) is False and gates.ask(two, clock()) is True, "it is over, and nobody let go"


def test_what_passes_says_how_contended_it_was(gates: Gates, clock: Clock) -> None:
    for elsewhere in (0, 3):
        one, two = join(gates, 2)
        lease = grant(gates, one, clock, elsewhere)
        assert passed(gates, lease, clock)
        lease = taken(two)
        assert lease.contended is (elsewhere > 0)
        assert gates.release(lease, clock()) == (HAND_OVER if elsewhere else PLAIN) and empty(gates)


@pytest.mark.parametrize("elsewhere", [1, 5])
def test_those_who_were_there_may_go_before_those_elsewhere_and_no_more(
    gates: Gates, clock: Clock, elsewhere: int
) -> None:
    waiters = join(gates, 3)
    lease = grant(gates, waiters[0], clock, elsewhere)
    waiters += join(gates, 2)
    for waiter in waiters[1:3]:
        assert passed(gates, lease, clock)
        lease = taken(waiter)
    assert gates.release(lease, clock()) == HAND_OVER
    assert called(waiters[3:]) == [True, False] and waiters[3].lease is None
    assert waiters[3].gate.wake_at(waiters[3]) == 0.0 and gates.ask(waiters[3], clock())


def ahead(gates: Gates, clock: Clock) -> tuple[list[Waiter], Lease]:
    """Somebody holds what goes to others next, and two wait behind it; the first of them was called."""
    waiters = join(gates, 2)
    lease = grant(gates, waiters[0], clock, elsewhere=1)
    waiters += join(gates, 2)
    assert passed(gates, lease, clock)
    assert not waiters[2].called, "the one before it has not come by its lease"
    gates.taken(waiters[1])
    assert waiters[2].called and not waiters[3].called
    held = waiters[1].lease
    assert held is not None
    return waiters[2:], held


def test_who_comes_after_the_last_pass_joins_the_queue_before_the_lease_is_let_go(gates: Gates, clock: Clock) -> None:
    (first, second), lease = ahead(gates, clock)
    assert gates.ask(first, clock()) and not gates.ask(second, clock())
    gate = first.gate
    assert gate is not None and gates.by_place == {gate.place: gate}
    gate.queued(5.0, True, clock())
    assert gate.wake_at(first) == clock() + LOOK, "and not at the end of the lease that is held here"
    assert gates.release(lease, clock()) == HAND_OVER
    assert not first.called and gate.wake_at(first) == clock() + LOOK, "it is in the queue"
    gates.hear(gate.place)
    assert first.called and not second.called


def test_who_is_interrupted_while_it_is_granted_leaves_the_next_another_place(gates: Gates, clock: Clock) -> None:
    """It has the lease, and the gate does not know yet: its token is given back, so nobody may hold by it."""
    first, second = join(gates, 2)
    gate = first.gate
    assert gate is not None and gates.ask(first, clock())
    lease = first.lease = Lease("name", b"name", gate.place, clock() + MS / 1000)
    assert gates.leave(first, clock()) == (lease, None)
    assert second.called and gate.place != lease.proof and gates.ask(second, clock())
    lease = second.lease = Lease("name", b"name", gate.place, clock() + MS / 1000)
    assert gates.leave(second, clock()) == (lease, None) and empty(gates)


def test_who_has_not_asked_yet_when_the_lease_is_let_go_does_so_then(gates: Gates, clock: Clock) -> None:
    (first, _), lease = ahead(gates, clock)
    first.called = False  # it is on its way
    assert gates.release(lease, clock()) == HAND_OVER
    assert first.called and gates.ask(first, clock())


def test_who_asked_ahead_and_leaves_gives_its_place_to_the_next_or_back(gates: Gates, clock: Clock) -> None:
    (first, second), lease = ahead(gates, clock)
    assert gates.ask(first, clock())
    gate = first.gate
    assert gate is not None
    place = gate.place
    assert gates.leave(first, clock()) == (None, None)
    assert second.called and gates.ask(second, clock()) and gate.place == place
    assert gates.leave(second, clock()) == (None, place)
    assert gate.place != place and not gates.by_place, "who comes now has another"
    (late,) = join(gates, 1)
    assert late.called and gates.ask(late, clock()), "though somebody holds"
    assert gates.release(lease, clock()) == HAND_OVER


def test_where_nobody_waits_elsewhere_nobody_asks_ahead(gates: Gates, clock: Clock) -> None:
    waiters = join(gates, 2)
    assert passed(gates, grant(gates, waiters[0], clock), clock)
    (late,) = join(gates, 1)
    gates.taken(waiters[1])
    assert not late.called and not gates.ask(late, clock())


def test_where_nobody_waits_elsewhere_those_who_come_later_have_it_too(gates: Gates, clock: Clock) -> None:
    (waiter,) = join(gates, 1)
    lease = grant(gates, waiter, clock)
    for _ in range(20):
        (waiter,) = join(gates, 1)
        assert not waiter.called and passed(gates, lease, clock)
        lease = taken(waiter)


def test_a_round_ends_so_that_the_server_says_who_waits_elsewhere(gates: Gates, clock: Clock) -> None:
    waiters = join(gates, 3)
    lease = grant(gates, waiters[0], clock)
    clock.go(ROUND - 0.0002)
    assert passed(gates, lease, clock)
    lease = taken(waiters[1])
    clock.go(0.0002)
    assert gates.release(lease, clock()) == HAND_OVER and waiters[2].called and waiters[2].lease is None


@pytest.mark.parametrize(("part", "passes"), [(ENOUGH - 0.001, False), (ENOUGH, True), (1.0, True), (1.001, False)])
def test_what_passes_is_as_long_as_was_asked_for(gates: Gates, clock: Clock, part: float, passes: bool) -> None:
    """Nor longer: a waiter that dies would keep the name from others for longer than it ever wanted it."""
    one, two = join(gates, 2)
    lease = grant(gates, one, clock)
    lease.deadline = clock() + part * 10 + (1e-6 if part < 1 else -1e-6)
    assert passed(gates, lease, clock) is passes
    assert two.called and (two.lease is not None) is passes


@pytest.mark.parametrize(("had", "wanted", "passes"), [(0, 0, True), (0, MS, False), (MS, 0, False)])
def test_a_lease_without_end_passes_to_those_only_who_want_one(
    gates: Gates, clock: Clock, had: int, wanted: int, passes: bool
) -> None:
    (one,), (two,) = join(gates, 1, had), join(gates, 1, wanted)
    lease = grant(gates, one, clock)
    assert passed(gates, lease, clock) is passes
    if passes:
        assert taken(two).deadline == math.inf


def test_a_lease_that_is_over_does_not_pass(gates: Gates, clock: Clock) -> None:
    for end in (ENDED, clock(), clock() - 1):
        one, two = join(gates, 2, ms=1)
        lease = grant(gates, one, clock)
        lease.deadline = end
        assert gates.release(lease, clock()) == (GONE if end == ENDED else HAND_OVER) and two.lease is None
        assert end == ENDED or two.called
        gates.lapsed(clock())
        assert two.called, "whatever became of the lease"
        assert gates.leave(two, clock()) == (None, None) and empty(gates)


def test_a_lease_that_is_over_is_nobodys(gates: Gates, clock: Clock) -> None:
    """Its holder lets go when the next one has it by the server's word."""
    one, two, three = join(gates, 3)
    old = grant(gates, one, clock)
    clock.go(11)
    new = grant(gates, two, clock)
    assert gates.release(old, clock()) == HAND_OVER and not three.called and three.gate.held is new
    assert passed(gates, new, clock) and three.lease is not None
    assert gates.release(old, clock()) == PLAIN, "nobody waits"


def test_those_who_are_next_are_called_when_a_lease_ran_out(gates: Gates, clock: Clock) -> None:
    one, two = join(gates, 2)
    grant(gates, one, clock)
    gates.lapsed(clock())
    assert not two.called
    clock.go(10)
    gates.lapsed(clock())
    assert two.called and gates.ask(two, clock())


def test_who_is_not_next_takes_no_notice_when_a_lease_ran_out(gates: Gates, clock: Clock) -> None:
    """Else nobody calls the one who is: it fell asleep behind others, without a time to wake."""
    one, two = join(gates, 2)
    grant(gates, one, clock)
    clock.go(10)
    (three,) = join(gates, 1)
    assert not gates.ask(three, clock())
    gates.lapsed(clock())
    assert two.called and not three.called and gates.ask(two, clock())


def test_a_lease_that_ran_out_leaves_no_gate(gates: Gates, clock: Clock) -> None:
    """While there is a gate, no operation of the client takes the hot path."""
    for _ in range(2):
        (one,) = join(gates, 1)
        grant(gates, one, clock)
        gates.lapsed(clock())
        assert not empty(gates), "it is held"
        clock.go(10)
        gates.lapsed(clock())
        assert empty(gates)
    one, two = join(gates, 2)
    grant(gates, one, clock)
    clock.go(10)
    assert gates.leave(two, clock()) == (None, None) and empty(gates)


def test_who_asks_whether_it_is_busy_finds_what_ran_out_once_a_second(gates: Gates, clock: Clock) -> None:
    """Nobody else looks where no task or thread waits."""
    for key in (b"a", b"b"):
        grant(gates, joined(gates, "x", key, 500, False, None), clock)
    assert [gates.busy(key, clock()) for key in (b"a", b"b", b"c")] == [True, True, False]
    clock.go(0.6)
    assert gates.busy(b"a", clock()), "it was looked for that just now"
    clock.go(LOOK)
    assert not gates.busy(b"a", clock()) and empty(gates)


# --------------------------------------------------------------------------------------------------------------- fences


def test_who_wants_a_fence_does_not_get_a_lease_without(gates: Gates, clock: Clock) -> None:
    one, two = join(gates, 1), join(gates, 1, fenced=True)
    lease = grant(gates, one[0], clock)
    assert gates.release(lease, clock()) == HAND_OVER and two[0].called and two[0].lease is None
    assert grant(gates, two[0], clock, fence=5).fence == 5


def test_who_wants_a_fence_is_granted_each_lease_by_the_server(gates: Gates, clock: Clock) -> None:
    """And joins its queue already while another one holds: that one hands over, in one step."""
    one, two, three = join(gates, 3, fenced=True)
    lease = grant(gates, one, clock, fence=1)
    gates.taken(one)
    assert two.called and gates.ask(two, clock()) and not three.called
    two.gate.queued(5.0, True, clock())
    assert gates.release(lease, clock()) == HAND_OVER and two.lease is None
    lease = grant(gates, two, clock, fence=2)
    gates.taken(two)
    assert three.called and gates.ask(three, clock())


def test_a_lease_with_a_fence_passes_to_who_wants_none(gates: Gates, clock: Clock) -> None:
    (one,), (two,) = join(gates, 1, fenced=True), join(gates, 1)
    lease = grant(gates, one, clock, fence=1)
    assert passed(gates, lease, clock) and taken(two).fence is None


# -------------------------------------------------------------------------------------------------------------- leaving


def test_who_leaves_at_the_moment_it_was_handed_the_lease_passes_it_on(gates: Gates, clock: Clock) -> None:
    one, two, three = join(gates, 3)
    lease = grant(gates, one, clock, fence=1)
    assert passed(gates, lease, clock)
    assert gates.leave(two, clock()) == (None, None)
    assert two.lease is None and three.called
    lease = taken(three)
    assert lease.valid and lease.proof
    gates.release(lease, clock())
    assert empty(gates)


def test_who_leaves_last_at_the_moment_it_was_handed_the_lease_gives_it_back(gates: Gates, clock: Clock) -> None:
    one, two = join(gates, 2)
    lease = grant(gates, one, clock)
    assert passed(gates, lease, clock)
    handed = two.lease
    assert handed is not None and gates.leave(two, clock()) == (handed, None)
    assert two.lease is None and empty(gates)


def test_who_leaves_with_a_lease_that_must_not_pass_gives_it_back_and_calls_the_next(
    gates: Gates, clock: Clock
) -> None:
    one, two, three = join(gates, 3)
    lease = grant(gates, one, clock)
    assert passed(gates, lease, clock)
    handed = two.lease
    clock.go(2 * ROUND)
    assert gates.leave(two, clock()) == (handed, None) and three.called and three.lease is None
    assert gates.ask(three, clock())


def test_the_next_takes_the_place_of_the_first_who_leaves(gates: Gates, clock: Clock) -> None:
    one, two, three = join(gates, 3)
    gates.ask(one, clock())
    one.gate.queued(5.0, True, clock())
    place = one.gate.place
    assert gates.leave(one, clock()) == (None, None)
    assert called([two, three]) == [True, False] and two.gate.place == place and gates.ask(two, clock())
    assert gates.leave(three, clock()) == (None, None)
    assert gates.leave(two, clock()) == (None, place) and empty(gates)


def test_who_is_not_first_leaves_without_a_word(gates: Gates, clock: Clock) -> None:
    one, two, three = join(gates, 3)
    gates.ask(one, clock())
    assert gates.leave(two, clock()) == (None, None) and not three.called
    assert one.gate.first() is one and list(one.gate.waiters) == [one, three]


def test_a_place_that_nobody_asked_for_is_not_left(gates: Gates, clock: Clock) -> None:
    (waiter,) = join(gates, 1)
    assert gates.leave(waiter, clock()) == (None, None) and empty(gates)


def test_after_the_last_who_waits_the_holder_keeps_the_gate(gates: Gates, clock: Clock) -> None:
    """So that the next who comes waits for it, not the server."""
    one, two = join(gates, 2)
    lease = grant(gates, one, clock)
    assert gates.leave(two, clock()) == (None, None) and gates.by_key
    (three,) = join(gates, 1)
    assert not three.called and passed(gates, lease, clock) and three.lease is not None


def test_leaving_twice_is_leaving_once(gates: Gates, clock: Clock) -> None:
    one, two = join(gates, 2)
    gates.ask(one, clock())
    assert gates.leave(one, clock()) == gates.leave(one, clock()) == (None, None)
    place = two.gate.place
    assert gates.leave(two, clock()) == gates.leave(two, clock()) == (None, place)


# -------------------------------------------------------------------------------------------------------- private gates


def test_who_waits_alone_has_a_gate_of_its_own_and_its_token_as_place(gates: Gates, clock: Clock) -> None:
    others = join(gates, 2)
    alone = [joined(gates, "name", b"name", MS, False, place) for place in (GIVEN, b"another")]
    assert called(alone) == [True, True] and [waiter.gate.place for waiter in alone] == [GIVEN, b"another"]
    assert len({id(waiter.gate) for waiter in [*others, *alone]}) == 3 and list(gates.by_key) == [b"name"]
    assert all(gates.ask(waiter, clock()) for waiter in alone)
    lease = grant(gates, alone[0], clock, elsewhere=2)
    assert lease.proof == GIVEN and list(gates.by_place) == [b"another"]
    assert gates.release(lease, clock()) == HAND_OVER and called(others) == [True, False], "others wait here as well"
    assert others[0].lease is None, "what was its own passes to nobody"


def test_who_waited_alone_lets_go_in_the_plain_way(gates: Gates, clock: Clock) -> None:
    alone = joined(gates, "name", b"name", MS, False, GIVEN)
    lease = grant(gates, alone, clock)
    assert empty(gates) and gates.release(lease, clock()) == PLAIN


def test_who_waited_alone_leaves_its_place(gates: Gates, clock: Clock) -> None:
    alone = joined(gates, "name", b"name", MS, False, GIVEN)
    gates.ask(alone, clock())
    assert gates.leave(alone, clock()) == (None, GIVEN) and empty(gates)


def test_a_place_is_another_when_it_is_renewed(gates: Gates, clock: Clock) -> None:
    """Also one of its own: what undoes the old one may still be on its way."""
    alone = joined(gates, "name", b"name", MS, False, GIVEN)
    gates.ask(alone, clock())
    alone.gate.renew()
    assert alone.gate.place != GIVEN and (alone.gate.asked, gates.by_place) == (False, {})
    (shared,) = join(gates, 1)
    place = shared.gate.place
    gates.ask(shared, clock())
    shared.gate.renew()
    assert shared.gate.place != place and not shared.gate.asked and gates.by_place == {}


def test_releases_of_names_that_nobody_waits_for_are_plain(gates: Gates, clock: Clock) -> None:
    join(gates, 1)
    assert gates.release(Lease("x", b"x", GIVEN, math.inf), clock()) == PLAIN


def test_the_mutex_is_held_whenever_something_changes_and_free_when_the_next_one_is_woken(clock: Clock) -> None:
    class Mutex:
        held = entered = 0

        def __enter__(self) -> None:
            self.held += 1
            self.entered += 1

        def __exit__(self, *exc: object) -> None:
            self.held -= 1

    mutex: Any = Mutex()
    gates = Gates(mutex)
    one, two, three = join(gates, 3)
    for waiter in (one, two, three):
        waiter.wake = lambda _: seen.append(mutex.held)
    seen: list[int] = []
    before = mutex.entered
    lease = grant(gates, one, clock)
    gates.release(lease, clock())
    gates.leave(two, clock())
    gates.release(taken(three), clock())
    gates.hear(b"x")
    gates.reconnected()
    gates.lapsed(clock())
    assert seen == [0, 0] and mutex.entered == before + 7 and mutex.held == 0


@pytest.mark.parametrize(
    "payload", [5, None, 1.5, True, [], [b"x"], {b"x": 1}, {1}, "x", ValueError("x")], ids=lambda each: repr(each)
)
def test_only_messages_to_this_client_are_heard(payload: Any, gates: Gates, clock: Clock) -> None:
    (waiter,) = join(gates, 1)
    assert gates.ask(waiter, clock())
    place = waiter.gate.place
    for push in (
        [b"message", gates.inbox, payload],
        [b"message", payload, place],
        [payload, gates.inbox, place],
        [b"message", b"another", place],
        [b"pmessage", gates.inbox, gates.inbox, place],
        [b"message", gates.inbox],
        [],
    ):
        gates.pushed(push)
        assert not waiter.called, push
    gates.pushed([b"message", gates.inbox, place])
    assert waiter.called


def test_a_release_within_a_release_wakes_both(gates: Gates, clock: Clock) -> None:
    """As a handler of signals can, or a finalizer: called where the next but one is told to look at its clock."""
    woken: list[str] = []
    one, two, three = join(gates, 3, ms=int(LOOK * 500))
    lease = grant(gates, one, clock)
    first, second = (joined(gates, "other", b"other", MS, False, None) for _ in range(2))
    other = grant(gates, first, clock)
    two.wake, second.wake = (lambda _: woken.append("two")), (lambda _: woken.append("second"))
    three.wake = lambda _: gates.release(other, clock())
    assert passed(gates, lease, clock)
    assert sorted(woken) == ["second", "two"] and two.called and second.called


def test_threads_that_come_and_go_hold_one_after_the_other(clock: Clock) -> None:
    """All at once, with a mutex as the wire has it: each gets it once, nobody at the same time as another."""
    gates, holders, order = Gates(default.Mutex()), list[int](), list[int]()
    start, done = threading.Barrier(8), itertools.count()

    def work(number: int) -> None:
        start.wait(30)
        for _ in range(200):
            waiter = joined(gates, "name", b"name", 0, False, None)
            woken = threading.Event()
            while waiter.lease is None:
                waiter.wake = lambda _, woken=woken: woken.set()
                if gates.ask(waiter, clock()):
                    lease = Lease("name", b"name", waiter.gate.place, math.inf)
                    with gates.mutex:
                        waiter.gate.granted(waiter, lease, 0, clock())
                    waiter.lease = lease
                    break
                assert woken.wait(30) or waiter.lease is not None
                woken.clear()
            holders.append(number)
            order.append(len(holders))
            holders.remove(number)
            next(done)
            gates.release(waiter.lease, clock())

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert next(done) == 8 * 200 and set(order) == {1} and empty(gates)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 7)), max_size=60))
def test_a_line_is_a_list_from_which_anybody_may_go(steps: list[tuple[bool, int]]) -> None:
    line, model = Line(), list[Waiter]()
    waiters = [Waiter("name", b"name", MS, False) for _ in range(8)]
    for comes, number in steps:
        waiter = waiters[number]
        if not comes:
            line.remove(waiter)  # also who is not there
            model = [each for each in model if each is not waiter]
        elif waiter not in model:
            line.add(waiter)
            model.append(waiter)
        assert list(line) == model and len(line) == line.count == len(model)
        assert (line.first, line.last) == ((model[0], model[-1]) if model else (None, None))
        assert [each.waits for each in waiters] == [each in model for each in waiters]
    for waiter in waiters:
        line.remove(waiter)
        assert waiter.before is waiter.after is None, "who left keeps nobody alive"


def test_a_lease_that_passes_on_at_once_is_brisk(gates: Gates, clock: Clock) -> None:
    waiters = join(gates, 5)
    lease, gate = grant(gates, waiters[0], clock), waiters[1].gate
    found = []
    for waiter, held in zip(waiters[1:], (0.001, BRISK / 2, BRISK * 2, BRISK / 2), strict=True):
        clock.go(held)
        assert passed(gates, lease, clock) and gate.brisk == gates.brisk
        found.append(gates.brisk)
        lease = taken(waiter)
    assert found == [False, True, False, True]
