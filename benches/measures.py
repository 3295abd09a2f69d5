"""Measures of plain numbers, for the benchmark and for the flash sale.

Only the standard library, as the flash sale runs without the other libraries of the benches. Histograms, and what is
measured over rounds, are in `stats`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def percentile(ordered: Sequence[float], share: float) -> float | None:
    """The smallest of the `ordered` numbers that at least `share` of them do not exceed; None if there are none."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else None


def jain(counts: Sequence[int]) -> float | None:
    """Jain's fairness index: 1 if all counts are equal, 1/n if one of n has all; None if all are 0."""
    squares = sum(count * count for count in counts)
    return sum(counts) ** 2 / (len(counts) * squares) if squares else None
