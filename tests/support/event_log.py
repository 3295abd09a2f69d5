"""The event log of a chaos worker, which survives a SIGKILL: one file per worker, appended by single writes.

An entry is written before what it announces (ACQUIRE, EXTENDING, RELEASE) or after what it reports (all others), with
the time on the clock of leases, which all processes of a machine share. A request is one acquire of one name; where a
lock has several names, each has a request, and their entries are one write, with one time.
"""

from __future__ import annotations

import itertools
import math
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fastlock._protocol.lease import now

ENTRY = struct.Struct("<BBHIddQ")  # what, flags, name, request, when, a time, fence (of ACQUIRE: units)
ACQUIRE, GRANT, EXTENDING, EXTENDED, RELEASE, FREED, ENDED, VANISHED, DOWNGRADE = range(9)
# ENDED: nothing was granted, or it was released at once. VANISHED: the caller was interrupted and cannot know.
# DOWNGRADE: from now on a writer claims to read only.
BLOCKING, RIVAL, FIRST = 1, 2, 4
WHOLE = 1000  # units: all of a name that several readers may hold, each of them one unit


@dataclass(slots=True)
class Request:
    """One acquire of one name, as its worker's event log reports it."""

    worker: int
    name: int
    requested: float
    lease: float  # seconds
    blocking: bool
    rival: bool  # acquired by redis-py's lock
    units: int = 1  # how much of the name: permits; of a read-write lock 1 to read, WHOLE to write
    first: bool = False  # whether it waits before those that are not so themselves
    granted: float = math.inf  # when acquire returned
    first_deadline: float = 0.0  # of the lease as it was granted
    deadline: float = 0.0  # until when the holder may believe that it holds
    latest: float = 0.0  # until when the server may keep the name for it
    fence: int = 0
    downgraded: float = math.inf  # when a writer became a reader
    released: float = math.inf  # when release was called
    freed: float = math.inf  # when release returned
    ended: float = math.inf  # when the wait ended, with a grant or without
    vanished: bool = False

    @property
    def held(self) -> tuple[float, float]:
        """The time in which the holder could rely on the lease; empty (end before begin) if it learned of the grant
        too late."""
        return self.granted, min(self.released, self.deadline)

    @property
    def kept(self) -> tuple[float, float]:
        """The time in which the server kept the name for this request, at most."""
        return self.first_deadline - self.lease, min(self.freed, self.latest)


class EventLog:
    """The file to which a worker writes. Safe in threads and against interrupts: an entry is one system call."""

    def __init__(self, path: Path) -> None:
        self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self.numbers = itertools.count()

    def write(self, what: int, request: int, value: float = 0.0, fence: int = 0) -> None:
        os.write(self.file, ENTRY.pack(what, 0, 0, request, now(), value, fence))

    def write_all(self, what: int, requests: Sequence[int], values: Sequence[float] = (), fence: int = 0) -> None:
        """The same entry for several requests, at one time."""
        when, values = now(), values or [0.0] * len(requests)
        pairs = zip(requests, values, strict=True)
        os.write(self.file, b"".join(ENTRY.pack(what, 0, 0, each, when, value, fence) for each, value in pairs))

    def begin_request(
        self, name: int, lease: float, *, blocking: bool, rival: bool = False, units: int = 1, first: bool = False
    ) -> int:
        """Log that a request begins; returns its number."""
        flags = BLOCKING * blocking | RIVAL * rival | FIRST * first
        return self._begin([name], lease, flags, units)[0]

    def begin_requests(self, names: Sequence[int], lease: float, *, blocking: bool) -> list[int]:
        """Log that a request of several names begins; returns their numbers."""
        return self._begin(names, lease, BLOCKING * blocking, 1)

    def _begin(self, names: Sequence[int], lease: float, flags: int, units: int) -> list[int]:
        requests, when = [next(self.numbers) for _ in names], now()
        pairs = zip(names, requests, strict=True)
        entries = [ENTRY.pack(ACQUIRE, flags, name, request, when, lease, units) for name, request in pairs]
        os.write(self.file, b"".join(entries))
        return requests


class Reader:
    """Reads an event log while it is being written."""

    def __init__(self, path: Path, worker: int) -> None:
        self.path, self.worker, self.offset = path, worker, 0
        self.requests: dict[int, Request] = {}

    def read(self) -> None:
        """Read what was added since the last call."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self.offset)
            text = file.read()
        whole = len(text) - len(text) % ENTRY.size
        self.offset += whole
        for entry in ENTRY.iter_unpack(text[:whole]):
            self._note(*entry)

    def _note(self, what: int, flags: int, name: int, number: int, when: float, value: float, fence: int) -> None:
        if what == ACQUIRE:
            blocking, rival, first = (bool(flags & each) for each in (BLOCKING, RIVAL, FIRST))
            self.requests[number] = Request(self.worker, name, when, value, blocking, rival, fence, first)
            return
        request = self.requests[number]
        if what == GRANT:
            request.granted = request.ended = when
            request.first_deadline = request.deadline = request.latest = value
            request.fence = fence
        elif what == EXTENDING:
            request.latest = max(request.latest, value)
        elif what == EXTENDED:
            request.deadline = value
            request.latest = max(request.latest, value)
        elif what == DOWNGRADE:
            request.downgraded = when
        elif what == RELEASE:
            request.released = min(request.released, when)
        elif what == FREED:
            request.freed = when
        elif request.granted == math.inf:
            request.ended = when
            request.vanished = what == VANISHED
