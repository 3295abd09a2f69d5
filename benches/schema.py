"""Result files: reading one and telling whether it is what it says, before anything else looks at it.

Law: no file is believed. What ``read`` and ``checked`` give back has the shape written down here (null or absent where
nothing was measured; other keys pass); all else is a Refusal that names the file and the place in it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from fastlock._cli.console import Refusal

SCHEMA = "fastlock-bench/2"

LARGEST = 1e18
"""More of anything was not measured: in microseconds it is longer than there have been people."""

DEEPEST = 20
"""Lists and objects in each other; a result has 8."""

Document = Mapping[str, Any]
Row = Mapping[str, Any]


class Wrong(Exception):
    """A place in a document, and what should be there."""


Check = Callable[[Any, str], None]


def read(path: str) -> Document:
    """The document in the file ``path``. Raises Refusal."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise Refusal(f"{path}: {getattr(error, 'strerror', None) or 'it is not text'}") from None
    try:
        document = json.loads(text, parse_constant=_no_number)
        _sound(document)
    except (ValueError, RecursionError) as error:
        raise Refusal(f"{path}: it is not JSON ({error})") from None
    return checked(document, path)


def _sound(document: Any) -> None:
    """ValueError for what JSON allows and nobody can show: half a character, a nest without end."""
    todo: list[tuple[Any, int]] = [(document, 0)]
    while todo:
        value, depth = todo.pop()
        if depth > DEEPEST:
            raise ValueError("nested too deeply")
        if isinstance(value, str):
            value.encode()
        elif isinstance(value, dict):
            todo += [(item, depth + 1) for pair in value.items() for item in pair]
        elif isinstance(value, list):
            todo += [(item, depth + 1) for item in value]


def checked(document: Any, name: str) -> Document:
    """``document`` if it has the shape of the schema, else a Refusal in which it is called ``name``."""
    if not isinstance(document, dict) or "schema" not in document:
        raise Refusal(f"{name}: it is not a result of fastlock bench")
    if document["schema"] != SCHEMA:
        raise Refusal(f"{name}: its schema is {str(document['schema'])[:60]!r}, this fastlock reads {SCHEMA!r}")
    try:
        DOCUMENT(document, "")
    except Wrong as wrong:
        raise Refusal(f"{name}: {wrong}") from None
    return document


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of JSON")


# ------------------------------------------------------------------------------------------------- checks of a shape


def _wrong(value: Any, place: str, wanted: str) -> NoReturn:
    raise Wrong(f"{place.lstrip('.') or 'the document'} must be {wanted}, not {json.dumps(value)[:40]}")


def text(value: Any, place: str) -> None:
    """A string."""
    if not isinstance(value, str):
        _wrong(value, place, "a text")


def flag(value: Any, place: str) -> None:
    """True or false."""
    if not isinstance(value, bool):
        _wrong(value, place, "true or false")


def number(value: Any, place: str) -> None:
    """A number from zero on, of a size that can have been measured."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        _wrong(value, place, "a number")
    if not 0 <= value <= LARGEST:
        _wrong(value, place, f"a number from 0 to {LARGEST:g}")


def above_zero(value: Any, place: str) -> None:
    """A number more than zero."""
    number(value, place)
    if value == 0:
        _wrong(value, place, "more than 0")


def anything(value: Any, place: str) -> None:
    """What is only shown, as it is."""


def several(each: Check) -> Check:
    """A list."""

    def check(value: Any, place: str) -> None:
        if not isinstance(value, list):
            _wrong(value, place, "a list")
        for at, item in enumerate(value):
            each(item, f"{place}[{at}]")

    return check


def table(each: Check) -> Check:
    """An object with any keys."""

    def check(value: Any, place: str) -> None:
        if not isinstance(value, dict):
            _wrong(value, place, "an object")
        for key, item in value.items():
            each(item, f"{place}.{key}")

    return check


def maybe(each: Check) -> Check:
    """Null, or what another check wants."""

    def check(value: Any, place: str) -> None:
        if value is not None:
            each(value, place)

    return check


@dataclass(frozen=True)
class Object:
    """An object with these keys: those in ``needed`` must have a value, the others may be absent or null."""

    keys: Mapping[str, Check]
    needed: tuple[str, ...] = ()

    def __call__(self, value: Any, place: str) -> None:
        """Raises Wrong."""
        if not isinstance(value, dict):
            _wrong(value, place, "an object")
        for key in self.needed:
            if value.get(key) is None:
                raise Wrong(f"{place.lstrip('.') or 'the document'} has no {key!r}")
        for key, check in self.keys.items():
            if value.get(key) is not None:
                check(value[key], f"{place}.{key}")


def numbers(*names: str) -> dict[str, Check]:
    """Keys whose values are numbers."""
    return dict.fromkeys(names, number)


# --------------------------------------------------------------------------------------------------------- the shape

SPREAD = Object(numbers("median", "low", "high"), needed=("median", "low", "high"))
TIMES = Object(numbers("p50", "p90", "p99", "p999", "max", "count"))
TIMES_OF = ("latency", "wait", "punctual", "handover", "release", "recovery")
"""What is timed; a row has <this>_us, and some a histogram."""

ROW = Object(
    {
        "rival": text,
        "rate": SPREAD,
        "ratio": SPREAD,
        "noisy": flag,
        **{f"{name}_us": TIMES for name in TIMES_OF},
        "histograms": Object(dict.fromkeys(TIMES_OF, text)),
        "fairness": Object({**numbers("jain", "min_over_max"), "grants": several(number)}),
        **numbers("rounds", "grants", "commands_per_grant", "server_cpu_us", "server_cpu_ratio", "client_cpu_us"),
        **numbers("sent_per_grant", "connections", "failures", "timeouts", "violations"),
    }
)
POINT = Object({"x": above_zero, "rival": text, "row": ROW}, needed=("x", "rival", "row"))
SCENARIO = Object(
    {
        "title": text,
        "kind": text,
        "unit": text,
        "parameters": table(anything),
        "round_trip": Object(numbers("p50_us", "p99_us", "pairs_per_s")),
        "rows": table(maybe(ROW)),
        "points": several(POINT),
    }
)
DOCUMENT = Object(
    {
        "created": text,
        "interrupted": flag,
        "command": text,
        "environment": Object({"server": table(anything), "rivals": table(maybe(table(anything)))}),
        "parameters": table(anything),
        "noise": table(maybe(Object({"spread": number, "rival": text}))),
        "skipped": table(text),
        "failures": several(text),
        "budgets": several(Object({"name": text, "bound": number, "measured": number, "met": flag}, needed=("name",))),
        "scenarios": table(SCENARIO),
    },
    needed=("scenarios",),
)


# ------------------------------------------------------------------------------------------------ looking things up


def dig(value: Any, *keys: str) -> Any:
    """What stands under ``keys``, one below the other; None where one of them is missing."""
    for key in keys:
        if not isinstance(value, Mapping):
            return None
        value = value.get(key)
    return value


def rows_of(scenario: Mapping[str, Any]) -> Mapping[str, Row]:
    """Rows by rival; none if none was measured."""
    return {rival: row for rival, row in (scenario.get("rows") or {}).items() if row is not None}


def points_of(scenario: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Points of a sweep; none if none was measured."""
    return scenario.get("points") or []


def rivals_of(document: Document) -> list[str]:
    """Everybody who was measured anywhere, in the order of appearance."""
    scenarios = document["scenarios"].values()
    named = [rival for each in scenarios for rival in (*rows_of(each), *(point["rival"] for point in points_of(each)))]
    return list(dict.fromkeys(named))


def violations(document: Document) -> dict[tuple[str, str], float]:
    """(scenario, rival): how often more than one held the lock. Only where that was looked at."""
    found: dict[tuple[str, str], float] = {}
    for name, scenario in document["scenarios"].items():
        points = [(f"{point['rival']} at {point['x']:g}", point["row"]) for point in points_of(scenario)]
        for rival, row in [*rows_of(scenario).items(), *points]:
            if row.get("violations") is not None:
                found[name, rival] = row["violations"]
    return found
