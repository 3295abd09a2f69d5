# What _fork.pyx shows to the other compiled modules.

cdef bint forked  # since the hooks were run: they are to be run before anything of the parent's is used

cpdef int check() except -1
cpdef long generation() noexcept
