# The types of base.py where it is compiled.

from fastlock._protocol.local_queue cimport LocalQueues
from fastlock._protocol.stats cimport Stats
from fastlock._transport.parker cimport Parking

cdef class Transport:
    cdef public bint closed, ever_connected
    cdef public object settings
    cdef public str endpoint
    cdef public LocalQueues queues
    cdef public Stats stats
    cdef public dict queued_keys, expected_keys, shared_timeouts, unconfirmed, resent
    cdef public list pending_undos, connections, idle
    cdef public object _mutex
    cdef public int push_connection_lent
    cdef public double turn_end
    cdef public object push_connection, keep_connection, open_stream, sweep_timer, renewals
    cdef public Parking parking
