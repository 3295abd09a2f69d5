"""Connections that end, fall silent or are shared by many callers, and the commands sent on the next connection.

A real server behind the proxy or, for very many commands, a fake one. What must never happen: an error or a pause
because of a connection that was only idle, a timeout of a caller that was answered, a command that is not sent, the end
of a connection that belongs to another client.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import random
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from support.apis import Api
from support.child_client import fired, until
from support.fakeserver import FakeServer
from support.faultproxy import FaultProxy, drop, replace, stall, swallow
from support.raw_client import RawClient
from support.run_steps import joined

import fastlock.asyncio
from fastlock._protocol import extension, handshake
from fastlock._protocol.commands import Opcode, hand_over
from fastlock._protocol.lease import now
from fastlock._protocol.steps import ConnectionLost, RawCommands, Sleep
from fastlock._protocol.undo import Undo
from fastlock._stream_errors import Broken
from fastlock._transport import aio, sync, waiting
from fastlock._transport.aio_connection import AsyncConnection
from fastlock._transport.sync_connection import Connection
from fastlock._transport.undo_delivery import UndoDelivery
from fastlock._transport.writing import removed
from fastlock.embedded import Server

NAME = "sku"
TOKEN = b"fl:" + b"x" * 32
MARK = b"\r\nsku\r\n"
LONG_TIMEOUT, SHORT_TIMEOUT = 20.0, 1.0  # seconds: a reply_timeout that never ends, and one that does
threads_only = pytest.mark.parametrize("api", ["threads"], indirect=True)
two_servers = pytest.mark.parametrize("server", ["valkey", "floor"], indirect=True)


def killed(commands: list[list[bytes]]) -> list[list[bytes]]:
    """The commands by which one connection ends another."""
    return [words for words in commands if words[:2] == [b"CLIENT", b"KILL"]]


@pytest.mark.parametrize("version", ["6.2.0", "7.0.15"])
def test_a_connection_that_ends_with_its_handshake_fails_at_once(impl: str, version: str) -> None:
    """The end may come in the tick in which the last reply arrives: a later command would never be answered."""

    async def body() -> None:
        with FakeServer(version=version) as fake:
            client = fastlock.asyncio.Client.from_url(fake.url)
            client._transport.begin()
            connection = AsyncConnection(client._transport, asyncio.get_running_loop())
            connection.connection_made(SimpleNamespace(write=lambda data: None, abort=lambda: None))  # type: ignore[arg-type]
            greeting = asyncio.create_task(connection.do_handshake(client._settings, (None, None)))
            await asyncio.sleep(0)
            connection.received(fake.greeted(handshake.greeting(None, 0, (None, None))))
            connection.connection_lost(None)
            with pytest.raises(redis.exceptions.ConnectionError):
                await asyncio.wait_for(greeting, 20)
            await client.close()

    asyncio.run(body())


# -------------------------------------------------------------------------------------------------- closed while idle


async def idle_connections(api: Api, client: Any, proxy: FaultProxy, count: int) -> None:
    """Make so many idle connections: by as many callers at once, whose replies are held back until all have sent."""
    armed = proxy.arm(stall(), after=b"hold:")
    jobs = [api.start(lambda n=n: client.lock(f"hold:{n}").locked()) for n in range(count)]
    await fired(api, armed.wait) if api.is_async else armed.wait(count)
    armed.resume()
    assert [await job.get() for job in jobs] == [False] * count
    assert len(proxy.connections) == (1 if api.is_async else count)


async def closed_by_the_server(api: Api, client: Any, proxy: FaultProxy) -> None:
    """End all connections; return when the client's sockets have the end (and asyncio's callback has run)."""
    proxy.cut()
    proxy.wait_for(lambda proxy: all(connection.pumps == 0 for connection in proxy.connections))
    while api.is_async and client._transport.connection is not None:
        await asyncio.sleep(0)


def note_pauses(client: Any, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses of this client from now on, however short; none of them is made."""
    found: list[float] = []

    def note(step: Sleep) -> None:
        found.append(step.seconds)

    async def sleep(step: Sleep) -> None:
        note(step)

    is_async = inspect.iscoroutinefunction(client._transport._sleep)
    monkeypatch.setattr(client._transport, "_sleep", sleep if is_async else note)
    return found


@pytest.mark.parametrize("operation", ["acquire", "acquire with", "release", "extend", "locked", "many"])
async def test_closed_idle_connections_are_replaced_unnoticed(
    api: Api, proxy: FaultProxy, no_leaks: Any, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = api.client(proxy.url, max_connections=4, reply_timeout=LONG_TIMEOUT)
    lock = client.lock(NAME, thread_local=False)
    await idle_connections(api, client, proxy, 4)
    if operation in ("release", "extend"):
        assert await api.get(lock.acquire())
    made = proxy.accepted
    await closed_by_the_server(api, client, proxy)
    pauses = note_pauses(client, monkeypatch)
    if operation == "acquire":
        assert await api.get(lock.acquire()) is True
    elif operation == "acquire with":
        assert await api.get(lock.acquire(blocking_timeout=LONG_TIMEOUT)) is True
    elif operation == "release":
        await api.get(lock.release())
    elif operation == "extend":
        assert await api.get(lock.extend(5)) is True
    elif operation == "locked":
        assert await api.get(lock.locked()) is False
    else:
        (lease,) = await api.get(client.acquire_many([NAME]))
        assert await api.get(client.release_many([lease])) == [True]
    assert pauses == []
    assert proxy.accepted == made + 1, "one connection replaces them all"
    assert sum(MARK in connection.requests for connection in proxy.connections[:made]) <= 1, (
        "something was sent on a connection that had ended"
    )
    if not api.is_async:
        assert client._transport.connections == client._transport.idle and len(client._transport.idle) == 1
    proxy.arm(swallow(), after=b"\r\nother\r\n")
    assert await api.get(client.lock("other").locked()) is False
    assert pauses == [0.0], "a lost reply must cause a pause, else this test sees none"
    if lock.lease is not None:
        await api.get(lock.release())


# ------------------------------------------------------------------------------------------------------ pending undos


@threads_only
async def test_pending_undos_outlive_the_connection_chosen_for_them(
    api: Api, impl: str, server: Server, probe: redis.Redis, no_leaks: Any
) -> None:
    """Another thread may break the connection, or send the undos, between the choice of the connection and its use."""
    probe.set(NAME, "abandoned")
    client = api.client(server.unix_url, max_connections=2)
    client.server_info()
    transport = client._transport
    transport.pending_undos += [UndoDelivery(Undo([name], [b"abandoned"])) for name in (b"other", NAME.encode())]
    connection = transport.idle.pop()
    connection.fail(Broken("by another thread"))
    transport.flush_undos_over(connection)
    assert sorted(delivery.undo.names for delivery in transport.pending_undos) == [[b"other"], [NAME.encode()]]
    assert not client.lock("barrier").locked()
    assert not probe.exists(NAME) and transport.pending_undos == []


@threads_only
def test_a_caller_that_loses_the_last_idle_connection_retries(
    api: Api, impl: str, proxy: FaultProxy, no_leaks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller shares a busy connection. Another thread, which needs no mutex to pop one, is faster twice."""
    client = api.client(proxy.url, max_connections=1)
    client.server_info()
    lengths: list[int] = []

    def popped(idle: list[Any]) -> Any:
        lengths.append(len(idle))
        raise IndexError

    def removed(idle: list[Any], connection: Any) -> Any:
        lengths.append(len(idle))
        idle.clear()
        raise ValueError

    monkeypatch.setattr(sync, "POP", popped)
    monkeypatch.setattr(sync, "REMOVE", removed)
    assert client._transport.drive(extension.inspect(Opcode.EXISTS, NAME.encode(), now)) == 0
    assert lengths == [1, 1] and proxy.accepted == 1


@threads_only
async def test_a_pending_undo_is_sent_by_one_thread(
    api: Api, impl: str, server: Server, probe: redis.Redis, no_leaks: Any
) -> None:
    """Another thread sends undos as well, between the removal of an undo and its post, and between two undos."""
    client = api.client(server.unix_url, max_connections=2)
    client.server_info()
    transport = client._transport
    connection = transport.idle[0]
    real, posted = connection.post, list[UndoDelivery]()

    class Flushing(Connection):
        def post(self, delivery: UndoDelivery) -> None:
            posted.append(delivery)
            transport.flush_undos_over(self)
            real(delivery)

    transport.pending_undos += [UndoDelivery(Undo([b"%d" % number], [b"abandoned"])) for number in range(4)]
    undos = list(transport.pending_undos)
    connection.__class__ = Flushing
    transport.flush_undos_over(connection)
    assert posted == undos and transport.pending_undos == []


@threads_only
def test_an_undo_that_a_dead_connection_refuses_stays_once(api: Api, impl: str, server: Server) -> None:
    client = api.client(server.unix_url, max_connections=2)
    client.server_info()
    transport = client._transport
    transport.pending_undos += [UndoDelivery(Undo([b"%d" % number], [b"abandoned"])) for number in range(4)]
    undos = set(transport.pending_undos)
    connection = transport.idle[0]
    connection.fail(Broken("by another thread"))
    for _ in range(3):
        transport.flush_undos_over(connection)
    assert len(transport.pending_undos) == 4 and set(transport.pending_undos) == undos
    assert sorted(len(undo.stale) for undo in transport.pending_undos) == [0, 1, 1, 1]
    transport.pending_undos.clear()


def test_removed_tells_whether_the_item_was_there() -> None:
    these = [1, 2]
    assert removed(these, 1) and not removed(these, 1) and these == [2]


# ------------------------------------------------------------------------------------------------- quiet for a while


class Later(asyncio.SelectorEventLoop):
    """An event loop whose time can be moved forward."""

    later = 0.0

    def time(self) -> float:
        return super().time() + self.later


def test_idle_time_does_not_count_for_the_reply_timeout(
    impl: str, proxy: FaultProxy, probe: redis.Redis, no_leaks: Any
) -> None:
    """The timer that the previous command set fires while this one is under way, which was sent only just now."""

    async def ticks(count: int = 5) -> None:
        for _ in range(count):
            await asyncio.sleep(0)

    async def body(loop: Later) -> None:
        async with fastlock.asyncio.Client.from_url(proxy.url, reply_timeout=100) as client:
            lock = client.lock(NAME, timeout=3600)
            await client.server_info()
            for quiet in (99.5, 100.5, 250.0):
                loop.later += quiet
                armed = proxy.arm(stall(), after=MARK, times=1)
                task = asyncio.ensure_future(lock.acquire())
                while not armed.fired:
                    await asyncio.sleep(0.001)
                loop.later += 1
                await ticks()
                assert not task.done() and client._transport.connection is not None
                armed.resume()
                assert await task is True and proxy.accepted == 1
                await lock.release()
            armed = proxy.arm(stall(), after=MARK, times=1)
            task = asyncio.ensure_future(lock.acquire())
            while not armed.fired:
                await asyncio.sleep(0.001)
            loop.later += 101
            assert await task is True and proxy.accepted == 2, "a missing reply must time out"
            await lock.release()

    with asyncio.Runner(loop_factory=Later) as runner:
        loop: Any = runner.get_loop()
        runner.run(body(loop))


def test_a_connection_for_a_caller_also_serves_pending_undos(
    impl: str, proxy: FaultProxy, probe: redis.Redis, no_leaks: Any
) -> None:
    """Pending undos start a connection of their own after each failure; nobody would close a second connection."""

    class Twice:
        asked = 0

        async def get_credentials_async(self) -> tuple[str, ...]:
            self.asked += 1
            if self.asked in (2, 3):
                raise LookupError("the vault")
            return ("default", "")

        get_credentials: Any = get_credentials_async

    async def body(loop: Later) -> None:
        async with fastlock.asyncio.Client.from_url(proxy.url, credential_provider=Twice()) as client:
            lock = client.lock(NAME)
            await client.server_info()
            proxy.cut()
            for call in (lock.acquire, client.server_info):  # the second call joins the first try of the pending undos
                with pytest.raises(LookupError, match="the vault"):
                    await call()
            assert client._transport.pending_undos and client._transport._failures == 3, (
                "the cut and two tries: without a pending undo there is none"
            )
            assert await lock.acquire()
            await lock.release()
            loop.later += 100  # the time of the next try has come
            for _ in range(5):
                await asyncio.sleep(0)
            assert client._transport._connecting is None
            assert await lock.acquire() and proxy.accepted == 2
            await lock.release()

    with asyncio.Runner(loop_factory=Later) as runner:
        loop: Any = runner.get_loop()
        runner.run(body(loop))


# --------------------------------------------------------------------------------------------- broken under a command


@contextlib.contextmanager
def without_ids(proxy: FaultProxy) -> Iterator[None]:
    """Connections made meanwhile do not learn their id, so no client can end them on the server."""
    armed = proxy.arm(replace(b"-ERR not for you\r\n"), after=b"\r\nINFO\r\n", times=float("inf"))
    yield
    armed.disarm()


@two_servers
async def test_an_unknown_outcome_lasts_until_the_own_token_turns_up(
    api: Api, proxy: FaultProxy, probe: redis.Redis, no_leaks: Any
) -> None:
    """The first try times out unread, the second finds another holder; then the first is executed after all, as the
    broken connection could not be ended: the third try finds the caller's own token, and so the lock is the
    caller's."""
    probe.set(NAME, "another")
    with without_ids(proxy):
        client = api.client(proxy.url, reply_timeout=SHORT_TIMEOUT, max_connections=1)
        await api.get(client.server_info())
    lock = client.lock(NAME, timeout=3600, sleep=0.005, thread_local=False)
    first = proxy.arm(stall("request"), after=MARK, times=1)
    waiter = api.start(lock.acquire)
    await fired(api, first.wait)
    await waited(api, lambda: MARK in proxy.requests)  # over another connection: the first try is held back
    assert not killed(proxy.commands), "the id of the broken connection is unknown"
    later = proxy.arm(stall("request"), after=lambda frame: MARK in frame and b"PTTL" not in frame, times=1)
    await fired(api, later.wait)
    assert not waiter.finished.is_set()
    probe.delete(NAME)
    first.resume()
    await waited(api, lambda: probe.exists(NAME))
    later.resume()
    assert await waiter.get() is True
    assert probe.get(NAME) == lock.lease.token
    left = probe.pttl(NAME) / 1000  # read first: the lease must not outlast the key
    assert 0 < lock.lease.remaining <= left + 0.001
    await api.get(lock.release())
    assert not probe.exists(NAME)


async def waited(api: Api, holds: Callable[[], object]) -> None:
    """Return when it holds; AssertionError after 10 seconds."""
    end = now() + 10
    while not holds():
        assert now() < end
        if api.is_async:
            await asyncio.sleep(0.0005)


@pytest.mark.parametrize("restarted", [False, True], ids=["the same server", "restarted"])
async def test_a_broken_connection_is_killed_on_its_own_server_only(
    api: Api, start_server: Callable[..., Server], restarted: bool
) -> None:
    """Connection ids start anew with a server, and all connections of a unix socket have one address: after a
    restart the id of the broken connection may belong to another client."""
    before, after = start_server(), start_server()
    for _ in range(30):
        RawClient(before.unix_url).socket.close()
    with FaultProxy(before.unix_url) as proxy:
        client = api.client(proxy.url, reply_timeout=LONG_TIMEOUT, max_connections=1)
        await api.get(client.server_info())
        proxy.upstream = after.unix_url if restarted else before.unix_url
        armed = proxy.arm(swallow(), after=MARK)
        lock = client.lock(NAME, timeout=60)
        assert await api.get(lock.acquire(blocking=False)) is True
        armed.wait()
        assert len(proxy.connections) == 2
        calls = killed(proxy.connections[1].commands)
        assert (calls == []) if restarted else (len(calls) == 1 and calls[0][2] == b"ID" and calls[0][4] == b"ADDR")
        await api.get(lock.release())
        await api.get(client.close())


def session(number: int, serial: int, run: bytes = b"", *, unix: bool = False) -> handshake.Session:
    address = b"/tmp/s:0" if unix else b"10.0.0.7:51234"
    return handshake.Session({}, frozenset(), b"%d" % number if number else b"", address, "", serial, run)


@pytest.mark.parametrize(
    ("broken", "current", "is_ended"),
    [
        (session(7, 1), session(8, 2), True),
        # the connection that sends is older: the server has lived at least as long
        (session(7, 2), session(3, 1), True),
        (session(7, 1), session(7, 2), False),  # the id of the current connection: the server was restarted meanwhile
        (session(7, 1), session(3, 2), False),
        (session(99, 1), session(100, 2), True),  # ids are compared as numbers, not as texts
        (session(100, 1), session(99, 2), False),
        (session(0, 1), session(8, 2), False),  # the id of the broken one is unknown
        (session(7, 1), session(0, 2), True),  # the current id is unknown: by id and address
        (session(7, 1, b"one"), session(8, 2, b"one"), True),
        (session(7, 1, b"one"), session(3, 2, b"one"), True),  # ids may have wrapped around
        (session(7, 1, b"one"), session(8, 2, b"two"), False),  # other clients connected first to the restarted server
        (session(7, 1, b"one", unix=True), session(8, 2, b"one", unix=True), True),
        (session(7, 1, b"one", unix=True), session(8, 2, b"two", unix=True), False),
        # all connections of a unix socket have one address
        (session(7, 1, b"", unix=True), session(8, 2, b"two", unix=True), False),
        (session(7, 1, b"one", unix=True), session(8, 2, b"", unix=True), False),
        (session(7, 1, b"one"), session(8, 2, b""), True),  # a TCP port, which no other connection has at the same time
        (session(7, 1, b"", unix=True), session(8, 2, b"", unix=True), False),
    ],
)
def test_which_connection_may_kill_which(broken: handshake.Session, current: handshake.Session, is_ended: bool) -> None:
    call = (b"CLIENT", b"KILL", b"ID", broken.id, b"ADDR", broken.address)
    assert handshake.end(broken, current) == (call if is_ended else None)


def test_no_connection_kills_itself() -> None:
    """What a connection sent before comes before what it sends now."""
    mine = session(7, 1, b"one")
    assert handshake.end(mine, mine) is None


@threads_only
@pytest.mark.parametrize("operation", ["acquire", "acquire with", "locked"])
async def test_a_connection_that_is_just_failing_is_not_used(
    api: Api, server: Server, no_leaks: Any, operation: str
) -> None:
    """Another thread has found it broken and not yet discarded it: that thread was stopped, or interrupted, before."""
    client = api.client(server.unix_url, max_connections=1)
    lock = client.lock(NAME)
    await api.get(lock.locked())
    (failing,) = client._transport.connections
    client._transport.idle.clear()
    failing.error = ConnectionError("found by another thread")
    calls = {"acquire": lock.acquire, "acquire with": lambda: lock.acquire(blocking_timeout=LONG_TIMEOUT)}
    assert await api.get(calls.get(operation, lock.locked)()) is (operation != "locked")
    assert failing not in client._transport.connections and client._transport.idle == client._transport.connections
    if lock.lease is not None:
        await api.get(lock.release())


@threads_only
@two_servers
async def test_a_push_connection_that_ends_is_replaced(
    api: Api, server: Server, probe: redis.Redis, no_leaks: Any
) -> None:
    """Busy connections are told from idle ones by counting; and the next waiter receives messages again."""
    client, holder = api.client(server.unix_url), api.client(server.unix_url).lock(NAME)
    transport = client._transport

    def listening() -> set[str]:
        return {each["id"] for each in probe.client_list(_type="pubsub")}

    async def cut() -> None:
        before = listening()
        probe.client_kill_filter(_type="pubsub")
        await until(api, lambda: not before & listening(), "the cut")

    async def use_lock() -> None:
        lock = client.lock(NAME)
        await api.get(lock.acquire())
        await api.get(lock.release())

    # so that the push connection is not needed for other commands
    transport.idle += [transport._open_connection(object(), transport.settings.connect_timeout) for _ in range(3)]
    await api.get(holder.acquire())
    waiting = api.start(use_lock)
    await until(api, listening, "a push connection")
    broken = transport.push_connection
    await cut()
    await until(api, lambda: transport.push_connection not in (None, broken), "another push connection")
    await api.get(holder.release())
    await waiting.get(LONG_TIMEOUT)
    assert transport.push_connection_lent == 1 and transport.push_connection not in transport.idle
    transport.push_connection.fail(ConnectionError("found by a waiter that leaves a queue"))
    assert transport.push_connection_lent == 0 and transport.connections == transport.idle


# ---------------------------------------------------------------------------------------- more threads than connections


@pytest.fixture
def hurried(request: pytest.FixtureRequest) -> None:
    """Threads are switched as often as possible."""
    interval = sys.getswitchinterval()
    request.addfinalizer(lambda: sys.setswitchinterval(interval))
    sys.setswitchinterval(1e-6)


def echo(words: list[bytes]) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(words[1]), words[1])


@threads_only
@pytest.mark.parametrize("limit", [1, 2])
@pytest.mark.parametrize("seed", range(4))
async def test_many_threads_lose_no_command_and_no_reply(api: Api, hurried: None, limit: int, seed: int) -> None:
    """A command queued at any moment of another thread's send and read is sent: else its caller would time out, and
    the connection would be discarded."""
    with FakeServer(handshake={"GET": echo}) as fake:
        client = api.client(fake.url, max_connections=limit, reply_timeout=LONG_TIMEOUT)
        await api.get(client.server_info())

        def work(number: int) -> int:
            rng = random.Random(f"{seed}/{number}")
            for count in range(500):
                key = b"%d:%d:" % (number, count) + b"x" * rng.choice((0, 0, 0, 50, 3000))
                assert client._transport.drive(extension.inspect(Opcode.GET, key, now)) == key
            return number

        assert await api.together([lambda n=n: work(n) for n in range(8)]) == list(range(8))
        assert fake.accepted <= limit and len(client._transport.idle) == fake.accepted
        asked = [words for words in fake.commands if words[0] == b"GET"]
        assert len(asked) == 8 * 500, "a command was not sent exactly once"


@pytest.mark.parametrize("api", ["asyncio"], indirect=True)
async def test_an_undo_that_breaks_each_connection_is_sent_less_and_less_often(
    api: Api, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a proxy does that refuses a command: a busy loop would connect a thousand times a second."""
    pauses: list[int] = []
    monkeypatch.setattr(aio, "LASTING", 1e9)  # on a busy machine, too
    monkeypatch.setattr(aio, "backoff", lambda failures: pauses.append(failures) or 0.001)
    client = api.client(proxy.url)
    await api.get(client.server_info())
    armed = proxy.arm(drop(request_bytes=1), after=TOKEN, times=8)
    client._transport.deliver(UndoDelivery(Undo([b"sku"], [TOKEN])))
    await until(api, lambda: len(pauses) >= 3, "pauses")
    assert pauses[:3] == [2, 3, 4] and armed.fired
    await until(api, lambda: not client._transport.pending_undos, "the undo")


@threads_only
@pytest.mark.parametrize("what", ["script", "look", "release"])
async def test_who_is_alone_on_a_connection_that_another_thread_finds_broken_is_told(
    api: Api, server: Server, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """All who wait for a reply are: as the script of one who is alone that is no odd reply."""
    client = api.client(server.url)
    await api.get(client.server_info())
    transport = client._transport
    (connection,) = transport.idle
    told = ConnectionLost(Broken("found by another thread"), 1.0, sent=True)
    waiter = joined(transport.queues, "sku", b"sku", 1000, False, None)
    with monkeypatch.context() as patch:
        patch.setattr(connection, "stream", SimpleNamespace(round_trip=lambda *_: told))
        if what == "script":
            assert connection.execute(RawCommands([hand_over(b"sku", TOKEN)]), 0.0) is told
        elif what == "release":
            with pytest.raises(Broken):
                waiting.send_hand_over(transport, connection, b"sku", TOKEN)
        else:
            with pytest.raises(Broken):
                waiting.send_enter(transport, connection, waiter.queue, waiter, True, 1.0)
    transport.queues.dequeue(waiter, now())


@threads_only
@pytest.mark.parametrize("call", ["server_info", "acquire"])
async def test_a_handler_does_not_wait_for_the_connection_that_its_own_thread_opens(
    api: Api, server: Server, call: str
) -> None:
    client = api.client(server.unix_url, max_connections=1)
    opening = client._transport._opening
    opening.add(mark := (threading.get_ident(), object()))  # as the thread does that the handler has interrupted
    with pytest.raises(RuntimeError, match="max_connections of 2 or more"):
        client.server_info() if call == "server_info" else client.lock("sku").acquire()
    opening.discard(mark)
    assert not client.lock("sku").locked()
