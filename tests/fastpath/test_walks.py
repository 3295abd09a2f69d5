"""What callers run is what the model allows: random walks over the handover model, replayed on real clients.

The walks run in a process of their own, in which the clock of leases stands still (tests/walks.py). How a walk is
replayed and what is compared: support/replay.py. Mistakes planted in a copy of what is compiled (support/mutants.py),
and those of test_handover_replay.py in scripts and operations, show that the comparison finds drift.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.apis import Api
from support.mutants import MISTAKES, build
from support.servers import KINDS

import fastlock
from fastlock.embedded import Server
from tests.protocol.test_handover_replay import EVENTS, PLANTED

ROOT = Path(__file__).resolve().parent.parent.parent
WALKS = 350
MANY_WALKS = 700  # among which one must find a planted mistake
pytestmark = [pytest.mark.usefixtures("impl"), pytest.mark.timeout(600)]  # threads wait to be run


def walks(server: Server, *options: str, package: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run walks with the package that lies in a folder."""
    command = [sys.executable, str(ROOT / "tests" / "walks.py"), "--server", str(server.path), *options]
    environment = {**os.environ, "PYTHONPATH": str(package)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=550)


def test_callers_do_what_the_model_allows(server: Server, api: Api, request: pytest.FixtureRequest) -> None:
    first = KINDS.index(request.node.callspec.params["server"]) * WALKS
    done = walks(server, "--api", api.name, "--seed", str(first), "--walks", str(WALKS))
    assert done.returncode == 0, done.stdout + done.stderr
    met = set(done.stdout.partition("met:\n")[2].splitlines())
    assert met == EVENTS, "some kinds of events happened in no walk"


@pytest.fixture(scope="module")
def mutants(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package with all mistakes, compiled."""
    folder = tmp_path_factory.mktemp("mutants")
    build(folder)
    return folder


@pytest.mark.long
@pytest.mark.skipif(fastlock.IMPLEMENTATION != "cython", reason="the mistakes are planted in what is compiled")
@pytest.mark.fastpath("tasks")  # some of the mistakes are in it
@pytest.mark.parametrize("server", ["valkey"], indirect=True)
def test_each_planted_mistake_is_found(server: Server, api: Api, mutants: Path) -> None:
    done = walks(server, "--api", api.name, "--plant", "--walks", str(MANY_WALKS), package=mutants)
    assert done.returncode == 0, done.stdout + done.stderr
    mine = [name for name, mistake in MISTAKES.items() if api.name in mistake.apis]
    assert done.stdout.count("found by walk") == len(mine) + len(PLANTED)
