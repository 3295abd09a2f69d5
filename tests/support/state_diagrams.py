"""The states of queues and waiters as docs/waiting.md shows them, drawn from the tables of the code."""

from __future__ import annotations

import enum
from collections.abc import Mapping

from fastlock._protocol.states import QUEUE_TRANSITIONS, WAITER_TRANSITIONS, QueueState, WaiterState


def drawn(states: type[enum.Enum], transitions: Mapping[tuple[enum.Enum, enum.Enum], str]) -> str:
    """A table of the states, and a diagram of the transitions."""
    rows = [f"| `{state.name}` | {state.value} |" for state in states]
    arrows = [f"    {before.name} --> {after.name}: {event}" for (before, after), event in transitions.items()]
    return "\n".join(
        ["| state | meaning |", "|---|---|", *rows, "", "```mermaid", "stateDiagram-v2", *arrows, "```", ""]
    )


def both() -> dict[str, str]:
    """What docs/waiting.md has to show: of a local queue, and of a waiter."""
    return {"queue": drawn(QueueState, QUEUE_TRANSITIONS), "waiter": drawn(WaiterState, WAITER_TRANSITIONS)}
