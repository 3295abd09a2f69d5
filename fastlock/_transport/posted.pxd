# The types of posted.py where it is compiled.

from fastlock._protocol.lease cimport Lease


cdef class PostedRelease:
    cdef readonly object transport, carrier, on_lost
    cdef readonly Lease lease
    cdef readonly bytes key
    cdef readonly double end
