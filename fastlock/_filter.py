"""The sizes that replies announce, in Python, checked before the reader allocates for them; and what is dropped.

The same as `_filter.pxi`. Never here: what replies mean.
"""

from __future__ import annotations

from hiredis import ProtocolError

from fastlock._limits import MAX_DROPPED, MAX_FRAME, MAX_ITEMS, MAX_LONG_ITEMS, MAX_LONG_REPLY, MAX_REPLY

_STRINGS = frozenset((b"$", b"=", b"!"))
_SIZED = _STRINGS | {b"*", b"%", b"~", b">", b"|"}


class ReplyFilter:
    """Filters the bytes of replies on their way to the reader; it parses headers only.

    A string longer than any token reaches the reader as an empty one, and its bytes are dropped as they come: so a key
    that holds something else than a lock is answered like any name that is held. No token is empty.
    """

    __slots__ = ("_drops", "_head", "_skip", "items", "longest")

    def __init__(self) -> None:
        self._head = b""  # the start of a line that is not complete yet; a string's header has not been passed on
        self._skip = 0  # bytes of a string that are still to come
        self._drops = False  # whether these are dropped
        self.longest, self.items = MAX_REPLY, MAX_ITEMS  # that a reply may announce

    def expect_long(self) -> None:
        """Let long replies pass from now on: lists and verbatim strings. Other strings are still dropped."""
        self.longest, self.items = MAX_LONG_REPLY, MAX_LONG_ITEMS

    def within(self) -> bool:
        """Whether the rest of a line or of a string is still to come."""
        return bool(self._skip or self._head)

    def passed(self, data: bytes) -> bytes:
        """Returns what the reader is to get of these bytes: a string's header only when it is complete. ProtocolError:
        a header announces more than any reply has."""
        head, self._head = self._head, b""
        if head[:1] == b"$":
            data, head = head + data, b""
        parts: list[bytes] = []
        start, done, size = 0, 0, len(data)
        while start < size:
            if self._skip:
                step = min(self._skip, size - start)
                self._skip -= step
                start += step
                if self._drops:
                    done = start
                    if not self._skip:  # the end of the string ends the empty one, when all of it has come
                        self._drops, self._skip = False, 2
                continue
            end = data.find(b"\n", start)
            if end < 0:
                self._head = head + data[start:]
                if self._head[:1] == b"$":
                    if len(self._head) > MAX_FRAME:
                        raise ProtocolError(f"a header that does not end: {self._head!r:.40}")
                    size = start
                break
            line, head = head + data[start:end], b""
            if self._announces(line):
                parts += (data[done:start], b"$0\r\n")
                done = end + 1
            start = end + 1
        parts.append(data[done:size])
        return b"".join(parts)

    def _announces(self, line: bytes) -> bool:
        """Whether this line is a header that announces a string that is to be dropped."""
        kind = line[:1]
        if kind not in _SIZED or not (size := line[1:].rstrip(b"\r")).isdigit():
            return False
        announced = int(size.lstrip(b"0")[:20] or b"0")  # 20 digits are too much already
        if announced > (MAX_DROPPED if kind == b"$" else self.longest if kind in _STRINGS else self.items):
            raise ProtocolError(f"a reply that announces too much: {line!r:.40}")
        if kind in _STRINGS:
            self._drops = kind == b"$" and announced > MAX_REPLY
            self._skip = announced if self._drops else announced + 2
        return self._drops
