"""Strings longer than any token, in the core and the fallback: dropped as they come, and answered as empty strings.

How else a stream may be cut: test_stream.py. What it means for locks: test_neighbours.py.
"""

from __future__ import annotations

import importlib
import itertools
import random
import tracemalloc
from types import ModuleType
from typing import Any

import hiredis
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.pending import LoggedReply, shown

from fastlock._limits import MAX_REPLY


def bulk(value: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(value), value)


# Streams in which a value that is no lock lies under some names, and the replies that stand for it.
LARGE = b"\r\n$3\r\n*99999\r\n" * 5000
DROPPED = [
    ([bulk(LARGE)], [b""]),
    ([b":1\r\n", bulk(b"x" * MAX_REPLY), bulk(b"x" * (MAX_REPLY + 1)), b":2\r\n"], [1, b"x" * MAX_REPLY, b"", 2]),
    ([bulk(LARGE), bulk(b"tok"), bulk(LARGE), bulk(LARGE), b"_\r\n"], [b"", b"tok", b"", b"", None]),
    ([b"*2\r\n" + bulk(LARGE) + b":7\r\n", b"$5\r\n\r\n$7\n\r\n"], [[b"", 7], b"\r\n$7\n"]),
    ([b"*3\r\n*1\r\n" + bulk(LARGE) + bulk(LARGE) + b"$-1\r\n", b"#t\r\n"], [[[b""], b"", None], True]),
]


@pytest.mark.parametrize(("parts", "replies"), DROPPED, ids=range(len(DROPPED)))
@pytest.mark.parametrize("seed", range(4))
def test_a_string_longer_than_any_token_becomes_an_empty_one(
    layer: ModuleType, parts: list[bytes], replies: list[Any], seed: int
) -> None:
    """Fed whole, byte by byte where it matters, and in any pieces; the replies around it are delivered."""
    data, rng, log, stream = b"".join(parts), random.Random(seed), list[Any](), layer.Stream()
    for number in range(len(parts)):
        stream.put_command(LoggedReply(log, number), (b"GET",))
    sizes = {0: [len(data)], 1: [1] * len(data), 2: [65536] * 99, 3: [rng.choice((1, 2, 7, 9000)) for _ in data]}
    at = 0
    for size in sizes[seed]:
        if at < len(data):
            stream.feed(data[at : at + size])
        at += size
    assert log == [(number, shown(reply)) for number, reply in enumerate(replies)]
    assert (stream.pending, stream.broken) == (0, False)


small = st.sampled_from([
    *(bulk(b""), bulk(b"\r\n$70000\r\n"), bulk(b"x" * 65536), b":7\r\n", b"_\r\n", b"$-1\r\n", b"+OK\r\n", b"#t\r\n"),
    *(b"-ERR no\r\n", b"*2\r\n:1\r\n$3\r\nabc\r\n", b"=8\r\ntxt:*123\r\n", b"%1\r\n+k\r\n*1\r\n_\r\n", b"*0\r\n"),
    *(b">3\r\n+message\r\n+channel\r\n$3\r\nabc\r\n", b">2\r\n+invalidate\r\n*1\r\n+name\r\n", b"#f\r\n"),
])  # fmt: skip
nested = st.sampled_from([b"*2\r\n%b:1\r\n", b"*1\r\n*2\r\n_\r\n%b", b">3\r\n+message\r\n+channel\r\n%b", b"%b"])


@settings(derandomize=True, deadline=None, max_examples=80)
@given(st.lists(st.tuples(nested) | small, max_size=8), st.randoms(use_true_random=False))
def test_core_and_fallback_drop_the_same_bytes(parts: list[Any], rng: random.Random) -> None:
    """Streams with pushes between the replies; compared with a stream that held an empty string from the first."""
    data, plain = (
        b"".join(part if type(part) is bytes else part[0] % bulk(value) for part in parts) for value in (LARGE, b"")
    )
    reader = hiredis.Reader(notEnoughData=())
    reader.feed(plain)
    found: list[Any] = list(iter(reader.gets, ()))
    replies = [each for each in found if type(each) is not hiredis.PushNotification]
    notes = [each for each in found if type(each) is hiredis.PushNotification]
    cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.randrange(12)))
    for layer in map(importlib.import_module, ("fastlock._core", "fastlock._fallback")):
        stream, log, received = layer.Stream(), list[Any](), list[Any]()
        stream.on_push = received.append
        for number in range(len(replies)):
            stream.put_command(LoggedReply(log, number), (b"GET",))
        for start, end in itertools.pairwise([0, *cuts, len(data)]):
            stream.feed(data[start:end])
        assert log == [(number, shown(reply)) for number, reply in enumerate(replies)], layer
        assert [shown(push) for push in received] == [shown(push) for push in notes], layer


def test_dropped_bytes_take_no_memory(layer: ModuleType) -> None:
    stream, pending_reply = layer.Stream(), layer.PendingReply()
    stream.put_command(pending_reply, (b"GET",))
    stream.feed(b"$%d\r\n" % (100 << 20))
    chunk = b"x" * 65536
    tracemalloc.start()
    try:
        for _ in range((100 << 20) // 65536):
            stream.feed(chunk)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert not pending_reply.ready, "another reply must not get the bytes still to come"
    stream.feed(b"\r")
    assert not pending_reply.ready
    stream.feed(b"\n")
    assert (pending_reply.reply, stream.pending) == (b"", 0)
