# The types of batch.py where it is compiled.

import cython

from fastlock._protocol.arguments cimport as_ms, as_name
from fastlock._protocol.lease cimport Lease, is_inherited

cdef double _ENDED


@cython.locals(given=list, keys=list)
cpdef tuple asked(names, timeout)


@cython.locals(leases=list, odd=list, i=cython.Py_ssize_t, lease=Lease)
cpdef tuple granted(list names, list keys, bytes token, double sent, double deadline, list replies)


@cython.locals(given=list, mine=list, once=dict, one=Lease)
cpdef list owned(leases, list given)


@cython.locals(keys=list, tokens=list, lease=Lease)
cpdef tuple keys_and_tokens(list leases)


@cython.locals(begun=list, i=cython.Py_ssize_t, lease=Lease)
cpdef list begin_releases(list leases, list at)


@cython.locals(released=list, rest=list, i=cython.Py_ssize_t, lease=Lease)
cpdef tuple reported(list leases)


@cython.locals(i=cython.Py_ssize_t, lease=Lease)
cpdef unreported(list leases, list released)


@cython.locals(odd=list, i=cython.Py_ssize_t, lease=Lease)
cpdef list ended(list leases, list replies, list at, list released)


cpdef list merge(list given, list mine, list released)
