"""What a signal's handler raises, raised at chosen moments: as a function is called, or at each point in turn."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Collection, Coroutine
from pathlib import Path
from typing import Any

import fastlock
from support.streams import raise_at

STACK = {str(path) for path in Path(fastlock.__file__).parent.rglob("*.py")}  # what is compiled cannot be struck


class Struck:
    """Raises when it is called for the first time, or for the first time for that; then it is what it was put in the
    place of."""

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
    """Awaits a coroutine, and strikes it once: at such a point of so many a step. `struck`: whether it was."""

    def __init__(
        self, coroutine: Any, step: int, point: int, files: Collection[str] = STACK, *, cancelled: bool = False
    ) -> None:
        self.coroutine, self.step, self.point, self.files = coroutine, step, point, files
        self.cancelled = cancelled  # in that step, too
        self.steps, self.reached, self.struck, self.over = 0, False, False, False

    def __await__(self) -> Any:
        while waits_for := self._go_on():
            yield waits_for[0]
        self.over = True

    def _go_on(self) -> list[Any]:
        """What it waits for; nothing: it has ended, perhaps as the strike came through."""
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
    """attempt(step, point): whether it was struck, and whether it came to that step."""
    for step in itertools.count():
        points = itertools.count(1)
        while (reached := asyncio.run(attempt(step, next(points))))[0]:
            pass
        if not reached[1]:
            break
    assert step >= 1
