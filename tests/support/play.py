"""Operations of the law played by hand: a clock that a test turns, canned answers, and a record of every step.

No I/O and no waiting: a Sleep moves the clock, an Ask gets the next answer, what remains is what the law made of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import hiredis

from fastlock import _errors as errors
from fastlock import _law as law


class Clock:
    """Seconds that pass only when they are told to."""

    def __init__(self, start: float = 1000.0) -> None:
        self.time = start

    def __call__(self) -> float:
        return self.time

    def go(self, seconds: float) -> None:
        self.time += seconds


@dataclass
class Raise:
    """An answer: the caller goes away (cancelled, interrupted) while the step is under way."""

    error: BaseException


@dataclass
class After:
    """An answer that comes `seconds` later."""

    seconds: float
    answer: Any


def lost(*, sent: bool = True, final: bool = False, session: Any = None, patience: float = 5.0) -> law.Lost:
    """The connection broke."""
    return law.Lost(errors.ConnectionError("gone"), patience, sent=sent, final=final, session=session)


def error(text: str) -> Exception:
    """An error reply, as hiredis gives it."""
    return hiredis.ReplyError(text)


@dataclass
class Played:
    """What came of an operation."""

    outcome: Any = None
    raised: BaseException | None = None
    steps: list[Any] = field(default_factory=list)
    stales: list[tuple[Any, ...]] = field(default_factory=list)  # of each Ask, when it was asked

    def of(self, kind: type) -> list[Any]:
        return [step for step in self.steps if isinstance(step, kind)]

    @property
    def asks(self) -> list[Any]:
        return self.of(law.Ask)

    @property
    def undos(self) -> list[law.Undo]:
        """Those that undo something; without names they only end broken sessions."""
        return [undo for undo in self.of(law.Undo) if undo.names]

    @property
    def sleeps(self) -> list[float]:
        return [step.seconds for step in self.of(law.Sleep)]


def play(clock: Clock, operation: Any, *answers: Any) -> Played:
    """Carry out an operation (an Acquire, a Release, or a generator) with these answers to what it asks, in order.

    An answer may be Raise, After, or a function of the Ask; `...` repeats the one before for ever. AssertionError: it
    asks more, or less, than there are answers.
    """
    played, left = Played(), deque(answers)
    try:
        played.outcome = _drive(clock, operation, left, played)
    except AssertionError:
        raise
    except BaseException as problem:
        played.raised = problem
    assert not left or ... in left, f"nobody asked for {list(left)}; raised {played.raised!r}"
    return played


def _drive(clock: Clock, operation: Any, left: deque[Any], played: Played) -> Any:
    answer: Any = None
    if isinstance(operation, law.Ask):
        answer = _answer(clock, operation, left, played)
        if isinstance(answer, Raise):
            raise answer.error
        steps: Any = operation.rest(answer, clock)  # type: ignore[attr-defined]
        answer = None
    else:
        steps = operation
    while True:
        try:
            step = steps.send(answer)
        except StopIteration as end:
            return end.value
        answer = _answer(clock, step, left, played)
        if isinstance(answer, Raise):
            undo = steps.throw(answer.error)  # raises it again, after what it leaves to be undone
            while True:
                played.steps.append(undo)
                undo = steps.send(None)


def _answer(clock: Clock, step: Any, left: deque[Any], played: Played) -> Any:
    played.steps.append(step)
    if isinstance(step, law.Sleep):
        assert step.seconds >= 0
        if left and isinstance(left[0], Raise):
            return left.popleft()
        clock.go(step.seconds)
        return None
    if isinstance(step, law.Undo):
        return None
    if isinstance(step, law.Distrust):
        return law.Lost(errors.InvalidResponse("makes no sense"), 5.0, sent=True, session="distrusted")
    assert left, f"asked once too often: {vars(step) if hasattr(step, '__dict__') else step}"
    if isinstance(step, law.Ask):
        step.sent = clock()
        played.stales.append(step.stale)
    answer = left.popleft()
    if left and left[0] is ...:
        left.appendleft(answer)
    if isinstance(answer, Callable):  # type: ignore[arg-type]
        answer = answer(step)
    if isinstance(answer, After):
        clock.go(answer.seconds)
        answer = answer.answer
    return answer
