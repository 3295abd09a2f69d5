"""The hot path, on canned answers: what it counts a lease from, and that it hands on whatever is not just as hoped.

And what a task awaits there, resumed, closed and thrown at by hand: compiled it is no coroutine, yet behaves as one.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import math
import warnings
from collections.abc import Awaitable, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from support.faces import Face
from support.faultproxy import FaultProxy, stall
from support.play import joined

import fastlock.asyncio
from fastlock import _commands as say
from fastlock import _hot as hot
from fastlock._errors import ClientClosedError, LockError
from fastlock._gate import Gates
from fastlock._law import LAST_LOOK
from fastlock._lease import ENDED, Lease, now
from fastlock._lock import ClientLock
from fastlock._stats import Stats
from fastlock._steps import BEHIND, LATE, ONE, Distrust, Join
from fastlock._terms import Releasing
from fastlock._wire import STALE
from fastlock.embedded import Server

NAME = "sku"
MARK = b"\r\nsku\r\n"
BUSY = object()
valkey = pytest.mark.parametrize("server", ["valkey"], indirect=True)
both_loops = pytest.mark.parametrize("face", ["asyncio", "asyncio+uvloop"], indirect=True)
pytestmark = pytest.mark.usefixtures("impl")


# ----------------------------------------------------------------------------------------------------------- threads


class Wire:
    """A wire with one idle connection that gives this answer; what is handed on is kept, and has the outcome "on"."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.asked: list[tuple[Any, ...]] = []
        self.handed_on: list[tuple[Any, ...]] = []
        self.debts: list[Any] = []
        self.away = 0
        self.stats = Stats()
        self.gates = Gates(contextlib.nullcontext(), self.stats)
        self.crowd = self.gates.by_key
        self.waited: list[Any] = []
        self.meanwhile: Callable[[Any], object] = lambda waiter: None  # what happens to who waits
        self.patience, self.dead, self.busy = 5.0, None, BUSY
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
        if not isinstance(error, OSError):
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
    assert (lease.name, lease.key, lease.token, lease.fence) == (NAME, b"sku", token, None)
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
        assert type(step) is Releasing and step.calls == [say.hand_over(b"sku", lease.token)]
    else:
        assert type(step) is Distrust and step.reply is answer and step.ask.link is wire


@pytest.mark.parametrize("answer", [BUSY, ConnectionResetError()], ids=["busy", "stale"])
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
    assert wire.asked[-1][:4] == (say.RELEASE, b"sku", mine.token, 0)


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


def test_a_release_for_which_others_wait_hands_over() -> None:
    wire = Wire(None)
    lock = wire.lock()
    lease = hot.take(lock, True)
    assert lease is not None
    joined(wire.gates, "sku", b"sku", 0, False, None)
    hot.give(lock)
    ((how, op, answer),) = wire.handed_on
    assert (how, answer, op.calls) == ("run", BEHIND, [say.hand_over(b"sku", lease.token)])
    assert len(wire.asked) == 1 and lease.valid, "until the server has said so"


def test_a_release_where_others_wait_for_other_names_is_a_plain_one() -> None:
    wire = Wire(None)
    lock = wire.lock()
    hot.take(lock, True)
    joined(wire.gates, "other", b"other", 0, False, None)
    hot.give(lock)
    ((how, op, answer),) = wire.handed_on
    assert (how, answer, op.kind) == ("run", BEHIND, ONE)


def test_a_lease_goes_on_to_the_next_of_the_client_without_a_word() -> None:
    wire = Wire(None)
    lock, clock = wire.lock(), now()
    first, second = (joined(wire.gates, "sku", b"sku", 10_000, False, None) for _ in range(2))
    lease = Lease("sku", b"sku", b"t", clock + 10)
    first.gate.granted(first, lease, 0, clock)
    lock.keep(lease)
    hot.give(lock)
    assert second.lease is not None and second.lease.token == b"t" and lease.deadline == ENDED
    assert lock.leases == {} and wire.asked == wire.handed_on == []


def test_a_contended_lease_is_released_by_the_law() -> None:
    wire = Wire(None)
    lock = wire.lock()
    lease = hot.take(lock, True)
    assert lease is not None
    lease.contended = True
    hot.give(lock)
    ((how, op),) = wire.handed_on
    assert how == "run" and op.calls == [say.hand_over(b"sku", lease.token)]
    assert len(wire.asked) == 1 and lease.valid and wire.idle == [wire]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(), MemoryError()], ids=repr)
@pytest.mark.parametrize("operation", ["take", "give"])
def test_what_interrupts_is_raised_after_what_it_leaves_was_told(operation: str, error: BaseException) -> None:
    wire = Wire(None)
    lock = wire.lock()
    lease = hot.take(lock, True)
    wire.answer = error
    with pytest.raises(type(error)):
        hot.take(lock, True) if operation == "take" else hot.give(lock)
    assert wire.idle == [wire] and lease is not None
    interrupted = not isinstance(error, Exception)
    if operation == "take":
        assert [how for how, _ in wire.handed_on] == ["interrupted"] * interrupted
        assert [op.token for _, op in wire.handed_on] == [wire.asked[-1][2]] * interrupted
    else:
        assert lease.valid and lease.release_doubted is interrupted, "it can be repeated"


# ----------------------------------------------------------------------------------------------------------- asyncio


@pytest.fixture
def quiet_coroutines() -> Iterator[None]:
    """In Python it is a coroutine, which complains when it is dropped before it began."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
        yield
        gc.collect()


async def until(holds: Callable[[], object]) -> None:
    end = now() + 10
    while not holds():
        assert now() < end
        await asyncio.sleep(0)


def commands(proxy: FaultProxy) -> int:
    """How many commands about the lock were sent."""
    return sum(NAME.encode() in words for words in proxy.commands)


async def in_step(client: Any) -> None:
    """What was queued before has been executed."""
    assert await client.lock("barrier").locked() is False


@both_loops
@pytest.mark.parametrize("connected", [True, False], ids=["connected", "fresh"])
async def test_what_is_never_awaited_sends_nothing(
    face: Face, proxy: FaultProxy, no_leaks: Any, quiet_coroutines: None, connected: bool
) -> None:
    client = face.client(proxy.url)
    if connected:
        await client.server_info()
    lock = client.lock(NAME)
    for _ in range(2):
        begun: Any = lock.__aenter__()
        begun.close()
        del begun
        lock.__aenter__()
        lock.acquire()
        lock.release()
        lock.__aexit__(None, None, None)
        gc.collect()
    assert commands(proxy) == 0 and len(proxy.links) == connected
    await in_step(client)
    assert commands(proxy) == 0
    async with lock:
        lock.__aexit__(None, None, None)
        assert await lock.owned()


@both_loops
async def test_an_enter_can_be_waited_for_as_any_awaitable(
    face: Face, server: Server, probe: redis.Redis, no_leaks: Any
) -> None:
    lock = face.client(server.unix_url).lock(NAME)
    ways: list[Callable[[Any], Awaitable[Any]]] = [
        lambda entered: entered,
        lambda entered: asyncio.wait_for(entered, 10),
        asyncio.ensure_future,
        asyncio.create_task,
        asyncio.shield,
    ]
    for way in ways:
        lease = await way(lock.__aenter__())
        assert lease.valid and probe.get(NAME) == lease.token
        assert await way(lock.__aexit__(None, None, None)) is None
        assert not lease.valid and not probe.exists(NAME) and lock.lease is None
    (lease,) = await asyncio.gather(lock.__aenter__())
    assert lease.valid
    await asyncio.gather(lock.release())


@both_loops
@pytest.mark.parametrize("way", ["wait_for", "timeout"])
async def test_an_enter_that_runs_out_of_time_leaves_nothing(
    face: Face, proxy: FaultProxy, probe: redis.Redis, no_leaks: Any, way: str
) -> None:
    client = face.client(proxy.url, reply_timeout=20)
    await client.server_info()
    lock = client.lock(NAME)
    armed = proxy.arm(stall(), after=MARK, times=1)
    with pytest.raises(TimeoutError):
        if way == "wait_for":
            await asyncio.wait_for(lock.__aenter__(), 0.02)
        else:
            async with asyncio.timeout(0.02):
                await lock.__aenter__()
    armed.resume()
    await in_step(client)
    assert not probe.exists(NAME) and lock.lease is None and len(proxy.links) == 1


@both_loops
async def test_locks_in_an_exit_stack(face: Face, server: Server, probe: redis.Redis, no_leaks: Any) -> None:
    client, names = face.client(server.unix_url), ["a", "b", "c"]
    with pytest.raises(ZeroDivisionError) as caught:
        async with contextlib.AsyncExitStack() as stack:
            leases = [await stack.enter_async_context(client.lock(name)) for name in names]
            assert [probe.get(name) for name in names] == [lease.token for lease in leases]
            probe.delete("b")
            raise ZeroDivisionError
    assert not probe.exists(*names)
    assert ["'b'" in note for note in caught.value.__notes__] == [True], "of the one that was lost"
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(client.lock("a"))
        kept = stack.pop_all()
    assert probe.exists("a")
    await kept.aclose()
    assert not probe.exists("a")


class OfTheCaller(Exception):
    pass


BY_HAND = ["close", "throw", "throw a class", "cancel", "drop"]


def end_by_hand(how: str, waiting: list[Any]) -> None:
    """End the only coroutine in `waiting`, which waits for a reply."""
    coroutine = waiting.pop()
    if how == "close":
        coroutine.close()
    elif how == "throw":
        with pytest.raises(OfTheCaller):
            coroutine.throw(OfTheCaller("with a text"))
    elif how == "throw a class":
        with pytest.raises(OfTheCaller):
            coroutine.throw(OfTheCaller)
    elif how == "cancel":
        with pytest.raises(asyncio.CancelledError):
            coroutine.throw(asyncio.CancelledError())
    del coroutine
    gc.collect()


@valkey
@both_loops
@pytest.mark.parametrize("replied", [False, True], ids=["before its reply", "after its reply"])
@pytest.mark.parametrize("how", BY_HAND)
@pytest.mark.parametrize("operation", ["with", "acquire", "release"])
async def test_a_coroutine_ended_by_hand_while_it_waits_leaves_nothing(
    face: Face, server: Server, probe: redis.Redis, no_leaks: Any, operation: str, how: str, replied: bool
) -> None:
    client = face.client(server.unix_url)
    await client.server_info()
    lock = client.lock(NAME, thread_local=False)

    async def body() -> None:
        async with lock:
            raise AssertionError("nobody resumed it")

    if operation == "release":
        await lock.acquire()
    waiting = [{"with": body, "acquire": lock.acquire, "release": lock.release}[operation]()]
    future = waiting[0].send(None)
    while replied and not future.done():
        await asyncio.sleep(0)
    end_by_hand(how, waiting)
    await in_step(client)
    assert not probe.exists(NAME)
    if operation == "release":
        assert lock.lease is not None and lock.lease.release_doubted
        await lock.release()
    assert lock.lease is None


@valkey
@both_loops
@pytest.mark.parametrize("how", BY_HAND[:-1])
async def test_the_awaitable_itself_ended_by_hand_leaves_nothing(
    face: Face, server: Server, probe: redis.Redis, no_leaks: Any, how: str
) -> None:
    """As above, without a coroutine round it; also while it waits for its turn, where a coroutine goes on."""
    client = face.client(server.unix_url)
    await client.server_info()
    lock = client.lock(NAME, thread_local=False, sleep=0.001)
    for held in (False, True):
        if held:
            probe.set(NAME, "another")
        awaitable: Any = lock.__aenter__()
        steps = awaitable.__await__()
        future = steps.send(None)
        if held:
            await until(future.done)
            assert not steps.send(None).done(), "it asks for a place among those who wait"
        end_by_hand(how, [steps])
        await in_step(client)
        assert not probe.exists(say.queue_key(NAME.encode())) and client._wire.crowd == {}
        assert probe.get(NAME) == (b"another" if held else None) and lock.lease is None
    probe.delete(NAME)


@valkey
@both_loops
@pytest.mark.parametrize("why", ["somebody waits", "it is contended", "neither"])
async def test_what_is_contended_tasks_leave_to_the_law(
    face: Face, server: Server, probe: redis.Redis, no_leaks: Any, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    client = face.client(server.unix_url)
    await client.server_info()
    lock, wire, ran = client.lock(NAME), client._wire, list[Any]()
    monkeypatch.setattr(wire, "run", lambda op, answer=None, run=wire.run: ran.append(op.key) or run(op, answer))
    if why == "somebody waits":
        waiter = joined(wire.gates, "whatever", b"whatever", 0, False, None)
    for taken in (lambda: lock.__aenter__(), lambda: lock.acquire()):
        ran.clear()
        await taken()
        assert ran == [] and lock.lease is not None, "it waits for another name"
        lock.lease.contended = why == "it is contended"
        await lock.release()
        assert len(ran) == {"somebody waits": 0, "it is contended": 1, "neither": 0}[why]
        assert lock.lease is None and not probe.exists(NAME)
    if why == "somebody waits":
        wire.gates.leave(waiter, now())
    assert not wire.crowd


def sleepers(client: Any) -> list[Any]:
    """Who is to be called when its time is over, by the timers that tasks share."""
    return [sleeper for alarm in client._wire.alarms.values() for sleeper in alarm.sleepers]


@valkey
@both_loops
async def test_each_limited_wait_ends_whatever_the_limits_of_others(
    face: Face, server: Server, probe: redis.Redis, no_leaks: Any
) -> None:
    """More limits than timers to be shared, and two tasks for each; some are cancelled, some served before."""
    client = face.client(server.unix_url)
    await client.server_info()
    probe.set(NAME, "another")
    limits = [0.05 + number / 1000 for number in range(24)] * 2
    locks = [client.lock(NAME, blocking_timeout=limit) for limit in limits]
    tasks = [asyncio.ensure_future(lock.acquire()) for lock in locks]
    await until(lambda: client.get_stats()["waits"] == len(tasks))
    assert len(client._wire.alarms) == (16 if fastlock.IMPLEMENTATION == "cython" else 0)
    for task in tasks[5:10]:
        task.cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(each) for each in outcomes[5:10]] == [asyncio.CancelledError] * 5
    assert outcomes[:5] + outcomes[10:] == [False] * (len(tasks) - 5)
    assert not client._wire.crowd and not sleepers(client)
    probe.delete(NAME)
    served = [client.lock(NAME, blocking_timeout=60) for _ in range(8)]

    async def turn(lock: Any) -> None:
        assert await lock.acquire()
        await lock.release()

    for _ in range(5):
        await asyncio.gather(*(turn(lock) for lock in served))
        assert not sleepers(client)


@valkey
@both_loops
async def test_shared_timers_end_with_the_client_and_go_to_others_when_nobody_uses_them(
    face: Face, server: Server, no_leaks: Any
) -> None:
    client = face.client(server.unix_url)
    await client.server_info()
    for limit in range(1000, 1040):
        lock = client.lock(NAME, blocking_timeout=limit)
        assert await lock.acquire()
        await lock.release()
    alarms = dict(client._wire.alarms)
    await client.close()
    if fastlock.IMPLEMENTATION == "cython":
        assert list(alarms) == list(range(1024, 1040)), "the latest"
    assert [alarm.timer for alarm in alarms.values()] == [None] * len(alarms) and not sleepers(client)


@valkey
@both_loops
async def test_who_comes_late_into_a_line_of_waits_is_called_in_its_own_time(
    face: Face, server: Server, probe: redis.Redis, proxy: FaultProxy, no_leaks: Any
) -> None:
    """Its first command took long, so that others who came later waited already: its time is over before theirs."""
    client = face.client(proxy.url)
    await client.server_info()
    probe.set(NAME, "another")
    ended: list[str] = []

    async def wait(who: str) -> None:
        assert not await client.lock(NAME, blocking_timeout=0.5).acquire()
        ended.append(who)

    stalled = proxy.arm(stall(), after=NAME.encode(), times=1)
    early, started = asyncio.ensure_future(wait("early")), now()
    await asyncio.to_thread(stalled.wait)
    await until(lambda: now() > started + 0.05)  # a loop may count in milliseconds only
    before = joined(client._wire.gates, NAME, NAME.encode(), 0, False, None)
    late = asyncio.ensure_future(wait("late"))
    await until(lambda: len(client._wire.crowd[NAME.encode()].waiters) == 2)
    stalled.resume()
    await until(lambda: len(client._wire.crowd[NAME.encode()].waiters) == 3)
    await asyncio.gather(early, late)
    assert ended == ["early", "late"]
    client._wire.gates.leave(before, now())
    probe.delete(NAME)


@both_loops
async def test_what_was_awaited_cannot_be_awaited_again_and_closing_it_changes_nothing(
    face: Face, server: Server, probe: redis.Redis, no_leaks: Any
) -> None:
    lock = face.client(server.unix_url).lock(NAME)
    await lock.locked()
    for _ in range(2):
        entered: Any = lock.__aenter__()
        lease = await entered
        entered.close()
        for again in (lambda entered=entered: entered, lambda entered=entered: asyncio.ensure_future(entered)):
            with pytest.raises(RuntimeError, match="already awaited"):
                await again()
        assert lock.lease is lease and await lock.owned(), "nothing was undone, nothing granted twice"
        left: Any = lock.__aexit__(None, None, None)
        await left
        left.close()
        for awaited in (entered, left):
            with pytest.raises(RuntimeError, match="already awaited"):
                await awaited
        assert lock.lease is None and not probe.exists(NAME)
        begun: Any = lock.__aenter__()
        begun.close()
        with pytest.raises(RuntimeError, match="already awaited"):
            await begun
        begun = lock.__aenter__()
        with pytest.raises(OfTheCaller):
            begun.throw(OfTheCaller())
        with pytest.raises(RuntimeError, match="already awaited"):
            await begun
    assert not probe.exists(NAME)


async def test_the_awaitable_is_a_coroutine_to_asyncio(impl: str) -> None:
    """So that it can be the whole of a task."""
    lock = fastlock.asyncio.Client(unix_socket_path="/nowhere").lock(NAME)
    for made in (lock.__aenter__(), lock.__aexit__(None, None, None)):
        assert asyncio.iscoroutine(made) and inspect.isawaitable(made)
        made.close()  # type: ignore[attr-defined]
