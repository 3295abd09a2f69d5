"""Pottery's Redlock and AIORedlock with one master, as `rivals.pottery_` opens them. It renews nothing by itself."""

from __future__ import annotations

from ..rivals import pottery_
from ..rivals.pottery_ import versions as versions
from .cases import SidedTasks, SidedThreads


def open_case(case: str, url: str, label: str, permits: int) -> SidedThreads:
    """One client shared by all threads."""
    opened = pottery_.open_threads(url, label)
    return SidedThreads(opened.lock, None, opened.close)


async def open_case_in_task(case: str, url: str, label: str, permits: int) -> SidedTasks:
    """One client shared by all tasks."""
    opened = await pottery_.open_tasks(url, label)
    return SidedTasks(opened.lock, opened.close)
