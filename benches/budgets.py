"""The acceptance list: what the numbers of a run must reach (``fastlock bench --check``).

What lives here: the bounds, which are ratios taken in one run on one server, or counts; the one time among them, of a
recovery, is far above what any machine needs. A bound whose scenario was chosen but could not be measured counts as
missed. The bounds are meant for the scenarios as they are written: an option that changes a scenario may make its bound
meaningless. Never here: measuring, printing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from .stats import Row

FEW = 10
"""The number of waiters whose cost is compared with that of the most: with fewer of them hardly any client waits."""


@dataclass(frozen=True)
class ScenarioResult:
    """What was measured of a scenario: rows by point of the sweep (None where nothing is swept) and rival."""

    rows: Mapping[float | None, Mapping[str, Row]]
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def row(self, rival: str, x: float | None = None) -> Row | None:
        """The row of a rival, at one point of a sweep; None if it was not measured."""
        return self.rows.get(x, {}).get(rival)


Results = Mapping[str, ScenarioResult]
"""The results of a run, by scenario."""

Measure = Callable[[Results, str], float | None]
"""A function from the results and the name of a scenario to a number; None: it could not be measured."""


@dataclass(frozen=True)
class Budget:
    """One bound: what ``measure`` finds must be at least (or at most) ``bound``. ``detail``: what the number was made
    of."""

    name: str
    scenario: str
    bound: float
    at_least: bool
    measure: Measure
    detail: Callable[[Results, str], str] = lambda results, scenario: ""


@dataclass(frozen=True)
class Verdict:
    """A budget and what was measured for it; None: it could not be measured."""

    name: str
    bound: float
    measured: float | None
    met: bool
    detail: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The verdict as plain values for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        measured = "not measured" if self.measured is None else f"{self.measured:.3g}"
        detail = f" ({self.detail})" if self.detail else ""
        return f"{'met   ' if self.met else 'MISSED'}  {self.name} (bound {self.bound:g}): {measured}{detail}"


def _of(rival: str, value: Callable[[Row], float | None]) -> Measure:
    """A measure that is a value of one rival's row."""

    def measure(results: Results, scenario: str) -> float | None:
        row = results[scenario].row(rival) if scenario in results else None
        return None if row is None else value(row)

    return measure


def _ratio(rival: str) -> Measure:
    return _of(rival, lambda row: row.ratio.median if row.ratio else None)


def _rate(results: Results, scenario: str, rival: str) -> float | None:
    return _of(rival, lambda row: row.rate.median if row.rate else None)(results, scenario)


def _rate_of(rival: str) -> Measure:
    """A measure that is a rate. Where no command is sent, no machine is too slow for these bounds."""
    return lambda results, scenario: _rate(results, scenario, rival)


def _part(rival: str, of: str) -> Measure:
    """A measure that is the rate of one rival as a part of another's."""

    def measure(results: Results, scenario: str) -> float | None:
        ours, theirs = (_rate(results, scenario, each) for each in (rival, of))
        return ours / theirs if ours is not None and theirs else None

    return measure


def _in_rounds(p99: Measure) -> Measure:
    """A measure that is a p99 as a multiple of the time in which every client holds once."""

    def measure(results: Results, scenario: str) -> float | None:
        wait = p99(results, scenario)
        settings = results[scenario].parameters if scenario in results else {}
        once = settings.get("lanes", 0) * settings.get("hold_ms", 0) * 1e3
        return wait / once if wait is not None and once else None

    return measure


_p99 = _in_rounds(_of("fastlock", lambda row: row.wait_us.p99 if row.wait_us else None))
_punctual_p99 = _in_rounds(_of("fastlock", lambda row: row.punctual_us.p99 if row.punctual_us else None))


def _punctual(results: Results, scenario: str) -> str:
    """The same p99 without overtime, in words: a machine that stalls makes some holds longer than they should be."""
    found = _punctual_p99(results, scenario)
    hold = results[scenario].parameters.get("hold_ms", 0) if scenario in results else 0
    return "" if found is None else f"{found:.3g} without what was held beyond {hold:g} ms"


def _period(results: Results, scenario: str) -> float | None:
    """The time from grant to grant, as a multiple of the time of a pair of a caller in C."""
    ours, pair = _rate(results, scenario, "fastlock"), _rate(results, scenario, "hiredis")
    return pair / ours if ours and pair else None


def _periods(results: Results, scenario: str) -> str:
    ours, pair = _rate(results, scenario, "fastlock"), _rate(results, scenario, "hiredis")
    return f"{1e6 / ours:.0f} us a grant; hiredis: {1e6 / pair:.0f} us a pair" if ours and pair else ""


def _served(row: Row) -> float:
    """The part of a storm's clients that were served."""
    return 1.0 if row.served_s else 1.0 - (row.timeouts or 0.0) - (row.failures or 0.0)


def _growth(rival: str) -> Measure:
    """A measure that is the server CPU per grant with the most waiters, as a multiple of that with FEW waiters."""

    def measure(results: Results, scenario: str) -> float | None:
        found = results.get(scenario, ScenarioResult({}))
        row = {x: found.row(rival, x) for x in found.rows if x is not None}
        cpu = {x: each.server_cpu_us for x, each in row.items() if each and each.server_cpu_us}
        few, most = cpu.get(FEW), max(cpu, default=0)
        return cpu[most] / few if few and most > FEW else None

    return measure


CONTENTION = (
    Budget("hot, grants/s, part of one holder's alone", "hot", 0.97, True, _part("fastlock", "alone")),
    Budget("hot, p99 of the wait, times clients x hold", "hot", 1.3, False, _p99, _punctual),
    Budget(
        "hot, fair, grants of the least served client, part of the best served one's", "hot", 0.95, True,
        _of("fair", lambda row: row.fairness.min_over_max if row.fairness else None),
    ),
    Budget("hot, fair, grants/s, part of one holder's alone", "hot", 0.9, True, _part("fair", "alone")),
    Budget("hot, fair, commands sent per grant", "hot", 3, False, _of("fair", lambda row: row.sent_per_grant)),
    Budget("handover, time per grant, times a pair of a caller in C", "handover", 0.9, False, _period, _periods),
    Budget("crowd, 100 tasks of one process, times redis.asyncio", "crowd", 50, True, _ratio("fastlock")),
    Budget("crowd, commands sent per grant", "crowd", 1.2, False, _of("fastlock", lambda row: row.sent_per_grant)),
    Budget("crowd-uvloop, 100 tasks of one process, times redis.asyncio", "crowd-uvloop", 50, True, _ratio("fastlock")),
    Budget("crowd-threads, times redis-py", "crowd-threads", 10, True, _ratio("fastlock")),
    Budget(
        "crowd-threads, grants of the least served thread", "crowd-threads", 1, True,
        _of("fastlock", lambda row: row.fairness.grants[-1] if row.fairness else None),
    ),
    Budget(
        "crash, longest recovery in ms", "crash", 50, False,
        _of("fastlock", lambda row: row.recovery_us.max / 1e3 if row.recovery_us else None),
    ),
    *(
        Budget(f"storm, {rival}, part that was served", "storm", 1, True, _of(rival, _served))
        for rival in ("fastlock", "fair")
    ),
    Budget("storm, fair, served in order of arrival", "storm", 0.99, True, _of("fair", lambda row: row.order)),
    # Cohorts make it fall, for ``fair`` it stays: half as much again is beyond the noise of either, and far less than
    # what a lock would cost of which each waiter asks again.
    *(
        Budget(
            f"waiters, {rival}, server CPU per grant with the most, times that with {FEW}", "waiters", 1.5, False,
            _growth(rival),
        )
        for rival in ("fastlock", "fair")
    ),
)  # fmt: skip

SERVER_CPU = _of("fastlock", lambda row: row.server_cpu_ratio)

BUDGETS = (
    Budget("one thread, times redis-py", "pair", 4, True, _ratio("fastlock")),
    Budget("one thread, unconfirmed, times fastlock", "pair", 1.4, True, _part("unconfirmed", "fastlock")),
    Budget("one thread, kept, pairs/s", "pair", 200_000, True, _rate_of("kept")),
    Budget("1,000 tasks, kept, pairs/s", "tasks", 400_000, True, _rate_of("kept")),
    Budget("handover, kept, times fastlock", "handover", 0.85, True, _part("kept", "fastlock")),
    Budget("16 threads, times redis-py", "threads", 5, True, _ratio("fastlock")),
    Budget("16 threads, connections", "threads", 16, False, _of("fastlock", lambda row: row.connections)),
    Budget("1,000 tasks on uvloop, times redis.asyncio", "tasks-uvloop", 30, True, _ratio("fastlock")),
    Budget("1,000 tasks, server CPU per pair, part of redis-py's", "tasks", 0.2, False, SERVER_CPU),
    Budget("1,000 tasks on uvloop, server CPU per pair, part of redis-py's", "tasks-uvloop", 0.2, False, SERVER_CPU),
    *(
        Budget(f"fallback, {scenario}, times redis-py", scenario, 2, True, _ratio("fallback"))
        for scenario in ("pair", "threads", "tasks", "tasks-uvloop", "batch")
    ),
    *CONTENTION,
)


NETWORK_MS = 1.0
"""The round trip at which a run through a network is judged."""


def _at(x: float, results: Results, scenario: str, rival: str) -> float | None:
    """The rate of a rival through a network with a round trip of so many milliseconds."""
    row = results[scenario].row(rival, x) if scenario in results else None
    return row.rate.median if row is not None and row.rate else None


def _everywhere(rival: str) -> Measure:
    """A measure that is the least of the rates over all round trips; None where one was not measured."""

    def measure(results: Results, scenario: str) -> float | None:
        points = results[scenario].rows if scenario in results else {}
        rates = [_at(x, results, scenario, rival) for x in points if x is not None]
        return min((rate or 0.0 for rate in rates), default=None) or None

    return measure


def _trips(rival: str) -> Measure:
    """A measure that is the time of a pair or grant in round trips; of the round trip, two are measured at a time."""

    def measure(results: Results, scenario: str) -> float | None:
        ours, two = (_at(NETWORK_MS, results, scenario, each) for each in (rival, "round trip"))
        return 2 * two / ours if ours and two else None

    return measure


def _of_ideal(rival: str) -> Measure:
    """A measure that is the rate as a part of what it were if each grant took its hold and one round trip."""

    def measure(results: Results, scenario: str) -> float | None:
        ours, two = (_at(NETWORK_MS, results, scenario, each) for each in (rival, "round trip"))
        hold = results[scenario].parameters.get("hold_ms", 0) / 1e3 if scenario in results else 0
        return ours * (hold + 1 / (2 * two)) if ours and two else None

    return measure


def _recalled(rival: str, percentile: str = "p99") -> Measure:
    """A measure that is a percentile of the waits beyond the hold, in round trips."""

    def measure(results: Results, scenario: str) -> float | None:
        row = results[scenario].row(rival, NETWORK_MS) if scenario in results else None
        two = _at(NETWORK_MS, results, scenario, "round trip")
        if row is None or row.wait_us is None or not two:
            return None
        hold: float = results[scenario].parameters.get("hold_ms", 0) * 1e3
        wait: float = getattr(row.wait_us, percentile)
        return (wait - hold) / 1e6 * 2 * two

    return measure


def _two_alone(results: Results, scenario: str) -> str:
    """The detail that tells the median, and the p99 of the least that a recall can take: two round trips, measured
    beside it without a pause in between."""
    median = _recalled("kept", "p50")(results, scenario)
    row = results[scenario].row("round trip", NETWORK_MS) if scenario in results else None
    two = _at(NETWORK_MS, results, scenario, "round trip")
    if median is None or row is None or row.latency_us is None or not two:
        return ""
    return f"median {median:.3g}; two PINGs alone: {row.latency_us.p99 / 1e6 * 2 * two:.3g}"


def _times(rival: str, of: str) -> Measure:
    """A measure that is the least of the ratios of two rates, over all round trips; None where one was not measured."""

    def measure(results: Results, scenario: str) -> float | None:
        points = results[scenario].rows if scenario in results else {}
        rates = [[_at(x, results, scenario, each) for each in (rival, of)] for x in points if x is not None]
        return min((a / b if a and b else 0.0 for a, b in rates), default=None) or None

    return measure


NETWORK = (
    Budget("pair, unconfirmed, round trips", "pair", 1.15, False, _trips("unconfirmed")),
    Budget("pair, unconfirmed, times redis-py", "pair", 2, True, _times("unconfirmed", "redis-py")),
    Budget("pair, kept, pairs/s", "pair", 200_000, True, _everywhere("kept")),
    Budget("tasks, kept, pairs/s", "tasks", 400_000, True, _everywhere("kept")),
    Budget("handover, kept, times fastlock", "handover", 0.85, True, _times("kept", "fastlock")),
    Budget("hot, fair, part of one grant per hold and round trip", "hot", 0.9, True, _of_ideal("fair")),
    Budget("handover, round trips per grant", "handover", 1.2, False, _trips("fastlock")),
    Budget(
        "recall, kept, p99 of the wait beyond the hold, round trips",
        "recall",
        2.2,
        False,
        _recalled("kept"),
        _two_alone,
    ),
    Budget("flash-sale, times redis-py", "flash-sale", 1.5, True, _times("fastlock", "redis-py")),
)
"""Bounds of a run through a network."""


BATCH = "batch, part of the benchmark tool's ceiling"
NATIVE_BATCH = Budget(BATCH, "batch", 0.9, True, _part("fastlock", "ceiling"))
SCRIPTED_BATCH = Budget(BATCH, "batch", 1.6, True, _part("fastlock", "ceiling"))
"""Of a server that has compare-and-delete, the benchmark tool sends the same commands; else fastlock sends scripts of
many names."""


def deletes_natively(server: Mapping[str, str]) -> bool:
    """Whether a server of this kind and version has a command that compares and deletes."""
    major, minor = (int(part) for part in server["version"].split(".")[:2])
    return (major, minor) >= ((9, 0) if server["kind"] == "valkey" else (8, 4))


def judge(results: Results, chosen: tuple[str, ...], network: bool = False, native: bool = True) -> list[Verdict]:
    """A verdict for every budget of the chosen scenarios. native: whether the server has compare-and-delete."""
    verdicts = []
    for budget in NETWORK if network else (*BUDGETS, NATIVE_BATCH if native else SCRIPTED_BATCH):
        if budget.scenario in chosen:
            value = budget.measure(results, budget.scenario)
            met = value is not None and (value >= budget.bound if budget.at_least else value <= budget.bound)
            verdicts.append(Verdict(budget.name, budget.bound, value, met, budget.detail(results, budget.scenario)))
    return verdicts
