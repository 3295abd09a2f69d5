"""A worker: one process with one case open, for threads or for asyncio (`python -m fastlock.benches.family.worker`).

It exchanges messages with its parent between runs only. A run makes pairs, takes part in a contest, or holds many
leases that are renewed; what each does is in `running`, and the numbers are made after the clocks have stopped.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Callable
from typing import Any, cast

from ..contention.clients import exact_sleeps, new_loop
from ..orders import main
from . import running
from .cases import Library, SidedTasks, SidedThreads

Answer = dict[str, Any]


class Worker:
    """Answers the parent's orders about the cases of one library. What is open has a name, as more than one may be."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._threads: dict[str, SidedThreads] = {}
        self._tasks: dict[str, SidedTasks] = {}
        self._runner: asyncio.Runner | None = None
        exact_sleeps()

    def open(self, name: str, case: str, api: str, url: str, label: str, permits: int) -> Answer:
        """Connect for a case. Raises what the library raises."""
        if api == "threads":
            self._threads[name] = self._library.open_case(case, url, label, permits)
        else:
            self._runner = self._runner or asyncio.Runner(loop_factory=new_loop)
            opening = self._library.open_case_in_task(case, url, label, permits)
            self._tasks[name] = self._runner.run(opening)
        return {}

    def pairs(self, name: str, key: str, seconds: float) -> Answer:
        """Make pairs on a name, which nobody else wants."""
        return self._run(name, running.pairs_in_thread, running.pairs_in_task, key, seconds)

    def contest(self, name: str, **settings: Any) -> Answer:
        """Run the clients of this process in a contest."""
        contest = running.Contest(**settings)
        return self._run(name, running.contest_of_threads, running.contest_of_tasks, contest)

    def renew(self, name: str, key: str, leases: int, lease: float, periods: int) -> Answer:
        """Hold leases that are renewed, and measure what that costs in each period."""
        return self._run(name, running.renew_in_thread, running.renew_in_task, key, leases, lease, periods)

    def _run(self, name: str, by_thread: Callable[..., Answer], by_task: Callable[..., Any], *given: Any) -> Answer:
        gc.collect()
        if name in self._threads:
            return by_thread(self._threads[name], *given)
        assert self._runner is not None, "open comes before"
        answer: Answer = self._runner.run(by_task(self._tasks[name], *given))
        return answer

    def close(self) -> Answer:
        """Disconnect all that is open."""
        for threads in self._threads.values():
            threads.close()
        self._threads.clear()
        if self._runner is not None:
            self._runner.run(self._close_tasks())
            self._runner.close()
            self._runner = None
        return {}

    async def _close_tasks(self) -> None:
        for tasks in self._tasks.values():
            await tasks.close()
        self._tasks.clear()


def actions(library: Library) -> dict[str, Callable[..., Answer]]:
    """The actions that a worker can be ordered to do."""
    worker = Worker(library)
    return {
        "open": worker.open,
        "pairs": worker.pairs,
        "contest": worker.contest,
        "renew": worker.renew,
        "close": worker.close,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv, lambda rival: actions(cast(Library, rival))))
