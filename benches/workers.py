"""The parent's end of the workers: start one per rival, give orders, read answers, end them.

Law: one order is under way at a time, over all workers; the parent sleeps meanwhile. A worker that dies or falls silent
is an error of its rival, never a hang.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from .rivals import RIVALS
from .stats import Sample

PATIENCE = 60.0
"""Seconds that a worker may take beyond the time that its run was given."""


Meanwhile = Callable[[], object]


class WorkerError(Exception):
    """A rival failed: its worker reported an error, died, or did not answer."""


class WorkerRival:
    """A rival in a process of its own. ``versions`` as its worker reports them."""

    def __init__(self, name: str, url: str) -> None:
        self.name = name
        self._url = url
        env = {**os.environ, **RIVALS[name].env, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.worker", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=env,
            text=True,
        )
        assert self._process.stdin is not None and self._process.stdout is not None  # pipes, as asked for
        self._orders, self._answers = self._process.stdin, self._process.stdout
        try:
            self.versions: dict[str, str] = self._ask("hello")
        except BaseException:
            self.end()
            raise

    def open(self, scenario: str, label: str) -> None:
        """Connect for a scenario; ``label`` names the connections and begins the keys."""
        self._ask("open", scenario=scenario, url=self._url, label=label)

    def run(self, seconds: float, meanwhile: Meanwhile | None = None) -> Sample:
        """One run; ``meanwhile`` is called every 20 ms, if given. Raises WorkerError if any lane failed."""
        answer = self._ask("run", seconds + PATIENCE, meanwhile, seconds=seconds)
        if errors := answer.pop("errors"):
            raise WorkerError(f"{self.name}: {'; '.join(errors)}")
        return Sample(**answer)

    def close(self) -> None:
        """Disconnect; the worker waits for its next scenario."""
        self._ask("close")

    def end(self) -> None:
        """End the process: it leaves when its input ends, and is killed if it does not."""
        with suppress(BrokenPipeError):  # it died with an order unread
            self._orders.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._answers.close()

    def _ask(
        self, verb: str, patience: float = PATIENCE, meanwhile: Meanwhile | None = None, **order: Any
    ) -> dict[str, Any]:
        with suppress(BrokenPipeError):  # its last words, if any, are read below
            self._orders.write(json.dumps({"verb": verb, **order}) + "\n")
            self._orders.flush()
        self._wait(patience, meanwhile)
        line = self._answers.readline()
        if not line:
            raise WorkerError(f"{self.name}: the worker ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise WorkerError(f"{self.name}: {answer['error']}")
        return answer

    def _wait(self, patience: float, meanwhile: Meanwhile | None) -> None:
        step = 0.02 if meanwhile else patience
        while patience > 0:
            if select.select([self._answers], [], [], step)[0]:
                return
            patience -= step
            if meanwhile:
                meanwhile()
        self._process.kill()  # else its late answer would be taken for that to another order
        raise WorkerError(f"{self.name}: no answer from the worker")
