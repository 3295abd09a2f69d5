"""Batches by canned replies: what a flush leaves open is settled name by name, and nothing is released twice.

Single locks, and the fixtures: test_operations.py.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from support.run_steps import CONTENDED, MINE, OTHER, After, Clock, error, joined, lease_of, lost, run_steps, undone

from fastlock import _errors as errors
from fastlock._protocol import commands, steps
from fastlock._protocol.batch_operations import AcquireMany, release_many
from fastlock._protocol.handshake import Session
from fastlock._protocol.lease import Lease
from fastlock._protocol.local_queue import LocalQueues
from fastlock._protocol.stats import Stats

pytestmark = pytest.mark.usefixtures("impl")  # leases are compiled
FORBIDDEN = error("NOPERM this user has no permissions to run the 'evalsha' command")


def many(clock: Clock, count: int = 3, ms: int = 10_000) -> Any:
    keys = [b"n%d" % i for i in range(count)]
    return AcquireMany([key.decode() for key in keys], keys, MINE, ms, Stats())


def test_each_name_of_a_batch_has_its_own_outcome(clock: Clock) -> None:
    sent = clock()
    ran = run_steps(clock, many(clock), After(1.0, [None, OTHER, None]))
    assert [lease and lease._key for lease in ran.outcome] == [b"n0", None, b"n2"]
    assert {lease._deadline for lease in ran.outcome if lease} == {sent + 10}
    assert ran.undos == []


def test_a_name_that_failed_in_a_batch_is_retried_alone_or_undoes_the_batch(clock: Clock) -> None:
    ran = run_steps(clock, many(clock), [None, error("ERR no"), None], error("ERR no"))
    assert isinstance(ran.raised, errors.ResponseError)
    assert [undone(undo) for undo in ran.undos] == [([b"n0", b"n1", b"n2"], [MINE] * 3)]
    ran = run_steps(clock, many(clock), [None, error("NOSCRIPT x"), None], error("NOSCRIPT x"), [b"s"] * 7, None)
    assert [lease and lease._key for lease in ran.outcome] == [b"n0", b"n1", b"n2"]


@pytest.mark.parametrize("odd", [error("ERR no"), 5, [], False])
def test_the_own_token_in_a_batch_is_ours(clock: Clock, odd: Any) -> None:
    """Its token is made for this batch alone: whatever the first reply said, nobody else can have set it."""
    ran = run_steps(clock, many(clock, 1), [odd], MINE, After(1.0, 1))
    assert [lease._deadline for lease in ran.outcome] == [clock() - 1 + 10]
    ran = run_steps(clock, many(clock, 2), lost(), [MINE, OTHER], MINE, After(1.0, 1))
    assert [lease and lease._deadline for lease in ran.outcome] == [clock() - 1 + 10, None]


def test_the_own_token_in_a_batch_is_ours_though_it_is_contended(clock: Clock) -> None:
    """Otherwise the key stays behind, and no caller knows that it holds it."""
    ran = run_steps(clock, many(clock, 2), lost(), [CONTENDED, OTHER], CONTENDED, None, After(1.0, 1))
    assert [lease and lease._deadline for lease in ran.outcome] == [clock() - 1 + 10, None]
    ran = run_steps(clock, many(clock, 1), [error("ERR no")], CONTENDED, None, 1)
    assert [lease._raw_token for lease in ran.outcome] == [MINE]


def test_a_batch_given_up_with_its_outcome_unknown_is_undone(clock: Clock) -> None:
    ran = run_steps(clock, many(clock, 2), lost(session="one"), lost(session="two", final=True))
    assert [set(undo.stale) for undo in ran.undos] == [{"one", "two"}]
    ran = run_steps(clock, many(clock, 2), [None, 5], lost(session="three"), lost(session="four", final=True))
    assert [set(undo.stale) for undo in ran.undos] == [{"three", "four"}]
    assert undone(ran.undos[0]) == ([b"n0", b"n1"], [MINE] * 2)


def test_a_batch_that_comes_after_its_leases_is_undone(clock: Clock) -> None:
    ran = run_steps(clock, many(clock, 2, ms=100), After(0.1, [None, OTHER]))
    assert (ran.outcome, len(ran.undos)) == ([None, None], 1)


def test_a_reply_to_a_batch_that_is_no_list_is_never_a_grant(clock: Clock) -> None:
    for answer in (b"OK", 5, None, {}):
        ran = run_steps(clock, many(clock, 1), answer, answer)
        assert isinstance(ran.raised, errors.InvalidResponse)
        assert len(ran.undos) == 1


SESSION = Session({}, frozenset(), b"1", b"a", "")
NATIVE = Session({}, frozenset({commands.DELIFEQ, commands.SET_NX_GET}), b"1", b"a", "")


def held(clock: Clock, count: int) -> list[Lease]:
    return [lease_of(clock, key=b"n%d" % i) for i in range(count)]


def releasing(clock: Clock, leases: list[Lease]) -> Any:
    return release_many(leases, LocalQueues(contextlib.nullcontext()), clock)


def handed_over(count: int, start: int = 0) -> list[tuple[bytes, ...]]:
    return [commands.hand_over(b"n%d" % i, MINE) for i in range(start, start + count)]


def test_releasing_many_natively_is_one_flush(clock: Clock) -> None:
    ran = run_steps(clock, releasing(clock, held(clock, 250)), NATIVE, [1] * 249 + [0], [0])
    assert ran.outcome == [True] * 249 + [False]
    assert (ran.requests[0].names, ran.requests[0].tokens) == ([b"n%d" % i for i in range(250)], [MINE] * 250)
    assert run_steps(clock, releasing(clock, held(clock, 2)), NATIVE, [1, 1]).outcome == [True, True]


def test_releasing_many_by_script_goes_in_chunks_of_a_hundred(clock: Clock) -> None:
    answer, second = [[1] * 100, [0] * 100, [1] * 50], [0] * 99 + [1]
    ran = run_steps(clock, releasing(clock, held(clock, 250)), SESSION, answer, second)
    assert ran.outcome == [True] * 100 + [False] * 99 + [True] * 51
    assert [request.calls for request in ran.requests[1:]] == [handed_over(100, 100)], (
        "one flush for those that others wait for"
    )
    assert [call[2] for call in ran.requests[0].calls] == [b"100", b"100", b"50"]
    names = [name for call in ran.requests[0].calls for name in call[3 : 3 + int(call[2])]]
    assert names == [b"n%d" % i for i in range(250)]


@pytest.mark.parametrize(
    "answer", [lost(), [[1, 1], error("NOSCRIPT x")], [error("ERR")] * 2, 5, [[1] * 99], [b"\1" * 120]]
)
def test_what_the_flush_left_open_is_handed_over_in_a_second_flush(clock: Clock, answer: Any) -> None:
    ran = run_steps(clock, releasing(clock, held(clock, 120)), SESSION, answer, [1] * 119 + [0])
    assert ran.outcome == [True] * 119 + [isinstance(answer, steps.ConnectionLost)]
    assert [request.calls for request in ran.requests[1:]] == [handed_over(120)]


@pytest.mark.parametrize("second", [lost(), [1], 5, [b"1", error("ERR x"), None]])
def test_what_both_flushes_left_open_is_handed_over_name_by_name(clock: Clock, second: Any) -> None:
    """A key that is gone after a lost flush was released by that flush, as with the first one."""
    ran = run_steps(clock, releasing(clock, held(clock, 3)), NATIVE, [0, 0, 0], second, [1], [0], [1])
    assert ran.outcome == [True, isinstance(second, steps.ConnectionLost), True]
    assert [request.calls for request in ran.requests[2:]] == [[call] for call in handed_over(3)]


def test_a_lost_flush_releases_what_is_gone(clock: Clock) -> None:
    ran = run_steps(clock, releasing(clock, held(clock, 3)), NATIVE, lost(), [0, 1, 0])
    assert ran.outcome == [True] * 3


def test_a_flush_that_was_never_sent_releases_nothing(clock: Clock) -> None:
    ran = run_steps(clock, releasing(clock, held(clock, 3)), NATIVE, lost(sent=False), [0, 1, 0])
    assert ran.outcome == [False, True, False]
    second = run_steps(clock, releasing(clock, held(clock, 2)), NATIVE, [0, 0], lost(sent=False), [0], [1])
    assert second.outcome == [False, True]


def test_a_user_who_may_not_hand_over_gets_the_outcome_of_the_flush(clock: Clock) -> None:
    """As long as the value is not its own token: a contended one is released as it is stored."""
    ran = run_steps(clock, releasing(clock, held(clock, 2)), NATIVE, [0, 1], [FORBIDDEN], [FORBIDDEN], OTHER)
    assert ran.outcome == [False, True]
    ran = run_steps(clock, releasing(clock, held(clock, 2)), NATIVE, [0, 1], [FORBIDDEN], [FORBIDDEN], CONTENDED, 1)
    assert ran.outcome == [True, True] and ran.requests[-1].token == CONTENDED
    refused = [FORBIDDEN] * 2
    ran = run_steps(
        clock, releasing(clock, held(clock, 2)), NATIVE, [0, 1], [FORBIDDEN], [FORBIDDEN], CONTENDED, *refused
    )
    assert type(ran.raised) is type(errors.from_reply(FORBIDDEN))


def test_a_batch_hands_over_locally(clock: Clock) -> None:
    """Without a command; a lease that circulates is not released twice."""
    queues = LocalQueues(contextlib.nullcontext())
    first, second = (joined(queues, "n1", b"n1", 10_000, False, None) for _ in range(2))
    assert queues.may_enter_now(first, clock())
    _, lease, _ = leases = held(clock, 3)
    first.queue.note_granted(first, lease, 0, clock())
    ran = run_steps(clock, release_many(leases, queues, clock), NATIVE, [1, 1])
    assert ran.outcome == [True] * 3 and ran.requests[0].names == [b"n0", b"n2"]
    assert second.woken and second.lease is not None and second.lease._raw_token == lease._raw_token
    ran = run_steps(clock, release_many([lease, second.lease], queues, clock), NATIVE, [1])
    assert ran.requests[0].tokens == [lease._raw_token], "once: the lease is the other waiter's"
    assert ran.outcome == [None, True] and not queues.by_key, "None: it was released before, which is no loss"
