"""Another thread that comes in wherever an allocation runs the garbage collector."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable


class Intruder:
    """Whenever the garbage collector runs in the test's thread, another thread queues a command of its own.

    Finalizers and callbacks may do that: they run Python in the middle of an allocation, and let other threads run.
    """

    def __init__(self, put: Callable[[], None]) -> None:
        self._put, self._victim, self._over = put, threading.get_ident(), False
        self._knock, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._kept: list[list[int]] = []
        self._thread = threading.Thread(target=self._work, daemon=True)

    def _work(self) -> None:
        while self._knock.acquire() and not self._over:
            self._put()
            self._done.release()

    def arm(self) -> None:
        """The next allocation of a container runs the collector: the objects that were set aside for reuse are used
        up."""
        gc.disable()
        self._kept.clear()
        self._kept += [[] for _ in range(200)]
        gc.enable()

    def _collecting(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start" and threading.get_ident() == self._victim:
            self._knock.release()
            self._done.acquire(timeout=0.01)  # a thread that a mutex keeps out comes in later

    def __enter__(self) -> Intruder:
        self._thread.start()
        self._threshold = gc.get_threshold()
        gc.callbacks.append(self._collecting)
        gc.set_threshold(1)
        return self

    def __exit__(self, *exc: object) -> None:
        gc.callbacks.remove(self._collecting)
        gc.set_threshold(*self._threshold)
        self._over = True
        self._knock.release()
        self._thread.join(30)
