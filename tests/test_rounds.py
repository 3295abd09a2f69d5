"""A lease that goes round among the callers of one client: whose it is, who must not touch it, and how it is missed.

Those who wait behind it do not ask the server; so whatever ends it in another way has to reach them all the same.
"""

from __future__ import annotations

from typing import Any

import pytest
import redis
from redis.crc import key_slot
from support.child_client import NAME, SOON, held, queued, wait_with, waits
from support.faces import Face, Job

import fastlock
from fastlock._protocol import base_lock, commands, local_queue
from fastlock._protocol.base_lock import LocalToken
from fastlock._protocol.extension import Outcome
from fastlock._protocol.lease import now
from fastlock.embedded import Server

pytestmark = pytest.mark.usefixtures("no_leaks", "no_waiters")
threads_only = pytest.mark.parametrize("face", ["threads"], indirect=True)
# For what takes long, since it has to wait: a server with commands of its own for it all, and one with scripts.
two_servers = pytest.mark.parametrize("server", ["valkey", "floor"], indirect=True)


@pytest.fixture(autouse=True)
def slow_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease goes round however slow the machine is."""
    monkeypatch.setattr(local_queue, "LOCAL_SECONDS", 3600.0)


async def one_behind_the_other(face: Face, server: Server, probe: redis.Redis, **terms: Any) -> tuple[Any, Any, Job]:
    """The lock of a caller whom the server has granted it, and that of the next one of its client, who waits."""
    holder = await held(face, face.client(server.unix_url))
    client = face.client(server.unix_url)
    first, job = wait_with(face, client, **terms)
    await queued(face, probe, 1)
    await face.get(holder.release())
    assert await job.get(SOON) is True
    second, waiting = wait_with(face, client, **terms)
    await waits(face, client, 2)
    return first, second, waiting


async def test_who_let_go_in_a_batch_has_nothing_left_to_let_go(
    face: Face, server: Server, probe: redis.Redis, no_look: None
) -> None:
    """The next one holds by the same token."""
    first, second, job = await one_behind_the_other(face, server, probe)
    lease = first.lease
    assert await face.get(first._client.release_many([lease])) == [True]
    assert await job.get(SOON) is True and second.lease._raw_token == lease._raw_token, "it went round"
    assert await face.get(first.owned()) is False and not lease.valid
    for verb in (lambda: first.extend(5), first.reacquire, first.release):
        with pytest.raises(fastlock.LockError):
            await face.get(verb())
    assert await face.get(first._client.release_many([lease])) == [False]
    assert second.lease.valid and await face.get(second.owned()) is True and not lease.valid
    await face.get(second.release())


async def test_an_extension_under_way_does_not_revive_what_was_let_go_of(
    face: Face, server: Server, probe: redis.Redis, no_look: None
) -> None:
    first, second, job = await one_behind_the_other(face, server, probe)
    lease = first.lease
    steps = first._extension(20, True, "extend", first._owner())
    ask = steps.send(None)
    await face.get(first.release())
    assert await job.get(SOON) is True and not lease.valid
    ask.sent = now()
    with pytest.raises(StopIteration) as end:
        steps.send(b"OK")
    assert end.value.value is Outcome.GONE and not lease.valid
    await face.get(second.release())


@pytest.mark.parametrize("tell", [lambda lock: LocalToken(lock).token, lambda lock: lock.lease.token])
async def test_a_token_that_was_told_never_goes_round(
    face: Face, server: Server, probe: redis.Redis, no_look: None, tell: Any
) -> None:
    first, second, job = await one_behind_the_other(face, server, probe)
    token = tell(first)
    await face.get(first.release())
    assert await job.get(SOON) is True and second.lease.token != token
    stranger = face.client(server.unix_url).lock(NAME)
    LocalToken(stranger).token = token
    with pytest.raises(fastlock.LockNotOwnedError):
        await face.get(stranger.release())
    await face.get(second.release())


@two_servers
@pytest.mark.parametrize("how", ["deleted", "let go of by its token", "let go of by its token elsewhere"])
async def test_who_waits_behind_a_lease_without_end_finds_out_that_it_is_gone(
    face: Face, server: Server, probe: redis.Redis, how: str
) -> None:
    first, second, job = await one_behind_the_other(face, server, probe, timeout=None)
    if how == "deleted":
        probe.delete(NAME)
    else:
        client = face.client(server.unix_url) if "elsewhere" in how else first._client
        stranger = client.lock(NAME, timeout=None, thread_local=False)
        LocalToken(stranger).token = LocalToken(first).token
        await face.get(stranger.release())
    assert await job.get(SOON) is True
    with pytest.raises(fastlock.LockNotOwnedError):
        await face.get(first.release())
    await face.get(second.release())


async def test_who_waits_behind_a_short_lease_has_it_when_that_ends(
    face: Face, server: Server, probe: redis.Redis, no_look: None
) -> None:
    """Nobody lets go of it, and nobody looks every second."""
    first, second, job = await one_behind_the_other(face, server, probe, timeout=0.3)
    assert await job.get(SOON) is True
    with pytest.raises(fastlock.LockNotOwnedError):
        await face.get(first.release())
    await face.get(second.release())


@threads_only
async def test_who_is_interrupted_right_after_its_grant_passes_it_on(
    face: Face, server: Server, probe: redis.Redis, no_look: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = await held(face, face.client(server.unix_url))
    client = face.client(server.unix_url)
    _, job = wait_with(face, client)
    await queued(face, probe, 1)
    second, waiting = wait_with(face, client)
    await waits(face, client, 2)
    count = base_lock.LockAcquire._count

    def interrupted(*args: Any) -> None:
        monkeypatch.setattr(base_lock.LockAcquire, "_count", count)
        raise KeyboardInterrupt

    monkeypatch.setattr(base_lock.LockAcquire, "_count", interrupted)
    await face.get(holder.release())
    with pytest.raises(KeyboardInterrupt):
        await job.get(SOON)
    assert await waiting.get(SOON) is True
    await face.get(second.release())


def test_names_with_and_without_a_tag_have_nothing_in_common(impl: str) -> None:
    for name in (b"a", b"{a}", b"{a}b", b"a{b}c", b"sku:42"):
        for key in (commands.queue_key(name), commands.fence_key(name)):
            assert key_slot(key) == key_slot(name) and key.startswith(b"fastlock:")
    names = [b"a", b"{a}", b"a}", b"{a", b":{a}", b"a}b", b"{a}b", b"{}", b":"]
    assert len({commands.queue_key(name) for name in names} | {commands.fence_key(name) for name in names}) == 2 * len(
        names
    )
