"""The fast path of threads, on canned replies: from when it counts a lease, and that whatever is unusual goes the slow
path."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from support.run_steps import joined

from fastlock._errors import ClientClosedError, LockError
from fastlock._implementation import default
from fastlock._locks.lock import ClientLock
from fastlock._locks.paths import threads
from fastlock._protocol import commands
from fastlock._protocol.acquire import LAST_TRY_SECONDS
from fastlock._protocol.belief import Confirmation
from fastlock._protocol.commands import Opcode
from fastlock._protocol.lease import ENDED, Lease, now
from fastlock._protocol.local_queue import LocalQueue, LocalQueues
from fastlock._protocol.release import HandOver
from fastlock._protocol.stats import Stats
from fastlock._protocol.steps import Answer, Enqueue, ProtocolViolation
from fastlock._protocol.waiters import Waiter
from fastlock._stream_errors import Broken
from fastlock._transport.base import Transport
from fastlock._transport.owners import thread_owner
from fastlock._transport.parker import Parking
from fastlock._transport.waiting import read_confirmation

NAME = "sku"
BUSY = object()
pytestmark = [pytest.mark.fastpath("threads"), pytest.mark.usefixtures("impl")]


class FakeTransport(Transport):
    """One idle connection that gives this answer; what takes the slow path is noted, and has the outcome "slow"."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.sent: list[tuple[Any, ...]] = []
        self.slow_path: list[tuple[Any, ...]] = []
        self.pending_undos: list[Any] = []
        self.unconfirmed: dict[bytes, Any] = {}
        self.push_connection_lent = 0
        self.parking = Parking()
        self.stats = Stats()
        self.queues = LocalQueues(default.Mutex(), self.stats)
        self.queued_keys, self.expected_keys = self.queues.by_key, self.queues.expected
        self.waited: list[Any] = []
        self.meanwhile: Callable[[Any], object] = lambda waiter: None  # what happens to the waiter
        self.reply_timeout, self.error, self.busy = 5.0, None, BUSY
        self.push_connection = None
        self.impl = SimpleNamespace(Template=lambda *parts: parts)
        self.limit = 5.0  # seconds for which each command may take
        self.waited_until: float | None = None
        self.stream = self
        self.templates = tuple(range(len(commands.command_table(frozenset()))))
        self.connections = [self]
        self.idle = [self]

    def round_trip(self, template: int, name: bytes, token: bytes, ms: int, timeout: float, spin: float) -> Any:
        assert self.idle == [] and timeout == self.limit
        self.sent.append((template, name, token, ms, now()))
        answer = self.answer() if callable(self.answer) else self.answer
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def classify_error(self, request: Any, error: BaseException) -> Any:
        assert request.connection is self and request.sent <= now()
        if not isinstance(error, Broken):
            raise error
        return Answer.RETRY_ELSEWHERE

    def run(self, op: Any, answer: Any = Answer.NOT_ASKED) -> str:
        if answer is Answer.NOT_ASKED:
            self.slow_path.append(("run", op))
        elif answer is Answer.ASK_SERVER or isinstance(answer, Waiter):
            self.slow_path.append(("run", op, answer))
        else:  # the steps from an answer on
            self.slow_path.append(("drive", op.continue_from(answer, now)))
        return "slow"

    def wait(self, waiter: Any, until: float | None) -> None:
        self.waited_until = until
        self.waited.append(waiter)
        self.meanwhile(waiter)

    def cancel_wait(self, op: Any, waiter: Any, error: BaseException) -> None:
        self.slow_path.append(("cancelled", op, waiter, error))

    def undo_interrupted(self, op: Any, error: BaseException) -> None:
        self.slow_path.append(("interrupted", op))

    def lock(self, timeout: float | None = 10, **settings: Any) -> ClientLock:
        given = {"blocking": True, "blocking_timeout": None, "fence": False, "thread_local": True} | settings
        client: Any = SimpleNamespace(_transport=self)
        return ClientLock(client, NAME, timeout, 0.1, raise_on_release_error=True, **given)


def test_a_lease_counts_from_before_its_command_was_sent() -> None:
    transport, before = FakeTransport(None), now()
    lock = transport.lock(timeout=10)
    lease = threads.acquire(lock, True)
    ((template, name, token, ms, sent),) = transport.sent
    assert lease is not None and lock._leases == {thread_owner(): lease} and transport.idle == [transport]
    assert (template, name, ms) == (Opcode.ACQUIRE, b"sku", 10_000)
    assert (lease.name, lease._key, lease._raw_token, lease.fence) == (NAME, b"sku", token, None)
    assert before + 10 <= lease._deadline <= sent + 10
    assert transport.slow_path == []


def test_a_lease_without_end_has_no_deadline() -> None:
    transport = FakeTransport(None)
    lease = threads.acquire(transport.lock(timeout=None), True)
    assert lease is not None and lease._deadline == math.inf and transport.sent[0][0] == Opcode.ACQUIRE_ENDLESS


def test_a_reply_later_than_its_lease_is_left_to_the_slow_path() -> None:
    """It must be undone on the server before it is tried again."""

    def late() -> None:
        end = now() + 0.0011
        while now() < end:
            pass

    transport = FakeTransport(late)
    lock = transport.lock(timeout=0.001)
    assert threads.acquire(lock, True) == "slow" and lock._leases == {}
    ((how, steps),) = transport.slow_path
    op = next(steps)  # the first step of the operation
    assert (how, op.opcode, op.token) == ("drive", Opcode.RELEASE, transport.sent[0][2])


@pytest.mark.parametrize("answer", [b"another", False, 0, b"", [], [None], "text", 1], ids=repr)
def test_an_unusual_reply_to_an_acquire_is_left_to_the_slow_path(answer: Any) -> None:
    transport = FakeTransport(answer)
    lock = transport.lock(blocking=False)
    assert threads.acquire(lock, False) == "slow" and lock._leases == {} and transport.idle == [transport]
    ((how, steps),) = transport.slow_path
    step = next(steps, None)
    assert how == "drive" and (step is None) is isinstance(answer, bytes), "bytes: it is held by another"
    assert step is None or (
        type(step) is ProtocolViolation and step.reply is answer and step.request.connection is transport
    )


def test_an_acquire_that_finds_the_name_held_joins_the_local_queue() -> None:
    transport = FakeTransport(b"another")
    lock = transport.lock()
    assert threads.acquire(lock, True) == "slow" and lock._leases == {} and transport.idle == [transport]
    (waiter,) = transport.waited
    ((how, op, answer),) = transport.slow_path
    assert (how, op.key, op.required, answer) == ("run", b"sku", True, waiter)
    assert list(transport.queued_keys[b"sku"].waiters) == [waiter] and len(transport.sent) == 1


def test_an_acquire_behind_local_waiters_sends_nothing() -> None:
    transport = FakeTransport(None)
    first = joined(transport.queues, "sku", b"sku", 0, False, None)
    assert threads.acquire(transport.lock(), True) == "slow" and transport.sent == []
    assert list(transport.queued_keys[b"sku"].waiters) == [first, *transport.waited]
    assert threads.acquire(transport.lock(blocking=False), False) is not None and len(transport.sent) == 1, (
        "an acquire that does not block sends its command"
    )


def test_a_lease_handed_to_a_waiter_is_kept() -> None:
    transport, lease = FakeTransport(None), Lease("sku", b"sku", b"t", now() + 10)
    joined(transport.queues, "sku", b"sku", 0, False, None)
    lock = transport.lock()
    transport.meanwhile = lambda waiter: setattr(waiter, "lease", lease)
    assert threads.acquire(lock, True) is lease and list(lock._leases.values()) == [lease] and transport.slow_path == []


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ClientClosedError("closed")], ids=repr)
def test_an_interrupted_wait_is_cancelled_and_raises(error: BaseException) -> None:
    transport = FakeTransport(b"another")

    def strike(waiter: Any) -> None:
        raise error

    transport.meanwhile = strike
    with pytest.raises(type(error)):
        threads.acquire(transport.lock(), True)
    ((how, op, waiter, told),) = transport.slow_path
    assert (how, op.key, told) == ("cancelled", b"sku", error) and transport.waited == [waiter]


@pytest.mark.parametrize("answer", [0, None, b"1", 2, b"another", [1]], ids=repr)
def test_an_unusual_reply_to_a_release_is_left_to_the_slow_path(answer: Any) -> None:
    transport = FakeTransport(None)
    lock = transport.lock()
    lease = threads.acquire(lock, True)
    transport.answer = answer
    threads.release(lock)
    assert lease is not None and lease.valid and list(lock._leases.values()) == [lease]
    ((how, steps),) = transport.slow_path
    assert how == "drive" and transport.idle == [transport]
    if answer == 2:  # as good as 1
        assert list(steps) == []
        return
    step = next(steps)
    if type(answer) is int:  # the value is not the caller's token, or it is contended
        assert type(step) is HandOver and step.calls == [commands.hand_over(b"sku", lease._raw_token)]
    else:
        assert type(step) is ProtocolViolation and step.reply is answer and step.request.connection is transport


@pytest.mark.parametrize("answer", [BUSY, Broken()], ids=["busy", "stale"])
@pytest.mark.parametrize("operation", ["acquire", "release"])
def test_a_command_that_was_not_sent_is_retried_elsewhere_as_the_same_operation(operation: str, answer: Any) -> None:
    transport = FakeTransport(None)
    lock = transport.lock()
    lease = threads.acquire(lock, True)
    transport.answer = answer
    if operation == "acquire":
        assert threads.acquire(lock, True) == "slow"
    else:
        threads.release(lock)
    ((how, op),) = transport.slow_path
    assert how == "run" and op.request.token == transport.sent[-1][2] and op.request.connection is transport
    assert lease is not None and lease.valid and transport.idle == [transport]


def test_a_release_ends_the_lease_of_its_owner_only() -> None:
    transport = FakeTransport(None)
    lock = transport.lock()
    other = threads.acquire(lock, True)
    lock._leases[object()] = lock._leases.pop(thread_owner())
    mine = threads.acquire(lock, True)
    transport.answer = 1
    threads.release(lock)
    assert mine is not None and other is not None
    assert (mine._deadline, list(lock._leases.values()), other.valid) == (ENDED, [other], True)
    assert transport.sent[-1][:4] == (Opcode.RELEASE, b"sku", mine._raw_token, 0)


@pytest.mark.parametrize(
    "settings", [{"fence": True}, {"blocking_timeout": 0}], ids=lambda settings: next(iter(settings))
)
def test_special_settings_are_not_for_the_fast_path(settings: dict[str, Any]) -> None:
    transport = FakeTransport(None)
    assert threads.acquire(transport.lock(**settings), True) == "slow"
    assert transport.sent == [] and [how for how, _ in transport.slow_path] == ["run"] and transport.idle == [transport]


@pytest.mark.parametrize(("limit", "timeout"), [(1e-6, 1e-6), (60, 5.0)])
def test_a_limited_wait_limits_the_first_command_too(limit: float, timeout: float) -> None:
    transport, before = FakeTransport(TimeoutError("no reply")), now()
    transport.limit = timeout
    explained: list[Any] = []
    transport.classify_error = lambda op, error: explained.append(op) or Answer.DEADLINE_EXCEEDED  # type: ignore[method-assign]
    assert threads.acquire(transport.lock(blocking_timeout=limit), True) == "slow" and transport.idle == [transport]
    (op,) = explained
    assert op.token == transport.sent[0][2] and before + limit <= op.until <= transport.sent[0][4] + limit
    ((how, steps),) = transport.slow_path
    assert how == "drive"
    if limit > timeout:
        assert type(next(steps)) is Enqueue, "the acquire goes on waiting"
    else:
        with pytest.raises(LockError):
            next(steps)


def test_a_limited_wait_behind_others_ends_in_time_for_a_last_try() -> None:
    transport, before = FakeTransport(b"another"), now()
    transport.limit = 0.25
    assert threads.acquire(transport.lock(blocking_timeout=0.25), True) == "slow"
    ((how, op, waiter),) = transport.slow_path
    assert (
        how == "run"
        and transport.waited == [waiter]
        and transport.waited_until == pytest.approx(op.until - LAST_TRY_SECONDS)
    )
    assert before + 0.25 <= op.until <= transport.sent[0][4] + 0.25


def test_pending_undos_come_first() -> None:
    transport = FakeTransport(None)
    transport.pending_undos.append("an undo")
    lock = transport.lock()
    assert threads.acquire(lock, True) == "slow" and transport.sent == [] and transport.idle == [transport]


CONTENDED = ["local waiter", "remote waiter"]


def contended(transport: FakeTransport, how: str) -> tuple[Any, Lease]:
    """A lock that is held and its lease, which a waiter wants."""
    lock = transport.lock()
    lease = threads.acquire(lock, True)
    assert lease is not None
    if how == CONTENDED[0]:
        joined(transport.queues, "sku", b"sku", 0, False, None)
    lease._contended = how == CONTENDED[1]
    return lock, lease


@pytest.mark.parametrize("how", CONTENDED)
def test_a_contended_release_hands_over(how: str) -> None:
    transport = FakeTransport(None)
    lock, lease = contended(transport, how)
    transport.answer = 1
    threads.release(lock)
    template, _, token, *_ = transport.sent[-1]
    assert (template, token) == (commands.hand_over(b"sku"), lease._raw_token) and len(transport.sent) == 2
    assert (lease._deadline, lock._leases, transport.slow_path, transport.idle) == (ENDED, {}, [], [transport])


@pytest.mark.parametrize("how", CONTENDED)
@pytest.mark.parametrize("answer", [0, None, b"1", 2, []], ids=repr)
def test_an_unusual_reply_to_a_handover_is_left_to_the_slow_path(how: str, answer: Any) -> None:
    transport = FakeTransport(None)
    lock, lease = contended(transport, how)
    transport.answer = answer
    threads.release(lock)
    ((what, steps),) = transport.slow_path
    assert what == "drive" and transport.idle == [transport] and lease.valid
    if answer == 0:
        with pytest.raises(LockError):
            next(steps)
    elif answer == 2:  # as good as 1
        assert list(steps) == []
    else:
        step = next(steps)
        assert (
            type(step) is ProtocolViolation and step.reply == ("odd", [answer]) and step.request.connection is transport
        )


@pytest.mark.parametrize("how", CONTENDED)
@pytest.mark.parametrize("answer", [BUSY, Broken()], ids=["busy", "stale"])
def test_a_handover_that_was_not_sent_is_retried_elsewhere(how: str, answer: Any) -> None:
    transport = FakeTransport(None)
    lock, lease = contended(transport, how)
    transport.answer = answer
    threads.release(lock)
    ((what, op, *told),) = transport.slow_path
    assert (what, told) == ("run", [Answer.ASK_SERVER] * (how == CONTENDED[0])), "the local waiter is woken once"
    assert (
        op.request.calls == [commands.hand_over(b"sku", lease._raw_token)]
        and lease.valid
        and transport.idle == [transport]
    )


def test_a_release_of_a_name_without_waiters_is_plain() -> None:
    transport = FakeTransport(None)
    lock = transport.lock()
    threads.acquire(lock, True)
    joined(transport.queues, "other", b"other", 0, False, None)
    transport.answer = 1
    threads.release(lock)
    assert transport.sent[-1][0] == Opcode.RELEASE and transport.slow_path == []


def test_a_local_handover_sends_nothing() -> None:
    transport = FakeTransport(None)
    lock, clock = transport.lock(), now()
    first, second = (joined(transport.queues, "sku", b"sku", 10_000, False, None) for _ in range(2))
    lease = Lease("sku", b"sku", b"t", clock + 10)
    first.queue.note_granted(first, lease, 0, clock)
    lock._keep_lease(lock._owner(), lease)
    threads.release(lock)
    assert second.lease is not None and second.lease._raw_token == b"t" and lease._deadline == ENDED
    assert lock._leases == {} and transport.sent == transport.slow_path == []


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(), OSError(), ZeroDivisionError()], ids=repr)
@pytest.mark.parametrize("operation", ["acquire", "release"])
def test_an_interrupt_is_raised_after_the_undo_of_its_operation(operation: str, error: BaseException) -> None:
    transport = FakeTransport(None)
    lock = transport.lock()
    lease = threads.acquire(lock, True)
    transport.answer = error
    with pytest.raises(type(error)):
        threads.acquire(lock, True) if operation == "acquire" else threads.release(lock)
    assert transport.idle == [transport] and lease is not None
    ((how, op),) = transport.slow_path
    assert how == "interrupted" and op.undo().tokens == [transport.sent[-1][2]]
    assert operation == "acquire" or lock.lease is lease, "the release can be repeated"


@pytest.mark.parametrize(("left", "reads"), [(2, 0), (1, 1), (0, 1)])
def test_the_last_local_handover_asks_whether_others_wait(left: int, reads: int) -> None:
    """By the confirmation, which may have come: until it is read, others may wait, and each thread has one turn."""
    transport, read = FakeTransport(1), []
    queue = LocalQueue(transport.queues, b"sku", None)
    found = Lease("sku", b"sku", queue.entry, now() + 10)
    found._since = now() + 10  # it is young, on a busy machine too
    found._confirmation = Confirmation(queue, found, 10_000)
    queue.handovers_left, transport.queues.poll = left, lambda: lambda: read.append(1)
    read_confirmation(transport, found)
    assert len(read) == reads
