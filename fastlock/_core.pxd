# The types of _core.pyx, for it and for the other compiled modules. Never here: code.

from cpython.pythread cimport PyThread_type_lock
from libc.stdint cimport int64_t

cdef enum:
    PARTS = 8

cdef struct Segment:
    const char *literal
    Py_ssize_t size
    int argument

cdef class Template:
    cdef readonly tuple parts
    cdef list literals
    cdef Segment segments[PARTS]
    cdef int count
    cdef int _segment(self, bytes literal, int argument) except -1

cdef struct Buffer:
    char *data
    Py_ssize_t used, room

cdef class Mutex:
    cdef PyThread_type_lock free
    cdef unsigned long owner
    cdef Py_ssize_t depth
    cdef void lock(self) noexcept
    cdef void unlock(self) noexcept

cdef class PendingReply:
    cdef public object reply
    cdef public object wake
    cdef public bint ready
    cdef public bint cancelled
    cdef unsigned long thread  # the thread that waits for the reply
    cpdef set_result(self, reply)
    cdef bint waits(self, unsigned long thread) noexcept
    cdef bint sleeps(self) noexcept

cdef class _ReplyFilter:
    cdef unsigned char kind  # of the header that is being read: its first byte, 0 before it
    cdef int64_t announced  # the size in that header; -1: it holds no size
    cdef int64_t skip  # bytes of a string that are still to come
    cdef bint drops  # whether these are dropped
    cdef int64_t longest, items  # that a reply may announce
    cdef bytes held  # a string's header that is not complete yet; None: nothing is held back
    cdef bint within(self) noexcept
    cdef bytes passed(self, bytes chunk)
    cdef bint _announces(self) except -1

cdef class Stream:
    cdef Buffer out
    cdef list ring
    cdef Py_ssize_t head, pending_, missing
    cdef Py_ssize_t partial
    cdef _ReplyFilter filter
    cdef object reader, gets, feed_
    cdef list pushes
    cdef bint out_of_step  # replies were lost: no thread may read on, the connection must be closed
    cdef public object on_push  # gets the push messages
    cdef public tuple templates  # the command table of its server
    cdef readonly int64_t commands, flushes  # commands queued, and batches of them sent, since the stream was made
    cdef public bytes release_script  # that releases many locks: its SHA1, where releases are sent as scripts
    cdef object releases  # those that are put off, to be written with the next ones, at the end of `out`
    cdef readonly bint broken  # bytes were lost or made no sense: the connection must be closed

    cpdef bytes take_output(self)
    cpdef feed(self, data)
    cdef int _put(self, Template template, pending_reply, bytes name, bytes token, int64_t ms) except -1
    cdef int _make_room(self) except -1
    cdef int _write_releases(self) except -1
    cdef int _push(self, pending_reply) except -1
    cdef object _pop(self)
    cdef object _getter_at(self, Py_ssize_t index)
    cdef bint _within_reply(self) noexcept
    cdef int _deliver(self, Py_ssize_t size) except -1

cdef class SocketStream(Stream):
    cdef object sock
    cdef int fd
    cdef char *chunk
    cdef int sending
    cdef unsigned long sender  # the thread that sends, if one does
    cdef bint wants_gil  # whether the thread that sends or reads waits for the GIL
    cdef bint sliced  # whether the socket itself has waited for a slice of this wait, and signals were checked for
    cdef int64_t usual_delay, last_reply_at  # nanoseconds that replies take, and when the last one came
    cdef unsigned int probes
    cdef object leader  # pending reply of the thread that reads
    cdef list listeners  # pending replies of threads that wait for push messages

    cpdef round_trip(self, Template template, bytes name, bytes token, int64_t ms, double timeout, double spin)
    cpdef bint usable(self) except -1
    cpdef bint receive(self, double timeout, double spin) except -1
    cpdef bint reader_waits(self) except -1
    cpdef next_reader(self)
    cdef bint _awaited(self)
    cdef int _taken(self) except -1
    cdef void _give_back(self, Buffer taken) noexcept
    cdef int _send(self, const char *data, Py_ssize_t size, double timeout) except -1
    cdef int _send_and_read(self, double timeout, double spin) except -1
    cdef bint _exchange(self, PendingReply pending_reply, double timeout, double spin) except -1
    cdef int _resign(self, PendingReply pending_reply) except -1
    cdef int64_t _budget(self, double spin) noexcept
    cdef int _make_chunk(self) except -1
    cdef ssize_t _wait_for_bytes(self, int64_t budget, int64_t end) noexcept nogil
    cdef bint _received(self, ssize_t size, int64_t start) except -1

cdef class TaskStream(Stream):
    cdef public object connection, wakeups  # the connection that it is of, and the WakeupQueue of its tasks
    cdef public unsigned long thread  # their thread
    cdef public double sent  # when the first command of a tick came
    cdef object flush_soon
    cdef bint flushing

    cpdef announce(self)
    cpdef release(self, Template template, pending_reply, bytes name, bytes token)
    cpdef request(self, Template template, pending_reply, bytes name, bytes token, int64_t ms)
