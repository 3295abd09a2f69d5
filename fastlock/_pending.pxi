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


cdef int _check_depth(reply, int left) except -1:
    if not left:
        raise ProtocolError("a reply nested too deeply")
    for item in (reply.values() if type(reply) is dict else reply):
        if type(item) is list or type(item) is dict:
            _check_depth(item, left - 1)
    return 0
