# Part of _core.pyx: the stream of threads, on a socket on which they block without the GIL. Never here: what is sent.

cdef enum:
    CHUNK = 65536
    SLICE = 100  # milliseconds for which the socket itself waits for bytes; for the rest of a wait it is polled

cdef enum:
    QUIET, SENDING, SENDING_MORE  # whether a thread sends, and whether more was queued meanwhile for it to send

BUSY = object()  # answer of `SocketStream.round_trip`: other threads use the stream, nothing was done


@cython.final
cdef class SocketStream(Stream):
    """A stream on a connected socket, which threads share: one of them, the leader, reads for all.

    Without the GIL only `wants_gil` changes, and `sending`, atomically: a thread that queues meanwhile has the sender
    check again, or sends by itself.
    """

    def __cinit__(self, sock):
        self.listeners = []
        self.sock = sock
        self.fd = sock.fileno()
        fastlock_set_recv_timeout(self.fd, SLICE)

    def __dealloc__(self):
        free(self.chunk)

    # send and receive

    cpdef bint usable(self) except -1:
        """False: the server closed the connection, or replied unasked while no reply was pending. Push messages are
        delivered. True where another thread reads, which finds that out."""
        cdef char byte
        cdef ssize_t size, read = 0
        cdef bint half
        while not self.pending_ and self.leader is None:
            size = c_recv(self.fd, &byte, 1, MSG_DONTWAIT | MSG_PEEK)
            if size < 0:  # half a reply was read: its rest must not be taken for one
                half = read and self._within_reply()
                return (errno == EAGAIN or errno == EINTR) and not half
            if size == 0 or self.on_push is None:
                return False
            self._make_chunk()
            try:
                read = self._received(c_recv(self.fd, self.chunk, CHUNK, MSG_DONTWAIT), 0)
            except (Broken, ProtocolError):
                return False
        return self.leader is not None or not _hung_up(self.fd)

    def flush(self, double timeout):
        """Send what is queued, also what other threads queue meanwhile; returns at once if another thread is sending.

        NoReply: the socket took nothing for `timeout` seconds. Broken: the connection is broken.
        """
        cdef Buffer taken
        if self.sending == SENDING_MORE or fastlock_swap(&self.sending, SENDING, SENDING_MORE):
            return
        self.sender = PyThread_get_thread_ident()
        self.sending = SENDING
        try:
            while self.out.used:
                taken = self.out
                self._taken()
                try:
                    self._send(taken.data, taken.used, timeout)
                except BaseException:
                    self.broken = True
                    raise
                finally:
                    self._give_back(taken)
        finally:
            self.sending = QUIET

    cdef int _taken(self) except -1:
        """The caller takes the buffer to send it. Broken: part of a command before it was lost, replies would shift."""
        if self.broken:
            raise Broken("the connection is out of step: bytes were lost on their way to the server")
        self.out.data = NULL
        self.out.used = self.out.room = 0
        self.flushes += 1
        return 0

    cdef void _give_back(self, Buffer taken) noexcept:
        if self.out.data == NULL and taken.room <= KEPT:
            self.out.data, self.out.room = taken.data, taken.room
        else:
            free(taken.data)

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

    cpdef bint receive(self, double timeout, double spin) except -1:
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
                self.wants_gil = True
            self.wants_gil = False
            if size != -EINTR:
                break
            PyErr_CheckSignals()
            budget = 0
        return self._received(size, start if spin else 0)

    def exchange(self, PendingReply pending_reply not None, double timeout, double spin):
        """Flush, then read until the pending reply is there. False: `timeout` seconds went by first. Errors as in flush
        and receive."""
        return self._exchange(pending_reply, timeout, spin)

    cdef bint _exchange(self, PendingReply pending_reply, double timeout, double spin) except -1:
        cdef int64_t end = _now() + _ns(timeout), left
        if self.out.used and self.sending == QUIET:  # else another thread sends, and checks again before it stops
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
        cdef Buffer taken = self.out
        cdef ssize_t sent, got = -EAGAIN
        cdef int64_t start = 0, budget = self._budget(spin), end = _now() + _ns(timeout)
        cdef bint mine = True
        self._make_chunk()
        self._taken()
        self.sender = PyThread_get_thread_ident()
        self.sending = SENDING
        with nogil:
            sent = c_send(self.fd, taken.data, taken.used, MSG_DONTWAIT | MSG_NOSIGNAL)
            if sent == taken.used and fastlock_swap(&self.sending, SENDING, QUIET):
                mine = False  # from here on another thread may send
                start = _now() if spin else 0
                got = self._wait_for_bytes(budget, end)
            self.wants_gil = True
        self.wants_gil = False
        try:
            if sent < taken.used:
                self._send(taken.data + max(sent, 0), taken.used - max(sent, 0), timeout)
        except BaseException:
            self.broken = True
            raise
        finally:
            self._give_back(taken)
            if mine:
                self.sending = QUIET
        if mine and self.out.used:
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

    # who reads

    def lead(self, PendingReply pending_reply not None, wake):
        """Make the caller the leader, which reads, if there is none; else it is to sleep on `wake`, a held lock."""
        if self.leader is None:
            self.leader = pending_reply
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
        return self.leader is pending_reply

    cpdef bint reader_waits(self) except -1:
        """Whether the thread that reads has ended its wait for bytes, and waits for the GIL."""
        return self.wants_gil

    cpdef next_reader(self):
        """The first pending reply whose thread sleeps and could read next, or None."""
        cdef Py_ssize_t i
        for i in range(self.pending_):
            pending_reply = self._getter_at(i)
            if type(pending_reply) is PendingReply and (<PendingReply>pending_reply).sleeps():
                return pending_reply
        for pending_reply in self.listeners:
            if (<PendingReply>pending_reply).sleeps():
                return pending_reply
        return None

    def resign(self, PendingReply pending_reply not None):
        """Stop reading: the next reader becomes the leader and is woken. May be called again, after an interrupt."""
        self._resign(pending_reply)

    cdef int _resign(self, PendingReply pending_reply) except -1:
        cdef PendingReply leader
        if self.leader is pending_reply:
            self.leader = self.next_reader()
        leader = self.leader
        if leader is not None and leader.wake is not None:
            wake, leader.wake = leader.wake, None
            wake.release()
        return 0

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
            pending_reply = self._getter_at(i)
            if type(pending_reply) is PendingReply and (<PendingReply>pending_reply).waits(me):
                return True
        for pending_reply in self.listeners:
            if (<PendingReply>pending_reply).waits(me):
                return True
        return False

    def half_changed(self):
        """Whether the calling thread changes the stream: no signal handler runs meanwhile."""
        return False

    cdef bint _awaited(self):
        """Whether a thread waits for a pending reply: nobody does for those to undos and unconfirmed releases."""
        cdef Py_ssize_t i
        for i in range(self.pending_):
            if type(self._getter_at(i)) is PendingReply:
                return True
        return False

    # a round trip

    cpdef round_trip(self, Template template, bytes name, bytes token, int64_t ms, double timeout, double spin):
        """One command and its reply, for a caller alone on the stream. BUSY: others use it, nothing was done.

        UnsolicitedData: the server spoke unasked or went away, nothing was sent. NoReply: none within `timeout`
        seconds. Errors as in flush and receive.
        """
        cdef PendingReply pending_reply = PendingReply.__new__(PendingReply)  # first: it may let other threads run
        if self.leader is not None or self._awaited():
            return BUSY
        if not self.usable():
            raise UnsolicitedData("the server spoke unasked, or closed the connection")
        if self.leader is not None or self._awaited() or self.sending != QUIET:  # since then, in `on_push`
            return BUSY
        self.leader = pending_reply
        try:
            self._put(template, pending_reply, name, token, ms)
            if not self._exchange(pending_reply, timeout, spin):
                raise NoReply(f"no reply within {timeout} s")
        finally:
            pending_reply.cancelled = not pending_reply.ready
            self._resign(pending_reply)
        return pending_reply.reply


cdef bint _hung_up(int fd) noexcept:
    """Whether the other end has closed the connection, also where what it sent before was not read yet."""
    cdef pollfd poller
    poller.fd = fd
    poller.events = RDHUP
    poller.revents = 0
    return c_poll(&poller, 1, 0) > 0


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
