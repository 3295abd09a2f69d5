"""How a lease is released: to the next waiter of this client, to one of another client, or to nobody.

Never here: sockets, asyncio, threads, sleep.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fastlock import _errors as errors
from fastlock._protocol import commands
from fastlock._protocol.commands import Opcode
from fastlock._protocol.handshake import Purpose, Session
from fastlock._protocol.lease import ENDED, Lease
from fastlock._protocol.local_queue import LocalQueues, ReleaseRoute
from fastlock._protocol.retry import RetryState, execute, resolve, run_script, warn_refused, with_undo
from fastlock._protocol.steps import Answer, Clock, Command, ConnectionLost, Operation, RawCommands, Steps
from fastlock._protocol.undo import Undo


class PlainRelease(Command):
    """Request: release a lease by a compare-and-delete, as nobody waits, as far as is known."""

    allowed_after_close = True

    def __init__(self, lease: Lease) -> None:
        super().__init__(Opcode.RELEASE, lease._key, lease._raw_token)
        self.lease = lease

    def undo(self) -> Undo:
        return undo_of(self.lease, self.sent, self.stale)


class HandOver(RawCommands):
    """Request: release a lease by a script, which grants the name to the client that waits longest."""

    allowed_after_close = True

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.token = lease._raw_token

    @property
    def calls(self) -> Sequence[commands.RawCommand]:  # type: ignore[override]  # few need it
        return [commands.hand_over(self.lease._key, self.token)]

    def filled(self, make: Callable[..., Any]) -> tuple[Any, bytes, int] | None:
        if not commands.is_shared(self.token):
            return None
        return commands.release_template(make, self.lease._key, commands.mode_of(self.token)), self.token, 0

    def undo(self) -> Undo:
        return undo_of(self.lease, self.sent, self.stale)


class Release(Operation[bool]):
    """Release a lease. The outcome is whether the lock was the caller's.

    It stays the caller's until the server replied: a release that raised can be repeated. A key that is gone after a
    lost reply counts as deleted by the lost command, if the lease had not ended before that was sent.
    """

    request: PlainRelease | HandOver
    purpose = Purpose("hand a lock over to the next who waits", (commands.HAND_OVER_LUA,))

    def __init__(self, lease: Lease, counted: bool = False) -> None:
        """counted: it counts among the lease's releases already, as it was begun before."""
        self.lease = lease
        lease._releasing = True
        if not counted:
            lease._releases += 1
        self.counts = True  # among these
        scripted = lease._contended or commands.is_shared(lease._raw_token)
        self.request = HandOver(lease) if scripted else PlainRelease(lease)

    def undo(self) -> Undo:
        """What carries the release out for a caller that is gone."""
        return self.request.undo()

    def uncount(self) -> None:
        """Note that it is none that may have released the lease, as it failed."""
        if self.counts:
            self.counts = False
            self.lease._releases -= self.lease._releases > 0

    def continue_from(self, answer: object, clock: Clock) -> Steps[bool]:
        """Go on from the first answer to the outcome."""
        lease = self.lease
        retry = RetryState(clock)
        released = yield from with_undo(
            self._ended(answer, retry),
            lambda: self._failed(retry),
            lambda: self._abandoned(retry),
        )
        self._undo_if_unknown(retry)
        return released or lease._release_unknown

    def executed(self, retry: RetryState) -> Steps[bool]:
        """Send the release, and resolve its answer."""
        return (yield from self._ended((yield self.request), retry))

    def local(self, queues: LocalQueues, now: float) -> Answer | None:
        """HANDED_OVER, if another waiter of this client has the lease now; ALREADY_RELEASED; or None: the server is to
        release it, by the hand-over script if other clients wait."""
        route = queues.release(self.lease, now)
        if route == ReleaseRoute.LOCAL:
            return Answer.HANDED_OVER
        if route == ReleaseRoute.NOT_HELD:
            return Answer.ALREADY_RELEASED
        if route == ReleaseRoute.SCRIPT:
            self.hand_over()
        return None

    def abandon(self, queues: LocalQueues, clock: Clock) -> list[Undo]:
        """End the release of a caller that was interrupted, as `Acquire.abandon` does. The release is carried out, even
        if it had not begun: a caller that leaves a `with` does not try again."""
        queues.release(self.lease, clock())
        if not self.request.sent:
            self.uncount()
            self.request.sent = 0.0 if self.lease._deadline == ENDED else clock()
        return [self.undo()]

    def hand_over(self) -> None:
        """Release by the hand-over script from now on."""
        if type(self.request) is PlainRelease:
            deleted, self.request = self.request, HandOver(self.lease)
            self.request.stale, self.request.sent = deleted.stale, deleted.sent
            self.request.connection = deleted.connection

    def _ended(self, answer: object, retry: RetryState) -> Steps[bool]:
        """From the first answer to whether the server released the lock, or the local queue handed it over."""
        if answer is Answer.HANDED_OVER or answer is Answer.ALREADY_RELEASED:
            return answer is Answer.HANDED_OVER
        self._note_if_lost(answer)
        if type(self.request) is PlainRelease:
            deleted = yield from resolve(self.request, answer, retry)
            if deleted or not commands.can_be_contended(self.lease._raw_token):
                return bool(deleted)
            self.hand_over()  # the token is contended, as somebody waits, or the lock is not the caller's
            answer = yield self.request
            self._note_if_lost(answer)
        try:
            return bool((yield from run_script(self.request, answer, is_int, retry)))
        except errors.ResponseError as error:
            if not errors.is_forbidden(error) or commands.is_shared(self.lease._raw_token):
                raise
            released = yield from self._alone(retry)
            if released:  # the waiters were not told, and find it free when they recheck
                warn_refused(self.request, self.purpose, error)
            return released

    def _note_if_lost(self, answer: object) -> None:
        """If the answer was lost, note that at once: another release of the lease may find this one's work."""
        if isinstance(answer, ConnectionLost) and answer.sent:
            self.lease._note_unknown_release(self.request.sent)

    def _alone(self, retry: RetryState) -> Steps[bool]:
        """Release for a user that may not run the hand-over script: delete the key, by its token as it is, plain or
        contended. The waiters find it free when they recheck."""
        key = self.lease._key
        for _ in range(2):  # a waiter can mark the token between the two commands, once
            read = Command(Opcode.GET, key)
            read.allowed_after_close = True
            held = yield from execute(read, retry)
            if not commands.token_matches(held, self.lease._raw_token):
                break
            delete = Command(Opcode.RELEASE, key, held)
            delete.allowed_after_close = True
            try:
                if (yield from execute(delete, retry)):
                    return True
            finally:
                self.request.stale += delete.stale  # to be ended before an undo is sent
        return False

    def _failed(self, retry: RetryState) -> Undo | None:
        """As `_undo_if_unknown`, for a release that raises."""
        undo = self._undo_if_unknown(retry)
        self.uncount()
        return undo

    def _abandoned(self, retry: RetryState) -> Undo:
        """As `_undo_if_unknown`, for a caller that is gone."""
        since = retry.unknown_since if retry.outcome_unknown else self.request.sent
        return undo_of(self.lease, since, self.request.stale)

    def _undo_if_unknown(self, retry: RetryState) -> Undo | None:
        """The undo of a release whose reply was lost, or None. It is noted that the lost command may have released."""
        if not retry.outcome_unknown:
            return None
        self.lease._note_unknown_release(retry.unknown_since)
        return Undo([self.lease._key], [self.lease._raw_token], self.request.stale)


def undo_of(lease: Lease, sent: float, stale: tuple[Session, ...]) -> Undo:
    """What carries out the release of a lease, which was sent then (0: was not sent), for a caller that is gone."""
    if lease._deadline == ENDED:  # another holds the name now, by the same token
        if sent:  # one that was posted meanwhile may find the name released by it
            lease._note_unknown_release(sent)
        return Undo([], [], stale)
    lease._note_unknown_release(sent)  # a repeated release may find the key deleted by this undo
    lease._releases = 0  # which the lease knows now: there is none to which a loss could be left
    return Undo([lease._key], [lease._raw_token], stale)


def is_int(reply: object) -> bool:
    return type(reply) is int
