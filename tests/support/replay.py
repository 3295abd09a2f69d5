"""Random walks over the handover model (handover.py), replayed on the real scripts, protocol and local queues.

A walk chooses one event after the other that the model allows, makes it happen to client simulators and a real server,
and compares both. Of the states that the model allows, those are kept that were observed; once there is none, model and
code have drifted apart. What cannot be observed (whether waiters will recheck by themselves) is known from the model
only. The server's time does not matter: a lease ends when the walk says so. No decisions about locks are made here.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

from fastlock._protocol import commands
from fastlock._protocol import lease as leases
from fastlock._protocol.handshake import read_greeting
from support import handover as model
from support.client_simulator import RawConnection, SimulatedClient
from support.handover import Event, Protocol, State, begin, described, finished, stuck, unsafe
from support.walked_client import KEY, MS, WalkedCaller, WalkedClient

NOBODY = (-3, 0)  # an identity that should not occur, as a holder or in the queue
FOREIGN_TOKEN = b"a token of another library"  # a token that nobody can mark as contended
MOMENT_MS = 9_000  # the server's ms for a grant that is not confirmed: a walk sets them anew, so that it does not end
COHORTS = ((1, 1, 1), (2, 1), (0, 2, 1), (3, 1), (2, 2), (1, 0, 0), (4, 2))
FAULTS = ("crash", "cut", "cancel", "expire", "foreign", "join")
TROUBLE = 0.15  # the share of events that the model allows but does not require
LONGEST_END = 2000  # events that a walk may take to end, before it counts as endless


class Drift(AssertionError):
    """Model and code have drifted apart."""


class ObservedClient(NamedTuple):
    """A client, as far as it can be observed."""

    pc: int
    waiting: int = 0
    entry: int = -1
    held: tuple[tuple[int, bool], ...] = ()
    expired: tuple[tuple[int, bool], ...] = ()
    handed_over: tuple[tuple[int, bool, bool], ...] = ()
    subscribed: bool = False
    woken: bool = False
    ordered: tuple[model.Command, ...] = ()
    unordered: tuple[model.Command, ...] = ()
    incoming: tuple[tuple[str, int], ...] = ()


class Observation(NamedTuple):
    """Everything that can be observed."""

    clients: tuple[ObservedClient, ...]
    key: model.Identity
    marked: bool
    moment: bool
    queue: tuple[model.Identity, ...]


def expected(s: State) -> Observation:
    """What would be observed in a state of the model."""
    return Observation(tuple(map(_expected_client, s.clients)), s.key, s.marked, s.moment, s.queue)


def _expected_client(client: model.Client) -> ObservedClient:
    if client.pc == model.DEAD:
        return ObservedClient(model.DEAD)
    held = ((client.held, client.contended),) if client.held != model.NONE else ()
    entry_sent = client.entry_sent and client.waiting > 0
    has_entry = entry_sent or client.pc in (model.ENTER, model.QUEUED)
    return ObservedClient(
        model.QUEUED if entry_sent else client.pc,
        client.waiting,
        client.entry if has_entry else -1,
        held,
        tuple(sorted(client.expired)),
        tuple(sorted(client.handed_over)),
        client.subscribed,
        client.woken and client.pc == model.ENTER,
        client.ordered,
        client.unordered,
        client.incoming,
    )


Kinds = list[tuple[bool, bool]]  # of each caller of a client: whether it waits in strict order, and wants a fence
Factory = Callable[[str, frozenset[str], Kinds], WalkedClient]  # from the server's socket and what the server can do


def simulate(path: str, capabilities: frozenset[str], kinds: Kinds) -> WalkedClient:
    return SimulatedClient(lambda: RawConnection(path), capabilities, kinds)


class Replay:
    """Some clients and a server, whose socket is `path`; also how likely a caller wants a fence."""

    def __init__(
        self, path: str, callers: tuple[int, ...], fences: float, rng: random.Random, factory: Factory
    ) -> None:
        self.fences = fences
        self.probe = RawConnection(path)
        hello, known = self.probe.execute((b"HELLO", b"3"), (b"COMMAND", b"INFO", b"DELIFEQ", b"DELEX"))
        capabilities = read_greeting([hello, None, known, None]).capabilities
        self.probe.execute((b"FLUSHALL",), *(script.load for script in commands.SCRIPTS))
        self.processes = [
            factory(path, capabilities, [(not count, rng.random() < self.fences) for _ in range(count or 1)])
            for count in callers
        ]
        self.now: Callable[[], float] = self.processes[0].read_clock

    def close(self) -> None:
        for each in self.processes:
            each.close()
        self.probe.close()

    # what is observed

    def observe(self) -> Observation:
        for each in self.processes:
            each.collect()
        held, left, queue = self.probe.execute(
            (b"GET", KEY), (b"PTTL", KEY), (b"ZRANGE", commands.queue_key(KEY), b"0", b"-1")
        )
        if 0 < left <= MOMENT_MS:  # it must not expire before the walk says so
            self.probe.execute((b"PEXPIRE", KEY, b"%d" % MOMENT_MS))
        key = model.FREE if held is None else model.OTHER if held == FOREIGN_TOKEN else self.identity(held)
        marked = held is not None and held[2:3] == b"+"
        clients = tuple(self.client(each) for each in self.processes)
        entries = tuple(self.entry(entry) for entry in queue)
        return Observation(clients, key, marked, 0 < left <= MOMENT_MS, entries)

    def identity(self, token: bytes) -> model.Identity:
        return next(((i, at) for i, each in enumerate(self.processes) if (at := each.number(token)) >= 0), NOBODY)

    def entry(self, entry: bytes) -> model.Identity:
        """The identity of an entry of the server's queue, which is a channel and a token."""
        channel, token = entry[: commands.CHANNEL_SIZE], commands.split(entry)[1]
        return next(((i, p.number(token)) for i, p in enumerate(self.processes) if p.queues.channel == channel), NOBODY)

    def client(self, each: WalkedClient) -> ObservedClient:
        if each.dead:
            return ObservedClient(model.DEAD)
        self.now = each.read_clock
        pc, entry, woken = self.activity(each)
        return ObservedClient(
            pc,
            len(each.waiting()),
            entry,
            self.leases_of(each, each.holders()),
            self.leases_of(each, each.expired()),
            tuple(sorted(self.handed_over(each, who) for who in each.handed_over())),
            each.subscribed(),
            woken,
            tuple(each.known_as(flight) for flight in each.flights if flight.ordered),
            tuple(sorted(each.known_as(flight) for flight in each.flights if not flight.ordered)),
            tuple(self.message(each, *what) for what in each.incoming),
        )

    @staticmethod
    def leases_of(each: WalkedClient, callers: list[WalkedCaller]) -> tuple[tuple[int, bool], ...]:
        return tuple(sorted((each.token(who), each.lease(who)._contended) for who in callers))

    @staticmethod
    def handed_over(each: WalkedClient, who: WalkedCaller) -> tuple[int, bool, bool]:
        lease = each.handed(who)
        return each.number(lease._raw_token), lease._contended, lease._deadline <= each.clock()

    @staticmethod
    def activity(each: WalkedClient) -> tuple[int, int, bool]:
        """What the first waiter does, its queue entry if the server may know one, and whether it was woken while its
        ENTER was under way."""
        if not each.begun or not each.waiting():
            return model.BEHIND if each.begun else model.START, -1, False
        first = each.first()
        flight = each.pending(first)
        if flight is None:
            queue: Any = first.waiter.queue
            return (model.QUEUED, each.number(queue.entry), False) if queue.entry_sent else (model.BEHIND, -1, False)
        if flight.verb not in model.ASKING:
            return {"SET": model.SET, "EXTEND": model.EXTEND}[flight.verb], -1, False
        queue = each.queues.by_entry.get(flight.token)
        woken = queue is not None and queue.first() is not None and queue.first().woken
        return model.ENTER, each.number(flight.token), woken

    @staticmethod
    def message(each: WalkedClient, flight: Any, what: Any) -> tuple[str, int]:
        if flight is None:
            return "push", each.number(what)
        number, (reply,) = each.number(flight.token), what
        if type(reply) is not list:
            return repr(reply), number
        if reply[0] <= 0:
            return (model.GONE if reply[0] else model.WAIT), number
        if each.clock() >= each.ends(flight):
            return model.LATE, number
        return model.CONTENDED if reply[1] else model.GRANTED, number

    # events

    def happen(self, event: Event, rng: random.Random) -> None:
        what, *rest = event
        if what in ("another library acquires it", "another library releases it"):
            call = (b"SET", KEY, FOREIGN_TOKEN, b"PX", b"%d" % MS) if what.endswith("acquires it") else (b"DEL", KEY)
            self.probe.execute(call)
        elif what == "expires":
            self.expire()
        else:
            each = self.processes[rest[0]]
            self.now = each.read_clock
            self.to_process(each, what, rest[1:], rng)
            each.settle()

    def to_process(self, each: WalkedClient, what: str, rest: list[Any], rng: random.Random) -> None:
        simple: dict[str, Callable[[], Any]] = {
            "begins to acquire": each.begin,
            "receives": each.receive,
            "executes": lambda: each.execute(each.flight(*rest)),
            "rechecks": each.recheck,
            "the first gives up": lambda: each.give_up(each.first()),
            "the last gives up": lambda: each.give_up(each.waiting()[-1]),
            "resumes": lambda: each.resume(rest[0]),
            "resumes to leave": lambda: each.give_up(each.handed_over()[0]),
            "releases": lambda: each.release(each.holders()[0], late=rng.random() < 0.5),
            "releases in a batch": lambda: each.release(each.holders()[0], batch=True, late=rng.random() < 0.5),
            "releases late": lambda: each.release(next(who for who in each.expired() if each.token(who) == rest[0])),
            "another comes": lambda: each.another(fenced=rng.random() < self.fences),
            "is cut": each.cut,
            "dies": each.die,
        }
        if what in ("is cut", "dies"):
            each.end(rest[0], lambda id: self.probe.execute((b"CLIENT", b"KILL", b"ID", b"%d" % id)))
        simple[what]()

    def expire(self) -> None:
        """The key expires, and so does the lease of the client that believes in it, by its own clock."""
        held = self.probe.execute((b"GET", KEY))[0]
        i, _ = self.identity(held)
        self.processes[i].expire(held)
        self.probe.execute((b"DEL", KEY))

    def can_happen(self, event: Event) -> bool:
        """Whether the environment decides, and not the local queue, that this happens now."""
        if len(event) > 1 and not self.processes[event[1]].can_happen(event):
            return False
        if event[0] != "another comes":
            return True
        each = self.processes[event[1]]
        # it is removed when a caller comes, if there is neither a waiter nor a holder
        queue = each.queues.by_key.get(KEY)
        return queue is not None and bool(
            queue.waiters.count or queue.circulating is None or queue.circulating._deadline > each.clock()
        )

    def left(self) -> list[str]:
        """The keys, queues and callers that are left when everything should have ended."""
        known = (commands.queue_key(KEY), commands.fence_key(KEY))
        found = [f"{key!r}" for key in self.probe.execute((b"KEYS", b"*"))[0] if key not in known]
        for i, each in enumerate(self.processes):
            phases = {who.phase for who in each.callers}
            if not each.dead and (each.queues.by_key or each.queues.by_entry or phases != {"gone"}):
                found.append(f"of {i}: local queues {each.queues.by_key} {each.queues.by_entry}, callers {phases}")
        return found


class Walk:
    """One walk through the model, of `length` steps, and then to its end; `met` notes the kinds of events on it."""

    trouble = TROUBLE
    budgets: tuple[int, ...] = (0, 0, 1, 2)  # how often each kind of trouble may happen, one of them for each
    fences: tuple[float, ...] = (0.0, 0.0, 0.3, 1.0)  # how likely a caller wants a fence

    def __init__(self, path: str, seed: int, length: int, factory: Factory = simulate) -> None:
        self.rng = random.Random(seed)
        self.length = length
        callers = self.rng.choice(COHORTS)
        budget = {name: self.rng.choice(self.budgets) for name in FAULTS}
        self.trace = [f"seed {seed}: {callers} callers, {budget}"]
        self.met: set[str] = set()
        self.protocol = Protocol()
        self.states = [begin(callers, fences=True, **budget)]
        self.replay = Replay(path, callers, self.rng.choice(self.fences), self.rng, factory)

    def go(self, monkeypatch: Any) -> None:
        """Walk to the end with simulated clients, whose clock leases read. Raises Drift."""
        monkeypatch.setattr(leases, "now", lambda: self.replay.now())
        self.walk()

    def walk(self) -> None:
        """Walk to the end. Raises Drift."""
        try:
            for at in range(self.length + LONGEST_END):
                if not self.step(only_musts=at >= self.length):
                    break
            else:
                raise Drift("the walk does not end")
            self.check_end()
        except Exception as error:
            raise Drift("\n".join([*self.trace, f"{type(error).__name__}: {error}"])) from error
        finally:
            self.replay.close()

    def step(self, *, only_musts: bool) -> bool:
        """Make one event happen. Returns whether there was one."""
        nexts = [(s, *step) for s in self.states for step in self.protocol.steps(s)]
        possible = {
            event for event in dict.fromkeys(event for _, _, event, _ in nexts) if self.replay.can_happen(event)
        }
        musts = list(dict.fromkeys(event for _, must, event, _ in nexts if must and event in possible))
        faults = list(dict.fromkeys(event for _, must, event, _ in nexts if not must and event in possible))
        trouble = bool(faults) and not only_musts and (not musts or self.rng.random() < self.trouble)
        if not (faults if trouble else musts):
            return False
        event = self.choose(faults if trouble else musts)
        self.trace.append(described(event))
        self.met.add(event[0])
        self.replay.happen(event, self.rng)
        seen = self.replay.observe()
        allowed = dict.fromkeys(
            after for s, _, known, state in nexts if known == event for after in self.outcomes(event, s, state)
        )
        self.states = [s for s in allowed if expected(s) == seen]
        if not self.states:
            raise Drift("\n".join(differences(seen, [expected(s) for s in allowed])))
        if fault := next(filter(None, map(unsafe, self.states)), None):
            raise Drift(fault)
        return True

    def outcomes(self, event: Event, before: State, after: State) -> list[State]:
        """The states that a client may reach by an event, for which the model has the state `after`."""
        return [after]

    def choose(self, events: list[Event]) -> Event:
        """Choose an event; each kind of event is equally likely."""
        kind = self.rng.choice(list(dict.fromkeys(event[0] for event in events)))
        return self.rng.choice([event for event in events if event[0] == kind])

    def check_end(self) -> None:
        if problem := next(filter(None, map(stuck, self.states)), None):
            raise Drift(problem)
        assert all(finished(client) for s in self.states for client in s.clients)
        if left := self.replay.left():
            raise Drift(f"left: {left}")


def differences(seen: Observation, allowed: list[Observation]) -> list[str]:
    """What is observed, and where it differs from each of the allowed states."""
    lines = []
    for one in allowed:
        for i, (real, expected) in enumerate(zip(seen.clients, one.clients, strict=True)):
            lines += [f"client {i}, {difference}" for difference in _different(real, expected)]
        lines += [*_different(seen[1:], one[1:], Observation._fields[1:]), "or"]
    return lines[:-1]


def _different(real: Any, expected: Any, names: tuple[str, ...] = ObservedClient._fields) -> list[str]:
    fields = zip(names, real, expected, strict=True)
    return [f"{name}: {is_so}, not {should_be}" for name, is_so, should_be in fields if is_so != should_be]
