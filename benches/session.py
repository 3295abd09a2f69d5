"""A run: stages, rounds, runners in turn; what was measured, and whether it is true.

Within a round each rival runs once, in an order that rotates from round to round; warm-ups are apart and count for
nothing; the first runner has a control that runs too, so that it is known how far the machine alone moves a ratio. A
number whose acquires, releases and claimed grants differ, or that the server's own counter does not bear out, or that
more than one held at a time, or that leaves a key behind, fails the run.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Protocol

import redis

from fastlock._cli.console import Progress, scrub

from . import raw
from .ceiling import Ceiling, Hiredis, RoundTrip, find_tool
from .contention.workers import Workers
from .plan import CEILING, HIREDIS, Entrant, Plan, Stage
from .processes import end_all
from .rivals import ALONE, ALONE_ENTRY, BASELINE, COMPILED, OURS, RIVALS
from .stats import Percentiles, Row, Sample, control_ratios, merge, noise_at, percentiles, spread, summarize
from .target import PREFIX, Meter, Target
from .workers import Meanwhile, RivalMissing, Turn, WorkerError, WorkerProcess, WorkerRival

ROUND_TRIP = "round trip"

BESIDE = {"hot": Entrant(ALONE, ALONE, ALONE_ENTRY), "handover": Entrant(HIREDIS, HIREDIS, None)}
"""References: who is measured beside fastlock, as the measure of what it does in that scenario."""

ROUND_TRIP_SECONDS, ROUND_TRIP_QUICK = 0.2, 0.05
"""Of the raw socket, beside each round. In the first hundredths of a second waking is cheaper than it is later."""

X = float | None
"""Where in a sweep; None where nothing is swept."""


class Runner(Protocol):
    """Whoever takes part in a stage: a rival's workers, or the benchmark tool."""

    name: str
    versions: dict[str, str]

    def open(self, scenario: str, label: str, turns: Sequence[Turn]) -> None: ...

    def run(self, turn: Turn, meanwhile: Meanwhile | None = None) -> Sample: ...

    def close(self) -> None: ...


@dataclass
class Taken:
    """What was measured of one stage: samples by place in the sweep and runner, and the raw round trip beside them."""

    stage: Stage
    subject: str = ""
    control: str = ""
    hidden: bool = True
    samples: dict[X, dict[str, list[Sample]]] = field(default_factory=dict)
    round_trips: list[Sample] = field(default_factory=list)
    connections: dict[str, int] = field(default_factory=dict)
    leases: dict[str, float] = field(default_factory=dict)
    _rows: dict[tuple[X, int], dict[str, Row]] = field(default_factory=dict)

    def noise(self) -> float | None:
        """How far a rival is from itself; of a sweep at its noisiest place."""
        found = [width for x in self.samples if (width := self.noise_at(x)) is not None]
        return max(found, default=None)

    def noise_at(self, x: X = None) -> float | None:
        """How far a rival is from itself at one place in the sweep."""
        by_place = {
            place: control_ratios(runners.get(self.control, []), runners.get(self.subject, []))
            for place, runners in self.samples.items()
        }
        return noise_at(by_place.get(x, []), [ratio for found in by_place.values() for ratio in found])

    def rows(self, x: X = None) -> dict[str, Row]:
        """The rows of the runners that have run at one place in the sweep. The control is shown if it was asked for."""
        runners = self.samples.get(x, {})
        rounds = sum(len(taken) for point in self.samples.values() for taken in point.values())
        if (x, rounds) not in self._rows:
            self._rows[x, rounds] = self._summarized(runners, self.noise_at(x))
        return self._rows[x, rounds]

    def _summarized(self, runners: Mapping[str, list[Sample]], width: float | None) -> dict[str, Row]:
        shown = {name: taken for name, taken in runners.items() if taken and not (self.hidden and name == self.control)}
        base = runners.get(BASELINE) or (runners.get(self.subject, []) if BASELINE not in runners else [])
        return {
            name: summarize(name, taken, base, self.connections.get(name), width, self.leases.get(name))
            for name, taken in shown.items()
        }

    def round_trip(self) -> dict[str, float] | None:
        """The raw socket beside these rounds."""
        found: Percentiles | None = percentiles(merge(sample.histograms["latency"] for sample in self.round_trips))
        if found is None:
            return None
        rate = spread([sample.rate for sample in self.round_trips]).median
        return {"p50_us": found.p50, "p99_us": found.p99, "pairs_per_s": rate}


@dataclass
class Session:
    """Runs a plan against a target. All that was measured so far can be read at any time, also after Ctrl-C."""

    target: Target
    plan: Plan
    progress: Progress = field(default_factory=lambda: Progress(sys.stderr))
    taken: dict[str, Taken] = field(default_factory=dict)
    versions: dict[str, dict[str, str]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    stopped: KeyboardInterrupt | None = None  # it was raised, and may have been lost on the way
    prefix: str = field(default_factory=lambda: f"{PREFIX}:{os.urandom(6).hex()}")
    _absent: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    _missing: dict[str, str] = field(default_factory=dict)
    _rivals: dict[tuple[str, bool], WorkerRival | Workers] = field(default_factory=dict)
    _ticket: tuple[int, int] = (1, 1)
    _began: float = 0.0

    # -------------------------------------------------------------------------------------------- the whole of it

    def run(self) -> None:
        """Run everything. Ctrl-C comes through; call ``end`` in any case."""
        self._began = time.monotonic()
        try:
            for number, stage in enumerate(self.plan.stages):
                self._ticket = number + 1, len(self.plan.stages)
                try:
                    self._run_stage(stage)
                except redis.RedisError as error:
                    self._fail(f"{stage.name}: the server cannot be asked any more: {error}")
                    break
        finally:
            self.progress.clear()

    def end(self) -> None:
        """End the workers, then remove what they may have left."""
        for rival in self._rivals.values():
            if isinstance(rival, Workers):
                rival.stop()
        processes: list[WorkerProcess] = [process for rival in self._rivals.values() for process in rival.processes]
        end_all(processes)
        for rival in self._rivals.values():
            rival.end()
        self._rivals.clear()
        try:
            self.target.sweep(self.prefix)
        except redis.RedisError as error:
            if not self.target.private:  # a private server took its keys along
                self._fail(f"keys *{self.prefix}* could not be removed: {error}")

    @property
    def skipped(self) -> dict[str, str]:
        """What was left out, and why: rivals with the scenarios that they did not run."""
        found: dict[str, str] = {}
        for (who, why), stages in self._absent.items():
            what = f"{who} in {', '.join(stages)}" if stages else who
            found[what] = why
        return found

    def _skip(self, who: str, why: str, stage: str | None = None) -> None:
        stages = self._absent.setdefault((who, why), [])
        if stage is not None and stage not in stages:
            stages.append(stage)

    # -------------------------------------------------------------------------------------------------- one stage

    def _run_stage(self, stage: Stage) -> None:
        if stage.loop and find_spec(stage.loop) is None:
            self._skip(stage.name, f"{stage.loop} is not installed")
            return
        taken = self.taken[stage.name] = Taken(stage)
        with self.target.volatile(f"{self.prefix}:volatile", stage.volatile_keys):
            runners = [runner for runner in self._runners(stage, taken) if self._open(stage, taken, runner)]
            if runners:
                self._match(stage, taken, runners)
            else:
                self._fail(f"{stage.name}: nobody could run")
        self._look_for_keys(stage)
        self._thin_out(stage)

    def _match(self, stage: Stage, taken: Taken, runners: Sequence[Runner]) -> None:
        """All rounds of those who are there, until they have gone."""
        bystander = self._round_trip(stage)
        for runner in [*self._rounds(stage, taken, runners, bystander), *([bystander] if bystander else [])]:
            # not after Ctrl-C: a worker may be at work then, and ``end`` ends it
            self._guard(stage, runner, runner.close)

    def _rounds(
        self, stage: Stage, taken: Taken, runners: Sequence[Runner], bystander: Runner | None
    ) -> Sequence[Runner]:
        """Run all rounds; returns the runners that have not failed."""
        active = list(runners)
        for x, _ in stage.turns:
            taken.samples[x] = {runner.name: [] for runner in runners}  # in this order in the table, whoever begins
        for point, (x, turn) in enumerate(stage.turns):
            for number in range(stage.rounds):
                if number and self._late():
                    self.notes.append(f"{stage.name}: {number} of {stage.rounds} rounds, for lack of time")
                    break
                at, done = number % max(1, len(active)), (point + number / stage.rounds) / len(stage.turns)
                for runner in [each for each in active[at:] + active[:at] if stands(each, turn)]:
                    what = f"{'' if x is None else f'{x:g}, '}round {number + 1}/{stage.rounds}"
                    self._say(stage, what, runner, done)
                    if not self._round(stage, taken, runner, replace(turn, seed=number), taken.samples[x][runner.name]):
                        active.remove(runner)
                if bystander is not None:
                    self._beside(stage, taken, bystander)
        return active

    def _late(self) -> bool:
        """Whether the stages until this one have taken more than their part of the plan's time."""
        budget, (at, of) = self.plan.budget, self._ticket
        return budget is not None and time.monotonic() - self._began > budget * at / of

    def _beside(self, stage: Stage, taken: Taken, bystander: Runner) -> None:
        turn = Turn(ROUND_TRIP_QUICK if self.plan.quick else ROUND_TRIP_SECONDS)
        self._guard(stage, bystander, lambda: taken.round_trips.append(bystander.run(turn)))

    def _say(self, stage: Stage, what: str, runner: Runner, done: float = 0.0) -> None:
        if self.stopped is not None:
            raise self.stopped
        at, of = self._ticket
        self.progress.show(f"fastlock bench: [{at}/{of}] {stage.name}, {what}, {runner.name}", (at - 1 + done) / of)

    def _thin_out(self, stage: Stage) -> None:
        """End workers that no later stage needs: they would only take memory."""
        later = self.plan.stages[self.plan.stages.index(stage) + 1 :]
        for key in [key for key in self._rivals if not any((each.unit == "grants") == key[1] for each in later)]:
            self._rivals.pop(key).end()

    # ---------------------------------------------------------------------------------------------- who takes part

    def _runners(self, stage: Stage, taken: Taken) -> list[Runner]:
        runners: list[Runner] = []
        starting: list[tuple[Entrant, WorkerRival | Workers]] = []
        for entrant in self._table(stage, taken):
            if entrant.entry is None:
                runners += self._tool(entrant)
                continue
            found = self._start(stage, entrant)
            if found is not None:
                starting.append((entrant, found))
        greeted = [rival for entrant, rival in starting if self._greet(stage, entrant, rival)]
        return [*greeted, *runners]

    def _table(self, stage: Stage, taken: Taken) -> list[Entrant]:
        """Those who can run, what fastlock is measured by, and the control of the first of them."""
        entrants = []
        for entrant in self.plan.entrants:
            why = entrant.cannot(stage.name, stage.face) or self.plan.left_out.get((entrant.label, stage.name), "")
            if why and not (entrant.special and not self.plan.chosen):
                self._skip(entrant.label, why, stage.name)
            elif why:
                continue
            elif absent := self._missing.get(entrant.rival) or _absence(entrant):
                self._skip(entrant.label, absent)
            else:
                entrants.append(entrant)
        locks = [entrant for entrant in entrants if entrant.entry is not None]
        if locks:
            first = locks[0]
            control = first.again(2)
            taken.subject, taken.control = first.label, control.label
            taken.hidden = control not in entrants
            if taken.hidden:
                entrants.append(control)
        if any(entrant.label == "fastlock" for entrant in entrants):
            entrants += [beside] if (beside := self._beside_fastlock(stage)) else []
        return entrants

    def _beside_fastlock(self, stage: Stage) -> Entrant | None:
        """Its reference in this stage. In an open loop there is none: one holder could not serve what is offered."""
        contest = stage.turns[0][1].contest
        return None if contest is None or contest.rate else BESIDE.get(stage.name)

    def _start(self, stage: Stage, entrant: Entrant) -> WorkerRival | Workers | None:
        assert entrant.entry is not None
        contended = stage.unit == "grants"
        key = (entrant.label, contended)
        if key not in self._rivals:
            kind = Workers if contended else WorkerRival
            self._rivals[key] = kind(entrant.label, self.target.url, entrant.entry)
        found = self._rivals[key]
        if isinstance(found, Workers):
            found.grow(max(found.own(turn.contest).workers for _, turn in stage.turns if turn.contest is not None))
        return found

    def _greet(self, stage: Stage, entrant: Entrant, rival: WorkerRival | Workers) -> bool:
        try:
            rival.greet()
        except RivalMissing as error:
            if (
                entrant.rival not in self._missing and entrant.rival not in RIVALS
            ):  # somebody's own, asked for by its module
                self._fail(f"{entrant.rival}: {error}")
            self._missing[entrant.rival] = str(error)
            self._skip(entrant.label, str(error))
        except WorkerError as error:
            self._missing[entrant.rival] = "its worker did not start"
            self._skip(entrant.label, "its worker did not start")
            self._fail(str(error))
        else:
            return True
        self._rivals.pop((entrant.label, stage.unit == "grants")).end()
        return False

    def _tool(self, entrant: Entrant) -> list[Runner]:
        tool = find_tool()
        if not raw.reachable(self.target.url) or raw.address(self.target.url).get("password"):
            self._skip(entrant.label, "TLS or a password")
        elif tool is None:
            self._skip(entrant.label, "neither valkey-benchmark nor redis-benchmark is on PATH")
        else:
            return [(Ceiling if entrant.rival == CEILING else Hiredis)(self.target, tool)]
        return []

    def _round_trip(self, stage: Stage) -> Runner | None:
        if not raw.reachable(self.target.url):
            self._skip(ROUND_TRIP, "TLS")
            return None
        found = RoundTrip(self.target)
        return found if self._guard(stage, found, lambda: found.open(stage.name, "", ())) else None

    # --------------------------------------------------------------------------------------------- one runner's turn

    def _open(self, stage: Stage, taken: Taken, runner: Runner) -> bool:
        """Connect and warm up. False: the runner is out of this stage."""
        self._say(stage, "warm-up", runner)
        turns = self._turns(stage, taken, runner)
        if not turns:
            return False
        first = stage.warm_up(turns)

        def warm_up() -> None:
            runner.open(stage.name, self._label(stage, runner), [*turns, *([first] if first else [])])
            if first:
                runner.run(first, lambda: self._count_connections(stage, taken, runner))
                for lie in runner.wrong if isinstance(runner, Workers) else ():
                    self._fail(f"{stage.name}, {runner.name}: in the warm-up {lie}")
            if isinstance(runner, Workers) and turns[0].contest is not None:
                taken.leases[runner.name] = runner.own(turns[0].contest).lease

        if not self._guard(stage, runner, warm_up):
            return False
        if runner.name != taken.control or not taken.hidden:
            self.versions[runner.name] = runner.versions
        return True

    def _turns(self, stage: Stage, taken: Taken, runner: Runner) -> list[Turn]:
        """The turns of the stage that this runner is asked for."""
        found = [(x, turn) for x, turn in stage.turns if stands(runner, turn)]
        left_out = [f"{x:,g}" for x, turn in stage.turns if x is not None and not stands(runner, turn)]
        if left_out and (runner.name != taken.control or not taken.hidden):
            why = "so many that ask again and again need longer to ask once than a run lasts"
            self._skip(f"{runner.name} at {', '.join(left_out)}", why, stage.name)
        return [turn for _, turn in found]

    def _round(self, stage: Stage, taken: Taken, runner: Runner, turn: Turn, samples: list[Sample]) -> bool:
        def measure() -> None:
            before = self.target.read()
            sample = runner.run(turn)
            spent = self.target.since(before)
            if isinstance(runner, WorkerRival | Workers):
                sample = replace(sample, server_cpu=spent.cpu, commands=spent.commands)
                self._judge(stage, runner, sample, spent)
            samples.append(sample)
            self._count_connections(stage, taken, runner)

        return self._guard(stage, runner, measure)

    def _judge(self, stage: Stage, runner: WorkerRival | Workers, sample: Sample, spent: Meter) -> None:
        ours = runner.name.partition("#")[0] in OURS
        counted = spent if self.target.private else None
        found = contended_lies(sample, counted, runner.due) if isinstance(runner, Workers) else lies(sample, counted)
        where = f"{stage.name}, {runner.name}"
        if isinstance(runner, Workers):
            found = [*found, *runner.wrong]
            errors = f"{where}: {sample.failures} calls failed: {'; '.join(runner.errors)}" if runner.errors else ""
            if errors and ours:
                found = [*found, errors.partition(": ")[2]]
            elif errors:
                self.notes.append(scrub(errors, self.target.url))
        for lie in found:
            self._fail(f"{where}: {lie}")

    def _label(self, stage: Stage, runner: Runner) -> str:
        return f"{self.prefix}:{stage.name}:{runner.name.replace(' ', '-')}"

    def _count_connections(self, stage: Stage, taken: Taken, runner: Runner) -> None:
        if isinstance(runner, WorkerRival | Workers):
            count = self.target.connections(self._label(stage, runner))
            taken.connections[runner.name] = max(taken.connections.get(runner.name, 0), count)

    def _guard(self, stage: Stage, runner: Runner, action: Callable[[], None]) -> bool:
        try:
            action()
        except Exception as error:  # whatever it is: it costs this cell, not what was measured elsewhere
            self._fail(f"{stage.name}, {runner.name}: {type(error).__name__}: {error}")
            self._drop(stage, runner)
            return False
        return True

    def _drop(self, stage: Stage, runner: Runner) -> None:
        """Part with a runner that failed: its workers may be dead, or about to answer what nobody asks any more."""
        gone = self._rivals.pop((runner.name, stage.unit == "grants"), None)
        with suppress(Exception):  # it failed already, and says so
            (gone.end if gone else runner.close)()

    def _fail(self, text: str) -> None:
        self.failures.append(scrub(text, self.target.url))

    def _look_for_keys(self, stage: Stage) -> None:
        by_design = tuple(key for entrant in self.plan.entrants if entrant.entry for key in entrant.entry.leaves)
        left = self.target.leftovers(self.prefix, by_design)
        if left:
            self._fail(f"{stage.name}: {len(left)} keys left behind, such as {left[0]!r}")
        self.target.sweep(self.prefix)


def _absence(entrant: Entrant) -> str:
    """What keeps this rival from running on this machine; '' if nothing does."""
    entry = entrant.entry
    if entry is not None and entry.env == COMPILED and find_spec("fastlock._core") is None:
        return "the core is not compiled"
    if entry is not None and entry.needs and find_spec(entry.needs[0]) is None:
        return f"not installed: pip install {entry.needs[1]}"
    return ""


def stands(runner: Runner, turn: Turn) -> bool:
    """Whether it is asked to run this turn: not with more waiters than it can stand."""
    return turn.contest is None or not isinstance(runner, Workers) or runner.stands(turn.contest)


def lies(sample: Sample, counted: Meter | None) -> Sequence[str]:
    """What is not true about a sample. ``counted``: what the server counted, None if others use it too."""
    found = []
    if sample.grants == 0:
        found.append("no pair was made")
    if not sample.acquired == sample.released == sample.grants:
        found.append(f"{sample.acquired} acquired, {sample.released} released, {sample.grants} pairs claimed")
    if counted is not None and counted.changes < 2 * sample.grants:
        found.append(f"the server counted {counted.changes} key changes for {sample.grants} pairs, two each are due")
    return found


def contended_lies(sample: Sample, counted: Meter | None, due: int) -> Sequence[str]:
    """The same for a contest, in which calls may fail, and are counted then. ``due``: key changes without which the
    server cannot have given these grants."""
    found = []
    if not sample.failures and sample.released != sample.acquired:
        found.append(f"{sample.acquired} acquired, {sample.released} released, and no call failed")
    if counted is not None and counted.changes < due:
        found.append(f"the server counted {counted.changes} key changes for {sample.acquired} grants, {due} are due")
    if counted is not None and sample.sent is not None and counted.commands < sample.sent:
        found.append(f"{sample.sent} commands sent by its own count, the server ran {counted.commands}")
    return found


__all__ = ["Runner", "Session", "Taken", "contended_lies", "lies", "stands"]
