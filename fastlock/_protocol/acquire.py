"""How a name is acquired: which commands are sent, what a reply means, and how to wait.

Outcomes are never guessed. A command whose reply was lost is sent again with the same token: the server's reply then
says whether the lease is the caller's. A caller that gives up while the outcome is unknown leaves an `Undo`, which is
carried out behind whatever it undoes. Never here: sockets, asyncio, threads, sleep.
"""

from __future__ import annotations

import math
from typing import Any

from fastlock import _errors as errors
from fastlock._protocol import commands
from fastlock._protocol.commands import Opcode
from fastlock._protocol.extension import set_expiry
from fastlock._protocol.lease import Lease, new_token
from fastlock._protocol.local_queue import SHORTEST_SLEEP, LocalQueue, LocalQueues, ReleaseRoute, Waiter
from fastlock._protocol.release import Release
from fastlock._protocol.retry import RetryState, limited, request, resolve, run_script, with_undo
from fastlock._protocol.steps import (
    CALLS,
    Answer,
    Clock,
    Command,
    Dequeue,
    Enqueue,
    Enter,
    Sleep,
    Steps,
    Undo,
    Wait,
)

LAST_TRY_SECONDS = 0.01  # seconds before the end of a blocking_timeout of the last try, so that it is of some use


class Acquire(Command):
    """Acquire a name: a step, whose answer goes to `rest`. It waits as long as its settings allow. It takes checked
    values only; `ms` 0 means a lease without end.

    The outcome is the Lease, or None: somebody else holds the name. Raises redis-py's exception of an error reply;
    ConnectionError or TimeoutError when the server stays away.
    """

    blocking = False
    polls = False  # whether it may not use the queue
    given = False  # whether the caller chose its token
    task = "let a waiter take what it was handed"  # for the warning of a refusal
    scripts = (commands.ENTER_LUA,)
    alone = False  # whether its waiter has an entry of its own on the server: for strict order, or with a given token
    sleep = 0.1  # seconds between two tries, where the holder's token cannot be marked as contended
    outcome_unknown = False  # whether a try's reply was lost once: from then on its own token may turn up at any time
    polled = False  # whether it has waited without a queue
    late_grants = 0  # grants to it that ended before the reply came
    waiting: Waiter | None = None  # its waiter, once it has waited
    handed: Lease | None = None  # the lease that its waiter got
    seen: Any = None  # the fast path's last (request, answer), if the answer is to be judged here

    def __init__(self, name: object, key: bytes, token: bytes, ms: int, fenced: bool = False) -> None:
        self.name = name
        self.key = key
        self.token = token
        self.ms = ms
        self.opcode = Opcode.ACQUIRE if ms else Opcode.ACQUIRE_ENDLESS
        self.fenced = fenced
        if fenced:
            self.kind, self.opcode = CALLS, -1
            self.calls = [commands.acquire_fenced(key, token, ms)]

    def undo(self) -> Undo:
        return Undo([self.key], [self.token], self.stale)

    def rest(self, answer: Any, clock: Clock) -> Steps:
        """Go on from the first answer to the outcome."""
        tries = self._try_until_granted(answer, clock)
        lease = yield from with_undo(tries, lambda: self.undo() if self.outcome_unknown else None)
        if lease is None and self.outcome_unknown:
            yield self.undo()
        return lease

    def _try_until_granted(self, answer: Any, clock: Clock) -> Steps:
        """Try, and wait between tries, until a lease is granted or the time is over."""
        while True:
            waiter, lease = answer if type(answer) is Waiter else None, None
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
                yield from self._wait_turn(clock)
            answer = yield self

    def local(self, queues: LocalQueues, now: float) -> Any:
        """WAIT_LOCALLY, where the local queue decides who is next, so that no try of its own is sent; else None."""
        if not self.blocking or self.polls:
            return None
        return Answer.WAIT_LOCALLY if self.alone or queues.has_queue(self.key, now) else None

    def _queue(self, waiter: Waiter | None, clock: Clock) -> Steps:
        """Wait: behind the other waiters of this client, and as the first of them in the server's queue."""
        self.waiting = waiter = waiter or self.waiter()
        last = None if self.until is None else self.until - LAST_TRY_SECONDS
        lease = None
        seen, self.seen = self.seen, None
        try:
            if waiter.queue is None:
                yield Enqueue(waiter)
            queue: Any = waiter.queue
            while True:
                if waiter.lease is None and queue.error is not None:
                    raise errors.fresh_copy(queue.error)
                if waiter.lease is None and queue.must_verify(waiter, clock()):
                    yield from self._verify_circulating(queue, clock)
                if seen is not None:
                    (ask, answer), seen = seen, None
                    yield from self._enter(waiter, ask, answer, clock)
                elif waiter.lease is None and queue.queues.may_enter_now(waiter, clock()):
                    yield from self._enter(waiter, self.enter_request(waiter), None, clock)
                if waiter.entry is None and (over := queue.queues.take_back_expired(waiter, clock())) is not None:
                    self.late_grants += 1
                    queue = waiter.queue
                    yield Undo([self.key], [over._raw_token])
                    continue
                lease, waiter.lease = waiter.lease, None  # in one statement: no interrupt comes between
                if lease is not None:  # what `abandon` needs to undo it
                    self.token, self.sent, self.handed = lease._raw_token, lease._deadline - self.ms / 1000, lease
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
        if not passed and (self.sent or self.outcome_unknown):
            undos.append(self.undo())
            undos[-1].connection = self.connection
        return undos

    def _verify_circulating(self, queue: LocalQueue, clock: Clock) -> Steps:
        """Ask the server whether the circulating lease still holds the name."""
        held, ask = queue.circulating, Command(Opcode.GET, self.key)
        ask.until = self.until
        try:
            found = yield from request(ask, RetryState(clock))
        except errors.ResponseError as error:  # a user that may not GET waits for the end of the lease
            if not errors.is_own(error):
                raise
            return
        if (
            held is not None
            and found is not Answer.DEADLINE_EXCEEDED
            and not commands.token_matches(found, held._raw_token)
        ):
            with queue.queues.mutex:
                queue.lease_gone(held)

    def waiter(self) -> Waiter:
        """A waiter for this acquire. It has an entry of its own, this acquire's token, where it is to be told from
        other waiters of the client, or where that token may turn up by itself."""
        own = self.token if self.alone or self.outcome_unknown else None
        return Waiter(self.name, self.key, self.ms, self.fenced, own, self.sleep)

    def _wait_turn(self, clock: Clock) -> Steps:
        """Sleep until the holder's lease ends or `sleep` seconds have passed, whichever is first."""
        self.polled = True
        ask = Command(Opcode.PTTL, self.key)
        ask.until = self.until
        left = yield from request(ask, RetryState(clock))
        pause = self.sleep
        if left is not Answer.DEADLINE_EXCEEDED and left != -1:  # -1: the holder's lease is without end
            pause = min(pause, left / 1000)
        last = None if self.until is None else self.until - LAST_TRY_SECONDS
        yield Sleep(limited(max(pause, SHORTEST_SLEEP), last, clock), held=True)

    def enter_request(self, waiter: Waiter) -> Enter:
        """The request of the first waiter of a queue, by its queue's entry."""
        queue: Any = waiter.queue
        request = Enter(queue, waiter)
        request.until = self.until
        return request

    def _enter(self, waiter: Waiter, ask: Command, answer: Any, clock: Clock) -> Steps:
        """Send an enter of a queue's entry, or go on from its answer: the waiter gets the lease, or is to wait."""
        queue: Any = waiter.queue
        retry = RetryState(clock)
        try:
            reply = yield from run_script(ask, (yield ask) if answer is None else answer, is_enter_reply, retry)
        except errors.RedisError as error:
            own = errors.is_own(error)  # else a signal handler raised it, for this caller alone
            # An error at the end of this caller's own time means nothing to the other waiters
            if own and errors.is_unreachable(error) and (self.until is None or clock() < self.until):
                queue.queues.fail(queue, errors.fresh_copy(error))
            self.polls = own and errors.is_forbidden(error)
            if not self.polls:
                raise
            if queue.was_queued:  # its user was allowed to queue, but not to acquire what it was granted
                ask.connection.undo_refused(self, error)
            return
        finally:
            queue.connection, queue.stale = ask.connection, ask.stale
        if reply is Answer.DEADLINE_EXCEEDED:
            return
        late = queue.judge(waiter, reply, ask.sent, clock())
        if late is None:
            queue.queues.stats.recovered += retry.outcome_unknown and waiter.lease is not None
            return
        self.late_grants += 1
        undo = Undo([self.key], [late._raw_token], ask.stale)
        undo.connection = ask.connection  # the same one, so that it is executed before the entry is sent again
        yield undo
        with queue.queues.mutex:
            queue.new_entry()

    def leave(self, waiter: Waiter, lease: Lease | None, clock: Clock) -> Undo | None:
        """Wait no longer: a lease that was handed over goes to the next waiter, or is undone. Returns what to send."""
        waiter.lease = waiter.lease or lease
        queue = waiter.queue
        if queue is None:
            return None
        handed, entry = queue.queues.dequeue(waiter, clock())
        if handed is not None:
            return Undo([self.key], [handed._raw_token])
        if entry is None:
            return None
        return Dequeue(
            commands.leave(self.key, entry, queue.queues.channel), queue.stale, queue.connection, matters=not self.polls
        )

    def _withdraw(self, clock: Clock) -> Steps:
        """Release the name, whose grant came too late, and take another token."""
        release = Release(Lease(self.name, self.key, self.token, math.inf))  # by script if others wait by now
        undo = lambda: Undo([self.key], [self.token], release.stale)  # noqa: E731
        yield from with_undo(release.asked(RetryState(clock)), undo)
        # A command with the old token may still be on its way: a release, or one on a session that may not be ended
        if not self.given:
            self.token, self.outcome_unknown = new_token(), False
            if self.fenced:
                self.calls = [commands.acquire_fenced(self.key, self.token, self.ms)]

    def _late(self, clock: Clock) -> bool:
        """Whether there is no time for another try."""
        return self.until is not None and clock() >= self.until - LAST_TRY_SECONDS

    def _lease(self, sent: float, fence: int | None) -> Lease:
        return Lease(self.name, self.key, self.token, sent + self.ms / 1000 if self.ms else math.inf, fence)

    def _outcome(self, answer: Any, clock: Clock) -> Steps:
        """What the answer to one try means. Returns the Lease, also one that has ended by now, or None."""
        retry = RetryState(clock)
        try:
            if self.fenced:
                answer = yield from run_script(self, answer, _is_fenced_reply, retry)
            else:
                answer = yield from resolve(self, answer, retry)
        finally:
            self.outcome_unknown |= retry.outcome_unknown
        if answer is Answer.DEADLINE_EXCEEDED:
            return None
        holder, fence = answer if self.fenced else (answer, None)
        if holder is None:
            return self._lease(self.sent, fence)
        if not self.outcome_unknown or not commands.token_matches(holder, self.token):
            return None
        return (yield from self._confirm(fence, clock))

    def _confirm(self, fence: int | None, clock: Clock) -> Steps:
        """The lease of a name that holds our token since a command whose reply was lost. When that was executed is not
        known, so the lease is set anew and counts from then."""
        if not self.ms:
            return self._lease(self.sent, fence)
        sent = yield from set_expiry(self.key, self.token, self.ms, clock)
        return None if sent is None else self._lease(sent, fence)


def is_enter_reply(reply: Any) -> bool:
    if type(reply) is not list or len(reply) != 3:
        return False
    return type(reply[0]) is int and type(reply[1]) is int and type(reply[2]) is int


def _is_fenced_reply(reply: Any) -> bool:
    return type(reply) is list and len(reply) == 2 and type(reply[0]) in (type(None), bytes) and type(reply[1]) is int
