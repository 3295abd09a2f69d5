"""Errors of the server reach the one caller that they belong to, as redis-py's exceptions; no other caller notices.

Errors that a real server can be made to send come from one; a fake server sends only those that none would. After each
error the connection is in step: the next commands get their own replies.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import pickle
import select
import socket
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from redis import exceptions
from support.apis import Api
from support.fakeserver import FakeServer
from support.faultproxy import FaultProxy, replace, stall
from support.listener import Listener
from support.streams import LONG

import fastlock
from fastlock._transport import aio_connection
from fastlock.embedded import Server

ANNOUNCED = b"*2\r\n*1\r\n$7\r\ndelifeq\r\n_\r\n"  # reply to COMMAND INFO DELIFEQ DELEX of a server that has the first
Own = Callable[..., "tuple[Server, redis.Redis]"]


@pytest.fixture
def own(server: Server, start_server: Callable[..., Server]) -> Iterator[Own]:
    """own(*args): (a server of the cell's kind for this test alone, a redis-py client of it)."""
    kind = "valkey" if server.kind == "valkey" else "floor" if server.version < "7" else "redis"
    with contextlib.ExitStack() as stack:

        def start(*args: str) -> tuple[Server, redis.Redis]:
            started = start_server(kind, args=args)
            return started, stack.enter_context(redis.Redis(unix_socket_path=started.path))

        yield start


async def assert_in_step(api: Api, client: Any) -> None:
    """Use locks with tokens of their own in turn; each reply must be the lock's own."""
    locks = [client.lock(f"step:{number}", timeout=30) for number in range(4)]
    for number, lock in enumerate(locks):
        assert await api.get(lock.acquire(blocking=False, token=f"token {number}"))
    for lock in locks * 2:
        assert await api.get(lock.owned()) and not await api.get(client.lock("step:nobody's").locked())
    for lock in locks:
        await api.get(lock.release())


async def one_among_many(api: Api, client: Any, bad: str, good: int = 12) -> list[Any]:
    """Acquire `bad` and some good names at once on one connection; all outcomes but that of `bad` must be True."""

    async def acquire(name: str) -> bool:
        lock = client.lock(name)
        acquired: bool = await api.get(lock.acquire(blocking=False))
        if acquired:
            assert await api.get(lock.owned())
            await api.get(lock.release())
        return acquired

    names = [f"good:{number}" for number in range(good)]
    names.insert(good // 2, bad)
    outcomes = await api.together([lambda name=name: acquire(name) for name in names])
    error = outcomes.pop(good // 2)
    assert outcomes == [True] * good
    return [error]


# -------------------------------------------------------------------------------------- the error and its one caller


@pytest.mark.parametrize("fence", [False, True], ids=["plain", "fenced"])
async def test_wrong_type_reaches_its_caller_alone(
    api: Api, server: Server, probe: redis.Redis, no_leaks: Any, fence: bool
) -> None:
    no_leaks.allow("list", "fastlock:fence:*")
    client = api.client(server.unix_url, max_connections=1)
    probe.rpush("list", "x")
    (error,) = await one_among_many(api, client, "list")
    assert isinstance(error, exceptions.ResponseError) and "in use by something that is no lock" in str(error)
    with pytest.raises(fastlock.LockKindError, match="in use by something that is no lock"):
        await api.get(client.lock("list", fence=fence).acquire(blocking_timeout=30))
    await assert_in_step(api, client)


async def test_forbidden_name_reaches_its_caller_alone(api: Api, own: Own) -> None:
    server, probe = own()
    probe.acl_setuser("shop", enabled=True, nopass=True, categories=["+@all"], keys=["good:*", "step:*"])
    client = api.client(server.url, username="shop", password="", max_connections=1)
    (error,) = await one_among_many(api, client, "bad")
    assert isinstance(error, (exceptions.NoPermissionError, exceptions.ResponseError)) and "ermission" in repr(error)
    await assert_in_step(api, client)


async def test_forbidden_command_falls_back_to_the_script(api: Api, own: Own) -> None:
    server, probe = own()
    extra = ["-delifeq"] if server.kind == "valkey" else []
    probe.execute_command("ACL", "SETUSER", "shop", "on", "nopass", "+@all", "~*", *extra)
    client = api.client(server.url, username="shop", password="", max_connections=1)
    for _ in range(2):
        lock = client.lock("sku")
        assert await api.get(lock.acquire(blocking=False))
        await api.get(lock.release())
    leases = await api.get(client.acquire_many(["a", "b"]))
    assert await api.get(client.release_many(leases)) == [True, True]
    assert not probe.dbsize()


async def test_nothing_allowed_is_a_permission_error(api: Api, own: Own) -> None:
    server, probe = own()
    probe.execute_command("ACL", "SETUSER", "shop", "on", ">secret-word", "~*", "+hello", "+select", "+client")
    client = api.client(server.url, username="shop", password="secret-word")
    with pytest.raises(exceptions.NoPermissionError) as caught:
        await api.get(client.lock("sku").acquire())
    assert "secret-word" not in str(caught.value)
    with pytest.raises(exceptions.AuthenticationError) as wrong:
        await api.get(api.client(server.url, username="shop", password="wrong-word").lock("sku").acquire())
    assert "wrong-word" not in str(wrong.value)


async def test_a_missing_password_is_reported(api: Api, own: Own) -> None:
    """The server's own text explains the HELLO command, which is the library's business."""
    server, probe = own()
    probe.execute_command("ACL", "SETUSER", "default", "resetpass", ">secret-word")
    with pytest.raises(exceptions.AuthenticationError, match="asks for a password, and none was given"):
        await api.get(api.client(server.url).lock("sku").acquire())
    probe.execute_command("ACL", "SETUSER", "default", "nopass")


async def test_full_server_still_releases_and_extends(api: Api, own: Own) -> None:
    server, probe = own()
    client = api.client(server.url, max_connections=1)
    held = client.lock("held", timeout=5)
    batch = await api.get(client.acquire_many(["a", "b"]))
    assert await api.get(held.acquire())
    probe.config_set("maxmemory", "1")
    with pytest.raises(exceptions.OutOfMemoryError):
        await api.get(client.lock("sku").acquire())
    with pytest.raises(exceptions.OutOfMemoryError):
        await api.get(client.acquire_many(["c", "d"]))
    assert await api.get(held.extend(20, replace_ttl=True)) and 15_000 < probe.pttl("held") <= 20_000
    assert await api.get(held.owned())
    await api.get(held.release())
    assert await api.get(client.release_many(batch)) == [True, True]
    assert not probe.dbsize()
    probe.config_set("maxmemory", "0")
    await assert_in_step(api, client)


async def test_replica_raises_read_only(api: Api, own: Own) -> None:
    server, probe = own()
    client = api.client(server.url, max_connections=1)
    held = client.lock("held")
    await api.get(held.acquire())
    probe.replicaof("127.0.0.1", 1)
    for _ in range(2):
        with pytest.raises(exceptions.ReadOnlyError):
            await api.get(client.lock("sku").acquire())
    with pytest.raises(exceptions.ReadOnlyError):
        await api.get(held.release())
    assert await api.get(held.owned()), "a refused release leaves the lock with its holder"
    probe.config_set("replica-serve-stale-data", "no")
    timed_out = api.client(server.url, reply_timeout=0.05, connect_timeout=5)
    with pytest.raises(exceptions.MasterDownError):
        await api.get(timed_out.lock("sku").locked())
    answered = api.start(client.lock("sku").locked)
    probe.replicaof("NO", "ONE")
    assert await answered.get() is False
    await api.get(held.release())
    await assert_in_step(api, client)


async def test_too_few_replicas(api: Api, own: Own) -> None:
    server, probe = own()
    client = api.client(server.url, max_connections=1)
    probe.config_set("min-replicas-to-write", "1")
    with pytest.raises(exceptions.ResponseError, match="NOREPLICAS"):
        await api.get(client.lock("sku").acquire())
    probe.config_set("min-replicas-to-write", "0")
    await assert_in_step(api, client)


async def test_server_that_cannot_save(api: Api, own: Own) -> None:
    server, probe = own("--dbfilename", "taken")
    os.makedirs(os.path.join(os.path.dirname(server.path), "taken", "by-a-folder"))
    client = api.client(server.url, max_connections=1)
    await api.get(client.server_info())
    probe.config_set("save", "3600 1000000")
    probe.bgsave()
    while probe.info("persistence")["rdb_bgsave_in_progress"]:
        pass
    with pytest.raises(exceptions.ResponseError, match="MISCONF"):
        await api.get(client.lock("sku").acquire())
    probe.config_set("stop-writes-on-bgsave-error", "no")
    await assert_in_step(api, client)


async def test_server_busy_with_a_script(api: Api, own: Own) -> None:
    server, probe = own("--lua-time-limit", "1")
    client = api.client(server.url, max_connections=1, reply_timeout=0.5)  # seconds for which it retries
    await api.get(client.server_info())

    def hog() -> None:
        with (
            redis.Redis(unix_socket_path=server.path, socket_timeout=None) as other,
            contextlib.suppress(exceptions.ResponseError),
        ):
            other.eval("while true do end", 0)

    thread = threading.Thread(target=hog)
    thread.start()
    try:
        for _ in range(10_000):
            try:
                probe.get("x")
            except exceptions.ResponseError as error:
                assert "BUSY" in str(error)
                break
        with pytest.raises(exceptions.ResponseError, match="BUSY"):
            await api.get(client.lock("sku").acquire())
    finally:
        probe.script_kill()
        thread.join(10)
    await assert_in_step(api, client)
    assert not probe.exists("sku")


async def test_server_that_loads_its_data(api: Api, own: Own) -> None:
    server, probe = own()
    if server.kind == "valkey" or server.version >= "7":
        server, probe = own("--enable-debug-command", "yes")
    client = api.client(server.url, max_connections=1)
    await api.get(client.server_info())
    for number in range(30):
        # while it loads, a server serves its clients after every 2 MiB
        probe.set(f"filler:{number}", os.urandom(1 << 20))
    probe.config_set("key-load-delay", "10000")

    def reload() -> None:
        with redis.Redis(unix_socket_path=server.path, socket_timeout=None) as other:
            other.execute_command("DEBUG RELOAD")

    thread = threading.Thread(target=reload)
    thread.start()
    loading = False
    while thread.is_alive() and not loading:
        with contextlib.suppress(exceptions.BusyLoadingError):
            loading = bool(probe.info("persistence")["loading"])
    lock = client.lock("sku")
    assert await api.get(lock.acquire()), "the acquire must wait for the server"
    await api.get(lock.release())
    thread.join(20)
    assert loading and not probe.exists("sku")
    await assert_in_step(api, client)


async def test_no_room_for_another_client(api: Api, own: Own) -> None:
    server, probe = own()
    probe.config_set("maxclients", "1")
    client = api.client(server.url)
    with pytest.raises(exceptions.ConnectionError, match="max number of clients"):
        await api.get(client.lock("sku").acquire())
    probe.config_set("maxclients", "100")
    await assert_in_step(api, client)


@pytest.mark.parametrize("api", ["asyncio", "asyncio+uvloop"], indirect=True)
@pytest.mark.parametrize("ticks", [0, 3])
async def test_max_clients_is_reported_though_the_server_closed_first(
    api: Api, own: Own, ticks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop is busy between the connect and the first write; the server's error was read by then, or not."""
    server, probe = own()
    probe.config_set("maxclients", "1")
    greet = aio_connection.AsyncConnection.do_handshake

    async def late(connection: aio_connection.AsyncConnection, *arguments: Any) -> None:
        poller = select.poll()
        poller.register(connection.byte_transport.get_extra_info("socket").fileno(), 0)
        assert poller.poll(LONG * 1000), "the server has not closed"
        for _ in range(ticks):
            await asyncio.sleep(0)
        await greet(connection, *arguments)

    monkeypatch.setattr(aio_connection.AsyncConnection, "do_handshake", late)
    with pytest.raises(exceptions.ConnectionError, match="max number of clients"):
        await api.client(server.url).lock("sku").acquire()


# ---------------------------------------------------------------------------------------------- forgotten scripts


async def everything(api: Api, client: Any, number: int, step: Callable[[], object] = lambda: None) -> None:
    """Carry out each operation once, and call `step` after each."""
    lock = client.lock(f"all:{number}", fence=bool(number % 2))
    for operation in (lambda: lock.acquire(blocking=False), lambda: lock.extend(5), lock.reacquire, lock.owned):
        assert await api.get(operation())
        step()
    await api.get(lock.release())
    step()
    names = [f"all:{number}:{each}" for each in range(3)]
    leases = await api.get(client.acquire_many(names))
    assert all(lease is not None and lease.valid for lease in leases)
    step()
    assert await api.get(client.release_many(leases)) == [True] * 3
    step()


async def test_scripts_flushed_between_operations(api: Api, server: Server, probe: redis.Redis, no_leaks: Any) -> None:
    no_leaks.allow("fastlock:fence:*")
    client = api.client(server.unix_url)
    for number in range(10):
        probe.script_flush()
        await everything(api, client, number)
    lock = client.lock("sku", fence=True)
    for operation in (lock.acquire, lambda: lock.extend(5), lock.reacquire, lock.release):
        probe.script_flush()
        await api.get(operation())


async def test_scripts_flushed_under_many_callers(api: Api, server: Server, probe: redis.Redis, no_leaks: Any) -> None:
    """Flush as soon as every worker has ended an operation since the last flush. By the clock, no worker would get
    through on a slow machine: scripts that do not stay are not reloaded for ever."""
    no_leaks.allow("fastlock:fence:*")
    client = api.client(server.unix_url, max_connections=2)
    await api.get(client.server_info())
    moved, over, flushes = threading.Condition(), set[int](), 0
    ended: set[int] = set()  # workers that have ended an operation since the last flush

    def flush() -> None:
        nonlocal flushes
        with redis.Redis(unix_socket_path=server.path) as other:
            while len(over) < 5:
                other.script_flush()
                flushes += 1
                with moved:
                    ended.clear()
                    moved.wait_for(lambda: len(ended | over) == 5)

    def step(worker: int, of: set[int] = ended) -> None:
        with moved:
            of.add(worker)
            moved.notify()

    async def work(worker: int) -> None:
        try:
            for number in itertools.count(worker * 10_000):
                if flushes > 20 and number >= worker * 10_000 + 25:
                    break
                await everything(api, client, number, lambda: step(worker))
        finally:
            step(worker, over)

    flusher = threading.Thread(target=flush)
    flusher.start()
    outcomes = await api.together([lambda worker=worker: work(worker) for worker in range(5)])
    flusher.join(10)
    assert outcomes == [None] * 5 and not flusher.is_alive()


async def test_extend_by_script_after_a_flush_adds_once(api: Api, server: Server, probe: redis.Redis) -> None:
    client = api.client(server.unix_url)
    lock = client.lock("sku", timeout=10)
    await api.get(lock.acquire())
    for number in range(1, 4):
        probe.script_flush()
        await api.get(lock.extend(5))
        assert (number + 1) * 5_000 < probe.pttl("sku") <= 10_000 + number * 5_000
        left = probe.pttl("sku") / 1000  # read first: the lease must not outlast the key
        assert lock.lease.remaining <= left + 0.001
    await api.get(lock.release())


# ---------------------------------------------------------------------------------- capabilities that a server lacks


@pytest.mark.parametrize("server", ["redis", "floor"], indirect=True)
async def test_an_announced_command_may_be_unknown(
    api: Api, proxy: FaultProxy, probe: redis.Redis, no_leaks: Any
) -> None:
    """Behind a proxy, or where an older server has been promoted: the script is used instead."""
    proxy.arm(replace(ANNOUNCED), command="COMMAND", times=float("inf"))
    client = api.client(proxy.url, max_connections=1)
    assert "delifeq" in (await api.get(client.server_info()))["capabilities"]
    for number in range(0, 6, 2):
        await everything(api, client, number)
    lock = client.lock("sku", thread_local=False)
    assert await api.get(lock.acquire(blocking=False))
    await api.get(lock.release())
    assert [b"DELIFEQ", b"sku", lock_token(proxy)] in proxy.commands
    assert not any(words[:1] == [b"DELEX"] and len(words) < 4 for words in proxy.commands)


def lock_token(proxy: FaultProxy) -> bytes:
    return next(words[2] for words in proxy.commands if words[:2] == [b"DELIFEQ", b"sku"])


@pytest.mark.parametrize("server", ["redis", "floor"], indirect=True)
async def test_an_acquire_is_undone_without_the_announced_command(
    api: Api, proxy: FaultProxy, probe: redis.Redis, no_leaks: Any
) -> None:
    proxy.arm(replace(ANNOUNCED), command="COMMAND", times=float("inf"))
    client = api.client(proxy.url, max_connections=1)
    await api.get(client.server_info())
    armed = proxy.arm(stall(), after=b"\r\nsku\r\n", times=1)
    assert await api.get(client.lock("sku").acquire(blocking_timeout=0.02)) is False
    armed.resume()
    await assert_in_step(api, client)
    assert not probe.exists("sku")


# ------------------------------------------------------------------------------------------------- invalid replies

HELLOS = {
    "no proto": b"%2\r\n+server\r\n+redis\r\n+version\r\n+7.0.0\r\n",
    "empty map": b"%0\r\n",
    "odd version": b"%2\r\n+server\r\n+redis\r\n+version\r\n+seven.x\r\n",
    "number as version": b"%2\r\n+server\r\n+redis\r\n+version\r\n:7\r\n",
    "list as version": b"%2\r\n+server\r\n+redis\r\n+version\r\n*1\r\n:7\r\n",
    "old version": b"%2\r\n+server\r\n+redis\r\n+version\r\n+3.2.1\r\n",
    "bytes beyond text": b"%2\r\n+server\r\n$2\r\n\xff\xfe\r\n+version\r\n$2\r\n\xff\xfe\r\n",
    "list": b"*2\r\n+server\r\n+redis\r\n",
    "status": b"+OK\r\n",
    "nil": b"_\r\n",
    "list as key": b"%1\r\n*0\r\n:1\r\n",
    "set of maps": b"~1\r\n%0\r\n",
    "deep": b"*1\r\n" * 20 + b":1\r\n",
}
GREETINGS = {
    "http": b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/html\r\n\r\n<html>",
    "tls alert": b"\x15\x03\x01\x00\x02\x02\x46",
    "ssh": b"SSH-2.0-OpenSSH_9.2p1\r\n",
    "zeros": b"\0" * 100,
    "huge number": b"$999999999999\r\n",
    "negative list": b"*-7\r\n",
    "no number": b":" + b"9" * 100 + b"\r\n",
}


@pytest.mark.parametrize("hello", HELLOS)
async def test_odd_hello_is_accepted_or_refused_clearly(api: Api, hello: str) -> None:
    with FakeServer([b"_\r\n", b":1\r\n"], handshake={"HELLO": HELLOS[hello]}) as fake:
        client = api.client(fake.url, connect_timeout=5, reply_timeout=5)
        lock = client.lock("sku")
        try:
            assert await api.get(lock.acquire(blocking=False)) is True
            assert set(await api.get(client.server_info())) >= {"server", "version"}
        except exceptions.RedisError as error:
            assert type(error) is not exceptions.TimeoutError and str(error)


@pytest.mark.parametrize("key", ["COMMAND INFO", "CONFIG GET", "CLIENT INFO", "CLIENT SETINFO", "INFO", "SCRIPT LOAD"])
@pytest.mark.parametrize("answer", [*HELLOS, "error"])
async def test_odd_optional_handshake_replies_are_ignored(api: Api, key: str, answer: str) -> None:
    """Optional replies may be missing, forbidden or nonsense; what cannot be parsed ends the connection."""
    reply = b"-ERR no\r\n" if answer == "error" else HELLOS[answer]
    with FakeServer([b"_\r\n", b":1\r\n"], version="6.2.0", handshake={key: reply}) as fake:
        client = api.client(fake.url)
        try:
            assert await api.get(client.lock("sku").acquire(blocking=False)) is True
        except exceptions.RedisError as error:
            assert answer in ("deep", "list as key", "set of maps") and str(error)


@pytest.mark.parametrize("greeting", GREETINGS)
async def test_servers_of_other_protocols_are_reported(api: Api, greeting: str) -> None:
    """Another kind of server listens there: a clear exception, at once or after the connect timeout."""
    with Babbler([GREETINGS[greeting]]) as babbler:
        client = api.client(babbler.url, connect_timeout=0.3, reply_timeout=0.3)
        with pytest.raises(exceptions.RedisError) as caught:
            await api.get(client.lock("sku").acquire())
        assert str(caught.value) and str(caught.value).isprintable()


@pytest.mark.parametrize("endless", [b"+" + b"a" * 65536, b"*1\r\n" * 4096, b"$9000000000\r\n" + b"a" * 65536])
async def test_endless_reply_ends_the_connection(api: Api, endless: bytes) -> None:
    with Babbler([endless], again=b"a" * 65536) as babbler:
        client = api.client(babbler.url, connect_timeout=20, reply_timeout=20)
        with at_most(8 << 20), pytest.raises(exceptions.InvalidResponse):
            await api.get(client.lock("sku").acquire())
        babbler.ended.wait(10)
        assert babbler.sent < 16 << 20


@pytest.mark.parametrize("kind", [b"*", b"%", b"~", b">"])
async def test_announced_size_reserves_nothing(api: Api, kind: bytes) -> None:
    """A few bytes that promise ten million elements: memory is allocated for what came, not for what was announced."""
    with Babbler([kind + b"10000000\r\n"]) as babbler:
        client = api.client(babbler.url, connect_timeout=0.3, reply_timeout=0.3)
        with at_most(16 << 20), pytest.raises(exceptions.RedisError):
            await api.get(client.lock("sku").acquire())


@contextlib.contextmanager
def at_most(size: int) -> Iterator[None]:
    """AssertionError when Python's allocations reach this size in the block, in bytes."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < size
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("size", [300, 60_000, 1 << 20])
async def test_long_error_text_is_shortened_and_harmless(api: Api, size: int) -> None:
    text = b"-ERR \x1b[2J\x1b]0;owned\x07 " + b"A" * size + b"\r\n"
    with FakeServer([text] * 8) as fake:
        client = api.client(fake.url)
        with pytest.raises((exceptions.ResponseError, exceptions.InvalidResponse)) as caught:
            await api.get(client.lock("sku").acquire(blocking=False))
        assert len(str(caught.value)) < 500 and str(caught.value).isprintable()


@pytest.mark.parametrize("reply", [b"+OK\r\n:1\r\n", b"*1\r\n_\r\n", b",1.5\r\n", b"%0\r\n", b"(12\r\n"])
async def test_an_invalid_reply_to_a_release_is_no_release(api: Api, reply: bytes) -> None:
    with FakeServer([b"_\r\n", reply, reply, reply]) as fake:
        client = api.client(fake.url, reply_timeout=1)
        lock = client.lock("sku")
        assert await api.get(lock.acquire(blocking=False))
        with pytest.raises(exceptions.RedisError) as caught:
            await api.get(lock.release())
        assert not isinstance(caught.value, fastlock.LockError) and lock.lease is not None


class Babbler:
    """Listens, and sends the given bytes to each client; then `again`, if given, until the client ends the
    connection."""

    def __init__(self, first: list[bytes], again: bytes = b"") -> None:
        self._first, self._again = first, again
        self.sent = 0
        self.ended = threading.Event()
        self._threads: list[threading.Thread] = []
        self._connections: list[socket.socket] = []
        self._listener = Listener(self._connected)
        self.url = self._listener.place()

    def _connected(self, connection: socket.socket) -> None:
        thread = threading.Thread(target=self._talk, args=(connection,), name="babbler", daemon=True)
        self._connections.append(connection)
        self._threads.append(thread)
        thread.start()

    def _talk(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            for piece in self._first:
                connection.sendall(piece)
            while self._again:
                self.sent += connection.send(self._again)
            while connection.recv(1 << 16):
                pass
        self.ended.set()

    def __enter__(self) -> Babbler:
        return self

    def __exit__(self, *about: object) -> None:
        self._listener.close()
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(5)
            assert not thread.is_alive(), "a connection of the babbler hangs"


@pytest.mark.parametrize("kind", [fastlock.LockError, fastlock.LockNotOwnedError, fastlock.ClientClosedError])
def test_fastlocks_errors_are_named_by_their_public_module(kind: type[Exception]) -> None:
    """Tracebacks, logs and error collectors show that name."""
    assert f"{kind.__module__}.{kind.__qualname__}" == f"fastlock.{kind.__name__}"
    assert getattr(fastlock, kind.__name__) is kind is type(pickle.loads(pickle.dumps(kind("text"))))
