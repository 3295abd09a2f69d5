"""The loss of a lease is told once, whatever became of an earlier release of it: of one that was cancelled or
interrupted, of a batch that failed for another name, of one beside it that the server refused."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from support.apis import Api
from support.child_client import NAME, SOON, until

import fastlock
from fastlock._locks import paths
from fastlock._protocol import batch
from fastlock._protocol.batch_operations import release_many
from fastlock._protocol.lease import Lease, now
from fastlock._transport import sync
from fastlock.embedded import Server

pytestmark = pytest.mark.usefixtures("no_leaks", "impl")
LOSS = "was lost before it was released"
one_server = pytest.mark.parametrize("server", ["valkey"], indirect=True)
threads_only = pytest.mark.parametrize("api", ["threads"], indirect=True)
tasks_only = pytest.mark.parametrize("api", ["asyncio"], indirect=True)


async def ended(api: Api, probe: redis.Redis, lock: Any) -> Lease:
    """The lease of this lock, which has ended, as the server knows too."""
    assert await api.get(lock.acquire())
    lease: Lease = lock.lease
    lease._shorten(now())
    probe.delete(NAME)
    return lease


def interrupt(monkeypatch: pytest.MonkeyPatch, place: object, name: str) -> None:
    """Let the next call of a function there raise, as a signal handler would."""

    def interrupted(*given: object) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(place, name, interrupted)


@one_server
@tasks_only
@pytest.mark.parametrize("path", ["fast", "contended", "reconnecting"])
async def test_a_release_that_was_cancelled_hides_none(
    api: Api, server: Server, probe: redis.Redis, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    client = api.client(server.url)
    lock = client.lock(NAME, timeout=60)
    lease = await ended(api, probe, lock)
    lease._contended = path == "contended"
    if path == "reconnecting":
        client._transport.connection.fail(EOFError("cut"))
    task = asyncio.ensure_future(lock.release())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(fastlock.LockNotOwnedError):
        await lock.release()
    assert client.get_stats()["losses"] == 1 and caplog.text.count(LOSS) == 1 and lock.lease is None


@one_server
@threads_only
@pytest.mark.fastpath("threads")
async def test_a_release_that_was_interrupted_hides_none(
    api: Api, server: Server, probe: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the fast path's request and the operation that goes on from its answer."""
    client = api.client(server.url)
    lock = client.lock(NAME, timeout=60)
    await ended(api, probe, lock)

    interrupt(monkeypatch, paths.threads, "LockRelease")
    with pytest.raises(KeyboardInterrupt):
        lock.release()
    with pytest.raises(fastlock.LockNotOwnedError):
        lock.release()
    assert client.get_stats()["losses"] == 1 and lock.lease is None


@one_server
@threads_only
@pytest.mark.parametrize("kind", ["semaphore", "read", "write"])
async def test_a_release_that_was_interrupted_as_it_began_is_carried_out(
    api: Api, server: Server, probe: redis.Redis, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    def locks(client: Any) -> tuple[Any, Any]:
        if kind == "semaphore":
            return (client.semaphore(NAME, permits=1, timeout=60, blocking_timeout=SOON),) * 2
        both = client.rw_lock(NAME, timeout=60, blocking_timeout=SOON)
        return (both.read, both.write) if kind == "read" else (both.write, both.read)

    lock, _ = locks(api.client(server.url))
    _, theirs = locks(api.client(server.url))
    lock.acquire()
    lease = lock.lease

    interrupt(monkeypatch, sync.SyncTransport, "run")
    with pytest.raises(KeyboardInterrupt):
        lock.release()
    assert theirs.acquire() and lease._releases == 0
    theirs.release()


@pytest.fixture
def limited(probe: redis.Redis) -> Iterator[str]:
    """The name of a user with all rights, of which a test takes some."""
    probe.acl_setuser("limited", enabled=True, nopass=True, keys="*", channels="*", commands=["+@all"])
    yield "limited"
    probe.acl_deluser("limited")


@pytest.mark.parametrize("kind", ["batch", "multi", "renewed"])
async def test_a_batch_that_fails_for_another_name_tells_it(
    api: Api, server: Server, probe: redis.Redis, limited: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    client, told = api.client(server.url, username=limited, password="any"), list[Any]()
    if kind == "multi":
        multi = client.multi_lock(["a", "b"], timeout=60)
        await api.get(multi.acquire())
    elif kind == "batch":
        leases = await api.get(client.acquire_many(["a", "b"], timeout=60))
    else:
        locks = [client.lock(name, auto_renew=True, on_lost=told.append, thread_local=False) for name in "ab"]
        for each in locks:
            await api.get(each.acquire())
        leases = [each.lease for each in locks]

    async def release() -> Any:
        return await api.get(multi.release() if kind == "multi" else client.release_many(leases))

    probe.delete("a")
    probe.execute_command("ACL", "SETUSER", limited, "resetkeys", "~a", "~fastlock:*", "~*{a}*")
    with pytest.raises(redis.exceptions.NoPermissionError):
        await release()
    assert client.get_stats()["losses"] == 1 and caplog.text.count(LOSS) == 1
    probe.execute_command("ACL", "SETUSER", limited, "~*")
    if kind == "multi":
        with pytest.raises(fastlock.LockNotOwnedError, match="'a' is no longer owned"):
            await release()
    else:
        assert await release() == [False, True]
    assert client.get_stats()["losses"] == 1 and caplog.text.count(LOSS) == 1, "told once"
    if kind == "renewed":
        await until(api, lambda: len(told) == 1, "on_lost")


@one_server
@threads_only
async def test_one_that_the_server_refused_hides_none(
    api: Api, server: Server, probe: redis.Redis, limited: str
) -> None:
    client = api.client(server.url, username=limited, password="any", confirm_release=False)
    lock = client.lock(NAME, timeout=60, thread_local=False)
    lock.acquire()
    lease = lock.lease
    probe.delete(NAME)
    probe.execute_command("ACL", "SETUSER", limited, "-evalsha", "-eval", "-script")
    transport = client._transport
    steps = release_many(batch.owned([lease], []), transport.queues, now)
    step = next(steps)  # it is about to be sent
    lock.release()
    while transport.unconfirmed:  # until the answer to that was read
        client.lock("other", confirm_release=True).locked()
    probe.execute_command("ACL", "SETUSER", limited, "+@all")
    outcome = None
    while outcome is None:
        try:
            step = steps.send(transport._perform(step))
        except StopIteration as returned:
            outcome = returned.value
    assert outcome == [False] and client.get_stats()["losses"] == 1
