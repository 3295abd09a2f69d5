# The types of wakeups.py where it is compiled.

cdef class Wakeup


cdef class WakeupQueue:
    cdef public object loop, due, scheduled, resolved
    cpdef add(self, Wakeup wakeup)
    cpdef reschedule(self)


cdef class Wakeup:
    cdef public WakeupQueue wakeups
    cdef public object answer, callback, context
    cdef public bint ready, blocking
    cpdef arm(self, WakeupQueue wakeups)
    cpdef bint done(self)
    cpdef set_result(self, answer)
    cpdef run_callback(self)
    cpdef result(self)
