"""Threads that wait in the hot path: what their looks at the server meet, and that they look for no place of another's.

The same in Python, where the law does all of it.
"""

from __future__ import annotations

import functools
import gc
import itertools
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis
from support.child_client import LONG, NAME, QUEUE, SOON, held, queued, until, wait_with
from support.faces import Face
from support.faultproxy import FaultProxy, replace, stall, swallow

from fastlock._errors import LockNotOwnedError, ResponseError
from fastlock._protocol import local_queue
from fastlock._protocol.acquire import Acquire
from fastlock._protocol.lease import now
from fastlock._transport import parker, sync, waiting
from fastlock.embedded import Server

pytestmark = [
    pytest.mark.usefixtures("no_leaks", "no_waiters"),
    pytest.mark.parametrize("face", ["threads"], indirect=True),
    pytest.mark.parametrize("server", ["valkey", "floor"], indirect=True),
]
COMPILED: Any = parker  # which shows more than its twin in Python
FAULTS = {
    "lost": swallow(),
    "forgotten": replace(b"-NOSCRIPT No matching script.\r\n"),
    "odd": replace(b":5\r\n"),
    "odd list": replace(b"*3\r\n:1\r\n$1\r\nx\r\n:0\r\n"),
    "refused": replace(b"-ERR no\r\n"),
}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was asked the long way, of any client."""
    steps: list[Any] = []
    ask = sync.SyncTransport._execute
    monkeypatch.setattr(
        sync.SyncTransport, "_execute", lambda transport, step: steps.append(step) or ask(transport, step)
    )
    return steps


async def listening(face: Face, proxy: FaultProxy, other: Any, probe: redis.Redis, **terms: Any) -> Any:
    """A client through the proxy that has a connection for messages: who waits there needs no other way."""
    client = face.client(proxy.url, **{"reply_timeout": LONG, **terms})
    holder = await held(face, other)
    lock, job = wait_with(face, client)
    await queued(face, probe, 1)
    await face.get(holder.release())
    assert await job.get(SOON) is True
    await face.get(lock.release())
    return client


async def test_who_waits_asks_and_is_granted_in_two_looks(
    face: Face, proxy: FaultProxy, server: Server, probe: redis.Redis, no_look: None, asked: list[Any]
) -> None:
    other = face.client(server.unix_url)
    client = await listening(face, proxy, other, probe)
    holder = await held(face, other)
    asked.clear()
    before = client.get_stats()["commands"]
    lock, job = wait_with(face, client)
    await queued(face, probe, 1)
    await face.get(holder.release())
    assert await job.get(SOON) is True
    assert client.get_stats()["commands"] == before + 3, "SET, and two looks"
    assert [ask for ask in asked if ask.needs_push] == [], "the fast path sends them"
    await face.get(lock.release())
    assert client.get_stats()["remote_handovers"] == 2


@pytest.mark.parametrize("look", ["first", "second"])
@pytest.mark.parametrize("fault", FAULTS)
async def test_a_look_that_meets_a_fault_is_for_the_law_to_judge(
    face: Face, proxy: FaultProxy, server: Server, probe: redis.Redis, no_look: None, fault: str, look: str
) -> None:
    other = face.client(server.unix_url)
    client = await listening(face, proxy, other, probe)
    holder = await held(face, other)
    if look == "first":
        armed = proxy.arm(FAULTS[fault], command="EVALSHA")
    lock, job = wait_with(face, client)
    if look == "second":
        await queued(face, probe, 1)
        armed = proxy.arm(FAULTS[fault], command="EVALSHA")
        await face.get(holder.release())
    armed.wait()
    if fault == "refused":
        with pytest.raises(ResponseError, match="no"):
            await job.get(SOON)
        await queued(face, probe, 0)
    elif look == "first":
        await queued(face, probe, 1)
    if look == "first":
        await face.get(holder.release())
    if fault != "refused":
        assert await job.get(SOON) is True and lock.lease.valid
        assert probe.get(NAME) == lock.lease._raw_token
        await face.get(lock.release())
    if fault in ("lost", "odd", "odd list"):  # what broke is ended before the same place is asked for again
        ((_, then),) = [
            pair
            for connection in proxy.connections
            for pair in itertools.pairwise(connection.commands)
            if pair[0][:2] == [b"CLIENT", b"KILL"]
        ]
        assert then[0] == b"EVALSHA" and NAME.encode() in then
    await until(face, lambda: not probe.exists(NAME), "all of it was given back")


async def test_a_look_that_comes_back_after_the_callers_time_leaves_the_queue(
    face: Face, proxy: FaultProxy, server: Server, probe: redis.Redis, no_look: None
) -> None:
    other = face.client(server.unix_url)
    client = await listening(face, proxy, other, probe)
    holder = await held(face, other)
    armed = proxy.arm(stall(), command="EVALSHA")
    _, job = wait_with(face, client, blocking_timeout=0.2)
    armed.wait()
    assert await job.get(SOON) is False
    armed.resume()
    await queued(face, probe, 0)
    await face.get(holder.release())


async def test_a_grant_that_comes_back_after_its_lease_is_asked_for_again(
    face: Face, proxy: FaultProxy, server: Server, probe: redis.Redis, no_look: None
) -> None:
    other = face.client(server.unix_url)
    client = await listening(face, proxy, other, probe)
    holder = await held(face, other)
    lock, job = wait_with(face, client, timeout=0.1)
    await queued(face, probe, 1)
    armed = proxy.arm(stall(), command="EVALSHA")
    await face.get(holder.release())
    armed.wait()
    await until(face, lambda: not probe.exists(NAME), "the end of the lease")
    armed.resume()
    assert await job.get(SOON) is True and client.get_stats()["late_grants"] == 1
    try:
        await face.get(lock.release())
    except LockNotOwnedError:  # on a machine that was busy elsewhere for the tenth of a second
        assert not probe.exists(NAME)


class Struck(Exception):
    """What a handler of signals raises."""


async def test_a_signal_reaches_the_main_thread_asleep_behind_another(
    face: Face, server: Server, probe: redis.Redis, no_look: None
) -> None:
    """Its handler runs at once; where that raises, the thread is gone from among those who wait."""
    holder, client = await held(face, face.client(server.unix_url)), face.client(server.unix_url)
    first, job = wait_with(face, client)
    await queued(face, probe, 1)
    (queue,) = client._transport.queues.by_key.values()
    main, hits, slept, hurt = threading.get_ident(), list[int](), list[bool](), threading.Event()
    deadline = now() + SOON

    def strike() -> None:
        for hit in range(2):
            while now() < deadline and len(hits) == hit:
                with client._transport.queues.mutex:
                    asleep = [waiter.on_wake is not None for waiter in queue.waiters]
                if len(asleep) == 2 and all(asleep):
                    slept.append(True)
                    hurt.clear()
                    signal.pthread_kill(main, signal.SIGUSR1)
                    hurt.wait(0.1)  # else it struck on the way from the interpreter to the sleep: once more

    def handle(*args: Any) -> None:
        hits.append(1)
        hurt.set()
        if len(hits) == 2:
            raise Struck

    before, thread = signal.signal(signal.SIGUSR1, handle), threading.Thread(target=strike, daemon=True)
    thread.start()
    try:
        with pytest.raises(Struck):
            client.lock(NAME, timeout=30, blocking_timeout=2 * SOON).acquire()
    finally:
        thread.join(SOON)
        signal.signal(signal.SIGUSR1, before)
    assert len(hits) == 2 <= len(slept) and len(queue.waiters) == 1
    await face.get(holder.release())
    assert await job.get(SOON) is True and not queue.waiters
    await face.get(first.release())


class Ticks:
    """Seconds between two looks, which say how often they were asked for."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.asked = seconds, 0

    def __float__(self) -> float:
        self.asked += 1
        return self.seconds

    def __radd__(self, time: float) -> float:
        return time + float(self)


async def test_who_is_not_first_has_no_look_at_anothers_place_in_hand(
    face: Face, server: Server, probe: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second wakes by its clock, and is put aside, while the first is granted their place and lets go: with that
    place it would be let in once more, by its token, while the release is under way."""
    other, client = face.client(server.unix_url), face.client(server.unix_url)
    told, inside, most = threading.Event(), list[str](), 0
    ticks = Ticks(0.005)
    make, hand_over = Acquire.enter_request, waiting.hand_over

    def look(op: Any, queue: Any) -> Any:
        made = make(op, queue)
        if threading.current_thread().name == "second" and not told.is_set():
            told.wait(SOON)
        return made

    def slow_hand_over(*words: bytes) -> Any:
        if threading.current_thread().name == "first":
            told.set()
            for _ in range(2000):
                if "second" in inside or probe.zcard(QUEUE) == 2:
                    break
        return hand_over(*words)

    def wakeup(who: str, own: Any, timeout: float) -> None:
        nonlocal most
        with own.lock(NAME, timeout=timeout):
            inside.append(who)
            most = max(most, len(inside))
            if who != "first":
                for _ in range(200):
                    probe.ping()
            inside.remove(who)

    holder = await held(face, other)
    threads = []
    for number, (who, own, timeout) in enumerate([("first", client, 10), ("second", client, 20), ("third", other, 20)]):
        threads.append(threading.Thread(target=wakeup, args=(who, own, timeout), name=who, daemon=True))
        threads[-1].start()
        if who == "second":
            await until(face, lambda: len(client._transport.queues.by_key[NAME.encode()].waiters) == 2, "the second")
        else:
            await queued(face, probe, 1 + (who == "third"))
        if number == 0:
            monkeypatch.setattr(Acquire, "enter_request", look)
            monkeypatch.setattr(waiting, "hand_over", slow_hand_over)
            monkeypatch.setattr(waiting, "RECHECK_SECONDS", ticks)
    await until(face, lambda: ticks.asked > 20, "some ticks")
    await face.get(holder.release())
    for thread in threads:
        thread.join(SOON)
    assert most == 1 and not probe.exists(NAME)


def waiting_in(client: Any) -> int:
    """How many of its threads are in line for the name."""
    return sum(len(queue.waiters) for queue in client._transport.queues.by_key.values())


@pytest.fixture
def naps(impl: str) -> Iterator[Any]:
    """How many were woken early since the test began; in Python nobody is."""
    if impl == "python":
        yield lambda: None
        return
    COMPILED._forget_stalls()
    before, _ = COMPILED._prewakes()
    yield lambda: COMPILED._prewakes()[0] - before
    COMPILED._forget_stalls()


@pytest.mark.parametrize("brisk", [-1.0, 1e9], ids=["none woken early", "all woken early"])
async def test_each_has_its_turn_alone_however_it_is_woken(
    face: Face, server: Server, no_leaks: Any, no_look: None, naps: Any, monkeypatch: pytest.MonkeyPatch, brisk: float
) -> None:
    """Of two clients, with holds of any length, and fences for some."""
    no_leaks.allow("fastlock:fence:*")
    monkeypatch.setattr(local_queue, "RAPID_SECONDS", brisk)
    clients = [face.client(server.unix_url) for _ in range(2)]
    inside, most, fences = list[int](), 0, list[int]()

    def work(number: int) -> int:
        nonlocal most
        draw = random.Random(number)
        lock = clients[number % 2].lock(NAME, timeout=30, blocking_timeout=SOON, fence=number % 3 == 0)
        for _ in range(100):
            assert lock.acquire() and lock.lease is not None
            inside.append(number)
            most = max(most, len(inside))
            if number % 3 == 0:
                fences.append(lock.lease.fence)
            else:
                assert lock.lease.fence is None
            if draw.random() < 0.1:
                time.sleep(draw.random() / 1000)
            inside.remove(number)
            lock.release()
        return 100

    with ThreadPoolExecutor(10) as pool:
        assert sum(pool.map(work, range(10))) == 1000
    assert most == 1 and len(fences) == 400 and fences == sorted(set(fences))
    assert naps() is None or (naps() > 0) == (brisk > 0)


@pytest.mark.parametrize("limit", [None, 1.0], ids=["endless", "limited"])
async def test_who_was_woken_early_sleeps_on_where_the_one_before_it_takes_its_time(
    face: Face,
    server: Server,
    probe: redis.Redis,
    no_look: None,
    naps: Any,
    monkeypatch: pytest.MonkeyPatch,
    limit: float | None,
) -> None:
    """Until the lease passes to it, or its own time is over."""
    monkeypatch.setattr(local_queue, "RAPID_SECONDS", 1e9)
    client = face.client(server.unix_url)
    holder, waiting = await held(face, client), list[Any]()
    for number, end in enumerate((None, None, limit)):
        waiting.append(wait_with(face, client, blocking_timeout=end))
        await until(face, lambda: waiting_in(client) > number, "the next one")  # noqa: B023
        await queued(face, probe, 1)  # the client's place: from then on it listens
    (first, one), (second, two), (third, three) = waiting
    await face.get(holder.release())
    assert await one.get(SOON) is True
    await face.get(first.release())
    assert await two.get(SOON) is True
    time.sleep(0.005)  # a turn that is long for whoever was woken early
    if limit is None:
        await face.get(second.release())
        assert await three.get(SOON) is True
        await face.get(third.release())
    else:
        assert await three.get(SOON) is False and second.owned()
        await face.get(second.release())


def test_after_a_stall_nobody_is_woken_early_for_twice_as_long_each_time(impl: str, naps: Any) -> None:
    if impl == "python":
        assert not hasattr(parker, "_stalled"), "in Python nobody is woken early"
        return
    pauses = []
    for late in (499_999, *[500_001] * 12):
        COMPILED._stalled(late)
        pauses.append(COMPILED._prewakes()[1])
    assert pauses == [0, *(min(10.0, 0.01 * 2**number) for number in range(12))]


QUEUES = {NAME: QUEUE, "b": "fastlock:queue:{b}"}


async def listeners(face: Face, client: Any, probe: redis.Redis, *times: float | None) -> list[tuple[Any, Any]]:
    """A caller for each of two names that are held elsewhere: one of them reads, the other one listens beside it."""
    pairs = []
    for (name, queue), seconds in itertools.zip_longest(QUEUES.items(), times):
        lock = client.lock(name, timeout=LONG, sleep=LONG, thread_local=False, blocking_timeout=seconds)
        pairs.append((lock, face.start(lock.acquire)))
        await until(face, functools.partial(probe.exists, queue), f"queued for {name}")
    return pairs


async def both_held(face: Face, client: Any) -> dict[str, Any]:
    locks = {name: client.lock(name, timeout=LONG, thread_local=False) for name in QUEUES}
    for lock in locks.values():
        assert await face.get(lock.acquire(blocking=False))
    return locks


async def test_who_listens_beside_another_reads_on_after_it(
    face: Face, server: Server, probe: redis.Redis, no_look: None
) -> None:
    draw, other, client = random.Random(5), face.client(server.unix_url), face.client(server.unix_url)
    before = 0
    for wakeup in range(30):
        holders = await both_held(face, other)
        for lock, job in draw.sample(await listeners(face, client, probe), 2):
            await face.get(holders[lock.name].release())
            assert await job.get(SOON) is True
            await face.get(lock.release())
        gc.collect()
        pending_replies = sum(type(each) is client._transport.impl.PendingReply for each in gc.get_objects())
        before = before or pending_replies
        assert pending_replies <= before, f"who has gone is listened for still, after {wakeup} turns"
    assert not probe.exists(*QUEUES)


async def test_who_listens_gives_up_in_time_whether_it_reads_or_not(
    face: Face, server: Server, proxy: FaultProxy, probe: redis.Redis, no_look: None
) -> None:
    other = face.client(server.unix_url)
    client = await listening(face, proxy, other, probe)
    holders = await both_held(face, other)
    for _, job in await listeners(face, client, probe, 0.2, 0.2):
        assert await job.get(SOON) is False
    await until(face, lambda: not probe.exists(*QUEUES.values()), "both have left the queue")
    (lock, reads), (_, sleeps) = await listeners(face, client, probe, None, 0.2)
    assert await sleeps.get(SOON) is False
    for holder in holders.values():
        await face.get(holder.release())
    assert await reads.get(SOON) is True
    await face.get(lock.release())
