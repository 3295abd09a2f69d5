"""Local handovers that come too late or must not happen: to a waiter that runs only after the lease has expired (it
waits again, in front; others may hold by then), past an entry in the server's queue, or of a token that is in use.
"""

from __future__ import annotations

import contextlib

import pytest
from support.run_steps import Clock

from fastlock._implementation import default
from fastlock._protocol.local_queue import LocalQueues, ReleaseRoute
from fastlock._protocol.waiters import Waiter, WaiterList
from tests.protocol.test_local_queue import MS, empty, grant, handed_over, join, taken

pytestmark = pytest.mark.usefixtures("impl")  # leases are compiled


@pytest.fixture
def queues() -> LocalQueues:
    return LocalQueues(contextlib.nullcontext())


def test_a_lease_that_expires_before_its_waiter_runs_does_not_count(queues: LocalQueues, clock: Clock) -> None:
    one, two, three = join(queues, 3)
    lease = grant(queues, one, clock)
    assert (
        handed_over(queues, lease, clock) and queues.take_back_expired(two, clock()) is None and two.lease is not None
    )
    clock.go(MS / 1000)
    over = queues.take_back_expired(two, clock())
    assert over is not None and over.token == lease._raw_token and two.lease is None
    assert list(two.queue.waiters) == [two, three], "it is the first again"
    assert queues.may_enter_now(two, clock()) and not queues.may_enter_now(three, clock())
    assert two.queue.entry != over.token


def test_a_waiter_that_returns_is_first_also_in_a_new_queue(queues: LocalQueues, clock: Clock) -> None:
    one, two = join(queues, 2)
    assert handed_over(queues, grant(queues, one, clock), clock)
    clock.go(MS / 1000)
    queues.expire(clock())
    assert empty(queues), "no waiter is known"
    (three,) = join(queues, 1)
    assert queues.take_back_expired(two, clock()) is not None
    assert two.queue is three.queue and list(two.queue.waiters) == [two, three]


def test_a_waiter_that_returns_waits_behind_the_one_that_has_entered(queues: LocalQueues, clock: Clock) -> None:
    """Otherwise the server would answer both that the entry is theirs."""
    one, two, three, four = join(queues, 4)
    assert handed_over(queues, grant(queues, one, clock), clock)
    clock.go(MS / 1000)
    assert queues.may_enter_now(three, clock())
    assert queues.take_back_expired(two, clock()) is not None
    assert list(two.queue.waiters) == [three, two, four] and not queues.may_enter_now(two, clock())
    assert queues.dequeue(three, clock()) == (None, None) and two.woken and queues.may_enter_now(two, clock())


def test_a_waiter_that_returns_waits_for_a_later_holder(queues: LocalQueues, clock: Clock) -> None:
    one, two, three = join(queues, 3)
    assert handed_over(queues, grant(queues, one, clock), clock)
    clock.go(MS / 1000)
    later = grant(queues, three, clock)
    assert queues.take_back_expired(two, clock()) is not None and not queues.may_enter_now(two, clock())
    assert handed_over(queues, later, clock) and taken(two).valid


def test_a_waiter_that_returns_and_leaves_leaves_nothing(queues: LocalQueues, clock: Clock) -> None:
    one, two = join(queues, 2)
    assert handed_over(queues, grant(queues, one, clock), clock)
    clock.go(MS / 1000)
    queues.expire(clock())
    assert queues.take_back_expired(two, clock()) is not None
    assert queues.dequeue(two, clock()) == (None, None)
    assert not queues.by_key and not queues.by_entry


def test_no_local_handover_past_an_entry_in_the_servers_queue(queues: LocalQueues, clock: Clock) -> None:
    """A waiter that wants a fence entered ahead, and gave up: the entry would be granted to nobody."""
    one, two, three = join(queues, 1)[0], join(queues, 1, fenced=True)[0], join(queues, 1)[0]
    lease = grant(queues, one, clock)
    queues.handover_completed(one)
    assert two.woken and queues.may_enter_now(two, clock())
    two.queue.note_queued(5.0, True, 0, clock(), clock())
    assert queues.dequeue(two, clock()) == (None, None) and three.woken
    assert queues.release(lease, clock()) == ReleaseRoute.SCRIPT and three.lease is None
    assert queues.may_enter_now(three, clock())


def test_a_lease_that_is_being_extended_is_not_handed_over(queues: LocalQueues, clock: Clock) -> None:
    """The server may execute the extension later, by the token, for whoever has it by then."""
    one, two, three = join(queues, 3)
    lease = grant(queues, one, clock)
    lease._extensions = 2
    assert queues.release(lease, clock()) == ReleaseRoute.SCRIPT and two.lease is None and two.woken
    lease = grant(queues, two, clock)
    assert handed_over(queues, lease, clock) and taken(three).valid


@pytest.mark.parametrize("meanwhile", ["read", "extended", "read, and struck"])
def test_another_thread_uses_a_lease_during_its_handover(
    queues: LocalQueues, clock: Clock, meanwhile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the check whether it may be handed over and the handover. Compiled, no other thread comes between."""
    if default.IMPLEMENTATION == "cython":
        pytest.skip("what is compiled cannot be changed")
    one, two, three = join(queues, 3)
    lease, remove, insert, seen = grant(queues, one, clock), WaiterList.remove, WaiterList.insert, []

    def removed(waiters: WaiterList, waiter: Waiter) -> None:
        remove(waiters, waiter)
        if meanwhile == "extended":
            lease._extensions += 1
        else:
            seen.append(lease.token)

    def inserted(waiters: WaiterList, waiter: Waiter, before: Waiter | None) -> None:
        if len(seen) == 1 and "struck" in meanwhile:
            seen.append(None)
            raise KeyboardInterrupt
        insert(waiters, waiter, before)

    monkeypatch.setattr(WaiterList, "remove", removed)
    monkeypatch.setattr(WaiterList, "insert", inserted)
    if "struck" in meanwhile:
        with pytest.raises(KeyboardInterrupt):
            queues.release(lease, clock())
    assert queues.release(lease, clock()) == ReleaseRoute.SCRIPT
    assert lease.valid and two.lease is None and list(queues.by_key[b"name"].waiters) == [two, three]
