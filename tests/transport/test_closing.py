"""Requests, undos and locks of a client that is closed: no key is left, and a lock can be released after closing.

What must never happen: a key that nobody will release, a release that is refused although it would succeed a moment
later, a connection or a task that stays.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from support.apis import Api
from support.child_client import NAME, QUEUE, fired, until
from support.faultproxy import FaultProxy, stall
from support.tls import Authority, TlsFront

import fastlock
from fastlock._protocol.steps import Sleep
from fastlock._protocol.undo import Undo
from fastlock._transport import aio_closing, closing, sync
from fastlock._transport.sync_connection import Connection
from fastlock._transport.undo_delivery import UndoDelivery
from fastlock._transport.writing import write_undo
from fastlock.embedded import Server

MARK = b"\r\nsku\r\n"
TOKEN = b"fl:" + b"0" * 32
pytestmark = pytest.mark.usefixtures("impl")
threads_only = pytest.mark.parametrize("api", ["threads"], indirect=True)
one_server = pytest.mark.parametrize("server", ["valkey"], indirect=True)
two_servers = pytest.mark.parametrize("server", ["valkey", "redis"], indirect=True)


# ----------------------------------------------------------------------------------------------------------- sockets


@pytest.fixture
def uncollected() -> Iterator[None]:
    """No garbage is collected: sockets left to the collector stay open."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def sockets() -> set[str]:
    """The sockets that this process has open."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing itself
            found.add(os.readlink(f"/proc/self/fd/{number}"))
    return {each for each in found if each.startswith("socket:")}


async def use(api: Api, url: str, **options: Any) -> None:
    """Two clients, one of which waits for the other; both are closed at the end."""
    client, other = fastlock.Client.from_url(url, **options), fastlock.Client.from_url(url, **options)
    lock = client.lock(NAME, thread_local=False)
    lock.acquire()
    waiting = api.start(lambda: other.lock(NAME, thread_local=False).acquire())
    await until(api, lambda: other.get_stats()["waits"], "the other waits")
    lock.release()
    await waiting.get()
    with pytest.raises(fastlock.LockError):
        lock.release()
    client.close()
    other.close()


@threads_only
@two_servers
async def test_no_socket_is_left_to_the_garbage_collector(
    api: Api, server: Server, probe: redis.Redis, uncollected: None
) -> None:
    before = sockets()
    await use(api, server.unix_url)
    await until(api, lambda: sockets() == before, "all sockets are closed")


@threads_only
async def test_no_socket_with_tls_is_left_to_the_garbage_collector(
    api: Api, server: Server, probe: redis.Redis, tmp_path: Path, uncollected: None
) -> None:
    """With TLS a read without data raises an error, which fastlock checks: a signal handler may have raised it."""
    authority = Authority(tmp_path, "localhost")
    with TlsFront(authority, server.path) as front:
        before = sockets()
        await use(api, f"rediss://localhost:{front.port}/0", ssl_ca_certs=authority.file)
        fastlock.Client.from_url(f"rediss://localhost:{front.port}/0", ssl_ca_certs=authority.file).server_info()
        await until(api, lambda: sockets() == before, "all sockets are closed")


@threads_only
async def test_an_error_leaves_no_socket_to_the_garbage_collector(
    api: Api, proxy: FaultProxy, uncollected: None
) -> None:
    """An error keeps the frames in which it was raised, and the frames keep the connection that broke."""
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


# ---------------------------------------------------------------------------------------------------------- undos


@one_server
async def test_undos_that_fail_on_closing_are_logged(
    api: Api, proxy: FaultProxy, caplog: pytest.LogCaptureFixture
) -> None:
    client = api.client(proxy.url)
    await api.get(client.server_info())
    client._transport.pending_undos.append(UndoDelivery(Undo([b"sku:1", b"sku:2"], [b"one", b"two"])))
    proxy.refuse()
    proxy.cut()
    await api.get(client.close())
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "'sku:1', 'sku:2' may stay locked until" in record.getMessage()
    assert proxy.url.removeprefix("unix://").partition("?")[0] in record.getMessage(), "the warning names the server"


@two_servers
async def test_a_connection_cut_during_closing_leaves_no_key(
    api: Api, proxy: FaultProxy, probe: redis.Redis, no_leaks: Any
) -> None:
    """An acquire without end, whose reply is held back when the client is closed, and never comes."""
    client = api.client(proxy.url, max_connections=1)
    await api.get(client.server_info())
    armed = proxy.arm(stall(), after=MARK, times=1)
    job = api.start(lambda: client.lock(NAME, timeout=None).acquire())
    await fired(api, armed.wait)
    await until(api, lambda: probe.exists(NAME), "the acquire is executed")
    closing = api.start(client.close)
    await until(api, lambda: client.closed, "the client is being closed")
    proxy.cut()
    await closing.get()
    with pytest.raises(fastlock.ClientClosedError):
        await job.get()
    assert not probe.exists(NAME)


@one_server
@pytest.mark.parametrize("api", ["asyncio"], indirect=True)
@pytest.mark.parametrize("ticks", range(4))
@pytest.mark.parametrize("kind", ["lock", "multi"])
async def test_an_acquire_whose_connection_broke_before_closing_leaves_no_key(
    api: Api, proxy: FaultProxy, probe: redis.Redis, no_leaks: Any, ticks: int, kind: str
) -> None:
    """Its task has not run again, or waits for another connection, when the client is closed."""
    client = api.client(proxy.url)
    lock = client.lock(NAME, timeout=None) if kind == "lock" else client.multi_lock([NAME, "other"], timeout=600)
    async with lock:  # the server knows the script from now on
        pass
    armed = proxy.arm(stall(), after=MARK, times=1)
    task = asyncio.ensure_future(lock.acquire())
    await fired(api, armed.wait)
    await until(api, lambda: probe.exists(NAME), "the acquire is executed")
    connection = client._transport.connection
    proxy.cut()
    while connection.error is None:
        await asyncio.sleep(0)
    for _ in range(ticks):
        await asyncio.sleep(0)
    await client.close()
    assert not probe.exists(NAME, "other") and client._transport.pending_undos == []
    with pytest.raises(fastlock.ClientClosedError):
        await task


@threads_only
async def test_an_undo_beside_closing_is_carried_out(
    api: Api, server: Server, probe: redis.Redis, no_leaks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread of the undo has found a live connection, and is stopped; the client is closed before it continues."""
    client = api.client(server.unix_url)
    client.server_info()
    probe.set(NAME, TOKEN)
    real, chosen, closed = Connection.post, threading.Event(), threading.Event()

    def post(connection: Connection, delivery: UndoDelivery) -> None:
        if delivery.undo.names and not chosen.is_set():
            chosen.set()
            assert closed.wait(20)
        real(connection, delivery)

    monkeypatch.setattr(Connection, "post", post)
    job = api.start(lambda: client._transport.undo(Undo([NAME.encode()], [TOKEN])))
    assert chosen.wait(20)
    client.close()
    closed.set()
    await job.get()
    assert not probe.exists(NAME) and client._transport.pending_undos == []


@two_servers
async def test_closing_retries_a_pending_undo_until_it_is_done(
    api: Api, server: Server, probe: redis.Redis, no_leaks: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The name has a waiter, so the undo takes a script, which the server has forgotten: the undo is sent again."""
    client = api.client(server.unix_url)
    await api.get(client.server_info())
    probe.set(NAME, TOKEN.replace(b":", b"+"))
    probe.script_flush()
    (client._transport.connection if api.is_async else client._transport.connections[0]).fail(EOFError("cut"))
    client._transport.pending_undos.append(UndoDelivery(Undo([NAME.encode()], [TOKEN])))
    await api.get(client.close())
    assert not probe.exists(NAME) and caplog.records == []


@one_server
async def test_undos_refused_on_closing_are_logged(
    api: Api, server: Server, probe: redis.Redis, server_config: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The server has lost its replicas: nobody will retry the undo later."""
    client = api.client(server.unix_url)
    await api.get(client.server_info())
    probe.set(NAME, TOKEN)
    server_config(min_replicas_to_write="1")
    client._transport.undo(Undo([NAME.encode()], [TOKEN]))
    await api.get(client.close())
    server_config(min_replicas_to_write="0")
    (record,) = caplog.records
    assert "'sku' may stay locked until" in record.getMessage() and probe.delete(NAME) == 1


@threads_only
async def test_two_threads_that_fail_a_connection_return_its_undo_once(
    api: Api, server: Server, probe: redis.Redis, no_leaks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first thread is stopped in `fail`; a third thread, which sends the pending undos, must not lose the undo."""
    client = api.client(server.unix_url, max_connections=2)
    client.server_info()
    transport = client._transport
    broken = transport.connections[0]
    transport.idle.clear()
    transport.idle.append(transport._get_connection()[0])
    probe.set(NAME, TOKEN)
    write_undo(broken, UndoDelivery(Undo([NAME.encode()], [TOKEN])))
    first_in_fail, third_sends, go_on = threading.Event(), threading.Event(), threading.Event()
    outlived, calls = UndoDelivery.outlived_by, UndoDelivery.calls

    def stopped(delivery: UndoDelivery, session: Any) -> None:
        if not first_in_fail.is_set():
            first_in_fail.set()
            go_on.wait(20)
        outlived(delivery, session)

    def slow(delivery: UndoDelivery, carrier: Any) -> Any:
        if delivery.undo.names and not third_sends.is_set():
            third_sends.set()
            go_on.wait(20)
            first.finished.wait(20)
        return calls(delivery, carrier)

    monkeypatch.setattr(UndoDelivery, "outlived_by", stopped)
    monkeypatch.setattr(UndoDelivery, "calls", slow)
    first = api.start(lambda: broken.fail(EOFError("first")))
    assert first_in_fail.wait(20)
    second = api.start(lambda: broken.fail(EOFError("second")))
    second.finished.wait(0.2)  # without the fix it has ended by now; with it, it waits for the first
    third = api.start(lambda: client.lock("other", thread_local=False).acquire(blocking_timeout=20))
    third_sends.wait(0.2)
    go_on.set()
    for job in (first, second, third):
        await job.get()
    monkeypatch.setattr(UndoDelivery, "calls", calls)
    client.close()
    assert not probe.exists(NAME) and transport.pending_undos == [] and probe.delete("other") == 1


@pytest.mark.parametrize("api", ["asyncio"], indirect=True)
async def test_closing_waits_for_a_connection_that_is_being_made(api: Api, proxy: FaultProxy, no_leaks: Any) -> None:
    """The connection's task and socket would be left to a loop that may be closed by then."""
    client = api.client(proxy.url)
    await client.server_info()
    proxy.cut()
    await until(api, lambda: client._transport.connection is None, "the connection is cut")
    armed = proxy.arm(stall(), new_only=True)
    job = api.start(client.lock(NAME).acquire)
    await fired(api, armed.wait)
    await client.close()
    assert not [task for task in asyncio.all_tasks() if "connect" in task.get_name()]
    with pytest.raises(fastlock.ClientClosedError):
        await job.get()


# ------------------------------------------------------------------------------------------------------ held locks


@pytest.mark.parametrize("api", ["asyncio"], indirect=True)
async def test_two_closings_at_once_end_as_one_does(api: Api, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both wait for the same waiter to leave the server's queue; when it has, neither waits for its time to be over."""
    monkeypatch.setattr(aio_closing, "CLOSE_SECONDS", 3600.0)
    others, client = api.client(server.unix_url), api.client(server.unix_url)
    async with others.lock("sku", timeout=30):
        waiter = asyncio.create_task(client.lock("sku", timeout=30).acquire())
        while not client._transport.queues.by_entry:
            await asyncio.sleep(0)
        await asyncio.gather(client.close(), client.close())
        with pytest.raises(fastlock.ClientClosedError):
            await waiter


@threads_only
async def test_an_interrupt_at_exit_costs_no_client_its_undos(
    api: Api, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    clients = [api.client(server.unix_url) for _ in range(3)]
    mine = [client._transport for client in clients]
    monkeypatch.setattr(closing, "TRANSPORTS", mine)
    flushed: list[Any] = []

    def flush(transport: Any, until: Any = None) -> None:
        flushed.append(transport)
        if len(flushed) == 1:
            raise SystemExit("by a signal handler")

    monkeypatch.setattr(sync.SyncTransport, "flush_pending_undos", flush)
    with pytest.raises(SystemExit):
        closing.end_all()
    assert flushed == [mine[0], *mine]


@two_servers
@pytest.mark.parametrize("side", ["request", "reply"])
async def test_a_release_under_way_on_closing_succeeds(
    api: Api, proxy: FaultProxy, probe: redis.Redis, no_leaks: Any, side: Any
) -> None:
    """The request of the release, or its reply, is held back for longer than closing waits."""
    client = api.client(proxy.url, max_connections=1)
    lock = client.lock(NAME, timeout=None, thread_local=False)
    await api.get(lock.acquire())
    armed = proxy.arm(stall(side), after=MARK, times=1)
    job = api.start(lock.release)
    await fired(api, armed.wait)
    await api.get(client.close())
    await job.get()
    assert not probe.exists(NAME) and lock.lease is None


@two_servers
async def test_a_release_after_closing_is_tried_again(
    api: Api, proxy: FaultProxy, probe: redis.Redis, no_leaks: Any
) -> None:
    """The server ends new connections at first, as a proxy does whose server restarts."""
    client = api.client(proxy.url)
    lock = client.lock(NAME, timeout=None, thread_local=False)
    await api.get(lock.acquire())
    await api.get(client.close())
    proxy.hanging_up, before = True, proxy.accepted
    job = api.start(lock.release)
    await fired(api, lambda: proxy.wait_for(lambda proxy: proxy.accepted >= before + 3))
    proxy.hanging_up = False
    await job.get()
    assert not probe.exists(NAME) and lock.lease is None


@one_server
@pytest.mark.parametrize("api", ["asyncio"], indirect=True)
@pytest.mark.parametrize("what", ["lock", "multi", "many"])
async def test_closing_waits_for_a_release_that_is_tried_again(
    api: Api, proxy: FaultProxy, probe: redis.Redis, no_leaks: Any, what: str
) -> None:
    client = api.client(proxy.url)
    names = [NAME, "other"]
    lock = client.lock(NAME, timeout=None) if what == "lock" else client.multi_lock(names, timeout=600)
    leases = await client.acquire_many(names, timeout=600) if what == "many" else []
    if not leases:
        await lock.acquire()
    proxy.hanging_up, before = True, proxy.accepted
    proxy.cut()
    task = asyncio.ensure_future(client.release_many(leases) if leases else lock.release())
    await fired(api, lambda: proxy.wait_for(lambda proxy: proxy.accepted >= before + 3))
    closing = asyncio.ensure_future(client.close())
    await until(api, lambda: client.closed, "the client is being closed")
    proxy.hanging_up = False
    await closing
    assert not probe.exists(*names)
    await task


@one_server
async def test_a_closed_client_pauses_between_two_tries_of_a_release(api: Api, server: Server) -> None:
    client = api.client(server.unix_url)
    await api.get(client.server_info())
    await api.get(client.close())
    began = time.monotonic()
    await api.get(client._transport._sleep(Sleep(0.01, allowed_after_close=True)))
    assert time.monotonic() - began >= 0.01


@pytest.mark.parametrize("api", ["asyncio"], indirect=True)
async def test_a_cancelled_release_after_closing_is_carried_out(
    api: Api, proxy: FaultProxy, probe: redis.Redis, no_leaks: Any
) -> None:
    """The caller is cancelled while the reply stays away, for longer than close waits for the extra connection."""
    client = api.client(proxy.url)
    lock = client.lock(NAME, timeout=None, thread_local=False)
    await lock.acquire()
    await client.close()
    armed = proxy.arm(stall("request"), after=MARK, times=1)
    task = asyncio.ensure_future(lock.release())
    await fired(api, armed.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not probe.exists(NAME) and client._transport.pending_undos == []


@two_servers
@pytest.mark.parametrize("api", ["asyncio"], indirect=True)
@pytest.mark.parametrize("again", ["as its loop ends", "while the loop goes on"])
@pytest.mark.parametrize("what", ["release", "with", "many", "multi"])
def test_a_release_after_closing_that_is_cancelled_twice_is_carried_out(
    api: Api, server: Server, probe: redis.Redis, no_leaks: Any, what: str, again: str
) -> None:
    """The second time comes while what the first one left is being delivered."""

    async def cancelled(steps: int, pause: int) -> None:
        client = api.client(server.unix_url)
        settings = {"timeout": None, "thread_local": False}
        lock = client.multi_lock([NAME, "b"], **settings) if what == "multi" else client.lock(NAME, **settings)
        await lock.acquire()
        await client.close()
        task = asyncio.ensure_future(release(client, lock))
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        for _ in range(pause):
            await asyncio.sleep(0)
        if again == "as its loop ends":
            return
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await until(api, lambda: not probe.exists(NAME, "b"), "it is released")

    async def release(client: Any, lock: Any) -> None:
        if what == "many":
            await client.release_many([lock.lease])
        else:
            await (lock.__aexit__(None, None, None) if what == "with" else lock.release())

    for steps in range(1, 8):
        for pause in range(1, 8):
            asyncio.run(cancelled(steps, pause))
            assert not probe.exists(NAME, "b"), (steps, pause)


@pytest.mark.parametrize("api", ["asyncio"], indirect=True)
async def test_a_cancelled_release_over_the_connection_of_another_is_carried_out(
    api: Api, proxy: FaultProxy, probe: redis.Redis, no_leaks: Any
) -> None:
    """The other release of the closed client has opened it, and ends it although what the cancelled one leaves there
    was not answered."""
    client = api.client(proxy.url)
    lock, other = (client.lock(name, timeout=None, thread_local=False) for name in (NAME, "other"))
    await lock.acquire()
    await other.acquire()
    await client.close()
    proxy.arm(stall("request"), after=MARK, times=1)
    first = asyncio.ensure_future(other.release())
    while (connection := client._transport.connection) is None or not connection.stream.pending:
        await asyncio.sleep(0)
    second = asyncio.ensure_future(lock.release())
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.wait([first, second])
    assert first.result() is None and second.cancelled()
    await until(api, lambda: not probe.exists(NAME, "other"), "both are released")


@pytest.mark.parametrize("api", ["asyncio"], indirect=True)
@pytest.mark.parametrize("closed", ["beside", "before"])
@pytest.mark.parametrize("what", ["release", "with", "many"])
async def test_a_release_to_a_remote_waiter_survives_the_loops_end(
    api: Api, server: Server, probe: redis.Redis, no_leaks: Any, closed: str, what: str
) -> None:
    """The release takes two commands. As an event loop ends, all tasks that are left are cancelled, at any moment."""
    for iterations in range(1, 12):
        client, other = api.client(server.unix_url), api.client(server.unix_url)
        lock, waiting = client.lock(NAME, timeout=None, thread_local=False), other.lock(NAME, thread_local=False)
        await lock.acquire()

        async def release(client: Any = client, lock: Any = lock) -> None:
            if what == "many":
                await client.release_many([lock.lease])
            else:
                await (lock.release() if what == "release" else lock.__aexit__(None, None, None))

        job = api.start(lambda waiting=waiting: waiting.acquire(blocking_timeout=20))
        await until(api, lambda: probe.zcard(QUEUE) == 1, "the other waits")
        if closed == "before":
            await client.close()
        task = asyncio.ensure_future(release())
        for _ in range(iterations - (closed == "beside")):  # a task can be cancelled before it has begun
            await asyncio.sleep(0)
        if closed == "beside":
            await client.close()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert await job.get() is True
        await waiting.release()
        await other.close()


async def release_after_closing(api: Api, client: Any, server: Server, probe: redis.Redis) -> None:
    """Acquire, and close the client while another one waits; the lock is released, and the other client gets it."""
    lock = client.lock(NAME, timeout=None, thread_local=False)
    await api.get(lock.acquire())
    other = api.client(server.unix_url)
    waiting = other.lock(NAME, thread_local=False)
    job = api.start(lambda: waiting.acquire(blocking_timeout=20))
    await until(api, lambda: probe.zcard(QUEUE) == 1, "the other waits")
    await api.get(client.close())
    probe.script_flush()
    await api.get(lock.release())
    assert await job.get() is True and lock.lease is None
    await api.get(waiting.release())
    await api.get(other.close())


async def test_a_release_after_closing_reloads_forgotten_scripts(
    api: Api, server: Server, probe: redis.Redis, no_leaks: Any
) -> None:
    await release_after_closing(api, api.client(server.unix_url), server, probe)


@pytest.mark.parametrize("server", ["valkey"], indirect=True)
async def test_a_release_after_closing_by_a_user_without_scripts(
    api: Api, server: Server, probe: redis.Redis, no_leaks: Any
) -> None:
    """The token is deleted in plain or contended form; the waiter finds out when it rechecks."""
    rights = "+set +get +delifeq +pttl +exists +command|info +client|info +client|kill +info +client|setinfo"
    probe.execute_command("ACL", "SETUSER", "plain", "reset", "on", ">word", "~*", *rights.split())
    try:
        await release_after_closing(api, api.client(f"unix://plain:word@{server.path}"), server, probe)
    finally:
        probe.execute_command("ACL", "DELUSER", "plain")
