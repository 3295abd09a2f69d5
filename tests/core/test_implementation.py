"""Which implementation a process gets: all of the one that FASTLOCK_IMPL names, or an error; never a mixture of both.

Each case runs in a process of its own, on this checkout or on a copy of the package from which something is missing.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import hiredis
import pytest
import redis

import fastlock
from fastlock._build import FAST_PATH, PYTHON

PACKAGE = Path(fastlock.__file__).resolve().parent
CHOSEN = (*PYTHON, *FAST_PATH, "_transport.parker")  # compiled, or run as Python
EXTENSIONS = (*CHOSEN, "_core")
REPORT = """
import json, sys
import fastlock, fastlock.asyncio
from fastlock import _implementation
ours = {name.partition(".")[2]: module for name, module in sys.modules.items() if name.startswith("fastlock.")}
client = fastlock.Client()
print(json.dumps({
    "implementation": fastlock.IMPLEMENTATION, "layer": _implementation.default.__name__,
    "streams": client._transport.impl.__name__,
    "files": {name: module.__file__ for name, module in ours.items()},
    "declared": not isinstance(fastlock.Lease.remaining, property),
}))
"""

pytestmark = pytest.mark.skipif(importlib.util.find_spec("fastlock._core") is None, reason="nothing is compiled here")


def imported(asked: str | None, folder: Path = PACKAGE.parent, report: str = REPORT) -> tuple[dict[str, Any], str]:
    """Import the package in `folder`; returns the report (empty if the import failed) and what went to stderr."""
    env = {name: value for name, value in os.environ.items() if name != "FASTLOCK_IMPL"}
    # -S: the hook of an editable install would give a copy the checkout's core. Dependencies come by PYTHONPATH.
    path = [folder, *(Path(module.__path__[0]).parent for module in (redis, hiredis))]
    env |= {"PYTHONPATH": os.pathsep.join(map(str, path))} | ({} if asked is None else {"FASTLOCK_IMPL": asked})
    done = subprocess.run(
        [sys.executable, "-S", "-P", "-c", report], env=env, capture_output=True, text=True, timeout=50
    )
    found: dict[str, Any] = json.loads(done.stdout) if done.returncode == 0 else {}
    assert all(Path(each).is_relative_to(folder) for each in found.get("files", {}).values())
    return found, done.stderr


def assert_whole(found: dict[str, Any], implementation: str) -> None:
    """Every module belongs to this implementation."""
    compiled = implementation == "cython"
    assert found["implementation"] == implementation
    assert found["layer"] == found["streams"] == ("fastlock._core" if compiled else "fastlock._fallback")
    suffixes = {name: Path(file).suffix for name, file in found["files"].items() if name in CHOSEN}
    assert suffixes == dict.fromkeys(CHOSEN, ".so" if compiled else ".py")
    assert found["declared"] is compiled, "a compiled class declares its attributes"
    assert ("_core" in found["files"]) is compiled


def extension(package: Path, name: str) -> Path:
    (found,) = package.glob(f"{name.replace('.', '/')}.*.so")
    return found


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the package with its compiled modules, from which a test may delete files."""
    shutil.copytree(PACKAGE, tmp_path / "fastlock", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "fastlock"


def test_python_is_used_on_request_although_all_is_compiled() -> None:
    assert_whole(imported("python")[0], "python")


@pytest.mark.parametrize("asked", ["cython", None, ""])
def test_compiled_modules_are_used_on_request_and_by_default(asked: str | None) -> None:
    assert_whole(imported(asked)[0], "cython")


def test_unknown_implementation_is_refused() -> None:
    found, stderr = imported("rust")
    assert not found and "ValueError" in stderr and "'rust'" in stderr and "FASTLOCK_IMPL" in stderr


@pytest.mark.long
@pytest.mark.parametrize("missing", EXTENSIONS)
def test_one_module_not_compiled_means_fallback_or_an_error(copy: Path, missing: str) -> None:
    """Every module is Python then by default; it is an error where the compiled ones were asked for."""
    extension(copy, missing).unlink()
    found, stderr = imported("cython", copy.parent)
    assert not found and "ModuleNotFoundError" in stderr and f"fastlock.{missing}" in stderr
    for asked in (None, "python"):
        assert_whole(imported(asked, copy.parent)[0], "python")


def test_falling_back_to_python_is_logged_as_info(copy: Path) -> None:
    extension(copy, "_fastpath.tasks").unlink()
    found, stderr = imported(None, copy.parent, "import logging\nlogging.basicConfig(level=logging.INFO)\n" + REPORT)
    assert found and "fastlock._fastpath.tasks is not compiled" in stderr
    assert imported(None, copy.parent)[1] == ""


@pytest.mark.parametrize(
    "changed",
    [
        "_core.pyx",
        "_core.pxd",
        "_template.pxi",
        "_fastpath/tasks.pyx",
        "_protocol/base_lock.py",
        "_protocol/base_lock.pxd",
    ],
)
@pytest.mark.parametrize("asked", ["cython", None])
def test_build_of_other_sources_is_refused(copy: Path, asked: str | None, changed: str) -> None:
    """The modules were compiled before the last change of a source: to fall back silently would hide that for ever."""
    source = copy / changed
    source.write_text(source.read_text() + "\n")
    found, stderr = imported(asked, copy.parent)
    assert not found and "ImportError" in stderr and "stale" in stderr and "build fastlock again" in stderr
    assert_whole(imported("python", copy.parent)[0], "python")


def test_installation_without_sources_trusts_its_build(copy: Path) -> None:
    for source in [*copy.rglob("*.pyx"), *copy.rglob("*.px?")]:
        source.unlink()
    assert_whole(imported("cython", copy.parent)[0], "cython")


@pytest.mark.parametrize("asked", ["cython", "python"])
def test_fast_path_may_be_missing(copy: Path, asked: str) -> None:
    """Its folder was deleted from an installation. In a checkout that changes the sources of a build."""
    for source in [*copy.rglob("*.pyx"), *copy.rglob("*.px?")]:
        source.unlink()
    shutil.rmtree(copy / "_fastpath")
    found, stderr = imported(asked, copy.parent)
    assert found, stderr
    assert found["implementation"] == asked and not {*FAST_PATH} & found["files"].keys()


def test_child_processes_get_the_implementation_of_their_parent(impl: str) -> None:
    """The test run passes its choice on to the processes that its tests start."""
    assert os.environ["FASTLOCK_IMPL"] == fastlock.IMPLEMENTATION == impl
