"""The stream of threads, in Python, on a socket on which they block. The same as `_socket_stream.pxi`.

Never here: what is sent.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import struct
import threading
import time
from typing import TYPE_CHECKING, Any

from hiredis import ProtocolError

from fastlock._native import RLock, poll
from fastlock._stream import PendingReply, Stream, Template
from fastlock._stream_errors import Broken, NoReply, UnsolicitedData, broken, by_handler

if TYPE_CHECKING:
    from _thread import LockType

BUSY = object()  # answer of `SocketStream.round_trip`: other threads use the stream, nothing was done

_CHUNK = 16384
# Plain numbers: to combine flags of `socket` takes a microsecond each time. 0, as on Windows: sockets never block
_AT_ONCE = int(getattr(socket, "MSG_DONTWAIT", 0))
_PEEK = int(socket.MSG_PEEK) | _AT_ONCE
_READABLE, _WRITABLE = getattr(select, "POLLIN", 1), getattr(select, "POLLOUT", 4)
_HUNG_UP = getattr(select, "POLLRDHUP", 0)  # that the other end sends no more, where the system tells
_LOOK_SECONDS = 0.001  # between two looks for what the reader has to read, each of which gives the interpreter away
_SLICE = 0.1  # seconds for which the socket itself waits for bytes; for the rest of a wait it is polled
_LONGEST = 1e6  # seconds: no wait is longer, whatever is asked for
_AGAIN = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class SocketStream(Stream):
    """A stream on a connected socket, which threads share: one of them, the leader, reads for all."""

    def __init__(self, sock: Any) -> None:
        super().__init__()
        self._sending = False
        self._sender = 0  # the thread that sends, if one does
        self._leader: PendingReply | None = None  # of the thread that reads
        self._sock = sock
        self._tls = isinstance(sock, ssl.SSLSocket)
        # No thread sends during another's receive; a signal handler may, within its own thread's
        self._tls_lock = RLock() if self._tls else contextlib.nullcontext()
        self._at_once = 0 if self._tls else _AT_ONCE  # a TLS socket takes no flags, and never blocks
        if not _AT_ONCE:
            sock.setblocking(False)
        elif not self._tls:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, int(_SLICE * 1e6)))
        self._poller: Any = None  # a poller that tells whether anything came: to find out by reading costs an exception
        if not self._tls and poll is not None:
            self._poller = poll()
            self._poller.register(sock, _READABLE)
        self._usual_delay = self._last_reply_at = 0.0  # seconds that replies take, and when the last one came
        self._probes = 0
        self._listeners: list[PendingReply] = []  # of threads that wait for push messages
        self._taking = False  # whether there is something to read, and the reader takes it
        self._look_at = 0.0  # when the next look for that is allowed

    # send and receive

    def usable(self) -> bool:
        """False: the server closed the connection, or replied unasked while no reply was pending. Push messages are
        delivered. True where another thread reads, which finds that out."""
        with self._mutex:
            usable, asks = self._usable(), bool(self._pending_replies) and not self._leader
        return usable and not (asks and self._hung_up())  # without the mutex: whoever reads needs it

    def _nothing_came(self) -> bool:
        try:
            return not self._poller.poll(0)
        except RuntimeError as error:  # the caller is a signal handler that interrupted this very call
            if by_handler(error):
                raise
            return not _wait(self._sock, _READABLE, 0.0)

    def _hung_up(self) -> bool:
        """Whether the other end has closed the connection, also where what it sent before was not read yet."""
        if poll is None:
            return False
        poller = poll()  # one of its own: a signal handler may ask, too, which interrupted this very call
        poller.register(self._sock, _HUNG_UP)
        return bool(poller.poll(0))

    def _usable(self) -> bool:
        if self._pending_replies or self._leader:
            return True
        if self._tls:  # there may be data that is no reply, such as session tickets
            return not self._hung_up()
        if self._poller is not None and self._nothing_came():
            return True
        read = False
        try:
            while self._sock.recv(1, _PEEK) and self.on_push is not None:
                self.feed(self._sock.recv(_CHUNK, _AT_ONCE))
                read = True
        except OSError as error:
            if by_handler(error):
                raise
            half = self._within_reply()  # half a reply was read: its rest must not be taken for one
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
                with self._tls_lock:
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
        budget = spin if start - self._last_reply_at <= spin else spin / 2  # `_budget` in _socket_stream.pxi says why
        spinning = budget and (self._usual_delay <= budget or not self._probes & 63)
        # Each signal would make the socket wait for its whole slice again; signals come to the main thread
        main = threading.get_ident() == threading.main_thread().ident
        # With listeners, whose reader others let run once there is something to read, the bytes stay in the socket
        waits = self._at_once and not main and timeout >= _SLICE and not self._listeners
        data: bytes | None = None
        lost = False  # whether bytes may have been taken that are not in `data`
        try:
            while True:
                flags = 0 if waits and not spinning else self._at_once
                try:
                    with self._tls_lock:
                        lost = self._tls  # which is Python's own code: an interrupt may come anywhere in it
                        (data,) = map(self._sock.recv, (_CHUNK,), (flags,))  # no interrupt between taken and kept
                except OSError as error:
                    if by_handler(error):
                        raise
                    if not isinstance(error, _AGAIN):
                        raise broken(error) from None
                    lost = self._taking = False
                if data is not None:
                    break
                if spinning:  # not in the handler: what a signal raises meanwhile has no such context
                    spinning = time.monotonic() - start < budget
                elif waits:
                    waits = False  # the socket itself has waited for a slice of the timeout
                elif _wait(self._sock, _READABLE, timeout - (time.monotonic() - start)):
                    self._taking = True
                else:
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
        finally:
            self._taking = False
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

    # who reads

    def lead(self, pending_reply: PendingReply, wake: LockType) -> bool:
        """Make the caller the leader, which reads, if there is none; else it is to sleep on `wake`, a held lock."""
        with self._mutex:
            if self._leader is None:
                self._leader = pending_reply
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
        return self._leader is pending_reply

    def reader_waits(self) -> bool:
        """Whether the thread that reads has something to read, as far as is known, and waits for the interpreter."""
        if self._taking or self._leader is None or (at := time.monotonic()) < self._look_at:
            return self._taking
        self._look_at = at + _LOOK_SECONDS
        return _wait(self._sock, _READABLE, 0.0)

    def next_reader(self) -> PendingReply | None:
        """The first pending reply whose thread sleeps and could read next, or None."""
        with self._mutex:
            return self._next_reader()

    def _next_reader(self) -> PendingReply | None:
        for pending_reply in self._getters():
            if type(pending_reply) is PendingReply and pending_reply.wake is not None and not pending_reply.cancelled:
                return pending_reply
        for pending_reply in self._listeners:
            if pending_reply.wake is not None and not pending_reply.cancelled:
                return pending_reply
        return None

    def resign(self, pending_reply: PendingReply) -> None:
        """Stop reading: the next reader becomes the leader and is woken. May be called again, after an interrupt."""
        with self._mutex:
            if self._leader is pending_reply:
                self._leader = self._next_reader()
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
        if self.half_changed():  # and the leader or sender may wait for the mutex
            return True
        # Without the mutex: another thread may hold it, and wait for a mutex with which this method was called
        for pending_reply in [*self._getters(), *self._listeners]:
            if (
                type(pending_reply) is PendingReply
                and pending_reply._thread == me
                and not pending_reply.ready
                and not pending_reply.cancelled
            ):
                return True
        return False

    def half_changed(self) -> bool:
        """Whether the calling thread changes the stream: then a signal handler has interrupted that."""
        return bool(self._mutex._is_owned())

    # a round trip

    def round_trip(self, template: Template, name: bytes, token: bytes, ms: int, timeout: float, spin: float) -> Any:
        """One command and its reply, for a caller alone on the stream. BUSY: others use it, nothing was done.

        UnsolicitedData: the server spoke unasked or went away, nothing was sent. NoReply: none within `timeout`
        seconds. Errors as in flush and receive.
        """
        pending_reply = PendingReply()
        data = template._encode(name, token, ms)
        try:
            with self._mutex:
                # Nobody waits for the replies to undos and unconfirmed releases
                if self._leader is not None or self._sending or self._awaited():
                    return BUSY
                if not self._usable():
                    raise UnsolicitedData("the server spoke unasked, or closed the connection")
                self._leader = pending_reply
                self._append(data, pending_reply, 1)
            if not self.exchange(pending_reply, timeout, spin):
                raise NoReply(f"no reply within {timeout} s")
        finally:
            pending_reply.cancelled = not pending_reply.ready
            try:
                self.resign(pending_reply)
            except BaseException:  # interrupted in it: no other thread could resign for this pending reply
                self.resign(pending_reply)
                raise
        return pending_reply.reply

    def _awaited(self) -> bool:
        """Whether anybody waits for a reply here."""
        pending = self._pending_replies
        return bool(pending) and any(type(each) is PendingReply for each in pending.copy())


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
