"""Waiters, and the list of those that wait for one name in this process. Never here: who may enter, what is granted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastlock._protocol.lease import Lease
    from fastlock._protocol.local_queue import LocalQueue


class Waiter:
    """One acquire that waits. `woken`: it has a lease, or is the first and may have to enter, or its queue failed."""

    __slots__ = (
        *("next", "previous", "woken", "counted", "fenced", "queue", "key", "lease", "given_back", "ms", "name"),
        *("entry", "sleep", "linked", "on_wake", "believes", "keep_ms"),
    )

    def __init__(
        self, name: object, key: bytes, ms: int, fenced: bool, entry: bytes | None = None, sleep: float = 0.1
    ) -> None:
        self.name = name
        self.key = key
        self.ms = ms
        self.fenced = fenced
        self.entry = entry  # an entry of its own in the server's queue; None: it shares that of its local queue
        self.believes = False  # whether it believes a message of its grant
        self.keep_ms = 0  # by how many milliseconds its lease may be longer, as it is kept
        self.sleep = sleep  # seconds between two tries, where no message tells that something has changed
        self.queue: LocalQueue | None = None  # the queue it is in, or was in last; None: it was never enqueued
        self.linked = False  # whether it is in its queue's list of waiters, between `previous` and `next`
        self.previous: Waiter | None = None
        self.next: Waiter | None = None
        self.lease: Lease | None = None  # the lease that it was handed or granted
        self.given_back: tuple[Lease | None, bytes | None] | None = None  # the outcome of `dequeue`, once it has left
        self.woken = False
        self.counted = False  # whether it was counted among the acquires that had to wait
        self.on_wake: Callable[[Any], object] | None = None  # ends its sleep

    def wake(self) -> None:
        self.woken = True
        wake, self.on_wake = self.on_wake, None
        if wake is not None:
            wake(None)


class WaiterList:
    """Waiters in order of arrival, as a linked list: one in the middle of many is removed as fast as the first.

    Each change is made without a call or a loop, so that neither Ctrl-C nor another thread can interrupt it.
    """

    __slots__ = ("count", "first", "last")

    def __init__(self) -> None:
        self.count = 0
        self.first: Waiter | None = None
        self.last: Waiter | None = None

    def insert(self, waiter: Waiter, previous: Waiter | None) -> None:
        """Insert a waiter right behind `previous`; None: before all others."""
        next = self.first if previous is None else previous.next
        waiter.previous, waiter.next = previous, next
        if previous is None:
            self.first = waiter
        else:
            previous.next = waiter
        if next is None:
            self.last = waiter
        else:
            next.previous = waiter
        waiter.linked = True
        self.count += 1

    def add(self, waiter: Waiter) -> None:
        """Append a waiter."""
        waiter.previous = self.last
        if self.last is None:
            self.first = waiter
        else:
            self.last.next = waiter
        self.last = waiter
        waiter.linked = True
        self.count += 1

    def remove(self, waiter: Waiter) -> None:
        """Take a waiter out, if it is in the list."""
        if not waiter.linked:
            return
        if waiter.previous is None:
            self.first = waiter.next
        else:
            waiter.previous.next = waiter.next
        if waiter.next is None:
            self.last = waiter.previous
        else:
            waiter.next.previous = waiter.previous
        waiter.previous = waiter.next = None
        waiter.linked = False
        self.count -= 1

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Waiter]:
        waiter = self.first
        while waiter is not None:
            yield waiter
            waiter = waiter.next
