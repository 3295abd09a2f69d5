"""Streams of the core and the fallback on sockets: an echo server, a lock to park on, interrupts at chosen points.

`raise_at` interrupts Python code where a signal's handler could, at one point after the other.
"""

from __future__ import annotations

import contextlib
import dis
import gc
import inspect
import socket
import sys
import threading
from collections.abc import Callable, Collection
from types import FrameType
from typing import Any

from fastlock import _fallback
from support import resp

LONG = 30.0  # seconds: a wait that must not time out
FILES = {inspect.getfile(kind) for kind in _fallback.SocketStream.__mro__[:-1]}  # its code in Python, for `raise_at`


class Echo:
    """A server that answers each command with its last word, in order, in its own thread.

    gather: it answers only when it has so many commands. Unlike a real server it does not read while it cannot write,
    so unread answers must fit into a socket.
    """

    def __init__(self, sock: socket.socket, chunk: int = 1 << 16, gather: int = 1) -> None:
        self.received: list[bytes] = []
        self.sock, self.chunk, self.gather = sock, chunk, gather
        self.thread = threading.Thread(target=self._serve, daemon=True)

    def _serve(self) -> None:
        framer = resp.Framer(resp.command_end)
        words: list[bytes] = []
        while data := self.sock.recv(self.chunk):
            words += [resp.words(frame)[-1] for frame in framer.feed(data)]
            if len(words) >= self.gather:
                self.received += words
                with contextlib.suppress(BrokenPipeError):  # the test has ended
                    self.sock.sendall(b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words))
                words = []

    def __enter__(self) -> Echo:
        self.thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.thread.join(LONG)
        assert not self.thread.is_alive()


def beside(call: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def asleep() -> threading.Lock:
    """A lock to park on: held."""
    wake = threading.Lock()
    wake.acquire()
    return wake


class Interrupt(BaseException):
    """What a test's signal handler raises, as the default one raises KeyboardInterrupt."""


# Where the interpreter looks for signals, 3.11 to 3.13
CHECKS = frozenset(
    name
    for name in dis.opname
    if name.startswith(("CALL", "JUMP_BACKWARD", "POP_JUMP_BACKWARD", "RESUME"))
    and not name.startswith(("CALL_INTRINSIC", "JUMP_BACKWARD_NO_INTERRUPT"))
)


def raise_at(step: int, files: Collection[str], call: Callable[[], Any], kind: type[BaseException] = Interrupt) -> bool:
    """Run `call`; raise at the n-th point in `files` where a signal handler could raise; returns whether it did."""
    struck = False

    def strike() -> None:
        nonlocal struck
        struck = True
        raise kind

    try:
        call_at(step, files, call, strike)
    except kind:
        if not struck:  # an exception of the call's own
            raise
        return True
    assert not struck, "the interrupt was swallowed"
    return False


def call_at(step: int, files: Collection[str], call: Callable[[], Any], handler: Callable[[], object]) -> bool:
    """Run `call`; call the handler at the n-th point in `files` where one of a signal could run; returns whether it
    was called."""
    left, last = step, (None, "")

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal left, last
        if frame.f_code.co_filename not in files:
            return None
        frame.f_trace_opcodes = True
        if event == "call":
            after_await = frame.f_code.co_code[frame.f_lasti + 1] & 3 > 1  # there RESUME does not look for signals
            last = (frame, "" if after_await else "RESUME")
        elif event == "opcode":
            before, last = last, (frame, dis.opname[frame.f_code.co_code[frame.f_lasti]])
            # What has no line ends a generator that is closed: it follows an instruction that was not the one before
            left -= before[0] is frame and before[1] in CHECKS and frame.f_lineno is not None
            if left == 0:
                left = -1
                handler()
        return trace

    previous = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # some versions of 3.12 trace them only if a frame wanted it beforehand
    gc.disable()  # code that the collector runs would swallow the interrupt
    try:
        sys.settrace(trace)
        call()
    finally:
        sys.settrace(previous)
        last = (None, "")  # or frame and tracer would keep each other alive, and everything that was interrupted
        gc.enable()
    return left < 0
