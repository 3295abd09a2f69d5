# The types of _gate.py where it is compiled.

import cython

from fastlock._lease cimport Lease, flag
from fastlock._stats cimport Stats

cdef class Gate
cdef class Gates

cdef class Waiter:
    cdef public object name, wake
    cdef public Waiter before, after
    cdef public bytes key, place
    cdef public long long ms
    cdef public double sleep
    cdef public flag fenced, called, counted, waits
    cdef public Gate gate
    cdef public Lease lease
    cdef public tuple left
    cpdef call(self)


cdef class Line:
    cdef public Py_ssize_t count
    cdef public Waiter first, last

    @cython.locals(after=Waiter)
    cpdef insert(self, Waiter waiter, Waiter before)

    cpdef add(self, Waiter waiter)
    cpdef remove(self, Waiter waiter)


cdef class Gate:
    cdef public Gates gates
    cdef public bytes key, place
    cdef public bint shared, ahead, brisk, asked, waited, elsewhere
    cdef public Line waiters
    cdef public object link, error
    cdef public tuple stale
    cdef public dict forms
    cdef public Lease held
    cdef public double look_at, since, sleep, passes, handed
    cpdef Waiter first(self)
    cpdef bint may_look(self, Waiter waiter, double now)

    @cython.locals(waiter=Waiter)
    cpdef bint last_pass(self)
    cpdef double wake_at(self, Waiter waiter)
    cpdef bint doubts(self, Waiter waiter, double now)
    cpdef queued(self, double left, bint told, double now)
    cpdef granted(self, Waiter waiter, Lease lease, long long elsewhere, double now)
    cpdef renew(self)
    cpdef warn(self, double now)

    @cython.locals(left=double)
    cpdef Waiter next_for(self, Lease lease, double now)

    @cython.locals(waiter=Waiter)
    cpdef int release(self, Lease lease, double now)

    @cython.locals(handed=Lease)
    cdef bint _passed(self, Waiter waiter, Lease lease, double now) except -1
    cdef _first_again(self, Waiter waiter)


cdef class Gates:
    cdef public object mutex
    cdef public Stats stats
    cdef public bytes inbox
    cdef public bint deaf, brisk
    cdef public object wake
    cdef public double swept
    cdef public dict by_key, by_place
    cdef object __weakref__
    cpdef close(self, Gate gate)
    cpdef count(self, Waiter waiter)
    cpdef sweep(self, double now)

    cpdef join(self, Waiter waiter, double now=*)

    @cython.locals(gate=Gate, held=Lease, alone=bint, first=Waiter)
    cpdef joined(self, Waiter waiter, double now)

    @cython.locals(gate=Gate)
    cpdef bint ask(self, Waiter waiter, double now)

    cpdef pushed(self, push)

    @cython.locals(gate=Gate, waiter=Waiter)
    cpdef hear(self, place)

    cpdef int release(self, Lease lease, double now)

    @cython.locals(gate=Gate)
    cpdef int released(self, Lease lease, double now)

    @cython.locals(gate=Gate, heir=Waiter)
    cpdef taken(self, Waiter waiter)

    @cython.locals(gate=Gate, lease=Lease)
    cpdef Lease returned(self, Waiter waiter, double now)
