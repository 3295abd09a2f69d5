"""The parent's end of a rival's workers: orders, answers, and the rival in one process.

One rival at a time has orders; the parent sleeps meanwhile. A worker that dies or does not answer is an error
of its rival, never a hang.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .contention.contests import Contest
from .processes import Process, end_all
from .rivals import Entry
from .stats import Sample

ANSWER_SECONDS = 60.0
"""How long a worker may take to answer, beyond the time that its run was given."""

MEANWHILE_SECONDS = 0.02
"""Seconds between two calls of the function that a run calls meanwhile."""

Meanwhile = Callable[[], object]


class WorkerError(Exception):
    """A rival failed: its worker reported an error, died, or did not answer."""


class RivalMissing(WorkerError):
    """A library of the rival is not installed."""


@dataclass(frozen=True)
class RunSpec:
    """One run as planned: how long, and in contention which contest (``seed``: the same for all rivals of a round).
    rtt: seconds of a round trip to the server, 0: as it is."""

    seconds: float
    contest: Contest | None = None
    seed: int = 0
    rtt: float = 0.0


class WorkerProcess(Process):
    """One worker: a process that answers orders. It is started first and greeted later, so that many start at once."""

    def __init__(self, name: str, entry: Entry, program: str) -> None:
        super().__init__(f"{__package__}.{program}", entry.module, env=entry.env)
        self.name = name

    def greet(self) -> dict[str, str]:
        """Wait until the worker has started, and return the versions of its rival. Raises RivalMissing if a library is
        not installed."""
        return self.ask("hello")

    def ask(self, action: str, **order: Any) -> dict[str, Any]:
        """Give an order and wait for the answer."""
        self.order(action, **order)
        return self.answer()

    def order(self, action: str, **order: Any) -> None:
        """Give an order."""
        self.send({"action": action, **order})

    def answer(self, timeout: float = ANSWER_SECONDS, meanwhile: Meanwhile | None = None) -> dict[str, Any]:
        """Wait for the answer to the last order; ``meanwhile`` is called every 20 ms, if given."""
        deadline = time.monotonic() + timeout
        try:
            while (answer := self.receive(MEANWHILE_SECONDS if meanwhile else timeout)) is None:
                if time.monotonic() >= deadline:
                    self.kill()  # its late answer would be taken for that to another order
                    raise WorkerError(f"{self.name}: no answer from the worker")
                if meanwhile:
                    meanwhile()
        except EOFError:
            raise WorkerError(f"{self.name}: the worker ended with {self.end()}") from None
        if "error" in answer:
            raise (RivalMissing if answer.get("missing") else WorkerError)(f"{self.name}: {answer['error']}")
        return answer


class WorkerRival:
    """A rival in one process, for scenarios without contention. ``versions``: as the worker reports them."""

    def __init__(self, name: str, url: str, entry: Entry) -> None:
        self.name = name
        self._url = url
        self._process = WorkerProcess(name, entry, "worker")
        self.versions: dict[str, str] = {}

    def greet(self) -> None:
        """Wait until the worker has started."""
        self.versions = self._process.greet()

    def open(self, scenario: str, label: str, specs: Sequence[RunSpec]) -> None:
        """Connect for a scenario; ``label`` names the connections and begins the keys."""
        self._process.ask("open", scenario=scenario, url=self._url, label=label)

    def run(self, spec: RunSpec, meanwhile: Meanwhile | None = None) -> Sample:
        """Run the scenario once; ``meanwhile`` is called every 20 ms, if given. Raises WorkerError if any client
        failed."""
        self._process.order("run", seconds=spec.seconds)
        answer = self._process.answer(spec.seconds + ANSWER_SECONDS, meanwhile)
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
        """The process of the rival, to be ended with those of others."""
        return [self._process]
