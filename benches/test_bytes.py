"""CPU cost of the core: encoding commands, and giving replies to their pending replies."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from fastlock._protocol import commands
from fastlock._protocol.commands import Opcode

NAME, TOKEN, MS = b"order:4711", b"0123456789abcdef0123456789abcdef", 10_000
TEMPLATE = commands.command_table(frozenset({commands.SET_NX_GET}))[Opcode.ACQUIRE]
ARGUMENTS = (b"SET", NAME, TOKEN, b"NX", b"GET", b"PX", b"10000")
ENCODED = b"*7\r\n" + b"".join(b"$%d\r\n%b\r\n" % (len(argument), argument) for argument in ARGUMENTS)


def test_encode_one(benchmark: BenchmarkFixture, core: ModuleType) -> None:
    stream, template = core.Stream(), core.Template(*TEMPLATE)

    def encode() -> None:
        stream.put(template, None, NAME, TOKEN, MS)
        stream.take_pending([])

    benchmark(encode)
    stream.put(template, None, NAME, TOKEN, MS)
    assert stream.take_output() == ENCODED


def test_encode_500_names(benchmark: BenchmarkFixture, core: ModuleType) -> None:
    stream, template = core.Stream(), core.Template(*TEMPLATE)
    names, tokens = [NAME] * 500, [TOKEN] * 500

    def encode() -> None:
        stream.put_many(template, None, names, tokens, MS)
        stream.take_pending([])

    benchmark(encode)
    stream.put_many(template, None, names, tokens, MS)
    assert stream.take_output() == ENCODED * 500


@pytest.mark.parametrize("reply", [b"_\r\n", b":1\r\n", b"$32\r\n%b\r\n" % TOKEN], ids=["null", "integer", "token"])
@pytest.mark.parametrize("count", [1, 64, 1000])
def test_feed(benchmark: BenchmarkFixture, core: ModuleType, count: int, reply: bytes) -> None:
    stream, template, data = core.Stream(), core.Template(*TEMPLATE), reply * count
    pending_replies: list[Any] = []

    def put() -> None:
        pending_replies[:] = [core.PendingReply() for _ in range(count)]
        for pending_reply in pending_replies:
            stream.put(template, pending_reply, NAME, TOKEN, MS)
        stream.take_output()

    benchmark.pedantic(stream.feed, args=(data,), setup=put, rounds=200 if count < 1000 else 50)  # type: ignore[no-untyped-call]
    assert stream.pending == 0
    assert all(pending_reply.ready for pending_reply in pending_replies)


def test_feed_one_list(benchmark: BenchmarkFixture, core: ModuleType) -> None:
    stream, template = core.Stream(), core.Template(*TEMPLATE)
    names, tokens, data, pending_reply = [NAME] * 500, [TOKEN] * 500, b"_\r\n" * 500, core.PendingReply()

    def put() -> None:
        stream.put_many(template, pending_reply, names, tokens, MS)
        stream.take_output()

    benchmark.pedantic(stream.feed, args=(data,), setup=put, rounds=100)  # type: ignore[no-untyped-call]
    assert pending_reply.reply == [None] * 500
