"""The local queue by a clock that the test sets: which waiter is first, when it enters, to whom a lease is handed over.

Each case by hand; any sequence of events: test_local_queue_model.py.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
from typing import Any

import pytest
from support.run_steps import Clock, joined

from fastlock._implementation import default
from fastlock._protocol import commands
from fastlock._protocol.commands import QUEUE_KEPT_MS
from fastlock._protocol.lease import ENDED, Lease
from fastlock._protocol.local_queue import (
    LEAST_LEASE_PART,
    LOCAL_SECONDS,
    RAPID_SECONDS,
    RECHECK_SECONDS,
    SHORTEST_SLEEP,
    LocalQueues,
    ReleaseRoute,
)
from fastlock._protocol.moments import LEAST_MOMENT
from fastlock._protocol.waiters import Waiter

pytestmark = pytest.mark.usefixtures("impl")  # leases are compiled
MS = 10_000
GIVEN = b"a token that was given"


@pytest.fixture
def queues() -> LocalQueues:
    return LocalQueues(contextlib.nullcontext())


def join(queues: LocalQueues, count: int, ms: int = MS, fenced: bool = False, sleep: float = 0.1) -> list[Waiter]:
    return [joined(queues, "name", b"name", ms, fenced, None, sleep) for _ in range(count)]


def grant(
    queues: LocalQueues, waiter: Waiter, clock: Clock, remote_waiters: int = 0, fence: int | None = None
) -> Lease:
    """The server grants the name to the first waiter."""
    assert queues.may_enter_now(waiter, clock())
    end = clock() + waiter.ms / 1000 if waiter.ms else math.inf
    lease = Lease(waiter.name, waiter.queue.key, waiter.queue.entry, end, fence)
    lease._contended = remote_waiters > 0
    waiter.queue.note_granted(waiter, lease, remote_waiters, clock())
    clock.go(0.0001)
    return lease


def handed_over(queues: LocalQueues, lease: Lease, clock: Clock) -> bool:
    return queues.release(lease, clock()) == ReleaseRoute.LOCAL


def taken(waiter: Waiter) -> Lease:
    """The lease that was handed over to a waiter, as the waiter gets it."""
    assert waiter.woken and waiter.lease is not None
    lease, waiter.lease, waiter.woken = waiter.lease, None, False
    return lease


def are_woken(waiters: list[Waiter]) -> list[bool]:
    return [waiter.woken for waiter in waiters]


def empty(queues: LocalQueues) -> bool:
    return not queues.by_key and not queues.by_entry


# ---------------------------------------------------------------------------------------------------- the first waiter


def test_only_the_first_waiter_is_woken_and_only_it_may_enter(queues: LocalQueues, clock: Clock) -> None:
    one, two, three = waiters = join(queues, 3)
    assert are_woken(waiters) == [True, False, False]
    assert one.queue is two.queue is three.queue is queues.by_key[b"name"] and one.queue.first() is one
    assert [queues.may_enter_now(waiter, clock()) for waiter in (three, two)] == [False, False] and not queues.by_entry
    assert queues.may_enter_now(one, clock()) is True and queues.by_entry == {one.queue.entry: one.queue}
    assert [one.queue.recheck_time(waiter) for waiter in waiters] == [0.0, math.inf, math.inf]


def test_each_name_has_a_queue_and_each_queue_an_entry_of_its_own(queues: LocalQueues) -> None:
    keys = [b"a", b"b", b"c"]
    for key in keys:
        assert joined(queues, "x", key, MS, False, None).woken
    entries = {queue.entry for queue in queues.by_key.values()}
    assert list(queues.by_key) == keys and len(entries) == 3 and all(map(commands.can_be_contended, entries))


def test_the_channel_is_as_long_as_the_scripts_expect() -> None:
    one, other = (LocalQueues(contextlib.nullcontext()).channel for _ in range(2))
    assert one != other and one.startswith(b"fastlock:")
    sizes = commands.CHANNEL_SIZE, commands.ADDRESS_SIZE
    assert (len(one), len(commands.address(one, 1.0))) == sizes
    assert b"#token == %d " % commands.TOKEN_SIZE in commands.ENTER_LUA.text


def test_a_waiter_is_marked_as_woken_before_it_is_woken(queues: LocalQueues, clock: Clock) -> None:
    (waiter,) = join(queues, 1)
    waiter.woken, woken = False, []
    waiter.on_wake = lambda _: woken.append(waiter.woken)
    queues.may_enter_now(waiter, clock())
    queues.on_grant_message(waiter.queue.entry)
    assert woken == [True], "the waiter sees that it is woken"


@pytest.mark.parametrize(
    ("left", "told", "deaf", "sleep", "pause"),
    [
        (5.0, True, False, 0.1, LEAST_MOMENT),  # its message may be lost
        (0.15, True, False, 0.1, 0.15),  # the lease ends
        (math.inf, True, False, 0.1, LEAST_MOMENT),
        (5.0, False, False, 0.1, 0.1),  # a holder that cannot be told that somebody waits
        (0.05, False, False, 0.1, 0.05),
        (5.0, True, True, 0.1, 0.1),  # no messages come here
        (5.0, False, True, 7.0, 5.0),
        (math.inf, False, True, 7.0, 7.0),
        (5.0, False, False, 0.0, SHORTEST_SLEEP),  # no setting makes a busy loop
        (5.0, True, True, 0, SHORTEST_SLEEP),
        (0.0, False, False, 0.0, SHORTEST_SLEEP),  # the last millisecond of the lease, as a server rounds it
        (0.0, True, False, 0.1, SHORTEST_SLEEP),
    ],
)
def test_the_first_waiter_rechecks_when_something_may_have_changed(
    queues: LocalQueues, clock: Clock, left: float, told: bool, deaf: bool, sleep: float, pause: float
) -> None:
    one, two = join(queues, 2, sleep=sleep)
    queues.set_result(Exception("NOPERM") if deaf else [b"subscribe", queues.channel, 1])
    assert queues.may_enter_now(one, clock())
    one.queue.note_queued(left, told, 0, clock(), clock())
    assert one.queue.recheck_time(one) == clock() + pause and one.queue.recheck_time(two) == math.inf


def test_the_servers_queue_outlives_the_rechecks_of_many_names(queues: LocalQueues, clock: Clock) -> None:
    waiters = [joined(queues, "x", b"%d" % n, MS, False, None) for n in range(3000)]
    for waiter in waiters:
        queues.may_enter_now(waiter, clock())
    waiters[0].queue.note_queued(math.inf, True, 0, clock(), clock())
    assert (
        waiters[0].queue.recheck_at
        == clock() + LEAST_MOMENT
        < clock() + RECHECK_SECONDS
        <= clock() + QUEUE_KEPT_MS / 5000
    )


def test_a_grant_message_wakes_the_first_waiter_of_that_entry_only(queues: LocalQueues, clock: Clock) -> None:
    one, two = join(queues, 2)
    other = joined(queues, "other", b"other", MS, False, None)
    queues.on_grant_message(one.queue.entry)  # which was never sent
    for waiter in (one, other):
        queues.may_enter_now(waiter, clock())
        waiter.woken = False
    queues.on_grant_message(b"fl:" + b"0" * 32)
    assert are_woken([one, two, other]) == [False] * 3
    queues.on_grant_message(other.queue.entry)
    assert are_woken([one, two, other]) == [False, False, True]
    queues.on_grant_message(one.queue.entry)
    assert are_woken([one, two, other]) == [True, False, True]


def test_a_message_for_an_entry_that_was_granted_wakes_nobody(queues: LocalQueues, clock: Clock) -> None:
    one, two = join(queues, 2)
    entry = one.queue.entry
    grant(queues, one, clock)
    assert queues.by_entry == {} and one.queue.entry != entry
    queues.on_grant_message(entry)
    assert not two.woken


def test_after_a_new_connection_all_first_waiters_enter_again(queues: LocalQueues, clock: Clock) -> None:
    waiters = [joined(queues, "x", key, MS, False, None) for key in (b"a", b"b", b"a")]
    for waiter in waiters:
        queues.may_enter_now(waiter, clock())
        waiter.woken = False
    queues.on_reconnect()
    assert are_woken(waiters) == [True, True, False]


# ------------------------------------------------------------------------------------------------------ local handovers


def test_a_lease_circulates_in_order_of_arrival(queues: LocalQueues, clock: Clock) -> None:
    waiters = join(queues, 4)
    lease = first = grant(queues, waiters[0], clock)
    for waiter in waiters[1:]:
        before = lease
        assert not waiter.woken and handed_over(queues, lease, clock)
        lease = taken(waiter)
        assert (before._deadline, before.valid) == (ENDED, False)
        assert (lease._raw_token, lease._key, lease.name, lease.valid) == (first._raw_token, b"name", "name", True)
        assert lease._deadline == clock() - 0.0001 + 10
    assert queues.release(lease, clock()) == ReleaseRoute.DELETE and empty(queues)


def test_no_waiter_enters_while_a_local_lease_circulates(queues: LocalQueues, clock: Clock) -> None:
    one, two, three = join(queues, 3)
    lease = grant(queues, one, clock)
    assert [queues.may_enter_now(waiter, clock()) for waiter in (two, three)] == [False, False]
    assert two.queue.recheck_time(two) == lease._deadline and two.queue.recheck_time(three) == math.inf
    clock.go(9.999)
    assert queues.may_enter_now(two, clock()) is False
    clock.go(0.001)
    assert queues.may_enter_now(three, clock()) is False and queues.may_enter_now(two, clock()) is True, (
        "the lease has expired, and nobody released it"
    )


def test_a_lease_handed_over_says_whether_it_is_contended(queues: LocalQueues, clock: Clock) -> None:
    for remote_waiters in (0, 3):
        one, two = join(queues, 2)
        lease = grant(queues, one, clock, remote_waiters)
        assert handed_over(queues, lease, clock)
        lease = taken(two)
        assert lease._contended is (remote_waiters > 0)
        assert queues.release(lease, clock()) == (
            ReleaseRoute.SCRIPT if remote_waiters else ReleaseRoute.DELETE
        ) and empty(queues)


@pytest.mark.parametrize("remote_waiters", [1, 5])
def test_only_waiters_of_the_cohort_precede_remote_waiters(
    queues: LocalQueues, clock: Clock, remote_waiters: int
) -> None:
    waiters = join(queues, 3)
    lease = grant(queues, waiters[0], clock, remote_waiters)
    waiters += join(queues, 2)
    for waiter in waiters[1:3]:
        assert handed_over(queues, lease, clock)
        lease = taken(waiter)
    assert queues.release(lease, clock()) == ReleaseRoute.SCRIPT
    assert are_woken(waiters[3:]) == [True, False] and waiters[3].lease is None
    assert waiters[3].queue.recheck_time(waiters[3]) == 0.0 and queues.may_enter_now(waiters[3], clock())


def ahead(queues: LocalQueues, clock: Clock) -> tuple[list[Waiter], Lease]:
    """A lease that goes to a remote waiter next, and two waiters behind its holder, of which the first was woken."""
    waiters = join(queues, 2)
    lease = grant(queues, waiters[0], clock, remote_waiters=1)
    waiters += join(queues, 2)
    assert handed_over(queues, lease, clock)
    assert not waiters[2].woken, "the waiter before it has not taken its lease"
    queues.handover_completed(waiters[1])
    assert waiters[2].woken and not waiters[3].woken
    held = waiters[1].lease
    assert held is not None
    return waiters[2:], held


def test_the_first_behind_the_cohort_enters_before_the_release(queues: LocalQueues, clock: Clock) -> None:
    (first, second), lease = ahead(queues, clock)
    assert queues.may_enter_now(first, clock()) and not queues.may_enter_now(second, clock())
    queue = first.queue
    assert queue is not None and queues.by_entry == {queue.entry: queue}
    queue.note_queued(5.0, True, 0, clock(), clock())
    assert queue.recheck_time(first) == clock() + LEAST_MOMENT, "and not at the end of the lease that is held locally"
    assert queues.release(lease, clock()) == ReleaseRoute.SCRIPT
    assert not first.woken and queue.recheck_time(first) == clock() + LEAST_MOMENT, "its entry is in the server's queue"
    queues.on_grant_message(queue.entry)
    assert first.woken and not second.woken


def test_a_waiter_interrupted_while_it_is_granted_leaves_the_next_a_new_entry(
    queues: LocalQueues, clock: Clock
) -> None:
    """It has the lease, and the queue does not know yet: its token is given back, so nobody may hold by it."""
    first, second = join(queues, 2)
    queue = first.queue
    assert queue is not None and queues.may_enter_now(first, clock())
    lease = first.lease = Lease("name", b"name", queue.entry, clock() + MS / 1000)
    assert queues.dequeue(first, clock()) == (lease, None)
    assert second.woken and queue.entry != lease._raw_token and queues.may_enter_now(second, clock())
    lease = second.lease = Lease("name", b"name", queue.entry, clock() + MS / 1000)
    assert queues.dequeue(second, clock()) == (lease, None) and empty(queues)


def test_a_first_waiter_that_has_not_entered_is_woken_by_the_release(queues: LocalQueues, clock: Clock) -> None:
    (first, _), lease = ahead(queues, clock)
    first.woken = False  # it is on its way
    assert queues.release(lease, clock()) == ReleaseRoute.SCRIPT
    assert first.woken and queues.may_enter_now(first, clock())


def test_an_entry_made_ahead_goes_to_the_next_waiter_or_back(queues: LocalQueues, clock: Clock) -> None:
    (first, second), lease = ahead(queues, clock)
    assert queues.may_enter_now(first, clock())
    queue = first.queue
    assert queue is not None
    entry = queue.entry
    assert queues.dequeue(first, clock()) == (None, None)
    assert second.woken and queues.may_enter_now(second, clock()) and queue.entry == entry
    assert queues.dequeue(second, clock()) == (None, queues.address() + entry)
    assert queue.entry != entry and not queues.by_entry, "the next waiter has another entry"
    (late,) = join(queues, 1)
    assert late.woken and queues.may_enter_now(late, clock()), "though somebody holds"
    assert queues.release(lease, clock()) == ReleaseRoute.SCRIPT


def test_without_remote_waiters_nobody_enters_ahead(queues: LocalQueues, clock: Clock) -> None:
    waiters = join(queues, 2)
    assert handed_over(queues, grant(queues, waiters[0], clock), clock)
    (late,) = join(queues, 1)
    queues.handover_completed(waiters[1])
    assert not late.woken and not queues.may_enter_now(late, clock())


def test_without_remote_waiters_later_waiters_get_the_lease_too(queues: LocalQueues, clock: Clock) -> None:
    (waiter,) = join(queues, 1)
    lease = grant(queues, waiter, clock)
    for _ in range(20):
        (waiter,) = join(queues, 1)
        assert not waiter.woken and handed_over(queues, lease, clock)
        lease = taken(waiter)


def test_a_lease_circulates_for_local_seconds_only(queues: LocalQueues, clock: Clock) -> None:
    waiters = join(queues, 3)
    lease = grant(queues, waiters[0], clock)
    clock.go(LOCAL_SECONDS - 0.0002)
    assert handed_over(queues, lease, clock)
    lease = taken(waiters[1])
    clock.go(0.0002)
    assert queues.release(lease, clock()) == ReleaseRoute.SCRIPT and waiters[2].woken and waiters[2].lease is None


@pytest.mark.parametrize(
    ("part", "fits"), [(LEAST_LEASE_PART - 0.001, False), (LEAST_LEASE_PART, True), (1.0, True), (1.001, False)]
)
def test_a_lease_is_handed_over_only_if_it_lasts_as_long_as_wanted(
    queues: LocalQueues, clock: Clock, part: float, fits: bool
) -> None:
    """Nor if it lasts longer: a waiter that dies would keep the name from others for longer than it ever wanted it."""
    one, two = join(queues, 2)
    lease = grant(queues, one, clock)
    lease._deadline = clock() + part * 10 + (1e-6 if part < 1 else -1e-6)
    assert handed_over(queues, lease, clock) is fits
    assert two.woken and (two.lease is not None) is fits


@pytest.mark.parametrize(("had", "wanted", "fits"), [(0, 0, True), (0, MS, False), (MS, 0, False)])
def test_a_lease_without_end_goes_only_to_a_waiter_that_wants_one(
    queues: LocalQueues, clock: Clock, had: int, wanted: int, fits: bool
) -> None:
    (one,), (two,) = join(queues, 1, had), join(queues, 1, wanted)
    lease = grant(queues, one, clock)
    assert handed_over(queues, lease, clock) is fits
    if fits:
        assert taken(two)._deadline == math.inf


def test_an_expired_lease_is_not_handed_over(queues: LocalQueues, clock: Clock) -> None:
    for end in (ENDED, clock(), clock() - 1):
        one, two = join(queues, 2, ms=1)
        lease = grant(queues, one, clock)
        lease._deadline = end
        assert (
            queues.release(lease, clock()) == (ReleaseRoute.NOT_HELD if end == ENDED else ReleaseRoute.SCRIPT)
            and two.lease is None
        )
        assert end == ENDED or two.woken
        queues.expire(clock())
        assert two.woken, "whatever became of the lease"
        assert queues.dequeue(two, clock()) == (None, None) and empty(queues)


def test_releasing_an_expired_lease_leaves_its_successor_alone(queues: LocalQueues, clock: Clock) -> None:
    """Its holder releases it when the server has granted the name to the next waiter."""
    one, two, three = join(queues, 3)
    old = grant(queues, one, clock)
    clock.go(11)
    new = grant(queues, two, clock)
    assert queues.release(old, clock()) == ReleaseRoute.SCRIPT and not three.woken and three.queue.circulating is new
    assert handed_over(queues, new, clock) and three.lease is not None
    assert queues.release(old, clock()) == ReleaseRoute.DELETE, "nobody waits"


def test_the_next_waiter_is_woken_when_a_lease_expires(queues: LocalQueues, clock: Clock) -> None:
    one, two = join(queues, 2)
    grant(queues, one, clock)
    queues.expire(clock())
    assert not two.woken
    clock.go(10)
    queues.expire(clock())
    assert two.woken and queues.may_enter_now(two, clock())


def test_a_waiter_that_is_not_first_takes_no_notice_of_an_expired_lease(queues: LocalQueues, clock: Clock) -> None:
    """Otherwise nobody wakes the first waiter, which fell asleep behind others, without a time to wake."""
    one, two = join(queues, 2)
    grant(queues, one, clock)
    clock.go(10)
    (three,) = join(queues, 1)
    assert not queues.may_enter_now(three, clock())
    queues.expire(clock())
    assert two.woken and not three.woken and queues.may_enter_now(two, clock())


def test_an_expired_lease_leaves_no_queue(queues: LocalQueues, clock: Clock) -> None:
    """While there is a queue, no operation of the client takes the fast path."""
    for _ in range(2):
        (one,) = join(queues, 1)
        grant(queues, one, clock)
        queues.expire(clock())
        assert not empty(queues), "the name is held"
        clock.go(10)
        queues.expire(clock())
        assert empty(queues)
    one, two = join(queues, 2)
    grant(queues, one, clock)
    clock.go(10)
    assert queues.dequeue(two, clock()) == (None, None) and empty(queues)


def test_has_queue_checks_for_expired_leases_once_a_second(queues: LocalQueues, clock: Clock) -> None:
    """Where no task or thread waits, no other code checks for expired leases."""
    for key in (b"a", b"b"):
        grant(queues, joined(queues, "x", key, 500, False, None), clock)
    assert [queues.has_queue(key, clock()) for key in (b"a", b"b", b"c")] == [True, True, False]
    clock.go(0.6)
    assert queues.has_queue(b"a", clock()), "the last check was just now"
    clock.go(RECHECK_SECONDS)
    assert not queues.has_queue(b"a", clock()) and empty(queues)


# --------------------------------------------------------------------------------------------------------------- fences


def test_a_waiter_that_wants_a_fence_gets_no_lease_without(queues: LocalQueues, clock: Clock) -> None:
    one, two = join(queues, 1), join(queues, 1, fenced=True)
    lease = grant(queues, one[0], clock)
    assert queues.release(lease, clock()) == ReleaseRoute.SCRIPT and two[0].woken and two[0].lease is None
    assert grant(queues, two[0], clock, fence=5).fence == 5


def test_a_waiter_that_wants_a_fence_is_granted_by_the_server(queues: LocalQueues, clock: Clock) -> None:
    """And enters while another waiter of the client holds, which then hands over remotely, in one step."""
    one, two, three = join(queues, 3, fenced=True)
    lease = grant(queues, one, clock, fence=1)
    queues.handover_completed(one)
    assert two.woken and queues.may_enter_now(two, clock()) and not three.woken
    two.queue.note_queued(5.0, True, 0, clock(), clock())
    assert queues.release(lease, clock()) == ReleaseRoute.SCRIPT and two.lease is None
    lease = grant(queues, two, clock, fence=2)
    queues.handover_completed(two)
    assert three.woken and queues.may_enter_now(three, clock())


def test_a_lease_with_a_fence_is_handed_over_without_it(queues: LocalQueues, clock: Clock) -> None:
    (one,), (two,) = join(queues, 1, fenced=True), join(queues, 1)
    lease = grant(queues, one, clock, fence=1)
    assert handed_over(queues, lease, clock) and taken(two).fence is None


# -------------------------------------------------------------------------------------------------------------- leaving


def test_a_waiter_that_leaves_just_after_a_handover_hands_the_lease_on(queues: LocalQueues, clock: Clock) -> None:
    one, two, three = join(queues, 3)
    lease = grant(queues, one, clock, fence=1)
    assert handed_over(queues, lease, clock)
    assert queues.dequeue(two, clock()) == (None, None)
    assert two.lease is None and three.woken
    lease = taken(three)
    assert lease.valid and lease._raw_token
    queues.release(lease, clock())
    assert empty(queues)


def test_the_last_waiter_that_leaves_just_after_a_handover_gives_the_lease_back(
    queues: LocalQueues, clock: Clock
) -> None:
    one, two = join(queues, 2)
    lease = grant(queues, one, clock)
    assert handed_over(queues, lease, clock)
    handed = two.lease
    assert handed is not None and queues.dequeue(two, clock()) == (handed, None)
    assert two.lease is None and empty(queues)


def test_a_waiter_that_leaves_with_a_lease_that_must_not_circulate_gives_it_back(
    queues: LocalQueues, clock: Clock
) -> None:
    one, two, three = join(queues, 3)
    lease = grant(queues, one, clock)
    assert handed_over(queues, lease, clock)
    handed = two.lease
    clock.go(2 * LOCAL_SECONDS)
    assert queues.dequeue(two, clock()) == (handed, None) and three.woken and three.lease is None
    assert queues.may_enter_now(three, clock())


def test_the_next_waiter_inherits_the_entry_of_the_first(queues: LocalQueues, clock: Clock) -> None:
    one, two, three = join(queues, 3)
    queues.may_enter_now(one, clock())
    one.queue.note_queued(5.0, True, 0, clock(), clock())
    entry = one.queue.entry
    assert queues.dequeue(one, clock()) == (None, None)
    assert are_woken([two, three]) == [True, False] and two.queue.entry == entry and queues.may_enter_now(two, clock())
    assert queues.dequeue(three, clock()) == (None, None)
    assert queues.dequeue(two, clock()) == (None, queues.address() + entry) and empty(queues)


def test_a_waiter_that_is_not_first_leaves_nothing_to_undo(queues: LocalQueues, clock: Clock) -> None:
    one, two, three = join(queues, 3)
    queues.may_enter_now(one, clock())
    assert queues.dequeue(two, clock()) == (None, None) and not three.woken
    assert one.queue.first() is one and list(one.queue.waiters) == [one, three]


def test_an_entry_that_was_never_sent_is_not_left(queues: LocalQueues, clock: Clock) -> None:
    (waiter,) = join(queues, 1)
    assert queues.dequeue(waiter, clock()) == (None, None) and empty(queues)


def test_after_the_last_waiter_the_holder_keeps_the_queue(queues: LocalQueues, clock: Clock) -> None:
    """The next waiter then waits for the holder, and sends no request to the server."""
    one, two = join(queues, 2)
    lease = grant(queues, one, clock)
    assert queues.dequeue(two, clock()) == (None, None) and queues.by_key
    (three,) = join(queues, 1)
    assert not three.woken and handed_over(queues, lease, clock) and three.lease is not None


def test_leaving_twice_is_leaving_once(queues: LocalQueues, clock: Clock) -> None:
    one, two = join(queues, 2)
    queues.may_enter_now(one, clock())
    assert queues.dequeue(one, clock()) == queues.dequeue(one, clock()) == (None, None)
    entry = two.queue.entry
    assert queues.dequeue(two, clock()) == queues.dequeue(two, clock()) == (None, queues.address() + entry)


# ------------------------------------------------------------------------------------------------------- private queues


def test_a_waiter_with_an_entry_of_its_own_has_a_queue_of_its_own(queues: LocalQueues, clock: Clock) -> None:
    others = join(queues, 2)
    private = [joined(queues, "name", b"name", MS, False, entry) for entry in (GIVEN, b"another")]
    assert are_woken(private) == [True, True] and [waiter.queue.entry for waiter in private] == [GIVEN, b"another"]
    assert len({id(waiter.queue) for waiter in [*others, *private]}) == 3 and list(queues.by_key) == [b"name"]
    assert all(queues.may_enter_now(waiter, clock()) for waiter in private)
    lease = grant(queues, private[0], clock, remote_waiters=2)
    assert lease._raw_token == GIVEN and list(queues.by_entry) == [b"another"]
    assert queues.release(lease, clock()) == ReleaseRoute.SCRIPT and are_woken(others) == [True, False], (
        "others of the client wait as well"
    )
    assert others[0].lease is None, "a lease of a private queue is handed over to nobody"


def test_a_lease_of_a_private_queue_is_released_by_a_plain_delete(queues: LocalQueues, clock: Clock) -> None:
    private = joined(queues, "name", b"name", MS, False, GIVEN)
    lease = grant(queues, private, clock)
    assert empty(queues) and queues.release(lease, clock()) == ReleaseRoute.DELETE


def test_a_waiter_of_a_private_queue_leaves_its_entry(queues: LocalQueues, clock: Clock) -> None:
    private = joined(queues, "name", b"name", MS, False, GIVEN)
    queues.may_enter_now(private, clock())
    assert queues.dequeue(private, clock()) == (None, private.queue.address + GIVEN) and empty(queues)


def test_a_renewed_entry_is_another(queues: LocalQueues, clock: Clock) -> None:
    """Also that of a private queue: the undo of the old one may still be on its way."""
    private = joined(queues, "name", b"name", MS, False, GIVEN)
    queues.may_enter_now(private, clock())
    private.queue.new_entry()
    assert private.queue.entry != GIVEN and (private.queue.entry_sent, queues.by_entry) == (False, {})
    (shared,) = join(queues, 1)
    entry = shared.queue.entry
    queues.may_enter_now(shared, clock())
    shared.queue.new_entry()
    assert shared.queue.entry != entry and not shared.queue.entry_sent and queues.by_entry == {}


def test_a_name_without_waiters_is_released_by_a_plain_delete(queues: LocalQueues, clock: Clock) -> None:
    join(queues, 1)
    assert queues.release(Lease("x", b"x", GIVEN, math.inf), clock()) == ReleaseRoute.DELETE


def test_the_mutex_is_held_for_changes_and_free_when_a_waiter_is_woken(clock: Clock) -> None:
    class Mutex:
        held = entered = 0

        def __enter__(self) -> None:
            self.held += 1
            self.entered += 1

        def __exit__(self, *exc: object) -> None:
            self.held -= 1

    mutex: Any = Mutex()
    queues = LocalQueues(mutex)
    one, two, three = join(queues, 3)
    for waiter in (one, two, three):
        waiter.on_wake = lambda _: seen.append(mutex.held)
    seen: list[int] = []
    before = mutex.entered
    lease = grant(queues, one, clock)
    queues.release(lease, clock())
    queues.dequeue(two, clock())
    queues.release(taken(three), clock())
    queues.on_grant_message(b"x")
    queues.on_reconnect()
    queues.expire(clock())
    assert seen == [0, 0] and mutex.entered == before + 7 and mutex.held == 0


@pytest.mark.parametrize(
    "payload", [5, None, 1.5, True, [], [b"x"], {b"x": 1}, {1}, "x", ValueError("x")], ids=lambda each: repr(each)
)
def test_only_messages_on_this_clients_channel_wake(payload: Any, queues: LocalQueues, clock: Clock) -> None:
    (waiter,) = join(queues, 1)
    assert queues.may_enter_now(waiter, clock())
    entry = waiter.queue.entry
    for push in (
        [b"message", queues.channel, payload],
        [b"message", payload, entry],
        [payload, queues.channel, entry],
        [b"message", b"another", entry],
        [b"pmessage", queues.channel, queues.channel, entry],
        [b"message", queues.channel],
        [],
    ):
        queues.on_push(push)
        assert not waiter.woken, push
    queues.on_push([b"message", queues.channel, entry])
    assert waiter.woken


def test_a_release_within_a_release_wakes_both(queues: LocalQueues, clock: Clock) -> None:
    """A signal handler or a finalizer can release, in the middle of a release that wakes waiters."""
    woken: list[str] = []
    one, two, three = join(queues, 3, ms=int(RECHECK_SECONDS * 500))
    lease = grant(queues, one, clock)
    first, second = (joined(queues, "other", b"other", MS, False, None) for _ in range(2))
    other = grant(queues, first, clock)
    two.on_wake, second.on_wake = (lambda _: woken.append("two")), (lambda _: woken.append("second"))
    three.on_wake = lambda _: queues.release(other, clock())
    assert handed_over(queues, lease, clock)
    assert sorted(woken) == ["second", "two"] and two.woken and second.woken


def test_threads_that_come_and_go_hold_one_after_another(clock: Clock) -> None:
    """All at once, with the mutex that transports use: each gets the lease once, nobody at the same time as another."""
    queues, holders, order = LocalQueues(default.Mutex()), list[int](), list[int]()
    start, done = threading.Barrier(8), itertools.count()

    def work(number: int) -> None:
        start.wait(30)
        for _ in range(200):
            waiter = joined(queues, "name", b"name", 0, False, None)
            woken = threading.Event()
            while waiter.lease is None:
                waiter.on_wake = lambda _, woken=woken: woken.set()
                if queues.may_enter_now(waiter, clock()):
                    lease = Lease("name", b"name", waiter.queue.entry, math.inf)
                    with queues.mutex:
                        waiter.queue.note_granted(waiter, lease, 0, clock())
                    waiter.lease = lease
                    break
                assert woken.wait(30) or waiter.lease is not None
                woken.clear()
            holders.append(number)
            order.append(len(holders))
            holders.remove(number)
            next(done)
            queues.release(waiter.lease, clock())

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert next(done) == 8 * 200 and set(order) == {1} and empty(queues)


def test_handovers_in_quick_succession_are_rapid(queues: LocalQueues, clock: Clock) -> None:
    waiters = join(queues, 5)
    lease, queue = grant(queues, waiters[0], clock), waiters[1].queue
    found = []
    for waiter, held in zip(waiters[1:], (0.001, RAPID_SECONDS / 2, RAPID_SECONDS * 2, RAPID_SECONDS / 2), strict=True):
        clock.go(held)
        assert handed_over(queues, lease, clock) and queue.rapid == queues.rapid
        found.append(queues.rapid)
        lease = taken(waiter)
    assert found == [False, True, False, True]
