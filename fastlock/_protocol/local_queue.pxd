# The types of local_queue.py where it is compiled.

import cython

from fastlock._protocol.belief cimport Confirmation
from fastlock._protocol.kept cimport KeptLeases
from fastlock._protocol.lease cimport Lease, flag
from fastlock._protocol.stats cimport Stats
from fastlock._protocol.waiters cimport Waiter, WaiterList

cdef double _LEAST_LEASE_PART, _BELIEVED_PART, _INFINITE
cdef int _LOCAL, _DELETE, _SCRIPT, _NOT_HELD

cdef class LocalQueue
cdef class LocalQueues

cdef class LocalQueue:
    cdef public LocalQueues queues
    cdef public bytes key, entry, address
    cdef public bint shared, queued_early, rapid, entry_sent, joined, was_queued, remote_waiters, granted
    cdef public WaiterList waiters
    cdef public object connection, error, fence
    cdef public tuple stale
    cdef public Lease circulating
    cdef public double moment, base, ahead, recheck_at, confirmed_at, sleep, handovers_left, handed_over_at, keep_until
    cpdef Waiter first(self)
    cpdef bint may_enter(self, Waiter waiter, double now)
    cpdef bint is_to_join(self, Waiter waiter) except -1

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

    @cython.locals(held=Lease, lease=Lease, end=double)
    cpdef Lease believe(self, Waiter waiter, double now)

    @cython.locals(lease=Lease)
    cpdef note_refuted(self, Confirmation confirmation, double now)

    @cython.locals(lease=Lease)
    cpdef note_confirmed(self, Confirmation confirmation, long long remote_waiters, double sent, double end)
    cpdef note_granted(self, Waiter waiter, Lease lease, long long remote_waiters, double now)
    cpdef new_entry(self)

    @cython.locals(held=Lease)
    cpdef arm_expiry(self, double now)

    @cython.locals(left=double, most=double, fits=bint)
    cpdef Waiter successor_for(self, Lease lease, double now)

    @cython.locals(waiter=Waiter)
    cpdef int release(self, Lease lease, double now)

    @cython.locals(queues=LocalQueues, kept=Lease)
    cdef bint _keep(self, Lease lease, double now) except -1

    @cython.locals(handed=Lease)
    cdef bint _hand_over(self, Waiter waiter, Lease lease, double now) except -1
    cdef _put_back_first(self, Waiter waiter)


cdef class LocalQueues(KeptLeases):
    cdef public bint push_refused, rapid
    cdef public object pending_wake, on_empty, poll
    cdef public double next_sweep, forget_at
    cdef public dict by_entry, expected, templates
    cdef object __weakref__

    @cython.locals(left=long)
    cpdef expect(self, bytes key, bint contended)
    cpdef close(self, queue)
    cpdef forget_entry(self, bytes entry)
    cpdef note_wait(self, Waiter waiter)
    cpdef sweep(self, double now)

    cpdef enqueue(self, Waiter waiter, double now=*)

    @cython.locals(queue=LocalQueue, held=Lease, alone=bint, first=Waiter)
    cpdef enqueue_locked(self, Waiter waiter, double now)

    @cython.locals(queue=LocalQueue)
    cpdef bint may_enter_now(self, Waiter waiter, double now)

    cpdef note_keepable(self, Lease lease, double sent, double until)

    @cython.locals(queue=LocalQueue, lease=Lease)
    cpdef Lease take_kept(
        self, bytes key, name, long long ms, long long most, dict leases, owner, double now
    )

    cpdef on_push(self, push)

    @cython.locals(queue=LocalQueue, waiter=Waiter)
    cpdef on_grant_message(self, message)

    cpdef int release(self, Lease lease, double now)

    @cython.locals(queue=LocalQueue)
    cpdef int release_locked(self, Lease lease, double now)

    @cython.locals(queue=LocalQueue, successor=Waiter)
    cpdef handover_completed(self, Waiter waiter)

    @cython.locals(queue=LocalQueue, lease=Lease)
    cpdef Lease take_back_expired(self, Waiter waiter, double now)
