"""Result files: what a JSON document of ``fastlock bench`` holds, declared, and the reading and checking of one.

The shapes below are the schema: a value may be null or absent where nothing was measured, and other keys pass.
``read`` and ``checked`` return the document as it is, a plain mapping that fits them; anything else is a Refusal that
names the file, the place in it and what belongs there. No file is used unchecked.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Required

from pydantic import Field, TypeAdapter, ValidationError
from pydantic_core import from_json
from typing_extensions import TypedDict  # which pydantic needs before Python 3.12

from fastlock._cli.console import Refusal

SCHEMA = "fastlock-bench/2"

LARGEST = 1e18
"""No measured number is larger: in microseconds it is more than 30,000 years."""

Document = Mapping[str, Any]
Row = Mapping[str, Any]


# --------------------------------------------------------------------------------------------------------- the shapes

Number = Annotated[float, Field(ge=0, le=LARGEST)]
AboveZero = Annotated[float, Field(gt=0, le=LARGEST)]


class SpreadShape(TypedDict, total=False):
    """A number that each round has: the median, the lowest and the highest over the rounds."""

    median: Required[Number]
    low: Required[Number]
    high: Required[Number]


class TimesShape(TypedDict, total=False):
    """Percentiles of what was timed, in microseconds."""

    p50: Number | None
    p90: Number | None
    p99: Number | None
    p999: Number | None
    max: Number | None
    count: Number | None


class HistogramsShape(TypedDict, total=False):
    """Encoded histograms of nanoseconds."""

    latency: str | None
    wait: str | None
    punctual: str | None
    handover: str | None
    release: str | None
    recovery: str | None


TIMES_OF = tuple(HistogramsShape.__annotations__)
"""Kinds of times; a row has a field <kind>_us for each, and for some a histogram."""


class FairnessShape(TypedDict, total=False):
    """How evenly grants were spread over the clients."""

    jain: Number | None
    min_over_max: Number | None
    grants: list[Number] | None


class RowShape(TypedDict, total=False):
    """What was measured of one rival."""

    rival: str | None
    rate: SpreadShape | None
    ratio: SpreadShape | None
    noisy: bool | None
    latency_us: TimesShape | None
    wait_us: TimesShape | None
    punctual_us: TimesShape | None
    handover_us: TimesShape | None
    release_us: TimesShape | None
    recovery_us: TimesShape | None
    histograms: HistogramsShape | None
    fairness: FairnessShape | None
    rounds: Number | None
    grants: Number | None
    commands_per_grant: Number | None
    sent_per_grant: Number | None
    server_cpu_us: Number | None
    server_cpu_ratio: Number | None
    client_cpu_us: Number | None
    connections: Number | None
    failures: Number | None
    timeouts: Number | None
    violations: Number | None


class PointShape(TypedDict, total=False):
    """A row of a sweep, and its place on the horizontal axis."""

    x: Required[AboveZero]
    rival: Required[str]
    row: Required[RowShape]


class RoundTripShape(TypedDict, total=False):
    """The raw round trip measured beside a scenario."""

    p50_us: Number | None
    p99_us: Number | None
    pairs_per_s: Number | None


class ScenarioShape(TypedDict, total=False):
    """One scenario: rows by rival, or the points of a sweep."""

    title: str | None
    kind: str | None
    unit: str | None
    parameters: dict[str, Any] | None
    round_trip: RoundTripShape | None
    rows: dict[str, RowShape | None] | None
    points: list[PointShape] | None


class NoiseShape(TypedDict, total=False):
    """How far the ratio of a rival to itself strayed from 1."""

    spread: Number | None
    rival: str | None


class BudgetShape(TypedDict, total=False):
    """A bound of the acceptance list, and whether it was met."""

    name: Required[str]
    bound: Number | None
    measured: Number | None
    met: bool | None


class EnvironmentShape(TypedDict, total=False):
    """The machine, the server and the versions; most of it is only shown."""

    server: dict[str, Any] | None
    rivals: dict[str, dict[str, Any] | None] | None


class DocumentShape(TypedDict, total=False):
    """The result of a run."""

    scenarios: Required[dict[str, ScenarioShape]]
    created: str | None
    interrupted: bool | None
    command: str | None
    environment: EnvironmentShape | None
    parameters: dict[str, Any] | None
    noise: dict[str, NoiseShape | None] | None
    skipped: dict[str, str] | None
    failures: list[str] | None
    budgets: list[BudgetShape] | None


DECLARED = TypeAdapter(DocumentShape)


# ------------------------------------------------------------------------------------------------ reading and checking


def read(path: str) -> Document:
    """The document in the file ``path``. Raises Refusal, also for JSON that no reader could show."""
    try:
        text = Path(path).read_bytes()
    except (OSError, ValueError) as error:
        raise Refusal(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    try:
        document = from_json(text, allow_inf_nan=False)  # refuses half a character and a nest of more than 200 too
    except ValueError as error:
        raise Refusal(f"{path}: it is not JSON ({error})") from None
    return checked(document, path)


def checked(document: Any, name: str) -> Document:
    """``document`` if it fits the shapes, else a Refusal in which it is called ``name``."""
    if not isinstance(document, dict) or "schema" not in document:
        raise Refusal(f"{name}: it is not a result of fastlock bench")
    if document["schema"] != SCHEMA:
        raise Refusal(f"{name}: its schema is {str(document['schema'])[:60]!r}, this fastlock reads {SCHEMA!r}")
    try:
        DECLARED.validate_python(document, strict=True)  # strict: nothing is converted, "1" is no number
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        found = "" if first["type"] == "missing" else f", not {json.dumps(first['input'], default=repr)[:40]}"
        raise Refusal(f"{name}: {'.'.join(map(str, first['loc']))}: {first['msg']}{found}") from None
    return document


# ------------------------------------------------------------------------------------------------ looking things up


def dig(value: Any, *keys: str) -> Any:
    """The value under ``keys``, each key one level deeper; None where one of them is missing."""
    for key in keys:
        if not isinstance(value, Mapping):
            return None
        value = value.get(key)
    return value


def rows_of(scenario: Mapping[str, Any]) -> Mapping[str, Row]:
    """Rows of a scenario by rival, without those that were not measured."""
    return {rival: row for rival, row in (scenario.get("rows") or {}).items() if row is not None}


def points_of(scenario: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Points of a sweep; an empty list if nothing was measured."""
    return scenario.get("points") or []


def rivals_of(document: Document) -> list[str]:
    """All rivals that were measured in any scenario, in the order of appearance."""
    scenarios = document["scenarios"].values()
    named = [rival for each in scenarios for rival in (*rows_of(each), *(point["rival"] for point in points_of(each)))]
    return list(dict.fromkeys(named))


def violations(document: Document) -> dict[tuple[str, str], float]:
    """(scenario, rival): how often a lock had more than one holder. Only where the holders were counted."""
    found: dict[tuple[str, str], float] = {}
    for name, scenario in document["scenarios"].items():
        points = [(f"{point['rival']} at {point['x']:g}", point["row"]) for point in points_of(scenario)]
        for rival, row in [*rows_of(scenario).items(), *points]:
            if row.get("violations") is not None:
                found[name, rival] = row["violations"]
    return found
