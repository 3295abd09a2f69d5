"""Real workers of RQ and Celery, which limit a task's time by an exception of a signal handler, with tasks that do
nothing but lock. Whenever they are interrupted, no lock without timeout may stay behind.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import redis
from support.interrupted import EXIT_IS_PYTHON
from support.servers import leftovers

from fastlock.embedded import Server

ROOT = Path(__file__).resolve().parents[2]

RQ = """
import os, sys, time
import redis, rq, rq.timeouts
import fastlock
from redis import Redis

class Limit(rq.timeouts.UnixSignalDeathPenalty):
    def setup_death_penalty(self):
        import signal
        signal.signal(signal.SIGALRM, self.handle_death_penalty)
        signal.setitimer(signal.ITIMER_REAL, 0.3 + 0.013 * int(time.monotonic() * 1000 % 7))

class Worker(rq.SimpleWorker):
    death_penalty_class = Limit

def task(number):
    client = fastlock.Client.from_url(os.environ["LOCKS"])
    while True:
        with client.lock(f"task:{number}", timeout=None):
            pass

if __name__ == "__main__":
    sys.modules["program"] = sys.modules["__main__"]
    connection = Redis.from_url(os.environ["BROKER"])
    queue = rq.Queue("q", connection=connection)
    jobs = [queue.enqueue("program.task", number, job_timeout=10) for number in range(8)]
    Worker([queue], connection=connection).work(burst=True, logging_level="CRITICAL")
    failed = [job.latest_result().exc_string for job in jobs]
    assert all("JobTimeoutException" in text for text in failed), failed
"""

CELERY = """
import os
import celery, fastlock
from celery.exceptions import SoftTimeLimitExceeded

app = celery.Celery("program", broker=os.environ["BROKER"], backend=os.environ["BROKER"])

@app.task(name="task", soft_time_limit=1)
def task(number):
    client = fastlock.Client.from_url(os.environ["LOCKS"])
    try:
        while True:
            with client.lock(f"task:{number}", timeout=None):
                pass
    except SoftTimeLimitExceeded:
        return "interrupted"
"""
SUBMIT = """
import program
results = [program.task.delay(number) for number in range(8)]
assert [result.get(timeout=40) for result in results] == ["interrupted"] * 8
"""


KEEPING = """
import functools, os
import celery, fastlock

@functools.cache
def client():
    return fastlock.Client.from_url(os.environ["LOCKS"])

app = celery.Celery("program", broker=os.environ["BROKER"], backend=os.environ["BROKER"])

@app.task(name="task")
def task(number):
    lock = client().lock("task:kept", timeout=60, keep=60)
    stats = lock._transport.stats
    begin = stats.kept_acquires
    while stats.kept_acquires < begin + 3:
        with lock:
            pass
    return os.getpid()
"""
SUBMIT_KEEPING = """
import program
results = [program.task.delay(number) for number in range(4)]
assert len({result.get(timeout=40) for result in results}) == 2
"""


def broker(server: Server) -> str:
    """The URL of another database, for the workers' own queues."""
    return server.url.removesuffix("0") + "1"


def run(folder: Path, server: Server, *command: str) -> subprocess.Popen[str]:
    """Start a Python program in that folder, beside `program.py`, in a process group of its own."""
    paths = os.pathsep.join([str(ROOT), str(folder), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "LOCKS": server.unix_url, "BROKER": broker(server)}
    with (folder / "output").open("a") as output:
        return subprocess.Popen(
            [sys.executable, *command],
            env=environment,
            cwd=folder,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def work_celery(folder: Path, server: Server, program: str, submit: str, *options: str) -> None:
    """Run a worker of Celery, with a pool of processes, until what was submitted is done."""
    (folder / "program.py").write_text(program)
    (folder / "submit.py").write_text(submit)
    worker = run(folder, server, "-m", "celery", "-A", "program", "worker", "-P", "prefork", *options)
    try:
        assert run(folder, server, "submit.py").wait(45) == 0, (folder / "output").read_text()
        worker.terminate()
        worker.wait(20)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.pid, signal.SIGKILL)


def left_by_tasks(server: Server, probe: redis.Redis) -> list[bytes]:
    with redis.Redis.from_url(broker(server)) as queues:
        queues.flushdb()
    return [name for name, _ in leftovers(probe) if name.startswith(b"task:")]


@pytest.mark.parametrize("server", ["valkey"], indirect=True)
def test_time_limits_of_rq_leave_no_lock(server: Server, probe: redis.Redis, impl: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(RQ)
    assert run(tmp_path, server, "program.py").wait(50) == 0, (tmp_path / "output").read_text()
    # A signal can interrupt an `__exit__` that is Python at its entry: 1 of 40 signals does.
    assert len(left_by_tasks(server, probe)) <= EXIT_IS_PYTHON


@pytest.mark.parametrize("server", ["valkey"], indirect=True)
def test_soft_time_limits_of_celery_leave_no_lock(
    server: Server, probe: redis.Redis, impl: str, tmp_path: Path
) -> None:
    work_celery(tmp_path, server, CELERY, SUBMIT, "-c", "4")
    assert len(left_by_tasks(server, probe)) <= EXIT_IS_PYTHON


@pytest.mark.parametrize("server", ["valkey"], indirect=True)
def test_processes_of_celery_keep_nothing_as_they_end(
    server: Server, probe: redis.Redis, impl: str, tmp_path: Path
) -> None:
    """Neither those that are replaced after so many tasks, whose names the next would wait for, nor the last."""
    work_celery(tmp_path, server, KEEPING, SUBMIT_KEEPING, "-c", "1", "--max-tasks-per-child", "2")
    assert left_by_tasks(server, probe) == []
