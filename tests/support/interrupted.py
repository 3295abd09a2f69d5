"""A program that is interrupted on purpose: a timer's signal at random moments of lock operations, hundreds of times.

    python interrupted.py URL MODE SEED HITS [SECONDS]

The handler raises one kind of exception after the other, as Ctrl-C, time limits and alarms do. After an interrupt the
attempt releases what it owns, unless a `with` has to. The signal comes from the kernel, at whatever instruction: a
thread that sent it would need the interpreter, and interrupt only where the interpreter is given away.

Prints JSON: implementation, attempts, hits, leaks (keys that stay although nobody owns them), unleft (leaks of a `with`
whose body had ended), lost (connections that nobody will use again), wrong (all else that must never happen).
"""

from __future__ import annotations

import contextlib
import faulthandler
import inspect
import itertools
import json
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import redis

import fastlock

STANDSTILL = 5.0  # seconds after which threads that use locks hang: a waiter that nobody wakes rechecks once a second
LEASE, TIMEOUT = 60, 1.0  # seconds: of a lock; after which missing progress, or a key that stays, is a failure
LONGEST = 25.0  # seconds for the whole program
ROUNDS = 50  # of an attempt at most; the signal comes before
FOUND = 3  # failures of one kind, after which the run ends


class Soft(Exception):
    """Like Celery's SoftTimeLimitExceeded, or RQ's JobTimeoutException."""


class Hard(BaseException):
    """Like an exception that ends a worker."""


# Whether a `with` is left by a function of Python, which a signal can interrupt at its entry: that lease runs out.
EXIT_IS_PYTHON = inspect.isfunction(fastlock.ClientLock.__exit__)
# Modes whose locks are left by such a function in any build.
PYTHON_EXITS = ("write", "permits")
# Also what a lock raises, as a handler may use a lock; and what fastlock expects of its own calls.
KINDS = (
    *(Soft, OSError, KeyboardInterrupt, TimeoutError, BlockingIOError, Hard, InterruptedError),
    *(fastlock.LockError, redis.exceptions.TimeoutError, fastlock.LockNotOwnedError),
    *(IndexError, ValueError, RuntimeError),
)


def points(error: BaseException) -> list[str]:
    """Where it was raised: the innermost functions."""
    found = traceback.extract_tb(error.__traceback__)[-4:]
    return [f"{Path(each.filename).name}:{each.lineno} {each.name}" for each in found]


class Handler:
    """Raises another kind of exception for each signal, so many times while it is armed."""

    def __init__(self, kinds: Sequence[type[BaseException]] = KINDS) -> None:
        self.kinds = itertools.cycle(kinds)
        self.raised: list[BaseException] = []
        self.left = 0

    def __call__(self, number: int, frame: Any) -> None:
        if self.left:
            self.left -= 1
            if not self.left:  # a timer that fires faster than the attempt ends would let nothing run
                signal.setitimer(signal.ITIMER_REAL, 0)
            error = next(self.kinds)("interrupted")
            self.raised.append(error)
            raise error


class Followers:
    """Threads that use the same client all the time, and must never notice. names: of their locks, one for each
    thread."""

    def __init__(self, client: fastlock.Client, names: list[str], wrong: list[str]) -> None:
        self.client, self.wrong = client, wrong
        self.over = threading.Event()
        self.rounds = [0] * len(names)
        self.threads = [threading.Thread(target=self.follow, args=each, daemon=True) for each in enumerate(names)]
        for thread in self.threads:
            thread.start()

    def follow(self, number: int, name: str) -> None:
        lock = self.client.lock(name, timeout=LEASE)
        try:
            while not self.over.is_set():
                if not lock.acquire():
                    self.wrong.append("a lock was not acquired")
                elif not lock.owned():
                    self.wrong.append("the reply to another request")
                lock.release()
                self.rounds[number] += 1
        except Exception as error:
            self.wrong.append(f"a follower got {error!r}")

    def advance(self) -> bool:
        """Whether all threads still make progress."""
        before, end = list(self.rounds), time.monotonic() + STANDSTILL
        while any(now == then for now, then in zip(self.rounds, before, strict=True)):
            if time.monotonic() > end:
                self.wrong.append(f"followers stand still: {before} -> {self.rounds}")
                return False
            time.sleep(0.001)
        return True

    def stop(self) -> None:
        self.advance()
        self.over.set()
        for thread in self.threads:
            thread.join(TIMEOUT)


def pair(run: Run, lock: Any) -> None:
    lock.acquire()
    lock.release()


def within(run: Run, lock: Any) -> None:
    with lock:
        run.inside = True  # no statement of this block, or of what follows the `with`, can be interrupted
    run.inside = False


def nested(run: Run, lock: Any) -> None:
    with lock:
        with run.client.reentrant_lock(lock.name):
            run.inside = True
        if lock.lease.depth != 1:
            run.wrong.append(f"depth {lock.lease.depth} after the inner with")
    run.inside = False


def with_own_token(run: Run, lock: Any) -> None:
    lock.acquire(token=f"of its own:{next(run.numbers)}")
    lock.release()


def many(run: Run, lock: Any) -> None:
    run.leases = run.client.acquire_many([lock.name, lock.name + ":2"], timeout=LEASE)
    run.client.release_many(run.leases)


def several(run: Run, lock: Any) -> None:
    run.whole = run.client.multi_lock([lock.name + ":2", lock.name], timeout=LEASE)
    run.whole.acquire()
    run.whole.release()


class Mode:
    """What an attempt does, and with which settings; how often (0 to 1) another client holds the lock first."""

    def __init__(self, work: Callable[[Run, Any], None], held: float = 0.0, signals: int = 1, **settings: Any) -> None:
        self.work, self.held, self.signals, self.settings = work, held, signals, settings


MODES = {
    "pair": Mode(pair),
    "wait": Mode(pair, held=1),
    "lead": Mode(pair),  # one connection, with other threads on it
    "cohort": Mode(pair),  # other threads of the client want the same name
    "with": Mode(within),
    "drop-in": Mode(within),  # a lock without end
    "connect": Mode(pair),  # a new client each time
    "fair": Mode(within, held=0.5, fair=True),
    "fence": Mode(within, held=0.5, fence=True),
    "unconfirmed": Mode(within, held=0.3, confirm_release=False),
    "reentrant": Mode(nested, held=0.5),
    "renewed": Mode(within, held=0.5, auto_renew=True),
    "limited": Mode(within, held=0.5, blocking_timeout=LEASE),
    "polls": Mode(within, held=0.5, queue=False),
    "token": Mode(with_own_token, held=0.5),
    "many": Mode(many, held=0.5),
    "several": Mode(several, held=0.5),
    "write": Mode(within, held=0.5),
    "permits": Mode(within, held=0.5, auto_renew=True),
    "twice": Mode(within, held=0.3, signals=2),  # interrupted again while the first interrupt is undone
}


class Run:
    """The attempts of one mode, and their outcome."""

    def __init__(self, url: str, mode: str, seed: int) -> None:
        self.url, self.name, self.mode = url, mode, MODES[mode]
        self.client = self.connect()
        self.probe = redis.Redis.from_url(url)
        self.random = random.Random(seed)
        self.numbers = itertools.count()
        self.attempts = self.hits = self.leaks = self.unleft = 0
        self.lost = self.missing = 0
        self.wrong: list[str] = []
        self.inside = False  # the body of a `with` was entered, and the `with` has not been left
        self.leases: list[fastlock.Lease | None] = []
        self.whole: fastlock.MultiLock | None = None
        self.holder = fastlock.Client.from_url(url)
        self.handler = Handler()
        self.unraised: list[Any] = []  # raised in a __del__ or the like, where Python swallows exceptions
        self.longest = 0.002
        sys.unraisablehook = self.unraised.append  # a C method and no Python function, which could be interrupted
        signal.signal(signal.SIGALRM, self.handler)

    def connect(self) -> fastlock.Client:
        return fastlock.Client.from_url(self.url, max_connections=1 if self.name == "lead" else 4)

    def go(self, hits: int, seconds: float) -> None:
        names = {"lead": ["a", "b", "c"], "cohort": ["cohort"] * 3}.get(self.name)
        followers = None if names is None else Followers(self.client, names, self.wrong)
        end = time.monotonic() + seconds
        while self.hits < hits and time.monotonic() < end and self.failures() < FOUND:
            self.attempts += 1
            if self.name == "connect":
                self.client = self.connect()
            interrupted = self.attempt("cohort" if self.name == "cohort" else f"{self.name}:{self.attempts}")
            if followers is not None and interrupted and not followers.advance():
                break
            if self.name == "connect":
                self.client.close()
        if followers is not None:
            followers.stop()
        if len(self.probe.client_list()) > 12:
            self.wrong.append("connections stay open")

    def failures(self) -> int:
        return max(self.leaks, self.lost, len(self.wrong), self.unleft - self.hits // 20)

    def attempt(self, name: str) -> bool:
        """One attempt, and the cleanup right after it. Returns whether it was interrupted."""
        lock = self.lock(name)
        held = self.occupy(name) if self.random.random() < self.mode.held else None
        rounds = 1 if held is not None or self.name == "connect" else ROUNDS
        self.handler.raised, self.inside, self.leases, self.whole = [], False, [], None
        found: BaseException | None = None
        try:
            self.handler.left = self.mode.signals
            again = self.random.uniform(0.00001, 0.0003) if self.mode.signals > 1 else 0
            signal.setitimer(signal.ITIMER_REAL, self.random.uniform(1e-6, self.longest), again)
            for _ in range(rounds):
                self.mode.work(self, lock)
            self.handler.left = 0
        except BaseException as error:  # before another signal could interrupt:
            self.handler.left = 0
            found = error
        signal.setitimer(signal.ITIMER_REAL, 0)
        raised = self.handler.raised
        if found not in (raised or [None]) and not all(
            each in [args.exc_value for args in self.unraised] for each in raised
        ):
            self.wrong.append(f"the handler raised {raised!r}, and what arrived is {found!r}")
        if held is not None:
            held.join()
        interrupted = found is not None
        self.hits += interrupted
        if self.mode.work not in (within, nested):  # there the with statement has to release
            try:
                for each in (lock, self.whole):
                    if each is not None and each.lease is not None:
                        each.release()
                self.client.release_many(self.leases)
            except fastlock.LockError as error:
                self.wrong.append(f"released what it still owned, and got {error!r}")
        if interrupted:
            self.check(name, lock)
        return interrupted

    def lock(self, name: str) -> Any:
        if self.name == "drop-in":
            return self.probe.lock(name, lock_class=fastlock.Lock)  # without end, as redis-py's
        if self.name == "reentrant":
            return self.client.reentrant_lock(name, timeout=LEASE, sleep=0.001)
        if self.name == "write":
            return self.client.rw_lock(name, timeout=LEASE, sleep=0.001).write
        if self.name == "permits":
            return self.client.semaphore(name, 2, 2, timeout=LEASE, sleep=0.001, **self.mode.settings)
        return self.client.lock(name, timeout=LEASE, sleep=0.001, **self.mode.settings)

    def occupy(self, name: str) -> threading.Thread:
        """Another client holds the lock for a moment, so that the attempt has to wait."""
        lock: Any = self.holder.lock(name, timeout=LEASE)
        if self.name == "write":
            lock = self.holder.rw_lock(name, timeout=LEASE).read
        elif self.name == "permits":
            lock = self.holder.semaphore(name, 2, timeout=LEASE)
        lock.acquire()
        pause, lease = self.random.uniform(0, 0.003), lock.lease

        def release() -> None:
            time.sleep(pause)
            self.holder.release_many([lease])

        thread = threading.Thread(target=release)
        thread.start()
        return thread

    def check(self, name: str, lock: Any) -> None:
        """The key must be gone, though the client is not used again; and a later use finds the client in order."""
        if self.name in ("lead", "cohort"):
            return  # other threads use it all the time, and would notice
        unleft = self.inside and lock.lease is not None  # else a key may be late, on a machine that is busy
        end = time.monotonic() + (0.2 if unleft else TIMEOUT)
        while self.probe.exists(name, name + ":2"):
            if time.monotonic() > end:
                self.unleft += unleft
                self.leaks += not unleft
                if not unleft:
                    self.wrong.append(f"{name} stays, interrupted in {[points(each) for each in self.handler.raised]}")
                break
        transport = lock._transport
        queues = [*transport.queued_keys.values(), *transport.queues.by_entry.values()]
        if not self.inside and any(queue.key == lock._key for queue in queues):
            self.wrong.append("a waiter stays in a local queue")
        renewed = [*list(transport.renewals.added), *(each for _, _, each in list(transport.renewals.heap))]
        held = [lease for each in renewed if not each.over and (lease := each.lease()) is not None]
        if not self.inside and not all(lease._releasing for lease in held if lease.name == name):
            self.wrong.append("a lease is renewed that nobody holds")
        missing = (
            len(transport.connections) + bool(transport._opening) - len(transport.idle) - transport.push_connection_lent
        )
        self.lost, self.missing = self.lost + max(0, missing - self.missing), missing
        again = fastlock.ClientLock(lock._client, "again", LEASE, 0.001, True, None, True, True)
        if not again.acquire(blocking=False) or not again.owned() or again.lease is None:
            self.wrong.append("a free lock was not acquired, or the reply belonged to another request")
        again.release()


def main() -> None:
    url, mode, seed, hits, *seconds = sys.argv[1:]
    faulthandler.dump_traceback_later(float(seconds[0]) + 20 if seconds else 45, exit=True)
    run = Run(url, mode, int(seed))
    with contextlib.suppress(*KINDS):
        run.go(int(hits), float(seconds[0]) if seconds else LONGEST)
    counts = {"attempts": run.attempts, "hits": run.hits, "leaks": run.leaks, "unleft": run.unleft, "lost": run.lost}
    print(json.dumps({"implementation": fastlock.IMPLEMENTATION, **counts, "wrong": run.wrong[:5]}))


if __name__ == "__main__":
    main()
