"""The basis of the plots on a benchmark page: axes and their ticks, numbers as text, curves from histograms.

All of it is arithmetic: values in, values out, every expectation exact.
"""

from __future__ import annotations

import pytest
from hdrh.histogram import HdrHistogram
from support import results

from fastlock.benches import written
from fastlock.benches.page import curves, plots, scales, sweeps
from fastlock.benches.page.curves import Recorded
from fastlock.benches.page.scales import Scale

# --------------------------------------------------------------------------------------------------------------- axes


def test_linear_scale() -> None:
    scale = Scale(0, 10, 100, 0)
    assert [scale.place(value) for value in (0, 2.5, 10, -1, 99)] == [100, 75, 0, 100, 0]


def test_logarithmic_scale() -> None:
    scale = Scale(1, 1000, 0, 300, log=True)
    assert [round(scale.place(value), 9) for value in (1, 10, 100, 1000, 0, 1e9)] == [0, 100, 200, 300, 0, 300]


def test_scale_of_one_value_puts_it_in_the_middle() -> None:
    assert Scale(7, 7, 0, 100, log=True).place(7) == 50


@pytest.mark.parametrize(("share", "place"), [(0, 0), (0.9, 1), (0.99, 2), (0.999, 3), (0.5, 0.30103)])
def test_nines(share: float, place: float) -> None:
    assert scales.nines(share) == pytest.approx(place, abs=1e-5)
    assert scales.share(place) == pytest.approx(share, abs=1e-5)


@pytest.mark.parametrize(
    ("value", "down", "up"),
    [(1, 1, 1), (1.01, 1, 2), (3, 2, 5), (5, 5, 5), (7, 5, 10), (99, 50, 100), (0.03, 0.02, 0.05), (1000, 1000, 1000)],
)
def test_round_numbers(value: float, down: float, up: float) -> None:
    assert scales.round_down(value) == pytest.approx(down)
    assert scales.round_up(value) == pytest.approx(up)


@pytest.mark.parametrize(
    ("values", "bounds"),
    [([], (1, 10)), ([0], (1, 10)), ([42], (20, 200)), ([3, 800], (2, 1000)), ([0, 10, 100], (10, 100))],
)
def test_logarithmic_bounds(values: list[float], bounds: tuple[float, float]) -> None:
    assert scales.log_bounds(values) == pytest.approx(bounds)


def test_logarithmic_ticks() -> None:
    assert scales.log_ticks(20, 100_000) == [100, 1000, 10_000, 100_000]
    assert scales.log_ticks(20, 500) == [20, 50, 100, 200, 500]
    assert scales.minor_ticks(1, 10) == [1, 2, 5, 10]


@pytest.mark.parametrize(
    ("high", "ticks"),
    [(0, [0, 1]), (1, [0, 0.2, 0.4, 0.6, 0.8, 1]), (18_632, [0, 5000, 10_000, 15_000, 20_000]), (7, [0, 2, 4, 6, 8])],
)
def test_even_ticks(high: float, ticks: list[float]) -> None:
    assert scales.even_ticks(high) == pytest.approx(ticks)


def test_thinned_ticks_keep_both_ends() -> None:
    assert scales.thinned([0, 10, 20, 30, 40], 20) == [0, 2, 4]
    assert scales.thinned([0, 10, 20, 30], 20) == [0, 3]
    assert scales.thinned([5], 20) == [0]
    assert scales.thinned([], 20) == []


def test_axis_of_waiters_is_labelled_at_measured_points() -> None:
    axis = sweeps.measured_axis([1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024], "waiters")
    assert [label for _, label in axis.ticks] == ["1", "4", "16", "64", "256", "1,024"]


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
    assert [written.tick(us) for us in (0.5, 1, 100, 1000, 20_000, 1e6)] == [
        "0.5 µs",
        "1 µs",
        "100 µs",
        "1 ms",
        "20 ms",
        "1 s",
    ]
    assert [written.short(value) for value in (0, 500, 20_000, 1_500_000)] == ["0", "500", "20k", "1.5M"]
    assert [written.place(value) for value in (1, 1024, 16_000, 12_345)] == ["1", "1,024", "16k", "12.3k"]
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


# ------------------------------------------------------------------------------------------------------------- curves


def encoded(*nanoseconds: int) -> str:
    return results.histogram([value / 1000 for value in nanoseconds])


def test_percentiles_are_those_of_the_histogram() -> None:
    text = encoded(*(1000 * number for number in range(1, 1001)))
    ours, theirs = curves.decode(text, "x"), HdrHistogram.decode(text)
    for percentile in (0, 1, 50, 90, 99, 99.9, 100):
        expected = theirs.get_value_at_percentile(percentile) / 1e3 if percentile else ours.values[0]
        assert ours.at(percentile / 100) == expected
    assert ours.count == 1000


def test_curve_runs_from_the_fastest_to_the_slowest() -> None:
    curve = curves.by_percentile(Recorded([1.0, 2.0, 50.0], [900, 990, 1000]))
    assert curve[0] == (0, 1.0)
    assert curve[-1] == (pytest.approx(3), 50.0)
    at = dict(curve)
    assert (at[1], at[1 + 1 / curves.PER_NINE], at[2], at[2 + 1 / curves.PER_NINE]) == (1.0, 2.0, 2.0, 50.0)
    assert [us for _, us in curve] == sorted(us for _, us in curve)


def test_curve_of_one_call_and_of_none() -> None:
    assert curves.by_percentile(curves.decode(encoded(1500), "x")) == [(0, 1.5)]
    assert curves.by_percentile(curves.decode(encoded(), "x")) == []


@pytest.mark.parametrize("text", ["", "abc", "HISTFAAAAAA=", "Ä", encoded(1, 2, 3)[:-8]])
def test_unreadable_histograms_are_named(text: str) -> None:
    with pytest.raises(curves.Unreadable, match=r"^fastlock, wait: "):
        curves.decode(text, "fastlock, wait")


def test_grants_against_an_equal_share() -> None:
    assert curves.against_fair([1, 3, 0]) == [2.25, 0.75, 0]
    assert curves.against_fair([0, 0]) == curves.against_fair([]) == []
    assert curves.steps([2.0, 1.0]) == [(0, 2.0), (0.5, 2.0), (0.5, 1.0), (1, 1.0)]
    assert curves.sampled(range(1000), 5) == [0, 250, 500, 749, 999]
    assert curves.sampled([1, 2], 5) == [1, 2]


def test_fairness_axis_is_linear_unless_one_client_dominates() -> None:
    assert plots.fair_axis(2.25).kind == "linear"
    greedy = plots.fair_axis(64)
    assert (greedy.kind, greedy.ticks[0]) == ("log", (0.01, "≤ 0.01"))
