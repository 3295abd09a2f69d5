"""A client simulator made of the real protocol and the real local queues: no command arrives before a test says so.

A request lies in `flights` until the test has the server execute it. What the server sends to the process lies in
`incoming` until the test delivers it, but for replies that have no order relative to messages. A waiter that is woken
runs at once. One connection carries everything, in the order of execution. The simulator makes no decisions of its own.
"""

from __future__ import annotations

import contextlib
import math
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import hiredis

from fastlock import _errors as errors
from fastlock._protocol import commands, steps
from fastlock._protocol.acquire import Acquire
from fastlock._protocol.batch_operations import release_many
from fastlock._protocol.belief import ConfirmationUndo
from fastlock._protocol.commands import Opcode
from fastlock._protocol.handshake import Session
from fastlock._protocol.lease import new_token
from fastlock._protocol.local_queue import LOCAL_SECONDS, LocalQueues
from fastlock._protocol.release import Release
from fastlock._protocol.steps import Answer, lease_end
from fastlock._protocol.undo import ScriptUndo, Undo
from fastlock._protocol.waiters import Waiter
from fastlock._transport.undo_delivery import UndoDelivery
from support.handover import ASKING, Command
from support.resp import encode
from support.run_steps import Clock
from support.streams import LONG
from support.walked_client import KEY, MS, ORDERED, WalkedCaller, WalkedClient

RESTLESS = 50  # steps in a row without a request or a wait, after which an operation counts as hanging


class Gone(BaseException):
    """The caller was cancelled."""


class RawConnection:
    """A connection to a server: executes commands, returns their replies, and keeps what was pushed meanwhile."""

    def __init__(self, path: str) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(LONG)
        self.sock.connect(path)
        self.reader = hiredis.Reader()
        self.pushed: list[Any] = []
        self.subscribed = False
        self.execute((b"HELLO", b"3"))
        (self.id,) = self.execute((b"CLIENT", b"ID"))

    def execute(self, *calls: tuple[bytes, ...]) -> list[Any]:
        """The replies to these commands."""
        self.sock.sendall(b"".join(encode(*call) for call in calls))
        replies: list[Any] = []
        while len(replies) < sum(call[0] != b"SUBSCRIBE" for call in calls):
            reply = self.reader.gets()
            if reply is False:
                self.reader.feed(self.sock.recv(65536))
            elif isinstance(reply, hiredis.PushNotification):
                self.pushed.append(reply)
            else:
                replies.append(reply)
        return replies

    def close(self) -> None:
        self.sock.close()


@dataclass(eq=False)
class Flight:
    """A request that was not answered. Without a caller: nobody waits for the reply."""

    verb: str
    token: bytes
    request: Any
    caller: Caller | None = None
    ordered: bool = False
    behind: Undo | None = None  # what its caller, which was cancelled, has sent right behind it


@dataclass(eq=False)
class Caller(WalkedCaller):
    """A caller that wants the name, once."""

    op: Any = None  # its Acquire
    driver: Any = None  # of the operation that it runs now
    wait: steps.Wait | None = None  # the step in which it sleeps


class SimulatedClient(WalkedClient):
    """One client. `dial` opens a connection for it."""

    def __init__(
        self, dial: Callable[[], RawConnection], capabilities: frozenset[str], kinds: list[tuple[bool, bool]]
    ) -> None:
        super().__init__(Clock(), LocalQueues(contextlib.nullcontext()))
        self.callers: list[Caller] = [caller(strict=strict, fenced=fenced) for strict, fenced in kinds]
        self.dial = dial
        self.flights: list[Flight] = []
        self.incoming: list[tuple[Flight | None, Any]] = []
        self.raw: RawConnection | None = None
        self.lost: list[Flight] = []  # what was in flight when the connection broke
        self.session = Session({}, capabilities, b"", b"", "")
        self.table = commands.command_table(capabilities)
        self.loaded: set[commands.RawCommand] = set()  # this and the next: as of a `Carrier`
        self.knows_release = False

    # operations

    def begin(self) -> None:
        """All callers come; several of them find a local queue, as if another caller had come before them."""
        self.begun = True
        for at, caller in enumerate(self.callers):
            answer = caller.op.local(self.queues, self.clock())
            assert (answer is Answer.WAIT_LOCALLY) is (at > 0 or caller.op.alone)
            if answer is None and len(self.callers) == 1:
                self.start(caller, caller.op.steps(self.queues, self.clock, Answer.ASK_SERVER))
            else:
                self.start(caller, caller.op.continue_from(Answer.WAIT_LOCALLY, self.clock))

    def another(self, *, fenced: bool) -> None:
        """One more caller comes, while others of the client wait or hold."""
        self.callers.append(caller(strict=False, fenced=fenced))
        op = self.callers[-1].op
        assert op.local(self.queues, self.clock()) is Answer.WAIT_LOCALLY
        self.start(self.callers[-1], op.continue_from(Answer.WAIT_LOCALLY, self.clock))

    def start(self, caller: Caller, steps_of_operation: Any) -> None:
        caller.driver = steps.Driver(steps_of_operation, lambda waiter: self.enqueue(caller, waiter), self.undo)
        self.advance(caller, None)

    def enqueue(self, caller: Caller, waiter: Waiter) -> None:
        caller.waiter = waiter
        self.queues.enqueue(waiter)

    def undo(self, undo: Undo) -> None:
        ordered = undo.connection is not None  # before the delivery unties it
        self.post(UndoDelivery(undo), ordered)

    def advance(self, caller: Caller, answer: Any) -> None:
        """Continue an operation until it waits or ends."""
        caller.wait = None
        for _ in range(RESTLESS):
            step = caller.driver.next(answer)
            if step is None:
                self.ended(caller, caller.driver.outcome)
                return
            if isinstance(step, steps.Request):
                self.send(caller, step)
                return
            if isinstance(step, steps.Wait):
                caller.waiter = step.waiter
                if not self.awake(step):
                    caller.wait = step
                    return
            answer = self.perform(step)
        raise AssertionError("the operation neither sends a request nor sleeps")

    def awake(self, step: steps.Wait) -> bool:
        queue, woken, step.waiter.woken = step.waiter.queue, step.waiter.woken, False
        assert queue is not None, "the waiter has joined no local queue"
        return woken or queue.recheck_time(step.waiter) <= self.clock()

    def perform(self, step: Any) -> Any:
        if isinstance(step, steps.GetSession):
            return self.session
        assert isinstance(step, steps.Sleep | steps.Wait), step
        return None

    def ended(self, caller: Caller, outcome: Any) -> None:
        caller.driver = None
        if caller.phase == "waits" and outcome is not None:
            assert (outcome.fence is not None) is caller.op.fenced, (
                "a lease has a fence if and only if the caller wants one"
            )
            caller.phase, caller.lease = "holds", outcome
            return
        caller.phase = "gone"
        if caller.lease is not None:
            caller.lease._end()

    def release(self, caller: Caller, *, batch: bool = False, late: bool = False) -> bool:
        """A holder releases; `late`: after LOCAL_SECONDS, when no local handover is allowed. Returns whether it
        handed over."""
        lease, before = self.lease(caller), self.queues.stats.local_handovers
        caller.phase = "releases"
        if late:
            self.clock.go(2 * LOCAL_SECONDS)
        if batch:
            self.start(caller, release_many([lease], self.queues, self.clock))
        else:
            release = Release(lease)
            self.start(caller, release.steps(self.queues, self.clock))
        handed_over = self.queues.stats.local_handovers > before
        assert not (handed_over and late), "a local handover after LOCAL_SECONDS"
        return handed_over

    def give_up(self, caller: Caller) -> None:
        """The caller is cancelled, as the transports do it."""
        flight = self.pending(caller)
        if flight is not None:
            flight.caller, flight.behind = None, flight.request.undo()
            self.incoming = [each for each in self.incoming if each[0] is not flight]
            if flight.verb == "EXTEND":
                self.flights.remove(flight)
        caller.phase = "gone"
        with contextlib.suppress(Gone):
            if caller.driver is not None:
                caller.driver.fail(Gone())
        if caller.op.token in self.tokens:  # else the server never received it
            self.undo(caller.op.undo())

    def settle(self) -> None:
        """Run every waiter that was woken, but not those that were handed a lease: they run when the walk says so."""
        awake = lambda each: each.wait is not None and each.wait.waiter.woken and each not in self.handed_over()  # noqa: E731
        while woken := [each for each in self.callers if awake(each)]:
            caller = woken[0]
            assert caller.wait is not None
            caller.wait.waiter.woken = False
            self.advance(caller, None)

    # requests and replies

    def send(self, caller: Caller, request: Any) -> None:
        request.sent, request.connection = self.clock(), self
        verb, token = named(request)
        self.send_flight(Flight(verb, token, request, caller, verb in ORDERED))

    def post(self, delivery: UndoDelivery, ordered: bool = False) -> None:
        """Send a request whose reply nobody waits for; an equal one that is pending is enough. An undo without names
        only ends broken sessions, which have ended here."""
        undo = delivery.undo
        if isinstance(undo, ConfirmationUndo):
            confirmation = undo.confirmation
            if confirmation.lease._confirmation is not confirmation:
                return  # that, too: nobody needs it any more
            verb, token = "CONFIRM", confirmation.lease._raw_token
        elif isinstance(undo, ScriptUndo):
            verb, token = "LEAVE", undo.call[-2]
        elif undo.names:
            verb, token = "UNDO", undo.tokens[0]
        else:
            return
        pending = [(flight.verb, flight.token) for flight in self.flights if flight.ordered is ordered]
        pending += [("UNDO", each.behind.tokens[0]) for each in self.flights if each.behind is not None]
        if (verb, token) not in pending:
            self.send_flight(Flight(verb, token, delivery, None, ordered))

    def send_flight(self, flight: Flight) -> None:
        if flight.token not in self.tokens:
            self.tokens.append(flight.token)
        self.flights.append(flight)

    def commands_of(self, request: Any) -> Iterator[tuple[bytes, ...]]:
        """The commands that a request sends."""
        if isinstance(request, UndoDelivery):
            calls = request.calls(self)
            request.written(calls)
            yield from calls
            return
        if isinstance(request, steps.RawCommands):
            yield from request.calls
            return
        many = isinstance(request, steps.CommandBatch)
        if many and (scripts := request.calls(self.session.capabilities)):
            yield from scripts
            return
        for name, token in zip(request.names, request.tokens, strict=True) if many else [(request.key, request.token)]:
            words = {commands.NAME: name, commands.TOKEN: token, commands.MS: b"%d" % request.ms}
            yield tuple(word if isinstance(word, bytes) else words[word] for word in self.table[request.opcode])

    def serve(self, flight: Flight) -> Any:
        """The server executes the request. Returns its reply."""
        self.flights.remove(flight)
        calls = list(self.commands_of(flight.request))
        if self.raw is None:
            self.raw = self.dial()
        if flight.verb in ASKING and not self.raw.subscribed:
            self.raw.subscribed = True
            calls.insert(0, (b"SUBSCRIBE", self.queues.channel))
        replies = self.raw.execute(*calls)
        self.collect()
        return replies[0] if isinstance(flight.request, steps.Command) else replies

    def execute(self, flight: Flight) -> None:
        """The server executes the request; the reply takes effect at once, unless it has an order relative to
        messages."""
        reply, caller = self.serve(flight), flight.caller
        if flight.behind is not None:
            self.post(UndoDelivery(flight.behind))
        if isinstance(flight.request, UndoDelivery):
            flight.request.answered(reply)
        elif flight.verb in ASKING and caller is not None:
            self.incoming.append((flight, reply))
        elif caller is not None:
            self.advance(caller, reply)
            again = self.pending(caller)
            if flight.verb == "EXTEND" and again is not None and again.verb == "EXTEND":
                self.execute(again)  # the same command in its other form: the model knows only one

    def collect(self) -> None:
        """Receive all that was pushed."""
        if self.raw is None:
            return
        self.raw.execute((b"PING",))
        pushed, self.raw.pushed = self.raw.pushed, []
        self.incoming += [
            (None, each[2]) for each in pushed if each[0] == b"message" and each[1] == self.queues.channel
        ]

    def receive(self) -> None:
        """Deliver the first reply or message that has come."""
        flight, what = self.incoming.pop(0)
        if flight is None:
            self.queues.on_grant_message(what)
        else:
            self.advance(flight.caller, what)

    def subscribed(self) -> bool:
        return self.raw is not None and self.raw.subscribed

    def ends(self, flight: Flight) -> float:
        return lease_end(flight.request.sent, MS)

    def resume(self, token: int) -> None:
        who = next(who for who in self.handed_over() if self.number(self.handed(who)._raw_token) == token)
        assert who.waiter is not None
        who.waiter.woken = False
        self.advance(who, None)

    def recheck(self) -> None:
        self.advance(self.first(), None)

    def expire(self, held: bytes) -> None:
        for lease in (*map(self.lease, self.holders()), *map(self.handed, self.handed_over())):
            if commands.token_matches(held, lease._raw_token):
                late = lease._confirmation  # which may be under way still
                self.clock.time = lease._deadline if late is None else max(lease._deadline, late.sent + MS / 1000)
        self.expire_moment(held)
        for flight, reply in self.incoming:
            if flight is not None and reply[0][0] == 1 and commands.token_matches(held, flight.token):
                self.clock.time = self.ends(flight)
        for flight in self.flights:  # requests that were not executed yet count as sent now
            if not isinstance(flight.request, UndoDelivery):
                flight.request.sent = self.clock()

    def end(self, sent: tuple[Command, ...], kill: Callable[[int], object]) -> None:
        flights = list(self.flights)
        for command in sent:
            self.serve(self.flight(command))
        if self.raw is not None:
            kill(self.raw.id)
            self.raw.close()
        self.lost = [*flights, *(flight for flight, _ in self.incoming if flight is not None)]
        self.flights, self.incoming, self.raw = [], [], None
        self.loaded, self.knows_release = set(), False

    def cut(self) -> None:
        """Do what the transports do when a connection with these flights breaks: pending undos, then retries."""
        flights, self.lost = self.lost, []
        for flight in flights:
            if isinstance(flight.request, UndoDelivery):
                self.post(flight.request, flight.ordered)
            elif flight.behind is not None:
                self.post(UndoDelivery(flight.behind))
        self.queues.on_reconnect()
        self.settle()
        for flight in flights:
            if flight.caller is not None:
                lost = steps.ConnectionLost(errors.as_own(errors.ConnectionError("cut")), math.inf, sent=True)
                self.advance(flight.caller, lost)

    def die(self) -> None:
        self.dead = True
        for one in self.callers:
            one.wait = None
            if one.driver is not None:
                one.driver.steps.close()

    def close(self) -> None:
        if self.raw is not None:
            self.raw.close()


def named(request: Any) -> tuple[str, bytes]:
    """The model's name of a step, and its token or queue entry."""
    if isinstance(request, steps.Command):
        verbs = {Opcode.ACQUIRE: "SET", Opcode.RELEASE: "DEL", Opcode.EXTEND: "EXTEND", Opcode.EXTEND_SCRIPT: "EXTEND"}
        return verbs[request.opcode], request.token
    if isinstance(request, steps.CommandBatch):
        return "BATCH", request.tokens[0]
    (call,) = request.calls
    if call[1] == commands.ENTER_LUA.sha:
        return ASKING[call[-1] != b"1"], call[-6]
    if call[1] == commands.FENCED_LUA.sha:
        return "SET", call[-3]
    return {commands.HAND_OVER_LUA.sha: "REL", commands.RELEASE_MANY_LUA.sha: "BATCH"}[call[1]], call[-1]


def caller(*, strict: bool, fenced: bool) -> Caller:
    op = Acquire("name", KEY, new_token(), MS, fenced)
    op.blocking, op.alone, op.believes = True, strict, not fenced
    return Caller(op=op)
