"""Wire: one connection of a client for threads, and the threads that wait on it.

A caller sends and reads on its own, or, where others do too, queues its command: whoever is reading (the leader)
delivers to all, and passes leadership on when it has its own reply. Never here: which connection a caller gets,
decisions about locks (the law makes them), the content of frames (the bytes layer knows it).
"""

from __future__ import annotations

import contextlib
import ssl
import threading
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hiredis import ProtocolError

from fastlock import _commands as say
from fastlock import _errors as errors
from fastlock import _fallback
from fastlock import _native as native
from fastlock import _session as session
from fastlock import _steps as steps
from fastlock._broken import Broken, NoReply, Unasked, by_handler
from fastlock._lease import now
from fastlock._sockets import open_socket, shut
from fastlock._steps import LATE, Ask, Distrust, Lost, Said, Undo
from fastlock._topology import Settings

if TYPE_CHECKING:
    from fastlock._wire import Wire

SPIN = 100e-6  # seconds: to poll the socket before sleeping, while a single thread waits: as much as that may cost
PARTING = 1.0  # seconds: how long closing waits for what is in flight, and who has less time for a connection
BROKEN = (Broken, ProtocolError)
POP: Any = list.pop  # for `(taken,) = map(POP, (some,))`: no signal's handler comes between taken and kept
INSERT, REMOVE = list.insert, list.remove  # as POP
STALE: Any = object()  # answer: the connection had ended while it was idle, nothing was sent; take another
FAILED = (*BROKEN, errors.RedisError)


def templates(impl: ModuleType, capabilities: frozenset[str]) -> tuple[Any, ...]:
    """The dialect of a server, compiled by an implementation; kept, as a process meets few kinds of servers."""
    key = impl, capabilities
    if key not in _TEMPLATES:
        _TEMPLATES[key] = tuple(impl.Template(*form) for form in say.dialect(capabilities))
    return _TEMPLATES[key]


_TEMPLATES: dict[tuple[ModuleType, frozenset[str]], tuple[Any, ...]] = {}


def queue(link: Any, ask: Any, slot: Any) -> None:
    """Write a step of the law into a connection's pipe; `slot` gets the answer."""
    pipe = link.pipe
    forms = pipe.forms
    for ended in ask.stale:  # nothing that these sessions sent may still be executed after this
        if (call := session.end(ended, link.session)) is not None:
            pipe.put_command(None, call)
    kind = ask.kind
    if kind == steps.ONE:
        pipe.put(forms[ask.verb], slot, ask.key, ask.token, ask.ms)
    elif kind == steps.MANY:
        pipe.put_many(forms[ask.verb], slot, ask.names, ask.tokens, ask.ms)
    else:
        pipe.put_calls(slot, ask.calls)


def removed(these: list[Any], one: Any) -> bool:
    """Take it out of a list; False: another thread, which needs no mutex for that, did so first."""
    found = False
    try:
        (_,), found = map(these.remove, (one,)), True  # no signal's handler comes between
    except ValueError as gone:
        if by_handler(gone):
            raise
    return found


class Connection:
    """One connection and the threads that wait on it."""

    def __init__(self, wire: Wire, settings: Settings) -> None:
        self.wire = wire
        self.patience = wire.settings.reply_timeout
        self.dead: Exception | None = None
        self.mutex = native.RLock()  # that nothing is owed to a connection which has just failed
        self.hears = False  # whether messages come here
        self.last = False  # whether it is for what a closed client owes, and what is owed here stays so
        self.in_flight: list[Any] | None = None  # slots that missed a reply when it broke
        self.buried = False  # whether all who waited were told that it broke
        self.senseless = False  # whether it broke by a reply that made no sense, with nobody else in flight
        credentials = settings.credentials()
        self.sock = open_socket(settings)
        # Under TLS the bytes go through Python's ssl: there the compiled core has nothing to win.
        self.impl = _fallback if isinstance(self.sock, ssl.SSLSocket) else wire.impl
        self.pipe = self.impl.Pipe(self.sock)
        self.busy = self.impl.BUSY
        try:
            self.session = self._greet(settings, credentials)
        except BaseException:
            self.sock.close()
            raise
        self.pipe.forms = templates(self.impl, self.session.capabilities)

    def _greet(self, settings: Settings, credentials: tuple[str | None, str | None]) -> session.Session:
        hello, rest = self.impl.Ticket(), self.impl.Ticket()
        calls = session.greeting(settings, credentials)
        self.pipe.put_command(hello, calls[0])
        self.pipe.put_calls(rest, calls[1:])
        try:
            if not self.pipe.exchange(rest, settings.connect_timeout, 0.0):
                raise NoReply("no reply to the handshake")
        except BROKEN:
            with contextlib.suppress(*BROKEN):
                self.pipe.receive(0.0, 0.0)  # a server that is full says so unasked, and closes
            session.refused(hello.reply)
            raise
        found = session.read_greeting([hello.reply, *rest.reply])
        if scripts := say.scripts_of(found.capabilities):  # waited for: on an idle connection nothing may be pending
            loaded = self.impl.Ticket()
            self.pipe.put_calls(loaded, [script.load for script in scripts])
            if not self.pipe.exchange(loaded, settings.connect_timeout, 0.0):
                raise NoReply("no reply to SCRIPT LOAD")
            session.loaded(self.wire, scripts, loaded.reply)
        return found

    def ask(self, ask: Ask, spin: float) -> Any:
        """Send a step and wait. Returns its answer, `Lost`, LATE when `ask.until` passed first, or STALE."""
        ask.sent = now()
        ask.link = self
        try:
            if ask.kind == steps.ONE and not ask.stale and self.dead is None:
                form, patience = self.pipe.forms[ask.verb], self._patience(ask, ask.sent)
                answer = self.pipe.ask(form, ask.key, ask.token, ask.ms, patience, spin)  # nobody else uses it
                if answer is not self.busy:
                    return answer
            return self._share(ask, spin)
        except BaseException as error:
            return self.explain(ask, error)

    def explain(self, ask: Ask, error: BaseException) -> Any:
        """What an exception out of the pipe means for a step: STALE, LATE, or `Lost`. Raises what only the caller can
        explain: it was interrupted."""
        if isinstance(error, NoReply) and ask.until is not None and now() >= ask.until and not self.pipe.broken:
            self._leave(ask)
            return LATE
        if isinstance(error, Unasked):
            ask.sent = 0.0  # it was not
            self.fail(error)
            self.wire.discard(self)  # who found it broken before may not have come to that yet
            return STALE
        if isinstance(error, BROKEN):
            self.fail(error)  # after which it is `dead`
            dead: Any = self.dead
            return Lost(dead, self.patience, sent=True, session=self.session, own=self.senseless)
        self._leave(ask)  # perhaps on its way out: the others must not pay for it
        try:
            raise error
        finally:  # or its traceback and this frame would keep each other, and the socket, until the next collection
            del error

    def _patience(self, ask: Ask, time: float) -> float:
        return self.patience if ask.until is None else max(0.0, min(self.patience, ask.until - time))

    def _share(self, ask: Ask, spin: float) -> Any:
        """Wait for a reply among others: as the one who reads, or asleep until the reply comes, or leadership does."""
        pipe = self.pipe
        if self.dead is not None or not pipe.usable():
            raise Unasked("the connection is of no use any more")
        patience = self._patience(ask, now())
        end = now() + patience
        ticket = self.impl.Ticket()
        wake = native.allocate_lock()
        wake.acquire()
        if ask.hears and not self.hears:
            pipe.hear = self.wire.gates.pushed
            pipe.put_command(self.wire.gates, (b"SUBSCRIBE", self.wire.gates.inbox))
            self.hears = True  # not before: who is interrupted would leave it deaf
        try:
            ask.sent = now()
            queue(self, ask, ticket)
            if not pipe.lead(ticket, wake):
                pipe.flush(patience)
                if not ticket.ready:  # asked after `wake` was given: a reply from now on finds it there
                    wake.acquire(timeout=min(patience, threading.TIMEOUT_MAX))
            if pipe.leads(ticket):
                pipe.exchange(ticket, max(0.0, end - now()), spin)
        finally:
            ticket.abandoned = not ticket.ready  # first: nobody must make this one the reader any more
            try:
                pipe.resign(ticket)
            except BaseException:  # interrupted in it: nobody else could resign for this ticket
                pipe.resign(ticket)
                raise
        if ticket.ready:
            return ticket.reply
        raise NoReply(f"no reply within {self.patience} s")

    def watch(self, ticket: Any, wake: Any, seconds: float) -> None:
        """Sleep until the ticket is ready, and read for all meanwhile, if nobody else does."""
        pipe, end = self.pipe, now() + seconds
        try:
            pipe.watch(ticket)
            if not pipe.lead(ticket, wake) and not ticket.ready:
                wake.acquire(timeout=max(0.0, seconds))
            if pipe.leads(ticket):
                pipe.exchange(ticket, max(0.0, end - now()), 0.0)
        except BROKEN as error:
            self.fail(error)
        finally:
            ticket.abandoned = True  # first: nobody must make this one the reader any more
            try:
                pipe.unwatch(ticket)
                pipe.resign(ticket)
            except BaseException:  # interrupted in it: nobody else could resign for this ticket
                pipe.unwatch(ticket)
                pipe.resign(ticket)
                raise

    def _leave(self, ask: Any) -> None:
        """The caller goes before its reply came: what it may have got is undone right behind it, on the same
        connection."""
        undo = ask.undo()
        if self.pipe.broken:
            self.fail(Broken("interrupted half-way"))
        if undo is not None:
            self.post(undo)

    def post(self, undo: Undo) -> None:
        """Send an undo that nobody waits for; whoever reads next on this connection reads its reply."""
        undo.link = self
        with self.mutex:
            alive = self.dead is None
            if alive:
                queue(self, undo, Said(undo))
        if not alive:
            undo.outlived(self.session)
            self.wire.owe(undo)
            if not self.last:
                self.wire.last_words()
            return
        try:
            self.pipe.flush(0.0)
        except BROKEN as error:
            self.fail(error)

    def post_later(self, undo: Undo, seconds: float) -> None:
        """Send it before whatever is asked next: there is no thread to wait for it, and who is refused too asks again
        after a pause of its own."""
        self.wire.owe(undo)

    def refused(self, undo: Undo, error: errors.RedisError) -> None:
        """The server will not do it."""
        session.warn_of_refusal(self.wire, undo, error)

    def fail(self, error: BaseException) -> None:
        """The connection is broken: what is in flight on it is unknown to everyone who waits, and what was owed is owed
        again."""
        if not self.buried:
            with self.mutex:  # by one thread: what it owes again may be said by another one meanwhile
                try:
                    self._bury(error)
                except BaseException:  # interrupted in it: nobody else would tell those who wait
                    self._bury(error)
                    raise
            if not self.last:
                self.wire.last_words()

    def _bury(self, error: BaseException) -> None:
        """Tell all who wait here, if nobody has. May be called again, by one who was interrupted in it."""
        if self.buried:
            return
        self.dead = dead = self.dead or errors.broken(error, self.wire.settings.place)
        if self.in_flight is None:
            self.in_flight = []
            self.wire.stats.retire(self.pipe)
        self.pipe.drain(self.in_flight)
        self.senseless = isinstance(error, ProtocolError) and len(self.in_flight) == 1
        shut(self.sock)  # whoever reads wakes up; closed when the last of them has let go of it
        final = isinstance(error, errors.ClientClosedError)
        for slot in self.in_flight:
            if type(slot) is Said:
                slot.lost(self.wire, self.session)
            elif slot is not None:
                lost = Lost(dead, self.patience, sent=True, final=final, session=self.session, own=self.senseless)
                slot.set_result(lost)
        self.wire.discard(self)
        if self.hears:
            self.wire.gates.reconnected()
        self.buried = True

    def settle(self, until: float) -> None:
        """Have all answered that is in flight: also undos, whose commands a server does not read from a connection that
        was closed."""
        while self.pipe.pending and self.dead is None and now() < until:  # what is refused is said once more, behind it
            last = steps.Call([(b"PING",)])
            last.until = until
            self.ask(last, 0.0)

    def __del__(self) -> None:
        sock = getattr(self, "sock", None)
        if sock is not None:
            sock.close()

    def distrust(self, step: Distrust) -> Lost:
        """A reply that cannot be true: nothing that is in flight here can be believed."""
        text = f"{self.wire.settings.place}: a reply that makes no sense: {step.reply!r:.80}"
        error = errors.made(errors.InvalidResponse(text))
        self.fail(error)
        return Lost(error, self.patience, sent=True, session=self.session, own=True)
