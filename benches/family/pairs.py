"""The first part: a pair of acquire and release that nobody contends, of each kind and of what users have today.

One process for each case, one after the other in each round; on this machine, and through a network. A ratio is that of
the times of a pair to the plain lock's, taken within a round; the plain lock runs twice, for the noise.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any

from ..raw import RawSocket
from ..relay import Relay, why_not
from ..stats import Spread, inside, noise_at, spread
from ..workers import WorkerProcess
from .cases import CONTROL, MULTI_3, NO_RIVAL, PAIRS, PLAIN, PLAIN_3
from .session import Session, rotated

HERE, NETWORK = "here", "network"

WARM_UP = 0.05
PING_SECONDS = 0.03


@dataclass(frozen=True)
class Sample:
    """One run: seconds of a pair, on average; percentiles in nanoseconds; commands sent, None where nobody counts."""

    pair: float
    pairs: int
    p50: float
    p99: float
    sent: int | None


@dataclass(frozen=True)
class PairRow:
    """One case at one place. us: of a pair, median and range of the rounds. ratio: to the plain lock; noisy: whether it
    lies inside the noise. per_name: of a lock on three names, to three plain pairs. trips: the time of a pair in round
    trips, of the network only. sent: commands that a pair takes, of libraries that count them."""

    api: str
    place: str
    case: str
    us: Spread
    p50_us: float
    p99_us: float
    ratio: Spread | None
    noisy: bool | None
    per_name: Spread | None
    trips: float | None
    sent: float | None
    rounds: int


@dataclass
class PairPart:
    """What was measured: samples by API, place and case; seconds of round trips, by API and place."""

    samples: dict[tuple[str, str], dict[str, list[Sample]]] = field(default_factory=dict)
    round_trips: dict[tuple[str, str], list[float]] = field(default_factory=dict)

    def round_trip_us(self, api: str, place: str) -> float | None:
        """The round trip of a PING over a bare socket; None: it was not measured."""
        found = self.round_trips.get((api, place))
        return 1e6 * statistics.median(found) if found else None

    def noise(self, api: str, place: str) -> float | None:
        """How far the second plain lock is from the first."""
        samples = self.samples.get((api, place), {})
        found = ratios(samples.get(CONTROL, []), samples.get(PLAIN, []))
        return noise_at(found, found)

    def rows(self, api: str, place: str) -> list[PairRow]:
        """The rows of a table, in the order of the cases; the control has none."""
        samples = self.samples.get((api, place), {})
        return [self._row(api, place, name, found, samples) for name, found in samples.items() if found]

    def _row(
        self, api: str, place: str, name: str, ours: Sequence[Sample], samples: dict[str, list[Sample]]
    ) -> PairRow:
        plain, width, trip = samples.get(PLAIN, []), self.noise(api, place), self.round_trip_us(api, place)
        ratio = spread(found) if (found := ratios(ours, plain)) else None
        three = ratios(ours, samples.get(PLAIN_3, [])) if name == MULTI_3 else []
        times = spread([1e6 * sample.pair for sample in ours])
        known = [sample.sent / sample.pairs for sample in ours if sample.sent is not None]
        return PairRow(
            api=api,
            place=place,
            case=name,
            us=times,
            p50_us=statistics.median(sample.p50 for sample in ours) / 1e3,
            p99_us=statistics.median(sample.p99 for sample in ours) / 1e3,
            ratio=ratio,
            noisy=None if ratio is None or width is None or name == PLAIN else inside(ratio.median, width),
            per_name=spread(three) if three else None,
            trips=times.median / trip if trip and place == NETWORK else None,
            sent=statistics.median(known) if known else None,
            rounds=len(ours),
        )

    def as_list(self) -> list[dict[str, Any]]:
        """The rows as plain values, with what their table has in common."""
        return [
            {
                "api": api,
                "place": place,
                "round_trip_us": self.round_trip_us(api, place),
                "noise": self.noise(api, place),
                "rows": [asdict(row) for row in self.rows(api, place)],
            }
            for api, place in self.samples
        ]


def ratios(ours: Sequence[Sample], base: Sequence[Sample]) -> list[float]:
    """Times of a pair as multiples of those of `base`, round by round."""
    return [a.pair / b.pair for a, b in zip(ours, base, strict=False)]


def measure(session: Session, part: PairPart) -> None:
    """Measure the pairs of all cases, and note the samples in `part` as they come."""
    session.skipped[NO_RIVAL] = "there is nothing to measure"
    session.show("pairs", "starting", 0)
    with ExitStack() as stack:
        places = {HERE: session.target.url}
        why = why_not(session.target.url)
        if session.settings.rtt and not why:
            relay = Relay(session.target.url)
            stack.callback(relay.close)
            relay.hold_back(session.settings.rtt)  # exactly: only ratios are told, and no pair is faster than that
            places[NETWORK] = relay.url
        elif session.settings.rtt:
            session.skipped["the pairs through a network"] = why
        workers = session.start(PAIRS)
        for number, api in enumerate(session.settings.apis):
            for place, url in places.items():
                _measure_at(session, part, workers, api, place, url, number / len(session.settings.apis))
            session.disconnect(workers.values())
        session.finish(workers.values(), "pairs")


def _measure_at(
    session: Session,
    part: PairPart,
    workers: dict[str, list[WorkerProcess]],
    api: str,
    place: str,
    url: str,
    done: float,
) -> None:
    samples = part.samples[api, place] = {case.name: [] for case in PAIRS if case.name in workers and api in case.apis}
    for name in list(samples):
        session.show("pairs", f"{api}, {place}, warm-up, {name}", done)
        if not _opened(session, workers[name][0], name, api, place, url):
            del samples[name]
    running = {name: workers[name][0] for name in samples}
    for number in range(session.settings.rounds):
        part.round_trips.setdefault((api, place), []).extend(_round_trip(url))
        for name in [each for each in rotated(list(samples), number) if each in running]:
            session.show("pairs", f"{api}, {place}, round {number + 1}, {name}", done)
            if not _measured(session, running[name], name, api, place, samples[name]):
                del running[name]


def _opened(session: Session, worker: WorkerProcess, name: str, api: str, place: str, url: str) -> bool:
    """Connect and warm up. False: the case is out."""
    label, permits = f"{session.prefix}:pairs", session.settings.permits

    def warm_up() -> bool:
        worker.ask("open", name=place, case=name, api=api, url=url, label=label, permits=permits)
        worker.ask("pairs", name=place, key=_key(session, name), seconds=min(WARM_UP, session.settings.seconds))
        return True

    return bool(session.attempt(f"pairs, {api}, {place}, {name}", warm_up))


def _measured(session: Session, worker: WorkerProcess, name: str, api: str, place: str, samples: list[Sample]) -> bool:
    """Make one run. False: the case is out."""

    def run() -> bool:
        worker.order("pairs", name=place, key=_key(session, name), seconds=session.settings.seconds)
        found = worker.answer(session.settings.seconds + 60)
        if found["errors"] or not found["pairs"]:
            raise RuntimeError("; ".join(found["errors"]) or "no pair was made")
        if not found["acquired"] == found["released"] == found["pairs"]:
            raise RuntimeError(f"{found['acquired']} acquired, {found['released']} released, {found['pairs']} claimed")
        pair = found["seconds"] / found["pairs"]
        samples.append(Sample(pair, found["pairs"], found["p50"], found["p99"], found["sent"]))
        return True

    return bool(session.attempt(f"pairs, {api}, {place}, {name}", run))


def _key(session: Session, name: str) -> str:
    return f"{session.prefix}:{name.replace(' ', '-')}"


def _round_trip(url: str) -> list[float]:
    """Seconds of a round trip over a bare socket, in the median."""
    ping = RawSocket(url)
    try:
        return [statistics.median(ping.ping_pairs(PING_SECONDS)) / 2e9]
    finally:
        ping.close()
