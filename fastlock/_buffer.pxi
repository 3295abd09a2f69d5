# Part of _core.pyx: the bytes of commands, in one buffer that grows. Never here: the order of replies, a socket.

cdef enum:
    KEPT = 262144  # bytes: a larger buffer is freed once it is empty


cdef int _encode(Buffer *buffer, Template template, bytes name, bytes token, int64_t ms) except -1:
    cdef int i
    cdef Segment *segment
    cdef char digits[24]
    cdef char *text = digits
    cdef Py_ssize_t size = 0, need = 0
    cdef bytes value
    if template is None or name is None or token is None:
        raise TypeError("template, name and token must not be None")
    for i in range(template.count):
        need += template.segments[i].size + 48
        if template.segments[i].argument == 0:
            need += PyBytes_GET_SIZE(name)
        elif template.segments[i].argument == 1:
            need += PyBytes_GET_SIZE(token)
    _reserve(buffer, need)
    for i in range(template.count):
        segment = &template.segments[i]
        _copy(buffer, segment.literal, segment.size)
        if segment.argument < 0:
            continue
        if segment.argument == 2:
            if not size:
                size = _digits(digits, ms)
            _bulk(buffer, text, size)
        else:
            value = name if segment.argument == 0 else token
            _bulk(buffer, PyBytes_AS_STRING(value), PyBytes_GET_SIZE(value))
    return 0


cdef int _pack(Buffer *buffer, tuple args) except -1:
    cdef Py_ssize_t need = 32
    for arg in args:
        need += PyBytes_GET_SIZE(<bytes>arg) + 32
    _reserve(buffer, need)
    _head(buffer, len(args))
    for arg in args:
        _bulk(buffer, PyBytes_AS_STRING(<bytes>arg), PyBytes_GET_SIZE(<bytes>arg))
    return 0


cdef void _head(Buffer *buffer, Py_ssize_t count) noexcept:
    buffer.data[buffer.used] = b"*"
    buffer.used += 1
    buffer.used += _digits(buffer.data + buffer.used, count)
    _copy(buffer, b"\r\n", 2)


cdef void _copy(Buffer *buffer, const char *data, Py_ssize_t size) noexcept:
    memcpy(buffer.data + buffer.used, data, size)
    buffer.used += size


cdef void _bulk(Buffer *buffer, const char *data, Py_ssize_t size) noexcept:
    buffer.data[buffer.used] = b"$"
    buffer.used += 1
    buffer.used += _digits(buffer.data + buffer.used, size)
    _copy(buffer, b"\r\n", 2)
    _copy(buffer, data, size)
    _copy(buffer, b"\r\n", 2)


cdef int _reserve(Buffer *buffer, Py_ssize_t size) except -1:
    cdef Py_ssize_t room = buffer.room or 1024
    cdef char *out
    if buffer.used + size <= buffer.room:
        return 0
    while room < buffer.used + size:
        room *= 2
    out = <char *>realloc(buffer.data, room)
    if out == NULL:
        raise MemoryError
    buffer.data = out
    buffer.room = room
    return 0


cdef void _empty(Buffer *buffer) noexcept:
    buffer.used = 0
    if buffer.room > KEPT:
        free(buffer.data)
        buffer.data = NULL
        buffer.room = 0
