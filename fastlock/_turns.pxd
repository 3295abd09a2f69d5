# The types of _turns.py where it is compiled.

cdef class Turn


cdef class Turns:
    cdef public object loop, over, soon, woken
    cpdef add(self, Turn turn)
    cpdef again(self)


cdef class Turn:
    cdef public Turns turns
    cdef public object answer, callback, context
    cdef public bint ready, blocking
    cpdef begin(self, Turns turns)
    cpdef bint done(self)
    cpdef set_result(self, answer)
    cpdef wake(self)
    cpdef result(self)
