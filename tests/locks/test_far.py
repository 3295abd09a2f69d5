"""What a client does otherwise where the server is far: where a round trip costs more than a script or a sleep."""

from __future__ import annotations

from typing import Any

import pytest
import redis
from support.apis import Api
from support.child_client import NAME, SOON, queued, two_connections, until
from support.faultproxy import Armed, Fault, FaultProxy, delay, stall

from fastlock._protocol import commands
from fastlock._protocol.local_queue import JOINS
from fastlock._protocol.moments import FAR_SECONDS
from fastlock._transport import sync, waiting
from fastlock.embedded import Server

NEAR, FAR = FAR_SECONDS / 2, FAR_SECONDS * 5
LONG = 60.0  # seconds: a reply_timeout that never ends


@pytest.mark.parametrize("far", [False, True], ids=["near", "far"])
async def test_the_release_after_one_that_had_to_be_repeated_hands_over_at_once(
    api: Api, server: Server, probe: redis.Redis, proxy: FaultProxy, far: bool
) -> None:
    """A delete that finds that somebody waits costs a round trip more: where that is long, not again and again."""
    client, other = api.client(proxy.url), api.client(server.unix_url)
    lock, theirs = client.lock(NAME), other.lock(NAME, blocking_timeout=30, thread_local=False)

    def sent() -> int:
        return sum(NAME.encode() in words for words in proxy.commands)

    async def contended_release() -> int:
        """How many commands it takes."""
        assert await api.get(lock.acquire())
        client._transport.queues.round_trip = FAR if far else NEAR
        waiting = api.start(lambda: api.get(theirs.acquire()))
        while not (probe.get(NAME) or b"").startswith(b"fl+"):
            await api.checkpoint()
        before = sent()
        await api.get(lock.release())
        count = sent() - before
        assert await waiting.get()
        await api.get(theirs.release())
        return count

    assert await contended_release() == 2
    assert await contended_release() == (1 if far else 2)
    for _ in range(JOINS):
        assert await api.get(lock.acquire())
        await api.get(lock.release())
    queues = client._transport.queues
    assert not queues.expected, "nobody else wanted it since"
    assert await api.get(lock.acquire())
    queues.round_trip = FAR
    probe.script_flush()
    await api.get(lock.release())
    assert not queues.expected, "nor was the release repeated for anybody who waits"


async def test_a_server_is_far_once_replies_have_taken_long(api: Api, server: Server, proxy: FaultProxy) -> None:
    client = api.client(proxy.url)
    lock = client.lock(NAME)
    proxy.arm(delay(2 * FAR_SECONDS), after=b"PX", times=None)
    for _ in range(4):
        assert await api.get(lock.acquire())
        await api.get(lock.release())
    assert client._transport.queues.far() and client.get_stats()["round_trip_us"] >= 2e6 * FAR_SECONDS


@pytest.mark.parametrize("api", ["threads"], indirect=True)
async def test_a_far_server_is_not_polled_for_its_reply(api: Api, server: Server) -> None:
    client = api.client(server.unix_url)
    lock = client.lock(NAME)
    assert await api.get(lock.acquire())
    await api.get(lock.release())
    for far in (False, True, False):
        client._transport.queues.round_trip = FAR if far else NEAR
        assert (waiting.spin_seconds(client._transport) == 0.0) is far


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
@pytest.mark.parametrize("api", ["threads"], indirect=True)
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
@pytest.mark.parametrize("api", ["threads"], indirect=True)
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


@pytest.mark.parametrize("api", ["threads"], indirect=True)
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
