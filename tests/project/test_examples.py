"""The programs of `examples/` run as they are written, against a real server on a TCP port."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fastlock.embedded import Server

ROOT = Path(__file__).resolve().parents[2]
SAYS = {"shop.py": "20 of 20 sold by threads, 20 by tasks\n"}
pytestmark = pytest.mark.usefixtures("impl")


def test_every_example_is_run() -> None:
    assert {path.name for path in (ROOT / "examples").iterdir() if path.suffix == ".py"} == set(SAYS)


@pytest.mark.parametrize("server", ["valkey"], indirect=True)
@pytest.mark.parametrize("program", SAYS)
def test_an_example_does_what_it_says(program: str, server: Server) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(ROOT / "examples" / program), server.url],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=50,
    )
    assert (done.returncode, done.stdout) == (0, SAYS[program])
