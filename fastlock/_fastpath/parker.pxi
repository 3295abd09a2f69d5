# Part of _hot.pyx: how a thread sleeps until a lease passes to it. Never here: whose turn it is.

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

from fastlock._libc cimport _now as nanoseconds, fastlock_exchange, fastlock_swap

cdef extern from "<sched.h>" nogil:
    int sched_yield()

cdef extern from "pythread.h" nogil:
    int PyThread_acquire_lock_timed(PyThread_type_lock lock, long long microseconds, int interruptible)

cdef enum:
    PARKED, PREWOKEN, UNPARKED  # the stages of a nap; EARLY: it was woken, and is not over yet

# Nanoseconds: that it takes to wake up, or to have a turn, if nothing is in the way; what is no delay any more but a
# stall; for how long nobody is woken early after one.
cdef int64_t SHORT = 50_000, STALL = 500_000, FIRST_PAUSE = 10_000_000, LONGEST_PAUSE = 10_000_000_000
cdef int64_t _pause, _early_from, _sound_from, _woken
cdef _Parker _prewoken = None  # has its turn, is awake, and waits for the interpreter


@cython.final
@cython.freelist(64)
cdef class _Parker:
    """The sleep of a thread that has nothing to read. It is woken without the interpreter: whom the system runs at once
    in place of the caller would only sleep again until that lets go of it.

    Of threads that do nothing else than pass a lease on, each has its turn in less time than it takes to wake it. So
    the next one is woken early, as a turn begins, and gives way to the others until its own comes.
    """

    cdef PyThread_type_lock lock
    cdef int stage
    cdef bint free, awake  # whoever ended it has let go of the interpreter; its thread is back in it
    cdef int64_t ended  # when, if it was woken before

    def __cinit__(self):
        self.lock = PyThread_allocate_lock()
        if self.lock is NULL:
            raise MemoryError
        PyThread_acquire_lock_timed(self.lock, 0, 0)

    def __dealloc__(self):
        if self.lock is not NULL:
            PyThread_free_lock(self.lock)

    def __call__(self, answer):
        self.unpark(False)

    cdef void prewake(self) noexcept:
        """Wake it: it will be over soon."""
        global _woken
        if nanoseconds() >= _early_from and fastlock_swap(&self.stage, PARKED, PREWOKEN):
            _woken += 1
            PyThread_release_lock(self.lock)

    cdef void unpark(self, bint yield_to) noexcept:
        """cede: let it go on first. Else it would wait for the interpreter, until the caller sleeps."""
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

    cdef int park(self, double until) except -1:
        """Until it is ended, or until that time."""
        global _prewoken
        cdef _Parker heir = _prewoken
        cdef bint *free = NULL if heir is None else &heir.free
        cdef long long left
        cdef int how = PY_LOCK_INTR
        _prewoken = None
        while self.stage != UNPARKED and how != PY_LOCK_FAILURE:
            PyErr_CheckSignals()  # of one that struck before it sleeps, nothing else would tell
            left = <long long>(max(0.0, until - _time()) * 1e6)
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
        """Until it is over and the interpreter is free; or the one before it takes its time: then it sleeps on."""
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
    """Who is woken early and gives way may come late where others want the processors: then nobody is for a while,
    which doubles as long as that goes on."""
    global _early_from, _pause, _sound_from
    cdef int64_t time
    if since > STALL:
        time = nanoseconds()
        _pause = min(2 * _pause, LONGEST_PAUSE) if time < _sound_from else FIRST_PAUSE
        _early_from = time + _pause
        _sound_from = _early_from + 10 * _pause
