"""Read-write locks and semaphores in any order of events: their operations and scripts, and mistakes in them, which
the walks have to find."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.functions import in_function
from support.run_steps import Clock
from support.scripts import in_scripts
from support.shared_walks import walk

from fastlock._protocol import commands, shared, steps
from fastlock._protocol.acquire import Acquire
from fastlock._protocol.undo import Undo
from fastlock.embedded import Server

pytestmark = pytest.mark.parametrize("server", ["valkey"], indirect=True)


@pytest.mark.parametrize("rw", [True, False], ids=["rw", "semaphore"])
def test_walks_keep_the_promises(server: Server, clock: Clock, impl: str, rw: bool) -> None:
    for seed in range(100):
        walk(server.path, clock, seed, rw)


J, L, R = commands.SHARED_JOIN_LUA, commands.SHARED_LOOK_LUA, commands.SHARED_RELEASE_LUA
ALL = (J, L, R)
LOOKED = "return ahead and queued(ahead) or {-1, 0, 0}"
# What each mistake replaces, by what, in which scripts. Of which kind of lock are the walks that find it?
IN_SCRIPTS = {
    "a reader does not look for a writer": (
        *("not first or (mode(token) == 'r' and mode(first) == 'r')", "not first or mode(token) == 'r'", ALL, "rw"),
    ),
    "a writer joins readers": ("not first or (mode(token) == 'r' and mode(first) == 'r')", "true", ALL, "rw"),
    "permits are counted by holders": (
        *("redis.call('ZINCRBY', KEYS[1], -count(token), USED)", "redis.call('ZINCRBY', KEYS[1], -1, USED)"),
        *(ALL, "semaphore"),
    ),
    "a confirmed grant is counted again": ("if added == 1 and mode(token)", "if mode(token)", ALL, "semaphore"),
    "permits of the dead are not given back": (
        *("  if dropped and mode(token) == 's' then", "  if false then", (J, L), "semaphore"),
    ),
    "one too many is granted": (
        *("KEYS[1], USED) or 0) <= size(token)", "KEYS[1], USED) or 0) <= size(token) + 1", ALL, "semaphore"),
    ),
    "a release grants nothing": ("\ngrant()\n", "\n", (R,), "rw"),
    "a try overtakes the queue": ("if redis.call('EXISTS', KEYS[2]) == 0 and fits(me)", "if fits(me)", (J,), "rw"),
    "who joins is put first": ("string.format('%.0f', score)", "'-5'", (J,), "rw"),
    "a grant is a lease": ("hold(entry, moment)", "hold(entry, 100000)", ALL, "rw"),
    "a look queues": (
        *(LOOKED, "if not ahead then redis.call('ZADD', KEYS[2], 1, ARGV[2] .. me) end\nreturn queued(0)"),
        *((L,), "rw"),
    ),
    "a look takes what is free": (
        *(LOOKED, "if not ahead then hold(me, ARGV[3]) end\nreturn granted(fence, ARGV[5], 0)", (L,), "rw"),
    ),
    "who leaves stays in the queue": ("redis.call('ZREM', KEYS[2], address .. me)", "", (R,), "rw"),
    "ended leases stay": ("'(0', clock()", "'(0', 0", ALL, "rw"),
}


@pytest.mark.long
@pytest.mark.parametrize("mistake", IN_SCRIPTS)
def test_walks_find_a_mistake_in_a_script(
    server: Server, clock: Clock, impl: str, mistake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new, scripts, kind = IN_SCRIPTS[mistake]
    in_scripts(old, new, *scripts)(monkeypatch)
    found_by_walks(server, clock, kind)


def found_by_walks(server: Server, clock: Clock, kind: str, first: int = 0) -> None:
    """At least one walk has to fail, of those from the `first` on."""
    with pytest.raises(AssertionError):
        for seed in range(first, first + 150):
            walk(server.path, clock, seed, kind == "rw")
        pytest.fail("no walk has found it")  # no AssertionError


IN_PYTHON: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "an entry joins again after a cut": (
        in_function(steps.QueueRequest.calls.fget, "self.joins and not self.maybe_executed", "True"),
        "rw",
    ),
    "an entry that is gone looks on": (
        in_function(Acquire._enter, "late = queue.judge(", "late = None if reply[0] < 0 else queue.judge("),
        "rw",
    ),
    "a try has no undo": (lambda patch: patch.setattr(shared.AcquireShared, "undo", lambda op: Undo([], [])), "rw"),
    "a try that is given up has no undo": (lambda patch: patch.setattr(shared.Try, "undo", lambda request: None), "rw"),
    "a downgrade that is given up is not carried out": (
        lambda patch: patch.setattr(shared.MakeReader, "undo", lambda request: Undo([], [])),
        "rw",
    ),
    "who gives up stays in the queue": (
        lambda patch: patch.setattr(shared.AcquireShared, "leave", lambda *args: None),
        "semaphore",
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("mistake", IN_PYTHON)
def test_walks_find_a_mistake_in_an_operation(
    server: Server, clock: Clock, impl: str, mistake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant, kind = IN_PYTHON[mistake]
    plant(monkeypatch)
    found_by_walks(server, clock, kind, 2600 if mistake == "a try has no undo" else 0)
