# The types of waiting.py where it is compiled.

import cython

from fastlock._core cimport SocketStream
from fastlock._protocol.belief cimport Confirmation
from fastlock._protocol.lease cimport Lease
from fastlock._protocol.local_queue cimport LocalQueue
from fastlock._protocol.waiters cimport Waiter
from fastlock._transport.base cimport Transport
from fastlock._transport.parker cimport Parker, check_signals, clock
from fastlock._transport.posted cimport PostedConfirmation, PostedRelease

cdef double _SPIN_SECONDS, _YOUNG_SECONDS, _TURN_SECONDS, _PAUSE_SECONDS


@cython.locals(time=double)
cpdef double take_turn(Transport transport) except? -1


@cython.locals(queue=LocalQueue, at=double, parker=Parker)
cpdef wait(Transport transport, Waiter waiter, double until)

cpdef park(Transport transport, Waiter waiter, Parker parker, double until)
cpdef listen(connection, pending, wake, double at)
cpdef push_connection_of(Transport transport)
cpdef list idle_connections(Transport transport)
cpdef lend(Transport transport, connection)
cpdef bint take_back(Transport transport) except -1


@cython.locals(spin=double)
cpdef send_enter(Transport transport, connection, LocalQueue queue, Waiter waiter, bint joins, double timeout)


@cython.locals(end=double)
cpdef share(connection, write, tuple arguments, double timeout, double spin)

cdef bint _holds_mutex(Transport transport) except -1


@cython.locals(queue=LocalQueue)
cpdef send_hand_over(Transport transport, connection, bytes key, bytes token)


@cython.locals(posted=PostedRelease)
cpdef bint post_release(Transport transport, connection, Lease lease, on_lost) except -1


@cython.locals(posted=PostedConfirmation, alive=bint)
cpdef post_confirmation(Transport transport, connection, LocalQueue queue, Confirmation confirmation)

cdef _flush(connection)


@cython.locals(confirmation=Confirmation)
cpdef read_confirmation(Transport transport, Lease lease)

cpdef bint read_now(connection) except -1


@cython.locals(compiled=SocketStream)
cpdef send_command(
    stream, Py_ssize_t opcode, bytes name, bytes token, long long ms, double timeout, double spin
)


@cython.locals(compiled=SocketStream)
cpdef round_trip(stream, template, bytes name, bytes token, long long ms, double timeout, double spin)


@cython.locals(templates=dict)
cdef _cached(Transport transport, bytes key, connection, command, tuple more)


@cython.locals(busy=cython.Py_ssize_t)
cpdef double spin_seconds(Transport transport) except -1
