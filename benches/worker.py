"""The worker: one process per rival, driven by JSON lines over a pipe (``python -m fastlock.benches.worker RIVAL``).

Law: it talks on the pipe only between runs; during a run nothing of it but the scenario is busy. Ctrl-C belongs to the
parent: the worker ends when its standard input does.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TextIO

from .rivals import Rival, load
from .scenarios import SCENARIOS, Playing, play
from .stats import encode

Order = dict[str, Any]
Answer = dict[str, Any]


class Worker:
    """Answers orders about one rival: open, run, close."""

    def __init__(self, rival: Rival) -> None:
        self._rival = rival
        self._playing: Playing | None = None

    def hello(self) -> Answer:
        """Who answers: the versions of the rival."""
        return {"python": platform.python_version(), **self._rival.versions()}

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
            "pairs": tally.pairs,
            "acquired": tally.acquired,
            "released": tally.released,
            "seconds": tally.seconds,
            "client_cpu": cpu / 1e9,
            "histogram": encode(tally.laps),
            "errors": tally.errors,
        }

    def close(self) -> Answer:
        """Close the open scenario, if any."""
        playing, self._playing = self._playing, None
        if playing is not None:
            playing.close()
        return {}


def answer(worker: Worker, order: Order) -> Answer:
    """Carry out one order; what goes wrong is said to the parent, who decides."""
    verbs: dict[str, Callable[..., Answer]] = {
        "hello": worker.hello,
        "open": worker.open,
        "run": worker.run,
        "close": worker.close,
    }
    try:
        return verbs[order.pop("verb")](**order)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def serve(worker: Worker, orders: TextIO, answers: TextIO) -> None:
    """Answer line by line until the orders end."""
    for line in orders:
        answers.write(json.dumps(answer(worker, json.loads(line))) + "\n")
        answers.flush()
    with suppress(Exception):  # the parent is gone or does not care any more
        worker.close()


def main(argv: list[str]) -> int:
    """Keep the pipe for answers alone: whatever a library prints goes to stderr."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        rival = load(argv[1])
    except Exception as error:
        answers.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")
        answers.close()
        return 1
    serve(Worker(rival), sys.stdin, answers)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
