"""Locks on several names on real servers: all or none, who waits for whom, what a failure says, and what is left.

What each reply means, and what lost replies do: protocol/test_multi.py. No test waits for a time to pass.
"""

from __future__ import annotations

import asyncio
import copy
import gc
import os
import pickle
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import redis
from support import overlapping
from support.apis import Api
from support.child_client import LONG, ROOT, SOON, until, waiters_of
from support.faultproxy import FaultProxy, drop, swallow

import fastlock
import fastlock.asyncio
from fastlock._protocol import commands, multi, renewal
from fastlock.embedded import Server

pytestmark = pytest.mark.usefixtures("no_leaks")
threads_only = pytest.mark.parametrize("api", ["threads"], indirect=True)
tasks_only = pytest.mark.parametrize("api", ["asyncio", "asyncio+uvloop"], indirect=True)
one_server = pytest.mark.parametrize("server", ["valkey"], indirect=True)  # where its kind makes no difference
NAMES = ["c", "a", "b"]


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease is due after a hundredth of its time."""
    monkeypatch.setattr(renewal, "DUE_PART", 0.01)
    monkeypatch.setattr(renewal, "EARLY_PART", 0.001)


async def queued(api: Api, probe: redis.Redis, name: str, count: int = 1) -> None:
    await until(api, lambda: probe.zcard(commands.queue_key(name.encode())) == count, f"{count} in the queue of {name}")


async def test_all_names_are_held_until_the_end(api: Api, server: Server, probe: redis.Redis) -> None:
    lock = api.client(server.url).multi_lock(NAMES, timeout=30)
    assert lock.lease is None and not await api.get(lock.locked()) and not await api.get(lock.owned())
    async with api.within(lock) as lease:
        assert isinstance(lease, fastlock.MultiLease) and lock.lease is lease
        assert lease.names == lock.names == ("c", "a", "b")
        assert [each.name for each in lease.leases] == NAMES
        assert lease.valid and 29 < lease.remaining <= 30
        assert [probe.get(name) for name in NAMES] == [each.token for each in lease.leases]
        assert min(probe.pttl(name) for name in NAMES) > 29_000
        assert await api.get(lock.locked()) and await api.get(lock.owned())
    assert not probe.exists(*NAMES) and not lease.valid and lock.lease is None


async def test_a_pair_takes_two_commands(api: Api, server: Server) -> None:
    client = api.client(server.url)
    async with api.within(client.multi_lock(NAMES)):
        pass
    before = client.get_stats()
    async with api.within(client.multi_lock(NAMES)):
        pass
    after = client.get_stats()
    assert after["commands"] - before["commands"] == after["flushes"] - before["flushes"] == 2
    assert after["acquires"] - before["acquires"] == 3


async def test_a_name_that_is_held_blocks_all_and_is_named(api: Api, server: Server, probe: redis.Redis) -> None:
    client, other = api.client(server.url), api.client(server.url)
    held = other.lock("b", timeout=30)
    await api.get(held.acquire())
    lock = client.multi_lock(NAMES, blocking=False)
    assert await api.get(lock.acquire()) is False
    assert probe.exists(*NAMES) == 1, "only what was held before"
    assert lock.blocked.name == "b" and lock.blocked.holder == held.lease.token[3:19].decode()
    assert 29 < lock.blocked.time_left <= 30
    with pytest.raises(fastlock.LockNotAcquiredError, match="'b', for 29") as caught:
        await api.enter(lock)
    error = caught.value
    assert (error.blocked_by, error.holder, error.lock_name) == ("b", lock.blocked.holder, ("c", "a", "b"))
    assert error.time_left is not None and 29 < error.time_left <= 30
    assert held.lease.token.decode()[3:] not in f"{error!r} {vars(error)} {lock.blocked!r} {lock!r}"
    assert pickle.loads(pickle.dumps(error)).blocked_by == "b"
    await api.get(held.release())
    async with api.within(lock):
        pass


async def test_holders_of_other_kinds(api: Api, server: Server, probe: redis.Redis) -> None:
    lock = api.client(server.url).multi_lock([b"a", "b"], blocking_timeout=0.3)
    theirs = probe.lock("a")
    theirs.acquire()
    assert await api.get(lock.acquire()) is False
    assert (lock.blocked.name, lock.blocked.holder, lock.blocked.time_left) == (b"a", None, None)
    with pytest.raises(fastlock.LockNotAcquiredError, match=r"within 0.3 seconds: somebody else holds b'a', without"):
        await api.enter(lock)
    theirs.release()
    async with api.within(lock):
        assert not probe.lock("b").acquire(blocking=False)


async def test_it_excludes_locks_of_each_kind(api: Api, server: Server, probe: redis.Redis) -> None:
    client = api.client(server.url)
    async with api.within(client.multi_lock(NAMES)):
        for other in (client, api.client(server.url)):
            for lock in (other.lock("a"), other.reentrant_lock("b"), other.multi_lock(["c", "d"])):
                assert await api.get(lock.acquire(blocking=False)) is False
        assert not probe.lock("c").acquire(blocking=False) and not probe.exists("d")


async def test_it_waits_in_the_queue_of_the_one_that_is_held(
    api: Api, server: Server, probe: redis.Redis, no_recheck: None, no_waiters: None
) -> None:
    """Nothing is held meanwhile, and a message tells it."""
    client, other = api.client(server.url), api.client(server.url)
    held = other.lock("b", LONG)
    await api.get(held.acquire())
    lock = client.multi_lock(NAMES, LONG, thread_local=False)
    job = api.start(lock.acquire)
    await queued(api, probe, "b")
    assert probe.exists(*NAMES) == 1
    await api.get(held.release())
    assert await job.get(SOON) is True and await api.get(lock.owned())
    assert lock.lease.remaining > 59 and min(probe.pttl(name) for name in NAMES) > 59_000
    await api.get(lock.release())
    assert client.get_stats()["waits"] == client.get_stats()["remote_handovers"] == 1


async def test_each_name_goes_to_whoever_waits_for_it(
    api: Api, server: Server, probe: redis.Redis, no_recheck: None, no_waiters: None
) -> None:
    client = api.client(server.url)
    lock = client.multi_lock(NAMES, LONG)
    await api.get(lock.acquire())
    others = [api.client(server.url).lock(name, LONG, thread_local=False) for name in "ca"]
    waiting = [(each, api.start(each.acquire)) for each in others]
    for name in "ca":
        await queued(api, probe, name)
    before = client.get_stats()["commands"]
    await api.get(lock.release())
    assert client.get_stats()["commands"] == before + 1
    for each, job in waiting:
        assert await job.get(SOON) is True
        await api.get(each.release())


async def test_what_it_holds_while_it_waits_sorts_before_what_it_waits_for(
    api: Api, server: Server, probe: redis.Redis, no_recheck: None, no_waiters: None
) -> None:
    holders = {name: api.client(server.url).lock(name, LONG) for name in "abc"}
    for name in "bc":
        await api.get(holders[name].acquire())
    lock = api.client(server.url).multi_lock(NAMES, LONG, thread_local=False)
    job = api.start(lock.acquire)
    await queued(api, probe, "b")
    await api.get(holders["a"].acquire())
    await api.get(holders["b"].release())
    await queued(api, probe, "a")  # it was granted b, found a held, and gave b up again
    await until(api, lambda: not probe.exists("b"), "b is given up")
    await api.get(holders["a"].release())
    await queued(api, probe, "c")
    assert probe.exists(*NAMES) == 3, "it holds a and b while it waits for c"
    probe.pexpire("a", 5000)
    probe.setrange("b", 0, "fl+")  # as if somebody waited for it
    await api.get(holders["c"].release())
    assert await job.get(SOON) is True
    assert min(probe.pttl(name) for name in NAMES) > 59_000, "each has the whole lease again"
    assert probe.get("b").startswith(b"fl+") and await api.get(lock.owned())
    await api.get(lock.release())


async def test_what_it_holds_while_it_waits_is_extended(
    api: Api, server: Server, probe: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multi, "EXTEND_PART", 0.001)
    holders = {name: api.client(server.url).lock(name, LONG) for name in "ac"}
    for holder in holders.values():
        await api.get(holder.acquire())
    client = api.client(server.url)
    lock = client.multi_lock(NAMES, 3, thread_local=False)
    job = api.start(lock.acquire)
    await queued(api, probe, "a")
    await api.get(holders["a"].release())
    await queued(api, probe, "c")
    for _ in range(5):
        probe.pexpire("a", 1000)
        await until(api, lambda: min(probe.pttl("a"), probe.pttl("b")) > 2000, "an extension")
    await api.get(holders["c"].release())
    assert await job.get(SOON) is True and lock.lease.remaining > 2
    await api.get(lock.release())


@pytest.mark.parametrize("seed", range(3))
async def test_no_name_ever_has_two_holders(
    api: Api, server: Server, probe: redis.Redis, no_waiters: None, seed: int
) -> None:
    """Two clients, plain locks among those on several names, and each caller's sets in a random order."""
    clients, holders, done = [api.client(server.url) for _ in range(2)], dict[str, int](), [0] * 12

    async def work(number: int) -> None:
        rng = random.Random(seed * 100 + number)
        for _ in range(12):
            names = rng.sample("abcd", 1 if number < 3 else rng.randrange(2, 4))
            settings = {"timeout": LONG, "queue": rng.random() < 0.8 or None}
            client = clients[number % 2]
            lock = client.lock(names[0], **settings) if len(names) == 1 else client.multi_lock(names, **settings)
            async with api.within(lock):
                for name in names:
                    assert holders.setdefault(name, number) == number, f"{name} has two holders"
                await asyncio.sleep(0) if api.is_async else time.sleep(0)
                assert all(holders.pop(name) == number for name in names)
            done[number] += 1

    assert await api.together([lambda number=number: work(number) for number in range(12)]) == [None] * 12
    assert done == [12] * 12


@pytest.mark.parametrize(("server", "plain"), [("valkey", 0), ("redis", 6), ("floor", 6)], indirect=["server"])
def test_thirty_processes_with_overlapping_sets_all_come_to_an_end(
    api: Api, server: Server, probe: redis.Redis, plain: int
) -> None:
    args = [server.unix_url, "asyncio" if api.is_async else "threads", "30", "6", str(plain)]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    done = subprocess.run(
        [sys.executable, overlapping.__file__, *args],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=55,
    )
    assert (done.stdout, done.stderr) == ("0 failed\n", "")
    assert [key for key in probe.scan_iter() if not key.startswith(b"fastlock:queue:")] == []


# ----------------------------------------------------------------------------------------------------- release and loss


async def test_a_lost_name_is_named_and_the_others_are_released(api: Api, server: Server, probe: redis.Redis) -> None:
    client = api.client(server.url)
    lock = client.multi_lock(NAMES)
    await api.enter(lock)
    probe.set("a", "another")
    assert not await api.get(lock.owned()) and await api.get(lock.locked())
    with pytest.raises(fastlock.LockNotOwnedError, match="'a' is no longer owned") as caught:
        await api.leave(lock)
    assert caught.value.lock_name == "a" and probe.exists(*NAMES) == 1 and probe.get("a") == b"another"
    assert client.get_stats()["losses"] == 1 and lock.lease is None
    with pytest.raises(fastlock.LockError, match="not owned or already unlocked"):
        await api.get(lock.release())
    probe.delete("a")
    lock = client.multi_lock(NAMES, raise_on_release_error=False)
    await api.enter(lock)
    probe.delete("a", "b")
    await api.leave(lock)


async def test_an_error_in_the_body_is_kept_and_the_loss_noted_beside_it(
    api: Api, server: Server, probe: redis.Redis
) -> None:
    with pytest.raises(KeyError) as caught:
        async with api.within(api.client(server.url).multi_lock(NAMES)):
            probe.delete(*NAMES)
            raise KeyError
    assert "no longer owned" in caught.value.__notes__[0] and "'c', 'a', 'b'" in caught.value.__notes__[0]


async def test_extend_and_reacquire(api: Api, server: Server, probe: redis.Redis) -> None:
    lock = api.client(server.url).multi_lock(NAMES, timeout=20)
    lease = await api.enter(lock)
    assert await api.get(lock.extend(20)) is True and 39 < lease.remaining <= 40
    assert await api.get(lock.extend(5, replace_ttl=True)) is True and 4 < lease.remaining <= 5
    assert max(probe.pttl(name) for name in NAMES) <= 5000
    assert await api.get(lock.reacquire()) is True and 19 < lease.remaining <= 20
    assert min(probe.pttl(name) for name in NAMES) > 19_000
    with pytest.raises(ValueError, match="additional_time"):
        await api.get(lock.extend(0))
    probe.delete("b")
    with pytest.raises(fastlock.LockNotOwnedError, match=r"Cannot extend locks .*: 'b' is no longer owned"):
        await api.get(lock.extend(5))
    assert not lease.valid and lease.remaining == 0
    with pytest.raises(fastlock.LockNotOwnedError, match=r"'b' is no longer owned"):
        await api.leave(lock)
    with pytest.raises(fastlock.LockError, match="unlocked"):
        await api.get(lock.extend(5))


async def test_leases_without_end(api: Api, server: Server, probe: redis.Redis) -> None:
    lock = api.client(server.url).multi_lock(NAMES, timeout=None)
    async with api.within(lock) as lease:
        assert lease.remaining == float("inf") and {probe.pttl(name) for name in NAMES} == {-1}
        with pytest.raises(fastlock.LockError, match="no timeout"):
            await api.get(lock.extend(5))
        other = api.client(server.url).multi_lock(NAMES)
        assert await api.get(other.acquire(blocking=False)) is False and other.blocked.time_left is None


async def test_another_thread_or_task_does_not_release_it(api: Api, server: Server, probe: redis.Redis) -> None:
    lock = api.client(server.url).multi_lock(NAMES)
    await api.enter(lock)
    with pytest.raises(fastlock.LockError, match="another thread or task acquired them"):
        await api.start(lock.release).get()
    assert await api.start(lambda: lock.acquire(blocking=False)).get() is False
    await api.leave(lock)
    shared = api.client(server.url).multi_lock(NAMES, thread_local=False)
    await api.start(shared.acquire).get()
    await api.get(shared.release())


async def test_its_leases_can_be_released_in_a_batch(api: Api, server: Server, probe: redis.Redis) -> None:
    client = api.client(server.url)
    lock = client.multi_lock(NAMES)
    lease = await api.enter(lock)
    assert await api.get(client.release_many(lease.leases)) == [True] * 3 and not lease.valid
    with pytest.raises(fastlock.LockNotOwnedError):
        await api.leave(lock)
    assert lock.lease is None


async def test_a_lease_can_be_copied_and_sent(api: Api, server: Server) -> None:
    lock = api.client(server.url).multi_lock(NAMES)
    async with api.within(lock) as lease:
        again = pickle.loads(pickle.dumps(lease))
        assert again.valid and again.names == lease.names and again.leases[0].token == lease.leases[0].token
        with pytest.raises(TypeError, match="cannot be copied"):
            copy.copy(lock)


async def test_a_thousand_names(api: Api, server: Server, probe: redis.Redis) -> None:
    names = [f"n{i}" for i in range(multi.MAX_NAMES)]
    lock = api.client(server.url).multi_lock(names, timeout=60)
    async with api.within(lock) as lease:
        assert probe.dbsize() == 1000 and await api.get(lock.owned()) and await api.get(lock.extend(60))
        assert lease.remaining > 110


# -------------------------------------------------------------------------------------------------------------- renewal


async def test_a_long_job_keeps_all_of_them(api: Api, server: Server, probe: redis.Redis, often: None) -> None:
    client = api.client(server.url)
    lock = client.multi_lock(NAMES, 5, auto_renew=True)
    lease = await api.enter(lock)
    await until(api, lambda: client.get_stats()["renewals"] >= 15, "five renewals of each")
    assert lease.valid and not lease.lost.is_set() and min(probe.pttl(name) for name in NAMES) > 4000
    waiting = api.start(lambda: lease.lost.wait())
    await until(api, lambda: len(waiters_of(lease)) == 1, "one that waits")
    await api.leave(lock)
    assert await waiting.get() is False and not lease.lost.is_set() and not client._transport.renewals.added


async def test_the_loss_of_one_is_the_loss_of_all(api: Api, server: Server, probe: redis.Redis, often: None) -> None:
    told: list[Any] = []
    client = api.client(server.url)
    lock = client.multi_lock(NAMES, 5, auto_renew=True, on_lost=told.append)
    lease = await api.enter(lock)
    waiting = api.start(lambda: lease.lost.wait(20))
    probe.delete("a")
    assert await waiting.get() is True and lease.lost.is_set() and not lease.valid
    await until(api, lambda: told, "on_lost")
    renewals = [each._renewal for each in lease.leases]
    assert [renewal.until == -float("inf") for renewal in renewals] == [True, False, True], "not renewed any more"
    probe.delete("b")
    with pytest.raises(fastlock.LockNotOwnedError, match="'a', 'b' are no longer owned"):
        await api.leave(lock)
    assert told == [lease] and not probe.exists(*NAMES)


@one_server
async def test_a_lock_that_nobody_refers_to_is_not_renewed(api: Api, server: Server, often: None) -> None:
    client = api.client(server.url)
    lock = client.multi_lock(NAMES, 1, auto_renew=True, on_lost=print)
    await api.get(lock.acquire())
    assert not lock.lease.lost.is_set()
    await until(api, lambda: client.get_stats()["renewals"] >= 6, "renewals")
    del lock
    gc.collect()
    other = api.client(server.url).multi_lock(NAMES)
    assert await api.get(other.acquire(blocking_timeout=20))
    await api.get(other.release())


@tasks_only
async def test_a_loss_cancels_the_body(api: Api, server: Server, probe: redis.Redis, often: None) -> None:
    lock = api.client(server.url).multi_lock(NAMES, 5, auto_renew=True, cancel_on_loss=True)
    with pytest.raises(fastlock.LockLostError, match="were lost while they were held"):
        async with lock:
            probe.delete("a", "b")
            await asyncio.sleep(60)
    assert asyncio.current_task().cancelling() == 0 and not probe.exists(*NAMES)  # type: ignore[union-attr]
    with pytest.raises(fastlock.LockLostError, match="were lost while they were held"):
        async with lock:
            probe.delete("a", "b")  # no renewal has found it yet: the body ends by itself
    async with lock:
        await asyncio.sleep(0)


# ------------------------------------------------------------------------------------------------ faults and interrupts


@pytest.mark.parametrize("lose", [swallow(), drop(replies=0), swallow(close=False)], ids=str)
@one_server
async def test_a_lost_reply_to_an_acquire(api: Api, proxy: FaultProxy, probe: redis.Redis, lose: Any) -> None:
    client = api.client(proxy.url, reply_timeout=0.5)
    await api.get(client.server_info())
    armed = proxy.arm(lose, command="EVALSHA")
    lock = client.multi_lock(NAMES, 30)
    async with api.within(lock) as lease:
        assert armed.fired and lease.valid and await api.get(lock.owned())
    assert not probe.exists(*NAMES)


@pytest.mark.parametrize("lose", [swallow(), drop(replies=0)], ids=str)
@one_server
async def test_a_lost_reply_to_a_release(api: Api, proxy: FaultProxy, probe: redis.Redis, lose: Any) -> None:
    lock = api.client(proxy.url, reply_timeout=0.5).multi_lock(NAMES, 30)
    await api.enter(lock)
    armed = proxy.arm(lose, command="EVALSHA")
    await api.leave(lock)
    assert armed.fired and not probe.exists(*NAMES)


@one_server
async def test_a_release_that_failed_can_be_repeated(api: Api, proxy: FaultProxy, probe: redis.Redis) -> None:
    lock = api.client(proxy.url, reply_timeout=0.2, connect_timeout=0.2).multi_lock(NAMES, 30)
    await api.enter(lock)
    proxy.refuse()
    proxy.cut()
    with pytest.raises(redis.exceptions.ConnectionError):
        await api.get(lock.release())
    assert lock.lease is not None and probe.exists(*NAMES) == 3
    proxy.admit()
    await api.get(lock.release())
    assert lock.lease is None and not probe.exists(*NAMES)


@one_server
async def test_scripts_that_the_server_has_forgotten(api: Api, server: Server, probe: redis.Redis) -> None:
    lock = api.client(server.url).multi_lock(NAMES, 30)
    for _ in range(2):
        probe.script_flush()
        await api.enter(lock)
        probe.script_flush()
        await api.get(lock.extend(5))
        probe.script_flush()
        await api.leave(lock)


@tasks_only
@pytest.mark.parametrize("holds", [False, True], ids=["holds nothing", "holds a and b"])
async def test_a_task_that_is_cancelled_while_it_waits(
    api: Api, server: Server, probe: redis.Redis, no_waiters: None, holds: bool
) -> None:
    holders = {name: api.client(server.url).lock(name, LONG) for name in "ac"}
    await holders["c"].acquire()
    if holds:
        await holders["a"].acquire()
    lock = api.client(server.url).multi_lock(NAMES, LONG)
    task = asyncio.ensure_future(lock.acquire())
    await queued(api, probe, "a" if holds else "c")
    if holds:
        await holders["a"].release()
        await queued(api, probe, "c")
        assert probe.exists(*NAMES) == 3
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await queued(api, probe, "c", 0)
    await until(api, lambda: probe.exists(*NAMES) == 1, "nothing is left")
    assert lock.lease is None
    await holders["c"].release()


@tasks_only
async def test_a_task_that_only_acquires_is_not_the_owner(api: Api, server: Server, probe: redis.Redis) -> None:
    """As `wait_for` makes one until Python 3.12; and a release that another task awaits is that of its caller."""
    lock = api.client(server.url).multi_lock(NAMES)
    assert await asyncio.create_task(lock.acquire())
    assert lock.lease is not None
    await lock.release()
    async with lock:
        await asyncio.gather(lock.extend(5), lock.owned())
        assert await asyncio.shield(lock.owned())
    await lock.acquire()
    await asyncio.shield(lock.release())
    assert not probe.exists(*NAMES)


@one_server
async def test_a_closed_client_leaves_nothing(api: Api, server: Server, probe: redis.Redis) -> None:
    held = api.client(server.url).lock("b", LONG)
    await api.get(held.acquire())
    client = api.client(server.url)
    job = api.start(client.multi_lock(NAMES).acquire)
    await queued(api, probe, "b")
    await api.get(client.close())
    with pytest.raises(fastlock.ClientClosedError):
        await job.get()
    assert probe.exists(*NAMES, commands.queue_key(b"b")) == 1
    await api.get(held.release())


@threads_only
async def test_a_forked_child_owns_nothing(api: Api, server: Server) -> None:
    lock = api.client(server.url).multi_lock(NAMES)
    with lock as lease:
        if (child := os.fork()) == 0:
            try:
                lock.release()
            except fastlock.LockError as error:
                os._exit(0 if "before it forked" in str(error) and not lease.valid else 1)
            os._exit(2)
        assert os.waitpid(child, 0)[1] == 0 and lease.valid


# ----------------------------------------------------------------------------------------------------- a cluster's node


@pytest.fixture
def node(start_server: Callable[..., Server]) -> Server:
    """A cluster of one node."""
    server = start_server("valkey", tcp=True, args=("--cluster-enabled", "yes"))
    with redis.Redis(unix_socket_path=server.path) as raw:
        raw.execute_command("CLUSTER ADDSLOTSRANGE", 0, 16383)
        while raw.cluster("info")["cluster_state"] != "ok":
            time.sleep(0.01)
    return server


@one_server
async def test_names_in_several_hash_slots(api: Api, node: Server, often: None) -> None:
    probe = redis.Redis(unix_socket_path=node.path)
    client, other = api.client(node.unix_url), api.client(node.unix_url)
    lock = client.multi_lock(NAMES, 30, auto_renew=True)
    async with api.within(lock) as lease:
        assert probe.dbsize() == 3 and await api.get(lock.owned())
        await until(api, lambda: client.get_stats()["renewals"] >= 9, "renewals")
        assert await api.get(lock.extend(5))
        again = other.multi_lock(["d", *NAMES])
        assert await api.get(again.acquire(blocking=False)) is False and again.blocked.name == "a"
        await until(api, lambda: not probe.exists("d"), "d is undone")
        assert lease.valid
        before = client.get_stats()["flushes"]
        assert await api.get(client.multi_lock(NAMES).acquire(blocking=False)) is False
        assert client.get_stats()["flushes"] <= before + 3, "it knows the server by now"
    assert not probe.dbsize()
    held = other.lock("b", LONG)
    await api.get(held.acquire())
    lock = client.multi_lock(NAMES, LONG, thread_local=False)
    job = api.start(lock.acquire)
    await queued(api, probe, "b")
    await api.get(held.release())
    assert await job.get(SOON) is True
    await api.get(lock.release())
    async with api.within(client.multi_lock(["{x}a", "{x}b"], atomic=True)):
        assert probe.dbsize() == 2
    assert not probe.dbsize()
    probe.close()


# ------------------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("names", "settings", "error", "text"),
    [
        ([], {}, ValueError, "names must not be empty"),
        ("abc", {}, TypeError, "names must be a list of names, not a single one"),
        (b"abc", {}, TypeError, "names must be a list of names, not a single one"),
        (7, {}, TypeError, "names must be a list, not int"),
        (["a", 7], {}, TypeError, "name must be str, bytes"),
        (["a", ""], {}, ValueError, "name must not be empty"),
        (["a", "b", b"a"], {}, ValueError, "names must not hold a name twice, as 'a'"),
        ([str(i) for i in range(1001)], {}, ValueError, "names must be at most 1000, not 1001"),
        (["fastlock:queue:{a}"], {}, ValueError, "name must not start with 'fastlock:'"),
        (["a", "b"], {"atomic": True}, ValueError, "atomic=True wants all names in one hash slot"),
        (["a", "b"], {"fence": True}, ValueError, "fence=True is a number for one name"),
        (["a"], {"fair": True, "queue": False}, ValueError, "fair=True is an order in the queue"),
        (["a"], {"timeout": 0}, ValueError, "timeout must be at least"),
        (["a"], {"sleep": -1}, ValueError, "sleep must be"),
        (["a"], {"blocking": False, "blocking_timeout": 1}, ValueError, "give one of them"),
        (["a"], {"max_hold": 1}, ValueError, "max_hold is of leases that are renewed"),
        (["a"], {"auto_renew": True, "timeout": None}, ValueError, "timeout must be at least 0.1 seconds"),
    ],
)
@one_server
async def test_bad_input_is_refused_before_anything_is_sent(
    api: Api, server: Server, names: Any, settings: Any, error: type[Exception], text: str
) -> None:
    client = api.client(server.url)
    with pytest.raises(error, match=f"^{text}|{text}$"):
        client.multi_lock(names, **settings)
    with pytest.raises(ValueError, match="give one of them"):
        await api.get(client.multi_lock(["a"]).acquire(blocking=False, blocking_timeout=1))
    assert client.get_stats()["commands"] == 0


async def test_one_hash_slot_is_enough_for_atomic(api: Api, server: Server) -> None:
    async with api.within(api.client(server.url).multi_lock(["a:{o}", "b:{o}"], atomic=True, fair=True)):
        pass


async def test_a_key_that_is_no_lock_is_named(api: Api, server: Server, probe: redis.Redis) -> None:
    probe.zadd("b", {"member": 1})
    lock = api.client(server.url).multi_lock(NAMES)
    with pytest.raises(fastlock.LockKindError, match="'b': its name is in use by something that is no lock"):
        await api.enter(lock)
    assert probe.exists(*NAMES) == 1 and await api.get(lock.locked()) and not await api.get(lock.owned())
    probe.delete("b")


@one_server
async def test_a_name_that_becomes_another_kind_while_it_is_waited_for(
    api: Api, server: Server, probe: redis.Redis
) -> None:
    client, other = api.client(server.url), api.client(server.url)
    held = other.lock("b")
    await api.enter(held)
    waiting = api.start(client.multi_lock(NAMES).acquire)
    await until(api, lambda: probe.exists("fastlock:queue:{b}"), "a waiter")
    probe.delete("b", "fastlock:queue:{b}")
    await api.enter(other.rw_lock("b").read)
    with pytest.raises(fastlock.LockKindError, match=r"lock 'b': its name is in use by a read-write lock$"):
        await waiting.get()
    await until(api, lambda: probe.keys() == [b"b"], "the undo")
    probe.delete("b")


@pytest.mark.parametrize(("server", "release"), [("valkey", "delifeq"), ("redis", "pexpire")], indirect=["server"])
async def test_a_user_that_may_not_queue_polls(api: Api, server: Server, probe: redis.Redis, release: str) -> None:
    """And its releases hand over to nobody."""
    rights = f"set get del pttl exists pexpire evalsha script|load command|info {release}".split()
    probe.execute_command("ACL", "SETUSER", "locker", "reset", "on", "nopass", "~*", *[f"+{each}" for each in rights])
    held = api.client(server.url).lock("b", LONG)
    await api.get(held.acquire())
    client = api.client(f"unix://locker:@{server.path}")
    lock = client.multi_lock(NAMES, LONG, sleep=0.001, thread_local=False)
    job = api.start(lock.acquire)
    await waits_for(api, client)
    await api.get(held.release())
    assert await job.get(SOON) is True and await api.get(lock.owned())
    await api.get(lock.release())
    assert not probe.exists(*NAMES)
    probe.execute_command("ACL", "DELUSER", "locker")


async def waits_for(api: Api, client: Any) -> None:
    start = client.get_stats()["commands"]
    await until(api, lambda: client.get_stats()["commands"] > start + 10, "tries")


@one_server
async def test_the_other_api_is_refused(api: Api, server: Server) -> None:
    lock = api.client(server.url).multi_lock(NAMES)
    with pytest.raises(TypeError, match="use `with`" if not api.is_async else "use `async with`"):
        if api.is_async:
            lock.__enter__()
        else:
            lock.__aenter__().send(None)


@threads_only
@one_server
async def test_many_owners_that_never_release_are_forgotten(api: Api, server: Server, probe: redis.Redis) -> None:
    lock = api.client(server.url).multi_lock(["a"], 0.001)
    for _ in range(200):
        thread = threading.Thread(target=lock.acquire)
        thread.start()
        thread.join()
    await until(api, lambda: not probe.exists("a"), "the end of the last lease")
    assert len(lock._leases) <= 66
