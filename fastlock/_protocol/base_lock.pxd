# The types of base_lock.py where it is compiled.

from fastlock._protocol.arguments cimport as_ms, as_name, as_wait
from fastlock._protocol.lease cimport Lease, flag
from fastlock._protocol.local_queue cimport LocalQueues, Waiter
from fastlock._protocol.stats cimport Stats

import cython

cdef double ENDED

cdef class BaseLock:
    cdef public object name, timeout, sleep, blocking_timeout
    cdef public flag blocking, thread_local, raise_on_release_error, fence, fair, queue
    cdef public object _client, _transport
    cdef public bytes _key
    cdef public long long _ms
    cdef public dict _leases
    cdef public str _encoding
    cdef object __weakref__
    cpdef _keep_lease(self, owner, Lease lease)

    @cython.locals(deadline=double, lease=Lease)
    cpdef Lease _granted(self, owner, bytes token, double sent, double time, Stats stats)

    @cython.locals(lease=Lease)
    cpdef Lease _handed_over(self, owner, Waiter waiter, double time, LocalQueues queues)
    cpdef _released(self, owner, Lease lease)
    cpdef Waiter _waits_locally(self, answer, token, queued)
    cpdef bint _needs_slow_path(self) except -1
