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
from fastlock._protocol import steps
from fastlock._protocol.acquire import Acquire
from fastlock._protocol.lease import Lease
from fastlock._protocol.local_queue import RECHECK_SECONDS, LocalQueues, Waiter
from fastlock._protocol.steps import Command

MINE, OTHER = b"fl:" + b"m" * 32, b"fl:" + b"o" * 32
CONTENDED = b"fl+" + b"m" * 32  # the caller's, and somebody waits
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

    reply_timeout = 5.0
    session = None

    def undo_refused(self, ask: Any, error: Exception) -> None:
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


def lost(
    *, sent: bool = True, final: bool = False, session: Any = None, retry_for: float = 5.0
) -> steps.ConnectionLost:
    """The connection broke."""
    return steps.ConnectionLost(
        errors.as_own(errors.ConnectionError("gone")), retry_for, sent=sent, final=final, session=session
    )


def error(text: str) -> Exception:
    """An error reply, as hiredis gives it."""
    return hiredis.ReplyError(text)


@dataclass
class Ran:
    """What came of an operation."""

    outcome: Any = None
    raised: BaseException | None = None
    steps: list[Any] = field(default_factory=list)
    stales: list[tuple[Any, ...]] = field(default_factory=list)  # of each Ask, when it was asked
    queues: LocalQueues = field(default_factory=lambda: LocalQueues(contextlib.nullcontext()))

    def of(self, kind: type) -> list[Any]:
        return [step for step in self.steps if isinstance(step, kind)]

    @property
    def asks(self) -> list[Any]:
        return self.of(steps.Command)

    @property
    def undos(self) -> list[steps.Undo]:
        """Those that undo something; without names they only end broken sessions."""
        return [undo for undo in self.of(steps.Undo) if undo.names]

    @property
    def leaves(self) -> list[tuple[bytes, ...]]:
        """What left the server's queue."""
        return [step.call for step in self.of(steps.Dequeue)]

    @property
    def sleeps(self) -> list[float]:
        return [step.seconds for step in self.of(steps.Sleep)]

    @property
    def kinds(self) -> list[type]:
        return [type(step) for step in self.steps]


class Wakes:
    """An answer to a Wait: something happens after so many seconds, before it would have ended by itself."""

    def __init__(self, seconds: float, happens: Callable[[], object]) -> None:
        self.seconds = seconds
        self.happens = happens


def run_steps(clock: Clock, operation: Any, *answers: Any, queues: LocalQueues | None = None) -> Ran:
    """Carry out an operation (an Acquire, a Release, or a generator) with these answers to what it asks, in order.

    An answer may be Raise, After, or a function of the Ask; a Wait takes none but Raise and Wakes; `...` repeats the
    one before for ever. AssertionError: it asks more, or less, than there are answers. gates: those of the client.
    """
    played, left = Ran(), deque(answers)
    played.queues = queues or played.queues
    try:
        played.outcome = _drive(clock, operation, left, played)
    except AssertionError:
        raise
    except BaseException as problem:
        played.raised = problem
    assert not left or ... in left, f"nobody asked for {list(left)}; raised {played.raised!r}"
    return played


def _drive(clock: Clock, operation: Any, left: deque[Any], played: Ran) -> Any:
    answer: Any = None
    if isinstance(operation, Command):
        answer = operation.local(played.queues, clock())  # type: ignore[attr-defined]
        answer = _answer(clock, operation, left, played) if answer is None else answer
        if isinstance(answer, Raise):
            raise answer.error
        rest: Any = operation.rest(answer, clock)  # type: ignore[attr-defined]
        answer = None
    else:
        rest = operation
    while True:
        try:
            step = rest.send(answer)
        except StopIteration as end:
            return end.value
        answer = _answer(clock, step, left, played)
        if isinstance(answer, Raise):
            undo = rest.throw(answer.error)  # raises it again, after what it leaves to be undone
            while True:
                played.steps.append(undo)
                undo = rest.send(None)


def _wait(clock: Clock, step: Any, left: deque[Any]) -> Any:
    """As the wires do: until the waiter is called, or it is time."""
    waiter = step.waiter
    if left and isinstance(left[0], Raise):
        return left.popleft()
    at = min(waiter.queue.recheck_time(waiter), math.inf if step.until is None else step.until)
    if left and isinstance(left[0], Wakes) and not waiter.woken:
        wakes = left.popleft()
        assert clock() + wakes.seconds <= at, f"it looked before, at {at}"
        clock.go(wakes.seconds)
        wakes.happens()
    elif not waiter.woken:
        clock.time = max(clock.time, min(at, clock() + RECHECK_SECONDS))
    waiter.woken = False
    return None


def _answer(clock: Clock, step: Any, left: deque[Any], played: Ran) -> Any:
    played.steps.append(step)
    if isinstance(step, steps.Sleep):
        assert step.seconds >= 0
        if left and isinstance(left[0], Raise):
            return left.popleft()
        clock.go(step.seconds)
        return None
    if isinstance(step, steps.Wait):
        return _wait(clock, step, left)
    if isinstance(step, steps.Enqueue):
        return played.queues.enqueue(step.waiter)
    if isinstance(step, steps.Undo):
        return None
    if isinstance(step, steps.ProtocolViolation):
        return steps.ConnectionLost(
            errors.as_own(errors.InvalidResponse("makes no sense")), 5.0, sent=True, session="distrusted", own=True
        )
    assert left, f"asked once too often: {vars(step) if hasattr(step, '__dict__') else step}"
    if isinstance(step, steps.Command):
        step.sent, step.connection = clock(), CONNECTION
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


def acquire(ms: int = 10_000, **terms: Any) -> Acquire:
    op = Acquire("name", b"name", MINE, ms, terms.pop("fenced", False))
    for name, value in terms.items():
        setattr(op, name, value)
    return op


def lease_of(clock: Clock, seconds: float = 10.0, key: bytes = b"name", token: bytes = MINE) -> Lease:
    return Lease("name", key, token, clock() + seconds)


def joined(
    queues: LocalQueues, name: object, key: bytes, ms: int, fenced: bool, entry: bytes | None, sleep: float = 0.1
) -> Waiter:
    """Somebody who waits there from now on."""
    waiter = Waiter(name, key, ms, fenced, entry, sleep)
    queues.enqueue(waiter)
    return waiter


def undone(undo: steps.Undo) -> tuple[list[bytes], list[bytes]]:
    return undo.names, undo.tokens


def opcodes(played: Ran) -> list[int]:
    return [ask.opcode for ask in played.asks]
