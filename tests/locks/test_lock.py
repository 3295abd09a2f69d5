"""What one lock promises: acquire, wait, extend, release, and what each of them reports.

A raw redis-py client (`probe`) asks the server for the truth, never fastlock itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable
from typing import Any

import pytest
import redis
from support.apis import Api
from support.faultproxy import FaultProxy

import fastlock
from fastlock._protocol.commands import token_matches
from fastlock._protocol.losses import LOST
from fastlock.embedded import Server

pytestmark = pytest.mark.usefixtures("no_leaks")
ACQUIRES = (b"SET", b"EVALSHA")


async def inside(api: Api, lock: Any, body: Callable[[Any], Any]) -> Any:
    """Run `body` in a real `with` or `async with`."""
    if api.is_async:
        async with lock as given:
            return await api.get(body(given))
    with lock as given:
        return body(given)


async def wait_for_attempts(api: Api, proxy: FaultProxy, name: bytes, count: int) -> None:
    """Return when the proxy has seen so many attempts to acquire `name`."""

    def seen(proxy: FaultProxy) -> bool:
        return attempts(proxy, name) >= count

    await (asyncio.to_thread(proxy.wait_for, seen) if api.is_async else api.get(proxy.wait_for(seen)))


def attempts(proxy: FaultProxy, name: bytes) -> int:
    return sum(args[0] in ACQUIRES and name in args for args in proxy.commands)


def wait_until_gone(probe: redis.Redis, name: str) -> None:
    """Return when the key has expired by the server's clock, which decides when a lease ends."""
    while (left := probe.pttl(name)) != -2:
        assert left >= 0, "it has no end"
        time.sleep((left + 1) / 1000)


# -------------------------------------------------------------------------------------------------- acquire and release


async def test_key_holds_the_token_for_the_timeout_and_is_gone_after_release(
    api: Api, server: Server, probe: redis.Redis
) -> None:
    lock = api.client(server.url).lock("a", timeout=10)
    assert await api.get(lock.acquire()) is True
    lease = lock.lease
    assert probe.keys() == [b"a"] and probe.get("a") == lease.token and len(lease.token) == 35
    assert lease.name == "a" and lease.valid and lease.fence is None
    asked, claimed = time.monotonic(), lease.remaining
    left = probe.pttl("a")
    assert 0 < left <= 10_000 and 0 < claimed <= 10
    assert asked + claimed <= time.monotonic() + (left + 2) / 1000, "the lease claims more than the server gave"
    assert await api.get(lock.release()) is None
    assert probe.keys() == [] and lock.lease is None


async def test_held_name_is_refused_and_its_holder_untouched(api: Api, server: Server, probe: redis.Redis) -> None:
    holder, other = (api.client(server.unix_url).lock("a") for _ in range(2))
    assert await api.get(holder.acquire())
    token = probe.get("a")
    assert await api.get(other.acquire(blocking=False)) is False
    assert other.lease is None and probe.get("a") == token == holder.lease.token
    with pytest.raises(fastlock.LockError):
        await api.get(other.release())
    assert probe.get("a") == token
    await api.get(holder.release())
    assert await api.get(other.acquire(blocking=False)) is True
    await api.get(other.release())


async def test_lock_can_be_reused_and_gets_a_new_token_each_time(api: Api, server: Server) -> None:
    lock = api.client(server.unix_url).lock("a")
    tokens = set()
    for _ in range(300):
        assert await api.get(lock.acquire(blocking=False))
        tokens.add(lock.lease.token)
        await api.get(lock.release())
    assert len(tokens) == 300


async def test_locked_and_owned_tell_the_holder_from_others(api: Api, server: Server, probe: redis.Redis) -> None:
    mine, other = (api.client(server.unix_url).lock("a") for _ in range(2))

    async def state(lock: Any) -> tuple[bool, bool]:
        return await api.get(lock.locked()), await api.get(lock.owned())

    assert await state(mine) == await state(other) == (False, False)
    await api.get(mine.acquire())
    assert await state(mine) == (True, True) and await state(other) == (True, False)
    probe.set("a", "somebody else")
    assert await state(mine) == (True, False)
    probe.delete("a")
    assert await state(mine) == (False, False)


TOKENS = {"text": "a token", "utf8": "tökén", "binary": b"\x00\xff\r\n$1", "longest": b"t" * 65536}


@pytest.mark.parametrize("token", TOKENS.values(), ids=TOKENS)
async def test_given_token_is_kept_to_the_byte(
    api: Api, server: Server, probe: redis.Redis, token: str | bytes
) -> None:
    mine, other = (api.client(server.unix_url).lock("a") for _ in range(2))
    raw = token.encode() if isinstance(token, str) else token
    assert await api.get(mine.acquire(token=token))
    assert probe.get("a") == raw == mine.lease.token and await api.get(mine.owned())
    assert await api.get(other.acquire(blocking=False, token=token)) is False, (
        "a token that is known must not acquire a second time"
    )
    assert await api.get(mine.extend(5)) is True
    await api.get(mine.release())
    assert probe.keys() == []


async def test_lock_without_timeout_does_not_expire(api: Api, server: Server, probe: redis.Redis) -> None:
    lock = api.client(server.unix_url).lock("a", timeout=None)
    assert await api.get(lock.acquire())
    assert probe.pttl("a") == -1
    assert lock.lease.remaining == math.inf and lock.lease.valid
    for call in (lambda: lock.extend(5), lambda: lock.extend(5, replace_ttl=True), lock.reacquire):
        with pytest.raises(fastlock.LockError, match="no timeout"):
            await api.get(call())
    assert probe.pttl("a") == -1
    await api.get(lock.release())


async def test_only_reacquire_gives_an_end_to_a_lease_without_timeout(
    api: Api, server: Server, probe: redis.Redis
) -> None:
    lock = api.client(server.unix_url).lock("a", timeout=None)
    assert await api.get(lock.acquire())
    lock.timeout = 10
    for call in (lambda: lock.extend(5), lambda: lock.extend(5, replace_ttl=True)):
        with pytest.raises(fastlock.LockError, match="without end") as caught:
            await api.get(call())
        assert not isinstance(caught.value, fastlock.LockNotOwnedError), "the lease is still the caller's"
    assert probe.pttl("a") == -1 and lock.lease.remaining == math.inf and await api.get(lock.owned())
    assert await api.get(lock.reacquire()) is True
    assert 5_000 < probe.pttl("a") <= 10_000 and 5 < lock.lease.remaining <= 10
    assert await api.get(lock.extend(5)) is True and 10 < lock.lease.remaining <= 15
    await api.get(lock.release())


async def test_loss_of_a_lease_without_timeout_is_reported_too(api: Api, server: Server, probe: redis.Redis) -> None:
    lock = api.client(server.unix_url).lock("a", timeout=None)
    for lose in (delete, overwrite):
        probe.delete("a")
        lock.timeout = None
        assert await api.get(lock.acquire())
        lock.timeout = 10
        lose(probe)
        with pytest.raises(fastlock.LockNotOwnedError):
            await api.get(lock.extend(5))
        assert not lock.lease.valid
        with pytest.raises(fastlock.LockNotOwnedError):
            await api.get(lock.release())
    probe.delete("a")


# -------------------------------------------------------------------------------------------------------------- waiting


async def test_waiter_gets_the_lock_when_it_is_released(api: Api, server: Server, proxy: FaultProxy) -> None:
    holder = api.client(server.unix_url).lock("a")
    waiter = api.client(proxy.url).lock("a", sleep=0.002)

    async def wait() -> bytes:
        assert await api.get(waiter.acquire())
        token = waiter.lease.token
        await api.get(waiter.release())
        return token

    await api.get(holder.acquire())
    job = api.start(wait)
    await wait_for_attempts(api, proxy, b"a", 2)
    assert not job.finished.is_set()
    await api.get(holder.release())
    assert len(await job.get()) == 35


async def test_waiter_gets_the_lock_of_a_holder_that_never_releases(api: Api, server: Server) -> None:
    dead, waiter = (api.client(server.unix_url).lock("a", timeout=0.05) for _ in range(2))
    await api.get(dead.acquire())
    lease = dead.lease
    assert await api.get(waiter.acquire()) is True
    assert not lease.valid and lease.remaining == 0.0, "two leases were valid at once"
    await api.get(waiter.release())


async def test_blocking_timeout_gives_up_and_leaves_nothing(api: Api, server: Server, probe: redis.Redis) -> None:
    holder, other = (api.client(server.unix_url).lock("a", sleep=0.005) for _ in range(2))
    await api.get(holder.acquire())
    started = time.monotonic()
    assert await api.get(other.acquire(blocking_timeout=0.1)) is False
    assert time.monotonic() - started > 0.05, "gave up long before its blocking_timeout"
    assert other.lease is None
    short_wait = api.client(server.unix_url).lock("a", sleep=0.005, blocking_timeout=0.01)
    assert await api.get(short_wait.acquire()) is False
    with pytest.raises(fastlock.LockError, match=r"^Unable to acquire lock 'a' within 0.01 seconds$") as caught:
        await inside(api, short_wait, lambda lease: pytest.fail("entered without the lock"))
    assert not isinstance(caught.value, fastlock.LockNotOwnedError) and caught.value.lock_name == "a"
    assert token_matches(probe.get("a"), holder.lease.token)
    await api.get(holder.release())


@pytest.mark.parametrize("server", ["valkey"], indirect=True)
async def test_last_attempt_comes_at_the_end_of_blocking_timeout(api: Api, server: Server, proxy: FaultProxy) -> None:
    """A lock that was released meanwhile is acquired, however long the pause between two attempts is."""
    holder = api.client(server.unix_url).lock("a", timeout=None)
    waiter = api.client(proxy.url).lock("a", timeout=30, sleep=60, thread_local=False)
    await api.get(holder.acquire())
    job = api.start(lambda: waiter.acquire(blocking_timeout=1))
    await wait_for_attempts(api, proxy, b"a", 1)
    await api.get(holder.release())
    assert await job.get() is True
    await api.get(waiter.release())


@pytest.mark.parametrize("settings", [{"blocking_timeout": 0}, {"blocking_timeout": 0.0}, {"blocking": False}], ids=str)
async def test_acquire_that_may_not_wait_makes_exactly_one_attempt(
    api: Api, server: Server, proxy: FaultProxy, settings: dict[str, Any]
) -> None:
    holder, client = api.client(server.unix_url).lock("a"), api.client(proxy.url)
    await api.get(holder.acquire())
    assert await api.get(client.lock("a").acquire(**settings)) is False
    assert attempts(proxy, b"a") == 1
    assert await api.get(client.lock("a", **settings).acquire()) is False
    assert attempts(proxy, b"a") == 2
    await api.get(holder.release())
    for lock, given in ((client.lock("a"), settings), (client.lock("a", **settings), {})):
        assert await api.get(lock.acquire(**given)) is True, "a free lock needs no waiting"
        await api.get(lock.release())


async def test_arguments_of_acquire_override_the_locks_settings(api: Api, server: Server) -> None:
    client = api.client(server.unix_url)
    await api.get(client.lock("a", timeout=0.05).acquire())
    never = client.lock("a", blocking=False, timeout=1)
    assert await api.get(never.acquire()) is False
    assert await api.get(never.acquire(blocking=True, blocking_timeout=0.001)) is False
    assert await api.get(never.acquire(blocking=True, sleep=0.002)) is True
    brief = client.lock("a", blocking_timeout=0.001, timeout=1)
    assert await api.get(brief.acquire()) is False
    assert await api.get(brief.acquire(blocking=False)) is False
    await api.get(never.release())


# ------------------------------------------------------------------------------------------------------------ extending


async def test_extend_adds_or_replaces_and_reacquire_restores(api: Api, server: Server, probe: redis.Redis) -> None:
    lock = api.client(server.unix_url).lock("a", timeout=10)
    await api.get(lock.acquire())
    token = lock.lease.token
    for call, low, high in (
        (lambda: lock.extend(10), 10_000, 20_000),
        (lambda: lock.extend(0.5), 10_000, 20_500),
        (lambda: lock.extend(5, replace_ttl=True), 0, 5_000),
        (lambda: lock.extend(2.5), 5_000, 7_500),
        (lock.reacquire, 7_500, 10_000),
    ):
        assert await api.get(call()) is True
        assert low < probe.pttl("a") <= high and low / 1000 < lock.lease.remaining <= high / 1000
        assert probe.get("a") == token == lock.lease.token
    await api.get(lock.release())


async def test_extend_works_on_a_lease_that_ended_only_locally(api: Api, server: Server, probe: redis.Redis) -> None:
    lock = api.client(server.unix_url).lock("a", timeout=0.15)
    await api.get(lock.acquire())
    probe.persist("a")
    probe.pexpire("a", 5_000)
    time.sleep(lock.lease.remaining)
    assert not lock.lease.valid, "as far as this process knows, the lease has ended"
    assert await api.get(lock.extend(5)) is True
    assert lock.lease.valid and 4 < lock.lease.remaining <= 10
    asked, claimed = time.monotonic(), lock.lease.remaining
    left = probe.pttl("a")
    assert 5_000 < left <= 10_000
    assert asked + claimed <= time.monotonic() + (left + 2) / 1000, "the lease claims more than the server gave"
    await api.get(lock.release())


# ----------------------------------------------------------------------------------------------------------- lost locks


def delete(probe: redis.Redis) -> None:
    probe.delete("a")


def overwrite(probe: redis.Redis) -> None:
    probe.set("a", "somebody else", px=10_000)


def expire(probe: redis.Redis) -> None:
    probe.pexpire("a", 5)
    wait_until_gone(probe, "a")


def replace_by_a_list(probe: redis.Redis) -> None:
    probe.delete("a")
    probe.rpush("a", "no lock at all")


LOSSES = pytest.mark.parametrize("lose", [delete, overwrite, expire, replace_by_a_list])


@LOSSES
@pytest.mark.parametrize("method", ["release", "extend", "replace", "reacquire"])
async def test_lost_lock_is_reported_and_the_key_of_another_untouched(
    api: Api, server: Server, probe: redis.Redis, lose: Callable[[redis.Redis], None], method: str, no_leaks: Any
) -> None:
    no_leaks.allow("a")
    lock = api.client(server.unix_url).lock("a")
    calls: dict[str, Callable[[], Any]] = {
        "release": lock.release,
        "extend": lambda: lock.extend(5),
        "replace": lambda: lock.extend(500, replace_ttl=True),
        "reacquire": lock.reacquire,
    }
    await api.get(lock.acquire())
    lose(probe)
    before = probe.dump("a"), probe.pttl("a")
    assert await api.get(lock.owned()) is False
    with pytest.raises(fastlock.LockNotOwnedError) as caught:
        await api.get(calls[method]())
    what = "extend" if method == "replace" else method
    assert str(caught.value) == f"Cannot {what} lock 'a': it is no longer owned: {LOST}"
    assert isinstance(caught.value, redis.exceptions.LockNotOwnedError) and caught.value.lock_name == "a"
    after = probe.dump("a"), probe.pttl("a")
    assert after[0] == before[0] and after[1] <= before[1]
    if method != "release":
        with pytest.raises(fastlock.LockNotOwnedError):
            await api.get(lock.release())
    with pytest.raises(fastlock.LockError) as again:
        await api.get(lock.release())
    assert not isinstance(again.value, fastlock.LockNotOwnedError), "after the error nothing is held that could be lost"


@pytest.mark.parametrize("method", ["release", "extend", "reacquire"])
async def test_lock_that_is_not_held_raises_lock_error_of_both_families(api: Api, server: Server, method: str) -> None:
    lock = api.client(server.unix_url).lock("a")

    async def refused() -> None:
        with pytest.raises(fastlock.LockError) as caught:
            await api.get(lock.extend(5) if method == "extend" else getattr(lock, method)())
        assert isinstance(caught.value, redis.exceptions.LockError)
        assert not isinstance(caught.value, redis.exceptions.LockNotOwnedError) and caught.value.lock_name == "a"

    await refused()
    await api.get(lock.acquire())
    await api.get(lock.release())
    await refused()


# --------------------------------------------------------------------------------------------------------------- `with`


async def test_with_gives_the_lease_and_releases_it(api: Api, server: Server, probe: redis.Redis) -> None:
    lock = api.client(server.unix_url).lock("a", timeout=7)

    def body(lease: Any) -> Any:
        assert type(lease) is fastlock.Lease and lease is lock.lease and lease.valid and 0 < lease.remaining <= 7
        assert probe.get("a") == lease.token
        return lease

    lease = await inside(api, lock, body)
    assert probe.keys() == [] and lock.lease is None and lease.token.decode() not in repr(lease) + repr(lock)
    with pytest.raises(KeyError):
        await inside(api, lock, lambda lease: {}["missing"])
    assert probe.keys() == [] and lock.lease is None


@LOSSES
async def test_exception_of_the_body_is_never_replaced(
    api: Api, server: Server, probe: redis.Redis, lose: Callable[[redis.Redis], None], no_leaks: Any
) -> None:
    no_leaks.allow("a")
    lock = api.client(server.unix_url).lock("a")

    def body(lease: Any) -> None:
        lose(probe)
        raise ZeroDivisionError("of the body")

    with pytest.raises(ZeroDivisionError, match="of the body") as caught:
        await inside(api, lock, body)
    (note,) = caught.value.__notes__
    failed = f"LockNotOwnedError: Cannot release lock 'a': it is no longer owned: {LOST}"
    assert note == f"fastlock: then the release of 'a' failed: {failed}"


def test_warnings_show_where_no_logging_is_set_up() -> None:
    """As redis-py's lock does: Python prints the warnings of loggers for which no handler is set up."""
    assert logging.getLogger("fastlock").handlers == []


@pytest.mark.parametrize("method", ["release", "extend", "reacquire", "release_many", "with", "quiet with"])
async def test_each_loss_is_logged_once_with_the_name(
    api: Api, server: Server, probe: redis.Redis, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    client = api.client(server.unix_url)
    lock = client.lock("a", raise_on_release_error=method != "quiet with", thread_local=False)
    await api.get(lock.acquire())
    token = lock.lease.token.decode()
    delete(probe)
    with caplog.at_level(logging.WARNING, "fastlock"), contextlib.suppress(fastlock.LockNotOwnedError):
        if method == "release_many":
            assert await api.get(client.release_many([lock.lease])) == [False]
        elif "with" in method:
            await api.leave(lock)
        else:
            await api.get(lock.extend(5) if method == "extend" else getattr(lock, method)())
    for _ in range(2):  # a known loss is not logged again
        with caplog.at_level(logging.WARNING, "fastlock"), contextlib.suppress(fastlock.LockError):
            await api.get(lock.release())
    (record,) = [each for each in caplog.records if each.name == "fastlock"]
    assert record.levelno == logging.WARNING and record.getMessage().startswith("lock 'a' was lost before it was ")
    assert token[3:] not in caplog.text


async def test_nothing_is_logged_where_no_lock_was_lost(
    api: Api, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    client = api.client(server.unix_url)
    lock = client.lock("a")
    caplog.set_level(logging.DEBUG, "fastlock")
    await api.get(lock.acquire())
    assert not await api.get(client.lock("a").acquire(blocking=False))
    await api.get(lock.release())
    with pytest.raises(fastlock.LockError):
        await api.get(lock.release())
    await api.get(client.release_many(await api.get(client.acquire_many(["a", "b"]))))
    assert [each for each in caplog.records if each.name == "fastlock"] == []


@pytest.mark.parametrize("name", ["sku:42", b"sku\xff", memoryview(b"view"), "long" * 10_000], ids=str)
async def test_every_error_of_a_lock_names_it_once_and_briefly(api: Api, server: Server, name: Any) -> None:
    client = api.client(server.unix_url)
    lock, endless = client.lock(name, blocking=False), client.lock(name, timeout=None)
    shown = repr(bytes(name) if isinstance(name, memoryview) else name)[:100]
    calls: list[Callable[[], Any]] = [lock.release, lambda: lock.extend(1), lock.reacquire, lambda: api.enter(lock)]
    await api.get(endless.acquire())
    calls.append(lambda: endless.extend(1))
    for call in calls:
        with pytest.raises(fastlock.LockError) as caught:
            await api.get(call())
        assert str(caught.value).count(shown) == 1 and len(str(caught.value)) < 400
    await api.get(endless.release())


async def test_lock_lost_in_the_body_raises_or_is_logged(
    api: Api, server: Server, probe: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    client = api.client(server.unix_url)
    with pytest.raises(fastlock.LockNotOwnedError):
        await inside(api, client.lock("a"), lambda lease: delete(probe))
    caplog.clear()
    quiet = client.lock("a", raise_on_release_error=False)
    with caplog.at_level(logging.WARNING, "fastlock"):
        lease = await inside(api, quiet, lambda lease: delete(probe) or lease)
    (record,) = [each for each in caplog.records if each.name == "fastlock"]
    assert "'a'" in record.getMessage() and lease.token.decode() not in caplog.text
    with pytest.raises(fastlock.LockNotOwnedError):  # raise_on_release_error affects only the end of a `with`
        await api.get(quiet.acquire())
        delete(probe)
        await api.get(quiet.release())


async def test_wrong_kind_of_with_names_the_right_one(api: Api, server: Server, probe: redis.Redis) -> None:
    lock = api.client(server.unix_url).lock("a")
    with pytest.raises(TypeError, match=r"fastlock\.asyncio|`async with`"):
        if api.is_async:
            with lock:
                pytest.fail("entered")
        else:
            async with lock:
                pytest.fail("entered")
    with pytest.raises(TypeError, match="`with`"):
        await lock
    assert probe.keys() == []


def test_lock_outlives_every_other_reference_to_its_client(impl: str, server: Server) -> None:
    lock = fastlock.Client.from_url(server.unix_url).lock("a")
    assert lock.acquire()
    lock.release()
