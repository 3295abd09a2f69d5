"""`client.refill` on real servers: a value is loaded by one caller, the others wait for it, or get the old one."""

from __future__ import annotations

import asyncio
import logging
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import redis
from support.apis import Api
from support.child_client import NAME, SOON, until, waits
from support.child_helper import ChildHelper
from support.counted import Counted, after_renewals, after_waits
from support.faultproxy import FaultProxy, swallow

import fastlock
from fastlock._limits import MAX_REPLY
from fastlock.embedded import Server

LOCK, VERSION = "fastlock:load:{sku}", "fastlock:version:{sku}"
TTL, STALE = 60, 30
threads_only = pytest.mark.parametrize("api", ["threads"], indirect=True)
one_server = pytest.mark.parametrize("server", ["valkey"], indirect=True)  # where its kind makes no difference


@pytest.fixture(autouse=True)
def values_stay(no_leaks: Any) -> None:
    no_leaks.allow(f"{NAME}*", "fastlock:version:*")


async def test_one_loads_and_all_others_wait_for_its_value(api: Api, server: Server, probe: redis.Redis) -> None:
    clients = [api.client(server.url) for _ in range(2)]
    loader = Counted(api, after_waits(api, clients, 2))
    calls = [lambda client=client: client.refill(NAME, loader.native, TTL) for client in clients * 5]
    assert await api.together(calls) == [1] * 10
    assert (loader.calls, loader.most) == (1, 1)
    assert probe.get(NAME) == b"1" and TTL - 20 < probe.ttl(NAME) <= TTL and not probe.exists(LOCK)


@pytest.mark.parametrize(("stale", "commands"), [(0, 1), (STALE, 2)])
async def test_a_fresh_value_takes_one_round_trip(api: Api, server: Server, stale: float, commands: int) -> None:
    client, loader = api.client(server.url), Counted(api)
    for _ in range(2):
        await api.get(client.refill(NAME, loader.native, TTL, stale=stale))
    before = client.get_stats()
    for _ in range(10):
        assert await api.get(client.refill(NAME, loader.native, TTL, stale=stale)) == 1
    after = client.get_stats()
    assert after["commands"] == before["commands"] + 10 * commands and after["flushes"] <= before["flushes"] + 10
    assert after["acquires"] == before["acquires"]


async def test_callers_of_one_client_pass_the_value_on_without_a_command(api: Api, server: Server) -> None:
    client, count = api.client(server.url), 10
    loader = Counted(api, after_waits(api, [client], count - 1))
    commands: list[int] = []

    async def call() -> Any:
        value = await api.get(client.refill(NAME, loader.native, TTL))
        commands.append(client.get_stats()["commands"])
        return value

    assert await api.together([call] * count) == [1] * count
    assert commands[-1] - commands[0] < 4 * count, "after the first has it, the others read it, and no more"


async def test_values_of_different_keys_are_not_mixed_up(api: Api, server: Server) -> None:
    clients = [api.client(server.url) for _ in range(2)]

    def call(client: Any, number: int) -> Callable[[], Any]:
        async def load() -> str:
            await api.checkpoint()
            return f"of {number}"

        return lambda: client.refill(f"{NAME}{number}", api.native(load), TTL, stale=STALE * (number % 2))

    calls = [call(clients[i % 2], i % 7) for i in range(28)]
    assert await api.together(calls) == [f"of {i % 7}" for i in range(28)]


async def test_an_expired_value_is_loaded_anew(api: Api, server: Server, probe: redis.Redis) -> None:
    client, loader = api.client(server.url), Counted(api)
    assert await api.get(client.refill(NAME, loader.native, 0.01)) == 1
    await until(api, lambda: not probe.exists(NAME), "the end of the value")
    assert await api.get(client.refill(NAME, loader.native, TTL)) == 2


async def test_all_get_the_old_value_at_once_while_one_loads(api: Api, server: Server, probe: redis.Redis) -> None:
    client, other = api.client(server.url), api.client(server.url)
    probe.set(NAME, b'"old"', px=STALE * 1000 - 1)
    got: list[Any] = []

    async def ask_others() -> str:
        for each in (client, other) * 3:
            got.append(await api.start(lambda each=each: each.refill(NAME, fails, TTL, stale=STALE)).get(SOON))
        return "new"

    fails = api.native(Counted(api, lambda: 1 / 0)._call)
    assert await api.get(client.refill(NAME, api.native(ask_others), TTL, stale=STALE)) == "new"
    assert got == ["old"] * 6
    assert await api.get(other.refill(NAME, fails, TTL, stale=STALE)) == "new"
    assert TTL + STALE - 20 < probe.ttl(NAME) <= TTL + STALE


async def test_of_callers_that_find_an_old_value_one_loads(api: Api, server: Server, probe: redis.Redis) -> None:
    clients = [api.client(server.url) for _ in range(2)]
    for _ in range(5):
        probe.set(NAME, b"0", px=STALE * 1000 - 1)
        loader = Counted(api)
        load = loader.native
        calls = [lambda c=client, load=load: c.refill(NAME, load, TTL, stale=STALE) for client in clients * 4]
        results = await api.together(calls)
        assert loader.calls == 1 and set(results) <= {0, 1} and 1 in results


async def test_an_old_value_is_fresh_to_who_serves_none(api: Api, server: Server, probe: redis.Redis) -> None:
    client, loader = api.client(server.url), Counted(api)
    probe.set(NAME, b"0", px=1000)
    assert await api.get(client.refill(NAME, loader.native, TTL)) == 0
    probe.set(NAME, b"0")  # by somebody else, without an end
    assert await api.get(client.refill(NAME, loader.native, TTL, stale=STALE)) == 0


async def test_an_old_value_serves_where_the_loader_fails(
    api: Api, server: Server, probe: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    client, loader = api.client(server.url), Counted(api)
    probe.set(NAME, b'"old"', px=STALE * 1000 - 1)
    loader.errors = [KeyError("the database"), KeyError("is away")]
    for _ in range(2):
        assert await api.get(client.refill(NAME, loader.native, TTL, stale=STALE)) == "old"
    assert [each.message for each in caplog.records] == ["loading 'sku' failed, and its old value is used"] * 2
    assert caplog.records[0].levelno == logging.WARNING and caplog.records[0].exc_info
    assert await api.get(client.refill(NAME, loader.native, TTL, stale=STALE)) == 3


async def test_an_error_goes_to_its_caller_and_the_next_one_loads(api: Api, server: Server) -> None:
    client = api.client(server.url)
    loader = Counted(api, after_waits(api, [client], 3))
    loader.errors = [KeyError("one"), KeyError("two")]
    results = await api.together([lambda: client.refill(NAME, loader.native, TTL)] * 4)
    failed = [each for each in results if isinstance(each, KeyError)]
    assert len(failed) == 2 and [each for each in results if each not in failed] == [3, 3]
    assert (loader.calls, loader.most) == (3, 1)


async def test_the_wait_for_a_value_may_be_limited(api: Api, server: Server) -> None:
    client, other, over = api.client(server.url), api.client(server.url), threading.Event()

    async def hold() -> None:
        await until(api, over.is_set, "the end")

    first = api.start(lambda: client.refill(NAME, Counted(api, api.native(hold)).native, TTL))
    await until(api, lambda: client.get_stats()["acquires"], "a loader")
    with pytest.raises(fastlock.LockNotAcquiredError, match=r"'sku' within 0\.05 seconds"):
        await api.get(other.refill(NAME, Counted(api).native, TTL, blocking_timeout=0.05))
    over.set()
    assert await first.get() == 1


@one_server
async def test_a_loader_that_is_killed_is_replaced(api: Api, server: Server) -> None:
    clients = [api.client(server.url) for _ in range(2)]
    loader = Counted(api)
    with ChildHelper(api, server.url, "refill", timeout=0.5) as child:
        await child.wait_for_line("running")
        jobs = [api.start(lambda client=client: client.refill(NAME, loader.native, TTL)) for client in clients * 2]
        for client in clients:
            await waits(api, client, 1)
        assert loader.calls == 0
        child.kill()
        assert [await job.get(SOON) for job in jobs] == [1] * 4
    assert (loader.calls, loader.most) == (1, 1)


async def test_who_lost_the_lock_overwrites_no_newer_value(api: Api, server: Server, probe: redis.Redis) -> None:
    client, other = api.client(server.url), api.client(server.url)
    theirs: list[Any] = []

    async def lose() -> str:
        probe.delete(LOCK)
        theirs.append(await api.get(other.refill(NAME, Counted(api).native, TTL)))
        return "old"

    assert await api.get(client.refill(NAME, api.native(lose), TTL)) == "old"
    assert theirs == [1] and probe.get(NAME) == b"1" and client.get_stats()["losses"] == 1


@pytest.mark.parametrize("stale", [0, STALE])
async def test_a_value_that_was_invalidated_while_it_was_loaded_is_not_kept(
    api: Api, server: Server, probe: redis.Redis, stale: float
) -> None:
    client, other = api.client(server.url), api.client(server.url)
    later: list[Any] = []

    async def load() -> str:
        await api.get(other.invalidate(NAME))
        later.append(api.start(lambda: client.refill(NAME, Counted(api).native, TTL, stale=stale)))
        await waits(api, client, 1)
        return "from before"

    for _ in range(2):
        probe.set(NAME, b'"old"', px=1)
        await until(api, lambda: not probe.exists(NAME), "its end")
        assert await api.get(client.refill(NAME, api.native(load), TTL, stale=stale)) == "from before"
        assert await later.pop().get() == 1 and probe.get(NAME) == b"1", "who waited loads it anew"
        assert await api.get(other.invalidate(NAME)) is True and not probe.exists(NAME)
    assert await api.get(other.invalidate(NAME)) is False
    assert 0 < probe.ttl(VERSION) <= 86_400


async def test_invalidating_leaves_nothing_where_nobody_loads(api: Api, server: Server, probe: redis.Redis) -> None:
    client = api.client(server.url)
    assert await api.get(client.refill(NAME, Counted(api).native, TTL)) == 1
    assert await api.get(client.invalidate(NAME)) is True and probe.keys() == []


async def test_a_lost_reply_changes_nothing(api: Api, proxy: FaultProxy, probe: redis.Redis) -> None:
    client = api.client(proxy.url)
    armed: list[Any] = []
    loader = Counted(api, lambda: armed.append(proxy.arm(swallow(), command="EVALSHA")))
    assert await api.get(client.refill(NAME, loader.native, TTL)) == 1
    assert armed[0].fired and loader.calls == 1 and probe.get(NAME) == b"1"


@one_server
async def test_a_value_that_could_not_be_kept_is_returned(
    api: Api, proxy: FaultProxy, server: Server, no_leaks: Any, caplog: pytest.LogCaptureFixture
) -> None:
    client = api.client(proxy.url, connect_timeout=0.3, reply_timeout=0.3)

    def fail() -> None:
        proxy.refuse()
        proxy.cut()

    assert await api.get(client.refill(NAME, Counted(api, fail).native, TTL)) == 1
    assert any("was loaded, and could not be kept" in each.message for each in caplog.records)
    proxy.admit()
    no_leaks.allow(LOCK)  # its lease ends by itself
    assert await api.get(api.client(server.url).invalidate(NAME)) is False


@pytest.mark.parametrize("size", [0, MAX_REPLY - 2, MAX_REPLY - 1, 5 * MAX_REPLY + 1])
@pytest.mark.parametrize("stale", [0, STALE])
async def test_values_of_any_length(api: Api, server: Server, probe: redis.Redis, size: int, stale: float) -> None:
    """Longer than the longest reply to a lock's commands, too."""
    client, other = api.client(server.url), api.client(server.url)
    text = "".join(chr(97 + i % 26) for i in range(size))

    async def load() -> str:
        return text

    assert await api.get(client.refill(NAME, api.native(load), TTL, stale=stale)) == text
    assert await api.get(other.refill(NAME, Counted(api).native, TTL, stale=stale)) == text
    assert probe.get(NAME) == f'"{text}"'.encode()


async def test_a_long_value_that_is_replaced_while_it_is_read_is_read_as_one(
    api: Api, proxy: FaultProxy, probe: redis.Redis
) -> None:
    client = api.client(proxy.url)
    texts = [letter * (3 * MAX_REPLY) for letter in "abc"]
    probe.set(NAME, f'"{texts[0]}"')
    held = proxy.arm(swallow(), command="EXEC")  # what was read before is lost, and by then the value is another
    job = api.start(lambda: client.refill(NAME, Counted(api).native, TTL))
    await until(api, lambda: held.fired, "the first reading")
    probe.set(NAME, f'"{texts[1]}"')
    assert await job.get() in texts[:2]
    done = threading.Event()

    def replace() -> None:
        number = 0
        while not done.is_set():
            number += 1
            probe.set(NAME, f'"{texts[number % 3]}"')

    writer = threading.Thread(target=replace)
    writer.start()
    try:
        for _ in range(20):
            assert await api.get(client.refill(NAME, Counted(api).native, TTL)) in [*texts, 1]
    finally:
        done.set()
        writer.join()


async def test_what_cannot_be_read_is_loaded_anew(
    api: Api, server: Server, probe: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    client, loader = api.client(server.url), Counted(api)
    for number, rubbish in enumerate((b"", b"\xff{", b"[1", pickle.dumps(1)), 1):
        probe.set(NAME, rubbish, ex=TTL)
        assert await api.get(client.refill(NAME, loader.native, TTL, stale=STALE * (number % 2))) == number
    assert probe.get(NAME) == b"4" and "cannot be read" in caplog.records[0].message


async def test_a_key_of_another_type_is_not_overwritten(api: Api, server: Server, probe: redis.Redis) -> None:
    client = api.client(server.url)
    probe.rpush(NAME, "theirs")
    for stale in (0, STALE):
        with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
            await api.get(client.refill(NAME, Counted(api).native, TTL, stale=stale))
    assert probe.lrange(NAME, 0, -1) == [b"theirs"]


async def test_values_in_another_format(api: Api, server: Server) -> None:
    client, other = api.client(server.url), api.client(server.url)

    async def load() -> Any:
        return {(1, 2): {3}}

    for each in (client, other):
        settings: Any = {"dumps": pickle.dumps, "loads": pickle.loads}
        assert await api.get(each.refill(NAME, api.native(load), TTL, **settings)) == {(1, 2): {3}}


async def test_each_caller_gets_a_value_of_its_own(api: Api, server: Server) -> None:
    client = api.client(server.url)

    async def load() -> list[int]:
        await api.get(until(api, lambda: client.get_stats()["waits"] >= 3, "waiters"))
        return [1]

    results = await api.together([lambda: client.refill(NAME, api.native(load), TTL)] * 4)
    results[0].append(2)
    assert results[1:] == [[1]] * 3


async def test_a_decorated_loader(api: Api, server: Server, probe: redis.Redis) -> None:
    client, calls = api.client(server.url), []

    async def user(number: int) -> dict[str, int]:
        """A user."""
        calls.append(number)
        return {"id": number}

    cached = client.refill("sku:{number}", ttl=TTL, stale=STALE)(api.native(user))
    assert (cached.__name__, cached.__doc__) == ("user", "A user.")
    for _ in range(2):
        assert [await api.get(cached(1)), await api.get(cached(number=2))] == [{"id": 1}, {"id": 2}]
    assert calls == [1, 2] and probe.get("sku:1") == b'{"id":1}'


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"ttl": None}, TypeError, "ttl"),
    ({"ttl": 0}, ValueError, "ttl"),
    ({"ttl": -1}, ValueError, "ttl"),
    ({"ttl": True}, TypeError, "ttl"),
    ({"loader": 60}, TypeError, "function"),
    ({"key": ""}, ValueError, "key must"),
    ({"key": "fastlock:x"}, ValueError, "key must"),
    ({"stale": -1}, ValueError, "stale"),
    ({"stale": None}, TypeError, "stale"),
    ({"timeout": None}, ValueError, "timeout"),
    ({"blocking_timeout": -1}, ValueError, "blocking_timeout"),
    ({"loads": pickle.loads}, ValueError, "loads"),
]


@one_server
@pytest.mark.parametrize(("given", "error", "named"), WRONG)
async def test_arguments_that_make_no_sense(api: Api, server: Server, given: Any, error: Any, named: str) -> None:
    client, loader = api.client(server.url), Counted(api)
    with pytest.raises(error, match=named):
        await api.get(client.refill(**{"key": NAME, "loader": loader.native, "ttl": TTL, **given}))
    assert loader.calls == 0 and client.get_stats()["commands"] == 0


@pytest.mark.parametrize("old", [False, True])
async def test_a_value_that_json_cannot_encode(api: Api, server: Server, probe: redis.Redis, old: bool) -> None:
    """It is no failure to load, for which an old value would serve."""
    client = api.client(server.url)
    if old:
        probe.set(NAME, b"0", px=1000)

    async def load() -> Any:
        return {1}

    with pytest.raises(TypeError, match=r"'sku' cannot be kept as JSON.*dumps="):
        await api.get(client.refill(NAME, api.native(load), TTL, stale=STALE))
    assert not probe.exists(LOCK)


@threads_only
async def test_a_loader_that_is_to_be_awaited_is_refused(api: Api, server: Server) -> None:
    client = api.client(server.url)

    async def load() -> int:
        return 1

    for call in (lambda: client.refill(NAME, load, TTL), lambda: client.refill(NAME, ttl=TTL)(load)):
        with pytest.raises(TypeError, match=r"load is async: give it to a fastlock\.asyncio\.Client"):
            call()
    with pytest.raises(TypeError, match="returned a coroutine"):
        client.refill(NAME, lambda: load(), TTL)


async def test_no_value_takes_the_place_of_a_lock(api: Api, server: Server, probe: redis.Redis) -> None:
    client, loader = api.client(server.url), Counted(api)
    for lock in (client.lock(NAME), client.semaphore(NAME, 2), client.rw_lock(NAME).write):
        async with api.within(lock) as lease:
            for call in (lambda: client.refill(NAME, loader.native, ttl=5), lambda: client.invalidate(NAME)):
                with pytest.raises((fastlock.LockKindError, redis.exceptions.ResponseError), match=r"holds|WRONGTYPE"):
                    await api.get(call())
            assert lease.valid and await api.get(lock.owned())


@one_server
async def test_the_lock_is_renewed_while_the_function_runs(
    api: Api, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = api.client(server.url)
    function = Counted(api, after_renewals(api, client, monkeypatch))
    assert await api.get(client.refill(NAME, function.native, TTL, timeout=5)) == 1


@one_server
@pytest.mark.parametrize("api", ["asyncio"], indirect=True)
async def test_a_cancellation_that_is_the_loaders_own_is_an_error(api: Api, server: Server) -> None:
    client, loader = api.client(server.url), Counted(api)
    keep = {"ttl": 0.001, "stale": STALE}
    assert await client.refill(NAME, loader.native, **keep) == 1

    async def fail() -> None:
        raise asyncio.CancelledError("a task of its own")

    assert await client.refill(NAME, fail, **keep) == 1
    with pytest.raises(asyncio.CancelledError):
        await client.refill("other", fail, TTL)
