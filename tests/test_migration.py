"""Beside clients of redis-py, for as long as a fleet moves over: `queue=False` waits as they do, and lets them in."""

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
from support.child_client import LONG, NAME, QUEUE, SOON, held, queued, until, wait_with
from support.faces import Face

from fastlock import ClientClosedError
from fastlock.embedded import Server

ROOT = Path(__file__).parent.parent
TERMS = {"timeout": LONG, "sleep": 0.01, "thread_local": False}

pytestmark = pytest.mark.usefixtures("no_leaks")


def of_lock(face: Face, server: Server) -> Any:
    return face.client(server.unix_url).lock(NAME, queue=False, **TERMS)


def of_client(face: Face, server: Server) -> Any:
    return face.client(server.unix_url, queue=False).lock(NAME, **TERMS)


def of_constructor(face: Face, server: Server) -> Any:
    client = face.module.Client(unix_socket_path=server.path, queue=False)
    face._clients.append(client)
    return client.lock(NAME, **TERMS)


def of_dropin(face: Face, server: Server) -> Any:
    kind = redis.asyncio.Redis if face.is_async else redis.Redis
    raw = kind(unix_socket_path=server.path)
    return raw.lock(NAME, lock_class=functools.partial(face.module.Lock, queue=False), **TERMS)


def looks(probe: redis.Redis) -> int:
    """How often somebody has asked when a lease ends, who looks from time to time."""
    return int(probe.info("commandstats").get("cmdstat_pttl", {"calls": 0})["calls"])


WAYS = pytest.mark.parametrize("make", [of_lock, of_client, of_constructor, of_dropin])


@WAYS
async def test_who_waits_without_a_queue_leaves_no_trace_and_finds_what_is_free(
    face: Face, server: Server, probe: redis.Redis, make: Callable[..., Any]
) -> None:
    """On all ways into a wait: with the lock's own terms, with those of a call, entered."""
    holder, lock = await held(face, face.client(server.unix_url)), make(face, server)
    for begin in (lock.acquire, lambda: lock.acquire(blocking_timeout=LONG), lambda: face.enter(lock)):
        token = probe.get(NAME)
        before = looks(probe)
        job = face.start(begin)
        await until(face, lambda before=before: looks(probe) >= before + 2, "two looks")
        assert probe.keys() == [NAME.encode()] and probe.get(NAME) == token, "no queue, and no mark on the holder"
        await face.get(holder.release())
        assert await job.get(SOON)
        await face.get(lock.release())
        assert await face.get(holder.acquire(blocking=False))
    await face.get(holder.release())
    stats = lock._transport.stats
    assert (stats.local_handovers, stats.remote_handovers, stats.waits) == (0, 0, 3)
    assert not lock._transport.queued_keys


@WAYS
async def test_what_is_let_go_is_free_for_those_of_redis_py(
    face: Face, server: Server, probe: redis.Redis, make: Callable[..., Any]
) -> None:
    """Also where others of the same client wait for it."""
    lock = make(face, server)
    assert await face.get(lock.acquire())
    client = lock._client
    before = looks(probe)
    waiting, job = wait_with(face, client, queue=False)
    await until(face, lambda: looks(probe) > before, "a look")
    await face.get(lock.release())
    assert not probe.exists(NAME)
    with redis.Redis(unix_socket_path=server.path) as raw, raw.lock(NAME, timeout=LONG, blocking=False):
        await face.get(client.close())
        with pytest.raises(ClientClosedError):
            await job.get(SOON)
    assert waiting.lease is None


async def test_each_lock_may_say_it_for_itself(face: Face, server: Server, probe: redis.Redis) -> None:
    client = face.client(server.unix_url, queue=False)
    holder = await held(face, client)
    lock, job = wait_with(face, client, queue=True)
    await queued(face, probe, 1)
    await face.get(holder.release())
    assert await job.get(SOON) is True
    await face.get(lock.release())
    assert not probe.exists(QUEUE)


async def test_strict_order_without_a_queue_is_refused(face: Face, server: Server, probe: redis.Redis) -> None:
    plain, moving = face.client(server.unix_url), face.client(server.unix_url, queue=False)
    for client, terms in ((plain, {"queue": False}), (moving, {}), (moving, {"queue": False})):
        with pytest.raises(ValueError, match=r"fair=True.*queue=False"):
            client.lock(NAME, fair=True, **terms)
        with pytest.raises(ValueError, match=r"fair=True.*queue=False"):
            client.locked(NAME, fair=True, **terms)(_asynchronous if face.is_async else _plain)
    assert moving.lock(NAME, fair=True, queue=True).fair
    assert plain._transport.stats.commands == moving._transport.stats.commands == 0


def _plain() -> None: ...


async def _asynchronous() -> None: ...


@pytest.mark.usefixtures("impl")
def test_the_program_that_measures_it_runs() -> None:
    command = [sys.executable, "-m", "tests.mixed", "--seconds", "0.2"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, text=True, capture_output=True, timeout=50)
    assert done.returncode == 0, done.stderr
    assert [line.count("grants") for line in done.stdout.splitlines()] == [3, 3, 3]
