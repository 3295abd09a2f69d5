"""What a client does otherwise where the server is far: where a round trip costs more than a script or a sleep."""

from __future__ import annotations

import pytest
import redis
from support.apis import Api
from support.child_client import NAME
from support.faultproxy import FaultProxy, delay

from fastlock._protocol.local_queue import JOINS
from fastlock._protocol.moments import FAR_SECONDS
from fastlock._transport import waiting
from fastlock.embedded import Server

NEAR, FAR = FAR_SECONDS / 2, FAR_SECONDS * 5


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
