"""One connection through the fault proxy and the faults armed for it: notes and verdicts, no I/O.

Replies are matched to commands by order, so a fault can begin at the reply to one command of a pipeline. Pushes are
told apart from replies. Everything here runs under the proxy's lock.
"""

from __future__ import annotations

import math
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from support import resp
from support.faults import Effect, Fault, Hold, Op, Side

Trigger = Literal["frame", "command", "push"]


@dataclass(frozen=True)
class Held:
    """Operation: forward nothing more until `armed` is resumed or the connection ends."""

    armed: Armed


Step = Op | Held


class Armed:
    """A fault that was armed. `fired` counts how often it has begun its work and only grows."""

    def __init__(
        self, changed: threading.Condition, fault: Fault, trigger: Trigger, match: Callable[[bytes], bool]
    ) -> None:
        self.fault, self.trigger, self.match = fault, trigger, match
        self.left: float = math.inf if fault.standing else 1
        self.fired = 0
        self.resumed = False
        self.skip = 0
        self.passed: dict[
            ProxyConnection, tuple[float, float]
        ] = {}  # commands and replies that had passed before it was armed
        self._changed = changed

    def resume(self) -> None:
        """Forward what a stall holds; the fault is disarmed."""
        with self._changed:
            self.resumed, self.left = True, 0
            self._changed.notify_all()

    disarm = resume  # a fault that is already at work is left to end

    def wait(self, times: int = 1, timeout: float = 10.0) -> None:
        """Return when the fault has begun its work so many times; AssertionError after `timeout` seconds."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.fired >= times, timeout):
                raise AssertionError(f"{self!r} should have fired {times} time(s) within {timeout:g} s")

    def may_claim(self, connection: ProxyConnection, side: Side) -> bool:
        """Whether this connection is past the commands or replies that were to pass first."""
        commands, replies = self.passed.get(connection, (0, 0))
        if side == "request":
            return self.left > 0 and len(connection.commands) > commands + self.skip
        return self.left > 0 and connection.reply_frames >= replies + self.skip

    def __repr__(self) -> str:
        return f"<{self.fault.name} at {self.trigger}, fired {self.fired}, left {self.left}>"


class Run:
    """One armed fault at work on one connection: waits for its first frame, then gets every frame of its side."""

    def __init__(self, armed: Armed, begin: int) -> None:
        armed.left -= 1
        self.armed = armed
        self.begin = begin  # index of the command whose frame is the first one; -1: the fault has begun
        self.fresh = True
        self.over = False
        self._effect: Effect = armed.fault.effect()
        next(self._effect)

    def wants(self, side: Side, index: int, push: bool) -> bool:
        if side != self.armed.fault.side:
            return False
        if self.begin >= 0 and not push and index >= self.begin:
            self.begin = -1
        return self.begin < 0

    def apply(self, step: Step, push: bool) -> Sequence[Step]:
        if self.over or not isinstance(step, bytes):
            return [step]
        if self.fresh:
            self.fresh = False
            self.armed.fired += 1
        try:
            ops = self._effect.send((step, push))
        except StopIteration as stop:
            self.over = True
            ops = stop.value
        return [Held(self.armed) if isinstance(op, Hold) else op for op in ops]


class ProxyConnection:
    """One connection, and what went over it. The public attributes are for tests to read."""

    def __init__(self, number: int, client: socket.socket, server: socket.socket) -> None:
        self.number, self.client, self.server = number, client, server
        self.requests, self.replies = bytearray(), bytearray()  # bytes that were forwarded
        self.commands: list[list[bytes]] = []  # those that came from the client, forwarded or not
        self.reply_frames = 0  # those that came from the server, forwarded or not, pushes left out
        self.held: set[Side] = set()  # sides that a stall holds right now
        self.dead = False  # ended towards the client: by a fault, by the server, by cut()
        self.done = False  # ended by the server: everything that was forwarded to it has been executed
        self.runs: list[Run] = []
        self.pumps = 2
        self.locks = {"request": threading.Lock(), "reply": threading.Lock()}
        self.framers = {"request": resp.Framer(resp.command_end), "reply": resp.Framer(resp.frame_end)}
        self._awaited: deque[list[int]] = deque()  # [index of a command, number of frames that will still answer it]

    def verdict(self, side: Side, chunk: bytes, armed: Sequence[Armed]) -> list[Step]:
        """What to do with these bytes, after noting the frames that they complete."""
        steps: list[Step] = []
        framer = self.framers[side]
        for frame in framer.feed(chunk):
            push = side == "reply" and not framer.opaque and resp.is_push(frame)
            index = -1 if push or framer.opaque else self._index(side, frame)
            for each in armed:
                self._claim(each, side, index, frame, push)
            steps += self._run(side, index, frame, push)
            self.reply_frames += side == "reply" and not push
        return steps

    def _index(self, side: Side, frame: bytes) -> int:
        """The index of this command, or of the command that this reply answers (-1: none)."""
        return self._noted(frame) if side == "request" else self._answered(frame)

    def _noted(self, frame: bytes) -> int:
        self.commands.append(resp.words(frame))
        index = len(self.commands) - 1
        self._awaited.append([index, resp.replies_to(self.commands[index])])
        return index

    def _answered(self, frame: bytes) -> int:
        """The index of the command that this reply answers; -1: none."""
        if not self._awaited:
            return -1
        head = self._awaited[0]
        head[1] = 0 if frame.startswith(b"-") else head[1] - 1
        if head[1] == 0:
            self._awaited.popleft()
        return head[0]

    def _claim(self, armed: Armed, side: Side, index: int, frame: bytes, push: bool) -> None:
        fault = armed.fault
        at_side: Side = {"frame": fault.side, "command": "request", "push": "reply"}[armed.trigger]
        if side != at_side or not armed.may_claim(self, side) or not armed.match(frame):
            return
        if armed.trigger == "push" and not push:
            return
        if armed.trigger == "frame" and fault.unit not in (None, "push" if push else "reply"):
            return
        if (fault.standing or armed.trigger == "frame") and any(run.armed is armed for run in self.runs):
            return
        waits_for_reply = armed.trigger == "command" and fault.side == "reply" and fault.unit != "push"
        self.runs.append(Run(armed, index if waits_for_reply else -1))

    def _run(self, side: Side, index: int, frame: bytes, push: bool) -> list[Step]:
        steps: list[Step] = [frame]
        for run in self.runs:
            if run.wants(side, index, push):
                steps = [done for step in steps for done in run.apply(step, push)]
        self.runs = [run for run in self.runs if not run.over and not run.armed.resumed]
        return steps

    def __repr__(self) -> str:
        state = "done" if self.done else "dead" if self.dead else "open"
        last = [b" ".join(words)[:60] for words in self.commands[-3:]]
        counts = f"{len(self.commands)} commands, {self.reply_frames} replies"
        return f"<connection {self.number} {state}, {counts}, held {self.held or 'nothing'}, last {last}>"
