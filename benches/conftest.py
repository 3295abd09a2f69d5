"""Fixtures of the CPU benchmarks (``pytest benches``): the cores, a private server, clients.

What lives here: what it takes to measure the CPU of one caller, layer by layer, with pytest-benchmark. A benchmark also
checks what it did, since with --benchmark-disable it is a test. FASTLOCK_IMPL chooses the implementation of the
process, as everywhere; the core is measured compiled and in Python in any. Never here: throughput, concurrency and
rivals, which belong to ``fastlock bench``.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Iterator
from importlib.metadata import version
from types import ModuleType
from typing import Any

import pytest

import fastlock
import fastlock.asyncio
from fastlock import _implementation, embedded

MODULES = {"core": "fastlock._core", "fallback": "fastlock._fallback"}


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    """Record the versions and the implementation beside the numbers."""
    versions = {name: version(name) for name in ("hiredis", "redis")}
    machine_info["fastlock"] = versions | {"fastlock": fastlock.__version__, "impl": fastlock.IMPLEMENTATION}


def _release(request: pytest.FixtureRequest, module: ModuleType) -> ModuleType:
    if module.BUILD != "release" and not request.config.getoption("benchmark_disable"):
        pytest.skip(f"a {module.BUILD} build: its speed means nothing")
    return module


@pytest.fixture(params=[fastlock.IMPLEMENTATION])
def implementation(request: pytest.FixtureRequest) -> str:
    """The implementation of this process; a compiled one must be a release build."""
    _release(request, _implementation.default)
    return str(request.param)


@pytest.fixture(params=MODULES)
def core(request: pytest.FixtureRequest) -> ModuleType:
    """The core, once compiled, where it is there, and once in Python."""
    try:
        return _release(request, importlib.import_module(MODULES[request.param]))
    except ImportError:
        pytest.skip(f"{MODULES[request.param]} is not compiled")


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    """A private server for all benchmarks."""
    with embedded.Server() as server:
        yield server.url


@pytest.fixture
def client(url: str, implementation: str) -> Iterator[fastlock.Client]:
    """A client for threads."""
    with fastlock.Client.from_url(url) as client:
        yield client


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    """An event loop that lasts for one benchmark."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture
def async_client(url: str, implementation: str, runner: asyncio.Runner) -> Iterator[fastlock.asyncio.Client]:
    """A client for tasks on the loop of ``runner``."""

    async def opened() -> fastlock.asyncio.Client:
        return fastlock.asyncio.Client.from_url(url)

    client = runner.run(opened())
    yield client
    runner.run(client.close())
