"""What is shipped: an sdist that holds the sources, wheels that hold none, and builds that fail loudly.

The sdist is built from a copy of the tree, the wheels from the unpacked sdist: what the sdist lacks cannot be built.
Nothing is written into the checkout and nothing is downloaded: the build tools are those of the running interpreter.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import hiredis
import pytest
import redis

from fastlock._build import FAST_PATH, PYTHON, TWINS

ROOT = Path(__file__).resolve().parents[2]
MADE_BY_RUNS = (".git", ".venv*", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", "*.so")
MODES = ("FASTLOCK_NO_EXTENSIONS", "FASTLOCK_NO_FASTPATH", "FASTLOCK_DEBUG", "FASTLOCK_TRACE", "FASTLOCK_IMPL")
BUILD_SDIST = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
COMPILED = {*TWINS, *PYTHON, *FAST_PATH}
RELAY = {"benches._relay"} if sys.platform == "linux" else set()  # of the benchmark
SAFELY: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # Debian 12's 3.11.2 has it not
CYTHON = (".pyx", ".pxi", ".pxd")
REPORT = """
import fastlock, fastlock.asyncio, sys
print(fastlock.__file__, fastlock.IMPLEMENTATION, fastlock.__version__)
print(*(name for name, module in sys.modules.items() if str(getattr(module, "__file__", "")).endswith(".so")))
"""

ASKED = """
import runpy, setuptools
setuptools.setup = lambda ext_modules, **more: print(*(each.name.partition(".")[2] for each in ext_modules))
runpy.run_path("setup.py")
"""


def run(*command: str | Path, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a clean set of build modes and return it with its output, both streams in one."""
    clean = {key: value for key, value in os.environ.items() if key not in MODES} | env
    return subprocess.run(command, cwd=cwd, env=clean, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def build_wheel(source: Path, target: Path, **env: str) -> subprocess.CompletedProcess[str]:
    options = ("--no-build-isolation", "--no-deps", "--no-index", "--disable-pip-version-check", "-v")
    return run(sys.executable, "-m", "pip", "wheel", *options, "-w", target, source, cwd=target, **env)


def only(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


def imported_from(wheel: Path, folder: Path, leave_out: str = "-", **env: str) -> tuple[list[str], set[str]]:
    """Unpack a wheel, but for a folder, and import it in a new process: its file, implementation and version; and its
    compiled modules."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if not name.startswith(leave_out)])
    # -S: the hook of an editable install would give the wheel the checkout's core. Dependencies come by PYTHONPATH.
    path = os.pathsep.join([str(folder), *(str(Path(module.__path__[0]).parent) for module in (redis, hiredis))])
    done = run(sys.executable, "-S", "-P", "-c", REPORT, cwd=folder, PYTHONPATH=path, **env)
    assert done.returncode == 0, done.stdout
    about, modules = done.stdout.splitlines()
    return about.split(), {name.partition(".")[2] for name in modules.split() if name.startswith("fastlock.")}


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist, built from a copy of the tree."""
    folder = tmp_path_factory.mktemp("sdist")
    shutil.copytree(ROOT, folder / "tree", ignore=shutil.ignore_patterns(*MADE_BY_RUNS))
    for leftover in ("fastlock/_core.c", "tests/_core.c", "benches/_core.so"):
        (folder / "tree" / leftover).write_text("left by a manual build")
    done = run(sys.executable, "-c", BUILD_SDIST, folder, cwd=folder / "tree")
    assert done.returncode == 0, done.stdout
    return only(folder, "*.tar.gz")


@pytest.fixture
def source(sdist: Path, tmp_path: Path) -> Path:
    """The unpacked sdist, fresh for each build."""
    shutil.unpack_archive(sdist, tmp_path, **SAFELY)
    return only(tmp_path, "fastlock-*")


def test_sdist_holds_the_sources_and_nothing_made(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"fastlock/_core.pyi", "fastlock/py.typed", "LICENSE", "setup.py"} <= names
    assert {str(path.relative_to(ROOT)) for path in (ROOT / "fastlock").rglob("*") if path.suffix in CYTHON} <= names
    assert {
        "fastlock/_core.pyx",
        "fastlock/_template.pxi",
        "fastlock/_libc.pxd",
        "fastlock/_fastpath/tasks.pyx",
    } <= names
    assert {"tests/project/test_packaging.py", "tests/conftest.py", "benches/__init__.py", "CHANGELOG.md"} <= names
    assert any(name.endswith(".lua") for name in names)
    assert [name for name in names if name.endswith((".c", ".so", ".pyc"))] == []


@pytest.mark.long
@pytest.mark.skipif(sys.implementation.name != "cpython", reason="other interpreters get the pure wheel")
def test_wheel_holds_the_compiled_core_and_no_source_of_it(source: Path, tmp_path: Path) -> None:
    done = build_wheel(source, tmp_path, CFLAGS="-O0")  # compiles in half the time
    assert done.returncode == 0, done.stdout
    assert "fastlock: release build" in done.stdout
    wheel = only(tmp_path, "*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert [name for name in names if name.endswith((*CYTHON, ".c"))] == []
    assert [name for name in names if name.startswith(("tests/", "docs/"))] == []
    assert {"fastlock/_core.pyi", "fastlock/py.typed", "fastlock/benches/__init__.py"} <= set(names)
    assert {"fastlock/benches/page/page.css", "fastlock/benches/page/page.js"} <= set(names)
    scripts = {str(path.relative_to(ROOT)) for path in ROOT.glob("fastlock/_protocol/scripts/*.lua")}
    assert {name for name in names if name.endswith(".lua")} == scripts
    modules = [
        name.partition("/")[2].partition(".")[0].replace("/", ".") for name in names if name.endswith((".so", ".pyd"))
    ]
    assert sorted(modules) == sorted({*COMPILED, *RELAY})
    assert {f"fastlock/{name.replace('.', '/')}.py" for name in COMPILED - {"_core"}} <= set(names), (
        "what FASTLOCK_IMPL=python imports"
    )
    (where, implementation, version), compiled = imported_from(wheel, tmp_path / "installed")
    assert Path(where).is_relative_to(tmp_path)
    assert (implementation, compiled) == ("cython", COMPILED)
    (_, implementation, _), compiled = imported_from(wheel, tmp_path / "installed", FASTLOCK_IMPL="python")
    assert (implementation, compiled) == ("python", set())
    assert wheel.name.startswith(f"fastlock-{version}-cp3{sys.version_info.minor}-cp3{sys.version_info.minor}-")
    (_, implementation, _), compiled = imported_from(wheel, tmp_path / "without", leave_out="fastlock/_fastpath/")
    assert (implementation, compiled) == ("cython", COMPILED - {*FAST_PATH})


@pytest.mark.skipif(sys.implementation.name != "cpython", reason="other interpreters compile nothing")
def test_fast_path_is_left_out_of_a_build_where_asked_for() -> None:
    done = run(sys.executable, "-c", ASKED, cwd=ROOT, FASTLOCK_NO_FASTPATH="1")
    mode, modules = done.stdout.splitlines()
    assert mode == "fastlock: plain build" and {*modules.split()} == {*COMPILED, *RELAY} - {*FAST_PATH}


@pytest.mark.long
@pytest.mark.skipif(sys.implementation.name != "cpython", reason="other interpreters compile nothing")
def test_failing_compiler_fails_the_build_and_names_the_workaround(source: Path, tmp_path: Path) -> None:
    done = build_wheel(source, tmp_path, CC="/bin/false")
    assert done.returncode != 0
    assert "fastlock._core was not compiled" in done.stdout
    assert "FASTLOCK_NO_EXTENSIONS=1" in done.stdout
    assert list(tmp_path.glob("*.whl")) == []


def test_pure_wheel_needs_no_compiler_and_fits_every_interpreter(source: Path, tmp_path: Path) -> None:
    done = build_wheel(source, tmp_path, FASTLOCK_NO_EXTENSIONS="1", CC="/bin/false")
    assert done.returncode == 0, done.stdout
    assert "fastlock: pure Python" in done.stdout
    wheel = only(tmp_path, "*-py3-none-any.whl")
    compiled_suffixes = (".so", ".pyd", ".c", *CYTHON)
    assert [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(compiled_suffixes)] == []
    (where, implementation, version), compiled = imported_from(wheel, tmp_path / "installed")
    assert Path(where).is_relative_to(tmp_path)
    assert (implementation, compiled) == ("python", set())
    assert wheel.name.startswith(f"fastlock-{version}-")


def test_two_build_modes_at_once_are_refused(source: Path, tmp_path: Path) -> None:
    done = build_wheel(source, tmp_path, FASTLOCK_DEBUG="1", FASTLOCK_TRACE="1")
    assert done.returncode != 0
    assert "one build mode at a time, not FASTLOCK_DEBUG and FASTLOCK_TRACE" in done.stdout
