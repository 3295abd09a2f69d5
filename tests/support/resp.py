"""The ends of RESP frames, found without hiredis and without fastlock, so that neither checks itself.

Bytes in, numbers and bytes out; no I/O. RESP2 and RESP3 as servers send it; streamed types are refused.
"""

from __future__ import annotations

from collections.abc import Callable

_AGGREGATES = {b"*": 1, b"~": 1, b">": 1, b"%": 2}
_SUBSCRIBING = (b"subscribe", b"unsubscribe", b"psubscribe", b"punsubscribe", b"ssubscribe", b"sunsubscribe")


def encode(*words: bytes | str | int) -> bytes:
    """A command as a client sends it."""
    raw = [word if isinstance(word, bytes) else str(word).encode() for word in words]
    return b"*%d\r\n" % len(raw) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in raw)


def frame_end(data: bytes | bytearray, start: int = 0) -> int:
    """Index behind the frame that begins at `start`; -1: more bytes are needed; ValueError: this is no RESP."""
    position, open_frames = start, 1
    while open_frames:
        line_end = data.find(b"\r\n", position)
        if line_end < 0:
            return -1
        kind, head = bytes(data[position : position + 1]), data[position + 1 : line_end]
        position = line_end + 2
        open_frames -= 1
        if kind in (b"$", b"=", b"!"):
            position += int(head) + 2 if int(head) >= 0 else 0
            if position > len(data):
                return -1
        elif kind in _AGGREGATES:
            open_frames += max(int(head), 0) * _AGGREGATES[kind]
        elif kind == b"|":
            open_frames += int(head) * 2 + 1
        elif kind not in (b"+", b"-", b":", b"_", b"#", b",", b"("):
            raise ValueError(f"no RESP frame begins with {kind!r}")
    return position


def command_end(data: bytes | bytearray, start: int = 0) -> int:
    """Like frame_end, for the commands of a client: an array, or one line of an inline command."""
    if data[start : start + 1] == b"*":
        return frame_end(data, start)
    return data.find(b"\n", start) + 1 or -1


def words(command: bytes) -> list[bytes]:
    """The words of a whole command."""
    if not command.startswith(b"*"):
        return command.split()
    found, position = [], command.index(b"\r\n") + 2
    while position < len(command):
        line_end = command.index(b"\r\n", position)
        length = int(command[position + 1 : line_end])
        found.append(command[line_end + 2 : line_end + 2 + length])
        position = line_end + length + 4
    return found


def is_push(frame: bytes) -> bool:
    """Whether the frame is a push: not the confirmations of SUBSCRIBE, which are the replies to it."""
    if not frame.startswith((b">", b"*3\r\n", b"*4\r\n")):
        return False
    first = frame.split(b"\r\n", 3)[2].lower()
    if frame.startswith(b"*"):  # RESP2 has no frame of its own for messages
        return first in (b"message", b"pmessage", b"smessage")
    return first not in _SUBSCRIBING


def replies_to(command: list[bytes]) -> int:
    """How many frames answer a command: one, but for subscriptions, which are confirmed channel by channel."""
    return max(len(command) - 1, 1) if command and command[0].lower() in _SUBSCRIBING else 1


class Framer:
    """Cuts a stream into whole frames; after bytes that are no RESP everything passes as it comes (`opaque`)."""

    def __init__(self, end: Callable[[bytes | bytearray, int], int]) -> None:
        self._end = end
        self.rest = bytearray()
        self.opaque = False

    def feed(self, chunk: bytes) -> list[bytes]:
        """The frames completed by this chunk, in order."""
        self.rest += chunk
        frames, start = [], 0
        while start < len(self.rest) and not self.opaque:
            try:
                end = self._end(self.rest, start)
            except ValueError:
                self.opaque = True
                break
            if end < 0:
                break
            frames.append(bytes(self.rest[start:end]))
            start = end
        del self.rest[:start]
        return [*frames, self.take()] if self.opaque and self.rest else frames

    def take(self) -> bytes:
        """Whatever is left over, such as half a frame before the end of the stream."""
        rest = bytes(self.rest)
        self.rest.clear()
        return rest
