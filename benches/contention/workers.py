"""The parent's end of a contest: the worker processes of one rival, which start a run together, and its result.

Between ``go`` and the end of a run the parent sleeps, but for killing the victim of a crash. What is reported is read
from the log; of the workers' answers only their CPU time, their errors and the commands that they sent are taken.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from time import monotonic_ns as clock

from ..processes import end_all
from ..rivals import Entry
from ..stats import Sample, encode
from ..workers import ANSWER_SECONDS, Meanwhile, RunSpec, WorkerError, WorkerProcess
from .analysis import measure
from .contests import Contest
from .log import PID, START, STOP, Log, Shape, shape_for

PROGRAM = "contention.worker"

LEAD_NS, LEAD_NS_A_CLIENT = 10_000_000, 30_000
"""Nanoseconds from the order to go to the start: the time until every client waits for the start."""


def shape_of(spec: RunSpec) -> Shape:
    """The shape of the log of one run."""
    contest = spec.contest
    assert contest is not None, "the run of a contest"
    return shape_for(contest.clients + contest.holders, contest.cells, spec.seconds, contest.laps, contest.rate)


class Workers:
    """A rival in several processes. ``versions``: as the first process reports them; ``wrong``: what was wrong in the
    last run; ``due``: key changes without which the server cannot have granted what was granted in it."""

    def __init__(self, name: str, url: str, entry: Entry) -> None:
        self.name = name
        self.processes: list[WorkerProcess] = []
        self.versions: dict[str, str] = {}
        self.errors: list[str] = []
        self.wrong: list[str] = []
        self.due = 0
        self._url, self._entry = url, entry
        self._log: Log | None = None
        self._new: list[WorkerProcess] = []

    def grow(self, count: int) -> None:
        """Start processes until there are ``count``; ``greet`` waits for them."""
        while len(self.processes) < count:
            process = WorkerProcess(self.name, self._entry, PROGRAM)
            self.processes.append(process)
            self._new.append(process)

    def greet(self) -> None:
        """Wait until all processes have started."""
        while self._new:
            self.versions = self._new.pop().greet()

    def own(self, contest: Contest) -> Contest:
        """The contest as this rival runs it: with a lease that the rival can give, or with one client."""
        contest = replace(contest, lease=self._entry.lease(contest.lease))
        return replace(contest, processes=1, clients=1) if self._entry.alone else contest

    def accepts(self, contest: Contest) -> bool:
        """Whether this rival runs the contest, which may have too many clients for it."""
        return not self._entry.most or contest.clients <= self._entry.most

    def open(self, scenario: str, label: str, specs: Sequence[RunSpec]) -> None:
        """Make a log with room for each of the runs; ``label`` names the connections and begins the keys."""
        contests = [self.own(spec.contest) for spec in specs if spec.contest is not None]
        count = max(contest.workers for contest in contests)
        if any(contest.role == "crash" for contest in contests):
            self._renew_first()
        self.grow(count)
        self.greet()
        size = max(shape_of(spec).size for spec in specs)
        self._log = Log.create(size)
        for process in self.processes[:count]:
            process.order("open", url=self._url, label=label, path=self._log.path, size=size)
        for process in self.processes[:count]:
            process.answer()
        self._log.unlink()

    def _renew_first(self) -> None:
        """Replace the first process: one that forks victims must never have connected, as the rival's threads would not
        be in the child."""
        end_all(self.processes[:1])
        del self.processes[:1]
        fresh = WorkerProcess(self.name, self._entry, PROGRAM)
        self.processes.insert(0, fresh)
        self._new.append(fresh)

    def run(self, spec: RunSpec, meanwhile: Meanwhile | None = None) -> Sample:
        """Run the contest once. Raises WorkerError if a worker died meanwhile; failures of single calls are counted."""
        assert self._log is not None and spec.contest is not None, "open comes before run"
        contest, log = self.own(spec.contest), self._log
        workers = self.processes[: contest.workers]
        log.clear(shape_of(spec))
        order = {"contest": asdict(contest), "shape": asdict(log.shape), "seconds": spec.seconds, "seed": spec.seed}
        for number, process in enumerate(workers):
            process.order("arm", process=number, **order)
        for process in workers:
            process.answer()
        start = log.words[START] = clock() + LEAD_NS + LEAD_NS_A_CLIENT * contest.clients
        for process in workers:
            process.order("go")
        if contest.role == "crash":
            time.sleep(max(0, start + int(spec.seconds * 1e9) - clock()) / 1e9)
            os.kill(log.words[PID], signal.SIGKILL)
        timeout = 2 * spec.seconds + contest.blocking_timeout + contest.lease + ANSWER_SECONDS
        answers = [process.answer(timeout, meanwhile) for process in workers]
        self.errors = [text for answer in answers for text in answer["errors"]]
        sent = [answer["sent"] for answer in answers]
        sample = self._sample(contest, spec, start, sum(answer["cpu"] for answer in answers))
        return replace(sample, sent=None if None in sent else sum(sent))

    def _sample(self, contest: Contest, spec: RunSpec, start: int, cpu: float) -> Sample:
        assert self._log is not None
        clients = contest.clients + contest.holders
        tallies = [self._log.tally(client) for client in range(clients)]
        found = measure(contest, list(self._log.grants(clients)), tallies, self._log.books(), start, spec.seconds)
        self.wrong = found.wrong
        self.due = found.due_passing_on if self._entry.passes_on else found.due
        if self.errors and not found.counts["acquired"]:
            raise WorkerError(f"{self.name}: nothing was granted: {'; '.join(self.errors)}")
        histograms = {kind: text for kind, times in found.times.items() if (text := encode(times))}
        return Sample(**found.counts, client_cpu=cpu, histograms=histograms)

    def close(self) -> None:
        """Disconnect; the processes wait for the next scenario."""
        for process in self.processes:
            process.order("close")
        for process in self.processes:
            process.answer()
        self._unmap()

    def stop(self) -> None:
        """Stop all clients: before their processes are ended."""
        if self._log is not None:
            self._log.words[STOP] = 1

    def end(self) -> None:
        """End the processes."""
        self.stop()
        end_all(self.processes)
        self.processes.clear()
        self._unmap()

    def _unmap(self) -> None:
        log, self._log = self._log, None
        if log is not None:
            with suppress(FileNotFoundError):
                log.close()
