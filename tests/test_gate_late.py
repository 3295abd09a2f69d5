"""Leases that pass on within a client and should not: to a caller who runs only when it is over (who waits on in front;
others may hold the name by then), past a place that stands in the server's queue, or with a token by which somebody may
still do something.
"""

from __future__ import annotations

import contextlib

import pytest
from support.play import Clock
from test_gate import MS, empty, grant, join, passed, taken

from fastlock._gate import HAND_OVER, Gates, Line, Waiter
from fastlock._impl import default

pytestmark = pytest.mark.usefixtures("impl")  # leases are compiled


@pytest.fixture
def gates() -> Gates:
    return Gates(contextlib.nullcontext())


def test_a_lease_that_is_over_before_its_taker_runs_does_not_count(gates: Gates, clock: Clock) -> None:
    one, two, three = join(gates, 3)
    lease = grant(gates, one, clock)
    assert passed(gates, lease, clock) and gates.returned(two, clock()) is None and two.lease is not None
    clock.go(MS / 1000)
    over = gates.returned(two, clock())
    assert over is not None and over.token == lease.proof and two.lease is None
    assert list(two.gate.waiters) == [two, three], "it is the first again"
    assert gates.ask(two, clock()) and not gates.ask(three, clock())
    assert two.gate.place != over.token


def test_who_comes_back_is_the_first_also_of_a_gate_that_was_opened_since(gates: Gates, clock: Clock) -> None:
    one, two = join(gates, 2)
    assert passed(gates, grant(gates, one, clock), clock)
    clock.go(MS / 1000)
    gates.lapsed(clock())
    assert empty(gates), "nobody waits there, as far as is known"
    (three,) = join(gates, 1)
    assert gates.returned(two, clock()) is not None
    assert two.gate is three.gate and list(two.gate.waiters) == [two, three]


def test_who_comes_back_waits_behind_the_one_who_asks_for_their_place(gates: Gates, clock: Clock) -> None:
    """Else both would be answered that it is theirs."""
    one, two, three, four = join(gates, 4)
    assert passed(gates, grant(gates, one, clock), clock)
    clock.go(MS / 1000)
    assert gates.ask(three, clock())
    assert gates.returned(two, clock()) is not None
    assert list(two.gate.waiters) == [three, two, four] and not gates.ask(two, clock())
    assert gates.leave(three, clock()) == (None, None) and two.called and gates.ask(two, clock())


def test_who_comes_back_where_another_holds_by_now_waits_for_that(gates: Gates, clock: Clock) -> None:
    one, two, three = join(gates, 3)
    assert passed(gates, grant(gates, one, clock), clock)
    clock.go(MS / 1000)
    later = grant(gates, three, clock)
    assert gates.returned(two, clock()) is not None and not gates.ask(two, clock())
    assert passed(gates, later, clock) and taken(two).valid


def test_who_comes_back_and_leaves_leaves_nothing(gates: Gates, clock: Clock) -> None:
    one, two = join(gates, 2)
    assert passed(gates, grant(gates, one, clock), clock)
    clock.go(MS / 1000)
    gates.lapsed(clock())
    assert gates.returned(two, clock()) is not None
    assert gates.leave(two, clock()) == (None, None)
    assert not gates.by_key and not gates.by_place


def test_nothing_passes_on_while_their_place_stands_in_the_servers_queue(gates: Gates, clock: Clock) -> None:
    """One who wants a fence asked for it ahead of its turn, and gave up: the place would be granted to nobody."""
    one, two, three = join(gates, 1)[0], join(gates, 1, fenced=True)[0], join(gates, 1)[0]
    lease = grant(gates, one, clock)
    gates.taken(one)
    assert two.called and gates.ask(two, clock())
    two.gate.queued(5.0, True, clock())
    assert gates.leave(two, clock()) == (None, None) and three.called
    assert gates.release(lease, clock()) == HAND_OVER and three.lease is None
    assert gates.ask(three, clock())


def test_what_is_being_extended_passes_to_nobody(gates: Gates, clock: Clock) -> None:
    """The server may carry that out later, by the token, for whoever has it by then."""
    one, two, three = join(gates, 3)
    lease = grant(gates, one, clock)
    lease.moves = 2
    assert gates.release(lease, clock()) == HAND_OVER and two.lease is None and two.called
    lease = grant(gates, two, clock)
    assert passed(gates, lease, clock) and taken(three).valid


@pytest.mark.parametrize("meanwhile", ["read", "extended", "read, and struck"])
def test_what_another_thread_does_as_a_lease_passes_on(
    gates: Gates, clock: Clock, meanwhile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has looked whether it may pass, and has not passed yet: compiled, no other thread comes between."""
    if default.IMPLEMENTATION == "cython":
        pytest.skip("what is compiled cannot be changed")
    one, two, three = join(gates, 3)
    lease, remove, insert, seen = grant(gates, one, clock), Line.remove, Line.insert, []

    def removed(line: Line, waiter: Waiter) -> None:
        remove(line, waiter)
        if meanwhile == "extended":
            lease.moves += 1
        else:
            seen.append(lease.token)

    def inserted(line: Line, waiter: Waiter, before: Waiter | None) -> None:
        if len(seen) == 1 and "struck" in meanwhile:
            seen.append(None)
            raise KeyboardInterrupt
        insert(line, waiter, before)

    monkeypatch.setattr(Line, "remove", removed)
    monkeypatch.setattr(Line, "insert", inserted)
    if "struck" in meanwhile:
        with pytest.raises(KeyboardInterrupt):
            gates.release(lease, clock())
    assert gates.release(lease, clock()) == HAND_OVER
    assert lease.valid and two.lease is None and list(gates.by_key[b"name"].waiters) == [two, three]
