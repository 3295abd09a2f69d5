"""`fastlock bench family` on real servers, each part in tiny size; its arithmetic on its own. No speed is judged."""

from __future__ import annotations

import argparse
import importlib.util
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import redis

from fastlock import embedded
from fastlock._cli import console
from fastlock.benches import cli
from fastlock.benches.family import cases, command, contests, judge, pairs, renewals, report
from fastlock.benches.family.document import SCHEMA, SHAPE
from fastlock.benches.family.exclusion import Record, most_together, records, violations
from fastlock.benches.family.session import Session, rotated
from fastlock.benches.stats import Spread
from fastlock.benches.target import Target

TINY = ("--rounds", "1", "--seconds", "0.02")
MS = 1_000_000


def arguments(*args: str) -> list[str]:
    return [sys.executable, "-m", "fastlock", "bench", *args]


def family(folder: Path, *args: str) -> tuple[int, dict[str, Any], str]:
    """Run it outside of the source tree: exit code, JSON document, the tables."""
    words = arguments("family", "--quick", "--json", "-", *args)
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=55)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout), done.stderr


def parsed(*args: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return parser.parse_args(args)


def nothing_is_left(db: redis.Redis) -> None:
    keys: Any = db.keys("*")
    assert [key for key in keys if b"fastlock-bench" in key] == [] and db.get("somebody-else") == b"stays"


def there(case: cases.Case) -> bool:
    return case.needs is None or importlib.util.find_spec(case.needs[0]) is not None


# ------------------------------------------------------------------------------------------------------- whole runs


@pytest.mark.long
def test_pairs(measurable: None, shared: embedded.Server, db: redis.Redis, tmp_path: Path) -> None:
    code, document, text = family(tmp_path, "--part", "pairs", *TINY, "--url", shared.url)
    assert (code, document["failures"], document["schema"]) == (0, [], SCHEMA)
    SHAPE.validate_python(document)
    tables = {(each["api"], each["place"]): each for each in document["pairs"]}
    assert list(tables) == [(api, place) for api in ("threads", "tasks") for place in ("here", "network")]
    for (api, place), table in tables.items():
        rows = {row["case"]: row for row in table["rows"]}
        assert rows.keys() == {case.name for case in cases.PAIRS if api in case.apis and there(case)}
        assert rows[cases.PLAIN]["ratio"]["median"] == 1 and table["noise"] is not None
        sent = {case: rows[case]["sent"] for case in (cases.PLAIN, cases.REENTRANT, cases.MULTI_3, cases.PLAIN_3)}
        assert sent == {cases.PLAIN: 2, cases.REENTRANT: 2, cases.MULTI_3: 2, cases.PLAIN_3: 6}
        assert rows[cases.INNER]["sent"] == 0, "to enter again takes no command"
        assert rows[cases.MULTI_3]["per_name"]["median"] > 0
        if place == "network":
            assert table["round_trip_us"] > 1000 and rows[cases.PLAIN]["trips"] > 0
            least = {cases.PLAIN: 2000, cases.MULTI_3: 2000, cases.PLAIN_3: 6000, cases.REDIS_PY: 2000}
            assert all(rows[case]["us"]["low"] >= us for case, us in least.items())
    assert "left out: a read-write lock of others" in text and "network of 1 ms" in text
    nothing_is_left(db)


@pytest.mark.long
def test_contention(measurable: None, shared: embedded.Server, db: redis.Redis, tmp_path: Path) -> None:
    sizes = ("--processes", "2", "--readers", "4", "--writers", "2", "--callers", "4", "--permits", "2")
    code, document, text = family(
        tmp_path, "--part", "contention", *TINY, *sizes, "--seconds", "0.3", "--url", shared.url
    )
    assert (code, document["failures"]) == (0, [])
    rows = {(row["api"], row["contest"], row["case"]): row for row in document["contention"]}
    kinds = {"readers and writers": contests.READING, "permits": contests.LIMITING}
    assert rows.keys() == {
        (api, kind, case.name) for api in ("threads", "tasks") for kind, each in kinds.items() for case in each
    }
    for (api, kind, case), row in rows.items():
        sides = {side["side"]: side for side in row["sides"]}
        if kind == "permits":
            assert sides["callers"]["clients"] == 4 and row["of_ideal"] > 0
        else:
            assert (sides["readers"]["clients"], sides["writers"]["clients"]) == (4, 2)
        if case != cases.ZSET:
            most = 2 if kind == "permits" else 4 if case in contests.SHARING else 1
            assert row["violations"] == 0 and 1 <= row["together"] <= most, (api, case)
        assert row["held_ms"] >= 1
    assert "too many" in text
    nothing_is_left(db)


def test_renewal(measurable: None, shared: embedded.Server, db: redis.Redis, tmp_path: Path) -> None:
    sizes = ("--leases", "250", "--lease", "0.9")
    code, document, _ = family(tmp_path, "--part", "renewal", *sizes, "--check", "--url", shared.url)
    assert document["failures"] == []
    rows = {(row["api"], row["case"]): row for row in document["renewal"]}
    assert rows.keys() == {(api, case.name) for api in ("threads", "tasks") for case in cases.RENEWING}
    for (api, case), row in rows.items():
        assert row["cpu_scaled"] > 0
        in_time = row["lost"] == 0 and row["renewals"] >= 2 * row["leases"]
        if case == cases.RENEWED:
            assert in_time and row["leases"] == 250
            assert 0.7 <= row["per_renewal"] < 10 and 0 < row["shortest"] <= 0.9
        else:  # on a busy machine its hundred timers come too late
            noted = [note for note in document["notes"] if note.startswith(f"renewal, {api}, {case}: ")]
            assert in_time is not bool(noted), noted
            assert row["leases"] == 100 and row["shortest"] is None
            assert row["per_renewal"] == (pytest.approx(100) if row["renewals"] else None), api
    names = [verdict["name"] for verdict in document["budgets"]]
    assert len(names) == 4 and all("10,000 leases" in name for name in names)
    assert code == (0 if all(verdict["met"] for verdict in document["budgets"]) else 1)
    nothing_is_left(db)


def test_ctrl_c_prints_what_was_measured(
    measurable: None, shared: embedded.Server, db: redis.Redis, tmp_path: Path
) -> None:
    words = arguments("family", "--part", "renewal", "--api", "threads", "--leases", "50", "--lease", "30")
    with subprocess.Popen(
        [*words, "--url", shared.url], cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as run:
        until = time.monotonic() + 30
        while not db.keys("fastlock-bench:*:renewal:49"):
            assert time.monotonic() < until, "no lease is acquired"
            time.sleep(0.01)
        run.send_signal(signal.SIGINT)
        stdout, _ = run.communicate(timeout=20)
    assert run.returncode == 130 and "interrupted" in stdout
    nothing_is_left(db)


# ----------------------------------------------------------------------------------------------------- the options


def test_options_may_stand_before_the_word_family() -> None:
    assert command.settings_of(parsed("--quick", "--rounds", "2", "family")) == command.settings_of(
        parsed("family", "--quick", "--rounds", "2")
    )
    full = command.settings_of(parsed("family"))
    assert (full.leases, full.lease, full.readers, full.writers, full.permits) == (10_000, 30, 64, 4, 8)
    assert (full.parts, full.apis) == (("pairs", "contention", "renewal"), ("threads", "tasks"))
    assert full.rounds == 5 and full.periods * full.lease / 3 >= 30


@pytest.mark.parametrize(
    "args", [("--rival", "fastlock", "family"), ("--html", "a.html", "family"), ("--try", "family")]
)
def test_options_of_the_other_benchmark_are_refused(args: tuple[str, ...]) -> None:
    with pytest.raises(console.Refusal, match=r"is for fastlock bench"):
        cli.run(parsed(*args))


def test_a_server_is_named_or_started() -> None:
    with pytest.raises(console.Refusal, match="exclude each other"):
        cli.run(parsed("family", "--url", "redis://localhost:1", "--server", "valkey-server"))


# ---------------------------------------------------------------------------------------------------- the judgement


def held(start: int, end: int, writes: int = 0) -> Record:
    return Record(writes, (start + 1) * MS - 1, (start + 1) * MS, (end + 1) * MS, (end + 1) * MS + 1)


@pytest.mark.parametrize(
    ("found", "most", "wrong"),
    [
        ([held(0, 5), held(1, 4), held(2, 3)], None, 0),
        ([held(0, 5), held(5, 6, 1), held(6, 7)], None, 0),
        ([held(0, 5), held(4, 6, 1)], None, 1),
        ([held(0, 5, 1), held(4, 6)], None, 1),
        ([held(0, 5, 1), held(4, 6, 1)], None, 1),
        ([held(0, 5), held(1, 4), held(2, 3)], 2, 1),
        ([held(0, 5), held(1, 4), held(4, 6)], 2, 0),
        ([held(0, 5), held(1, 4)], 1, 1),
        ([held(0, 30_000), held(20_000, 21_000, 1)], None, 0),
        ([Record(1, 0, 0, 9 * MS, 0), held(1, 2)], None, 0),
    ],
    ids=[
        *(
            "readers-together",
            "in-turns",
            "writer-meets-reader",
            "reader-meets-writer",
            "writers",
            "too-many",
            "permits",
        ),
        *("plain", "after-its-lease", "gave-up"),
    ],
)
def test_exclusion(found: list[Record], most: int | None, wrong: int) -> None:
    assert violations(found, 10.0, most) == wrong
    assert list(records([number for each in found for number in each])) == found


@pytest.fixture
def running(target: Target) -> Session:
    return Session(target, command.settings_of(parsed("family", "--permits", "1")), console.Progress(sys.stderr))


def test_too_many_holders_fail_the_run_if_fastlock_lets_them_in(running: Session) -> None:
    reading, limiting = contests.kinds(running.settings)
    run = contests.Round((held(0, 5), held(1, 4, 1), held(2, 3)), 0, 100 * MS)
    contests._judge(running, "there", cases.ZSET, limiting, run, ["it raised"])
    assert running.failures == [] and running.notes == ["there: held by more than may", "there: it raised"]
    contests._judge(running, "here", cases.READERS_WRITERS, reading, run, [])
    assert running.failures == ["here: 2 times it was held by more than may"]
    contests._judge(running, "nowhere", cases.PLAIN, reading, contests.Round((), 0, MS), ["it raised"])
    assert running.failures[1:] == ["nowhere: it raised", "nowhere: nobody got it"]


def test_a_library_that_is_not_there_is_named_and_left_out(running: Session) -> None:
    there = [cases.Case("absent", "zset", needs=("no_such_module", "no-such-package")), cases.Case("odd", "nothing")]
    try:
        assert running.start(there) == {}
    finally:
        running.end()
    assert running.skipped["absent"] == "not installed: pip install no-such-package"
    assert "No module named" in running.skipped["odd"] and running.failures == []


def test_a_case_that_fails_costs_its_own_row_only(running: Session) -> None:
    workers = running.start([cases.Case(cases.PLAIN, "ours"), cases.Case(cases.ZSET, "zset")])
    try:
        (worker,), part = workers[cases.PLAIN], pairs.PairPart()
        assert not pairs._measured(running, worker, cases.PLAIN, "threads", "here", [])
        assert len(running.failures) == 1 and "pairs, threads, here, plain: " in running.failures[0]
        running.failures.clear()
        worker.kill()
        pairs._measure_at(running, part, workers, "threads", "here", running.target.url, 0)
        assert [row.case for row in part.rows("threads", "here")] == [cases.ZSET]
        assert len(running.failures) == 1 and "the worker ended" in running.failures[0]
        running.finish(workers.values(), "pairs")
        assert len(running.failures) == 1
    finally:
        running.end()


def test_most_together() -> None:
    assert most_together([held(0, 5), held(1, 4), held(2, 3), held(5, 9)], 10.0) == 3
    assert most_together([], 10.0) == 0


def test_a_side_counts_grants_within_the_run_and_every_wait() -> None:
    found = (held(9, 11), held(20, 21), held(120, 121), Record(0, 0, 0, 50 * MS, 0), held(15, 16, 1))
    side = contests.side_of("readers", 0, 3, [contests.Round(found, 10 * MS, 110 * MS)])
    assert side.rate.median == 20 and side.wait_max_ms == 50
    assert contests.side_of("writers", 1, 1, [contests.Round((), 0, 100 * MS)]).wait_max_ms is None


def test_clients_are_shared_evenly() -> None:
    assert [contests.share(64, 4, number) for number in range(4)] == [16] * 4
    assert sorted(contests.share(5, 3, number) for number in range(3)) == [1, 2, 2]
    assert [contests.share(1, 4, number) for number in range(4)] == [0, 0, 0, 1]


def test_each_case_comes_first_in_turn() -> None:
    assert [rotated("abc", number)[0] for number in range(4)] == ["a", "b", "c", "a"]
    assert rotated([], 3) == []


def sample(us: float, sent: int | None = 20) -> pairs.Sample:
    return pairs.Sample(us / 1e6, 10, us * 1e3, us * 2e3, sent)


def measured(**times: list[float]) -> pairs.PairPart:
    """Pairs on this machine; of a plain lock, unless they are given, of 10 us."""
    part = pairs.PairPart()
    given = {cases.PLAIN: [10.0] * 3, cases.CONTROL: [10.5] * 3, **times}
    part.samples["threads", "here"] = {case: [sample(us) for us in found] for case, found in given.items()}
    return part


def test_ratios_are_taken_within_a_round() -> None:
    part = measured(**{cases.PLAIN: [10, 20, 40], cases.CONTROL: [10, 20, 40], cases.REENTRANT: [12.5, 25, 80]})
    rows = {row.case: row for row in part.rows("threads", "here")}
    assert rows[cases.REENTRANT].ratio == Spread(1.25, 1.25, 2.0)
    assert rows[cases.REENTRANT].us.median == pytest.approx(25) and rows[cases.REENTRANT].sent == 2
    assert part.noise("threads", "here") == 0 and part.noise("tasks", "here") is None


def test_several_names_are_judged_by_acquire_and_by_name() -> None:
    part = measured(**{cases.MULTI_3: [30.0] * 3, cases.PLAIN_3: [40.0] * 3, cases.READ: [24.0] * 3})
    settings = command.settings_of(parsed("family", "--part", "pairs", "--api", "threads", "--rtt", "1"))
    found = {verdict.name: verdict for verdict in judge.judge(settings, part, renewals.RenewalPart())}
    assert len(found) == 5 + 7
    per_name = found["multi, 3 names, here, threads, times three plain pairs"]
    assert (per_name.measured, per_name.met) == (0.75, True)
    assert "multi, 3 names, through the network, threads, times plain" in found
    assert "multi, 3 names, here, threads, times plain" not in found
    assert found["rw, read, here, threads, times plain"].met
    assert found["semaphore, here, threads, times plain"].measured is None, "not measured is missed"
    assert not found["semaphore, here, threads, times plain"].met


def renewal(lease: float, leases: int, **more: Any) -> renewals.RenewalRow:
    """A row of three periods, in each of which a hundredth of a second of CPU was used."""
    each = {"seconds": lease / 3, "cpu": 0.01, "commands": leases / 100, "renewals": leases}
    answer = {"periods": [each] * 3, "shortest": lease / 2, "lost": 0, **more}
    return renewals.row_of("threads", cases.RENEWED, leases, lease, answer)


def test_renewal_is_scaled_to_ten_thousand_leases_of_thirty_seconds() -> None:
    row = renewal(30, 10_000)
    assert row.cpu.median == row.cpu_scaled == pytest.approx(0.1) and row.per_period == row.per_renewal == 1
    assert row.late == pytest.approx(5)
    row = renewal(3, 100)
    assert row.cpu.median == pytest.approx(1) and row.cpu_scaled == pytest.approx(1 * 100 / 10)
    exact, scaled = judge.judge_renewal("threads", renewal(30, 10_000)), judge.judge_renewal("threads", row)
    assert [each.met for each in exact] == [True, True] and exact[0].detail == ""
    assert not scaled[0].met and "100 of 3 s were measured" in scaled[0].detail
    assert [each.met for each in judge.judge_renewal("threads", None)] == [False, False]


def test_notes_and_columns_fit() -> None:
    row = measured().rows("threads", "here")[0]
    assert len(report._pair(row)) == len(report.PAIR_COLUMNS) + 1
    assert len(report._renewal(renewal(30, 100))) == len(report.RENEWAL_COLUMNS)
