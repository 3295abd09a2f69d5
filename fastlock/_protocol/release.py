"""How a lease is released: to the next waiter of this client, to one elsewhere, or to nobody.

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
    """Let go of a lease. The outcome is whether the lock was the caller's.

    It stays the caller's until the server answered: what raises can be repeated. A key that is gone after a lost reply
    is taken for the work of that lost command, if the lease had not run out before it.
    """

    allowed_after_close = True
    task = "hand a lock over to the next who waits"  # for who reads of a refusal
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
        if self.lease._deadline == ENDED:  # it is another's now, by the same token
            return Undo([], [], self.stale)
        self.lease._note_unknown_release(self.sent)  # repeated, it may find what this undo has done
        return Undo([self.key], [self.token], self.stale)

    def rest(self, answer: Any, clock: Clock) -> Steps:
        """From the first answer to the outcome."""
        lease = self.lease
        retry = RetryState(clock)
        steps = self._ended(answer, retry)
        answer = yield from with_undo(
            steps, lambda: self._undo_if_unknown(retry), lambda: self._undo_if_unknown(retry) or self.undo()
        )
        self._undo_if_unknown(retry)
        return bool(answer) or lease._release_unknown

    def asked(self, retry: RetryState) -> Steps:
        """Ask, and settle the answer."""
        return (yield from self._ended((yield self), retry))

    def local(self, queues: LocalQueues, now: float) -> Any:
        """PASSED_ON, where another of this client has it now; else it goes to who waits elsewhere, if anybody does."""
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
        """As of an Acquire. It is carried out, also where it has not begun: who leaves a `with` does not try again."""
        queues.release(self.lease, clock())
        self.sent = self.sent or clock()
        return [self.undo()]

    def hand_over(self) -> None:
        """Ask for a release to the next who waits, if anybody does."""
        self.kind, self.opcode = CALLS, -1
        self.calls = [commands.hand_over(self.key, self.token)]

    def _ended(self, answer: Any, retry: RetryState) -> Steps:
        if answer is Answer.HANDED_OVER or answer is Answer.ALREADY_RELEASED:
            return answer is Answer.HANDED_OVER
        if self.kind == ONE:
            answer = yield from resolve(self, answer, retry)
            if answer or not commands.can_be_marked(self.token):
                return answer
            self.hand_over()  # somebody waits, or it is not the caller's
            answer = yield self
        try:
            return (yield from run_script(self, answer, is_int, retry))
        except errors.ResponseError as error:
            if not errors.is_forbidden(error):
                raise
            released = yield from self._alone(retry)
            if released:  # to those who wait for it, who come to look by themselves
                self.connection.undo_refused(self, error)
            return released

    def _alone(self, retry: RetryState) -> Steps:
        """By a user who may not hand over: in whichever form the token stands there; those who wait come to look."""
        for _ in range(2):  # it can be marked in between, once
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
                self.stale += ask.stale  # of what broke under it: to be ended before all is undone
        return 0

    def _undo_if_unknown(self, retry: RetryState) -> Undo | None:
        """What went out with its reply lost: it may have been the one that let go."""
        if not retry.outcome_unknown:
            return None
        self.lease._note_unknown_release(retry.unknown_since)
        return Undo([self.key], [self.token], self.stale)


def is_int(reply: Any) -> bool:
    return type(reply) is int
