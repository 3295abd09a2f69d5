"""A client as the random walks of replay.py drive and observe it, and its callers.

Two kinds: `client_simulator.py` drives the generators of the protocol by hand, `real_client.py` the callers of a real
client. A request lies in `flights` until the walk has the server execute it, and what the server sends lies in
`incoming` until the walk delivers it. No decisions about locks are made here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fastlock._protocol import commands
from fastlock._protocol.lease import Lease
from fastlock._protocol.local_queue import LocalQueues
from fastlock._protocol.waiters import Waiter
from support.handover import ABANDONED, ASKING, Command, Event
from support.run_steps import Clock

KEY = b"name"
MS = 10_000_000  # ms of every lease: longer than any walk
ORDERED = (*ASKING, "LEAVE", "CONFIRM")  # commands that share the connection on which messages come


@dataclass(eq=False)
class WalkedCaller:
    """A caller that wants the name, once."""

    phase: str = "waits"  # then "holds", "releases", "gone"
    lease: Lease | None = None
    waiter: Waiter | None = None  # by which the local queue knows it


class WalkedClient:
    """One client. What a walk observes of it is here; the two kinds implement what happens to it."""

    callers: Sequence[Any]
    flights: Any  # requests that were not executed yet, with `verb`, `token`, `caller` and `ordered`
    incoming: Any  # what the server sent and nobody has read: (the flight, its reply), or (None, a queue entry)

    def __init__(self, clock: Clock, queues: LocalQueues) -> None:
        self.clock = clock
        self.queues = queues
        self.tokens: list[bytes] = []  # all that were sent, in order
        self.begun = False
        self.dead = False

    def read_clock(self) -> float:
        """The time, as the protocol reads it."""
        return self.clock()

    def in_phase(self, phase: str) -> list[Any]:
        return [caller for caller in self.callers if caller.phase == phase]

    def waiting(self) -> list[Any]:
        """The callers that have no lease yet, in the order of the local queue."""
        queue = self.queues.by_key.get(KEY)
        waiters = [] if queue is None else list(queue.waiters)
        callers = [caller for caller in self.in_phase("waits") if caller not in self.handed_over()]
        return sorted(callers, key=lambda who: waiters.index(who.waiter) if who.waiter in waiters else -1)

    def handed_over(self) -> list[Any]:
        """The callers to which a lease was handed over, and which have not run since."""
        return [each for each in self.in_phase("waits") if each.waiter is not None and each.waiter.lease is not None]

    def first(self) -> Any:
        return self.waiting()[0]

    def holders(self) -> list[Any]:
        return [caller for caller in self.in_phase("holds") if self.valid(caller)]

    def expired(self) -> list[Any]:
        return [caller for caller in self.in_phase("holds") if not self.valid(caller)]

    def valid(self, caller: WalkedCaller) -> bool:
        return self.lease(caller)._deadline > self.clock()

    @staticmethod
    def lease(caller: WalkedCaller) -> Lease:
        assert caller.lease is not None
        return caller.lease

    @staticmethod
    def handed(caller: WalkedCaller) -> Lease:
        """The lease that was handed over to a caller which has not run since."""
        assert caller.waiter is not None and caller.waiter.lease is not None
        return caller.waiter.lease

    def token(self, caller: WalkedCaller) -> int:
        """The number of the token of this caller's lease."""
        return self.number(self.lease(caller)._raw_token)

    def number(self, token: bytes) -> int:
        """The number of a token or queue entry, plain or contended, with a fence or not; -1: it was never sent."""
        token = commands.PLAIN_PREFIX + token[3:].partition(b"#")[0]
        return self.tokens.index(token) if token in self.tokens else -1

    def pending(self, caller: WalkedCaller) -> Any:
        """The request whose reply the caller waits for, executed by the server or not; None: there is none."""
        flights = [*self.flights, *(flight for flight, _ in self.incoming if flight is not None)]
        return next((flight for flight in flights if flight.caller is caller), None)

    def known_as(self, flight: Any) -> Command:
        """The command of the model that this request is."""
        abandoned = flight.caller is None and flight.verb in ABANDONED
        return ABANDONED[flight.verb] if abandoned else flight.verb, self.number(flight.token)

    def flight(self, command: Command) -> Any:
        """The request that is this command of the model."""
        return next(flight for flight in self.flights if self.known_as(flight) == command)

    # what happens to the client

    def can_happen(self, event: Event) -> bool:
        """Whether an event that the model allows can happen to this client now: the environment may have less choice
        than in the model."""
        return True

    def begin(self) -> None:
        """All callers come; several of them find a local queue, as if another caller had come before them."""
        raise NotImplementedError

    def another(self, *, fenced: bool) -> None:
        """One more caller comes, while others of the client wait or hold."""
        raise NotImplementedError

    def release(self, caller: Any, *, batch: bool = False, late: bool = False) -> bool:
        """A holder releases; `late`: after LOCAL_SECONDS, when no local handover is allowed. Returns whether it
        handed over."""
        raise NotImplementedError

    def give_up(self, caller: Any) -> None:
        """The caller is cancelled."""
        raise NotImplementedError

    def resume(self, token: int) -> None:
        """The caller to which this lease was handed over runs."""
        raise NotImplementedError

    def recheck(self) -> None:
        """The timer of the first waiter ends."""
        raise NotImplementedError

    def settle(self) -> None:
        """Run every waiter that was woken, but not those that were handed a lease: they run when the walk says so."""
        raise NotImplementedError

    def execute(self, flight: Any) -> None:
        """The server executes the request; the reply takes effect at once, unless it has an order relative to
        messages."""
        raise NotImplementedError

    def collect(self) -> None:
        """Receive all that was pushed."""
        raise NotImplementedError

    def receive(self) -> None:
        """Deliver the first reply or message that has come."""
        raise NotImplementedError

    def subscribed(self) -> bool:
        """Whether the server knows where to send messages."""
        raise NotImplementedError

    def ends(self, flight: Any) -> float:
        """When the lease that was requested ends, if it is granted."""
        raise NotImplementedError

    def expire_moment(self, held: bytes) -> None:
        """The moment of a grant by this token ends by the client's own clock, so that the grant is not believed."""
        queue = self.queues.by_entry.get(commands.PLAIN_PREFIX + held[3:])
        if queue is not None:  # its reply may still be under way: whatever was sent, was sent by now
            self.clock.time += queue.moment

    def expire(self, held: bytes) -> None:
        """The lease with this token ends by the client's own clock."""
        raise NotImplementedError

    def end(self, sent: tuple[Command, ...], kill: Callable[[int], object]) -> None:
        """The server ends the client's connections after it has executed these commands; their replies are lost."""
        raise NotImplementedError

    def cut(self) -> None:
        """The client learns that its connections ended."""
        raise NotImplementedError

    def die(self) -> None:
        """The process of this client is killed; its connections ended before."""
        raise NotImplementedError

    def close(self) -> None:
        """The walk is over."""
        raise NotImplementedError
