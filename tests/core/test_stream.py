"""Streams of the core, compiled, and of its fallback in Python: commands are packed as hiredis packs them, replies
are read as hiredis reads them, and every reply reaches its pending reply, in order, however the stream is cut. One
test body for both; no sockets here."""

from __future__ import annotations

import gc
import itertools
import random
import tracemalloc
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import hiredis
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.intruder import Intruder
from support.pending import LoggedReply, packed, shown

from fastlock._limits import MAX_REPLY
from fastlock._protocol import commands

CAPABILITIES = (commands.SET_NX_GET, commands.DELIFEQ, commands.DELEX, commands.SET_IFEQ)
CAPABILITY_SETS = [frozenset(chosen) for n in range(5) for chosen in itertools.combinations(CAPABILITIES, n)]
NASTY = [b"a", b"", b"a b", b"\r\n", b"\0", b"{tag}", b"%d%b", b"$3\r\nabc\r\n", b"\xff\xfe", bytes(range(256)) * 12]
NOTHING = object()

seeded = settings(
    derandomize=True, deadline=None, max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
raw = st.binary(max_size=60) | st.sampled_from(NASTY) | st.integers(0, 4000).map(lambda size: b"{\r\n}" * size)


def filled(parts: tuple[bytes | int, ...], name: bytes, token: bytes, ms: int) -> bytes:
    values = (name, token, b"%d" % ms)
    return packed(*(part if isinstance(part, bytes) else values[part] for part in parts))


# ----------------------------------------------------------------------------------------------------------- commands


def test_every_template_of_every_command_table_is_packed(layer: ModuleType) -> None:
    for capabilities in CAPABILITY_SETS:
        for parts in commands.command_table(capabilities):
            template = layer.Template(*parts)
            assert template.parts == parts
            for name, token in itertools.product(NASTY, NASTY):
                stream = layer.Stream()
                stream.put(template, None, name, token, 2**53)
                assert stream.take_output() == filled(parts, name, token, 2**53)


@seeded
@given(
    parts=st.lists(st.sampled_from([0, 1, 2]) | raw, min_size=1, max_size=7).map(tuple),
    calls=st.lists(st.tuples(raw, raw, st.integers(-(2**62), 2**62)), min_size=1, max_size=4),
)
def test_any_template_is_packed_as_hiredis_packs_it(layer: ModuleType, parts: Any, calls: Any) -> None:
    stream, template = layer.Stream(), layer.Template(*parts)
    for name, token, ms in calls:
        stream.put(template, None, name, token, ms)
    assert stream.unsent == len(b"".join(filled(parts, *call) for call in calls))
    assert stream.take_output() == b"".join(filled(parts, *call) for call in calls)


def test_a_template_may_repeat_one_placeholder(layer: ModuleType) -> None:
    stream, template, big = layer.Stream(), layer.Template(*[0] * 7), b"x" * 30_000
    for _ in range(20):
        stream.put(template, None, big, b"", 0)
    assert stream.take_output() == packed(*[big] * 7) * 20


@pytest.mark.parametrize("ms", [0, 1, 9, 10, 99, 2**31, 2**53, 2**63 - 1, -1, -(2**63) + 1])
def test_numbers_are_written_whole(layer: ModuleType, ms: int) -> None:
    stream = layer.Stream()
    stream.put(layer.Template(2), None, b"", b"", ms)
    assert stream.take_output() == packed(b"%d" % ms)


@pytest.mark.parametrize(
    "parts", [(), (b"x",) * 17, (3,), (-1,), ("GET",), (None,), (bytearray(b"x"),), (0,) * 8, (0, b"a") * 8, (1.5,)]
)
def test_an_impossible_template_is_refused(layer: ModuleType, parts: Any) -> None:
    with pytest.raises(ValueError, match="template"):
        layer.Template(*parts)


operations = st.lists(
    st.one_of(
        st.tuples(st.just("put"), raw, raw, st.integers(0, 2**53)),
        st.tuples(st.just("many"), st.lists(st.tuples(raw, raw), min_size=1, max_size=5), st.integers(0, 2**53)),
        st.tuples(st.just("command"), st.lists(raw, min_size=1, max_size=6).map(tuple)),
        st.tuples(st.just("calls"), st.lists(st.lists(raw, min_size=1, max_size=4).map(tuple), min_size=1, max_size=5)),
        st.tuples(st.just("take")),
    ),
    max_size=12,
)


@seeded
@given(operations)
def test_any_sequence_of_calls_queues_exactly_its_commands(layer: ModuleType, steps: Any) -> None:
    parts = (b"SET", 0, 1, b"PX", 2)
    stream, template = layer.Stream(), layer.Template(*parts)
    expected, pending_replies = b"", 0
    for kind, *args in steps:
        pending_replies += kind != "take"
        if kind == "put":
            stream.put(template, None, *args)
            expected += filled(parts, *args)
        elif kind == "many":
            stream.put_many(template, None, [name for name, _ in args[0]], [token for _, token in args[0]], args[1])
            expected += b"".join(filled(parts, name, token, args[1]) for name, token in args[0])
        elif kind == "command":
            stream.put_command(None, args[0])
            expected += packed(*args[0])
        elif kind == "calls":
            stream.put_calls(None, args[0])
            expected += b"".join(packed(*call) for call in args[0])
        else:
            assert stream.take_output() == expected
            expected = b""
        assert (stream.unsent, stream.pending) == (len(expected), pending_replies)
    assert stream.take_output() == expected


def wrong_calls(layer: ModuleType, stream: Any) -> list[Any]:
    """Calls that must raise; each begins well and fails in the middle."""
    get = layer.Template(b"SET", 0, 1, 2)
    big = b"x" * 5000
    return [
        lambda: stream.put(get, None, "name", b"", 0),
        lambda: stream.put(get, None, big, None, 0),
        lambda: stream.put(get, None, None, b"", 0),
        lambda: stream.put(get, None, big, bytearray(b"t"), 0),
        lambda: stream.put(get, None, big, b"t", "1"),
        lambda: stream.put(get, None, big, b"t", None),
        lambda: stream.put_many(get, None, [big, "b"], [b"t", b"t"], 0),
        lambda: stream.put_many(get, None, [big, b"b", None], [b"t"] * 3, 0),
        lambda: stream.put_many(get, None, [big, b"b"], [b"t", 5], 0),
        lambda: stream.put_many(get, None, [big, b"b"], [b"t"], 0),
        lambda: stream.put_many(get, None, [big], [b"t", b"t"], 0),
        lambda: stream.put_many(get, None, [], [], 0),
        lambda: stream.put_command(None, (b"GET", big, "c")),
        lambda: stream.put_command(None, (b"GET", None)),
        lambda: stream.put_calls(None, []),
        lambda: stream.put_calls(None, [(b"GET", big), (b"GET", 5)]),
        lambda: stream.put_calls(None, [(b"GET", big), None]),
    ]


@pytest.mark.parametrize("number", range(17))
def test_a_call_that_fails_in_the_middle_queues_nothing(layer: ModuleType, number: int) -> None:
    log: list[Any] = []
    stream = layer.Stream()
    stream.put_command(LoggedReply(log, 0), (b"ONE",))
    calls = wrong_calls(layer, stream)
    assert len(calls) == 17
    with pytest.raises((TypeError, ValueError)):
        calls[number]()
    assert (stream.unsent, stream.pending) == (len(packed(b"ONE")), 1)
    stream.put_command(LoggedReply(log, 1), (b"TWO",))
    assert stream.take_output() == packed(b"ONE") + packed(b"TWO")
    stream.feed(b":1\r\n:2\r\n")
    assert log == [(0, shown(1)), (1, shown(2))]


# ------------------------------------------------------------------------------------------------------------ replies


def bulk(value: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(value), value)


line = st.text("abcXYZ 0123456789_-:*", max_size=20).map(str.encode)
scalars = st.one_of(
    raw.map(bulk),
    st.binary(max_size=9).map(lambda value: b"$%d\r\n%b\r\n" % (len(value) + 8, b"\r\n*99999" + value)),
    line.map(lambda text: b"+%b\r\n" % text),
    line.map(lambda text: b"-ERR %b\r\n" % text),
    st.integers(-(2**63), 2**63 - 1).map(lambda number: b":%d\r\n" % number),
    st.integers(-(10**40), 10**40).map(lambda number: b"(%d\r\n" % number),
    st.sampled_from([b"_\r\n", b"$-1\r\n", b"*-1\r\n", b"#t\r\n", b"#f\r\n", b",1.5\r\n", b",inf\r\n", b",-inf\r\n"]),
    st.sampled_from([b",nan\r\n", b"=8\r\ntxt:*123\r\n", b"*0\r\n", b"%0\r\n", b"~0\r\n", b"$0\r\n\r\n"]),
)
frames = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4).map(lambda items: b"*%d\r\n" % len(items) + b"".join(items)),
        st.lists(inner, max_size=3).map(lambda items: b"~%d\r\n" % len(items) + b"".join(items)),
        st.dictionaries(st.sampled_from([b"+k\r\n", b":1\r\n", bulk(b"\r\n")]), inner, max_size=3).map(
            lambda items: b"%%%d\r\n" % len(items) + b"".join(itertools.chain.from_iterable(items.items()))
        ),
    ),
    max_leaves=8,
).filter(lambda frame: depth(frame) <= 8)
pushes = st.lists(scalars, min_size=1, max_size=3).map(lambda items: b">%d\r\n" % len(items) + b"".join(items))
subscribed = st.sampled_from([bulk(b"channel"), b"+channel\r\n"]).map(
    lambda channel: b">3\r\n$9\r\nsubscribe\r\n%b:1\r\n" % channel
)


def depth(frame: bytes) -> int:
    """How deep the reply of a frame is nested, by plain hiredis (which itself stops at 9)."""

    def of(reply: Any) -> int:
        if not isinstance(reply, (list, dict)):
            return 0
        return 1 + max(map(of, reply.values() if isinstance(reply, dict) else reply), default=0)

    reader = hiredis.Reader(notEnoughData=NOTHING)
    reader.feed(frame)
    try:
        return of(reader.gets())
    except hiredis.ProtocolError:
        return 99


def read_plainly(data: bytes) -> tuple[list[Any], list[Any]]:
    """(replies, pushes) of a stream, by hiredis alone; the confirmation of a SUBSCRIBE is a reply, though it comes
    as a push."""
    reader = hiredis.Reader(notEnoughData=NOTHING)
    reader.feed(data)
    found: list[Any] = list(iter(reader.gets, NOTHING))
    is_push = [type(reply) is hiredis.PushNotification and reply[0] != b"subscribe" for reply in found]
    return [x for x, push in zip(found, is_push, strict=True) if not push], [
        x for x, push in zip(found, is_push, strict=True) if push
    ]


def awaiting(
    layer: ModuleType, replies: list[Any], kinds: random.Random
) -> tuple[Any, list[Any], list[Any], list[Any]]:
    """A stream that waits for these replies in pending replies of all kinds; the log, its expected content, and the
    PendingReply objects."""
    stream, log, expected, pending_replies = layer.Stream(), [], [], []
    get, left = layer.Template(b"GET", 0), deque(map(shown, replies))
    for number in itertools.count():
        if not left:
            break
        kind, count = kinds.randrange(6), kinds.randint(1, min(4, len(left)))
        pending_reply: Any = LoggedReply(log, number, done=kind == 3)
        if kind == 4:
            pending_reply = layer.PendingReply()
        if kind == 0:
            stream.put_many(get, pending_reply, [b"n"] * count, [b""] * count, 0)
        elif kind == 1:
            stream.put_calls(pending_reply, [(b"GET",)] * count)
        else:
            stream.put_command(None if kind == 5 else pending_reply, (b"GET", b"n"))
        reply = ("list", [left.popleft() for _ in range(count)]) if kind < 2 else left.popleft()
        if kind in (0, 1, 2):
            expected.append((number, reply))
        elif kind == 4:
            pending_replies.append((pending_reply, reply))
    return stream, log, expected, pending_replies


def check_deliveries(layer: ModuleType, data: bytes, cuts: list[int], seed: int = 0) -> None:
    """Feed a stream in pieces and expect what plain hiredis reads, each reply in its pending reply."""
    replies, notes = read_plainly(data)
    stream, log, expected, pending_replies = awaiting(layer, replies, random.Random(seed))
    received: list[Any] = []
    stream.on_push = received.append
    for start, end in itertools.pairwise([0, *cuts, len(data)]):
        stream.feed(data[start:end])
    assert log == expected
    assert [shown(pending_reply.reply) for pending_reply, _ in pending_replies] == [
        reply for _, reply in pending_replies
    ]
    assert all(pending_reply.ready and pending_reply.done() for pending_reply, _ in pending_replies)
    assert [shown(push) for push in received] == [shown(push) for push in notes]
    assert (stream.pending, stream.broken, stream.take_pending([])) == (0, False, [])


@seeded
@given(st.lists(frames | frames | pushes | subscribed, max_size=12), st.randoms(use_true_random=False))
def test_any_stream_in_any_pieces_is_delivered(layer: ModuleType, parts: list[bytes], rng: random.Random) -> None:
    data, seed = b"".join(parts), rng.randrange(2**32)
    check_deliveries(layer, data, [], seed)
    check_deliveries(layer, data, sorted(rng.randint(0, len(data)) for _ in range(rng.randint(1, 9))), seed)
    if len(data) <= 2000:
        check_deliveries(layer, data, list(range(1, len(data))), seed)


SAMPLE = b"".join(
    (
        *(b"_\r\n", bulk(b"0123456789abcdef"), b":1\r\n", b"+OK\r\n", b">3\r\n+message\r\n+ch\r\n$5\r\na\r\n*b\r\n"),
        *(b"%2\r\n+a\r\n*2\r\n:1\r\n_\r\n$1\r\nb\r\n#f\r\n", b"-NOSCRIPT No matching script\r\n", b"#f\r\n", b"*0\r\n"),
        *(bulk(b"\r\n*123456\r\n>9999999\r\n"), b",3.25\r\n", b"(12345678901234567890123\r\n", b":-7\r\n"),
        *(b">3\r\n$9\r\nsubscribe\r\n$2\r\nch\r\n:1\r\n", b">3\r\n+message\r\n+ch\r\n+a\r\n", b":8\r\n"),
    )
)


def test_a_stream_cut_at_every_point_and_at_every_two_points(layer: ModuleType) -> None:
    check_deliveries(layer, SAMPLE, list(range(1, len(SAMPLE))))
    for cut in range(len(SAMPLE) + 1):
        check_deliveries(layer, SAMPLE, [cut], seed=cut)
    rng = random.Random(7)
    for _ in range(500):
        check_deliveries(layer, SAMPLE, sorted((rng.randrange(len(SAMPLE)), rng.randrange(len(SAMPLE)))))


def test_a_value_may_look_like_protocol_bytes(layer: ModuleType) -> None:
    for value in (b"\n*12345", b"\r\n%99999999\r\n", b"*4294967295\r\n", b"$9223372036854775807\r\n" * 50, b"\n|55555"):
        data = bulk(value) + b":1\r\n" + b"*1\r\n" + bulk(value)
        for cut in (0, 3, len(data) // 2, len(data) - 3):
            check_deliveries(layer, data, [cut])
        check_deliveries(layer, data, list(range(1, len(data))))


# ----------------------------------------------------------------------------------------------------- invalid replies

GARBAGE = [
    *(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n", b"\x15\x03\x01\x00\x02\x02\x28", b"\0", b"\r\n"),
    *(b":12a\r\n", b"#x\r\n", b",x\r\n", b"(1x\r\n", b"*-5\r\n", b"$-2\r\n", b"*x\r\n", b"_x\r\n", b"!5\r\nERR x\r\n"),
    *(b"*4294967295\r\n", b"%4611686018427387904\r\n", b"*2147483647\r\n", b"~99999999\r\n", b">99999999\r\n"),
    *(b"-a\n$5\r\n*10000000\r\n", b"+a\n$5\r\n*10000000\r\n", b"|99999\r\n", b"*1\r\n*1000000\r\n"),
    *(b"*" + b"9" * 40 + b"\r\n", b"*" + b"9" * 5000 + b"\r\n", b"$" + b"9" * 5000 + b"\r\n"),
    *(b"%1\r\n*1\r\n:1\r\n:2\r\n", b"*1\r\n" * 9 + b":1\r\n", b"*1\r\n" * 16_000 + b":1\r\n"),
]


def memory() -> int:
    """The most memory that this process has reserved, in bytes; memory that was reserved and not touched counts too."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmPeak:")[1].split()[0]) * 1024


@pytest.mark.parametrize("garbage", GARBAGE, ids=lambda value: repr(value)[2:30])
@pytest.mark.parametrize("bytewise", [False, True], ids=["whole", "byte by byte"])
def test_invalid_bytes_break_the_stream_and_cost_no_memory(layer: ModuleType, garbage: bytes, bytewise: bool) -> None:
    log: list[Any] = []
    stream = layer.Stream()
    pending_reply, other = LoggedReply(log, 0), layer.PendingReply()
    stream.put_command(pending_reply, (b"GET",))
    stream.put_calls(other, [(b"GET",), (b"GET",)])
    before = memory()
    with pytest.raises(hiredis.ProtocolError):
        for piece in [garbage[i : i + 1] for i in range(len(garbage))] if bytewise else [garbage]:
            stream.feed(piece)
    assert memory() - before < 4 << 20
    assert stream.broken
    assert not log
    assert not other.ready
    assert stream.take_pending([]) == [pending_reply, other]


HUGE = [
    b"$9223372036854775807\r\n",
    b"$4294967297\r\n",
    b"=99999\r\n",
    b"!%d\r\n" % (MAX_REPLY + 1),
    b"*3\r\n=%d\r\n" % (MAX_REPLY + 1),
    b"$" + b"0" * 70,
    b"=" + b"9" * 30 + b"\r\n",
    b"*1\r\n*" + b"9" * 40 + b"\r\n",
]


@pytest.mark.parametrize("header", HUGE)
def test_a_reply_too_long_is_refused_at_its_header(layer: ModuleType, header: bytes) -> None:
    for pieces in ([header], [header[i : i + 1] for i in range(len(header))]):
        stream = layer.Stream()
        stream.put_command(layer.PendingReply(), (b"GET",))
        with pytest.raises(hiredis.ProtocolError):
            for piece in pieces:
                stream.feed(piece)


@pytest.mark.parametrize("header", [b"+", b"-", b"*100\r\n", b"%99\r\n", b"*3\r\n$65536\r\n"])
@pytest.mark.parametrize("size", [1, 999, 65536])
def test_an_unfinished_reply_is_bounded(layer: ModuleType, header: bytes, size: int) -> None:
    stream, pending_reply = layer.Stream(), layer.PendingReply()
    stream.put_command(pending_reply, (b"GET",))
    stream.feed(header)
    endless = b"x" if header[0] in b"+-" else b"$999\r\n" + b"x" * 999 + b"\r\n"
    body = (b"x" * 65536 if b"$" in header else b"") + endless * (140_000 // len(endless))
    before, fed = memory(), len(header)
    with pytest.raises(hiredis.ProtocolError):
        for start in range(0, len(body), size):
            stream.feed(body[start : start + size])
            fed += size
    assert fed <= layer.MAX_REPLY + layer.MAX_FRAME
    assert not pending_reply.ready
    assert memory() - before < 4 << 20


@pytest.mark.parametrize("size", [1000, 65_600, 1 << 20])
def test_a_long_reply_passes_where_it_is_expected(layer: ModuleType, size: int) -> None:
    """A list, a verbatim string; a plain string as long, which may be a key's value, is dropped as before."""
    clients = b"=%d\r\ntxt:%b\r\n" % (100_004, b"c" * 100_000)
    items = b"*20000\r\n" + b"$4\r\nabcd\r\n" * 20_000
    dropped = b"$100000\r\n" + b"d" * 100_000 + b"\r\n"
    stream, replies = layer.Stream(), [layer.PendingReply() for _ in range(4)]
    for reply in replies:
        stream.put_command(reply, (b"PING",))
    stream.expect_long()
    data = clients + items + dropped + b":1\r\n"
    for start in range(0, len(data), size):
        stream.feed(data[start : start + size])
    assert [reply.reply for reply in replies] == [b"c" * 100_000, [b"abcd"] * 20_000, b"", 1]


@pytest.mark.parametrize("frame", [f"={1 << 27}", f"*{1 << 21}", f"!{1 << 27}"])
def test_a_long_reply_has_its_limits(layer: ModuleType, frame: str) -> None:
    stream = layer.Stream()
    stream.put_command(layer.PendingReply(), (b"PING",))
    stream.expect_long()
    with pytest.raises(hiredis.ProtocolError, match="announces too much"):
        stream.feed(frame.encode() + b"\r\n")


@pytest.mark.parametrize("last", [1, 2, 3, 9, 20, 26, 65536])
def test_the_longest_token_is_not_too_long(layer: ModuleType, last: int) -> None:
    """However its bytes arrive, and in the array that answers a fenced acquire."""
    stream, pending_reply = layer.Stream(), layer.PendingReply()
    stream.put_command(pending_reply, (b"EVALSHA",))
    reply = b"*2\r\n$65536\r\n" + b"t" * 65536 + b"\r\n:1763758800000000\r\n"
    stream.feed(reply[:-last])
    assert not pending_reply.ready
    stream.feed(reply[-last:])
    assert pending_reply.reply == [b"t" * 65536, 1763758800000000]


def test_many_small_replies_are_not_too_long(layer: ModuleType) -> None:
    log: list[Any] = []
    stream = layer.Stream()
    for number in range(20_000):
        stream.put_command(LoggedReply(log, number), (b"GET",))
    data = b"$16\r\n0123456789abcdef\r\n" * 20_000
    for start in range(0, len(data), 65_536):
        stream.feed(data[start : start + 65_536])
    assert [number for number, _ in log] == list(range(20_000))
    stream.put_command(LoggedReply(log, -1), (b"GET",))
    stream.feed(bulk(b"x" * 65_000))  # as large as a name or token may be
    assert log[-1][0] == -1


@pytest.mark.parametrize("requested", [0, 1, 2, 3])
def test_an_excess_reply_invalidates_its_whole_chunk(layer: ModuleType, requested: int) -> None:
    log: list[Any] = []
    stream = layer.Stream()
    pending_replies = [LoggedReply(log, number) for number in range(requested)]
    for pending_reply in pending_replies:
        stream.put_command(pending_reply, (b"GET",))
    with pytest.raises(hiredis.ProtocolError):
        stream.feed(b":1\r\n" * (requested + 1))
    assert (log, stream.broken, stream.take_pending([])) == ([], True, pending_replies)


def test_an_unexpected_push_is_no_error(layer: ModuleType) -> None:
    stream, received, push = layer.Stream(), list[Any](), b">2\r\n+invalidate\r\n*1\r\n+name\r\n"
    assert stream.on_push is None
    stream.feed(push)  # no callback is set
    stream.on_push = received.append
    stream.feed(push * 2)
    stream.on_push = None
    stream.feed(push)
    assert received == [[b"invalidate", [b"name"]]] * 2
    assert not stream.broken


def test_garbage_after_garbage_keeps_no_memory(layer: ModuleType) -> None:
    def once(garbage: bytes) -> None:
        stream = layer.Stream()
        stream.put_command(layer.PendingReply(), (b"GET",))
        with pytest.raises(hiredis.ProtocolError):
            stream.feed(garbage)

    for garbage in GARBAGE:
        once(garbage)
    gc.collect()
    tracemalloc.start()
    try:
        start = tracemalloc.get_traced_memory()[0]
        for garbage in GARBAGE * 20:
            once(garbage)
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] - start < 100_000
    finally:
        tracemalloc.stop()


# --------------------------------------------------------------------------------------------------------------- order


def test_ten_thousand_pending_replies_stay_in_order(layer: ModuleType) -> None:
    rng, stream, log = random.Random(11), layer.Stream(), []
    model: deque[int] = deque()
    sent = answered = 0
    while answered < 10_000:
        for _ in range(rng.choice((1, 3, 40, 700))):
            model.append(sent)
            stream.put_command(LoggedReply(log, sent), (b"GET",))
            sent += 1
        count = len(model) if rng.random() < 0.1 else rng.randint(0, len(model))
        stream.feed(b"".join(b":%d\r\n" % model.popleft() for _ in range(count)))
        answered += count
        assert stream.pending == len(model)
    assert log == [(number, shown(number)) for number in range(answered)]
    assert [pending_reply.number for pending_reply in stream.take_pending([])] == list(model)


def test_drain_returns_each_pending_reply_once(layer: ModuleType) -> None:
    stream, pending_reply, get = layer.Stream(), layer.PendingReply(), layer.Template(b"GET", 0)
    for _ in range(50):  # so that the ring buffer is not at its start
        stream.put_command(None, (b"X",))
    stream.feed(b"_\r\n" * 50)
    pending_replies = [LoggedReply([], 1), None, pending_reply, LoggedReply([], 2, done=True)]
    stream.put_command(pending_replies[0], (b"GET",))
    stream.put_many(get, None, [b"a", b"b"], [b"", b""], 0)
    stream.put_calls(pending_reply, [(b"GET",)] * 3)
    stream.feed(b"_\r\n_\r\n_\r\n_\r\n")
    stream.put_command(pending_replies[3], (b"GET",))
    assert stream.take_pending([]) == pending_replies[2:]
    assert (stream.pending, stream.unsent, stream.take_output(), stream.take_pending([])) == (0, 0, b"", [])
    assert not pending_reply.ready
    with pytest.raises(hiredis.ProtocolError):
        stream.feed(b"_\r\n")  # the rest of the replies that were drained


def test_a_pending_reply_wakes_its_caller_once(layer: ModuleType) -> None:
    pending_reply, woken = layer.PendingReply(), []

    class Wake:
        def release(self) -> None:
            woken.append((pending_reply.ready, pending_reply.done(), pending_reply.reply, pending_reply.wake))

    assert (
        pending_reply.reply,
        pending_reply.wake,
        pending_reply.ready,
        pending_reply.cancelled,
        pending_reply.done(),
    ) == (
        None,
        None,
        False,
        False,
        False,
    )
    pending_reply.wake = Wake()
    pending_reply.set_result(False)
    pending_reply.set_result(5)
    assert woken == [(True, True, False, None)]


def test_an_answered_or_drained_pending_reply_is_freed(layer: ModuleType) -> None:
    stream = layer.Stream()
    pending_replies = [LoggedReply([], number) for number in range(6)]
    for pending_reply in pending_replies[:4]:
        stream.put_command(pending_reply, (b"GET",))
    stream.put_calls(pending_replies[4], [(b"GET",)] * 2)
    stream.put_command(pending_replies[5], (b"GET",))
    kept = [weakref.ref(pending_reply) for pending_reply in pending_replies]
    del pending_replies, pending_reply
    stream.feed(b"*1\r\n:1\r\n" * 6)
    assert [ref() is None for ref in kept] == [True] * 5 + [False]
    stream.take_pending([])
    assert kept[5]() is None


def test_a_pending_reply_that_raises_breaks_the_stream(layer: ModuleType) -> None:
    class Broken(LoggedReply):
        def set_result(self, reply: Any) -> None:
            raise RuntimeError("the event loop is closed")

    stream = layer.Stream()
    stream.put_command(Broken([], 0), (b"GET",))
    with pytest.raises(RuntimeError, match="closed"):
        stream.feed(b":1\r\n")
    assert stream.broken  # it is unknown which replies of the chunk were delivered


def test_a_broken_stream_refuses_more_bytes(layer: ModuleType) -> None:
    """Other callers may read between the break and the end of the connection: no reply may reach the wrong caller."""
    log: list[Any] = []
    stream = layer.Stream()
    for number in range(3):
        stream.put_command(LoggedReply(log, number), (b"GET",))
    with pytest.raises(hiredis.ProtocolError):
        stream.feed(b"?\r\n")
    for data in (b":1\r\n", b":2\r\n"):
        with pytest.raises(hiredis.ProtocolError, match="out of step"):
            stream.feed(data)
    assert log == [] and stream.pending == 3


class WakeupQueue:
    """The part of a queue of wakeups that a stream needs."""

    loop = "the loop"


def test_requests_announce_once_until_the_output_is_taken(layer: ModuleType) -> None:
    wakeups, announced, log = WakeupQueue(), list[int](), list[Any]()
    stream = layer.TaskStream("the connection", wakeups, 7, lambda: announced.append(stream.pending))
    assert stream.templates == ()
    assert (stream.connection, stream.wakeups, stream.thread) == ("the connection", wakeups, 7)
    stream.templates = (layer.Template(b"GET", 0), layer.Template(b"SET", 0, 1, b"PX", 2))
    for wakeup in range(3):
        pending_replies = [LoggedReply(log, 4 * wakeup + n) for n in range(4)]
        for n, pending_reply in enumerate(pending_replies):
            stream.request(stream.templates[n % 2], pending_reply, b"a", b"b", 5)
        stream.announce()
        assert announced == [1] * (wakeup + 1)
        assert stream.take_output() == (packed(b"GET", b"a") + packed(b"SET", b"a", b"b", b"PX", b"5")) * 2
        stream.feed(b":0\r\n:1\r\n:2\r\n:3\r\n")
        assert [pending_reply.done() for pending_reply in pending_replies] == [False] * 4 and stream.pending == 0
    assert log == [(number, shown(number % 4)) for number in range(12)]


@pytest.mark.parametrize("kind", ["command", "template", "many", "calls"])
def test_order_holds_whatever_the_garbage_collector_runs(layer: ModuleType, kind: str) -> None:
    get, stream, log = layer.Template(b"ECHO", 0), layer.Stream(), []
    calls: dict[str, Callable[[Any, bytes], None]] = {
        "command": lambda pending_reply, word: stream.put_command(pending_reply, (b"ECHO", word)),
        "template": lambda pending_reply, word: stream.put(get, pending_reply, word, b"", 0),
        "many": lambda pending_reply, word: stream.put_many(get, pending_reply, [word], [b""], 0),
        "calls": lambda pending_reply, word: stream.put_calls(pending_reply, [(b"ECHO", word)]),
    }
    put, others = calls[kind], itertools.count(10_000)

    def intrude() -> None:
        number = next(others)
        stream.put_command(LoggedReply(log, number), (b"ECHO", b"%d" % number))

    mine = [(LoggedReply(log, number), b"%d" % number) for number in range(300)]
    with Intruder(intrude) as intruder:
        for pending_reply, word in mine:
            intruder.arm()
            put(pending_reply, word)
    sent = [int(word) for word in stream.take_output().split(b"\r\n")[4::5]]
    assert sorted(sent) == [*range(300), *range(10_000, next(others))]
    # else no thread came in between; a template alone allocates only where the ring buffer grows
    assert len(sent) > 300
    assert stream.pending == len(sent)
    stream.feed(b"".join(b":%d\r\n" % number for number in sent))
    many = kind in ("many", "calls")
    assert log == [(number, ("list", [shown(number)]) if many and number < 300 else shown(number)) for number in sent]
