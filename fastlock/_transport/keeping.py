"""Who hears in threads that a kept lease is wanted elsewhere: a thread of the client, over a connection of its own.

Never here: which leases are kept (`_protocol/kept.py`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fastlock import _errors as errors
from fastlock import _native as native
from fastlock._protocol.kept import Subscription
from fastlock._protocol.lease import now
from fastlock._protocol.losses import LOG
from fastlock._protocol.undo import Undo
from fastlock._stream_errors import Broken, by_handler
from fastlock._transport import waiting
from fastlock._transport.base import Transport
from fastlock._transport.sync_connection import Connection
from fastlock._transport.undo_delivery import UndoDelivery
from fastlock._transport.writing import LASTING

if TYPE_CHECKING:
    from fastlock._protocol.lease import Lease
    from fastlock._transport.sync import SyncTransport

LONGEST_SLEEP = 1e6  # seconds: the system's functions take no infinite ones
LEAST_PAUSE, MOST_PAUSE = 0.1, 1.0  # seconds between two attempts to connect, where the first did not last


_ENDED_SO: set[int] = set()  # the id of this process, if it ends by `end_with_child`


def end_with_child(end: Callable[[], object]) -> None:
    """Call `end` as this process ends, if multiprocessing, or Celery's billiard, has made it: such a process ends
    without what `atexit` has, and those of Celery's pool without their finalizers as well."""
    if os.getpid() in _ENDED_SO:
        return
    for name in ("multiprocessing", "billiard"):
        process, util = (sys.modules.get(f"{name}.{module}") for module in ("process", "util"))
        if process is not None and util is not None and getattr(process.current_process(), "_parent_pid", None):
            util.Finalize(None, end, exitpriority=0)
    if (signals := sys.modules.get("celery.signals")) is not None:
        signals.worker_process_shutdown.connect(lambda **_: end(), weak=False)
    _ENDED_SO.add(os.getpid())  # last: a signal handler may raise before; to end twice does no harm


class KeepThread:
    """The thread that hears recalls for one client for threads; it is started when the first lease is to be kept, and
    ends when the client is closed."""

    def __init__(self, transport: SyncTransport, end: Callable[[], object]) -> None:
        self._transport = transport
        self._end = end  # ends all clients with the process
        self._mutex = native.RLock()
        self._started = False
        self._runs = native.allocate_lock()  # held by the thread
        self._pending: Any = None  # what ends its sleep
        self._recalled: list[Lease] = []  # leases that were recalled, and are to be released
        self._closing = native.allocate_lock()  # held until the client is closed
        self._closing.acquire()

    def ensure(self) -> None:
        """See to it that the thread runs."""
        if not self._started:
            with self._mutex:
                if not self._started:
                    end_with_child(self._end)
                    try:
                        native.start_new_thread(self._run, ())
                    except RuntimeError as error:  # there are too many, or the interpreter ends: nothing is kept
                        if by_handler(error):
                            raise
                        return
                    self._started = True

    def wake(self) -> None:
        """Have the thread look for what has lapsed."""
        self.look()
        connection = self._transport.keep_connection
        if connection is not None:
            connection.post(UndoDelivery(Undo([], [])))  # the reply to this ends its read

    def recalled(self, lease: Lease) -> None:
        """Have the thread, which reads just now, release a lease."""
        self._recalled.append(lease)
        self.look()

    def forget_parent(self) -> None:
        """In a forked child: close the parent's connection."""
        connection, self._transport.keep_connection = self._transport.keep_connection, None
        if connection is not None:
            connection.sock.close()

    def look(self) -> None:
        """Have the thread look for what has lapsed, as soon as its read ends."""
        pending = self._pending
        if pending is not None:
            pending.set_result(None)

    def stop(self) -> None:
        """The client was closed: end the thread."""
        if self._closing.locked():
            self._closing.release()
        connection = self._transport.keep_connection  # the thread may set it to None meanwhile
        if connection is not None:
            connection.fail(errors.ClientClosedError("this client was closed"))

    def _run(self) -> None:
        if not self._runs.acquire(blocking=False):
            return  # a signal handler raised as the first was started, before that was noted
        transport, pause = self._transport, 0.0
        while not transport.closed:
            began = now()
            try:
                self._hear()
            except BaseException as error:  # whatever it is, it must not end all keeping
                if not isinstance(error, (OSError, errors.RedisError)):
                    LOG.exception("recalls of kept leases cannot be heard; trying again")
            # What was released meanwhile waits for the next connection
            pause = 0.0 if now() - began > LASTING else min(max(LEAST_PAUSE, 2 * pause), MOST_PAUSE)
            self._closing.acquire(timeout=pause)

    def _hear(self) -> None:
        """Hear recalls, as long as the connection lasts."""
        transport = self._transport
        queues = transport.queues
        connection = Connection(transport, transport.settings)
        try:
            connection.stream.on_push = queues.on_push
            connection.stream.put_command(Subscription(queues, transport.endpoint), (b"SUBSCRIBE", queues.keep_channel))
            transport.keep_connection = connection
            # What is released goes over this connection, on which somebody reads
            transport.flush_undos_over(connection)
            while connection.error is None and not transport.closed:
                self._pending = pending = connection.impl.PendingReply()
                recalled, self._recalled = self._recalled, []
                transport.release_kept(recalled, connection.post)
                if now() >= queues.next_lapse:
                    transport.release_kept(queues.lapsed(now()), connection.post)
                wake = native.allocate_lock()
                wake.acquire()
                if not self._recalled:
                    waiting.listen(connection, pending, wake, min(queues.lapse_time(now()), now() + LONGEST_SLEEP))
        finally:
            transport.keep_connection = None
            connection.fail(Broken("nobody hears there any more"))
            transport.release_kept(queues.recalls_heard(False), transport.defer)  # over the next one
            transport.flush_after_close()


class SyncKeeping(Transport):
    """What a `SyncTransport` does about kept leases."""

    _keep_thread: KeepThread

    def hear_recalls(self) -> None:
        self._keep_thread.ensure()

    def wake_keeper(self) -> None:
        self._keep_thread.wake()

    def recalled(self, lease: Lease) -> None:
        self._keep_thread.recalled(lease)
