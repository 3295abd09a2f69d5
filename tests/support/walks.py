"""Random walks of a client's real operations on a real server, on a clock that the walk sets.

Requests lie in a connection until the walk has the server execute them, in order; replies and grant messages until it
delivers them. Connections are cut, callers give up, processes die or are stopped, and time passes. What must never
happen is checked by those who use this. No decisions about locks are made here.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from fastlock import _errors as errors
from fastlock._protocol import steps
from fastlock._protocol.handshake import Session
from fastlock._protocol.local_queue import RECHECK_SECONDS
from support.run_steps import Clock, error
from support.walk_clients import Actor, Body, Died, Flight, Planned, WalkedClient, WalkTransport, Wire
from support.walk_server import STALL, Entry, Stalled, WalkServer

SOON = 3.0  # weight of what happens soon, else is late


class Event(NamedTuple):
    """What may happen, and how likely that is beside others."""

    name: str
    call: Callable[[], object]
    weight: float = SOON


class Walk:
    """A walk: its clients and their callers, its server and its clock. faults: whether anything fails. What happens
    follows from the seed."""

    transport: type[WalkTransport] = WalkTransport  # of its clients
    jumps: tuple[float, ...] = (0.01, 0.3, 1.1, 4.0)  # seconds that pass at a time
    passing = 0.1, 0.7  # how often time passes although something else could happen: soon, or at any time
    trouble, deaths = 0.05, 0.03  # how often something fails; how often it is a process that dies
    arrival = 0.5  # weight of a caller that comes
    lateness = 0.1  # seconds by which a process may be late to look for leases that are due

    def __init__(self, path: str, clock: Clock, seed: int, faults: bool) -> None:
        self.clock, self.faults = clock, faults
        clock.time = Clock().time
        self.server = WalkServer(path, clock, self.executed)
        self.random = random.Random(seed)
        random.seed(seed)  # of the jitter in what is walked
        self.open = True  # whether callers come again, when they have ended
        self.current: Any = None  # the actor that runs
        self.actors: list[Actor] = []
        self.lost: list[tuple[Session, Flight]] = []  # what was sent over cut sessions: the server may still execute it
        self.log: list[str] = []
        self.coroutines: list[tuple[WalkedClient, Any]] = []
        self.clients = [WalkedClient(self) for _ in range(2)]

    # the server

    def executed(self, call: tuple[bytes, ...], before: dict[bytes, Entry], reply: Any) -> None:
        """Raise AssertionError if the server must not have done what it did by this call. before: its state then."""

    # steps

    def begin(self, actor: Actor) -> None:
        """Let an actor begin."""
        actor.coroutine = actor.body(actor)
        self.coroutines.append((actor.client, actor.coroutine))
        if actor not in self.actors:
            self.actors.append(actor)
        self.advance(actor)

    def advance(self, actor: Actor, answer: Any = None, error: BaseException | None = None) -> None:
        """Let an actor go on from where it has stopped, by the answer or by an error, and note where it stops next."""
        before, self.current = self.current, actor
        stop, actor.stop = actor.stop, None
        if stop is not None:
            stop.answer = answer
        try:
            actor.stop = actor.coroutine.send(None) if error is None else actor.coroutine.throw(error)
        except StopIteration as end:
            self.end(actor, end.value)
        except (Exception, asyncio.CancelledError) as problem:
            if not (errors.is_own(problem) or isinstance(problem, Planned | asyncio.CancelledError)):
                raise
            self.end(actor, problem)
        else:
            self.stop_at(actor, actor.step)
        finally:
            self.current = before

    def end(self, actor: Actor, result: Any) -> None:
        actor.ended, actor.result = True, result
        if actor in self.actors:
            self.actors.remove(actor)

    def stop_at(self, actor: Actor, step: Any) -> None:
        actor.wakes_at = math.inf
        if isinstance(step, steps.Request):
            self.send(actor, step)
        elif isinstance(step, steps.Wait):
            times = step.waiter.queue.recheck_time(step.waiter), self.clock() + RECHECK_SECONDS
            actor.wakes_at = min(*times, step.until or math.inf)
        elif isinstance(step, steps.Sleep):
            actor.wakes_at = self.clock() + step.seconds
        else:
            assert isinstance(step, Body), f"not expected: {step}"

    def send(self, actor: Actor, request: Any) -> None:
        client = actor.client
        if refused := self.faults and (client.away or self.random.random() < 0.03):
            wire = self.random.choice(client.wires)
        else:
            if request.needs_push:
                client.listen()
            wire = self.wire_for(client, request)
            request.sent, request.connection = self.clock(), wire
        flight = Flight(client.calls_of(request), request.stale, actor, executed=refused, refused=refused)
        wire.flights.append(flight)

    def wire_for(self, client: WalkedClient, request: Any) -> Wire:
        """The connection over which a request goes."""
        return client.wires[-1] if request.needs_push else client.any_wire()

    # events

    def events(self) -> Iterator[Event]:
        """What may happen next."""
        for client in self.clients:
            yield from self.events_of(client)
        for session, flight in self.lost:
            yield Event("execute lost", lambda session=session, flight=flight: self.execute_lost(session, flight), 0.1)
        for actor in self.actors:
            if actor.client.runs and not actor.gone:
                yield from self.events_for(actor)

    def events_of(self, client: WalkedClient) -> Iterator[Event]:
        for wire in client.wires:
            if not client.dead and wire.unread() is not None:
                weight = 0.02 if wire.slow and self.faults else SOON
                yield Event("execute", lambda wire=wire: self.execute(wire), weight)
            if client.runs and wire.flights and wire.flights[0].executed:
                yield Event("reply", lambda wire=wire: self.reply(wire))
        if client.stopped and not client.dead:
            yield Event("resume", lambda: self.resume(client), 0.3 if self.faults else SOON)
        if not client.runs:
            return
        if client.messages:
            yield Event("message", lambda: self.message(client))
        if client.pending:
            yield Event("post", lambda: client.post(client.pending.pop()))
        if client.looks() and min(client.look_at, client.transport.renewals.wake_time()) <= self.clock():
            yield Event("renew", client.renew)

    def events_for(self, actor: Actor) -> Iterator[Event]:
        step, at = actor.step, self.clock()
        if actor.coroutine is None:
            yield Event("begin", lambda: self.begin(actor), self.arrival)
        elif isinstance(step, Body):
            yield Event("body", lambda: self.go_on(actor), step.weight)
        elif isinstance(step, steps.Wait | steps.Sleep):
            if actor.wakes_at <= at or (isinstance(step, steps.Wait) and step.waiter.woken):
                yield Event("wake", lambda: self.advance(actor))
        elif (step.until or math.inf) <= at:
            yield Event("deadline", lambda: self.deadline(actor))

    def troubles(self) -> Iterator[Event]:
        """What may fail next."""
        yield Event("flush scripts", lambda: self.server.raw("SCRIPT", "FLUSH"), 1)
        for client in self.clients:
            if client.runs:
                yield Event("die", lambda client=client: self.die(client), self.deaths)
                away = lambda client=client: setattr(client, "away", not client.away)  # noqa: E731
                yield Event("away", away, 0.6 if client.away else 0.2)
                yield Event("stop", lambda client=client: self.stop(client), 0.3)
                for wire in client.wires:
                    yield Event("cut", lambda wire=wire: self.cut(wire), 1 if wire.flights else 0.1)
                    yield Event("slow", lambda wire=wire: setattr(wire, "slow", not wire.slow), 0.1)
        for actor in self.actors:
            if actor.client.runs and not (actor.patient or actor.gone or isinstance(actor.step, Body | None)):
                yield Event("give up", lambda actor=actor: self.give_up(actor), 0.4)

    def go_on(self, actor: Actor) -> None:
        """A user's own code goes on; for those who use this to say how."""
        self.advance(actor)

    def happen(self) -> None:
        """One event. AssertionError: a promise was broken."""
        possible = list(self.events())
        soon = any(event.weight == SOON for event in possible)
        if self.faults and self.random.random() < self.trouble:
            self.let_happen(list(self.troubles()))
        elif not possible or self.random.random() < (self.passing[not soon] if self.faults or not soon else 0):
            self.pass_time(self.random.choice(self.jumps))
        else:
            self.let_happen(possible)
        for client in self.clients:
            client.hear()
        self.check()

    def let_happen(self, events: list[Event]) -> None:
        (event,) = self.random.choices(events, [event.weight for event in events])
        self.log.append(event.name)
        event.call()

    def pass_time(self, seconds: float) -> None:
        """Let time pass, until a process looks for its leases at most. It may be late, but for as long as it runs it
        looks."""
        latest = min((client.acts_at() for client in self.clients if client.runs), default=math.inf)
        seconds = max(0.0, min(seconds, latest + self.random.random() * self.lateness - self.clock()))
        self.skip(seconds)

    def skip(self, seconds: float) -> None:
        """Let time pass, whatever is to be done meanwhile."""
        self.log.append(f"+{seconds:.2f}")
        self.clock.go(seconds)
        self.server.sync()
        self.server.look()

    def execute(self, wire: Wire) -> None:
        flight = wire.unread()
        assert flight is not None
        flight.executed = True
        for session in flight.stale:
            if session != wire.session:
                self.kill(session)
        if self.faults and self.random.random() < 0.02:
            flight.replies = [error("LOADING Redis is loading the dataset in memory") for _ in flight.calls]
        else:
            flight.replies = [self.server.run(call) for call in flight.calls]

    def execute_lost(self, session: Session, flight: Flight) -> None:
        self.lost.remove((session, flight))
        for stale in flight.stale:
            self.kill(stale)
        for call in flight.calls:
            self.server.run(call)

    def kill(self, session: Session) -> None:
        """The server ends a session: it executes nothing more of what was sent there."""
        self.lost = [(each, flight) for each, flight in self.lost if each != session]
        for client in self.clients:
            for wire in client.wires:
                if wire.session == session and not client.dead:
                    self.cut(wire, killed=True)

    def reply(self, wire: Wire) -> None:
        flight = wire.flights.popleft()
        if flight.delivery is not None:
            flight.delivery.answered(flight.replies)
        elif flight.actor is not None and flight.refused:
            self.advance(flight.actor, _lost("refused", None))
        elif flight.actor is not None:
            single = isinstance(flight.actor.step, steps.Command)
            self.advance(flight.actor, flight.replies[0] if single else flight.replies)

    def message(self, client: WalkedClient) -> None:
        client.transport.queues.on_push([b"message", *client.messages.popleft()])

    def cut(self, wire: Wire, killed: bool = False) -> None:
        """A connection breaks. What the server has not executed it may execute later, or never; never, if it was it
        that ended the session."""
        client, flights = wire.client, list(wire.flights)
        at = client.wires.index(wire)
        client.wires[at] = Wire(client)
        if at == len(client.wires) - 1:
            client.deafen()
            self.deafened(client)
        if not killed:
            self.lost += [(wire.session, each) for each in flights if not each.executed]
        for flight in flights:
            if flight.delivery is not None:
                flight.delivery.outlived_by(wire.session)
                client.pending.append(flight.delivery)
            elif flight.actor is not None:
                self.advance(flight.actor, _lost("cut", None if flight.refused else wire.session))
        client.transport.queues.on_reconnect()

    def deafened(self, client: WalkedClient) -> None:
        """The connection has broken on which a client's messages came."""

    def deadline(self, actor: Actor) -> None:
        """The caller's time is over, and the reply has not come."""
        request = self.forget_reply(actor)
        actor.client.cancel(request)
        self.advance(actor, steps.Answer.DEADLINE_EXCEEDED)

    def forget_reply(self, actor: Actor) -> Any:
        """Have nobody read the reply that an actor waits for. Returns its request."""
        for wire in actor.client.wires:
            for flight in wire.flights:
                if flight.actor is actor:
                    flight.actor = None
        return actor.step

    def give_up(self, actor: Actor) -> None:
        """The caller is cancelled where it waits."""
        self.forget_reply(actor)
        self.advance(actor, error=asyncio.CancelledError())

    def stop(self, client: WalkedClient) -> None:
        """A process stops, as by SIGSTOP; perhaps its machine, with what it has sent."""
        client.stopped, slow = True, self.random.random() < 0.5
        for wire in client.wires:
            wire.slow |= slow

    def resume(self, client: WalkedClient) -> None:
        client.stopped, client.late = False, True

    def die(self, client: WalkedClient) -> None:
        self.lost += [(wire.session, each) for wire in client.wires for each in wire.flights if not each.executed]
        client.deafen()
        self.bury(client)

    def bury(self, client: WalkedClient) -> None:
        """End all callers of a client without another step: as they are collected, they would release what they
        hold."""
        client.dead = True
        for each, coroutine in self.coroutines:
            if each is client:
                with contextlib.suppress(Died):
                    coroutine.close()

    # promises

    def check(self) -> None:
        """Raise AssertionError if a promise is broken now."""

    def idle(self) -> bool:
        """Whether nothing is under way."""
        flights = [flight for each in self.clients if not each.dead for wire in each.wires for flight in wire.flights]
        pending = [delivery for each in self.clients if not each.dead for delivery in each.pending]
        return not (self.lost or flights or pending)

    def wander(self, events: int) -> None:
        """Let so many things happen; from then on callers do not come again, and nothing fails any more."""
        for _ in range(events):
            self.happen()
        self.open = self.faults = False

    def until(self, over: Callable[[], bool], what: str, events: int = 3000) -> None:
        """Let things happen until all is over. AssertionError: it never was."""
        for _ in range(events):
            if over():
                return
            self.happen()
        stopped = [(type(each.step).__name__, each.wakes_at) for each in self.actors if each.client.runs]
        raise AssertionError(f"never: {what}; at {self.clock()} {stopped} {self.server.state}")

    def close(self) -> None:
        for client in self.clients:
            self.bury(client)
        for connection in (self.server.connection, *(each.ear for each in self.clients if each.ear)):
            connection.disconnect()


def _lost(why: str, session: Session | None) -> steps.ConnectionLost:
    """The answer of a connection that broke, or, without a session, that never came up."""
    problem = errors.as_own(errors.ConnectionError(why))
    return steps.ConnectionLost(problem, 5.0, sent=session is not None, session=session)


def walk_seeds(make: Callable[[int], Any], seeds: range) -> None:
    """A walk of each seed. A failure tells its seed, and what happened before."""
    for seed in seeds:
        for _ in range(10):
            walk = make(seed)
            try:
                walk.run()
            except Stalled:
                continue
            except BaseException as error:
                if isinstance(error, AssertionError) and time.monotonic() - walk.server.real > STALL:
                    continue
                error.add_note(f"seed {seed}; {' '.join(walk.log[-60:])}")
                raise
            finally:
                walk.close()
            break
