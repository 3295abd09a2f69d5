# Part of _core.pyx: pending replies, and how deep a reply may nest. Never here: the order of replies.

@cython.final
@cython.freelist(64)
cdef class PendingReply:
    """What a thread waits for: `reply` once `ready`; `wake` is the lock on which the thread sleeps, if it sleeps."""

    def __cinit__(self):
        self.thread = PyThread_get_thread_ident()

    cdef bint waits(self, unsigned long thread) noexcept:
        """Whether the thread with that number waits for the reply."""
        return self.thread == thread and not self.ready and not self.cancelled

    cdef bint sleeps(self) noexcept:
        """Whether the thread that waits for the reply sleeps, and could become the leader."""
        return self.wake is not None and not self.cancelled

    def done(self):
        return self.ready

    cpdef set_result(self, reply):
        self.reply = reply
        self.ready = True
        wake, self.wake = self.wake, None
        if wake is not None:
            wake.release()


@cython.final
cdef class _Many:
    cdef object pending_reply
    cdef list replies
    cdef Py_ssize_t missing


cdef _Many _many(pending_reply, Py_ssize_t count):
    cdef _Many many = _Many.__new__(_Many)
    many.pending_reply = pending_reply
    many.replies = []
    many.missing = count
    return many


cdef inline object _getter(pending_reply):
    """What gets the reply, or the list of replies, for which this stands in the order."""
    return (<_Many>pending_reply).pending_reply if type(pending_reply) is _Many else pending_reply


@cython.final
cdef class _ReleaseRun:
    """Releases that follow one another, sent as one script: what stands for all of them in the order of replies."""
    cdef Stream stream
    cdef Template template  # of a single one
    cdef bytes script  # the SHA1 of the script
    cdef list entries  # of each: its pending reply, name, token

    def done(self):
        return False

    cdef list pending_replies(self):
        return self.entries[::3]

    cdef int write(self, Buffer *out) except -1:
        """Write the script that does them all; or, of a single one, its command."""
        cdef Py_ssize_t i, need = 128 + PyBytes_GET_SIZE(self.script), count = len(self.entries) // 3
        cdef bytes word
        cdef char digits[24]
        if count == 1:
            return _encode(out, self.template, <bytes>self.entries[1], <bytes>self.entries[2], 0)
        for i in range(3 * count):
            if i % 3:
                need += PyBytes_GET_SIZE(<bytes>self.entries[i]) + 32
        _reserve(out, need)
        _head(out, 3 + 2 * count)
        _bulk(out, b"EVALSHA", 7)
        _bulk(out, PyBytes_AS_STRING(self.script), PyBytes_GET_SIZE(self.script))
        _bulk(out, digits, _digits(digits, count))
        for i in range(2 * count):
            word = <bytes>self.entries[3 * i + 1] if i < count else <bytes>self.entries[3 * (i - count) + 2]
            _bulk(out, PyBytes_AS_STRING(word), PyBytes_GET_SIZE(word))
        return 0

    def set_result(self, reply):
        """Pass on each release's reply: 1 or 0; None: it was not executed, as the script failed."""
        cdef list pending_replies = self.pending_replies()
        cdef Py_ssize_t i, count = len(pending_replies)
        if count == 1:
            reply = [reply]
        elif isinstance(reply, Exception):
            if str(reply).startswith(REFUSALS):
                self.stream.release_script = None  # a name that the user may not release fails the others
            reply = [None] * count
        if type(reply) is not list or len(<list>reply) != count:
            raise ProtocolError(f"a script that released {count} locks replied {reply!r:.80}")
        for i in range(count):
            pending_reply = pending_replies[i]
            if pending_reply is not None and not pending_reply.done():
                pending_reply.set_result((<list>reply)[i])


cdef int _check_depth(reply, int left) except -1:
    if not left:
        raise ProtocolError("a reply nested too deeply")
    for item in (reply.values() if type(reply) is dict else reply):
        if type(item) is list or type(item) is dict:
            _check_depth(item, left - 1)
    return 0
