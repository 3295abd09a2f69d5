"""Fixtures of the CPU benchmarks (``pytest benches``): both implementations, a private server, clients.

Law: what is measured here is the CPU of one caller, layer by layer, with pytest-benchmark. Throughput, concurrency and
rivals belong to ``fastlock bench``. A benchmark also checks what it did, since with --benchmark-disable it is a test.
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
from fastlock import embedded

MODULES = {"cython": "fastlock._core", "python": "fastlock._fallback"}


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    """Put beside the numbers what they mean nothing without."""
    versions = {name: version(name) for name in ("hiredis", "redis")}
    machine_info["fastlock"] = versions | {"fastlock": fastlock.__version__}


@pytest.fixture(params=MODULES)
def implementation(request: pytest.FixtureRequest) -> str:
    """Each implementation in turn; the compiled one only where it is there, and then only a release build."""
    name = str(request.param)
    try:
        module = importlib.import_module(MODULES[name])
    except ImportError:
        pytest.skip(f"{MODULES[name]} is not compiled")
    if module.BUILD != "release" and not request.config.getoption("benchmark_disable"):
        pytest.skip(f"a {module.BUILD} build: its speed means nothing")
    return name


@pytest.fixture
def layer(implementation: str) -> ModuleType:
    """The bytes layer of that implementation."""
    return importlib.import_module(MODULES[implementation])


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    """A private server for all benchmarks."""
    with embedded.Server() as server:
        yield server.url


@pytest.fixture
def client(url: str, implementation: str) -> Iterator[fastlock.Client]:
    """A client for threads."""
    with fastlock.Client.from_url(url, impl=implementation) as client:
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
        return fastlock.asyncio.Client.from_url(url, impl=implementation)

    client = runner.run(opened())
    yield client
    runner.run(client.close())
