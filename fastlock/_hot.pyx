# cython: language_level=3, binding=True, auto_pickle=False, wraparound=False, nonecheck=True
"""Wire, compiled: an acquire that finds its name free, and a release that finds it held, which is nearly every one.

`_hot.py` is the same in Python and says what may live here; names, parameters and behaviour are the same, kept so by
the tests of locks, which run on both. A thread that holds the interpreter keeps the others from reading their replies,
and a thousand tasks share one: here every microsecond counts twice.
"""

import math
import threading
from asyncio import InvalidStateError, current_task
from collections import OrderedDict

from fastlock._commands import ACQUIRE as _ACQUIRE, ACQUIRE_ENDLESS as _ACQUIRE_ENDLESS, RELEASE as _RELEASE
from fastlock._gate import EARLY as _EARLY, GONE as _GONE, HAND_OVER as _HAND_OVER, PASSED as _PASSED
from fastlock._law import LAST_LOOK as _LAST_LOOK
from fastlock._steps import BEHIND as _BEHIND, LATE as _LATE
from fastlock._lease import ENDED as _ENDED, _BOOTTIME, now as _now
from fastlock._terms import KEPT as _KEPT, Releasing
from fastlock._wire import SPIN as _SPIN, STALE as _STALE

cimport cython
from cpython.exc cimport PyErr_CheckSignals
from cpython.pythread cimport PyThread_get_thread_ident
from cpython.ref cimport Py_DECREF, Py_INCREF, PyObject
from posix.time cimport clock_gettime, timespec
from posix.types cimport clockid_t

from fastlock._core cimport Pipe, Template
from fastlock._gate cimport Gates, Waiter
from fastlock._lease cimport Lease, new_token
from fastlock._stats cimport Stats
from fastlock._terms cimport Terms

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

cdef object now = _now, STALE = _STALE, BEHIND = _BEHIND, LATE = _LATE, EARLY = _EARLY
cdef int GONE = _GONE, HAND_OVER = _HAND_OVER, PASSED = _PASSED
cdef bint BOOTTIME = _BOOTTIME is not None  # else the clock is one that only Python reads
cdef clockid_t CLOCK = _BOOTTIME or 0
cdef double ENDED = _ENDED, SPIN = _SPIN, LAST_LOOK = _LAST_LOOK
cdef Py_ssize_t ACQUIRE = _ACQUIRE, ACQUIRE_ENDLESS = _ACQUIRE_ENDLESS, RELEASE = _RELEASE, KEPT = _KEPT
cdef Py_ssize_t ALARMS = 16  # of a client at most: who gives yet another time has a timer of its own
cdef object _thread = threading.local()


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
    cdef double deadline = sent + lock.ms / 1000.0 if lock.ms else math.inf
    cdef Lease lease
    if _time() >= deadline:
        return None
    lease = Lease(lock.name, lock.key, token, deadline)
    (<Stats>lock._wire.stats).acquires += 1
    lock.leases[owner] = lease
    if len(lock.leases) > KEPT:
        lock.keep(lease)
    return lease


cdef Waiter _behind(Terms lock, answer, bytes token):
    """Who is to join those of this client who wait for a name: for which somebody does, or which is held, as the server
    answers. None: not so, or the way is longer."""
    wire = lock._wire
    if not lock.blocking or lock.fair or lock.blocking_timeout == 0:
        return None
    if lock.key in <dict>wire.crowd if answer is None else type(answer) is bytes and answer != token:
        return Waiter(lock.name, lock.key, lock.ms, lock.fence)
    return None


cdef Lease _handed(Terms lock, owner, Waiter waiter):
    """The lease that passed to a waiter, kept for its owner; None: none did."""
    cdef Lease lease = waiter.lease
    if lease is None:
        return None
    (<Gates>lock._wire.gates).taken(waiter)
    (<Stats>lock._wire.stats).acquires += 1
    lock.leases[owner] = lease
    if len(lock.leases) > KEPT:
        lock.keep(lease)
    return lease


cdef _passed(Terms lock, owner, Lease lease):
    """Where others of this client wait: to the next of them. None: done; else the operation that is to be carried
    out."""
    cdef int what = (<Gates>lock._wire.gates).release(lease, _time())
    if what == PASSED:
        _gone(lock, owner, lease)
        return None
    if what == GONE:  # by another thread, a moment ago
        lock.drop(lease)
        raise lock._lost("release")
    op = Releasing(lock, lease)
    if what == HAND_OVER:
        op.hand_over()
    return op


cdef bint _odd(Lease lease) except -1:
    """Whether it is no lease of the caller's any more: its parent's, or let go of already."""
    return lease.inherited or lease.deadline == ENDED


cdef bint _special(Terms lock) except -1:
    """Whether the way is longer: by a script, or with no time to wait."""
    return lock.fence or lock.fair or lock.blocking_timeout == 0


cdef int _gone(Terms lock, owner, Lease lease) except -1:
    if lock.leases.get(owner) is lease:
        del lock.leases[owner]
    lease.deadline = ENDED
    return 0


cdef _asked(op, link, double sent):
    op.link = link
    op.sent = sent
    return op


# threads

cdef _idle_one(wire):
    cdef list idle = wire.idle
    if not idle or wire.debts:
        return None
    return idle.pop()  # the latest used, whose memory is warm


cdef _ask(wire, connection, Py_ssize_t verb, bytes key, bytes token, long long ms, limit):
    cdef double patience = connection.patience if limit is None else min(<double>limit, <double>connection.patience)
    cdef double spin = SPIN if len(<list>wire.connections) - len(<list>wire.idle) - <int>wire.away <= 1 else 0.0
    cdef tuple forms
    pipe = connection.pipe
    if type(pipe) is Pipe:
        forms = (<Pipe>pipe).forms
        return (<Pipe>pipe).ask(<Template>forms[verb], key, token, ms, patience, spin)
    return pipe.ask(pipe.forms[verb], key, token, ms, patience, spin)


def take(Terms lock not None, bint must):
    """Acquire on the lock's own terms, for a thread. Outcome and errors are those of `Terms.taking`."""
    cdef double sent = _time()
    cdef bytes token
    cdef Lease lease
    cdef Py_ssize_t verb = ACQUIRE if lock.ms else ACQUIRE_ENDLESS
    wire = lock._wire
    if wire.crowd:
        (<Gates>wire.gates).sweep(sent)
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
                (<list>wire.idle).append(connection)
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
    except BaseException as error:
        if not isinstance(error, Exception):  # Ctrl-C may strike anywhere, also after the grant
            wire.interrupted(op or _asked(lock.taking(token, must), connection, sent), error)
        raise
    return _wait(lock, must, waiter, sent)


cdef _until(Terms lock, double start):
    """When to look for the last time."""
    return None if lock.blocking_timeout is None else start + <double>lock.blocking_timeout - LAST_LOOK


cdef _wait(Terms lock, bint must, Waiter waiter, double start):
    """Sleep until a lease passes to this waiter, or it is the first, or has to go."""
    cdef Lease lease
    wire = lock._wire
    op = None
    try:
        (<Gates>wire.gates).join(waiter, start)
        wire.wait(waiter, _until(lock, start))
        lease = _handed(lock, thread_owner() if lock.thread_local else None, waiter)
        if lease is not None:
            PyErr_CheckSignals()
            return lease
        op = lock.taking(None, must, start)
        return wire.run(op, waiter)
    except BaseException as error:  # also before the law has begun: nobody else would take the waiter out
        wire.torn(op or lock.taking(None, must), waiter, error)
        raise


def give(Terms lock not None):
    """Release the lease of the calling thread. Errors are those of `Terms.releasing`."""
    cdef double sent
    cdef Lease lease
    wire = lock._wire
    owner = thread_owner() if lock.thread_local else None
    lease = lock.leases.get(owner)
    if lease is None or _odd(lease):
        wire.run(lock.releasing())
        return
    if wire.crowd:
        if (op := _passed(lock, owner, lease)) is not None:
            wire.run(op, BEHIND)
        return
    connection = None if lease.contended else _idle_one(wire)
    if connection is None:
        wire.run(lock.releasing())
        return
    op = None
    sent = _time()
    try:
        try:
            answer = _ask(wire, connection, RELEASE, lease.key, lease.token, 0, None)
        except BaseException as error:
            op = _asked(Releasing(lock, lease), connection, sent)
            answer = connection.explain(op, error)
        finally:
            if connection.dead is None:
                (<list>wire.idle).append(connection)
        if answer == 1:
            _gone(lock, owner, lease)
            return
        if op is None:
            op = _asked(Releasing(lock, lease), connection, sent)
        if answer is STALE or answer is connection.busy:
            wire.run(op)
        else:
            wire.drive(op.rest(answer, now))
    except BaseException as error:
        if not isinstance(error, Exception):  # Ctrl-C may strike anywhere, also after the server has let go
            lease.doubt_release(sent)
        raise


# asyncio

cdef class _Exchange:
    """What a task awaits: one command, and what is made of its answer, with no coroutine in between.

    Nothing is sent before it is awaited. Where the hot path ends, a coroutine (`others`) goes on.
    """

    cdef Terms lock
    cdef Pipe pipe
    cdef object future, others, owner
    cdef double sent
    cdef bint ended  # as with a coroutine: it cannot be awaited again, and to close it does nothing

    cdef _begin(self):
        """Ask, so that there is a future; or hand on."""
        raise NotImplementedError

    cdef _end(self, answer):
        """The outcome; or hand on."""
        raise NotImplementedError

    cdef _op(self):
        """The operation of the law that this is."""
        raise NotImplementedError

    cdef Pipe _open_pipe(self):
        """The connection's, if there is one and the running task may use it."""
        cdef Pipe pipe = self.lock._wire.open_pipe
        if pipe is None or pipe.thread != PyThread_get_thread_ident():
            return None
        task = current_task(pipe.loop)
        if task is None:  # another loop runs
            return None
        self.owner = task if self.lock.thread_local else None
        return pipe

    cdef _step(self, bint *over):
        """What to wait for; or, when it is over, the outcome."""
        if self.ended:
            raise RuntimeError("cannot reuse what was already awaited")
        self.ended = True  # unless there is something to wait for
        if self.others is None:
            future, outcome = self.future, None
            if future is None:
                self._begin()
            else:
                outcome = self._end(self._reply())
            if self.others is None:
                over[0] = self.future is future  # nothing new to wait for
                if over[0]:
                    return outcome
                self.future._asyncio_future_blocking = True  # as a future's own iterator does it
                self.ended = False
                return self.future
        cdef PyObject *result
        self.ended = over[0] = PyIter_Send(self.others, None, &result) == PYGEN_RETURN
        outcome = <object>result
        Py_DECREF(outcome)  # the reference that came with it
        return outcome

    cdef _reply(self):
        try:
            return self.future.result()
        except InvalidStateError:
            self.ended = False  # for who awaits it
            raise RuntimeError("it is being awaited already") from None

    def __await__(self):
        return self

    def __iter__(self):
        return self

    def __next__(self):
        return self.send(None)

    def send(self, value):
        """As a coroutine's."""
        cdef bint over = False
        outcome = self._step(&over)
        if over:
            raise StopIteration(outcome)
        return outcome

    def throw(self, kind, value=None, trace=None):
        """As a coroutine's: the task is cancelled, or ends."""
        error = kind if value is None else value
        if not isinstance(error, BaseException):
            error = kind() if value is None else kind(value)
        if self.ended:
            raise RuntimeError("cannot reuse what was already awaited")
        self.ended = True
        if self.others is not None:
            step = self.others.throw(error)
            self.ended = False
            return step
        self._leave()
        raise error

    def close(self):
        """As a coroutine's: nobody awaits it any more."""
        if self.ended:
            return
        self.ended = True
        if self.others is not None:
            self.others.close()
        else:
            self._leave()

    def __del__(self):
        """Dropped half-way: as a coroutine, it closes."""
        if not self.ended and (self.future is not None or self.others is not None):
            self.close()

    cdef _leave(self):
        if self.future is not None:
            self.pipe.link.leave(self._op(), self.sent)


@cython.final
cdef class _Alarm:
    """Ends the waits of tasks that gave the same time. One timer for them all: they come in order, and nearly all are
    served before. A timer each costs as much as the rest of a wait."""

    cdef object loop
    cdef readonly object timer
    cdef readonly object sleepers  # and when the time of each is over, in order
    cdef double last

    def __cinit__(self, loop):
        self.loop = loop
        self.sleepers = OrderedDict()  # a dict takes ever longer to find its first where the first are taken out

    cdef bint add(self, _Take take, double at, double now) except -1:
        """Whether it is called then: it is not if it came out of order."""
        if at < self.last:
            return False
        self.last = at
        self.sleepers[take] = at
        if self.timer is None:
            self.timer = self.loop.call_later(at - now, self)
        return True

    def cancel(self):
        """The client is closed, or the time is given by nobody any more."""
        timer, self.timer = self.timer, None
        if timer is not None:
            timer.cancel()

    def __call__(self):
        """The time of the first is over, if it still waits."""
        self.timer = None
        cdef double now = _time()
        while self.sleepers:
            take = next(iter(self.sleepers))
            if self.sleepers[take] > now:
                self.timer = self.loop.call_later(self.sleepers[take] - now, self)
                return
            del self.sleepers[take]
            take(None)


cdef _Alarm _alarm(dict alarms, length, loop):
    """That of those who give this time. None: there are too many others."""
    alarm = alarms.get(length)
    if alarm is not None:
        return alarm
    if len(alarms) >= ALARMS:
        for other in alarms:
            if not (<_Alarm>alarms[other]).sleepers:
                alarms.pop(other).cancel()
                break
        else:
            return None
    alarm = alarms[length] = _Alarm(loop)
    return alarm


@cython.final
cdef class _Take(_Exchange):
    """Acquire on the lock's own terms. Gives the Lease; outcome and errors are those of `Terms.taking`."""

    cdef bint must
    cdef double start
    cdef bytes token
    cdef Waiter waiter  # behind whom others of this client wait for the same name
    cdef _Alarm alarm  # that ends it, where its time is limited
    cdef object timer  # or this one
    cdef bint late  # that came after it was woken before its turn

    def __cinit__(self, Terms lock not None, bint must):
        self.lock = lock
        self.must = must

    cdef _begin(self):
        cdef Terms lock = self.lock
        cdef Pipe pipe = None if _special(lock) else self._open_pipe()
        if pipe is None:
            self.others = lock._wire.run(lock.taking(None, self.must))
            return
        self.pipe = pipe
        self.start = _time()
        if lock._wire.crowd and (waiter := _behind(lock, None, None)) is not None:
            self._wait(waiter)
            return
        self.token = new_token()
        self.future = pipe.request(
            <Template>pipe.forms[ACQUIRE if lock.ms else ACQUIRE_ENDLESS], lock.key, self.token, lock.ms
        )
        self.sent = pipe.sent
        if lock.blocking_timeout is not None:
            self._limit(lock.blocking_timeout, self.start + <double>lock.blocking_timeout, self.start)

    cdef _limit(self, length, double at, double now):
        """Have it called when its time is over. `length`: by which those are known who have the same time."""
        self.alarm = _alarm(self.lock._wire.alarms, length, self.pipe.loop)
        if self.alarm is None or not self.alarm.add(self, at, now):
            self.alarm, self.timer = None, self.pipe.loop.call_later(at - now, self, None)

    cdef _unlimit(self):
        alarm, self.alarm = self.alarm, None
        if alarm is not None:
            (<_Alarm>alarm).sleepers.pop(self, None)
        elif self.timer is not None:
            self.timer.cancel()

    cdef _end(self, answer):
        cdef Lease lease
        if self.waiter is not None:
            lease = _handed(self.lock, self.owner, self.waiter)
            if lease is None and answer is EARLY and not self.late and self.waiter.gate.too_early(self.waiter):
                self._sleep()
                return None
            self._unlimit()
            if lease is None:
                self.others = self.lock._wire.run(self._op(), self.waiter)
            return lease
        self._unlimit()
        if answer is None:
            lease = _granted(self.lock, self.owner, self.token, self.sent)
            if lease is not None:
                return lease
        elif (waiter := _behind(self.lock, answer, self.token)) is not None:
            self._wait(waiter)
            return None
        elif answer is LATE:
            self.pipe.link.leave(self._op(), self.sent)
        op = _asked(self._op(), self.pipe.link, self.sent)
        self.others = self.lock._wire.drive(op.rest(answer, now))

    cdef _wait(self, Waiter waiter):
        """Sleep until a lease passes to this waiter, or it is the first, or has to go."""
        self.waiter = waiter
        (<Gates>self.lock._wire.gates).join(waiter, self.start)
        if waiter.called:
            self.others = self.lock._wire.run(self._op(), waiter)
            return
        self.lock._wire.tick()
        self._sleep()
        if (until := _until(self.lock, self.start)) is not None:
            self._limit(-self.lock.blocking_timeout, until, _time())

    cdef _sleep(self):
        self.future = self.pipe.loop.create_future()
        self.waiter.wake = self

    def __call__(self, answer):
        """The waiter is called, or the time is over."""
        if self.future.done():
            self.late = True
        else:
            self.future.set_result(LATE if self.waiter is None else answer)

    cdef _leave(self):
        self._unlimit()
        if self.waiter is not None:
            self.lock._wire.torn(self._op(), self.waiter)
        else:
            _Exchange._leave(self)

    cdef _op(self):
        return self.lock.taking(None if self.waiter is not None else self.token, self.must, self.start)


@cython.final
cdef class _Give(_Exchange):
    """Release the lease of the running task. Errors are those of `Terms.releasing`; `leaving` a `with`, they go where
    `Terms.left` puts them, beside the `error` that ended its body."""

    cdef bint leaving
    cdef object error
    cdef Lease lease

    def __cinit__(self, Terms lock not None, bint leaving, error):
        self.lock = lock
        self.leaving = leaving
        self.error = error

    cdef _begin(self):
        cdef Terms lock = self.lock
        cdef Pipe pipe = self._open_pipe()
        cdef Lease lease = None if pipe is None else lock.leases.get(self.owner)
        if lease is not None and lock._wire.crowd and not _odd(lease):
            op = _passed(lock, self.owner, lease)
            if op is not None:
                self.others = lock._wire.release(lock, op, BEHIND, self.leaving, self.error)
            return
        if lease is None or _odd(lease) or lease.contended:
            self.others = lock._wire.release(lock, None, None, self.leaving, self.error)
            return
        self.pipe = pipe
        self.lease = lease
        self.future = pipe.request(<Template>pipe.forms[RELEASE], lease.key, lease.token, 0)
        self.sent = pipe.sent

    cdef _end(self, answer):
        if answer == 1:
            _gone(self.lock, self.owner, self.lease)
        else:
            op = _asked(self._op(), self.pipe.link, self.sent)
            self.others = self.lock._wire.release(self.lock, op, answer, self.leaving, self.error)

    cdef _op(self):
        return Releasing(self.lock, self.lease)


# How the interpreter resumes an _Exchange: by slots of its own, as what Cython puts there raises StopIteration with a
# traceback, which costs more than all the rest (3,000 instructions).

cdef PySendResult _send(PyObject *self, PyObject *value, PyObject **result) except -1:
    cdef bint over = False
    result[0] = NULL
    outcome = (<_Exchange>self)._step(&over)
    Py_INCREF(outcome)
    result[0] = <PyObject *>outcome
    return PYGEN_RETURN if over else PYGEN_NEXT


cdef PyObject *_next(PyObject *self) except? NULL:
    cdef bint over = False
    outcome = (<_Exchange>self)._step(&over)
    if over:
        PyErr_SetObject(StopIteration, outcome)
        return NULL
    Py_INCREF(outcome)
    return <PyObject *>outcome


aio_take, aio_give = _Take, _Give
for _type in (_Take, _Give):
    (<PyTypeObject *>_type).tp_as_async.am_send = <sendfunc>_send
    (<PyTypeObject *>_type).tp_iternext = <iternextfunc>_next
