"""Random walks of the handover model, replayed on real clients: what callers of fastlock run.

    python -m tests.walks --api threads|asyncio --impl cython|python --server valkey|redis|floor --seed 1 --walks 1000

A walk chooses what happens, event by event, and compares a real server and real clients with what the model allows
(tests/support/replay.py). The clock of leases stands still, but for what a walk says. Exit code 1: a walk has found a
drift, which is printed with its seed and all that was done.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

LENGTH = 60  # events of a walk, after which nothing is done that need not be
LONGEST_SLEEP = 500.0  # seconds of a sleep: longer than walks take, and far shorter than their leases
CONTROLS = 100  # walks with no mistake planted
START = 1000.0  # seconds: where the clock of a walk begins


class WalkClock:
    """The clock of leases: it shows the time of the client that runs."""

    def __init__(self) -> None:
        self.read: Callable[[], float] = lambda: START

    def __call__(self) -> float:
        return self.read()


def stop_the_clock() -> WalkClock:
    """Have fastlock, which is not imported yet, read a clock that a walk sets. Its compiled modules read the system's
    clock without Python where that goes on while the machine sleeps, and else ask Python."""
    assert "fastlock" not in sys.modules
    clock = WalkClock()
    real = time.monotonic
    if hasattr(time, "CLOCK_BOOTTIME"):
        del time.CLOCK_BOOTTIME
    time.monotonic = clock
    from fastlock._protocol import lease, local_queue, moments, steps
    from fastlock._transport import waiting

    assert lease.now is clock
    time.monotonic = real
    steps.BACKOFF = 0.0, 0.0  # a client connects again at once
    local_queue.NEAR = 0
    moments.LEAST_MOMENT = moments.MOST_MOMENT = 9.0  # as MOMENT_MS of replay.py says
    local_queue.RECHECK_SECONDS = waiting.RECHECK_SECONDS = LONGEST_SLEEP  # no thread's sleep ends by itself
    return clock


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Random walks of the handover model on real clients.")
    parser.add_argument("--api", choices=("threads", "asyncio"), default="asyncio")
    parser.add_argument("--impl", choices=("cython", "python"))
    parser.add_argument("--server", default="valkey", help="valkey, redis, floor; or the socket of one that runs")
    parser.add_argument("--seed", type=int, default=1, help="of the first walk")
    parser.add_argument("--walks", type=int, default=1000)
    parser.add_argument("--length", type=int, default=LENGTH)
    parser.add_argument("--trouble", action="store_true", help="walks with more trouble, as to find mistakes")
    parser.add_argument("--plant", action="store_true", help="in a copy made by support/mutants.py: find its mistakes")
    return parser.parse_args()


def walk(asked: argparse.Namespace, path: str, clock: WalkClock) -> int:
    """Walk, and print what happened. Returns the exit code."""
    from support.real_walks import Hunt, RealWalk
    from support.replay import Drift

    kind = Hunt if asked.trouble else RealWalk
    met: set[str] = set()
    for seed in range(asked.seed, asked.seed + asked.walks):
        one = kind(path, seed, asked.length, asked.api, clock)
        try:
            one.walk()
        except Drift as drift:
            print(f"drift\n{drift}", flush=True)
            return 1
        met |= one.met
    print("met:", *sorted(met), sep="\n", flush=True)
    return 0


def find_mistakes(asked: argparse.Namespace, path: str, clock: WalkClock) -> int:
    """Walk without a mistake, which must find none. Then plant each, and walk until it is found. Returns the exit
    code."""
    import pytest
    from protocol.test_handover_replay import PLANTED
    from support.mutants import MISTAKES

    if hunt(asked, path, clock, "nothing is planted", range(asked.seed, asked.seed + CONTROLS)):
        return 1
    missed = 0
    for name in [name for name, mistake in MISTAKES.items() if asked.api in mistake.apis]:
        for module in [module for module in list(sys.modules.values()) if hasattr(module, "MISTAKE")]:
            module.MISTAKE = name
        first = max(asked.seed, MISTAKES[name].first)
        missed += not hunt(asked, path, clock, name, range(first, first + asked.walks))
    for module in [module for module in list(sys.modules.values()) if hasattr(module, "MISTAKE")]:
        module.MISTAKE = ""
    for name, plant in PLANTED.items():
        with pytest.MonkeyPatch.context() as patch:
            plant(patch)
            missed += not hunt(asked, path, clock, name, range(asked.seed, asked.seed + asked.walks))
    return int(missed > 0)


def hunt(asked: argparse.Namespace, path: str, clock: WalkClock, mistake: str, seeds: range) -> bool:
    """Walk until the mistake that is planted is found. Returns whether it was."""
    from support.real_walks import Hunt
    from support.replay import Drift

    for seed in seeds:
        try:
            Hunt(path, seed, asked.length, asked.api, clock).walk()
        except Drift as drift:
            assert isinstance(drift.__cause__, AssertionError), "seen, and not stumbled over"
            print(f"found by walk {seed}: {mistake}: {str(drift).splitlines()[-1]}", flush=True)
            return True
    print(f"missed by {len(seeds)} walks: {mistake}", flush=True)
    return False


def main() -> int:
    asked = arguments()
    if asked.impl:
        os.environ["FASTLOCK_IMPL"] = asked.impl
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    clock = stop_the_clock()
    run = find_mistakes if asked.plant else walk
    sys.setswitchinterval(LONGEST_SLEEP)  # a thread runs until it blocks: see support/real_threads.py
    logging.disable()  # of leases that were lost, as a walk has it
    if "/" in asked.server:
        return run(asked, asked.server, clock)
    from support.servers import Servers

    with Servers().start(asked.server) as server:
        assert server.path is not None
        return run(asked, server.path, clock)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # by a clock that stands still the clients that walks have left would never end
