"""How a lease is released: to the next waiter of this client, to one of another client, or to nobody.

Never here: sockets, asyncio, threads, sleep.
"""

from __future__ import annotations

from typing import Any

from fastlock import _errors as errors
from fastlock._protocol import commands
from fastlock._protocol.commands import Opcode
from fastlock._protocol.lease import ENDED, Lease
from fastlock._protocol.local_queue import LocalQueues, ReleaseRoute
from fastlock._protocol.retry import RetryState, request, resolve, run_script, with_undo
from fastlock._protocol.steps import CALLS, ONE, Answer, Clock, Command, Steps, Undo


class Release(Command):
    """Release a lease. The outcome is whether the lock was the caller's.

    It stays the caller's until the server replied: a release that raised can be repeated. A key that is gone after a
    lost reply counts as deleted by the lost command, if the lease had not ended before that was sent.
    """

    allowed_after_close = True
    task = "hand a lock over to the next who waits"  # for the warning of a refusal
    scripts = (commands.HAND_OVER_LUA,)

    def __init__(self, lease: Lease) -> None:
        self.opcode = Opcode.RELEASE
        self.key = lease._key
        self.token = lease._raw_token
        self.ms = 0
        self.lease = lease
        lease._releasing = True
        if lease._contended:
            self.hand_over()

    def undo(self) -> Undo:
        if self.lease._deadline == ENDED:  # another holds the name now, by the same token
            return Undo([], [], self.stale)
        self.lease._note_unknown_release(self.sent)  # a repeated release may find the key deleted by this undo
        return Undo([self.key], [self.token], self.stale)

    def rest(self, answer: Any, clock: Clock) -> Steps:
        """Go on from the first answer to the outcome."""
        lease = self.lease
        retry = RetryState(clock)
        steps = self._ended(answer, retry)
        answer = yield from with_undo(
            steps, lambda: self._undo_if_unknown(retry), lambda: self._undo_if_unknown(retry) or self.undo()
        )
        self._undo_if_unknown(retry)
        return bool(answer) or lease._release_unknown

    def asked(self, retry: RetryState) -> Steps:
        """Send the release, and resolve its answer."""
        return (yield from self._ended((yield self), retry))

    def local(self, queues: LocalQueues, now: float) -> Any:
        """HANDED_OVER, if another waiter of this client has the lease now; ALREADY_RELEASED; or None: the server is to
        release it, by the hand-over script if other clients wait."""
        what = queues.release(self.lease, now)
        if what == ReleaseRoute.SCRIPT:
            self.hand_over()
        return (
            Answer.HANDED_OVER
            if what == ReleaseRoute.LOCAL
            else Answer.ALREADY_RELEASED
            if what == ReleaseRoute.NOT_HELD
            else None
        )

    def abandon(self, queues: LocalQueues, clock: Clock) -> list[Undo]:
        """End the release of a caller that was interrupted, as `Acquire.abandon` does. The release is carried out, even
        if it had not begun: a caller that leaves a `with` does not try again."""
        queues.release(self.lease, clock())
        self.sent = self.sent or clock()
        return [self.undo()]

    def hand_over(self) -> None:
        """Make this the hand-over script, which releases the lock to the next client that waits, if any does."""
        self.kind, self.opcode = CALLS, -1
        self.calls = [commands.hand_over(self.key, self.token)]

    def _ended(self, answer: Any, retry: RetryState) -> Steps:
        """From the first answer to whether the server released the lock, or the local queue handed it over."""
        if answer is Answer.HANDED_OVER or answer is Answer.ALREADY_RELEASED:
            return answer is Answer.HANDED_OVER
        if self.kind == ONE:
            answer = yield from resolve(self, answer, retry)
            if answer or not commands.can_be_marked(self.token):
                return answer
            self.hand_over()  # the token was marked as somebody waits, or the lock is not the caller's
            answer = yield self
        try:
            return (yield from run_script(self, answer, is_int, retry))
        except errors.ResponseError as error:
            if not errors.is_forbidden(error):
                raise
            released = yield from self._alone(retry)
            if released:  # the waiters were not told, and find it free when they recheck
                self.connection.undo_refused(self, error)
            return released

    def _alone(self, retry: RetryState) -> Steps:
        """Release for a user that may not run the hand-over script: delete the key, by its token as it is, plain or
        contended. The waiters find it free when they recheck."""
        for _ in range(2):  # a waiter can mark the token between the two commands, once
            look = Command(Opcode.GET, self.key)
            look.allowed_after_close = self.allowed_after_close
            held = yield from request(look, retry)
            if not commands.token_matches(held, self.token):
                break
            ask = Command(Opcode.RELEASE, self.key, held)
            ask.allowed_after_close = self.allowed_after_close
            try:
                if (yield from request(ask, retry)):
                    return 1
            finally:
                self.stale += ask.stale  # sessions that broke with it in flight: to be ended before an undo is sent
        return 0

    def _undo_if_unknown(self, retry: RetryState) -> Undo | None:
        """The undo of a release whose reply was lost, or None. It is noted that the lost command may have released."""
        if not retry.outcome_unknown:
            return None
        self.lease._note_unknown_release(retry.unknown_since)
        return Undo([self.key], [self.token], self.stale)


def is_int(reply: Any) -> bool:
    return type(reply) is int
