"""Small runs of scale.py: all waiters are served, in order if fair, no key is left, and a cancel costs little."""

from __future__ import annotations

import pytest
from scale import COMMANDS, Failure, all_served, cancelled, in_order, serve_all

from fastlock.embedded import Server

VALKEY = pytest.mark.parametrize("server", ["valkey"], indirect=True)


@VALKEY
@pytest.mark.parametrize("fair", [False, True])
def test_thousand_waiters_of_two_processes_for_one_name(server: Server, impl: str, fair: bool) -> None:
    serve_all(server, 2, 500, 1, fair=fair)


@VALKEY
def test_thousands_of_tasks_for_fifty_names(server: Server, impl: str) -> None:
    serve_all(server, 1, 5_000, 50)


@pytest.mark.parametrize("fair", [False, True])
def test_cost_of_a_cancel_does_not_depend_on_the_number_of_waiters(server: Server, impl: str, fair: bool) -> None:
    commands, *_ = cancelled(server, 1_000, fair=fair)
    assert commands <= COMMANDS


def test_checks_detect_mistakes() -> None:
    queue = [b"channel-a", b"channel-b"]
    grants = [[(1.0, 0, b"a")], [(2.0, 0, b"b")]]
    all_served(grants, 1)
    in_order(grants, queue)
    with pytest.raises(Failure, match="1 of 2 were served"):
        all_served(grants, 2)
    with pytest.raises(Failure, match="2 of 2 were served out of order"):
        in_order(grants[::-1], queue[::-1])
