"""What `make` promises whoever develops: that no failure hides what else there is to be known."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STAMPS = ("pyvenv.cfg", ".installed", ".core-release")

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def make_test(
    folder: Path, exit_code: str, target: str = "test"
) -> tuple[list[list[str]], subprocess.CompletedProcess[str]]:
    """`make test`, or another target, in a virtualenv whose interpreter only says what it was asked for, and exits with
    this code, an expression of the shell. Returns the words of each session, and how make ended."""
    for stamp in STAMPS:  # newer than all that it is made from
        (folder / stamp).touch()
    python = folder / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\necho "session $FASTLOCK_IMPL $*"\nexit {exit_code}\n')
    python.chmod(0o755)
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command = ["make", "--directory", str(ROOT), target, f"VENV={folder}"]
    done = subprocess.run(command, env=env, text=True, capture_output=True, timeout=60)
    return [line.split() for line in done.stdout.splitlines() if line.startswith("session")], done


@pytest.mark.parametrize("broken", ["cython", "python", "neither"])
def test_each_session_runs_whatever_became_of_the_other(broken: str, tmp_path: Path) -> None:
    """No folder is missed, none is tested twice, and what failed is named."""
    sessions, done = make_test(tmp_path, f'$([ "$FASTLOCK_IMPL" != {broken} ]; echo $?)')
    every = sorted({str(path.parent.relative_to(ROOT)) for path in ROOT.glob("tests/**/test_*.py")})
    for impl in ("cython", "python"):
        folders = [word for words in sessions if words[1] == impl for word in words if word.startswith("tests/")]
        assert sorted(folders) == every, done.stderr
        assert {"--only-impl" in words for words in sessions if words[1] == impl} == {impl == "python"}
        failed = [line for line in done.stderr.splitlines() if f" {impl}/" in line and "Error 1" in line]
        assert len(failed) == (broken == impl) * sum(words[1] == impl for words in sessions)
    assert (done.returncode == 0) == (broken == "neither")


@pytest.mark.parametrize("empty", ["cython", "python", "*"])
def test_only_some_sessions_may_have_no_test_to_run(empty: str, tmp_path: Path) -> None:
    sessions, done = make_test(tmp_path, f'$(case "$FASTLOCK_IMPL" in {empty}) echo 5;; *) echo 0;; esac)')
    assert {words[1] for words in sessions} == {"cython", "python"}
    assert (done.returncode == 0, "no test was run" in done.stdout) == (empty != "*", empty == "*")


def test_what_takes_long_is_run_as_well(tmp_path: Path) -> None:
    """Each file that has such tests, once: by itself, or in its folder."""
    sessions, _ = make_test(tmp_path, "0", "test-long")
    assert all("--long" in words for words in sessions)
    files = ROOT.glob("tests/**/test_*.py")
    long = re.compile(r"(^@|\bmarks=\[?)pytest\.mark\.long\b", re.MULTILINE)
    marked = {path for path in files if long.search(path.read_text("utf-8"))}
    given = [ROOT / word for words in sessions if words[1] == "cython" for word in words if word.startswith("tests/")]
    assert {path: sum(map(path.is_relative_to, given)) for path in marked} == dict.fromkeys(marked, 1)
    assert all(any(path.is_relative_to(each) for path in marked) for each in given)
