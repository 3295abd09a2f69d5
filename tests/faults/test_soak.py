"""A small storm of abandoned acquires in every cell, and the program that runs it a hundred thousand times."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import redis
from soak import Pairs, Storm
from support.apis import Api

from fastlock.embedded import Server

COUNT = 2_000
ROOT = Path(__file__).resolve().parents[2]


def test_storm_of_abandoned_acquires(api: Api, server: Server, probe: redis.Redis) -> None:
    probe.connection_pool.disconnect()  # the storm counts connections
    storm = Storm(server.unix_url, api.name, COUNT, seed=1).run()
    assert not storm.wrong, storm.wrong
    assert storm.counts["acquired"] and storm.counts["timed out"]
    assert storm.counts["cancelled"] or api.name == "threads"


@pytest.mark.parametrize("server", ["valkey"], indirect=True)
def test_pairs_leave_no_memory_behind(api: Api, server: Server) -> None:
    """A small run detects a leak of some bytes per pair: 20,000 times 64 bytes are more than a MiB."""
    assert Pairs(server.unix_url, api.name).run(20_000) < 1 << 20


def test_program(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.soak", "--api", "asyncio", "--impl", "python", "--count", "10500"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "asyncio python valkey" in done.stdout  # whichever implementation this test run uses
    assert "500 acquires" in done.stdout and "10000 to go" in done.stdout and "WRONG" not in done.stdout
