"""Files that the benchmark cannot read or write: one line, exit code 2, before anything is measured.

The contents of readable results: test_html.py and test_compare.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import results

from fastlock._cli import main as cli


def bench(*args: object) -> int:
    return cli.main(["bench", *map(str, args)])


def refused(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    """The one line of a refusal."""
    try:
        code = bench(*args)
    except SystemExit as stopped:  # raised by argparse
        code = stopped.code  # type: ignore[assignment]
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert (code, out) == (2, ""), (code, out)
    return str(line)


@pytest.mark.parametrize("option", ["--json", "--html"])
def test_an_unwritable_path_is_refused_before_the_run(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in (tmp_path, "", tmp_path / "no" / "such.file"):
        assert "directory" in refused(capsys, "--scenario", "pair", option, place)
    sealed = tmp_path / "sealed"
    sealed.write_text("")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # for root the system refuses nothing
    assert "cannot be written" in refused(capsys, "--scenario", "pair", option, sealed)


def test_json_that_cannot_be_shown_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved, made = tmp_path / "result.json", tmp_path / "report.html"
    document = results.document()
    deep: list[object] = []
    for _ in range(950):
        deep = [deep]
    for value in (deep, "\ud800", {"\udfff": 1}):
        saved.write_text(json.dumps(document | {"parameters": {"seen": value}}))
        assert "result.json: it is not JSON" in refused(capsys, "render", saved, made)
        assert "result.json: it is not JSON" in refused(capsys, "compare", saved, saved)
    assert not made.exists()


def test_results_of_a_debug_build_are_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    release, debug = tmp_path / "release.json", tmp_path / "debug.json"
    document = results.document()
    release.write_text(json.dumps(document))
    debug.write_text(json.dumps(document | {"environment": document["environment"] | {"build": "debug"}}))
    assert "debug.json: it was measured on a debug build" in refused(capsys, "compare", release, debug)
    assert bench("compare", release, release) == 0


def test_a_result_without_any_scenario_makes_no_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved, made = tmp_path / "result.json", tmp_path / "report.html"
    saved.write_text(json.dumps(results.document() | {"scenarios": {}}))
    assert "result.json: nothing was measured" in refused(capsys, "render", saved, made) and not made.exists()


WITHOUT = "import sys; sys.modules[sys.argv.pop(1)] = None; from fastlock._cli import main; sys.exit(main.main())"


@pytest.mark.parametrize(
    ("library", "command"),
    [
        ("pydantic", "compare A.json A.json"),
        ("pydantic", "--scenario pair --json out.json"),
        ("hdrh", "--scenario pair"),
        ("plotly", "render A.json out.html"),
        ("plotly", "--scenario pair --html out.html"),
    ],
)
def test_a_missing_library_is_refused_before_anything_is_measured(library: str, command: str, tmp_path: Path) -> None:
    (tmp_path / "A.json").write_text(json.dumps(results.document()))
    program = [sys.executable, "-c", WITHOUT, library, "bench", *command.split()]
    done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, timeout=40)
    assert (done.returncode, done.stdout) == (2, "")
    assert library in done.stderr and done.stderr.endswith('pip install ".[bench]"\n'), done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["A.json"]
