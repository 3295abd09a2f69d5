"""`fastlock bench --rtt`: the relay that makes round trips long, and what is run through it. No speed is judged."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis

from fastlock import embedded
from fastlock._cli.console import Refusal
from fastlock.benches import budgets
from fastlock.benches.contention import analysis, clients, contests
from fastlock.benches.contention.log import LATE, Grant
from fastlock.benches.plan import NETWORKED, Options, make_plan
from fastlock.benches.raw import RawSocket
from fastlock.benches.relay import Relay, why_not
from fastlock.benches.stats import Percentiles, Row, Spread

MS = 1_000_000  # nanoseconds
pytest.importorskip("fastlock.benches._relay", reason="the relay is compiled")


# ------------------------------------------------------------------------------------------------------- the relay


@pytest.fixture(params=[False, True], ids=["unix", "tcp"])
def relay(request: pytest.FixtureRequest) -> Iterator[Relay]:
    with embedded.Server(tcp=request.param) as server:
        relay = Relay(server.url, 0.005)
        try:
            yield relay
        finally:
            relay.close()


def test_it_adds_a_round_trip(relay: Relay) -> None:
    assert relay.url.startswith("redis://127.0.0.1:")
    with redis.Redis.from_url(relay.url) as client:
        client.set("a", b"x" * 200_000)
        assert client.get("a") == b"x" * 200_000
        with client.pipeline(transaction=False) as pipe:
            for _ in range(100):
                pipe.ping()
            began = time.monotonic()
            assert pipe.execute() == [True] * 100
            assert time.monotonic() - began < 0.4, "what is pipelined is delayed side by side"
    ping = RawSocket(relay.url)
    for seconds, at_least in ((0.005, 10 * MS), (0.02, 40 * MS)):
        relay.hold_back(seconds)
        assert min(ping.ping_pairs(0.05)) >= at_least
    relay.delay(0)
    assert min(ping.ping_pairs(0.05)) < 10 * MS
    ping.close()
    relay.close()
    with pytest.raises(redis.ConnectionError):
        redis.Redis.from_url(relay.url).ping()


def test_many_connections_at_once_keep_their_order(relay: Relay) -> None:
    """Of each connection, while others come and go and the delay changes."""
    wrong: list[object] = []

    def use(number: int) -> None:
        for turn in range(10):
            with redis.Redis.from_url(relay.url) as client, client.pipeline(transaction=False) as pipe:
                for at in range(50):
                    pipe.echo(f"{number} {turn} {at} {'x' * 50 * at}")
                found = pipe.execute()
                wrong.extend(
                    each for at, each in enumerate(found) if not each.startswith(b"%d %d %d " % (number, turn, at))
                )

    threads = [threading.Thread(target=use, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for seconds in (0.003, 0.0, 0.002, 0.001):
        relay.delay(seconds)
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("relay", [False], indirect=True)
def test_it_passes_on_that_a_connection_ends(relay: Relay) -> None:
    db = redis.Redis.from_url(relay.url)
    client = redis.Redis.from_url(relay.url, client_name="relayed")
    client.ping()
    assert "relayed" in [each["name"] for each in db.client_list()]
    client.close()
    until = time.monotonic() + 5
    while "relayed" in [each["name"] for each in db.client_list()]:
        assert time.monotonic() < until
    db.close()


def test_a_certificate_must_be_for_its_address() -> None:
    assert why_not("redis://localhost") == why_not("rediss://127.0.0.1:7000") == ""
    assert "the certificate says another host" in why_not("rediss://localhost")


# ------------------------------------------------------------------------------------------------------ the plan


def test_every_scenario_runs_at_each_round_trip() -> None:
    plan = make_plan(Options(rtt=(0.2, 1.0)))
    assert plan.scenarios == NETWORKED and plan.as_dict()["rtt"] == [0.2, 1.0]
    for stage in plan.stages:
        assert (stage.kind, stage.sweep, stage.parameters["rtt_ms"]) == ("rtt", True, [0.2, 1.0])
        assert [(x, spec.rtt) for x, spec in stage.specs] == [(0.2, 0.0002), (1.0, 0.001)]
    hot = next(stage for stage in plan.stages if stage.name == "hot").specs[0][1].contest
    assert hot is not None and (hot.processes, hot.clients) == (4, 4)
    (stage,) = make_plan(Options(("hot",), rtt=(1.0,), threads=3)).stages
    assert stage.specs[0][1].contest.clients == 12  # type: ignore[union-attr]
    with pytest.raises(Refusal, match="--rtt: crash is not run through a network, only pair"):
        make_plan(Options(("crash",), rtt=(1.0,)))


# ---------------------------------------------------------------------------------------------------- its bounds


def row(rival: str, rate: float) -> Row:
    return Row(rival, 1, 100, Spread(rate, rate, rate))


def judged(scenario: str, points: dict[float | None, dict[str, float]], **more: Any) -> list[tuple[float | None, bool]]:
    rows = {x: {rival: row(rival, rate) for rival, rate in found.items()} for x, found in points.items()}
    results = {scenario: budgets.ScenarioResult(rows, more)}
    return [(each.measured, each.met) for each in budgets.judge(results, (scenario,), network=True)]


def test_bounds_are_round_trips() -> None:
    """Of a round trip, two are measured at a time."""
    pair = {"round trip": 500.0, "unconfirmed": 900.0, "redis-py": 400.0}
    pair["kept"] = 3e5
    assert judged("pair", {1.0: pair}) == [(pytest.approx(1.11, abs=0.01), True), (2.25, True), (3e5, True)]
    assert judged("pair", {1.0: pair | {"unconfirmed": 800.0}}) == [(1.25, False), (2.0, True), (3e5, True)]
    assert judged("pair", {5.0: pair}) == [(None, False), (2.25, True), (3e5, True)]
    assert judged("pair", {1.0: pair, 5.0: {"round trip": 100.0, "redis-py": 90.0}})[1:] == [(None, False)] * 2
    assert judged("pair", {1.0: pair, 5.0: pair | {"kept": 1e5}})[2] == (1e5, False)
    assert judged("tasks", {1.0: {"kept": 3e5}}) == [(3e5, False)]
    assert judged("hot", {1.0: {"round trip": 500.0, "fair": 450.0}}, hold_ms=1) == [(0.9, True)]
    assert judged("hot", {1.0: {"round trip": 500.0, "fair": 400.0}}, hold_ms=1) == [(0.8, False)]
    handover = {"round trip": 500.0, "fastlock": 800.0, "kept": 600.0}
    assert judged("handover", {1.0: handover}) == [(0.75, False), (1.25, False)]
    sale = {x: {"fastlock": rate, "redis-py": 100.0} for x, rate in ((0.2, 300.0), (1.0, 150.0), (5.0, 140.0))}
    assert judged("flash-sale", {**sale}) == [(1.4, False)]
    assert judged("pair", {}) == [(None, False)] * 3
    waits = Percentiles(2600.0, 1, 3100.0, 1, 1, 5)
    kept = replace(row("kept", 100.0), wait_us=waits)
    two = replace(row("round trip", 500.0), latency_us=Percentiles(1, 1, 2150.0, 1, 1, 5))
    results = {"recall": budgets.ScenarioResult({1.0: {"kept": kept, "round trip": two}}, {"hold_ms": 1})}
    (verdict,) = budgets.judge(results, ("recall",), network=True)
    assert (verdict.measured, verdict.met, verdict.detail) == (
        pytest.approx(2.1),
        True,
        "median 1.6; two PINGs alone: 2.15",
    )
    assert judged("recall", {1.0: {"kept": 100.0}}) == [(None, False)]


def test_who_asks_now_and_then_has_arrivals_and_the_first_client_none() -> None:
    recall = replace(contests.SCENARIOS["recall"].contest, clients=3)
    first, *others = clients.arrivals(recall, 7, 2.0)
    assert first == [] and [len(stream) for stream in others] == [8, 8] and others[0] != others[1]
    assert all(stream[0] > 0 and stream[-1] < 2e9 for stream in others)
    assert all(after - before >= 125e6 for stream in others for before, after in itertools.pairwise(stream))
    assert clients.arrivals(recall, 7, 2.0) == [first, *others]


def test_only_waits_of_those_who_ask_count_in_a_recall() -> None:
    contest = contests.SCENARIOS["recall"].contest
    records = [Grant(0, 0, 0, 0, 50, 60, 70), Grant(1, 0, 30, 35, 90, 95, 99), Grant(0, 0, 80, 80, 120, 130, 140)]
    found = analysis.measure(contest, records, [[0] * (LATE + 1)] * 2, [], 0, 1.0)
    assert found.times["wait"] == [60] and found.counts["grants"] == 3


# ----------------------------------------------------------------------------------------------------- whole runs


@pytest.mark.long
def test_a_run_through_a_network(measurable: None, tmp_path: Path) -> None:
    words = [
        sys.executable,
        "-m",
        "fastlock",
        "bench",
        "--rtt",
        "0.3,2",
        "--quick",
        "--rounds",
        "1",
        "--seconds",
        "0.05",
    ]
    chosen = ["--scenario", "pair", "--scenario", "handover", "--rival", "fallback", "--rival", "redis-py"]
    written = ["--json", "result.json", "--html", "result.html"]
    done = subprocess.run([*words, *chosen, *written], cwd=tmp_path, capture_output=True, text=True, timeout=55)
    assert done.returncode == 0, done
    found = json.loads((tmp_path / "result.json").read_text("utf-8"))
    assert found["failures"] == [] and found["parameters"]["rtt"] == [0.3, 2]
    for name, scenario in found["scenarios"].items():
        assert (scenario["kind"], scenario["rows"]) == ("rtt", {}), name
        points = {(each["x"], each["rival"]): each["row"] for each in scenario["points"]}
        assert points.keys() == {(x, rival) for x in (0.3, 2) for rival in ("fallback", "redis-py", "round trip")}
        # A busy machine makes them longer; what waking up costs is taken off, 0.3 ms of each of the two at most
        assert points[2, "round trip"]["latency_us"]["p50"] >= 2 * (2000 - 300)
        # One pair in 0.05 s may have begun before they did
        assert points[2, "redis-py"]["rate"]["median"] < 250 + 20 < points[0.3, "redis-py"]["rate"]["median"] * 10
    # The sentence about the machine, which says how many CPUs it has, may be broken anywhere
    shown = [line.split()[:2] for line in done.stdout.partition("RTT ms")[2].splitlines()]
    shown = [words for words in shown if words[:1] in (["0.3"], ["2"])]
    one = [[rtt, rival] for rtt in ("0.3", "2") for rival in ("fallback", "redis-py", "round")]
    assert sorted(shown) == sorted(2 * one), "a line for each round trip and rival, of both scenarios"
    page = (tmp_path / "result.html").read_text("utf-8")
    assert "Throughput against the round trip to the server" in page


@pytest.mark.skipif(shutil.which("redis-server") is None, reason="Debian's redis-server has TLS")
def test_a_run_through_a_network_by_tls(measurable: None, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "fastlock", "bench", "--tls", "--rtt", "0.5", "--scenario", "pair", "--quick"]
    words += ["--rounds", "1", "--seconds", "0.05", "--rival", "fallback", "--rival", "redis-py", "--json", "-"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=55)
    assert done.returncode == 0, done
    points = json.loads(done.stdout)["scenarios"]["pair"]["points"]
    assert {each["rival"] for each in points} == {"fallback", "redis-py", "round trip"}
    assert min(each["row"]["latency_us"]["p50"] for each in points) >= 2 * (500 - 300)


def test_a_server_without_tls_is_refused(measurable: None, tmp_path: Path) -> None:
    program = tmp_path / "valkey-server"
    program.symlink_to(embedded.find_server().path)
    words = [sys.executable, "-m", "fastlock", "bench", "--tls", "--scenario", "pair"]
    refused = {
        ("--server", str(program)): "--tls needs a server that was built with TLS",
        ("--url", "redis://127.0.0.1:1"): "--tls is for the server that is started",
    }
    for more, why in refused.items():
        done = subprocess.run([*words, *more], cwd=tmp_path, capture_output=True, text=True, timeout=55)
        assert done.returncode == 2 and why in done.stderr, done
