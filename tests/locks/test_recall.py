"""A try of another process recalls what is kept, though nobody waits."""

from __future__ import annotations

import contextlib
import multiprocessing
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from support.apis import Api
from support.child_client import LONG, NAME, SOON, until
from support.faultproxy import FaultProxy

import fastlock
from fastlock._protocol.arguments import MAX_BYTES
from fastlock._transport import keeping
from fastlock.embedded import Server

pytestmark = pytest.mark.usefixtures("no_leaks", "no_waiters")
KEEP = 300.0  # seconds: longer than any test
SLOWLY = "local e = os.clock() + 0.005; while os.clock() < e do end; return redis.call('PUBLISH', ARGV[1], ARGV[2])"


def try_once(url: str) -> None:
    with fastlock.Client.from_url(url) as client:
        lock = client.lock(NAME, timeout=LONG, keep=KEEP, blocking=False)
        if acquired := lock.acquire():
            lock.release()
    sys.exit(acquired)


def tried_elsewhere(url: str) -> bool:
    """Whether a try of another process has acquired the name."""
    process = multiprocessing.get_context("spawn").Process(target=try_once, args=(url,))
    process.start()
    process.join(60)
    assert process.exitcode in (0, 1)
    return process.exitcode == 1


async def keep_once(api: Api, client: Any, name: str = NAME) -> None:
    """Have the client keep the name, by a lock of its own."""
    lock, queues = client.lock(name, timeout=LONG, keep=KEEP), client._transport.queues
    while name.encode() not in queues.kept:
        await api.get(lock.acquire())
        await api.get(lock.release())
        await until(api, lambda: queues.hears_recalls, "recalls are heard")


@pytest.mark.parametrize("held", [True, False])
async def test_a_try_that_does_not_wait_recalls_it(api: Api, server: Server, probe: redis.Redis, held: bool) -> None:
    client = api.client(server.unix_url)
    lock = client.lock(NAME, timeout=LONG, keep=KEEP, thread_local=False)
    queues, key = client._transport.queues, NAME.encode()

    async def keep() -> bool:
        await api.get(lock.acquire())
        await api.get(lock.release())
        return key in queues.kept

    while not await keep():
        await until(api, lambda: queues.hears_recalls, "recalls are heard")
    if held:
        await api.get(lock.acquire())
    other = client.lock(NAME, timeout=LONG, keep=KEEP, blocking=False)
    assert not held or await api.get(other.acquire()) is False
    assert client.get_stats()["recalls"] == 0, "a caller of the process recalls nothing"
    assert not tried_elsewhere(server.unix_url)
    await until(api, lambda: client.get_stats()["recalls"] == 1, "the recall")
    if held:
        assert probe.get(NAME) == lock.lease._raw_token, "nobody waits: it is not marked"
        await api.get(lock.release())
    await until(api, lambda: not probe.exists(NAME), "it is released")
    assert tried_elsewhere(server.unix_url)


@pytest.mark.parametrize("server", ["valkey"], indirect=True)
async def test_the_longest_name_is_recalled(api: Api, server: Server) -> None:
    """The message is longer than any other reply to a lock command."""
    name = "x" * MAX_BYTES
    client, other = api.client(server.unix_url), api.client(server.unix_url)
    theirs = other.lock(name, timeout=LONG, thread_local=False)
    await keep_once(api, client, name)
    assert await api.start(theirs.acquire).get(SOON) is True
    await api.get(theirs.release())


@pytest.mark.parametrize("api", ["threads"], indirect=True)
async def test_a_connection_that_had_lasted_is_replaced_at_once(
    api: Api, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is to be released waits for it, and others for that."""
    monkeypatch.setattr(keeping, "LASTING", 0.0)
    monkeypatch.setattr(keeping, "LEAST_PAUSE", 1e4)
    client = api.client(proxy.url)
    queues, lock = client._transport.queues, client.lock(NAME, timeout=LONG, keep=KEEP)
    await api.get(lock.acquire())
    await api.get(lock.release())
    await until(api, lambda: queues.hears_recalls, "recalls are heard")
    before = proxy.accepted
    proxy.cut()
    await until(api, lambda: proxy.accepted > before and queues.hears_recalls, "the next connection")


@contextlib.contextmanager
def recall(probe: redis.Redis, key: bytes) -> Iterator[None]:
    """Recall the lease of a name, as another client would, without waiting for an answer, which lets others run; and so
    slowly that none hears it as it is sent. What follows runs without a switch to another thread, unless it sleeps."""
    token, interval = probe.get(key), sys.getswitchinterval()
    assert token is not None and token.startswith(b"fk:")
    connection = probe.connection_pool.get_connection()
    sys.setswitchinterval(1e3)
    try:
        connection.send_command("EVAL", SLOWLY, 0, b"fastlock:keep:" + token[3:19], token + key)
        yield
    finally:
        sys.setswitchinterval(interval)
        connection.disconnect()
        probe.connection_pool.release(connection)


@pytest.mark.parametrize("server", ["valkey"], indirect=True)
@pytest.mark.parametrize("api", ["threads"], indirect=True)
async def test_a_thread_that_does_nothing_but_take_what_is_kept_hears_a_recall(
    api: Api, server: Server, probe: redis.Redis
) -> None:
    client = api.client(server.unix_url)
    lock, stats = client.lock(NAME, timeout=LONG, keep=KEEP), client._transport.queues.stats
    await keep_once(api, client)
    with recall(probe, NAME.encode()):
        end = time.monotonic() + SOON
        while not stats.recalls and time.monotonic() < end:
            lock.acquire()
            lock.release()
    assert stats.recalls


@pytest.mark.parametrize("server", ["valkey"], indirect=True)
@pytest.mark.parametrize("api", ["threads"], indirect=True)
@pytest.mark.parametrize("held", [True, False])
async def test_a_recall_that_came_while_a_thread_worked_is_heard_before_it_goes_on(
    api: Api, server: Server, probe: redis.Redis, held: bool
) -> None:
    """Neither is the lease kept once more, nor taken."""
    client = api.client(server.unix_url)
    lock, queues, key = client.lock(NAME, timeout=LONG, keep=KEEP), client._transport.queues, NAME.encode()
    stats = queues.stats

    async def attempt(seconds: float) -> bool:
        """Whether the recall was heard, after working for so long, in which it may not have come."""
        while (queue := queues.kept.get(key)) is None or not queue.keep_until:  # it is recalled just now
            lock.acquire()
            lock.release()
        taken, recalls = stats.kept_acquires + held, stats.recalls
        if held:
            lock.acquire()
        with recall(probe, key):
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                pass
            before = stats.recalls - recalls
            if not held:
                lock.acquire()
            lock.release()
            heard = not before and key not in queues.kept and stats.kept_acquires == taken
        await until(api, lambda: stats.recalls > recalls, "it is heard, if late, and concerns no later attempt")
        return heard

    await keep_once(api, client)
    heard, milliseconds = False, 8
    while not heard and milliseconds < 50:
        heard, milliseconds = await attempt(milliseconds / 1000), milliseconds + 1
    assert heard
