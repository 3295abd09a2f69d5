# What the core uses of the C library and Cython does not declare itself, and small helpers without Python objects.
# Never here: anything that needs the GIL.

from libc.stdint cimport int64_t
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec

cdef extern from "<sys/socket.h>" nogil:
    ssize_t c_send "send"(int fd, const void *data, size_t size, int flags)
    ssize_t c_recv "recv"(int fd, void *data, size_t size, int flags)
    int MSG_DONTWAIT
    int MSG_NOSIGNAL
    int MSG_PEEK

cdef extern from "<poll.h>" nogil:
    struct pollfd:
        int fd
        short events
        short revents
    int c_poll "poll"(pollfd *fds, unsigned long count, int timeout)
    short POLLIN
    short POLLOUT

cdef extern from *:
    """
    #ifdef POLLRDHUP
    #define FASTLOCK_RDHUP POLLRDHUP
    #else
    #define FASTLOCK_RDHUP 0
    #endif
    """
    short RDHUP "FASTLOCK_RDHUP"  # that the other end sends no more, where the system tells

cdef extern from *:
    """
    #if defined(__x86_64__) || defined(__i386__)
    #define fastlock_relax() __builtin_ia32_pause()
    #elif defined(__aarch64__)
    #define fastlock_relax() __asm__ __volatile__("yield")
    #else
    #define fastlock_relax() ((void)0)
    #endif
    """
    void fastlock_relax() nogil

cdef extern from *:
    """
    #include <sys/time.h>
    static inline void fastlock_set_recv_timeout(int fd, int ms) {
        struct timeval timeout = {ms / 1000, (ms % 1000) * 1000};
        setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof timeout);
    }
    #define fastlock_swap(target, from, to) __sync_bool_compare_and_swap(target, from, to)
    #define fastlock_exchange(target, to) __atomic_exchange_n(target, to, __ATOMIC_ACQ_REL)
    """
    void fastlock_set_recv_timeout(int fd, int ms)  # from now on a blocking recv returns after so many milliseconds
    bint fastlock_swap(int *target, int old, int new) nogil  # atomically: if it is old, set it to new; whether it was
    int fastlock_exchange(int *target, int new) nogil  # atomically: set it to new; returns what it was


cdef inline Py_ssize_t _digits(char *text, int64_t value) noexcept nogil:
    cdef char reverse[24]
    cdef Py_ssize_t size = 0, i
    cdef bint negative = value < 0
    cdef unsigned long long rest = <unsigned long long>(-value if negative else value)
    while True:
        reverse[size] = <char>(48 + rest % 10)
        size += 1
        rest //= 10
        if not rest:
            break
    if negative:
        reverse[size] = b"-"
        size += 1
    for i in range(size):
        text[i] = reverse[size - 1 - i]
    return size


cdef inline int64_t _now() noexcept nogil:
    cdef timespec now
    clock_gettime(CLOCK_MONOTONIC, &now)
    return now.tv_sec * <int64_t>1000000000 + now.tv_nsec


cdef inline int64_t _ns(double seconds) noexcept nogil:
    return <int64_t>(min(max(seconds, 0.0), 1e6) * 1e9)  # no wait is longer, whatever is asked for


cdef inline int _ms(int64_t ns) noexcept nogil:
    """Whole milliseconds, never less than asked, for poll."""
    return <int>((ns + 999999) // 1000000) if ns > 0 else 0
