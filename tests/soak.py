"""The abandonment storm: acquires that are cancelled or time out at random points, by the hundred thousand.

    python -m tests.soak --count 100000 --api threads|asyncio --impl cython|python --server valkey|redis|floor --seed 1
    python -m tests.soak --pairs 1000000 --api asyncio        # memory: what a million pairs leave behind

Every caller that survives checks that it got the reply to its own command: tokens are unique, and `owned()` compares
them. At the end no key may be left and no connection have been lost. Prints progress and a summary; exit code 1: a
violation.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import redis

import fastlock
import fastlock.asyncio
from fastlock._protocol.commands import token_matches
from fastlock.embedded import Server

NAMES = 40  # few enough to collide, many enough to be free most of the time
LEASE = 120  # seconds: no lease ends by itself during the storm
WORKERS = {"threads": 12, "asyncio": 200}
CONNECTIONS = {"threads": 4, "asyncio": 1}
GROWTH = 1 << 20  # bytes that a million pairs may leave behind
WARM = 0.1  # part of the pairs that warms up and is not measured


class Storm:
    """What all workers of one storm share: the number of acquires, the counts, and the violations."""

    def __init__(self, url: str, api: str, count: int, seed: int) -> None:
        self.url, self.api, self.count, self.seed = url, api, count, seed
        self.left = count
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.progress: Callable[[Storm], None] = lambda _: None

    def next(self) -> bool:
        """Whether another acquire is to be made."""
        if self.left <= 0 or len(self.wrong) > 20:
            return False
        self.left -= 1
        if self.left % 10_000 == 0:
            self.progress(self)
        return True

    def expect(self, truth: Any, message: str) -> None:
        if not truth:
            self.wrong.append(message)

    def acquired(self, probe: redis.Redis, lock: Any, rng: random.Random) -> None:
        """Count a success, and now and then compare with the key on the server."""
        self.counts["acquired"] += 1
        if rng.random() < 0.02:
            found = probe.get(lock.name)
            self.expect(token_matches(found, lock.lease.token), f"{lock.name}: acquired, but the key holds {found!r}")

    def finish(self, probe: redis.Redis) -> None:
        """After all clients have closed: check that nothing is left."""
        end = time.monotonic() + 10
        while len(probe.client_list()) > 1 and time.monotonic() < end:
            time.sleep(0.01)
        self.expect(len(probe.client_list()) == 1, "connections stay open after close()")
        left = [key for key in probe.scan_iter(count=1000) if not key.startswith(b"fastlock:fence:")]
        self.expect(not left, f"{len(left)} keys are left: {left[:5]}")
        made = probe.info("stats")["total_connections_received"] - self.before
        self.expect(made <= 2 * CONNECTIONS[self.api], f"{made} connections were made")
        self.counts["connections"] = made

    def run(self) -> Storm:
        """Run the whole storm, on an empty server."""
        with redis.Redis.from_url(self.url) as probe:
            self.before = probe.info("stats")["total_connections_received"]
            if self.api == "threads":
                Threads(self).run()
            else:
                asyncio.run(Tasks(self).run())
            self.finish(probe)
        return self


class Threads:
    """Threads on a few shared connections; they time out by blocking_timeouts shorter than a round trip."""

    def __init__(self, storm: Storm) -> None:
        self.storm = storm
        self.client = fastlock.Client.from_url(storm.url, max_connections=CONNECTIONS["threads"])

    def run(self) -> None:
        workers = [threading.Thread(target=self.guarded, args=(number,)) for number in range(WORKERS["threads"])]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        self.client.lock("barrier").locked()
        self.client.close()

    def guarded(self, number: int) -> None:
        try:
            with redis.Redis.from_url(self.storm.url) as probe:
                self.storm.before += 1
                self.work(number, probe)
        except BaseException as error:
            self.storm.wrong.append(f"a worker got {error!r}")
            raise

    def work(self, number: int, probe: redis.Redis) -> None:
        storm, rng = self.storm, random.Random(f"{self.storm.seed}/{number}")
        probe.ping()
        mine = self.client.lock(f"own:{number}", timeout=LEASE)
        storm.expect(mine.acquire(token=f"own token {number}"), "a free lock was not acquired")
        while storm.next():
            lock = self.client.lock(f"name:{rng.randrange(NAMES)}", timeout=LEASE, sleep=0.001)
            wait = rng.choice((10e-6, 50e-6, 100e-6, 300e-6, 2e-3)) * rng.random()
            if lock.acquire(blocking_timeout=max(wait, 1e-9)):
                storm.acquired(probe, lock, rng)
                if rng.random() < 0.2:
                    storm.expect(lock.owned(), f"{lock.name}: acquired, but not owned")
                lock.release()
            else:
                storm.counts["timed out"] += 1
                storm.expect(lock.lease is None, f"{lock.name}: given up, but with a lease")
            if rng.random() < 0.2:
                storm.expect(mine.owned(), f"{mine.name}: the reply to another command")
        mine.release()


class Tasks:
    """Tasks on one connection; they are cancelled after a random number of loop iterations, or by a timeout."""

    def __init__(self, storm: Storm) -> None:
        self.storm = storm
        self.unhandled: list[dict[str, Any]] = []

    async def run(self) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: self.unhandled.append(context))
        storm = self.storm
        with redis.Redis.from_url(storm.url) as self.probe:
            self.probe.ping()
            storm.before += 1
            async with fastlock.asyncio.Client.from_url(storm.url) as self.client:
                await asyncio.gather(*(self.guarded(number) for number in range(WORKERS["asyncio"])))
                await self.client.lock("barrier").locked()
        gc.collect()
        await asyncio.sleep(0)
        storm.expect(not self.unhandled, f"unhandled errors: {self.unhandled[:3]}")
        storm.expect(len(asyncio.all_tasks()) == 1, f"tasks left behind: {asyncio.all_tasks()}")

    async def guarded(self, number: int) -> None:
        try:
            await self.work(number)
        except BaseException as error:
            self.storm.wrong.append(f"a worker got {error!r}")
            raise

    async def work(self, number: int) -> None:
        storm, rng = self.storm, random.Random(f"{self.storm.seed}/{number}")
        mine = self.client.lock(f"own:{number}", timeout=LEASE)
        storm.expect(await mine.acquire(token=f"own token {number}"), "a free lock was not acquired")
        while storm.next():
            lock = self.client.lock(f"name:{rng.randrange(NAMES)}", timeout=LEASE, sleep=0.001, thread_local=False)
            if await self.attempt(lock, rng):
                storm.acquired(self.probe, lock, rng)
                if rng.random() < 0.2:
                    storm.expect(await lock.owned(), f"{lock.name}: acquired, but not owned")
                await lock.release()
            else:
                storm.expect(lock.lease is None, f"{lock.name}: given up, but with a lease")
            if rng.random() < 0.2:
                storm.expect(await mine.owned(), f"{mine.name}: the reply to another command")
        await mine.release()

    async def attempt(self, lock: Any, rng: random.Random) -> bool:
        """An acquire that is mostly abandoned; returns whether it succeeded before that."""
        if rng.random() < 0.3:
            if not await lock.acquire(blocking_timeout=rng.random() * 2e-3):
                self.storm.counts["timed out"] += 1
            return lock.lease is not None
        task = asyncio.ensure_future(lock.acquire(blocking=rng.random() < 0.7))
        for _ in range(rng.randrange(12)):
            await asyncio.sleep(0)
        task.cancel()
        try:
            if not await task:
                self.storm.counts["refused"] += 1
        except asyncio.CancelledError:
            self.storm.counts["cancelled"] += 1
        return lock.lease is not None


# --------------------------------------------------------------------------------------------------------------- memory


def resident() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * 4096


class Pairs:
    """Uncontended acquires and releases, by a few threads or many tasks; how much memory is kept."""

    def __init__(self, url: str, api: str) -> None:
        self.url, self.api = url, api
        self.workers = 4 if api == "threads" else 50

    def run(self, pairs: int) -> int:
        """Bytes of growth from the end of the warm-up to the end."""
        warm = int(pairs * WARM)
        return self._threads(warm, pairs) if self.api == "threads" else asyncio.run(self._tasks(warm, pairs))

    def _threads(self, warm: int, pairs: int) -> int:
        client = fastlock.Client.from_url(self.url)

        def work(number: int, count: int) -> None:
            for turn in range(count):
                with client.lock(f"pair:{number}:{turn % 97}"):
                    pass

        def together(count: int) -> int:
            workers = [threading.Thread(target=work, args=(n, count // self.workers)) for n in range(self.workers)]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
            return _settled()

        before = together(warm)
        after = together(pairs - warm)
        client.close()
        return after - before

    async def _tasks(self, warm: int, pairs: int) -> int:
        async with fastlock.asyncio.Client.from_url(self.url) as client:

            async def work(number: int, count: int) -> None:
                for turn in range(count):
                    async with client.lock(f"pair:{number}:{turn % 97}"):
                        pass

            async def together(count: int) -> int:
                await asyncio.gather(*(work(number, count // self.workers) for number in range(self.workers)))
                return _settled()

            before = await together(warm)
            return await together(pairs - warm) - before


def _settled() -> int:
    gc.collect()
    return resident()


# ---------------------------------------------------------------------------------------------------------- the program


def start(kind: str) -> Server:
    """A server of that kind; support/ is on the path of pytest, but not of `python -m tests.soak`."""
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    from support.servers import Servers

    return Servers().start(kind)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=100_000, help="acquires of the storm")
    parser.add_argument("--pairs", type=int, default=0, help="instead: so many pairs, and the memory they leave behind")
    parser.add_argument("--api", choices=("threads", "asyncio"), default="threads")
    parser.add_argument("--impl", choices=("cython", "python"), default="cython")
    parser.add_argument("--server", choices=("valkey", "redis", "floor"), default="valkey")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if args.impl != fastlock.IMPLEMENTATION:  # it is chosen when fastlock is imported, so start again
        os.environ["FASTLOCK_IMPL"] = args.impl
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    started = time.monotonic()
    cell = f"{args.api} {fastlock.IMPLEMENTATION} {args.server}"
    with start(args.server) as server:
        if args.pairs:
            growth = Pairs(server.url, args.api).run(args.pairs)
            print(f"{cell}: {args.pairs} pairs in {time.monotonic() - started:.1f} s, memory {growth / 1024:+.0f} KiB")
            return int(growth >= GROWTH)
        storm = Storm(server.url, args.api, args.count, args.seed)
        storm.progress = lambda storm: print(
            f"{time.monotonic() - started:6.1f} s  {storm.left:8} to go  {dict(storm.counts)}", flush=True
        )
        storm.run()
    print(f"{cell} seed {args.seed}: {args.count} acquires in {time.monotonic() - started:.1f} s, {dict(storm.counts)}")
    for line in storm.wrong:
        print(f"WRONG: {line}")
    return int(bool(storm.wrong))


if __name__ == "__main__":
    sys.exit(main())
