"""Curves by percentile, read from the encoded histograms of a result.

The histogram library does the arithmetic on the merged histogram; nothing is interpolated or averaged. Times come in
nanoseconds, as they are recorded, and go out in seconds, which the charts show with the prefix that fits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hdrh.histogram import HdrHistogram  # type: ignore[import-untyped]

from .. import written

PER_DECADE = 24
"""Points of a curve between one nine and the next."""


class Unreadable(ValueError):
    """A text is not an encoded histogram."""


@dataclass(frozen=True)
class Curve:
    """``slowest`` [N] is what one call in N took at least, from N = 1 to the number of calls; ``told``: the same in
    words."""

    calls: list[float]
    slowest: list[float]
    told: str


def curve(text: str, name: str) -> Curve | None:
    """The curve of an encoded histogram, None if that is empty. Raises Unreadable, in which it is called ``name``."""
    try:
        histogram = HdrHistogram.decode(text)
        count = histogram.get_total_count()
        calls = [10 ** (step / PER_DECADE) for step in range(math.ceil(math.log10(count or 1) * PER_DECADE))]
        parts = [*(100 * (1 - 1 / each) for each in calls), 100.0]
        found = histogram.get_percentile_to_value_dict([*parts, 50.0, 99.0])
    except Exception as error:  # the library raises a dozen kinds, RuntimeError among them
        raise Unreadable(f"{name}: {error}") from None
    if not count:
        return None
    p50, p99, longest = (written.duration(found[part] / 1e3) for part in (50.0, 99.0, 100.0))
    told = f"p50 {p50}, p99 {p99}, longest {longest} of {count:,}"
    return Curve([*calls, float(count)], [found[part] / 1e9 for part in parts], told)
