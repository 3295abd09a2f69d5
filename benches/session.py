"""A session of the benchmark: stages, rounds, one runner after the other; what was measured, and whether it is true.

What lives here: within a round every runner runs once, in an order that rotates from round to round; warm-ups are not
counted; the first rival runs a second time, as the control, which tells how far the machine alone moves a ratio. The
session fails where acquires, releases and claimed grants differ, the server's own counter does not confirm them, a name
was held by more than one client, or a key is left behind. Never here: locks, statistics, printing of results.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from typing import Protocol

import redis

from fastlock._cli.console import Progress, scrub

from . import raw
from .ceiling import Ceiling, Hiredis, RoundTrip, find_tool
from .contention.workers import Workers
from .plan import CEILING, HIREDIS, Participant, Plan, Stage
from .processes import end_all
from .relay import Relay
from .rivals import ALONE, ALONE_ENTRY, BASELINE, COMPILED, KEPT, OURS, RIVALS, UNCONFIRMED
from .stats import Percentiles, Row, Sample, control_ratios, merge, noise_at, percentiles, spread, summarize
from .target import PREFIX, Meter, Target
from .workers import Meanwhile, RivalMissing, RunSpec, WorkerError, WorkerProcess, WorkerRival

ROUND_TRIP = "round trip"

REFERENCE_OF = {"hot": Participant(ALONE, ALONE, ALONE_ENTRY), "handover": Participant(HIREDIS, HIREDIS, None)}
"""The reference that runs beside fastlock in a scenario, as a measure of what fastlock does there."""

ROUND_TRIP_SECONDS, ROUND_TRIP_QUICK = 0.2, 0.05
"""Seconds of the round trips beside each round. In the first hundredths of a second waking is cheaper than later."""

X = float | None
"""The point of a sweep; None where nothing is swept."""


class Runner(Protocol):
    """What runs a stage for one participant: a rival's workers, or the benchmark tool."""

    name: str
    versions: dict[str, str]

    def open(self, scenario: str, label: str, specs: Sequence[RunSpec]) -> None: ...

    def run(self, spec: RunSpec, meanwhile: Meanwhile | None = None) -> Sample: ...

    def close(self) -> None: ...


@dataclass
class Measured:
    """What was measured of one stage: samples by point of the sweep and by runner, and the raw round trip beside them.

    subject, control: names of the first rival's two runners; hidden: whether the control is left out of the results.
    """

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
        """How far the control is from its subject; of a sweep at its noisiest point."""
        found = [width for x in self.samples if (width := self.noise_at(x)) is not None]
        return max(found, default=None)

    def noise_at(self, x: X = None) -> float | None:
        """How far the control is from its subject at one point of the sweep."""
        by_point = {
            point: control_ratios(runners.get(self.control, []), runners.get(self.subject, []))
            for point, runners in self.samples.items()
        }
        return noise_at(by_point.get(x, []), [ratio for found in by_point.values() for ratio in found])

    def rows(self, x: X = None) -> dict[str, Row]:
        """The rows of one point of the sweep, of runners that have run. The control has one if it was asked for."""
        runners = self.samples.get(x, {})
        rounds = sum(len(samples) for point in self.samples.values() for samples in point.values())
        if (x, rounds) not in self._rows:
            self._rows[x, rounds] = self._summarize(runners, self.noise_at(x))
        return self._rows[x, rounds]

    def _summarize(self, runners: Mapping[str, list[Sample]], width: float | None) -> dict[str, Row]:
        hidden = self.control if self.hidden else None
        shown = {name: samples for name, samples in runners.items() if samples and name != hidden}
        base = runners.get(BASELINE) or (runners.get(self.subject, []) if BASELINE not in runners else [])
        return {
            name: summarize(name, samples, base, self.connections.get(name), width, self.leases.get(name))
            for name, samples in shown.items()
        }

    def round_trip(self) -> dict[str, float] | None:
        """The round trips that were measured beside the rounds; None if there were none."""
        found: Percentiles | None = percentiles(merge(sample.histograms["latency"] for sample in self.round_trips))
        if found is None:
            return None
        rate = spread([sample.rate for sample in self.round_trips]).median
        return {"p50_us": found.p50, "p99_us": found.p99, "pairs_per_s": rate}


@dataclass
class Session:
    """Runs a plan against a target. What was measured so far can be read at any time, also after Ctrl-C."""

    target: Target
    plan: Plan
    progress: Progress = field(default_factory=lambda: Progress(sys.stderr))
    measured: dict[str, Measured] = field(default_factory=dict)
    versions: dict[str, dict[str, str]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    stopped: KeyboardInterrupt | None = None  # it was raised, and a library may have swallowed it
    prefix: str = field(default_factory=lambda: f"{PREFIX}:{os.urandom(6).hex()}")
    _left_out: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    _missing: dict[str, str] = field(default_factory=dict)
    _rivals: dict[tuple[str, bool], WorkerRival | Workers] = field(default_factory=dict)
    _relay: Relay | None = None
    _position: tuple[int, int] = (1, 1)
    _began: float = 0.0

    # -------------------------------------------------------------------------------------------- the whole run

    def run(self) -> None:
        """Run all stages. Ctrl-C is raised; call ``end`` in any case."""
        self._began = time.monotonic()
        if any(spec.rtt for stage in self.plan.stages for _, spec in stage.specs):
            self._relay = Relay(self.target.url)
        try:
            for number, stage in enumerate(self.plan.stages):
                self._position = number + 1, len(self.plan.stages)
                try:
                    self._run_stage(stage)
                except redis.RedisError as error:
                    self._fail(f"{stage.name}: the server cannot be asked any more: {error}")
                    break
        finally:
            self.progress.clear()

    def end(self) -> None:
        """End the workers, then remove the keys that they may have left."""
        for rival in self._rivals.values():
            if isinstance(rival, Workers):
                rival.stop()
        processes: list[WorkerProcess] = [process for rival in self._rivals.values() for process in rival.processes]
        end_all(processes)
        if self._relay is not None:
            self._relay.close()
        for rival in self._rivals.values():
            rival.end()
        self._rivals.clear()
        try:
            self.target.sweep(self.prefix)
        except redis.RedisError as error:
            if not self.target.private:  # the keys of a private server end with it
                self._fail(f"keys *{self.prefix}* could not be removed: {error}")

    @property
    def _url(self) -> str:
        """Where rivals find the server."""
        return self.target.url if self._relay is None else self._relay.url

    @property
    def skipped(self) -> dict[str, str]:
        """What was left out, and why: rivals with the scenarios that they did not run."""
        found: dict[str, str] = {}
        for (who, why), stages in self._left_out.items():
            what = f"{who} in {', '.join(stages)}" if stages else who
            found[what] = why
        return found

    def _skip(self, who: str, why: str, stage: str | None = None) -> None:
        stages = self._left_out.setdefault((who, why), [])
        if stage is not None and stage not in stages:
            stages.append(stage)

    # -------------------------------------------------------------------------------------------------- one stage

    def _run_stage(self, stage: Stage) -> None:
        if stage.loop and find_spec(stage.loop) is None:
            self._skip(stage.name, f"{stage.loop} is not installed")
            return
        measured = self.measured[stage.name] = Measured(stage)
        with self.target.volatile(f"{self.prefix}:volatile", stage.volatile_keys):
            runners = [runner for runner in self._runners(stage, measured) if self._open(stage, measured, runner)]
            if runners:
                self._run_rounds(stage, measured, runners)
            else:
                self._fail(f"{stage.name}: no rival could run")
        self._check_leftovers(stage)
        self._end_idle_workers(stage)

    def _run_rounds(self, stage: Stage, measured: Measured, runners: Sequence[Runner]) -> None:
        """Measure all rounds of the runners that are open, and close them."""
        round_trip = self._open_round_trip(stage)
        if round_trip is not None and stage.kind == "rtt":  # it differs from point to point
            runners, round_trip = [*runners, round_trip], None
        for runner in [
            *self._measure_rounds(stage, measured, runners, round_trip),
            *([round_trip] if round_trip else []),
        ]:
            # not after Ctrl-C: a worker may still run then, and ``end`` ends it
            self._attempt(stage, runner, runner.close)

    def _measure_rounds(
        self, stage: Stage, measured: Measured, runners: Sequence[Runner], round_trip: Runner | None
    ) -> Sequence[Runner]:
        """Measure all rounds; returns the runners that did not fail."""
        active = list(runners)
        for x, _ in stage.specs:
            measured.samples[x] = {runner.name: [] for runner in runners}  # the order of the table
        for point, (x, spec) in enumerate(stage.specs):
            if self._relay is not None:
                active = self._change_network(stage, measured, active, spec)
            for number in range(stage.rounds):
                if number and self._out_of_time():
                    self.notes.append(f"{stage.name}: {number} of {stage.rounds} rounds, for lack of time")
                    break
                at, done = number % max(1, len(active)), (point + number / stage.rounds) / len(stage.specs)
                for runner in [each for each in active[at:] + active[:at] if accepts(each, spec)]:
                    what = f"{'' if x is None else f'{x:g}, '}round {number + 1}/{stage.rounds}"
                    self._show_progress(stage, what, runner, done)
                    if not self._measure_round(
                        stage, measured, runner, replace(spec, seed=number), measured.samples[x][runner.name]
                    ):
                        active.remove(runner)
                if round_trip is not None:
                    self._measure_round_trip(stage, measured, round_trip)
        return active

    def _change_network(
        self, stage: Stage, measured: Measured, runners: Sequence[Runner], spec: RunSpec
    ) -> list[Runner]:
        """Make round trips as long as a point says, and have all get used to it; returns those who did not fail."""
        assert self._relay is not None
        self._relay.delay(spec.rtt)
        short = stage.warm_up([spec]) or spec
        return [each for each in runners if self._attempt(stage, each, partial(self._run_unmeasured, each, short))]

    @staticmethod
    def _run_unmeasured(runner: Runner, spec: RunSpec) -> None:
        runner.run(spec)

    def _out_of_time(self) -> bool:
        """Whether the stages until this one have taken more than their part of the plan's time."""
        budget, (at, of) = self.plan.budget, self._position
        return budget is not None and time.monotonic() - self._began > budget * at / of

    def _measure_round_trip(self, stage: Stage, measured: Measured, round_trip: Runner) -> None:
        spec = RunSpec(ROUND_TRIP_QUICK if self.plan.quick else ROUND_TRIP_SECONDS)
        self._attempt(stage, round_trip, lambda: measured.round_trips.append(round_trip.run(spec)))

    def _show_progress(self, stage: Stage, what: str, runner: Runner, done: float = 0.0) -> None:
        if self.stopped is not None:
            raise self.stopped
        at, of = self._position
        self.progress.show(f"fastlock bench: [{at}/{of}] {stage.name}, {what}, {runner.name}", (at - 1 + done) / of)

    def _end_idle_workers(self, stage: Stage) -> None:
        """End workers that no later stage needs, which would only take memory."""
        later = self.plan.stages[self.plan.stages.index(stage) + 1 :]
        for key in [key for key in self._rivals if not any((each.unit == "grants") == key[1] for each in later)]:
            self._rivals.pop(key).end()

    # ---------------------------------------------------------------------------------------------- the runners

    def _runners(self, stage: Stage, measured: Measured) -> list[Runner]:
        runners: list[Runner] = []
        starting: list[tuple[Participant, WorkerRival | Workers]] = []
        for participant in self._participants_of(stage, measured):
            if participant.entry is None:
                runners += self._find_tool(participant)
                continue
            found = self._start(stage, participant)
            if found is not None:
                starting.append((participant, found))
        greeted = [rival for participant, rival in starting if self._greet(stage, participant, rival)]
        return [*greeted, *runners]

    def _participants_of(self, stage: Stage, measured: Measured) -> list[Participant]:
        """The participants that can run the stage, the control of the first of them, and the reference of fastlock."""
        participants = []
        for participant in self.plan.participants:
            why = participant.cannot(stage.name, stage.api) or self.plan.left_out.get(
                (participant.label, stage.name), ""
            )
            if why and not (participant.special and not self.plan.chosen):
                self._skip(participant.label, why, stage.name)
            elif why:
                continue
            elif absent := self._missing.get(participant.rival) or _why_missing(participant):
                self._skip(participant.label, absent)
            else:
                participants.append(participant)
        locks = [participant for participant in participants if participant.entry is not None]
        if locks:
            first = locks[0]
            control = first.numbered(2)
            measured.subject, measured.control = first.label, control.label
            measured.hidden = control not in participants
            if measured.hidden:
                participants.append(control)
        if any(participant.label == "fastlock" for participant in participants):
            participants += [reference] if (reference := self._reference_of(stage)) else []
        return participants

    def _reference_of(self, stage: Stage) -> Participant | None:
        """The reference of fastlock in a stage. An open loop has none: one holder could not serve what is offered."""
        contest = stage.specs[0][1].contest
        found = None if contest is None or contest.rate else REFERENCE_OF.get(stage.name)
        return None if found is not None and found.entry is None and stage.kind == "rtt" else found

    def _start(self, stage: Stage, participant: Participant) -> WorkerRival | Workers | None:
        assert participant.entry is not None
        contended = stage.unit == "grants"
        key = (participant.label, contended)
        if key not in self._rivals:
            kind = Workers if contended else WorkerRival
            self._rivals[key] = kind(participant.label, self._url, participant.entry)
        found = self._rivals[key]
        if isinstance(found, Workers):
            found.grow(max(found.own(spec.contest).workers for _, spec in stage.specs if spec.contest is not None))
        return found

    def _greet(self, stage: Stage, participant: Participant, rival: WorkerRival | Workers) -> bool:
        try:
            rival.greet()
        except RivalMissing as error:
            if participant.rival not in self._missing and participant.rival not in RIVALS:  # asked for by its module
                self._fail(f"{participant.rival}: {error}")
            self._missing[participant.rival] = str(error)
            self._skip(participant.label, str(error))
        except WorkerError as error:
            self._missing[participant.rival] = "its worker did not start"
            self._skip(participant.label, "its worker did not start")
            self._fail(str(error))
        else:
            return True
        self._rivals.pop((participant.label, stage.unit == "grants")).end()
        return False

    def _find_tool(self, participant: Participant) -> list[Runner]:
        tool = find_tool()
        if raw.encrypted(self.target.url) or raw.address(self.target.url).get("password"):
            self._skip(participant.label, "TLS or a password")
        elif tool is None:
            self._skip(participant.label, "neither valkey-benchmark nor redis-benchmark is on PATH")
        else:
            return [(Ceiling if participant.rival == CEILING else Hiredis)(self.target, tool)]
        return []

    def _open_round_trip(self, stage: Stage) -> Runner | None:
        found = RoundTrip(self._url)
        return found if self._attempt(stage, found, lambda: found.open(stage.name, "", ())) else None

    # ------------------------------------------------------------------------------------------ one runner and one run

    def _open(self, stage: Stage, measured: Measured, runner: Runner) -> bool:
        """Connect and warm up. False: the runner is out of this stage."""
        self._show_progress(stage, "warm-up", runner)
        specs = self._specs(stage, measured, runner)
        if not specs:
            return False
        first = stage.warm_up(specs)

        def warm_up() -> None:
            runner.open(stage.name, self._label(stage, runner), [*specs, *([first] if first else [])])
            if first:
                runner.run(first, lambda: self._count_connections(stage, measured, runner))
                for problem in runner.wrong if isinstance(runner, Workers) else ():
                    self._fail(f"{stage.name}, {runner.name}: in the warm-up {problem}")
            if isinstance(runner, Workers) and specs[0].contest is not None:
                measured.leases[runner.name] = runner.own(specs[0].contest).lease

        if not self._attempt(stage, runner, warm_up):
            return False
        if runner.name != measured.control or not measured.hidden:
            self.versions[runner.name] = runner.versions
        return True

    def _specs(self, stage: Stage, measured: Measured, runner: Runner) -> list[RunSpec]:
        """The runs of the stage that a runner accepts; the others are noted as left out."""
        found = [(x, spec) for x, spec in stage.specs if accepts(runner, spec)]
        left_out = [f"{x:,g}" for x, spec in stage.specs if x is not None and not accepts(runner, spec)]
        if left_out and (runner.name != measured.control or not measured.hidden):
            why = "so many clients that poll need longer to poll once than a run lasts"
            self._skip(f"{runner.name} at {', '.join(left_out)}", why, stage.name)
        return [spec for _, spec in found]

    def _measure_round(
        self, stage: Stage, measured: Measured, runner: Runner, spec: RunSpec, samples: list[Sample]
    ) -> bool:
        def measure() -> None:
            before = self.target.read()
            sample = runner.run(spec)
            spent = self.target.since(before)
            if isinstance(runner, WorkerRival | Workers):
                sample = replace(sample, server_cpu=spent.cpu, commands=spent.commands)
                self._judge(stage, runner, sample, spent)
            samples.append(sample)
            self._count_connections(stage, measured, runner)

        return self._attempt(stage, runner, measure)

    def _judge(self, stage: Stage, runner: WorkerRival | Workers, sample: Sample, spent: Meter) -> None:
        ours = runner.name.partition("#")[0] in OURS
        # A kept lease changes no key
        counted = spent if self.target.private and runner.name.partition("#")[0] != KEPT else None
        where = f"{stage.name}, {runner.name}"
        # The last release of each client, which it did not wait for, may be on its way
        late = stage.parameters["lanes"] if runner.name.partition("#")[0] == UNCONFIRMED else 0
        if not isinstance(runner, Workers):
            found = inconsistencies(sample, counted, late)
        else:
            found = [*contended_inconsistencies(sample, counted, runner.due - late), *runner.wrong]
            errors = f"{where}: {sample.failures} calls failed: {'; '.join(runner.errors)}" if runner.errors else ""
            if errors and ours:
                found = [*found, errors.partition(": ")[2]]
            elif errors:
                self.notes.append(scrub(errors, self.target.url))
        for problem in found:
            self._fail(f"{where}: {problem}")

    def _label(self, stage: Stage, runner: Runner) -> str:
        return f"{self.prefix}:{stage.name}:{runner.name.replace(' ', '-')}"

    def _count_connections(self, stage: Stage, measured: Measured, runner: Runner) -> None:
        if isinstance(runner, WorkerRival | Workers):
            count = self.target.connections(self._label(stage, runner))
            measured.connections[runner.name] = max(measured.connections.get(runner.name, 0), count)

    def _attempt(self, stage: Stage, runner: Runner, action: Callable[[], None]) -> bool:
        try:
            action()
        except Exception as error:  # any error costs this rival its row, and no other rival
            self._fail(f"{stage.name}, {runner.name}: {type(error).__name__}: {error}")
            self._discard(stage, runner)
            return False
        return True

    def _discard(self, stage: Stage, runner: Runner) -> None:
        """End a runner that failed: its workers may be dead, or about to send answers that are not awaited any more."""
        gone = self._rivals.pop((runner.name, stage.unit == "grants"), None)
        with suppress(Exception):  # that it failed is noted already
            (gone.end if gone else runner.close)()

    def _fail(self, text: str) -> None:
        self.failures.append(scrub(text, self.target.url))

    def _check_leftovers(self, stage: Stage) -> None:
        by_design = tuple(
            key for participant in self.plan.participants if participant.entry for key in participant.entry.leaves
        )
        left = self.target.leftovers(self.prefix, by_design)
        if left:
            self._fail(f"{stage.name}: {len(left)} keys left behind, such as {left[0]!r}")
        self.target.sweep(self.prefix)


def _why_missing(participant: Participant) -> str:
    """Why this rival cannot run on this machine; '' if it can."""
    entry = participant.entry
    if entry is not None and entry.env == COMPILED and find_spec("fastlock._core") is None:
        return "the core is not compiled"
    if entry is not None and entry.needs and find_spec(entry.needs[0]) is None:
        return f"not installed: pip install {entry.needs[1]}"
    return ""


def accepts(runner: Runner, spec: RunSpec) -> bool:
    """Whether a runner is asked for this run, which may have too many clients for its rival."""
    return spec.contest is None or not isinstance(runner, Workers) or runner.accepts(spec.contest)


def inconsistencies(sample: Sample, counted: Meter | None, late: int = 0) -> Sequence[str]:
    """What about a sample cannot be true. ``counted``: what the server counted, None if it has other users. ``late``:
    releases that it may not have executed yet."""
    found = []
    if sample.grants == 0:
        found.append("no pair was made")
    if not sample.acquired == sample.released == sample.grants:
        found.append(f"{sample.acquired} acquired, {sample.released} released, {sample.grants} pairs claimed")
    if counted is not None and counted.changes < 2 * sample.grants - late:
        found.append(f"the server counted {counted.changes} key changes for {sample.grants} pairs, two each are due")
    return found


def contended_inconsistencies(sample: Sample, counted: Meter | None, due: int) -> Sequence[str]:
    """What about the sample of a contest cannot be true; calls may fail there, and are counted. ``due``: key changes
    without which the server cannot have granted what was granted."""
    found = []
    if not sample.failures and sample.released != sample.acquired:
        found.append(f"{sample.acquired} acquired, {sample.released} released, and no call failed")
    if counted is not None and counted.changes < due:
        found.append(f"the server counted {counted.changes} key changes for {sample.acquired} grants, {due} are due")
    if counted is not None and sample.sent is not None and counted.commands < sample.sent:
        found.append(f"{sample.sent} commands sent by its own count, the server ran {counted.commands}")
    return found


__all__ = ["Measured", "Runner", "Session", "accepts", "contended_inconsistencies", "inconsistencies"]
