"""Credential providers: called for each new connection, awaited where they can be, and their errors are raised.

An exception of a provider, whatever its type, reaches the caller and counts as no broken connection; redis-py's own
errors mean, as in redis-py, that the server cannot be reached, and are retried.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from support.apis import Api
from support.child_client import until
from support.redispy import ending, module

from fastlock._protocol import renewal
from fastlock._protocol.lease import now
from fastlock._protocol.undo import Undo
from fastlock._transport.undo_delivery import UndoDelivery
from fastlock.embedded import Server

pytestmark = pytest.mark.usefixtures("impl")
USER = "locker"


class Provider:
    """Knows one password, after it has raised the given errors. Not a subclass of redis-py's class: none has to be."""

    def __init__(self, *errors: BaseException | None) -> None:
        self.errors = list(errors)
        self.calls = 0

    def get_credentials(self) -> tuple[str, ...]:
        self.calls += 1
        error = self.errors.pop(0) if self.errors else None
        if error is not None:
            raise error
        return (USER, "word")


class AsyncProvider(Provider):
    """Like those of cloud vendors for asyncio: it has no credentials without waiting."""

    def get_credentials(self) -> tuple[str, ...]:
        raise AssertionError("the blocking method was called in an event loop")

    async def get_credentials_async(self) -> tuple[str, ...]:
        await asyncio.sleep(0)
        return super().get_credentials()


@pytest.fixture(autouse=True)
def locker(probe: redis.Redis) -> Iterator[None]:
    probe.execute_command("ACL", "SETUSER", USER, "on", ">word", "~*", "&*", "+@all")
    yield
    probe.execute_command("ACL", "DELUSER", USER)


def provider(api: Api, *errors: BaseException | None) -> Any:
    return (AsyncProvider if api.is_async else Provider)(*errors)


def cut(probe: redis.Redis) -> None:
    """End all connections but the probe's own."""
    probe.client_kill_filter(_type="normal", skipme=True)


async def test_a_providers_stop_iteration_ends_no_operation(
    api: Api, server: Server, probe: redis.Redis, no_leaks: Any
) -> None:
    """A StopIteration of the provider must not end the generator that carries out an operation."""
    client = api.client(server.unix_url, credential_provider=provider(api, None, *[StopIteration()] * 4))
    lock = client.lock("a")
    assert await api.get(lock.acquire())
    for call in (lock.locked, lock.owned, client.lock("b").acquire):
        cut(probe)
        with pytest.raises((StopIteration, RuntimeError)):
            await api.get(call())
    probe.delete("a", "b")


@pytest.mark.parametrize("noticed", [False, True])
async def test_a_client_closes_though_its_provider_fails(
    api: Api, server: Server, probe: redis.Redis, no_leaks: Any, caplog: pytest.LogCaptureFixture, noticed: bool
) -> None:
    """The client's pending undo needs a new connection. noticed: whether it knows before the close that it has none."""
    client = api.client(server.unix_url, credential_provider=provider(api, None, *[ValueError("sealed")] * 4))
    await api.get(client.server_info())
    cut(probe)
    while noticed and api.is_async and client._transport.connection is not None:
        await asyncio.sleep(0.001)
    if noticed and not api.is_async:
        client._transport.idle[0].fail(EOFError("gone"))
    client._transport.defer(UndoDelivery(Undo([b"a"], [b"fl:" + b"0" * 32])))
    await api.get(client.close())
    assert client.closed
    assert "'a'" in caplog.text, "the warning names the key that may stay"


@pytest.mark.parametrize("api", ["threads"], indirect=True)
async def test_a_providers_error_replaces_no_other_exception(
    api: Api, server: Server, probe: redis.Redis, no_leaks: Any
) -> None:
    """A caller that was interrupted flushes pending undos, which needs a new connection."""
    client = api.client(server.unix_url, credential_provider=provider(api, None, *[ValueError("sealed")] * 4))
    await api.get(client.server_info())
    cut(probe)
    transport = client._transport
    transport.idle[0].fail(EOFError("gone"))
    transport.defer(UndoDelivery(Undo([b"a"], [b"fl:" + b"0" * 32])))
    transport.flush_pending_undos()
    assert len(transport.pending_undos) == 1, "the undo is still pending"


async def test_each_new_connection_calls_the_provider(
    api: Api, server: Server, probe: redis.Redis, no_leaks: Any
) -> None:
    """By `get_credentials_async` in asyncio, also where redis-py's client was given the provider."""
    credentials = provider(api)
    client = api.client(server.unix_url, credential_provider=credentials)
    for count in (1, 2, 3):
        lock = client.lock("a")
        assert await api.get(lock.acquire())
        assert credentials.calls == count and USER in [each["user"] for each in probe.client_list()]
        await api.get(lock.release())
        cut(probe)
    again = provider(api)
    async with ending(api, module(api).Redis(port=server.port, credential_provider=again)) as theirs:
        async_with = api.module.Lock(theirs, "a", timeout=5)
        await api.enter(async_with)
        await api.leave(async_with)
        assert again.calls == 1


@pytest.mark.parametrize("error", [ValueError("the vault is sealed"), asyncio.CancelledError()], ids=repr)
async def test_a_loss_is_told_in_time_where_a_provider_fails(
    api: Api,
    server: Server,
    probe: redis.Redis,
    no_leaks: Any,
    caplog: pytest.LogCaptureFixture,
    error: BaseException,
) -> None:
    """The renewals that fail are tried again, and not as fast as the processor can."""
    caplog.set_level(logging.CRITICAL, "fastlock")  # a log of each try would slow them down
    credentials = provider(api, None, *[error] * 10_000)
    told: list[float] = []
    client = api.client(server.unix_url, credential_provider=credentials)
    lock = client.lock("a", timeout=2, auto_renew=True, on_lost=lambda lease: told.append(now()))
    other = api.client(server.unix_url).lock("a", thread_local=False)
    assert await api.get(lock.acquire())
    cut(probe)

    async def acquire() -> float:
        assert await api.get(other.acquire(blocking_timeout=20))
        return now()

    acquired = await api.start(acquire).get()
    assert len(told) == 1 and told[0] <= acquired and 2 < credentials.calls < 100
    await api.get(other.release())


@pytest.mark.parametrize("api", ["threads"], indirect=True)
async def test_what_is_acquired_while_a_provider_fails_is_renewed(
    api: Api, server: Server, probe: redis.Redis, no_leaks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renewal, "DUE_PART", 0.01)  # of a lease's time

    class Sealed(Provider):
        asked, sealed = threading.Event(), threading.Event()

        def get_credentials(self) -> tuple[str, ...]:
            if self.calls == 1:  # that of the thread that renews
                self.calls += 1
                self.asked.set()
                assert self.sealed.wait(20)
                raise ValueError("the vault is sealed")
            return super().get_credentials()

    credentials = Sealed()
    client = api.client(server.unix_url, credential_provider=credentials)
    first, second = client.lock("a", timeout=30, auto_renew=True), client.lock("b", timeout=2, auto_renew=True)
    first.acquire()
    cut(probe)
    assert credentials.asked.wait(20)
    second.acquire()
    first.release()
    credentials.sealed.set()
    await until(api, lambda: client.get_stats()["renewals"], "a renewal")
    second.release()


@pytest.mark.parametrize("api", ["asyncio"], indirect=True)
async def test_asyncio_accepts_a_blocking_provider(api: Api, server: Server, no_leaks: Any) -> None:
    credentials = Provider()
    lock = api.client(server.unix_url, credential_provider=credentials).lock("a")
    assert await lock.acquire() and credentials.calls == 1
    await lock.release()


@pytest.mark.parametrize("api", ["asyncio"], indirect=True)
async def test_a_slow_provider_does_not_count_for_connect_timeout(api: Api, server: Server, no_leaks: Any) -> None:
    class Slow(AsyncProvider):
        async def get_credentials_async(self) -> tuple[str, ...]:
            await asyncio.sleep(0.3)
            return await super().get_credentials_async()

    lock = api.client(server.unix_url, credential_provider=Slow(), connect_timeout=0.2).lock("a")
    assert await lock.acquire()
    await lock.release()


STRANGERS = [ValueError, OSError, TimeoutError, EOFError, ConnectionResetError, RuntimeError]


@pytest.mark.parametrize("kind", STRANGERS, ids=lambda kind: kind.__name__)
async def test_a_providers_error_reaches_the_caller_unchanged(
    api: Api, server: Server, probe: redis.Redis, kind: type[Exception], no_leaks: Any
) -> None:
    """At the first connection and at later ones, at once, and once: the next call tries again."""
    cause = KeyError("the vault")
    errors = [kind("of the provider") for _ in range(3)]
    for error in errors:
        error.__cause__ = cause
    credentials = provider(api, errors[0], None, errors[1], errors[2])
    client = api.client(server.unix_url, credential_provider=credentials)
    lock = client.lock("a")
    for number, error in enumerate(errors):
        with pytest.raises(kind) as caught:
            await api.get(client.server_info() if number == 2 else lock.acquire())
        assert caught.value is error
        assert error.__cause__ is cause, "the error's cause was changed"
        if number == 0:
            assert await api.get(lock.acquire())
            await api.get(lock.release())
            cut(probe)
    assert credentials.calls == 4
    assert await api.get(lock.acquire())
    await api.get(lock.release())


async def test_a_providers_error_ends_a_wait(api: Api, server: Server, probe: redis.Redis, no_leaks: Any) -> None:
    """The error ends a wait, although a wait survives a cut connection."""
    no_leaks.allow("a")
    error = OSError("of the provider")
    credentials = provider(api, None, error)
    client = api.client(server.unix_url, credential_provider=credentials)
    await api.get(client.server_info())
    probe.set("a", "somebody else's", px=60_000)
    job = api.start(lambda: client.lock("a", sleep=0.01).acquire(blocking_timeout=20))
    while not job.finished.is_set():
        cut(probe)
        await api.checkpoint()
        if api.is_async:
            await asyncio.sleep(0.001)
    with pytest.raises(OSError) as caught:
        await job.get()
    assert caught.value is error


@pytest.mark.parametrize("kind", [redis.exceptions.ConnectionError, redis.exceptions.TimeoutError])
async def test_redis_pys_own_errors_are_retried_as_an_outage(
    api: Api, server: Server, probe: redis.Redis, kind: type[Exception], no_leaks: Any
) -> None:
    credentials = provider(api, kind("at first"), None, kind("later"), kind("again"))
    client = api.client(server.unix_url, credential_provider=credentials)
    lock = client.lock("a")
    with pytest.raises(kind, match="at first"):
        await api.get(lock.acquire())
    assert await api.get(lock.acquire())
    await api.get(lock.release())
    cut(probe)
    assert await api.get(lock.acquire()), "the outage ended in time"
    assert credentials.calls == 5
    await api.get(lock.release())


@pytest.mark.parametrize("found", [None, (), ("a", "b", "c"), 5])
async def test_invalid_credentials_raise(api: Api, server: Server, found: Any, no_leaks: Any) -> None:
    class Odd(Provider):
        def get_credentials(self) -> Any:
            return found

    with pytest.raises((TypeError, ValueError)):
        await api.get(api.client(server.unix_url, credential_provider=Odd()).lock("a").acquire())
