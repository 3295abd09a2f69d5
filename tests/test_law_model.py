"""The law against a world that loses, delays and reorders: thousands of seeded runs, each with what must never happen.

A lease must never end later than the server's key; who does not hold must leave no key behind; who held and let go must
not be told that he did not. The world is support/world.py; a failing seed is a test of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from support.world import MINE, Gone, World

import fastlock._law as law
import fastlock._lease as leases
from fastlock import _commands as say
from fastlock import _errors as errors
from fastlock._lease import Lease
from fastlock._stats import Stats

pytestmark = pytest.mark.usefixtures("impl")  # leases are compiled
RUNS = 3000
EXPECTED = (Gone, errors.ConnectionError, errors.ResponseError)
LITTLE = 1e-6


@pytest.fixture
def worlds(monkeypatch: pytest.MonkeyPatch) -> Iterator[Iterator[World]]:
    """Worlds of all seeds; the leases live by each one's clock. A failure tells the seed and what was said."""
    current: list[World] = []
    monkeypatch.setattr(leases, "now", lambda: current[-1].clock())

    def all_of_them() -> Iterator[World]:
        for seed in range(RUNS):
            current.append(World(seed))
            yield current[-1]

    try:
        yield all_of_them()
    finally:
        print(f"world {len(current) - 1}:", *current[-1].trace, sep="\n  ")


def attempt(world: World, operation: Any, keys: list[bytes]) -> tuple[Any, bool]:
    """(outcome, whether there was one)."""
    with suppress(*EXPECTED):
        return world.run(operation, keys), True
    return None, False


def check_lease(world: World, lease: Lease) -> None:
    assert say.proves(world.holder(lease.key), lease.proof)
    assert world.end(lease.key) >= lease.deadline - LITTLE


def test_a_lease_is_never_longer_than_the_key_and_no_key_is_left_without_a_lease(worlds: Iterator[World]) -> None:
    granted = refused = raised = waited = 0
    for world in worlds:
        dice = world.dice
        ms = dice.choice((50, 1000, 10_000, 0))
        op = law.Acquire("k", b"k", MINE, ms, fenced=ms > 0 and dice.random() < 0.2)
        op.blocking, op.sleep = dice.random() < 0.6, dice.choice((0, 0.1))
        op.alone, op.polls = dice.random() < 0.3, dice.random() < 0.2
        if dice.random() < 0.5:
            op.until = world.clock() + dice.choice((0.05, 0.5, 5))
        world.others_come([b"k"])
        lease, ended = attempt(world, op, [b"k"])
        if lease is not None:
            granted += 1
            waited += lease.contended
            assert lease.proof == op.token
            assert lease.deadline > world.clock()
            check_lease(world, lease)
            world.settle_down()
            check_lease(world, lease)
        else:
            refused, raised = refused + ended, raised + (not ended)
            world.settle_down()
            assert not world.is_ours(b"k"), f"ended={ended}"
            assert not world.ours & set(world.queues.get(b"k", [])), "it stands in the way of others"
            assert not world.gates.by_key and not world.gates.by_place
    assert min(granted, refused, raised) > RUNS / 20 and waited > RUNS / 100  # else the world is too kind, or too cruel


def test_a_batch_holds_what_it_says_and_nothing_else(worlds: Iterator[World]) -> None:
    outcomes = set()
    for world in worlds:
        keys, ms = [b"a", b"b", b"c"], world.dice.choice((50, 1000, 0))
        world.others_come(keys)
        found, ended = attempt(world, law.AcquireMany(keys, keys, MINE, ms, Stats()), keys)
        world.settle_down()
        for key, lease in zip(keys, found or [None] * 3, strict=True):
            if lease is not None and lease.deadline > world.clock():
                check_lease(world, lease)
            elif lease is None:
                assert not world.is_ours(key)
        outcomes.add((ended, sum(lease is not None for lease in found or [])))
    assert outcomes >= {(True, 3), (True, 1), (True, 0), (False, 0)}


def held(world: World, key: bytes = b"k") -> Lease:
    """A lease that holds its key; the server's end is a little later, as it is."""
    seconds = world.dice.choice((0.05, 1, 60, math.inf))
    world.keys[key] = MINE, world.clock() + seconds + 0.001
    return Lease(key, key, MINE, world.clock() + seconds)


def check_release(world: World, lease: Lease, outcome: Any) -> None:
    if outcome:
        assert not world.is_ours(lease.key)
    elif world.released_at is not None:
        assert world.released_at >= lease.deadline  # else it was ours, and let go by us


def test_who_held_and_let_go_is_never_told_otherwise(worlds: Iterator[World]) -> None:
    seen = set()
    for world in worlds:
        lease = held(world)
        for _ in range(3):
            outcome, ended = attempt(world, law.Release(lease), [b"k"])
            if ended:
                check_release(world, lease, outcome)
                break
        world.settle_down()
        if ended or world.doubted:
            assert not world.is_ours(b"k")
        seen.add((ended, outcome))
    assert seen == {(True, True), (True, False), (False, None)}


def test_a_batch_of_releases_tells_the_truth_of_each(worlds: Iterator[World]) -> None:
    for world in worlds:
        keys = [b"a", b"b"]
        mine = [held(world, key) for key in keys]
        gone = {key: world.dice.random() < 0.2 for key in keys}
        for key in keys:
            if gone[key]:
                del world.keys[key]
        found, ended = attempt(world, law.release_many(mine, world.gates, world.clock), keys)
        if ended:
            for lease, outcome in zip(mine, found, strict=True):
                assert not world.is_ours(lease.key)
                if not outcome:
                    assert gone[lease.key] or world.clock() >= lease.deadline


def test_an_extended_lease_never_ends_after_its_key(worlds: Iterator[World]) -> None:
    """At every moment, also while an extension is under way, after it failed, and after the next one."""
    done = 0
    for world in worlds:
        lease = held(world)
        if lease.deadline == math.inf:
            continue

        def look(world: World = world, lease: Lease = lease) -> None:
            if say.proves(world.holder(b"k"), MINE):
                assert world.end(b"k") >= lease.deadline - LITTLE
            else:
                assert world.clock() >= lease.deadline - LITTLE

        world.watch = look
        for _ in range(4):
            ms, replace = world.dice.choice((20, 500, 3000, 60_000)), world.dice.random() < 0.6
            if world.holder(b"k") is not None and world.dice.random() < 0.3:
                world.mark(b"k")
            outcome, _ = attempt(world, law.prolong(lease, ms, replace, world.clock), [])
            done += outcome is law.Outcome.MOVED
            look()
            world.wander()
        world.settle_down()
    assert done > RUNS
