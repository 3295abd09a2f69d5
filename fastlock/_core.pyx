# cython: language_level=3, binding=True, auto_pickle=False, autotestdict=False, wraparound=False
"""The core, compiled: lock commands into one growing buffer, replies in order to whoever waits for them.

Its parts are the files included below: `Stream` does no I/O, `SocketStream` blocks threads, `TaskStream` serves tasks.
Never here: any decision about locks, any knowledge of what a command means. `_fallback.py` is the same in Python: same
names, same parameters, same behaviour, kept so by `tests/core/test_stream.py`.

Every method of a stream is atomic towards other threads (here by the GIL, which is released only inside system calls,
while the bytes in question belong to the caller alone), so a thread may `put` while another one reads.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.exc cimport PyErr_CheckSignals
from libc.errno cimport EAGAIN, EINTR, errno
from libc.stdint cimport int64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy, strerror

from fastlock._libc cimport (
    MSG_DONTWAIT, MSG_NOSIGNAL, MSG_PEEK, POLLIN, POLLOUT, _digits, _ms, _now, _ns, c_poll, c_recv, c_send,
    RDHUP, fastlock_relax, fastlock_set_recv_timeout, fastlock_swap, pollfd,
)

from hiredis import ProtocolError, PushNotification, Reader

from fastlock._limits import (
    MAX_DEPTH, MAX_DROPPED, MAX_FRAME, MAX_ITEMS, MAX_LONG_ITEMS, MAX_LONG_REPLY, MAX_REPLY, SCRIPT_NAMES,
)
from fastlock._stream_errors import REFUSALS, Broken, NoReply, UnsolicitedData

cdef extern from *:
    """
    #ifndef FASTLOCK_BUILD
    #error "FASTLOCK_BUILD is set by setup.py"
    #endif
    """
    const char *FASTLOCK_BUILD
    const char *FASTLOCK_SOURCES

IMPLEMENTATION = "cython"
BUILD = FASTLOCK_BUILD.decode()
SOURCES = FASTLOCK_SOURCES.decode()  # the digest of the sources that this was compiled from

cdef int64_t LONGEST = MAX_REPLY, FRAME = MAX_FRAME, ITEMS = MAX_ITEMS, DEPTH = MAX_DEPTH, DROPPED = MAX_DROPPED
cdef Py_ssize_t MOST_NAMES = SCRIPT_NAMES

cdef object _NOTHING = object()  # what the reader returns while a reply is incomplete: False is a value of RESP3


include "_template.pxi"
include "_buffer.pxi"
include "_pending.pxi"
include "_filter.pxi"
include "_mutex.pxi"
include "_stream.pxi"
include "_socket_stream.pxi"
include "_task_stream.pxi"
