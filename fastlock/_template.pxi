# Part of _core.pyx: templates of commands, and the check of what may fill them. Never here: a buffer, a socket.

@cython.final
cdef class Template:
    """A command with placeholders, encoded once. Parts are bytes (literal arguments) or placeholders: 0 for the name,
    1 for the token, 2 for the milliseconds."""

    def __init__(self, *parts):
        if not 0 < len(parts) <= 16:
            raise ValueError("a template has 1 to 16 parts")
        self.parts = parts
        self.literals = []
        self.count = 0
        cdef bytes literal = b"*%d\r\n" % len(parts)
        for part in parts:
            if isinstance(part, bytes):
                literal += b"$%d\r\n%b\r\n" % (len(part), part)
            elif part in (0, 1, 2):
                self._segment(literal, part)
                literal = b""
            else:
                raise ValueError(f"a template's part is bytes or 0, 1, 2, not {part!r}")
        if literal:
            self._segment(literal, -1)

    cdef int _segment(self, bytes literal, int argument) except -1:
        if argument >= 0 and self.count == PARTS - 1:
            raise ValueError("a template has too many placeholders")
        self.literals.append(literal)
        self.segments[self.count].literal = PyBytes_AS_STRING(literal)
        self.segments[self.count].size = PyBytes_GET_SIZE(literal)
        self.segments[self.count].argument = argument
        self.count += 1
        return 0


cdef int _check_bytes(values) except -1:
    for value in values:
        if type(value) is not bytes:
            raise TypeError(f"bytes expected, not {type(value).__name__}")
    return 0
