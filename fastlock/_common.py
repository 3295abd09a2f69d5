"""Wire: what the hot path looks at in a wire, at each acquire and release: compiled, looks cost nothing; and what
both wires do alike.

Never here: how to wait, decisions.
"""

from __future__ import annotations

from typing import Any

from fastlock import _law as law
from fastlock._errors import own
from fastlock._gate import Gates, Waiter
from fastlock._lease import now
from fastlock._stats import Stats
from fastlock._steps import Undo


class Common:
    """Of a wire of either face. Each sets what it has, and says there what that is."""

    __slots__ = (
        *("closed", "crowd", "debts", "gates", "stats"),
        *("away", "connections", "ear", "idle"),  # of threads
        *("alarms", "open_pipe", "ticks"),  # of tasks
    )

    gates: Gates
    stats: Stats

    def undo(self, undo: Undo) -> None:
        """Have something said that nobody waits for; over the next connection, when there is none."""
        raise NotImplementedError

    def say_debts(self) -> None:
        """Say now what is owed, where nobody else would."""

    def struck(self, error: BaseException | None) -> bool:
        """Whether an operation ends by what it has not raised itself, nor left anything for."""
        return error is not None and not own(error)

    def interrupted(self, op: Any, error: BaseException) -> None:
        """What a signal's handler raises may strike anywhere, also between the grant and its being kept: nobody is left
        to release it. Whoever is struck once more in here calls again."""
        if self.struck(error):
            for undo in op.abandon(self.gates, now):
                self.undo(undo)
            self.say_debts()

    def interrupted_in_many(self, leases: Any, released: list[Any], error: BaseException) -> None:
        """As `interrupted`, of a release of many."""
        op = law.LetGo(leases, released)
        try:
            self.interrupted(op, error)
        except BaseException as again:
            self.interrupted(op, again)
            raise

    def torn(self, op: Any, waiter: Waiter, error: BaseException | None = None) -> None:
        """Who slept is interrupted, cancelled, or the client closed: what was handed to it goes on. May be called
        again, as `interrupted`."""
        op.waiting = waiter
        if error is not None and self.struck(error):
            self.interrupted(op, error)
        elif waiter.left is None and (left := op.leave(waiter, None, now)) is not None:  # else the law has seen to it
            self.undo(left)
