"""Many waiters: checks that all are served, in order where that is promised, and the cost in memory and commands.

    python -m tests.scale [--impl cython|python] [--server valkey|redis|floor]

10,000 waiters on one name from 4 processes, in any order and in strict order; 100,000 tasks on 1,000 names in one
process; what a waiter adds to the memory of its task; what it costs the server that half of 10,000 waiters are
cancelled. Prints the measurements; exit code 1: a check failed. Takes about a minute.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import redis

import fastlock
import fastlock.asyncio
from fastlock._protocol.lease import now
from fastlock.embedded import Server

LEASE = 300  # seconds: no lease ends by itself
BYTES = 1024  # that a waiter may need beyond its task, with the compiled core
COMMANDS = 8  # of the server for a cancelled waiter, those within scripts included
TIMEOUT = 120.0  # seconds for anything to happen

Grant = tuple[float, int, bytes]  # time, the waiter's number in its process, its token


class Failure(AssertionError):
    """A check failed."""


def expect(truth: Any, message: str) -> None:
    if not truth:
        raise Failure(message)


def name_of(number: int, names: int) -> str:
    return f"scale:{number % names}"


async def joined(client: Any, count: int) -> None:
    """Wait until all of this client's waiters have begun to wait."""
    end = time.monotonic() + TIMEOUT
    while (waits := client.get_stats()["waits"]) < count:
        expect(time.monotonic() < end, f"{waits} of {count} wait")
        await asyncio.sleep(0.01)


@contextlib.contextmanager
def held(url: str, names: int) -> Iterator[Callable[[], None]]:
    """All names are held, until the yielded function releases them."""
    with fastlock.Client.from_url(url) as client:
        leases = client.acquire_many([name_of(number, names) for number in range(names)], timeout=LEASE)
        yield lambda: expect(all(client.release_many(leases)), "names are no longer held")


def nothing_left(probe: redis.Redis) -> None:
    left = list(probe.scan_iter(count=1000))
    expect(not left, f"{len(left)} keys are left: {left[:5]}")


# -------------------------------------------------------------------------------------------- the waiters that are
# served


def process(url: str, waiters: int, names: int, fair: bool, stream: Connection) -> None:
    """One child process: tells when all of its waiters wait, then what each got."""
    asyncio.run(_process(url, waiters, names, fair, stream))


async def _process(url: str, waiters: int, names: int, fair: bool, stream: Connection) -> None:
    grants: list[Grant] = []
    async with fastlock.asyncio.Client.from_url(url) as client:

        async def wait(number: int) -> None:
            async with client.lock(name_of(number, names), timeout=LEASE, fair=fair) as lease:
                grants.append((now(), number, lease.token))

        tasks = [asyncio.ensure_future(wait(number)) for number in range(waiters)]
        await joined(client, waiters)
        stream.send("all wait")
        await asyncio.gather(*tasks)
    stream.send(grants)


def receive(stream: Connection, what: str) -> Any:
    expect(stream.poll(TIMEOUT), f"a process does not tell {what}")
    return stream.recv()


def serve_all(server: Server, processes: int, waiters: int, names: int, *, fair: bool = False) -> float:
    """Have `waiters` waiters in each process acquire `names` names, and check that all are served. Returns the seconds
    it took."""
    context = multiprocessing.get_context("fork")
    ends: list[Connection] = []
    children = []
    with redis.Redis.from_url(server.unix_url) as probe, held(server.unix_url, names) as release:
        for _ in range(processes):
            ours, theirs = context.Pipe(duplex=False)
            ends.append(ours)
            children.append(context.Process(target=process, args=(server.unix_url, waiters, names, fair, theirs)))
            children[-1].start()
            theirs.close()
        try:
            for end in ends:
                receive(end, "that all wait")
            queues = _queues(probe, names, processes * (waiters if fair else min(waiters, names)))
            start = now()
            release()
            grants = [receive(end, "what it got") for end in ends]
            for child in children:
                child.join(TIMEOUT)
        finally:
            for child in children:
                child.kill()
        all_served(grants, waiters)
        if fair:
            in_order(grants, queues)
        nothing_left(probe)
    return max(when for each in grants for when, _, _ in each) - start


def _queues(probe: redis.Redis, names: int, entries_wanted: int) -> list[bytes]:
    """The entries of the server's queues, once there are so many."""
    end = time.monotonic() + TIMEOUT
    while True:
        queues = [probe.zrange(f"fastlock:queue:{{{name_of(each, names)}}}", 0, -1) for each in range(names)]
        entries = [entry for queue in queues for entry in queue]
        if len(entries) == entries_wanted:
            return entries
        expect(time.monotonic() < end, f"{len(entries)} entries are in the queues, not {entries_wanted}")
        time.sleep(0.05)


def all_served(grants: list[list[Grant]], waiters: int) -> None:
    for each in grants:
        expect(sorted(number for _, number, _ in each) == list(range(waiters)), f"{len(each)} of {waiters} were served")


def in_order(grants: list[list[Grant]], queue: list[bytes]) -> None:
    """Check the order over all processes: it is that of the queue, in which a waiter's entry becomes its token."""
    served = [token for _, _, token in sorted(grant for each in grants for grant in each)]
    wrong = [at for at, (token, entry) in enumerate(zip(served, queue, strict=True)) if not entry.endswith(token)]
    expect(not wrong, f"{len(wrong)} of {len(served)} were served out of order, the first as number {wrong[:1]}")


# ------------------------------------------------------------------------------------------------------------- memory


def resident() -> int:
    """Bytes of this process in memory."""
    gc.collect()
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(url: str, waiters: int, names: int, waits_for: str, stream: Connection) -> None:
    """Measure a task that waits for a `future`, a `lock` that it shares with others, or an `own` lock object."""
    stream.send(asyncio.run(_measure(url, waiters, names, waits_for)))


async def _measure(url: str, waiters: int, names: int, waits_for: str) -> float:
    with held(url, names) as release:
        async with fastlock.asyncio.Client.from_url(url) as client:
            await client.server_info()
            loop = asyncio.get_running_loop()
            futures: list[asyncio.Future[None]] = []
            locks = [client.lock(name_of(number, names), timeout=LEASE) for number in range(names)]

            async def wait(number: int) -> None:
                if waits_for == "future":
                    futures.append(loop.create_future())
                    await futures[-1]
                elif waits_for == "lock":
                    async with locks[number % names]:
                        pass
                else:
                    async with client.lock(name_of(number, names), timeout=LEASE):
                        pass

            before = resident()
            tasks = [asyncio.ensure_future(wait(number)) for number in range(waiters)]
            await asyncio.sleep(0)
            await joined(client, 0 if waits_for == "future" else waiters)
            grown = resident() - before
            release()
            for future in futures:
                future.set_result(None)
            await asyncio.gather(*tasks)
            return grown / waiters


def memory(server: Server, waiters: int, names: int) -> dict[str, float]:
    """Bytes per task, each kind measured in a fresh process."""
    found = {}
    for waits_for in ("future", "lock", "own"):
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe(duplex=False)
        child = context.Process(target=measure, args=(server.unix_url, waiters, names, waits_for, theirs))
        child.start()
        try:
            found[waits_for] = float(receive(ours, "its memory"))
            child.join(TIMEOUT)
        finally:
            child.kill()
    return found


# ------------------------------------------------------------------------------------------------------- cancelling


def cancelled(server: Server, waiters: int, *, fair: bool) -> tuple[float, float, float]:
    """Half of so many waiters are cancelled, the others are served. Returns the server's commands for each cancelled
    waiter, and the seconds of its scripts meanwhile: the 99th percentile, and the slowest."""
    with redis.Redis.from_url(server.unix_url) as probe, held(server.unix_url, 1) as release:
        found = asyncio.run(_cancelled(server, probe, waiters, fair, release))
        nothing_left(probe)
    return found


async def _cancelled(
    server: Server, probe: redis.Redis, waiters: int, fair: bool, release: Callable[[], None]
) -> tuple[float, float, float]:
    served: list[int] = []
    async with fastlock.asyncio.Client.from_url(server.unix_url) as client:

        async def wait(number: int) -> None:
            async with client.lock(name_of(0, 1), timeout=LEASE, fair=fair):
                served.append(number)

        tasks = [asyncio.ensure_future(wait(number)) for number in range(waiters)]
        await joined(client, waiters)
        await _wait_for_entries(probe, waiters if fair else 1)
        probe.config_set("slowlog-log-slower-than", 0)
        probe.config_set("slowlog-max-len", 20 * waiters)
        probe.slowlog_reset()
        before = probe.info("stats")["total_commands_processed"]
        for task in tasks[::2]:
            task.cancel()
        await asyncio.gather(*tasks[::2], return_exceptions=True)
        asked = await _wait_for_entries(probe, waiters // 2 if fair else 1)
        commands = probe.info("stats")["total_commands_processed"] - before - asked - 1
        times = sorted(each["duration"] / 1e6 for each in probe.slowlog_get(20 * waiters) if _is_script(each)) or [0.0]
        probe.config_set("slowlog-log-slower-than", -1)
        release()
        await asyncio.gather(*tasks[1::2])
    expect(served == list(range(1, waiters, 2)), f"{len(served)} of {waiters // 2} were served, or not in order")
    return commands / (waiters / 2), times[len(times) * 99 // 100], times[-1]


def _is_script(entry: dict[str, Any]) -> bool:
    return bytes(entry["command"]).upper().startswith(b"EVAL")


async def _wait_for_entries(probe: redis.Redis, entries_wanted: int) -> int:
    """Wait until the server's queue is so long; returns how often the server was asked."""
    end, asked = time.monotonic() + TIMEOUT, 1
    while (found := probe.zcard(f"fastlock:queue:{{{name_of(0, 1)}}}")) != entries_wanted:
        expect(time.monotonic() < end, f"{found} entries are in the queue, not {entries_wanted}")
        await asyncio.sleep(0.01)
        asked += 1
    return asked


# -------------------------------------------------------------------------------------------------------- the program


def start(kind: str) -> Server:
    """A server of that kind; support/ is on the path of pytest, but not of `python -m tests.scale`."""
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    from support.servers import Servers

    return Servers().start(kind)


def serve(server: Server, part: int) -> None:
    many, names = 10_000 // part, 1000 // part
    for fair in (False, True):
        seconds = serve_all(server, 4, many // 4, 1, fair=fair)
        order = "in strict order" if fair else "in any order"
        print(f"{many} waiters of 4 processes on one name, {order}: all served in {seconds:.2f} s", flush=True)
    seconds = serve_all(server, 1, 10 * many, names)
    print(f"{10 * many} tasks on {names} names: all served in {seconds:.2f} s", flush=True)


def cancel(server: Server, part: int) -> None:
    many = 10_000 // part
    for fair in (False, True):
        each, most, slowest = cancelled(server, many, fair=fair)
        print(f"{many // 2} of {many} cancelled, fair={fair}: {each:.2f} commands each, ", end="")
        print(f"99 % of scripts within {most * 1e6:.0f} us, the slowest {slowest * 1e6:.0f} us", flush=True)
        expect(each <= COMMANDS, "cancelling costs the server too much")


def weigh(server: Server, part: int) -> None:
    found = memory(server, 20_000 // part, 200 // part)
    beyond = {waits_for: size - found["future"] for waits_for, size in found.items()}
    print(f"a task that waits for a future: {found['future']:.0f} bytes; a waiter, beyond that: {beyond['lock']:.0f},")
    print(f"with a lock object of its own: {beyond['own']:.0f}", flush=True)
    expect(beyond["lock"] <= BYTES or fastlock.IMPLEMENTATION != "cython", f"a waiter needs more than {BYTES} bytes")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.scale", description=__doc__.splitlines()[0])
    parser.add_argument("--impl", choices=("cython", "python"), default="cython")
    parser.add_argument("--server", choices=("valkey", "redis", "floor"), default="valkey")
    parser.add_argument("--part", type=int, default=1, help="divide the number of waiters by this")
    args = parser.parse_args()
    if args.impl != fastlock.IMPLEMENTATION:  # it is chosen when fastlock is imported, so start again
        os.environ["FASTLOCK_IMPL"] = args.impl
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    print(f"{fastlock.IMPLEMENTATION} {args.server}", flush=True)
    with start(args.server) as server:
        serve(server, args.part)
        cancel(server, args.part)
        weigh(server, args.part)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Failure as failure:
        print(f"WRONG: {failure}")
        sys.exit(1)
