"""How many names are acquired, or many leases released, in one flush.

Never here: sockets, asyncio, threads, sleep.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from fastlock import _errors as errors
from fastlock._protocol import batch, commands, describe
from fastlock._protocol.acquire import Acquire
from fastlock._protocol.commands import Opcode
from fastlock._protocol.lease import ENDED, Lease
from fastlock._protocol.local_queue import LocalQueues, ReleaseRoute
from fastlock._protocol.losses import note_losses
from fastlock._protocol.release import Release, is_int
from fastlock._protocol.retry import RetryState, execute, resolve, with_undo
from fastlock._protocol.stats import Stats
from fastlock._protocol.steps import (
    Clock,
    CommandBatch,
    ConnectionLost,
    Operation,
    RawCommands,
    Request,
    Steps,
    lease_end,
)
from fastlock._protocol.undo import Undo


class PlainAcquires(CommandBatch):
    """Request: acquire each of several names, if nobody holds it."""

    settles = True

    def acquires(self) -> Sequence[bytes]:
        return self.names


class AcquireMany(Operation[list[Lease | None]]):
    """Acquire each name that is free, all in one flush with one token. The outcome is a list of Lease or None.

    An error reply for one name is raised, and the leases of the others are released.
    """

    def __init__(self, names: list[Any], keys: list[bytes], token: bytes, ms: int, stats: Stats) -> None:
        self.names = names
        self.keys = keys
        self.token = token
        self.ms = ms
        self.stats = stats
        opcode = Opcode.ACQUIRE if ms else Opcode.ACQUIRE_ENDLESS
        self.request: CommandBatch = PlainAcquires(opcode, keys, [token] * len(keys), ms)

    def continue_from(self, answer: object, clock: Clock) -> Steps[list[Lease | None]]:
        """Go on from the first answer to the outcome."""
        request = self.request
        leases = yield from with_undo(self._each(answer, clock), request.undo)
        if clock() >= lease_end(request.sent, self.ms):
            yield request.undo()
            return [None] * len(self.keys)
        return self.stats.acquired(leases)

    def abandon(self, queues: LocalQueues, clock: Clock) -> list[Undo]:
        """The undos of a batch whose caller was interrupted, as `Acquire.abandon` returns them."""
        request = self.request
        undo = Undo(request.names, request.tokens, request.stale, request.connection)
        return [undo] if request.sent else []

    def _each(self, answers: object, clock: Clock) -> Steps[list[Lease | None]]:
        """From the answers to leases. A name whose answer does not say all is asked for again, on its own."""
        request, retry = self.request, RetryState(clock)
        while (failure := _failure(request, answers)) is not None:
            answers = yield from resolve(request, failure, retry)
        assert type(answers) is list, "else it has failed"
        end, replies = lease_end(request.sent, self.ms), request.replies(answers)
        leases, odd = batch.granted(self.names, self.keys, self.token, request.sent, end, replies)
        if odd and request.in_scripts:  # a name fails the others of its script
            odd = yield from self._singly(leases, odd, clock)
        for i in odd:
            one = Acquire(self.names[i], self.keys[i], self.token, self.ms)
            try:
                leases[i] = yield from _again(one, clock)
            except errors.ResponseError as refusal:
                error = yield from describe.explain_name(refusal, self.names[i], self.keys[i], clock)
                if error is refusal:
                    raise
                raise error from None
            finally:
                request.stale += one.request.stale  # sessions to be ended before an undo is sent
        return leases

    def _singly(self, leases: list[Lease | None], odd: list[int], clock: Clock) -> Steps[list[int]]:
        """Ask for these names by a command each, in one flush. Returns those of which the answer does not say all."""
        request = PlainAcquires(self.request.opcode, [self.keys[i] for i in odd], [self.token] * len(odd), self.ms)
        request.singly = True
        try:
            answers = yield from resolve(request, (yield request), RetryState(clock))
        finally:
            self.request.stale += request.stale
        names, end = [self.names[i] for i in odd], lease_end(request.sent, self.ms)
        found, still = batch.granted(names, request.names, self.token, request.sent, end, answers)
        for i, lease in zip(odd, found, strict=True):
            leases[i] = lease
        return [odd[i] for i in still]


def _failure(request: CommandBatch, answers: object) -> object:
    """What is to be resolved before there is a reply for each name: what was answered instead, or that the server has
    forgotten a script; None: nothing."""
    if type(answers) is not list:
        return ("odd", answers) if answers is None else answers
    parts = answers if request.in_scripts else ()
    return next(filter(_forgotten, parts), None)


def _forgotten(reply: object) -> bool:
    """Whether the server has forgotten the script."""
    return isinstance(reply, Exception) and errors.text_of(reply).startswith("NOSCRIPT")


def _again(one: Acquire, clock: Clock) -> Steps[Lease | None]:
    """Acquire one name of a batch again, on its own. Returns the lease, or None: somebody else holds the name."""
    answer = yield from execute(one.request, RetryState(clock))
    if answer is None:
        return one.lease(one.request.sent, None)
    # Each batch has a fresh token, so a name that holds it is ours, whatever became of the replies
    if commands.token_matches(answer, one.token):
        return (yield from one.confirm(None, clock))
    return None


def release_many(
    leases: list[Lease],
    queues: LocalQueues,
    clock: Clock,
    released: list[Any] | None = None,
    granted_in_scripts_of: int = 0,
) -> Steps[list[Any]]:
    """Release several leases in one flush; those that others wait for, in a second one. Returns `released`, filled:
    whether each lease was the caller's; None where another thread released it meanwhile.

    granted_in_scripts_of: not 0, if those that others wait for are to be handed over in the first flush, too, by
    scripts of so many names. If it fails for some, a repeated call reports what the failed one had released.
    """
    released = [] if released is None else released
    reported, rest = batch.reported(leases)
    released += reported
    try:
        for i in rest if queues.by_key else ():
            released[i] = queues.release(leases[i], clock()) == ReleaseRoute.LOCAL
        # A lease that has ended by now was handed over, or another thread released it: its token may be the next
        # holder's already
        sent = batch.begin_releases(leases, rest)
        for i in set(rest).difference(sent):
            released[i] = released[i] or None
        if sent:
            yield from _release_leases(leases, sent, released, granted_in_scripts_of, clock, queues.stats)
    except BaseException:
        batch.unreported(leases, released)
        raise
    return released


class InterruptedRelease:
    """A `release_many` that was interrupted: the leases to release, and what was released, to be reported later."""

    def __init__(self, leases: Iterable[Lease | None], released: list[Any]) -> None:
        self.leases = leases
        self.released = released

    def abandon(self, queues: LocalQueues, clock: Clock) -> list[Undo]:
        """The undos of each lease that was not released yet, as `Release.abandon` returns them."""
        if not isinstance(self.leases, Collection):  # an iterator that was not read, or may fail again
            return []
        leases = list(self.leases)
        for lease, was_released in zip(leases, self.released, strict=False):  # none, if it had not begun
            lease._unreported = was_released
        mine = batch.owned(leases, [])
        left = [lease for lease in mine if lease._deadline != ENDED]
        return [undo for lease in left for undo in Release(lease).abandon(queues, clock)]


class ReleaseBatch(CommandBatch):
    """Request: release each of several names; granted: and grant it to whoever waits for it, by scripts of so many."""

    allowed_after_close = True

    def __init__(self, leases: list[Lease], granted_in_scripts_of: int) -> None:
        super().__init__(Opcode.RELEASE, *batch.keys_and_tokens(leases))
        self.granted = granted_in_scripts_of > 0
        self.size = granted_in_scripts_of or self.size

    def script(self, capabilities: frozenset[str]) -> Callable[[list[bytes], list[bytes]], commands.RawCommand] | None:
        return commands.release_all if self.granted else super().script(capabilities)


def _release_leases(
    given: list[Lease], at: list[int], released: list[Any], granted_in_scripts_of: int, clock: Clock, stats: Stats
) -> Steps[None]:
    """Release the leases at these indexes, and note in `released` which were the caller's."""
    request = ReleaseBatch([given[i] for i in at] if len(at) < len(given) else given, granted_in_scripts_of)
    replies = yield from _send_batch(request, given, at)
    # One of a script's names fails the others
    refused = [
        i for i, reply in zip(at, replies, strict=True) if isinstance(reply, Exception) and not _forgotten(reply)
    ]
    if request.in_scripts and not request.granted and refused:
        singly = ReleaseBatch([given[i] for i in refused], 0)
        singly.singly = True
        found = dict(zip(refused, (yield from _send_batch(singly, given, refused)), strict=True))
        replies = [found.get(i, reply) for i, reply in zip(at, replies, strict=True)]
    odd = batch.ended([given[i] for i in at] if len(at) < len(given) else given, replies, at, released)
    if odd:
        lost: list[Lease] = []
        try:
            yield from _hand_over([given[i] for i in odd], odd, released, lost, any(map(_forgotten, replies)), clock)
        finally:  # also where it fails for another one
            note_losses(lost, stats)


def _send_batch(request: ReleaseBatch, given: list[Lease], at: list[int]) -> Steps[list[Any]]:
    """Send the release of the leases at these indexes; returns a reply for each, None where it is not known."""
    answers = yield from _send_releases(request, [given[i] for i in at] if len(at) < len(given) else given)
    replies = request.replies(answers) if type(answers) is list else []
    return replies if len(replies) == len(at) else [None] * len(at)


def _send_releases(request: Request, leases: list[Lease]) -> Steps[Any]:
    """Send releases; returns the server's answers. If they are lost, each lease is noted as perhaps released: a
    repeated release may find its key gone."""
    answers: Any = None
    answered = False
    try:
        answers = yield request
        answered = True
    finally:
        broke = type(answers) is ConnectionLost
        sent = answers.sent if broke else request.sent > 0
        if sent and (broke or not answered):
            for lease in leases:
                lease._note_unknown_release(request.sent)
    return answers


def _hand_over(
    leases: list[Lease], at: list[int], released: list[Any], lost: list[Lease], forgotten: bool, clock: Clock
) -> Steps[None]:
    """Release by the hand-over script the leases of a batch that somebody waits for, or that are not the caller's any
    more, which the script tells apart: these are noted in `lost`. forgotten: by the server, so that the script is
    loaded first."""
    loads = commands.HAND_OVER_LUA.loads if forgotten else []
    request = RawCommands([*loads, *(commands.hand_over(lease._key, lease._raw_token) for lease in leases)])
    request.allowed_after_close = True
    answers = yield from _send_releases(request, leases)
    if type(answers) is list:
        answers = answers[len(loads) :]
    whole = type(answers) is list and len(answers) == len(leases)
    for lease, i, answer in zip(leases, at, answers if whole else [None] * len(leases), strict=True):
        if is_int(answer):
            released[i] = bool(answer) or lease._release_unknown
        else:  # the answer was lost, or is an error: a release of its own finds out the outcome
            again = Release(lease, True)
            again.counts = False  # the batch's count of it stays until that ends
            again.hand_over()
            released[i] = yield from again.continue_from((yield again.request), clock)
        # After the answers: another thread may have released it meanwhile, or is about to hear that it has
        if not released[i] and lease._leave_to_another():
            released[i] = None
            continue
        released[i] = released[i] or (None if lease._deadline == ENDED and not lease._posted else False)
        if released[i] is False:
            lease._found_lost(clock())
            lost.append(lease)
        lease._end()
