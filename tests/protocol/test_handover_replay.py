"""The model of handing over and the code that hands over: random walks over the one, replayed on the other.

How a walk is replayed and what is compared: support/replay.py. A failing walk prints its seed and the events so far.
Mistakes planted in scripts, operations and local queues show that the comparison finds drift.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest
from support.replay import MOMENT_MS, Drift, Walk
from support.scripts import in_scripts
from support.servers import KINDS

from fastlock._protocol import commands, local_queue, moments, waiters
from fastlock._protocol.acquire import Acquire
from fastlock._protocol.release import Release
from fastlock._protocol.undo import Undo
from fastlock.embedded import Server

pytestmark = pytest.mark.usefixtures("impl", "long_moments")  # leases are compiled


@pytest.fixture
def long_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LEAST_MOMENT", "MOST_MOMENT"):
        monkeypatch.setattr(moments, name, MOMENT_MS / 1000)


WALKS, LENGTH = 250, 60
MANY_WALKS = 3000  # walks, among which one must find a planted mistake
EVENTS = {
    *("begins to acquire", "executes", "receives", "rechecks", "releases", "releases in a batch", "releases late"),
    *("resumes", "resumes to leave", "the first gives up", "the last gives up", "is cut", "dies", "expires"),
    *("another library acquires it", "another library releases it", "another comes"),
}
Plant = Callable[[pytest.MonkeyPatch], None]


def test_code_does_what_the_model_allows(
    server: Server, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert server.path is not None
    met: set[str] = set()
    first = KINDS.index(request.node.callspec.params["server"]) * WALKS
    for seed in range(first, first + WALKS):
        walk = Walk(server.path, seed, LENGTH)
        walk.go(monkeypatch)
        met |= walk.met
    assert met == EVENTS, "some kinds of events happened in no walk"


def in_code(owner: Any, name: str, make: Callable[[Any], Any]) -> Plant:
    """Replace the attribute `name` of `owner` by what `make` returns for it."""
    return lambda monkeypatch: monkeypatch.setattr(owner, name, make(getattr(owner, name)))


def handing_over_what_ended(release: Any) -> Any:
    def mistaken(self: local_queue.LocalQueue, lease: Any, now: float) -> int:
        if self.circulating is lease and self.waiters and lease._deadline <= now:
            lease._deadline = now + 1000
            self.confirmed_at = now
            for waiter in self.waiters:
                waiter.ms = 1_000_000
        return release(self, lease, now)

    return mistaken


def undoing_plain_tokens_first(undo: Any) -> Any:
    def mistaken(*args: Any) -> list[commands.RawCommand]:
        found: list[list[commands.RawCommand]] = [[]]  # the scripts; the commands for each name
        for call in undo(*args):
            if call[1] == HAND_OVER.sha:
                found.append([])
            found[-1].append(call)
        scripts, *names = found
        return [*scripts, *(call for first, *rest in names for call in (*rest, first))]

    return mistaken


def not_seeing_that_it_has_entered(successor_for: Any) -> Any:
    def mistaken(self: local_queue.LocalQueue, *args: Any) -> Any:
        before, self.entry_sent = self.entry_sent, False
        try:
            return successor_for(self, *args)
        finally:
            self.entry_sent = before

    return mistaken


def doing(nothing: Any) -> Callable[[Any], Any]:
    return lambda _: lambda *args: nothing


ENTER, LEAVE, HAND_OVER = commands.ENTER_LUA, commands.LEAVE_LUA, commands.HAND_OVER_LUA
GRANTING = (ENTER, LEAVE, HAND_OVER)
PLANTED: dict[str, Plant] = {
    "enter does not mark the holder": in_scripts(
        "local contended = can_be_contended(held)", "local contended = false", ENTER
    ),
    "enter does not mark that more wait": in_scripts("waiting > 0 and can_be_contended(value)", "false", ENTER),
    "enter does not say that more wait": in_scripts("return {1, waiting, fence}", "return {1, 0, fence}", ENTER),
    "enter forgets who else waits": in_scripts(
        "redis.call('ZREM', KEYS[2], me) -- also", "redis.call('DEL', KEYS[2]) -- also", ENTER
    ),
    "enter puts a queued entry last again": in_scripts("if not ahead then", "if true then", ENTER),
    "a look joins": in_scripts("ARGV[6] ~= '1'", "false", ENTER),
    "a join does not": in_scripts("ARGV[6] ~= '1'", "true", ENTER),
    "enter grants to itself": in_scripts("not grant(me)", "not grant()", ENTER),
    "enter overtakes": in_scripts("not held and not grant(me)", "not held", ENTER),
    "grant does not ask which clients are there": in_scripts("if subscribers ~= 0 then", "if true then", *GRANTING),
    "grant sends no message": in_scripts("redis.pcall('PUBLISH', channel, message)", "1", *GRANTING),
    "grant takes the last": in_scripts("ZPOPMIN", "ZPOPMAX", *GRANTING),
    "grant is for long": in_scripts("'PX', moment", "'PX', 10000000", *GRANTING),
    "hand_over deletes": in_scripts("if not grant() then", "if true then", HAND_OVER),
    "hand_over releases anybody's": in_scripts("if not mine(held, ARGV[1]) then", "if not held then", HAND_OVER),
    "hand_over does not know a contended token": in_scripts("not mine(held, ARGV[1])", "held ~= ARGV[1]", HAND_OVER),
    "leave keeps the entry": in_scripts("redis.call('ZREM', KEYS[2], ARGV[2] .. ARGV[1])", "", LEAVE),
    "leave keeps the grant": in_scripts("or not mine(held, ARGV[1])", "or true", LEAVE),
    "leave deletes": in_scripts("if not grant() then", "if true then", LEAVE),
    "an undo deletes first": in_code(commands, "undo_commands", undoing_plain_tokens_first),
    "an acquire does not leave the queue": in_code(Acquire, "leave", doing(None)),
    "an acquire undoes nothing": in_code(
        Acquire, "undo", lambda _: lambda self: Undo([self.key], [b"fl:" + b"0" * 32])
    ),
    "an acquire of unknown outcome waits by another entry": in_code(
        Acquire, "waiter", lambda _: lambda self: waiters.Waiter(self.name, self.key, self.ms, False)
    ),
    "a release does not hand over": in_code(Release, "hand_over", doing(None)),
}
IN_QUEUES: dict[str, Plant] = {
    "a lease that ended is handed over": in_code(local_queue.LocalQueue, "release", handing_over_what_ended),
    "a lease that ended before its new holder ran counts": in_code(
        local_queue.LocalQueues, "take_back_expired", doing(None)
    ),
    "a waiter that comes back enters by the entry of another": in_code(
        waiters.WaiterList, "insert", lambda insert: lambda self, waiter, before: insert(self, waiter, None)
    ),
    "a lease is handed over though the first waiter has entered": in_code(
        local_queue.LocalQueue, "successor_for", not_seeing_that_it_has_entered
    ),
    "a queue wakes no waiter": in_code(waiters.Waiter, "wake", doing(None)),
    "a queue keeps its entry": in_code(local_queue.LocalQueue, "new_entry", doing(None)),
    "a queue believes in a lease that has ended": in_code(
        local_queue.LocalQueue,
        "may_enter",
        lambda _: lambda self, waiter, now: self.circulating is None and self.first() is waiter,
    ),
    "queues ignore messages": in_code(local_queue.LocalQueues, "on_grant_message", doing(None)),
    "queues do not enter again after a cut": in_code(local_queue.LocalQueues, "on_reconnect", doing(None)),
}
FIRST = {"an undo deletes first": 1000}  # the walk to begin with, where it takes many to find a mistake
COMPILED = not isinstance(local_queue.LocalQueue.release, FunctionType)


@pytest.mark.long
@pytest.mark.parametrize("server", ["valkey"], indirect=True)
@pytest.mark.parametrize("mistake", PLANTED | IN_QUEUES)
def test_drift_is_found(server: Server, monkeypatch: pytest.MonkeyPatch, mistake: str) -> None:
    assert server.path is not None
    if COMPILED and mistake in IN_QUEUES:
        pytest.skip("what is compiled cannot be changed")
    (PLANTED | IN_QUEUES)[mistake](monkeypatch)
    for seed in range(FIRST.get(mistake, 0), MANY_WALKS):
        try:
            Walk(server.path, seed, LENGTH).go(monkeypatch)
        except Drift as drift:
            assert f"seed {seed}:" in str(drift)
            assert isinstance(drift.__cause__, AssertionError), "the comparison must find the mistake, not an exception"
            return
    raise AssertionError(f"{MANY_WALKS} walks have not found the mistake")
