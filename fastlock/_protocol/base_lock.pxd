# The types of base_lock.py where it is compiled.

from fastlock._protocol.arguments cimport as_flag, as_ms, as_name, as_wait
from fastlock._protocol.lease cimport Lease, flag, is_inherited
from fastlock._protocol.local_queue cimport LocalQueues
from fastlock._protocol.waiters cimport Waiter

import cython

cdef double ENDED
cdef int _LOCAL, _NOT_HELD
cdef Py_ssize_t _MAX_LEASES
cdef int _KEPT, _ACQUIRE, _ACQUIRE_ENDLESS, _ACQUIRE_OR_RECALL

cdef class BaseLock:
    cdef public object name, timeout, sleep, blocking_timeout, _keep_given
    cdef public flag blocking, thread_local, raise_on_release_error, fence, fair, queue, confirm_release
    cdef public object _client, _transport, _renewal, _owners, _on_lost
    cdef public bytes _key
    cdef public long long _ms, _keep_ms
    cdef public dict _leases
    cdef public str _encoding
    cdef object __weakref__
    # These are called by compiled modules only, as C functions; the other methods can be overridden in Python
    cdef _keep(self, owner, Lease lease)

    @cython.locals(deadline=double, lease=Lease, kept=bint, ms=cython.longlong)
    cdef Lease _granted(self, owner, bytes token, double sent, double time, LocalQueues queues)

    @cython.locals(lease=Lease)
    cdef Lease _handed_over(self, owner, Waiter waiter, double time, LocalQueues queues)
    cdef _released(self, owner, Lease lease)
    cdef bint _released_locally(self, owner, Lease lease, int route) except -1

    @cython.locals(waiter=Waiter)
    cdef Waiter _waits_locally(self, answer, token, dict queued)

    @cython.locals(queues=LocalQueues)
    cdef bint _needs_slow_path(self) except -1
    cpdef bint _believes(self)

    @cython.locals(lease=Lease)
    cpdef Lease _reenter(self)

    @cython.locals(queues=LocalQueues, lease=Lease, before=Lease, taken=Lease)
    cpdef Lease _take_kept(self, owner, double time)

    @cython.locals(token=bytes, queues=LocalQueues)
    cdef bytes _fresh_token(self)
    cdef long long _lease_ms(self, bytes token) except -1
    cpdef int _opcode(self) except -1

    @cython.locals(lease=Lease)
    cpdef Lease _entered_before(self)
    cpdef bint _leave_inner(self, Lease lease) except -1
