# cython: language_level=3, binding=True, auto_pickle=False, wraparound=False, nonecheck=True
"""The fast path, compiled: an acquire that finds its name free, and a release that finds it held: nearly every one.

`fastpath.py` is the same in Python and says what may live here; names, parameters and behaviour are the same, kept so
by the tests of locks, which run on both. A thread that holds the interpreter keeps the others from reading their
replies, and a thousand tasks share one: here every microsecond counts twice. Here is also the way of a thread that
waits and is granted a lease (`_wait_as_first`, `_enter_until_granted`), for which the fallback goes through
`SyncTransport.wait` and the protocol. How threads park: `parker.pxi`. Tasks: `tasks.pxi`.
"""

import sys
import threading
from asyncio import current_task, tasks
from collections import OrderedDict

from fastlock._errors import ClientClosedError, RedisError, is_own
from fastlock._protocol.base_lock import LockRelease
from fastlock._native import EVENTLET as _EVENTLET, GEVENT as _GEVENT, allocate_lock as _allocate_lock
from fastlock._native import refuse_greenlet
from fastlock._protocol.acquire import LAST_TRY_SECONDS as _LAST_TRY_SECONDS, is_enter_reply
from fastlock._protocol.commands import Opcode, enter, hand_over
from fastlock._protocol.lease import ENDED as _ENDED, _BOOTTIME, now as _now
from fastlock._protocol.local_queue import ReleaseRoute
from fastlock._protocol.steps import Answer, RawCommands
from fastlock._transport import sync as _sync
from fastlock._transport.sync_connection import SPIN_SECONDS as _SPIN_SECONDS, STREAM_ERRORS as _STREAM_ERRORS

cimport cython
from cpython.exc cimport PyErr_CheckSignals
from cpython.pythread cimport PyThread_get_thread_ident
from cpython.ref cimport Py_DECREF, Py_INCREF, PyObject
from libc.math cimport INFINITY
from posix.time cimport clock_gettime, timespec
from posix.types cimport clockid_t

from fastlock._transport.base cimport Transport
from fastlock._core cimport Mutex, Stream, Template, PendingReply
from fastlock._fork cimport check, forked
from fastlock._protocol.local_queue cimport LocalQueue, LocalQueues, Waiter
from fastlock._protocol.lease cimport Lease, is_inherited, new_token
from fastlock._protocol.base_lock cimport BaseLock
from fastlock._transport.wakeups cimport Wakeup, WakeupQueue

cdef extern from "Python.h":
    ctypedef int PySendResult
    PySendResult PYGEN_RETURN
    PySendResult PYGEN_NEXT
    ctypedef PySendResult (*sendfunc)(PyObject *, PyObject *, PyObject **)
    ctypedef PyObject *(*iternextfunc)(PyObject *)
    PySendResult PyIter_Send(object iterator, object value, PyObject **result) except -1
    ctypedef struct PyAsyncMethods:
        sendfunc am_send
    ctypedef struct PyTypeObject:
        PyAsyncMethods *tp_as_async
        iternextfunc tp_iternext
    void PyErr_SetObject(object kind, object value)

cdef object STREAM_ERRORS = _STREAM_ERRORS, now = _now
cdef object RETRY_ELSEWHERE = Answer.RETRY_ELSEWHERE, WAIT_LOCALLY = Answer.WAIT_LOCALLY
cdef object DEADLINE_EXCEEDED = Answer.DEADLINE_EXCEEDED
cdef int LOCAL = ReleaseRoute.LOCAL, SCRIPT = ReleaseRoute.SCRIPT, NOT_HELD = ReleaseRoute.NOT_HELD
cdef bint BOOTTIME = _BOOTTIME is not None  # else the clock is one that only Python reads
cdef clockid_t CLOCK = _BOOTTIME or 0
cdef object allocate_lock = _allocate_lock
cdef dict MODULES = sys.modules
cdef str EVENTLET = _EVENTLET, GEVENT = _GEVENT
cdef dict SYNC = _sync.__dict__
cdef object INTERRUPTED = RawCommands([])  # a request of which nothing is to be undone
# Until 3.12 `current_task` is Python, which asks this
cdef object running_task = current_task if sys.version_info >= (3, 12) else tasks._current_tasks.get
cdef double ENDED = _ENDED, SPIN_SECONDS = _SPIN_SECONDS, LAST_TRY_SECONDS = _LAST_TRY_SECONDS
cdef Py_ssize_t ACQUIRE = Opcode.ACQUIRE, ACQUIRE_ENDLESS = Opcode.ACQUIRE_ENDLESS, RELEASE = Opcode.RELEASE
cdef Py_ssize_t MAX_SHARED_TIMEOUTS = 16  # of a client at most: who gives yet another time has a timer of its own
cdef object _thread = threading.local()


include "parker.pxi"


cpdef thread_owner():
    """Stands for the calling thread. Its number will not do: the next thread gets it again."""
    try:
        return _thread.owner
    except AttributeError:
        _thread.owner = owner = object()
        return owner


cdef double _time() except -1:
    """As `now`, a fifth of a microsecond faster."""
    cdef timespec time
    if not BOOTTIME:
        return now()
    clock_gettime(CLOCK, &time)
    return time.tv_sec + time.tv_nsec * 1e-9


cdef int _prewake(Waiter waiter) except -1:
    """The next one: its turn comes before it is awake."""
    if waiter is not None and type(waiter.on_wake) is _Parker:
        (<_Parker>waiter.on_wake).prewake()
    return 0


cdef Lease _handed_over(BaseLock lock, owner, Waiter waiter):
    """As `BaseLock._handed_over`, which has the next waiter woken early where leases change hands fast."""
    cdef Lease lease = lock._handed_over(owner, waiter, _time(), (<Transport>lock._transport).queues)
    if lease is not None and waiter.queue.rapid:
        _prewake(waiter.queue.first())
    return lease


cdef bint _not_releasable(Lease lease) except -1:
    """Whether it is no lease of the caller's any more: its parent's, or let go of already."""
    return is_inherited(lease) or lease._deadline == ENDED


cdef _as_sent(op, connection, double sent):
    op.connection = connection
    op.sent = sent
    return op


cdef _idle_connection(Transport transport):
    if not transport.idle or transport.pending_undos:
        return None
    return transport.idle.pop()  # the latest used, whose memory is warm


cdef double _spin(Transport transport) except -1:
    cdef Py_ssize_t busy = len(transport.connections) - len(transport.idle) - transport.push_connection_lent
    return SPIN_SECONDS if busy <= 1 else 0.0


cdef _ask(Transport transport, connection, Py_ssize_t opcode, bytes key, bytes token, long long ms, limit):
    cdef double timeout = connection.reply_timeout
    if limit is not None:
        timeout = min(<double>limit, timeout)
    cdef double spin = _spin(transport)
    cdef tuple templates
    stream = connection.stream
    if type(stream) is Stream:
        templates = (<Stream>stream).templates
        return (<Stream>stream).round_trip(<Template>templates[opcode], key, token, ms, timeout, spin)
    return stream.round_trip(stream.templates[opcode], key, token, ms, timeout, spin)


cdef _hand_over(Transport transport, connection, Lease lease):
    """As `_ask`: a release to who waits elsewhere. It does not poll: the server tells that one after us, and both of
    them need a processor."""
    cdef double timeout = connection.reply_timeout
    cdef LocalQueue queue
    cdef Template template
    stream = connection.stream
    if type(stream) is not Stream:
        parts = hand_over(lease._key, lease._raw_token)
        return stream.round_trip(connection.impl.Template(*parts), b"", b"", 0, timeout, 0.0)
    queue = transport.queued_keys.get(lease._key)
    template = Template(*hand_over(lease._key)) if queue is None else _cached_template(queue, hand_over, ())
    return (<Stream>stream).round_trip(template, b"", lease._raw_token, 0, timeout, 0.0)


cdef Template _cached_template(LocalQueue queue, words, tuple more):
    """A command for the name of a gate, kept for the next time: to encode one takes longer than to send it."""
    cdef dict templates = queue.templates
    if templates is None:
        queue.templates = templates = {}
    template = templates.get((words, more))
    if template is None:
        templates[words, more] = template = Template(*words(queue.key, *more))
    return template


# What `with` calls. As they are compiled, no signal's handler runs between the grant and the body that is left by a
# release, nor between that and the release.


def enter_lease(BaseLock self not None):
    """Acquire, and give the lease. Raises LockError when it could not be had within the lock's blocking_timeout."""
    return acquire(self, True)


def enter_lock(BaseLock self not None):
    """Acquire. Raises LockError when it could not be had within the lock's blocking_timeout."""
    acquire(self, True)
    return self


def exit_lock(BaseLock self not None, kind, error, trace):
    """Release. What goes wrong with it is put where `BaseLock.left` says, beside the error that ended the body."""
    try:
        release(self)
    except RedisError as problem:
        self._report_release_error(error, problem)


cpdef acquire(BaseLock lock, bint required):
    """Acquire on the lock's own terms, for a thread. Outcome and errors are those of `BaseLock._new_acquire`."""
    cdef double sent = _time()
    cdef bytes token
    cdef Lease lease
    cdef Py_ssize_t opcode = ACQUIRE if lock._ms else ACQUIRE_ENDLESS
    cdef Transport transport = lock._transport
    if forked:
        check()
    if transport.queued_keys:
        transport.queues.sweep(sent)
        if (waiter := lock._waits_locally(None, None, transport.queued_keys)) is not None:
            return _wait(lock, required, waiter, sent)
    connection = None if lock._needs_slow_path() else _idle_connection(transport)
    if connection is None:
        return transport.run(lock._new_acquire(None, required))
    op = None
    token = new_token()
    try:
        try:
            answer = _ask(transport, connection, opcode, lock._key, token, lock._ms, lock.blocking_timeout)
        except BaseException as error:
            op = _as_sent(lock._new_acquire(token, required, sent), connection, sent)
            answer = connection.classify_error(op, error)
        finally:
            if connection.error is None:
                transport.idle.append(connection)
        if answer is None:
            lease = lock._granted(
                thread_owner() if lock.thread_local else None, token, sent, _time(), transport.stats
            )
            if lease is not None:
                PyErr_CheckSignals()  # what has struck since is raised here, where it is undone, not behind our back
                return lease
        waiter = lock._waits_locally(answer, token, transport.queued_keys) if op is None and answer is not None else None
        if waiter is None:
            if op is None:
                op = _as_sent(lock._new_acquire(token, required, sent), connection, sent)
            if answer is RETRY_ELSEWHERE or answer is connection.busy:
                return transport.run(op)
            return transport.drive(op.rest(answer, now))
    except BaseException as error:  # it may strike anywhere, also after the grant; and once more, in here
        try:
            transport.undo_interrupted(op or _as_sent(lock._new_acquire(token, required), connection, sent), error)
        except BaseException as again:
            transport.undo_interrupted(op or _as_sent(lock._new_acquire(token, required), connection, sent), again)
            raise
        raise
    return _wait(lock, required, waiter, sent)


cdef double _until(BaseLock lock, double start) except -1:
    """When to look for the last time."""
    return INFINITY if lock.blocking_timeout is None else start + <double>lock.blocking_timeout - LAST_TRY_SECONDS


cdef _wait(BaseLock lock, bint required, Waiter waiter, double start):
    """Sleep until a lease passes to this waiter, or it is the first and is granted one, or has to go."""
    cdef Lease lease = None
    cdef Transport transport = lock._transport
    cdef double until = _until(lock, start)
    if GEVENT in MODULES or EVENTLET in MODULES:
        refuse_greenlet(f"{lock.name!r} is held")
    owner = thread_owner() if lock.thread_local else None
    cdef _Parker parker = _Parker.__new__(_Parker)
    op = None
    try:
        waiter.on_wake = parker
        _join(transport.queues, waiter, start)
        if _push_connection_of(transport) is None:
            transport.wait(waiter, None if until == INFINITY else until)
        elif waiter.queue.first() is not waiter:
            _park_behind(transport, waiter, parker, until)
        lease = _handed_over(lock, owner, waiter)
        if lease is None:
            op = _enter_until_granted(transport, lock, required, waiter, start, until)
            lease = _handed_over(lock, owner, waiter)
        if lease is not None:
            PyErr_CheckSignals()
            return lease
        return transport.run(op or lock._new_acquire(None, required, start), waiter)
    except BaseException as error:  # also before the law has begun: nobody else would take the waiter out
        try:
            transport.cancel_wait(op or lock._new_acquire(None, required), waiter, error)
        except BaseException as again:
            transport.cancel_wait(op or lock._new_acquire(None, required), waiter, again)
            raise
        raise


cdef int _join(LocalQueues queues, Waiter waiter, double now) except -1:
    """As `LocalQueues.join`."""
    cdef Mutex mutex = queues.mutex
    mutex.lock()
    try:
        queues.enqueue_locked(waiter, now)
    finally:
        mutex.unlock()
    return 0


cdef int _release_locally(LocalQueues queues, Lease lease) except -1:
    """As `LocalQueues.release`."""
    cdef Mutex mutex = queues.mutex
    cdef int what
    mutex.lock()
    try:
        what = queues.release_locked(lease, _time())
        wake, queues.pending_wake = queues.pending_wake, None
    finally:
        mutex.unlock()
    if type(wake) is _Parker:
        (<_Parker>wake).unpark(not queues.rapid)
    elif wake is not None:
        wake(None)
    return what


cdef _push_connection_of(Transport transport):
    """The connection on which messages come, if it is there and nothing is in the way."""
    push_connection = transport.push_connection
    if push_connection is None or push_connection.error is not None or not push_connection.subscribed:
        return None
    if not transport.push_connection_lent or transport.pending_undos or transport.closed:
        return None
    return push_connection if type(push_connection.stream) is Stream else None


cdef double _at(double time, double until) except -1:
    """When a sleep from now on is over in any case."""
    return min(time + <double>SYNC["RECHECK_SECONDS"], until)


cdef int _park_behind(Transport transport, Waiter waiter, _Parker parker, double until) except -1:
    """The sleep of one who is not the first, from when it joined."""
    try:
        if not waiter.woken and not transport.closed:
            parker.park(_at(_time(), until))
    finally:
        waiter.on_wake, waiter.woken = None, False
    if transport.closed:
        raise ClientClosedError("this client was closed")
    return 0


cdef int _listen(push_connection, PendingReply pending_reply, wake, double seconds) except -1:
    """As `Connection.listen`. Between a message and the question that follows it no Python is run: the interpreter is
    cold then, as all else, and most of the time goes by waiting for memory."""
    cdef Stream stream = push_connection.stream
    cdef double end = _time() + seconds
    try:
        stream.listen(pending_reply)
        leads = stream.lead(pending_reply, wake)
        PyErr_CheckSignals()  # of one that has struck, no sleep that begins now would tell
        if not leads and not pending_reply.ready:
            wake.acquire(timeout=max(0.0, seconds))
        if stream.leads(pending_reply):
            stream.exchange(pending_reply, max(0.0, end - _time()), 0.0)
    except STREAM_ERRORS as error:
        push_connection.fail(error)
    finally:  # no signal can come between, as in Python
        pending_reply.abandoned = True
        stream.unlisten(pending_reply)
        stream.resign(pending_reply)
    return 0


cdef int _wait_as_first(Transport transport, Waiter waiter, double until) except -1:
    """As `Wire.wait`, with no look of its own."""
    cdef LocalQueue queue = waiter.queue
    cdef LocalQueues queues = transport.queues
    cdef Mutex mutex = queues.mutex
    cdef double time = _time(), at = _at(time, until)
    cdef bint reads = False
    cdef _Parker parker = _Parker.__new__(_Parker)
    mutex.lock()
    try:
        if waiter.woken and not transport.closed:
            waiter.woken = False
            return 0
        push_connection = transport.push_connection
        enters = (queue.circulating is None or queue.queued_early) and queue.first() is waiter
        if enters and push_connection is not None and push_connection.error is None:
            reads = True
            pending_reply, wake = PendingReply.__new__(PendingReply), allocate_lock()
            wake.acquire()
            pending_reply.wake = wake
            waiter.on_wake = pending_reply.set_result
        else:
            waiter.on_wake = parker
        at = min(at, queue.recheck_time(waiter))
    finally:
        mutex.unlock()
    try:
        if transport.closed:
            raise ClientClosedError("this client was closed")
        if reads:
            _listen(push_connection, pending_reply, wake, at - time)
        else:
            parker.park(at)
    finally:
        waiter.on_wake, waiter.woken = None, False
    if transport.closed:
        raise ClientClosedError("this client was closed")
    return 0


cdef _enter_until_granted(Transport transport, BaseLock lock, bint required, Waiter waiter, double start, double until):
    """The way of the first that goes well: ask for the place of its gate, listen, and ask again when it is called.
    Returns the operation of the law that is to judge what was seen last; None: nothing odd was."""
    cdef LocalQueues queues = transport.queues
    cdef LocalQueue queue = waiter.queue
    cdef double sent, left, spin
    while (push_connection := _push_connection_of(transport)) is not None:
        if queue.stale or queue.error is not None or waiter.lease is not None:
            break
        sent = _time()
        if sent >= until or queue.must_verify(waiter, sent):
            break
        if queues.may_enter_now(waiter, sent):
            entry = queue.entry  # not before: while it is not first, the place is another's, and may be granted
            template = _cached_template(queue, enter, (queues.channel, waiter.fenced))
            left = until + LAST_TRY_SECONDS - sent
            spin = 0.0 if queue.was_queued else _spin(transport)  # as in `_hand_over`
            queue.connection = push_connection
            try:
                left = min(<double>push_connection.reply_timeout, left)
                reply = (<Stream>push_connection.stream).round_trip(template, b"", entry, waiter.ms, left, spin)
            except BaseException as error:
                if not isinstance(error, STREAM_ERRORS):
                    push_connection.classify_error(INTERRUPTED, error)  # which raises it, at once
                op = _acquire_after_enter(lock, required, queue, start, push_connection, sent)
                answer = push_connection.classify_error(op.seen[0], error)
                op.seen = None if answer is RETRY_ELSEWHERE else (op.seen[0], answer)
                return op
            if reply is push_connection.busy:
                break
            # A lease whose time was over before the reply came: the protocol undoes it, too
            if not is_enter_reply(reply) or queue.judge(waiter, reply, sent, _time()) is not None:
                op = _acquire_after_enter(lock, required, queue, start, push_connection, sent)
                op.seen = op.seen[0], [reply]
                return op
            if waiter.lease is not None:
                break
        _wait_as_first(transport, waiter, until)
    return None


cdef _acquire_after_enter(BaseLock lock, bint required, LocalQueue queue, double start, push_connection, double sent):
    """The operation of the law as it is when it has sent its look."""
    op = lock._new_acquire(None, required, start)
    ask = op._look(queue)
    ask.sent, ask.connection = sent, push_connection
    op.seen = ask, None
    return op


cpdef release(BaseLock lock):
    """Release the lease of the calling thread. Errors are those of `BaseLock._new_release`."""
    cdef Transport transport = lock._transport
    cdef Lease lease = None
    cdef double sent
    cdef int what, contended  # whether somebody waits elsewhere, as far as is known
    op = None
    try:
        if forked:
            check()
        owner = thread_owner() if lock.thread_local else None
        lease = lock._leases.get(owner)
        if lease is None or _not_releasable(lease):
            transport.run(lock._new_release())
            return
        contended, told, lease._releasing = lease._contended, None, True
        if transport.queued_keys:
            told = WAIT_LOCALLY
            what = _release_locally(transport.queues, lease)
            if what == LOCAL:
                lock._released(owner, lease)
                return
            if what == NOT_HELD:  # by another thread, a moment ago
                lock._drop_lease(lease)
                raise lock._lost("release")
            contended = contended or what == SCRIPT
        if (connection := _idle_connection(transport)) is None:
            op = _release(lock, lease, contended)
            transport.run(op, told)
            return
        sent = _time()
        try:
            if contended:
                answer = _hand_over(transport, connection, lease)
            else:
                answer = _ask(transport, connection, RELEASE, lease._key, lease._raw_token, 0, None)
        except BaseException as error:
            op = _as_sent(_release(lock, lease, contended), connection, sent)
            answer = connection.classify_error(op, error)
        finally:
            if connection.error is None:
                transport.idle.append(connection)
        if answer == 1:
            lock._released(owner, lease)
            return
        if op is None:
            op = _as_sent(_release(lock, lease, contended), connection, sent)
            if contended and answer is not connection.busy:
                answer = [answer]
        if answer is RETRY_ELSEWHERE or answer is connection.busy:
            transport.run(op, told)
        else:
            transport.drive(op.rest(answer, now))
    except BaseException as error:  # it may strike anywhere; and who leaves a `with` does not try again
        try:
            _finish_interrupted_release(lock, lock._owner(), lease, op, error)
        except BaseException as again:
            _finish_interrupted_release(lock, lock._owner(), lease, op, again)
            raise
        raise


cdef _finish_interrupted_release(BaseLock lock, owner, Lease lease, op, error):
    """A release is carried out, whatever ends it that is no error of its own."""
    if lease is None:
        lease = lock._lease_of(owner)
    if lease is not None and not is_inherited(lease) and not is_own(error):
        lock._transport.undo_interrupted(op or LockRelease(lock, lease), error)


cdef _release(BaseLock lock, Lease lease, bint contended):
    op = LockRelease(lock, lease)
    if contended:
        op.hand_over()
    return op


include "tasks.pxi"
