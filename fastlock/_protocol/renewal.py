"""Renewal: held leases that are given a new end again and again, and what happens when one is lost.

A lease is due when a third of its time has passed, and those that are due soon are renewed along with it, by scripts of
up to 128 names. What is not answered is sent again until shortly before the lease ends by this process's clock, which
is before the server lets anybody else have the name: then the lease is lost, and its holder is told. A name whose lease
was lost is never acquired again in its place. Never here: sockets, asyncio, threads, sleep.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from fastlock import _errors as errors
from fastlock._protocol import commands
from fastlock._protocol.arguments import as_flag, as_ms, as_number, as_wait
from fastlock._protocol.extension import Move, set_expiry
from fastlock._protocol.handshake import Purpose
from fastlock._protocol.lease import ENDED, Lease, Lost
from fastlock._protocol.losses import warn_of_loss
from fastlock._protocol.retry import RetryState, execute, resolve, warn_refused
from fastlock._protocol.stats import Stats
from fastlock._protocol.steps import Answer, Clock, RawCommands, Steps, backoff

LEASE_SECONDS = 30.0  # of a renewed lease, unless it is given
SHORTEST_SECONDS = 0.1  # of a renewed lease: a shorter one would end while its renewal is on the way
DUE_PART = 1 / 3  # of a lease's time, after which it is renewed
JITTER = 0.1  # part of that by which it varies: many clients that began together do not go on together
EARLY_PART = 1 / 30  # of a lease's time, by which it may be renewed early, along with another
LOST_PART = 1 / 30  # of a lease's time, by which its loss is told before it ends: time to stop, and for slow machines
LOST_SECONDS, LOST_MOST = 0.2, 1 / 10  # by which it is told at least; but by no more than that part of its time
CHUNK = 128  # names renewed by one script: the server does nothing else meanwhile
SHORTEST_RETRY = 0.02  # seconds before a try at least; at most a quarter of what is left of the lease
ATTEMPT_SECONDS = 1.0  # after which a renewal that was not answered is sent again: leases added meanwhile are waiting


@dataclass(frozen=True, slots=True)
class RenewalSettings:
    """How the leases of a lock are renewed. max_hold: seconds after a grant at which renewal ends; on_lost: called with
    a lease that was lost; cancel_on_loss: whether that cancels the task in the body of the `async with`."""

    max_hold: float | None = None
    on_lost: Callable[[Lease], object] | None = None
    cancel_on_loss: bool = False


def settings_for(
    auto_renew: object,
    timeout: float | None,
    max_hold: float | None,
    on_lost: Callable[[Lease], object] | None,
    cancel_on_loss: object = False,
    confirm_release: bool = True,
) -> RenewalSettings | None:
    """The checked settings of a lock with auto_renew; None: its leases are not renewed. ValueError or TypeError:
    they make no sense. confirm_release: where it is False, on_lost makes sense by itself."""
    if on_lost is not None and not callable(on_lost):
        raise TypeError(f"on_lost must be a function of the lease that was lost, not {type(on_lost).__name__}")
    cancels = as_flag(cancel_on_loss, "cancel_on_loss")
    if not as_flag(auto_renew, "auto_renew"):
        told = on_lost if confirm_release else None
        for name, value in (("max_hold", max_hold), ("on_lost", told), ("cancel_on_loss", cancel_on_loss or None)):
            if value is not None:
                other = " or confirm_release=False" if name == "on_lost" else ""
                raise ValueError(f"{name} is of leases that are renewed: give auto_renew=True{other}, or leave it out")
        return None
    check_timeout(timeout)
    if max_hold is not None and as_wait(max_hold, "max_hold") == 0:
        raise ValueError("max_hold must be more than 0 seconds, or None to renew for as long as the lock is held")
    return RenewalSettings(max_hold, on_lost, cancels)


def check_timeout(timeout: float | None) -> None:
    """Refuse, by ValueError, a timeout with which a lease cannot be renewed."""
    if timeout is None or as_number(timeout, "timeout") < SHORTEST_SECONDS:
        raise ValueError(
            f"timeout must be at least {SHORTEST_SECONDS} seconds with auto_renew=True, not {timeout!r}: a lease is "
            f"renewed when a third of it is over (leave it out for {LEASE_SECONDS:g})"
        )
    as_ms(timeout)


def margin_of(seconds: float) -> float:
    """How long before its end a lease of so many seconds counts as lost."""
    return max(seconds * LOST_PART, min(LOST_SECONDS, seconds * LOST_MOST))


class Host(Protocol):
    """What a renewal uses of its transport."""

    @property
    def stats(self) -> Stats: ...

    def new_event(self, renewal: Renewal) -> Lost:
        """What `lease.lost` is."""

    def tell_lost(self, renewal: Renewal) -> None:
        """Tell the holder of a lease that it is lost."""

    def wake_renewal(self, time: float) -> None:
        """See to it that what is due then is renewed."""


class Renewal:
    """The renewal of one lease, until that is released or lost. It does not keep the lease alive: a lease that nobody
    can release any more is not renewed for ever."""

    __slots__ = (
        *("_untold", "added", "body", "event", "failures", "host", "lease", "lost", "margin", "ms"),
        *("over", "owner_gone", "part", "reported", "retry_at", "settings", "time", "under_way", "until"),
    )

    def __init__(
        self,
        lease: Lease,
        ms: int,
        settings: RenewalSettings,
        owner_gone: Callable[[], bool],
        host: Host,
        time: float,
    ) -> None:
        self.lease = weakref.ref(lease)
        self.ms = ms
        # Seconds before its end from which the lease counts as lost; it may be shorter than what it is renewed for
        self.margin = margin_of(min(ms / 1000, lease._time_left()))
        self.settings = settings
        self.owner_gone = owner_gone  # whether the thread or task that acquired it has ended
        self.host = host
        self.event: Any = None  # `lease.lost`, once somebody has asked for it
        self.added: dict[Renewal, None] = {}  # that of `Renewals`
        self.body: Any = None  # what is cancelled when the lease is lost
        self.until = math.inf if settings.max_hold is None else time + settings.max_hold
        self.over = False  # whether the lease was released
        self.lost = False  # whether it was found lost
        self.reported = False  # whether that was counted and logged here
        self.failures = 0  # renewals in a row that failed
        self.retry_at = 0.0  # when to try again, after a failure
        self.under_way: list[Renewal] | None = None  # those that are being renewed along with it, if it is
        self.time = math.inf  # when `Renewals.take_due` is to look at it next
        self.part = DUE_PART * random.uniform(1 - JITTER, 1)
        self._untold = [True]

    def is_lost(self) -> bool:
        """Whether the lease was lost; by this process's clock, if nobody has found out yet."""
        lease = self.lease()
        if lease is not None and not self.over and not lease._releasing and lease._time_left() <= self.margin:
            lease._shorten(lease._deadline - self.margin)
            self.found_lost(unreported=True)
        return self.lost

    def lost_from(self) -> float:
        """When the lease counts as lost, if it is not renewed before; in the past, if it was lost, or released."""
        lease = self.lease()
        return -math.inf if lease is None or self.over or self.lost else lease._deadline - self.margin

    def found_lost(self, unreported: bool = False) -> None:
        """Note that the lease was lost, and tell so, once. unreported: the loss is to be counted and logged here, as no
        release or extension that found it does so."""
        self.lost = True
        try:
            self._untold.pop()  # one thread only gets it
        except IndexError:
            return
        lease = self.lease()
        if unreported and lease is not None:
            self.reported = True
            self.host.stats.losses += 1
            warn_of_loss(lease.name, "renew")
        if self.event is not None:
            self.event.wake()
        self.host.tell_lost(self)

    def get_event(self) -> Lost:
        """`lease.lost`."""
        if self.event is None:
            self.event = self.host.new_event(self)
        event: Lost = self.event
        return event

    def end(self) -> None:
        """Note that the lease is not held any more, as it was released."""
        if not self.over:
            self.over = True
            self.added.pop(self, None)
            if self.event is not None:
                self.event.wake()

    def ends_earlier(self, lease: Lease, time: float) -> None:
        """Note that the holder has moved the end of its lease, so that it may be due earlier."""
        if not (self.over or self.lost):
            self.margin = min(self.margin, margin_of(lease._deadline - time))
            self.added[self] = None
            self.host.wake_renewal(self.next_time(lease, time))

    def has_ended(self, time: float) -> bool:
        """Whether the lease is not renewed any more: as max_hold is over, or its owner is gone."""
        return time >= self.until or self.owner_gone()

    def next_time(self, lease: Lease, time: float) -> float:
        """When there is something to do for the lease: to renew it, or to say that it is lost."""
        lost_from = lease._deadline - self.margin
        if self.under_way is not None or self.has_ended(time):
            return lost_from
        due = lease._deadline - self.ms / 1000 * (1 - self.part)
        return min(lost_from, max(due, self.retry_at)) if self.failures else due


class Renewals:
    """The leases of one client under renewal, by when there is something to do for them. `add` may be called by any
    thread; all else by one thread at a time."""

    def __init__(self, stats: Stats) -> None:
        self.stats = stats
        # Not in `heap` yet, as most leases are released before; or with another end by now
        self.added: dict[Renewal, None] = {}
        self.heap: list[tuple[float, int, Renewal]] = []
        self.serial = itertools.count()

    def add(self, renewal: Renewal) -> None:
        """Renew a lease from now on."""
        renewal.added = self.added
        self.added[renewal] = None

    def schedule(self, renewal: Renewal, time: float) -> None:
        """Look at a renewal when there is something to do for its lease."""
        lease = renewal.lease()
        if lease is not None and not (renewal.over or renewal.lost):
            renewal.time = renewal.next_time(lease, time)
            heapq.heappush(self.heap, (renewal.time, next(self.serial), renewal))

    def _schedule_added(self, renewal: Renewal, time: float) -> None:
        try:
            self.added.pop(renewal, None)  # first: another thread may add it again, as it has moved the lease's end
            self.schedule(renewal, time)
        except BaseException:  # a signal handler's
            self.added[renewal] = None
            raise

    def take_due(self, time: float) -> list[Renewal]:
        """The renewals that are due by now, or soon if one is due now: `renew` them, or call `ended`. Leases that have
        ended are told lost."""
        for renewal in list(self.added):
            self._schedule_added(renewal, time)
        due: list[Renewal] = []
        taken: list[Renewal] = []
        try:
            self._take_due(time, due, taken)
        except BaseException:  # a signal handler's: all are to be looked at again
            self.ended(due, time)
            for renewal in taken:
                self.schedule(renewal, time)
            raise
        return due

    def _take_due(self, time: float, due: list[Renewal], taken: list[Renewal]) -> None:
        later: list[Renewal] = []
        lost: list[Renewal] = []
        part = DUE_PART * random.uniform(1 - JITTER, 1)
        while self.heap:
            at, _, renewal = self.heap[0]
            early = renewal.ms / 1000 * EARLY_PART
            if at > time + (early if due and renewal.under_way is None else 0):
                break
            taken.append(renewal)  # before it is off the heap
            heapq.heappop(self.heap)
            lease = renewal.lease()
            if at != renewal.time or lease is None or renewal.over or lease._releasing or lease._deadline == ENDED:
                continue
            if lease._deadline - renewal.margin <= time:
                lease._shorten(time)
                lost.append(renewal)
            elif renewal.has_ended(time):
                later.append(renewal)
            elif renewal.next_time(lease, time) > time + early:  # its end was moved
                self.schedule(renewal, time)
            else:
                due.append(renewal)
                renewal.under_way, renewal.part = due, part
                self.schedule(renewal, time)
        for renewal in later:
            self.schedule(renewal, time)
        raised: BaseException | None = None
        for renewal in lost:
            try:
                renewal.found_lost(unreported=True)
            except BaseException as error:  # a signal handler's: first all are told
                raised = error
        if raised is not None:
            raise raised

    def ended(self, due: list[Renewal], time: float) -> None:
        """Note that what `take_due` returned is not being renewed any more, or never was."""
        for renewal in due:
            if renewal.under_way is due:
                renewal.under_way = None
                self._schedule_added(renewal, time)

    def wake_time(self) -> float:
        """When `take_due` is to be called next, if none is added before."""
        while self.heap and self.heap[0][0] != self.heap[0][2].time:
            heapq.heappop(self.heap)
        return self.heap[0][0] if self.heap else math.inf

    def attempt_end(self, time: float, waiting: Iterable[Renewal] | None = None) -> float:
        """Until when a renewal may take: half of the time until the first of the leases that wait for it (None: all)
        counts as lost, so that it can be tried again, and at most ATTEMPT_SECONDS; but never beyond that time, as who
        renews may be who tells the loss."""
        renewals = (each for _, _, each in self.heap) if waiting is None else waiting
        left = [end - time for each in renewals if (end := each.lost_from()) > time]
        return time + min([ATTEMPT_SECONDS, *(min(each, max(SHORTEST_RETRY, each / 2)) for each in left)])

    def renew(self, due: list[Renewal], until: float, clock: Clock) -> Steps[None]:
        """Renew these leases, and note what became of each; try no longer than `until`."""
        moves: list[tuple[Renewal, Lease, Move]] = []
        try:
            for renewal in due:
                if (lease := renewal.lease()) is not None:
                    moves.append((renewal, lease, Move(lease)))
            # A lease may have been released before its move had begun, and its token be the next holder's
            held = [each for each in moves if each[1]._deadline != ENDED and not each[1]._releasing]
            yield from self._renewed(held, until, clock)
        except Exception:  # such as a credential provider's: it is not called again at once
            for renewal, _, _ in moves:
                self._failed(renewal, clock)
            raise
        finally:
            for _, _, move in moves:
                move.end()
            self.ended(due, clock())

    def _renewed(self, moves: list[tuple[Renewal, Lease, Move]], until: float, clock: Clock) -> Steps[None]:
        request = RenewMany([(lease, renewal.ms) for renewal, lease, _ in moves])
        request.until, request.strict = until, True
        # An extension may be in flight there, of a caller that was interrupted: it must not overtake this
        for _, lease, _ in moves:
            request.stale = (*request.stale, *(each for each in lease._stale_sessions if each not in request.stale))
        stale = request.stale
        answered = False
        try:
            replies = yield from send_renewals(request, RetryState(clock))
            answered = replies is not None
            for _, lease, _ in moves if answered and stale else ():
                lease._stale_sessions = tuple(each for each in lease._stale_sessions if each not in stale)
        except errors.RedisError as error:
            if not errors.is_own(error):  # a signal handler raised it
                raise
            if errors.is_forbidden(error) or errors.is_cross_slot(error):
                if errors.is_forbidden(error):
                    warn_refused(request, RenewMany.purpose, error)
                answered, replies = True, (yield from _one_by_one(moves, until, clock))
            else:
                replies = None
        finally:
            if not answered:
                for _, lease, _ in moves:
                    request.note_unanswered(lease)
        for (renewal, lease, move), reply in zip(moves, replies or [None] * len(moves), strict=True):
            if reply is not None and self._note(renewal, lease, move, reply, request.sent):
                renewal.failures = 0
            else:
                self._failed(renewal, clock)

    @staticmethod
    def _failed(renewal: Renewal, clock: Clock) -> None:
        renewal.failures += 1
        most = max(SHORTEST_RETRY, (renewal.lost_from() - clock()) / 4)
        renewal.retry_at = clock() + min(backoff(renewal.failures), most)

    def _note(self, renewal: Renewal, lease: Lease, move: Move, reply: int, sent: float) -> bool:
        """Take the server's reply for one lease; 0: it is not the holder's any more. Returns False where the lease was
        renewed in vain: an extension by its holder is under way, and the earlier end holds."""
        if reply and not renewal.lost:  # a lease that was told lost does not come back
            end = sent + renewal.ms / 1000
            self.stats.renewals += 1
            lease._contended = lease._contended or reply == 2
            move.to(end)
            if lease._deadline < end:
                return lease._deadline == ENDED
            renewal.margin = margin_of(renewal.ms / 1000)
            return True
        if not (reply or lease._releasing or lease._deadline == ENDED):
            lease._deadline = ENDED
            renewal.found_lost(unreported=True)
        return True


class RenewMany(RawCommands):
    """Request: give leases a new end, each so many milliseconds from now."""

    purpose = Purpose("renew many leases at once", (commands.RENEW_MANY_LUA,))

    def __init__(self, leases: list[tuple[Lease, int]], chunk: int = CHUNK) -> None:
        parts = [leases[i : i + chunk] for i in range(0, len(leases), chunk)]
        self.sizes = list(map(len, parts))
        super().__init__(list(map(self._call, parts)))

    @staticmethod
    def _call(leases: list[tuple[Lease, int]]) -> commands.RawCommand:
        names, tokens = [lease._key for lease, _ in leases], [lease._raw_token for lease, _ in leases]
        return commands.renew_many(names, tokens, [ms for _, ms in leases])

    def good(self, replies: list[Any]) -> bool:
        """Whether there is a list of numbers for each script."""
        return len(replies) == len(self.sizes) and all(map(self._good, replies, self.sizes))

    @staticmethod
    def _good(reply: object, size: int) -> bool:
        return type(reply) is list and len(reply) == size and all(type(each) is int for each in reply)

    def note_unanswered(self, lease: Lease) -> None:
        """Note that this may be executed later, and then overrule an extension: that ends the session before. Nor may
        the lease be handed over, to a caller whose lease this would extend. (Another renewal may overtake it.)"""
        sessions = [*self.stale, None if self.connection is None else self.connection.session]
        if self.sent:
            known = lease._stale_sessions
            lease._stale_sessions = (*known, *(each for each in sessions if each is not None and each not in known))
            lease._token_read = True


def send_renewals(request: RenewMany, retry: RetryState) -> Steps[list[int | None] | None]:
    """Send the scripts, also again; returns a number for each lease, or None: there was no time for that."""
    if not request.calls:
        return []
    answer: Any = yield from execute(request, retry)
    while answer is not Answer.DEADLINE_EXCEEDED:
        if request.good(answer):
            return [number for reply in answer for number in reply]
        refusals = [each for each in answer if isinstance(each, Exception)]
        answer = yield from resolve(request, refusals[0] if refusals else ("odd", answer), retry)
    return None


def _one_by_one(moves: list[tuple[Renewal, Lease, Move]], until: float, clock: Clock) -> Steps[list[int | None]]:
    """Renew each lease by itself, for a user that may not run the script, or on a node of a cluster. Returns a reply
    for each, as of that."""
    replies: list[int | None] = []
    for renewal, lease, _ in moves:
        try:
            if clock() >= until:
                replies.append(None)
                continue
            sent = yield from set_expiry(lease._key, lease._raw_token, renewal.ms, clock, lease)
            replies.append(0 if sent is None else 1)
        except errors.RedisError as error:
            if not errors.is_own(error):
                raise
            replies.append(None)
    return replies
