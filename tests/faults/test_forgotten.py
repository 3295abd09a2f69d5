"""No waiter is forgotten: holders and waiters that are killed, frozen, cut off; scripts lost; users without rights.

The regular recheck of a waiter (every second) is switched off where something else has to serve it; where the recheck
serves it, leases are far longer than a test may take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from support.apis import Api
from support.child_client import LONG, NAME, QUEUE, SOON, ChildClient, either, held, queued, until, wait_with
from support.faultproxy import FaultProxy, stall, swallow

import fastlock
from fastlock._protocol.commands import CHANNEL_SIZE, QUEUE_KEPT_MS, TOKEN_SIZE, token_matches
from fastlock._protocol.undo import Undo
from fastlock.embedded import Server

pytestmark = pytest.mark.usefixtures("no_leaks", "no_waiters")
# For tests that take long, since they wait: a server with commands for everything, and one that needs scripts.
two_servers = pytest.mark.parametrize("server", ["valkey", "floor"], indirect=True)
PUSH = b"$7\r\nmessage\r\n"  # the beginning of each message to a waiter
TWO_RECHECKS = (
    4.0  # seconds: a grant's moment and the recheck after it take two at most; twice as much on a busy machine
)


async def listening(api: Api, probe: redis.Redis, count: int) -> None:
    """Wait until the server has so many clients subscribed; it knows by that which clients are connected."""
    await until(api, lambda: len(probe.pubsub_channels("fastlock:*")) == count, f"{count} subscribed")


async def served(api: Api, *waiting: tuple[Any, Any]) -> None:
    """These waiters get the lock in this order, each as soon as the one before has released it."""
    for number, (lock, job) in enumerate(waiting):
        assert await job.get(SOON) is True
        assert lock.lease.valid and not any(later.finished.is_set() for _, later in waiting[number + 1 :])
        await api.get(lock.release())


# ------------------------------------------------------------------------------------------------ killed processes

OTHER_KEYS = """
for i = 1, 20000 do
  if ARGV[1] == 'SET' then
    redis.call('SET', 'other:' .. i, 'x', 'PX', 500 + i % 5000)
  else
    redis.call('DEL', 'other:' .. i)
  end
end
"""


@two_servers
async def test_a_waiter_follows_a_killed_holder_when_its_lease_ends(
    api: Api, server: Server, probe: redis.Redis, no_recheck: None
) -> None:
    """The server may expire the key of the lease late, as one of many."""
    with ChildClient(api, server.unix_url, timeout=1.0) as child:
        await child.wait_for_line("ready")
        probe.eval(OTHER_KEYS, 0, "SET")
        token = (await child.request("acquire", "got")).split()[1]
        lock, job = wait_with(api, api.client(server.unix_url))
        await until(api, lambda: probe.zcard(QUEUE) or job.finished.is_set(), "a waiter")
        assert job.finished.is_set() or token_matches(probe.get(NAME), token.encode())
        child.kill()
        await served(api, (lock, job))
    probe.eval(OTHER_KEYS, 0, "DEL")


@two_servers
async def test_a_waiter_is_served_though_earlier_ones_were_killed(
    api: Api, server: Server, probe: redis.Redis, no_recheck: None
) -> None:
    """The server knows which clients are still connected, and passes over the others."""
    with ChildClient(api, server.unix_url) as first, ChildClient(api, server.unix_url) as second:
        holder = await held(api, api.client(server.unix_url))
        for number, child in enumerate((first, second)):
            await child.wait_for_line("ready")
            child.send("acquire")
            await queued(api, probe, number + 1)
        waiting = [wait_with(api, api.client(server.unix_url))]
        await queued(api, probe, 3)
        first.kill()
        second.kill()
        await listening(api, probe, 1)
        await api.get(holder.release())
        await served(api, *waiting)
        assert not probe.exists(QUEUE)


@two_servers
async def test_a_new_waiter_is_served_after_all_were_killed(
    api: Api, server: Server, probe: redis.Redis, no_recheck: None
) -> None:
    """Where no waiter comes, the queue expires by itself."""
    with ChildClient(api, server.unix_url, timeout=1.0) as holder, ChildClient(api, server.unix_url) as waiter:
        for child in (holder, waiter):
            await child.wait_for_line("ready")
        await holder.request("acquire", "got")
        waiter.send("acquire")
        await until(api, lambda: probe.zcard(QUEUE) or "got" in str(waiter.output), "a waiter")
        holder.kill()
        waiter.kill()
        await listening(api, probe, 0)
        assert 0 < probe.pttl(NAME) <= 1000 and 0 < probe.pttl(QUEUE) <= QUEUE_KEPT_MS == 10_000
        lock, job = wait_with(api, api.client(server.unix_url))
        await served(api, (lock, job))
        assert not probe.exists(QUEUE)


@two_servers
async def test_a_frozen_waiter_delays_others_only_for_a_moment(api: Api, server: Server, probe: redis.Redis) -> None:
    """Its grant is for a moment; when it continues it is no holder, and waits behind the others, by another entry."""
    with ChildClient(api, server.unix_url, timeout=LONG) as child:
        await child.wait_for_line("ready")
        holder = await held(api, api.client(server.unix_url))
        child.send("acquire")
        (entry,) = await queued(api, probe, 1)
        lock, job = wait_with(api, api.client(server.unix_url))
        await queued(api, probe, 2)
        child.stop()
        await api.get(holder.release())
        assert token_matches(probe.get(NAME), entry[-TOKEN_SIZE:]), (
            "the server must grant the name to the frozen waiter"
        )
        assert await job.get(TWO_RECHECKS) is True
        behind = wait_with(api, api.client(server.unix_url))
        await queued(api, probe, 1)
        child.go_on()
        again = (await queued(api, probe, 2))[1]
        assert again[:CHANNEL_SIZE] == entry[:CHANNEL_SIZE] and again != entry, "it must wait behind the others"
        await api.get(lock.release())
        await served(api, behind)
        token = (await child.wait_for_line("got")).split()[1]
        assert token_matches(probe.get(NAME), token.encode()) and child.output == ["ready", f"got {token}"]
        assert await child.request("release", "released") == "released"
        assert await child.request("queues", "queues") == "queues 0"


# --------------------------------------------------------------------------------------------- killed connections


@two_servers
@pytest.mark.parametrize("kinds", [["pubsub"], ["pubsub", "normal"]], ids=["messages", "all"])
async def test_a_waiter_keeps_its_entry_when_connections_are_killed(
    api: Api, server: Server, probe: redis.Redis, no_recheck: None, kinds: list[str]
) -> None:
    one, two = (api.client(server.unix_url) for _ in range(2))
    holder = await held(api, api.client(server.unix_url))
    waiting = []
    for number, (client, fair) in enumerate([(one, False), (two, False), (one, True)]):
        waiting.append(wait_with(api, client, fair=fair))
        entries = await queued(api, probe, number + 1)
    for _ in range(3):
        killed = subscribers(probe)
        assert len(killed) == 2
        for kind in kinds:
            probe.client_kill_filter(_type=kind, skipme=True)
        await until(api, lambda killed=killed: len(subscribers(probe) - killed) == 2, "new connections for messages")
    assert await queued(api, probe, 3) == entries
    await api.get(holder.release())
    await served(api, *waiting)


@pytest.mark.parametrize("server", ["valkey", "redis", "floor"], indirect=True)
async def test_a_waiter_is_served_by_a_server_out_of_memory(
    api: Api, server: Server, probe: redis.Redis, no_recheck: None
) -> None:
    """The server refuses commands that may need memory, but no script that has begun to write: each begins with a
    command that frees memory."""
    holder = await held(api, api.client(server.unix_url))
    waiting = wait_with(api, api.client(server.unix_url))
    await queued(api, probe, 1)
    probe.config_set("maxmemory", 1)
    try:
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            probe.set("other", 1)
        await api.get(holder.release())
        await served(api, waiting)
    finally:
        probe.config_set("maxmemory", 0)


def subscribers(probe: redis.Redis) -> set[str]:
    """The connections to which messages go."""
    return {client["id"] for client in probe.client_list(_type="pubsub")}


@two_servers
async def test_a_grant_message_lost_with_its_connection(
    api: Api, proxy: FaultProxy, server: Server, probe: redis.Redis, no_recheck: None
) -> None:
    holder = await held(api, api.client(server.unix_url))
    waiting = [wait_with(api, api.client(proxy.url))]
    await queued(api, probe, 1)
    waiting.append(wait_with(api, api.client(server.unix_url)))
    await queued(api, probe, 2)
    armed = proxy.arm(swallow(pushes=1), on_push=PUSH)
    await api.get(holder.release())
    await served(api, *waiting)
    assert armed.fired == 1


@two_servers
async def test_a_lost_grant_message_is_found_by_a_recheck(
    api: Api, proxy: FaultProxy, server: Server, probe: redis.Redis
) -> None:
    holder = await held(api, api.client(server.unix_url))
    lock, job = wait_with(api, api.client(proxy.url))
    await queued(api, probe, 1)
    armed = proxy.arm(swallow(pushes=1, close=False), on_push=PUSH)
    await api.get(holder.release())
    assert await job.get(TWO_RECHECKS) is True and armed.fired == 1
    await api.get(lock.release())


# ------------------------------------------------------------------------------------------------- restarts, lost
# scripts


@pytest.mark.parametrize(("server", "kind"), [("valkey", "valkey"), ("floor", "floor")], indirect=["server"])
async def test_all_waiters_find_a_server_that_comes_back_empty(
    api: Api, server: Server, start_server: Callable[..., Server], no_recheck: None, kind: str
) -> None:
    """The waiters enter there by themselves, and one of them at a time gets the lock. The former holder believes that
    it holds until its lease ends, as nobody can tell it; but its release raises that the lock was lost."""
    old = start_server(kind)
    with FaultProxy(old.unix_url) as proxy, redis.Redis(unix_socket_path=old.path) as raw:
        holding, one, two = (api.client(proxy.url) for _ in range(3))
        holder = await held(api, holding)
        left = []
        for number, (client, fair) in enumerate([(one, False), (two, False), (one, True)]):
            left.append(wait_with(api, client, fair=fair))
            await queued(api, raw, number + 1)
        old.stop()
        new = start_server(kind)
        proxy.upstream = new.unix_url
        with redis.Redis(unix_socket_path=new.path) as raw:
            while left:
                ((lock, job),) = await either(api, left)
                assert await job.get() is True and token_matches(raw.get(NAME), lock.lease._raw_token)
                left.remove((lock, job))
                if not left:
                    assert holder.lease.valid
                    with pytest.raises(fastlock.LockNotOwnedError):
                        await api.get(holder.release())
                    assert token_matches(raw.get(NAME), lock.lease._raw_token)
                await api.get(lock.release())
            assert raw.keys() == []


async def test_waiters_survive_forgotten_scripts(
    api: Api, proxy: FaultProxy, server: Server, probe: redis.Redis, no_recheck: None
) -> None:
    """At every point: while they wait, before a lock is handed over, and while its message is on its way."""
    holder = await held(api, api.client(server.unix_url))
    waiting = [wait_with(api, api.client(proxy.url))]
    await queued(api, probe, 1)
    waiting.append(wait_with(api, api.client(server.unix_url)))
    await queued(api, probe, 2)
    probe.script_flush()
    assert await api.get(api.client(server.unix_url).lock(NAME).acquire(blocking_timeout=0.03)) is False
    await queued(api, probe, 2)
    probe.script_flush()
    armed = proxy.arm(stall(), on_push=PUSH)
    await api.get(holder.release())
    await until(api, lambda: armed.fired, "the message")
    probe.script_flush()
    armed.resume()
    for lock, job in waiting:
        assert await job.get(SOON) is True
        probe.script_flush()
        await api.get(lock.release())


@pytest.fixture
def tcp_proxy(server: Server) -> Iterator[FaultProxy]:
    with FaultProxy(server.unix_url, tcp=True) as proxy:
        yield proxy


@pytest.mark.parametrize("tcp", [False, True], ids=["unix", "tcp"])
@pytest.mark.parametrize(("kind", "loads"), [("lock", False), ("semaphore", False), ("semaphore", True)])
async def test_an_undo_is_executed_by_a_server_that_has_forgotten_its_script(
    api: Api,
    proxy: FaultProxy,
    tcp_proxy: FaultProxy,
    server: Server,
    probe: redis.Redis,
    no_recheck: None,
    kind: str,
    loads: bool,
    tcp: bool,
) -> None:
    """As by one that was started anew. The client is not used again, so that in threads nobody reads that the script is
    not known, and who waits would wait for the end of the lease. loads: releases of another lock load theirs before.
    tcp: a connection that was closed takes what is written to it."""
    proxy = tcp_proxy if tcp else proxy
    client = api.client(proxy.url, confirm_release=False)

    def one(client: Any) -> Any:
        settings: dict[str, Any] = {"timeout": LONG, "thread_local": False}
        return client.lock(NAME, **settings) if kind == "lock" else client.semaphore(NAME, 1, **settings)

    lock, theirs = one(client), one(api.client(server.unix_url))
    assert await api.get(lock.acquire())
    job = api.start(theirs.acquire)
    await queued(api, probe, 1)
    transport = client._transport
    proxy.cut()
    probe.script_flush()
    for _ in range(2 * loads):
        async with api.within(client.lock("another")):
            pass
    transport.undo(Undo([NAME.encode()], [lock.lease._raw_token]))
    if not api.is_async:  # as whoever was interrupted does
        transport.flush_pending_undos()
    assert await job.get(SOON) is True
    await api.get(theirs.release())


# ----------------------------------------------------------------------------------------------- users without rights

UserUrl = Callable[..., str]
WITHOUT = {
    "scripts": "+@all -eval -evalsha ~* &*",
    "queue": "+@all ~sku &*",
    "subscribe": "+@all -subscribe ~* &*",
    "channels": "+@all ~* resetchannels",
    "publish": "+@all -publish ~* &*",
}
# Servers without commands for everything need scripts for everything.
CELLS = [(server, what) for server in ("valkey", "floor") for what in WITHOUT if (server, what) != ("floor", "scripts")]
UNTOLD = [
    (server, what) for server, what in CELLS if what != "publish"
]  # a waiter that only may not publish receives messages


@pytest.fixture
def user_url(server: Server, probe: redis.Redis) -> Iterator[UserUrl]:
    """user_url("-publish", "~*"): the URL of a user with these rights."""

    def url(rules: str) -> str:
        probe.execute_command("ACL", "SETUSER", "limited", "reset", "on", "nopass", *rules.split())
        return f"unix://limited:any@{server.path}"

    yield url
    probe.execute_command("ACL", "DELUSER", "limited")


@pytest.mark.parametrize(("server", "missing"), UNTOLD, indirect=["server"])
async def test_a_waiter_without_rights_gets_the_lock_by_polling(
    api: Api, server: Server, probe: redis.Redis, user_url: UserUrl, no_recheck: None, missing: str
) -> None:
    """It polls every `sleep` seconds, whichever right it lacks."""
    holder = await held(api, api.client(server.unix_url))
    client = api.client(user_url(WITHOUT[missing]))
    pairs = [wait_with(api, client, sleep=0.01, fair=fair) for fair in (False, True)]
    asked = client.get_stats()["commands"]
    await until(api, lambda: client.get_stats()["commands"] > asked + 4, "polling")
    assert not any(job.finished.is_set() for _, job in pairs)
    await api.get(holder.release())
    while pairs:
        ((lock, job),) = await either(api, pairs)
        assert await job.get() is True and token_matches(probe.get(NAME), lock.lease._raw_token)
        pairs.remove((lock, job))
        await api.get(lock.release())


@pytest.mark.parametrize(("server", "missing"), CELLS, indirect=["server"])
async def test_a_holder_without_rights_has_a_successor(
    api: Api, server: Server, probe: redis.Redis, user_url: UserUrl, missing: str
) -> None:
    """It may not be able to tell the waiters, which then find out by themselves."""
    holder = await held(api, api.client(user_url(WITHOUT[missing])))
    lock, job = wait_with(api, api.client(server.unix_url))
    await queued(api, probe, 1)
    assert await api.get(holder.extend(5)) is True and probe.pttl(NAME) > LONG * 1000
    await api.get(holder.release())
    assert await job.get(TWO_RECHECKS) is True
    await api.get(lock.release())
