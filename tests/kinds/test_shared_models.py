"""Read-write locks and semaphores beside plain models of them: threads of two clients, on real servers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from support.child_client import NAME
from support.told_thread import ToldThread

import fastlock
from fastlock.embedded import Server

pytestmark = [
    pytest.mark.usefixtures("no_leaks"),
    pytest.mark.parametrize("server", ["valkey", "redis"], indirect=True),
]
who = st.integers(0, 3)


class Machine(RuleBasedStateMachine):
    """Four threads, of two clients."""

    server: Server

    def __init__(self) -> None:
        super().__init__()
        self.clients = [fastlock.Client.from_url(self.server.url) for _ in range(2)]
        self.threads = [ToldThread() for _ in range(4)]

    def teardown(self) -> None:
        for thread in self.threads:
            thread.end()
        for client in self.clients:
            client.close()


class ReadWrite(Machine):
    """The model: how often each thread has acquired each side."""

    def __init__(self) -> None:
        super().__init__()
        self.reads, self.writes = [0] * 4, [0] * 4

    def lock(self, me: int) -> Any:
        return self.clients[me // 2].rw_lock(NAME, timeout=60)

    @rule(me=who)
    def acquire_read(self, me: int) -> None:
        got = self.threads[me].do(lambda: self.lock(me).read.acquire(blocking=False))
        assert got is not any(self.writes[other] for other in range(4) if other != me)
        self.reads[me] += got

    @rule(me=who)
    def acquire_write(self, me: int) -> None:
        got = self.threads[me].do(lambda: self.lock(me).write.acquire(blocking=False))
        if self.reads[me] and not self.writes[me]:
            assert isinstance(got, fastlock.LockError)
        else:
            assert got is not any(self.writes[other] or self.reads[other] for other in range(4) if other != me)
            self.writes[me] += got

    @rule(me=who)
    def release_read(self, me: int) -> None:
        assert (self.threads[me].do(lambda: self.lock(me).read.release()) is None) is bool(self.reads[me])
        self.reads[me] -= bool(self.reads[me])

    @rule(me=who)
    def release_write(self, me: int) -> None:
        assert (self.threads[me].do(lambda: self.lock(me).write.release()) is None) is bool(self.writes[me])
        self.writes[me] -= bool(self.writes[me])

    @invariant()
    def both_agree(self) -> None:
        for me in range(4):
            lock = self.lock(me)
            reads, writes = self.threads[me].do(lambda lock=lock: (lock.read.lease, lock.write.lease))
            assert (reads is not None, writes is not None) == (self.reads[me] > 0, self.writes[me] > 0)
            lease = reads or writes
            assert lease is None or (lease.valid and lease.depth == self.reads[me] + self.writes[me])
        lock = self.lock(0)
        assert (lock.write.locked(), lock.locked()) == (any(self.writes), any(self.writes) or any(self.reads))
        assert lock.read.locked() is any(self.reads[me] and not self.writes[me] for me in range(4))

    def teardown(self) -> None:
        for me in range(4):
            while self.writes[me]:
                self.release_write(me)
            while self.reads[me]:
                self.release_read(me)
        super().teardown()


class Permits(Machine):
    """The model: what each thread has acquired, in order, and how many permits there are."""

    def __init__(self) -> None:
        super().__init__()
        self.size, self.held = 5, [[] for _ in range(4)]  # type: list[list[int]]
        self.semaphores = [self.clients[me // 2].semaphore(NAME, 5, timeout=60) for me in range(4)]

    @initialize()
    def begin(self) -> None:
        self.semaphores[0].resize(None)

    @property
    def free(self) -> int:
        return max(0, self.size - sum(map(sum, self.held)))

    @rule(me=who, n=st.integers(1, 5))
    def acquire(self, me: int, n: int) -> None:
        got = self.threads[me].do(lambda: self.semaphores[me].acquire(n, blocking=False))
        if n > self.size:
            assert isinstance(got, fastlock.LockError)
        else:
            assert got is (n <= self.free)
            self.held[me] += [n] * got

    @rule(me=who)
    def release(self, me: int) -> None:
        assert (self.threads[me].do(self.semaphores[me].release) is None) is bool(self.held[me])
        del self.held[me][-1:]

    @rule(me=who, size=st.one_of(st.none(), st.integers(1, 7)))
    def resize(self, me: int, size: int | None) -> None:
        self.clients[me // 2].semaphore(NAME, 5).resize(size)
        self.size = size or 5

    @invariant()
    def both_agree(self) -> None:
        semaphore = self.clients[0].semaphore(NAME, 5)
        assert (semaphore.available(), semaphore.locked()) == (self.free, self.free == 0)
        for me in range(4):
            lease = self.threads[me].do(lambda me=me: self.semaphores[me].lease)
            assert (lease is not None and lease.valid) is bool(self.held[me])

    def teardown(self) -> None:
        for me in range(4):
            while self.held[me]:
                self.release(me)
        self.semaphores[0].resize(None)
        super().teardown()


@pytest.mark.parametrize("model", [ReadWrite, Permits])
def test_they_do_what_a_plain_model_does(server: Server, impl: str, model: type[Machine]) -> None:
    machine = type("Machine", (model,), {"server": server})
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much]
    run_state_machine_as_test(
        machine,
        settings=settings(max_examples=25, stateful_step_count=40, deadline=None, suppress_health_check=checks),
    )
