"""A try of another process recalls what is kept, though nobody waits."""

from __future__ import annotations

import multiprocessing
import sys
import time

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
    lock, theirs = client.lock(name, timeout=LONG, keep=KEEP), other.lock(name, timeout=LONG, thread_local=False)
    while name.encode() not in client._transport.queues.kept:
        await api.get(lock.acquire())
        await api.get(lock.release())
        await until(api, lambda: client._transport.queues.hears_recalls, "recalls are heard")
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


@pytest.mark.parametrize("server", ["valkey"], indirect=True)
@pytest.mark.parametrize("api", ["threads"], indirect=True)
async def test_a_thread_that_only_takes_what_is_kept_lets_others_run(api: Api, server: Server) -> None:
    """Else who hears recalls would wait until the interpreter makes it give way, which is never here."""
    client, other = api.client(server.unix_url), api.client(server.unix_url)
    lock, theirs = client.lock(NAME, timeout=LONG, keep=KEEP), other.lock(NAME, timeout=LONG)
    while NAME.encode() not in client._transport.queues.kept:
        await api.get(lock.acquire())
        await api.get(lock.release())
        await until(api, lambda: client._transport.queues.hears_recalls, "recalls are heard")
    recalled, queues = [], client._transport.queues

    def take() -> None:
        kept, until = queues.stats, time.monotonic() + SOON / 2
        while not recalled and time.monotonic() < until:
            lock.acquire()
            lock.release()
            if kept.recalls:
                recalled.append(time.monotonic() < until)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e3)
    try:
        job = api.start(take)
        assert theirs.acquire(blocking_timeout=SOON)
        theirs.release()
    finally:
        sys.setswitchinterval(interval)
    await job.get(SOON)
    assert recalled == [True]
