"""CPU cost of the hot path: an acquire and its release as a thread makes them, on a connection that answers at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from fastlock import _commands, _hot
from fastlock._common import Common
from fastlock._lock import ClientLock
from fastlock._stats import Stats

pytestmark = pytest.mark.usefixtures("implementation")


class Pipe:
    """Whatever is acquired was free, whatever is released was held."""

    forms = tuple(range(_commands.RELEASE + 1))

    def ask(self, form: int, name: bytes, token: bytes, ms: int, timeout: float, spin: float) -> int | None:
        return 1 if form == _commands.RELEASE else None


def test_take_and_give(benchmark: BenchmarkFixture) -> None:
    connection = SimpleNamespace(pipe=Pipe(), patience=5.0, dead=None, busy=object())
    wire: Any = Common()
    wire.debts, wire.idle, wire.connections, wire.away = [], [connection], [connection], 0
    wire.crowd, wire.stats = {}, Stats()
    client: Any = SimpleNamespace(_wire=wire)
    lock = ClientLock(client, "order:4711", 10, 0.1, True, None, True, True)

    def pair() -> Any:
        lease = _hot.take(lock, True)
        _hot.give(lock)
        return lease

    lease = benchmark(pair)
    assert lease.key == b"order:4711" and not lease.valid and not lock.leases and wire.idle == [connection]
