"""The judge of the chaos: finds what must never have happened, from all workers' event logs and the faults of the run.

1. No two holders: no two `Judge.held` of a name overlap, not by a microsecond.
2. Fences: of the grants of a name in their order, each fence is greater than all before.
3. No acquire returns True with a lease that has ended: but for LATE, and where its worker was stopped.
4. No name lies idle: while any caller waits for a name, the time from the end of one `Request.kept` to the next adds up
to at most GAP + SLACK. A stopped worker does not wait. Not counted: time in which the server was paused, or in which a
stopped or killed worker may have the name, as it had requested it (`Judge.excuses`).
5. No waiter is forgotten: it waits at most its position in line (itself, and all that hold or wait when it arrives)
times the longest lease, and GAP + SLACK, not counting the excuses; and LONGEST_WAIT with them. (`kind_judges.py`)
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from .event_log import Request

Span = tuple[float, float]

GAP = 1.0  # seconds: the cost of a lost message, as waiters recheck every second
MOMENT = 1.0  # seconds for which the server keeps a name for a waiter that it was granted to
SLACK = 0.5  # seconds: for a busy machine
LONGEST_WAIT = 60.0  # seconds
LATE = 0.04  # seconds for which a caller may stand still between its grant and its log entry
JUST_NOW = 0.25  # seconds: a waiter that gave up so shortly before it was stopped may not have told the server yet


@dataclass(frozen=True)
class Size:
    """A semaphore was resized, at some moment between `start` and `end`; None: to what its callers say."""

    start: float
    end: float
    size: int | None


@dataclass
class History:
    """All that happened: requests, and when workers were stopped or killed and the server was paused."""

    requests: list[Request] = field(default_factory=list)
    stops: dict[int, list[Span]] = field(default_factory=lambda: defaultdict(list))
    kills: dict[int, float] = field(default_factory=dict)
    pauses: list[Span] = field(default_factory=list)
    wipes: list[Span] = field(default_factory=list)  # in which the server lost its data
    sizes: dict[int, list[Size]] = field(default_factory=lambda: defaultdict(list))  # of each name, in order
    end: float = math.inf


def merge(spans: Iterable[Span]) -> list[Span]:
    """The union of spans, in order, without overlaps."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def without(spans: Iterable[Span], holes: Iterable[Span]) -> list[Span]:
    """The parts of spans outside of holes."""
    rest, cuts = [], merge(holes)
    for start, end in merge(spans):
        for hole_start, hole_end in cuts[max(0, bisect.bisect_left(cuts, (start, start)) - 1) :]:
            if hole_start >= end:
                break
            if hole_end > start:
                rest.append((start, hole_start))
                start = hole_end
        rest.append((start, end))
    return [(start, end) for start, end in rest if end > start]


def length(spans: Iterable[Span]) -> float:
    return sum(end - start for start, end in spans)


def shared(span: Span, others: Sequence[Span]) -> float:
    """How much of a span lies in others, which are merged."""
    total = 0.0
    for start, end in others[max(0, bisect.bisect_left(others, (span[0], span[0])) - 1) :]:
        if start >= span[1]:
            break
        total += max(0.0, min(end, span[1]) - max(start, span[0]))
    return total


class Judge:
    """`wrong` tells what must not have happened; `longest_gap`, `longest_wait` and `overtaken` what was measured;
    `excused` is how many of the seconds `waited` did not count in the search for gaps."""

    def __init__(self, history: History, longest_lease: float) -> None:
        self.history, self.longest_lease = history, longest_lease
        self.wrong: list[str] = []
        self.grants = self.longest_gap = self.longest_wait = self.waited = self.excused = 0.0
        self.longest_excused = 0.0  # the longest wait with all that is excused
        self.overtaken = 0
        by_name: dict[int, list[Request]] = defaultdict(list)
        for request in history.requests:
            by_name[request.name].append(request)
        for name, requests in sorted(by_name.items()):
            granted = sorted((each for each in requests if each.granted < math.inf), key=attrgetter("granted"))
            self.grants += len(granted)
            self.no_two_holders(name, granted)
            self.fences_rise(name, granted)
            self.no_ended_lease(name, granted)
            self.waited_for(name, requests)

    def waited_for(self, name: int, requests: list[Request]) -> None:
        """Rules 4 and 5."""
        excuses = merge(self.excuses(requests))
        self.no_idle_name(name, requests, excuses)
        self.nobody_forgotten(name, requests, excuses)

    def seen(self) -> str:
        """What the run showed beside that nothing was wrong."""
        return "never two holders"

    def say(self, name: int, when: float, what: str) -> None:
        self.wrong.append(f"name {name} at {when:.6f}: {what}")

    def no_two_holders(self, name: int, granted: list[Request]) -> None:
        last: Request | None = None
        last_end = 0.0
        for request in granted:
            start, end = self.held(request)
            if end <= start:
                continue
            if last is not None and start < last_end:
                both = min(last_end, end) - start
                self.say(name, start, f"two holders for {both:.6f} s: {last} and {request}")
            if last is None or end > last_end:
                last, last_end = request, end

    def held(self, request: Request) -> Span:
        """The time in which the holder could rely on its lease: a lease granted before the server lost its data is
        worth nothing from then on, also if it was handed over within a client since."""
        start, end = request.held
        for wiped, ended in self.history.wipes:  # data was lost at some moment in between
            if request.kept[0] < ended:
                end = min(end, wiped)
        return start, end

    def fences_rise(self, name: int, granted: list[Request]) -> None:
        highest: Request | None = None
        for request in granted:
            if not request.fence or request.held[1] <= request.held[0]:
                continue
            if highest is not None and request.fence <= highest.fence:
                self.say(name, request.granted, f"fence {request.fence} after {highest.fence}: {highest}, {request}")
            else:
                highest = request

    def no_ended_lease(self, name: int, granted: list[Request]) -> None:
        for request in granted:
            late = request.granted - request.first_deadline
            since = request.first_deadline - request.lease, request.granted
            stopped = any(
                start < since[1] and end > since[0] for start, end in self.history.stops.get(request.worker, ())
            )
            if late > LATE and not stopped and not request.rival:
                self.say(name, request.granted, f"granted {late:.3f} s after the end of its lease: {request}")

    def excuses(self, requests: list[Request]) -> Iterable[Span]:
        """The times in which a name may have been kept for a caller that cannot show it, or the server stood still.

        - A stopped worker that had requested the name: until it continues.
        - A killed one: for the lease it had requested, or the moment of a grant, whichever is longer.
        - An interrupted caller that cannot know what it got (a `Request.vanished`): for its lease.
        """
        history = self.history
        yield from history.pauses
        for request in requests:
            until = request.ended + JUST_NOW if request.granted == math.inf else request.ended
            for stop in history.stops.get(request.worker, ()):
                if request.requested <= stop[1] and stop[0] <= until:
                    yield stop
            killed = history.kills.get(request.worker, math.inf)
            if killed <= until:
                yield killed, killed + max(request.lease, MOMENT)
            if request.vanished:
                yield request.requested, request.ended + request.lease

    def waits(self, requests: list[Request]) -> Iterable[Span]:
        """The times in which a fastlock caller, neither killed nor stopped, was waiting."""
        for request in requests:
            if request.blocking and not request.rival:
                gone = min(request.ended, self.history.kills.get(request.worker, math.inf), self.history.end)
                yield from without([(request.requested, gone)], self.history.stops.get(request.worker, ()))

    def no_idle_name(self, name: int, requests: list[Request], excuses: list[Span]) -> None:
        kept = merge(request.kept for request in requests if request.granted < math.inf)
        ends = [end for _, end in kept]
        idle: dict[int, list[Span]] = defaultdict(list)
        waits = merge(self.waits(requests))
        self.waited += length(waits)
        self.excused += length(waits) - length(without(waits, excuses))
        for span in without(without(waits, kept), excuses):
            idle[bisect.bisect_right(ends, span[0])].append(span)
        for spans in idle.values():
            gap = length(spans)
            self.longest_gap = max(self.longest_gap, gap)
            if gap > GAP + SLACK:
                self.say(name, spans[0][0], f"idle for {gap:.3f} s up to {spans[-1][1]:.6f} while a caller waits")

    def nobody_forgotten(self, name: int, requests: list[Request], excuses: list[Span]) -> None:
        in_line = sorted(requests, key=attrgetter("requested"))
        grants = sorted((each.granted, each.requested) for each in requests if each.granted < math.inf)
        before: list[Request] = []
        for request in in_line:
            before = [each for each in before if self.gone(each) > request.requested]
            if request.blocking and not request.rival and request.worker not in self.history.kills:
                span = request.requested, min(request.ended, self.history.end)
                wait = span[1] - span[0] - shared(span, excuses)
                self.longest_wait = max(self.longest_wait, wait)
                self.longest_excused = max(self.longest_excused, span[1] - span[0])
                ahead = len(before) + self.overtakers_allowed(request, in_line)
                if wait > self.longest_allowed(request, ahead) or span[1] - span[0] > LONGEST_WAIT:
                    self.say(name, span[0], f"{ahead} ahead, and waited for {wait:.3f} s: {request}")
                self._count_overtakers(request, grants)
            before.append(request)

    def overtakers_allowed(self, request: Request, in_line: list[Request]) -> int:
        """How many of those that came later may be served before this one."""
        return 0

    def longest_allowed(self, request: Request, ahead: int) -> float:
        """For how many seconds a request may wait with so many ahead."""
        return (ahead + 1) * self.longest_lease + GAP + SLACK

    def gone(self, request: Request) -> float:
        """When the request blocked no other any more."""
        waited = min(request.ended, self.history.kills.get(request.worker, math.inf))
        return waited if request.granted == math.inf else max(waited, request.kept[1])

    def _count_overtakers(self, request: Request, grants: list[tuple[float, float]]) -> None:
        """Count requests that came after this one and were granted before it: measured only, as only fair=True
        promises an order."""
        if request.granted < math.inf:
            meanwhile = grants[bisect.bisect(grants, (request.requested,)) : bisect.bisect(grants, (request.granted,))]
            later = sum(requested > request.requested for _, requested in itertools.islice(meanwhile, 1000))
            self.overtaken = max(self.overtaken, later)
