"""Random walks over the handover model, replayed on real clients: for `tests/walks.py`, which stops the clock before
fastlock is imported. No decisions about locks are made here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from support.handover import Event, State
from support.real_client import RealClient, without_undo
from support.real_tasks import TaskClient
from support.real_threads import ThreadClient
from support.replay import Kinds, Walk
from support.run_steps import Clock

APIS: dict[str, Callable[[str, Clock, Any], RealClient]] = {"asyncio": TaskClient, "threads": ThreadClient}


class RealWalk(Walk):
    """A walk with the real clients of an API: "threads" or "asyncio"; `clock` is the one that fastlock reads."""

    def __init__(self, path: str, seed: int, length: int, api: str, clock: Any) -> None:
        def factory(path: str, capabilities: frozenset[str], kinds: Kinds) -> RealClient:
            clock.read = own = Clock()
            client = APIS[api](path, own, self.rng)
            for strict, fenced in kinds:
                client.add(strict=strict, fenced=fenced)
            return client

        super().__init__(path, seed, length, factory)
        clock.read = lambda: self.replay.now()

    def outcomes(self, event: Event, before: State, after: State) -> list[State]:
        return [after, without_undo(event, before, after)]


class Hunt(RealWalk):
    """A walk with many faults, which reaches rare states."""

    trouble = 0.4
    budgets = (1, 2, 2)
    fences = (0.0, 0.5)
