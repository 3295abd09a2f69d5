"""The worker processes of one flash sale: started, let in together, told to stop, listened to, never left behind.

Knows processes, pipes and signals; what the workers do is in `buyers`. Everything that happens arrives as
an `Event` in one queue, the user's Ctrl-C too: one plain loop conducts the sale, nothing interrupts its cleaning up.
"""

from __future__ import annotations

import contextlib
import json
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Any

from .buyers import Plan, plan_line

# The parent's sys.path goes along, so that the workers import the same fastlock; it holds no secrets, unlike the plan.
BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
BOOT += "from fastlock.benches.flash_sale.buyers import main; main()"
KILLED_SECONDS = 5.0  # how long a killed process may take to disappear


@dataclass(frozen=True, slots=True)
class Event:
    """What happened: "ready" or "done" (a worker said so), "ended" (its process did), "signal" (the user's)."""

    kind: str
    worker: int = -1
    said: dict[str, Any] = field(default_factory=dict)


class Crew:
    """The workers of one sale, one for each plan; a context manager that ends with no process left.

    Args:
        plans: one for each worker.
        folder: where each worker's stderr is kept.
    """

    def __init__(self, plans: Sequence[Plan], folder: Path) -> None:
        self._plans = plans
        self._folder = folder
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._processes: list[subprocess.Popen[str]] = []
        self._listeners: list[threading.Thread] = []

    def __enter__(self) -> Crew:
        try:
            for plan in self._plans:
                self._start(plan)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def next_event(self, seconds: float) -> Event | None:
        """What happened next, or None after `seconds` of silence."""
        try:
            return self._events.get(timeout=seconds)
        except queue.Empty:
            return None

    def say(self, word: str) -> None:
        """Send "go" or "stop" to all; who is gone hears nothing, and their "ended" is in the queue."""
        for process in self._processes:
            with contextlib.suppress(OSError, ValueError):
                _stdin(process).write(word + "\n")
                _stdin(process).flush()

    def epitaph(self, worker: int) -> str:
        """How a worker's process ended, in a few words: the signal, or the last line of its stderr."""
        code = self._processes[worker].wait(KILLED_SECONDS)
        if code < 0:
            return f"ended by {signal.Signals(-code).name}"
        lines = self._stderr(worker).read_text(errors="replace").strip().splitlines()
        return f"ended with exit code {code}" + (f": {lines[-1].strip()}" if lines else "")

    def pids(self) -> list[int]:
        """The workers' process ids."""
        return [process.pid for process in self._processes]

    def kill(self) -> None:
        """End all that still run, now."""
        for process in self._processes:
            process.kill()

    def close(self) -> None:
        """Kill what still runs and wait for all."""
        self.kill()
        for process in self._processes:
            process.wait(KILLED_SECONDS)
        for listener in self._listeners:
            listener.join(KILLED_SECONDS)
        for process in self._processes:
            with contextlib.suppress(OSError):  # a word that a dead worker never read
                _stdin(process).close()
            _stdout(process).close()

    def _start(self, plan: Plan) -> None:
        with self._stderr(plan.worker).open("wb") as errors:
            process = subprocess.Popen(
                [sys.executable, "-X", "faulthandler", "-c", BOOT, json.dumps(sys.path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                # A Ctrl-C of the terminal is for the parent, who lets each purchase end and keeps what was measured.
                start_new_session=True,
            )
        self._processes.append(process)
        listener = threading.Thread(target=self._listen, args=(plan.worker, process), daemon=True)
        self._listeners.append(listener)
        listener.start()
        with contextlib.suppress(OSError):
            _stdin(process).write(plan_line(plan))
            _stdin(process).flush()

    def _listen(self, worker: int, process: subprocess.Popen[str]) -> None:
        for line in _stdout(process):
            with contextlib.suppress(ValueError):  # half a line of a worker that was killed
                said = json.loads(line)
                self._events.put(Event(said["event"], worker, said))
        self._events.put(Event("ended", worker))

    def _stderr(self, worker: int) -> Path:
        return self._folder / f"worker-{worker}.err"

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Inside, the first SIGINT or SIGTERM is an event; the second interrupts, for those who cannot wait."""

        def heard(number: int, frame: FrameType | None) -> None:
            self._events.put(Event("signal", said={"number": number}))
            for each in before:
                signal.signal(each, interrupt)

        def interrupt(number: int, frame: FrameType | None) -> None:
            raise KeyboardInterrupt

        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        for number in before:
            signal.signal(number, heard)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _stdin(process: subprocess.Popen[str]) -> IO[str]:
    assert process.stdin is not None
    return process.stdin


def _stdout(process: subprocess.Popen[str]) -> IO[str]:
    assert process.stdout is not None
    return process.stdout
