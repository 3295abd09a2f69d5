"""Interrupts at chosen moments: exceptions of a signal handler, as a function is called, or at each point in turn."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Collection, Coroutine
from pathlib import Path
from typing import Any

import fastlock
from support.streams import raise_at

STACK = {str(path) for path in Path(fastlock.__file__).parent.rglob("*.py")}  # compiled code cannot be interrupted


class Struck:
    """A stand-in for the function `real` that raises at its first call, or at the first call that `meant` accepts."""

    def __init__(
        self, kind: type[BaseException], real: Callable[..., Any], meant: Callable[..., bool] = lambda *args: True
    ) -> None:
        self.kind, self.real, self.meant, self.calls = kind, real, meant, 0

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        meant = self.meant(*args)
        self.calls += meant
        if meant and self.calls == 1:
            raise self.kind("struck")
        return self.real(*args, **keywords)


class StruckIn:
    """Awaits a coroutine, and interrupts it once: at a point of a step. `struck`: whether it was interrupted."""

    def __init__(
        self, coroutine: Any, step: int, point: int, files: Collection[str] = STACK, *, cancelled: bool = False
    ) -> None:
        self.coroutine, self.step, self.point, self.files = coroutine, step, point, files
        self.cancelled = cancelled  # whether it is also cancelled in that step
        self.steps, self.reached, self.struck, self.over = 0, False, False, False

    def __await__(self) -> Any:
        while waits_for := self._go_on():
            yield waits_for[0]
        self.over = True

    def _go_on(self) -> list[Any]:
        """What the coroutine waits for; empty: it has ended, perhaps by the interrupt."""
        waits_for: list[Any] = []
        try:
            self.reached = self.steps >= self.step
            if self.steps == self.step and self.cancelled:
                error = asyncio.CancelledError()
                self.struck = raise_at(self.point, self.files, lambda: waits_for.append(self.coroutine.throw(error)))
            elif self.steps == self.step:
                self.struck = raise_at(self.point, self.files, lambda: waits_for.append(self.coroutine.send(None)))
            else:
                waits_for.append(self.coroutine.send(None))
        except (StopIteration, asyncio.CancelledError):
            return []
        self.steps += 1
        return waits_for


def strike_everywhere(attempt: Callable[[int, int], Coroutine[Any, Any, tuple[bool, bool]]]) -> None:
    """Interrupt at every point; attempt(step, point) returns whether it was interrupted, and whether it reached the
    step."""
    for step in itertools.count():
        points = itertools.count(1)
        while (reached := asyncio.run(attempt(step, next(points))))[0]:
            pass
        if not reached[1]:
            break
    assert step >= 1
