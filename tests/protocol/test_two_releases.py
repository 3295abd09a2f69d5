"""Two releases of one lease at the same time: one of them has released it, whose reply was lost or whoever was first.

No I/O, a clock by hand. The same with servers and cut connections: tests/chaos.py, where callers do this at random.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
from support.run_steps import After, Clock, Raise, error, lease_of, lost, run_steps

import fastlock
from fastlock._errors import ConnectionError
from fastlock._protocol.base_lock import LockRelease
from fastlock._protocol.batch_operations import InterruptedRelease, release_many
from fastlock._protocol.lease import ENDED, Lease, new_token, now
from fastlock._protocol.local_queue import LocalQueues
from fastlock._protocol.release import Release

pytestmark = pytest.mark.usefixtures("impl")  # leases are compiled


def in_a_batch(clock: Clock, lease: Lease) -> Any:
    return release_many([lease], LocalQueues(contextlib.nullcontext()), clock)


@pytest.mark.parametrize("first", [(lost(),), (0, lost())])
def test_who_comes_second_finds_the_work_of_one_whose_reply_was_lost(clock: Clock, first: tuple[Any, ...]) -> None:
    lease, found = lease_of(clock), []

    def other(_: object) -> list[int]:
        found.append(run_steps(clock, in_a_batch(clock, lease), [0], [0]).outcome)
        return [0]

    rest = (other,) if len(first) == 2 else (lambda request: other(request)[0], [0])
    assert run_steps(clock, Release(lease), *first, *rest).outcome is True
    assert found == [[True]], "which is no loss"


def test_a_reply_may_be_lost_after_the_other_one_has_found_the_lease_gone(clock: Clock) -> None:
    lease, found = lease_of(clock), []

    def other(_: object) -> Any:
        clock.go(0.001)
        found.append(run_steps(clock, in_a_batch(clock, lease), [0], [0]).outcome)
        return lost()

    assert run_steps(clock, Release(lease), other, 0, [0]).outcome is True
    assert found == [[None]] and lease._lost_end == ENDED, "which is not known to be a loss"


def test_a_reply_of_a_batch_may_be_lost_after_that(clock: Clock) -> None:
    lease = lease_of(clock)

    def other(_: object) -> Any:
        clock.go(0.001)
        lease._found_lost(clock())
        return lost()

    assert run_steps(clock, in_a_batch(clock, lease), other, [0]).outcome == [True]


def test_a_batch_that_asks_again_may_find_the_work_of_one_that_has_ended_meanwhile(clock: Clock) -> None:
    lease = lease_of(clock)

    def other(_: object) -> list[int]:
        lease._end()
        return [0]

    assert run_steps(clock, in_a_batch(clock, lease), [0], [error("NOSCRIPT")], other).outcome == [None]


class Posted:
    """A release that another thread has posted, for whose reply nobody waits."""

    def __init__(self, clock: Clock, lease: Lease) -> None:
        self.client = fastlock.Client(port=1, confirm_release=False)  # it never connects
        release = LockRelease(self.client.lock("name"), lease)
        self.undo = release.unwaited(clock, self.client._transport.release_told)
        assert self.undo is not None and release.posted()

    def tells_loss(self) -> bool:
        """Whether it tells a loss now, as it has found nothing to release."""
        self.client._transport.release_told(self.undo, False)
        return bool(self.client.get_stats()["losses"])


def test_a_batch_may_find_the_work_of_one_that_nobody_waits_for(clock: Clock) -> None:
    lease, others = lease_of(clock, token=new_token()), []

    def other(_: object) -> list[int]:
        others.append(Posted(clock, lease))
        return [0]

    assert run_steps(clock, in_a_batch(clock, lease), other, [0]).outcome == [None]
    assert others[0].tells_loss(), "the last one does"


@pytest.mark.parametrize("first", [lost(sent=False), [error("NOSCRIPT")]])
def test_one_that_nobody_waits_for_may_find_what_a_batch_sends_later(clock: Clock, first: object) -> None:
    lease, told = lease_of(clock, token=new_token()), []

    def sent(_: object) -> list[int]:
        told.append(Posted(clock, lease).tells_loss())
        return [1]

    answers = [[0], first] if isinstance(first, list) else [first]
    assert run_steps(clock, in_a_batch(clock, lease), *answers, sent).outcome == [True]
    assert told == [False]


def test_the_last_of_two_tells_what_both_have_found(clock: Clock) -> None:
    lease, told = lease_of(clock, token=new_token()), []

    def sent(_: object) -> list[int]:
        told.append(Posted(clock, lease).tells_loss())
        return [0]

    assert run_steps(clock, in_a_batch(clock, lease), [0], sent).outcome == [False]
    assert told == [False]


@pytest.mark.parametrize("is_mine", [0, 1])
def test_of_two_that_are_waited_for_one_tells(clock: Clock, is_mine: int) -> None:
    lease, found = lease_of(clock), []

    def other(_: object) -> int:
        found.append(run_steps(clock, in_a_batch(clock, lease), [0], [0]).outcome)
        return is_mine

    assert run_steps(clock, Release(lease), other, *([] if is_mine else [[0]])).outcome is bool(is_mine)
    assert found == [[None]] and lease._deadline != ENDED, "it goes on until the first one ends it"
    assert not lease._leave_to_another()


def test_one_that_could_not_be_posted_counts_once() -> None:
    client = fastlock.Client(port=1, confirm_release=False)  # it never connects
    lock = client.lock("name", thread_local=False)
    lock._leases[None] = lease = Lease("name", b"name", new_token(), now() + 10)
    assert client._transport.posted(lock._new_release()) is False
    assert lease._releases == 1 and not lease._posted


@pytest.mark.parametrize("sent", [True, False])
def test_a_release_that_failed_is_none_that_another_can_have_found(clock: Clock, sent: bool) -> None:
    lease, others = lease_of(clock, token=new_token()), []

    def posted(_: object) -> Any:
        clock.go(0.001)
        others.append(Posted(clock, lease))
        return lost(sent=sent, final=True)

    ran = run_steps(clock, Release(lease), posted)
    assert isinstance(ran.raised, ConnectionError) and others[0].tells_loss() is not sent


def test_what_was_sent_after_the_lease_was_found_lost_has_not_released_it(clock: Clock) -> None:
    lease = lease_of(clock)

    def other(_: object) -> Any:
        lease._found_lost(clock())
        return lost(sent=False)

    assert run_steps(clock, Release(lease), other, After(0.001, lost()), 0, [0]).outcome is False


def test_of_a_lease_that_had_ended_before_none_has_released_it(clock: Clock) -> None:
    lease = lease_of(clock, -0.001)

    def other(_: object) -> Any:
        lease._found_lost(clock())
        return lost()

    assert run_steps(clock, Release(lease), other, 0, [0]).outcome is False


@pytest.mark.parametrize("error", [KeyboardInterrupt(), asyncio.CancelledError()])
def test_one_that_nobody_waits_for_is_no_loss_if_a_batch_was_cancelled_after_it_was_sent(
    clock: Clock, error: BaseException
) -> None:
    lease, others = lease_of(clock, token=new_token()), []

    def posted(_: object) -> Raise:
        others.append(Posted(clock, lease))
        return Raise(error)

    assert run_steps(clock, in_a_batch(clock, lease), posted).raised is error
    assert not others[0].tells_loss(), "the batch has released it"


def test_one_that_nobody_waits_for_is_a_loss_if_the_batch_beside_it_was_never_sent(clock: Clock) -> None:
    lease, others = lease_of(clock, token=new_token()), []

    def posted(_: object) -> Any:
        others.append(Posted(clock, lease))
        return lost(sent=False, final=True)

    run_steps(clock, in_a_batch(clock, lease), posted, lost(sent=False, final=True), lost(sent=False, final=True))
    assert others[0].tells_loss()


def test_one_that_nobody_waits_for_is_no_loss_if_the_batch_failed_once_its_reply_was_lost(clock: Clock) -> None:
    lease, others = lease_of(clock, token=new_token()), []

    def posted(_: object) -> Any:
        others.append(Posted(clock, lease))
        return lost()

    run_steps(clock, in_a_batch(clock, lease), posted, lost(sent=False, final=True), lost(sent=False, final=True))
    assert not others[0].tells_loss()


@pytest.mark.parametrize("left", [-0.001, 10.0], ids=["ended", "live"])
def test_one_that_is_repeated_is_not_beside_itself(clock: Clock, left: float) -> None:
    lease = lease_of(clock, left)
    ran = run_steps(clock, Release(lease), lost(sent=True, final=True))
    assert isinstance(ran.raised, ConnectionError) and lease._releases == 0
    assert run_steps(clock, Release(lease), 0, [0]).outcome is lease._release_unknown is (left > 0)
    assert not lease._leave_to_another(), "it tells a loss"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), asyncio.CancelledError()])
def test_one_that_was_interrupted_is_not_beside_the_next(clock: Clock, error: BaseException) -> None:
    lease = lease_of(clock, -0.001)
    release = Release(lease)
    assert run_steps(clock, release, Raise(error)).raised is error
    release.abandon(LocalQueues(contextlib.nullcontext()), clock)
    assert lease._releases == 0


def test_one_that_was_cancelled_as_it_was_sent_again_is_not_beside_the_next(clock: Clock) -> None:
    lease, error = lease_of(clock, -0.001), asyncio.CancelledError()
    assert run_steps(clock, Release(lease), lost(), Raise(error)).raised is error
    assert lease._releases == 0


@pytest.mark.parametrize("sent", [True, False])
def test_one_that_was_interrupted_is_none_that_another_can_have_found_unless_it_was_sent(
    clock: Clock, sent: bool
) -> None:
    lease = lease_of(clock, token=new_token())
    release = Release(lease)
    release.request.sent = clock() if sent else 0.0
    posted = Posted(clock, lease)
    (undo,) = release.abandon(LocalQueues(contextlib.nullcontext()), clock)
    assert not undo.names, "the posted one releases it"
    assert posted.tells_loss() is not sent


def test_a_batch_that_was_interrupted_counts_once(clock: Clock) -> None:
    lease, released, others = lease_of(clock, token=new_token()), list[Any](), []
    queues = LocalQueues(contextlib.nullcontext())
    lease._releases = 1  # another one is under way

    def posted(request: Any) -> Raise:
        request.sent = 0.0  # it waits for a connection
        others.append(Posted(clock, lease))
        return Raise(KeyboardInterrupt())

    run_steps(clock, release_many([lease], queues, clock, released), posted)
    assert not InterruptedRelease([lease], released).abandon(queues, clock)
    assert not others[0].tells_loss(), "the other one may have released it"


def test_a_batch_that_fails_counts_once(clock: Clock) -> None:
    lease = lease_of(clock)
    lease._releases = 1  # another one is under way
    ran = run_steps(clock, in_a_batch(clock, lease), [0], [error("ERR")], [error("ERR")])
    assert ran.raised is not None and lease._releases == 1


def test_one_that_ended_unanswered_may_have_released_it(clock: Clock) -> None:
    lease = lease_of(clock, token=new_token())
    posted, other = Posted(clock, lease), Release(lease)
    posted.undo.commands(frozenset(), False)  # whose reply was lost
    clock.go(60)
    assert posted.undo.commands(frozenset(), True) == [(b"PING",)]
    assert posted.undo.unfinished([b"PONG"], True) is None
    assert lease._leave_to_another() and other.counts


@pytest.mark.parametrize("error", [KeyboardInterrupt(), asyncio.CancelledError()])
@pytest.mark.parametrize("answers", [[], [[0]], [[0], [error("NOSCRIPT")]]], ids=["first", "script", "single"])
def test_a_batch_that_was_interrupted_is_not_beside_the_next(
    clock: Clock, answers: list[Any], error: BaseException
) -> None:
    lease = lease_of(clock)
    assert run_steps(clock, in_a_batch(clock, lease), *answers, Raise(error)).raised is error
    assert lease._releases == 0


def test_a_batch_that_failed_is_not_beside_the_next_where_one_of_its_leases_had_ended(clock: Clock) -> None:
    lease, over = lease_of(clock), lease_of(clock)
    over._end()
    leases, unsent = [over, lease], lost(sent=False, final=True)
    many = release_many(leases, LocalQueues(contextlib.nullcontext()), clock)
    assert isinstance(run_steps(clock, many, unsent, unsent, unsent).raised, ConnectionError)
    assert lease._releases == 0


@pytest.mark.parametrize("refusal", ["NOSCRIPT", "NOPERM", "READONLY", "LOADING", "CLUSTERDOWN"])
def test_a_send_that_was_refused_has_released_nothing(clock: Clock, refusal: str) -> None:
    """So that the next one, which finds nothing, has found a loss."""
    posted = Posted(clock, lease_of(clock, token=new_token()))
    posted.undo.commands(frozenset(), False)
    assert posted.undo.unfinished([error(f"{refusal} because")], False)
    posted.undo.commands(frozenset(), True)
    assert posted.undo.unfinished([0], True) is None
    assert posted.client.get_stats()["losses"] == 1


def test_one_that_could_not_be_posted_leaves_no_time_of_that(clock: Clock) -> None:
    """Else what is sent after the lease was found lost counts as having released it."""
    client = fastlock.Client(port=1, confirm_release=False)  # it never connects
    lock = client.lock("name", thread_local=False)
    lock._leases[None] = lease = Lease("name", b"name", new_token(), now() + 10)
    assert client._transport.posted(lock._new_release()) is False and lease._lost_end == ENDED
