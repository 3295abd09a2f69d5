"""A small chaos run; and the judge finds violations in canned histories and in a run with a planted violation."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.event_log import BLOCKING, ENTRY, EXTENDED, FREED, GRANT, RELEASE, RIVAL, EventLog, Reader, Request
from support.judge import GAP, JUST_NOW, SLACK, History, Judge, merge, without

import fastlock
from fastlock._protocol.lease import now
from tests.chaos import ACTIONS

ROOT = Path(__file__).resolve().parents[2]
LONG = GAP + SLACK + 0.1  # seconds: too long for a name to lie idle


def grant(requested: float, granted: float, released: float | None = None, **more: Any) -> Request:
    """A request that got a lease of 2 s and released it, if `released` is given."""
    deadline = granted + 2
    request = Request(more.pop("worker", 0), 0, requested, 2.0, blocking=True, rival=False)
    request.granted = request.ended = granted
    request.first_deadline = request.deadline = request.latest = deadline
    if released is not None:
        request.released = request.freed = released
    for name, value in more.items():
        setattr(request, name, value)
    return request


def judged(*requests: Request, **history: Any) -> list[str]:
    return Judge(History(list(requests), **history), 2.0).wrong


def test_good_history() -> None:
    assert not judged(
        grant(0, 0, 1, fence=5), grant(0.5, 1.1, 1.2), grant(0.6, 1.3, fence=6), grant(2, 3.35, 4, fence=7)
    )


def test_two_holders() -> None:
    (wrong,) = judged(grant(0, 0, 1), grant(0, 0.999, 1.5))
    assert "two holders for 0.001" in wrong
    assert judged(grant(0, 0, 1.9), grant(0, 0.2, 0.3), grant(0, 1.8, 1.95)), "the first still holds after the second"
    assert judged(grant(0, 0, deadline=3.0, latest=3.0), grant(0, 2.5, 2.6)), "the first extended its lease"


def test_lease_granted_before_the_server_lost_its_data() -> None:
    """The moment of the loss is unknown: a lease that was granted meanwhile may be worth nothing, too."""
    assert not judged(grant(0, 1, 3), grant(2, 2.3, 3), wipes=[(2.0, 2.2)])
    assert not judged(grant(2, 2.1, 3), grant(2, 2.3, 3), wipes=[(2.0, 2.2)])
    assert judged(grant(0, 1, 3), grant(0, 1.9, 3), wipes=[(2.0, 2.2)]), "both were granted before the loss"
    assert judged(grant(2, 2.25, 3), grant(2, 2.3, 3), wipes=[(2.0, 2.2)]), "both were granted after the loss"


def test_lease_that_ended_before_its_grant_was_noted() -> None:
    """Such a lease conflicts with no other. But no acquire may return so late, unless its worker was stopped."""
    late = grant(0, 2.4, first_deadline=2.0, deadline=2.0, latest=2.0, worker=7)
    (wrong,) = judged(late, grant(0, 2.3, 2.5))
    assert "granted 0.400 s after the end" in wrong
    assert not judged(late, grant(0, 2.3, 2.5), stops={7: [(1.9, 2.39)]})


@pytest.mark.parametrize("second", [5, 4])
def test_fence_that_does_not_rise(second: int) -> None:
    (wrong,) = judged(grant(0, 0, 1, fence=5), grant(0, 1.1, 1.2, fence=second))
    assert f"fence {second} after 5" in wrong


def test_idle_name() -> None:
    (wrong,) = judged(grant(0, 0, 1), grant(0, 1 + LONG, 9, first_deadline=3 + LONG))
    assert "idle" in wrong
    assert judged(grant(0, 0), grant(0, 2 + LONG, 9)), "nobody released, but the lease had ended"
    assert not judged(grant(0, 0, 1), grant(5, 5, 5.1)), "nobody waited"


def test_idle_while_several_wait_in_turn() -> None:
    """Each gives up before its wait is too long; together they waited too long for a name that is free."""
    quitters = [Request(0, 0, start, 2.0, blocking=True, rival=False, ended=start + 0.6) for start in (0.0, 0.5, 1.0)]
    (wrong,) = judged(*quitters)
    assert "idle for 1.6" in wrong


def test_redis_py_may_wait_for_any_time() -> None:
    assert not judged(Request(0, 0, 0.0, 2.0, blocking=True, rival=True, ended=9.0))


def waiting(until: float, worker: int = 0, requested: float = 0.0) -> Request:
    return Request(worker, 0, requested, 2.0, blocking=True, rival=False, ended=until)


def test_excuses() -> None:
    """A stop is no excuse if the stopped worker did not request the name, or had given up before."""
    assert judged(waiting(LONG)), "without an excuse"
    assert not judged(waiting(LONG), pauses=[(0.5, 0.8)])
    assert not judged(waiting(LONG), stops={0: [(0.5, 0.8)]}), "the waiter itself was stopped"
    assert not judged(waiting(LONG), waiting(LONG, worker=1), stops={1: [(0.5, 0.8)]}), (
        "the stopped worker may have the name"
    )
    assert judged(waiting(LONG), waiting(0.2, worker=1), stops={1: [(0.3 + JUST_NOW, 0.8)]}), (
        "the stopped worker had given up"
    )
    assert judged(waiting(LONG), stops={1: [(0.5, 0.8)]}), "the stopped worker had not requested the name"
    assert not judged(waiting(LONG), waiting(math.inf, worker=1), kills={1: 0.1})
    assert judged(waiting(2 + LONG), waiting(math.inf, worker=1), kills={1: 0.1}), "a kill excuses no more than a lease"
    assert not judged(waiting(LONG), grant(0, math.inf, ended=0.1, vanished=True))


def test_forgotten_waiter() -> None:
    """Others are served again and again, and this waiter is not."""
    served = [grant(at, at, at + 0.9) for at in map(float, range(12))]
    (wrong,) = judged(grant(0.5, 8.95, 8.99), *served)
    assert "1 ahead, and waited for 8.450 s" in wrong
    assert not judged(grant(0.5, 3.95, 3.99), *served)


def test_spans() -> None:
    assert merge([(3, 4), (0, 2), (1, 2.5), (5, 5)]) == [(0, 2.5), (3, 4)]
    assert without([(0, 10)], [(-1, 1), (2, 3), (2.5, 4), (9, 11)]) == [(1, 2), (4, 9)]
    assert without([(0, 1), (2, 3)], []) == [(0, 1), (2, 3)]


def test_event_log_is_read_back(tmp_path: Path) -> None:
    log, reader = EventLog(tmp_path / "7.events"), Reader(tmp_path / "7.events", 7)
    first = log.begin_request(3, 1.5, blocking=True, rival=True)
    reader.read()
    assert reader.requests[first].blocking and reader.requests[first].rival and reader.requests[first].ended == math.inf
    end = now() + 1.5
    for what, value in ((GRANT, end), (EXTENDED, end + 1), (RELEASE, 0.0), (FREED, 0.0)):
        log.write(what, first, value, fence=2**53 if what == GRANT else 0)
    with reader.path.open("ab") as file:  # the worker was killed in the middle of an entry
        file.write(ENTRY.pack(0, BLOCKING | RIVAL, 1, 9, 0.0, 0.0, 0)[:-1])
    reader.read()
    (request,) = reader.requests.values()
    assert request.name == 3 and request.worker == 7 and request.fence == 2**53
    assert request.held == (request.granted, request.released) and request.kept == (end - 1.5, request.freed)
    assert request.deadline == request.latest == end + 1


def chaos(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.chaos", "--impl", fastlock.IMPLEMENTATION, *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=55)


def test_chaos() -> None:
    done = chaos("--minutes", "0.2", "--processes", "6", "--names", "3", "--seed", "20", "--shortest", "0.03")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{fastlock.IMPLEMENTATION} valkey seed 20" in done.stdout and "never two holders" in done.stdout
    assert all(f"'{action}'" in done.stdout for action in ACTIONS), done.stdout


@pytest.mark.parametrize(
    ("plant", "words"),
    [("claim", "two holders"), ("squat", "idle for")],
)
def test_planted_violation_is_found(plant: str, words: str) -> None:
    done = chaos("--minutes", "0.1", "--processes", "2", "--names", "2", "--plant", plant)
    assert done.returncode == 1, done.stdout + done.stderr
    assert words in done.stdout
