"""confirm_release=False in threads, where the next acquire waits in the queue and nobody else reads the answer."""

from __future__ import annotations

import os
import select
import signal
import threading
from typing import Any

import pytest
import redis
from support.apis import Api
from support.child_client import NAME, QUEUE, SOON, away_from_push, queued, two_connections, until
from support.faultproxy import Armed, Fault, FaultProxy, stall

from fastlock._protocol import commands
from fastlock._transport import sync
from fastlock.embedded import Server

LONG = 60.0  # seconds: a reply_timeout that never ends
threads_only = pytest.mark.parametrize("api", ["threads"], indirect=True)
one_server = pytest.mark.parametrize("server", ["valkey"], indirect=True)  # where its kind makes no difference


async def with_release_under_way(
    api: Api, proxy: FaultProxy, client: Any, fault: Fault, fair: bool
) -> tuple[Any, Armed]:
    """A lock whose release nobody waits for, and of which this becomes; its next acquire joins the queue at once."""
    lock = client.lock(NAME, fair=fair, thread_local=False, timeout=60)
    if not api.is_async:
        two_connections(client)
    for _ in range(3):
        client._transport.queues.expect(NAME.encode(), True)
        await api.get(lock.acquire())
        await api.get(lock.release())
    assert await api.get(lock.acquire())
    armed = proxy.arm(fault, after=commands.HAND_OVER_LUA.sha, times=1)
    if not api.is_async:
        away_from_push(client)
    await api.get(lock.release())
    await until(api, lambda: armed.fired, "the release")
    carrier = client._transport.unconfirmed[NAME.encode()].carrier
    assert api.is_async or carrier is not client._transport.push_connection
    return lock, armed


joins_at_once = pytest.mark.parametrize("fair", [True, False], ids=["fair", "contended of late"])


@joins_at_once
async def test_a_join_does_not_wait_for_the_answer_to_a_release_that_nobody_waits_for(
    api: Api, proxy: FaultProxy, fair: bool
) -> None:
    client = api.client(proxy.url, confirm_release=False, reply_timeout=LONG)

    def joins() -> int:
        return sum(commands.ENTER_LUA.sha in words for words in proxy.commands)

    lock, armed = await with_release_under_way(api, proxy, client, stall(), fair)
    count, job = joins(), api.start(lock.acquire)
    await until(api, lambda: joins() > count, "the join")
    if api.is_async:  # over one connection the answers come in order
        armed.resume()
    assert await job.get(SOON)
    armed.resume()
    await api.get(lock.release())
    assert client.get_stats()["losses"] == 0


@joins_at_once
@threads_only
async def test_a_release_that_hangs_is_sent_again_while_the_next_acquire_waits(
    api: Api, proxy: FaultProxy, fair: bool
) -> None:
    client = api.client(proxy.url, confirm_release=False, reply_timeout=0.5)
    lock, armed = await with_release_under_way(api, proxy, client, stall("request"), fair)
    listening = client._transport.push_connection
    job = api.start(lock.acquire)
    assert await job.get(SOON)
    assert client._transport.connections == [listening], "the one that hangs was given up"
    armed.resume()
    await api.get(lock.release())
    assert client.get_stats()["losses"] == 0


@joins_at_once
@threads_only
async def test_a_waiter_hears_of_its_grant_though_the_answer_to_a_release_has_not_come(
    api: Api, server: Server, proxy: FaultProxy, probe: redis.Redis, fair: bool
) -> None:
    client = api.client(proxy.url, confirm_release=False, reply_timeout=LONG)
    theirs = api.client(server.unix_url).lock(NAME, thread_local=False)
    lock, armed = await with_release_under_way(api, proxy, client, stall(), fair)
    assert await api.get(theirs.acquire())
    job = api.start(lock.acquire)
    await queued(api, probe, 1)
    await api.get(theirs.release())
    assert await job.get(SOON)
    armed.resume()
    await api.get(lock.release())
    assert client.get_stats()["losses"] == 0


@threads_only
async def test_several_names_do_not_wait_again_and_again_for_a_server_that_hangs(
    api: Api, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = api.client(proxy.url, confirm_release=False)
    async with api.within(client.lock(NAME)):
        armed = proxy.arm(stall("request"), after=commands.HAND_OVER_LUA.sha, times=1)
    await until(api, lambda: armed.fired, "the release")
    hung = proxy.arm(stall("request"), new_only=True)
    proxy.cut()
    monkeypatch.setattr(sync, "CLOSE_SECONDS", 0.1)
    before = proxy.accepted
    with pytest.raises(redis.exceptions.TimeoutError):
        await api.get(client.multi_lock([NAME, "other"], blocking_timeout=0.05).acquire())
    assert proxy.accepted - before <= 2, "one to send the release again, and one to acquire"
    hung.resume()


@threads_only
@one_server
async def test_each_of_two_waiters_gives_up_a_connection_that_hangs(api: Api, proxy: FaultProxy) -> None:
    """Both look for an answer over the same one."""
    client = api.client(proxy.url, confirm_release=False, reply_timeout=0.5)
    locks = [client.lock(name, fair=True, thread_local=False, timeout=60) for name in ("a", "b")]
    two_connections(client)
    for _ in range(3):
        for lock in locks:
            await api.get(lock.acquire())
            await api.get(lock.release())
    for lock in locks:
        await api.get(lock.acquire())
    armed = proxy.arm(stall("request"), after=commands.HAND_OVER_LUA.sha, times=1)
    away_from_push(client)
    for lock in locks:
        await api.get(lock.release())
    await until(api, lambda: armed.fired, "a release")
    assert len({each.carrier for each in client._transport.unconfirmed.values()}) == 1
    for job in [api.start(lock.acquire) for lock in locks]:
        assert await job.get(SOON)
    armed.resume()
    for lock in locks:
        await api.get(lock.release())
    assert client.get_stats()["losses"] == 0


@threads_only
@one_server
async def test_a_connection_that_another_thread_reads_is_not_given_up(api: Api, proxy: FaultProxy) -> None:
    client = api.client(proxy.url, confirm_release=False)
    _, armed = await with_release_under_way(api, proxy, client, stall(), True)
    delivery = client._transport.unconfirmed[NAME.encode()]
    carrier, pending = delivery.carrier, delivery.carrier.impl.PendingReply()
    delivery.awaited = 1.0  # for very long
    wake = threading.Lock()
    with wake:
        assert carrier.stream.lead(pending, wake)
        await api.start(lambda: client._transport.read_unconfirmed(NAME.encode())).get()
        pending.cancelled = True
        carrier.stream.resign(pending)
    assert carrier.error is None
    client._transport.read_unconfirmed(NAME.encode())
    assert carrier.error is not None
    armed.resume()


@threads_only
@one_server
@pytest.mark.parametrize("known", [False, True], ids=["slow path", "fast path"])
async def test_the_next_release_reads_what_became_of_the_last_one(
    api: Api, server: Server, probe: redis.Redis, known: bool
) -> None:
    client, told = api.client(server.url, confirm_release=False), []
    two_connections(client)
    lock = client.lock(NAME, fair=True, thread_local=False, on_lost=told.append)
    for _ in range(3):
        await api.get(lock.acquire())
        await api.get(lock.release())
    await api.get(lock.acquire())
    probe.delete(NAME)
    away_from_push(client)
    await api.get(lock.release())
    carrier = client._transport.unconfirmed[NAME.encode()].carrier
    assert select.select([carrier.sock], [], [], SOON)[0], "the answer"
    await api.get(lock.acquire())
    assert client.get_stats()["losses"] == 0
    carrier.knows_release = known
    await api.get(lock.release())
    await until(api, lambda: told, "on_lost")
    assert client.get_stats()["losses"] == 1


@threads_only
@one_server
async def test_several_names_wait_for_an_answer_no_longer_than_their_caller(api: Api, proxy: FaultProxy) -> None:
    client = api.client(proxy.url, confirm_release=False, reply_timeout=LONG)
    _, armed = await with_release_under_way(api, proxy, client, stall(), True)
    job = api.start(client.multi_lock([NAME, "other"], blocking_timeout=0.05).acquire)
    assert not await job.get(SOON)
    armed.resume()


@threads_only
@one_server
async def test_a_handler_that_acquires_several_names_does_not_wait_for_its_own_thread(
    api: Api, proxy: FaultProxy
) -> None:
    """The thread waits for a reply over the connection that carries the release."""
    client = api.client(proxy.url, confirm_release=False, reply_timeout=SOON)
    lock = client.lock(NAME, thread_local=False)
    async with api.within(lock):
        pass
    (carrier,) = client._transport.connections
    await api.get(lock.acquire())
    armed, acquired = proxy.arm(stall(), after=commands.HAND_OVER_LUA.sha, times=1), []
    await api.get(lock.release())
    await until(api, lambda: armed.fired, "the release")

    def handler(*_: object) -> None:
        acquired.extend(client.acquire_many([NAME, "other"]))
        armed.resume()

    def strike() -> None:
        while carrier.stream.pending < 2:
            pass
        os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, handler)
    striker = threading.Thread(target=strike)
    striker.start()
    try:
        assert lock.acquire(blocking=False)
    finally:
        striker.join()
        signal.signal(signal.SIGUSR1, before)
    mine, other = acquired
    assert mine is None and other is not None and carrier.error is None
    client.release_many([*acquired, lock.lease])


@one_server
async def test_a_loss_is_told_behind_a_script_that_was_forgotten(api: Api, server: Server, probe: redis.Redis) -> None:
    """What the server had no script for was not executed."""
    client, told = api.client(server.url, confirm_release=False), []
    lock = client.lock(NAME, on_lost=told.append)
    for _ in range(3):
        async with api.within(lock):
            pass
    async with api.within(lock):
        probe.set(NAME, "another", px=60_000)
        probe.script_flush()
    await api.get(client.close())
    await until(api, lambda: told, "on_lost")
    assert client.get_stats()["losses"] == 1 and client.get_stats()["recovered"] == 0
    probe.delete(NAME)


@threads_only
async def test_a_waiter_leaves_where_others_had_the_scripts_loaded(
    api: Api, server: Server, probe: redis.Redis, no_leaks: Any
) -> None:
    """As a release does for which nobody waits. The waiter's client is not used again, so that nobody would read that
    the server does not know the script by which it leaves; it had loaded that, before the server forgot it."""
    unconfirmed, holder, waiter = (api.client(server.url, confirm_release=each) for each in (False, True, False))
    for client in waiter, unconfirmed:
        probe.script_flush()
        async with api.within(client.lock("another")):
            pass
        await until(api, lambda: not probe.exists("another"), "the release")
    held = holder.lock(NAME, timeout=LONG)
    assert await api.get(held.acquire())
    assert not await api.get(waiter.lock(NAME).acquire(blocking_timeout=0.05))
    for _ in range(2):  # what was sent before is executed by now
        probe.ping()
    assert not probe.exists(QUEUE)
    await api.get(held.release())
