"""The stream of tasks, in Python, which queues and says when to flush. The same as `_task_stream.pxi`.

Never here: an event loop, a socket.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastlock._limits import SCRIPT_NAMES
from fastlock._stream import Pending, ReleaseRun, Stream, Template, as_bytes


class TaskStream(Stream):
    """A stream whose bytes an event loop carries: what a tick of the loop queues is flushed at once.

    It belongs to a connection, which writes the output; `wakeups` and `thread` are those of the connection's tasks, and
    `flush_soon` schedules a call of `run_flush`.
    """

    def __init__(self, connection: Any, wakeups: Any, thread: int, flush_soon: Callable[[], object]) -> None:
        super().__init__()
        self.connection = connection
        self.wakeups = wakeups
        self.thread = thread
        self.sent = 0.0  # when the first command of a tick came
        self._flush_soon = flush_soon
        self._flushing = False

    def request(self, template: Template, pending_reply: Pending, name: bytes, token: bytes, ms: int) -> None:
        """Queue one command, and schedule a flush; its reply goes to `pending_reply`."""
        self.put(template, pending_reply, name, token, ms)
        if not self._flushing:
            self.announce()

    def release(self, template: Template, pending_reply: Pending | None, name: bytes, token: bytes) -> None:
        """As `request`, of a release. Where the server has `release_script` for that, and no command, those that follow
        one another are sent as one script; the reply may be None then: not executed, as the script failed."""
        if self.release_script is None:
            self.put(template, pending_reply, name, token, 0)
        else:
            entry = pending_reply, as_bytes(name), as_bytes(token)
            with self._mutex:
                last = self._out[-1] if self._out else None
                if type(last) is ReleaseRun and len(last.entries) < SCRIPT_NAMES:
                    last.entries.append(entry)
                else:
                    run = ReleaseRun(self, template, self.release_script)
                    run.entries.append(entry)
                    self._append(run, run, 1)
        if not self._flushing:
            self.announce()

    def run_flush(self) -> None:
        """Flush what was announced; again, if a signal handler raises as the flush begins."""
        try:
            self.connection.flush()
        except BaseException:
            self.connection.flush()
            raise

    def announce(self) -> None:
        """Schedule a flush of what was queued, by whatever method: once until the next `take_output`."""
        if not self._flushing:
            self._flush_soon()  # first: if a signal handler raises in it, the next call schedules again
            self._flushing = True

    def take_output(self) -> bytes:
        """As `Stream.take_output`; what is queued from now on is announced again."""
        self._flushing = False
        return super().take_output()
