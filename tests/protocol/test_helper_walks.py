"""`once`, `refill` and `every` in any order of events: their operations and scripts on a real server, and mistakes in
them, which the walks have to find."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.functions import in_function, together
from support.helper_walks import EveryWalk, HelperWalk, OnceWalk, RefillWalk
from support.run_steps import Clock
from support.scripts import in_scripts
from support.walk_server import set_clock
from support.walks import walk_seeds

from fastlock._locks import every, once, refill
from fastlock._protocol import periods, values
from fastlock.embedded import Server

pytestmark = pytest.mark.parametrize("server", ["valkey"], indirect=True)
Walks = Callable[[type[HelperWalk], range], None]


@pytest.fixture
def walks(server: Server, monkeypatch: pytest.MonkeyPatch) -> Walks:
    """Carries out the walks of one helper and of these seeds."""
    clock = Clock()
    set_clock(monkeypatch, clock)
    return lambda kind, seeds: walk_seeds(lambda seed: kind(server.path, clock, seed), seeds)


@pytest.mark.parametrize("kind", [OnceWalk, RefillWalk, EveryWalk])
def test_walks_keep_the_promises(walks: Walks, impl: str, kind: type[HelperWalk]) -> None:
    walks(kind, range(25))


K, D, C, S = values.KEEP_LUA, values.DISCARD_LUA, periods.CLAIM_LUA, periods.SKIP_LUA
MISTAKES: dict[str, tuple[type[HelperWalk], Callable[[pytest.MonkeyPatch], None]]] = {
    "a result is kept by who lost the lock": (OnceWalk, in_scripts("not mine(held, ARGV[1])", "false", K)),
    "nobody looks again under the lock": (
        OnceWalk,
        in_function(once.Call.look_again, "return values.read(self.key, now)", "yield from ()"),
    ),
    "the lock is not renewed while the function runs": (
        OnceWalk,
        in_function(once.settings_for, ', "auto_renew": True', ""),
    ),
    "a value is kept by who lost the lock": (RefillWalk, in_scripts("not mine(held, ARGV[1])", "false", K)),
    "a value is kept that was discarded meanwhile": (RefillWalk, in_scripts("~= ARGV[4]", "== 'x'", K)),
    "to discard does not change the version": (RefillWalk, in_scripts("'INCR', KEYS[2]", "'EXISTS', KEYS[2]", D)),
    "the version is not read": (
        RefillWalk,
        in_function(refill.Call.look_again, "self.version = found.version", "pass"),
    ),
    "who finds an old value waits": (
        RefillWalk,
        in_function(refill.Call.new_lock, "self.old is None", "True"),
    ),
    "an old value is not used where the loader fails": (
        RefillWalk,
        in_function(refill.Call.instead, "exc_info=error)\n    return self.old", "exc_info=error)"),
    ),
    "an old value counts as fresh": (
        RefillWalk,
        in_function(refill.Call._judge, "found.left > self.settings.stale_ms", "found.left > 0"),
    ),
    "a period is claimed twice": (EveryWalk, in_scripts("if ahead > 0 and", "if false and", C)),
    "a claim is not noted": (EveryWalk, in_scripts("redis.call('SET', KEYS[2],", "tostring(", C)),
    "a claim that was not answered is not confirmed": (EveryWalk, in_scripts("mine(held, ARGV[1])", "false", C)),
    "a lock is taken that is held": (EveryWalk, in_scripts("\nif held then", "\nif false then", C)),
    "a period that begins during a run is not skipped": (EveryWalk, in_scripts("< now + left", "< 0", S)),
    "a claim counts from the reply": (
        EveryWalk,
        in_function(periods.claim, "lease_end(request.sent, lease_ms)", "lease_end(clock(), lease_ms)"),
    ),
    "a run begins by a lease that has ended": (
        EveryWalk,
        together(
            in_function(periods.claim, "clock() >= lease._deadline", "False"),
            in_function(every.Schedule._lapsed, "not claim.lease.valid", "False"),
        ),
    ),
    "the first period is run though it had begun": (
        EveryWalk,
        in_scripts("now < tonumber(ARGV[5])", "false", C),
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("mistake", MISTAKES)
def test_walks_find_a_mistake(walks: Walks, mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, plant = MISTAKES[mistake]
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        walks(kind, range(150))
        pytest.fail("no walk has found it")  # no AssertionError
