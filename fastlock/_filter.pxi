# Part of _core.pyx: the sizes that replies announce, checked before the reader allocates for them; and what is dropped.
# Never here: what replies mean.

@cython.final
cdef class _ReplyFilter:
    """Filters the bytes of replies on their way to the reader; it parses headers only.

    A string longer than any token reaches the reader as an empty one, and its bytes are dropped as they come: so a key
    that holds something else than a lock is answered like any name that is held. No token is empty.
    """

    def __cinit__(self):
        self.longest, self.items = LONGEST, ITEMS

    cdef bint within(self) noexcept:
        """Whether the rest of a line or of a string is still to come."""
        return self.skip > 0 or self.kind != 0

    cdef bytes passed(self, bytes chunk):
        """Returns what the reader is to get of these bytes: a string's header only when it is complete. ProtocolError:
        a header announces more than any reply has."""
        cdef const unsigned char *data
        cdef Py_ssize_t size, step, i = 0, start = 0, done = 0
        cdef unsigned char byte
        cdef list parts = None
        if self.held is not None:
            chunk = self.held + chunk
            self.held = None
            self.kind = 0
        data = <const unsigned char *>PyBytes_AS_STRING(chunk)
        size = PyBytes_GET_SIZE(chunk)
        while i < size:
            if self.skip:
                step = min(self.skip, size - i)
                self.skip -= step
                i += step
                if self.drops:
                    done = i
                    if not self.skip:  # the end of the string ends the empty one, when all of it has come
                        self.drops, self.skip = False, 2
                continue
            byte = data[i]
            i += 1
            if not self.kind:
                self.kind = byte
                self.announced = 0
                start = i - 1
            elif byte == b"\n":
                if (self.announced > 0 or self.kind == b"$") and self._announces():
                    if parts is None:
                        parts = []
                    parts += [chunk[done:start], b"$0\r\n"]
                    done = i
                self.kind = 0
            elif 48 <= byte <= 57 and self.announced >= 0:
                self.announced = min(self.announced * 10 + byte - 48, DROPPED + 1)
            elif byte != b"\r":
                self.announced = -1
        if self.kind == b"$":
            if size - start > FRAME:
                raise ProtocolError(f"a header that does not end: {chunk[start:]!r:.40}")
            self.held = chunk[start:]
            size = start
        elif not done:
            return chunk
        if parts is None:
            return chunk[done:size]
        parts.append(chunk[done:size])
        return b"".join(parts)

    cdef bint _announces(self) except -1:
        """Whether the header that is complete announces a string that is to be dropped."""
        cdef bint string = self.kind == b"$" or self.kind == b"=" or self.kind == b"!"
        cdef bint items = (
            self.kind == b"*" or self.kind == b"%" or self.kind == b"~" or self.kind == b">" or self.kind == b"|"
        )
        cdef int64_t most = DROPPED if self.kind == b"$" else self.longest if string else self.items
        if (string or items) and self.announced > most:
            raise ProtocolError(f"a reply that announces too much: {chr(self.kind)}{self.announced}")
        if string and self.announced >= 0:
            self.drops = self.kind == b"$" and self.announced > LONGEST
            self.skip = self.announced if self.drops else self.announced + 2
        return self.drops
