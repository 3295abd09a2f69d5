"""The fast path of threads: acquires that find their name free or wait in this process, and their releases.

Compiled from this same text where there is a compiler: a thread that holds the interpreter keeps the others from
reading their replies, so each microsecond counts twice. Every decision is the protocol's (`local_queue.py`,
`base_lock.py`); any other case is handed on, with the answer as it came, to the operation that the protocol has for it.
Without this module all works, slower. Never here: what an answer means, or who is next.
"""

from __future__ import annotations

import math
import sys
from typing import Any

from fastlock._fork import check
from fastlock._native import EVENTLET, GEVENT, in_event_loop, refuse_greenlet
from fastlock._protocol.acquire import LAST_TRY_SECONDS
from fastlock._protocol.base_lock import BaseLock, LockAcquire, LockRelease
from fastlock._protocol.commands import Opcode, is_enter_reply, made_here
from fastlock._protocol.lease import ENDED, Lease, is_inherited
from fastlock._protocol.local_queue import ReleaseRoute
from fastlock._protocol.steps import Answer, Operation, QueueRequest, RawCommands
from fastlock._protocol.waiters import Waiter
from fastlock._stream_errors import by_handler
from fastlock._transport.base import MOST_UNREAD, Transport
from fastlock._transport.owners import thread_owner
from fastlock._transport.parker import Parker, check_signals, clock, enqueue, popped
from fastlock._transport.parker import release as release_locally
from fastlock._transport.sync_connection import Connection
from fastlock._transport.waiting import (
    idle_connections,
    park,
    post_confirmation,
    post_release,
    push_connection_of,
    read_confirmation,
    read_now,
    send_command,
    send_enter,
    send_hand_over,
    spin_seconds,
    take_turn,
    wait,
)
from fastlock._transport.writing import STREAM_ERRORS

_MODULES = sys.modules
_NOTHING = RawCommands([])  # a request that needs no undo
_INFINITE: float = math.inf
# Typed, where this is compiled
_ENDED: float = ENDED
_LAST_TRY_SECONDS: float = LAST_TRY_SECONDS
_RETRY_ELSEWHERE: Answer = Answer.RETRY_ELSEWHERE  # to read an attribute of an enum takes 800 instructions
_NOT_ASKED: Answer = Answer.NOT_ASKED
_ASK_SERVER: Answer = Answer.ASK_SERVER
_RELEASE: int = Opcode.RELEASE
_SCRIPT: int = ReleaseRoute.SCRIPT


# What `with` calls. Where they are compiled, no signal handler runs between the grant and the body of the `with`, nor
# between that body and the release.


def enter_lease(self: Any) -> Any:
    """Acquire, and return the lease. Raises LockError when it was not granted within the lock's blocking_timeout."""
    return acquire(self, True)


def enter_lock(self: Any) -> Any:
    """Acquire, and return the lock. Raises LockError when it was not granted within the lock's blocking_timeout."""
    acquire(self, True)
    return self


def exit_lock(self: Any, kind: object, error: BaseException | None, trace: object) -> None:
    """Release. An error of the release is put where `BaseLock._report_release_error` says, beside the error that ended
    the body of the `with`."""
    if self._owners is not None and self._leave_inner(self._leases.get(thread_owner())):
        return  # before the `try`: what is raised from here on must not release what the outer `with` holds
    try:
        release(self)
    except BaseException as problem:
        self._exit_failed(error, problem)


def acquire(lock: BaseLock, required: bool) -> Any:
    """Acquire with the lock's own settings, for a thread. Outcome and errors are those of `BaseLock._new_acquire`."""
    check()
    if (lock._keep_ms or lock._owners is not None) and (held := _at_hand(lock)) is not None:
        return held
    transport, sent = lock._transport, clock()
    waiter: Waiter | None = None
    if transport.queued_keys or transport.expected_keys or lock.fair:
        transport.queues.sweep(sent)
        waiter = lock._waits_locally(None, None, transport.queued_keys)
        if waiter is not None and (lock._key in transport.queued_keys or not _greenlets()):
            return _wait(lock, required, waiter, sent)
        if waiter is not None:  # a greenlet may join, but not wait
            return transport.run(lock._new_acquire(None, required))
    if not idle_connections(transport) or transport.pending_undos or lock._needs_slow_path():
        return transport.run(lock._new_acquire(None, required))
    token, op = lock._fresh_token(), None
    try:
        (connection,) = popped(transport.idle)  # the one that was used last, whose memory is warm
    except (IndexError, ValueError) as none:
        if by_handler(none):
            raise
        connection = None
    if connection is None:
        return transport.run(lock._new_acquire(None, required))
    try:
        try:
            if transport.unconfirmed and _overtakes(transport, connection, lock._key):
                answer = connection.busy
            else:
                ms = lock._lease_ms(token)
                answer = _ask(transport, connection, lock._opcode(), lock._key, token, ms, lock.blocking_timeout)
        except BaseException as error:
            op = _as_sent(lock._new_acquire(token, required, sent), connection, sent)
            answer = connection.classify_error(op.request, error)
        finally:
            if connection.error is None:
                transport.idle.append(connection)
        if answer is None:
            owner = thread_owner() if lock.thread_local else None
            lease = lock._granted(owner, token, sent, clock(), transport.queues)
            if lease is not None:
                check_signals()  # a handler that raises for a signal since then raises here, where the grant is undone
                return lease
        elif op is None:
            waiter = lock._waits_locally(answer, token, transport.queued_keys)
        if waiter is None:
            if op is None:
                op = _as_sent(lock._new_acquire(token, required, sent), connection, sent)
            if answer is _RETRY_ELSEWHERE or answer is connection.busy:
                return transport.run(op)
            return transport.run(op, answer)
    except BaseException as error:  # a signal handler may raise anywhere, also after the grant; and again in here
        try:
            transport.undo_interrupted(op or _as_sent(lock._new_acquire(token, required), connection, sent), error)
        except BaseException as again:
            transport.undo_interrupted(op or _as_sent(lock._new_acquire(token, required), connection, sent), again)
            raise
        raise
    return _wait(lock, required, waiter, sent)


def _at_hand(lock: BaseLock) -> Any:
    """The lease that the caller gets without asking the server, or None."""
    if not lock._keep_ms:
        return lock._reenter()
    time = take_turn(lock._transport)
    return lock._take_kept(thread_owner() if lock.thread_local else None, time)


def _overtakes(transport: Transport, connection: Connection, key: bytes) -> bool:
    """Whether a release of the name that nobody waits for goes over another connection."""
    delivery = transport.unconfirmed.get(key)
    return delivery is not None and delivery.carrier is not connection


def _ask(
    transport: Transport, connection: Connection, opcode: int, key: bytes, token: bytes, ms: int, limit: float | None
) -> Any:
    timeout = connection.reply_timeout
    if limit is not None and limit < timeout:
        timeout = limit
    return send_command(connection.stream, opcode, key, token, ms, timeout, spin_seconds(transport))


def _as_sent(op: Operation[Any], connection: Connection, sent: float) -> Any:
    op.request.connection, op.request.sent = connection, sent
    return op


def _wait(lock: BaseLock, required: bool, waiter: Waiter, start: float) -> Any:
    """Sleep until a lease is handed to this waiter, or it is the first and is granted one, or its time is over."""
    if _greenlets():
        refuse_greenlet(f"{lock.name!r} is held")
    transport, op = lock._transport, None
    parker = transport.parking.parker()
    queue: Any = None
    owner = thread_owner() if lock.thread_local else None
    until = _INFINITE if lock.blocking_timeout is None else start + lock.blocking_timeout - _LAST_TRY_SECONDS
    try:
        waiter.on_wake = parker
        enqueue(transport.queues, waiter, start)
        queue = waiter.queue
        if in_event_loop():
            transport.warn_in_coroutine(lock.name)
        if push_connection_of(transport) is None:
            transport.wait(waiter, None if until == _INFINITE else until)
        elif queue.first() is not waiter:
            park(transport, waiter, parker, until)
        lease = _handed_over(lock, owner, waiter)
        if lease is None:
            op = _enter_until_granted(lock, required, waiter, start, until)
            lease = _handed_over(lock, owner, waiter)
        if lease is not None:
            check_signals()
            return lease
        return transport.run(op or lock._new_acquire(None, required, start), waiter)
    except BaseException as error:  # also before the protocol has begun: nothing else would remove the waiter
        try:
            transport.cancel_wait(op or lock._new_acquire(None, required), waiter, error)
        except BaseException as again:
            transport.cancel_wait(op or lock._new_acquire(None, required), waiter, again)
            raise
        raise


def _greenlets() -> bool:
    """Whether callers may be greenlets, as a library is loaded that has them."""
    return GEVENT in _MODULES or EVENTLET in _MODULES


def _handed_over(lock: BaseLock, owner: object, waiter: Waiter) -> Lease | None:
    """As `BaseLock._handed_over`; where leases change hands fast, it also wakes the next waiter early."""
    transport = lock._transport
    lease = lock._handed_over(owner, waiter, clock(), transport.queues)
    queue: Any = waiter.queue
    if lease is not None and queue.rapid:
        following = queue.first()
        if following is not None and type(following.on_wake) is Parker:
            parker = following.on_wake
            parker.prewake()
    return lease


def _enter_until_granted(lock: BaseLock, required: bool, waiter: Waiter, start: float, until: float) -> Any:
    """Join by the queue's entry, listen, and look when woken, as long as all goes well.

    Returns the protocol's operation that is to judge the last reply, or None where that was judged.
    """
    transport = lock._transport
    queue: Any = waiter.queue
    while (connection := push_connection_of(transport)) is not None:
        if queue.stale or queue.error is not None or waiter.lease is not None:
            break
        if waiter.key in transport.queues.kept:  # since it was enqueued, or it is fair: the slow path releases it first
            break
        sent = clock()
        if sent >= until or queue.must_verify(waiter, sent):
            break
        if queue.granted and (believed := queue.believe(waiter, sent)) is not None:
            post_confirmation(transport, connection, queue, believed._confirmation)
            break
        if transport.queues.may_enter_now(waiter, sent):
            joins = queue.is_to_join(waiter)
            try:
                reply = send_enter(transport, connection, queue, waiter, joins, until + _LAST_TRY_SECONDS - sent)
            except BaseException as error:
                if not isinstance(error, STREAM_ERRORS):
                    # As in `Acquire._enter`: it may be executed later
                    queue.stale = (*queue.stale, connection.session)
                    connection.classify_error(_NOTHING, error)  # which raises it at once, and sends no undo
                op = lock._new_acquire(None, required, start)
                request = _sent_enter(op, waiter, joins, connection, sent)
                answer = connection.classify_error(request, error)
                if answer is _RETRY_ELSEWHERE:  # nothing was sent
                    queue.joined = not joins
                else:
                    op.entered = request, answer
                return op
            if reply is connection.busy:
                queue.joined = not joins
                break
            # Where the lease had expired before the reply came, the protocol undoes the grant
            if not is_enter_reply(reply) or queue.judge(waiter, reply, sent, clock()) is not None:
                op = lock._new_acquire(None, required, start)
                op.entered = _sent_enter(op, waiter, joins, connection, sent), [reply]
                return op
            granted: Any = waiter.lease
            if granted is not None:
                break
        wait(transport, waiter, until)
    return None


def _sent_enter(op: LockAcquire, waiter: Waiter, joins: bool, connection: Connection, sent: float) -> QueueRequest:
    """The request as the protocol's operation would have sent it."""
    request = op.enter_request(waiter, joins)
    request.sent, request.connection = sent, connection
    return request


def release(lock: BaseLock) -> None:
    """Release the lease of the calling thread. Errors are those of `BaseLock._new_release`."""
    if lock._owners is not None and lock._leave_inner(lock._leases.get(thread_owner())):
        return
    transport, op = lock._transport, None
    lease: Lease | None = None
    try:
        _begin(lock)
        owner = thread_owner() if lock.thread_local else None
        lease = lock._leases.get(owner)
        if lease is None or not_releasable(lease):
            transport.run(lock._new_release())
            return
        # Whether other clients wait, as far as is known; and ASK_SERVER, once the local queue was asked
        contended, told, lease._releasing = lease._contended, _NOT_ASKED, True
        read_confirmation(transport, lease)
        if transport.queued_keys:
            route, told = release_locally(transport.queues, lease, clock()), _ASK_SERVER
            if lock._released_locally(owner, lease, route):
                return
            contended = contended or route == _SCRIPT
        sent, at_once = clock(), lock.confirm_release and not transport.pending_undos
        try:
            (connection,) = popped(idle_connections(transport) if at_once else [])
        except (IndexError, ValueError) as none:
            if by_handler(none):
                raise
            connection = None
        if connection is None:  # not in the handler: what is raised has no such context
            if lock.confirm_release or not _posted(lock, owner, lease, sent):
                transport.run(new_release(lock, lease, contended), told)
            return
        lease._releases += 1
        try:
            if contended:
                answer = send_hand_over(transport, connection, lease._key, lease._raw_token)
            else:
                answer = _ask(transport, connection, _RELEASE, lease._key, lease._raw_token, 0, None)
        except BaseException as error:
            op = _sent_release(lock, lease, contended, connection, sent)
            answer = connection.classify_error(op.request, error)
        finally:
            if connection.error is None:
                transport.idle.append(connection)
        if answer == 1:
            lock._released(owner, lease)
            return
        if op is None:
            op = _sent_release(lock, lease, contended, connection, sent)
            if contended and answer is not connection.busy:
                answer = [answer]
        transport.run(op, told if answer is _RETRY_ELSEWHERE or answer is connection.busy else answer)
    except BaseException as error:  # a signal handler may raise anywhere, and a `with` is left only once
        try:
            transport.finish_release(lock, lock._owner(), lease, op, error)
        except BaseException as again:
            transport.finish_release(lock, lock._owner(), lease, op, again)
            raise
        raise


def _begin(lock: BaseLock) -> None:
    """What a release does before it looks up the caller's lease: let a recall be heard, and notice a fork."""
    if lock._keep_ms:
        take_turn(lock._transport)
    check()


def _posted(lock: BaseLock, owner: object, lease: Lease, time: float) -> bool:
    """Whether the lease was released by a script that nobody waits for. False: that takes the slow path."""
    transport = lock._transport
    if transport.pending_undos or transport.closed or lease._release_unknown or time >= lease._deadline:
        return False
    try:
        (connection,) = popped(transport.idle)
    except (IndexError, ValueError) as none:
        if by_handler(none):
            raise
        return False
    try:
        # Without the script the server refuses it, and nobody may read that; others may listen on the push connection
        if not connection.knows_release or connection is transport.push_connection or not made_here(lease._raw_token):
            return False
        if connection.stream.pending:  # of earlier releases: they are told, and sent again, no later than this one
            read_now(connection)
        if connection.stream.pending >= MOST_UNREAD or not connection.stream.usable() or lease._posted:
            return False
        lease._posted = True  # no call since the check: of two threads that release it one waits
        lease._releases += 1
        lease._lost_end = lease._latest_end()
        if not post_release(transport, connection, lease, lock._on_lost):
            lease._posted, lease._lost_end = False, _ENDED
            lease._releases -= 1
            return False
    finally:
        if connection.error is None:
            transport.idle.append(connection)
    lock._released(owner, lease)
    return True


def not_releasable(lease: Lease) -> bool:
    """Whether the caller cannot release the lease: it is the parent process's, or was released already."""
    return is_inherited(lease) or lease._deadline == _ENDED


def _sent_release(lock: BaseLock, lease: Lease, contended: bool, connection: Connection, sent: float) -> Any:
    """The release that the fast path has sent, as the protocol's operation would have sent it."""
    return _as_sent(new_release(lock, lease, contended, True), connection, sent)


def new_release(lock: BaseLock, lease: Lease, contended: bool, counted: bool = False) -> LockRelease:
    op = LockRelease(lock, lease, counted)
    if contended:
        op.hand_over()
    return op
