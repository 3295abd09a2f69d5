"""Moments: how long a waiter has to confirm a grant, and how often it looks what became of its entry."""

from __future__ import annotations

import contextlib

import pytest
from support.run_steps import Clock, joined

from fastlock._protocol.local_queue import (
    NEAR,
    RECHECK_SECONDS,
    SHORTEST_SLEEP,
    LocalQueue,
    LocalQueues,
)
from fastlock._protocol.moments import LEAST_MOMENT, MOST_GROWN, MOST_MOMENT

pytestmark = pytest.mark.usefixtures("impl")  # leases are compiled


@pytest.fixture
def queues() -> LocalQueues:
    return LocalQueues(contextlib.nullcontext())


def entered(queues: LocalQueues, clock: Clock) -> LocalQueue:
    """A local queue whose first waiter has joined the server's."""
    one = joined(queues, "name", b"name", 10_000, False, None)
    assert one.queue is not None
    queues.may_enter_now(one, clock())
    return one.queue


@pytest.mark.parametrize(("ahead", "pause"), [(0, LEAST_MOMENT), (NEAR - 1, LEAST_MOMENT), (NEAR, RECHECK_SECONDS)])
def test_a_waiter_near_the_front_looks_once_a_moment_from_when_it_looked_last(
    queues: LocalQueues, clock: Clock, ahead: int, pause: float
) -> None:
    queue = entered(queues, clock)
    sent = clock()
    clock.go(0.05)  # until the reply came
    queue.note_queued(5.0, True, ahead, sent, clock())
    assert queue.recheck_at == pytest.approx(sent + pause)
    clock.go(5)
    queue.note_queued(5.0, True, ahead, sent, clock())
    assert queue.recheck_at == clock() + SHORTEST_SLEEP, "no busy loop where replies are late"


@pytest.mark.parametrize(
    ("ahead", "left", "told", "pause"),
    [
        (NEAR - 1, 0.1, True, 0.1),
        (NEAR, 0.1, True, RECHECK_SECONDS),  # the holder may be one that was granted the name for its moment
        (NEAR, LEAST_MOMENT + 0.001, True, RECHECK_SECONDS),  # where several may hold, a lease ends 1 ms later
        (NEAR, LEAST_MOMENT + 0.1, True, LEAST_MOMENT + 0.1),
        (NEAR, 0.05, False, 0.05),  # redis-py holds it: nobody is told
    ],
)
def test_a_waiter_far_behind_does_not_look_when_the_moment_of_another_ends(
    queues: LocalQueues, clock: Clock, ahead: int, left: float, told: bool, pause: float
) -> None:
    queue = entered(queues, clock)
    queue.note_queued(left, told, ahead, clock(), clock())
    assert queue.recheck_at == pytest.approx(clock() + pause)


@pytest.mark.parametrize(("moved", "pause"), [(0, 0.1), (1, 0.1), (NEAR - 1, 0.1), (NEAR, RECHECK_SECONDS)])
def test_a_waiter_far_behind_takes_part_where_those_ahead_seem_to_hang(
    queues: LocalQueues, clock: Clock, moved: int, pause: float
) -> None:
    """One stopped process may have many entries: only the look of somebody behind them passes the name on."""
    queue = entered(queues, clock)
    for ahead in (100, 100 - moved):
        queue.note_queued(0.1, True, ahead, clock(), clock())
    assert queue.recheck_at == pytest.approx(clock() + pause)
    queue.new_entry()
    queue.note_queued(0.1, True, 90, clock(), clock())
    assert queue.recheck_at == pytest.approx(clock() + RECHECK_SECONDS), "another place in the queue"


def test_a_client_that_is_too_slow_for_its_moment_gets_a_longer_one(queues: LocalQueues) -> None:
    moments = []
    for kept in (False, False, False, False, True, True, True, True):
        queues.note_moment(kept)
        moments.append(queues.moment)
    assert moments == pytest.approx([0.4, MOST_GROWN, MOST_GROWN, MOST_GROWN, 0.4, 0.2, 0.2, LEAST_MOMENT])


def test_a_grant_that_was_not_confirmed_in_time_was_too_slow(queues: LocalQueues, clock: Clock) -> None:
    queue = entered(queues, clock)
    queue.note_gone()
    assert queues.moment == LEAST_MOMENT, "it was never in the server's queue"
    queues.may_enter_now(next(iter(queue.waiters)), clock())
    queue.note_queued(5.0, True, 0, clock(), clock())
    queue.note_gone()
    assert queues.moment == 2 * LEAST_MOMENT


def test_a_moment_lasts_several_round_trips(queues: LocalQueues) -> None:
    queues.note_reply(0.05)
    queues.note_moment(True)
    assert queues.moment == pytest.approx(0.6) and queues.address() == queues.channel + b"0600-"
    queues.note_reply(1.5)  # as the process was stopped
    assert queues.round_trip == pytest.approx(0.0625)
    queues.note_reply(0.001)
    queues.note_moment(True)
    queues.note_moment(True)
    assert queues.moment == LEAST_MOMENT
    queues.round_trip = 1.0
    queues.note_moment(True)
    assert queues.moment == MOST_MOMENT
    queues.note_moment(False)
    assert queues.moment == MOST_MOMENT, "its round trip needs it"
