"""The hot path of threads, on canned answers: what it counts a lease from, and that it hands on whatever is not just as
hoped."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from support.play import joined

from fastlock import _commands as say
from fastlock import _hot as hot
from fastlock._broken import Broken
from fastlock._common import Common
from fastlock._errors import ClientClosedError, LockError
from fastlock._gate import Gates
from fastlock._impl import default
from fastlock._law import LAST_LOOK
from fastlock._lease import ENDED, Lease, now
from fastlock._link import STALE
from fastlock._lock import ClientLock
from fastlock._stats import Stats
from fastlock._steps import BEHIND, LATE, Distrust, Join
from fastlock._terms import Releasing

NAME = "sku"
BUSY = object()
pytestmark = pytest.mark.usefixtures("impl")


class Wire(Common):
    """A wire with one idle connection that gives this answer; what is handed on is kept, and has the outcome "on"."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.asked: list[tuple[Any, ...]] = []
        self.handed_on: list[tuple[Any, ...]] = []
        self.debts: list[Any] = []
        self.away = 0
        self.stats = Stats()
        self.gates = Gates(default.Mutex(), self.stats)
        self.crowd = self.gates.by_key
        self.waited: list[Any] = []
        self.meanwhile: Callable[[Any], object] = lambda waiter: None  # what happens to who waits
        self.patience, self.dead, self.busy = 5.0, None, BUSY
        self.ear = None
        self.impl = SimpleNamespace(Template=lambda *parts: parts)
        self.limit = 5.0  # seconds for which each command may take
        self.waited_until: float | None = None
        self.pipe = self
        self.forms = tuple(range(len(say.dialect(frozenset()))))
        self.connections = [self]
        self.idle = [self]

    def ask(self, form: int, name: bytes, token: bytes, ms: int, timeout: float, spin: float) -> Any:
        assert self.idle == [] and timeout == self.limit
        self.asked.append((form, name, token, ms, now()))
        answer = self.answer() if callable(self.answer) else self.answer
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def explain(self, op: Any, error: BaseException) -> Any:
        assert op.link is self and op.sent <= now()
        if not isinstance(error, Broken):
            raise error
        return STALE

    def run(self, op: Any, answer: Any = None) -> str:
        self.handed_on.append(("run", op) if answer is None else ("run", op, answer))
        return "on"

    def wait(self, waiter: Any, until: float | None) -> None:
        self.waited_until = until
        self.waited.append(waiter)
        self.meanwhile(waiter)

    def torn(self, op: Any, waiter: Any, error: BaseException) -> None:
        self.handed_on.append(("torn", op, waiter, error))

    def drive(self, steps: Any) -> str:
        self.handed_on.append(("drive", steps))
        return "on"

    def interrupted(self, op: Any, error: BaseException) -> None:
        self.handed_on.append(("interrupted", op))

    def lock(self, timeout: float | None = 10, **terms: Any) -> ClientLock:
        given = {"blocking": True, "blocking_timeout": None, "fence": False, "thread_local": True} | terms
        client: Any = SimpleNamespace(_wire=self)
        return ClientLock(client, NAME, timeout, 0.1, raise_on_release_error=True, **given)


def test_a_lease_counts_from_before_its_command_was_sent() -> None:
    wire, before = Wire(None), now()
    lock = wire.lock(timeout=10)
    lease = hot.take(lock, True)
    ((form, name, token, ms, sent),) = wire.asked
    assert lease is not None and lock.leases == {hot.thread_owner(): lease} and wire.idle == [wire]
    assert (form, name, ms) == (say.ACQUIRE, b"sku", 10_000)
    assert (lease.name, lease.key, lease.proof, lease.fence) == (NAME, b"sku", token, None)
    assert before + 10 <= lease.deadline <= sent + 10
    assert wire.handed_on == []


def test_without_end_there_is_no_deadline() -> None:
    wire = Wire(None)
    lease = hot.take(wire.lock(timeout=None), True)
    assert lease is not None and lease.deadline == math.inf and wire.asked[0][0] == say.ACQUIRE_ENDLESS


def test_a_reply_later_than_its_lease_is_left_to_the_law() -> None:
    """It must be undone on the server before it is tried again."""

    def late() -> None:
        end = now() + 0.0011
        while now() < end:
            pass

    wire = Wire(late)
    lock = wire.lock(timeout=0.001)
    assert hot.take(lock, True) == "on" and lock.leases == {}
    ((how, steps),) = wire.handed_on
    op = next(steps)  # the first that the law asks for
    assert (how, op.verb, op.token) == ("drive", say.RELEASE, wire.asked[0][2])


@pytest.mark.parametrize("answer", [b"another", False, 0, b"", [], [None], "text", 1], ids=repr)
def test_an_answer_to_an_acquire_that_is_not_just_as_hoped_is_left_to_the_law(answer: Any) -> None:
    wire = Wire(answer)
    lock = wire.lock(blocking=False)
    assert hot.take(lock, False) == "on" and lock.leases == {} and wire.idle == [wire]
    ((how, steps),) = wire.handed_on
    step = next(steps, None)
    assert how == "drive" and (step is None) is isinstance(answer, bytes), "that is: held by somebody else"
    assert step is None or (type(step) is Distrust and step.reply is answer and step.ask.link is wire)


def test_who_finds_it_held_and_may_wait_joins_those_who_wait() -> None:
    wire = Wire(b"another")
    lock = wire.lock()
    assert hot.take(lock, True) == "on" and lock.leases == {} and wire.idle == [wire]
    (waiter,) = wire.waited
    ((how, op, answer),) = wire.handed_on
    assert (how, op.key, op.must, answer) == ("run", b"sku", True, waiter)
    assert list(wire.crowd[b"sku"].waiters) == [waiter] and len(wire.asked) == 1


def test_where_others_wait_nothing_is_asked() -> None:
    wire = Wire(None)
    first = joined(wire.gates, "sku", b"sku", 0, False, None)
    assert hot.take(wire.lock(), True) == "on" and wire.asked == []
    assert list(wire.crowd[b"sku"].waiters) == [first, *wire.waited]
    assert hot.take(wire.lock(blocking=False), False) is not None and len(wire.asked) == 1, "who does not wait asks"


def test_a_lease_that_passes_to_who_waits_is_kept() -> None:
    wire, lease = Wire(None), Lease("sku", b"sku", b"t", now() + 10)
    joined(wire.gates, "sku", b"sku", 0, False, None)
    lock = wire.lock()
    wire.meanwhile = lambda waiter: setattr(waiter, "lease", lease)
    assert hot.take(lock, True) is lease and list(lock.leases.values()) == [lease] and wire.handed_on == []


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ClientClosedError("closed")], ids=repr)
def test_who_is_torn_from_its_wait_says_so(error: BaseException) -> None:
    wire = Wire(b"another")

    def strike(waiter: Any) -> None:
        raise error

    wire.meanwhile = strike
    with pytest.raises(type(error)):
        hot.take(wire.lock(), True)
    ((how, op, waiter, told),) = wire.handed_on
    assert (how, op.key, told) == ("torn", b"sku", error) and wire.waited == [waiter]


@pytest.mark.parametrize("answer", [0, None, b"1", 2, b"another", [1]], ids=repr)
def test_an_answer_to_a_release_that_is_not_just_as_hoped_is_left_to_the_law(answer: Any) -> None:
    wire = Wire(None)
    lock = wire.lock()
    lease = hot.take(lock, True)
    wire.answer = answer
    hot.give(lock)
    assert lease is not None and lease.valid and list(lock.leases.values()) == [lease]
    ((how, steps),) = wire.handed_on
    assert how == "drive" and wire.idle == [wire]
    if answer == 2:  # as good as 1
        assert list(steps) == []
        return
    step = next(steps)
    if type(answer) is int:  # not the caller's, or in the form which says that somebody waits
        assert type(step) is Releasing and step.calls == [say.hand_over(b"sku", lease.proof)]
    else:
        assert type(step) is Distrust and step.reply is answer and step.ask.link is wire


@pytest.mark.parametrize("answer", [BUSY, Broken()], ids=["busy", "stale"])
@pytest.mark.parametrize("operation", ["take", "give"])
def test_what_was_not_sent_is_asked_elsewhere_as_the_same_operation(operation: str, answer: Any) -> None:
    wire = Wire(None)
    lock = wire.lock()
    lease = hot.take(lock, True)
    wire.answer = answer
    if operation == "take":
        assert hot.take(lock, True) == "on"
    else:
        hot.give(lock)
    ((how, op),) = wire.handed_on
    assert how == "run" and op.token == wire.asked[-1][2] and op.link is wire
    assert lease is not None and lease.valid and wire.idle == [wire]


def test_a_release_ends_the_lease_of_its_owner_only() -> None:
    wire = Wire(None)
    lock = wire.lock()
    other = hot.take(lock, True)
    lock.leases[object()] = lock.leases.pop(hot.thread_owner())
    mine = hot.take(lock, True)
    wire.answer = 1
    hot.give(lock)
    assert mine is not None and other is not None
    assert (mine.deadline, list(lock.leases.values()), other.valid) == (ENDED, [other], True)
    assert wire.asked[-1][:4] == (say.RELEASE, b"sku", mine.proof, 0)


@pytest.mark.parametrize(
    "terms", [{"fence": True}, {"fair": True}, {"blocking_timeout": 0}], ids=lambda terms: next(iter(terms))
)
def test_special_terms_are_not_for_the_hot_path(terms: dict[str, Any]) -> None:
    wire = Wire(None)
    assert hot.take(wire.lock(**terms), True) == "on"
    assert wire.asked == [] and [how for how, _ in wire.handed_on] == ["run"] and wire.idle == [wire]


@pytest.mark.parametrize(("limit", "patience"), [(1e-6, 1e-6), (60, 5.0)])
def test_a_limited_wait_limits_the_first_command_too(limit: float, patience: float) -> None:
    wire, before = Wire(TimeoutError("no reply")), now()
    wire.limit = patience
    explained: list[Any] = []
    wire.explain = lambda op, error: explained.append(op) or LATE  # type: ignore[method-assign]
    assert hot.take(wire.lock(blocking_timeout=limit), True) == "on" and wire.idle == [wire]
    (op,) = explained
    assert op.token == wire.asked[0][2] and before + limit <= op.until <= wire.asked[0][4] + limit
    ((how, steps),) = wire.handed_on
    assert how == "drive"
    if limit > patience:
        assert type(next(steps)) is Join, "it goes on waiting"
    else:
        with pytest.raises(LockError):
            next(steps)


def test_a_limited_wait_behind_others_ends_in_time_for_a_last_look() -> None:
    wire, before = Wire(b"another"), now()
    wire.limit = 0.25
    assert hot.take(wire.lock(blocking_timeout=0.25), True) == "on"
    ((how, op, waiter),) = wire.handed_on
    assert how == "run" and wire.waited == [waiter] and wire.waited_until == pytest.approx(op.until - LAST_LOOK)
    assert before + 0.25 <= op.until <= wire.asked[0][4] + 0.25


def test_who_is_owed_something_comes_first() -> None:
    wire = Wire(None)
    wire.debts.append("an undo")
    lock = wire.lock()
    assert hot.take(lock, True) == "on" and wire.asked == [] and wire.idle == [wire]


CONTENDED = ["waited for here", "waited for elsewhere"]


def contended(wire: Wire, how: str) -> tuple[Any, Lease]:
    """A lock that is held, and its lease, for which somebody waits."""
    lock = wire.lock()
    lease = hot.take(lock, True)
    assert lease is not None
    if how == CONTENDED[0]:
        joined(wire.gates, "sku", b"sku", 0, False, None)
    lease.contended = how == CONTENDED[1]
    return lock, lease


@pytest.mark.parametrize("how", CONTENDED)
def test_a_release_for_which_others_wait_hands_over(how: str) -> None:
    wire = Wire(None)
    lock, lease = contended(wire, how)
    wire.answer = 1
    hot.give(lock)
    assert wire.asked[-1][0] == say.hand_over(b"sku", lease.proof) and len(wire.asked) == 2
    assert (lease.deadline, lock.leases, wire.handed_on, wire.idle) == (ENDED, {}, [], [wire])


@pytest.mark.parametrize("how", CONTENDED)
@pytest.mark.parametrize("answer", [0, None, b"1", 2, []], ids=repr)
def test_an_answer_to_a_hand_over_that_is_not_just_as_hoped_is_left_to_the_law(how: str, answer: Any) -> None:
    wire = Wire(None)
    lock, lease = contended(wire, how)
    wire.answer = answer
    hot.give(lock)
    ((what, steps),) = wire.handed_on
    assert what == "drive" and wire.idle == [wire] and lease.valid
    if answer == 0:
        with pytest.raises(LockError):
            next(steps)
    elif answer == 2:  # as good as 1
        assert list(steps) == []
    else:
        step = next(steps)
        assert type(step) is Distrust and step.reply == ("odd", [answer]) and step.ask.link is wire


@pytest.mark.parametrize("how", CONTENDED)
@pytest.mark.parametrize("answer", [BUSY, Broken()], ids=["busy", "stale"])
def test_a_hand_over_that_was_not_sent_is_asked_elsewhere(how: str, answer: Any) -> None:
    wire = Wire(None)
    lock, lease = contended(wire, how)
    wire.answer = answer
    hot.give(lock)
    ((what, op, *told),) = wire.handed_on
    assert (what, told) == ("run", [BEHIND] * (how == CONTENDED[0])), "those who wait here are told once"
    assert op.calls == [say.hand_over(b"sku", lease.proof)] and lease.valid and wire.idle == [wire]


def test_a_release_where_others_wait_for_other_names_is_a_plain_one() -> None:
    wire = Wire(None)
    lock = wire.lock()
    hot.take(lock, True)
    joined(wire.gates, "other", b"other", 0, False, None)
    wire.answer = 1
    hot.give(lock)
    assert wire.asked[-1][0] == say.RELEASE and wire.handed_on == []


def test_a_lease_goes_on_to_the_next_of_the_client_without_a_word() -> None:
    wire = Wire(None)
    lock, clock = wire.lock(), now()
    first, second = (joined(wire.gates, "sku", b"sku", 10_000, False, None) for _ in range(2))
    lease = Lease("sku", b"sku", b"t", clock + 10)
    first.gate.granted(first, lease, 0, clock)
    lock.keep(lease)
    hot.give(lock)
    assert second.lease is not None and second.lease.proof == b"t" and lease.deadline == ENDED
    assert lock.leases == {} and wire.asked == wire.handed_on == []


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(), OSError(), ZeroDivisionError()], ids=repr)
@pytest.mark.parametrize("operation", ["take", "give"])
def test_what_interrupts_is_raised_after_what_it_leaves_was_told(operation: str, error: BaseException) -> None:
    wire = Wire(None)
    lock = wire.lock()
    lease = hot.take(lock, True)
    wire.answer = error
    with pytest.raises(type(error)):
        hot.take(lock, True) if operation == "take" else hot.give(lock)
    assert wire.idle == [wire] and lease is not None
    ((how, op),) = wire.handed_on
    assert how == "interrupted" and op.token == wire.asked[-1][2]
    assert operation == "take" or lease.valid, "it can be repeated"
