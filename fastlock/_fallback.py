"""The bytes layer in Python: lock commands into one growing buffer, replies to their slots in order.

The same names, parameters and behaviour as `_core.pyx`, which says what may live here and what may not. Used where the
compiled core is not there, or asked for by FASTLOCK_IMPL=python. Methods of `Pipe` are atomic towards other threads by
a mutex.
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

from fastlock._broken import Broken, NoReply, Unasked, broken, by_handler
from fastlock._native import RLock, allocate_lock, poll

IMPLEMENTATION = "python"
BUILD = "release"
SOURCES = ""
MAX_REPLY = 65536
MAX_FRAME = 64
MAX_DEPTH = 8
MAX_ITEMS = 9999
MAX_DROPPED = 1 << 32

BUSY = object()  # answer of `Pipe.ask`: others use the pipe, nothing was done

_CHUNK = 16384
# Plain numbers: to combine the names of `socket` takes a microsecond each time. 0, as on Windows: no socket ever waits
_AT_ONCE = int(getattr(socket, "MSG_DONTWAIT", 0))
_PEEK = int(socket.MSG_PEEK) | _AT_ONCE
_READABLE, _WRITABLE = getattr(select, "POLLIN", 1), getattr(select, "POLLOUT", 4)
_SLICE = 0.1  # seconds: how long the socket itself waits for bytes; what takes longer is polled for
_STRINGS = frozenset((b"$", b"=", b"!"))
_SIZED = _STRINGS | {b"*", b"%", b"~", b">", b"|"}
_LARGE = re.compile(rb"[$=!*%~>|][0-9]{4}")  # a reply may announce so much
_LONGEST = 1e6  # seconds: no wait is longer, whatever is asked for
_NOTHING = object()
_AGAIN = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Template:
    """A command with holes, encoded once. Parts are bytes (literal arguments) or 0, 1, 2: name, token, milliseconds."""

    __slots__ = ("_format", "_holes", "parts")

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
        self._holes = tuple(holes)

    def _encode(self, name: bytes, token: bytes, ms: int) -> bytes:
        values = (name, token, b"%d" % ms)
        filled: list[Any] = []
        for hole in self._holes:
            value = values[hole]
            filled += (len(value), value)
        return self._format % tuple(filled)


class Mutex(RLock):  # type: ignore[misc]
    """What keeps the threads of a process apart; its own thread may take it again."""

    __slots__ = ()

    def mine(self) -> bool:
        """Whether the calling thread has it."""
        return bool(self._is_owned())


class Ticket:
    """The slot of a waiting thread: `reply` once `ready`; `wake` is the lock it sleeps on, if it sleeps."""

    __slots__ = ("_thread", "abandoned", "ready", "reply", "wake")

    def __init__(self) -> None:
        self._thread = threading.get_ident()  # that made it, to wait for it
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
            try:  # no call before that of `release`: it could be interrupted, and nobody would be woken
                wake.release()
            except RuntimeError as error:  # woken before: by who passed leadership on
                if by_handler(error):
                    raise


class _Many:
    __slots__ = ("missing", "replies", "slot")

    def __init__(self, slot: Any, count: int) -> None:
        self.slot = slot
        self.replies: list[Any] = []
        self.missing = count


class _ReplyFilter:
    """What the server says on its way to the reader; only headers are read.

    A string longer than any token reaches the reader as an empty one, and its bytes are dropped as they come: so a name
    under which something else than a lock lies is answered as any name that is held. No token is empty.
    """

    __slots__ = ("_drops", "_head", "_skip")

    def __init__(self) -> None:
        self._head = b""  # of a line that is not complete yet; that of a string has not been passed on
        self._skip = 0  # bytes of a string that are still to come
        self._drops = False  # whether they go nowhere

    def within(self) -> bool:
        """Whether the rest of a line or of a string is still to come."""
        return bool(self._skip or self._head)

    def passed(self, data: bytes) -> bytes:
        """What of these bytes goes on to the reader; a string's header only when it is complete. ProtocolError: they
        announce more than any reply has."""
        head, self._head = self._head, b""
        if head[:1] == b"$":
            data, head = head + data, b""
        parts: list[bytes] = []
        start, done, size = 0, 0, len(data)
        while start < size:
            if self._skip:
                step = min(self._skip, size - start)
                self._skip -= step
                start += step
                if self._drops:
                    done = start
                    if not self._skip:  # what ends a string ends the empty one: not before all of it came
                        self._drops, self._skip = False, 2
                continue
            end = data.find(b"\n", start)
            if end < 0:
                self._head = head + data[start:]
                if self._head[:1] == b"$":
                    if len(self._head) > MAX_FRAME:
                        raise ProtocolError(f"a header that does not end: {self._head!r:.40}")
                    size = start
                break
            line, head = head + data[start:end], b""
            if self._announces(line):
                parts += (data[done:start], b"$0\r\n")
                done = end + 1
            start = end + 1
        parts.append(data[done:size])
        return b"".join(parts)

    def _announces(self, line: bytes) -> bool:
        """Whether the string that is announced is to be dropped."""
        kind = line[:1]
        if kind not in _SIZED or not (size := line[1:].rstrip(b"\r")).isdigit():
            return False
        announced = int(size.lstrip(b"0")[:20] or b"0")  # more digits make it no less too much
        if announced > (MAX_DROPPED if kind == b"$" else MAX_REPLY if kind in _STRINGS else MAX_ITEMS):
            raise ProtocolError(f"a reply that announces too much: {line!r:.40}")
        if kind in _STRINGS:
            self._drops = announced > MAX_REPLY
            self._skip = announced if self._drops else announced + 2
        return self._drops


class Pipe:
    """One connection's bytes: commands out, replies in, each to its slot, in order.

    A slot is a `Ticket`, a future, or anything with `done()` and `set_result(reply)`; None throws the reply away.
    Errors that the server answers are results too (`hiredis.ReplyError`). What the server says unasked goes to `hear`.
    """

    def __init__(self, sock: Any = None) -> None:
        self._reader = Reader(notEnoughData=_NOTHING)
        self._filter = _ReplyFilter()
        self._mutex = RLock()
        self._out: list[bytes] = []
        self._slots: deque[Any] = deque()
        self._missing = 0  # replies
        self.commands = self.flushes = 0  # queued, and written at once, since the pipe was made
        self._partial = 0
        self._sending = self._flushing = False
        self._sender = 0  # the thread that sends, if one does
        self._leader: Ticket | None = None  # of the thread that reads; `thread` is its number, 0 while it sleeps
        self._sock = sock
        self._tls = isinstance(sock, ssl.SSLSocket)
        self._turn = allocate_lock() if self._tls else contextlib.nullcontext()  # TLS: not send and receive at once
        self._at_once = 0 if self._tls else _AT_ONCE  # a TLS socket takes no flags, and never waits
        if sock is not None and not _AT_ONCE:
            sock.setblocking(False)
        elif sock is not None and not self._tls:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, int(_SLICE * 1e6)))
        self._quiet: Any = None  # says at once whether anything came: to find out by reading costs an exception
        if sock is not None and not self._tls and poll is not None:
            self._quiet = poll()
            self._quiet.register(sock, _READABLE)
        self._usual = self._heard = 0.0  # seconds that replies take, and when the last one came
        self._probes = 0
        self.hear: Callable[[Any], object] | None = None  # gets what the server says unasked
        self._pushes: list[Any] = []
        self._watching: list[Ticket] = []  # threads that wait for that
        self.broken = False
        self._deaf = False  # replies were lost: nobody may read on until the connection is closed
        self.forms: tuple[Template, ...] = ()  # the dialect of its server
        # of a pipe that serves tasks: its connection, who wakes them, their thread, when the first of a tick came
        self.link: Any = None
        self.turns: Any = None
        self.thread = 0
        self.sent = 0.0

    # encode

    def put(self, template: Template, slot: Any, name: bytes, token: bytes, ms: int) -> None:
        """Queue one command; its reply goes to `slot`."""
        data = template._encode(_bytes(name), _bytes(token), ms)
        self._queue(data, slot, 1)

    def serve(self, link: Any, turns: Any, thread: int, flush_soon: Callable[[], object]) -> None:
        """Name whose tasks `request` here, and whom it tells when there is something to `take` again."""
        self.link = link
        self.turns = turns
        self.thread = thread
        self._flush_soon = flush_soon

    def request(self, template: Template, slot: Any, name: bytes, token: bytes, ms: int) -> None:
        """Queue one command, and tell who is to flush; its reply goes to `slot`."""
        self.put(template, slot, name, token, ms)
        if not self._flushing:
            self.announce()

    def tick(self) -> None:
        """Have it flushed what was announced; again, where a handler of signals raises as that begins."""
        try:
            self.link.flush()
        except BaseException:
            self.link.flush()
            raise

    def announce(self) -> None:
        """Something was queued, by whatever method: once until the next `take`, tell who is to flush."""
        if not self._flushing:
            self._flush_soon()  # first: where a signal strikes in it, the next one tells again
            self._flushing = True

    def put_many(self, template: Template, slot: Any, names: list[bytes], tokens: list[bytes], ms: int) -> None:
        """Queue one command per name; `slot` gets the list of replies, in order."""
        if not names:
            raise ValueError("no names")
        if len(tokens) != len(names):
            raise ValueError(f"{len(names)} names but {len(tokens)} tokens")
        encode = template._encode
        data = b"".join([encode(_bytes(name), _bytes(token), ms) for name, token in zip(names, tokens, strict=True)])
        self._queue(data, _Many(slot, len(names)), len(names))

    def put_command(self, slot: Any, args: tuple[bytes, ...]) -> None:
        """Queue any command, given as bytes; its reply goes to `slot`."""
        data = _packed(args)
        self._queue(data, slot, 1)

    def put_calls(self, slot: Any, calls: list[tuple[bytes, ...]]) -> None:
        """Queue any commands; `slot` gets the list of replies, in order."""
        if not calls:
            raise ValueError("no calls")
        data = b"".join([_packed(args) for args in calls])
        self._queue(data, _Many(slot, len(calls)), len(calls))

    def _queue(self, data: bytes, slot: Any, replies: int) -> None:
        with self._mutex:
            self._append(data, slot, replies)

    def _append(self, data: bytes, slot: Any, replies: int) -> None:
        try:
            self._slots.append(slot)
            self._missing += replies
            self.commands += replies
            self._out.append(data)
        except BaseException:  # interrupted half-way
            self.broken = True
            raise

    def take(self) -> bytes:
        """What is to be sent, as bytes; it is then the caller's."""
        self._flushing = False
        self.flushes += 1
        with self._mutex:
            data = b"".join(self._out)
            self._out.clear()
        return data

    # order

    @property
    def pending(self) -> int:
        """Slots that still miss a reply."""
        return len(self._slots)

    @property
    def unsent(self) -> int:
        """Bytes queued and not yet handed to the socket."""
        with self._mutex:
            return sum(map(len, self._out))

    def drain(self, into: list[Any]) -> list[Any]:
        """Move every slot that misses a reply into that list, in order, and return it; none is pending afterwards, what
        was not sent is dropped. Who is interrupted in it calls again, and may find some twice."""
        with self._mutex:
            into += [slot.slot if type(slot) is _Many else slot for slot in self._slots]
            self._slots.clear()
            self._out.clear()
            self._missing = 0
        return into

    def heir(self) -> Ticket | None:
        """The first waiting ticket that sleeps and could read in its turn, or None."""
        with self._mutex:
            return self._heir()

    def _heir(self) -> Ticket | None:
        for slot in self._slots:
            if type(slot) is _Many:
                slot = slot.slot
            if type(slot) is Ticket and slot.wake is not None and not slot.abandoned:
                return slot
        for ticket in self._watching:
            if ticket.wake is not None and not ticket.abandoned:
                return ticket
        return None

    # replies

    def feed(self, data: Any) -> None:
        """Take bytes from the server. ProtocolError: they cannot be explained, the connection must be closed."""
        if self._deaf:
            raise ProtocolError("the connection is out of step: bytes were lost, or made no sense")
        try:
            for reply in self._understood(data):
                self._deliver(reply)
            if self._pushes:
                pushes, self._pushes = self._pushes, []
                for push in pushes:
                    if self.hear is not None:
                        self.hear(push)
        except BaseException:
            self.broken = self._deaf = True
            raise

    def _understood(self, data: Any) -> list[Any]:
        """All of a chunk is understood before anything of it is believed: one too many makes its neighbours suspect."""
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
            self._filter.passed(bytes(data))  # it ends within a string: where, the filter has to know
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
            if not self._slots:  # drained, as the connection failed meanwhile
                return
            slot = self._slots[0]
            if type(slot) is _Many:
                slot.replies.append(reply)
                slot.missing -= 1
                if slot.missing:
                    return
                reply = slot.replies
        getter = slot.slot if type(slot) is _Many else slot
        if getter is not None and not getter.done():
            getter.set_result(reply)
        with self._mutex:  # after it: interrupted in between, the slot gets that the connection broke
            if self._slots and self._slots[0] is slot:
                self._slots.popleft()

    # the socket, for threads

    def usable(self) -> bool:
        """False: the server replied unasked, or closed the connection, while nothing was asked of it. What it says to
        be heard is heard."""
        with self._mutex:
            return self._usable()

    def _is_quiet(self) -> bool:
        try:
            return not self._quiet.poll(0)
        except RuntimeError as error:  # a handler of signals asks, which interrupted that very call
            if by_handler(error):
                raise
            return not _wait(self._sock, _READABLE, 0.0)

    def _usable(self) -> bool:
        if self._slots or self._leader or self._tls:
            return True  # TLS itself may have something to say, as session tickets
        if self._quiet is not None and self._is_quiet():
            return True
        read = False
        try:
            while self._sock.recv(1, _PEEK) and self.hear is not None:
                self.feed(self._sock.recv(_CHUNK, _AT_ONCE))
                read = True
        except OSError as error:
            if by_handler(error):
                raise
            half = self._partial or self._filter.within()  # half a reply was read: its rest is none
            return isinstance(error, _AGAIN) and not (read and half)
        except ProtocolError:
            pass
        return False

    def flush(self, timeout: float) -> None:
        """Send what is queued, also what others queue meanwhile; at once back if somebody else is sending.

        NoReply: the socket took nothing for `timeout` seconds. Broken: the connection is.
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
                with self._mutex:  # in one step: whoever queues after the last look sends by itself
                    data = self._batch()
        except BaseException:
            self.broken = True
            if mine:
                self._sending = False
            raise

    def _batch(self) -> bytes:
        """What is to be sent now: nothing behind a command that was lost half-way, or replies shift."""
        if self._out and self.broken:
            raise Broken("the connection is out of step: bytes were lost on their way to the server")
        try:
            self._sender = threading.get_ident()
            self._sending = True  # before anything is taken: a handler of signals sends nothing ahead of it
            data = b"".join(self._out)
            self._out.clear()
            self._sending = bool(data)
            self.flushes += self._sending
        except BaseException:  # interrupted: before anybody else can send
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
        long for who does not ask again at once.
        Broken: the server closed the connection, or it is broken. ProtocolError: as `feed`.
        """
        self._probes += spin > 0
        start = time.monotonic()
        budget = spin if start - self._heard <= spin else spin / 2  # as the core, and why
        spinning = budget and (self._usual <= budget or not self._probes & 63)
        # A signal would make the socket wait anew for its slice, again and again; they come to the main thread
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
                        waits = False  # the socket has waited for a slice of it
                    elif not _wait(self._sock, _READABLE, timeout - (time.monotonic() - start)):
                        return False
            if spin:
                self._heard = time.monotonic()
                self._usual += (self._heard - start - self._usual) / 4
            if data:
                self.feed(data)
        except BaseException:  # interrupted: what was taken from the socket is in nobody's hands
            self._deaf = self._deaf or lost or data is not None
            self.broken = self.broken or self._deaf
            raise
        if not data:
            raise Broken("the server closed the connection")
        return True

    def exchange(self, ticket: Ticket, timeout: float, spin: float) -> bool:
        """Flush, then read until `ticket` has its reply. False: `timeout` seconds went by first. Errors as in flush and
        receive."""
        end = time.monotonic() + timeout
        self.flush(timeout)
        while not ticket.ready:
            left = end - time.monotonic()
            if left <= 0:
                return False
            self.receive(left, spin)  # a wake-up may bring nothing: half a TLS record, or a mistake of the system
        return True

    # who reads, among threads

    def lead(self, ticket: Ticket, wake: Any) -> bool:
        """Make the caller the one who reads, if nobody does; else its ticket is to sleep on `wake`, a held lock."""
        with self._mutex:
            if self._leader is None:
                self._leader = ticket
                self.thread = threading.get_ident()
                return True
            ticket.wake = wake
            return False

    def watch(self, ticket: Ticket) -> None:
        """The caller waits for what the server says, and may have to read."""
        with self._mutex:
            self._watching.append(ticket)

    def unwatch(self, ticket: Ticket) -> None:
        """It does no longer. May be called again."""
        with self._mutex:
            if ticket in self._watching:
                self._watching.remove(ticket)

    def leads(self, ticket: Ticket) -> bool:
        """Whether the caller is the one who reads."""
        if self._leader is not ticket:
            return False
        self.thread = threading.get_ident()  # it may have been made the leader in its sleep
        return True

    def resign(self, ticket: Ticket) -> None:
        """Read no longer: the first who sleeps goes on. May be called again, by one who was interrupted in it."""
        with self._mutex:
            if self._leader is ticket:
                self._leader = self._heir()
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

    def entangled(self, locks: bool) -> bool:
        """Whether the calling thread waits, reads or sends here already: this is then a handler of signals, or a
        `__del__`, which interrupted it, and would wait for itself. locks: whether it keeps what who reads may want."""
        me, leader = threading.get_ident(), self._leader
        if leader is not None and (locks or leader._thread == me):
            return True
        if self._sending and self._sender == me:
            return True
        if (leader is not None or self._sending) and self._mutex._is_owned():  # which they may wait for
            return True
        # Without the mutex, which this thread may keep, as another keeps one that this call is made with
        for slot in [*self._slots.copy(), *self._watching]:
            ticket = slot.slot if type(slot) is _Many else slot
            if type(ticket) is Ticket and ticket._thread == me and not ticket.ready and not ticket.abandoned:
                return True
        return False

    def ask(self, template: Template, name: bytes, token: bytes, ms: int, timeout: float, spin: float) -> Any:
        """One command and its reply, for a caller who has the pipe for itself. BUSY: others use it, nothing is done.

        Unasked: the server spoke unasked or went away, nothing was sent. NoReply: none within `timeout` seconds.
        Errors as in flush and receive.
        """
        ticket = Ticket()
        data = template._encode(_bytes(name), _bytes(token), ms)
        try:
            with self._mutex:
                if self._leader is not None or self._slots or self._sending:
                    return BUSY
                if not self._usable():
                    raise Unasked("the server spoke unasked, or closed the connection")
                self._leader = ticket
                self.thread = threading.get_ident()
                self._append(data, ticket, 1)
            if not self.exchange(ticket, timeout, spin):
                raise NoReply(f"no reply within {timeout} s")
        finally:
            ticket.abandoned = not ticket.ready
            try:
                self.resign(ticket)
            except BaseException:  # interrupted in it: nobody else could resign for this ticket
                self.resign(ticket)
                raise
        return ticket.reply


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
        if poll is None:  # Windows; where it is there, it knows of no highest descriptor
            reads, writes = ([sock] if events == each else [] for each in (_READABLE, _WRITABLE))
            return any(select.select(reads, writes, [sock], timeout))
        poller = poll()
        poller.register(sock, events)
        return bool(poller.poll(timeout * 1000))
    except OSError as error:
        if by_handler(error):
            raise
        raise broken(error) from None
