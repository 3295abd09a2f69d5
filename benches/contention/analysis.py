"""What a log says: waits, handovers, recoveries, fairness, and whether ever more than one held a name.

What lives here: pure functions of records. Mutual exclusion is judged twice, by the intervals of the records (exact, as
all processes share one clock) and by what the holders saw in the cells (also where two times are equal). A lease
protects until it ends: what happens to a name after the end of its holder's lease is no violation. Never here: a clock,
I/O.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from .contests import Contest
from .log import ATTEMPTS, FAILURES, LATE, LOST, MET, REFUSED, Grant

RESOLUTION = 1_000_000
"""Nanoseconds to which the end of a lease is known: the server counts in milliseconds."""

SLACK = 2_000_000
"""Nanoseconds by which a server may end a lease early: it counts in milliseconds, on a clock it reads now and then."""


def promise(lease: float) -> int:
    """Nanoseconds for which a lease surely lasts after the call to acquire."""
    return int(lease * 1e9) - SLACK


def by_name(grants: Iterable[Grant]) -> dict[int, list[Grant]]:
    """The records that were granted, by name, in the order of their grants."""
    found: dict[int, list[Grant]] = defaultdict(list)
    for grant in grants:
        if grant.granted > 0:
            found[grant.name].append(grant)
    for queue in found.values():
        queue.sort(key=lambda grant: grant.granted)
    return found


def held_until(grant: Grant, lasts: int) -> int:
    """The time until which no other client may be granted the name: release is called, or the lease may end."""
    end = grant.called + lasts
    return min(grant.releasing, end) if grant.releasing else end


def overlaps(grants: Iterable[Grant], lasts: int) -> list[tuple[Grant, Grant]]:
    """Pairs of holder and intruder: a name that was granted while it was held, leases lasting so many nanoseconds."""
    found = []
    for queue in by_name(grants).values():
        holder: Grant | None = None
        for grant in queue:
            if holder is not None and grant.granted < held_until(holder, lasts):
                found.append((holder, grant))
            if holder is None or held_until(grant, lasts) > held_until(holder, lasts):
                holder = grant
    return found


def handovers(grants: Iterable[Grant]) -> list[int]:
    """Nanoseconds from a call to release to the next grant of that name, to another client, where one was waiting."""
    found = []
    for queue in by_name(grants).values():
        calls = sorted(grant.called for grant in queue)
        for number, (before, after) in enumerate(pairwise(queue)):
            # The clients of the grants up to this one have called; any other client that has called by now waits.
            waiting = bisect_right(calls, before.releasing) > number + 1
            if before.releasing and waiting and before.client != after.client:
                found.append(max(0, after.granted - before.releasing))
    return found


def recoveries(grants: Iterable[Grant], victims: int, lease: float) -> list[int]:
    """Nanoseconds from the end of a dead holder's lease to the next grant, where the next holder waited already.
    Clients from ``victims`` on are the dead holders.

    The lease begins on the server between call and grant: the middle of the two is assumed. Shorter times than
    RESOLUTION count as that.
    """
    found = []
    for queue in by_name(grants).values():
        for before, after in pairwise(queue):
            if before.client >= victims > after.client:
                end = (before.called + before.granted) // 2 + int(lease * 1e9)
                if after.called < end:
                    found.append(max(RESOLUTION, after.granted - end))
    return found


def key_changes(grants: Iterable[Grant], contest: Contest) -> int:
    """Changes of keys without which the server cannot have granted all this, where a lease may be handed over within a
    process: two for each lease, one for its grant and one for its release.

    Computed from the log alone, whatever the lock counts: a lease is a new one where the grant before it went to
    another process, or to the same client, which cannot hand it over to itself. The latter is possible where a third
    client was handed the lease in between and gave up: as many of these leases are not counted as clients gave up.
    """
    process, records = contest.process_of(), list(grants)
    given = again = released = 0
    for queue in by_name(records).values():
        given += 1
        released += queue[-1].released > 0
        for before, after in pairwise(queue):
            again += before.client == after.client
            new = before.client == after.client or process[before.client] != process[after.client]
            given += new
            released += new and before.released > 0
    forgiven = min(again, sum(record.granted <= 0 for record in records))
    return max(0, given + released - 2 * forgiven)


def lost_updates(grants: Iterable[Grant], books: Sequence[int]) -> int:
    """The number of updates that were lost: each holder reads a number, waits, and writes it plus one."""
    written = Counter(grant.name for grant in grants if grant.releasing)
    return sum(max(0, count - books[name]) for name, count in written.items())


def ranks(values: Sequence[float]) -> list[float]:
    """The place of each value in their order; equal ones share theirs."""
    order = sorted(range(len(values)), key=values.__getitem__)
    places = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end + 1 < len(order) and values[order[end + 1]] == values[order[start]]:
            end += 1
        for at in order[start : end + 1]:
            places[at] = (start + end) / 2
        start = end + 1
    return places


def order_kept(grants: Sequence[Grant]) -> float | None:
    """Rank correlation of arrival and service: 1 first come first served, 0 none, -1 reversed. None: cannot be told."""
    arrived, served = ranks([grant.called for grant in grants]), ranks([grant.granted for grant in grants])
    if len(set(arrived)) < 2 or len(set(served)) < 2:
        return None
    return statistics.correlation(arrived, served)


def never_asked(record: Grant) -> bool:
    """Whether a record is an arrival of an open loop that no client came to serve."""
    return record.called == -record.granted


def missed(record: Grant, contest: Contest, end: int) -> bool:
    """Whether an acquire was given up, however early, or raised; not if it was only cut off by the end of the run."""
    if record.granted > 0:
        return False
    return never_asked(record) or not contest.cut_off(record.called, -record.granted, end)


class Findings(NamedTuple):
    """What the log of a run says: arguments of a Sample, times to be put in histograms, what was wrong, and the key
    changes that the server must have made; ``due_passing_on``: where a lease may be handed over within a process."""

    counts: dict[str, Any]
    times: dict[str, list[int]]
    wrong: list[str]
    due: int
    due_passing_on: int


def waits(records: Iterable[Grant], contest: Contest, end: int) -> list[int]:
    """Nanoseconds from the intended start of each acquire to its grant. The worst must not be left out, nor look good:
    an acquire that gave up, or raised, counts with all the time that it might have waited."""
    return [waited_until(record, contest, end) - record.intended for record in records]


def waited_until(record: Grant, contest: Contest, end: int) -> int:
    """The time at which a wait was over; try-locks do not wait."""
    ended = abs(record.granted)
    if record.granted > 0 or never_asked(record) or not contest.blocking:
        return ended
    return max(ended, contest.deadline(record.called, end))


def punctual_waits(records: Sequence[Grant], contest: Contest, end: int) -> list[int]:
    """As ``waits``, less the time for which clients held the name for longer than they were to."""
    hold, found = int(contest.hold * 1e9), waits(records, contest, end)
    overtime = {
        name: [(grant.granted + hold, grant.releasing) for grant in queue if grant.releasing > grant.granted + hold]
        for name, queue in by_name(records).items()
    }
    begun = {name: [begin for begin, _ in periods] for name, periods in overtime.items()}
    sums = {name: [0, *accumulate(over - begin for begin, over in periods)] for name, periods in overtime.items()}

    def before(name: int, time: int) -> int:
        """The overtime of a name until ``time``, of periods that do not overlap."""
        number = bisect_left(begun.get(name, ()), time)
        if not number:
            return 0
        begin, over = overtime[name][number - 1]
        return sums[name][number - 1] + min(over, time) - begin

    return [
        wait - before(record.name, record.intended + wait) + before(record.name, record.intended)
        for record, wait in zip(records, found, strict=True)
    ]


def describe(pair: tuple[Grant, Grant]) -> str:
    """An overlap in words, for a failure."""
    holder, intruder = pair
    late = (intruder.granted - holder.granted) / 1e3
    to = f"name {holder.name} granted to client {intruder.client}"
    return f"{to}, {late:,.0f} us after client {holder.client}, who held it"


def measure(
    contest: Contest,
    records: Sequence[Grant],
    tallies: Sequence[Sequence[int]],
    books: Sequence[int],
    start: int,
    seconds: float,
) -> Findings:
    """Everything about one run that began at ``start`` and was to last ``seconds``; CPU is added by the caller.

    ``tallies``: of all clients; those from ``contest.clients`` on are the holders of a storm or crash, which do not
    count as clients.
    """
    lasts, end = promise(contest.lease), start + int(seconds * 1e9)
    total = [sum(column) for column in zip(*tallies, strict=True)]
    asked = [sum(column) for column in zip(*tallies[: contest.clients], strict=True)]
    counted = [record for record in records if record.client < contest.clients]
    granted = [record for record in counted if record.granted > 0]
    found = overlaps(records, lasts)
    late = total[LATE]
    lost = lost_updates(records, books) if contest.books and not late else 0
    counts: dict[str, Any] = {
        "grants": sum(record.granted <= end for record in granted),
        "seconds": seconds,
        "acquired": len(granted),
        "released": sum(record.released > 0 for record in granted),
        "attempts": asked[ATTEMPTS],
        "failures": total[FAILURES],
        "timeouts": total[REFUSED] + sum(missed(record, contest, end) for record in counted),
        "violations": max(len(found), total[MET], total[LOST], lost),
        "outlived": late,
        "clients": _clients(granted, contest, end),
    }
    asking = [record for record in counted if record.client] if contest.asking else counted
    times = {
        "wait": waits(asking, contest, end),
        "punctual": punctual_waits(asking, contest, end) if contest.hold else [],
        "release": [record.released - record.releasing for record in granted if record.released],
        "handover": handovers(records),
    }
    counts |= _of_role(contest, records, granted, times)
    due = counts["acquired"] + counts["released"]
    wrong = _wrong(counts["violations"], found, total, lost)
    return Findings(counts, times, wrong, due, key_changes(records, contest))


def _clients(granted: Sequence[Grant], contest: Contest, end: int) -> list[int]:
    """Grants of each client within the run; an empty list where each client had one to make."""
    if contest.laps:
        return []
    counted = Counter(record.client for record in granted if record.granted <= end)
    return [counted[client] for client in range(contest.clients)]


def _of_role(
    contest: Contest, records: Sequence[Grant], granted: Sequence[Grant], times: dict[str, list[int]]
) -> dict[str, Any]:
    """Counts that differ where arrivals are given, as waits are compared there, and in a storm and a crash, which last
    as long as they take."""
    if contest.rate or contest.asking:
        return {"score": 1e9 / max(1, statistics.median(times["wait"])) if times["wait"] else 0.0}
    if not contest.role:
        return {}
    holders = [record for record in records if record.client >= contest.clients]
    if contest.role == "crash":
        times["recovery"] = recoveries(records, contest.clients, contest.lease)
        score = 1e9 / statistics.median(times["recovery"]) if times["recovery"] else 0.0
        return {"grants": len(granted), "score": score}
    begin = max((holder.releasing for holder in holders), default=0)
    last = max((record.granted for record in granted), default=begin)
    served = (last - begin) / 1e9 if len(granted) == contest.clients else None
    return {
        "grants": len(granted),
        "seconds": served or contest.blocking_timeout,
        "served_seconds": served,
        "order": order_kept(granted),
    }


def _wrong(count: int, found: Sequence[tuple[Grant, Grant]], total: Sequence[int], lost: int) -> list[str]:
    if not count:
        return []
    seen = f"{len(found)} grants overlap, {total[MET]} met another holder, {total[LOST]} were overrun"
    example = f"; such as: {describe(found[0])}" if found else ""
    updates = f"; {lost} updates of what they guarded were lost" if lost else ""
    return [f"more than one held a name: {seen}{updates}{example}"]
