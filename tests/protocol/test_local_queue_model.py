"""The local queue in any order of events, against a model that knows the order of arrival and who holds.

There are never two holders, no waiter overtakes another, none is forgotten, and nothing is left when all are gone.
"""

from __future__ import annotations

import contextlib
import math

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.run_steps import Clock, joined

from fastlock._protocol.lease import ENDED, Lease
from fastlock._protocol.local_queue import RECHECK_SECONDS, LocalQueue, LocalQueues, ReleaseRoute
from fastlock._protocol.states import (
    QUEUE_TRANSITIONS,
    WAITER_TRANSITIONS,
    QueueState,
    WaiterState,
    queue_state,
    waiter_state,
)
from fastlock._protocol.waiters import Waiter

pytestmark = pytest.mark.usefixtures("impl")  # leases are compiled
MS = 10_000
# Transitions that the model makes never or seldom: each has a test of its own below
RARE = {(QueueState.QUEUED, QueueState.FAILED), (QueueState.QUEUED_EARLY, QueueState.CLOSED)}
TRANSITIONS: set[tuple[object, object]] = set()  # that were made, of queues and waiters


class LocalQueueMachine(RuleBasedStateMachine):
    """One server, one name, one process with waiters, and remote waiters; the model is a list and who holds."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.queues = LocalQueues(contextlib.nullcontext())
        self.waiting: list[Waiter] = []  # in order of arrival
        self.holder: Waiter | None = None
        self.lease: Lease | None = None
        self.late: list[Lease] = []  # that ran out before they were released
        self.handed_over: list[Waiter] = []  # to whom a lease was handed over, and whose callers have not run since
        self.returned: set[Waiter] = set()  # whose lease had expired when they did
        self.remote_waiters = 0
        self.known = False  # whether the server said that there are remote waiters
        self.taken = False  # by a remote waiter
        self.served: list[int] = []
        self.numbers: dict[Waiter, int] = {}
        self.handovers = math.inf  # local handovers that are left
        self.last_fence = 0
        self.queue_states: dict[LocalQueue, QueueState] = {}
        self.waiter_states: dict[Waiter, WaiterState] = {}

    @initialize(shared=st.integers(1, 3))
    def begin(self, shared: int) -> None:
        for _ in range(shared):
            self.arrive(MS, False)

    @invariant()
    def watch(self) -> None:
        """Note the transitions since the last call."""
        for waiter in self.numbers:
            if waiter.queue is not None:
                self.queue_states.setdefault(waiter.queue, QueueState.IDLE)
        for queue, before in self.queue_states.items():
            self.queue_states[queue] = after = queue_state(queue)
            TRANSITIONS.add((before, after))
        for waiter in self.numbers:
            before, after = self.waiter_states.get(waiter, WaiterState.NEW), waiter_state(waiter)
            self.waiter_states[waiter] = after
            TRANSITIONS.add((before, after))

    @rule(ms=st.sampled_from([MS, MS, MS, 1000, 0]), fenced=st.booleans())
    def arrive(self, ms: int, fenced: bool) -> None:
        waiter = joined(self.queues, "name", b"name", ms, fenced, None)
        self.numbers[waiter] = len(self.numbers)
        self.waiting.append(waiter)

    def now_holds(self, waiter: Waiter, lease: Lease) -> None:
        assert self.holder is None and not self.taken and not self.underway(), "two hold"
        self.holder, self.lease = waiter, lease
        if waiter not in self.returned:
            self.served.append(self.numbers[waiter])
        if waiter.fenced:
            assert lease.fence is not None and lease.fence > self.last_fence
            self.last_fence = lease.fence
        assert lease._deadline > self.clock() and (lease._deadline == math.inf) is (waiter.ms == 0)
        if waiter.ms:
            assert lease._deadline - self.clock() <= waiter.ms / 1000 + 1e-6

    def underway(self) -> bool:
        """Whether a valid lease was handed over to a waiter that has not run since."""
        return any(waiter.lease._deadline > self.clock() for waiter in self.handed_over if waiter.lease is not None)

    @precondition(lambda self: self.waiting)
    @rule(entry=st.integers(0, 5))
    def wake_up(self, entry: int) -> None:
        """A waiter wakes, for whatever reason, and may enter."""
        waiter = self.waiting[entry % len(self.waiting)]
        waiter.woken = False
        knows = waiter.queue.circulating is not None  # otherwise it enters, whoever holds
        if not self.queues.may_enter_now(waiter, self.clock()):
            return
        self.watch()
        busy = self.holder is not None or self.underway()
        assert waiter is self.waiting[0] and (
            not (busy and knows) or waiter.fenced or (self.known and self.handovers == 0)
        )
        if self.taken or busy:  # busy: it enters ahead
            assert waiter.queue.judge(waiter, [0, 5000, 1, 9], self.clock(), self.clock()) is None
            return
        granted = [1, self.remote_waiters, self.last_fence + 1 if waiter.fenced else 0]
        assert waiter.queue.judge(waiter, granted, self.clock(), self.clock()) is None
        self.watch()
        lease, waiter.lease = waiter.lease, None
        self.known = self.remote_waiters > 0
        assert waiter is self.waiting.pop(0), "somebody was overtaken"
        self.now_holds(waiter, lease)
        self.handovers = len(self.waiting) if self.remote_waiters else math.inf

    @precondition(lambda self: self.holder is not None)
    @rule()
    def release(self) -> None:
        lease, self.holder, self.lease = self.lease, None, None
        assert lease is not None
        what = self.queues.release(lease, self.clock())
        if what == ReleaseRoute.LOCAL:
            assert lease._deadline == ENDED
            self.first_is_handed(lease)
            return
        assert all(waiter.lease is None for waiter in self.waiting)
        assert what == (ReleaseRoute.SCRIPT if self.waiting or self.known else ReleaseRoute.DELETE)
        if self.remote_waiters:
            self.remote_waiters, self.taken = self.remote_waiters - 1, True
        elif self.waiting and self.waiting[0].queue.entry_sent:  # it entered ahead, and is first of all
            self.queues.on_grant_message(self.waiting[0].queue.entry)

    def first_is_handed(self, lease: Lease) -> None:
        first = self.waiting.pop(0)
        assert (
            first.woken and not first.fenced and first.lease is not None and first.lease._raw_token == lease._raw_token
        )
        self.handed_over.append(first)
        self.handovers -= 1

    @precondition(lambda self: self.handed_over)
    @rule(at=st.integers(0, 3), late=st.booleans())
    def resume(self, at: int, late: bool) -> None:
        """A waiter that was handed a lease runs at last: it has the lease, or is the first waiter again."""
        waiter = self.handed_over.pop(at % len(self.handed_over))
        assert waiter.lease is not None
        if late and waiter.ms:
            self.clock.time = max(self.clock.time, waiter.lease._deadline)
        over = waiter.lease._deadline <= self.clock()
        found = self.queues.take_back_expired(waiter, self.clock())
        assert (found is not None) is over
        if over:
            entered = self.waiting and self.waiting[0].queue.entry_sent
            self.waiting.insert(1 if entered else 0, waiter)
            self.returned.add(waiter)
            self.watch()
            return
        lease, waiter.lease = waiter.lease, None
        self.now_holds(waiter, lease)
        self.queues.handover_completed(waiter)
        first = self.waiting[0] if self.waiting else None
        # or its queue was forgotten meanwhile, or the first has entered already
        apart = first is None or first.queue is not waiter.queue or first.queue.entry_sent
        assert apart or first.woken or not (first.fenced or (self.known and not self.handovers))

    @precondition(lambda self: self.handed_over)
    @rule()
    def resume_to_leave(self) -> None:
        """A waiter leaves before it has seen that it was handed the lease."""
        gone = self.handed_over.pop()
        handed = gone.lease
        given_back, entry = self.queues.dequeue(gone, self.clock())
        assert gone.lease is None and entry is None and handed is not None
        if given_back is None:
            self.first_is_handed(handed)
        else:
            assert given_back is handed
            if self.remote_waiters and handed._deadline > self.clock():
                self.remote_waiters, self.taken = self.remote_waiters - 1, True
            elif self.waiting and self.waiting[0].queue.entry_sent:
                self.queues.on_grant_message(self.waiting[0].queue.entry)

    @precondition(lambda self: self.waiting)
    @rule(entry=st.integers(0, 5))
    def give_up(self, entry: int) -> None:
        gone = self.waiting.pop(entry % len(self.waiting))
        queue = gone.queue
        entered, knows = queue.entry_sent, queue.circulating is not None
        handed, entry_left = self.queues.dequeue(gone, self.clock())
        assert handed is None
        held = knows and (self.holder is not None or self.underway())
        assert (entry_left is not None) is (not self.waiting and entered)
        assert not held or entry_left is None or entry_left != queue.entry

    @precondition(lambda self: self.holder is not None and self.lease is not None and self.lease._deadline < math.inf)
    @rule(released=st.booleans())
    def expire(self, released: bool) -> None:
        """Time goes by until the lease expires; its holder releases it later, or never."""
        assert self.lease is not None
        self.clock.time = max(self.clock.time, self.lease._deadline)
        if released:
            self.late.append(self.lease)
        self.holder = self.lease = None
        self.sweep()

    def sweep(self) -> None:
        """Now and then queues are looked through; one without waiters is forgotten, and what it knew."""
        self.queues.expire(self.clock())
        if b"name" not in self.queues.by_key:
            self.known, self.handovers = False, math.inf

    @precondition(lambda self: self.late)
    @rule()
    def release_too_late(self) -> None:
        assert self.queues.release(self.late.pop(), self.clock()) != ReleaseRoute.LOCAL

    @rule(seconds=st.sampled_from([0.0001, 0.001, 0.02, 0.3, 11]))
    def wait(self, seconds: float) -> None:
        self.clock.go(seconds)
        if self.lease is not None and self.lease._deadline <= self.clock():
            self.holder = self.lease = None
        self.sweep()

    @precondition(lambda self: self.remote_waiters < 3)
    @rule()
    def come_elsewhere(self) -> None:
        self.remote_waiters += 1

    @precondition(lambda self: self.taken)
    @rule(heard=st.booleans())
    def free_elsewhere(self, heard: bool) -> None:
        self.taken = False
        if heard and self.waiting:
            self.queues.on_grant_message(self.waiting[0].queue.entry)

    @rule()
    def reconnect(self) -> None:
        self.queues.on_reconnect()

    @invariant()
    def order_is_that_of_arrival(self) -> None:
        queue = self.queues.by_key.get(b"name")
        assert (list(queue.waiters) if queue is not None else []) == self.waiting

    @invariant()
    def nobody_is_forgotten(self) -> None:
        if self.waiting and self.holder is None and not self.underway():
            first, now = self.waiting[0], self.clock()
            at = first.queue.recheck_time(first)
            assert first.woken or at <= now + RECHECK_SECONDS, "no waiter would ever enter"
            assert self.taken or first.woken or at <= now or first.queue.entry_sent

    @invariant()
    def nothing_is_left_when_all_are_gone(self) -> None:
        assert set(self.queues.by_entry.values()) <= set(self.queues.by_key.values())
        for entry, queue in self.queues.by_entry.items():
            assert queue.entry == entry
        if not self.waiting and self.holder is None and not self.handed_over:
            assert not self.queues.by_key and not self.queues.by_entry

    def teardown(self) -> None:
        while self.waiting or self.holder is not None or self.handed_over:
            self.give_up(0) if self.waiting else self.release() if self.holder is not None else self.resume_to_leave()
        assert not self.queues.by_key and not self.queues.by_entry
        assert self.served == sorted(self.served)


LocalQueueMachine.TestCase.settings = settings(
    max_examples=300,
    stateful_step_count=40,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def test_any_order_of_events() -> None:
    TRANSITIONS.clear()
    LocalQueueMachine.TestCase("runTest").runTest()
    made = {(before, after) for before, after in TRANSITIONS if before is not after}
    known = {*QUEUE_TRANSITIONS, *WAITER_TRANSITIONS}
    assert made <= known and known - made <= RARE, f"not in the tables {made - known}, never made {known - made}"


def test_a_queue_whose_server_stays_away_fails() -> None:
    queues, clock = LocalQueues(contextlib.nullcontext()), Clock()
    waiter = joined(queues, "name", b"name", MS, False, None)
    assert queues.may_enter_now(waiter, clock())
    queue = waiter.queue
    assert queue is not None and queue_state(queue) is QueueState.QUEUED
    queues.fail(queue, ConnectionError())
    assert queue_state(queue) is QueueState.FAILED and (QueueState.QUEUED, QueueState.FAILED) in QUEUE_TRANSITIONS


def test_a_queue_whose_lease_ended_closes_as_its_early_waiter_leaves() -> None:
    queues, clock = LocalQueues(contextlib.nullcontext()), Clock()
    first, fenced = (joined(queues, "name", b"name", MS, fenced, None) for fenced in (False, True))
    queue = first.queue
    assert queue is not None and queues.may_enter_now(first, clock())
    assert queue.judge(first, [1, 0, 0], clock(), clock()) is None
    assert queues.may_enter_now(fenced, clock()) and queue_state(queue) is QueueState.QUEUED_EARLY
    clock.go(MS / 1000)
    assert queues.dequeue(fenced, clock())[1] is not None and queue_state(queue) is QueueState.CLOSED


def test_a_queue_of_a_single_waiter_makes_transitions_of_the_table() -> None:
    """With an entry of its own (`fair=True`) a waiter shares its queue with no other, and the client does not list it
    by its key."""
    queues, clock = LocalQueues(contextlib.nullcontext()), Clock()
    for granted in (True, False):
        waiter = joined(queues, "name", b"name", MS, False, b"entry")
        queue = waiter.queue
        assert queue is not None
        states = [queue_state(queue)]
        assert queues.may_enter_now(waiter, clock())
        states.append(queue_state(queue))
        assert queue.judge(waiter, [1, 0, 1] if granted else [0, 5000, 1, 9], clock(), clock()) is None
        if not granted:
            queues.dequeue(waiter, clock())
        states.append(queue_state(queue))
        assert states == [QueueState.IDLE, QueueState.QUEUED, QueueState.CLOSED]
        assert not queues.by_entry and not queues.by_key
