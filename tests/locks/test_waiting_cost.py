"""What waiting may cost at most: requests to the server, local queues that are kept, a thread that would deadlock."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import redis
from support import nested
from support.apis import Api
from support.child_client import LONG, NAME, SOON, held, queued, until, wait_with, waits
from support.faultproxy import FaultProxy, stall
from support.run_steps import Clock, joined

from fastlock._protocol.lease import Lease
from fastlock._protocol.local_queue import RECHECK_SECONDS, LocalQueues, ReleaseRoute
from fastlock._protocol.moments import LEAST_MOMENT
from fastlock._protocol.waiters import Waiter
from fastlock.embedded import Server

MS = 10_000


@pytest.fixture
def queues(impl: str) -> LocalQueues:
    return LocalQueues(contextlib.nullcontext())


def join(queues: LocalQueues, count: int, ms: int = MS, sleep: float = 0.1) -> list[Waiter]:
    return [joined(queues, "name", b"name", ms, False, None, sleep) for _ in range(count)]


def grant(queues: LocalQueues, waiter: Waiter, clock: Clock, remote_waiters: int = 0) -> Lease:
    """The server grants the name to this waiter, the first."""
    assert queues.may_enter_now(waiter, clock())
    end = clock() + waiter.ms / 1000 if waiter.ms else math.inf
    lease = Lease(waiter.name, waiter.queue.key, waiter.queue.entry, end)
    lease._contended = remote_waiters > 0
    waiter.queue.note_granted(waiter, lease, remote_waiters, clock())
    return lease


def empty(queues: LocalQueues) -> bool:
    return not queues.by_key and not queues.by_entry


# -------------------------------------------------------------------------------------------------- by the test's clock


def recheck_after(queues: LocalQueues, first: Waiter, clock: Clock, told: bool) -> float:
    """The server tells the first waiter to wait for long; returns the seconds until the waiter enters again."""
    assert queues.may_enter_now(first, clock())
    first.queue.note_queued(math.inf, told, 0, clock(), clock())
    return first.queue.recheck_time(first) - clock()


def test_shortest_sleep_of_a_client_sets_the_recheck_of_the_first(queues: LocalQueues, clock: Clock) -> None:
    (first,) = join(queues, 1, sleep=5.0)
    assert recheck_after(queues, first, clock, told=False) == pytest.approx(5.0)
    (long_sleep,) = join(queues, 1, sleep=7.0)
    assert not first.woken
    (short_sleep,) = join(queues, 1, sleep=0.25)
    assert [each.woken for each in (first, long_sleep, short_sleep)] == [True, False, False], (
        "only the first is woken, as its sleep is longer"
    )
    assert recheck_after(queues, first, clock, told=False) == pytest.approx(0.25)
    join(queues, 1, sleep=0.25)
    assert not first.woken, "the first rechecks as often already"
    for waiter in list(first.queue.waiters)[2:]:
        queues.dequeue(waiter, clock())
    assert recheck_after(queues, first, clock, told=False) == pytest.approx(5.0), "a waiter that left has no influence"
    assert recheck_after(queues, first, clock, told=True) == pytest.approx(LEAST_MOMENT)
    join(queues, 1, sleep=0.25)
    assert not first.woken, "a waiter that gets messages need not poll"


@pytest.mark.parametrize("ms", [0, MS, 3_600_000])
@pytest.mark.parametrize("remote_waiters", [0, 1])
def test_lease_that_is_not_released_keeps_no_local_queue(
    queues: LocalQueues, clock: Clock, ms: int, remote_waiters: int
) -> None:
    """Later callers ask the server; a release that comes after all knows of no waiter."""
    (one,) = join(queues, 1, ms)
    lease = grant(queues, one, clock, remote_waiters)
    queues.expire(clock())
    assert not empty(queues), "the queue stays while the lease can be handed over locally"
    clock.go(RECHECK_SECONDS)
    queues.expire(clock())
    assert empty(queues)
    assert queues.release(lease, clock()) == ReleaseRoute.DELETE
    assert lease._contended == (remote_waiters > 0), (
        "a release has to use the script if other clients waited at the grant"
    )


def test_lease_with_a_waiter_keeps_its_local_queue(queues: LocalQueues, clock: Clock) -> None:
    one, two = join(queues, 2, 0)
    lease = grant(queues, one, clock)
    clock.go(10 * RECHECK_SECONDS)
    queues.expire(clock())
    assert two.woken and queues.by_key == {b"name": two.queue}
    assert queues.release(lease, clock()) == ReleaseRoute.SCRIPT


# ----------------------------------------------------------------------------------------------------- on a real server


async def test_zero_sleep_makes_no_busy_loop(api: Api, server: Server, probe: redis.Redis, no_recheck: None) -> None:
    """However short `sleep` is, a waiter asks at most once per millisecond, with every other command counted."""
    client = api.client(server.unix_url)
    await api.get(client.server_info())
    before = client.get_stats()["commands"]
    probe.set(NAME, "somebody else", px=300)
    lock = client.lock(NAME, sleep=0)
    assert await api.get(lock.acquire())
    assert client.get_stats()["commands"] - before < 300 + 10
    await api.get(lock.release())


@pytest.mark.parametrize("sleep", [0.01, 0])
async def test_short_sleep_is_not_delayed_by_an_earlier_waiter(
    api: Api, server: Server, probe: redis.Redis, sleep: float
) -> None:
    """Not for longer than a second, after which a thread that listens rechecks in any case."""
    client = api.client(server.unix_url)
    probe.set(NAME, "somebody else")
    first = wait_with(api, client, sleep=LONG)
    await queued(api, probe, 1)
    second = wait_with(api, client, sleep=sleep)
    await waits(api, client, 2)
    enough = client.get_stats()["commands"] + 30
    await until(api, lambda: client.get_stats()["commands"] >= enough, "30 commands")
    probe.delete(NAME)
    for lock, job in (first, second):
        assert await job.get(SOON) is True
        await api.get(lock.release())


@pytest.mark.parametrize("server", ["valkey"], indirect=True)
async def test_lease_without_timeout_keeps_no_state_in_its_client(api: Api, server: Server, probe: redis.Redis) -> None:
    """A waiter that was handed the lease keeps it; soon its client has no local queue for it any more. A waiter of
    another client gets the lock nonetheless, once it is released."""
    client, other = api.client(server.unix_url), api.client(server.unix_url)
    holder = await held(api, other)
    lock, job = wait_with(api, client, timeout=None)
    await queued(api, probe, 1)
    await api.get(holder.release())
    assert await job.get(SOON) is True and client._transport.queued_keys

    end = time.monotonic() + SOON
    while client._transport.queued_keys:
        assert time.monotonic() < end, "the lease still has its local queue"
        free = client.lock("another name")
        assert await api.get(free.acquire())
        await api.get(free.release())
    behind, waiting = wait_with(api, other)
    await queued(api, probe, 1)
    await api.get(lock.release())
    assert await waiting.get(SOON) is True
    await api.get(behind.release())


# -------------------------------------------------------------------------------- a thread that uses the stream already


def send_signal(armed: Any, ran: threading.Event) -> None:
    """Send the main thread a signal, once the fault that was `armed` has happened, until its handler has `ran`: CPython
    runs none for a signal that comes just before the thread sleeps."""
    armed.wait()
    while not ran.is_set():
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        ran.wait(0.1)


@pytest.mark.parametrize("api", ["threads"], indirect=True)
@pytest.mark.parametrize("connections", [1, 2])
@pytest.mark.parametrize("what", ["acquire", "release", "wait", "many"])
async def test_signal_handler_does_not_wait_for_the_interrupted_thread(
    api: Api, proxy: FaultProxy, probe: redis.Redis, connections: int, what: str, no_leaks: Any
) -> None:
    """The interrupted thread would have to read the reply, but cannot go on. With another connection the call works,
    otherwise it raises an error."""
    client = api.client(proxy.url, max_connections=connections, reply_timeout=LONG / 2)
    main, mine, contended = client.lock(NAME), client.lock("mine"), client.lock("held", sleep=0.01)
    outcome: list[Any] = []
    mine.acquire()
    if what == "wait":
        probe.set("held", "somebody else", px=50)
    calls: dict[str, Callable[[], Any]] = {
        "acquire": lambda: client.lock("free", thread_local=False).acquire(blocking=False),
        "release": mine.release,
        "wait": contended.acquire,
        "many": lambda: client.acquire_many(["free"]),
    }

    ran = threading.Event()

    def handler(*_: Any) -> None:
        if ran.is_set():
            return
        ran.set()
        try:
            outcome.append(calls[what]())
        except Exception as error:
            outcome.append(f"{type(error).__name__}: {error}")
        armed.resume()

    before = signal.signal(signal.SIGUSR1, handler)
    armed = proxy.arm(stall(), after=b"\r\nsku\r\n", times=1)
    sender = threading.Thread(target=send_signal, args=(armed, ran))
    try:
        sender.start()
        assert main.acquire(), "the acquire goes on after the handler"
    finally:
        sender.join()
        signal.signal(signal.SIGUSR1, before)
    main.release()
    found = outcome.pop()
    gc.collect()  # frees the frames of the error, and with them the one that the handler interrupted
    if connections == 1:
        assert str(found).startswith("RuntimeError: ") and "max_connections" in found
        if what == "release":  # carried out behind the command that the handler interrupted
            assert not mine.lease.valid and not probe.exists("mine")
        else:
            assert mine.lease.valid and probe.exists("mine"), "the handler's error is another lock's"
        mine.release()
    else:
        assert type(found) is not str, found
    if what != "release" and connections > 1:
        mine.release()
    if contended.lease is not None:
        contended.release()
    probe.delete("free", "held")
    assert empty(client._transport.queues)


@pytest.mark.parametrize("api", ["threads"], indirect=True)
async def test_signal_handler_does_not_wait_for_a_connection_that_its_own_thread_opens(
    api: Api, proxy: FaultProxy
) -> None:
    client, outcome, ran = api.client(proxy.url, max_connections=1), [], threading.Event()

    def handler(*_: Any) -> None:
        if ran.is_set():
            return
        ran.set()
        try:
            outcome.append(client.lock("free").acquire())
        except RuntimeError as error:
            outcome.append(str(error))
        armed.resume()

    before = signal.signal(signal.SIGUSR1, handler)
    armed = proxy.arm(stall(), command="HELLO", times=1)
    sender = threading.Thread(target=send_signal, args=(armed, ran))
    try:
        sender.start()
        assert client.lock(NAME).acquire(), "it goes on after the handler"
    finally:
        sender.join()
        signal.signal(signal.SIGUSR1, before)
    assert "max_connections" in outcome[0]


@pytest.mark.parametrize("server", ["valkey"], indirect=True)
@pytest.mark.parametrize("connections", [1, pytest.param(16, marks=pytest.mark.long)])
def test_no_thread_stalls_while_signal_handlers_use_locks(server: Server, impl: str, connections: int) -> None:
    """Handlers run at random moments of their thread, also while it holds a mutex that a reader of replies needs."""
    report = nested.report(server.unix_url, connections, 3)
    assert (report["implementation"], report["stalls"], report["wrong"], report["left"]) == (impl, 0, [], [])
    assert report["strikes"] > 100 and (connections == 1 or not report["refused"]), report


@pytest.mark.parametrize("api", ["threads"], indirect=True)
async def test_signal_handler_may_wait_and_give_up_repeatedly(
    api: Api, proxy: FaultProxy, probe: redis.Redis, no_leaks: Any
) -> None:
    """The connection on which the handler listened may then be the one that its thread uses; so another one listens."""
    client, found = api.client(proxy.url, reply_timeout=LONG / 2), []
    main, contended = client.lock(NAME), client.lock("held")
    holder = api.client(proxy.url).lock("held", thread_local=False)
    holder.acquire()

    def handler(*_: Any) -> None:
        if ran.is_set():
            return
        ran.set()
        try:
            found.append(contended.acquire(blocking_timeout=0.02))
        except Exception as error:
            found.append(repr(error))
        armed.resume()

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        for count in range(5):
            ran = threading.Event()
            armed = proxy.arm(stall(), after=b"\r\nsku\r\n", times=1)
            sender = threading.Thread(target=send_signal, args=(armed, ran))
            sender.start()
            assert main.acquire(), "the acquire goes on after the handler"
            sender.join()
            main.release()
            assert found == [False] * (count + 1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    holder.release()
    assert empty(client._transport.queues)


@pytest.mark.parametrize("api", ["threads"], indirect=True)
async def test_who_waits_in_a_coroutine_by_a_client_for_threads_is_told(
    api: Api, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """Once a client, and not who waits in a thread beside."""
    holder = await held(api, api.client(server.unix_url))
    client = api.client(server.unix_url)

    async def handle() -> bool:
        return bool(client.lock(NAME, blocking_timeout=0.05).acquire())

    while not client.get_stats()["waits"]:  # its time may pass before it waits
        assert client.lock(NAME, blocking_timeout=0.05).acquire() is False
    assert not caplog.records
    while not caplog.records:
        assert asyncio.run(handle()) is False
    assert asyncio.run(handle()) is asyncio.run(handle()) is False
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "in a coroutine" in record.getMessage()
    await api.get(holder.release())
