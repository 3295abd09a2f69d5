"""Owners: what stands for the calling thread, or for the running task, where leases are kept.

Compiled from this same text where there is a compiler. Never here: the leases.
"""

from __future__ import annotations

import threading
import weakref
from asyncio import current_task
from threading import get_ident
from typing import Any

from fastlock._protocol.base_lock import BaseLock
from fastlock._transport.internals import running_task

_thread = threading.local()


class _Sentinel:
    """What a thread keeps as long as it lives."""

    __slots__ = ("__weakref__",)


class ThreadOwner:
    """Stands for one thread, as the owner of leases. It may outlive the thread."""

    __slots__ = ("ident", "sentinel")

    def __init__(self, sentinel: _Sentinel) -> None:
        self.sentinel = weakref.ref(sentinel)
        self.ident = get_ident()  # while it has not ended, no other thread has this number

    def ended(self) -> bool:
        """Whether the thread has ended."""
        return self.sentinel() is None


def thread_owner() -> Any:
    """An object that stands for the calling thread. Its number would not do: a later thread may get it again."""
    try:
        return _thread.owner
    except AttributeError:
        _thread.sentinel = sentinel = _Sentinel()
        _thread.owner = owner = ThreadOwner(sentinel)
        return owner


def task_owner(lock: BaseLock) -> Any:
    """The running task. None: the lock is shared by all tasks, or no event loop runs, as where a lock is logged."""
    if not lock.thread_local:
        return None
    transport = lock._transport
    stream = transport.open_stream
    try:
        # With the loop given: to look the running one up asks the system for the process id, until Python 3.12
        if stream is not None and stream.thread == get_ident():
            wakeups = stream.wakeups
            return running_task(wakeups.loop)
        return current_task()
    except RuntimeError:
        return None
