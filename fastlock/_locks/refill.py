"""`client.refill`: a cached value that one of many callers makes anew while the others wait for it, or get the old one.
Here what one call decides, and how it goes on for threads and for asyncio.

Never here: scripts, how a lock is acquired.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

from fastlock._errors import LockNotAcquiredError, RedisError, is_own
from fastlock._locks.decorator import answered, is_cancelled, name_maker
from fastlock._locks.once import NameOrMaker, check_timeouts, refuse_async, refuse_coroutine
from fastlock._protocol import values
from fastlock._protocol.arguments import as_ms, as_name, as_wait
from fastlock._protocol.lease import Lease, now
from fastlock._protocol.losses import LOG, abbreviated, shown
from fastlock._protocol.steps import Steps
from fastlock._protocol.values import Codec, Found
from fastlock._stream_errors import by_handler

if TYPE_CHECKING:
    from fastlock._locks.aio_client import Client as AsyncClient
    from fastlock._locks.client import Client


class RefillOptions(TypedDict, total=False):
    """The keyword arguments of `refill`, for type checkers."""

    stale: float
    timeout: float
    blocking_timeout: float | None
    dumps: values.Dumps | None
    loads: values.Loads | None


@dataclass(frozen=True, slots=True)
class RefillSettings:
    """The checked settings of `refill`."""

    ms: int
    stale_ms: int
    codec: Codec
    timeout: float
    blocking_timeout: float | None


def settings_for(
    ttl: object,
    stale: float,
    timeout: float,
    blocking_timeout: float | None,
    dumps: values.Dumps | None,
    loads: values.Loads | None,
) -> RefillSettings:
    """The checked settings of `refill`. ValueError or TypeError: they make no sense."""
    check_timeouts(timeout, blocking_timeout)
    stale_ms = int(as_wait(stale, "stale") * 1000)
    return RefillSettings(as_ms(ttl, "ttl"), stale_ms, Codec(dumps, loads), timeout, blocking_timeout)


class Call:
    """One call for the value of a key."""

    def __init__(self, client: Client | AsyncClient, settings: RefillSettings, key: NameOrMaker) -> None:
        self.client = client
        self.settings = settings
        self.name: Any = key
        self.key = as_name(key, what="key")
        self.old: tuple[Any] | None = None  # (value,) that is past its time, and may still be served
        self.made: tuple[Any] | None = None  # (value,) that this call's loader returned
        self.version = b""

    def look(self) -> Steps[tuple[Any] | None]:
        """(value,), if there is one that is fresh; else notes the old one, if there is one."""
        if not self.settings.stale_ms:
            raw = yield from values.read(self.key, now)
            return None if raw is None else self.settings.codec.decode(raw, self.name)
        return self._judge((yield from values.find(self.key, now)))

    def _judge(self, found: Found) -> tuple[Any] | None:
        value = None if found.raw is None else self.settings.codec.decode(found.raw, self.name)
        if value is not None and (found.left > self.settings.stale_ms or found.left == -1):
            return value
        self.old = value if self.settings.stale_ms else None
        return None if self.settings.stale_ms else value

    def new_lock(self) -> Any:
        """The lock under which the value is made: who finds an old value does not wait for it."""
        waits = self.old is None
        self.lock = self.client.lock(
            self.name,
            self.settings.timeout,
            blocking=waits,
            blocking_timeout=self.settings.blocking_timeout if waits else None,
            raise_on_release_error=False,
            auto_renew=True,
        )
        self.lock._key = values.load_key(self.key)
        return self.lock

    def look_again(self) -> Steps[tuple[Any] | None]:
        """(value,), if others have made it while this caller waited for the lock."""
        found = yield from values.find(self.key, now, versioned=True)
        self.version = found.version
        return self._judge(found)

    def keep(self, lease: Lease, value: object) -> Steps[Any]:
        """Keep the loader's value, unless the lock was lost or the value discarded meanwhile. Returns the value as all
        others get it."""
        codec, settings = self.settings.codec, self.settings
        self.old = None  # whatever comes now, the caller does not get an old value for the new one
        raw = codec.encode(refuse_coroutine(value), self.name)
        self.made = (codec.loads(raw),)
        ms = settings.ms + settings.stale_ms
        yield from values.keep(lease, self.key, raw, ms, now, self.version)
        return self.made[0]

    def instead(self, error: BaseException) -> tuple[Any] | None:
        """(value,) to return where this call could not load a value, or not keep it. None: the error is to be
        raised."""
        if by_handler(error):
            return None
        if isinstance(error, LockNotAcquiredError) and error.lock_id == id(self.lock):
            return self.old
        if self.made is not None:
            if not isinstance(error, RedisError) or not is_own(error):
                return None
            LOG.warning("the value of %s was loaded, and could not be kept: %s", abbreviated(self.name), shown(error))
            return self.made
        if self.old is not None:
            LOG.warning("loading %s failed, and its old value is used", abbreviated(self.name), exc_info=error)
        return self.old


# ------------------------------------------------------------------------------------------------------------- threads


def run(
    client: Client,
    settings: RefillSettings,
    key: NameOrMaker,
    loader: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:
    """The value of a key; where there is none, or an old one, the loader makes it, in one caller."""
    call, drive = Call(client, settings, key), client._transport.drive
    if (found := drive(call.look())) is not None:
        return found[0]
    try:
        with call.new_lock() as lease:
            if (found := drive(call.look_again())) is not None:
                return found[0]
            return drive(call.keep(lease, loader(*args, **(kwargs or {}))))
    except Exception as error:
        if (found := call.instead(error)) is None:
            raise
        return found[0]


def decorator(client: Client, settings: RefillSettings, key: NameOrMaker) -> Callable[..., Any]:
    """A decorator: each call of the function is for the value of the key that is made of its arguments."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        named = name_maker(key, refuse_async(function))

        @functools.wraps(function)
        def call(*args: object, **kwargs: object) -> Any:
            return run(client, settings, named(*args, **kwargs), function, args, kwargs)

        return call

    return decorate


# ------------------------------------------------------------------------------------------------------------- asyncio


async def aio_run(
    client: AsyncClient,
    settings: RefillSettings,
    key: NameOrMaker,
    loader: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:
    """As `run`, for tasks; the loader may be a coroutine function."""
    call, drive = Call(client, settings, key), client._transport.drive
    if (found := await drive(call.look())) is not None:
        return found[0]
    try:
        async with call.new_lock() as lease:
            if (found := await drive(call.look_again())) is not None:
                return found[0]
            return await drive(call.keep(lease, await answered(loader(*args, **(kwargs or {})))))
    except (Exception, asyncio.CancelledError) as error:
        if isinstance(error, asyncio.CancelledError) and is_cancelled():
            raise
        if (found := call.instead(error)) is None:
            raise
        return found[0]


def aio_decorator(
    client: AsyncClient, settings: RefillSettings, key: Any
) -> Callable[[Callable[..., Any]], Callable[..., Coroutine[Any, Any, Any]]]:
    """As `decorator`, for tasks."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Coroutine[Any, Any, Any]]:
        named = name_maker(key, function)

        @functools.wraps(function)
        async def call(*args: object, **kwargs: object) -> Any:
            return await aio_run(client, settings, named(*args, **kwargs), function, args, kwargs)

        return call

    return decorate
