"""A waiter that is told of its grant holds the lock at once; the server confirms that behind its back."""

from __future__ import annotations

import math
from typing import Any

import pytest
import redis
from support.apis import Api
from support.child_client import LONG, NAME, QUEUE, SOON, confirmed, held, queued, until, wait_with
from support.faultproxy import FaultProxy, stall, swallow

import fastlock
from fastlock._protocol import commands
from fastlock._protocol.belief import ConfirmationUndo
from fastlock._protocol.commands import QUEUE_KEPT_MS, token_matches
from fastlock._protocol.local_queue import JOINS
from fastlock._protocol.moments import LEAST_MOMENT, MOST_MOMENT
from fastlock._transport.undo_delivery import UndoDelivery
from fastlock.embedded import Server

pytestmark = pytest.mark.usefixtures("no_leaks", "no_waiters", "no_recheck")
COUNTER = "fastlock:fence:{" + NAME + "}"
two_servers = pytest.mark.parametrize("server", ["valkey", "floor"], indirect=True)


def slow(client: Any) -> Any:
    """The client, with a moment that lasts on a busy machine, too."""
    client._transport.queues.moment = MOST_MOMENT
    return client


async def granted(api: Api, server: Server, probe: redis.Redis, client: Any, **settings: Any) -> Any:
    """A lock of the client that was granted while it waited."""
    holder = await held(api, api.client(server.unix_url))
    lock, job = wait_with(api, slow(client), **settings)
    await queued(api, probe, 1)
    await api.get(holder.release())
    assert await job.get(SOON) is True
    return lock


async def grant_unanswered(api: Api, proxy: FaultProxy, probe: redis.Redis, holder: Any) -> Any:
    """The holder releases to the one who waits, of whom nothing arrives at the server from now on."""
    await queued(api, probe, 1)
    armed = proxy.arm(stall("request"), command="EVALSHA")
    await api.get(holder.release())
    return armed


@two_servers
async def test_a_waiter_holds_before_the_server_has_answered(
    api: Api, server: Server, proxy: FaultProxy, probe: redis.Redis
) -> None:
    holder = await held(api, api.client(server.unix_url))
    lock, job = wait_with(api, slow(api.client(proxy.url)))
    armed = await grant_unanswered(api, proxy, probe, holder)
    assert await job.get(SOON) is True, "nothing that it sends arrives"
    assert 0 < lock.lease.remaining <= MOST_MOMENT and token_matches(probe.get(NAME), lock.lease._raw_token)
    await until(api, lambda: armed.fired, "the confirmation")
    armed.resume()
    await until(api, lambda: lock.lease.remaining > MOST_MOMENT, "the confirmation is answered")
    assert probe.pttl(NAME) > 1000 * MOST_MOMENT
    await api.get(lock.release())
    assert not probe.exists(NAME)


@two_servers
async def test_a_lease_is_confirmed_though_its_client_does_nothing_else(
    api: Api, server: Server, probe: redis.Redis
) -> None:
    """In threads nobody waits for the answer: who asks the lease how long it lasts reads it."""
    lock = await granted(api, server, probe, api.client(server.unix_url))
    await until(api, lambda: lock.lease.remaining > MOST_MOMENT, "the confirmation")
    assert lock.lease.valid and lock.lease._confirmation is None
    await api.get(lock.release())


@two_servers
async def test_who_was_too_slow_once_soon_gets_short_moments_again(
    api: Api, server: Server, probe: redis.Redis
) -> None:
    """Also one whose leases are released before it reads that they were confirmed: else each process that is stopped
    now and then would cost the others more and more."""
    client, other = slow(api.client(server.unix_url)), api.client(server.unix_url)
    for _ in range(1 + math.ceil(math.log2(MOST_MOMENT / LEAST_MOMENT))):  # the last confirmation may be unread
        holder = await held(api, other)
        lock, job = wait_with(api, client)
        await queued(api, probe, 1)
        await api.get(holder.release())
        assert await job.get(SOON) is True
        await api.get(lock.release())
    assert client._transport.queues.moment == LEAST_MOMENT


async def test_a_confirmation_that_is_lost_is_sent_again(
    api: Api, server: Server, proxy: FaultProxy, probe: redis.Redis
) -> None:
    client = api.client(proxy.url)
    holder = await held(api, api.client(server.unix_url))
    lock, job = wait_with(api, slow(client))
    await queued(api, probe, 1)
    armed = proxy.arm(swallow(), command="EVALSHA")
    await api.get(holder.release())
    assert await job.get(SOON) is True
    await until(api, lambda: armed.fired, "the confirmation")
    proxy.cut()
    assert 0 < lock.lease.remaining <= MOST_MOMENT  # in threads who asks notices the cut: nobody else reads there
    other = client.lock("other", timeout=LONG)
    assert await api.get(other.acquire()) is True, "over a new connection, behind what was lost"
    await until(api, lambda: lock.lease.remaining > MOST_MOMENT, "the confirmation")
    await api.get(other.release())
    await api.get(lock.release())


@pytest.mark.parametrize("forgotten", [False, True])
async def test_who_believed_a_message_that_was_no_grant_leaves_the_queue(
    api: Api, server: Server, probe: redis.Redis, forgotten: bool
) -> None:
    """Also where the server has forgotten the scripts by then, so that the look is refused first."""
    holder = await held(api, api.client(server.unix_url))
    client = slow(api.client(server.unix_url))
    lock, job = wait_with(api, client)
    await queued(api, probe, 1)
    (queue,) = client._transport.queues.by_entry.values()
    if forgotten:
        probe.script_flush()

    def believed() -> bool:
        """Whether a message is believed: on a busy machine one may come too late after the last look."""
        probe.publish(client._transport.queues.channel, queue.entry)
        return bool(job.finished.is_set())

    await until(api, believed, "the message")
    assert await job.get(SOON) is True
    await until(api, lambda: not lock.lease.valid, "the answer")
    with pytest.raises(fastlock.LockNotOwnedError):
        await api.get(lock.release())
    # Sooner than the server drops the queue by itself
    await until(api, lambda: not probe.exists(QUEUE), "the leave", QUEUE_KEPT_MS / 2000)
    await api.get(holder.release())


@two_servers
async def test_a_grant_that_is_never_confirmed_ends_by_itself(
    api: Api, server: Server, proxy: FaultProxy, probe: redis.Redis
) -> None:
    holder = await held(api, api.client(server.unix_url))
    lock, job = wait_with(api, api.client(proxy.url))
    armed = await grant_unanswered(api, proxy, probe, holder)
    await until(api, lambda: armed.fired, "a look, or the confirmation")
    other = wait_with(api, api.client(server.unix_url))
    await until(api, lambda: not (probe.exists(NAME) and job.finished.is_set() and lock.lease.valid), "its end")
    assert await other[1].get(SOON) is True
    assert not (job.finished.is_set() and lock.lease.valid), "two hold"
    armed.resume()
    if job.finished.is_set():
        with pytest.raises(fastlock.LockNotOwnedError):
            await api.get(lock.release())
        await api.get(other[0].release())
    else:
        await api.get(other[0].release())
        assert await job.get(SOON) is True
        await api.get(lock.release())


@two_servers
async def test_an_extension_of_a_believed_lease_adds_to_the_time_that_was_asked_for(
    api: Api, server: Server, probe: redis.Redis
) -> None:
    lock = await granted(api, server, probe, api.client(server.unix_url), timeout=30)
    assert await api.get(lock.extend(40)) is True
    assert 65 < lock.lease.remaining <= 70 and 65_000 < probe.pttl(NAME) <= 70_000
    await api.get(lock.release())


@two_servers
async def test_a_lease_that_is_renewed_is_not_believed(
    api: Api, server: Server, proxy: FaultProxy, probe: redis.Redis
) -> None:
    holder = await held(api, api.client(server.unix_url))
    lock, job = wait_with(api, slow(api.client(proxy.url)), auto_renew=True)
    armed = await grant_unanswered(api, proxy, probe, holder)
    await until(api, lambda: armed.fired, "the look")
    assert not job.finished.is_set() and lock.lease is None
    armed.resume()
    assert await job.get(SOON) is True
    await api.get(lock.release())


@two_servers
async def test_a_grant_lasts_as_long_as_it_claims_though_the_look_of_one_who_left_has_confirmed_it(
    api: Api, server: Server, proxy: FaultProxy, probe: redis.Redis
) -> None:
    holder, client = await held(api, api.client(server.unix_url)), slow(api.client(proxy.url))
    _, leaving = wait_with(api, client, timeout=10, auto_renew=True, blocking_timeout=1)
    await queued(api, probe, 1)
    lock, job = wait_with(api, client)
    await until(api, lambda: client._transport.queues.by_key[NAME.encode()].waiters.count == 2, "two waiters")
    armed = await grant_unanswered(api, proxy, probe, holder)
    await until(api, lambda: armed.fired, "the look")
    assert await leaving.get(SOON) is False, "its time is over"
    armed.resume()
    assert await job.get(SOON) is True
    await confirmed(api, lock)
    left = probe.pttl(NAME)
    assert 10 < lock.lease.remaining <= (left + 1) / 1000, "the server keeps it for the lease of who holds it"
    await api.get(lock.release())


@two_servers
async def test_a_grant_tells_a_fence(api: Api, server: Server, proxy: FaultProxy, probe: redis.Redis) -> None:
    """Without another answer of the server; its counter counts on from there."""
    client = api.client(proxy.url)
    before = client.lock(NAME, fence=True, timeout=LONG, thread_local=False)
    await api.get(before.acquire())
    first = before.lease.fence
    await api.get(before.release())
    holder = await held(api, api.client(server.unix_url))
    lock, job = wait_with(api, slow(client), fence=True)
    armed = await grant_unanswered(api, proxy, probe, holder)
    assert await job.get(SOON) is True, "nothing that it sends arrives"
    assert lock.lease.fence == first + 1
    await until(api, lambda: armed.fired, "the confirmation")
    armed.resume()
    await confirmed(api, lock)
    await api.get(lock.release())
    await api.get(before.acquire())
    assert before.lease.fence > first + 1
    await api.get(before.release())
    probe.delete(COUNTER)


@two_servers
@pytest.mark.parametrize("counter", ["gone", "no number", "another type"])
async def test_a_fence_that_the_grant_cannot_tell_is_asked_for(
    api: Api, server: Server, probe: redis.Redis, counter: str
) -> None:
    holder = await held(api, api.client(server.unix_url))
    lock, job = wait_with(api, slow(api.client(server.unix_url)), fence=True)
    await queued(api, probe, 1)
    if counter == "no number":
        probe.set(COUNTER, "none")
    elif counter == "another type":
        probe.rpush(COUNTER, "none")
    await api.get(holder.release())
    if counter == "another type":
        with pytest.raises(redis.exceptions.ResponseError):
            await job.get(SOON)
    else:
        assert await job.get(SOON) is True and lock.lease.fence > 1 and lock.lease._confirmation is None
        await api.get(lock.release())
    probe.delete(COUNTER, NAME)


@two_servers
async def test_the_confirmation_is_written_before_the_holder_runs(api: Api, server: Server, probe: redis.Redis) -> None:
    """A holder may block the event loop, as by a call of another library: the moment must not end meanwhile."""
    holder = await held(api, api.client(server.unix_url))
    client = api.client(server.unix_url)
    lock = client.lock(NAME, timeout=LONG, sleep=LONG, thread_local=False)

    async def hold() -> int:
        assert await api.get(lock.acquire()) is True
        while 0 < (left := probe.pttl(NAME)) <= 1000 * MOST_MOMENT:
            pass
        return left

    job = api.start(hold)
    await queued(api, probe, 1)
    await api.get(holder.release())
    assert await job.get(SOON) > 1000 * MOST_MOMENT
    assert lock.lease.remaining > 0
    await api.get(lock.release())


def test_a_confirmation_leaves_a_lease_alone_whose_end_was_moved(server: Server, probe: redis.Redis) -> None:
    """A look of who waits sets what was asked for, exactly: the waiter before may have asked for more."""
    entry, address = b"fl:" + b"a" * 32, commands.address(b"fastlock:" + b"d" * 32, 0.25)
    probe.execute_command(*commands.ENTER_LUA.load)

    def left(how: int, ms: int, before: int | None) -> Any:
        probe.set(NAME, entry, px=before)
        call = commands.enter(NAME.encode(), address, False, how, entry, b"%d" % ms)
        assert probe.execute_command(*call) == [1, 0, 0]
        return probe.pttl(NAME)

    assert left(commands.CONFIRM, 1_000, 60_000) > 50_000 and left(commands.CONFIRM, 1_000, None) == -1
    assert 5_000 < left(commands.CONFIRM, 10_000, 200) <= 10_000 and left(commands.CONFIRM, 0, 200) == -1
    assert 0 < left(commands.LOOK, 1_000, 60_000) <= 1_000 and 0 < left(commands.LOOK, 1_000, None) <= 1_000
    assert left(commands.LOOK, 0, 60_000) == -1
    probe.delete(NAME)


@pytest.mark.parametrize("fair", [False, True], ids=["any", "fair"])
async def test_a_free_name_is_acquired_in_however_little_time(
    api: Api, server: Server, probe: redis.Redis, fair: bool
) -> None:
    """Also one that other clients wanted of late, so that its acquires join at once. On a busy machine the answer may
    come after the limit: then the acquire says so, and another is tried."""
    client = api.client(server.unix_url)
    lock = await granted(api, server, probe, client)
    await api.get(lock.release())
    lock = client.lock(NAME, timeout=LONG, fair=fair, thread_local=False)
    for limit in (0.002, 0.005, 0.02):
        tries = 1
        while await api.get(lock.acquire(blocking_timeout=limit)) is not True:
            assert (tries := tries + 1) <= 100
        await api.get(lock.release())


async def test_who_shared_a_name_joins_at_once_for_a_while(
    api: Api, server: Server, probe: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = api.client(server.unix_url)
    lock = await granted(api, server, probe, client)
    await confirmed(api, lock)
    await api.get(lock.release())
    monkeypatch.setattr(client._transport.queues, "next_sweep", math.inf)
    counted = lambda: probe.info("commandstats")["cmdstat_zrank"]["calls"]  # noqa: E731
    joins = []
    for _ in range(JOINS + 2):
        before = counted()
        await api.get(lock.acquire())
        await api.get(lock.release())
        joins.append(counted() - before)
    assert joins == [1] * JOINS + [0, 0] and client._transport.queues.expected == {}


@pytest.mark.parametrize("api", ["threads"], indirect=True)
async def test_a_confirmation_is_sent_for_the_next_holder_though_a_handler_raised_in_sending_it(
    api: Api, server: Server, probe: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder, client = await held(api, api.client(server.unix_url)), slow(api.client(server.unix_url))
    calls, struck = UndoDelivery.calls, []

    def struck_once(delivery: UndoDelivery, carrier: Any) -> Any:
        made = calls(delivery, carrier)  # from now on it counts as sent
        if isinstance(delivery.undo, ConfirmationUndo) and not struck:
            struck.append(delivery)
            raise TimeoutError("struck")
        return made

    monkeypatch.setattr(UndoDelivery, "calls", struck_once)
    _, leaving = wait_with(api, client, blocking_timeout=SOON)
    await queued(api, probe, 1)
    lock, job = wait_with(api, client)
    await until(api, lambda: client._transport.queues.by_key[NAME.encode()].waiters.count == 2, "two waiters")
    await api.get(holder.release())
    with pytest.raises(TimeoutError, match="struck"):
        await leaving.get(SOON)
    assert await job.get(SOON) is True
    await confirmed(api, lock)
    assert lock.lease.remaining > MOST_MOMENT and probe.pttl(NAME) > 1000 * MOST_MOMENT
    await api.get(lock.release())
