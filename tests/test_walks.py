"""What callers run is what the model allows: random walks over the handover model, replayed on real clients.

The walks run in a process of their own, in which the clock of leases stands still (tests/walks.py). How a walk is
replayed and what is compared: support/replay.py.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.faces import Face
from support.servers import KINDS
from test_handover_replay import EVENTS

from fastlock.embedded import Server

ROOT = Path(__file__).resolve().parent.parent
WALKS = 350
pytestmark = pytest.mark.usefixtures("impl")


def walks(server: Server, face: str, seed: int, count: int) -> subprocess.CompletedProcess[str]:
    """Run so many walks, the first with this seed."""
    command = [sys.executable, "-m", "tests.walks", "--face", face, "--server", str(server.path)]
    command += ["--seed", str(seed), "--walks", str(count)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50)


def test_callers_do_what_the_model_allows(server: Server, face: Face, request: pytest.FixtureRequest) -> None:
    first = KINDS.index(request.node.callspec.params["server"]) * WALKS
    done = walks(server, face.name, first, WALKS)
    assert done.returncode == 0, done.stdout + done.stderr
    met = set(done.stdout.partition("met:\n")[2].splitlines())
    assert met == EVENTS, "a walk that meets nothing proves nothing"
