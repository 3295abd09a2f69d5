"""A release that nobody waits for: what is sent, and what each reply means."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from support.run_steps import MINE, Clock, error

from fastlock._protocol import commands
from fastlock._protocol.lease import Lease
from fastlock._protocol.undo import UnconfirmedRelease
from fastlock._transport.undo_delivery import UndoDelivery
from fastlock._transport.writing import write_undo

CALL = commands.hand_over(b"a", MINE)
LOADS = commands.HAND_OVER_LUA.loads


def unconfirmed(clock: Clock) -> tuple[UnconfirmedRelease, list[bool | None]]:
    told: list[bool | None] = []
    lease = Lease("a", b"a", MINE, clock() + 10)
    return UnconfirmedRelease(lease, None, clock, lambda _, released: told.append(released), lease._deadline), told


def sent(release: UnconfirmedRelease, again: bool = False) -> list[Any]:
    return release.commands(frozenset((commands.DELIFEQ,)), again)


def test_it_is_one_script_whatever_the_server_has(clock: Clock) -> None:
    release, told = unconfirmed(clock)
    assert sent(release) == [CALL] and release.unfinished([1], False) is None and told == [True]


def test_a_name_that_was_lost(clock: Clock) -> None:
    release, told = unconfirmed(clock)
    sent(release)
    assert release.unfinished([0], False) is None and told == [False]


def test_one_that_is_sent_again_may_find_its_own_work(clock: Clock) -> None:
    release, told = unconfirmed(clock)
    sent(release)
    assert sent(release, again=True) == [*LOADS, CALL]
    assert release.unfinished([b"sha", b"sha", 0], True) is None and told == [True]


def test_an_error_leaves_it_to_be_done(clock: Clock) -> None:
    release, told = unconfirmed(clock)
    sent(release)
    noscript = error("NOSCRIPT No matching script")
    assert release.unfinished([noscript], False) == (release, noscript) and told == []
    release.given_up()
    assert told == [None], "it ends by itself"


def test_it_is_not_sent_again_after_the_lease(clock: Clock) -> None:
    release, told = unconfirmed(clock)
    clock.go(11)
    assert sent(release) == [CALL], "the first time it is, as its holder was in time"
    assert sent(release) == [(b"PING",)]
    assert release.unfinished([b"PONG"], False) is None and told == [None]


def test_a_server_that_knows_how_to_join_knows_how_to_leave_and_to_release() -> None:
    """Whoever had a script of these loaded: nobody may read that the others are not known."""
    together = {script.text for script in (commands.ENTER_LUA, commands.LEAVE_LUA, commands.HAND_OVER_LUA)}
    for script in commands.SCRIPTS:
        loaded = {text for _, _, text in script.loads}
        assert script.text in loaded and len(loaded) == len(script.loads)
        assert together <= loaded or not together & loaded, script.name
    in_order = [script.name for script in commands.SCRIPTS]  # as they are sent, if the server has forgotten one
    last = max(map(in_order.index, ("leave", "hand_over", "release", "release_all", "shared_release", "downgrade")))
    assert last < min(map(in_order.index, ("enter", "acquire_all", "acquire_fenced", "shared_join", "shared_look")))


def test_a_connection_knows_the_script_once_it_was_loaded_over_it(clock: Clock) -> None:
    """A release that is sent again after the end of its lease, when there is nothing left to do, loads none."""
    late = unconfirmed(clock)[0]
    sent(late)
    clock.go(20)
    written: list[Any] = []
    stream = SimpleNamespace(put_calls=lambda reply, calls: written.append(calls))
    session = SimpleNamespace(capabilities=frozenset((commands.DELIFEQ,)))
    connection: Any = SimpleNamespace(stream=stream, session=session, loaded=set(), knows_release=False)
    for release, calls in (
        (late, [(b"PING",)]),
        (unconfirmed(clock)[0], [*LOADS, CALL]),
        (unconfirmed(clock)[0], [CALL]),
    ):
        write_undo(connection, UndoDelivery(release))
        assert written.pop() == calls and connection.knows_release == (release is not late)
