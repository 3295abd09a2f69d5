# The types of belief.py where it is compiled.

from fastlock._protocol.lease cimport Lease


cdef class Confirmation:
    cdef public object queue, carrier
    cdef public Lease lease
    cdef public long long ms
    cdef public double sent
    cdef public bytes address
    cpdef answered(self, list reply, double sent)
    cpdef double end_from(self, double sent) except? -1
    cpdef read(self)
