"""How a thread sleeps until a lease is handed to it, in Python: `parker.pyx` says what lives here.

Here no thread is woken early: where Python runs, all threads wait for the GIL, and nothing would be won.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fastlock._native import allocate_lock
from fastlock._protocol.lease import now
from fastlock._protocol.local_queue import LocalQueues
from fastlock._stream_errors import by_handler

clock = now
enqueue, release = LocalQueues.enqueue, LocalQueues.release  # compiled, they lock the mutex faster


class Parking:
    """Makes the parkers of one client's threads."""

    __slots__ = ()

    def parker(self) -> Parker:
        return Parker()


class Parker:
    """Parks one thread that has nothing to read; it is used once."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = allocate_lock()
        self._lock.acquire()

    def __call__(self, yield_to: object) -> None:
        """Unpark the thread: called as the `on_wake` of a waiter."""
        try:
            self._lock.release()
        except RuntimeError as error:  # the thread was woken before
            if by_handler(error):
                raise

    def prewake(self) -> None:
        """Does nothing here: the compiled one wakes the thread early."""

    def park(self, until: float) -> None:
        """Sleep until unparked, or until that time (in seconds, on the clock of leases)."""
        self._lock.acquire(timeout=max(0.0, until - clock()))


def check_signals() -> None:
    """Does nothing here: Python runs signal handlers by itself."""


def popped(these: list[Any]) -> Iterable[Any]:
    """The last item of a list, popped as the caller unpacks it: no signal handler runs between popped and kept."""
    return map(list.pop, (these,))
