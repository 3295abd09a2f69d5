"""The result of `fastlock bench family` for programs: one JSON document, its shape declared and checked.

The number of the schema rises with every change that could break a reader; keys may be added under it. Never here:
measuring.
"""

from __future__ import annotations

import datetime
import sys
from typing import Any

from pydantic import ConfigDict, TypeAdapter, with_config
from typing_extensions import TypedDict  # which pydantic needs before Python 3.12

from ..budgets import Verdict
from ..document import command, environment
from .contests import ContestPart, ContestRow
from .pairs import PairPart, PairRow
from .renewals import RenewalPart, RenewalRow
from .session import Session

SCHEMA = "fastlock-bench-family/1"


@with_config(ConfigDict(extra="forbid"))
class Pairs(TypedDict):
    """A table of pairs: round_trip_us of a PING there; noise: how far a ratio may lie from 1 and say nothing."""

    api: str
    place: str
    round_trip_us: float | None
    noise: float | None
    rows: list[PairRow]


@with_config(ConfigDict(extra="forbid"))
class Document(TypedDict):
    """The document. What was not measured is null, or not in a list; the fields of rows are in the modules of the
    parts."""

    schema: str
    created: str
    interrupted: bool
    command: str
    environment: dict[str, Any]
    parameters: dict[str, Any]
    pairs: list[Pairs]
    contention: list[ContestRow]
    renewal: list[RenewalRow]
    skipped: dict[str, str]
    failures: list[str]
    notes: list[str]
    budgets: list[Verdict]


SHAPE = TypeAdapter(Document)


def document(
    session: Session,
    server: dict[str, str],
    found: tuple[PairPart, ContestPart, RenewalPart],
    verdicts: list[Verdict],
    interrupted: bool,
) -> dict[str, Any]:
    """The JSON document of a run, as plain values. Raises pydantic's ValidationError if it has not its own shape."""
    pairs, contests, renewals = found
    made = {
        "schema": SCHEMA,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "interrupted": interrupted,
        "command": command(sys.argv),
        "environment": environment(session.versions, server),
        "parameters": session.settings.as_dict(),
        "pairs": pairs.as_list(),
        "contention": contests.as_list(session.settings),
        "renewal": renewals.as_list(),
        "skipped": session.skipped,
        "failures": session.failures,
        "notes": session.notes,
        "budgets": [verdict.as_dict() for verdict in verdicts],
    }
    plain: dict[str, Any] = SHAPE.dump_python(SHAPE.validate_python(made), mode="json")
    return plain
