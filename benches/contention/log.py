"""The log of a contest in shared memory: when it starts, who holds which name, and every grant of every client.

The log is a file of 64-bit words that all processes of a rival map. Each client writes its own part only, the holder of
a name its cells. What a client has noted is written when its run is over; in a process that is to be
killed, when it holds all its names. Times are CLOCK_MONOTONIC in nanoseconds, one clock for all processes.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from operator import gt
from time import monotonic_ns as clock
from typing import NamedTuple

from ..orders import error_text

WORD = 8
HEADER, CELL, TALLY, RECORD = 8, 4, 8, 6
"""Words of the header, of the cells of a name, of a client's tally, and of a record."""

START, STOP, READY, PID = range(4)
"""Words of the header: start of the run (0: not yet), whether to stop, names held by the victim, its process."""

HOLDER, UNTIL, BOOKS = range(3)
"""Cells of a name: client + 1 that holds it (0: none), end of what its lease promises, a number that holders add to."""

COUNT, ATTEMPTS, FAILURES, REFUSED, MET, LOST, LATE = range(7)
"""Words of a tally: records, attempts, those that raised, try-locks refused, grants that met another holder, holders
that found another in their place, holders that outlived their lease."""

BIGGEST = 1 << 30
"""Bytes of a log at most. The file is sparse: only what is written takes memory."""

BUSIEST = 250_000
"""Grants per second of one client for which there is room. Two tasks that pass a lock on to each other, without the
server, come to 60,000 each on a slow machine."""


class Grant(NamedTuple):
    """A record. ``granted`` < 0: it gave up at that time, negated; ``releasing``, ``released`` 0: it never did."""

    client: int
    name: int
    intended: int
    called: int
    granted: int
    releasing: int
    released: int


@dataclass(frozen=True)
class Shape:
    """How big a log is."""

    clients: int
    names: int
    capacity: int

    @property
    def cells(self) -> int:
        """Where the cells begin, in words."""
        return HEADER

    @property
    def tallies(self) -> int:
        """Where the tallies begin."""
        return HEADER + CELL * self.names

    @property
    def records(self) -> int:
        """Where the records begin."""
        return self.tallies + TALLY * self.clients

    @property
    def size(self) -> int:
        """Bytes."""
        return WORD * (self.records + self.clients * self.capacity * RECORD)


def shape_for(clients: int, names: int, seconds: float, laps: int = 0, arrivals: float = 0) -> Shape:
    """The shape of a run: ``laps`` of a client at most (0: as many as fit), ``arrivals`` per second over all."""
    room = 64 + (laps or int(seconds * BUSIEST)) + int(8 * seconds * arrivals / clients)
    return Shape(clients, names, min(room, BIGGEST // (WORD * RECORD * clients)))


class Log:
    """A mapped log: ``words`` is all of it, ``shape`` what the present run makes of it."""

    def __init__(self, path: str, size: int) -> None:
        self.path = path
        self.shape = Shape(0, 0, 0)
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), size)
        self.words = memoryview(self._map).cast("q")

    @classmethod
    def create(cls, size: int) -> Log:
        """A new one, all zero; ``unlink`` it once everybody has mapped it."""
        handle, path = tempfile.mkstemp(prefix="fastlock-bench-", dir=_folder(size))
        try:
            os.ftruncate(handle, size)
            return cls(path, size)
        except BaseException:
            os.unlink(path)
            raise
        finally:
            os.close(handle)

    def unlink(self) -> None:
        """Take the file's name away: it lives on while it is mapped."""
        if self.path:
            os.unlink(self.path)
            self.path = ""

    def clear(self, shape: Shape) -> None:
        """Forget the last run: all but the records, which the tallies count. The next has this shape."""
        self.shape = shape
        self.words[: shape.records] = memoryview(bytes(WORD * shape.records)).cast("q")

    def close(self) -> None:
        """Unmap it."""
        self.unlink()
        self.words.release()
        self._map.close()

    def tally(self, client: int) -> list[int]:
        """What a client counted."""
        at = self.shape.tallies + TALLY * client
        return self.words[at : at + TALLY].tolist()

    def books(self) -> list[int]:
        """The numbers that holders added to, by name."""
        shape = self.shape
        return self.words[shape.cells + BOOKS : shape.tallies : CELL].tolist()

    def grants(self, clients: int) -> Iterator[Grant]:
        """All records of the first so many clients, also of those whose process is dead."""
        for client in range(clients):
            start = self.shape.records + client * self.shape.capacity * RECORD
            words = self.words[start : start + RECORD * self.tally(client)[COUNT]].tolist()
            for at in range(0, len(words), RECORD):
                yield Grant(client, *words[at : at + RECORD])


def _folder(size: int) -> str | None:
    """In memory, if there is room: a full one ends the process that writes into it."""
    try:
        room = os.statvfs("/dev/shm")
    except OSError:
        return None
    return "/dev/shm" if room.f_bavail * room.f_frsize > size else None


class Client:
    """One caller's part of a log: what it notes, and what it looks at while it holds a name.

    ``promise``: nanoseconds after the call for which its lease surely lasts. Whoever is granted a name finds its cell
    empty, and himself in it when he leaves; else there was more than one holder, or a lease that ended meanwhile. Notes
    are written into the log by ``write``, after the run: what a caller does between two grants is time of the lock's.
    """

    __slots__ = (
        *("_books", "_cells", "_failures", "_lost", "_mark", "_met", "_notes", "_number", "_promise", "_refused"),
        *("_room", "_seen", "_shape", "_until", "_words", "errors"),
    )

    def __init__(self, log: Log, number: int, promise: int, books: bool = False) -> None:
        self._words, self._shape = log.words, log.shape
        self._number, self._mark, self._promise, self._books = number, number + 1, promise, books
        self._cells, self._room = log.shape.cells, RECORD * log.shape.capacity
        self._notes: list[int] = []  # of all records, one after the other: nothing for the garbage collector to look at
        self._until = 0  # then what it holds may be another's
        self._met = self._lost = self._refused = self._failures = self._seen = 0
        self.errors: list[str] = []

    @property
    def stopped(self) -> bool:
        """Whether the parent wants everybody to stop, or there is no more room."""
        return bool(self._words[STOP]) or len(self._notes) >= self._room

    @property
    def full(self) -> bool:
        """Whether there is no more room."""
        return len(self._notes) >= self._room

    def granted(self, name: int, intended: int, called: int, granted: int) -> None:
        """Note that the caller holds the name: see whether its cell says that another does, and write the cell."""
        words, cell = self._words, self._cells + CELL * name
        if words[cell] and granted < words[cell + UNTIL]:
            self._met += 1
        words[cell] = self._mark
        words[cell + UNTIL] = self._until = called + self._promise
        if self._books:
            self._seen = words[cell + BOOKS]
        self._notes += (name, intended, called, granted)

    def leaving(self, name: int) -> None:
        """Note that the caller is about to release: see whether its cell is still the caller's, and clear it."""
        words, cell = self._words, self._cells + CELL * name
        if self._books:
            words[cell + BOOKS] = self._seen + 1
        if words[cell] == self._mark:
            words[cell] = 0
        elif clock() < self._until:
            self._lost += 1

    def released(self, releasing: int, released: int) -> None:
        """Note when the caller called release, and when that returned (0: it raised)."""
        self._notes += (releasing, released)

    def gave_up(self, name: int, intended: int, called: int, now: int) -> None:
        """Note an acquire that did not get the name: in time, as it raised, or as it was never begun."""
        self._notes += (name, intended, called, -now, 0, 0)

    def refused(self) -> None:
        """Note that a try-lock found the name held."""
        self._refused += 1

    def failed(self, error: Exception) -> None:
        """An acquire or a release raised; the first few errors are kept."""
        self._failures += 1
        if len(self.errors) < 3:
            self.errors.append(error_text(error))

    def write(self) -> None:
        """Into the log, all of it: also of a name that it holds still, as whoever is going to be killed does."""
        held = (0, 0) if len(self._notes) % RECORD else ()
        notes = array("q", [*self._notes, *held][: self._room])
        words, shape, count = self._words, self._shape, len(notes) // RECORD
        at = shape.records + self._number * shape.capacity * RECORD
        words[at : at + len(notes)] = memoryview(notes)
        tally = shape.tallies + TALLY * self._number
        words[tally + ATTEMPTS] = count + self._refused
        words[tally + FAILURES], words[tally + REFUSED] = self._failures, self._refused
        words[tally + MET], words[tally + LOST] = self._met, self._lost
        words[tally + LATE] = sum(map(gt, notes[4::RECORD], (called + self._promise for called in notes[2::RECORD])))
        words[tally + COUNT] = count
