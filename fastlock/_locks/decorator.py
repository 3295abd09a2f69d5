"""The name under which `locked` locks a call of a function: from a template over the arguments, or a callable.

Never here: how to acquire or release.
"""

from __future__ import annotations

import inspect
import string
from collections.abc import Callable
from typing import Any

from fastlock._protocol.arguments import as_name
from fastlock._protocol.losses import abbreviated
from fastlock._stream_errors import by_handler


def name_maker(name: object, function: Callable[..., Any]) -> Callable[..., Any]:
    """From a `locked` decorator's name (a template over the call's arguments, or a callable) to a function of the
    call."""
    if not callable(function):
        raise TypeError(f'locked("name") decorates a function, not {abbreviated(function)}: was its name forgotten?')
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
