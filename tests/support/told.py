"""Owners of leases that do what they are told, one call after the other: a thread, or a task; in stateful tests."""

from __future__ import annotations

import asyncio
import inspect
import queue
import threading
from collections.abc import Callable
from typing import Any

LONG = 20.0  # seconds in which a call ends


class ToldThread:
    """`do` has the thread make a call, and returns what came of it."""

    def __init__(self) -> None:
        self.told: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self.results: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while (call := self.told.get()) is not None:
            try:
                self.results.put(call())
            except Exception as error:
                self.results.put(error)

    def begin(self, call: Callable[[], Any]) -> None:
        """Have the thread make the call, beside what others do."""
        self.told.put(call)

    def result(self) -> Any:
        """What the call has returned, or the exception that it raised."""
        return self.results.get(timeout=LONG)

    def do(self, call: Callable[[], Any]) -> Any:
        """What the call returns, or the exception that it raises."""
        self.begin(call)
        return self.result()

    def end(self) -> None:
        self.told.put(None)
        self.thread.join(10)


class ToldTask:
    """The same as a task, which runs as long as the runner's loop does."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self.runner = runner
        self.told: asyncio.Queue[Callable[[], Any] | None] = asyncio.Queue()
        self.results: asyncio.Queue[Any] = asyncio.Queue()
        self.task = runner.get_loop().create_task(self._run())

    async def _run(self) -> None:
        while (call := await self.told.get()) is not None:
            try:
                result = call()
                self.results.put_nowait(await result if inspect.isawaitable(result) else result)
            except Exception as error:
                self.results.put_nowait(error)

    def begin(self, call: Callable[[], Any]) -> None:
        """Have the task make the call, beside what others do."""
        self.told.put_nowait(call)

    def result(self) -> Any:
        """What the call has returned, or the exception that it raised."""
        return self.runner.run(asyncio.wait_for(self.results.get(), LONG))

    def do(self, call: Callable[[], Any]) -> Any:
        """What the call returns, or the exception that it raises."""
        self.begin(call)
        return self.result()

    def end(self) -> None:
        self.told.put_nowait(None)
        self.runner.run(asyncio.wait_for(self.task, 10))
