"""Statistics: medians with their spread, ratios round by round, percentiles out of merged histograms.

What lives here: functions from numbers to numbers. Percentiles are never averaged (histograms are merged); a ratio is
taken between two rivals of the same round first and the median after, because the speed of the machine drifts between
rounds. Never here: clocks, I/O, printing.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from hdrh.histogram import HdrHistogram  # type: ignore[import-untyped]

from .measures import jain

SHORTEST, LONGEST = 1_000, 60_000_000_000
"""The range of a histogram in nanoseconds: a microsecond to a minute, three digits. Longer times count as a minute."""

FEW = 5
"""The number of ratios below which quartiles say nothing."""

FARTHEST = 1000.0
"""The largest ratio of the control to its subject; also the one that counts where one of the two got nothing."""

TINY = 1e-9
"""The rounding error of a ratio that was computed in two ways."""

KINDS = ("wait", "punctual", "release", "handover", "latency", "recovery")
"""The histograms of a row."""


@dataclass(frozen=True)
class Sample:
    """What was measured of one rival in one round. Times in seconds, CPU and commands None where not measured.

    grants: those within the ``seconds`` of the run, out of which rates are made; acquired, released: all of them, also
    those that ended after it, which is what CPU and commands were spent on. commands: those that the server ran, also
    within scripts; sent: those that the clients sent, as they count them. score: what the ratio compares, if that is
    not the rate. histograms: encoded, by kind. clients: grants of each client.
    """

    grants: int
    seconds: float
    acquired: int
    released: int
    client_cpu: float | None = None
    server_cpu: float | None = None
    commands: int | None = None
    sent: int | None = None
    attempts: int = 0
    failures: int = 0
    timeouts: int = 0
    violations: int = 0
    outlived: int = 0
    score: float | None = None
    served_seconds: float | None = None
    order: float | None = None
    histograms: dict[str, str] = field(default_factory=dict)
    clients: list[int] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Grants per second."""
        return self.grants / self.seconds if self.seconds else 0.0

    @property
    def speed(self) -> float:
        """The number that ratios compare: more is better."""
        return self.rate if self.score is None else self.score

    def as_dict(self) -> dict[str, Any]:
        """The sample as plain values for JSON, without what the row has merged."""
        return {key: value for key, value in asdict(self).items() if key not in ("histograms", "clients")}


@dataclass(frozen=True)
class Spread:
    """The median, the lowest and the highest of the rounds."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Percentiles:
    """Percentiles of one merged histogram, in microseconds."""

    p50: float
    p90: float
    p99: float
    p999: float
    max: float
    count: int


@dataclass(frozen=True)
class Fairness:
    """How evenly the clients were served: 1 is even. ``grants`` of each client over all rounds, most first."""

    jain: float | None
    min_over_max: float | None
    grants: list[int]


@dataclass(frozen=True)
class Row:
    """One rival in one scenario, over all rounds; as the schema in benches/README.md. None: not measured."""

    rival: str
    rounds: int
    grants: int
    rate: Spread | None
    ratio: Spread | None = None
    noisy: bool | None = None
    wait_us: Percentiles | None = None
    punctual_us: Percentiles | None = None
    release_us: Percentiles | None = None
    handover_us: Percentiles | None = None
    latency_us: Percentiles | None = None
    recovery_us: Percentiles | None = None
    fairness: Fairness | None = None
    commands_per_grant: float | None = None
    sent_per_grant: float | None = None
    server_cpu_us: float | None = None
    server_cpu_ratio: float | None = None
    client_cpu_us: float | None = None
    connections: int | None = None
    failures: float | None = None
    timeouts: float | None = None
    violations: int | None = None
    outlived: int | None = None
    served_s: Spread | None = None
    order: float | None = None
    lease_ms: float | None = None
    histograms: dict[str, str | None] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The row as plain values for JSON."""
        return asdict(self)


def spread(values: Sequence[float]) -> Spread:
    """The median, lowest and highest value. Raises statistics.StatisticsError on no values."""
    return Spread(statistics.median(values), min(values), max(values))


def round_ratios(ours: Sequence[Sample], base: Sequence[Sample]) -> list[float]:
    """How many times as fast as ``base``, round by round; rounds that only one of them ran are left out."""
    return [a.speed / b.speed for a, b in zip(ours, base, strict=False) if b.speed]


def ratios(ours: Sequence[Sample], base: Sequence[Sample]) -> Spread | None:
    """The median and spread of the ratios to ``base``, round by round."""
    found = round_ratios(ours, base)
    return spread(found) if found else None


def control_ratios(control: Sequence[Sample], subject: Sequence[Sample]) -> list[float]:
    """Ratios of the control to its subject, round by round: a round in which only one of the two got grants counts as
    the largest ratio, and is not left out."""
    pairs = zip(control, subject, strict=False)
    return [a.speed / b.speed if b.speed else FARTHEST for a, b in pairs if a.speed or b.speed]


def deviation(ratio: float) -> float:
    """How far a ratio lies from 1, either way: of 0.5 and of 2 it is 1."""
    return min(max(ratio, 1 / ratio) if ratio else FARTHEST, FARTHEST) - 1


def noise(found: Sequence[float]) -> float | None:
    """How far ratios of the control lie from 1, at most over their median and quartiles; None without any.

    0.1 means: between 1/1.1 and 1.1 a ratio says nothing.
    """
    marks = statistics.quantiles(found, n=4, method="inclusive") if len(found) > 1 else found
    return max(map(deviation, marks), default=None)


def noise_at(here: Sequence[float], everywhere: Sequence[float]) -> float | None:
    """The noise of one point of a sweep: its own or that of all points together, whichever is more.

    Of fewer than FEW ratios the next one is often the farthest: then the noise of n ratios is FEW / n times how far the
    farthest ratio of all points lies from 1.
    """
    if len(here) < FEW:
        return FEW / max(1, len(here)) * max(map(deviation, everywhere)) if everywhere else None
    return max(noise(here) or 0.0, noise(everywhere) or 0.0)


def inside(ratio: float, width: float) -> bool:
    """Whether a ratio lies inside noise of this width."""
    return deviation(ratio) <= width + TINY


def per_grant(spent: Sequence[float | None], samples: Sequence[Sample]) -> float | None:
    """What was spent per grant, over all rounds; None if any round was not measured."""
    known = [amount for amount in spent if amount is not None]
    grants = sum(sample.acquired for sample in samples)
    return sum(known) / grants if grants and len(known) == len(samples) else None


def typical(samples: Sequence[Sample]) -> float | None:
    """Commands that clients sent per grant, in the median of the rounds: the commands of a round that opened a
    connection are no cost of a lock. None if any round was not counted."""
    found = [sample.sent / sample.acquired for sample in samples if sample.sent is not None and sample.acquired]
    return statistics.median(found) if found and len(found) == len(samples) else None


def encode(times: Iterable[int]) -> str:
    """Encode times in nanoseconds as the text of a histogram with three digits; '' for no times."""
    counted = Counter(times)
    if not counted:
        return ""
    histogram = _histogram()
    for time, count in counted.items():
        histogram.record_value(max(0, min(time, LONGEST)), count)
    return str(histogram.encode(), "ascii")


def merge(encoded: Iterable[str]) -> Any:
    """Merge encoded histograms into one; empty texts are skipped."""
    histogram = _histogram()
    for text in filter(None, encoded):
        histogram.decode_and_add(text.encode("ascii"))
    return histogram


def _histogram() -> Any:
    return HdrHistogram(SHORTEST, LONGEST, 3)


def percentiles(histogram: Any) -> Percentiles | None:
    """The percentiles of a merged histogram, None if it is empty."""
    if not histogram.get_total_count():
        return None
    p50, p90, p99, p999 = (histogram.get_value_at_percentile(at) / 1e3 for at in (50, 90, 99, 99.9))
    return Percentiles(p50, p90, p99, p999, histogram.get_max_value() / 1e3, histogram.get_total_count())


def fairness(samples: Sequence[Sample]) -> Fairness | None:
    """How evenly clients were served, their grants summed over the rounds; None for one client, or if none was
    counted."""
    clients = [sum(counts) for counts in zip(*(sample.clients for sample in samples), strict=True)]
    if len(clients) < 2:
        return None
    most = max(clients)
    return Fairness(jain(clients), min(clients) / most if most else None, sorted(clients, reverse=True))


def _share(part: int, samples: Sequence[Sample]) -> float | None:
    attempts = sum(sample.attempts for sample in samples)
    return part / attempts if attempts else None


def summarize(
    rival: str,
    ours: Sequence[Sample],
    base: Sequence[Sample],
    connections: int | None = None,
    width: float | None = None,
    lease: float | None = None,
) -> Row:
    """Make the row of one rival. ``base``: samples of the baseline (empty: no ratios); ``width``: the noise, if
    known."""
    merged = {kind: merge(sample.histograms.get(kind, "") for sample in ours) for kind in KINDS}
    found = {f"{kind}_us": percentiles(histogram) for kind, histogram in merged.items()}
    ratio = ratios(ours, base)
    server = per_grant([sample.server_cpu for sample in ours], ours)
    base_server = per_grant([sample.server_cpu for sample in base], base)
    client = per_grant([sample.client_cpu for sample in ours], ours)
    contended = any(sample.attempts for sample in ours)
    served = [sample.served_seconds for sample in ours if sample.served_seconds is not None]
    order = [sample.order for sample in ours if sample.order is not None]
    return Row(
        rival=rival,
        rounds=len(ours),
        grants=sum(sample.grants for sample in ours),
        rate=None if found["recovery_us"] else spread([sample.rate for sample in ours]),
        ratio=ratio,
        noisy=None if ratio is None or width is None or ours is base else inside(ratio.median, width),
        **found,
        fairness=fairness(ours),
        commands_per_grant=per_grant([sample.commands for sample in ours], ours),
        sent_per_grant=typical(ours),
        server_cpu_us=None if server is None else 1e6 * server,
        server_cpu_ratio=server / base_server if base_server and server is not None else None,
        client_cpu_us=None if client is None else 1e6 * client,
        connections=connections,
        failures=_share(sum(sample.failures for sample in ours), ours),
        timeouts=_share(sum(sample.timeouts for sample in ours), ours),
        violations=sum(sample.violations for sample in ours) if contended else None,
        outlived=sum(sample.outlived for sample in ours) if contended else None,
        served_s=spread(served) if len(served) == len(ours) > 0 else None,
        order=statistics.median(order) if order else None,
        lease_ms=None if lease is None else 1e3 * lease,
        histograms={
            kind: str(histogram.encode(), "ascii") if histogram.get_total_count() else None
            for kind, histogram in merged.items()
        },
    )
