"""fastlock's locks in place of redis-py's: made the same way, same results, same key and token; fleets may mix them."""

from __future__ import annotations

import asyncio
import gc
import inspect
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio
import redis.asyncio.lock
import redis.lock
import redis.sentinel
from support.apis import Api
from support.child_client import until
from support.faultproxy import FaultProxy
from support.redispy import Inner, end, ending, theirs

import fastlock
import fastlock.asyncio
from fastlock._locks import redis_py
from fastlock._transport.settings import settings_from_pool
from fastlock.embedded import Server

ROOT = Path(fastlock.__file__).parent.parent
pytestmark = pytest.mark.usefixtures("impl")
NOT_HELD = {  # redis-py's messages before 5.1, and since
    "Cannot release an unlocked lock",
    "Cannot release a lock that's not owned or is already unlocked.",
}


@asynccontextmanager
async def redis_client(api: Api, server: Server | None, **keywords: Any) -> AsyncIterator[Any]:
    """A redis-py client of the API, closed at the end together with the fastlock client behind it."""
    kind = redis.asyncio.Redis if api.is_async else redis.Redis
    url = keywords.pop("url", None)
    path = {} if server is None else {"unix_socket_path": server.path}
    client = kind.from_url(url, **keywords) if url else kind(**{**path, **keywords})
    async with ending(api, client):
        yield client


# ------------------------------------------------------------------------------------------------- made and used


async def test_a_signal_handler_may_make_a_lock_while_one_is_made(
    api: Api, server: Server, probe: redis.Redis, no_leaks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interrupted thread has begun to make the client of a pool: of the same pool, or of another."""
    real, made = settings_from_pool, list[Any]()
    async with redis_client(api, server) as one, redis_client(api, server) as other:

        def interrupted(pool: Any) -> Any:
            if not made:
                made.append(None)
                made.extend(api.module.Lock(each, "a") for each in (one, other))
            return real(pool)

        monkeypatch.setattr(redis_py, "settings_from_pool", interrupted)
        made.append(api.module.Lock(one, "a"))
        same, another, outer = made[1:]
        assert same._client is outer._client is Inner.of(one) is not another._client is Inner.of(other)
        assert await api.get(outer.acquire()) and not await api.get(another.acquire(blocking=False))
        await api.get(outer.release())


async def test_a_lock_made_in_either_way_behaves_as_redis_pys(
    api: Api, server: Server, probe: redis.Redis, no_leaks: Any
) -> None:
    async with redis_client(api, server) as client:
        for lock in (
            api.module.Lock(client, "a"),
            client.lock("a", lock_class=api.module.Lock),
            theirs(api)(client, "a"),
        ):
            assert lock.local.token is None and lock.redis is client and lock.name == "a"
            assert await api.get(lock.acquire(blocking=False)) is True
            assert probe.get("a") == lock.local.token and type(lock.local.token) is bytes
            assert probe.pttl("a") == -1, "redis-py's default is a lock without end"
            assert await api.get(lock.locked()) is True and await api.get(lock.owned()) is True
            assert await api.get(lock.acquire(blocking=False)) is False
            with pytest.raises(
                redis.exceptions.LockError, match=r"^Cannot extend (a lock with|lock 'a': it has) no timeout"
            ):
                await api.get(lock.extend(5))
            assert await api.get(lock.release()) is None
            assert lock.local.token is None and probe.keys() == []
            with pytest.raises(redis.exceptions.LockError) as caught:
                await api.get(lock.release())
            assert str(caught.value).startswith("Cannot release ")  # the rest depends on redis-py's version
            assert isinstance(lock, theirs(api)) or "'a': it is not owned" in str(caught.value)
            assert await api.get(lock.locked()) is False and await api.get(lock.owned()) is False


async def test_every_keyword_of_redis_py_is_taken_and_kept(api: Api, server: Server, no_leaks: Any) -> None:
    async with redis_client(api, server) as client:
        settings: dict[str, Any] = {
            "timeout": 5,
            "sleep": 0.01,
            "blocking": True,
            "blocking_timeout": 0.02,
            "thread_local": False,
            "raise_on_release_error": False,
        }
        known = inspect.signature(client.lock).parameters  # redis-py 5.0 lacks the newest of them
        passed = {name: value for name, value in settings.items() if name in known}
        for lock in (
            api.module.Lock(client, "a", **settings),
            client.lock("a", lock_class=api.module.Lock, **passed),
        ):
            given = {name: getattr(lock, name) for name in settings}
            assert given == settings or (passed != settings and given == {**settings, "raise_on_release_error": True})
            assert await api.get(lock.acquire(blocking_timeout=30)) and await api.get(lock.acquire()) is False
            assert await api.get(lock.extend(5)) is True and await api.get(lock.extend(5, True)) is True
            assert await api.get(lock.reacquire()) is True
            await api.get(lock.release())


async def test_with_returns_the_lock_itself(api: Api, server: Server, probe: redis.Redis, no_leaks: Any) -> None:
    async with redis_client(api, server) as client:
        lock = api.module.Lock(client, "a", timeout=5)
        assert await api.enter(lock) is lock
        assert probe.get("a") == lock.local.token == lock.lease.token and lock.lease.valid
        await api.leave(lock)
        assert probe.keys() == [] and lock.lease is None
        other = client.lock("a", timeout=5, blocking_timeout=0, lock_class=api.module.Lock)
        probe.set("a", "somebody else", px=10_000)
        with pytest.raises(redis.exceptions.LockError, match=r"^Unable to acquire lock 'a' within 0 seconds"):
            await api.enter(other)
        probe.delete("a")


@pytest.mark.parametrize(
    "name", ["text", "ünï", b"bytes\x00\xff", memoryview(b"view")], ids=["text", "utf8", "bytes", "view"]
)
@pytest.mark.parametrize(
    "options",
    [{}, {"decode_responses": True}, {"encoding": "latin-1"}],
    ids=["plain", "str", "latin"],
)
async def test_the_same_name_is_the_same_key_for_both(
    api: Api, server: Server, probe: redis.Redis, name: Any, options: dict[str, Any], no_leaks: Any
) -> None:
    async with redis_client(api, server, **options) as client:
        ours, other = api.module.Lock(client, name, timeout=5), theirs(api)(client, name, timeout=5)
        for first, second in ((ours, other), (other, ours)):
            assert await api.get(first.acquire(blocking=False, token="tökén"))
            (key,) = probe.keys()
            assert probe.get(key) == first.local.token == "tökén".encode(options.get("encoding", "utf-8"))
            assert await api.get(second.acquire(blocking=False)) is False
            assert await api.get(second.locked()) and not await api.get(second.owned())
            second.local.token = first.local.token
            assert await api.get(second.owned()) and await api.get(second.extend(1)) is True
            await api.get(second.release())
            with pytest.raises(redis.exceptions.LockNotOwnedError):
                await api.get(first.release())


# ------------------------------------------------------------------------------------------------------- the token


async def test_another_owner_can_release_with_the_token(
    api: Api, server: Server, probe: redis.Redis, no_leaks: Any
) -> None:
    async with redis_client(api, server) as client:
        lock = api.module.Lock(client, "a", timeout=10)
        assert await api.get(lock.acquire())
        token = lock.local.token

        async def other() -> None:
            assert lock.local.token is None
            with pytest.raises(redis.exceptions.LockError):
                await api.get(lock.release())
            for carried in (token, token.decode()):
                lock.local.token = carried
                assert lock.local.token == token and await api.get(lock.owned())
            assert await api.get(lock.extend(10)) is True and await api.get(lock.reacquire()) is True
            await api.get(lock.release())
            assert lock.local.token is None

        await api.start(other).get()
        assert lock.local.token == token and not await api.get(lock.owned())
        with pytest.raises(redis.exceptions.LockNotOwnedError):
            await api.get(lock.release())
        assert probe.keys() == []


async def test_a_wrong_token_owns_nothing_and_none_releases_nothing(
    api: Api, server: Server, probe: redis.Redis
) -> None:
    async with redis_client(api, server) as client:
        lock = api.module.Lock(client, "a", timeout=10)
        assert await api.get(lock.acquire())
        before = probe.get("a")
        lock.local.token = "a guess"
        assert await api.get(lock.owned()) is False
        with pytest.raises(redis.exceptions.LockNotOwnedError):
            await api.get(lock.extend(5))
        lock.local.token = None
        with pytest.raises(redis.exceptions.LockError, match="already unlocked"):
            await api.get(lock.release())
        assert probe.get("a") == before


CARRIER = """
import sys, redis, fastlock
path, token = sys.argv[1:]
lock = fastlock.Lock(redis.Redis(unix_socket_path=path), "a", timeout=10)
lock.local.token = token
lock.release()
print("released")
"""


@pytest.mark.parametrize("api", ["threads"], indirect=True)
def test_another_process_can_release_with_the_token(
    api: Api, server: Server, probe: redis.Redis, no_leaks: Any
) -> None:
    with redis.Redis(unix_socket_path=server.path) as client:
        lock = fastlock.Lock(client, "a", timeout=10)
        assert lock.acquire()
        command = [sys.executable, "-c", CARRIER, server.path, lock.local.token.decode()]
        assert subprocess.check_output(command, cwd=ROOT, text=True, timeout=30) == "released\n"
        assert probe.keys() == [] and not lock.owned()
        Inner.of(client).close()


def token_of(lock: Any) -> Any:
    return getattr(lock.local, "token", None)  # redis-py has no attribute at all in a thread that never acquired


@pytest.mark.parametrize("api", ["threads"], indirect=True)
@pytest.mark.parametrize("kind", [fastlock.Lock, redis.lock.Lock], ids=["fastlock", "redis-py"])
def test_thread_local_hides_the_token_from_other_threads(api: Api, server: Server, kind: Any, no_leaks: Any) -> None:
    """The same cases as in redis-py's own tests."""
    with redis.Redis(unix_socket_path=server.path) as client:
        for thread_local, seen_by_other in ((True, None), (False, b"the token")):
            lock = kind(client, "a", thread_local=thread_local)
            assert lock.acquire(token="the token") and lock.local.token == b"the token"
            seen: list[Any] = []
            thread = threading.Thread(target=lambda lock=lock, seen=seen: seen.append(token_of(lock)))
            thread.start()
            thread.join()
            assert seen == [seen_by_other]
            lock.release()
        if inner := Inner.of(client):
            inner.close()


def keep(probe: redis.Redis) -> None:
    """Lose nothing, as nothing was acquired."""


def overwrite(probe: redis.Redis) -> None:
    probe.set("a", "somebody else")


def delete(probe: redis.Redis) -> None:
    probe.delete("a")


@pytest.mark.parametrize("verb", ["release", "extend", "reacquire"])
@pytest.mark.parametrize("lose", [keep, overwrite, delete])
async def test_losses_raise_what_redis_py_raises(
    api: Api, server: Server, probe: redis.Redis, lose: Callable[[redis.Redis], None], verb: str, no_leaks: Any
) -> None:
    not_owned: list[bool] = []
    async with redis_client(api, server) as client:
        for kind in (api.module.Lock, theirs(api)):
            lock = kind(client, "a", timeout=10)
            if lose is not keep:
                await api.get(lock.acquire())
                lose(probe)
            with pytest.raises(redis.exceptions.LockError) as caught:
                await api.get(lock.extend(5) if verb == "extend" else getattr(lock, verb)())
            not_owned.append(isinstance(caught.value, redis.exceptions.LockNotOwnedError))
            assert str(caught.value).startswith(f"Cannot {verb} ")
            probe.delete("a")
    ours, other = not_owned
    assert ours == other or {ours[1], other[1]} == NOT_HELD


# ------------------------------------------------------------------------------------------------------- the client


async def test_all_locks_of_a_pool_share_one_client(
    api: Api, server: Server, probe: redis.Redis, no_leaks: Any
) -> None:
    old = server.version.startswith(
        ("6", "7.0")
    )  # knows no names of libraries, so redis-py's own connection counts too
    extra = 1 if old else 0

    def count() -> int:
        others = [each for each in probe.client_list() if each["name"] != "test-probe"]
        return len(others) if old else sum(each.get("lib-name", "").startswith("fastlock(") for each in others)

    kind = redis.asyncio.Redis if api.is_async else redis.Redis
    client = kind(unix_socket_path=server.path)
    same_pool = kind(connection_pool=client.connection_pool)
    await api.get(client.ping())
    for number in range(20):
        lock = api.module.Lock((client, same_pool)[number % 2], f"n{number}", timeout=5)
        await api.get(lock.acquire())
        await api.get(lock.release())
    assert count() == 1 + extra and Inner.of(client) is Inner.of(same_pool)
    transport = Inner.of(client)._transport
    async with redis_client(api, server) as another:
        lock = api.module.Lock(another, "a", timeout=5)
        assert await api.get(lock.acquire()) and count() == 2 + extra
        await api.get(lock.release())
    await api.get(end(client))
    del client, same_pool, lock
    gc.collect()
    deadline = time.monotonic() + 5
    while count() and time.monotonic() < deadline:
        await asyncio.sleep(0.005) if api.is_async else time.sleep(0.005)
    left = probe.client_list() if count() else []
    await api.get(transport.close())
    assert left == [], "a collected pool leaves fastlock's connection behind"


async def test_the_first_lock_waits_for_a_restarting_server(api: Api, proxy: FaultProxy, no_leaks: Any) -> None:
    """redis-py 8 does so too: a worker that starts at that moment must not fail for it."""
    proxy.hanging_up = True
    async with redis_client(api, None, url=proxy.url, retry=None) as client:
        lock = api.module.Lock(client, "a", timeout=5, thread_local=False)
        job = api.start(lock.acquire)
        await until(api, lambda: proxy.accepted > 2, "another try")
        proxy.hanging_up = False
        assert await job.get() is True
        await api.get(lock.release())


@pytest.mark.filterwarnings("ignore:unclosed", "ignore:coroutine .* was never awaited")
def test_a_loop_closed_with_waiting_tasks_frees_the_client(server: Server, probe: redis.Redis) -> None:
    """The waiting task references the lock, the lock its redis-py client, and that client the pool."""

    async def begin() -> weakref.ref[Any]:
        client = redis.asyncio.Redis(unix_socket_path=server.path)
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: None)  # each task logs that it was destroyed
        tasks.append(loop.create_task(fastlock.asyncio.Lock(client, "a", timeout=5).acquire()))
        while not probe.exists("fastlock:queue:{a}"):
            await asyncio.sleep(0.001)
        return weakref.ref(Inner.of(client))

    probe.set("a", "somebody else")
    tasks: list[Any] = []
    loop = asyncio.new_event_loop()
    inner = loop.run_until_complete(begin())
    loop.close()
    tasks.clear()
    gc.collect()
    assert inner() is None
    probe.delete("a", "fastlock:queue:{a}")


@pytest.mark.parametrize("api", ["asyncio", "asyncio+uvloop"], indirect=True)
def test_a_redis_client_may_outlive_its_event_loop(api: Api, server: Server, no_leaks: Any) -> None:
    """redis-py allows it after aclose(), and web frameworks do it in their tests."""
    client = redis.asyncio.Redis(unix_socket_path=server.path)

    async def use() -> None:
        async with fastlock.asyncio.Lock(client, "a", timeout=5) as lock:
            assert await lock.owned()
        await Inner.of(client).close()
        await end(client)

    for _ in range(3):
        api.run(use())


PLACES = ["unix", "tcp", "password", "user", "database", "name"]


@pytest.mark.parametrize("place", PLACES)
async def test_address_and_user_are_taken_from_the_pool(
    api: Api, server: Server, probe: redis.Redis, start_server: Callable[..., Server], place: str, request: Any
) -> None:
    options: dict[str, Any] = {}
    if place == "password":
        server = start_server(server.kind, password="s3cr#t/ü:@")
        probe = redis.Redis(unix_socket_path=server.path, password="s3cr#t/ü:@")
        request.addfinalizer(probe.close)
        options = {"password": "s3cr#t/ü:@"}
    elif place == "user":
        probe.execute_command("ACL", "SETUSER", "locker", "on", ">word", "~*", "&*", "+@all")
        request.addfinalizer(lambda: probe.execute_command("ACL", "DELUSER", "locker"))
        options = {"username": "locker", "password": "word"}
    elif place == "database":
        options = {"db": 3}
        probe = redis.Redis(unix_socket_path=server.path, db=3)
        request.addfinalizer(probe.close)
    elif place == "name":
        options = {"client_name": "checkout"}
    if place == "tcp":
        options = {"url": server.tcp_url}
    async with redis_client(api, server, **options) as client:
        lock = api.module.Lock(client, "a", timeout=5)
        assert await api.get(lock.acquire())
        assert probe.get("a") == lock.local.token
        if place == "name":
            assert "checkout" in [each["name"] for each in probe.client_list()]
        elif place == "user":
            assert "locker" in [each["user"] for each in probe.client_list()]
        await api.get(lock.release())
        assert probe.keys() == []


def cluster(server: Server, asynchronous: bool) -> Any:
    if asynchronous:
        return redis.asyncio.RedisCluster(host="127.0.0.1", port=server.port)
    return redis.RedisCluster(host="127.0.0.1", port=server.port)


async def test_clients_of_other_kinds_are_refused_by_name(api: Api, start_server: Callable[..., Server]) -> None:
    make = api.module.Lock
    right, wrong = ("asyncio.Redis", redis.Redis()) if api.is_async else ("redis.Redis", redis.asyncio.Redis())
    with pytest.raises(TypeError, match="use fastlock.Lock$" if api.is_async else r"use fastlock.asyncio.Lock$"):
        make(wrong, "a")
    for nothing in (None, "redis://localhost", 5, object()):
        with pytest.raises(TypeError, match=rf"redis must be a .*{right}"):
            make(nothing, "a")
    sentinels = redis.asyncio.sentinel.Sentinel if api.is_async else redis.sentinel.Sentinel
    with pytest.raises(TypeError, match="Sentinel"):
        make(sentinels([("127.0.0.1", 1)]), "a")
    with pytest.raises(TypeError, match="Sentinel"):
        make(sentinels([("127.0.0.1", 1)]).master_for("service"), "a")
    server = start_server("valkey", tcp=True, args=("--cluster-enabled", "yes"))
    with redis.Redis(unix_socket_path=server.path) as raw:
        raw.execute_command("CLUSTER ADDSLOTSRANGE", 0, 16383)
        while raw.cluster("info")["cluster_state"] != "ok":
            time.sleep(0.01)
    nodes = cluster(server, api.is_async)
    with pytest.raises(TypeError, match="Cluster"):
        make(nodes, "a")
    await api.get(end(nodes))


# ---------------------------------------------------------------------------------------------------- mixed fleets


async def test_a_mixed_fleet_never_has_two_holders(api: Api, server: Server, probe: redis.Redis, no_leaks: Any) -> None:
    async with redis_client(api, server) as client, redis_client(api, server) as raw:
        overlaps: list[int] = []

        async def worker(kind: Any) -> None:
            lock = kind(client, "a", timeout=20, sleep=0.001)
            for _ in range(12):
                assert await api.get(lock.acquire())
                overlaps.append(await api.get(raw.incr("inside")))
                total = int(await api.get(raw.get("sum")) or 0)
                await api.get(raw.set("sum", total + 1))
                await api.get(raw.decr("inside"))
                await api.get(lock.release())

        kinds = [api.module.Lock, theirs(api)] * 4
        assert await api.together([lambda kind=kind: worker(kind) for kind in kinds]) == [None] * 8
        assert overlaps == [1] * 96 and int(probe.getdel("sum")) == 96 and int(probe.getdel("inside")) == 0


async def test_clients_and_drop_ins_exclude_each_other(
    api: Api, server: Server, probe: redis.Redis, no_leaks: Any
) -> None:
    async with redis_client(api, server) as client:
        dropin, native = api.module.Lock(client, "a", timeout=10), api.client(server.unix_url).lock("a")
        for first, second in ((dropin, native), (native, dropin)):
            assert await api.get(first.acquire())
            assert await api.get(second.acquire(blocking=False)) is False
            await api.get(first.release())
