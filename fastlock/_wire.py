"""Wire: how a thread waits. A small set of connections to one server, shared by the threads of a process.

A caller takes an idle connection, or a new one, for itself; when all are busy it shares one of them (see `_link`). No
background thread. Never here: decisions about locks (the law makes them), the content of frames (the bytes layer knows
it).
"""

from __future__ import annotations

import atexit
import contextlib
import math
import threading
import time
import weakref
from dataclasses import replace
from types import ModuleType
from typing import Any

from fastlock import _errors as errors
from fastlock import _law as law
from fastlock import _native as native
from fastlock import _session as session
from fastlock._broken import Broken, NoReply, by_handler
from fastlock._common import Common
from fastlock._fork import at_fork, check
from fastlock._gate import LOOK, Gates
from fastlock._lease import now
from fastlock._link import FAILED, INSERT, PARTING, POP, REMOVE, SPIN, STALE, Connection, removed
from fastlock._stats import Stats
from fastlock._steps import BEHIND, Capabilities, Distrust, Join, Leave, Lost, Sleep, Steps, Undo, Wait
from fastlock._topology import Settings

_WITHIN = (
    "this thread waits for a reply on the only connection that could be used, and would wait for itself: a lock that is"
    " used in a handler of signals needs max_connections of 2 or more, and to be free"
)


class Wire(Common):
    """The connections of one client, and how its threads wait."""

    def __init__(self, settings: Settings, impl: ModuleType) -> None:
        self.settings = settings
        self.impl = impl
        self.closed = False
        self.warned = False  # that something was refused which nobody waits for
        self._ended = False  # whether all connections of a client that was closed are
        self._met = False  # whether there ever was a connection: before that an error is a wrong setting, not an outage
        self._start()
        _WIRES.add(self)

    def _start(self) -> None:
        self.debts: list[Undo] = []
        self.connections: list[Connection] = []
        self.idle: list[Connection] = []
        self._opening: set[object] = set()  # those who connect now
        self._turn = 0
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
        finally:
            if self.away and not self.crowd:
                self._back_among_the_idle()

    def _back_among_the_idle(self) -> None:
        """Nobody waits any more, but what was left to be undone there may be refused: whoever asks next reads that."""
        with self._mutex:
            ear = self.ear
            if self.away and ear is not None and ear.dead is None and ear.pipe.pending and not self.crowd:
                self.away = 0
                self.idle.append(ear)

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
            return self._parting(step) if self.closed and step.parting else self.look()
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
        if ear is None or ear.dead is not None or (self._barred(ear) and not self.away):
            fresh, owner = self._more(until)
            try:
                with self._mutex:
                    ear = self.ear
                    if ear is None or ear.dead is not None or (self._barred(ear) and not self.away):
                        self.ear = ear = fresh
                        self.away, owner = int(owner), False
            finally:
                if owner:  # meanwhile another thread has found one
                    self.idle.append(fresh)
        with self._mutex:
            if removed(self.idle, ear):
                self.away = 1
        return ear

    def _barred(self, connection: Connection) -> bool:
        """Whether this thread would wait there for itself, as in a handler of signals: see `Pipe.entangled`."""
        return bool(connection.pipe.entangled(self.gates.mutex.mine()))

    def _ask(self, ask: Any) -> Any:
        while (answer := self._asked(ask)) is STALE:  # ends: each is thrown away, a new one is fresh
            pass
        return answer

    def _asked(self, ask: Any) -> Any:
        if self.closed and ask.parting:
            return self._parting(ask)
        connection: Any = None
        owner = False
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
                    else:
                        if self._barred(connection):  # somebody listens there besides
                            (_,), owner = map(INSERT, (self.idle,), (0,), (connection,)), False
                            connection, owner = self._more(ask.until)
            except FAILED as error:
                return self._lost(error)
            if not owner and self._barred(connection):
                return Lost(RuntimeError(_WITHIN), 0.0, sent=False, final=True)
            if self.debts:
                self._pay(connection)
            return connection.ask(ask, self._spin())
        finally:
            if owner and connection.dead is None:
                self.idle.append(connection)

    def _parting(self, ask: Any) -> Any:
        """Ask it over a connection for that alone."""
        connection: Any = None
        try:
            connection = Connection(self, self.settings)
            return connection.session if type(ask) is Capabilities else connection.ask(ask, 0.0)
        except FAILED as error:
            return self._lost(error)
        finally:
            if connection is not None:
                connection.fail(errors.ClientClosedError("this client was closed"))

    def look(self) -> Any:
        """A session with the server (over whichever connection), or `Lost`."""
        connection: Any = None
        owner = False
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
        final = refused or self.closed or not (self._met or self.settings.patient)
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
                    connection = self._free()
                    if connection is not None:
                        (_,), owner = map(REMOVE, (self.idle,), (connection,)), True
                    elif self.away and not self.crowd and self.ear is not None and self.ear.dead is None:
                        self.away, connection, owner = 0, self.ear, True
                    elif len(self.connections) + len(self._opening) < self.settings.max_connections:
                        self._opening.add(mark)
                        return None, True
                    elif self.connections:
                        connection = self._shared()
                    else:
                        wake = self._changed.expect()
            except BaseException as error:
                if owner and connection is not None:
                    self.idle.append(connection)
                if not isinstance(error, ValueError) or by_handler(error):
                    raise
                continue  # another thread has popped it
            if connection is not None:
                return connection, owner
            native.refuse_greenlet("another is still connecting")
            if not self._changed.wait(wake, deadline - now()):
                raise NoReply("no connection came up")

    def _free(self) -> Connection | None:
        """An idle one on which this thread may wait."""
        for connection in reversed(self.idle):
            if not self._barred(connection):
                return connection
        return None

    def _shared(self) -> Connection:
        """A share in the next one; of those on which this thread may wait, if there is one."""
        for _ in self.connections:
            self._turn += 1
            connection = self.connections[self._turn % len(self.connections)]
            if not self._barred(connection):
                break
        return connection

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
                self.ear, self.away = None, 0  # or the two of them would keep each other, and the socket
            removed(self.idle, connection)

    def owe(self, undo: Undo) -> None:
        """Keep it for the next connection, and none of those that are gone."""
        with self._mutex:  # nobody takes it in between
            undo.link = undo.said = None
            if undo not in self.debts:  # who is struck in here owes it once more
                self.debts.append(undo)

    def undo(self, undo: Undo) -> None:
        """Have something said that nobody waits for; over the next connection, when there is none."""
        connection = undo.link
        if connection is None or connection.dead is not None:
            if connection is not None:
                undo.outlived(connection.session)
            with self._mutex:
                connection = self.connections[0] if self.connections else None
        if connection is not None:
            connection.post(undo)
            return
        self.owe(undo)
        self.last_words()

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
            except Exception as error:  # a provider's, or a greenlet's that would have to wait: what is owed stays so
                if by_handler(error):
                    raise

    def _pay(self, connection: Connection) -> None:
        """Have said what is owed by now, each by one thread only."""
        for _ in range(len(self.debts)):
            undo: Any = None
            try:
                with self._mutex:
                    (undo,) = map(self.debts.pop, (0,) if self.debts else ())
                connection.post(undo)
            except BaseException as error:
                if undo is not None:  # struck: it may be said twice, which does no harm
                    self.owe(undo)
                if undo is not None or not isinstance(error, ValueError) or by_handler(error):
                    raise
                return  # another thread has said the rest
            if connection.dead is not None:
                return

    def close(self) -> None:
        """End all connections, after what is in flight was answered (a second at most), and say what is owed (another
        one, or two, where the server does not answer); who waits gets ClientClosedError."""
        check()
        try:
            self.say_debts()
        finally:
            try:
                self._end()
            finally:
                self._ended = True
            self.last_words()

    def last_words(self) -> None:
        """What is owed by a client that is closed, whoever owes it says: nobody will use another connection of it."""
        while self.debts and self._ended and self._met:
            owed, connection = list(self.debts), None
            try:
                connection = Connection(self, replace(self.settings, connect_timeout=PARTING))
                connection.last = True
                self._pay(connection)
                connection.settle(now() + PARTING)
            except Exception as error:  # also a provider's
                if by_handler(error):
                    raise
            finally:
                if connection is not None:
                    connection.fail(errors.ClientClosedError("this client was closed"))
            with self._mutex:
                left = [undo for undo in owed if removed(self.debts, undo)]
            session.warn_of_debts(self, left)

    def _end(self) -> None:
        with self._mutex:
            try:
                self._closing.release()
            except RuntimeError as error:  # it was closed before, or by one who was interrupted in it
                if by_handler(error):
                    raise
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
        self.gates.part()

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
    """The interpreter ends: clients that live until then say what they owe, as long as there is Python; and what nobody
    uses is closed here, as it is collected in no order, and a socket may come before whoever would close it."""
    check()
    until = now() + PARTING
    for wire in list(_WIRES):
        if not wire.closed:
            with contextlib.suppress(Exception):  # of whoever knows the password, which must not cost the others theirs
                wire.say_debts()
        for connection in list(wire.connections):
            connection.settle(until)
        for connection in list(wire.idle):
            if removed(wire.idle, connection):
                connection.fail(EOFError("the process ends"))


at_fork(_forget_parent)
atexit.register(_at_exit)
