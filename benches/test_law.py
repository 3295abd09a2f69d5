"""CPU cost of the law: tokens, checks, whole operations fed with canned replies. Parts of it are compiled."""

from __future__ import annotations

import math
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from fastlock import _checks, _law, _lease
from fastlock._stats import Stats
from fastlock._steps import Steps

pytestmark = pytest.mark.usefixtures("implementation")
TOKEN = b"0123456789abcdef0123456789abcdef"


def play(ask: _law.AcquireMany, answer: Any) -> Any:
    """Run a batch that asks once, as a wire would, and return its outcome."""
    ask.sent = _lease.now()
    steps: Steps = ask.rest(answer, _lease.now)
    try:
        next(steps)
    except StopIteration as end:
        return end.value
    raise AssertionError("the operation asks for more")


def test_token(benchmark: BenchmarkFixture) -> None:
    assert len(benchmark(_lease.new_token)) == 35


@pytest.mark.parametrize("name", ["order:4711", b"order:4711"], ids=["str", "bytes"])
def test_check_name(benchmark: BenchmarkFixture, name: str | bytes) -> None:
    assert benchmark(_checks.as_name, name) == b"order:4711"


@pytest.mark.parametrize(("timeout", "ms"), [(10, 10_000), (0.29, 290)], ids=["int", "float"])
def test_check_timeout(benchmark: BenchmarkFixture, timeout: float, ms: int) -> None:
    assert benchmark(_checks.as_ms, timeout) == ms


def test_release(benchmark: BenchmarkFixture) -> None:
    """The long way, through the generator: the hot path makes none."""
    lease = _lease.Lease("order:4711", b"order:4711", TOKEN, math.inf)

    def release() -> object:
        steps = _law.Release(lease).rest(1, _lease.now)
        try:
            next(steps)
        except StopIteration as end:
            return end.value
        return None

    assert benchmark(release) is True


def test_acquire_500(benchmark: BenchmarkFixture) -> None:
    names: list[Any] = [f"order:{number}" for number in range(500)]
    keys, answers = [name.encode() for name in names], [None] * 500
    stats = Stats()
    leases = benchmark(lambda: play(_law.AcquireMany(names, keys, TOKEN, 10_000, stats), answers))
    assert all(lease.valid for lease in leases)


def test_lease_remaining(benchmark: BenchmarkFixture) -> None:
    lease = _lease.Lease("order:4711", b"order:4711", TOKEN, _lease.now() + 3600)
    assert 0 < benchmark(lambda: lease.remaining) <= 3600
