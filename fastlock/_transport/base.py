"""Wire: what the hot path looks at in a wire, at each acquire and release: compiled, looks cost nothing; and what
both wires do alike.

Never here: how to wait, decisions.
"""

from __future__ import annotations

from typing import Any

from fastlock._errors import is_own
from fastlock._protocol.batch_operations import InterruptedRelease
from fastlock._protocol.lease import now
from fastlock._protocol.local_queue import LocalQueues, Waiter
from fastlock._protocol.stats import Stats
from fastlock._protocol.steps import Undo


class Transport:
    """Of a wire of either face. Each sets what it has, and says there what that is."""

    __slots__ = (
        *("closed", "queued_keys", "pending_undos", "queues", "stats"),
        *("push_connection_lent", "connections", "push_connection", "idle"),  # of threads
        *("shared_timeouts", "open_stream", "sweep_timer"),  # of tasks
    )

    closed: bool
    queues: LocalQueues
    queued_keys: dict[bytes, Any]  # names for which callers of this client wait, or among whom a lease circulates
    stats: Stats
    pending_undos: list[Undo]
    # of threads
    connections: list[Any]
    idle: list[Any]
    push_connection: Any
    push_connection_lent: int
    # of tasks
    open_stream: Any
    shared_timeouts: dict[float, Any]
    sweep_timer: Any

    def undo(self, undo: Undo) -> None:
        """Have something said that nobody waits for; over the next connection, when there is none."""
        raise NotImplementedError

    def flush_pending_undos(self) -> None:
        """Say now what is owed, where nobody else would."""

    def was_interrupted(self, error: BaseException | None) -> bool:
        """Whether an operation ends by what it has not raised itself, nor left anything for."""
        return error is not None and not is_own(error)

    def undo_interrupted(self, op: Any, error: BaseException) -> None:
        """What a signal's handler raises may strike anywhere, also between the grant and its being kept: nobody is left
        to release it. Whoever is struck once more in here calls again."""
        if self.was_interrupted(error):
            for undo in op.abandon(self.queues, now):
                self.undo(undo)
            self.flush_pending_undos()

    def undo_interrupted_batch(self, leases: Any, released: list[Any], error: BaseException) -> None:
        """As `interrupted`, of a release of many."""
        op = InterruptedRelease(leases, released)
        try:
            self.undo_interrupted(op, error)
        except BaseException as again:
            self.undo_interrupted(op, again)
            raise

    def cancel_wait(self, op: Any, waiter: Waiter, error: BaseException | None = None) -> None:
        """Who slept is interrupted, cancelled, or the client closed: what was handed to it goes on. May be called
        again, as `interrupted`."""
        op.waiting = waiter
        if error is not None and self.was_interrupted(error):
            self.undo_interrupted(op, error)
        elif (
            waiter.given_back is None and (left := op.leave(waiter, None, now)) is not None
        ):  # else the law has seen to it
            self.undo(left)
