"""The clients of a walk: real clients for asyncio, whose callers are coroutines. Where these would wait for a reply or
for time, they stop, until the walk lets them go on.

Who renews a client's leases is here as well. No decisions about locks are made here.
"""

from __future__ import annotations

import itertools
import math
import types
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import fastlock.asyncio
from fastlock._protocol import commands, steps
from fastlock._protocol.handshake import Session
from fastlock._protocol.renewal import Renewal
from fastlock._transport.aio import AsyncTransport
from fastlock._transport.undo_delivery import UndoDelivery

if TYPE_CHECKING:
    from support.walks import Walk

ALL = frozenset({commands.SET_NX_GET, commands.DELIFEQ, commands.SET_IFEQ})


class Died(BaseException):
    """The process of a caller is dead: what it has not done it does not do."""


class Planned(Exception):
    """What a user's function raises, as the walk wants it."""


class Body(NamedTuple):
    """Step: the user's own code, which goes on when the walk says so, by the walk's answer. weight: of that event."""

    weight: float = 1.0


class Stop:
    """Where a coroutine has stopped: what it yields. The answer comes back here: the compiled fast path, as all that
    asyncio awaits, forwards no value that is sent."""

    def __init__(self, step: Any) -> None:
        self.step = step
        self.answer: Any = None


@types.coroutine
def perform(step: Any) -> Generator[Stop, None, Any]:
    """Stop at a step until the walk has carried it out; returns its answer."""
    stop = Stop(step)
    yield stop
    return stop.answer


class Wire:
    """One connection of a walked client; once it was cut, another one takes its place."""

    reply_timeout = 5.0
    error = None
    serial = itertools.count()

    def __init__(self, client: WalkedClient) -> None:
        self.client = client
        self.session = Session({}, client.capabilities, b"", b"", "", next(self.serial))
        self.flights: deque[Flight] = deque()
        self.slow = False  # whether the server takes its time to read what was sent here
        self.loaded: set[Any] = set()
        self.knows_release = False

    @property
    def stream(self) -> Wire:
        return self

    @property
    def pending(self) -> int:
        """How many replies have not come."""
        return len(self.flights)

    def unread(self) -> Flight | None:
        """What the server executes next of what was sent here."""
        return next((flight for flight in self.flights if not flight.executed), None)

    def post(self, delivery: UndoDelivery) -> None:
        """Send an undo, over the client's next connection if this one has broken."""
        if self in self.client.wires:
            calls = delivery.calls(self)
            delivery.written(calls)
            self.flights.append(Flight(calls, delivery.stale, delivery=delivery))
        else:
            delivery.outlived_by(self.session)
            self.client.pending.append(delivery)

    def post_later(self, delivery: UndoDelivery, seconds: float) -> None:
        self.client.pending.append(delivery)

    def warn_refused(self, purpose: Any, error: Exception) -> None:
        raise AssertionError(f"refused: {error}")


@dataclass(eq=False)
class Flight:
    """A request or an undo on its way. Without an actor nobody reads its reply."""

    calls: list[Any]
    stale: tuple[Any, ...]  # sessions that the server ends before it executes this
    actor: Actor | None = None
    delivery: UndoDelivery | None = None
    executed: bool = False
    refused: bool = False  # whether no connection came up for it
    replies: list[Any] = field(default_factory=list)


class Actor:
    """A caller of a client: a coroutine that stops at each step. body: makes the coroutine."""

    def __init__(self, client: WalkedClient, body: Callable[[Actor], Coroutine[Any, Any, Any]]) -> None:
        self.client = client
        self.body = body
        self.coroutine: Any = None  # None: it has not begun
        self.stop: Stop | None = None  # where it has stopped
        self.wakes_at = 0.0  # if it sleeps or waits
        self.ended = False
        self.gone = False  # whether its thread has ended, with whatever it held
        self.lock: Any = None  # that it has made last
        self.patient = False  # whether it never gives up
        self.result: Any = None  # or the exception by which it ended

    @property
    def step(self) -> Any:
        """The step at which it has stopped."""
        return None if self.stop is None else self.stop.step


class WalkTransport(AsyncTransport):
    """The transport of a walked client: the real one, but for what sends, waits or sleeps."""

    walked: WalkedClient

    def begin(self) -> None:
        """Nothing belongs to a loop here."""

    async def _execute(self, request: Any) -> Any:
        try:
            return await self.performed(request)
        except BaseException:
            self.walked.cancel(request)
            raise

    async def _wait(self, waiter: Any, until: float | None) -> None:
        try:
            await self.performed(steps.Wait(waiter, until))
        finally:
            waiter.on_wake, waiter.woken = None, False

    async def _sleep(self, step: steps.Sleep) -> None:
        await self.performed(step)

    async def performed(self, step: Any) -> Any:
        if self.walked.dead:
            raise Died
        return await perform(step)

    def undo(self, undo: Any) -> None:
        self.walked.post(UndoDelivery(undo), undo.connection)

    def wake_renewal(self, time: float) -> None:
        self.walked.look_at = min(self.walked.look_at, time)

    def ends_of(self, owner: object) -> Callable[[], bool]:
        actor = self.walked.walk.current
        return lambda: actor.gone

    def tell_lost(self, renewal: Renewal) -> None:
        self.walked.told.append(renewal)


class WalkedClient:
    """A client, its connections, of which messages come on the last one, and who renews its leases: a thread, which
    does one thing after the other, or a timer of asyncio."""

    def __init__(self, walk: Walk) -> None:
        self.walk = walk
        self.capabilities = ALL if walk.random.random() < 0.7 else frozenset()
        self.api = fastlock.asyncio.Client(unix_socket_path=walk.server.path)
        made = self.api._transport
        self.api._transport = self.transport = walk.transport(made.settings, made.impl)
        self.transport.walked = self
        self.table = commands.command_table(self.capabilities)
        self.wires = [Wire(self) for _ in range(3)]
        self.messages: deque[tuple[bytes, bytes]] = deque()  # each with its channel
        self.pending: list[UndoDelivery] = []  # undos that wait for a connection
        self.ear: Any = None  # the connection of the walk itself on which the client's messages come
        self.dead = False
        self.away = False  # whether the server is out of its reach: no connection comes up
        self.stopped = False  # whether the process does nothing now, as after SIGSTOP
        self.late = False  # whether it was, and has not looked for its leases since
        self.by_thread = walk.random.random() < 0.5
        self.look_at = math.inf  # when it is to look for leases that are due, beside `Renewals.wake_time`
        self.renewing: list[Actor] = []
        self.told: list[Renewal] = []  # that a lease was lost

    @property
    def runs(self) -> bool:
        return not (self.dead or self.stopped)

    def calls_of(self, request: Any) -> list[Any]:
        """The calls of a request, as its connection writes them."""
        if not isinstance(request, steps.Command):
            return list(request.calls)
        values = request.key, request.token, b"%d" % request.ms
        return [tuple(values[part] if isinstance(part, int) else part for part in self.table[request.opcode])]

    def post(self, delivery: UndoDelivery, wire: Any = None) -> None:
        """Send an undo, over the connection that it is tied to, or any."""
        if self.dead:
            return
        if wire is not None and wire not in self.wires:
            delivery.outlived_by(wire.session)
        (wire if wire in self.wires else self.walk.random.choice(self.wires)).post(delivery)

    def cancel(self, request: Any) -> None:
        """The caller of a request is gone: undo it, behind it on its connection."""
        if request.sent and (undo := request.undo()) is not None:
            self.post(UndoDelivery(undo), request.connection)

    def any_wire(self) -> Wire:
        """A connection, but not the one on which messages come."""
        return self.walk.random.choice(self.wires[:-1])

    def listen(self) -> None:
        if self.ear is None:
            self.ear = self.walk.server.connect()
            self.ear.send_command("SUBSCRIBE", self.transport.queues.channel)
            self.ear.read_response()

    def hear(self) -> None:
        """Take the messages that the server has published by now."""
        if self.ear is not None:
            self.ear.send_command("PING")
            self.hear_until(b"pong")

    def hear_until(self, last: bytes) -> None:
        """Take messages, until that is replied to."""
        while (push := self.ear.read_response()) and push[0] != last:
            if push[0] == b"message":
                self.messages.append((push[1], push[2]))

    def deafen(self) -> None:
        if self.ear is not None:
            self.ear.disconnect()
            self.ear = None
            # The server has to notice before it is asked who listens
            while self.walk.server.raw("PUBSUB", "NUMSUB", self.transport.queues.channel)[1]:
                pass
        self.messages.clear()

    def renew(self) -> None:
        """Look for leases that are due, as the client's thread or timer does."""
        self.look_at = math.inf
        if self.by_thread:
            self._start(Actor(self, self._renew_all))
        elif due := self._take_due():
            self._start(
                Actor(self, lambda _: self._renew(due, self.transport.renewals.attempt_end(self.walk.clock(), due)))
            )

    def _start(self, actor: Actor) -> None:
        actor.patient = True
        self.renewing.append(actor)
        self.walk.begin(actor)

    async def _renew_all(self, _: Actor) -> None:  # as SyncTransport.renew_due
        while due := self._take_due():
            await self._renew(due, self.transport.renewals.attempt_end(self.walk.clock()))

    def _take_due(self) -> list[Renewal]:
        self.late = False
        return self.transport.renewals.take_due(self.walk.clock())

    async def _renew(self, due: list[Renewal], until: float) -> None:
        await self.transport.drive(self.transport.renewals.renew(due, until, self.walk.clock))

    def acts_at(self) -> float:
        """When this process is to do something about its leases, at the latest."""
        at = [actor.wakes_at for actor in self.renewing if not isinstance(actor.step, steps.Request)]
        at += [actor.step.until or math.inf for actor in self.renewing if isinstance(actor.step, steps.Request)]
        if self.looks():
            at += [self.look_at, self.transport.renewals.wake_time()]
        at.append(self.transport.queues.next_lapse)
        return min(at, default=math.inf)

    def looks(self) -> bool:
        """Whether it can look for leases that are due: a thread cannot while it waits for a reply."""
        self.renewing = [actor for actor in self.renewing if not actor.ended]
        return not (self.by_thread and self.renewing)
