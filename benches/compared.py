"""A comparison as text: what differs between the runs first, then a table for each scenario, then what got slower.

This file shows what ``compare`` found and decides nothing. Three lines for a rival: a, b, and b / a with its verdict; a
fourth, relative to redis-py, where the runs differ so much that nothing else can be compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from . import written
from .compare import BASELINE, GONE, MEASURES, RATE, Change, Comparison, Entry, broken, slower
from .schema import Document, dig
from .terminal import plain, table

LEGEND = (
    "b/a: ~ no change beyond the noise, else better or worse; ? too few calls to tell. Rates are judged by their ratio",
    "to redis-py, the noise is that of both runs; times and costs also have to move further than redis-py's did.",
    "In brackets: slowest round of b to fastest of a, and the reverse.",
)
RELATIVE = "b/a rel.: of the multiples of redis-py in the same run; where the runs differ, only these are judged."


def show(comparison: Comparison, names: tuple[str, str], percent: float | None, stream: TextIO) -> None:
    """Print everything to ``stream``."""
    for side, document, name in zip("ab", (comparison.a, comparison.b), names, strict=True):
        print(plain(f"{side}  {name}: {_about(document)}"), file=stream)
        for failure in broken(document):
            print(plain(f"{side}  FAILED  {failure}"), file=stream)
    for line in warnings(comparison):
        print(plain(line), file=stream)
    for scenario in dict.fromkeys(entry.scenario for entry in comparison.entries):
        _scenario(comparison, scenario, stream)
    for line in [*LEGEND, *([RELATIVE] if comparison.differs else []), *_alone(comparison)]:
        print(plain(line), file=stream)
    if percent is not None:
        for line in _verdict(comparison, percent):
            print(plain(line), file=stream)


def _about(document: Document) -> str:
    facts = document.get("environment") or {}
    commit = str(facts.get("commit") or "")[:12]
    parts = [document.get("created"), f"fastlock {facts.get('fastlock', 'unknown')}", commit and f"commit {commit}"]
    return ", ".join(str(part) for part in parts if part)


def warnings(comparison: Comparison) -> Iterator[str]:
    """Warnings that a reader has to know before any number."""
    for side, document in (("a", comparison.a), ("b", comparison.b)):
        if document.get("interrupted"):
            yield f"warning: {side} was interrupted, it holds what was measured until then"
        if dig(document, "parameters", "quick"):
            yield f"warning: {side} is a quick run, a first look only"
    if comparison.differs:
        yield "warning: the runs differ, so only ratios to redis-py within each of them can be compared:"
        for what, (one, other) in comparison.differs.items():
            yield f"  {what}: {shown(one)} / {shown(other)}"
    for scenario, found in comparison.changed_parameters.items():
        what = "; ".join(f"{key} {shown(one)} / {shown(other)}" for key, (one, other) in found.items())
        yield f"warning: {scenario} was run otherwise in b, nothing of it can be compared: {what}"


def shown(value: Any) -> str:
    """A value of a setting, as text."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {shown(each)}" for key, each in value.items())
    return "not recorded" if value is None else str(value)


# -------------------------------------------------------------------------------------------------------- the tables


def _scenario(comparison: Comparison, scenario: str, stream: TextIO) -> None:
    entries = [entry for entry in comparison.entries if entry.scenario == scenario]
    used = [measure for measure in MEASURES if any(measure.name in entry.changes for entry in entries)]
    headings = ["rival", "", *(heading for measure in used for heading in _headings(measure.name))]
    names = [measure.name for measure in used]
    lines = [line for entry in entries for line in _lines(entry, names, bool(comparison.differs))]
    title = f"{scenario}: {dig(comparison.a, 'scenarios', scenario, 'title') or ''}{_trip(comparison, scenario)}"
    table(title, headings, lines, 2, stream)


def _headings(name: str) -> list[str]:
    return ["per second", "x redis-py"] if name == RATE.name else [name]


def _trip(comparison: Comparison, scenario: str) -> str:
    """The round trips of both runs, in words: how far the machine itself moved."""
    one, other = (dig(each, "scenarios", scenario, "round_trip", "p50_us") for each in (comparison.a, comparison.b))
    if not one or not other:
        return ""
    ratio = written.significant(other / one)
    return f" (raw round trip {written.duration(one)} / {written.duration(other)}, b/a {ratio})"


def _lines(entry: Entry, names: Sequence[str], apart: bool) -> list[tuple[str, ...]]:
    """The lines of a rival: a, b, b/a and, for runs that differ (``apart``), the ratio relative to redis-py."""
    who = entry.rival if entry.x is None else f"{entry.rival} at {entry.x:,g}"
    columns = [[who, "", "", ""], ["a", "b", "b/a", "b/a rel."]]
    for name in names:
        columns.append(_column(name, entry.changes.get(name)))
        if name == RATE.name:
            columns.append(_within(entry, apart))
    lines = list(zip(*columns, strict=True))
    return lines if apart and entry.rival != BASELINE else lines[:3]


def _column(name: str, change: Change | None) -> list[str]:
    """The column of a measure: its value in a, in b, and their ratio."""
    if change is None:
        return [written.NOTHING, written.NOTHING, "", ""]
    write = WRITE.get(name, written.duration)
    ratio = _marked(change, "ratio")
    if change.low is not None and change.high is not None:
        ratio += f" ({written.significant(change.low)}..{written.significant(change.high)})"
    return [write(change.a), write(change.b), ratio, "" if name == RATE.name else _marked(change, "relative")]


def _within(entry: Entry, apart: bool) -> list[str]:
    """The column of the rate as a multiple of redis-py's, each taken in its own run."""
    one, other = (dig(row, "ratio", "median") for row in (entry.a, entry.b))
    change = entry.changes.get(RATE.name)
    if change is None or one is None or other is None:
        return [written.significant(one), written.significant(other), "", ""]
    related = _marked(change, "relative")
    return [written.significant(one), written.significant(other), *(["", related] if apart else [related, ""])]


WRITE = {RATE.name: written.rate, "commands": written.significant}
"""How values other than times are written."""


def _marked(change: Change, which: str) -> str:
    """The ratio, or the relative ratio, with the verdict if this one was judged."""
    mark = MARKS.get(change.verdict, f" {change.verdict}") if which == change.by else ""
    return written.significant(change.ratio if which == "ratio" else change.relative) + mark


MARKS = {"": "", "same": " ~", "few": " ?"}


# --------------------------------------------------------------------------------------------------------- the verdict


def _alone(comparison: Comparison) -> Iterator[str]:
    for side, names in (("a", comparison.only_a), ("b", comparison.only_b)):
        if names:
            yield f"only in {side}: {'; '.join(names)}"


def _verdict(comparison: Comparison, percent: float) -> Iterator[str]:
    found = slower(comparison, percent)
    for entry, name in found:
        at = "" if entry.x is None else f" at {entry.x:,g}"
        if name == GONE:
            yield f"GONE  {entry.scenario}, {entry.rival}{at}: b has not run it"
            continue
        change = entry.changes[name]
        took = written.significant(change.slowdown)
        yield f"SLOWER  {entry.scenario}, {entry.rival}{at}: {name}, takes {took} times as long"
    if failed := broken(comparison.b):
        yield f"b FAILED: {'; '.join(failed)}"
    if not found and not failed:
        yield f"nothing of fastlock got slower by more than {percent:g} % and the noise"
