"""The contract between the protocol and a transport: steps, their answers, and operations.

An operation, such as an acquire, is a generator of steps: requests to the server, waits, sleeps, undos. A transport
carries each step out, in its own way of waiting, and sends the answer: the server's reply (an error reply is a value,
too), a `ConnectionLost` where nobody knows what became of a request, or a member of `Answer`. The clock is an argument.
Never here: sockets, asyncio, threads, sleep.
"""

from __future__ import annotations

import enum
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from typing import Any, Generic, Literal, Protocol, TypeAlias, TypeVar

from fastlock._errors import RedisError
from fastlock._limits import SCRIPT_NAMES
from fastlock._protocol import commands
from fastlock._protocol.handshake import Purpose, Session
from fastlock._protocol.local_queue import LocalQueue, LocalQueues
from fastlock._protocol.undo import UnconfirmedRelease, Undo
from fastlock._protocol.waiters import Waiter

Clock = Callable[[], float]
T = TypeVar("T")


class Answer(enum.Enum):
    """Answers that are no reply of the server."""

    DEADLINE_EXCEEDED = enum.auto()  # the caller's time was over before the reply came
    WAIT_LOCALLY = enum.auto()  # others of this client wait for the name: wait behind them, without a command
    HANDED_OVER = enum.auto()  # the lease was handed over to the next waiter of this client, without a command
    ALREADY_RELEASED = enum.auto()  # the lease was released before
    NOT_ASKED = enum.auto()  # nobody was asked yet: begin with the local queue
    ASK_SERVER = enum.auto()  # the local queue was asked already: send the operation's first request
    UNDECIDED = enum.auto()  # the first answer does not say all: `continue_from` finds the outcome
    RETRY_ELSEWHERE = enum.auto()  # the connection had ended while it was idle and nothing was sent: use another


BACKOFF = 0.01, 1.0  # seconds: the first pause before a new connection, and the longest


class Connection(Protocol):
    """What the protocol uses of the connection over which a request was sent."""

    @property
    def session(self) -> Session | None: ...

    @property
    def reply_timeout(self) -> float: ...

    def warn_refused(self, purpose: Purpose, error: RedisError) -> None:
        """Warn that the server refuses for good what a command is for."""


class Request:
    """Step: something to send, whose reply is the answer. The transport notes when it was `sent`, and over which
    `connection`. It may be sent again, changed where a server does not know its first form."""

    until: float | None = None  # when the caller stops waiting; None: not before the transport's own timeout
    sent = 0.0  # time just before the latest send, by the protocol's clock
    connection: Connection | None = None
    stale: tuple[Session, ...] = ()  # sessions that broke with it in flight: to be ended before it is sent again
    maybe_executed = False  # whether a reply to it was lost
    strict = False  # whether `until` also limits how long a connection may take to come up
    needs_push = False  # whether it has to go over the push connection
    # Whether a closed client sends it, too: the locks that it held when it was closed may be released
    allowed_after_close = False

    long_reply = False  # whether its reply may be longer than that of any command of a lock
    # Whether a release that nobody waits for, of a key that it acquires, has to be answered before, not only sent
    settles = False

    def acquires(self) -> Sequence[bytes]:
        """The keys that it acquires: it must not overtake a release of one that nobody waits for, unless it joins."""
        return ()

    def undo(self) -> Undo | None:
        """What undoes this request for a caller that is gone, whether or not the server executed it; None: there is
        nothing to undo."""
        return None


class Command(Request):
    """Request: one command of the command table."""

    def __init__(self, opcode: int, key: bytes, token: bytes = b"", ms: int = 0) -> None:
        self.opcode = opcode
        self.key = key
        self.token = token
        self.ms = ms


ODD = object()  # in place of a reply that is none


class CommandBatch(Request):
    """Request: one command of the command table for each name, in one flush; the answer is the list of replies. A
    server that has the command by a script only is sent scripts of `size` names, which cost it half as much: then
    `replies` makes that list of the answer."""

    size = SCRIPT_NAMES
    singly = False  # whether it is sent as commands all the same

    def __init__(self, opcode: int, names: list[bytes], tokens: list[bytes], ms: int = 0) -> None:
        self.opcode = opcode
        self.names = names
        self.tokens = tokens
        self.ms = ms
        self.in_scripts = False  # whether it was sent as scripts, at last

    def calls(self, capabilities: frozenset[str]) -> list[commands.RawCommand]:
        """The scripts for a server with these capabilities; empty: it has the command."""
        make = None if self.singly else self.script(capabilities)
        self.in_scripts = make is not None
        at = range(0, len(self.names) if make else 0, self.size)
        return [make(self.names[i : i + self.size], self.tokens[i : i + self.size]) for i in at] if make else []

    def script(self, capabilities: frozenset[str]) -> Callable[[list[bytes], list[bytes]], commands.RawCommand] | None:
        """What makes the call of a script for some of the names; None: the server has the command."""
        return commands.batch_script(self.opcode, self.ms, capabilities)

    def replies(self, answer: list[Any]) -> list[Any]:
        """A reply for each name. Where a script failed, or replied what makes no sense, that is ODD, or the error."""
        if not self.in_scripts:
            return answer
        replies: list[Any] = []
        for part in answer:
            size = min(self.size, len(self.names) - len(replies))
            whole = type(part) is list and len(part) == size
            replies += part if whole else [part if isinstance(part, Exception) else ODD] * size
        return replies + [ODD] * (len(self.names) - len(replies))

    def undo(self) -> Undo:
        return Undo(self.names, self.tokens, self.stale)


class RawCommands(Request):
    """Request: any commands, in one flush; the answer is the list of replies."""

    def __init__(self, calls: list[commands.RawCommand]) -> None:
        self.calls = calls

    def filled(self, make: Callable[..., Any]) -> tuple[Any, bytes, int] | None:
        """The template of its only command, which `make` compiles and is kept for the next time, with the token and the
        milliseconds that fill it; None: it has no template."""
        return None


class LongReply(RawCommands):
    """Request: commands whose replies may be long."""

    long_reply = True


class QueueRequest(RawCommands):
    """Request: join the server's queue by a local queue's entry, for its first waiter; once that may have been
    executed, look what became of the entry."""

    needs_push = True

    def __init__(self, queue: LocalQueue, waiter: Waiter, joins: bool) -> None:
        self.queue = queue
        self.waiter = waiter
        self.joins = joins
        self.entry, self.address = queue.entry, queue.address
        self.stale = queue.stale

    @property
    def calls(self) -> Sequence[commands.RawCommand]:  # type: ignore[override]  # it changes with what was sent
        return [self.call(self.joins and not self.maybe_executed)]

    def call(self, joins: bool) -> commands.RawCommand:
        """The call by which the entry joins, or looks."""
        raise NotImplementedError


class Enter(QueueRequest):
    """Request: as a QueueRequest, of a lock."""

    def call(self, joins: bool) -> commands.RawCommand:
        key, ms, fenced = self.waiter.key, b"%d" % self.waiter.ms, self.waiter.fenced
        call: commands.RawCommand = commands.enter(key, self.address, fenced, joins, self.entry, ms)
        return call

    def acquires(self) -> Sequence[bytes]:
        return (self.waiter.key,)


class GetSession:
    """Step: the session of a connection to the server; the answer is a Session, or `ConnectionLost`."""

    __slots__ = ()
    until: float | None = None  # as of a Request


class ProtocolViolation:
    """Step: the reply to this request makes no sense: end the connection that it came from. The answer is
    `ConnectionLost`."""

    __slots__ = ("reply", "request")

    def __init__(self, request: Request, reply: object) -> None:
        self.request = request
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
    """Step: sleep so many seconds. `held`: because somebody else holds the lock. `allowed_after_close`: as of a
    Request; such a sleep does not end with the client."""

    __slots__ = ("allowed_after_close", "held", "seconds")

    def __init__(self, seconds: float, held: bool = False, allowed_after_close: bool = False) -> None:
        self.seconds = seconds
        self.held = held
        self.allowed_after_close = allowed_after_close


class ConnectionLost:
    """Answer: the connection broke. `sent`: the request may have been executed. `final`: do not try again. `own`: the
    reply to this very step, which made no sense, broke it."""

    def __init__(
        self,
        error: Exception,
        retry_for: float,
        *,
        sent: bool,
        final: bool = False,
        session: Session | None = None,
        own: bool = False,
    ) -> None:
        self.retry_for = retry_for  # seconds for which to retry over new connections
        self.error = error
        self.sent = sent
        self.final = final
        self.session = session  # the session that broke
        self.own = own


Performed: TypeAlias = Request | GetSession | ProtocolViolation | Wait | Sleep  # steps that a transport carries out
Step: TypeAlias = Performed | Enqueue | Undo
Steps: TypeAlias = Generator[Step, Any, T]


class Abandonable(Protocol):
    """What a caller may leave behind where it is interrupted."""

    def abandon(self, queues: LocalQueues, clock: Clock) -> list[Undo]:
        """End the operation, for a caller that was interrupted. Returns the undos to send; called again, the same."""


class Operation(ABC, Generic[T]):
    """What a client does for a caller: an acquire, a release. T is its outcome."""

    request: Request  # what it sends first

    def local(self, queues: LocalQueues, now: float) -> Answer | None:
        """The answer of the local queue, where that decides, so that nothing is sent; else None."""
        return None

    def begin(self, queues: LocalQueues, now: float) -> Answer:
        """The answer of the local queue, or ASK_SERVER."""
        return self.local(queues, now) or Answer.ASK_SERVER

    def at_once(self, answer: object, now: float) -> T | Literal[Answer.UNDECIDED]:
        """The outcome, where the first answer of the server says all, as nearly always; else UNDECIDED. It spares the
        generators of `continue_from`, which would find the same."""
        return Answer.UNDECIDED

    def unwaited(
        self, clock: Clock, told: Callable[[UnconfirmedRelease, bool | None], object]
    ) -> UnconfirmedRelease | None:
        """What is to be sent where the caller does not wait for the server; None: it waits."""
        return None

    def posted(self) -> T:
        """The outcome, once what the caller does not wait for was sent."""
        raise NotImplementedError

    @abstractmethod
    def continue_from(self, answer: object, clock: Clock) -> Steps[T]:
        """Go on from the first answer to the outcome."""

    @abstractmethod
    def abandon(self, queues: LocalQueues, clock: Clock) -> list[Undo]:
        """End the operation, as `Abandonable.abandon` says."""

    def steps(self, queues: LocalQueues, clock: Clock, answer: object = Answer.NOT_ASKED) -> Steps[T]:
        """All steps from an answer on."""
        if answer is Answer.NOT_ASKED:
            answer = self.begin(queues, clock())
        if answer is Answer.ASK_SERVER:
            answer = yield self.request
        return (yield from self.continue_from(answer, clock))


class Driver(Generic[T]):
    """Runs an operation between two steps that a transport carries out; those that need no waiting it has done here."""

    __slots__ = ("enqueue", "outcome", "steps", "undo")
    outcome: T

    def __init__(self, steps: Steps[T], enqueue: Callable[[Waiter], object], undo: Callable[[Undo], object]) -> None:
        self.steps = steps
        self.enqueue = enqueue
        self.undo = undo

    def next(self, answer: object = None) -> Performed | None:
        """The next step, after the answer to the one before; None: the operation has ended, with its `outcome`. Raises
        the operation's error."""
        while True:
            try:
                step = self.steps.send(answer)
            except StopIteration as end:
                self.outcome = end.value
                return None
            answer = None
            if isinstance(step, Undo):
                self.undo(step)
            elif isinstance(step, Enqueue):
                self.enqueue(step.waiter)
            else:
                return step

    def fail(self, error: BaseException) -> None:
        """Raise in the operation what a step, or a signal handler between two steps, raised. The operation raises it
        again: at once if it has ended, else after the undos that it yields."""
        try:
            undo: Any = self.steps.throw(error)
            while True:
                try:
                    self.undo(undo)
                except BaseException:  # interrupted again
                    self.undo(undo)
                    raise
                undo = self.steps.send(None)
        finally:  # or its traceback and this frame would keep each other, and a socket, until the next collection
            del error


def backoff(failures: int) -> float:
    """Seconds before the next try after so many failures.

    Exponential backoff with full jitter: M. Brooker, "Exponential Backoff and Jitter", AWS, 2015.
    """
    first, longest = BACKOFF
    return random.uniform(0, min(longest, first * 2.0 ** min(failures, 20)))


def lease_end(sent: float, ms: int) -> float:
    """When a lease of so many milliseconds ends, if the request for it was sent then; 0 ms: never."""
    return sent + ms / 1000 if ms else math.inf
