"""What must never happen in the chaos of locks other than plain ones; `judge.py` has the rules that hold for all.

Several may hold a name: what all of them claim at any moment adds up to at most the whole of it. A read-write lock is
whole by one writer or by any number of readers; a semaphore by the largest size that was in force when one of those who
hold it was granted: a smaller size counts for grants after it only. Several names as one are judged one by one, and
nobody may wait while none of them is held. What is measured besides shows that a run proves something: how many held
together.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

from .event_log import WHOLE, Request
from .judge import GAP, MOMENT, SLACK, History, Judge, Size, Span

PERMITS = 4  # of a semaphore that was not resized
KEEP = 0.6  # seconds for which leases are kept, at most
FORGOTTEN = 20.0  # seconds after which a caller counts as forgotten, however many were ahead
Part = tuple[float, float, int, Request]  # from when to when how many units are claimed, and by which request


class KeptJudge(Judge):
    """The judge of names whose leases are kept: after its release, too, a worker that was stopped or killed may have
    the name, which no recall reaches."""

    def __init__(self, history: History, longest_lease: float) -> None:
        self.taken = 0  # grants by a lease that the client had before it was asked for
        super().__init__(history, longest_lease + KEEP)
        granted = [each for each in history.requests if each.granted < math.inf and not each.rival]
        self.taken = sum(each.kept[0] < each.requested for each in granted)

    def seen(self) -> str:
        return f"{super().seen()}, {self.taken} grants by a lease that the client had"

    def excuses(self, requests: list[Request]) -> Iterator[Span]:
        yield from super().excuses(requests)
        for request in requests:
            until = request.freed + KEEP
            for stop in self.history.stops.get(request.worker, ()):
                if request.ended <= stop[1] and stop[0] <= until:
                    yield stop
            killed = self.history.kills.get(request.worker, math.inf)
            if request.granted <= killed <= until:
                yield killed, killed + request.lease


class SharedJudge(Judge):
    """The judge of names that several may hold at once."""

    def __init__(self, history: History, longest_lease: float) -> None:
        self.most = 0  # requests that held a name at once
        self.together = 0.0  # seconds in which several did
        super().__init__(history, longest_lease)

    def room(self, name: int, holders: Sequence[Request]) -> int:
        """How many units these may hold of a name together, at most."""
        raise NotImplementedError

    def parts(self, request: Request) -> Iterator[Part]:
        start, end = self.held(request)
        if end > start:
            yield start, end, request.units, request

    def no_two_holders(self, name: int, granted: list[Request]) -> None:
        """No more holders than fit: at each beginning of a claim, those that hold are added up."""
        holding: list[Part] = []
        since = 0.0
        for part in sorted((part for each in granted for part in self.parts(each)), key=lambda part: part[0]):
            start = part[0]
            if len(holding) > 1:
                self.together += max(0.0, min(start, sorted(end for _, end, _, _ in holding)[-2]) - since)
            since = start
            holding = [*(each for each in holding if each[1] > start), part]
            self.most = max(self.most, len(holding))
            units, room = sum(each[2] for each in holding), self.room(name, [each[3] for each in holding])
            if units > room:
                both = min(each[1] for each in holding) - start
                who = " and ".join(f"{each[2]} units by {each[3]}" for each in holding)
                self.say(name, start, f"{units} units of {room} held, for {both:.6f} s: {who}")


class ReadWriteJudge(SharedJudge):
    """Of read-write locks: a writer alone, or readers. A writer that was downgraded is a reader from then on."""

    def room(self, name: int, holders: Sequence[Request]) -> int:
        return WHOLE

    def parts(self, request: Request) -> Iterator[Part]:
        start, end = self.held(request)
        if start < min(request.downgraded, end):
            yield start, min(request.downgraded, end), request.units, request
        if request.downgraded < end:
            yield request.downgraded, end, 1, request

    def fences_rise(self, name: int, granted: list[Request]) -> None:
        """A writer's fence is greater than all before; a reader's than that of each writer before."""
        fenced = [each for each in granted if each.fence and each.held[1] > each.held[0]]
        highest = writer = 0
        for request in fenced:
            below = highest if request.units == WHOLE else writer
            if request.fence <= below:
                self.say(name, request.granted, f"fence {request.fence} after {below}: {request}")
            highest = max(highest, request.fence)
            writer = max(writer, request.fence) if request.units == WHOLE else writer

    def overtakers_allowed(self, request: Request, in_line: list[Request]) -> int:
        if request.first:
            return 0
        return sum(each.first and request.requested < each.requested < request.ended for each in in_line)

    def longest_allowed(self, request: Request, ahead: int) -> float:
        return min(FORGOTTEN, super().longest_allowed(request, ahead))

    def seen(self) -> str:
        return f"no writer beside anybody, {self.most} readers at once, several for {self.together:.1f} s in all"


class SemaphoreJudge(SharedJudge):
    """Of semaphores: never more permits than there are."""

    def __init__(self, history: History, longest_lease: float) -> None:
        self._in_force: dict[int, list[Size]] = {}
        super().__init__(history, longest_lease)

    def room(self, name: int, holders: Sequence[Request]) -> int:
        """The last of them was granted by the size of that moment, also when it is not known who was the last."""
        windows = [self.window(each) for each in holders]
        last = max(start for start, _ in windows)
        return max(self.largest(name, last, end) for _, end in windows if end >= last)

    @staticmethod
    def window(request: Request) -> Span:
        """The time in which the server granted the request: the moment for which it was granted was confirmed by a
        command, which may have been sent again."""
        sent = request.first_deadline - request.lease
        return max(request.requested, sent - MOMENT - request.lease), request.granted

    def largest(self, name: int, start: float, end: float) -> int:
        """The largest size that may have been in force in a span of time."""
        return max(each.size or PERMITS for each in self.in_force(name) if each.start <= end and each.end >= start)

    def in_force(self, name: int) -> list[Size]:
        """Each size, and from when to when it may have been in force. A server that loses its data has no size."""
        if name not in self._in_force:
            lost = [Size(*span, None) for span in self.history.wipes]
            changes = sorted([*self.history.sizes[name], *lost], key=lambda change: change.start)
            changes = [Size(-math.inf, -math.inf, None), *changes]
            ends = [change.end for change in changes[1:]] + [math.inf]
            pairs = zip(changes, ends, strict=True)
            self._in_force[name] = [Size(change.start, end, change.size) for change, end in pairs]
        return self._in_force[name]

    def fences_rise(self, name: int, granted: list[Request]) -> None:
        """A permit has no fence."""

    def longest_allowed(self, request: Request, ahead: int) -> float:
        return min(FORGOTTEN, super().longest_allowed(request, ahead))

    def seen(self) -> str:
        return f"never too many permits, {self.most} holders at once, several for {self.together:.1f} s in all"


class MultiJudge(Judge):
    """Of several names as one: all or none; nobody waits while nobody holds any name."""

    def __init__(self, history: History, longest_lease: float) -> None:
        self.groups: dict[tuple[int, float], list[Request]] = defaultdict(list)
        for request in history.requests:
            self.groups[request.worker, request.requested].append(request)
        self.several = 0  # grants of more than one name
        super().__init__(history, longest_lease)
        for group in self.groups.values():
            got = [each for each in group if each.granted < math.inf]
            self.several += len(got) > 1
            if 0 < len(got) < len(group):
                self.say(group[0].name, got[0].granted, f"only some of its names were granted: {group}")
            if len({(each.granted, each.released) for each in got}) > 1:
                self.say(group[0].name, got[0].granted, f"not all names were held for as long: {got}")
        super().waited_for(-1, [self.as_one(group) for group in self.groups.values()])

    @staticmethod
    def as_one(group: list[Request]) -> Request:
        """The request for all names, as what it waited for is not known."""
        return group[0]

    def waited_for(self, name: int, requests: list[Request]) -> None:
        """Not name by name: a name may be kept by somebody who waits for another, which no log shows."""

    def longest_allowed(self, request: Request, ahead: int) -> float:
        waits = len(self.groups[request.worker, request.requested]) + 1
        return min(FORGOTTEN, waits * ((ahead + 1) * self.longest_lease + GAP) + SLACK)

    def seen(self) -> str:
        return f"never two holders of a name, {self.several} grants of several names"
