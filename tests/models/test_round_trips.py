"""None of the rules of believed grants, unconfirmed releases and kept leases may be left out: without it, their model
finds an order of events that breaks a promise."""

from __future__ import annotations

import pytest
from support import round_trips


@pytest.mark.long
@pytest.mark.parametrize("rule", round_trips.BREAKS)
def test_what_a_rule_is_there_for(rule: str) -> None:
    fault = round_trips.run(round_trips.BREAKS[rule][0], rule, round_trips.LIMIT, quiet=True)
    assert fault not in (None, "LIMIT"), round_trips.BREAKS[rule][1]


@pytest.mark.long
@pytest.mark.parametrize("variant", round_trips.VARIANTS)
def test_what_is_no_rule(variant: str) -> None:
    """What the rules make unnecessary: without it nothing is found either, in the first states of each walk."""
    where, why = round_trips.VARIANTS[variant]
    assert round_trips.run(where, variant, 250_000, quiet=True) in (None, "LIMIT"), why
