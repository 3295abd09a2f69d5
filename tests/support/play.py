"""Operations of the law played by hand: a clock that a test turns, canned answers, and a record of every step.

No I/O and no waiting: a Sleep moves the clock, so does a Wait, unless its waiter was called; an Ask gets the next
answer, what remains is what the law made of it. Who waits does so at the gates of the play, among others if need be.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import hiredis

from fastlock import _errors as errors
from fastlock import _law as law
from fastlock import _steps
from fastlock._gate import LOOK, Gates, Waiter
from fastlock._lease import Lease

MINE, OTHER = b"fl:" + b"m" * 32, b"fl:" + b"o" * 32
MARKED = b"fl+" + b"m" * 32  # the caller's, and somebody waits
GIVEN = b"g" * 35  # no token of ours: nobody can mark it


class Clock:
    """Seconds that pass only when they are told to."""

    def __init__(self, start: float = 1000.0) -> None:
        self.time = start

    def __call__(self) -> float:
        return self.time

    def go(self, seconds: float) -> None:
        self.time += seconds


class Connection:
    """As much of one as the law looks at."""

    patience = 5.0
    session = None

    def refused(self, ask: Any, error: Exception) -> None:
        """People would be told."""


CONNECTION = Connection()


@dataclass
class Raise:
    """An answer: the caller goes away (cancelled, interrupted) while the step is under way."""

    error: BaseException


@dataclass
class After:
    """An answer that comes `seconds` later."""

    seconds: float
    answer: Any


def lost(*, sent: bool = True, final: bool = False, session: Any = None, patience: float = 5.0) -> _steps.Lost:
    """The connection broke."""
    return _steps.Lost(errors.made(errors.ConnectionError("gone")), patience, sent=sent, final=final, session=session)


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
    gates: Gates = field(default_factory=lambda: Gates(contextlib.nullcontext()))

    def of(self, kind: type) -> list[Any]:
        return [step for step in self.steps if isinstance(step, kind)]

    @property
    def asks(self) -> list[Any]:
        return self.of(_steps.Ask)

    @property
    def undos(self) -> list[_steps.Undo]:
        """Those that undo something; without names they only end broken sessions."""
        return [undo for undo in self.of(_steps.Undo) if undo.names]

    @property
    def leaves(self) -> list[tuple[bytes, ...]]:
        """What left the server's queue."""
        return [step.call for step in self.of(_steps.Leave)]

    @property
    def sleeps(self) -> list[float]:
        return [step.seconds for step in self.of(_steps.Sleep)]

    @property
    def kinds(self) -> list[type]:
        return [type(step) for step in self.steps]


class Wakes:
    """An answer to a Wait: something happens after so many seconds, before it would have ended by itself."""

    def __init__(self, seconds: float, happens: Callable[[], object]) -> None:
        self.seconds = seconds
        self.happens = happens


def play(clock: Clock, operation: Any, *answers: Any, gates: Gates | None = None) -> Played:
    """Carry out an operation (an Acquire, a Release, or a generator) with these answers to what it asks, in order.

    An answer may be Raise, After, or a function of the Ask; a Wait takes none but Raise and Wakes; `...` repeats the
    one before for ever. AssertionError: it asks more, or less, than there are answers. gates: those of the client.
    """
    played, left = Played(), deque(answers)
    played.gates = gates or played.gates
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
    if isinstance(operation, _steps.Ask):
        answer = operation.local(played.gates, clock())  # type: ignore[attr-defined]
        answer = _answer(clock, operation, left, played) if answer is None else answer
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


def _wait(clock: Clock, step: Any, left: deque[Any]) -> Any:
    """As the wires do: until the waiter is called, or it is time."""
    waiter = step.waiter
    if left and isinstance(left[0], Raise):
        return left.popleft()
    at = min(waiter.gate.wake_at(waiter), math.inf if step.until is None else step.until)
    if left and isinstance(left[0], Wakes) and not waiter.called:
        wakes = left.popleft()
        assert clock() + wakes.seconds <= at, f"it looked before, at {at}"
        clock.go(wakes.seconds)
        wakes.happens()
    elif not waiter.called:
        clock.time = max(clock.time, min(at, clock() + LOOK))
    waiter.called = False
    return None


def _answer(clock: Clock, step: Any, left: deque[Any], played: Played) -> Any:
    played.steps.append(step)
    if isinstance(step, _steps.Sleep):
        assert step.seconds >= 0
        if left and isinstance(left[0], Raise):
            return left.popleft()
        clock.go(step.seconds)
        return None
    if isinstance(step, _steps.Wait):
        return _wait(clock, step, left)
    if isinstance(step, _steps.Join):
        return played.gates.join(step.waiter)
    if isinstance(step, _steps.Undo):
        return None
    if isinstance(step, _steps.Distrust):
        return _steps.Lost(
            errors.made(errors.InvalidResponse("makes no sense")), 5.0, sent=True, session="distrusted", own=True
        )
    assert left, f"asked once too often: {vars(step) if hasattr(step, '__dict__') else step}"
    if isinstance(step, _steps.Ask):
        step.sent, step.link = clock(), CONNECTION
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


def acquire(ms: int = 10_000, **terms: Any) -> law.Acquire:
    op = law.Acquire("name", b"name", MINE, ms, terms.pop("fenced", False))
    for name, value in terms.items():
        setattr(op, name, value)
    return op


def lease_of(clock: Clock, seconds: float = 10.0, key: bytes = b"name", token: bytes = MINE) -> Lease:
    return Lease("name", key, token, clock() + seconds)


def joined(
    gates: Gates, name: object, key: bytes, ms: int, fenced: bool, place: bytes | None, sleep: float = 0.1
) -> Waiter:
    """Somebody who waits there from now on."""
    waiter = Waiter(name, key, ms, fenced, place, sleep)
    gates.join(waiter)
    return waiter


def undone(undo: _steps.Undo) -> tuple[list[bytes], list[bytes]]:
    return undo.names, undo.tokens


def verbs(played: Played) -> list[int]:
    return [ask.verb for ask in played.asks]
