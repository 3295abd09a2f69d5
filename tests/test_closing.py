"""What is under way, owed or held when a client is closed: no key is left, and who holds a lock can let go of it.

Never: a key that nobody will release, a release that is refused what a moment later it would be granted, a connection
or a task that stays.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from support.child_client import NAME, QUEUE, fired, until
from support.faces import Face
from support.faultproxy import FaultProxy, stall
from support.tls import Authority, TlsFront

import fastlock
from fastlock._protocol import steps
from fastlock._transport.sync_connection import Connection, write_request
from fastlock.embedded import Server

MARK = b"\r\nsku\r\n"
TOKEN = b"fl:" + b"0" * 32
pytestmark = pytest.mark.usefixtures("impl")
threads_only = pytest.mark.parametrize("face", ["threads"], indirect=True)
two_servers = pytest.mark.parametrize("server", ["valkey", "redis"], indirect=True)


# -------------------------------------------------------------------------------------------------------------- left


@pytest.fixture
def uncollected() -> Iterator[None]:
    """No garbage is collected: what would be left to that is still there."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def sockets() -> set[str]:
    """Those that this process has open."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # of the listing itself
            found.add(os.readlink(f"/proc/self/fd/{number}"))
    return {each for each in found if each.startswith("socket:")}


async def use(face: Face, url: str, **options: Any) -> None:
    """Two clients, one of which waits for the other, and is closed."""
    client, other = fastlock.Client.from_url(url, **options), fastlock.Client.from_url(url, **options)
    lock = client.lock(NAME, thread_local=False)
    lock.acquire()
    waiting = face.start(lambda: other.lock(NAME, thread_local=False).acquire())
    await until(face, lambda: other.get_stats()["waits"], "it waits")
    lock.release()
    await waiting.get()
    with pytest.raises(fastlock.LockError):
        lock.release()
    client.close()
    other.close()


@threads_only
@two_servers
async def test_no_socket_is_left_to_the_garbage_collector(
    face: Face, server: Server, probe: redis.Redis, uncollected: None
) -> None:
    before = sockets()
    await use(face, server.unix_url)
    await until(face, lambda: sockets() == before, "all are closed")


@threads_only
async def test_no_socket_with_tls_is_left_to_the_garbage_collector(
    face: Face, server: Server, probe: redis.Redis, tmp_path: Path, uncollected: None
) -> None:
    """Each read that finds nothing yet raises an error there, of which it is asked whether a handler raised it."""
    authority = Authority(tmp_path, "localhost")
    with TlsFront(authority, server.path) as front:
        before = sockets()
        await use(face, f"rediss://localhost:{front.port}/0", ssl_ca_certs=authority.file)
        fastlock.Client.from_url(f"rediss://localhost:{front.port}/0", ssl_ca_certs=authority.file).server_info()
        await until(face, lambda: sockets() == before, "all are closed")


@threads_only
async def test_no_socket_is_left_to_the_garbage_collector_by_an_error(
    face: Face, proxy: FaultProxy, uncollected: None
) -> None:
    """It keeps the frames in which it was raised, and they the connection that broke."""
    client = fastlock.Client.from_url(proxy.url, reply_timeout=0.1)
    lock = client.lock(NAME)
    lock.acquire()
    own = os.readlink(f"/proc/self/fd/{client._transport.connections[0].sock.fileno()}")
    assert own in sockets()
    proxy.refuse()
    proxy.cut()
    with pytest.raises(redis.exceptions.ConnectionError):
        lock.release()
    assert own not in sockets()


# -------------------------------------------------------------------------------------------------------------- owed


async def test_what_cannot_be_undone_as_its_client_closes_is_told(
    face: Face, proxy: FaultProxy, caplog: pytest.LogCaptureFixture
) -> None:
    client = face.client(proxy.url)
    await face.get(client.server_info())
    client._transport.pending_undos.append(steps.Undo([b"sku:1", b"sku:2"], [b"one", b"two"]))
    proxy.refuse()
    proxy.cut()
    await face.get(client.close())
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "under b'sku:1', b'sku:2' stays until" in record.getMessage()
    assert proxy.url.removeprefix("unix://").partition("?")[0] in record.getMessage(), "of which server"


@two_servers
async def test_what_breaks_while_a_client_is_closed_leaves_no_key(
    face: Face, proxy: FaultProxy, probe: redis.Redis, no_leaks: Any
) -> None:
    """An acquire without end, whose reply is held back when the client is closed, and never comes."""
    client = face.client(proxy.url, max_connections=1)
    await face.get(client.server_info())
    armed = proxy.arm(stall(), after=MARK, times=1)
    job = face.start(lambda: client.lock(NAME, timeout=None).acquire())
    await fired(face, armed.wait)
    await until(face, lambda: probe.exists(NAME), "it is executed")
    closing = face.start(client.close)
    await until(face, lambda: client.closed, "it is being closed")
    proxy.cut()
    await closing.get()
    with pytest.raises(fastlock.ClientClosedError):
        await job.get()
    assert not probe.exists(NAME)


@threads_only
async def test_what_is_undone_while_another_thread_closes_the_client_is_undone(
    face: Face, server: Server, probe: redis.Redis, no_leaks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread has found a connection that lives, and is stopped; the client is closed before it goes on."""
    client = face.client(server.unix_url)
    client.server_info()
    probe.set(NAME, TOKEN)
    real, chosen, closed = Connection.post, threading.Event(), threading.Event()

    def post(connection: Connection, undo: steps.Undo) -> None:
        if undo.names and not chosen.is_set():
            chosen.set()
            assert closed.wait(20)
        real(connection, undo)

    monkeypatch.setattr(Connection, "post", post)
    job = face.start(lambda: client._transport.undo(steps.Undo([NAME.encode()], [TOKEN])))
    assert chosen.wait(20)
    client.close()
    closed.set()
    await job.get()
    assert not probe.exists(NAME) and client._transport.pending_undos == []


@two_servers
async def test_what_is_owed_is_said_until_it_is_done(
    face: Face, server: Server, probe: redis.Redis, no_leaks: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Somebody waits for the name, so it takes a script, which the server has forgotten: it is sent once more."""
    client = face.client(server.unix_url)
    await face.get(client.server_info())
    probe.set(NAME, TOKEN.replace(b":", b"+"))
    probe.script_flush()
    (client._transport.connection if face.is_async else client._transport.connections[0]).fail(EOFError("cut"))
    client._transport.pending_undos.append(steps.Undo([NAME.encode()], [TOKEN]))
    await face.get(client.close())
    assert not probe.exists(NAME) and caplog.records == []


async def test_what_the_server_refuses_to_undo_as_its_client_closes_is_told(
    face: Face, server: Server, probe: redis.Redis, server_config: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """It has lost its replicas: what would be said again a moment later is said by nobody."""
    client = face.client(server.unix_url)
    await face.get(client.server_info())
    probe.set(NAME, TOKEN)
    server_config(min_replicas_to_write="1")
    client._transport.undo(steps.Undo([NAME.encode()], [TOKEN]))
    await face.get(client.close())
    server_config(min_replicas_to_write="0")
    (record,) = caplog.records
    assert "under b'sku' stays until" in record.getMessage() and probe.delete(NAME) == 1


@threads_only
async def test_two_threads_that_find_a_connection_broken_give_back_what_was_owed_on_it_once(
    face: Face, server: Server, probe: redis.Redis, no_leaks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first is stopped in it; a third thread, which says what is owed, must not have it taken away."""
    client = face.client(server.unix_url, max_connections=2)
    client.server_info()
    transport = client._transport
    broken = transport.connections[0]
    transport.idle.clear()
    transport.idle.append(transport._get_connection()[0])
    probe.set(NAME, TOKEN)
    undo = steps.Undo([NAME.encode()], [TOKEN])
    undo.connection = broken
    write_request(broken, undo, steps.UndoReply(undo))
    finding, saying, go_on = threading.Event(), threading.Event(), threading.Event()
    outlived, calls = steps.Undo.outlived_by, vars(steps.Undo)["calls"]

    def stopped(undo: steps.Undo, session: Any) -> None:
        if not finding.is_set():
            finding.set()
            go_on.wait(20)
        outlived(undo, session)

    def slow(undo: steps.Undo) -> Any:
        if undo.names and not saying.is_set():
            saying.set()
            go_on.wait(20)
            first.finished.wait(20)
        return calls.fget(undo)

    monkeypatch.setattr(steps.Undo, "outlived_by", stopped)
    monkeypatch.setattr(steps.Undo, "calls", property(slow))
    first = face.start(lambda: broken.fail(EOFError("first")))
    assert finding.wait(20)
    second = face.start(lambda: broken.fail(EOFError("second")))
    second.finished.wait(0.2)  # as it was, it is over by now; now it waits for the first
    third = face.start(lambda: client.lock("other", thread_local=False).acquire(blocking_timeout=20))
    saying.wait(0.2)
    go_on.set()
    for job in (first, second, third):
        await job.get()
    monkeypatch.setattr(steps.Undo, "calls", calls)
    client.close()
    assert not probe.exists(NAME) and transport.pending_undos == [] and probe.delete("other") == 1


@pytest.mark.parametrize("face", ["asyncio"], indirect=True)
async def test_closing_waits_for_the_end_of_a_connection_that_is_being_made(
    face: Face, proxy: FaultProxy, no_leaks: Any
) -> None:
    """Its task, and its socket, would be left to a loop that may be closed by then."""
    client = face.client(proxy.url)
    await client.server_info()
    proxy.cut()
    await until(face, lambda: client._transport.connection is None, "it is cut")
    armed = proxy.arm(stall(), new_only=True)
    job = face.start(client.lock(NAME).acquire)
    await fired(face, armed.wait)
    await client.close()
    assert not [task for task in asyncio.all_tasks() if "connect" in task.get_name()]
    with pytest.raises(fastlock.ClientClosedError):
        await job.get()


# -------------------------------------------------------------------------------------------------------------- held


@two_servers
@pytest.mark.parametrize("side", ["request", "reply"])
async def test_a_release_under_way_as_its_client_closes_is_a_release(
    face: Face, proxy: FaultProxy, probe: redis.Redis, no_leaks: Any, side: Any
) -> None:
    """What it asked, or the reply, is held back for longer than closing waits."""
    client = face.client(proxy.url, max_connections=1)
    lock = client.lock(NAME, timeout=None, thread_local=False)
    await face.get(lock.acquire())
    armed = proxy.arm(stall(side), after=MARK, times=1)
    job = face.start(lock.release)
    await fired(face, armed.wait)
    await face.get(client.close())
    await job.get()
    assert not probe.exists(NAME) and lock.lease is None


@pytest.mark.parametrize("face", ["asyncio"], indirect=True)
async def test_a_release_after_closing_that_is_given_up_is_carried_out(
    face: Face, proxy: FaultProxy, probe: redis.Redis, no_leaks: Any
) -> None:
    """Its caller is cancelled while the reply stays away, longer than the connection made for it is waited for."""
    client = face.client(proxy.url)
    lock = client.lock(NAME, timeout=None, thread_local=False)
    await lock.acquire()
    await client.close()
    armed = proxy.arm(stall("request"), after=MARK, times=1)
    task = asyncio.ensure_future(lock.release())
    await fired(face, armed.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not probe.exists(NAME) and client._transport.pending_undos == []


@pytest.mark.parametrize("face", ["asyncio"], indirect=True)
@pytest.mark.parametrize("closed", ["beside", "before"])
@pytest.mark.parametrize("what", ["release", "with", "many"])
async def test_a_release_to_who_waits_elsewhere_as_client_and_loop_end_is_carried_out(
    face: Face, server: Server, probe: redis.Redis, no_leaks: Any, closed: str, what: str
) -> None:
    """It takes two commands. As an event loop ends, all tasks are cancelled that are there still, at any moment."""
    for iterations in range(1, 12):
        client, other = face.client(server.unix_url), face.client(server.unix_url)
        lock, waiting = client.lock(NAME, timeout=None, thread_local=False), other.lock(NAME, thread_local=False)
        await lock.acquire()

        async def let_go(client: Any = client, lock: Any = lock) -> None:
            if what == "many":
                await client.release_many([lock.lease])
            else:
                await (lock.release() if what == "release" else lock.__aexit__(None, None, None))

        job = face.start(lambda waiting=waiting: waiting.acquire(blocking_timeout=20))
        await until(face, lambda: probe.zcard(QUEUE) == 1, "it waits")
        if closed == "before":
            await client.close()
        task = asyncio.ensure_future(let_go())
        for _ in range(iterations - (closed == "beside")):  # a task that has not begun can be cancelled before it does
            await asyncio.sleep(0)
        if closed == "beside":
            await client.close()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert await job.get() is True
        await waiting.release()
        await other.close()


async def lets_go(face: Face, client: Any, server: Server, probe: redis.Redis) -> None:
    """Acquire, and close the client while another one waits; the lock is let go of, and the other one has it."""
    lock = client.lock(NAME, timeout=None, thread_local=False)
    await face.get(lock.acquire())
    other = face.client(server.unix_url)
    waiting = other.lock(NAME, thread_local=False)
    job = face.start(lambda: waiting.acquire(blocking_timeout=20))
    await until(face, lambda: probe.zcard(QUEUE) == 1, "it waits")
    await face.get(client.close())
    probe.script_flush()
    await face.get(lock.release())
    assert await job.get() is True and lock.lease is None
    await face.get(waiting.release())
    await face.get(other.close())


async def test_a_lock_is_let_go_of_after_closing_though_the_server_has_forgotten_the_script(
    face: Face, server: Server, probe: redis.Redis, no_leaks: Any
) -> None:
    await lets_go(face, face.client(server.unix_url), server, probe)


@pytest.mark.parametrize("server", ["valkey"], indirect=True)
async def test_a_lock_is_let_go_of_after_closing_by_a_user_who_may_run_no_scripts(
    face: Face, server: Server, probe: redis.Redis, no_leaks: Any
) -> None:
    """In whichever form its token stands there; who waits finds out when it looks."""
    rights = "+set +get +delifeq +pttl +exists +command|info +client|info +client|kill +info +client|setinfo"
    probe.execute_command("ACL", "SETUSER", "plain", "reset", "on", ">word", "~*", *rights.split())
    try:
        await lets_go(face, face.client(f"unix://plain:word@{server.path}"), server, probe)
    finally:
        probe.execute_command("ACL", "DELUSER", "plain")
