"""How redis-py's clients fare in a fleet that moves to fastlock: the grants of a name that all of them want.

    python -m tests.mixed [--seconds 5]

Three processes want one name, which each of them holds for a millisecond and then leaves alone for one. First all use
redis-py, as a baseline; then one uses redis-py, and two use fastlock with two threads each, which wait in the queue, or
as redis-py does (`queue=False`). The figures in docs/waiting.md come from this program.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import threading
import time
from typing import Any

import redis

import fastlock
from fastlock.embedded import Server

HOLD = PAUSE = 0.001  # seconds
SLEEP = 0.01  # between two tries of a client that polls
TIMEOUT = 2.0  # seconds, after which a caller gives up
KINDS = {"redis-py": 1, "fastlock": 2, "fastlock, queue=False": 2}  # and the number of threads of a process
FLEETS = (("redis-py",) * 3, ("redis-py", "fastlock", "fastlock"), ("redis-py", *("fastlock, queue=False",) * 2))


def work(path: str, kind: str, seconds: float, start: Any, found: Any) -> None:
    """One process: its threads acquire, hold, release, pause, again."""
    raw = redis.Redis(unix_socket_path=path)
    options = {} if kind == "redis-py" else {"lock_class": fastlock.Lock}
    grants, failures = [0] * KINDS[kind], [0] * KINDS[kind]
    raw.ping()
    start.wait()
    end = time.monotonic() + seconds

    def use_lock(number: int) -> None:
        lock: Any = raw.lock("name", timeout=10, sleep=SLEEP, blocking_timeout=TIMEOUT, **options)
        if kind.endswith("queue=False"):
            lock = fastlock.Lock(raw, "name", timeout=10, sleep=SLEEP, blocking_timeout=TIMEOUT, queue=False)
        while time.monotonic() < end:
            if lock.acquire():
                grants[number] += 1
                time.sleep(HOLD)  # what is measured: a holder at work
                lock.release()
            else:
                failures[number] += 1
            time.sleep(PAUSE)

    threads = [threading.Thread(target=use_lock, args=(number,)) for number in range(KINDS[kind])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found.put((kind, sum(grants), sum(failures)))


def run_fleet(path: str, fleet: tuple[str, ...], seconds: float) -> list[tuple[str, int, int]]:
    """One run: for each process its kind, its grants, and how often it gave up."""
    start, found = multiprocessing.Barrier(len(fleet)), multiprocessing.Queue()
    processes = [multiprocessing.Process(target=work, args=(path, kind, seconds, start, found)) for kind in fleet]
    for process in processes:
        process.start()
    parts = [found.get(timeout=seconds + 60) for _ in processes]
    for process in processes:
        process.join()
    return sorted(parts)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mixed", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=5.0, help="of each run")
    args = parser.parse_args()
    with Server() as server:
        for fleet in FLEETS:
            parts = run_fleet(server.path, fleet, args.seconds)
            print("; ".join(f"{kind}: {grants:,} grants, gave up {gone}" for kind, grants, gone in parts), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
