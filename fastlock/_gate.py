"""Law: those who wait in this process for a name. Who of them is first, who sleeps, and to whom a lease passes on.

The first has a place in the server's queue and looks there: at once, when a message says that something has changed,
when the holder's lease ends, and every second in any case. Messages are reasons to look and never believed, so one that
is lost costs a second. The others sleep behind it; a lease that the first was granted goes round among them without a
command, for a while; when it is to go to others next, the first of those who came later joins the queue ahead of that.
All methods are called with the mutex held, but for those of `Gates` that take it. Never here: commands, sockets,
asyncio, threads, sleep.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from fastlock._lease import ENDED, Lease, new_token
from fastlock._stats import Stats

LOOK = 1.0  # seconds between two looks of the first in a place, whatever it heard
ROUND = 0.01  # seconds for which a lease goes round before the server is asked who waits elsewhere
BRISK = 50e-6  # seconds between two passes of a lease by threads that do nothing else
SHORTEST_PAUSE = 0.001  # seconds: between two looks at a held name, so that no setting makes a busy loop
ENOUGH = 0.95  # part of the lease that the next one asks for, which must be left of what is passed to it

# What a release is: it needs no command; nobody waits, as far as we know; somebody does; the lease was over before.
PASSED, PLAIN, HAND_OVER, GONE = range(4)


class Waiter:
    """One acquire that waits. `called`: there is something to see: a lease for it, or that it is first and may look."""

    __slots__ = (
        *("after", "before", "called", "counted", "fenced", "gate", "key", "lease", "left", "ms", "name", "place"),
        *("sleep", "waits", "wake"),
    )

    def __init__(
        self, name: object, key: bytes, ms: int, fenced: bool, place: bytes | None = None, sleep: float = 0.1
    ) -> None:
        self.name = name
        self.key = key
        self.ms = ms
        self.fenced = fenced
        self.place = place  # of its own in the server's queue; None: among the others of its gate
        self.sleep = sleep  # seconds between two looks, where nobody tells that something has changed
        self.gate: Gate | None = None  # from when it has joined
        self.waits = False  # in the line of its gate, between these two
        self.before: Waiter | None = None
        self.after: Waiter | None = None
        self.lease: Lease | None = None  # handed to it
        self.left: tuple[Lease | None, bytes | None] | None = None  # what it has given back, once it has left
        self.called = False
        self.counted = False  # as one that had to wait
        self.wake: Callable[[Any], object] | None = None  # ends its sleep

    def call(self) -> None:
        self.called = True
        wake, self.wake = self.wake, None
        if wake is not None:
            wake(None)


class Line:
    """Those who wait, in order of arrival; who is in the middle of many leaves as fast as the first.

    A change is made without a call or a loop, where neither Ctrl-C nor another thread could come between.
    """

    __slots__ = ("count", "first", "last")

    def __init__(self) -> None:
        self.count = 0
        self.first: Waiter | None = None
        self.last: Waiter | None = None

    def insert(self, waiter: Waiter, before: Waiter | None) -> None:
        """Right behind that one; None: before all others."""
        after = self.first if before is None else before.after
        waiter.before, waiter.after = before, after
        if before is None:
            self.first = waiter
        else:
            before.after = waiter
        if after is None:
            self.last = waiter
        else:
            after.before = waiter
        waiter.waits = True
        self.count += 1

    def add(self, waiter: Waiter) -> None:
        """At its end."""
        waiter.before = self.last
        if self.last is None:
            self.first = waiter
        else:
            self.last.after = waiter
        self.last = waiter
        waiter.waits = True
        self.count += 1

    def remove(self, waiter: Waiter) -> None:
        """Take it out, if it is there."""
        if not waiter.waits:
            return
        if waiter.before is None:
            self.first = waiter.after
        else:
            waiter.before.after = waiter.after
        if waiter.after is None:
            self.last = waiter.before
        else:
            waiter.after.before = waiter.before
        waiter.before = waiter.after = None
        waiter.waits = False
        self.count -= 1

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Waiter]:
        waiter = self.first
        while waiter is not None:
            yield waiter
            waiter = waiter.after


class Gate:
    """The waiters of one process for one name, in order of arrival; they share a place in the server's queue."""

    __slots__ = (
        *("ahead", "asked", "brisk", "elsewhere", "error", "forms", "gates", "handed", "held", "key", "link"),
        *("look_at", "passes", "place", "shared", "since", "sleep", "stale", "waited", "waiters"),
    )

    def __init__(self, gates: Gates, key: bytes, place: bytes | None) -> None:
        self.gates = gates
        self.key = key
        self.shared = place is None  # among all who come; else a single waiter's
        self.place = place or new_token()
        self.waiters = Line()
        self.asked = False  # the server was asked for this place, and may know it
        self.waited = False  # the server has put it into the queue: others want the name, and will again
        self.ahead = False  # it was asked for while one of us holds
        self.forms: dict[Any, Any] | None = None  # of the compiled hot path, by what they ask
        self.link: Any = None  # the connection over which it was asked
        self.stale: tuple[Any, ...] = ()  # sessions that broke under that
        self.look_at = 0.0
        self.sleep = 0.0  # the shortest of those who wait, where nobody tells them; 0: somebody does
        self.handed = 0.0  # when it last passed on
        self.brisk = False  # and whether that was soon after the time before
        self.held: Lease | None = None  # goes round among the waiters
        self.since = 0.0  # when the server last said who waits elsewhere
        self.elsewhere = False
        self.passes = 0.0  # left before it is their turn
        self.error: Exception | None = None  # that the first met, which is of no use to the others either

    def first(self) -> Waiter | None:
        return self.waiters.first

    def wake_at(self, waiter: Waiter) -> float:
        """When this waiter is to look, though nobody calls it."""
        if self.first() is not waiter:
            return math.inf
        return self.look_at if self.held is None or self.ahead else self.held.deadline

    def may_look(self, waiter: Waiter, now: float) -> bool:
        """Whether it is first, and no lease of this process can come to it."""
        if self.first() is not waiter:  # nor does it clear what `lapsed` looks for to call the first
            return False
        if self.held is not None and self.held.deadline <= now:
            self.held = None
        self.ahead = self.held is not None and self.last_pass()
        return self.held is None or self.ahead

    def last_pass(self) -> bool:
        """Whether what is held here goes back to the server next, as others wait elsewhere or the first wants a fence:
        so the first joins the server's queue already."""
        waiter = self.first()
        return (self.elsewhere and not self.passes) or (waiter is not None and waiter.fenced)

    def queued(self, left: float, told: bool, now: float) -> None:
        """The server says: wait; the holder's lease ends in `left` seconds, and it was told or cannot be."""
        self.waited = True
        first = self.first()
        if first is not None:
            self.gates.count(first)
        self.sleep = 0.0
        if not told or self.gates.deaf:  # the least patient decides for all: they get it from who looks
            self.sleep = max(SHORTEST_PAUSE, min([waiter.sleep for waiter in self.waiters], default=LOOK))
        self.look_at = now + min(left, self.sleep or LOOK)

    def granted(self, waiter: Waiter, lease: Lease, elsewhere: int, now: float) -> None:
        """The server says: it is yours, so many others wait elsewhere."""
        self.waiters.remove(waiter)
        self.held = lease
        self.since = now
        self.gates.stats.remote_handovers += waiter.counted
        self.elsewhere = elsewhere > 0
        self.passes = self.waiters.count if elsewhere else math.inf
        if self.shared:
            self.renew()  # the old one is the lease's token now
            self.warn(now)
        else:
            self.gates.close(self)

    def warn(self, now: float) -> None:
        """Have the next one set its clock by a lease that ends before it would look by itself."""
        if self.held is not None and self.held.deadline < now + LOOK:
            waiter = self.first()
            if waiter is not None:
                waiter.call()

    def doubts(self, waiter: Waiter, now: float) -> bool:
        """Whether it is for this waiter to see if what goes round here still holds the name: it may have been deleted,
        or let go of by its token elsewhere."""
        held = self.held
        if held is None or self.ahead:  # who asks ahead finds out itself
            return False
        return held.deadline > now and self.since + LOOK <= now and self.first() is waiter

    def disowned(self, held: Lease) -> None:
        """It does not."""
        if self.held is held:
            self.held = None
            self.look_at = 0.0

    def renew(self) -> None:
        """Another place, at the end of the queue."""
        self.gates.by_place.pop(self.place, None)
        self.place = new_token()
        self.asked = self.ahead = self.waited = False
        self.look_at = self.sleep = 0.0

    def next_for(self, lease: Lease, now: float) -> Waiter | None:
        """To whom the lease may pass. Who wants a fence is granted each lease by the server: a lease that passes on is
        not asked about, and the key may have been lost since."""
        waiter = self.first()
        if waiter is None or waiter.fenced or not self.passes or now - self.since > ROUND:
            return None
        if self.asked:  # their place stands in the server's queue, to which it goes next: one who wanted a fence asked
            return None
        if lease.exposed or lease.moves or self.held is not lease:  # by its token somebody may still do something
            return None
        left = (lease.deadline - now) * 1000
        # nor may it be longer: should the next one die, nobody has the name before it is over
        fits = ENOUGH * waiter.ms <= left <= waiter.ms if waiter.ms else left == math.inf
        return waiter if fits else None

    def release(self, lease: Lease, now: float) -> int:
        """The holder lets go: PASSED, PLAIN or HAND_OVER."""
        if self.held is None or self.held.proof != lease.proof:
            return HAND_OVER if self.waiters.count else PLAIN
        waiter = self.next_for(lease, now)
        if waiter is not None and lease.deadline > now and self._passed(waiter, lease, now):
            return PASSED
        waiter = self.first()
        if waiter is None:
            self.gates.close(self)
        elif not self.ahead:
            self.look_at = 0.0
            waiter.call()
        self.ahead = False
        self.held = None  # last: who is interrupted lets go once more
        return HAND_OVER if waiter is not None or self.elsewhere else PLAIN

    def _passed(self, waiter: Waiter, lease: Lease, now: float) -> bool:
        """The lease passes to the first waiter. False: it does not, as its token was read, or it is extended, since."""
        handed = Lease(waiter.name, self.key, lease.proof, lease.deadline)
        handed.contended = lease.contended
        self.waiters.remove(waiter)
        if lease.exposed or lease.moves:
            self._first_again(waiter)
            return False
        # From that look on no call: neither a signal's handler nor another thread comes between
        self.passes -= 1
        self.held = waiter.lease = handed
        lease.deadline = ENDED
        self.gates.stats.local_handovers += 1
        waiter.called = True
        self.brisk = self.gates.brisk = now - self.handed < BRISK
        self.handed = now
        try:
            self.warn(now)
        finally:
            self.gates.wake, waiter.wake = waiter.wake, None  # last: who is woken before could release as well
        return True

    def _first_again(self, waiter: Waiter) -> None:
        try:
            self.waiters.insert(waiter, None)
        except BaseException:  # a signal's handler struck as that began
            if not waiter.waits:
                self.waiters.insert(waiter, None)
            raise


class Gates:
    """The gates of one client. `inbox` is where its messages come."""

    def __init__(self, mutex: Any, stats: Stats | None = None) -> None:
        self.mutex = mutex
        self.stats = stats or Stats()
        self.inbox = b"fastlock:" + new_token()[3:]  # as long as the scripts expect
        self.deaf = False  # whether messages may not come: then all look every `sleep` seconds
        self.wake: Callable[[Any], object] | None = None  # ends the sleep of whom a lease has passed to
        self.brisk = False  # as of the gate it was
        self.swept = 0.0  # when it was last looked for leases that are over
        self.by_key: dict[bytes, Gate] = {}
        self.by_place: dict[bytes, Gate] = {}

    # As a slot of the pipe: of the reply to SUBSCRIBE.

    def done(self) -> bool:
        return False

    def set_result(self, reply: Any) -> None:
        self.deaf = isinstance(reply, Exception)

    def close(self, gate: Gate) -> None:
        if self.by_key.get(gate.key) is gate:
            del self.by_key[gate.key]
        self.by_place.pop(gate.place, None)

    def join(self, waiter: Waiter, now: float = -math.inf) -> None:
        """Wait behind those who do so already. Interrupted anywhere in it, `leave` puts all in order."""
        with self.mutex:
            self.joined(waiter, now)

    def joined(self, waiter: Waiter, now: float) -> None:
        """As `join`, with the mutex held, or where no threads are."""
        gate = self.by_key.get(waiter.key) if waiter.place is None else None
        if gate is None:
            gate = Gate(self, waiter.key, waiter.place)
        waiter.gate = gate
        if waiter.place is None:
            self.by_key[waiter.key] = gate
        alone, held = not gate.waiters.count, gate.held
        gate.waiters.add(waiter)
        # it looks; or sets its clock by a lease that ends soon; or joins the queue before that is let go
        waiter.called = alone and (held is None or held.deadline < now + LOOK or gate.last_pass())
        if held is not None or not alone:
            self.count(waiter)
        if gate.sleep > waiter.sleep:  # who looks for it may sleep for longer than that
            first = gate.first()
            if first is not None:
                first.call()

    def count(self, waiter: Waiter) -> None:
        """It has to wait."""
        if not waiter.counted:
            waiter.counted = True
            self.stats.waits += 1

    def ask(self, waiter: Waiter, now: float) -> bool:
        """Whether this waiter is to ask the server now."""
        with self.mutex:
            gate = waiter.gate
            assert gate is not None, "it has joined"
            if not gate.may_look(waiter, now):
                return False
            gate.asked = True
            self.by_place[gate.place] = gate
            waiter.called = False  # this look answers it
            return True

    def pushed(self, push: Any) -> None:
        """What the server said unasked, as whoever reads finds it: of all that only messages to us are heard."""
        if len(push) == 3 and push[0] == b"message" and push[1] == self.inbox and type(push[2]) is bytes:
            self.hear(push[2])

    def hear(self, place: bytes) -> None:
        """A message: this place has been granted the name."""
        with self.mutex:
            gate = self.by_place.get(place)
            waiter = None if gate is None else gate.first()
            if waiter is not None:
                waiter.call()

    def reconnected(self) -> None:
        """Messages may have been lost: all who are first look."""
        with self.mutex:
            for gate in list(self.by_place.values()):
                waiter = gate.first()
                if waiter is not None:
                    waiter.call()

    def call_all(self) -> None:
        """The client is closed: nobody sleeps any longer."""
        with self.mutex:
            for gate in {*self.by_key.values(), *self.by_place.values()}:
                for waiter in list(gate.waiters):
                    waiter.call()

    def part(self) -> None:
        """The client's connections have ended. A gate whose lease is held on would keep one of them, and its socket."""
        with self.mutex:
            for gate in {*self.by_key.values(), *self.by_place.values()}:
                if not gate.waiters.count:
                    gate.link = None

    def forget(self) -> None:
        """Those who wait here are no more, and nobody is to wake them."""
        for gate in {*self.by_key.values(), *self.by_place.values()}:
            for waiter in gate.waiters:
                waiter.wake = None

    def failed(self, gate: Gate, error: Exception) -> None:
        """The server stays away: who has waited so long does not begin again, one after the other."""
        with self.mutex:
            gate.error = error
            if self.by_key.get(gate.key) is gate:
                del self.by_key[gate.key]
            for waiter in list(gate.waiters):
                waiter.call()

    def lapsed(self, now: float) -> None:
        """Call those who are next, where a lease that goes round is over, will be soon, or went round long ago; where
        nobody waits, a gate has no more use then."""
        with self.mutex:
            for gate in list(self.by_key.values()):
                waiter, held = gate.first(), gate.held
                if held is None:
                    continue
                if waiter is not None and (held.deadline < now + LOOK or gate.since + LOOK <= now):
                    waiter.call()
                elif waiter is None and (held.deadline <= now or gate.since + LOOK <= now):
                    self.close(gate)  # it may be held for ever; once it is let go, the server knows who waits

    def busy(self, key: bytes, now: float) -> bool:
        """Whether others of this client wait for it, or have it."""
        self.sweep(now)
        return key in self.by_key

    def sweep(self, now: float) -> None:
        """Once in a while, as others come."""
        if now >= self.swept + LOOK:
            self.swept = now
            self.lapsed(now)

    def release(self, lease: Lease, now: float) -> int:
        """A holder lets go of a lease of a name for which there is, or was, a gate. Who has it next is woken when the
        mutex is free, for which he would have to sleep again."""
        wake = None
        try:
            with self.mutex:
                try:
                    return self.released(lease, now)
                finally:
                    wake, self.wake = self.wake, None
        finally:
            if wake is not None:
                try:
                    wake(None)
                except BaseException:  # a signal's handler struck as that began
                    wake(None)
                    raise

    def released(self, lease: Lease, now: float) -> int:
        """As `release`, with the mutex held, or where no threads are. Who is to be woken is left in `wake`."""
        if lease.deadline == ENDED:  # it may be another's by now, by the same token
            return GONE
        gate = self.by_key.get(lease.key)
        return PLAIN if gate is None else gate.release(lease, now)

    def taken(self, waiter: Waiter) -> None:
        """The lease that was passed to this waiter has arrived. Only now is the next one called to join the queue: not
        while this one wakes."""
        gate = waiter.gate
        if gate is not None and not gate.asked and gate.last_pass():
            with self.mutex:
                heir = gate.first()
                if heir is not None and not gate.asked and gate.last_pass():
                    heir.call()

    def returned(self, waiter: Waiter, now: float) -> Lease | None:
        """The lease that passed to this waiter, if it was over before its caller ran (others may hold the name by now);
        None: it is not over. It is to be released, and the waiter waits on, before all others but the one who asks the
        server for their place: two answers to that would be two leases.
        """
        lease = waiter.lease
        if lease is None or now < lease.deadline:
            return None
        with self.mutex:
            gate = waiter.gate
            assert gate is not None, "it has joined"
            if gate.held is lease:
                gate.held = None
            waiter.lease = None
            if self.by_key.get(waiter.key) is not gate:  # closed since, as nobody waited there
                gate = self.by_key.get(waiter.key) or Gate(self, waiter.key, None)
                self.by_key[waiter.key] = waiter.gate = gate
            gate.waiters.insert(waiter, gate.first() if gate.asked else None)
            return lease

    def leave(self, waiter: Waiter, now: float) -> tuple[Lease | None, bytes | None]:
        """Wait no longer. Returns what is to be given back: a lease that was handed to it, a place in the queue. Who is
        interrupted in it calls again, and gets the same."""
        wake = None
        try:
            with self.mutex:
                try:
                    return waiter.left or self._left(waiter, now)
                finally:
                    wake, self.wake = self.wake, None
        finally:
            if wake is not None:
                try:
                    wake(None)
                except BaseException:  # a signal's handler struck as that began
                    wake(None)
                    raise

    def _left(self, waiter: Waiter, now: float) -> tuple[Lease | None, bytes | None]:
        gate, lease = waiter.gate, waiter.lease
        if gate is None:
            return None, None
        interrupted = lease is None and not waiter.waits  # in joining, or in leaving
        was_first = interrupted or gate.first() is waiter
        gate.waiters.remove(waiter)
        heir = gate.first()
        if lease is not None and lease.proof == gate.place:  # interrupted while it was granted: not for the next
            gate.renew()
        if was_first and heir is not None:
            heir.call()
        if lease is not None:
            passed = lease.deadline == ENDED or gate.release(lease, now) == PASSED
            if not gate.waiters.count and gate.held is None:
                self.close(gate)
            waiter.left, waiter.lease = (None if passed else lease, None), None
            return waiter.left
        place = gate.place if gate.asked and heir is None else None
        if heir is None and gate.held is not None and gate.held.deadline > now:
            gate.renew()
        elif heir is None:
            self.close(gate)
        waiter.left = None, place
        return waiter.left
