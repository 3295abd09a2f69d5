"""A program that is interrupted on purpose: real signals at random moments of lock operations, hundreds of them.

    python interrupted.py URL MODE SEED HITS

The handler raises one kind of exception after the other, as those of Ctrl-C, of workers that limit a task's time, and
of alarms do. Each attempt acquires and releases one lock; what it owns after it was interrupted it releases, as a
`finally` would, unless a `with` has to. Prints a JSON object: implementation (FASTLOCK_IMPL asks for it), attempts,
hits, leaks (keys that stay although nobody owns them), wrong (what must never happen).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import signal
import sys
import threading
import time
from typing import Any

import redis

import fastlock
import fastlock.asyncio

LEASE, PATIENCE = 60, 2.0  # seconds: of a lock, and until a key that stays counts as left behind
LONGEST = 25.0  # seconds for the whole program


class Soft(Exception):
    """As Celery's SoftTimeLimitExceeded, or RQ's JobTimeoutException."""


class Hard(BaseException):
    """As what ends a worker."""


KINDS = (Soft, OSError, KeyboardInterrupt, TimeoutError, BlockingIOError, Hard, InterruptedError)


class Handler:
    """Raises another kind of exception for each signal."""

    def __init__(self) -> None:
        self.kinds = itertools.cycle(KINDS)
        self.raised: BaseException | None = None

    def __call__(self, number: int, frame: Any) -> None:
        self.raised = next(self.kinds)("struck")
        raise self.raised


class Sender(threading.Thread):
    """Interrupts the main thread, some random time after each `arm`."""

    def __init__(self, seed: int) -> None:
        super().__init__(daemon=True)
        self.random = random.Random(seed)
        self.armed = threading.Event()
        self.longest = 0.0005

    def run(self) -> None:
        while self.armed.wait():
            time.sleep(self.random.uniform(0, self.longest))
            if self.armed.is_set():
                self.armed.clear()
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def hold_back() -> None:
    """From here on no signal; what one raises that is already on its way is raised here."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])


def let_through() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


class Followers:
    """Threads that use the same client all the time, and must never notice."""

    def __init__(self, client: fastlock.Client, count: int, wrong: list[str]) -> None:
        self.client, self.wrong = client, wrong
        self.over = threading.Event()
        self.rounds = [0] * count
        self.threads = [threading.Thread(target=self.follow, args=(number,), daemon=True) for number in range(count)]
        for thread in self.threads:
            thread.start()

    def follow(self, number: int) -> None:
        lock = self.client.lock(f"follower:{number}", timeout=LEASE)
        try:
            while not self.over.is_set():
                if not lock.acquire(blocking=False):
                    self.wrong.append("a free lock was not to be had")
                elif not lock.owned():
                    self.wrong.append("somebody else's reply")
                lock.release()
                self.rounds[number] += 1
        except Exception as error:
            self.wrong.append(f"a follower got {error!r}")

    def stop(self) -> None:
        """All must still make progress."""
        before, end = list(self.rounds), time.monotonic() + PATIENCE
        while any(now == then for now, then in zip(self.rounds, before, strict=True)):
            if time.monotonic() > end:
                self.wrong.append(f"followers stand still: {before} -> {self.rounds}")
                break
            time.sleep(0.001)
        self.over.set()
        for thread in self.threads:
            thread.join(PATIENCE)


class Run:
    """The attempts of one mode, and what came of them."""

    def __init__(self, url: str, mode: str, seed: int) -> None:
        self.url, self.mode = url, mode
        self.client = self.connect()
        self.probe = redis.Redis.from_url(url)
        self.sender = Sender(seed)
        self.random = random.Random(seed + 1)
        self.attempts = self.hits = self.leaks = 0
        self.wrong: list[str] = []
        self.holder = fastlock.Client.from_url(url) if mode == "wait" else None
        self.handler = Handler()
        self.unraised: list[BaseException | None] = []  # in a __del__ or the like, where Python lets nothing through
        sys.unraisablehook = lambda args: self.unraised.append(args.exc_value)
        if mode != "asyncio":  # whose loop has a handler of its own, and does not raise what others do in its callbacks
            signal.signal(signal.SIGINT, self.handler)

    def connect(self) -> fastlock.Client:
        return fastlock.Client.from_url(self.url, max_connections=1 if self.mode == "lead" else 4)

    def go(self, hits: int) -> None:
        hold_back()
        followers = Followers(self.client, 3, self.wrong) if self.mode == "lead" else None
        self.sender.start()
        end = time.monotonic() + LONGEST
        while self.hits < hits and time.monotonic() < end:
            self.attempts += 1
            if self.mode == "connect":
                self.client = self.connect()
            self.attempt(f"name:{self.attempts}")
            if self.mode == "connect":
                self.client.close()
        if followers is not None:
            followers.stop()
        clients = len(self.probe.client_list())
        if clients > 10:
            self.wrong.append(f"{clients} connections")

    def attempt(self, name: str) -> None:
        """One attempt, and everything set right after it; SIGINT is held back before and afterwards."""
        lock = self.lock(name)
        held = self.occupy(name)
        self.handler.raised = None
        found: BaseException | None = None
        try:
            try:
                self.sender.armed.set()
                let_through()
                self.work(name, lock)
            finally:
                hold_back()
        except BaseException as error:
            found = error
        with contextlib.suppress(*KINDS):
            hold_back()
        self.sender.armed.clear()
        interrupted = found is not None
        if found is not (raised := self.handler.raised) and raised not in self.unraised and self.mode != "asyncio":
            self.wrong.append(f"the handler raised {raised!r}, and what arrived is {found!r}")
        if held is not None:
            held.join()
        self.hits += interrupted
        if lock.lease is not None and self.mode not in ("with", "drop-in"):  # there it is the statement's to release
            try:
                lock.release()
            except fastlock.LockError as error:
                self.wrong.append(f"released what it still owned, and got {error!r}")
        if interrupted:
            self.check(name)

    def lock(self, name: str) -> Any:
        if self.mode == "drop-in":
            return self.probe.lock(name, lock_class=fastlock.Lock)  # without end, as redis-py's
        return self.client.lock(name, timeout=LEASE, sleep=0.001)

    def work(self, name: str, lock: Any) -> None:
        if self.mode == "asyncio":
            asyncio.run(self.work_async(name))
            return
        for _ in range(1 if self.mode in ("connect", "wait") else 100):
            if self.mode in ("with", "drop-in"):
                with lock:
                    pass
            else:
                lock.acquire()
                lock.release()

    async def work_async(self, name: str) -> None:
        async with fastlock.asyncio.Client.from_url(self.url) as client:
            lock = client.lock(name, timeout=LEASE)
            try:
                await lock.acquire()
            finally:
                if lock.lease is not None:
                    await lock.release()

    def occupy(self, name: str) -> threading.Thread | None:
        """Somebody else holds the lock for a moment, so that the attempt has to wait."""
        if self.holder is None:
            return None
        lock = self.holder.lock(name, timeout=LEASE, thread_local=False)
        lock.acquire()
        pause = self.random.uniform(0, 0.003)

        def release() -> None:
            time.sleep(pause)
            lock.release()

        thread = threading.Thread(target=release)
        thread.start()
        return thread

    def check(self, name: str) -> None:
        """The key must be gone, though nobody uses the client again."""
        end = time.monotonic() + PATIENCE
        while self.probe.exists(name):
            if time.monotonic() > end:
                self.leaks += 1
                return


def main() -> None:
    url, mode, seed, hits = sys.argv[1:]
    run = Run(url, mode, int(seed))
    with contextlib.suppress(*KINDS):
        run.go(int(hits))
    report = {"attempts": run.attempts, "hits": run.hits, "leaks": run.leaks, "wrong": run.wrong[:5]}
    print(json.dumps({"implementation": fastlock.IMPLEMENTATION, **report}))


if __name__ == "__main__":
    main()
