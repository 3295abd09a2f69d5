"""On platforms without POSIX nothing is compiled, and everything works in pure Python."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fastlock.embedded import Server

ROOT = Path(__file__).resolve().parents[2]
SETUP = """
import setuptools, setuptools.command.build_ext, setuptools.errors, runpy, sys
setuptools.setup = lambda **given: print("modules", len(given["ext_modules"]))
sys.platform = "win32"
runpy.run_path("setup.py")
"""


@pytest.mark.parametrize("server", ["valkey", "floor"], indirect=True)
def test_threads_and_asyncio_work_without_posix_functions(server: Server) -> None:
    env = {**os.environ, "FASTLOCK_IMPL": "python", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error", str(ROOT / "tests" / "support" / "windows.py"), server.tcp_url]
    done = subprocess.run(command, env=env, text=True, capture_output=True, timeout=50)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["threads", "tasks"]


def test_nothing_is_compiled_on_windows() -> None:
    modes = ("FASTLOCK_DEBUG", "FASTLOCK_TRACE", "FASTLOCK_NO_EXTENSIONS", "FASTLOCK_NO_FASTPATH")
    env = {name: value for name, value in os.environ.items() if name not in modes}
    done = subprocess.run([sys.executable, "-c", SETUP], cwd=ROOT, env=env, text=True, capture_output=True, timeout=50)
    assert (done.returncode, done.stdout.split()) == (0, ["modules", "0"]), done.stderr
    assert "pure Python" in done.stderr
