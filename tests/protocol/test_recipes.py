"""What the helpers `once`, `refill` and `every` ask of the server, and what its replies mean; by canned replies."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
from support.run_steps import MINE, After, Clock, Raise, error, lost, run_steps

from fastlock import _errors as errors
from fastlock._limits import MAX_REPLY
from fastlock._protocol import commands, periods, values
from fastlock._protocol.lease import Lease
from fastlock._protocol.steps import Command, ProtocolViolation, RawCommands
from fastlock._protocol.values import Codec, Found, Kept

pytestmark = pytest.mark.usefixtures("impl")  # leases are compiled
KEY, LOCK = b"user:42", b"fastlock:load:{user:42}"
PERIOD, LEASE = 60_000, 30_000  # milliseconds
NOSCRIPT = "NOSCRIPT No matching script."
LOADED = [b"sha"] * len(commands.SCRIPTS)


def keep(clock: Clock, *answers: Any, version: bytes | None = None) -> Any:
    return run_steps(
        clock, values.keep(Lease("lock", LOCK, MINE, clock() + 60), KEY, b"1", 60_000, clock, version), *answers
    )


def claim(clock: Clock, *answers: Any, first: int = 0) -> Any:
    return run_steps(clock, periods.claim("job", b"job", MINE, LEASE, PERIOD, first, clock), *answers)


def test_keys_are_in_the_hash_slot_of_the_name() -> None:
    made = [values.result_key, values.load_key, values.version_key, periods.period_key]
    assert [key(b"a") for key in made] == [
        *(b"fastlock:once:{a}", b"fastlock:load:{a}", b"fastlock:version:{a}", b"fastlock:every:{a}"),
    ]
    assert {key(b"x{tag}y").count(b"{") for key in made} == {1}
    assert len({key(name) for key in made for name in (b"a", b"{a}")}) == 8


# --------------------------------------------------------------------------------------------------------- reading


def test_a_value_takes_one_command(clock: Clock) -> None:
    ran = run_steps(clock, values.read(KEY, clock), b"1")
    assert ran.outcome == b"1" and ran.kinds == [Command]
    assert run_steps(clock, values.read(KEY, clock), None).outcome is None


def test_a_value_is_asked_for_again_after_a_lost_reply(clock: Clock) -> None:
    for steps in (values.read(KEY, clock), values.find(KEY, clock)):
        answer: Any = b"1" if steps.__name__ == "read" else [b"1", 7]
        assert run_steps(clock, steps, lost(), answer).outcome in (b"1", Found(b"1", 7))


@pytest.mark.parametrize(
    ("replies", "found"),
    [
        ([b"1", 500], Found(b"1", 500)),
        ([b"1", -1], Found(b"1", -1)),
        ([None, -2], Found(None, -2)),
        ([b"1", -2], Found(None, -2)),  # it ended between the two commands
        ([b"1", 500, None], Found(b"1", 500, b"")),
        ([b"1", 500, b"3"], Found(b"1", 500, b"3")),
        ([None, -2, b"3"], Found(None, -2, b"3")),
    ],
)
def test_a_value_its_time_and_its_version(clock: Clock, replies: list[Any], found: Found) -> None:
    ran = run_steps(clock, values.find(KEY, clock, versioned=len(replies) == 3), replies)
    assert ran.outcome == found and len(ran.requests[0].calls) == len(replies)


def test_a_long_value_is_read_in_parts(clock: Clock) -> None:
    size = MAX_REPLY + 5
    parts = [b"OK", b"a" * MAX_REPLY, b"b" * 5, b"OK", []]
    ran = run_steps(clock, values.read(KEY, clock), b"", [size], parts)
    assert ran.outcome == b"a" * MAX_REPLY + b"b" * 5
    calls = ran.requests[-1].calls
    assert [call[0] for call in calls] == [b"WATCH", b"GETRANGE", b"GETRANGE", b"MULTI", b"EXEC"]
    assert calls[2] == (b"GETRANGE", KEY, b"%d" % MAX_REPLY, b"%d" % (2 * MAX_REPLY - 1))


@pytest.mark.parametrize("torn", [[b"OK", b"a" * 9, b"OK", None], [b"OK", b"a" * 8, b"OK", []]])
def test_a_long_value_that_is_replaced_meanwhile_is_read_again(clock: Clock, torn: list[Any]) -> None:
    whole = [b"OK", b"b" * 9, b"OK", []]
    assert run_steps(clock, values.read(KEY, clock), b"", [9], torn, [9], whole).outcome == b"b" * 9
    endless = run_steps(clock, values.read(KEY, clock), b"", *([9], torn) * values.MOST_READS)
    assert endless.outcome is None, "a value that never stands still counts as none"


def test_an_empty_value_is_one(clock: Clock) -> None:
    assert run_steps(clock, values.read(KEY, clock), b"", [0]).outcome == b""
    assert run_steps(clock, values.find(KEY, clock), [b"", 7], [0]).outcome == Found(b"", 7)


@pytest.mark.parametrize("odd", [[1, 7], [b"1"], [b"1", b"7"], [b"1", 7, None], b"1"])
def test_replies_that_make_no_sense_are_believed_by_nobody(clock: Clock, odd: Any) -> None:
    ran = run_steps(clock, values.find(KEY, clock), odd, lost(), [b"1", 7])
    assert ran.of(ProtocolViolation) and ran.outcome == Found(b"1", 7)


def test_an_error_reply_is_raised(clock: Clock) -> None:
    wrong = error("WRONGTYPE Operation against a key holding the wrong kind of value")
    ran = run_steps(clock, values.find(KEY, clock), [wrong, 7])
    assert isinstance(ran.raised, errors.ResponseError) and "WRONGTYPE" in str(ran.raised)
    loading = error("LOADING server is loading")
    assert run_steps(clock, values.find(KEY, clock), [loading, loading], [b"1", 7]).outcome == Found(b"1", 7)


# --------------------------------------------------------------------------------------------------------- keeping


@pytest.mark.parametrize(("reply", "kept"), [(1, Kept.KEPT), (0, Kept.LOST), (2, Kept.OUTDATED)])
def test_what_becomes_of_a_value(clock: Clock, reply: int, kept: Kept) -> None:
    ran = keep(clock, [reply], version=b"3")
    (call,) = ran.requests[0].calls
    assert ran.outcome is kept and call[2:6] == (b"3", LOCK, KEY, b"fastlock:version:{user:42}")
    assert call[6:] == (MINE, b"1", b"60000", b"3")
    assert keep(clock, [1]).requests[0].calls[0][2:] == (b"2", LOCK, KEY, MINE, b"1", b"60000", b"")


def test_a_script_that_the_server_forgot_is_loaded(clock: Clock) -> None:
    ran = keep(clock, [error(NOSCRIPT)], LOADED, [1])
    assert ran.outcome is Kept.KEPT and len(ran.requests) == 3


@pytest.mark.parametrize(("found", "kept"), [(b"1", Kept.KEPT), (b"2", Kept.LOST), (None, Kept.LOST)])
def test_a_value_whose_reply_was_lost_may_be_kept(clock: Clock, found: bytes | None, kept: Kept) -> None:
    """Sent again it finds the lock lost: what stands there tells whether it was kept before."""
    assert keep(clock, lost(), [0], found).outcome is kept
    assert keep(clock, lost(sent=False), [0]).outcome is Kept.LOST, "nothing was sent before"


# --------------------------------------------------------------------------------------------------------- periods


def test_a_claim_is_a_lease(clock: Clock) -> None:
    start = clock()
    ran = claim(clock, After(1, [[1, 20_000, 7]]))
    lease = ran.outcome.lease
    assert isinstance(lease, Lease) and lease.fence == 7 and lease._raw_token == MINE
    assert lease._deadline == start + 30 and ran.outcome.time == start + 20, "counted from before it was sent"
    (call,) = ran.requests[0].calls
    assert call[3:] == (
        *(b"job", b"fastlock:every:{job}", b"fastlock:fence:{job}"),
        *(MINE, b"30000", b"60000", b"%d" % commands.FENCE_KEPT_MS, b"0"),
    )


def test_who_does_not_claim_is_told_when_to_ask_again(clock: Clock) -> None:
    ran = claim(clock, [[0, 20_000, 0]])
    assert ran.outcome == periods.Claim(None, clock() + 20) and not ran.undos


def test_a_claim_whose_reply_is_lost_is_sent_again_by_the_same_token(clock: Clock) -> None:
    ran = claim(clock, lost(), [[1, 20_000, 7]])
    assert ran.outcome.lease is not None and not ran.undos
    assert ran.requests[0] is ran.requests[1]
    assert claim(clock, lost(), [error(NOSCRIPT)], LOADED, [[0, 5, 0]]).outcome.lease is None


def test_a_claim_that_came_too_late_is_run_by_nobody(clock: Clock) -> None:
    ran = claim(clock, After(30, [[1, 20_000, 7]]))
    assert ran.outcome.lease is None and [undo.tokens for undo in ran.undos] == [[MINE]]


@pytest.mark.parametrize("answers", [(lost(), lost(final=True)), (lost(), Raise(KeyboardInterrupt()))])
def test_a_claim_that_was_given_up_is_undone(clock: Clock, answers: Any) -> None:
    ran = claim(clock, *answers)
    assert ran.raised is not None and [undo.names for undo in ran.undos] == [[b"job"]]
    request = periods.ClaimPeriod(b"job", MINE, LEASE, PERIOD, 0)
    undo = request.undo()
    assert (undo.names, undo.tokens) == ([b"job"], [MINE]), "of one that is under way, as its task is cancelled"


@pytest.mark.parametrize("odd", [[[1, 2]], [[1, 2, b"3"]], [1], [[1, 2, 3], 4], b"x"])
def test_claims_that_make_no_sense_are_believed_by_nobody(clock: Clock, odd: Any) -> None:
    ran = claim(clock, odd, lost(), [[0, 5, 0]])
    assert ran.of(ProtocolViolation) and ran.outcome.lease is None


def test_a_period_is_skipped(clock: Clock) -> None:
    lease = Lease("job", b"job", MINE, clock() + 30)
    for claimed in (1, 0):
        ran = run_steps(clock, periods.skip(lease, PERIOD, clock), [[claimed, 20_000]])
        assert ran.outcome == clock() + 20 and ran.requests[0].calls[0][3:6] == (b"job", b"fastlock:every:{job}", MINE)


@pytest.mark.parametrize("problem", [lost(final=True), Raise(KeyboardInterrupt())])
def test_a_lock_is_not_handed_over_after_a_script_that_was_given_up(clock: Clock, problem: Any) -> None:
    """It may be executed later, and would count for the next holder, who has the same token."""
    lease = Lease("job", b"job", MINE, clock() + 30)
    for steps in (periods.skip(lease, PERIOD, clock), values.keep(lease, KEY, b"1", 60_000, clock)):
        lease._token_read = False
        assert run_steps(clock, steps, problem).raised is not None and lease._token_read
    lease._token_read = False
    assert run_steps(clock, values.keep(lease, KEY, b"1", 60_000, clock), [1]).outcome is Kept.KEPT
    assert not lease._token_read


def test_the_end_of_a_period_is_a_multiple_of_it(clock: Clock) -> None:
    for time, end in (([b"120", b"0"], 180_000), ([b"179", b"999999"], 180_000), ([b"60", b"1"], 120_000)):
        ran = run_steps(clock, periods.end_of_period(PERIOD, clock), [time])
        assert ran.outcome == end and type(ran.requests[0]) is RawCommands
    ran = run_steps(clock, periods.end_of_period(PERIOD, clock), [b"now"], lost(), [[b"60", b"1"]])
    assert ran.of(ProtocolViolation) and ran.outcome == 120_000
    refused = run_steps(clock, periods.end_of_period(PERIOD, clock), [error("NOPERM no permission")])
    assert isinstance(refused.raised, errors.ResponseError)


@pytest.mark.parametrize(("left", "wait"), [(-5, 0.001), (0, 0.001), (7, 7), (60, 60), (100, 60), (86_400, 43_200)])
def test_long_waits_are_checked_on_the_way(left: float, wait: float) -> None:
    assert periods.wait_before(1000 + left, 1000) == pytest.approx(wait)


# ---------------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("value", [None, True, 0, 1.5, "ä\n\ud800", [1, [2]], {"a": {"b": None}}])
def test_json_comes_back_as_it_was(value: Any) -> None:
    codec = Codec(None, None)
    assert codec.decode(codec.encode(value, "x"), "x") == (value,)
    assert json.loads(codec.encode(value, "x")) == value


@pytest.mark.parametrize("value", [{1}, object(), {(1, 2): 3}, b"x"])
def test_what_json_does_not_know_names_the_way_out(value: Any) -> None:
    with pytest.raises(TypeError, match=r"^the value of 'x' cannot be kept as JSON: .*dumps=pickle\.dumps"):
        Codec(None, None).encode(value, "x")
    pickled = Codec(pickle.dumps, pickle.loads)
    if type(value) is not object:
        assert pickled.decode(pickled.encode(value, "x"), "x") == (value,)


def test_an_error_of_dumps_itself_is_raised_with_a_note() -> None:
    with pytest.raises(ZeroDivisionError):
        Codec(lambda value: str(1 / 0), json.loads).encode(1, "x")
    with pytest.raises(ValueError, match="no") as raised:
        Codec(lambda value: "".join({}["x"]) if value else _refuse(), json.loads).encode(0, "x")
    assert "as the value of 'x' was to be kept" in raised.value.__notes__[0]


def _refuse() -> str:
    raise ValueError("no")


def test_what_cannot_be_read_counts_as_none(caplog: pytest.LogCaptureFixture) -> None:
    assert Codec(None, None).decode(b"\xff", "x") is None
    assert "what is kept for 'x' cannot be read" in caplog.records[0].message
