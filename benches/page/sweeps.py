"""Plots of a sweep: what becomes of rate and waiting as waiters are added, or as more load is offered.

Law: points in, figures out. A point that lacks the value is left out of its line, a rival without any is named.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .. import written
from ..schema import dig, points_of
from . import scales, svg
from .figure import Figure, even_axis, singular, time_axis
from .scales import Scale
from .svg import Axis, Chart, Line, Styles

Scenario = Mapping[str, Any]
Point = Mapping[str, Any]

KEPT_UP = 0.95
"""A rival that serves less than this part of the offered load does not keep up."""

ROOM = 52
"""Between two labels of the x axis."""


@dataclass(frozen=True)
class Sweep:
    """One plot: the value under ``keys`` of each row against x. ``timed``: it is no rate; ``offered``: x is a load."""

    about: str
    title: str
    across: str
    keys: tuple[str, ...]
    how: str
    timed: bool = True
    offered: bool = False

    def value(self, point: Point) -> float | None:
        """Height of a point; None where it was not measured, or too short for its clock, which has no place on a
        logarithmic axis."""
        found = dig(point, "row", *self.keys)
        return None if found is None or (self.timed and not found) else float(found)


def sweep(scenario: Scenario, styles: Styles) -> list[Figure | None]:
    """The plots of a sweep; none for a scenario without points."""
    points = points_of(scenario)
    of = "wait" if any(dig(point, "row", "wait_us") for point in points) else "latency"
    plots = load(of) if scenario.get("kind") == "load" else waiters(of, singular(scenario))
    return [draw(plot, points, styles) for plot in plots]


def waiters(of: str, unit: str) -> list[Sweep]:
    """Against the number of waiters."""
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
                f"Lower is better: {whose}. A flat line: to wait costs nothing, however many do.",
            )
            for side, title, keys, whose in (
                ("server", "Server CPU", "server_cpu_us", f"CPU that the server spends on one {unit}"),
                ("client", "Client CPU", "client_cpu_us", f"CPU of all client processes for one {unit}"),
            )
        ),
    ]


def load(of: str) -> list[Sweep]:
    """Against the offered load."""
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


def draw(plot: Sweep, points: Sequence[Point], styles: Styles) -> Figure | None:
    """One of them, if anybody has values for it."""
    rivals = list(dict.fromkeys(point["rival"] for point in points))
    lines = [line for rival in rivals if (line := _line(plot, rival, points))]
    if not lines:
        return None
    every = [point for line in lines for point in line.points]
    x = measured_axis(sorted({at for at, _ in every}), plot.across)
    heights = [height for _, height in every]
    y = time_axis(heights) if plot.timed else even_axis(max(heights), "per second", "rate")
    write = written.duration if plot.timed else written.rate
    told = "; ".join(
        f"{line.rival}: {', '.join(f'{write(height)} at {at:,g}' for at, height in line.points)}" for line in lines
    )
    drawing = svg.line_chart(Chart(plot.title, f"{told}.", lines, x, y), styles)
    drawn = {line.rival for line in lines}
    return Figure(plot.about, plot.title, drawing, plot.how, tuple(rival for rival in rivals if rival not in drawn))


def _line(plot: Sweep, rival: str, points: Sequence[Point]) -> Line | None:
    ours = sorted((point for point in points if point["rival"] == rival), key=lambda point: float(point["x"]))
    known = [(point, height) for point in ours if (height := plot.value(point)) is not None]
    if not known:
        return None
    behind = frozenset(at for at, (point, _) in enumerate(known) if plot.offered and late(point))
    return Line(rival, [(point["x"], height) for point, height in known], "", range(len(known)), behind)


def late(point: Point) -> bool:
    """Whether clearly less was served than was offered."""
    reached = dig(point, "row", "rate", "median")
    return reached is not None and reached < KEPT_UP * point["x"]


def measured_axis(values: Sequence[float], title: str) -> Axis:
    """Logarithmic, with labels where something was measured, as many as have room."""
    scale = Scale(values[0], values[-1], svg.LEFT + 8, svg.END - 8, log=True)
    kept = scales.thinned([scale.place(value) for value in values], ROOM)
    return Axis(title, scale, [(values[at], written.place(values[at])) for at in kept], kind="log", unit="count")
