"""How an undo is delivered: over which connection with which scripts, and what each reply means."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from support.run_steps import MINE, OTHER, Clock, Raise, acquire, error, run_steps

from fastlock import _errors as errors
from fastlock._protocol import commands
from fastlock._protocol.handshake import Session
from fastlock._protocol.undo import RELOADS, ScriptUndo, Undo
from fastlock._transport.undo_delivery import UndoDelivery, UndoReply

LOADING = "LOADING Redis is loading the dataset in memory"


ONE, TWO = (Session({}, frozenset(), b"1", b"a", "", serial=serial) for serial in (1, 2))
LEAVE = commands.leave(b"a", b"address" + b"p" * 60)


class AsyncConnection:
    """A connection that notes what was posted on it."""

    def __init__(self, *capabilities: str) -> None:
        self.session = Session({}, frozenset(capabilities), b"1", b"a", "")
        self.posted: list[Any] = []
        self.later: list[Any] = []
        self.heard: list[Exception] = []  # errors of what was refused
        self.loaded: set[Any] = set(commands.HAND_OVER_LUA.loads)  # as over a connection that has sent an undo
        self.knows_release = True

    def post_later(self, delivery: UndoDelivery, seconds: float) -> None:
        self.later.append((delivery, seconds))

    def warn_refused(self, purpose: Any, error: Exception) -> None:
        self.heard.append(error)

    def post(self, delivery: UndoDelivery) -> None:
        self.posted.append((delivery, delivery.calls(self)))


def sent(undo: Undo, connection: Any) -> UndoDelivery:
    """An undo that was sent over a connection."""
    delivery = UndoDelivery(undo)
    delivery.calls(connection)
    return delivery


@pytest.mark.parametrize("native", [commands.DELIFEQ, commands.DELEX, ""])
def test_an_undo_releases_contended_or_not_and_repeats_what_was_refused(native: str) -> None:
    """The undo sends its scripts first, and undoes the token in either form, also where the user may not hand over."""
    connection: Any = AsyncConnection(native) if native else AsyncConnection()
    a, b, c = MINE, OTHER, b"fl:" + b"c" * 32
    undo = sent(Undo([b"a", b"b", b"c"], [a, b, c]), connection)
    assert not UndoReply(undo).done()

    def plain(name: bytes, token: bytes) -> tuple[bytes, ...]:
        if native == commands.DELEX:  # a server that has it may not know the script that deletes
            return (b"DELEX", name, b"IFEQ", token)
        return (b"DELIFEQ", name, token) if native else (b"EVALSHA", commands.RELEASE_LUA.sha, b"1", name, token)

    calls = undo.calls(connection)
    assert calls[:2] == [commands.hand_over(b"a", a), plain(b"a", a)] and len(calls) == 6
    refused, forgotten = error("NOPERM"), error("NOSCRIPT")
    undo.answered([1, 0, forgotten, 1, forgotten, 0])
    again = [commands.hand_over(b"c", c), plain(b"c", c), plain(b"c", b"fl+" + c[3:])]
    loads = [commands.RELEASE_LUA.load, *commands.HAND_OVER_LUA.loads]
    assert connection.posted == [(undo, [*loads, *again])], "only c may still be held"
    undo.answered([b"sha"] * len(loads) + [refused, 0, 0])
    assert len(connection.posted) == 1 and not connection.heard, "the token is there in neither form"
    undo.answered([refused] * 6)
    (error_of,) = connection.heard
    assert len(connection.posted) == 1 and isinstance(error_of, errors.ResponseError)


READER = MINE + b"|r"
SHARED_LEAVE = commands.leave(b"a", b"a" * commands.ADDRESS_SIZE + READER)
TRIO = commands.HAND_OVER_LUA.loads
UNDOS = [
    (Undo([b"a"], [MINE]), [commands.RELEASE_LUA.load, *TRIO], 3, 2),
    (Undo([b"a"], [READER]), [commands.RELEASE_LUA.load, commands.SHARED_RELEASE_LUA.load, *TRIO], 3, 3),
    (ScriptUndo(LEAVE, (), None), TRIO, 1, 1),
    (ScriptUndo(SHARED_LEAVE, (), None), commands.SHARED_RELEASE_LUA.loads, 1, 1),
    (ScriptUndo(commands.downgrade(b"a", READER), (), None), commands.DOWNGRADE_LUA.loads, 1, 1),
]


def fresh() -> Any:
    """A connection that has sent no script yet."""
    connection: Any = AsyncConnection()
    connection.loaded, connection.knows_release = set(), False
    return connection


def broken_off() -> Any:
    """The connection that took the place of one that broke."""
    connection = fresh()
    connection.session = TWO
    return connection


@pytest.mark.parametrize(("undo", "loads", "calls", "least"), UNDOS)
@pytest.mark.parametrize("trio", [False, True])
def test_an_undo_is_sent_behind_its_scripts_the_first_time_over_a_connection(
    undo: Undo, loads: list[Any], calls: int, least: int, trio: bool
) -> None:
    """The server may have been started anew, and in threads nobody reads that it does not know them. A thousand such
    undos load them once; one that is refused loads them again. trio: the scripts of plain locks were loaded before."""
    connection: Any = AsyncConnection() if trio else fresh()
    first, second = UndoDelivery(undo), UndoDelivery(undo)
    alone = trio and not undo.in_full
    needed = [] if alone else [load for load in loads if load not in connection.loaded]
    for delivery, before in (first, needed), (second, []):
        sends = delivery.calls(connection)
        bare = alone or (delivery is second and not undo.in_full)
        assert sends[: len(before)] == before and len(sends) == len(before) + (least if bare else calls)
        delivery.written(sends)
    second.answered([error("NOSCRIPT")] * (least if bare else calls))
    ((_, sends),) = connection.posted
    assert sends[: len(loads)] == loads and len(sends) == len(loads) + calls
    second.answered([b"sha"] * len(loads) + [0] * calls)
    assert len(connection.posted) == 1 and not connection.heard


@pytest.mark.parametrize("stale", [(), (ONE,)])
@pytest.mark.parametrize("kind", ["undo", "leave", "downgrade"])
def test_an_undo_that_follows_an_acquire_needs_no_scripts(kind: str, stale: tuple[Session, ...]) -> None:
    """Where anybody has joined, the server knows those; but not where another connection had to be ended, nor what
    followed no acquire."""
    connection = fresh()
    call = LEAVE if kind == "leave" else commands.downgrade(b"a", READER)
    undo = Undo([b"a"], [MINE], stale, connection) if kind == "undo" else ScriptUndo(call, stale, connection)
    loads = [each for each in UndoDelivery(undo).calls(connection) if each[0] == b"SCRIPT"]
    assert (not loads) is (kind != "downgrade" and not stale)
    assert UndoDelivery(undo).calls(broken_off())[0][0] == b"SCRIPT"


@pytest.mark.parametrize(
    ("replies", "posts", "warnings"),
    [
        ([error("NOSCRIPT"), 0, 1], 0, 0),
        ([error("NOSCRIPT"), 0, 0], 0, 0),  # the token is there in neither form
        ([1, error("NOPERM"), error("NOPERM")], 0, 0),
        ([error("NOSCRIPT"), 0, error("NOSCRIPT")], 1, 0),
        ([error("NOPERM"), 0, error("NOPERM")], 0, 1),
    ],
)
def test_the_replies_to_an_undo_behind_its_scripts_are_told_from_those_to_the_scripts(
    replies: list[Any], posts: int, warnings: int
) -> None:
    connection = fresh()
    undo = sent(Undo([b"b", b"a"], [OTHER, MINE]), connection)
    undo.answered([b"sha"] * (1 + len(TRIO)) + [1, 0, 0] + replies)
    assert (len(connection.posted), len(connection.heard)) == (posts, warnings)


@pytest.mark.parametrize("refusal", ["BUSY a script runs", LOADING, "NOSCRIPT"])
def test_a_server_that_refuses_an_undo_may_have_refused_its_scripts(refusal: str) -> None:
    """What comes next, also a release, must not take them for loaded."""
    connection = fresh()
    leave = UndoDelivery(ScriptUndo(LEAVE, (), None))
    leave.written(leave.calls(connection))
    assert connection.knows_release
    leave.answered([error(refusal)] * (len(TRIO) + 1))
    assert not connection.knows_release
    plain = sent(Undo([b"a"], [MINE]), connection)
    plain.written(plain.calls(connection))
    plain.answered([error("NOPERM")] * (len(TRIO) + 2) + [0, 1])  # a user without scripts has deleted it all the same
    assert UndoDelivery(ScriptUndo(LEAVE, (), None)).calls(connection) == [*TRIO, LEAVE]


def test_the_outcome_of_an_undo_counts_where_it_was_sent_last() -> None:
    """An interrupted caller may send it twice: on two connections that both break, or refuse it."""
    connection: Any = AsyncConnection()
    undo = sent(Undo([b"a"], [MINE]), connection)
    first, second = UndoReply(undo), UndoReply(undo)
    deferred: list[Any] = []
    transport: Any = SimpleNamespace(defer=deferred.append)
    for _ in range(2):
        first.connection_broke(transport, ONE)
        first.set_result([error(LOADING)] * 2)
    assert deferred == connection.later == [] and undo.stale == () and undo.reply is second
    for _ in range(2):
        second.connection_broke(transport, ONE)
    assert connection.later == [] and deferred == [undo] and undo.stale == (ONE,)
    assert undo.reply is None, "or the two would keep the broken connection alive"
    third = UndoReply(undo)
    third.set_result([error(LOADING)] * 2)
    third.connection_broke(transport, TWO)
    assert [step for step, _ in connection.later] == [undo] and deferred == [undo], "the third had its reply"


def test_an_undo_that_released_everything_is_done() -> None:
    connection: Any = AsyncConnection()
    undo = sent(Undo([b"a", b"b", b"c"], [b"1", b"2", b"3"]), connection)
    undo.answered([1, 0, 0, 1, 0, error("NOSCRIPT")])
    only = sent(Undo([], [], (ONE,)), connection)
    assert only.calls(connection) == [(b"PING",)]
    for reply in (b"PONG", error(LOADING)):
        only.answered([reply])
    leave = sent(ScriptUndo(LEAVE, (TWO,), connection), connection)
    assert (leave.calls(connection)[-1], leave.stale, leave.undo.names) == (LEAVE, (TWO,), [])
    leave.answered([0])
    assert connection.posted == connection.later == connection.heard == []


def test_a_leave_whose_script_was_forgotten_is_sent_again_behind_it() -> None:
    for matters in (True, False):
        connection: Any = AsyncConnection()
        leave = sent(ScriptUndo(LEAVE, (), connection, matters), connection)
        leave.answered([error("NOSCRIPT")])
        assert connection.posted == [(leave, [*commands.LEAVE_LUA.loads, LEAVE])], (
            "it may grant, and who is granted confirms"
        )
        leave.answered([error("NOPERM evalsha")] * 2)
        assert len(connection.posted) == 1 and len(connection.heard) == matters


def test_a_server_that_always_forgets_scripts_is_given_up() -> None:
    connection: Any = AsyncConnection()
    leave = sent(ScriptUndo(LEAVE, (), connection), connection)
    for number in range(1, 20):
        leave.answered([error("NOSCRIPT")])
        assert len(connection.posted) == min(number, RELOADS - 1), number
    assert len(connection.heard) == 10


def test_undos_and_leaves_are_sent_later_to_a_server_that_is_loading() -> None:
    connection: Any = AsyncConnection()
    undo, leave = sent(Undo([b"a"], [MINE]), connection), sent(ScriptUndo(LEAVE, (), connection), connection)
    for _ in range(30):
        undo.answered([error(LOADING)] * 2)
        leave.answered([error(LOADING)])
    assert [step for step, _ in connection.later] == [undo, leave] * 30 and connection.posted == connection.heard == []
    seconds = [each for _, each in connection.later]
    assert 0 < max(seconds[:4]) < 0.05 and 0.1 < max(seconds) <= 1
    undo.answered([error("NOSCRIPT")] * 2)
    undo.answered([error(LOADING)] * 5)
    assert undo.again and len(connection.posted) == 1 and len(connection.later) == 61


@pytest.mark.usefixtures("impl")  # leases are compiled
def test_who_leaves_with_a_command_in_flight_sends_no_scripts(clock: Clock) -> None:
    """A server reads so much in two steps, and whoever looked right after that could still see what it left."""
    connection = fresh()

    def interrupted(request: Any) -> Any:
        request.connection = connection
        return Raise(KeyboardInterrupt())

    ran = run_steps(clock, acquire(blocking=True), OTHER, interrupted)
    (leave,) = ran.of(ScriptUndo)
    assert leave.stale == (connection.session,), "should it break, what was in flight is ended before"
    delivery = UndoDelivery(leave)
    assert delivery.calls(connection) == [leave.call] and delivery.calls(broken_off()) == [*TRIO, leave.call]
    for stale, call in ((*leave.stale, ONE), LEAVE), (leave.stale, SHARED_LEAVE):
        behind = UndoDelivery(ScriptUndo(call, stale, leave.connection))
        assert len(behind.calls(connection)) > 1, "of another connection, or of a lock whose grants are no moments"
