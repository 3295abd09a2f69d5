"""The plan of a run: which scenarios, which rivals, how long and how often; made from the options of the command line.

What lives here: values, decided before anything is started. An option that would change nothing, or a combination that
cannot be run, is refused with one line that says why. Never here: processes, servers, measuring.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fastlock._cli.console import Refusal

from . import scenarios as uncontended
from .contention import contests
from .contention.contests import CHANGES, OWN, Contest
from .rivals import ALONE, RIVALS, Entry
from .workers import RunSpec

FULL, QUICK = (5, 0.5), (3, 0.1)
"""Rounds, and seconds of one run."""

FULL_BUDGET, QUICK_BUDGET = 810.0, 45.0
"""Seconds in which a run should be over, unless rounds or their length are given."""

WARM_UP = 0.4
"""Length of a warm-up, as a part of the length of a run."""

MOST_ARRIVALS = 1_000_000
"""Arrivals in a run of an open loop at most: they are drawn beforehand."""

CEILING = "ceiling"
"""A participant without a worker: the server's own benchmark tool."""

HIREDIS = "hiredis"
"""A participant without a worker: the benchmark tool as one caller in C, with one command at a time."""

REFERENCES = (ALONE, HIREDIS)
"""References, which run beside fastlock without being asked for, each in the one scenario that it is a measure of."""

NETWORKED = ("pair", "threads", "tasks", "hot", "handover", "recall", "flash-sale")
"""Scenarios that --rtt runs through a network."""

NAME = re.compile(r'[!"$-~]*')
"""What --rival takes: it becomes part of keys and tables, and ``#`` tells a second participant of a rival from the
first."""

LEFT_OUT, LEFT_OUT_OF_LONG = ("dropin", "pottery"), ("fallback", "python-redis-lock")
"""Rivals that --quick runs only if they are asked for; those that it also leaves out of sweeps, storms, crashes and
crowds."""

SCENARIO_NAMES = (*uncontended.SCENARIOS, *contests.SCENARIOS)


@dataclass(frozen=True)
class Participant:
    """A rival that takes part in the run, under a label of its own (``entry`` None: the benchmark tool)."""

    label: str
    rival: str
    entry: Entry | None

    def numbered(self, number: int) -> Participant:
        """The same rival once more, with a number in its label."""
        return replace(self, label=f"{self.rival}#{number}")

    @property
    def special(self) -> bool:
        """Whether the rival is an upper bound or a variant, which is meant for a few scenarios only."""
        return self.entry is None or self.entry.apis == ("batch",) or bool(self.entry.scenarios)

    def cannot(self, scenario: str, api: str) -> str:
        """Why this rival cannot run ``scenario`` by ``api``; '' if it can."""
        apis = self.entry.apis if self.entry else ("batch",)
        if self.entry and self.entry.scenarios and scenario not in self.entry.scenarios:
            return f"runs {', '.join(self.entry.scenarios)} only"
        return "" if api in apis else f"runs {' and '.join(apis)} only"


@dataclass(frozen=True)
class Stage:
    """A scenario as it will be run: ``specs`` are (x, RunSpec), x None where nothing is swept."""

    name: str
    title: str
    kind: str
    unit: str
    api: str
    rounds: int
    specs: tuple[tuple[float | None, RunSpec], ...]
    parameters: Mapping[str, Any]
    loop: str = ""

    def warm_up(self, specs: Sequence[RunSpec]) -> RunSpec | None:
        """A short run of all clients that is not counted, to open connections. None for a crash, in which those that
        wait for the dead holder have the time to warm up."""
        spec = max(specs, key=lambda spec: spec.contest.clients if spec.contest else 0)
        contest = spec.contest
        if contest is not None and contest.role == "crash":
            return None
        if contest is not None:
            contest = replace(contest, role="", laps=0, cut=True, rate=0.0, asking=0.0)
        return replace(spec, seconds=WARM_UP * spec.seconds, contest=contest)

    @property
    def volatile_keys(self) -> int:
        """The number of other keys that are to be in the server while the scenario runs."""
        return max(spec.contest.volatile_keys if spec.contest else 0 for _, spec in self.specs)

    @property
    def sweep(self) -> bool:
        """Whether the scenario has points instead of rows."""
        return self.kind in ("waiters", "load", "rtt")


@dataclass(frozen=True)
class Plan:
    """What ``Session`` runs.

    left_out: {(participant, scenario): why it is left out}. chosen: whether rivals were named. budget: seconds in which
    the run should be over; a scenario that is late has fewer rounds.
    """

    stages: tuple[Stage, ...]
    participants: tuple[Participant, ...]
    rounds: int
    seconds: float
    quick: bool = False
    given: Mapping[str, Any] = field(default_factory=dict)
    left_out: Mapping[tuple[str, str], str] = field(default_factory=dict)
    chosen: bool = False
    budget: float | None = None

    @property
    def scenarios(self) -> tuple[str, ...]:
        """Names of the stages."""
        return tuple(stage.name for stage in self.stages)

    def as_dict(self) -> dict[str, Any]:
        """The parameters of the run, as in the schema."""
        return {
            "scenarios": list(self.scenarios),
            "rivals": [participant.label for participant in self.participants],
            "rounds": self.rounds,
            "seconds": self.seconds,
            "quick": self.quick,
            **self.given,
        }


@dataclass(frozen=True)
class Options:
    """The options of the command line that shape a plan; None or empty where not given. ``hold`` in milliseconds."""

    scenarios: Sequence[str] = ()
    rivals: Sequence[str] = ()
    quick: bool = False
    rounds: int | None = None
    seconds: float | None = None
    processes: int | None = None
    threads: int | None = None
    tasks: int | None = None
    names: int | None = None
    zipf: float | None = None
    hold: float | None = None
    waiters: tuple[int, ...] = ()
    rate: tuple[float, ...] = ()
    try_lock: bool = False
    rtt: tuple[float, ...] = ()

    def given(self) -> dict[str, Any]:
        """The options of contention that were given, by their names on the command line."""
        values = {name: getattr(self, name) for name in CHANGES if name != "try"}
        found = {name: value for name, value in values.items() if value not in (None, ())}
        return {**found, **({"try": True} if self.try_lock else {})}


def make_plan(options: Options) -> Plan:
    """Make the plan of these options. Raises Refusal for options that make no sense together."""
    every = NETWORKED if options.rtt else SCENARIO_NAMES
    chosen = tuple(name for name in SCENARIO_NAMES if name in (options.scenarios or every))
    for name in chosen:
        if name not in every:
            raise Refusal(f"--rtt: {name} is not run through a network, only {', '.join(NETWORKED)}")
    given = options.given()
    for option in given:
        if not any(name in CHANGES[option] for name in chosen):
            raise Refusal(f"--{option} changes {', '.join(CHANGES[option])}, but not {' or '.join(chosen)}")
    standard = QUICK if options.quick else FULL
    rounds, seconds = options.rounds or standard[0], options.seconds or standard[1]
    stages = tuple(
        _contested(contests.SCENARIOS[name], options, rounds, given)
        if name in contests.SCENARIOS
        else _uncontended(uncontended.SCENARIOS[name], rounds, seconds)
        for name in chosen
    )
    if options.rtt:
        stages = tuple(_networked(stage, options.rtt) for stage in stages)
    participants = tuple(_participants(options.rivals))
    plan = Plan(
        stages,
        participants,
        rounds,
        seconds,
        options.quick,
        _plain({**given, **({"rtt": options.rtt} if options.rtt else {})}),
        _left_out(stages, participants, options),
        bool(options.rivals),
        None if options.rounds or options.seconds else QUICK_BUDGET if options.quick else FULL_BUDGET,
    )
    if not any(not participant.cannot(stage.name, stage.api) for stage in stages for participant in participants):
        raise Refusal(f"no rival can run: {_why_none_can(stages[0], participants)}")
    return plan


def _plain(given: Mapping[str, Any]) -> dict[str, Any]:
    found = {key: list(value) if isinstance(value, tuple) else value for key, value in given.items()}
    return found | ({"names": "unique"} if found.get("names") == OWN else {})


def _why_none_can(stage: Stage, participants: Sequence[Participant]) -> str:
    said = [f"{participant.label} {participant.cannot(stage.name, stage.api)}" for participant in participants]
    return "; ".join(f"{stage.name} wants {stage.api}, {text}" for text in said)


def _participants(names: Sequence[str]) -> list[Participant]:
    """A participant for each name; a second one of the same name gets a number."""
    participants: list[Participant] = []
    for name in names or (*RIVALS, CEILING):
        label, _, module = name.partition("=")
        if not NAME.fullmatch(name):
            raise Refusal(f"--rival {name!a}: a name is of ASCII characters, and none of them is '#' or white space")
        if label != CEILING and not module and label not in RIVALS:
            known = ", ".join((*RIVALS, CEILING))
            raise Refusal(f"--rival {name}: no such rival; there are {known}, and NAME=MODULE for one of your own")
        if not label or (module and label in (*RIVALS, CEILING, *REFERENCES)):
            raise Refusal(f"--rival {name}: give a lock of your own a name that no other has")
        entry = None if label == CEILING else Entry(module) if module else RIVALS[label]
        if any(participant.rival == label and participant.entry != entry for participant in participants):
            raise Refusal(f"--rival {name}: {label} is the name of another module already")
        earlier = sum(participant.rival == label for participant in participants)
        if earlier and entry is None:
            raise Refusal(f"--rival {name}: once is enough, it is no lock")
        participant = Participant(label, label, entry)
        participants.append(participant.numbered(earlier + 1) if earlier else participant)
    return participants


def _left_out(
    stages: Sequence[Stage], participants: Sequence[Participant], options: Options
) -> dict[tuple[str, str], str]:
    if not options.quick or options.rivals:
        return {}
    found = {}
    for stage in stages:
        long = stage.sweep or stage.name in ("storm", "crash", *contests.CROWDS)
        for participant in participants:
            left_out = (*LEFT_OUT, *(LEFT_OUT_OF_LONG if long else ()))
            if participant.rival in left_out and not participant.cannot(stage.name, stage.api):
                found[participant.label, stage.name] = (
                    f"--quick leaves it out; ask for it by --rival {participant.rival}"
                )
    return found


def _uncontended(scenario: uncontended.Scenario, rounds: int, seconds: float) -> Stage:
    parameters = {
        "processes": 1,
        "lanes": scenario.clients,
        "face": scenario.api,  # the published name
        "loop": scenario.loop or None,
        "names": scenario.names,
        "hold_ms": 0,
        "seconds": seconds,
        "rounds": rounds,
    }
    specs = ((None, RunSpec(seconds)),)
    return Stage(scenario.name, scenario.title, "pair", "pairs", scenario.api, rounds, specs, parameters, scenario.loop)


def _networked(stage: Stage, rtt: tuple[float, ...]) -> Stage:
    """The same scenario at each of these round trips, in milliseconds."""
    ((_, spec),) = stage.specs
    specs = tuple((each, replace(spec, rtt=each / 1e3)) for each in rtt)
    return replace(stage, kind="rtt", specs=specs, parameters={**stage.parameters, "rtt_ms": list(rtt)})


def _contested(scenario: contests.Scenario, options: Options, rounds: int, given: Mapping[str, Any]) -> Stage:
    mine = {option for option in given if scenario.name in CHANGES[option]}
    contest = _changed(scenario, options, mine)
    open_loop = options.rate if "rate" in mine and (options.scenarios or scenario.kind == "load") else ()
    if len(open_loop) > 1 and scenario.kind != "load":
        raise Refusal(f"--rate: {scenario.name} takes one rate, a list is for load")
    swept = contests.points(
        replace(scenario, contest=contest), options.quick, options.waiters if "waiters" in mine else (), open_loop
    )
    seconds = scenario.quick_seconds if options.quick else scenario.seconds
    if options.seconds and not contest.role:  # a storm and a crash last as long as it takes
        seconds = options.seconds
    rounds = options.rounds or (scenario.quick_rounds if options.quick else None) or rounds
    parameters = {**swept[0][1].as_dict(), "seconds": seconds, "rounds": rounds}
    if scenario.kind == "waiters":
        parameters |= {"lanes": max(found.clients for _, found in swept), "waiters": [x for x, _ in swept]}
    if scenario.kind == "load":
        parameters["rate"] = [x for x, _ in swept]
    if max(found.rate for _, found in swept) * seconds > MOST_ARRIVALS:
        raise Refusal(f"--rate: more than {MOST_ARRIVALS:,} arrivals in a run of {seconds:g} seconds")
    longer = contests.ARRIVING if scenario.kind == "waiters" and not options.seconds else 0.0
    specs = tuple((x, RunSpec(seconds + longer * found.clients, found)) for x, found in swept)
    loop = contest.loop if contest.api == "tasks" else ""
    return Stage(scenario.name, scenario.title, scenario.kind, "grants", contest.api, rounds, specs, parameters, loop)


def _changed(scenario: contests.Scenario, options: Options, mine: set[str]) -> Contest:
    """The contest of the scenario with what the command line changes in it."""
    contest = scenario.contest
    processes = options.processes or contest.processes
    least = 2 if scenario.name in ("handover", "recall", "crash") else 1
    if processes < least:
        raise Refusal(f"{scenario.name} needs {least} processes: one to hold the name and one to wait for it")
    per_process = options.threads or options.tasks
    if options.rtt and scenario.name == "hot" and not per_process:
        per_process = 1  # each grant goes through the network
    fresh = -(-contest.clients // contest.processes)
    clients = processes * (per_process or fresh)
    if scenario.name == "crash":  # the victim has a process of its own
        clients = max(contest.names, (processes - 1) * (per_process or contest.clients // (contest.processes - 1)))
    changed: dict[str, Any] = {"processes": processes, "clients": clients}
    if options.threads or options.tasks:
        changed["api"] = "threads" if options.threads else "tasks"
    if "names" in mine:
        changed["names"] = options.names
        if scenario.name == "crash":
            if options.names == OWN:
                raise Refusal("crash: those who wait must want the names of the one that is killed, not their own")
            changed["clients"] = max(clients, options.names or 1)
    if "zipf" in mine and changed.get("names", contest.names) > 1:
        changed["zipf"] = options.zipf
    elif "zipf" in mine and options.scenarios:
        raise Refusal(f"--zipf: {scenario.name} has no names to choose among; add --names, or choose zipf")
    if "hold" in mine:
        changed["hold"] = (options.hold or 0.0) / 1e3
    if "try" in mine:
        changed["blocking"] = False
    return replace(contest, **changed)
