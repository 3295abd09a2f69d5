"""Charts of a sweep: what becomes of rate and waiting as waiters are added, or as more load is offered.

This file takes points and returns figures. A point that lacks the value is left out of its line, a rival without any is
named.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .. import written
from ..schema import dig, points_of
from .figure import DURATION, TALL, Figure, Styles, absent, chart, even_axis, line, singular, time_axis, told

Scenario = Mapping[str, Any]
Point = Mapping[str, Any]

KEPT_UP = 0.95
"""A rival that serves less than this part of the offered load does not keep up."""


@dataclass(frozen=True)
class Sweep:
    """One chart: the value under ``keys`` of each row against x. ``timed``: the value is a time, not a rate;
    ``offered``: x is a load."""

    about: str
    title: str
    across: str
    keys: tuple[str, ...]
    how: str
    timed: bool = True
    offered: bool = False

    def value(self, point: Point) -> float | None:
        """The height of a point; None where it was not measured, or is a time of zero, which has no place on a
        logarithmic axis."""
        found = dig(point, "row", *self.keys)
        return None if found is None or (self.timed and not found) else float(found)


def sweep(scenario: Scenario, styles: Styles) -> list[Figure | None]:
    """The charts of a sweep; none for a scenario without points."""
    points = points_of(scenario)
    of = "wait" if any(dig(point, "row", "wait_us") for point in points) else "latency"
    kind, unit = scenario.get("kind"), singular(scenario)
    charts = load(of) if kind == "load" else network(of, unit) if kind == "rtt" else waiters(of, unit)
    return [draw(each, points, styles) for each in charts]


def waiters(of: str, unit: str) -> list[Sweep]:
    """Charts against the number of waiters."""
    return [
        Sweep(
            "throughput against waiters",
            f"Throughput against waiters, {unit}s per second",
            "waiters",
            ("rate", "median"),
            f"Higher is better: {unit}s per second with that many waiters at once. Where a line falls, each further "
            "waiter costs more than it brings.",
            timed=False,
        ),
        Sweep(
            "p99 against waiters",
            f"p99 of the {of} against waiters",
            "waiters",
            (f"{of}_us", "p99"),
            "Lower is better: the time that 99 of 100 acquires did not exceed. Where all want the same lock, waiting "
            "grows with their number in any case; what counts is the distance between the lines.",
        ),
        *(
            Sweep(
                f"{side} CPU against waiters",
                f"{title} per {unit} against waiters",
                "waiters",
                (keys,),
                f"Lower is better: {whose}. On a flat line waiting costs nothing, however many wait.",
            )
            for side, title, keys, whose in (
                ("server", "Server CPU", "server_cpu_us", f"CPU that the server spends on one {unit}"),
                ("client", "Client CPU", "client_cpu_us", f"CPU of all client processes for one {unit}"),
            )
        ),
    ]


def network(of: str, unit: str) -> list[Sweep]:
    """Charts against the time of a round trip to the server."""
    return [
        Sweep(
            "throughput against round trip",
            f"Throughput against the round trip to the server, {unit}s per second",
            "ms",
            ("rate", "median"),
            f"Higher is better: {unit}s per second where a round trip takes so long. The line of the round trip is "
            "that of two of them, one after the other.",
            timed=False,
        ),
        Sweep(
            "p99 against round trip",
            f"p99 of the {of} against the round trip to the server",
            "ms",
            (f"{of}_us", "p99"),
            "Lower is better: the time that 99 of 100 calls did not exceed.",
        ),
    ]


def load(of: str) -> list[Sweep]:
    """Charts against the offered load."""
    how = (
        "Lower is better. Requests are due at a steady rate, whether or not earlier ones are done, and their time "
        "counts from when they were due. Where a line turns up, the rival no longer keeps up; an open marker: it "
        f"served less than {written.share(KEPT_UP)} of what was offered."
    )
    return [
        Sweep(
            f"{name} against offered load",
            f"{name} of the {of} against offered load",
            "offered per second",
            (f"{of}_us", name),
            how,
            offered=True,
        )
        for name in ("p50", "p99")
    ]


def draw(what: Sweep, points: Sequence[Point], styles: Styles) -> Figure | None:
    """Draw one chart, if any rival has values for it."""
    rivals = list(dict.fromkeys(point["rival"] for point in points))
    known = {rival: found for rival in rivals if (found := _known(what, rival, points))}
    if not known:
        return None
    lines = [_line(what, rival, found, styles) for rival, found in known.items()]
    x = {"type": "log", "title_text": what.across, "dtick": 1, "unifiedhovertitle_text": f"%{{x:,}} {what.across}"}
    y = (
        time_axis(height / 1e6 for found in known.values() for _, height in found)
        if what.timed
        else even_axis("per second")
    )
    write = written.duration if what.timed else written.rate
    words = {
        rival: ", ".join(f"{write(height)} at {point['x']:,g}" for point, height in found)
        for rival, found in known.items()
    }
    drawn = chart(lines, TALL, xaxis=x, yaxis=y, hovermode="x unified")
    return Figure(what.about, what.title, told(words), drawn, what.how, absent(rivals, list(known)))


def _known(what: Sweep, rival: str, points: Sequence[Point]) -> list[tuple[Point, float]]:
    ours = sorted((point for point in points if point["rival"] == rival), key=lambda point: float(point["x"]))
    return [(point, height) for point in ours if (height := what.value(point)) is not None]


def _line(what: Sweep, rival: str, known: Sequence[tuple[Point, float]], styles: Styles) -> Any:
    scale = 1e6 if what.timed else 1
    symbol = styles[rival].symbol
    symbols = [f"{symbol}-open" if what.offered and late(point) else symbol for point, _ in known]
    x, y = [point["x"] for point, _ in known], [height / scale for _, height in known]
    hover = DURATION if what.timed else "%{y:,.0f} /s"
    return line(rival, x, y, styles, hover, marker={"symbol": symbols, "size": 8, "maxdisplayed": 0})


def late(point: Point) -> bool:
    """Whether clearly less was served at a point than was offered."""
    reached = dig(point, "row", "rate", "median")
    return reached is not None and reached < KEPT_UP * point["x"]
