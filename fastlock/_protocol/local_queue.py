"""Law: those who wait in this process for a name. Who of them is first, who sleeps, and to whom a lease passes on.

The first has a place in the server's queue and looks there: at once, when a message says that something has changed,
when the holder's lease ends, and every second in any case. Messages are reasons to look and never believed, so one that
is lost costs a second. The others sleep behind it; a lease that the first was granted goes round among them without a
command, for a while; when it is to go to others next, the first of those who came later joins the queue ahead of that.
All methods are called with the mutex held, but for those of `LocalQueues` that take it. Never here: commands, sockets,
asyncio, threads, sleep.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterator
from typing import Any

from fastlock._protocol.lease import ENDED, Lease, new_token
from fastlock._protocol.stats import Stats

RECHECK_SECONDS = 1.0  # seconds between two looks of the first in a place, whatever it heard
LOCAL_SECONDS = 0.01  # seconds for which a lease goes round before the server is asked who waits elsewhere
RAPID_SECONDS = 50e-6  # seconds between two passes of a lease by threads that do nothing else
SHORTEST_SLEEP = 0.001  # seconds: between two looks at a held name, so that no setting makes a busy loop
LEAST_LEASE_PART = 0.95  # part of the lease that the next one asks for, which must be left of what is passed to it


class ReleaseRoute(enum.IntEnum):
    """Which way a release takes."""

    LOCAL = 0  # the lease went to the next waiter of this client: no command is needed
    DELETE = 1  # nobody waits, as far as this client knows: a compare-and-delete
    SCRIPT = 2  # somebody waits: the script that grants the name to the first in the server's queue
    NOT_HELD = 3  # the lease was released before


_LOCAL: int = ReleaseRoute.LOCAL  # typed, where this is compiled
_DELETE: int = ReleaseRoute.DELETE
_SCRIPT: int = ReleaseRoute.SCRIPT
_NOT_HELD: int = ReleaseRoute.NOT_HELD


class Waiter:
    """One acquire that waits. `woken`: there is something to see: a lease for it, or that it is first and may look."""

    __slots__ = (
        *("next", "previous", "woken", "counted", "fenced", "queue", "key", "lease", "given_back", "ms", "name"),
        *("entry", "sleep", "linked", "on_wake"),
    )

    def __init__(
        self, name: object, key: bytes, ms: int, fenced: bool, entry: bytes | None = None, sleep: float = 0.1
    ) -> None:
        self.name = name
        self.key = key
        self.ms = ms
        self.fenced = fenced
        self.entry = entry  # of its own in the server's queue; None: among the others of its gate
        self.sleep = sleep  # seconds between two looks, where nobody tells that something has changed
        self.queue: LocalQueue | None = None  # from when it has joined
        self.linked = False  # in the line of its gate, between these two
        self.previous: Waiter | None = None
        self.next: Waiter | None = None
        self.lease: Lease | None = None  # handed to it
        self.given_back: tuple[Lease | None, bytes | None] | None = None  # what it has given back, once it has left
        self.woken = False
        self.counted = False  # as one that had to wait
        self.on_wake: Callable[[Any], object] | None = None  # ends its sleep

    def wake(self) -> None:
        self.woken = True
        wake, self.on_wake = self.on_wake, None
        if wake is not None:
            wake(None)


class WaiterList:
    """Those who wait, in order of arrival; who is in the middle of many leaves as fast as the first.

    A change is made without a call or a loop, where neither Ctrl-C nor another thread could come between.
    """

    __slots__ = ("count", "first", "last")

    def __init__(self) -> None:
        self.count = 0
        self.first: Waiter | None = None
        self.last: Waiter | None = None

    def insert(self, waiter: Waiter, previous: Waiter | None) -> None:
        """Right behind that one; None: before all others."""
        next = self.first if previous is None else previous.next
        waiter.previous, waiter.next = previous, next
        if previous is None:
            self.first = waiter
        else:
            previous.next = waiter
        if next is None:
            self.last = waiter
        else:
            next.previous = waiter
        waiter.linked = True
        self.count += 1

    def add(self, waiter: Waiter) -> None:
        """At its end."""
        waiter.previous = self.last
        if self.last is None:
            self.first = waiter
        else:
            self.last.next = waiter
        self.last = waiter
        waiter.linked = True
        self.count += 1

    def remove(self, waiter: Waiter) -> None:
        """Take it out, if it is there."""
        if not waiter.linked:
            return
        if waiter.previous is None:
            self.first = waiter.next
        else:
            waiter.previous.next = waiter.next
        if waiter.next is None:
            self.last = waiter.previous
        else:
            waiter.next.previous = waiter.previous
        waiter.previous = waiter.next = None
        waiter.linked = False
        self.count -= 1

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Waiter]:
        waiter = self.first
        while waiter is not None:
            yield waiter
            waiter = waiter.next


class LocalQueue:
    """The waiters of one process for one name, in order of arrival; they share a place in the server's queue."""

    __slots__ = (
        *(
            "queued_early",
            "entry_sent",
            "rapid",
            "remote_waiters",
            "error",
            "templates",
            "queues",
            "handed_over_at",
            "circulating",
            "key",
            "connection",
        ),
        *("recheck_at", "handovers_left", "entry", "shared", "confirmed_at", "sleep", "stale", "was_queued", "waiters"),
    )

    def __init__(self, queues: LocalQueues, key: bytes, entry: bytes | None) -> None:
        self.queues = queues
        self.key = key
        self.shared = entry is None  # among all who come; else a single waiter's
        self.entry = entry or new_token()
        self.waiters = WaiterList()
        self.entry_sent = False  # the server was asked for this place, and may know it
        self.was_queued = False  # the server has put it into the queue: others want the name, and will again
        self.queued_early = False  # it was asked for while one of us holds
        self.templates: dict[Any, Any] | None = None  # of the compiled hot path, by what they ask
        self.connection: Any = None  # the connection over which it was asked
        self.stale: tuple[Any, ...] = ()  # sessions that broke under that
        self.recheck_at = 0.0
        self.sleep = 0.0  # the shortest of those who wait, where nobody tells them; 0: somebody does
        self.handed_over_at = 0.0  # when it last passed on
        self.rapid = False  # and whether that was soon after the time before
        self.circulating: Lease | None = None  # goes round among the waiters
        self.confirmed_at = 0.0  # when the server last said who waits elsewhere
        self.remote_waiters = False
        self.handovers_left = 0.0  # left before it is their turn
        self.error: Exception | None = None  # that the first met, which is of no use to the others either

    def first(self) -> Waiter | None:
        return self.waiters.first

    def recheck_time(self, waiter: Waiter) -> float:
        """When this waiter is to look, though nobody calls it."""
        if self.first() is not waiter:
            return math.inf
        return self.recheck_at if self.circulating is None or self.queued_early else self.circulating._deadline

    def may_enter(self, waiter: Waiter, now: float) -> bool:
        """Whether it is first, and no lease of this process can come to it."""
        if self.first() is not waiter:  # nor does it clear what `lapsed` looks for to call the first
            return False
        if self.circulating is not None and self.circulating._deadline <= now:
            self.circulating = None
        self.queued_early = self.circulating is not None and self.last_local_handover()
        return self.circulating is None or self.queued_early

    def last_local_handover(self) -> bool:
        """Whether what is held here goes back to the server next, as others wait elsewhere or the first wants a fence:
        so the first joins the server's queue already."""
        waiter = self.first()
        return (self.remote_waiters and not self.handovers_left) or (waiter is not None and waiter.fenced)

    def reads(self, waiter: Waiter) -> bool:
        """Whether it is for this waiter to read what the server pushes."""
        return (self.circulating is None or self.queued_early) and self.first() is waiter

    def judge(self, waiter: Waiter, reply: list[Any], sent: float, now: float) -> Lease | None:
        """What the server's reply to an enter of this queue's entry means: the waiter has a lease now, or is to wait.

        Returns a lease that was over before the reply came. The caller undoes it on the server, by this entry, and
        takes a `new_entry` for the queue.
        """
        if not reply[0]:
            with self.queues.mutex:
                self.note_queued(math.inf if reply[1] < 0 else reply[1] / 1000, bool(reply[2]), now)
            return None
        end = sent + waiter.ms / 1000 if waiter.ms else math.inf
        lease = Lease(waiter.name, waiter.key, self.entry, end, reply[2] if waiter.fenced else None)
        lease._contended = reply[1] > 0 or self.was_queued
        if now >= end:
            return lease
        with self.queues.mutex:
            waiter.lease = lease  # first: a caller interrupted here gives back its entry, or what it was granted
            self.note_granted(waiter, lease, reply[1], sent)
        return None

    def note_queued(self, left: float, told: bool, now: float) -> None:
        """The server says: wait; the holder's lease ends in `left` seconds, and it was told or cannot be."""
        self.was_queued = True
        first = self.first()
        if first is not None:
            self.queues.note_wait(first)
        self.sleep = 0.0
        if not told or self.queues.push_refused:  # the least patient decides for all: they get it from who looks
            self.sleep = max(SHORTEST_SLEEP, min([waiter.sleep for waiter in self.waiters], default=RECHECK_SECONDS))
        self.recheck_at = now + min(left, self.sleep or RECHECK_SECONDS)

    def note_granted(self, waiter: Waiter, lease: Lease, remote_waiters: int, now: float) -> None:
        """The server says: it is yours, so many others wait elsewhere."""
        self.waiters.remove(waiter)
        self.circulating = lease
        self.confirmed_at = now
        self.queues.stats.remote_handovers += waiter.counted
        self.remote_waiters = remote_waiters > 0
        self.handovers_left = self.waiters.count if remote_waiters else math.inf
        if self.shared:
            self.new_entry()  # the old one is the lease's token now
            self.arm_expiry(now)
        else:
            self.queues.close(self)

    def arm_expiry(self, now: float) -> None:
        """Have the next one set its clock by a lease that ends before it would look by itself."""
        if self.circulating is not None and self.circulating._deadline < now + RECHECK_SECONDS:
            waiter = self.first()
            if waiter is not None:
                waiter.wake()

    def must_verify(self, waiter: Waiter, now: float) -> bool:
        """Whether it is for this waiter to see if what goes round here still holds the name: it may have been deleted,
        or let go of by its token elsewhere."""
        held = self.circulating
        if held is None or self.queued_early:  # who asks ahead finds out itself
            return False
        return held._deadline > now and self.confirmed_at + RECHECK_SECONDS <= now and self.first() is waiter

    def lease_gone(self, held: Lease) -> None:
        """It does not."""
        if self.circulating is held:
            self.circulating = None
            self.recheck_at = 0.0

    def new_entry(self) -> None:
        """Another place, at the end of the queue."""
        self.queues.forget_entry(self.entry)
        self.entry = new_token()
        self.entry_sent = self.queued_early = self.was_queued = False
        self.recheck_at = self.sleep = 0.0

    def successor_for(self, lease: Lease, now: float) -> Waiter | None:
        """To whom the lease may pass. Who wants a fence is granted each lease by the server: a lease that passes on is
        not asked about, and the key may have been lost since."""
        waiter = self.first()
        if waiter is None or waiter.fenced or not self.handovers_left or now - self.confirmed_at > LOCAL_SECONDS:
            return None
        if (
            self.entry_sent
        ):  # their place stands in the server's queue, to which it goes next: one who wanted a fence asked
            return None
        if (
            lease._token_read or lease._extensions or self.circulating is not lease
        ):  # by its token somebody may still do something
            return None
        left = (lease._deadline - now) * 1000
        # nor may it be longer: should the next one die, nobody has the name before it is over
        fits = LEAST_LEASE_PART * waiter.ms <= left <= waiter.ms if waiter.ms else left == math.inf
        return waiter if fits else None

    def release(self, lease: Lease, now: float) -> int:
        """The holder lets go: PASSED, PLAIN or HAND_OVER."""
        if self.circulating is None or self.circulating._raw_token != lease._raw_token:
            return _SCRIPT if self.waiters.count else _DELETE
        waiter = self.successor_for(lease, now)
        if waiter is not None and lease._deadline > now and self._hand_over(waiter, lease, now):
            return _LOCAL
        waiter = self.first()
        if waiter is None:
            self.queues.close(self)
        elif not self.queued_early:
            self.recheck_at = 0.0
            waiter.wake()
        self.queued_early = False
        self.circulating = None  # last: who is interrupted lets go once more
        return _SCRIPT if waiter is not None or self.remote_waiters else _DELETE

    def _hand_over(self, waiter: Waiter, lease: Lease, now: float) -> bool:
        """The lease passes to the first waiter. False: it does not, as its token was read, or it is extended, since."""
        handed = Lease(waiter.name, self.key, lease._raw_token, lease._deadline)
        handed._contended = lease._contended
        self.waiters.remove(waiter)
        if lease._token_read or lease._extensions:
            self._put_back_first(waiter)
            return False
        # From that look on no call: neither a signal's handler nor another thread comes between
        self.handovers_left -= 1
        self.circulating = waiter.lease = handed
        lease._deadline = ENDED
        self.queues.stats.local_handovers += 1
        waiter.woken = True
        self.rapid = self.queues.rapid = now - self.handed_over_at < RAPID_SECONDS
        self.handed_over_at = now
        try:
            self.arm_expiry(now)
        finally:
            self.queues.pending_wake, waiter.on_wake = (
                waiter.on_wake,
                None,
            )  # last: who is woken before could release as well
        return True

    def _put_back_first(self, waiter: Waiter) -> None:
        try:
            self.waiters.insert(waiter, None)
        except BaseException:  # a signal's handler struck as that began
            if not waiter.linked:
                self.waiters.insert(waiter, None)
            raise


class LocalQueues:
    """The gates of one client. `channel` is where its messages come."""

    def __init__(self, mutex: Any, stats: Stats | None = None) -> None:
        self.mutex = mutex
        self.stats = stats or Stats()
        self.channel = b"fastlock:" + new_token()[3:]  # as long as the scripts expect
        self.push_refused = False  # whether messages may not come: then all look every `sleep` seconds
        self.pending_wake: Callable[[Any], object] | None = None  # ends the sleep of whom a lease has passed to
        self.rapid = False  # as of the gate it was
        self.last_sweep = 0.0  # when it was last looked for leases that are over
        self.by_key: dict[bytes, LocalQueue] = {}
        self.by_entry: dict[bytes, LocalQueue] = {}
        self.on_empty: Callable[[], object] | None = None  # called when nobody waits at the server any more

    # As a slot of the pipe: of the reply to SUBSCRIBE.

    def done(self) -> bool:
        return False

    def set_result(self, reply: Any) -> None:
        self.push_refused = isinstance(reply, Exception)

    def close(self, queue: LocalQueue) -> None:
        if self.by_key.get(queue.key) is queue:
            del self.by_key[queue.key]
        self.forget_entry(queue.entry)

    def forget_entry(self, entry: bytes) -> None:
        """No message is for this entry any more."""
        self.by_entry.pop(entry, None)
        if self.on_empty is not None and not self.by_entry:
            self.on_empty()

    def enqueue(self, waiter: Waiter, now: float = -math.inf) -> None:
        """Wait behind those who do so already. Interrupted anywhere in it, `leave` puts all in order."""
        with self.mutex:
            self.enqueue_locked(waiter, now)

    def enqueue_locked(self, waiter: Waiter, now: float) -> None:
        """As `join`, with the mutex held, or where no threads are."""
        queue = self.by_key.get(waiter.key) if waiter.entry is None else None
        if queue is None:
            queue = LocalQueue(self, waiter.key, waiter.entry)
        waiter.queue = queue
        if waiter.entry is None:
            self.by_key[waiter.key] = queue
        alone, held = not queue.waiters.count, queue.circulating
        queue.waiters.add(waiter)
        # it looks; or sets its clock by a lease that ends soon; or joins the queue before that is let go
        waiter.woken = alone and (held is None or held._deadline < now + RECHECK_SECONDS or queue.last_local_handover())
        if held is not None or not alone:
            self.note_wait(waiter)
        if queue.sleep > waiter.sleep:  # who looks for it may sleep for longer than that
            first = queue.first()
            if first is not None:
                first.wake()

    def note_wait(self, waiter: Waiter) -> None:
        """It has to wait."""
        if not waiter.counted:
            waiter.counted = True
            self.stats.waits += 1

    def may_enter_now(self, waiter: Waiter, now: float) -> bool:
        """Whether this waiter is to ask the server now."""
        with self.mutex:
            queue = waiter.queue
            assert queue is not None, "it has joined"
            if not queue.may_enter(waiter, now):
                return False
            queue.entry_sent = True
            self.by_entry[queue.entry] = queue
            waiter.woken = False  # this look answers it
            return True

    def on_push(self, push: Any) -> None:
        """What the server said unasked, as whoever reads finds it: of all that only messages to us are heard."""
        if len(push) == 3 and push[0] == b"message" and push[1] == self.channel and type(push[2]) is bytes:
            self.on_grant_message(push[2])

    def on_grant_message(self, entry: bytes) -> None:
        """A message: this place has been granted the name."""
        with self.mutex:
            queue = self.by_entry.get(entry)
            waiter = None if queue is None else queue.first()
            if waiter is not None:
                waiter.wake()

    def on_reconnect(self) -> None:
        """Messages may have been lost: all who are first look."""
        with self.mutex:
            for queue in list(self.by_entry.values()):
                waiter = queue.first()
                if waiter is not None:
                    waiter.wake()

    def wake_all(self) -> None:
        """The client is closed: nobody sleeps any longer."""
        with self.mutex:
            for queue in {*self.by_key.values(), *self.by_entry.values()}:
                for waiter in list(queue.waiters):
                    waiter.wake()

    def drop_connections(self) -> None:
        """The client's connections have ended. A gate whose lease is held on would keep one of them, and its socket."""
        with self.mutex:
            for queue in {*self.by_key.values(), *self.by_entry.values()}:
                if not queue.waiters.count:
                    queue.connection = None

    def forget_waiters(self) -> None:
        """Those who wait here are no more, and nobody is to wake them."""
        for queue in {*self.by_key.values(), *self.by_entry.values()}:
            for waiter in queue.waiters:
                waiter.on_wake = None

    def fail(self, queue: LocalQueue, error: Exception) -> None:
        """The server stays away: who has waited so long does not begin again, one after the other."""
        with self.mutex:
            queue.error = error
            if self.by_key.get(queue.key) is queue:
                del self.by_key[queue.key]
            for waiter in list(queue.waiters):
                waiter.wake()

    def expire(self, now: float) -> None:
        """Call those who are next, where a lease that goes round is over, will be soon, or went round long ago; where
        nobody waits, a gate has no more use then."""
        with self.mutex:
            for queue in list(self.by_key.values()):
                waiter, held = queue.first(), queue.circulating
                if held is None:
                    continue
                if waiter is not None and (
                    held._deadline < now + RECHECK_SECONDS or queue.confirmed_at + RECHECK_SECONDS <= now
                ):
                    waiter.wake()
                elif waiter is None and (held._deadline <= now or queue.confirmed_at + RECHECK_SECONDS <= now):
                    self.close(queue)  # it may be held for ever; once it is let go, the server knows who waits

    def has_queue(self, key: bytes, now: float) -> bool:
        """Whether others of this client wait for it, or have it."""
        self.sweep(now)
        return key in self.by_key

    def sweep(self, now: float) -> None:
        """Once in a while, as others come."""
        if now >= self.last_sweep + RECHECK_SECONDS:
            self.last_sweep = now
            self.expire(now)

    def release(self, lease: Lease, now: float) -> int:
        """A holder lets go of a lease of a name for which there is, or was, a gate. Who has it next is woken when the
        mutex is free, for which he would have to sleep again."""
        wake = None
        try:
            with self.mutex:
                try:
                    return self.release_locked(lease, now)
                finally:
                    wake, self.pending_wake = self.pending_wake, None
        finally:
            if wake is not None:
                try:
                    wake(not self.rapid)
                except BaseException:  # a signal handler raised as that began
                    wake(not self.rapid)
                    raise

    def release_locked(self, lease: Lease, now: float) -> int:
        """As `release`, with the mutex held, or where no threads are. Who is to be woken is left in `wake`."""
        if lease._deadline == ENDED:  # it may be another's by now, by the same token
            return _NOT_HELD
        queue = self.by_key.get(lease._key)
        return _DELETE if queue is None else queue.release(lease, now)

    def handover_completed(self, waiter: Waiter) -> None:
        """The lease that was passed to this waiter has arrived. Only now is the next one called to join the queue: not
        while this one wakes."""
        queue = waiter.queue
        if queue is not None and not queue.entry_sent and queue.last_local_handover():
            with self.mutex:
                successor = queue.first()
                if successor is not None and not queue.entry_sent and queue.last_local_handover():
                    successor.wake()

    def take_back_expired(self, waiter: Waiter, now: float) -> Lease | None:
        """The lease that passed to this waiter, if it was over before its caller ran (others may hold the name by now);
        None: it is not over. It is to be released, and the waiter waits on, before all others but the one who asks the
        server for their place: two answers to that would be two leases.
        """
        lease = waiter.lease
        if lease is None or now < lease._deadline:
            return None
        with self.mutex:
            queue = waiter.queue
            assert queue is not None, "it has joined"
            if queue.circulating is lease:
                queue.circulating = None
            waiter.lease = None
            if self.by_key.get(waiter.key) is not queue:  # closed since, as nobody waited there
                queue = self.by_key.get(waiter.key) or LocalQueue(self, waiter.key, None)
                self.by_key[waiter.key] = waiter.queue = queue
            queue.waiters.insert(waiter, queue.first() if queue.entry_sent else None)
            return lease

    def dequeue(self, waiter: Waiter, now: float) -> tuple[Lease | None, bytes | None]:
        """Wait no longer. Returns what is to be given back: a lease that was handed to it, a place in the queue. Who is
        interrupted in it calls again, and gets the same."""
        wake = None
        try:
            with self.mutex:
                try:
                    return waiter.given_back or self._dequeue(waiter, now)
                finally:
                    wake, self.pending_wake = self.pending_wake, None
        finally:
            if wake is not None:
                try:
                    wake(None)
                except BaseException:  # a signal's handler struck as that began
                    wake(None)
                    raise

    def _dequeue(self, waiter: Waiter, now: float) -> tuple[Lease | None, bytes | None]:
        queue, lease = waiter.queue, waiter.lease
        if queue is None:
            return None, None
        interrupted = lease is None and not waiter.linked  # in joining, or in leaving
        was_first = interrupted or queue.first() is waiter
        queue.waiters.remove(waiter)
        successor = queue.first()
        if lease is not None and lease._raw_token == queue.entry:  # interrupted while it was granted: not for the next
            queue.new_entry()
        if was_first and successor is not None:
            successor.wake()
        if lease is not None:
            passed = lease._deadline == ENDED or queue.release(lease, now) == _LOCAL
            if not queue.waiters.count and queue.circulating is None:
                self.close(queue)
            waiter.given_back, waiter.lease = (None if passed else lease, None), None
            return waiter.given_back
        entry = queue.entry if queue.entry_sent and successor is None else None
        if successor is None and queue.circulating is not None and queue.circulating._deadline > now:
            queue.new_entry()
        elif successor is None:
            self.close(queue)
        waiter.given_back = None, entry
        return waiter.given_back
