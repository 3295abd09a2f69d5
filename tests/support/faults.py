"""The faults that a proxy can commit, as values: frames in, operations out; no I/O, no clock.

A fault works on one side: on requests (client to server) or on replies. It begins at a frame (see `Armed`), gets that
frame and all later ones of its connection until it has ended, and answers with what to do instead of forwarding them:
bytes are sent, Close ends the connection, Hold waits for resume(), Pause waits a time.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Close:
    """End the connection; the server still executes what was forwarded before. reset: by RST instead of FIN."""

    reset: bool = False


@dataclass(frozen=True)
class Hold:
    """Forward nothing more until the fault is resumed or the connection ends."""


@dataclass(frozen=True)
class Pause:
    """Wait so many seconds; 0 only ends the current write."""

    seconds: float


Op = bytes | Close | Hold | Pause
Side = Literal["request", "reply"]
Unit = Literal["reply", "push"]
# Takes (frame, is it a push?), yields operations; what it returns are the operations for its last frame.
Effect = Generator[list[Op], tuple[bytes, bool], list[Op]]


@dataclass(frozen=True)
class Fault:
    """What to do (`effect`, made anew for each connection it hits), and on which side.

    standing: the fault does not use itself up, so it hits every connection unless armed otherwise.
    unit: the fault can begin at a "reply" or a "push" only; None: at any frame.
    """

    name: str
    side: Side
    effect: Callable[[], Effect] = field(repr=False)
    standing: bool = False
    unit: Unit | None = None


def drop(
    *,
    request_bytes: int | None = None,
    reply_bytes: int | None = None,
    replies: int | None = None,
    pushes: int | None = None,
    reset: bool = False,
) -> Fault:
    """End the connection after exactly so many bytes or frames were let through (0: before the first of them).

    Give one of the four counts. reset: by RST instead of FIN (TCP only).
    """
    given = {"request_bytes": request_bytes, "reply_bytes": reply_bytes, "replies": replies, "pushes": pushes}
    named = [(name, count) for name, count in given.items() if count is not None]
    if len(named) != 1 or named[0][1] < 0:
        raise ValueError(f"drop() takes one count, 0 or more, of {', '.join(given)}")
    name, count = named[0]
    side: Side = "request" if name == "request_bytes" else "reply"
    if name.endswith("bytes"):
        return Fault(f"drop({name}={count})", side, lambda: _drop_bytes(count, reset))
    unit: Unit = "push" if name == "pushes" else "reply"
    return Fault(f"drop({name}={count})", side, lambda: _drop_frames(count, unit == "push", reset), unit=unit)


def swallow(*, replies: int = 0, pushes: int = 0, close: bool = True, reset: bool = False) -> Fault:
    """Lose so many replies (default 1) or pushes: the server has executed the command, the client never receives them.

    close: end the connection in place of the last one lost. close=False goes on, one answer short.
    """
    if (replies and pushes) or min(replies, pushes) < 0:
        raise ValueError("swallow() takes either replies or pushes, 1 or more")
    count, unit = (pushes, "push") if pushes else (replies or 1, "reply")
    ending: list[Op] = [Close(reset)] if close else []
    return _substitute(f"swallow({count} {unit})", count, unit, ending)  # type: ignore[arg-type]


def replace(data: bytes, *, replies: int = 1) -> Fault:
    """Send `data` instead of so many replies; the server has executed the commands."""
    return _substitute(f"replace({data!r})", replies, "reply", [data])


def inject(data: bytes) -> Fault:
    """Put `data` into the stream of replies, before the frame at which the fault begins."""
    return Fault(f"inject({data!r})", "reply", lambda: _inject(data))


def stall(side: Side = "reply") -> Fault:
    """Hold everything on that side until resume(); the connection stays open."""
    return Fault(f"stall({side})", side, _stall, standing=True)


def delay(seconds: float, side: Side = "reply") -> Fault:
    """Forward each frame of that side so many seconds later."""
    return Fault(f"delay({seconds:g})", side, lambda: _each(lambda frame: [Pause(seconds), frame]), standing=True)


def split(size: int, side: Side = "reply", pause: float = 0.0002) -> Fault:
    """Forward each frame in writes of at most `size` bytes, `pause` seconds apart (so that they arrive one by one)."""
    if size < 1:
        raise ValueError("split() takes a size of 1 or more")

    def pieces(frame: bytes) -> list[Op]:
        return [op for at in range(0, len(frame), size) for op in (frame[at : at + size], Pause(pause))]

    return Fault(f"split({size})", side, lambda: _each(pieces), standing=True)


def _drop_bytes(left: int, reset: bool) -> Effect:
    frame, _ = yield []
    while len(frame) < left:
        left -= len(frame)
        frame, _ = yield [frame]
    return [frame[:left], Close(reset)]


def _drop_frames(left: int, pushes: bool, reset: bool) -> Effect:
    frame, push = yield []
    while left and not (left == 1 and push == pushes):
        left -= push == pushes
        frame, push = yield [frame]
    return [frame, Close(reset)] if left else [Close(reset)]


def _substitute(name: str, count: int, unit: Unit, instead: list[Op]) -> Fault:
    if count < 1:
        raise ValueError(f"{name}: the count must be 1 or more")
    return Fault(name, "reply", lambda: _substitute_frames(count, unit == "push", instead), unit=unit)


def _substitute_frames(left: int, pushes: bool, instead: list[Op]) -> Effect:
    frame, push = yield []
    while left > 1 or push != pushes:
        counts = push == pushes
        left -= counts
        frame, push = yield [] if counts else [frame]
    return instead


def _inject(data: bytes) -> Effect:
    frame, _ = yield []
    return [data, frame]


def _stall() -> Effect:
    frame, _ = yield []
    return [Hold(), frame]


def _each(change: Callable[[bytes], list[Op]]) -> Effect:
    frame, _ = yield []
    while True:
        frame, _ = yield change(frame)
