"""How a thread waits in a local queue: parked, or as the one that reads what the server pushes.

Compiled from this same text where there is a compiler: between a grant message and the enter that follows it no Python
is run, as the interpreter's code is out of the caches then, and would mostly wait for memory. Never here: who is next.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import TIMEOUT_MAX
from time import sleep
from typing import TYPE_CHECKING, Any

from fastlock._errors import ClientClosedError
from fastlock._implementation import default
from fastlock._native import allocate_lock
from fastlock._protocol.belief import Confirmation
from fastlock._protocol.commands import CONFIRM, enter, hand_over
from fastlock._protocol.lease import Lease
from fastlock._protocol.local_queue import RECHECK_SECONDS, LocalQueue
from fastlock._protocol.moments import LEAST_MOMENT
from fastlock._protocol.steps import ConnectionLost
from fastlock._protocol.waiters import Waiter
from fastlock._stream_errors import Broken, NoReply, UnsolicitedData, by_handler
from fastlock._transport.base import Transport
from fastlock._transport.parker import Parker, check_signals, clock
from fastlock._transport.posted import PostedConfirmation, PostedRelease
from fastlock._transport.writing import REMOVE, STREAM_ERRORS

if TYPE_CHECKING:
    from _thread import LockType

    from fastlock import _socket_stream, _stream
    from fastlock._protocol.commands import TemplateParts
    from fastlock._transport.sync_connection import Connection

_STREAM = default.SocketStream
# To poll the socket before sleeping, while a single thread waits: about what a sleep may cost. Typed, where compiled
_SPIN_SECONDS: float = 100e-6
_YOUNG_SECONDS: float = LEAST_MOMENT / 4
_TURN_SECONDS: float = 0.0001  # for which threads take and keep leases, and do nothing else
_PAUSE_SECONDS: float = 0.00005  # in which another thread gets the interpreter
_MOST_PAUSES = 3
_MOST_TEMPLATES = 1000  # that a client keeps; then it forgets them all


def take_turn(transport: Transport) -> float:
    """Begin an acquire or a release of a name that may be kept: a recall that has come is heard first. The thread that
    hears it would else get the interpreter when others sleep, or after Python's switch interval, and until then the
    lease would be kept, and taken, again. Returns the time."""
    time = clock()
    if time >= transport.turn_end:
        for _ in range(_MOST_PAUSES):
            connection = transport.keep_connection
            if connection is None or not connection.stream.reader_waits():
                break
            sleep(_PAUSE_SECONDS)
        time = clock()
        transport.turn_end = time + _TURN_SECONDS
    return time


def wait(transport: Transport, waiter: Waiter, until: float) -> None:
    """Sleep until the waiter is woken, or it is time for it to recheck, or `until` has come. Raises ClientClosedError.

    The first waiter of a queue reads what the server pushes, if no other thread does; all others are parked. Before it
    does so, the first waiter takes the answer to a release of the name that nobody has waited for, which comes over
    another connection. The waiter's join may have overtaken such a release: the release then grants the name to the
    queue's entry (`ahead` in the model, tests/support/round_trips.py).
    """
    pending: Any = None
    wake: Any = None
    connection: Any = None
    queue: Any = waiter.queue
    at = min(clock() + RECHECK_SECONDS, until)
    with transport.queues.mutex:
        if waiter.woken and not transport.closed:
            waiter.woken = False
            return
        connection = transport.push_connection
        if connection is not None and connection.error is None and queue.reads(waiter):
            pending, wake = connection.impl.PendingReply(), allocate_lock()
            wake.acquire()
            pending.wake = wake
            waiter.on_wake = pending.set_result
        else:
            parker = transport.parking.parker()
            waiter.on_wake = parker
        at = min(at, queue.recheck_time(waiter))
    try:
        if transport.closed:
            raise ClientClosedError("this client was closed")
        if pending is not None:
            if transport.unconfirmed and waiter.key in transport.unconfirmed:
                transport_of_threads: Any = transport
                transport_of_threads.read_unconfirmed(waiter.key)
            listen(connection, pending, wake, at)
        else:
            parker.park(at)
    finally:
        waiter.on_wake, waiter.woken = None, False
    if transport.closed:
        raise ClientClosedError("this client was closed")


def park(transport: Transport, waiter: Waiter, parker: Parker, until: float) -> None:
    """The first sleep of a waiter that is not the first of its queue, by the parker with which it was enqueued."""
    try:
        if not waiter.woken and not transport.closed:
            parker.park(min(clock() + RECHECK_SECONDS, until))
    finally:
        waiter.on_wake, waiter.woken = None, False
    if transport.closed:
        raise ClientClosedError("this client was closed")


def listen(connection: Connection, pending: _stream.PendingReply, wake: LockType, at: float) -> None:
    """Sleep until the pending reply is resolved, or until `at`; meanwhile read for all, if no other thread reads."""
    stream = connection.stream
    try:
        stream.listen(pending)
        leads = stream.lead(pending, wake)
        check_signals()  # nothing else would run the handler of a signal that came before this thread sleeps
        if not leads and not pending.ready:
            wake.acquire(timeout=max(0.0, at - clock()))
        if stream.leads(pending):
            stream.exchange(pending, max(0.0, at - clock()), 0.0)
    except STREAM_ERRORS as error:
        connection.fail(error)
    finally:
        pending.cancelled = True  # first: no other thread must make this one the reader any more
        try:
            stream.unlisten(pending)
            stream.resign(pending)
        except BaseException:  # interrupted in it: no other thread could resign for this pending reply
            stream.unlisten(pending)
            stream.resign(pending)
            raise


def push_connection_of(transport: Transport) -> Any:
    """The push connection, if it is there and an enter may be sent over it at once."""
    connection = transport.push_connection
    if connection is None or connection.error is not None or not connection.subscribed:
        return None
    if transport.pending_undos or transport.closed:
        return None
    if not transport.push_connection_lent:
        lend(transport, connection)
    return connection if transport.push_connection_lent else None


def lend(transport: Transport, connection: Connection) -> None:
    """Take the push connection out of the idle ones, if it is one: somebody is going to wait."""
    with transport._mutex:
        try:  # no signal handler runs between the two
            (_,), transport.push_connection_lent = map(REMOVE, (transport.idle,), (connection,)), 1
        except ValueError as gone:  # a caller has it, or it is lent already
            if by_handler(gone):
                raise


def idle_connections(transport: Transport) -> list[Any]:
    """The idle connections. If there are none, the push connection is one again, unless somebody waits."""
    if not transport.idle and transport.push_connection_lent:
        take_back(transport)
    return transport.idle


def take_back(transport: Transport) -> bool:
    """Put the push connection back among the idle ones, unless somebody waits for a name. Returns whether it was."""
    with transport._mutex:
        connection = transport.push_connection
        if connection is None or connection.error is not None or transport.closed:
            return False
        if not transport.push_connection_lent or transport.queued_keys or transport.queues.by_entry:
            return False
        transport.push_connection_lent = 0
        transport.idle.append(connection)
        return True


def send_enter(
    transport: Transport, connection: Connection, queue: LocalQueue, waiter: Waiter, joins: bool, timeout: float
) -> Any:
    """Join by a queue's entry, or look, over the push connection, and wait for the reply. Returns the reply, or BUSY.
    Errors as of `SocketStream.round_trip`."""
    template = _cached(transport, queue.key, connection, enter, (queue.address, waiter.fenced, joins))
    queue.connection = connection
    spin = 0.0 if queue.was_queued else spin_seconds(transport)  # as in `send_hand_over`
    timeout = min(connection.reply_timeout, timeout)
    reply = round_trip(connection.stream, template, b"", queue.entry, waiter.ms, timeout, spin)
    if reply is connection.busy and not connection.stream.in_use_by_caller(_holds_mutex(transport)):
        reply = share(connection, _put, (connection.stream, template, queue.entry, waiter.ms), timeout, 0.0)
    if type(reply) is ConnectionLost:  # another thread has found that
        raise Broken("the connection broke before the reply came")
    return reply


def share(
    connection: Connection, write: Callable[..., object], arguments: tuple[Any, ...], timeout: float, spin: float
) -> Any:
    """Send what `write` writes for a pending reply, and wait for that among other threads: as the leader, which reads,
    or asleep until the reply or leadership comes. Returns the reply, which is a ConnectionLost where another thread
    found the connection broken. UnsolicitedData: nothing was sent. Other errors as of `SocketStream.round_trip`."""
    stream = connection.stream
    if connection.error is not None or not stream.usable():
        raise UnsolicitedData("the connection is of no use any more")
    end = clock() + timeout
    pending, wake = connection.impl.PendingReply(), allocate_lock()
    wake.acquire()
    try:
        write(pending, *arguments)
        if not stream.lead(pending, wake):
            stream.flush(timeout)
            if not pending.ready:  # checked after `wake` was set: a reply from now on releases it
                wake.acquire(timeout=min(timeout, TIMEOUT_MAX))
        if stream.leads(pending):
            stream.exchange(pending, max(0.0, end - clock()), spin)
    finally:
        pending.cancelled = not pending.ready  # first: no thread may make this one the leader any more
        try:
            stream.resign(pending)
        except BaseException:  # interrupted in it: no other thread could resign for this pending reply
            stream.resign(pending)
            raise
    if pending.ready:
        return pending.reply
    raise NoReply(f"no reply within {timeout} s")


def _put(pending: Any, stream: Any, template: Any, token: bytes, ms: int) -> None:
    stream.put(template, pending, b"", token, ms)


def _holds_mutex(transport: Transport) -> bool:
    """Whether this thread holds the mutex of the local queues, as one does that a signal handler has interrupted."""
    mutex: Any = transport.queues.mutex
    return bool(mutex.mine())


def send_hand_over(transport: Transport, connection: Connection, key: bytes, token: bytes) -> Any:
    """Send a release to the first waiter in the server's queue, and wait for the reply. Errors as of
    `SocketStream.round_trip`. It does not poll for the reply: the server and the waiter that it tells need a
    processor."""
    template = _cached(transport, key, connection, hand_over, ())
    reply = round_trip(connection.stream, template, b"", token, 0, connection.reply_timeout, 0.0)
    if type(reply) is ConnectionLost:  # as in `send_enter`
        raise Broken("the connection broke before the reply came")
    return reply


def post_release(transport: Transport, connection: Connection, lease: Lease, on_lost: Any) -> bool:
    """Send a release that nobody waits for. False: it was not sent, as the connection is broken."""
    posted = PostedRelease(transport, connection, lease, on_lost, lease._lost_end)
    template = _cached(transport, lease._key, connection, hand_over, ())
    with connection.mutex:  # or who fails the connection would not find it
        if connection.error is not None:
            return False
        transport.unconfirmed[lease._key] = posted
        try:
            connection.stream.put(template, posted, b"", lease._raw_token, 0)
        except BaseException:  # a signal handler's: the release is carried out otherwise
            transport.unconfirmed.pop(lease._key, None)
            raise
    _flush(connection)
    return True


def post_confirmation(
    transport: Transport, connection: Connection, queue: LocalQueue, confirmation: Confirmation
) -> None:
    """Send the look that confirms a believed grant, for whose reply nobody waits."""
    template = _cached(transport, queue.key, connection, enter, (confirmation.address, False, CONFIRM))
    posted = PostedConfirmation(connection, confirmation)
    with connection.mutex:
        alive = connection.error is None
        if alive:
            confirmation.carrier, confirmation.sent = connection, clock()
            connection.stream.put(template, posted, b"", confirmation.lease._raw_token, confirmation.ms)
    if alive:
        _flush(connection)
    else:
        transport.undo(confirmation.undo())


def _flush(connection: Connection) -> None:
    try:
        connection.stream.flush(connection.reply_timeout)  # which waits only where the server takes no more bytes
    except STREAM_ERRORS as error:
        connection.fail(error)


def read_confirmation(transport: Transport, lease: Lease) -> None:
    """Take the confirmation of a grant that is believed, if it has come and the moment is not young: until then the
    lease may be handed over without, but not for the last time as long as others may wait."""
    confirmation = lease._confirmation
    if confirmation is None:
        return
    if clock() - lease._since < _YOUNG_SECONDS and confirmation.queue.handovers_left > 1:
        return
    connection = confirmation.carrier
    if connection is None:
        confirmation.read()
    elif connection.error is None and not connection.stream.in_use_by_caller(_holds_mutex(transport)):
        read_now(connection)


def read_now(connection: Connection) -> bool:
    """Take the replies that have come by now, if no thread reads here. Returns whether that was so."""
    pending, wake, stream = connection.impl.PendingReply(), allocate_lock(), connection.stream
    leads = False
    wake.acquire()
    try:
        leads = stream.lead(pending, wake)
        if leads:
            stream.receive(0.0, 0.0)
    except STREAM_ERRORS as error:
        connection.fail(error)
    finally:  # not by a call: a signal handler may raise as that begins
        pending.cancelled = True
        try:
            stream.resign(pending)
        except BaseException:  # interrupted in it: no other thread could resign for this pending reply
            stream.resign(pending)
            raise
    return leads


def send_command(
    stream: _socket_stream.SocketStream, opcode: int, name: bytes, token: bytes, ms: int, timeout: float, spin: float
) -> Any:
    """Send a command of the stream's command table, and wait for the reply. Errors as of `SocketStream.round_trip`."""
    if type(stream) is _STREAM:
        compiled = stream
        return compiled.round_trip(compiled.templates[opcode], name, token, ms, timeout, spin)
    return stream.round_trip(stream.templates[opcode], name, token, ms, timeout, spin)


def round_trip(
    stream: _socket_stream.SocketStream,
    template: _stream.Template,
    name: bytes,
    token: bytes,
    ms: int,
    timeout: float,
    spin: float,
) -> Any:
    """As `SocketStream.round_trip`, without a call through Python where this and the stream are compiled."""
    if type(stream) is _STREAM:
        compiled = stream
        return compiled.round_trip(template, name, token, ms, timeout, spin)
    return stream.round_trip(template, name, token, ms, timeout, spin)


def _cached(
    transport: Transport,
    key: bytes,
    connection: Connection,
    command: Callable[..., TemplateParts],
    more: tuple[Any, ...],
) -> Any:
    """The template of a command for a name, kept for the next time: to encode it takes longer than to send it."""
    templates = transport.queues.templates
    template = templates.get((command, key, more))
    if template is None:
        if len(templates) >= _MOST_TEMPLATES:
            templates.clear()
        templates[command, key, more] = template = connection.impl.Template(*command(key, *more))
    return template


def spin_seconds(transport: Transport) -> float:
    """How long to poll for a reply before sleeping: not while other threads wait for theirs, nor where the server is
    far."""
    if transport.queues.far():
        return 0.0
    busy = len(transport.connections) - len(transport.idle) - transport.push_connection_lent
    return _SPIN_SECONDS if busy <= 1 else 0.0
