"""Many owners: one holder at a time whoever comes, goes or gives up, and no owner releases the lease of another.

The server judges whether two hold at once: each holder raises a counter there, and lowers it before its release.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio
from support.apis import Api

import fastlock
from fastlock._protocol import commands
from fastlock._protocol.commands import token_matches
from fastlock.embedded import Server

pytestmark = pytest.mark.usefixtures("no_leaks")
ROOT = Path(fastlock.__file__).parent.parent


class Signal:
    """An event for threads and for asyncio: set by one owner, awaited by another."""

    def __init__(self, api: Api) -> None:
        self._event: Any = asyncio.Event() if api.is_async else threading.Event()
        self._is_async = api.is_async
        self.set = self._event.set

    async def wait(self) -> None:
        if self._is_async:
            await asyncio.wait_for(self._event.wait(), 20)
        else:
            assert self._event.wait(20)


class Judge:
    """Counts holders on the server, and keeps a sum there that is right only if no two holders overlap."""

    def __init__(self, api: Api, server: Server) -> None:
        self._api = api
        kind = redis.asyncio.Redis if api.is_async else redis.Redis
        self._raw = kind(unix_socket_path=server.path, client_name="test-probe")
        self.overlaps = 0

    async def enter(self) -> None:
        """Called by a holder: count it in, and add one to the sum in two steps."""
        self.overlaps += await self._api.get(self._raw.incr("judge:inside")) != 1
        total = int(await self._api.get(self._raw.get("judge:sum")) or 0)
        await self._api.get(self._raw.set("judge:sum", total + 1))

    async def leave(self) -> None:
        """Called by a holder before its release."""
        self.overlaps += await self._api.get(self._raw.decr("judge:inside")) != 0

    async def verdict(self) -> int:
        """The sum, once all are done. AssertionError when there ever were two holders."""
        total = int(await self._api.get(self._raw.getdel("judge:sum")))
        inside = int(await self._api.get(self._raw.getdel("judge:inside")))
        await self._api.get(getattr(self._raw, "aclose", self._raw.close)())
        assert self.overlaps == 0 and inside == 0
        return total


# ------------------------------------------------------------------------------------------------ one Lock, many owners


@pytest.mark.parametrize("loss", ["deleted", "expired"])
async def test_holder_whose_lease_has_ended_never_releases_the_next_one(
    api: Api, server: Server, probe: redis.Redis, loss: str
) -> None:
    lock = api.client(server.unix_url).lock("a", timeout=30)
    acquired, taken = Signal(api), Signal(api)

    async def first() -> str:
        assert await api.get(lock.acquire())
        acquired.set()
        await taken.wait()
        assert await api.get(lock.owned()) is False
        for call in (lambda: lock.extend(500), lock.reacquire, lock.release):
            with pytest.raises(fastlock.LockNotOwnedError):
                await api.get(call())
        return "done"

    job = api.start(first)
    await acquired.wait()
    assert lock.lease is None, "each owner has to have a lease of its own"
    if loss == "deleted":
        probe.delete("a")
    else:
        probe.pexpire("a", 1)
    assert await api.get(lock.acquire(sleep=0.001))
    token = probe.get("a")
    taken.set()
    assert await job.get() == "done"
    assert probe.get("a") == token == lock.lease.token and 0 < probe.pttl("a") <= 30_000
    assert await api.get(lock.owned())
    await api.get(lock.release())


async def test_many_owners_of_one_lock_that_lose_leases(api: Api, server: Server, probe: redis.Redis) -> None:
    """A holder whose key was deleted gets an error; the others' releases never delete the key of a holder."""
    lock = api.client(server.unix_url).lock(
        "a", timeout=30, fair=True
    )  # otherwise it is handed over without the server
    outcomes: list[str] = []

    async def worker(number: int) -> None:
        chance = random.Random(number)
        for _ in range(15):
            assert await api.get(lock.acquire())
            token = lock.lease.token
            lost = chance.random() < 0.4
            if lost:
                assert token_matches(probe.execute_command("GETDEL", "a"), token)
            await api.checkpoint()
            assert lost or (token_matches(probe.get("a"), token) and await api.get(lock.owned()))
            if lost:
                with pytest.raises(fastlock.LockNotOwnedError):
                    await api.get(lock.release())
            else:
                await api.get(lock.release())
            outcomes.append("lost" if lost else "released")

    assert await api.together([lambda n=n: worker(n) for n in range(8)]) == [None] * 8
    assert len(outcomes) == 120 and {"lost", "released"} == set(outcomes)


async def test_lease_of_one_owner_is_neither_seen_nor_released_by_others(
    api: Api, server: Server, probe: redis.Redis
) -> None:
    lock = api.client(server.unix_url).lock("a")
    await api.get(lock.acquire())

    async def other() -> None:
        assert lock.lease is None and await api.get(lock.locked()) and not await api.get(lock.owned())
        assert await api.get(lock.acquire(blocking=False)) is False
        for call in (lock.release, lock.reacquire, lambda: lock.extend(5)):
            with pytest.raises(fastlock.LockError, match="thread_local=False") as caught:
                await api.get(call())
            assert not isinstance(caught.value, fastlock.LockNotOwnedError)

    await api.start(other).get()
    assert probe.get("a") == lock.lease.token
    await api.get(lock.release())


async def test_without_thread_local_another_owner_may_release(api: Api, server: Server) -> None:
    lock = api.client(server.unix_url).lock("a", thread_local=False)
    await api.start(lock.acquire).get()
    assert lock.lease is not None and await api.get(lock.owned())
    assert await api.get(lock.extend(5)) is True
    await api.start(lock.release).get()
    assert lock.lease is None
    with pytest.raises(fastlock.LockError):
        await api.get(lock.release())


def test_new_thread_never_inherits_the_lease_of_an_ended_one(impl: str, server: Server, probe: redis.Redis) -> None:
    """Systems reuse the identifier of an ended thread. The new threads stay alive, or the second of them could always
    get the identifier of the first."""
    with fastlock.Client.from_url(server.unix_url) as client:
        lock, numbers, seen = client.lock("a"), [], []
        checked, enough = threading.Semaphore(0), threading.Event()

        def acquire() -> None:
            numbers.append(threading.get_ident())
            assert lock.acquire(blocking=False)

        def check() -> None:
            numbers.append(threading.get_ident())
            seen.append((lock.lease, lock.owned()))
            with pytest.raises(fastlock.LockError):
                lock.release()
            seen.append("refused")
            checked.release()
            enough.wait()

        first = threading.Thread(target=acquire)
        first.start()
        first.join()
        others = [threading.Thread(target=check, daemon=True) for _ in range(100)]
        try:
            for thread in others:
                thread.start()
                assert checked.acquire(timeout=10)
                if numbers[0] in numbers[1:]:
                    break
            else:
                pytest.fail("this test needs a system that reuses thread identifiers")
        finally:
            enough.set()
        for thread in others[: len(numbers) - 1]:
            thread.join()
        assert seen == [(None, False), "refused"] * (len(numbers) - 1) and probe.exists("a")
        probe.delete("a")


async def test_task_made_for_an_acquire_leaves_the_lease_to_its_awaiter(api: Api, server: Server) -> None:
    """`asyncio.wait_for` makes such a task before Python 3.12."""
    if not api.is_async:
        return
    lock = api.client(server.unix_url).lock("a")
    for acquire in (
        lambda: asyncio.wait_for(lock.acquire(), 5),
        lambda: asyncio.create_task(lock.acquire()),
        lambda: asyncio.gather(lock.acquire()),
    ):
        await acquire()
        assert lock.lease is not None and lock.lease.valid and await lock.owned()
        await lock.release()
        with pytest.raises(fastlock.LockError):
            await lock.release()


async def test_call_belongs_to_the_owner_whichever_task_awaits_it(api: Api, server: Server, probe: redis.Redis) -> None:
    """`shield`, `gather`, `create_task` and, before Python 3.12, `wait_for` await in tasks of their own."""
    if not api.is_async:
        return
    client = api.client(server.unix_url)
    for await_ in (asyncio.shield, asyncio.gather, asyncio.create_task, lambda call: asyncio.wait_for(call, 20)):
        lock = client.lock("a", timeout=60)
        assert await lock.acquire()
        assert await await_(lock.owned()) in (True, [True])
        assert await await_(lock.extend(60)) in (True, [True]) and probe.pttl("a") > 60_000
        assert await await_(lock.reacquire()) in (True, [True]) and probe.pttl("a") <= 60_000
        assert lock.lease.valid and await lock.owned(), "the lease is no longer the caller's"
        await await_(lock.release())
        assert lock.lease is None and not probe.exists("a")
        for call in (lock.release, lock.reacquire, lambda lock=lock: lock.extend(5)):
            with pytest.raises(fastlock.LockError):
                await await_(call())
        assert await await_(lock.owned()) in (False, [False])


# ----------------------------------------------------------------------------------------------------- mutual exclusion


async def test_never_two_holders(api: Api, server: Server) -> None:
    client, judge = api.client(server.unix_url), Judge(api, server)

    async def worker() -> None:
        lock = client.lock("a", sleep=0.001)
        for _ in range(15):
            assert await api.get(lock.acquire())
            await judge.enter()
            await judge.leave()
            await api.get(lock.release())

    assert await api.together([worker] * 10) == [None] * 10
    assert await judge.verdict() == 150


async def test_never_two_holders_though_some_give_up(api: Api, server: Server, probe: redis.Redis) -> None:
    """Waiters time out at once, soon, or while the grant is on its way to them; tasks are cancelled."""
    client, judge = api.client(server.unix_url), Judge(api, server)
    entered: list[int] = []

    async def worker(number: int) -> None:
        chance = random.Random(number)
        for _ in range(25):
            lock = client.lock("a", sleep=0.001, thread_local=chance.random() < 0.5)
            limit = chance.choice([None, 0, 1e-6, 1e-4, 3e-4, 1e-3, 1e-2])
            if await api.get(lock.acquire(blocking_timeout=limit)):
                await judge.enter()
                entered.append(number)
                await judge.leave()
                await api.get(lock.release())

    async def canceller() -> None:
        chance = random.Random(99)
        for _ in range(60):
            task = asyncio.ensure_future(client.lock("a", sleep=0.001).acquire())
            for _ in range(chance.randrange(6)):
                await asyncio.sleep(0)
            task.cancel()
            if not isinstance((await asyncio.gather(task, return_exceptions=True))[0], BaseException):
                probe.delete("a")  # the acquire was faster than the cancel: this task alone holds the lock

    calls: list[Any] = [lambda n=n: worker(n) for n in range(8)]
    results = await api.together(calls + [canceller] * api.is_async)
    assert results == [None] * len(results)
    assert await judge.verdict() == len(entered) > 8
    assert await api.get(client.lock("a").acquire(blocking_timeout=5)), "the lock is held by a caller that is gone"
    probe.delete("a")


WORKER = """
import json, sys, threading
import redis, fastlock
url, path, impl, seed = sys.argv[1:]
assert fastlock.IMPLEMENTATION == impl
client = fastlock.Client.from_url(url)
raw = redis.Redis(unix_socket_path=path)
overlaps, lock = [], client.lock("a", sleep=0.001)
def work():
    for _ in range(15):
        with lock:
            overlaps.append(raw.incr("inside"))
            total = int(raw.get("sum") or 0)
            raw.set("sum", total + 1)
            raw.decr("inside")
threads = [threading.Thread(target=work) for _ in range(4)]
print("ready", flush=True)
sys.stdin.readline()
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(json.dumps(overlaps))
client.close()
"""


@pytest.mark.parametrize("again", [False, True])
def test_undo_of_a_grant_hands_the_lock_to_the_next_waiter(server: Server, probe: redis.Redis, again: bool) -> None:
    """The undo may come before the waiter leaves the queue."""
    holder, first, second = (b"fl:" + letter * 32 for letter in (b"a", b"b", b"c"))
    channel = b"fastlock:" + b"d" * 32
    address = commands.address(channel, 0.25)
    for script in commands.SCRIPTS:
        probe.execute_command(*script.load)
    with probe.pubsub() as messages:
        messages.subscribe(channel)
        assert messages.get_message(timeout=10) is not None, "the channel of both waiters needs a subscriber"
        probe.set("sku", holder)
        for entry in (first, second):
            probe.execute_command(*commands.enter(b"sku", address, False, True, entry, b"10000"))
        assert probe.execute_command(*commands.hand_over(b"sku", holder)) == 1
        assert commands.token_matches(probe.get("sku"), first), "the first holds until its undo"
        for call in commands.undo_commands([b"sku"], [first], frozenset(), again):
            probe.execute_command(*call)
        assert probe.get("sku") == second
        probe.execute_command(*commands.leave(b"sku", address + second))


def test_never_two_holders_across_processes(impl: str, server: Server, probe: redis.Redis) -> None:
    command = [sys.executable, "-c", WORKER, server.unix_url, server.path, impl]
    streams: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    processes = [subprocess.Popen([*command, str(number)], **streams) for number in range(2)]
    try:
        for process in processes:
            assert process.stdout.readline() == "ready\n"
        outputs = []
        for process in processes:
            process.stdin.write("\n")
            process.stdin.flush()
        for process in processes:
            outputs.append(json.loads(process.communicate(timeout=30)[0]))
            assert process.returncode == 0
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert outputs == [[1] * 60] * 2 and int(probe.getdel("sum")) == 120 and int(probe.getdel("inside")) == 0


# ----------------------------------------------------------------------------------------- few connections, many owners


@pytest.mark.parametrize("limit", [1, 2, 16])
async def test_every_reply_reaches_its_caller(api: Api, server: Server, limit: int) -> None:
    """Many owners on few connections: a reply that is off by one shows as a wrong token, owner or result."""
    client = api.client(server.unix_url, max_connections=limit)
    repeats, owners = (40, 16) if server.kind == "redis" else (80, 16)

    async def owner(number: int) -> int:
        chance = random.Random(number)
        mine, other = client.lock(f"mine:{number}"), client.lock(f"mine:{(number + 1) % owners}")
        checked = 0
        for repeat in range(repeats):
            token = f"{number}/{repeat}".ljust(chance.choice([8, 40, 3000]), ".")
            assert await api.get(mine.acquire(blocking=False, token=token)) is True
            for _ in range(chance.randrange(1, 5)):
                kind = chance.randrange(4)
                if kind == 0:
                    assert await api.get(mine.owned()) is True
                elif kind == 1:
                    assert await api.get(mine.locked()) is True
                elif kind == 2:
                    assert await api.get(other.owned()) is False
                else:
                    assert await api.get(mine.extend(5)) is True
                checked += 1
            assert mine.lease.token == token.encode() and mine.lease.name == f"mine:{number}"
            await api.get(mine.release())
            assert await api.get(mine.locked()) is False
            checked += 3
        return checked

    results = await api.together([lambda n=n: owner(n) for n in range(owners)])
    assert all(type(result) is int for result in results), results
    assert sum(results) > repeats * owners * 4


async def test_no_waiter_is_lost_on_one_shared_connection(api: Api, server: Server) -> None:
    client, judge = api.client(server.unix_url, max_connections=1), Judge(api, server)

    async def worker(number: int) -> None:
        lock = client.lock("a", sleep=0.001)
        for _ in range(6):
            assert await api.get(lock.acquire())
            await judge.enter()
            assert await api.get(client.lock(f"b{number}").locked()) is False
            await judge.leave()
            await api.get(lock.release())

    assert await api.together([lambda n=n: worker(n) for n in range(16)]) == [None] * 16
    assert await judge.verdict() == 96


async def test_waiters_leave_the_connection_to_others(api: Api, server: Server) -> None:
    client = api.client(server.unix_url, max_connections=1)
    holder = api.client(server.unix_url).lock("a")
    await api.get(holder.acquire())
    jobs = [api.start(lambda: client.lock("a", sleep=0.02).acquire(blocking_timeout=0.1)) for _ in range(4)]
    for number in range(50):
        lock = client.lock(f"b{number}")
        assert await api.get(lock.acquire(blocking=False))
        await api.get(lock.release())
    assert [await job.get() for job in jobs] == [False] * 4
    await api.get(holder.release())


async def test_leases_of_ended_owners_do_not_pile_up(api: Api, server: Server, probe: redis.Redis) -> None:
    """A lock that lives as long as a service is used by short-lived owners, which lose their leases."""
    lock = api.client(server.unix_url).lock("a", timeout=0.002)
    for _ in range(300):
        await api.start(lambda: lock.acquire(blocking=False)).get()
        probe.delete("a")
    kept = [getattr(lock, name, None) for name in dir(lock)]  # attributes declared in Cython are in no __dict__
    assert lock._leases and max(len(each) for each in kept if hasattr(each, "keys")) <= 100


@pytest.mark.parametrize("server", ["valkey"], indirect=True)
def test_short_lived_threads_keep_the_leases_of_others_intact(
    impl: str, server: Server, probe: redis.Redis, request: pytest.FixtureRequest
) -> None:
    """One lock object stores the leases of all its threads; here leases are added and removed all the time."""
    interval = sys.getswitchinterval()
    request.addfinalizer(lambda: sys.setswitchinterval(interval))
    with fastlock.Client.from_url(server.unix_url) as client:
        lock = client.lock("a", timeout=30, fair=True)  # otherwise it is handed over without the server
        problems: list[BaseException] = []

        def acquire_and_end() -> None:
            assert lock.acquire(blocking=False)
            probe.delete("a")

        def work() -> None:
            try:
                for repeat in range(250):
                    assert lock.acquire(blocking_timeout=20)
                    if repeat % 3:
                        lock.release()
                    else:
                        assert token_matches(probe.execute_command("GETDEL", "a"), lock.lease.token)
                        with pytest.raises(fastlock.LockNotOwnedError):
                            lock.release()
            except BaseException as error:
                problems.append(error)

        for _ in range(50):
            thread = threading.Thread(target=acquire_and_end)
            thread.start()
            thread.join()
        sys.setswitchinterval(1e-6)
        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not problems


@pytest.mark.parametrize("api", ["asyncio"], indirect=True)
@pytest.mark.parametrize("iterations", [0, 1, 2])
async def test_a_lease_whose_release_was_cancelled_is_not_valid(api: Api, server: Server, iterations: int) -> None:
    """The release is carried out all the same, so that somebody else may hold the name."""
    client = api.client(server.unix_url)
    leases: list[fastlock.Lease] = []

    async def hold() -> None:
        async with client.lock("a", timeout=30) as lease:
            leases.append(lease)

    task = asyncio.create_task(hold())
    while not leases:
        await asyncio.sleep(0)
    for _ in range(iterations):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    async with client.lock("a", timeout=30, blocking_timeout=10) as other:
        assert not leases[0].valid and leases[0].remaining == 0.0 and other.valid
