# cython: language_level=3, binding=True
"""Bytes: which process this is. A forked child finds out where an operation begins, also if C code forked it, and then
forgets what was its parent's: those who keep such things say how, by `at_fork`.

`os.register_at_fork` knows the forks of Python only. So the C library is asked to note each in `forked`, in the child
and before anything else runs there; the other compiled modules look at that, and call `check` if it is set. What is to
be forgotten is Python's business, which a handler of the C library must not do. `_fork.py` is the same in Python. Never
here: what is forgotten.
"""

import os

cimport cython
from cpython.pythread cimport PyThread_get_thread_ident

cdef extern from * nogil:
    """
    #ifdef _WIN32
    #define fastlock_at_fork(child) 0
    #else
    #include <pthread.h>
    #define fastlock_at_fork(child) pthread_atfork(NULL, NULL, child)
    #endif
    """
    int fastlock_at_fork(void (*child)() noexcept nogil)

cdef long _generation = 0
cdef unsigned long _caretaker = 0  # the thread that runs the hooks; 0: none does
cdef list _hooks = []


@cython.linetrace(False)
@cython.profile(False)
cdef void _in_child() noexcept nogil:
    global forked, _caretaker, _generation
    forked = True
    _caretaker = 0  # a thread of the parent's, which is not here
    _generation += 1


def at_fork(hook):
    """Have `hook` called, without arguments, in each forked child before it does anything. A hook that is interrupted
    is called again."""
    _hooks.append(hook)


cpdef int check() except -1:
    """Forget what was the parent's, if that has not been done yet."""
    if forked:
        _forget()
    return 0


cpdef long generation() noexcept:
    """Of this process among its forks: other than that of its parent."""
    return _generation


cdef int _forget() except -1:
    global forked, _caretaker
    cdef unsigned long me = PyThread_get_thread_ident()
    while forked and _caretaker != me:  # a hook may do what begins with a check
        if _caretaker:  # another thread is at it, and must be done before this one goes on
            os.sched_yield()
            continue
        _caretaker = me
        try:
            for hook in _hooks:
                hook()
            forked = False
        finally:
            _caretaker = 0
    return 0


if fastlock_at_fork(_in_child):
    raise MemoryError
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=check)  # what can be done at once is
