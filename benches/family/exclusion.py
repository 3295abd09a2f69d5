"""Whether ever more held a lock at once than it allows: pure functions of what clients noted. No clock, no I/O.

An interval lasts from the return of acquire to the call to release, so it lies within that of the holding. A lease
protects until it ends: an interval ends there at the latest, a moment early, as the server counts in milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ..contention.analysis import promise

RECORD = 5


class Record(NamedTuple):
    """An acquire: a writer's or not; when it was called, granted (0: it gave up), its release called (or it gave up),
    and released. Nanoseconds of one clock."""

    writes: int
    called: int
    granted: int
    releasing: int
    released: int

    @property
    def waited(self) -> int:
        """Nanoseconds from the call to the grant, or until it gave up."""
        return (self.granted or self.releasing) - self.called


def records(numbers: Sequence[int]) -> Iterator[Record]:
    """The records of which these are the numbers."""
    return (Record(*numbers[at : at + RECORD]) for at in range(0, len(numbers), RECORD))


def events(found: Iterable[Record], lease: float) -> list[tuple[int, int, int]]:
    """When holders come (1) and go (0), and whether they write, in order of time; who goes before who comes."""
    lasts, times = promise(lease), []
    for each in found:
        end = min(each.releasing, each.called + lasts)
        if each.granted and each.granted < end:
            times += [(each.granted, 1, each.writes), (end, 0, each.writes)]
    return sorted(times)


def violations(found: Iterable[Record], lease: float, most: int | None) -> int:
    """How many came while they should have been kept out: a writer while anybody held it, anybody while a writer did,
    or while `most` others held it (None: any number of readers)."""
    holding, wrong = [0, 0], 0
    for _, comes, writes in events(found, lease):
        if comes:
            full = most is not None and holding[0] >= most
            wrong += bool(holding[1] or (holding[0] if writes else full))
        holding[writes] += 1 if comes else -1
    return wrong


def most_together(found: Iterable[Record], lease: float) -> int:
    """How many held it at once, at most."""
    now = top = 0
    for _, comes, _ in events(found, lease):
        now += 1 if comes else -1
        top = max(top, now)
    return top
