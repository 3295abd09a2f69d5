# The types of parker.pyx, for it and for the other compiled modules. Never here: code.

from cpython.pythread cimport PyThread_type_lock
from libc.stdint cimport int64_t

from fastlock._protocol.lease cimport Lease
from fastlock._protocol.local_queue cimport LocalQueues
from fastlock._protocol.waiters cimport Waiter

cdef class Parker


cdef class Parking:
    cdef readonly long long woken, pause
    cdef int64_t early_from, sound_from  # when threads are woken early again; from when on a stall counts as the first
    cdef Parker prewoken  # was woken early and is unparked now; its thread waits for the GIL
    cpdef Parker parker(self)
    cpdef void note_delay(self, int64_t delay) noexcept


cdef class Parker:
    cdef Parking parking
    cdef PyThread_type_lock lock
    cdef int stage
    cdef bint free, awake  # whether the unparking thread has released the GIL; whether its own thread has it again
    cdef int64_t ended  # when it was unparked, if its thread had been woken early
    cpdef prewake(self)
    cdef unpark(self, bint yield_to)
    cpdef int park(self, double until) except -1
    cdef void _back_off(self) noexcept nogil

cpdef int enqueue(LocalQueues queues, Waiter waiter, double time) except -1
cpdef int release(LocalQueues queues, Lease lease, double time) except -1
cpdef double clock() except -1
cpdef int check_signals() except -1
cpdef tuple popped(list these)
