# The types of parker.pyx, for it and for the other compiled modules. Never here: code.

from cpython.pythread cimport PyThread_type_lock
from libc.stdint cimport int64_t

cdef class Parker:
    cdef PyThread_type_lock lock
    cdef int stage
    cdef bint free, awake  # whether the unparking thread has released the GIL; whether its own thread has it again
    cdef int64_t ended  # when it was unparked, if its thread had been woken early
    cpdef prewake(self)
    cdef unpark(self, bint yield_to)
    cpdef int park(self, double until) except -1
    cdef void _back_off(self) noexcept nogil

cpdef double clock() except -1
cpdef int check_signals() except -1
cpdef tuple popped(list these)
