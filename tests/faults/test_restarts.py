"""A server that restarts: while it loads its data it refuses commands, and it numbers its connections anew.

The server restarts itself (DEBUG RESTART): same process, same socket, its data from its own file.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from redis import exceptions
from support.apis import Api
from support.child_client import until
from support.faultproxy import FaultProxy, stall
from support.raw_client import RawClient

import fastlock.asyncio
from fastlock.embedded import Server

NAME, OTHER = "sku:42", "sku:43"
QUEUE = b"fastlock:queue:{%b}" % NAME.encode()
KEYS, DELAY_US = 250, 4000  # number of keys, and microseconds to load each: a second in all
KINDS = pytest.mark.parametrize("kind", ["valkey", "redis"])
Restartable = Callable[..., "tuple[Server, redis.Redis]"]


@pytest.fixture
def restartable(start_server: Callable[..., Server]) -> Iterator[Restartable]:
    """restartable("valkey"): a server that takes a second to load its data, and a redis-py client of it."""
    often = ["--loading-process-events-interval-bytes", "1024"]
    with contextlib.ExitStack() as stack:

        def start(kind: str, delay_us: int = DELAY_US) -> tuple[Server, redis.Redis]:
            slow = ["--key-load-delay", str(delay_us), *often]
            server = start_server(kind, args=[*slow, "--enable-debug-command", "yes"])
            return server, stack.enter_context(redis.Redis(unix_socket_path=server.path))

        yield start


def ping(server: Server) -> bytes:
    """The reply to PING; empty if the server does not answer."""
    try:
        raw = RawClient(server.unix_url)
    except OSError:
        return b""
    with raw.socket:
        with contextlib.suppress(OSError):
            raw.send(b"PING\r\n")
            return raw.receive(7)
        return b""


def restart(server: Server, probe: redis.Redis, *, keep: bool) -> None:
    """Return when the server answers again: loading, if it is to keep its data."""
    if keep:
        probe.mset({f"filler:{number}": os.urandom(1000) for number in range(KEYS)})
        probe.config_set("save", "3600 1000000")
    raw = RawClient(server.unix_url)
    with raw.socket:
        raw.send(b"DEBUG RESTART\r\n")
        assert raw.receive_end() == b""
    end = time.monotonic() + 10
    while not (found := ping(server)):
        assert time.monotonic() < end, "the server does not come back"
    assert found == (b"-LOADIN" if keep else b"+PONG\r\n")


@KINDS
async def test_waiters_and_holders_survive_a_restart_with_data(api: Api, restartable: Restartable, kind: str) -> None:
    """So they do with redis-py's lock."""
    server, probe = restartable(kind)
    holder, client = api.client(server.url), api.client(server.url)
    lock = holder.lock(NAME, timeout=60, thread_local=False)
    batch = await api.get(holder.acquire_many(["a", "b"], timeout=60))
    short = holder.lock("e", timeout=60, thread_local=False)
    assert await api.get(short.acquire())
    assert await api.get(lock.acquire())

    async def wait_for_it(**settings: Any) -> int | None:
        waiting = client.lock(NAME, **settings)
        assert await api.get(waiting.acquire()) is True
        fence = waiting.lease.fence
        await api.get(waiting.release())
        return fence

    async def acquire_other(**settings: Any) -> bool:
        other = client.lock(OTHER, **settings)
        assert await api.get(other.acquire(blocking_timeout=20)) and await api.get(other.owned())
        await api.get(other.release())
        return True

    waiters = [
        api.start(lambda settings=settings: wait_for_it(**settings))
        for settings in ({}, {"fair": True}, {"fence": True})
    ]
    while probe.zcard(QUEUE) < 2:
        await api.checkpoint()
    restart(server, probe, keep=True)
    late = api.client(server.url)
    info = await api.get(late.server_info())
    calls = [
        lambda: lock.extend(70, replace_ttl=True),
        lambda: late.acquire_many(["c", "d"]),
        lambda: holder.release_many(batch),
        short.release,
        acquire_other,
        lambda: acquire_other(fence=True),
        lambda: late.lock(NAME).locked(),
    ]
    assert ping(server) == b"-LOADIN"
    extended, more, released, *rest = await api.together(calls)
    assert (extended, released, rest) == (True, [True, True], [None, True, True, True])
    assert None not in more and await api.get(late.release_many(more)) == [True, True]
    await api.get(lock.release())
    assert [fence is not None for fence in [await job.get() for job in waiters]] == [False, False, True]
    assert await api.get(api.client(server.url).server_info()) == info, "no part of the handshake was refused"
    assert [key for key in probe.scan_iter() if not key.startswith((b"filler:", b"fastlock:fence:"))] == []


@KINDS
async def test_server_that_loads_too_long_is_an_error_and_undos_follow(
    api: Api, restartable: Restartable, kind: str
) -> None:
    """A waiter that gives up meanwhile leaves the queue once commands work, long before its entry would expire."""
    server, probe = restartable(kind, 10 * DELAY_US)  # so that it still loads then, also on a busy machine
    client = api.client(server.url, reply_timeout=0.2, connect_timeout=5)
    probe.set(NAME, "fl:" + "0" * 32)
    with pytest.raises(exceptions.BusyLoadingError):
        waiting = api.start(client.lock(NAME, fair=True).acquire)
        while not probe.zcard(QUEUE):
            await api.checkpoint()
        restart(server, probe, keep=True)
        await waiting.get()
    assert ping(server) == b"-LOADIN"
    probe.config_set("key-load-delay", 0)
    end = time.monotonic() + 5
    while True:
        with contextlib.suppress(exceptions.BusyLoadingError):  # in threads the undo is sent with the next request
            await api.get(client.lock(OTHER).locked())
            if not probe.zcard(QUEUE):
                break
        assert time.monotonic() < end
        if api.is_async:
            await asyncio.sleep(0.01)


@KINDS
def test_undo_refused_while_loading_is_sent_in_the_next_event_loop(
    impl: str, restartable: Restartable, kind: str
) -> None:
    """A timer would send the undo again, but ends with its loop: so the next loop sends it."""
    server, probe = restartable(kind)
    client = fastlock.asyncio.Client.from_url(server.url, reply_timeout=0.2, connect_timeout=5)
    probe.set(NAME, "fl:" + "0" * 32)

    async def give_up() -> None:
        waiting = asyncio.ensure_future(client.lock(NAME, fair=True).acquire())
        while not probe.zcard(QUEUE):
            await asyncio.sleep(0)
        restart(server, probe, keep=True)
        with pytest.raises(exceptions.BusyLoadingError):
            await waiting

    async def go_on() -> None:
        while ping(server) == b"-LOADIN":
            await asyncio.sleep(0.01)
        await client.lock(OTHER).locked()
        await client.lock(OTHER).locked()  # the pending undo is sent before this
        assert not probe.zcard(QUEUE)
        await client.close()

    asyncio.run(give_up())
    assert ping(server) == b"-LOADIN"
    asyncio.run(go_on())


@KINDS
async def test_no_foreign_connection_is_killed_for_a_reused_client_id(
    api: Api, restartable: Restartable, kind: str
) -> None:
    """Over a unix socket all connections have one address, and others reached the restarted server first."""
    server, probe = restartable(kind)
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            RawClient(server.unix_url).socket.close()
        proxy = stack.enter_context(FaultProxy(server.unix_url))
        client = api.client(proxy.url, reply_timeout=20, max_connections=1)
        await api.get(client.server_info())
        probe.execute_command("CLIENT", "PAUSE", 60_000, "WRITE")
        lock = client.lock(NAME, thread_local=False)
        job = api.start(lambda: lock.acquire(blocking=False))
        while not probe.info("clients")["blocked_clients"]:
            await api.checkpoint()
        proxy.refuse()
        restart(server, probe, keep=False)
        strangers = [RawClient(server.unix_url) for _ in range(60)]
        for stranger in strangers:
            stack.callback(stranger.socket.close)
            stranger.send(b"PING\r\n")
            assert stranger.receive(7) == b"+PONG\r\n"
        proxy.admit()
        assert await job.get() is True
        for stranger in strangers:
            stranger.send(b"PING\r\n")
            assert stranger.receive(7) == b"+PONG\r\n"
        await api.get(lock.release())


ENDLESS = b"while true do end"


@KINDS
async def test_acquire_given_up_while_the_server_runs_a_script_is_undone(
    api: Api, start_server: Callable[..., Server], kind: str
) -> None:
    """The acquire was executed, but its reply is held back, and an endless script runs: until that ends, the server
    answers BUSY to every command, also to the undo."""
    server = start_server(kind, args=["--lua-time-limit", "10"])
    script, killer = RawClient(server.unix_url), RawClient(server.unix_url)
    with script.socket, killer.socket, FaultProxy(server.unix_url) as proxy:
        client = api.client(proxy.url, reply_timeout=1, max_connections=1)
        await api.get(client.server_info())
        armed = proxy.arm(stall("reply"), after=NAME.encode(), times=1)
        job = api.start(lambda: client.lock(NAME, timeout=None).acquire(blocking_timeout=0.3))
        await until(api, lambda: armed.fired, "the acquire to be executed")
        script.send(b"*3\r\n$4\r\nEVAL\r\n$%d\r\n%b\r\n$1\r\n0\r\n" % (len(ENDLESS), ENDLESS))
        assert await job.get() is False
        sent = client.get_stats()["commands"]
        armed.resume()
        with pytest.raises(exceptions.ResponseError, match="BUSY"):
            await api.get(client.lock(OTHER).locked())
        assert client.get_stats()["commands"] >= sent + 4, "the undo is sent again and again"
        killer.send(b"SCRIPT KILL\r\n")
        assert killer.receive(5) == b"+OK\r\n"
        with redis.Redis(unix_socket_path=server.path) as probe:
            end = time.monotonic() + 10
            while probe.exists(NAME):
                assert time.monotonic() < end, "the key of the abandoned acquire stays"
                await api.get(client.lock(OTHER).locked())
