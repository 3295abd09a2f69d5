"""The worker of a rival: it carries out its parent's orders, which are messages as `processes` brings them.

There is one answer to each order, errors included. An order names an action; what the actions do is in `worker` and in
`contention.worker`.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from .processes import Lines, to_parent
from .rivals import Rival, load

Actions = Mapping[str, Callable[..., dict[str, Any]]]


def error_text(error: Exception) -> str:
    """An error for the parent: its type and its text, which the ``repr`` of some libraries leaves out."""
    return f"{type(error).__name__}: {error}"


def answer(actions: Actions, order: dict[str, Any]) -> dict[str, Any]:
    """Carry out one order; an error is reported to the parent, which decides what follows."""
    try:
        return actions[order.pop("action")](**order)
    except Exception as error:
        return {"error": error_text(error)}


def serve(actions: Actions, parent: Lines) -> None:
    """Answer order by order until the parent closes the worker's input or is gone."""
    with suppress(BrokenPipeError, EOFError):
        while (order := parent.receive()) is not None:
            parent.send(answer(actions, order))
    with suppress(Exception):  # the parent is gone, or ends this process anyway
        actions["close"]()


def main(argv: list[str], begin: Callable[[Rival], Actions]) -> int:
    """Load the rival whose module is the argument, and answer orders about it by the actions that ``begin`` gives."""
    parent = to_parent()
    try:
        rival = load(argv[1])
        actions = begin(rival)
    except Exception as error:
        parent.send({"error": error_text(error), "missing": isinstance(error, ImportError)})
        return 1

    def hello() -> dict[str, Any]:
        return {"python": platform.python_version(), **rival.versions()}

    serve({"hello": hello, **actions}, parent)
    return 0
