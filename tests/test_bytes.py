"""The bytes layer, compiled and in Python: what goes out is what hiredis would pack, what comes in is what hiredis
reads, and every reply reaches its slot, in order, however the stream is cut. One body for both; no sockets here.
"""

from __future__ import annotations

import gc
import itertools
import random
import threading
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
from support.slots import Slot, packed, shown

from fastlock import _commands as say

CAPABILITIES = (say.SET_NX_GET, say.DELIFEQ, say.DELEX, say.SET_IFEQ)
DIALECTS = [frozenset(chosen) for n in range(5) for chosen in itertools.combinations(CAPABILITIES, n)]
NASTY = [b"a", b"", b"a b", b"\r\n", b"\0", b"{tag}", b"%d%b", b"$3\r\nabc\r\n", b"\xff\xfe", bytes(range(256)) * 12]
NOTHING = object()

seeded = settings(
    derandomize=True, deadline=None, max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
raw = st.binary(max_size=60) | st.sampled_from(NASTY) | st.integers(0, 4000).map(lambda size: b"{\r\n}" * size)


def filled(form: tuple[bytes | int, ...], name: bytes, token: bytes, ms: int) -> bytes:
    values = (name, token, b"%d" % ms)
    return packed(*(part if isinstance(part, bytes) else values[part] for part in form))


# ------------------------------------------------------------------------------------------------------- what goes out


def test_every_form_of_every_dialect_is_packed_as_hiredis_packs_it(layer: ModuleType) -> None:
    for capabilities in DIALECTS:
        for form in say.dialect(capabilities):
            template = layer.Template(*form)
            assert template.parts == form
            for name, token in itertools.product(NASTY, NASTY):
                pipe = layer.Pipe()
                pipe.put(template, None, name, token, 2**53)
                assert pipe.take() == filled(form, name, token, 2**53)


@seeded
@given(
    form=st.lists(st.sampled_from([0, 1, 2]) | raw, min_size=1, max_size=7).map(tuple),
    calls=st.lists(st.tuples(raw, raw, st.integers(-(2**62), 2**62)), min_size=1, max_size=4),
)
def test_any_template_is_packed_as_hiredis_packs_it(layer: ModuleType, form: Any, calls: Any) -> None:
    pipe, template = layer.Pipe(), layer.Template(*form)
    for name, token, ms in calls:
        pipe.put(template, None, name, token, ms)
    assert pipe.unsent == len(b"".join(filled(form, *call) for call in calls))
    assert pipe.take() == b"".join(filled(form, *call) for call in calls)


def test_a_template_of_one_hole_many_times_has_room_for_all(layer: ModuleType) -> None:
    pipe, template, big = layer.Pipe(), layer.Template(*[0] * 7), b"x" * 30_000
    for _ in range(20):
        pipe.put(template, None, big, b"", 0)
    assert pipe.take() == packed(*[big] * 7) * 20


@pytest.mark.parametrize("ms", [0, 1, 9, 10, 99, 2**31, 2**53, 2**63 - 1, -1, -(2**63) + 1])
def test_numbers_are_written_whole(layer: ModuleType, ms: int) -> None:
    pipe = layer.Pipe()
    pipe.put(layer.Template(2), None, b"", b"", ms)
    assert pipe.take() == packed(b"%d" % ms)


@pytest.mark.parametrize(
    "parts", [(), (b"x",) * 17, (3,), (-1,), ("GET",), (None,), (bytearray(b"x"),), (0,) * 8, (0, b"a") * 8, (1.5,)]
)
def test_a_template_that_cannot_be_is_refused(layer: ModuleType, parts: Any) -> None:
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
    form = (b"SET", 0, 1, b"PX", 2)
    pipe, template = layer.Pipe(), layer.Template(*form)
    expected, slots = b"", 0
    for kind, *args in steps:
        slots += kind != "take"
        if kind == "put":
            pipe.put(template, None, *args)
            expected += filled(form, *args)
        elif kind == "many":
            pipe.put_many(template, None, [name for name, _ in args[0]], [token for _, token in args[0]], args[1])
            expected += b"".join(filled(form, name, token, args[1]) for name, token in args[0])
        elif kind == "command":
            pipe.put_command(None, args[0])
            expected += packed(*args[0])
        elif kind == "calls":
            pipe.put_calls(None, args[0])
            expected += b"".join(packed(*call) for call in args[0])
        else:
            assert pipe.take() == expected
            expected = b""
        assert (pipe.unsent, pipe.pending) == (len(expected), slots)
    assert pipe.take() == expected


def wrong_calls(layer: ModuleType, pipe: Any) -> list[Any]:
    """Calls that must raise; each begins well and goes wrong in the middle."""
    get = layer.Template(b"SET", 0, 1, 2)
    big = b"x" * 5000
    return [
        lambda: pipe.put(get, None, "name", b"", 0),
        lambda: pipe.put(get, None, big, None, 0),
        lambda: pipe.put(get, None, None, b"", 0),
        lambda: pipe.put(get, None, big, bytearray(b"t"), 0),
        lambda: pipe.put(get, None, big, b"t", "1"),
        lambda: pipe.put(get, None, big, b"t", None),
        lambda: pipe.put_many(get, None, [big, "b"], [b"t", b"t"], 0),
        lambda: pipe.put_many(get, None, [big, b"b", None], [b"t"] * 3, 0),
        lambda: pipe.put_many(get, None, [big, b"b"], [b"t", 5], 0),
        lambda: pipe.put_many(get, None, [big, b"b"], [b"t"], 0),
        lambda: pipe.put_many(get, None, [big], [b"t", b"t"], 0),
        lambda: pipe.put_many(get, None, [], [], 0),
        lambda: pipe.put_command(None, (b"GET", big, "c")),
        lambda: pipe.put_command(None, (b"GET", None)),
        lambda: pipe.put_calls(None, []),
        lambda: pipe.put_calls(None, [(b"GET", big), (b"GET", 5)]),
        lambda: pipe.put_calls(None, [(b"GET", big), None]),
    ]


@pytest.mark.parametrize("number", range(17))
def test_a_call_that_fails_in_the_middle_leaves_nothing_behind(layer: ModuleType, number: int) -> None:
    log: list[Any] = []
    pipe = layer.Pipe()
    pipe.put_command(Slot(log, 0), (b"ONE",))
    calls = wrong_calls(layer, pipe)
    assert len(calls) == 17
    with pytest.raises((TypeError, ValueError)):
        calls[number]()
    assert (pipe.unsent, pipe.pending) == (len(packed(b"ONE")), 1)
    pipe.put_command(Slot(log, 1), (b"TWO",))
    assert pipe.take() == packed(b"ONE") + packed(b"TWO")
    pipe.feed(b":1\r\n:2\r\n")
    assert log == [(0, shown(1)), (1, shown(2))]


# ------------------------------------------------------------------------------------------------------- what comes in


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
subscribed = st.sampled_from([bulk(b"inbox"), b"+inbox\r\n"]).map(
    lambda inbox: b">3\r\n$9\r\nsubscribe\r\n%b:1\r\n" % inbox
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


def read_plainly(stream: bytes) -> tuple[list[Any], list[Any]]:
    """(replies, pushes) of a stream, by hiredis alone; what answers a SUBSCRIBE is a reply, though it comes as a
    push."""
    reader = hiredis.Reader(notEnoughData=NOTHING)
    reader.feed(stream)
    found: list[Any] = list(iter(reader.gets, NOTHING))
    is_push = [type(reply) is hiredis.PushNotification and reply[0] != b"subscribe" for reply in found]
    return [x for x, push in zip(found, is_push, strict=True) if not push], [
        x for x, push in zip(found, is_push, strict=True) if push
    ]


def asked(layer: ModuleType, replies: list[Any], kinds: random.Random) -> tuple[Any, list[Any], list[Any], list[Any]]:
    """A pipe that waits for these replies in slots of all kinds; the log, what it must become, and the tickets."""
    pipe, log, expected, tickets = layer.Pipe(), [], [], []
    get, left = layer.Template(b"GET", 0), deque(map(shown, replies))
    for number in itertools.count():
        if not left:
            break
        kind, count = kinds.randrange(6), kinds.randint(1, min(4, len(left)))
        slot: Any = Slot(log, number, done=kind == 3)
        if kind == 4:
            slot = layer.Ticket()
        if kind == 0:
            pipe.put_many(get, slot, [b"n"] * count, [b""] * count, 0)
        elif kind == 1:
            pipe.put_calls(slot, [(b"GET",)] * count)
        else:
            pipe.put_command(None if kind == 5 else slot, (b"GET", b"n"))
        reply = ("list", [left.popleft() for _ in range(count)]) if kind < 2 else left.popleft()
        if kind in (0, 1, 2):
            expected.append((number, reply))
        elif kind == 4:
            tickets.append((slot, reply))
    return pipe, log, expected, tickets


def check_deliveries(layer: ModuleType, stream: bytes, cuts: list[int], seed: int = 0) -> None:
    """Feed a stream in pieces and demand what plain hiredis reads, each reply in its slot."""
    replies, notes = read_plainly(stream)
    pipe, log, expected, tickets = asked(layer, replies, random.Random(seed))
    heard: list[Any] = []
    pipe.hear = heard.append
    for start, end in itertools.pairwise([0, *cuts, len(stream)]):
        pipe.feed(stream[start:end])
    assert log == expected
    assert [shown(ticket.reply) for ticket, _ in tickets] == [reply for _, reply in tickets]
    assert all(ticket.ready and ticket.done() for ticket, _ in tickets)
    assert [shown(push) for push in heard] == [shown(push) for push in notes]
    assert (pipe.pending, pipe.broken, pipe.drain([])) == (0, False, [])


@seeded
@given(st.lists(frames | frames | pushes | subscribed, max_size=12), st.randoms(use_true_random=False))
def test_any_stream_in_any_pieces_reaches_its_slots(layer: ModuleType, parts: list[bytes], dice: random.Random) -> None:
    stream, seed = b"".join(parts), dice.randrange(2**32)
    check_deliveries(layer, stream, [], seed)
    check_deliveries(layer, stream, sorted(dice.randint(0, len(stream)) for _ in range(dice.randint(1, 9))), seed)
    if len(stream) <= 2000:
        check_deliveries(layer, stream, list(range(1, len(stream))), seed)


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
    dice = random.Random(7)
    for _ in range(500):
        check_deliveries(layer, SAMPLE, sorted((dice.randrange(len(SAMPLE)), dice.randrange(len(SAMPLE)))))


def test_a_value_may_hold_what_looks_like_a_protocol(layer: ModuleType) -> None:
    for value in (b"\n*12345", b"\r\n%99999999\r\n", b"*4294967295\r\n", b"$9223372036854775807\r\n" * 50, b"\n|55555"):
        stream = bulk(value) + b":1\r\n" + b"*1\r\n" + bulk(value)
        for cut in (0, 3, len(stream) // 2, len(stream) - 3):
            check_deliveries(layer, stream, [cut])
        check_deliveries(layer, stream, list(range(1, len(stream))))


# ------------------------------------------------------------------------------------------- what must not be believed

GARBAGE = [
    *(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n", b"\x15\x03\x01\x00\x02\x02\x28", b"\0", b"\r\n"),
    *(b":12a\r\n", b"#x\r\n", b",x\r\n", b"(1x\r\n", b"*-5\r\n", b"$-2\r\n", b"*x\r\n", b"_x\r\n", b"!5\r\nERR x\r\n"),
    *(b"*4294967295\r\n", b"%4611686018427387904\r\n", b"*2147483647\r\n", b"~99999999\r\n", b">99999999\r\n"),
    *(b"-a\n$5\r\n*10000000\r\n", b"+a\n$5\r\n*10000000\r\n", b"|99999\r\n", b"*1\r\n*1000000\r\n"),
    *(b"*" + b"9" * 40 + b"\r\n", b"*" + b"9" * 5000 + b"\r\n", b"$" + b"9" * 5000 + b"\r\n"),
    *(b"%1\r\n*1\r\n:1\r\n:2\r\n", b"*1\r\n" * 9 + b":1\r\n", b"*1\r\n" * 16_000 + b":1\r\n"),
]


def memory() -> int:
    """The most that this process has had reserved, in bytes: what was asked for and not touched counts too."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmPeak:")[1].split()[0]) * 1024


@pytest.mark.parametrize("garbage", GARBAGE, ids=lambda value: repr(value)[2:30])
@pytest.mark.parametrize("bytewise", [False, True], ids=["whole", "crumbs"])
def test_bytes_that_cannot_be_explained_break_the_pipe_and_cost_nothing(
    layer: ModuleType, garbage: bytes, bytewise: bool
) -> None:
    log: list[Any] = []
    pipe = layer.Pipe()
    slot, other = Slot(log, 0), layer.Ticket()
    pipe.put_command(slot, (b"GET",))
    pipe.put_calls(other, [(b"GET",), (b"GET",)])
    before = memory()
    with pytest.raises(hiredis.ProtocolError):
        for piece in [garbage[i : i + 1] for i in range(len(garbage))] if bytewise else [garbage]:
            pipe.feed(piece)
    assert memory() - before < 4 << 20
    assert pipe.broken
    assert not log
    assert not other.ready
    assert pipe.drain([]) == [slot, other]


HUGE = [
    b"$9223372036854775807\r\n",
    b"$4294967297\r\n",
    b"=99999\r\n",
    b"!65537\r\n",
    b"*3\r\n=65537\r\n",
    b"$" + b"0" * 70,
    b"=" + b"9" * 30 + b"\r\n",
    b"*1\r\n*" + b"9" * 40 + b"\r\n",
]


@pytest.mark.parametrize("header", HUGE)
def test_a_reply_too_long_is_refused_when_it_is_announced(layer: ModuleType, header: bytes) -> None:
    for pieces in ([header], [header[i : i + 1] for i in range(len(header))]):
        pipe = layer.Pipe()
        pipe.put_command(layer.Ticket(), (b"GET",))
        with pytest.raises(hiredis.ProtocolError):
            for piece in pieces:
                pipe.feed(piece)


@pytest.mark.parametrize("header", [b"+", b"-", b"*100\r\n", b"%99\r\n", b"*3\r\n$65536\r\n"])
@pytest.mark.parametrize("size", [1, 999, 65536])
def test_an_unfinished_reply_is_bounded(layer: ModuleType, header: bytes, size: int) -> None:
    pipe, ticket = layer.Pipe(), layer.Ticket()
    pipe.put_command(ticket, (b"GET",))
    pipe.feed(header)
    endless = b"x" if header[0] in b"+-" else b"$999\r\n" + b"x" * 999 + b"\r\n"
    body = (b"x" * 65536 if b"$" in header else b"") + endless * (140_000 // len(endless))
    before, fed = memory(), len(header)
    with pytest.raises(hiredis.ProtocolError):
        for start in range(0, len(body), size):
            pipe.feed(body[start : start + size])
            fed += size
    assert fed <= layer.MAX_REPLY + layer.MAX_FRAME
    assert not ticket.ready
    assert memory() - before < 4 << 20


@pytest.mark.parametrize("last", [1, 2, 3, 9, 20, 26, 65536])
def test_the_longest_token_is_no_reply_too_long(layer: ModuleType, last: int) -> None:
    """However its bytes come, and with what goes with it: as the answer to a fenced acquire."""
    pipe, ticket = layer.Pipe(), layer.Ticket()
    pipe.put_command(ticket, (b"EVALSHA",))
    reply = b"*2\r\n$65536\r\n" + b"t" * 65536 + b"\r\n:1763758800000000\r\n"
    pipe.feed(reply[:-last])
    assert not ticket.ready
    pipe.feed(reply[-last:])
    assert ticket.reply == [b"t" * 65536, 1763758800000000]


def test_many_small_replies_are_no_large_one(layer: ModuleType) -> None:
    log: list[Any] = []
    pipe = layer.Pipe()
    for number in range(20_000):
        pipe.put_command(Slot(log, number), (b"GET",))
    stream = b"$16\r\n0123456789abcdef\r\n" * 20_000
    for start in range(0, len(stream), 65_536):
        pipe.feed(stream[start : start + 65_536])
    assert [number for number, _ in log] == list(range(20_000))
    pipe.put_command(Slot(log, -1), (b"GET",))
    pipe.feed(bulk(b"x" * 65_000))  # as large as a name or token may be
    assert log[-1][0] == -1


@pytest.mark.parametrize("asked_for", [0, 1, 2, 3])
def test_a_reply_too_many_makes_its_neighbours_suspect(layer: ModuleType, asked_for: int) -> None:
    log: list[Any] = []
    pipe = layer.Pipe()
    slots = [Slot(log, number) for number in range(asked_for)]
    for slot in slots:
        pipe.put_command(slot, (b"GET",))
    with pytest.raises(hiredis.ProtocolError):
        pipe.feed(b":1\r\n" * (asked_for + 1))
    assert (log, pipe.broken, pipe.drain([])) == ([], True, slots)


def test_a_push_that_nobody_asked_for_is_no_fault(layer: ModuleType) -> None:
    pipe, heard, push = layer.Pipe(), list[Any](), b">2\r\n+invalidate\r\n*1\r\n+name\r\n"
    assert pipe.hear is None
    pipe.feed(push)  # which nobody wants to hear
    pipe.hear = heard.append
    pipe.feed(push * 2)
    pipe.hear = None
    pipe.feed(push)
    assert heard == [[b"invalidate", [b"name"]]] * 2
    assert not pipe.broken


def test_garbage_after_garbage_keeps_no_memory(layer: ModuleType) -> None:
    def once(garbage: bytes) -> None:
        pipe = layer.Pipe()
        pipe.put_command(layer.Ticket(), (b"GET",))
        with pytest.raises(hiredis.ProtocolError):
            pipe.feed(garbage)

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


def test_ten_thousand_slots_grow_and_wrap_around_in_order(layer: ModuleType) -> None:
    dice, pipe, log = random.Random(11), layer.Pipe(), []
    model: deque[int] = deque()
    sent = answered = 0
    while answered < 10_000:
        for _ in range(dice.choice((1, 3, 40, 700))):
            model.append(sent)
            pipe.put_command(Slot(log, sent), (b"GET",))
            sent += 1
        count = len(model) if dice.random() < 0.1 else dice.randint(0, len(model))
        pipe.feed(b"".join(b":%d\r\n" % model.popleft() for _ in range(count)))
        answered += count
        assert pipe.pending == len(model)
    assert log == [(number, shown(number)) for number in range(answered)]
    assert [slot.number for slot in pipe.drain([])] == list(model)


def test_drain_gives_every_slot_once_and_drops_what_was_not_sent(layer: ModuleType) -> None:
    pipe, ticket, get = layer.Pipe(), layer.Ticket(), layer.Template(b"GET", 0)
    for _ in range(50):  # so that the ring is not at its start
        pipe.put_command(None, (b"X",))
    pipe.feed(b"_\r\n" * 50)
    slots = [Slot([], 1), None, ticket, Slot([], 2, done=True)]
    pipe.put_command(slots[0], (b"GET",))
    pipe.put_many(get, None, [b"a", b"b"], [b"", b""], 0)
    pipe.put_calls(ticket, [(b"GET",)] * 3)
    pipe.feed(b"_\r\n_\r\n_\r\n_\r\n")
    pipe.put_command(slots[3], (b"GET",))
    assert pipe.drain([]) == slots[2:]
    assert (pipe.pending, pipe.unsent, pipe.take(), pipe.drain([])) == (0, 0, b"", [])
    assert not ticket.ready
    with pytest.raises(hiredis.ProtocolError):
        pipe.feed(b"_\r\n")  # the rest of what was drained


def test_the_heir_is_the_first_ticket_that_sleeps_and_still_waits(layer: ModuleType) -> None:
    class Wake:
        def release(self) -> None: ...

    pipe = layer.Pipe()
    assert pipe.heir() is None
    awake, gone, first, second = (layer.Ticket() for _ in range(4))
    gone.wake = first.wake = second.wake = Wake()
    gone.abandoned = True
    pipe.put_command(None, (b"X",))
    pipe.put_command(Slot([], 0), (b"X",))
    pipe.put_command(awake, (b"X",))
    pipe.put_command(gone, (b"X",))
    assert pipe.heir() is None
    pipe.put_calls(first, [(b"X",), (b"X",)])
    pipe.put_command(second, (b"X",))
    assert pipe.heir() is first
    pipe.feed(b":1\r\n" * 5)
    assert pipe.heir() is first
    pipe.feed(b":1\r\n")
    assert pipe.heir() is second


def test_a_ticket_wakes_its_sleeper_once_and_only_when_its_reply_is_there(layer: ModuleType) -> None:
    ticket, woken = layer.Ticket(), []

    class Wake:
        def release(self) -> None:
            woken.append((ticket.ready, ticket.done(), ticket.reply, ticket.wake))

    assert (ticket.reply, ticket.wake, ticket.ready, ticket.abandoned, ticket.done()) == (
        None,
        None,
        False,
        False,
        False,
    )
    ticket.wake = Wake()
    ticket.set_result(False)
    ticket.set_result(5)
    assert woken == [(True, True, False, None)]


def test_a_slot_that_was_answered_or_drained_is_let_go(layer: ModuleType) -> None:
    pipe = layer.Pipe()
    slots = [Slot([], number) for number in range(6)]
    for slot in slots[:4]:
        pipe.put_command(slot, (b"GET",))
    pipe.put_calls(slots[4], [(b"GET",)] * 2)
    pipe.put_command(slots[5], (b"GET",))
    kept = [weakref.ref(slot) for slot in slots]
    del slots, slot
    pipe.feed(b"*1\r\n:1\r\n" * 6)
    assert [ref() is None for ref in kept] == [True] * 5 + [False]
    pipe.drain([])
    assert kept[5]() is None


def test_a_slot_that_raises_breaks_the_pipe(layer: ModuleType) -> None:
    class Broken(Slot):
        def set_result(self, reply: Any) -> None:
            raise RuntimeError("the event loop is closed")

    pipe = layer.Pipe()
    pipe.put_command(Broken([], 0), (b"GET",))
    with pytest.raises(RuntimeError, match="closed"):
        pipe.feed(b":1\r\n")
    assert pipe.broken  # nobody can tell which replies of the chunk were delivered


def test_nobody_reads_on_where_bytes_were_lost(layer: ModuleType) -> None:
    """Between the break and the end of the connection others may get their turn: no reply may reach the wrong one."""
    log: list[Any] = []
    pipe = layer.Pipe()
    for number in range(3):
        pipe.put_command(Slot(log, number), (b"GET",))
    with pytest.raises(hiredis.ProtocolError):
        pipe.feed(b"?\r\n")
    for data in (b":1\r\n", b":2\r\n"):
        with pytest.raises(hiredis.ProtocolError, match="out of step"):
            pipe.feed(data)
    assert log == [] and pipe.pending == 3


class Intruder:
    """Whenever the garbage collector runs in the test's thread, another thread queues a command of its own.

    That is what finalizers and callbacks may do: they run Python in the middle of an allocation, and let others in.
    """

    def __init__(self, put: Callable[[], None]) -> None:
        self._put, self._victim, self._over = put, threading.get_ident(), False
        self._knock, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._kept: list[list[int]] = []
        self._thread = threading.Thread(target=self._work, daemon=True)

    def _work(self) -> None:
        while self._knock.acquire() and not self._over:
            self._put()
            self._done.release()

    def arm(self) -> None:
        """The next allocation of a container runs the collector: those that were set aside for reuse are used up."""
        gc.disable()
        self._kept.clear()
        self._kept += [[] for _ in range(200)]
        gc.enable()

    def _collecting(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start" and threading.get_ident() == self._victim:
            self._knock.release()
            self._done.acquire(timeout=0.01)  # where a mutex keeps it out it comes in later

    def __enter__(self) -> Intruder:
        self._thread.start()
        self._threshold = gc.get_threshold()
        gc.callbacks.append(self._collecting)
        gc.set_threshold(1)
        return self

    def __exit__(self, *exc: object) -> None:
        gc.callbacks.remove(self._collecting)
        gc.set_threshold(*self._threshold)
        self._over = True
        self._knock.release()
        self._thread.join(30)


class Turns:
    """As much of what wakes tasks as a pipe needs."""

    loop = "the loop"


def test_requests_tell_once_until_the_next_take(layer: ModuleType) -> None:
    pipe, turns, told, log = layer.Pipe(), Turns(), list[int](), list[Any]()
    assert pipe.forms == () and pipe.link is None
    pipe.serve("the link", turns, 7, lambda: told.append(pipe.pending))
    assert (pipe.link, pipe.turns, pipe.thread) == ("the link", turns, 7)
    pipe.forms = (layer.Template(b"GET", 0), layer.Template(b"SET", 0, 1, b"PX", 2))
    for turn in range(3):
        slots = [Slot(log, 4 * turn + n) for n in range(4)]
        for n, slot in enumerate(slots):
            pipe.request(pipe.forms[n % 2], slot, b"a", b"b", 5)
        pipe.announce()
        assert told == [1] * (turn + 1)
        assert pipe.take() == (packed(b"GET", b"a") + packed(b"SET", b"a", b"b", b"PX", b"5")) * 2
        pipe.feed(b":0\r\n:1\r\n:2\r\n:3\r\n")
        assert [slot.done() for slot in slots] == [False] * 4 and pipe.pending == 0
    assert log == [(number, shown(number % 4)) for number in range(12)]


@pytest.mark.parametrize("kind", ["command", "template", "many", "calls"])
def test_order_holds_whatever_the_garbage_collector_runs(layer: ModuleType, kind: str) -> None:
    get, pipe, log = layer.Template(b"ECHO", 0), layer.Pipe(), []
    calls: dict[str, Callable[[Any, bytes], None]] = {
        "command": lambda slot, word: pipe.put_command(slot, (b"ECHO", word)),
        "template": lambda slot, word: pipe.put(get, slot, word, b"", 0),
        "many": lambda slot, word: pipe.put_many(get, slot, [word], [b""], 0),
        "calls": lambda slot, word: pipe.put_calls(slot, [(b"ECHO", word)]),
    }
    put, others = calls[kind], itertools.count(10_000)

    def intrude() -> None:
        number = next(others)
        pipe.put_command(Slot(log, number), (b"ECHO", b"%d" % number))

    mine = [(Slot(log, number), b"%d" % number) for number in range(300)]
    with Intruder(intrude) as intruder:
        for slot, word in mine:
            intruder.arm()
            put(slot, word)
    sent = [int(word) for word in pipe.take().split(b"\r\n")[4::5]]
    assert sorted(sent) == [*range(300), *range(10_000, next(others))]
    assert len(sent) > 300  # else nobody came in between; a template alone allocates only where the ring grows
    assert pipe.pending == len(sent)
    pipe.feed(b"".join(b":%d\r\n" % number for number in sent))
    many = kind in ("many", "calls")
    assert log == [(number, ("list", [shown(number)]) if many and number < 300 else shown(number)) for number in sent]
