# cython: language_level=3, binding=True, auto_pickle=False
"""How a thread sleeps until a lease is handed to it, and the clock and the look for signals that go with it.

`parker.py` is the same in Python. Never here: whose turn it is.
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

from fastlock._libc cimport _now as nanoseconds, fastlock_exchange, fastlock_swap

from fastlock._protocol.lease import _BOOTTIME, now

cdef bint BOOTTIME = _BOOTTIME is not None  # else the clock is one that only Python reads
cdef clockid_t CLOCK = _BOOTTIME or 0

cdef extern from "<sched.h>" nogil:
    int sched_yield()

cdef extern from "pythread.h" nogil:
    int PyThread_acquire_lock_timed(PyThread_type_lock lock, long long microseconds, int interruptible)

cdef enum:
    PARKED, PREWOKEN, UNPARKED  # PREWOKEN: its thread is awake, but its time has not come yet

# Nanoseconds: what it takes to wake up, or to hold a lease, if nothing is in the way; what is no delay any more but a
# stall; for how long no thread is woken early after one.
cdef int64_t SHORT = 50_000, STALL = 500_000, FIRST_PAUSE = 10_000_000, LONGEST_PAUSE = 10_000_000_000
cdef int64_t _pause, _early_from, _sound_from, _woken
cdef Parker _prewoken = None  # whose time has come, and whose thread waits for the interpreter


@cython.final
@cython.freelist(64)
cdef class Parker:
    """The sleep of one thread that has nothing to read; it is used once.

    A thread is unparked without the interpreter: one that the system runs at once, in place of the caller, would only
    wait again until the caller releases the interpreter. Where threads do nothing else than hand a lease on, each has
    it for less time than it takes to wake a thread. There the next thread is woken early, as the one before it gets
    the lease, and yields the processor to the others until its own time comes.
    """

    def __cinit__(self):
        self.lock = PyThread_allocate_lock()
        if self.lock is NULL:
            raise MemoryError
        PyThread_acquire_lock_timed(self.lock, 0, 0)

    def __dealloc__(self):
        if self.lock is not NULL:
            PyThread_free_lock(self.lock)

    def __call__(self, yield_to):
        """As what a waiter is woken by."""
        self.unpark(yield_to is True)

    cpdef prewake(self):
        """Wake the thread before its time: it will be unparked soon."""
        global _woken
        if nanoseconds() >= _early_from and fastlock_swap(&self.stage, PARKED, PREWOKEN):
            _woken += 1
            PyThread_release_lock(self.lock)

    cdef unpark(self, bint yield_to):
        """Let the thread go on. yield_to: before the caller, which else keeps the interpreter until it sleeps."""
        global _prewoken
        cdef int64_t time = nanoseconds(), limit = time + SHORT
        if fastlock_exchange(&self.stage, UNPARKED) == PREWOKEN:
            self.ended = time
            _prewoken = self
            return
        self.free = True
        with nogil:
            PyThread_release_lock(self.lock)
            while yield_to and not self.awake and nanoseconds() < limit:
                sched_yield()

    cpdef int park(self, double until) except -1:
        """Sleep until `unpark`, or until that time (on the clock of leases)."""
        global _prewoken
        cdef Parker successor = _prewoken
        cdef bint *free = NULL if successor is None else &successor.free
        cdef long long left
        cdef int how = PY_LOCK_INTR
        _prewoken = None
        while self.stage != UNPARKED and how != PY_LOCK_FAILURE:
            PyErr_CheckSignals()  # nothing else would tell of a signal that came before this thread sleeps
            left = <long long>(max(0.0, until - clock()) * 1e6)
            with nogil:
                if free != NULL:
                    free[0] = True
                how = PyThread_acquire_lock_timed(self.lock, left, 1)
                if how == PY_LOCK_ACQUIRED:
                    self._back_off()
        if free != NULL:
            free[0] = True
        self.awake = True
        if self.ended:
            _stalled(nanoseconds() - self.ended)
        return 0

    cdef void _back_off(self) noexcept nogil:
        """Yield the processor until it is unparked and the interpreter is free. Where the thread before it takes its
        time, it parks again."""
        cdef int64_t limit = nanoseconds() + SHORT
        while self.stage == PREWOKEN and nanoseconds() < limit:
            sched_yield()
        if not fastlock_swap(&self.stage, PREWOKEN, PARKED):
            limit = nanoseconds() + SHORT
            while not self.free and nanoseconds() < limit:
                sched_yield()


def _prewakes():
    """For tests: how many were woken early, and seconds of the latest pause."""
    return _woken, _pause / 1e9


def _forget_stalls():
    """For tests: as if none had been."""
    global _pause, _early_from, _sound_from
    _pause = _early_from = _sound_from = 0


cpdef void _stalled(int64_t since) noexcept:
    """A thread that yields the processor may come late where other programs want it: then no thread is woken early for
    a while, which doubles as long as that goes on."""
    global _early_from, _pause, _sound_from
    cdef int64_t time
    if since > STALL:
        time = nanoseconds()
        _pause = min(2 * _pause, LONGEST_PAUSE) if time < _sound_from else FIRST_PAUSE
        _early_from = time + _pause
        _sound_from = _early_from + 10 * _pause


cpdef double clock() except -1:
    """As `lease.now`, a fifth of a microsecond faster."""
    cdef timespec time
    if not BOOTTIME:
        return now()
    clock_gettime(CLOCK, &time)
    return time.tv_sec + time.tv_nsec * 1e-9


cpdef int check_signals() except -1:
    """Run the handlers of signals that have come, here and now: compiled code runs none by itself."""
    PyErr_CheckSignals()
    return 0


cpdef tuple popped(list these):
    """What is popped from a list, as a tuple of one, or of none."""
    return (these.pop(),) if these else ()
