"""Many waiters in small: all are served, in order where that is promised, nothing is left, a cancel costs little."""

from __future__ import annotations

import pytest
from scale import COMMANDS, Failure, all_served, cancelled, crowd, in_order

from fastlock.embedded import Server

VALKEY = pytest.mark.parametrize("server", ["valkey"], indirect=True)


@VALKEY
@pytest.mark.parametrize("fair", [False, True])
def test_thousand_waiters_of_two_processes_on_one_name(server: Server, impl: str, fair: bool) -> None:
    crowd(server, 2, 500, 1, fair=fair)


@VALKEY
def test_thousands_of_tasks_on_fifty_names(server: Server, impl: str) -> None:
    crowd(server, 1, 5_000, 50)


@pytest.mark.parametrize("fair", [False, True])
def test_who_is_cancelled_costs_the_server_the_same_however_many_wait(server: Server, impl: str, fair: bool) -> None:
    commands, *_ = cancelled(server, 1_000, fair=fair)
    assert commands <= COMMANDS


def test_checks_find_what_is_wrong() -> None:
    queue = [b"inbox-a", b"inbox-b"]
    grants = [[(1.0, 0, b"a")], [(2.0, 0, b"b")]]
    all_served(grants, 1)
    in_order(grants, queue)
    with pytest.raises(Failure, match="1 of 2 were served"):
        all_served(grants, 2)
    with pytest.raises(Failure, match="2 of 2 were served out of order"):
        in_order(grants[::-1], queue[::-1])
