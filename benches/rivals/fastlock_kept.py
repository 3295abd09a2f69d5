"""Rival ``kept``: fastlock with ``keep=5``: a lease that was released is given out again until another client wants it.

Each name's lock is made once, as by who acquires it again and again.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import fastlock
import fastlock.asyncio

from . import Tasks, Threads
from .fastlock_ import versions as versions

KEEP = 5.0
"""Seconds."""


def _once(client: Any) -> Any:
    """The client's ``lock``, which makes a lock once."""
    return cache(lambda name, **settings: client.lock(name, keep=KEEP, **settings))


def open_threads(url: str, label: str) -> Threads:
    """One client shared by all threads, with the default connections."""
    client = fastlock.Client.from_url(url, client_name=label)
    return Threads(_once(client), None, client.close, lambda: client.get_stats()["commands"])


async def open_tasks(url: str, label: str) -> Tasks:
    """One client shared by all tasks, with the default connections."""
    client = fastlock.asyncio.Client.from_url(url, client_name=label)
    return Tasks(_once(client), client.close, lambda: client.get_stats()["commands"])
