"""Many owners: one holder at a time whoever comes, goes or gives up, and nobody frees what another has acquired.

Whether two hold at once is judged by the server: each holder raises a counter there and lowers it before it lets go.
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
from support.faces import Face

import fastlock
from fastlock._protocol import commands
from fastlock._protocol.commands import token_matches
from fastlock.embedded import Server

pytestmark = pytest.mark.usefixtures("no_leaks")
ROOT = Path(fastlock.__file__).parent.parent


class Signal:
    """An event for both faces: set by one owner, awaited by another."""

    def __init__(self, face: Face) -> None:
        self._event: Any = asyncio.Event() if face.is_async else threading.Event()
        self._is_async = face.is_async
        self.set = self._event.set

    async def wait(self) -> None:
        if self._is_async:
            await asyncio.wait_for(self._event.wait(), 20)
        else:
            assert self._event.wait(20)


class Judge:
    """Counts the holders, and a sum that only an unbroken read and write keeps right, on the server."""

    def __init__(self, face: Face, server: Server) -> None:
        self._face = face
        kind = redis.asyncio.Redis if face.is_async else redis.Redis
        self._raw = kind(unix_socket_path=server.path, client_name="test-probe")
        self.overlaps = 0

    async def enter(self) -> None:
        """By a holder: count it in, and add one to the sum in two steps."""
        self.overlaps += await self._face.get(self._raw.incr("judge:inside")) != 1
        total = int(await self._face.get(self._raw.get("judge:sum")) or 0)
        await self._face.get(self._raw.set("judge:sum", total + 1))

    async def leave(self) -> None:
        """By a holder, before it lets go."""
        self.overlaps += await self._face.get(self._raw.decr("judge:inside")) != 0

    async def verdict(self) -> int:
        """The sum, once all are done. AssertionError when there ever were two holders."""
        total = int(await self._face.get(self._raw.getdel("judge:sum")))
        inside = int(await self._face.get(self._raw.getdel("judge:inside")))
        await self._face.get(getattr(self._raw, "aclose", self._raw.close)())
        assert self.overlaps == 0 and inside == 0
        return total


# ------------------------------------------------------------------------------------------- one Lock, many owners


@pytest.mark.parametrize("loss", ["deleted", "expired"])
async def test_a_holder_whose_lease_is_over_never_frees_the_next_one(
    face: Face, server: Server, probe: redis.Redis, loss: str
) -> None:
    lock = face.client(server.unix_url).lock("a", timeout=30)
    acquired, taken = Signal(face), Signal(face)

    async def first() -> str:
        assert await face.get(lock.acquire())
        acquired.set()
        await taken.wait()
        assert await face.get(lock.owned()) is False
        for call in (lambda: lock.extend(500), lock.reacquire, lock.release):
            with pytest.raises(fastlock.LockNotOwnedError):
                await face.get(call())
        return "done"

    job = face.start(first)
    await acquired.wait()
    assert lock.lease is None, "each owner has a lease of its own"
    if loss == "deleted":
        probe.delete("a")
    else:
        probe.pexpire("a", 1)
    assert await face.get(lock.acquire(sleep=0.001))
    token = probe.get("a")
    taken.set()
    assert await job.get() == "done"
    assert probe.get("a") == token == lock.lease.token and 0 < probe.pttl("a") <= 30_000
    assert await face.get(lock.owned())
    await face.get(lock.release())


async def test_many_owners_of_one_lock_with_leases_that_end_under_them(
    face: Face, server: Server, probe: redis.Redis
) -> None:
    """A holder that was robbed is told; a holder that was not is never robbed by the others' releases."""
    lock = face.client(server.unix_url).lock("a", timeout=30, fair=True)  # else it passes on without asking the server
    told: list[str] = []

    async def worker(number: int) -> None:
        chance = random.Random(number)
        for _ in range(15):
            assert await face.get(lock.acquire())
            token = lock.lease.token
            robbed = chance.random() < 0.4
            if robbed:
                assert token_matches(probe.execute_command("GETDEL", "a"), token)
            await face.checkpoint()
            assert robbed or (token_matches(probe.get("a"), token) and await face.get(lock.owned()))
            if robbed:
                with pytest.raises(fastlock.LockNotOwnedError):
                    await face.get(lock.release())
            else:
                await face.get(lock.release())
            told.append("robbed" if robbed else "released")

    assert await face.together([lambda n=n: worker(n) for n in range(8)]) == [None] * 8
    assert len(told) == 120 and {"robbed", "released"} == set(told)


async def test_what_one_owner_holds_the_others_can_neither_see_nor_free(
    face: Face, server: Server, probe: redis.Redis
) -> None:
    lock = face.client(server.unix_url).lock("a")
    await face.get(lock.acquire())

    async def other() -> None:
        assert lock.lease is None and await face.get(lock.locked()) and not await face.get(lock.owned())
        assert await face.get(lock.acquire(blocking=False)) is False
        for call in (lock.release, lock.reacquire, lambda: lock.extend(5)):
            with pytest.raises(fastlock.LockError, match="thread_local=False") as caught:
                await face.get(call())
            assert not isinstance(caught.value, fastlock.LockNotOwnedError)

    await face.start(other).get()
    assert probe.get("a") == lock.lease.token
    await face.get(lock.release())


async def test_without_thread_local_one_owner_lets_go_of_what_another_acquired(face: Face, server: Server) -> None:
    lock = face.client(server.unix_url).lock("a", thread_local=False)
    await face.start(lock.acquire).get()
    assert lock.lease is not None and await face.get(lock.owned())
    assert await face.get(lock.extend(5)) is True
    await face.start(lock.release).get()
    assert lock.lease is None
    with pytest.raises(fastlock.LockError):
        await face.get(lock.release())


def test_a_new_thread_never_inherits_the_lease_of_one_that_ended(impl: str, server: Server, probe: redis.Redis) -> None:
    """Systems give the number of an ended thread to one of the next. Those stay, or the second would have that of the
    first of them for ever."""
    with fastlock.Client.from_url(server.unix_url) as client:
        lock, numbers, seen = client.lock("a"), [], []
        looked, enough = threading.Semaphore(0), threading.Event()

        def acquire() -> None:
            numbers.append(threading.get_ident())
            assert lock.acquire(blocking=False)

        def look() -> None:
            numbers.append(threading.get_ident())
            seen.append((lock.lease, lock.owned()))
            with pytest.raises(fastlock.LockError):
                lock.release()
            seen.append("refused")
            looked.release()
            enough.wait()

        first = threading.Thread(target=acquire)
        first.start()
        first.join()
        others = [threading.Thread(target=look, daemon=True) for _ in range(100)]
        try:
            for thread in others:
                thread.start()
                assert looked.acquire(timeout=10)
                if numbers[0] in numbers[1:]:
                    break
            else:
                pytest.fail("this test needs a system that gives numbers again")
        finally:
            enough.set()
        for thread in others[: len(numbers) - 1]:
            thread.join()
        assert seen == [(None, False), "refused"] * (len(numbers) - 1) and probe.exists("a")
        probe.delete("a")


async def test_a_task_made_for_the_acquire_alone_leaves_its_lease_to_who_waited_for_it(
    face: Face, server: Server
) -> None:
    """`asyncio.wait_for` makes one before Python 3.12."""
    if not face.is_async:
        return
    lock = face.client(server.unix_url).lock("a")
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


async def test_what_the_owner_calls_is_the_owners_whoever_awaits_it(
    face: Face, server: Server, probe: redis.Redis
) -> None:
    """`shield`, `gather`, `create_task` and, before Python 3.12, `wait_for` await in tasks of their own."""
    if not face.is_async:
        return
    client = face.client(server.unix_url)
    for await_ in (asyncio.shield, asyncio.gather, asyncio.create_task, lambda call: asyncio.wait_for(call, 20)):
        lock = client.lock("a", timeout=60)
        assert await lock.acquire()
        assert await await_(lock.owned()) in (True, [True])
        assert await await_(lock.extend(60)) in (True, [True]) and probe.pttl("a") > 60_000
        assert await await_(lock.reacquire()) in (True, [True]) and probe.pttl("a") <= 60_000
        assert lock.lease.valid and await lock.owned(), "it is the caller's still"
        await await_(lock.release())
        assert lock.lease is None and not probe.exists("a")
        for verb in (lock.release, lock.reacquire, lambda lock=lock: lock.extend(5)):
            with pytest.raises(fastlock.LockError):
                await await_(verb())
        assert await await_(lock.owned()) in (False, [False])


# ------------------------------------------------------------------------------------------------ mutual exclusion


async def test_never_two_holders(face: Face, server: Server) -> None:
    client, judge = face.client(server.unix_url), Judge(face, server)

    async def worker() -> None:
        lock = client.lock("a", sleep=0.001)
        for _ in range(15):
            assert await face.get(lock.acquire())
            await judge.enter()
            await judge.leave()
            await face.get(lock.release())

    assert await face.together([worker] * 10) == [None] * 10
    assert await judge.verdict() == 150


async def test_never_two_holders_though_some_give_up(face: Face, server: Server, probe: redis.Redis) -> None:
    """Waiters run out of time after nothing, a little, or while the lock is on its way to them; tasks are cancelled."""
    client, judge = face.client(server.unix_url), Judge(face, server)
    entered: list[int] = []

    async def worker(number: int) -> None:
        chance = random.Random(number)
        for _ in range(25):
            lock = client.lock("a", sleep=0.001, thread_local=chance.random() < 0.5)
            limit = chance.choice([None, 0, 1e-6, 1e-4, 3e-4, 1e-3, 1e-2])
            if await face.get(lock.acquire(blocking_timeout=limit)):
                await judge.enter()
                entered.append(number)
                await judge.leave()
                await face.get(lock.release())

    async def canceller() -> None:
        chance = random.Random(99)
        for _ in range(60):
            task = asyncio.ensure_future(client.lock("a", sleep=0.001).acquire())
            for _ in range(chance.randrange(6)):
                await asyncio.sleep(0)
            task.cancel()
            if not isinstance((await asyncio.gather(task, return_exceptions=True))[0], BaseException):
                probe.delete("a")  # it was faster than the cancel: it holds, and nobody else does

    calls: list[Any] = [lambda n=n: worker(n) for n in range(8)]
    results = await face.together(calls + [canceller] * face.is_async)
    assert results == [None] * len(results)
    assert await judge.verdict() == len(entered) > 8
    assert await face.get(client.lock("a").acquire(blocking_timeout=5)), "a lock was left to nobody"
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
def test_who_gives_up_what_it_was_granted_gives_it_to_the_next(server: Server, probe: redis.Redis, again: bool) -> None:
    """By an undo, which may come before what it says to the queue: nobody has marked a token that was just granted."""
    holder, first, second = (b"fl:" + letter * 32 for letter in (b"a", b"b", b"c"))
    channel = b"fastlock:" + b"d" * 32
    for script in commands.SCRIPTS:
        probe.execute_command(*script.load)
    with probe.pubsub() as messages:
        messages.subscribe(channel)
        assert messages.get_message(timeout=10) is not None, "both can be told"
        probe.set("sku", holder)
        for entry in (first, second):
            probe.execute_command(*commands.enter(b"sku", channel, False, entry, b"10000"))
        assert probe.execute_command(*commands.hand_over(b"sku", holder)) == 1
        assert probe.get("sku") == first, "for a moment"
        for call in commands.undo_commands([b"sku"], [first], frozenset(), again):
            probe.execute_command(*call)
        assert probe.get("sku") == second
        probe.execute_command(*commands.leave(b"sku", second, channel))


def test_never_two_holders_over_processes(impl: str, server: Server, probe: redis.Redis) -> None:
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


# ----------------------------------------------------------------------------------- few connections, many owners


@pytest.mark.parametrize("limit", [1, 2, 16])
async def test_every_reply_reaches_its_caller(face: Face, server: Server, limit: int) -> None:
    """Many owners on few connections: a reply that shifts by one place shows as a wrong token, owner or answer."""
    client = face.client(server.unix_url, max_connections=limit)
    rounds, owners = (40, 16) if server.kind == "redis" else (80, 16)

    async def owner(number: int) -> int:
        chance = random.Random(number)
        mine, other = client.lock(f"mine:{number}"), client.lock(f"mine:{(number + 1) % owners}")
        checked = 0
        for turn in range(rounds):
            token = f"{number}/{turn}".ljust(chance.choice([8, 40, 3000]), ".")
            assert await face.get(mine.acquire(blocking=False, token=token)) is True
            for _ in range(chance.randrange(1, 5)):
                question = chance.randrange(4)
                if question == 0:
                    assert await face.get(mine.owned()) is True
                elif question == 1:
                    assert await face.get(mine.locked()) is True
                elif question == 2:
                    assert await face.get(other.owned()) is False
                else:
                    assert await face.get(mine.extend(5)) is True
                checked += 1
            assert mine.lease.token == token.encode() and mine.lease.name == f"mine:{number}"
            await face.get(mine.release())
            assert await face.get(mine.locked()) is False
            checked += 3
        return checked

    results = await face.together([lambda n=n: owner(n) for n in range(owners)])
    assert all(type(result) is int for result in results), results
    assert sum(results) > rounds * owners * 4


async def test_no_waiter_is_lost_when_all_share_one_connection(face: Face, server: Server) -> None:
    client, judge = face.client(server.unix_url, max_connections=1), Judge(face, server)

    async def worker(number: int) -> None:
        lock = client.lock("a", sleep=0.001)
        for _ in range(6):
            assert await face.get(lock.acquire())
            await judge.enter()
            assert await face.get(client.lock(f"b{number}").locked()) is False
            await judge.leave()
            await face.get(lock.release())

    assert await face.together([lambda n=n: worker(n) for n in range(16)]) == [None] * 16
    assert await judge.verdict() == 96


async def test_waiters_that_sleep_long_leave_the_connection_to_the_others(face: Face, server: Server) -> None:
    client = face.client(server.unix_url, max_connections=1)
    holder = face.client(server.unix_url).lock("a")
    await face.get(holder.acquire())
    jobs = [face.start(lambda: client.lock("a", sleep=0.02).acquire(blocking_timeout=0.1)) for _ in range(4)]
    for number in range(50):
        lock = client.lock(f"b{number}")
        assert await face.get(lock.acquire(blocking=False))
        await face.get(lock.release())
    assert [await job.get() for job in jobs] == [False] * 4
    await face.get(holder.release())


async def test_leases_of_owners_that_are_gone_do_not_pile_up(face: Face, server: Server, probe: redis.Redis) -> None:
    """A lock kept for the life of a service, used by short-lived owners who lose their lease."""
    lock = face.client(server.unix_url).lock("a", timeout=0.002)
    for _ in range(300):
        await face.start(lambda: lock.acquire(blocking=False)).get()
        probe.delete("a")
    kept = [getattr(lock, name, None) for name in dir(lock)]  # what is declared in Cython is in no __dict__
    assert lock._leases and max(len(each) for each in kept if hasattr(each, "keys")) <= 100


@pytest.mark.parametrize("server", ["valkey"], indirect=True)
def test_threads_that_come_and_go_never_lose_each_others_leases(
    impl: str, server: Server, probe: redis.Redis, request: pytest.FixtureRequest
) -> None:
    """One lock object keeps the leases of all its threads; here they are put down and taken away all the time."""
    interval = sys.getswitchinterval()
    request.addfinalizer(lambda: sys.setswitchinterval(interval))
    with fastlock.Client.from_url(server.unix_url) as client:
        lock = client.lock("a", timeout=30, fair=True)  # else it passes on without asking the server
        problems: list[BaseException] = []

        def acquire_and_end() -> None:
            assert lock.acquire(blocking=False)
            probe.delete("a")

        def work() -> None:
            try:
                for turn in range(250):
                    assert lock.acquire(blocking_timeout=20)
                    if turn % 3:
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
