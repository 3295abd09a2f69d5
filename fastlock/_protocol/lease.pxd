# The types of lease.py where it is compiled.

import cython

from fastlock._fork cimport check, generation

cdef extern from "<stdbool.h>":
    ctypedef bint flag "bool"  # a byte, where there are many of its objects; Cython's own takes four

cdef class Lease:
    cdef public object _name, _fence
    cdef public bytes _key, _raw_token
    cdef public double _deadline, _since, _lost_end
    cdef public flag _contended, _token_read, _expiry_unknown, _releasing, _release_unknown, _unreported
    cdef public flag _posted
    cdef public short _extensions
    cdef public int _extensions_begun, _depth, _reads, _releases
    cdef public object _renewal, _confirmation
    cdef public tuple _stale_sessions
    cdef long _generation
    cpdef _read_confirmation(self)
    cpdef bint _leave_to_another(self)
    cdef object __weakref__


cpdef bint is_inherited(Lease lease) except -1


@cython.locals(mine=bytes, digits=bytes, fresh=list, i=cython.Py_ssize_t, token=bytes)
cpdef bytes new_token()
