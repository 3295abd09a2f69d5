"""Worker processes that exchange JSON lines with their parent: both ends, for the benchmark and for the flash sale.

The parent has a `Process` for each worker, the worker gets its end from `to_parent`; neither knows what the messages
mean. A worker ends when its standard input does, so that none outlives its parent, and is ended by its own process id:
by closing that input, and if it does not leave then, by a kill. Ctrl-C of a terminal is for the parent only.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import IO, Any

LEAVE_SECONDS = 5.0
"""How long workers may take to leave, all together, before they are killed."""

GONE_SECONDS = 5.0
"""How long a process may take to disappear, after its last message or after a kill."""


class Lines:
    """One end of a stream of messages. Reads bypass Python's buffers: half a line of a process that hangs blocks no
    reader, and a thread that reads when its process ends holds no buffer's lock."""

    def __init__(self, source: int, target: IO[bytes]) -> None:
        self._source, self._target = source, target
        self._unread = bytearray()

    def fileno(self) -> int:
        """The file descriptor that is read, for `select`."""
        return self._source

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message. Raises BrokenPipeError if the other end is gone."""
        self._target.write(json.dumps(message).encode() + b"\n")
        self._target.flush()

    def receive(self, seconds: float | None = None) -> dict[str, Any] | None:
        """The next message; None if none is complete within `seconds`. Raises EOFError if the other end is gone."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while b"\n" not in self._unread:
            if self._source < 0:
                raise EOFError
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self], [], [], left)[0]:
                return None
            read = os.read(self._source, 1 << 16)
            if not read:
                raise EOFError
            self._unread += read
        line, _, self._unread = self._unread.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message


class Process(Lines):
    """A worker process, which runs `python -m module arguments` with the parent's `sys.path`.

    env: additions to the parent's environment. stderr: where its errors go, by default to the parent's.
    """

    def __init__(
        self, module: str, *arguments: str, env: Mapping[str, str] | None = None, stderr: IO[bytes] | None = None
    ) -> None:
        self._popen = subprocess.Popen(
            # -P: without the folder that `python -m` puts before the others, as the parent may run without it.
            [sys.executable, "-P", "-X", "faulthandler", "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env={**os.environ, **(env or {}), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            process_group=0,  # Ctrl-C of a terminal is the parent's, also while this process still starts
        )
        assert self._popen.stdin is not None and self._popen.stdout is not None  # pipes, as asked for
        super().__init__(self._popen.stdout.fileno(), self._popen.stdin)
        self.pid = self._popen.pid

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message. If the worker is gone, its last messages can still be received, and EOFError after them."""
        with suppress(OSError):
            super().send(message)

    def kill(self) -> None:
        """Kill the process."""
        self._popen.kill()

    def leave(self) -> None:
        """Close the input of the process, which ends when it has read that."""
        with suppress(OSError):  # it died with a message unread
            self._target.close()

    def end(self, seconds: float = GONE_SECONDS) -> int:
        """Wait `seconds` for the process to end, and kill it if it does not. Returns its exit code, or a signal
        negated."""
        try:
            code = self._popen.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            self.kill()
            code = self._popen.wait(GONE_SECONDS)
        assert self._popen.stdout is not None
        self._popen.stdout.close()
        self._source = -1  # or the next file that is opened would be read in its place
        return code


def readable(processes: Iterable[Process], seconds: float) -> list[Process]:
    """The processes that have sent something or are gone, after waiting `seconds` at most for the first."""
    return select.select(list(processes), [], [], seconds)[0]


def end_all(processes: Sequence[Process], seconds: float = LEAVE_SECONDS) -> None:
    """End all processes within `seconds`."""
    for process in processes:
        process.leave()
    deadline = time.monotonic() + seconds
    for process in processes:
        process.end(deadline - time.monotonic())


def to_parent() -> Lines:
    """Open the worker's end. From then on what a library prints goes to stderr, and Ctrl-C does nothing."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    messages = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return Lines(0, messages)
