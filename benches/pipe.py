"""The worker's end of its pipe: orders come in as JSON lines on standard input, answers go out on standard output.

Law: one answer to each order, errors included; whatever a library prints goes to stderr. Ctrl-C belongs to the parent:
a worker ends when its standard input does.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TextIO

from .rivals import Rival, load

Verbs = Mapping[str, Callable[..., dict[str, Any]]]


def told(error: Exception) -> str:
    """An error for the parent: its type and its text, which the ``repr`` of some libraries leaves out."""
    return f"{type(error).__name__}: {error}"


def answer(verbs: Verbs, order: dict[str, Any]) -> dict[str, Any]:
    """Carry out one order; what goes wrong is said to the parent, who decides."""
    try:
        return verbs[order.pop("verb")](**order)
    except Exception as error:
        return {"error": told(error)}


def serve(verbs: Verbs, orders: TextIO, answers: TextIO) -> None:
    """Answer line by line until the orders end."""
    with suppress(BrokenPipeError):
        for line in orders:
            answers.write(json.dumps(answer(verbs, json.loads(line))) + "\n")
            answers.flush()
    with suppress(Exception):  # the parent is gone or does not care any more
        verbs["close"]()


def main(argv: list[str], begin: Callable[[Rival], Verbs]) -> int:
    """Load the rival whose module is the argument, and answer orders about it with the verbs that ``begin`` gives."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        rival = load(argv[1])
        verbs = begin(rival)
    except Exception as error:
        missing = isinstance(error, ImportError)
        answers.write(json.dumps({"error": told(error), "missing": missing}) + "\n")
        answers.close()
        return 1

    def hello() -> dict[str, Any]:
        return {"python": platform.python_version(), **rival.versions()}

    serve({"hello": hello, **verbs}, sys.stdin, answers)
    return 0
