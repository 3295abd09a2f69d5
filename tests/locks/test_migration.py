"""Beside clients of redis-py while a fleet migrates: `queue=False` waits as redis-py does, and lets its locks in."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from support.apis import Api
from support.child_client import LONG, NAME, QUEUE, SOON, held, queued, until, wait_with

from fastlock import ClientClosedError
from fastlock.embedded import Server

ROOT = Path(__file__).parents[2]
SETTINGS = {"timeout": LONG, "sleep": 0.01, "thread_local": False}

pytestmark = pytest.mark.usefixtures("no_leaks")


def of_lock(api: Api, server: Server) -> Any:
    return api.client(server.unix_url).lock(NAME, queue=False, **SETTINGS)


def of_client(api: Api, server: Server) -> Any:
    return api.client(server.unix_url, queue=False).lock(NAME, **SETTINGS)


def of_constructor(api: Api, server: Server) -> Any:
    client = api.module.Client(unix_socket_path=server.path, queue=False)
    api._clients.append(client)
    return client.lock(NAME, **SETTINGS)


def of_dropin(api: Api, server: Server) -> Any:
    kind = redis.asyncio.Redis if api.is_async else redis.Redis
    raw = kind(unix_socket_path=server.path)
    return raw.lock(NAME, lock_class=functools.partial(api.module.Lock, queue=False), **SETTINGS)


def polls(probe: redis.Redis) -> int:
    """How often a waiter without a queue has read the rest of the lease."""
    return int(probe.info("commandstats").get("cmdstat_pttl", {"calls": 0})["calls"])


MAKERS = pytest.mark.parametrize("make", [of_lock, of_client, of_constructor, of_dropin])


@MAKERS
async def test_waiter_without_a_queue_leaves_no_trace_and_acquires(
    api: Api, server: Server, probe: redis.Redis, make: Callable[..., Any]
) -> None:
    """Every way to wait: with the lock's own settings, with those of a call, and by `with`."""
    holder, lock = await held(api, api.client(server.unix_url)), make(api, server)
    for begin in (lock.acquire, lambda: lock.acquire(blocking_timeout=LONG), lambda: api.enter(lock)):
        token = probe.get(NAME)
        before = polls(probe)
        job = api.start(begin)
        await until(api, lambda before=before: polls(probe) >= before + 2, "two polls of the waiter")
        assert probe.keys() == [NAME.encode()] and probe.get(NAME) == token, "no queue, and no contended token"
        await api.get(holder.release())
        assert await job.get(SOON)
        await api.get(lock.release())
        assert await api.get(holder.acquire(blocking=False))
    await api.get(holder.release())
    stats = lock._transport.stats
    assert (stats.local_handovers, stats.remote_handovers, stats.waits) == (0, 0, 3)
    assert not lock._transport.queued_keys


@MAKERS
async def test_released_lock_is_free_for_redis_py(
    api: Api, server: Server, probe: redis.Redis, make: Callable[..., Any]
) -> None:
    """Also if a waiter of the same client wants it."""
    lock = make(api, server)
    assert await api.get(lock.acquire())
    client = lock._client
    before = polls(probe)
    waiting, job = wait_with(api, client, queue=False)
    await until(api, lambda: polls(probe) > before, "a poll")
    await api.get(lock.release())
    assert not probe.exists(NAME)
    with redis.Redis(unix_socket_path=server.path) as raw, raw.lock(NAME, timeout=LONG, blocking=False):
        await api.get(client.close())
        with pytest.raises(ClientClosedError):
            await job.get(SOON)
    assert waiting.lease is None


async def test_each_lock_may_set_queue_for_itself(api: Api, server: Server, probe: redis.Redis) -> None:
    client = api.client(server.unix_url, queue=False)
    holder = await held(api, client)
    lock, job = wait_with(api, client, queue=True)
    await queued(api, probe, 1)
    await api.get(holder.release())
    assert await job.get(SOON) is True
    await api.get(lock.release())
    assert not probe.exists(QUEUE)


async def test_strict_order_without_a_queue_is_refused(api: Api, server: Server, probe: redis.Redis) -> None:
    plain, moving = api.client(server.unix_url), api.client(server.unix_url, queue=False)
    for client, settings in ((plain, {"queue": False}), (moving, {}), (moving, {"queue": False})):
        with pytest.raises(ValueError, match=r"fair=True.*queue=False"):
            client.lock(NAME, fair=True, **settings)
        with pytest.raises(ValueError, match=r"fair=True.*queue=False"):
            client.locked(NAME, fair=True, **settings)(_asynchronous if api.is_async else _plain)
    assert moving.lock(NAME, fair=True, queue=True).fair
    assert plain._transport.stats.commands == moving._transport.stats.commands == 0


def _plain() -> None: ...


async def _asynchronous() -> None: ...


@pytest.mark.usefixtures("impl")
def test_benchmark_beside_redis_py_runs() -> None:
    command = [sys.executable, "-m", "tests.mixed", "--seconds", "0.2"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, text=True, capture_output=True, timeout=50)
    assert done.returncode == 0, done.stderr
    assert [line.count("grants") for line in done.stdout.splitlines()] == [3, 3, 3]
