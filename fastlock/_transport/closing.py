"""How a client for threads ends, by `close` or with the interpreter: what is in flight is answered, and what is
pending is delivered, which is tried again for as long as `Transport.delivery_end` says.

Never here: what is pending, and whether it is tried again (`_protocol/undo.py`).
"""

from __future__ import annotations

import atexit
import contextlib
import time
import weakref
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from fastlock import _errors as errors
from fastlock._fork import check
from fastlock._protocol.lease import now
from fastlock._protocol.steps import backoff
from fastlock._protocol.undo import Undo
from fastlock._stream_errors import NoReply, by_handler
from fastlock._transport.base import Transport
from fastlock._transport.keeping import KeepThread
from fastlock._transport.renewing import RenewalThread
from fastlock._transport.sync_connection import Connection
from fastlock._transport.undo_delivery import UndoDelivery
from fastlock._transport.writing import CLOSE_SECONDS, CONNECT_ERRORS, removed

if TYPE_CHECKING:
    from fastlock._transport.sync import SyncTransport


SHORTEST = 0.1  # seconds that each try gets at least


class SyncClosing(Transport):
    """How a `SyncTransport` ends."""

    _closing: Any
    _changed: Any
    _delivering: Any  # a lock
    _delivery_end: float  # until when what is pending is delivered, once the client was closed
    _ended: bool
    _keep_thread: KeepThread
    _renewal_thread: RenewalThread

    def flush_pending_undos(self, until: float | None = None) -> None:
        raise NotImplementedError

    def flush_undos_over(self, connection: Connection) -> None:
        raise NotImplementedError

    def forget_parent(self) -> None:
        raise NotImplementedError

    def _await_apart(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """End all connections, after what is in flight was answered, and send the pending undos: 1 or 2 seconds where
        the server does not answer, and where releases are among it that nobody waited for, up to `reply_timeout`.
        Waiters get ClientClosedError."""
        check()
        self.queues.ended = True
        self._delivery_end = end = self.delivery_end()
        try:
            self.release_kept(self.queues.recalls_heard(False))
            self.flush_pending_undos()
        finally:
            try:
                self._end_connections(end)
            finally:
                self._ended = True
                self._renewal_thread.wake()  # to end
                self._keep_thread.stop()
            self._deliver_last(max(end, now() + CLOSE_SECONDS))
            self._await_apart()

    def flush_after_close(self) -> None:
        """Send the pending undos of a closed client, in the thread that left them: the client will have no other
        connection over which they could go."""
        if self.pending_undos and self._ended:
            self._deliver_last(max(self._delivery_end, now() + CLOSE_SECONDS))

    def _deliver_last(self, end: float) -> None:
        """Send what is pending of a closed client, and give it up at `end`; one thread does so, the others wait."""
        mine = False
        try:
            # No signal handler runs between the two, but in the call
            (mine,) = map(self._delivering.acquire, (True,), (max(0.0, end - now()),))
            if self.pending_undos and self.ever_connected:
                self._deliver(self._flush_over_last, end)
            self.give_up([each.undo for each in list(self.pending_undos) if removed(self.pending_undos, each)])
        finally:
            if mine:
                self._delivering.release()

    def _deliver(self, flush: Any, end: float) -> None:
        """Call `flush`, which is to send the pending undos and read their answers before `end`, until none is left."""
        tries = 0
        while True:
            try:
                flush(end)
            except Exception as error:
                if by_handler(error):
                    raise
                if not isinstance(error, CONNECT_ERRORS):  # a credential provider's: asking again would not help
                    return
            tries += 1
            if not self.pending_undos or now() >= end:
                return
            time.sleep(max(0.0, min(backoff(tries), end - now())))

    def _flush_over_last(self, end: float) -> None:
        """Send the pending undos of a closed client over a connection for them alone, and read the answers."""
        timeout = min(CLOSE_SECONDS, max(SHORTEST, end - now()))
        connection = Connection(cast("SyncTransport", self), replace(self.settings, connect_timeout=timeout))
        try:
            connection.last = True
            self.flush_undos_over(connection)
            connection.drain(end)
        finally:
            connection.fail(errors.ClientClosedError("this client was closed"))

    def _end_connections(self, end: float) -> None:
        with self._mutex:
            try:
                self._closing.release()
            except RuntimeError as error:  # closed before, or a thread was interrupted in closing it
                if by_handler(error):
                    raise
            self.closed = True
            connections = list(self.connections)
            self.idle.clear()
        self._changed.tell()
        self.wake_waiters()
        until = now() + CLOSE_SECONDS
        self._await_waiters(until)
        for connection in connections:
            connection.drain(max(until, self.drain_end(connection, end)))
            connection.fail(errors.ClientClosedError("this client was closed"))
        self.queues.drop_connections()

    def wake_waiters(self) -> None:
        """Wake all waiters, to check again whether they are to wait."""
        self.queues.wake_all()
        for connection in list(self.connections):
            if connection.subscribed:  # a woken waiter may still be reading there: the reply to this wakes it
                connection.post(UndoDelivery(Undo([], [])))

    def _await_waiters(self, until: float) -> None:
        """Wait until this client's entries have left the server's queues: each waiter leaves as it wakes."""
        self.queues.on_empty = self._changed.tell
        while self.queues.by_entry and now() < until:
            wake = self._changed.expect()
            self._changed.wait(wake, until - now() if self.queues.by_entry else 0.0)

    def send_at_exit(self, until: float) -> None:
        """As the interpreter ends: send the pending undos, while Python runs."""
        if not self.closed:
            # A credential provider may raise, which must not cost the other clients their undos
            with contextlib.suppress(Exception):
                self.release_kept(self.queues.recalls_heard(False))
                self.flush_pending_undos(max(until, now() + SHORTEST))

    def deliver_at_exit(self, until: float, end: float) -> None:
        """Read the answers, until `until`; releases that callers count on are sent again, until `end`."""
        if self.closed:
            if self.connections or self.pending_undos or self.unconfirmed:  # who closed it was interrupted
                end = max(self._delivery_end, now() + CLOSE_SECONDS)
                self._end_connections(end)
                self._deliver_last(end)
            return
        for connection in list(self.connections):
            connection.drain(max(until, self.drain_end(connection, end), now() + SHORTEST))
            if any(each.carrier is connection for each in list(self.unconfirmed.values())):
                connection.fail(NoReply("no reply as the process ends"))
        if self.pending_undos:
            self._deliver(self._flush_and_drain, max(end, now() + SHORTEST))
        self.give_up([each.undo for each in list(self.pending_undos)])
        self._await_apart()
        # Here, as objects are collected in no order now: a socket may go before its connection
        for connection in list(self.idle):
            if removed(self.idle, connection):
                connection.fail(EOFError("the process ends"))

    def _flush_and_drain(self, end: float) -> None:
        """Send the pending undos, and read the answers."""
        self.flush_pending_undos(end)
        for connection in list(self.connections):
            connection.drain(end)


TRANSPORTS: weakref.WeakSet[SyncClosing] = weakref.WeakSet()


def end_all() -> None:
    """As the interpreter ends, send the pending undos of all clients that still live, and see to it that they arrive:
    the time for that is theirs together, as is that of a call which was interrupted."""
    check()
    until = now() + CLOSE_SECONDS
    ends = [(each, each.delivery_end()) for each in list(TRANSPORTS)]
    raised: BaseException | None = None
    sends = [partial(transport.send_at_exit, until) for transport, _ in ends]
    for step in [*sends, *(partial(transport.deliver_at_exit, until, end) for transport, end in ends)]:
        try:
            step()
        except BaseException as error:  # raised by a signal handler, which must not cost any client its undos
            raised = error
            step()
    if raised is not None:
        raise raised


atexit.register(end_all)
