"""Kept leases: which are kept, who may take them, what a recall does, in every order of the two."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from support.run_steps import Clock, joined

from fastlock._protocol import commands, lease
from fastlock._protocol.acquire import Acquire
from fastlock._protocol.commands import as_contended
from fastlock._protocol.keeping import kept_token
from fastlock._protocol.kept import MOST_UNKNOWN, Subscription
from fastlock._protocol.lease import ENDED, Lease, new_token
from fastlock._protocol.local_queue import LOCAL_SECONDS, RECHECK_SECONDS, LocalQueues, ReleaseRoute
from fastlock._protocol.waiters import Waiter

pytestmark = pytest.mark.usefixtures("impl")  # leases are compiled
KEY, MS, KEEP = b"name", 10_000, 5.0
MOST = MS + round(KEEP * 1000)


@pytest.fixture
def queues() -> LocalQueues:
    found = LocalQueues(contextlib.nullcontext())
    found.recalls_heard(True)
    return found


def granted(queues: LocalQueues, clock: Clock) -> Lease:
    """A lease that the server granted now, and which may be kept."""
    found = Lease("name", KEY, kept_token(new_token()), clock() + MOST / 1000)
    queues.note_keepable(found, clock(), clock() + KEEP)
    return found


def take(queues: LocalQueues, clock: Clock, ms: int = MS, most: int = MOST) -> Lease | None:
    return queues.take_kept(KEY, "name", ms, most, {}, None, clock())


def recall(queues: LocalQueues, of: Lease) -> Lease | None:
    return queues.on_recall(of._raw_token + KEY)


def test_a_released_lease_is_taken_by_the_same_token(queues: LocalQueues, clock: Clock) -> None:
    first = granted(queues, clock)
    end, leases = first._deadline, {}
    assert queues.release(first, clock()) == ReleaseRoute.LOCAL and first._deadline == ENDED and not first.valid
    assert list(queues.kept) == [KEY] and not queues.by_key and queues.next_lapse == clock() + KEEP
    clock.go(KEEP - 0.001)
    second = queues.take_kept(KEY, "other", MS, MOST, leases, "owner", clock())
    assert second is not None and leases == {"owner": second} and second._name == "other"
    assert (second._raw_token, second._deadline, second.depth) == (first._raw_token, end, 1)
    assert not queues.kept and list(queues.by_key) == [KEY] and queues.stats.kept_acquires == 1
    assert take(queues, clock) is None, "somebody holds it"


def test_it_is_taken_only_as_long_as_its_timeout_is_left(queues: LocalQueues, clock: Clock) -> None:
    queues.release(granted(queues, clock), clock())
    assert take(queues, clock, MS, MOST - 1) is None, "longer than asked for"
    assert take(queues, clock, MOST + 1, 2 * MOST) is None, "shorter than asked for"
    clock.go(KEEP)
    assert take(queues, clock) is None
    assert [each._key for each in queues.lapsed(clock())] == [KEY]


def test_who_waits_since_the_server_refused_comes_before_who_would_take_it(queues: LocalQueues, clock: Clock) -> None:
    """A waiter may be enqueued when the holder, by whose lease it was refused, has released: by then that is kept."""
    queues.release(granted(queues, clock), clock())
    waiter = Waiter("name", KEY, MS, False, None)
    queues.enqueue(waiter, clock())
    assert take(queues, clock) is None and queues.by_key[KEY] is waiter.queue
    assert [each._key for each in queues.stop_keeping([KEY])] == [KEY]


def test_what_lapses_is_told_in_time(queues: LocalQueues, clock: Clock) -> None:
    queues.release(granted(queues, clock), clock())
    clock.go(KEEP / 2)
    assert queues.lapsed(clock()) == [] and queues.next_lapse == clock() + KEEP / 2
    clock.go(KEEP / 2)
    (over,) = queues.lapsed(clock())
    assert queues.next_lapse == float("inf") and take(queues, clock) is None
    clock.go(-KEEP / 2)
    assert take(queues, clock) is None, "nor can a thread take it that has read the clock before"
    queues.released(over)
    assert not queues.kept


def test_a_recall_of_what_nobody_holds_ends_it(queues: LocalQueues, clock: Clock) -> None:
    first = granted(queues, clock)
    queues.release(first, clock())
    found = recall(queues, first)
    assert found is not None and found._raw_token == first._raw_token and take(queues, clock) is None
    assert recall(queues, first) is found, "its release may have been interrupted"
    queues.released(found)
    assert recall(queues, first) is None
    assert not queues.kept and queues.stats.recalls == 1 and KEY in queues.expected


def test_a_recall_of_what_is_held_has_its_release_hand_it_over(queues: LocalQueues, clock: Clock) -> None:
    first = granted(queues, clock)
    clock.go(2 * LOCAL_SECONDS)
    assert recall(queues, first) is None
    assert queues.release(first, clock()) == ReleaseRoute.SCRIPT and not queues.kept and not queues.by_key


def test_a_recall_that_comes_before_the_grant_is_known(queues: LocalQueues, clock: Clock) -> None:
    first = Lease("name", KEY, kept_token(new_token()), clock() + MOST / 1000)
    assert recall(queues, first) is None
    queues.note_keepable(first, clock(), clock() + KEEP)
    assert first._contended and not queues.by_key and not queues.unknown and KEY in queues.expected


def test_recalls_of_what_is_not_known_are_forgotten(queues: LocalQueues, clock: Clock) -> None:
    for _ in range(MOST_UNKNOWN + 1):
        queues.on_recall(kept_token(new_token()) + KEY)
    assert len(queues.unknown) == 1
    first = granted(queues, clock)
    queues.release(first, clock())
    assert queues.on_recall(kept_token(new_token()) + KEY) is None and take(queues, clock) is not None


def test_a_recalled_lease_goes_round_once(queues: LocalQueues, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "now", clock)
    first = granted(queues, clock)
    clock.go(2 * LOCAL_SECONDS)
    one = joined(queues, "name", KEY, MS, False, None)
    two = joined(queues, "name", KEY, MS, False, None)
    one.keep_ms = two.keep_ms = round(KEEP * 1000)
    recall(queues, first)
    three = joined(queues, "name", KEY, MS, False, None)
    assert queues.release(first, clock()) == ReleaseRoute.LOCAL and one.lease is not None
    assert queues.release(one.lease, clock()) == ReleaseRoute.LOCAL and two.lease is not None
    assert queues.release(two.lease, clock()) == ReleaseRoute.SCRIPT and three.lease is None


def test_it_circulates_for_as_long_as_it_may_be_kept(queues: LocalQueues, clock: Clock) -> None:
    first = granted(queues, clock)
    clock.go(KEEP / 2)
    longer, shorter = (joined(queues, "name", KEY, MS, False, None) for _ in range(2))
    longer.keep_ms = round(KEEP * 1000)
    assert queues.release(first, clock()) == ReleaseRoute.LOCAL and longer.lease is not None
    assert queues.release(longer.lease, clock()) == ReleaseRoute.SCRIPT, "longer than the second asked for"
    assert shorter.lease is None and not queues.kept


@pytest.mark.parametrize("kept", [True, False])
def test_the_server_is_asked_now_and_then_whether_a_kept_lease_lasts(
    queues: LocalQueues, clock: Clock, kept: bool
) -> None:
    """Not by each waiter: its key may be gone, but who waits elsewhere recalls it. Of another lease nobody tells."""
    held = granted(queues, clock)
    waiter = joined(queues, "name", KEY, MS, False, None)
    queue = queues.by_key[KEY]
    clock.go(KEEP + 1 if not kept else RECHECK_SECONDS)
    for found, asks in (as_contended(held._raw_token), not kept), (None, True):
        assert queue.must_verify(waiter, clock())
        steps = Acquire("name", KEY, new_token(), MS, False)._verify_circulating(queue, clock)
        request = next(steps)
        request.sent = clock()
        with contextlib.suppress(StopIteration):
            steps.send(found)
        assert queue.must_verify(waiter, clock()) is (asks and found is not None)
        assert (queue.circulating is held) is (found is not None)
        clock.go(RECHECK_SECONDS)


@pytest.mark.parametrize("why", ["token", "extension", "deaf", "over", "late"])
def test_what_is_not_kept(queues: LocalQueues, clock: Clock, why: str) -> None:
    first = granted(queues, clock)
    first._token_read, first._extensions = why == "token", int(why == "extension")
    if why == "deaf":
        assert queues.recalls_heard(False) == []
    clock.go({"over": MOST / 1000, "late": KEEP}.get(why, 0.0))
    assert queues.release(first, clock()) == ReleaseRoute.DELETE and not queues.kept


def test_where_recalls_may_be_lost_nothing_is_kept(queues: LocalQueues, clock: Clock) -> None:
    first = granted(queues, clock)
    queues.release(first, clock())
    (left,) = queues.recalls_heard(False)
    assert left._raw_token == first._raw_token and take(queues, clock) is None
    queues.released(left)
    assert granted(queues, clock)._key not in queues.by_key, "nor is it while nobody hears"


def test_an_acquire_that_was_interrupted_is_forgotten(queues: LocalQueues, clock: Clock) -> None:
    first = granted(queues, clock)
    queues.forget_kept(KEY, kept_token(new_token()))
    assert queues.by_key
    queues.forget_kept(KEY, first._raw_token)
    assert not queues.by_key


@pytest.mark.parametrize("reply", [Exception("NOPERM"), "connection lost", None])
def test_a_subscription_that_fails_hears_nothing(reply: Any) -> None:
    queues = LocalQueues(contextlib.nullcontext())
    subscription = Subscription(queues, "server")
    subscription.set_result(reply)
    assert not queues.hears_recalls and not subscription.done()
    subscription.set_result([b"subscribe", queues.keep_channel, 1])
    assert queues.hears_recalls and queues.keep_channel.startswith(commands.KEEP_CHANNEL)


def test_a_queue_that_is_granted_by_an_entry_keeps_nothing(queues: LocalQueues, clock: Clock) -> None:
    first = granted(queues, clock)
    waiter = joined(queues, "name", KEY, MS, False, None)
    clock.go(MOST / 1000)
    assert queues.may_enter_now(waiter, clock())
    queue: Any = waiter.queue
    assert queue.judge(waiter, [1, 0, 0], clock(), clock()) is None and waiter.lease is not None
    assert queues.release(waiter.lease, clock()) == ReleaseRoute.DELETE and not queues.kept
    assert not first.valid
