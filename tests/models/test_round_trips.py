"""The rules of believed grants, unconfirmed releases and kept leases, as a model: they hold in every order of events,
and none of them may be left out."""

from __future__ import annotations

import pytest
from support import round_trips

LIMIT = 3_000_000  # states
SHORT = "believe", "short", "keepcut"  # a second or two each; the others take up to twenty
LONG = [pytest.param(each, marks=pytest.mark.long) for each in round_trips.CONFIGS if each not in SHORT]


@pytest.mark.parametrize("name", [*SHORT, *LONG])
def test_the_rules_hold(name: str) -> None:
    assert round_trips.run(name, None, LIMIT) is None


@pytest.mark.long
@pytest.mark.parametrize("rule", round_trips.BREAKS)
def test_what_a_rule_is_there_for(rule: str) -> None:
    fault = round_trips.run(round_trips.BREAKS[rule][0], rule, LIMIT, quiet=True)
    assert fault not in (None, "LIMIT"), round_trips.BREAKS[rule][1]


@pytest.mark.long
@pytest.mark.parametrize("variant", round_trips.VARIANTS)
def test_what_is_no_rule(variant: str) -> None:
    """What the rules make unnecessary: without it nothing is found either, in the first states of each walk."""
    where, why = round_trips.VARIANTS[variant]
    assert round_trips.run(where, variant, 250_000, quiet=True) in (None, "LIMIT"), why
