"""Rival ``unconfirmed``: fastlock with ``confirm_release=False``: a release does not wait for the server's answer."""

from __future__ import annotations

import fastlock
import fastlock.asyncio

from . import Tasks, Threads
from .fastlock_ import versions as versions


def open_threads(url: str, label: str) -> Threads:
    """One client shared by all threads, with the default connections."""
    client = fastlock.Client.from_url(url, client_name=label, confirm_release=False)
    return Threads(client.lock, None, client.close, lambda: client.get_stats()["commands"])


async def open_tasks(url: str, label: str) -> Tasks:
    """One client shared by all tasks, with the default connections."""
    client = fastlock.asyncio.Client.from_url(url, client_name=label, confirm_release=False)
    return Tasks(client.lock, client.close, lambda: client.get_stats()["commands"])
