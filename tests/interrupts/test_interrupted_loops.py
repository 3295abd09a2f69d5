"""Event loops in which a signal handler raises: no key stays behind, no task hangs, no reply goes to the wrong task.

Real signals at seeded random moments in a program of its own (support/interrupted_loop.py); and the moments that random
signals seldom meet, one by one.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
import uvloop
from support.servers import leftovers
from support.streams import raise_at
from support.strikes import STACK, Struck, StruckIn, strike_everywhere

import fastlock
import fastlock.asyncio
from fastlock._stream_errors import Broken
from fastlock._transport.internals import Wakeup
from fastlock._transport.wakeups import WakeupQueue
from fastlock.embedded import Server

ROOT = Path(__file__).resolve().parents[2]
NAME, QUEUE = "sku", "fastlock:queue:{sku}"
HITS = 100


@pytest.mark.parametrize("mode", ["with", "limited", "fence", "fair", "unconfirmed", "cohort", "many"])
def test_tasks_of_an_interrupted_loop_leave_no_key(server: Server, probe: redis.Redis, impl: str, mode: str) -> None:
    """limited: with a blocking_timeout; cohort: six tasks want the same name."""
    program = [sys.executable, str(ROOT / "tests/support/interrupted_loop.py"), server.unix_url, mode, "7", str(HITS)]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(program, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["implementation"] == impl
    assert report["wrong"] == [] and report["leaks"] == 0 and report["hits"] == HITS, report
    assert [key for key, _ in leftovers(probe) if not key.startswith(b"fastlock:fence:")] == []


def test_replies_lost_after_they_were_read_go_to_no_other_task(
    server: Server, probe: redis.Redis, impl: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in a notebook: the exception leaves the loop, the bytes that were read are lost, and the loop goes on.
    The next reply, that of a free name, would otherwise go to the task that asked for a name that is held."""
    with asyncio.Runner() as runner:
        client = fastlock.asyncio.Client.from_url(server.unix_url)
        runner.run(client.server_info())
        connection: Any = client._transport.connection
        probe.set("held", "another")
        monkeypatch.setattr(connection, "buffer_updated", Struck(KeyboardInterrupt, connection.buffer_updated))
        held, free = client.lock("held"), client.lock("free")
        refused = runner.get_loop().create_task(held.acquire(blocking=False))
        with pytest.raises(KeyboardInterrupt):
            runner.run(asyncio.sleep(20))

        granted = runner.get_loop().create_task(free.acquire())
        assert runner.run(asyncio.wait_for(refused, 20)) is False
        assert runner.run(asyncio.wait_for(granted, 20)) is True
        assert client.get_stats()["reconnects"] == 1
        probe.delete("free", "held")
        runner.run(client.close())


@pytest.mark.parametrize("server", ["valkey"], indirect=True)
@pytest.mark.parametrize("in_flight", [False, True], ids=["idle", "in flight"])
def test_connection_is_replaced_though_its_end_is_interrupted(
    server: Server, probe: redis.Redis, impl: str, no_leaks: Any, in_flight: bool
) -> None:
    """asyncio reports a lost connection in a callback, once: a handler may raise at any point of that callback."""

    async def attempt(step: int) -> bool:
        async with fastlock.asyncio.Client.from_url(server.unix_url, reply_timeout=1) as client:
            await client.server_info()
            connection: Any = client._transport.connection
            asked = asyncio.ensure_future(client.lock("asked").acquire(blocking=False)) if in_flight else None
            await asyncio.sleep(0)
            connection.byte_transport.abort()
            struck = raise_at(step, STACK, lambda: connection.connection_lost(None))
            async with asyncio.timeout(20):
                async with client.lock(NAME):
                    assert client._transport.connection is not connection, f"point {step}"
                if asked is not None and await asked:
                    probe.delete("asked")
            return struck

    steps = itertools.count(1)
    while asyncio.run(attempt(next(steps))):
        pass
    assert next(steps) > 10


SITUATIONS: dict[str, dict[str, Any]] = {
    **{"free": {}, "not connected": {}, "polls": {"queue": False}, "fair": {"fair": True}, "fence": {"fence": True}},
    **{"after a task": {}, "after a client": {}, "limited": {"blocking_timeout": 20}},
}


@pytest.mark.parametrize("server", ["valkey"], indirect=True)
@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("cancelled", [False, True], ids=["", "cancelled"])
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")  # it was interrupted just before it was awaited
def test_task_interrupted_at_any_point_of_its_acquire(
    server: Server, probe: redis.Redis, impl: str, situation: str, cancelled: bool
) -> None:
    """A lock that the task has got can be released; otherwise no key stays, and the next acquire is served. The same
    holds while a cancellation of the task is handled."""

    async def attempt(step: int, point: int) -> tuple[bool, bool]:
        async with fastlock.asyncio.Client.from_url(server.unix_url) as client:
            another = client if situation == "after a task" else fastlock.asyncio.Client.from_url(server.unix_url)
            holder = another.lock(NAME, timeout=None, thread_local=False)
            lock = client.lock(NAME, timeout=None, thread_local=False, **SITUATIONS[situation])
            if situation != "not connected":
                await client.server_info()
            strike = StruckIn(lock.acquire(), step, point, cancelled=cancelled)

            async def release_when_queued() -> None:
                while not strike.over and not (
                    client._transport.queued_keys if another is client else probe.exists(QUEUE)
                ):
                    await asyncio.sleep(0)
                await holder.release()

            releasing = None
            if situation.startswith(("after", "limited")):
                await holder.acquire()
                releasing = asyncio.create_task(release_when_queued())
            where = f"step {step}, point {point}"
            async with asyncio.timeout(20):
                await strike
                if releasing is not None:
                    await releasing
                if lock.lease is not None:
                    await lock.release()
                async with client.lock(NAME, thread_local=False):  # its request follows every pending undo
                    pass
            assert not probe.exists(NAME), where
            assert not client._transport.queued_keys, f"{where}: the local queue still has a waiter"
            if another is not client:
                await another.close()
            return strike.struck, strike.reached

    strike_everywhere(attempt)


@pytest.mark.parametrize("server", ["valkey"], indirect=True)
@pytest.mark.parametrize("next_in", ["nobody", "a task", "a client"])
@pytest.mark.parametrize("how", ["release", "with", "with, of a task that has ended"])
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
def test_task_interrupted_at_any_point_of_its_release(
    server: Server, probe: redis.Redis, impl: str, how: str, next_in: str
) -> None:
    """The release is carried out, or can be repeated (the end of a `with` is not repeated); every waiter is served."""

    async def attempt(step: int, point: int) -> tuple[bool, bool]:
        async with fastlock.asyncio.Client.from_url(server.unix_url) as client:
            another = fastlock.asyncio.Client.from_url(server.unix_url) if next_in == "a client" else client
            ended = how.endswith("ended")
            lock = client.lock(NAME, timeout=None, thread_local=ended)
            next_one = another.lock(NAME, timeout=None, thread_local=False)
            await (asyncio.create_task(lock.acquire()) if ended else lock.acquire())
            waiting = None if next_in == "nobody" else asyncio.create_task(next_one.acquire())
            while waiting is not None and not (
                another._transport.queued_keys if another is client else probe.exists(QUEUE)
            ):
                await asyncio.sleep(0.001)
            strike = StruckIn(lock.release() if how == "release" else lock.__aexit__(None, None, None), step, point)
            entered = (step, point) == (0, 1)  # interrupted before the coroutine had begun: nothing was done
            async with asyncio.timeout(20):
                await strike
                if lock.lease is not None and (how == "release" or entered):
                    with contextlib.suppress(fastlock.LockError):  # it was carried out meanwhile
                        await lock.release()
                if waiting is not None:
                    assert await waiting
                    await next_one.release()
                async with client.lock(NAME, thread_local=False):
                    pass
            assert not probe.exists(NAME), f"step {step}, point {point}"
            if another is not client:
                await another.close()
            return strike.struck, strike.reached

    strike_everywhere(attempt)


@pytest.mark.parametrize("server", ["valkey", "redis"], indirect=True)
@pytest.mark.parametrize("next_in", ["nobody", "a task", "a client"])
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
def test_task_interrupted_at_any_point_of_a_release_of_many(
    server: Server, probe: redis.Redis, impl: str, next_in: str
) -> None:
    """release_many() is carried out; if it was interrupted before it had begun, it has to be called again."""

    async def attempt(step: int, point: int) -> tuple[bool, bool]:
        async with fastlock.asyncio.Client.from_url(server.unix_url) as client:
            another = fastlock.asyncio.Client.from_url(server.unix_url) if next_in == "a client" else client
            leases = await client.acquire_many([NAME, "b"], timeout=None)
            next_one = another.lock(NAME, timeout=None, thread_local=False)
            waiting = None if next_in == "nobody" else asyncio.create_task(next_one.acquire())
            while waiting is not None and not (
                another._transport.queued_keys if another is client else probe.exists(QUEUE)
            ):
                await asyncio.sleep(0.001)
            strike = StruckIn(client.release_many(leases), step, point)
            async with asyncio.timeout(20):
                await strike
                if (step, point) == (0, 1):
                    await client.release_many(leases)
                if waiting is not None:
                    assert await waiting
                    await next_one.release()
                async with client.lock(NAME, thread_local=False):
                    pass
            assert not probe.exists(NAME, "b"), f"step {step}, point {point}"
            if another is not client:
                await another.close()
            return strike.struck, strike.reached

    strike_everywhere(attempt)


WITH = """async def block(lock, body):
    async with lock:
        body.run
"""


class Body:
    """Makes a call in the body of a `with` by reading an attribute, so that the frame of the `with` has no call to
    interrupt there."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.call = call

    @property
    def run(self) -> object:
        return self.call()


@pytest.mark.parametrize("server", ["valkey"], indirect=True)
@pytest.mark.parametrize("case", ["no waiter", "a waiting task", "a connection that broke"])
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
def test_with_interrupted_at_any_point(server: Server, probe: redis.Redis, impl: str, case: str) -> None:
    """Also in the frame that the `with` stands in, where no code of fastlock can catch the exception."""
    if inspect.iscoroutinefunction(fastlock.asyncio.ClientLock.__aexit__):
        pytest.skip("between the call of `__aexit__` and its first line there is a gap")
    space: dict[str, Any] = {}
    exec(compile(WITH, "<with>", "exec"), space)

    async def attempt(step: int, point: int) -> tuple[bool, bool]:
        async with fastlock.asyncio.Client.from_url(server.unix_url) as client:
            await client.server_info()
            lock = client.lock(NAME, timeout=None)
            connection: Any = client._transport.connection
            broken = case == "a connection that broke"
            body = Body(lambda: connection.fail(EOFError("gone")) if broken else None)
            strike = StruckIn(space["block"](lock, body), step, point, {"<with>"} if broken else {*STACK, "<with>"})
            async with asyncio.timeout(20):
                waiting = asyncio.create_task(client.lock(NAME, thread_local=False).acquire())
                if case != "a waiting task":
                    waiting.cancel()
                await strike
                if case == "a waiting task":
                    assert await waiting
                    await client.lock(NAME).locked()
                    assert probe.delete(NAME)
                async with client.lock(NAME):
                    pass
            assert not probe.exists(NAME), f"step {step}, point {point}"
            return strike.struck, strike.reached

    strike_everywhere(attempt)


@pytest.mark.parametrize("server", ["valkey"], indirect=True)
def test_client_survives_an_interrupt_as_its_connecting_ends(server: Server, impl: str, no_leaks: Any) -> None:
    """The interrupt comes in the callback that notes a failed connect, or in what follows a handshake."""

    async def failed(step: int) -> bool:
        async with fastlock.asyncio.Client.from_url(server.unix_url, reply_timeout=0.1) as client:
            await client.server_info()
            transport: Any = client._transport
            task = asyncio.get_running_loop().create_future()
            task.set_exception(Broken("refused"))
            transport.connection.fail(EOFError("gone"))
            transport._connecting = task
            struck = raise_at(step, STACK, lambda: transport._connect_done(task))
            assert not await asyncio.wait_for(client.lock(NAME).locked(), 20), f"point {step}"
            return struck

    async def opened(step: int) -> bool:
        async with fastlock.asyncio.Client.from_url(server.unix_url) as client:
            await client.server_info()
            transport: Any = client._transport
            connection, real = transport.connection, transport._on_connected
            connections: list[Any] = []
            struck = False

            def strike(connection: Any) -> None:
                nonlocal struck
                connections.append(connection)
                if len(connections) == 1 and (struck := raise_at(step, STACK, lambda: real(connection))):
                    raise TimeoutError("struck")
                if len(connections) > 1:
                    real(connection)

            transport._on_connected = strike
            connection.fail(EOFError("gone"))
            async with asyncio.timeout(20), client.lock(NAME):
                assert connections[0].error is not None or transport.connection is connections[0], f"point {step}"
            return struck

    for attempt in (failed, opened):
        steps = itertools.count(1)
        while asyncio.run(attempt(next(steps))):
            pass
        assert next(steps) > 3


@pytest.mark.parametrize("kind", ["asyncio", "uvloop"])
def test_buffered_requests_are_sent_though_a_handler_raises(
    server: Server, impl: str, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The handler raises as the flush of a tick begins: the loop logs the exception and flushes no more by itself."""

    async def work() -> None:
        errors: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(context["exception"]))
        async with fastlock.asyncio.Client.from_url(server.unix_url) as client:
            await client.server_info()
            connection: Any = client._transport.connection
            monkeypatch.setattr(connection, "flush", Struck(TimeoutError, connection.flush))
            async with asyncio.timeout(20), client.lock(NAME):
                assert [type(error) for error in errors] == [TimeoutError]

    with asyncio.Runner(loop_factory=uvloop.new_event_loop if kind == "uvloop" else None) as runner:
        runner.run(work())


def test_task_with_a_reply_is_woken_though_a_handler_raises(
    server: Server, impl: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handler raises as the wakeup is scheduled: a reply that was read already is delivered again."""

    async def work() -> None:
        loop = asyncio.get_running_loop()
        async with fastlock.asyncio.Client.from_url(server.unix_url, reply_timeout=1) as client:
            await client.server_info()
            connection: Any = client._transport.connection
            real = connection.received

            def received(data: bytes) -> None:
                with monkeypatch.context() as patch:
                    patch.setattr(loop, "call_soon", struck := Struck(TimeoutError, loop.call_soon))
                    try:
                        real(data)
                    finally:
                        struck_in.append(struck.calls)

            struck_in: list[int] = []
            monkeypatch.setattr(connection, "received", received)
            assert await asyncio.wait_for(client.lock(NAME).locked(), 20) is False
            assert struck_in[0] > 1 and client._transport.connection is not connection

    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        runner.get_loop().set_exception_handler(lambda loop, context: None)
        runner.run(work())


def test_tasks_are_woken_though_a_handler_raises_as_the_wakeup_begins(
    impl: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: None)
        wakeups = WakeupQueue(loop)
        two = [Wakeup().arm(wakeups) for _ in range(2)]

        async def wait(wakeup: Wakeup) -> Any:
            return await wakeup

        waiting = [asyncio.create_task(wait(wakeup)) for wakeup in two]
        await asyncio.sleep(0)
        two[0].set_result(5)
        two[1].set_result(6)
        with monkeypatch.context() as patch:
            patch.setattr(loop, "call_soon", Struck(TimeoutError, loop.call_soon))
            with pytest.raises(TimeoutError, match="struck"):
                wakeups.run()
        assert await asyncio.wait_for(asyncio.gather(*waiting), 20) == [5, 6]

    asyncio.run(work())


@pytest.mark.parametrize("what", ["flush", "wake", "wake, and it is cancelled"])
def test_callback_that_the_loop_dropped_is_scheduled_again(server: Server, impl: str, what: str) -> None:
    """asyncio takes a callback out of its list before it calls it: if a handler raises in between, it is lost."""

    async def work() -> None:
        loop: Any = asyncio.get_running_loop()
        async with fastlock.asyncio.Client.from_url(server.unix_url, reply_timeout=0.2) as client:
            await client.server_info()
            wakeups = client._transport.open_stream.wakeups
            task = asyncio.create_task(client.lock(NAME).acquire())
            await asyncio.sleep(0)
            if what == "flush":
                loop._ready.remove(next(handle for handle in loop._ready if "run_flush" in repr(handle)))
            else:
                while wakeups.scheduled is None:
                    await asyncio.sleep(0)
                wakeups.scheduled.cancel()
            if what.endswith("cancelled"):
                await asyncio.sleep(0)
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait_for(task, 20)
            async with asyncio.timeout(20), client.lock("other"):
                assert await client.lock(NAME).locked() is (not task.cancelled())
            if not task.cancelled():
                assert await asyncio.wait_for(task, 20)

    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        runner.run(work())


def test_task_whose_wait_has_ended_is_woken_though_a_handler_raises(impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The handler raises as the wakeup of the task is scheduled."""

    async def work() -> None:
        loop = asyncio.get_running_loop()
        wakeup = Wakeup().arm(WakeupQueue(loop))

        async def wait() -> Any:
            return await wakeup

        waiting = asyncio.create_task(wait())
        await asyncio.sleep(0)
        with monkeypatch.context() as patch:
            patch.setattr(loop, "call_soon", Struck(TimeoutError, loop.call_soon))
            with pytest.raises(TimeoutError, match="struck"):
                wakeup.set_result(5)
        assert await asyncio.wait_for(waiting, 20) == 5

    asyncio.run(work())


def test_task_is_cancellable_though_a_handler_raised_as_its_wait_ended(impl: str) -> None:
    """Its wakeup is marked as ready but is not queued, as if a handler had raised in between."""

    async def work() -> None:
        wakeup = Wakeup().arm(WakeupQueue(asyncio.get_running_loop()))

        async def wait() -> Any:
            return await wakeup

        waiting = asyncio.create_task(wait())
        await asyncio.sleep(0)
        wakeup.answer, wakeup.ready = 5, True
        waiting.cancel()
        await asyncio.wait([waiting], timeout=20)
        assert waiting.cancelled()

    asyncio.run(work())


@pytest.mark.parametrize("server", ["valkey"], indirect=True)
def test_task_that_is_woken_twice_goes_on_waiting(
    server: Server, impl: str, no_leaks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wakeup that a handler interrupted is scheduled again; by then the task may wait for something else."""

    async def work() -> None:
        loop: Any = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: None)
        client = fastlock.asyncio.Client.from_url(server.unix_url, reply_timeout=1)
        async with client, fastlock.asyncio.Client.from_url(server.unix_url) as another:
            await client.server_info()
            holder = another.lock(NAME, timeout=None)
            await holder.acquire()
            connection: Any = client._transport.connection
            real, replies, waiting = connection.received, itertools.count(1), []
            struck = Struck(TimeoutError, loop.call_soon)

            async def use() -> None:
                async with client.lock(NAME, timeout=None):
                    pass

            def received(data: bytes) -> None:
                if (number := next(replies)) == 1:  # the client does not know yet that the name is held
                    waiting.append(loop.create_task(use()))
                with monkeypatch.context() as patch:
                    if number == 2:
                        patch.setattr(loop, "call_soon", struck)
                    real(data)

            monkeypatch.setattr(connection, "received", received)
            waiting.append(loop.create_task(use()))
            async with asyncio.timeout(20):
                while not struck.calls:
                    await asyncio.sleep(0)
                await holder.release()
                await asyncio.gather(*waiting)

    asyncio.run(work())


@pytest.mark.parametrize("thread_local", [False, True], ids=["shared", "thread_local"])
@pytest.mark.parametrize("closed", [False, True], ids=["loop open", "loop closed"])
def test_with_releases_though_its_coroutine_is_closed_without_a_loop(
    server: Server, impl: str, no_leaks: Any, closed: bool, thread_local: bool
) -> None:
    """The release is sent when that loop runs again, or by the next loop."""
    client = fastlock.asyncio.Client.from_url(server.unix_url)

    async def hold() -> None:
        async with client.lock(NAME, timeout=None, thread_local=thread_local):
            await asyncio.Event().wait()

    async def begin() -> Any:
        task = asyncio.create_task(held)
        while not await client.lock(NAME).locked():
            pass
        return task

    held = hold()
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda loop, context: None)  # the task is destroyed while it is pending
    task = loop.run_until_complete(begin())
    if closed:
        loop.close()
    with pytest.raises(RuntimeError, match="works in asyncio's event loop"):
        held.close()
    del task
    if closed:
        loop = asyncio.new_event_loop()
    loop.run_until_complete(client.lock("other").locked())
    loop.run_until_complete(client.close())
    loop.close()
