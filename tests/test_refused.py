"""What cannot work as a drop-in is refused in words: pipelines, fakes, tunnels, and parts of redis-py's own lock.

And what can work does: connections that only add to redis-py's, subclasses that override what is public.
"""

from __future__ import annotations

import itertools
from typing import Any

import fakeredis
import pytest
import redis
import redis.asyncio
import redis.lock
from support.faces import Face
from support.redispy import end, ending, module

from fastlock.embedded import Server

pytestmark = pytest.mark.usefixtures("impl")


async def test_a_lock_on_a_pipeline_is_refused(face: Face, server: Server, probe: redis.Redis) -> None:
    async with ending(face, module(face).Redis(port=server.port)) as client:
        for transaction in (True, False):
            stream = client.pipeline(transaction=transaction)
            with pytest.raises(TypeError, match=r"pipeline.*give the client"):
                stream.lock("a", lock_class=face.module.Lock)
            with pytest.raises(TypeError, match=r"pipeline.*give the client"):
                face.module.Lock(stream, "a")
            assert len(stream) == 0 and probe.keys() == []
            await face.get(stream.reset())


# ------------------------------------------------------------------------------------------------------------- fakes

FAKES = {False: [fakeredis.FakeRedis, fakeredis.FakeStrictRedis], True: [fakeredis.FakeAsyncRedis]}


@pytest.mark.parametrize("entry", ["nowhere", "here", "url"])
async def test_a_fake_is_refused_also_where_a_real_server_is(
    face: Face, server: Server, probe: redis.Redis, entry: str, no_leaks: Any
) -> None:
    """Data would go to the fake, the lock to the server at its address."""
    for kind in FAKES[face.is_async]:
        if entry == "url":
            fake = kind.from_url(server.tcp_url)
        else:
            fake = kind(host="127.0.0.1", port=server.port) if entry == "here" else kind()
        for client in (fake, module(face).Redis(connection_pool=fake.connection_pool)):
            with pytest.raises(TypeError, match=r"fakeredis.*fastlock\.embedded\.Server\(\)"):
                client.lock("a", timeout=5, lock_class=face.module.Lock)
        await face.get(end(fake))


def connections(face: Face) -> tuple[Any, Any]:
    """A class of connections that only adds to redis-py's, and one that goes through a tunnel."""
    made: list[Any] = []

    if face.is_async:

        class Counting(redis.asyncio.Connection):
            async def disconnect(self, *args: Any, **kwargs: Any) -> None:
                made.append(self)
                await super().disconnect(*args, **kwargs)

        class Tunnel(redis.asyncio.Connection):
            async def _connect(self) -> None:
                await super()._connect()  # through something

        return Counting, Tunnel

    class CountingToo(redis.Connection):
        def connect(self, *args: Any, **kwargs: Any) -> None:
            made.append(self)
            super().connect(*args, **kwargs)

    class TunnelToo(redis.Connection):
        def _connect(self) -> Any:
            return super()._connect()  # through something

    return CountingToo, TunnelToo


async def test_connections_that_go_their_own_way_are_refused_and_others_are_not(
    face: Face, server: Server, no_leaks: Any
) -> None:
    adding, tunnel = connections(face)
    of = module(face)
    pool = of.ConnectionPool(connection_class=adding, host="127.0.0.1", port=server.port)
    async with ending(face, of.Redis(connection_pool=pool)) as client:
        lock = face.module.Lock(client, "a", timeout=5)
        assert await face.get(lock.acquire()) is True
        await face.get(lock.release())
    pool = of.ConnectionPool(connection_class=tunnel, host="127.0.0.1", port=server.port)
    with pytest.raises(TypeError, match=r"Tunnel.*opens its connections in a way of its own"):
        face.module.Lock(of.Redis(connection_pool=pool), "a")


# ------------------------------------------------------------------------------------------- parts of redis-py's lock

VERBS = ("acquire", "release", "extend", "reacquire")
INNARDS = [
    name
    for verb in VERBS
    for name in (f"do_{verb}", f"lua_{verb}", f"LUA_{verb.upper()}_SCRIPT")
    if hasattr(redis.lock.Lock, name)
]


@pytest.mark.parametrize("name", [*INNARDS, "register_scripts"])
async def test_what_redis_pys_lock_is_made_of_cannot_be_replaced(face: Face, server: Server, name: str) -> None:
    """As redbeat replaces `lua_extend`: ignored, it would add to the lease where it should set it."""
    kind = face.module.Lock
    verb = next((verb for verb in VERBS if verb in name.lower().split("_")), "")
    words = rf"{name}.*would be ignored.*{verb}"
    mixin = type("Mixin", (), {name: None})
    for bases, body in (((kind,), {name: None}), ((mixin, kind), {}), ((type("Between", (kind,), {}),), {name: None})):
        with pytest.raises(TypeError, match=rf"Mine: .*{words}"):
            type("Mine", bases, body)
    for owner in (kind, type("Mine", (kind,), {})):
        with pytest.raises(AttributeError, match=words):
            setattr(owner, name, None)
    async with ending(face, module(face).Redis(port=server.port)) as client:
        lock = client.lock("a", timeout=5, lock_class=kind)
        with pytest.raises(AttributeError, match=words):
            setattr(lock, name, client.register_script("return 1"))
        assert not hasattr(lock, name)


def test_the_parts_are_all_that_redis_pys_lock_has() -> None:
    from fastlock._locks import redis_py

    theirs = {name for name in vars(redis.lock.Lock) if name.startswith(("do_", "lua_", "LUA_", "register_"))}
    assert theirs <= redis_py._INNARDS.keys()


async def test_a_subclass_of_both_is_ours(face: Face, server: Server, no_leaks: Any) -> None:
    """To pass for redis-py's lock where one is asked for by its class."""
    kind = type("Both", (face.module.Lock, redis.lock.Lock), {})
    async with ending(face, module(face).Redis(port=server.port)) as client:
        lock = kind(client, "a", timeout=5)
        assert isinstance(lock, redis.lock.Lock)
        await face.enter(lock)
        assert lock.lease.valid
        await face.leave(lock)


# ------------------------------------------------------------------------------------------------------- what can work


def overriding(face: Face, log: list[str]) -> Any:
    """A subclass as one writes it for redis-py's lock, to log or to measure."""
    if face.is_async:

        class Async(face.module.Lock):
            async def acquire(self, *args: Any, **kwargs: Any) -> bool:
                log.append("acquire")
                return await super().acquire(*args, **kwargs)

            async def release(self) -> None:
                log.append("release")
                await super().release()

        return Async

    class Sync(face.module.Lock):
        def acquire(self, *args: Any, **kwargs: Any) -> bool:
            log.append("acquire")
            return super().acquire(*args, **kwargs)

        def release(self) -> None:
            log.append("release")
            super().release()

    return Sync


async def test_a_subclass_s_acquire_and_release_hold_for_with(
    face: Face, server: Server, probe: redis.Redis, no_leaks: Any
) -> None:
    log: list[str] = []
    async with ending(face, module(face).Redis(port=server.port)) as client:
        for kind in (overriding(face, log), type("Below", (overriding(face, log),), {})):
            lock = kind(client, "a", timeout=5, blocking=False)
            assert await face.enter(lock) is lock
            assert probe.get("a") == lock.local.token
            other = kind(client, "a", timeout=5, blocking_timeout=0)
            with pytest.raises(redis.exceptions.LockError, match="Unable to acquire"):
                await face.enter(other)
            await face.leave(lock)
            assert log == ["acquire", "acquire", "release"]
            log.clear()
            await face.enter(lock)
            probe.delete("a")
            with pytest.raises(redis.exceptions.LockNotOwnedError):
                await face.leave(lock)
            log.clear()


async def test_a_subclass_with_its_own_with_keeps_it(face: Face, server: Server, no_leaks: Any) -> None:
    seen: list[str] = []
    enter, leave = ("__aenter__", "__aexit__") if face.is_async else ("__enter__", "__exit__")
    body = {name: lambda self, *about, name=name: seen.append(name) for name in (enter, leave, "acquire", "release")}
    kind = type("Own", (face.module.Lock,), body)
    async with ending(face, module(face).Redis(port=server.port)) as client:
        lock = kind(client, "a")
        getattr(lock, enter)()
        getattr(lock, leave)(None, None, None)
    assert seen == [enter, leave]


async def test_every_mix_of_times_is_settled_before_anything_is_sent(face: Face, server: Server) -> None:
    """blocking=False beside a time is taken by the drop-in, and refused by fastlock's own locks."""
    client = face.client(server.unix_url)
    async with ending(face, module(face).Redis(port=server.port)) as theirs:
        for blocking, seconds in itertools.product((True, False), (0, 1, -1)):
            lock = face.module.Lock(theirs, "a", timeout=5, blocking=blocking, blocking_timeout=seconds)
            assert await face.get(lock.acquire()) is True
            assert await face.get(lock.acquire(blocking=False, blocking_timeout=seconds)) is False
            await face.get(lock.release())
            if seconds < 0 or not blocking:
                with pytest.raises(ValueError, match="blocking_timeout"):
                    client.lock("a", blocking=blocking, blocking_timeout=seconds)
