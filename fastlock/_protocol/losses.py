"""How the loss of a lease is logged, and how messages name a lock. Never here: how a loss is found out."""

from __future__ import annotations

import logging

from fastlock._protocol.lease import Lease
from fastlock._protocol.stats import Stats

NAMED = 5  # names of a batch that a message repeats
SHOWN = 200  # characters of a name that messages repeat
DONE = {
    "keep": "given back (it was kept, and nobody held it)",
    "acquire": "acquired again",
    "release": "released",
    "extend": "extended",
    "reacquire": "reacquired",
    "renew": "renewed",
}
LOG = logging.getLogger("fastlock")
LOST = "its lease had ended, or its key was deleted or taken"


def abbreviated(name: object) -> str:
    """A lock's name for messages, cut off after SHOWN characters: a name can have 64 KiB."""
    text = repr(bytes(name) if isinstance(name, bytearray | memoryview) else name)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def named(key: bytes) -> str:
    """A lock's key for messages: as text, if it is text."""
    try:
        return abbreviated(key.decode())
    except UnicodeDecodeError:
        return abbreviated(key)


def shown(error: BaseException) -> str:
    """An error for a log: its type and its text. (repr() drops the text of redis-py's errors since 8.0.)"""
    return f"{type(error).__name__}: {error}"


def warn_of_loss(name: object, action: str) -> None:
    """Log the loss of a lease, once for each lease that its holder finds lost."""
    LOG.warning("lock %s was lost before it was %s: %s", abbreviated(name), DONE[action], LOST)


def warn_of_loop(name: object) -> None:
    """Log that a thread waits for a lock while it runs an event loop, once a client."""
    LOG.warning(
        "lock %s is waited for in a coroutine by a client for threads, which stops its event loop, and any task that "
        "is to release the lock: use fastlock.asyncio.Client there",
        abbreviated(name),
    )


def note_losses(leases: list[Lease], stats: Stats) -> None:
    """Count the leases that a batch found lost, and log them in one line."""
    lost = [lease.name for lease in leases if not lease._loss_reported()]
    stats.losses += len(lost)
    if len(lost) == 1:
        warn_of_loss(lost[0], "release")
    elif lost:
        names = ", ".join(map(abbreviated, lost[:NAMED])) + (" ..." if len(lost) > NAMED else "")
        why = "their leases had ended, or their keys were deleted or taken"
        LOG.warning("%d locks were lost before they were released, %s: %s", len(lost), names, why)
