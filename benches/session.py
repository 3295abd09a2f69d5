"""A run: scenarios, rounds, rivals in turn; what was measured, and whether it is true.

Law: within a round every rival plays once, in an order that rotates from round to round; warm-ups are apart and count
for nothing. A number whose acquires, releases and claimed pairs differ, or that the server's own counter does not bear
out, or that leaves a key behind, fails the run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Protocol

import redis

from fastlock._console import Progress

from . import raw
from .ceiling import Ceiling, RoundTrip, find_tool
from .rivals import BASELINE, RIVALS
from .scenarios import SCENARIOS, Scenario
from .stats import Row, Sample, summarize
from .target import Target
from .workers import Meanwhile, WorkerError, WorkerRival


@dataclass(frozen=True)
class Plan:
    """Which scenarios, how many rounds, how long each run is."""

    scenarios: tuple[str, ...]
    rounds: int
    seconds: float


class Player(Protocol):
    """Whoever takes part in a scenario: a rival's worker, the ceiling, the round trip."""

    name: str
    versions: dict[str, str]

    def open(self, scenario: str, label: str) -> None: ...

    def run(self, seconds: float, meanwhile: Meanwhile | None = None) -> Sample: ...

    def close(self) -> None: ...


@dataclass
class Session:
    """Plays a plan against a target. All that was measured so far can be read at any time, also after Ctrl-C."""

    target: Target
    plan: Plan
    progress: Progress = field(default_factory=lambda: Progress(sys.stderr))
    samples: dict[str, dict[str, list[Sample]]] = field(default_factory=dict)
    connections: dict[tuple[str, str], int] = field(default_factory=dict)
    versions: dict[str, dict[str, str]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    prefix: str = field(default_factory=lambda: f"fastlock-bench:{os.urandom(6).hex()}")
    _workers: dict[str, WorkerRival] = field(default_factory=dict)

    def run(self) -> None:
        """Play everything. Ctrl-C comes through; call ``end`` in any case."""
        try:
            for name in self.plan.scenarios:
                self._play(SCENARIOS[name])
        finally:
            self.progress.clear()

    def end(self) -> None:
        """End the workers, then remove what they may have left."""
        for worker in self._workers.values():
            worker.end()
        self._workers.clear()
        try:
            self.target.sweep(self.prefix)
        except redis.RedisError as error:
            if not self.target.private:  # a private server took its keys along
                self.failures.append(f"keys {self.prefix}* could not be removed: {error}")

    def rows(self) -> dict[str, dict[str, Row]]:
        """What was measured, by scenario and rival."""
        return {
            scenario: {
                rival: summarize(rival, ours, rivals.get(BASELINE, []), self.connections.get((scenario, rival)))
                for rival, ours in rivals.items()
                if ours
            }
            for scenario, rivals in self.samples.items()
        }

    def _play(self, scenario: Scenario) -> None:
        if scenario.loop and find_spec(scenario.loop) is None:
            self.skipped[scenario.name] = f"{scenario.loop} is not installed"
            return
        players = [player for player in self._players(scenario) if self._open(scenario, player)]
        self._rounds(scenario, players)
        for player in players:  # not after Ctrl-C: a worker may be at work then, and ``end`` ends it
            self._guard(scenario, player, player.close)
        self._look_for_keys(scenario)

    def _rounds(self, scenario: Scenario, players: Sequence[Player]) -> None:
        taken, active = self.samples.setdefault(scenario.name, {}), list(players)
        for player in players:
            taken[player.name] = []  # in this order in the table, whoever begins
        for number in range(self.plan.rounds):
            turn = number % max(1, len(active))
            for player in active[turn:] + active[:turn]:
                now = f"round {number + 1}/{self.plan.rounds}, {player.name}"
                self.progress.show(f"fastlock bench: {scenario.name}, {now}")
                if not self._round(scenario, player, taken[player.name]):
                    active.remove(player)

    def _players(self, scenario: Scenario) -> list[Player]:
        players: list[Player] = []
        for name, entry in RIVALS.items():
            if entry.only and scenario.name not in entry.only:
                continue
            worker = self._worker(name)
            if worker is not None:
                players.append(worker)
        if scenario.name in ("pair", "batch"):
            players += self._bystanders(scenario)
        return players

    def _worker(self, name: str) -> WorkerRival | None:
        if name not in self._workers and name not in self.skipped:
            if name == "fastlock" and find_spec("fastlock._core") is None:
                self.skipped[name] = "the core is not compiled"
            else:
                try:
                    self._workers[name] = WorkerRival(name, self.target.url)
                    self.versions[name] = self._workers[name].versions
                except WorkerError as error:
                    self.skipped[name] = "its worker did not start"
                    self.failures.append(str(error))
        return self._workers.get(name)

    def _bystanders(self, scenario: Scenario) -> list[Player]:
        tool = find_tool()
        if not raw.reachable(self.target.url):
            self.skipped["ceiling" if scenario.name == "batch" else "round trip"] = "TLS or a password"
        elif scenario.name == "pair":
            return [RoundTrip(self.target)]
        elif tool is None:
            self.skipped["ceiling"] = "neither valkey-benchmark nor redis-benchmark is on PATH"
        else:
            return [Ceiling(self.target, tool)]
        return []

    def _open(self, scenario: Scenario, player: Player) -> bool:
        """Connect and warm up. False: the player is out of this scenario."""
        self.progress.show(f"fastlock bench: {scenario.name}, warm-up, {player.name}")

        def warm_up() -> None:
            player.open(scenario.name, self._label(scenario, player))
            player.run(self.plan.seconds, lambda: self._count_connections(scenario, player))

        if not self._guard(scenario, player, warm_up):
            with suppress(Exception):  # it failed already, and says so
                player.close()
            return False
        self.versions[player.name] = player.versions
        return True

    def _round(self, scenario: Scenario, player: Player, taken: list[Sample]) -> bool:
        def measure() -> None:
            changes, cpu = self.target.changes(), self.target.cpu()
            sample = player.run(self.plan.seconds)
            cpu, changes = self.target.cpu() - cpu, self.target.changes() - changes
            if isinstance(player, WorkerRival):
                sample = replace(sample, server_cpu=cpu)
                found = lies(sample, changes if self.target.private else None)
                self.failures += [f"{scenario.name}, {player.name}: {lie}" for lie in found]
            taken.append(sample)
            self._count_connections(scenario, player)

        return self._guard(scenario, player, measure)

    def _label(self, scenario: Scenario, player: Player) -> str:
        return f"{self.prefix}:{scenario.name}:{player.name.replace(' ', '-')}"

    def _count_connections(self, scenario: Scenario, player: Player) -> None:
        if isinstance(player, WorkerRival):
            cell, count = (scenario.name, player.name), self.target.connections(self._label(scenario, player))
            self.connections[cell] = max(self.connections.get(cell, 0), count)

    def _guard(self, scenario: Scenario, player: Player, action: Callable[[], None]) -> bool:
        try:
            action()
        except Exception as error:  # whatever it is: it costs this cell, not what was measured elsewhere
            self.failures.append(f"{scenario.name}, {player.name}: {type(error).__name__}: {error}")
            return False
        return True

    def _look_for_keys(self, scenario: Scenario) -> None:
        left = self.target.leftovers(self.prefix)
        if left:
            self.failures.append(f"{scenario.name}: {len(left)} keys left behind, such as {left[0]!r}")
            self.target.sweep(self.prefix)


def lies(sample: Sample, changes: int | None) -> Sequence[str]:
    """What is not true about a sample. ``changes``: key changes that the server counted, None if others use it too."""
    found = []
    if sample.pairs == 0:
        found.append("no pair was made")
    if not sample.acquired == sample.released == sample.pairs:
        found.append(f"{sample.acquired} acquired, {sample.released} released, {sample.pairs} pairs claimed")
    if changes is not None and changes < 2 * sample.pairs:
        found.append(f"the server counted {changes} key changes for {sample.pairs} pairs, two each are due")
    return found
