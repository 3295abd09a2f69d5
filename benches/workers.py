"""The parent's end of the workers: start them, give orders, read answers, end them.

Law: orders are under way at one rival at a time; the parent sleeps meanwhile. A worker that dies or falls silent is an
error of its rival, never a hang. A worker is ended by its own process id: by closing its standard input, and if it does
not leave then, by a kill.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from .contention.contests import Contest
from .rivals import Entry
from .stats import Sample

PATIENCE = 60.0
"""Seconds that a worker may take beyond the time that its run was given."""

LEAVE_SECONDS = 5.0
"""How long workers may take to leave, all together, before they are killed."""

LOOK_SECONDS = 0.02
"""Between two calls of what a run calls meanwhile."""

Meanwhile = Callable[[], object]


class WorkerError(Exception):
    """A rival failed: its worker reported an error, died, or did not answer."""


class RivalMissing(WorkerError):
    """A library of the rival is not installed."""


@dataclass(frozen=True)
class Turn:
    """One run: how long, and in contention what is played (``seed``: the same for all rivals of a round)."""

    seconds: float
    contest: Contest | None = None
    seed: int = 0


class WorkerProcess:
    """One worker: a process that answers orders. ``start`` it, then ``greet`` it, so that many start at once."""

    def __init__(self, name: str, entry: Entry, program: str) -> None:
        self.name = name
        env = {**os.environ, **entry.env, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.{program}", entry.module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=env,
            text=True,
            process_group=0,  # Ctrl-C is the parent's, also while this one still starts
        )
        assert self._process.stdin is not None and self._process.stdout is not None  # pipes, as asked for
        self._orders, self._answers = self._process.stdin, self._process.stdout

    def greet(self) -> dict[str, str]:
        """Wait until it is there: versions of its rival. Raises RivalMissing if a library is not installed."""
        return self.ask("hello")

    def ask(self, verb: str, **order: Any) -> dict[str, Any]:
        """Give an order and wait for the answer."""
        self.tell(verb, **order)
        return self.hear()

    def tell(self, verb: str, **order: Any) -> None:
        """Give an order."""
        with suppress(BrokenPipeError):  # its last words, if any, are read with the answer
            self._orders.write(json.dumps({"verb": verb, **order}) + "\n")
            self._orders.flush()

    def hear(self, patience: float = PATIENCE, meanwhile: Meanwhile | None = None) -> dict[str, Any]:
        """The answer to the last order; ``meanwhile`` is called every 20 ms, if given."""
        self._wait(patience, meanwhile)
        line = self._answers.readline()
        if not line:
            raise WorkerError(f"{self.name}: the worker ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise (RivalMissing if answer.get("missing") else WorkerError)(f"{self.name}: {answer['error']}")
        return answer

    def _wait(self, patience: float, meanwhile: Meanwhile | None) -> None:
        step = LOOK_SECONDS if meanwhile else patience
        while patience > 0:
            if select.select([self._answers], [], [], step)[0]:
                return
            patience -= step
            if meanwhile:
                meanwhile()
        self._process.kill()  # else its late answer would be taken for that to another order
        raise WorkerError(f"{self.name}: no answer from the worker")

    def dismiss(self) -> None:
        """Close its input: it leaves when it has read that."""
        with suppress(BrokenPipeError):  # it died with an order unread
            self._orders.close()

    def bury(self, patience: float) -> None:
        """Wait so long for it to leave, kill it if it does not."""
        try:
            self._process.wait(max(0.0, patience))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._answers.close()


def end_all(processes: Sequence[WorkerProcess]) -> None:
    """End them, all within ``LEAVE_SECONDS``."""
    for process in processes:
        process.dismiss()
    end = time.monotonic() + LEAVE_SECONDS
    for process in processes:
        process.bury(end - time.monotonic())


class WorkerRival:
    """A rival in a process of its own, where there is no contention. ``versions`` as its worker reports them."""

    def __init__(self, name: str, url: str, entry: Entry) -> None:
        self.name = name
        self._url = url
        self._process = WorkerProcess(name, entry, "worker")
        self.versions: dict[str, str] = {}

    def greet(self) -> None:
        """Wait until it is there."""
        self.versions = self._process.greet()

    def open(self, scenario: str, label: str, turns: Sequence[Turn]) -> None:
        """Connect for a scenario; ``label`` names the connections and begins the keys."""
        self._process.ask("open", scenario=scenario, url=self._url, label=label)

    def run(self, turn: Turn, meanwhile: Meanwhile | None = None) -> Sample:
        """One run; ``meanwhile`` is called every 20 ms, if given. Raises WorkerError if any lane failed."""
        self._process.tell("run", seconds=turn.seconds)
        answer = self._process.hear(turn.seconds + PATIENCE, meanwhile)
        if errors := answer.pop("errors"):
            raise WorkerError(f"{self.name}: {'; '.join(errors)}")
        return Sample(**answer)

    def close(self) -> None:
        """Disconnect; the worker waits for its next scenario."""
        self._process.ask("close")

    def end(self) -> None:
        """End the process."""
        end_all([self._process])

    @property
    def processes(self) -> list[WorkerProcess]:
        """Its process, to be ended with others."""
        return [self._process]
