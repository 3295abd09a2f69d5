# The types of owners.py where it is compiled.

import cython

from fastlock._core cimport TaskStream
from fastlock._protocol.base_lock cimport BaseLock
from fastlock._transport.base cimport Transport
from fastlock._transport.internals cimport Waker

cpdef thread_owner()


@cython.locals(transport=Transport, stream=TaskStream, wakeups=Waker)
cpdef task_owner(BaseLock lock)
