# The types of base_lock.py where it is compiled.

from fastlock._protocol.arguments cimport as_ms, as_name, as_wait
from fastlock._protocol.lease cimport Lease, flag, is_inherited
from fastlock._protocol.local_queue cimport LocalQueues, Waiter
from fastlock._protocol.stats cimport Stats

import cython

cdef double ENDED
cdef int _LOCAL, _NOT_HELD
cdef Py_ssize_t _MAX_LEASES

cdef class BaseLock:
    cdef public object name, timeout, sleep, blocking_timeout
    cdef public flag blocking, thread_local, raise_on_release_error, fence, fair, queue, confirm_release
    cdef public object _client, _transport, _renewal, _owners, _on_lost
    cdef public bytes _key
    cdef public long long _ms
    cdef public dict _leases
    cdef public str _encoding
    cdef object __weakref__
    # These are called by compiled modules only, as C functions; the other methods can be overridden in Python
    cdef _keep(self, owner, Lease lease)

    @cython.locals(deadline=double, lease=Lease)
    cdef Lease _granted(self, owner, bytes token, double sent, double time, Stats stats)

    @cython.locals(lease=Lease)
    cdef Lease _handed_over(self, owner, Waiter waiter, double time, LocalQueues queues)
    cdef _released(self, owner, Lease lease)
    cdef bint _released_locally(self, owner, Lease lease, int route) except -1
    cdef Waiter _waits_locally(self, answer, token, dict queued)
    cdef bint _needs_slow_path(self) except -1

    @cython.locals(lease=Lease)
    cpdef Lease _reenter(self)

    @cython.locals(lease=Lease)
    cpdef Lease _entered_before(self)
    cpdef bint _leave_inner(self, Lease lease) except -1
