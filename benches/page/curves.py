"""Curves out of what a run recorded: histograms by percentile, grants by client.

Law: numbers in, numbers out. A curve is read off the merged histogram itself, rank by rank; nothing is interpolated or
averaged. Times come in nanoseconds, as they are recorded, and go out in microseconds.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from hdrh.histogram import HdrHistogram  # type: ignore[import-untyped]

from .scales import share

PER_NINE = 24
"""Points of a curve between one nine and the next."""


class Unreadable(ValueError):
    """A text is not an encoded histogram."""


@dataclass(frozen=True)
class Recorded:
    """Values of a histogram in rising order (microseconds), and how many calls took that long or less."""

    values: Sequence[float]
    upto: Sequence[int]

    @property
    def count(self) -> int:
        """Calls in all."""
        return self.upto[-1] if self.upto else 0

    def at(self, part: float) -> float:
        """The time that a share ``part`` (0..1) of the calls did not exceed, with the library's own rounding."""
        rank = max(1, int(min(part, 1.0) * self.count + 0.5))
        return self.values[bisect_left(self.upto, rank)]


def decode(text: str, name: str) -> Recorded:
    """A histogram of nanoseconds, base64. Raises Unreadable, in which it is called ``name``."""
    try:
        histogram = HdrHistogram.decode(text)
        counts = list(histogram.counts)
    except Exception as error:  # the library raises a dozen kinds, RuntimeError among them
        raise Unreadable(f"{name}: {error}") from None
    filled = [index for index, count in enumerate(counts) if count]
    values = [histogram.get_highest_equivalent_value(histogram.get_value_from_index(index)) / 1e3 for index in filled]
    return Recorded(values, list(accumulate(counts[index] for index in filled)))


def by_percentile(recorded: Recorded) -> list[tuple[float, float]]:
    """(place on the nines axis, microseconds), from the fastest call to the slowest, which stands at 1 - 1/N."""
    if not recorded.count:
        return []
    end = math.log10(recorded.count)
    places = [step / PER_NINE for step in range(math.ceil(end * PER_NINE))]
    return [*((place, recorded.at(share(place))) for place in places), (end, recorded.values[-1])]


def against_fair(grants: Sequence[float]) -> list[float]:
    """Grants of each client as a multiple of an equal share, most first; nothing where nobody got any."""
    total = sum(grants)
    return [grant * len(grants) / total for grant in sorted(grants, reverse=True)] if total else []


def sampled(values: Sequence[float], most: int) -> Sequence[float]:
    """At most so many of them, evenly spaced, first and last included."""
    if len(values) <= most:
        return values
    return [values[round(at * (len(values) - 1) / (most - 1))] for at in range(most)]


def steps(heights: Sequence[float]) -> list[tuple[float, float]]:
    """A step line over 0..1 with a step for each height."""
    width = 1 / len(heights) if heights else 0.0
    return [(edge * width, height) for at, height in enumerate(heights) for edge in (at, at + 1)]
