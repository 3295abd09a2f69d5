"""`client.once`: one of many callers runs a function, and all get its result. Here what one call decides, and how it
goes on for threads and for asyncio.

Never here: scripts, how a lock is acquired.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar

from fastlock._errors import LockLostError, LockNotAcquiredError
from fastlock._locks.decorator import answered, name_maker, when_busy
from fastlock._protocol import values
from fastlock._protocol.arguments import Name, as_ms, as_name, as_wait
from fastlock._protocol.lease import Lease, now
from fastlock._protocol.losses import abbreviated
from fastlock._protocol.renewal import check_timeout
from fastlock._protocol.steps import Steps
from fastlock._protocol.values import Codec, Kept

if TYPE_CHECKING:
    from fastlock._locks.aio_client import Client as AsyncClient
    from fastlock._locks.client import Client

F = TypeVar("F", bound=Callable[..., Any])
OnBusy = Literal["wait", "raise", "skip"] | Callable[..., Any]
NameOrMaker = Name | Callable[..., Any]  # of a decorator it may be made from the call
MAKER_SECONDS = 10.0  # of the lock while the function runs, which is renewed: so long others wait when its process dies


class OnceOptions(TypedDict, total=False):
    """The keyword arguments of `once`, for type checkers."""

    on_busy: OnBusy
    timeout: float
    blocking_timeout: float | None
    dumps: values.Dumps | None
    loads: values.Loads | None


@dataclass(frozen=True, slots=True)
class OnceSettings:
    """The checked settings of `once`. instead: what a call does while the function runs elsewhere; None: it raises."""

    ms: int
    codec: Codec
    instead: Callable[..., Any] | None
    lock_options: dict[str, Any]


def settings_for(
    ttl: object,
    on_busy: object,
    timeout: float,
    blocking_timeout: float | None,
    dumps: values.Dumps | None,
    loads: values.Loads | None,
) -> OnceSettings:
    """The checked settings of `once`. ValueError or TypeError: they make no sense."""
    options: dict[str, Any] = {"timeout": timeout, "auto_renew": True}
    if blocking_timeout is not None:
        options["blocking_timeout"] = blocking_timeout
    instead = when_busy(on_busy, options)
    check_timeouts(timeout, blocking_timeout)
    return OnceSettings(as_ms(ttl, "ttl"), Codec(dumps, loads), instead, options)


def check_timeouts(timeout: float, blocking_timeout: float | None) -> None:
    """Refuse, by ValueError or TypeError, settings of a lock that make no sense."""
    check_timeout(timeout)
    if blocking_timeout is not None:
        as_wait(blocking_timeout, "blocking_timeout")


class Call:
    """One call of a function that is to run once."""

    def __init__(self, client: Client | AsyncClient, settings: OnceSettings, name: NameOrMaker) -> None:
        self.client = client
        self.settings = settings
        self.name: Any = name
        self.key = values.result_key(as_name(name))

    def look(self) -> Steps[bytes | None]:
        """The result that is kept, if there is one."""
        return values.read(self.key, now)

    def new_lock(self) -> Any:
        """The lock under which the function runs."""
        self.lock = self.client.lock(self.name, **self.settings.lock_options)
        return self.lock

    def look_again(self) -> Steps[bytes | None]:
        """The same, for who has got the lock: others may have run the function while this caller waited."""
        return values.read(self.key, now)

    def decode(self, raw: bytes | None) -> tuple[Any] | None:
        """(result,), or None: there is none that could be read."""
        return None if raw is None else self.settings.codec.decode(raw, self.name)

    def keep(self, lease: Lease, result: object) -> Steps[Any]:
        """Keep the function's result. Returns it as all others get it. Raises LockLostError: others may have run the
        function meanwhile."""
        codec = self.settings.codec
        raw = codec.encode(refuse_coroutine(result), self.name)
        result = codec.loads(raw)
        kept = yield from values.keep(lease, self.key, raw, self.settings.ms, now)
        if kept is not Kept.KEPT:
            raise LockLostError(
                f"The result of {abbreviated(self.name)} was not kept: the lock was lost while the function ran, and "
                "another caller may have run it too",
                lock_name=self.name,
            )
        return result

    def instead(self, error: LockNotAcquiredError) -> Callable[..., Any] | None:
        """What to call where the lock is held. None: the error is to be raised, or is of another lock."""
        return self.settings.instead if error.lock_id == id(self.lock) else None


# ------------------------------------------------------------------------------------------------------------- threads


def run(
    client: Client,
    settings: OnceSettings,
    name: NameOrMaker,
    function: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:
    """Call the function, unless its result is kept, or another caller runs it: then return that result."""
    kwargs = kwargs or {}
    call, drive = Call(client, settings, name), client._transport.drive
    if (found := call.decode(drive(call.look()))) is not None:
        return found[0]
    try:
        with call.new_lock() as lease:
            if (found := call.decode(drive(call.look_again()))) is not None:
                return found[0]
            return drive(call.keep(lease, function(*args, **kwargs)))
    except LockNotAcquiredError as error:
        if (instead := call.instead(error)) is None:
            raise
    return instead(*args, **kwargs)


def decorator(client: Client, settings: OnceSettings, name: NameOrMaker) -> Callable[..., Any]:
    """A decorator: each call of the function runs `once` with the name that is made of its arguments."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        named = name_maker(name, refuse_async(function))

        @functools.wraps(function)
        def call(*args: object, **kwargs: object) -> Any:
            return run(client, settings, named(*args, **kwargs), function, args, kwargs)

        return call

    return decorate


def function_of(function: F, what: str = "function") -> F:
    """The function, which is the argument `what`. TypeError: it is none."""
    if not callable(function):
        raise TypeError(f"{what} must be a function, not {abbreviated(function)}")
    return function


def refuse_async(function: F, what: str = "function") -> F:
    """The function, which is the argument `what`. TypeError: it is none, or is to be awaited, which a client for
    threads does not."""
    function_of(function, what)
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        name = getattr(function, "__qualname__", repr(function))
        raise TypeError(f"{name} is async: give it to a fastlock.asyncio.Client")
    return function


def refuse_coroutine(result: object) -> object:
    """The result of a function. TypeError: it is to be awaited."""
    if inspect.iscoroutine(result):
        result.close()
        raise TypeError("the function returned a coroutine: give it to a fastlock.asyncio.Client")
    return result


# ------------------------------------------------------------------------------------------------------------- asyncio


async def aio_run(
    client: AsyncClient,
    settings: OnceSettings,
    name: NameOrMaker,
    function: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:
    """As `run`, for tasks; the function may be a coroutine function."""
    kwargs = kwargs or {}
    call, drive = Call(client, settings, name), client._transport.drive
    if (found := call.decode(await drive(call.look()))) is not None:
        return found[0]
    try:
        async with call.new_lock() as lease:
            if (found := call.decode(await drive(call.look_again()))) is not None:
                return found[0]
            return await drive(call.keep(lease, await answered(function(*args, **kwargs))))
    except LockNotAcquiredError as error:
        if (instead := call.instead(error)) is None:
            raise
    return await answered(instead(*args, **kwargs))


def aio_decorator(
    client: AsyncClient, settings: OnceSettings, name: Any
) -> Callable[[Callable[..., Any]], Callable[..., Coroutine[Any, Any, Any]]]:
    """As `decorator`, for tasks."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Coroutine[Any, Any, Any]]:
        named = name_maker(name, function)

        @functools.wraps(function)
        async def call(*args: object, **kwargs: object) -> Any:
            return await aio_run(client, settings, named(*args, **kwargs), function, args, kwargs)

        return call

    return decorate
