"""Push messages in streams of the core and the fallback: each is received once, and none is mistaken for a reply.

On sockets: test_stream_socket.py and test_stream_sharing.py.
"""

from __future__ import annotations

import gc
import tracemalloc
from types import ModuleType
from typing import Any

import hiredis
import pytest
from support.pending import LoggedReply, packed, shown

MESSAGE = b">3\r\n+message\r\n+channel\r\n+%b\r\n"
SUBSCRIBED = b">3\r\n$9\r\nsubscribe\r\n$7\r\nchannel\r\n:1\r\n"


def test_the_reply_to_subscribe_is_delivered_as_a_reply(layer: ModuleType) -> None:
    log, received, stream, pending_reply = list[Any](), list[Any](), layer.Stream(), layer.PendingReply()
    stream.on_push = received.append
    stream.put_command(LoggedReply(log, 0), (b"SUBSCRIBE", b"channel"))
    stream.put_command(pending_reply, (b"PING",))
    stream.feed(MESSAGE % b"early" + SUBSCRIBED + MESSAGE % b"late" + b"+PONG\r\n")
    assert [number for number, _ in log] == [0] and log[0][1][1] == [shown(b"subscribe"), shown(b"channel"), shown(1)]
    assert [push[2] for push in received] == [b"early", b"late"]
    assert (pending_reply.reply, stream.pending) == (b"PONG", 0)


def test_a_subscribe_that_is_refused_is_answered_with_the_error(layer: ModuleType) -> None:
    log, received, stream = list[Any](), list[Any](), layer.Stream()
    stream.on_push = received.append
    stream.put_command(LoggedReply(log, 0), (b"SUBSCRIBE", b"channel"))
    stream.feed(b"-NOPERM this user has no permissions\r\n")
    assert log == [(0, ("ReplyError", "NOPERM this user has no permissions"))]
    assert (received, stream.pending) == ([], 0)


def test_an_unrequested_confirmation_is_an_excess_reply(layer: ModuleType) -> None:
    stream, received = layer.Stream(), list[Any]()
    stream.on_push = received.append
    with pytest.raises(hiredis.ProtocolError, match="nobody asked for"):
        stream.feed(MESSAGE % b"a" + SUBSCRIBED)
    assert stream.broken and received == [], "nothing of an invalid chunk is delivered"


@pytest.mark.parametrize("bytewise", [False, True], ids=["whole", "byte by byte"])
def test_messages_come_once_in_order_behind_the_replies(layer: ModuleType, bytewise: bool) -> None:
    """The reply that an entry is queued comes before the message that it was granted, so it must be delivered first."""
    log, stream = list[Any](), layer.Stream()
    stream.on_push = lambda push: log.append(("received", push[2]))
    for number in range(3):
        stream.put_command(LoggedReply(log, number), (b"GET",))
    data = b":0\r\n" + MESSAGE % b"a" + b":1\r\n" + MESSAGE % b"b" + MESSAGE % b"c" + b":2\r\n"
    for piece in [data[i : i + 1] for i in range(len(data))] if bytewise else [data]:
        stream.feed(piece)
    replies = [(number, shown(number)) for number in range(3)]
    messages = [("received", word) for word in (b"a", b"b", b"c")]
    if bytewise:
        assert log == [replies[0], messages[0], replies[1], *messages[1:], replies[2]]
    else:
        assert log == [*replies, *messages]


def test_a_message_or_a_reply_may_queue_commands(layer: ModuleType) -> None:
    """An undo does so when it was not carried out; also where the ring buffer of pending replies has to grow."""
    log, stream = list[Any](), layer.Stream()

    class Again(LoggedReply):
        def set_result(self, reply: Any) -> None:
            super().set_result(reply)
            for number in range(40):
                stream.put_calls(LoggedReply(log, 1000 + number), [(b"AGAIN", b"%d" % number)])

    stream.on_push = lambda push: stream.put_command(LoggedReply(log, 2000), (b"RECEIVED", push[2]))
    stream.put_command(Again(log, 0), (b"GET",))
    stream.put_calls(LoggedReply(log, 1), [(b"GET",), (b"GET",)])
    stream.put_command(LoggedReply(log, 2), (b"GET",))
    stream.take_output()
    stream.feed(MESSAGE % b"a" + b":0\r\n:1\r\n:2\r\n:3\r\n")
    assert [number for number, _ in log] == [0, 1, 2]
    assert stream.take_output() == b"".join(packed(b"AGAIN", b"%d" % n) for n in range(40)) + packed(b"RECEIVED", b"a")
    stream.feed(b":9\r\n" * 41)
    assert [number for number, _ in log] == [0, 1, 2, *range(1000, 1040), 2000] and stream.pending == 0


def test_a_message_callback_that_raises_breaks_the_stream(layer: ModuleType) -> None:
    def broken(push: Any) -> None:
        raise RuntimeError("the event loop is closed")

    stream, pending_reply = layer.Stream(), layer.PendingReply()
    stream.on_push = broken
    stream.put_command(pending_reply, (b"GET",))
    with pytest.raises(RuntimeError, match="closed"):
        stream.feed(b":1\r\n" + MESSAGE % b"a")
    assert pending_reply.reply == 1 and stream.broken
    with pytest.raises(hiredis.ProtocolError, match="out of step"):
        stream.feed(MESSAGE % b"b")


def test_messages_are_freed(layer: ModuleType) -> None:
    """Hours of messages over a connection without a callback must not pile up."""
    stream = layer.Stream()
    chunk = MESSAGE % (b"x" * 1000) * 50
    stream.feed(chunk)
    gc.collect()
    tracemalloc.start()
    try:
        start = tracemalloc.get_traced_memory()[0]
        for _ in range(40):
            stream.feed(chunk)
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] - start < 100_000
    finally:
        tracemalloc.stop()


def test_message_waiters_become_readers_after_reply_waiters(layer: ModuleType, ends: Any) -> None:
    class Wake:
        def release(self) -> None: ...

    stream = layer.SocketStream(ends[0])
    asking, awake, gone, first, second = (layer.PendingReply() for _ in range(5))
    asking.wake = gone.wake = first.wake = second.wake = Wake()
    gone.cancelled = True
    for watching in (awake, gone, first, second):
        stream.listen(watching)
    assert stream.next_reader() is first and stream.pending == 0
    stream.put_command(asking, (b"GET",))
    assert stream.next_reader() is asking
    stream.feed(b":1\r\n")
    assert stream.next_reader() is first
    for _ in range(2):
        stream.unlisten(first)
    assert stream.next_reader() is second
    awake.wake = Wake()
    assert stream.next_reader() is awake
    assert stream.take_pending([]) == [] and stream.next_reader() is awake, (
        "a message waiter has no reply that could be lost"
    )
    for pending_reply in (awake, gone, second):
        stream.unlisten(pending_reply)
    assert stream.next_reader() is None
