# Part of _core.pyx: the stream of tasks, which queues and says when to flush. Never here: an event loop, a socket.

@cython.final
cdef class TaskStream(Stream):
    """A stream whose bytes an event loop carries: what a tick of the loop queues is flushed at once.

    It belongs to a connection, which writes the output; `wakeups` and `thread` are those of the connection's tasks, and
    `flush_soon` schedules a call of `run_flush`.
    """

    def __cinit__(self, connection, wakeups, thread, flush_soon):
        self.connection = connection
        self.wakeups = wakeups
        self.thread = thread
        self.flush_soon = flush_soon

    cpdef request(self, Template template, pending_reply, bytes name, bytes token, int64_t ms):
        """Queue one command, and schedule a flush; its reply goes to `pending_reply`."""
        self._put(template, pending_reply, name, token, ms)
        if not self.flushing:
            self.announce()

    cpdef release(self, Template template, pending_reply, bytes name, bytes token):
        """As `request`, of a release. Where the server has `release_script` for that, and no command, those that follow
        one another are sent as one script; the reply may be None then: not executed, as the script failed."""
        cdef _ReleaseRun run = self.releases
        if name is None or token is None:
            raise TypeError("bytes expected, not NoneType")
        if self.release_script is None:
            self._put(template, pending_reply, name, token, 0)
        else:
            if run is None:
                run = _ReleaseRun.__new__(_ReleaseRun)
                run.stream, run.template, run.script, run.entries = self, template, self.release_script, []
                self._make_room()
                self.releases = run
                self._push(run)
            run.entries.append(pending_reply)
            run.entries.append(name)
            run.entries.append(token)
            if len(run.entries) == 3 * MOST_NAMES:
                self._write_releases()
        if not self.flushing:
            self.announce()

    def run_flush(self):
        """Flush what was announced; again, if a signal handler raises as the flush begins."""
        try:
            self.connection.flush()
        except BaseException:
            self.connection.flush()
            raise

    cpdef announce(self):
        """Schedule a flush of what was queued, by whatever method: once until the next `take_output`."""
        if not self.flushing:
            self.flush_soon()  # first: if a signal handler raises in it, the next call schedules again
            self.flushing = True

    cpdef bytes take_output(self):
        """As `Stream.take_output`; what is queued from now on is announced again."""
        self.flushing = False
        return Stream.take_output(self)
