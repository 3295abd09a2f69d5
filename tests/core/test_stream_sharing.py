"""Which caller reads and which one sends on a shared stream, core and fallback: many threads, one socket.

What must never happen: a command is not sent, a reply is not read, a caller sleeps although it is the next reader, the
role of the reader is lost with the caller that had it.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import socket
import sys
from types import ModuleType
from typing import Any

import pytest
from hiredis import ProtocolError
from support import resp
from support.pending import LoggedReply
from support.streams import FILES, LONG, Echo, asleep, beside, raise_at

from fastlock import _fallback
from fastlock._stream_errors import UnsolicitedData


def test_the_next_reader_is_the_first_that_sleeps_and_waits(layer: ModuleType, ends: Any) -> None:
    class Wake:
        def release(self) -> None: ...

    stream = layer.SocketStream(ends[0])
    assert stream.next_reader() is None
    awake, gone, first, second = (layer.PendingReply() for _ in range(4))
    gone.wake = first.wake = second.wake = Wake()
    gone.cancelled = True
    stream.put_command(None, (b"X",))
    stream.put_command(LoggedReply([], 0), (b"X",))
    stream.put_command(awake, (b"X",))
    stream.put_command(gone, (b"X",))
    assert stream.next_reader() is None
    stream.put_calls(first, [(b"X",), (b"X",)])
    stream.put_command(second, (b"X",))
    assert stream.next_reader() is first
    stream.feed(b":1\r\n" * 5)
    assert stream.next_reader() is first
    stream.feed(b":1\r\n")
    assert stream.next_reader() is second


def test_a_reader_that_resigns_wakes_the_next_one_once(layer: ModuleType, ends: Any) -> None:
    stream, pending_replies = layer.SocketStream(ends[0]), [layer.PendingReply() for _ in range(4)]
    wakes = [asleep() for _ in pending_replies]
    for pending_reply in pending_replies:
        stream.put_command(pending_reply, (b"GET",))
    assert [stream.lead(pending_reply, wake) for pending_reply, wake in zip(pending_replies, wakes, strict=True)] == [
        True,
        False,
        False,
        False,
    ]
    assert pending_replies[0].wake is None
    pending_replies[1].cancelled = True
    assert [stream.leads(pending_reply) for pending_reply in pending_replies] == [True, False, False, False]
    stream.resign(pending_replies[3])  # a caller that is not the reader hands nothing on
    assert stream.leads(pending_replies[0])
    for _ in range(2):
        stream.resign(pending_replies[0])
        assert [stream.leads(pending_reply) for pending_reply in pending_replies] == [False, False, True, False]
        assert [wake.locked() for wake in wakes] == [True, True, False, True]
    stream.feed(b":1\r\n" * 4)
    stream.resign(pending_replies[2])
    assert not any(stream.leads(pending_reply) for pending_reply in pending_replies)
    assert stream.lead(layer.PendingReply(), asleep()) is True


def get(layer: ModuleType) -> Any:
    return layer.Template(b"GET", 0)


def nobody_reads(layer: ModuleType, stream: Any) -> bool:
    """Whether there is no reader, so that a new caller may become it."""
    pending_reply = layer.PendingReply()
    free: bool = stream.lead(pending_reply, asleep())
    stream.resign(pending_reply)
    return free


def test_round_trip_sends_waits_and_frees_the_stream(layer: ModuleType, ends: Any) -> None:
    stream = layer.SocketStream(ends[0])
    with Echo(ends[1]):
        for word in (b"a", b"b" * 60_000):
            assert stream.round_trip(get(layer), word, b"", 0, LONG, 0.0) == word
            assert (stream.pending, stream.unsent, nobody_reads(layer, stream)) == (0, 0, True)


def test_round_trip_is_refused_on_a_busy_stream(layer: ModuleType, ends: Any) -> None:
    stream, other = layer.SocketStream(ends[0]), layer.PendingReply()
    assert stream.lead(other, asleep())
    assert stream.round_trip(get(layer), b"a", b"", 0, 0.0, 0.0) is layer.BUSY
    assert (stream.pending, stream.unsent, stream.leads(other)) == (0, 0, True)
    stream.resign(other)
    stream.put_command(other, (b"GET",))
    before = stream.unsent
    assert stream.round_trip(get(layer), b"a", b"", 0, 0.0, 0.0) is layer.BUSY
    assert (stream.pending, stream.unsent, nobody_reads(layer, stream)) == (1, before, True)


@pytest.mark.parametrize("with_callback", [False, True], ids=["no callback", "callback"])
@pytest.mark.parametrize("found", [b":1\r\n", b"$3\r\nab", b""], ids=["a reply", "half a reply", "the end"])
def test_round_trip_sends_nothing_after_unrequested_data(
    layer: ModuleType, ends: Any, found: bytes, with_callback: bool
) -> None:
    stream, received = layer.SocketStream(ends[0]), list[Any]()
    stream.on_push = received.append if with_callback else None
    ends[1].sendall(found) if found else ends[1].shutdown(socket.SHUT_WR)
    with pytest.raises(UnsolicitedData):
        stream.round_trip(get(layer), b"a", b"", 0, LONG, 0.0)
    assert (stream.pending, stream.unsent, nobody_reads(layer, stream)) == (0, 0, True)
    ends[1].setblocking(False)
    with pytest.raises(BlockingIOError):
        ends[1].recv(1)
    assert received == []


def test_round_trip_delivers_waiting_messages_first(layer: ModuleType, ends: Any) -> None:
    stream, received = layer.SocketStream(ends[0]), list[Any]()
    stream.on_push = received.append
    ends[1].sendall(message(b"a") + message(b"b"))
    with Echo(ends[1]) as echo:
        assert stream.round_trip(get(layer), b"c", b"", 0, LONG, 0.0) == b"c"
        assert echo.received == [b"c"] and [push[2] for push in received] == [b"a", b"b"]


@pytest.mark.parametrize("queued", [False, True], ids=["reads", "queued"])
def test_round_trip_yields_to_callers_of_its_callback(layer: ModuleType, ends: Any, queued: bool) -> None:
    """The callback may wake a caller that is quicker, or queue a command itself. Nothing may be lost by it."""
    stream, other = layer.SocketStream(ends[0]), layer.PendingReply()
    stream.on_push = lambda push: (
        stream.put_command(other, (b"GET", b"other")) if queued else stream.lead(other, asleep())
    )
    ends[1].sendall(message(b"a"))
    with Echo(ends[1]):
        answer = stream.round_trip(get(layer), b"mine", b"", 0, LONG, 0.0)
        if answer is layer.BUSY:
            assert stream.pending == queued and stream.leads(other) is not queued
            stream.resign(other)
            answer = (
                stream.round_trip(get(layer), b"mine", b"", 0, LONG, 0.0)
                if not queued
                else one_command(layer, stream, b"mine", True)
            )
        assert answer == b"mine" and other.reply == (b"other" if queued else None)


def test_a_message_waiter_is_woken_to_read_next(layer: ModuleType, ends: Any) -> None:
    """Without it no caller would read, as the stream has no thread of its own."""
    stream, reader, received = layer.SocketStream(ends[0]), layer.PendingReply(), list[Any]()
    listeners, wakes = [layer.PendingReply() for _ in range(2)], [asleep() for _ in range(2)]

    def on_push(push: Any) -> None:
        received.append(push[2])
        listeners[len(received) - 1].set_result(None)

    stream.on_push = on_push
    stream.put_command(reader, (b"GET", b"a"))
    assert stream.lead(reader, asleep())
    for pending_reply, wake in zip(listeners, wakes, strict=True):
        stream.listen(pending_reply)
        assert stream.lead(pending_reply, wake) is False
    ends[1].sendall(b":1\r\n")
    assert stream.exchange(reader, LONG, 0.0)
    stream.resign(reader)
    assert stream.leads(listeners[0]) and [wake.locked() for wake in wakes] == [False, True]
    ends[1].sendall(message(b"one"))
    assert stream.exchange(listeners[0], LONG, 0.0) and received == [b"one"]
    listeners[0].cancelled = True
    stream.unlisten(listeners[0])
    stream.resign(listeners[0])
    assert stream.leads(listeners[1]) and not wakes[1].locked()
    assert stream.exchange(listeners[1], 0.005, 0.0) is False, "no message came for it"
    listeners[1].cancelled = True
    stream.unlisten(listeners[1])
    stream.resign(listeners[1])
    assert nobody_reads(layer, stream) and stream.pending == 0


def test_a_message_waiter_is_served_by_any_reader(layer: ModuleType, ends: Any) -> None:
    """The waiter is woken by its pending reply, and is not made the reader once it was woken."""
    stream, reader, listener, wake = layer.SocketStream(ends[0]), layer.PendingReply(), layer.PendingReply(), asleep()
    stream.on_push = lambda push: listener.set_result(push[2])
    stream.put_command(reader, (b"GET", b"a"))
    assert stream.lead(reader, asleep())
    stream.listen(listener)
    assert stream.lead(listener, wake) is False
    ends[1].sendall(message(b"now") + b":1\r\n")
    assert stream.exchange(reader, LONG, 0.0) and wake.acquire(timeout=LONG)
    stream.resign(reader)
    assert (listener.reply, reader.reply) == (b"now", 1)
    assert not stream.leads(listener) and nobody_reads(layer, stream)


def test_a_reading_message_waiter_keeps_the_stream_shared(layer: ModuleType, ends: Any) -> None:
    """While it reads, no caller has the stream for itself, and a caller that shares it is woken by its reply."""
    stream, listener, second, wake = layer.SocketStream(ends[0]), layer.PendingReply(), layer.PendingReply(), asleep()
    stream.on_push = lambda push: listener.set_result(push[2])
    stream.listen(listener)
    assert stream.lead(listener, asleep())
    assert stream.usable() is True, "the reader notices any problem"
    assert stream.round_trip(get(layer), b"a", b"", 0, LONG, 0.0) is layer.BUSY
    reading = beside(lambda: stream.exchange(listener, LONG, 0.0))
    stream.put_command(second, (b"GET", b"b"))
    assert stream.lead(second, wake) is False
    stream.flush(LONG)
    assert resp.words(ends[1].recv(1000)) == [b"GET", b"b"]
    ends[1].sendall(b":2\r\n")
    assert wake.acquire(timeout=LONG) and second.reply == 2 and not stream.leads(second)
    assert reading.is_alive()
    ends[1].sendall(message(b"go"))
    reading.join(LONG)
    assert listener.reply == b"go"
    stream.unlisten(listener)
    stream.resign(listener)
    assert nobody_reads(layer, stream)


def message(word: bytes) -> bytes:
    return b">3\r\n+message\r\n+channel\r\n$%d\r\n%b\r\n" % (len(word), word)


def test_round_trip_times_out_and_keeps_its_pending_reply(layer: ModuleType, ends: Any) -> None:
    stream, next_one = layer.SocketStream(ends[0]), layer.PendingReply()
    with pytest.raises(TimeoutError, match="no reply"):
        stream.round_trip(get(layer), b"a", b"", 0, 0.005, 0.0)
    assert (stream.pending, nobody_reads(layer, stream), stream.broken) == (1, True, False)
    stream.put_command(next_one, (b"GET",))
    assert stream.next_reader() is None, "a caller that gave up is no next reader"
    ends[1].sendall(b":1\r\n:2\r\n")
    assert stream.exchange(next_one, LONG, 0.0)
    assert next_one.reply == 2


def test_a_caller_that_queues_during_a_round_trip_reads_next(layer: ModuleType, ends: Any) -> None:
    stream, second, wake = layer.SocketStream(ends[0]), layer.PendingReply(), asleep()
    first: list[Any] = []
    asking = beside(lambda: first.append(stream.round_trip(get(layer), b"a", b"", 0, LONG, 0.0)))
    assert resp.words(ends[1].recv(1000)) == [b"GET", b"a"]
    stream.put_command(second, (b"GET", b"b"))
    assert stream.lead(second, wake) is False
    ends[1].sendall(b":1\r\n")
    assert wake.acquire(timeout=LONG)
    asking.join(LONG)
    assert (first, second.ready, stream.leads(second)) == ([1], False, True)
    ends[1].sendall(b":2\r\n")
    assert stream.exchange(second, LONG, 0.0)
    stream.resign(second)
    assert (second.reply, stream.pending) == (2, 0)


@pytest.mark.parametrize("shared", [False, True], ids=["round trip", "exchange"])
def test_commands_queued_while_another_caller_reads_are_sent(layer: ModuleType, ends: Any, shared: bool) -> None:
    """The reader has sent its command and will not send again: later commands must not be left to it."""
    stream, second, wake = layer.SocketStream(ends[0]), layer.PendingReply(), asleep()
    first: list[Any] = []
    reader = beside(lambda: first.append(one_command(layer, stream, b"a", shared)))
    assert resp.words(ends[1].recv(1000)) == [b"GET", b".", b"a"]
    for word in (b"b", b"c", b"d"):  # the first as soon as the reader's bytes are out, the others while it sleeps
        stream.put_command(second if word == b"b" else None, (b"GET", word))
        assert word != b"b" or stream.lead(second, wake) is False
        stream.flush(LONG)
        assert resp.words(ends[1].recv(1000)) == [b"GET", word]
    ends[1].sendall(b":1\r\n:2\r\n:3\r\n:4\r\n")
    reader.join(LONG)
    assert (first, wake.acquire(timeout=LONG), second.reply, stream.pending) == ([1], True, 2, 0)


@pytest.mark.parametrize("shared", [False, True], ids=["round trip", "exchange"])
def test_commands_queued_during_a_send_follow_it(layer: ModuleType, ends: Any, shared: bool) -> None:
    """No caller waits for a blocked sender, so the sender must check for new commands before it reads."""
    stream, second, wake = layer.SocketStream(ends[0]), layer.PendingReply(), asleep()
    first: list[Any] = []
    sender = beside(lambda: first.append(one_command(layer, stream, b"a", shared, b"x" * 500_000)))
    assert ends[1].recv(1, socket.MSG_PEEK)  # the sender is blocked until the test reads
    stream.put_command(second, (b"GET", b"b"))
    assert stream.lead(second, wake) is False
    for _ in range(2):
        stream.flush(0.0)
    with Echo(ends[1]) as echo:
        sender.join(LONG)
        assert first == [b"a"] and wake.acquire(timeout=LONG)
        if not second.ready:
            assert stream.leads(second) and stream.exchange(second, LONG, 0.0)
        assert second.reply == b"b"
    assert echo.received == [b"a", b"b"]


def one_command(layer: ModuleType, stream: Any, word: bytes, shared: bool, padding: bytes = b".") -> Any:
    """The reply to GET padding word; requested as the stream's only user, or as the reader of several users."""
    if not shared:
        return stream.round_trip(layer.Template(b"GET", 0, 1), padding, word, 0, LONG, 0.0)
    pending_reply = layer.PendingReply()
    stream.put_command(pending_reply, (b"GET", padding, word))
    assert stream.lead(pending_reply, asleep()) and stream.exchange(pending_reply, LONG, 0.0)
    stream.resign(pending_reply)
    return pending_reply.reply


@pytest.mark.parametrize("gather", [1, 8], ids=["each", "together"])
@pytest.mark.parametrize("seed", range(3))
def test_many_threads_on_one_stream_are_all_served(layer: ModuleType, ends: Any, seed: int, gather: int) -> None:
    """Used as by the transport, with more threads than connections: alone where that is possible, else in turns.

    A server that answers all commands together, or none, never answers if one command is left unsent.
    """
    stream, parts, switch = layer.SocketStream(ends[0]), get(layer), sys.getswitchinterval()
    wrong: list[Any] = []

    def share(word: bytes) -> Any:
        pending_reply, wake = layer.PendingReply(), asleep()
        stream.put_command(pending_reply, (b"GET", word))
        if not stream.lead(pending_reply, wake):
            stream.flush(LONG)
            if not pending_reply.ready and not wake.acquire(timeout=10):
                wrong.append((word[:20], "was stranded"))
        if stream.leads(pending_reply):
            stream.exchange(pending_reply, 10.0, 0.0)
        pending_reply.cancelled = not pending_reply.ready
        stream.resign(pending_reply)
        return pending_reply.reply

    def work(number: int) -> None:
        rng = random.Random(seed * 100 + number)
        for count in range(600):
            word = b"%d:%d:" % (number, count) + b"x" * rng.choice((0, 0, 0, 500, 1500))
            reply = stream.round_trip(parts, word, b"", 0, LONG, 0.0) if rng.random() < 0.8 else layer.BUSY
            if (share(word) if reply is layer.BUSY else reply) != word:
                wrong.append((word[:20], reply))
            if wrong:
                return

    try:
        sys.setswitchinterval(1e-6)
        with Echo(ends[1], gather=gather) as echo:
            threads = [beside(lambda number=number: work(number)) for number in range(8)]
            for thread in threads:
                thread.join(LONG)
    finally:
        sys.setswitchinterval(switch)
    assert wrong == [] and len(echo.received) == 8 * 600
    assert (stream.unsent, stream.pending, stream.broken, nobody_reads(layer, stream)) == (0, 0, False, True)


def test_an_interrupted_resign_leaves_a_next_reader(ends: Any) -> None:
    """The interrupted caller resigns again, as in the transport: then there is a reader, or any caller may become
    it."""
    layer = _fallback
    for step in itertools.count(1):
        stream, wake = layer.SocketStream(ends[0]), asleep()
        pending_reply, other = layer.PendingReply(), layer.PendingReply()

        def resign(
            stream: Any = stream, pending_reply: Any = pending_reply, other: Any = other, wake: Any = wake
        ) -> None:
            stream.lead(pending_reply, None)
            stream.put_command(other, (b"GET",))
            stream.lead(other, wake)
            stream.resign(pending_reply)

        interrupted = raise_at(step, FILES, resign)
        stream.resign(pending_reply)
        assert not stream.leads(pending_reply), f"point {step}"
        if stream.leads(other):
            assert not wake.locked(), f"point {step}"
        else:
            assert nobody_reads(layer, stream), f"point {step}"
        if not interrupted:
            assert step > 5
            break


@pytest.mark.parametrize("replied", [False, True], ids=["no reply", "a reply"])
def test_an_interrupted_round_trip_leaves_no_reader(replied: bool) -> None:
    """The pending reply of a round trip is private, so no other code can resign for it: after an interrupt at any
    point nobody reads."""
    layer = _fallback
    for step in itertools.count(1):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            stream = layer.SocketStream(ours)

            def round_trip(stream: Any = stream) -> None:
                with contextlib.suppress(TimeoutError):
                    stream.round_trip(get(layer), b"a", b"", 0, LONG if replied else 0.0, 0.0)

            with Echo(theirs) if replied else contextlib.nullcontext():
                interrupted = raise_at(step, FILES, round_trip)
                assert nobody_reads(layer, stream), f"point {step}"
            if not interrupted:
                assert step > 5
                break


def test_nothing_is_sent_behind_half_a_command(layer: ModuleType, ends: Any) -> None:
    """The server would take a later command for the rest of the first, or its reply would be taken for the first's."""
    stream, lost = layer.SocketStream(ends[0]), b"x" * 2_000_000
    with pytest.raises(TimeoutError, match="takes no more bytes"):
        stream.round_trip(get(layer), lost, b"", 0, 0.0, 0.0)
    received = b""
    ends[1].setblocking(False)
    for _ in range(2):
        with contextlib.suppress(BlockingIOError):
            while data := ends[1].recv(1 << 20):
                received += data
        pending_reply = layer.PendingReply()
        stream.put_command(pending_reply, (b"GET", b"b"))
        assert stream.lead(pending_reply, asleep())
        with pytest.raises(OSError, match="out of step"):
            stream.exchange(pending_reply, LONG, 0.0)
        with pytest.raises(OSError, match="out of step"):
            stream.flush(0.0)
        stream.resign(pending_reply)
    assert received.endswith(b"x"), "the command's end is missing, and nothing follows it"
    assert not pending_reply.ready and stream.broken


@pytest.mark.parametrize("alone", [True, False], ids=["alone", "with others"])
def test_an_interrupt_delivers_no_reply_to_another_caller(alone: bool) -> None:
    """Other callers use the connection between the interrupt and its end: each gets its own reply, or an error."""
    layer, refused = _fallback, 0
    for step in itertools.count(1):
        ours, theirs = socket.socketpair()
        with ours, theirs, Echo(theirs):
            stream, before, after = layer.SocketStream(ours), layer.PendingReply(), layer.PendingReply()

            def call(stream: Any = stream, before: Any = before) -> None:
                if alone:
                    stream.round_trip(get(layer), b"a", b"", 0, LONG, 0.0)
                else:
                    stream.put_command(before, (b"GET", b"a"))
                    stream.put_command(None, (b"GET", b"b"))
                    stream.flush(LONG)

            interrupted = raise_at(step, FILES, call)
            try:
                stream.put_command(after, (b"GET", b"c"))
                assert stream.lead(after, asleep()) and stream.exchange(after, LONG, 0.0)
                assert (after.reply, before.reply) == (b"c", None if alone or not before.ready else b"a"), step
            except (OSError, ProtocolError):
                assert stream.broken
                refused += 1
        if not interrupted:
            assert step > 20 and refused > 2
            break
