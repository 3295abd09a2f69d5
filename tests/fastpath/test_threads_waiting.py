"""Threads that wait in the fast path: what their enters meet, and that none enters by the entry of another.

The same in Python, where the slow path does all of it.
"""

from __future__ import annotations

import functools
import gc
import itertools
import random
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis
from support.apis import Api
from support.child_client import LONG, NAME, QUEUE, SOON, confirmed, held, queued, until, wait_with
from support.faultproxy import FaultProxy, replace, stall, swallow

from fastlock._errors import LockNotOwnedError, ResponseError
from fastlock._protocol import local_queue
from fastlock._protocol.acquire import Acquire
from fastlock._protocol.lease import now
from fastlock._transport import sync, waiting
from fastlock._transport.parker import Parking
from fastlock.embedded import Server

pytestmark = [
    pytest.mark.usefixtures("no_leaks", "no_waiters"),
    pytest.mark.parametrize("api", ["threads"], indirect=True),
    pytest.mark.parametrize("server", ["valkey", "floor"], indirect=True),
]
FAULTS = {
    "lost": swallow(),
    "forgotten": replace(b"-NOSCRIPT No matching script.\r\n"),
    "odd": replace(b":5\r\n"),
    "odd list": replace(b"*3\r\n:1\r\n$1\r\nx\r\n:0\r\n"),
    "refused": replace(b"-ERR no\r\n"),
}


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The requests that any client sent by the slow path."""
    sent: list[Any] = []
    execute = sync.SyncTransport._execute
    monkeypatch.setattr(
        sync.SyncTransport, "_execute", lambda transport, request: sent.append(request) or execute(transport, request)
    )
    return sent


async def subscribed(api: Api, proxy: FaultProxy, other: Any, probe: redis.Redis, **settings: Any) -> Any:
    """A client through the proxy that has its push connection already, so that its waiters stay in the fast path."""
    client = api.client(proxy.url, **{"reply_timeout": LONG, **settings})
    holder = await held(api, other)
    lock, job = wait_with(api, client)
    await queued(api, probe, 1)
    await api.get(holder.release())
    assert await job.get(SOON) is True
    await confirmed(api, lock)
    await api.get(lock.release())
    return client


async def test_a_waiter_joins_and_confirms(
    api: Api, proxy: FaultProxy, server: Server, probe: redis.Redis, no_recheck: None, requests: list[Any]
) -> None:
    other = api.client(server.unix_url)
    client = await subscribed(api, proxy, other, probe)
    holder = await held(api, other)
    requests.clear()
    before = client.get_stats()["commands"]
    lock, job = wait_with(api, client)
    await queued(api, probe, 1)
    await api.get(holder.release())
    assert await job.get(SOON) is True
    assert client.get_stats()["commands"] == before + 2, "it joins at once, as others wanted the name just now"
    assert [request for request in requests if request.needs_push] == [], "the fast path sends them"
    await api.get(lock.release())
    assert client.get_stats()["remote_handovers"] == 2


@pytest.mark.parametrize("enter", ["first", "second"])
@pytest.mark.parametrize("fault", FAULTS)
async def test_an_enter_that_meets_a_fault_is_left_to_the_slow_path(
    api: Api, proxy: FaultProxy, server: Server, probe: redis.Redis, no_recheck: None, fault: str, enter: str
) -> None:
    other = api.client(server.unix_url)
    client = await subscribed(api, proxy, other, probe)
    holder = await held(api, other)
    if enter == "first":
        armed = proxy.arm(FAULTS[fault], command="EVALSHA")
    lock, job = wait_with(api, client, auto_renew=True)  # so that it believes no message
    if enter == "second":
        await queued(api, probe, 1)
        armed = proxy.arm(FAULTS[fault], command="EVALSHA")
        await api.get(holder.release())
    armed.wait()
    if fault == "refused":
        with pytest.raises(ResponseError, match="no"):
            await job.get(SOON)
        await queued(api, probe, 0)
    elif enter == "first":
        await queued(api, probe, 1)
    if enter == "first":
        await api.get(holder.release())
    if fault != "refused":
        assert await job.get(SOON) is True and lock.lease.valid
        assert probe.get(NAME) == lock.lease._raw_token
        await api.get(lock.release())
    if fault in ("lost", "odd", "odd list"):  # the broken connection is ended before the same entry is sent again
        ((_, then),) = [
            pair
            for connection in proxy.connections
            for pair in itertools.pairwise(connection.commands)
            if pair[0][:2] == [b"CLIENT", b"KILL"]
        ]
        assert then[0] == b"EVALSHA" and NAME.encode() in then
    await until(api, lambda: not probe.exists(NAME), "the lease was released")


async def test_an_enter_answered_after_the_callers_time_leaves_the_queue(
    api: Api, proxy: FaultProxy, server: Server, probe: redis.Redis, no_recheck: None
) -> None:
    other = api.client(server.unix_url)
    client = await subscribed(api, proxy, other, probe)
    holder = await held(api, other)
    armed = proxy.arm(stall(), command="EVALSHA")
    _, job = wait_with(api, client, blocking_timeout=0.2)
    armed.wait()
    assert await job.get(SOON) is False
    armed.resume()
    await queued(api, probe, 0)
    await api.get(holder.release())


async def test_a_grant_answered_after_its_lease_is_entered_for_again(
    api: Api, proxy: FaultProxy, server: Server, probe: redis.Redis, no_recheck: None
) -> None:
    other = api.client(server.unix_url)
    client = await subscribed(api, proxy, other, probe)
    holder = await held(api, other)
    lock, job = wait_with(api, client, timeout=0.1, auto_renew=True)
    await queued(api, probe, 1)
    armed = proxy.arm(stall(), command="EVALSHA")
    await api.get(holder.release())
    armed.wait()
    await until(api, lambda: not probe.exists(NAME), "the end of the lease")
    armed.resume()
    assert await job.get(SOON) is True and client.get_stats()["late_grants"] == 1
    try:
        await api.get(lock.release())
    except LockNotOwnedError:  # on a machine that was busy elsewhere for the tenth of a second
        assert not probe.exists(NAME)


class Struck(Exception):
    """What the signal handler raises."""


def acquire_struck(client: Any, strike: Callable[[], object], handle: Callable[..., object]) -> None:
    """Acquire in the main thread, until the handler of a signal raises Struck, which `strike` sends from a thread."""
    before, thread = signal.signal(signal.SIGUSR1, handle), threading.Thread(target=strike, daemon=True)
    thread.start()
    try:
        with pytest.raises(Struck):
            client.lock(NAME, timeout=30, blocking_timeout=2 * SOON).acquire()
    finally:
        thread.join(SOON)
        signal.signal(signal.SIGUSR1, before)


async def test_a_signal_reaches_the_main_thread_parked_behind_another(
    api: Api, server: Server, probe: redis.Redis, no_recheck: None
) -> None:
    """Its handler runs at once; where that raises, the thread leaves the local queue."""
    holder, client = await held(api, api.client(server.unix_url)), api.client(server.unix_url)
    first, job = wait_with(api, client)
    await queued(api, probe, 1)
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
                    hurt.wait(0.1)  # otherwise it came before the thread was parked: once more

    def handle(*args: Any) -> None:
        hits.append(1)
        hurt.set()
        if len(hits) == 2:
            raise Struck

    acquire_struck(client, strike, handle)
    assert len(hits) == 2 <= len(slept) and len(queue.waiters) == 1
    await api.get(holder.release())
    assert await job.get(SOON) is True and not queue.waiters
    await api.get(first.release())


async def test_a_look_that_a_signal_interrupted_may_be_executed_later(
    api: Api, server: Server, proxy: FaultProxy, probe: redis.Redis, no_recheck: None
) -> None:
    """For the next waiter, who asked for another lease: its session is ended before that one's is sent over another."""
    holder, client = await held(api, api.client(server.unix_url)), api.client(proxy.url)
    await api.get(client.server_info())
    armed = proxy.arm(stall("request"), after=QUEUE.encode())
    main, others = threading.get_ident(), list[Any]()
    deadline, hit = now() + SOON, threading.Event()

    def strike() -> None:
        armed.wait()
        others.append(wait_with(api, client))
        (queue,) = client._transport.queues.by_key.values()
        while now() < deadline and not hit.is_set():
            if queue.waiters.count == 2:
                signal.pthread_kill(main, signal.SIGUSR1)
                hit.wait(0.1)

    def handle(*args: Any) -> None:
        hit.set()
        raise Struck

    acquire_struck(client, strike, handle)
    (queue,) = client._transport.queues.by_key.values()
    assert len(queue.stale) == 1
    armed.resume()
    await api.get(holder.release())
    lock, job = others[0]
    assert await job.get(SOON) is True and not queue.stale
    await api.get(lock.release())


class CountedSeconds:
    """Seconds between two rechecks, which count how often they were read."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.reads = seconds, 0

    def __float__(self) -> float:
        self.reads += 1
        return self.seconds

    def __radd__(self, time: float) -> float:
        return time + float(self)


@pytest.mark.fastpath("threads")
async def test_a_waiter_that_is_not_first_sends_no_prepared_enter(
    api: Api, server: Server, probe: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second wakes by its clock, and is stopped, while the first is granted their entry and releases: with an enter
    prepared for that entry the second would be granted by the same token, while the release is under way."""
    other, client = api.client(server.unix_url), api.client(server.unix_url)
    told, inside, most = threading.Event(), list[str](), 0
    seconds = CountedSeconds(0.005)
    make, hand_over = Acquire.enter_request, waiting.hand_over

    def enter_request(op: Any, queue: Any) -> Any:
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

    def hold(who: str, own: Any, timeout: float) -> None:
        nonlocal most
        with own.lock(NAME, timeout=timeout):
            inside.append(who)
            most = max(most, len(inside))
            if who != "first":
                for _ in range(200):
                    probe.ping()
            inside.remove(who)

    holder = await held(api, other)
    threads = []
    for number, (who, own, timeout) in enumerate([("first", client, 10), ("second", client, 20), ("third", other, 20)]):
        threads.append(threading.Thread(target=hold, args=(who, own, timeout), name=who, daemon=True))
        threads[-1].start()
        if who == "second":
            await until(api, lambda: len(client._transport.queues.by_key[NAME.encode()].waiters) == 2, "the second")
        else:
            await queued(api, probe, 1 + (who == "third"))
        if number == 0:
            monkeypatch.setattr(Acquire, "enter_request", enter_request)
            monkeypatch.setattr(waiting, "hand_over", slow_hand_over)
            monkeypatch.setattr(waiting, "RECHECK_SECONDS", seconds)
    await until(api, lambda: seconds.reads > 20, "some rechecks")
    await api.get(holder.release())
    for thread in threads:
        thread.join(SOON)
    assert most == 1 and not probe.exists(NAME)


def waiter_count(client: Any) -> int:
    """How many waiters are in its local queues."""
    return sum(len(queue.waiters) for queue in client._transport.queues.by_key.values())


@pytest.mark.parametrize(
    "rapid_seconds",
    [-1.0, pytest.param(1e9, marks=pytest.mark.fastpath("threads"))],
    ids=["none woken early", "all woken early"],
)
async def test_there_is_one_holder_at_a_time_however_threads_are_woken(
    api: Api,
    server: Server,
    no_leaks: Any,
    no_recheck: None,
    impl: str,
    monkeypatch: pytest.MonkeyPatch,
    rapid_seconds: float,
) -> None:
    """Two clients, holds of any length, and fences for some."""
    no_leaks.allow("fastlock:fence:*")
    monkeypatch.setattr(local_queue, "RAPID_SECONDS", rapid_seconds)
    clients = [api.client(server.unix_url) for _ in range(2)]
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
    if impl == "cython":  # in Python no thread is woken early
        assert any(client._transport.parking.woken for client in clients) == (rapid_seconds > 0)


@pytest.mark.parametrize("limit", [None, 1.0], ids=["endless", "limited"])
async def test_a_thread_woken_early_sleeps_on_until_the_holder_releases(
    api: Api,
    server: Server,
    probe: redis.Redis,
    no_recheck: None,
    monkeypatch: pytest.MonkeyPatch,
    limit: float | None,
) -> None:
    """Or until its own time is over."""
    monkeypatch.setattr(local_queue, "RAPID_SECONDS", 1e9)
    client = api.client(server.unix_url)
    holder, waiting = await held(api, client), list[Any]()
    for number, end in enumerate((None, None, limit)):
        waiting.append(wait_with(api, client, blocking_timeout=end))
        await until(api, lambda: waiter_count(client) > number, "the next one")  # noqa: B023
        await queued(api, probe, 1)  # the client's entry: from then on it has its push connection
    (first, one), (second, two), (third, three) = waiting
    await api.get(holder.release())
    assert await one.get(SOON) is True
    await api.get(first.release())
    assert await two.get(SOON) is True
    time.sleep(0.005)  # a hold that is long for a thread that was woken early
    if limit is None:
        await api.get(second.release())
        assert await three.get(SOON) is True
        await api.get(third.release())
    else:
        assert await three.get(SOON) is False and second.owned()
        await api.get(second.release())


def test_each_stall_doubles_the_time_without_early_wakes(impl: str) -> None:
    if impl == "python":
        pytest.skip("in Python no thread is woken early")
    parking: Any = Parking()
    pauses = []
    for late in (499_999, *[500_001] * 12):
        parking.note_delay(late)
        pauses.append(parking.pause)
    assert pauses == [0, *(min(10_000_000_000, 10_000_000 * 2**number) for number in range(12))]


QUEUES = {NAME: QUEUE, "b": "fastlock:queue:{b}"}


async def two_waiters(api: Api, client: Any, probe: redis.Redis, *times: float | None) -> list[tuple[Any, Any]]:
    """A waiter for each of two names that another client holds: one reads the push connection, the other sleeps."""
    pairs = []
    for (name, queue), seconds in itertools.zip_longest(QUEUES.items(), times):
        lock = client.lock(name, timeout=LONG, sleep=LONG, thread_local=False, blocking_timeout=seconds)
        pairs.append((lock, api.start(lock.acquire)))
        await until(api, functools.partial(probe.exists, queue), f"queued for {name}")
    return pairs


async def both_held(api: Api, client: Any) -> dict[str, Any]:
    locks = {name: client.lock(name, timeout=LONG, thread_local=False) for name in QUEUES}
    for lock in locks.values():
        assert await api.get(lock.acquire(blocking=False))
    return locks


async def test_a_waiter_on_a_shared_push_connection_reads_on_after_another(
    api: Api, server: Server, probe: redis.Redis, no_recheck: None
) -> None:
    draw, other, client = random.Random(5), api.client(server.unix_url), api.client(server.unix_url)
    before = 0
    for repetition in range(30):
        holders = await both_held(api, other)
        for lock, job in draw.sample(await two_waiters(api, client, probe), 2):
            await api.get(holders[lock.name].release())
            assert await job.get(SOON) is True
            await api.get(lock.release())
        gc.collect()
        pending_replies = sum(type(each) is client._transport.impl.PendingReply for each in gc.get_objects())
        before = before or pending_replies
        assert pending_replies <= before, f"a pending reply of a waiter that left stays, after {repetition} repetitions"
    assert not probe.exists(*QUEUES)


async def test_a_waiter_on_a_shared_push_connection_gives_up_in_time(
    api: Api, server: Server, proxy: FaultProxy, probe: redis.Redis, no_recheck: None
) -> None:
    other = api.client(server.unix_url)
    client = await subscribed(api, proxy, other, probe)
    holders = await both_held(api, other)
    for _, job in await two_waiters(api, client, probe, 0.2, 0.2):
        assert await job.get(SOON) is False
    await until(api, lambda: not probe.exists(*QUEUES.values()), "both have left the queue")
    (lock, reads), (_, sleeps) = await two_waiters(api, client, probe, None, 0.2)
    assert await sleeps.get(SOON) is False
    for holder in holders.values():
        await api.get(holder.release())
    assert await reads.get(SOON) is True
    await api.get(lock.release())


async def test_what_was_encoded_for_many_names_is_forgotten(api: Api, server: Server) -> None:
    client = api.client(server.unix_url)
    templates = client._transport.queues.templates
    sizes = []
    for number in range(waiting._MOST_TEMPLATES + 2):
        with client.lock(f"name {number}", fair=True):
            sizes.append(len(templates))
    assert max(sizes) <= waiting._MOST_TEMPLATES
    assert sizes[0] > 0 and sizes[-1] < sizes[-10]  # it fills, and begins anew
