"""The transport for threads: a small set of connections to one server, shared by the threads of a process.

A caller gets an idle connection, or a new one, for itself; when all are busy it shares one of them
(`sync_connection.py`). Threads in the background renew leases (`renewing.py`) and hear recalls (`keeping.py`), and
nothing else. Never here: decisions about locks, the content of frames.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any, TypeVar

from fastlock import _errors as errors
from fastlock import _native as native
from fastlock._fork import at_fork, check
from fastlock._protocol import handshake
from fastlock._protocol.lease import Lease, now
from fastlock._protocol.local_queue import LocalQueues
from fastlock._protocol.losses import warn_of_loop
from fastlock._protocol.renewal import Renewal, Renewals
from fastlock._protocol.stats import Stats
from fastlock._protocol.steps import (
    Answer,
    ConnectionLost,
    Driver,
    Enter,
    GetSession,
    Operation,
    Performed,
    RawCommands,
    Request,
    Sleep,
    Steps,
    Wait,
)
from fastlock._protocol.undo import SETTLE_TRIES, UnconfirmedRelease, Undo
from fastlock._protocol.waiters import Waiter
from fastlock._stream_errors import Broken, NoReply, UnsolicitedData, by_handler
from fastlock._transport import waiting
from fastlock._transport.closing import TRANSPORTS, SyncClosing, end_all
from fastlock._transport.keeping import KeepThread, SyncKeeping, end_with_child
from fastlock._transport.owners import ThreadOwner
from fastlock._transport.parker import Parking
from fastlock._transport.posted import PostedRelease
from fastlock._transport.renewing import RenewalThread, SyncLost, call_on_lost, call_safely, never
from fastlock._transport.settings import Settings
from fastlock._transport.sync_connection import Connection
from fastlock._transport.undo_delivery import UndoDelivery
from fastlock._transport.writing import CLOSE_SECONDS, CONNECT_ERRORS, INSERT, POP, REMOVE, removed

T = TypeVar("T")
UNSENT_PAUSE = 0.0002  # seconds in which another thread gets to send what it is about to send
_WITHIN = (
    "this thread waits for a reply on the only connection that could be used, and would wait for itself: a lock that is"
    " used in a handler of signals needs max_connections of 2 or more, and to be free"
)


class _Within(Exception):
    """The caller would wait for its own thread: see `_WITHIN`."""


class SyncTransport(SyncKeeping, SyncClosing):
    """The connections of one client, and how its threads wait."""

    def __init__(self, settings: Settings, impl: ModuleType) -> None:
        self.settings = settings
        self.endpoint = settings.endpoint
        self.impl = impl
        self.closed = False
        self.warned = False  # whether this client has warned that the server refuses a command
        self.warned_of_loop = False  # whether this client has warned that somebody waits in a coroutine
        self._ended = False  # whether the client was closed and all its connections were ended
        # Whether there ever was a connection: before the first one an error is a wrong setting, not an outage
        self.ever_connected = False
        self._start()
        TRANSPORTS.add(self)

    def _start(self) -> None:
        self.pending_undos: list[UndoDelivery] = []
        self._apart: list[object] = []  # functions of users that are being called in threads of their own
        self.unconfirmed: dict[bytes, UndoDelivery | PostedRelease] = {}
        self.resent: dict[bytes, bytes] = {}
        self.connections: list[Connection] = []
        self.idle: list[Connection] = []
        self._opening: set[tuple[int, object]] = set()  # a mark of each thread that opens a connection now
        self._last_shared = 0  # counts the connections that were shared, in round robin
        self._broken = 0  # broken connections that no new one has replaced yet
        self._mutex = native.RLock()
        self._changed = native.Changes()  # wakes threads that wait for a connection
        self._closing = native.allocate_lock()  # held until the client is closed
        self._closing.acquire()
        self.stats = Stats()
        self.renewals = Renewals(self.stats)
        self._renewal_thread = RenewalThread(self)
        self._keep_thread = KeepThread(self, end_all)
        self._delivering = native.RLock()
        self._delivery_end = 0.0
        self.turn_end, self.keep_connection = 0.0, None
        self._queue_mutex: Any = self.impl.Mutex()
        self.queues = LocalQueues(self._queue_mutex, self.stats)
        self.queues.poll = weakref.WeakMethod(self._read_now)
        self.queues.keeper = weakref.ref(self)
        self.queued_keys = self.queues.by_key  # names with a local queue: somebody waits, or a lease circulates
        self.expected_keys = self.queues.expected
        self.push_connection: Connection | None = None  # on which push messages come
        self.parking = Parking()
        self.push_connection_lent = 0  # 1: the push connection is not in `idle`, as somebody waits

    def begin(self) -> None:
        """Called before anything else is done: in a forked child, forget what was the parent's."""
        check()

    def run(self, op: Operation[T], answer: object = Answer.NOT_ASKED) -> T:
        """Carry out an operation; returns its outcome, raises its errors. answer: from which to go on, as of
        `Operation.steps`."""
        try:
            check()
            if answer is Answer.NOT_ASKED:
                answer = op.begin(self.queues, now())
            elif (self.unconfirmed or self.resent) and self.met_own_release(op.request, answer):
                answer = Answer.ASK_SERVER
            if answer is Answer.ASK_SERVER:
                if self.posted(op):
                    return op.posted()
                answer = self._execute(op.request)
                if (outcome := op.at_once(answer, now())) is not Answer.UNDECIDED:
                    return outcome
            return self.drive(op.steps(self.queues, now, answer))
        except BaseException as error:
            try:
                self.undo_interrupted(op, error)
            except BaseException as again:
                self.undo_interrupted(op, again)
                raise
            raise

    def drive(self, steps: Steps[T]) -> T:
        """Carry out the steps of an operation; returns its outcome, raises its errors."""
        check()
        driver, answer = Driver(steps, self.enqueue, self.undo), None
        try:
            while (step := driver.next(answer)) is not None:
                answer = self._perform(step)
            return driver.outcome
        except BaseException as error:  # also what a signal handler raises between two steps
            driver.fail(error)
            raise
        finally:
            if self.push_connection_lent and not (self.queued_keys or self.queues.by_entry):
                self._back_among_the_idle()

    def _back_among_the_idle(self) -> None:
        """Return the push connection to the idle ones, where nobody waits any more but replies to undos are pending
        there: one may be a refusal, and the next caller of the connection reads it."""
        push_connection = self.push_connection
        if push_connection is not None and push_connection.stream.pending:
            waiting.take_back(self)

    def _perform(self, step: Performed) -> Any:
        """Carry out a step; returns its answer."""
        if isinstance(step, Enter):
            return self._enter(step)
        if isinstance(step, Request):
            return self._execute(step)
        if isinstance(step, Wait):
            return self.wait(step.waiter, step.until)
        if isinstance(step, Sleep):
            if step.held:
                native.refuse_greenlet("the lock is held")
            return self._sleep(step)
        if isinstance(step, GetSession):
            return self.get_session()
        return self.protocol_violation(step)

    def _sleep(self, step: Sleep) -> None:
        """Sleep; what is not allowed after close wakes when the client is closed."""
        seconds = step.seconds
        if step.allowed_after_close:
            time.sleep(min(seconds, threading.TIMEOUT_MAX))
        elif self._closing.acquire(timeout=min(seconds, threading.TIMEOUT_MAX)):
            self._closing.release()  # for the next one

    def wait(self, waiter: Waiter, until: float | None) -> None:
        """Sleep until the waiter is woken, or it is time for it to recheck, or `until` has come."""
        native.refuse_greenlet(f"{waiter.name!r} is held")
        self.warn_in_coroutine(waiter.name)
        waiting.wait(self, waiter, math.inf if until is None else until)

    def warn_in_coroutine(self, name: object) -> None:
        """Warn, once, of a caller that waits in a coroutine."""
        if not self.warned_of_loop and native.in_event_loop():
            self.warned_of_loop = True
            warn_of_loop(name)

    def _listening(self, until: float | None) -> Connection:
        """The push connection, a new one where there is none that this thread may use. It is not among the idle ones
        from now on: while somebody waits, no caller has it for itself."""
        push_connection = self.push_connection
        if (
            push_connection is None
            or push_connection.error is not None
            or (self._would_deadlock(push_connection) and not self.push_connection_lent)
        ):
            fresh, owner = self._get_connection(until)
            try:
                with self._mutex:
                    push_connection = self.push_connection
                    if (
                        push_connection is None
                        or push_connection.error is not None
                        or (self._would_deadlock(push_connection) and not self.push_connection_lent)
                    ):
                        self.push_connection = push_connection = fresh
                        self.push_connection_lent, owner = int(owner), False
            finally:
                if owner:  # another thread has set a push connection meanwhile
                    self.idle.append(fresh)
        waiting.lend(self, push_connection)
        return push_connection

    def _read_now(self) -> None:
        """Take the replies that have come by now, where no other thread reads them."""
        for connection in list(self.connections):
            if connection.error is None and connection.stream.pending and not self._would_deadlock(connection):
                waiting.read_now(connection)

    def _would_deadlock(self, connection: Connection) -> bool:
        """Whether this thread would wait for itself on the connection, as a signal handler may: see
        `SocketStream.in_use_by_caller`."""
        return bool(connection.stream.in_use_by_caller(self._queue_mutex.mine()))

    def _enter(self, request: Enter) -> Any:
        """Join or look as the fast path does, where no other thread uses the push connection; else like any other
        request."""
        if self.queues.kept:
            self.release_kept_for(request.acquires())
        connection = waiting.push_connection_of(self)
        if connection is not None and not request.stale:
            request.sent, request.connection = now(), connection
            joins = request.joins and not request.maybe_executed
            timeout = math.inf if request.until is None else max(0.0, request.until - request.sent)
            try:
                reply = waiting.send_enter(self, connection, request.queue, request.waiter, joins, timeout)
            except BaseException as error:
                answer = connection.classify_error(request, error)
            else:
                answer = Answer.RETRY_ELSEWHERE if reply is connection.busy else [reply]
            if answer is not Answer.RETRY_ELSEWHERE:
                return answer
        return self._execute(request)

    def _execute(self, request: Request) -> Any:
        if self.closed and request.allowed_after_close:
            return self._execute_after_close(request)
        meetings = 0
        while (answer := self._execute_once(request)) is Answer.RETRY_ELSEWHERE or (
            (self.unconfirmed or self.resent) and self.met_own_release(request, answer)
        ):  # ends: such a connection is thrown away, and a new one has nothing unsolicited on it
            meetings += answer is not Answer.RETRY_ELSEWHERE
            if meetings > SETTLE_TRIES:  # who is to send the release was interrupted, by the signal handler that asks
                break
        return answer

    def _execute_once(self, request: Request) -> Any:
        connection: Any = None
        owner = False
        try:  # from here on, as a signal handler may run between getting a connection and using it
            try:
                if self.queues.kept:
                    self.release_kept_for(request.acquires())
                if self.unconfirmed and request.settles:
                    self._settle(request)
                if request.needs_push:
                    connection = self._listening(request.until)
                elif self.unconfirmed and (connection := self._behind(request)) is not None:
                    owner = removed(self.idle, connection)
                else:
                    try:
                        (connection,), owner = map(POP, (self.idle,)), True  # the last used, whose memory is warm
                    except IndexError as none:
                        if by_handler(none):
                            raise
                        connection, owner = self._get_connection(request.until, request.strict)
                    else:
                        if self._would_deadlock(connection):  # somebody listens for push messages there as well
                            (_,), owner = map(INSERT, (self.idle,), (0,), (connection,)), False
                            connection, owner = self._get_connection(request.until, request.strict)
                if not owner and self._would_deadlock(connection):
                    raise _Within
            except CONNECT_ERRORS as error:
                return self.not_sent(error)
            except _Within:
                return ConnectionLost(RuntimeError(_WITHIN), 0.0, sent=False, final=True)
            if self.pending_undos:
                self.flush_undos_over(connection)
            return connection.execute(request, waiting.spin_seconds(self))
        finally:
            if owner and connection.error is None:
                self.idle.append(connection)

    def _behind(self, request: Request) -> Connection | None:
        """The connection over which the release goes that the request must not overtake, as nobody has waited for
        that; None: there is none on which this thread may wait."""
        found = [each for each in self._carriers(request) if not self._would_deadlock(each)]
        return found[0] if found else None

    def _settle(self, request: Request) -> None:
        """Wait until the releases are answered that the request must not overtake, whatever has to be sent again: of
        several names they go over several connections."""
        for tried in range(SETTLE_TRIES):
            if tried and request.until is not None and now() >= request.until:
                return
            if self.pending_undos:
                self.flush_pending_undos(request.until, request.strict)
            carriers = [each for each in self._carriers(request) if not self._would_deadlock(each)]
            if not carriers:
                if not self._unsent(request):
                    return
                time.sleep(UNSENT_PAUSE)
            for each in carriers:
                last = RawCommands([(b"PING",)])
                last.until = request.until
                each.execute(last, 0.0)

    def _unsent(self, request: Request) -> bool:
        """Whether another thread is about to send a release that the request must not overtake."""
        unconfirmed = [self.unconfirmed.get(key) for key in request.acquires()]
        return any(each is not None and each.carrier is None for each in unconfirmed)

    def _carriers(self, request: Request) -> list[Connection]:
        """The connections over which the releases go that the request must not overtake."""
        unconfirmed = [delivery for key in request.acquires() if (delivery := self.unconfirmed.get(key)) is not None]
        carriers = [each.carrier for each in unconfirmed if isinstance(each.carrier, Connection)]
        return list(dict.fromkeys(each for each in carriers if each.error is None))

    def read_unconfirmed(self, key: bytes) -> None:
        """Take the answer to a release of this name that nobody has waited for, if it has come: a waiter reads another
        connection. One that does not come within `reply_timeout` ends its connection."""
        delivery = self.unconfirmed.get(key)
        carrier = None if delivery is None else delivery.carrier
        if delivery is None or not isinstance(carrier, Connection) or self._would_deadlock(carrier):
            return
        time = now()
        delivery.awaited = since = delivery.awaited or time
        has_read = waiting.read_now(carrier)
        if has_read and self.unconfirmed.get(key) is delivery and time >= since + carrier.reply_timeout:
            carrier.fail(NoReply(f"no reply within {carrier.reply_timeout} s"))

    def post_unconfirmed(self, unconfirmed: UnconfirmedRelease) -> bool:
        end_with_child(end_all)
        connection: Any = None
        owner = False
        try:
            try:
                (connection,), owner = map(POP, (self.idle,)), True  # the next acquire pops it as well
            except IndexError as none:
                if by_handler(none):
                    raise
                with self._mutex:
                    connection = self._share_connection() if self.connections else None
            if connection is None or self._would_deadlock(connection):
                return False
            if not connection.stream.usable():  # what is sent over it is not executed, and nobody would tell of a loss
                connection.fail(UnsolicitedData("the server closed the connection"))
                return False
            if connection.stream.pending:  # of earlier releases: they are told, and sent again, no later than this one
                waiting.read_now(connection)
            if self.pending_undos:
                self.flush_undos_over(connection)
            return self.post_over(connection, unconfirmed)
        finally:
            if owner and connection.error is None:
                self.idle.append(connection)

    def call_apart(self, on_lost: Callable[[Lease], object], lease: Lease) -> None:
        self._apart.append(on_lost)
        try:
            native.start_new_thread(self._run_apart, (on_lost, lease))  # this thread reads for others
        except RuntimeError:  # the interpreter ends, and starts no more threads
            self._run_apart(on_lost, lease)

    def _run_apart(self, on_lost: Callable[[Lease], object], lease: Lease) -> None:
        try:
            call_safely(on_lost, lease)
        finally:
            removed(self._apart, on_lost)
            self._changed.tell()

    def _await_apart(self) -> None:
        """Wait until what `call_apart` calls has returned, for CLOSE_SECONDS at most."""
        until = now() + CLOSE_SECONDS
        while self._apart and now() < until:
            wake = self._changed.expect()
            self._changed.wait(wake, until - now() if self._apart else 0.0)

    def _execute_after_close(self, request: Request) -> Any:
        """Send a request of a closed client, over a connection that is opened for it alone."""
        try:
            connection = Connection(self, self.settings)
        except CONNECT_ERRORS as error:
            return self.not_sent(error)
        try:
            return connection.execute(request, 0.0)
        finally:
            connection.fail(errors.ClientClosedError("this client was closed"))

    def get_session(self) -> Any:
        """A session with the server (over whichever connection), or `ConnectionLost`."""
        connection: Any = None
        owner = False
        try:
            connection, owner = self._get_connection()
            return connection.session
        except CONNECT_ERRORS as error:
            return self.not_sent(error)
        except _Within:
            return ConnectionLost(RuntimeError(_WITHIN), 0.0, sent=False, final=True)
        finally:
            if owner:
                self.idle.append(connection)

    def _get_connection(self, until: float | None = None, strict: bool = False) -> tuple[Connection, bool]:
        """(connection, whether this caller has it for itself): an idle one, a new one, or a share in a busy one.
        until: the caller's deadline; unless that is `strict`, a new connection gets CLOSE_SECONDS to come up."""
        timeout = self.settings.connect_timeout
        if until is not None:
            timeout = min(timeout, max(0.001 if strict else CLOSE_SECONDS, until - now()))
        mark = threading.get_ident(), object()
        try:
            connection, owner = self._find_connection(mark, now() + timeout)
            return (self._open_connection(mark, timeout), True) if connection is None else (connection, owner)
        finally:
            if mark in self._opening:
                self._opening.discard(mark)
                self._changed.tell()

    def _find_connection(self, mark: tuple[int, object], deadline: float) -> tuple[Connection | None, bool]:
        """As `_get_connection`; None: the caller is to open a connection, for which `mark` stands in `_opening`."""
        connection, owner = None, False
        while True:
            try:
                with self._mutex:
                    if self.closed:
                        raise errors.ClientClosedError("this client is closed")
                    connection = self._free_idle()
                    if connection is not None:
                        (_,), owner = map(REMOVE, (self.idle,), (connection,)), True
                    elif waiting.take_back(self):
                        continue
                    elif len(self.connections) + len(self._opening) < self.settings.max_connections:
                        self._opening.add(mark)
                        return None, True
                    elif self.connections:
                        connection = self._share_connection()
                    elif self._opening and all(thread == mark[0] for thread, _ in self._opening):
                        raise _Within  # a signal handler, while its own thread opens the only connection
                    else:
                        wake = self._changed.expect()
            except BaseException as error:
                if owner and connection is not None:
                    self.idle.append(connection)
                if not isinstance(error, ValueError) or by_handler(error):
                    raise
                continue  # another thread has popped the idle connection
            if connection is not None:
                return connection, owner
            native.refuse_greenlet("another is still connecting")
            if not self._changed.wait(wake, deadline - now()):
                raise NoReply("no connection came up")

    def _free_idle(self) -> Connection | None:
        """The last used idle connection on which this thread may wait, or None."""
        for connection in reversed(self.idle):
            if not self._would_deadlock(connection):
                return connection
        return None

    def _share_connection(self) -> Connection:
        """The next connection in turn, to be shared; one on which this thread may wait, if there is any."""
        for _ in self.connections:
            self._last_shared += 1
            connection = self.connections[self._last_shared % len(self.connections)]
            if not self._would_deadlock(connection):
                break
        return connection

    def _open_connection(self, mark: tuple[int, object], timeout: float) -> Connection:
        connection = Connection(self, replace(self.settings, connect_timeout=timeout))
        try:
            with self._mutex:
                self.connections.append(connection)
                self._opening.discard(mark)
                first, self.ever_connected = not self.ever_connected, True
                if self._broken:
                    self._broken -= 1
                    self.stats.reconnects += 1
            self._changed.tell()
            if self.closed:
                connection.fail(errors.ClientClosedError("this client is closed"))
            if first:
                handshake.warn_of_eviction(connection.session, self.settings.endpoint)
        except BaseException:  # interrupted: no caller has the connection
            connection.fail(Broken("interrupted"))
            raise
        return connection

    def discard(self, connection: Connection) -> None:
        """Forget a connection that broke. A thread that popped it from the idle ones before throws it away itself."""
        with self._mutex:
            if connection in self.connections:
                self.connections.remove(connection)
                self._broken += 1
            if connection is self.push_connection:
                # Else the transport and the connection would keep each other alive, and the socket open
                self.push_connection, self.push_connection_lent = None, 0
            removed(self.idle, connection)

    def defer(self, delivery: UndoDelivery) -> None:
        """Keep an undo for the next connection; it is tied to none that is gone."""
        with self._mutex:  # no other thread sends it in between
            delivery.carrier = delivery.reply = None
            if delivery not in self.pending_undos:  # a caller that was interrupted in here defers it again
                self.pending_undos.append(delivery)

    def undo(self, undo: Undo) -> None:
        """Send an undo, for whose reply nobody waits; where there is no connection, it is sent over the next one."""
        connection = undo.connection
        delivery = UndoDelivery(undo)
        if isinstance(connection, Connection) and connection.error is None:
            self._post(connection, delivery)
            return
        if connection is not None:
            delivery.outlived_by(connection.session)
        self.deliver(delivery)

    def deliver(self, delivery: UndoDelivery) -> None:
        with self._mutex:
            connections = [*reversed(self.idle), *self.connections]
            free = next((each for each in connections if not self._would_deadlock(each)), None)
        if free is not None:
            self._post(free, delivery)
            return
        self.defer(delivery)
        if connections:  # a signal handler has interrupted this thread in sending
            self.flush_pending_undos()
        self.flush_after_close()

    def _post(self, connection: Connection, delivery: UndoDelivery) -> None:
        """Send an undo over a connection, which no signal handler takes for idle meanwhile."""
        # The caller is a handler, and who has the connection's mutex may wait for what it has interrupted
        if connection.stream.half_changed() or self._mutex._is_owned():
            self.defer(delivery)
            return
        taken = False
        try:
            if connection.error is None and not connection.stream.usable():
                # It would be written, and nobody would know
                delivery.outlived_by(connection.session)
                connection.fail(UnsolicitedData("the server closed the connection"))
                self.deliver(delivery)
                return
            try:
                (_,), taken = map(REMOVE, (self.idle,), (connection,)), True
            except ValueError as none:  # it is busy
                if by_handler(none):
                    raise
            connection.post(delivery)
        except BaseException:  # interrupted: the undo may be sent twice, which does no harm
            self.defer(delivery)
            raise
        finally:
            if taken and connection.error is None:
                self.idle.append(connection)

    def flush_pending_undos(self, until: float | None = None, strict: bool = True) -> None:
        """Send the pending undos now, if the server can be reached: a caller that was interrupted may never use this
        client again. until, strict: as of `_get_connection`; without `until` a new one gets CLOSE_SECONDS."""
        if self.pending_undos and self.ever_connected:
            try:
                connection, owner = self._get_connection(
                    now() if until is None else until, strict and until is not None
                )
                try:
                    if not connection.stream.half_changed():  # else they go with the next request
                        self.flush_undos_over(connection)
                finally:
                    if owner and connection.error is None:
                        self.idle.append(connection)
            # From a credential provider, or as a greenlet would have to wait: the undos stay pending
            except Exception as error:
                if by_handler(error):
                    raise

    def flush_undos_over(self, connection: Connection) -> None:
        """Send over a connection the undos that are pending by now, each by one thread only."""
        for _ in range(len(self.pending_undos)):
            delivery: UndoDelivery | None = None
            try:
                with self._mutex:
                    (delivery,) = map(self.pending_undos.pop, (0,))
                connection.post(delivery)
            except BaseException as error:
                if delivery is not None:  # interrupted: the undo may be sent twice, which does no harm
                    self.defer(delivery)
                if delivery is not None or not isinstance(error, IndexError) or by_handler(error):
                    raise
                return  # another thread, or a signal handler, has sent the rest
            if connection.error is not None:
                return

    def renew_due(self) -> None:
        """Renew the leases that are due, for the thread that does so."""
        while due := self.renewals.take_due(now()):
            self.drive(self.renewals.renew(due, self.renewals.attempt_end(now()), now))

    def wake_renewal(self, time: float) -> None:
        self._renewal_thread.ensure(time)

    def new_event(self, renewal: Renewal) -> SyncLost:
        return SyncLost(renewal)

    def ends_of(self, owner: object) -> Callable[[], bool]:
        return owner.ended if isinstance(owner, ThreadOwner) else never

    def tell_lost(self, renewal: Renewal) -> None:
        call_on_lost(renewal)

    def forget_parent(self) -> None:
        """In a forked child: start without the parent's connections, pending undos and mutexes; nothing is sent on
        the parent's sockets."""
        for connection in self.connections:
            connection.sock.close()
        self._keep_thread.forget_parent()
        self._start()
        if self.closed:
            self._closing.release()


def _forget_parent() -> None:
    for transport in list(TRANSPORTS):
        transport.forget_parent()


at_fork(_forget_parent)
