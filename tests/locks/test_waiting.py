"""Waiters: their order among clients and processes, handover, and that a waiter which leaves does so cleanly.

Where a message has to wake a waiter, its recheck of every second is turned off: a waiter that is forgotten then makes
the test fail, instead of acquiring a second later.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest
import redis
from support.apis import Api
from support.child_client import (
    LONG,
    NAME,
    ORDER,
    QUEUE,
    SOON,
    ChildClient,
    confirmed,
    either,
    held,
    queued,
    until,
    wait_with,
    waits,
)
from support.faultproxy import FaultProxy, stall, swallow

import fastlock
from fastlock._protocol import local_queue
from fastlock._transport import aio, aio_closing, internals
from fastlock._transport import closing as sync_closing
from fastlock._transport.sync_connection import Connection
from fastlock.embedded import Server

pytestmark = pytest.mark.usefixtures("no_leaks", "no_waiters")
# For slow tests, which have to wait: a server with a command for each operation, and one that needs scripts.
two_servers = pytest.mark.parametrize("server", ["valkey", "floor"], indirect=True)
PUSH = b"$7\r\nmessage\r\n"  # in each message to a waiter


# ---------------------------------------------------------------------------------------------------------------- order


async def test_strict_order_across_clients_and_processes(
    api: Api, server: Server, probe: redis.Redis, no_recheck: None
) -> None:
    """Fair waiters are served in order of arrival, whichever process they are in."""
    with ChildClient(api, server.unix_url, fair=True) as one, ChildClient(api, server.unix_url, fair=True) as two:
        clients = [api.client(server.unix_url) for _ in range(2)]
        holder = await held(api, api.client(server.unix_url))
        for child in (one, two):
            await child.wait_for_line("ready")
        arrivals: list[Any] = [clients[0], one, clients[1], clients[0], two, clients[1], clients[0]]
        jobs = []
        for number, client in enumerate(arrivals):
            if isinstance(client, ChildClient):
                client.send(f"turn {number}")
            else:
                jobs.append(api.start(lambda client=client, number=number: use(api, client, probe, number, fair=True)))
            await queued(api, probe, number + 1)
        await api.get(holder.release())
        for job in jobs:
            await job.get(SOON)
        for child in (one, two):
            await child.wait_for_line("served")
            assert await child.request("queues", "queues") == "queues 0"
        assert [int(label) for label in probe.lrange(ORDER, 0, -1)] == list(range(len(arrivals)))
        probe.delete(ORDER)


async def use(api: Api, client: Any, probe: redis.Redis, number: int, **settings: Any) -> None:
    lock = client.lock(NAME, timeout=LONG, sleep=LONG, **settings)
    await api.get(lock.acquire())
    probe.rpush(ORDER, number)
    await api.checkpoint()
    await api.get(lock.release())


async def test_waiters_of_one_process_are_served_in_order_of_arrival(
    api: Api, server: Server, probe: redis.Redis, no_recheck: None
) -> None:
    """Also if the lease is handed over locally, and if two clients alternate."""
    clients = [api.client(server.unix_url) for _ in range(2)]
    holder = await held(api, api.client(server.unix_url))
    jobs = []
    for number in range(12):
        client = clients[number % 2]
        jobs.append(api.start(lambda client=client, number=number: use(api, client, probe, number)))
        await waits(api, client, number // 2 + 1)
    await queued(api, probe, 2)
    await api.get(holder.release())
    for job in jobs:
        await job.get(SOON)
    order = [int(label) for label in probe.lrange(ORDER, 0, -1)]
    assert sorted(order) == list(range(12))
    for parity in range(2):
        assert [each for each in order if each % 2 == parity] == list(range(parity, 12, 2))
    probe.delete(ORDER)


async def test_caller_that_returns_waits_behind_other_processes(
    api: Api, server: Server, probe: redis.Redis, no_recheck: None
) -> None:
    """A process whose callers acquire again and again does not shut out other processes."""
    busy, other = api.client(server.unix_url), api.client(server.unix_url)
    finished: list[bool] = []

    async def again() -> None:
        lock = busy.lock(NAME, timeout=LONG)
        while not finished:
            await api.get(lock.acquire())
            await api.checkpoint()
            await api.get(lock.release())

    jobs = [api.start(again) for _ in range(3)]
    await waits(api, busy, 3)
    for count in range(5):
        lock, job = wait_with(api, other)
        assert await job.get(SOON) is True, f"try {count}"
        await api.get(lock.release())
    finished.append(True)
    for job in jobs:
        await job.get(SOON)


async def test_newcomer_to_a_free_lock_leaves_it_to_the_first_waiter(
    api: Api, server: Server, probe: redis.Redis, no_recheck: None
) -> None:
    """The key was deleted, so no release woke a waiter: the next acquire makes the server grant to the first waiter."""
    await held(api, api.client(server.unix_url))
    waiting = []
    for number in range(2):
        waiting.append(wait_with(api, api.client(server.unix_url), fair=True))
        await queued(api, probe, number + 1)
    probe.delete(NAME)
    waiting.append(wait_with(api, api.client(server.unix_url), fair=True))
    for number, (lock, job) in enumerate(waiting):
        assert await job.get(SOON) is True, f"number {number}"
        await queued(api, probe, 2 - number)
        await api.get(lock.release())


# --------------------------------------------------------------------------------- tasks in one iteration of their loop


@pytest.fixture
def no_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop does not check every second for waiters that were forgotten."""
    monkeypatch.setattr(aio, "RECHECK_SECONDS", LONG)


@pytest.mark.skipif(not internals.used(), reason="a future of asyncio's own takes an iteration for each task")
@pytest.mark.parametrize("api", ["asyncio"], indirect=True)
async def test_one_iteration_serves_many_tasks_that_await_nothing(
    api: Api, server: Server, probe: redis.Redis, no_ticks: None
) -> None:
    client = api.client(server.unix_url)
    holder = await held(api, client)
    loop, order = asyncio.get_running_loop(), []
    iterations, going = 0, True

    def count() -> None:
        nonlocal iterations
        iterations += 1
        if going:
            loop.call_soon(count)

    async def caller(number: int) -> None:
        async with client.lock(NAME, timeout=LONG, blocking_timeout=SOON):
            order.append((number, iterations))

    jobs = [api.start(lambda number=number: caller(number)) for number in range(300)]
    await waits(api, client, 300)
    count()
    await api.get(holder.release())
    for job in jobs:
        await job.get(SOON)
    going = False
    assert [number for number, _ in order] == list(range(300))
    served = len({iteration for _, iteration in order})  # some iterations pass while the server is asked
    assert served < 100, f"{served} iterations; one for each task would be 300"
    await api.checkpoint()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("api", ["asyncio"], indirect=True)
async def test_tasks_that_hold_time_out_or_are_cancelled_at_random(
    api: Api, server: Server, probe: redis.Redis, no_ticks: None, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Some holders await, most do not: they are served in order, one at a time, and none is lost; also when the lease
    goes back to the server meanwhile, as it does from time to time."""
    chance = random.Random(seed)
    monkeypatch.setattr(local_queue, "LOCAL_SECONDS", chance.choice([0.0001, 0.001, local_queue.LOCAL_SECONDS]))
    client = api.client(server.unix_url)
    order: list[int] = []
    holders, late = 0, 0
    long = chance.sample(range(200), 12)  # these hold for some iterations of the loop, the others for none

    async def caller(number: int) -> None:
        nonlocal holders, late
        limit = chance.choice([None, SOON, 0.02, 0.03]) if number > 20 else None
        lock = client.lock(NAME, timeout=LONG, blocking_timeout=limit)
        if not await lock.acquire():
            late += 1
            return
        try:
            holders += 1
            assert holders == 1
            order.append(number)
            for _ in range(chance.randrange(1, 9) if number in long else 0):
                await asyncio.sleep(chance.choice([0, 0.001]))
        finally:
            holders -= 1
            await lock.release()

    holder = await held(api, client)
    jobs = [api.start(lambda number=number: caller(number)) for number in range(200)]
    await until(api, lambda: client.get_stats()["waits"] + late >= 200, "all callers waiting or too late")
    await api.get(holder.release())
    for number in chance.sample(range(200), 20):
        await asyncio.sleep(0)
        jobs[number].cancel()
    cancelled = 0
    for job in jobs:
        try:
            await job.get(SOON)
        except asyncio.CancelledError:
            cancelled += 1
    assert order == sorted(order), "waiters are served in order of arrival"
    assert len(order) + late >= 200 - cancelled and waiting_now(client) == 0 and probe.exists(NAME) == 0
    assert await api.get(client.lock(NAME).acquire(blocking=False)), "the lock is free again"
    probe.delete(NAME)


# ---------------------------------------------------------------------------- waiters that leave as they are granted it

WAYS = [("timeout", "threads"), ("timeout", "asyncio"), ("cancel", "asyncio")]


@two_servers
@pytest.mark.parametrize("behind", ["another client", "same client"])
@pytest.mark.parametrize("late", ["message", "reply"])
@pytest.mark.parametrize(("way", "api"), WAYS, indirect=["api"], ids=["-".join(way) for way in WAYS])
async def test_waiter_that_leaves_during_its_grant_hands_it_over(
    api: Api,
    proxy: FaultProxy,
    server: Server,
    probe: redis.Redis,
    no_recheck: None,
    way: str,
    late: str,
    behind: str,
) -> None:
    """The server has granted the lock, but the grant message or the confirming reply comes when the waiter has left."""
    going = api.client(proxy.url, reply_timeout=LONG)
    others = api.client(server.unix_url)
    for limit in (0.15, 0.4, 0.8):  # seconds: long enough to get this far, and shorter than the grant is held back
        holder = await held(api, others)
        # Renewed: its grant is not believed, so it waits for the reply
        renewed = {"auto_renew": True, "blocking_timeout": limit if way == "timeout" else None}
        _, gone = wait_with(api, going, **renewed)
        await until(api, lambda gone=gone: probe.zcard(QUEUE) == 1 or gone.finished.is_set(), "the first waiter")
        following, next_one = wait_with(api, going if behind == "same client" else others)
        both = (lambda: waiting_now(going) == 2) if behind == "same client" else (lambda: probe.zcard(QUEUE) == 2)
        await until(api, lambda gone=gone, both=both: both() or gone.finished.is_set(), "the second waiter")
        armed = proxy.arm(stall(), on_push=PUSH) if late == "message" else proxy.arm(stall(), command="EVALSHA")
        await api.get(holder.release())
        await until(api, lambda gone=gone, armed=armed: armed.fired or gone.finished.is_set(), "the grant")
        hit = bool(armed.fired)
        if way == "cancel":
            gone.cancel()
        await is_gone(gone, way)
        if behind == "same client":
            armed.resume()
        assert await next_one.get(SOON) is True and following.lease.valid
        armed.resume()
        assert probe.zcard(QUEUE) == 0
        await api.get(following.release())
        if hit:
            return
    pytest.fail("the machine is too slow for this test")


def waiting_now(client: Any) -> int:
    """The number of callers of this client that wait."""
    return sum(len(queue.waiters) for queue in client._transport.queues.by_key.values())


async def is_gone(job: Any, way: str) -> None:
    if way == "cancel":
        with pytest.raises(asyncio.CancelledError):
            await job.get(SOON)
    else:
        assert await job.get(SOON) is False


@two_servers
@pytest.mark.parametrize("late", ["message", "reply"])
async def test_waiter_interrupted_during_its_grant_hands_it_over(
    api: Api, proxy: FaultProxy, server: Server, probe: redis.Redis, no_recheck: None, late: str
) -> None:
    """The interrupt is Ctrl-C, in the main thread of a process."""
    with ChildClient(api, proxy.url, timeout=LONG, auto_renew=True) as child:
        await child.wait_for_line("ready")
        holder = await held(api, api.client(server.unix_url))
        child.send("acquire")
        await queued(api, probe, 1)
        following, next_one = wait_with(api, api.client(server.unix_url))
        await queued(api, probe, 2)
        armed = proxy.arm(stall(), on_push=PUSH) if late == "message" else proxy.arm(stall(), command="EVALSHA")
        await api.get(holder.release())
        await until(api, lambda: armed.fired, "the grant")
        child.interrupt()
        await child.wait_for_line("interrupted")
        assert await next_one.get(SOON) is True
        armed.resume()
        assert await child.request("queues", "queues") == "queues 0"
        await api.get(following.release())


@two_servers
@pytest.mark.parametrize("fair", [False, True], ids=["any", "fair"])
async def test_no_waiter_is_forgotten_whenever_others_leave(
    api: Api, server: Server, probe: redis.Redis, no_recheck: None, fair: bool
) -> None:
    """Callers of three clients time out, are cancelled, and hold for no time or for a while, at random."""
    clients = [api.client(server.unix_url) for _ in range(3)]
    got: list[int] = []

    async def caller(number: int) -> None:
        chance = random.Random(number)
        for _ in range(25):
            lock = clients[number % 3].lock(NAME, timeout=LONG, fair=fair and chance.random() < 0.5)
            limit = chance.choice([None, None, 0.011, 0.012, 0.015, 0.02])
            if await api.get(lock.acquire(blocking_timeout=limit)):
                got.append(number)
                for _ in range(chance.randrange(4)):
                    await api.checkpoint()
                await api.get(lock.release())

    async def canceller(number: int) -> None:
        chance = random.Random(number)
        for _ in range(60):
            lock = clients[number % 3].lock(NAME, timeout=LONG, fair=fair, thread_local=False)
            task = asyncio.ensure_future(lock.acquire())
            for _ in range(chance.randrange(12)):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            if lock.lease is not None:
                await lock.release()

    calls: list[Callable[[], Any]] = [lambda n=n: caller(n) for n in range(9)]
    calls += [lambda n=n: canceller(n) for n in range(9, 12)] * api.is_async
    results = await api.together(calls)
    assert results == [None] * len(calls) and len(got) >= 9
    assert await api.get(clients[0].lock(NAME).acquire(blocking=False)), "the lock is free again"
    assert probe.zcard(QUEUE) == 0
    probe.delete(NAME)


# --------------------------------------------------------------------------------------------------- clients that close


@two_servers
@pytest.mark.parametrize("strict", [0, 1], ids=["without fair", "with fair"])
@pytest.mark.parametrize("granted", [False, True], ids=["waiting", "granted"])
async def test_client_that_closes_leaves_the_queue(
    api: Api,
    proxy: FaultProxy,
    server: Server,
    probe: redis.Redis,
    no_recheck: None,
    monkeypatch: pytest.MonkeyPatch,
    granted: bool,
    strict: int,
) -> None:
    """It leaves at once, not when CLOSE_SECONDS are over; also if a grant message for it is lost."""
    for module in (sync_closing, aio_closing):
        monkeypatch.setattr(module, "CLOSE_SECONDS", 2 * SOON)
    closing, staying = api.client(proxy.url), api.client(server.unix_url)
    holder = await held(api, api.client(server.unix_url))
    jobs = [wait_with(api, closing, fair=fair)[1] for fair in [False, False] + [True] * strict]
    await waits(api, closing, 2 + strict)
    await queued(api, probe, 1 + strict)
    lock, job = wait_with(api, staying)
    await queued(api, probe, 2 + strict)
    if granted:
        armed = proxy.arm(swallow(pushes=1, close=False), on_push=PUSH)
        await api.get(holder.release())
        await until(api, lambda: armed.fired, "the grant")
    await api.start(closing.close).get(SOON)
    for each in jobs:
        with pytest.raises(fastlock.ClientClosedError):
            await each.get(SOON)
    if not granted:
        assert len(await queued(api, probe, 1)) == 1, "only the other client waits"
        await api.get(holder.release())
    assert await job.get(SOON) is True
    await api.get(lock.release())


@pytest.mark.parametrize("api", ["threads"], indirect=True)
async def test_two_waiters_at_once_share_the_push_connection(
    api: Api, proxy: FaultProxy, server: Server, probe: redis.Redis, no_recheck: None
) -> None:
    """One of them still connects when the other has found a connection: only one becomes the push connection."""
    client = api.client(proxy.url)
    holder = await held(api, api.client(server.unix_url))
    client.server_info()
    busy = client._transport.idle.pop()  # as if another thread used it
    armed = proxy.arm(stall(), command="HELLO", times=1)
    strict, last = wait_with(api, client, fair=True)
    armed.wait()
    client._transport.idle.append(busy)
    lock, first = wait_with(api, client)
    await queued(api, probe, 1)
    armed.resume()
    await queued(api, probe, 2)
    (channel,) = probe.pubsub_channels("fastlock:*")
    assert probe.pubsub_numsub(channel) == [(channel, 1)]
    holder.release()
    for each, job in ((lock, first), (strict, last)):
        assert await job.get(SOON) is True
        each.release()
    assert client._transport.push_connection_lent + len(client._transport.idle) == len(client._transport.connections), (
        "no connection is lost"
    )


@two_servers
@pytest.mark.parametrize("api", ["threads"], indirect=True)
async def test_woken_waiter_enters_at_once_also_where_another_reads_its_connection(
    api: Api, server: Server, probe: redis.Redis, no_recheck: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two names share a push connection, read by the thread that came first: the other sends over it beside that."""
    client, other = api.client(server.unix_url), api.client(server.unix_url)
    transport, requests, share = client._transport, list[Any](), Connection._share
    monkeypatch.setattr(Connection, "_share", lambda self, *args: requests.append(args[0]) or share(self, *args))
    holders, jobs = [], []
    for name in ("one", "two"):
        holders.append(other.lock(name, timeout=LONG))
        holders[-1].acquire()
        lock = client.lock(name, timeout=LONG, sleep=LONG, thread_local=False, auto_renew=True)  # not believed
        jobs.append((lock, api.start(lock.acquire)))
        await until(api, lambda name=name: asleep(transport, name.encode()), "a waiter that is parked")
    for holder, (lock, job) in zip(holders[::-1], jobs[::-1], strict=True):
        requests.clear()
        holder.release()
        assert await job.get(SOON) is True
        assert not [request for request in requests if request.needs_push]
        lock.release()


def asleep(transport: Any, key: bytes) -> bool:
    """Whether the first waiter for the key sleeps until it is woken."""
    queue = transport.queues.by_key.get(key)
    return queue is not None and queue.was_queued and queue.first().on_wake is not None


# --------------------------------------------------------------------------------------------------- different settings


async def test_lock_without_timeout_goes_from_waiter_to_waiter(
    api: Api, server: Server, probe: redis.Redis, no_recheck: None
) -> None:
    """Waiters with and without timeout, of the same and of another client: each gets the lease it asked for."""
    client, other = api.client(server.unix_url), api.client(server.unix_url)
    holder = await held(api, other, timeout=None)
    assert probe.pttl(NAME) == -1
    wanted: list[Any] = [(client, None), (client, None), (client, LONG), (other, None), (client, LONG), (other, LONG)]

    async def user(client: Any, timeout: float | None) -> None:
        lock = client.lock(NAME, timeout=timeout)
        await api.get(lock.acquire())
        await confirmed(api, lock)
        assert (probe.pttl(NAME) == -1) == (timeout is None)
        await api.checkpoint()
        await api.get(lock.release())

    jobs = [api.start(lambda each=each: user(*each)) for each in wanted]
    await waits(api, client, 4)
    await waits(api, other, 2)
    await queued(api, probe, 2)
    await api.get(holder.release())
    for job in jobs:
        await job.get(SOON)


@pytest.mark.parametrize("token", ["mine", "fl:" + 32 * "0"], ids=["plain", "like fastlock's"])
async def test_locks_with_given_tokens_wait_and_are_waited_for(
    api: Api, server: Server, probe: redis.Redis, no_recheck: None, token: str
) -> None:
    """The token may not be marked as contended: then a waiter asks the server every `sleep` seconds."""
    client, other = api.client(server.unix_url), api.client(server.unix_url)
    first, given, last = (each.lock(NAME, LONG, sleep=0.01, thread_local=False) for each in (client, other, client))
    assert await api.get(first.acquire())
    jobs = [api.start(lambda: given.acquire(token=token))]
    await until(api, lambda: probe.info("commandstats").get("cmdstat_pttl"), "a poll of the waiter")
    assert not jobs[0].finished.is_set() and probe.zcard(QUEUE) == 0, "no queue, as two callers may give the same token"
    await api.get(first.release())
    assert await jobs[0].get(SOON) is True and probe.get(NAME) == token.encode() == given.lease._raw_token
    jobs.append(api.start(last.acquire))
    await queued(api, probe, 1)
    assert await api.get(given.owned()) and await api.get(given.extend(5))
    await api.get(given.release())
    assert await jobs[1].get(SOON) is True
    await api.get(last.release())


async def test_short_blocking_timeout_ends_in_time_and_leaves_nothing(
    api: Api, server: Server, probe: redis.Redis, no_recheck: None
) -> None:
    """No recheck is due before the timeout, so the waiter has to leave by itself; a grant that comes in time counts."""
    client, other = api.client(server.unix_url), api.client(server.unix_url)
    holder = await held(api, other)
    for fair in (False, True):
        assert await api.get(client.lock(NAME, fair=fair).acquire(blocking_timeout=0.03)) is False
        await queued(api, probe, 0)
    lock, job = wait_with(api, client, blocking_timeout=LONG / 3)
    await queued(api, probe, 1)
    assert await api.get(client.lock(NAME).acquire(blocking_timeout=0.03)) is False
    assert probe.zcard(QUEUE) == 1, "the waiter before it still waits"
    await api.get(holder.release())
    assert await job.get(SOON) is True
    await api.get(lock.release())


# -------------------------------------------------------------------------------------------------------------- batches


async def test_release_of_a_batch_wakes_all_waiters(
    api: Api, server: Server, probe: redis.Redis, no_recheck: None
) -> None:
    """Waiters of the same client and of others, fair or not."""
    client, other = api.client(server.unix_url), api.client(server.unix_url)
    names = [f"n{number}" for number in range(8)]
    leases = await api.get(client.acquire_many(names, timeout=LONG))
    waiters = [(client, 0, False), (other, 1, False), (client, 2, True), (other, 3, True), (client, 4, False)]
    waiters.append((other, 4, False))

    async def user(client: Any, number: int, fair: bool) -> int:
        lock = client.lock(names[number], timeout=LONG, fair=fair)
        await api.get(lock.acquire())
        await api.get(lock.release())
        return number

    jobs = [api.start(lambda each=each: user(*each)) for each in waiters]
    queue = "fastlock:queue:{n%d}"
    for number, count in ((0, 1), (1, 1), (2, 1), (3, 1), (4, 2)):
        await until(api, lambda n=number, c=count: probe.zcard(queue % n) == c, f"{count} for {number}")
    again = await api.get(other.acquire_many([*names, "free"], timeout=LONG))
    assert [lease is not None for lease in again] == [False] * 8 + [True], (
        "a batch does not wait, and acquires no held name"
    )
    assert await api.get(client.release_many(leases)) == [True] * 8
    assert [await job.get(SOON) for job in jobs] == [0, 1, 2, 3, 4, 4]
    assert await api.get(other.release_many([again[-1]])) == [True]
    assert await api.get(client.release_many(leases)) == [False] * 8


async def test_lease_handed_over_locally_may_be_released_in_a_batch(
    api: Api, server: Server, probe: redis.Redis, no_recheck: None
) -> None:
    """The next waiter of the client gets it, as after any release."""
    client = api.client(server.unix_url)
    holder = await held(api, api.client(server.unix_url))
    pairs = []
    for number in range(3):
        pairs.append(wait_with(api, client))
        await waits(api, client, number + 1)
    await queued(api, probe, 1)
    await api.get(holder.release())
    for lock, job in pairs:
        assert await job.get(SOON) is True
        assert await api.get(client.release_many([lock.lease])) == [True]


# ------------------------------------------------------------------------------------------------- with redis-py's lock


class Theirs:
    """redis-py's lock, usable in any thread."""

    def __init__(self, server: Server, **settings: Any) -> None:
        self.raw = redis.Redis(unix_socket_path=server.path)
        self.lock = self.raw.lock(NAME, **{"timeout": LONG, "thread_local": False, **settings})

    def __enter__(self) -> Any:
        return self.lock

    def __exit__(self, *exc: object) -> None:
        self.raw.close()


async def test_waiters_follow_a_redis_py_holder_that_wakes_nobody(
    api: Api, server: Server, probe: redis.Redis, no_recheck: None
) -> None:
    """A holder of redis-py cannot be told that a waiter waits, so waiters ask the server every `sleep` seconds."""
    with Theirs(server) as theirs:
        assert theirs.acquire(blocking=False)
        token = probe.get(NAME)
        clients = [api.client(server.unix_url) for _ in range(2)]
        pairs = [wait_with(api, client, sleep=0.01) for client in clients]
        await queued(api, probe, 2)
        assert probe.get(NAME) == token and theirs.owned()
        theirs.release()
        ((first, _),) = await either(api, pairs)
        assert not theirs.acquire(blocking=False) and await api.get(first.owned())
        await api.get(first.release())
        for lock, job in pairs:
            assert await job.get(SOON) is True
            if lock is not first:
                await api.get(lock.release())


async def test_lost_lock_of_redis_py_releases_nothing_of_fastlock(
    api: Api, server: Server, probe: redis.Redis, no_recheck: None
) -> None:
    with Theirs(server) as theirs:
        assert theirs.acquire(blocking=False)
        lock, job = wait_with(api, api.client(server.unix_url), sleep=0.01)
        behind, last = wait_with(api, api.client(server.unix_url), sleep=0.01)
        await queued(api, probe, 2)
        probe.delete(NAME)
        ((first, _),) = await either(api, [(lock, job), (behind, last)])
        for call in (lambda: theirs.extend(5), theirs.reacquire, theirs.release):
            with pytest.raises(redis.exceptions.LockNotOwnedError):
                call()
        assert await api.get(first.owned())
        await api.get(first.release())
        assert [await job.get(SOON), await last.get(SOON)] == [True, True]
        await api.get((behind if first is lock else lock).release())


async def test_locks_of_redis_py_and_fastlock_exclude_each_other(api: Api, server: Server, probe: redis.Redis) -> None:
    """Many repeats of both kinds, in threads of their own: never two holders, and every result is true."""
    overlaps: list[int] = []
    clients = [api.client(server.unix_url) for _ in range(2)]

    def inside() -> None:
        overlaps.append(probe.incr("inside"))
        probe.decr("inside")

    async def ours(number: int) -> None:
        lock = clients[number % 2].lock(NAME, timeout=LONG, sleep=0.001, fair=number == 3)
        for _ in range(20):
            assert await api.get(lock.acquire())
            inside()
            await api.checkpoint()
            assert await api.get(lock.owned())
            await api.get(lock.release())

    def use_theirs() -> None:
        with Theirs(server, sleep=0.001) as theirs:
            for _ in range(20):
                assert theirs.acquire()
                inside()
                assert theirs.owned()
                theirs.release()

    async def beside() -> None:
        await (asyncio.to_thread(use_theirs) if api.is_async else api.get(use_theirs()))

    results = await api.together([*(lambda n=n: ours(n) for n in range(4)), beside, beside])
    assert results == [None] * 6
    assert overlaps == [1] * 120
    probe.delete("inside")
