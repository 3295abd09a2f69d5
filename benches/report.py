"""The result of a run, for eyes (tables, by rich where it is installed) and for programs (JSON, see benches/README.md).

Law: reads the session, measures nothing. The schema's number rises with every change that could break a reader.
"""

from __future__ import annotations

import datetime
import os
import platform
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TextIO

import fastlock

from .budgets import Verdict
from .scenarios import SCENARIOS
from .session import Session
from .stats import Row

SCHEMA = "fastlock-bench/1"

HEADERS = ("rival", "pairs/s", "min..max", "ratio", "p50 us", "p99 us", "srv us", "part", "cli us", "conns")

NOTES = (
    "pairs/s: acquire + release, median of {rounds} rounds; ratio: to redis-py, round by round.",
    "srv us, cli us: CPU per pair, server and client; part: server CPU as part of redis-py's; conns: most connections.",
    "Latencies are of a closed loop: with many threads or tasks mostly queueing; batch: of 500 names at once.",
    "round trip: two PINGs, blocking socket. Waking a sleeping thread costs 5 us on one machine, 40 us on the next.",
    "ceiling: {tool} -P 256 with the same two commands, 1 / (1/acquires + 1/releases).",
)


def document(session: Session, server: dict[str, str], verdicts: list[Verdict], interrupted: bool) -> dict[str, Any]:
    """The JSON document of a run."""
    rows = session.rows()
    return {
        "schema": SCHEMA,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "interrupted": interrupted,
        "environment": environment(session, server),
        "parameters": asdict(session.plan),
        "scenarios": {
            scenario: {
                rival: row.as_dict() | {"samples": [asdict(sample) for sample in session.samples[scenario][rival]]}
                for rival, row in rivals.items()
            }
            for scenario, rivals in rows.items()
        },
        "skipped": session.skipped,
        "failures": session.failures,
        "budgets": [verdict.as_dict() for verdict in verdicts],
    }


def environment(session: Session, server: dict[str, str]) -> dict[str, Any]:
    """Machine, versions, server: what a number means nothing without."""
    return {
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "fastlock": fastlock.__version__,
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpus": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "server": server,
        "uvloop": _uvloop(),
        "rivals": session.versions,
    }


def _uvloop() -> str | None:
    try:
        return version("uvloop")
    except PackageNotFoundError:
        return None


def headline(facts: dict[str, Any]) -> str:
    """The environment in two lines."""
    server = facts["server"]
    versions = facts["rivals"].get("redis-py", {})
    libraries = "  ".join(f"{name} {number}" for name, number in versions.items() if name != "python")
    cores = ", ".join(name for name in ("fastlock", "fallback") if name in facts["rivals"])
    return (
        f"{facts['python']}  fastlock {facts['fastlock']} ({cores})  {libraries}  uvloop {facts['uvloop'] or 'none'}\n"
        f"{server['kind']} {server['version']} ({server['mode']}, {server['reached_by']})  {facts['cpus']} CPUs"
        f"  {facts['kernel']}  load {facts['load']}"
    )


def show(session: Session, server: dict[str, str], verdicts: list[Verdict], interrupted: bool, stream: TextIO) -> None:
    """Print tables, notes, verdicts and failures to ``stream``."""
    facts = environment(session, server)
    print(headline(facts), file=stream)
    for scenario, rows in session.rows().items():
        if rows:
            _table(f"{scenario}: {SCENARIOS[scenario].title}", [cells(row) for row in rows.values()], stream)
    tool = facts["rivals"].get("ceiling", {}).get("tool")
    absent = {"round trip", "ceiling"} - session.versions.keys()
    for note in NOTES:
        if note.partition(":")[0] not in absent:
            print(note.format(rounds=session.plan.rounds, tool=tool), file=stream)
    for what, why in session.skipped.items():
        print(f"left out: {what} ({why})", file=stream)
    for verdict in verdicts:
        print(verdict, file=stream)
    for failure in session.failures:
        print(f"FAILED  {failure}", file=stream)
    if interrupted:
        print("interrupted: what was measured until then", file=stream)


def cells(row: Row) -> tuple[str, ...]:
    """One line of the table; what is not known stays empty."""
    return (
        row.rival,
        f"{row.rate.median:,.0f}",
        f"{_thousands(row.rate.low)}..{_thousands(row.rate.high)}k",
        _number(None if row.ratio is None else row.ratio.median),
        _number(row.p50_us),
        _number(row.p99_us),
        _number(row.server_cpu_us),
        "" if row.server_cpu_ratio is None else f"{row.server_cpu_ratio:.2f}",
        _number(row.client_cpu_us),
        "" if row.connections is None else str(row.connections),
    )


def _thousands(rate: float) -> str:
    return f"{rate / 1e3:,.{2 if rate < 1e4 else 1 if rate < 1e5 else 0}f}"


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def _table(title: str, lines: list[tuple[str, ...]], stream: TextIO) -> None:
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        _plain(title, lines, stream)
        return
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for number, header in enumerate(HEADERS):
        table.add_column(header, justify="right" if number else "left", no_wrap=True)
    for line in lines:
        table.add_row(*line, style="bold" if line[0] == "fastlock" else None)
    # wide enough at least for the numbers: a terminal wraps what rich would cut short
    width = max(len(title), sum(_widths(lines)) + 2 * len(HEADERS))
    console = Console(file=stream)
    console.width = max(console.width if console.is_terminal else 0, width)
    console.print(table)


def _plain(title: str, lines: list[tuple[str, ...]], stream: TextIO) -> None:
    widths = _widths(lines)
    print(f"\n{title}", file=stream)
    for first, *others in (HEADERS, *lines):
        numbers = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
        print(first.ljust(widths[0]), *numbers, sep="  ", file=stream)


def _widths(lines: list[tuple[str, ...]]) -> list[int]:
    return [max(map(len, column)) for column in zip(HEADERS, *lines, strict=True)]
