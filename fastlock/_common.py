"""Wire: what the hot path looks at in a wire, at each acquire and release: compiled, looks cost nothing; and what
both wires do alike.

Never here: how to wait, decisions.
"""

from __future__ import annotations

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

    def late(self, waiter: Waiter) -> None:
        """The lease that passed to this waiter may have ended before its caller ran: then it does not count, and the
        caller waits on."""
        over = self.gates.returned(waiter, now())
        if over is not None:
            self.stats.late_grants += 1
            self.undo(Undo([over.key], [over.token]))
