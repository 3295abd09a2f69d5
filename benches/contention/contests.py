"""The scenarios of contention: which clients acquire which names, for how long, how often.

Only values are here. What the command line may change is in ``CHANGES``; all else is as written here, so that two
reports with the same scenario name measured the same.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from ..rivals import LEASE

OWN = 0
"""Instead of a number of names: every client has its own."""

BLOCKING_TIMEOUT = 5.0
"""Seconds for which an acquire waits at most."""

ARRIVING, SERVING = 200e-6, 1e-3
"""Seconds per waiter by which a run of a sweep is longer, so that all waiters arrive within it, and for which each
acquire waits at least."""

EARLY = 0.1
"""Seconds by which a wait may be given up before its end: redis-py's lock gives up where its next try would come too
late, and tries every 100 ms."""

PUBLISHED = {"clients": "lanes", "api": "face", "blocking_timeout": "patience"}
"""The names of fields in results, also in those of earlier versions."""


@dataclass(frozen=True)
class Contest:
    """One contest. Times in seconds; ``clients`` are over all processes.

    api: threads or tasks. names: how many, or OWN; zipf: exponent of their popularity, 0: all alike. blocking_timeout:
    longest wait; cut: no wait goes on after the end of the run. rate: arrivals per second over all clients (open loop),
    0: each client acquires again at once (closed loop). laps: acquires of a client at most, 0: as many as fit. books:
    holders also count in shared memory. role: ``storm`` (a holder releases once all wait) or ``crash`` (the holder is
    killed). asking: arrivals per second, about evenly, of each client but the first, which acquires again at once;
    only the waits of those who ask count. volatile_keys: other keys with an expiry, which must not keep the server from
    ending a lease in time. loop: the module of the tasks' event loop, if it is not asyncio's own.
    """

    api: str
    processes: int
    clients: int
    names: int
    zipf: float = 0.0
    hold: float = 0.0
    lease: float = LEASE
    blocking_timeout: float = BLOCKING_TIMEOUT
    cut: bool = False
    blocking: bool = True
    rate: float = 0.0
    laps: int = 0
    books: bool = False
    role: str = ""
    asking: float = 0.0
    volatile_keys: int = 0
    loop: str = ""

    @property
    def cells(self) -> int:
        """The number of names."""
        return self.names or self.clients

    @property
    def holders(self) -> int:
        """The number of further clients that hold the names before the run begins."""
        return self.cells if self.role else 0

    def deadline(self, called: int, end: int) -> int:
        """The time in nanoseconds until which an acquire may wait, in a run that ends at ``end``."""
        deadline = called + int(self.blocking_timeout * 1e9)
        return min(deadline, max(called, end)) if self.cut else deadline

    def cut_off(self, called: int, now: int, end: int) -> bool:
        """Whether the end of the run ended a wait, and not the lock, nor its blocking timeout."""
        deadline = self.deadline(called, end)
        return deadline < called + int(self.blocking_timeout * 1e9) and now >= deadline - int(EARLY * 1e9)

    @property
    def workers(self) -> int:
        """The number of processes: never more than clients; the victim of a crash has one of its own."""
        return min(self.processes, self.clients + (self.role == "crash"))

    def share(self, process: int) -> range:
        """The clients of one process. Their numbers differ by one at most; the victim's process has none."""
        first = 1 if self.role == "crash" else 0
        if process < first:
            return range(0)
        mine, workers = process - first, self.workers - first
        return range(mine * self.clients // workers, (mine + 1) * self.clients // workers)

    def process_of(self) -> list[int]:
        """The process of each client; the holders of a storm or a crash belong to the first."""
        found = [0] * (self.clients + self.holders)
        for process in range(self.workers):
            for client in self.share(process):
                found[client] = process
        return found

    def as_dict(self) -> dict[str, Any]:
        """The contest as plain values, by the names of the schema."""
        found = {PUBLISHED.get(key, key): value for key, value in asdict(self).items()}
        times = {f"{key}_ms": 1e3 * found.pop(key) for key in ("hold", "lease", "patience")}
        names: int | str = found.pop("names") or "unique"
        for key in ("asking", "volatile_keys", "loop"):  # results in which no scenario had any stay comparable
            if not found[key]:
                del found[key]
        return {**found, "names": names, **times}


@dataclass(frozen=True)
class Scenario:
    """A contest by name, or a sweep of them. ``waiters``, ``rates``: what is swept, in the full and in the quick set.

    seconds, quick_seconds: of one run, or until the kill, or until the release of a storm. quick_rounds: how often,
    None: as the plan says. In the quick set no wait goes on after the end of the run, and ``quick_blocking_timeout`` is
    the longest wait.
    """

    name: str
    kind: str
    title: str
    contest: Contest
    seconds: float = 1.0
    quick_seconds: float = 0.15
    quick_rounds: int | None = None
    quick_blocking_timeout: float = BLOCKING_TIMEOUT
    waiters: tuple[int, ...] = ()
    quick_waiters: tuple[int, ...] = ()
    rates: tuple[float, ...] = ()
    quick_rates: tuple[float, ...] = ()


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("hot", "contention", "all want one name", Contest("threads", 4, 16, 1, hold=0.001)),
        Scenario("zipf", "contention", "many names, few of them popular",
                 Contest("threads", 4, 16, 1000, zipf=1.1, hold=0.0002)),
        Scenario("handover", "contention", "two processes, one name, back and forth", Contest("threads", 2, 2, 1)),
        # So seldom that the name is kept again by then, also through 5 ms: for 16 acquires after a recall it is not
        Scenario("recall", "contention", "one takes a name again and again, another wants it now and then",
                 Contest("threads", 2, 2, 1, hold=0.001, asking=4.0), seconds=5.0, quick_seconds=0.5),
        Scenario("crowd", "contention", "many tasks of one process want one name",
                 Contest("tasks", 1, 100, 1, blocking_timeout=1.5), seconds=0.5, quick_seconds=0.1,
                 quick_blocking_timeout=0.5),
        Scenario("crowd-uvloop", "contention", "the same on uvloop",
                 Contest("tasks", 1, 100, 1, blocking_timeout=1.5, loop="uvloop"), seconds=0.5, quick_seconds=0.1,
                 quick_blocking_timeout=0.5),
        Scenario("crowd-threads", "contention", "many threads of one process want one name",
                 Contest("threads", 1, 16, 1, blocking_timeout=1.5), seconds=0.5, quick_seconds=0.1,
                 quick_blocking_timeout=0.5),
        Scenario("flash-sale", "contention", "buyers of a few articles; each reads the stock, thinks, writes it",
                 Contest("threads", 4, 16, 4, hold=0.0002, books=True)),
        Scenario("crash", "crash", "holders are killed, others wait for the end of their leases",
                 Contest("threads", 3, 8, 4, lease=0.3, laps=1, role="crash", volatile_keys=20_000), seconds=0.1,
                 quick_seconds=0.05, quick_rounds=1),
        Scenario("storm", "contention", "many arrive at a held name, which is then released; each holds once",
                 Contest("tasks", 4, 1000, 1, laps=1, blocking_timeout=4.0, role="storm"), seconds=0.4,
                 quick_seconds=0.2, quick_rounds=1, quick_blocking_timeout=1.0, waiters=(1000,), quick_waiters=(100,)),
        Scenario("waiters", "waiters", "more and more waiters for one name",
                 Contest("tasks", 4, 1, 1, blocking_timeout=1.5), seconds=0.25, quick_seconds=0.15, quick_rounds=1,
                 waiters=(1, 10, 100, 1000, 10_000), quick_waiters=(1, 10, 100)),
        Scenario("load", "load", "more and more arrivals, each client its own name; latency from the intended start",
                 Contest("tasks", 2, 64, OWN), seconds=0.5, quick_seconds=0.15, quick_rounds=1,
                 rates=(500, 1000, 2000, 4000, 8000, 16000), quick_rates=(500, 2000, 8000)),
    )
}  # fmt: skip

CROWDS = ("crowd", "crowd-uvloop", "crowd-threads")

CHANGES = {
    "processes": tuple(SCENARIOS),
    "threads": tuple(SCENARIOS),
    "tasks": tuple(SCENARIOS),
    "names": ("hot", "zipf", "flash-sale", "load", "crash"),
    "zipf": ("hot", "zipf", "flash-sale"),
    "hold": ("hot", "zipf", "handover", "recall", *CROWDS, "flash-sale", "storm", "waiters", "load"),
    "waiters": ("storm", "waiters"),
    "rate": ("hot", "zipf", "flash-sale", "load"),
    "try": ("hot", "zipf", "handover", *CROWDS, "flash-sale", "waiters", "load"),
}
"""Which option of the command line changes which scenarios."""


def points(scenario: Scenario, quick: bool, waiters: tuple[int, ...], rates: tuple[float, ...]) -> tuple[Any, ...]:
    """The points of a sweep, as (x, contest); one pair with x None where nothing is swept."""
    contest = scenario.contest
    if quick:
        longest = min(contest.blocking_timeout, scenario.quick_blocking_timeout)
        contest = replace(contest, cut=not contest.role, blocking_timeout=longest)
    if scenario.kind == "waiters":
        swept = waiters or (scenario.quick_waiters if quick else scenario.waiters)
        longest_of = {number: max(contest.blocking_timeout, number * SERVING) for number in swept}
        return tuple(
            (number, replace(contest, clients=number, blocking_timeout=longest_of[number])) for number in swept
        )
    if scenario.kind == "load":
        offered = rates or (scenario.quick_rates if quick else scenario.rates)
        return tuple((rate, replace(contest, rate=rate)) for rate in offered)
    if scenario.name == "storm":
        contest = replace(contest, clients=max(waiters or (scenario.quick_waiters if quick else scenario.waiters)))
    elif rates:
        contest = replace(contest, rate=rates[0])
    return ((None, contest),)
