"""Wire: how a thread waits. A small set of connections to one server, shared by the threads of a process.

A caller takes an idle connection, sends and reads on its own. When all are busy it queues its command on one of them:
whoever is reading there (the leader) delivers to all, and passes leadership on when it has its own reply. No background
thread. Never here: decisions about locks (the law makes them), the content of frames (the bytes layer knows it).
"""

from __future__ import annotations

import atexit
import contextlib
import math
import ssl
import threading
import time
import weakref
from dataclasses import replace
from types import ModuleType
from typing import Any

from hiredis import ProtocolError

from fastlock import _commands as say
from fastlock import _errors as errors
from fastlock import _fallback
from fastlock import _law as law
from fastlock import _native as native
from fastlock import _session as session
from fastlock import _steps as steps
from fastlock._broken import Broken, NoReply, Unasked, by_handler
from fastlock._common import Common
from fastlock._fork import at_fork, check
from fastlock._gate import LOOK, Gates
from fastlock._lease import now
from fastlock._sockets import open_socket, shut
from fastlock._stats import Stats
from fastlock._steps import BEHIND, LATE, Ask, Capabilities, Distrust, Join, Leave, Lost, Sleep, Steps, Undo, Wait
from fastlock._topology import Settings

SPIN = 100e-6  # seconds: to poll the socket before sleeping, while a single thread waits: as much as that may cost
PARTING = 1.0  # seconds: how long closing waits for what is in flight, and who has less time for a connection
_BROKEN = (Broken, ProtocolError)
POP: Any = list.pop  # for `(taken,) = map(POP, (some,))`: no signal's handler comes between taken and kept
STALE: Any = object()  # answer: the connection had ended while it was idle, nothing was sent; take another
FAILED = (*_BROKEN, errors.RedisError)
_WITHIN = (
    "this thread waits for a reply on the only connection that could be used, and would wait for itself: a lock that is"
    " used in a handler of signals needs max_connections of 2 or more, and to be free"
)


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


class Connection:
    """One connection and the threads that wait on it."""

    def __init__(self, wire: Wire, settings: Settings) -> None:
        self.wire = wire
        self.patience = wire.settings.reply_timeout
        self.dead: Exception | None = None
        self.mutex = native.RLock()  # that nothing is owed to a connection which has just failed
        self.hears = False  # whether messages come here
        self.in_flight: list[Any] | None = None  # slots that missed a reply when it broke
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
        except _BROKEN:
            with contextlib.suppress(*_BROKEN):
                self.pipe.receive(0.0, 0.0)  # a server that is full says so unasked, and closes
            session.refused(hello.reply)
            raise
        found = session.read_greeting([hello.reply, *rest.reply])
        if scripts := say.scripts_of(found.capabilities):  # waited for: on an idle connection nothing may be pending
            loaded = self.impl.Ticket()
            self.pipe.put_calls(loaded, [script.load for script in scripts])
            if not self.pipe.exchange(loaded, settings.connect_timeout, 0.0):
                raise NoReply("no reply to SCRIPT LOAD")
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
        if isinstance(error, _BROKEN):
            self.fail(error)  # after which it is `dead`
            return Lost(
                self.dead,  # type: ignore[arg-type]
                self.patience,
                sent=True,
                session=self.session,
                own=self.senseless,
            )
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
        ask.sent = now()
        queue(self, ask, ticket)
        try:
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
        except _BROKEN as error:
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
            if self.dead is not None:
                undo.stale = (*undo.stale, self.session)
                self.wire.owe(undo)
                return
            queue(self, undo, undo)
        try:
            self.pipe.flush(0.0)
        except _BROKEN as error:
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
        if self.in_flight is None:
            try:
                self._bury(error)
            except BaseException:  # interrupted in it: nobody else would tell those who wait
                self._bury(error)
                raise

    def _bury(self, error: BaseException) -> None:
        """Tell all who wait here. May be called again, by one who was interrupted in it."""
        with self.mutex:
            self.dead = dead = self.dead or errors.broken(error, self.wire.settings.place)
            if self.in_flight is None:
                self.wire.stats.retire(self.pipe)
                self.in_flight = self.pipe.drain()
                self.senseless = isinstance(error, ProtocolError) and len(self.in_flight) == 1
        shut(self.sock)  # whoever reads wakes up; closed when the last of them has let go of it
        final = isinstance(error, errors.ClientClosedError)
        for slot in self.in_flight:
            if isinstance(slot, Undo):
                slot.stale = (*slot.stale, self.session)
                self.wire.owe(slot)
            elif slot is not None:
                lost = Lost(dead, self.patience, sent=True, final=final, session=self.session, own=self.senseless)
                slot.set_result(lost)
        self.wire.discard(self)
        if self.hears:
            self.wire.gates.reconnected()

    def settle(self, until: float) -> None:
        """Have all answered that is in flight: also undos, whose commands a server does not read from a connection that
        was closed."""
        if self.pipe.pending:
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


class Wire(Common):
    """The connections of one client, and how its threads wait."""

    def __init__(self, settings: Settings, impl: ModuleType) -> None:
        self.settings = settings
        self.impl = impl
        self.closed = False
        self.warned = False  # that something was refused which nobody waits for
        self._start()
        _WIRES.add(self)

    def _start(self) -> None:
        self.debts: list[Undo] = []
        self.connections: list[Connection] = []
        self.idle: list[Connection] = []
        self._opening: set[object] = set()  # those who connect now
        self._turn = 0
        # whether there ever was a connection: before that, an error is a wrong setting, not an outage
        self._met = False
        self._broken = 0  # connections that have had no successor yet
        self._mutex = native.RLock()
        self._changed = native.Changes()  # for those who wait for a connection
        self._closing = native.allocate_lock()  # held until the client is closed
        self._closing.acquire()
        self.stats = Stats()
        self.gates = Gates(self.impl.Mutex(), self.stats)
        self.crowd = self.gates.by_key  # names for which somebody waits
        self.ear: Connection | None = None  # on which messages come
        self.away = 0  # 1: it is missing among the idle ones

    def begin(self) -> None:
        """Before anything is done: all that is kept here is this process's."""
        check()

    def run(self, op: Any, answer: Any = None) -> Any:
        """Carry out an `Acquire` or `Release`; returns its outcome, raises its errors. answer: from which to go on, a
        Waiter; BEHIND: those who wait were asked already."""
        check()
        try:
            if answer is None:
                answer = op.local(self.gates, now())
            if answer is None or (answer is BEHIND and isinstance(op, law.Release)):
                answer = self._ask(op)
            return self.drive(op.rest(answer, now))
        except BaseException as error:
            try:
                self.interrupted(op, error)
            except BaseException as again:
                self.interrupted(op, again)
                raise
            raise

    def drive(self, steps: Steps) -> Any:
        """Carry out an operation of the law; returns its outcome, raises its errors."""
        check()
        answer = None
        try:
            while True:
                try:
                    step = steps.send(answer)
                except StopIteration as end:
                    return end.value
                answer = self._perform(step)
        except BaseException as error:  # also what strikes between a step and the next
            # It raises this again: at once if it is over, else after what it leaves to be undone
            undo = steps.throw(error)
            while True:
                try:
                    self._perform(undo)
                except BaseException:  # struck once more
                    self._perform(undo)
                    raise
                undo = steps.send(None)

    def _perform(self, step: Any) -> Any:
        kind = type(step)
        if kind is Sleep:
            if step.held:
                native.refuse_greenlet("the lock is held")
            self._sleep(step.seconds)
        elif kind is Wait:
            return self.wait(step.waiter, step.until, step.look)
        elif kind is Join:
            self.gates.join(step.waiter, now())
        elif kind is Undo or kind is Leave:
            self.undo(step)
        elif kind is Distrust:
            return step.ask.link.distrust(step)
        elif kind is Capabilities:
            return self.look()
        else:
            return self._ask(step)
        return None

    def _sleep(self, seconds: float) -> None:
        """Sleep, but wake when the client is closed."""
        if self._closing.acquire(timeout=min(seconds, threading.TIMEOUT_MAX)):
            self._closing.release()  # for the next one

    def wait(self, waiter: Any, until: float | None, look: Any = None) -> Any:
        """Sleep until the waiter is called, or its time has come. The first of a gate listens to the server, and asks
        as soon as it is called: see `Wait`."""
        native.refuse_greenlet(f"{waiter.name!r} is held")
        ticket, wake, ask, form = self.impl.Ticket(), native.allocate_lock(), None, None
        wake.acquire()
        with self.gates.mutex:
            if waiter.called and not self.closed:
                waiter.called = False
                return None
            ticket.wake = wake
            waiter.wake = ticket.set_result
            gate = waiter.gate
            first = (gate.held is None or gate.ahead) and gate.first() is waiter
            at = min(gate.wake_at(waiter), now() + LOOK, math.inf if until is None else until)
        try:
            ear = self.ear
            if self.closed:
                raise errors.ClientClosedError("this client was closed")
            if first and ear is not None and ear.dead is None:
                if look is not None and not gate.stale:
                    ask = look(gate)
                    form = ear.impl.Template(*ask.calls[0])  # now, as every microsecond counts then
                ear.watch(ticket, wake, at - now())
            elif not ticket.ready:
                wake.acquire(timeout=max(0.0, at - now()))
        finally:
            called, waiter.wake, waiter.called = waiter.called, None, False
        if self.closed:
            raise errors.ClientClosedError("this client was closed")
        return self._look(ear, waiter, ask, form) if called and form is not None else None

    def _look(self, ear: Any, waiter: Any, ask: Any, form: Any) -> Any:
        """Who was called asks at once, if nothing is in the way; None: nothing was asked."""
        if self.debts or ear.dead is not None or not self.gates.ask(waiter, now()):
            return None
        ask.sent, ask.link = now(), ear
        try:
            answer = ear.pipe.ask(form, b"", b"", 0, ear._patience(ask, ask.sent), 0.0)
        except BaseException as error:
            answer = ear.explain(ask, error)
        else:
            answer = STALE if answer is ear.busy else [answer]
        return None if answer is STALE else (ask, answer)

    def _spin(self) -> float:
        return SPIN if len(self.connections) - len(self.idle) - self.away <= 1 else 0.0

    def _listening(self, until: float | None) -> Connection:
        """The connection on which messages come: nobody's own while somebody waits."""
        ear = self.ear
        if ear is None or ear.dead is not None:
            fresh, owner = self._more(until)
            try:
                with self._mutex:
                    ear = self.ear
                    if ear is None or ear.dead is not None:
                        self.ear = ear = fresh
                        self.away, owner = int(owner), False
            finally:
                if owner:  # meanwhile another thread has found one
                    self.idle.append(fresh)
        with self._mutex:
            if ear in self.idle:
                (_,) = map(self.idle.remove, (ear,))
                self.away = 1
        return ear

    def _ask(self, ask: Any) -> Any:
        connection, owner = None, False
        try:  # from here on, as a signal's handler may come between a connection and what is done with it
            try:
                if ask.hears:
                    connection = self._listening(ask.until)
                else:
                    try:
                        (connection,), owner = map(POP, (self.idle,)), True  # the latest used, whose memory is warm
                    except IndexError as none:
                        if by_handler(none):
                            raise
                        connection, owner = self._more(ask.until)
            except FAILED as error:
                return self._lost(error)
            if not owner and connection.pipe.thread == threading.get_ident():
                return Lost(RuntimeError(_WITHIN), 0.0, sent=False, final=True)
            if self.debts:
                self._pay(connection)
            answer = connection.ask(ask, self._spin())
        finally:
            if owner and connection.dead is None:
                self.idle.append(connection)
        return answer if answer is not STALE else self._ask(ask)  # ends: each is thrown away, a new one is fresh

    def look(self) -> Any:
        """A session with the server (over whichever connection), or `Lost`."""
        connection, owner = None, False
        try:
            connection, owner = self._more()
            return connection.session
        except FAILED as error:
            return self._lost(error)
        finally:
            if owner:
                self.idle.append(connection)

    def _lost(self, error: BaseException) -> Lost:
        if by_handler(error):
            raise error
        known = errors.broken(error, self.settings.place)
        refused = isinstance(known, (errors.AuthenticationError, errors.ResponseError, errors.InvalidResponse))
        final = refused or self.closed or not self._met
        return Lost(known, self.settings.reply_timeout, sent=False, final=final)

    def _more(self, until: float | None = None) -> tuple[Connection, bool]:
        """(connection, whether it is this caller's own for now): an idle one, a new one, or a share in a busy one.
        until: when the caller's time is over, who waits for a connection of its own for PARTING at least."""
        patience = self.settings.connect_timeout
        if until is not None:
            patience = min(patience, max(PARTING, until - now()))
        mark = object()
        try:
            connection, owner = self._found(mark, now() + patience)
            return (self._open(mark, patience), True) if connection is None else (connection, owner)
        finally:
            if mark in self._opening:
                self._opening.discard(mark)
                self._changed.tell()

    def _found(self, mark: object, deadline: float) -> tuple[Connection | None, bool]:
        """As `_more`; None: one is to be opened, for which `mark` stands."""
        connection, owner = None, False
        while True:
            try:
                with self._mutex:
                    if self.closed:
                        raise errors.ClientClosedError("this client is closed")
                    if self.idle:
                        (connection,), owner = map(POP, (self.idle,)), True
                    elif self.away and not self.crowd and self.ear is not None and self.ear.dead is None:
                        self.away, connection, owner = 0, self.ear, True
                    elif len(self.connections) + len(self._opening) < self.settings.max_connections:
                        self._opening.add(mark)
                        return None, True
                    elif self.connections:
                        self._turn += 1
                        connection = self.connections[self._turn % len(self.connections)]
                        if connection.pipe.thread == threading.get_ident():  # waits for us, as in a handler of signals
                            connection = self.connections[(self._turn + 1) % len(self.connections)]
                    else:
                        wake = self._changed.expect()
            except IndexError as none:  # another thread has popped it
                if by_handler(none):
                    raise
                continue
            except BaseException:
                if owner and connection is not None:
                    self.idle.append(connection)
                raise
            if connection is not None:
                return connection, owner
            native.refuse_greenlet("another is still connecting")
            if not self._changed.wait(wake, deadline - now()):
                raise NoReply("no connection came up")

    def _open(self, mark: object, patience: float) -> Connection:
        connection = Connection(self, replace(self.settings, connect_timeout=patience))
        try:
            with self._mutex:
                self.connections.append(connection)
                self._opening.discard(mark)
                first, self._met = not self._met, True
                if self._broken:
                    self._broken -= 1
                    self.stats.reconnects += 1
            self._changed.tell()
            if self.closed:
                connection.fail(errors.ClientClosedError("this client is closed"))
            if first:
                session.warn_of_eviction(connection.session, self.settings.place)
        except BaseException:  # interrupted: it is nobody's
            connection.fail(Broken("interrupted"))
            raise
        return connection

    def discard(self, connection: Connection) -> None:
        """A connection broke; its idle twin, if any, is thrown away by whoever takes it."""
        with self._mutex:
            if connection in self.connections:
                self.connections.remove(connection)
                self._broken += 1
            if connection is self.ear:
                self.away = 0
            if connection in self.idle:
                self.idle.remove(connection)

    def owe(self, undo: Undo) -> None:
        """Keep it for the next connection, and none of those that are gone."""
        undo.link = None
        self.debts.append(undo)

    def undo(self, undo: Undo) -> None:
        """Have something said that nobody waits for; over the next connection, when there is none."""
        connection = undo.link
        if connection is None or connection.dead is not None:
            undo.stale = undo.stale if connection is None else (*undo.stale, connection.session)
            with self._mutex:
                connection = self.connections[0] if self.connections else None
        if connection is None:
            self.owe(undo)
        else:
            connection.post(undo)

    def say_debts(self) -> None:
        """Say now what is owed, if the server can be reached: who was interrupted may never use this client again."""
        if self.debts and self._met:
            try:
                connection, owner = self._more(now())
                try:
                    self._pay(connection)
                finally:
                    if owner and connection.dead is None:
                        self.idle.append(connection)
            except (*FAILED, RuntimeError) as error:  # RuntimeError: a greenlet that would have to wait for one
                if by_handler(error):
                    raise

    def _pay(self, connection: Connection) -> None:
        for undo in list(self.debts):
            connection.post(undo)
            try:
                self.debts.remove(undo)
            except ValueError as gone:  # paid by another thread as well, which does no harm
                if by_handler(gone):
                    raise

    def close(self) -> None:
        """End all connections, after what is in flight was answered (a second at most); who waits gets
        ClientClosedError."""
        check()
        try:
            self.say_debts()
        finally:  # also if whoever knows the password raises
            self._end()

    def _end(self) -> None:
        with self._mutex:
            with contextlib.suppress(RuntimeError):  # it was closed before, or by one who was interrupted in it
                self._closing.release()
            self.closed = True
            connections = list(self.connections)
            self.idle.clear()
        self._changed.tell()
        self.gates.call_all()
        for connection in connections:
            if connection.hears:  # one of those who were called may be reading there: the reply wakes it
                connection.post(Undo([], []))
        until = now() + PARTING
        while self.gates.by_place and now() < until:  # each leaves the queue as it goes
            time.sleep(0.0005)
        for connection in connections:
            connection.settle(until)
            connection.fail(errors.ClientClosedError("this client was closed"))

    def forget_parent(self) -> None:
        """In a forked child: the parent's connections, debts and mutexes are not ours; nothing is said on its
        sockets."""
        for connection in self.connections:
            connection.sock.close()
        self._start()
        if self.closed:
            self._closing.release()


_WIRES: weakref.WeakSet[Wire] = weakref.WeakSet()


def _forget_parent() -> None:
    for wire in list(_WIRES):
        wire.forget_parent()


def _at_exit() -> None:
    """The interpreter ends: clients that live until then say what they owe, as long as there is Python."""
    check()
    until = now() + PARTING
    for wire in list(_WIRES):
        if not wire.closed:
            with contextlib.suppress(Exception):  # of whoever knows the password, which must not cost the others theirs
                wire.say_debts()
        for connection in list(wire.connections):
            connection.settle(until)


at_fork(_forget_parent)
atexit.register(_at_exit)
