"""CPU cost of the fast path: acquire and release as a thread makes them, on a connection that answers at once."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from fastlock._locks.lock import ClientLock
from fastlock._locks.paths import threads
from fastlock._protocol.commands import Opcode
from fastlock._protocol.local_queue import LocalQueues
from fastlock._transport.base import Transport

pytestmark = pytest.mark.usefixtures("implementation")


class Stream:
    """A stream whose server says that every acquired name was free, and every released name was held."""

    templates = tuple(range(Opcode.RELEASE + 1))

    def round_trip(self, template: int, name: bytes, token: bytes, ms: int, timeout: float, spin: float) -> int | None:
        return 1 if template == Opcode.RELEASE else None


def test_acquire_and_release(benchmark: BenchmarkFixture) -> None:
    connection = SimpleNamespace(stream=Stream(), reply_timeout=5.0, error=None, busy=object())
    transport: Any = Transport()
    transport.pending_undos, transport.push_connection_lent = [], 0
    transport.idle, transport.connections = [connection], [connection]
    transport.queues = queues = LocalQueues(contextlib.nullcontext())
    transport.queued_keys, transport.expected_keys, transport.unconfirmed = queues.by_key, queues.expected, {}
    client: Any = SimpleNamespace(_transport=transport)
    lock = ClientLock(client, "order:4711", 10, 0.1, True, None, True, True)

    def pair() -> Any:
        lease = threads.acquire(lock, True)
        threads.release(lock)
        return lease

    lease = benchmark(pair)
    assert lease._key == b"order:4711" and not lease.valid and not lock._leases and transport.idle == [connection]
