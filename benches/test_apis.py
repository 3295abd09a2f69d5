"""CPU and wall time of the APIs for threads and asyncio: making a lock, and whole pairs on a real server."""

from __future__ import annotations

import asyncio

from pytest_benchmark.fixture import BenchmarkFixture

import fastlock
import fastlock.asyncio

NAMES = [f"order:{number}" for number in range(500)]


def test_make_lock(benchmark: BenchmarkFixture, client: fastlock.Client) -> None:
    lock = benchmark(lambda: client.lock("order:4711", timeout=10))
    assert lock.name == "order:4711"


def test_make_async_lock(benchmark: BenchmarkFixture, async_client: fastlock.asyncio.Client) -> None:
    lock = benchmark(lambda: async_client.lock("order:4711", timeout=10))
    assert lock.name == "order:4711"


def test_pair(benchmark: BenchmarkFixture, client: fastlock.Client) -> None:
    def pair() -> None:
        with client.lock("order:4711", timeout=10):
            pass

    benchmark(pair)
    assert not client.lock("order:4711").locked()


def test_pair_of_three_names(benchmark: BenchmarkFixture, client: fastlock.Client) -> None:
    """All of them or none, by one command each way; beside `test_pair`."""
    names = ["order:1", "order:2", "order:3"]

    def pair() -> None:
        with client.multi_lock(names, timeout=10):
            pass

    benchmark(pair)
    assert not client.multi_lock(names).locked()


def test_batch(benchmark: BenchmarkFixture, client: fastlock.Client) -> None:
    released = benchmark(lambda: client.release_many(client.acquire_many(NAMES, timeout=10)))
    assert released == [True] * len(NAMES)


def test_async_pair(benchmark: BenchmarkFixture, async_client: fastlock.asyncio.Client, runner: asyncio.Runner) -> None:
    """A hundred pairs, one after another: entering the loop is then a hundredth of it."""

    async def pairs() -> None:
        for _ in range(100):
            async with async_client.lock("order:4711", timeout=10):
                pass

    async def locked() -> bool:
        return await async_client.lock("order:4711").locked()

    benchmark(lambda: runner.run(pairs()))
    assert not runner.run(locked())


def test_async_pairs_at_once(
    benchmark: BenchmarkFixture, async_client: fastlock.asyncio.Client, runner: asyncio.Runner
) -> None:
    """Five hundred tasks, a pair each: what a pair costs when many share one flush."""

    async def pair(name: str) -> bool:
        async with async_client.lock(name, timeout=10) as lease:
            return lease.valid

    async def pairs() -> list[bool]:
        return await asyncio.gather(*map(pair, NAMES))

    assert benchmark(lambda: runner.run(pairs())) == [True] * len(NAMES)
