"""One connection of an asyncio client, and what its tasks wait for on it; one flush a tick of the event loop.

A call appends its command and a pending reply for its task; the first call of a tick schedules the flush. The pending
reply of a cancelled task stays as a tombstone, so replies never shift. Never here: decisions about locks, the content
of frames.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from typing import TYPE_CHECKING, Any

from hiredis import ProtocolError

from fastlock import _errors as errors
from fastlock._protocol import commands, handshake
from fastlock._protocol.kept import Subscription
from fastlock._protocol.lease import now
from fastlock._protocol.steps import ConnectionLost, RawCommands, Request
from fastlock._stream_errors import Broken, NoReply
from fastlock._transport.internals import Wakeup, abort, reads_at_once
from fastlock._transport.posted import Posted
from fastlock._transport.settings import Settings
from fastlock._transport.undo_delivery import UndoDelivery, UndoReply
from fastlock._transport.writing import compile_templates, write_request, write_undo

if TYPE_CHECKING:
    from fastlock._transport.aio import AsyncTransport


ROOM = 65536  # bytes that are read at once at most


class AsyncConnection(asyncio.BufferedProtocol):
    """One connection and what tasks wait for on it."""

    def __init__(self, transport: AsyncTransport, loop: asyncio.AbstractEventLoop) -> None:
        self.transport = transport
        self.loop = loop
        self.reply_timeout = transport.settings.reply_timeout
        self.stream = transport.impl.TaskStream(self, transport.wakeups, threading.get_ident(), self._flush_soon)
        self.stream.on_push = transport.queues.on_push
        self.session: Any = None
        self.subscribed = False  # whether push messages come on this connection
        self.hears_recalls = False  # whether recalls of kept leases come on it
        self.loaded: set[commands.RawCommand] = set()  # this and the next: as of a `Carrier`
        self.knows_release = False
        self.error: Exception | None = None
        self.in_flight: list[Any] = []  # pending replies when the connection broke
        self.failed = False  # whether these were resolved, and all else done that follows
        self.byte_transport: Any = None
        self._watch: asyncio.TimerHandle | None = None
        self._all_answered = True  # whether all that was sent has been answered
        self._room = memoryview(bytearray(ROOM))
        # Whether the loop reads into that. Not noted over TLS and in other loops, which may begin a read without data
        self._reading = False
        self._watches = transport.settings.tls is None and reads_at_once(loop)
        self._progress = 0.0  # when the server last sent something, or the first command in flight was sent

    # called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.byte_transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._reading:  # KeyboardInterrupt was raised in a read, and the loop went on: replies may be missing
            self.fail(Broken("interrupted half-way"))
        self._reading = self._watches
        return self._room

    def buffer_updated(self, size: int) -> None:
        if self.error is None:
            self.received(bytes(self._room[:size]))
        self._reading = False

    def received(self, data: bytes) -> None:
        self._progress = self.loop.time()
        self.stream.wakeups.reschedule()
        try:
            self.stream.feed(data)
        except ProtocolError as error:  # bytes that cannot be explained
            early = self.session is None and data[:1] == b"-"  # a full server sends an error before the handshake
            self.fail(errors.from_reply(Exception(data[1:].decode(errors="replace").strip())) if early else error)
        except BaseException:  # a signal handler raised
            self.fail(Broken("interrupted half-way"))
            raise
        else:
            self._all_answered = not self.stream.pending

    def connection_lost(self, error: Exception | None) -> None:
        try:
            if self.session is None and error is not None:
                self._read_last_reply()
        finally:
            self.fail(error or Broken("the server closed the connection"))

    def _read_last_reply(self) -> None:
        """Read what a server sent before it closed, where sending the handshake failed before that was read."""
        sock = self.byte_transport.get_extra_info("socket")
        if self.transport.settings.tls is None and sock is not None:
            with contextlib.suppress(OSError), socket.fromfd(sock.fileno(), sock.family, sock.type) as left:
                left.setblocking(False)
                self.received(left.recv(4096))

    # called by the transport

    async def do_handshake(self, settings: Settings, credentials: tuple[str | None, str | None]) -> None:
        """The handshake. Raises redis-py's exceptions."""
        calls = handshake.greeting(settings.client_name, settings.db, credentials)
        if self.error is not None:  # the server has closed it already: nothing queued now would be answered
            raise errors.fresh_copy(self.error)
        hello, rest = self._new_wakeup(), self._new_wakeup()
        self.stream.put_command(hello, calls[0])
        self.stream.put_calls(rest, calls[1:])
        self.stream.announce()
        replies = await rest
        if type(replies) is ConnectionLost:
            handshake.refused(hello.result())  # a server that is full sends an error unasked, and closes
            raise errors.fresh_copy(replies.error)
        self.session = handshake.read_greeting([hello.result(), *replies])
        self.stream.templates = compile_templates(self.transport.impl, self.session.capabilities)
        self.stream.release_script = commands.release_script(self.session.capabilities)
        if self.error is not None:  # it broke in the tick since the replies came: nothing queued now would be answered
            raise errors.fresh_copy(self.error)
        # The replies are waited for: on an idle connection nothing may be pending
        if scripts := commands.scripts_to_load(self.session.capabilities):
            loaded = self._new_wakeup()
            self.stream.put_calls(loaded, [script.load for script in scripts])
            self.stream.announce()
            if type(replies := await loaded) is ConnectionLost:
                raise errors.fresh_copy(replies.error)
            handshake.loaded(self.transport, scripts, replies)

    def _new_wakeup(self) -> Wakeup:
        return Wakeup().arm(self.stream.wakeups)

    def execute(self, request: Request) -> Wakeup:
        """Queue a request; the Wakeup, awaited, gives its answer, or `ConnectionLost`."""
        request.connection = self
        request.sent = now()
        wakeup = self._new_wakeup()
        if request.needs_push and not self.subscribed:
            self.subscribed = True
            self.stream.put_command(self.transport.queues, (b"SUBSCRIBE", self.transport.queues.channel))
        write_request(self.stream, self.session, request, wakeup)
        self.stream.announce()
        return wakeup

    def hear_recalls(self) -> None:
        """Queue the SUBSCRIBE by which recalls of kept leases come on this connection, once."""
        if not self.hears_recalls and self.error is None:
            self.hears_recalls = True
            queues = self.transport.queues
            self.stream.put_command(Subscription(queues, self.transport.endpoint), (b"SUBSCRIBE", queues.keep_channel))
            self.stream.announce()

    def post(self, delivery: UndoDelivery) -> None:
        """Queue an undo, for whose reply nobody waits."""
        if self.stream.broken:
            self.fail(Broken("interrupted half-way"))
        if self.error is not None or self.loop.is_closed():
            delivery.outlived_by(self.session)
            self.transport.defer(delivery)
            self.transport.discard(self)
            return
        write_undo(self, delivery)
        self.stream.announce()

    def post_later(self, delivery: UndoDelivery, seconds: float) -> None:
        """Queue an undo after so many seconds, over whichever connection there is then."""
        self.transport.delay_undo(delivery, seconds)

    def warn_refused(self, purpose: handshake.Purpose, error: errors.RedisError) -> None:
        """The server refuses for good what a command is for: warn, once."""
        handshake.warn_of_refusal(self.transport, purpose, error)

    def cancel(self, request: Request, sent: float) -> None:
        """The caller leaves before its reply came: send the undo of its request right behind it, on the same
        connection."""
        request.connection, request.sent = self, sent
        undo = request.undo()
        if undo is None:
            return
        delivery = UndoDelivery(undo)
        if self.error is None:
            self.post(delivery)
        else:
            delivery.outlived_by(self.session)
            self.transport.deliver(delivery)

    def _flush_soon(self) -> None:
        self.stream.sent = now()
        self._watch_over()
        self.loop.call_soon(self.stream.run_flush)

    def _watch_over(self) -> None:
        if self._watch is None:
            self._watch = self.loop.call_later(self.transport.settings.reply_timeout, self._check_progress)

    def flush(self) -> None:
        """Send what was queued."""
        if self.error is not None or self.stream.broken:
            self.fail(self.error or Broken("interrupted half-way"))  # again, if it failed: that may be unfinished
            return
        try:
            if self._all_answered:
                self._all_answered = False
                self._progress = self.loop.time()
            self._watch_over()
            self.byte_transport.write(self.stream.take_output())
        except BaseException:  # a signal handler raised: bytes that were taken from the stream may be lost
            self.fail(Broken("interrupted half-way"))
            raise

    def _check_progress(self) -> None:
        """Check whether the server still answers. One timer for all that is in flight: replies come in order."""
        try:
            self._check_progress_once()
        except BaseException:  # a signal handler raised: check again later
            self._watch = None
            self._watch_over()
            raise

    def _check_progress_once(self) -> None:
        self._watch = None
        self.stream.wakeups.reschedule()
        if self.error is not None:
            self.fail(self.error)
        if not self.stream.pending:
            return
        if self._all_answered:  # the flush comes this tick, or the loop has forgotten it: to flush twice does no harm
            self._watch_over()
            self.loop.call_soon(self.stream.run_flush)
            return
        limit = self.transport.settings.reply_timeout
        left = self._progress + limit - self.loop.time()
        if left <= 0:
            self.fail(NoReply(f"no reply within {limit} s"))
        else:
            self._watch = self.loop.call_later(left, self._check_progress)

    def fail(self, error: BaseException) -> None:
        """The connection is broken: the outcome of every command in flight on it is unknown, and undos in flight are
        pending again."""
        if not self.failed:
            try:
                self._fail_pending(error)
            except BaseException:  # interrupted in it: nothing else would tell the waiting tasks
                self._fail_pending(error)
                raise

    def _fail_pending(self, error: BaseException) -> None:
        """Tell all tasks that wait for a reply here. May be called again after an interrupt, by any caller."""
        if self.error is None:
            self.error = errors.as_connection_error(error, self.transport.settings.endpoint)
            self.transport.stats.retire(self.stream)
        if self.byte_transport is not None:
            abort(self.byte_transport)
        pending_replies = self.stream.take_pending(self.in_flight)
        own = isinstance(error, ProtocolError) and len(pending_replies) == 1
        final = isinstance(self.error, errors.ClientClosedError)
        lost = ConnectionLost(
            self.error, self.transport.settings.reply_timeout, sent=True, final=final, session=self.session, own=own
        )
        loop_closed = self.loop.is_closed()  # no task waits here any more; undos are still pending
        for pending_reply in pending_replies:
            if isinstance(pending_reply, UndoReply | Posted):
                pending_reply.connection_broke(self.transport, self.session)
            elif isinstance(pending_reply, Wakeup) and not loop_closed:
                pending_reply.set_result_once(lost)
        if not loop_closed:
            self.transport.discard(self)
            if self.subscribed:
                self.transport.queues.on_reconnect()
            if self.hears_recalls:
                self.transport.release_kept(self.transport.queues.recalls_heard(False))
            if self.transport.closed:
                self.transport.cancel_shared_timeouts()
        self.failed = True
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        self.in_flight.clear()

    async def drain(self, until: float) -> None:
        """Wait for all replies in flight, also those to undos: a server does not read the commands that are left on a
        connection that was closed."""
        # An undo that is refused may be sent again, behind the PING: so this repeats
        while self.stream.pending and self.error is None and now() < until:
            ping = RawCommands([(b"PING",)])
            ping.until = until
            await self.transport.answered(ping, self)
