# The types of kept.py where it is compiled.

from fastlock._protocol.moments cimport Moments
from fastlock._protocol.stats cimport Stats

cdef class KeptLeases(Moments):
    cdef public object mutex, keeper
    cdef public Stats stats
    cdef public dict by_key, kept, unknown
    cdef public bint hears_recalls, ended, refused
    cdef public double next_lapse
    cpdef expect(self, bytes key, bint contended)
    cpdef close(self, queue)
    cpdef tell_recalled(self, lease)
