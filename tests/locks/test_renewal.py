"""auto_renew on real servers: a long job keeps its lock, or is told that it is lost before anybody else can have it.

What is due when, and what each reply means: protocol/test_renewal.py. The tests renew far more often than thrice a
lease, so that no slow machine loses one; where a lease is to be lost, nothing hurries.
"""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from typing import Any

import pytest
import redis
from support.apis import Api
from support.child_client import NAME, SOON, until, wait_with, waiters_of, waits
from support.faultproxy import FaultProxy, stall, swallow

import fastlock
import fastlock.asyncio
from fastlock._protocol import commands, local_queue, renewal
from fastlock._protocol.lease import now
from fastlock.embedded import Server

pytestmark = pytest.mark.usefixtures("no_leaks")
tasks_only = pytest.mark.parametrize("api", ["asyncio", "asyncio+uvloop"], indirect=True)
one_server = pytest.mark.parametrize("server", ["valkey"], indirect=True)  # where its kind makes no difference
threads_only = pytest.mark.parametrize("api", ["threads"], indirect=True)
LEASE = 5.0  # seconds: of a lease that is renewed all the time
SHORT = 0.6  # seconds: of a lease that is to be lost


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease is due after a hundredth of its time."""
    monkeypatch.setattr(renewal, "DUE_PART", 0.01)
    monkeypatch.setattr(renewal, "EARLY_PART", 0.001)


async def renewed(api: Api, client: Any, times: int) -> None:
    start = client.get_stats()["renewals"]
    await until(api, lambda: client.get_stats()["renewals"] >= start + times, f"{times} renewals")


def renewing(client: Any, timeout: float = LEASE, **settings: Any) -> Any:
    return client.lock(NAME, timeout, auto_renew=True, **settings)


async def test_a_long_job_keeps_its_lock(api: Api, server: Server, probe: redis.Redis, often: None) -> None:
    client, other = api.client(server.url), api.client(server.url).lock(NAME)
    lock = renewing(client)
    lease = await api.enter(lock)
    end = lease._deadline
    await renewed(api, client, 5)
    assert lease._deadline > end and not lease.lost.is_set()
    assert LEASE * 0.9 < probe.pttl(NAME) / 1000 <= LEASE
    assert await api.get(other.acquire(blocking=False)) is False
    await api.leave(lock)
    assert not probe.exists(NAME) and not lease.lost.is_set()
    assert client.get_stats()["losses"] == 0


async def test_the_lease_is_of_thirty_seconds_unless_it_is_given(api: Api, server: Server, probe: redis.Redis) -> None:
    client = api.client(server.url)
    for lock, seconds in ((client.lock(NAME, auto_renew=True), 30), (client.lock(NAME), 10), (renewing(client), LEASE)):
        async with api.within(lock) as lease:
            assert seconds - 1 < lease.remaining <= seconds and seconds - 1 < probe.pttl(NAME) / 1000 <= seconds


async def test_a_deleted_key_is_told_and_not_created_again(
    api: Api, server: Server, probe: redis.Redis, often: None
) -> None:
    told: list[Any] = []
    client = api.client(server.url)
    lock = renewing(client, on_lost=told.append)
    lease = await api.enter(lock)
    waiting = api.start(lambda: lease.lost.wait(20))
    probe.set(NAME, "another", px=60_000)
    assert await waiting.get() is True and lease.lost.is_set() and not lease.valid
    await until(api, lambda: told, "on_lost")
    assert told == [lease] and probe.get(NAME) == b"another"
    with pytest.raises(fastlock.LockNotOwnedError):
        await api.leave(lock)
    assert told == [lease] and client.get_stats()["losses"] == 1
    probe.delete(NAME)


@one_server
async def test_loss_is_told_before_another_client_can_have_the_lock(
    api: Api, server: Server, proxy: FaultProxy
) -> None:
    """The client is cut off from the server; another one waits for the end of the lease."""
    told: list[float] = []
    lock = renewing(api.client(proxy.url, connect_timeout=0.2), 2, on_lost=lambda lease: told.append(now()))
    other = api.client(server.url).lock(NAME, thread_local=False)
    lease = await api.enter(lock)
    proxy.refuse()
    proxy.cut()

    async def acquire() -> float:
        assert await api.get(other.acquire(blocking_timeout=20))
        return now()

    acquired = await api.start(acquire).get()
    assert lease.lost.is_set() and told and told[0] <= acquired
    proxy.admit()
    with pytest.raises(fastlock.LockError):
        await api.leave(lock)
    await api.get(other.release())


@one_server
async def test_a_cut_of_less_than_the_lease_loses_nothing(
    api: Api, server: Server, proxy: FaultProxy, often: None
) -> None:
    client = api.client(proxy.url)
    lock = renewing(client)
    lease = await api.enter(lock)
    for _ in range(2):
        await renewed(api, client, 2)
        proxy.refuse()
        proxy.cut()
        await until(api, lambda: lease.remaining < LEASE * 0.9, "renewals that are late")
        proxy.admit()
    await renewed(api, client, 2)
    assert not lease.lost.is_set() and lease.valid
    await api.leave(lock)


async def test_a_renewal_whose_reply_is_lost_is_sent_again(api: Api, proxy: FaultProxy, often: None) -> None:
    client = api.client(proxy.url)
    lock = renewing(client)
    lease = await api.enter(lock)
    for _ in range(3):
        armed = proxy.arm(swallow(), command="EVALSHA")
        await until(api, lambda armed=armed: armed.fired, "a renewal whose reply was lost")
        await renewed(api, client, 2)
    assert lease.valid and not lease.lost.is_set()
    await api.leave(lock)


@threads_only  # in asyncio all wait for the one connection, for as long as connect_timeout
@one_server
async def test_a_connection_that_does_not_come_up_is_tried_again(
    api: Api, server: Server, proxy: FaultProxy, often: None
) -> None:
    client = api.client(proxy.url)
    lock = renewing(client)
    lease = await api.enter(lock)
    await renewed(api, client, 2)
    armed = proxy.arm(stall(), command="HELLO", times=1)
    proxy.cut()
    await until(api, lambda: armed.fired, "a handshake that is not answered")
    await renewed(api, client, 2)
    assert lease.valid and not lease.lost.is_set()
    await api.leave(lock)


async def test_scripts_that_the_server_has_forgotten(api: Api, server: Server, probe: redis.Redis, often: None) -> None:
    client = api.client(server.url)
    lock = renewing(client)
    await api.enter(lock)
    for _ in range(3):
        probe.script_flush()
        await renewed(api, client, 2)
    await api.leave(lock)


async def test_many_leases_are_renewed_in_few_commands(api: Api, server: Server, probe: redis.Redis) -> None:
    """All that one period costs: a command for 128 leases."""
    client = api.client(server.url)
    probe.script_load(commands.RENEW_MANY_LUA.text)
    locks = [client.lock(f"{NAME}{i}", 30, auto_renew=True) for i in range(300)]
    for lock in locks:
        await api.get(lock.acquire())
    before = client.get_stats()
    for lock in locks:  # as if ten seconds had passed
        lock.lease._deadline -= 10
        lock.lease._renewal.added[lock.lease._renewal] = None
    client._transport.wake_renewal(-1.0)
    await renewed(api, client, 300)
    assert client.get_stats()["commands"] - before["commands"] == 3
    assert min(lock.lease.remaining for lock in locks) > 25
    for lock in locks:
        await api.get(lock.release())


@one_server
async def test_max_hold_ends_renewal(
    api: Api, server: Server, probe: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    client = api.client(server.url)
    lock = renewing(client, SHORT, max_hold=0.3)
    lease = await api.enter(lock)
    waiting = api.start(lambda: lease.lost.wait(20))
    assert await waiting.get() is True
    await until(api, lambda: not probe.exists(NAME), "the end of the lease")
    with pytest.raises(fastlock.LockNotOwnedError):
        await api.leave(lock)
    assert len(caplog.records) == client.get_stats()["losses"] == 1, "a loss is told once"


@one_server
@pytest.mark.parametrize("kind", ["lock", "reentrant_lock", "rw_lock", "semaphore", "multi_lock"])
async def test_a_loss_that_was_told_is_counted_once(
    kind: str, api: Api, server: Server, probe: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    client = api.client(server.url)
    settings: dict[str, Any] = {"auto_renew": True, "timeout": SHORT, "max_hold": 0.1}
    made = getattr(client, kind)([NAME] if kind == "multi_lock" else NAME, *[2] * (kind == "semaphore"), **settings)
    lock = made.write if kind == "rw_lock" else made
    lease = await api.enter(lock)
    assert await api.get(lease.lost.wait(20)) is True
    await until(api, lambda: not probe.exists(NAME), "the end of the lease")
    with pytest.raises(fastlock.LockNotOwnedError):
        await api.leave(lock)
    assert len(caplog.records) == client.get_stats()["losses"] == 1


@threads_only
async def test_on_lost_of_a_client_for_threads_is_not_awaited(api: Api, server: Server) -> None:
    async def tell(lease: Any) -> None: ...

    client = api.client(server.url)
    for make in (client.lock, client.reentrant_lock, client.rw_lock, lambda *a, **b: client.semaphore(*a, 2, **b)):
        with pytest.raises(TypeError, match=r"tell is async: give it to a fastlock\.asyncio\.Client"):
            make(NAME, auto_renew=True, on_lost=tell)


@one_server
async def test_waiting_for_a_loss_ends_with_the_release(api: Api, server: Server) -> None:
    client = api.client(server.url)
    lock = renewing(client)
    lease = await api.enter(lock)
    assert await api.get(lease.lost.wait(0.01)) is False
    waiting = [api.start(lambda: lease.lost.wait()) for _ in range(3)]
    await until(api, lambda: len(waiters_of(lease)) == 3, "three that wait")
    await api.leave(lock)
    assert [await job.get() for job in waiting] == [False] * 3
    (again,) = await api.get(client.acquire_many([NAME]))
    with pytest.raises(fastlock.LockError, match="auto_renew=True"):
        again.lost  # noqa: B018
    await api.get(client.release_many([again]))


async def test_leases_released_in_a_batch_are_renewed_no_more(api: Api, server: Server) -> None:
    client = api.client(server.url)
    locks = [client.lock(f"{NAME}{i}", LEASE, auto_renew=True) for i in range(3)]
    leases = [await api.enter(lock) for lock in locks]
    assert await api.get(client.release_many(leases)) == [True] * 3
    assert all(lease._renewal.over and not lease.lost.is_set() for lease in leases)
    assert not client._transport.renewals.added


@threads_only
@one_server
@pytest.mark.parametrize("lost", [False, True], ids=["held", "lost"])
@pytest.mark.parametrize("first", ["release", "release_many"])
async def test_of_two_releases_at_the_same_time_the_last_to_be_answered_tells_a_loss(
    api: Api, proxy: FaultProxy, probe: redis.Redis, first: str, lost: bool
) -> None:
    client, told = api.client(proxy.url), []
    lock = renewing(client, timeout=60, thread_local=False, on_lost=told.append)
    lease = await api.enter(lock)
    if lost:
        probe.delete(NAME)
    calls = {"release": lock.release, "release_many": lambda: client.release_many([lease])[0]}
    armed = proxy.arm(stall(), command="DELIFEQ", times=1)
    slow = api.start(calls.pop(first))
    await until(api, lambda: armed.fired, "the first release")
    ((second, call),) = calls.items()
    if second == "release":
        with pytest.raises(fastlock.LockNotOwnedError):
            call()
    else:
        assert call() is False
    assert not (lease.lost.is_set() or told or client.get_stats()["losses"])
    armed.resume()
    if first == "release_many":
        assert await slow.get() is not lost
    elif lost:
        with pytest.raises(fastlock.LockNotOwnedError):
            await slow.get()
    else:
        await slow.get()
    client.close()
    assert lease.lost.is_set() is lost
    assert len(told) == client.get_stats()["losses"] == lost


async def test_the_next_holder_within_the_client_is_renewed_on(
    api: Api, server: Server, probe: redis.Redis, often: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_queue, "LOCAL_SECONDS", 3600.0)
    monkeypatch.setattr(local_queue, "LEAST_LEASE_PART", 0.5)
    client = api.client(server.url)
    settings = {"timeout": LEASE, "auto_renew": True, "thread_local": False}
    blocker = api.client(server.url).lock(NAME)
    await api.get(blocker.acquire())
    first, job = wait_with(api, client, **settings)
    await waits(api, client, 1)
    await api.get(blocker.release())
    assert await job.get(SOON) is True
    for _ in range(5):
        await renewed(api, client, 2)
        second, job = wait_with(api, client, **settings)
        await waits(api, client, 1)
        lease = first.lease
        await api.get(first.release())
        assert await job.get(SOON) is True and lease._renewal.over
        await renewed(api, client, 2)
        assert second.lease.valid and not second.lease.lost.is_set()
        first = second
    await api.get(first.release())


@one_server
async def test_a_lock_that_nobody_refers_to_is_not_renewed(api: Api, server: Server, often: None) -> None:
    client = api.client(server.url)
    lock = renewing(client, 1)
    await api.get(lock.acquire())
    await renewed(api, client, 2)
    del lock
    gc.collect()
    other = api.client(server.url).lock(NAME)
    assert await api.get(other.acquire(blocking_timeout=20))
    await api.get(other.release())


@one_server
async def test_an_owner_that_has_ended_is_not_renewed(api: Api, server: Server, probe: redis.Redis) -> None:
    told: list[Any] = []
    lock = renewing(api.client(server.url), SHORT, on_lost=told.append)
    await api.start(lambda: work(api, lock)).get()
    await until(api, lambda: told, "the loss of a lease whose owner has ended")
    assert told[0].lost.is_set()
    await until(api, lambda: not probe.exists(NAME), "the end of the lease")


async def work(api: Api, lock: Any) -> None:
    """Acquire, and forget to release."""
    await api.get(lock.acquire())


@one_server
async def test_shared_leases_belong_to_no_thread_or_task(api: Api, server: Server, often: None) -> None:
    client = api.client(server.url)
    lock = renewing(client, 1, thread_local=False)
    await api.start(lambda: work(api, lock)).get()
    await renewed(api, client, 200)
    assert lock.lease.valid
    await api.get(lock.release())


@one_server
async def test_an_error_in_on_lost_is_logged(
    api: Api, server: Server, probe: redis.Redis, often: None, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(lease: Any) -> None:
        raise RuntimeError("no such pager")

    lock = renewing(api.client(server.url), on_lost=fail)
    await api.enter(lock)
    probe.delete(NAME)
    await until(api, lambda: "no such pager" in caplog.text, "a message")
    with pytest.raises(fastlock.LockNotOwnedError):
        await api.leave(lock)


class Escaped(BaseException):
    """Like an exception that ends a worker."""


@one_server
@pytest.mark.parametrize("error", [SystemExit, asyncio.CancelledError, Escaped])
async def test_what_on_lost_raises_ends_no_other_renewal(
    api: Api, server: Server, probe: redis.Redis, often: None, error: type[BaseException]
) -> None:
    def fail(lease: Any) -> None:
        raise error

    client = api.client(server.url)
    other = client.lock("other", LEASE, auto_renew=True, thread_local=False)
    lease = await api.enter(other)
    for _ in range(2):
        lock = renewing(client, on_lost=fail)
        await api.enter(lock)
        probe.delete(NAME)
        await until(api, lock.lease.lost.is_set, "the loss")
        with pytest.raises(fastlock.LockNotOwnedError):
            await api.leave(lock)
        await renewed(api, client, 2)
    assert lease.valid and not lease.lost.is_set()
    await api.leave(other)


@one_server
async def test_a_timeout_that_is_set_later_is_checked(api: Api, server: Server) -> None:
    lock = renewing(api.client(server.url))
    for timeout in (None, 0.05):
        with pytest.raises(ValueError, match=r"timeout must be at least 0\.1 seconds"):
            lock.timeout = timeout
    assert lock.timeout == LEASE


# ------------------------------------------------------------------------------------------------------------- threads


@one_server
@threads_only
async def test_renewal_is_on_time_while_another_thread_computes(api: Api, server: Server) -> None:
    client = api.client(server.url)
    lock = renewing(client, 1.2)
    with lock as lease:
        end = time.monotonic() + 2
        while time.monotonic() < end:
            pass
        assert not lease.lost.is_set() and lease.valid and client.get_stats()["renewals"] >= 3


@one_server
@threads_only
async def test_a_forked_child_does_not_renew(api: Api, server: Server, probe: redis.Redis, often: None) -> None:
    client = api.client(server.url)
    lock = renewing(client)
    lease = await api.enter(lock)
    await renewed(api, client, 2)
    if (child := os.fork()) == 0:
        stats = client.get_stats()
        os._exit(0 if not client._transport.renewals.heap and not lease.valid and stats["renewals"] == 0 else 1)
    assert os.waitpid(child, 0)[1] == 0
    await renewed(api, client, 2)
    await api.leave(lock)


@one_server
@threads_only
async def test_the_thread_ends_with_its_client(api: Api, server: Server, often: None) -> None:
    client = fastlock.Client.from_url(server.url)
    running: set[int] = set()
    lock = renewing(client, on_lost=None)
    with lock:
        await renewed(api, client, 1)
        running = threads_now()
    client.close()
    end = time.monotonic() + 10
    while threads_now() & running and len(threads_now()) >= len(running):
        assert time.monotonic() < end, "the thread goes on"
        time.sleep(0.001)


def threads_now() -> set[int]:
    import sys

    return set(sys._current_frames()) - {thread.ident for thread in threading.enumerate() if thread.ident}


# ------------------------------------------------------------------------------------------------------------- asyncio


@one_server
@tasks_only
async def test_a_blocked_event_loop_is_reported_as_loss(api: Api, server: Server, probe: redis.Redis) -> None:
    told: list[Any] = []
    lock = renewing(api.client(server.url), SHORT, on_lost=told.append)
    lease = await api.enter(lock)
    time.sleep(SHORT * 1.5)
    assert lease.lost.is_set() and told == [lease]
    await until(api, lambda: not probe.exists(NAME), "the end of the lease")
    with pytest.raises(fastlock.LockNotOwnedError):
        await api.leave(lock)


@one_server
@tasks_only
async def test_on_lost_may_be_a_coroutine_function(
    api: Api, server: Server, probe: redis.Redis, often: None, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[Any] = []

    async def tell(lease: Any) -> None:
        await asyncio.sleep(0)
        told.append(lease)
        raise RuntimeError("no such pager")

    lock = renewing(api.client(server.url), on_lost=tell)
    lease = await api.enter(lock)
    probe.delete(NAME)
    await until(api, lambda: told and "no such pager" in caplog.text, "on_lost")
    assert told == [lease]
    with pytest.raises(fastlock.LockNotOwnedError):
        await api.leave(lock)


@one_server
@tasks_only
@pytest.mark.parametrize("body", ["waits", "is at its end", "fails", "is cancelled as well"])
async def test_the_body_is_cancelled_when_its_lease_is_lost(
    api: Api, server: Server, probe: redis.Redis, often: None, body: str
) -> None:
    client = api.client(server.url)
    lock = renewing(client, cancel_on_loss=True)
    task = asyncio.current_task()
    assert task is not None

    async def job() -> None:
        mine = asyncio.current_task()
        assert mine is not None
        async with lock as lease:
            if body == "is at its end":
                lease._found_lost(now())
                return
            probe.delete(NAME)
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if body == "fails":
                    raise KeyError("while it cleaned up") from None
                if body == "is cancelled as well":
                    mine.cancel()
                raise

    expected = {"fails": KeyError, "is cancelled as well": asyncio.CancelledError}.get(body, fastlock.LockLostError)
    running = asyncio.get_running_loop().create_task(job())
    with pytest.raises(expected) as caught:
        await running
    if expected is fastlock.LockLostError:
        assert "'sku' was lost while it was held" in str(caught.value) and running.cancelling() == 0
    probe.delete(NAME)


@one_server
@tasks_only
async def test_a_guarded_body_that_loses_nothing_is_left_alone(api: Api, server: Server, often: None) -> None:
    client = api.client(server.url)
    async with renewing(client, cancel_on_loss=True) as lease:
        await renewed(api, client, 3)
    with pytest.raises(asyncio.TimeoutError):
        async with asyncio.timeout(0.05), renewing(client, cancel_on_loss=True):
            await asyncio.sleep(60)
    with pytest.raises(KeyError):
        async with renewing(client, cancel_on_loss=True):
            raise KeyError
    assert not lease.lost.is_set()


@one_server
@tasks_only
async def test_a_task_of_wait_for_is_not_taken_for_the_owner(api: Api, server: Server, often: None) -> None:
    """Until Python 3.12, `wait_for` acquires in a task of its own, which has ended then."""
    client = api.client(server.url)
    lock = renewing(client, 1)
    await asyncio.wait_for(lock.acquire(), 5)
    await renewed(api, client, 150)
    assert lock.lease.valid
    await lock.release()


@pytest.mark.parametrize("due", [False, True])
def test_a_client_goes_on_renewing_in_the_next_loop(server: Server, impl: str, often: None, due: bool) -> None:
    """due: the lease's renewal begins as the loop ends."""
    client = fastlock.asyncio.Client.from_url(server.url)
    lock = renewing(client, thread_local=False)

    async def acquire() -> None:
        await lock.acquire()
        while due and now() < client._transport._renewal_timer._time:
            pass

    asyncio.run(acquire())
    asyncio.run(renew_and_release(client, lock))


@pytest.mark.parametrize("ticks", range(4))
def test_a_loop_that_is_just_closed_leaves_its_renewals_to_the_next(
    server: Server, impl: str, often: None, ticks: int
) -> None:
    """One is under way, for so many ticks of the loop, and a task waits to hear of a loss."""
    client = fastlock.asyncio.Client.from_url(server.url)
    lock = renewing(client, thread_local=False)

    async def acquire() -> asyncio.Task[bool]:
        await lock.acquire()
        waiting = asyncio.create_task(lock.lease.lost.wait())
        while not client._transport._renewal_timer._tasks:
            await asyncio.sleep(0)
        for _ in range(ticks):
            await asyncio.sleep(0)
        return waiting

    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda loop, context: None)  # of tasks that are destroyed
    waiting = loop.run_until_complete(acquire())
    loop.close()
    asyncio.run(renew_and_release(client, lock))
    assert not waiting.done()


def test_a_loss_is_told_though_the_loop_of_its_body_was_closed(
    server: Server, impl: str, probe: redis.Redis, often: None
) -> None:
    told: list[Any] = []
    client = fastlock.asyncio.Client.from_url(server.url)
    lock = renewing(client, thread_local=False, cancel_on_loss=True, on_lost=told.append)

    async def hold() -> None:
        async with lock:
            await asyncio.sleep(60)

    async def begin() -> asyncio.Task[None]:
        body = asyncio.create_task(hold())
        while lock.lease is None:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        return body

    async def go_on() -> None:
        await client.lock("another").locked()
        async with asyncio.timeout(20):
            while not told:
                await asyncio.sleep(0.001)
        await client.close()

    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda loop, context: None)  # of tasks that are destroyed
    body: Any = loop.run_until_complete(begin())
    loop.close()
    probe.delete(NAME)
    asyncio.run(go_on())
    assert len(told) == 1 and not body.done()
    with pytest.raises(RuntimeError, match="event loop"):  # it releases, and would be told so as it is collected
        body.get_coro().close()


def test_grants_in_each_tick_do_not_keep_a_renewal_from_its_timer(server: Server, impl: str, often: None) -> None:
    async def work() -> None:
        async with fastlock.asyncio.Client.from_url(server.url) as client, renewing(client):
            async with asyncio.timeout(20):
                while client.get_stats()["renewals"] < 3:
                    client._transport.wake_renewal(now() + 60)  # as a grant does it
                    await asyncio.sleep(0)

    asyncio.run(work())


async def renew_and_release(client: Any, lock: Any) -> None:
    await client.lock("another").locked()
    start = client.get_stats()["renewals"]
    async with asyncio.timeout(20):
        while client.get_stats()["renewals"] < start + 3:
            await asyncio.sleep(0.001)
    await lock.release()
    await client.close()
