"""A signal's handler that raises as an event loop runs a timer of ours, or is asked for one: the timer goes on, and
whoever waits for it is called."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import redis
from support.streams import raise_at
from support.strikes import STACK, Struck

import fastlock
import fastlock.asyncio
from fastlock.embedded import Server

NAME = "sku"

pytestmark = pytest.mark.parametrize("server", ["valkey"], indirect=True)


def run(work: Callable[[], Any]) -> Any:
    """Whatever the loop has to log is expected here."""
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        runner.get_loop().set_exception_handler(lambda loop, context: None)
        return runner.run(work())


async def until(true: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not true():
            await asyncio.sleep(0)


@pytest.mark.parametrize("asked_for", ["call_soon", "call_later"])
def test_whose_times_are_over_are_called_though_the_first_is_struck(
    server: Server, probe: redis.Redis, impl: str, no_leaks: Any, monkeypatch: pytest.MonkeyPatch, asked_for: str
) -> None:
    """Compiled, those who gave the same blocking_timeout have one timer."""
    if (impl, asked_for) == ("python", "call_later"):
        pytest.skip("each has a timer of its own")

    async def wait(client: Any) -> bool:
        got: bool = await client.lock(NAME, timeout=None, blocking_timeout=1, thread_local=False).acquire()
        return got

    async def work(apart: float) -> int:
        async with fastlock.asyncio.Client.from_url(server.unix_url) as client, client.lock(NAME, timeout=None):
            first = asyncio.create_task(client.lock(NAME, timeout=None, thread_local=False).acquire())
            await until(lambda: probe.exists("fastlock:queue:{sku}"))
            waiting = []  # behind that one
            for _ in range(4):
                waiting.append(asyncio.create_task(wait(client)))
                await asyncio.sleep(apart)  # the next one's time ends later
            loop: Any = asyncio.get_running_loop()
            transport: Any = client._transport
            ours = [transport.wakeups.run, *transport.shared_timeouts.values()]
            with monkeypatch.context() as patch:
                asked = getattr(loop, asked_for)
                struck = Struck(TimeoutError, asked, lambda *what: any(each in ours for each in what))
                patch.setattr(loop, asked_for, struck)
                await until(lambda: all(task.done() for task in waiting))
            assert [task.result() for task in waiting] == [False] * 4
            first.cancel()
            await asyncio.wait([first])
            return struck.calls

    # Where the machine stands still, all are over at once, and nothing is asked for any more
    assert any(run(lambda apart=apart: work(apart)) for apart in (0.005, 0.02, 0.08, 0.2))


def test_who_looks_whether_the_server_answers_may_be_struck(
    server: Server, probe: redis.Redis, impl: str, no_leaks: Any
) -> None:
    """A server that is silent is found out all the same."""

    async def attempt(strike: Strike) -> bool:
        async with fastlock.asyncio.Client.from_url(server.unix_url, reply_timeout=0.5) as client:
            await client.server_info()
            connection: Any = client._transport.connection
            probe.execute_command("CLIENT", "PAUSE", 60_000, "WRITE")
            try:
                asked = asyncio.create_task(client.lock(NAME).acquire(blocking=False))
                await until(lambda: connection.stream.pending and not connection._quiet)
                connection._watch.cancel()
                struck = strike(connection._check_progress)
                await until(lambda: connection.error is not None)
            finally:
                probe.execute_command("CLIENT", "UNPAUSE")
            if await asyncio.wait_for(asked, 20):
                probe.delete(NAME)
            return struck

    strike_in_turn(attempt)


def test_who_looks_whether_a_lease_has_lapsed_may_be_struck(server: Server, impl: str, no_leaks: Any) -> None:
    async def attempt(strike: Strike) -> bool:
        async with fastlock.asyncio.Client.from_url(server.unix_url) as client, client.lock(NAME, timeout=None):
            transport: Any = client._transport
            waiting = asyncio.create_task(client.lock(NAME, thread_local=False).acquire())
            await until(lambda: transport.sweep_timer is not None)
            before = transport.sweep_timer
            before.cancel()
            struck = strike(lambda: transport.tick(True))
            assert transport.sweep_timer not in (None, before) and not transport.sweep_timer.cancelled()
            waiting.cancel()
            await asyncio.wait([waiting])
            return struck

    strike_in_turn(attempt)


Strike = Callable[[Callable[[], Any]], bool]


def strike_in_turn(attempt: Callable[[Strike], Any]) -> None:
    """Where a timer's call is struck: at each point of it in turn, and as it asks for the next one. In its call itself
    it is asyncio's."""

    def at(point: int) -> Strike:
        return lambda call: raise_at(point, STACK, call)

    def asking(call: Callable[[], Any]) -> bool:
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
    assert run(lambda: attempt(asking))
