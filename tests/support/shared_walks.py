"""Random walks over names that several may hold: the operations of read-write locks and semaphores, as the locks make
them, on a real server, in any order of events, on a clock that the walk sets.

Requests lie in a connection until the walk has the server execute them, in order; replies and grant messages until it
delivers them. Connections are cut, callers give up, clients die and time passes; the ends of leases on the server are
moved along with the clock. Checked after each event: those who believe that they hold the name may hold it together;
and at the end, where nothing fails any more: every caller was served or gave up, in order of arrival if nothing had
failed, and no key is left. No decisions about locks are made here.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import hiredis
import redis

import fastlock
from fastlock import _errors as errors
from fastlock._protocol import commands, steps
from fastlock._protocol.lease import Lease
from fastlock._protocol.local_queue import RECHECK_SECONDS
from support.run_steps import Clock

KEY = "walked"
QUEUE = "fastlock:queue:{walked}"
SECONDS = 5.0  # of a lease
SIZE = 3  # permits of a semaphore
SHIFT = """for _, name in ipairs(KEYS) do
  local all = redis.call('ZRANGE', name, 0, -1, 'WITHSCORES')
  for i = 1, #all, 2 do
    if tonumber(all[i + 1]) > 0 then redis.call('ZINCRBY', name, -ARGV[1], all[i]) end
  end
end"""


class Wire:
    """One connection of a walked client. Its session ends when it is cut; a new one begins with the next request."""

    reply_timeout = 5.0

    def __init__(self) -> None:
        self.session = object()
        self.flights: deque[Flight] = deque()

    def warn_refused(self, purpose: Any, error: Exception) -> None:
        raise AssertionError(f"refused: {error}")


@dataclass(eq=False)
class Flight:
    """A request or an undo on its way. Without a caller nobody reads its reply."""

    calls: list[Any]
    caller: Caller | None = None
    undo: Any = None
    executed: bool = False
    replies: list[Any] = field(default_factory=list)


@dataclass(eq=False)
class Caller:
    """A caller that wants the name, once. mode: "r", "w", or how many permits."""

    client: WalkedClient
    mode: Any
    lock: Any
    phase: str = "new"  # then "waits", "holds", "releases", "gone"
    lease: Any = None
    driver: Any = None
    step: Any = None  # the step that its operation awaits
    wakes_at: float = 0.0
    reads: bool = False  # whether it goes on to read when it has written

    def holds(self, time: float) -> bool:
        lease: Lease | None = self.lease
        return self.phase == "holds" and lease is not None and lease._deadline > time


class WalkedClient:
    """One client: its local queues, and two connections, of which the second is the one on which messages come."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.client = fastlock.Client(unix_socket_path=world.path)
        self.queues = self.client._transport.queues
        self.wires = [Wire(), Wire()]
        self.messages: deque[bytes] = deque()
        self.pending: list[Any] = []  # undos that wait for a connection
        self.ear: Any = None
        self.dead = False
        self.callers: list[Caller] = []

    def listen(self) -> None:
        if self.ear is None:
            self.ear = self.world.connect()
            self.ear.send_command("SUBSCRIBE", self.queues.channel)
            self.ear.read_response()

    def hear(self) -> None:
        """Take the messages that the server has published by now."""
        if self.ear is None:
            return
        self.ear.send_command("PING")
        while (push := self.ear.read_response()) and push[0] != b"pong":
            if push[0] == b"message":
                self.messages.append(push[2])

    def deafen(self) -> None:
        if self.ear is not None:
            self.ear.disconnect()
            self.ear = None
            # The server has to notice before it is asked who listens
            while self.world.raw("PUBSUB", "NUMSUB", self.queues.channel)[1]:
                pass
        self.messages.clear()


class World:
    """A walk: its clients, its server and its clock. faults: whether anything fails."""

    def __init__(self, path: str, clock: Clock, seed: int, faults: bool, rw: bool) -> None:
        self.path, self.clock, self.faults, self.rw = path, clock, faults, rw
        self.random = random.Random(seed)
        self.connection = self.connect()
        self.raw("FLUSHALL")
        for script in commands.SCRIPTS:
            self.raw("SCRIPT", "LOAD", script.text)
        self.monitor = self.connect()
        self.monitor.send_command("PSUBSCRIBE", "fastlock:*")
        self.monitor.read_response()
        self.clients = [WalkedClient(self) for _ in range(2)]
        self.callers: list[Caller] = []
        self.lost: list[tuple[object, Flight]] = []  # flights of cut sessions, which the server may still execute
        self.arrivals: list[bytes] = []  # entries in the order in which they joined the queue
        self.joined: set[bytes] = set()  # entries that have joined
        self.moments: dict[bytes, int] = {}  # of the entries that have joined, in milliseconds
        self.confirmed: set[bytes] = set()  # tokens whose acquire was granted, or whose grant was confirmed
        self.owners: dict[bytes, WalkedClient] = {}  # of each token that was sent
        self.log: list[str] = []
        self.shift = self.connection_script()

    def connect(self) -> Any:
        connection = redis.UnixDomainSocketConnection(path=self.path, protocol=2)
        connection.connect()
        return connection

    def connection_script(self) -> bytes:
        sha: bytes = self.raw("SCRIPT", "LOAD", SHIFT)
        return sha

    def raw(self, *args: Any) -> Any:
        """The server's reply to a command; an error reply as the core returns it."""
        self.connection.send_command(*args)
        try:
            return self.connection.read_response()
        except redis.ResponseError as error:
            return hiredis.ReplyError(str(error))

    # what the operations want

    def start(self, caller: Caller, operation: Any) -> None:
        client = caller.client
        undo: Callable[[Any], None] = lambda undo: self.undo(client, undo)  # noqa: E731
        enqueue: Callable[[Any], None] = lambda waiter: client.queues.enqueue(waiter, self.clock())  # noqa: E731
        caller.driver = steps.Driver(operation.steps(client.queues, self.clock), enqueue, undo)
        self.advance(caller, None)

    def advance(self, caller: Caller, answer: Any) -> None:
        """Give the caller's operation the answer, and note what it awaits next."""
        caller.step = None
        try:
            step = caller.driver.next(answer)
        except Exception as error:
            assert errors.is_own(error), repr(error)
            self.ended(caller, None)
            return
        if step is None:
            self.ended(caller, caller.driver.outcome)
            return
        caller.step = step
        if isinstance(step, steps.Request):
            self.send(caller, step)
        elif isinstance(step, steps.Wait):
            queue = step.waiter.queue
            at = min(queue.recheck_time(step.waiter), self.clock() + RECHECK_SECONDS, step.until or 1e18)
            caller.wakes_at = at
        elif isinstance(step, steps.Sleep):
            caller.wakes_at = self.clock() + step.seconds
        else:
            raise AssertionError(f"not expected: {step}")

    def send(self, caller: Caller, request: Any) -> None:
        client = caller.client
        if request.needs_push:
            client.listen()
        wire = client.wires[request.needs_push]
        self.kill(client, request.stale)
        request.sent, request.connection = self.clock(), wire
        wire.flights.append(Flight(list(request.calls), caller))
        for call in request.calls:
            self.owners.update(dict.fromkeys((part[:35] for part in call if part.startswith(b"fl:")), client))

    def undo(self, client: WalkedClient, undo: Any) -> None:
        if client.dead:
            return
        self.kill(client, undo.stale)
        wire = undo.connection if undo.connection in client.wires else self.random.choice(client.wires)
        wire.flights.append(Flight(undo.commands(frozenset((commands.DELIFEQ,)), False), undo=undo))

    def kill(self, client: WalkedClient, stale: Any) -> None:
        """End sessions that broke: what was in flight there is not executed any more."""
        self.lost = [(session, flight) for session, flight in self.lost if session not in stale]

    def ended(self, caller: Caller, outcome: Any) -> None:
        if caller.phase == "waits" and outcome is not None:
            caller.phase, caller.lease = "holds", outcome
        elif caller.phase == "releases" and caller.reads and outcome:
            caller.reads, caller.phase, caller.mode = False, "holds", "r"
        else:
            caller.phase = "gone"

    # events

    def events(self) -> Iterator[tuple[str, Callable[[], None], float]]:
        """What may happen next, each with its weight."""
        for client in self.clients:
            if client.dead:
                continue
            for wire in client.wires:
                if wire.flights and not wire.flights[0].executed:
                    yield "execute", lambda wire=wire: self.execute(wire), 3
                if wire.flights and wire.flights[0].executed:
                    yield "reply", lambda client=client, wire=wire: self.reply(client, wire), 3
            if client.messages:
                yield "message", lambda client=client: self.message(client), 3
            if self.faults:
                for wire in client.wires:
                    yield "cut", lambda client=client, wire=wire: self.cut(client, wire), 0.03
                yield "die", lambda client=client: self.die(client), 0.004
        for session, flight in self.lost:
            yield "execute lost", lambda session=session, flight=flight: self.execute_lost(session, flight), 0.3
        for caller in self.callers:
            if caller.client.dead:
                continue
            if caller.phase == "new":
                yield "acquire", lambda caller=caller: self.acquire(caller), 1
            elif caller.phase == "holds":
                yield "release", lambda caller=caller: self.release(caller), 1
            waiting = isinstance(caller.step, steps.Wait)
            if waiting and (caller.step.waiter.woken or caller.wakes_at <= self.clock()):
                yield "wake", lambda caller=caller: self.wake(caller), 3
            elif isinstance(caller.step, steps.Sleep) and caller.wakes_at <= self.clock():
                yield "wake", lambda caller=caller: self.advance(caller, None), 3
            elif isinstance(caller.step, steps.Request) and (caller.step.until or 1e18) <= self.clock():
                yield "deadline", lambda caller=caller: self.deadline(caller), 1
            if self.faults and caller.phase in ("waits", "releases") and caller.step is not None:
                yield "give up", lambda caller=caller: self.give_up(caller), 0.1

    def run(self, events: int = 160, callers: int = 6) -> None:
        """Walk. AssertionError: a promise was broken."""
        for _ in range(callers):
            client = self.random.choice(self.clients)
            client.callers.append(caller := Caller(client, *self.wish(client)))
            self.callers.append(caller)
        for _ in range(events):
            if self.over():
                break
            self.happen()
        self.faults = False
        for _ in range(3000):
            if self.over():
                break
            self.happen()
        else:
            waiting = [
                (each.phase, each.mode) for each in self.callers if each.phase != "gone" and not each.client.dead
            ]
            raise AssertionError(f"never served: {waiting} {[client.wires for client in self.clients]}")
        self.check_end()

    def over(self) -> bool:
        """Whether all callers were served or gave up, and nothing is under way."""
        if self.lost or any(wire.flights for each in self.clients if not each.dead for wire in each.wires):
            return False
        return all(caller.phase == "gone" or caller.client.dead for caller in self.callers)

    def wish(self, client: WalkedClient) -> tuple[Any, Any]:
        """What a caller wants, and its lock, which is no other caller's."""
        limit = self.random.choice((None, None, None, 0.5, 1.5))
        if self.rw:
            lock = client.client.rw_lock(KEY, timeout=SECONDS, blocking_timeout=limit)
            mode = self.random.choice("rrw")
            side = lock.read if mode == "r" else lock.write
            side._leases = {}
            return mode, side
        n = self.random.choice((1, 1, 2, 3))
        return n, client.client.semaphore(KEY, SIZE, n, timeout=SECONDS, blocking_timeout=limit)

    def happen(self) -> None:
        possible = list(self.events())
        passing = 0.15 if self.faults else 0.02
        if not possible or self.random.random() < passing:
            self.pass_time(self.random.choice((0.01, 0.3, 1.1, 1.1, SECONDS + 1 if self.faults else 0.3)))
        else:
            name, event, _ = self.random.choices(possible, [weight for _, _, weight in possible])[0]
            self.log.append(name)
            event()
        for client in self.clients:
            client.hear()
        self.check()

    def pass_time(self, seconds: float) -> None:
        self.log.append(f"+{seconds}")
        self.clock.go(seconds)
        self.raw("EVALSHA", self.shift, "1", KEY, str(int(seconds * 1000)))
        if seconds > 10:
            self.raw("DEL", commands.queue_key(KEY.encode()))

    def acquire(self, caller: Caller) -> None:
        caller.phase = "waits"
        self.start(caller, caller.lock._new_acquire(required=False, start=self.clock()))

    def release(self, caller: Caller) -> None:
        if caller.mode == "w" and not caller.reads and self.random.random() < 0.3:
            caller.reads, caller.lease._reads = True, 1
        caller.phase = "releases"
        self.start(caller, caller.lock._release_of(caller.lease))

    def execute(self, wire: Wire) -> None:
        flight = wire.flights[0]
        flight.replies = [self.run_call(call) for call in flight.calls]
        flight.executed = True

    def execute_lost(self, session: object, flight: Flight) -> None:
        self.lost.remove((session, flight))
        for call in flight.calls:
            self.run_call(call)

    def run_call(self, call: tuple[bytes, ...]) -> Any:
        """Have the server execute the call of a script, and check what it left there."""
        if call[0] == b"PING":  # of an undo that only ends sessions
            return self.raw(*call)
        before = self.raw("ZRANGE", KEY, 0, -1)
        reply, held = self.raw(*call), self.raw("ZRANGE", KEY, 0, -1, "WITHSCORES")
        ends = {token: float(end) for token, end in zip(held[::2], held[1::2], strict=True)}
        used = -ends.pop(b"|used", 0)
        if not self.rw:
            assert used == sum(commands.permits_of(token)[0] for token in ends), "permits are counted wrong"
        seconds, microseconds = self.raw("TIME")
        assert all(end > int(seconds) * 1000 + int(microseconds) // 1000 - 5 for end in ends.values()), "an ended lease"
        if call[1] == commands.SHARED_JOIN_LUA.sha and isinstance(reply, list):
            token, address = call[-6:-4]
            if address:
                self.moments[token] = int(address[commands.CHANNEL_SIZE : commands.ADDRESS_SIZE - 1])
                assert token not in self.joined, "an entry has joined twice"
                self.joined.add(token)
                self.arrivals += [token] * (not reply[0])
            else:
                others = self.raw("ZCARD", QUEUE)
                assert not (reply[0] and others) or token in before, "a try overtook the queue"
        if isinstance(reply, list) and reply[0] == 1:
            self.confirmed.add(call[3 + int(call[2])])
        for token, end in ends.items():
            short = end <= int(seconds) * 1000 + int(microseconds) // 1000 + self.moments.get(token, 0) + 10
            assert short or token.replace(b"|r", b"|w") in self.confirmed or token in self.confirmed, (
                "a grant is a lease"
            )
        if first := self.raw("ZRANGE", QUEUE, 0, 0):
            assert not self.fits(commands.split(first[0])[1], list(ends), int(used)), "a grant was forgotten"
        return reply

    def fits(self, entry: bytes, held: list[bytes], used: int) -> bool:
        """Whether the first in the queue could hold the name beside those who do."""
        if not self.rw:
            return used + commands.permits_of(entry)[0] <= SIZE
        return not held or (commands.mode_of(entry) == commands.mode_of(held[0]) == commands.READER)

    def reply(self, client: WalkedClient, wire: Wire) -> None:
        flight = wire.flights.popleft()
        if flight.caller is not None:
            self.advance(flight.caller, flight.replies)

    def message(self, client: WalkedClient) -> None:
        client.queues.on_push([b"message", client.queues.channel, client.messages.popleft()])

    def wake(self, caller: Caller) -> None:
        caller.step.waiter.woken = False
        self.advance(caller, None)

    def cut(self, client: WalkedClient, wire: Wire) -> None:
        """The connection breaks. What the server has not executed it may execute later, or never."""
        flights, session = list(wire.flights), wire.session
        wire.flights.clear()
        wire.session = object()
        if wire is client.wires[1]:
            client.deafen()
        self.lost = [*self.lost, *((session, each) for each in flights if not each.executed)]
        undos = [each.undo for each in flights if each.undo is not None]
        for flight in flights:
            if flight.caller is not None:
                error = errors.as_own(errors.ConnectionError("cut"))
                self.advance(flight.caller, steps.ConnectionLost(error, 5.0, sent=True, session=session))
        for undo in undos:  # sent again, over whichever connection, when the old session was ended
            again = undo.untied()
            again.stale = (*undo.stale, session)
            self.undo(client, again)
        client.queues.on_reconnect()

    def deadline(self, caller: Caller) -> None:
        """The caller's time is over, and the reply has not come."""
        request = self.forget(caller)
        self.advance(caller, steps.Answer.DEADLINE_EXCEEDED)
        self.undo_request(caller, request)

    def forget(self, caller: Caller) -> Any:
        """Have nobody read the reply that a caller waits for. Returns its request, or None: it waits for none."""
        mine = [flight for wire in caller.client.wires for flight in wire.flights if flight.caller is caller]
        for flight in mine:
            flight.caller = None
        return caller.step if mine else None

    def undo_request(self, caller: Caller, request: Any) -> None:
        if request is not None and (undo := request.undo()) is not None:
            undo.connection = request.connection
            self.undo(caller.client, undo)

    def give_up(self, caller: Caller) -> None:
        """The caller is cancelled where it waits."""
        request = self.forget(caller)
        caller.phase = "holds" if caller.reads else "gone"
        caller.reads, caller.mode = False, "r" if caller.reads else caller.mode
        with contextlib.suppress(asyncio.CancelledError):
            caller.driver.fail(asyncio.CancelledError())
        caller.step = None
        self.undo_request(caller, request)

    def die(self, client: WalkedClient) -> None:
        client.dead = True
        for wire in client.wires:
            self.lost = [*self.lost, *((wire.session, each) for each in wire.flights if not each.executed)]
        client.deafen()

    # promises

    def check(self) -> None:
        holders = [caller.mode for caller in self.callers if not caller.client.dead and caller.holds(self.clock())]
        if self.rw:
            assert "w" not in holders or len(holders) == 1, f"together hold {holders}"
        else:
            assert sum(holders) <= SIZE, f"together hold {holders}"

    def check_end(self) -> None:
        in_order = not any(word in self.log for word in ("cut", "die", "give up"))
        left = self.raw("ZRANGE", KEY, 0, -1) + [commands.split(each)[1] for each in self.raw("ZRANGE", QUEUE, 0, -1)]
        living = [token for token in left if token[:35] in self.owners and not self.owners[token[:35]].dead]
        assert not living, f"nobody wants {living}"
        token = b"fl:" + b"0" * 32 + (b"|r" if self.rw else b"|s1/3")
        for _ in range(3):  # what the dead held has ended, as whoever comes next finds
            self.pass_time(SECONDS + 1)
            self.raw(*commands.hand_over(KEY.encode(), token))
        assert self.raw("KEYS", "*") == [], "a key is left"
        assert all(not client.queues.by_entry for client in self.clients if not client.dead), "entries left"
        if in_order:
            granted = self.granted()
            order = [entry for entry in self.arrivals if entry in granted]
            assert granted == order, "not in order of arrival"

    def granted(self) -> list[bytes]:
        """The entries that were granted the name by a message, in order."""
        self.monitor.send_command("PING")
        found = []
        while (push := self.monitor.read_response()) and push[0] != b"pong":
            found.append(push[3])
        return [entry for i, entry in enumerate(found) if entry not in found[:i]]

    def close(self) -> None:
        for connection in (self.connection, self.monitor, *(each.ear for each in self.clients if each.ear)):
            connection.disconnect()
        for client in self.clients:
            client.client.close()


def walk(path: str, clock: Clock, seed: int, rw: bool) -> World:
    """One walk, whose events follow from the seed. Every third fails nothing."""
    world = World(path, clock, seed, faults=seed % 3 > 0, rw=rw)
    try:
        world.run()
    except BaseException as error:
        error.add_note(f"seed {seed}, {'rw' if rw else 'semaphore'}; {' '.join(world.log[-60:])}")
        raise
    finally:
        world.close()
    return world
