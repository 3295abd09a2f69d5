"""A small chaos run of each kind of lock; and the judge finds violations in canned histories and in planted runs."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.event_log import (
    BLOCKING,
    DOWNGRADE,
    ENTRY,
    EXTENDED,
    FREED,
    GRANT,
    RELEASE,
    RIVAL,
    WHOLE,
    EventLog,
    Reader,
    Request,
)
from support.judge import GAP, JUST_NOW, LONGEST_WAIT, SLACK, History, Judge, Size, merge, without
from support.kind_judges import FORGOTTEN, PERMITS, MultiJudge, ReadWriteJudge, SemaphoreJudge
from support.register import Attempt, judge_writes

import fastlock
from fastlock._protocol.lease import now
from tests.chaos import ACTIONS, KINDS

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


def judged(*requests: Request, judge: type[Judge] = Judge, **history: Any) -> list[str]:
    return judge(History(list(requests), **history), 2.0).wrong


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


def waiting(until: float, worker: int = 0, requested: float = 0.0, name: int = 0) -> Request:
    return Request(worker, name, requested, 2.0, blocking=True, rival=False, ended=until)


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
    excused = [(1.0, 8.0)]
    assert not judged(grant(0.5, 8.95, 8.99), *served, pauses=excused)
    assert judged(waiting(LONGEST_WAIT + 1), pauses=[(0.0, LONGEST_WAIT)]), "whatever the excuse"


def read_write(*requests: Request, **history: Any) -> list[str]:
    return judged(*requests, judge=ReadWriteJudge, **history)


def test_reader_beside_a_writer() -> None:
    write = grant(0, 1, 2, units=WHOLE)
    assert not read_write(grant(0, 0, 1), grant(0, 0.1, 0.9), grant(0, 0.2, 1), write, grant(0, 2, 3), grant(0, 2, 3))
    (wrong,) = read_write(write, grant(0, 1.9, 3))
    assert "1001 units of 1000 held, for 0.1" in wrong
    assert read_write(grant(0, 0, 1.1), grant(0, 0.1, 0.2), write), "the first reads on after the second"
    assert read_write(write, grant(0, 1.5, 3, units=WHOLE)), "two writers"


def test_reader_beside_a_writer_who_became_one() -> None:
    downgraded = grant(0, 1, 2, units=WHOLE, downgraded=1.5)
    assert not read_write(downgraded, grant(0, 1.5, 1.9))
    assert read_write(downgraded, grant(0, 1.4, 1.9)), "before it is downgraded"
    assert read_write(downgraded, grant(0, 1.9, 3, units=WHOLE)), "a writer beside it, who reads still"


def test_fences_of_readers_rise_beside_each_other() -> None:
    """Readers may learn of their fences in any order; each has a greater one than the writer before."""
    write = grant(0, 0, 1, units=WHOLE, fence=5)
    assert not read_write(write, grant(0, 1, 2, fence=7), grant(0, 1.1, 2, fence=6))
    assert read_write(write, grant(0, 1, 2, fence=5)), "a reader with a writer's fence"
    assert read_write(write, grant(0, 1, 2, fence=7), grant(0, 2, 3, fence=7, units=WHOLE)), "a writer with a reader's"


def test_reader_who_is_overtaken_by_preferred_writers() -> None:
    served = [grant(at, at + 0.1, at + 0.9, units=WHOLE) for at in map(float, range(12))]
    reader = grant(0.5, 11.95, 11.99)
    (wrong,) = read_write(reader, *served)
    assert "1 ahead, and waited for 11.4" in wrong
    preferred = [grant(at, at + 0.1, at + 0.9, units=WHOLE, first=True) for at in map(float, range(12))]
    assert not read_write(reader, *preferred)


def semaphore(*requests: Request, **history: Any) -> list[str]:
    return judged(*requests, judge=SemaphoreJudge, **history)


def test_one_permit_too_many() -> None:
    full = [grant(0, 0.1, 2, units=PERMITS - 2), grant(0, 0.2, 1.5, units=2)]
    assert not semaphore(*full, grant(0, 1.5, 2))
    (wrong,) = semaphore(*full, grant(0, 1.4, 2))
    assert f"{PERMITS + 1} units of {PERMITS} held, for 0.1" in wrong


def test_size_counts_for_grants_after_it() -> None:
    many = [grant(0, at / 10, 20, units=2, latest=99.0, deadline=99.0) for at in range(1, 4)]  # extended
    larger = Size(-9.0, -8.9, 6)
    assert semaphore(*many), "without the larger size"
    assert not semaphore(*many, sizes={0: [larger]})
    assert not semaphore(*many, sizes={0: [larger, Size(10, 10.1, 2)]}), "held since before the smaller size"
    late = grant(15, 15.1, 16)
    assert semaphore(many[0], late, sizes={0: [larger, Size(10, 10.1, 2)]}), "granted after it"
    assert not semaphore(many[0], late, sizes={0: [larger, Size(10, 10.1, 2)]}, wipes=[(13.0, 13.1)]), "it was lost"
    two = grant(15, 15.2, 16, units=2)
    assert semaphore(two, late, sizes={0: [larger, Size(10, 10.1, 2)]}, wipes=[(8.0, 8.1)]), "set after the loss"


def multi(*requests: Request, **history: Any) -> list[str]:
    return judged(*requests, judge=MultiJudge, **history)


def test_holder_of_several_names_that_misses_one() -> None:
    both = [grant(0, 0.5, 1, name=name) for name in (0, 1)]
    assert not multi(*both, grant(0.1, 1, 2, name=1))
    (wrong,) = multi(*both, grant(0.1, 0.9, 2, name=1))
    assert "name 1 at 0.9" in wrong and "two holders for 0.1" in wrong
    (wrong,) = multi(both[0], waiting(0.5, name=1))
    assert "only some of its names were granted" in wrong
    (wrong,) = multi(both[0], grant(0, 0.5, 0.9, name=1))
    assert "not all names were held for as long" in wrong


def test_nobody_holds_any_name_while_callers_of_several_wait() -> None:
    assert multi(waiting(LONG), waiting(LONG, name=1), waiting(LONG, worker=1)), "they wait for each other"
    beside = grant(0, 0.1, LONG, name=2, worker=1)
    assert not multi(waiting(LONG), waiting(LONG, name=1), beside), "whoever holds another name may be why"
    (wrong,) = multi(waiting(FORGOTTEN + 1, worker=1), *(grant(at, at, at + 0.9) for at in map(float, range(30))))
    assert "waited for 21.000 s" in wrong


def attempt(fence: int, newest: int | None = None, worker: int = 0) -> Attempt:
    return Attempt(worker, fence, fence, granted=1.0, sent=3.0, newest=newest)


def test_older_fence_that_the_register_accepts() -> None:
    good = judge_writes({"a": [attempt(1), attempt(1), attempt(3), attempt(2, 3), attempt(3), attempt(4)]})
    assert (good.accepted, good.refused, good.stopped, good.wrong) == (5, 1, 0, [])
    (wrong,) = judge_writes({"a": [attempt(3), attempt(2)]}).wrong
    assert "an older fence was accepted" in wrong
    (wrong,) = judge_writes({"a": [attempt(3), attempt(3, worker=1)]}).wrong
    assert "two holders with one fence" in wrong
    assert judge_writes({"a": [attempt(3), attempt(4, 3)]}).wrong, "refused, though it is newer"
    assert judge_writes({"a": [attempt(3), attempt(2, 3)]}, {0: [(0.5, 2.0)]}).stopped == 1
    assert judge_writes({"a": [attempt(3), attempt(2, 3)]}, {0: [(0.5, 0.9)], 1: [(1.0, 2.0)]}).stopped == 0


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


def test_requests_of_several_names_are_one_entry(tmp_path: Path) -> None:
    log, reader = EventLog(tmp_path / "7.events"), Reader(tmp_path / "7.events", 7)
    requests = log.begin_requests([4, 2], 1.5, blocking=True)
    log.write_all(GRANT, requests, [8.0, 9.0])
    reader.read()
    one, two = (reader.requests[number] for number in requests)
    assert (one.name, two.name) == (4, 2) and one.requested == two.requested and one.granted == two.granted < math.inf
    assert (one.deadline, two.deadline) == (8.0, 9.0)
    write = log.begin_request(4, 1.5, blocking=True, units=WHOLE, first=True)
    log.write_all(DOWNGRADE, [write])
    reader.read()
    assert reader.requests[write].units == WHOLE and reader.requests[write].first
    assert reader.requests[write].downgraded < math.inf


def chaos(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.chaos", "--impl", fastlock.IMPLEMENTATION, *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=55)


def test_chaos() -> None:
    done = chaos("--minutes", "0.2", "--processes", "6", "--names", "3", "--seed", "20", "--shortest", "0.03")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{fastlock.IMPLEMENTATION} valkey seed 20" in done.stdout and "never two holders" in done.stdout
    assert all(f"'{action}'" in done.stdout for action in ACTIONS), done.stdout


@pytest.mark.parametrize("kind", [name for name in KINDS if name != "plain"])
def test_chaos_of_each_kind(kind: str) -> None:
    done = chaos("--kind", kind, "--seconds", "1.5", "--processes", "4", "--seed", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"{kind}, {fastlock.IMPLEMENTATION} valkey seed 3")
    assert KINDS[kind].judge(History(), 2.0).seen().partition(",")[0] in done.stdout
    assert ("register: " in done.stdout) == KINDS[kind].fenced and "register: 0 accepted" not in done.stdout


@pytest.mark.parametrize(
    ("plant", "words"),
    [("claim", "two holders"), ("squat", "idle for")],
)
def test_planted_violation_is_found(plant: str, words: str) -> None:
    done = chaos("--minutes", "0.1", "--processes", "2", "--names", "2", "--plant", plant)
    assert done.returncode == 1, done.stdout + done.stderr
    assert words in done.stdout
