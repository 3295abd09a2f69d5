"""Axes: where a value stands on paper, which values get a line and a label.

Law: numbers in, numbers out; no markup, no results. A place is in the units of the drawing, and y grows downwards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

STEPS = (1, 2, 5)
"""Round numbers, times any power of ten."""


TINY = 1e-9
"""Less than that is nothing, in any unit that is drawn."""


@dataclass(frozen=True)
class Scale:
    """Maps values from ``low`` to ``high`` onto places from ``start`` to ``end``; beyond them, onto the nearer end."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def place(self, value: float) -> float:
        """Where ``value`` stands."""
        inside = min(max(value, self.low), self.high)
        if self.high == self.low:
            return (self.start + self.end) / 2
        if self.log:
            part = math.log(inside / self.low) / math.log(self.high / self.low)
        else:
            part = (inside - self.low) / (self.high - self.low)
        return self.start + part * (self.end - self.start)


def nines(share: float) -> float:
    """Place of a share on the nines axis: 0 is 0, 0.9 is 1, 0.99 is 2; 1 would be infinitely far."""
    return -math.log10(1 - share)


def share(place: float) -> float:
    """The reverse of ``nines``."""
    return 1 - math.pow(10, -place)


def round_down(value: float) -> float:
    """The greatest of 1, 2, 5 times a power of ten that is not above ``value`` (> 0)."""
    power = 10.0 ** math.floor(math.log10(value) + 1e-9)
    return max((step * power for step in STEPS if step * power <= value * (1 + 1e-9)), default=power)


def round_up(value: float) -> float:
    """The least of them that is not below ``value`` (> 0)."""
    below = round_down(value)
    return below if below >= value * (1 - 1e-9) else next(each for each in _ladder(below) if each >= value * (1 - 1e-9))


def log_bounds(values: Sequence[float]) -> tuple[float, float]:
    """Round bounds of a logarithmic axis that holds all ``values`` but nothings, a factor of ten at least."""
    above = [value for value in values if value > TINY]
    if not above:
        return 1.0, 10.0
    low, high = round_down(min(above)), round_up(max(above))
    while high / low < 10 * (1 - 1e-9):
        high = round_up(high * 1.5)
    return low, high


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten from ``low`` to ``high``; with fewer than three of them also their doubles and fives."""
    every = _between(low, high)
    tens = [each for each in every if abs(math.log10(each) - round(math.log10(each))) < 1e-9]
    return tens if len(tens) > 2 else every


def minor_ticks(low: float, high: float) -> list[float]:
    """All of 1, 2, 5 times a power of ten, for fainter lines."""
    return _between(low, high)


def even_ticks(high: float, about: int = 5) -> list[float]:
    """Round steps from 0 to the first one that is not below ``high``."""
    if high <= TINY:
        return [0.0, 1.0]
    step = round_up(high / about)
    return [step * count for count in range(math.ceil(high / step - 1e-9) + 1)]


def thinned(places: Sequence[float], gap: float) -> list[int]:
    """Indices of ``places`` (rising) that keep ``gap`` between them; the last one always, and as many as fit before."""
    kept: list[int] = []
    for index, place in enumerate(places):
        if not kept or place - places[kept[-1]] >= gap:
            kept.append(index)
    last = len(places) - 1
    while len(kept) > 1 and kept[-1] != last and places[last] - places[kept[-1]] < gap:
        kept.pop()
    return kept if not places or kept[-1] == last else [*kept, last]


def _ladder(start: float) -> list[float]:
    """Round numbers from ``start`` (one of them) on, over a factor of ten."""
    power = 10.0 ** math.floor(math.log10(start) + 1e-9)
    return [step * power * ten for ten in (1, 10) for step in STEPS if step * power * ten >= start * (1 - 1e-9)]


def _between(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low) - 1e-9), math.ceil(math.log10(high) + 1e-9)
    every = [float(f"{step}e{power}") for power in range(first, last + 1) for step in STEPS]
    return [each for each in every if low * (1 - 1e-9) <= each <= high * (1 + 1e-9)]
