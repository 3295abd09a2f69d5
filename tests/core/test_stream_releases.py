"""Releases that follow one another are sent as one script, in the order in which everything was queued, and each of
them gets its own reply. Core and fallback, by one test body; no sockets here."""

from __future__ import annotations

import random
from collections import deque
from types import ModuleType
from typing import Any

import hiredis
import pytest
from support.intruder import Intruder
from support.pending import LoggedReply, shown

SHA = b"0123456789"
RELEASE = (b"EVALSHA", b"single", b"1", 0, 1)


def stream_of(layer: ModuleType) -> Any:
    stream = layer.TaskStream("the connection", None, 7, lambda: None)
    stream.templates = (layer.Template(*RELEASE), layer.Template(b"GET", 0))
    stream.release_script = SHA
    return stream


def commands_in(output: bytes) -> list[list[bytes]]:
    """The commands of an output: a command is read as a reply is, a list of strings."""
    reader = hiredis.Reader()
    reader.feed(output)
    commands: list[list[bytes]] = []
    while (command := reader.gets()) is not False:
        commands.append(command)  # type: ignore[arg-type]
    return commands


def effects(command: list[bytes]) -> list[tuple[bytes, ...]]:
    """What a command does, one after the other."""
    if command[:2] == [b"EVALSHA", SHA]:
        names, tokens = command[3 : 3 + int(command[2])], command[3 + int(command[2]) :]
        return [(b"release", *pair) for pair in zip(names, tokens, strict=True)]
    return [(b"release", *command[3:])] if command[0] == b"EVALSHA" else [tuple(command)]


def reply_to(effect: tuple[bytes, ...]) -> int:
    """The reply that a test's server gives to a command: its number, or 0."""
    return int(effect[1][1:]) if effect[1][1:].isdigit() else 0


def replies_to(command: list[bytes]) -> bytes:
    """What a test's server sends in reply."""
    done = effects(command)
    replies = b"".join(b":%d\r\n" % reply_to(effect) for effect in done)
    return replies if command[1] != SHA else b"*%d\r\n" % len(done) + replies


def releases(stream: Any, log: list[Any], numbers: range | list[int]) -> None:
    for number in numbers:
        stream.release(stream.templates[0], LoggedReply(log, number), b"n%d" % number, b"t%d" % number)


@pytest.mark.parametrize(("count", "sizes"), [(1, [1]), (2, [2]), (100, [100]), (101, [100, 1]), (250, [100, 100, 50])])
def test_releases_are_sent_as_scripts_of_a_hundred(layer: ModuleType, count: int, sizes: list[int]) -> None:
    stream, log = stream_of(layer), list[Any]()
    releases(stream, log, range(count))
    assert stream.commands == stream.pending == len(sizes)
    sent = commands_in(stream.take_output())
    assert [len(effects(command)) for command in sent] == sizes
    assert [effect for command in sent for effect in effects(command)] == [
        (b"release", b"n%d" % number, b"t%d" % number) for number in range(count)
    ]
    assert sent[-1][:3] == ([b"EVALSHA", SHA, b"%d" % sizes[-1]] if sizes[-1] > 1 else [b"EVALSHA", b"single", b"1"])
    for size in sizes:
        stream.feed(b":1\r\n" if size == 1 else b"*%d\r\n" % size + b":1\r\n" * size)
    assert log == [(number, shown(1)) for number in range(count)] and stream.pending == 0


def test_a_server_that_has_the_command_is_sent_that(layer: ModuleType) -> None:
    stream, log = stream_of(layer), list[Any]()
    stream.release_script = None
    releases(stream, log, range(3))
    assert [command[:2] for command in commands_in(stream.take_output())] == [[b"EVALSHA", b"single"]] * 3


@pytest.mark.parametrize("seed", range(40))
def test_effects_come_in_the_order_in_which_they_were_queued(layer: ModuleType, seed: int) -> None:
    """And each reply is that to its own command, and comes once."""
    rng, stream, log = random.Random(seed), stream_of(layer), list[Any]()
    queued: list[tuple[bytes, ...]] = []  # effects, in the order in which they were queued
    owners: list[int] = []  # whose each of them is
    executed: list[tuple[bytes, ...]] = []
    wire: deque[tuple[int, bytes]] = deque()  # replies on their way, and to how many effects
    answered = 0
    for number in range(400):
        what = rng.choice(["release"] * 6 + ["template", "command", "many", "calls", "flush", "flush", "answer"])
        name = b"n%d" % number
        if what == "release":
            releases(stream, log, [number])
            queued.append((b"release", name, b"t%d" % number))
        elif what == "template":
            stream.request(stream.templates[1], LoggedReply(log, number), name, b"", 0)
            queued.append((b"GET", name))
        elif what == "command":
            stream.put_command(LoggedReply(log, number), (b"GET", name))
            queued.append((b"GET", name))
        elif what == "many":
            stream.put_many(stream.templates[1], LoggedReply(log, number), [name, b"more"], [b"", b""], 0)
            queued += [(b"GET", name), (b"GET", b"more")]
        elif what == "calls":
            stream.put_calls(LoggedReply(log, number), [(b"GET", name), (b"GET", b"more")])
            queued += [(b"GET", name), (b"GET", b"more")]
        elif what == "flush" or not wire:
            for command in commands_in(stream.take_output()):
                done = effects(command)
                executed += done
                wire.append((len(done), replies_to(command)))
        else:
            taken = [wire.popleft() for _ in range(rng.randint(1, len(wire)))]
            answered += sum(count for count, _ in taken)
            stream.feed(b"".join(data for _, data in taken))
        owners += [number] * (len(queued) - len(owners))
    assert executed == queued[: len(executed)]
    replies: dict[int, list[int]] = {}
    for owner, effect in zip(owners[:answered], queued, strict=False):
        replies.setdefault(owner, []).append(reply_to(effect))
    if owners[answered : answered + 1] == owners[answered - 1 : answered]:
        replies.pop(owners[answered], None)  # the rest of its replies is on its way
    assert len(replies) > 100
    assert [(owner, reply[1]) for owner, reply in log] == [
        (owner, str(each[0]) if len(each) == 1 else [shown(one) for one in each]) for owner, each in replies.items()
    ]


@pytest.mark.parametrize(
    ("reply", "goes_on"),
    [(b"-NOSCRIPT no\r\n", True), (b"-BUSY no\r\n", True), (b"-READONLY no\r\n", True), (b"-NOPERM no\r\n", False)],
)
def test_releases_of_a_script_that_failed_were_not_executed(layer: ModuleType, reply: bytes, goes_on: bool) -> None:
    """Each is sent again by itself. That may be for a name that the user may not release: it fails no others again."""
    stream, log = stream_of(layer), list[Any]()
    releases(stream, log, range(3))
    stream.take_output()
    stream.feed(reply)
    assert log == [(number, shown(None)) for number in range(3)] and not stream.broken
    assert stream.release_script == (SHA if goes_on else None)
    releases(stream, log, [3])
    stream.take_output()
    stream.feed(reply)
    assert log[3][1][0] == "ReplyError", "the reply to a command of its own is that"


def test_releases_that_are_put_off_as_a_script_is_refused_are_sent_all_the_same(layer: ModuleType) -> None:
    stream, log = stream_of(layer), list[Any]()
    releases(stream, log, range(2))
    stream.take_output()
    releases(stream, log, range(2, 4))
    stream.feed(b"-NOPERM no\r\n")
    assert stream.release_script is None
    releases(stream, log, range(4, 6))
    (first, *singles) = commands_in(stream.take_output())
    assert first[:2] == [b"EVALSHA", SHA] and len(effects(first)) in (2, 4)
    assert [effect for command in (first, *singles) for effect in effects(command)] == [
        (b"release", b"n%d" % number, b"t%d" % number) for number in range(2, 6)
    ]


@pytest.mark.parametrize("reply", [b":1\r\n", b"*1\r\n:1\r\n", b"*3\r\n:1\r\n:1\r\n:1\r\n", b"_\r\n", b"$1\r\na\r\n"])
def test_a_reply_of_another_shape_breaks_the_stream(layer: ModuleType, reply: bytes) -> None:
    stream, log = stream_of(layer), list[Any]()
    releases(stream, log, range(2))
    stream.take_output()
    with pytest.raises(hiredis.ProtocolError, match="a script that released 2 locks replied"):
        stream.feed(reply)
    assert stream.broken and log == []
    assert [each.number for each in stream.take_pending([])] == [0, 1], "both are told that the connection broke"


@pytest.mark.parametrize("sent", [True, False])
def test_all_that_wait_are_told_where_the_connection_breaks(layer: ModuleType, sent: bool) -> None:
    stream, log = stream_of(layer), list[Any]()
    releases(stream, log, range(3))
    stream.request(stream.templates[1], LoggedReply(log, 3), b"a", b"", 0)
    releases(stream, log, range(4, 6))
    if sent:
        stream.take_output()
    assert [each.number for each in stream.take_pending([])] == list(range(6))
    assert stream.pending == 0 and stream.take_output() == b""
    releases(stream, log, range(6, 8))
    (command,) = commands_in(stream.take_output())
    assert effects(command) == [(b"release", b"n6", b"t6"), (b"release", b"n7", b"t7")]


def test_a_caller_that_waits_no_longer_is_passed_over(layer: ModuleType) -> None:
    stream, log = stream_of(layer), list[Any]()
    for number in range(3):
        pending_reply = LoggedReply(log, number, done=number == 1)
        stream.release(stream.templates[0], pending_reply, b"n", b"t")
    stream.take_output()
    stream.feed(b"*3\r\n:1\r\n:1\r\n:0\r\n")
    assert log == [(0, shown(1)), (2, shown(0))]


def test_order_holds_whatever_the_garbage_collector_runs(layer: ModuleType) -> None:
    stream, log, others = stream_of(layer), list[Any](), iter(range(10_000, 20_000))

    def intrude() -> None:
        number = next(others)
        if number % 2:
            releases(stream, log, [number])
        else:
            stream.put_command(LoggedReply(log, number), (b"GET", b"n%d" % number))

    with Intruder(intrude) as intruder:
        for number in range(300):
            intruder.arm()
            releases(stream, log, [number])
    sent = commands_in(stream.take_output())
    done = [effect for command in sent for effect in effects(command)]
    assert len(done) > 300, "else no thread came in between"
    for command in sent:
        stream.feed(replies_to(command))
    assert log == [(int(effect[1][1:]), shown(int(effect[1][1:]))) for effect in done]


def test_names_and_tokens_have_to_be_bytes(layer: ModuleType) -> None:
    stream = stream_of(layer)
    for wrong in (("n", b"t"), (b"n", "t"), (b"n", 5), (None, b"t"), (b"n", None)):
        with pytest.raises(TypeError):
            stream.release(stream.templates[0], None, *wrong)
    assert (stream.pending, stream.take_output()) == (0, b"")


def test_a_release_for_whose_reply_nobody_waits(layer: ModuleType) -> None:
    stream, log = stream_of(layer), list[Any]()
    stream.release(stream.templates[0], None, b"n", b"t")
    releases(stream, log, [1])
    stream.take_output()
    stream.feed(b"*2\r\n:1\r\n:1\r\n")
    assert log == [(1, shown(1))]


def test_a_release_that_comes_as_the_pending_replies_are_taken_is_among_them(layer: ModuleType) -> None:
    """As the garbage collector runs a finalizer there."""
    stream, log = stream_of(layer), list[Any]()
    releases(stream, log, range(3))
    numbers = iter(range(10, 100))
    with Intruder(lambda: releases(stream, log, [next(numbers)])) as intruder:
        intruder.arm()
        into: list[Any] = []
        stream.take_pending(into)
    came = next(numbers) - 10
    stream.take_pending(into)
    assert sorted(each.number for each in into) == [0, 1, 2, *range(10, 10 + came)]
