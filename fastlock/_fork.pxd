# The types of _fork.pyx, for it and for the other compiled modules. Never here: code.

cdef bint forked  # whether this is a child in which the hooks are to run, before anything of the parent is used

cpdef int check() except -1
cpdef long generation() noexcept
