# cython: language_level=3, binding=True, auto_pickle=False, autotestdict=False, wraparound=False
"""The core, compiled: lock commands into one growing buffer, replies in order to whoever waits for them.

Lives here: RESP encoding from templates, `hiredis.Reader` for the replies, the order of pending replies, send and recv
without the GIL. Never here: any decision about locks, any knowledge of what a command means. `_fallback.py` is the same
in Python: same names, same parameters, same behaviour, kept so by `tests/test_bytes.py`.

Every method of `Stream` is atomic towards other threads (here by the GIL, which is released only inside system calls,
while the bytes in question belong to the caller alone), so a thread may `put` while another one reads. Only `sending`
changes without the GIL, atomically: a thread that queues meanwhile has the sender check again, or sends by itself.
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
    fastlock_patience, fastlock_relax, fastlock_swap, pollfd,
)

from hiredis import ProtocolError, PushNotification, Reader

from fastlock._stream_errors import Broken, NoReply, UnsolicitedData

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

cdef enum:
    LONGEST = 65536
    FRAME = 64
    ITEMS = 9999
    DEPTH = 8

MAX_REPLY = LONGEST  # bytes of a string: as long as the longest token; a longer string is dropped
MAX_FRAME = FRAME  # bytes around the string: a reply longer than both together is none to a lock command
MAX_ITEMS = ITEMS  # of one list or map: the lists of a batch have 100
MAX_DEPTH = DEPTH  # of nesting: `COMMAND INFO` on Valkey 9.1 nests 6 deep, no other reply more than 3
MAX_DROPPED = 1 << 32  # bytes of a string that is dropped: a server's longest string has 1 << 29 by default
cdef int64_t DROPPED = MAX_DROPPED

cdef enum:
    CHUNK = 65536
    KEPT = 262144
    SLICE = 100  # milliseconds for which the socket itself waits for bytes; for the rest of a wait it is polled

cdef enum:
    QUIET, SENDING, SENDING_MORE  # whether a thread sends, and whether more was queued meanwhile for it to send

BUSY = object()  # answer of `Stream.round_trip`: other threads use the stream, nothing was done
cdef object _NOTHING = object()  # what the reader returns while a reply is incomplete: False is a value of RESP3


include "_template.pxi"
include "_pending.pxi"
include "_filter.pxi"
include "_mutex.pxi"


@cython.final
cdef class Stream:
    """One connection's bytes: commands out, replies in, in order, each to its pending reply.

    A pending reply is a `PendingReply`, a future, or anything with `done()` and `set_result(reply)`; None ignores the
    reply. Error replies are results, too (`hiredis.ReplyError`). Push messages go to `on_push`.
    """

    def __cinit__(self):
        self.out = self.chunk = NULL

    def __init__(self, sock=None):
        self.filter = _ReplyFilter.__new__(_ReplyFilter)
        self.reader = Reader(notEnoughData=_NOTHING)
        self.gets = self.reader.gets
        self.feed_ = self.reader.feed
        self.ring = [None] * 16
        self.pushes = []
        self.listeners = []
        self.templates = ()
        self.sock = sock
        self.fd = -1
        if sock is not None:
            self.fd = sock.fileno()
            fastlock_patience(self.fd, SLICE)

    def __dealloc__(self):
        free(self.out)
        free(self.chunk)

    # encode

    def put(self, Template template not None, pending_reply, bytes name, bytes token, int64_t ms):
        """Queue one command; its reply goes to `pending_reply`."""
        self._make_room()
        self._encode(template, name, token, ms)
        self._push(pending_reply)

    def serve(self, connection, wakeups, thread, flush_soon):
        """Set up the stream for tasks: its connection, their wakeups and thread, and what schedules a flush."""
        self.connection = connection
        self.wakeups = wakeups
        self.thread = thread
        self.flush_soon = flush_soon

    cpdef request(self, Template template, pending_reply, bytes name, bytes token, int64_t ms):
        """Queue one command, and schedule a flush; its reply goes to `pending_reply`."""
        self._make_room()
        self._encode(template, name, token, ms)
        self._push(pending_reply)
        if not self.flushing:
            self.announce()

    def tick(self):
        """Flush what was announced; again, if a signal handler raises as the flush begins."""
        try:
            self.connection.flush()
        except BaseException:
            self.connection.flush()
            raise

    def announce(self):
        """Schedule a flush of what was queued, by whatever method: once until the next `take_output`."""
        if not self.flushing:
            self.flush_soon()  # first: if a signal handler raises in it, the next call schedules again
            self.flushing = True

    def put_many(self, Template template not None, pending_reply, list names, list tokens, int64_t ms):
        """Queue one command per name; `pending_reply` gets the list of replies, in order."""
        if not names:
            raise ValueError("no names")
        if len(tokens) != len(names):
            raise ValueError(f"{len(names)} names but {len(tokens)} tokens")
        cdef Py_ssize_t i
        cdef _Many many = _many(pending_reply, len(names))
        _check_bytes(names)
        _check_bytes(tokens)
        self._make_room()
        for i in range(many.missing):
            self._encode(template, <bytes>names[i], <bytes>tokens[i], ms)
        self._push(many)

    def put_command(self, pending_reply, tuple args):
        """Queue any command, given as bytes; its reply goes to `pending_reply`."""
        _check_bytes(args)
        self._make_room()
        self._pack(args)
        self._push(pending_reply)

    def put_calls(self, pending_reply, list calls):
        """Queue any commands; `pending_reply` gets the list of replies, in order."""
        cdef tuple args
        cdef _Many many
        if not calls:
            raise ValueError("no calls")
        for args in calls:
            _check_bytes(args)
        many = _many(pending_reply, len(calls))
        self._make_room()
        for args in calls:
            self._pack(args)
        self._push(many)

    def take_output(self):
        """The bytes to be sent, which the caller is to send: they are not kept here."""
        cdef bytes data = PyBytes_FromStringAndSize(self.out, self.used)
        self.flushing = False
        self.flushes += 1
        self._emptied()
        return data

    cdef int _encode(self, Template template, bytes name, bytes token, int64_t ms) except -1:
        cdef int i
        cdef Segment *segment
        cdef char digits[24]
        cdef char *text = digits
        cdef Py_ssize_t size = 0, need = 0
        cdef bytes value
        if template is None or name is None or token is None:
            raise TypeError("template, name and token must not be None")
        for i in range(template.count):
            need += template.segments[i].size + 48
            if template.segments[i].argument == 0:
                need += PyBytes_GET_SIZE(name)
            elif template.segments[i].argument == 1:
                need += PyBytes_GET_SIZE(token)
        self._reserve(need)
        for i in range(template.count):
            segment = &template.segments[i]
            self._copy(segment.literal, segment.size)
            if segment.argument < 0:
                continue
            if segment.argument == 2:
                if not size:
                    size = _digits(digits, ms)
                self._bulk(text, size)
            else:
                value = name if segment.argument == 0 else token
                self._bulk(PyBytes_AS_STRING(value), PyBytes_GET_SIZE(value))
        return 0

    cdef int _pack(self, tuple args) except -1:
        cdef Py_ssize_t need = 32
        for arg in args:
            need += PyBytes_GET_SIZE(<bytes>arg) + 32
        self._reserve(need)
        self.out[self.used] = b"*"
        self.used += 1
        self.used += _digits(self.out + self.used, len(args))
        self._copy(b"\r\n", 2)
        for arg in args:
            self._bulk(PyBytes_AS_STRING(<bytes>arg), PyBytes_GET_SIZE(<bytes>arg))
        return 0

    cdef void _copy(self, const char *data, Py_ssize_t size) noexcept:
        memcpy(self.out + self.used, data, size)
        self.used += size

    cdef void _bulk(self, const char *data, Py_ssize_t size) noexcept:
        self.out[self.used] = b"$"
        self.used += 1
        self.used += _digits(self.out + self.used, size)
        self._copy(b"\r\n", 2)
        self._copy(data, size)
        self._copy(b"\r\n", 2)

    cdef int _reserve(self, Py_ssize_t size) except -1:
        cdef Py_ssize_t room = self.room or 1024
        cdef char *out
        if self.used + size <= self.room:
            return 0
        while room < self.used + size:
            room *= 2
        out = <char *>realloc(self.out, room)
        if out == NULL:
            raise MemoryError
        self.out = out
        self.room = room
        return 0

    cdef void _emptied(self) noexcept:
        self.used = 0
        if self.room > KEPT:
            free(self.out)
            self.out = NULL
            self.room = 0

    # order

    @property
    def pending(self):
        """How many pending replies there are."""
        return self.pending_

    @property
    def unsent(self):
        """Bytes queued and not yet handed to the socket."""
        return self.used

    cdef int _make_room(self) except -1:
        """Called before a byte is written: an allocation may run the garbage collector, and so other threads. From here
        to the end of `_push` nothing is allocated, so bytes and pending replies stay in the same order."""
        cdef Py_ssize_t size, i
        cdef list ring, old
        while self.pending_ == len(self.ring):
            size = self.pending_
            ring = [None] * (2 * size)
            if self.pending_ == size == len(self.ring):  # no other thread grew it meanwhile
                old = self.ring
                for i in range(size):
                    ring[i] = old[(self.head + i) & (size - 1)]
                self.ring = ring
                self.head = 0
        return 0

    cdef int _push(self, pending_reply) except -1:
        cdef Py_ssize_t count = (<_Many>pending_reply).missing if type(pending_reply) is _Many else 1
        self.ring[(self.head + self.pending_) & (len(self.ring) - 1)] = pending_reply
        self.pending_ += 1
        self.missing += count
        self.commands += count
        return 0

    cdef object _pop(self):
        cdef Py_ssize_t head = self.head
        pending_reply = self.ring[head]
        self.ring[head] = None
        self.head = (head + 1) & (len(self.ring) - 1)
        self.pending_ -= 1
        return pending_reply

    def drain(self, list into not None):
        """Move every pending reply into that list, in order, and return it; none is pending afterwards, and bytes that
        were not sent are dropped."""
        while self.pending_ > 0:
            pending_reply = self._pop()
            into.append((<_Many>pending_reply).pending_reply if type(pending_reply) is _Many else pending_reply)
        self.missing = 0
        self._emptied()
        return into

    def next_reader(self):
        """The first pending reply whose thread sleeps and could read next, or None."""
        cdef Py_ssize_t i
        for i in range(self.pending_):
            pending_reply = self.ring[(self.head + i) & (len(self.ring) - 1)]
            if type(pending_reply) is _Many:
                pending_reply = (<_Many>pending_reply).pending_reply
            if type(pending_reply) is PendingReply and (<PendingReply>pending_reply).sleeps():
                return pending_reply
        for pending_reply in self.listeners:
            if (<PendingReply>pending_reply).sleeps():
                return pending_reply
        return None

    # replies

    def feed(self, data):
        """Parse bytes from the server. ProtocolError: they make no sense, the connection must be closed."""
        cdef bytes chunk = data if type(data) is bytes else bytes(data)
        if self.out_of_step:
            raise ProtocolError("the connection is out of step: bytes were lost, or made no sense")
        try:
            chunk = self.filter.passed(chunk)
            self.feed_(chunk)
            self._deliver(PyBytes_GET_SIZE(chunk))
        except BaseException:
            self.broken = self.out_of_step = True
            raise

    cdef int _deliver(self, Py_ssize_t size) except -1:
        """Parse all of a chunk before any reply is delivered: one reply too many makes those beside it suspect."""
        cdef object reply, pending_reply, getter
        cdef list replies = []
        cdef _Many many = None
        self.partial += size
        while True:
            try:
                reply = self.gets()
            except TypeError as error:  # a map whose key is a list or a map
                raise ProtocolError(f"a reply that makes no sense: {error}") from None
            if reply is _NOTHING:
                break
            self.partial = 0
            if type(reply) is PushNotification and reply[:1] != [b"subscribe"]:  # that is the reply to SUBSCRIBE
                self.pushes.append(reply)
                continue
            if type(reply) is list or type(reply) is dict:
                _check_depth(reply, DEPTH)
            replies.append(reply)
        if self.partial > LONGEST + FRAME:
            raise ProtocolError(f"a reply of more than {LONGEST + FRAME} bytes")
        if len(replies) > self.missing:
            raise ProtocolError(f"a reply that nobody asked for, among {replies!r:.80}")
        self.missing -= len(replies)
        for reply in replies:
            if not self.pending_:  # drained, as the connection failed meanwhile
                break
            pending_reply = self.ring[self.head]
            if type(pending_reply) is _Many:
                many = <_Many>pending_reply
                many.replies.append(reply)
                many.missing -= 1
                if many.missing:
                    continue
                reply = many.replies
            getter = many.pending_reply if type(pending_reply) is _Many else pending_reply
            if type(getter) is PendingReply:
                (<PendingReply>getter).set_result(reply)
            elif getter is not None and not getter.done():
                getter.set_result(reply)
            if self.pending_ and self.ring[self.head] is pending_reply:
                self._pop()  # only now: if a signal handler raised in `set_result`, `drain` still finds it
        if self.pushes:
            replies, self.pushes = self.pushes, []
            for reply in replies:
                if self.on_push is not None:
                    self.on_push(reply)
        return 0

    # the socket, for threads

    def usable(self):
        """False: the server replied unasked, or closed the connection, while no reply was pending. Push messages are
        delivered."""
        cdef char byte
        cdef ssize_t size, read = 0
        cdef bint half
        while not self.pending_ and self.leader is None:
            size = c_recv(self.fd, &byte, 1, MSG_DONTWAIT | MSG_PEEK)
            if size < 0:  # half a reply was read: its rest must not be taken for one
                half = read and (self.partial or self.filter.kind or self.filter.skip)
                return (errno == EAGAIN or errno == EINTR) and not half
            if size == 0 or self.on_push is None:
                return False
            self._make_chunk()
            try:
                read = self._received(c_recv(self.fd, self.chunk, CHUNK, MSG_DONTWAIT), 0)
            except (Broken, ProtocolError):
                return False
        return True

    def flush(self, double timeout):
        """Send what is queued, also what other threads queue meanwhile; returns at once if another thread is sending.

        NoReply: the socket took nothing for `timeout` seconds. Broken: the connection is broken.
        """
        cdef char *data
        cdef Py_ssize_t size, room
        if self.sending == SENDING_MORE or fastlock_swap(&self.sending, SENDING, SENDING_MORE):
            return
        self.sender = PyThread_get_thread_ident()
        self.sending = SENDING
        try:
            while self.used:
                data, size, room = self.out, self.used, self.room
                self._taken()
                try:
                    self._send(data, size, timeout)
                except BaseException:
                    self.broken = True
                    raise
                finally:
                    self._give_back(data, room)
        finally:
            self.sending = QUIET

    cdef int _taken(self) except -1:
        """The caller takes the buffer to send it. Broken: part of a command before it was lost, replies would shift."""
        if self.broken:
            raise Broken("the connection is out of step: bytes were lost on their way to the server")
        self.out = NULL
        self.used = self.room = 0
        self.flushes += 1
        return 0

    cdef void _give_back(self, char *data, Py_ssize_t room) noexcept:
        if self.out == NULL and room <= KEPT:
            self.out, self.room = data, room
        else:
            free(data)

    cdef int _send(self, const char *data, Py_ssize_t size, double timeout) except -1:
        # With the GIL: the call does not block, and to get the GIL back among many threads costs more than the call
        cdef ssize_t sent
        cdef int failure
        while size:
            sent = c_send(self.fd, data, size, MSG_DONTWAIT | MSG_NOSIGNAL)
            failure = errno
            if sent > 0:
                data += sent
                size -= sent
            elif failure == EAGAIN:
                if not _wait(self.fd, POLLOUT, timeout):
                    raise NoReply("the server takes no more bytes")
            elif failure != EINTR:
                raise Broken(failure, strerror(failure).decode())
        return 0

    def receive(self, double timeout, double spin):
        """Read once and deliver. False: nothing came within `timeout` seconds.

        Polls the socket for up to `spin` seconds before it sleeps, while recent replies came within that time; half as
        long where the last reply is older than `spin` seconds.
        Broken: the server closed the connection, or it is broken. ProtocolError: as `feed`.
        """
        cdef ssize_t size
        cdef int64_t start = _now(), budget = self._budget(spin), end = start + _ns(timeout)
        self._make_chunk()
        while True:
            with nogil:
                size = self._wait_for_bytes(budget, end)
            if size != -EINTR:
                break
            PyErr_CheckSignals()
            budget = 0
        return self._received(size, start if spin else 0)

    def exchange(self, PendingReply pending_reply not None, double timeout, double spin):
        """Flush, then read until the pending reply is there. False: `timeout` seconds went by first. Errors as in flush
        and receive."""
        cdef int64_t end = _now() + _ns(timeout), left
        if self.used and self.sending == QUIET:  # else another thread sends, and checks again before it stops
            self._send_and_read(timeout, spin)
        while not pending_reply.ready:
            left = end - _now()
            if left <= 0:
                return False
            self.receive(left * 1e-9, spin)  # a wakeup may bring nothing: half a TLS record, or a false alarm
        return True

    cdef int _send_and_read(self, double timeout, double spin) except -1:
        """Send what is queued and read once, releasing the GIL once: among many threads, to get it back costs more than
        sending or reading. Bytes that the socket does not take at once are sent by `_send`."""
        cdef char *data = self.out
        cdef Py_ssize_t size = self.used, room = self.room
        cdef ssize_t sent, got = -EAGAIN
        cdef int64_t start = 0, budget = self._budget(spin), end = _now() + _ns(timeout)
        cdef bint mine = True
        self._make_chunk()
        self._taken()
        self.sender = PyThread_get_thread_ident()
        self.sending = SENDING
        with nogil:
            sent = c_send(self.fd, data, size, MSG_DONTWAIT | MSG_NOSIGNAL)
            if sent == size and fastlock_swap(&self.sending, SENDING, QUIET):
                mine = False  # from here on another thread may send
                start = _now() if spin else 0
                got = self._wait_for_bytes(budget, end)
        try:
            if sent < size:
                self._send(data + max(sent, 0), size - max(sent, 0), timeout)
        except BaseException:
            self.broken = True
            raise
        finally:
            self._give_back(data, room)
            if mine:
                self.sending = QUIET
        if mine and self.used:
            self.flush(timeout)
        self._received(got, start)
        return 0

    cdef int64_t _budget(self, double spin) noexcept:
        """Nanoseconds to spin: none where replies usually take longer, except for a probe each 64 times. Half of `spin`
        after a pause, when the server sleeps: to wake, it needs the processor on which this thread would spin."""
        cdef int64_t budget = <int64_t>(spin * 1e9)
        if budget and _now() - self.last_reply_at > budget:
            budget //= 2
        self.probes += budget > 0
        return 0 if self.usual_delay > budget and self.probes & 63 else budget

    cdef int _make_chunk(self) except -1:
        if self.chunk == NULL:
            self.chunk = <char *>malloc(CHUNK)
            if self.chunk == NULL:
                raise MemoryError
        return 0

    cdef ssize_t _wait_for_bytes(self, int64_t budget, int64_t end) noexcept nogil:
        """Read bytes as soon as there are any. Returns how many; 0: the end; -EAGAIN: no bytes in time; -errno. -EINTR:
        check for signals, and call again."""
        cdef ssize_t size
        cdef int found
        cdef int64_t start = _now()
        cdef pollfd poller
        while budget and _now() - start < budget:
            size = c_recv(self.fd, self.chunk, CHUNK, MSG_DONTWAIT)
            if size >= 0 or errno != EAGAIN:
                return size if size >= 0 else -errno
            fastlock_relax()
        if end - start >= SLICE * 1000000 and not self.sliced:  # the socket itself waits: one system call less
            size = c_recv(self.fd, self.chunk, CHUNK, 0)
            if size >= 0 or errno != EAGAIN:
                return size if size >= 0 else -errno
            self.sliced = True
            return -EINTR  # a signal may have come as that wait ended, which would not end the poll
        self.sliced = False
        poller.fd = self.fd
        poller.events = POLLIN
        found = c_poll(&poller, 1, _ms(end - _now()))
        if found <= 0:
            return -errno if found < 0 else -EAGAIN
        size = c_recv(self.fd, self.chunk, CHUNK, MSG_DONTWAIT)
        return size if size >= 0 else -errno

    cdef bint _received(self, ssize_t size, int64_t start) except -1:
        """Deliver what was read since `start` (0: the delay is not measured). False: nothing was read."""
        if size > 0:
            if start:
                self.last_reply_at = _now()
                self.usual_delay += (self.last_reply_at - start - self.usual_delay) // 4
            self.feed(PyBytes_FromStringAndSize(self.chunk, size))
            return True
        if size == 0:
            raise Broken("the server closed the connection")
        if size == -EINTR:
            PyErr_CheckSignals()
        elif size != -EAGAIN:
            raise Broken(-size, strerror(-size).decode())
        return False

    # who reads, among threads

    def lead(self, PendingReply pending_reply not None, wake):
        """Make the caller the leader, which reads, if there is none; else it is to sleep on `wake`, a held lock."""
        if self.leader is None:
            self.leader = pending_reply
            self.thread = PyThread_get_thread_ident()
            return True
        pending_reply.wake = wake
        return False

    def listen(self, PendingReply pending_reply not None):
        """The caller waits for push messages, and may have to read."""
        self.listeners.append(pending_reply)

    def unlisten(self, PendingReply pending_reply not None):
        """The caller waits for push messages no longer. May be called again."""
        if pending_reply in self.listeners:
            self.listeners.remove(pending_reply)

    def leads(self, PendingReply pending_reply not None):
        """Whether the caller is the leader, which reads."""
        if self.leader is not pending_reply:
            return False
        self.thread = PyThread_get_thread_ident()  # it may have been made the leader while it slept
        return True

    def resign(self, PendingReply pending_reply not None):
        """Stop reading: the next reader becomes the leader and is woken. May be called again, after an interrupt."""
        cdef PendingReply leader
        if self.leader is pending_reply:
            self.leader = self.next_reader()
            self.thread = 0
        leader = self.leader
        if leader is not None and leader.wake is not None:
            wake, leader.wake = leader.wake, None
            wake.release()

    def in_use_by_caller(self, bint locks):
        """Whether the calling thread waits, reads or sends here already: then a signal handler or `__del__` has
        interrupted that, and would wait for itself. locks: whether the thread holds a mutex the leader may need."""
        cdef unsigned long me = PyThread_get_thread_ident()
        cdef Py_ssize_t i
        if self.leader is not None and (locks or (<PendingReply>self.leader).thread == me):
            return True
        if self.sending != QUIET and self.sender == me:
            return True
        for i in range(self.pending_):
            pending_reply = self.ring[(self.head + i) & (len(self.ring) - 1)]
            if type(pending_reply) is _Many:
                pending_reply = (<_Many>pending_reply).pending_reply
            if type(pending_reply) is PendingReply and (<PendingReply>pending_reply).waits(me):
                return True
        for pending_reply in self.listeners:
            if (<PendingReply>pending_reply).waits(me):
                return True
        return False

    cpdef round_trip(self, Template template, bytes name, bytes token, int64_t ms, double timeout, double spin):
        """One command and its reply, for a caller alone on the stream. BUSY: others use it, nothing was done.

        UnsolicitedData: the server spoke unasked or went away, nothing was sent. NoReply: none within `timeout`
        seconds.
        Errors as in flush and receive.
        """
        cdef PendingReply pending_reply = PendingReply.__new__(PendingReply)  # first: it may let other threads run
        if self.leader is not None or self.pending_:
            return BUSY
        if not self.usable():
            raise UnsolicitedData("the server spoke unasked, or closed the connection")
        if self.leader is not None or self.pending_ or self.sending != QUIET:  # since then, in `on_push`
            return BUSY
        self.leader = pending_reply
        self.thread = PyThread_get_thread_ident()
        try:
            self.put(template, pending_reply, name, token, ms)
            if not self.exchange(pending_reply, timeout, spin):
                raise NoReply(f"no reply within {timeout} s")
        finally:
            pending_reply.abandoned = not pending_reply.ready
            self.resign(pending_reply)
        return pending_reply.reply


cdef bint _wait(int fd, short events, double timeout) except -1:
    """Sleep until the socket is ready; False when `timeout` seconds are over. Signal handlers run, and may raise."""
    cdef pollfd poller
    cdef int found, failure
    cdef int64_t end = _now() + _ns(timeout), left
    poller.fd = fd
    poller.events = events
    while True:
        left = end - _now()
        with nogil:
            found = c_poll(&poller, 1, _ms(left))
            failure = errno
        if found > 0:
            return True
        if found < 0 and failure != EINTR:
            raise Broken(failure, strerror(failure).decode())
        PyErr_CheckSignals()
        if left <= 0:
            return False
