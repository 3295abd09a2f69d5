"""The worker of a scenario without contention: one process per rival (``python -m fastlock.benches.worker MODULE``).

The worker exchanges messages with its parent between runs only; during a run only the scenario runs in it.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from typing import Any

from .orders import main
from .rivals import Rival
from .scenarios import SCENARIOS, OpenScenario, open_scenario
from .stats import encode

Answer = dict[str, Any]


class Worker:
    """Answers the orders of the parent about one rival: open, run, close."""

    def __init__(self, rival: Rival) -> None:
        self._rival = rival
        self._open: OpenScenario | None = None

    def open(self, scenario: str, url: str, label: str) -> Answer:
        """Open a scenario, which stays open over its rounds. Keys begin with ``label``."""
        self._open = open_scenario(SCENARIOS[scenario], self._rival, url, label)
        return {}

    def run(self, seconds: float) -> Answer:
        """Run the open scenario once. Histograms are made after the clocks have stopped."""
        assert self._open is not None, "open comes before run"
        gc.collect()
        before = time.process_time_ns()
        tally = self._open.run(seconds)
        cpu = time.process_time_ns() - before
        return {
            "grants": tally.pairs,
            "acquired": tally.acquired,
            "released": tally.released,
            "seconds": tally.seconds,
            "client_cpu": cpu / 1e9,
            "histograms": {"latency": encode(tally.laps)},
            "errors": tally.errors,
        }

    def close(self) -> Answer:
        """Close the open scenario, if any."""
        opened, self._open = self._open, None
        if opened is not None:
            opened.close()
        return {}


def actions(worker: Worker) -> dict[str, Callable[..., Answer]]:
    """The actions that a worker can be ordered to do."""
    return {"open": worker.open, "run": worker.run, "close": worker.close}


if __name__ == "__main__":
    sys.exit(main(sys.argv, lambda rival: actions(Worker(rival))))
