"""Those who wait in one process, in any order of events, against a model that knows the order of arrival and who holds.

Never two hold; none overtakes another; nobody is forgotten; nothing is left when all are gone.
"""

from __future__ import annotations

import contextlib
import math

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.play import Clock, joined

from fastlock._gate import HAND_OVER, LOOK, PASSED, PLAIN, Gates, Waiter
from fastlock._lease import ENDED, Lease

pytestmark = pytest.mark.usefixtures("impl")  # leases are compiled
MS = 10_000


class Crowd(RuleBasedStateMachine):
    """One server, one name, one process of waiters and somebody elsewhere; the model is a list and who holds."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.gates = Gates(contextlib.nullcontext())
        self.waiting: list[Waiter] = []  # in order of arrival
        self.holder: Waiter | None = None
        self.lease: Lease | None = None
        self.late: list[Lease] = []  # that ran out before they were released
        self.passed: list[Waiter] = []  # to whom a lease passed, and whose callers have not run since
        self.returned: set[Waiter] = set()  # whose lease was over when they did
        self.elsewhere = 0  # others who wait for it
        self.known = False  # whether the server said so
        self.taken = False  # by one of them
        self.served: list[int] = []
        self.numbers: dict[Waiter, int] = {}
        self.passes = math.inf  # left of what goes round
        self.last_fence = 0

    @initialize(shared=st.integers(1, 3))
    def begin(self, shared: int) -> None:
        for _ in range(shared):
            self.arrive(MS, False)

    @rule(ms=st.sampled_from([MS, MS, MS, 1000, 0]), fenced=st.booleans())
    def arrive(self, ms: int, fenced: bool) -> None:
        waiter = joined(self.gates, "name", b"name", ms, fenced, None)
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
        assert lease.deadline > self.clock() and (lease.deadline == math.inf) is (waiter.ms == 0)
        if waiter.ms:
            assert lease.deadline - self.clock() <= waiter.ms / 1000 + 1e-6

    def underway(self) -> bool:
        """Whether a lease that is not over has passed to somebody who does not know it yet."""
        return any(waiter.lease.deadline > self.clock() for waiter in self.passed if waiter.lease is not None)

    @precondition(lambda self: self.waiting)
    @rule(place=st.integers(0, 5))
    def look(self, place: int) -> None:
        """Somebody wakes, for whatever reason, and may ask."""
        waiter = self.waiting[place % len(self.waiting)]
        waiter.called = False
        if not self.gates.ask(waiter, self.clock()):
            return
        busy = self.holder is not None or self.underway()
        assert waiter is self.waiting[0] and (not busy or waiter.fenced or (self.known and self.passes == 0))
        if self.taken or busy:  # or it asks ahead of its turn
            waiter.gate.queued(5.0, True, self.clock())
            return
        end = self.clock() + waiter.ms / 1000 if waiter.ms else math.inf
        fence = self.last_fence + 1 if waiter.fenced else None
        lease = Lease("name", b"name", waiter.gate.place, end, fence)
        waiter.gate.granted(waiter, lease, self.elsewhere, self.clock())
        self.known = self.elsewhere > 0
        assert waiter is self.waiting.pop(0), "somebody was overtaken"
        self.now_holds(waiter, lease)
        self.passes = len(self.waiting) if self.elsewhere else math.inf

    @precondition(lambda self: self.holder is not None)
    @rule()
    def release(self) -> None:
        lease, self.holder, self.lease = self.lease, None, None
        assert lease is not None
        what = self.gates.release(lease, self.clock())
        if what == PASSED:
            assert lease.deadline == ENDED
            self.passes_to_the_first(lease)
            return
        assert all(waiter.lease is None for waiter in self.waiting)
        assert what == (HAND_OVER if self.waiting or self.known else PLAIN)
        if self.elsewhere:
            self.elsewhere, self.taken = self.elsewhere - 1, True
        elif self.waiting and self.waiting[0].gate.asked:  # it asked ahead, and is first of all
            self.gates.hear(self.waiting[0].gate.place)

    def passes_to_the_first(self, lease: Lease) -> None:
        first = self.waiting.pop(0)
        assert first.called and not first.fenced and first.lease is not None and first.lease.proof == lease.proof
        self.passed.append(first)
        self.passes -= 1

    @precondition(lambda self: self.passed)
    @rule(at=st.integers(0, 3))
    def resume(self, at: int) -> None:
        """One to whom a lease passed runs at last: it has the lease, or is the first of those who wait."""
        waiter = self.passed.pop(at % len(self.passed))
        assert waiter.lease is not None
        over = waiter.lease.deadline <= self.clock()
        found = self.gates.returned(waiter, self.clock())
        assert (found is not None) is over
        if over:
            asks = self.waiting and self.waiting[0].gate.asked
            self.waiting.insert(1 if asks else 0, waiter)
            self.returned.add(waiter)
            return
        lease, waiter.lease = waiter.lease, None
        self.now_holds(waiter, lease)
        self.gates.taken(waiter)
        first = self.waiting[0] if self.waiting else None
        assert first is None or first.called or not (first.fenced or (self.known and not self.passes))

    @precondition(lambda self: self.passed)
    @rule()
    def resume_to_leave(self) -> None:
        """It goes before it has seen that it was handed the lease."""
        gone = self.passed.pop()
        handed = gone.lease
        given_back, place = self.gates.leave(gone, self.clock())
        assert gone.lease is None and place is None and handed is not None
        if given_back is None:
            self.passes_to_the_first(handed)
        else:
            assert given_back is handed
            if self.elsewhere and handed.deadline > self.clock():
                self.elsewhere, self.taken = self.elsewhere - 1, True
            elif self.waiting and self.waiting[0].gate.asked:
                self.gates.hear(self.waiting[0].gate.place)

    @precondition(lambda self: self.waiting)
    @rule(place=st.integers(0, 5))
    def leave(self, place: int) -> None:
        gone = self.waiting.pop(place % len(self.waiting))
        gate = gone.gate
        asked = gate.asked
        handed, place_left = self.gates.leave(gone, self.clock())
        assert handed is None
        held = self.holder is not None or self.underway()
        assert (place_left is not None) is (not self.waiting and asked)
        assert not held or place_left is None or place_left != gate.place

    @precondition(lambda self: self.holder is not None and self.lease is not None and self.lease.deadline < math.inf)
    @rule(released=st.booleans())
    def run_out(self, released: bool) -> None:
        """Time goes by until the lease is over; its holder lets go of it later, or never."""
        assert self.lease is not None
        self.clock.time = max(self.clock.time, self.lease.deadline)
        if released:
            self.late.append(self.lease)
        self.holder = self.lease = None
        self.gates.lapsed(self.clock())

    @precondition(lambda self: self.late)
    @rule()
    def release_too_late(self) -> None:
        assert self.gates.release(self.late.pop(), self.clock()) != PASSED

    @rule(seconds=st.sampled_from([0.0001, 0.001, 0.02, 0.3, 11]))
    def wait(self, seconds: float) -> None:
        self.clock.go(seconds)
        if self.lease is not None and self.lease.deadline <= self.clock():
            self.holder = self.lease = None
        self.gates.lapsed(self.clock())

    @precondition(lambda self: self.elsewhere < 3)
    @rule()
    def come_elsewhere(self) -> None:
        self.elsewhere += 1

    @precondition(lambda self: self.taken)
    @rule(heard=st.booleans())
    def free_elsewhere(self, heard: bool) -> None:
        self.taken = False
        if heard and self.waiting:
            self.gates.hear(self.waiting[0].gate.place)

    @rule()
    def reconnect(self) -> None:
        self.gates.reconnected()

    @invariant()
    def order_is_that_of_arrival(self) -> None:
        gate = self.gates.by_key.get(b"name")
        assert (list(gate.waiters) if gate is not None else []) == self.waiting

    @invariant()
    def nobody_is_forgotten(self) -> None:
        if self.waiting and self.holder is None and not self.underway():
            first, now = self.waiting[0], self.clock()
            at = first.gate.wake_at(first)
            assert first.called or at <= now + LOOK, "nobody would ever look"
            assert self.taken or first.called or at <= now or first.gate.asked

    @invariant()
    def nothing_is_left_when_all_are_gone(self) -> None:
        assert set(self.gates.by_place.values()) <= set(self.gates.by_key.values())
        for place, gate in self.gates.by_place.items():
            assert gate.place == place
        if not self.waiting and self.holder is None and not self.passed:
            assert not self.gates.by_key and not self.gates.by_place

    def teardown(self) -> None:
        while self.waiting or self.holder is not None or self.passed:
            self.leave(0) if self.waiting else self.release() if self.holder is not None else self.resume_to_leave()
        assert not self.gates.by_key and not self.gates.by_place
        assert self.served == sorted(self.served)


Crowd.TestCase.settings = settings(
    max_examples=300,
    stateful_step_count=40,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def test_any_order_of_events() -> None:
    Crowd.TestCase("runTest").runTest()
