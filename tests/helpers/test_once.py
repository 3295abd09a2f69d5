"""`client.once` on real servers: one of many callers runs the function, and all get its result."""

from __future__ import annotations

import asyncio
import pickle
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

KEPT = "fastlock:once:{sku}"
TTL = 60
threads_only = pytest.mark.parametrize("api", ["threads"], indirect=True)
one_server = pytest.mark.parametrize("server", ["valkey"], indirect=True)  # where its kind makes no difference
tasks_only = pytest.mark.parametrize("api", ["asyncio"], indirect=True)


@pytest.fixture(autouse=True)
def results_stay(no_leaks: Any) -> None:
    no_leaks.allow("fastlock:once:*")


async def test_one_of_many_callers_runs_it_and_all_get_its_result(api: Api, server: Server, probe: redis.Redis) -> None:
    clients = [api.client(server.url) for _ in range(2)]
    function = Counted(api, after_waits(api, clients, 2))
    calls = [lambda client=client: client.once(NAME, function.native, ttl=TTL) for client in clients * 5]
    assert await api.together(calls) == [1] * 10
    assert await api.get(clients[0].once(NAME, function.native, ttl=TTL)) == 1
    assert (function.calls, function.most) == (1, 1)
    assert probe.get(KEPT) == b"1" and TTL - 20 < probe.ttl(KEPT) <= TTL and not probe.exists(NAME)


async def test_a_result_that_is_kept_takes_one_command(api: Api, server: Server) -> None:
    client = api.client(server.url)
    function = Counted(api)
    for _ in range(2):
        await api.get(client.once(NAME, function.native, ttl=TTL))
    before = client.get_stats()
    for _ in range(10):
        assert await api.get(client.once(NAME, function.native, ttl=TTL)) == 1
    assert client.get_stats()["commands"] == before["commands"] + 10
    assert client.get_stats()["acquires"] == before["acquires"]


async def test_callers_of_one_client_pass_the_result_on_without_a_command(api: Api, server: Server) -> None:
    client, count = api.client(server.url), 10
    function = Counted(api, after_waits(api, [client], count - 1))
    commands: list[int] = []

    async def call() -> Any:
        result = await api.get(client.once(NAME, function.native, ttl=TTL))
        commands.append(client.get_stats()["commands"])
        return result

    assert await api.together([call] * count) == [1] * count
    assert commands[-1] - commands[0] < 4 * count, "after the first has it, the others read it, and no more"


async def test_results_of_different_names_are_not_mixed_up(api: Api, server: Server) -> None:
    clients = [api.client(server.url) for _ in range(2)]

    def call(client: Any, number: int) -> Callable[[], Any]:
        async def result() -> str:
            await api.checkpoint()
            return f"of {number}"

        return lambda: client.once(f"{NAME}{number}", api.native(result), ttl=TTL)

    calls = [call(clients[i % 2], i % 7) for i in range(28)]
    assert await api.together(calls) == [f"of {i % 7}" for i in range(28)]


async def test_an_error_goes_to_its_caller_and_the_next_one_runs_it(api: Api, server: Server) -> None:
    client = api.client(server.url)
    function = Counted(api, after_waits(api, [client], 3))
    function.errors = [KeyError("one"), KeyError("two")]
    results = await api.together([lambda: client.once(NAME, function.native, ttl=TTL)] * 4)
    failed = [each for each in results if isinstance(each, KeyError)]
    assert len(failed) == 2 and [each for each in results if each not in failed] == [3, 3]
    assert (function.calls, function.most) == (3, 1)


@pytest.mark.parametrize("on_busy", ["raise", "skip", "call"])
async def test_a_call_may_do_something_else_than_wait(api: Api, server: Server, on_busy: str) -> None:
    client, other = api.client(server.url), api.client(server.url)
    how: Any = (lambda: "instead") if on_busy == "call" else on_busy
    function = Counted(api)
    lock = client.lock(NAME)
    await api.enter(lock)
    call = other.once(NAME, function.native, ttl=TTL, on_busy=how) if api.is_async else None
    try:
        result = await api.get(call if api.is_async else other.once(NAME, function.native, ttl=TTL, on_busy=how))
        assert on_busy != "raise" and result == {"skip": None, "call": "instead"}[on_busy]
    except fastlock.LockNotAcquiredError:
        assert on_busy == "raise"
    await api.leave(lock)
    assert await api.get(other.once(NAME, function.native, ttl=TTL, on_busy=how)) == 1
    assert await api.get(other.once(NAME, function.native, ttl=TTL, on_busy=how)) == 1


async def test_the_wait_for_a_result_may_be_limited(api: Api, server: Server) -> None:
    client, other = api.client(server.url), api.client(server.url)
    async with api.within(client.lock(NAME)):
        with pytest.raises(fastlock.LockNotAcquiredError, match=r"within 0\.05 seconds"):
            await api.get(other.once(NAME, Counted(api).native, ttl=TTL, blocking_timeout=0.05))


async def test_an_error_of_another_lock_within_the_function_is_raised(api: Api, server: Server) -> None:
    client = api.client(server.url)

    async def acquire_another() -> None:
        async with api.within(client.lock("other", blocking=False)):
            pass

    async with api.within(client.lock("other")):
        with pytest.raises(fastlock.LockNotAcquiredError, match="'other'"):
            await api.get(client.once(NAME, api.native(acquire_another), ttl=TTL, on_busy="skip"))


@one_server
async def test_a_runner_that_is_killed_is_replaced(api: Api, server: Server) -> None:
    clients = [api.client(server.url) for _ in range(2)]
    function = Counted(api)
    with ChildHelper(api, server.url, "once", timeout=0.5) as child:
        await child.wait_for_line("running")
        jobs = [api.start(lambda client=client: client.once(NAME, function.native, ttl=TTL)) for client in clients * 2]
        for client in clients:
            await waits(api, client, 1)
        assert function.calls == 0
        child.kill()
        assert [await job.get(SOON) for job in jobs] == [1] * 4
    assert (function.calls, function.most) == (1, 1)


async def test_who_lost_the_lock_keeps_nothing(api: Api, server: Server, probe: redis.Redis) -> None:
    client, other = api.client(server.url), api.client(server.url)
    theirs: list[Any] = []

    async def lose() -> str:
        probe.delete(NAME)
        theirs.append(await api.get(other.once(NAME, Counted(api).native, ttl=TTL)))
        return "mine"

    with pytest.raises(fastlock.LockLostError, match="another caller may have run it too"):
        await api.get(client.once(NAME, api.native(lose), ttl=TTL))
    assert theirs == [1] and probe.get(KEPT) == b"1"


async def test_a_lost_reply_changes_nothing(api: Api, proxy: FaultProxy, probe: redis.Redis) -> None:
    client = api.client(proxy.url)
    armed: list[Any] = []
    function = Counted(api, lambda: armed.append(proxy.arm(swallow(), command="EVALSHA")))
    assert await api.get(client.once(NAME, function.native, ttl=TTL)) == 1
    assert armed[0].fired and function.calls == 1 and probe.get(KEPT) == b"1"


@pytest.mark.parametrize("size", [0, MAX_REPLY - 2, MAX_REPLY - 1, 5 * MAX_REPLY + 1])
async def test_results_of_any_length(api: Api, server: Server, size: int) -> None:
    """Longer than the longest reply to a lock's commands, too."""
    client, other = api.client(server.url), api.client(server.url)
    text = "".join(chr(97 + i % 26) for i in range(size))

    async def make() -> str:
        return text

    assert await api.get(client.once(NAME, api.native(make), ttl=TTL)) == text
    assert await api.get(other.once(NAME, Counted(api).native, ttl=TTL)) == text


async def test_results_in_another_format(api: Api, server: Server) -> None:
    client, other = api.client(server.url), api.client(server.url)
    settings: Any = {"ttl": TTL, "dumps": pickle.dumps, "loads": pickle.loads}

    async def make() -> Any:
        return {(1, 2): {3}}

    for each in (client, other):
        assert await api.get(each.once(NAME, api.native(make), **settings)) == {(1, 2): {3}}
    empty: Any = {"ttl": TTL, "dumps": lambda value: b"", "loads": lambda raw: ("was", raw)}
    for each in (client, other):
        assert await api.get(each.once("empty", api.native(make), **empty)) == ("was", b"")


async def test_all_get_the_same_also_who_ran_it(api: Api, server: Server) -> None:
    client = api.client(server.url)

    async def make() -> Any:
        return None, (1, 2), {1: "x"}

    for _ in range(2):
        assert await api.get(client.once(NAME, api.native(make), ttl=TTL)) == [None, [1, 2], {"1": "x"}]


async def test_none_is_a_result(api: Api, server: Server) -> None:
    client, calls = api.client(server.url), []

    async def make() -> None:
        calls.append(1)

    for _ in range(2):
        assert await api.get(client.once(NAME, api.native(make), ttl=TTL)) is None
    assert calls == [1]


async def test_a_result_that_cannot_be_read_is_made_anew(api: Api, server: Server, probe: redis.Redis) -> None:
    client, function = api.client(server.url), Counted(api)
    probe.set(KEPT, b"\xff{")
    assert await api.get(client.once(NAME, function.native, ttl=TTL)) == 1
    assert probe.get(KEPT) == b"1"


async def test_forgetting_a_result(api: Api, server: Server) -> None:
    client, function = api.client(server.url), Counted(api)
    assert await api.get(client.forget(NAME)) is False
    assert await api.get(client.once(NAME, function.native, ttl=TTL)) == 1
    assert await api.get(client.forget(NAME)) is True
    assert await api.get(client.once(NAME, function.native, ttl=TTL)) == 2


async def test_a_result_that_was_forgotten_reaches_nobody(api: Api, server: Server) -> None:
    """Also nobody of the client who came before, and has yet to get it."""
    client = api.client(server.url)
    function = Counted(api, after_waits(api, [client], 2))
    first = api.start(lambda: client.once(NAME, function.native, ttl=TTL))
    await until(api, lambda: function.calls, "the run")
    between = client.lock(NAME, thread_local=False)
    acquired = api.start(between.acquire)
    await waits(api, client, 1)
    early = api.start(lambda: client.once(NAME, function.native, ttl=TTL))
    assert await acquired.get(SOON) is True and await first.get(SOON) == 1
    assert await api.get(client.forget(NAME)) is True
    late = api.start(lambda: client.once(NAME, function.native, ttl=TTL))
    await waits(api, client, 3)
    await api.get(between.release())
    assert [await early.get(SOON), await late.get(SOON)] == [2, 2]


async def test_a_decorated_function(api: Api, server: Server, probe: redis.Redis) -> None:
    client, calls = api.client(server.url), []

    async def report(day: int, kind: str = "plain") -> str:
        """Its text."""
        calls.append(day)
        return f"{kind} {day}"

    made = client.once("report:{day}:{kind}", ttl=TTL)(api.native(report))
    assert (made.__name__, made.__doc__) == ("report", "Its text.")
    for _ in range(2):
        assert [await api.get(made(1)), await api.get(made(day=2, kind="x"))] == ["plain 1", "x 2"]
    assert calls == [1, 2] and probe.exists("fastlock:once:{report:1:plain}")


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"ttl": None}, TypeError, "ttl"),
    ({"ttl": 0}, ValueError, "ttl"),
    ({"ttl": -1}, ValueError, "ttl"),
    ({"function": 7}, TypeError, "function"),
    ({"name": ""}, ValueError, "name"),
    ({"name": "fastlock:x"}, ValueError, "name"),
    ({"name": 7}, TypeError, "name"),
    ({"on_busy": "wate"}, ValueError, "on_busy"),
    ({"timeout": None}, ValueError, "timeout"),
    ({"timeout": 0.01}, ValueError, "timeout"),
    ({"blocking_timeout": -1}, ValueError, "blocking_timeout"),
    ({"dumps": pickle.dumps}, ValueError, "dumps"),
    ({"dumps": 1, "loads": 2}, TypeError, "dumps"),
]


@one_server
@pytest.mark.parametrize(("given", "error", "named"), WRONG)
async def test_arguments_that_make_no_sense(api: Api, server: Server, given: Any, error: Any, named: str) -> None:
    client, function = api.client(server.url), Counted(api)
    arguments = {"name": NAME, "function": function.native, "ttl": TTL, **given}
    with pytest.raises(error, match=named):
        await api.get(client.once(**arguments))
    assert function.calls == 0 and client.get_stats()["commands"] == 0


@pytest.mark.parametrize("value", [{1}, object(), b"bytes"])
async def test_a_result_that_json_cannot_encode(api: Api, server: Server, probe: redis.Redis, value: Any) -> None:
    client = api.client(server.url)

    async def make() -> Any:
        return value

    with pytest.raises(TypeError, match=r"'sku' cannot be kept as JSON.*dumps="):
        await api.get(client.once(NAME, api.native(make), ttl=TTL))
    assert not probe.exists(KEPT) and not probe.exists(NAME)


async def test_formats_that_are_none(api: Api, server: Server, probe: redis.Redis) -> None:
    client, function = api.client(server.url), Counted(api)
    with pytest.raises(TypeError, match="dumps must return bytes or str, not int"):
        await api.get(client.once(NAME, function.native, ttl=TTL, dumps=lambda value: value, loads=int))
    with pytest.raises(ValueError):
        await api.get(client.once(NAME, function.native, ttl=TTL, dumps=lambda value: "x", loads=int))
    assert not probe.exists(KEPT), "what cannot be read is not kept"


@threads_only
async def test_a_function_that_is_to_be_awaited_is_refused(api: Api, server: Server, probe: redis.Redis) -> None:
    client = api.client(server.url)

    async def make() -> int:
        return 1

    for call in (lambda: client.once(NAME, make, ttl=TTL), lambda: client.once(NAME, ttl=TTL)(make)):
        with pytest.raises(TypeError, match=r"make is async: give it to a fastlock\.asyncio\.Client"):
            call()
    with pytest.raises(TypeError, match="returned a coroutine"):
        client.once(NAME, lambda: make(), ttl=TTL)
    assert not probe.exists(NAME)


@tasks_only
async def test_plain_functions_are_called_in_asyncio_too(api: Api, server: Server) -> None:
    client = api.client(server.url)
    assert await client.once(NAME, lambda: 7, ttl=TTL) == 7
    assert await client.once("{day}", ttl=TTL)(lambda day: day)(8) == 8


@tasks_only
async def test_a_runner_that_is_cancelled_is_replaced(api: Api, server: Server) -> None:
    client = api.client(server.url)

    async def hang() -> None:
        await asyncio.sleep(60)

    first = api.start(lambda: client.once(NAME, hang, ttl=TTL))
    await until(api, lambda: client.get_stats()["acquires"], "a runner")
    second = api.start(lambda: client.once(NAME, Counted(api).native, ttl=TTL))
    await waits(api, client, 1)
    first.cancel()
    assert await second.get(SOON) == 1
    with pytest.raises(asyncio.CancelledError):
        await first.get()


@one_server
async def test_the_lock_is_renewed_while_the_function_runs(
    api: Api, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = api.client(server.url)
    function = Counted(api, after_renewals(api, client, monkeypatch))
    assert await api.get(client.once(NAME, function.native, ttl=TTL, timeout=5)) == 1
