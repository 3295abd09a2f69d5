"""Operations against a server that loses, delays and reorders: thousands of seeded runs with what must never happen.

A lease must never end later than the server's key; an acquire that failed must leave no key behind; a release must not
deny a lease that was held. The server is support/server_simulator.py; a failing seed is a test of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from support.server_simulator import MINE, Gone, ServerSimulator

from fastlock import _errors as errors
from fastlock._protocol import commands, extension
from fastlock._protocol import lease as leases
from fastlock._protocol.acquire import Acquire
from fastlock._protocol.batch_operations import AcquireMany, release_many
from fastlock._protocol.lease import Lease
from fastlock._protocol.release import Release
from fastlock._protocol.stats import Stats

pytestmark = pytest.mark.usefixtures("impl")  # leases are compiled
RUNS = 3000
EXPECTED = (Gone, errors.ConnectionError, errors.ResponseError)
LITTLE = 1e-6


@pytest.fixture
def simulators(monkeypatch: pytest.MonkeyPatch) -> Iterator[Iterator[ServerSimulator]]:
    """A server for each seed; the leases live by its clock. A failure tells the seed and what was sent."""
    current: list[ServerSimulator] = []
    monkeypatch.setattr(leases, "now", lambda: current[-1].clock())

    def one_of_each_seed() -> Iterator[ServerSimulator]:
        for seed in range(RUNS):
            current.append(ServerSimulator(seed))
            yield current[-1]

    try:
        yield one_of_each_seed()
    finally:
        print(f"seed {len(current) - 1}:", *current[-1].trace, sep="\n  ")


def attempt(server: ServerSimulator, operation: Any, keys: list[bytes]) -> tuple[Any, bool]:
    """(outcome, whether there was one)."""
    with suppress(*EXPECTED):
        return server.run(operation, keys), True
    return None, False


def check_lease(server: ServerSimulator, lease: Lease) -> None:
    assert commands.token_matches(server.holder(lease._key), lease._raw_token)
    assert server.end(lease._key) >= lease._deadline - LITTLE


def test_a_lease_is_never_longer_than_the_key_and_no_key_is_left_without_a_lease(
    simulators: Iterator[ServerSimulator],
) -> None:
    granted = refused = raised = waited = 0
    for server in simulators:
        rng = server.rng
        ms = rng.choice((50, 1000, 10_000, 0))
        op = Acquire("k", b"k", MINE, ms, fenced=ms > 0 and rng.random() < 0.2)
        op.blocking, op.sleep = rng.random() < 0.6, rng.choice((0, 0.1))
        op.alone, op.polls = rng.random() < 0.3, rng.random() < 0.2
        if rng.random() < 0.5:
            op.until = server.clock() + rng.choice((0.05, 0.5, 5))
        server.others_come([b"k"])
        lease, ended = attempt(server, op, [b"k"])
        if lease is not None:
            granted += 1
            waited += lease._contended
            assert lease._raw_token == op.token
            assert lease._deadline > server.clock()
            check_lease(server, lease)
            server.settle_down()
            check_lease(server, lease)
        else:
            refused, raised = refused + ended, raised + (not ended)
            server.settle_down()
            assert not server.is_ours(b"k"), f"ended={ended}"
            assert not server.ours & set(server.server_queues.get(b"k", [])), "its entry stands in the way of others"
            assert not server.queues.by_key and not server.queues.by_entry
    assert min(granted, refused, raised) > RUNS / 20 and waited > RUNS / 100  # else too little is lost, or too much


def test_a_batch_holds_what_it_says_and_nothing_else(simulators: Iterator[ServerSimulator]) -> None:
    outcomes = set()
    for server in simulators:
        keys, ms = [b"a", b"b", b"c"], server.rng.choice((50, 1000, 0))
        server.others_come(keys)
        found, ended = attempt(server, AcquireMany(keys, keys, MINE, ms, Stats()), keys)
        server.settle_down()
        for key, lease in zip(keys, found or [None] * 3, strict=True):
            if lease is not None and lease._deadline > server.clock():
                check_lease(server, lease)
            elif lease is None:
                assert not server.is_ours(key)
        outcomes.add((ended, sum(lease is not None for lease in found or [])))
    assert outcomes >= {(True, 3), (True, 1), (True, 0), (False, 0)}


def held(server: ServerSimulator, key: bytes = b"k") -> Lease:
    """A lease that holds its key; the server's end is a little later, as it is."""
    seconds = server.rng.choice((0.05, 1, 60, math.inf))
    server.keys[key] = MINE, server.clock() + seconds + 0.001
    return Lease(key, key, MINE, server.clock() + seconds)


def check_release(server: ServerSimulator, lease: Lease, outcome: Any) -> None:
    if outcome:
        assert not server.is_ours(lease._key)
    elif server.released_at is not None:
        assert server.released_at >= lease._deadline  # else it was held, and released by us


def test_a_release_never_denies_a_lease_that_was_held(simulators: Iterator[ServerSimulator]) -> None:
    seen = set()
    for server in simulators:
        lease = held(server)
        for _ in range(3):
            outcome, ended = attempt(server, Release(lease), [b"k"])
            if ended:
                check_release(server, lease, outcome)
                break
        server.settle_down()
        if ended or server.outcome_unknown:
            assert not server.is_ours(b"k")
        seen.add((ended, outcome))
    assert seen == {(True, True), (True, False), (False, None)}


def test_a_batch_of_releases_tells_the_truth_of_each(simulators: Iterator[ServerSimulator]) -> None:
    for server in simulators:
        keys = [b"a", b"b"]
        mine = [held(server, key) for key in keys]
        gone = {key: server.rng.random() < 0.2 for key in keys}
        for key in keys:
            if gone[key]:
                del server.keys[key]
        found, ended = attempt(server, release_many(mine, server.queues, server.clock), keys)
        if ended:
            for lease, outcome in zip(mine, found, strict=True):
                assert not server.is_ours(lease._key)
                if not outcome:
                    assert gone[lease._key] or server.clock() >= lease._deadline


def test_an_extended_lease_never_ends_after_its_key(simulators: Iterator[ServerSimulator]) -> None:
    """At every moment, also while an extension is under way, after it failed, and after the next one."""
    done = 0
    for server in simulators:
        lease = held(server)
        if lease._deadline == math.inf:
            continue

        def check(server: ServerSimulator = server, lease: Lease = lease) -> None:
            if commands.token_matches(server.holder(b"k"), MINE):
                assert server.end(b"k") >= lease._deadline - LITTLE
            else:
                assert server.clock() >= lease._deadline - LITTLE

        server.watch = check
        for _ in range(4):
            ms, replace = server.rng.choice((20, 500, 3000, 60_000)), server.rng.random() < 0.6
            if server.holder(b"k") is not None and server.rng.random() < 0.3:
                server.mark(b"k")
            outcome, _ = attempt(server, extension.extend(lease, ms, replace, server.clock), [])
            done += outcome is extension.Outcome.MOVED
            check()
            server.wander()
        server.settle_down()
    assert done > RUNS
