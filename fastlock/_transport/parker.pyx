# cython: language_level=3, binding=True, auto_pickle=False
"""How a thread sleeps until a lease is handed to it, with the clock and the check for signals that this needs; and how
it joins a local queue and releases there.

`parker.py` is the same in Python. Never here: who is next.
"""

cimport cython
from cpython.exc cimport PyErr_CheckSignals
from cpython.pythread cimport (
    PY_LOCK_ACQUIRED,
    PY_LOCK_FAILURE,
    PY_LOCK_INTR,
    PyThread_allocate_lock,
    PyThread_free_lock,
    PyThread_release_lock,
    PyThread_type_lock,
)
from libc.stdint cimport int64_t
from posix.time cimport clock_gettime, timespec
from posix.types cimport clockid_t

from fastlock._core cimport Mutex
from fastlock._libc cimport _now as nanoseconds, fastlock_exchange, fastlock_swap

from fastlock._protocol.lease cimport Lease
from fastlock._protocol.local_queue cimport LocalQueues
from fastlock._protocol.waiters cimport Waiter

from fastlock._protocol.lease import _BOOTTIME, now

cdef bint BOOTTIME = _BOOTTIME is not None  # else the clock is read by Python
cdef clockid_t CLOCK = _BOOTTIME or 0

cdef extern from "<sched.h>" nogil:
    int sched_yield()

cdef extern from "pythread.h" nogil:
    int PyThread_acquire_lock_timed(PyThread_type_lock lock, long long microseconds, int interruptible)

cdef enum:
    PARKED, PREWOKEN, UNPARKED  # PREWOKEN: its thread is awake, but has no lease yet

# Nanoseconds: what it takes to wake up, or to hold a lease, if nothing is in the way; from which on a delay counts as a
# stall; for how long no thread is woken early after a stall.
cdef int64_t SHORT = 50_000, STALL = 500_000, FIRST_PAUSE = 10_000_000, LONGEST_PAUSE = 10_000_000_000


@cython.final
cdef class Parking:
    """Makes the parkers of one client's threads, and knows whether it pays to wake them early.

    A thread that was woken early yields the processor, and may come late where other programs want it: that is a stall.
    After a stall no thread is woken early for a while (`pause`, in nanoseconds), which doubles as long as stalls go on.
    `woken` counts the threads that were woken early.
    """

    cpdef Parker parker(self):
        cdef Parker made = Parker.__new__(Parker)
        made.parking = self
        return made

    cpdef void note_delay(self, int64_t delay) noexcept:
        """Note how many nanoseconds after it was unparked a thread ran that had been woken early."""
        cdef int64_t time
        if delay > STALL:
            time = nanoseconds()
            self.pause = min(2 * self.pause, LONGEST_PAUSE) if time < self.sound_from else FIRST_PAUSE
            self.early_from = time + self.pause
            self.sound_from = self.early_from + 10 * self.pause


@cython.final
@cython.freelist(64)
@cython.no_gc  # no cycle lasts: `Parking.prewoken` is cleared as the thread of that parker wakes
cdef class Parker:
    """Parks one thread that has nothing to read; it is used once. Made by a `Parking`.

    The caller releases the GIL to unpark a thread: one that the system runs at once, in place of the caller, would else
    only wait again until the caller releases it. Where threads do nothing else than hand a lease on, each has the lease
    for less time than it takes to wake a thread. There the next thread is woken early, as the one before it gets the
    lease, and yields the processor to the others until it is unparked.
    """

    def __cinit__(self):
        self.lock = PyThread_allocate_lock()
        if self.lock is NULL:
            raise MemoryError
        PyThread_acquire_lock_timed(self.lock, 0, 0)

    def __init__(self):
        raise TypeError("parkers are made by a Parking")

    def __dealloc__(self):
        if self.lock is not NULL:
            PyThread_free_lock(self.lock)

    def __call__(self, yield_to):
        """Unpark the thread: called as the `on_wake` of a waiter."""
        self.unpark(yield_to is True)

    cpdef prewake(self):
        """Wake the thread early: it will be unparked soon."""
        cdef Parking parking = self.parking
        if nanoseconds() >= parking.early_from and fastlock_swap(&self.stage, PARKED, PREWOKEN):
            parking.woken += 1
            PyThread_release_lock(self.lock)

    cdef unpark(self, bint yield_to):
        """Let the thread go on. yield_to: before the caller, which else keeps the GIL until it sleeps."""
        cdef int64_t time = nanoseconds(), limit = time + SHORT
        if fastlock_exchange(&self.stage, UNPARKED) == PREWOKEN:
            self.ended = time
            self.parking.prewoken = self
            return
        self.free = True
        with nogil:
            PyThread_release_lock(self.lock)
            while yield_to and not self.awake and nanoseconds() < limit:
                sched_yield()

    cpdef int park(self, double until) except -1:
        """Sleep until unparked, or until that time (in seconds, on the clock of leases). Signal handlers run, and may
        raise."""
        cdef Parking parking = self.parking
        cdef Parker successor = parking.prewoken
        cdef bint *free = NULL if successor is None else &successor.free
        cdef long long left
        cdef int how = PY_LOCK_INTR
        parking.prewoken = None
        try:
            while self.stage != UNPARKED and how != PY_LOCK_FAILURE:
                PyErr_CheckSignals()  # nothing else would run the handler of a signal that came before this sleep
                left = <long long>(max(0.0, until - clock()) * 1e6)
                with nogil:
                    if free != NULL:
                        free[0] = True
                    how = PyThread_acquire_lock_timed(self.lock, left, 1)
                    if how == PY_LOCK_ACQUIRED:
                        self._back_off()
        finally:
            if parking.prewoken is self:
                parking.prewoken = None
        if free != NULL:
            free[0] = True
        self.awake = True
        if self.ended:
            parking.note_delay(nanoseconds() - self.ended)
        return 0

    cdef void _back_off(self) noexcept nogil:
        """Yield the processor until this thread is unparked and the GIL is free. Where the thread before it takes
        longer than SHORT, it parks again."""
        cdef int64_t limit = nanoseconds() + SHORT
        while self.stage == PREWOKEN and nanoseconds() < limit:
            sched_yield()
        if not fastlock_swap(&self.stage, PREWOKEN, PARKED):
            limit = nanoseconds() + SHORT
            while not self.free and nanoseconds() < limit:
                sched_yield()


cpdef int enqueue(LocalQueues queues, Waiter waiter, double time) except -1:
    """As `LocalQueues.enqueue`, but the mutex is locked without a call through Python: that would take as long as all
    that is done meanwhile."""
    mutex = queues.mutex
    lock(mutex)
    try:
        queues.enqueue_locked(waiter, time)
    finally:
        unlock(mutex)
    return 0


cpdef int release(LocalQueues queues, Lease lease, double time) except -1:
    """As `LocalQueues.release`, but the mutex is locked, and a thread is unparked, without a call through Python."""
    cdef int route
    mutex = queues.mutex
    lock(mutex)
    try:
        route = queues.release_locked(lease, time)
    finally:
        wake, queues.pending_wake = queues.pending_wake, None
        unlock(mutex)
        if type(wake) is Parker:
            (<Parker>wake).unpark(not queues.rapid)
        elif wake is not None:
            wake(not queues.rapid)
    return route


cdef int lock(mutex) except -1:
    """Enter a mutex: the compiled one, or that of a client in Python."""
    if type(mutex) is Mutex:
        (<Mutex>mutex).lock()
    else:
        mutex.__enter__()
    return 0


cdef int unlock(mutex) except -1:
    if type(mutex) is Mutex:
        (<Mutex>mutex).unlock()
    else:
        mutex.__exit__(None, None, None)
    return 0


cpdef double clock() except -1:
    """As `lease.now`, 0.2 microseconds faster."""
    cdef timespec time
    if not BOOTTIME:
        return now()
    clock_gettime(CLOCK, &time)
    return time.tv_sec + time.tv_nsec * 1e-9


cpdef int check_signals() except -1:
    """Run the handlers of signals that have come, which may raise: compiled code runs none by itself."""
    PyErr_CheckSignals()
    return 0


cpdef tuple popped(list these):
    """The last item of a list, popped, as a tuple of one; an empty tuple: the list was empty."""
    return (these.pop(),) if these else ()
