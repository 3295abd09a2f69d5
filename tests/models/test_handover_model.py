"""The protocol of handing over, explored in every order of events; and its rules, each of them needed.

What is explored, and what must never happen: support/handover.py. That the code does what is explored:
test_handover_replay.py.
"""

from __future__ import annotations

import pytest
from support.handover import MISTAKES, STRICT, begin, explore

HOLDS: dict[str, tuple[tuple[int, ...], dict[str, int]]] = {
    "three clients": ((1, 1, 1), {}),
    "cohorts": ((2, 3), {}),
    "strict order": ((STRICT, STRICT, 2), {}),
    "crash": ((1, 1, 1), {"crash": 1}),
    "cut": ((1, 1, 1), {"cut": 1}),
    "cut twice": ((1, 1), {"cut": 2}),
    "cancel": ((2, 1, 1), {"cancel": 2}),
    "cut and cancel": ((1, STRICT, 1), {"cut": 1, "cancel": 1}),
    "expiry": ((1, 1, 1), {"expire": 1}),
    "expiry in a cohort": ((3, 1), {"expire": 2}),
    "expiry in strict order": ((STRICT, STRICT), {"expire": 2, "cut": 1}),
    "handed over and expired": ((4, 1), {"expire": 1, "cut": 1}),
    "handed over and left": ((3, 1), {"expire": 1, "cancel": 2}),
    "another library": ((1, 1), {"foreign": 2}),
    "ahead": ((2, 1), {"join": 2}),
    "ahead in a cohort": ((3, 2), {"join": 1, "cancel": 1}),
    "ahead of an expiry": ((2, 1), {"join": 1, "expire": 1, "cut": 1}),
    "ahead of an end": ((2, 1), {"join": 1, "crash": 1, "cut": 1, "cancel": 1}),
    "fences": ((3, 1), {"fences": True, "cancel": 2}),
    "fences and a cut": ((3, 1), {"fences": True, "cancel": 1, "cut": 1}),
    "fences and an expiry": ((3, 1), {"fences": True, "cancel": 1, "expire": 1}),
    "everything in a cohort": ((2, 1), {"crash": 1, "cut": 1, "expire": 1, "foreign": 1}),
    "everything": ((1, 1), {"crash": 1, "cut": 1, "cancel": 1, "expire": 1, "foreign": 1}),
}
FOUND: dict[str, tuple[tuple[int, ...], dict[str, int]]] = {
    "mark": ((1, 1), {}),
    "mark more": ((1, 1, 1), {}),
    "retry": ((1, 1), {}),
    "keep grant": ((1, 1), {"cancel": 1}),
    "remove entry": ((1, 2), {"cancel": 1}),
    "believe late": ((1, 1, 1), {"expire": 1}),
    "grant unmarked": ((1, 1, 1), {}),
    "confirm joins": ((1, 1), {"cut": 1}),
    "reenter": ((1, 1), {"cut": 1}),
    "grant to itself": ((1, 1), {"expire": 1}),
    "hand over expired": ((2, 1), {"expire": 1}),
    "renew": ((2, 1), {}),
    "late": ((1, 1), {"expire": 1}),
    "lose undos": ((1, 1), {"cut": 1, "cancel": 1}),
    "keep entry": ((2, 1), {"join": 1, "cancel": 1}),
    "resume expired": ((2, 1), {"expire": 1}),
    "overtake": ((3, 1), {"expire": 1}),
    "hand over entered": ((3, 1), {"fences": True, "cancel": 1}),
}


@pytest.mark.long
@pytest.mark.parametrize("case", HOLDS)
def test_protocol_holds(case: str) -> None:
    callers, budget = HOLDS[case]
    states, fault, path = explore(begin(callers, **budget))
    assert not fault, "\n".join([fault, *path])
    assert states > 200


@pytest.mark.long
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_found(mistake: str) -> None:
    callers, budget = FOUND[mistake]
    _, fault, path = explore(begin(callers, **budget), mistake)
    assert fault and path
