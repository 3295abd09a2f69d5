"""What frozen processes cost the others: the grants of a name that all want, while one of them is stopped now and then.

    python -m tests.frozen [--seconds 40] [--freezes 18] [--rounds 3] [--json]

Six processes want one name, which each of them holds for up to 20 ms, again and again. One of them at a time, chosen by
chance, is stopped for 1.5 s, as by a full machine, a debugger or a snapshot: a waiter whose turn comes meanwhile, or
the holder. redis-py's locks and fastlock's are run in turn, with the same freezes. Exits with 1 where the median of
fastlock's grants is below 0.85 of that of redis-py's, whose releasers acquire again at once, in no order. Which freezes
hit the holder is chance, and costs both the same: beside the grants stand those of a second without such a freeze.
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
LIBRARIES = ("redis-py", "fastlock")


def work(url: str, library: str, number: int, seconds: float, start: Any, found: Any) -> None:
    """One process: acquire, hold, release, again."""
    client: Any = redis.Redis.from_url(url) if library == "redis-py" else fastlock.Client.from_url(url)
    lock, rng, grants, frozen = client.lock("name", timeout=10), random.Random(number), 0, 0.0
    start.wait()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with lock:
            grants, since = grants + 1, time.monotonic()
            time.sleep(rng.random() * LONGEST_HOLD)  # what is measured: a holder at work
            held = time.monotonic() - since
        frozen += held if held > 5 * LONGEST_HOLD else 0.0
    found.put((grants, frozen))


def run(library: str, seconds: float, freezes: int, seed: int) -> tuple[int, float]:
    """The grants of all processes of one run, and for how many seconds a holder was frozen."""
    start, found = multiprocessing.Barrier(WORKERS + 1), multiprocessing.Queue()
    with Server() as server:
        processes = [
            multiprocessing.Process(target=work, args=(server.url, library, number, seconds, start, found))
            for number in range(WORKERS)
        ]
        for process in processes:
            process.start()
        start.wait()
        begun, rng = time.monotonic(), random.Random(seed)
        for number in range(freezes):
            time.sleep(max(0.0, begun + seconds * (number + 0.25) / freezes - time.monotonic()))  # once all are at work
            pid = rng.choice(processes).pid
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
            time.sleep(FROZEN)
            os.kill(pid, signal.SIGCONT)
        parts = [found.get(timeout=seconds + 60) for _ in processes]
        for process in processes:
            process.join()
    return sum(grants for grants, _ in parts), sum(frozen for _, frozen in parts)


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
    rates: dict[str, list[float]] = {library: [] for library in LIBRARIES}
    for seed in range(args.rounds):
        for library in LIBRARIES:
            grants, frozen = run(library, args.seconds, args.freezes, seed)
            counts[library].append(grants)
            rates[library].append(grants / max(args.seconds - frozen, 0.001))
            told = (
                f"{library}: {grants:,} grants, a holder frozen for {frozen:.1f} s: {rates[library][-1]:.1f} a second"
            )
            print(told, file=sys.stderr if args.json else None, flush=True)
    part, unfrozen = _part(counts), _part(rates)
    if args.json:
        print(json.dumps({"grants": counts, "grants_per_second": rates, "part": part, "bound": BOUND}))
    else:
        verdict = "MISSED" if part < BOUND else "met"
        print(f"{verdict}: fastlock's part of redis-py's grants, by medians: {part:.3f} (bound {BOUND})")
        print(f"its part of the grants a second while no holder was frozen: {unfrozen:.3f}")
    return int(part < BOUND)


if __name__ == "__main__":
    sys.exit(main())
