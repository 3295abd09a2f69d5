"""`client.describe`: who holds a name, of every kind, in this process and in others, and who waits, in order."""

from __future__ import annotations

import asyncio
import os
import platform
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import redis
from support.apis import Api
from support.child_client import LONG, NAME, QUEUE, ROOT, SOON, ChildClient, held, queued, until

from fastlock._protocol.description import Description, Holder
from fastlock._protocol.lease import now, process_id
from fastlock.embedded import Server

pytestmark = pytest.mark.usefixtures("no_leaks")
FAR = 7.0  # seconds by which a time may be off


def running(api: Api) -> Any:
    """The thread or task that runs."""
    return asyncio.current_task() if api.is_async else threading.current_thread()


def me(api: Api) -> str:
    """Its name."""
    return str(running(api).get_name() if api.is_async else running(api).name)


def rename(api: Api, run: Any, name: str) -> None:
    """Give a thread or task this name."""
    if api.is_async:
        run.set_name(name)
    else:
        run.name = name


def only(found: Description) -> Holder:
    (holder,) = found.holders
    return holder


async def described(api: Api, client: Any, name: Any = NAME) -> Description:
    found = await api.get(client.describe(name))
    assert isinstance(found, Description) and found.name is name
    return found


KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": (lambda client: client.lock(NAME), {}),
    "fair": (lambda client: client.lock(NAME, fair=True), {}),
    "endless": (lambda client: client.lock(NAME, timeout=None), {"left": None}),
    "renewed": (lambda client: client.lock(NAME, auto_renew=True), {}),
    "shared by all threads": (lambda client: client.lock(NAME, thread_local=False), {"owner": None}),
    "reentrant": (lambda client: client.reentrant_lock(NAME), {}),
    "multi": (lambda client: client.multi_lock(["other", NAME]), {}),
    "read": (lambda client: client.rw_lock(NAME).read, {"kind": "rw_lock", "mode": "read"}),
    "write": (lambda client: client.rw_lock(NAME).write, {"kind": "rw_lock", "mode": "write"}),
    "endless read": (
        lambda client: client.rw_lock(NAME, timeout=None).read,
        {"kind": "rw_lock", "mode": "read", "left": None},
    ),
    "permits": (lambda client: client.semaphore(NAME, 5, n=2), {"kind": "semaphore", "permits": 2}),
}


@pytest.mark.parametrize("kind", KINDS)
async def test_a_lock_of_this_process(api: Api, server: Server, kind: str) -> None:
    client, asks = api.client(server.url), api.client(server.url)
    make, expected = KINDS[kind]
    before = time.time()
    async with api.within(make(client)):
        found = await described(api, asks)
        holder = only(found)
        assert found.kind == expected.get("kind", "lock") and found.waiters == () and found.fence is None
        assert (holder.process, holder.host, holder.pid) == (process_id().decode(), platform.node(), os.getpid())
        assert holder.connected is True and holder.mine is True and holder.depth == 1
        assert holder.owner == expected.get("owner", me(api))
        assert holder.since is not None and abs(holder.since - before) < FAR
        assert (holder.mode, holder.permits) == (expected.get("mode"), expected.get("permits"))
        if "left" in expected:
            assert holder.left is None
        else:
            assert holder.left is not None and 0 < holder.left <= 30
    assert await described(api, asks) == Description(NAME, None, (), (), None, None, None)


async def test_a_batch(api: Api, server: Server) -> None:
    client = api.client(server.url)
    leases = await api.get(client.acquire_many([NAME, "other"]))
    leases[0]._since = now() - 1000
    holder = only(await described(api, client))
    assert holder.owner is None and holder.since is not None and holder.depth == 1 and holder.mine
    assert abs(time.time() - 1000 - holder.since) < FAR
    leases[0]._since = leases[1]._since
    assert abs(time.time() - only(await described(api, client)).since) < FAR  # type: ignore[operator]
    await api.get(client.release_many(leases))


async def test_depth(api: Api, server: Server) -> None:
    client = api.client(server.url)
    for lock, depth in ((client.reentrant_lock(NAME), 3), (client.rw_lock(NAME).read, 2)):
        for _ in range(depth):
            await api.enter(lock)
        assert only(await described(api, client)).depth == depth
        for left in reversed(range(depth)):
            await api.leave(lock)
            assert [each.depth for each in (await described(api, client)).holders] == [left] * (left > 0)


async def test_the_last_fence(api: Api, server: Server, no_leaks: Any) -> None:
    no_leaks.allow("fastlock:fence:*")
    client = api.client(server.url)
    async with api.within(client.lock(NAME, fence=True)) as lease:
        assert (await described(api, client)).fence == lease.fence
    async with api.within(client.lock(NAME)):  # the counter stays, and this holder has none
        assert (await described(api, client)).fence == lease.fence


async def test_a_writer_that_became_a_reader(api: Api, server: Server) -> None:
    client = api.client(server.url)
    lock = client.rw_lock(NAME)
    await api.enter(lock.write)
    await api.enter(lock.read)
    assert (only(await described(api, client)).mode, only(await described(api, client)).depth) == ("write", 2)
    await api.leave(lock.write)
    holder = only(await described(api, client))
    assert (holder.mode, holder.depth, holder.owner) == ("read", 1, me(api))
    await api.leave(lock.read)


async def test_permits(api: Api, server: Server, no_leaks: Any) -> None:
    no_leaks.allow("fastlock:size:*")
    client = api.client(server.url)
    semaphore = client.semaphore(NAME, 5)
    for n in (1, 3):
        assert await api.get(semaphore.acquire(n))
    found = await described(api, client)
    assert (found.permits, found.used, sorted(each.permits or 0 for each in found.holders)) == (5, 4, [1, 3])
    await api.get(semaphore.resize(9))
    assert ((found := await described(api, client)).permits, found.used) == (9, 4)
    for _ in range(2):
        await api.get(semaphore.release())
    assert ((found := await described(api, client)).kind, found.permits, found.used) == (None, 9, 0)


async def test_leases_that_have_ended_are_not_shown(api: Api, server: Server, probe: redis.Redis) -> None:
    client = api.client(server.url)
    semaphore = client.semaphore(NAME, 5)
    async with api.within(semaphore) as lease:
        probe.zadd(NAME, {lease.token: 1})
        found = await described(api, client)
        assert (found.kind, found.holders) == (None, ())
        probe.zadd(NAME, {lease.token: "+inf"})


async def test_a_lock_of_redis_py(api: Api, server: Server, probe: redis.Redis) -> None:
    with probe.lock(NAME, timeout=LONG):
        found = await described(api, api.client(server.url))
    holder = only(found)
    assert found.kind == "lock"
    assert (holder.process, holder.host, holder.connected, holder.owner, holder.mine) == (None,) * 4 + (False,)
    assert holder.left is not None and 0 < holder.left <= LONG


@pytest.mark.parametrize("of", ["list", "zset", "string"])
async def test_a_key_that_is_no_lock(api: Api, server: Server, probe: redis.Redis, of: str) -> None:
    """A string is a lock, whatever it holds: nobody can acquire it."""
    write = {"list": probe.rpush, "zset": lambda key, value: probe.zadd(key, {value: 10**15}), "string": probe.set}
    write[of](NAME, "fl:" + "Z" * 32)
    found = await described(api, api.client(server.url))
    assert found.kind == ("lock" if of == "string" else "other")
    assert [each.process for each in found.holders] == ([None] if of == "string" else [])
    probe.delete(NAME)


@pytest.mark.parametrize("name", ["a*[b-c]?\\", b"\xff\x00\n", "{tag}x", "a{b}c", "{}", "x" * 5000, "ü {"])
async def test_any_name(api: Api, server: Server, name: Any) -> None:
    client = api.client(server.url)
    lock = client.lock(name, thread_local=False)
    async with api.within(lock):
        waiting = api.client(server.url).lock(name, timeout=LONG, thread_local=False)
        job = api.start(waiting.acquire)
        found = await described(api, client, name)
        while not found.waiters:
            await api.checkpoint()
            found = await described(api, client, name)
        assert only(found).mine and found.waiters[0].mine
    assert await job.get()
    await api.get(waiting.release())


async def test_a_name_that_makes_no_sense(api: Api, server: Server) -> None:
    for name, error in ((1, TypeError), ("", ValueError), ("fastlock:x", ValueError)):
        with pytest.raises(error, match="name"):
            await api.get(api.client(server.url).describe(name))


# --------------------------------------------------------------------------------------------------- which one holds it


async def test_a_thread_or_task_by_its_name(api: Api, server: Server) -> None:
    """Not the one that asks. The name is that which it has by then."""
    client, inside, leave = api.client(server.url), threading.Event(), threading.Event()
    runs: list[Any] = []

    async def hold() -> None:
        runs.append(running(api))
        async with api.within(client.lock(NAME)):
            inside.set()
            await until(api, leave.is_set, "the word to leave", LONG)

    job = api.start(hold)
    await until(api, inside.is_set, "a holder")
    rename(api, runs[0], "stock keeper")
    assert only(await described(api, client)).owner == "stock keeper"
    leave.set()
    await job.get()


@pytest.mark.parametrize("api", ["threads"], indirect=True)
async def test_a_thread_that_has_ended(api: Api, server: Server, probe: redis.Redis) -> None:
    lock = api.client(server.url).lock(NAME)
    await api.start(lock.acquire).get()
    await until(api, lambda: not any(each.name == "job" for each in threading.enumerate()), "the end of the thread")
    assert only(await described(api, api.client(server.url))).owner == "a thread that has ended"
    probe.delete(NAME)


async def test_each_holder_of_several(api: Api, server: Server) -> None:
    clients = [api.client(server.url) for _ in range(2)]
    jobs: list[Any] = []
    inside: list[int] = []
    leave, names = threading.Event(), ["one", "two", "three"]

    async def hold(at: int) -> None:
        rename(api, running(api), names[at])
        async with api.within(clients[at % 2].semaphore(NAME, 5)):
            inside.append(at)
            await until(api, leave.is_set, "the word to leave", LONG)

    for at in range(3):
        jobs.append(api.start(lambda at=at: hold(at)))
    await until(api, lambda: len(inside) == 3, "three holders")
    found = await described(api, clients[0])
    assert sorted(each.owner or "" for each in found.holders) == sorted(names)
    leave.set()
    for job in jobs:
        await job.get()


async def test_no_token_is_shown(api: Api, server: Server, probe: redis.Redis) -> None:
    client = api.client(server.url)
    lock = await held(api, client)
    job = api.start(client.lock(NAME, fair=True, timeout=LONG, thread_local=False).acquire)
    (entry,) = await queued(api, probe, 1)
    shown = repr(await described(api, client))
    for secret in (lock.lease.token[19:], entry[25:41], entry[65:]):
        assert len(secret) == 16 and secret.decode() not in shown
    probe.flushall()
    await job.get()
    probe.flushall()


async def test_a_forked_child_is_another_process(api: Api, server: Server) -> None:
    program = (
        "import os, sys\n"
        "import fastlock\n"
        f"client = fastlock.Client.from_url({server.url!r})\n"
        "with client.lock('parent'):\n"
        "    read, write = os.pipe()\n"
        "    if not (pid := os.fork()):\n"
        "        with client.lock('child'):\n"
        "            (one,), (two,) = (client.describe(name).holders for name in ('parent', 'child'))\n"
        "            assert two.mine and two.pid == os.getpid() and two.owner == 'MainThread', two\n"
        "            assert not one.mine and one.pid == os.getppid() and one.owner is None, one\n"
        "            os.write(write, one.process.encode() + b' ' + two.process.encode())\n"
        "            os._exit(0)\n"
        "    os.waitpid(pid, 0)\n"
        "    (one,) = client.describe('parent').holders\n"
        "    assert one.mine and one.owner == 'MainThread', one\n"
        "    sys.stdout.write(one.process + ' ' + os.read(read, 100).decode())\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=40
    )
    assert done.returncode == 0, done.stderr
    mine, parent, child = done.stdout.split()
    assert mine == parent != child
    with redis.Redis(unix_socket_path=server.path) as probe:
        probe.delete("child")  # the child has left no time for its release


async def test_more_than_a_reply_to_a_lock_has(api: Api, server: Server, probe: redis.Redis) -> None:
    """Thousands of connections, holders and waiters; the client goes on afterwards."""
    client = api.client(server.url)
    probe.client_setname(f"{'x' * 100_000}")
    process = process_id()
    tokens = [b"fl:%b%016x|s1/9999" % (process, i) for i in range(6000)]
    probe.zadd(NAME, dict.fromkeys(tokens, "+inf"))
    probe.zadd(NAME, {"|used": -6000})
    entries = [b"fastlock:%b%016xfl:%032x|s1/9999" % (process, i, i) for i in range(6000)]
    probe.zadd(QUEUE, {entry: i for i, entry in enumerate(entries)})
    found = await described(api, client)
    assert (len(found.holders), len(found.waiters), found.used, found.permits) == (6000, 6000, 6000, 9999)
    assert found.holders[0].pid == found.waiters[-1].pid == os.getpid()
    probe.client_setname("test-probe")
    probe.delete(NAME, QUEUE)
    async with api.within(client.lock(NAME)):
        assert only(await described(api, client)).mine


# ------------------------------------------------------------------------------------------------------ other processes


async def test_a_holder_in_another_process(api: Api, server: Server, probe: redis.Redis) -> None:
    client = api.client(server.url)
    with ChildClient(api, server.url) as child:
        await child.request("acquire", "got")
        holder = only(await described(api, client))
        assert (holder.host, holder.pid, holder.connected) == (platform.node(), child.process.pid, True)
        assert (holder.mine, holder.owner, holder.since, holder.depth) == (False, None, None, None)
        assert holder.process != process_id().decode()
        child.kill()
        knows = not server.version.startswith(("6.", "7.0"))  # the names of libraries, which tell always
        while (holder := only(await described(api, client))).host is not None:
            await api.checkpoint()
        assert holder.connected is (False if knows else None) and holder.process is not None
    probe.delete(NAME)


async def test_a_client_that_has_a_name_of_its_own(api: Api, server: Server) -> None:
    knows = not server.version.startswith(("6.", "7.0"))
    client = api.client(server.url, client_name="shop")
    async with api.within(client.lock(NAME)):
        holder = only(await described(api, client))
    assert (holder.pid, holder.connected) == ((os.getpid(), True) if knows else (None, None))


async def test_waiters_in_order(api: Api, server: Server, probe: redis.Redis) -> None:
    client = api.client(server.url)
    lock = await held(api, client)
    with ChildClient(api, server.url, moment=2.0) as first, ChildClient(api, server.url, moment=2.0) as second:
        for at, child in enumerate((second, first), 1):
            await child.wait_for_line("ready")
            child.send("acquire")
            await queued(api, probe, at)
        job = api.start(client.lock(NAME, fair=True, timeout=LONG, thread_local=False, blocking_timeout=LONG).acquire)
        await queued(api, probe, 3)
        found = await described(api, client)
        assert [each.pid for each in found.waiters] == [second.process.pid, first.process.pid, os.getpid()]
        assert [each.mine for each in found.waiters] == [False, False, True] and only(found).mine
        assert all(each.connected and each.mode is each.permits is None for each in found.waiters)
        await api.get(lock.release())
        await second.wait_for_line("got")
        await until(api, lambda: probe.zcard(QUEUE) == 2, "two in the queue")
        found = await described(api, client)
        assert only(found).pid == second.process.pid
        assert [each.pid for each in found.waiters] == [first.process.pid, os.getpid()]
        for child in (second, first):
            await child.request("release", "released") if child is second else await child.wait_for_line("got")
        await first.request("release", "released")
    await job.get(SOON)
    probe.delete(NAME)


async def test_what_waiters_wait_for(api: Api, server: Server, probe: redis.Redis) -> None:
    client = api.client(server.url)
    lock = client.rw_lock(NAME, timeout=LONG)
    async with api.within(lock.write):
        with ChildClient(api, server.url, kind="read") as reads, ChildClient(api, server.url, kind="write") as writes:
            for at, child in enumerate((reads, writes), 1):
                await child.wait_for_line("ready")
                child.send("acquire")
                await queued(api, probe, at)
            waiters = (await described(api, client)).waiters
            assert [(each.mode, each.pid) for each in waiters] == [
                ("read", reads.process.pid),
                ("write", writes.process.pid),
            ]
    probe.delete(NAME, QUEUE)
    async with api.within(client.semaphore(NAME, 3, n=2, timeout=LONG)):
        with ChildClient(api, server.url, kind="semaphore", permits=3, n=2) as child:
            await child.wait_for_line("ready")
            child.send("acquire")
            await queued(api, probe, 1)
            found = await described(api, client)
            assert [(each.permits, each.pid) for each in found.waiters] == [(2, child.process.pid)]
            assert (found.permits, found.used) == (3, 2)
            probe.delete(QUEUE)
    probe.delete(NAME)
