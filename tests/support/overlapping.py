"""A program of many processes that acquire overlapping sets of names as one, again and again: all of them must end.

    python overlapping.py URL threads|asyncio PROCESSES ROUNDS [PLAIN]

Process i wants the i-th of SETS; the last PLAIN processes acquire single names by plain locks instead. Within a lock
each process writes its number beside each name, and must find it there, and nothing before. Prints what went wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sys
import traceback
from typing import Any

import redis

import fastlock
import fastlock.asyncio

SETS = (["{o}a", "{o}b"], ["{o}b", "{o}c"], ["{o}c", "{o}a"])
LEASE, LIMIT = 60, 50.0  # seconds: of a lock; after which an acquire that was not granted has failed


def inside(probe: redis.Redis, names: list[str], number: int) -> None:
    """What a holder does: nobody else may hold any of the names."""
    for name in names:
        assert probe.set(f"{name}:holder", number, nx=True), f"{name} has two holders"
    for name in names:
        assert probe.get(f"{name}:holder") == b"%d" % number, f"{name} has two holders"
        probe.delete(f"{name}:holder")


def work(url: str, number: int, rounds: int, plain: bool) -> None:
    client, probe, rng = fastlock.Client.from_url(url), redis.Redis.from_url(url), random.Random(number)
    for _ in range(rounds):
        names = list(SETS[number % len(SETS)])
        rng.shuffle(names)
        names = names[:1] if plain else names
        lock: Any = client.lock(names[0], LEASE) if plain else client.multi_lock(names, LEASE)
        assert lock.acquire(blocking_timeout=LIMIT), f"{names} were not acquired"
        inside(probe, names, number)
        lock.release()
    client.close()


async def aio_work(url: str, number: int, rounds: int, plain: bool) -> None:
    probe, rng = redis.Redis.from_url(url), random.Random(number)
    async with fastlock.asyncio.Client.from_url(url) as client:
        for _ in range(rounds):
            names = list(SETS[number % len(SETS)])
            rng.shuffle(names)
            names = names[:1] if plain else names
            lock: Any = client.lock(names[0], LEASE) if plain else client.multi_lock(names, LEASE)
            assert await lock.acquire(blocking_timeout=LIMIT), f"{names} were not acquired"
            inside(probe, names, number)
            await lock.release()


def main() -> None:
    url, api, processes, rounds, *plain = sys.argv[1:]
    first_plain = int(processes) - int((plain or ["0"])[0])
    children = []
    start, go = os.pipe()
    for number in range(int(processes)):
        if (child := os.fork()) == 0:
            status = 1
            with contextlib.suppress(BaseException):
                try:
                    os.close(go)
                    os.read(start, 1)  # until all are there
                    each = url, number, int(rounds), number >= first_plain
                    asyncio.run(aio_work(*each)) if api == "asyncio" else work(*each)
                    status = 0
                except BaseException:
                    traceback.print_exc()
            os._exit(status)
        children.append(child)
    os.close(go)
    failed = [child for child in children if os.waitpid(child, 0)[1]]
    print(f"{len(failed)} failed")


if __name__ == "__main__":
    main()
