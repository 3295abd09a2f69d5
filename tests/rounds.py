"""How long a lease may circulate within a client: what a longer or shorter LOCAL_SECONDS costs and gains.

    python -m tests.rounds [--seconds 1] [--rounds 3] [--rtt 5]

Four processes of four threads want one name, held for a millisecond, or not at all. For each LOCAL_SECONDS: the median
of the rates, the longest waits (p99), how evenly the threads were served, and the commands sent for each grant. The
figures in docs/waiting.md come from this program. On a busy machine they say nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import statistics
import sys
import threading
import time
from typing import Any, NamedTuple

import fastlock
from fastlock._protocol import local_queue
from fastlock.benches.relay import Relay
from fastlock.embedded import Server

PROCESSES, THREADS = 4, 4
CHOICES = (0.0, 0.003, 0.01, 0.03, 0.1)  # seconds


class Run(NamedTuple):
    """The measurements of one run."""

    rate: float
    wait: float  # p99, in ms
    evenness: float
    commands: float


def work(url: str, choice: float, hold: float, seconds: float, start: Any, found: Any) -> None:
    """One process: its threads acquire, hold, release, again."""
    local_queue.LOCAL_SECONDS = choice
    client = fastlock.Client.from_url(url)
    client.server_info()
    waits: list[float] = []
    grants = [0] * THREADS
    start.wait()
    end = time.monotonic() + seconds

    def use_lock(number: int) -> None:
        lock = client.lock("name")
        while (called := time.monotonic()) < end:
            lock.acquire()
            waits.append(time.monotonic() - called)
            grants[number] += 1
            if hold:
                time.sleep(hold)  # what is measured: a holder at work
            lock.release()

    threads = [threading.Thread(target=use_lock, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found.put((grants, waits, client.get_stats()["commands"]))


def run_once(url: str, choice: float, hold: float, seconds: float) -> Run:
    """One run over all processes."""
    start, found = multiprocessing.Barrier(PROCESSES), multiprocessing.Queue()
    arguments = (url, choice, hold, seconds, start, found)
    processes = [multiprocessing.Process(target=work, args=arguments) for _ in range(PROCESSES)]
    for process in processes:
        process.start()
    parts = [found.get(timeout=seconds + 60) for _ in processes]
    for process in processes:
        process.join()
    grants = [count for part, _, _ in parts for count in part]
    waits = sorted(wait for _, part, _ in parts for wait in part)
    commands = sum(count for _, _, count in parts)
    longest = waits[int(len(waits) * 0.99)] * 1e3
    return Run(sum(grants) / seconds, longest, min(grants) / max(grants), commands / sum(grants))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.rounds", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1.0, help="of each run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rtt", type=float, default=0.0, help="milliseconds of a network before the server")
    args = parser.parse_args()
    with Server() as server, contextlib.ExitStack() as stack:
        url = server.unix_url
        if args.rtt:
            url = stack.enter_context(contextlib.closing(Relay(url, args.rtt / 1e3))).url
        for hold in (0.001, 0.0):
            runs: dict[float, list[Run]] = {choice: [] for choice in CHOICES}
            for _ in range(args.rounds):
                for choice, found in runs.items():
                    found.append(run_once(url, choice, hold, args.seconds))
            for choice, found in runs.items():
                rate, wait, evenness, commands = (statistics.median(column) for column in zip(*found, strict=True))
                print(
                    f"hold {hold * 1e3:g} ms, local {choice * 1e3:3g} ms: {rate:7,.0f} grants/s, p99 {wait:6.1f} ms, "
                    f"min/max {evenness:.2f}, {commands:.2f} commands a grant",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
