# The types of internals.py where it is compiled, and what only C can do: how the interpreter resumes an object.

from cpython.ref cimport PyObject

cdef extern from "Python.h":
    ctypedef int PySendResult
    PySendResult PYGEN_RETURN
    PySendResult PYGEN_NEXT
    ctypedef PySendResult (*sendfunc)(PyObject *, PyObject *, PyObject **) except -1
    ctypedef PyObject *(*iternextfunc)(PyObject *) except? NULL
    ctypedef struct PyAsyncMethods:
        sendfunc am_send
    ctypedef struct PyTypeObject:
        PyAsyncMethods *tp_as_async
        iternextfunc tp_iternext

cdef bint USED


cdef class Wakeup


cdef class Waker:
    cdef public object loop, resolved
    cpdef add(self, Wakeup wakeup)


cdef class Wakeup:
    cdef public Waker wakeups
    cdef public object answer, callback, context
    cdef public bint ready, blocking
    cpdef arm(self, Waker wakeups)
    cpdef begin_wait(self)
    cpdef bint done(self)
    cpdef set_result(self, answer)
    cpdef run_callback(self)
    cpdef result(self)


cdef inline resume_by(type kind, sendfunc send, iternextfunc step):
    """Have the objects of a type resumed by these functions. The plain way is what Cython makes of `__next__`, which
    raises StopIteration with a traceback; that costs more than all the rest (3,000 instructions)."""
    if USED:
        (<PyTypeObject *>kind).tp_as_async.am_send = send
        (<PyTypeObject *>kind).tp_iternext = step
