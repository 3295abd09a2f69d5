"""How numbers are written, on the page and in tables: units, digits, and a dash for what was not measured.

Each function takes a number and returns text. A benchmark is exact to three digits at most.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NOTHING = "\N{EM DASH}"
TIMES = "\N{MULTIPLICATION SIGN}"
ABOUT = "\N{ALMOST EQUAL TO}"
"""The mark of a ratio that lies inside the noise."""

UNITS = ((1.0, "\N{MICRO SIGN}s"), (1e3, "ms"), (1e6, "s"))


def significant(value: float | None) -> str:
    """Write three digits: 4.31, 24.5, 431, 4,310; small ones as they are."""
    if value is None:
        return NOTHING
    if value != 0 and abs(value) < 0.1:
        return f"{value:.2g}"
    for digits, limit in ((2, 9.995), (1, 99.95)):
        if abs(value) < limit:
            return f"{value:.{digits}f}"
    return f"{value:,.0f}"


def duration(us: float | None) -> str:
    """Write microseconds in the unit that gives the fewest digits."""
    if us is None:
        return NOTHING
    if us == 0:
        return f"0 {UNITS[0][1]}"
    for size, unit in UNITS:
        if us / size < 999.5:
            return f"{significant(us / size)} {unit}"
    return f"{significant(us / UNITS[-1][0])} s"


def rate(value: float | None) -> str:
    """Write a number per second."""
    if value is None:
        return NOTHING
    return f"{value:,.0f}" if value >= 99.95 or value == 0 else significant(value)


def whole(value: float | None) -> str:
    """Write a count."""
    return NOTHING if value is None else f"{value:,.0f}"


def share(value: float | None) -> str:
    """Write a part of one as percent; never 0 % if it is more than zero."""
    if value is None:
        return NOTHING
    if 0 < value < 0.0001:
        return "< 0.01 %"
    return f"{100 * value:.3g} %"


def percentile(nines: float) -> str:
    """The label of a place on the nines axis: 0, 90, 99, 99.9; for whole nines only."""
    count = round(nines)
    return "0" if count == 0 else "90" if count == 1 else "99" if count == 2 else "99." + "9" * (count - 2)


def ratio(row: Mapping[str, Any]) -> str:
    """Write a row's rate as a multiple of redis-py's, marked where that is inside the noise."""
    found = row.get("ratio")
    if not found:
        return NOTHING
    if found["low"] == found["high"] == 1:
        return "1"
    return significant(found["median"]) + (f" {ABOUT}" if row.get("noisy") else "")


def spread(values: Mapping[str, Any] | None, write: Any = significant) -> str:
    """Write the lowest to the highest of the rounds."""
    if not values:
        return NOTHING
    return f"{write(values['low'])} \N{EN DASH} {write(values['high'])}"
