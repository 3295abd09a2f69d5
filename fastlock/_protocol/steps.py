"""What an operation yields (its steps) and what it is sent (their answers).

An operation, such as an acquire, is a generator. It yields steps: a request to the server, a wait, a sleep, an undo.
A transport carries each step out, in its own way of waiting, and sends the answer: the server's reply (an error reply
is a value, too), a `ConnectionLost` where nobody knows what became of a request, or a member of `Answer`. The clock is
an argument. Never here: sockets, asyncio, threads, sleep.
"""

from __future__ import annotations

import enum
import math
import random
from collections.abc import Callable, Generator
from typing import Any

from fastlock import _errors as errors
from fastlock._protocol import commands
from fastlock._protocol.local_queue import LocalQueue, Waiter

Clock = Callable[[], float]


class Answer(enum.Enum):
    """Answers that are no reply of the server."""

    DEADLINE_EXCEEDED = enum.auto()  # the caller's time was over before the reply came
    WAIT_LOCALLY = enum.auto()  # others of this client wait for the name: wait behind them, without a command
    HANDED_OVER = enum.auto()  # the lease was handed over to the next waiter of this client, without a command
    ALREADY_RELEASED = enum.auto()  # the lease was released before
    RETRY_ELSEWHERE = enum.auto()  # the connection had ended while it was idle and nothing was sent: use another


BACKOFF = 0.01, 1.0  # seconds: the first pause before a new connection, and the longest
RELOADS = 10  # how often scripts are loaded for one command at most: somebody may flush them all the time

ONE, MANY, CALLS = range(3)  # how a request is written into the stream


class Command:
    """Step: one command of the command table. The transport notes when it was `sent`, and over which `connection`."""

    kind = ONE
    calls: list[tuple[bytes, ...]]  # of the kind CALLS
    until: float | None = None  # when the caller stops waiting; None: not before the transport's own timeout
    sent = 0.0  # time just before the latest send, by the protocol's clock
    connection: Any = None
    stale: tuple[Any, ...] = ()  # sessions that broke with it in flight: to be ended before it is sent again
    needs_push = False  # whether it has to go over the push connection
    # Whether a closed client sends it, too: the locks that it held when it was closed may be released
    allowed_after_close = False

    def __init__(self, opcode: int, key: bytes, token: bytes = b"", ms: int = 0) -> None:
        self.opcode = opcode
        self.key = key
        self.token = token
        self.ms = ms

    def undo(self) -> Undo | None:
        """What undoes this command for a caller that is gone, whether or not the server executed it; None: there is
        nothing to undo."""
        return None

    def end(self) -> float:
        """When the lease that this command asks for ends."""
        return self.sent + self.ms / 1000 if self.ms else math.inf


class CommandBatch(Command):
    """Step: one command of the command table for each name, in one flush; the answer is the list of replies."""

    kind = MANY

    def __init__(self, opcode: int, names: list[bytes], tokens: list[bytes], ms: int = 0) -> None:
        super().__init__(opcode, b"", b"", ms)
        self.names = names
        self.tokens = tokens

    def undo(self) -> Undo:
        return Undo(self.names, self.tokens, self.stale)


class RawCommands(Command):
    """Step: any commands, in one flush; the answer is the list of replies."""

    kind = CALLS

    def __init__(self, calls: list[tuple[bytes, ...]]) -> None:
        super().__init__(-1, b"")
        self.calls = calls


class Enter(RawCommands):
    """Request: enter the server's queue by a local queue's entry, for its first waiter, or be granted the name."""

    needs_push = True

    def __init__(self, queue: LocalQueue, waiter: Waiter) -> None:
        entry, channel = queue.entry, queue.queues.channel
        super().__init__([commands.enter(waiter.key, channel, waiter.fenced, entry, b"%d" % waiter.ms)])
        self.queue = queue
        self.waiter = waiter
        self.ms = waiter.ms
        self.stale = queue.stale


class GetSession:
    """Step: the session of a connection to the server; the answer is a Session, or `ConnectionLost`."""

    __slots__ = ("allowed_after_close",)
    until: float | None = None  # as of a Command

    def __init__(self, allowed_after_close: bool = False) -> None:
        self.allowed_after_close = allowed_after_close  # as of a Command


class ProtocolViolation:
    """Step: the reply to this command makes no sense: end the connection that it came from. The answer is
    `ConnectionLost`."""

    __slots__ = ("ask", "reply")

    def __init__(self, ask: Command, reply: Any) -> None:
        self.ask = ask
        self.reply = reply


class Enqueue:
    """Step: put the waiter at the end of this client's local queue for its name."""

    __slots__ = ("waiter",)

    def __init__(self, waiter: Waiter) -> None:
        self.waiter = waiter


class Wait:
    """Step: sleep until the waiter is woken, or it is time for it to recheck, or `until` has come."""

    __slots__ = ("until", "waiter")

    def __init__(self, waiter: Waiter, until: float | None) -> None:
        self.waiter = waiter
        self.until = until


class Sleep:
    """Step: sleep so many seconds. `held`: because somebody else holds the lock."""

    __slots__ = ("held", "seconds")

    def __init__(self, seconds: float, held: bool = False) -> None:
        self.seconds = seconds
        self.held = held


class Undo:
    """Step: release these names if their tokens still hold them; nobody waits for the reply. It is sent however late it
    gets: the server counts a lease from when it executes the acquire, which may be long after that was sent."""

    kind = CALLS
    again = False  # whether it is sent again: behind its scripts, which the server may have forgotten
    matters = True  # whether anybody is worse off if it is refused
    refusals = 0
    task = "forget a caller that is gone"  # for the warning of a refusal
    scripts: tuple[commands.Script, ...] = (commands.HAND_OVER_LUA, commands.RELEASE_LUA)

    def __init__(self, names: list[bytes], tokens: list[bytes], stale: tuple[Any, ...] = ()) -> None:
        self.names = names
        self.tokens = tokens
        self.stale = stale  # as of a Command
        self.connection: Any = None  # the connection that it has to go over, as long as that is there
        self.reply: UndoReply | None = None  # the pending reply to its latest send

    @property
    def calls(self) -> list[tuple[bytes, ...]]:
        if not self.names:
            return [(b"PING",)]  # it is sent only to end the stale sessions
        return commands.undo_commands(self.names, self.tokens, self.connection.session.capabilities, self.again)

    def outlived_by(self, session: Any) -> None:
        """Note a session that broke with this undo in flight: it is to be ended before the undo is sent again."""
        if session not in self.stale:
            self.stale = (*self.stale, session)

    def set_result(self, replies: list[Any]) -> None:
        """Take the replies. The names that were answered by an error are sent again."""
        answers = commands.undo_outcomes(replies, len(self.names), self.again)
        left = [i for i, answer in enumerate(answers) if isinstance(answer, Exception)]
        if left:
            self.names, self.tokens = [self.names[i] for i in left], [self.tokens[i] for i in left]
            self._refused(answers[left[0]])

    def _refused(self, reply: Exception) -> None:
        self.stale = ()  # these sessions were ended before the undo was executed
        self.refusals += 1
        if errors.is_lasting(reply):
            self.connection.post_later(self, backoff(self.refusals))
        elif not self.again or (str(reply).startswith("NOSCRIPT") and self.refusals < RELOADS):
            self.again = True
            self.connection.post(self)
        elif self.matters:
            self.connection.undo_refused(self, errors.from_reply(reply))


class UndoReply:
    """The pending reply to an undo. Nobody waits for it, but a connection that breaks gives the undo back, to be sent
    over the next one. It is ignored once the undo was sent again, or is deferred."""

    __slots__ = ("undo",)

    def __init__(self, undo: Undo) -> None:
        self.undo = undo
        undo.reply = self

    def done(self) -> bool:
        return False

    def set_result(self, replies: list[Any]) -> None:
        if self.undo.reply is self:
            self.undo.set_result(replies)
        if self.undo.reply is self:  # else the two would keep each other alive, and the connection of the undo
            self.undo.reply = None

    def connection_broke(self, transport: Any, session: Any) -> None:
        """Defer the undo, as its connection broke."""
        if self.undo.reply is self:
            self.undo.outlived_by(session)
            transport.defer(self.undo)


class Dequeue(Undo):
    """Step: take an entry out of the server's queue. `matters`: as of an Undo; False for a user that may not queue."""

    scripts = (commands.LEAVE_LUA,)

    def __init__(self, call: tuple[bytes, ...], stale: tuple[Any, ...], connection: Any, matters: bool = True) -> None:
        super().__init__([], [], stale)
        self.call = call
        self.connection = connection
        self.matters = matters

    @property
    def calls(self) -> list[tuple[bytes, ...]]:
        return [commands.LEAVE_LUA.load, self.call] if self.again else [self.call]

    def set_result(self, replies: list[Any]) -> None:
        if isinstance(replies[-1], Exception):
            self._refused(replies[-1])


class ConnectionLost:
    """Answer: the connection broke. `sent`: the command may have been executed. `final`: do not try again. `own`: the
    reply to this very step, which made no sense, broke it."""

    def __init__(
        self,
        error: Exception,
        retry_for: float,
        *,
        sent: bool,
        final: bool = False,
        session: Any = None,
        own: bool = False,
    ) -> None:
        self.retry_for = retry_for  # seconds for which to retry over new connections
        self.error = error
        self.sent = sent
        self.final = final
        self.session = session  # the session that broke
        self.own = own


Steps = Generator[Any, Any, Any]


def backoff(failures: int) -> float:
    """Seconds before the next try after so many failures.

    Exponential backoff with full jitter: M. Brooker, "Exponential Backoff and Jitter", AWS, 2015.
    """
    first, longest = BACKOFF
    return random.uniform(0, min(longest, first * 2.0 ** min(failures, 20)))
