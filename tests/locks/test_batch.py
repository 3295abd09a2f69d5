"""Batches of names: leases in order, without waiting, for all names that are free; after an error nothing is held."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import redis
from support.apis import Api
from support.faultproxy import FaultProxy

import fastlock
from fastlock._protocol import batch
from fastlock._protocol.lease import ENDED
from fastlock.embedded import Server

pytestmark = pytest.mark.usefixtures("no_leaks", "impl")


async def test_leases_come_in_the_order_of_the_names(api: Api, server: Server, probe: redis.Redis) -> None:
    client = api.client(server.unix_url)
    probe.set("b", "somebody else", px=60_000)
    names = ["c", b"b", "a", memoryview(b"d")]
    leases = await api.get(client.acquire_many(names, timeout=7))
    assert [lease and lease.name for lease in leases] == ["c", None, "a", names[3]]
    assert [lease.name for lease in leases if lease] == [names[0], names[2], names[3]]
    for lease in (leases[0], leases[2], leases[3]):
        assert type(lease) is fastlock.Lease and lease.valid and 0 < lease.remaining <= 7 and lease.fence is None
        assert probe.get(lease._key) == lease.token and 0 < probe.pttl(lease._key) <= 7_000
    assert await api.get(client.release_many(leases)) == [True, False, True, True]
    assert probe.keys() == [b"b"] and probe.get("b") == b"somebody else"
    assert await api.get(client.release_many(leases)) == [False] * 4
    probe.delete("b")


async def test_names_may_come_from_any_iterable_and_without_end(api: Api, server: Server, probe: redis.Redis) -> None:
    client = api.client(server.unix_url)
    leases = await api.get(client.acquire_many((f"n{i}" for i in range(3)), timeout=None))
    assert [probe.pttl(f"n{i}") for i in range(3)] == [-1] * 3 and all(lease.valid for lease in leases)
    assert await api.get(client.release_many(iter(leases))) == [True] * 3


async def test_no_names_send_nothing(api: Api, server: Server, probe: redis.Redis) -> None:
    client = api.client(server.unix_url, client_name="idle")
    assert await api.get(client.acquire_many([])) == [] and await api.get(client.release_many([])) == []
    assert await api.get(client.release_many([None, None])) == [False, False]
    assert "idle" not in [each["name"] for each in probe.client_list()], "not even a connection"


@pytest.mark.parametrize("count", [1, 2, 100, 101, 500, 5_000])
async def test_many_names_at_once(api: Api, server: Server, probe: redis.Redis, count: int) -> None:
    client, names = api.client(server.unix_url), [f"name:{i}" for i in range(count)]
    probe.script_flush()
    probe.set(names[count // 2], "somebody else")
    held = count // 2
    leases = await api.get(client.acquire_many(names))
    assert [i for i, lease in enumerate(leases) if lease is None] == [held] and len(leases) == count
    assert probe.dbsize() == count
    assert await api.get(client.acquire_many(names)) == [None] * count
    assert client.get_stats()["reconnects"] == 0, "its replies have to make sense"
    probe.script_flush()
    released = await api.get(client.release_many(leases))
    assert released == [i != held for i in range(count)] and probe.keys() == [names[held].encode()]
    probe.delete(names[held])


async def test_a_batch_never_waits(api: Api, server: Server, proxy: FaultProxy, probe: redis.Redis) -> None:
    client = api.client(proxy.url)
    for name in ("a", "b"):
        probe.set(name, "somebody else", px=60_000)
    assert await api.get(client.acquire_many(["a", "b"])) == [None, None]
    assert sum(b"a" in words for words in proxy.commands) == 1, "a held name must be requested once"
    probe.delete("a", "b")


async def test_after_one_error_reply_nothing_is_held(api: Api, server: Server, probe: redis.Redis) -> None:
    client = api.client(server.unix_url)
    names = [f"n{i}" for i in range(20)]
    probe.rpush("n7", "no lock at all")
    probe.set("n9", "somebody else", px=60_000)
    with pytest.raises(fastlock.LockKindError, match="'n7': its name is in use by something that is"):
        await api.get(client.acquire_many(names))
    assert await api.get(client.lock("n19").locked()) is False  # behind the undo on the same connection
    assert sorted(probe.keys()) == [b"n7", b"n9"] and probe.get("n9") == b"somebody else"
    probe.delete("n7")
    leases = await api.get(client.acquire_many(names))
    assert [lease is None for lease in leases] == [i == 9 for i in range(20)]
    await api.get(client.release_many(leases))
    probe.delete("n9")


async def test_release_many_tells_the_outcome_of_each(api: Api, server: Server, probe: redis.Redis) -> None:
    client = api.client(server.unix_url)
    leases = await api.get(client.acquire_many(["kept", "deleted", "taken", "a list", "extended"], timeout=30))
    (brief,) = await api.get(client.acquire_many(["brief"], timeout=0.15))
    probe.delete("deleted", "a list")
    probe.set("taken", "somebody else")
    probe.rpush("a list", "no lock at all")
    time.sleep(brief.remaining)
    while probe.exists("brief"):
        time.sleep(0.001)
    again = await api.get(client.acquire_many(["brief"]))
    released = await api.get(client.release_many([None, *leases, brief]))
    assert released == [False, True, False, False, False, True, False]
    assert sorted(probe.keys()) == [b"a list", b"brief", b"taken"], (
        "an ended lease must not release another client's lock"
    )
    assert probe.get("taken") == b"somebody else" and probe.get("brief") == again[0].token
    assert await api.get(client.release_many(again)) == [True]
    probe.delete("a list", "taken")


async def test_losses_of_a_batch_are_logged_in_one_line(
    api: Api, server: Server, probe: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    client = api.client(server.unix_url)
    leases = await api.get(client.acquire_many([f"sku:{i}" for i in range(20)]))
    probe.delete(*(f"sku:{i}" for i in range(1, 8)))
    assert (await api.get(client.release_many(leases))).count(False) == 7
    (record,) = caplog.records
    text = record.getMessage()
    assert text.startswith(
        "7 locks were lost before they were released, 'sku:1', 'sku:2', 'sku:3', 'sku:4', 'sku:5' ...: "
    )
    assert client.get_stats()["losses"] == 7


async def test_waiters_for_a_name_of_a_batch_get_it(api: Api, server: Server, probe: redis.Redis) -> None:
    """The name's token is marked by then: the plain delete does not release it, and would not hand over to waiters."""
    client, other = api.client(server.unix_url), api.client(server.url)
    leases = await api.get(client.acquire_many(["a", "b", "c"]))
    lock = other.lock("b", blocking_timeout=20)

    async def wait() -> bool:
        got: bool = await api.get(lock.acquire())
        await api.get(lock.release())
        return got

    waiting = api.start(wait)
    end = time.monotonic() + 20
    while probe.get("b") != b"fl+" + leases[1].token[3:]:
        assert time.monotonic() < end, "the token was never marked"
        await api.checkpoint()
    assert await api.get(client.release_many(leases)) == [True] * 3
    assert await waiting.get() is True and probe.keys() == []


def test_a_reply_with_its_own_token_is_checked_again() -> None:
    """After a lost reply the key may hold the batch's token, plain or contended: either way the batch has the name."""
    token, ours = b"fl:" + b"a" * 32, b"fl+" + b"a" * 32
    keys = [b"%d" % n for n in range(6)]
    replies = [None, token, ours, b"fl+" + b"b" * 32, 5, b"fl:" + b"b" * 32]
    leases, odd = batch.granted([str(n) for n in range(6)], keys, token, 1.0, 5.0, replies)
    assert leases[0]._since == 1.0
    assert [lease is not None for lease in leases] == [True] + [False] * 5 and odd == [1, 2, 4]
    given = b"x" * 35
    assert batch.granted(["x"], [b"x"], given, 1.0, 5.0, [b"fl+" + given[3:]]) == ([None], []), (
        "such a token cannot be marked"
    )


def test_what_the_deletes_did_not_release_is_checked_again() -> None:
    """A reply of 0 is checked too: a waiter may have marked the token."""
    leases = [fastlock.Lease("x", b"x", b"t", 5.0) for _ in range(5)]
    released = [True] + [False] * 6
    assert batch.ended(leases, [1, 0, None, b"1", ValueError()], [2, 3, 4, 5, 6], released) == [3, 4, 5, 6]
    assert released == [True, False, True, False, False, False, False]
    assert [lease._deadline for lease in leases] == [ENDED] + [5.0] * 4


def test_a_released_lease_is_not_released_again() -> None:
    """The lease may have been handed over to another caller of this client, which holds by the same token."""
    over, held = fastlock.Lease("x", b"x", b"t", ENDED), fastlock.Lease("y", b"y", b"t", 5.0)
    given: list[Any] = []
    mine = batch.owned([over, held, None], given)
    assert given == [over, held, None] and mine == [held]
    assert batch.merge(given, mine, [True]) == [False, True, False]


def test_a_name_given_twice_is_refused(impl: str) -> None:
    with pytest.raises(ValueError, match="twice, as 'sku:7'"):
        fastlock.Client().acquire_many(["a", "sku:7", "b", b"sku:7"])


async def test_a_lease_given_twice_is_released_once(api: Api, server: Server, probe: redis.Redis) -> None:
    client = api.client(server.unix_url)
    (a, b) = await api.get(client.acquire_many(["a", "b"]))
    released = await api.get(client.release_many([a, b, a]))
    assert released[1] is True and (released[0] or released[2]), "it was released, and no result says so"
    assert probe.keys() == []


async def test_leases_of_locks_and_of_batches_are_interchangeable(api: Api, server: Server, probe: redis.Redis) -> None:
    client, other = api.client(server.unix_url), api.client(server.url)
    lock = client.lock("a")
    await api.get(lock.acquire())
    leases = await api.get(other.acquire_many(["a", "b"]))
    assert leases[0] is None and await api.get(client.lock("b").acquire(blocking=False)) is False
    assert await api.get(other.release_many([lock.lease, leases[1]])) == [True, True]
    with pytest.raises(fastlock.LockNotOwnedError, match="or another caller released it"):
        await api.get(lock.release())
    assert probe.keys() == []


async def test_each_name_goes_to_one_of_several_batches(api: Api, server: Server, probe: redis.Redis) -> None:
    chance = random.Random(11)
    clients = [api.client(server.unix_url) for _ in range(4)]
    names = [f"n{i}" for i in range(50)]
    for _ in range(5):
        orders = [chance.sample(names, len(names)) for _ in clients]
        calls: list[Any] = [
            lambda client=client, order=order: client.acquire_many(order)
            for client, order in zip(clients, orders, strict=True)
        ]
        batches = await api.together(calls)
        won = [lease.name for batch in batches for lease in batch if lease is not None]
        assert sorted(won) == sorted(names)
        for client, leases in zip(clients, batches, strict=True):
            assert await api.get(client.release_many(leases)) == [lease is not None for lease in leases]
        assert probe.dbsize() == 0
