"""Locks on several names whose caller is interrupted: at any point by a signal handler, at any step by cancellation.

Real signals at random moments: mode `several` in support/interrupted.py. What must never happen: a key that stays
although nobody owns it, a waiter left behind, a lock that still says it holds something.
"""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest
import redis
from support.apis import Api
from support.child_client import until
from support.streams import Interrupt, raise_at

import fastlock
import fastlock.asyncio
from fastlock._protocol import commands
from fastlock.embedded import Server

NAMES = ["c", "a", "b"]
QUEUES = [commands.queue_key(name.encode()) for name in NAMES]
STEPS = 80  # of the event loop; an acquire that does not wait needs fewer
STACK = {str(path) for path in Path(fastlock.__file__).parent.rglob("*.py")}  # what is compiled cannot be interrupted
EXPECTED = (IndexError, RuntimeError, redis.exceptions.ConnectionError, fastlock.LockError)
one_server = pytest.mark.parametrize("server", ["valkey"], indirect=True)


@one_server
@pytest.mark.parametrize(
    ("operation", "kind"),
    [(operation, kind) for operation in ("acquire", "release", "extend") for kind in (Interrupt, *EXPECTED)]
    + [("wait", Interrupt)],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_thread_interrupted_at_any_point(
    impl: str, server: Server, probe: redis.Redis, no_leaks: Any, operation: str, kind: type[BaseException]
) -> None:
    with fastlock.Client.from_url(server.unix_url) as client, client.multi_lock(NAMES):
        pass  # the server knows the scripts: else an operation takes fewer steps from the step on that loads them
    for step in itertools.count(1, 1 if operation != "wait" else 3):
        with fastlock.Client.from_url(server.unix_url) as client:
            lock = client.multi_lock(NAMES, timeout=60, blocking_timeout=0.02 if operation == "wait" else None)
            client.server_info()
            if operation == "wait":
                probe.set("b", "another")
            if operation in ("release", "extend"):
                lock.acquire()
            calls = {"release": lock.release, "extend": lambda lock=lock: lock.extend(5)}
            raised = raise_at(step, STACK, calls.get(operation, lock.acquire), kind)
            assert client._transport.connections == client._transport.idle or client._transport.push_connection_lent
            assert not client._transport.queues.by_key and not client._transport.queues.by_entry
            if lock.lease is not None and (operation != "release" or step % 2 or step == 1):
                lock.release()  # also again: a release that was interrupted is carried out, and may be repeated
            assert not client.lock("barrier").locked()
            held = probe.exists(*NAMES, *QUEUES)
            probe.delete("b")
            assert held == (operation == "wait"), f"point {step}"
        if not raised:
            break
    assert step > 20


@one_server
@pytest.mark.parametrize("holder", [None, "c", "b"])
@pytest.mark.parametrize("api", ["asyncio", "asyncio+uvloop"], indirect=True)
async def test_a_task_cancelled_at_any_step(
    api: Api, server: Server, probe: redis.Redis, no_leaks: Any, no_waiters: None, holder: str | None
) -> None:
    """At every step of the event loop in turn, with a name that another one holds for a while, or without."""
    client, other = api.client(server.url), api.client(server.url)
    for steps in range(STEPS):
        held = other.lock(holder or "unheard of", 60, thread_local=False)
        await held.acquire()
        lock = client.multi_lock(NAMES, 60)

        async def work(lock: Any = lock) -> None:
            async with lock as lease:
                assert lease.valid

        task = asyncio.ensure_future(work())
        for step in range(steps):
            await asyncio.sleep(0)
            if step == steps // 2:
                await held.release()
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled() or task.exception() is None
        if held.lease is not None:
            await held.release()
        await until(api, lambda: not probe.exists(*NAMES, *QUEUES), f"nothing is left after step {steps}")
        assert lock.lease is None or not lock.lease.valid
