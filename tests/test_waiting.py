"""Who waits, and who gets it: order among clients and processes, handover, and what a waiter that goes leaves behind.

The regular look of a waiter (every second) is taken away where a message has to do: what was forgotten then stays so,
and the test ends with an error instead of a second later.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest
import redis
from support.child_client import (
    LONG,
    NAME,
    ORDER,
    QUEUE,
    SOON,
    ChildClient,
    either,
    held,
    queued,
    until,
    wait_with,
    waits,
)
from support.faces import Face
from support.faultproxy import FaultProxy, stall, swallow

import fastlock
from fastlock._protocol import local_queue
from fastlock._transport import aio, sync
from fastlock._transport.sync_connection import Connection
from fastlock.embedded import Server

pytestmark = pytest.mark.usefixtures("no_leaks", "no_waiters")
# For what takes long, since it has to wait: a server with commands of its own for it all, and one with scripts.
two_servers = pytest.mark.parametrize("server", ["valkey", "floor"], indirect=True)
PUSH = b"$7\r\nmessage\r\n"  # in each message to a waiter


# --------------------------------------------------------------------------------------------------------------- order


async def test_strict_order_over_clients_and_processes(
    face: Face, server: Server, probe: redis.Redis, no_look: None
) -> None:
    """All of them one after the other as they came, whosever process they live in."""
    with ChildClient(face, server.unix_url, fair=True) as one, ChildClient(face, server.unix_url, fair=True) as two:
        clients = [face.client(server.unix_url) for _ in range(2)]
        holder = await held(face, face.client(server.unix_url))
        for child in (one, two):
            await child.hears("ready")
        arrivals: list[Any] = [clients[0], one, clients[1], clients[0], two, clients[1], clients[0]]
        jobs = []
        for number, who in enumerate(arrivals):
            if isinstance(who, ChildClient):
                who.tell(f"turn {number}")
            else:
                jobs.append(face.start(lambda who=who, number=number: wakeup(face, who, probe, number, fair=True)))
            await queued(face, probe, number + 1)
        await face.get(holder.release())
        for job in jobs:
            await job.get(SOON)
        for child in (one, two):
            await child.hears("served")
            assert await child.ask("gates", "gates") == "gates 0"
        assert [int(label) for label in probe.lrange(ORDER, 0, -1)] == list(range(len(arrivals)))
        probe.delete(ORDER)


async def wakeup(face: Face, client: Any, probe: redis.Redis, number: int, **terms: Any) -> None:
    lock = client.lock(NAME, timeout=LONG, sleep=LONG, **terms)
    await face.get(lock.acquire())
    probe.rpush(ORDER, number)
    await face.checkpoint()
    await face.get(lock.release())


async def test_within_a_process_who_came_first_is_served_first(
    face: Face, server: Server, probe: redis.Redis, no_look: None
) -> None:
    """Also where the lease passes on without the server, and where two processes take turns."""
    clients = [face.client(server.unix_url) for _ in range(2)]
    holder = await held(face, face.client(server.unix_url))
    jobs = []
    for number in range(12):
        client = clients[number % 2]
        jobs.append(face.start(lambda client=client, number=number: wakeup(face, client, probe, number)))
        await waits(face, client, number // 2 + 1)
    await queued(face, probe, 2)
    await face.get(holder.release())
    for job in jobs:
        await job.get(SOON)
    order = [int(label) for label in probe.lrange(ORDER, 0, -1)]
    assert sorted(order) == list(range(12))
    for parity in range(2):
        assert [each for each in order if each % 2 == parity] == list(range(parity, 12, 2))
    probe.delete(ORDER)


async def test_who_comes_again_waits_behind_those_of_other_processes(
    face: Face, server: Server, probe: redis.Redis, no_look: None
) -> None:
    """A process whose callers come again and again lets the others in."""
    busy, other = face.client(server.unix_url), face.client(server.unix_url)
    over: list[bool] = []

    async def again() -> None:
        lock = busy.lock(NAME, timeout=LONG)
        while not over:
            await face.get(lock.acquire())
            await face.checkpoint()
            await face.get(lock.release())

    jobs = [face.start(again) for _ in range(3)]
    await waits(face, busy, 3)
    for count in range(5):
        lock, job = wait_with(face, other)
        assert await job.get(SOON) is True, f"round {count}"
        await face.get(lock.release())
    over.append(True)
    for job in jobs:
        await job.get(SOON)


async def test_who_finds_a_name_free_leaves_it_to_who_came_first(
    face: Face, server: Server, probe: redis.Redis, no_look: None
) -> None:
    """Nobody was told that it is free, as nobody let go of it: the next who comes sees to it."""
    await held(face, face.client(server.unix_url))
    waiting = []
    for number in range(2):
        waiting.append(wait_with(face, face.client(server.unix_url), fair=True))
        await queued(face, probe, number + 1)
    probe.delete(NAME)
    waiting.append(wait_with(face, face.client(server.unix_url), fair=True))
    for number, (lock, job) in enumerate(waiting):
        assert await job.get(SOON) is True, f"number {number}"
        await queued(face, probe, 2 - number)
        await face.get(lock.release())


# --------------------------------------------------------------------------------- tasks in one iteration of their loop


@pytest.fixture
def no_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop does not look every second for those who were forgotten."""
    monkeypatch.setattr(aio, "RECHECK_SECONDS", LONG)


@pytest.mark.parametrize("face", ["asyncio"], indirect=True)
async def test_one_iteration_of_the_loop_serves_many_who_hold_for_none(
    face: Face, server: Server, probe: redis.Redis, no_ticks: None
) -> None:
    client = face.client(server.unix_url)
    holder = await held(face, client)
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

    jobs = [face.start(lambda number=number: caller(number)) for number in range(300)]
    await waits(face, client, 300)
    count()
    await face.get(holder.release())
    for job in jobs:
        await job.get(SOON)
    going = False
    assert [number for number, _ in order] == list(range(300))
    served = len({iteration for _, iteration in order})  # others go by while the server is asked
    assert served < 100, f"{served} iterations, where one for each would be 300"
    await face.checkpoint()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("face", ["asyncio"], indirect=True)
async def test_who_holds_for_no_iteration_or_some_goes_in_time_or_is_cancelled(
    face: Face, server: Server, probe: redis.Redis, no_ticks: None, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Holders that await nothing, and some that do: in order, one at a time, nobody lost; also where a lease goes back
    to the server meanwhile, which it does ever so often."""
    chance = random.Random(seed)
    monkeypatch.setattr(local_queue, "LOCAL_SECONDS", chance.choice([0.0001, 0.001, local_queue.LOCAL_SECONDS]))
    client = face.client(server.unix_url)
    order: list[int] = []
    holders, late = 0, 0
    long = chance.sample(range(200), 12)  # who hold for some iterations of the loop, the others for none

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

    holder = await held(face, client)
    jobs = [face.start(lambda number=number: caller(number)) for number in range(200)]
    await until(face, lambda: client.get_stats()["waits"] + late >= 200, "all of them")
    await face.get(holder.release())
    gone = chance.sample(range(200), 20)
    for number in gone:
        await asyncio.sleep(0)
        jobs[number].cancel()
    cancelled = 0
    for job in jobs:
        try:
            await job.get(SOON)
        except asyncio.CancelledError:
            cancelled += 1
    assert order == sorted(order), "who came first is served first"
    assert len(order) + late >= 200 - cancelled and waiting_now(client) == 0 and probe.exists(NAME) == 0
    assert await face.get(client.lock(NAME).acquire(blocking=False)), "all of it was given back"
    probe.delete(NAME)


# --------------------------------------------------------------------------------- who goes at the moment of its grant

WAYS = [("timeout", "threads"), ("timeout", "asyncio"), ("cancel", "asyncio")]


@two_servers
@pytest.mark.parametrize("behind", ["elsewhere", "same client"])
@pytest.mark.parametrize("late", ["message", "reply"])
@pytest.mark.parametrize(("way", "face"), WAYS, indirect=["face"], ids=["-".join(way) for way in WAYS])
async def test_who_goes_while_the_lock_is_on_its_way_passes_it_on(
    face: Face, proxy: FaultProxy, server: Server, probe: redis.Redis, no_look: None, way: str, late: str, behind: str
) -> None:
    """The grant is made, and the message about it, or the reply that confirms it, comes when the waiter has gone."""
    going = face.client(proxy.url, reply_timeout=LONG)
    others = face.client(server.unix_url)
    for limit in (0.15, 0.4, 0.8):  # seconds: as long as it takes to come so far, and shorter than a grant's moment
        holder = await held(face, others)
        _, gone = wait_with(face, going, blocking_timeout=limit if way == "timeout" else None)
        await until(face, lambda gone=gone: probe.zcard(QUEUE) == 1 or gone.finished.is_set(), "the first")
        following, next_one = wait_with(face, going if behind == "same client" else others)
        both = (lambda: waiting_now(going) == 2) if behind == "same client" else (lambda: probe.zcard(QUEUE) == 2)
        await until(face, lambda gone=gone, both=both: both() or gone.finished.is_set(), "the second")
        armed = proxy.arm(stall(), on_push=PUSH) if late == "message" else proxy.arm(stall(), command="EVALSHA")
        await face.get(holder.release())
        await until(face, lambda gone=gone, armed=armed: armed.fired or gone.finished.is_set(), "the moment")
        hit = bool(armed.fired)
        if way == "cancel":
            gone.cancel()
        await is_gone(gone, way)
        if behind == "same client":
            armed.resume()
        assert await next_one.get(SOON) is True and following.lease.valid
        armed.resume()
        assert probe.zcard(QUEUE) == 0
        await face.get(following.release())
        if hit:
            return
    pytest.fail("a machine that is too slow for this test")


def waiting_now(client: Any) -> int:
    """How many callers of this client wait."""
    return sum(len(queue.waiters) for queue in client._transport.queues.by_key.values())


async def is_gone(job: Any, way: str) -> None:
    if way == "cancel":
        with pytest.raises(asyncio.CancelledError):
            await job.get(SOON)
    else:
        assert await job.get(SOON) is False


@two_servers
@pytest.mark.parametrize("late", ["message", "reply"])
async def test_who_is_interrupted_while_the_lock_is_on_its_way_passes_it_on(
    face: Face, proxy: FaultProxy, server: Server, probe: redis.Redis, no_look: None, late: str
) -> None:
    """By Ctrl-C, in the main thread of a process."""
    with ChildClient(face, proxy.url, timeout=LONG) as child:
        await child.hears("ready")
        holder = await held(face, face.client(server.unix_url))
        child.tell("acquire")
        await queued(face, probe, 1)
        following, next_one = wait_with(face, face.client(server.unix_url))
        await queued(face, probe, 2)
        armed = proxy.arm(stall(), on_push=PUSH) if late == "message" else proxy.arm(stall(), command="EVALSHA")
        await face.get(holder.release())
        await until(face, lambda: armed.fired, "the moment")
        child.interrupt()
        await child.hears("interrupted")
        assert await next_one.get(SOON) is True
        armed.resume()
        assert await child.ask("gates", "gates") == "gates 0"
        await face.get(following.release())


@two_servers
@pytest.mark.parametrize("fair", [False, True], ids=["any", "fair"])
async def test_whenever_waiters_go_nobody_is_forgotten(
    face: Face, server: Server, probe: redis.Redis, no_look: None, fair: bool
) -> None:
    """Three clients whose callers run out of time, are cancelled, hold for nothing or for a while, at random."""
    clients = [face.client(server.unix_url) for _ in range(3)]
    got: list[int] = []

    async def caller(number: int) -> None:
        chance = random.Random(number)
        for _ in range(25):
            lock = clients[number % 3].lock(NAME, timeout=LONG, fair=fair and chance.random() < 0.5)
            limit = chance.choice([None, None, 0.011, 0.012, 0.015, 0.02])
            if await face.get(lock.acquire(blocking_timeout=limit)):
                got.append(number)
                for _ in range(chance.randrange(4)):
                    await face.checkpoint()
                await face.get(lock.release())

    async def fickle(number: int) -> None:
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
    calls += [lambda n=n: fickle(n) for n in range(9, 12)] * face.is_async
    results = await face.together(calls)
    assert results == [None] * len(calls) and len(got) >= 9
    assert await face.get(clients[0].lock(NAME).acquire(blocking=False)), "all of it was given back"
    assert probe.zcard(QUEUE) == 0
    probe.delete(NAME)


# --------------------------------------------------------------------------------------------------- clients that close


@two_servers
@pytest.mark.parametrize("strict", [0, 1], ids=["alone", "strict too"])
@pytest.mark.parametrize("granted", [False, True], ids=["waiting", "granted"])
async def test_a_client_that_closes_leaves_the_queue_to_the_others(
    face: Face,
    proxy: FaultProxy,
    server: Server,
    probe: redis.Redis,
    no_look: None,
    monkeypatch: pytest.MonkeyPatch,
    granted: bool,
    strict: int,
) -> None:
    """At once, and not when its time to part is over; also with a grant on its way, of which it never hears."""
    for module in (sync, aio):
        monkeypatch.setattr(module, "CLOSE_SECONDS", 2 * SOON)
    closing, staying = face.client(proxy.url), face.client(server.unix_url)
    holder = await held(face, face.client(server.unix_url))
    jobs = [wait_with(face, closing, fair=fair)[1] for fair in [False, False] + [True] * strict]
    await waits(face, closing, 2 + strict)
    await queued(face, probe, 1 + strict)
    lock, job = wait_with(face, staying)
    await queued(face, probe, 2 + strict)
    if granted:
        armed = proxy.arm(swallow(pushes=1, close=False), on_push=PUSH)
        await face.get(holder.release())
        await until(face, lambda: armed.fired, "the moment")
    await face.start(closing.close).get(SOON)
    for each in jobs:
        with pytest.raises(fastlock.ClientClosedError):
            await each.get(SOON)
    if not granted:
        assert len(await queued(face, probe, 1)) == 1, "the one who stays"
        await face.get(holder.release())
    assert await job.get(SOON) is True
    await face.get(lock.release())


@pytest.mark.parametrize("face", ["threads"], indirect=True)
async def test_two_who_come_at_once_share_the_connection_for_messages(
    face: Face, proxy: FaultProxy, server: Server, probe: redis.Redis, no_look: None
) -> None:
    """One of them is still connecting when the other has found a connection: only one of these is taken away."""
    client = face.client(proxy.url)
    holder = await held(face, face.client(server.unix_url))
    client.server_info()
    busy = client._transport.idle.pop()  # as if another thread had it for now
    armed = proxy.arm(stall(), command="HELLO", times=1)
    strict, last = wait_with(face, client, fair=True)
    armed.wait()
    client._transport.idle.append(busy)
    lock, first = wait_with(face, client)
    await queued(face, probe, 1)
    armed.resume()
    await queued(face, probe, 2)
    (channel,) = probe.pubsub_channels("fastlock:*")
    assert probe.pubsub_numsub(channel) == [(channel, 1)]
    holder.release()
    for each, job in ((lock, first), (strict, last)):
        assert await job.get(SOON) is True
        each.release()
    assert client._transport.push_connection_lent + len(client._transport.idle) == len(client._transport.connections), (
        "none is lost"
    )


@two_servers
@pytest.mark.parametrize("face", ["threads"], indirect=True)
async def test_who_is_called_asks_at_once_where_it_listens_unless_another_does(
    face: Face, server: Server, probe: redis.Redis, no_look: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two names, one connection for messages, read by who came first: the other cannot ask there on its own."""
    client, other = face.client(server.unix_url), face.client(server.unix_url)
    transport, asked, share = client._transport, list[Any](), Connection._share
    monkeypatch.setattr(Connection, "_share", lambda self, *args: asked.append(args) or share(self, *args))
    holders, jobs = [], []
    for name in ("one", "two"):
        holders.append(other.lock(name, timeout=LONG))
        holders[-1].acquire()
        lock = client.lock(name, timeout=LONG, sleep=LONG, thread_local=False)
        jobs.append((lock, face.start(lock.acquire)))
        await until(face, lambda name=name: asleep(transport, name.encode()), "somebody who listens")
    for holder, (lock, job), looks in zip(holders[::-1], jobs[::-1], (1, 0), strict=True):
        asked.clear()
        holder.release()
        assert await job.get(SOON) is True
        assert len([args for args in asked if args[0].needs_push]) == looks
        lock.release()


def asleep(transport: Any, key: bytes) -> bool:
    """Whether the first of those who wait for it sleeps until it is called."""
    queue = transport.queues.by_key.get(key)
    return queue is not None and queue.was_queued and queue.first().on_wake is not None


# -------------------------------------------------------------------------------------------------- all sorts of terms


async def test_a_lock_without_end_goes_from_waiter_to_waiter(
    face: Face, server: Server, probe: redis.Redis, no_look: None
) -> None:
    """Endless ones and others, of the same and of another client: each has the lease it asked for."""
    client, other = face.client(server.unix_url), face.client(server.unix_url)
    holder = await held(face, other, timeout=None)
    assert probe.pttl(NAME) == -1
    asked: list[Any] = [(client, None), (client, None), (client, LONG), (other, None), (client, LONG), (other, LONG)]

    async def user(who: Any, timeout: float | None) -> None:
        lock = who.lock(NAME, timeout=timeout)
        await face.get(lock.acquire())
        assert (probe.pttl(NAME) == -1) == (timeout is None)
        await face.checkpoint()
        await face.get(lock.release())

    jobs = [face.start(lambda who=who, timeout=timeout: user(who, timeout)) for who, timeout in asked]
    await waits(face, client, 4)
    await waits(face, other, 2)
    await queued(face, probe, 2)
    await face.get(holder.release())
    for job in jobs:
        await job.get(SOON)


@pytest.mark.parametrize("token", ["mine", "fl:" + 32 * "0"], ids=["plain", "as ours"])
async def test_tokens_that_were_given_wait_and_are_waited_for(
    face: Face, server: Server, probe: redis.Redis, no_look: None, token: str
) -> None:
    """Their holder may not be told that somebody waits: then whoever does looks every `sleep` seconds."""
    client, other = face.client(server.unix_url), face.client(server.unix_url)
    first, given, last = (who.lock(NAME, LONG, sleep=0.01, thread_local=False) for who in (client, other, client))
    assert await face.get(first.acquire())
    jobs = [face.start(lambda: given.acquire(token=token))]
    await until(face, lambda: probe.info("commandstats").get("cmdstat_pttl"), "a look")
    assert not jobs[0].finished.is_set() and probe.zcard(QUEUE) == 0, "two may give the same one"
    await face.get(first.release())
    assert await jobs[0].get(SOON) is True and probe.get(NAME) == token.encode() == given.lease._raw_token
    jobs.append(face.start(last.acquire))
    await queued(face, probe, 1)
    assert await face.get(given.owned()) and await face.get(given.extend(5))
    await face.get(given.release())
    assert await jobs[1].get(SOON) is True
    await face.get(last.release())


async def test_who_waits_shortly_goes_in_time_and_leaves_nothing(
    face: Face, server: Server, probe: redis.Redis, no_look: None
) -> None:
    """No look is due before its time is over, so it has to go by itself; what comes in time, it gets."""
    client, other = face.client(server.unix_url), face.client(server.unix_url)
    holder = await held(face, other)
    for fair in (False, True):
        assert await face.get(client.lock(NAME, fair=fair).acquire(blocking_timeout=0.03)) is False
        await queued(face, probe, 0)
    lock, job = wait_with(face, client, blocking_timeout=LONG / 3)
    await queued(face, probe, 1)
    assert await face.get(client.lock(NAME).acquire(blocking_timeout=0.03)) is False
    assert probe.zcard(QUEUE) == 1, "the one before it still waits"
    await face.get(holder.release())
    assert await job.get(SOON) is True
    await face.get(lock.release())


# -------------------------------------------------------------------------------------------------------------- batches


async def test_a_batch_that_is_let_go_reaches_all_who_wait(
    face: Face, server: Server, probe: redis.Redis, no_look: None
) -> None:
    """Those of the same client and of others, in strict order or not."""
    client, other = face.client(server.unix_url), face.client(server.unix_url)
    names = [f"n{number}" for number in range(8)]
    leases = await face.get(client.acquire_many(names, timeout=LONG))
    waiters = [(client, 0, False), (other, 1, False), (client, 2, True), (other, 3, True), (client, 4, False)]
    waiters.append((other, 4, False))

    async def user(who: Any, number: int, fair: bool) -> int:
        lock = who.lock(names[number], timeout=LONG, fair=fair)
        await face.get(lock.acquire())
        await face.get(lock.release())
        return number

    jobs = [face.start(lambda each=each: user(*each)) for each in waiters]
    queue = "fastlock:queue:{n%d}"
    for number, count in ((0, 1), (1, 1), (2, 1), (3, 1), (4, 2)):
        await until(face, lambda n=number, c=count: probe.zcard(queue % n) == c, f"{count} for {number}")
    again = await face.get(other.acquire_many([*names, "free"], timeout=LONG))
    assert [lease is not None for lease in again] == [False] * 8 + [True], "a batch waits for nobody, and takes nothing"
    assert await face.get(client.release_many(leases)) == [True] * 8
    assert [await job.get(SOON) for job in jobs] == [0, 1, 2, 3, 4, 4]
    assert await face.get(other.release_many([again[-1]])) == [True]
    assert await face.get(client.release_many(leases)) == [False] * 8


async def test_a_lease_that_goes_round_may_be_let_go_in_a_batch(
    face: Face, server: Server, probe: redis.Redis, no_look: None
) -> None:
    """The next of the client has it then, as after any release."""
    client = face.client(server.unix_url)
    holder = await held(face, face.client(server.unix_url))
    pairs = []
    for number in range(3):
        pairs.append(wait_with(face, client))
        await waits(face, client, number + 1)
    await queued(face, probe, 1)
    await face.get(holder.release())
    for lock, job in pairs:
        assert await job.get(SOON) is True
        assert await face.get(client.release_many([lock.lease])) == [True]


# ------------------------------------------------------------------------------------------ with redis-py's lock


class Theirs:
    """redis-py's lock, in whichever thread uses it."""

    def __init__(self, server: Server, **terms: Any) -> None:
        self.raw = redis.Redis(unix_socket_path=server.path)
        self.lock = self.raw.lock(NAME, **{"timeout": LONG, "thread_local": False, **terms})

    def __enter__(self) -> Any:
        return self.lock

    def __exit__(self, *exc: object) -> None:
        self.raw.close()


async def test_their_holder_tells_nobody_and_is_followed_all_the_same(
    face: Face, server: Server, probe: redis.Redis, no_look: None
) -> None:
    """It cannot be told that somebody waits, so these look every `sleep` seconds."""
    with Theirs(server) as theirs:
        assert theirs.acquire(blocking=False)
        token = probe.get(NAME)
        clients = [face.client(server.unix_url) for _ in range(2)]
        pairs = [wait_with(face, client, sleep=0.01) for client in clients]
        await queued(face, probe, 2)
        assert probe.get(NAME) == token and theirs.owned()
        theirs.release()
        ((first, _),) = await either(face, pairs)
        assert not theirs.acquire(blocking=False) and await face.get(first.owned())
        await face.get(first.release())
        for lock, job in pairs:
            assert await job.get(SOON) is True
            if lock is not first:
                await face.get(lock.release())


async def test_their_lost_lock_frees_nothing_of_ours(
    face: Face, server: Server, probe: redis.Redis, no_look: None
) -> None:
    with Theirs(server) as theirs:
        assert theirs.acquire(blocking=False)
        lock, job = wait_with(face, face.client(server.unix_url), sleep=0.01)
        behind, last = wait_with(face, face.client(server.unix_url), sleep=0.01)
        await queued(face, probe, 2)
        probe.delete(NAME)
        ((first, _),) = await either(face, [(lock, job), (behind, last)])
        for call in (lambda: theirs.extend(5), theirs.reacquire, theirs.release):
            with pytest.raises(redis.exceptions.LockNotOwnedError):
                call()
        assert await face.get(first.owned())
        await face.get(first.release())
        assert [await job.get(SOON), await last.get(SOON)] == [True, True]
        await face.get((behind if first is lock else lock).release())


async def test_their_locks_and_ours_exclude_each_other(face: Face, server: Server, probe: redis.Redis) -> None:
    """Many rounds of both kinds, in threads of their own: never two holders, and nobody is told a lie."""
    overlaps: list[int] = []
    clients = [face.client(server.unix_url) for _ in range(2)]

    def inside() -> None:
        overlaps.append(probe.incr("inside"))
        probe.decr("inside")

    async def ours(number: int) -> None:
        lock = clients[number % 2].lock(NAME, timeout=LONG, sleep=0.001, fair=number == 3)
        for _ in range(20):
            assert await face.get(lock.acquire())
            inside()
            await face.checkpoint()
            assert await face.get(lock.owned())
            await face.get(lock.release())

    def their_rounds() -> None:
        with Theirs(server, sleep=0.001) as theirs:
            for _ in range(20):
                assert theirs.acquire()
                inside()
                assert theirs.owned()
                theirs.release()

    async def beside() -> None:
        await (asyncio.to_thread(their_rounds) if face.is_async else face.get(their_rounds()))

    results = await face.together([*(lambda n=n: ours(n) for n in range(4)), beside, beside])
    assert results == [None] * 6
    assert overlaps == [1] * 120
    probe.delete("inside")
