"""How a name is acquired: which commands are sent, what a reply means, and how to wait.

Outcomes are never guessed. A command whose reply was lost is sent again with the same token: the server's reply then
says whether the lease is the caller's. A caller that gives up while the outcome is unknown leaves an `Undo`, which is
carried out behind whatever it undoes. Never here: sockets, asyncio, threads, sleep.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from fastlock import _errors as errors
from fastlock._protocol import commands
from fastlock._protocol.commands import Opcode
from fastlock._protocol.extension import set_expiry
from fastlock._protocol.handshake import Purpose
from fastlock._protocol.lease import Lease, new_token
from fastlock._protocol.local_queue import SHORTEST_SLEEP, LocalQueue, LocalQueues, ReleaseRoute
from fastlock._protocol.release import Release
from fastlock._protocol.retry import RetryState, execute, limited, resolve, run_script, warn_refused, with_undo
from fastlock._protocol.steps import (
    Answer,
    Clock,
    Command,
    Enqueue,
    Enter,
    Operation,
    QueueRequest,
    RawCommands,
    Sleep,
    Steps,
    Wait,
    lease_end,
)
from fastlock._protocol.undo import ScriptUndo, Undo
from fastlock._protocol.waiters import Waiter

LAST_TRY_SECONDS = 0.01  # seconds before the end of a blocking_timeout of the last try, so that it is of some use


class PlainAcquire(Command):
    """Request: acquire a name, if nobody holds it."""

    def acquires(self) -> Sequence[bytes]:
        return (self.key,)

    def undo(self) -> Undo:
        return Undo([self.key], [self.token], self.stale, self.connection)


class FencedAcquire(RawCommands):
    """Request: acquire a name together with a fence, if nobody holds it."""

    def __init__(self, key: bytes, token: bytes, ms: int) -> None:
        super().__init__([commands.acquire_fenced(key, token, ms)])
        self.key = key
        self.token = token

    def acquires(self) -> Sequence[bytes]:
        return (self.key,)

    def undo(self) -> Undo:
        return Undo([self.key], [self.token], self.stale, self.connection)


class Acquire(Operation[Lease | None]):
    """Acquire a name, waiting as long as the settings allow. It takes checked values only; `ms` 0 means a lease without
    end.

    The outcome is the Lease, or None: somebody else holds the name. Raises redis-py's exception of an error reply;
    ConnectionError or TimeoutError when the server stays away.
    """

    request: PlainAcquire | FencedAcquire
    purpose = Purpose("let a waiter take what it was handed", (commands.ENTER_LUA,))
    blocking = False
    polls = False  # whether it may not use the queue
    given = False  # whether the caller chose its token
    believes = False  # whether its waiter believes a message of its grant, and does not wait for the confirmation
    alone = False  # whether its waiter has an entry of its own on the server: for strict order, or with a given token
    sleep = 0.1  # seconds between two tries, where the holder's token cannot become a contended one
    outcome_unknown = False  # whether a try's reply was lost once: from then on its own token may turn up at any time
    polled = False  # whether it has waited without a queue
    late_grants = 0  # grants to it that ended before the reply came
    waiting: Waiter | None = None  # its waiter, once it has waited
    handed: Lease | None = None  # the lease that its waiter got
    entered: tuple[QueueRequest, object] | None = (
        None  # the fast path's last enter and its answer, if that is to be judged
    )

    def __init__(self, name: object, key: bytes, token: bytes, ms: int, fenced: bool = False) -> None:
        self.name = name
        self.key = key
        self.ms = ms
        self.fenced = fenced
        self.use_token(token)

    def use_token(self, token: bytes) -> None:
        """Acquire by this token from now on."""
        self.token = token
        if self.fenced:
            self.request = FencedAcquire(self.key, token, self.ms)
        else:
            self.request = PlainAcquire(self.opcode(), self.key, token, self.ms)

    def opcode(self) -> int:
        """The opcode of a try."""
        return Opcode.ACQUIRE if self.ms else Opcode.ACQUIRE_ENDLESS

    @property
    def until(self) -> float | None:
        """When the caller stops waiting; None: it has no deadline."""
        return self.request.until

    @until.setter
    def until(self, until: float | None) -> None:
        self.request.until = until

    def undo(self) -> Undo:
        """What undoes this acquire, whether or not it was granted."""
        return Undo([self.key], [self.token], self.request.stale)

    def continue_from(self, answer: object, clock: Clock) -> Steps[Lease | None]:
        """Go on from the first answer to the outcome. The answer may be a Waiter, which waits in the local queue."""
        tries = self._try_until_granted(answer, clock)
        lease = yield from with_undo(tries, lambda: self.undo() if self.outcome_unknown else None)
        if lease is None and self.outcome_unknown:
            yield self.undo()
        return lease

    def _try_until_granted(self, answer: object, clock: Clock) -> Steps[Lease | None]:
        """Try, and wait between tries, until a lease is granted or the time is over."""
        while True:
            waiter, lease = answer if isinstance(answer, Waiter) else None, None
            if waiter is None and answer is not Answer.WAIT_LOCALLY:
                lease = yield from self._outcome(answer, clock)
            if lease is not None:
                if lease.valid:
                    return lease
                # Granted, but the lease ended before the reply came: no success, and undone before the next try
                self.late_grants += 1
                yield from self._withdraw(clock)
            if not self.blocking or (waiter is None and self._late(clock)):
                return None
            if lease is None and not self.polls:
                lease = yield from self._queue(waiter, clock)
                if lease is not None or not self.polls:
                    return lease
            elif lease is None:
                yield from self._sleep_before_try(clock)
            answer = yield self.request

    def local(self, queues: LocalQueues, now: float) -> Answer | None:
        """WAIT_LOCALLY, where the local queue decides who is next, so that no try of its own is sent; else None."""
        if not self.blocking or self.polls:
            return None
        if queues.has_queue(self.key, now):
            return Answer.WAIT_LOCALLY
        joins = self.alone or self.key in queues.expected
        # Where there is no time to wait it asks all the same, once
        return Answer.WAIT_LOCALLY if joins and not self._is_late(now) else None

    def _queue(self, waiter: Waiter | None, clock: Clock) -> Steps[Lease | None]:
        """Wait: behind the other waiters of this client, and as the first of them in the server's queue."""
        self.waiting = waiter = waiter or self.waiter()
        last = None if self.until is None else self.until - LAST_TRY_SECONDS
        lease = None
        entered, self.entered = self.entered, None
        try:
            if waiter.queue is None:
                yield Enqueue(waiter)
            while True:
                queue = queue_of(waiter)
                if waiter.lease is None and queue.error is not None:
                    raise errors.fresh_copy(queue.error)
                if waiter.lease is None and queue.must_verify(waiter, clock()):
                    yield from self._verify_circulating(queue, clock)
                if entered is not None:
                    (request, answer), entered = entered, None
                    yield from self._enter(waiter, request, answer, clock)
                elif queue.granted and (believed := queue.believe(waiter, clock())) is not None:
                    yield believed._confirmation.undo()
                elif waiter.lease is None and queue.queues.may_enter_now(waiter, clock()):
                    yield from self._enter(waiter, self.enter_request(waiter), None, clock)
                if (expired := queue.queues.take_back_expired(waiter, clock())) is not None:
                    self.late_grants += 1
                    yield Undo([self.key], [expired._raw_token])
                    continue
                lease, waiter.lease = waiter.lease, None  # in one statement: no interrupt comes between
                if lease is not None:  # what `abandon` needs to undo it
                    self.token, self.handed = lease._raw_token, lease
                    queue.queues.handover_completed(waiter)
                if lease is not None or self.polls or self._late(clock):
                    break
                yield Wait(waiter, last)
        except GeneratorExit:  # nobody carries out these steps any more, so no undo can be sent
            self.leave(waiter, lease, clock)
            raise
        except BaseException:
            if (left := self.leave(waiter, lease, clock)) is not None:
                yield left
            raise
        if lease is None and (left := self.leave(waiter, None, clock)) is not None:
            yield left
        return lease

    def abandon(self, queues: LocalQueues, clock: Clock) -> list[Undo]:
        """End the acquire of a caller that was interrupted. Returns the undos to send; called again, the same ones."""
        left = None if self.waiting is None else self.leave(self.waiting, None, clock)
        undos = [] if left is None else [left]
        done = (ReleaseRoute.LOCAL, ReleaseRoute.NOT_HELD)
        passed = self.handed is not None and queues.release(self.handed, clock()) in done
        if not passed and (self.request.sent or self.handed is not None or self.outcome_unknown):
            undos.append(Undo([self.key], [self.token], self.request.stale, self.request.connection))
        return undos

    def _verify_circulating(self, queue: LocalQueue, clock: Clock) -> Steps[None]:
        """Ask the server whether the circulating lease still holds the name."""
        held, request = queue.circulating, Command(Opcode.GET, self.key)
        request.until = self.until
        try:
            found = yield from execute(request, RetryState(clock))
        except errors.ResponseError as error:  # a user that may not GET waits for the end of the lease
            if not errors.is_own(error):
                raise
            return
        if held is None or found is Answer.DEADLINE_EXCEEDED:
            return
        with queue.queues.mutex:
            if not commands.token_matches(found, held._raw_token):
                queue.lease_gone(held)
                return
            last = queue.circulating  # it may have been handed over meanwhile
            if last is not None and last._raw_token == held._raw_token and request.sent < queue.keep_until:
                queue.confirmed_at = request.sent  # whoever waits elsewhere recalls it

    def waiter(self) -> Waiter:
        """A waiter for this acquire. It has an entry of its own, this acquire's token, where it is to be told from
        other waiters of the client, or where that token may turn up by itself."""
        own = self.token if self.alone or self.outcome_unknown else None
        waiter = Waiter(self.name, self.key, self.ms, self.fenced, own, self.sleep)
        waiter.believes = self.believes
        return waiter

    def _sleep_before_try(self, clock: Clock) -> Steps[None]:
        """Sleep until the holder's lease ends or `sleep` seconds have passed, whichever is first."""
        self.polled = True
        request = Command(Opcode.PTTL, self.key)
        request.until = self.until
        left = yield from execute(request, RetryState(clock))
        pause = self.sleep
        if left is not Answer.DEADLINE_EXCEEDED and left != -1:  # -1: the holder's lease is without end
            pause = min(pause, left / 1000)
        last = None if self.until is None else self.until - LAST_TRY_SECONDS
        yield Sleep(limited(max(pause, SHORTEST_SLEEP), last, clock), held=True)

    def enter_request(self, waiter: Waiter, joins: bool | None = None) -> QueueRequest:
        """The request of the first waiter of a queue, by its queue's entry. joins: whether it joins; None: unless that
        was done."""
        queue = queue_of(waiter)
        request = self._entering(queue, waiter, queue.is_to_join(waiter) if joins is None else joins)
        request.until = self.until
        return request

    def _entering(self, queue: LocalQueue, waiter: Waiter, joins: bool) -> QueueRequest:
        return Enter(queue, waiter, joins)

    def _enter(self, waiter: Waiter, request: RawCommands, answer: object, clock: Clock) -> Steps[None]:
        """Join or look by a queue's entry, or go on from the answer: the waiter gets the lease, or is to wait."""
        queue = queue_of(waiter)
        retry, answered = RetryState(clock), False
        try:
            reply = yield from run_script(
                request, (yield request) if answer is None else answer, commands.is_enter_reply, retry
            )
            answered = reply is not Answer.DEADLINE_EXCEEDED
        except errors.RedisError as error:
            own = errors.is_own(error)  # else a signal handler raised it, for this caller alone
            # An error at the end of this caller's own time means nothing to the other waiters
            if own and errors.is_unreachable(error) and (self.until is None or clock() < self.until):
                queue.queues.fail(queue, errors.fresh_copy(error))
            self.polls = own and errors.is_forbidden(error)
            if not self.polls:
                raise
            if queue.was_queued:  # its user was allowed to queue, but not to acquire what it was granted
                warn_refused(request, self.purpose, error)
            return
        finally:
            queue.connection, queue.stale = request.connection, request.stale
            # Should its connection break, it may be executed later: for the next waiter, who asked for another lease
            session = None if answered or request.connection is None else request.connection.session
            if session is not None and session not in request.stale:
                queue.stale = (*request.stale, session)
        if reply is Answer.DEADLINE_EXCEEDED:
            return
        late = queue.judge(waiter, reply, request.sent, clock())
        if late is None:
            queue.queues.stats.recovered += retry.outcome_unknown and waiter.lease is not None
            return
        self.late_grants += 1
        # Over the same connection, so that it is executed before the entry is sent again
        yield Undo([self.key], [late._raw_token], request.stale, request.connection)
        self.new_entry(queue)

    def new_entry(self, queue: LocalQueue) -> None:
        """Wait by another entry, at the end of the server's queue."""
        with queue.queues.mutex:
            queue.new_entry()

    def leave(self, waiter: Waiter, lease: Lease | None, clock: Clock) -> Undo | None:
        """Wait no longer: a lease that was handed over goes to the next waiter, or is undone. Returns what to send."""
        waiter.lease = waiter.lease or lease
        queue = waiter.queue
        if queue is None:
            return None
        handed, member = queue.queues.dequeue(waiter, clock())
        if handed is not None:
            return Undo([self.key], [handed._raw_token])
        if member is None:
            return None
        leave = commands.leave(self.key, member)
        return ScriptUndo(leave, queue.stale, queue.connection, matters=not self.polls)

    def _withdraw(self, clock: Clock) -> Steps[None]:
        """Release the name, whose grant came too late, and take another token."""
        release = Release(Lease(self.name, self.key, self.token, math.inf))  # by script if others wait by now
        undo = lambda: Undo([self.key], [self.token], release.request.stale)  # noqa: E731
        yield from with_undo(release.executed(RetryState(clock)), undo)
        # A command with the old token may still be on its way: a release, or one on a session that may not be ended
        if not self.given:
            used, self.outcome_unknown = self.request, False
            self.use_token(self.fresh_token())
            self.request.until, self.request.stale, self.request.sent = used.until, used.stale, used.sent

    def fresh_token(self) -> bytes:
        """Another token to acquire by."""
        return new_token()

    def _late(self, clock: Clock) -> bool:
        """Whether there is no time for another try."""
        return self._is_late(clock())

    def _is_late(self, now: float) -> bool:
        return self.until is not None and now >= self.until - LAST_TRY_SECONDS

    def granted(self, answer: object) -> Lease | None:
        """The lease that the answer to the first try grants; None: it says anything else."""
        if not self.fenced:
            return self.lease(self.request.sent, None) if answer is None else None
        if type(answer) is list and len(answer) == 1 and _is_fenced_reply(answer[0]) and answer[0][0] is None:
            return self.lease(self.request.sent, answer[0][1])
        return None

    def lease(self, sent: float, fence: int | None) -> Lease:
        lease = Lease(self.name, self.key, self.token, lease_end(sent, self.ms), fence)
        lease._since = sent
        return lease

    def _outcome(self, answer: object, clock: Clock) -> Steps[Lease | None]:
        """What the answer to one try means. Returns the Lease, also one that has ended by now, or None."""
        retry = RetryState(clock)
        try:
            if self.fenced:
                reply = yield from run_script(self.request, answer, _is_fenced_reply, retry)
            else:
                reply = yield from resolve(self.request, answer, retry)
        finally:
            self.outcome_unknown |= retry.outcome_unknown
        if reply is Answer.DEADLINE_EXCEEDED:
            return None
        holder, fence = reply if self.fenced else (reply, None)
        if holder is None:
            return self.lease(self.request.sent, fence)
        if not self.outcome_unknown or not commands.token_matches(holder, self.token):
            return None
        return (yield from self.confirm(fence, clock))

    def confirm(self, fence: int | None, clock: Clock) -> Steps[Lease | None]:
        """The lease of a name that holds our token since a command whose reply was lost. When that was executed is not
        known, so the lease is set anew and counts from then."""
        if not self.ms:
            return self.lease(self.request.sent, fence)
        sent = yield from set_expiry(self.key, self.token, self.ms, clock)
        return None if sent is None else self.lease(sent, fence)


def queue_of(waiter: Waiter) -> LocalQueue:
    """The queue of a waiter that was enqueued."""
    queue = waiter.queue
    assert queue is not None, "it was enqueued"
    return queue


def _is_fenced_reply(reply: object) -> bool:
    return type(reply) is list and len(reply) == 2 and type(reply[0]) in (type(None), bytes) and type(reply[1]) is int
