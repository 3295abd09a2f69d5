"""A lease that is handed over among the callers of one client: who owns it, who must not touch it, how its loss shows.

Waiters behind the holder send no requests, so they need other means to find out that a lease ended without a release.
"""

from __future__ import annotations

from typing import Any

import pytest
import redis
from redis.crc import key_slot
from support.apis import Api, Job
from support.child_client import NAME, SOON, confirmed, held, queued, until, wait_with, waits
from support.faultproxy import FaultProxy, stall

import fastlock
from fastlock._locks.redis_py import LocalToken
from fastlock._protocol import base_lock, commands, local_queue
from fastlock._protocol.extension import Outcome
from fastlock._protocol.lease import now
from fastlock.embedded import Server

pytestmark = pytest.mark.usefixtures("no_leaks", "no_waiters")
threads_only = pytest.mark.parametrize("api", ["threads"], indirect=True)
# For slow tests, which have to wait: a server with a command for each operation, and one that needs scripts.
two_servers = pytest.mark.parametrize("server", ["valkey", "floor"], indirect=True)


@pytest.fixture(autouse=True)
def unlimited_handovers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease is handed over locally, however slow the machine is."""
    monkeypatch.setattr(local_queue, "LOCAL_SECONDS", 3600.0)


async def holder_and_waiter(api: Api, server: Server, probe: redis.Redis, **settings: Any) -> tuple[Any, Any, Job]:
    """The lock that a client holds by a grant of the server; and a lock of the same client that waits, with its job."""
    holder = await held(api, api.client(server.unix_url))
    client = api.client(server.unix_url)
    first, job = wait_with(api, client, **settings)
    await queued(api, probe, 1)
    await api.get(holder.release())
    assert await job.get(SOON) is True
    await confirmed(api, first)
    second, waiting = wait_with(api, client, **settings)
    await waits(api, client, 2)
    return first, second, waiting


@pytest.mark.parametrize("server", ["valkey"], indirect=True)
async def test_a_lease_that_another_client_releases_is_not_handed_over(
    api: Api, server: Server, probe: redis.Redis, proxy: FaultProxy
) -> None:
    """The next holder would have the token by which the other client releases."""
    holder, second, job = await holder_and_waiter(api, server, probe)
    other, lease = api.client(proxy.url), holder.lease
    armed = proxy.arm(stall("request"), command="DELIFEQ", times=1)
    releasing = api.start(lambda: other.release_many([lease]))
    await until(api, lambda: armed.fired, "the other client's release")
    await api.get(holder.release())
    assert await job.get(SOON)
    armed.resume()
    assert await releasing.get() == [False]
    assert await api.get(second.owned()) and second.lease._raw_token != lease._raw_token
    await api.get(second.release())


async def test_release_in_a_batch_leaves_nothing_to_release(
    api: Api, server: Server, probe: redis.Redis, no_recheck: None
) -> None:
    """The next holder has the same raw token."""
    first, second, job = await holder_and_waiter(api, server, probe)
    lease = first.lease
    assert await api.get(first._client.release_many([lease])) == [True]
    assert await job.get(SOON) is True and second.lease._raw_token == lease._raw_token, (
        "the lease was handed over locally"
    )
    assert await api.get(first.owned()) is False and not lease.valid
    for call in (lambda: first.extend(5), first.reacquire, first.release):
        with pytest.raises(fastlock.LockError):
            await api.get(call())
    assert await api.get(first._client.release_many([lease])) == [False]
    assert second.lease.valid and await api.get(second.owned()) is True and not lease.valid
    await api.get(second.release())


async def test_pending_extension_does_not_revive_a_released_lease(
    api: Api, server: Server, probe: redis.Redis, no_recheck: None
) -> None:
    first, second, job = await holder_and_waiter(api, server, probe)
    lease = first.lease
    steps = first._extension(20, True, "extend", first._owner())
    request = steps.send(None)
    await api.get(first.release())
    assert await job.get(SOON) is True and not lease.valid
    request.sent = now()
    with pytest.raises(StopIteration) as end:
        steps.send(b"OK")
    assert end.value.value is Outcome.GONE and not lease.valid
    await api.get(second.release())


@pytest.mark.parametrize("read", [lambda lock: LocalToken(lock).token, lambda lock: lock.lease.token])
async def test_lease_whose_token_was_read_is_not_handed_over_locally(
    api: Api, server: Server, probe: redis.Redis, no_recheck: None, read: Any
) -> None:
    first, second, job = await holder_and_waiter(api, server, probe)
    token = read(first)
    await api.get(first.release())
    assert await job.get(SOON) is True and second.lease.token != token
    stranger = api.client(server.unix_url).lock(NAME)
    LocalToken(stranger).token = token
    with pytest.raises(fastlock.LockNotOwnedError):
        await api.get(stranger.release())
    await api.get(second.release())


@two_servers
@pytest.mark.parametrize("how", ["deleted", "released by its token", "released by its token in another client"])
async def test_waiter_behind_a_lease_without_end_notices_that_it_is_gone(
    api: Api, server: Server, probe: redis.Redis, how: str
) -> None:
    first, second, job = await holder_and_waiter(api, server, probe, timeout=None)
    if how == "deleted":
        probe.delete(NAME)
    else:
        client = api.client(server.unix_url) if "another" in how else first._client
        stranger = client.lock(NAME, timeout=None, thread_local=False)
        LocalToken(stranger).token = LocalToken(first).token
        await api.get(stranger.release())
    assert await job.get(SOON) is True
    with pytest.raises(fastlock.LockNotOwnedError):
        await api.get(first.release())
    await api.get(second.release())


async def test_waiter_behind_a_short_lease_acquires_when_it_ends(
    api: Api, server: Server, probe: redis.Redis, no_recheck: None
) -> None:
    """The lease is not released, and no waiter asks the server every second."""
    first, second, job = await holder_and_waiter(api, server, probe, timeout=0.3)
    assert await job.get(SOON) is True
    with pytest.raises(fastlock.LockNotOwnedError):
        await api.get(first.release())
    await api.get(second.release())


@threads_only
async def test_waiter_interrupted_right_after_its_grant_hands_it_over(
    api: Api, server: Server, probe: redis.Redis, no_recheck: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = await held(api, api.client(server.unix_url))
    client = api.client(server.unix_url)
    _, job = wait_with(api, client)
    await queued(api, probe, 1)
    second, waiting = wait_with(api, client)
    await waits(api, client, 2)
    count = base_lock.LockAcquire._count

    def interrupted(*args: Any) -> None:
        monkeypatch.setattr(base_lock.LockAcquire, "_count", count)
        raise KeyboardInterrupt

    monkeypatch.setattr(base_lock.LockAcquire, "_count", interrupted)
    await api.get(holder.release())
    with pytest.raises(KeyboardInterrupt):
        await job.get(SOON)
    assert await waiting.get(SOON) is True
    await api.get(second.release())


def test_names_with_and_without_a_tag_share_no_key(impl: str) -> None:
    for name in (b"a", b"{a}", b"{a}b", b"a{b}c", b"sku:42"):
        for key in (commands.queue_key(name), commands.fence_key(name)):
            assert key_slot(key) == key_slot(name) and key.startswith(b"fastlock:")
    names = [b"a", b"{a}", b"a}", b"{a", b":{a}", b"a}b", b"{a}b", b"{}", b":"]
    assert len({commands.queue_key(name) for name in names} | {commands.fence_key(name) for name in names}) == 2 * len(
        names
    )
