"""What a client that ends delivers, however it ends: closed by several at once, cancelled or interrupted in that,
dropped, or with its process. Whoever ends it returns when that is done, in the time that is documented, and says what
is left.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from support.apis import Api
from support.child_client import NAME, ROOT, SOON, until
from support.faultproxy import FaultProxy, stall

import fastlock
import fastlock.asyncio
from fastlock import _native
from fastlock._protocol.lease import now
from fastlock._protocol.release import Release
from fastlock._protocol.undo import Undo
from fastlock._stream_errors import Broken
from fastlock._transport import aio_closing, base, closing, sync
from fastlock._transport.aio_connection import AsyncConnection
from fastlock._transport.sync_connection import Connection
from fastlock._transport.undo_delivery import UndoDelivery
from fastlock._transport.writing import CLOSE_SECONDS
from fastlock.embedded import Server

pytestmark = [pytest.mark.usefixtures("impl"), pytest.mark.parametrize("server", ["valkey"], indirect=True)]
threads_only = pytest.mark.parametrize("api", ["threads"], indirect=True)
tasks_only = pytest.mark.parametrize("api", ["asyncio"], indirect=True)
LEFT = "'sku' may stay locked until the lease ends"


async def released(api: Api, proxy: FaultProxy, client: Any) -> Any:
    """A release that the server does not get, and for which nobody waits; returns what holds it up."""
    lock = client.lock(NAME, timeout=600)
    await api.enter(lock)
    armed = proxy.arm(stall("request"), command="EVALSHA", times=1)
    await api.leave(lock)
    await until(api, lambda: armed.fired, "the release")
    return armed


@pytest.fixture
def drains(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Until when answers are read over each connection that ends; what is waited for otherwise takes no time."""
    ends: list[float] = []

    def noting(drain: Callable[[Any, float], Any]) -> Callable[[Any, float], Any]:
        def drained(connection: Any, end: float) -> Any:
            ends.append(end)
            return drain(connection, end)

        return drained

    for kind in (Connection, AsyncConnection):
        monkeypatch.setattr(kind, "drain", noting(kind.drain))
    for module in (base, closing, aio_closing):
        monkeypatch.setattr(module, "CLOSE_SECONDS", 0.01)
    monkeypatch.setattr(closing, "SHORTEST", 0.01)
    return ends


async def test_whoever_closes_returns_when_all_is_delivered(api: Api, proxy: FaultProxy, probe: redis.Redis) -> None:
    client = api.client(proxy.url, confirm_release=False)
    await released(api, proxy, client)

    async def close() -> int:
        await api.get(client.close())
        return int(probe.exists(NAME))

    first = api.start(close)
    await until(api, lambda: client._transport.closed, "it closes")
    again = proxy.arm(stall("request"), command="EVALSHA", times=1)
    proxy.cut()
    await until(api, lambda: again.fired, "the release is sent over a connection for it alone")
    second, later = api.start(close), threading.Timer(0.1, again.resume)  # by then the second had returned
    later.start()
    assert [await first.get(SOON), await second.get(SOON)] == [0, 0]


async def test_closing_takes_as_long_as_a_release_that_waits(
    api: Api, proxy: FaultProxy, probe: redis.Redis, drains: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    """Not once more as long for another connection."""
    client = api.client(proxy.url, confirm_release=False, reply_timeout=2)
    await released(api, proxy, client)
    proxy.arm(stall("request"), command="EVALSHA")
    begun = now()
    await api.get(client.close())
    assert len(drains) == 2 and drains[0] < begun + 1.9 < drains[1] < begun + 2.4
    assert LEFT in caplog.text and not client._transport.unconfirmed
    probe.delete(NAME)


@threads_only
@pytest.mark.parametrize("interrupted", [False, True])
async def test_clients_share_the_time_that_their_process_has_to_end(
    api: Api,
    proxy: FaultProxy,
    probe: redis.Redis,
    drains: list[float],
    monkeypatch: pytest.MonkeyPatch,
    interrupted: bool,
) -> None:
    """Also where the user interrupts it."""
    clients = [api.client(proxy.url, confirm_release=False, reply_timeout=0.5) for _ in range(4)]
    locks = [client.lock(f"{number}") for number, client in enumerate(clients)]
    for lock in locks:
        await api.enter(lock)
    proxy.arm(stall("request"), command="EVALSHA")
    for lock in locks:
        await api.leave(lock)
    deliver, left = closing.SyncClosing.deliver_at_exit, [*range(interrupted)]

    def delivered(transport: Any, *until: float) -> None:
        deliver(transport, *until)
        if left:
            left.clear()
            raise KeyboardInterrupt

    monkeypatch.setattr(closing.SyncClosing, "deliver_at_exit", delivered)
    monkeypatch.setattr(closing, "TRANSPORTS", [client._transport for client in clients])
    begun = now()
    if interrupted:
        with pytest.raises(KeyboardInterrupt):
            closing.end_all()
    else:
        closing.end_all()
    assert begun + 0.4 < max(drains) < begun + 0.9
    probe.flushdb()


@threads_only
async def test_what_an_interrupted_close_leaves_is_delivered_with_the_process(
    api: Api, proxy: FaultProxy, probe: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = api.client(proxy.url, confirm_release=False)
    armed = await released(api, proxy, client)
    with monkeypatch.context() as patch:
        patch.setattr(Connection, "drain", lambda *_: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            client.close()
    proxy.refuse()
    proxy.cut()
    assert armed.fired and probe.exists(NAME)
    with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patch:
        patch.setattr(closing, "backoff", lambda _: signal.raise_signal(signal.SIGINT))
        client.close()
    proxy.admit()
    monkeypatch.setattr(closing, "TRANSPORTS", [client._transport])
    closing.end_all()
    assert not probe.exists(NAME)


@tasks_only
@pytest.mark.parametrize("drops", [False, True])
async def test_who_cancels_a_close_has_it_delivered_all_the_same(
    api: Api, proxy: FaultProxy, probe: redis.Redis, drops: bool
) -> None:
    client = fastlock.asyncio.Client.from_url(proxy.url, confirm_release=False)
    armed = await released(api, proxy, client)
    closing = asyncio.create_task(client.close())
    await until(api, lambda: client._transport.closed, "it closes")
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert armed.fired and probe.exists(NAME)
    if drops:
        del client, closing
        gc.collect()
    else:
        again = asyncio.create_task(client.close())
    proxy.cut()
    await until(api, lambda: not probe.exists(NAME) and not aio_closing.UNFINISHED, "the release")
    if not drops:
        await again


@tasks_only
async def test_a_close_that_is_cancelled_as_its_loop_ends_is_completed(
    api: Api, proxy: FaultProxy, probe: redis.Redis
) -> None:
    async def main() -> None:
        client = fastlock.asyncio.Client.from_url(proxy.url, confirm_release=False)
        armed = await released(api, proxy, client)
        closing = asyncio.create_task(client.close())
        await until(api, lambda: client._transport.closed, "it closes")
        closing.cancel()
        proxy.cut()
        assert armed.fired

    await asyncio.to_thread(asyncio.run, main())
    assert not probe.exists(NAME) and not aio_closing.UNFINISHED


@tasks_only
@pytest.mark.parametrize("first", ["client", "loop"])
async def test_a_client_whose_loop_was_closed_by_hand_is_let_go(
    api: Api, server: Server, probe: redis.Redis, caplog: pytest.LogCaptureFixture, first: str
) -> None:
    """It says what it leaves, and its socket is closed by the time that the next client begins."""

    def run() -> None:
        loop = asyncio.new_event_loop()
        client = fastlock.asyncio.Client.from_url(server.unix_url, confirm_release=False)
        lock = client.lock(NAME)
        loop.run_until_complete(lock.acquire())
        loop.run_until_complete(lock.release())
        if first == "loop":
            loop.close()
        del client, lock
        gc.collect()
        loop.close()

    caplog.set_level(logging.WARNING, logger="fastlock")
    sockets = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        await asyncio.to_thread(run)
        probe.delete(NAME)
        assert len(aio_closing.UNFINISHED) <= 1
    aio_closing.end_unfinished()
    gc.collect()
    assert not aio_closing.UNFINISHED and len(os.listdir("/proc/self/fd")) <= sockets
    assert caplog.text.count(LEFT) == 3


@tasks_only
async def test_a_client_that_has_given_up_is_let_go(
    api: Api, proxy: FaultProxy, probe: redis.Redis, drains: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    client = api.client(proxy.url, confirm_release=False, reply_timeout=0.1)
    await released(api, proxy, client)
    proxy.arm(stall("request"), command="EVALSHA")
    await client.close()
    transport = client._transport
    transport.close_collected()  # as it is called when the client is collected
    assert LEFT in caplog.text and not aio_closing.UNFINISHED
    probe.delete(NAME)


@tasks_only
@pytest.mark.parametrize("closes", [False, True])
async def test_what_a_loss_has_begun_ends_before_the_loop(api: Api, server: Server, closes: bool) -> None:
    told: list[str] = []

    async def lost(lease: fastlock.Lease) -> None:
        told.append("begun")
        for _ in range(10):
            await asyncio.sleep(0)
        told.append("done")

    async def main() -> None:
        client = fastlock.asyncio.Client.from_url(server.unix_url, confirm_release=False)
        async with client.lock(NAME, on_lost=lost):
            with redis.Redis.from_url(server.unix_url) as other:
                other.delete(NAME)
        if closes:
            await client.close()

    await asyncio.to_thread(asyncio.run, main())
    assert told == ["begun", "done"]


def use_and_end(url: str, used: Any, went: Any) -> None:
    """What a child process does: nothing closes its client."""
    client = fastlock.Client.from_url(url, confirm_release=False)
    globals()["client"] = client
    lock = client.lock(NAME)
    lock.acquire()
    lock.release()
    used.set()
    went.wait()


@threads_only
async def test_a_child_of_multiprocessing_delivers_it(api: Api, proxy: FaultProxy, probe: redis.Redis) -> None:
    """Such a process ends without what `atexit` has."""
    fork = multiprocessing.get_context("fork")
    used, went = fork.Event(), fork.Event()
    armed = proxy.arm(stall("request"), command="EVALSHA", times=1)
    child = fork.Process(target=use_and_end, args=(proxy.url, used, went))
    child.start()
    await until(api, lambda: used.is_set() and armed.fired, "the release")
    proxy.cut()
    went.set()
    await until(api, lambda: child.exitcode is not None, "its end")
    assert child.exitcode == 0 and not probe.exists(NAME)


KEPT = {
    "threads": """
client = fastlock.Client.from_url(os.environ["SERVER"], reply_timeout=1)
lock = client.lock("sku", timeout=600, keep=600)
while not client._transport.queues.kept:
    with lock:
        pass
print("kept", flush=True)
input()
""",
    "asyncio": """
async def main():
    clients.append(fastlock.asyncio.Client.from_url(os.environ["SERVER"], reply_timeout=1))
    while not clients[0]._transport.queues.kept:
        async with clients[0].lock("sku", timeout=600, keep=600):
            pass
    print("kept", flush=True)
    input()
clients = []
asyncio.run(main())
""",
}


@pytest.mark.parametrize("fault", ["hangs", "is read-only"])
@pytest.mark.parametrize("program", KEPT)
def test_a_process_that_cannot_release_a_kept_lease_says_so(
    proxy: FaultProxy, probe: redis.Redis, impl: str, program: str, fault: str
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", "import asyncio, os, fastlock, fastlock.asyncio\n" + KEPT[program]],
        env={**os.environ, "SERVER": proxy.url, "PYTHONPATH": str(ROOT), "FASTLOCK_IMPL": impl},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None and process.stdout.readline() == "kept\n"
        if fault == "hangs":
            proxy.arm(stall("request"), command="EVALSHA")
        else:
            probe.replicaof("127.0.0.1", 1)
        try:
            _, said = process.communicate("\n", timeout=50)
        finally:
            probe.replicaof("NO", "ONE")
    assert probe.delete(NAME) == 1 and process.returncode == 0 and LEFT in said


PROGRAMS = {
    "threads": """
client = fastlock.Client.from_url(os.environ["SERVER"], confirm_release=False)
lock = client.lock("sku")
lock.acquire()
print("acquired", flush=True)
input()
lock.release()
""",
    "asyncio": """
async def main():
    clients.append(fastlock.asyncio.Client.from_url(os.environ["SERVER"], confirm_release=False))
    lock = clients[0].lock("sku")
    await lock.acquire()
    print("acquired", flush=True)
    input()
    await lock.release()
clients = []
asyncio.run(main())
""",
    "asyncio, collected": """
async def main():
    client = fastlock.asyncio.Client.from_url(os.environ["SERVER"], confirm_release=False)
    lock = client.lock("sku")
    await lock.acquire()
    print("acquired", flush=True)
    input()
    await lock.release()
asyncio.run(main())
""",
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_process_that_ends_tries_again(server: Server, impl: str, probe: redis.Redis, program: str) -> None:
    """As its server is read-only for longer than other things are tried."""
    with subprocess.Popen(
        [sys.executable, "-c", "import asyncio, os, fastlock, fastlock.asyncio\n" + PROGRAMS[program]],
        env={**os.environ, "SERVER": server.url, "PYTHONPATH": str(ROOT), "FASTLOCK_IMPL": impl},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdin is not None and process.stdout is not None and process.stdout.readline() == "acquired\n"

        def sent() -> int:
            return int(probe.info("commandstats").get("cmdstat_evalsha", {"calls": 0})["calls"])

        before = sent()
        probe.replicaof("127.0.0.1", 1)
        try:
            process.stdin.write("\n")
            process.stdin.flush()
            begun = now()
            while sent() < before + 4 or now() < begun + CLOSE_SECONDS + 0.3:
                assert process.poll() is None, "it has ended without it"
        finally:
            probe.replicaof("NO", "ONE")
        assert process.communicate(timeout=50) == ("", "") and process.returncode == 0
    assert not probe.exists(NAME)


@threads_only
@pytest.mark.skipif(fastlock.IMPLEMENTATION == "cython", reason="there no handler runs while a stream is changed")
async def test_a_handler_that_interrupts_a_change_of_the_stream_leaves_its_undo_to_others(
    api: Api, server: Server
) -> None:
    """Who has the connection's mutex waits for the stream's then, which the interrupted thread has."""
    client = api.client(server.url)
    with client.lock(NAME):
        pass
    (connection,) = client._transport.connections
    writing = threading.Event()

    def write() -> None:
        with connection.mutex:
            writing.set()
            connection.stream.put_command(None, (b"PING",))

    def interrupted() -> None:
        with connection.stream._mutex:
            other.start()
            writing.wait()
            client._transport.undo(Undo([b"other"], [b"token"], connection=connection))

    other = threading.Thread(target=write, daemon=True)
    await ends(interrupted)
    other.join()
    assert len(client._transport.pending_undos) == 1
    with client.lock(NAME):
        assert not client._transport.pending_undos


@threads_only
@pytest.mark.parametrize("call", ["undo", "undo_interrupted", "release"])
async def test_a_handler_that_interrupts_a_change_of_the_client_waits_for_nobody(
    api: Api, server: Server, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who has the connection's mutex may wait for the client's then, as one who finds that the connection broke."""
    client = api.client(server.url)
    transport = client._transport
    with client.lock(NAME):
        pass
    lock = client.lock("other", thread_local=False)
    lock.acquire()
    (connection,) = transport.connections
    failing, ended, discard = threading.Event(), list[str](), transport.discard

    def discarded(connection: Connection) -> None:
        failing.set()
        discard(connection)

    def interrupted() -> None:
        with transport._mutex:
            other.start()
            failing.wait()
            if call == "undo":
                transport.undo(Undo([b"other"], [lock.lease._raw_token], connection=connection))
            elif call == "undo_interrupted":
                transport.undo_interrupted(Release(lock.lease), KeyboardInterrupt())
            else:
                lock.release()
        ended.append(call)

    monkeypatch.setattr(sync.SyncTransport, "discard", staticmethod(discarded))
    other = threading.Thread(target=connection.fail, args=(Broken("cut"),), daemon=True)
    await ends(interrupted)
    other.join()
    monkeypatch.undo()
    with client.lock(NAME):
        assert ended and not transport.pending_undos and connection not in transport.connections
    assert await api.get(client.lock("other", blocking_timeout=SOON).acquire())


async def ends(call: Callable[[], object]) -> None:
    """Run the call in a thread, which has to end."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(SOON)
    assert not thread.is_alive(), "two threads wait for each other"


@threads_only
async def test_pending_undos_that_a_signal_handler_sends_first_are_no_error(
    api: Api, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = api.client(server.url)
    async with api.within(client.lock("sku")):
        pass
    transport = client._transport
    transport.defer(UndoDelivery(Undo([b"sku"], [b"fl:" + b"0" * 32])))

    def interrupted(*args: Any) -> Any:
        """As `map`, after whose call a signal handler runs."""
        transport.pending_undos.clear()
        return map(*args)

    (connection,) = transport.connections
    monkeypatch.setattr(sync, "map", interrupted, raising=False)
    transport.flush_undos_over(connection)
    assert not transport.pending_undos


@threads_only
async def test_an_undo_that_is_interrupted_as_its_connection_is_found_closed_stays_pending(
    api: Api, server: Server, probe: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = api.client(server.url)
    async with api.within(client.lock("sku")):
        pass
    transport = client._transport
    (connection,) = transport.connections
    probe.client_kill_filter(_type="normal", skipme=True)
    await until(api, lambda: not connection.stream.usable(), "it is closed")

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Connection, "fail", interrupted)
        transport.undo(Undo([b"sku"], [b"fl:" + b"0" * 32]))
    (delivery,) = transport.pending_undos
    assert delivery.stale == (connection.session,)


LATE_THREADS = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>
struct start { void *(*function)(void *); void *argument; };
static void *late(void *given) {
  struct start start = *(struct start *)given;
  free(given);
  usleep(100000);
  return start.function(start.argument);
}
int pthread_create(pthread_t *thread, const pthread_attr_t *with, void *(*function)(void *), void *argument) {
  int (*create)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *) = dlsym(RTLD_NEXT, "pthread_create");
  struct start *start = malloc(sizeof *start);
  start->function = function, start->argument = argument;
  return create(thread, with, late, start);
}
__attribute__((destructor)) static void slow(void) { usleep(300000); }
"""
ENDS_AT_ONCE = """
import sys, fastlock
client = fastlock.Client.from_url(sys.argv[1])
lock = client.lock("sku", auto_renew=True)
lock.acquire()
lock.release()
"""


@threads_only
@pytest.mark.skipif(shutil.which("gcc") is None, reason="what makes threads begin late is compiled")
async def test_a_thread_that_begins_as_the_process_ends_does_not_crash_it(
    api: Api, server: Server, probe: redis.Redis, tmp_path: Path
) -> None:
    """As on a busy machine: CPython, 3.11.2 at least, uses memory that it has freed, which is overwritten here, where a
    thread begins after the interpreter has ended."""
    (tmp_path / "late.c").write_text(LATE_THREADS)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", "late.so", "late.c", "-ldl"], cwd=tmp_path, check=True)
    late = {**os.environ, "LD_PRELOAD": str(tmp_path / "late.so"), "MALLOC_PERTURB_": "165"}
    done = subprocess.run([sys.executable, "-c", ENDS_AT_ONCE, server.url], cwd=ROOT, env=late, timeout=50)
    assert done.returncode == 0 and not probe.exists("sku")


def test_the_end_of_the_process_waits_for_threads_to_begin(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    began: list[str] = []
    monkeypatch.setattr(_native, "_start_new_thread", lambda function, args: started.append((function, args)))
    monkeypatch.setattr(_native, "_BEGIN_SECONDS", SOON)
    _native.start_new_thread(began.append, ("it",))
    ending = threading.Thread(target=_native.await_begun)
    ending.start()
    ((begin, args),) = started
    ending.join(0.02)
    assert ending.is_alive()
    begin(*args)
    ending.join(SOON / 2)
    assert not ending.is_alive() and began == ["it"]
