"""Operations by canned replies: what each one sends, and what it makes of every answer. No I/O, a clock by hand.

How an acquire waits: test_acquire_waiting.py. The same operations against a server that loses, delays and reorders at
random: test_operations_model.py.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import pytest
from redis import exceptions
from support.run_steps import (
    CONTENDED,
    GIVEN,
    MINE,
    OTHER,
    After,
    Clock,
    Raise,
    Ran,
    acquire,
    error,
    joined,
    lease_of,
    lost,
    opcodes,
    run_steps,
    undone,
)

from fastlock import _errors as errors
from fastlock._protocol import commands, extension, steps
from fastlock._protocol.acquire import Acquire, PlainAcquire
from fastlock._protocol.batch_operations import AcquireMany
from fastlock._protocol.commands import Opcode
from fastlock._protocol.extension import Outcome
from fastlock._protocol.handshake import Session
from fastlock._protocol.lease import ENDED, Lease
from fastlock._protocol.release import PlainRelease, Release
from fastlock._protocol.retry import RetryState, get_session
from fastlock._protocol.stats import Stats
from fastlock._protocol.steps import Answer
from fastlock._protocol.undo import RELOADS, Undo

pytestmark = pytest.mark.usefixtures("impl")  # leases are compiled


# ------------------------------------------------------------------------------------------------------------- acquire


def test_a_lease_counts_from_the_time_its_command_was_sent(clock: Clock) -> None:
    sent = clock()
    ran = run_steps(clock, acquire(), After(3.0, None))
    assert ran.outcome._deadline == sent + 10
    assert (ran.outcome.name, ran.outcome._key, ran.outcome.token) == ("name", b"name", MINE)
    assert ran.outcome.remaining == 7
    assert [type(step) for step in ran.steps] == [PlainAcquire]


def test_a_lease_without_end_has_no_deadline(clock: Clock) -> None:
    ran = run_steps(clock, acquire(ms=0), After(1e9, None))
    assert ran.outcome._deadline == math.inf
    assert opcodes(ran) == [Opcode.ACQUIRE_ENDLESS]


@pytest.mark.parametrize("holder", [OTHER, MINE, b""])
def test_a_held_name_is_not_granted(clock: Clock, holder: bytes) -> None:
    """Its own token, where no reply was lost, is somebody else's use of the same token."""
    ran = run_steps(clock, acquire(), holder)
    assert (ran.outcome, ran.raised, ran.undos, len(ran.requests)) == (None, None, [], 1)


def test_a_grant_that_comes_after_its_lease_is_released_before_the_retry(clock: Clock) -> None:
    ran = run_steps(clock, acquire(ms=50, blocking=True), After(0.06, None), 1, None)
    assert opcodes(ran) == [Opcode.ACQUIRE, Opcode.RELEASE, Opcode.ACQUIRE]
    assert ran.outcome._deadline == clock() + 0.05
    ran = run_steps(clock, acquire(ms=50), After(0.05, None), 1)
    assert (ran.outcome, opcodes(ran)) == (None, [Opcode.ACQUIRE, Opcode.RELEASE])


@pytest.mark.parametrize("reply", [0, 1])
def test_a_grant_that_comes_after_its_lease_is_handed_over_to_a_waiter(clock: Clock, reply: int) -> None:
    ran = run_steps(clock, acquire(ms=50, blocking=True), After(0.06, None), 0, [reply], None)
    assert ran.requests[2].calls == [commands.hand_over(b"name", MINE)] and type(ran.requests[1]) is PlainRelease
    assert ran.outcome._deadline == clock() + 0.05 and ran.undos == []


@pytest.mark.parametrize("problem", [lost(final=True), lost(sent=False, final=True), error("ERR"), Raise(SystemExit())])
def test_a_late_grant_that_cannot_be_released_leaves_an_undo(clock: Clock, problem: Any) -> None:
    ran = run_steps(clock, acquire(ms=50), After(0.06, None), problem)
    assert ran.raised is not None
    assert [undone(undo) for undo in ran.undos] == [([b"name"], [MINE])]


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("fenced", [False, True])
def test_after_a_late_grant_the_next_try_has_another_token(clock: Clock, given: bool, fenced: bool) -> None:
    """The release of the first may still be on its way, or its SET, where a broken connection may not be ended."""
    tokens: list[bytes] = []

    def note(seconds: float) -> Any:
        def answer(request: Any) -> Any:
            tokens.append(request.calls[0][5] if fenced else request.token)
            return After(seconds, [[None, 7]] if fenced else None)

        return answer

    op = acquire(ms=50, fenced=fenced, blocking=True, polls=True, given=given)
    ran = run_steps(clock, op, lost(), note(0.06), lost(), 1, note(0.0))
    assert tokens[0] == MINE and (tokens[1] == MINE) is given and ran.outcome.token == op.token == tokens[1]
    assert ran.undos == [] and commands.can_be_contended(op.token)


def test_an_answer_of_deadline_exceeded_gives_no_lease(clock: Clock) -> None:
    op = acquire(blocking=True, until=clock() + 1)
    ran = run_steps(clock, op, After(1.0, Answer.DEADLINE_EXCEEDED))
    assert (ran.outcome, ran.undos, ran.raised) == (None, [], None)  # the transport undoes what it gave up on


def test_after_a_lost_reply_a_grant_counts_from_the_second_send(clock: Clock) -> None:
    ran = run_steps(clock, acquire(), After(2.0, lost(session="one")), After(1.0, None))
    assert ran.outcome._deadline == clock() - 1 + 10
    assert ran.stales == [(), ("one",)]
    assert ran.undos == []


def test_after_a_lost_reply_the_own_token_is_extended(clock: Clock) -> None:
    ran = run_steps(clock, acquire(), After(2.0, lost(session="one")), After(3.0, MINE), After(1.0, b"OK"))
    assert opcodes(ran) == [Opcode.ACQUIRE, Opcode.ACQUIRE, Opcode.EXTEND]
    assert (ran.requests[2].key, ran.requests[2].token, ran.requests[2].ms) == (b"name", MINE, 10_000)
    assert ran.outcome._deadline == clock() - 1 + 10
    assert ran.undos == []


@pytest.mark.parametrize("replies", [[None, 0], [0]], ids=["native", "script"])
def test_after_a_lost_reply_the_own_token_that_cannot_be_extended_is_not_held(clock: Clock, replies: Any) -> None:
    ran = run_steps(clock, acquire(), lost(), MINE, *replies)
    assert ran.outcome is None


def test_after_a_lost_reply_the_own_token_is_known_though_it_is_contended(clock: Clock) -> None:
    ran = run_steps(clock, acquire(), lost(session="one"), CONTENDED, None, After(1.0, 1))
    assert opcodes(ran)[2:] == [Opcode.EXTEND_SCRIPT] * 2 and ran.outcome._deadline == clock() - 1 + 10
    assert ran.outcome.token == MINE and ran.undos == []
    assert run_steps(clock, acquire(fenced=True), lost(), [[CONTENDED, 79]], None, 1).outcome.fence == 79
    assert run_steps(clock, acquire(), CONTENDED).outcome is None
    op = acquire()
    op.token = GIVEN
    assert run_steps(clock, op, lost(), b"fl+" + GIVEN[3:]).outcome is None, "a given token is never contended"


def test_a_lease_without_end_needs_no_extension_after_a_lost_reply(clock: Clock) -> None:
    ran = run_steps(clock, acquire(ms=0), lost(), MINE)
    assert ran.outcome._deadline == math.inf


def test_after_a_lost_reply_another_holder_does_not_make_the_outcome_known(clock: Clock) -> None:
    """The lost command may still be executed, where the server would not end the connection: an undo is left."""
    ran = run_steps(clock, acquire(), lost(), OTHER)
    assert ran.outcome is None
    assert [undone(undo) for undo in ran.undos] == [([b"name"], [MINE])]


def test_a_command_that_was_not_sent_leaves_no_outcome_unknown(clock: Clock) -> None:
    ran = run_steps(clock, acquire(), lost(sent=False), MINE)
    assert (ran.outcome, ran.undos) == (None, [])
    ran = run_steps(clock, acquire(), lost(sent=False, final=True))
    assert isinstance(ran.raised, errors.ConnectionError)
    assert ran.undos == []


def test_giving_up_with_the_outcome_unknown_leaves_an_undo(clock: Clock) -> None:
    ran = run_steps(clock, acquire(), lost(session="one"), lost(session="two"), After(6.0, lost(sent=False)))
    assert isinstance(ran.raised, errors.ConnectionError)
    assert [undone(undo) for undo in ran.undos] == [([b"name"], [MINE])]
    assert set(ran.undos[0].stale) >= {"one", "two"}
    assert ran.stales[2] == ("one", "two")
    assert all(pause >= 0 for pause in ran.sleeps)


@pytest.mark.parametrize("gone", [KeyboardInterrupt(), SystemExit(), ValueError("cancelled")])
def test_an_interrupt_with_the_outcome_unknown_leaves_an_undo(clock: Clock, gone: BaseException) -> None:
    ran = run_steps(clock, acquire(), lost(session="one"), Raise(gone))
    assert ran.raised is gone
    assert [(undone(undo), undo.stale) for undo in ran.undos] == [(([b"name"], [MINE]), ("one",))]


def test_running_out_of_time_with_the_outcome_unknown_leaves_an_undo(clock: Clock) -> None:
    op = acquire(blocking=True, until=clock() + 1)
    ran = run_steps(clock, op, After(1.5, lost(session="one")))
    assert ran.outcome is None
    assert isinstance(ran.raised, errors.ConnectionError)  # and not None: no reply said that another holds it
    assert [undo.stale for undo in ran.undos] == [("one",)]
    op = acquire(blocking=True, until=clock() + 1)
    ran = run_steps(clock, op, lost(session="one"), After(2.0, Answer.DEADLINE_EXCEEDED))
    assert ran.outcome is None
    assert len(ran.undos) == 1


def test_an_error_after_a_lost_reply_leaves_an_undo(clock: Clock) -> None:
    ran = run_steps(clock, acquire(), lost(), error("READONLY You can't write against a read only replica."))
    assert isinstance(ran.raised, errors.from_reply(error("READONLY x")).__class__)
    assert len(ran.undos) == 1


def test_an_extension_that_is_given_up_leaves_an_undo(clock: Clock) -> None:
    ran = run_steps(clock, acquire(), lost(), MINE, lost(final=True, session="two"))
    assert isinstance(ran.raised, errors.ConnectionError)
    assert [undone(undo) for undo in ran.undos] == [([b"name"], [MINE])]


# ---------------------------------------------------------------------------------------------------- errors and shapes


def test_forgotten_scripts_are_loaded_and_the_command_sent_again(clock: Clock) -> None:
    ran = run_steps(clock, acquire(), error("NOSCRIPT No matching script."), [b"sha"] * 7, None)
    assert ran.outcome is not None
    assert ran.requests[1].calls == [script.load for script in commands.SCRIPTS]
    assert opcodes(ran)[0] == opcodes(ran)[2]


def test_scripts_that_do_not_stay_are_loaded_a_few_times_only(clock: Clock) -> None:
    again = [error("NOSCRIPT No matching script."), [b"sha"] * 7]
    ran = run_steps(clock, acquire(), *again * RELOADS, error("NOSCRIPT No matching script."))
    assert isinstance(ran.raised, errors.ResponseError)
    assert len(ran.requests) == 1 + 2 * RELOADS


def test_a_refusal_to_load_scripts_is_raised(clock: Clock) -> None:
    ran = run_steps(clock, acquire(), error("NOSCRIPT x"), [error("NOPERM this user has no permissions")])
    assert isinstance(ran.raised, errors.from_reply(error("NOPERM x")).__class__)


def test_a_connection_that_breaks_while_scripts_are_loaded_is_retried_too(clock: Clock) -> None:
    ran = run_steps(clock, acquire(), error("NOSCRIPT x"), lost(), error("NOSCRIPT x"), [b"sha"] * 7, None)
    assert ran.outcome is not None


@pytest.mark.parametrize("text", ["ERR unknown command 'X', with args", "ERR syntax error", "NOPERM no permissions"])
@pytest.mark.parametrize("opcode", sorted(commands.SCRIPTED))
def test_a_refused_native_command_is_replaced_by_a_script(clock: Clock, opcode: int, text: str) -> None:
    operation: Any = {
        Opcode.ACQUIRE: lambda: acquire(),
        Opcode.ACQUIRE_ENDLESS: lambda: acquire(ms=0),
        Opcode.RELEASE: lambda: Release(lease_of(clock)),
        Opcode.EXTEND: lambda: extension.set_expiry(b"name", MINE, 5, clock),
    }[opcode]()
    reply = None if opcode in (Opcode.ACQUIRE, Opcode.ACQUIRE_ENDLESS) else 1
    sent: list[int] = []

    def note(answer: Any) -> Any:
        return lambda request: sent.append(request.opcode) or answer

    ran = run_steps(clock, operation, note(error(text)), note(reply))
    assert ran.raised is None
    assert ran.outcome
    assert sent == [opcode, commands.SCRIPTED[opcode]]


def test_a_server_without_memory_extends_by_script(clock: Clock) -> None:
    ran = run_steps(clock, extension.set_expiry(b"n", MINE, 5, clock), error("OOM command not allowed"), After(1, 1))
    assert ran.outcome == clock() - 1
    assert opcodes(ran) == [Opcode.EXTEND_SCRIPT] * 2  # one object, sent twice
    ran = run_steps(clock, acquire(), error("OOM command not allowed when used memory > 'maxmemory'."))
    assert isinstance(ran.raised, errors.ResponseError)


@pytest.mark.parametrize("text", ["ERR something else", "MISCONF x", "", "WRONGTYPE x", "MOVED 1"])
def test_an_error_without_a_remedy_is_raised_at_once(clock: Clock, text: str) -> None:
    ran = run_steps(clock, acquire(), error(text))
    assert isinstance(ran.raised, errors.RedisError)
    assert (len(ran.requests), ran.undos) == (1, [])


TEMPORARY = {
    "LOADING Redis is loading the dataset in memory": exceptions.BusyLoadingError,
    "MASTERDOWN Link with MASTER is down": exceptions.MasterDownError,
    "TRYAGAIN Multiple keys request during rehashing of slot": exceptions.TryAgainError,
    "CLUSTERDOWN The cluster is down": exceptions.ClusterDownError,
}
OPERATIONS: dict[str, tuple[Callable[[Clock], Any], list[Any]]] = {  # with the replies at last
    "acquire": (lambda clock: acquire(), [None]),
    "acquire, in the queue": (lambda clock: acquire(blocking=True, alone=True), [[[1, 0, 0]]]),
    "acquire with a fence": (lambda clock: Acquire("name", b"name", MINE, 10_000, fenced=True), [[[None, 7]]]),
    "release": (lambda clock: Release(lease_of(clock)), [1]),
    "extend": (lambda clock: extension.set_expiry(b"name", MINE, 5, clock), [1]),
    "inspect": (lambda clock: extension.inspect(Opcode.EXISTS, b"name", clock), [1]),
}


@pytest.mark.parametrize("text", TEMPORARY)
@pytest.mark.parametrize("what", OPERATIONS)
def test_a_server_that_is_loading_or_failing_over_is_waited_for(clock: Clock, what: str, text: str) -> None:
    """Nothing was executed: no outcome is unknown, there is nothing to undo. As long as for a server that is away."""
    make, last = OPERATIONS[what]
    refused = error(text) if not isinstance(last[0], list) else [error(text)]
    start = clock()
    ran = run_steps(clock, make(clock), *[refused] * 9, *last)
    assert ran.raised is None and ran.outcome and len(ran.requests) == 10
    assert ran.undos == [] and clock() - start == pytest.approx(sum(ran.sleeps)) and 0 < clock() - start < 5
    ran = run_steps(clock, make(clock), refused, ...)
    assert type(ran.raised) is TEMPORARY[text] and ran.undos == []
    assert len(ran.requests) > 5 and max(ran.sleeps) < 1


def test_scripts_are_loaded_when_the_server_has_loaded_its_data(clock: Clock) -> None:
    loading = error(next(iter(TEMPORARY)))
    ran = run_steps(
        clock, acquire(blocking=True, alone=True), [error("NOSCRIPT x")], [loading] * 8, [loading], [[1, 0, 0]]
    )
    assert ran.outcome is not None and ran.raised is None


@pytest.mark.parametrize("reply", [0, 1, True, False, 1.5, [], {}, [None], "OK", (None,)])
def test_a_reply_of_the_wrong_shape_is_never_a_grant(clock: Clock, reply: Any) -> None:
    ran = run_steps(clock, acquire(), reply, None)
    assert ran.outcome is not None  # sent again over another connection
    assert [(type(step.request), step.reply) for step in ran.of(steps.ProtocolViolation)] == [(PlainAcquire, reply)]
    assert ran.stales[1] == ("distrusted",)
    ran = run_steps(clock, acquire(), reply, reply)
    assert isinstance(ran.raised, errors.InvalidResponse)
    assert len(ran.undos) == 1
    ran = run_steps(clock, acquire(), reply, MINE, 1)
    assert ran.outcome is not None


WRONG: list[tuple[Any, list[Any]]] = [
    (lambda clock: Release(lease_of(clock)), [None, b"OK", b"1", [1], 1.5, {}]),
    (lambda clock: extension.set_expiry(b"n", MINE, 5, clock), [[1], 1.5, {}, "OK"]),
    (lambda clock: extension.inspect(Opcode.PTTL, b"n", clock), [None, b"5", [], 1.5, True]),
    (lambda clock: extension.inspect(Opcode.EXISTS, b"n", clock), [None, b"1", [], False]),
    (lambda clock: extension.inspect(Opcode.GET, b"n", clock), [1, [], {}, False]),
    (lambda clock: acquire(fenced=True), [[None, None], [[None, b"1"]], [[None]], [[]], [[[None, 1]]], None, b"x", []]),
]


@pytest.mark.parametrize(("made", "replies"), WRONG, ids=["release", "extend", "pttl", "exists", "get", "fenced"])
def test_replies_of_the_wrong_shape_are_distrusted(clock: Clock, made: Any, replies: list[Any]) -> None:
    for reply in replies:
        ran = run_steps(clock, made(clock), reply, reply)
        assert isinstance(ran.raised, errors.InvalidResponse), reply
        assert len(ran.of(steps.ProtocolViolation)) == 2, reply


def test_a_fenced_grant_has_its_fence(clock: Clock) -> None:
    ran = run_steps(clock, acquire(fenced=True), [[None, 77]])
    assert (ran.outcome.fence, ran.outcome._deadline) == (77, clock() + 10)
    assert ran.requests[0].calls == [commands.acquire_fenced(b"name", MINE, 10_000)]
    ran = run_steps(clock, acquire(fenced=True), [[OTHER, 77]])
    assert ran.outcome is None
    ran = run_steps(clock, acquire(fenced=True), [error("NOSCRIPT x")], [b"sha"] * 7, [[None, 78]])
    assert ran.outcome.fence == 78
    ran = run_steps(clock, acquire(fenced=True), lost(), [[MINE, 79]], 1)
    assert ran.outcome.fence == 79
    ran = run_steps(clock, acquire(fenced=True), [error("ERR no")])
    assert isinstance(ran.raised, errors.ResponseError)


# ------------------------------------------------------------------------------------------------------------- release


def test_release_tells_whether_the_lease_was_held(clock: Clock) -> None:
    assert run_steps(clock, Release(lease_of(clock)), 1).outcome is True
    assert run_steps(clock, Release(lease_of(clock)), 0, [0]).outcome is False


HAND_OVER = commands.hand_over(b"name", MINE)


def release_with(clock: Clock, lease: Lease, *answers: Any, **settings: Any) -> tuple[Any, list[Any], Ran]:
    """The outcome of a release, and what it sent: opcodes, or calls of scripts."""
    sent: list[Any] = []

    def note(answer: Any) -> Any:
        def tell(request: Any) -> Any:
            sent.append(request.calls[0] if isinstance(request, steps.RawCommands) else request.opcode)
            return answer

        return tell

    ran = run_steps(clock, Release(lease), *[note(answer) for answer in answers], **settings)
    return ran.outcome, sent, ran


@pytest.mark.parametrize("outcome", [1, 0])
def test_a_release_that_finds_another_value_hands_over(clock: Clock, outcome: int) -> None:
    """The value may be its own token, contended."""
    assert release_with(clock, lease_of(clock), 0, [outcome])[:2] == (bool(outcome), [Opcode.RELEASE, HAND_OVER])
    assert run_steps(clock, Release(lease_of(clock, token=GIVEN)), 0).outcome is False, "it cannot become contended"


def test_a_contended_lease_is_handed_over_at_once(clock: Clock) -> None:
    lease = lease_of(clock)
    lease._contended = True
    assert release_with(clock, lease, [1])[:2] == (True, [HAND_OVER])
    assert release_with(clock, lease, [0])[:2] == (False, [HAND_OVER])
    outcome, sent, ran = release_with(clock, lease, [error("NOSCRIPT x")], [b"sha"] * 7, [1])
    assert outcome is True and [call[0] for call in sent] == [b"EVALSHA", b"SCRIPT", b"EVALSHA"]
    assert commands.HAND_OVER_LUA.load in ran.requests[1].calls


@pytest.mark.parametrize("reply", [None, b"1", [1], 1.5, True, b"OK"])
def test_a_reply_of_the_wrong_shape_hands_nothing_over(clock: Clock, reply: Any) -> None:
    lease = lease_of(clock)
    lease._contended = True
    ran = run_steps(clock, Release(lease), [reply], [reply])
    assert isinstance(ran.raised, errors.InvalidResponse) and len(ran.of(steps.ProtocolViolation)) == 2


FORBIDDEN = error("NOPERM this user has no permissions to run the 'evalsha' command")


@pytest.mark.parametrize("held", [None, OTHER])
def test_a_user_who_may_not_run_the_hand_over_script_reads_the_token(clock: Clock, held: bytes | None) -> None:
    outcome, sent, _ = release_with(clock, lease_of(clock), 0, [FORBIDDEN], held)
    assert (outcome, sent) == (False, [Opcode.RELEASE, HAND_OVER, Opcode.GET])


@pytest.mark.parametrize("held", [MINE, CONTENDED])
def test_a_user_who_may_not_run_the_hand_over_script_releases_a_contended_token(clock: Clock, held: bytes) -> None:
    """Waiters recheck by themselves; none would acquire, were the name held until the lease ends."""
    outcome, sent, ran = release_with(clock, lease_of(clock), 0, [FORBIDDEN], held, 1)
    assert (outcome, sent) == (True, [Opcode.RELEASE, HAND_OVER, Opcode.GET, Opcode.RELEASE])
    assert ran.requests[-1].token == held


def test_the_token_may_become_contended_while_it_is_read(clock: Clock) -> None:
    outcome, _, ran = release_with(clock, lease_of(clock), 0, [FORBIDDEN], MINE, 0, CONTENDED, 1)
    assert outcome is True and [request.token for request in ran.requests[-3::2]] == [MINE, CONTENDED]
    outcome, _, ran = release_with(clock, lease_of(clock), 0, [FORBIDDEN], MINE, 0, OTHER)
    assert outcome is False


def test_a_user_who_may_not_release_gets_an_error(clock: Clock) -> None:
    outcome, _, ran = release_with(clock, lease_of(clock), 0, [FORBIDDEN], CONTENDED, FORBIDDEN, FORBIDDEN)
    assert outcome is None and type(ran.raised) is type(errors.from_reply(FORBIDDEN))


def test_the_undo_of_a_refused_release_ends_its_broken_connection(clock: Clock) -> None:
    _, _, ran = release_with(clock, lease_of(clock), 0, [FORBIDDEN], CONTENDED, lost(session="it"), *[FORBIDDEN] * 2)
    assert ran.raised is not None and ran.undos[-1].stale == ("it",)


def test_an_error_of_a_hand_over_is_raised(clock: Clock) -> None:
    _, sent, ran = release_with(clock, lease_of(clock), 0, [error("ERR broken")])
    assert isinstance(ran.raised, errors.ResponseError) and sent == [Opcode.RELEASE, HAND_OVER]


def test_a_local_handover_needs_no_command(clock: Clock) -> None:
    queues = Ran().queues
    one, two = (joined(queues, "name", b"name", 10_000, False, None) for _ in range(2))
    queues.may_enter_now(one, clock())
    lease = Lease("name", b"name", one.queue.entry, clock() + 10)
    one.queue.note_granted(one, lease, 0, clock())
    clock.go(0.001)
    op = Release(lease)
    ran = run_steps(clock, op, queues=queues)
    assert (ran.outcome, ran.steps, lease._deadline) == (True, [], -math.inf)
    assert two.lease is not None and two.lease._raw_token == lease._raw_token
    assert op.undo().names == [], "a caller interrupted now must not undo the lease of another"
    assert not lease._release_unknown


def test_a_release_hands_over_where_a_waiter_of_the_client_wants_a_fence(clock: Clock) -> None:
    queues = Ran().queues
    waiter = joined(queues, "name", b"name", 10_000, True, None)
    assert release_with(clock, lease_of(clock), [1], queues=queues)[:2] == (True, [HAND_OVER])
    assert waiter.lease is None
    other = Ran().queues
    joined(other, "x", b"x", 10_000, False, None)
    assert release_with(clock, lease_of(clock), 1, queues=other)[:2] == (True, [Opcode.RELEASE])


def test_a_key_gone_after_a_lost_reply_was_released_by_the_lost_command(clock: Clock) -> None:
    ran = run_steps(clock, Release(lease_of(clock)), lost(session="one"), 0, [0])
    assert (ran.outcome, ran.stales[1], ran.undos) == (True, ("one",), [])
    assert run_steps(clock, Release(lease_of(clock)), lost(), 1).outcome is True
    assert run_steps(clock, Release(lease_of(clock)), lost(sent=False), 0, [0]).outcome is False
    ran = run_steps(clock, Release(lease_of(clock)), 0, lost(session="two"), [0])
    assert (ran.outcome, ran.stales[2], ran.undos) == (True, ("two",), [])


def test_a_key_gone_after_a_lost_reply_is_a_loss_if_the_lease_had_expired(clock: Clock) -> None:
    assert run_steps(clock, Release(lease_of(clock, -0.001)), lost(), 0, [0]).outcome is False
    ran = run_steps(clock, Release(lease_of(clock, 1.0)), After(2.0, lost(sent=False)), lost(), 0, [0])
    assert ran.outcome is False  # nothing left before the lease had ended
    assert run_steps(clock, Release(lease_of(clock, 1.0)), After(2.0, lost()), 0, [0]).outcome is True


def test_a_release_given_up_is_undone_and_may_be_repeated(clock: Clock) -> None:
    lease = lease_of(clock)
    ran = run_steps(clock, Release(lease), lost(session="one"), lost(final=True, session="two"))
    assert isinstance(ran.raised, errors.ConnectionError)
    assert [(undone(undo), set(undo.stale)) for undo in ran.undos] == [(([b"name"], [MINE]), {"one", "two"})]
    assert run_steps(clock, Release(lease), 0, [0]).outcome is True


def test_a_release_interrupted_while_scripts_are_loaded_is_finished(clock: Clock) -> None:
    """Nobody is left to repeat it, and the key is still there."""
    for gone in (KeyboardInterrupt(), asyncio.CancelledError()):
        operation = Release(lease_of(clock))
        ran = run_steps(clock, operation, error("NOSCRIPT No matching script."), Raise(gone))
        assert ran.raised is gone and [undone(undo) for undo in ran.undos] == [([b"name"], [MINE])]


def test_an_interrupted_release_may_be_repeated(clock: Clock) -> None:
    lease = lease_of(clock)
    op = Release(lease)
    ran = run_steps(clock, op, Raise(KeyboardInterrupt()))
    assert isinstance(ran.raised, KeyboardInterrupt)
    assert undone(op.undo()) == ([b"name"], [MINE])  # which the transport asks for
    assert run_steps(clock, Release(lease), 0, [0]).outcome is True


def test_a_release_that_was_never_sent_changes_nothing(clock: Clock) -> None:
    lease = lease_of(clock)
    ran = run_steps(clock, Release(lease), lost(sent=False, final=True))
    assert isinstance(ran.raised, errors.ConnectionError)
    assert (ran.undos, lease._release_unknown) == ([], False)


# -------------------------------------------------------------------------------------------------------------- extend


MOVED = Outcome.MOVED


def test_a_replaced_end_counts_from_the_time_its_command_was_sent(clock: Clock) -> None:
    lease, sent = lease_of(clock), clock()
    ran = run_steps(clock, extension.extend(lease, 30_000, True, clock), After(2.0, b"OK"))
    assert (ran.outcome, lease._deadline) == (MOVED, sent + 30)
    assert opcodes(ran) == [Opcode.EXTEND]


def test_additional_time_is_sent_as_an_end_so_that_a_retry_adds_it_once(clock: Clock) -> None:
    lease = lease_of(clock, 10)
    ran = run_steps(clock, extension.extend(lease, 5_000, False, clock), After(1.0, lost()), After(1.0, 1))
    assert [request.ms for request in ran.requests] == [15_000, 15_000]
    assert (ran.outcome, lease._deadline) == (MOVED, clock() - 1 + 15)


@pytest.mark.parametrize(("left", "ms"), [(700, 5_700), (-1, 5_000), (-2, 5_000), (0, 5_000)])
def test_adding_time_to_an_expired_lease_reads_what_is_left_on_the_server(clock: Clock, left: int, ms: int) -> None:
    lease = lease_of(clock, -1)
    ran = run_steps(clock, extension.extend(lease, 5_000, False, clock), left, lost(), After(1.0, 1))
    assert opcodes(ran) == [Opcode.PTTL, Opcode.EXTEND, Opcode.EXTEND]
    assert [request.ms for request in ran.requests[1:]] == [ms, ms]
    assert lease._deadline == clock() - 1 + ms / 1000


@pytest.mark.parametrize("replace", [False, True])
def test_a_lease_without_end_is_not_extended_unless_its_key_has_an_end(clock: Clock, replace: bool) -> None:
    lease = lease_of(clock, math.inf)
    ran = run_steps(clock, extension.extend(lease, 5_000, replace, clock), -1)
    assert (ran.outcome, lease._deadline, opcodes(ran)) == (Outcome.ENDLESS, math.inf, [Opcode.PTTL])
    ran = run_steps(clock, extension.extend(lease, 5_000, replace, clock), 700, After(1.0, b"OK"))
    ms = 5_000 if replace else 5_700
    assert (ran.outcome, ran.requests[1].ms, lease._deadline) == (MOVED, ms, clock() - 1 + ms / 1000)


def test_a_lease_without_end_that_gets_one_is_not_handed_over_locally(clock: Clock) -> None:
    """Before the server answered, the key may have no end: nobody would get the name, should the next holder die."""
    lease, start = lease_of(clock, math.inf), clock()
    ran = run_steps(clock, extension.extend(lease, 5_000, True, clock, anew=True), Raise(KeyboardInterrupt()))
    assert isinstance(ran.raised, KeyboardInterrupt) and opcodes(ran) == [Opcode.EXTEND]
    assert (lease._deadline, lease._token_read) == (start + 5, True)


def test_a_lease_released_during_its_extension_is_not_extended(clock: Clock) -> None:
    lease = lease_of(clock, -1)

    def release_it(request: Any) -> Any:
        lease._deadline = ENDED
        return 700

    ran = run_steps(clock, extension.extend(lease, 5_000, False, clock), release_it)
    assert (ran.outcome, lease._deadline, opcodes(ran)) == (Outcome.GONE, ENDED, [Opcode.PTTL])


def test_an_extension_given_up_ends_the_connections_it_was_sent_on(clock: Clock) -> None:
    """Otherwise the server may execute it after the next extension, and shorten what that one promised."""
    for last in (lost(final=True, session="two"), Raise(KeyboardInterrupt()), error("ERR no")):
        ran = run_steps(clock, extension.extend(lease_of(clock), 5_000, True, clock), lost(session="one"), last)
        assert ran.raised is not None
        ended = [session for undo in ran.of(Undo) for session in undo.stale]
        assert ended == ["one", "two"] if isinstance(last, steps.ConnectionLost) else ["one"]


@pytest.mark.parametrize(("ms", "replace", "held"), [(2_000, True, 2.0), (60_000, True, 10.0), (5_000, False, 10.0)])
def test_the_earlier_of_two_ends_holds_until_the_answer(clock: Clock, ms: int, replace: bool, held: float) -> None:
    lease, start, seen = lease_of(clock, 10), clock(), []

    def note(request: Any) -> Any:
        seen.append(lease._deadline - start)
        return lost()

    ran = run_steps(clock, extension.extend(lease, ms, replace, clock), note, note, Raise(KeyboardInterrupt()))
    assert isinstance(ran.raised, KeyboardInterrupt)
    assert seen == [held, held]
    assert lease._deadline - start == held


@pytest.mark.parametrize(
    ("token", "replies"), [(MINE, [None, 0]), (MINE, [0]), (GIVEN, [None])], ids=["native", "script", "given"]
)
def test_a_lost_lease_is_not_extended(clock: Clock, token: bytes, replies: list[Any]) -> None:
    lease = lease_of(clock, 10, token=token)
    ran = run_steps(clock, extension.extend(lease, 60_000, True, clock), *replies)
    assert (ran.outcome, lease.valid, lease.remaining) == (Outcome.LOST, False, 0.0)


def test_a_contended_lease_is_extended_by_script(clock: Clock) -> None:
    """The value of its key is not the token any more, with which the native command compares."""
    lease, sent = lease_of(clock, 10), list[int]()

    def note(answer: Any) -> Any:
        return lambda request: sent.append(request.opcode) or answer

    ran = run_steps(clock, extension.extend(lease, 60_000, True, clock), note(None), note(After(1.0, 1)))
    assert (ran.outcome, lease._deadline) == (MOVED, clock() - 1 + 60)
    ran = run_steps(clock, extension.extend(lease, 60_000, True, clock), note(None), note(lost(session="one")), note(1))
    assert ran.outcome is MOVED and ran.stales == [(), (), ("one",)]
    assert sent == [Opcode.EXTEND, Opcode.EXTEND_SCRIPT, Opcode.EXTEND, Opcode.EXTEND_SCRIPT, Opcode.EXTEND_SCRIPT]


def test_a_user_who_may_run_no_scripts_extends_the_token_as_it_is_stored(clock: Clock) -> None:
    for held, last, outcome in (
        (CONTENDED, b"OK", True),
        (CONTENDED, None, False),
        (OTHER, ..., False),
        (None, ..., False),
    ):
        lease = lease_of(clock, 10)
        replies = [None, FORBIDDEN, held, *([] if last is ... else [last])]
        ran = run_steps(clock, extension.extend(lease, 60_000, True, clock), *replies)
        assert (ran.outcome, lease.valid) == (MOVED if outcome else Outcome.LOST, outcome)
        assert opcodes(ran)[2] == Opcode.GET and len(ran.requests) == len(replies)
        assert last is ... or (ran.requests[0].opcode, ran.requests[0].token) == (Opcode.EXTEND, CONTENDED)


# ------------------------------------------------------------------------------------------------------------- retries


def test_the_first_retry_is_at_once_and_later_ones_back_off_up_to_a_second(clock: Clock) -> None:
    longest = []
    for failures in range(2, 30):
        found = []
        for _ in range(100):
            retry = RetryState(clock)
            retry.pause(lost(retry_for=100))
            pauses = [retry.pause(lost(retry_for=100)) for _ in range(failures - 1)]
            found.append(pauses[-1])
        assert all(0 <= pause <= 1.0 for pause in found)
        longest.append(max(found))
    assert longest[0] <= 0.04
    assert max(longest) > 0.9
    assert RetryState(clock).pause(lost()) == 0.0


def test_retries_end_after_retry_for_seconds(clock: Clock) -> None:
    start = clock()
    ran = run_steps(clock, extension.inspect(Opcode.GET, b"n", clock), After(0.5, lost(sent=False, retry_for=5.0)), ...)
    assert isinstance(ran.raised, errors.ConnectionError)
    assert 5.0 <= clock() - start <= 5.0 + 1.0 + 0.5 + 1.0
    assert len(ran.requests) >= 5


def test_a_failure_that_took_longer_than_retry_for_is_retried_once(clock: Clock) -> None:
    ran = run_steps(clock, extension.inspect(Opcode.GET, b"n", clock), After(60.0, lost(retry_for=5.0)), b"x")
    assert ran.outcome == b"x"


def test_a_client_that_was_never_connected_gives_up_at_once(clock: Clock) -> None:
    for operation in (
        acquire(),
        Release(lease_of(clock)),
        get_session(clock),
        AcquireMany(["n"], [b"n"], MINE, 0, Stats()),
    ):
        ran = run_steps(clock, operation, lost(sent=False, final=True))
        assert isinstance(ran.raised, errors.ConnectionError)
        assert ran.sleeps == []


def test_get_session_waits_for_a_session(clock: Clock) -> None:
    session = Session({}, frozenset(), b"1", b"a", "")
    assert run_steps(clock, get_session(clock), lost(sent=False), lost(sent=False), session).outcome is session
