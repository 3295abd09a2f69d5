# cython: language_level=3, boundscheck=False
"""The loop of a relay: bytes that come from one socket go to another one, half a round trip later.

One thread serves all connections. All bytes are delayed alike, so what came first is due first, and one queue keeps
the order. A target that does not read keeps all others waiting: its buffers take far more than a benchmark sends.
Never here: who is connected with whom.
"""

from libc.errno cimport EAGAIN, EINTR, errno
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, itimerspec, timespec
from posix.unistd cimport close, read

cdef extern from "<sys/epoll.h>" nogil:
    cdef enum:
        EPOLLIN
        EPOLL_CTL_ADD
        EPOLL_CTL_DEL
    ctypedef union epoll_data_t:
        int fd
    cdef struct epoll_event:
        uint32_t events
        epoll_data_t data
    int epoll_create1(int flags)
    int epoll_ctl(int epoll, int action, int fd, epoll_event *event)
    int epoll_wait(int epoll, epoll_event *events, int most, int timeout)

cdef extern from "<sys/timerfd.h>" nogil:
    cdef enum:
        TFD_TIMER_ABSTIME
        TFD_NONBLOCK
    int timerfd_create(int clock, int flags)
    int timerfd_settime(int timer, int flags, const itimerspec *time, itimerspec *before)

cdef extern from "<sys/socket.h>" nogil:
    cdef enum:
        MSG_DONTWAIT
        MSG_NOSIGNAL
        SHUT_WR
    int shutdown(int fd, int how)
    ssize_t recv(int fd, void *data, size_t size, int flags)
    ssize_t send(int fd, const void *data, size_t size, int flags)

cdef enum:
    MOST_FDS = 1 << 16
    MOST_EVENTS = 64
    MOST_BYTES = 1 << 16


cdef struct Chunk:  # what came from a socket at once; no bytes: the end of what it sends
    Chunk *next
    double due
    int target
    uint32_t use  # of the target: its number may be that of another connection by then
    Py_ssize_t size
    char data[1]


cdef struct Socket:
    int other
    uint32_t use
    bint open  # whether it is one end of a connection
    bint ended  # whether what it sends has ended, and its other end was told so


cdef double now() noexcept nogil:
    cdef timespec time
    clock_gettime(CLOCK_MONOTONIC, &time)
    return <double> time.tv_sec + <double> time.tv_nsec * 1e-9


cdef class Wires:
    """The connections of a relay, and what is on its way. delay: seconds of one direction; it may be changed."""

    cdef public double delay
    cdef int epoll, timer
    cdef double armed  # when the timer ends; 0: it does not run
    cdef Chunk *first
    cdef Chunk *last
    cdef Socket *sockets

    def __cinit__(self, double delay=0.0):
        self.delay = delay
        self.sockets = <Socket *> calloc(MOST_FDS, sizeof(Socket))
        if self.sockets is NULL:
            raise MemoryError
        self.epoll = epoll_create1(0)
        self.timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK)
        if self.epoll < 0 or self.timer < 0:
            raise OSError(errno, "the relay has no timer")
        self.watch(self.timer)

    def __dealloc__(self):
        cdef Chunk *chunk
        while self.first is not NULL:
            chunk = self.first
            self.first = chunk.next
            free(chunk)
        if self.sockets is not NULL:
            for fd in range(MOST_FDS):
                if self.sockets[fd].open:
                    close(fd)
            free(self.sockets)
        close(self.timer)
        close(self.epoll)

    cpdef watch(self, int fd):
        """Have `serve` return this file descriptor when it can be read."""
        cdef epoll_event event
        event.events = EPOLLIN
        event.data.fd = fd
        if fd >= MOST_FDS or epoll_ctl(self.epoll, EPOLL_CTL_ADD, fd, &event) < 0:
            raise OSError(errno, "the relay cannot watch a socket")

    def connect(self, int one, int other):
        """Forward between two sockets, which this owns from now on."""
        for fd, peer in ((one, other), (other, one)):
            self.watch(fd)
            self.sockets[<int> fd].other = peer
            self.sockets[<int> fd].use += 1
            self.sockets[<int> fd].open = True
            self.sockets[<int> fd].ended = False

    def serve(self):
        """Forward until something else that is watched can be read; returns its file descriptor."""
        cdef int found
        with nogil:
            found = self._serve()
        if found < 0:
            raise OSError(errno, "the relay cannot go on")
        return found

    cdef int _serve(self) noexcept nogil:
        cdef epoll_event events[MOST_EVENTS]
        cdef int i, count, fd, other
        cdef uint64_t ends
        while True:
            self._deliver()
            self._arm()
            count = epoll_wait(self.epoll, events, MOST_EVENTS, -1)
            if count < 0:
                if errno == EINTR:
                    continue
                return -1
            other = -1
            for i in range(count):
                fd = events[i].data.fd
                if fd == self.timer:
                    if read(fd, &ends, sizeof(ends)) > 0:
                        self.armed = 0
                elif self.sockets[fd].open:
                    self._receive(fd)
                elif self.sockets[fd].use == 0:  # else its connection was ended just now
                    other = fd
            if other >= 0:  # after what was received, whose order counts
                return other

    cdef void _receive(self, int fd) noexcept nogil:
        cdef char data[MOST_BYTES]
        cdef Py_ssize_t size = recv(fd, data, MOST_BYTES, MSG_DONTWAIT)
        cdef Chunk *chunk
        if size < 0:
            if errno == EAGAIN or errno == EINTR:
                return
            size = 0
        if size == 0:  # not to be told of that again
            epoll_ctl(self.epoll, EPOLL_CTL_DEL, fd, NULL)
        chunk = <Chunk *> malloc(sizeof(Chunk) + size)
        if chunk is NULL:  # bytes are lost, and both ends have to know
            self._end_both(fd)
            return
        chunk.next = NULL
        chunk.due = now() + self.delay
        chunk.target = self.sockets[fd].other
        chunk.use = self.sockets[chunk.target].use
        chunk.size = size
        memcpy(chunk.data, data, size)
        if self.first is NULL:
            self.first = chunk
        else:
            chunk.due = max(chunk.due, self.last.due)  # `delay` may be shorter by now
            self.last.next = chunk
        self.last = chunk

    cdef void _deliver(self) noexcept nogil:
        """Send what is due."""
        cdef Chunk *chunk
        while self.first is not NULL and self.first.due <= now():
            chunk = self.first
            self.first = chunk.next
            if self.sockets[chunk.target].open and self.sockets[chunk.target].use == chunk.use:
                if chunk.size == 0 and self.sockets[chunk.target].ended:  # the other direction has ended before
                    self._end_both(chunk.target)
                elif chunk.size == 0:
                    self.sockets[self.sockets[chunk.target].other].ended = True
                    shutdown(chunk.target, SHUT_WR)
                elif not self._send(chunk):
                    self._end_both(chunk.target)
            free(chunk)

    cdef bint _send(self, Chunk *chunk) noexcept nogil:
        cdef Py_ssize_t sent, done = 0
        while done < chunk.size:
            sent = send(chunk.target, chunk.data + done, chunk.size - done, MSG_NOSIGNAL)
            if sent > 0:
                done += sent
            elif errno != EINTR:
                return False
        return True

    cdef void _end_both(self, int fd) noexcept nogil:
        cdef int other = self.sockets[fd].other
        self.sockets[fd].open = self.sockets[other].open = False
        close(fd)
        close(other)

    cdef void _arm(self) noexcept nogil:
        """Have the timer end when something is due."""
        cdef itimerspec time
        if self.first is NULL or self.first.due == self.armed:
            return
        self.armed = self.first.due
        time.it_interval.tv_sec = time.it_interval.tv_nsec = 0
        time.it_value.tv_sec = <long> self.armed
        time.it_value.tv_nsec = <long> ((self.armed - <double> time.it_value.tv_sec) * 1e9)
        timerfd_settime(self.timer, TFD_TIMER_ABSTIME, &time, NULL)
