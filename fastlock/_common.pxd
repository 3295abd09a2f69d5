# The types of _common.py where it is compiled.

from fastlock._gate cimport Gates
from fastlock._stats cimport Stats

cdef class Common:
    cdef public bint closed
    cdef public Gates gates
    cdef public Stats stats
    cdef public dict crowd, alarms
    cdef public list debts, connections, idle
    cdef public int away
    cdef public object ear, open_pipe, ticks
