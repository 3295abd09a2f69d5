"""Moments: for how long a grant is valid before it is confirmed, by the round trip of the client that waits.

Never here: who waits, who is next.
"""

from __future__ import annotations

import math

from fastlock._protocol import commands

# Seconds in which a waiter has to confirm a grant: the next one waits for so long where it hangs
LEAST_MOMENT, MOST_MOMENT = 0.2, 2.0
MOST_GROWN = 0.8  # seconds to which it grows where a client is too slow: a lost message costs others as long
FAR_SECONDS = 200e-6  # round trip from which a server is far: that costs more than a script or a sleep
ROUND_TRIPS = 10  # round trips of its client that a moment lasts at least

_FAR_SECONDS: float = FAR_SECONDS  # typed, where this is compiled


class Moments:
    """The moment of a client's entries to come, and what it depends on. channel: on which its grant messages come."""

    __slots__ = ("channel", "moment", "round_trip")

    def __init__(self, channel: bytes) -> None:
        self.channel = channel
        self.round_trip = 0.0  # seconds that the reply to an acquire took: nearly the shortest time of late; 0: unknown
        self.moment = LEAST_MOMENT

    def address(self) -> bytes:
        """The address of an entry that is made now."""
        return commands.address(self.channel, self.moment)

    def far(self) -> bool:
        """Whether the server is far, as far as is known."""
        return self.round_trip > _FAR_SECONDS

    def note_reply(self, seconds: float) -> None:
        """Note how long the reply to an acquire took. It grows slowly, as a process may be stopped meanwhile."""
        self.round_trip = min(seconds, self.round_trip * 1.25) if self.round_trip else seconds

    def note_moment(self, kept: bool) -> None:
        """Note whether an entry has confirmed its grant in time: a client that is too slow for its moment gets a longer
        one."""
        # In steps, as each address has templates of its own
        least = min(MOST_MOMENT, LEAST_MOMENT * max(1, math.ceil(ROUND_TRIPS * self.round_trip / LEAST_MOMENT)))
        self.moment = max(least, self.moment / 2 if kept else min(MOST_GROWN, self.moment * 2))
