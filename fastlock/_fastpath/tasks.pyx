# cython: language_level=3, binding=True, auto_pickle=False, wraparound=False, nonecheck=True
"""The fast path of tasks, compiled: acquires and releases as what a task awaits, with no coroutine and no future.

`tasks.py` is the same in Python and says what may live here. A thousand tasks share one interpreter, so each
microsecond counts twice.
"""

from collections import OrderedDict

from fastlock._errors import is_own
from fastlock._protocol.acquire import LAST_TRY_SECONDS as _LAST_TRY_SECONDS
from fastlock._protocol.base_lock import LockRelease
from fastlock._protocol.commands import Opcode, hand_over_template, made_here
from fastlock._protocol.local_queue import ReleaseRoute
from fastlock._protocol.steps import Answer
from fastlock._transport.internals import running_task as _running_task
from fastlock._transport.posted import PostedRelease

cimport cython
from cpython.pythread cimport PyThread_get_thread_ident
from cpython.ref cimport Py_DECREF, Py_INCREF, PyObject
from libc.math cimport INFINITY

from fastlock._core cimport TaskStream, Template
from fastlock._fastpath.threads cimport new_release, not_releasable
from fastlock._fork cimport check
from fastlock._protocol.base_lock cimport BaseLock
from fastlock._protocol.lease cimport Lease, flag
from fastlock._protocol.local_queue cimport LocalQueues
from fastlock._protocol.waiters cimport Waiter
from fastlock._transport.base cimport Transport
from fastlock._transport.internals cimport PYGEN_NEXT, PYGEN_RETURN, PySendResult, Waker, Wakeup, resume_by
from fastlock._transport.parker cimport clock

cdef extern from "Python.h":
    PySendResult PyIter_Send(object iterator, object value, PyObject **result) except -1
    void PyErr_SetObject(object kind, object value)

cdef object ASK_SERVER = Answer.ASK_SERVER, DEADLINE_EXCEEDED = Answer.DEADLINE_EXCEEDED
cdef int SCRIPT = ReleaseRoute.SCRIPT
cdef object running_task = _running_task
cdef double LAST_TRY_SECONDS = _LAST_TRY_SECONDS
cdef Py_ssize_t RELEASE = Opcode.RELEASE
cdef Py_ssize_t MAX_SHARED_TIMEOUTS = 16  # of a client: an acquire with yet another timeout has a timer of its own


cdef double _until(BaseLock lock, double start) except -1:
    """When an acquire that began at `start` tries for the last time; INFINITY: it has no deadline."""
    return INFINITY if lock.blocking_timeout is None else start + <double>lock.blocking_timeout - LAST_TRY_SECONDS


cdef _as_sent(op, connection, double sent):
    op.request.connection = connection
    op.request.sent = sent
    return op


cdef class _Awaitable(Wakeup):
    """What a task awaits: one command and the outcome of its answer, with no coroutine and no future in between.

    Nothing is sent before it is awaited. Where the fast path ends, a coroutine (`others`) goes on.
    """

    cdef BaseLock lock
    cdef TaskStream stream
    cdef object others, owner
    cdef double sent
    cdef bint ended  # as with a coroutine: it cannot be awaited again, and to close it does nothing
    # Of an _Acquire; declared here, where they do not enlarge the object
    cdef bint required
    cdef flag paused, pausing  # whether it has let the loop run before it took a kept lease; and does so now

    cdef _begin(self):
        """Send the command and begin to wait, or hand on to a coroutine; or return the outcome."""
        raise NotImplementedError

    cdef _finish(self, answer):
        """Return the outcome, or wait again, or hand on to a coroutine."""
        raise NotImplementedError

    cdef _op(self):
        """The operation of the protocol that does the same."""
        raise NotImplementedError

    cdef TaskStream _open_stream(self):
        """The stream of the connection, if there is one and the running task may use it."""
        cdef Transport transport = self.lock._transport
        check()
        cdef TaskStream stream = transport.open_stream
        if stream is None or stream.thread != PyThread_get_thread_ident():
            return None
        task = running_task((<Waker>stream.wakeups).loop)
        if task is None:  # another loop runs
            return None
        if self.owner is None and self.lock.thread_local:
            self.owner = task
        return stream

    cdef _step(self, bint *finished):
        """Returns what to wait for; or, with `finished` set, the outcome."""
        if self.ended:
            raise RuntimeError("cannot reuse what was already awaited")
        if self.others is None:
            outcome = None
            if self.wakeups is not None and not self.ready:
                raise RuntimeError("it is being awaited already")
            self.ended = True  # unless there is something to wait for
            try:
                if self.wakeups is None:
                    outcome = self._begin()
                else:
                    outcome = self._finish(self.result())
                if self.pausing:
                    self.pausing = self.ended = False
                    return None
                if self.others is None:
                    finished[0] = self.wakeups is None or self.ready
                    if not finished[0]:
                        outcome = self.begin_wait()
                        self.ended = False
                    return outcome
            except BaseException as error:  # nothing else would undo what was sent or queued until then
                if self.others is None:
                    self._undo_interrupted(error)
                raise
        self.ended = True
        cdef PyObject *result
        try:
            self.ended = finished[0] = PyIter_Send(self.others, None, &result) == PYGEN_RETURN
        except BaseException as error:
            if not is_own(error):  # a signal handler may have raised before the coroutine had begun
                self._undo_interrupted(error)
            raise
        outcome = <object>result
        Py_DECREF(outcome)  # the reference that came with it
        return outcome

    def __await__(self):
        return self

    def __iter__(self):
        return self

    def __next__(self):
        return self.send(None)

    def send(self, value):
        """As a coroutine's `send`."""
        cdef bint finished = False
        outcome = self._step(&finished)
        if finished:
            raise StopIteration(outcome)
        return outcome

    def throw(self, kind, value=None, trace=None):
        """As a coroutine's `throw`: the task is cancelled, or ends."""
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
        self._cancel()
        raise error

    def close(self):
        """As a coroutine's `close`: no task awaits this any more."""
        if self.ended:
            return
        self.ended = True
        if self.others is not None:
            self.others.close()
        else:
            self._cancel()

    def __del__(self):
        if not self.ended:
            self._collected()

    cdef _collected(self):
        """The collector found this before it had ended: close it, as a coroutine is closed then."""
        if self.wakeups is not None or self.others is not None:
            self.close()

    cdef _undo_interrupted(self, error):
        """Undo what was sent, where an error interrupted it; again, if another one interrupts this."""
        try:
            self._undo_for(error)
        except BaseException as again:
            self._undo_for(again)
            raise

    cdef _cancel(self):
        """Undo what was sent, where the task is cancelled or ends; again, if a signal handler raises in here."""
        try:
            self._leave()
        except BaseException:
            self._leave()
            raise

    cdef _undo_for(self, error):
        """Undo what was sent, for `_undo_interrupted`, which calls this again if it is interrupted."""
        self._leave()

    cdef _leave(self):
        self.ready = True  # an answer that comes from now on is ignored
        self.owner = None
        if self.wakeups is not None:
            self.stream.connection.cancel(self._op().request, self.sent)


@cython.final
cdef class _SharedTimeout:
    """Ends the waits of tasks that have the same timeout. One timer serves them all: their deadlines come in the order
    of their starts, and nearly all waits end before. A timer for each would cost as much as the rest of a wait."""

    cdef object loop
    cdef readonly object timer
    cdef readonly object waiters  # each _Acquire with its deadline, in order
    cdef double last

    def __cinit__(self, loop):
        self.loop = loop
        self.waiters = OrderedDict()  # a dict takes ever longer to find its first where the first are taken out

    cdef bint add(self, _Acquire acquire, double at, double now) except -1:
        """Add an acquire with its deadline. False: the deadline is out of order, so it was not added."""
        if at < self.last:
            return False
        self.last = at
        self.waiters[acquire] = at
        if self.timer is None:
            self.timer = self.loop.call_later(at - now, self)
        return True

    def cancel(self):
        """Cancel the timer: the client is closed, or no acquire has this timeout any more."""
        timer, self.timer = self.timer, None
        if timer is not None:
            timer.cancel()

    def __call__(self):
        """End the waits whose deadlines have passed."""
        self.timer = None
        try:
            self._call(clock())
        except BaseException:  # a signal handler raised: the others are ended all the same
            if self.waiters and self.timer is None:
                self.timer = self.loop.call_later(0, self)
            raise

    cdef int _call(self, double now) except -1:
        while self.waiters:
            acquire = next(iter(self.waiters))
            if self.waiters[acquire] > now:
                self.timer = self.loop.call_later(self.waiters[acquire] - now, self)
                break
            del self.waiters[acquire]
            acquire(None)
        return 0


cdef _SharedTimeout _shared_timeout(dict shared, length, loop):
    """The shared timer of the acquires with this timeout. None: there are too many other timeouts."""
    timeout = shared.get(length)
    if timeout is not None:
        return timeout
    if len(shared) >= MAX_SHARED_TIMEOUTS:
        for other in shared:
            if not (<_SharedTimeout>shared[other]).waiters:
                shared.pop(other).cancel()
                break
        else:
            return None
    timeout = shared[length] = _SharedTimeout(loop)
    return timeout


@cython.final
cdef class _Acquire(_Awaitable):
    """Acquire with the lock's own settings; the result is the Lease. Outcome and errors are those of
    `BaseLock._new_acquire`."""

    cdef double start
    cdef bytes token
    cdef Waiter waiter  # by which it waits in the local queue; None: it does not
    cdef object timer  # a _SharedTimeout, or a timer of its own, that ends the wait, where that has a deadline

    def __cinit__(self, BaseLock lock not None, bint required):
        self.lock = lock
        self.required = required

    cdef _begin(self):
        cdef BaseLock lock = self.lock
        cdef Transport transport = lock._transport
        cdef Waiter waiter
        cdef Lease lease
        cdef TaskStream stream = self._open_stream()
        if lock._keep_ms and stream is None:
            transport.hear_recalls()
        elif lock._keep_ms:
            self.start = clock()
            if not self.paused and (not transport.turn_end or self.start >= transport.turn_end):
                self.paused = self.pausing = transport.turn_is_over(self.start)
                if self.paused:
                    return
            lease = lock._take_kept(self.owner, self.start)
            if lease is not None:
                return lease
        if stream is None or lock._needs_slow_path():
            self.others = lock._transport.run(lock._new_acquire(None, self.required))
            return
        self.stream = stream
        self.start = clock()
        if transport.queued_keys or transport.expected_keys or lock.fair:
            waiter = lock._waits_locally(None, None, transport.queued_keys)
            if waiter is not None:
                self._wait(waiter)
                return
        self.token = lock._fresh_token()
        self.arm(<Waker>stream.wakeups)
        stream.request(
            <Template>stream.templates[lock._opcode()],
            self, lock._key, self.token, lock._lease_ms(self.token)
        )
        self.sent = stream.sent
        if lock.blocking_timeout is not None:
            self._set_deadline(lock.blocking_timeout, self.start + <double>lock.blocking_timeout, self.start)

    cdef _set_deadline(self, length, double at, double now):
        """Have a timer end this wait at its deadline `at`. `length` is the key of the shared timer."""
        self.timer = _shared_timeout((<Transport>self.lock._transport).shared_timeouts, length, self.wakeups.loop)
        if self.timer is None or not (<_SharedTimeout>self.timer).add(self, at, now):
            self.timer = self.wakeups.loop.call_later(at - now, self._late)  # asyncio may refuse `self`, as a coroutine

    cdef _clear_deadline(self):
        timer, self.timer = self.timer, None
        if type(timer) is _SharedTimeout:
            (<_SharedTimeout>timer).waiters.pop(self, None)
        elif timer is not None:
            timer.cancel()

    cdef _finish(self, answer):
        cdef Lease lease
        if self.waiter is not None:
            lease = self.lock._handed_over(self.owner, self.waiter, clock(), (<Transport>self.lock._transport).queues)
            self._clear_deadline()
            if lease is None:
                self.others = self.lock._transport.run(self._op(), self.waiter)
            return lease
        self._clear_deadline()
        if answer is None:
            lease = self.lock._granted(
                self.owner, self.token, self.sent, clock(), (<Transport>self.lock._transport).queues
            )
            if lease is not None:
                return lease
        elif (waiter := self.lock._waits_locally(
            answer, self.token, (<Transport>self.lock._transport).queued_keys
        )) is not None:
            self._wait(waiter)
            return None
        elif answer is DEADLINE_EXCEEDED:
            self.stream.connection.cancel(self._op().request, self.sent)
        op = _as_sent(self._op(), self.stream.connection, self.sent)
        self.others = self.lock._transport.run(op, answer)

    cdef _wait(self, Waiter waiter):
        """Sleep until a lease is handed to this waiter, or it is the first waiter, or its time is over."""
        self.waiter = waiter
        (<Transport>self.lock._transport).queues.enqueue_locked(waiter, self.start)
        self.lock._key = waiter.key = waiter.queue.key  # one object for all waiters, to save memory: they are many
        if waiter.woken:
            self.others = self.lock._transport.run(self._op(), waiter)
            return
        if (<Transport>self.lock._transport).sweep_timer is None:
            self.lock._transport.sweep()
        self.arm(<Waker>self.stream.wakeups)
        waiter.on_wake = self
        if self.lock.blocking_timeout is not None:
            self._set_deadline(-self.lock.blocking_timeout, _until(self.lock, self.start), clock())

    cdef _called(self, answer):
        """The waiter was woken, or the deadline has passed."""
        if not self.ready:
            self.set_result(DEADLINE_EXCEEDED if self.waiter is None else answer)

    def __call__(self, answer):
        self._called(answer)

    def _late(self):
        self._called(None)

    cdef _leave(self):
        self._clear_deadline()
        if self.waiter is not None:
            self.ready, self.owner = True, None
            self.lock._transport.cancel_wait(self._op(), self.waiter)
        else:
            _Awaitable._leave(self)

    cdef _op(self):
        return self.lock._new_acquire(None if self.waiter is not None else self.token, self.required, self.start)


cdef _release_to_next(BaseLock lock, owner, Lease lease):
    """Release where others of this client wait: to the next of them. Returns None where that is done, else the
    operation that is to be carried out."""
    cdef LocalQueues queues = (<Transport>lock._transport).queues
    cdef int route = queues.release_locked(lease, clock())
    wake, queues.pending_wake = queues.pending_wake, None
    if type(wake) is _Acquire:
        (<_Acquire>wake)._called(None)
    elif wake is not None:
        wake(None)
    if lock._released_locally(owner, lease, route):
        return None
    return new_release(lock, lease, route == SCRIPT)


cdef bint _post_release(BaseLock lock, TaskStream stream, Lease lease) except -1:
    """Send a release that nobody waits for. False: that takes the slow path."""
    cdef Transport transport = lock._transport
    connection = stream.connection
    # Without the script the server refuses it
    if transport.pending_undos or connection.error is not None or not connection.knows_release:
        return False
    if lease._posted or lease._release_unknown or clock() >= lease._deadline or not made_here(lease._raw_token):
        return False
    lease._posted = True
    lease._releases += 1
    lease._lost_end = lease._latest_end()
    posted = PostedRelease(transport, connection, lease, lock._on_lost, lease._lost_end)
    template = hand_over_template(connection.transport.impl.Template, lease._key)
    stream.request(template, posted, b"", lease._raw_token, 0)
    transport.unconfirmed[lease._key] = posted  # now: no reply comes before the loop runs again
    return True


@cython.final
cdef class _Release(_Awaitable):
    """Release the lease of an owner (None: of the task that awaits this), if that is the `noted` one or none was noted.
    Errors are those of `BaseLock._new_release`. Where this is `leaving` a `with`, they go where
    `BaseLock._report_release_error` puts them, beside the `error` that ended its body."""

    cdef bint leaving
    cdef object error
    cdef Lease lease
    cdef object op  # the operation that `others` carries out
    cdef unsigned long thread  # the thread that noted the lease

    def __cinit__(self, BaseLock lock not None, bint leaving, error, owner=None, Lease noted=None):
        self.lock = lock
        self.leaving = leaving
        self.error = error
        self.owner = owner
        self.lease = noted

    cdef _note(self):
        """Note the lease to be released: a signal handler may raise before Python awaits this, which is then collected
        and has to release it all the same."""
        cdef BaseLock lock = self.lock
        self.thread = PyThread_get_thread_ident()
        if self._open_stream() is not None:
            self.lease = lock._leases.get(self.owner)
        if self.lease is None:
            self.lease = lock._lease_of(lock._owner())
        self.owner = None

    cdef _hand_on(self, op, answer):
        self.op = op
        self.others = self.lock._transport.release(self.lock, self.owner, op, answer, self.leaving, self.error)

    cdef _begin(self):
        cdef BaseLock lock = self.lock
        cdef TaskStream stream = self._open_stream()
        cdef Lease lease = lock._leases.get(self.owner)
        if self.lease is not None and lease is not None and lease is not self.lease:  # another one now: it stays
            problem = lock._not_held("release")
            if not self.leaving:
                raise problem
            lock._report_release_error(self.error, problem)
            return
        if stream is None:
            lease = None
        if lease is not None:
            lease._releasing = True
        if lease is not None and (<Transport>lock._transport).queued_keys and not not_releasable(lease):
            self.lease = lease
            op = _release_to_next(lock, self.owner, lease)
            if op is not None:
                self._hand_on(op, ASK_SERVER)
            return
        if lease is not None and not lock.confirm_release and not not_releasable(lease):
            if _post_release(lock, stream, lease):
                lock._released(self.owner, lease)
                return
        if lease is None or not_releasable(lease) or lease._contended or not lock.confirm_release:
            self._hand_on(None, None)
            return
        self.stream = stream
        self.lease = lease
        self.arm(<Waker>stream.wakeups)
        lease._releases += 1
        stream.release(<Template>stream.templates[RELEASE], self, lease._key, lease._raw_token)
        self.sent = stream.sent

    cdef _finish(self, answer):
        if answer == 1:
            self.lock._released(self.owner, self.lease)
        else:
            answer = ASK_SERVER if answer is None else answer
            self._hand_on(_as_sent(self._op(), self.stream.connection, self.sent), answer)

    cdef _op(self):
        return LockRelease(self.lock, self.lease, True)

    cdef _collected(self):
        if self.leaving and self.wakeups is None and self.others is None:
            self.ended = True
            if self.lease is not None and self.thread == PyThread_get_thread_ident():
                self._undo_interrupted(GeneratorExit())
        else:
            _Awaitable._collected(self)

    cdef _undo_for(self, error):
        if self.wakeups is not None and self.op is None:
            self._leave()
        else:
            owner = self.lock._owner() if self.owner is None else self.owner
            self.lock._transport.finish_release(self.lock, owner, self.lease, self.op, error)


# How the interpreter resumes an _Awaitable, where `resume_by` may set it.

cdef PySendResult _send(PyObject *self, PyObject *value, PyObject **result) except -1:
    cdef bint finished = False
    result[0] = NULL
    outcome = (<_Awaitable>self)._step(&finished)
    Py_INCREF(outcome)
    result[0] = <PyObject *>outcome
    return PYGEN_RETURN if finished else PYGEN_NEXT


cdef PyObject *_next(PyObject *self) except? NULL:
    cdef bint finished = False
    outcome = (<_Awaitable>self)._step(&finished)
    if finished:
        PyErr_SetObject(StopIteration, outcome)
        return NULL
    Py_INCREF(outcome)
    return <PyObject *>outcome


def aio_enter_lease(BaseLock self not None):
    """Acquire, and return the lease. Raises LockError when it was not granted within the lock's blocking_timeout."""
    return _Acquire.__new__(_Acquire, self, True)


def aio_exit_lock(BaseLock self not None, kind, error, trace):
    """Release. An error of the release is put where `BaseLock._report_release_error` says, beside the error that ended
    the body of the `with`."""
    cdef _Release release = _Release.__new__(_Release, self, True, error)
    try:
        release._note()
    except BaseException as caught:  # raised by a signal handler, where the running task is looked up in Python
        release.ended = True
        release._undo_interrupted(caught)
        raise
    return release


aio_acquire, aio_release = _Acquire, _Release
resume_by(_Acquire, _send, _next)
resume_by(_Release, _send, _next)
