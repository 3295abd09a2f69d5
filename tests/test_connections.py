"""Connections that end, fall silent or are crowded under a client, and what is asked over the next one.

A real server behind the proxy or, for very many rounds, a fake one. What must never happen: an error or a pause because
of what was only idle, a timeout of somebody who was answered, a command that nobody sends, the end of a connection that
is somebody else's.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import random
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from support.child_client import fired, until
from support.faces import Face
from support.fakeserver import FakeServer
from support.faultproxy import FaultProxy, replace, stall, swallow
from support.raw_client import RawClient

import fastlock.asyncio
from fastlock._protocol import extension, handshake, steps
from fastlock._protocol.commands import Opcode
from fastlock._protocol.lease import now
from fastlock._stream_errors import Broken
from fastlock._transport import sync
from fastlock._transport.aio_connection import AsyncConnection
from fastlock._transport.sync_connection import Connection, removed
from fastlock.embedded import Server

NAME = "sku"
MARK = b"\r\nsku\r\n"
PATIENT, HASTY = 20.0, 1.0  # seconds: a reply_timeout that never strikes, and one that does
threads_only = pytest.mark.parametrize("face", ["threads"], indirect=True)
two_servers = pytest.mark.parametrize("server", ["valkey", "floor"], indirect=True)


def killed(commands: list[list[bytes]]) -> list[list[bytes]]:
    """The commands by which one connection ends another."""
    return [words for words in commands if words[:2] == [b"CLIENT", b"KILL"]]


@pytest.mark.parametrize("version", ["6.2.0", "7.0.15"])
def test_a_connection_that_ends_with_the_last_word_of_its_handshake_fails_at_once(impl: str, version: str) -> None:
    """It may do so in the tick in which that arrives: what is asked behind it would be answered by nobody."""

    async def body() -> None:
        with FakeServer(version=version) as fake:
            client = fastlock.asyncio.Client.from_url(fake.url)
            client._transport.begin()
            connection = AsyncConnection(client._transport, asyncio.get_running_loop())
            connection.connection_made(SimpleNamespace(write=lambda data: None, abort=lambda: None))  # type: ignore[arg-type]
            greeting = asyncio.create_task(connection.do_handshake(client._settings, (None, None)))
            await asyncio.sleep(0)
            connection.received(fake.greeted(handshake.greeting(client._settings, (None, None))))
            connection.connection_lost(None)
            with pytest.raises(redis.exceptions.ConnectionError):
                await asyncio.wait_for(greeting, 20)
            await client.close()

    asyncio.run(body())


# -------------------------------------------------------------------------------------------------- closed while idle


async def idle_connections(face: Face, client: Any, proxy: FaultProxy, count: int) -> None:
    """Make so many connections, all idle: as many callers at once, whose replies are held back until all have asked."""
    armed = proxy.arm(stall(), after=b"hold:")
    jobs = [face.start(lambda n=n: client.lock(f"hold:{n}").locked()) for n in range(count)]
    await fired(face, armed.wait) if face.is_async else armed.wait(count)
    armed.resume()
    assert [await job.get() for job in jobs] == [False] * count
    assert len(proxy.connections) == (1 if face.is_async else count)


async def closed_by_the_server(face: Face, client: Any, proxy: FaultProxy) -> None:
    """End all connections; return when the client's sockets have heard of it (and asyncio has, which is told)."""
    proxy.cut()
    proxy.wait_for(lambda proxy: all(connection.pumps == 0 for connection in proxy.connections))
    while face.is_async and client._transport.connection is not None:
        await asyncio.sleep(0)


def note_pauses(client: Any, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses of this client from now on, however short; none of them is made."""
    found: list[float] = []

    async def sleep(seconds: float) -> None:
        found.append(seconds)

    is_async = inspect.iscoroutinefunction(client._transport._sleep)
    monkeypatch.setattr(client._transport, "_sleep", sleep if is_async else found.append)
    return found


@pytest.mark.parametrize("operation", ["acquire", "acquire with", "release", "extend", "locked", "many"])
async def test_connections_that_the_server_closed_while_they_were_idle_are_replaced_unnoticed(
    face: Face, proxy: FaultProxy, no_leaks: Any, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = face.client(proxy.url, max_connections=4, reply_timeout=PATIENT)
    lock = client.lock(NAME, thread_local=False)
    await idle_connections(face, client, proxy, 4)
    if operation in ("release", "extend"):
        assert await face.get(lock.acquire())
    made = proxy.accepted
    await closed_by_the_server(face, client, proxy)
    pauses = note_pauses(client, monkeypatch)
    if operation == "acquire":
        assert await face.get(lock.acquire()) is True
    elif operation == "acquire with":
        assert await face.get(lock.acquire(blocking_timeout=PATIENT)) is True
    elif operation == "release":
        await face.get(lock.release())
    elif operation == "extend":
        assert await face.get(lock.extend(5)) is True
    elif operation == "locked":
        assert await face.get(lock.locked()) is False
    else:
        (lease,) = await face.get(client.acquire_many([NAME]))
        assert await face.get(client.release_many([lease])) == [True]
    assert pauses == []
    assert proxy.accepted == made + 1, "one for them all: the others are needed by nobody"
    assert sum(MARK in connection.requests for connection in proxy.connections[:made]) <= 1, (
        "nothing was sent on any that had ended"
    )
    if not face.is_async:
        assert client._transport.connections == client._transport.idle and len(client._transport.idle) == 1
    proxy.arm(swallow(), after=b"\r\nother\r\n")
    assert await face.get(client.lock("other").locked()) is False
    assert pauses == [0.0], "a reply that was lost is another matter, or this test sees no pause"
    if lock.lease is not None:
        await face.get(lock.release())


# ------------------------------------------------------------------------------------------------------ what is owed


@threads_only
def test_what_is_owed_outlives_the_connection_that_was_to_carry_it(
    face: Face, impl: str, server: Server, probe: redis.Redis, no_leaks: Any
) -> None:
    """It may break by another thread's hand, or another thread may pay, between its being taken and its being used."""
    probe.set(NAME, "abandoned")
    client = face.client(server.unix_url, max_connections=2)
    client.server_info()
    transport = client._transport
    transport.pending_undos += [steps.Undo([name], [b"abandoned"]) for name in (b"other", NAME.encode())]
    connection = transport.idle.pop()
    connection.fail(Broken("by another thread"))
    transport._flush_undos_over(connection)
    assert sorted(undo.names for undo in transport.pending_undos) == [[b"other"], [NAME.encode()]]
    assert not client.lock("barrier").locked()
    assert not probe.exists(NAME) and transport.pending_undos == []


@threads_only
def test_who_finds_the_last_idle_connection_taken_looks_again(
    face: Face, impl: str, proxy: FaultProxy, no_leaks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It shares a busy one. Another thread, which needs no mutex for it, is as fast twice."""
    client = face.client(proxy.url, max_connections=1)
    client.server_info()
    came: list[int] = []

    def popped(idle: list[Any]) -> Any:
        came.append(len(idle))
        raise IndexError

    def removed(idle: list[Any], connection: Any) -> Any:
        came.append(len(idle))
        idle.clear()
        raise ValueError

    monkeypatch.setattr(sync, "POP", popped)
    monkeypatch.setattr(sync, "REMOVE", removed)
    assert client._transport.drive(extension.inspect(Opcode.EXISTS, NAME.encode(), now)) == 0
    assert came == [1, 1] and proxy.accepted == 1


@threads_only
def test_a_debt_is_paid_by_one_thread(face: Face, impl: str, server: Server, probe: redis.Redis, no_leaks: Any) -> None:
    """Another pays as well, between one's taking a debt and its saying it, and between two of them."""
    client = face.client(server.unix_url, max_connections=2)
    client.server_info()
    transport = client._transport
    connection = transport.idle[0]
    real, said = connection.post, list[steps.Undo]()

    class Paying(Connection):
        def post(self, undo: steps.Undo) -> None:
            said.append(undo)
            transport._flush_undos_over(self)
            real(undo)

    transport.pending_undos += [steps.Undo([b"%d" % number], [b"abandoned"]) for number in range(4)]
    owed = list(transport.pending_undos)
    connection.__class__ = Paying
    transport._flush_undos_over(connection)
    assert said == owed and transport.pending_undos == []


@threads_only
def test_a_debt_that_a_dead_connection_cannot_pay_stays_once(face: Face, impl: str, server: Server) -> None:
    client = face.client(server.unix_url, max_connections=2)
    client.server_info()
    transport = client._transport
    transport.pending_undos += [steps.Undo([b"%d" % number], [b"abandoned"]) for number in range(4)]
    owed = set(transport.pending_undos)
    connection = transport.idle[0]
    connection.fail(Broken("by another thread"))
    for _ in range(3):
        transport._flush_undos_over(connection)
    assert len(transport.pending_undos) == 4 and set(transport.pending_undos) == owed
    assert sorted(len(undo.stale) for undo in transport.pending_undos) == [0, 1, 1, 1]
    transport.pending_undos.clear()


def test_what_another_thread_took_out_of_a_list_is_not_there() -> None:
    these = [1, 2]
    assert removed(these, 1) and not removed(these, 1) and these == [2]


# ------------------------------------------------------------------------------------------------- quiet for a while


class Later(asyncio.SelectorEventLoop):
    """An event loop whose time can be put forward."""

    later = 0.0

    def time(self) -> float:
        return super().time() + self.later


def test_a_quiet_time_before_a_command_counts_for_no_reply_timeout(
    impl: str, proxy: FaultProxy, probe: redis.Redis, no_leaks: Any
) -> None:
    """The watch that the command before it set goes off while it is under way: it was asked only just now."""

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
            assert await task is True and proxy.accepted == 2, "a reply that does not come is a timeout"
            await lock.release()

    with asyncio.Runner(loop_factory=Later) as runner:
        loop: Any = runner.get_loop()
        runner.run(body(loop))


def test_who_connects_before_a_failed_try_is_repeated_connects_for_it(
    impl: str, proxy: FaultProxy, probe: redis.Redis, no_leaks: Any
) -> None:
    """What is owed has a try of its own after each that failed; a second connection would be closed by nobody."""

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
            for call in (lock.acquire, client.server_info):  # the other one joins the first try for what is owed
                with pytest.raises(LookupError, match="the vault"):
                    await call()
            assert client._transport.pending_undos and client._transport._failures == 2, (
                "nothing is owed, so nothing is tried"
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
def nameless(proxy: FaultProxy) -> Iterator[None]:
    """Connections made meanwhile do not learn who they are, so nobody can end them on the server."""
    armed = proxy.arm(replace(b"-ERR not for you\r\n"), after=b"\r\nINFO\r\n", times=float("inf"))
    yield
    armed.disarm()


@two_servers
async def test_doubt_lasts_over_looks_until_the_own_token_turns_up(
    face: Face, proxy: FaultProxy, probe: redis.Redis, no_leaks: Any
) -> None:
    """The first look times out unread, the next one finds another holder; then the first is executed after all, as
    where the broken connection could not be ended: what the look after that finds is our own token, and so ours."""
    probe.set(NAME, "another")
    with nameless(proxy):
        client = face.client(proxy.url, reply_timeout=HASTY, max_connections=1)
        await face.get(client.server_info())
    lock = client.lock(NAME, timeout=3600, sleep=0.005, thread_local=False)
    first = proxy.arm(stall("request"), after=MARK, times=1)
    waiter = face.start(lock.acquire)
    await fired(face, first.wait)
    await waited(face, lambda: MARK in proxy.requests)  # over another connection: the first look is held back
    assert not killed(proxy.commands), "nobody knows whom to end"
    later = proxy.arm(stall("request"), after=lambda frame: MARK in frame and b"PTTL" not in frame, times=1)
    await fired(face, later.wait)
    assert not waiter.finished.is_set()
    probe.delete(NAME)
    first.resume()
    await waited(face, lambda: probe.exists(NAME))
    later.resume()
    assert await waiter.get() is True
    assert probe.get(NAME) == lock.lease.token
    left = probe.pttl(NAME) / 1000  # first: the lease must not outlast the key
    assert 0 < lock.lease.remaining <= left + 0.001
    await face.get(lock.release())
    assert not probe.exists(NAME)


async def waited(face: Face, holds: Callable[[], object]) -> None:
    """Return when it holds; AssertionError after 10 seconds."""
    end = now() + 10
    while not holds():
        assert now() < end
        if face.is_async:
            await asyncio.sleep(0.0005)


@pytest.mark.parametrize("restarted", [False, True], ids=["the same server", "restarted"])
async def test_a_broken_connection_is_ended_on_its_own_server_only(
    face: Face, start_server: Callable[..., Server], restarted: bool
) -> None:
    """Numbers of connections start anew with a server, and all of a unix socket have one address: there the number of
    what broke is somebody else's."""
    before, after = start_server(), start_server()
    for _ in range(30):
        RawClient(before.unix_url).socket.close()
    with FaultProxy(before.unix_url) as proxy:
        client = face.client(proxy.url, reply_timeout=PATIENT, max_connections=1)
        await face.get(client.server_info())
        proxy.upstream = after.unix_url if restarted else before.unix_url
        armed = proxy.arm(swallow(), after=MARK)
        lock = client.lock(NAME, timeout=60)
        assert await face.get(lock.acquire(blocking=False)) is True
        armed.wait()
        assert len(proxy.connections) == 2
        calls = killed(proxy.connections[1].commands)
        assert (calls == []) if restarted else (len(calls) == 1 and calls[0][2] == b"ID" and calls[0][4] == b"ADDR")
        await face.get(lock.release())
        await face.get(client.close())


def session(number: int, serial: int, run: bytes = b"", *, unix: bool = False) -> handshake.Session:
    address = b"/tmp/s:0" if unix else b"10.0.0.7:51234"
    return handshake.Session({}, frozenset(), b"%d" % number if number else b"", address, "", serial, run)


@pytest.mark.parametrize(
    ("broken", "current", "is_ended"),
    [
        (session(7, 1), session(8, 2), True),
        (session(7, 2), session(3, 1), True),  # the one that asks is older: the server lives as long at least
        (session(7, 1), session(7, 2), False),  # its own number: the server was restarted meanwhile
        (session(7, 1), session(3, 2), False),
        (session(99, 1), session(100, 2), True),  # numbers, not texts
        (session(100, 1), session(99, 2), False),
        (session(0, 1), session(8, 2), False),  # nobody knows who that was
        (session(7, 1), session(0, 2), True),  # nobody knows who this is: by number and address
        (session(7, 1, b"one"), session(8, 2, b"one"), True),
        (session(7, 1, b"one"), session(3, 2, b"one"), True),  # as after numbers that went round
        (session(7, 1, b"one"), session(8, 2, b"two"), False),  # others came first to the server that was restarted
        (session(7, 1, b"one", unix=True), session(8, 2, b"one", unix=True), True),
        (session(7, 1, b"one", unix=True), session(8, 2, b"two", unix=True), False),
        (session(7, 1, b"", unix=True), session(8, 2, b"two", unix=True), False),  # all there have one address
        (session(7, 1, b"one", unix=True), session(8, 2, b"", unix=True), False),
        (session(7, 1, b"one"), session(8, 2, b""), True),  # a port, which nobody else has at once
        (session(7, 1, b"", unix=True), session(8, 2, b"", unix=True), False),
    ],
)
def test_who_ends_whom(broken: handshake.Session, current: handshake.Session, is_ended: bool) -> None:
    call = (b"CLIENT", b"KILL", b"ID", broken.id, b"ADDR", broken.address)
    assert handshake.end(broken, current) == (call if is_ended else None)


def test_nobody_ends_himself() -> None:
    """What he left behind on this connection comes before what he says now."""
    mine = session(7, 1, b"one")
    assert handshake.end(mine, mine) is None


@threads_only
@pytest.mark.parametrize("operation", ["acquire", "acquire with", "locked"])
async def test_a_connection_that_is_just_failing_is_left_at_once(
    face: Face, server: Server, no_leaks: Any, operation: str
) -> None:
    """Another thread has found it broken and not yet thrown it away: it was stopped, or interrupted, before that."""
    client = face.client(server.unix_url, max_connections=1)
    lock = client.lock(NAME)
    await face.get(lock.locked())
    (failing,) = client._transport.connections
    client._transport.idle.clear()
    failing.error = ConnectionError("found by another thread")
    calls = {"acquire": lock.acquire, "acquire with": lambda: lock.acquire(blocking_timeout=PATIENT)}
    assert await face.get(calls.get(operation, lock.locked)()) is (operation != "locked")
    assert failing not in client._transport.connections and client._transport.idle == client._transport.connections
    if lock.lease is not None:
        await face.get(lock.release())


@threads_only
@two_servers
async def test_a_connection_for_messages_that_ends_is_missed_by_nobody(
    face: Face, server: Server, probe: redis.Redis, no_leaks: Any
) -> None:
    """Those that are busy are told from the others by counting; and who waits next has messages again."""
    client, holder = face.client(server.unix_url), face.client(server.unix_url).lock(NAME)
    transport = client._transport

    def listening() -> set[str]:
        return {each["id"] for each in probe.client_list(_type="pubsub")}

    async def cut() -> None:
        before = listening()
        probe.client_kill_filter(_type="pubsub")
        await until(face, lambda: not before & listening(), "the cut")

    async def take_turn() -> None:
        lock = client.lock(NAME)
        await face.get(lock.acquire())
        await face.get(lock.release())

    # so that none that listens is needed for other commands
    transport.idle += [transport._open_connection(object(), transport.settings.connect_timeout) for _ in range(3)]
    await face.get(holder.acquire())
    waiting = face.start(take_turn)
    await until(face, listening, "somebody who listens")
    broken = transport.push_connection
    await cut()
    await until(face, lambda: transport.push_connection not in (None, broken), "somebody who listens again")
    await face.get(holder.release())
    await waiting.get(PATIENT)
    assert transport.push_connection_lent == 1 and transport.push_connection not in transport.idle
    transport.push_connection.fail(ConnectionError("found by who leaves a queue"))
    assert transport.push_connection_lent == 0 and transport.connections == transport.idle


# ---------------------------------------------------------------------------------------- more threads than connections


@pytest.fixture
def hurried(request: pytest.FixtureRequest) -> None:
    """Threads take turns as often as they can."""
    interval = sys.getswitchinterval()
    request.addfinalizer(lambda: sys.setswitchinterval(interval))
    sys.setswitchinterval(1e-6)


def echo(words: list[bytes]) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(words[1]), words[1])


@threads_only
@pytest.mark.parametrize("limit", [1, 2])
@pytest.mark.parametrize("seed", range(4))
async def test_no_command_is_stranded_and_no_reply_goes_astray_in_a_crowd(
    face: Face, hurried: None, limit: int, seed: int
) -> None:
    """What is queued at any moment of another's sending and reading is sent by somebody: else its caller would get a
    timeout, and the connection be given up."""
    with FakeServer(handshake={"GET": echo}) as fake:
        client = face.client(fake.url, max_connections=limit, reply_timeout=PATIENT)
        await face.get(client.server_info())

        def work(number: int) -> int:
            dice = random.Random(f"{seed}/{number}")
            for count in range(500):
                key = b"%d:%d:" % (number, count) + b"x" * dice.choice((0, 0, 0, 50, 3000))
                assert client._transport.drive(extension.inspect(Opcode.GET, key, now)) == key
            return number

        assert await face.together([lambda n=n: work(n) for n in range(8)]) == list(range(8))
        assert fake.accepted <= limit and len(client._transport.idle) == fake.accepted
        asked = [words for words in fake.commands if words[0] == b"GET"]
        assert len(asked) == 8 * 500, "each command was sent once"
