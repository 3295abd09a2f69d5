"""A try that recalls what another process keeps, by canned replies. No I/O, a clock by hand."""

from __future__ import annotations

from typing import Any

import pytest
from support.run_steps import MINE, Clock, acquire, error, lost, run_steps

from fastlock import _errors as errors
from fastlock._protocol.acquire import Acquire
from fastlock._protocol.commands import Opcode

pytestmark = pytest.mark.usefixtures("impl")  # leases are compiled


def recalling() -> Acquire:
    op = acquire()
    op.request.opcode = Opcode.ACQUIRE_OR_RECALL
    return op


NO_GET = "ERR ACL failure in script: User x has no permissions to run the 'get' command"


@pytest.mark.parametrize("replies", [[error("NOPERM x")], [error(NO_GET)], [error("NOSCRIPT x"), [error("NOPERM x")]]])
def test_who_may_not_recall_acquires_all_the_same(clock: Clock, replies: list[Any]) -> None:
    ran = run_steps(clock, op := recalling(), *replies, None)
    assert ran.outcome is not None and op.request.opcode == Opcode.ACQUIRE


@pytest.mark.parametrize(
    ("replies", "sent"),
    [
        ([error("NOSCRIPT x"), [b"sha"] * 7, None], Opcode.ACQUIRE_OR_RECALL),
        ([lost(session="one"), MINE, b"OK"], Opcode.ACQUIRE_OR_RECALL),
        ([b"another"], None),
        ([error("WRONGTYPE x")], None),
        ([error("OOM x")], None),
    ],
)
def test_what_the_answer_to_a_recalling_try_means(clock: Clock, replies: list[Any], sent: Opcode | None) -> None:
    ran = run_steps(clock, op := recalling(), *replies)
    assert (ran.outcome is not None) == (sent is not None)
    assert isinstance(ran.raised, errors.RedisError) == isinstance(replies[0], Exception) * (sent is None)
    assert sent is None or op.request.opcode == sent
