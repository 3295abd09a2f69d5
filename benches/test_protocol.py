"""CPU cost of the protocol: tokens, checks, whole operations fed with canned replies. Parts of it are compiled."""

from __future__ import annotations

import math
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from fastlock._protocol import arguments, lease
from fastlock._protocol.batch_operations import AcquireMany
from fastlock._protocol.lease import Lease, now
from fastlock._protocol.release import Release
from fastlock._protocol.stats import Stats
from fastlock._protocol.steps import Steps

pytestmark = pytest.mark.usefixtures("implementation")
TOKEN = b"0123456789abcdef0123456789abcdef"


def finish(operation: AcquireMany, answer: Any) -> Any:
    """Run a batch that sends one request, as a transport would, and return its outcome."""
    operation.request.sent = now()
    steps: Steps[Any] = operation.continue_from(answer, now)
    try:
        next(steps)
    except StopIteration as end:
        return end.value
    raise AssertionError("the operation sends more")


def test_token(benchmark: BenchmarkFixture) -> None:
    assert len(benchmark(lease.new_token)) == 35


@pytest.mark.parametrize("name", ["order:4711", b"order:4711"], ids=["str", "bytes"])
def test_check_name(benchmark: BenchmarkFixture, name: str | bytes) -> None:
    assert benchmark(arguments.as_name, name) == b"order:4711"


@pytest.mark.parametrize(("timeout", "ms"), [(10, 10_000), (0.29, 290)], ids=["int", "float"])
def test_check_timeout(benchmark: BenchmarkFixture, timeout: float, ms: int) -> None:
    assert benchmark(arguments.as_ms, timeout) == ms


def test_release(benchmark: BenchmarkFixture) -> None:
    """By the slow path, through the generator: the fast path makes none."""
    lease = Lease("order:4711", b"order:4711", TOKEN, math.inf)

    def release() -> object:
        steps = Release(lease).continue_from(1, now)
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
    leases = benchmark(lambda: finish(AcquireMany(names, keys, TOKEN, 10_000, stats), answers))
    assert all(lease.valid for lease in leases)


def test_lease_remaining(benchmark: BenchmarkFixture) -> None:
    lease = Lease("order:4711", b"order:4711", TOKEN, now() + 3600)
    assert 0 < benchmark(lambda: lease.remaining) <= 3600
