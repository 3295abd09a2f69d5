"""Bytes: which process this is, in Python: `_fork.pyx` says what for, and what may live here.

A byte that the kernel clears in each forked child tells it, at a tenth of what asking for the number of the process
costs; where the kernel cannot, that is asked for.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Callable
from threading import get_ident
from typing import Any

_WIPE_ON_FORK = 18  # for Linux's madvise, which `mmap` does not name


class _Pid:
    """As that byte, where no kernel clears one."""

    def __setitem__(self, at: int, value: int) -> None:
        self.pid = os.getpid()

    def __getitem__(self, at: int) -> bool:
        return self.pid == os.getpid()


def _mark() -> Any:
    """Whose first item is false in a forked child, until it is set there."""
    if sys.platform != "linux":
        return _Pid()
    try:
        page = mmap.mmap(-1, mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        page.madvise(_WIPE_ON_FORK)
        return page
    except OSError:  # a Linux before 4.14
        return _Pid()


_mine = _mark()
_mine[0] = 1
_generation = 0
_caretakers: dict[int, int] = {}  # the thread that runs the hooks, by process
_hooks: list[Callable[[], object]] = []


def at_fork(hook: Callable[[], object]) -> None:
    """Have `hook` called, without arguments, in each forked child before it does anything. A hook that is interrupted
    is called again."""
    _hooks.append(hook)


def check() -> None:
    """Forget what was the parent's, if that has not been done yet."""
    if not _mine[0]:
        _forget()


def generation() -> int:
    """Of this process among its forks: other than that of its parent."""
    if not _mine[0]:
        _forget()
    return _generation


def _forget() -> None:
    global _generation
    pid, me = os.getpid(), get_ident()
    if _caretakers.get(pid) == me:  # a hook may do what begins with a check
        return
    while not _mine[0]:
        if _caretakers.setdefault(pid, me) != me:  # another thread is at it, and must be done before this one goes on
            os.sched_yield()
            continue
        try:
            if not _mine[0]:  # it was done between the two looks
                _generation += 1
                for hook in _hooks:
                    hook()
                _mine[0] = 1
        finally:
            _caretakers.clear()  # also of one that a parent's thread left, whose number comes again some day


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=check)  # what can be done at once is
