"""Charts of a result: rows of a scenario in, figures out, each with what it shows and how to read it.

This file decides what is drawn and says what could not be; Plotly draws. A rival that has no value for a chart is named
under it, and a chart for which no rival has one is not made. Charts of a sweep are in ``sweeps``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go  # type: ignore[import-untyped]

from .. import written
from ..schema import dig, rows_of
from .figure import (
    DURATION,
    TALL,
    Figure,
    Styles,
    absent,
    brief,
    chart,
    even_axis,
    line,
    log_axis,
    named,
    plain,
    ratio_text,
    singular,
    time_axis,
    told,
)
from .histograms import curve
from .sweeps import sweep

Scenario = Mapping[str, Any]
Row = Mapping[str, Any]

LINEAR_UP_TO = 8
"""Grants beyond this multiple of the fair share would press the rest of a linear axis flat."""

STARVED = 0.01
"""Part of the fair share: less is drawn as that much on a logarithmic axis."""

STEPS = 200
"""Steps of a line at most: more are finer than the chart."""

NEAR = 10
"""A raw round trip that is this many times shorter than the fastest call is not drawn beside it."""

EXPECTED = {
    "pair": ("throughput", "latency by percentile", "server CPU"),
    "contention": ("throughput", "wait by percentile", "handover gap", "fairness", "server CPU"),
    "crash": ("throughput", "recovery"),
    "waiters": (
        *("throughput against waiters", "p99 against waiters"),
        *("server CPU against waiters", "client CPU against waiters"),
    ),
    "load": ("p50 against offered load", "p99 against offered load"),
    "rtt": ("throughput against round trip", "p99 against round trip"),
}
"""The charts that each kind of scenario is run for."""


def missing(scenario: Scenario, drawn: Sequence[Figure]) -> list[str]:
    """The charts that a scenario of this kind should show and does not."""
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


@dataclass(frozen=True)
class Bar:
    """One rival's bar with the lowest and highest round, and the value in words."""

    rival: str
    value: float
    text: str
    low: float | None = None
    high: float | None = None


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
    bars = [
        Bar(rival, cost / 1e6, written.duration(cost) + ratio_text(row.get("server_cpu_ratio")))
        for rival, row in rows.items()
        if (cost := row.get("server_cpu_us")) is not None
    ]
    how = (
        f"Shorter is better: CPU that the server spends on one {unit}. All clients share it, so it bounds how many of "
        f"them one server can carry. {written.TIMES}: as a multiple of redis-py's."
    )
    return _bars("server CPU", f"Server CPU per {unit}", bars, how, rows, styles, timed=True)


def recovery(rows: Mapping[str, Row], styles: Styles) -> Figure | None:
    """Bars of the time until another client holds the lock of a dead holder."""
    bars = []
    for rival, row in rows.items():
        times = row.get("recovery_us")
        if times and times.get("p50") is not None:
            middle, longest = times["p50"], times.get("max")
            text = written.duration(middle) + ("" if longest is None else f", max {written.duration(longest)}")
            bars.append(Bar(rival, middle / 1e6, text, middle / 1e6, None if longest is None else longest / 1e6))
    how = (
        "Shorter is better: from the end of a killed holder's lease to the next grant. The bar is the median, its "
        "whisker ends at the longest."
    )
    return _bars("recovery", "Recovery from a crash", bars, how, rows, styles, timed=True)


def _bars(
    about: str,
    title: str,
    bars: Sequence[Bar],
    how: str,
    rows: Mapping[str, Row],
    styles: Styles,
    timed: bool = False,
) -> Figure | None:
    """Horizontal bars, each under its rival's name and its value."""
    if not bars:
        return None
    axis = {"rangemode": "tozero", "tickformat": "~s", "ticksuffix": "s" if timed else "", "nticks": 5}
    lines = {"showticklabels": False, "autorange": "reversed", "showgrid": False, "zeroline": False}
    traces = [trace for at, bar in enumerate(bars) for trace in _bar(bar, at, styles)]
    drawn = chart(traces, 44 * len(bars) + 86, xaxis=axis, yaxis=lines, hovermode="closest")
    words = {bar.rival: bar.text for bar in bars}
    return Figure(about, title, told(words), drawn, how, absent(list(rows), list(words)))


def _bar(bar: Bar, at: int, styles: Styles) -> list[Any]:
    whisker = None
    if bar.low is not None and bar.high is not None:
        ends = {"array": [brief(bar.high - bar.value)], "arrayminus": [brief(bar.value - bar.low)]}
        whisker = {"type": "data", "symmetric": False, **ends, "color": "var(--ink)", "thickness": 1.5, "width": 4}
    hover = f"<b>{plain(bar.rival)}</b><br>{bar.text}<extra></extra>"
    drawn = go.Bar(
        x=[brief(bar.value)],
        y=[at + 0.2],
        **named(bar.rival),
        orientation="h",
        width=0.34,
        marker_color=f"var(--{styles[bar.rival].colour})",
        error_x=whisker,
        hovertemplate=hover,
    )
    text = f"<b>{plain(bar.rival)}</b>  {bar.text}"
    words = {"mode": "text", "text": [text], "textposition": "middle right", "cliponaxis": False, "hoverinfo": "skip"}
    return [drawn, go.Scatter(x=[0], y=[at - 0.2], legendgroup=bar.rival, showlegend=False, **words)]


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
    """Times by percentile, on an axis that counts nines: 90, 99, 99.9."""
    texts = {rival: dig(row, "histograms", of) for rival, row in rows.items()}
    read = {rival: curve(text, f"{rival}, {of}") for rival, text in texts.items() if text}
    curves = {rival: each for rival, each in read.items() if each}
    if not curves:
        return None
    about, title, meaning = PERCENTILES[of]
    how = (
        f"Lower is better: the time {meaning} At 99 stands the time that 99 of 100 calls did not exceed, at 99.9 that "
        "of 999 in 1,000. Each line ends at its slowest call. The upright scale is logarithmic."
    )
    lines = [
        line(rival, list(map(brief, each.calls)), each.slowest, styles, DURATION) for rival, each in curves.items()
    ]
    nines = range(math.floor(max(2.0, *(math.log10(each.calls[-1]) for each in curves.values())) + 1e-9) + 1)
    axis = {"type": "log", "title_text": "percentile", "tickvals": [10**nine for nine in nines]}
    axis |= {
        "ticktext": list(map(written.percentile, nines)),
        "unifiedhovertitle_text": "1 in %{x:,.3~r} took longer than",
    }
    y = time_axis(end for each in curves.values() for end in (each.slowest[0], each.slowest[-1]))
    shapes = []
    if trip and trip / 1e6 >= min(each.slowest[0] for each in curves.values()) / NEAR:
        shapes = [level(trip / 1e6, "raw round trip")]
    drawn = chart(lines, TALL, xaxis=axis, yaxis=y, shapes=shapes, hovermode="x unified")
    words = told({rival: each.told for rival, each in curves.items()})
    return Figure(about, title, words, drawn, how, absent(list(rows), list(curves)))


def level(height: float, name: str) -> dict[str, Any]:
    """A dotted line across the chart."""
    look = {"line": {"color": "var(--soft)", "dash": "dot", "width": 1.25}, "layer": "below"}
    label = {"text": name, "textposition": "end", "font": {"color": "var(--soft)"}}
    return {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": height, "y1": height, "label": label, **look}


# ----------------------------------------------------------------------------------------------------------- fairness


def fairness(rows: Mapping[str, Row], styles: Styles) -> Figure | None:
    """Grants of each waiter as step lines."""
    shares = {rival: against_fair(dig(row, "fairness", "grants") or []) for rival, row in rows.items()}
    heights = {rival: sampled(each) for rival, each in shares.items() if len(each) > 1}
    if not heights:
        return None
    linear = max(each[0] for each in heights.values()) <= LINEAR_UP_TO
    title = "grants, as a multiple of an equal share"
    y = even_axis(title) if linear else even_axis(f"{title} (logarithmic)") | {"type": "log"}
    x = {"title_text": "waiters, the best served first", "tickvals": [0, 0.5, 1]}
    x |= {"ticktext": ["first", "half", "last"], "unifiedhovertitle_text": "after %{x:.0%} of the waiters"}
    lines = []
    for rival, each in heights.items():
        edges = [at / len(each) for at in range(len(each) + 1)]
        steps = [*each, each[-1]] if linear else [max(share, STARVED) for share in (*each, each[-1])]
        lines.append(line(rival, list(map(brief, edges)), steps, styles, "%{y:.3~r}", line_shape="hv"))
    how = (
        "Flat at 1 is fair: each waiter gets an equal share of the grants. The steeper, the more some get and others "
        "miss. Jain's index is 1 when fair, 1/n when one of n gets all; min/max: least served to best served."
    )
    if not linear:
        how += f" Less than {STARVED:g} is drawn as that much."
    shapes = [level(1, "equal share")]
    drawn = chart(lines, TALL, xaxis=x, yaxis=y, shapes=shapes, hovermode="x unified")
    words = told({rival: _fair_text(rows[rival]) for rival in heights})
    return Figure("fairness", "Fairness, grants of each waiter", words, drawn, how, absent(list(rows), list(heights)))


def against_fair(grants: Sequence[float]) -> list[float]:
    """Grants of each client as a multiple of an equal share, most first; nothing where there were none."""
    total = sum(grants)
    return [grant * len(grants) / total for grant in sorted(grants, reverse=True)] if total else []


def sampled(values: Sequence[float]) -> Sequence[float]:
    """At most STEPS of the values, evenly spaced, first and last included."""
    if len(values) <= STEPS:
        return values
    return [values[round(at * (len(values) - 1) / (STEPS - 1))] for at in range(STEPS)]


def _fair_text(row: Row) -> str:
    fair, parts = row["fairness"], []
    if fair.get("jain") is not None:
        parts.append(f"Jain {fair['jain']:.3f}")
    if fair.get("min_over_max") is not None:
        parts.append(f"min/max {fair['min_over_max']:.2f}")
    return ", ".join(parts)


# ----------------------------------------------------------------------------------------------------------- overview


def overview(document: Mapping[str, Any], styles: Styles) -> Figure | None:
    """Every rival in every scenario as a multiple of redis-py's throughput."""
    found = {name: _ratios(scenario) for name, scenario in document["scenarios"].items()}
    names = [name for name, rows in found.items() if rows]
    if not names:
        return None
    rivals = [rival for rival in styles if any(rival in found[name] for name in names)]
    spreads = {name: dig(document, "noise", name, "spread") for name in names}
    traces = [_noise_bands(list(spreads.values())), *(_dots(rival, names, found, styles) for rival in rivals)]
    y = {"tickvals": list(range(len(names))), "ticktext": list(map(plain, names)), "autorange": "reversed"}
    x = log_axis((row["ratio"]["median"] for name in names for row in found[name].values()), 4)
    x |= {"title_text": f"throughput, {written.TIMES} redis-py (logarithmic)"}
    x |= {"minorloglabels": "complete"}  # 0.2, where Plotly would write 2
    one = {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "x0": 1, "x1": 1, "layer": "below"}
    one["line"] = {"color": "var(--soft)", "width": 1.25}
    drawn = chart(traces, 34 * len(names) + 100, xaxis=x, yaxis=y, shapes=[one], hovermode="closest")
    words = {name: ", ".join(f"{rival} {_ratio_text(row)}" for rival, row in found[name].items()) for name in names}
    how = (
        "Right of 1 is faster than redis-py. The grey band around 1 is the noise of that scenario: what lies inside it "
        "is no difference. Every ratio is taken within a round and the median of them is shown."
    )
    return Figure("overview", "Throughput of every rival as a multiple of redis-py's", told(words), drawn, how)


def _ratios(scenario: Scenario) -> dict[str, Row]:
    return {rival: row for rival, row in rows_of(scenario).items() if row.get("ratio")}


def _dots(rival: str, names: Sequence[str], found: Mapping[str, Mapping[str, Row]], styles: Styles) -> Any:
    rows = {at: found[name][rival] for at, name in enumerate(names) if rival in found[name]}
    style = styles[rival]
    return go.Scatter(
        x=[brief(row["ratio"]["median"]) for row in rows.values()],
        y=list(rows),
        **named(rival),
        mode="markers",
        marker={"symbol": style.symbol, "size": 11, "color": f"var(--{style.colour})"},
        marker_line={"color": "var(--card)", "width": 1},
        zorder=1 if style.bold else 0,
        customdata=[f"{plain(names[at])}<br><b>{plain(rival)}</b> {_ratio_text(row)}" for at, row in rows.items()],
        hovertemplate="%{customdata}<extra></extra>",
    )


def _noise_bands(spreads: Sequence[float | None]) -> Any:
    known = {at: spread for at, spread in enumerate(spreads) if spread is not None}
    return go.Bar(
        y=list(known),
        base=[brief(1 / (1 + spread)) for spread in known.values()],
        x=[brief(1 + spread - 1 / (1 + spread)) for spread in known.values()],
        orientation="h",
        width=0.7,
        name="noise",
        marker_color="var(--band)",
        hoverinfo="skip",
    )


def _ratio_text(row: Row) -> str:
    return f"{written.ratio(row)} ({written.spread(row['ratio'])})"
