"""Wire: one connection of an asyncio client, and what its tasks wait for on it; one flush a tick.

A call appends its command and what its task waits for; the first of a tick schedules the flush. Who is cancelled keeps
his slot as a tombstone, so replies never shift. Never here: decisions about locks, the content of frames.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from typing import TYPE_CHECKING, Any

from hiredis import ProtocolError

from fastlock import _commands as say
from fastlock import _errors as errors
from fastlock import _session as session
from fastlock._broken import Broken, NoReply
from fastlock._lease import now
from fastlock._link import PARTING, queue, templates
from fastlock._steps import Ask, Call, Lost, Said, Undo
from fastlock._topology import Settings
from fastlock._turns import Turn

if TYPE_CHECKING:
    from fastlock._aio_wire import Wire


ROOM = 65536  # bytes that are read at once


class Link(asyncio.BufferedProtocol):
    """One connection and what tasks wait for on it."""

    def __init__(self, wire: Wire, loop: asyncio.AbstractEventLoop) -> None:
        self.wire = wire
        self.loop = loop
        self.patience = wire.settings.reply_timeout
        self.pipe = wire.impl.Pipe()
        self.pipe.hear = wire.gates.pushed
        self.pipe.serve(self, wire.turns, threading.get_ident(), self._flush_soon)
        self.session: Any = None
        self.hears = False  # whether messages come here
        self.dead: Exception | None = None
        self.in_flight: list[Any] = []  # slots that missed a reply when it broke
        self.buried = False  # whether they were told, and all else done that follows
        self.transport: Any = None
        self._watch: asyncio.TimerHandle | None = None
        self._quiet = True  # nothing was in flight
        self._room = memoryview(bytearray(ROOM))
        self._reading = False  # into that; not over TLS and in other loops, which may begin to read what is not there
        self._watches = wire.settings.tls is None and isinstance(loop, asyncio.BaseEventLoop)
        self._progress = 0.0  # when the server last said something, or was first asked

    # called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._reading:  # KeyboardInterrupt was raised in it, and the loop went on: replies may be missing
            self.fail(Broken("interrupted half-way"))
        self._reading = self._watches
        return self._room

    def buffer_updated(self, size: int) -> None:
        if self.dead is None:
            self.received(bytes(self._room[:size]))
        self._reading = False

    def received(self, data: bytes) -> None:
        self._progress = self.loop.time()
        self.pipe.turns.again()
        try:
            self.pipe.feed(data)
        except ProtocolError as error:  # bytes that cannot be explained
            early = self.session is None and data[:1] == b"-"  # a server that is full says so before it is greeted
            self.fail(errors.from_reply(Exception(data[1:].decode(errors="replace").strip())) if early else error)
        except BaseException:  # a signal's handler raised
            self.fail(Broken("interrupted half-way"))
            raise
        else:
            self._quiet = not self.pipe.pending

    def connection_lost(self, error: Exception | None) -> None:
        try:
            if self.session is None and error is not None:
                self._last_words()
        finally:
            self.fail(error or Broken("the server closed the connection"))

    def _last_words(self) -> None:
        """What a server had said before it closed, where our greeting met that before its words were read."""
        sock = self.transport.get_extra_info("socket")
        if self.wire.settings.tls is None and sock is not None:
            with contextlib.suppress(OSError), socket.fromfd(sock.fileno(), sock.family, sock.type) as left:
                left.setblocking(False)
                self.received(left.recv(4096))

    # called by the wire

    async def greet(self, settings: Settings, credentials: tuple[str | None, str | None]) -> None:
        """The handshake. Raises redis-py's exceptions."""
        calls = session.greeting(settings, credentials)
        if self.dead is not None:  # it has closed already: nothing queued now would be answered
            raise errors.afresh(self.dead)
        hello, rest = self._turn(), self._turn()
        self.pipe.put_command(hello, calls[0])
        self.pipe.put_calls(rest, calls[1:])
        self.pipe.announce()
        replies = await rest
        if type(replies) is Lost:
            session.refused(hello.result())  # a server that is full says so unasked, and closes
            raise errors.afresh(replies.error)
        self.session = session.read_greeting([hello.result(), *replies])
        self.pipe.forms = templates(self.wire.impl, self.session.capabilities)
        if self.dead is not None:  # since the replies were delivered, a tick ago: nothing queued now would be answered
            raise errors.afresh(self.dead)
        # waited for: on an idle connection nothing may be pending
        if scripts := say.scripts_of(self.session.capabilities):
            loaded = self._turn()
            self.pipe.put_calls(loaded, [script.load for script in scripts])
            self.pipe.announce()
            if type(replies := await loaded) is Lost:
                raise errors.afresh(replies.error)
            session.loaded(self.wire, scripts, replies)

    def _turn(self) -> Turn:
        return Turn().begin(self.pipe.turns)

    def ask(self, ask: Any) -> Turn:
        """Queue a step; what to wait for gives its answer, or `Lost`."""
        ask.link = self
        ask.sent = now()
        turn = self._turn()
        if ask.hears and not self.hears:
            self.hears = True
            self.pipe.put_command(self.wire.gates, (b"SUBSCRIBE", self.wire.gates.inbox))
        queue(self, ask, turn)
        self.pipe.announce()
        return turn

    def post(self, undo: Undo) -> None:
        """Queue an undo that nobody waits for."""
        if self.pipe.broken:
            self.fail(Broken("interrupted half-way"))
        if self.dead is not None or self.loop.is_closed():
            undo.outlived(self.session)
            self.wire.owe(undo)
            self.wire.dropped(self)
            return
        undo.link = self
        queue(self, undo, Said(undo))
        self.pipe.announce()

    def post_later(self, undo: Undo, seconds: float) -> None:
        """Queue it then, over whichever connection there is."""
        self.wire.put_off(undo, seconds)

    def refused(self, undo: Undo, error: errors.RedisError) -> None:
        """The server will not do it."""
        session.warn_of_refusal(self.wire, undo, error)

    def leave(self, ask: Ask, sent: float) -> None:
        """The caller goes before its reply came: what it may have got is undone right behind it, on the same
        connection."""
        ask.link, ask.sent = self, sent
        undo = ask.undo()
        if undo is None:
            return
        if self.dead is None:
            self.post(undo)
        else:
            undo.outlived(self.session)
            self.wire.undo(undo)

    def _flush_soon(self) -> None:
        self.pipe.sent = now()
        self._watch_over()
        self.loop.call_soon(self.pipe.tick)

    def _watch_over(self) -> None:
        if self._watch is None:
            self._watch = self.loop.call_later(self.wire.settings.reply_timeout, self._look)

    def flush(self) -> None:
        """Send what was queued."""
        if self.dead is not None or self.pipe.broken:
            self.fail(self.dead or Broken("interrupted half-way"))  # or whoever failed it was interrupted in that
            return
        try:
            if self._quiet:
                self._quiet = False
                self._progress = self.loop.time()
            self._watch_over()
            self.transport.write(self.pipe.take())
        except BaseException:  # a signal's handler raised: what was taken may be in nobody's hands
            self.fail(Broken("interrupted half-way"))
            raise

    def _look(self) -> None:
        """Is the server still answering? One timer for all that is in flight: replies come in order."""
        try:
            self._look_at_it()
        except BaseException:  # a signal's handler raised: look again
            self._watch = None
            self._watch_over()
            raise

    def _look_at_it(self) -> None:
        self._watch = None
        self.pipe.turns.again()
        if self.dead is not None:
            self.fail(self.dead)
        if not self.pipe.pending:
            return
        if self._quiet:  # what is queued is sent this tick, or the loop has forgotten to: to do so twice does no harm
            self._watch_over()
            self.loop.call_soon(self.pipe.tick)
            return
        limit = self.wire.settings.reply_timeout
        left = self._progress + limit - self.loop.time()
        if left <= 0:
            self.fail(NoReply(f"no reply within {limit} s"))
        else:
            self._watch = self.loop.call_later(left, self._look)

    def fail(self, error: BaseException) -> None:
        """The connection is broken: what is in flight on it is unknown to everyone who waits, and what was owed is owed
        again."""
        if not self.buried:
            try:
                self._bury(error)
            except BaseException:  # interrupted in it: nobody else would tell those who wait
                self._bury(error)
                raise

    def _bury(self, error: BaseException) -> None:
        """Tell all who wait here. May be called again, by one who was interrupted in it, or who finds that out."""
        if self.dead is None:
            self.dead = errors.broken(error, self.wire.settings.place)
            self.wire.stats.retire(self.pipe)
        if self.transport is not None:
            _abort(self.transport)
        slots = self.pipe.drain(self.in_flight)
        own = isinstance(error, ProtocolError) and len(slots) == 1
        final = isinstance(self.dead, errors.ClientClosedError)
        lost = Lost(self.dead, self.wire.settings.reply_timeout, sent=True, final=final, session=self.session, own=own)
        over = self.loop.is_closed()  # nobody waits here any more; what is owed is owed still
        for slot in slots:
            if type(slot) is Said:
                slot.lost(self.wire, self.session)
            elif isinstance(slot, Turn) and not over:
                slot.tell(lost)
        if not over:
            self.wire.dropped(self)
            if self.hears:
                self.wire.gates.reconnected()
            if self.wire.closed:
                self.wire.end_alarms()
        self.buried = True
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        self.in_flight.clear()

    async def settle(self) -> None:
        """Have all answered that is in flight: also undos, whose commands a server does not read from a connection that
        was closed."""
        until = now() + PARTING
        while self.pipe.pending and self.dead is None and now() < until:  # as of threads
            ping = Call([(b"PING",)])
            ping.until = until
            await self.wire.answered(ping, self)


def _abort(transport: Any) -> None:
    """End a connection without further words, also after its loop was closed: asyncio's transport cannot, then."""
    try:
        transport.abort()
    except RuntimeError:
        sock = getattr(transport, "_sock", None)
        if sock is not None:
            sock.close()
            transport._sock = None
