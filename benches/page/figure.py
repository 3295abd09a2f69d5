"""What every plot of the page is made of: a drawing with its heading and its reading, axes of time and of rates.

Law: no result is looked at here but for the name of its unit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .. import written
from . import scales, svg
from .markup import Markup
from .scales import Scale
from .svg import Axis


@dataclass(frozen=True)
class Figure:
    """A drawing, what it is about, its heading, how to read it, and who is not in it."""

    about: str
    title: str
    drawing: Markup
    how: str
    absent: tuple[str, ...] = ()


def singular(scenario: Mapping[str, Any]) -> str:
    """One of what a scenario counts: a pair, a grant."""
    return str(scenario.get("unit") or "grants").removesuffix("s")


def time_axis(values: Sequence[float]) -> Axis:
    """Microseconds, logarithmic."""
    low, high = scales.log_bounds(values)
    ticks = [(each, written.tick(each)) for each in scales.log_ticks(low, high)]
    scale = Scale(low, high, svg.BOTTOM, svg.TOP, log=True)
    return Axis("time (logarithmic)", scale, ticks, scales.minor_ticks(low, high), "log", "us")


def even_axis(highest: float, title: str, unit: str) -> Axis:
    """Any quantity, from zero."""
    values = scales.even_ticks(highest)
    ticks = [(value, written.short(value)) for value in values]
    return Axis(title, Scale(0, values[-1], svg.BOTTOM, svg.TOP), ticks, unit=unit)
