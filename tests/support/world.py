"""A little model of a server and of the ways to it, for the law: what can go wrong between asking and knowing.

Commands are written to sessions and may lie there unread, even after their session broke, until a CLIENT KILL that the
server has read drops them. Replies are lost or late, connections refused, callers cancelled at any step. Seeded.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

from fastlock import _commands as say
from fastlock import _errors as errors
from fastlock import _law as law
from fastlock._session import Session
from support.play import Clock, Raise, error

MINE, OTHER = b"mine", b"other"
CAPABILITIES = (frozenset(), frozenset({say.SET_NX_GET, say.DELIFEQ, say.SET_IFEQ}))


class Gone(BaseException):
    """The caller is gone."""


class World:
    """Keys, sessions and a clock; `run` carries out an operation of the law in it."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.clock = Clock()
        self.keys: dict[bytes, tuple[bytes, float]] = {}
        self.flight: dict[int, list[Callable[[], Any]]] = {}  # what each session was told and has not read yet
        self.live: list[int] = []
        self.released_at: float | None = None  # when a command of ours deleted a key of ours
        self.doubted = False  # whether a command with a token was sent whose reply never came
        self.scripts = self.dice.random() < 0.7
        self.native = self.dice.random() < 0.5
        self.trouble = self.dice.choice((0.05, 0.3, 0.6))
        self.orderly = False  # whether what a caller left behind on a live session is read before anything else
        self.trace: list[str] = []
        self.watch: Callable[[], None] = lambda: None  # called whenever something happened

    # the server

    def holder(self, key: bytes) -> bytes | None:
        token, end = self.keys.get(key, (None, math.inf))
        return token if self.clock() < end else None

    def end(self, key: bytes) -> float:
        return self.keys[key][1]

    def execute(self, verb: int, key: bytes, token: bytes, ms: int) -> Any:
        scripted = verb in say.SCRIPTED.values() or (not self.native and verb in say.SCRIPTED)
        if scripted and not self.scripts:
            return error("NOSCRIPT No matching script. Please use EVAL.")
        held, now = self.holder(key), self.clock()
        if verb in (say.ACQUIRE, say.ACQUIRE_ENDLESS, say.ACQUIRE_SCRIPT, say.ACQUIRE_ENDLESS_SCRIPT):
            if held is None:
                self.keys[key] = token, now + ms / 1000 if ms else math.inf
            return held
        if verb == say.PTTL:
            return -2 if held is None else -1 if self.end(key) == math.inf else math.ceil((self.end(key) - now) * 1000)
        if verb in (say.RELEASE, say.RELEASE_SCRIPT):
            return self.delete(key, token)
        assert verb in (say.EXTEND, say.EXTEND_SCRIPT)
        if held != token:
            return None if verb == say.EXTEND and self.native else 0
        self.keys[key] = token, now + ms / 1000
        return b"OK" if verb == say.EXTEND and self.native else 1

    def delete(self, key: bytes, token: bytes) -> int:
        if self.holder(key) != token:
            return 0
        del self.keys[key]
        self.released_at = self.clock()
        return 1

    def perform(self, ask: Any) -> Callable[[], Any]:
        """What the server will do when it reads this step's bytes, as they are now."""
        stale, kind, verb, ms = ask.stale, ask.kind, getattr(ask, "verb", -1), getattr(ask, "ms", 0)

        def read() -> Any:
            for session in stale:
                self.flight[session] = []
            if kind == law.ONE:
                return self.execute(verb, ask.key, ask.token, ms)
            if kind == law.MANY:
                return [self.execute(verb, *pair, ms) for pair in zip(ask.names, ask.tokens, strict=True)]
            if kind == law.UNDO:
                return [self.delete(*pair) for pair in zip(ask.names, ask.tokens, strict=True)]
            return [self.call(call) for call in ask.calls]

        return read

    def call(self, call: tuple[bytes, ...]) -> Any:
        if call[0] == b"SCRIPT":
            self.scripts = True
            return b"sha"
        if not self.scripts:
            return error("NOSCRIPT No matching script. Please use EVAL.")
        if call[1] == say.FENCED_LUA.sha:
            return [self.execute(say.ACQUIRE, call[3], call[5], int(call[6])), 7]
        assert call[1] == say.RELEASE_MANY_LUA.sha
        names, tokens = call[3 : 3 + int(call[2])], call[3 + int(call[2]) :]
        return [self.delete(*pair) for pair in zip(names, tokens, strict=True)]

    # the ways to it

    def session(self) -> int:
        if not self.live or (len(self.live) < 3 and self.dice.random() < 0.3):
            self.live.append(len(self.flight))
            self.flight[self.live[-1]] = []
        return self.dice.choice(self.live)

    def read(self, session: int) -> Any:
        """The server reads all that this session was told. The reply to the last of it."""
        reply = None
        while self.flight[session]:
            reply = self.flight[session].pop(0)()
            self.watch()
        return reply

    def wander(self) -> None:
        """Time goes by, old bytes arrive, others come and go."""
        self.clock.go(self.dice.choice((0, 0, 0.001, 0.01, 0.04)))
        for told in self.flight.values():
            if told and self.dice.random() < 0.15:
                told.pop(0)()
        if self.dice.random() < 0.02:
            self.scripts = False
        self.watch()

    def others_come(self, keys: list[bytes]) -> None:
        for key in keys:
            if self.holder(key) is None and self.dice.random() < 0.3:
                self.keys[key] = OTHER, self.clock() + self.dice.choice((0.02, 0.2, 1))

    def settle_down(self) -> None:
        """All that still lies anywhere arrives, in any order."""
        while waiting := [session for session, told in self.flight.items() if told]:
            self.flight[self.dice.choice(waiting)].pop(0)()
            self.watch()

    # the wire

    def post(self, undo: law.Undo, session: int | None = None) -> None:
        """Send an undo that nobody waits for; over another session, should this one break."""
        while True:
            session = self.session() if session is None else session
            self.flight[session].append(self.perform(undo))
            self.trace.append(f"undo over {session}, stale {undo.stale}")
            if self.dice.random() > self.trouble / 2:
                return
            self.live.remove(session)
            undo.stale, session = (*undo.stale, session), None

    def ask(self, ask: Any) -> Any:
        """The answer to an Ask: a reply, Lost, LATE, or that the caller is gone."""
        self.wander()
        fate = self.dice.random()
        if fate < self.trouble / 4:
            final = self.dice.random() < 0.1
            self.trace.append("refused")
            return law.Lost(errors.ConnectionError("refused"), 5.0, sent=False, final=final)
        session = self.session()
        ask.sent = self.clock()
        self.flight[session].append(self.perform(ask))
        self.trace.append(f"{vars(ask)} over {session}")
        self.doubted |= fate < self.trouble * 0.75 and ask.kind != law.CALLS
        if fate < self.trouble / 2:
            if self.dice.random() < 0.5:
                self.read(session)
            self.live.remove(session)
            self.clock.go(self.dice.choice((0, 0.01, 5)))
            final = self.dice.random() < 0.1
            return law.Lost(errors.ConnectionError("broke"), 5.0, sent=True, final=final, session=session)
        if fate < self.trouble * 0.75:
            late = ask.until is not None and self.dice.random() < 0.5
            if late:
                self.clock.time = max(self.clock.time, ask.until)
            if (undo := ask.undo()) is not None:
                self.post(undo, session)
            elif self.orderly:
                self.read(session)
            return law.LATE if late else Raise(Gone())
        self.clock.go(self.dice.choice((0, 0, 0.001, 0.06)))
        reply = self.read(session)
        self.clock.go(self.dice.choice((0, 0, 0.001, 0.06)))
        self.trace.append(f"  reply {reply!r} at {self.clock()}")
        return reply

    def answer(self, step: Any) -> Any:
        if isinstance(step, law.Sleep):
            if self.dice.random() < self.trouble / 10:
                return Raise(Gone())
            self.clock.go(step.seconds)
            return None
        if isinstance(step, law.Undo):
            return self.post(step)
        if isinstance(step, law.Capabilities):
            return Session({}, CAPABILITIES[self.native], b"", b"", "")
        assert isinstance(step, law.Ask), f"{step}: no reply of this world makes no sense"
        return self.ask(step)

    def run(self, operation: Any, keys: list[bytes]) -> Any:
        """Carry out an operation as the wires do. Its outcome; raises what it raises."""
        answer = None
        if isinstance(operation, law.Ask):
            answer = self.ask(operation)
            if isinstance(answer, Raise):
                raise answer.error
            operation, answer = operation.rest(answer, self.clock), None  # type: ignore[attr-defined]
        for _ in range(300):
            try:
                step = operation.send(answer)
            except StopIteration as end:
                return end.value
            self.others_come(keys)
            answer = self.answer(step)
            if isinstance(answer, Raise):
                break
        else:
            answer = Raise(Gone())
        undo = operation.throw(answer.error)  # raises it again, after what it leaves to be undone
        while True:
            self.answer(undo)
            undo = operation.send(None)
