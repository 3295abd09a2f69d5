"""The lock on several names, all or none, for threads, and what it has in common with that of `aio_multi.py`.

Never here: frames, replies, what is decided (`_protocol/multi.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from fastlock._errors import LockError, LockNotAcquiredError, LockNotOwnedError, RedisError
from fastlock._locks.copying import Uncopyable
from fastlock._protocol import batch, losses
from fastlock._protocol.arguments import as_ms
from fastlock._protocol.base_lock import MAX_LEASES, NOT_HELD, BaseLock
from fastlock._protocol.batch_operations import release_many
from fastlock._protocol.commands import hash_slot, token_matches
from fastlock._protocol.extension import Outcome
from fastlock._protocol.lease import ENDED, Lease, now
from fastlock._protocol.local_queue import LocalQueues
from fastlock._protocol.losses import LOG, abbreviated
from fastlock._protocol.multi import MAX_NAMES, AcquireAll, Blocked, MultiLease, ask_each, extend_all
from fastlock._protocol.steps import Answer, Clock, CommandBatch, Steps
from fastlock._protocol.undo import Undo
from fastlock._stream_errors import by_handler


def checked_names(names: Iterable[Any], atomic: bool, fence: bool) -> tuple[list[Any], list[bytes]]:
    """The names of a multi lock, as given and as keys. Raises ValueError or TypeError: they make no sense, or cannot be
    acquired as is asked."""
    given, keys, _ = batch.asked(names, None)
    if not keys:
        raise ValueError("names must not be empty")
    if len(keys) > MAX_NAMES:
        raise ValueError(f"names must be at most {MAX_NAMES}, not {len(keys)}: one script acquires them all")
    if fence:
        raise ValueError(
            "fence=True is a number for one name, which is checked where that is written, and this lock has several: "
            "give fence=True to a plain lock of the resource"
        )
    if atomic and len(set(map(hash_slot, keys))) > 1:
        raise ValueError(
            "atomic=True wants all names in one hash slot, so that one command acquires them on a cluster, too: give "
            "them the same hash tag, as in 'a:{order}' and 'b:{order}', or leave atomic out"
        )
    return given, keys


class BaseMultiLock(Uncopyable):
    """What the locks on several names for threads and for asyncio have in common: names and settings, the leases that
    were acquired through it, by owner, and the texts of its errors."""

    def __init__(self, one: BaseLock, names: list[Any], keys: list[bytes]) -> None:
        self._one = one  # a plain lock with the same settings: it has checked them, and knows who the caller is
        self._transport = one._transport
        self.names = tuple(names)
        self._order = sorted(range(len(keys)), key=keys.__getitem__)  # in which they are waited for
        self._sorted_names = [names[i] for i in self._order]
        self._sorted_keys = [keys[i] for i in self._order]
        self._leases: dict[Any, MultiLease] = {}
        self.blocked: Blocked | None = None  # why the last acquire that failed has failed; None: nobody knows, or none

    @property
    def lease(self) -> MultiLease | None:
        """The caller's lease (this thread's, or this task's), or None. Ended leases stay until they are released."""
        return self._lease_of(self._one._owner())

    def _lease_of(self, owner: object) -> MultiLease | None:
        return self._leases.get(owner)

    def _new_acquire(
        self,
        required: bool,
        sleep: float | None = None,
        blocking: bool | None = None,
        blocking_timeout: float | None = None,
    ) -> LockAcquireAll:
        """The operation of an acquire with these arguments; None stands for the lock's own setting. required: whether
        it raises LockNotAcquiredError if it does not get the lock."""
        op, one = LockAcquireAll(self, required), self._one
        if sleep is blocking is blocking_timeout is one.blocking_timeout is None:
            op.blocking, op.polls, op.sleep = one.blocking, not one.queue, one.sleep
        else:
            plain = one._acquire_with(sleep, blocking, blocking_timeout, None)
            op.blocking, op.polls, op.sleep, op.until = plain.blocking, plain.polls, plain.sleep, plain.until
        return op

    def _apart(self) -> bool:
        """Whether each name needs a command of its own: the server is a node of a cluster, as is known by now, and
        their hash slots differ."""
        return bool(self._one._client._cross_slot) and len(set(map(hash_slot, self._sorted_keys))) > 1

    def _keep(self, leases: list[Lease]) -> MultiLease:
        """Keep the leases of the names, in the order of the keys, for the caller."""
        in_order = dict(zip(self._order, leases, strict=True))
        owner, lease = self._one._owner(), MultiLease(tuple(in_order[i] for i in range(len(leases))))
        self._leases[owner] = lease
        if self._one._renewal is not None:
            settings = lease.renewed_by(self._one._renewal)
            for each in lease.leases:
                self._transport.renew(each, self._one._ms, settings, owner)
        if len(self._leases) > MAX_LEASES:
            for other, kept in list(self._leases.items()):
                if kept is not lease and not kept.remaining:
                    self._leases.pop(other, None)
        return lease

    def _drop(self, lease: MultiLease) -> None:
        """Keep a lease no longer, whoever acquired it."""
        for each in lease.leases:
            if each._renewal is not None:
                each._renewal.end()
        for owner, kept in list(self._leases.items()):
            if kept is lease:
                self._leases.pop(owner, None)

    def _lease_for(self, action: str, owner: object) -> MultiLease:
        """The lease to work on. Raises LockError: there is none, or the lock has no timeout."""
        lease = self._lease_of(owner)
        if lease is None:
            raise self._not_held(action)
        if lease.inherited:
            raise self._error(action, "the parent process acquired them before it forked")
        if action != "release" and not self._one._ms:
            raise self._error(action, "they have no timeout")
        if lease._ended:
            if action == "release":
                self._drop(lease)
            raise self._lost(action, list(self.names))
        return lease

    def _releases(self, lease: MultiLease, released: list[Any]) -> Steps[list[Any]]:
        """The steps of a release."""
        size = 1 if self._apart() else CommandBatch.size
        return release_many(list(lease.leases), self._transport.queues, now, released, size)

    def _note_released(self, lease: MultiLease, released: list[Any]) -> None:
        """Note what became of a release. Raises LockNotOwnedError: one of the names was not the caller's any more."""
        self._drop(lease)
        if lost := [each.name for each, was_mine in zip(lease.leases, released, strict=True) if not was_mine]:
            raise self._lost("release", lost)

    def _carry_out(self, owner: object, released: list[Any], error: BaseException) -> None:
        """If a release of the owner's lease was interrupted by this error, carry it out, also if it had not begun: who
        leaves a `with` does not try again. The lease stays, so that the release can be repeated."""
        lease = self._lease_of(owner)
        if lease is not None and not lease.inherited:
            self._transport.undo_interrupted_batch(lease.leases, released, error)

    def _extension(self, seconds: float, to: bool, action: str, owner: object) -> tuple[MultiLease, Steps[Outcome]]:
        """The steps of an extension of an owner's lease, by `seconds` or to that."""
        lease, ms = self._lease_for(action, owner), as_ms(seconds, "additional_time")
        return lease, extend_all(lease.leases, ms, to, action == "reacquire", now, self._apart())

    def _moved(self, action: str, lease: MultiLease, outcome: Outcome) -> Literal[True]:
        """True if an extension moved the lease's end; else raises LockError or LockNotOwnedError."""
        if outcome is Outcome.ENDLESS:
            raise self._error(action, "they were acquired without end; reacquire() gives them one")
        if outcome is not Outcome.MOVED:
            lost = [each for each in lease.leases if not each._time_left()]
            for each in lost if outcome is Outcome.LOST else ():
                if not each._loss_reported():
                    self._transport.stats.losses += 1
                    losses.warn_of_loss(each.name, action)
            raise self._lost(action, [each.name for each in lost])
        return True

    def _anybody_holds(self) -> Steps[list[Any]]:
        return ask_each(b"EXISTS", self._sorted_keys, now)

    def _tokens(self) -> Steps[list[Any]]:
        return ask_each(b"GET", self._sorted_keys, now)

    def _owns(self, lease: MultiLease | None, tokens: list[Any]) -> bool:
        """Whether these tokens, in the order of the keys, are those of a lease that is held."""
        if lease is None or lease.inherited or any(each._deadline == ENDED for each in lease.leases):
            return False
        mine = [lease.leases[i]._raw_token for i in self._order]
        return all(map(token_matches, tokens, mine))

    # errors

    @property
    def _text(self) -> str:
        return f"locks {abbreviated(list(self.names))}"

    def _error(self, action: str, why: str) -> LockError:
        return LockError(f"Cannot {action} {self._text}: {why}", lock_name=self.names)

    def _not_held(self, action: str) -> LockError:
        why = f"they are {NOT_HELD[action]}"
        if self._leases:
            why += "; another thread or task acquired them (thread_local=False: for any of them to release)"
        return self._error(action, why)

    def _lost(self, action: str, lost: list[Any]) -> LockNotOwnedError:
        """The error of a release or an extension where these names are the caller's no longer."""
        are = "is" if len(lost) == 1 else "are"
        what = f"{', '.join(map(abbreviated, lost[:5]))}{' and more' if len(lost) > 5 else ''} {are} no longer owned"
        name = lost[0] if len(lost) == 1 else self.names
        return LockNotOwnedError(f"Cannot {action} {self._text}: {what}", lock_name=name)

    def _not_got(self, blocked: Blocked | None) -> LockNotAcquiredError:
        limit = self._one.blocking_timeout
        text = f"Unable to acquire {self._text}" + ("" if limit is None else f" within {limit} seconds")
        if blocked is not None:
            left = "without end" if blocked.time_left is None else f"for {blocked.time_left:g} seconds still"
            text += f": somebody else holds {abbreviated(blocked.name)}, {left}"
        error = LockNotAcquiredError(text, lock_name=self.names)
        error.lock_id = id(self)
        if blocked is not None:
            error.blocked_by, error.holder, error.time_left = blocked.name, blocked.holder, blocked.time_left
        return error

    def _report_release_error(self, error: BaseException | None, problem: Exception) -> None:
        """A release failed on leaving a `with`: attach it to the exception that ended the body, log it, or raise it."""
        if by_handler(problem):
            raise problem
        if error is not None:
            error.add_note(f"fastlock: then the release of {self._text} failed: {type(problem).__name__}: {problem}")
        elif isinstance(problem, LockError) and not self._one.raise_on_release_error:
            if not isinstance(problem, LockNotOwnedError):  # a loss was logged where it was found
                LOG.warning("%s were unlocked before their with statement ended", self._text)
        else:
            raise problem

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {abbreviated(list(self.names))}, timeout {self._one.timeout!r}>"


class LockAcquireAll(AcquireAll):
    """An acquire of several names whose leases the lock keeps, for the thread or task that asked."""

    kept: MultiLease | None = None

    def __init__(self, lock: BaseMultiLock, required: bool) -> None:
        super().__init__(lock._sorted_names, lock._sorted_keys, lock._one._ms, lock._apart())
        self.lock = lock
        self.required = required

    def abandon(self, queues: LocalQueues, clock: Clock) -> list[Undo]:
        for kept in list(self.lock._leases.values()):  # it may be there, and `kept` not be set yet
            if kept.leases[self.lock._order[0]]._raw_token == self.tokens[0]:
                self.lock._drop(kept)
        return super().abandon(queues, clock)

    def at_once(self, answer: object, now: float) -> list[Lease] | Literal[Answer.UNDECIDED] | None:
        leases = self.granted(answer, now)
        if leases is None:
            return Answer.UNDECIDED
        self._count(True)
        self.kept = self.lock._keep(leases)
        return leases

    def continue_from(self, answer: object, clock: Clock) -> Steps[list[Lease] | None]:
        leases = yield from super().continue_from(answer, clock)
        self._count(leases is not None)
        self.lock._one._client._cross_slot |= self.apart
        if leases is not None:
            self.kept = self.lock._keep(leases)
        else:
            self.lock.blocked = self.blocked
            if self.required:
                raise self.lock._not_got(self.blocked)
        return leases

    def _count(self, got: bool) -> None:
        stats = self.lock._transport.stats
        stats.acquires += len(self.keys) if got else 0
        stats.timeouts += not got and self.blocking
        stats.recovered += got and self.outcome_unknown
        stats.waits += self.polled
        stats.late_grants += self.late_grants


class MultiLock(BaseMultiLock):
    """A lock on several names, all or none, made by `Client.multi_lock()`: entering it gives the MultiLease. Its
    `names` are as the caller wrote them; `blocked` says why an acquire failed, after `acquire` returned False."""

    def acquire(
        self, sleep: float | None = None, blocking: bool | None = None, blocking_timeout: float | None = None
    ) -> bool:
        """Acquire all names; afterwards `lease` is what is owned. Returns False when somebody else holds one of them:
        `blocked` says which, and then nothing is held.

        blocking: whether to wait. blocking_timeout: for how many seconds at most. sleep: seconds between two tries
        where the lock has to be polled. None takes the lock's own setting. Raises what `ClientLock.acquire` does.
        """
        return self._acquired(self._new_acquire(False, sleep, blocking, blocking_timeout)) is not None

    def _acquired(self, op: LockAcquireAll) -> MultiLease | None:
        try:
            self._transport.run(op)
            return op.kept
        except BaseException as error:  # a signal handler may also have raised it since `run` has ended
            self._transport.undo_interrupted(op, error)
            raise

    def release(self) -> None:
        """Release all names. Until this returns they count as held: after a ConnectionError it can be called again.

        Raises LockError: the caller holds nothing. LockNotOwnedError: some of them, which it names, are no longer the
        caller's; the others are released all the same.
        """
        released: list[Any] = []
        try:
            self._transport.begin()
            lease = self._lease_for("release", self._one._owner())
            self._transport.drive(self._releases(lease, released))
            self._note_released(lease, released)
        except BaseException as problem:  # a signal handler may have raised it
            self._carry_out(self._one._owner(), released, problem)
            raise

    def extend(self, additional_time: float, replace_ttl: bool = False) -> Literal[True]:
        """Move the end of all leases by `additional_time` seconds, or with `replace_ttl` to so many seconds from now.

        Raises LockError: the caller holds nothing, or the lock has no timeout. LockNotOwnedError: some of the names,
        which it names, are no longer the caller's.
        """
        lease, extension = self._extension(additional_time, replace_ttl, "extend", self._one._owner())
        return self._moved("extend", lease, self._transport.drive(extension))

    def reacquire(self) -> Literal[True]:
        """Set all leases back to the lock's full timeout, also those acquired without end. Errors as `extend`."""
        owner = self._one._owner()
        self._lease_for("reacquire", owner)
        lease, extension = self._extension(self._one.timeout or 0, True, "reacquire", owner)
        return self._moved("reacquire", lease, self._transport.drive(extension))

    def locked(self) -> bool:
        """Whether anybody holds any of the names, asked of the server."""
        return any(self._transport.drive(self._anybody_holds()))

    def owned(self) -> bool:
        """Whether the caller holds all of the names, asked of the server."""
        lease = self.lease
        return self._owns(lease, self._transport.drive(self._tokens()))

    def __enter__(self) -> MultiLease:
        lease = self._acquired(self._new_acquire(True))
        assert lease is not None, "else an error was raised"
        return lease

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.release()
        except BaseException as problem:
            if isinstance(problem, RedisError) and not by_handler(problem):
                self._report_release_error(error, problem)
                return
            self._carry_out(self._one._owner(), [], problem)  # also before `release` had begun
            raise

    if not TYPE_CHECKING:  # a type checker refuses these by itself

        async def __aenter__(self):
            raise TypeError("this lock is for threads: use `with`, or fastlock.asyncio for `async with`")

        async def __aexit__(self, *exc): ...
