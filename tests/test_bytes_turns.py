"""Whose turn it is to read and to send on one pipe, both implementations: many threads, one socket.

What must never happen: a command that nobody sends, a reply that nobody reads, a caller who sleeps although it is his
turn, a turn that is lost with who had it.
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
from support.pipes import LONG, Echo, asleep, beside, raise_at

from fastlock import _fallback
from fastlock._broken import Unasked


def test_one_reads_and_who_resigns_wakes_the_first_who_sleeps_once(layer: ModuleType) -> None:
    pipe, tickets = layer.Pipe(), [layer.Ticket() for _ in range(4)]
    wakes = [asleep() for _ in tickets]
    for ticket in tickets:
        pipe.put_command(ticket, (b"GET",))
    assert [pipe.lead(ticket, wake) for ticket, wake in zip(tickets, wakes, strict=True)] == [True, False, False, False]
    assert tickets[0].wake is None
    tickets[1].abandoned = True
    assert [pipe.leads(ticket) for ticket in tickets] == [True, False, False, False]
    pipe.resign(tickets[3])  # who does not read gives nothing away
    assert pipe.leads(tickets[0])
    for _ in range(2):
        pipe.resign(tickets[0])
        assert [pipe.leads(ticket) for ticket in tickets] == [False, False, True, False]
        assert [wake.locked() for wake in wakes] == [True, True, False, True]
    pipe.feed(b":1\r\n" * 4)
    pipe.resign(tickets[2])
    assert not any(pipe.leads(ticket) for ticket in tickets)
    assert pipe.lead(layer.Ticket(), asleep()) is True


def get(layer: ModuleType) -> Any:
    return layer.Template(b"GET", 0)


def nobody_reads(layer: ModuleType, pipe: Any) -> bool:
    """Whether anybody may become the one who reads."""
    ticket = layer.Ticket()
    free: bool = pipe.lead(ticket, asleep())
    pipe.resign(ticket)
    return free


def test_ask_sends_and_waits_and_leaves_the_pipe_free(layer: ModuleType, ends: Any) -> None:
    pipe = layer.Pipe(ends[0])
    with Echo(ends[1]):
        for word in (b"a", b"b" * 60_000):
            assert pipe.ask(get(layer), word, b"", 0, LONG, 0.0) == word
            assert (pipe.pending, pipe.unsent, nobody_reads(layer, pipe)) == (0, 0, True)


def test_ask_does_nothing_while_others_use_the_pipe(layer: ModuleType, ends: Any) -> None:
    pipe, other = layer.Pipe(ends[0]), layer.Ticket()
    assert pipe.lead(other, asleep())
    assert pipe.ask(get(layer), b"a", b"", 0, 0.0, 0.0) is layer.BUSY
    assert (pipe.pending, pipe.unsent, pipe.leads(other)) == (0, 0, True)
    pipe.resign(other)
    pipe.put_command(other, (b"GET",))
    before = pipe.unsent
    assert pipe.ask(get(layer), b"a", b"", 0, 0.0, 0.0) is layer.BUSY
    assert (pipe.pending, pipe.unsent, nobody_reads(layer, pipe)) == (1, before, True)


@pytest.mark.parametrize("hears", [False, True], ids=["deaf", "hears"])
@pytest.mark.parametrize("found", [b":1\r\n", b"$3\r\nab", b""], ids=["a reply", "half a reply", "the end"])
def test_ask_sends_nothing_where_the_server_spoke_unasked(
    layer: ModuleType, ends: Any, found: bytes, hears: bool
) -> None:
    pipe, heard = layer.Pipe(ends[0]), list[Any]()
    pipe.hear = heard.append if hears else None
    ends[1].sendall(found) if found else ends[1].shutdown(socket.SHUT_WR)
    with pytest.raises(Unasked):
        pipe.ask(get(layer), b"a", b"", 0, LONG, 0.0)
    assert (pipe.pending, pipe.unsent, nobody_reads(layer, pipe)) == (0, 0, True)
    ends[1].setblocking(False)
    with pytest.raises(BlockingIOError):
        ends[1].recv(1)
    assert heard == []


def test_ask_hears_what_lay_there_and_goes_on(layer: ModuleType, ends: Any) -> None:
    pipe, heard = layer.Pipe(ends[0]), list[Any]()
    pipe.hear = heard.append
    ends[1].sendall(message(b"a") + message(b"b"))
    with Echo(ends[1]) as echo:
        assert pipe.ask(get(layer), b"c", b"", 0, LONG, 0.0) == b"c"
        assert echo.heard == [b"c"] and [push[2] for push in heard] == [b"a", b"b"]


@pytest.mark.parametrize("queued", [False, True], ids=["reads", "asked"])
def test_ask_does_nothing_where_others_came_while_it_heard(layer: ModuleType, ends: Any, queued: bool) -> None:
    """Who hears may wake somebody up, who is quicker; or ask something itself. Nothing may be lost by it."""
    pipe, other = layer.Pipe(ends[0]), layer.Ticket()
    pipe.hear = lambda push: pipe.put_command(other, (b"GET", b"other")) if queued else pipe.lead(other, asleep())
    ends[1].sendall(message(b"a"))
    with Echo(ends[1]):
        answer = pipe.ask(get(layer), b"mine", b"", 0, LONG, 0.0)
        if answer is layer.BUSY:
            assert pipe.pending == queued and pipe.leads(other) is not queued
            pipe.resign(other)
            answer = (
                pipe.ask(get(layer), b"mine", b"", 0, LONG, 0.0)
                if not queued
                else one_command(layer, pipe, b"mine", True)
            )
        assert answer == b"mine" and other.reply == (b"other" if queued else None)


def test_who_waits_for_messages_is_woken_to_read_when_the_reader_goes(layer: ModuleType, ends: Any) -> None:
    """Nobody else would: there is no thread of the pipe's own."""
    pipe, reader, heard = layer.Pipe(ends[0]), layer.Ticket(), list[Any]()
    listeners, wakes = [layer.Ticket() for _ in range(2)], [asleep() for _ in range(2)]

    def hear(push: Any) -> None:
        heard.append(push[2])
        listeners[len(heard) - 1].set_result(None)

    pipe.hear = hear
    pipe.put_command(reader, (b"GET", b"a"))
    assert pipe.lead(reader, asleep())
    for ticket, wake in zip(listeners, wakes, strict=True):
        pipe.watch(ticket)
        assert pipe.lead(ticket, wake) is False
    ends[1].sendall(b":1\r\n")
    assert pipe.exchange(reader, LONG, 0.0)
    pipe.resign(reader)
    assert pipe.leads(listeners[0]) and [wake.locked() for wake in wakes] == [False, True]
    ends[1].sendall(message(b"one"))
    assert pipe.exchange(listeners[0], LONG, 0.0) and heard == [b"one"]
    listeners[0].abandoned = True
    pipe.unwatch(listeners[0])
    pipe.resign(listeners[0])
    assert pipe.leads(listeners[1]) and not wakes[1].locked()
    assert pipe.exchange(listeners[1], 0.005, 0.0) is False, "nothing came for it"
    listeners[1].abandoned = True
    pipe.unwatch(listeners[1])
    pipe.resign(listeners[1])
    assert nobody_reads(layer, pipe) and pipe.pending == 0


def test_who_waits_for_messages_hears_them_from_whoever_reads(layer: ModuleType, ends: Any) -> None:
    """Woken by its ticket, and made the reader by nobody once it was woken."""
    pipe, reader, listener, wake = layer.Pipe(ends[0]), layer.Ticket(), layer.Ticket(), asleep()
    pipe.hear = lambda push: listener.set_result(push[2])
    pipe.put_command(reader, (b"GET", b"a"))
    assert pipe.lead(reader, asleep())
    pipe.watch(listener)
    assert pipe.lead(listener, wake) is False
    ends[1].sendall(message(b"now") + b":1\r\n")
    assert pipe.exchange(reader, LONG, 0.0) and wake.acquire(timeout=LONG)
    pipe.resign(reader)
    assert (listener.reply, reader.reply) == (b"now", 1)
    assert not pipe.leads(listener) and nobody_reads(layer, pipe)


def test_who_waits_for_messages_keeps_a_pipe_to_be_shared(layer: ModuleType, ends: Any) -> None:
    """While it reads, nobody has the pipe for itself, and who asks among others is woken by its reply."""
    pipe, listener, second, wake = layer.Pipe(ends[0]), layer.Ticket(), layer.Ticket(), asleep()
    pipe.hear = lambda push: listener.set_result(push[2])
    pipe.watch(listener)
    assert pipe.lead(listener, asleep())
    assert pipe.usable() is True, "whoever reads sees what is the matter"
    assert pipe.ask(get(layer), b"a", b"", 0, LONG, 0.0) is layer.BUSY
    reading = beside(lambda: pipe.exchange(listener, LONG, 0.0))
    pipe.put_command(second, (b"GET", b"b"))
    assert pipe.lead(second, wake) is False
    pipe.flush(LONG)
    assert resp.words(ends[1].recv(1000)) == [b"GET", b"b"]
    ends[1].sendall(b":2\r\n")
    assert wake.acquire(timeout=LONG) and second.reply == 2 and not pipe.leads(second)
    assert reading.is_alive()
    ends[1].sendall(message(b"go"))
    reading.join(LONG)
    assert listener.reply == b"go"
    pipe.unwatch(listener)
    pipe.resign(listener)
    assert nobody_reads(layer, pipe)


def message(word: bytes) -> bytes:
    return b">3\r\n+message\r\n+inbox\r\n$%d\r\n%b\r\n" % (len(word), word)


def test_ask_without_an_answer_times_out_and_keeps_its_place(layer: ModuleType, ends: Any) -> None:
    pipe, next_one = layer.Pipe(ends[0]), layer.Ticket()
    with pytest.raises(TimeoutError, match="no reply"):
        pipe.ask(get(layer), b"a", b"", 0, 0.005, 0.0)
    assert (pipe.pending, nobody_reads(layer, pipe), pipe.broken) == (1, True, False)
    pipe.put_command(next_one, (b"GET",))
    assert pipe.heir() is None, "who gave up is nobody's heir"
    ends[1].sendall(b":1\r\n:2\r\n")
    assert pipe.exchange(next_one, LONG, 0.0)
    assert next_one.reply == 2


def test_who_queues_while_another_asks_is_woken_to_read(layer: ModuleType, ends: Any) -> None:
    pipe, second, wake = layer.Pipe(ends[0]), layer.Ticket(), asleep()
    first: list[Any] = []
    asking = beside(lambda: first.append(pipe.ask(get(layer), b"a", b"", 0, LONG, 0.0)))
    assert resp.words(ends[1].recv(1000)) == [b"GET", b"a"]
    pipe.put_command(second, (b"GET", b"b"))
    assert pipe.lead(second, wake) is False
    ends[1].sendall(b":1\r\n")
    assert wake.acquire(timeout=LONG)
    asking.join(LONG)
    assert (first, second.ready, pipe.leads(second)) == ([1], False, True)
    ends[1].sendall(b":2\r\n")
    assert pipe.exchange(second, LONG, 0.0)
    pipe.resign(second)
    assert (second.reply, pipe.pending) == (2, 0)


@pytest.mark.parametrize("shared", [False, True], ids=["ask", "exchange"])
def test_what_is_queued_while_another_waits_for_its_reply_goes_out_at_once(
    layer: ModuleType, ends: Any, shared: bool
) -> None:
    """Whoever reads has sent and will not send again: who comes later must not be left to it."""
    pipe, second, wake = layer.Pipe(ends[0]), layer.Ticket(), asleep()
    first: list[Any] = []
    reader = beside(lambda: first.append(one_command(layer, pipe, b"a", shared)))
    assert resp.words(ends[1].recv(1000)) == [b"GET", b".", b"a"]
    for word in (b"b", b"c", b"d"):  # the first of them as soon as its bytes are out, the others while it sleeps
        pipe.put_command(second if word == b"b" else None, (b"GET", word))
        assert word != b"b" or pipe.lead(second, wake) is False
        pipe.flush(LONG)
        assert resp.words(ends[1].recv(1000)) == [b"GET", word]
    ends[1].sendall(b":1\r\n:2\r\n:3\r\n:4\r\n")
    reader.join(LONG)
    assert (first, wake.acquire(timeout=LONG), second.reply, pipe.pending) == ([1], True, 2, 0)


@pytest.mark.parametrize("shared", [False, True], ids=["ask", "exchange"])
def test_what_is_queued_while_another_sends_goes_out_behind_it(layer: ModuleType, ends: Any, shared: bool) -> None:
    """Nobody waits for a sender who is stuck, and it must look again before it reads."""
    pipe, second, wake = layer.Pipe(ends[0]), layer.Ticket(), asleep()
    first: list[Any] = []
    sender = beside(lambda: first.append(one_command(layer, pipe, b"a", shared, b"x" * 500_000)))
    assert ends[1].recv(1, socket.MSG_PEEK)  # it is sending, and cannot go on until somebody reads
    pipe.put_command(second, (b"GET", b"b"))
    assert pipe.lead(second, wake) is False
    for _ in range(2):
        pipe.flush(0.0)
    with Echo(ends[1]) as echo:
        sender.join(LONG)
        assert first == [b"a"] and wake.acquire(timeout=LONG)
        if not second.ready:
            assert pipe.leads(second) and pipe.exchange(second, LONG, 0.0)
        assert second.reply == b"b"
    assert echo.heard == [b"a", b"b"]


def one_command(layer: ModuleType, pipe: Any, word: bytes, shared: bool, padding: bytes = b".") -> Any:
    """The reply to GET padding word; asked for as the pipe's only user, or as one of several who happens to read."""
    if not shared:
        return pipe.ask(layer.Template(b"GET", 0, 1), padding, word, 0, LONG, 0.0)
    ticket = layer.Ticket()
    pipe.put_command(ticket, (b"GET", padding, word))
    assert pipe.lead(ticket, asleep()) and pipe.exchange(ticket, LONG, 0.0)
    pipe.resign(ticket)
    return ticket.reply


@pytest.mark.parametrize("gather", [1, 8], ids=["each", "together"])
@pytest.mark.parametrize("seed", range(3))
def test_a_crowd_on_one_pipe_strands_nobody(layer: ModuleType, ends: Any, seed: int, gather: int) -> None:
    """As the wire uses it, by more threads than there are connections: alone where that is possible, else in turns.

    A server that answers only all of them together never does, if one command is left unsent.
    """
    pipe, form, switch = layer.Pipe(ends[0]), get(layer), sys.getswitchinterval()
    wrong: list[Any] = []

    def share(word: bytes) -> Any:
        ticket, wake = layer.Ticket(), asleep()
        pipe.put_command(ticket, (b"GET", word))
        if not pipe.lead(ticket, wake):
            pipe.flush(LONG)
            if not ticket.ready and not wake.acquire(timeout=10):
                wrong.append((word[:20], "was stranded"))
        if pipe.leads(ticket):
            pipe.exchange(ticket, 10.0, 0.0)
        ticket.abandoned = not ticket.ready
        pipe.resign(ticket)
        return ticket.reply

    def work(number: int) -> None:
        dice = random.Random(seed * 100 + number)
        for count in range(600):
            word = b"%d:%d:" % (number, count) + b"x" * dice.choice((0, 0, 0, 500, 1500))
            reply = pipe.ask(form, word, b"", 0, LONG, 0.0) if dice.random() < 0.8 else layer.BUSY
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
    assert wrong == [] and len(echo.heard) == 8 * 600
    assert (pipe.unsent, pipe.pending, pipe.broken, nobody_reads(layer, pipe)) == (0, 0, False, True)


def test_an_interrupt_at_any_point_of_resign_leaves_the_reading_to_others() -> None:
    """As the wire does, whoever was interrupted resigns once more: then somebody reads, or anybody may."""
    layer = _fallback
    for step in itertools.count(1):
        pipe, ticket, other, wake = layer.Pipe(), layer.Ticket(), layer.Ticket(), asleep()

        def resign(pipe: Any = pipe, ticket: Any = ticket, other: Any = other, wake: Any = wake) -> None:
            pipe.lead(ticket, None)
            pipe.put_command(other, (b"GET",))
            pipe.lead(other, wake)
            pipe.resign(ticket)

        interrupted = raise_at(step, {str(layer.__file__)}, resign)
        pipe.resign(ticket)
        assert not pipe.leads(ticket), f"point {step}"
        if pipe.leads(other):
            assert not wake.locked(), f"point {step}"
        else:
            assert nobody_reads(layer, pipe), f"point {step}"
        if not interrupted:
            assert step > 5
            break


@pytest.mark.parametrize("replied", [False, True], ids=["no reply", "a reply"])
def test_an_interrupt_at_any_point_of_ask_leaves_the_reading_to_others(replied: bool) -> None:
    """Its ticket is its own, so nobody else can resign for it: whatever strikes where, nobody reads afterwards."""
    layer = _fallback
    for step in itertools.count(1):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            pipe = layer.Pipe(ours)

            def ask(pipe: Any = pipe) -> None:
                with contextlib.suppress(TimeoutError):
                    pipe.ask(get(layer), b"a", b"", 0, LONG if replied else 0.0, 0.0)

            with Echo(theirs) if replied else contextlib.nullcontext():
                interrupted = raise_at(step, {str(layer.__file__)}, ask)
                assert nobody_reads(layer, pipe), f"point {step}"
            if not interrupted:
                assert step > 5
                break


def test_nothing_is_sent_behind_a_command_that_was_lost_half_way(layer: ModuleType, ends: Any) -> None:
    """The server would take it for the rest of the other one, or its reply for the other's."""
    pipe, lost = layer.Pipe(ends[0]), b"x" * 2_000_000
    with pytest.raises(TimeoutError, match="takes no more bytes"):
        pipe.ask(get(layer), lost, b"", 0, 0.0, 0.0)
    heard = b""
    ends[1].setblocking(False)
    for _ in range(2):
        with contextlib.suppress(BlockingIOError):
            while data := ends[1].recv(1 << 20):
                heard += data
        ticket = layer.Ticket()
        pipe.put_command(ticket, (b"GET", b"b"))
        assert pipe.lead(ticket, asleep())
        with pytest.raises(OSError, match="out of step"):
            pipe.exchange(ticket, LONG, 0.0)
        with pytest.raises(OSError, match="out of step"):
            pipe.flush(0.0)
        pipe.resign(ticket)
    assert heard.endswith(b"x"), "its end is missing, and nothing came in its place"
    assert not ticket.ready and pipe.broken


@pytest.mark.parametrize("alone", [True, False], ids=["alone", "with others"])
def test_an_interrupt_at_any_point_gives_nobody_a_reply_of_others(alone: bool) -> None:
    """Between the interrupt and the end of the connection others use it: theirs, or an error, never another's."""
    layer, refused = _fallback, 0
    for step in itertools.count(1):
        ours, theirs = socket.socketpair()
        with ours, theirs, Echo(theirs):
            pipe, before, after = layer.Pipe(ours), layer.Ticket(), layer.Ticket()

            def call(pipe: Any = pipe, before: Any = before) -> None:
                if alone:
                    pipe.ask(get(layer), b"a", b"", 0, LONG, 0.0)
                else:
                    pipe.put_command(before, (b"GET", b"a"))
                    pipe.put_command(None, (b"GET", b"b"))
                    pipe.flush(LONG)

            interrupted = raise_at(step, {str(layer.__file__)}, call)
            try:
                pipe.put_command(after, (b"GET", b"c"))
                assert pipe.lead(after, asleep()) and pipe.exchange(after, LONG, 0.0)
                assert (after.reply, before.reply) == (b"c", None if alone or not before.ready else b"a"), step
            except (OSError, ProtocolError):
                assert pipe.broken
                refused += 1
        if not interrupted:
            assert step > 20 and refused > 2
            break
