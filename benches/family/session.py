"""What the three parts share: the settings of a run, the worker processes, and what went wrong.

Within a round each case runs once, in an order that rotates from round to round; one process works at a time, or those
of one contest. A library that is not installed is left out and named; anything else that a worker cannot do fails the
run, and costs its own case only. Never here: what a part measures.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from typing import Any, TypeVar

from fastlock._cli.console import Progress, scrub

from ..processes import end_all
from ..rivals import Entry
from ..target import PREFIX, Target
from ..workers import RivalMissing, WorkerError, WorkerProcess
from .cases import Case
from .options import PARTS

T = TypeVar("T")

PROGRAM = "family.worker"

LEAVE_SECONDS = 1.0
"""How long workers may take to leave in the middle of an order, before they are killed."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a run measures. seconds: of a run of pairs; contest_seconds: of one of contention; rtt: seconds of a round
    trip, 0: no network; periods: thirds of a lease over which renewal is measured."""

    quick: bool
    parts: tuple[str, ...]
    apis: tuple[str, ...]
    rounds: int
    contest_rounds: int
    seconds: float
    contest_seconds: float
    rtt: float
    processes: int
    hold: float
    readers: int
    writers: int
    callers: int
    permits: int
    leases: int
    lease: float
    periods: int = 3

    def as_dict(self) -> dict[str, Any]:
        """The settings as plain values."""
        return asdict(self)


@dataclass
class Session:
    """One run: its server, the prefix of its keys, its processes. failures: what makes it fail; skipped: what was left
    out, and why; notes: what rivals did wrong; versions: what the workers' libraries report."""

    target: Target
    settings: Settings
    progress: Progress
    prefix: str = field(default_factory=lambda: f"{PREFIX}:{os.urandom(6).hex()}")
    failures: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    versions: dict[str, dict[str, str]] = field(default_factory=dict)
    stopped: KeyboardInterrupt | None = None
    _processes: list[WorkerProcess] = field(default_factory=list)
    _leaves: set[str] = field(default_factory=set)

    def show(self, part: str, text: str, done: float) -> None:
        """Show what is being measured. Raises KeyboardInterrupt, if the user sent one that a library swallowed."""
        if self.stopped is not None:
            raise self.stopped
        parts = [each for each in PARTS if each in self.settings.parts]
        whole = (parts.index(part) + min(1.0, done)) / len(parts)
        self.progress.show(f"fastlock bench family: {part}, {text}", whole)

    def start(self, cases: Sequence[Case], each: int = 1) -> dict[str, list[WorkerProcess]]:
        """Start processes for cases; a case's name leads to them. Where there are several for `each`, the cases of a
        library share them."""
        wanted = [case for case in dict.fromkeys(cases) if self._can_run(case)]
        keys = {case.name: case.module if each > 1 else case.name for case in wanted}
        started: dict[str, list[WorkerProcess]] = {}
        for case in wanted:
            if keys[case.name] not in started:
                entry = Entry(f"{__package__}.{case.module}")
                started[keys[case.name]] = [WorkerProcess(case.name, entry, PROGRAM) for _ in range(each)]
                self._processes += started[keys[case.name]]
            self._leaves |= set(case.leaves)
        there = {key for key, processes in started.items() if self._greet(key, processes)}
        return {name: started[key] for name, key in keys.items() if key in there}

    def _can_run(self, case: Case) -> bool:
        if case.needs is not None and find_spec(case.needs[0]) is None:
            self.skipped[case.name] = f"not installed: pip install {case.needs[1]}"
            return False
        for api in set(self.settings.apis) - set(case.apis):
            self.skipped[f"{case.name}, {api}"] = "it has none"
        return bool(set(self.settings.apis) & set(case.apis))

    def _greet(self, key: str, processes: Sequence[WorkerProcess]) -> bool:
        try:
            for process in processes:
                self.versions[key] = process.greet()
        except RivalMissing as error:
            self.skipped[key] = str(error)
        except WorkerError as error:
            self.fail(str(error))
        else:
            return True
        end_all(processes)
        return False

    def attempt(self, where: str, action: Callable[[], T]) -> T | None:
        """Do something with a worker; None: it failed, which is noted."""
        try:
            return action()
        except Exception as error:  # it costs this case its row, and no other case
            self.fail(f"{where}: {type(error).__name__}: {error}")
            return None

    def fail(self, text: str) -> None:
        """Note what makes the run fail."""
        self.failures.append(scrub(text, self.target.url))

    def note(self, text: str) -> None:
        """Note what a rival did wrong, once."""
        if (text := scrub(text, self.target.url)) not in self.notes:
            self.notes.append(text)

    def disconnect(self, started: Iterable[Sequence[WorkerProcess]]) -> None:
        """Have workers close what they have opened."""
        for process in dict.fromkeys(process for each in started for process in each):
            with suppress(WorkerError):  # it failed before, which is noted
                process.ask("close")

    def finish(self, started: Iterable[Sequence[WorkerProcess]], what: str) -> None:
        """Disconnect and end workers, and see whether they left keys behind."""
        started = list(started)
        self.disconnect(started)
        processes = [process for each in started for process in each]
        end_all(processes)
        self._processes = [process for process in self._processes if process not in processes]
        left = self.target.leftovers(self.prefix, tuple(self._leaves))
        if left:
            self.fail(f"{what}: {len(left)} keys left behind, such as {left[0]!r}")
        self.target.sweep(self.prefix)

    def end(self) -> None:
        """End all processes that still run, after an error or Ctrl-C in the middle of an order, and remove all keys of
        the run."""
        self.progress.clear()
        end_all(self._processes, LEAVE_SECONDS)
        with suppress(Exception):  # the server may be gone, which is known by now
            self.target.sweep(self.prefix)


def rotated(items: Sequence[T], number: int) -> list[T]:
    """The order of a round: each item comes first in turn."""
    at = number % max(1, len(items))
    return [*items[at:], *items[:at]]
