"""The analysis of a contest's log, as pure functions: planted faults are found, no run counts for more than it was."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import statistics
import time
import types
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hdrh.histogram import HdrHistogram

from fastlock._cli.console import Refusal
from fastlock.benches import measures, stats
from fastlock.benches.contention import analysis, clients, contests
from fastlock.benches.contention.contests import Contest
from fastlock.benches.contention.log import ATTEMPTS, COUNT, FAILURES, LATE, LOST, MET, Client, Grant, Log, shape_for
from fastlock.benches.contention.workers import Workers
from fastlock.benches.plan import Options, make_plan
from fastlock.benches.rivals import ALONE_ENTRY
from fastlock.benches.session import Measured
from fastlock.benches.stats import Sample

MS = 1_000_000
LEASE = 10_000 * MS
HOT = Contest("threads", 2, 4, 1)


def grant(client: int, called: int, granted: int, releasing: int, released: int = 0, name: int = 0) -> Grant:
    return Grant(client, name, called, called, granted, releasing, released or releasing + 1)


def gave_up(client: int, called: int, now: int, intended: int = 0) -> Grant:
    return Grant(client, 0, intended or called, called, -now, 0, 0)


def findings(records: list[Grant], contest: Contest = HOT, seconds: float = 1.0, **words: int) -> analysis.Findings:
    tallies = [[0] * 8 for _ in range(contest.clients + contest.holders)]
    for record in records:
        tallies[record.client][COUNT] += 1
        tallies[record.client][1] += 1
    for word, value in words.items():
        tallies[0][{"met": MET, "lost": LOST, "late": LATE}[word]] = value
    return analysis.measure(contest, records, tallies, [0] * contest.cells, 0, seconds)


# ------------------------------------------------------------------------------------------------- mutual exclusion


@pytest.mark.parametrize(
    ("records", "found"),
    [
        ([grant(0, 1, 2, 5), grant(1, 1, 6, 9)], 0),
        ([grant(0, 1, 2, 5), grant(1, 1, 5, 9)], 0),  # released at the moment of the grant
        ([grant(0, 1, 2, 5), grant(1, 1, 4, 9)], 1),
        ([grant(0, 1, 2, 5), grant(1, 1, 4, 9, name=1)], 0),  # another name
        ([grant(0, 1, 2, 50), grant(1, 1, 4, 9), grant(2, 1, 20, 30)], 2),  # both within the first
        ([grant(1, 1, 4, 9), grant(0, 1, 2, 5)], 1),  # in any order
        ([Grant(0, 0, 1, 1, 2, 0, 0), grant(1, 1, 4, 9)], 1),  # never released, and its lease lasts
        ([grant(0, 1, 2, 5), gave_up(1, 1, 4)], 0),
    ],
)
def test_overlaps(records: list[Grant], found: int) -> None:
    assert len(analysis.overlaps(records, LEASE)) == found


def test_dead_holder_holds_until_its_lease_ends() -> None:
    dead = Grant(0, 0, 1, 1, 2 * MS, 0, 0)
    lasts = analysis.promise(0.3)
    assert analysis.overlaps([dead, grant(1, 1, lasts, 400 * MS)], lasts)  # before its end
    assert not analysis.overlaps([dead, grant(1, 1, 300 * MS, 400 * MS)], lasts)
    stalled = grant(0, 1, 2 * MS, 900 * MS)
    assert not analysis.overlaps([stalled, grant(1, 1, 310 * MS, 400 * MS)], lasts)


@pytest.mark.parametrize("words", [{"met": 1}, {"lost": 2}, {"met": 1, "lost": 1}])
def test_violations_seen_by_the_cells_count(words: dict[str, int]) -> None:
    found = findings([grant(0, 1, 2, 5), grant(1, 1, 6, 9)], **words)
    assert found.counts["violations"] == max(words.values())
    assert "more than one held" in found.wrong[0]


def test_violation_names_clients_and_time() -> None:
    found = findings([grant(0, 1, 2_000, 50_000), grant(3, 1, 12_000, 60_000)])
    assert found.counts["violations"] == 1
    assert "name 0 granted to client 3, 10 us after client 0" in found.wrong[0]


def test_clean_run_has_no_violation() -> None:
    found = findings([grant(0, 1, 2, 5), grant(1, 1, 6, 9), grant(0, 7, 10, 12)])
    assert (found.counts["violations"], found.wrong) == (0, [])


def test_lost_updates() -> None:
    records = [grant(client, 1, 2 + 10 * client, 5 + 10 * client) for client in range(4)]
    assert analysis.lost_updates(records, [4]) == 0
    assert analysis.lost_updates(records, [3]) == 1
    sale = replace(HOT, books=True)
    assert "4 updates" in findings(records, sale).wrong[0]
    assert findings(records, sale, late=1).wrong == []  # a lease that ended explains the lost update


# ------------------------------------------------------------------------------------- key changes on the server


@pytest.mark.parametrize(
    ("records", "due"),
    [
        ([], 0),
        ([grant(0, 1, 2, 5)], 2),
        ([grant(0, 1, 2, 5), grant(1, 1, 6, 9)], 2),  # to the same process, within which the lease may be handed over
        ([grant(0, 1, 2, 5), grant(2, 1, 6, 9)], 4),  # to another process
        ([grant(0, 1, 2, 5), grant(0, 6, 7, 9)], 4),  # no client hands a lease over to itself
        ([grant(0, 1, 2, 5), grant(0, 6, 7, 9), gave_up(1, 3, 6)], 2),  # another client may have had it in between
        ([grant(0, 1, 2, 5), grant(1, 1, 6, 9, name=1)], 4),
        ([Grant(0, 0, 1, 1, 2, 0, 0), grant(2, 1, 6, 9)], 3),  # never released
    ],
)
def test_key_changes_that_the_server_must_have_made(records: list[Grant], due: int) -> None:
    found = findings(records, replace(HOT, names=2))
    assert found.due_passing_on == due
    assert found.due == sum((record.granted > 0) + (record.released > 0) for record in records)


def test_clients_know_their_process() -> None:
    assert Contest("threads", 2, 5, 1).process_of() == [0, 0, 1, 1, 1]
    assert Contest("threads", 3, 4, 1, role="crash").process_of() == [1, 1, 2, 2, 0]
    assert Contest("tasks", 2, 2, 1, role="storm").process_of() == [0, 1, 0]


# -------------------------------------------------------------------------------------------------------- handovers


def test_punctual_waits() -> None:
    records = [
        grant(0, 0, 1 * MS, 4 * MS),  # 2 ms of overtime, from 2 on
        grant(1, 1 * MS, 4 * MS, 5 * MS),
        grant(2, 3 * MS, 6 * MS, 7 * MS),  # called in the middle of it
        grant(3, 0, 8 * MS, 19 * MS),  # behind the first; then 10 ms of overtime, from 9 on
        Grant(4, 0, 12 * MS, 14 * MS, 20 * MS, 0, 0),  # due in the middle of that, and called awaitable
        gave_up(5, 8 * MS, 16 * MS),  # in its overtime, 7 ms
        grant(6, 0, 5 * MS, 95 * MS, name=1),  # of another name
    ]
    contest = replace(HOT, hold=0.001, blocking_timeout=0.008)
    found = analysis.punctual_waits(records, contest, 100 * MS)
    assert found == [1 * MS, 1 * MS, 2 * MS, 6 * MS, 1 * MS, 1 * MS, 5 * MS]
    assert max(analysis.waits(records, contest, 100 * MS)) == 8 * MS


@pytest.mark.parametrize(
    ("records", "gaps"),
    [
        ([grant(0, 1, 2, 100), grant(1, 50, 130, 200)], [30]),
        ([grant(0, 1, 2, 100), grant(1, 110, 130, 200)], []),  # no client waited: the name was free
        ([grant(0, 1, 2, 100), grant(0, 101, 110, 120), grant(1, 50, 130, 200)], [10]),  # barged; then handed over
        ([grant(0, 1, 2, 100), grant(2, 105, 115, 120), grant(1, 50, 130, 200)], [15, 10]),  # a newcomer was faster
        ([Grant(0, 0, 1, 1, 2, 0, 0), grant(1, 50, 130, 200)], []),  # never released
        ([grant(0, 1, 2, 100), grant(1, 50, 130, 200, name=1)], []),
    ],
)
def test_handovers(records: list[Grant], gaps: list[int]) -> None:
    assert analysis.handovers(records) == gaps


def test_recoveries_count_from_the_end_of_the_dead_lease() -> None:
    victim = Grant(4, 0, 0, 1 * MS, 3 * MS, 0, 0)
    waiter, next_one = grant(0, 5 * MS, 310 * MS, 311 * MS), grant(1, 5 * MS, 400 * MS, 401 * MS)
    assert analysis.recoveries([victim, waiter, next_one], 4, 0.3) == [8 * MS]
    contest = Contest("threads", 3, 4, 1, lease=0.3, laps=1, role="crash")
    found = findings([victim, waiter, next_one], contest)
    assert found.times["recovery"] == [8 * MS]
    assert found.counts["grants"] == 2  # the victim's grant does not count
    assert found.counts["score"] == pytest.approx(125)
    assert found.counts["clients"] == []


@pytest.mark.parametrize(
    ("called", "granted", "found"),
    [
        (5 * MS, 301 * MS, [1 * MS]),  # sooner than a server that counts in milliseconds can tell
        (5 * MS, 302 * MS + MS // 2, [1 * MS]),
        (5 * MS, 304 * MS, [2 * MS]),
        (301 * MS, 304 * MS, [2 * MS]),  # 1 ms before the end
        (303 * MS, 304 * MS, []),  # no client waited when the lease ended
    ],
)
def test_recovery_counts_waiters_and_whole_milliseconds(called: int, granted: int, found: list[int]) -> None:
    victim = Grant(4, 0, 0, 1 * MS, 3 * MS, 0, 0)
    assert analysis.recoveries([victim, grant(0, called, granted, granted + 1)], 4, 0.3) == found


def test_waiters_of_a_crash_come_while_the_lease_lasts() -> None:
    crash = contests.SCENARIOS["crash"].contest
    assert all(0 <= at < crash.lease / 2 * 1e9 for (at,) in clients.arrivals(crash, 7, 0.1))


# ------------------------------------------------------------------------------------------- counts, waits, fairness


def test_late_grants_count_for_waits_and_not_for_the_rate() -> None:
    second = 1_000 * MS
    found = findings([grant(0, 1, 2, 5), grant(1, 1, 2 * second, 3 * second)])
    assert (found.counts["grants"], found.counts["acquired"]) == (1, 2)
    assert found.times["wait"] == [1, 2 * second - 1]
    assert found.counts["clients"] == [1, 0, 0, 0]


def test_waits_that_timed_out_count() -> None:
    limited = replace(HOT, blocking_timeout=0.1)
    found = findings([grant(0, 1, 2, 5), gave_up(1, 10, 10 + 100 * MS), gave_up(2, 10, 20 * MS)], limited)
    assert found.counts["timeouts"] == 2
    assert sorted(found.times["wait"]) == [1, 100 * MS, 100 * MS]  # the other client might have waited as long


def test_early_refusals_count_as_the_full_timeout() -> None:
    served = [grant(0, 10 * at * MS, (10 * at + 1) * MS, (10 * at + 2) * MS) for at in range(1, 40)]
    hasty = [gave_up(1, at * MS, at * MS + MS // 100) for at in range(1, 100)]
    found = findings([*served, *hasty])
    assert found.counts["timeouts"] == 99
    assert statistics.median(found.times["wait"]) == contests.BLOCKING_TIMEOUT * 1e9


def test_waits_cut_off_by_the_end_are_no_timeouts() -> None:
    cut = replace(HOT, cut=True)
    early, looked, late = gave_up(1, 10, 20 * MS), gave_up(2, 10, 950 * MS), gave_up(3, 999 * MS, 1_001 * MS)
    found = findings([early, looked, late], cut)
    assert found.counts["timeouts"] == 1
    assert found.times["wait"] == [1_000 * MS - 10, 1_000 * MS - 10, 2 * MS]
    short = findings([gave_up(1, 10, 10 + 950 * MS)], replace(cut, blocking_timeout=0.95))
    assert short.counts["timeouts"] == 1  # its timeout had ended before the run


def test_try_lock_that_raised_counts_its_time() -> None:
    found = findings([gave_up(1, 10, 20 * MS)], replace(HOT, blocking=False))
    assert found.times["wait"] == [20 * MS - 10]


def test_open_loop_counts_from_the_intended_start() -> None:
    rated = replace(HOT, rate=10.0)
    late = Grant(0, 0, 1 * MS, 50 * MS, 51 * MS, 52 * MS, 53 * MS)
    never = gave_up(1, 70 * MS, 70 * MS, intended=20 * MS)
    found = findings([late, never], rated)
    assert found.times["wait"] == [50 * MS, 50 * MS]
    assert found.counts["timeouts"] == 1
    assert found.counts["score"] == pytest.approx(20)


def test_storm_lasts_from_the_release_to_the_last_grant() -> None:
    contest = Contest("tasks", 1, 3, 1, laps=1, blocking_timeout=2.0, role="storm")
    holder = grant(3, 1, 2, 100 * MS)
    served = [grant(client, 5 + client, (110 + 10 * client) * MS, (112 + 10 * client) * MS) for client in range(3)]
    found = findings([holder, *served], contest)
    assert found.counts["served_seconds"] == found.counts["seconds"] == pytest.approx(0.03)
    assert found.counts["order"] == pytest.approx(1)
    assert found.counts["grants"] == 3
    missing = findings([holder, *served[:2], gave_up(2, 5, 2_000 * MS)], contest)
    assert missing.counts["served_seconds"] is None
    assert (missing.counts["seconds"], missing.counts["timeouts"]) == (2.0, 1)


def test_order_kept() -> None:
    def queue(*granted: int) -> list[Grant]:
        return [grant(client, client + 1, at, at + 1) for client, at in enumerate(granted)]

    assert analysis.order_kept(queue(10, 20, 30, 40)) == pytest.approx(1)
    assert analysis.order_kept(queue(40, 30, 20, 10)) == pytest.approx(-1)
    assert analysis.order_kept(queue(10)) is None
    assert analysis.ranks([5, 1, 5, 9]) == [1.5, 0, 1.5, 3]


@pytest.mark.parametrize(
    ("grants", "index"), [([5, 5, 5, 5], 1.0), ([8, 0, 0, 0], 0.25), ([0, 0], None), ([3, 1], 0.8)]
)
def test_jain(grants: list[int], index: float | None) -> None:
    assert measures.jain(grants) == (index if index is None else pytest.approx(index))


def test_fairness_adds_rounds_up_client_by_client() -> None:
    rounds = [Sample(6, 1, 6, 6, clients=[4, 2]), Sample(6, 1, 6, 6, clients=[0, 6])]
    found = stats.fairness(rounds)
    assert found is not None
    assert (found.grants, found.min_over_max) == ([8, 4], 0.5)
    assert stats.fairness([Sample(6, 1, 6, 6, clients=[6])]) is None


def test_percentiles_are_merged_never_averaged() -> None:
    one, other = [1 * MS] * 99, [100 * MS]
    found = stats.percentiles(stats.merge([stats.encode(one), stats.encode(other)]))
    assert found is not None
    assert found.p50 == pytest.approx(1_000, rel=1e-3)
    assert found.p99 == pytest.approx(1_000, rel=1e-3)  # the mean of the two 99th percentiles would be 50 times that
    assert found.max == pytest.approx(100_000, rel=1e-3)
    assert found.count == 100


def test_histogram_ends_at_a_minute() -> None:
    histogram = HdrHistogram.decode(stats.encode([0, 70_000 * 1_000 * MS]))
    assert histogram.get_total_count() == 2
    assert histogram.get_max_value() == pytest.approx(60e9, rel=1e-2)
    assert stats.encode([]) == ""


# ------------------------------------------------------------------------------------------------------------ noise


def test_noise_is_the_farthest_of_median_and_quartiles() -> None:
    assert stats.noise([1.0, 1.0, 1.0]) == 0
    assert stats.noise([1.1]) == pytest.approx(0.1)
    assert stats.noise([0.5]) == pytest.approx(1.0)
    ratios = [0.9, 1.0, 1.0, 1.0, 1.25]
    assert stats.noise(ratios) == 0
    quartiles = statistics.quantiles([0.8, 0.9, 1.0, 1.1], n=4, method="inclusive")
    assert stats.noise([0.8, 0.9, 1.0, 1.1]) == pytest.approx(max(max(mark, 1 / mark) for mark in quartiles) - 1)
    assert stats.noise([]) is None


def test_noise_of_few_ratios_is_wider_than_their_farthest() -> None:
    assert stats.noise_at([1.0], [1.0]) == 0
    assert stats.noise_at([1.0] * 4, [*[1.0] * 20, 0.5, 1.1]) == pytest.approx(5 / 4)
    assert stats.noise_at([1.0], [1.0, 1.0, 0.5]) == pytest.approx(5)
    assert stats.noise_at([], [1.0, 1.25]) == pytest.approx(5 / 4)  # not measured there yet
    assert stats.noise_at([], []) is None


def test_noise_of_a_point_is_its_own_or_that_of_all() -> None:
    calm, rough = [1.0, 1.0, 1.01, 1.0, 1.0], [0.6, 0.7, 1.0, 1.5, 1.6]
    assert stats.noise_at(rough, calm * 5 + rough) == stats.noise(rough)
    assert stats.noise_at(calm, calm + rough) == stats.noise(calm + rough) > 0


def test_a_stalled_control_makes_the_noise_large() -> None:
    some, none = Sample(100, 1, 100, 100), Sample(0, 1, 0, 0)
    for control, subject in (([some, none], [some, some]), ([some, some], [some, none])):
        found = stats.control_ratios(control, subject)
        width = stats.noise_at(found, found)
        assert width is not None and 100 < width < 1e4
    assert stats.control_ratios([none], [none]) == []
    assert stats.noise([0.0, 0.0, 1.0]) == pytest.approx(stats.FARTHEST - 1)


def test_sweep_marks_each_point_by_its_own_noise() -> None:
    def took(*grants: int) -> list[Sample]:
        return [Sample(number, 1, number, number) for number in grants]

    (stage,) = make_plan(Options(("waiters",), ("fastlock",) * 3, waiters=(1, 4, 16, 64))).stages
    samples = {"fastlock": took(*[100] * 5), "fastlock#3": took(*[150] * 5)}
    calm = samples | {"fastlock#2": took(*[100] * 5)}
    rough = samples | {"fastlock#2": took(60, 90, 100, 160, 170)}
    measured = Measured(stage, "fastlock", "fastlock#2", False, {1: calm, 4: calm, 16: calm, 64: rough})
    assert [measured.rows(x)["fastlock#3"].noisy for x in (1, 4, 16, 64)] == [False, False, False, True]
    assert measured.rows(64)["fastlock#2"].noisy
    assert measured.noise() == measured.noise_at(64) == pytest.approx(0.6)
    assert measured.noise_at(1) == 0


def test_commands_per_grant_are_those_of_the_median_round() -> None:
    """A round in which a client also opened a connection does not count."""
    rounds = [Sample(200, 1, 200, 200, sent=sent) for sent in (600, 606, 600)]
    assert stats.typical(rounds) == stats.summarize("fair", rounds, []).sent_per_grant == 3
    assert stats.typical([*rounds, Sample(200, 1, 200, 200, sent=None)]) is None
    assert stats.typical([*rounds, Sample(0, 1, 0, 0, sent=6)]) is None and stats.typical([]) is None


@pytest.mark.parametrize(("ratio", "noisy"), [(1.05, True), (1 / 1.05, True), (1.2, False), (1 / 1.2, False)])
def test_ratio_inside_the_noise_is_marked(ratio: float, noisy: bool) -> None:
    ours, base = [Sample(int(1000 * ratio), 1, 1, 1)], [Sample(1000, 1, 1, 1)]
    assert stats.summarize("fastlock", ours, base, width=0.1).noisy is noisy
    assert stats.summarize("redis-py", base, base, width=0.1).noisy is None


# -------------------------------------------------------------------------------------------------- clients and the log


@pytest.fixture
def log() -> Iterator[Log]:
    shape = shape_for(clients=2, names=2, seconds=0.01)
    log = Log.create(shape.size)
    log.clear(shape)
    yield log
    log.close()


def written(*clients: Client) -> None:
    for client in clients:
        client.write()


def test_log_can_be_read_after_its_writer_was_killed(log: Log) -> None:
    def write() -> None:
        mapped = Log(log.path, log.shape.size)
        mapped.shape = log.shape
        client = Client(mapped, 1, LEASE)
        client.granted(1, 10, 20, 30)
        client.write()
        os.kill(os.getpid(), signal.SIGKILL)

    child = multiprocessing.get_context("fork").Process(target=write)
    child.start()
    child.join(30)
    assert child.exitcode == -9
    assert list(log.grants(2)) == [Grant(1, 1, 10, 20, 30, 0, 0)]


def test_cells_see_a_second_holder(log: Log) -> None:
    promise = 1 << 61  # the lease lasts, whatever the clock says
    one, other = Client(log, 0, promise), Client(log, 1, promise)
    one.granted(0, 10, 10, 20)
    other.granted(0, 10, 10, 30)
    one.leaving(0)
    one.released(40, 50)
    other.leaving(0)
    other.released(60, 70)
    written(one, other)
    assert (log.tally(1)[MET], log.tally(0)[LOST], log.tally(1)[LOST]) == (1, 1, 0)
    assert len(analysis.overlaps(log.grants(2), promise)) == 1


def test_cells_ignore_overlaps_after_the_end_of_a_lease(log: Log) -> None:
    one, other = Client(log, 0, 100), Client(log, 1, 100)
    one.granted(0, 10, 10, 20)
    other.granted(0, 120, 120, 130)
    one.leaving(0)
    one.released(140, 150)
    written(one, other)
    assert (log.tally(1)[MET], log.tally(0)[LOST], log.tally(0)[LATE]) == (0, 0, 1)


def test_cells_of_another_name_do_not_matter(log: Log) -> None:
    one, other = Client(log, 0, LEASE), Client(log, 1, LEASE)
    one.granted(0, 10, 10, 20)
    other.granted(1, 10, 10, 30)
    written(one, other)
    assert (log.tally(0)[MET], log.tally(1)[MET]) == (0, 0)


def test_client_stops_before_its_log_is_full(log: Log) -> None:
    client = Client(log, 0, LEASE)
    for number in range(log.shape.capacity):
        assert not client.stopped
        client.granted(0, number + 1, number + 1, number + 1)
        client.leaving(0)
        client.released(number + 1, number + 1)
    assert client.stopped and client.full
    written(client)
    assert len(list(log.grants(2))) == log.shape.capacity


class Raises:
    """A lock whose acquire takes a while and raises; for both APIs."""

    def __init__(self, key: str, **options: object) -> None:
        pass

    def acquire(self) -> bool:
        time.sleep(0.002)
        raise ConnectionError("gone")

    def release(self) -> None: ...


class RaisesToTasks(Raises):
    async def acquire(self) -> bool:  # type: ignore[override]
        return super().acquire()


async def awaitable(value: bool) -> bool:
    return value


def gives(key: str, **options: object) -> Any:
    """A lock that is free."""
    return types.SimpleNamespace(acquire=lambda: True, release=lambda: True)


def gives_to_tasks(key: str, **options: object) -> Any:
    return types.SimpleNamespace(acquire=lambda: awaitable(True), release=lambda: awaitable(True))


def run_client(
    log: Log,
    kind: str,
    contest: Contest,
    due: list[int],
    seconds: float,
    thread: Any = Raises,
    task: Any = RaisesToTasks,
    early: clients.Early | None = None,
) -> clients.Job:
    """Run one client, with locks that raise if no others are given."""
    job = clients.Job(Client(log, 0, LEASE), contest, (0,), ("key",), due, seconds, early or clients.Early(0))
    job.begin(time.monotonic_ns())
    if kind == "threads":
        clients.thread_client(job, thread)
    else:
        asyncio.run(clients.task_client(job, task))
    written(job.client)
    return job


def test_sleeps_are_shortened_after_late_wakeups() -> None:
    early = clients.Early(clients.EARLIEST_NS)
    early.watch(time.monotonic_ns() - 1)
    assert early.ns == 4 * clients.STEP_NS and not early.watched
    end = time.monotonic_ns() + 20 * MS
    early.watch(end)
    assert time.monotonic_ns() >= end and early.ns == 3 * clients.STEP_NS and early.watched > 0
    for _ in range(1000):
        early.watch(0)
    assert early.ns == clients.EARLIEST_NS


@pytest.mark.parametrize("kind", ["threads", "tasks"])
@pytest.mark.parametrize("most", [0, clients.EARLIEST_NS])
def test_holds_last_at_least_their_time(log: Log, kind: str, most: int) -> None:
    early = clients.Early(most)
    run_client(log, kind, replace(HOT, hold=0.002, laps=20), [], 1.0, gives, gives_to_tasks, early)
    records = list(log.grants(1))
    assert len(records) == 20 and all(record.releasing - record.granted >= 2 * MS for record in records)
    assert (early.ns + early.watched > 0) is (most > 0)


@pytest.mark.parametrize("kind", ["threads", "tasks"])
@pytest.mark.parametrize("blocking", [True, False])
def test_waits_that_raised_count(log: Log, kind: str, blocking: bool) -> None:
    job = run_client(log, kind, replace(HOT, blocking=blocking), [], 1.0)
    records = list(log.grants(1))
    assert len(records) == log.tally(0)[ATTEMPTS] == log.tally(0)[FAILURES] == clients.MOST_FAILURES
    assert all(-record.granted - record.called >= 2 * MS for record in records)
    assert job.client.errors == ["ConnectionError: gone"] * 3
    found = analysis.measure(HOT, records, [log.tally(0)], [0], job.start, 1.0)
    assert (found.counts["timeouts"], found.counts["failures"]) == (clients.MOST_FAILURES, clients.MOST_FAILURES)


@pytest.mark.parametrize("kind", ["threads", "tasks"])
def test_arrivals_of_a_client_that_gave_up_are_never_served(log: Log, kind: str) -> None:
    due = [at * MS for at in range(0, 400, 10)]
    job = run_client(log, kind, replace(HOT, clients=1, rate=100.0), due, 0.4)
    records = list(log.grants(1))
    assert [record.intended - job.start for record in records] == due
    assert log.tally(0)[FAILURES] == clients.MOST_FAILURES
    never = records[clients.MOST_FAILURES :]
    assert all(analysis.never_asked(record) for record in never)
    # until when the other clients work off their arrivals
    assert {-record.granted - job.start for record in never} == {800 * MS}
    found = analysis.measure(job.contest, records, [log.tally(0)], [0], job.start, 0.4)
    assert found.counts["timeouts"] == found.counts["attempts"] == len(due)
    assert min(found.times["wait"]) > 400 * MS


def test_arrivals_are_the_same_for_every_rival_and_keep_the_rate() -> None:
    rated = replace(HOT, clients=4, rate=4000.0)
    streams = clients.arrivals(rated, 7, 1.0)
    assert streams == clients.arrivals(rated, 7, 1.0)
    assert streams[0] != streams[1] != clients.arrivals(rated, 8, 1.0)[1]
    assert sum(map(len, streams)) == 4000
    assert all(len(stream) == pytest.approx(1000, rel=0.2) for stream in streams)
    assert all(0 <= at < 1e9 for stream in streams for at in stream)
    assert all(stream == sorted(stream) for stream in streams)
    assert clients.arrivals(HOT, 7, 1.0) == [[], [], [], []]


def test_storm_waiters_arrive_before_the_release() -> None:
    storm = contests.SCENARIOS["storm"].contest
    came = sorted(at for (at,) in clients.arrivals(storm, 1, 0.4))
    assert len(came) == storm.clients
    assert 0 <= came[0] < came[-1] < 200 * MS


def test_zipf_prefers_the_first_names() -> None:
    zipf = replace(HOT, names=100, zipf=1.1)
    drawn = clients.choices(zipf, 0, 0, clients.popularity(100, 1.1))
    assert drawn.count(0) > 5 * drawn.count(20) > 0
    even = clients.choices(replace(zipf, zipf=0.0), 0, 0, clients.popularity(100, 0))
    assert even.count(0) < 3 * len(even) / 100
    assert clients.choices(replace(HOT, names=contests.OWN), 3, 0, []) == (3,)


@pytest.mark.parametrize("clients_, processes", [(1, 4), (7, 4), (16, 4), (1000, 4)])
def test_clients_are_spread_evenly(clients_: int, processes: int) -> None:
    contest = Contest("tasks", processes, clients_, 1)
    shares = [contest.share(process) for process in range(contest.workers)]
    assert [client for share in shares for client in share] == list(range(clients_))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert all(shares)


def test_victim_has_a_process_of_its_own() -> None:
    contest = contests.SCENARIOS["crash"].contest
    assert list(contest.share(0)) == []
    assert [client for process in (1, 2) for client in contest.share(process)] == list(range(contest.clients))


# --------------------------------------------------------------------------------------------------------- the plan


def refusal(**options: object) -> str:
    with pytest.raises(Refusal) as refused:
        make_plan(Options(**options))  # type: ignore[arg-type]
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_plan_refuses_contradictory_options() -> None:
    assert "no such rival" in refusal(rivals=("redlock",))
    assert "--hold changes hot" in refusal(scenarios=("pair",), hold=1.0)
    assert "--waiters changes storm, waiters, but not hot" in refusal(scenarios=("hot",), waiters=(5,))
    assert "needs 2 processes" in refusal(scenarios=("handover",), processes=1)
    assert "one rate" in refusal(scenarios=("hot",), rate=(10.0, 20.0))
    assert "no names to choose among" in refusal(scenarios=("hot",), zipf=1.0)
    assert "runs batch only" in refusal(scenarios=("hot",), rivals=("pipeline",))
    assert "runs tasks only" in refusal(scenarios=("hot",), rivals=("valkey-glide",))
    assert "not their own" in refusal(scenarios=("crash",), names=contests.OWN)
    assert "--try changes" in refusal(scenarios=("crash",), try_lock=True)
    assert "arrivals in a run" in refusal(scenarios=("load",), rate=(1e6,), seconds=10.0)
    assert "a name that no other has" in refusal(rivals=("=module",))
    assert "a name that no other has" in refusal(rivals=("redis-py=module",))
    assert "b: a is the name of another module" in refusal(rivals=("a=module.a", "a=module.b"))


@pytest.mark.parametrize("name", ["fastlock#2", "a#2", "a b", "a\n", "\x1b[2J", "caf\u00e9", "\u202ea", "a\x7f"])
def test_plan_refuses_ambiguous_or_unprintable_names(name: str) -> None:
    refused_with = refusal(rivals=(f"{name}=module",))
    assert "ASCII" in refused_with
    assert refused_with.isascii() and refused_with.isprintable()


def test_plan_of_options() -> None:
    options = Options(
        ("hot",), ("fastlock", "fastlock"), processes=2, tasks=8, names=10, zipf=1.1, hold=2.0, rate=(100.0,)
    )
    plan = make_plan(options)
    (stage,) = plan.stages
    contest = stage.specs[0][1].contest
    assert contest is not None
    assert (contest.api, contest.processes, contest.clients, contest.names) == ("tasks", 2, 16, 10)
    assert (contest.zipf, contest.hold, contest.rate) == (1.1, 0.002, 100.0)
    assert [participant.label for participant in plan.participants] == ["fastlock", "fastlock#2"]
    assert plan.as_dict()["hold"] == 2.0


def test_sweeps_use_their_lists() -> None:
    waiters, load = make_plan(Options(("waiters", "load"), waiters=(1, 5), rate=(10.0, 20.0))).stages
    assert [(x, spec.contest.clients) for x, spec in waiters.specs if spec.contest] == [(1, 1), (5, 5)]
    assert [(x, spec.contest.rate) for x, spec in load.specs if spec.contest] == [(10, 10), (20, 20)]
    assert waiters.parameters["waiters"] == [1, 5]
    assert load.parameters["rate"] == [10, 20]


def test_more_waiters_get_more_time() -> None:
    (stage,) = make_plan(Options(("waiters",))).stages
    specs = {x: spec for x, spec in stage.specs if spec.contest}
    assert list(specs) == [1, 10, 100, 1000, 10_000]
    assert specs[10_000].seconds >= specs[10].seconds + 1
    assert [specs[x].contest.blocking_timeout for x in (10, 10_000)] == [1.5, 10]  # type: ignore[union-attr]
    (stage,) = make_plan(Options(("waiters",), seconds=0.2)).stages
    assert {spec.seconds for _, spec in stage.specs} == {0.2}


def test_polling_rivals_skip_the_largest_numbers_of_waiters() -> None:
    plan = make_plan(Options(("waiters",), ("fastlock", "redis-py")))
    for participant in plan.participants:
        assert participant.entry is not None
        workers = Workers(participant.label, "", participant.entry)
        accepted = [x for x, spec in plan.stages[0].specs if spec.contest and workers.accepts(spec.contest)]
        assert accepted == ([1, 10, 100, 1000] if participant.label == "redis-py" else [1, 10, 100, 1000, 10_000])


def test_a_variant_runs_in_its_scenarios_only() -> None:
    (participant,) = make_plan(Options(("hot",), ("fair",))).participants
    assert participant.special
    assert participant.cannot("hot", "threads") == ""
    assert "runs hot, handover" in participant.cannot("zipf", "threads")
    assert "runs hot, handover, storm, waiters only" in refusal(scenarios=("zipf",), rivals=("fair",))
    assert "that no other has" in refusal(rivals=("alone=module",))


def test_reference_holds_alone() -> None:
    workers = Workers("alone", "", ALONE_ENTRY)
    own = workers.own(replace(HOT, hold=0.001))
    assert (own.processes, own.clients, own.hold) == (1, 1, 0.001)


def test_rate_makes_an_open_loop_of_chosen_scenarios_only() -> None:
    stages = {stage.name: stage for stage in make_plan(Options(rate=(100.0,))).stages}
    assert [spec.contest.rate for _, spec in stages["hot"].specs if spec.contest] == [0]
    assert [spec.contest.rate for _, spec in stages["load"].specs if spec.contest] == [100]
