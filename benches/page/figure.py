"""What every chart of the page is made of: how a rival looks, the axes, and the look that all charts share.

Colours are names of the style sheet's variables, such as var(--s0): page.js puts in those of light, dark or print. What
a result says enters a chart through ``plain``, as Plotly reads a little HTML in its texts.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go  # type: ignore[import-untyped]

from .. import written

COLOURS = 8
DASHES = (
    "solid",
    "8px,4px",
    "2px,3px",
    "10px,3px,2px,3px",
    "14px,4px",
    "5px,2px,1px,2px,1px,2px",
    "1px,4px",
    "5px,5px",
)
SYMBOLS = ("circle", "square", "triangle-up", "diamond", "triangle-down", "x", "cross", "star")

PLACES = {"fastlock": 0, "redis-py": 1, "fallback": 2, "pipeline": 7, "ceiling": 15, "hiredis": 23, "alone": 31}
"""Rivals that look the same in every report, bounds that are no locks in grey; others take what is left, in order."""

LONGEST_NAME = 18

TALL = 350
"""Height of a line chart without its legend, for which page.js adds room."""

LOOK: dict[str, Any] = {
    "font": {"family": "system-ui, -apple-system, Segoe UI, Roboto, Helvetica Neue, Arial, sans-serif", "size": 12},
    "font_color": "var(--ink)",
    "paper_bgcolor": "rgba(0,0,0,0)",
    "plot_bgcolor": "rgba(0,0,0,0)",
    "margin": {"l": 8, "r": 14, "t": 34, "b": 52},
    "legend": {"orientation": "h", "xref": "container", "yref": "container", "x": 0, "y": 0, "tracegroupgap": 0},
    "hoverlabel": {"bgcolor": "var(--card)", "bordercolor": "var(--line)", "font_color": "var(--ink)"},
    "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": "var(--soft)", "activecolor": "var(--accent)"},
    **{
        f"{axis}axis": {
            "gridcolor": "var(--line)",
            "linecolor": "var(--line)",
            "zerolinecolor": "var(--line)",
            "tickfont_color": "var(--soft)",
            "title_font": {"color": "var(--soft)", "size": 12},
            "title_standoff": 8,
            "automargin": True,
        }
        for axis in "xy"
    },
}


@dataclass(frozen=True)
class Style:
    """How one rival looks in every chart of a page."""

    number: int
    bold: bool = False

    @property
    def colour(self) -> str:
        """The class of the rival's colour, and the name of the variable that holds it."""
        return f"s{self.number % COLOURS}"

    @property
    def dash(self) -> str:
        """The dash of the rival's lines. A colour that is used again has another dash and another symbol."""
        return DASHES[(self.number + self.number // COLOURS) % len(DASHES)]

    @property
    def symbol(self) -> str:
        """The shape of the rival's points."""
        return SYMBOLS[(self.number + self.number // COLOURS) % len(SYMBOLS)]


Styles = Mapping[str, Style]


def styles_of(names: Sequence[str]) -> dict[str, Style]:
    """How each rival looks."""
    colours = {place % COLOURS for place in PLACES.values()}
    others = (number for number in range(2 * COLOURS + len(names)) if number not in PLACES.values())
    free = iter(sorted(others, key=lambda number: (number % COLOURS in colours, number)))
    return {name: Style(PLACES[name] if name in PLACES else next(free), bold=name == "fastlock") for name in names}


@dataclass(frozen=True)
class Figure:
    """A chart, what it is about, its heading, what it shows in words, how to read it, and the rivals not in it."""

    about: str
    title: str
    told: str
    chart: Any
    how: str
    absent: tuple[str, ...] = ()


def look() -> dict[str, Any]:
    """The part that all charts share, as a template of Plotly."""
    shared: dict[str, Any] = go.layout.Template(layout=LOOK).to_plotly_json()
    return shared


def chart(traces: Sequence[Any], height: int, **layout: Any) -> Any:
    """A chart of Plotly, without the default template."""
    return go.Figure(list(traces), {"height": height, "template": {}, **layout})


def line(rival: str, x: Sequence[float], y: Sequence[float], styles: Styles, hover: str, **more: Any) -> Any:
    """The line of a rival; its points show their value by the template ``hover``."""
    style = styles[rival]
    drawn = go.Scatter(
        x=list(x),
        y=list(map(brief, y)),
        **named(rival),
        mode="lines+markers",
        line={"color": f"var(--{style.colour})", "dash": style.dash, "width": 3 if style.bold else 1.75},
        marker={"symbol": style.symbol, "size": 7, "maxdisplayed": 12},
        zorder=1 if style.bold else 0,
        hovertemplate=hover,
    )
    return drawn.update(more)


def named(rival: str) -> dict[str, str]:
    """Name of a trace in the legend, and the group by which page.js finds it."""
    return {"name": plain(rival), "legendgroup": rival}


def plain(text: str) -> str:
    """A name that fits and has no markup in it."""
    fitting = text if len(text) <= LONGEST_NAME else f"{text[: LONGEST_NAME - 1]}\N{HORIZONTAL ELLIPSIS}"
    return html.escape(fitting, quote=False)


def brief(value: float) -> float:
    """Round a value to five digits, which is finer than a pixel."""
    return float(f"{value:.5g}")


def singular(scenario: Mapping[str, Any]) -> str:
    """The unit of what a scenario counts in the singular: pair, grant."""
    return str(scenario.get("unit") or "grants").removesuffix("s")


UNITS = {
    f"{digit}{zeros}{prefix}": f"{digit}{zeros}{prefix}s"
    for prefix in ("n", "\N{MICRO SIGN}", "m", "")
    for zeros in ("", "0", "00")
    for digit in range(2, 10)
}
"""Plotly leaves the unit off labels between powers of ten."""


def log_axis(values: Iterable[float], room: int) -> dict[str, Any]:
    """A logarithmic axis; labelled at 1, 2, 5 where it spans less than two decades, else by the ``room`` for labels."""
    known = [value for value in values if value > 0]
    return {"type": "log"} | ({"dtick": "D2"} if known and max(known) < 100 * min(known) else {"nticks": room})


def time_axis(seconds: Iterable[float]) -> dict[str, Any]:
    """A logarithmic axis of seconds, with the prefix that fits."""
    label = {"tickformat": "~s", "ticksuffix": "s", "labelalias": UNITS}
    return {"title_text": "time (logarithmic)", **label, **log_axis(seconds, 7)}


def even_axis(title: str) -> dict[str, Any]:
    """A linear axis of any quantity, from zero."""
    return {"title_text": title, "rangemode": "tozero", "nticks": 6}


DURATION = "%{y:.3~s}s"
"""Plotly's template of a time."""


def told(lines: Mapping[str, str]) -> str:
    """What a chart shows, rival by rival."""
    return "; ".join(f"{rival}: {words}" for rival, words in lines.items()) + "."


def absent(rivals: Sequence[str], drawn: Sequence[str]) -> tuple[str, ...]:
    """Rivals that a chart lacks."""
    return tuple(rival for rival in rivals if rival not in drawn)


def ratio_text(value: float | None) -> str:
    """A multiple of redis-py's value, as text to follow another number."""
    return "" if value is None else f", {written.TIMES} {written.significant(value)}"
