"""`client.locked`: the name comes from the call's arguments, the lock is held, the function keeps its metadata."""

from __future__ import annotations

import functools
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import redis
from support.apis import Api, drive

import fastlock
from fastlock.embedded import Server

pytestmark = pytest.mark.usefixtures("no_leaks")


class Order:
    def __init__(self, number: int) -> None:
        self.number = number
        self.lines = {"first": "sku:1"}


def of_api(api: Api, function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function for this API: unchanged, or as `async def`."""
    if not api.is_async:
        return function

    @functools.wraps(function)
    async def asynchronous(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return asynchronous


TEMPLATES = {
    "positional": ("order:{order_id}", (7,), {}, b"order:7"),
    "keyword": ("order:{order_id}", (), {"order_id": "x"}, b"order:x"),
    "default": ("{order_id}/{kind}", (7,), {}, b"7/plain"),
    "given": ("{order_id}/{kind}", (7, "rush"), {}, b"7/rush"),
    "attribute": ("order:{order_id.number}", (Order(12),), {}, b"order:12"),
    "item": ("{order_id.lines[first]}", (Order(12),), {}, b"sku:1"),
    "format": ("{order_id:05d}-{kind!r}", (7,), {}, b"00007-'plain'"),
    "fixed": ("always this", (7,), {}, b"always this"),
    "braces": ("{{tag}}:{order_id}", (7,), {}, b"{tag}:7"),
    "fixed braces": ("{{tag}}", (7,), {}, b"{tag}"),
    "bytes": (b"\xff raw {order_id}", (7,), {}, b"\xff raw {order_id}"),
    "rest": ("{more[0]}", (7, "plain", "third"), {}, b"third"),
    "callable": (lambda order_id, kind="of the callable", *more: f"{kind} {order_id}", (7,), {}, b"of the callable 7"),
    "callable bytes": (lambda *args, **kwargs: b"\x00", (7,), {}, b"\x00"),
}


@pytest.mark.parametrize(("name", "args", "kwargs", "key"), TEMPLATES.values(), ids=TEMPLATES)
async def test_the_name_is_made_from_the_call(
    api: Api, server: Server, probe: redis.Redis, name: Any, args: Any, kwargs: Any, key: bytes
) -> None:
    def order(order_id: Any, kind: str = "plain", *more: Any) -> tuple[Any, Any, Any]:
        return (order_id, kind, *more), probe.keys(), probe.pttl(key)

    locked = api.client(server.unix_url).locked(name, timeout=7)(of_api(api, order))
    arguments, keys, left = await api.get(locked(*args, **kwargs))
    assert keys == [key] and 0 < left <= 7_000
    assert arguments == order(*args, **kwargs)[0], "the function must get the call's arguments"
    assert probe.keys() == []


HOPELESS = ["{missing}", "{order_id}{missing.number}", "{}", "{0}", "{missing[0]:d}", "{", "}{"]


@pytest.mark.parametrize("template", HOPELESS)
async def test_an_impossible_template_is_refused_at_decoration(api: Api, server: Server, template: str) -> None:
    client = api.client(server.unix_url)
    with pytest.raises(ValueError):
        client.locked(template)(of_api(api, lambda order_id: None))


async def test_a_missing_field_is_named_together_with_the_function(api: Api, server: Server) -> None:
    def pay(order_id: int) -> None: ...

    with pytest.raises(ValueError, match=r"'orderid'.*pay\(order_id"):
        api.client(server.unix_url).locked("order:{orderid}")(of_api(api, pay))


async def test_a_call_that_lacks_an_argument_names_the_function(api: Api, server: Server) -> None:
    def pay(order_id: int) -> None: ...

    with pytest.raises(TypeError, match=r"pay\(\): missing a required argument: 'order_id'"):
        await api.get(api.client(server.unix_url).locked("order:{order_id}")(of_api(api, pay))())


async def test_an_unusable_argument_is_named_with_the_template(api: Api, server: Server) -> None:
    ship = api.client(server.unix_url).locked("order:{order.number}")(of_api(api, lambda order: None))
    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'number'") as caught:
        await api.get(ship(None))
    assert "order:{order.number}" in caught.value.__notes__[0] and "<lambda>" in caught.value.__notes__[0]


async def test_a_function_of_the_other_api_is_refused_with_a_hint(api: Api, server: Server) -> None:
    client = api.client(server.unix_url)

    def plain() -> None: ...

    async def asynchronous() -> None: ...

    def generator() -> Any:
        yield

    async def asynchronous_generator() -> Any:
        yield

    with pytest.raises(TypeError, match="fastlock.Client" if api.is_async else "fastlock.asyncio.Client"):
        client.locked("a")(plain if api.is_async else asynchronous)
    for function in (generator, asynchronous_generator):
        with pytest.raises(TypeError, match=function.__name__):  # its body would run after the lock was released
            client.locked("a")(function)


async def test_a_decorator_without_a_name_raises_at_the_call(api: Api, server: Server) -> None:
    """`@client.locked` takes the function for the name; its first call must not pass for a decoration."""
    client = api.client(server.unix_url)

    @client.locked
    def pay(order_id: int) -> int:
        return order_id

    with pytest.raises(TypeError, match=r'locked\("name"\) decorates a function, not 4: was its name forgotten'):
        pay(4)
    for given, named in (((4, 5), {}), ((4,), {"by": 5}), ((pay, 5), {})):
        with pytest.raises(TypeError, match="was its name forgotten"):
            pay(*given, **named)


async def test_a_decorated_function_keeps_its_metadata(api: Api, server: Server) -> None:
    def pay(order_id: int, *, kind: str = "plain") -> str:
        """Take the money."""
        return "paid"

    function = of_api(api, pay)
    function.mark = "kept"  # type: ignore[attr-defined]
    locked = api.client(server.unix_url).locked("order:{order_id}")(function)
    assert (locked.__name__, locked.__doc__, locked.__module__) == ("pay", "Take the money.", __name__)
    assert locked.__qualname__ == pay.__qualname__ and locked.__wrapped__ is function and locked.mark == "kept"
    assert inspect.signature(locked) == inspect.signature(pay)
    assert inspect.iscoroutinefunction(locked) is api.is_async
    assert await api.get(locked(1, kind="rush")) == "paid"
    with pytest.raises(TypeError):
        await api.get(locked())


async def test_a_method_gets_self_and_each_object_has_its_own_lock(
    api: Api, server: Server, probe: redis.Redis
) -> None:
    client = api.client(server.unix_url)

    def pay(self: Any, amount: int) -> Any:
        return self, amount, probe.keys()

    Account = type("Account", (Order,), {"pay": client.locked("account:{self.number}:{amount}")(of_api(api, pay))})
    for number in (1, 2):
        account = Account(number)
        assert await api.get(account.pay(5)) == (account, 5, [b"account:%d:5" % number])


async def test_exceptions_propagate_and_the_lock_is_released(api: Api, server: Server, probe: redis.Redis) -> None:
    def fail(order_id: int) -> None:
        raise ZeroDivisionError(order_id)

    locked = api.client(server.unix_url).locked("a")(of_api(api, fail))
    for number in range(2):
        with pytest.raises(ZeroDivisionError, match=str(number)):
            await api.get(locked(number))
        assert probe.keys() == []


async def test_the_function_does_not_run_without_the_lock(api: Api, server: Server, probe: redis.Redis) -> None:
    client, calls = api.client(server.unix_url), []
    await_not = client.locked("a{n}", blocking=False)(of_api(api, lambda n: calls.append(n)))
    brief = client.locked("a{n}", blocking_timeout=0.005, sleep=0.001)(of_api(api, lambda n: calls.append(n)))
    probe.set("a1", "somebody else", px=60_000)
    for locked in (await_not, brief):
        with pytest.raises(fastlock.LockError) as caught:
            await api.get(locked(1))
        assert caught.value.lock_name == "a1"
    await api.get(await_not(2))
    assert calls == [2] and probe.get("a1") == b"somebody else"
    probe.delete("a1")


async def test_the_locks_settings_are_passed_on(api: Api, server: Server, probe: redis.Redis, no_leaks: Any) -> None:
    no_leaks.allow("fastlock:fence:*")
    client = api.client(server.unix_url)
    seen: list[Any] = []
    for settings in ({"timeout": None}, {"timeout": 3}, {"fence": True}, {}):
        await api.get(client.locked("a", **settings)(of_api(api, lambda: seen.append(probe.pttl("a"))))())
    assert seen[0] == -1 and 0 < seen[1] <= 3_000 < seen[2] <= 10_000 and 3_000 < seen[3] <= 10_000
    assert probe.keys() == [b"fastlock:fence:{a}"]
    lose = of_api(api, lambda: probe.delete("a"))
    with pytest.raises(fastlock.LockNotOwnedError):
        await api.get(client.locked("a")(lose)())
    assert await api.get(client.locked("a", raise_on_release_error=False)(lose)()) == 1


async def test_calls_exclude_each_other_name_by_name(api: Api, server: Server) -> None:
    """Every call checks whether another is inside, gives the others a chance to run, and checks again."""
    client = api.client(server.unix_url)
    inside = {0: 0, 1: 0}
    overlaps, calls = [], []

    async def body(number: int) -> None:
        inside[number] += 1
        overlaps.append(inside[number])
        for _ in range(3):
            await api.get(client.lock("something else").locked())
        overlaps.append(inside[number])
        inside[number] -= 1
        calls.append(number)

    def body_of_threads(number: int) -> None:
        drive(body(number))

    locked = client.locked("n{number}", sleep=0.001)(body if api.is_async else body_of_threads)
    results = await api.together([lambda i=i: locked(i % 2) for i in range(12)])
    assert results == [None] * 12 and set(overlaps) == {1} and sorted(calls) == [0] * 6 + [1] * 6


async def test_nested_calls_with_other_names_work(api: Api, server: Server, probe: redis.Redis) -> None:
    client = api.client(server.unix_url)
    inner = client.locked("inner")(of_api(api, lambda: sorted(probe.keys())))
    if api.is_async:

        async def call() -> Any:
            return await inner()
    else:

        def call() -> Any:  # type: ignore[misc]
            return inner()

    assert await api.get(client.locked("outer")(call)()) == [b"inner", b"outer"]


# ------------------------------------------------------------------------------------------------------------- on_busy


async def busy(api: Api, server: Server, on_busy: Any, **options: Any) -> tuple[Any, Any]:
    """(A decorated function whose lock is held, the lock that holds it)."""
    client, holder = api.client(server.url), api.client(server.url).lock("order:7", thread_local=False)
    await api.get(holder.acquire())
    function = of_api(api, lambda order_id, more=1: ("done", order_id, more))
    return client.locked(lambda order_id, more=1: f"order:{order_id}", on_busy=on_busy, **options)(function), holder


@pytest.mark.parametrize("options", [{}, {"blocking_timeout": 0.2}], ids=["at once", "after a wait"])
async def test_what_a_call_does_while_the_lock_is_held(api: Api, server: Server, options: Any) -> None:
    pay, holder = await busy(api, server, "raise", **options)
    with pytest.raises(fastlock.LockNotAcquiredError, match="Unable to acquire lock 'order:7'"):
        await api.get(pay(7))
    assert await api.get(pay(8)) == ("done", 8, 1)
    await api.get(holder.release())
    assert await api.get(pay(7)) == ("done", 7, 1)
    pay, holder = await busy(api, server, "skip", **options)
    assert await api.get(pay(7)) is None and await api.get(pay(8)) == ("done", 8, 1)
    await api.get(holder.release())
    for instead in (lambda order_id, more=1: ("busy", order_id, more), of_api(api, lambda *args, **kw: (args, kw))):
        pay, holder = await busy(api, server, instead, **options)
        expected = await api.get(instead(7, more=2))
        assert await api.get(pay(7, more=2)) == expected and await api.get(pay(8)) == ("done", 8, 1)
        await api.get(holder.release())


async def test_a_busy_lock_within_the_function_is_not_taken_for_its_own(api: Api, server: Server) -> None:
    client, holder = api.client(server.url), api.client(server.url).lock("inner")
    await api.get(holder.acquire())
    inner = client.locked("inner", on_busy="raise")(of_api(api, lambda: None))

    def outer() -> Any:
        return inner()

    async def outer_task() -> Any:
        return await inner()

    call = client.locked("outer", on_busy="skip")(outer_task if api.is_async else outer)
    with pytest.raises(fastlock.LockNotAcquiredError) as caught:
        await api.get(call())
    assert caught.value.lock_name == "inner"
    await api.get(holder.release())


async def test_on_busy_waits_unless_it_is_given(api: Api, server: Server) -> None:
    pay, holder = await busy(api, server, "wait")
    job = api.start(lambda: pay(7))
    await api.get(holder.release())
    assert await job.get() == ("done", 7, 1)


async def test_on_busy_beside_a_wait_without_end(api: Api, server: Server) -> None:
    client = api.client(server.url)
    with pytest.raises(ValueError, match=r"^blocking=True waits however long, and on_busy='skip' says"):
        client.locked("a", on_busy="skip", blocking=True)(of_api(api, lambda: None))
    client.locked("a", on_busy="skip", blocking=True, blocking_timeout=1)(of_api(api, lambda: None))


@pytest.mark.parametrize(("on_busy", "error"), [("never", ValueError), (None, TypeError), (3, TypeError)])
async def test_on_busy_that_makes_no_sense(api: Api, server: Server, on_busy: Any, error: Any) -> None:
    with pytest.raises(error, match=r"^on_busy must be"):
        api.client(server.url).locked("a", on_busy=on_busy)(of_api(api, lambda: None))


async def test_the_error_of_a_busy_lock_can_be_pickled(api: Api, server: Server) -> None:
    """As Celery and multiprocessing do with what a task raises."""
    pay, holder = await busy(api, server, "raise")
    with pytest.raises(fastlock.LockNotAcquiredError) as caught:
        await api.get(pay(7))
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is fastlock.LockNotAcquiredError and (str(again), again.lock_name) == (
        str(caught.value),
        "order:7",
    )
    await api.get(holder.release())
