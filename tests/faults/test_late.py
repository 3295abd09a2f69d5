"""What comes too late: a lease handed over that expires before its caller runs, an extension that is shorter than the
wait for its reply, an acquire that the server executes when its caller has long given up. None of them counts as a
success, and none leaves a key behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
import redis.asyncio
from support.apis import Api
from support.child_client import confirmed
from support.faultproxy import FaultProxy, stall, swallow
from support.redispy import ending
from support.servers import standstill

import fastlock
from fastlock._protocol import lease as leases
from fastlock._protocol import local_queue
from fastlock._protocol.lease import now
from fastlock.embedded import Server

NAME, SHORT = "sku", 0.1  # seconds: of a lease that ends before its caller runs
NAME_IN_COMMAND = b"\r\nsku\r\n"
SHORT_TIMEOUT = 0.15  # seconds: a reply_timeout that expires


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """No other thread or task of the process runs, as while a task computes or a thread keeps the interpreter."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(30)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


def busy_until(condition: Callable[[], object]) -> None:
    with alone():
        while not condition():
            pass


# -------------------------------------------------------------------------- handed over, expired before its caller runs


async def test_lease_that_expires_before_its_waiter_runs_is_not_acquired(
    api: Api, server: Server, probe: redis.Redis, no_leaks: Any
) -> None:
    """The lease was handed over within the client; then the process computes, and another client gets the name.

    On a loaded machine a new lease may end as well before the test looks at it: it ends later than the one handed over.
    """
    client = api.client(server.unix_url)
    tries, end = 0, now() + 30
    while tries < 10 or not client.get_stats()["late_grants"]:
        assert now() < end, "no lease was granted late: the test shows nothing"
        tries += 1
        holder = client.lock(NAME, timeout=SHORT, thread_local=False)
        waiter = client.lock(NAME, timeout=SHORT, thread_local=False)
        valid: list[bool] = []
        await wait_as_two(api, client, holder)
        deadline = holder.lease._deadline

        async def acquire(waiter: Any = waiter, valid: list[bool] = valid, handed_over: float = deadline) -> None:
            assert await api.get(waiter.acquire())
            valid.append(waiter.lease.valid or waiter.lease._deadline > handed_over)

        job = api.start(acquire)
        await joined(api, client)
        for queue in client._transport.queued_keys.values():
            queue.handed_over_at = now() + 1  # as if handed over a moment ago: the holder does not yield
        with alone():  # before the waiter runs
            await api.get(holder.release())
            while now() < deadline + 0.005:
                pass
        while not valid and not probe.set(NAME, b"rival", nx=True, px=30):
            pass
        await job.get()
        assert valid == [True]
        with contextlib.suppress(fastlock.LockNotOwnedError):  # the server may have granted it before the busy wait
            await api.get(waiter.release())


async def pause(api: Api, seconds: float) -> None:
    await asyncio.sleep(seconds) if api.is_async else time.sleep(seconds)


async def wait_as_two(api: Api, client: Any, lock: Any) -> None:
    """Acquire by waiting, as only such a lease is handed over without a command."""
    first = client.lock(NAME, thread_local=False)
    await api.get(first.acquire())
    job = api.start(lock.acquire)
    await joined(api, client)
    await api.get(first.release())
    assert await job.get() is True
    await confirmed(api, lock)


async def joined(api: Api, client: Any) -> None:
    """Return when the client has a waiter."""
    end = time.monotonic() + 10
    while not any(queue.waiters.count for queue in list(client._transport.queued_keys.values())):
        assert time.monotonic() < end
        await pause(api, 0.0002)


# ------------------------------------------------------------------------------- executed long after its caller gave up


async def test_acquire_executed_long_after_it_was_abandoned_is_undone(
    api: Api, server: Server, probe: redis.Redis, no_leaks: Any
) -> None:
    """The server counts the lease from when it executes the command: the undo is not dropped before that."""
    client = api.client(server.unix_url, reply_timeout=SHORT_TIMEOUT, connect_timeout=SHORT_TIMEOUT)
    await api.get(client.server_info())
    lock = client.lock(NAME, timeout=0.3)
    with standstill(server):
        with pytest.raises(redis.exceptions.TimeoutError):
            await api.get(lock.acquire(blocking=False))
        end = now() + 0.31
        while now() < end:
            await pause(api, 0.01)
    while True:
        with contextlib.suppress(redis.exceptions.ConnectionError, redis.exceptions.TimeoutError):
            await api.get(client.lock("barrier").locked())
            break
    assert not probe.exists(NAME)


async def test_undo_of_a_task_is_sent_though_the_client_is_not_used_again(
    api: Api, start_server: Callable[..., Server]
) -> None:
    """The server stops for longer than it takes to give up a new connection."""
    if not api.is_async:  # README: a client for threads sends it when it is used again, closed, or the process ends
        return
    server = start_server()
    client = api.client(server.url, reply_timeout=SHORT_TIMEOUT, connect_timeout=SHORT_TIMEOUT)
    await client.server_info()
    with redis.Redis(unix_socket_path=server.path) as probe:
        with standstill(server):
            with pytest.raises(redis.exceptions.TimeoutError):
                await client.lock(NAME, timeout=None).acquire(blocking=False)
            while client._transport._failures < 3:
                await asyncio.sleep(0.01)
        end = now() + 20
        while probe.exists(NAME) or not client._transport.connection:
            assert now() < end
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("met", [True, False], ids=["cut", "fresh"])
async def test_blocking_timeout_includes_the_time_to_connect(
    api: Api, start_server: Callable[..., Server], met: bool
) -> None:
    """The server does not answer, and connect_timeout is a minute."""
    server = start_server()
    client = api.client(server.url, connect_timeout=60, reply_timeout=60)
    if met:
        await api.get(client.server_info())
        with redis.Redis(unix_socket_path=server.path) as probe:
            probe.client_kill_filter(_type="normal", skipme=True)
    with standstill(server):
        job = api.start(lambda: client.lock(NAME).acquire(blocking_timeout=0.1))
        with pytest.raises(redis.exceptions.TimeoutError):
            await job.get(20)
    assert await api.get(client.lock(NAME).locked()) is False


async def test_extension_shorter_than_the_wait_for_its_reply_does_not_count(
    api: Api, proxy: FaultProxy, probe: redis.Redis
) -> None:
    lock = api.client(proxy.url, reply_timeout=20).lock(NAME, timeout=60, thread_local=False)
    await api.get(lock.acquire())
    armed = proxy.arm(stall("reply"), after=NAME_IN_COMMAND, times=1)
    job = api.start(lambda: lock.extend(0.05, replace_ttl=True))
    while not armed.fired:
        await pause(api, 0.001)
    end = now() + 0.06
    busy_until(lambda: now() > end)
    armed.resume()
    with pytest.raises(fastlock.LockNotOwnedError):
        await job.get()
    assert not lock.lease.valid


# -------------------------------------------------------------------------------- leases that come from other processes


async def test_release_by_a_foreign_token_recognises_its_own_effect(
    api: Api, proxy: FaultProxy, probe: redis.Redis, no_leaks: Any
) -> None:
    """Only the server knows when such a lease ends: a key that is gone after a lost reply counts as released by it."""
    client = api.client(proxy.url, reply_timeout=SHORT_TIMEOUT)
    r = redis_client(api, probe)
    lock = api.module.Lock(r, NAME, timeout=30, thread_local=False)
    lock._transport = client._transport
    for how in (swallow(), stall()):
        probe.set(NAME, b"fl:" + b"7" * 32, px=30_000)
        lock.local.token = b"fl:" + b"7" * 32
        armed = proxy.arm(how, after=NAME_IN_COMMAND, times=1)
        await api.get(lock.release())
        armed.wait()
        assert not probe.exists(NAME)
    lock.local.token = b"fl:" + b"8" * 32
    with pytest.raises(fastlock.LockNotOwnedError):
        await api.get(lock.release())


def redis_client(api: Api, probe: redis.Redis) -> Any:
    path = probe.connection_pool.connection_kwargs["path"]
    return (redis.asyncio.Redis if api.is_async else redis.Redis)(unix_socket_path=path)


def test_lease_from_another_boot_is_not_valid(impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A deadline means nothing on a clock that began at another time; the lease can still be released by its token."""
    lease = fastlock.Lease("x", b"x", b"fl:" + b"1" * 32, now() + 1000)
    endless = fastlock.Lease("x", b"x", b"fl:" + b"1" * 32, float("inf"))
    pickled, pickled_endless = pickle.dumps(lease), pickle.dumps(endless)
    assert pickle.loads(pickled)._deadline == lease._deadline
    with monkeypatch.context() as patch:
        patch.setattr(leases, "boot_id", lambda: b"another")
        other = pickle.loads(pickled)
        assert not other.valid and other.remaining == 0.0 and other.token == lease._raw_token and other._expiry_unknown
        assert pickle.loads(pickled_endless).valid


def test_lease_from_a_container_with_another_clock_offset(impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = leases.now
    pickled = pickle.dumps(fastlock.Lease("x", b"x", b"fl:" + b"1" * 32, real() + 10))
    monkeypatch.setattr(leases, "now", lambda: real() - 3000)
    assert 9 < pickle.loads(pickled).remaining <= 10.001
    monkeypatch.setattr(leases, "now", lambda: real() + 3000)
    assert pickle.loads(pickled).remaining == 0.0


# ---------------------------------------------------------------------------------------- the same lease released twice


@pytest.fixture
def unlimited_handovers() -> Iterator[None]:
    """A lease is handed over locally, however slow the machine is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_queue, "LOCAL_SECONDS", 3600.0)
        yield


@pytest.mark.usefixtures("unlimited_handovers")
async def test_batch_does_not_release_the_lease_of_the_next_local_holder(
    api: Api,
    server: Server,
    probe: redis.Redis,
    no_leaks: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Another thread or task releases the lease while a batch does: the next local holder has it with the same token.
    That is no loss, and is not logged as one."""
    client = api.client(server.unix_url)
    first, second = (client.lock(NAME, thread_local=False) for _ in range(2))
    await wait_as_two(api, client, first)
    job = api.start(second.acquire)
    await joined(api, client)
    lease, drive = first.lease, client._transport.drive

    async def as_task(steps: Any) -> Any:
        monkeypatch.undo()
        await first.release()
        return await drive(steps)

    def as_thread(steps: Any) -> Any:
        monkeypatch.undo()
        first.release()
        return drive(steps)

    monkeypatch.setattr(client._transport, "drive", as_task if api.is_async else as_thread)
    assert await api.get(client.release_many([lease])) == [False]
    assert not caplog.records and not client.get_stats()["losses"]
    assert await job.get() is True
    assert second.lease._raw_token == lease._raw_token and await api.get(second.owned())
    await api.get(second.release())


@pytest.mark.usefixtures("unlimited_handovers")
async def test_extension_beside_a_release_does_not_affect_the_next_holder(
    api: Api, proxy: FaultProxy, probe: redis.Redis, no_leaks: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The next local holder would have the same token. Threads: the extension is executed when the next one holds."""
    client = api.client(proxy.url)
    first, second = (client.lock(NAME, thread_local=False) for _ in range(2))
    await wait_as_two(api, client, first)
    job = api.start(second.acquire)
    await joined(api, client)
    armed = None if api.is_async else proxy.arm(stall("request"), after=b"\r\n123000\r\n", times=1)
    extending = api.start(lambda: first.extend(123, replace_ttl=True))
    if armed is not None:
        armed.wait()
    else:
        await asyncio.sleep(0)
    await api.get(first.release())
    assert await job.get() is True
    if armed is not None:
        armed.resume()
        with pytest.raises(fastlock.LockNotOwnedError):
            await extending.get()
    else:
        assert await extending.get() is True, "it was sent before the release"
    assert 0 < probe.pttl(NAME) <= second.timeout * 1000 and await api.get(second.owned())
    await api.get(second.release())
    assert not caplog.records and not client.get_stats()["losses"], "the lease was released, not lost"


@pytest.mark.usefixtures("unlimited_handovers")
async def test_token_read_after_the_release_is_not_the_next_holders(
    api: Api, server: Server, probe: redis.Redis, no_leaks: Any
) -> None:
    """The next holder has the same raw token, as the lease was handed over to it within the process."""
    client = api.client(server.unix_url)
    first, second = (client.lock(NAME, thread_local=False) for _ in range(2))
    await wait_as_two(api, client, first)
    lease = first.lease
    job = api.start(second.acquire)
    await joined(api, client)
    await api.get(first.release())
    assert await job.get() is True and client.get_stats()["local_handovers"] == 1
    assert second.lease._raw_token == lease._raw_token != lease.token
    kind = redis.asyncio.Redis if api.is_async else redis.Redis
    async with ending(api, kind(unix_socket_path=server.path)) as other:
        stranger = api.module.Lock(other, NAME)
        stranger.local.token = lease.token
        with pytest.raises(fastlock.LockNotOwnedError):
            await api.get(stranger.release())
    assert await api.get(second.owned())
    await api.get(second.release())


@pytest.mark.usefixtures("unlimited_handovers")
async def test_batch_released_again_after_an_error_reports_both_results(
    api: Api, server: Server, probe: redis.Redis, no_leaks: Any
) -> None:
    client = api.client(server.unix_url)
    handed_over, waiter = (client.lock(NAME, thread_local=False) for _ in range(2))
    await wait_as_two(api, client, handed_over)
    job = api.start(waiter.acquire)
    await joined(api, client)
    batch = [handed_over.lease, *await api.get(client.acquire_many(["a", "b", "c"]))]
    probe.set("b", b"fl+" + batch[2].token[3:])  # contended: its release takes a script
    probe.delete("fastlock:queue:{b}")
    probe.rpush("fastlock:queue:{b}", "no queue")
    with pytest.raises(redis.exceptions.ResponseError):
        await api.get(client.release_many(batch))
    assert await job.get() is True
    probe.delete("fastlock:queue:{b}")
    assert await api.get(client.release_many(batch)) == [True] * 4
    assert await api.get(client.release_many(batch)) == [False] * 4
    assert await api.get(waiter.owned())
    await api.get(waiter.release())
