"""Kept leases, and others of the same client who want the name: they need no recall, and none of them is forgotten."""

from __future__ import annotations

import asyncio
import random
import time
from functools import partial
from typing import Any

import pytest
from support.apis import Api
from support.child_client import LONG, NAME, SOON, until

from fastlock.embedded import Server

pytestmark = [
    pytest.mark.usefixtures("no_leaks", "no_waiters", "no_recheck"),
    pytest.mark.parametrize("server", ["valkey", "floor"], indirect=True),
]
KEEP = 300.0  # seconds: longer than any test
SHORT = 0.005


async def hearing(api: Api, client: Any) -> None:
    """Make the client hear recalls, and have a push connection."""
    lock = client.lock("other", timeout=LONG, keep=SHORT)
    fair = client.lock("other", timeout=LONG, fair=True)
    while not client._transport.queues.hears_recalls:
        for each in (lock, fair):
            await api.get(each.acquire())
            await api.get(each.release())


@pytest.mark.parametrize("settings", [{"fair": True}, {"fence": True}, {}], ids=["fair", "fence", "plain"])
async def test_who_does_not_keep_gets_the_name_by_no_recall(
    api: Api, server: Server, no_leaks: Any, settings: dict[str, Any]
) -> None:
    no_leaks.allow("fastlock:fence:*")
    client = api.client(server.unix_url)
    await hearing(api, client)
    lock = client.lock(NAME, timeout=LONG, keep=KEEP, thread_local=False)
    other = client.lock(NAME, timeout=LONG, thread_local=False, **settings)
    for _ in range(3):
        await api.get(lock.acquire())
        await api.get(lock.release())
        assert NAME.encode() in client._transport.queues.kept
        await api.get(other.acquire())
        await api.get(other.release())
    found = client.get_stats()
    assert (found["recalls"], found["waits"]) == (0, 0)


@pytest.mark.parametrize("keeping", ["all", "half"])
async def test_nobody_of_a_client_is_forgotten(api: Api, server: Server, keeping: str) -> None:
    """Leases are kept so shortly that acquires find the name held by their own client, which keeps it by then."""
    client = api.client(server.unix_url)
    await hearing(api, client)
    inside = []

    async def work(number: int) -> None:
        rng = random.Random(number)
        keep = SHORT if keeping == "all" or number % 2 else None
        lock = client.lock(NAME, timeout=LONG, keep=keep, thread_local=False)
        for turn in range(2000):
            if turn >= 200 and client.get_stats()["kept_acquires"]:
                break
            await api.get(lock.acquire())
            inside.append(number)
            assert len(inside) == 1
            inside.pop()
            await api.get(lock.release())
            # In which the name is kept, by nobody held; on a slow machine somebody always waits, unless it is longer
            if pause := rng.choice((0, 0, 0.0005, 0.002) if turn < 200 else (0, 0, 0.02)):
                await api.get(asyncio.sleep(pause) if api.is_async else time.sleep(pause))

    jobs = [api.start(partial(work, number)) for number in range(8)]
    for job in jobs:
        await job.get(SOON)
    found = client.get_stats()
    assert found["recalls"] == 0 and found["kept_acquires"] > 0
    await until(api, lambda: not client._transport.queues.kept, "nothing is kept")
