"""Detects forks, in Python: `_fork.pyx` says what for, and what may live here.

A forked child finds out by a byte that the kernel clears in it, which takes a tenth of the time of `os.getpid`; where
the kernel cannot do that, `os.getpid` is used.
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
    """Stands for that byte, where the kernel cannot clear one."""

    def __setitem__(self, at: int, value: int) -> None:
        self.pid = os.getpid()

    def __getitem__(self, at: int) -> bool:
        return self.pid == os.getpid()


def _mark() -> Any:
    """An object whose first item is false in a forked child, until it is set there."""
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
    """Have `hook` called, without arguments, in each forked child before fastlock does anything there. A hook that is
    interrupted is called again."""
    _hooks.append(hook)


def check() -> None:
    """Run the hooks, if this is a forked child in which they have not run yet."""
    if not _mine[0]:
        _forget()


def generation() -> int:
    """A number of this process, which differs from that of its parent."""
    if not _mine[0]:
        _forget()
    return _generation


def _forget() -> None:
    global _generation
    pid, me = os.getpid(), get_ident()
    if _caretakers.get(pid) == me:  # a hook itself has called `check`
        return
    while not _mine[0]:
        if _caretakers.setdefault(pid, me) != me:  # another thread runs the hooks: it must be done before this goes on
            os.sched_yield()
            continue
        try:
            if not _mine[0]:  # else another thread ran them between the two checks
                _generation += 1
                for hook in _hooks:
                    hook()
                _mine[0] = 1
        finally:
            _caretakers.clear()  # also what a thread of the parent left: process numbers are used again


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=check)  # after a fork by Python the hooks run at once
