"""Statistics: medians with their spread, ratios round by round, percentiles out of merged histograms.

Law: numbers in, numbers out. Percentiles are never averaged (histograms are merged); a ratio is taken between two
rivals of the same round first and the median after, because the machine's mood drifts between rounds.
"""

from __future__ import annotations

import statistics
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hdrh.histogram import HdrHistogram  # type: ignore[import-untyped]

LONGEST = 600_000_000_000
"""Longest lap that a histogram tells apart, in nanoseconds (ten minutes)."""


@dataclass(frozen=True)
class Sample:
    """One rival in one round. Times in seconds, CPU None where not measured; ``histogram`` of its laps, '' for none."""

    pairs: int
    seconds: float
    acquired: int
    released: int
    client_cpu: float | None = None
    server_cpu: float | None = None
    histogram: str = ""

    @property
    def rate(self) -> float:
        """Pairs per second."""
        return self.pairs / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Spread:
    """Median of the rounds, and their lowest and highest."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Row:
    """One rival in one scenario, over all rounds. ``*_us`` in microseconds; CPU per pair; None where not known."""

    rival: str
    rounds: int
    pairs: int
    rate: Spread
    ratio: Spread | None
    p50_us: float | None
    p99_us: float | None
    laps: int
    client_cpu_us: float | None
    server_cpu_us: float | None
    server_cpu_ratio: float | None
    connections: int | None

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def spread(values: Sequence[float]) -> Spread:
    """Median, lowest and highest. Raises statistics.StatisticsError on no values."""
    return Spread(statistics.median(values), min(values), max(values))


def ratios(ours: Sequence[Sample], base: Sequence[Sample]) -> Spread | None:
    """How many times as fast as ``base``, round by round; rounds that only one of them played are left out."""
    pairs = [a.rate / b.rate for a, b in zip(ours, base, strict=False) if b.rate]
    return spread(pairs) if pairs else None


def cpu_per_pair(spent: Sequence[float | None], samples: Sequence[Sample]) -> float | None:
    """Microseconds per pair over all rounds, out of the seconds spent in each; None if any was not measured."""
    known = [seconds for seconds in spent if seconds is not None]
    pairs = sum(sample.pairs for sample in samples)
    return 1e6 * sum(known) / pairs if pairs and len(known) == len(samples) else None


def encode(laps: array[int]) -> str:
    """A histogram of nanoseconds with three digits, as text."""
    histogram = _histogram()
    for lap, count in Counter(laps).items():
        histogram.record_value(min(lap, LONGEST), count)
    return str(histogram.encode(), "ascii")


def merge(encoded: Iterable[str]) -> Any:
    """One histogram out of many encoded ones; empty texts are passed over."""
    histogram = _histogram()
    for text in filter(None, encoded):
        histogram.decode_and_add(text.encode("ascii"))
    return histogram


def _histogram() -> Any:
    return HdrHistogram(1, LONGEST, 3)


def summarize(rival: str, ours: Sequence[Sample], base: Sequence[Sample], connections: int | None) -> Row:
    """The row of one rival; ``base`` are the samples of the baseline (empty: no ratios)."""
    laps = merge(sample.histogram for sample in ours)
    total = laps.get_total_count()
    server = cpu_per_pair([sample.server_cpu for sample in ours], ours)
    base_server = cpu_per_pair([sample.server_cpu for sample in base], base)
    return Row(
        rival=rival,
        rounds=len(ours),
        pairs=sum(sample.pairs for sample in ours),
        rate=spread([sample.rate for sample in ours]),
        ratio=ratios(ours, base),
        p50_us=laps.get_value_at_percentile(50) / 1e3 if total else None,
        p99_us=laps.get_value_at_percentile(99) / 1e3 if total else None,
        laps=total,
        client_cpu_us=cpu_per_pair([sample.client_cpu for sample in ours], ours),
        server_cpu_us=server,
        server_cpu_ratio=server / base_server if base_server and server is not None else None,
        connections=connections,
    )
