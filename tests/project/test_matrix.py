"""The matrix of versions: its cells cover what they have to cover, and nothing is left out silently."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import matrix

ROOT = Path(__file__).resolve().parents[2]


def interpreters(count: int) -> list[matrix.Interpreter]:
    return [matrix.Interpreter(label, "3.11.2", "/usr/bin/python", None) for label in matrix.WANTED[:count]]


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_every_interpreter_and_every_set_of_versions_has_a_cell(count: int) -> None:
    found = interpreters(count)
    cells = matrix.plan(found)
    assert {each.label for each, _ in cells} == {each.label for each in found}
    assert {beside for _, beside in cells} == set(matrix.BESIDE)
    assert len(cells) == len(matrix.BESIDE), "no more cells than needed"


def test_one_cell_is_without_the_fast_path() -> None:
    found = interpreters(3)
    found[1].version, found[2].version = "3.12.1", "3.13.0"
    ((each, beside),) = matrix.without_fast_path(found)
    assert each.version == "3.12.1" and not each.fast_path and beside == (matrix.NEWEST, matrix.NEWEST)
    assert each.label not in matrix.WANTED, "it has a folder and a build of its own"
    assert matrix.without_fast_path([]) == []


def test_oldest_and_newest_allowed_versions_are_in_the_matrix() -> None:
    redis_py, hiredis = (set(column) for column in zip(*matrix.BESIDE, strict=True))
    assert redis_py == {"5.0.*", "6.4.*", "7.*", "8.0.*", matrix.NEWEST} and hiredis == {"3.5.*", matrix.NEWEST}
    assert matrix.spec("redis", matrix.NEWEST).startswith("redis>=") and "<9" in matrix.spec("redis", matrix.NEWEST)
    assert matrix.spec("redis", "7.*") == "redis==7.*"
    assert [name for name in (*matrix.TESTS, *matrix.PURE) if not (ROOT / "tests" / name).is_file()] == []


def test_without_the_fast_path_all_folders_of_behaviour_run() -> None:
    folders = {each.parent.name for each in (ROOT / "tests").glob("*/test_*.py")}
    run = [each for session in matrix.BEHAVIOUR for each in session]
    assert sorted(run) == sorted(folders - {"benches", "cli", "models", "project"})


def test_list_names_the_missing_interpreters(tmp_path: Path) -> None:
    """With PATH, pyenv and HOME empty, every wanted label is still listed, as a cell or as skipped."""
    env = {**os.environ, "PATH": str(tmp_path), "PYENV_ROOT": str(tmp_path), "HOME": str(tmp_path)}
    command = [sys.executable, "-m", "tests.matrix"]
    done = subprocess.run([*command, "--list"], cwd=ROOT, env=env, text=True, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    rows = done.stdout.splitlines()
    assert all(any(row.startswith(label) for row in rows) for label in matrix.WANTED)
    assert all("SKIPPED" in row or "redis-py" in row for row in rows)
    nothing = subprocess.run([*command, "--only", "2.7"], cwd=ROOT, env=env, capture_output=True, timeout=60)
    assert nothing.returncode == 1, "a matrix without cells is not green"


def test_unusable_interpreter_is_reported_with_the_reason(tmp_path: Path) -> None:
    broken = tmp_path / "python3.12"
    broken.write_text("#!/bin/sh\necho 'No module named ensurepip' >&2\nexit 1\n")
    broken.chmod(0o755)
    assert matrix.facts(broken, None) == "No module named ensurepip"
    version, path = matrix.facts(Path(sys.executable), None)
    assert sys.version.startswith(version) and Path(path).exists()


def test_failed_command_is_reported_with_its_last_lines(tmp_path: Path) -> None:
    (each,) = interpreters(1)
    each.folder = tmp_path
    (tmp_path / "tree").mkdir()
    script = "import os, sys; print(os.environ['HOME'], os.environ.get('FASTLOCK_IMPL')); sys.exit(3)"
    with pytest.raises(matrix.Failed, match=rf"{tmp_path}/home None\nexit code 3"):
        each.run(sys.executable, "-c", script)
    assert each.run(sys.executable, "-c", script[:-13], FASTLOCK_IMPL="python").split()[1] == "python"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_commands_of_root_run_as_another_user() -> None:
    shell = shutil.which("id")
    assert shell is not None
    done = subprocess.run([shell, "-un"], text=True, capture_output=True, **matrix.as_user("nobody"))
    assert done.stdout.strip() == "nobody" == pwd.getpwnam("nobody").pw_name
