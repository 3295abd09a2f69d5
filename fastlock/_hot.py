"""Wire: an acquire that finds its name free, and a release that finds it held, which is nearly every one.

What goes any other way is handed on with the answer as it came: the law says what it means, the other wires how to
wait. `_hot.pyx` is the same, compiled. Never here: a loop, a decision that is not "just as hoped".
"""

from __future__ import annotations

import math
import threading
from asyncio import current_task
from typing import Any

from fastlock._broken import by_handler
from fastlock._commands import ACQUIRE, ACQUIRE_ENDLESS, RELEASE, hand_over
from fastlock._errors import RedisError, own
from fastlock._fork import check
from fastlock._gate import GONE, HAND_OVER, PASSED, Waiter
from fastlock._law import LAST_LOOK
from fastlock._lease import ENDED, Lease, is_inherited, new_token, now
from fastlock._link import POP, SPIN, STALE
from fastlock._native import refuse_greenlet
from fastlock._steps import BEHIND, LATE
from fastlock._terms import KEPT, Releasing, Terms
from fastlock._turns import Turn

_thread = threading.local()


def thread_owner() -> Any:
    """Stands for the calling thread. Its number will not do: the next thread gets it again."""
    try:
        return _thread.owner
    except AttributeError:
        _thread.owner = owner = object()
        return owner


def _granted(lock: Terms, owner: Any, token: bytes, sent: float) -> Lease | None:
    """The lease, kept for its owner; None: its time was over before the reply came."""
    deadline = sent + lock.ms / 1000 if lock.ms else math.inf
    if now() >= deadline:
        return None
    lease = Lease(lock.name, lock.key, token, deadline)
    lock._wire.stats.acquires += 1
    lock.leases[owner] = lease
    if len(lock.leases) > KEPT:
        lock.keep(lease)
    return lease


def _behind(lock: Terms, answer: Any = None, token: bytes | None = None) -> Any:
    """Who is to join those of this client who wait for a name: for which somebody does, or which is held, as the server
    answers. None: not so, or the way is longer."""
    wire = lock._wire
    if not lock.blocking or lock.fair or not lock.queue or lock.blocking_timeout == 0:
        return None
    if lock.key in wire.crowd if answer is None else type(answer) is bytes and answer != token:
        return Waiter(lock.name, lock.key, lock.ms, lock.fence, None, lock.sleep)
    return None


def _handed(lock: Terms, owner: Any, waiter: Any) -> Lease | None:
    """The lease that passed to a waiter, kept for its owner; None: none did, or it was over before this caller ran,
    which the law gives back."""
    lease: Lease | None = waiter.lease
    if lease is None:
        return None
    if now() >= lease.deadline:
        return None
    lock._wire.gates.taken(waiter)
    lock._wire.stats.acquires += 1
    lock.leases[owner] = lease
    if len(lock.leases) > KEPT:
        lock.keep(lease)
    return lease


def _odd(lease: Lease) -> bool:
    """Whether it is no lease of the caller's any more: its parent's, or let go of already."""
    return is_inherited(lease) or lease.deadline == ENDED


def _special(lock: Terms) -> bool:
    """Whether the way is longer: by a script, or with no time to wait."""
    if lock.fence or lock.fair:
        return True
    return lock.blocking_timeout is not None and not (lock.blocking and lock.blocking_timeout)


def _gone(lock: Terms, owner: Any, lease: Lease) -> None:
    if lock.leases.get(owner) is lease:
        lock.leases.pop(owner, None)
    lease.deadline = ENDED


def _asked(op: Any, link: Any, sent: float) -> Any:
    op.link, op.sent = link, sent
    return op


# threads


def _ask(wire: Any, connection: Any, verb: int, key: bytes, token: bytes, ms: int, limit: float | None = None) -> Any:
    patience = connection.patience if limit is None else min(limit, connection.patience)
    pipe = connection.pipe
    return pipe.ask(pipe.forms[verb], key, token, ms, patience, _spin(wire))


def _spin(wire: Any) -> float:
    return SPIN if len(wire.connections) - len(wire.idle) - wire.away <= 1 else 0.0


def _hand_over(connection: Any, lease: Lease) -> Any:
    """As `_ask`: a release to who waits elsewhere. It does not poll: the server tells that one after us, and both of
    them need a processor."""
    form = connection.impl.Template(*hand_over(lease.key, lease.proof))
    return connection.pipe.ask(form, b"", b"", 0, connection.patience, 0.0)


# What `with` calls


def enter_lease(self: Any) -> Any:
    """Acquire, and give the lease. Raises LockError when it could not be had within the lock's blocking_timeout."""
    return take(self, True)


def enter_lock(self: Any) -> Any:
    """Acquire. Raises LockError when it could not be had within the lock's blocking_timeout."""
    take(self, True)
    return self


def leave(self: Any, kind: Any, error: BaseException | None, trace: Any) -> None:
    """Release. What goes wrong with it is put where `Terms.left` says, beside the error that ended the body."""
    try:
        give(self)
    except BaseException as problem:
        if isinstance(problem, RedisError) and not by_handler(problem):
            self.left(error, problem)
            return
        _struck(self, self._me(), None, None, problem)  # also as `give` is entered
        raise


def take(lock: Terms, must: bool) -> Lease | None:
    """Acquire on the lock's own terms, for a thread. Outcome and errors are those of `Terms.taking`."""
    check()
    wire, sent = lock._wire, now()
    if wire.crowd:
        wire.gates.sweep(sent)
        if (waiter := _behind(lock)) is not None:
            return _wait(lock, must, waiter, sent)
    if wire.debts or _special(lock):
        return wire.run(lock.taking(None, must))  # type: ignore[no-any-return]
    token, op = new_token(), None
    verb = ACQUIRE if lock.ms else ACQUIRE_ENDLESS
    try:
        (connection,) = map(POP, (wire.idle,))
    except IndexError as none:
        if by_handler(none):
            raise
        return wire.run(lock.taking(None, must))  # type: ignore[no-any-return]
    try:
        try:
            answer = _ask(wire, connection, verb, lock.key, token, lock.ms, lock.blocking_timeout)
        except BaseException as error:
            op = _asked(lock.taking(token, must, sent), connection, sent)
            answer = connection.explain(op, error)
        finally:
            if connection.dead is None:
                wire.idle.append(connection)
        if answer is None:
            lease = _granted(lock, thread_owner() if lock.thread_local else None, token, sent)
            if lease is not None:
                return lease
        waiter = _behind(lock, answer, token) if op is None and answer is not None else None
        if waiter is None:
            if op is None:
                op = _asked(lock.taking(token, must, sent), connection, sent)
            if answer is STALE or answer is connection.busy:
                return wire.run(op)  # type: ignore[no-any-return]
            return wire.drive(op.rest(answer, now))  # type: ignore[no-any-return]
    except BaseException as error:  # it may strike anywhere, also after the grant; and once more, in here
        try:
            wire.interrupted(op or _asked(lock.taking(token, must), connection, sent), error)
        except BaseException as again:
            wire.interrupted(op or _asked(lock.taking(token, must), connection, sent), again)
            raise
        raise
    return _wait(lock, must, waiter, sent)


def _until(lock: Terms, start: float) -> float | None:
    """When to look for the last time."""
    return None if lock.blocking_timeout is None else start + lock.blocking_timeout - LAST_LOOK


def _wait(lock: Terms, must: bool, waiter: Any, start: float) -> Lease | None:
    """Sleep until a lease passes to this waiter, or it is the first, or has to go."""
    refuse_greenlet(f"{lock.name!r} is held")
    wire, op = lock._wire, lock.taking(None, must, start)
    try:
        wire.gates.join(waiter, start)
        wire.wait(waiter, _until(lock, start))
        lease = _handed(lock, thread_owner() if lock.thread_local else None, waiter)
        if lease is not None:
            return lease
        queued: Lease | None = wire.run(op, waiter)
        return queued
    except BaseException as error:  # also before the law has begun: nobody else would take the waiter out
        try:
            wire.torn(op, waiter, error)
        except BaseException as again:
            wire.torn(op, waiter, again)
            raise
        raise


def give(lock: Terms) -> None:
    """Release the lease of the calling thread. Errors are those of `Terms.releasing`."""
    wire, lease, op, connection = lock._wire, None, None, None
    try:
        check()
        owner = thread_owner() if lock.thread_local else None
        lease = lock.leases.get(owner)
        if lease is None or _odd(lease):
            wire.run(lock.releasing())
            return
        contended, told = lease.contended, None  # whether somebody waits elsewhere, as far as is known
        lease.parting = True
        if wire.crowd:
            what, told = wire.gates.release(lease, now()), BEHIND
            if what == PASSED:
                _gone(lock, owner, lease)
                return
            if what == GONE:  # by another thread, a moment ago
                lock.drop(lease)
                raise lock._lost("release")
            contended = contended or what == HAND_OVER
        sent = now()
        try:
            (connection,) = map(POP, () if wire.debts else (wire.idle,))
        except (IndexError, ValueError) as none:
            if by_handler(none):
                raise
            op = _release(lock, lease, contended)
            wire.run(op, told)
            return
        try:
            if contended:
                answer = _hand_over(connection, lease)
            else:
                answer = _ask(wire, connection, RELEASE, lease.key, lease.proof, 0)
        except BaseException as error:
            op = _asked(_release(lock, lease, contended), connection, sent)
            answer = connection.explain(op, error)
        finally:
            if connection.dead is None:
                wire.idle.append(connection)
        if answer == 1:
            _gone(lock, owner, lease)
            return
        if op is None:
            op = _asked(_release(lock, lease, contended), connection, sent)
            if contended and answer is not connection.busy:
                answer = [answer]
        if answer is STALE or answer is connection.busy:
            wire.run(op, told)
        else:
            wire.drive(op.rest(answer, now))
    except BaseException as error:  # it may strike anywhere; and who leaves a `with` does not try again
        try:
            _struck(lock, lock._me(), lease, op, error)
        except BaseException as again:
            _struck(lock, lock._me(), lease, op, again)
            raise
        raise


def _struck(lock: Terms, owner: Any, lease: Lease | None, op: Releasing | None, error: BaseException) -> None:
    """A release is carried out, whatever ends it that is no error of its own."""
    lease = lease or lock._of(owner)
    if lease is not None and not is_inherited(lease) and not own(error):
        lock._wire.interrupted(op or Releasing(lock, lease), error)


def _release(lock: Terms, lease: Lease, contended: bool) -> Releasing:
    op = Releasing(lock, lease)
    if contended:
        op.hand_over()
    return op


# asyncio


def task_owner(self: Any) -> Any:
    """Owner of what is acquired here: the running task. None: a lock of all tasks; or no loop runs, as in a log."""
    if not self.thread_local:
        return None
    pipe = self._wire.open_pipe
    try:
        # With the loop given: to look the running one up asks the system for the process id, until Python 3.12
        return current_task(pipe.turns.loop if pipe is not None and pipe.thread == threading.get_ident() else None)
    except RuntimeError:
        return None


def _open_pipe(lock: Terms) -> Any:
    """The connection's, if there is one and the running task may use it."""
    check()
    pipe = lock._wire.open_pipe
    return pipe if pipe is not None and pipe.thread == threading.get_ident() else None


async def aio_take(lock: Terms, must: bool) -> Lease | None:
    """Acquire on the lock's own terms, for a task. Outcome and errors are those of `Terms.taking`."""
    wire = lock._wire
    pipe = None if _special(lock) else _open_pipe(lock)
    if pipe is None or (task := current_task(pipe.turns.loop)) is None:  # None: another loop runs
        return await wire.run(lock.taking(None, must))  # type: ignore[no-any-return]
    start = now()
    if wire.crowd and (waiter := _behind(lock)) is not None:
        return await _aio_wait(lock, must, waiter, pipe.turns, task, start)
    token = new_token()
    turn = Turn().begin(pipe.turns)
    timer = op = None
    sent = start
    try:
        pipe.request(pipe.forms[ACQUIRE if lock.ms else ACQUIRE_ENDLESS], turn, lock.key, token, lock.ms)
        sent = pipe.sent
        try:
            if lock.blocking_timeout is not None:
                timer = pipe.turns.loop.call_later(lock.blocking_timeout, turn, LATE)
            answer = await turn
        finally:
            if timer is not None:
                timer.cancel()
        if answer is None:
            lease = _granted(lock, task if lock.thread_local else None, token, sent)
            if lease is not None:
                return lease
        waiter = None if answer is None else _behind(lock, answer, token)
        if waiter is None:
            op = _asked(lock.taking(token, must, start), pipe.link, sent)
            if answer is LATE:
                pipe.link.leave(op, sent)
            return await wire.go_on(op, answer)  # type: ignore[no-any-return]
    except BaseException as error:
        if op is None or not own(error):  # a handler of signals may raise also after the grant
            try:
                _forsake(lock, must, token, pipe, sent)
            except BaseException:  # struck once more
                _forsake(lock, must, token, pipe, sent)
                raise
        raise
    return await _aio_wait(lock, must, waiter, pipe.turns, task, start)


def _forsake(lock: Terms, must: bool, token: bytes, pipe: Any, sent: float) -> None:
    """An acquire whose task is gone."""
    op = lock.taking(token, must)
    op.forget()
    pipe.link.leave(op, sent)


async def _aio_wait(lock: Terms, must: bool, waiter: Any, turns: Any, task: Any, start: float) -> Lease | None:
    """Sleep until a lease passes to this waiter, or it is the first, or has to go."""
    wire, op, until, timer = lock._wire, lock.taking(None, must, start), _until(lock, start), None
    try:
        try:
            wire.gates.joined(waiter, start)
            if not waiter.called:
                wire.tick()
                waiter.wake = turn = Turn().begin(turns)
                timer = None if until is None else turns.loop.call_later(until - now(), turn, LATE)
                await turn
        finally:
            waiter.wake = None
            if timer is not None:
                timer.cancel()
        lease = _handed(lock, task if lock.thread_local else None, waiter)
        if lease is not None:
            return lease
        queued: Lease | None = await wire.run(op, waiter)
        return queued
    except BaseException as error:  # also before the law has begun: nobody else would take the waiter out
        try:
            wire.torn(op, waiter, error)
        except BaseException as again:
            wire.torn(op, waiter, again)
            raise
        raise


def _passed(lock: Terms, owner: Any, lease: Lease) -> Any:
    """Where others of this client wait: to the next of them. None: done; else the operation that is to be carried
    out."""
    what = lock._wire.gates.release(lease, now())
    if what == PASSED:
        _gone(lock, owner, lease)
        return None
    if what == GONE:  # by another thread, a moment ago
        lock.drop(lease)
        raise lock._lost("release")
    return _release(lock, lease, what == HAND_OVER)


def aio_enter_lease(self: Any) -> Any:
    """Acquire, and give the lease. Raises LockError when it could not be had within the lock's blocking_timeout."""
    return aio_take(self, True)


async def aio_leave(self: Any, kind: Any, error: BaseException | None, trace: Any) -> None:
    """Release. What goes wrong with it is put where `Terms.left` says, beside the error that ended the body."""
    try:
        await aio_give(self, True, error)
    except BaseException as struck:  # also as `aio_give` is entered
        _struck(self, self._me(), None, None, struck)
        raise


async def aio_give(
    lock: Terms, leaving: bool, error: BaseException | None, owner: Any = None, noted: Lease | None = None
) -> None:
    """Release the lease of an owner, None: of the task that awaits this; if it is the noted one. Errors are those of
    `Terms.releasing`; `leaving` a `with`, they go where `Terms.left` puts them, beside the `error` that ended its
    body."""
    wire, pipe, lease, op, sent = lock._wire, None, noted, None, 0.0
    try:
        pipe = _open_pipe(lock)
        task = None if pipe is None else current_task(pipe.turns.loop)
        if owner is None and lock.thread_local:
            owner = task
        if noted is not None and lock.leases.get(owner, noted) is not noted:  # by now it has another one, which stays
            raise lock._not_held("release")
        lease = None if task is None else lock.leases.get(owner)
        if lease is not None:
            lease.parting = True
        if lease is not None and wire.crowd and not _odd(lease):
            if (op := _passed(lock, owner, lease)) is not None:
                await wire.release(lock, owner, op, BEHIND, leaving, error)
            return
        if lease is None or _odd(lease) or lease.contended:
            await wire.release(lock, owner, None, None, leaving, error)
            return
        turn = Turn().begin(pipe.turns)
        sent = now()
        pipe.request(pipe.forms[RELEASE], turn, lease.key, lease.proof, 0)
        sent = pipe.sent
        answer = await turn
        if answer == 1:
            _gone(lock, owner, lease)
            return
        op, sent = _asked(Releasing(lock, lease), pipe.link, sent), 0.0
        await wire.release(lock, owner, op, answer, leaving, error)
    except BaseException as struck:
        try:
            _torn(lock, owner, lease, op, struck, pipe, sent)
        except BaseException as again:
            _torn(lock, owner, lease, op, again, pipe, sent)
            raise
        raise


def _torn(lock: Terms, owner: Any, lease: Any, op: Any, error: BaseException, pipe: Any, sent: float) -> None:
    """As `_struck`. sent: 0, or when a release was whose reply has not come."""
    if sent:
        pipe.link.leave(Releasing(lock, lease), sent)
    else:
        _struck(lock, owner or task_owner(lock), lease, op, error)
