"""Comparing two results: what counts as a change and what as noise, what cannot be compared, and invalid files."""

from __future__ import annotations

import copy
import io
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from support import results

from fastlock._cli import main as cli
from fastlock._cli.console import Refusal
from fastlock.benches import compared, schema
from fastlock.benches.compare import Change, Comparison, Entry, compare, judged, slower, wider
from fastlock.benches.terminal import plain

TIMES = {"p50": 100.0, "p90": 150.0, "p99": 400.0, "p999": 900.0, "max": 1000.0, "count": 100_000}


def row(rival: str, rate: float, base: float = 1000.0, **more: Any) -> dict[str, Any]:
    """A row of a rival with this rate, where redis-py reaches ``base``; its rounds differ by a tenth."""
    ratio = {"median": rate / base, "low": rate / base, "high": rate / base}
    return {
        "rival": rival,
        "rate": {"median": rate, "low": 0.9 * rate, "high": 1.1 * rate},
        "ratio": ratio,
        "wait_us": dict(TIMES),
        "server_cpu_us": 10.0,
        "commands_per_grant": 2.0,
        **more,
    }


def result(ours: float = 4000.0, base: float = 1000.0, **more: Any) -> dict[str, Any]:
    """A small result: fastlock and redis-py in one scenario, 5 % of noise."""
    rows = {"fastlock": row("fastlock", ours, base), "redis-py": row("redis-py", base, base)}
    scenario = {"title": "one name", "kind": "contention", "unit": "grants", "parameters": {"lanes": 8}, "rows": rows}
    scenario |= {"points": [], "round_trip": {"p50_us": 50.0, "p99_us": 90.0, "pairs_per_s": 20_000.0}}
    made = {
        "schema": schema.SCHEMA,
        "created": "2025-11-21T14:39:00+00:00",
        "environment": copy.deepcopy(results.ENVIRONMENT),
        "parameters": {"rounds": 5, "seconds": 1.0, "scenarios": ["hot"]},
        "noise": {"hot": {"spread": 0.05}},
        "scenarios": {"hot": scenario},
        "failures": [],
    }
    return made | more


def ours(made: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = made["scenarios"]["hot"]["rows"]["fastlock"]
    return found


def base(made: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = made["scenarios"]["hot"]["rows"]["redis-py"]
    return found


def entry(comparison: Comparison, rival: str = "fastlock") -> Entry:
    (found,) = (each for each in comparison.entries if each.rival == rival)
    return found


def change(a: dict[str, Any], b: dict[str, Any], measure: str, rival: str = "fastlock") -> Change:
    return entry(compare(a, b), rival).changes[measure]


def text_of(a: dict[str, Any], b: dict[str, Any], percent: float | None = None) -> str:
    stream = io.StringIO()
    compared.show(compare(a, b), ("a.json", "b.json"), percent, stream)
    return stream.getvalue()


# ----------------------------------------------------------------------------------------------------- change or noise


def test_same_result_shows_no_change() -> None:
    for each in compare(result(), result()).entries:
        assert {(found.ratio, found.verdict) for found in each.changes.values()} == {(1.0, "same")}
    assert slower(compare(result(), result()), 0) == []


def test_rate_and_its_range() -> None:
    found = change(result(4000), result(3000), "rate")
    assert (found.a, found.b, found.ratio, found.relative) == (4000, 3000, 0.75, 0.75)
    assert found.low == pytest.approx(0.75 * 0.9 / 1.1)
    assert found.high == pytest.approx(0.75 * 1.1 / 0.9)
    assert found.noise == pytest.approx(1.05 * 1.05 - 1)
    assert (found.verdict, found.slowdown) == ("worse", pytest.approx(4 / 3))


@pytest.mark.parametrize(
    ("rate", "verdict"), [(4000, "same"), (3650, "same"), (3600, "worse"), (4400, "same"), (4420, "better")]
)
def test_rate_has_to_leave_the_noise_of_both_runs(rate: float, verdict: str) -> None:
    assert change(result(4000), result(rate), "rate").verdict == verdict


def test_a_faster_machine_is_no_faster_lock() -> None:
    assert change(result(4000, 1000), result(6000, 1500), "rate").verdict == "same"
    hidden = change(result(4000, 1000), result(4000, 1500), "rate")
    assert (hidden.ratio, hidden.by, hidden.verdict) == (1.0, "relative", "worse")
    assert hidden.slowdown == pytest.approx(1.5)


def test_times_have_to_change_more_than_those_of_redis_py() -> None:
    a, b = result(), result()
    ours(b)["wait_us"]["p99"] = 480.0
    assert change(a, b, "wait p99").verdict == "worse"
    base(b)["wait_us"]["p99"] = 500.0
    found = change(a, b, "wait p99")
    assert (found.verdict, found.noise, found.by) == ("same", pytest.approx(0.25), "ratio")
    base(b)["wait_us"]["p99"] = 320.0  # in whichever direction it changed
    assert change(a, b, "wait p99").noise == pytest.approx(0.25)


def test_percentile_of_few_calls_is_not_judged() -> None:
    a, b = result(), result()
    ours(b)["wait_us"] |= {"p50": 300.0, "p99": 4000.0, "count": 1999}
    assert change(a, b, "wait p99").verdict == "few"
    assert change(a, b, "wait p50").verdict == "worse"
    assert [name for _, name in slower(compare(a, b), 10)] == ["wait p50"]


def test_costs_are_shown_but_are_not_slowness() -> None:
    a, b = result(), result()
    ours(b)["server_cpu_us"] = 30.0
    found = change(a, b, "server CPU")
    assert (found.ratio, found.verdict, found.slowdown) == (3.0, "worse", None)
    assert slower(compare(a, b), 0) == []


def test_standstill_is_slower_than_anything() -> None:
    stopped = result()
    ours(stopped)["rate"] = dict.fromkeys(("median", "low", "high"), 0)
    ours(stopped)["ratio"] = dict.fromkeys(("median", "low", "high"), 0)
    found = change(result(), stopped, "rate")
    assert (found.verdict, found.slowdown) == ("worse", math.inf)
    assert change(stopped, result(), "rate").verdict == ""  # there is no rate to divide by


def test_unmeasured_noise_is_that_of_the_rounds() -> None:
    a, b = result(noise={}), result(3000, noise={})
    assert change(a, b, "rate").noise == pytest.approx((1 / 0.9) ** 2 - 1)
    ours(a)["rate"]["low"] = 0
    assert change(a, b, "rate").noise is None


def test_judgement() -> None:
    assert [judged(ratio, 0.1, "more") for ratio in (None, 1.05, 0.5, 2)] == ["", "same", "worse", "better"]
    assert [judged(ratio, None, "less") for ratio in (1, 1.001, 0.999)] == ["same", "worse", "better"]
    assert [wider(*each) for each in ((None, None), (0.1, None), (0.1, 1.25), (0.1, 0.5), (None, 1.25))] == (
        [None, 0.1, 0.25, 1.0, 0.25]
    )


# ------------------------------------------------------------------------------------------------------- other settings


@pytest.mark.parametrize(
    ("place", "value"),
    [
        *((("environment", "kernel"), "Linux 6.9"), (("environment", "cpus"), 64), (("environment", "python"), "PyPy")),
        *((("environment", "cpu_model"), "another"), (("environment", "build"), "debug")),
        *((("environment", "server", "version"), "8.0"), (("parameters", "seconds"), 0.1)),
        (("environment", "rivals", "redis-py", "redis-py"), "5.0"),
    ],
)
def test_other_setting_leaves_only_ratios(place: tuple[str, ...], value: Any) -> None:
    a, b = result(4000, 1000), result(8000, 2000)
    at: Any = b
    for key in place[:-1]:
        at = at[key]
    at[place[-1]] = value
    comparison = compare(a, b)
    assert len(comparison.differs) == 1
    changes = entry(comparison).changes
    assert {each.by for each in changes.values()} == {"relative"}
    assert changes["rate"].verdict == "same"
    assert "the runs differ, so only ratios to redis-py within each of them can be compared" in text_of(a, b)


def test_times_relative_to_redis_py() -> None:
    a, b = result(), result()
    b["environment"]["cpus"] = 64
    ours(b)["wait_us"]["p50"], base(b)["wait_us"]["p50"] = 40.0, 20.0
    found = change(a, b, "wait p50")
    assert (found.ratio, found.relative, found.verdict) == (0.4, 2.0, "worse")
    assert [name for _, name in slower(compare(a, b), 50)] == ["wait p50"]


def test_load_commit_and_number_of_rounds_do_not_matter() -> None:
    b = result()
    b["environment"] |= {"load": 9.9, "commit": "fedcba", "fastlock": "9.9"}
    b["parameters"] |= {"rounds": 50, "scenarios": ["hot", "pair"]}
    b["environment"]["rivals"]["fastlock"] = {"fastlock": "9.9"}
    assert compare(result(), b).differs == {}


def test_a_scenario_with_other_settings_is_not_judged() -> None:
    a, b = result(4000), result(100)
    b["scenarios"]["hot"]["parameters"] = {"lanes": 64}
    comparison = compare(a, b)
    assert comparison.changed_parameters == {"hot": {"lanes": (8, 64)}}
    assert {each.verdict for each in entry(comparison).changes.values()} == {""}
    assert "hot was run otherwise in b, nothing of it can be compared: lanes 8 / 64" in text_of(a, b)


def test_points_of_sweeps_are_compared_one_by_one() -> None:
    a, b = result(), result()
    for made, rates in ((a, (4000, 3000)), (b, (4000, 1500))):
        made["scenarios"]["hot"]["points"] = [
            {"x": x, "rival": name, "row": row(name, rate)}
            for x, rate in zip((1, 64), rates, strict=True)
            for name, rate in (("fastlock", rate), ("redis-py", 1000.0))
        ]
    del b["scenarios"]["hot"]["points"][0]
    comparison = compare(a, b)
    assert [(each.x, what) for each, what in slower(comparison, 10)] == [(64.0, "rate"), (1.0, "gone")]
    assert comparison.only_a == ["hot, fastlock at 1"]
    assert "SLOWER  hot, fastlock at 64: rate, takes 2.00 times as long" in text_of(a, b, 10)


def test_entries_of_one_run_only_are_named() -> None:
    a, b = result(), result()
    b["scenarios"]["hot"]["rows"]["pottery"] = row("pottery", 200)
    del b["scenarios"]["hot"]["rows"]["redis-py"]
    comparison = compare(a, b)
    assert (comparison.only_a, comparison.only_b) == (["hot, redis-py"], ["hot, pottery"])
    assert "only in b: hot, pottery" in text_of(a, b)


# ------------------------------------------------------------------------------------------------------------- the text


@pytest.mark.parametrize("rich", [True, False], ids=["rich", "plain"])
def test_table(rich: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not rich:
        for name in ("rich", "rich.box", "rich.console", "rich.table", "rich.text"):
            monkeypatch.setitem(sys.modules, name, None)
    a, b = result(4000), result(3000)
    ours(b)["wait_us"]["p99"] = 800.0
    lines = [" ".join(line.split()) for line in text_of(a, b, 10).splitlines()]
    assert "hot: one name (raw round trip 50.0 us / 50.0 us, b/a 1.00)" in lines
    assert "rival per second x redis-py wait p50 wait p99 commands server CPU" in lines
    assert "fastlock a 4,000 4.00 100 us 400 us 2.00 10.0 us" in lines
    assert "b 3,000 3.00 100 us 800 us 2.00 10.0 us" in lines
    assert "b/a 0.75 (0.61..0.92) 0.75 worse 1.00 ~ 2.00 worse 1.00 ~ 1.00 ~" in lines
    assert "SLOWER hot, fastlock: rate, takes 1.33 times as long" in lines
    assert "SLOWER hot, fastlock: wait p99, takes 2.00 times as long" in lines


def test_table_where_only_ratios_can_be_compared() -> None:
    b = result(8000, 2000)
    b["environment"]["cpus"] = 64
    lines = [" ".join(line.split()) for line in text_of(result(), b, 10).splitlines()]
    assert "cpus: 2 / 64" in lines
    assert "b/a 2.00 (1.64..2.44) 1.00 1.00 1.00 1.00" in lines
    assert "b/a rel. 1.00 ~ 1.00 ~ 1.00 ~ 1.00 ~ 1.00 ~" in lines
    assert "nothing of fastlock got slower by more than 10 % and the noise" in lines


@pytest.fixture(scope="module")
def complete() -> dict[str, Any]:
    """A result that covers every kind of scenario."""
    return results.document()


def test_complete_results_make_plain_text(complete: dict[str, Any]) -> None:
    text = text_of(complete, complete)
    assert text.replace("─", "").isascii()
    for scenario in complete["scenarios"]:
        assert f"\n{scenario}: " in text


def test_failures_and_cut_runs_come_first() -> None:
    a, b = result(interrupted=True), result(failures=["keys left behind"])
    b["parameters"]["quick"] = True
    base(b)["violations"] = 2
    text = text_of(a, b)
    for words in (
        "warning: a was interrupted",
        "warning: b is a quick run",
        "b  FAILED  keys left behind",
        "b  FAILED  hot, redis-py: more than one held a lock",
    ):
        assert text.index(words) < text.index("per second")


def test_text_of_a_result_cannot_steer_a_terminal() -> None:
    assert plain("a\x1b[31m\nb\u202eç ≈ 1 µs") == "a [31m b ? ~ 1 us"
    evil = result()
    evil["scenarios"]["hot"]["rows"]["[red]\x1b[2J"] = row("x", 1)
    evil["scenarios"]["hot"]["title"] = "[bold]\x07"
    text = text_of(evil, evil)
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "[red] [2J" in text


# -------------------------------------------------------------------------------------------------- the command line


def bench(*args: object) -> int:
    return cli.main(["bench", *map(str, args)])


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Path]:
    """Two results in files; in the second fastlock is slower."""
    paths = tmp_path / "a.json", tmp_path / "b.json"
    for path, made in zip(paths, (result(4000), result(2000)), strict=True):
        path.write_text(json.dumps(made))
    return paths


def test_exit_codes(saved: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    a, b = saved
    assert bench("compare", a, b) == 0
    assert bench("compare", a, b, "--fail-over", 90) == 1
    assert bench("compare", a, b, "--fail-over", "110%") == 0
    assert bench("compare", b, a, "--fail-over", 0) == 0
    assert capsys.readouterr().err == ""


def test_failed_run_does_not_pass(saved: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    a, b = saved
    b.write_text(json.dumps(result(failures=["it broke"])))
    assert bench("compare", a, b) == 0
    assert bench("compare", a, b, "--fail-over", 10) == 1
    assert "b FAILED: it broke" in capsys.readouterr().out


@pytest.mark.parametrize("rest", [("redis-py",), ("redis-py", "fallback")])
def test_a_missing_fastlock_does_not_pass(
    rest: tuple[str, ...], saved: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = saved
    older, newer = result(), result()
    older["scenarios"]["hot"]["rows"]["fallback"] = row("fallback", 3000)
    older["scenarios"]["hot"]["rows"]["pottery"] = row("pottery", 300)  # this rival may be missing
    newer["scenarios"]["hot"]["rows"] = {name: older["scenarios"]["hot"]["rows"][name] for name in rest}
    a.write_text(json.dumps(older))
    b.write_text(json.dumps(newer))
    assert bench("compare", a, b) == 0
    assert bench("compare", a, b, "--fail-over", 10, "--json", b.parent / "out.json") == 1
    text = capsys.readouterr().out
    assert "GONE  hot, fastlock: b has not run it" in text
    assert "GONE  hot, pottery" not in text
    assert "nothing of fastlock got slower" not in text
    made = json.loads((b.parent / "out.json").read_text())
    assert {"scenario": "hot", "rival": "fastlock", "x": None, "measure": "gone"} in made["slower"]
    assert bench("compare", b, a, "--fail-over", 10) == 2 - ("fallback" in rest) * 2  # new entries are no failure


def test_json(saved: tuple[Path, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    a, b = saved
    assert bench("compare", a, b, "--json", "-", "--fail-over", 10) == 1
    out, err = capsys.readouterr()
    assert "SLOWER" in err
    made = json.loads(out)
    assert made["schema"] == "fastlock-bench-compare/1"
    assert made["a"]["file"] == str(a)
    assert made["slower"] == [{"scenario": "hot", "rival": "fastlock", "x": None, "measure": "rate"}]
    (fastlock,) = (each for each in made["entries"] if each["rival"] == "fastlock")
    assert fastlock["changes"]["rate"] == {
        **{"a": 4000, "b": 2000, "ratio": 0.5, "low": pytest.approx(0.9 / 2.2), "high": pytest.approx(1.1 / 1.8)},
        **{"relative": 0.5, "by": "relative", "noise": pytest.approx(0.1025), "verdict": "worse", "slowdown": 2.0},
    }
    assert bench("compare", a, b, "--json", tmp_path / "out.json") == 0
    assert json.loads((tmp_path / "out.json").read_text())["slower"] is None


def test_json_has_no_infinity(saved: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    a, b = saved
    stopped = result()
    ours(stopped)["ratio"] = ours(stopped)["rate"] = dict.fromkeys(("median", "low", "high"), 0)
    b.write_text(json.dumps(stopped))
    assert bench("compare", a, b, "--json", "-", "--fail-over", 10) == 1
    assert "Infinity" not in capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of a refusal."""
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert (out, line.startswith("fastlock")) == ("", True)
    return str(line)


WRONG: list[tuple[bytes, str]] = [
    (b"", "it is not JSON"),
    (b"\xff\xfe\x00", "it is not JSON"),
    (b"{", "it is not JSON"),
    (b"[" * 100_000, "it is not JSON"),
    (b'{"schema": NaN}', "it is not JSON (expected value at line 1 column 12)"),
    (b"[]", "it is not a result of fastlock bench"),
    (b'{"a": 1}', "it is not a result of fastlock bench"),
    (b'{"schema": "fastlock-bench/1"}', "its schema is 'fastlock-bench/1', this fastlock reads 'fastlock-bench/2'"),
    (b'{"schema": ["x"]}', "its schema is "),
    (b'{"schema": "fastlock-bench/2"}', "scenarios: Field required"),
    (b'{"schema": "fastlock-bench/2", "scenarios": []}', "scenarios: Input should be a valid dictionary, not []"),
    (b'{"schema": "fastlock-bench/2", "scenarios": {}}', "have no rival of any scenario in common"),
]


@pytest.mark.parametrize(("content", "words"), WRONG, ids=range(len(WRONG)))
def test_an_invalid_result_is_refused(
    content: bytes, words: str, saved: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = saved
    b.write_bytes(content)
    assert bench("compare", a, b) == 2
    assert words in refused(capsys)


def test_missing_file_and_directory(
    saved: tuple[Path, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert bench("compare", saved[0], tmp_path / "nowhere.json") == 2
    assert "nowhere.json: No such file or directory" in refused(capsys)
    assert bench("compare", tmp_path, saved[0]) == 2
    assert "Is a directory" in refused(capsys)


FASTLOCK = ("scenarios", "hot", "rows", "fastlock")
SHAPES: list[tuple[tuple[str | int, ...], Any, str]] = [
    (("scenarios", "hot"), [], "scenarios.hot: Input should be a valid dictionary, not []"),
    (("scenarios", "hot"), None, "scenarios.hot: Input should be a valid dictionary, not null"),
    (("scenarios", "hot", "kind"), 7, "scenarios.hot.kind: Input should be a valid string, not 7"),
    (("scenarios", "hot", "rows"), [1], "scenarios.hot.rows: Input should be a valid dictionary"),
    ((*FASTLOCK, "rate"), 5, "scenarios.hot.rows.fastlock.rate: Input should be a valid dictionary, not 5"),
    ((*FASTLOCK, "rate"), {"median": 1}, "scenarios.hot.rows.fastlock.rate.low: Field required"),
    ((*FASTLOCK, "rate", "low"), "1", 'Input should be a valid number, not "1"'),
    ((*FASTLOCK, "rate", "low"), -1, "Input should be greater than or equal to 0, not -1"),
    ((*FASTLOCK, "rate", "low"), True, "Input should be a valid number, not true"),
    ((*FASTLOCK, "rate", "low"), 10**400, "Input should be a valid number, not 1000"),
    ((*FASTLOCK, "rate", "low"), math.inf, "Input should be less than or equal to 1000000000000000000, not Infinity"),
    ((*FASTLOCK, "wait_us", "p99"), [], "Input should be a valid number, not []"),
    ((*FASTLOCK, "noisy"), 1, "Input should be a valid boolean, not 1"),
    ((*FASTLOCK, "histograms"), {"wait": 1}, "Input should be a valid string, not 1"),
    ((*FASTLOCK, "fairness"), {"grants": 1}, "Input should be a valid list, not 1"),
    ((*FASTLOCK, "fairness"), {"grants": [None]}, "fairness.grants.0: Input should be a valid number, not null"),
    (("scenarios", "hot", "points"), [{"x": 1}], "scenarios.hot.points.0.rival: Field required"),
    (
        ("scenarios", "hot", "points"),
        [{"x": 0, "rival": "a", "row": {}}],
        "points.0.x: Input should be greater than 0, not 0",
    ),
    (("noise", "hot"), 0.04, "noise.hot: Input should be a valid dictionary, not 0.04"),
    (("failures",), "broken", 'failures: Input should be a valid list, not "broken"'),
    (("skipped",), {"a": 1}, "skipped.a: Input should be a valid string, not 1"),
    (("environment",), [], "environment: Input should be a valid dictionary, not []"),
    (("budgets",), [{}], "budgets.0.name: Field required"),
]


@pytest.mark.parametrize(("place", "value", "words"), SHAPES)
def test_wrong_shape_is_refused_with_its_path(place: tuple[str, ...], value: Any, words: str) -> None:
    made: Any = result()
    at = made
    for key in place[:-1]:
        at = at[key]
    at[place[-1]] = value
    with pytest.raises(Refusal) as refusal:
        schema.checked(made, "b.json")
    assert words in str(refusal.value)
    assert str(refusal.value).startswith("b.json: ")


def test_optional_fields_may_be_missing(complete: dict[str, Any]) -> None:
    for made in (complete, result()):
        assert schema.checked(made, "it") is made
    rows = {"a": None, "b": {}, "c": dict.fromkeys(schema.RowShape.__annotations__)}
    scenario = dict.fromkeys(schema.ScenarioShape.__annotations__) | {"rows": rows}
    bare = {"schema": schema.SCHEMA, "scenarios": {"x": scenario, "y": {}}, "something": "new"}
    assert list(schema.rows_of(schema.checked(bare, "it")["scenarios"]["x"])) == ["b", "c"]
    assert compare(bare, bare).entries[0].changes == {}


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("compare",), "required"),
        (("compare", "a.json"), "required"),
        (("compare", "a", "b", "--fail-over", "much"), "is not a number of percent"),
        (("compare", "a", "b", "--fail-over", "-1"), "from 0 on"),
        (("compare", "a", "b", "--fail-over", "nan"), "from 0 on"),
        (("contrast", "a", "b"), "invalid choice"),
        (("render", "a"), "required"),
    ],
)
def test_bad_usage(args: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        bench(*args)
    assert stopped.value.code == 2
    assert words in refused(capsys)


@pytest.mark.parametrize("option", [("--quick",), ("--rounds", "3"), ("--url", "redis://localhost")])
def test_options_of_a_run_are_refused(
    option: tuple[str, ...], saved: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(*option, "compare", *saved) == 2
    assert f"{option[0]} is for a run" in refused(capsys)


def test_nothing_to_judge_is_refused(saved: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    a, b = saved
    for path in saved:
        made = result()
        del made["scenarios"]["hot"]["rows"]["fastlock"]
        path.write_text(json.dumps(made))
    assert bench("compare", a, b, "--fail-over", 10) == 2
    assert "nothing of fastlock can be compared" in refused(capsys)
