"""The local queues: who waits in this process for a name, who of them is first, to whom a lease is handed over.

The first waiter of a queue has an entry in the server's queue. It joins that once, and then looks what became of the
entry: when the holder's lease ends, and in any case once a moment where few are ahead, else every second. A message of
a grant is believed for a moment (`belief.py`). The other waiters sleep behind the first. A lease that it was granted
circulates among them without a command, for a while; before it goes back to the server for other clients, the first of
those who came later joins the server's queue. All methods are called with the mutex held, but for those of
`LocalQueues` that take it. Never here: commands, sockets, asyncio, threads, sleep.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from fastlock._protocol import commands
from fastlock._protocol.belief import Confirmation
from fastlock._protocol.kept import KeptLeases
from fastlock._protocol.lease import ENDED, Lease, new_token
from fastlock._protocol.stats import Stats
from fastlock._protocol.waiters import Waiter, WaiterList

RECHECK_SECONDS = 1.0  # seconds after which a first waiter looks again, whatever messages came
BELIEVED_PART = 0.25  # part of a moment that must be left of it where a grant is believed
JOINS = 16  # acquires that join the server's queue at once, after one that had to share the name with other clients
EXPECTED_SECONDS = 10.0  # seconds for which it is remembered, at most, that other clients wanted a name
NEAR = WATCHING = 8  # with fewer ahead in the server's queue a waiter looks once a moment: any of those may hang
LOCAL_SECONDS = 0.01  # seconds for which a lease circulates before the server is asked who waits in other clients
RAPID_SECONDS = 50e-6  # seconds between two local handovers by threads that do nothing else
SHORTEST_SLEEP = 0.001  # seconds between two tries of a held name at least, so that no setting makes a busy loop
LEAST_LEASE_PART = 0.95  # part of the next waiter's lease time that must be left of a lease that is handed to it


class ReleaseRoute(enum.IntEnum):
    """How a lease is released."""

    LOCAL = 0  # it was handed over to the next waiter of this client: no command is needed
    DELETE = 1  # by a compare-and-delete: nobody waits, as far as this client knows
    SCRIPT = 2  # by the script that grants the name to the first in the server's queue: somebody waits
    NOT_HELD = 3  # not at all: it was released before


_LEAST_LEASE_PART: float = LEAST_LEASE_PART  # typed, where this is compiled
_BELIEVED_PART: float = BELIEVED_PART
_INFINITE: float = math.inf
_LOCAL: int = ReleaseRoute.LOCAL
_DELETE: int = ReleaseRoute.DELETE
_SCRIPT: int = ReleaseRoute.SCRIPT
_NOT_HELD: int = ReleaseRoute.NOT_HELD


class LocalQueue:
    """The waiters of one client for one name, in order of arrival; they share one entry in the server's queue."""

    __slots__ = (
        *("queues", "key", "shared", "entry", "address", "moment", "waiters", "entry_sent", "joined", "was_queued"),
        *("queued_early", "base", "granted", "fence", "ahead"),
        *("connection", "stale", "recheck_at", "sleep", "handed_over_at", "rapid", "circulating", "confirmed_at"),
        *("remote_waiters", "handovers_left", "error", "keep_until"),
    )

    def __init__(self, queues: LocalQueues, key: bytes, entry: bytes | None) -> None:
        self.queues = queues
        self.key = key
        self.shared = entry is None  # whether any waiter for the name joins it; else it is a single waiter's
        self.entry = entry or new_token()
        self.moment = queues.moment  # seconds that the entry has to confirm a grant
        self.address = queues.address()  # of the entry
        self.waiters = WaiterList()
        self.entry_sent = False  # whether an enter of the entry was sent, so that the server may have it queued
        self.joined = False  # whether a join of the entry may be executed: from then on the first waiter only looks
        self.base = -math.inf  # when the last look was sent, if it found the entry in the server's queue
        self.granted = False  # whether a message said that the entry was granted the name
        self.fence: int | None = None  # that it told
        self.was_queued = False  # whether the server queued the entry: other clients want the name, and will again
        self.queued_early = False  # whether that was done while a lease circulates here
        self.connection: Any = None  # the connection over which the entry joined, or looked last
        self.stale: tuple[Any, ...] = ()  # sessions that broke with the entry's request in flight
        self.recheck_at = 0.0  # when the first waiter is to look again, though nobody wakes it
        self.sleep = 0.0  # the shortest `sleep` of the waiters, where no message comes; 0: messages come
        self.ahead = math.inf  # how many were ahead of the entry in the server's queue, when it looked last
        self.handed_over_at = 0.0  # when the lease was last handed over locally
        self.rapid = False  # whether that was within RAPID_SECONDS of the local handover before it
        self.circulating: Lease | None = None  # the lease that circulates among the waiters
        self.confirmed_at = 0.0  # when the server last confirmed that lease and who waits in other clients
        self.remote_waiters = False  # whether other clients waited for the name then
        self.handovers_left = 0.0  # local handovers left before the lease goes to the other clients
        self.keep_until = 0.0  # until when the lease is given out again, though nobody waits: it is kept; 0: it is not
        self.error: Exception | None = None  # that the first waiter met, and which fails the other waiters as well

    def first(self) -> Waiter | None:
        return self.waiters.first

    def recheck_time(self, waiter: Waiter) -> float:
        """When this waiter is to recheck, though nobody wakes it; infinite for all but the first."""
        if self.first() is not waiter:
            return math.inf
        return self.recheck_at if self.circulating is None or self.queued_early else self.circulating._deadline

    def may_enter(self, waiter: Waiter, now: float) -> bool:
        """Whether this waiter is the first, and is not to wait for a local handover of the circulating lease."""
        if self.first() is not waiter:  # nor may it clear `circulating`, by which `expire` finds whom to wake
            return False
        if self.circulating is not None and self.circulating._deadline <= now:
            self.circulating = None
        self.queued_early = self.circulating is not None and self.last_local_handover()
        return self.circulating is None or self.queued_early

    def is_to_join(self, waiter: Waiter) -> bool:
        """Whether the first waiter is to join by the entry, instead of looking: it counts as joined from now on. The
        address says whether a grant is to come with a fence."""
        joins, self.joined = not self.joined, True
        if joins and waiter.fenced:
            self.address = commands.address(self.queues.channel, self.moment, True)
        return joins

    def last_local_handover(self) -> bool:
        """Whether the circulating lease goes back to the server next, as other clients wait or the first waiter wants a
        fence: the first waiter then joins the server's queue early."""
        waiter = self.first()
        return (self.remote_waiters and not self.handovers_left) or (waiter is not None and waiter.fenced)

    def reads(self, waiter: Waiter) -> bool:
        """Whether this waiter is the one that reads what the server pushes."""
        return (self.circulating is None or self.queued_early) and self.first() is waiter

    def judge(self, waiter: Waiter, reply: list[Any], sent: float, now: float) -> Lease | None:
        """What the server's reply to this queue's entry means: the waiter has a lease now, or is to wait, or to join by
        another entry.

        Returns a lease that ended before the reply came. The caller undoes it on the server, by this entry, and
        takes a `new_entry` for the queue.
        """
        if reply[0] <= 0:
            with self.queues.mutex:
                self.queues.note_reply(now - sent)
                if reply[0]:
                    self.note_gone()
                else:
                    left = _INFINITE if reply[1] < 0 else reply[1] / 1000
                    self.note_queued(left, bool(reply[2]), reply[3], sent, now)
            return None
        end = sent + waiter.ms / 1000 if waiter.ms else math.inf
        lease = Lease(waiter.name, waiter.key, self.entry, end, reply[2] if waiter.fenced else None)
        # Who wanted it of late may want it again by now: a delete would find it contended
        lease._contended = reply[1] > 0 or self.was_queued or self.key in self.queues.expected
        lease._since = sent
        if now >= end:
            return lease
        with self.queues.mutex:
            waiter.lease = lease  # first: a caller interrupted here gives back its entry, or what it was granted
            if self.was_queued:
                self.queues.note_moment(True)
            self.note_granted(waiter, lease, reply[1], sent)
        return None

    def note_queued(self, left: float, told: bool, ahead: int, sent: float, now: float) -> None:
        """Note that the server has queued the entry, behind so many: the holder's lease ends in `left` seconds, and its
        token was marked as contended (`told`) or cannot be."""
        self.was_queued = True
        self.base = sent
        if (first := self.first()) is not None:
            self.queues.note_wait(first)
        self.sleep = 0.0
        if not told or self.queues.push_refused:  # the shortest `sleep` counts: the first waiter enters for all
            self.sleep = max(SHORTEST_SLEEP, min([waiter.sleep for waiter in self.waiters], default=RECHECK_SECONDS))
        # From when it was sent: a late reply must not put off the next. The server says 0 for a whole last millisecond
        pause = self.sleep or (self.moment if ahead < NEAR else RECHECK_SECONDS)
        # Else it may be the moment (`end_in`: and 1 ms) of one of many; where they hardly move, they may all hang
        if self.sleep or ahead < WATCHING or left > self.moment + 2e-3 or self.ahead - ahead < WATCHING:
            pause = min(left, pause)
        self.ahead = ahead
        self.recheck_at = max(now + SHORTEST_SLEEP, sent + pause)

    def note_gone(self) -> None:
        """Note that the entry is not in the server's queue any more: it was granted and that was not confirmed in time,
        or the queue was lost. The first waiter is to join by another."""
        if self.was_queued:
            self.queues.note_moment(False)
        self.new_entry()

    def note_granted(self, waiter: Waiter, lease: Lease, remote_waiters: int, now: float) -> None:
        """Note that the server granted the waiter the name, while so many other clients' entries are queued."""
        self.waiters.remove(waiter)
        self.circulating = lease
        self.confirmed_at = now
        self.keep_until = 0.0  # no entry's token can be recalled
        self.queues.stats.remote_handovers += waiter.counted
        self.queues.expect(self.key, self.was_queued or remote_waiters > 0)
        self.remote_waiters = remote_waiters > 0
        self.handovers_left = self.waiters.count if remote_waiters else math.inf
        if self.shared:
            self.new_entry()  # the old entry is the lease's token now
            self.arm_expiry(now)
        else:
            self.queues.close(self)

    def believe(self, waiter: Waiter, now: float) -> Lease | None:
        """Believe the message that the entry was granted the name: the first waiter has a lease, until the moment is
        over, counted from when the entry last waited. The caller sends its `_confirmation`. None: not believed."""
        with self.queues.mutex:
            held, end = self.circulating, self.base + self.moment
            if not (self.granted and waiter.believes) or (waiter.fenced and self.fence is None):
                return None
            if end - now < self.moment * _BELIEVED_PART or self.first() is not waiter:
                return None
            if held is not None and held._deadline > now:
                return None
            if waiter.ms:
                end = min(end, now + waiter.ms / 1000)
            lease = Lease(waiter.name, self.key, self.entry, end, self.fence if waiter.fenced else None)
            lease._contended, lease._since = True, now
            lease._confirmation = Confirmation(self, lease, waiter.ms)
            waiter.lease = lease  # first, as in `judge`
            # Who waits elsewhere is not known: some may
            self.note_granted(waiter, lease, 1, now)
            return lease

    def note_confirmed(self, confirmation: Confirmation, remote_waiters: int, sent: float, end: float) -> None:
        """Note that a look, sent then, has confirmed a grant: it lasts until `end`, and so many other clients wait."""
        with self.queues.mutex:
            self.queues.note_moment(True)  # also where the lease is released by now
            lease = confirmation.lease
            if lease._confirmation is not confirmation:
                return  # the lease has ended, or its end was moved since
            # No call from here on until both are set. A look shortens no lease
            if lease._deadline != ENDED and lease._deadline < end:
                lease._deadline = end
            lease._confirmation = None
            if self.circulating is lease:
                self.confirmed_at = sent
                self.remote_waiters = remote_waiters > 0
                if not remote_waiters:
                    self.handovers_left = _INFINITE
                self.arm_expiry(sent)

    def note_refuted(self, confirmation: Confirmation, now: float) -> None:
        """Note that a grant that was believed is none any more: its moment is over, or the server has lost it."""
        with self.queues.mutex:
            lease = confirmation.lease
            if lease._confirmation is confirmation and not lease._releasing:
                lease._confirmation = None
                lease._shorten(now)
                self.queues.note_moment(False)

    def arm_expiry(self, now: float) -> None:
        """Wake the first waiter to set its recheck time anew, if the lease ends before it would recheck by itself."""
        held = self.circulating
        # One that is not confirmed has a new end in a round trip
        if held is not None and held._confirmation is None and held._deadline < now + RECHECK_SECONDS:
            waiter = self.first()
            if waiter is not None:
                waiter.wake()

    def must_verify(self, waiter: Waiter, now: float) -> bool:
        """Whether this waiter is to ask the server if the circulating lease still holds the name: the key may have been
        deleted, or released by its token elsewhere."""
        held = self.circulating
        if held is None or self.queued_early:  # a waiter that entered early learns it from the replies to its enter
            return False
        return held._deadline > now and self.confirmed_at + RECHECK_SECONDS <= now and self.first() is waiter

    def lease_gone(self, held: Lease) -> None:
        """Note that the circulating lease `held` does not hold the name any more."""
        if self.circulating is held:
            self.circulating = None
            self.recheck_at = 0.0

    def new_entry(self) -> None:
        """Make another entry, for another place at the end of the server's queue."""
        self.queues.forget_entry(self.entry)
        mode = self.entry[commands.TOKEN_SIZE :] if commands.is_shared(self.entry) else b""
        entry, address = new_token() + mode, self.queues.address()
        # No call from here on, in which a signal handler could raise: what was told of the old is not the new one's
        self.entry, self.address, self.moment = entry, address, self.queues.moment
        self.entry_sent = self.joined = self.queued_early = self.was_queued = self.granted = False
        self.base, self.ahead, self.fence = -_INFINITE, _INFINITE, None
        self.recheck_at = self.sleep = 0.0

    def successor_for(self, lease: Lease, now: float) -> Waiter | None:
        """The waiter that the lease may be handed over to locally, or None. A waiter that wants a fence is granted each
        lease by the server: a local handover asks nobody, and the key may have been lost since."""
        waiter = self.first()
        if waiter is None or waiter.fenced or not self.handovers_left:
            return None
        if now - self.confirmed_at > LOCAL_SECONDS and now >= self.keep_until:
            return None
        # The entry is in the server's queue already (a waiter that wanted a fence sent it): the lease goes there next
        if self.entry_sent:
            return None
        # Somebody who knows the token may still release or extend the lease by it
        if lease._token_read or lease._extensions or self.circulating is not lease:
            return None
        confirmation = lease._confirmation
        if confirmation is not None:  # it tells the end to who holds the lease then
            left = (lease._deadline - now) / self.moment
            fits = waiter.believes and waiter.ms == confirmation.ms and left > _BELIEVED_PART
            return waiter if fits and confirmation.sent else None
        left = (lease._deadline - now) * 1000
        # Nor may it be longer than asked for: should the next holder die, nobody gets the name before it ends
        most = waiter.ms + waiter.keep_ms
        fits = _LEAST_LEASE_PART * waiter.ms <= left <= most if waiter.ms else left == _INFINITE
        return waiter if fits else None

    def release(self, lease: Lease, now: float) -> int:
        """Release the holder's lease in this queue. Returns ReleaseRoute.LOCAL, DELETE or SCRIPT."""
        if self.circulating is None or self.circulating._raw_token != lease._raw_token:
            return _SCRIPT if self.waiters.count else _DELETE
        waiter = self.successor_for(lease, now)
        if waiter is not None and lease._deadline > now and self._hand_over(waiter, lease, now):
            return _LOCAL
        waiter = self.first()
        if waiter is None and now < self.keep_until and self._keep(lease, now):
            return _LOCAL
        if waiter is None:
            self.queues.close(self)
        elif not self.queued_early:
            self.recheck_at = 0.0
            waiter.wake()
        self.queued_early = False
        self.circulating = None  # last: a caller that is interrupted before releases again
        return _SCRIPT if waiter is not None or self.remote_waiters else _DELETE

    def _keep(self, lease: Lease, now: float) -> bool:
        """Keep the holder's lease for the next acquire. False: it is to be released."""
        queues = self.queues
        if not queues.hears_recalls or lease._deadline <= now or queues.by_key.get(self.key) is not self:
            return False
        kept = Lease(lease._name, self.key, lease._raw_token, lease._deadline)
        kept._depth = 0
        if lease._token_read or lease._extensions:  # as in `successor_for`
            return False
        # No call from here on, in which a signal handler could raise: it is kept now, and the holder's no more
        self.circulating, queues.kept[self.key], lease._deadline = kept, self, ENDED
        del queues.by_key[self.key]
        if self.keep_until < queues.next_lapse:
            queues.next_lapse, queues.pending_wake = self.keep_until, queues.wake_keeper
        return True

    def recall(self, now: float) -> None:
        """Note that another client wants the name: the lease goes round among those who wait now, and then over."""
        self.confirmed_at = now  # the server has it still
        self.keep_until, self.remote_waiters, self.handovers_left = 0.0, True, self.waiters.count

    def _hand_over(self, waiter: Waiter, lease: Lease, now: float) -> bool:
        """Hand the lease over to the first waiter. False: it was not, as meanwhile its token was read or an extension
        of it has begun."""
        handed = Lease(waiter.name, self.key, lease._raw_token, lease._deadline)
        handed._contended, handed._confirmation = lease._contended, lease._confirmation
        handed._since = now
        self.waiters.remove(waiter)
        if lease._token_read or lease._extensions:
            self._put_back_first(waiter)
            return False
        # No call from the check above to the changes below: neither a signal handler nor another thread interrupts them
        self.handovers_left -= 1
        self.circulating = waiter.lease = handed
        if handed._confirmation is not None:
            handed._confirmation.lease = handed
        lease._deadline, lease._confirmation = ENDED, None
        self.queues.stats.local_handovers += 1
        waiter.woken = True
        self.rapid = self.queues.rapid = now - self.handed_over_at < RAPID_SECONDS
        self.handed_over_at = now
        try:
            self.arm_expiry(now)
        finally:
            # Last: a waiter that is woken before could release as well
            self.queues.pending_wake, waiter.on_wake = waiter.on_wake, None
        return True

    def _put_back_first(self, waiter: Waiter) -> None:
        try:
            self.waiters.insert(waiter, None)
        except BaseException:  # raised by a signal handler, before the waiter was inserted or after
            if not waiter.linked:
                self.waiters.insert(waiter, None)
            raise


class LocalQueues(KeptLeases):
    """The local queues of one client."""

    def __init__(self, mutex: AbstractContextManager[object], stats: Stats | None = None) -> None:
        super().__init__(mutex, stats or Stats(), b"fastlock:" + new_token()[3:])  # as long as the scripts expect
        self.push_refused = False  # whether SUBSCRIBE was refused: first waiters then look every `sleep` seconds
        self.poll: Callable[[], Any] | None = None  # a weak reference to what `read_replies` calls
        self.pending_wake: Callable[[Any], object] | None = None  # `on_wake` of a waiter that was handed a lease
        self.rapid = False  # `rapid` of the queue in which that was
        self.next_sweep = 0.0  # when `sweep` is to call `expire` next
        self.expected: dict[bytes, int] = {}  # names that other clients wanted of late: how many acquires join at once
        self.forget_at = 0.0  # when those are forgotten next
        self.templates: dict[Any, Any] = {}  # kept by the transport: of commands for a name
        self.by_entry: dict[bytes, LocalQueue] = {}  # the queues whose entry the server may have queued
        self.on_empty: Callable[[], object] | None = None  # called when no entry is left in the server's queues

    # The interface of a pending reply, for the reply to SUBSCRIBE.

    def done(self) -> bool:
        return False

    def set_result(self, reply: object) -> None:
        self.push_refused = isinstance(reply, Exception)

    def read_replies(self) -> None:
        """Take what the server has sent by now, where no event loop does that."""
        poll = None if self.poll is None else self.poll()
        if poll is not None:
            poll()

    def close(self, queue: LocalQueue) -> None:
        if self.by_key.get(queue.key) is queue:
            del self.by_key[queue.key]
        self.forget_entry(queue.entry)

    def forget_entry(self, entry: bytes) -> None:
        """Ignore messages for this entry from now on."""
        self.by_entry.pop(entry, None)
        if self.on_empty is not None and not self.by_entry:
            self.on_empty()

    def enqueue(self, waiter: Waiter, now: float = -math.inf) -> None:
        """Put the waiter at the end of its queue. If this is interrupted anywhere, `dequeue` puts all in order."""
        with self.mutex:
            self.enqueue_locked(waiter, now)

    def enqueue_locked(self, waiter: Waiter, now: float) -> None:
        """Do what `enqueue` does, with the mutex held, or where there are no threads."""
        queue = self.by_key.get(waiter.key) if waiter.entry is None else None
        if queue is None:
            queue = LocalQueue(self, waiter.key, waiter.entry)
        waiter.queue = queue
        if waiter.entry is None:
            self.by_key[waiter.key] = queue
        alone, held = not queue.waiters.count, queue.circulating
        queue.waiters.add(waiter)
        # Woken: to enter, as the only one; to recheck when a lease ends soon; or to enter before that is released
        waiter.woken = alone and (held is None or held._deadline < now + RECHECK_SECONDS or queue.last_local_handover())
        if held is not None or not alone:
            self.note_wait(waiter)
        # The first waiter, which enters for all, may sleep for longer than this one
        if queue.sleep > waiter.sleep and (first := queue.first()) is not None:
            first.wake()

    def expect(self, key: bytes, contended: bool) -> None:
        """Note whether other clients wanted a name, too: then the next acquires join at once. Else they would ask, and
        join a round trip later. The caller need not hold the mutex."""
        left = JOINS if contended else self.expected.get(key, 0) - 1
        if left > 0:
            self.expected[key] = left
        else:
            self.expected.pop(key, None)

    def note_wait(self, waiter: Waiter) -> None:
        """Count the waiter, once, as an acquire that had to wait."""
        if not waiter.counted:
            waiter.counted = True
            self.stats.waits += 1

    def may_enter_now(self, waiter: Waiter, now: float) -> bool:
        """Whether this waiter is to join now, or to look. If so, the entry counts as known to the server."""
        with self.mutex:
            queue = waiter.queue
            assert queue is not None, "it has joined"
            if not queue.may_enter(waiter, now):
                return False
            queue.entry_sent, queue.base = True, -_INFINITE  # until it is answered nobody believes: `belief.py`
            self.by_entry[queue.entry] = queue
            waiter.woken = False  # what follows is what it was woken for
            return True

    def on_push(self, push: Sequence[object]) -> None:
        """Take a push message, as the reader of the connection found it: of a grant, or of a recall."""
        if len(push) != 3 or push[0] != b"message" or type(push[2]) is not bytes:
            return
        if push[1] == self.channel:
            self.on_grant_message(push[2])
        elif push[1] == self.keep_channel:
            self.tell_recalled(self.on_recall(push[2]))

    def on_grant_message(self, message: bytes) -> None:
        """Wake the first waiter of the queue whose entry was granted the name, as a message says; behind it a fence."""
        entry, _, fence = message.partition(b"#")
        with self.mutex:
            queue = self.by_entry.get(entry)
            waiter = None if queue is None else queue.first()
            if queue is not None and waiter is not None:
                queue.granted, queue.fence = True, int(fence) if fence.isdigit() else None
                waiter.wake()

    def on_reconnect(self) -> None:
        """Wake the first waiter of each queue that the server may know, as messages may have been lost."""
        with self.mutex:
            for queue in list(self.by_entry.values()):
                if (waiter := queue.first()) is not None:
                    waiter.wake()

    def wake_all(self) -> None:
        """Wake all waiters, as the client is closed."""
        with self.mutex:
            for queue in {*self.by_key.values(), *self.by_entry.values()}:
                for waiter in list(queue.waiters):
                    waiter.wake()

    def drop_connections(self) -> None:
        """Forget the client's connections, which have ended: a queue whose lease is still held would keep one of them,
        and its socket, alive."""
        with self.mutex:
            for queue in {*self.by_key.values(), *self.by_entry.values()}:
                if not queue.waiters.count:
                    queue.connection = None

    def forget_waiters(self) -> None:
        """Forget how to wake the waiters, which do not exist any more (as those of a forked child's parent)."""
        for queue in {*self.by_key.values(), *self.by_entry.values()}:
            for waiter in queue.waiters:
                waiter.on_wake = None

    def fail(self, queue: LocalQueue, error: Exception) -> None:
        """Fail all waiters of a queue with this error, as the server stays away: each has waited as long as the first,
        and is not to try again, one after the other."""
        with self.mutex:
            queue.error = error
            if self.by_key.get(queue.key) is queue:
                del self.by_key[queue.key]
            for waiter in list(queue.waiters):
                waiter.wake()

    def expire(self, now: float) -> None:
        """Wake the first waiter of each queue whose circulating lease has ended, ends within RECHECK_SECONDS, or was
        last confirmed that long ago. A queue without waiters is closed then."""
        with self.mutex:
            if now >= self.forget_at:
                self.forget_at = now + EXPECTED_SECONDS
                self.expected.clear()
            for queue in list(self.by_key.values()):
                waiter, held = queue.first(), queue.circulating
                if held is None:
                    continue
                if waiter is not None and (
                    held._deadline < now + RECHECK_SECONDS or queue.confirmed_at + RECHECK_SECONDS <= now
                ):
                    waiter.wake()
                elif waiter is None and (
                    held._deadline <= now or max(queue.confirmed_at + RECHECK_SECONDS, queue.keep_until) <= now
                ):
                    self.close(queue)  # the lease may be held for ever; when it is released, the server knows who waits

    def note_keepable(self, lease: Lease, sent: float, until: float) -> None:
        """Note that the server granted a lease that is kept until then: the next acquires take it without a command."""
        with self.mutex:
            key = lease._key
            if lease._raw_token in self.unknown:
                self.unknown.pop(lease._raw_token, None)
                self.expect(key, True)
                lease._contended = True
            elif self.hears_recalls and key not in self.by_key and key not in self.kept:
                queue = LocalQueue(self, key, None)
                queue.circulating, queue.confirmed_at, queue.handovers_left = lease, sent, _INFINITE
                queue.keep_until = until
                self.by_key[key] = queue

    def take_kept(
        self, key: bytes, name: object, ms: int, most: int, leases: dict[Any, Lease], owner: object, now: float
    ) -> Lease | None:
        """Take the lease of a name that is kept and for which nobody waits, if it lasts for `ms` milliseconds, and for
        `most` at most: it is the owner's among these leases from then on. None: there is none."""
        with self.mutex:
            queue = self.kept.get(key)
            if queue is None or now >= queue.keep_until or not self.hears_recalls or key in self.by_key:
                return None  # or others wait already, who asked the server as the lease was held
            lease = queue.circulating
            if lease is None or not ms <= (lease._deadline - now) * 1000 <= most:
                return None
            lease._name, lease._since, lease._depth = name, now, 1
            # No call from here on, in which a signal handler could raise
            self.by_key[key] = queue
            leases[owner] = lease
            del self.kept[key]
            self.stats.acquires += 1
            self.stats.kept_acquires += 1
            return lease

    def has_queue(self, key: bytes, now: float) -> bool:
        """Whether others of this client wait for the name, or hold it after a wait."""
        self.sweep(now)
        return key in self.by_key

    def sweep(self, now: float) -> None:
        """Call `expire`, once in RECHECK_SECONDS; called whenever somebody acquires."""
        if now >= self.next_sweep:
            self.next_sweep = now + RECHECK_SECONDS
            self.expire(now)

    def release(self, lease: Lease, now: float) -> int:
        """Release a lease of a name for which there is, or was, a queue; returns a ReleaseRoute. The next holder is
        woken only when the mutex is free: else it would have to sleep again for that."""
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
                except BaseException:  # a signal handler raised as the call began
                    wake(not self.rapid)
                    raise

    def release_locked(self, lease: Lease, now: float) -> int:
        """Do what `release` does, with the mutex held, or where there are no threads. How to wake the next holder is
        left in `pending_wake`."""
        if lease._deadline == ENDED:  # another may hold the name by now, by the same token
            return _NOT_HELD
        queue = self.by_key.get(lease._key)
        return _DELETE if queue is None else queue.release(lease, now)

    def handover_completed(self, waiter: Waiter) -> None:
        """Note that this waiter runs with the lease that was handed to it. Only now is the next waiter woken to join
        the server's queue early: not while this one still wakes up."""
        queue = waiter.queue
        if queue is not None and not queue.entry_sent and queue.last_local_handover():
            with self.mutex:
                successor = queue.first()
                if successor is not None and not queue.entry_sent and queue.last_local_handover():
                    successor.wake()

    def take_back_expired(self, waiter: Waiter, now: float) -> Lease | None:
        """The lease that was handed to this waiter, if it ended before the waiter's caller ran (others may hold the
        name by now); None: it has not ended. The caller releases it, and the waiter is put back: before all others, but
        behind a first waiter that has sent the queue's entry, as two replies to that entry would be two leases.
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
            if waiter.entry is not None:  # it waits alone
                waiter.entry = new_token() + waiter.entry[commands.TOKEN_SIZE :]
                waiter.queue = queue = LocalQueue(self, waiter.key, waiter.entry)
            elif self.by_key.get(waiter.key) is not queue:  # closed since, as nobody waited there
                queue = self.by_key.get(waiter.key) or LocalQueue(self, waiter.key, None)
                self.by_key[waiter.key] = waiter.queue = queue
            queue.waiters.insert(waiter, queue.first() if queue.entry_sent else None)
            return lease

    def dequeue(self, waiter: Waiter, now: float) -> tuple[Lease | None, bytes | None]:
        """Take the waiter out of its queue. Returns what the caller has to give back to the server: (a lease that was
        handed to it, the member of the server's queue), each None where there is none. A caller that is interrupted in
        it calls again, and gets the same."""
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
                except BaseException:  # a signal handler raised as the call began
                    wake(None)
                    raise

    def _dequeue(self, waiter: Waiter, now: float) -> tuple[Lease | None, bytes | None]:
        queue, lease = waiter.queue, waiter.lease
        if queue is None:
            return None, None
        interrupted = lease is None and not waiter.linked  # while it was enqueued, or dequeued
        was_first = interrupted or queue.first() is waiter
        queue.waiters.remove(waiter)
        successor = queue.first()
        if lease is not None and lease._raw_token == queue.entry:  # interrupted while granted: this entry is used up
            queue.new_entry()
        if was_first and successor is not None:
            successor.wake()
        if lease is not None:
            passed = lease._deadline == ENDED or queue.release(lease, now) == _LOCAL
            if not queue.waiters.count and queue.circulating is None:
                self.close(queue)
            waiter.given_back, waiter.lease = (None if passed else lease, None), None
            return waiter.given_back
        member = queue.address + queue.entry if queue.entry_sent and successor is None else None
        if successor is None and queue.circulating is not None and queue.circulating._deadline > now:
            queue.new_entry()
        elif successor is None:
            self.close(queue)
        waiter.given_back = None, member
        return waiter.given_back
