"""Protocol operations run by hand: a clock that a test sets, canned answers, and a record of every step.

No I/O and no waiting: a Sleep moves the clock, as does a Wait whose waiter was not woken; a Request gets the next
answer. Everything else is what the protocol makes of it. Waiters wait in the local queues of the run, which a test may
share between runs.
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
from fastlock._protocol import commands, steps
from fastlock._protocol.acquire import Acquire
from fastlock._protocol.lease import Lease
from fastlock._protocol.local_queue import RECHECK_SECONDS, LocalQueues
from fastlock._protocol.undo import ScriptUndo, Undo
from fastlock._protocol.waiters import Waiter

MINE, OTHER = b"fl:" + b"m" * 32, b"fl:" + b"o" * 32
CONTENDED = b"fl+" + b"m" * 32  # the caller's token, marked as contended
GIVEN = b"g" * 35  # a token that the caller chose: nobody can mark it as contended


class Clock:
    """Seconds that pass only when a test says so."""

    def __init__(self, start: float = 1000.0) -> None:
        self.time = start

    def __call__(self) -> float:
        return self.time

    def go(self, seconds: float) -> None:
        self.time += seconds


class Connection:
    """The part of a connection that the protocol uses."""

    reply_timeout = 5.0
    session = None

    def warn_refused(self, purpose: Any, error: Exception) -> None:
        """Do nothing: a real connection warns."""


CONNECTION = Connection()


@dataclass
class Raise:
    """An answer: the caller is cancelled or interrupted while the step is under way."""

    error: BaseException


@dataclass
class After:
    """An answer that comes `seconds` later."""

    seconds: float
    answer: Any


def lost(
    *, sent: bool = True, final: bool = False, session: Any = None, retry_for: float = 5.0
) -> steps.ConnectionLost:
    """The answer of a connection that broke."""
    return steps.ConnectionLost(
        errors.as_own(errors.ConnectionError("gone")), retry_for, sent=sent, final=final, session=session
    )


def error(text: str) -> Exception:
    """An error reply, as hiredis gives it."""
    return hiredis.ReplyError(text)


NATIVE = frozenset({commands.DELIFEQ, commands.SET_NX_GET})


@dataclass
class Ran:
    """The outcome of an operation."""

    outcome: Any = None
    raised: BaseException | None = None
    steps: list[Any] = field(default_factory=list)
    stales: list[tuple[Any, ...]] = field(default_factory=list)  # of each Request, when it was sent
    queues: LocalQueues = field(default_factory=lambda: LocalQueues(contextlib.nullcontext()))
    capabilities: frozenset[str] = NATIVE  # of the server
    scripts: list[Any] = field(default_factory=list)  # those in which batches were sent

    def of(self, kind: type) -> list[Any]:
        return [step for step in self.steps if isinstance(step, kind)]

    @property
    def requests(self) -> list[Any]:
        return self.of(steps.Request)

    @property
    def undos(self) -> list[Undo]:
        """The undos with names; an undo without names only ends broken sessions."""
        return [undo for undo in self.of(Undo) if undo.names]

    @property
    def leaves(self) -> list[tuple[bytes, ...]]:
        """The commands that removed an entry from the server's queue."""
        return [step.call for step in self.of(ScriptUndo)]

    @property
    def sleeps(self) -> list[float]:
        return [step.seconds for step in self.of(steps.Sleep)]

    @property
    def kinds(self) -> list[type]:
        return [type(step) for step in self.steps]


class Wakes:
    """An answer to a Wait: something happens after so many seconds, before the wait would have ended by itself."""

    def __init__(self, seconds: float, happens: Callable[[], object]) -> None:
        self.seconds = seconds
        self.happens = happens


def run_steps(
    clock: Clock,
    operation: Any,
    *answers: Any,
    queues: LocalQueues | None = None,
    capabilities: frozenset[str] = NATIVE,
) -> Ran:
    """Carry out an operation (an Acquire, a Release, or a generator) with these answers to its requests, in order.

    An answer may be Raise, After, or a function of the Request; a Wait takes none but Raise and Wakes; `...` repeats
    the answer before it for ever. AssertionError: it sends more commands, or fewer, than there are answers. queues:
    those of the client. capabilities: of the server.
    """
    ran, left = Ran(capabilities=capabilities), deque(answers)
    ran.queues = queues or ran.queues
    try:
        ran.outcome = _drive(clock, operation, left, ran)
    except AssertionError:
        raise
    except BaseException as problem:
        ran.raised = problem
    assert not left or ... in left, f"no command was sent for the answers {list(left)}; raised {ran.raised!r}"
    return ran


def _drive(clock: Clock, operation: Any, left: deque[Any], ran: Ran) -> Any:
    def enqueue(waiter: Waiter) -> None:
        ran.steps.append(steps.Enqueue(waiter))
        ran.queues.enqueue(waiter)

    rest = operation.steps(ran.queues, clock) if isinstance(operation, steps.Operation) else operation
    driver, answer = steps.Driver(rest, enqueue, ran.steps.append), None
    while (step := driver.next(answer)) is not None:
        answer = _answer(clock, step, left, ran)
        if isinstance(answer, Raise):
            driver.fail(answer.error)
    return driver.outcome


def _wait(clock: Clock, step: Any, left: deque[Any]) -> Any:
    """Wait as the transports do: until the waiter is woken, or it is time to recheck."""
    waiter = step.waiter
    if left and isinstance(left[0], Raise):
        return left.popleft()
    at = min(waiter.queue.recheck_time(waiter), math.inf if step.until is None else step.until)
    if left and isinstance(left[0], Wakes) and not waiter.woken:
        wakes = left.popleft()
        assert clock() + wakes.seconds <= at, f"the waiter rechecked before, at {at}"
        clock.go(wakes.seconds)
        wakes.happens()
    elif not waiter.woken:
        clock.time = max(clock.time, min(at, clock() + RECHECK_SECONDS))
    waiter.woken = False
    return None


def _answer(clock: Clock, step: Any, left: deque[Any], ran: Ran) -> Any:
    ran.steps.append(step)
    if isinstance(step, steps.Sleep):
        assert step.seconds >= 0
        if left and isinstance(left[0], Raise):
            return left.popleft()
        clock.go(step.seconds)
        return None
    if isinstance(step, steps.Wait):
        return _wait(clock, step, left)
    if isinstance(step, steps.ProtocolViolation):
        return steps.ConnectionLost(
            errors.as_own(errors.InvalidResponse("makes no sense")), 5.0, sent=True, session="distrusted", own=True
        )
    assert left, f"no answer is left for the step: {vars(step) if hasattr(step, '__dict__') else step}"
    if isinstance(step, steps.Request):
        step.sent, step.connection = clock(), CONNECTION
        ran.stales.append(step.stale)
    if isinstance(step, steps.CommandBatch):
        ran.scripts += step.calls(ran.capabilities)
    answer = left.popleft()
    if left and left[0] is ...:
        left.appendleft(answer)
    if isinstance(answer, Callable):  # type: ignore[arg-type]
        answer = answer(step)
    if isinstance(answer, After):
        clock.go(answer.seconds)
        answer = answer.answer
    return answer


def acquire(ms: int = 10_000, **settings: Any) -> Acquire:
    op = Acquire("name", b"name", MINE, ms, settings.pop("fenced", False))
    for name, value in settings.items():
        setattr(op, name, value)
    return op


def lease_of(clock: Clock, seconds: float = 10.0, key: bytes = b"name", token: bytes = MINE) -> Lease:
    return Lease("name", key, token, clock() + seconds)


def joined(
    queues: LocalQueues, name: object, key: bytes, ms: int, fenced: bool, entry: bytes | None, sleep: float = 0.1
) -> Waiter:
    """A waiter that has joined a local queue."""
    waiter = Waiter(name, key, ms, fenced, entry, sleep)
    queues.enqueue(waiter)
    return waiter


def undone(undo: Undo) -> tuple[list[bytes], list[bytes]]:
    return undo.names, undo.tokens


def opcodes(ran: Ran) -> list[int]:
    """The opcodes of the requests; -1 for those that have none."""
    return [request.opcode if isinstance(request, steps.Command) else -1 for request in ran.requests]
