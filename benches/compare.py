"""Two results compared: what changed from a to b, and whether that is more than noise.

Takes checked documents, returns values; prints nothing. Rates are judged by their ratios to redis-py, each taken in its
own run, so that a slower machine changes nothing; the noise is that of both runs, as they measured it by running
fastlock against itself. Times and costs are judged as they are, and have to move further than redis-py's did as well.
Where the runs differ in machine, server, Python, build or parameters, everything is judged relative to redis-py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .schema import Document, Row, dig, points_of, rows_of, violations

SCHEMA = "fastlock-bench-compare/1"

BASELINE = "redis-py"

SETTING = ("kernel", "cpus", "cpu_model", "governor", "python", "build", "uvloop", "server")
"""Keys of the environment that have to be equal for the plain numbers of two runs to be comparable; load and commits
vary."""

APART = ("scenarios", "rounds")
"""Parameters that say how much was measured, not how."""

OURS = ("fastlock", "fallback")
"""Beginnings of the names of fastlock's own rivals."""

ENOUGH = 20
"""Number of calls slower than a percentile, below which the percentile is chance."""


@dataclass(frozen=True)
class Measure:
    """A number of a row; whether more or less of it is better, and whether it says how fast something is.

    ``beyond``: of a percentile, the part of the calls that were slower.
    """

    name: str
    keys: tuple[str, ...]
    better: str
    speed: bool = True
    beyond: float | None = None

    def of(self, row: Row) -> float | None:
        """The value of this measure in a row; None where it was not measured."""
        found = dig(row, *self.keys)
        return None if found is None else float(found)

    def solid(self, row: Row) -> bool:
        """Whether a row has enough calls for its value of this measure to mean something."""
        return self.beyond is None or (dig(row, self.keys[0], "count") or 0) * self.beyond >= ENOUGH


RATE = Measure("rate", ("rate", "median"), "more")
MEASURES = (
    RATE,
    *(
        Measure(f"{of} {part}", (f"{of}_us", part), "less", beyond=beyond)
        for of in ("latency", "wait", "handover", "recovery")
        for part, beyond in (("p50", 0.5), ("p99", 0.01))
    ),
    Measure("commands", ("commands_per_grant",), "less", speed=False),
    Measure("server CPU", ("server_cpu_us",), "less", speed=False),
)


@dataclass(frozen=True)
class Change:
    """One measure of one rival. ``ratio``: b / a; ``relative``: the same of its multiples of redis-py's value.

    ``by`` names the one that is judged, ``noise`` bounds what is no change (0.1: from 1 / 1.1 to 1.1). ``verdict``:
    same, better, worse; few, where a percentile rests on too few calls; "" where the two cannot be compared.
    """

    a: float
    b: float
    ratio: float | None
    low: float | None
    high: float | None
    relative: float | None
    by: str
    noise: float | None
    verdict: str
    slowdown: float | None


@dataclass(frozen=True)
class Entry:
    """A rival in a scenario, or at a point of a sweep (``x``), and the changes of its measures."""

    scenario: str
    rival: str
    x: float | None
    a: Row
    b: Row
    changes: Mapping[str, Change]

    @property
    def ours(self) -> bool:
        """Whether the rival is fastlock."""
        return self.rival.startswith(OURS)


GONE = "gone"
"""The name that stands for a measure where result a has a row of fastlock that b lacks."""


@dataclass(frozen=True)
class Comparison:
    """Two results compared. ``differs``: what differs in the environments, {what: (a, b)}; ``changed_parameters``: what
    differs in the parameters of each scenario, likewise."""

    a: Document
    b: Document
    differs: Mapping[str, tuple[Any, Any]]
    changed_parameters: Mapping[str, Mapping[str, tuple[Any, Any]]]
    entries: Sequence[Entry]
    only_a: Sequence[str]
    only_b: Sequence[str]
    gone: Sequence[Entry] = ()


def compare(a: Document, b: Document) -> Comparison:
    """Compare two results: what changed from a to b."""
    differs = setting_differences(a, b)
    shared = [name for name in a["scenarios"] if name in b["scenarios"]]
    changed_parameters = {name: found for name in shared if (found := _parameter_differences(a, b, name))}
    rows_a, rows_b = dict(_rows(a)), dict(_rows(b))
    entries = []
    for key, row in rows_a.items():
        if key in rows_b:
            scenario, rival, x = key
            base = (rows_a.get((scenario, BASELINE, x)), rows_b.get((scenario, BASELINE, x)))
            judge = Judge(_noise(a, b, scenario, row, rows_b[key]), base, bool(differs), scenario in changed_parameters)
            entries.append(Entry(scenario, rival, x, row, rows_b[key], judge.changes(rival, row, rows_b[key])))
    return Comparison(
        a,
        b,
        differs,
        changed_parameters,
        entries,
        _only(rows_a.keys() - rows_b.keys()),
        _only(rows_b.keys() - rows_a.keys()),
        [entry for key, row in rows_a.items() if key not in rows_b and (entry := Entry(*key, row, {}, {})).ours],
    )


Key = tuple[str, str, float | None]


def _rows(document: Document) -> Iterator[tuple[Key, Row]]:
    for name, scenario in document["scenarios"].items():
        for rival, row in rows_of(scenario).items():
            yield (name, rival, None), row
        for point in points_of(scenario):
            yield (name, point["rival"], float(point["x"])), point["row"]


def _only(keys: Any) -> list[str]:
    return sorted(f"{scenario}, {rival}" + ("" if x is None else f" at {x:,g}") for scenario, rival, x in keys)


# -------------------------------------------------------------------------------------------------------- differences


def setting_differences(a: Document, b: Document) -> dict[str, tuple[Any, Any]]:
    """What differs between two runs and keeps their plain numbers from being compared."""
    found = _different(*({key: dig(each, "environment", key) for key in SETTING} for each in (a, b)))
    found |= _different(*(_parameters(each) for each in (a, b)))
    return found | _different(*({"libraries of redis-py": _libraries(each)} for each in (a, b)))


def _parameters(document: Document) -> dict[str, Any]:
    return {key: value for key, value in (document.get("parameters") or {}).items() if key not in APART}


def _libraries(document: Document) -> Any:
    """The versions that the baseline ran with, without fastlock's own."""
    found = dig(document, "environment", "rivals", BASELINE)
    return {key: value for key, value in found.items() if key != "fastlock"} if found else None


def _parameter_differences(a: Document, b: Document, name: str) -> dict[str, tuple[Any, Any]]:
    found = (dig(each, "scenarios", name, "parameters") or {} for each in (a, b))
    kinds = ({"kind": dig(each, "scenarios", name, "kind")} for each in (a, b))
    return _different(*found) | _different(*kinds)


def _different(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {key: (a.get(key), b.get(key)) for key in {**a, **b} if a.get(key) != b.get(key)}


# -------------------------------------------------------------------------------------------------------------- noise


def _noise(a: Document, b: Document, scenario: str, row_a: Row, row_b: Row) -> float | None:
    """How far a ratio of the two runs may lie from 1 for no reason; None where nothing says so."""
    one, other = _spread(a, scenario, row_a), _spread(b, scenario, row_b)
    return None if one is None or other is None else (1 + one) * (1 + other) - 1


def _spread(document: Document, scenario: str, row: Row) -> float | None:
    """The noise of one run: that of fastlock against itself; where it was not measured, that of the row's own
    rounds."""
    recorded = dig(document, "noise", scenario, "spread")
    if recorded is not None:
        return float(recorded)
    rate = row.get("rate")
    if not rate or not rate["low"] or not rate["median"]:
        return None
    return float(max(rate["high"] / rate["median"], rate["median"] / rate["low"]) - 1)


@dataclass(frozen=True)
class Judge:
    """Tells changes from noise for one rival in one scenario; ``base``: redis-py's rows there, in a and in b."""

    noise: float | None
    base: tuple[Row | None, Row | None]
    setting_differs: bool
    parameters_differ: bool

    def changes(self, rival: str, a: Row, b: Row) -> dict[str, Change]:
        """The changes of all measures that both rows have."""
        pairs = {measure: (measure.of(a), measure.of(b)) for measure in MEASURES}
        return {
            measure.name: self._change(measure, rival, a, b, one, other)
            for measure, (one, other) in pairs.items()
            if one is not None and other is not None
        }

    def _change(self, measure: Measure, rival: str, a: Row, b: Row, one: float, other: float) -> Change:
        ratio, drift = _over(other, one), self._drift(measure)
        relative = (
            _over(b["ratio"]["median"], a["ratio"]["median"]) if _by_rounds(measure, a, b) else _over(ratio, drift)
        )
        by = "relative" if self.setting_differs or (rival != BASELINE and _by_rounds(measure, a, b)) else "ratio"
        counted = relative if by == "relative" else ratio
        noise = self.noise if by == "relative" or rival == BASELINE else wider(self.noise, drift)
        verdict = "" if self.parameters_differ else judged(counted, noise, measure.better)
        if verdict and not (measure.solid(a) and measure.solid(b)):
            verdict = "few"
        slowdown = slowed(counted, measure) if verdict not in ("", "few") and counted is not None else None
        return Change(one, other, ratio, *_range(measure, a, b), relative, by, noise, verdict, slowdown)

    def _drift(self, measure: Measure) -> float | None:
        one, other = (measure.of(row) if row else None for row in self.base)
        return _over(other, one)


def wider(noise: float | None, drift: float | None) -> float | None:
    """The noise of the runs, or how far redis-py moved, whichever is more."""
    return max(noise or 0.0, max(drift, 1 / drift) - 1) if drift else noise


def slowed(ratio: float, measure: Measure) -> float | None:
    """How many times as long b takes; None if the measure is not one of speed."""
    if not measure.speed:
        return None
    if measure.better == "less":
        return ratio
    return 1 / ratio if ratio else math.inf


def judged(ratio: float | None, noise: float | None, better: str) -> str:
    """The verdict on a ratio: same, better or worse; "" where there is no ratio. Without a known noise every difference
    counts."""
    if ratio is None:
        return ""
    if 1 / (1 + (noise or 0.0)) <= ratio <= 1 + (noise or 0.0):
        return "same"
    return "better" if (ratio > 1) == (better == "more") else "worse"


def _by_rounds(measure: Measure, a: Row, b: Row) -> bool:
    """Whether both runs took the ratio to redis-py round by round, which is better than one of medians."""
    return measure is RATE and bool(a.get("ratio")) and bool(b.get("ratio"))


def _range(measure: Measure, a: Row, b: Row) -> tuple[float | None, float | None]:
    """The ratio of the rates at worst and at best: slowest round against fastest, and the other way round."""
    if measure is not RATE:
        return None, None
    return _over(b["rate"]["low"], a["rate"]["high"]), _over(b["rate"]["high"], a["rate"]["low"])


def _over(value: float | None, base: float | None) -> float | None:
    ratio = None if value is None or not base else value / base
    return None if ratio is None or not math.isfinite(ratio) else ratio


# -------------------------------------------------------------------------------------------------------- conclusions


def slower(comparison: Comparison, percent: float) -> list[tuple[Entry, str]]:
    """Entries of fastlock, each with the name of a measure, that take more than ``percent`` longer in b, beyond the
    noise; and those that b lacks."""
    found = [
        (entry, name)
        for entry in comparison.entries
        for name, change in entry.changes.items()
        if entry.ours and change.verdict == "worse" and change.slowdown and change.slowdown > 1 + percent / 100
    ]
    return [*found, *((entry, GONE) for entry in comparison.gone)]


def judgeable(comparison: Comparison) -> bool:
    """Whether any entry of fastlock could be called slower, or gone."""
    return bool(comparison.gone) or any(
        change.slowdown for entry in comparison.entries if entry.ours for change in entry.changes.values()
    )


def broken(document: Document) -> list[str]:
    """Why the numbers of a run are not to be relied on."""
    found = [
        f"{scenario}, {rival}: more than one held a lock" for (scenario, rival), n in violations(document).items() if n
    ]
    return [*found, *(document.get("failures") or [])]


def as_json(comparison: Comparison, names: tuple[str, str], percent: float | None) -> dict[str, Any]:
    """The comparison as plain values, see the README of the benchmarks."""
    a, b = comparison.a, comparison.b
    return {
        "schema": SCHEMA,
        **{side: _run(each, name) for side, each, name in (("a", a, names[0]), ("b", b, names[1]))},
        "differs": {key: list(values) for key, values in comparison.differs.items()},
        "played": {
            name: {key: list(values) for key, values in found.items()}
            for name, found in comparison.changed_parameters.items()
        },
        "only_a": list(comparison.only_a),
        "only_b": list(comparison.only_b),
        "entries": [
            {
                "scenario": entry.scenario,
                "rival": entry.rival,
                "x": entry.x,
                "changes": {name: _finite(asdict(change)) for name, change in entry.changes.items()},
            }
            for entry in comparison.entries
        ],
        "fail_over": percent,
        "slower": None
        if percent is None
        else [
            {"scenario": entry.scenario, "rival": entry.rival, "x": entry.x, "measure": name}
            for entry, name in slower(comparison, percent)
        ],
    }


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """The values without infinity, which JSON lacks: a rate that fell to zero has no slowdown."""
    return {key: None if value == math.inf else value for key, value in values.items()}


def _run(document: Document, name: str) -> dict[str, Any]:
    return {
        "file": name,
        "created": document.get("created"),
        "fastlock": dig(document, "environment", "fastlock"),
        "commit": dig(document, "environment", "commit"),
        "command": document.get("command"),
        "broken": broken(document),
    }
