"""What the locks for threads and for asyncio have in common: checked settings, the leases they keep, the texts of their
errors.

A lock is a name with settings; what is owned is the lease of one acquisition. Leases are kept by owner (a thread, or
a task), so that a lock shared between owners never lets one of them release what another acquired. Never here: I/O,
waiting.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

from fastlock._errors import (
    ClientClosedError,
    LockError,
    LockLostError,
    LockNotAcquiredError,
    LockNotOwnedError,
    ResponseError,
)
from fastlock._protocol import arguments, describe, extension, keeping
from fastlock._protocol.acquire import Acquire
from fastlock._protocol.arguments import as_flag, as_ms, as_name, as_wait
from fastlock._protocol.commands import KEPT_PREFIX, PLAIN_PREFIX, Opcode, made_here
from fastlock._protocol.lease import ENDED, ID_DIGITS, Lease, is_inherited, new_token, now
from fastlock._protocol.local_queue import LocalQueues, ReleaseRoute
from fastlock._protocol.losses import LOG, LOST, abbreviated, warn_of_loss
from fastlock._protocol.release import HandOver, PlainRelease, Release
from fastlock._protocol.renewal import RenewalSettings
from fastlock._protocol.steps import Answer, Clock, Steps
from fastlock._protocol.undo import UnconfirmedRelease, Undo
from fastlock._protocol.waiters import Waiter
from fastlock._stream_errors import by_handler

DEFAULT_TIMEOUT = 10.0  # seconds of a lease; LEASE_SECONDS if it is renewed
DEFAULT_SLEEP = 0.1  # seconds between two tries of a name that is held, where it is polled
MAX_LEASES = 64  # leases that one lock keeps: beyond, ended ones are forgotten, whose owners never released them
_MAX_LEASES: int = MAX_LEASES  # typed, where this is compiled
_KEPT: int = KEPT_PREFIX[1]
_ACQUIRE: int = Opcode.ACQUIRE
_ACQUIRE_ENDLESS: int = Opcode.ACQUIRE_ENDLESS
_ACQUIRE_OR_RECALL: int = Opcode.ACQUIRE_OR_RECALL
_LOCAL: int = ReleaseRoute.LOCAL
_PROCESS = slice(len(PLAIN_PREFIX), len(PLAIN_PREFIX) + ID_DIGITS)  # of a token: the id of the process that made it
_NOT_HELD: int = ReleaseRoute.NOT_HELD

NOT_HELD = {"release": "not owned or already unlocked", "extend": "unlocked", "reacquire": "unlocked"}


class BaseLock:
    """A lock's name and settings, and the leases acquired through it."""

    def __init__(
        self,
        client: Any,
        name: arguments.Name,
        timeout: float | None,
        sleep: float,
        blocking: bool,
        blocking_timeout: float | None,
        thread_local: bool,
        raise_on_release_error: bool,
        fence: bool = False,
        fair: bool = False,
        queue: bool = True,
        encoding: str = "utf-8",
        renewal: RenewalSettings | None = None,
        confirm_release: bool = True,
        on_lost: Callable[[Lease], object] | None = None,
        keep: float | None = None,
    ) -> None:
        self._client = client  # kept alive: a client that nobody refers to closes its connections
        self._transport = client._transport
        self._encoding = encoding
        self._renewal = renewal  # how its leases are renewed; None: they are not
        self._owners: Any = None  # of a reentrant lock: what all such locks of the client on this name share
        self._keep_given, self._keep_ms = keep, 0  # for how long its leases are kept; None and 0: they are not
        self.name = name
        self.timeout = timeout
        self._key = as_name(name, encoding)
        self._ms = 0 if timeout is None else as_ms(timeout)
        self._leases: dict[Any, Lease] = {}
        self.sleep = sleep
        self.blocking = blocking
        self.blocking_timeout = blocking_timeout
        self.thread_local = thread_local
        self.raise_on_release_error = raise_on_release_error
        self.fence = as_flag(fence, "fence")
        self.fair = as_flag(fair, "fair")
        self.queue = as_flag(queue, "queue")
        self.confirm_release = as_flag(confirm_release, "confirm_release")
        self._on_lost = on_lost  # of a release that is not waited for
        if keep is not None:
            self._keep_ms = keeping.checked_ms(keep, timeout, fence, fair, queue, renewal is not None)
        if sleep is not DEFAULT_SLEEP:
            as_wait(sleep, "sleep")
        if blocking_timeout is not None:
            as_wait(blocking_timeout, "blocking_timeout")
            self._check_both(blocking)
        if fair and not queue:
            raise ValueError("fair=True is an order in the queue, which queue=False stays out of: give one of them")

    @property
    def keep(self) -> float | None:
        """For how many seconds its leases are kept after their release; None: they are not."""
        return self._keep_given

    def _check_both(self, blocking: bool) -> None:
        """Refuse a blocking_timeout together with blocking=False, by ValueError: they contradict each other."""
        if not blocking:
            raise ValueError(
                "blocking_timeout says how long to wait, and blocking=False not to wait at all: give one of them"
            )

    def _as_token(self, token: object) -> bytes:
        """The bytes of a token that the caller gives."""
        return arguments.as_bytes(token, "token", self._encoding)

    def _owner(self) -> Any:
        """The owner under which the caller's lease is kept: its thread or task, or None where all share one lease."""
        raise NotImplementedError

    def _orphaned_lease(self) -> Lease | None:
        """A lease whose owner is gone and will never release it, if the caller may take it over."""
        return None

    def _keep_lease(self, owner: object, lease: Lease) -> None:
        """Keep a lease for its owner."""
        self._keep(owner, lease)

    def _keep(self, owner: object, lease: Lease) -> None:
        self._leases[owner] = lease
        if self._owners is not None:
            self._owners.keep()
        if self._renewal is not None:
            self._transport.renew(lease, self._ms, self._renewal, owner)
        if len(self._leases) > _MAX_LEASES:
            for other, kept in list(self._leases.items()):
                if kept is not lease and kept._confirmation is None and not kept._time_left():
                    self._leases.pop(other, None)

    def _granted(self, owner: object, token: bytes, sent: float, time: float, queues: LocalQueues) -> Lease | None:
        """Keep and count the lease that the server's plain answer to an acquire grants. None: the lease ended before
        the answer came."""
        queues.note_reply(time - sent)
        kept, ms = token[1] == _KEPT, self._lease_ms(token)
        deadline = sent + ms / 1000 if ms else math.inf
        if time >= deadline:
            return None
        lease = Lease(self.name, self._key, token, deadline)
        lease._since = sent
        queues.stats.acquires += 1
        self._keep(owner, lease)
        if kept:
            queues.note_keepable(lease, sent, sent + self._keep_ms / 1000)
        return lease

    def _fresh_token(self) -> bytes:
        """A token for an acquire that is sent now: one that can be recalled, if the lease may be kept."""
        token = new_token()
        if not self._keep_ms:
            return token
        queues = self._transport.queues
        if self._key in queues.expected:  # it was recalled of late
            queues.expect(self._key, False)
            return token
        return keeping.kept_token(token) if queues.hears_recalls else token

    def _lease_ms(self, token: bytes) -> int:
        """How many milliseconds a lease by this token is to last."""
        return self._ms + self._keep_ms if token[1] == _KEPT else self._ms

    def _opcode(self) -> int:
        """The opcode of an acquire: one that may keep leases recalls what another process keeps, also if it does not
        wait."""
        if self._keep_ms:
            return _ACQUIRE_OR_RECALL
        return _ACQUIRE if self._ms else _ACQUIRE_ENDLESS

    def _another_token(self) -> bytes:
        """As `_fresh_token`, for an operation, which counts the acquire as it begins."""
        expected = self._keep_ms and self._key in self._transport.queues.expected
        return new_token() if expected else self._fresh_token()

    def _keepable(self, token: bytes) -> bool:
        """Whether the lease by this token may be kept: it is one of this process's that can be recalled."""
        return bool(self._keep_ms) and made_here(token) and token[1] == _KEPT

    def _ms_by(self, token: bytes) -> int:
        """As `_lease_ms`, for an operation, whose token may have been given."""
        return self._ms + self._keep_ms if self._keepable(token) else self._ms

    def _handed_over(self, owner: object, waiter: Waiter, time: float, queues: LocalQueues) -> Lease | None:
        """Keep and count the lease that a waiter has got. None: it has none, or one that ended before the caller ran,
        which the protocol gives back."""
        lease = waiter.lease
        if lease is None or time >= lease._deadline:
            return None
        queues.handover_completed(waiter)
        queues.stats.acquires += 1
        self._keep(owner, lease)
        return lease

    def _reenter(self) -> Lease | None:
        """Acquire the lock again which the caller holds, without asking the server: of those that have `_owners`. None:
        the caller does not hold it. Raises LockNotOwnedError: the caller's lease has ended. LockError: it has no fence,
        and this lock wants one."""
        raise NotImplementedError

    def _take_kept(self, owner: object, time: float) -> Lease | None:
        """Take the lease of the name, if the client keeps it. None: it does not."""
        before = self._leases.get(owner)
        queues = self._transport.queues
        if self.fence or self.fair:  # set since it was made
            return None
        try:
            least, most = self._ms, self._ms + self._keep_ms
            lease: Lease | None = queues.take_kept(self._key, self.name, least, most, self._leases, owner, time)
        except BaseException as error:  # a signal handler's: nobody knows of the lease yet
            taken = self._leases.get(owner)
            if taken is not None and taken is not before:
                self._transport.finish_release(self, owner, taken, None, error)
            raise
        if lease is None:
            self._transport.prepare_to_keep(self._key)
        return lease

    def _entered_before(self) -> Lease | None:
        """The lease of a caller that is to enter again; errors are those of `_reenter`."""
        owner = self._owner()
        lease = self._leases.get(owner)
        if lease is None or is_inherited(lease):
            return None
        if lease._releasing:  # by `release_many`, or by a release that was interrupted and is carried out all the same
            self._drop_lease(lease)
            return None
        if self._transport.closed:
            raise ClientClosedError("this client is closed")
        lease._read_confirmation()
        if not lease._time_left():
            raise self._lost("acquire")
        if self.fence and lease._fence is None:
            raise LockError(self._cannot("acquire", "it is held without a fence"), lock_name=self._text)
        if self._renewal is not None and lease._renewal is None:
            self._transport.renew(lease, self._ms, self._renewal, owner)
        return lease

    def _leave_inner(self, lease: Lease | None) -> bool:
        """Take back one acquire of a reentrant lock, if that was not its first. False: the lock is to be released."""
        if lease is None or lease._depth < 2:
            return False
        lease._depth -= 1
        return True

    def _released(self, owner: object, lease: Lease) -> None:
        """Note that the owner's lease has ended: the server released it, or the next waiter has it."""
        if self._leases.get(owner) is lease:
            self._leases.pop(owner, None)
        lease._deadline, lease._confirmation = ENDED, None
        if lease._renewal is not None:
            lease._renewal.end()

    def _released_locally(self, owner: object, lease: Lease, route: int) -> bool:
        """Whether a release is done, by the ReleaseRoute that the local queue chose; else the server is to be asked.
        Raises LockNotOwnedError: the lease was released before."""
        if route == _LOCAL:
            self._released(owner, lease)
            return True
        if route == _NOT_HELD:  # another thread released it a moment ago
            self._drop_lease(lease)
            raise self._lost("release")
        return False

    def _waits_locally(self, answer: object, token: Any, queued: dict[bytes, Any]) -> Waiter | None:
        """A waiter, if the caller is to wait in the local queue: because others of its client wait for the name (it is
        among the `queued`), other clients wanted it of late, the lock is fair, or the server answered that somebody
        holds it. None: the caller may not wait, or has to take the slow path."""
        if not self.blocking or not self.queue:
            return None
        if self.blocking_timeout is not None and not self.blocking_timeout:
            return None
        if answer is None:
            if not (self.fair or self._key in queued or self._key in self._transport.expected_keys):
                return None
        elif type(answer) is not bytes or answer == token:
            return None
        elif answer[_PROCESS] != token[_PROCESS]:
            self._transport.queues.expect(self._key, True)
        entry = new_token() if self.fair else None
        waiter = Waiter(self.name, self._key, self._ms, self.fence, entry, self.sleep)
        waiter.believes, waiter.keep_ms = self._believes(), self._keep_ms
        return waiter

    def _believes(self) -> bool:
        """Whether a waiter believes a message of its grant: not where its lease is renewed, whose loss is told."""
        return self._renewal is None

    def _needs_slow_path(self) -> bool:
        """Whether an acquire takes a script, or has no time to wait."""
        queues = self._transport.queues
        if self.fence or self._key in queues.kept:  # to be released before
            return True
        return self.blocking_timeout is not None and not (self.blocking and self.blocking_timeout)

    def _drop_lease(self, lease: Lease) -> None:
        """Keep a lease no longer, whoever acquired it."""
        if lease._renewal is not None:
            lease._renewal.end()
        for owner, kept in list(self._leases.items()):
            if kept is lease:
                self._leases.pop(owner, None)

    def _new_acquire(
        self, token: bytes | None = None, required: bool = True, start: float | None = None
    ) -> LockAcquire:
        """The operation of an acquire with the lock's own settings. required: whether it raises LockError if it does
        not get the lock; start: when the acquire began, if that was earlier."""
        op = self._acquire_by(token or self._another_token(), required)
        if self.blocking:
            op.blocking = True
            op.polls = not self.queue
            op.sleep = self.sleep
            if self.blocking_timeout is not None:
                self._limit(op, self.blocking_timeout, start)
        return op

    def _acquire_with(
        self, sleep: float | None, blocking: bool | None, blocking_timeout: float | None, token: object
    ) -> LockAcquire:
        """The operation of an acquire with these arguments; None stands for the lock's own setting."""
        raw_token = self._another_token() if token is None else self._as_token(token)
        op = self._acquire_by(raw_token, required=False)
        op.given = token is not None
        op.polls = op.given or not self.queue  # two callers that give the same token would be one in the queue
        op.blocking = bool(self.blocking if blocking is None else blocking)
        op.sleep = self.sleep if sleep is None else as_wait(sleep, "sleep")
        if blocking_timeout is not None:
            as_wait(blocking_timeout, "blocking_timeout")
            self._check_both(op.blocking)
        else:
            blocking_timeout = self.blocking_timeout
        if blocking_timeout is not None and op.blocking:
            self._limit(op, blocking_timeout)
        return op

    def _acquire_by(self, token: bytes, required: bool) -> LockAcquire:
        """The operation of an acquire by this token."""
        return LockAcquire(self, token, required)

    def _release_of(self, lease: Lease) -> LockRelease:
        """The operation of a release of this lease."""
        return LockRelease(self, lease)

    @staticmethod
    def _limit(op: Acquire, blocking_timeout: float, start: float | None = None) -> None:
        if blocking_timeout:
            op.until = (now() if start is None else start) + blocking_timeout
        else:  # no time to wait: one try, with as much time as a try takes
            op.blocking = False

    @property
    def lease(self) -> Lease | None:
        """The caller's lease (this thread's, or this task's), or None. Ended leases stay until they are released."""
        return self._lease_of(self._owner())

    def _lease_of(self, owner: object) -> Lease | None:
        return self._leases.get(owner) or self._orphaned_lease()

    def _lease_for(self, action: str, owner: object) -> Lease:
        """The lease to work on. Raises LockError: there is none, or the lock has no timeout by now."""
        lease = self._lease_of(owner)
        if lease is None:
            raise self._not_held(action)
        if lease.inherited:
            why = "the parent process acquired it before it forked"
            raise LockError(self._cannot(action, why), lock_name=self._text)
        if action != "release" and not self._ms:
            raise LockError(self._cannot(action, "it has no timeout"), lock_name=self._text)
        if lease._deadline == ENDED:  # released by `release_many`, or by its token
            if action == "release":
                self._drop_lease(lease)
            raise self._lost(action)
        lease._read_confirmation()
        return lease

    @property
    def _text(self) -> Any:  # `lock_name` of an error: declared by redis-py as a str, whatever the name is
        return self.name

    def _cannot(self, action: str, why: str) -> str:
        return f"Cannot {action} lock {abbreviated(self.name)}: {why}"

    def _extension(self, seconds: float, replace_ttl: bool, action: str, owner: object) -> Any:
        """The operation that moves the end of an owner's lease by `seconds`, or to `seconds` from now."""
        ms, lease = as_ms(seconds, "additional_time"), self._lease_for(action, owner)
        if self._keep_ms:  # a lease whose end was moved is not kept: it lasts for another time than one is to last
            self._transport.queues.forget_kept(self._key, lease._raw_token)
        return extension.extend(lease, ms, replace_ttl, now, action == "reacquire")

    def _moved(self, action: str, outcome: extension.Outcome) -> Literal[True]:
        """True if the extension moved the lease's end; else raises LockError or LockNotOwnedError."""
        if outcome is extension.Outcome.ENDLESS:
            raise self._endless(self._cannot(action, "it was acquired without end; reacquire() gives it one"))
        if outcome is not extension.Outcome.MOVED:
            raise self._lost(action, found=outcome is extension.Outcome.LOST)
        return True

    def _endless(self, why: str) -> LockError:
        """The error of an extension where there is no end to move. The lease stays as it is."""
        return LockError(why, lock_name=self._text)

    def _new_release(self, owner: object = None) -> LockRelease:
        """The operation of a release of an owner's lease; None: the caller's. Raises LockError: there is none."""
        return self._release_of(self._lease_for("release", owner or self._owner()))

    def _not_held(self, action: str) -> LockError:
        why = f"it is {NOT_HELD[action]}"
        if any(lease.inherited for lease in self._leases.values()):
            why = "the parent process acquired it before it forked"
        elif self._leases:
            why += "; another thread or task acquired it (thread_local=False: for any of them to release)"
        return LockError(self._cannot(action, why), lock_name=self._text)

    def _tells_kind(self) -> bool:
        """Whether an acquire of a name that is of another kind raises LockKindError; else the server's refusal."""
        return True

    def _not_got(self) -> LockNotAcquiredError:
        limit = self.blocking_timeout  # after it, nobody knows whether the name was held or the server was slow
        why = ": somebody else holds it" if limit is None else f" within {limit} seconds"
        error = LockNotAcquiredError(f"Unable to acquire lock {abbreviated(self.name)}{why}", lock_name=self._text)
        error.lock_id = id(self)
        return error

    def _lost(self, action: str, found: bool = False) -> LockNotOwnedError:
        """The error of a lost lease. found: it was found lost just now, so it is counted and logged; else that was
        known before, or it was released."""
        if found:
            self._transport.stats.losses += 1
            warn_of_loss(self.name, action)
        why = LOST if found else f"{LOST}, or another caller released it"
        return LockNotOwnedError(self._cannot(action, f"it is no longer owned: {why}"), lock_name=self._text)

    def _lost_in_body(self) -> LockLostError:
        """The error of a body that was cancelled, as its lease was lost."""
        why = "it could not be renewed in time, or its key was deleted or taken"
        return LockLostError(f"Lock {abbreviated(self.name)} was lost while it was held: {why}", lock_name=self._text)

    def _report_release_error(self, error: BaseException | None, problem: Exception) -> None:
        """A release failed on leaving a `with`: attach it to the exception that ended the body, log it, or raise it."""
        if by_handler(problem):
            raise problem
        if error is not None:
            failed = f"{type(problem).__name__}: {problem}"  # repr() drops the text of redis-py's errors since 8.0
            error.add_note(f"fastlock: then the release of {abbreviated(self.name)} failed: {failed}")
        elif isinstance(problem, LockError) and not self.raise_on_release_error:
            if not isinstance(problem, LockNotOwnedError):  # a loss was logged where it was found
                LOG.warning("lock %s was unlocked before its with statement ended", abbreviated(self.name))
        else:
            raise problem

    def __repr__(self) -> str:
        keep = f", keep {self._keep_ms / 1000:g}" if self._keep_ms else ""
        unconfirmed = "" if self.confirm_release else ", confirm_release False"
        return f"<{type(self).__name__} {self.name!r}, timeout {self.timeout!r}{keep}{unconfirmed}>"


class LockAcquire(Acquire):
    """An acquire whose lease the lock keeps, for the thread or task that asked."""

    def __init__(self, lock: BaseLock, token: bytes, required: bool) -> None:
        self.lock = lock
        self.required = required
        Acquire.__init__(self, lock.name, lock._key, token, lock._ms_by(token), lock.fence)
        self.alone, self.believes = lock.fair, lock._believes()

    def opcode(self) -> int:
        return self.lock._opcode()

    def local(self, queues: LocalQueues, now: float) -> Answer | None:
        where = super().local(queues, now)
        if where is None and self.lock._keep_ms:
            queues.sweep(now)
            if self.key in queues.expected:  # it was recalled of late, and is not kept for a while
                queues.expect(self.key, False)
        return where

    def waiter(self) -> Waiter:
        waiter = super().waiter()
        waiter.ms, waiter.keep_ms = self.lock._ms, self.lock._keep_ms
        return waiter

    def fresh_token(self) -> bytes:
        token: bytes = self.lock._another_token()
        self.ms = self.lock._ms_by(token)
        return token

    def forget(self) -> None:
        """Keep no lease for a caller that was interrupted before it knew of it."""
        lease = self.lock.lease
        if lease is not None and lease._raw_token == self.token:
            self.lock._drop_lease(lease)
        if self.lock._keep_ms:
            self.lock._transport.queues.forget_kept(self.key, self.token)

    def abandon(self, queues: LocalQueues, clock: Clock) -> list[Undo]:
        self.forget()
        return super().abandon(queues, clock)

    def leave(self, waiter: Waiter, lease: Lease | None, clock: Clock) -> Undo | None:
        if (handed := lease or waiter.lease) is not None:
            self.lock._drop_lease(handed)
        return super().leave(waiter, lease, clock)

    def at_once(self, answer: object, now: float) -> Lease | Literal[Answer.UNDECIDED] | None:
        lease = self.granted(answer)
        if lease is None or now >= lease._deadline:
            return Answer.UNDECIDED
        self._count(True)
        self.lock._transport.queues.note_reply(now - self.request.sent)
        self._keep(lease)
        return lease

    def continue_from(self, answer: object, clock: Clock) -> Steps[Lease | None]:
        try:
            lease = yield from super().continue_from(answer, clock)
        except ResponseError as refusal:
            error = yield from describe.explain(refusal, self.lock, clock)
            if error is refusal:
                raise
            raise error from None
        self._count(lease is not None)
        if lease is not None:
            self._keep(lease)
        elif self.required:
            raise self.lock._not_got()
        return lease

    def _keep(self, lease: Lease) -> None:
        """Keep the lease for the caller; also after its release, if a try was granted it and nobody had to wait: of a
        lease that was granted to an entry recalls may have been missed."""
        lock = self.lock
        lock._keep_lease(lock._owner(), lease)
        if self.waiting is None and not self.outcome_unknown and lock._keepable(lease._raw_token):
            lock._transport.queues.note_keepable(lease, lease._since, lease._since + lock._keep_ms / 1000)

    def _count(self, got: bool) -> None:
        stats = self.lock._transport.stats
        stats.acquires += got
        stats.timeouts += not got and self.blocking
        stats.recovered += got and self.outcome_unknown
        stats.waits += self.polled
        stats.late_grants += self.late_grants


class LockRelease(Release):
    """A release after which the lock keeps the lease no longer. Raises LockNotOwnedError: the lock was not the caller's
    any more."""

    def __init__(self, lock: BaseLock, lease: Lease, counted: bool = False) -> None:
        self.lock = lock
        Release.__init__(self, lease, counted)

    def abandon(self, queues: LocalQueues, clock: Clock) -> list[Undo]:
        """Keep the lease, so that the release can be repeated; unless it was handed over."""
        undos = super().abandon(queues, clock)
        if self.lease._deadline == ENDED:
            self.lock._drop_lease(self.lease)
        return undos

    def at_once(self, answer: object, now: float) -> bool | Literal[Answer.UNDECIDED]:
        said = answer[0] if type(answer) is list and len(answer) == 1 else answer
        if type(said) is not int or said != 1 or self.lease._release_unknown:
            return Answer.UNDECIDED
        return self.posted()

    def unwaited(
        self, clock: Clock, told: Callable[[UnconfirmedRelease, bool | None], object]
    ) -> UnconfirmedRelease | None:
        lock, lease = self.lock, self.lease
        # Of a lease that has ended, or whose release has failed before, the caller is told what became of it. A token
        # that was given may be another holder's by the time at which a release is sent again
        if (
            lock.confirm_release
            or lease._release_unknown
            or clock() >= lease._deadline
            or not made_here(lease._raw_token)
        ):
            return None
        if lease._posted:  # by another thread, at the same time
            return None
        lease._posted = True  # no call since the check: of two threads that release it one waits
        lease._lost_end = lease._latest_end()
        return UnconfirmedRelease(lease, lock._on_lost, clock, told, lease._lost_end)

    def posted(self) -> Literal[True]:
        self.lock._drop_lease(self.lease)
        self.lease._deadline, self.lease._confirmation = ENDED, None
        return True

    def continue_from(self, answer: object, clock: Clock) -> Steps[bool]:
        lock, queues, deletes = self.lock, self.lock._transport.queues, type(self.request) is PlainRelease
        was_mine = yield from super().continue_from(answer, clock)
        found = deletes and type(self.request) is HandOver and was_mine and not self.lease._release_unknown
        if found and queues.far():  # somebody waits: the next acquire joins, and its release is a script at once
            queues.expect(lock._key, True)
        lock._transport.stats.recovered += was_mine and self.lease._release_unknown
        if not was_mine and self.lease._leave_to_another():
            raise lock._lost("release")
        # Released by somebody else meanwhile, or reported as lost before
        known = (self.lease._deadline == ENDED and not self.lease._posted) or self.lease._loss_reported()
        if not (was_mine or known):
            self.lease._found_lost(clock())
        lock._drop_lease(self.lease)
        self.lease._deadline, self.lease._confirmation = ENDED, None
        if not was_mine:
            raise lock._lost("release", found=not known)
        return True
