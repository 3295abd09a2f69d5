# Part of _core.pyx: who waits for replies. Never here: their order.

@cython.final
@cython.freelist(64)
cdef class Ticket:
    """The slot of a waiting thread: `reply` once `ready`; `wake` is the lock it sleeps on, if it sleeps."""

    def done(self):
        return self.ready

    def set_result(self, reply):
        self.reply = reply
        self.ready = True
        wake, self.wake = self.wake, None
        if wake is not None:
            wake.release()


@cython.final
cdef class _Many:
    cdef object slot
    cdef list replies
    cdef Py_ssize_t missing


cdef _Many _many(slot, Py_ssize_t count):
    cdef _Many many = _Many.__new__(_Many)
    many.slot = slot
    many.replies = []
    many.missing = count
    return many
