"""Plots of a result: rows and points of a scenario in, figures out, each with what it shows and how to read it.

Law: decides what is drawn and says what could not be; how lines look is ``svg``'s business. A rival that has no
value for a plot is named under it, and a plot for which nobody has one is not made.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from .. import written
from ..schema import dig, rows_of
from . import scales, svg
from .curves import Recorded, against_fair, by_percentile, decode, sampled, steps
from .figure import Figure, even_axis, singular, time_axis
from .scales import Scale
from .svg import Axis, Bar, Chart, Dot, Dots, Line, Style, Styles
from .sweeps import sweep

Scenario = Mapping[str, Any]
Row = Mapping[str, Any]

PLACES = {"fastlock": 0, "redis-py": 1, "fallback": 2, "pipeline": 7, "ceiling": 15, "hiredis": 23, "alone": 31}
"""These look the same in every report, bounds that are no locks in grey; the others take what is left, in order."""

LINEAR_UP_TO = 8
"""Grants beyond this multiple of the fair share would press the rest of a linear axis flat."""

STARVED = 0.01
"""Of the fair share: less is drawn as that much on a logarithmic axis."""

STEPS = 200
"""More steps than that are finer than the drawing."""

NEAR = 10
"""A raw round trip that is this many times shorter than the fastest call has no place beside it."""


def styles_of(names: Sequence[str]) -> dict[str, Style]:
    """How each rival looks."""
    colours = {place % svg.COLOURS for place in PLACES.values()}
    others = (number for number in range(2 * svg.COLOURS + len(names)) if number not in PLACES.values())
    free = iter(sorted(others, key=lambda number: (number % svg.COLOURS in colours, number)))
    return {name: Style(PLACES[name] if name in PLACES else next(free), bold=name == "fastlock") for name in names}


EXPECTED = {
    "pair": ("throughput", "latency by percentile", "server CPU"),
    "contention": ("throughput", "wait by percentile", "handover gap", "fairness", "server CPU"),
    "crash": ("throughput", "recovery"),
    "waiters": (
        *("throughput against waiters", "p99 against waiters"),
        *("server CPU against waiters", "client CPU against waiters"),
    ),
    "load": ("p50 against offered load", "p99 against offered load"),
}
"""What each kind of scenario is played for."""


def missing(scenario: Scenario, drawn: Sequence[Figure]) -> list[str]:
    """What a scenario of this kind should show and does not."""
    there = {figure.about for figure in drawn}
    return [about for about in EXPECTED.get(str(scenario.get("kind")), ()) if about not in there]


def figures(scenario: Scenario, styles: Styles) -> list[Figure]:
    """All that can be drawn of a scenario."""
    rows, unit = rows_of(scenario), singular(scenario)
    trip = dig(scenario, "round_trip", "p50_us")
    made: list[Figure | None] = [throughput(rows, unit, styles)] if rows else []
    made += [percentiles(rows, of, trip, styles) for of in ("latency", "wait", "handover")]
    made += [recovery(rows, styles), fairness(rows, styles), server_cpu(rows, unit, styles)]
    made += sweep(scenario, styles)
    return [figure for figure in made if figure]


# --------------------------------------------------------------------------------------------------------------- bars


def throughput(rows: Mapping[str, Row], unit: str, styles: Styles) -> Figure | None:
    """Bars of the rates."""
    bars = [
        Bar(rival, row["rate"]["median"], _rate_text(row), row["rate"]["low"], row["rate"]["high"])
        for rival, row in rows.items()
        if row.get("rate")
    ]
    how = (
        f"Longer is better: {unit}s per second. The bar is the median of the rounds, its whisker goes from the slowest "
        f"round to the fastest. {written.TIMES}: times redis-py, taken round by round; {written.ABOUT}: no difference "
        "beyond the noise."
    )
    return _bars("throughput", f"Throughput, {unit}s per second", bars, how, rows, styles)


def _rate_text(row: Row) -> str:
    ratio = f", {written.TIMES} {written.ratio(row)}" if row.get("ratio") else ""
    return f"{written.rate(row['rate']['median'])} /s{ratio}"


def server_cpu(rows: Mapping[str, Row], unit: str, styles: Styles) -> Figure | None:
    """Bars of the server's CPU."""
    bars = []
    for rival, row in rows.items():
        if row.get("server_cpu_us") is not None:
            part = row.get("server_cpu_ratio")
            ratio = "" if part is None else f", {written.TIMES} {written.significant(part)}"
            bars.append(Bar(rival, row["server_cpu_us"], written.duration(row["server_cpu_us"]) + ratio))
    how = (
        f"Shorter is better: CPU that the server spends on one {unit}. All clients share it, so it bounds how many of "
        f"them one server can carry. {written.TIMES}: as a multiple of redis-py's."
    )
    return _bars("server CPU", f"Server CPU per {unit}", bars, how, rows, styles)


def recovery(rows: Mapping[str, Row], styles: Styles) -> Figure | None:
    """Bars of the time until somebody else holds the lock of a dead holder."""
    bars = [
        Bar(rival, times["p50"], _recovery_text(times), times["p50"], times.get("max"))
        for rival, row in rows.items()
        if (times := row.get("recovery_us")) and times.get("p50") is not None
    ]
    how = (
        "Shorter is better: from the end of a killed holder's lease to the next grant. The bar is the median, its "
        "whisker ends at the longest."
    )
    return _bars("recovery", "Recovery from a crash", bars, how, rows, styles)


def _recovery_text(times: Mapping[str, Any]) -> str:
    longest = times.get("max")
    return written.duration(times["p50"]) + ("" if longest is None else f", at most {written.duration(longest)}")


def _bars(
    about: str, title: str, bars: Sequence[Bar], how: str, rows: Mapping[str, Row], styles: Styles
) -> Figure | None:
    if not bars:
        return None
    description = "; ".join(f"{bar.rival}: {bar.text}" for bar in bars) + "."
    drawing = svg.bar_chart(title, description, bars, styles)
    return Figure(about, title, drawing, how, _absent(rows, [bar.rival for bar in bars]))


def _absent(rows: Mapping[str, Row], drawn: Sequence[str]) -> tuple[str, ...]:
    return tuple(rival for rival in rows if rival not in drawn)


# -------------------------------------------------------------------------------------------------------- percentiles

PERCENTILES = {
    "latency": (
        "latency by percentile",
        "Latency by percentile",
        "of a whole lap, acquire and release. With many callers in a closed loop most of it is queueing.",
    ),
    "wait": (
        "wait by percentile",
        "Wait for the lock, by percentile",
        "from the (intended) start of the acquire until the lock is held.",
    ),
    "handover": (
        "handover gap",
        "Handover gap, by percentile",
        "from the call of release until the next holder runs, in whichever process. All that time the lock is idle.",
    ),
}


def percentiles(rows: Mapping[str, Row], of: str, trip: float | None, styles: Styles) -> Figure | None:
    """Times by percentile on the nines axis."""
    texts = {rival: dig(row, "histograms", of) for rival, row in rows.items()}
    found = {rival: decode(text, f"{rival}, {of}") for rival, text in texts.items() if text}
    curves = {rival: by_percentile(each) for rival, each in found.items() if each.count}
    if not curves:
        return None
    about, title, meaning = PERCENTILES[of]
    x = nines_axis(max(curve[-1][0] for curve in curves.values()))
    ends = [us for curve in curves.values() for _, us in (curve[0], curve[-1])]
    reference = (trip, "raw round trip") if trip and trip >= min(ends) / NEAR else None
    y = time_axis([*ends, reference[0]] if reference else ends)
    lines = [Line(rival, curve, "", _whole_nines(curve)) for rival, curve in curves.items()]
    told = "; ".join(f"{rival}: {_told(found[rival])}" for rival in curves)
    how = (
        f"Lower is better: the time {meaning} At 99 stands the time that 99 of 100 calls did not exceed, at 99.9 that "
        "of 999 in 1,000. Each line ends at its slowest call. The upright scale is logarithmic."
    )
    drawing = svg.line_chart(Chart(title, f"{told}.", lines, x, y, reference), styles)
    return Figure(about, title, drawing, how, _absent(rows, list(curves)))


def _told(each: Recorded) -> str:
    parts = [f"{name} {written.duration(each.at(part))}" for name, part in (("p50", 0.5), ("p99", 0.99))]
    return f"{', '.join(parts)}, longest {written.duration(each.values[-1])} of {each.count:,}"


def _whole_nines(curve: Sequence[tuple[float, float]]) -> list[int]:
    """Points at 90, 99, 99.9 and so on, and both ends."""
    ends = {0, len(curve) - 1}
    return sorted(ends | {at for at, (place, _) in enumerate(curve) if abs(place - round(place)) < 1e-9})


def nines_axis(end: float) -> Axis:
    """From the fastest call to the slowest of them all."""
    high = max(end, 2.0)
    ticks = [(float(nine), written.percentile(nine)) for nine in range(math.floor(high + 1e-9) + 1)]
    return Axis("percentile", Scale(0, high, svg.LEFT, svg.END), ticks, kind="nines")


# ----------------------------------------------------------------------------------------------------------- fairness


def fairness(rows: Mapping[str, Row], styles: Styles) -> Figure | None:
    """Grants of each waiter as step lines."""
    shares = {rival: against_fair(dig(row, "fairness", "grants") or []) for rival, row in rows.items()}
    heights = {rival: sampled(each, STEPS) for rival, each in shares.items() if len(each) > 1}
    if not heights:
        return None
    lines = [Line(rival, steps(each), _fair_text(rows[rival]), _some(len(each))) for rival, each in heights.items()]
    told = "; ".join(f"{rival}: {_fair_text(rows[rival])}" for rival in heights)
    x = Axis(
        "waiters, from the best served to the least",
        Scale(0, 1, svg.LEFT, svg.END),
        [(0, "first"), (0.5, "half"), (1, "last")],
        kind="linear",
        unit="part",
    )
    y = fair_axis(max(each[0] for each in heights.values()))
    how = (
        "Flat at 1 is fair: everybody gets an equal share of the grants. The steeper, the more some get and others "
        "miss. Jain's index is 1 when fair, 1/n when one of n gets all; min/max: least served to best served."
    )
    title = "Fairness, grants of each waiter"
    drawing = svg.line_chart(Chart(title, f"{told}.", lines, x, y, (1, "equal share")), styles)
    return Figure("fairness", title, drawing, how, _absent(rows, list(heights)))


def _some(clients: int) -> list[int]:
    """A few points of a step line, for markers: two points make a step."""
    return sorted({2 * round(part * (clients - 1) / 4) for part in range(5)})


def _fair_text(row: Row) -> str:
    fair, parts = row["fairness"], []
    if fair.get("jain") is not None:
        parts.append(f"Jain {fair['jain']:.3f}")
    if fair.get("min_over_max") is not None:
        parts.append(f"min/max {fair['min_over_max']:.2f}")
    return ", ".join(parts)


def fair_axis(highest: float) -> Axis:
    """Multiples of the fair share: linear if they fit, else logarithmic from nearly nothing."""
    title = "grants, as a multiple of an equal share"
    if highest <= LINEAR_UP_TO:
        return even_axis(highest, title, "times")
    low, high = scales.log_bounds([STARVED, highest])
    ticks = [(each, written.short(each)) for each in scales.log_ticks(low, high)]
    ticks[0] = (low, f"\N{LESS-THAN OR EQUAL TO} {low:g}")
    scale = Scale(low, high, svg.BOTTOM, svg.TOP, log=True)
    return Axis(f"{title} (logarithmic)", scale, ticks, kind="log", unit="times")


# ----------------------------------------------------------------------------------------------------------- overview


def overview(document: Mapping[str, Any], styles: Styles) -> Figure | None:
    """Every rival in every scenario as a multiple of redis-py's throughput."""
    rows = []
    for name, scenario in document["scenarios"].items():
        ratios = {rival: row for rival, row in rows_of(scenario).items() if row.get("ratio")}
        spread = dig(document, "noise", name, "spread")
        dots = [Dot(rival, row["ratio"]["median"], _ratio_text(row)) for rival, row in ratios.items()]
        if dots:
            rows.append(Dots(name, dots, None if spread is None else (1 / (1 + spread), 1 + spread)))
    if not rows:
        return None
    bounds = scales.log_bounds([1.0, *(dot.value for row in rows for dot in row.dots)])
    scale = Scale(*bounds, svg.DOTS_LEFT, svg.END, log=True)
    ticks = [(each, written.short(each)) for each in scales.log_ticks(*bounds)]
    axis = Axis(f"throughput, {written.TIMES} redis-py (logarithmic)", scale, ticks, kind="log", unit="times")
    title = "Throughput of every rival as a multiple of redis-py's"
    told = "; ".join(f"{row.label}: {', '.join(f'{dot.rival} {dot.text}' for dot in row.dots)}" for row in rows)
    how = (
        "Right of 1 is faster than redis-py. The grey band around 1 is the noise of that scenario: what lies inside it "
        "is no difference. Every ratio is taken within a round and the median of them is shown."
    )
    return Figure("overview", title, svg.dot_chart(title, f"{told}.", rows, axis, styles), how)


def _ratio_text(row: Row) -> str:
    return f"{written.ratio(row)} ({written.spread(row['ratio'])})"
