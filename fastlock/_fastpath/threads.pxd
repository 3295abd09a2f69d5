# The types of threads.py where it is compiled.

import cython

from fastlock._fork cimport check
from fastlock._protocol.base_lock cimport BaseLock
from fastlock._protocol.lease cimport Lease, is_inherited
from fastlock._protocol.local_queue cimport LocalQueue
from fastlock._protocol.waiters cimport Waiter
from fastlock._transport.base cimport Transport
from fastlock._transport.owners cimport thread_owner
from fastlock._transport.parker cimport Parker, check_signals, clock, enqueue, popped
from fastlock._transport.parker cimport release as release_locally
from fastlock._transport.waiting cimport (
    idle_connections, park, post_confirmation, post_release, push_connection_of, read_confirmation, read_now,
    send_command, send_enter, send_hand_over, spin_seconds, take_turn, wait,
)

cdef double _INFINITE, _ENDED, _LAST_TRY_SECONDS
cdef object _RETRY_ELSEWHERE, _NOT_ASKED, _ASK_SERVER
cdef Py_ssize_t _RELEASE
cdef int _SCRIPT


@cython.locals(transport=Transport, sent=double, waiter=Waiter, token=bytes, lease=Lease,
               ms=cython.longlong)
cpdef acquire(BaseLock lock, bint required)


@cython.locals(transport=Transport, time=double)
cdef Lease _at_hand(BaseLock lock)


@cython.locals(timeout=double)
cdef _ask(Transport transport, connection, Py_ssize_t opcode, bytes key, bytes token, long long ms, limit)

cdef _as_sent(op, connection, double sent)
cdef _sent_release(BaseLock lock, Lease lease, bint contended, connection, double sent)


@cython.locals(transport=Transport, queue=LocalQueue, parker=Parker, until=double, lease=Lease)
cdef _wait(BaseLock lock, bint required, Waiter waiter, double start)


@cython.locals(transport=Transport, lease=Lease, queue=LocalQueue, following=Waiter, parker=Parker)
cdef Lease _handed_over(BaseLock lock, owner, Waiter waiter)

cdef bint _greenlets() except -1


@cython.locals(transport=Transport, queue=LocalQueue, sent=double, joins=bint, believed=Lease)
cdef _enter_until_granted(BaseLock lock, bint required, Waiter waiter, double start, double until)

cdef _sent_enter(op, Waiter waiter, bint joins, connection, double sent)


@cython.locals(transport=Transport, lease=Lease, contended=bint, route=int, sent=double)
cpdef release(BaseLock lock)

cdef _begin(BaseLock lock)


@cython.locals(transport=Transport)
cdef bint _posted(BaseLock lock, owner, Lease lease, double time) except -1

cpdef bint not_releasable(Lease lease) except -1
cpdef new_release(BaseLock lock, Lease lease, bint contended, bint counted=*)
