"""What frozen processes cost the others: the grants of a name that all want, while one of them is stopped now and then.

    python -m tests.frozen [--seconds 40] [--freezes 18] [--rounds 3] [--json]

Six processes want one name, which each of them holds for up to 20 ms, again and again. One of them at a time is stopped
for 1.5 s, as by a full machine, a debugger or a snapshot: one time in six the holder, as chance has it with six, else
one who waits, whose turn comes meanwhile. redis-py's locks and fastlock's are run in turn, with the same freezes. Exits
with 1 where the median of fastlock's grants is below 0.85 of that of redis-py's, whose releasers acquire again at once,
in no order.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import redis

import fastlock
from fastlock.embedded import Server

WORKERS = 6
LONGEST_HOLD = 0.02  # seconds
FROZEN = 1.5
BOUND = 0.85  # of redis-py's grants
NOBODY = -1
LIBRARIES = ("redis-py", "fastlock")


def work(url: str, library: str, number: int, seconds: float, start: Any, holder: Any, found: Any) -> None:
    """One process: acquire, hold, release, again."""
    client: Any = redis.Redis.from_url(url) if library == "redis-py" else fastlock.Client.from_url(url)
    lock, rng, grants = client.lock("name", timeout=10), random.Random(number), 0
    start.wait()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with lock:
            holder.value, grants = number, grants + 1
            time.sleep(rng.random() * LONGEST_HOLD)  # what is measured: a holder at work
            holder.value = NOBODY
    found.put(grants)


def freeze(processes: Sequence[Any], holder: Any, whether_holder: bool, rng: random.Random) -> None:
    """Stop the holder, or one who waits, for a while."""
    while (number := holder.value) == NOBODY:
        time.sleep(0.0005)
    if not whether_holder:
        number = rng.choice([each for each in range(WORKERS) if each != number])
    pid = processes[number].pid
    os.kill(pid, signal.SIGSTOP)
    time.sleep(FROZEN)
    os.kill(pid, signal.SIGCONT)


def run(library: str, seconds: float, freezes: int, seed: int) -> int:
    """The grants of all processes of one run."""
    start, found = multiprocessing.Barrier(WORKERS + 1), multiprocessing.Queue()
    holder, rng = multiprocessing.Value("i", NOBODY, lock=False), random.Random(seed)
    of_holders = rng.sample(range(freezes), round(freezes / WORKERS))
    with Server() as server:
        processes = [
            multiprocessing.Process(target=work, args=(server.url, library, number, seconds, start, holder, found))
            for number in range(WORKERS)
        ]
        for process in processes:
            process.start()
        start.wait()
        begun = time.monotonic()
        for number in range(freezes):
            time.sleep(max(0.0, begun + seconds * (number + 0.25) / freezes - time.monotonic()))  # once all are at work
            freeze(processes, holder, number in of_holders, rng)
        grants = sum(found.get(timeout=seconds + 60) for _ in processes)
        for process in processes:
            process.join()
    return grants


def _part(found: Mapping[str, Sequence[float]]) -> float:
    theirs, ours = (statistics.median(found[library]) for library in LIBRARIES)
    return ours / theirs if theirs else 0.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.frozen", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=40.0, help="of each run")
    parser.add_argument("--freezes", type=int, default=18, help="in each run")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each library, in turn")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    args = parser.parse_args()
    counts: dict[str, list[int]] = {library: [] for library in LIBRARIES}
    for seed in range(args.rounds):
        for library in LIBRARIES:
            counts[library].append(run(library, args.seconds, args.freezes, seed))
            print(f"{library}: {counts[library][-1]:,} grants", file=sys.stderr if args.json else None, flush=True)
    part = _part(counts)
    if args.json:
        print(json.dumps({"grants": counts, "part": part, "bound": BOUND}))
    else:
        verdict = "MISSED" if part < BOUND else "met"
        print(f"{verdict}: fastlock's part of redis-py's grants, by medians: {part:.3f} (bound {BOUND})")
    return int(part < BOUND)


if __name__ == "__main__":
    sys.exit(main())
