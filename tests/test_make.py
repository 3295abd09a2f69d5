"""What `make` promises whoever develops: that no failure hides what else there is to be known."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
STAMPS = ("pyvenv.cfg", ".installed", ".core-release")

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


@pytest.mark.parametrize("broken", ["cython", "python", "neither"])
def test_each_session_runs_whatever_became_of_the_other(broken: str, tmp_path: Path) -> None:
    """In a virtualenv whose interpreter only writes down what it was asked for. No file is missed, none runs twice."""
    for stamp in STAMPS:  # newer than all that it is made from
        (tmp_path / stamp).touch()
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\necho "session $FASTLOCK_IMPL $*"\n[ "$FASTLOCK_IMPL" != {broken} ]\n')
    python.chmod(0o755)
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command = ["make", "--directory", str(ROOT), "test", f"VENV={tmp_path}"]
    done = subprocess.run(command, env=env, text=True, capture_output=True, timeout=60)
    said = done.stdout.splitlines()
    sessions = [line.split() for line in said if line.startswith("session")]
    every = sorted(f"tests/{path.name}" for path in ROOT.glob("tests/test_*.py"))
    for impl in ("cython", "python"):
        files = [word for words in sessions if words[1] == impl for word in words if word.startswith("tests/")]
        assert sorted(files) == every, done.stderr
    assert len(sessions) == 7
    assert (done.returncode == 0) == (broken == "neither")
    assert any(line.startswith("failed:") and broken in line for line in said) == (broken != "neither")
