"""A thread that does what it is told, one call after the other: an owner of leases in stateful tests."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class ToldThread:
    """`do` has the thread make a call, and returns what came of it."""

    def __init__(self) -> None:
        self.told, self.done = threading.Semaphore(0), threading.Semaphore(0)
        self.call: Callable[[], Any] | None = None
        self.result: Any = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while self.told.acquire() and self.call is not None:
            try:
                self.result = self.call()
            except Exception as error:
                self.result = error
            self.done.release()

    def do(self, call: Callable[[], Any]) -> Any:
        """What the call returns, or the exception that it raises."""
        self.call = call
        self.told.release()
        assert self.done.acquire(timeout=20)
        return self.result

    def end(self) -> None:
        self.call = None
        self.told.release()
        self.thread.join(10)
