"""Drawings: line charts, bars and dots as SVG.

Law: what to draw comes in as values, markup goes out; nothing here knows a result file. Colours and letter sizes are
the style sheet's (classes s0 to s7); a rival is told by its dash and marker as well. Room for text is reckoned for
the large letters of a phone, where a drawing is as wide as the screen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .markup import Markup, join, number, tag
from .scales import Scale

WIDTH, LEFT, RIGHT, TOP, TALL, BELOW = 480, 68, 14, 36, 230, 54
"""A chart: its width, the margins of its field, the field's height, the room for the x axis."""

LETTER = 9.4
"""Width of a letter on a phone, about."""

CROWDED = 6
"""More labels of an x axis than this do not fit on a phone."""

LONGEST_NAME = 22

KEY, KEY_LINE = 30, 24
"""Width of the sample in a legend, and the height of its lines."""

END, BOTTOM = WIDTH - RIGHT, TOP + TALL
"""Right and lower edge of the field."""

BAR_LINE, WHISKER, DOT_LINE, DOTS_LEFT = 43, 9, 38, 18
"""Heights of a bar with its text, of a whisker below it, and of a row of dots; left edge of the dots."""

COLOURS = 8
DASHES = ("", "8 4", "2 3", "10 3 2 3", "14 4", "5 2 1 2 1 2", "1 4", "5 5")
MARKERS = ("circle", "square", "triangle", "diamond", "down", "cross", "plus", "star")


@dataclass(frozen=True)
class Style:
    """How one rival looks in every drawing of a page."""

    number: int
    bold: bool = False

    @property
    def colour(self) -> str:
        """Class of its colour."""
        return f"s{self.number % COLOURS}"

    @property
    def dash(self) -> str | None:
        """Of its lines; None is a solid one. A colour that comes again has another dash and another marker."""
        return DASHES[(self.number + self.number // COLOURS) % len(DASHES)] or None

    @property
    def marker(self) -> str:
        """Shape of its points."""
        return MARKERS[(self.number + self.number // COLOURS) % len(MARKERS)]


Styles = Mapping[str, Style]


@dataclass(frozen=True)
class Axis:
    """``kind`` (linear, log, nines) and ``unit`` (us, per second, ...) are for the script that reads values off."""

    title: str
    scale: Scale
    ticks: Sequence[tuple[float, str]]
    minor: Sequence[float] = ()
    kind: str = "linear"
    unit: str = ""

    def data(self) -> str:
        """All that it takes to turn a place into a value."""
        ends = (self.scale.low, self.scale.high, self.scale.start, self.scale.end)
        return " ".join([self.kind, *(f"{each:.10g}" for each in ends), self.unit])


@dataclass(frozen=True)
class Line:
    """One rival's line; ``marks``: indices of the points that get a marker, ``hollow`` those of them that stay open."""

    rival: str
    points: Sequence[tuple[float, float]]
    label: str
    marks: Sequence[int] = ()
    hollow: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Bar:
    """One rival's bar with the lowest and highest round, and the value in words."""

    rival: str
    value: float
    text: str
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Dot:
    """One rival's place in a row of dots."""

    rival: str
    value: float
    text: str


@dataclass(frozen=True)
class Dots:
    """A row of dots; ``band``: what counts as equal to one."""

    label: str
    dots: Sequence[Dot]
    band: tuple[float, float] | None = None


@dataclass(frozen=True)
class Chart:
    """A line chart. ``reference``: a height worth a line of its own, and what it is."""

    name: str
    description: str
    lines: Sequence[Line]
    x: Axis
    y: Axis
    reference: tuple[float, str] | None = None


def line_chart(chart: Chart, styles: Styles) -> Markup:
    """Grid, axes, lines with their markers, legend."""
    legend, height = _legend([(line.rival, line.label) for line in chart.lines], BOTTOM + BELOW, styles)
    below, above = _reference(chart)
    drawn = sorted(chart.lines, key=lambda line: styles[line.rival].bold)  # the bold one is on top
    return _svg(
        chart.name,
        chart.description,
        height,
        _grid(chart),
        below,
        *(_line(line, chart, styles[line.rival]) for line in drawn),
        above,
        tag("line", class_="cursor", x1=LEFT, x2=LEFT, y1=TOP, y2=BOTTOM),
        legend,
        data_x=chart.x.data(),
        data_y=chart.y.data(),
    )


def bar_chart(name: str, description: str, bars: Sequence[Bar], styles: Styles) -> Markup:
    """Bars lying down, each under its rival's name and its value, whiskers from lowest to highest."""
    longest = max(max(bar.value, bar.high or 0) for bar in bars) or 1
    scale = Scale(0, longest, 2, WIDTH - 6)
    line = BAR_LINE + (0 if all(bar.low is None for bar in bars) else WHISKER)
    rows = [_bar(bar, 4 + at * line, scale, styles[bar.rival]) for at, bar in enumerate(bars)]
    return _svg(name, description, len(bars) * line + 4, *rows)


def dot_chart(name: str, description: str, rows: Sequence[Dots], x: Axis, styles: Styles) -> Markup:
    """One line for each row, a marker for each rival, a band for what is equal within the noise."""
    bottom = DOT_LINE * len(rows)
    grid = [_tick_x(x.scale.place(value), label, bottom, top=0) for value, label in x.ticks]
    drawn = [_dots(row, DOT_LINE * at, x.scale, styles) for at, row in enumerate(rows)]
    one = x.scale.place(1)
    entries = {dot.rival: "" for row in rows for dot in row.dots}
    legend, height = _legend(list(entries.items()), bottom + BELOW, styles)
    return _svg(
        name,
        description,
        height,
        *grid,
        tag("line", class_="one", x1=one, x2=one, y1=0, y2=bottom),
        *drawn,
        tag("text", x.title, class_="axis", x=END, y=bottom + 44, text_anchor="end"),
        legend,
    )


def marker(shape: str, x: float, y: float, hollow: bool = False) -> Markup:
    """A marker around a point."""
    if shape == "circle":
        return tag("circle", class_="mark hollow" if hollow else "mark", cx=x, cy=y, r=4)
    outline = " ".join(f"{number(x + dx)},{number(y + dy)}" for dx, dy in OUTLINES[shape])
    return tag("polygon", class_="mark hollow" if hollow else "mark", points=outline)


def _cross(turned: bool) -> list[tuple[float, float]]:
    thin, long = 1.3, 4.8
    plus = [
        *((-thin, -long), (thin, -long), (thin, -thin), (long, -thin), (long, thin), (thin, thin)),
        *((thin, long), (-thin, long), (-thin, thin), (-long, thin), (-long, -thin), (-thin, -thin)),
    ]
    return [((dx - dy) * 0.7071, (dx + dy) * 0.7071) for dx, dy in plus] if turned else plus


OUTLINES = {
    "square": [(-3.6, -3.6), (3.6, -3.6), (3.6, 3.6), (-3.6, 3.6)],
    "triangle": [(0, -4.8), (4.6, 3.4), (-4.6, 3.4)],
    "diamond": [(0, -5.2), (5.2, 0), (0, 5.2), (-5.2, 0)],
    "down": [(0, 4.8), (4.6, -3.4), (-4.6, -3.4)],
    "plus": _cross(False),
    "cross": _cross(True),
    "star": [(0, -5.6), (1.5, -1.5), (5.6, 0), (1.5, 1.5), (0, 5.6), (-1.5, 1.5), (-5.6, 0), (-1.5, -1.5)],
}


def clipped(text: str) -> str:
    """A name that fits."""
    return text if len(text) <= LONGEST_NAME else f"{text[: LONGEST_NAME - 1]}\N{HORIZONTAL ELLIPSIS}"


def _svg(name: str, description: str, height: float, *children: Markup | None, **data: str) -> Markup:
    words = tag("title", name), tag("desc", description)
    return tag("svg", *words, *children, class_="plot", viewBox=f"0 0 {WIDTH} {number(height)}", role="img", **data)


def _grid(chart: Chart) -> Markup:
    x, y = chart.x, chart.y
    faint = [tag("line", class_="minor", x1=LEFT, x2=END, y1=at, y2=at) for at in map(y.scale.place, y.minor)]
    across = [_tick_y(y.scale.place(value), label) for value, label in y.ticks]
    up = [
        _tick_x(x.scale.place(value), label, BOTTOM, spare=len(x.ticks) > CROWDED and at % 2 == 1)
        for at, (value, label) in enumerate(x.ticks)
    ]
    names = [
        tag("text", y.title, class_="axis", x=4, y=15),
        tag("text", x.title, class_="axis", x=END, y=BOTTOM + 44, text_anchor="end"),
    ]
    return join([*faint, *across, *up, *names])


def _tick_x(at: float, label: str, bottom: float, top: float = TOP, spare: bool = False) -> Markup:
    """``spare``: a phone, with its large letters, shows the line without the label."""
    line = tag("line", class_="rule", x1=at, x2=at, y1=top, y2=bottom)
    return join(
        [line, tag("text", label, class_="tick spare" if spare else "tick", x=at, y=bottom + 21, text_anchor="middle")]
    )


def _tick_y(at: float, label: str) -> Markup:
    line = tag("line", class_="rule", x1=LEFT, x2=END, y1=at, y2=at)
    return join([line, tag("text", label, class_="tick", x=LEFT - 7, y=at + 4.5, text_anchor="end")])


def _reference(chart: Chart) -> tuple[Markup | None, Markup | None]:
    """A line to lie below all others, and its name to stand above them."""
    if chart.reference is None:
        return None, None
    value, label = chart.reference
    at = chart.y.scale.place(value)
    line = tag("line", class_="reference", x1=LEFT, x2=END, y1=at, y2=at)
    return line, tag("text", label, class_="note", x=END - 4, y=at - 5, text_anchor="end")


def _line(line: Line, chart: Chart, style: Style) -> Markup:
    places = [(chart.x.scale.place(x), chart.y.scale.place(y)) for x, y in line.points]
    path = " ".join(f"{number(x)},{number(y)}" for x, y in places)
    marks = [marker(style.marker, *places[index], hollow=index in line.hollow) for index in line.marks]
    drawn = tag("polyline", class_="bold" if style.bold else None, points=path, stroke_dasharray=style.dash)
    return tag("g", drawn, *marks, class_=f"series {style.colour}", data_rival=line.rival)


def _bar(bar: Bar, top: float, scale: Scale, style: Style) -> Markup:
    long = max(scale.place(bar.value) - 2, 1.5)
    parts = [
        tag("title", f"{bar.rival}: {bar.text}"),
        tag("text", clipped(bar.rival), class_="who", x=2, y=top + 15),
        tag("text", bar.text, class_="value", x=WIDTH - 6, y=top + 15, text_anchor="end"),
        tag("rect", class_="rail", x=2, y=top + 23, width=WIDTH - 8, height=12, rx=3),
        tag("rect", class_="bar", x=2, y=top + 23, width=long, height=12, rx=3),
    ]
    if bar.low is not None and bar.high is not None:
        low, high = scale.place(bar.low), scale.place(bar.high)
        parts.append(tag("path", class_="whisker", d=f"M{number(low)} {number(top + 38)}v6m0-3H{number(high)}m0-3v6"))
    return tag("g", *parts, class_=f"series {style.colour}", data_rival=bar.rival)


def _dots(row: Dots, top: float, scale: Scale, styles: Styles) -> Markup:
    middle = top + 24
    parts = [tag("line", class_="minor", x1=DOTS_LEFT, x2=END, y1=middle, y2=middle)]
    if row.band:
        low, high = map(scale.place, row.band)
        parts.append(tag("rect", class_="band", x=low, y=top + 4, width=max(high - low, 1), height=34))
    for dot in sorted(row.dots, key=lambda dot: styles[dot.rival].bold):
        style = styles[dot.rival]
        shape = marker(style.marker, scale.place(dot.value), middle)
        title = tag("title", f"{row.label}, {dot.rival}: {dot.text}")
        parts.append(tag("g", title, shape, class_=f"series {style.colour}", data_rival=dot.rival))
    return join([*parts, tag("text", clipped(row.label), class_="who", x=4, y=top + 12)])


def _legend(entries: Sequence[tuple[str, str]], top: float, styles: Styles) -> tuple[Markup, float]:
    """Samples with names, as many to a line as there is room; and where they end."""
    at, line, drawn = 4.0, top + 12, []
    for rival, label in entries:
        text = f"{clipped(rival)}: {label}" if label else clipped(rival)
        wide = KEY + 8 + LETTER * len(text) + 14
        if at > 4 and at + wide > WIDTH:
            at, line = 4.0, line + KEY_LINE
        drawn.append(_key(rival, text, at, line, styles[rival]))
        at += wide
    return join(drawn), line + 12


def _key(rival: str, text: str, x: float, y: float, style: Style) -> Markup:
    ends = f"{number(x)},{number(y)} {number(x + KEY)},{number(y)}"
    sample = tag("polyline", class_="bold" if style.bold else None, points=ends, stroke_dasharray=style.dash)
    shape = marker(style.marker, x + KEY / 2, y)
    words = tag("text", text, class_="who", x=x + KEY + 8, y=y + 5)
    return tag("g", sample, shape, words, class_=f"key {style.colour}", data_rival=rival)
