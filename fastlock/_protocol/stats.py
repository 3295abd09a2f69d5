"""Law: what a client counts while it works. Integers, kept without a lock; read by `Client.get_stats()`.

Compiled from this same text where a compiler is. Never here: times, names of locks, anything per lock.
"""

from __future__ import annotations

from typing import Any

COUNTED = (
    *("acquires", "waits", "local_handovers", "remote_handovers", "late_grants", "timeouts", "recovered", "losses"),
    *("reconnects", "commands", "flushes"),
)


class Stats:
    """The counts of one client since it was made, or since its process forked."""

    __slots__ = COUNTED

    def __init__(self) -> None:
        self.acquires = 0  # leases that callers got
        self.waits = 0  # acquires that had to wait
        self.local_handovers = 0  # leases that passed from one caller to the next within the client
        self.remote_handovers = 0  # leases that the server gave to a waiter
        self.late_grants = 0  # whose time was over before the reply came: given back, and asked for again
        self.timeouts = 0  # acquires that waited and got nothing
        self.recovered = 0  # acquires and releases whose reply was lost, and whose outcome was found out
        self.losses = 0  # leases that were over, or somebody else's, when they were released or extended
        self.reconnects = 0  # connections in place of broken ones
        self.commands = 0  # sent over connections that are gone; `as_dict` adds those of the others
        self.flushes = 0

    def acquired(self, leases: list[Any]) -> list[Any]:
        """A batch got these leases, and None."""
        for lease in leases:  # to count by comparing costs more than all the rest, where this is compiled
            self.acquires += lease is not None
        return leases

    def released(self, outcomes: list[Any]) -> list[Any]:
        """A batch let go of these, and found some lost."""
        for released in outcomes:
            self.losses += released is False
        return outcomes

    def retire(self, stream: Any) -> None:
        """A connection is gone: keep what it counted."""
        self.commands += stream.commands
        self.flushes += stream.flushes

    def as_dict(self, streams: list[Any]) -> dict[str, int]:
        """All counts, with those of the connections that are there."""
        counts = {name: getattr(self, name) for name in COUNTED}
        for stream in streams:
            counts["commands"] += stream.commands
            counts["flushes"] += stream.flushes
        return counts
