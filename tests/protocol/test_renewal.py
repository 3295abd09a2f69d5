"""Which leases are renewed and when, what the replies mean, and when a lease is told lost; by canned replies."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from typing import Any

import pytest
from support.run_steps import CONNECTION, Clock, error, lost

from fastlock._protocol import extension, renewal
from fastlock._protocol.lease import ENDED, Lease
from fastlock._protocol.renewal import Renewal, Renewals, RenewalSettings, settings_for
from fastlock._protocol.stats import Stats
from fastlock._protocol.steps import Answer, RawCommands, Sleep

pytestmark = pytest.mark.usefixtures("impl")  # leases are compiled
TOKEN = b"fl:" + b"t" * 32


class Client:
    """The transport of a client, as renewals know it, and its leases by hand."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.stats = Stats()
        self.renewals = Renewals(self.stats)
        self.told: list[Renewal] = []
        self.woken: list[float] = []  # the times at which it was to look

    def tell_lost(self, renewal: Renewal) -> None:
        self.told.append(renewal)

    def wake_renewal(self, time: float) -> None:
        self.woken.append(time)

    def new_event(self, renewal: Renewal) -> Any:
        raise NotImplementedError

    def lease(
        self, name: str = "a", seconds: float = 30, gone: Callable[[], bool] | None = None, **settings: Any
    ) -> Lease:
        lease = Lease(name, name.encode(), TOKEN, self.clock() + seconds)
        ends = gone or (lambda: False)
        lease._renewal = Renewal(lease, int(seconds * 1000), RenewalSettings(**settings), ends, self, self.clock())
        lease._renewal.part = renewal.DUE_PART  # without jitter
        self.renewals.add(lease._renewal)
        return lease

    def due(self) -> list[Any]:
        return [each.lease().name for each in self.take()]

    def take(self) -> list[Renewal]:
        self.taken = self.renewals.take_due(self.clock())
        return self.taken

    def start(self) -> Any:
        """The steps of a renewal of what was taken, and its request."""
        steps = self.renewals.renew(self.taken, math.inf, self.clock)
        request = next(steps)
        assert isinstance(request, RawCommands)
        request.sent, request.connection = self.clock(), CONNECTION
        return steps, request

    def renew(self, *replies: Any) -> None:
        """Renew what was taken; the server replies so."""
        steps, _ = self.start()
        with pytest.raises(StopIteration):
            steps.send(list(replies))


@pytest.fixture
def client(clock: Clock) -> Client:
    return Client(clock)


def test_a_lease_is_due_after_a_third_of_its_time(client: Client, clock: Clock) -> None:
    lease = client.lease()
    assert client.due() == [] and client.renewals.wake_time() == pytest.approx(clock() + 10)
    clock.go(9.99)
    assert client.due() == []
    clock.go(0.01)
    assert client.due() == ["a"]
    clock.go(0.5)
    client.renew([1])
    assert lease.remaining == pytest.approx(30) and lease._extensions == 0
    assert clock() + 10 - 1.01 <= client.renewals.wake_time() + 0.5 and client.renewals.stats.renewals == 1


def test_a_try_leaves_time_for_another(client: Client, clock: Clock) -> None:
    """A second at most, and half of what is left of the lease that ends first."""
    renewals, start, leases = client.renewals, clock(), [client.lease("a")]
    client.take()
    assert renewals.attempt_end(start) == start + 1
    clock.go(28)
    assert renewals.attempt_end(clock()) == pytest.approx(clock() + 0.5)  # it counts as lost a second before its end
    leases.append(client.lease("b"))
    (due,) = client.take()
    assert due.lease().name == "a" and renewals.attempt_end(clock(), [due]) == pytest.approx(clock() + 0.5)
    clock.go(0.99)
    assert renewals.attempt_end(clock(), [due]) == pytest.approx(clock() + 0.01), "the loss is told in time"
    clock.go(-0.02)
    assert renewals.attempt_end(clock(), [due]) == pytest.approx(clock() + 0.02), "a try is given some time"


@pytest.mark.parametrize(("seconds", "margin"), [(0.1, 0.01), (1, 0.1), (2, 0.2), (5, 0.2), (6, 0.2), (30, 1)])
def test_a_loss_is_told_before_the_end_of_the_lease(
    client: Client, clock: Clock, seconds: float, margin: float
) -> None:
    lease = client.lease(seconds=seconds, gone=lambda: True)
    client.take()
    assert client.renewals.wake_time() == pytest.approx(clock() + seconds - margin)
    clock.go(seconds - margin * 1.01)
    assert not client.due() and not client.told and lease.valid
    clock.go(margin * 0.02)
    assert not client.due() and len(client.told) == 1 and not lease.valid


def test_leases_that_are_due_soon_are_renewed_along(client: Client, clock: Clock) -> None:
    leases = [client.lease("a")]
    for name, pause in (("b", 0.9), ("c", 0.2)):
        clock.go(pause)
        leases.append(client.lease(name))
    clock.go(10 - 1.1)
    assert client.due() == ["a", "b"]
    client.renew([1, 1])
    clock.go(1.1)
    assert client.due() == ["c"]


def test_many_leases_are_renewed_by_scripts_of_128(client: Client, clock: Clock) -> None:
    leases = [client.lease(f"n{i}") for i in range(300)]
    clock.go(10)
    assert len(client.take()) == 300
    steps, request = client.start()
    assert [int(call[2]) for call in request.calls] == [128, 128, 44]
    assert {len(call) for call in request.calls} == {3 + 3 * 128, 3 + 3 * 44}
    with pytest.raises(StopIteration):
        steps.send([[1] * 128, [1] * 127 + [0], [2] * 44])
    (gone,) = client.told
    assert gone.lease().name == "n255" and gone.lost
    assert {lease._contended for lease in leases[256:]} == {True} and not any(
        lease._contended for lease in leases[:256]
    )
    assert client.renewals.stats.renewals == 299 and client.renewals.stats.losses == 1


def test_a_lease_is_lost_when_it_ends_before_a_renewal_is_answered(client: Client, clock: Clock) -> None:
    lease = client.lease()
    clock.go(10)
    client.take()
    steps, _ = client.start()
    assert client.renewals.wake_time() == pytest.approx(lease._deadline - 1)
    clock.go(19)
    assert client.due() == [] and client.told == [lease._renewal] and not lease.valid
    with pytest.raises(StopIteration):
        steps.send([[1]])
    assert not lease.valid, "it has been told lost, and does not come back"
    assert client.due() == [] and client.renewals.wake_time() == math.inf and len(client.told) == 1


def test_what_was_not_answered_is_sent_again_until_the_lease_ends(client: Client, clock: Clock) -> None:
    lease, tries = client.lease(), 0
    while not client.told:
        clock.go(max(0.0, client.renewals.wake_time() - clock()) if tries else 10)
        if client.due():
            tries += 1
            steps, _ = client.start()
            with pytest.raises(StopIteration):
                steps.send(Answer.DEADLINE_EXCEEDED)
            assert lease._token_read, "a late renewal must not hit the next holder"
    assert tries > 15 and clock() == pytest.approx(1000 + 29) and lease._renewal.lost and not lease.valid


def test_a_broken_connection_is_no_loss(client: Client, clock: Clock) -> None:
    lease = client.lease()
    clock.go(10)
    client.take()
    steps, request = client.start()
    session = object()
    assert isinstance(steps.send(lost(session=session)), Sleep)
    assert steps.send(None) is request and request.stale == (session,), "the broken session is ended first"
    clock.go(1)
    request.sent = clock()
    with pytest.raises(StopIteration):
        steps.send([[1]])
    assert lease.remaining == pytest.approx(30) and not client.told


def test_a_server_that_cannot_write_now_is_asked_again(client: Client, clock: Clock) -> None:
    lease = client.lease()
    clock.go(10)
    client.take()
    client.renew(error("READONLY You can't write against a read only replica."))
    assert not client.told and lease.valid and client.renewals.wake_time() < clock() + 0.05


def test_an_extension_that_was_interrupted_does_not_overtake_a_renewal(client: Client, clock: Clock) -> None:
    """The session in which it may be in flight is ended first, unless the renewal goes over the same connection."""
    lease: Any = client.lease()
    lease._stale_sessions = ("one",)
    clock.go(11)
    client.take()
    steps, request = client.start()
    assert request.stale == ("one",)
    lease._stale_sessions += ("two",)  # meanwhile
    with pytest.raises(StopIteration):
        steps.send([[1]])
    assert lease._stale_sessions == ("two",) and lease.remaining == pytest.approx(30)
    clock.go(11)
    client.take()
    steps, request = client.start()
    steps.close()  # not answered
    assert "two" in request.stale and "two" in lease._stale_sessions


@pytest.mark.parametrize("how", ["releasing", "released", "dropped", "collected"])
def test_a_lease_that_is_not_held_is_not_renewed(client: Client, clock: Clock, how: str) -> None:
    lease: Any = client.lease()
    assert client.due() == []
    if how == "releasing":
        lease._releasing = True
    elif how == "released":
        lease._end()
    elif how == "dropped":
        lease._renewal.end()
    else:
        del lease
        gc.collect()
    clock.go(31)
    assert client.due() == [] and not client.told and client.renewals.wake_time() == math.inf


def test_a_lease_released_before_anybody_looked_is_forgotten(client: Client) -> None:
    for _ in range(100):
        client.lease()._end()
    assert not client.renewals.added and not client.renewals.heap


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_lease_released_as_its_renewal_begins_is_left_alone(client: Client, clock: Clock, when: str) -> None:
    """Its token may be the next holder's, to whom it was handed over."""
    lease = client.lease()
    clock.go(10)
    client.take()
    if when == "before":
        lease._deadline = ENDED
        with pytest.raises(StopIteration):
            next(client.renewals.renew(client.taken, math.inf, clock))
    else:
        steps, _ = client.start()
        assert lease._extensions == 1, "so long it is not handed over"
        lease._deadline, lease._releasing = ENDED, True
        with pytest.raises(StopIteration):
            steps.send([[0]])
    assert lease._deadline == ENDED and not client.told and lease._extensions == 0


def test_max_hold_ends_renewal(client: Client, clock: Clock) -> None:
    lease, renewed = client.lease(max_hold=25), 0
    while not client.told:
        clock.go(client.renewals.wake_time() - clock() if renewed else 10)
        if client.due():
            renewed += 1
            client.renew([1])
    assert renewed == 2 and not lease.valid and 47 < clock() - 1000 < 50


def test_an_owner_that_has_ended_ends_renewal(client: Client, clock: Clock) -> None:
    ended: list[bool] = []
    lease = client.lease(gone=lambda: bool(ended))
    clock.go(10)
    assert client.due() == ["a"]
    client.renew([1])
    ended.append(True)
    clock.go(10)
    assert client.due() == [] and lease.valid
    clock.go(20)
    assert client.due() == [] and client.told == [lease._renewal]


def test_an_extension_by_the_caller_puts_off_the_renewal(client: Client, clock: Clock) -> None:
    lease = client.lease()
    lease._deadline = clock() + 100
    clock.go(10)
    assert client.due() == [] and client.renewals.wake_time() == pytest.approx(clock() + 90 - 20)


def test_of_a_renewal_and_an_extension_at_once_the_earlier_end_holds(client: Client, clock: Clock) -> None:
    lease = client.lease()
    clock.go(10)
    client.take()
    steps, _ = client.start()
    extending = extension.extend(lease, 100_000, True, clock)
    request = next(extending)
    request.sent = clock()
    with pytest.raises(StopIteration):
        extending.send(b"OK")
    with pytest.raises(StopIteration):
        steps.send([[1]])
    assert lease.remaining == pytest.approx(20), "nobody knows which was executed last"


def test_a_renewal_in_vain_is_not_repeated_at_once(client: Client, clock: Clock) -> None:
    """Until an extension is answered, a renewal does not count."""
    lease = client.lease()
    clock.go(10)
    extending = extension.extend(lease, 100_000, True, clock)
    next(extending).sent = clock()
    for tries in range(1, 6):
        assert client.due() == ["a"]
        client.renew([1])
        assert lease.remaining < 21 and lease._renewal.failures == tries
        assert client.renewals.wake_time() > clock() and client.due() == []
        clock.go(client.renewals.wake_time() - clock())
    extending.close()
    assert client.due() == ["a"]
    client.renew([1])
    assert lease.remaining == pytest.approx(30) and lease._renewal.failures == 0


def test_a_renewal_that_failed_is_not_tried_again_where_its_lease_was_extended(client: Client, clock: Clock) -> None:
    """It would end the lease earlier, before its reply says so."""
    lease = client.lease()
    clock.go(10)
    client.take()
    steps, _ = client.start()
    with pytest.raises(StopIteration):
        steps.send(Answer.DEADLINE_EXCEEDED)
    lease._deadline = clock() + 100
    clock.go(1)
    assert client.due() == [] and client.renewals.wake_time() == pytest.approx(clock() - 1 + 100 - 20, abs=1.1)


@pytest.mark.parametrize("seconds", [0.5, 5])
def test_an_extension_to_an_earlier_end_is_renewed_in_time(client: Client, clock: Clock, seconds: float) -> None:
    lease = client.lease()
    clock.go(1)
    assert client.due() == []
    extending = extension.extend(lease, int(seconds * 1000), True, clock)
    next(extending).sent = clock()
    assert client.woken == [pytest.approx(clock() + seconds - 20, abs=2.1)]
    with pytest.raises(StopIteration):
        extending.send(b"OK")
    assert lease.remaining == seconds and not lease._renewal.is_lost()
    assert client.due() == ["a"]
    client.renew([1])
    assert lease.remaining == pytest.approx(30) and not client.told


def test_a_lease_that_was_told_lost_is_not_extended(client: Client, clock: Clock) -> None:
    """Also where the extension was on its way as that was told."""
    lease = client.lease()
    client.due()
    clock.go(28)
    extending = extension.extend(lease, 60_000, True, clock)
    next(extending).sent = clock()
    clock.go(1.5)
    assert client.due() == [] and client.told == [lease._renewal]
    with pytest.raises(StopIteration) as end:
        extending.send(b"OK")
    assert end.value.value is extension.Outcome.GONE and not lease.valid
    with pytest.raises(StopIteration) as end:
        next(extension.extend(lease, 60_000, True, clock))
    assert end.value.value is extension.Outcome.GONE and not lease.valid


def test_the_loss_of_a_lease_that_was_granted_late_is_told_in_time_once_it_was_renewed(
    client: Client, clock: Clock
) -> None:
    lease = Lease("a", b"a", TOKEN, clock() + 3)
    lease._renewal = late = Renewal(lease, 30_000, RenewalSettings(), lambda: False, client, clock())
    client.renewals.add(late)
    assert late.margin == pytest.approx(0.2) and client.due() == ["a"]
    client.renew([1])
    clock.go(29.1)
    assert client.due() == [] and client.told == [late]


def test_a_user_that_may_not_run_the_script_renews_by_single_commands(client: Client, clock: Clock) -> None:
    leases = [client.lease("a"), client.lease("b")]
    clock.go(10)
    client.take()
    steps, _ = client.start()
    extend = steps.send([error("NOPERM User u has no permissions to run the 'evalsha' command")])
    for last, lease in enumerate(leases):
        assert (extend.key, extend.token, extend.ms) == (lease._key, TOKEN, 30_000)
        extend.sent = clock()
        if not last:
            extend = steps.send(b"OK")
    with pytest.raises(StopIteration):
        steps.send(b"OK")
    assert [lease.remaining for lease in leases] == pytest.approx([30, 30])


def test_a_signal_handlers_error_is_raised_and_the_lease_goes_on(client: Client, clock: Clock) -> None:
    lease = client.lease()
    clock.go(10)
    client.take()
    steps, _ = client.start()
    with pytest.raises(KeyboardInterrupt):
        steps.throw(KeyboardInterrupt())
    assert lease._extensions == 0 and client.renewals.wake_time() <= clock() + 0.001


@pytest.mark.parametrize(
    "keywords",
    [
        {"timeout": None},
        {"timeout": 0.099},
        {"timeout": True},
        {"timeout": math.nan},
        {"max_hold": 0},
        {"max_hold": -1},
        {"max_hold": "1"},
        {"on_lost": "print"},
        {"auto_renew": False, "max_hold": 5},
        {"auto_renew": False, "on_lost": print},
        {"auto_renew": False, "cancel_on_loss": True},
    ],
    ids=repr,
)
def test_settings_that_make_no_sense_are_named(keywords: dict[str, Any]) -> None:
    given = {"auto_renew": True, "timeout": 30, "max_hold": None, "on_lost": None, "cancel_on_loss": False, **keywords}
    name = next(iter(name for name in keywords if name != "auto_renew"))
    with pytest.raises((ValueError, TypeError), match=f"^{name} "):
        settings_for(*given.values())


@pytest.mark.parametrize("ended", ["max_hold", "owner"])
def test_what_is_not_renewed_any_more_is_not_renewed_along_with_another(
    client: Client, clock: Clock, ended: str
) -> None:
    """Also where it is about to be lost as another one is due."""
    gone = [False]
    more: dict[str, Any] = {"max_hold": 1.5} if ended == "max_hold" else {}
    held = [client.lease("mine", 3, gone=lambda: gone[0], **more), client.lease("other", 8.6)]
    clock.go(1.0)
    assert client.due() == ["mine"]
    client.renew([1])
    gone[0] = ended == "owner"
    clock.go(2.87)  # the other one is due, and this one lost within its early time
    assert client.due() == ["other"]
    client.renew([1])
    clock.go(0.1)
    assert client.due() == [] and [each.lease() for each in client.told] == held[:1]


def test_a_loss_that_its_holder_finds_is_counted_and_logged_once(
    client: Client, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    lease = client.lease()
    clock.go(40)
    assert lease._renewal.is_lost() and client.due() == []
    assert client.stats.losses == 1 and len(caplog.records) == 1
