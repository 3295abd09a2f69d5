"""Extensions of one lease, several at once: it never claims more than the server may have granted last.

One after the other: test_law.py. With whatever goes wrong between: test_law_model.py.
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
    """One that was sent and not answered yet."""

    def __init__(self, clock: Clock, lease: Any, ms: int) -> None:
        self.steps = extension.extend(lease, ms, True, clock)
        self.ask = next(self.steps)
        self.ask.sent = clock()

    def answer(self) -> bool:
        with pytest.raises(StopIteration) as end:
            self.steps.send(b"OK")
        return end.value.value is Outcome.MOVED

    def strike(self) -> None:
        with pytest.raises(KeyboardInterrupt):
            self.steps.throw(KeyboardInterrupt())


@pytest.mark.parametrize("lengths", [(SHORT, LONGER, LONGER), (LONGER, SHORT, LONGER), (LONGER, LONGER, SHORT)])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_of_several_at_once_the_earliest_end_holds(clock: Clock, lengths: Any, order: Any) -> None:
    """As of a heartbeat beside the work, in threads: over two connections the server may carry out either last."""
    lease, start = lease_of(clock, 10), clock()
    sent = [Extension(clock, lease, ms) for ms in lengths]
    for number in order:
        assert sent[number].answer() is True
        assert lease._deadline == start + SHORT / 1000
    alone = Extension(clock, lease, LONGER)
    assert alone.answer() is True and lease._deadline == start + LONGER / 1000, "the others are over"
    assert extension._UNDER_WAY == []


@pytest.mark.parametrize("first", [True, False], ids=["struck first", "answered first"])
def test_one_that_is_struck_holds_the_other_back(clock: Clock, first: bool) -> None:
    """It may still be under way."""
    lease, start = lease_of(clock, 10), clock()
    short, longer = Extension(clock, lease, SHORT), Extension(clock, lease, LONGER)
    for each in (short.strike, longer.answer) if first else (longer.answer, short.strike):
        each()
        assert lease._deadline == start + SHORT / 1000
    assert extension._UNDER_WAY == []


@pytest.mark.parametrize("alone", [True, False])
def test_what_is_let_go_of_as_the_answer_comes_stays_so(
    clock: Clock, alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another thread, at the last moment: who has the name next may hold it by the same token."""
    lease, to = lease_of(clock, 10), extension._Extension.to
    sent = [Extension(clock, lease, LONGER) for _ in range(1 if alone else 2)]

    def let_go(move: Any, end: float) -> None:
        lease._deadline = ENDED
        to(move, end)

    monkeypatch.setattr(extension._Extension, "to", let_go)
    assert sent[0].answer() is False and (lease._deadline, lease.valid) == (ENDED, False)


@pytest.mark.parametrize("releasing", [True, False])
def test_what_the_server_knows_no_more_is_lost_unless_it_is_being_released(clock: Clock, releasing: bool) -> None:
    lease = lease_of(clock, 10)
    sent = Extension(clock, lease, LONGER)
    lease._releasing = releasing
    assert isinstance(sent.steps.send(None), Command), "whether somebody waits"
    with pytest.raises(StopIteration) as end:
        sent.steps.send(0)
    assert end.value.value is (Outcome.GONE if releasing else Outcome.LOST)
    assert not lease.valid and (lease._deadline == ENDED) is not releasing


def test_those_of_two_leases_are_each_alone(clock: Clock) -> None:
    one, other, start = lease_of(clock, 10), lease_of(clock, 10), clock()
    sent = [Extension(clock, one, SHORT), Extension(clock, other, LONGER)]
    assert all(each.answer() for each in sent)
    assert (one._deadline, other._deadline) == (start + SHORT / 1000, start + LONGER / 1000)
