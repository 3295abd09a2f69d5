"""Names that several may hold at once: how a read-write lock and a semaphore are acquired, downgraded and resized.

The server keeps the holders of such a name in a zset, by the end of their leases, and grants the name in order of
arrival to all whom it fits (`scripts/shared.lua`). A lease is never handed over within the client: each caller that
waits has an entry of its own in the server's queue. An entry joins once; from then on it only looks what became of it.
Never here: sockets, asyncio, threads, sleep.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from fastlock import _errors as errors
from fastlock._protocol import commands, describe
from fastlock._protocol.base_lock import LockAcquire, LockRelease
from fastlock._protocol.handshake import Purpose
from fastlock._protocol.lease import ENDED, Lease, new_token
from fastlock._protocol.local_queue import LocalQueue, LocalQueues
from fastlock._protocol.release import HandOver, is_int
from fastlock._protocol.retry import RetryState, run_script, with_undo
from fastlock._protocol.steps import Answer, Clock, QueueRequest, RawCommands, Steps
from fastlock._protocol.undo import ScriptUndo, Undo
from fastlock._protocol.waiters import Waiter

if TYPE_CHECKING:
    from fastlock._protocol.base_lock import BaseLock


class Try(RawCommands):
    """Request: acquire a name that several may hold, if that is possible at once."""

    def __init__(self, key: bytes, token: bytes, ms: int, fenced: bool) -> None:
        self.key = key
        self.token = token
        self.ms = ms
        self.fenced = fenced

    @property
    def calls(self) -> Sequence[commands.RawCommand]:  # type: ignore[override]  # few need it
        return [commands.join(self.key, self.token, b"", self.ms, self.fenced)]

    def filled(self, make: Callable[..., Any]) -> tuple[Any, bytes, int]:
        template = commands.try_template(make, self.key, commands.mode_of(self.token), self.fenced)
        return template, self.token, self.ms

    def acquires(self) -> Sequence[bytes]:
        return (self.key,)

    def undo(self) -> Undo:
        return Undo([self.key], [self.token], self.stale, self.connection)


class Ask(QueueRequest):
    """Request: as a QueueRequest, of a name that several may hold. first: whether to wait before all that are not so
    themselves."""

    def __init__(self, queue: LocalQueue, waiter: Waiter, joins: bool, first: bool) -> None:
        super().__init__(queue, waiter, joins)
        self.first = first

    def call(self, joins: bool) -> commands.RawCommand:
        entry = self.waiter.key, self.entry, self.address, self.waiter.ms, self.waiter.fenced
        return commands.join(*entry, self.first) if joins else commands.look(*entry)


class AcquireShared(LockAcquire):
    """Acquire a name that several may hold. first: whether to wait before all that are not so themselves."""

    request: Try  # type: ignore[assignment]
    purpose = Purpose("let a waiter take what it was granted", (commands.SHARED_JOIN_LUA, commands.SHARED_LOOK_LUA))

    def __init__(self, lock: BaseLock, token: bytes, required: bool, first: bool = False) -> None:
        self.first = first
        super().__init__(lock, token, required)
        self.alone, self.believes = True, False

    def use_token(self, token: bytes) -> None:
        self.token = token
        self.request = Try(self.key, token, self.ms, self.fenced)

    def fresh_token(self) -> bytes:
        return new_token() + self.token[commands.TOKEN_SIZE :]

    def local(self, queues: LocalQueues, now: float) -> None:
        """The server is asked first: there may be room beside those who hold the name."""

    def granted(self, answer: object) -> Lease | None:
        if type(answer) is not list or len(answer) != 1 or not commands.is_enter_reply(answer[0]) or answer[0][0] != 1:
            return None
        return self.lease(self.request.sent, answer[0][2] if self.fenced else None)

    def _outcome(self, answer: object, clock: Clock) -> Steps[Lease | None]:
        retry = RetryState(clock)
        try:
            reply = yield from run_script(self.request, answer, commands.is_enter_reply, retry)
        finally:
            self.outcome_unknown |= retry.outcome_unknown
        if reply is Answer.DEADLINE_EXCEEDED or reply[0] != 1:
            return None
        return self.lease(self.request.sent, reply[2] if self.fenced else None)

    def _entering(self, queue: LocalQueue, waiter: Waiter, joins: bool) -> Ask:
        return Ask(queue, waiter, joins, self.first)


class ReleaseShared(LockRelease):
    """A release of a name that several may hold: no other waiter of the client is handed the lease."""

    def local(self, queues: LocalQueues, now: float) -> Answer | None:
        return Answer.ALREADY_RELEASED if self.lease._deadline == ENDED else None


class MakeReader(HandOver):
    """Request: make a writer a reader."""

    def __init__(self, lease: Lease) -> None:
        super().__init__(lease)
        self._calls = [commands.downgrade(lease._key, lease._raw_token)]

    @property
    def calls(self) -> Sequence[commands.RawCommand]:  # type: ignore[override]
        return self._calls

    def filled(self, make: Callable[..., Any]) -> None:
        return None

    def undo(self) -> Undo:
        """What carries it out for a caller that is gone: who writes no more goes on to read."""
        become_reader(self.lease)
        return ScriptUndo(self.calls[0], self.stale, self.connection)


class Downgrade(ReleaseShared):
    """Release a read-write lock that is held for writing, and hold it for reading on. Raises LockNotOwnedError: the
    lock was not the caller's any more."""

    def __init__(self, lock: BaseLock, lease: Lease) -> None:
        releasing = lease._releasing
        super().__init__(lock, lease)
        self.uncount()
        lease._releasing = releasing  # it goes on, renewed if it was
        self.request = MakeReader(lease)

    def at_once(self, answer: object, now: float) -> Literal[Answer.UNDECIDED]:
        return Answer.UNDECIDED

    def continue_from(self, answer: object, clock: Clock) -> Steps[bool]:
        was_mine = 0
        if answer is not Answer.ALREADY_RELEASED:
            retry = RetryState(clock)
            steps = run_script(self.request, answer, is_int, retry)
            # Once it may have been executed, the caller writes no more, whatever became of it
            was_mine = yield from with_undo(steps, lambda: self.undo() if retry.outcome_unknown else None, self.undo)
        if was_mine:
            become_reader(self.lease)
            return True
        known = self.lease._deadline == ENDED or self.lease._loss_reported()
        if not known:
            self.lease._found_lost(clock())
        self.lock._drop_lease(self.lease)
        raise self.lock._lost("release", found=not known)

    def abandon(self, queues: LocalQueues, clock: Clock) -> list[Undo]:
        return [self.undo()]


def become_reader(lease: Lease) -> None:
    """Note that a writer's lease is a reader's now, whose acquires for reading are still to be released."""
    if lease._reads:
        lease._depth, lease._reads = lease._reads, 0
        lease._raw_token = lease._raw_token[:-1] + commands.READER


def resize(lock: BaseLock, size: int | None, clock: Clock) -> Steps[None]:
    """Change how many permits a semaphore has. Raises the redis-py exception of an error reply; LockKindError: the name
    is of another kind."""
    request = RawCommands([commands.resize(lock._key, size)])
    try:
        yield from run_script(request, (yield request), is_int, RetryState(clock))
    except errors.ResponseError as refusal:
        error = yield from describe.explain(refusal, lock, clock, "resize")
        raise error from None
