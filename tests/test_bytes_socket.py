"""The bytes layer on real sockets, both implementations: partial sends, the end of a stream, signals, many threads.

What is asserted is what must never happen: a byte lost or doubled, a reply in a slot that is not its own, a pipe that
was interrupted half-way and does not say so.
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
from support.streams import LONG, Echo, Interrupt, asleep, beside, raise_at

from fastlock import _fallback
from fastlock._stream_errors import Broken


class Slot:
    """Notes what it got; more than one reply would show."""

    def __init__(self) -> None:
        self.got: list[Any] = []

    def done(self) -> bool:
        return False

    def set_result(self, reply: Any) -> None:
        self.got.append(reply)


# ------------------------------------------------------------------------------------------------------------- sending


def test_what_the_socket_takes_in_parts_arrives_whole(layer: ModuleType, ends: Any) -> None:
    stream, dice = layer.Stream(ends[0]), random.Random(3)
    words = [dice.randbytes(dice.choice((1, 100, 5000, 60_000))) for _ in range(60)]
    pending_replies = [Slot() for _ in words]

    def read() -> None:
        while not pending_replies[-1].got:
            assert stream.receive(LONG, 0.0)

    with Echo(ends[1], chunk=3000) as echo:
        reader = beside(read)
        for word, pending_reply in zip(words, pending_replies, strict=True):
            stream.put_command(pending_reply, (b"ECHO", b"x" * dice.choice((1, 400_000)), word))
            stream.flush(LONG)
        reader.join(LONG)
        assert echo.heard == words
    assert [pending_reply.got for pending_reply in pending_replies] == [[word] for word in words]
    assert (stream.unsent, stream.pending, stream.broken) == (0, 0, False)


def test_a_socket_that_takes_nothing_ends_in_a_timeout_and_a_broken_pipe(layer: ModuleType, ends: Any) -> None:
    stream, pending_reply = layer.Stream(ends[0]), Slot()
    stream.put_command(pending_reply, (b"SET", b"x" * 2_000_000))
    with pytest.raises(TimeoutError, match="takes no more"):
        stream.flush(0.02)
    assert stream.broken
    assert stream.drain([]) == [pending_reply]


def test_sending_to_a_closed_peer_is_an_error_and_no_signal(layer: ModuleType, ends: Any) -> None:
    stream = layer.Stream(ends[0])
    ends[1].close()
    stream.put_command(None, (b"PING",))
    with pytest.raises(Broken, match=r"(?i)broken pipe|reset") as caught:
        stream.flush(LONG)
    assert caught.value.errno in (errno.EPIPE, errno.ECONNRESET)
    assert stream.broken


def test_nothing_queued_is_nothing_sent(layer: ModuleType, ends: Any) -> None:
    stream = layer.Stream(ends[0])
    stream.flush(0.0)
    assert not stream.broken
    ends[1].setblocking(False)
    with pytest.raises(BlockingIOError):
        ends[1].recv(1)


@pytest.mark.parametrize("seed", range(3))
def test_threads_that_queue_and_flush_at_once_lose_nothing_and_keep_order(
    layer: ModuleType, ends: Any, seed: int
) -> None:
    """Order of slots and order of bytes are one order: else a reply reaches a stranger."""
    stream, each, switch = layer.Stream(ends[0]), 700, sys.getswitchinterval()
    pending_replies: dict[bytes, Slot] = {}

    def work(number: int) -> None:
        dice = random.Random(seed * 100 + number)
        for count in range(each):
            word = b"%d:%d:" % (number, count) + b"x" * dice.choice((0, 0, 9, 2000))
            pending_replies[word] = pending_reply = Slot()
            stream.put_command(pending_reply, (b"ECHO", word))
            if dice.random() < 0.7:
                stream.flush(LONG)
        stream.flush(LONG)

    try:
        sys.setswitchinterval(1e-6)
        with Echo(ends[1]) as echo:
            threads = [beside(lambda number=number: work(number)) for number in range(4)]
            while len(echo.heard) < 4 * each or stream.pending:
                assert stream.receive(LONG, 0.0)
            for thread in threads:
                thread.join(LONG)
    finally:
        sys.setswitchinterval(switch)
    assert len(pending_replies) == len(echo.heard) == 4 * each
    assert [word for word, pending_reply in pending_replies.items() if pending_reply.got != [word]] == []
    assert (stream.unsent, stream.pending, stream.broken) == (0, 0, False)


def test_a_flush_beside_a_stuck_one_returns_and_its_bytes_go_out_in_turn(layer: ModuleType, ends: Any) -> None:
    stream = layer.Stream(ends[0])
    stream.put_command(None, (b"ECHO", b"x" * 500_000, b"a"))
    stuck = beside(lambda: stream.flush(LONG))
    assert ends[1].recv(1, socket.MSG_PEEK)  # it is sending, and cannot go on until somebody reads
    stream.put_command(None, (b"ECHO", b"b"))
    stream.flush(0.0)
    with Echo(ends[1]) as echo:
        while stream.pending:
            assert stream.receive(LONG, 0.0)
        stuck.join(LONG)
        assert not stuck.is_alive()
    assert echo.heard == [b"a", b"b"]


# ----------------------------------------------------------------------------------------------------------- receiving


@pytest.mark.parametrize("spin", [0.0, 1e-4])
def test_receive_tells_nothing_from_the_end(layer: ModuleType, ends: Any, spin: float) -> None:
    stream, pending_reply = layer.Stream(ends[0]), layer.PendingReply()
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
        stream = layer.Stream(ours)
        stream.put_command(None, (b"GET",))
        with pytest.raises(Broken) as caught:
            stream.receive(LONG, 0.0)
        assert caught.value.errno == errno.ECONNRESET


def test_bytes_that_nobody_asked_for_are_heard_by_usable(layer: ModuleType, ends: Any) -> None:
    stream = layer.Stream(ends[0])
    assert stream.usable() is True
    ends[1].sendall(b":1\r\n")
    assert stream.usable() is False
    assert stream.usable() is False  # looking takes nothing away
    with pytest.raises(hiredis.ProtocolError):
        stream.receive(LONG, 0.0)
    assert stream.usable() is True
    ends[1].close()
    assert stream.usable() is False


MESSAGE = b">3\r\n+message\r\n+inbox\r\n$1\r\n%b\r\n"


def test_messages_on_an_idle_connection_are_heard_and_leave_it_usable(layer: ModuleType, ends: Any) -> None:
    stream, heard = layer.Stream(ends[0]), list[Any]()
    stream.on_push = lambda push: heard.append(push[2])
    for count in (1, 2, 1500):  # more than is read at once
        ends[1].sendall(b"".join(MESSAGE % b"%d" % (n % 10) for n in range(count)))
        assert stream.usable() is True
        assert heard == [b"%d" % (n % 10) for n in range(count)]
        heard.clear()
    assert stream.usable() is True and heard == [] and not stream.broken


@pytest.mark.parametrize("behind", [b":1\r\n", b"_\r\n", b"?\r\n", b":", b"$3\r\nab", b"", None], ids=repr)
def test_what_is_no_message_is_not_for_an_idle_connection(layer: ModuleType, ends: Any, behind: bytes | None) -> None:
    """Half a reply neither: its other half would be taken for the reply to what is asked next."""
    stream, heard = layer.Stream(ends[0]), list[Any]()
    stream.on_push = lambda push: heard.append(push[2])
    ends[1].sendall(MESSAGE % b"a")
    assert stream.usable() is True and heard == [b"a"]
    ends[1].sendall(MESSAGE % b"b" + (behind or b""))
    if behind is None:
        ends[1].close()
    assert stream.usable() is (behind == b"")
    assert heard == ([b"a"] if behind in (b":1\r\n", b"_\r\n", b"?\r\n") else [b"a", b"b"])


def test_messages_that_nobody_hears_make_a_connection_unusable(layer: ModuleType, ends: Any) -> None:
    """It never subscribed, so what comes is not for it."""
    stream = layer.Stream(ends[0])
    ends[1].sendall(MESSAGE % b"a")
    assert [stream.usable() for _ in range(2)] == [False, False]


def test_usable_reads_nothing_where_somebody_waits_for_it(layer: ModuleType, ends: Any) -> None:
    stream, pending_reply, heard = layer.Stream(ends[0]), layer.PendingReply(), list[Any]()
    stream.on_push = lambda push: heard.append(push[2])
    stream.put_command(pending_reply, (b"GET",))
    ends[1].sendall(MESSAGE % b"a" + b":1\r\n")
    assert stream.usable() is True and (heard, pending_reply.ready) == ([], False)
    assert stream.exchange(pending_reply, LONG, 0.0) and (heard, pending_reply.reply) == ([b"a"], 1)
    assert stream.lead(layer.PendingReply(), asleep())
    ends[1].sendall(MESSAGE % b"b")
    assert stream.usable() is True and heard == [b"a"]


def test_the_rest_of_a_message_may_come_later(layer: ModuleType, ends: Any) -> None:
    """As it was cut behind a reply: the connection is as good as before."""
    stream, pending_reply, heard = layer.Stream(ends[0]), layer.PendingReply(), list[Any]()
    stream.on_push = lambda push: heard.append(push[2])
    whole = MESSAGE % b"a"
    stream.put_command(pending_reply, (b"GET",))
    ends[1].sendall(b":1\r\n" + whole[:9])
    assert stream.exchange(pending_reply, LONG, 0.0)
    assert stream.usable() is True and heard == []
    ends[1].sendall(whole[9:])
    assert stream.usable() is True and heard == [b"a"]


def test_exchange_reads_until_its_own_ticket_and_serves_those_before_it(layer: ModuleType, ends: Any) -> None:
    stream, pending_reply, later = layer.Stream(ends[0]), layer.PendingReply(), layer.PendingReply()
    before = Slot()
    with Echo(ends[1], chunk=7):
        stream.put_calls(before, [(b"ECHO", b"a"), (b"ECHO", b"b")])
        stream.put_command(pending_reply, (b"ECHO", b"c"))
        assert stream.exchange(pending_reply, LONG, 0.0) is True
        assert (before.got, pending_reply.reply) == ([[b"a", b"b"]], b"c")
        assert stream.exchange(pending_reply, 0.0, 0.0) is True  # it is there already
    stream.put_command(later, (b"ECHO", b"d"))
    with pytest.raises((EOFError, OSError)):
        stream.exchange(later, LONG, 0.0)


def test_exchange_ends_when_its_time_is_over_and_leaves_the_slot(layer: ModuleType, ends: Any) -> None:
    stream, pending_reply = layer.Stream(ends[0]), layer.PendingReply()
    stream.put_command(pending_reply, (b"GET",))
    for timeout in (0.0, 0.003, -1.0):
        assert stream.exchange(pending_reply, timeout, 0.0) is False
    assert (stream.pending, stream.unsent, stream.broken) == (1, 0, False)
    ends[1].sendall(b":7\r\n")
    assert stream.exchange(pending_reply, LONG, 0.0) is True
    assert pending_reply.reply == 7


def test_a_wake_up_that_brings_no_byte_is_not_the_end_of_the_wait(layer: ModuleType, ends: Any) -> None:
    """Somebody else takes the bytes between the wake-up and the look, again and again."""
    stream, pending_reply = layer.Stream(ends[0]), layer.PendingReply()
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
def test_a_timeout_of_many_years_is_a_timeout(layer: ModuleType, ends: Any, timeout: float) -> None:
    stream, pending_reply, word = layer.Stream(ends[0]), layer.PendingReply(), b"x" * 50_000
    with Echo(ends[1]):
        stream.put_command(pending_reply, (b"ECHO", word))  # more than the socket takes at once: sending waits as well
        assert stream.exchange(pending_reply, timeout, 1e-4) is True
    assert pending_reply.reply == word


# ----------------------------------------------------------------------------------------------------------------- TLS


def anonymous(side: int) -> ssl.SSLContext:
    """TLS without certificates: enough for the framing, which is what is tested here."""
    context = ssl.SSLContext(side)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers("AECDH-AES128-SHA:@SECLEVEL=0")
    return context


def test_half_a_tls_record_is_waited_for() -> None:
    """A wake-up that brings no reply is not the end of the wait."""
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
        stream, pending_reply = layer.Stream(client), layer.PendingReply()
        stream.put_command(pending_reply, (b"GET",))
        stream.flush(LONG)
        server.write(b"$3\r\nabc\r\n")
        record = outgoing.read()
        pieces, real = iter([record[:9], record[9:20], record[20:]]), client.recv

        def recv(*args: Any) -> bytes:
            try:
                return real(*args)
            except ssl.SSLWantReadError:  # each look that finds nothing brings the next piece
                theirs.sendall(next(pieces))
                raise

        client.recv = recv  # type: ignore[method-assign]
        assert stream.exchange(pending_reply, LONG, 0.0) is True
        assert pending_reply.reply == b"abc"
        client.close()


# ------------------------------------------------------------------------------------------------------------- signals


@contextlib.contextmanager
def interrupting() -> Iterator[Callable[[threading.Event], None]]:
    """Gives a function that sends signals to this thread until an event is set; their handler raises Interrupt."""
    main = threading.get_ident()
    assert threading.current_thread() is threading.main_thread()
    armed = threading.Event()

    def handler(number: int, frame: FrameType | None) -> None:
        if armed.is_set():
            armed.clear()
            raise Interrupt

    def bother(over: threading.Event) -> None:
        armed.set()
        while not over.wait(0.01):
            signal.pthread_kill(main, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        yield bother
    finally:
        armed.clear()
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("verb", ["receive", "exchange"])
def test_a_signal_that_raises_while_waiting_leaves_the_pipe_in_step(layer: ModuleType, ends: Any, verb: str) -> None:
    stream, pending_replies = layer.Stream(ends[0]), [layer.PendingReply() for _ in range(4)]
    for pending_reply in pending_replies:
        stream.put_command(pending_reply, (b"GET",))
    stream.flush(LONG)
    ends[1].sendall(b":0\r\n$8\r\nhalf")
    assert stream.receive(LONG, 0.0)
    over = threading.Event()
    with interrupting() as bother:
        thread = beside(lambda: bother(over))
        with pytest.raises(Interrupt):
            stream.receive(LONG, 0.0) if verb == "receive" else stream.exchange(pending_replies[3], LONG, 0.0)
        over.set()
        thread.join(LONG)
    assert not stream.broken
    ends[1].sendall(b"half\r\n:2\r\n:3\r\n")
    assert stream.exchange(pending_replies[3], LONG, 0.0)
    assert [pending_reply.reply for pending_reply in pending_replies] == [0, b"halfhalf", 2, 3]


def test_a_signal_that_raises_while_sending_breaks_the_pipe(layer: ModuleType, ends: Any) -> None:
    stream, pending_reply = layer.Stream(ends[0]), Slot()
    stream.put_command(pending_reply, (b"SET", b"x" * 2_000_000))
    over = threading.Event()
    with interrupting() as bother:
        thread = beside(lambda: bother(over))
        with pytest.raises(Interrupt):
            stream.flush(LONG)
        over.set()
        thread.join(LONG)
    assert stream.broken  # half a command is out: nothing may follow it
    assert stream.drain([]) == [pending_reply]


def test_a_signal_that_does_not_raise_interrupts_nothing(layer: ModuleType, ends: Any) -> None:
    stream, pending_reply, heard = layer.Stream(ends[0]), layer.PendingReply(), threading.Event()
    stream.put_command(pending_reply, (b"GET",))
    before = signal.signal(signal.SIGUSR1, lambda number, frame: heard.set())
    main = threading.get_ident()

    def bother() -> None:
        while not heard.wait(0.01):
            signal.pthread_kill(main, signal.SIGUSR1)
        ends[1].sendall(b":1\r\n")

    try:
        thread = beside(bother)
        assert stream.exchange(pending_reply, LONG, 0.0) is True
        thread.join(LONG)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert pending_reply.reply == 1


def test_an_interrupt_at_any_point_of_receive_shifts_no_reply() -> None:
    """In Python an interrupt can come between any two steps; what it may not do is put a reply into another's slot."""
    layer = _fallback
    data = b":0\r\n>1\r\n+push\r\n:1\r\n:2\r\n"
    for step in itertools.count(1):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            stream, pending_replies = layer.Stream(ours), [layer.PendingReply() for _ in range(5)]
            for pending_reply in pending_replies:
                stream.put_command(pending_reply, (b"GET",))
                pending_reply.wake = asleep()
            wakes = [pending_reply.wake for pending_reply in pending_replies]
            theirs.sendall(data)
            interrupted = raise_at(step, {str(layer.__file__)}, lambda stream=stream: stream.receive(LONG, 0.0))
            if not stream.broken:
                theirs.sendall(b":3\r\n:4\r\n")
                while not pending_replies[4].ready and stream.receive(0.0, 0.0):
                    pass
                assert all(pending_reply.ready for pending_reply in pending_replies), f"point {step}"
            assert [t.reply for t in pending_replies if t.ready] == [
                n for n, t in enumerate(pending_replies) if t.ready
            ], f"{step}"
            for pending_reply in stream.drain([]):  # those who are told that the connection broke
                pending_reply.set_result("broken")
            assert not any(wake.locked() for wake in wakes), f"point {step}: nobody sleeps on"
            if not interrupted:
                assert step > 25
                break


def test_an_interrupt_at_any_point_of_flush_loses_no_command_in_silence() -> None:
    layer = _fallback
    for step in itertools.count(1):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.setblocking(False)
            stream = layer.Stream(ours)
            stream.put_command(None, (b"ONE",))
            interrupted = raise_at(step, {str(layer.__file__)}, lambda stream=stream: stream.flush(LONG))
            if not stream.broken:
                stream.put_command(None, (b"TWO",))
                stream.flush(LONG)
                assert theirs.recv(1000) == resp.encode("ONE") + resp.encode("TWO"), f"point {step}"
            if not interrupted:
                assert step > 8
                break


def test_a_pipe_without_a_socket_says_so(layer: ModuleType) -> None:
    stream = layer.Stream()
    stream.put_command(None, (b"PING",))
    with pytest.raises((OSError, AttributeError)):
        stream.flush(0.0)


def test_a_handler_raises_whenever_it_strikes_who_waits(layer: ModuleType) -> None:
    """Also as the time ends for which the socket waits by itself, over TCP: a signal then shows as no error there, and
    the wait may go on for seconds."""

    def strike(number: int, frame: FrameType | None) -> None:
        raise Interrupt

    before = signal.signal(signal.SIGALRM, strike)
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            ours = socket.create_connection(server.getsockname())
            theirs, _ = server.accept()
        with ours, theirs:
            stream = layer.Stream(ours)
            for after in range(940, 1060, 8):
                start = time.monotonic()
                with pytest.raises(Interrupt):
                    signal.setitimer(signal.ITIMER_REAL, after / 10_000)
                    while stream.receive(LONG, 0.0) is False:
                        assert time.monotonic() < start + LONG, "nothing struck"
                assert time.monotonic() < start + LONG / 2, "it struck when the wait was over"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
