"""The worker processes of one flash sale: started, let go together, stopped, watched, never left behind.

Knows processes and signals; what the workers do is in `buyers`. Everything that happens arrives as an `Event`, the
user's Ctrl-C too: one plain loop follows the sale, and nothing interrupts its cleanup.
"""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from ..processes import Process, end_all, readable
from .buyers import Plan

PROGRAM = f"{__package__}.buyers"


@dataclass(frozen=True, slots=True)
class Event:
    """What happened: "ready" or "done" (a worker's message), "ended" (its process did), "signal" (the user's)."""

    kind: str
    worker: int = -1
    message: dict[str, Any] = field(default_factory=dict)


class Workers:
    """The workers of one sale, one for each plan; a context manager that ends with no process left.

    Args:
        plans: one for each worker.
        folder: where each worker's stderr is kept.
    """

    def __init__(self, plans: Sequence[Plan], folder: Path) -> None:
        self._plans = plans
        self._folder = folder
        self._events: deque[Event] = deque()
        self._processes: list[Process] = []
        self._running: dict[Process, int] = {}

    def __enter__(self) -> Workers:
        try:
            for worker, plan in enumerate(self._plans):
                with self._stderr(worker).open("wb") as errors:
                    process = Process(PROGRAM, stderr=errors)
                self._processes.append(process)
                self._running[process] = worker
                process.send(asdict(plan))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def next_event(self, seconds: float) -> Event | None:
        """The next event, or None after `seconds` without any."""
        if not self._events:
            for process in readable(self._running, seconds):
                self._receive(process)
        return self._events.popleft() if self._events else None

    def _receive(self, process: Process) -> None:
        worker = self._running[process]
        try:
            while (message := process.receive(0)) is not None:
                self._events.append(Event(message["event"], worker, message))
        except EOFError:
            del self._running[process]
            self._events.append(Event("ended", worker))

    def order(self, action: str) -> None:
        """Send "go" or "stop" to all; those that are gone have an "ended" among the events."""
        for process in self._processes:
            process.send({"action": action})

    def how_it_ended(self, worker: int) -> str:
        """The end of a worker's process in words: the signal, or the exit code and the last line of its stderr."""
        code = self._processes[worker].end()
        if code < 0:
            return f"ended by {signal.Signals(-code).name}"
        lines = self._stderr(worker).read_text(errors="replace").strip().splitlines()
        return f"ended with exit code {code}" + (f": {lines[-1].strip()}" if lines else "")

    def pids(self) -> list[int]:
        """The workers' process ids."""
        return [process.pid for process in self._processes]

    def kill(self) -> None:
        """Kill all workers that still run."""
        for process in self._processes:
            process.kill()

    def close(self) -> None:
        """Kill all workers that still run, and wait for them."""
        self.kill()
        end_all(self._processes)

    def _stderr(self, worker: int) -> Path:
        return self._folder / f"worker-{worker}.err"

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Inside, the first SIGINT or SIGTERM is an event; the second interrupts, for users who cannot wait."""

        def note(number: int, frame: FrameType | None) -> None:
            self._events.append(Event("signal", message={"number": number}))
            for each in before:
                signal.signal(each, interrupt)

        def interrupt(number: int, frame: FrameType | None) -> None:
            raise KeyboardInterrupt

        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        for number in before:
            signal.signal(number, note)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
