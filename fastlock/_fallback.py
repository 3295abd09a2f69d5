"""The core in Python: lock commands into one growing buffer, replies in order to whoever waits for them.

The same names, parameters and behaviour as `_core.pyx`, which says what may live here. Used where the compiled core is
not there, or by FASTLOCK_IMPL=python. Methods of `Stream` are atomic towards other threads by a mutex.
"""

from __future__ import annotations

import contextlib
import re
import select
import socket
import ssl
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from hiredis import ProtocolError, PushNotification, Reader

from fastlock._filter import MAX_DROPPED as MAX_DROPPED
from fastlock._filter import MAX_FRAME, MAX_REPLY, ReplyFilter
from fastlock._filter import MAX_ITEMS as MAX_ITEMS
from fastlock._native import RLock, allocate_lock, poll
from fastlock._stream_errors import Broken, NoReply, UnsolicitedData, broken, by_handler

IMPLEMENTATION = "python"
BUILD = "release"
SOURCES = ""
MAX_DEPTH = 8

BUSY = object()  # answer of `Stream.round_trip`: other threads use the stream, nothing was done

_CHUNK = 16384
# Plain numbers: to combine flags of `socket` takes a microsecond each time. 0, as on Windows: sockets never block
_AT_ONCE = int(getattr(socket, "MSG_DONTWAIT", 0))
_PEEK = int(socket.MSG_PEEK) | _AT_ONCE
_READABLE, _WRITABLE = getattr(select, "POLLIN", 1), getattr(select, "POLLOUT", 4)
_SLICE = 0.1  # seconds for which the socket itself waits for bytes; for the rest of a wait it is polled
_LARGE = re.compile(rb"[$=!*%~>|][0-9]{4}")  # a header that may announce more than a reply may have: to be filtered
_LONGEST = 1e6  # seconds: no wait is longer, whatever is asked for
_NOTHING = object()  # what the reader returns while a reply is incomplete: False is a value of RESP3
_AGAIN = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Template:
    """A command with placeholders, encoded once. Parts are bytes (literal arguments) or placeholders: 0 for the name,
    1 for the token, 2 for the milliseconds."""

    __slots__ = ("_format", "_placeholders", "parts")

    def __init__(self, *parts: bytes | int) -> None:
        if not 0 < len(parts) <= 16:
            raise ValueError("a template has 1 to 16 parts")
        self.parts = parts
        text, holes = b"*%d\r\n" % len(parts), []
        for part in parts:
            if isinstance(part, bytes):
                text += b"$%d\r\n%b\r\n" % (len(part), part.replace(b"%", b"%%"))
            elif part in (0, 1, 2):
                text += b"$%d\r\n%b\r\n"
                holes.append(part)
            else:
                raise ValueError(f"a template's part is bytes or 0, 1, 2, not {part!r}")
        if len(holes) > 7:
            raise ValueError("a template has too many holes")
        self._format = text
        self._placeholders = tuple(holes)

    def _encode(self, name: bytes, token: bytes, ms: int) -> bytes:
        values = (name, token, b"%d" % ms)
        filled: list[Any] = []
        for hole in self._placeholders:
            value = values[hole]
            filled += (len(value), value)
        return self._format % tuple(filled)


class Mutex(RLock):  # type: ignore[misc]
    """The mutex of a client's local queues: its own thread may acquire it again."""

    __slots__ = ()

    def mine(self) -> bool:
        """Whether the calling thread holds the mutex."""
        return bool(self._is_owned())


class PendingReply:
    """What a thread waits for: `reply` once `ready`; `wake` is the lock on which the thread sleeps, if it sleeps."""

    __slots__ = ("_thread", "abandoned", "ready", "reply", "wake")

    def __init__(self) -> None:
        self._thread = threading.get_ident()  # the thread that waits for the reply
        self.reply: Any = None
        self.wake: Any = None
        self.ready = self.abandoned = False

    def done(self) -> bool:
        return self.ready

    def set_result(self, reply: Any) -> None:
        self.reply = reply
        self.ready = True
        wake, self.wake = self.wake, None
        if wake is not None:
            try:  # no call before that of `release`: it could be interrupted, and the thread would not be woken
                wake.release()
            except RuntimeError as error:  # woken before: by the leader that passed leadership on
                if by_handler(error):
                    raise


class _Many:
    __slots__ = ("missing", "pending_reply", "replies")

    def __init__(self, pending_reply: Any, count: int) -> None:
        self.pending_reply = pending_reply
        self.replies: list[Any] = []
        self.missing = count


class Stream:
    """One connection's bytes: commands out, replies in, in order, each to its pending reply.

    A pending reply is a `PendingReply`, a future, or anything with `done()` and `set_result(reply)`; None ignores the
    reply. Error replies are results, too (`hiredis.ReplyError`). Push messages go to `on_push`.
    """

    def __init__(self, sock: Any = None) -> None:
        self._reader = Reader(notEnoughData=_NOTHING)
        self._filter = ReplyFilter()
        self._mutex = RLock()
        self._out: list[bytes] = []
        self._pending_replies: deque[Any] = deque()
        self._missing = 0  # replies that have not come, one for each command
        self.commands = self.flushes = 0  # commands queued, and batches of them sent, since the stream was made
        self._partial = 0  # bytes of the reply that is incomplete
        self._sending = self._flushing = False
        self._sender = 0  # the thread that sends, if one does
        self._leader: PendingReply | None = None  # of the thread that reads; `thread` is its number, 0 while it sleeps
        self._sock = sock
        self._tls = isinstance(sock, ssl.SSLSocket)
        self._turn = allocate_lock() if self._tls else contextlib.nullcontext()  # TLS: not send and receive together
        self._at_once = 0 if self._tls else _AT_ONCE  # a TLS socket takes no flags, and never blocks
        if sock is not None and not _AT_ONCE:
            sock.setblocking(False)
        elif sock is not None and not self._tls:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, int(_SLICE * 1e6)))
        self._quiet: Any = None  # a poller that tells whether anything came: to find out by reading costs an exception
        if sock is not None and not self._tls and poll is not None:
            self._quiet = poll()
            self._quiet.register(sock, _READABLE)
        self._usual_delay = self._last_reply_at = 0.0  # seconds that replies take, and when the last one came
        self._probes = 0
        self.on_push: Callable[[Any], object] | None = None  # gets the push messages
        self._pushes: list[Any] = []
        self._listeners: list[PendingReply] = []  # of threads that wait for push messages
        self.broken = False
        self._out_of_step = False  # replies were lost: no thread may read on, the connection must be closed
        self.templates: tuple[Template, ...] = ()  # the command table of its server
        # Of a stream for tasks: its connection, their WakeupQueue, their thread, when the first command of a tick came
        self.connection: Any = None
        self.wakeups: Any = None
        self.thread = 0
        self.sent = 0.0

    # encode

    def put(self, template: Template, pending_reply: Any, name: bytes, token: bytes, ms: int) -> None:
        """Queue one command; its reply goes to `pending_reply`."""
        data = template._encode(_bytes(name), _bytes(token), ms)
        self._queue(data, pending_reply, 1)

    def serve(self, connection: Any, wakeups: Any, thread: int, flush_soon: Callable[[], object]) -> None:
        """Set up the stream for tasks: its connection, their wakeups and thread, and what schedules a flush."""
        self.connection = connection
        self.wakeups = wakeups
        self.thread = thread
        self._flush_soon = flush_soon

    def request(self, template: Template, pending_reply: Any, name: bytes, token: bytes, ms: int) -> None:
        """Queue one command, and schedule a flush; its reply goes to `pending_reply`."""
        self.put(template, pending_reply, name, token, ms)
        if not self._flushing:
            self.announce()

    def tick(self) -> None:
        """Flush what was announced; again, if a signal handler raises as the flush begins."""
        try:
            self.connection.flush()
        except BaseException:
            self.connection.flush()
            raise

    def announce(self) -> None:
        """Schedule a flush of what was queued, by whatever method: once until the next `take_output`."""
        if not self._flushing:
            self._flush_soon()  # first: if a signal handler raises in it, the next call schedules again
            self._flushing = True

    def put_many(
        self, template: Template, pending_reply: Any, names: list[bytes], tokens: list[bytes], ms: int
    ) -> None:
        """Queue one command per name; `pending_reply` gets the list of replies, in order."""
        if not names:
            raise ValueError("no names")
        if len(tokens) != len(names):
            raise ValueError(f"{len(names)} names but {len(tokens)} tokens")
        encode = template._encode
        data = b"".join([encode(_bytes(name), _bytes(token), ms) for name, token in zip(names, tokens, strict=True)])
        self._queue(data, _Many(pending_reply, len(names)), len(names))

    def put_command(self, pending_reply: Any, args: tuple[bytes, ...]) -> None:
        """Queue any command, given as bytes; its reply goes to `pending_reply`."""
        data = _packed(args)
        self._queue(data, pending_reply, 1)

    def put_calls(self, pending_reply: Any, calls: list[tuple[bytes, ...]]) -> None:
        """Queue any commands; `pending_reply` gets the list of replies, in order."""
        if not calls:
            raise ValueError("no calls")
        data = b"".join([_packed(args) for args in calls])
        self._queue(data, _Many(pending_reply, len(calls)), len(calls))

    def _queue(self, data: bytes, pending_reply: Any, replies: int) -> None:
        with self._mutex:
            self._append(data, pending_reply, replies)

    def _append(self, data: bytes, pending_reply: Any, replies: int) -> None:
        try:
            self._pending_replies.append(pending_reply)
            self._missing += replies
            self.commands += replies
            self._out.append(data)
        except BaseException:  # interrupted half-way
            self.broken = True
            raise

    def take_output(self) -> bytes:
        """The bytes to be sent, which the caller is to send: they are not kept here."""
        self._flushing = False
        self.flushes += 1
        with self._mutex:
            data = b"".join(self._out)
            self._out.clear()
        return data

    # order

    @property
    def pending(self) -> int:
        """How many pending replies there are."""
        return len(self._pending_replies)

    @property
    def unsent(self) -> int:
        """Bytes queued and not yet handed to the socket."""
        with self._mutex:
            return sum(map(len, self._out))

    def drain(self, into: list[Any]) -> list[Any]:
        """Move every pending reply into that list, in order, and return it; none is pending afterwards, and bytes that
        were not sent are dropped. A caller that is interrupted in it calls again, and may find some twice."""
        with self._mutex:
            into += [
                pending_reply.pending_reply if type(pending_reply) is _Many else pending_reply
                for pending_reply in self._pending_replies
            ]
            self._pending_replies.clear()
            self._out.clear()
            self._missing = 0
        return into

    def next_reader(self) -> PendingReply | None:
        """The first pending reply whose thread sleeps and could read next, or None."""
        with self._mutex:
            return self._next_reader()

    def _next_reader(self) -> PendingReply | None:
        for pending_reply in self._pending_replies:
            if type(pending_reply) is _Many:
                pending_reply = pending_reply.pending_reply
            if type(pending_reply) is PendingReply and pending_reply.wake is not None and not pending_reply.abandoned:
                return pending_reply
        for pending_reply in self._listeners:
            if pending_reply.wake is not None and not pending_reply.abandoned:
                return pending_reply
        return None

    # replies

    def feed(self, data: Any) -> None:
        """Parse bytes from the server. ProtocolError: they make no sense, the connection must be closed."""
        if self._out_of_step:
            raise ProtocolError("the connection is out of step: bytes were lost, or made no sense")
        try:
            for reply in self._understood(data):
                self._deliver(reply)
            if self._pushes:
                pushes, self._pushes = self._pushes, []
                for push in pushes:
                    if self.on_push is not None:
                        self.on_push(push)
        except BaseException:
            self.broken = self._out_of_step = True
            raise

    def _understood(self, data: Any) -> list[Any]:
        """Parse all of a chunk before any reply is delivered: one reply too many makes those beside it suspect."""
        plain = not self._filter.within() and data[-1:] == b"\n" and _LARGE.search(data) is None
        if not plain:
            data = self._filter.passed(bytes(data))
        self._reader.feed(data)
        self._partial += len(data)
        replies: list[Any] = []
        while (reply := self._next()) is not _NOTHING:
            self._partial = 0
            kind = type(reply)
            if kind is PushNotification and reply[:1] != [b"subscribe"]:  # that is the reply to SUBSCRIBE
                self._pushes.append(reply)
                continue
            if kind is list or kind is dict:
                _check_depth(reply, MAX_DEPTH)
            replies.append(reply)
        if self._partial > MAX_REPLY + MAX_FRAME:
            raise ProtocolError(f"a reply of more than {MAX_REPLY + MAX_FRAME} bytes")
        if plain and self._reader.has_data():
            self._filter.passed(bytes(data))  # the chunk ends within a string: the filter has to know where
        with self._mutex:
            if len(replies) > self._missing:
                raise ProtocolError(f"a reply that nobody asked for, among {replies!r:.80}")
            self._missing -= len(replies)
        return replies

    def _next(self) -> Any:
        try:
            return self._reader.gets()
        except TypeError as error:  # a map whose key is a list or a map
            raise ProtocolError(f"a reply that makes no sense: {error}") from None

    def _deliver(self, reply: Any) -> None:
        with self._mutex:
            if not self._pending_replies:  # drained, as the connection failed meanwhile
                return
            pending_reply = self._pending_replies[0]
            if type(pending_reply) is _Many:
                pending_reply.replies.append(reply)
                pending_reply.missing -= 1
                if pending_reply.missing:
                    return
                reply = pending_reply.replies
        getter = pending_reply.pending_reply if type(pending_reply) is _Many else pending_reply
        if getter is not None and not getter.done():
            getter.set_result(reply)
        with self._mutex:  # only now: if a signal handler raised in `set_result`, `drain` still finds it
            if self._pending_replies and self._pending_replies[0] is pending_reply:
                self._pending_replies.popleft()

    # the socket, for threads

    def usable(self) -> bool:
        """False: the server replied unasked, or closed the connection, while no reply was pending. Push messages are
        delivered."""
        with self._mutex:
            return self._usable()

    def _is_quiet(self) -> bool:
        try:
            return not self._quiet.poll(0)
        except RuntimeError as error:  # the caller is a signal handler that interrupted this very call
            if by_handler(error):
                raise
            return not _wait(self._sock, _READABLE, 0.0)

    def _usable(self) -> bool:
        if self._pending_replies or self._leader or self._tls:
            return True  # under TLS there may be data that is no reply, such as session tickets
        if self._quiet is not None and self._is_quiet():
            return True
        read = False
        try:
            while self._sock.recv(1, _PEEK) and self.on_push is not None:
                self.feed(self._sock.recv(_CHUNK, _AT_ONCE))
                read = True
        except OSError as error:
            if by_handler(error):
                raise
            half = self._partial or self._filter.within()  # half a reply was read: its rest must not be taken for one
            return isinstance(error, _AGAIN) and not (read and half)
        except ProtocolError:
            pass
        return False

    def flush(self, timeout: float) -> None:
        """Send what is queued, also what other threads queue meanwhile; returns at once if another thread is sending.

        NoReply: the socket took nothing for `timeout` seconds. Broken: the connection is broken.
        """
        mine = False
        try:
            with self._mutex:
                if self._sending:
                    return
                mine = True
                data = self._batch()
            while data:
                self._send(data, timeout)
                with self._mutex:  # in one step: a thread that queues after the last check sends by itself
                    data = self._batch()
        except BaseException:
            self.broken = True
            if mine:
                self._sending = False
            raise

    def _batch(self) -> bytes:
        """The bytes to be sent now. Broken: part of a command was lost before them, so replies would shift."""
        if self._out and self.broken:
            raise Broken("the connection is out of step: bytes were lost on their way to the server")
        try:
            self._sender = threading.get_ident()
            self._sending = True  # before anything is taken: a signal handler must send nothing ahead of it
            data = b"".join(self._out)
            self._out.clear()
            self._sending = bool(data)
            self.flushes += self._sending
        except BaseException:  # interrupted: marked before another thread can send
            self.broken = True
            raise
        return data

    def _send(self, data: bytes, timeout: float) -> None:
        while data:
            try:
                with self._turn:
                    sent = self._sock.send(data, self._at_once)
            except OSError as error:
                if by_handler(error):
                    raise
                if not isinstance(error, _AGAIN):
                    raise broken(error) from None
                if not _wait(self._sock, _WRITABLE, timeout):
                    raise NoReply("the server takes no more bytes") from None
            else:
                data = data[sent:]

    def receive(self, timeout: float, spin: float) -> bool:
        """Read once and deliver. False: nothing came within `timeout` seconds.

        Polls the socket for up to `spin` seconds before it sleeps, while recent replies came within that time; half as
        long where the last reply is older than `spin` seconds.
        Broken: the server closed the connection, or it is broken. ProtocolError: as `feed`.
        """
        self._probes += spin > 0
        start = time.monotonic()
        budget = spin if start - self._last_reply_at <= spin else spin / 2  # `Stream._budget` in _core.pyx says why
        spinning = budget and (self._usual_delay <= budget or not self._probes & 63)
        # Each signal would make the socket wait for its whole slice again; signals come to the main thread
        main = threading.get_ident() == threading.main_thread().ident
        waits = self._at_once and not main and timeout >= _SLICE
        data: bytes | None = None
        lost = False  # whether bytes may have been taken that are not in `data`
        try:
            while data is None:
                flags = 0 if waits and not spinning else self._at_once
                try:
                    with self._turn:
                        lost = self._tls  # which is Python's own code: an interrupt may come anywhere in it
                        (data,) = map(self._sock.recv, (_CHUNK,), (flags,))  # no interrupt between taken and kept
                except OSError as error:
                    if by_handler(error):
                        raise
                    if not isinstance(error, _AGAIN):
                        raise broken(error) from None
                    lost = False
                    if spinning:
                        spinning = time.monotonic() - start < budget
                    elif waits:
                        waits = False  # the socket itself has waited for a slice of the timeout
                    elif not _wait(self._sock, _READABLE, timeout - (time.monotonic() - start)):
                        return False
            if spin:
                self._last_reply_at = time.monotonic()
                self._usual_delay += (self._last_reply_at - start - self._usual_delay) / 4
            if data:
                self.feed(data)
        except BaseException:  # interrupted: bytes that were taken from the socket may be lost
            self._out_of_step = self._out_of_step or lost or data is not None
            self.broken = self.broken or self._out_of_step
            raise
        if not data:
            raise Broken("the server closed the connection")
        return True

    def exchange(self, pending_reply: PendingReply, timeout: float, spin: float) -> bool:
        """Flush, then read until the pending reply is there. False: `timeout` seconds went by first. Errors as in flush
        and receive."""
        end = time.monotonic() + timeout
        self.flush(timeout)
        while not pending_reply.ready:
            left = end - time.monotonic()
            if left <= 0:
                return False
            self.receive(left, spin)  # a wakeup may bring nothing: half a TLS record, or a false alarm of the system
        return True

    # who reads, among threads

    def lead(self, pending_reply: PendingReply, wake: Any) -> bool:
        """Make the caller the leader, which reads, if there is none; else it is to sleep on `wake`, a held lock."""
        with self._mutex:
            if self._leader is None:
                self._leader = pending_reply
                self.thread = threading.get_ident()
                return True
            pending_reply.wake = wake
            return False

    def listen(self, pending_reply: PendingReply) -> None:
        """The caller waits for push messages, and may have to read."""
        with self._mutex:
            self._listeners.append(pending_reply)

    def unlisten(self, pending_reply: PendingReply) -> None:
        """The caller waits for push messages no longer. May be called again."""
        with self._mutex:
            if pending_reply in self._listeners:
                self._listeners.remove(pending_reply)

    def leads(self, pending_reply: PendingReply) -> bool:
        """Whether the caller is the leader, which reads."""
        if self._leader is not pending_reply:
            return False
        self.thread = threading.get_ident()  # it may have been made the leader while it slept
        return True

    def resign(self, pending_reply: PendingReply) -> None:
        """Stop reading: the next reader becomes the leader and is woken. May be called again, after an interrupt."""
        with self._mutex:
            if self._leader is pending_reply:
                self._leader = self._next_reader()
                self.thread = 0
            leader = self._leader
            wake = leader.wake if leader is not None else None
            if leader is not None and wake is not None:
                try:
                    wake.release()
                except RuntimeError as error:  # woken before: by a call that was interrupted, or its reply
                    if by_handler(error):
                        raise
                leader.wake = None

    def in_use_by_caller(self, locks: bool) -> bool:
        """Whether the calling thread waits, reads or sends here already: then a signal handler or `__del__` has
        interrupted that, and would wait for itself. locks: whether the thread holds a mutex the leader may need."""
        me, leader = threading.get_ident(), self._leader
        if leader is not None and (locks or leader._thread == me):
            return True
        if self._sending and self._sender == me:
            return True
        if (leader is not None or self._sending) and self._mutex._is_owned():  # the leader or sender may wait for it
            return True
        # Without the mutex: another thread may hold it, and wait for a mutex with which this method was called
        for pending_reply in [*self._pending_replies.copy(), *self._listeners]:
            pending_reply = pending_reply.pending_reply if type(pending_reply) is _Many else pending_reply
            if (
                type(pending_reply) is PendingReply
                and pending_reply._thread == me
                and not pending_reply.ready
                and not pending_reply.abandoned
            ):
                return True
        return False

    def round_trip(self, template: Template, name: bytes, token: bytes, ms: int, timeout: float, spin: float) -> Any:
        """One command and its reply, for a caller alone on the stream. BUSY: others use it, nothing was done.

        UnsolicitedData: the server spoke unasked or went away, nothing was sent. NoReply: none within `timeout`
        seconds. Errors as in flush and receive.
        """
        pending_reply = PendingReply()
        data = template._encode(_bytes(name), _bytes(token), ms)
        try:
            with self._mutex:
                if self._leader is not None or self._pending_replies or self._sending:
                    return BUSY
                if not self._usable():
                    raise UnsolicitedData("the server spoke unasked, or closed the connection")
                self._leader = pending_reply
                self.thread = threading.get_ident()
                self._append(data, pending_reply, 1)
            if not self.exchange(pending_reply, timeout, spin):
                raise NoReply(f"no reply within {timeout} s")
        finally:
            pending_reply.abandoned = not pending_reply.ready
            try:
                self.resign(pending_reply)
            except BaseException:  # interrupted in it: no other thread could resign for this pending reply
                self.resign(pending_reply)
                raise
        return pending_reply.reply


def _packed(args: tuple[bytes, ...]) -> bytes:
    return b"*%d\r\n" % len(args) + b"".join([b"$%d\r\n%b\r\n" % (len(_bytes(arg)), arg) for arg in args])


def _bytes(value: Any) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError(f"bytes expected, not {type(value).__name__}")
    return value


def _check_depth(reply: Any, left: int) -> None:
    if not left:
        raise ProtocolError("a reply nested too deeply")
    for item in reply.values() if type(reply) is dict else reply:
        if type(item) is list or type(item) is dict:
            _check_depth(item, left - 1)


def _wait(sock: Any, events: int, timeout: float) -> bool:
    timeout = min(max(0.0, timeout), _LONGEST)
    try:
        if poll is None:  # Windows; elsewhere poll is used, which has no highest descriptor
            reads, writes = ([sock] if events == each else [] for each in (_READABLE, _WRITABLE))
            return any(select.select(reads, writes, [sock], timeout))
        poller = poll()
        poller.register(sock, events)
        return bool(poller.poll(timeout * 1000))
    except OSError as error:
        if by_handler(error):
            raise
        raise broken(error) from None
