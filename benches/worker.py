"""The worker of an uncontended scenario: one process per rival (``python -m fastlock.benches.worker MODULE``).

Law: it talks on the pipe only between runs; during a run nothing of it but the scenario is busy.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from typing import Any

from .pipe import main
from .rivals import Rival
from .scenarios import SCENARIOS, Playing, play
from .stats import encode

Answer = dict[str, Any]


class Worker:
    """Answers orders about one rival: open, run, close."""

    def __init__(self, rival: Rival) -> None:
        self._rival = rival
        self._playing: Playing | None = None

    def open(self, scenario: str, url: str, label: str) -> Answer:
        """Open a scenario; it stays open over its rounds. Keys begin with ``label``."""
        self._playing = play(SCENARIOS[scenario], self._rival, url, label)
        return {}

    def run(self, seconds: float) -> Answer:
        """Run the open scenario once. Percentiles are put together after the clocks have stopped."""
        assert self._playing is not None, "open comes before run"
        gc.collect()
        before = time.process_time_ns()
        tally = self._playing.run(seconds)
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
        playing, self._playing = self._playing, None
        if playing is not None:
            playing.close()
        return {}


def verbs(worker: Worker) -> dict[str, Callable[..., Answer]]:
    """The orders it takes."""
    return {"open": worker.open, "run": worker.run, "close": worker.close}


if __name__ == "__main__":
    sys.exit(main(sys.argv, lambda rival: verbs(Worker(rival))))
