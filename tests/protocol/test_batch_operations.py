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


FLOOR: frozenset[str] = frozenset()  # the capabilities of a server that knows neither SET NX GET nor DELIFEQ


def held(clock: Clock, count: int) -> list[Lease]:
    return [lease_of(clock, key=b"n%d" % i) for i in range(count)]


def releasing(clock: Clock, leases: list[Lease]) -> Any:
    return release_many(leases, LocalQueues(contextlib.nullcontext()), clock)


def handed_over(count: int, start: int = 0) -> list[tuple[bytes, ...]]:
    return [commands.hand_over(b"n%d" % i, MINE) for i in range(start, start + count)]


def test_releasing_many_natively_is_one_flush(clock: Clock) -> None:
    ran = run_steps(clock, releasing(clock, held(clock, 250)), [1] * 249 + [0], [0])
    assert ran.outcome == [True] * 249 + [False]
    assert (ran.requests[0].names, ran.requests[0].tokens) == ([b"n%d" % i for i in range(250)], [MINE] * 250)
    assert run_steps(clock, releasing(clock, held(clock, 2)), [1, 1]).outcome == [True, True]


def test_releasing_many_by_script_goes_in_chunks_of_a_hundred(clock: Clock) -> None:
    answer, second = [[1] * 100, [0] * 100, [1] * 50], [0] * 99 + [1]
    ran = run_steps(clock, releasing(clock, held(clock, 250)), answer, second, capabilities=FLOOR)
    assert ran.outcome == [True] * 100 + [False] * 99 + [True] * 51
    assert [request.calls for request in ran.requests[1:]] == [handed_over(100, 100)], (
        "one flush for those that others wait for"
    )
    assert [call[2] for call in ran.scripts] == [b"100", b"100", b"50"]
    assert [call[3:] for call in ran.scripts] == [
        (*(b"n%d" % i for i in range(first, last)), MINE) for first, last in ((0, 100), (100, 200), (200, 250))
    ], "a token that is that of all is sent once a script"


def test_a_script_that_releases_locks_of_several_batches_is_sent_each_token(clock: Clock) -> None:
    leases = [lease_of(clock, key=b"n0"), lease_of(clock, key=b"n1", token=OTHER)]
    ran = run_steps(clock, releasing(clock, leases), [[1, 1]], capabilities=FLOOR)
    assert ran.outcome == [True, True] and ran.scripts[0][2:] == (b"2", b"n0", b"n1", MINE, OTHER)


def test_acquiring_many_by_script_goes_in_chunks_of_a_hundred(clock: Clock) -> None:
    answer = [[None] * 99 + [OTHER], [OTHER] * 20]
    ran = run_steps(clock, many(clock, 120), answer, capabilities=FLOOR)
    assert [lease is not None for lease in ran.outcome] == [True] * 99 + [False] * 21
    names = [b"n%d" % i for i in range(120)]
    assert [call[2:] for call in ran.scripts] == [
        (b"100", *names[:100], MINE, b"10000"),
        (b"20", *names[100:], MINE, b"10000"),
    ]


def test_a_name_that_failed_in_a_script_is_retried_alone(clock: Clock) -> None:
    sent = clock()
    answer = [[None, error("ERR no"), OTHER]]
    ran = run_steps(clock, many(clock), After(1.0, answer), [None], capabilities=FLOOR)
    assert [lease and lease._key for lease in ran.outcome] == [b"n0", b"n1", None]
    assert [lease._deadline for lease in ran.outcome[:2]] == [sent + 10, sent + 11]
    assert ran.requests[1].names == [b"n1"] and len(ran.scripts) == 1, "in one flush of commands"


def test_a_name_that_fails_its_script_fails_alone(clock: Clock) -> None:
    """An ACL, or another slot of a cluster: the others of its script take one flush more, not one each."""
    names = [b"n%d" % i for i in range(20)]
    answer, singly = [[None] * 100, error("NOPERM no")], [*[None] * 18, OTHER, error("NOPERM no")]
    ran = run_steps(clock, many(clock, 120), answer, singly, *[error("NOPERM no")] * 2, capabilities=FLOOR)
    assert ran.requests[1].names == [b"n%d" % i for i in range(100, 120)]
    assert type(ran.raised) is type(errors.from_reply(FORBIDDEN))
    assert len(ran.requests) == 4 and [len(undo.names) for undo in ran.undos] == [120]
    lost_answer = lost(session="one", final=True)
    ran = run_steps(clock, many(clock, 20), [error("NOPERM no")], lost_answer, capabilities=FLOOR)
    assert [(undo.names, undo.stale) for undo in ran.undos] == [(names, ("one",))]


def test_scripts_that_the_server_has_forgotten_are_loaded_and_all_sent_again(clock: Clock) -> None:
    forgotten = [[None] * 100, error("NOSCRIPT x")]
    again = [[MINE] * 99 + [OTHER], [None] * 20]
    ran = run_steps(
        clock, many(clock, 120), forgotten, [b"s"] * 7, again, *[[MINE] * 99, *[MINE, 1] * 99], capabilities=FLOOR
    )
    assert [lease is not None for lease in ran.outcome] == [True] * 99 + [False] + [True] * 20
    ran = run_steps(clock, many(clock, 120), *[forgotten, [b"s"] * 7] * 10, forgotten, capabilities=FLOOR)
    assert isinstance(ran.raised, errors.ResponseError) and len(ran.undos) == 1


@pytest.mark.parametrize(
    "answer", [[[None]], [[None] * 100], [[None] * 100, [None] * 21], [None, None], [[None] * 120]]
)
def test_an_answer_of_the_wrong_shape_is_never_a_grant(clock: Clock, answer: Any) -> None:
    """Those names are asked for by themselves."""
    ran = run_steps(clock, many(clock, 120), answer, lambda request: [OTHER] * len(request.names), capabilities=FLOOR)
    asked = ran.requests[1].names
    assert asked in ([b"n%d" % i for i in range(120)], [b"n%d" % i for i in range(100, 120)])
    assert [lease is None for lease in ran.outcome] == [name in asked for name in ran.requests[0].names]


@pytest.mark.parametrize(
    "answer", [lost(), [[1, 1], error("NOSCRIPT x")], [error("NOSCRIPT x")] * 2, 5, [[1] * 99], [b"\1" * 120]]
)
def test_what_the_flush_left_open_is_handed_over_in_a_second_flush(clock: Clock, answer: Any) -> None:
    forgotten = "NOSCRIPT" in str(answer)
    loads = commands.HAND_OVER_LUA.loads if forgotten else []
    second = [b"sha"] * len(loads) + [1] * 119 + [0]
    ran = run_steps(clock, releasing(clock, held(clock, 120)), answer, second, capabilities=FLOOR)
    assert ran.outcome == [True] * 119 + [isinstance(answer, steps.ConnectionLost)]
    assert [request.calls for request in ran.requests[1:]] == [[*loads, *handed_over(120)]]


def test_what_one_script_has_released_is_released_though_another_was_forgotten(clock: Clock) -> None:
    answer = [[1] * 100, error("NOSCRIPT x")]
    loads = commands.HAND_OVER_LUA.loads
    second = [b"sha"] * len(loads) + [1] * 19 + [0]
    ran = run_steps(clock, releasing(clock, held(clock, 120)), answer, second, capabilities=FLOOR)
    assert ran.outcome == [True] * 119 + [False]
    assert [request.calls for request in ran.requests[1:]] == [[*loads, *handed_over(20, 100)]]


def test_a_name_that_may_not_be_released_fails_none_beside_it_in_its_script(clock: Clock) -> None:
    answer, singly = [[1] * 100, error("NOPERM x")], [*[1] * 18, 0, FORBIDDEN]
    ran = run_steps(clock, releasing(clock, held(clock, 120)), answer, singly, [1, 1], capabilities=FLOOR)
    assert ran.outcome == [True] * 120
    assert ran.requests[1].names == [b"n%d" % i for i in range(100, 120)] and len(ran.scripts) == 2
    assert [request.calls for request in ran.requests[2:]] == [handed_over(2, 118)]


@pytest.mark.parametrize("second", [lost(), [1], 5, [b"1", error("ERR x"), None]])
def test_what_both_flushes_left_open_is_handed_over_name_by_name(clock: Clock, second: Any) -> None:
    """A key that is gone after a lost flush was released by that flush, as with the first one."""
    ran = run_steps(clock, releasing(clock, held(clock, 3)), [0, 0, 0], second, [1], [0], [1])
    assert ran.outcome == [True, isinstance(second, steps.ConnectionLost), True]
    assert [request.calls for request in ran.requests[2:]] == [[call] for call in handed_over(3)]


def test_a_lost_flush_releases_what_is_gone(clock: Clock) -> None:
    ran = run_steps(clock, releasing(clock, held(clock, 3)), lost(), [0, 1, 0])
    assert ran.outcome == [True] * 3


def test_a_flush_that_was_never_sent_releases_nothing(clock: Clock) -> None:
    ran = run_steps(clock, releasing(clock, held(clock, 3)), lost(sent=False), [0, 1, 0])
    assert ran.outcome == [False, True, False]
    second = run_steps(clock, releasing(clock, held(clock, 2)), [0, 0], lost(sent=False), [0], [1])
    assert second.outcome == [False, True]


def test_a_user_who_may_not_hand_over_gets_the_outcome_of_the_flush(clock: Clock) -> None:
    """As long as the value is not its own token: a contended one is released as it is stored."""
    ran = run_steps(clock, releasing(clock, held(clock, 2)), [0, 1], [FORBIDDEN], [FORBIDDEN], OTHER)
    assert ran.outcome == [False, True]
    ran = run_steps(clock, releasing(clock, held(clock, 2)), [0, 1], [FORBIDDEN], [FORBIDDEN], CONTENDED, 1)
    assert ran.outcome == [True, True] and ran.requests[-1].token == CONTENDED
    refused = [FORBIDDEN] * 2
    ran = run_steps(clock, releasing(clock, held(clock, 2)), [0, 1], [FORBIDDEN], [FORBIDDEN], CONTENDED, *refused)
    assert type(ran.raised) is type(errors.from_reply(FORBIDDEN))


def test_a_batch_hands_over_locally(clock: Clock) -> None:
    """Without a command; a lease that circulates is not released twice."""
    queues = LocalQueues(contextlib.nullcontext())
    first, second = (joined(queues, "n1", b"n1", 10_000, False, None) for _ in range(2))
    assert queues.may_enter_now(first, clock())
    _, lease, _ = leases = held(clock, 3)
    first.queue.note_granted(first, lease, 0, clock())
    ran = run_steps(clock, release_many(leases, queues, clock), [1, 1])
    assert ran.outcome == [True] * 3 and ran.requests[0].names == [b"n0", b"n2"]
    assert second.woken and second.lease is not None and second.lease._raw_token == lease._raw_token
    ran = run_steps(clock, release_many([lease, second.lease], queues, clock), [1])
    assert ran.requests[0].tokens == [lease._raw_token], "once: the lease is the other waiter's"
    assert ran.outcome == [None, True] and not queues.by_key, "None: it was released before, which is no loss"
