"""A real client under a random walk: its callers call `acquire` and `release` of a real lock, on the real transport.

What is not real is below the transport: each connection of the client is a `Line` to a real server, on which a request
lies until the walk has the server execute it, and a reply or a message until the walk delivers it. One connection keeps
its order, so the walk has less choice than in the model (`can_happen`): what was sent first on a connection is executed
first, and a reply is read after what came before it. `real_tasks.py` and `real_threads.py` have the two kinds.
No decisions about locks are made here.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import hiredis

from fastlock._protocol import commands
from fastlock._protocol.local_queue import LOCAL_SECONDS, LocalQueue
from support import handover as model
from support.handover import Command, Event
from support.resp import Framer, encode, frame_end, is_push
from support.run_steps import Clock
from support.streams import LONG
from support.walked_client import KEY, MS, ORDERED, WalkedCaller, WalkedClient

Call = tuple[bytes, ...]
REPLY_TIMEOUT = 1e6  # seconds for which a client tries again: longer than any walk
AHEAD = (b"SUBSCRIBE", b"SCRIPT", b"PING")  # commands that are executed together with the request behind them
UNDOS = ("UNDO", "LEAVE")
GREETING = (b"HELLO", b"CLIENT", b"COMMAND", b"CONFIG", b"INFO", b"SCRIPT")  # commands of a handshake


class Name(str):
    """The name of a lock of one caller: equal to those of the other callers, from which only its identity differs."""

    __slots__ = ()


@dataclass(eq=False)
class Request:
    """A request on its way to the server, or its reply on the way back. Without a caller: nobody waits for that."""

    verb: str
    token: bytes
    calls: list[Call]
    line: Line
    serial: int
    end: float  # of the lease that it asks for
    ordered: bool
    pending: Any = None  # what gets the reply, where that is not bytes
    asker: Any = None  # the thread that sleeps until it is answered
    ahead: list[tuple[Call, Any]] = field(default_factory=list)  # commands right before it, what gets their replies
    caller: RealCaller | None = None
    sender_known: bool = False
    spent: bool = False  # whether the server has executed an equal one, so that this one changes nothing


@dataclass(eq=False)
class RealCaller(WalkedCaller):
    """A caller with a lock of its own; `batch`: it releases by `release_many`."""

    name: Name = field(default_factory=lambda: Name(KEY.decode()))
    fenced: bool = False
    lock: Any = None
    batch: bool = False
    trouble: BaseException | None = None  # what it raised and should not have


class Line:
    """A connection of a client to the server: what was sent and not executed, what came and was not read."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        sock.settimeout(LONG)
        self.framer = Framer(frame_end)
        self.pushed: list[bytes] = []
        self.subscribed = False
        self.entered = False  # whether an ENTER was executed
        self.closed = False
        self.greeting = True  # whether the handshake is under way, whose commands are executed at once
        self.ahead: list[tuple[Call, Any]] = []
        self.requests: list[Request] = []
        self.arrived: list[tuple[Request | None, Any]] = []  # (request, frames of the replies), or (None, a message)
        (known,) = self.execute((b"CLIENT", b"ID"))
        self.id = int(known[1:])

    @classmethod
    def to(cls, path: str) -> Line:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(path)
        return cls(sock)

    def execute(self, *calls: Call) -> list[bytes]:
        """The frames of the replies to these commands."""
        self.sock.sendall(b"".join(encode(*call) for call in calls))
        replies: list[bytes] = []
        while len(replies) < len(calls):
            for frame in self.framer.feed(self.sock.recv(65536)):
                (self.pushed if is_push(frame) else replies).append(frame)
        return replies

    def close(self) -> None:
        self.closed = True
        self.sock.close()


def greets(call: Call) -> bool:
    """Whether this is part of a handshake, if the connection is new."""
    return call[0] in GREETING and call[:2] != (b"CLIENT", b"KILL")


def decoded(frame: bytes) -> Any:
    reader = hiredis.Reader()
    reader.feed(frame)
    return reader.gets()


def visible(item: tuple[Request | None, Any]) -> bool:
    """Whether delivery has an effect: the item is a message, or a reply for which a caller waits."""
    request, _ = item
    return request is None or request.caller is not None


def read_at_once(request: Request) -> bool:
    """Whether the reply takes effect when the request is executed, in the model."""
    return not request.ordered and (request.caller is not None or request.verb in ("DEL", "BATCH", "REL"))


class RealClient(WalkedClient):
    """One real client; its caller with `strict` has a fair lock."""

    callers: list[Any]
    caller: type[RealCaller]  # the kind of its callers

    def __init__(self, clock: Clock, client: Any) -> None:
        super().__init__(clock, client._transport.queues)
        self.client = client
        self.callers = []
        self.lines: list[Line] = []
        self.serial = 0
        self.undone: set[tuple[str, bytes]] = set()  # undos that were executed: to repeat them changes nothing
        self.late: set[bytes] = set()  # tokens that were granted too late, whose undo goes ahead of the next ENTER

    # what the subclasses implement

    def run(self) -> None:
        """Run the callers until each of them waits for something."""
        raise NotImplementedError

    def start(self, caller: RealCaller) -> None:
        """The caller begins to acquire."""
        raise NotImplementedError

    def order_release(self, caller: RealCaller) -> None:
        """Have a holder release."""
        raise NotImplementedError

    def cancel(self, caller: RealCaller) -> None:
        """Have a caller end."""
        raise NotImplementedError

    def deliver(self, request: Request, frames: list[bytes]) -> None:
        """Give the client the replies to a request and to the commands ahead of it."""
        raise NotImplementedError

    def push(self, line: Line, frame: bytes) -> None:
        """Give the client a message."""
        raise NotImplementedError

    # requests

    def intake(self, line: Line, calls: list[Call], pending: Any = None) -> Request | None:
        """Note what the client sends. None: it goes with the next request."""
        if calls[-1][0] in AHEAD or calls[0][:2] == (b"CLIENT", b"KILL"):
            line.ahead += [(call, pending) for call in calls]
            return None
        line.greeting = False
        verb, token = named([call for call in calls if call[0] != b"SCRIPT"])
        if verb == "DEL" and any(
            c.batch and c.lease and c.lease._raw_token == token for c in self.in_phase("releases")
        ):
            verb = "BATCH"
        token = commands.PLAIN_PREFIX + token[3:]
        if verb == "LOOK" and token not in self.queues.by_entry:
            verb = "CONFIRM"
        if token not in self.tokens:
            self.tokens.append(token)
        ordered = verb in ORDERED or (verb == "UNDO" and token in self.late)
        request = Request(verb, token, calls, line, self.serial, self.clock() + MS / 1000, ordered, pending)
        self.serial += 1
        request.ahead, line.ahead = line.ahead, []
        request.spent = (verb, token) in self.undone
        line.requests.append(request)
        return request

    def requests(self) -> Iterator[Request]:
        for line in self.lines:
            yield from line.requests

    @property
    def flights(self) -> list[Request]:  # type: ignore[override]
        """The requests in the order in which they were sent, except for those that the model does not have: an undo
        behind the SET that it undoes, an undo that was sent twice, and what is `spent`."""
        sent = sorted(self.requests(), key=lambda request: request.serial)
        asked = {request.token for request in sent if request.verb == "SET"}
        shown: list[Request] = []
        for request in sent:
            behind = request.verb == "UNDO" and request.token in asked
            twice = request.verb in UNDOS and any(
                (each.verb, each.token) == (request.verb, request.token) for each in shown
            )
            if not (behind or twice or request.spent):
                shown.append(request)
        return shown

    @property
    def incoming(self) -> list[tuple[Request | None, Any]]:  # type: ignore[override]
        found: list[tuple[Request | None, Any]] = []
        for line in self.lines:
            for request, what in filter(visible, line.arrived):
                found.append((None, decoded(what)[2]) if request is None else (request, [decoded(what[-1])]))
        return found

    def ends(self, flight: Request) -> float:
        return flight.end

    def subscribed(self) -> bool:
        return any(line.subscribed and line.entered for line in self.lines)

    def can_happen(self, event: Event) -> bool:
        what, _, *rest = event
        if what == "executes":
            request = self.flight(rest[0])
            is_first = request.line.requests[0] is request
            quiet = not read_at_once(request) or not any(map(visible, request.line.arrived))
            return is_first and quiet
        if what in ("is cut", "dies"):
            sent = [self.flight(command) for command in rest[0]]
            for line in self.lines:
                mine = [request for request in sent if request.line is line]
                if mine != line.requests[: len(mine)]:
                    return False
        return True

    def serve(self, request: Request) -> list[bytes]:
        """The server executes a request. Returns the frames of the replies."""
        line = request.line
        line.requests.remove(request)
        before = [call for call, _ in request.ahead]
        frames = line.execute(*before, *request.calls)
        line.subscribed |= any(call[0] == b"SUBSCRIBE" for call in before)
        line.entered |= request.verb in model.ASKING
        return frames

    def execute(self, flight: Request) -> None:
        frames = self.serve(flight)
        if flight.verb in UNDOS:
            self.undone.add((flight.verb, flight.token))
            for other in self.requests():
                other.spent |= (other.verb, other.token) == (flight.verb, flight.token)
        if read_at_once(flight):
            self.deliver(flight, frames)
        else:
            self.collect()  # what was pushed by then comes before the reply
            flight.line.arrived.append((flight, frames))
        self.settle()
        again = next((each for each in self.requests() if each.verb == "EXTEND" and not each.spent), None)
        if flight.verb == "EXTEND" and again is not None:
            self.execute(again)  # the same command in its other form: the model knows only one

    def collect(self) -> None:
        for line in self.lines:
            if line.subscribed:
                line.execute((b"PING",))
            messages = [decoded(frame) for frame in line.pushed]
            keep = [m[0] == b"message" and m[1] == self.queues.channel for m in messages]
            line.arrived += [(None, frame) for frame, kept in zip(line.pushed, keep, strict=True) if kept]
            line.pushed.clear()

    def receive(self) -> None:
        line = next(line for line in self.lines if any(map(visible, line.arrived)))
        self.drop_silent(line)
        request, what = line.arrived.pop(0)
        if request is None:
            self.push(line, what)
            return
        reply = decoded(what[-1])
        if type(reply) is list and reply[0] == 1 and self.clock() >= request.end:
            self.late.add(request.token)
        self.deliver(request, what)

    def drop_silent(self, line: Line) -> None:
        """Deliver what nobody waits for."""
        while line.arrived and not visible(line.arrived[0]):
            request, frames = line.arrived.pop(0)
            assert request is not None
            self.deliver(request, frames)

    def settle(self) -> None:
        while True:
            self.run()
            self.note()
            before = self.serial, sum(len(line.arrived) + len(line.requests) for line in self.lines)
            for line in list(self.lines):
                self.drop_silent(line)
                while line.requests and line.requests[0].spent and not any(map(visible, line.arrived)):
                    request = line.requests[0]
                    self.deliver(request, self.serve(request))
            if before == (self.serial, sum(len(line.arrived) + len(line.requests) for line in self.lines)):
                break
        for caller in self.callers if not self.dead else ():
            if caller.trouble is not None:
                raise AssertionError(f"a caller raised {caller.trouble!r}") from caller.trouble
            if caller.phase == "gone" and not caller.batch:
                assert not caller.lock._leases, "a caller that is gone keeps a lease"

    def note_waiters(self) -> None:
        """Note by which waiter each caller is known."""
        for queue in {*self.queues.by_key.values(), *self.queues.by_entry.values()}:
            for waiter in queue.waiters:
                self.named(waiter.name).waiter = waiter

    def note(self) -> None:
        """Note by which waiter each caller is known, and who has sent each request."""
        self.note_waiters()
        for request in self.requests():
            if not request.sender_known:
                request.sender_known, request.caller = True, self.sender(request)

    def sender(self, request: Request) -> RealCaller | None:
        if request.verb in model.ASKING:
            queue = self.queues.by_entry[request.token]
            first = queue.first()
            assert first is not None, "an ENTER that no waiter sends"
            return self.named(first.name)
        if request.verb in ("SET", "EXTEND"):
            assert len(self.callers) == 1, "a caller sends a request that should have found a local queue"
            return self.callers[0] if self.callers[0].phase == "waits" else None
        return None

    def named(self, name: object) -> RealCaller:
        return next(caller for caller in self.callers if caller.name is name)

    # callers

    def add(self, *, strict: bool, fenced: bool) -> None:
        caller = self.caller(fenced=fenced)
        caller.lock = self.client.lock(caller.name, MS / 1000, sleep=LONG, fence=fenced, fair=strict)
        self.callers.append(caller)

    def begin(self) -> None:
        self.begun = True
        if len(self.callers) > 1:
            self.queues.by_key[KEY] = LocalQueue(self.queues, KEY, None)
        for caller in list(self.callers):
            self.start(caller)
            self.run()

    def another(self, *, fenced: bool) -> None:
        self.add(strict=False, fenced=fenced)
        self.start(self.callers[-1])

    def release(self, caller: RealCaller, *, batch: bool = False, late: bool = False) -> bool:
        before = self.queues.stats.local_handovers
        caller.phase, caller.batch = "releases", batch
        if late:
            self.clock.go(2 * LOCAL_SECONDS)
        self.order_release(caller)
        self.run()
        handed_over = self.queues.stats.local_handovers > before
        assert not (handed_over and late), "a local handover after LOCAL_SECONDS"
        return handed_over

    def give_up(self, caller: RealCaller) -> None:
        for request in [*self.requests(), *(each for line in self.lines for each, _ in line.arrived if each)]:
            if request.caller is caller:
                request.caller = None
                request.spent |= request.verb == "EXTEND"  # its undo is what the model knows
        caller.phase = "gone"
        self.cancel(caller)

    def acquired(self, caller: RealCaller, lease: Any) -> None:
        """Called by a caller as its `acquire` returns."""
        assert (lease.fence is not None) is caller.fenced, "a lease has a fence if and only if the caller wants one"
        caller.lease, caller.phase = lease, "holds"

    # faults

    def expire(self, held: bytes) -> None:
        for lease in (*map(self.lease, self.holders()), *map(self.handed, self.handed_over())):
            if not commands.token_matches(held, lease._raw_token):
                continue
            lease._deadline = self.clock()
            lease._confirmation = None  # a confirmation that is still under way comes too late
        self.expire_moment(held)
        for request, reply in self.incoming:
            if request is not None and reply[0][0] == 1 and commands.token_matches(held, request.token):
                self.clock.time = request.end

    def end(self, sent: tuple[Command, ...], kill: Callable[[int], object]) -> None:
        pending = [list(line.requests) for line in self.lines]
        for request in [self.flight(command) for command in sent]:
            self.serve(request)
        for line, requests in zip(self.lines, pending, strict=True):
            line.requests = requests  # the replies are lost
            kill(line.id)
            line.close()

    def cut(self) -> None:
        lines, self.lines = self.lines, []
        self.break_lines(lines)

    def break_lines(self, lines: list[Line]) -> None:
        """The client learns that these connections have ended."""
        raise NotImplementedError


def named(calls: list[Call]) -> tuple[str, bytes]:
    """The model's name of a request, and its token or queue entry."""
    call, *more = calls
    if more:
        assert commands.HAND_OVER_LUA.sha in [each[1] for each in calls], calls
        return "UNDO", call[-1]
    if call[0] == b"SET":
        return "EXTEND" if b"IFEQ" in call else "SET", call[2]
    if call[0] in (b"DELIFEQ", b"DELEX"):
        return "DEL", call[-1]
    assert call[0] == b"EVALSHA", call
    at = {
        commands.ENTER_LUA.sha: (model.ASKING[call[-1] != b"1"], -6),
        commands.FENCED_LUA.sha: ("SET", -3),
        commands.ACQUIRE_LUA.sha: ("SET", -2),
        commands.EXTEND_LUA.sha: ("EXTEND", -2),
        commands.RELEASE_LUA.sha: ("DEL", -1),
        commands.RELEASE_MANY_LUA.sha: ("BATCH", -1),
        commands.HAND_OVER_LUA.sha: ("REL", -1),
        commands.LEAVE_LUA.sha: ("LEAVE", -2),
    }
    verb, index = at[call[1]]
    return verb, call[index]


def without_undo(event: Event, before: model.State, after: model.State) -> model.State:
    """The model's state after an event, for a real client: it does not undo its own token, where it knows by the reply
    that the token was not granted."""
    what, *rest = event
    if what != "the first gives up" or before.clients[rest[0]].pc not in (model.ENTER, model.QUEUED):
        return after
    client = after.clients[rest[0]]
    unordered = tuple(
        command
        for command in client.unordered
        if command != ("UNDO", 0) or command in before.clients[rest[0]].unordered
    )
    return model.changed(after, rest[0], unordered=unordered)
