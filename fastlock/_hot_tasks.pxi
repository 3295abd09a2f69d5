# Part of _hot.pyx: acquire and release for tasks, as what they await. Never here: how a thread waits.

def task_owner(Terms self not None):
    """Owner of what is acquired here: the running task. None: a lock of all tasks; or no loop runs, as in a log."""
    if not self.thread_local:
        return None
    cdef Pipe pipe = (<Common>self._wire).open_pipe
    if pipe is not None and pipe.thread == PyThread_get_thread_ident():
        return running_task((<Turns>pipe.turns).loop)
    try:
        return current_task()
    except RuntimeError:
        return None


cdef class _Exchange(Turn):
    """What a task awaits: one command, and what is made of its answer, with no coroutine and no future in between.

    Nothing is sent before it is awaited. Where the hot path ends, a coroutine (`others`) goes on.
    """

    cdef Terms lock
    cdef Pipe pipe
    cdef object others, owner
    cdef double sent
    cdef bint ended  # as with a coroutine: it cannot be awaited again, and to close it does nothing
    cdef bint must  # of a _Take; here it takes no room

    cdef _begin(self):
        """Ask, and begin to wait; or hand on."""
        raise NotImplementedError

    cdef _end(self, answer):
        """The outcome; or wait once more; or hand on."""
        raise NotImplementedError

    cdef _op(self):
        """The operation of the law that this is."""
        raise NotImplementedError

    cdef Pipe _open_pipe(self):
        """The connection's, if there is one and the running task may use it."""
        cdef Common wire = self.lock._wire
        if forked:
            check()
        cdef Pipe pipe = wire.open_pipe
        if pipe is None or pipe.thread != PyThread_get_thread_ident():
            return None
        task = running_task((<Turns>pipe.turns).loop)
        if task is None:  # another loop runs
            return None
        if self.owner is None and self.lock.thread_local:
            self.owner = task
        return pipe

    cdef _step(self, bint *over):
        """What to wait for; or, when it is over, the outcome."""
        if self.ended:
            raise RuntimeError("cannot reuse what was already awaited")
        if self.others is None:
            outcome = None
            if self.turns is not None and not self.ready:
                raise RuntimeError("it is being awaited already")
            self.ended = True  # unless there is something to wait for
            try:
                if self.turns is None:
                    self._begin()
                else:
                    outcome = self._end(self.result())
            except BaseException as error:  # what was asked or queued until then would be nobody's
                if self.others is None:
                    self._torn(error)
                raise
            if self.others is None:
                over[0] = self.turns is None or self.ready
                if over[0]:
                    return outcome
                self.blocking = True  # as a future's own iterator does it
                self.ended = False
                return self
        self.ended = True
        cdef PyObject *result
        try:
            self.ended = over[0] = PyIter_Send(self.others, None, &result) == PYGEN_RETURN
        except BaseException as error:
            if not own(error):  # a handler of signals may have raised before the coroutine had begun
                self._torn(error)
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
        self._forsake()
        raise error

    def close(self):
        """As a coroutine's: nobody awaits it any more."""
        if self.ended:
            return
        self.ended = True
        if self.others is not None:
            self.others.close()
        else:
            self._forsake()

    def __del__(self):
        if not self.ended:
            self._dropped()

    cdef _dropped(self):
        """Half-way: as a coroutine, it closes."""
        if self.turns is not None or self.others is not None:
            self.close()

    cdef _torn(self, error):
        """It ends by what may strike anywhere; once more, also in here."""
        try:
            self._see_to(error)
        except BaseException as again:
            self._see_to(again)
            raise

    cdef _forsake(self):
        """Its task is cancelled, or ends; a handler of signals may strike as that is seen to."""
        try:
            self._leave()
        except BaseException:
            self._leave()
            raise

    cdef _see_to(self, error):
        """What it has asked for, or is to do, is nobody's now."""
        self._leave()

    cdef _leave(self):
        self.ready = True  # what comes now is for nobody
        self.owner = None
        if self.turns is not None:
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
        try:
            self._call(_time())
        except BaseException:  # a signal's handler raised: the others are called all the same
            if self.sleepers and self.timer is None:
                self.timer = self.loop.call_later(0, self)
            raise

    cdef int _call(self, double now) except -1:
        while self.sleepers:
            take = next(iter(self.sleepers))
            if self.sleepers[take] > now:
                self.timer = self.loop.call_later(self.sleepers[take] - now, self)
                break
            del self.sleepers[take]
            take(None)
        return 0


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

    cdef double start
    cdef bytes token
    cdef Waiter waiter  # behind whom others of this client wait for the same name
    cdef object timer  # an _Alarm, or a timer of its own, that ends it, where its time is limited

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
        if (<Common>lock._wire).crowd and (waiter := _behind(lock, None, None)) is not None:
            self._wait(waiter)
            return
        self.token = new_token()
        self.begin(pipe.turns)
        pipe.request(
            <Template>pipe.forms[ACQUIRE if lock.ms else ACQUIRE_ENDLESS], self, lock.key, self.token, lock.ms
        )
        self.sent = pipe.sent
        if lock.blocking_timeout is not None:
            self._limit(lock.blocking_timeout, self.start + <double>lock.blocking_timeout, self.start)

    cdef _limit(self, length, double at, double now):
        """Have it called when its time is over. `length`: by which those are known who have the same time."""
        self.timer = _alarm((<Common>self.lock._wire).alarms, length, self.turns.loop)
        if self.timer is None or not (<_Alarm>self.timer).add(self, at, now):
            self.timer = self.turns.loop.call_later(at - now, self._late)  # not itself: as a coroutine, it may not

    cdef _unlimit(self):
        timer, self.timer = self.timer, None
        if type(timer) is _Alarm:
            (<_Alarm>timer).sleepers.pop(self, None)
        elif timer is not None:
            timer.cancel()

    cdef _end(self, answer):
        cdef Lease lease
        if self.waiter is not None:
            lease = _handed(self.lock, self.owner, self.waiter)
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
        self.others = self.lock._wire.go_on(op, answer)

    cdef _wait(self, Waiter waiter):
        """Sleep until a lease passes to this waiter, or it is the first, or has to go."""
        self.waiter = waiter
        (<Common>self.lock._wire).gates.joined(waiter, self.start)
        self.lock.key = waiter.key = waiter.gate.key  # one for all who wait: they are many
        if waiter.called:
            self.others = self.lock._wire.run(self._op(), waiter)
            return
        if (<Common>self.lock._wire).ticks is None:
            self.lock._wire.tick()
        self.begin(self.pipe.turns)
        waiter.wake = self
        if self.lock.blocking_timeout is not None:
            self._limit(-self.lock.blocking_timeout, _until(self.lock, self.start), _time())

    cdef _called(self, answer):
        """The waiter is, or the time is over."""
        if not self.ready:
            self.set_result(LATE if self.waiter is None else answer)

    def __call__(self, answer):
        self._called(answer)

    def _late(self):
        self._called(None)

    cdef _leave(self):
        self._unlimit()
        if self.waiter is not None:
            self.ready, self.owner = True, None
            self.lock._wire.torn(self._op(), self.waiter)
        else:
            _Exchange._leave(self)

    cdef _op(self):
        return self.lock.taking(None if self.waiter is not None else self.token, self.must, self.start)


cdef _passed(Terms lock, owner, Lease lease):
    """Where others of this client wait: to the next of them. None: done; else the operation that is to be carried
    out."""
    cdef Gates gates = (<Common>lock._wire).gates
    cdef int what = gates.released(lease, _time())
    wake, gates.wake = gates.wake, None
    if type(wake) is _Take:
        (<_Take>wake)._called(None)
    elif wake is not None:
        wake(None)
    if what == PASSED:
        _gone(lock, owner, lease)
        return None
    if what == GONE:  # by another thread, a moment ago
        lock.drop(lease)
        raise lock._lost("release")
    return _release(lock, lease, what == HAND_OVER)


@cython.final
cdef class _Give(_Exchange):
    """Release the lease of an owner, None: of the task that awaits this; if it is the noted one. Errors are those of
    `Terms.releasing`; `leaving` a `with`, they go where `Terms.left` puts them, beside the `error` that ended its
    body."""

    cdef bint leaving
    cdef object error
    cdef Lease lease
    cdef object op  # with which others go on
    cdef unsigned long thread  # that noted it

    def __cinit__(self, Terms lock not None, bint leaving, error, owner=None, Lease noted=None):
        self.lock = lock
        self.leaving = leaving
        self.error = error
        self.owner = owner
        self.lease = noted

    cdef _note(self):
        """What is to be let go of, also where a signal strikes before Python awaits this, and it is dropped."""
        cdef Terms lock = self.lock
        self.thread = PyThread_get_thread_ident()
        if self._open_pipe() is not None:
            self.lease = lock.leases.get(self.owner)
        if self.lease is None:
            self.lease = lock._of(lock._me())
        self.owner = None

    cdef _hand_on(self, op, answer):
        self.op = op
        self.others = self.lock._wire.release(self.lock, self.owner, op, answer, self.leaving, self.error)

    cdef _begin(self):
        cdef Terms lock = self.lock
        cdef Pipe pipe = self._open_pipe()
        cdef Lease lease = lock.leases.get(self.owner)
        if self.lease is not None and lease is not None and lease is not self.lease:  # another one by now, which stays
            problem = lock._not_held("release")
            if not self.leaving:
                raise problem
            lock.left(self.error, problem)
            return
        if pipe is None:
            lease = None
        if lease is not None:
            lease.parting = True
        if lease is not None and (<Common>lock._wire).crowd and not _odd(lease):
            self.lease = lease
            op = _passed(lock, self.owner, lease)
            if op is not None:
                self._hand_on(op, BEHIND)
            return
        if lease is None or _odd(lease) or lease.contended:
            self._hand_on(None, None)
            return
        self.pipe = pipe
        self.lease = lease
        self.begin(pipe.turns)
        pipe.request(<Template>pipe.forms[RELEASE], self, lease.key, lease.proof, 0)
        self.sent = pipe.sent

    cdef _end(self, answer):
        if answer == 1:
            _gone(self.lock, self.owner, self.lease)
        else:
            self._hand_on(_asked(self._op(), self.pipe.link, self.sent), answer)

    cdef _op(self):
        return Releasing(self.lock, self.lease)

    cdef _dropped(self):
        if self.leaving and self.turns is None and self.others is None:
            self.ended = True
            if self.lease is not None and self.thread == PyThread_get_thread_ident():
                self._torn(GeneratorExit())
        else:
            _Exchange._dropped(self)

    cdef _see_to(self, error):
        if self.turns is not None and self.op is None:
            self._leave()
        else:
            _struck(self.lock, self.lock._me() if self.owner is None else self.owner, self.lease, self.op, error)


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


def aio_enter_lease(Terms self not None):
    """Acquire, and give the lease. Raises LockError when it could not be had within the lock's blocking_timeout."""
    return _Take.__new__(_Take, self, True)


def aio_leave(Terms self not None, kind, error, trace):
    """Release. What goes wrong with it is put where `Terms.left` says, beside the error that ended the body."""
    cdef _Give give = _Give.__new__(_Give, self, True, error)
    give._note()
    return give


aio_take, aio_give = _Take, _Give
for _type in (_Take, _Give):
    (<PyTypeObject *>_type).tp_as_async.am_send = <sendfunc>_send
    (<PyTypeObject *>_type).tp_iternext = <iternextfunc>_next
