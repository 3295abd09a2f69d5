"""The log of a contest in shared memory: when it starts, which client holds which name, and every grant.

The log is a file of 64-bit words that all processes of a rival map. Each client writes its own part only, and the
holder of a name writes the cells of the name. What a client has noted is written when its run is over; in a process
that is to be killed, when it holds all its names. Times are CLOCK_MONOTONIC in nanoseconds, one clock for all
processes.
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
"""Words of the header: start of the run (0: not yet), whether to stop, number of names that the victim of a crash
holds, the victim's process id."""

HOLDER, UNTIL, BOOKS = range(3)
"""Cells of a name: the client that holds it, plus 1 (0: none), the time until which its lease surely lasts, a number
that holders add to."""

COUNT, ATTEMPTS, FAILURES, REFUSED, MET, LOST, LATE = range(7)
"""Words of a tally: records, attempts, those that raised, try-locks refused, grants that met another holder, holders
that found another in their place, holders that outlived their lease."""

BIGGEST = 1 << 30
"""The largest size of a log in bytes. The file is sparse: only what is written takes memory."""

BUSIEST = 250_000
"""Grants per second of one client for which there is room. Two tasks that hand a lock over to each other, without the
server, reach 60,000 each on a slow machine."""


class Grant(NamedTuple):
    """A record of one acquire. ``granted`` < 0: the client gave up at that time, negated; ``releasing``, ``released``
    0: it never released."""

    client: int
    name: int
    intended: int
    called: int
    granted: int
    releasing: int
    released: int


@dataclass(frozen=True)
class Shape:
    """The size of a log, and where its parts are."""

    clients: int
    names: int
    capacity: int

    @property
    def cells(self) -> int:
        """The word at which the cells begin."""
        return HEADER

    @property
    def tallies(self) -> int:
        """The word at which the tallies begin."""
        return HEADER + CELL * self.names

    @property
    def records(self) -> int:
        """The word at which the records begin."""
        return self.tallies + TALLY * self.clients

    @property
    def size(self) -> int:
        """The size of the log in bytes."""
        return WORD * (self.records + self.clients * self.capacity * RECORD)


def shape_for(clients: int, names: int, seconds: float, laps: int = 0, arrivals: float = 0) -> Shape:
    """The shape of the log of a run: ``laps`` of a client at most (0: as many as fit), ``arrivals`` per second over
    all."""
    room = 64 + (laps or int(seconds * BUSIEST)) + int(8 * seconds * arrivals / clients)
    return Shape(clients, names, min(room, BIGGEST // (WORD * RECORD * clients)))


class Log:
    """A mapped log: ``words`` is all of it, ``shape`` how the present run divides it."""

    def __init__(self, path: str, size: int) -> None:
        self.path = path
        self.shape = Shape(0, 0, 0)
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), size)
        self.words = memoryview(self._map).cast("q")

    @classmethod
    def create(cls, size: int) -> Log:
        """Create a log of zeros; ``unlink`` it once all processes have mapped it."""
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
        """Remove the name of the file, which exists as long as it is mapped."""
        if self.path:
            os.unlink(self.path)
            self.path = ""

    def clear(self, shape: Shape) -> None:
        """Clear the log for a run of this shape; the records stay, as the tallies say how many of them count."""
        self.shape = shape
        self.words[: shape.records] = memoryview(bytes(WORD * shape.records)).cast("q")

    def close(self) -> None:
        """Unmap the log."""
        self.unlink()
        self.words.release()
        self._map.close()

    def tally(self, client: int) -> list[int]:
        """The tally of a client."""
        at = self.shape.tallies + TALLY * client
        return self.words[at : at + TALLY].tolist()

    def books(self) -> list[int]:
        """The numbers that holders added to, by name."""
        shape = self.shape
        return self.words[shape.cells + BOOKS : shape.tallies : CELL].tolist()

    def grants(self, clients: int) -> Iterator[Grant]:
        """All records of the first ``clients`` clients, also of those whose process is dead."""
        for client in range(clients):
            start = self.shape.records + client * self.shape.capacity * RECORD
            words = self.words[start : start + RECORD * self.tally(client)[COUNT]].tolist()
            for at in range(0, len(words), RECORD):
                yield Grant(client, *words[at : at + RECORD])


def _folder(size: int) -> str | None:
    """The folder for a log: in memory, if there is room, as a process that writes to a full file system is killed."""
    try:
        room = os.statvfs("/dev/shm")
    except OSError:
        return None
    return "/dev/shm" if room.f_bavail * room.f_frsize > size else None


class Client:
    """One client's part of a log: what the client notes, and which cells it checks while it holds a name.

    ``promise``: nanoseconds for which a lease surely lasts after the call. A client that is granted a name finds the
    cell of the name empty, and its own number in it when it leaves; else there was more than one holder, or a lease
    that ended meanwhile. Notes are written into the log by ``write``, after the run: what a client does between two
    grants counts as time of the lock's.
    """

    __slots__ = (
        *("_books", "_cells", "_failures", "_lost", "_mark", "_met", "_notes", "_number", "_promise", "_refused"),
        *("_room", "_seen", "_shape", "_until", "_words", "errors"),
    )

    def __init__(self, log: Log, number: int, promise: int, books: bool = False) -> None:
        self._words, self._shape = log.words, log.shape
        self._number, self._mark, self._promise, self._books = number, number + 1, promise, books
        self._cells, self._room = log.shape.cells, RECORD * log.shape.capacity
        self._notes: list[
            int
        ] = []  # of all records, one after the other: numbers that the garbage collector does not visit
        self._until = 0  # the time from which another client may hold the name
        self._met = self._lost = self._refused = self._failures = self._seen = 0
        self.errors: list[str] = []

    @property
    def stopped(self) -> bool:
        """Whether the parent tells all clients to stop, or the client's part of the log is full."""
        return bool(self._words[STOP]) or len(self._notes) >= self._room

    @property
    def full(self) -> bool:
        """Whether the client's part of the log is full."""
        return len(self._notes) >= self._room

    def granted(self, name: int, intended: int, called: int, granted: int) -> None:
        """Note that the client was granted the name: check the cell of the name, and write the client into it."""
        words, cell = self._words, self._cells + CELL * name
        if words[cell] and granted < words[cell + UNTIL]:
            self._met += 1
        words[cell] = self._mark
        words[cell + UNTIL] = self._until = called + self._promise
        if self._books:
            self._seen = words[cell + BOOKS]
        self._notes += (name, intended, called, granted)

    def leaving(self, name: int) -> None:
        """Note that the client is about to release the name: check the cell again, and clear it."""
        words, cell = self._words, self._cells + CELL * name
        if self._books:
            words[cell + BOOKS] = self._seen + 1
        if words[cell] == self._mark:
            words[cell] = 0
        elif clock() < self._until:
            self._lost += 1

    def released(self, releasing: int, released: int) -> None:
        """Note when the client called release, and when release returned (0: it raised)."""
        self._notes += (releasing, released)

    def gave_up(self, name: int, intended: int, called: int, now: int) -> None:
        """Note that an acquire gave up now, or raised, or that an arrival was never served."""
        self._notes += (name, intended, called, -now, 0, 0)

    def refused(self) -> None:
        """Note that a try-lock found the name held."""
        self._refused += 1

    def failed(self, error: Exception) -> None:
        """Note that an acquire or a release raised; the first three errors are kept."""
        self._failures += 1
        if len(self.errors) < 3:
            self.errors.append(error_text(error))

    def write(self) -> None:
        """Write all notes into the log, also that of a name which the client still holds, as the victim of a crash
        does."""
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
