# Part of _core.pyx: the stream without I/O, and the order of its replies. Never here: a socket, threads, an event loop.

cdef class Stream:
    """One connection's bytes: commands out, replies in, in order, each to its pending reply. `SocketStream` and
    `TaskStream` carry them.

    A pending reply is a `PendingReply`, a future, or anything with `done()` and `set_result(reply)`; None ignores the
    reply. Error replies are results, too (`hiredis.ReplyError`). Push messages go to `on_push`.
    """

    def __cinit__(self):
        self.filter = _ReplyFilter.__new__(_ReplyFilter)
        self.reader = Reader(notEnoughData=_NOTHING)
        self.gets = self.reader.gets
        self.feed_ = self.reader.feed
        self.ring = [None] * 16
        self.pushes = []
        self.templates = ()

    def __dealloc__(self):
        free(self.out.data)

    # encode

    def put(self, Template template not None, pending_reply, bytes name, bytes token, int64_t ms):
        """Queue one command; its reply goes to `pending_reply`."""
        self._put(template, pending_reply, name, token, ms)

    @cython.final
    cdef inline int _put(self, Template template, pending_reply, bytes name, bytes token, int64_t ms) except -1:
        self._make_room()
        _encode(&self.out, template, name, token, ms)
        self._push(pending_reply)
        return 0

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
            _encode(&self.out, template, <bytes>names[i], <bytes>tokens[i], ms)
        self._push(many)

    def put_command(self, pending_reply, tuple args):
        """Queue any command, given as bytes; its reply goes to `pending_reply`."""
        _check_bytes(args)
        self._make_room()
        _pack(&self.out, args)
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
            _pack(&self.out, args)
        self._push(many)

    cpdef bytes take_output(self):
        """The bytes to be sent, which the caller is to send: they are not kept here."""
        cdef bytes data
        self._write_releases()
        data = PyBytes_FromStringAndSize(self.out.data, self.out.used)
        self.flushes += 1
        _empty(&self.out)
        return data

    # order

    @property
    def pending(self):
        """How many pending replies there are."""
        return self.pending_

    @property
    def unsent(self):
        """Bytes queued and not yet taken to be sent, without releases that are put off."""
        return self.out.used

    @cython.final
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
        self._write_releases()
        return 0

    @cython.final
    cdef int _write_releases(self) except -1:
        """Write the releases that are put off, before anything else is written. Nothing is allocated, as above."""
        cdef _ReleaseRun run = self.releases
        if run is not None:
            run.write(&self.out)
            self.releases = None
        return 0

    @cython.final
    cdef int _push(self, pending_reply) except -1:
        cdef Py_ssize_t count = (<_Many>pending_reply).missing if type(pending_reply) is _Many else 1
        self.ring[(self.head + self.pending_) & (len(self.ring) - 1)] = pending_reply
        self.pending_ += 1
        self.missing += count
        self.commands += count
        return 0

    @cython.final
    cdef object _pop(self):
        cdef Py_ssize_t head = self.head
        pending_reply = self.ring[head]
        self.ring[head] = None
        self.head = (head + 1) & (len(self.ring) - 1)
        self.pending_ -= 1
        return pending_reply

    def take_pending(self, list into not None):
        """Move every pending reply into that list, in order, and return it; none is pending afterwards, and bytes that
        were not sent are dropped."""
        while self.pending_ > 0:
            self.releases = None  # nothing is added to one that is taken
            pending_reply = self._pop()
            if type(pending_reply) is _ReleaseRun:
                into += (<_ReleaseRun>pending_reply).pending_replies()
            else:
                into.append(_getter(pending_reply))
        self.releases = None
        self.missing = 0
        _empty(&self.out)
        return into

    @cython.final
    cdef object _getter_at(self, Py_ssize_t index):
        """What gets the reply, or the list of replies, for which the pending reply at that index stands."""
        return _getter(self.ring[(self.head + index) & (len(self.ring) - 1)])

    # replies

    @cython.final
    cdef bint _within_reply(self) noexcept:
        """Whether the rest of a reply is still to come."""
        return self.partial > 0 or self.filter.within()

    def expect_long(self):
        """Let long replies pass from now on, which no command of a lock has."""
        self.filter.longest, self.filter.items = MAX_LONG_REPLY, MAX_LONG_ITEMS

    cpdef feed(self, data):
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

    @cython.final
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
        if self.partial > self.filter.longest + FRAME:
            raise ProtocolError(f"a reply of more than {self.filter.longest + FRAME} bytes")
        if len(replies) > self.missing:
            raise ProtocolError(f"a reply that nobody asked for, among {replies!r:.80}")
        self.missing -= len(replies)
        for reply in replies:
            if not self.pending_:  # they were taken, as the connection failed meanwhile
                break
            pending_reply = self.ring[self.head]
            if type(pending_reply) is _Many:
                many = <_Many>pending_reply
                many.replies.append(reply)
                many.missing -= 1
                if many.missing:
                    continue
                reply = many.replies
            getter = _getter(pending_reply)
            if type(getter) is PendingReply:
                (<PendingReply>getter).set_result(reply)
            elif getter is not None and not getter.done():
                getter.set_result(reply)
            if self.pending_ and self.ring[self.head] is pending_reply:
                self._pop()  # only now: if a signal handler raised in `set_result`, `take_pending` still finds it
        if self.pushes:
            replies, self.pushes = self.pushes, []
            for reply in replies:
                if self.on_push is not None:
                    self.on_push(reply)
        return 0
