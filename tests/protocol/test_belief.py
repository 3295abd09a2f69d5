"""Believed grants: when a message is believed, for how long, and what confirms it. In what order of events that is
safe: test_handover_model.py."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
from support.run_steps import After, Clock, joined, lost, run_steps

from fastlock._protocol import commands, extension
from fastlock._protocol.belief import Confirmation
from fastlock._protocol.lease import ENDED, Lease
from fastlock._protocol.local_queue import BELIEVED_PART, LocalQueue, LocalQueues, ReleaseRoute
from fastlock._protocol.moments import LEAST_MOMENT
from fastlock._protocol.waiters import Waiter

pytestmark = pytest.mark.usefixtures("impl")  # leases are compiled
MS = 10_000


@pytest.fixture
def queues() -> LocalQueues:
    return LocalQueues(contextlib.nullcontext())


def waits(queues: LocalQueues, clock: Clock, ms: int = MS) -> Waiter:
    """A waiter whose entry the server has queued just now."""
    waiter = joined(queues, "name", b"name", ms, False, None)
    waiter.believes = True
    assert queues.may_enter_now(waiter, clock()) and waiter.queue is not None
    waiter.queue.note_queued(5.0, True, 0, clock(), clock())
    return waiter


def queue_of(waiter: Waiter) -> LocalQueue:
    assert waiter.queue is not None
    return waiter.queue


def believed(queues: LocalQueues, waiter: Waiter, clock: Clock) -> Lease | None:
    """The lease that a message of its grant gives to the waiter."""
    queues.on_grant_message(queue_of(waiter).entry)
    return queue_of(waiter).believe(waiter, clock())


def test_a_grant_is_believed_until_the_moment_after_the_last_look_is_over(queues: LocalQueues, clock: Clock) -> None:
    waiter, start = waits(queues, clock), clock()
    entry = queue_of(waiter).entry
    clock.go(0.05)
    lease = believed(queues, waiter, clock)
    assert lease is not None and lease is waiter.lease is queue_of(waiter).circulating
    assert lease._deadline == pytest.approx(start + LEAST_MOMENT) and lease._raw_token == entry
    assert lease._contended and lease._confirmation.lease is lease
    assert queue_of(waiter).entry != entry and not queue_of(waiter).granted, "the next waiter waits by another entry"


@pytest.mark.parametrize("ms", [20, 0])
def test_a_lease_that_is_believed_is_no_longer_than_asked_for(queues: LocalQueues, clock: Clock, ms: int) -> None:
    lease = believed(queues, waits(queues, clock, ms), clock)
    assert lease is not None
    assert lease._deadline == pytest.approx(clock() + (0.02 if ms else LEAST_MOMENT))


def test_too_late_a_message_is_not_believed(queues: LocalQueues, clock: Clock) -> None:
    waiter = waits(queues, clock)
    clock.go(LEAST_MOMENT * (1 - BELIEVED_PART) + 0.001)
    assert believed(queues, waiter, clock) is None and waiter.lease is None
    assert queues.may_enter_now(waiter, clock()), "it looks"


def test_nothing_is_believed_without_a_message_or_before_a_look_was_answered(queues: LocalQueues, clock: Clock) -> None:
    waiter = joined(queues, "name", b"name", MS, False, None)
    waiter.believes = True
    queues.may_enter_now(waiter, clock())
    assert believed(queues, waiter, clock) is None, "nobody knows when the moment began"
    queue_of(waiter).new_entry()
    other = queue_of(waiter)
    queues.may_enter_now(waiter, clock())
    other.note_queued(5.0, True, 0, clock(), clock())
    assert other.believe(waiter, clock()) is None, "the message was of another entry"


def test_nothing_is_believed_while_the_look_of_one_who_left_is_not_answered(queues: LocalQueues, clock: Clock) -> None:
    """It may have confirmed the grant already, with the lease of that one, which the confirmation would leave."""
    first = waits(queues, clock, ms=500)
    second = joined(queues, "name", b"name", MS, False, None)
    second.believes = True
    assert queues.may_enter_now(first, clock())
    queues.dequeue(first, clock())
    assert believed(queues, second, clock) is None
    assert queues.may_enter_now(second, clock())
    queue_of(second).note_queued(5.0, True, 0, clock(), clock())
    assert believed(queues, second, clock) is not None, "its own look was answered, behind the other one"


def test_who_may_not_believe_looks(queues: LocalQueues, clock: Clock) -> None:
    waiter = waits(queues, clock)
    waiter.believes = False
    assert believed(queues, waiter, clock) is None


def test_only_the_first_waiter_believes_and_only_if_no_lease_circulates(queues: LocalQueues, clock: Clock) -> None:
    one = waits(queues, clock)
    two = joined(queues, "name", b"name", MS, False, None)
    two.believes = True
    queues.on_grant_message(queue_of(one).entry)
    assert queue_of(one).believe(two, clock()) is None
    queue_of(one).circulating = Lease("name", b"name", b"fl:" + b"0" * 32, clock() + 1)
    assert queue_of(one).believe(one, clock()) is None
    queue_of(one).circulating = Lease("name", b"name", b"fl:" + b"0" * 32, clock())
    assert queue_of(one).believe(one, clock()) is not None, "that one has ended"


def test_the_confirmation_gives_the_lease_its_time(queues: LocalQueues, clock: Clock) -> None:
    waiter = waits(queues, clock)
    entry, address = queue_of(waiter).entry, queue_of(waiter).address
    lease = believed(queues, waiter, clock)
    assert lease is not None
    confirmation: Confirmation = lease._confirmation
    (call,) = confirmation.undo().commands(frozenset(), False)
    assert call == commands.enter(b"name", address, False, commands.CONFIRM, entry, b"%d" % MS)
    sent = clock()
    clock.go(0.1)
    assert confirmation.undo().unfinished([[1, 3, 0]], False) is None
    assert lease._deadline == sent + MS / 1000 and lease._confirmation is None
    assert queue_of(waiter).remote_waiters and queue_of(waiter).confirmed_at == sent


def test_a_confirmation_of_nobody_else_waiting_lets_the_lease_circulate(queues: LocalQueues, clock: Clock) -> None:
    one = waits(queues, clock)
    lease = believed(queues, one, clock)
    assert lease is not None
    joined(queues, "name", b"name", MS, False, None)
    assert queue_of(one).successor_for(lease, clock()) is None, "somebody else may have waited for longer"
    lease._confirmation.undo().commands(frozenset(), False)
    lease._confirmation.undo().unfinished([[1, 0, 0]], False)
    assert queue_of(one).handovers_left == math.inf
    assert queues.release(lease, clock()) == ReleaseRoute.LOCAL


def test_a_grant_that_is_refuted_ends_at_once(queues: LocalQueues, clock: Clock) -> None:
    """The entry is gone: the moment was over, or the server has lost the key. The next moment is longer."""
    lease = believed(queues, waits(queues, clock), clock)
    assert lease is not None
    confirmation, moment = lease._confirmation, queues.moment
    confirmation.undo().commands(frozenset(), False)
    assert confirmation.undo().unfinished([[-1, 0, 0]], False) is None
    assert not lease.valid and lease._confirmation is None and queues.moment > moment


def test_an_entry_that_still_waits_is_taken_out(queues: LocalQueues, clock: Clock) -> None:
    """The message was no grant: somebody has forged it, or the server has forgotten what it granted."""
    lease = believed(queues, waits(queues, clock), clock)
    assert lease is not None
    confirmation = lease._confirmation
    confirmation.undo().commands(frozenset(), False)
    (left, _) = confirmation.undo().unfinished([[0, 100, 1, 0]], False)
    assert left.call == commands.leave(b"name", confirmation.address + lease._raw_token) and not lease.valid


@pytest.mark.parametrize("how", ["released", "being released", "confirmed", "extended"])
def test_an_answer_that_comes_later_changes_nothing(queues: LocalQueues, clock: Clock, how: str) -> None:
    lease = believed(queues, waits(queues, clock), clock)
    assert lease is not None
    confirmation = lease._confirmation
    confirmation.undo().commands(frozenset(), False)
    if how == "released":
        lease._end()
    elif how == "being released":
        lease._releasing = True
    elif how == "confirmed":
        confirmation.undo().unfinished([[1, 0, 0]], False)
    else:
        lease._confirmation = None
        lease._deadline += 100
    end, moment = lease._deadline, queues.moment
    confirmation.undo().unfinished([[-1, 0, 0]], False)
    assert (lease._deadline, queues.moment) == (end, moment)


def test_a_confirmation_never_shortens_a_lease(queues: LocalQueues, clock: Clock) -> None:
    """As a look shortens none: another lock has it renewed for longer, before the answer was read."""
    lease = believed(queues, waits(queues, clock), clock)
    assert lease is not None
    lease._confirmation.undo().commands(frozenset(), False)
    lease._deadline = end = clock() + MS
    lease._confirmation.undo().unfinished([[1, 0, 0]], False)
    assert lease._deadline == end and lease._confirmation is None


def test_it_counts_from_when_it_was_sent_first(queues: LocalQueues, clock: Clock) -> None:
    """Which of two sends is answered cannot be told."""
    lease = believed(queues, waits(queues, clock), clock)
    assert lease is not None
    confirmation, sent = lease._confirmation, clock()
    confirmation.undo().commands(frozenset(), False)
    clock.go(0.01)
    confirmation.undo().commands(frozenset(), True)
    assert lease._latest_end() == sent + MS / 1000
    confirmation.undo().unfinished([b"sha", [1, 0, 0]], True)
    assert lease._deadline == sent + MS / 1000


@pytest.mark.parametrize("sent", [True, False])
def test_a_lease_is_handed_over_with_its_confirmation(queues: LocalQueues, clock: Clock, sent: bool) -> None:
    """It tells its end to who holds it then. Not one that was not sent, as a signal handler raised before."""
    one, two = waits(queues, clock), joined(queues, "name", b"name", MS, False, None)
    two.believes = True
    lease = believed(queues, one, clock)
    assert lease is not None
    confirmation: Confirmation = lease._confirmation
    if sent:
        confirmation.undo().commands(frozenset(), False)
    assert queues.release(lease, clock()) == (ReleaseRoute.LOCAL if sent else ReleaseRoute.SCRIPT)
    if sent:
        handed = two.lease
        assert handed is not None and handed._deadline < clock() + 1 and lease._confirmation is None
        confirmation.undo().unfinished([[1, 0, 0]], False)
        assert handed._deadline == confirmation.sent + MS / 1000 and handed._confirmation is None


@pytest.mark.parametrize("how", ["moved", "ended"])
def test_a_confirmation_that_nobody_needs_any_more_is_not_sent_again(
    queues: LocalQueues, clock: Clock, how: str
) -> None:
    """It would set a lease back that was moved meanwhile."""
    lease = believed(queues, waits(queues, clock), clock)
    assert lease is not None
    confirmation = lease._confirmation
    confirmation.undo().commands(frozenset(), False)
    if how == "ended":
        lease._end()
    lease._confirmation = None
    assert confirmation.undo().commands(frozenset(), True) == [(b"PING",)]
    assert confirmation.undo().unfinished([b"PONG"], True) is None


def test_a_handler_that_raises_where_an_entry_is_made_leaves_no_false_belief(
    queues: LocalQueues, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a message said of one entry is not believed of the next."""
    one, two = waits(queues, clock), joined(queues, "name", b"name", MS, False, None)
    two.believes = True
    queues.on_grant_message(queue_of(one).entry)
    made = commands.address

    def interrupted(*args: Any) -> bytes:
        monkeypatch.setattr(commands, "address", made)
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "address", interrupted)
    with pytest.raises(KeyboardInterrupt):
        queue_of(one).believe(one, clock())
    queues.dequeue(one, clock())
    assert queue_of(two).first() is two and queue_of(two).believe(two, clock()) is None


@pytest.mark.parametrize("other", ["ms", "believes", "late"])
def test_what_is_not_confirmed_goes_to_equals_only(queues: LocalQueues, clock: Clock, other: str) -> None:
    one = waits(queues, clock)
    two = joined(queues, "name", b"name", MS - (other == "ms"), False, None)
    two.believes = other != "believes"
    lease = believed(queues, one, clock)
    assert lease is not None
    lease._confirmation.undo().commands(frozenset(), False)
    if other == "late":
        clock.go(queues.moment * 0.9)
    assert queue_of(one).successor_for(lease, clock()) is None


@pytest.mark.parametrize("reply", [7, None, [1, b"x", 0], [1]])
def test_a_reply_that_makes_no_sense_has_it_sent_again(queues: LocalQueues, clock: Clock, reply: object) -> None:
    lease = believed(queues, waits(queues, clock), clock)
    assert lease is not None
    (left, error) = (undo := lease._confirmation.undo()).unfinished([reply], False)
    assert left is undo and "makes no sense" in str(error)


def test_an_error_has_it_sent_again_with_its_script(queues: LocalQueues, clock: Clock) -> None:
    lease = believed(queues, waits(queues, clock), clock)
    assert lease is not None
    refusal = Exception("NOSCRIPT No matching script")
    undo = lease._confirmation.undo()
    assert undo.unfinished([refusal], False) == (undo, refusal)
    assert undo.commands(frozenset(), True) == [*commands.ENTER_LUA.loads, undo.call]


def test_a_released_lease_stays_so(queues: LocalQueues, clock: Clock) -> None:
    lease = believed(queues, waits(queues, clock), clock)
    assert lease is not None
    confirmation = lease._confirmation
    confirmation.undo().commands(frozenset(), False)
    assert queues.release(lease, clock()) == ReleaseRoute.SCRIPT
    lease._end()
    confirmation.undo().unfinished([[1, 0, 0]], False)
    assert lease._deadline == ENDED


def test_an_extension_waits_for_the_confirmation(queues: LocalQueues, clock: Clock) -> None:
    """It would add to the moment; and the confirmation that was sent before changes nothing any more."""
    lease = believed(queues, waits(queues, clock), clock)
    assert lease is not None
    confirmation = lease._confirmation
    confirmation.undo().commands(frozenset(), False)
    ran = run_steps(clock, extension.extend(lease, 5000, False, clock), [[1, 0, 0]], b"OK", queues=queues)
    assert ran.outcome is extension.Outcome.MOVED and lease._deadline == pytest.approx(clock() + 15)
    assert [request.calls[0] for request in ran.requests[:1]] == [confirmation.undo().call]
    clock.go(1)
    confirmation.undo().unfinished([[1, 0, 0]], False)
    assert lease._deadline == pytest.approx(clock() + 14)


@pytest.mark.parametrize("posted", [True, False])
def test_what_an_extension_waits_for_counts_from_the_first_look_that_may_have_been_executed(
    queues: LocalQueues, clock: Clock, posted: bool
) -> None:
    lease = believed(queues, waits(queues, clock), clock)
    assert lease is not None
    if posted:
        lease._confirmation.undo().commands(frozenset(), False)
        clock.go(0.1)
    first = lease._confirmation.sent or clock()
    answers = [After(0.1, lost()), After(0.1, [[1, 0, 0]])]
    run_steps(clock, extension.confirm(lease, clock), *answers, queues=queues)
    assert lease._deadline == pytest.approx(first + MS / 1000)
