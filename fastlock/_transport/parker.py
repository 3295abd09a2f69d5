"""How a thread sleeps until a lease is handed to it, in Python: `parker.pyx` says what lives here.

Nothing is won by waking a thread early where Python runs: the interpreter is what all wait for.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fastlock._native import allocate_lock
from fastlock._protocol.lease import now
from fastlock._stream_errors import by_handler

clock = now


class Parker:
    """The sleep of one thread that has nothing to read; it is used once."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = allocate_lock()
        self._lock.acquire()

    def __call__(self, yield_to: Any) -> None:
        """As what a waiter is woken by."""
        try:
            self._lock.release()
        except RuntimeError as error:  # it was woken before
            if by_handler(error):
                raise

    def prewake(self) -> None:
        """Wake the thread before its time: not here."""

    def park(self, until: float) -> None:
        """Sleep until it is called, or until that time (on the clock of leases)."""
        self._lock.acquire(timeout=max(0.0, until - clock()))


def check_signals() -> None:
    """Python runs the handlers of signals by itself."""


def popped(these: list[Any]) -> Iterable[Any]:
    """What is popped from a list as the caller unpacks it: no signal handler runs between popped and kept."""
    return map(list.pop, (these,))
