# The types of waiters.py where it is compiled.

import cython

from fastlock._protocol.lease cimport Lease, flag

cdef class Waiter:
    cdef public object name, on_wake, queue
    cdef public Waiter previous, next
    cdef public bytes key, entry
    cdef public long long ms, keep_ms
    cdef public double sleep
    cdef public flag fenced, woken, counted, linked, believes
    cdef public Lease lease
    cdef public tuple given_back
    cpdef wake(self)


cdef class WaiterList:
    cdef public Py_ssize_t count
    cdef public Waiter first, last

    @cython.locals(next=Waiter)
    cpdef insert(self, Waiter waiter, Waiter previous)

    cpdef add(self, Waiter waiter)
    cpdef remove(self, Waiter waiter)
