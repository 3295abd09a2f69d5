"""The fast path of tasks: acquires that find their name free or wait in this process, and their releases.

`tasks.pyx` is the same, compiled. Any other case is handed on, with the answer as it came, to the operation that the
protocol has for it. Without this module all works, slower. Never here: what an answer means, or who is next.
"""

from __future__ import annotations

import asyncio
import threading
from asyncio import current_task
from typing import Any

from fastlock._errors import is_own
from fastlock._fastpath.threads import new_release, not_releasable
from fastlock._fork import check
from fastlock._protocol.acquire import LAST_TRY_SECONDS
from fastlock._protocol.base_lock import BaseLock, LockRelease
from fastlock._protocol.commands import Opcode, hand_over_template, made_here
from fastlock._protocol.lease import Lease, now
from fastlock._protocol.local_queue import ReleaseRoute
from fastlock._protocol.steps import Answer, Connection, Operation
from fastlock._protocol.waiters import Waiter
from fastlock._task_stream import TaskStream
from fastlock._transport.internals import Waker, Wakeup
from fastlock._transport.posted import PostedRelease


def _as_sent(op: Operation[Any], connection: Connection, sent: float) -> Any:
    op.request.connection, op.request.sent = connection, sent
    return op


def _until(lock: BaseLock, start: float) -> float | None:
    """When an acquire that began at `start` tries for the last time; None: it has no deadline."""
    return None if lock.blocking_timeout is None else start + lock.blocking_timeout - LAST_TRY_SECONDS


def _open_stream(lock: BaseLock) -> Any:
    """The stream of the connection, if there is one and the running task may use it."""
    check()
    stream = lock._transport.open_stream
    return stream if stream is not None and stream.thread == threading.get_ident() else None


async def _take_kept(lock: BaseLock, task: object) -> Lease | None:
    """Take the lease of the name, if the client keeps it, and let the loop run before, if it is its turn."""
    transport = lock._transport
    if task is None:
        transport.hear_recalls()
        return None
    if transport.turn_is_over(now()):
        await asyncio.sleep(0)
    kept: Lease | None = lock._take_kept(task if lock.thread_local else None, now())
    return kept


async def aio_acquire(lock: BaseLock, required: bool) -> Lease | None:
    """Acquire with the lock's own settings, for a task. Outcome and errors are those of `BaseLock._new_acquire`."""
    transport = lock._transport
    stream = _open_stream(lock)
    task = None if stream is None else current_task(stream.wakeups.loop)  # None: another loop runs
    if lock._keep_ms:
        if (kept := await _take_kept(lock, task)) is not None:
            return kept
        stream = _open_stream(lock)  # it may have broken meanwhile
    if stream is None or task is None or lock._needs_slow_path():
        return await transport.run(lock._new_acquire(None, required))  # type: ignore[no-any-return]
    start = now()
    queued = transport.queued_keys
    if (queued or transport.expected_keys or lock.fair) and (
        waiter := lock._waits_locally(None, None, queued)
    ) is not None:
        return await _aio_wait(lock, required, waiter, stream.wakeups, task, start)
    token = lock._fresh_token()
    wakeup = Wakeup().arm(stream.wakeups)
    timer = op = None
    sent = start
    try:
        stream.request(
            stream.templates[lock._opcode()],
            wakeup,
            lock._key,
            token,
            lock._lease_ms(token),
        )
        sent = stream.sent
        try:
            if lock.blocking_timeout is not None:
                timer = stream.wakeups.loop.call_later(lock.blocking_timeout, wakeup, Answer.DEADLINE_EXCEEDED)
            answer = await wakeup
        finally:
            if timer is not None:
                timer.cancel()
        if answer is None:
            lease = lock._granted(task if lock.thread_local else None, token, sent, now(), transport.queues)
            if lease is not None:
                return lease
        waiter = None if answer is None else lock._waits_locally(answer, token, transport.queued_keys)
        if waiter is None:
            op = _as_sent(lock._new_acquire(token, required, start), stream.connection, sent)
            if answer is Answer.DEADLINE_EXCEEDED:
                stream.connection.cancel(op.request, sent)
            return await transport.run(op, answer)  # type: ignore[no-any-return]
    except BaseException as error:
        if op is None or not is_own(error):  # a signal handler may raise also after the grant
            try:
                _cancel(lock, required, token, stream, sent)
            except BaseException:  # interrupted again
                _cancel(lock, required, token, stream, sent)
                raise
        raise
    return await _aio_wait(lock, required, waiter, stream.wakeups, task, start)


def _cancel(lock: BaseLock, required: bool, token: bytes, stream: TaskStream, sent: float) -> None:
    """Undo an acquire whose task was cancelled or interrupted."""
    op = lock._new_acquire(token, required)
    op.forget()
    stream.connection.cancel(op.request, sent)


async def _aio_wait(
    lock: BaseLock, required: bool, waiter: Waiter, wakeups: Waker, task: object, start: float
) -> Lease | None:
    """Sleep until a lease is handed to this waiter, or it is the first waiter, or its time is over."""
    transport, op, until, timer = lock._transport, lock._new_acquire(None, required, start), _until(lock, start), None
    try:
        try:
            transport.queues.enqueue_locked(waiter, start)
            if not waiter.woken:
                transport.sweep()
                waiter.on_wake = wakeup = Wakeup().arm(wakeups)
                timer = (
                    None if until is None else wakeups.loop.call_later(until - now(), wakeup, Answer.DEADLINE_EXCEEDED)
                )
                await wakeup
        finally:
            waiter.on_wake = None
            if timer is not None:
                timer.cancel()
        lease = lock._handed_over(task if lock.thread_local else None, waiter, now(), transport.queues)
        if lease is not None:
            return lease
        queued: Lease | None = await transport.run(op, waiter)
        return queued
    except BaseException as error:  # also before the operation has begun: nothing else would remove the waiter
        try:
            transport.cancel_wait(op, waiter, error)
        except BaseException as again:
            transport.cancel_wait(op, waiter, again)
            raise
        raise


def _post_release(lock: BaseLock, stream: TaskStream, lease: Lease) -> bool:
    """Send a release that nobody waits for. False: that takes the slow path."""
    transport, connection = lock._transport, stream.connection
    # Without the script the server refuses it
    if transport.pending_undos or connection.error is not None or not connection.knows_release:
        return False
    if not_releasable(lease) or lease._posted or lease._release_unknown or now() >= lease._deadline:
        return False
    if not made_here(lease._raw_token):
        return False
    lease._posted = True
    lease._releases += 1
    lease._lost_end = lease._latest_end()
    posted = PostedRelease(transport, connection, lease, lock._on_lost, lease._lost_end)
    template = hand_over_template(connection.transport.impl.Template, lease._key)
    stream.request(template, posted, b"", lease._raw_token, 0)
    transport.unconfirmed[lease._key] = posted  # now: no reply comes before the loop runs again
    return True


def _release_to_next(lock: BaseLock, owner: object, lease: Lease) -> Any:
    """Release where others of this client wait: to the next of them. Returns None where that is done, else the
    operation that is to be carried out."""
    route = lock._transport.queues.release(lease, now())
    if lock._released_locally(owner, lease, route):
        return None
    return new_release(lock, lease, route == ReleaseRoute.SCRIPT)


def aio_enter_lease(self: Any) -> Any:
    """Acquire, and return the lease. Raises LockError when it was not granted within the lock's blocking_timeout."""
    return aio_acquire(self, True)


async def aio_exit_lock(self: Any, kind: object, error: BaseException | None, trace: object) -> None:
    """Release. An error of the release is put where `BaseLock._report_release_error` says, beside the error that ended
    the body of the `with`."""
    try:
        await aio_release(self, True, error)
    except BaseException as caught:  # also raised as `aio_release` is entered
        self._transport.finish_release(self, self._owner(), None, None, caught)
        raise


async def aio_release(
    lock: BaseLock, leaving: bool, error: BaseException | None, owner: object = None, noted: Lease | None = None
) -> None:
    """Release the lease of an owner (None: of the task that awaits this), if that is the `noted` one or none was noted.
    Errors are those of `BaseLock._new_release`. Where this is `leaving` a `with`, they go where
    `BaseLock._report_release_error` puts them, beside the `error` that ended its body."""
    transport, stream, lease, op, sent = lock._transport, None, noted, None, 0.0
    try:
        stream = _open_stream(lock)
        task = None if stream is None else current_task(stream.wakeups.loop)
        if owner is None and lock.thread_local:
            owner = task
        if noted is not None and lock._leases.get(owner, noted) is not noted:  # the owner has another now, which stays
            raise lock._not_held("release")
        lease = None if task is None else lock._leases.get(owner)
        if lease is not None:
            lease._releasing = True
        if lease is not None and transport.queued_keys and not not_releasable(lease):
            if (op := _release_to_next(lock, owner, lease)) is not None:
                await transport.release(lock, owner, op, Answer.ASK_SERVER, leaving, error)
            return
        if lease is not None and not lock.confirm_release and _post_release(lock, stream, lease):
            lock._released(owner, lease)
            return
        if lease is None or not_releasable(lease) or lease._contended or not lock.confirm_release:
            await transport.release(lock, owner, None, None, leaving, error)
            return
        wakeup = Wakeup().arm(stream.wakeups)
        sent = now()
        lease._releases += 1
        stream.release(stream.templates[Opcode.RELEASE], wakeup, lease._key, lease._raw_token)
        sent = stream.sent
        answer = await wakeup
        if answer == 1:
            lock._released(owner, lease)
            return
        op, sent = _as_sent(LockRelease(lock, lease, True), stream.connection, sent), 0.0
        answer = Answer.ASK_SERVER if answer is None else answer
        await transport.release(lock, owner, op, answer, leaving, error)
    except BaseException as caught:
        try:
            _undo_interrupted(lock, owner, lease, op, caught, stream, sent)
        except BaseException as again:
            _undo_interrupted(lock, owner, lease, op, again, stream, sent)
            raise
        raise


def _undo_interrupted(
    lock: BaseLock,
    owner: object,
    lease: Lease | None,
    op: LockRelease | None,
    error: BaseException,
    stream: TaskStream | None,
    sent: float,
) -> None:
    """As `Transport.finish_release`. sent: when a release was sent whose reply has not come; 0: there is none."""
    if sent and stream is not None and lease is not None:
        stream.connection.cancel(LockRelease(lock, lease, True).request, sent)
    else:
        lock._transport.finish_release(lock, owner or lock._owner(), lease, op, error)
