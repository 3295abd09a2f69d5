# The types of lease.py where it is compiled.

import cython

from fastlock._fork cimport check, generation

cdef extern from "<stdbool.h>":
    ctypedef bint flag "bool"  # a byte, where there are many of its objects; Cython's own takes four

cdef class Lease:
    cdef public object name, fence
    cdef public bytes key, raw_token
    cdef public double deadline
    cdef public flag contended, token_read, expiry_unknown, releasing, release_unknown, unreported
    cdef public short extensions
    cdef public tuple stale_sessions
    cdef long _generation
    cdef object __weakref__


cpdef bint is_inherited(Lease lease) except -1


@cython.locals(digits=bytes, fresh=list, i=cython.Py_ssize_t, token=bytes)
cpdef bytes new_token()
