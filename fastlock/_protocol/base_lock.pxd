# The types of base_lock.py where it is compiled.

from fastlock._protocol.arguments cimport as_ms, as_name, as_wait
from fastlock._protocol.lease cimport flag

cdef class BaseLock:
    cdef public object name, timeout, sleep, blocking_timeout
    cdef public flag blocking, thread_local, raise_on_release_error, fence, fair, queue
    cdef public object _client, _transport
    cdef public bytes _key
    cdef public long long _ms
    cdef public dict _leases
    cdef public str _encoding
    cdef object __weakref__
