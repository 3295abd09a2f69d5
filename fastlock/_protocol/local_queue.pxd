# The types of local_queue.py where it is compiled.

import cython

from fastlock._protocol.lease cimport Lease, flag
from fastlock._protocol.stats cimport Stats

cdef double _LEAST_LEASE_PART, _INFINITE
cdef int _LOCAL, _DELETE, _SCRIPT, _NOT_HELD

cdef class LocalQueue
cdef class LocalQueues

cdef class Waiter:
    cdef public object name, on_wake
    cdef public Waiter previous, next
    cdef public bytes key, entry
    cdef public long long ms
    cdef public double sleep
    cdef public flag fenced, woken, counted, linked
    cdef public LocalQueue queue
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


cdef class LocalQueue:
    cdef public LocalQueues queues
    cdef public bytes key, entry, address
    cdef public bint shared, queued_early, rapid, entry_sent, joined, was_queued, remote_waiters
    cdef public WaiterList waiters
    cdef public object connection, error
    cdef public tuple stale
    cdef public dict templates
    cdef public Lease circulating
    cdef public double moment, recheck_at, confirmed_at, sleep, handovers_left, handed_over_at
    cpdef Waiter first(self)
    cpdef bint may_enter(self, Waiter waiter, double now)

    @cython.locals(waiter=Waiter)
    cpdef bint last_local_handover(self)
    cpdef double recheck_time(self, Waiter waiter)
    cpdef bint reads(self, Waiter waiter)
    cpdef bint must_verify(self, Waiter waiter, double now)

    @cython.locals(lease=Lease, end=double, left=double)
    cpdef Lease judge(self, Waiter waiter, list reply, double sent, double now)

    @cython.locals(pause=double)
    cpdef note_queued(self, double left, bint told, Py_ssize_t ahead, double sent, double now)

    cpdef note_gone(self)
    cpdef note_granted(self, Waiter waiter, Lease lease, long long remote_waiters, double now)
    cpdef new_entry(self)
    cpdef arm_expiry(self, double now)

    @cython.locals(left=double, fits=bint)
    cpdef Waiter successor_for(self, Lease lease, double now)

    @cython.locals(waiter=Waiter)
    cpdef int release(self, Lease lease, double now)

    @cython.locals(handed=Lease)
    cdef bint _hand_over(self, Waiter waiter, Lease lease, double now) except -1
    cdef _put_back_first(self, Waiter waiter)


cdef class LocalQueues:
    cdef public object mutex
    cdef public Stats stats
    cdef public bytes channel
    cdef public bint push_refused, rapid
    cdef public object pending_wake, on_empty
    cdef public double next_sweep, round_trip, moment
    cdef public dict by_key, by_entry
    cdef object __weakref__
    cpdef bytes address(self)
    cpdef note_reply(self, double seconds)

    @cython.locals(least=double)
    cpdef note_moment(self, bint kept)

    cpdef close(self, LocalQueue queue)
    cpdef forget_entry(self, bytes entry)
    cpdef note_wait(self, Waiter waiter)
    cpdef sweep(self, double now)

    cpdef enqueue(self, Waiter waiter, double now=*)

    @cython.locals(queue=LocalQueue, held=Lease, alone=bint, first=Waiter)
    cpdef enqueue_locked(self, Waiter waiter, double now)

    @cython.locals(queue=LocalQueue)
    cpdef bint may_enter_now(self, Waiter waiter, double now)

    cpdef on_push(self, push)

    @cython.locals(queue=LocalQueue, waiter=Waiter)
    cpdef on_grant_message(self, entry)

    cpdef int release(self, Lease lease, double now)

    @cython.locals(queue=LocalQueue)
    cpdef int release_locked(self, Lease lease, double now)

    @cython.locals(queue=LocalQueue, successor=Waiter)
    cpdef handover_completed(self, Waiter waiter)

    @cython.locals(queue=LocalQueue, lease=Lease)
    cpdef Lease take_back_expired(self, Waiter waiter, double now)
