"""One connection of a client for threads, and the threads that wait on it.

A caller that is alone on the connection sends and reads by itself. Where others use it too, a caller queues its
command: the thread that reads (the leader) delivers the replies of all, and passes leadership on when it has its own.
Never here: which connection a caller gets, decisions about locks (the protocol's), the content of frames (the core's).
"""

from __future__ import annotations

import contextlib
import ssl
from typing import TYPE_CHECKING, Any

from hiredis import ProtocolError

from fastlock import _errors as errors
from fastlock import _fallback
from fastlock import _native as native
from fastlock._protocol import commands, handshake
from fastlock._protocol.lease import now
from fastlock._protocol.steps import Answer, Command, ConnectionLost, RawCommands, Request
from fastlock._stream_errors import Broken, NoReply, UnsolicitedData
from fastlock._transport import waiting
from fastlock._transport.posted import Posted
from fastlock._transport.settings import Settings
from fastlock._transport.sockets import open_socket, shut
from fastlock._transport.undo_delivery import UndoDelivery, UndoReply
from fastlock._transport.writing import STREAM_ERRORS, compile_templates, write_request, write_undo

if TYPE_CHECKING:
    from fastlock._transport.sync import SyncTransport

MAX_PARTS = 16  # of a template


def _is_late(request: Request) -> bool:
    return request.until is not None and now() >= request.until


class Connection:
    """One connection and the threads that wait on it."""

    def __init__(self, transport: SyncTransport, settings: Settings) -> None:
        self.transport = transport
        self.reply_timeout = transport.settings.reply_timeout
        self.error: Exception | None = None
        self.mutex = native.RLock()  # so that no undo is written to a connection that has just failed
        self.subscribed = False  # whether push messages come on this connection
        self.loaded: set[commands.RawCommand] = set()  # this and the next: as of a `Carrier`
        self.knows_release = False
        self.last = False  # whether it sends the undos of a closed client; what it cannot send stays pending
        self.in_flight: list[Any] | None = None  # pending replies when the connection broke
        self.failed = False  # whether all that waited for a reply were told that the connection broke
        self.garbled = False  # whether it broke by a reply that made no sense, with a single reply pending
        credentials = settings.credentials()
        self.sock = open_socket(settings)
        # Under TLS the bytes go through Python's ssl: there the compiled core has nothing to win.
        self.impl = _fallback if isinstance(self.sock, ssl.SSLSocket) else transport.impl
        self.stream = self.impl.SocketStream(self.sock)
        self.busy = self.impl.BUSY
        try:
            self.session = self._greet(settings, credentials)
        except BaseException:
            self.sock.close()
            raise
        self.stream.templates = compile_templates(self.impl, self.session.capabilities)

    def _greet(self, settings: Settings, credentials: tuple[str | None, str | None]) -> handshake.Session:
        hello, rest = self.impl.PendingReply(), self.impl.PendingReply()
        calls = handshake.greeting(settings.client_name, settings.db, credentials)
        self.stream.put_command(hello, calls[0])
        self.stream.put_calls(rest, calls[1:])
        try:
            if not self.stream.exchange(rest, settings.connect_timeout, 0.0):
                raise NoReply("no reply to the handshake")
        except STREAM_ERRORS:
            with contextlib.suppress(*STREAM_ERRORS):
                self.stream.receive(0.0, 0.0)  # a server that is full sends an error unasked, and closes
            handshake.refused(hello.reply)
            raise
        found = handshake.read_greeting([hello.reply, *rest.reply])
        # The replies are waited for: on an idle connection nothing may be pending
        if scripts := commands.scripts_to_load(found.capabilities):
            loaded = self.impl.PendingReply()
            self.stream.put_calls(loaded, [script.load for script in scripts])
            if not self.stream.exchange(loaded, settings.connect_timeout, 0.0):
                raise NoReply("no reply to SCRIPT LOAD")
            handshake.loaded(self.transport, scripts, loaded.reply)
        return found

    def execute(self, request: Request, spin: float) -> Any:
        """Send a request and wait. Returns its answer, or `ConnectionLost`, or DEADLINE_EXCEEDED when `request.until`
        came first, or RETRY_ELSEWHERE."""
        request.sent = now()
        request.connection = self
        try:
            if not request.stale and self.error is None:
                answer = self._alone(request, spin)
                if answer is not self.busy:  # else another thread uses the connection too
                    return answer
            return self._share(request, spin)
        except BaseException as error:
            return self.classify_error(request, error)

    def _alone(self, request: Request, spin: float) -> Any:
        """Send one command, and wait for its reply as the only one who reads. Returns the answer, or BUSY, also for a
        request that is not of that kind."""
        stream, timeout = self.stream, self._timeout(request, request.sent)
        if isinstance(request, Command):
            template = stream.templates[request.opcode]
            return stream.round_trip(template, request.key, request.token, request.ms, timeout, spin)
        if isinstance(request, RawCommands) and not (request.needs_push or request.long_reply):
            make = self.impl.Template
            filled = request.filled(make)
            if filled is None and len(request.calls) == 1 and len(request.calls[0]) <= MAX_PARTS:
                filled = make(*request.calls[0]), b"", 0
            if filled is not None:
                template, token, ms = filled
                reply = stream.round_trip(template, b"", token, ms, timeout, spin)
                return reply if reply is self.busy or type(reply) is ConnectionLost else [reply]
        return self.busy

    def classify_error(self, request: Request, error: BaseException) -> Any:
        """What an exception out of the stream means for a request: RETRY_ELSEWHERE, DEADLINE_EXCEEDED or
        `ConnectionLost`. Anything else interrupted the caller: it is raised again, after the undo was sent."""
        if isinstance(error, NoReply) and _is_late(request) and not self.stream.broken:
            self._cancel(request)
            return Answer.DEADLINE_EXCEEDED
        if isinstance(error, UnsolicitedData):
            request.sent = 0.0  # nothing was sent
            self.fail(error)
            self.transport.discard(self)  # a thread that failed it before may not have come to that yet
            return Answer.RETRY_ELSEWHERE
        if isinstance(error, STREAM_ERRORS):
            self.fail(error)  # which sets `self.error`
            dead: Any = self.error
            return ConnectionLost(dead, self.reply_timeout, sent=True, session=self.session, own=self.garbled)
        self._cancel(request)  # the command may be on its way out: other callers must not suffer from the interrupt
        try:
            raise error
        finally:  # or its traceback and this frame would keep each other, and the socket, until the next collection
            del error

    def _timeout(self, request: Request, time: float) -> float:
        return self.reply_timeout if request.until is None else max(0.0, min(self.reply_timeout, request.until - time))

    def _share(self, request: Request, spin: float) -> Any:
        """Wait for a reply among other threads."""
        return waiting.share(self, self._write, (request,), self._timeout(request, now()), spin)

    def _write(self, pending_reply: Any, request: Request) -> None:
        if request.needs_push and not self.subscribed:
            self.stream.on_push = self.transport.queues.on_push
            self.stream.put_command(self.transport.queues, (b"SUBSCRIBE", self.transport.queues.channel))
            self.subscribed = True  # last: an interrupt before SUBSCRIBE was queued must not leave this set
        request.sent = now()
        write_request(self.stream, self.session, request, pending_reply)

    def _cancel(self, request: Request) -> None:
        """The caller leaves before its reply came: send the undo of its request right behind it, on the same
        connection."""
        undo = request.undo()
        if self.stream.broken:
            self.fail(Broken("interrupted half-way"))
        if undo is not None:
            self.post(UndoDelivery(undo))

    def post(self, delivery: UndoDelivery) -> None:
        """Send an undo, for whose reply nobody waits: the thread that reads next on this connection reads it."""
        alive = self.error is None  # else who fails it has the mutex, and may wait for what a handler has interrupted
        if alive:
            with self.mutex:
                alive = self.error is None
                if alive:
                    write_undo(self, delivery)
        if not alive:
            delivery.outlived_by(self.session)
            self.transport.defer(delivery)
            if not self.last:
                self.transport.flush_after_close()
            return
        try:
            self.stream.flush(self.reply_timeout)  # which waits only where the server takes no more bytes
        except STREAM_ERRORS as error:
            self.fail(error)

    def post_later(self, delivery: UndoDelivery, seconds: float) -> None:
        """Send an undo before the next request instead of after `seconds`: there is no thread to wait until then, and a
        caller that is refused too sends its request again after a pause of its own."""
        self.transport.defer(delivery)

    def warn_refused(self, purpose: handshake.Purpose, error: errors.RedisError) -> None:
        """The server refuses for good what a command is for: warn, once."""
        handshake.warn_of_refusal(self.transport, purpose, error)

    def fail(self, error: BaseException) -> None:
        """The connection is broken: the outcome of every command in flight on it is unknown, and undos in flight are
        pending again."""
        another_fails_it = self.error is not None  # and waits for the client's mutex, which a handler's thread may have
        if not (self.failed or (another_fails_it and self.transport._mutex._is_owned())):
            with self.mutex:  # by one thread: another one may send the undos that are pending again meanwhile
                try:
                    self._fail_pending(error)
                except BaseException:  # interrupted in it: no other thread would tell the waiting threads
                    self._fail_pending(error)
                    raise
            if not self.last:
                self.transport.flush_after_close()

    def _fail_pending(self, error: BaseException) -> None:
        """Tell all threads that wait for a reply here, once. May be called again after an interrupt."""
        if self.failed:
            return
        self.error = dead = self.error or errors.as_connection_error(error, self.transport.settings.endpoint)
        if self.in_flight is None:
            self.in_flight = []
            self.transport.stats.retire(self.stream)
        self.stream.take_pending(self.in_flight)
        self.garbled = isinstance(error, ProtocolError) and len(self.in_flight) == 1
        shut(self.sock)  # wakes the thread that reads; the socket is closed when no thread refers to it any more
        final = isinstance(error, errors.ClientClosedError)
        for pending_reply in self.in_flight:
            if isinstance(pending_reply, UndoReply | Posted):
                pending_reply.connection_broke(self.transport, self.session)
            elif pending_reply is not None:
                lost = ConnectionLost(
                    dead, self.reply_timeout, sent=True, final=final, session=self.session, own=self.garbled
                )
                pending_reply.set_result(lost)
        self.transport.discard(self)
        if self.subscribed:
            self.transport.queues.on_reconnect()
        self.in_flight.clear()  # what is sent again refers to this connection
        self.failed = True

    def drain(self, until: float) -> None:
        """Wait for all replies in flight, also those to undos: a server does not read the commands that are left on a
        connection that was closed."""
        # An undo that is refused may be sent again, behind the PING: so this repeats
        while self.stream.pending and self.error is None and now() < until:
            last = RawCommands([(b"PING",)])
            last.until = until
            self.execute(last, 0.0)

    def __del__(self) -> None:
        sock = getattr(self, "sock", None)
        if sock is not None:
            sock.close()
