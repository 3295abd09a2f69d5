"""Renewal in any order of events: its operations and scripts on a real server, and mistakes in them, which the walks
have to find."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.functions import in_function, together
from support.renewal_walks import RenewalWalk
from support.run_steps import Clock
from support.scripts import in_scripts
from support.walk_server import set_clock
from support.walks import walk_seeds

from fastlock._protocol import commands, extension, renewal
from fastlock._protocol.extension import Move
from fastlock._protocol.renewal import Renewal, Renewals
from fastlock.embedded import Server

pytestmark = pytest.mark.parametrize("server", ["valkey"], indirect=True)


@pytest.fixture
def walks(server: Server, monkeypatch: pytest.MonkeyPatch) -> Callable[[range], None]:
    """Carries out the walks of these seeds."""
    clock = Clock()
    set_clock(monkeypatch, clock)
    return lambda seeds: walk_seeds(lambda seed: RenewalWalk(server.path, clock, seed), seeds)


def test_walks_keep_the_promises(walks: Callable[[range], None], impl: str) -> None:
    walks(range(30))


R = commands.RENEW_MANY_LUA
MISTAKES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a lease counts from the reply": in_function(Renewals._renewed, "reply, request.sent)", "reply, clock())"),
    "a loss is told as the lease ends": lambda patch: patch.setattr(renewal, "margin_of", lambda seconds: 0.0),
    "any token is renewed": in_scripts("if mine(held, ARGV[i]) then", "if held and not held.err then", R),
    "a name is acquired anew": in_scripts(
        "    renewed[i] = 0\n", "    redis.call('SET', name, ARGV[i], 'PX', 9999)\n    renewed[i] = 1\n", R
    ),
    "a shared lease that is gone is renewed": in_scripts(
        "if not score or type(score) == 'table' or (score ~= 'inf' and tonumber(score) <= clock()) then",
        "if type(score) == 'table' then",
        R,
    ),
    "a lease whose renewal was answered is not renewed again": in_function(
        Renewals.ended, "renewal.under_way = None", "pass"
    ),
    "a loss is told twice": in_function(Renewal.found_lost, "self._untold.pop()", "self._untold"),
    "a lease that is released is renewed": together(
        in_function(Renewals._take_due, " or lease._releasing or lease._deadline == ENDED", ""),
        in_function(Renewals.renew, " if each[1]._deadline != ENDED and not each[1]._releasing", ""),
    ),
    "what was not answered is not tried again": in_function(
        Renewals._failed, "clock() + min(backoff(renewal.failures), most)", "math.inf"
    ),
    "no answer counts as an answer": in_function(
        Renewals._renewed, "replies or [None] * len(moves)", "replies or [1] * len(moves)"
    ),
    "a lease is renewed for the dead": in_function(Renewal.has_ended, " or self.owner_gone()", ""),
    "a lease is renewed for ever": in_function(Renewal.has_ended, "time >= self.until or ", ""),
    "a thread waits for a reply for too long": in_function(
        Renewals.attempt_end, "return time + ", "return 1e9 + time + "
    ),
    "a loss that the server tells is not believed": in_function(
        Renewals._note, "if not (reply or", "if reply and not (reply or"
    ),
    "of two moves at once the later end holds": in_function(
        Renewals._note, "move.to(end)", "lease._deadline = max(lease._deadline, end)"
    ),
    "a renewal in vain is repeated at once": in_function(
        Renewals._note, "return lease._deadline == ENDED", "return True"
    ),
    "an extension brings back what was told lost": together(
        in_function(Move.to, "renewal is None or not renewal.lost", "True"),
        in_function(extension.was_told_lost, "return ", "return False and "),
    ),
    "an extension to an earlier end is not noticed": in_function(
        extension.shorten, "if lease._renewal is not None", "if False"
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("mistake", MISTAKES)
def test_walks_find_a_mistake(walks: Callable[[range], None], mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MISTAKES[mistake](monkeypatch)
    with pytest.raises(AssertionError):
        walks(range(400))
        pytest.fail("no walk has found it")  # no AssertionError
