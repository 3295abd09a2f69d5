# The types of posted.py where it is compiled.

from fastlock._protocol.belief cimport Confirmation
from fastlock._protocol.lease cimport Lease


cdef class Posted:
    cdef readonly object carrier


cdef class PostedRelease(Posted):
    cdef readonly object transport, on_lost
    cdef readonly Lease lease
    cdef readonly bytes key
    cdef readonly double end
    cdef public double awaited


cdef class PostedConfirmation(Posted):
    cdef readonly Confirmation confirmation
