"""A simulator of a server and of the connections to it, for the protocol: what can go wrong with a command.

Commands are written to sessions and may lie there unread, even after their session broke, until a CLIENT KILL that the
server has read drops them. Replies are lost or late, connections refused, callers cancelled at any step. Other clients
acquire names directly, or wait in the server's queue and mark the holder's token; messages may be lost. Seeded.
"""

from __future__ import annotations

import contextlib
import copy
import math
import random
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from fastlock import _errors as errors
from fastlock._protocol import commands, steps
from fastlock._protocol.commands import Opcode
from fastlock._protocol.handshake import Purpose, Session
from fastlock._protocol.local_queue import RECHECK_SECONDS, LocalQueues
from fastlock._protocol.steps import Answer
from fastlock._protocol.undo import Undo
from fastlock._transport.undo_delivery import UndoDelivery
from support.run_steps import Clock, Raise, error

# RIVAL: the token of another client, which waits in the server's queue
MINE, OTHER, RIVAL = (b"fl:" + who * 32 for who in (b"m", b"o", b"r"))
LOADING = error("LOADING Redis is loading the dataset in memory")
CROSS_SLOT = error("CROSSSLOT Keys in request don't hash to the same slot")
MOMENT = 1.0  # seconds in which a waiter has to confirm a grant
CAPABILITIES = (frozenset(), frozenset({commands.SET_NX_GET, commands.DELIFEQ, commands.SET_IFEQ}))


class Gone(BaseException):
    """The caller was cancelled."""


class AsyncConnection:
    """A connection, as an undo sees it."""

    def __init__(self, server: ServerSimulator, number: int) -> None:
        self.server, self.number = server, number
        self.session = Session({}, CAPABILITIES[server.native], b"", b"", "", serial=number)
        self.reply_timeout = 5.0
        self.loaded = server.loaded[number]
        self.knows_release = commands.HAND_OVER_LUA.load in self.loaded

    def post(self, delivery: UndoDelivery) -> None:
        self.server.post(delivery, self.number)

    def post_later(self, delivery: UndoDelivery, seconds: float) -> None:
        self.server.pending_undos.append(delivery)

    def warn_refused(self, purpose: Purpose, error: Exception) -> None:
        raise AssertionError(f"to {purpose.task} is allowed: {error}")


class ServerSimulator:
    """Keys, sessions and a clock; `run` carries out a protocol operation on it."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.clock = Clock()
        self.keys: dict[bytes, tuple[bytes, float]] = {}
        self.server_queues: dict[bytes, list[bytes]] = {}  # queue entries
        self.ours: set[bytes] = {MINE}  # tokens and queue entries
        self.queues = LocalQueues(contextlib.nullcontext())
        self.pushes: list[bytes] = []  # queue entries in messages that are under way
        self.flight: dict[int, list[Callable[[], Any]]] = {}  # what was sent on each session and is not read yet
        self.pending_undos: list[UndoDelivery] = []
        self.push_connection: int | None = None  # the session on which messages come
        self.unconfirmed: dict[int, list[UndoDelivery]] = {}  # the undos in `flight` whose reply has not come
        self.loaded: defaultdict[int, set[commands.RawCommand]] = defaultdict(set)  # as of a `Carrier`
        self.live: list[int] = []
        self.released_at: float | None = None  # when a command of this client deleted one of its keys
        self.outcome_unknown = False  # whether a command with a token was sent whose reply never came
        self.scripts = self.rng.random() < 0.7
        self.native = self.rng.random() < 0.5
        self.loading = 0  # commands that the server will refuse, as it loads its data
        self.cluster = False  # whether it is a node of a cluster, where each name is in another hash slot
        self.trouble = self.rng.choice((0.05, 0.3, 0.6))
        self.trace: list[str] = []
        self.watch: Callable[[], None] = lambda: None  # called after every event

    # the server

    def holder(self, key: bytes) -> bytes | None:
        token, end = self.keys.get(key, (None, math.inf))
        return token if self.clock() < end else None

    def end(self, key: bytes) -> float:
        return self.keys[key][1]

    def execute(self, opcode: int, key: bytes, token: bytes, ms: int) -> Any:
        if self.loads():
            return LOADING
        scripted = opcode in commands.SCRIPTED.values() or (not self.native and opcode in commands.SCRIPTED)
        if scripted and not self.scripts:
            return error("NOSCRIPT No matching script. Please use EVAL.")
        held, now = self.holder(key), self.clock()
        if opcode in (Opcode.ACQUIRE, Opcode.ACQUIRE_ENDLESS, Opcode.ACQUIRE_SCRIPT, Opcode.ACQUIRE_ENDLESS_SCRIPT):
            if held is None:
                self.keys[key] = token, now + ms / 1000 if ms else math.inf
            return held
        if opcode == Opcode.PTTL:
            return -2 if held is None else -1 if self.end(key) == math.inf else math.ceil((self.end(key) - now) * 1000)
        if opcode in (Opcode.RELEASE, Opcode.RELEASE_SCRIPT):
            return self.delete(key, token)
        assert opcode in (Opcode.EXTEND, Opcode.EXTEND_SCRIPT)
        native = opcode == Opcode.EXTEND and self.native
        if held is None or not (held == token if native else commands.token_matches(held, token)):
            return None if native else 0
        self.keys[key] = held, now + ms / 1000
        return b"OK" if native else 1

    def loads(self) -> bool:
        self.loading -= self.loading > 0
        return self.loading > 0

    def delete(self, key: bytes, token: bytes) -> int:
        if self.holder(key) != token:
            return 0
        del self.keys[key]
        self.released_at = self.clock()
        return 1

    def is_ours(self, key: bytes) -> bool:
        """Whether a token or queue entry of this client holds it."""
        return any(commands.token_matches(self.holder(key), token) for token in self.ours)

    def mark(self, key: bytes) -> bool:
        """Mark the holder's token as contended, if it can be marked."""
        token, end = self.keys[key]
        if commands.can_be_contended(token):
            self.keys[key] = commands.as_contended(token), end
        return self.keys[key][0][2:3] == b"+"

    def grant(self, key: bytes, me: bytes | None = None) -> bool:
        """Grant a free name to the first in the queue, unless that is `me`."""
        queue = self.server_queues.get(key, [])
        if not queue or queue[0] == me:
            return False
        entry = queue.pop(0)
        self.keys[key] = entry, self.clock() + (MOMENT if entry in self.ours else self.rng.choice((0.02, 0.2, 1)))
        if entry in self.ours:
            self.pushes.append(entry)
        return True

    def hand_over(self, key: bytes, token: bytes) -> int:
        if not commands.token_matches(self.holder(key), token):
            return 0
        if token in self.ours:
            self.released_at = self.clock()
        if not self.grant(key):
            del self.keys[key]
        return 1

    def leave(self, key: bytes, entry: bytes) -> int:
        self.server_queues[key] = [other for other in self.server_queues.get(key, []) if other != entry]
        return self.hand_over(key, entry)

    def enter(self, key: bytes, entry: bytes, ms: int, fenced: bool, joins: bool) -> list[int]:
        self.ours.add(entry)
        queue, held = self.server_queues.setdefault(key, []), self.holder(key)
        if not (joins or entry in queue or commands.token_matches(held, entry)):
            return [-1, 0, 0]
        if commands.token_matches(held, entry) or (held is None and not self.grant(key, entry)):
            queue[:] = [other for other in queue if other != entry]
            self.keys[key] = entry, self.clock() + ms / 1000 if ms else math.inf
            if queue:
                self.mark(key)
            return [1, len(queue), 7 if fenced else 0]
        if entry not in queue:
            queue.append(entry)
        left = -1 if self.end(key) == math.inf else math.ceil((self.end(key) - self.clock()) * 1000)
        return [0, left, int(self.mark(key)), queue.index(entry)]

    def stale(self, number: int) -> Session:
        """The session of this number, as a client knows it."""
        return AsyncConnection(self, number).session

    def end_session(self, stale: Session, current: int) -> None:
        """The server executes nothing more that another session sent, one that broke or still lives."""
        if stale.serial != current:
            self.flight[stale.serial] = []
            self.broke(stale.serial)

    def perform(self, request: steps.Request, current: int) -> Callable[[], Any]:
        """What the server will do when it reads a request's bytes, as they are now, on the current session."""
        calls = request.calls(CAPABILITIES[self.native]) if isinstance(request, steps.CommandBatch) else ()
        asked, stale = copy.copy(request), request.stale

        def read() -> Any:
            for session in stale:
                self.end_session(session, current)
            if isinstance(asked, steps.Command):
                return self.execute(asked.opcode, asked.key, asked.token, asked.ms)
            if isinstance(asked, steps.CommandBatch) and not calls:
                pairs = zip(asked.names, asked.tokens, strict=True)
                return [self.execute(asked.opcode, *pair, asked.ms) for pair in pairs]
            assert calls or isinstance(asked, steps.RawCommands)
            return [self.call(call) for call in calls or asked.calls]

        return read

    def call(self, call: tuple[bytes, ...]) -> Any:
        if self.loads():
            return LOADING
        if call[0] == b"SCRIPT":
            self.scripts = True
            return b"sha"
        if call[0] == b"PING":
            return b"PONG"
        if call[0] == b"DELIFEQ":
            return self.delete(call[1], call[2])
        if not self.scripts:
            return error("NOSCRIPT No matching script. Please use EVAL.")
        if call[1] == commands.ENTER_LUA.sha:
            keys = int(call[2])
            return self.enter(call[3], call[3 + keys], int(call[5 + keys]), keys == 3, call[-1] == b"1")
        if call[1] == commands.HAND_OVER_LUA.sha:
            return self.hand_over(call[3], call[5])
        if call[1] == commands.LEAVE_LUA.sha:
            return self.leave(call[3], call[5])
        if call[1] == commands.RELEASE_LUA.sha:
            return self.delete(call[3], call[4])
        if call[1] == commands.FENCED_LUA.sha:
            return [self.execute(Opcode.ACQUIRE, call[3], call[5], int(call[6])), 7]
        names, rest = call[3 : 3 + int(call[2])], call[3 + int(call[2]) :]
        if call[1] == commands.RELEASE_ALL_LUA.sha:
            names = names[: len(rest)]
        if self.cluster and len(names) > 1:
            return CROSS_SLOT
        return self.call_for_several(call[1], names, rest)

    def call_for_several(self, script: bytes, names: tuple[bytes, ...], rest: tuple[bytes, ...]) -> Any:
        """A script for several names; `rest`: its arguments behind them."""
        if script == commands.ACQUIRE_ALL_LUA.sha:
            return self.acquire_all(names, rest[: len(names)], int(rest[-2]), rest[-1] == b"1")
        if script == commands.RELEASE_ALL_LUA.sha:
            return [self.hand_over(*pair) for pair in zip(names, rest, strict=True)]
        if script == commands.RENEW_MANY_LUA.sha:
            triples = zip(names, rest[: len(names)], rest[len(names) :], strict=True)
            return [self.execute(Opcode.EXTEND_SCRIPT, name, token, int(ms)) for name, token, ms in triples]
        if script == commands.ACQUIRE_MANY_LUA.sha:
            return [self.execute(Opcode.ACQUIRE_SCRIPT, name, rest[0], int(rest[1])) for name in names]
        assert script == commands.RELEASE_MANY_LUA.sha
        return [self.delete(*pair) for pair in zip(names, rest * len(names) if len(rest) == 1 else rest, strict=True)]

    def acquire_all(self, names: tuple[bytes, ...], tokens: tuple[bytes, ...], ms: int, partly: bool) -> list[Any]:
        self.ours |= set(tokens)
        values, blocked = [], [0, None, 0]
        for name, token in zip(names, tokens, strict=True):
            held = self.holder(name)
            if held is not None and not commands.token_matches(held, token):
                end = self.end(name)
                blocked = [len(values) + 1, held, -1 if end == math.inf else math.ceil((end - self.clock()) * 1000)]
                break
            values.append(held or token)
        if not blocked[0] or partly:
            self.keys |= {
                name: (value, self.clock() + ms / 1000 if ms else math.inf)
                for name, value in zip(names, values, strict=False)
            }
        return blocked

    # connections

    def session(self) -> int:
        if not self.live or (len(self.live) < 3 and self.rng.random() < 0.3):
            self.live.append(len(self.flight))
            self.flight[self.live[-1]] = []
        return self.rng.choice(self.live)

    def listening(self) -> int:
        """The push session: commands that concern the queue go over it, in order."""
        if self.push_connection not in self.live:
            self.push_connection = self.session()
        return self.push_connection

    def flush_undos(self, session: int) -> None:
        while self.pending_undos and session in self.live:
            self.post(self.pending_undos.pop(0), session)

    def read(self, session: int) -> Any:
        """The server reads everything that was sent on this session. Returns the reply to the last command."""
        reply = None
        for _ in range(len(self.flight[session])):  # not what is sent during this loop
            if self.flight[session]:
                reply = self.flight[session].pop(0)()
            self.watch()
        return reply

    def broke(self, session: int) -> None:
        """A session broke: its undos are sent on the next session that is used, after a kill of this one; messages
        may be lost."""
        if session not in self.live:  # it broke already, while it was read
            return
        self.live.remove(session)
        for delivery in self.unconfirmed.pop(session, []):
            delivery.outlived_by(self.stale(session))
            self.pending_undos.append(delivery)
        self.pushes = [entry for entry in self.pushes if self.rng.random() < 0.3]
        self.queues.on_reconnect()

    def wander(self) -> None:
        """Time passes, the server reads bytes that were sent before, other clients acquire and release."""
        self.clock.go(self.rng.choice((0, 0, 0.001, 0.01, 0.04)))
        for told in list(self.flight.values()):
            if told and self.rng.random() < 0.15:
                told.pop(0)()
        if self.rng.random() < 0.02:
            self.scripts = False
        if self.rng.random() < 0.02:
            self.loading = self.rng.choice((1, 2, 9))
        self.watch()

    def others_come(self, keys: list[bytes]) -> None:
        for key in keys:
            if self.holder(key) is None and self.rng.random() < 0.3:
                self.keys[key] = OTHER, self.clock() + self.rng.choice((0.02, 0.2, 1))
            queue, held = self.server_queues.setdefault(key, []), self.holder(key)
            if held is None:
                continue
            if RIVAL not in queue and not commands.token_matches(held, RIVAL) and self.rng.random() < 0.2:
                queue.append(RIVAL)
                self.mark(key)
            for token in (OTHER, RIVAL):
                if commands.token_matches(held, token) and self.rng.random() < 0.1:
                    self.hand_over(key, token)

    def settle_down(self) -> None:
        """Everything that still lies unread arrives, in any order."""
        while (waiting := [session for session, told in self.flight.items() if told]) or self.pending_undos:
            self.flush_undos(self.session())
            if not waiting:
                continue
            self.flight[self.rng.choice(waiting)].pop(0)()
            self.watch()

    # the transport

    def post(self, delivery: UndoDelivery, session: int | None = None) -> None:
        """Send an undo that nobody waits for; over another session if this one has broken."""
        if session is not None and session not in self.live:
            delivery.outlived_by(self.stale(session))
            session = None
        session = self.session() if session is None else session
        sent = steps.RawCommands(delivery.calls(AsyncConnection(self, session)))
        delivery.written(sent.calls)
        sent.stale = delivery.stale
        read = self.perform(sent, session)
        self.unconfirmed.setdefault(session, []).append(delivery)

        def answered() -> None:
            replies = read()
            if session in self.live:
                self.unconfirmed[session].remove(delivery)
                delivery.answered(replies)

        self.flight[session].append(answered)
        self.trace.append(f"undo {sent.calls} over {session}, stale {sent.stale}")
        if self.rng.random() < self.trouble / 2:
            self.broke(session)

    def send(self, request: Any) -> Any:
        """The answer to a Request: a reply, ConnectionLost, DEADLINE_EXCEEDED, or that the caller is cancelled."""
        self.wander()
        fate = self.rng.random()
        if fate < self.trouble / 4:
            final = self.rng.random() < 0.1
            self.trace.append("refused")
            return steps.ConnectionLost(errors.as_own(errors.ConnectionError("refused")), 5.0, sent=False, final=final)
        session = self.listening() if request.needs_push else self.session()
        self.flush_undos(session)
        if session not in self.live:
            return steps.ConnectionLost(errors.as_own(errors.ConnectionError("broke")), 5.0, sent=False)
        request.sent, request.connection = self.clock(), AsyncConnection(self, session)
        self.flight[session].append(self.perform(request, session))
        self.trace.append(f"{vars(request)} over {session}")
        self.outcome_unknown |= fate < self.trouble * 0.75 and not isinstance(request, steps.RawCommands)
        if fate < self.trouble / 2:
            if self.rng.random() < 0.5:
                self.read(session)
            self.broke(session)
            self.clock.go(self.rng.choice((0, 0.01, 5)))
            final = self.rng.random() < 0.1
            return steps.ConnectionLost(
                errors.as_own(errors.ConnectionError("broke")), 5.0, sent=True, final=final, session=self.stale(session)
            )
        if fate < self.trouble * 0.75:
            late = request.until is not None and self.rng.random() < 0.5
            if late:
                self.clock.time = max(self.clock.time, request.until)
            if (undo := request.undo()) is not None:
                self.post(UndoDelivery(undo), session)
            return Answer.DEADLINE_EXCEEDED if late else Raise(Gone())
        self.clock.go(self.rng.choice((0, 0, 0.001, 0.06)))
        reply = self.read(session)
        self.clock.go(self.rng.choice((0, 0, 0.001, 0.06)))
        self.trace.append(f"  reply {reply!r} at {self.clock()}")
        return reply

    def wait(self, waiter: Any, until: float | None) -> Any:
        """Wait until the waiter is woken or its time has come, as other clients come and go."""
        at = min(
            waiter.queue.recheck_time(waiter), self.clock() + RECHECK_SECONDS, math.inf if until is None else until
        )
        while not waiter.woken and self.clock() < at:
            self.clock.time = min(at, self.clock() + self.rng.choice((0.001, 0.05, 0.5)))
            self.others_come([waiter.queue.key])
            while self.pushes:
                entry = self.pushes.pop(0)
                if self.rng.random() > self.trouble / 2:
                    self.queues.on_grant_message(entry)
        waiter.woken = False
        return Raise(Gone()) if self.rng.random() < self.trouble / 10 else None

    def answer(self, step: Any) -> Any:
        if isinstance(step, steps.Sleep):
            if self.rng.random() < self.trouble / 10:
                return Raise(Gone())
            self.clock.go(step.seconds)
            return None
        if isinstance(step, steps.Wait):
            return self.wait(step.waiter, step.until)
        if isinstance(step, steps.GetSession):
            return Session({}, CAPABILITIES[self.native], b"", b"", "")
        assert isinstance(step, steps.Request), f"{step}: this simulator sends no reply that violates the protocol"
        return self.send(step)

    def undo(self, undo: Undo) -> None:
        self.post(UndoDelivery(undo), None if undo.connection is None else undo.connection.session.serial)  # type: ignore[union-attr]

    def run(self, operation: Any, keys: list[bytes]) -> Any:
        """Carry out an operation as the transports do. Returns its outcome; raises its errors."""
        rest = operation
        if isinstance(operation, steps.Operation):
            rest = operation.steps(self.queues, self.clock, Answer.ASK_SERVER)
        driver, answer = steps.Driver(rest, self.queues.enqueue, self.undo), None
        for _ in range(300):
            if (step := driver.next(answer)) is None:
                return driver.outcome
            self.others_come(keys)
            answer = self.answer(step)
            if isinstance(answer, Raise):
                break
        else:
            answer = Raise(Gone())
        driver.fail(answer.error)
        raise AssertionError("the operation has not raised it again")
