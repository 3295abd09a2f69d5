# cython: language_level=3, binding=True, auto_pickle=False, wraparound=False, nonecheck=True
"""Wire, compiled: an acquire that finds its name free, and a release that finds it held, which is nearly every one.

`_hot.py` is the same in Python and says what may live here; names, parameters and behaviour are the same, kept so by
the tests of locks, which run on both. A thread that holds the interpreter keeps the others from reading their replies,
and a thousand tasks share one: here every microsecond counts twice. So is the way of a thread that waits and is granted
a lease (`_sleep`, `_enter`), for which the fallback goes through `Wire.wait` and the law. How threads
sleep: `_nap.pxi`. Tasks: `_hot_tasks.pxi`.
"""

import sys
import threading
from asyncio import current_task, tasks
from collections import OrderedDict

from fastlock import _wire
from fastlock._commands import ACQUIRE as _ACQUIRE, ACQUIRE_ENDLESS as _ACQUIRE_ENDLESS, RELEASE as _RELEASE
from fastlock._commands import enter, hand_over
from fastlock._gate import GONE as _GONE, HAND_OVER as _HAND_OVER, PASSED as _PASSED
from fastlock._errors import ClientClosedError, RedisError, own
from fastlock._law import LAST_LOOK as _LAST_LOOK, _entered as entered
from fastlock._steps import BEHIND as _BEHIND, LATE as _LATE, Call
from fastlock._lease import ENDED as _ENDED, _BOOTTIME, now as _now
from fastlock._native import EVENTLET as _EVENTLET, GEVENT as _GEVENT, allocate_lock as _allocate_lock
from fastlock._native import refuse_greenlet
from fastlock._terms import KEPT as _KEPT, Releasing
from fastlock._link import BROKEN as _BROKEN, SPIN as _SPIN, STALE as _STALE

cimport cython
from cpython.exc cimport PyErr_CheckSignals
from cpython.pythread cimport PyThread_get_thread_ident
from cpython.ref cimport Py_DECREF, Py_INCREF, PyObject
from libc.math cimport INFINITY
from posix.time cimport clock_gettime, timespec
from posix.types cimport clockid_t

from fastlock._common cimport Common
from fastlock._core cimport Mutex, Pipe, Template, Ticket
from fastlock._fork cimport check, forked
from fastlock._gate cimport Gate, Gates, Waiter
from fastlock._lease cimport Lease, is_inherited, new_token
from fastlock._terms cimport Terms
from fastlock._turns cimport Turn, Turns

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

cdef object BROKEN = _BROKEN, now = _now, STALE = _STALE, BEHIND = _BEHIND, LATE = _LATE
cdef int GONE = _GONE, HAND_OVER = _HAND_OVER, PASSED = _PASSED
cdef bint BOOTTIME = _BOOTTIME is not None  # else the clock is one that only Python reads
cdef clockid_t CLOCK = _BOOTTIME or 0
cdef object allocate_lock = _allocate_lock
cdef dict MODULES = sys.modules
cdef str EVENTLET = _EVENTLET, GEVENT = _GEVENT
cdef dict WIRE = _wire.__dict__
cdef object INTERRUPTED = Call([])  # an ask of which nothing is to be undone
# Until 3.12 `current_task` is Python, which asks this
cdef object running_task = current_task if sys.version_info >= (3, 12) else tasks._current_tasks.get
cdef double ENDED = _ENDED, SPIN = _SPIN, LAST_LOOK = _LAST_LOOK
cdef Py_ssize_t ACQUIRE = _ACQUIRE, ACQUIRE_ENDLESS = _ACQUIRE_ENDLESS, RELEASE = _RELEASE, KEPT = _KEPT
cdef Py_ssize_t ALARMS = 16  # of a client at most: who gives yet another time has a timer of its own
cdef object _thread = threading.local()


include "_nap.pxi"


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


cdef Lease _granted(Terms lock, owner, bytes token, double sent):
    """The lease, kept for its owner; None: its time was over before the reply came."""
    cdef double deadline = sent + lock.ms / 1000.0 if lock.ms else INFINITY
    cdef Lease lease
    if _time() >= deadline:
        return None
    lease = Lease(lock.name, lock.key, token, deadline)
    (<Common>lock._wire).stats.acquires += 1
    lock.leases[owner] = lease
    if len(lock.leases) > KEPT:
        lock.keep(lease)
    return lease


cdef Waiter _behind(Terms lock, answer, bytes token):
    """Who is to join those of this client who wait for a name: for which somebody does, or which is held, as the server
    answers. None: not so, or the way is longer."""
    cdef Common wire = lock._wire
    if not lock.blocking or lock.fair or not lock.queue or lock.blocking_timeout == 0:
        return None
    if lock.key in wire.crowd if answer is None else type(answer) is bytes and answer != token:
        return Waiter(lock.name, lock.key, lock.ms, lock.fence, None, lock.sleep)
    return None


cdef Lease _handed(Terms lock, owner, Waiter waiter):
    """The lease that passed to a waiter, kept for its owner; None: none did, or it was over before this caller ran,
    which the law gives back."""
    cdef Lease lease = waiter.lease
    if lease is None:
        return None
    if lease.deadline != INFINITY and _time() >= lease.deadline:
        return None
    (<Common>lock._wire).gates.taken(waiter)
    if waiter.gate.brisk:
        _wake_early(waiter.gate.first())
    (<Common>lock._wire).stats.acquires += 1
    lock.leases[owner] = lease
    if len(lock.leases) > KEPT:
        lock.keep(lease)
    return lease


cdef int _wake_early(Waiter waiter) except -1:
    """The next one: its turn comes before it is awake."""
    if waiter is not None and type(waiter.wake) is _Nap:
        (<_Nap>waiter.wake).early()
    return 0


cdef bint _odd(Lease lease) except -1:
    """Whether it is no lease of the caller's any more: its parent's, or let go of already."""
    return is_inherited(lease) or lease.deadline == ENDED


cdef bint _special(Terms lock) except -1:
    """Whether the way is longer: by a script, or with no time to wait."""
    if lock.fence or lock.fair:
        return True
    return lock.blocking_timeout is not None and not (lock.blocking and lock.blocking_timeout)


cdef int _gone(Terms lock, owner, Lease lease) except -1:
    if lock.leases.get(owner) is lease:
        del lock.leases[owner]
    lease.deadline = ENDED
    return 0


cdef _asked(op, link, double sent):
    op.link = link
    op.sent = sent
    return op


cdef _idle_one(Common wire):
    if not wire.idle or wire.debts:
        return None
    return wire.idle.pop()  # the latest used, whose memory is warm


cdef double _spin(Common wire) except -1:
    return SPIN if len(wire.connections) - len(wire.idle) - wire.away <= 1 else 0.0


cdef _ask(Common wire, connection, Py_ssize_t verb, bytes key, bytes token, long long ms, limit):
    cdef double patience = connection.patience if limit is None else min(<double>limit, <double>connection.patience)
    cdef double spin = _spin(wire)
    cdef tuple forms
    pipe = connection.pipe
    if type(pipe) is Pipe:
        forms = (<Pipe>pipe).forms
        return (<Pipe>pipe).ask(<Template>forms[verb], key, token, ms, patience, spin)
    return pipe.ask(pipe.forms[verb], key, token, ms, patience, spin)


cdef _hand_over(Common wire, connection, Lease lease):
    """As `_ask`: a release to who waits elsewhere. It does not poll: the server tells that one after us, and both of
    them need a processor."""
    cdef double patience = connection.patience
    cdef Gate gate
    cdef Template form
    pipe = connection.pipe
    if type(pipe) is not Pipe:
        return pipe.ask(connection.impl.Template(*hand_over(lease.key, lease.proof)), b"", b"", 0, patience, 0.0)
    gate = wire.crowd.get(lease.key)
    form = Template(*hand_over(lease.key)) if gate is None else _form(gate, hand_over, ())
    return (<Pipe>pipe).ask(form, b"", lease.proof, 0, patience, 0.0)


cdef Template _form(Gate gate, words, tuple more):
    """A command for the name of a gate, kept for the next time: to encode one takes longer than to send it."""
    cdef dict forms = gate.forms
    if forms is None:
        gate.forms = forms = {}
    form = forms.get((words, more))
    if form is None:
        forms[words, more] = form = Template(*words(gate.key, *more))
    return form


# What `with` calls. As they are compiled, no signal's handler runs between the grant and the body that is left by a
# release, nor between that and the release.


def enter_lease(Terms self not None):
    """Acquire, and give the lease. Raises LockError when it could not be had within the lock's blocking_timeout."""
    return take(self, True)


def enter_lock(Terms self not None):
    """Acquire. Raises LockError when it could not be had within the lock's blocking_timeout."""
    take(self, True)
    return self


def leave(Terms self not None, kind, error, trace):
    """Release. What goes wrong with it is put where `Terms.left` says, beside the error that ended the body."""
    try:
        give(self)
    except RedisError as problem:
        self.left(error, problem)


cpdef take(Terms lock, bint must):
    """Acquire on the lock's own terms, for a thread. Outcome and errors are those of `Terms.taking`."""
    cdef double sent = _time()
    cdef bytes token
    cdef Lease lease
    cdef Py_ssize_t verb = ACQUIRE if lock.ms else ACQUIRE_ENDLESS
    cdef Common wire = lock._wire
    if forked:
        check()
    if wire.crowd:
        wire.gates.sweep(sent)
        if (waiter := _behind(lock, None, None)) is not None:
            return _wait(lock, must, waiter, sent)
    connection = None if _special(lock) else _idle_one(wire)
    if connection is None:
        return wire.run(lock.taking(None, must))
    op = None
    token = new_token()
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
                PyErr_CheckSignals()  # what has struck since is raised here, where it is undone, not behind our back
                return lease
        waiter = _behind(lock, answer, token) if op is None and answer is not None else None
        if waiter is None:
            if op is None:
                op = _asked(lock.taking(token, must, sent), connection, sent)
            if answer is STALE or answer is connection.busy:
                return wire.run(op)
            return wire.drive(op.rest(answer, now))
    except BaseException as error:  # it may strike anywhere, also after the grant; and once more, in here
        try:
            wire.interrupted(op or _asked(lock.taking(token, must), connection, sent), error)
        except BaseException as again:
            wire.interrupted(op or _asked(lock.taking(token, must), connection, sent), again)
            raise
        raise
    return _wait(lock, must, waiter, sent)


cdef double _until(Terms lock, double start) except -1:
    """When to look for the last time."""
    return INFINITY if lock.blocking_timeout is None else start + <double>lock.blocking_timeout - LAST_LOOK


cdef _wait(Terms lock, bint must, Waiter waiter, double start):
    """Sleep until a lease passes to this waiter, or it is the first and is granted one, or has to go."""
    cdef Lease lease = None
    cdef Common wire = lock._wire
    cdef double until = _until(lock, start)
    if GEVENT in MODULES or EVENTLET in MODULES:
        refuse_greenlet(f"{lock.name!r} is held")
    owner = thread_owner() if lock.thread_local else None
    cdef _Nap nap = _Nap.__new__(_Nap)
    op = None
    try:
        waiter.wake = nap
        _join(wire.gates, waiter, start)
        if _ear(wire) is None:
            wire.wait(waiter, None if until == INFINITY else until)
        elif waiter.gate.first() is not waiter:
            _doze(wire, waiter, nap, until)
        lease = _handed(lock, owner, waiter)
        if lease is None:
            op = _enter(wire, lock, must, waiter, start, until)
            lease = _handed(lock, owner, waiter)
        if lease is not None:
            PyErr_CheckSignals()
            return lease
        return wire.run(op or lock.taking(None, must, start), waiter)
    except BaseException as error:  # also before the law has begun: nobody else would take the waiter out
        try:
            wire.torn(op or lock.taking(None, must), waiter, error)
        except BaseException as again:
            wire.torn(op or lock.taking(None, must), waiter, again)
            raise
        raise


cdef int _join(Gates gates, Waiter waiter, double now) except -1:
    """As `Gates.join`."""
    cdef Mutex mutex = gates.mutex
    mutex.lock()
    try:
        gates.joined(waiter, now)
    finally:
        mutex.unlock()
    return 0


cdef int _let_go(Gates gates, Lease lease) except -1:
    """As `Gates.release`."""
    cdef Mutex mutex = gates.mutex
    cdef int what
    mutex.lock()
    try:
        what = gates.released(lease, _time())
        wake, gates.wake = gates.wake, None
    finally:
        mutex.unlock()
    if type(wake) is _Nap:
        (<_Nap>wake).end(not gates.brisk)
    elif wake is not None:
        wake(None)
    return what


cdef _ear(Common wire):
    """The connection on which messages come, if it is there and nothing is in the way."""
    ear = wire.ear
    if ear is None or ear.dead is not None or not ear.hears or not wire.away or wire.debts or wire.closed:
        return None
    return ear if type(ear.pipe) is Pipe else None


cdef double _at(double time, double until) except -1:
    """When a sleep from now on is over in any case."""
    return min(time + <double>WIRE["LOOK"], until)


cdef int _doze(Common wire, Waiter waiter, _Nap nap, double until) except -1:
    """The sleep of one who is not the first, from when it joined."""
    try:
        if not waiter.called and not wire.closed:
            nap.sleep(_at(_time(), until))
    finally:
        waiter.wake, waiter.called = None, False
    if wire.closed:
        raise ClientClosedError("this client was closed")
    return 0


cdef int _listen(ear, Ticket ticket, wake, double seconds) except -1:
    """As `Connection.watch`. Between a message and the question that follows it no Python is run: the interpreter is
    cold then, as all else, and most of the time goes by waiting for memory."""
    cdef Pipe pipe = ear.pipe
    cdef double end = _time() + seconds
    try:
        pipe.watch(ticket)
        leads = pipe.lead(ticket, wake)
        PyErr_CheckSignals()  # of one that has struck, no sleep that begins now would tell
        if not leads and not ticket.ready:
            wake.acquire(timeout=max(0.0, seconds))
        if pipe.leads(ticket):
            pipe.exchange(ticket, max(0.0, end - _time()), 0.0)
    except BROKEN as error:
        ear.fail(error)
    finally:  # no signal can come between, as in Python
        ticket.abandoned = True
        pipe.unwatch(ticket)
        pipe.resign(ticket)
    return 0


cdef int _sleep(Common wire, Waiter waiter, double until) except -1:
    """As `Wire.wait`, with no look of its own."""
    cdef Gate gate = waiter.gate
    cdef Gates gates = wire.gates
    cdef Mutex mutex = gates.mutex
    cdef double time = _time(), at = _at(time, until)
    cdef bint reads = False
    cdef _Nap nap = _Nap.__new__(_Nap)
    mutex.lock()
    try:
        if waiter.called and not wire.closed:
            waiter.called = False
            return 0
        ear = wire.ear
        if ear is not None and ear.dead is None and (gate.held is None or gate.ahead) and gate.first() is waiter:
            reads = True
            ticket, wake = Ticket.__new__(Ticket), allocate_lock()
            wake.acquire()
            ticket.wake = wake
            waiter.wake = ticket.set_result
        else:
            waiter.wake = nap
        at = min(at, gate.wake_at(waiter))
    finally:
        mutex.unlock()
    try:
        if wire.closed:
            raise ClientClosedError("this client was closed")
        if reads:
            _listen(ear, ticket, wake, at - time)
        else:
            nap.sleep(at)
    finally:
        waiter.wake, waiter.called = None, False
    if wire.closed:
        raise ClientClosedError("this client was closed")
    return 0


cdef _enter(Common wire, Terms lock, bint must, Waiter waiter, double start, double until):
    """The way of the first that goes well: ask for the place of its gate, listen, and ask again when it is called.
    Returns the operation of the law that is to judge what was seen last; None: nothing odd was."""
    cdef Gates gates = wire.gates
    cdef Gate gate = waiter.gate
    cdef Mutex mutex = gates.mutex
    cdef Lease lease
    cdef double sent, left, spin
    while (ear := _ear(wire)) is not None and not gate.stale and gate.error is None and waiter.lease is None:
        sent = _time()
        if sent >= until or gate.doubts(waiter, sent):
            break
        if gates.ask(waiter, sent):
            place = gate.place  # not before: while it is not first, the place is another's, and may be granted
            form = _form(gate, enter, (gates.inbox, waiter.fenced))
            left = until + LAST_LOOK - sent
            spin = 0.0 if gate.waited else _spin(wire)  # as in `_hand_over`
            gate.link = ear
            try:
                reply = (<Pipe>ear.pipe).ask(form, b"", place, waiter.ms, min(<double>ear.patience, left), spin)
            except BaseException as error:
                if not isinstance(error, BROKEN):
                    ear.explain(INTERRUPTED, error)  # which raises it, at once
                op = _looking(lock, must, gate, start, ear, sent)
                answer = ear.explain(op.seen[0], error)
                op.seen = None if answer is STALE else (op.seen[0], answer)
                return op
            if reply is ear.busy:
                break
            if not entered(reply) or (reply[0] and _time() >= sent + waiter.ms / 1000.0 and waiter.ms):
                op = _looking(lock, must, gate, start, ear, sent)
                op.seen = op.seen[0], [reply]
                return op
            if reply[0]:
                lease = Lease(
                    waiter.name, waiter.key, place, sent + waiter.ms / 1000.0 if waiter.ms else INFINITY,
                    reply[2] if waiter.fenced else None,
                )
                lease.contended = reply[1] > 0 or gate.waited
                mutex.lock()
                try:
                    waiter.lease = lease
                    gate.granted(waiter, lease, reply[1], sent)
                finally:
                    mutex.unlock()
                break
            mutex.lock()
            try:
                gate.queued(INFINITY if reply[1] < 0 else reply[1] / 1000.0, bool(reply[2]), _time())
            finally:
                mutex.unlock()
        _sleep(wire, waiter, until)
    return None


cdef _looking(Terms lock, bint must, Gate gate, double start, ear, double sent):
    """The operation of the law as it is when it has sent its look."""
    op = lock.taking(None, must, start)
    ask = op._look(gate)
    ask.sent, ask.link = sent, ear
    op.seen = ask, None
    return op


cpdef give(Terms lock):
    """Release the lease of the calling thread. Errors are those of `Terms.releasing`."""
    cdef Common wire = lock._wire
    cdef Lease lease = None
    cdef double sent
    cdef int what, contended  # whether somebody waits elsewhere, as far as is known
    op = None
    try:
        if forked:
            check()
        owner = thread_owner() if lock.thread_local else None
        lease = lock.leases.get(owner)
        if lease is None or _odd(lease):
            wire.run(lock.releasing())
            return
        contended, told, lease.parting = lease.contended, None, True
        if wire.crowd:
            told = BEHIND
            what = _let_go(wire.gates, lease)
            if what == PASSED:
                _gone(lock, owner, lease)
                return
            if what == GONE:  # by another thread, a moment ago
                lock.drop(lease)
                raise lock._lost("release")
            contended = contended or what == HAND_OVER
        if (connection := _idle_one(wire)) is None:
            op = _release(lock, lease, contended)
            wire.run(op, told)
            return
        sent = _time()
        try:
            if contended:
                answer = _hand_over(wire, connection, lease)
            else:
                answer = _ask(wire, connection, RELEASE, lease.key, lease.proof, 0, None)
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


cdef _struck(Terms lock, owner, Lease lease, op, error):
    """A release is carried out, whatever ends it that is no error of its own."""
    if lease is None:
        lease = lock._of(owner)
    if lease is not None and not is_inherited(lease) and not own(error):
        lock._wire.interrupted(op or Releasing(lock, lease), error)


cdef _release(Terms lock, Lease lease, bint contended):
    op = Releasing(lock, lease)
    if contended:
        op.hand_over()
    return op


include "_hot_tasks.pxi"
