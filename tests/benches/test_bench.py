"""The benchmark as a program: real runs on real servers; its arithmetic on canned numbers. No speed is judged."""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import re
import signal
import subprocess
import sys
import types
from array import array
from pathlib import Path
from typing import Any

import pytest
import redis
from hdrh.histogram import HdrHistogram

from fastlock import embedded
from fastlock._cli import console
from fastlock.benches import budgets, ceiling, cli, options, plan, report, session, stats, terminal
from fastlock.benches.plan import Options, make_plan
from fastlock.benches.rivals import RIVALS
from fastlock.benches.scenarios import SCENARIOS
from fastlock.benches.schema import SCHEMA
from fastlock.benches.stats import Row, Sample, Spread
from fastlock.benches.target import Meter, Target
from fastlock.benches.workers import RunSpec, WorkerError, WorkerRival

CORE = importlib.util.find_spec("fastlock._core") is not None
LOOPS = ["tasks", "tasks-uvloop"] if importlib.util.find_spec("uvloop") else ["tasks"]
UNCONTENDED = ["pair", "threads", *LOOPS, "batch"]
ROW_KEYS = {
    *("rival", "rounds", "grants", "rate", "ratio", "noisy", "wait_us", "release_us", "handover_us", "latency_us"),
    *("punctual_us", "recovery_us", "fairness", "commands_per_grant", "sent_per_grant"),
    *("server_cpu_us", "server_cpu_ratio"),
    *(
        "client_cpu_us",
        "connections",
        "failures",
        "timeouts",
        "violations",
        "outlived",
        "served_s",
        "order",
        "lease_ms",
    ),
    *("histograms", "samples"),
}


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", "fastlock", "bench", *args]


def bench(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """Run the benchmark outside of the source tree."""
    return subprocess.run(command(*args), cwd=folder, capture_output=True, text=True, timeout=55)


def parsed(*args: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return parser.parse_args(args)


def chosen(*names: str) -> list[str]:
    return [word for name in names for word in ("--scenario", name)]


def pair_plan() -> plan.Plan:
    return make_plan(Options(("pair",), ("fastlock" if CORE else "fallback", "redis-py"), rounds=1, seconds=0.02))


# ------------------------------------------------------------------------------------------------------- whole runs


@pytest.fixture(scope="module")
def document(
    measurable: None, shared: embedded.Server, db: Any, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """One run of everything without contention, against a server that another client uses too."""
    folder = tmp_path_factory.mktemp("bench")
    args = ("--rounds", "1", "--seconds", "0.05", "--json", "-", "--url", shared.url)
    done = bench(folder, "--quick", *chosen(*UNCONTENDED), *args)
    assert done.returncode == 0, done
    assert "pairs/s" in done.stderr  # the table, since stdout is taken by the JSON
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def test_document_describes_the_run(document: dict[str, Any], shared: embedded.Server) -> None:
    assert document["schema"] == SCHEMA
    assert document["interrupted"] is False
    assert document["failures"] == []
    assert document["parameters"]["rounds"] == 1
    environment = document["environment"]
    assert environment["server"]["kind"] == shared.kind
    assert environment["server"]["version"] == shared.version
    assert environment["rivals"]["fallback"]["implementation"] == "python"
    assert environment["rivals"]["redis-py"]["redis-py"] == redis.__version__
    if CORE:
        assert environment["rivals"]["fastlock"]["implementation"] == "cython"


def test_document_has_every_scenario_and_rival(document: dict[str, Any]) -> None:
    expected = {*(["fastlock"] if CORE else []), "fallback", "redis-py"}
    there = {name for name, entry in RIVALS.items() if entry.needs is None or importlib.util.find_spec(entry.needs[0])}
    others = {name: {"python-redis-lock"} & there for name in ("pair", "threads")}
    for name in ("pair", "threads", "tasks") if CORE else ():
        others[name] = {"unconfirmed", "kept", *others.get(name, ())}
    if CORE:
        others["tasks-uvloop"] = {"kept"}
    for name in LOOPS:
        others[name] = {*({"valkey-glide"} & there), *others.get(name, ())}
    others["batch"] = {"pipeline", *(["ceiling"] if ceiling.find_tool() else [])}
    assert list(document["scenarios"]) == UNCONTENDED
    for name, scenario in document["scenarios"].items():
        assert set(scenario["rows"]) == expected | others[name]
        assert (scenario["kind"], scenario["unit"], scenario["points"]) == ("pair", "pairs", [])
        assert scenario["round_trip"]["p50_us"] > 0
    assert set(document["noise"]) == set(UNCONTENDED)


def test_rows_are_complete_and_true(document: dict[str, Any]) -> None:
    for scenario in document["scenarios"].values():
        rows = scenario["rows"]
        for row in rows.values():
            assert set(row) == ROW_KEYS
            (sample,) = row["samples"]
            assert sample["acquired"] == sample["released"] == sample["grants"] == row["grants"] > 0
            assert row["rate"]["median"] == pytest.approx(row["grants"] / sample["seconds"])
            if text := row["histograms"]["latency"]:
                assert HdrHistogram.decode(text).get_total_count() == row["latency_us"]["count"] > 0
        assert rows["redis-py"]["ratio"]["median"] == 1
        assert rows["redis-py"]["server_cpu_ratio"] == 1
        assert rows["redis-py"]["commands_per_grant"] >= 4  # SET, and a script with GET and DEL
        if CORE:
            assert (
                2 <= rows["fastlock"]["commands_per_grant"] < 2.5
                or document["environment"]["server"]["kind"] != "valkey"
            )


def test_sixteen_threads_need_at_most_sixteen_connections(document: dict[str, Any]) -> None:
    rows = document["scenarios"]["threads"]["rows"]
    assert 1 < rows["redis-py"]["connections"] <= 16  # redis-py opens a connection when all it has are busy
    for rival in ("fastlock", "fallback") if CORE else ("fallback",):
        assert 1 <= rows[rival]["connections"] <= 16


def test_run_leaves_nothing_behind(document: dict[str, Any], db: Any) -> None:
    assert db.keys() == [b"somebody-else"]
    assert db.get("somebody-else") == b"stays"


def test_embedded_server_and_table(measurable: None, tmp_path: Path) -> None:
    done = bench(tmp_path, "--scenario", "pair", "--rounds", "2", "--seconds", "0.02")
    assert done.returncode == 0, done
    assert "pair: one thread" in done.stdout
    assert "threads:" not in done.stdout
    assert "embedded" in done.stdout


@pytest.mark.long
def test_check_names_the_bounds_that_were_judged(measurable: None, tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    done = bench(tmp_path, "--scenario", "threads", "--quick", "--check", "--json", str(result))
    verdicts = json.loads(result.read_text(encoding="utf-8"))["budgets"]
    assert [verdict["name"].split(",")[0] for verdict in verdicts] == ["16 threads", "16 threads", "fallback"]
    assert done.returncode == (0 if all(verdict["met"] for verdict in verdicts) else 1), done
    assert "connections" in done.stdout


def test_interrupt_keeps_results(measurable: None, shared: embedded.Server, db: Any, tmp_path: Path) -> None:
    args = ("--scenario", "pair", "--rounds", "1000", "--seconds", "0.02", "--json", "-", "--url", shared.url)
    pipe = subprocess.PIPE
    with subprocess.Popen(command(*args), cwd=tmp_path, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            assert process.stderr is not None
            while not re.search(r"round (?!1/)", progress := process.stderr.readline()):  # each rival was measured once
                assert progress
            process.send_signal(signal.SIGINT)
            stdout, stderr = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 130, stderr
    document = json.loads(stdout)
    assert document["interrupted"] is True
    assert 0 < document["scenarios"]["pair"]["rows"]["redis-py"]["rounds"] < 1000
    assert list(db.scan_iter("fastlock-bench*")) == []


SWALLOWED = """
import contextlib, itertools, signal, sys
from fastlock._cli import main as cli
from fastlock.benches.target import Target

read, count = Target.read, itertools.count(1)

def swallow(target):
    with contextlib.suppress(KeyboardInterrupt):
        if next(count) == 3:
            signal.raise_signal(signal.SIGINT)
    return read(target)

Target.read = swallow
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.long
def test_interrupt_that_a_library_swallows_ends_the_run(measurable: None, shared: embedded.Server) -> None:
    args = ["--scenario", "pair", "--rounds", "200", "--seconds", "0.02", "--url", shared.url]
    run = [sys.executable, "-c", SWALLOWED, "bench", *args]
    done = subprocess.run(run, capture_output=True, text=True, timeout=55)
    assert done.returncode == 130 and "interrupted: what was measured until then" in done.stdout, done.stderr


# ----------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("build", ["debug", "trace"])
def test_slow_build_is_refused(build: str, monkeypatch: pytest.MonkeyPatch) -> None:
    core = types.ModuleType("fastlock._core")
    vars(core)["BUILD"] = build
    monkeypatch.setitem(sys.modules, "fastlock._core", core)
    monkeypatch.setattr(cli, "_measure", lambda *args: pytest.fail("it was measured"))
    with pytest.raises(console.Refusal, match=build):
        cli.run(parsed())


@pytest.mark.parametrize("core", [None, types.SimpleNamespace(BUILD="release")], ids=["none", "release"])
def test_other_builds_are_not_refused(core: Any) -> None:
    cli.refuse_slow_build(core)


def test_check_through_a_network_needs_the_one_that_it_judges(measurable: None) -> None:
    with pytest.raises(console.Refusal, match="through a network of 1 ms: --rtt has to name it"):
        cli.run(parsed("--check", "--rtt", "0.2,5"))


def test_url_and_server_exclude_each_other(measurable: None) -> None:
    with pytest.raises(console.Refusal, match="exclude"):
        cli.run(parsed("--url", "redis://localhost", "--server", "redis-server"))


def test_unreachable_server_is_refused_without_its_password(measurable: None, tmp_path: Path) -> None:
    url = f"unix://:s3cret@{tmp_path}/nobody.sock"
    with pytest.raises(console.Refusal, match="cannot use") as refused:
        cli.run(parsed("--url", url))
    assert "s3cret" not in str(refused.value)


def test_the_help_lists_all_scenarios() -> None:
    assert options.SCENARIO_NAMES == plan.SCENARIO_NAMES
    assert options.SCENARIO_NAMES[: len(SCENARIOS)] == tuple(SCENARIOS)


# --------------------------------------------------------------------------------------------------------- workers


def test_worker_reports_an_unreachable_server(tmp_path: Path) -> None:
    worker = WorkerRival("redis-py", f"unix://{tmp_path}/nobody.sock", RIVALS["redis-py"])
    try:
        worker.greet()
        worker.open("pair", "label", ())
        with pytest.raises(WorkerError, match=r"redis-py: .*ConnectionError"):
            worker.run(RunSpec(0.01))
    finally:
        worker.end()


def test_failing_rival_costs_its_cell_only(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    running = session.Session(target, pair_plan())
    monkeypatch.setattr(ceiling.RoundTrip, "open", lambda *args: 1 / 0)
    try:
        running.run()
    finally:
        running.end()
    (failure,) = running.failures
    assert "round trip: ZeroDivisionError" in failure
    assert running.measured["pair"].round_trip() is None
    assert running.measured["pair"].rows()["redis-py"].grants > 0


@pytest.mark.parametrize("form", ["{}:forgotten", "fastlock:queue:{{{}:forgotten}}"], ids=["lock", "queue"])
def test_forgotten_key_fails_the_run(form: str, target: Target, db: Any) -> None:
    running = session.Session(target, pair_plan())
    key = form.format(running.prefix)
    db.set(key, "x", px=60_000)
    try:
        running.run()
    finally:
        running.end()
    assert running.failures == [f"pair: 1 keys left behind, such as {key!r}"]
    assert not db.exists(key)


def test_volatile_keys_exist_only_during_the_run(target: Target, db: Any) -> None:
    before = db.dbsize()
    with target.volatile("fastlock-bench:x:volatile", 2_500):
        assert db.dbsize() == before + 2_500
        ends = [db.pttl(f"fastlock-bench:x:volatile:{number}") for number in range(0, 2_500, 100)]
        assert min(ends) > 3_500_000
        assert ends == sorted(set(ends)), "the keys expire at different times"
    assert db.dbsize() == before


# ------------------------------------------------------------------------------------------------- canned numbers


def sample(pairs: int, seconds: float = 1.0, server_cpu: float | None = None, laps: tuple[int, ...] = ()) -> Sample:
    return Sample(
        pairs, seconds, pairs, pairs, 2 * seconds, server_cpu, histograms={"latency": stats.encode(array("q", laps))}
    )


def row(
    rival: str, rate: float, ratio: float | None, cpu_ratio: float | None = None, connections: int | None = None
) -> Row:
    times = None if ratio is None else Spread(ratio, ratio, ratio)
    return Row(rival, 1, 100, Spread(rate, rate, rate), times, server_cpu_ratio=cpu_ratio, connections=connections)


def test_ratios_are_taken_round_by_round() -> None:
    ours, base = [sample(400), sample(100), sample(900)], [sample(100), sample(50), sample(100)]
    assert stats.ratios(ours, base) == Spread(4.0, 2.0, 9.0)


def test_ratios_leave_out_rounds_of_one_side() -> None:
    assert stats.ratios([sample(400), sample(100)], [sample(100)]) == Spread(4.0, 4.0, 4.0)
    assert stats.ratios([sample(400)], []) is None


def test_summary_of_canned_rounds() -> None:
    ours = [sample(100, 0.5, 0.001, (1_000, 2_000)), sample(300, 0.5, 0.003, (3_000, 100_000))]
    base = [sample(100, 1.0, 0.010), sample(100, 1.0, 0.010)]
    found = stats.summarize("fastlock", ours, base, connections=3)
    assert found.rate == Spread(400.0, 200.0, 600.0)
    assert found.ratio == Spread(4.0, 2.0, 6.0)
    assert found.latency_us is not None
    assert (found.grants, found.rounds, found.latency_us.count, found.connections) == (400, 2, 4, 3)
    assert found.latency_us.p50 == pytest.approx(2, rel=0.3)  # the first bin of a histogram is half a microsecond wide
    assert found.latency_us.p99 == found.latency_us.max == pytest.approx(100, rel=6e-3)
    assert found.server_cpu_us == pytest.approx(10)
    assert found.server_cpu_ratio == pytest.approx(0.1)
    assert found.client_cpu_us == pytest.approx(5000)


def test_summary_of_unmeasured_values() -> None:
    found = stats.summarize("ceiling", [sample(100)], [], None)
    assert found.ratio is found.latency_us is found.server_cpu_us is found.server_cpu_ratio is None


@pytest.mark.parametrize(
    ("claimed", "acquired", "released", "changes", "complaints"),
    [
        (10, 10, 10, 20, []),
        (10, 10, 10, None, []),
        (10, 10, 9, 20, ["10 acquired, 9 released, 10 pairs claimed"]),
        (10, 9, 9, 20, ["9 acquired, 9 released, 10 pairs claimed"]),
        (10, 10, 10, 19, ["the server counted 19 key changes for 10 pairs, two each are due"]),
        (0, 0, 0, 0, ["no pair was made"]),
    ],
)
def test_inconsistencies(
    claimed: int, acquired: int, released: int, changes: int | None, complaints: list[str]
) -> None:
    counted = None if changes is None else Meter(0.0, 99, changes)
    assert session.inconsistencies(Sample(claimed, 1.0, acquired, released), counted) == complaints
    if counted is not None:  # three releases may be on their way
        fewer = Meter(0.0, 99, counted.changes - 3)
        assert session.inconsistencies(Sample(claimed, 1.0, acquired, released), fewer, 3) == [
            each.replace("19", "16") for each in complaints
        ]


@pytest.mark.parametrize(
    ("released", "failures", "counted", "complaints"),
    [
        (10, 0, Meter(0.0, 30, 6), []),
        (10, 0, None, []),
        (9, 1, Meter(0.0, 30, 6), []),
        (9, 0, Meter(0.0, 30, 6), ["10 acquired, 9 released, and no call failed"]),
        (10, 0, Meter(0.0, 30, 5), ["the server counted 5 key changes for 10 grants, 6 are due"]),
        (10, 0, Meter(0.0, 29, 6), ["30 commands sent by its own count, the server ran 29"]),
    ],
)
def test_inconsistencies_of_a_contest(
    released: int, failures: int, counted: Meter | None, complaints: list[str]
) -> None:
    found = Sample(10, 1.0, 10, released, sent=30, failures=failures)
    assert session.contended_inconsistencies(found, counted, 6) == complaints


def test_budgets_of_canned_rows() -> None:
    rows = {
        "threads": {"fastlock": row("fastlock", 50, 5.0, connections=17), "fallback": row("fallback", 30, 1.9)},
        "batch": {"fastlock": row("fastlock", 90, 9.0), "ceiling": row("ceiling", 100, None)},
    }
    results = {name: budgets.ScenarioResult({None: found}) for name, found in rows.items()}
    verdicts = {verdict.name: verdict for verdict in budgets.judge(results, ("threads", "batch"))}
    assert {name: (verdict.measured, verdict.met) for name, verdict in verdicts.items()} == {
        "16 threads, times redis-py": (5.0, True),
        "16 threads, connections": (17, False),
        "batch, part of the benchmark tool's ceiling": (0.9, True),
        "fallback, threads, times redis-py": (1.9, False),
        "fallback, batch, times redis-py": (None, False),
    }
    assert [verdict.bound for verdict in budgets.judge(results, ("batch",), native=False)] == [2, 1.6]
    assert "MISSED" in str(verdicts["16 threads, connections"])
    assert "not measured" in str(verdicts["fallback, batch, times redis-py"])


@pytest.mark.parametrize(
    ("kind", "version", "native"),
    [("valkey", "9.1.2", True), ("valkey", "8.1", False), ("redis", "8.4.0", True), ("redis", "7.0.15", False)],
)
def test_which_servers_delete_natively(kind: str, version: str, native: bool) -> None:
    assert budgets.deletes_natively({"kind": kind, "version": version}) is native


def contested(rival: str, rate: float, **more: Any) -> Row:
    return Row(rival, 1, 100, Spread(rate, rate, rate), **more)


def timed(p99: float, longest: float = 0.0) -> stats.Percentiles:
    return stats.Percentiles(1.0, 1.0, p99, p99, longest or p99, 100)


def fair(*grants: int) -> stats.Fairness:
    return stats.Fairness(1.0, grants[-1] / grants[0], list(grants))


def judged(scenario: str, rows: dict[float | None, dict[str, Row]], **more: Any) -> list[tuple[float | None, bool]]:
    """Measured value and verdict of every bound of one scenario; ``more``: its parameters."""
    found = budgets.judge({scenario: budgets.ScenarioResult(rows, more)}, (scenario,))
    return [(verdict.measured, verdict.met) for verdict in found]


def test_budgets_of_contention() -> None:
    hot = {
        "fastlock": contested("fastlock", 950, wait_us=timed(20_800)),
        "fair": contested("fair", 900, fairness=fair(20, 19), sent_per_grant=3.1),
        "alone": contested("alone", 1000),
    }
    fairly = [(0.95, True), (0.9, True), (3.1, False)]
    assert judged("hot", {None: hot}, lanes=16, hold_ms=1) == [(0.95, False), (1.3, True), *fairly]
    hot["fastlock"] = contested("fastlock", 950, wait_us=timed(24_000), punctual_us=timed(17_600))
    p99 = budgets.judge({"hot": budgets.ScenarioResult({None: hot}, {"lanes": 16, "hold_ms": 1})}, ("hot",))[1]
    assert (p99.measured, p99.met, p99.detail) == (1.5, False, "1.1 without what was held beyond 1 ms")
    crowd = {"fastlock": contested("fastlock", 1, ratio=Spread(50, 50, 50), sent_per_grant=1.3)}
    assert judged("crowd", {None: crowd}) == [(50, True), (1.3, False)]
    assert judged("crowd-uvloop", {None: crowd}) == [(50, True)]
    threads = {"fastlock": contested("fastlock", 1, ratio=Spread(9, 9, 9), fairness=fair(5, 0))}
    assert judged("crowd-threads", {None: threads}) == [(9, False), (0, False)]
    crash = {"fastlock": contested("fastlock", 0, recovery_us=timed(1_000, 50_001))}
    assert judged("crash", {None: crash}) == [(50.001, False)]
    storm = {
        "fastlock": contested("fastlock", 1, timeouts=0.25, failures=0.0, order=0.1),
        "fair": contested("fair", 1, served_s=Spread(1, 1, 1), order=0.995),
    }
    assert judged("storm", {None: storm}) == [(0.75, False), (1.0, True), (0.995, True)]
    assert judged("storm", {}) == [(None, False)] * 3


def test_budget_of_the_sweep_is_of_the_most_waiters() -> None:
    cpu = {1: 1.0, 10: 20.0, 100: 90.0, 1000: 30.0}
    rows = {x: {"fastlock": contested("fastlock", 1, server_cpu_us=us)} for x, us in cpu.items()}
    assert judged("waiters", {**rows}) == [(1.5, True), (None, False)]
    del rows[1000]
    assert judged("waiters", {**rows}) == [(4.5, False), (None, False)]
    assert judged("waiters", {10: rows[10]}) == [(None, False)] * 2


def test_handover_is_compared_with_hiredis() -> None:
    rows = {"fastlock": contested("fastlock", 5_000)}
    results = {"handover": budgets.ScenarioResult({None: {**rows, "hiredis": contested("hiredis", 10_000)}})}
    _, verdict = budgets.judge(results, ("handover",))
    assert (verdict.measured, verdict.met, verdict.detail) == (2, False, "200 us a grant; hiredis: 100 us a pair")
    assert str(verdict).endswith("(bound 0.9): 2 (200 us a grant; hiredis: 100 us a pair)")
    results = {"handover": budgets.ScenarioResult({None: {**rows, "hiredis": contested("hiredis", 4_500)}})}
    _, verdict = budgets.judge(results, ("handover",))
    assert (verdict.measured, verdict.met) == (0.9, True)
    assert judged("handover", {None: rows}) == [(None, False)] * 2


def test_rate_of_the_benchmark_tool() -> None:
    header = '"test","rps","avg_latency_ms","min_latency_ms"'
    assert ceiling.parse_rate(f'{header}\n"SET key:__rand_int__ x NX","621118.00","1.2","0.3"\n') == 621118.0
    with pytest.raises(ValueError, match="not the CSV"):
        ceiling.parse_rate("Could not connect to Redis at 127.0.0.1:1: Connection refused\n")


def test_sweep_shows_missed_and_failed_only_where_there_are_any() -> None:
    (stage,) = make_plan(Options(("waiters",), ("redis-py", "fastlock"), waiters=(1, 4))).stages
    good, bad = Sample(100, 1.0, 100, 100, attempts=100), Sample(50, 1.0, 50, 50, attempts=100, timeouts=50, failures=2)
    measured = session.Measured(stage, samples={x: {"redis-py": [good], "fastlock": [good]} for x in (1, 4)})
    header, _ = report.table(measured)
    costs = ("p99", "srv us", "cli us")
    assert header == ("waiters", "redis-py", *costs, "fastlock", *costs)
    measured.samples[4]["redis-py"] = [bad]
    header, lines = report.table(session.Measured(stage, samples=measured.samples))
    assert header == ("waiters", "redis-py", *costs, "missed", "failed", "fastlock", *costs)
    assert [line[5:7] for line in lines] == [("0", "0"), ("50%", "2%")]
    measured.samples[1]["redis-py"] = [Sample(0, 1.0, 0, 0, attempts=10, timeouts=10)]
    assert report.table(session.Measured(stage, samples=measured.samples))[1][0][5:7] == ("100%", "0")


@pytest.mark.parametrize("rich", [True, False], ids=["rich", "plain"])
def test_table_truncates_no_number(target: Target, rich: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not rich:
        for name in ("rich", "rich.box", "rich.console", "rich.table", "rich.text"):
            monkeypatch.setitem(sys.modules, name, None)
    shown = session.Session(target, pair_plan())
    rounds = [sample(1_234_567, 1.0, 0.5, (98_765_432_000,))]
    shown.measured["pair"] = session.Measured(
        shown.plan.stages[0], samples={None: {"redis-py": rounds, "[red]x": rounds}}
    )
    stream = io.StringIO()
    report.show(shown, target.describe(), [], False, stream)
    for text in ("1,234,567", "1,235..1,235k", "60,0", "[red]x"):
        assert text in stream.getvalue()
    terminal.table(f"a title {'that is long ' * 20}", ("rival", "rate"), [("fastlock", "1")], 1, stream)
    assert 20 * "that is long " in stream.getvalue()
    assert "\N{HORIZONTAL ELLIPSIS}" not in stream.getvalue()
