"""What the server says unasked, in the bytes layer, both implementations: heard once, and no reply is taken for it.

On sockets: test_bytes_socket.py and test_bytes_turns.py.
"""

from __future__ import annotations

import gc
import tracemalloc
from types import ModuleType
from typing import Any

import hiredis
import pytest
from support.slots import Slot, packed, shown

MESSAGE = b">3\r\n+message\r\n+inbox\r\n+%b\r\n"
SUBSCRIBED = b">3\r\n$9\r\nsubscribe\r\n$5\r\ninbox\r\n:1\r\n"


def test_the_reply_to_subscribe_goes_to_its_slot_and_is_not_heard(layer: ModuleType) -> None:
    log, heard, pipe, ticket = list[Any](), list[Any](), layer.Pipe(), layer.Ticket()
    pipe.hear = heard.append
    pipe.put_command(Slot(log, 0), (b"SUBSCRIBE", b"inbox"))
    pipe.put_command(ticket, (b"PING",))
    pipe.feed(MESSAGE % b"early" + SUBSCRIBED + MESSAGE % b"late" + b"+PONG\r\n")
    assert [number for number, _ in log] == [0] and log[0][1][1] == [shown(b"subscribe"), shown(b"inbox"), shown(1)]
    assert [push[2] for push in heard] == [b"early", b"late"]
    assert (ticket.reply, pipe.pending) == (b"PONG", 0)


def test_a_subscribe_that_is_refused_is_answered_with_the_error(layer: ModuleType) -> None:
    log, heard, pipe = list[Any](), list[Any](), layer.Pipe()
    pipe.hear = heard.append
    pipe.put_command(Slot(log, 0), (b"SUBSCRIBE", b"inbox"))
    pipe.feed(b"-NOPERM this user has no permissions\r\n")
    assert log == [(0, ("ReplyError", "NOPERM this user has no permissions"))]
    assert (heard, pipe.pending) == ([], 0)


def test_who_subscribed_without_being_asked_is_a_reply_too_many(layer: ModuleType) -> None:
    pipe, heard = layer.Pipe(), list[Any]()
    pipe.hear = heard.append
    with pytest.raises(hiredis.ProtocolError, match="nobody asked for"):
        pipe.feed(MESSAGE % b"a" + SUBSCRIBED)
    assert pipe.broken and heard == [], "nothing of a chunk that makes no sense is believed"


@pytest.mark.parametrize("bytewise", [False, True], ids=["whole", "crumbs"])
def test_messages_are_heard_once_in_order_and_behind_the_replies_of_their_chunk(
    layer: ModuleType, bytewise: bool
) -> None:
    """The reply that a place is queued comes before the message that it was granted: so it must be known by then."""
    log, pipe = list[Any](), layer.Pipe()
    pipe.hear = lambda push: log.append(("heard", push[2]))
    for number in range(3):
        pipe.put_command(Slot(log, number), (b"GET",))
    stream = b":0\r\n" + MESSAGE % b"a" + b":1\r\n" + MESSAGE % b"b" + MESSAGE % b"c" + b":2\r\n"
    for piece in [stream[i : i + 1] for i in range(len(stream))] if bytewise else [stream]:
        pipe.feed(piece)
    replies = [(number, shown(number)) for number in range(3)]
    messages = [("heard", word) for word in (b"a", b"b", b"c")]
    if bytewise:
        assert log == [replies[0], messages[0], replies[1], *messages[1:], replies[2]]
    else:
        assert log == [*replies, *messages]


def test_who_hears_may_ask_and_a_slot_may_ask_again(layer: ModuleType) -> None:
    """As an undo does, which asks in another way when it was not carried out; also where the slots have to grow."""
    log, pipe = list[Any](), layer.Pipe()

    class Again(Slot):
        def set_result(self, reply: Any) -> None:
            super().set_result(reply)
            for number in range(40):
                pipe.put_calls(Slot(log, 1000 + number), [(b"AGAIN", b"%d" % number)])

    pipe.hear = lambda push: pipe.put_command(Slot(log, 2000), (b"HEARD", push[2]))
    pipe.put_command(Again(log, 0), (b"GET",))
    pipe.put_calls(Slot(log, 1), [(b"GET",), (b"GET",)])
    pipe.put_command(Slot(log, 2), (b"GET",))
    pipe.take()
    pipe.feed(MESSAGE % b"a" + b":0\r\n:1\r\n:2\r\n:3\r\n")
    assert [number for number, _ in log] == [0, 1, 2]
    assert pipe.take() == b"".join(packed(b"AGAIN", b"%d" % n) for n in range(40)) + packed(b"HEARD", b"a")
    pipe.feed(b":9\r\n" * 41)
    assert [number for number, _ in log] == [0, 1, 2, *range(1000, 1040), 2000] and pipe.pending == 0


def test_who_raises_when_it_hears_breaks_the_pipe(layer: ModuleType) -> None:
    def broken(push: Any) -> None:
        raise RuntimeError("the event loop is closed")

    pipe, ticket = layer.Pipe(), layer.Ticket()
    pipe.hear = broken
    pipe.put_command(ticket, (b"GET",))
    with pytest.raises(RuntimeError, match="closed"):
        pipe.feed(b":1\r\n" + MESSAGE % b"a")
    assert ticket.reply == 1 and pipe.broken
    with pytest.raises(hiredis.ProtocolError, match="out of step"):
        pipe.feed(MESSAGE % b"b")


def test_messages_are_let_go(layer: ModuleType) -> None:
    """Hours of them, over a connection that nobody listens to: they must not pile up."""
    pipe = layer.Pipe()
    chunk = MESSAGE % (b"x" * 1000) * 50
    pipe.feed(chunk)
    gc.collect()
    tracemalloc.start()
    try:
        start = tracemalloc.get_traced_memory()[0]
        for _ in range(40):
            pipe.feed(chunk)
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] - start < 100_000
    finally:
        tracemalloc.stop()


def test_who_waits_for_messages_is_heir_behind_those_who_wait_for_replies(layer: ModuleType) -> None:
    class Wake:
        def release(self) -> None: ...

    pipe = layer.Pipe()
    asking, awake, gone, first, second = (layer.Ticket() for _ in range(5))
    asking.wake = gone.wake = first.wake = second.wake = Wake()
    gone.abandoned = True
    for watching in (awake, gone, first, second):
        pipe.watch(watching)
    assert pipe.heir() is first and pipe.pending == 0
    pipe.put_command(asking, (b"GET",))
    assert pipe.heir() is asking
    pipe.feed(b":1\r\n")
    assert pipe.heir() is first
    for _ in range(2):
        pipe.unwatch(first)
    assert pipe.heir() is second
    awake.wake = Wake()
    assert pipe.heir() is awake
    assert pipe.drain([]) == [] and pipe.heir() is awake, "it waits for no reply that could be lost"
    for ticket in (awake, gone, second):
        pipe.unwatch(ticket)
    assert pipe.heir() is None
