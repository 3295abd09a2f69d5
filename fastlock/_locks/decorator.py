"""The name under which `locked` locks a call of a function: from a template over the arguments, or a callable.

Never here: how to acquire or release.
"""

from __future__ import annotations

import asyncio
import inspect
import string
from collections.abc import Callable
from typing import Any

from fastlock._protocol.arguments import as_name
from fastlock._protocol.losses import abbreviated
from fastlock._stream_errors import by_handler
from fastlock._transport.internals import running_loop


def refuse_call(function: object, others: tuple[object, ...], more: dict[str, object]) -> None:
    """Refuse, by TypeError, what is no decoration of a function but a call of one that was decorated by a bare
    `@client.locked`."""
    if others or more or not callable(function):
        given = abbreviated(function) if not callable(function) else "a call"
        raise TypeError(f'locked("name") decorates a function, not {given}: was its name forgotten?')


def name_maker(name: object, function: Callable[..., Any]) -> Callable[..., Any]:
    """From a `locked` decorator's name (a template over the call's arguments, or a callable) to a function of the
    call."""
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(
            f"{function.__qualname__} is a generator: its body runs after the lock would have been released"
        )
    if callable(name):
        return name
    if not isinstance(name, str):
        as_name(name)
        return lambda *args, **kwargs: name
    signature = inspect.signature(function)
    fields = [field for _, field, _, _ in string.Formatter().parse(name) if field is not None]
    for field in fields:
        root = field.split(".")[0].split("[")[0]
        if root not in signature.parameters:
            raise ValueError(
                f"name {name!r} asks for {root!r}, which is no argument of {function.__qualname__}{signature}"
            )
    if not fields:
        fixed = name.format()
        as_name(fixed)
        return lambda *args, **kwargs: fixed

    def from_call(*args: Any, **kwargs: Any) -> str:
        try:
            call = signature.bind(*args, **kwargs)
        except TypeError as error:
            if by_handler(error):
                raise
            raise TypeError(f"{function.__qualname__}(): {error}") from None
        call.apply_defaults()
        try:
            return name.format(**call.arguments)
        except Exception as error:
            error.add_note(f"as the name {name!r} was made for a call of {function.__qualname__}")
            raise

    return from_call


def when_busy(on_busy: object, options: dict[str, Any]) -> Callable[..., Any] | None:
    """What a decorated function calls, with the arguments of the call, where its lock is held; None: it raises. Where
    that is not "wait", `options` of the lock say not to wait, unless they say how long. ValueError or TypeError:
    on_busy makes no sense."""
    if on_busy == "wait":
        return None
    if on_busy not in ("raise", "skip") and not callable(on_busy):
        wrong = TypeError if not isinstance(on_busy, str) else ValueError
        raise wrong(f'on_busy must be "wait", "raise", "skip" or a function of the call\'s arguments, not {on_busy!r}')
    if options.get("blocking") and options.get("blocking_timeout") is None:
        raise ValueError(f"blocking=True waits however long, and on_busy={on_busy!r} says what to do instead: give one")
    if "blocking_timeout" not in options:
        options.setdefault("blocking", False)
    if on_busy == "raise":
        return None
    return on_busy if callable(on_busy) else lambda *args, **kwargs: None


async def answered(result: object) -> Any:
    """What a function returned, awaited if it is to be awaited."""
    return await result if inspect.isawaitable(result) else result


def is_cancelled() -> bool:
    """Whether the running task is being cancelled; else a CancelledError is a user's function's own, as of a task that
    it awaits."""
    task = None if running_loop() is None else asyncio.current_task()
    return task is None or task.cancelling() > 0
