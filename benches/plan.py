"""The plan of a run: which scenarios, who runs them, how long and how often; out of what the command line said.

These are values only, decided before anything is started. An option that would change nothing, or a combination that
cannot be measured, is refused with one line that says why.
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
from .workers import Turn

FULL, QUICK = (5, 0.5), (3, 0.1)
"""Rounds, and seconds of one run."""

FULL_BUDGET, QUICK_BUDGET = 810.0, 45.0
"""Seconds in which all should be over, unless rounds or their length are given."""

WARM_UP = 0.4
"""Of the length of a run."""

MOST_ARRIVALS = 1_000_000
"""In a run of an open loop: they are drawn beforehand."""

CEILING = "ceiling"
"""A runner without a worker: the server's own benchmark tool."""

HIREDIS = "hiredis"
"""Another: that tool as one caller in C, with one command at a time."""

REFERENCES = (ALONE, HIREDIS)
"""Who is measured beside fastlock without being asked, in the one scenario whose measure it is."""

NAME = re.compile(r'[!"$-~]*')
"""What --rival takes: it becomes part of keys and tables, and ``#`` tells a rival from its control."""

LEFT_OUT, LEFT_OUT_OF_LONG = ("dropin", "pottery"), ("fallback", "python-redis-lock")
"""Rivals that --quick runs only if they are asked for; those that it leaves out of sweeps, storms, crashes and crowds
too."""

SCENARIO_NAMES = (*uncontended.SCENARIOS, *contests.SCENARIOS)


@dataclass(frozen=True)
class Entrant:
    """A place at the table: the label in it, and the rival who sits there (``entry`` None: the benchmark tool)."""

    label: str
    rival: str
    entry: Entry | None

    def again(self, number: int) -> Entrant:
        """The same rival once more."""
        return replace(self, label=f"{self.rival}#{number}")

    @property
    def special(self) -> bool:
        """Whether it is there for a few scenarios only, as an upper bound or a variant, and not missed elsewhere."""
        return self.entry is None or self.entry.faces == ("batch",) or bool(self.entry.scenarios)

    def cannot(self, scenario: str, face: str) -> str:
        """Why this rival cannot run ``scenario`` on ``face``; '' if it can."""
        faces = self.entry.faces if self.entry else ("batch",)
        if self.entry and self.entry.scenarios and scenario not in self.entry.scenarios:
            return f"runs {', '.join(self.entry.scenarios)} only"
        return "" if face in faces else f"runs {' and '.join(faces)} only"


@dataclass(frozen=True)
class Stage:
    """A scenario as it will be measured: ``turns`` are (x, Turn), x None where nothing is swept."""

    name: str
    title: str
    kind: str
    unit: str
    face: str
    rounds: int
    turns: tuple[tuple[float | None, Turn], ...]
    parameters: Mapping[str, Any]
    loop: str = ""

    def warm_up(self, turns: Sequence[Turn]) -> Turn | None:
        """A short run of all clients that counts for nothing, to open connections. None: who waits for a dead holder
        has the time to warm up."""
        turn = max(turns, key=lambda turn: turn.contest.clients if turn.contest else 0)
        contest = turn.contest
        if contest is not None and contest.role == "crash":
            return None
        if contest is not None:
            contest = replace(contest, role="", laps=0, cut=True, rate=0.0)
        return replace(turn, seconds=WARM_UP * turn.seconds, contest=contest)

    @property
    def volatile_keys(self) -> int:
        """Other keys that are to be in the server meanwhile."""
        return max(turn.contest.volatile_keys if turn.contest else 0 for _, turn in self.turns)

    @property
    def sweep(self) -> bool:
        """Whether it has points instead of rows."""
        return self.kind in ("waiters", "load")


@dataclass(frozen=True)
class Plan:
    """What ``Session`` runs.

    left_out: who is not asked to run which scenario, and why. chosen: whether rivals were named. budget: seconds in
    which all should be over; who is late runs fewer rounds.
    """

    stages: tuple[Stage, ...]
    entrants: tuple[Entrant, ...]
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
        """The parameters of the schema."""
        return {
            "scenarios": list(self.scenarios),
            "rivals": [entrant.label for entrant in self.entrants],
            "rounds": self.rounds,
            "seconds": self.seconds,
            "quick": self.quick,
            **self.given,
        }


@dataclass(frozen=True)
class Wishes:
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

    def given(self) -> dict[str, Any]:
        """The options of contention that were given, by their names on the command line."""
        values = {name: getattr(self, name) for name in CHANGES if name != "try"}
        found = {name: value for name, value in values.items() if value not in (None, ())}
        return {**found, **({"try": True} if self.try_lock else {})}


def make_plan(wishes: Wishes) -> Plan:
    """The plan of these wishes. Raises Refusal for what makes no sense."""
    chosen = tuple(name for name in SCENARIO_NAMES if name in (wishes.scenarios or SCENARIO_NAMES))
    given = wishes.given()
    for option in given:
        if not any(name in CHANGES[option] for name in chosen):
            raise Refusal(f"--{option} changes {', '.join(CHANGES[option])}, but not {' or '.join(chosen)}")
    standard = QUICK if wishes.quick else FULL
    rounds, seconds = wishes.rounds or standard[0], wishes.seconds or standard[1]
    stages = tuple(
        _contested(contests.SCENARIOS[name], wishes, rounds, given)
        if name in contests.SCENARIOS
        else _uncontended(uncontended.SCENARIOS[name], rounds, seconds)
        for name in chosen
    )
    entrants = tuple(_entrants(wishes.rivals))
    plan = Plan(
        stages,
        entrants,
        rounds,
        seconds,
        wishes.quick,
        _plain(given),
        _left_out(stages, entrants, wishes),
        bool(wishes.rivals),
        None if wishes.rounds or wishes.seconds else QUICK_BUDGET if wishes.quick else FULL_BUDGET,
    )
    if not any(not entrant.cannot(stage.name, stage.face) for stage in stages for entrant in entrants):
        raise Refusal(f"nobody can run: {_who_cannot(stages[0], entrants)}")
    return plan


def _plain(given: Mapping[str, Any]) -> dict[str, Any]:
    found = {key: list(value) if isinstance(value, tuple) else value for key, value in given.items()}
    return found | ({"names": "unique"} if found.get("names") == OWN else {})


def _who_cannot(stage: Stage, entrants: Sequence[Entrant]) -> str:
    said = [f"{entrant.label} {entrant.cannot(stage.name, stage.face)}" for entrant in entrants]
    return "; ".join(f"{stage.name} wants {stage.face}, {text}" for text in said)


def _entrants(names: Sequence[str]) -> list[Entrant]:
    """A entrant for each name; a second one of the same name gets a number."""
    entrants: list[Entrant] = []
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
        if any(entrant.rival == label and entrant.entry != entry for entrant in entrants):
            raise Refusal(f"--rival {name}: {label} is the name of another module already")
        repeats = sum(entrant.rival == label for entrant in entrants)
        if repeats and entry is None:
            raise Refusal(f"--rival {name}: once is enough, it is no lock")
        entrant = Entrant(label, label, entry)
        entrants.append(entrant.again(repeats + 1) if repeats else entrant)
    return entrants


def _left_out(stages: Sequence[Stage], entrants: Sequence[Entrant], wishes: Wishes) -> dict[tuple[str, str], str]:
    if not wishes.quick or wishes.rivals:
        return {}
    found = {}
    for stage in stages:
        long = stage.sweep or stage.name in ("storm", "crash", *contests.CROWDS)
        for entrant in entrants:
            left_out = (*LEFT_OUT, *(LEFT_OUT_OF_LONG if long else ()))
            if entrant.rival in left_out and not entrant.cannot(stage.name, stage.face):
                found[entrant.label, stage.name] = f"--quick leaves it out; ask for it by --rival {entrant.rival}"
    return found


def _uncontended(scenario: uncontended.Scenario, rounds: int, seconds: float) -> Stage:
    parameters = {
        "processes": 1,
        "lanes": scenario.clients,
        "face": scenario.face,
        "loop": scenario.loop or None,
        "names": scenario.names,
        "hold_ms": 0,
        "seconds": seconds,
        "rounds": rounds,
    }
    turns = ((None, Turn(seconds)),)
    return Stage(
        scenario.name, scenario.title, "pair", "pairs", scenario.face, rounds, turns, parameters, scenario.loop
    )


def _contested(scenario: contests.Scenario, wishes: Wishes, rounds: int, given: Mapping[str, Any]) -> Stage:
    mine = {option for option in given if scenario.name in CHANGES[option]}
    contest = _changed(scenario, wishes, mine)
    open_loop = wishes.rate if "rate" in mine and (wishes.scenarios or scenario.kind == "load") else ()
    if len(open_loop) > 1 and scenario.kind != "load":
        raise Refusal(f"--rate: {scenario.name} takes one rate, a list is for load")
    swept = contests.points(
        replace(scenario, contest=contest), wishes.quick, wishes.waiters if "waiters" in mine else (), open_loop
    )
    seconds = scenario.quick_seconds if wishes.quick else scenario.seconds
    if wishes.seconds and not contest.role:  # a storm and a crash last as long as it takes
        seconds = wishes.seconds
    rounds = wishes.rounds or (scenario.quick_rounds if wishes.quick else None) or rounds
    parameters = {**swept[0][1].as_dict(), "seconds": seconds, "rounds": rounds}
    if scenario.kind == "waiters":
        parameters |= {"lanes": max(found.clients for _, found in swept), "waiters": [x for x, _ in swept]}
    if scenario.kind == "load":
        parameters["rate"] = [x for x, _ in swept]
    if max(found.rate for _, found in swept) * seconds > MOST_ARRIVALS:
        raise Refusal(f"--rate: more than {MOST_ARRIVALS:,} arrivals in a run of {seconds:g} seconds")
    longer = contests.ARRIVING if scenario.kind == "waiters" and not wishes.seconds else 0.0
    turns = tuple((x, Turn(seconds + longer * found.clients, found)) for x, found in swept)
    loop = contest.loop if contest.face == "tasks" else ""
    return Stage(scenario.name, scenario.title, scenario.kind, "grants", contest.face, rounds, turns, parameters, loop)


def _changed(scenario: contests.Scenario, wishes: Wishes, mine: set[str]) -> Contest:
    """The contest of the scenario with what the command line changes in it."""
    contest = scenario.contest
    processes = wishes.processes or contest.processes
    least = 2 if scenario.name in ("handover", "crash") else 1
    if processes < least:
        raise Refusal(f"{scenario.name} needs {least} processes: one to hold the name and one to wait for it")
    per_process = wishes.threads or wishes.tasks
    fresh = -(-contest.clients // contest.processes)
    clients = processes * (per_process or fresh)
    if scenario.name == "crash":  # the victim has a process of its own
        clients = max(contest.names, (processes - 1) * (per_process or contest.clients // (contest.processes - 1)))
    changed: dict[str, Any] = {"processes": processes, "clients": clients}
    if wishes.threads or wishes.tasks:
        changed["face"] = "threads" if wishes.threads else "tasks"
    if "names" in mine:
        changed["names"] = wishes.names
        if scenario.name == "crash":
            if wishes.names == OWN:
                raise Refusal("crash: those who wait must want the names of the one that is killed, not their own")
            changed["clients"] = max(clients, wishes.names or 1)
    if "zipf" in mine and changed.get("names", contest.names) > 1:
        changed["zipf"] = wishes.zipf
    elif "zipf" in mine and wishes.scenarios:
        raise Refusal(f"--zipf: {scenario.name} has no names to choose among; add --names, or choose zipf")
    if "hold" in mine:
        changed["hold"] = (wishes.hold or 0.0) / 1e3
    if "try" in mine:
        changed["blocking"] = False
    return replace(contest, **changed)
