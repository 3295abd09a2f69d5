"""For the tests of the benchmarks: a server that somebody else uses too, and whether anything may be measured."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from fastlock.benches import cli
from fastlock.benches.target import Target
from fastlock.embedded import Server


@pytest.fixture(scope="session")
def measurable() -> None:
    """For tests that run the benchmarks: only a release build is measured."""
    core = cli._core()
    if core is not None and core.BUILD != "release":
        pytest.skip(f"a {core.BUILD} build is not measured")


@pytest.fixture(scope="module")
def shared() -> Iterator[Server]:
    """A server for the benchmarks of a file, which another user shares: one of its keys is none of theirs."""
    with Server() as shared, redis.Redis.from_url(shared.url) as client:
        client.set("somebody-else", "stays")
        yield shared


@pytest.fixture(scope="module")
def db(shared: Server) -> Iterator[redis.Redis]:
    """A redis-py client of `shared`."""
    with redis.Redis.from_url(shared.url) as client:
        yield client


@pytest.fixture
def target(shared: Server) -> Iterator[Target]:
    """`shared` as the benchmarks see it."""
    target = Target(shared.url, private=False)
    yield target
    target.close()
