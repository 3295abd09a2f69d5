"""Law: what is owned. The lease of one acquisition, the clock it is measured by, and the tokens that name it.

A lease is a value: it says without I/O how long it is valid, and never claims more than the server granted, because its
time is counted from before the command was sent, on a clock that nobody can set back and that goes on while the machine
sleeps. Never here: sockets, waiting, a client's state.
"""

from __future__ import annotations

import functools
import math
import os
import time
from collections.abc import Callable
from typing import Any

from fastlock._fork import at_fork, check, generation

__all__ = ["Lease", "new_token", "now"]

# CLOCK_MONOTONIC stands still while a machine is suspended, and the server's lease does not.
# (macOS's counts on, and there is no other.)
_BOOTTIME: int | None = getattr(time, "CLOCK_BOOTTIME", None)
now: Callable[[], float] = time.monotonic if _BOOTTIME is None else functools.partial(time.clock_gettime, _BOOTTIME)

ENDED = -math.inf  # the deadline of a lease of which the server said that it is over


class Lease:
    """What one acquisition owns: the name, the token that proves it, and until when.

    `remaining` and `valid` need no I/O and may be asked often. A lease is not shared with a forked child.
    """

    __slots__ = (
        *("_name", "_key", "_raw_token", "_deadline", "_fence", "_contended", "_token_read", "_expiry_unknown"),
        *("_release_unknown", "_stale_sessions", "_extensions", "_releasing", "_unreported", "_generation"),
        "__weakref__",
    )

    def __init__(self, name: object, key: bytes, token: bytes, deadline: float, fence: int | None = None) -> None:
        self._name = name  # as the caller wrote it
        self._key = key  # as the server knows it
        self._raw_token = token
        self._deadline = deadline  # on the clock `now`
        self._fence = fence  # greater than that of every earlier holder; None unless it was asked for
        self._contended = False  # whether others waited when it was granted, or it had to wait for others
        self._token_read = False  # whether its token was read: it may be known elsewhere, where it would go on to count
        self._expiry_unknown = False  # whether only the server knows when it ends, as it was acquired elsewhere
        self._extensions = 0  # extensions of it under way: by its token, which would count for whoever had it next
        self._releasing = False  # whether a release of it was begun
        self._unreported = False  # whether it was released by a `release_many` that failed for others
        self._release_unknown = False
        self._stale_sessions: tuple[Any, ...] = ()  # that broke under an extension: to be ended before the next one
        self._generation = generation()  # a child owns nothing that its parent acquired

    @property
    def name(self) -> Any:
        """The name as the caller wrote it."""
        return self._name

    @property
    def fence(self) -> int | None:
        """A number greater than that of every earlier holder; None unless it was asked for."""
        return self._fence

    @property
    def token(self) -> bytes:
        """What proves ownership, to whoever has it. A lease whose token was read never passes to another by that. After
        its release it reads `fl-...` instead of `fl:...` and proves nothing: the next holder may have the other."""
        self._token_read = True  # first: whoever passes it on looks at this, and then ends it
        if self._deadline == ENDED and self._raw_token.startswith(b"fl:"):
            return b"fl-" + self._raw_token[3:]
        return self._raw_token

    @property
    def remaining(self) -> float:
        """Seconds until the lease ends: 0.0 once it ended, infinite for a lock without timeout."""
        if is_inherited(self):
            return 0.0
        return max(0.0, self._deadline - now())

    @property
    def valid(self) -> bool:
        """Whether nobody else can have the lock yet, as far as time tells; a deleted key is only seen by the server."""
        return not is_inherited(self) and now() < self._deadline

    @property
    def inherited(self) -> bool:
        """Whether this is a forked child's copy of its parent's lease: it owns nothing."""
        return is_inherited(self)

    def _shorten(self, end: float) -> None:
        """It ends then, if not before. No call between the two: nobody lets go of it meanwhile."""
        if end < self._deadline:
            self._deadline = end

    def _note_unknown_release(self, started: float) -> None:
        """A release was sent and its reply lost: a key that is gone then is its work, unless the lease had ended
        before."""
        self._release_unknown = self._release_unknown or self._expiry_unknown or started < self._deadline

    def __getstate__(self) -> tuple[Any, ...]:
        """For copies: they claim what the lease claims, where and when they are looked at."""
        self._token_read = True
        told = (self._name, self._key, self._raw_token, self._deadline, self._fence, self._contended)
        state = (self._release_unknown, self._expiry_unknown, self._stale_sessions, is_inherited(self))
        return (*told, *state, boot_id(), time.time() + self.remaining)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._name, self._key, self._raw_token, self._deadline, self._fence, self._contended = state[:6]
        self._release_unknown, self._expiry_unknown, self._stale_sessions, ownerless, booted, end = state[6:]
        self._generation = -1 if ownerless else generation()
        self._token_read, self._unreported, self._releasing, self._extensions = True, False, False, 0
        if math.isfinite(self._deadline):
            self._came_from(booted, end)

    def _came_from(self, booted: bytes, end: float) -> None:
        """The deadline means nothing on a clock that began with another boot, or elsewhere in a container: the clock on
        the wall, of which the two may drift apart by a second, tells one from the other."""
        if booted != boot_id():
            self._deadline, self._expiry_unknown = now(), True
        elif self._deadline - now() > (left := end - time.time()) + 1:
            self._deadline = now() + left

    def __repr__(self) -> str:
        left = self.remaining
        state = "ended" if not left else "without end" if left == math.inf else f"{left:.3f} s left"
        return f"<Lease of {self._name!r}: {state}>"  # the token proves ownership and is never shown


def is_inherited(lease: Lease) -> bool:
    """As `Lease.inherited`, which is a Python property also where this is compiled."""
    return lease._generation != generation()


@functools.cache
def boot_id() -> bytes:
    """Which boot of which machine the clock `now` counts from; empty where the system does not tell."""
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            return file.read()
    except OSError:
        return b""


_BLOCK = 256
_stock: list[bytes] = []


def new_token() -> bytes:
    """A token that nobody can guess: 128 random bits as 32 hexadecimal digits, behind what says that it is ours."""
    check()
    try:
        return _stock.pop()  # atomic: no two threads get the same
    except IndexError as none:
        if none.__traceback__ is not None and none.__traceback__.tb_next is not None:
            raise  # a signal's handler did
        digits = os.urandom(16 * _BLOCK).hex().encode()
        fresh = [b"fl:" + digits[i : i + 32] for i in range(0, 32 * _BLOCK, 32)]
        token = fresh.pop()
        _stock.extend(fresh)
        return token


at_fork(_stock.clear)  # no token may come twice
