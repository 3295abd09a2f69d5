# cython: language_level=3, binding=True
"""Detects forks. A forked child finds out as its first operation begins, also if C code forked it, and then drops what
was its parent's: modules that keep such things register a hook for that, by `at_fork`.

`os.register_at_fork` notices the forks of Python only. So the C library sets `forked` at each fork, in the child and
before anything else runs there; the other compiled modules read it by `check`. The hooks need Python, which a handler
of the C library must not run. `_fork.py` is the same in Python. Never here: what is dropped.
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
    _caretaker = 0  # such a thread of the parent does not exist in the child
    _generation += 1


def at_fork(hook):
    """Have `hook` called, without arguments, in each forked child before fastlock does anything there. A hook that is
    interrupted is called again."""
    _hooks.append(hook)


cpdef int check() except -1:
    """Run the hooks, if this is a forked child in which they have not run yet."""
    if forked:
        _forget()
    return 0


cpdef long generation() noexcept:
    """A number of this process, which differs from that of its parent."""
    return _generation


cdef int _forget() except -1:
    global forked, _caretaker
    cdef unsigned long me = PyThread_get_thread_ident()
    while forked and _caretaker != me:  # equal: a hook itself has called `check`
        if _caretaker:  # another thread runs the hooks, and must be done before this one goes on
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
    os.register_at_fork(after_in_child=check)  # after a fork by Python the hooks run at once
