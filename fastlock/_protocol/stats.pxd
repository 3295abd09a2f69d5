# The types of stats.py where it is compiled.

cdef class Stats:
    cdef public long long acquires, waits, local_handovers, remote_handovers, late_grants, timeouts, recovered
    cdef public long long losses, kept_acquires, recalls, renewals, reconnects, commands, flushes

    cpdef list acquired(self, list leases)
