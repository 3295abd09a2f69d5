"""A client from its creation to its closing: options, connections, loops, and the errors of its waiters at the end."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import redis
from support.apis import Api
from support.faultproxy import FaultProxy, stall

import fastlock
import fastlock.asyncio
from fastlock._protocol.commands import token_matches
from fastlock.embedded import Server

LOOPS = pytest.mark.parametrize("api", ["asyncio", "asyncio+uvloop"], indirect=True)
VALKEY = pytest.mark.parametrize("server", ["valkey"], indirect=True)


async def seen(api: Api, proxy: FaultProxy, word: bytes, count: int) -> None:
    """Return when so many commands with this word have passed the proxy."""

    def holds(proxy: FaultProxy) -> bool:
        return sum(word in words for words in proxy.commands) >= count

    await (asyncio.to_thread(proxy.wait_for, holds) if api.is_async else api.get(proxy.wait_for(holds)))


def named(probe: redis.Redis, name: str) -> int:
    """The number of the server's connections from clients of this name."""
    return [client["name"] for client in probe.client_list()].count(name)


async def gone(api: Api, probe: redis.Redis, name: str) -> None:
    """Return when the server has no more connections from clients of this name."""
    deadline = time.monotonic() + 5
    while named(probe, name):
        assert time.monotonic() < deadline, "connections are left open"
        await asyncio.sleep(0.002) if api.is_async else time.sleep(0.002)


# ------------------------------------------------------------------------------------------------------- the server

CAPABILITIES = {"redis 7": ["set-nx-get"], "redis 6": [], "valkey 9": ["delifeq", "set-ifeq", "set-nx-get"]}


async def test_server_info_describes_the_server(api: Api, server: Server) -> None:
    info = await api.get(api.client(server.url).server_info())
    assert sorted(info) == ["capabilities", "maxmemory_policy", "mode", "role", "server", "version"]
    known = set(CAPABILITIES[f"{server.kind} {server.version[0]}"])
    assert info["capabilities"] == sorted(info["capabilities"]) and known <= set(info["capabilities"])
    if server.kind == "redis":
        assert info["capabilities"] == sorted(known)
    del info["capabilities"]
    assert info == {
        "server": server.kind,
        "version": server.version,
        "mode": "standalone",
        "role": "master",
        "maxmemory_policy": "noeviction",
    }


async def test_a_server_that_may_evict_locks_is_warned_about_once(
    api: Api, server: Server, server_config: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    server_config(maxmemory_policy="allkeys-lru")
    with caplog.at_level(logging.DEBUG):
        client = api.client(server.unix_url, max_connections=4)
        await api.together([lambda n=n: client.lock(f"n{n}").locked() for n in range(4)])
        assert (await api.get(client.server_info()))["maxmemory_policy"] == "allkeys-lru"
    (record,) = [each for each in caplog.records if each.name.startswith("fastlock")]
    assert record.levelno == logging.WARNING
    assert "allkeys-lru" in record.getMessage() and server.path in record.getMessage()


async def test_a_server_that_keeps_its_keys_is_not_warned_about(
    api: Api, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "fastlock"):
        assert await api.get(api.client(server.unix_url).lock("a").locked()) is False
    assert [each for each in caplog.records if each.name.startswith("fastlock")] == []


# ------------------------------------------------------------------------------------------------------- connections


async def test_a_client_connects_at_its_first_command(api: Api, server: Server, probe: redis.Redis) -> None:
    client = api.client(server.unix_url, client_name="early")
    client.lock("a")
    client.locked("a{x}")
    assert named(probe, "early") == 0
    await api.get(client.server_info())
    assert named(probe, "early") == 1


@pytest.mark.parametrize("limit", [1, 2, 5])
async def test_there_are_never_more_connections_than_allowed(
    api: Api, server: Server, probe: redis.Redis, limit: int
) -> None:
    client = api.client(server.unix_url, max_connections=limit, client_name="busy")
    most = []

    async def work(number: int) -> None:
        lock = client.lock(f"n{number}")
        for _ in range(10):
            assert await api.get(lock.acquire(blocking=False))
            await api.get(lock.release())

    for _ in range(5):
        assert await api.together([lambda n=n: work(n) for n in range(12)]) == [None] * 12
        most.append(named(probe, "busy"))
    assert 1 <= max(most) <= (1 if api.is_async else limit)


@pytest.mark.parametrize("how", ["url", "option", "override"])
async def test_the_chosen_database_is_used(api: Api, server: Server, probe: redis.Redis, how: str) -> None:
    url = {"url": f"unix://{server.path}?db=3", "option": f"unix://{server.path}", "override": f"{server.unix_url}"}[
        how
    ]
    client = api.client(url, **({} if how == "url" else {"db": 3}))
    lock = client.lock("a")
    await api.get(lock.acquire())
    with redis.Redis(unix_socket_path=server.path, db=3) as chosen:
        assert chosen.keys() == [b"a"] and probe.keys() == []
    assert "db 3" in repr(client)
    await api.get(lock.release())
    with pytest.raises(redis.exceptions.ResponseError, match="DB index"):
        await api.get(api.client(server.unix_url, db=12345).lock("a").acquire())


async def test_the_server_knows_the_client_name(api: Api, server: Server, probe: redis.Redis) -> None:
    client = api.client(server.unix_url, client_name="check:out/1")
    await api.get(client.server_info())
    assert named(probe, "check:out/1") == 1
    for bad in ("two words", "new\nline", "ünï"):
        with pytest.raises(ValueError, match="client_name"):
            api.client(server.unix_url, client_name=bad)


@pytest.mark.parametrize(
    ("options", "error", "word"),
    [
        ({"hots": "x"}, TypeError, "hots"),
        ({"port": "6379"}, TypeError, "port"),
        ({"port": 70_000}, ValueError, "port"),
        ({"port": True}, TypeError, "port"),
        ({"db": -1}, ValueError, "db"),
        ({"db": 1.0}, TypeError, "db"),
        ({"max_connections": 0}, ValueError, "max_connections"),
        ({"max_connections": "2"}, TypeError, "max_connections"),
        ({"connect_timeout": 0}, ValueError, "connect_timeout"),
        ({"reply_timeout": float("inf")}, ValueError, "reply_timeout"),
        ({"socket_timeout": float("nan")}, ValueError, "reply_timeout"),
        ({"reply_timeout": True}, TypeError, "reply_timeout"),
        ({"host": ""}, ValueError, "host"),
        ({"host": 5}, TypeError, "host"),
        ({"host": "a b"}, ValueError, "host"),
        ({"impl": "python"}, TypeError, "impl"),  # a setting of the process, FASTLOCK_IMPL, not of a client
    ],
    ids=repr,
)
async def test_an_invalid_option_is_refused_by_name(
    api: Api, options: dict[str, Any], error: type[Exception], word: str
) -> None:
    with pytest.raises(error, match=word):
        api.module.Client(**options)


async def test_a_connection_error_names_the_address(api: Api, tmp_path: Any, server: Server, proxy: FaultProxy) -> None:
    proxy.refuse()
    for url, place in ((f"unix://{tmp_path}/none.sock", "none.sock"), (proxy.url, proxy.url[7:].partition("?")[0])):
        client = api.client(url)
        for call in (client.lock("a").acquire, client.server_info, lambda client=client: client.acquire_many(["a"])):
            with pytest.raises(redis.exceptions.ConnectionError) as caught:
                await api.get(call())
            assert place in str(caught.value) and not isinstance(caught.value, fastlock.ClientClosedError)
    proxy.admit()
    assert await api.get(client.lock("a").locked()) is False, "a client whose first try failed can still be used"


async def test_a_first_connection_that_fails_is_not_retried(api: Api, proxy: FaultProxy) -> None:
    """Before there ever was a connection an error is a wrong setting, and no outage that would pass."""
    proxy.hanging_up = True
    with pytest.raises(redis.exceptions.ConnectionError):
        await api.get(api.client(proxy.url).lock("a").acquire())
    assert proxy.accepted == 1


# ----------------------------------------------------------------------------------------------------------- closing


async def test_closing_ends_waits_for_a_lock(api: Api, server: Server, proxy: FaultProxy) -> None:
    holder = api.client(server.unix_url).lock("a", timeout=None)
    await api.get(holder.acquire())
    client = api.client(proxy.url)
    jobs = [api.start(lambda: client.lock("a", sleep=3600).acquire()) for _ in range(4)]
    await seen(api, proxy, b"a", 8)  # each has tried once, and has requested the holder's remaining time
    await api.get(client.close())
    for job in jobs:
        with pytest.raises(fastlock.ClientClosedError):
            await job.get(10)
    await api.get(holder.release())


@VALKEY
async def test_closing_ends_waits_for_a_reply(api: Api, server: Server, proxy: FaultProxy) -> None:
    client = api.client(proxy.url, max_connections=2, reply_timeout=3600, connect_timeout=3600)
    await api.get(client.server_info())
    armed = proxy.arm(stall())
    jobs = [api.start(lambda n=n: client.lock(f"n{n}").acquire()) for n in range(4)]
    await seen(api, proxy, b"HELLO" if not api.is_async else b"n3", 1)
    await api.get(client.close())
    armed.resume()
    for job in jobs:
        with pytest.raises(fastlock.ClientClosedError):
            await job.get(10)


@VALKEY
async def test_closing_ends_waits_for_a_connection(api: Api, server: Server, proxy: FaultProxy) -> None:
    client = api.client(proxy.url, max_connections=1, connect_timeout=3600)
    armed = proxy.arm(stall())
    jobs = [api.start(lambda n=n: client.lock(f"n{n}").acquire()) for n in range(3)]
    await seen(api, proxy, b"HELLO", 1)
    await api.get(client.close())
    armed.resume()
    for job in jobs:
        with pytest.raises(fastlock.ClientClosedError):
            await job.get(10)


async def test_a_closed_client_raises_and_its_locks_stay_held(api: Api, server: Server, probe: redis.Redis) -> None:
    client = api.client(server.unix_url, client_name="closing")
    lock, leases = client.lock("a"), await api.get(client.acquire_many(["b"]))
    await api.get(lock.acquire())
    for _ in range(2):
        await api.get(client.close())
    calls: list[Callable[[], Any]] = [
        client.lock("c").acquire,
        lock.locked,
        lock.owned,
        lock.reacquire,
        lambda: lock.extend(5),
        client.server_info,
        lambda: client.acquire_many(["c"]),
    ]
    for call in calls:
        with pytest.raises(fastlock.ClientClosedError, match="closed") as caught:
            await api.get(call())
        assert isinstance(caught.value, redis.exceptions.ConnectionError)
    assert sorted(probe.keys()) == [b"a", b"b"], "closing releases nothing"
    await gone(api, probe, "closing")
    await api.get(lock.release())
    assert await api.get(client.release_many(leases)) == [True] and probe.keys() == []
    for call in (lock.release, client.lock("c").acquire):
        with pytest.raises((fastlock.LockError, fastlock.ClientClosedError)):
            await api.get(call())
    await gone(api, probe, "closing")


async def test_a_lock_can_be_released_after_closing(
    api: Api, server: Server, probe: redis.Redis, no_leaks: Any
) -> None:
    """A remote waiter is served by such a release; a second release raises."""
    client, other = api.client(server.unix_url), api.client(server.unix_url)
    lock = client.lock("a", timeout=None, thread_local=False)
    await api.get(lock.acquire())
    waiting = [api.start(lambda: other.lock("a", thread_local=False).acquire(blocking_timeout=20))]
    while not probe.exists("fastlock:queue:{a}"):
        await api.checkpoint()
        if api.is_async:
            await asyncio.sleep(0.001)
    await api.get(client.close())
    await api.get(lock.release())
    assert await waiting[0].get() is True
    probe.delete("a")
    with pytest.raises(fastlock.LockError):
        await api.get(lock.release())


async def test_a_client_that_never_connected_closes_too(api: Api, server: Server) -> None:
    client = api.client(server.unix_url)
    await api.get(client.close())
    with pytest.raises(fastlock.ClientClosedError):
        await api.get(client.lock("a").acquire())


async def test_with_accepts_a_client_of_its_own_api_only(api: Api, server: Server) -> None:
    client = api.client(server.unix_url)
    with pytest.raises(TypeError, match=r"fastlock\.Client" if api.is_async else r"fastlock\.asyncio\.Client"):
        if api.is_async:
            with client:
                pytest.fail("entered")
        else:
            async with client:
                pytest.fail("entered")
    assert await api.enter(client) is client
    assert await api.get(client.lock("a").locked()) is False
    await api.leave(client, ValueError("of the body"))
    with pytest.raises(fastlock.ClientClosedError):
        await api.get(client.lock("a").locked())


@VALKEY
@pytest.mark.parametrize("api", ["threads"], indirect=True)
def test_a_garbage_collected_client_ends_its_connections(api: Api, server: Server, probe: redis.Redis) -> None:
    client = fastlock.Client.from_url(server.unix_url, client_name="forgotten")
    assert client.lock("a").acquire(blocking=False) and named(probe, "forgotten") == 1
    del client
    deadline = time.monotonic() + 5
    while named(probe, "forgotten") and time.monotonic() < deadline:
        time.sleep(0.002)
    assert named(probe, "forgotten") == 0


# ------------------------------------------------------------------------------------------------------- event loops


@LOOPS
@VALKEY
def test_a_client_of_another_loop_is_refused(api: Api, server: Server) -> None:
    async def body() -> None:
        client = api.client(server.unix_url)
        assert await client.lock("a").acquire()
        refusals: list[str] = []

        def elsewhere() -> None:
            for call in (client.lock("b").acquire, client.lock("b").locked, client.server_info):
                with pytest.raises(RuntimeError, match="another event loop") as caught:
                    asyncio.run(call())
                refusals.append(str(caught.value))

        thread = threading.Thread(target=elsewhere)
        thread.start()
        await asyncio.to_thread(thread.join)
        assert len(refusals) == 3
        assert await client.lock("a").locked() is True and await client.lock("b").locked() is False

    api.run(body())


@LOOPS
@VALKEY
async def test_both_kinds_of_loops_behave_the_same(api: Api, server: Server, probe: redis.Redis, no_leaks: Any) -> None:
    for url in (server.unix_url, server.tcp_url):
        client = api.client(url)
        assert ("uvloop" in type(asyncio.get_running_loop()).__module__) is api.uvloop

        async def worker(client: Any = client) -> None:
            for _ in range(20):
                async with client.lock("a", sleep=0.001) as lease:
                    assert token_matches(await asyncio.to_thread(probe.get, "a"), lease.token)

        assert await api.together([worker] * 4) == [None] * 4
        leases = await client.acquire_many([f"n{i}" for i in range(200)])
        assert await client.release_many(leases) == [True] * 200


def test_an_asyncio_client_can_be_made_outside_of_a_loop(impl: str) -> None:
    """A module may create a client at import; even the lock may be made there."""
    client = fastlock.asyncio.Client(unix_socket_path="/nowhere")
    lock = client.lock("a")
    assert lock.lease is None and "a" in repr(lock)
    with pytest.raises(redis.exceptions.ConnectionError) as caught:
        asyncio.run(lock.acquire())
    assert "/nowhere" in "".join(traceback.format_exception(caught.value))
