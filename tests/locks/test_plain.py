"""The plain path, which serves where the fast one is left out."""

from __future__ import annotations

from typing import Any

import pytest
import redis
from support.streams import Interrupt

import fastlock
from fastlock._locks import plain
from fastlock.embedded import Server


class Interrupted:
    """A lock whose caller is interrupted by a signal handler just as it has taken a kept lease."""

    def __init__(self, lock: Any) -> None:
        self.lock = lock

    def __getattr__(self, name: str) -> Any:
        return getattr(self.lock, name)

    def _take_kept(self, owner: object, time: float) -> Any:
        assert self.lock._take_kept(owner, time) is not None
        raise Interrupt


@pytest.mark.parametrize("server", ["valkey"], indirect=True)
def test_a_kept_lease_is_released_where_its_taker_was_interrupted(
    impl: str, server: Server, probe: redis.Redis, no_leaks: Any
) -> None:
    """As compiled code returns, a signal handler may raise, before anybody knows of the lease."""
    with fastlock.Client.from_url(server.unix_url) as client:
        lock: Any = client.lock("sku", timeout=60, keep=60)
        while not client._transport.queues.kept:
            with lock:
                pass
        interrupted: Any = Interrupted(lock)
        with pytest.raises(Interrupt):
            plain.take_kept(interrupted)
        assert lock.lease is None
        assert client.lock("sku", timeout=60).acquire(blocking=False), "it was released"
        probe.delete("sku")
