"""Fixtures of the tests of the benchmarks: a server with another user, and whether the build may be measured."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from fastlock.benches import cli
from fastlock.benches.target import Target
from fastlock.embedded import Server


@pytest.fixture(scope="session")
def measurable() -> None:
    """Skip tests that run the benchmarks on a build that is not a release build."""
    core = cli._core()
    if core is not None and core.BUILD != "release":
        pytest.skip(f"a {core.BUILD} build is not measured")


@pytest.fixture(scope="module")
def shared() -> Iterator[Server]:
    """A server for the benchmarks of a test file, with a key of another user."""
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
