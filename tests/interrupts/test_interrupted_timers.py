"""A signal handler that raises while an event loop runs or sets a timer of fastlock: the timer goes on, and the tasks
that wait for it are woken."""

from __future__ import annotations

import asyncio
import gc
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import redis
from support.streams import raise_at
from support.strikes import STACK, Struck, StruckIn

import fastlock
import fastlock.asyncio
from fastlock._protocol import renewal
from fastlock._protocol.lease import now
from fastlock.embedded import Server

NAME = "sku"

pytestmark = pytest.mark.parametrize("server", ["valkey"], indirect=True)


def run(work: Callable[[], Any]) -> Any:
    """Run it in a new loop whose error log is silenced: the errors are expected here."""
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        runner.get_loop().set_exception_handler(lambda loop, context: None)
        return runner.run(work())


async def until(true: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not true():
            await asyncio.sleep(0)


@pytest.mark.parametrize("method", ["call_soon", pytest.param("call_later", marks=pytest.mark.fastpath("tasks"))])
def test_expired_waiters_are_woken_though_a_wakeup_is_interrupted(
    server: Server, probe: redis.Redis, impl: str, no_leaks: Any, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """The compiled fast path has one timer for all waiters with the same blocking_timeout."""
    if (impl, method) == ("python", "call_later"):
        pytest.skip("in pure Python each waiter has a timer of its own")

    async def wait(client: Any) -> bool:
        got: bool = await client.lock(NAME, timeout=None, blocking_timeout=1, thread_local=False).acquire()
        return got

    async def work(apart: float) -> int:
        async with fastlock.asyncio.Client.from_url(server.unix_url) as client, client.lock(NAME, timeout=None):
            first = asyncio.create_task(client.lock(NAME, timeout=None, thread_local=False).acquire())
            await until(lambda: probe.exists("fastlock:queue:{sku}"))
            waiting = []  # behind `first` in the local queue
            for _ in range(4):
                waiting.append(asyncio.create_task(wait(client)))
                await asyncio.sleep(apart)  # so that the next one's blocking_timeout ends later
            loop: Any = asyncio.get_running_loop()
            transport: Any = client._transport
            ours = [transport.wakeups.run, *transport.shared_timeouts.values()]
            with monkeypatch.context() as patch:
                real = getattr(loop, method)
                raised = Struck(TimeoutError, real, lambda *args: any(each in ours for each in args))
                patch.setattr(loop, method, raised)
                await until(lambda: all(task.done() for task in waiting))
            assert [task.result() for task in waiting] == [False] * 4
            first.cancel()
            await asyncio.wait([first])
            return raised.calls

    # If the machine stalls, all timeouts end at once, and no further timer is set: try again with longer pauses
    assert any(run(lambda apart=apart: work(apart)) for apart in (0.005, 0.02, 0.08, 0.2))


def test_check_that_the_server_answers_may_be_interrupted(
    server: Server, probe: redis.Redis, impl: str, no_leaks: Any
) -> None:
    """A server that has stopped answering is detected all the same."""

    async def attempt(interrupt: Interrupt) -> bool:
        async with fastlock.asyncio.Client.from_url(server.unix_url, reply_timeout=0.5) as client:
            await client.server_info()
            connection: Any = client._transport.connection
            probe.execute_command("CLIENT", "PAUSE", 60_000, "WRITE")
            try:
                asked = asyncio.create_task(client.lock(NAME).acquire(blocking=False))
                await until(lambda: connection.stream.pending and not connection._all_answered)
                connection._watch.cancel()
                raised = interrupt(connection._check_progress)
                await until(lambda: connection.error is not None)
            finally:
                probe.execute_command("CLIENT", "UNPAUSE")
            if await asyncio.wait_for(asked, 20):
                probe.delete(NAME)
            return raised

    interrupt_in_turn(attempt)


def test_check_for_expired_leases_may_be_interrupted(server: Server, impl: str, no_leaks: Any) -> None:
    async def attempt(interrupt: Interrupt) -> bool:
        async with fastlock.asyncio.Client.from_url(server.unix_url) as client, client.lock(NAME, timeout=None):
            transport: Any = client._transport
            waiting = asyncio.create_task(client.lock(NAME, thread_local=False).acquire())
            await until(lambda: transport.sweep_timer is not None)
            before = transport.sweep_timer
            before.cancel()
            raised = interrupt(lambda: transport.sweep(True))
            assert transport.sweep_timer not in (None, before) and not transport.sweep_timer.cancelled()
            waiting.cancel()
            await asyncio.wait([waiting])
            return raised

    interrupt_in_turn(attempt)


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")  # it was interrupted just before its task began
def test_renewals_go_on_though_their_timer_is_interrupted(
    server: Server, impl: str, no_leaks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renewal, "DUE_PART", 1e-5)  # of a lease's time: 6 ms

    async def attempt(interrupt: Interrupt) -> bool:
        async with fastlock.asyncio.Client.from_url(server.unix_url) as client:
            async with client.lock(NAME, timeout=600, auto_renew=True):
                timer: Any = client._transport._renewal_timer
                await until(lambda: timer._timer is not None and not timer._tasks)
                timer._timer.cancel()
                while now() < timer._time:
                    pass
                raised = interrupt(timer._run)
                before = client.get_stats()["renewals"]
                await until(lambda: client.get_stats()["renewals"] > before)
            return raised

    interrupt_in_turn(attempt)


def test_kept_leases_lapse_though_their_timer_is_interrupted(
    server: Server, probe: redis.Redis, impl: str, no_leaks: Any
) -> None:
    async def attempt(interrupt: Interrupt) -> bool:
        async with fastlock.asyncio.Client.from_url(server.unix_url) as client:
            long, short = client.lock("long", timeout=600, keep=600), client.lock(NAME, timeout=600, keep=0.01)
            for lock in (long, short):
                while lock.name not in map(bytes.decode, client._transport.queues.kept):
                    async with lock:
                        await asyncio.sleep(0)
            timer: Any = client._transport._keep_timer
            timer._timer.cancel()
            raised = interrupt(timer._run)
            await until(lambda: not probe.exists(NAME))
            return raised

    interrupt_in_turn(attempt)


def test_a_kept_lease_lapses_though_its_release_is_interrupted_at_any_point(
    server: Server, probe: redis.Redis, impl: str, no_leaks: Any
) -> None:
    """The timer that is to release it in time ends much later: another one is set in any case."""
    files = {file for file in STACK if file.endswith(("keeping.py", "kept.py"))}

    async def work() -> int:
        async with fastlock.asyncio.Client.from_url(server.unix_url) as client:
            long, lock = client.lock("long", timeout=600, keep=600), client.lock(NAME, timeout=600, keep=0.005)
            while not client._transport.queues.kept:
                async with long:
                    await asyncio.sleep(0)
            point = 1
            while True:
                await lock.acquire()
                release = StruckIn(lock.release(), 0, point, files)
                await release
                kept = NAME.encode() in client._transport.queues.kept  # unless the machine stalled for `keep`
                if lock.lease is not None:
                    await lock.release()
                await until(lambda: not probe.exists(NAME))
                if kept and not release.struck:
                    return point
                point += release.struck

    assert run(work) > 5


Interrupt = Callable[[Callable[[], Any]], bool]


def interrupt_in_turn(attempt: Callable[[Interrupt], Any]) -> None:
    """Interrupt a timer's callback at each point of it in turn, and as it sets the next timer. Point 1, the call
    itself, is asyncio's code."""

    def at(point: int) -> Interrupt:
        return lambda call: raise_at(point, STACK, call)

    def setting_timer(call: Callable[[], Any]) -> bool:
        loop: Any = asyncio.get_running_loop()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop, "call_later", Struck(TimeoutError, loop.call_later))
            with pytest.raises(TimeoutError, match="struck"):
                call()
        return True

    points = itertools.count(2)
    while run(lambda: attempt(at(next(points)))):
        pass
    assert next(points) > 4
    assert run(lambda: attempt(setting_timer))


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")  # it was interrupted just before it was awaited
def test_first_call_in_another_loop_may_be_interrupted(
    server: Server, probe: redis.Redis, impl: str, no_leaks: Any
) -> None:
    """The leases that are held are renewed there all the same, and the end of that loop is noticed."""
    clients: list[Any] = [fastlock.asyncio.Client.from_url(server.unix_url) for _ in range(70)]  # more than points
    locks = [client.lock(f"{NAME}:{number}", timeout=600, auto_renew=True) for number, client in enumerate(clients)]

    async def acquire() -> None:
        await asyncio.gather(*(lock.acquire() for lock in locks))

    async def go_on() -> list[bool]:
        files = {file for file in STACK if not file.endswith("lease.py")}  # of tokens: it draws many, now and then
        struck = [raise_at(point, files, client._transport.begin) for point, client in enumerate(clients, 1)]
        await asyncio.gather(*(client.lock("other").locked() for client in clients))
        for point, client in enumerate(clients, 1):
            timer = client._transport._renewal_timer._timer
            assert timer is not None and timer._loop is asyncio.get_running_loop() and not timer.cancelled(), point
            assert client._transport._loop_end is not None, point
        await asyncio.gather(*(client.close() for client in clients))
        return struck

    asyncio.run(acquire())
    gc.collect()  # a finalizer that runs meanwhile would swallow the interrupt
    struck = asyncio.run(go_on())
    assert struck == sorted(struck, reverse=True) and struck[0] and not struck[-1]
    assert probe.delete(*(f"{NAME}:{number}" for number in range(len(locks)))) == len(locks)
