"""Wire: how a task waits. One connection to one server, shared by the tasks of an event loop; one flush a tick.

A call appends its command and what its task waits for; the first of a tick schedules the flush. Who is cancelled keeps
his slot as a tombstone, so replies never shift. Never here: decisions about locks, the content of frames.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import math
import os
import socket
import threading
import weakref
from collections.abc import AsyncGenerator
from types import ModuleType
from typing import Any

from hiredis import ProtocolError

from fastlock import _commands as say
from fastlock import _errors as errors
from fastlock import _session as session
from fastlock._broken import Broken, NoReply, broken
from fastlock._common import Common
from fastlock._fork import at_fork, check
from fastlock._gate import LOOK, Gates
from fastlock._lease import now
from fastlock._sockets import tune_socket
from fastlock._stats import Stats
from fastlock._steps import BEHIND, LATE, Ask, Call, Capabilities, Distrust, Join, Leave, Lost, Sleep, Steps, Undo, Wait
from fastlock._topology import Settings
from fastlock._turns import Turns
from fastlock._wire import FAILED, PARTING, as_error, queue, templates, warn_of_refusal


class Link(asyncio.Protocol):
    """One connection and what tasks wait for on it."""

    def __init__(self, wire: Wire, loop: asyncio.AbstractEventLoop) -> None:
        self.wire = wire
        self.loop = loop
        self.patience = wire.settings.reply_timeout
        self.pipe = wire.impl.Pipe()
        self.pipe.hear = wire.gates.pushed
        self.pipe.serve(self, Turns(loop), threading.get_ident(), self._flush_soon)
        self._future = loop.create_future
        self.session: Any = None
        self.hears = False  # whether messages come here
        self.dead: Exception | None = None
        self.transport: Any = None
        self._watch: asyncio.TimerHandle | None = None
        self._quiet = True  # nothing was in flight
        self._progress = 0.0  # when the server last said something, or was first asked

    # called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._progress = self.loop.time()
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
        if self.session is None and error is not None:
            self._last_words()
        self.fail(error or Broken("the server closed the connection"))

    def _last_words(self) -> None:
        """What a server had said before it closed, where our greeting met that before its words were read."""
        sock = self.transport.get_extra_info("socket")
        if self.wire.settings.tls is None and sock is not None:
            with contextlib.suppress(OSError), socket.fromfd(sock.fileno(), sock.family, sock.type) as left:
                left.setblocking(False)
                self.data_received(left.recv(4096))

    # called by the wire

    async def greet(self, settings: Settings, credentials: tuple[str | None, str | None]) -> None:
        """The handshake. Raises redis-py's exceptions."""
        calls = session.greeting(settings, credentials)
        if self.dead is not None:  # it has closed already: nothing queued now would be answered
            raise self.dead
        hello, rest = self._future(), self._future()
        self.pipe.put_command(hello, calls[0])
        self.pipe.put_calls(rest, calls[1:])
        self.pipe.announce()
        replies = await rest
        if type(replies) is Lost:
            session.refused(hello.result())  # a server that is full says so unasked, and closes
            raise replies.error
        self.session = session.read_greeting([hello.result(), *replies])
        self.pipe.forms = templates(self.wire.impl, self.session.capabilities)
        if self.dead is not None:  # since the replies were delivered, a tick ago: nothing queued now would be answered
            raise self.dead
        # waited for: on an idle connection nothing may be pending
        if scripts := say.scripts_of(self.session.capabilities):
            loaded = self._future()
            self.pipe.put_calls(loaded, [script.load for script in scripts])
            self.pipe.announce()
            if type(lost := await loaded) is Lost:
                raise lost.error

    def ask(self, ask: Any) -> asyncio.Future[Any]:
        """Queue a step; the future gets its answer, or `Lost`."""
        ask.link = self
        ask.sent = now()
        future = self._future()
        if ask.hears and not self.hears:
            self.hears = True
            self.pipe.put_command(self.wire.gates, (b"SUBSCRIBE", self.wire.gates.inbox))
        queue(self, ask, future)
        self.pipe.announce()
        return future

    def post(self, undo: Undo) -> None:
        """Queue an undo that nobody waits for."""
        if self.loop.is_closed():
            undo.stale = (*undo.stale, self.session)
            self.wire.owe(undo)
            return
        undo.link = self
        queue(self, undo, undo)
        self.pipe.announce()

    def post_later(self, undo: Undo, seconds: float) -> None:
        """Queue it then, over whichever connection there is."""
        self.loop.call_later(seconds, self.wire.undo, undo)

    def refused(self, undo: Undo, error: errors.RedisError) -> None:
        """The server will not do it."""
        warn_of_refusal(self.wire, undo, error)

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
            undo.stale = (*undo.stale, self.session)
            self.wire.undo(undo)

    def _flush_soon(self) -> None:
        self.pipe.sent = now()
        self.loop.call_soon(self._flush)

    def _flush(self) -> None:
        if self.dead is not None:
            return
        try:
            if self._quiet:
                self._quiet = False
                self._progress = self.loop.time()
            if self._watch is None:
                self._watch = self.loop.call_later(self.wire.settings.reply_timeout, self._look)
            self.transport.write(self.pipe.take())
        except BaseException:  # a signal's handler raised: what was taken may be in nobody's hands
            self.fail(Broken("interrupted half-way"))
            raise

    def _look(self) -> None:
        """Is the server still answering? One timer for all that is in flight: replies come in order."""
        self._watch = None
        if self.dead is not None or self._quiet or not self.pipe.pending:  # quiet: what is queued is sent this tick
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
        if self.dead is not None:
            return
        self.dead = as_error(error, self.wire.settings.place)
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        if self.transport is not None:
            _abort(self.transport)
        if self.loop.is_closed():
            self._bury()
            return
        final = isinstance(error, errors.ClientClosedError)
        patience = self.wire.settings.reply_timeout
        self.wire.stats.retire(self.pipe)
        slots = self.pipe.drain()
        own = isinstance(error, ProtocolError) and len(slots) == 1
        for slot in slots:
            if isinstance(slot, Undo):
                slot.stale = (*slot.stale, self.session)
                self.wire.owe(slot)
            elif slot is not None and not slot.done():
                slot.set_result(Lost(self.dead, patience, sent=True, final=final, session=self.session, own=own))
        self.wire.dropped(self)
        if self.hears:
            self.wire.gates.reconnected()
        if self.wire.closed:
            self.wire.end_alarms()

    async def settle(self) -> None:
        """Have all answered that is in flight: also undos, whose commands a server does not read from a connection that
        was closed."""
        if self.pipe.pending:
            await asyncio.wait([self.ask(Call([(b"PING",)]))], timeout=PARTING)

    def _bury(self) -> None:
        """Nobody waits here any more, as the loop was closed; what is owed is owed still."""
        self.wire.stats.retire(self.pipe)
        for slot in self.pipe.drain():
            if isinstance(slot, Undo):
                slot.stale = (*slot.stale, self.session)
                self.wire.owe(slot)


class Wire(Common):
    """The connection of one client, and how its tasks wait."""

    def __init__(self, settings: Settings, impl: ModuleType) -> None:
        self.settings = settings
        self.impl = impl
        self.closed = False
        self.warned = False  # that something was refused which nobody waits for
        self._start()
        _WIRES.add(self)

    def _start(self) -> None:
        self.debts: list[Undo] = []
        self.link: Link | None = None  # the connection, if there is one now
        self.open_pipe: Any = None  # its pipe, as long as commands may be queued there
        self.loop: asyncio.AbstractEventLoop | None = None  # to which the client belongs, until that is closed
        self._binding = threading.Lock()
        self._end: Any = None  # closed by the loop when it comes to its end: see `_at_end`
        self._connecting: asyncio.Task[Link] | None = None
        self._sleeping: set[asyncio.Future[None]] = set()
        self._met = False
        self._broken = False  # a connection that has had no successor yet
        self.stats = Stats()
        self.gates = Gates(self.impl.Mutex(), self.stats)  # of no use, but faster than what does nothing
        self.crowd = self.gates.by_key  # names for which somebody waits
        self.alarms: dict[float, Any] = {}  # of the compiled hot path, by the time that they give
        self.ticks: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Before anything is done: all that is kept here is this process's, and the running loop's."""
        check()
        loop = asyncio._get_running_loop()
        if loop is not self.loop or loop is None:
            self._bind(loop)

    def _bind(self, loop: asyncio.AbstractEventLoop | None) -> None:
        if loop is None:
            raise RuntimeError(
                "fastlock.asyncio works in asyncio's event loop, and none runs here: under trio use a fastlock.Client "
                "in threads, as by trio.to_thread.run_sync or anyio.to_thread.run_sync"
            )
        with self._binding:
            if self.loop is loop:
                return
            if self.loop is not None:
                if not self.loop.is_closed():
                    raise RuntimeError(
                        "this fastlock.asyncio.Client belongs to another event loop, which is not closed: make one "
                        "client for each loop, or give all that use this one the same loop (of pytest-asyncio "
                        'loop_scope="session")'
                    )
                self._leave_loop()
            self.loop = loop
            self._end = _at_end(weakref.ref(self))
            with contextlib.suppress(StopIteration):
                self._end.asend(None).send(None)  # where it waits for that

    async def part(self) -> None:
        """The loop comes to its end: what is owed is said, and the connection closed, as nobody else would."""
        self._end = None
        link = self.link
        if link is not None and link.dead is None:
            await link.settle()
            self.link = self.open_pipe = None
            link.fail(EOFError("its event loop ends"))
            await asyncio.sleep(0)  # the transport closes its socket in the next tick

    def _leave_loop(self) -> None:
        """Those who waited in the loop are gone, and the connection. Leases stay, and what is owed."""
        self._unwatch()
        link, self.link, self.open_pipe = self.link, None, None
        if link is not None:
            link.fail(EOFError("its event loop has ended"))
        self._connecting = None
        self._sleeping.clear()
        self.gates.forget()
        self.gates = Gates(self.impl.Mutex(), self.stats)
        self.crowd = self.gates.by_key
        self.alarms = {}
        self.ticks = None

    def _unwatch(self) -> None:
        """The end of the loop is of no more interest."""
        end, self._end = self._end, None
        if end is not None:
            with contextlib.suppress(StopIteration, RuntimeError):  # which runs already
                end.aclose().send(None)

    async def release(self, lock: Any, op: Any, answer: Any, leaving: bool, error: BaseException | None) -> None:
        """A release that the hot path hands on: from its start, or with `op` from its answer."""
        try:
            if op is None:
                self.begin()
                await self.run(lock.releasing())
            elif answer is BEHIND:  # others wait, nothing was asked yet
                await self.drive(op.rest(await self._ask(op), now))
            else:
                await self.drive(op.rest(answer, now))
        except errors.RedisError as problem:
            if not leaving:
                raise
            lock.left(error, problem)

    async def run(self, op: Any, answer: Any = None) -> Any:
        """Carry out an `Acquire` or `Release`; returns its outcome, raises its errors. answer: a Waiter, from which to
        go on."""
        self.begin()
        if answer is None:
            answer = op.local(self.gates, now())
        return await self.drive(op.rest(await self._ask(op) if answer is None else answer, now))

    def torn(self, op: Any, waiter: Any) -> None:
        """Who slept is cancelled: what was handed to it goes on."""
        left = op.leave(waiter, None, now)
        if left is not None:
            self.undo(left)

    async def drive(self, steps: Steps) -> Any:
        """Carry out an operation of the law; returns its outcome, raises its errors."""
        self.begin()
        answer = None
        try:
            while True:
                answer = await self._perform(steps.send(answer))
        except StopIteration as end:
            return end.value
        except BaseException as error:
            # It raises this again: at once if it is over, else after what it leaves to be undone
            undo = steps.throw(error)
            while True:
                self.undo(undo)
                undo = steps.send(None)

    async def _perform(self, step: Any) -> Any:
        kind = type(step)
        if kind is Sleep:
            await self._sleep(step.seconds)
        elif kind is Wait:
            await self._wait(step.waiter, step.until)
        elif kind is Join:
            self.gates.join(step.waiter, now())
        elif kind is Undo or kind is Leave:
            self.undo(step)
        elif kind is Distrust:
            text = f"{self.settings.place}: a reply that makes no sense: {step.reply!r:.80}"
            error = errors.made(errors.InvalidResponse(text))
            step.ask.link.fail(error)
            patience, broken = self.settings.reply_timeout, step.ask.link.session
            return Lost(error, patience, sent=True, session=broken, own=True)
        else:
            return await self._ask(step)
        return None

    async def _ask(self, ask: Any) -> Any:
        try:
            link = await self._connected()
        except FAILED as error:
            known = as_error(error, self.settings.place)
            refused = isinstance(known, (errors.AuthenticationError, errors.ResponseError, errors.InvalidResponse))
            final = refused or self.closed or not self._met
            return Lost(known, self.settings.reply_timeout, sent=False, final=final)
        if type(ask) is Capabilities:
            return link.session
        if link.dead is not None:  # since the connecting ended, a tick ago
            return Lost(link.dead, self.settings.reply_timeout, sent=False)
        future = link.ask(ask)
        timer = None
        if ask.until is not None:
            timer = link.loop.call_later(max(0.0, ask.until - now()), self._late, ask, future)
        try:
            return await future
        except BaseException:
            link.leave(ask, ask.sent)
            raise
        finally:
            if timer is not None:
                timer.cancel()

    def _late(self, ask: Any, future: asyncio.Future[Any]) -> None:
        if not future.done():
            future.set_result(LATE)
            ask.link.leave(ask, ask.sent)

    def owe(self, undo: Undo) -> None:
        """Keep it for the next connection, and none of those that are gone."""
        undo.link = None
        self.debts.append(undo)

    def undo(self, undo: Undo) -> None:
        """Have something said that nobody waits for; over the next connection, when there is none."""
        if undo.link is not None and undo.link.dead is not None:
            undo.stale = (*undo.stale, undo.link.session)
        if self.link is not None and self.link.loop is not asyncio._get_running_loop():
            with contextlib.suppress(RuntimeError):  # that loop is closed: for the next one
                self.link.loop.call_soon_threadsafe(self.undo, undo)
                return
            self.owe(undo)
        elif self.link is not None:
            self.link.post(undo)
        else:
            self.owe(undo)
            self._reconnect()

    async def _wait(self, waiter: Any, until: float | None) -> None:
        """Sleep until the waiter is called, or its time has come."""
        if self.closed:
            raise errors.ClientClosedError("this client was closed")
        if waiter.called:
            waiter.called = False
            return
        at = waiter.gate.wake_at(waiter)
        if until is not None and until < at:
            at = until
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        waiter.wake = functools.partial(_wake, future)
        timer = loop.call_later(max(0.0, at - now()), _wake, future) if at < math.inf else None
        self.tick()
        try:
            await future
        finally:
            waiter.wake, waiter.called = None, False
            if timer is not None:
                timer.cancel()
        if self.closed:
            raise errors.ClientClosedError("this client was closed")

    def tick(self, over: bool = False) -> None:
        """While anybody waits, see every second whether a lease that goes round here has lapsed."""
        if over:
            self.gates.lapsed(now())
        if self.loop is not None and (over or self.ticks is None):
            self.ticks = self.loop.call_later(LOOK, self.tick, True) if self.crowd and not self.closed else None

    async def _sleep(self, seconds: float) -> None:
        """Sleep, but wake when the client is closed."""
        if self.closed:
            return
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        timer = loop.call_later(seconds, _wake, future)
        self._sleeping.add(future)
        try:
            await future
        finally:
            timer.cancel()
            self._sleeping.discard(future)

    # the connection

    async def _connected(self) -> Link:
        if self.closed:
            raise errors.ClientClosedError("this client is closed")
        if self.link is not None:
            return self.link
        task = self._connect_task(asyncio.get_running_loop())
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled() and self._connecting is None and self.closed:
                raise errors.ClientClosedError("this client was closed") from None
            raise

    def _connect_task(self, loop: asyncio.AbstractEventLoop) -> asyncio.Task[Link]:
        if self._connecting is None:
            self._connecting = loop.create_task(self._connect(loop), name="fastlock: connect")
            self._connecting.add_done_callback(self._connect_done)
        return self._connecting

    def _connect_done(self, task: asyncio.Task[Link]) -> None:
        self._connecting = None
        if not task.cancelled():
            task.exception()  # whoever waits has it; that nobody does any more is no news

    async def _connect(self, loop: asyncio.AbstractEventLoop) -> Link:
        settings = self.settings
        credentials = await settings.credentials_async()  # a provider's time is its own
        link = Link(self, loop)
        try:
            async with asyncio.timeout(settings.connect_timeout):
                if settings.path is not None:
                    await loop.create_unix_connection(lambda: link, settings.path)
                else:
                    host, port = settings.address()
                    await loop.create_connection(
                        lambda: link, host, port, ssl=settings.tls, server_hostname=host if settings.tls else None
                    )
                    tune_socket(link.transport.get_extra_info("socket"), settings)
                await link.greet(settings, credentials)
        except OSError as error:
            link.fail(error)
            raise broken(error) from error
        except BaseException as error:
            link.fail(error if isinstance(error, Exception) else Broken("connecting was given up"))
            raise
        if self.closed:
            closed = errors.ClientClosedError("this client is closed")
            link.fail(closed)
            raise closed
        self.stats.reconnects += self._broken
        self._broken = False
        if not self._met:
            self._met = True
            session.warn_of_eviction(link.session, settings.place)
        self.link = link
        self.open_pipe = link.pipe
        owed, self.debts = self.debts, []
        for undo in owed:
            link.post(undo)
        return link

    def _reconnect(self) -> None:
        """Somebody is owed an undo: connect for that alone, if nobody else does."""
        loop = self.loop
        if (
            not self.closed
            and self._met
            and self._end is not None  # the loop has not come to its end
            and loop is not None
            and loop is asyncio._get_running_loop()
            and not loop.is_closed()
        ):
            self._connect_task(loop)

    def dropped(self, link: Link) -> None:
        """A connection broke."""
        if self.link is link:
            self.link = self.open_pipe = None
            self._broken = True
        if self.debts and link.session is not None:
            self._reconnect()

    async def close(self) -> None:
        """End the connection, after what is in flight was answered (a second at most); who waits gets
        ClientClosedError."""
        check()
        if self.debts and self._met and self.loop is asyncio._get_running_loop():
            with contextlib.suppress(*FAILED, TimeoutError):  # to be said over a new connection
                await asyncio.wait_for(self._connected(), PARTING)
        self.closed = True
        self.open_pipe = None
        self._unwatch()
        link = self.link
        if self.loop is None or self.loop.is_closed():
            if link is not None:
                link.fail(errors.ClientClosedError("this client was closed"))
            return
        if self._connecting is not None:
            self._connecting.cancel()
        for future in list(self._sleeping):
            _wake(future)
        self.gates.call_all()
        until = now() + PARTING
        while self.gates.by_place and link is not None and link.dead is None and now() < until:
            await asyncio.sleep(0)  # each leaves the queue as it goes
        if link is not None and link.loop is asyncio._get_running_loop():
            await link.settle()
            link.fail(errors.ClientClosedError("this client was closed"))
        self.end_alarms()
        await asyncio.sleep(0)  # the transport closes its socket in the next tick

    def end_alarms(self) -> None:
        """Nobody waits any more: no timer is left to the loop."""
        for alarm in self.alarms.values():
            alarm.cancel()

    def abandon(self) -> None:
        """Nobody holds the client any more, in whatever thread that came out: its loop closes the connection."""
        check()
        link, self.closed, self.open_pipe = self.link, True, None
        self._unwatch()
        if link is not None and link.dead is None and link.loop.is_closed():
            link.fail(errors.ClientClosedError("nobody holds this client"))
        elif link is not None and link.dead is None:
            with contextlib.suppress(RuntimeError):  # the loop is closed in this very moment
                link.loop.call_soon_threadsafe(link.fail, errors.ClientClosedError("nobody holds this client"))

    def forget_parent(self) -> None:
        """In a forked child: the parent's connection, debts and loop are not ours; nothing is said on its socket."""
        link = self.link
        if link is not None and link.transport is not None:
            sock = link.transport.get_extra_info("socket")
            if sock is not None and sock.fileno() >= 0:
                null = os.open(os.devnull, os.O_RDWR)
                os.dup2(null, sock.fileno())  # the number stays taken, until the transport gives it back
                os.close(null)
        self._unwatch()
        self._start()


async def _at_end(wire: weakref.ref[Wire]) -> AsyncGenerator[None, None]:
    """A loop that comes to its end closes the asynchronous generators that began in it, under asyncio.run and all that
    do as it does: there is no other way to hear of it while something can still be said."""
    try:
        yield
    finally:
        found = wire()
        if found is not None and found._end is not None:
            await found.part()


def _abort(transport: Any) -> None:
    """End a connection without further words, also after its loop was closed: asyncio's transport cannot, then."""
    try:
        transport.abort()
    except RuntimeError:
        sock = getattr(transport, "_sock", None)
        if sock is not None:
            sock.close()
            transport._sock = None


_WIRES: weakref.WeakSet[Wire] = weakref.WeakSet()


def _forget_parent() -> None:
    for wire in list(_WIRES):
        wire.forget_parent()


def _settle() -> None:
    """The interpreter ends: connections whose loop was closed, which nobody else closes."""
    check()
    for wire in list(_WIRES):
        if wire.link is not None and wire.link.loop.is_closed():
            wire.abandon()


at_fork(_forget_parent)
atexit.register(_settle)


def _wake(future: asyncio.Future[None], answer: object = None) -> None:
    if not future.done():
        future.set_result(None)
