"""What the charts of a benchmark page rest on: numbers as text, axes, curves from histograms, shares of grants.

All of it is arithmetic: values in, values out, every expectation exact.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from hdrh.histogram import HdrHistogram
from support import results

from fastlock.benches import written
from fastlock.benches.page import charts, figure
from fastlock.benches.page.histograms import PER_DECADE, Unreadable, curve

# ------------------------------------------------------------------------------------------------------------ numbers


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((None, "—"), (0, "0.00"), (0.058, "0.058"), (4.314, "4.31"), (9.996, "10.0"), (24.54, "24.5")),
        *((99.96, "100"), (4310, "4,310")),
    ],
)
def test_three_digits(value: float | None, text: str) -> None:
    assert written.significant(value) == text


@pytest.mark.parametrize(
    ("us", "text"),
    [
        *((None, "—"), (0, "0 µs"), (0.5, "0.50 µs"), (42, "42.0 µs"), (999.4, "999 µs"), (999.6, "1.00 ms")),
        (2_500_000, "2.50 s"),
    ],
)
def test_durations(us: float | None, text: str) -> None:
    assert written.duration(us) == text


def test_axis_labels() -> None:
    assert [written.percentile(nine) for nine in range(6)] == ["0", "90", "99", "99.9", "99.99", "99.999"]


def test_shares_and_ratios() -> None:
    assert [written.share(part) for part in (None, 0, 0.00001, 0.0123, 1)] == [
        "—",
        "0 %",
        "< 0.01 %",
        "1.23 %",
        "100 %",
    ]
    row = {"ratio": {"median": 1.02, "low": 0.9, "high": 1.1}, "noisy": True}
    assert (written.ratio(row), written.ratio({}), written.spread(row["ratio"])) == (
        "1.02 ≈",
        "—",
        "0.90 \N{EN DASH} 1.10",
    )
    assert written.ratio({"ratio": {"median": 1, "low": 1, "high": 1}, "noisy": True}) == "1"


# ------------------------------------------------------------------------------------------------------ axes and names


def test_time_axis_is_labelled_more_closely_where_it_is_short() -> None:
    assert figure.time_axis([0.001, 0.05, 0])["dtick"] == "D2"
    assert "dtick" not in figure.time_axis([0.001, 0.1])
    assert "dtick" not in figure.time_axis([])
    assert figure.UNITS["50m"] == "50ms"


def test_names_fit_and_are_no_markup() -> None:
    assert figure.plain("<b>&") == "&lt;b&gt;&amp;"
    assert figure.plain("a name that is much too long") == "a name that is mu\N{HORIZONTAL ELLIPSIS}"


def test_all_charts_share_one_look() -> None:
    drawn = figure.chart([], 100, hovermode="closest").to_plotly_json()
    del drawn["layout"]["template"]  # as the page does
    assert drawn["layout"] == {"height": 100, "hovermode": "closest"}
    assert figure.look()["layout"]["font"]["color"] == "var(--ink)"


# ------------------------------------------------------------------------------------------------------------- curves


def encoded(*nanoseconds: int) -> str:
    return results.histogram([value / 1000 for value in nanoseconds])


def test_curve_is_that_of_the_histogram() -> None:
    text = encoded(*(1000 * number for number in range(1, 1001)))
    ours, theirs = curve(text, "x"), HdrHistogram.decode(text)
    assert ours is not None
    for calls, seconds in zip(ours.calls[1:], ours.slowest[1:], strict=True):
        assert seconds == theirs.get_value_at_percentile(100 * (1 - 1 / calls) if calls < 1000 else 100) / 1e9
    assert (ours.calls[0], ours.calls[-1]) == (1, 1000)
    assert ours.told.endswith("of 1,000")


def test_curve_runs_from_the_fastest_to_the_slowest() -> None:
    ours = curve(encoded(*[1000] * 900, *[2000] * 90, *[50_000] * 10), "x")
    assert ours is not None
    at = dict(zip(map(round, ours.calls, [6] * 999), ours.slowest, strict=False))
    after = round(10 ** (1 + 1 / PER_DECADE), 6)
    assert [at[calls] for calls in (1, 10, after, 100, 1000)] == pytest.approx([1e-6, 1e-6, 2e-6, 2e-6, 5e-5], rel=1e-3)
    assert ours.slowest == sorted(ours.slowest)
    assert ours.told == "p50 1.00 \N{MICRO SIGN}s, p99 2.00 \N{MICRO SIGN}s, longest 50.0 \N{MICRO SIGN}s of 1,000"


def test_curve_of_one_call_and_of_none() -> None:
    ours = curve(encoded(1500), "x")
    assert ours is not None
    assert (ours.calls, ours.slowest) == ([1], [1.5e-6])
    assert curve(encoded(), "x") is None


@pytest.mark.parametrize("text", ["", "abc", "HISTFAAAAAA=", "Ä", encoded(1, 2, 3)[:-8]])
def test_what_is_no_histogram(text: str) -> None:
    with pytest.raises(Unreadable, match=r"^fastlock, wait: "):
        curve(text, "fastlock, wait")


# ----------------------------------------------------------------------------------------------------------- fairness


def test_grants_against_an_equal_share() -> None:
    assert charts.against_fair([1, 3, 0]) == [2.25, 0.75, 0]
    assert charts.against_fair([0, 0]) == charts.against_fair([]) == []
    assert charts.sampled([1, 2]) == [1, 2]
    most = charts.sampled(range(1000))
    assert (len(most), most[0], most[-1]) == (charts.STEPS, 0, 999)


def fair(grants: list[float]) -> Any:
    found = charts.fairness({"a": {"fairness": {"grants": grants}}}, figure.styles_of(["a"]))
    assert found is not None
    return found.chart


def test_fairness_is_linear_until_one_waiter_takes_it_all() -> None:
    even, greedy = fair([3, 1, 0]), fair([random.Random(1).random() / 1000 for _ in range(99)] + [1000.0])
    assert (even.layout.yaxis.type, even.layout.yaxis.rangemode) == (None, "tozero")
    assert (list(even.data[0].x), list(even.data[0].y)) == ([0, 0.33333, 0.66667, 1], [2.25, 0.75, 0, 0])
    assert (greedy.layout.yaxis.type, min(greedy.data[0].y)) == ("log", charts.STARVED)
