"""The acceptance list: what the numbers of a run must reach (``fastlock bench --check``).

Law: bounds are ratios taken in one run on one server, never absolute times. A bound whose scenario was chosen but could
not be measured counts as missed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from .stats import Row

Results = Mapping[str, Mapping[str, Row]]
"""Rows by scenario and rival."""


@dataclass(frozen=True)
class Budget:
    """One bound: ``measure`` takes the rows of its scenario; the value must be at least (or at most) ``bound``."""

    name: str
    scenario: str
    bound: float
    at_least: bool
    measure: Callable[[Mapping[str, Row]], float | None]


@dataclass(frozen=True)
class Verdict:
    """A budget and what was measured; None: nothing could be."""

    name: str
    bound: float
    measured: float | None
    met: bool

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        measured = "not measured" if self.measured is None else f"{self.measured:.3g}"
        return f"{'met   ' if self.met else 'MISSED'}  {self.name} (bound {self.bound:g}): {measured}"


def _ratio(rival: str) -> Callable[[Mapping[str, Row]], float | None]:
    def measure(rows: Mapping[str, Row]) -> float | None:
        row = rows.get(rival)
        return row.ratio.median if row and row.ratio else None

    return measure


def _server_cpu(rows: Mapping[str, Row]) -> float | None:
    row = rows.get("fastlock")
    return row.server_cpu_ratio if row else None


def _connections(rows: Mapping[str, Row]) -> float | None:
    row = rows.get("fastlock")
    return row.connections if row else None


def _ceiling(rows: Mapping[str, Row]) -> float | None:
    ours, ceiling = rows.get("fastlock"), rows.get("ceiling")
    if not (ours and ours.rate and ceiling and ceiling.rate and ceiling.rate.median):
        return None
    return ours.rate.median / ceiling.rate.median


BUDGETS = (
    Budget("one thread, times redis-py", "pair", 4, True, _ratio("fastlock")),
    Budget("16 threads, times redis-py", "threads", 5, True, _ratio("fastlock")),
    Budget("16 threads, connections", "threads", 16, False, _connections),
    Budget("1,000 tasks on uvloop, times redis.asyncio", "tasks-uvloop", 30, True, _ratio("fastlock")),
    Budget("1,000 tasks, server CPU per pair, part of redis-py's", "tasks", 0.2, False, _server_cpu),
    Budget("1,000 tasks on uvloop, server CPU per pair, part of redis-py's", "tasks-uvloop", 0.2, False, _server_cpu),
    Budget("batch, part of the benchmark tool's ceiling", "batch", 0.9, True, _ceiling),
    *(
        Budget(f"fallback, {scenario}, times redis-py", scenario, 2, True, _ratio("fallback"))
        for scenario in ("pair", "threads", "tasks", "tasks-uvloop", "batch")
    ),
)


def judge(results: Results, chosen: tuple[str, ...]) -> list[Verdict]:
    """A verdict for every budget of the chosen scenarios."""
    verdicts = []
    for budget in BUDGETS:
        if budget.scenario in chosen:
            value = budget.measure(results.get(budget.scenario, {}))
            met = value is not None and (value >= budget.bound if budget.at_least else value <= budget.bound)
            verdicts.append(Verdict(budget.name, budget.bound, value, met))
    return verdicts
