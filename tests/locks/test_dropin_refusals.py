"""What a drop-in cannot support is refused with a message: pipelines, fakes, tunnels, parts of redis-py's own lock.

What it can support works: connections that only add to redis-py's, subclasses that override public methods.
"""

from __future__ import annotations

import itertools
from typing import Any

import fakeredis
import pytest
import redis
import redis.asyncio
import redis.lock
from support.apis import Api
from support.redispy import end, ending, module

from fastlock.embedded import Server

pytestmark = pytest.mark.usefixtures("impl")


async def test_lock_on_a_pipeline_is_refused(api: Api, server: Server, probe: redis.Redis) -> None:
    async with ending(api, module(api).Redis(port=server.port)) as client:
        for transaction in (True, False):
            pipeline = client.pipeline(transaction=transaction)
            with pytest.raises(TypeError, match=r"pipeline.*give the client"):
                pipeline.lock("a", lock_class=api.module.Lock)
            with pytest.raises(TypeError, match=r"pipeline.*give the client"):
                api.module.Lock(pipeline, "a")
            assert len(pipeline) == 0 and probe.keys() == []
            await api.get(pipeline.reset())


# ---------------------------------------------------------------------------------------------------------------- fakes

FAKES = {False: [fakeredis.FakeRedis, fakeredis.FakeStrictRedis], True: [fakeredis.FakeAsyncRedis]}


@pytest.mark.parametrize("address", ["none", "host", "url"])
async def test_fake_client_is_refused_also_with_the_address_of_a_server(
    api: Api, server: Server, probe: redis.Redis, address: str, no_leaks: Any
) -> None:
    """Data would go to the fake, but the lock to the real server at its address."""
    for kind in FAKES[api.is_async]:
        if address == "url":
            fake = kind.from_url(server.tcp_url)
        else:
            fake = kind(host="127.0.0.1", port=server.port) if address == "host" else kind()
        for client in (fake, module(api).Redis(connection_pool=fake.connection_pool)):
            with pytest.raises(TypeError, match=r"fakeredis.*fastlock\.embedded\.Server\(\)"):
                client.lock("a", timeout=5, lock_class=api.module.Lock)
        await api.get(end(fake))


def connections(api: Api) -> tuple[Any, Any]:
    """A connection class that only adds to redis-py's, and one that connects through a tunnel."""
    connected: list[Any] = []

    if api.is_async:

        class Counting(redis.asyncio.Connection):
            async def disconnect(self, *args: Any, **kwargs: Any) -> None:
                connected.append(self)
                await super().disconnect(*args, **kwargs)

        class Tunnel(redis.asyncio.Connection):
            async def _connect(self) -> None:
                await super()._connect()  # through something

        return Counting, Tunnel

    class CountingToo(redis.Connection):
        def connect(self, *args: Any, **kwargs: Any) -> None:
            connected.append(self)
            super().connect(*args, **kwargs)

    class TunnelToo(redis.Connection):
        def _connect(self) -> Any:
            return super()._connect()  # through something

    return CountingToo, TunnelToo


async def test_connection_class_is_refused_only_if_it_connects_its_own_way(
    api: Api, server: Server, no_leaks: Any
) -> None:
    adding, tunnel = connections(api)
    of = module(api)
    pool = of.ConnectionPool(connection_class=adding, host="127.0.0.1", port=server.port)
    async with ending(api, of.Redis(connection_pool=pool)) as client:
        lock = api.module.Lock(client, "a", timeout=5)
        assert await api.get(lock.acquire()) is True
        await api.get(lock.release())
    pool = of.ConnectionPool(connection_class=tunnel, host="127.0.0.1", port=server.port)
    with pytest.raises(TypeError, match=r"Tunnel.*opens its connections in a way of its own"):
        api.module.Lock(of.Redis(connection_pool=pool), "a")


# --------------------------------------------------------------------------------------------- parts of redis-py's lock

METHODS = ("acquire", "release", "extend", "reacquire")
INTERNALS = [
    name
    for method in METHODS
    for name in (f"do_{method}", f"lua_{method}", f"LUA_{method.upper()}_SCRIPT")
    if hasattr(redis.lock.Lock, name)
]


@pytest.mark.parametrize("name", [*INTERNALS, "register_scripts"])
async def test_internals_of_redis_pys_lock_cannot_be_overridden(api: Api, server: Server, name: str) -> None:
    """redbeat, for one, replaces `lua_extend`: if that were ignored, extend would add to the lease, not set it."""
    kind = api.module.Lock
    method = next((method for method in METHODS if method in name.lower().split("_")), "")
    message = rf"{name}.*would be ignored.*{method}"
    mixin = type("Mixin", (), {name: None})
    for bases, body in (((kind,), {name: None}), ((mixin, kind), {}), ((type("Between", (kind,), {}),), {name: None})):
        with pytest.raises(TypeError, match=rf"Mine: .*{message}"):
            type("Mine", bases, body)
    for owner in (kind, type("Mine", (kind,), {})):
        with pytest.raises(AttributeError, match=message):
            setattr(owner, name, None)
    async with ending(api, module(api).Redis(port=server.port)) as client:
        lock = client.lock("a", timeout=5, lock_class=kind)
        with pytest.raises(AttributeError, match=message):
            setattr(lock, name, client.register_script("return 1"))
        assert not hasattr(lock, name)


def test_refused_names_cover_all_internals_of_redis_pys_lock() -> None:
    from fastlock._locks import redis_py

    theirs = {name for name in vars(redis.lock.Lock) if name.startswith(("do_", "lua_", "LUA_", "register_"))}
    assert theirs <= redis_py._NOT_HERE.keys()


async def test_subclass_of_both_locks_works_as_fastlocks(api: Api, server: Server, no_leaks: Any) -> None:
    """Such a subclass passes isinstance checks for redis-py's lock."""
    kind = type("Both", (api.module.Lock, redis.lock.Lock), {})
    async with ending(api, module(api).Redis(port=server.port)) as client:
        lock = kind(client, "a", timeout=5)
        assert isinstance(lock, redis.lock.Lock)
        await api.enter(lock)
        assert lock.lease.valid
        await api.leave(lock)


# ----------------------------------------------------------------------------------------------------------- what works


def overriding(api: Api, log: list[str]) -> Any:
    """A subclass as written for redis-py's lock, to log or to measure."""
    if api.is_async:

        class Async(api.module.Lock):
            async def acquire(self, *args: Any, **kwargs: Any) -> bool:
                log.append("acquire")
                return await super().acquire(*args, **kwargs)

            async def release(self) -> None:
                log.append("release")
                await super().release()

        return Async

    class Sync(api.module.Lock):
        def acquire(self, *args: Any, **kwargs: Any) -> bool:
            log.append("acquire")
            return super().acquire(*args, **kwargs)

        def release(self) -> None:
            log.append("release")
            super().release()

    return Sync


async def test_with_calls_acquire_and_release_of_a_subclass(
    api: Api, server: Server, probe: redis.Redis, no_leaks: Any
) -> None:
    log: list[str] = []
    async with ending(api, module(api).Redis(port=server.port)) as client:
        for kind in (overriding(api, log), type("Below", (overriding(api, log),), {})):
            lock = kind(client, "a", timeout=5, blocking=False)
            assert await api.enter(lock) is lock
            assert probe.get("a") == lock.local.token
            other = kind(client, "a", timeout=5, blocking_timeout=0)
            with pytest.raises(redis.exceptions.LockError, match="Unable to acquire"):
                await api.enter(other)
            await api.leave(lock)
            assert log == ["acquire", "acquire", "release"]
            log.clear()
            await api.enter(lock)
            probe.delete("a")
            with pytest.raises(redis.exceptions.LockNotOwnedError):
                await api.leave(lock)
            log.clear()


async def test_subclass_may_define_its_own_with(api: Api, server: Server, no_leaks: Any) -> None:
    seen: list[str] = []
    enter, leave = ("__aenter__", "__aexit__") if api.is_async else ("__enter__", "__exit__")
    body = {name: lambda self, *about, name=name: seen.append(name) for name in (enter, leave, "acquire", "release")}
    kind = type("Own", (api.module.Lock,), body)
    async with ending(api, module(api).Redis(port=server.port)) as client:
        lock = kind(client, "a")
        getattr(lock, enter)()
        getattr(lock, leave)(None, None, None)
    assert seen == [enter, leave]


async def test_blocking_with_blocking_timeout_is_checked_before_sending(api: Api, server: Server) -> None:
    """The drop-in accepts blocking=False with a blocking_timeout; fastlock's own locks refuse it."""
    client = api.client(server.unix_url)
    async with ending(api, module(api).Redis(port=server.port)) as theirs:
        for blocking, seconds in itertools.product((True, False), (0, 1, -1)):
            lock = api.module.Lock(theirs, "a", timeout=5, blocking=blocking, blocking_timeout=seconds)
            assert await api.get(lock.acquire()) is True
            assert await api.get(lock.acquire(blocking=False, blocking_timeout=seconds)) is False
            await api.get(lock.release())
            if seconds < 0 or not blocking:
                with pytest.raises(ValueError, match="blocking_timeout"):
                    client.lock("a", blocking=blocking, blocking_timeout=seconds)
