"""The states of a waiter and of a local queue, and what leads from one to another.

What is stored are the fields in `local_queue.py`, each set in one statement, so that an interrupt finds them in order;
a state is read off them. The model test of the local queue checks that the code makes all of these transitions and no
others, and docs/waiting.md shows them. Never here: what is done in a state.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

from fastlock._protocol.local_queue import LocalQueue
from fastlock._protocol.waiters import Waiter


class WaiterState(enum.Enum):
    """Where a waiter stands."""

    NEW = "it was made, and joined no queue yet"
    WAITING = "it is in its local queue"
    GRANTED = "it has a lease, which its caller has not taken from it yet"
    SERVED = "its caller has taken the lease (the fast path drops the waiter instead)"
    LEFT = "its caller waits no longer"


class QueueState(enum.Enum):
    """What a local queue knows, and what its first waiter does."""

    IDLE = "no lease circulates, and the server does not know the entry: the first waiter is to enter"
    QUEUED = "the server may have queued the entry: the first waiter listens, and looks when it is woken"
    CIRCULATING = "a lease circulates among the waiters: all of them sleep until it is handed over to them"
    QUEUED_EARLY = "a lease circulates, and goes to the server next: the first waiter has entered already, and listens"
    FAILED = "the server stays away: each waiter leaves with the same error"
    CLOSED = "nobody waits and no lease circulates: the next waiter for the name makes another queue"


def waiter_state(waiter: Waiter) -> WaiterState:
    if waiter.given_back is not None:
        return WaiterState.LEFT
    if waiter.lease is not None:
        return WaiterState.GRANTED
    if waiter.linked:
        return WaiterState.WAITING
    return WaiterState.NEW if waiter.queue is None else WaiterState.SERVED


def queue_state(queue: LocalQueue) -> QueueState:
    if queue.error is not None:
        return QueueState.FAILED
    if not (queue.queues.by_key.get(queue.key) is queue if queue.shared else queue.waiters.count):
        return QueueState.CLOSED
    if queue.circulating is None:
        return QueueState.QUEUED if queue.entry_sent else QueueState.IDLE
    return QueueState.QUEUED_EARLY if queue.entry_sent else QueueState.CIRCULATING


# (from, to): by what
WAITER_TRANSITIONS: Mapping[tuple[WaiterState, WaiterState], str] = {
    (WaiterState.NEW, WaiterState.WAITING): "enqueue",
    (WaiterState.WAITING, WaiterState.GRANTED): "the server grants the entry, or the holder hands the lease over",
    (WaiterState.WAITING, WaiterState.LEFT): "its time is over, or its caller is gone",
    (WaiterState.GRANTED, WaiterState.SERVED): "its caller runs",
    (WaiterState.GRANTED, WaiterState.WAITING): "its caller runs after the lease has ended",
    (WaiterState.GRANTED, WaiterState.LEFT): "its caller is gone, and the lease goes to the next waiter, or back",
}
QUEUE_TRANSITIONS: Mapping[tuple[QueueState, QueueState], str] = {
    (QueueState.IDLE, QueueState.QUEUED): "the first waiter enters",
    (QueueState.IDLE, QueueState.CLOSED): "the last waiter leaves",
    (QueueState.QUEUED, QueueState.CIRCULATING): "the server grants the entry",
    (QueueState.QUEUED, QueueState.CLOSED): "the last waiter leaves, or has the lease and an entry of its own",
    (QueueState.CIRCULATING, QueueState.IDLE): "the lease goes back to the server, or ended before it was used",
    (QueueState.CIRCULATING, QueueState.QUEUED): "the lease has ended, and the first waiter enters",
    (QueueState.CIRCULATING, QueueState.QUEUED_EARLY): "the lease goes back next, and the first waiter enters",
    (QueueState.CIRCULATING, QueueState.CLOSED): "the lease goes back or has ended, and nobody waits",
    (QueueState.QUEUED_EARLY, QueueState.QUEUED): "the lease goes back to the server, or has ended",
    (QueueState.QUEUED_EARLY, QueueState.CIRCULATING): "the server grants the entry, or the only waiter leaves",
    (QueueState.QUEUED_EARLY, QueueState.CLOSED): "the only waiter leaves, and the lease has ended",
    (QueueState.QUEUED, QueueState.FAILED): "the first waiter gives up, as the server stays away",
}
