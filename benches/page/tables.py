"""Tables of a result: all its numbers, one row for each rival, with their spread and what lies inside the noise.

A column for which no rival has a value is left out, a single missing value is a dash; wide tables scroll in a box.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .. import written
from ..schema import TIMES_OF, dig, points_of, rows_of
from ..written import ABOUT, NOTHING, TIMES
from .figure import Styles, singular
from .markup import Markup, join, tag

Scenario = Mapping[str, Any]
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Column:
    """A heading, what it means, and the text of a row; a dash where the row has no such value."""

    heading: str
    meaning: str
    cell: Callable[[Row], str]


Body = Sequence[Sequence[object]]

TALL = 40
"""Lines above which a table scrolls vertically as well."""

LONG = 24
"""Characters above which text in the first column is broken into lines."""

MEANINGS = {
    "latency": "Latency: a whole lap",
    "wait": "Wait: from the (intended) start of the acquire until the lock is held",
    "punctual": "Punctual wait: the same, less what the name was held for longer than it should",
    "handover": "Handover: from the call of release until the next holder runs",
    "release": "Release: the call",
    "recovery": "Recovery: from the end of a dead holder's lease to the next grant",
}
NAMES = {name: "lap" if name == "latency" else name for name in TIMES_OF}
PARTS = (("p50", "p50"), ("p90", "p90"), ("p99", "p99"), ("p999", "p99.9"), ("max", "max"))


def tables(scenario: Scenario, styles: Styles) -> Markup:
    """All tables of a scenario."""
    parts = []
    if rows := rows_of(scenario):
        parts.append(costs(rows, singular(scenario), styles))
        if any(row.get(f"{of}_us") for row in rows.values() for of in TIMES_OF):
            parts.append(times(rows, styles))
    if points := points_of(scenario):
        parts.append(sweep(points, scenario, styles))
    return join(parts)


def costs(rows: Mapping[str, Row], unit: str, styles: Styles) -> Markup:
    """The table of speed, fairness, cost and failures: one line for each rival."""
    every = [*speed_columns(unit), *fairness_columns(), *cost_columns(unit), *failure_columns(unit)]
    columns = _used(every, rows.values())
    body = [[rival_cell(rival, styles), *(column.cell(row) for column in columns)] for rival, row in rows.items()]
    headings = [("rival", ""), *((column.heading, column.meaning) for column in columns)]
    return box(f"Speed and cost, each {unit}", headings, body)


def speed_columns(unit: str) -> list[Column]:
    """Columns of rates and ratios."""
    return [
        Column(f"{unit}s/s", "median of the rounds", lambda row: written.rate(dig(row, "rate", "median"))),
        Column(
            "lowest \N{EN DASH} highest", "of the rounds", lambda row: written.spread(row.get("rate"), written.rate)
        ),
        Column(f"{TIMES} redis-py", f"median of the ratios of each round; {ABOUT}: inside the noise", written.ratio),
        Column(
            "lowest \N{EN DASH} highest", "ratio in each of the rounds", lambda row: written.spread(row.get("ratio"))
        ),
    ]


def fairness_columns() -> list[Column]:
    """Columns of how evenly grants were spread."""
    return [
        Column("Jain", "Jain's index of the grants of each waiter, 1 is fair", _jain),
        Column("min/max", "grants of the least served waiter to the best served", _number("fairness", "min_over_max")),
    ]


def cost_columns(unit: str) -> list[Column]:
    """Columns of what a grant cost."""
    return [
        Column("commands sent", f"by clients that count them, for one {unit}", _number("sent_per_grant")),
        Column("commands run", f"by the server, also within scripts, for one {unit}", _number("commands_per_grant")),
        Column("server CPU", f"for one {unit}", _time("server_cpu_us")),
        Column(f"{TIMES} redis-py", "server CPU as a multiple of redis-py's", _number("server_cpu_ratio")),
        Column("client CPU", f"for one {unit}, of all its processes", _time("client_cpu_us")),
        Column("connections", "most seen open at once", _count("connections")),
    ]


def failure_columns(unit: str) -> list[Column]:
    """Columns of what went wrong, and of how much was measured."""
    return [
        Column("failed", "share of the attempts", lambda row: written.share(row.get("failures"))),
        Column("timed out", "share of the attempts", lambda row: written.share(row.get("timeouts"))),
        Column("violations", "more than one holder of a lock at once", violated),
        Column(f"{unit}s", "in all rounds", _count("grants")),
        Column("rounds", "that were run", _count("rounds")),
    ]


def times(rows: Mapping[str, Row], styles: Styles) -> Markup:
    """The table of times by percentile: a group of lines for each kind of time."""
    groups: dict[str, list[list[object]]] = {}
    for of in TIMES_OF:
        found = {rival: row[f"{of}_us"] for rival, row in rows.items() if row.get(f"{of}_us")}
        if found:
            groups[MEANINGS[of]] = [
                [
                    rival_cell(rival, styles),
                    *(written.duration(each.get(part)) for part, _ in PARTS),
                    written.whole(each.get("count")),
                ]
                for rival, each in found.items()
            ]
    return box("Times", [("rival", ""), *((name, "") for _, name in PARTS), ("calls", "")], groups)


def sweep(points: Sequence[Mapping[str, Any]], scenario: Scenario, styles: Styles) -> Markup:
    """The table of a sweep: one line for each point, the points of one x together."""
    unit = singular(scenario)
    every = [*speed_columns(unit)[:3]]
    for of in TIMES_OF:
        every += [Column(f"{NAMES[of]} {name}", "", _time(f"{of}_us", part)) for part, name in PARTS]
    every += [*fairness_columns(), *cost_columns(unit), *failure_columns(unit)]
    columns = _used(every, [point["row"] for point in points])
    of_x = {"load": "{:,g} offered per second", "rtt": "{:,g} ms"}.get(str(scenario.get("kind")), "{:,g} waiters")
    groups: dict[str, list[list[object]]] = {of_x.format(x): [] for x in sorted({point["x"] for point in points})}
    for point in points:
        cells = [column.cell(point["row"]) for column in columns]
        groups[of_x.format(point["x"])].append([rival_cell(point["rival"], styles), *cells])
    return box("Every point", [("rival", ""), *((column.heading, column.meaning) for column in columns)], groups)


def violated(row: Row) -> str:
    """How often a lock had more than one holder."""
    text = written.whole(row.get("violations"))
    return tag("span", text, class_="missed") if row.get("violations") else text


def rival_cell(rival: str, styles: Styles) -> Markup:
    """The name of a rival with a spot of its colour."""
    return join([tag("span", class_=f"spot {styles[rival].colour}", data_rival=rival), rival])


def box(caption: str, headings: Sequence[tuple[str, str]], body: Body | Mapping[str, Body], words: int = 1) -> Markup:
    """A table in a box that scrolls, in groups if ``body`` names some. Its first ``words`` columns are text."""
    top = [
        tag("th", heading, scope="col", title=meaning or None, class_="word" if at < words else None)
        for at, (heading, meaning) in enumerate(headings)
    ]
    groups = body if isinstance(body, Mapping) else {"": body}
    bodies = [_group(name, lines, len(headings), words) for name, lines in groups.items()]
    long = any(type(line[0]) is str and len(line[0]) > LONG for lines in groups.values() for line in lines)
    whole = tag(
        "table",
        tag("caption", tag("span", caption)),
        tag("thead", tag("tr", *top)),
        *bodies,
        class_="long" if long else None,
    )
    tall = sum(map(len, groups.values())) > TALL
    return tag("div", whole, class_="scroll tall" if tall else "scroll", tabindex=0, role="region", aria_label=caption)


def _group(name: str, lines: Body, columns: int, words: int) -> Markup:
    heading = (
        tag("tr", tag("th", tag("span", name), scope="rowgroup", colspan=columns), class_="group") if name else None
    )
    top = tag("tr", heading, class_="group") if name else None
    return tag("tbody", top, *(_line(line, words) for line in lines))


def _line(cells: Sequence[object], words: int) -> Markup:
    rest = [tag("td", cell, class_="word" if at < words else None) for at, cell in enumerate(cells[1:], 1)]
    return tag("tr", tag("th", cells[0], scope="row"), *rest)


def _used(columns: Iterable[Column], rows: Iterable[Row]) -> list[Column]:
    known = list(rows)
    return [column for column in columns if any(column.cell(row) != NOTHING for row in known)]


def _number(*keys: str) -> Callable[[Row], str]:
    return lambda row: written.significant(dig(row, *keys))


def _jain(row: Row) -> str:
    index = dig(row, "fairness", "jain")
    return NOTHING if index is None else f"{index:.3f}"


def _time(*keys: str) -> Callable[[Row], str]:
    return lambda row: written.duration(dig(row, *keys))


def _count(*keys: str) -> Callable[[Row], str]:
    return lambda row: written.whole(dig(row, *keys))
