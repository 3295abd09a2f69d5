# The types of wakeups.py where it is compiled.

from fastlock._transport.internals cimport Waker, Wakeup

cdef class WakeupQueue(Waker):
    cdef public object due, scheduled
    cpdef reschedule(self)
