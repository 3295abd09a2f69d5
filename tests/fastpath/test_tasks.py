"""What a task awaits in the fast path, resumed, closed and thrown at by hand: compiled it is no coroutine, yet behaves
as one."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import sys
import warnings
import weakref
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
import redis
from support.apis import Api
from support.faultproxy import FaultProxy, stall
from support.run_steps import joined

import fastlock.asyncio
from fastlock._protocol import commands
from fastlock._protocol.lease import now
from fastlock.embedded import Server

NAME = "sku"
MARK = b"\r\nsku\r\n"
valkey = pytest.mark.parametrize("server", ["valkey"], indirect=True)
both_loops = pytest.mark.parametrize("api", ["asyncio", "asyncio+uvloop"], indirect=True)
pytestmark = pytest.mark.usefixtures("impl")


@pytest.fixture
def quiet_coroutines() -> Iterator[None]:
    """In Python an operation is a coroutine, which warns when it is dropped before it began."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
        yield
        gc.collect()


async def until(holds: Callable[[], object]) -> None:
    end = now() + 10
    while not holds():
        assert now() < end
        await asyncio.sleep(0)


def commands_sent(proxy: FaultProxy) -> int:
    """How many commands about the lock were sent."""
    return sum(NAME.encode() in words for words in proxy.commands)


async def in_step(client: Any) -> None:
    """What was queued before has been executed."""
    assert await client.lock("barrier").locked() is False


@both_loops
@pytest.mark.parametrize("connected", [True, False], ids=["connected", "fresh"])
async def test_an_operation_that_is_never_awaited_sends_nothing(
    api: Api, proxy: FaultProxy, no_leaks: Any, quiet_coroutines: None, connected: bool
) -> None:
    client = api.client(proxy.url)
    if connected:
        await client.server_info()
    lock = client.lock(NAME)
    for _ in range(2):
        begun: Any = lock.__aenter__()
        begun.close()
        del begun
        lock.__aenter__()
        lock.acquire()
        lock.release()
        lock.__aexit__(None, None, None)  # nothing is held
        gc.collect()
    assert commands_sent(proxy) == 0 and len(proxy.connections) == connected
    await in_step(client)
    assert commands_sent(proxy) == 0
    async with lock:
        lock.release()
        gc.collect()
        assert await lock.owned()


@pytest.mark.fastpath("tasks")
@both_loops
async def test_an_aexit_that_is_never_awaited_releases(
    api: Api, server: Server, probe: redis.Redis, no_leaks: Any, impl: str
) -> None:
    """Python calls `__aexit__`, and then awaits what that returned: a signal handler can raise between the two."""
    if impl == "python":
        pytest.skip("a coroutine that has not begun can do nothing")
    lock = api.client(server.unix_url).lock(NAME, timeout=None)
    for _ in range(2):
        async with lock:
            lock.__aexit__(None, None, None)
            await lock.locked()  # behind it
            assert not probe.exists(NAME)


@pytest.mark.fastpath("tasks")
@both_loops
async def test_an_aexit_awaited_late_releases_no_later_lease(
    api: Api, server: Server, probe: redis.Redis, no_leaks: Any, impl: str
) -> None:
    if impl == "python":
        pytest.skip("a coroutine that has not begun knows of nothing")
    lock, body = api.client(server.unix_url).lock(NAME), OfTheCaller()
    await lock.acquire()
    late, failed = lock.__aexit__(None, None, None), lock.__aexit__(OfTheCaller, body, None)
    await lock.release()
    lease = await lock.__aenter__()
    with pytest.raises(fastlock.LockError, match="not owned"):
        await late
    assert await failed is None and "not owned" in body.__notes__[0], "as any error of a release in __aexit__"
    assert lock.lease is lease and probe.get(NAME) == lease._raw_token
    await lock.release()


@both_loops
async def test_an_operation_that_is_never_awaited_warns_as_a_coroutine(api: Api, server: Server) -> None:
    lock = api.client(server.unix_url).lock(NAME)
    for method in (lock.acquire, lock.release):
        with pytest.warns(RuntimeWarning, match=f"^coroutine '.*{method.__name__}' was never awaited"):
            method()
            gc.collect()
        coroutine = method()
        assert inspect.iscoroutine(coroutine), "what anyio's task groups take"
        coroutine.close()


@both_loops
async def test_an_aenter_can_be_awaited_as_any_awaitable(
    api: Api, server: Server, probe: redis.Redis, no_leaks: Any
) -> None:
    lock = api.client(server.unix_url).lock(NAME)
    ways: list[Callable[[Any], Awaitable[Any]]] = [
        lambda entered: entered,
        lambda entered: asyncio.wait_for(entered, 10),
        asyncio.ensure_future,
        asyncio.create_task,
        asyncio.shield,
    ]
    for way in ways:
        lease = await way(lock.__aenter__())
        assert lease.valid and probe.get(NAME) == lease._raw_token
        assert await way(lock.__aexit__(None, None, None)) is None
        assert not lease.valid and not probe.exists(NAME) and lock.lease is None
        assert await way(lock.acquire())
        assert await way(lock.release()) is None
        assert not probe.exists(NAME)
    (lease,) = await asyncio.gather(lock.__aenter__())
    assert lease.valid
    await asyncio.gather(lock.release())


@both_loops
async def test_a_release_awaited_late_does_not_release_the_next_lease(api: Api, server: Server, no_leaks: Any) -> None:
    """As that of a task that was cancelled during its release: it releases again, and acquires again."""
    client = api.client(server.unix_url)
    for lock in (client.lock(NAME), client.lock(NAME, thread_local=False)):
        await lock.acquire()
        late = lock.release()
        await lock.release()
        await lock.acquire()
        with pytest.raises(fastlock.LockError, match="not owned or already unlocked"):
            await asyncio.create_task(late)
        assert await lock.owned()
        early = lock.release()
        await early
        assert not await lock.locked()


@both_loops
@pytest.mark.parametrize("way", ["wait_for", "timeout"])
async def test_an_aenter_that_runs_out_of_time_leaves_nothing(
    api: Api, proxy: FaultProxy, probe: redis.Redis, no_leaks: Any, way: str
) -> None:
    client = api.client(proxy.url, reply_timeout=20)
    await client.server_info()
    lock = client.lock(NAME)
    armed = proxy.arm(stall(), after=MARK, times=1)
    with pytest.raises(TimeoutError):
        if way == "wait_for":
            await asyncio.wait_for(lock.__aenter__(), 0.02)
        else:
            async with asyncio.timeout(0.02):
                await lock.__aenter__()
    armed.resume()
    await in_step(client)
    assert not probe.exists(NAME) and lock.lease is None and len(proxy.connections) == 1


@both_loops
async def test_locks_in_an_exit_stack(api: Api, server: Server, probe: redis.Redis, no_leaks: Any) -> None:
    client, names = api.client(server.unix_url), ["a", "b", "c"]
    with pytest.raises(ZeroDivisionError) as caught:
        async with contextlib.AsyncExitStack() as stack:
            leases = [await stack.enter_async_context(client.lock(name)) for name in names]
            assert [probe.get(name) for name in names] == [lease._raw_token for lease in leases]
            probe.delete("b")
            raise ZeroDivisionError
    assert not probe.exists(*names)
    assert ["'b'" in note for note in caught.value.__notes__] == [True], "for the lease that was lost"
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(client.lock("a"))
        kept = stack.pop_all()
    assert probe.exists("a")
    await kept.aclose()
    assert not probe.exists("a")


class OfTheCaller(Exception):
    pass


BY_HAND = ["close", "throw", "throw a class", "cancel", "drop"]


def end_by_hand(how: str, waiting: list[Any]) -> None:
    """End the only coroutine in `waiting`, which waits for a reply."""
    coroutine = waiting.pop()
    if how == "close":
        coroutine.close()
    elif how == "throw":
        with pytest.raises(OfTheCaller):
            coroutine.throw(OfTheCaller("with a text"))
    elif how == "throw a class":
        with pytest.raises(OfTheCaller):
            coroutine.throw(OfTheCaller)
    elif how == "cancel":
        with pytest.raises(asyncio.CancelledError):
            coroutine.throw(asyncio.CancelledError())
    del coroutine
    gc.collect()


@valkey
@both_loops
@pytest.mark.parametrize("replied", [False, True], ids=["before its reply", "after its reply"])
@pytest.mark.parametrize("how", BY_HAND)
@pytest.mark.parametrize("operation", ["with", "acquire", "release"])
async def test_a_coroutine_ended_by_hand_while_it_waits_leaves_nothing(
    api: Api, server: Server, probe: redis.Redis, no_leaks: Any, operation: str, how: str, replied: bool
) -> None:
    client = api.client(server.unix_url)
    await client.server_info()
    lock = client.lock(NAME, thread_local=False)

    async def body() -> None:
        async with lock:
            raise AssertionError("nobody resumed it")

    if operation == "release":
        await lock.acquire()
    waiting = [{"with": body, "acquire": lock.acquire, "release": lock.release}[operation]()]
    future = waiting[0].send(None)
    while replied and not future.done():
        await asyncio.sleep(0)
    del future  # which may be the awaitable itself
    end_by_hand(how, waiting)
    await in_step(client)
    gc.collect()
    assert not probe.exists(NAME)
    if operation == "release":
        assert lock.lease is not None and lock.lease._release_unknown
        await lock.release()
    assert lock.lease is None


@valkey
@both_loops
@pytest.mark.parametrize("how", BY_HAND[:-1])
async def test_the_awaitable_itself_ended_by_hand_leaves_nothing(
    api: Api, server: Server, probe: redis.Redis, no_leaks: Any, how: str
) -> None:
    """As above, without a coroutine round it; also while it waits in the local queue, where a coroutine goes on."""
    client = api.client(server.unix_url)
    await client.server_info()
    lock = client.lock(NAME, thread_local=False, sleep=0.001)
    for held in (False, True):
        if held:
            probe.set(NAME, "another")
        awaitable: Any = lock.__aenter__()
        steps = awaitable.__await__()
        future = steps.send(None)
        if held:
            await until(future.done)
            assert not steps.send(None).done(), "it enters the server's queue"
        end_by_hand(how, [steps])
        await in_step(client)
        assert not probe.exists(commands.queue_key(NAME.encode())) and client._transport.queued_keys == {}
        assert probe.get(NAME) == (b"another" if held else None) and lock.lease is None
    probe.delete(NAME)


@pytest.mark.fastpath("tasks")
@valkey
@both_loops
@pytest.mark.parametrize("why", ["local waiter", "contended", "neither"])
async def test_a_contended_release_is_left_to_the_slow_path(
    api: Api, server: Server, probe: redis.Redis, no_leaks: Any, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    client = api.client(server.unix_url)
    await client.server_info()
    lock, transport, ran = client.lock(NAME), client._transport, list[Any]()
    monkeypatch.setattr(transport, "run", lambda op, *answer, run=transport.run: ran.append(op) or run(op, *answer))
    if why == "local waiter":
        waiter = joined(transport.queues, "whatever", b"whatever", 0, False, None)
    for taken in (lambda: lock.__aenter__(), lambda: lock.acquire()):
        ran.clear()
        await taken()
        assert ran == [] and lock.lease is not None, "the waiter waits for another name"
        lock.lease._contended = why == "contended"
        await lock.release()
        assert len(ran) == (0 if why == "neither" else 1)
        assert lock.lease is None and not probe.exists(NAME)
    if why == "local waiter":
        transport.queues.dequeue(waiter, now())
    assert not transport.queued_keys


def waiters(client: Any) -> list[Any]:
    """The waiters that the timers shared by tasks wake when their time is over."""
    return [sleeper for timeout in client._transport.shared_timeouts.values() for sleeper in timeout.waiters]


@valkey
@both_loops
@pytest.mark.parametrize("debug", [False, True], ids=["", "debug"])
async def test_each_limited_wait_ends_whatever_the_limits_of_others(
    api: Api, server: Server, probe: redis.Redis, no_leaks: Any, debug: bool
) -> None:
    """More limits than timers to be shared, and two tasks for each; some are cancelled, some served before. In debug
    mode a loop refuses to call what could be a coroutine."""
    asyncio.get_running_loop().set_debug(debug)
    client = api.client(server.unix_url)
    await client.server_info()
    probe.set(NAME, "another")
    limits = [0.5 + number / 1000 for number in range(24)] * 2  # long enough for all to begin
    locks = [client.lock(NAME, blocking_timeout=limit) for limit in limits]
    tasks = [asyncio.ensure_future(lock.acquire()) for lock in locks]
    await until(lambda: client.get_stats()["waits"] == len(tasks))
    for task in tasks[5:10]:
        task.cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(each) for each in outcomes[5:10]] == [asyncio.CancelledError] * 5
    assert outcomes[:5] + outcomes[10:] == [False] * (len(tasks) - 5)
    assert not client._transport.queued_keys and not waiters(client)
    probe.delete(NAME)
    served = [client.lock(NAME, blocking_timeout=60) for _ in range(8)]

    async def hold_once(lock: Any) -> None:
        assert await lock.acquire()
        await lock.release()

    for _ in range(5):
        await asyncio.gather(*(hold_once(lock) for lock in served))
        assert not waiters(client)


@pytest.mark.fastpath("tasks")
@valkey
@both_loops
async def test_shared_timers_end_with_the_client_and_are_reused(api: Api, server: Server, no_leaks: Any) -> None:
    client = api.client(server.unix_url)
    await client.server_info()
    for limit in range(1000, 1040):
        lock = client.lock(NAME, blocking_timeout=limit)
        assert await lock.acquire()
        await lock.release()
    timeouts = dict(client._transport.shared_timeouts)
    await client.close()
    if fastlock.IMPLEMENTATION == "cython":
        assert list(timeouts) == list(range(1024, 1040)), "the latest"
    assert [timeout.timer for timeout in timeouts.values()] == [None] * len(timeouts) and not waiters(client)


@valkey
@both_loops
async def test_a_wait_that_began_earlier_ends_earlier_on_a_shared_timer(
    api: Api, server: Server, probe: redis.Redis, proxy: FaultProxy, no_leaks: Any
) -> None:
    """Its first command took long, so that others who came later waited already: its time ends before theirs."""
    client = api.client(proxy.url)
    await client.server_info()
    probe.set(NAME, "another")
    ended: list[str] = []

    async def wait(who: str) -> None:
        assert not await client.lock(NAME, blocking_timeout=0.5).acquire()
        ended.append(who)

    stalled = proxy.arm(stall(), after=NAME.encode(), times=1)
    early, started = asyncio.ensure_future(wait("early")), now()
    await asyncio.to_thread(stalled.wait)
    await until(lambda: now() > started + 0.05)  # a loop may count in milliseconds only
    before = joined(client._transport.queues, NAME, NAME.encode(), 0, False, None)
    late = asyncio.ensure_future(wait("late"))
    await until(lambda: len(client._transport.queued_keys[NAME.encode()].waiters) == 2)
    stalled.resume()
    await until(lambda: len(client._transport.queued_keys[NAME.encode()].waiters) == 3)
    await asyncio.gather(early, late)
    assert ended == ["early", "late"]
    client._transport.queues.dequeue(before, now())
    probe.delete(NAME)


@valkey
@both_loops
async def test_an_acquire_resumed_before_its_reply_holds_nothing(
    api: Api, server: Server, probe: redis.Redis, no_leaks: Any
) -> None:
    """No task of asyncio resumes it so early."""
    client = api.client(server.unix_url)
    await client.server_info()
    lock = client.lock(NAME, thread_local=False)
    for held in (None, "another"):
        if held is not None:
            probe.set(NAME, held)
        coroutine = lock.acquire()
        coroutine.send(None)
        with pytest.raises(RuntimeError, match="being awaited already"):
            coroutine.send(None)
        await in_step(client)
        assert lock.lease is None and probe.get(NAME) == (held and held.encode())
    probe.delete(NAME)


@valkey
@both_loops
async def test_a_cancelled_task_is_collected_before_its_reply_comes(
    api: Api, proxy: FaultProxy, probe: redis.Redis, no_leaks: Any
) -> None:
    client = api.client(proxy.url, reply_timeout=20)
    await client.server_info()
    stalled = proxy.arm(stall(), after=MARK, times=1)
    tasks = [asyncio.ensure_future(client.lock(NAME).acquire()) for _ in range(5)]
    gone = [weakref.ref(task) for task in tasks]
    await asyncio.to_thread(stalled.wait)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    del task
    tasks.clear()
    await asyncio.sleep(0)
    gc.collect()
    assert client._transport.connection.stream.pending >= 5 and [each() for each in gone] == [None] * 5
    stalled.resume()
    await in_step(client)
    assert not probe.exists(NAME)


@both_loops
async def test_an_awaited_operation_cannot_be_awaited_again_and_closing_it_changes_nothing(
    api: Api, server: Server, probe: redis.Redis, no_leaks: Any
) -> None:
    lock = api.client(server.unix_url).lock(NAME)
    await lock.locked()
    for _ in range(2):
        entered: Any = lock.__aenter__()
        lease = await entered
        entered.close()
        for again in (lambda entered=entered: entered, lambda entered=entered: asyncio.ensure_future(entered)):
            with pytest.raises(RuntimeError, match="already awaited"):
                await again()
        assert lock.lease is lease and await lock.owned(), "nothing was undone, nothing granted twice"
        left: Any = lock.__aexit__(None, None, None)
        await left
        left.close()
        for awaited in (entered, left):
            with pytest.raises(RuntimeError, match="already awaited"):
                await awaited
        assert lock.lease is None and not probe.exists(NAME)
        begun: Any = lock.__aenter__()
        begun.close()
        with pytest.raises(RuntimeError, match="already awaited"):
            await begun
        begun = lock.__aenter__()
        with pytest.raises(OfTheCaller):
            begun.throw(OfTheCaller())
        with pytest.raises(RuntimeError, match="already awaited"):
            await begun
    assert not probe.exists(NAME)


@pytest.mark.parametrize("method", ["acquire", "release", "extend", "reacquire", "owned", "locked"])
async def test_methods_are_coroutine_functions_to_frameworks(impl: str, method: str) -> None:
    """Starlette runs a background task in a thread unless it is one."""
    found = getattr(fastlock.asyncio.Client(unix_socket_path="/nowhere").lock(NAME), method)
    is_coroutine_function = inspect.iscoroutinefunction if sys.version_info >= (3, 12) else asyncio.iscoroutinefunction
    assert is_coroutine_function(found)


async def test_the_awaitable_is_a_coroutine_to_asyncio(impl: str) -> None:
    """So that it can be the whole of a task."""
    lock = fastlock.asyncio.Client(unix_socket_path="/nowhere").lock(NAME)
    for made in (lock.__aenter__(), lock.__aexit__(None, None, None)):
        assert asyncio.iscoroutine(made) and inspect.isawaitable(made)
        made.close()  # type: ignore[attr-defined]
