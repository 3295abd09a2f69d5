"""Streams of the core and the fallback on real sockets: partial sends, the end of a stream, signals, many threads.

What must never happen: a byte is lost or doubled, a reply reaches the wrong pending reply, a stream that was
interrupted half-way is not marked as broken.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import random
import signal
import socket
import ssl
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType
from typing import Any

import hiredis
import pytest
from support import resp
from support.streams import FILES, LONG, Echo, Interrupt, asleep, beside, raise_at

from fastlock import _fallback
from fastlock._stream_errors import Broken


class RecordedReply:
    """A pending reply that records every result it is given, so that a second result would be seen."""

    def __init__(self) -> None:
        self.got: list[Any] = []

    def done(self) -> bool:
        return False

    def set_result(self, reply: Any) -> None:
        self.got.append(reply)


# ------------------------------------------------------------------------------------------------------------- sending


def test_partial_sends_arrive_whole(layer: ModuleType, ends: Any) -> None:
    stream, rng = layer.SocketStream(ends[0]), random.Random(3)
    words = [rng.randbytes(rng.choice((1, 100, 5000, 60_000))) for _ in range(60)]
    pending_replies = [RecordedReply() for _ in words]

    def read() -> None:
        while not pending_replies[-1].got:
            assert stream.receive(LONG, 0.0)

    with Echo(ends[1], chunk=3000) as echo:
        reader = beside(read)
        for word, pending_reply in zip(words, pending_replies, strict=True):
            stream.put_command(pending_reply, (b"ECHO", b"x" * rng.choice((1, 400_000)), word))
            stream.flush(LONG)
        reader.join(LONG)
        assert echo.received == words
    assert [pending_reply.got for pending_reply in pending_replies] == [[word] for word in words]
    assert (stream.unsent, stream.pending, stream.broken) == (0, 0, False)


def test_a_full_socket_times_out_and_breaks_the_stream(layer: ModuleType, ends: Any) -> None:
    stream, pending_reply = layer.SocketStream(ends[0]), RecordedReply()
    stream.put_command(pending_reply, (b"SET", b"x" * 2_000_000))
    with pytest.raises(TimeoutError, match="takes no more"):
        stream.flush(0.02)
    assert stream.broken
    assert stream.take_pending([]) == [pending_reply]


def test_sending_to_a_closed_peer_raises_and_sends_no_signal(layer: ModuleType, ends: Any) -> None:
    stream = layer.SocketStream(ends[0])
    ends[1].close()
    stream.put_command(None, (b"PING",))
    with pytest.raises(Broken, match=r"(?i)broken pipe|reset") as caught:
        stream.flush(LONG)
    assert caught.value.errno in (errno.EPIPE, errno.ECONNRESET)
    assert stream.broken


def test_flush_without_commands_sends_nothing(layer: ModuleType, ends: Any) -> None:
    stream = layer.SocketStream(ends[0])
    stream.flush(0.0)
    assert not stream.broken
    ends[1].setblocking(False)
    with pytest.raises(BlockingIOError):
        ends[1].recv(1)


@pytest.mark.parametrize("seed", range(3))
def test_concurrent_flushes_lose_nothing_and_keep_order(layer: ModuleType, ends: Any, seed: int) -> None:
    """Pending replies and bytes must have the same order: else a reply reaches another caller."""
    stream, each, switch = layer.SocketStream(ends[0]), 700, sys.getswitchinterval()
    pending_replies: dict[bytes, RecordedReply] = {}

    def work(number: int) -> None:
        rng = random.Random(seed * 100 + number)
        for count in range(each):
            word = b"%d:%d:" % (number, count) + b"x" * rng.choice((0, 0, 9, 2000))
            pending_replies[word] = pending_reply = RecordedReply()
            stream.put_command(pending_reply, (b"ECHO", word))
            if rng.random() < 0.7:
                stream.flush(LONG)
        stream.flush(LONG)

    try:
        sys.setswitchinterval(1e-6)
        with Echo(ends[1]) as echo:
            threads = [beside(lambda number=number: work(number)) for number in range(4)]
            while len(echo.received) < 4 * each or stream.pending:
                assert stream.receive(LONG, 0.0)
            for thread in threads:
                thread.join(LONG)
    finally:
        sys.setswitchinterval(switch)
    assert len(pending_replies) == len(echo.received) == 4 * each
    assert [word for word, pending_reply in pending_replies.items() if pending_reply.got != [word]] == []
    assert (stream.unsent, stream.pending, stream.broken) == (0, 0, False)


def test_a_flush_beside_a_blocked_one_returns_at_once(layer: ModuleType, ends: Any) -> None:
    stream = layer.SocketStream(ends[0])
    stream.put_command(None, (b"ECHO", b"x" * 500_000, b"a"))
    stuck = beside(lambda: stream.flush(LONG))
    assert ends[1].recv(1, socket.MSG_PEEK)  # the flush is sending, and blocked until the test reads
    stream.put_command(None, (b"ECHO", b"b"))
    stream.flush(0.0)
    with Echo(ends[1]) as echo:
        while stream.pending:
            assert stream.receive(LONG, 0.0)
        stuck.join(LONG)
        assert not stuck.is_alive()
    assert echo.received == [b"a", b"b"]


# ----------------------------------------------------------------------------------------------------------- receiving


@pytest.mark.parametrize("spin", [0.0, 1e-4])
def test_receive_tells_no_data_from_the_end(layer: ModuleType, ends: Any, spin: float) -> None:
    stream, pending_reply = layer.SocketStream(ends[0]), layer.PendingReply()
    stream.put_command(pending_reply, (b"GET",))
    assert stream.receive(0.0, spin) is False
    assert stream.receive(0.002, spin) is False
    ends[1].sendall(b"$4\r\nab")
    assert stream.receive(LONG, spin) is True
    assert not pending_reply.ready
    ends[1].sendall(b"cd\r\n")
    assert stream.receive(LONG, spin) is True
    assert pending_reply.reply == b"abcd"
    ends[1].close()
    for _ in range(2):
        with pytest.raises(Broken, match="closed"):
            stream.receive(LONG, spin)


def test_a_reset_is_an_error(layer: ModuleType) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as ours:
        theirs = listener.accept()[0]
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        theirs.close()
        stream = layer.SocketStream(ours)
        stream.put_command(None, (b"GET",))
        with pytest.raises(Broken) as caught:
            stream.receive(LONG, 0.0)
        assert caught.value.errno == errno.ECONNRESET


def test_usable_notices_the_end_behind_what_was_not_read(layer: ModuleType, ends: Any) -> None:
    stream, reply = layer.SocketStream(ends[0]), layer.PendingReply()
    stream.put_command(reply, (b"GET",))
    stream.flush(LONG)
    assert stream.usable() is True
    ends[1].sendall(b":1\r\n")
    assert stream.usable() is True, "a reply that is pending"
    ends[1].close()
    assert stream.usable() is False
    assert stream.receive(LONG, 0.0) and reply.reply == 1


def test_usable_notices_unrequested_bytes(layer: ModuleType, ends: Any) -> None:
    stream = layer.SocketStream(ends[0])
    assert stream.usable() is True
    ends[1].sendall(b":1\r\n")
    assert stream.usable() is False
    assert stream.usable() is False  # the check consumes nothing
    with pytest.raises(hiredis.ProtocolError):
        stream.receive(LONG, 0.0)
    assert stream.usable() is True
    ends[1].close()
    assert stream.usable() is False


MESSAGE = b">3\r\n+message\r\n+channel\r\n$1\r\n%b\r\n"


def test_messages_leave_an_idle_connection_usable(layer: ModuleType, ends: Any) -> None:
    stream, received = layer.SocketStream(ends[0]), list[Any]()
    stream.on_push = lambda push: received.append(push[2])
    for count in (1, 2, 1500):  # more than one read returns
        ends[1].sendall(b"".join(MESSAGE % b"%d" % (n % 10) for n in range(count)))
        assert stream.usable() is True
        assert received == [b"%d" % (n % 10) for n in range(count)]
        received.clear()
    assert stream.usable() is True and received == [] and not stream.broken


@pytest.mark.parametrize("behind", [b":1\r\n", b"_\r\n", b"?\r\n", b":", b"$3\r\nab", b"", None], ids=repr)
def test_replies_make_an_idle_connection_unusable(layer: ModuleType, ends: Any, behind: bytes | None) -> None:
    """Half a reply as well: its other half would be mistaken for the reply to the next command."""
    stream, received = layer.SocketStream(ends[0]), list[Any]()
    stream.on_push = lambda push: received.append(push[2])
    ends[1].sendall(MESSAGE % b"a")
    assert stream.usable() is True and received == [b"a"]
    ends[1].sendall(MESSAGE % b"b" + (behind or b""))
    if behind is None:
        ends[1].close()
    assert stream.usable() is (behind == b"")
    assert received == ([b"a"] if behind in (b":1\r\n", b"_\r\n", b"?\r\n") else [b"a", b"b"])


def test_messages_without_a_callback_make_it_unusable(layer: ModuleType, ends: Any) -> None:
    """The connection never subscribed, so its messages are not for this client."""
    stream = layer.SocketStream(ends[0])
    ends[1].sendall(MESSAGE % b"a")
    assert [stream.usable() for _ in range(2)] == [False, False]


def test_usable_reads_nothing_while_a_reply_is_pending(layer: ModuleType, ends: Any) -> None:
    stream, pending_reply, received = layer.SocketStream(ends[0]), layer.PendingReply(), list[Any]()
    stream.on_push = lambda push: received.append(push[2])
    stream.put_command(pending_reply, (b"GET",))
    ends[1].sendall(MESSAGE % b"a" + b":1\r\n")
    assert stream.usable() is True and (received, pending_reply.ready) == ([], False)
    assert stream.exchange(pending_reply, LONG, 0.0) and (received, pending_reply.reply) == ([b"a"], 1)
    assert stream.lead(layer.PendingReply(), asleep())
    ends[1].sendall(MESSAGE % b"b")
    assert stream.usable() is True and received == [b"a"]


def test_the_rest_of_a_message_may_come_later(layer: ModuleType, ends: Any) -> None:
    """The message was cut behind a reply: the connection is as good as before."""
    stream, pending_reply, received = layer.SocketStream(ends[0]), layer.PendingReply(), list[Any]()
    stream.on_push = lambda push: received.append(push[2])
    whole = MESSAGE % b"a"
    stream.put_command(pending_reply, (b"GET",))
    ends[1].sendall(b":1\r\n" + whole[:9])
    assert stream.exchange(pending_reply, LONG, 0.0)
    assert stream.usable() is True and received == []
    ends[1].sendall(whole[9:])
    assert stream.usable() is True and received == [b"a"]


def test_exchange_reads_until_its_own_reply(layer: ModuleType, ends: Any) -> None:
    stream, pending_reply, later = layer.SocketStream(ends[0]), layer.PendingReply(), layer.PendingReply()
    before = RecordedReply()
    with Echo(ends[1], chunk=7):
        stream.put_calls(before, [(b"ECHO", b"a"), (b"ECHO", b"b")])
        stream.put_command(pending_reply, (b"ECHO", b"c"))
        assert stream.exchange(pending_reply, LONG, 0.0) is True
        assert (before.got, pending_reply.reply) == ([[b"a", b"b"]], b"c")
        assert stream.exchange(pending_reply, 0.0, 0.0) is True  # the reply is there already
    stream.put_command(later, (b"ECHO", b"d"))
    with pytest.raises((EOFError, OSError)):
        stream.exchange(later, LONG, 0.0)


def test_exchange_times_out_and_leaves_the_pending_reply(layer: ModuleType, ends: Any) -> None:
    stream, pending_reply = layer.SocketStream(ends[0]), layer.PendingReply()
    stream.put_command(pending_reply, (b"GET",))
    for timeout in (0.0, 0.003, -1.0):
        assert stream.exchange(pending_reply, timeout, 0.0) is False
    assert (stream.pending, stream.unsent, stream.broken) == (1, 0, False)
    ends[1].sendall(b":7\r\n")
    assert stream.exchange(pending_reply, LONG, 0.0) is True
    assert pending_reply.reply == 7


def test_a_wakeup_without_bytes_does_not_end_the_wait(layer: ModuleType, ends: Any) -> None:
    """Another thread takes the bytes between the wakeup and the read, again and again."""
    stream, pending_reply = layer.SocketStream(ends[0]), layer.PendingReply()
    stream.put_command(pending_reply, (b"GET",))
    ends[1].sendall(b"+")
    assert stream.receive(LONG, 0.0)

    def tease() -> None:
        for _ in range(3000):
            ends[1].sendall(b"x")
            with contextlib.suppress(BlockingIOError):
                ends[0].recv(1, socket.MSG_DONTWAIT)
        ends[1].sendall(b"\r\n")

    thread = beside(tease)
    assert stream.exchange(pending_reply, LONG, 0.0) is True
    thread.join(LONG)
    assert pending_reply.reply.strip(b"x") == b""


@pytest.mark.parametrize("timeout", [2.0**31 / 1000 + 1, 1e10, 1e15, 1e300])
def test_a_timeout_of_many_years_is_accepted(layer: ModuleType, ends: Any, timeout: float) -> None:
    stream, pending_reply, word = layer.SocketStream(ends[0]), layer.PendingReply(), b"x" * 50_000
    with Echo(ends[1]):
        # more than the socket takes at once, so sending waits as well
        stream.put_command(pending_reply, (b"ECHO", word))
        assert stream.exchange(pending_reply, timeout, 1e-4) is True
    assert pending_reply.reply == word


# ----------------------------------------------------------------------------------------------------------------- TLS


def anonymous(side: int) -> ssl.SSLContext:
    """TLS without certificates: enough for the framing under test."""
    context = ssl.SSLContext(side)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers("AECDH-AES128-SHA:@SECLEVEL=0")
    return context


def test_the_rest_of_a_tls_record_is_waited_for() -> None:
    """A wakeup that brings no reply does not end the wait."""
    layer = _fallback
    ours, theirs = socket.socketpair()
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = anonymous(ssl.PROTOCOL_TLS_SERVER).wrap_bio(incoming, outgoing, server_side=True)

    def shake_hands() -> None:
        while True:
            with contextlib.suppress(ssl.SSLWantReadError):
                server.do_handshake()
                theirs.sendall(outgoing.read())
                return
            theirs.sendall(outgoing.read())
            incoming.write(theirs.recv(1 << 16))

    with ours, theirs:
        hands = beside(shake_hands)
        client = anonymous(ssl.PROTOCOL_TLS_CLIENT).wrap_socket(ours)
        hands.join(LONG)
        client.setblocking(False)
        stream, pending_reply = layer.SocketStream(client), layer.PendingReply()
        stream.put_command(pending_reply, (b"GET",))
        stream.flush(LONG)
        server.write(b"$3\r\nabc\r\n")
        record = outgoing.read()
        pieces, real = iter([record[:9], record[9:20], record[20:]]), client.recv

        def recv(*args: Any) -> bytes:
            try:
                return real(*args)
            except ssl.SSLWantReadError:  # each read that finds nothing brings the next piece
                theirs.sendall(next(pieces))
                raise

        client.recv = recv  # type: ignore[method-assign]
        assert stream.exchange(pending_reply, LONG, 0.0) is True
        assert pending_reply.reply == b"abc"
        client.close()


# ------------------------------------------------------------------------------------------------------------- signals


@contextlib.contextmanager
def interrupting() -> Iterator[Callable[[threading.Event], None]]:
    """Yields a function that sends signals to this thread until an event is set; their handler raises Interrupt."""
    main = threading.get_ident()
    assert threading.current_thread() is threading.main_thread()
    armed = threading.Event()

    def handler(number: int, frame: FrameType | None) -> None:
        if armed.is_set():
            armed.clear()
            raise Interrupt

    def send_signals(over: threading.Event) -> None:
        armed.set()
        while not over.wait(0.01):
            signal.pthread_kill(main, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        yield send_signals
    finally:
        armed.clear()
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("verb", ["receive", "exchange"])
def test_an_interrupted_wait_leaves_the_stream_usable(layer: ModuleType, ends: Any, verb: str) -> None:
    stream, pending_replies = layer.SocketStream(ends[0]), [layer.PendingReply() for _ in range(4)]
    for pending_reply in pending_replies:
        stream.put_command(pending_reply, (b"GET",))
    stream.flush(LONG)
    ends[1].sendall(b":0\r\n$8\r\nhalf")
    assert stream.receive(LONG, 0.0)
    over = threading.Event()
    with interrupting() as send_signals:
        thread = beside(lambda: send_signals(over))
        with pytest.raises(Interrupt):
            stream.receive(LONG, 0.0) if verb == "receive" else stream.exchange(pending_replies[3], LONG, 0.0)
        over.set()
        thread.join(LONG)
    assert not stream.broken
    ends[1].sendall(b"half\r\n:2\r\n:3\r\n")
    assert stream.exchange(pending_replies[3], LONG, 0.0)
    assert [pending_reply.reply for pending_reply in pending_replies] == [0, b"halfhalf", 2, 3]


def test_an_interrupted_send_breaks_the_stream(layer: ModuleType, ends: Any) -> None:
    stream, pending_reply = layer.SocketStream(ends[0]), RecordedReply()
    stream.put_command(pending_reply, (b"SET", b"x" * 2_000_000))
    over = threading.Event()
    with interrupting() as send_signals:
        thread = beside(lambda: send_signals(over))
        with pytest.raises(Interrupt):
            stream.flush(LONG)
        over.set()
        thread.join(LONG)
    assert stream.broken  # half a command is sent: nothing may follow it
    assert stream.take_pending([]) == [pending_reply]


def test_a_signal_whose_handler_returns_interrupts_nothing(layer: ModuleType, ends: Any) -> None:
    stream, pending_reply, received = layer.SocketStream(ends[0]), layer.PendingReply(), threading.Event()
    stream.put_command(pending_reply, (b"GET",))
    before = signal.signal(signal.SIGUSR1, lambda number, frame: received.set())
    main = threading.get_ident()

    def send_signals() -> None:
        while not received.wait(0.01):
            signal.pthread_kill(main, signal.SIGUSR1)
        ends[1].sendall(b":1\r\n")

    try:
        thread = beside(send_signals)
        assert stream.exchange(pending_reply, LONG, 0.0) is True
        thread.join(LONG)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert pending_reply.reply == 1


def test_an_interrupted_receive_shifts_no_reply() -> None:
    """In Python an interrupt can come between any two steps; it must not deliver a reply to another pending reply."""
    layer = _fallback
    data = b":0\r\n>1\r\n+push\r\n:1\r\n:2\r\n"
    for step in itertools.count(1):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            stream, pending_replies = layer.SocketStream(ours), [layer.PendingReply() for _ in range(5)]
            for pending_reply in pending_replies:
                stream.put_command(pending_reply, (b"GET",))
                pending_reply.wake = asleep()
            wakes = [pending_reply.wake for pending_reply in pending_replies]
            theirs.sendall(data)
            interrupted = raise_at(step, FILES, lambda stream=stream: stream.receive(LONG, 0.0))
            if not stream.broken:
                theirs.sendall(b":3\r\n:4\r\n")
                while not pending_replies[4].ready and stream.receive(0.0, 0.0):
                    pass
                assert all(pending_reply.ready for pending_reply in pending_replies), f"point {step}"
            assert [t.reply for t in pending_replies if t.ready] == [
                n for n, t in enumerate(pending_replies) if t.ready
            ], f"{step}"
            for pending_reply in stream.take_pending([]):  # which learn that the connection broke
                pending_reply.set_result("broken")
            assert not any(wake.locked() for wake in wakes), f"point {step}: a caller sleeps on"
            if not interrupted:
                assert step > 25
                break


def test_an_interrupted_flush_loses_no_command_silently() -> None:
    layer = _fallback
    for step in itertools.count(1):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.setblocking(False)
            stream = layer.SocketStream(ours)
            stream.put_command(None, (b"ONE",))
            interrupted = raise_at(step, FILES, lambda stream=stream: stream.flush(LONG))
            if not stream.broken:
                stream.put_command(None, (b"TWO",))
                stream.flush(LONG)
                assert theirs.recv(1000) == resp.encode("ONE") + resp.encode("TWO"), f"point {step}"
            if not interrupted:
                assert step > 8
                break


@pytest.mark.parametrize("arguments", [(), (None,)])
def test_a_stream_of_threads_needs_a_socket(layer: ModuleType, arguments: tuple[None, ...]) -> None:
    with pytest.raises((TypeError, AttributeError)):
        layer.SocketStream(*arguments)


def test_a_signal_interrupts_a_wait_at_any_moment(layer: ModuleType) -> None:
    """A signal may come as the socket's own timeout ends, over TCP: it shows as no error there then, and the wait
    may go on for seconds."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Interrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            ours = socket.create_connection(server.getsockname())
            theirs, _ = server.accept()
        with ours, theirs:
            stream = layer.SocketStream(ours)
            for after in range(940, 1060, 8):
                start = time.monotonic()
                with pytest.raises(Interrupt):
                    signal.setitimer(signal.ITIMER_REAL, after / 10_000)
                    while stream.receive(LONG, 0.0) is False:
                        assert time.monotonic() < start + LONG, "no signal interrupted the wait"
                assert time.monotonic() < start + LONG / 2, "the signal was handled only after the wait"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
