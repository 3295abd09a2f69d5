# The types of arguments.py where it is compiled.

import cython


@cython.locals(name=bytes, text=str)
cpdef bytes as_name(value, str encoding=*, str what=*)
cpdef bint as_flag(value, str what) except -1
cpdef as_wait(value, str what)
cpdef long long as_ms(value, str what=*) except? -1
