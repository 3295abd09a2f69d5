"""Concurrent extensions of one lease: the lease never claims more than the server may have granted last.

One after the other: test_operations.py. With failures between them: test_operations_model.py.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from support.run_steps import Clock, lease_of

from fastlock._protocol import extension
from fastlock._protocol.extension import Outcome
from fastlock._protocol.lease import ENDED
from fastlock._protocol.steps import Command

pytestmark = pytest.mark.usefixtures("impl")  # leases are compiled
SHORT, LONGER = 2_000, 60_000  # milliseconds


class Extension:
    """An extension that was sent and not answered yet."""

    def __init__(self, clock: Clock, lease: Any, ms: int) -> None:
        self.steps = extension.extend(lease, ms, True, clock)
        self.request = next(self.steps)
        self.request.sent = clock()

    def answer(self) -> bool:
        with pytest.raises(StopIteration) as end:
            self.steps.send(b"OK")
        return end.value.value is Outcome.MOVED

    def interrupt(self) -> None:
        with pytest.raises(KeyboardInterrupt):
            self.steps.throw(KeyboardInterrupt())


@pytest.mark.parametrize("lengths", [(SHORT, LONGER, LONGER), (LONGER, SHORT, LONGER), (LONGER, LONGER, SHORT)])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_of_concurrent_extensions_the_earliest_end_holds(clock: Clock, lengths: Any, order: Any) -> None:
    """For example a heartbeat beside the work, in threads: over two connections the server may execute either last."""
    lease, start = lease_of(clock, 10), clock()
    sent = [Extension(clock, lease, ms) for ms in lengths]
    for number in order:
        assert sent[number].answer() is True
        assert lease._deadline == start + SHORT / 1000
    alone = Extension(clock, lease, LONGER)
    assert alone.answer() is True and lease._deadline == start + LONGER / 1000, "the other extensions have ended"
    assert lease._extensions == 0


@pytest.mark.parametrize("first", [True, False], ids=["interrupted first", "answered first"])
def test_an_interrupted_extension_limits_the_other(clock: Clock, first: bool) -> None:
    """The interrupted extension may still be under way."""
    lease, start = lease_of(clock, 10), clock()
    short, longer = Extension(clock, lease, SHORT), Extension(clock, lease, LONGER)
    for each in (short.interrupt, longer.answer) if first else (longer.answer, short.interrupt):
        each()
        assert lease._deadline == start + SHORT / 1000
    assert lease._extensions == 0


@pytest.mark.parametrize("alone", [True, False])
def test_a_lease_released_as_the_answer_comes_stays_released(
    clock: Clock, alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread releases at the last moment: the next holder may hold by the same token."""
    lease, to = lease_of(clock, 10), extension.Move.to
    sent = [Extension(clock, lease, LONGER) for _ in range(1 if alone else 2)]

    def release(move: Any, end: float) -> None:
        lease._deadline = ENDED
        to(move, end)

    monkeypatch.setattr(extension.Move, "to", release)
    assert sent[0].answer() is False and (lease._deadline, lease.valid) == (ENDED, False)


@pytest.mark.parametrize("releasing", [True, False])
def test_a_missing_token_is_lost_unless_it_is_being_released(clock: Clock, releasing: bool) -> None:
    lease = lease_of(clock, 10)
    sent = Extension(clock, lease, LONGER)
    lease._releasing = releasing
    assert isinstance(sent.steps.send(None), Command), "the extension asks again, for a contended token"
    with pytest.raises(StopIteration) as end:
        sent.steps.send(0)
    assert end.value.value is (Outcome.GONE if releasing else Outcome.LOST)
    assert not lease.valid and (lease._deadline == ENDED) is not releasing


def test_extensions_of_two_leases_are_independent(clock: Clock) -> None:
    one, other, start = lease_of(clock, 10), lease_of(clock, 10), clock()
    sent = [Extension(clock, one, SHORT), Extension(clock, other, LONGER)]
    assert all(each.answer() for each in sent)
    assert (one._deadline, other._deadline) == (start + SHORT / 1000, start + LONGER / 1000)
