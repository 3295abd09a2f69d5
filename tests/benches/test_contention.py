"""The contention harness as a program: short real runs of each scenario, the faults it must catch, and how it ends.

No speed is judged. The analysis of the logs: test_analysis.py.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from hdrh.histogram import HdrHistogram

from fastlock import embedded
from fastlock._cli import main as cli
from fastlock.benches import ceiling, rivals, session
from fastlock.benches.contention.contests import SCENARIOS
from fastlock.benches.contention.workers import Workers
from fastlock.benches.plan import Options, make_plan
from fastlock.benches.stats import Sample
from fastlock.benches.target import Target

pytestmark = pytest.mark.usefixtures("measurable")

OURS = "fastlock" if importlib.util.find_spec("fastlock._core") else "fallback"
SECONDS = "0.15"  # of each run: a loaded machine may stall one for half of that, and redis-py sleeps for 0.1 s
SMALLEST = ("--quick", "--rounds", "1", "--seconds", SECONDS, "--waiters", "3", "--rate", "300", "--processes", "2")
THERE = {
    name for name, entry in rivals.RIVALS.items() if entry.needs is None or importlib.util.find_spec(entry.needs[0])
}
REFERENCES = {"handover": ["hiredis"]} if OURS == "fastlock" and ceiling.find_tool() else {}
KINDS = {"crash": "crash", "waiters": "waiters", "load": "load"}

BROKEN = '''
"""A lock that now and then grants a name without asking the server."""
import itertools
from fastlock.benches.rivals import Threads, Wrapped, redis_py

calls = itertools.count(1)

def versions():
    return {"broken": "1"}

def open_threads(url, label):
    whole = redis_py.open_threads(url, label)

    def lock(name, *, timeout, blocking=True, blocking_timeout=None):
        made = whole.lock(name, timeout=timeout, blocking=blocking, blocking_timeout=blocking_timeout)
        return Wrapped(lambda: True, lambda: None) if next(calls) % 5 == 0 else Wrapped(made.acquire, made.release)

    return Threads(lock, None, whole.close)
'''


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", "fastlock", "bench", *args]


def bench(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """Run the benchmark outside of the source tree; modules in that folder can be imported."""
    env = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(command(*args), cwd=folder, env=env, capture_output=True, text=True, timeout=55)


def chosen(option: str, *names: str) -> list[str]:
    return [word for name in names for word in (option, name)]


# ------------------------------------------------------------------------------------------------------- whole runs


def run(folder: Path, *args: str) -> dict[str, Any]:
    done = bench(folder, *args, "--json", "-")
    assert done.returncode == 0, done
    document: dict[str, Any] = json.loads(done.stdout)
    assert document["failures"] == []
    return document


@pytest.fixture(scope="module")
def document(shared: embedded.Server, db: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One run of every scenario of contention, against a server that another client uses too. Again, where a machine
    that is busy kept a client from arriving while the dead holder's lease of 0.3 seconds lasted."""
    scenarios, names = chosen("--scenario", *SCENARIOS), chosen("--rival", OURS, "redis-py")
    for _ in range(3):
        found = run(tmp_path_factory.mktemp("bench"), *scenarios, *names, *SMALLEST, "--url", shared.url)
        if all(row["recovery_us"]["count"] == 4 for row in found["scenarios"]["crash"]["rows"].values()):
            break
    return found


def test_document_keeps_to_the_schema(document: dict[str, Any]) -> None:
    assert document["schema"] == "fastlock-bench/2"
    assert set(document) >= {
        *("created", "interrupted", "command", "environment", "parameters", "noise", "skipped", "failures", "budgets"),
        "scenarios",
    }
    assert set(document["environment"]) >= {
        *("python", "fastlock", "build", "commit", "uvloop", "kernel", "cpus", "cpu_model", "governor", "load"),
        *("server", "rivals"),
    }
    assert document["parameters"]["quick"] is True
    assert document["parameters"]["processes"] == 2
    assert list(document["scenarios"]) == list(SCENARIOS)
    assert document["command"].startswith("fastlock bench --scenario hot")
    for name, scenario in document["scenarios"].items():
        assert set(scenario) == {"title", "kind", "unit", "parameters", "round_trip", "rows", "points"}
        assert (scenario["kind"], scenario["unit"]) == (KINDS.get(name, "contention"), "grants")
        assert set(scenario["round_trip"]) == {"p50_us", "p99_us", "pairs_per_s"}
        assert document["noise"][name]["spread"] >= 0
        if name in ("waiters", "load"):
            assert scenario["rows"] == {}
            assert [(point["x"], point["rival"]) for point in scenario["points"]] == [
                (3 if name == "waiters" else 300, rival) for rival in (OURS, "redis-py")
            ]
        else:
            assert sorted(scenario["rows"]) == sorted([OURS, "redis-py", *REFERENCES.get(name, [])])
            assert scenario["points"] == []


def rows(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, scenario in document["scenarios"].items():
        yield from ((name, row) for rival, row in scenario["rows"].items() if rival != "hiredis")
        yield from ((name, point["row"]) for point in scenario["points"])


def test_rows_are_complete_and_true(document: dict[str, Any]) -> None:
    for name, row in rows(document):
        where = f"{name}, {row['rival']}"
        (sample,) = row["samples"]
        assert row["grants"] == sample["grants"], where
        assert 0 < sample["released"] == sample["acquired"] <= sample["attempts"], where
        assert (row["violations"], row["failures"]) == (0, 0), where
        asked = 1 if name == "recall" else sample["acquired"]  # there only the waits of one client count
        assert asked <= row["wait_us"]["count"] and (name == "recall") == (row["wait_us"]["count"] < row["grants"]), (
            where
        )
        assert row["release_us"]["count"] == sample["released"], where
        if document["scenarios"][name]["parameters"].get("hold_ms"):
            assert row["punctual_us"]["count"] == row["wait_us"]["count"], where
            assert row["punctual_us"]["p50"] <= row["wait_us"]["p50"], where
        assert HdrHistogram.decode(row["histograms"]["wait"]).get_total_count() == row["wait_us"]["count"], where
        assert row["commands_per_grant"] > 0, where
        assert row["server_cpu_us"] >= 0 and row["client_cpu_us"] > 0, where
        assert row["connections"] >= 1, where


def test_fields_of_some_scenarios_only(document: dict[str, Any]) -> None:
    scenarios = document["scenarios"]
    for row in scenarios["hot"]["rows"].values():
        assert 0 < row["fairness"]["jain"] <= 1
        assert sum(row["fairness"]["grants"]) == row["grants"]
        assert row["fairness"]["grants"] == sorted(row["fairness"]["grants"], reverse=True)
        assert row["rate"]["median"] == pytest.approx(row["grants"] / float(SECONDS))
    for row in scenarios["crash"]["rows"].values():
        assert row["recovery_us"]["count"] == 4  # for four names
        assert row["grants"] == 4  # one client waits for each
        assert row["lease_ms"] == 300
        assert row["rate"] is None
    for row in scenarios["storm"]["rows"].values():
        assert row["grants"] == 3
        assert row["served_s"]["median"] > 0
        assert row["handover_us"]["count"] >= 1  # at least from the holder to the first waiter
    assert scenarios["zipf"]["parameters"]["names"] == 1000
    assert scenarios["load"]["parameters"]["names"] == "unique"


def test_run_leaves_nothing_behind(document: dict[str, Any], db: Any) -> None:
    assert db.keys() == [b"somebody-else"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("option", "names"),
    [
        ("--threads", ("fallback", "dropin", "python-redis-lock", "pottery")),
        ("--tasks", ("fallback", "dropin", "pottery", "valkey-glide")),
    ],
    ids=["threads", "tasks"],
)
def test_every_rival_runs_on_its_apis(option: str, names: tuple[str, ...], tmp_path: Path) -> None:
    """In the crash scenario, in which they are forked, killed, wait, acquire and release."""
    if OURS == "fallback":
        names = tuple(name for name in names if name != "dropin")  # it runs compiled
    short = ("--scenario", "crash", option, "4", "--processes", "2", "--quick", "--rounds", "1")
    found = run(tmp_path, *short, *chosen("--rival", *names))["scenarios"]["crash"]["rows"]
    assert set(found) == set(names) & THERE
    for name, row in found.items():
        assert (row["grants"], row["failures"], row["violations"]) == (4, 0, 0), name
        assert row["lease_ms"] == (1000 if name == "python-redis-lock" else 300)


@pytest.mark.long
@pytest.mark.skipif(OURS != "fastlock", reason="the references run beside the compiled fastlock")
def test_references_and_commands_that_clients_sent(tmp_path: Path) -> None:
    # in 0.1 s some clients get nothing
    options = (*chosen("--scenario", "hot", "crowd"), "--seconds", "0.4", "--rounds", "1")
    done = bench(tmp_path, *options, *chosen("--rival", OURS, "fair", "redis-py"), "--check", "--json", "result.json")
    found = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert found["failures"] == []
    hot, crowd = (found["scenarios"][name]["rows"] for name in ("hot", "crowd"))
    assert sorted(hot) == ["alone", "fair", "fastlock", "redis-py"]
    assert sorted(crowd) == ["fastlock", "redis-py"]
    assert hot["alone"]["fairness"] is None  # one client
    assert hot["alone"]["sent_per_grant"] == pytest.approx(2, abs=0.1)  # an acquire and a release
    assert hot["redis-py"]["sent_per_grant"] is None  # redis-py does not count its commands
    for row in (hot["fastlock"], hot["fair"], crowd["fastlock"]):
        assert 0 < row["sent_per_grant"] <= row["commands_per_grant"]
    assert "alone: fastlock with one thread" in done.stdout
    assert len([line for line in done.stdout.splitlines() if line.startswith(("met ", "MISSED "))]) == 7
    assert {verdict["measured"] is None for verdict in found["budgets"]} == {False}


def test_try_locks_are_refused_not_late(tmp_path: Path) -> None:
    options = ("--scenario", "hot", "--try", "--hold", "5", "--threads", "2", "--processes", "2", "--seconds", "0.1")
    found = run(tmp_path, *options, "--rounds", "1", *chosen("--rival", OURS))
    row = found["scenarios"]["hot"]["rows"][OURS]
    assert 0 < row["timeouts"] < 1
    assert row["failures"] == 0


@pytest.mark.long
def test_fastlock_against_itself(tmp_path: Path) -> None:
    options = ("--scenario", "handover", "--rounds", "3", "--seconds", "0.05", "--rival", OURS, "--rival", OURS)
    done = bench(tmp_path, *options, "--json", "result.json")
    assert done.returncode == 0, done
    found = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    row = found["scenarios"]["handover"]["rows"][f"{OURS}#{2}"]
    width = found["noise"]["handover"]["spread"]
    assert 1 / (1 + width) <= row["ratio"]["median"] <= 1 + width
    assert row["noisy"] is True
    assert "~" in done.stdout and "say nothing" in done.stdout


# ------------------------------------------------------------------------------------------- faults that are caught


@pytest.mark.long
def test_lock_that_grants_twice_is_caught(shared: embedded.Server, tmp_path: Path) -> None:
    (tmp_path / "broken_lock.py").write_text(BROKEN, encoding="utf-8")
    options = ("--scenario", "flash-sale", "--rounds", "1", "--seconds", "0.2", "--rival", "broken=broken_lock")
    done = bench(tmp_path, *options, "--url", shared.url, "--json", "result.json")
    assert done.returncode == 1, done
    assert "FAILED  flash-sale, broken: more than one held a name" in done.stdout
    found = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert found["scenarios"]["flash-sale"]["rows"]["broken"]["violations"] > 0
    assert "updates of what they guarded were lost" in found["failures"][0]


class Overrun(Workers):
    """Workers that find a name held twice in the warm-up."""

    def open(self, *args: Any) -> None: ...

    def run(self, *args: Any) -> Sample:
        self.wrong = ["more than one held a name"]
        return Sample(1, 1.0, 1, 1)


def test_lock_that_grants_twice_in_the_warm_up_is_caught(target: Target) -> None:
    running = session.Session(target, make_plan(Options(("hot",), (OURS,))))
    (stage,) = running.plan.stages
    assert running._open(stage, session.Measured(stage), Overrun("broken", target.url, rivals.RIVALS[OURS]))
    assert running.failures == ["hot, broken: in the warm-up more than one held a name"]


def test_missing_rival_is_named(target: Target, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(rivals.RIVALS, "ghost", rivals.Entry("ghost", needs=("no_such_library", "ghost-lock")))
    plan = make_plan(Options(("handover",), ("ghost", "phantom=no_such_module", OURS), rounds=1, seconds=0.02))
    running = session.Session(target, plan)
    try:
        running.run()
    finally:
        running.end()
    assert running.skipped["ghost"] == "not installed: pip install ghost-lock"
    assert "no_such_module" in running.skipped["phantom"]
    assert list(running.measured["handover"].rows()) == [OURS, *REFERENCES.get("handover", [])]
    (failure,) = running.failures
    assert failure.startswith("phantom: ") and "no_such_module" in failure, (
        "a missing module that was named is a failure"
    )


@pytest.mark.long
def test_results_before_the_servers_death_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with embedded.Server() as server:
        target = Target(server.url, private=False)
        running = session.Session(target, make_plan(Options(("hot", "handover"), (OURS,), rounds=2, seconds=0.05)))
        # The server ends after the first round.
        monkeypatch.setattr(running, "_measure_round_trip", lambda *args: server.stop())
        try:
            running.run()
        finally:
            running.end()
            target.close()
    assert running.measured["hot"].rows()[OURS].rounds == 1
    assert any("cannot be asked any more" in failure for failure in running.failures)
    assert "handover" not in running.measured


# -------------------------------------------------------------------------------------------------- how a run ends


def descendants(root: int) -> set[int]:
    """Process ids below ``root``."""
    parents = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, ValueError):
                continue
    found, size = {root}, 0
    while len(found) > size:
        size = len(found)
        found |= {pid for pid, parent in parents.items() if parent in found}
    return found - {root}


@pytest.mark.parametrize("scenario", ["hot", "crash"])
def test_interrupt_keeps_results_and_leaves_nothing(
    scenario: str, shared: embedded.Server, db: Any, tmp_path: Path
) -> None:
    args = ("--scenario", scenario, "--rounds", "1000", "--seconds", "0.02", "--processes", "2", "--rival", OURS)
    pipe = subprocess.PIPE
    line = command(*args, "--json", "-", "--url", shared.url)
    with subprocess.Popen(line, cwd=tmp_path, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            assert process.stderr is not None
            while not re.search(r"round ([2-9]|\d\d)", process.stderr.readline()):
                assert process.poll() is None
            workers = descendants(process.pid)
            process.send_signal(signal.SIGINT)
            stdout, stderr = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 130, stderr
    document = json.loads(stdout)
    assert document["interrupted"] is True
    assert document["scenarios"][scenario]["rows"][OURS]["rounds"] >= 1
    assert len(workers) >= 4
    assert not workers & descendants(1), "workers are left"
    assert db.keys() == [b"somebody-else"]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--waiters", "0"), "0 is not between 1 and 10000"),
        (("--waiters", "1,x"), "'x' is not a whole number"),
        (("--rate", "-5"), "-5 is not between"),
        (("--hold", "inf"), "inf is not between"),
        (("--threads", "4", "--tasks", "4"), "not allowed with argument"),
        (("--scenario", "cold"), "invalid choice: 'cold'"),
        (("--rival", "redlock"), "--rival redlock: no such rival"),
        (("--scenario", "pair", "--hold", "1"), "--hold changes hot"),
        (("--scenario", "hot", "--rival", "valkey-glide"), "valkey-glide runs tasks only"),
        (("--url", "redis://127.0.0.1:1/0"), "cannot use redis://127.0.0.1:1/0"),
        (("--url", "http://localhost"), "argument --url"),
    ],
)
def test_bad_input_is_one_line(args: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: object = cli.main(["bench", *args])
    except SystemExit as refused:  # argparse exits so
        code = refused.code
    shown = capsys.readouterr()
    assert (code, shown.out) == (2, "")
    assert shown.err.count("\n") == 1, shown.err
    assert said in shown.err


def test_unusable_servers_are_refused_in_one_line(tmp_path: Path) -> None:
    with embedded.Server(password="s3cret") as server:
        with redis.Redis.from_url(server.url) as db:
            db.acl_setuser("poor", enabled=True, passwords=["+word"], keys=["*"], categories=["+@all"],
                           commands=["-evalsha", "-script|load"])  # fmt: skip
        at = f"{server.path}?db=0"
        for login, said in (("default:wr0ng", "cannot use"), ("poor:word", "cannot measure"), ("poor:word", "EVALSHA")):
            done = bench(tmp_path, "--url", f"unix://{login}@{at}")
            assert done.returncode == 2, done
            assert done.stderr.count("\n") == 1, done.stderr
            assert said in done.stderr
            assert login.partition(":")[2] not in done.stderr


@pytest.mark.long
def test_password_is_in_no_report(tmp_path: Path) -> None:
    with embedded.Server(password="s3cret") as server:
        options = ("--scenario", "hot", "--quick", "--rounds", "1", "--rival", OURS, "--json", "result.json")
        done = bench(tmp_path, *options, "--url", server.url)
    assert done.returncode == 0, done
    text = (tmp_path / "result.json").read_text(encoding="utf-8")
    assert "s3cret" not in text + done.stdout + done.stderr
    assert json.loads(text)["scenarios"]["hot"]["round_trip"] is not None


def test_no_worker_outlives_a_killed_run(shared: embedded.Server, tmp_path: Path) -> None:
    line = command("--scenario", "crash", "--rounds", "1000", "--rival", OURS, "--url", shared.url)
    with subprocess.Popen(line, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "crash" in process.stderr.readline()
        workers = descendants(process.pid)
        process.kill()
    end = time.monotonic() + 20
    while workers & descendants(1) and time.monotonic() < end:
        time.sleep(0.05)
    assert len(workers) >= 4
    assert not workers & descendants(1)
