"""CPU cost of the bytes layer: encoding commands, and taking replies to their slots."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from fastlock import _commands

NAME, TOKEN, MS = b"order:4711", b"0123456789abcdef0123456789abcdef", 10_000
FORM = _commands.dialect(frozenset({_commands.SET_NX_GET}))[_commands.ACQUIRE]
WORDS = (b"SET", NAME, TOKEN, b"NX", b"GET", b"PX", b"10000")
ENCODED = b"*7\r\n" + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in WORDS)


def test_encode_one(benchmark: BenchmarkFixture, layer: ModuleType) -> None:
    pipe, template = layer.Pipe(), layer.Template(*FORM)

    def encode() -> None:
        pipe.put(template, None, NAME, TOKEN, MS)
        pipe.drain([])

    benchmark(encode)
    pipe.put(template, None, NAME, TOKEN, MS)
    assert pipe.take() == ENCODED


def test_encode_500_names(benchmark: BenchmarkFixture, layer: ModuleType) -> None:
    pipe, template = layer.Pipe(), layer.Template(*FORM)
    names, tokens = [NAME] * 500, [TOKEN] * 500

    def encode() -> None:
        pipe.put_many(template, None, names, tokens, MS)
        pipe.drain([])

    benchmark(encode)
    pipe.put_many(template, None, names, tokens, MS)
    assert pipe.take() == ENCODED * 500


@pytest.mark.parametrize("reply", [b"_\r\n", b":1\r\n", b"$32\r\n%b\r\n" % TOKEN], ids=["null", "integer", "token"])
@pytest.mark.parametrize("count", [1, 64, 1000])
def test_feed(benchmark: BenchmarkFixture, layer: ModuleType, count: int, reply: bytes) -> None:
    pipe, template, data = layer.Pipe(), layer.Template(*FORM), reply * count
    tickets: list[Any] = []

    def asked() -> None:
        tickets[:] = [layer.Ticket() for _ in range(count)]
        for ticket in tickets:
            pipe.put(template, ticket, NAME, TOKEN, MS)
        pipe.take()

    benchmark.pedantic(pipe.feed, args=(data,), setup=asked, rounds=200 if count < 1000 else 50)  # type: ignore[no-untyped-call]
    assert pipe.pending == 0
    assert all(ticket.ready for ticket in tickets)


def test_feed_one_list(benchmark: BenchmarkFixture, layer: ModuleType) -> None:
    pipe, template = layer.Pipe(), layer.Template(*FORM)
    names, tokens, data, ticket = [NAME] * 500, [TOKEN] * 500, b"_\r\n" * 500, layer.Ticket()

    def asked() -> None:
        pipe.put_many(template, ticket, names, tokens, MS)
        pipe.take()

    benchmark.pedantic(pipe.feed, args=(data,), setup=asked, rounds=100)  # type: ignore[no-untyped-call]
    assert ticket.reply == [None] * 500
