# The types of moments.py where it is compiled.

import cython

cdef double _FAR_SECONDS


cdef class Moments:
    cdef public bytes channel
    cdef public double round_trip, moment
    cpdef bytes address(self)
    cpdef bint far(self) noexcept
    cpdef note_reply(self, double seconds)

    @cython.locals(least=double)
    cpdef note_moment(self, bint kept)
