"""The result of `fastlock bench family` as text: a table for each part, API and place, and notes that explain them.

What lives here: what is printed. Never here: measuring, arithmetic over runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TextIO

from .. import terminal
from ..budgets import Verdict
from ..report import headline
from ..stats import Spread
from .cases import CONTROL
from .contests import ContestPart, ContestRow, kinds
from .pairs import HERE, PairPart, PairRow
from .renewals import RenewalPart, RenewalRow
from .session import Session

Line = tuple[str, ...]

PAIR_COLUMNS = ("kind", "us", "min..max", "p50", "p99", "x plain", "per name", "sent")
CONTEST_COLUMNS = (
    *("kind", "side", "clients", "grants/s", "min..max", "wait p50", "p99", "max", "held ms", "at once"),
    *("too many", "gave up", "of ideal"),
)
RENEWAL_COLUMNS = (
    *("kind", "API", "leases", "lease s", "% of a core", "min..max", "scaled", "cmd/period", "cmd/renewed"),
    *("least left s", "late s", "lost"),
)

NOTES = {
    "pairs": "us: of acquire and release, by a lock made for it, median of the rounds; x plain: times the plain lock's"
    " of the same round; ~: inside the noise, says nothing; per name: times three plain pairs; sent: commands that the"
    " client sent for a pair. (inner: by a caller that holds it already.)",
    "network": "The network is a relay that holds each byte back for half a round trip; trips: the time of a pair in"
    " round trips of a PING through it.",
    "contention": "wait: from the call of acquire to holding, in ms; at once: how many held it together, at most; too"
    " many: how often more did than may (of fastlock it fails the run). A plain lock has no readers: all its clients"
    " exclude each other. of ideal: grants/s as part of permits / hold, which no sleep of exactly that length allows.",
    "renewal": "% of a core: of the process that holds the leases and does nothing else, in periods of a third of a"
    " lease; scaled: for 10,000 leases of 30 s, as the cost grows with their number and with how often they are due;"
    " cmd/period, cmd/renewed: commands for 100 leases in a period, and for 100 that were renewed; late: by how much"
    " the least that a lease had left was below two thirds of it.",
    "threads": "redis-py with a thread, or a task, for each lock is measured with 100 leases at most, and scaled:"
    " 10,000 threads make no sense.",
}


def show(
    session: Session,
    facts: Mapping[str, Any],
    found: tuple[PairPart, ContestPart, RenewalPart],
    verdicts: list[Verdict],
    interrupted: bool,
    stream: TextIO,
) -> None:
    """Print tables, notes, verdicts and failures."""
    print(headline(facts["environment"]), file=stream)
    pairs, contests, renewals = found
    needed = [*_show_pairs(session, pairs, stream), *_show_contests(session, contests, stream)]
    if renewals.rows:
        lines = [_renewal(row) for row in renewals.rows]
        terminal.table("renewal: many leases in one client", RENEWAL_COLUMNS, lines, 2, stream)
        needed += ["renewal", "threads"]
    print(file=stream)
    for key in dict.fromkeys(needed):
        print(NOTES[key], file=stream)
    for what, why in session.skipped.items():
        print(f"left out: {what} ({why})", file=stream)
    for note in session.notes:
        print(f"note: {note}", file=stream)
    for verdict in verdicts:
        print(verdict, file=stream)
    for failure in session.failures:
        print(f"FAILED  {failure}", file=stream)
    if interrupted:
        print("interrupted: what was measured until then", file=stream)


def _show_pairs(session: Session, part: PairPart, stream: TextIO) -> list[str]:
    needed = []
    for api, place in part.samples:
        rows = [row for row in part.rows(api, place) if row.case != CONTROL]
        if not rows:
            continue
        here = place == HERE
        where = "on this machine" if here else f"through a network of {session.settings.rtt * 1e3:g} ms"
        columns = PAIR_COLUMNS if here else (*PAIR_COLUMNS, "trips")
        lines = [_pair(row)[: len(columns)] for row in rows]
        terminal.table(f"pairs, {api}, {where}", columns, lines, 1, stream)
        print(_footnote(part, api, place), file=stream)
        needed += ["pairs"] if here else ["pairs", "network"]
    return needed


def _pair(row: PairRow) -> Line:
    ratio = "" if row.ratio is None else f"{'~' if row.noisy else ''}{row.ratio.median:.2f}"
    return (
        row.case,
        f"{row.us.median:,.1f}",
        _range(row.us),
        f"{row.p50_us:,.1f}",
        f"{row.p99_us:,.1f}",
        ratio,
        "" if row.per_name is None else f"{row.per_name.median:.2f}",
        _number(row.sent, 1),
        _number(row.trips, 2),
    )


def _footnote(part: PairPart, api: str, place: str) -> str:
    trip, width = part.round_trip_us(api, place), part.noise(api, place)
    said = [] if trip is None else [f"round trip {trip:,.0f} us"]
    if width is not None:
        said.append(f"noise {width:.0%}: ratios from {1 / (1 + width):.2f} to {1 + width:.2f} say nothing")
    return "  ".join(said)


def _show_contests(session: Session, part: ContestPart, stream: TextIO) -> list[str]:
    settings = session.settings
    for api, kind in part.rounds:
        rows = part.rows(api, kind, settings)
        if rows:
            clients = " and ".join(f"{count} {side}" for count, side in zip(kind.clients, kind.sides, strict=False))
            permits = f", {settings.permits} permits" if kind == kinds(settings)[1] else ""
            where = f"{settings.processes} processes, {clients}{permits}, held {settings.hold * 1e3:g} ms"
            lines = [line for row in rows for line in _contest(row)]
            terminal.table(f"{kind.name}, {api} ({where})", CONTEST_COLUMNS, lines, 2, stream)
    return ["contention"] if part.rounds else []


def _contest(row: ContestRow) -> list[Line]:
    """A line for each side; what is of the whole case stands in the first."""
    whole = (
        _number(row.held_ms, 2),
        str(row.together),
        str(row.violations),
        str(row.gave_up),
        _number(row.of_ideal, 2),
    )
    return [
        (
            "" if number else row.case,
            side.side,
            str(side.clients),
            f"{side.rate.median:,.0f}",
            _range(side.rate),
            *(_number(wait, 1) for wait in (side.wait_p50_ms, side.wait_p99_ms, side.wait_max_ms)),
            *(("",) * len(whole) if number else whole),
        )
        for number, side in enumerate(row.sides)
    ]


def _renewal(row: RenewalRow) -> Line:
    return (
        row.case,
        row.api,
        f"{row.leases:,}",
        f"{row.lease:g}",
        f"{row.cpu.median:.2f}",
        _range(row.cpu),
        f"{row.cpu_scaled:.2f}",
        f"{row.per_period:.2f}",
        _number(row.per_renewal, 2),
        _number(row.shortest, 2),
        _number(row.late, 2),
        str(row.lost),
    )


def _range(found: Spread) -> str:
    return f"{found.low:,.4g}..{found.high:,.4g}"


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:,.{digits}f}"
