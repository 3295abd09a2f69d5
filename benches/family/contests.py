"""The second part: readers and writers, and many callers of few permits, in several processes.

All clients of a case start together and acquire again as soon as they have released, until the end of the run; who
waits then is still served. Each round runs each case once. What the clients did is judged by `exclusion`.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain
from time import monotonic_ns as clock
from typing import Any

from ..measures import percentile
from ..rivals import LEASE
from ..stats import Spread, spread
from ..workers import ANSWER_SECONDS, WorkerError, WorkerProcess
from .cases import LIMITING, READERS_WRITERS, READING, WRITER_FIRST, Case
from .exclusion import Record, most_together, records, violations
from .session import Session, Settings, rotated

LEAD_NS = 100_000_000
"""Nanoseconds from the order to go to the start, by when every client waits for it."""

BLOCKING_TIMEOUT = 30.0
"""Seconds for which a call waits at most: a wait that ends so is noted."""

WARM_UP = 0.05

SHARING = (READERS_WRITERS, WRITER_FIRST)
"""Cases in which any number of readers may hold at once."""


@dataclass(frozen=True)
class Kind:
    """A contest: its cases, its clients, those who do not write first, and how many of these may hold at once (but
    where they share)."""

    name: str
    cases: tuple[Case, ...]
    sides: tuple[str, ...]
    clients: tuple[int, int]
    permits: int

    def most(self, case: str) -> int | None:
        """How many who do not write may hold at once; None: any number."""
        return None if case in SHARING else self.permits


def kinds(settings: Settings) -> tuple[Kind, Kind]:
    """The two contests."""
    return (
        Kind("readers and writers", READING, ("readers", "writers"), (settings.readers, settings.writers), 1),
        Kind("permits", LIMITING, ("callers",), (settings.callers, 0), settings.permits),
    )


@dataclass(frozen=True)
class Round:
    """One run: what its clients did, and the length of the run in seconds; how long it was open to acquires, from when
    to when in nanoseconds."""

    records: tuple[Record, ...]
    start: int
    end: int

    def granted(self, writes: int) -> float:
        """Grants of one side per second, of those within the run."""
        count = sum(each.writes == writes and self.start <= each.granted < self.end for each in self.records)
        return count / ((self.end - self.start) / 1e9)


@dataclass(frozen=True)
class SideRow:
    """One side of a case: grants per second, and waits in milliseconds over all rounds, None if nobody waited."""

    side: str
    clients: int
    rate: Spread
    wait_p50_ms: float | None
    wait_p99_ms: float | None
    wait_max_ms: float | None


@dataclass(frozen=True)
class ContestRow:
    """One case: its sides; how long a hold was in the median; how many held it at once, at most; how often more did
    than may; calls that gave up; what of the ideal was reached, where there is one."""

    api: str
    contest: str
    case: str
    sides: tuple[SideRow, ...]
    held_ms: float | None
    together: int
    violations: int
    gave_up: int
    of_ideal: float | None
    rounds: int


@dataclass
class ContestPart:
    """What was measured: rounds by API, contest and case."""

    rounds: dict[tuple[str, Kind], dict[str, list[Round]]] = field(default_factory=dict)

    def rows(self, api: str, kind: Kind, settings: Settings) -> list[ContestRow]:
        """The rows of a table, in the order of the cases."""
        found = self.rounds.get((api, kind), {})
        return [row_of(api, kind, case, rounds, settings) for case, rounds in found.items() if rounds]

    def as_list(self, settings: Settings) -> list[dict[str, Any]]:
        """All rows as plain values."""
        return [asdict(row) for api, kind in self.rounds for row in self.rows(api, kind, settings)]


def row_of(api: str, kind: Kind, case: str, rounds: Sequence[Round], settings: Settings) -> ContestRow:
    """What the rounds of a case say."""
    everything = list(chain.from_iterable(each.records for each in rounds))
    sides = tuple(side_of(side, writes, kind.clients[writes], rounds) for writes, side in enumerate(kind.sides))
    held = [each.releasing - each.granted for each in everything if each.granted]
    ideal = kind.permits / settings.hold if len(kind.sides) == 1 and settings.hold else None
    return ContestRow(
        api=api,
        contest=kind.name,
        case=case,
        sides=sides,
        held_ms=statistics.median(held) / 1e6 if held else None,
        together=max(most_together(each.records, LEASE) for each in rounds),
        violations=sum(violations(each.records, LEASE, kind.most(case)) for each in rounds),
        gave_up=sum(not each.granted for each in everything),
        of_ideal=sides[0].rate.median / ideal if ideal else None,
        rounds=len(rounds),
    )


def side_of(side: str, writes: int, clients: int, rounds: Sequence[Round]) -> SideRow:
    """What the rounds say of one side. A wait that was given up counts with the time it took."""
    waits = sorted(each.waited / 1e6 for run in rounds for each in run.records if each.writes == writes)
    rate = spread([run.granted(writes) for run in rounds])
    return SideRow(side, clients, rate, percentile(waits, 0.5), percentile(waits, 0.99), percentile(waits, 1.0))


def measure(session: Session, part: ContestPart) -> None:
    """Measure all contests, and note the rounds in `part` as they come."""
    both, apis = kinds(session.settings), session.settings.apis
    session.show("contention", "starting", 0)
    workers = session.start([case for kind in both for case in kind.cases], session.settings.processes)
    for number, (api, kind) in enumerate((api, kind) for api in apis for kind in both):
        _measure_kind(session, part, api, kind, workers, number / (len(apis) * len(both)))
        session.disconnect(workers.values())
    session.finish(workers.values(), "contention")


def _measure_kind(
    session: Session, part: ContestPart, api: str, kind: Kind, workers: dict[str, list[WorkerProcess]], done: float
) -> None:
    settings = session.settings
    there = [case.name for case in kind.cases if case.name in workers]
    running = [name for name in there if _opened(session, workers[name], name, api, kind)]
    rounds = part.rounds[api, kind] = {case.name: [] for case in kind.cases if case.name in running}
    for number in range(settings.contest_rounds):
        for name in [each for each in rotated(list(rounds), number) if each in running]:
            session.show("contention", f"{api}, {kind.name}, round {number + 1}, {name}", done)
            where = f"contention, {api}, {kind.name}, {name}"
            found = session.attempt(where, partial(_run, session, workers[name], name, kind, settings.contest_seconds))
            if found is None:
                running.remove(name)
                continue
            run, errors = found
            rounds[name].append(run)
            _judge(session, where, name, kind, run, errors)


def _opened(session: Session, workers: Sequence[WorkerProcess], name: str, api: str, kind: Kind) -> bool:
    """Connect all processes, and warm up. False: the case is out."""
    label, permits = f"{session.prefix}:contest", session.settings.permits

    def warm_up() -> bool:
        for worker in workers:
            worker.ask("open", name=name, case=name, api=api, url=session.target.url, label=label, permits=permits)
        return bool(_run(session, workers, name, kind, min(WARM_UP, session.settings.contest_seconds)))

    return bool(session.attempt(f"contention, {api}, {kind.name}, {name}", warm_up))


def _run(
    session: Session, workers: Sequence[WorkerProcess], name: str, kind: Kind, seconds: float
) -> tuple[Round, list[str]]:
    """Run a case once: what all clients did, and their errors."""
    start = clock() + LEAD_NS
    end = start + int(seconds * 1e9)
    key = f"{session.prefix}:{kind.name}:{name}".replace(" ", "-")
    for number, worker in enumerate(workers):
        readers, writers = (share(clients, len(workers), number) for clients in kind.clients)
        worker.order(
            "contest",
            name=name,
            key=key,
            readers=readers,
            writers=writers,
            start=start,
            end=end,
            hold=session.settings.hold,
            lease=LEASE,
            blocking_timeout=BLOCKING_TIMEOUT,
        )
    answers, problems = [], []
    for worker in workers:
        try:
            answers.append(worker.answer(seconds + BLOCKING_TIMEOUT + ANSWER_SECONDS))
        except WorkerError as error:  # the answers of the others are awaited all the same, or they came later
            problems.append(error)
    if problems:
        raise problems[0]
    found = tuple(chain.from_iterable(records(answer["records"]) for answer in answers))
    return Round(found, start, end), [error for answer in answers for error in answer["errors"]]


def share(clients: int, processes: int, number: int) -> int:
    """How many of the clients a process has: as many as the others, or one more or less."""
    return (number + 1) * clients // processes - number * clients // processes


def _judge(session: Session, where: str, name: str, kind: Kind, run: Round, errors: list[str]) -> None:
    """Note what was wrong in a run. A rival that lets too many in, or raises, fails no run."""
    ours = next(case.ours for case in kind.cases if case.name == name)
    say = session.fail if ours else session.note
    if wrong := violations(run.records, LEASE, kind.most(name)):
        say(f"{where}: {wrong} times it was held by more than may" if ours else f"{where}: held by more than may")
    if errors:
        say(f"{where}: {'; '.join(errors)}")
    if ours and not any(each.granted for each in run.records):
        say(f"{where}: nobody got it")
