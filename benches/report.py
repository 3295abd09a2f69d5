"""The result of a run as text: a table for each scenario, by rich where it is installed, and notes that explain it.

What lives here: what is read from the session and printed. Never here: measuring.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TextIO

from . import terminal
from .budgets import Verdict
from .document import environment
from .plan import Stage
from .session import ROUND_TRIP, Measured, Session
from .stats import Percentiles, Row

Line = tuple[str, ...]

PAIRS = ("rival", "pairs/s", "min..max", "ratio", "p50 us", "p99 us", "srv us", "part", "run", "cli us", "conns")

GRANTS = (
    *("rival", "grants/s", "min..max", "ratio", "wait p50", "p90", "p99", "p99.9", "max", "rel p50", "p99"),
    *("gap p50", "p99", "Jain", "min/max", "sent", "run", "srv us", "cli us", "missed", "failed"),
)

CRASH = ("rival", "lease", "kills", "grants", "recovery p50", "p90", "p99", "max", "ratio", "missed", "failed")

STORM = (
    *("rival", "served in", "grants/s", "ratio", "wait p50", "p99", "max", "gap p50", "order", "sent"),
    *("run", "missed", "failed"),
)

AMISS = {"missed": "timeouts", "failed": "failures"}
"""Columns for what went wrong, and the fields of a row that they show."""

NOTES = {
    "pairs": "pairs/s: acquire + release; grants/s: grants within the run; median of the rounds, and their spread.",
    "ratio": "ratio: to redis-py (or the first rival), round by round, of rates (load, recall: of median waits); ~:"
    " inside the noise, says nothing.",
    "cpu": "srv us, cli us: CPU per grant, server and clients; part: server CPU as part of redis-py's; run: commands"
    " that the server ran per grant, also within scripts; conns: most connections.",
    "sent": "sent: commands per grant as the clients sent them, of libraries that count them.",
    "pair": "Latencies of pairs are of a closed loop: with many threads or tasks mostly queueing; batch: of 500 names.",
    "wait": "wait: from the (intended) start of an acquire to holding; an acquire that gave up counts with all the"
    " time that it might have waited.",
    "sweep": "Under the name of a rival its rate, beside it percentiles of the wait, CPU per grant (srv us, cli us:"
    " server, clients), and what was missed (not had in time) or failed (raised), where anything was. ~: compared with"
    " redis-py (or the first rival), inside the noise: says nothing.",
    "rtt": "round trip: two PINGs through that network, by a blocking socket.",
    "gap": "rel: the call to release; gap: release called to next holder running, by another client, while one waited."
    " Jain: 1 is even, over clients; min/max: grants of the client with fewest to that with most. missed: not had in"
    " time, or refused.",
    "storm": "served in: from the release to the last grant; order: 1 first come first served, 0 none.",
    "crash": "recovery: from the end of the dead holder's lease to the next grant.",
    "round trip": "round trip: two PINGs, blocking socket. Waking a sleeping thread costs 5 us on one machine, 40 us on"
    " the next.",
    "alone": "alone: fastlock with one thread and no other client: what a lock that costs nothing would grant.",
    "hiredis": "hiredis: {tool} -c 1 -P 1, a caller in C: the same two commands, 1 / (1/acquires + 1/releases).",
    "ceiling": "ceiling: {tool} -P 256 with the same two commands, 1 / (1/acquires + 1/releases).",
}


def show(session: Session, server: dict[str, str], verdicts: list[Verdict], interrupted: bool, stream: TextIO) -> None:
    """Print tables, notes, verdicts and failures to ``stream``."""
    facts = environment(session.versions, server)
    print(headline(facts), file=stream)
    for name, measured in session.measured.items():
        if any(measured.rows(x) for x in measured.samples):
            header, lines = table(measured)
            words = 2 if measured.stage.kind == "rtt" else 1
            terminal.table(f"{name}: {caption(measured.stage)}", header, lines, words, stream)
            print(footnote(measured), file=stream)
    print(file=stream)
    tools = [each["tool"] for each in facts["rivals"].values() if "tool" in each]
    for key in _needed(session):
        print(NOTES[key].format(tool=tools[0] if tools else ""), file=stream)
    for what, why in session.skipped.items():
        print(f"left out: {what} ({why})", file=stream)
    for note in _counted(session.notes):
        print(f"note: {note}", file=stream)
    for verdict in verdicts:
        print(verdict, file=stream)
    for failure in session.failures:
        print(f"FAILED  {failure}", file=stream)
    if interrupted:
        print("interrupted: what was measured until then", file=stream)


def _counted(texts: Sequence[str]) -> list[str]:
    """Each text once, with the number of times."""
    return [text if (times := texts.count(text)) == 1 else f"{text} ({times} times)" for text in dict.fromkeys(texts)]


def _needed(session: Session) -> list[str]:
    """Keys of the notes that these tables need."""
    stages = [measured.stage for measured in session.measured.values()]
    found = {"pairs"}
    found |= {"ratio", "cpu"} if any(not _is_wide(stage) for stage in stages) else set()
    found |= {"pair"} if any(stage.kind == "pair" for stage in stages) else set()
    found |= {"wait"} if any(stage.unit == "grants" for stage in stages) else set()
    found |= {"sweep"} if any(_is_wide(stage) for stage in stages) else set()
    found |= {"rtt"} if any(stage.kind == "rtt" for stage in stages) else set()
    found |= {"gap"} if any(_has_gaps(stage) for stage in stages) else set()
    found |= {"storm"} if any(stage.name == "storm" for stage in stages) else set()
    found |= {"crash"} if any(stage.kind == "crash" for stage in stages) else set()
    found |= {ROUND_TRIP} if any(measured.round_trips for measured in session.measured.values()) else set()
    found |= {"sent"} if any(stage.unit == "grants" and not _is_wide(stage) for stage in stages) else set()
    found |= {"alone", "hiredis", "ceiling"} & set(session.versions)
    return [key for key in NOTES if key in found]


def _is_wide(stage: Stage) -> bool:
    """Whether its table has a line for each point, with all rivals in it."""
    return stage.sweep and stage.kind != "rtt"


def _has_gaps(stage: Stage) -> bool:
    """Whether its table shows handovers."""
    return stage.kind == "contention" or (stage.kind == "rtt" and stage.unit == "grants")


def headline(facts: dict[str, Any]) -> str:
    """The environment in three lines."""
    server = facts["server"]
    libraries = {
        name: number
        for versions in facts["rivals"].values()
        for name, number in versions.items()
        if name not in ("python", "fastlock", "implementation", "tool", "acquire", "release")
    }
    installed = "  ".join(f"{name} {number}" for name, number in libraries.items())
    ours = ", ".join(filter(None, [facts["build"], facts["commit"]]))
    governor = f", governor {facts['governor']}" if facts["governor"] else ""
    return (
        f"{facts['python']}  fastlock {facts['fastlock']} ({ours})  uvloop {facts['uvloop'] or 'none'}  {installed}\n"
        f"{server['kind']} {server['version']} ({server['mode']}, {server['reached_by']})\n"
        f"{facts['cpus']} CPUs, {facts['cpu_model'] or 'unknown'}{governor}  {facts['kernel']}  load {facts['load']}"
    )


def caption(stage: Stage) -> str:
    """A scenario and its settings in a line."""
    if stage.unit == "pairs":
        return stage.title
    settings = stage.parameters
    clients = f"{settings['processes']} processes, {settings['lanes']:,} {stage.api}"
    names = settings["names"]
    loop = f", {settings['rate']:g} arrivals/s" if isinstance(settings["rate"], float) and settings["rate"] else ""
    said = [
        "one name" if names == 1 else "own names" if names == "unique" else f"{names:,} names",
        *([f"Zipf {settings['zipf']:g}"] if settings["zipf"] else []),
        f"held {settings['hold_ms']:g} ms",
        *([] if settings["blocking"] else ["try-lock"]),
    ]
    return f"{stage.title} ({clients}, {', '.join(said)}{loop})"


def footnote(measured: Measured) -> str:
    """The line under a table: its round trip and its noise."""
    said = []
    if trip := measured.round_trip():
        said.append(f"round trip p50 {trip['p50_us']:.0f} us, p99 {trip['p99_us']:.0f} us")
    if (width := measured.noise()) is not None:
        where = " at its noisiest point" if measured.stage.sweep else ""
        said.append(f"noise {width:.0%}{where}: ratios from {1 / (1 + width):.2f} to {1 + width:.2f} say nothing")
    return "  ".join(said)


def table(measured: Measured) -> tuple[Line, list[Line]]:
    """Header and lines of a stage."""
    stage = measured.stage
    if stage.kind == "rtt":
        return through_network(measured)
    if stage.sweep:
        return sweep(measured)
    rows = list(measured.rows().values())
    if stage.kind == "pair":
        return PAIRS, [pair_cells(row) for row in rows]
    if stage.kind == "crash":
        return CRASH, [crash_cells(row) for row in rows]
    if stage.name == "storm":
        return STORM, [storm_cells(row) for row in rows]
    return GRANTS, [grant_cells(row) for row in rows]


def through_network(measured: Measured) -> tuple[Line, list[Line]]:
    """Header and lines of a scenario through a network: a line for each round trip and rival."""
    header, cells = (PAIRS, pair_cells) if measured.stage.unit == "pairs" else (GRANTS, grant_cells)
    found = [(x, row) for x in measured.samples for row in measured.rows(x).values()]
    return ("RTT ms", *header), [(f"{x:g}", *cells(row)) for x, row in found]


def sweep(measured: Measured) -> tuple[Line, list[Line]]:
    """Header and lines of a sweep: a line for each point; for each rival its rate and waits, and what it missed or
    failed, if anything; ~: the ratio is inside the noise of the point."""
    found = {x: measured.rows(x) for x in measured.samples}
    rivals = list(dict.fromkeys(rival for rows in found.values() for rival in rows))
    load = measured.stage.kind == "load"
    amiss = {rival: _amiss([rows[rival] for rows in found.values() if rival in rows]) for rival in rivals}
    columns = [text for rival in rivals for text in (rival, *_waits(load), *_costs(load), *amiss[rival])]
    header = ("offered/s" if load else "waiters", *columns)
    lines = []
    for x, rows in found.items():
        cells = [f"{x:,g}"]
        for rival in rivals:
            row = rows.get(rival)
            said = [_rate(row), *_times((row.wait_us or row.latency_us) if row else None, *_waits(load))]
            said[load] += (
                "~" if row and row.noisy else ""
            )  # the mark stands at what is compared: rates, or the median waits of a load
            said += [_number(getattr(row, name) if row else None) for name in _costs(load).values()]
            cells += [*said, *(_percent(getattr(row, AMISS[what]) if row else None) for what in amiss[rival])]
        lines.append(tuple(cells))
    return header, [line for line in lines if any(line[1:])]


def _amiss(rows: Sequence[Row]) -> Line:
    """The columns of a rival in a sweep for what went wrong, where anything did."""
    return tuple(what for what, name in AMISS.items() if any(getattr(row, name) for row in rows))


def _waits(load: bool) -> Line:
    return ("p50", "p99") if load else ("p99",)


def _costs(load: bool) -> dict[str, str]:
    return {} if load else {"srv us": "server_cpu_us", "cli us": "client_cpu_us"}


def pair_cells(row: Row) -> Line:
    """One line of a scenario without contention; what is not known stays empty."""
    latency = row.latency_us
    return (
        *(row.rival, _rate(row), _range(row), _ratio(row)),
        *(_us(latency, "p50"), _us(latency, "p99")),
        *(_number(row.server_cpu_us), _share(row.server_cpu_ratio), _number(row.commands_per_grant)),
        *(_number(row.client_cpu_us), "" if row.connections is None else str(row.connections)),
    )


def grant_cells(row: Row) -> Line:
    """One line of a contest."""
    wait, release, gap, fair = row.wait_us, row.release_us, row.handover_us, row.fairness
    return (
        *(row.rival, _rate(row), _range(row), _ratio(row)),
        *_times(wait, "p50", "p90", "p99", "p999", "max"),
        *_times(release, "p50", "p99"),
        *_times(gap, "p50", "p99"),
        *(_share(fair.jain if fair else None), _share(fair.min_over_max if fair else None)),
        *(_number(row.sent_per_grant), _number(row.commands_per_grant)),
        *(_number(row.server_cpu_us), _number(row.client_cpu_us)),
        *(_percent(row.timeouts), _percent(row.failures)),
    )


def storm_cells(row: Row) -> Line:
    """One line of a storm."""
    served = "not all" if row.served_s is None else _time(1e6 * row.served_s.median)
    return (
        *(row.rival, served, _rate(row), _ratio(row)),
        *_times(row.wait_us, "p50", "p99", "max"),
        *_times(row.handover_us, "p50"),
        *(_share(row.order), _number(row.sent_per_grant), _number(row.commands_per_grant)),
        *(_percent(row.timeouts), _percent(row.failures)),
    )


def crash_cells(row: Row) -> Line:
    """One line of a crash."""
    recovery = row.recovery_us
    return (
        *(row.rival, "" if row.lease_ms is None else f"{row.lease_ms:g}ms"),
        *("" if recovery is None else str(recovery.count), str(row.grants)),
        *_times(recovery, "p50", "p90", "p99", "max"),
        *(_ratio(row), _percent(row.timeouts), _percent(row.failures)),
    )


def _rate(row: Row | None) -> str:
    return "" if row is None or row.rate is None else f"{row.rate.median:,.0f}"


def _range(row: Row) -> str:
    if row.rate is None:
        return ""
    if row.rate.high < 1000:
        return f"{row.rate.low:.0f}..{row.rate.high:.0f}"
    return f"{_thousands(row.rate.low)}..{_thousands(row.rate.high)}k"


def _ratio(row: Row | None) -> str:
    if row is None or row.ratio is None:
        return ""
    return f"{_number(row.ratio.median, 2)}{'~' if row.noisy else ''}"


def _times(found: Percentiles | None, *names: str) -> Line:
    return tuple(_time(None if found is None else getattr(found, name)) for name in names)


def _us(found: Percentiles | None, name: str) -> str:
    return _number(None if found is None else getattr(found, name))


def _time(us: float | None) -> str:
    """A time in four or five characters."""
    if us is None:
        return ""
    for unit, size in (("us", 1.0), ("ms", 1e3)):
        if us / size < 999.5:
            return f"{us / size:.{1 if us / size < 9.95 else 0}f}{unit}"
    return f"{us / 1e6:.1f}s"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return "" if value is None else "0" if not value else "100%" if value > 0.995 else f"{100 * value:.2g}%"


def _thousands(rate: float) -> str:
    return f"{rate / 1e3:,.{2 if rate < 1e4 else 1 if rate < 1e5 else 0}f}"


def _number(value: float | None, digits: int = 1) -> str:
    if value is None:
        return ""
    return f"{value:,.{digits}f}" if value < 10 else f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"
