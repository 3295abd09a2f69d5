# Part of _core.pyx: a mutex, for where the GIL alone does not keep threads apart. Never here: what it protects.

from cpython.pythread cimport (
    NOWAIT_LOCK,
    WAIT_LOCK,
    PyThread_acquire_lock,
    PyThread_allocate_lock,
    PyThread_free_lock,
    PyThread_get_thread_ident,
    PyThread_release_lock,
)


@cython.final
cdef class Mutex:
    """As `threading.RLock`, for short critical sections: a thread that waits for it cannot be interrupted. The compiled
    modules lock it without a call through Python."""

    def __cinit__(self):
        self.free = PyThread_allocate_lock()
        if self.free is NULL:
            raise MemoryError

    def __dealloc__(self):
        if self.free is not NULL:
            PyThread_free_lock(self.free)

    def __enter__(self):
        self.lock()

    def __exit__(self, kind, error, trace):
        self.unlock()

    def mine(self):
        """Whether the calling thread holds the mutex."""
        return self.depth > 0 and self.owner == PyThread_get_thread_ident()

    cdef void lock(self) noexcept:
        cdef unsigned long me = PyThread_get_thread_ident()
        if self.depth == 0 or self.owner != me:
            if not PyThread_acquire_lock(self.free, NOWAIT_LOCK):
                with nogil:
                    PyThread_acquire_lock(self.free, WAIT_LOCK)
            self.owner = me
        self.depth += 1

    cdef void unlock(self) noexcept:
        self.depth -= 1
        if self.depth == 0:
            PyThread_release_lock(self.free)
