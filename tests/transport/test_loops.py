"""Event loops and copies: an asyncio client goes from a closed loop to the next one, with its leases and its pending
undos; while its loop is open, another loop that uses it gets an error at once. Clients and locks are never copied. At
the end of an interpreter nothing is printed.
"""

from __future__ import annotations

import asyncio
import copy
import gc
import os
import pickle
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import redis
import redis.asyncio
from support.apis import Api, drive
from support.faultproxy import FaultProxy, stall

import fastlock
import fastlock.asyncio
from fastlock._protocol.acquire import Acquire

NAME = "sku"
NAME_IN_COMMAND = b"\r\nsku\r\n"
LIMIT = 20

pytestmark = pytest.mark.usefixtures("impl")
LOOPS = pytest.mark.parametrize("api", ["asyncio", "asyncio+uvloop"], indirect=True)


@contextmanager
def a_loop(api: Api) -> Iterator[asyncio.AbstractEventLoop]:
    """A loop that runs only when the test runs it."""
    loop = new_loop(api)
    yield loop
    loop.close()


def new_loop(api: Api) -> asyncio.AbstractEventLoop:
    if not api.uvloop:
        return asyncio.new_event_loop()
    import uvloop

    return uvloop.new_event_loop()  # type: ignore[no-any-return]


# ----------------------------------------------------------------------------------------------- one loop after another


@LOOPS
def test_client_goes_on_in_the_next_loop(api: Api, server: Any, probe: redis.Redis, no_leaks: Any) -> None:
    """As with asyncio.run twice, TestClient twice, async_to_sync: the leases of the previous loop remain valid."""
    client = fastlock.asyncio.Client.from_url(server.unix_url)
    mine, shared = client.lock("mine"), client.lock("shared", thread_local=False)

    async def work() -> None:
        async with client.lock("b", timeout=20):
            await asyncio.sleep(0)

    async def use(first: bool) -> None:
        assert await asyncio.gather(*(work() for _ in range(20))) == [None] * 20
        await client.release_many(await client.acquire_many(["x", "y"]))
        for lock in (mine, shared):
            if first:
                assert await lock.acquire()
            else:
                assert await lock.owned() and await lock.extend(5)
                await lock.release()

    for first in (True, False):
        api.run(use(first))
    stats = client.get_stats()
    assert stats["acquires"] == 46 and stats["reconnects"] == 0, "the counters belong to the client, not to a loop"
    api.run(client.close())
    with pytest.raises(fastlock.ClientClosedError):
        api.run(client.lock(NAME).acquire())


@LOOPS
def test_no_task_outlives_its_loop_where_the_server_is_silent(api: Api, proxy: FaultProxy, probe: redis.Redis) -> None:
    """The connection is cut, and the next ones are never answered, as the loop ends under callers."""
    client = fastlock.asyncio.Client.from_url(proxy.url, reply_timeout=LIMIT, connect_timeout=LIMIT)

    async def hold(name: str) -> None:
        await client.lock(name, thread_local=False).acquire()
        await asyncio.Event().wait()

    async def leave_all() -> None:
        leases = await client.acquire_many(["m1", "m2"])
        tasks = [asyncio.ensure_future(hold(name)) for name in (NAME, NAME, "another")]
        while not probe.exists("another"):
            await asyncio.sleep(0.001)
        proxy.arm(stall("request"), new_only=True)
        proxy.cut()
        tasks += [asyncio.ensure_future(client.release_many(leases)), asyncio.ensure_future(hold("last"))]
        await asyncio.sleep(0.01)
        assert not any(task.done() for task in tasks)

    with asyncio.Runner(loop_factory=lambda: new_loop(api)) as runner:
        loop = runner.get_loop()
        runner.run(leave_all())
    assert asyncio.all_tasks(loop) == set()
    probe.flushall()


@LOOPS
def test_client_collected_as_its_loop_ends_leaves_no_task(api: Api, proxy: FaultProxy, probe: redis.Redis) -> None:
    """The end of the loop tries to deliver an undo just then."""
    held: list[Any] = []

    def drop_in_the_last_try(loop: asyncio.AbstractEventLoop, before: int) -> None:
        if proxy.accepted < before + 2:  # the first one is the client's, which connects again
            loop.call_later(0.01, drop_in_the_last_try, loop, before)
        else:
            loop.call_later(0.3, drop)  # of the second for which it is tried

    def drop() -> None:
        assert held[0]._transport._loop_end is None, "the loop is ending"
        held.clear()
        gc.collect()

    async def leave_undo() -> None:
        held.append(client := fastlock.asyncio.Client.from_url(proxy.url, reply_timeout=LIMIT))
        await client.server_info()
        armed = proxy.arm(stall("request"), after=NAME_IN_COMMAND, times=1)
        task = asyncio.ensure_future(client.lock(NAME).acquire())
        while not armed.fired:
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.wait([task])
        proxy.arm(stall("request"), new_only=True)
        proxy.cut()
        drop_in_the_last_try(asyncio.get_running_loop(), proxy.accepted)

    with asyncio.Runner(loop_factory=lambda: new_loop(api)) as runner:
        loop = runner.get_loop()
        runner.run(leave_undo())
    assert asyncio.all_tasks(loop) == set() and not held
    probe.flushall()


@LOOPS
@pytest.mark.parametrize("refused", [True, False])
def test_pending_undo_of_a_closed_loop_is_sent_in_the_next(
    api: Api, proxy: FaultProxy, probe: redis.Redis, no_leaks: Any, refused: bool
) -> None:
    """The acquire of a lock without timeout was given up as the server answered: its key would stay for ever."""
    client = fastlock.asyncio.Client.from_url(proxy.url, reply_timeout=LIMIT)

    async def give_up() -> None:
        await client.server_info()
        proxy.arm(stall(), after=NAME_IN_COMMAND, times=1)
        task = asyncio.ensure_future(client.lock(NAME, timeout=None).acquire())
        while not probe.exists(NAME):
            await asyncio.sleep(0.001)
        proxy.arm(stall("request"), after=NAME_IN_COMMAND, times=1)  # the undo does not reach the server
        task.cancel()
        assert isinstance((await asyncio.gather(task, return_exceptions=True))[0], asyncio.CancelledError)
        if refused:
            proxy.refuse()

    api.run(give_up())
    assert probe.exists(NAME) == refused, "it is sent as the loop ends, over another connection, if there can be one"
    proxy.admit()

    async def go_on() -> None:
        async with client.lock("another"):
            pass
        await client.close()

    api.run(go_on())
    assert not probe.exists(NAME)


@LOOPS
@pytest.mark.filterwarnings("ignore:unclosed")  # uvloop does not close its own resources after an error
def test_loop_closed_under_tasks_that_wait_or_have_requests(
    api: Api, proxy: FaultProxy, probe: redis.Redis, no_leaks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tasks end when they are garbage-collected, while another loop runs, and hold nothing afterwards."""
    unraisable: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    client = fastlock.asyncio.Client.from_url(proxy.url)
    probe.set("held", "another")
    old = new_loop(api)
    old.set_exception_handler(lambda loop, context: None)  # the loop logs that each task was destroyed

    async def begin() -> list[Any]:
        await client.server_info()
        tasks = [asyncio.ensure_future(client.lock("held", thread_local=False).acquire()) for _ in range(3)]
        for _ in range(50):
            await asyncio.sleep(0.001)
        proxy.arm(stall(), after=b"new:0", times=1)
        tasks += [asyncio.ensure_future(client.lock(f"new:{n}", timeout=60).acquire()) for n in range(3)]
        while not probe.exists("new:2"):
            await asyncio.sleep(0.001)
        return tasks

    tasks = old.run_until_complete(begin())
    assert len(client._transport.queues.by_key) == 1
    old.close()

    async def go_on() -> None:
        assert await client.lock("free").acquire(blocking=False)
        assert client._transport.queues.by_key == {}
        tasks.clear()
        gc.collect()
        await asyncio.sleep(0)
        assert await client.lock("free").locked()  # follows the undos of the collected tasks
        assert not probe.exists(*(f"new:{n}" for n in range(3)))
        await asyncio.gather(*(work() for _ in range(10)))
        await client.lock("free").locked()

    async def work() -> None:
        async with client.lock("busy"):
            pass

    api.run(go_on())
    api.run(client.close())
    assert not unraisable, unraisable
    probe.delete("held", "free")


@LOOPS
@pytest.mark.parametrize("cancelled", [False, True])
@pytest.mark.filterwarnings("ignore:unclosed")  # uvloop does not close its own resources after an error
def test_a_loop_closed_under_close_holds_up_no_later_one(
    api: Api, proxy: FaultProxy, probe: redis.Redis, no_leaks: Any, cancelled: bool
) -> None:
    """`close` waits for an operation as its loop is closed. In the next loop, leases are released as ever, and what a
    cancelled release leaves is delivered."""
    client = fastlock.asyncio.Client.from_url(proxy.url, reply_timeout=LIMIT)
    lock, other = (client.lock(name, timeout=None, thread_local=False) for name in (NAME, "other"))
    old = new_loop(api)
    old.set_exception_handler(lambda loop, context: None)  # the loop logs that each task was destroyed

    async def close() -> list[Any]:
        for each in (lock, other):
            await each.acquire()
        proxy.refuse()
        proxy.cut()
        tasks = [asyncio.ensure_future(other.release())]
        while not client._transport.operations:
            await asyncio.sleep(0)
        tasks.append(asyncio.ensure_future(client.close()))
        while not client._transport._closing:
            await asyncio.sleep(0)
        return tasks

    tasks = old.run_until_complete(close())
    old.close()
    proxy.admit()

    async def release() -> None:
        task = asyncio.ensure_future(lock.release())
        if cancelled:
            await asyncio.sleep(0)
            task.cancel()
        await asyncio.wait([task])
        assert task.cancelled() == cancelled and (cancelled or task.result() is None)
        while probe.exists(NAME):
            await asyncio.sleep(0.001)

    api.run(release())
    del tasks
    gc.collect()
    probe.delete("other")


@LOOPS
def test_collected_waiter_leaves_the_queue_in_any_collection_order(
    api: Api, server: Any, probe: redis.Redis, no_leaks: Any
) -> None:
    """The generator of the steps is closed before the coroutine that runs them; the collector guarantees no order."""

    async def work() -> None:
        async with fastlock.asyncio.Client.from_url(server.unix_url) as client:
            probe.set("held", "another")
            waiting = client.lock("held").acquire(blocking_timeout=600)
            task = asyncio.ensure_future(waiting)
            while not probe.exists("fastlock:queue:{held}") or not client._transport.queues.by_entry:
                await asyncio.sleep(0.001)
            await client.lock("free").locked()  # the task waits by now
            (steps,) = (each for each in gc.get_objects()
                        if isinstance(each, types.GeneratorType) and each.gi_code is Acquire._queue.__code__
                        and each.gi_frame is not None)  # fmt: skip
            steps.close()
            waiting.close()
            await client.lock("free").locked()
            assert not probe.exists("fastlock:queue:{held}") and not client._transport.queues.by_entry
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            probe.delete("held")

    api.run(work())


@LOOPS
def test_two_loops_at_once_after_a_closed_one(api: Api, server: Any, no_leaks: Any) -> None:
    client = fastlock.asyncio.Client.from_url(server.unix_url)
    api.run(client.server_info())
    both = threading.Barrier(2)
    outcomes: list[str] = []

    async def one() -> None:
        both.wait(LIMIT)
        try:
            async with client.lock(NAME):
                outcomes.append("got it")
        except RuntimeError as error:
            outcomes.append("refused" if "another event loop" in str(error) else repr(error))
        await asyncio.to_thread(both.wait, LIMIT)

    threads = [threading.Thread(target=lambda: api.run(one())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert sorted(outcomes) == ["got it", "refused"]
    api.run(client.close())


# ---------------------------------------------------------------------------------------------------- two loops at once


@LOOPS
def test_another_loop_is_refused_at_once_while_a_client_is_in_use(
    api: Api, server: Any, probe: redis.Redis, no_leaks: Any
) -> None:
    """Also if the name has waiters: the refused call does not join them, and no lease can be handed over to it."""
    client = fastlock.asyncio.Client.from_url(server.unix_url)
    held = client.lock(NAME, timeout=30, thread_local=False)
    calls: list[Callable[[], Coroutine[Any, Any, Any]]] = [
        client.lock(NAME).acquire,
        client.lock(NAME).__aenter__,
        client.lock(NAME, fair=True).acquire,
        lambda: client.lock(NAME).acquire(blocking_timeout=5),
        lambda: client.lock("free").acquire(blocking=False),
        client.lock("free").locked,
        held.release,
        lambda: held.__aexit__(None, None, None),
        lambda: held.extend(5),
        client.server_info,
        lambda: client.acquire_many(["free"]),
        lambda: client.release_many([held.lease]),
        client.close,
    ]

    async def refused() -> None:
        for call in calls:
            with pytest.raises(RuntimeError, match="loop_scope") as caught:
                await asyncio.wait_for(call(), LIMIT)
            assert "another event loop" in str(caught.value)

    with a_loop(api) as first, a_loop(api) as second:
        first.run_until_complete(held.acquire())
        waiter = first.create_task(client.lock(NAME, timeout=30, thread_local=False).acquire())
        while not client._transport.queues.by_key[NAME.encode()].waiters if client._transport.queues.by_key else True:
            first.run_until_complete(asyncio.sleep(0.001))
        second.run_until_complete(refused())
        assert first.run_until_complete(held.owned())
        assert len(client._transport.queues.by_key[NAME.encode()].waiters) == 1
        first.run_until_complete(held.release())
        assert first.run_until_complete(asyncio.wait_for(waiter, LIMIT)) is True
        first.run_until_complete(client.close())
    probe.delete(NAME)


def test_error_without_asyncio_names_an_alternative() -> None:
    """As in a program that runs trio."""
    client = fastlock.asyncio.Client(unix_socket_path="/nowhere")
    for call in (client.lock("a").acquire, client.lock("a").locked, client.server_info):
        with pytest.raises(RuntimeError, match=r"trio\.to_thread"):
            drive(call())


# -------------------------------------------------------------------------------------------------- copies, and the end


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps])
@pytest.mark.parametrize("api", ["threads", "asyncio"], indirect=True)
async def test_clients_and_locks_are_not_copied(
    api: Api, server: Any, probe: redis.Redis, no_leaks: Any, how: Callable[[Any], Any]
) -> None:
    client = api.client(server.unix_url)
    other = (redis.asyncio if api.is_async else redis).Redis.from_url(server.unix_url)
    dropin = api.module.Lock(other, NAME, timeout=10)
    for original, named in ((client, "Client"), (client.lock(NAME), "ClientLock"), (dropin, "Lock")):
        with pytest.raises(TypeError, match=rf"a {api.module.__name__}\.{named} cannot be copied or pickled"):
            how(original)
    gc.collect()  # collect what a refused copy has left
    lock = client.lock(NAME)
    lease = await api.enter(lock)
    assert pickle.loads(pickle.dumps(lease)).token == copy.copy(lease).token == lease.token
    await api.leave(lock)
    await api.get(other.aclose() if api.is_async else other.close())


BOTH = """
import sys, types
sys.kept = kept = sys.modules["kept"] = types.ModuleType("kept")
import asyncio, os
import fastlock, fastlock.asyncio
url = os.environ["SERVER"]
threads = fastlock.Client.from_url(url)
tasks, kept.never = fastlock.asyncio.Client.from_url(url), fastlock.asyncio.Client.from_url(url)
kept.alive = [module for name, module in sys.modules.items() if name.startswith("fastlock")]
lock = threads.lock("a")
"""
ENDS = {
    "threads and asyncio": """
with lock: pass
async def use():
    async with tasks.lock("b"): pass
for _ in range(3): asyncio.run(use())
""",
    "uvloop": """
import uvloop
async def use():
    async with tasks.lock("b"): pass
for _ in range(3): uvloop.run(use())
""",
    "a client for each loop, in a list": """
clients = []
async def use():
    clients.append(fastlock.asyncio.Client.from_url(url))
    await asyncio.gather(*(work() for _ in range(5)))
async def work():
    async with clients[-1].lock("b"): pass
for _ in range(3): asyncio.run(use())
""",
    "in a module that is cleared after fastlock's": """
with lock: pass
kept.threads, kept.tasks = threads, tasks
del threads, tasks, lock
async def use():
    async with kept.tasks.lock("b"): pass
for _ in range(3): asyncio.run(use())
""",
}


@pytest.mark.parametrize("end", ENDS)
def test_nothing_is_printed_as_an_interpreter_ends(server: Any, probe: redis.Redis, no_leaks: Any, end: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-X", "dev", "-c", BOTH + ENDS[end]],
        env={**os.environ, "SERVER": server.unix_url}, capture_output=True, text=True, timeout=LIMIT,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
