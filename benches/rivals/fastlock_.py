"""Rival ``fastlock``, compiled or fallback: the environment of the worker says which, and this file checks it."""

from __future__ import annotations

import os
from collections.abc import Sequence

import fastlock
import fastlock.asyncio

from . import LEASE, Tasks, Threads


def versions() -> dict[str, str]:
    """Version and implementation. Raises RuntimeError if the implementation is not the one that was asked for."""
    wanted = os.environ.get("FASTLOCK_IMPL", fastlock.IMPLEMENTATION)
    if wanted != fastlock.IMPLEMENTATION:
        raise RuntimeError(f"fastlock loaded {fastlock.IMPLEMENTATION!r}, {wanted!r} was asked for")
    return {"fastlock": fastlock.__version__, "implementation": fastlock.IMPLEMENTATION}


def open_threads(url: str, label: str) -> Threads:
    """One client shared by all threads, with the default connections."""
    client = fastlock.Client.from_url(url, client_name=label)

    def batch(names: Sequence[str]) -> tuple[int, int]:
        leases = client.acquire_many(names, timeout=LEASE)
        released = client.release_many(leases)
        return sum(lease is not None for lease in leases), sum(released)

    return Threads(client.lock, batch, client.close, lambda: client.get_stats()["commands"])


async def open_tasks(url: str, label: str) -> Tasks:
    """One client shared by all tasks, with the default connections."""
    client = fastlock.asyncio.Client.from_url(url, client_name=label)
    return Tasks(client.lock, client.close, lambda: client.get_stats()["commands"])
