"""The outcome of an operation is resolved, never guessed, when messages are lost, cut, late, slow or swapped.

A real server behind a proxy that breaks connections at a chosen byte. What must never happen: False (or an error) while
the key stays the caller's, True while it is not, a lease longer than the server's, a key that comes back after it was
given up.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from support.apis import Api
from support.fakeserver import SILENCE, FakeServer
from support.faultproxy import FaultProxy, drop, inject, split, stall, swallow
from support.resp import encode
from support.servers import standstill

import fastlock
from fastlock.embedded import Server

NAME = "sku"
NAME_IN_COMMAND = b"\r\nsku\r\n"  # in every command about that name, and in no handshake
LONG_TIMEOUT, SHORT_TIMEOUT = 20.0, 0.4  # seconds: a reply_timeout that never expires, and one that does
ROUNDING = 0.001  # seconds: servers count in milliseconds
# For slow tests, which have to wait: a server with a command for each operation, and one that needs scripts.
two_servers = pytest.mark.parametrize("server", ["valkey", "floor"], indirect=True)
# How a reply is lost. Only where the connection stays open does a client have to wait for its reply_timeout to know.
lost_reply = pytest.mark.parametrize(
    ("fault", "reply_timeout"), [(swallow(), LONG_TIMEOUT), (stall(), SHORT_TIMEOUT)], ids=["closed", "silent"]
)


def until(holds: Callable[[], object], what: str) -> None:
    """Return when the condition holds; AssertionError after 10 seconds."""
    end = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < end, f"never: {what}"
        time.sleep(0.0005)


def assert_ours(lock: Any, probe: redis.Redis, longest: float = 10) -> None:
    """Assert that the lock is the caller's on the server, for at least as long as the lease claims."""
    assert probe.get(NAME) == lock.lease.token
    left = probe.pttl(NAME) / 1000
    assert 0 < lock.lease.remaining <= left + ROUNDING and left <= longest


async def assert_in_step(api: Api, client: Any, probe: redis.Redis) -> None:
    """Assert that each request gets its own reply: held and free names alternate, with different tokens."""
    locks = [client.lock(f"step:{number}") for number in range(4)]
    for number, lock in enumerate(locks):
        assert await api.get(lock.acquire(blocking=False, token=f"token {number}"))
    for lock in locks * 2:
        assert await api.get(lock.owned())
        assert not await api.get(client.lock("step:free").locked())
    for lock in locks:
        await api.get(lock.release())
    assert not probe.exists(*(f"step:{number}" for number in range(4)))


# -------------------------------------------------------------------------------------------------- acquire, reply lost


@two_servers
@lost_reply
@pytest.mark.parametrize("fence", [False, True], ids=["plain", "fenced"])
async def test_acquire_with_a_lost_reply_recognises_its_token(
    api: Api, proxy: FaultProxy, probe: redis.Redis, no_leaks: Any, fault: Any, reply_timeout: float, fence: bool
) -> None:
    no_leaks.allow("fastlock:fence:*")
    client = api.client(proxy.url, reply_timeout=reply_timeout)
    lock = client.lock(NAME, fence=fence)
    await api.get(client.server_info())
    armed = proxy.arm(fault, after=NAME_IN_COMMAND, times=1)
    assert await api.get(lock.acquire(blocking=False)) is True
    armed.wait()
    assert_ours(lock, probe)
    if fence:
        assert lock.lease.fence == int(probe.get("fastlock:fence:{sku}"))
    await api.get(lock.release())
    await assert_in_step(api, client, probe)


async def test_acquire_with_a_lost_reply_does_not_acquire_a_held_lock(
    api: Api, proxy: FaultProxy, probe: redis.Redis
) -> None:
    client = api.client(proxy.url)
    probe.set(NAME, "another")
    armed = proxy.arm(swallow(), after=NAME_IN_COMMAND)
    assert await api.get(client.lock(NAME).acquire(blocking=False)) is False
    armed.wait()
    assert probe.get(NAME) == b"another"


@two_servers
async def test_acquire_with_an_unknown_outcome_raises_and_is_undone(
    api: Api, proxy: FaultProxy, probe: redis.Redis, no_leaks: Any
) -> None:
    client = api.client(proxy.url, reply_timeout=SHORT_TIMEOUT)
    await api.get(client.server_info())
    proxy.refuse()
    proxy.arm(swallow(), after=NAME_IN_COMMAND)
    lock = client.lock(NAME)
    with pytest.raises(redis.exceptions.ConnectionError):
        await api.get(lock.acquire(blocking=False))
    assert lock.lease is None
    proxy.wait_for(lambda proxy: proxy.connections[0].done)
    assert probe.exists(NAME), "the command was not executed: the test shows nothing"
    proxy.admit()
    await assert_in_step(api, client, probe)
    assert not probe.exists(NAME)


async def test_blocking_acquire_survives_a_lost_reply_while_it_waits(
    api: Api, proxy: FaultProxy, probe: redis.Redis, no_leaks: Any
) -> None:
    client = api.client(proxy.url)
    lock = client.lock(NAME, sleep=0.005, thread_local=False)
    probe.set(NAME, "another")
    waiter = api.start(lock.acquire)
    for _ in range(3):
        armed = proxy.arm(swallow(), after=NAME_IN_COMMAND)
        while not armed.fired:
            await _pause(api)
    probe.delete(NAME)
    assert await waiter.get() is True
    assert_ours(lock, probe)
    await api.get(lock.release())


async def _pause(api: Api) -> None:
    """Pause between two checks of a condition that takes time."""
    if api.is_async:
        await asyncio.sleep(0.0005)
    else:
        time.sleep(0.0005)


# ---------------------------------------------------------------------------------------------------- cut at every byte


class Operations:
    """acquire, extend and release of one lock, each with a check of its effect."""

    def __init__(self, api: Api, client: Any, probe: redis.Redis) -> None:
        self.api, self.probe = api, probe
        self.lock, self.barrier = client.lock(NAME), client.lock("barrier")

    async def prepare(self, operation: str) -> None:
        self.probe.delete(NAME)
        if operation == "refused":
            self.probe.set(NAME, "another")
        elif operation != "acquire":
            assert await self.api.get(self.lock.acquire(blocking=False))

    async def perform(self, operation: str) -> None:
        if operation in ("acquire", "refused"):
            assert await self.api.get(self.lock.acquire(blocking=False)) is (operation == "acquire")
        elif operation == "extend":
            assert await self.api.get(self.lock.extend(5))
        else:
            await self.api.get(self.lock.release())

    async def check(self, operation: str) -> None:
        if operation == "refused":
            assert self.probe.get(NAME) == b"another"
        elif operation == "release":
            assert not self.probe.exists(NAME) and self.lock.lease is None
        else:
            longest = 15 if operation == "extend" else 10
            assert_ours(self.lock, self.probe, longest)
            assert self.lock.lease.remaining > longest - 5
            await self.api.get(self.lock.release())


@pytest.mark.parametrize("operation", ["acquire", "refused", "extend", "release"])
async def test_request_cut_at_every_byte(
    api: Api, proxy: FaultProxy, probe: redis.Redis, no_leaks: Any, operation: str
) -> None:
    operations = Operations(api, api.client(proxy.url), probe)
    await operations.prepare(operation)
    seen = len(proxy.commands)
    await operations.perform(operation)
    size = len(encode(*next(args for args in proxy.commands[seen:] if NAME.encode() in args)))
    await operations.check(operation)
    for cut in range(size + 1):
        await operations.prepare(operation)
        armed = proxy.arm(drop(request_bytes=cut), after=NAME_IN_COMMAND)
        await operations.perform(operation)
        armed.wait()
        await operations.check(operation)
    probe.delete(NAME)


@pytest.mark.parametrize("operation", ["acquire", "refused", "extend", "release"])
async def test_reply_cut_at_every_byte(
    api: Api, proxy: FaultProxy, probe: redis.Redis, no_leaks: Any, operation: str
) -> None:
    operations = Operations(api, api.client(proxy.url), probe)
    longest = len(b"$7\r\nanother\r\n")
    for cut in range(longest + 1):
        await operations.prepare(operation)
        await api.get(operations.barrier.locked())  # no command about the name is pending any more
        armed = proxy.arm(drop(reply_bytes=cut), after=NAME_IN_COMMAND)
        await operations.perform(operation)
        armed.wait()
        await operations.check(operation)
        armed.disarm()
    probe.delete(NAME)


@pytest.mark.parametrize("side", ["request", "reply"])
async def test_messages_in_small_pieces(
    api: Api, proxy: FaultProxy, probe: redis.Redis, no_leaks: Any, side: Any
) -> None:
    for size in (1, 2, 3, 5, 7, 11):
        armed = proxy.arm(split(size, side, pause=0), new_only=True)
        client = api.client(proxy.url)
        operations = Operations(api, client, probe)
        for operation in ("acquire", "refused", "extend", "release"):
            await operations.prepare(operation)
            await operations.perform(operation)
            await operations.check(operation)
        probe.delete(NAME)
        leases = await api.get(client.acquire_many(["a", "b", "c"]))
        assert [probe.get(lease.name) for lease in leases] == [lease.token for lease in leases]
        assert await api.get(client.release_many(leases)) == [True, True, True]
        armed.wait()
        armed.disarm()


# -------------------------------------------------------------------------------------------------------- late and slow


@two_servers
async def test_command_that_arrives_late_leaves_no_key(
    api: Api, proxy: FaultProxy, probe: redis.Redis, no_leaks: Any
) -> None:
    """A SET that timed out is still unread by the server; it must not be executed after its token was released."""
    client = api.client(proxy.url, reply_timeout=SHORT_TIMEOUT)
    await api.get(client.server_info())
    armed = proxy.arm(stall("request"), after=NAME_IN_COMMAND, times=1)
    lock = client.lock(NAME)
    assert await api.get(lock.acquire(blocking=False)) is True
    assert_ours(lock, probe)
    await api.get(lock.release())
    armed.resume()
    proxy.wait_for(lambda proxy: not proxy.connections[0].held)
    proxy.cut()
    proxy.wait_for(lambda proxy: all(connection.done for connection in proxy.connections))
    assert not probe.exists(NAME)


async def test_command_that_arrives_after_the_timeout_leaves_no_key(
    api: Api, proxy: FaultProxy, probe: redis.Redis, no_leaks: Any
) -> None:
    client = api.client(proxy.url, reply_timeout=LONG_TIMEOUT)
    await api.get(client.server_info())
    armed = proxy.arm(stall("request"), after=NAME_IN_COMMAND, times=1)
    assert await api.get(client.lock(NAME).acquire(blocking_timeout=0.02)) is False
    armed.resume()
    await assert_in_step(api, client, probe)
    proxy.wait_for(lambda proxy: proxy.connections[0].requests.count(NAME_IN_COMMAND) >= 2)
    proxy.cut()
    proxy.wait_for(lambda proxy: all(connection.done for connection in proxy.connections))
    assert not probe.exists(NAME)


@two_servers
async def test_server_that_was_suspended_leaves_no_key(
    api: Api, server: Server, start_server: Callable[..., Server]
) -> None:
    own = start_server("valkey" if server.kind == "valkey" else "floor" if server.version < "7" else "redis")
    client = api.client(own.url, reply_timeout=0.1, connect_timeout=0.1)
    with redis.Redis(unix_socket_path=own.path) as probe:
        await api.get(client.server_info())
        for _ in range(2):
            lock = client.lock(NAME)
            with standstill(own), contextlib.suppress(redis.exceptions.TimeoutError):
                assert await api.get(lock.acquire(blocking_timeout=0.15)) is False
            await _again(api, client.lock("other").locked)
            assert lock.lease is None and not probe.exists(NAME)
        await api.get(client.close())
        until(lambda: len(probe.client_list()) == 1, "only the probe is connected")
        assert not probe.exists(NAME)


async def _again(api: Api, call: Callable[[], Any]) -> Any:
    """Retry longer than a client with SHORT_TIMEOUT does: its handshake may time out on a slow machine."""
    for _ in range(5):
        try:
            return await api.get(call())
        except redis.exceptions.TimeoutError:
            continue
    return await api.get(call())


@two_servers
@pytest.mark.parametrize("blocking", [False, True], ids=["once", "blocking"])
async def test_reply_slower_than_the_lease_is_no_success(
    api: Api, proxy: FaultProxy, probe: redis.Redis, no_leaks: Any, blocking: bool
) -> None:
    client = api.client(proxy.url, reply_timeout=LONG_TIMEOUT)
    await api.get(client.server_info())
    lock = client.lock(NAME, timeout=0.1, sleep=0.001, thread_local=False)
    armed = proxy.arm(stall(), after=NAME_IN_COMMAND, times=1)
    waiter = api.start(lambda: lock.acquire(blocking=blocking))
    while not armed.fired or probe.exists(NAME):
        await _pause(api)
    armed.resume()
    if await waiter.get():
        assert blocking, "the lease had ended before the reply came"
        left = probe.pttl(NAME) / 1000  # read first: the lease must not outlast the key
        assert lock.lease.remaining <= left + ROUNDING
        assert probe.get(NAME) == lock.lease.token
        await api.get(lock.release())
    await assert_in_step(api, client, probe)
    assert not probe.exists(NAME) and (blocking or lock.lease is None)


@pytest.mark.parametrize("fence", [False, True], ids=["plain", "fenced"])
async def test_wait_that_ends_with_the_reply_in_flight_is_undone(
    api: Api, proxy: FaultProxy, probe: redis.Redis, no_leaks: Any, fence: bool
) -> None:
    no_leaks.allow("fastlock:fence:*")
    client = api.client(proxy.url, reply_timeout=LONG_TIMEOUT, max_connections=1)
    await api.get(client.server_info())
    for _ in range(3):
        armed = proxy.arm(stall(), after=NAME_IN_COMMAND, times=1)
        lock = client.lock(NAME, fence=fence)
        assert await api.get(lock.acquire(blocking_timeout=0.02)) is False
        armed.resume()
        await assert_in_step(api, client, probe)
        assert lock.lease is None and not probe.exists(NAME)
    assert len(proxy.connections) == 1, "a caller that times out is no reason to give up a connection"


async def test_with_that_times_out_with_the_reply_in_flight_leaves_no_key(
    api: Api, proxy: FaultProxy, probe: redis.Redis, no_leaks: Any
) -> None:
    client = api.client(proxy.url, reply_timeout=LONG_TIMEOUT)
    await api.get(client.server_info())
    armed = proxy.arm(stall(), after=NAME_IN_COMMAND, times=1)
    with pytest.raises(fastlock.LockError):
        await api.enter(client.lock(NAME, blocking_timeout=0.02))
    armed.resume()
    await assert_in_step(api, client, probe)
    assert not probe.exists(NAME)


# --------------------------------------------------------------------------------------------------- release and extend


@two_servers
@lost_reply
async def test_release_with_a_lost_reply_succeeds(
    api: Api, proxy: FaultProxy, probe: redis.Redis, no_leaks: Any, fault: Any, reply_timeout: float
) -> None:
    client = api.client(proxy.url, reply_timeout=reply_timeout)
    lock = client.lock(NAME)
    await api.get(lock.acquire())
    armed = proxy.arm(fault, after=NAME_IN_COMMAND, times=1)
    await api.get(lock.release())
    armed.wait()
    assert lock.lease is None and not probe.exists(NAME)


async def test_release_of_many_with_a_lost_reply_succeeds(
    api: Api, proxy: FaultProxy, probe: redis.Redis, no_leaks: Any
) -> None:
    client = api.client(proxy.url)
    leases = await api.get(client.acquire_many([NAME, "b", "c"]))
    probe.set("c", "another")
    armed = proxy.arm(swallow(), after=NAME_IN_COMMAND)
    assert await api.get(client.release_many(leases)) in ([True, True, False], [True, True, True])
    armed.wait()
    assert not probe.exists(NAME, "b") and probe.get("c") == b"another"
    probe.delete("c")


async def test_late_release_with_a_lost_reply_reports_the_lost_lock(
    api: Api, proxy: FaultProxy, probe: redis.Redis
) -> None:
    client = api.client(proxy.url)
    lock = client.lock(NAME, timeout=0.05)
    await api.get(lock.acquire())
    until(lambda: probe.set(NAME, "another", nx=True), "the end of the lease")
    proxy.arm(swallow(), after=NAME_IN_COMMAND)
    with pytest.raises(fastlock.LockNotOwnedError):
        await api.get(lock.release())
    assert probe.get(NAME) == b"another"


@two_servers
@pytest.mark.parametrize("executed", [True, False], ids=["executed", "unsent"])
async def test_release_that_raised_can_be_repeated(
    api: Api, proxy: FaultProxy, probe: redis.Redis, no_leaks: Any, executed: bool
) -> None:
    client = api.client(proxy.url, reply_timeout=SHORT_TIMEOUT)
    lock = client.lock(NAME)
    await api.get(lock.acquire())
    token = lock.lease.token
    proxy.refuse()
    if executed:
        proxy.arm(swallow(), after=NAME_IN_COMMAND)
    else:
        proxy.cut()
    with pytest.raises(redis.exceptions.ConnectionError):
        await api.get(lock.release())
    assert lock.lease is not None and lock.lease.token == token
    proxy.admit()
    await api.get(lock.release())
    assert lock.lease is None and not probe.exists(NAME)


@two_servers
@lost_reply
@pytest.mark.parametrize("replace_ttl", [False, True], ids=["add", "replace"])
async def test_extend_with_a_lost_reply_adds_once(
    api: Api,
    proxy: FaultProxy,
    probe: redis.Redis,
    no_leaks: Any,
    fault: Any,
    reply_timeout: float,
    replace_ttl: bool,
) -> None:
    client = api.client(proxy.url, reply_timeout=reply_timeout)
    lock = client.lock(NAME)
    await api.get(lock.acquire())
    armed = proxy.arm(fault, after=NAME_IN_COMMAND, times=1)
    assert await api.get(lock.extend(5, replace_ttl=replace_ttl))
    armed.wait()
    longest = 5 if replace_ttl else 15
    assert_ours(lock, probe, longest)
    assert lock.lease.remaining > longest - 5
    await api.get(lock.release())


async def test_extend_of_a_foreign_token_adds_once(
    api: Api, proxy: FaultProxy, probe: redis.Redis, no_leaks: Any
) -> None:
    """With such a token this process does not know when the lease ends: only the server can say what is left."""
    module = redis.asyncio if api.is_async else redis
    pool = module.Redis.from_url(proxy.url)
    lock = api.module.Lock(pool, NAME, timeout=10)
    api._clients.append(lock._transport)  # closed with the other clients
    probe.set(NAME, "token", px=10_000)
    lock.local.token = b"token"
    armed = proxy.arm(swallow(), after=NAME_IN_COMMAND)
    assert await api.get(lock.extend(5))
    armed.wait()
    assert probe.pttl(NAME) <= 15_000
    await api.get(lock.release())


# ---------------------------------------------------------------------------------------------------------- stray bytes

STRAYS = {
    "status": b"+OK\r\n",
    "nil": b"_\r\n",
    "integer": b":1\r\n",
    "error": b"-ERR stray\r\n",
    "token": b"$5\r\nstray\r\n",
    "list": b"*1\r\n:1\r\n",
    "map": b"%1\r\n+a\r\n+b\r\n",
    "attribute": b"|1\r\n+a\r\n+b\r\n",
    "garbage": b"garbage\r\n",
}


@two_servers
@pytest.mark.parametrize("held", [False, True], ids=["free", "held"])
@pytest.mark.parametrize("stray", STRAYS)
async def test_stray_reply_leads_to_no_wrong_result(
    api: Api, proxy: FaultProxy, probe: redis.Redis, no_leaks: Any, stray: str, held: bool
) -> None:
    """The stray precedes the true reply, in one write: the surplus reply ends the connection, and neither counts."""
    client = api.client(proxy.url)
    lock = client.lock(NAME)
    await api.get(client.server_info())
    if held:
        probe.set(NAME, "another")
    armed = proxy.arm(inject(STRAYS[stray]), after=NAME_IN_COMMAND)
    try:
        acquired = await api.get(lock.acquire(blocking=False))
    except redis.exceptions.RedisError:
        acquired = False
    armed.wait()
    assert acquired is (probe.get(NAME) == (lock.lease and lock.lease.token))
    if acquired:
        await api.get(lock.release())
    await assert_in_step(api, client, probe)
    assert probe.get(NAME) == (b"another" if held else None)
    probe.delete(NAME)
    proxy.wait_for(lambda proxy: proxy.connections[0].dead)  # it is closed after a reply that nobody asked for


@two_servers
@pytest.mark.parametrize("stray", STRAYS)
async def test_stray_reply_between_two_operations_leads_to_no_wrong_result(
    api: Api, proxy: FaultProxy, probe: redis.Redis, stray: str
) -> None:
    client = api.client(proxy.url)
    await api.get(client.server_info())
    probe.set(NAME, "another")
    proxy.inject(STRAYS[stray])
    while api.is_async and not proxy.connections[0].dead:
        await _pause(api)
    assert await api.get(client.lock(NAME).acquire(blocking=False)) is False
    await assert_in_step(api, client, probe)
    proxy.wait_for(lambda proxy: proxy.connections[0].dead)
    assert probe.get(NAME) == b"another"


async def test_push_between_replies_is_ignored(api: Api, proxy: FaultProxy, probe: redis.Redis, no_leaks: Any) -> None:
    client = api.client(proxy.url)
    lock = client.lock(NAME)
    await api.get(client.server_info())
    for push in (b">2\r\n+invalidate\r\n_\r\n", b">3\r\n+message\r\n+a\r\n+b\r\n"):
        armed = proxy.arm(inject(push), after=NAME_IN_COMMAND)
        assert await api.get(lock.acquire(blocking=False))
        armed.wait()
        assert_ours(lock, probe)
        await api.get(lock.release())
    assert len(proxy.connections) == 1


async def test_swapped_replies_are_not_believed(api: Api) -> None:
    """Two callers on one connection, each given the other's reply: both ask again and get their own."""
    with FakeServer(
        kind="valkey", version="9.1.2", handshake={"COMMAND INFO": b"*2\r\n*1\r\n$7\r\ndelifeq\r\n_\r\n"}
    ) as fake:
        client = api.client(fake.url, max_connections=1)
        held, free = client.lock("held", thread_local=False), client.lock("free", thread_local=False)
        fake.say(b"_\r\n")
        assert await api.get(held.acquire(blocking=False))
        asked = len(fake.commands)
        fake.say(SILENCE, b":1\r\n_\r\n")
        jobs = [api.start(lambda: free.acquire(blocking=False))]
        while len(fake.commands) == asked:
            await _pause(api)
        reply: Callable[[list[bytes]], bytes] = lambda args: b"_\r\n" if args[0] == b"SET" else b":1\r\n"  # noqa: E731
        fake.say(reply, reply, reply, reply)
        jobs.append(api.start(held.release))
        assert await jobs[0].get() is True and free.lease is not None
        assert await jobs[1].get() is None and held.lease is None
        assert fake.accepted == 2


# -------------------------------------------------------------------------------------------------- servers come and go


@pytest.fixture
def restarted(start_server: Callable[..., Server], server: Server, tmp_path: Path) -> Callable[[bool], Server]:
    """restarted(keep): start a server that writes its data to disk, with the data of the previous one, or with none."""
    kind = "valkey" if server.kind == "valkey" else "floor" if server.version < "7" else "redis"
    settings = tmp_path / "conf"
    lives = iter(range(100))

    def start(keep: bool) -> Server:
        if not keep:
            folder = tmp_path / str(next(lives))
            folder.mkdir()
            settings.write_text(f"dir {folder}\nappendonly yes\nappendfsync always\n")
        return start_server(kind, args=("--include", str(settings)))

    return start


@two_servers
@pytest.mark.parametrize("keep", [True, False], ids=["same-data", "empty"])
async def test_waiter_and_holder_survive_a_killed_server(
    api: Api, restarted: Callable[[bool], Server], keep: bool
) -> None:
    old = restarted(False)
    with FaultProxy(old.unix_url) as proxy:
        holding, waiting = api.client(proxy.url), api.client(proxy.url)
        held, wanted = holding.lock(NAME, timeout=60), waiting.lock(NAME, sleep=0.005, thread_local=False)
        await api.get(held.acquire())
        asked = proxy.requests.count(NAME_IN_COMMAND)
        waiter = api.start(wanted.acquire)
        while proxy.requests.count(NAME_IN_COMMAND) < asked + 2:
            await _pause(api)
        old.stop()
        refused = proxy.accepted
        while proxy.accepted < refused + 3:
            await _pause(api)
        assert not waiter.finished.is_set() and held.lease.valid
        new = restarted(keep)
        proxy.upstream = new.unix_url
        if keep:
            assert await api.get(held.owned())
            assert not waiter.finished.is_set()
            await api.get(held.release())
        assert await waiter.get() is True
        if not keep:
            with pytest.raises(fastlock.LockNotOwnedError):
                await api.get(held.release())
        with redis.Redis(unix_socket_path=new.path) as probe:
            assert_ours(wanted, probe)
            await api.get(wanted.release())
            assert not probe.exists(NAME)


@two_servers
async def test_reconnecting_backs_off(api: Api, proxy: FaultProxy) -> None:
    """While no server answers, attempts become rare: a busy loop would make thousands."""
    client = api.client(proxy.url, reply_timeout=SHORT_TIMEOUT)
    await api.get(client.server_info())
    proxy.hanging_up = True
    proxy.cut()
    before = proxy.accepted
    with pytest.raises(redis.exceptions.ConnectionError):
        await api.get(client.lock(NAME).acquire())
    assert 2 <= proxy.accepted - before <= 60
    proxy.hanging_up = False
    assert await api.get(client.lock(NAME).acquire())
