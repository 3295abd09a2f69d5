"""A program whose signal handler uses a lock of the client that it interrupts, thousands of times.

    python nested.py URL MAX_CONNECTIONS SECONDS

The main thread and others want two names; the handler acquires a third, which is free, or waits for one that somebody
else holds, and raises nothing. Where there is no other connection for the handler, it may get a RuntimeError, at once:
a thread that waits for itself would wait for `reply_timeout`.

Prints a JSON object: implementation, strikes (signals), refused (RuntimeErrors), stalls (calls of any thread that took
as long as that), wrong (other errors), left (keys).
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import redis

import fastlock

REPLY_TIMEOUT = 4.0  # seconds
STALL = 3.0  # of REPLY_TIMEOUT: a busy machine stands still for less
THREADS = 4
HELD = "held"


class Run:
    """The actions of one run, and their outcome."""

    def __init__(self, url: str, connections: int, seconds: float) -> None:
        self.client = fastlock.Client.from_url(url, max_connections=connections, reply_timeout=REPLY_TIMEOUT)
        self.end = time.monotonic() + seconds
        self.strikes = self.refused = self.stalls = 0
        self.wrong: list[str] = []
        self.within = False

    def timed(self, work: Callable[[], None], in_handler: bool = False) -> None:
        start = time.monotonic()
        try:
            work()
        except Exception as error:
            if in_handler and type(error) is RuntimeError and "max_connections" in str(error):
                self.refused += 1
            else:
                self.wrong.append(repr(error))
        self.stalls += time.monotonic() - start > STALL

    def pair(self, name: str) -> None:
        with self.client.lock(name, timeout=60):
            pass

    def strike(self, number: int, frame: Any) -> None:
        if not self.within:
            self.within = True
            self.strikes += 1
            self.timed(self.pair_or_wait, in_handler=True)
            self.within = False

    def pair_or_wait(self) -> None:
        """Take a free name; or wait in vain, and leave the queue, for one that somebody holds."""
        if self.strikes % 2:
            self.pair("handler")
            return
        try:
            assert not self.client.lock(HELD, fair=self.strikes % 4 == 0, blocking_timeout=0.015).acquire()
        except RuntimeError as error:  # there is one connection on which to wait, and this thread may wait there
            if "max_connections" not in str(error):
                raise

    def work(self) -> None:
        while time.monotonic() < self.end and not self.stalls:
            self.timed(lambda: self.pair(f"name:{random.randrange(2)}"))

    def go(self) -> None:
        threads = [threading.Thread(target=self.work) for _ in range(THREADS)]
        signal.signal(signal.SIGALRM, self.strike)
        for thread in threads:
            thread.start()
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.0013)
        self.work()
        signal.setitimer(signal.ITIMER_REAL, 0)
        for thread in threads:
            thread.join()
        self.client.close()


def report(url: str, connections: int, seconds: float) -> dict[str, Any]:
    """What the program prints."""
    program = Path(__file__)
    paths = os.pathsep.join([str(program.parents[2]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(program), url, str(connections), str(seconds)],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    url, connections, seconds = sys.argv[1:]
    run = Run(url, int(connections), float(seconds))
    with contextlib.closing(redis.Redis.from_url(url)) as probe:
        probe.set(HELD, "somebody else")
        run.go()
        probe.delete(HELD)
        left = [key.decode() for key in probe.scan_iter()]
    counts = {"strikes": run.strikes, "refused": run.refused, "stalls": run.stalls}
    print(json.dumps({"implementation": fastlock.IMPLEMENTATION, **counts, "wrong": run.wrong[:5], "left": left}))


if __name__ == "__main__":
    main()
