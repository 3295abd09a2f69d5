"""Rival ``fair``: fastlock with ``fair=True``: strictly first come, first served, over all processes.

Every waiter has an entry of its own on the server, no lease is handed over within a process. Setting: its defaults.
"""

from __future__ import annotations

from functools import partial

import fastlock
import fastlock.asyncio

from . import Tasks, Threads
from .fastlock_ import versions as versions


def open_threads(url: str, label: str) -> Threads:
    """One client shared by all threads, with the default connections."""
    client = fastlock.Client.from_url(url, client_name=label)
    return Threads(partial(client.lock, fair=True), None, client.close, lambda: client.get_stats()["commands"])


async def open_tasks(url: str, label: str) -> Tasks:
    """One client shared by all tasks, with the default connections."""
    client = fastlock.asyncio.Client.from_url(url, client_name=label)
    return Tasks(partial(client.lock, fair=True), client.close, lambda: client.get_stats()["commands"])
