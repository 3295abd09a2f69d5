"""The third part: many leases under renewal in one client, while nothing else runs.

A worker acquires them, and sleeps: its CPU time and the commands of its client are those of renewal alone, which is due
when a third of a lease has passed. What it costs grows with the number of leases and with how often they are due, so
that a run with fewer or shorter ones is scaled to 10,000 leases of 30 seconds. A thread for each lock, as in the usual
recipe for redis-py, makes no sense for 10,000: it is measured with 100, and scaled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from ..stats import Spread, spread
from ..workers import ANSWER_SECONDS, WorkerProcess
from .cases import RENEWING, Case
from .session import Session

LEASES, LEASE = 10_000, 30.0
"""What all is scaled to."""

FEW = 100
"""Leases at most of a rival that has a thread, or a task, for each."""

BATCH = 100
"""Leases that fastlock renews by one command."""


@dataclass(frozen=True)
class RenewalRow:
    """One case: `leases` of `lease` seconds. cpu: per cent of a core, median and range of the periods (a third of a
    lease each); cpu_scaled: its mean for 10,000 leases of 30 seconds. per_period: commands for 100 leases in a period;
    per_renewal: for 100 leases that were renewed. shortest: seconds that a lease had left at least; late: by how much
    that is less than two thirds of it; None where the library does not say. lost: leases that were lost."""

    api: str
    case: str
    leases: int
    lease: float
    cpu: Spread
    cpu_scaled: float
    per_period: float
    per_renewal: float | None
    renewals: int
    shortest: float | None
    late: float | None
    lost: int


@dataclass
class RenewalPart:
    """What was measured."""

    rows: list[RenewalRow] = field(default_factory=list)

    def as_list(self) -> list[dict[str, Any]]:
        """The rows as plain values."""
        return [asdict(row) for row in self.rows]


def row_of(api: str, case: str, leases: int, lease: float, answer: dict[str, Any]) -> RenewalRow:
    """What a worker's answer says."""
    periods: Sequence[dict[str, float]] = answer["periods"]
    seconds, cpu, commands, renewals = (
        sum(each[key] for each in periods) for key in ("seconds", "cpu", "commands", "renewals")
    )
    shortest = answer["shortest"]
    return RenewalRow(
        api=api,
        case=case,
        leases=leases,
        lease=lease,
        cpu=spread([100 * each["cpu"] / each["seconds"] for each in periods]),
        cpu_scaled=100 * cpu / seconds * (LEASES / leases) * (lease / LEASE),
        per_period=commands / (leases / BATCH) / (seconds / (lease / 3)),
        per_renewal=commands / (renewals / BATCH) if renewals else None,
        renewals=int(renewals),
        shortest=shortest,
        late=None if shortest is None else max(0.0, lease * 2 / 3 - shortest),
        lost=answer["lost"],
    )


def measure(session: Session, part: RenewalPart) -> None:
    """Measure all cases, one after the other."""
    apis = session.settings.apis
    workers = session.start(RENEWING)
    running = [(api, case) for api in apis for case in RENEWING if case.name in workers]
    for number, (api, case) in enumerate(running):
        session.show("renewal", f"{api}, {case.name}", number / len(running))
        where, worker = f"renewal, {api}, {case.name}", workers[case.name][0]
        row = session.attempt(where, partial(_run, session, worker, case, api))
        if row is not None:
            part.rows.append(row)
            _judge(session, row, case)
        session.disconnect([[worker]])
    session.finish(workers.values(), "renewal")


def _run(session: Session, worker: WorkerProcess, case: Case, api: str) -> RenewalRow:
    settings, label = session.settings, f"{session.prefix}:renewal"
    leases = settings.leases if case.ours else min(FEW, settings.leases)
    worker.ask("open", name=label, case=case.name, api=api, url=session.target.url, label=label, permits=1)
    worker.order("renew", name=label, key=label, leases=leases, lease=settings.lease, periods=settings.periods)
    answer = worker.answer((settings.periods + 1) * settings.lease / 3 + 2 * ANSWER_SECONDS)
    return row_of(api, case.name, leases, settings.lease, answer)


def _judge(session: Session, row: RenewalRow, case: Case) -> None:
    """Note what was wrong: a lease that was lost, or that was not renewed as often as it was due."""
    where, due = f"renewal, {row.api}, {row.case}", row.leases * (session.settings.periods - 1)
    say = session.fail if case.ours else session.note
    if row.lost:
        say(f"{where}: {row.lost} of {row.leases} leases were lost")
    if row.renewals < due:
        say(f"{where}: {row.renewals} renewals, {due} are due")
