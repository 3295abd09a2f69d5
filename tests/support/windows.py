"""A process without what Windows lacks: locks of both APIs on a real server over TCP. Run by test_windows.py.

The names are removed before anything else is imported. The platform is still Linux: this shows that fastlock needs none
of the names, not what Windows itself does.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time

_pair, _family = socket.socketpair, getattr(socket, "AF_UNIX", socket.AF_INET)
# Windows makes a pair out of TCP; event loops need it
socket.socketpair = lambda *_: _pair(_family, socket.SOCK_STREAM)
for module, names in (
    (socket, ("MSG_DONTWAIT", "MSG_NOSIGNAL", "AF_UNIX", "SO_REUSEPORT")),
    (select, ("poll", "epoll", "POLLIN", "POLLOUT")),
    (os, ("fork", "register_at_fork", "getuid", "geteuid", "sched_getaffinity", "get_blocking", "set_blocking")),
    (signal, ("pthread_kill", "SIGALRM", "SIGUSR1", "setitimer", "SIGKILL")),
    (time, ("CLOCK_BOOTTIME", "CLOCK_MONOTONIC", "clock_gettime")),
):
    for name in names:
        vars(module).pop(name, None)
for missing in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[missing] = None  # type: ignore[assignment]

import asyncio  # noqa: E402
import threading  # noqa: E402

import fastlock  # noqa: E402
import fastlock.asyncio  # noqa: E402

assert fastlock.IMPLEMENTATION == "python", fastlock.IMPLEMENTATION
ROUNDS = 50
NAMES = [f"name:{number}" for number in range(3000)]  # more than a socket buffer holds


def threads(url: str) -> None:
    count = 0
    with fastlock.Client.from_url(url) as client, fastlock.Client.from_url(url) as other:

        def work(number: int) -> None:
            nonlocal count
            lock = (client, other)[number % 2].lock("hot", timeout=30)
            for _ in range(ROUNDS):
                with lock as lease:
                    seen = count
                    assert lease.valid and lock.owned()
                    count = seen + 1

        workers = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert count == 4 * ROUNDS
        assert not client.lock("hot").locked()
        assert client.release_many(client.acquire_many(NAMES)) == [True] * len(NAMES)
        waiter = threading.Thread(target=lambda: client.lock("handed").acquire())
        waits = client.get_stats()["waits"]
        with other.lock("handed"):
            assert not client.lock("handed").acquire(blocking_timeout=0.05)
            waiter.start()
            while client.get_stats()["waits"] < waits + 2:
                time.sleep(0.001)
        waiter.join(10)
        assert client.get_stats()["remote_handovers"] and client.lock("handed").locked()
    print("threads")


async def tasks(url: str) -> None:
    count = 0
    async with fastlock.asyncio.Client.from_url(url) as client, fastlock.asyncio.Client.from_url(url) as other:

        async def work(number: int) -> None:
            nonlocal count
            lock = (client, other)[number % 2].lock("hot", timeout=30)
            for _ in range(ROUNDS):
                async with lock as lease:
                    seen = count
                    assert lease.valid and await lock.owned()
                    count = seen + 1

        await asyncio.gather(*map(work, range(4)))
        assert count == 4 * ROUNDS
        assert not await client.lock("hot").locked()
        assert await client.release_many(await client.acquire_many(NAMES)) == [True] * len(NAMES)
        waits = client.get_stats()["waits"]
        async with other.lock("handed-on"):
            assert not await client.lock("handed-on").acquire(blocking_timeout=0.05)
            waiter = asyncio.create_task(client.lock("handed-on").acquire())
            while client.get_stats()["waits"] < waits + 2:
                await asyncio.sleep(0.001)
        assert await waiter and client.get_stats()["remote_handovers"]
    print("tasks")


if __name__ == "__main__":
    threads(sys.argv[1])
    asyncio.run(tasks(sys.argv[1]))
