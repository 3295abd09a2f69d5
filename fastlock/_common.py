"""Wire: what the hot path looks at in a wire, at each acquire and release: compiled, looks cost nothing.

Never here: how to wait, decisions.
"""

from __future__ import annotations


class Common:
    """Of a wire of either face. Each sets what it has, and says there what that is."""

    __slots__ = (
        *("closed", "crowd", "debts", "gates", "stats"),
        *("away", "connections", "ear", "idle"),  # of threads
        *("alarms", "open_pipe", "ticks"),  # of tasks
    )
