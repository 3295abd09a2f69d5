"""What is owned: the lease of one acquisition, the clock it is measured by, and the tokens that name it and its
process.

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
from typing import Any, Protocol

from fastlock._errors import LockError
from fastlock._fork import at_fork, check, generation

__all__ = ["Lease", "Lost", "new_token", "now", "process_id"]

# CLOCK_MONOTONIC stands still while a machine is suspended, and the server's lease goes on.
# (On macOS CLOCK_MONOTONIC goes on too, and there is no other.)
_BOOTTIME: int | None = getattr(time, "CLOCK_BOOTTIME", None)
now: Callable[[], float] = time.monotonic if _BOOTTIME is None else functools.partial(time.clock_gettime, _BOOTTIME)

ENDED = -math.inf  # the deadline of a lease that is known to be released, handed over or lost


class Lost(Protocol):
    """Whether a renewed lease was lost: an event, as those of `threading` and `asyncio`."""

    def is_set(self) -> bool:
        """Whether the lease was lost."""

    def wait(self, timeout: float | None = None) -> Any:
        """Wait until the lease is lost or released, or `timeout` seconds have passed; in asyncio, await it. Returns
        whether it was lost."""


class Lease:
    """What one acquisition owns: the name, the token that proves it, and until when.

    `remaining` and `valid` send nothing, wait for nothing, and may be asked often. A lease is not shared with a forked
    child.
    """

    __slots__ = (
        *("_name", "_key", "_raw_token", "_deadline", "_fence", "_contended", "_token_read", "_expiry_unknown"),
        *("_release_unknown", "_stale_sessions", "_extensions", "_extensions_begun", "_releasing", "_unreported"),
        *("_depth", "_reads", "_since", "_releases", "_posted", "_confirmation", "_lost_end"),
        *("_generation", "_renewal", "__weakref__"),
    )

    def __init__(self, name: object, key: bytes, token: bytes, deadline: float, fence: int | None = None) -> None:
        self._name = name  # as the caller wrote it
        self._key = key  # as the server knows it
        self._raw_token = token
        self._deadline = deadline  # on the clock `now`
        self._fence = fence  # greater than that of every earlier holder; None unless it was asked for
        self._contended = False  # whether others waited when it was granted, or it had to wait for others
        self._token_read = False  # whether its token was read: it may be known elsewhere, where it would stay valid
        self._expiry_unknown = False  # whether only the server knows when it ends, as it was acquired elsewhere
        self._extensions = 0  # extensions under way: by its token, so that they would count for the next holder, too
        self._extensions_begun = 0  # extensions so far
        self._releasing = False  # whether a release of it was begun
        self._releases = 0  # how many may have released it: none that failed, or found nothing beside another one
        self._posted = False  # whether a release of it was sent that nobody waits for, or is about to be
        self._unreported = False  # whether it was released by a `release_many` that failed for others
        self._release_unknown = False  # whether a release was sent, its reply lost: a missing key may be its work
        self._lost_end = ENDED  # when it was found lost or a release was posted, or its end then, if that was before
        self._stale_sessions: tuple[Any, ...] = ()  # sessions that broke with an extension in flight, not ended yet
        self._generation = generation()  # a forked child owns nothing that its parent acquired
        self._depth = 1  # acquires of it that were not released: more than 1 of a reentrant lock
        self._reads = 0  # acquires for reading by its holder, who holds a read-write lock for writing
        self._since = 0.0  # when it was acquired, on the clock `now`; 0: not known
        self._confirmation: Any = None  # of a grant that is believed, while it is not known
        self._renewal: Any = None  # what renews it, of a lock with auto_renew

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
        """The token that proves ownership. A lease whose token was read is not handed over locally, as the next holder
        would have the same token. After the release this is `fl-...` instead of `fl:...` and proves nothing: the next
        holder may have the other."""
        self._token_read = True  # first: a local handover checks this, and then sets the deadline to ENDED
        if self._deadline == ENDED and self._raw_token[:3] in (b"fl:", b"fk:"):
            return self._raw_token[:2] + b"-" + self._raw_token[3:]
        return self._raw_token

    @property
    def remaining(self) -> float:
        """Seconds until the lease ends: 0.0 once it ended or may have been released, infinite for a lock without
        timeout."""
        self._read_confirmation()
        return 0.0 if self._release_unknown else self._time_left()

    @property
    def valid(self) -> bool:
        """Whether nobody else can have the lock yet, as far as time tells; of a deleted key only the server knows.
        False also once a release was interrupted, or its reply lost: it may have been carried out, or will be."""
        self._read_confirmation()
        return not self._release_unknown and self._time_left() > 0

    @property
    def depth(self) -> int:
        """How often the lock was acquired and not released yet: more than 1 of a reentrant or read-write lock; 0 once
        it was released or found lost."""
        return 0 if self._deadline == ENDED else self._depth + self._reads

    @property
    def lost(self) -> Lost:
        """The event of a renewed lease that was lost: `is_set()`, and `wait(timeout)`, to be awaited in asyncio.

        It is set before the server lets anybody else have the name. Raises LockError for a lease of a lock without
        auto_renew, whose end is known from the beginning.
        """
        if self._renewal is None:
            raise LockError("the lease is not renewed, so it ends when `remaining` says: auto_renew=True of its lock")
        event: Lost = self._renewal.get_event()
        return event

    def _end(self) -> None:
        """Note that the lease was released."""
        self._deadline, self._confirmation = ENDED, None
        if self._renewal is not None:
            self._renewal.end()

    def _found_lost(self, time: float) -> None:
        """Note that the name was found not to be the holder's any more, and tell so, if the lease was renewed."""
        self._lost_end = max(self._lost_end, min(self._latest_end(), time))
        self._deadline, self._confirmation = ENDED, None
        if self._renewal is not None:
            self._renewal.found_lost()

    def _leave_to_another(self) -> bool:
        """Leave it to another release of it to tell a loss, as this one has found nothing to release: to one that may
        have released it, or whose answer is still to come; the last of several tells. False: there is no other one."""
        if self._releases > 1:  # no call between this and the change, in which another thread could do the same
            self._releases -= 1
            return True
        return False

    def _loss_reported(self) -> bool:
        """Whether who renews it has counted and logged its loss."""
        return self._renewal is not None and self._renewal.reported is True

    def _time_left(self) -> float:
        """Seconds until the lease ends by itself."""
        if is_inherited(self):
            return 0.0
        return max(0.0, self._deadline - now())

    def _read_confirmation(self) -> None:
        """Take the confirmation of a grant that is believed, if it has come."""
        if self._confirmation is not None:
            self._confirmation.read()

    def _latest_end(self) -> float:
        """When the lease ends, if a confirmation has set that of which nothing is known yet."""
        confirmation = self._confirmation
        if confirmation is None or not confirmation.sent:
            return self._deadline
        end: float = confirmation.end_from(confirmation.sent)
        return max(self._deadline, end)

    @property
    def inherited(self) -> bool:
        """Whether this is a forked child's copy of its parent's lease: it owns nothing."""
        return is_inherited(self)

    def _shorten(self, end: float) -> None:
        """Let the lease end then, if not before. No call, in which another thread could release it, is made between the
        check and the change."""
        if end < self._deadline:
            self._deadline = end

    def _note_unknown_release(self, started: float) -> None:
        """Note that a release was sent at `started` and its reply lost: a key that is found missing then counts as
        deleted by it, unless the lease had ended before."""
        end = max(self._lost_end, self._latest_end())  # it may be this release of which another one found the work
        self._release_unknown = self._release_unknown or self._expiry_unknown or started < end

    def __getstate__(self) -> tuple[Any, ...]:
        """The state of a copy or pickle, which is valid as long as the lease is, wherever it is read."""
        self._token_read = True
        self._read_confirmation()
        values = (self._name, self._key, self._raw_token, self._deadline, self._fence, self._contended)
        state = (self._release_unknown, self._expiry_unknown, self._stale_sessions, is_inherited(self))
        return (*values, *state, boot_id(), time.time() + self._time_left())

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._name, self._key, self._raw_token, self._deadline, self._fence, self._contended = state[:6]
        self._release_unknown, self._expiry_unknown, self._stale_sessions, ownerless, booted, end = state[6:]
        self._generation = -1 if ownerless else generation()
        self._token_read, self._unreported, self._releasing = True, False, False
        self._releases, self._posted = 0, False
        self._lost_end = ENDED
        self._extensions, self._extensions_begun, self._renewal = 0, 0, None
        self._depth, self._reads, self._since, self._confirmation = 1, 0, 0.0, None
        if math.isfinite(self._deadline):
            self._came_from(booted, end)

    def _came_from(self, booted: bytes, end: float) -> None:
        """Correct the deadline of a copy that came from another boot, or from a container whose clock began at another
        time. The wall clock tells; a difference of up to a second is taken for drift between the two clocks."""
        if booted != boot_id():
            self._deadline, self._expiry_unknown = now(), True
        elif self._deadline - now() > (left := end - time.time()) + 1:
            self._deadline = now() + left

    def __repr__(self) -> str:
        left = self.remaining
        state = "ended" if not left else "without end" if left == math.inf else f"{left:.3f} s left"
        return f"<Lease of {self._name!r}: {state}>"  # the token proves ownership and is never shown


def is_inherited(lease: Lease) -> bool:
    """What `Lease.inherited` says, without the cost of a Python property, which that is even where it is compiled."""
    return lease._generation != generation()


@functools.cache
def boot_id() -> bytes:
    """The id of the boot from which the clock `now` counts; empty where the system does not tell."""
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            return file.read()
    except OSError:
        return b""


ID_DIGITS = 16  # of the id of a process
_BLOCK = 256  # tokens made at a time
_process: list[bytes] = []  # the id of this process, once it was asked for
_stock: list[bytes] = []


def process_id() -> bytes:
    """The id of this process: ID_DIGITS random hexadecimal digits, others in a forked child. It is no secret: it tells
    whose a token is."""
    check()
    if not _process:
        _process.append(os.urandom(ID_DIGITS // 2).hex().encode())  # of two threads at once the first one counts
    return _process[0]


def new_token() -> bytes:
    """A token that nobody can guess: `fl:`, which says it is ours, the id of this process, and 64 random bits as 16
    hexadecimal digits. Nobody can try one without asking the server, so these are enough."""
    check()
    try:
        return _stock.pop()  # atomic: no two threads get the same token
    except IndexError as none:
        if none.__traceback__ is not None and none.__traceback__.tb_next is not None:
            raise  # a signal handler raised it
        mine, digits = b"fl:" + process_id(), os.urandom(8 * _BLOCK).hex().encode()
        fresh = [mine + digits[i : i + 16] for i in range(0, 16 * _BLOCK, 16)]
        token = fresh.pop()
        _stock.extend(fresh)
        return token


at_fork(_process.clear)
at_fork(_stock.clear)  # a child must not use its parent's tokens again
