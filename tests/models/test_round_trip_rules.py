"""The rules of believed grants, unconfirmed releases and kept leases, as a model: they hold in any order of events."""

from __future__ import annotations

import pytest
from support import round_trips

SHORT = "believe", "short", "keepcut"  # a second or two each; the others take up to twenty
LONG = [pytest.param(each, marks=pytest.mark.long) for each in round_trips.CONFIGS if each not in SHORT]


@pytest.mark.parametrize("name", [*SHORT, *LONG])
def test_the_rules_hold(name: str) -> None:
    assert round_trips.run(name, None, round_trips.LIMIT) is None
