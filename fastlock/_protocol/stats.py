"""What a client counts while it works: integers, kept without a lock, read by `Client.get_stats()`.

Compiled from this same text where a compiler is. Never here: times, names of locks, anything per lock.
"""

from __future__ import annotations

from typing import Any, Protocol

COUNTED = (
    *("acquires", "waits", "local_handovers", "remote_handovers", "late_grants", "timeouts", "recovered", "losses"),
    *("kept_acquires", "recalls"),
    *("renewals", "reconnects", "commands", "flushes"),
)


class Counted(Protocol):
    """The stream of a connection, which counts what it sends."""

    commands: int
    flushes: int


class Stats:
    """The counts of one client since it was made, or since its process forked."""

    __slots__ = COUNTED

    def __init__(self) -> None:
        self.acquires = 0  # leases that callers got
        self.waits = 0  # acquires that had to wait
        self.local_handovers = 0  # leases handed over from one caller to the next within the client
        self.remote_handovers = 0  # leases that the server granted to a waiter
        self.late_grants = 0  # leases that ended before the reply came: undone, and tried again
        self.timeouts = 0  # acquires that waited and got nothing
        self.recovered = 0  # acquires and releases whose reply was lost, and whose outcome was found out
        self.losses = 0  # leases found ended, or the name somebody else's, at a release, an extension or a renewal
        self.kept_acquires = 0  # acquires of a name whose lease the client had kept, which took no command
        self.recalls = 0  # kept leases that another client wanted
        self.renewals = 0  # leases that were given a new end because they are renewed
        self.reconnects = 0  # connections opened in place of broken ones
        self.commands = 0  # commands sent over connections that are gone; `as_dict` adds those of the others
        self.flushes = 0  # writes in which these were sent

    def acquired(self, leases: list[Any]) -> list[Any]:
        """Count the leases that a batch got, among None where it got none. Returns the list."""
        for lease in leases:  # to count by comparing costs more than all the rest, where this is compiled
            self.acquires += lease is not None
        return leases

    def retire(self, stream: Counted) -> None:
        """Keep what the stream of a connection counted that is gone."""
        self.commands += stream.commands
        self.flushes += stream.flushes

    def as_dict(self, streams: list[Any]) -> dict[str, int]:
        """All counts, with those of the connections that are there."""
        counts = {name: getattr(self, name) for name in COUNTED}
        for stream in streams:
            counts["commands"] += stream.commands
            counts["flushes"] += stream.flushes
        return counts
