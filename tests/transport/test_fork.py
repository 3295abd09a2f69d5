"""A forked child owns nothing of its parent's: not its leases, not its connections; and the parent notices nothing. The
fork may be Python's, which calls hooks, or that of C code, which Python does not notice.

The connections of the parent go through a proxy, which sees every byte and every end. Children do their work, report
through a pipe as JSON and exit by os._exit, so that nothing of pytest runs twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import mmap
import multiprocessing
import os
import select
import signal
import struct
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from support.apis import Api
from support.child_client import fired
from support.faultproxy import FaultProxy, stall

import fastlock
import fastlock.asyncio
from fastlock._protocol.commands import token_matches

NAME = "sku"
MARK = b"\r\nsku\r\n"
LIMIT = 20  # seconds that a child may take

pytestmark = [
    pytest.mark.usefixtures("impl"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here"),
]


# uWSGI forks its workers from C. With the GIL held, as a child needs it where threads run; or without it.
FORKS: dict[str, Callable[[], int]] = {"python": os.fork}
if hasattr(os, "fork"):
    FORKS |= {"c": ctypes.PyDLL(None).fork, "c without lock": ctypes.CDLL(None).fork}


@pytest.fixture
def undisturbed() -> Iterator[None]:
    """No thread requests the GIL from another, as each gives it up as soon as it waits. If it were requested at a fork
    by C, the child would hand it over to a thread that does not exist there: Python corrects that in its own forks.

    For no longer than a second, after which a thread whose wakeup was lost requests it again (glibc bug 25847)."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1.0)
    yield
    sys.setswitchinterval(before)


@pytest.fixture(params=["python", "c"])
def by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, undisturbed: None) -> None:
    """The kind of fork in this test."""
    monkeypatch.setattr(Child, "fork", staticmethod(FORKS[request.param]))


def _switches() -> dict[str, str]:
    """How often each thread of this process gave up its processor."""
    found = {}
    for path in Path("/proc/self/task").glob("*/status"):
        with contextlib.suppress(OSError):  # the thread has ended meanwhile
            found[path.parent.name] = next(line for line in path.read_text().splitlines() if line.startswith("vol"))
    return found


def rest() -> None:
    """Leave the GIL to the other threads until none of them uses it: at a fork by C the child would wait for a
    thread that waits for the GIL, sooner or later, for ever."""
    main, before = str(threading.get_native_id()), None
    while (now := {name: count for name, count in _switches().items() if name != main}) != before:
        before = now
        time.sleep(0.002)


class Child:
    """A forked process that runs `work` and reports what it returns."""

    fork = staticmethod(FORKS["python"])

    def __init__(self, work: Callable[[], Any]) -> None:
        self._read, write = os.pipe()
        if self.fork is not FORKS["python"]:
            rest()
        with warnings.catch_warnings():
            # Python 3.12 and later warn where threads run, as they do here
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = self.fork()
        if not self.pid:
            _report(write, work)
        os.close(write)

    def result(self) -> Any:
        """The value that `work` returned; AssertionError with its traceback, or when the child hangs."""
        data = b""
        while select.select([self._read], [], [], LIMIT)[0]:
            chunk = os.read(self._read, 65536)
            if not chunk:
                break
            data += chunk
        else:
            os.kill(self.pid, signal.SIGKILL)
        os.close(self._read)
        _, status = os.waitpid(self.pid, 0)
        assert data and not status, f"the child hung or died (status {status})"
        returned, error = json.loads(data)
        assert not error, error
        return returned


def _report(write: int, work: Callable[[], Any]) -> None:
    """Everything that the child does."""
    status = 1
    # from Python 3.12 on the parent's loop counts as running here as well, after a fork by C
    asyncio._set_running_loop(None)
    try:
        try:
            answer = [work(), None]
        except BaseException:
            answer = [None, traceback.format_exc()]
        os.write(write, json.dumps(answer).encode())
        status = 0
    finally:
        os._exit(status)


async def in_child(api: Api, work: Callable[[], Any]) -> Any:
    """Fork, run `work` in the child (a coroutine in a loop of its own), return its report. The parent's loop goes
    on."""
    child = Child((lambda: asyncio.run(work())) if api.is_async else lambda: _driven(work()))
    return await asyncio.to_thread(child.result) if api.is_async else child.result()


def _driven(body: Awaitable[Any]) -> Any:
    from support.apis import drive

    return drive(body)  # type: ignore[arg-type]


def traffic(proxy: FaultProxy) -> list[tuple[int, int, bool]]:
    """The bytes that went over each connection so far, and whether it has ended."""
    return [(len(connection.requests), len(connection.replies), connection.dead) for connection in proxy.connections]


# -------------------------------------------------------------------------------------------------- leases and locks


@pytest.mark.usefixtures("by")
async def test_child_owns_no_lock_of_its_parent(api: Api, proxy: FaultProxy, probe: redis.Redis, no_leaks: Any) -> None:
    client = api.client(proxy.url)
    lock = client.lock(NAME, thread_local=False)
    assert await api.get(lock.acquire())
    lease = lock.lease
    before = traffic(proxy)

    async def work() -> list[Any]:
        refused = []
        for operation in (lock.release, lambda: lock.extend(5), lock.reacquire):
            with contextlib.suppress(fastlock.LockError):
                await api.get(operation())
                continue
            refused.append(True)
        quiet = len(proxy.connections) == len(before)
        return [lease.valid, lease.remaining, refused, quiet, await api.get(lock.owned())]

    assert await in_child(api, work) == [False, 0.0, [True] * 3, True, False]
    assert traffic(proxy)[: len(before)] == before, "the child used or ended the parent's connection"
    assert lock.lease is lease and lease.valid and await api.get(lock.owned())
    assert probe.get(NAME) == lease.token
    await api.get(lock.release())


@pytest.mark.usefixtures("by")
async def test_leaving_a_with_in_the_child_frees_nothing(
    api: Api, proxy: FaultProxy, probe: redis.Redis, no_leaks: Any
) -> None:
    lock = api.client(proxy.url).lock(NAME, thread_local=False)
    lease = await api.enter(lock)

    async def work() -> str:
        try:
            await api.leave(lock)
        except fastlock.LockError as error:
            return str(error)
        return ""

    assert "fork" in await in_child(api, work)
    assert probe.get(NAME) == lease.token
    await api.leave(lock)


@pytest.mark.usefixtures("by")
async def test_child_cannot_release_its_parents_batch(
    api: Api, proxy: FaultProxy, probe: redis.Redis, no_leaks: Any
) -> None:
    client = api.client(proxy.url)
    leases = await api.get(client.acquire_many(["a", "b"]))

    async def work() -> Any:
        return await api.get(client.release_many(leases))

    assert await in_child(api, work) == [False, False]
    assert probe.exists("a", "b") == 2
    assert await api.get(client.release_many(leases)) == [True, True]


@pytest.mark.usefixtures("by")
async def test_child_and_parent_exclude_each_other(
    api: Api, proxy: FaultProxy, probe: redis.Redis, no_leaks: Any
) -> None:
    client = api.client(proxy.url)
    lock = client.lock(NAME, thread_local=False)
    assert await api.get(lock.acquire())

    async def work() -> list[bool]:
        same = await api.get(lock.acquire(blocking=False))
        other = await api.get(client.lock(NAME).acquire(blocking=False))
        return [same, other, await api.get(client.lock(NAME).locked())]

    assert await in_child(api, work) == [False, False, True]
    assert await api.get(lock.owned())
    await api.get(lock.release())


# -------------------------------------------------------------------------------------------------------- connections


@pytest.mark.usefixtures("by")
@pytest.mark.parametrize("warm", [True, False], ids=["connected", "fresh"])
async def test_child_uses_the_same_client_over_connections_of_its_own(
    api: Api, proxy: FaultProxy, probe: redis.Redis, no_leaks: Any, warm: bool
) -> None:
    client = api.client(proxy.url)
    if warm:
        await api.get(client.server_info())
    before = traffic(proxy)

    async def work() -> list[Any]:
        done = []
        for number in range(3):
            lock = client.lock(f"child:{number}")
            done.append(await api.get(lock.acquire(blocking=False)) and await api.get(lock.owned()))
            await api.get(lock.release())
        await api.get(client.close())
        return done

    assert await in_child(api, work) == [True] * 3
    assert len(proxy.connections) > len(before) and traffic(proxy)[: len(before)] == before
    lock = client.lock(NAME)
    assert await api.get(lock.acquire(blocking=False)) and await api.get(lock.owned())
    await api.get(lock.release())


@pytest.mark.parametrize("by", ["python"], indirect=True)  # a fork by C may hang where threads want the GIL
async def test_many_children_and_their_parent_at_once(
    api: Api, proxy: FaultProxy, probe: redis.Redis, no_leaks: Any, by: None
) -> None:
    """All processes count under one lock; tokens are all different, no reply reaches another caller."""
    client = api.client(proxy.url)
    await api.get(client.server_info())

    async def work() -> list[str]:
        tokens = []
        for _ in range(10):
            lock = client.lock(NAME, sleep=0.001)
            assert await api.get(lock.acquire())
            assert token_matches(probe_of(proxy).get(NAME), lock.lease.token)
            tokens.append(lock.lease.token.decode())
            await api.get(lock.release())
        return tokens

    children = [Child((lambda: asyncio.run(work())) if api.is_async else lambda: _driven(work())) for _ in range(3)]
    tokens = await work()
    for child in children:
        tokens += await asyncio.to_thread(child.result) if api.is_async else child.result()
    assert len(set(tokens)) == len(tokens) == 40


def probe_of(proxy: FaultProxy) -> redis.Redis:
    """A client of the server itself, made by each process: this connection must not be shared with a child either."""
    return redis.Redis.from_url(proxy.upstream)


@pytest.mark.usefixtures("by")
async def test_fork_with_a_command_in_flight(api: Api, proxy: FaultProxy, probe: redis.Redis, no_leaks: Any) -> None:
    """The reply that comes later belongs to the parent; the child neither waits for it nor undoes the command."""
    client = api.client(proxy.url, reply_timeout=LIMIT, max_connections=1)
    await api.get(client.server_info())
    lock = client.lock(NAME, thread_local=False)
    armed = proxy.arm(stall(), after=MARK, times=1)
    waiter = api.start(lambda: lock.acquire(blocking=False))
    (connection,) = proxy.connections
    await fired(api, lambda: proxy.wait_for(lambda proxy: connection.held and MARK in connection.requests))
    before = traffic(proxy)

    async def work() -> list[Any]:
        other = client.lock("child")
        acquired = await api.get(other.acquire(blocking=False))
        await api.get(other.release())
        return [acquired, await api.get(client.lock(NAME).acquire(blocking=False)), lock.lease is None]

    assert await in_child(api, work) == [True, False, True]
    assert traffic(proxy)[: len(before)] == before
    armed.resume()
    assert await waiter.get() is True and await api.get(lock.owned())
    await api.get(lock.release())


@pytest.mark.usefixtures("by")
async def test_fork_with_a_release_that_nobody_waits_for(
    api: Api, proxy: FaultProxy, probe: redis.Redis, no_leaks: Any
) -> None:
    """It is the parent's to deliver: the child neither sends it nor counts on it, also as it closes the client."""
    client = api.client(proxy.url, max_connections=1)
    lock = client.lock(NAME, confirm_release=False)
    assert await api.get(lock.acquire())
    armed = proxy.arm(stall("request"), after=MARK, times=1)
    await api.get(lock.release())
    (connection,) = proxy.connections
    await fired(api, lambda: proxy.wait_for(lambda proxy: connection.held and MARK in connection.requests))
    before = len(connection.requests)

    async def work() -> list[Any]:
        acquired = await api.get(client.lock(NAME).acquire(blocking=False))
        unconfirmed = dict(client._transport.unconfirmed)
        await api.get(client.close())
        return [acquired, len(unconfirmed), client.get_stats()["losses"]]

    assert await in_child(api, work) == [False, 0, 0]
    assert len(connection.requests) == before and not connection.dead and probe.exists(NAME)
    armed.resume()
    assert await api.get(lock.acquire())
    await api.get(lock.release())
    await api.get(client.close())
    assert client.get_stats()["losses"] == 0


@pytest.mark.parametrize("by", ["python"], indirect=True)  # a fork by C may hang where threads want the GIL
async def test_fork_while_others_wait_for_a_lock(
    api: Api, proxy: FaultProxy, probe: redis.Redis, no_leaks: Any, by: None
) -> None:
    client = api.client(proxy.url, max_connections=1)
    held = client.lock(NAME, thread_local=False)
    assert await api.get(held.acquire())
    waiting = [client.lock(NAME, sleep=0.001, thread_local=False) for _ in range(3)]

    async def wait(lock: Any) -> bool:
        assert await api.get(lock.acquire())
        await api.get(lock.release())
        return True

    jobs = [api.start(lambda lock=lock: wait(lock)) for lock in waiting]

    async def work() -> bool:
        other = client.lock("child")
        for _ in range(20):
            assert await api.get(other.acquire(blocking=False))
            await api.get(other.release())
        return True

    for _ in range(3):
        assert await in_child(api, work) is True
    await api.get(held.release())
    assert [await job.get() for job in jobs] == [True] * 3


@pytest.mark.parametrize("api", ["threads"], indirect=True)
def test_fork_at_any_moment_of_busy_threads(api: Api, proxy: FaultProxy, probe: redis.Redis, no_leaks: Any) -> None:
    """A mutex that another thread holds at the fork must not stop the child."""
    client = api.client(proxy.url, max_connections=2)
    over = threading.Event()
    errors: list[BaseException] = []

    def busy(number: int) -> None:
        try:
            while not over.is_set():
                with client.lock(f"busy:{number}", timeout=30) as lease:
                    assert lease.valid
        except BaseException as error:
            errors.append(error)

    async def work() -> bool:
        with client.lock("child") as lease:
            return lease.valid

    threads = [threading.Thread(target=busy, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(16):
            assert Child(lambda: _driven(work())).result() is True
    finally:
        over.set()
        for thread in threads:
            thread.join(LIMIT)
        client.close()
    assert not errors and not any(thread.is_alive() for thread in threads)


# ------------------------------------------------------------------------------------------------- other cases


@pytest.mark.usefixtures("by")
def test_tokens_of_parent_and_children_differ(server: Any) -> None:
    """Tokens made ahead of use are not used in both processes."""

    def tokens() -> list[str]:
        with fastlock.Client.from_url(server.unix_url) as client:
            leases = [client.acquire_many([f"token:{os.getpid()}:{number}"])[0] for number in range(300)]
            assert all(client.release_many(leases))
            return [lease.token.decode() for lease in leases if lease is not None]

    seen = tokens()
    children = [Child(tokens) for _ in range(3)]
    seen += tokens()
    for child in children:
        seen += child.result()
    assert len(set(seen)) == len(seen) == 1500


def _in_pool(url: str) -> bool:
    with fastlock.Client.from_url(url) as client, client.lock("pool") as lease:
        return lease.valid


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
@pytest.mark.parametrize("server", ["valkey"], indirect=True)
def test_multiprocessing(server: Any, probe: redis.Redis, no_leaks: Any, method: str) -> None:
    context = multiprocessing.get_context(method)
    with fastlock.Client.from_url(server.unix_url) as client, client.lock("parent") as lease:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            with context.Pool(2) as pool:
                assert pool.map_async(_in_pool, [server.unix_url] * 4).get(LIMIT) == [True] * 4
        assert lease.valid and probe.get("parent") == lease.token


@pytest.mark.usefixtures("by")
async def test_child_of_a_child(api: Api, proxy: FaultProxy, probe: redis.Redis, no_leaks: Any) -> None:
    client = api.client(proxy.url)
    lock = client.lock(NAME, thread_local=False)
    assert await api.get(lock.acquire())

    async def grandchild() -> list[bool]:
        mine = client.lock("mine")
        return [bool(lock.lease and lock.lease.valid), await api.get(mine.acquire(blocking=False))]

    async def work() -> Any:
        own = client.lock("own", thread_local=False)
        assert await api.get(own.acquire(blocking=False))
        found = await in_child(api, grandchild)
        assert await api.get(own.owned())
        await api.get(own.release())
        return found

    assert await in_child(api, work) == [False, True]
    probe.delete("mine")
    assert await api.get(lock.owned())
    await api.get(lock.release())


@pytest.mark.parametrize("api", ["asyncio"], indirect=True)
async def test_child_with_a_client_and_a_loop_of_its_own(
    api: Api, proxy: FaultProxy, probe: redis.Redis, no_leaks: Any
) -> None:
    """The parent's loop, its timers and waiters go on while the child runs and after it has ended."""
    client = api.client(proxy.url)
    await client.server_info()
    probe.set(NAME, "another")
    waiting = client.lock(NAME, sleep=0.001, thread_local=False)
    waiter = api.start(waiting.acquire)

    async def work() -> bool:
        async with fastlock.asyncio.Client.from_url(proxy.url) as own, own.lock("child") as lease:
            return lease.valid

    for _ in range(3):
        assert await in_child(api, work) is True
    assert not waiter.finished.is_set()
    probe.delete(NAME)
    assert await waiter.get() is True and await waiting.owned()
    await waiting.release()


# --------------------------------------------------------------------------------------------------- forks of C code


class Witness:
    """Memory shared by the processes: the current holder, and how often there were two at once."""

    def __init__(self) -> None:
        self._page = mmap.mmap(-1, mmap.PAGESIZE)

    def enter(self) -> int:
        """Note that this process holds. Returns whether another one does."""
        found = struct.unpack_from("q", self._page)[0]
        struct.pack_into("q", self._page, 0, os.getpid())
        return int(found != 0)

    def leave(self) -> int:
        """Note that this process does not hold any more. Returns whether another one has come meanwhile."""
        found = struct.unpack_from("q", self._page)[0]
        struct.pack_into("q", self._page, 0, 0)
        return int(found != os.getpid())


@pytest.mark.parametrize("fork", ["c", "c without lock", "c in a thread"])
@pytest.mark.parametrize("used", [True, False], ids=["used", "made"])
@pytest.mark.usefixtures("undisturbed")
def test_one_holder_among_processes_forked_by_c(
    api: Api, server: Any, probe: redis.Redis, no_leaks: Any, monkeypatch: pytest.MonkeyPatch, fork: str, used: bool
) -> None:
    """Like a server that loads the application once, and then forks its workers in C."""
    monkeypatch.setattr(Child, "fork", staticmethod(FORKS[fork.removesuffix(" in a thread")]))
    client, witness = api.module.Client.from_url(server.unix_url), Witness()

    async def hammer(rounds: int) -> int:
        violations = 0
        for _ in range(rounds):
            lock = client.lock(NAME, timeout=20)
            await api.enter(lock)
            violations += witness.enter()
            await asyncio.sleep(0) if api.is_async else os.sched_yield()
            violations += witness.leave()
            await api.leave(lock)
        return violations

    def run(rounds: int) -> int:
        return int(asyncio.run(hammer(rounds)) if api.is_async else _driven(hammer(rounds)))

    if used:
        run(1)
    children: list[Child] = []
    forking = threading.Thread(target=lambda: children.extend(Child(lambda: run(50)) for _ in range(3)))
    forking.start() if "thread" in fork else forking.run()
    if forking.ident is not None:
        forking.join()
    assert [run(50), *(child.result() for child in children)] == [0] * 4


@pytest.mark.usefixtures("by")
async def test_stats_and_closing_in_the_child_are_its_own(
    api: Api, proxy: FaultProxy, probe: redis.Redis, no_leaks: Any
) -> None:
    """Also where the child did nothing else before: to close or drop a client sends nothing to the parent's server."""
    client = api.client(proxy.url)
    lock = client.lock(NAME, thread_local=False)
    assert await api.get(lock.acquire())
    before = traffic(proxy)

    async def count() -> int:
        return int(client.get_stats()["acquires"])

    async def close() -> int:
        await api.get(client.close())
        return len(proxy.connections)

    async def drop() -> int:
        client.__del__()
        return len(proxy.connections)

    assert await in_child(api, count) == 0
    assert await in_child(api, close) == await in_child(api, drop) == len(before)
    assert traffic(proxy) == before and client.get_stats()["acquires"] == 1
    assert await api.get(lock.owned())
    await api.get(lock.release())


HOOKS = """
import ctypes, os, threading
from fastlock import _fork as fork

ran, told = [], []
def hook():
    ran.append(fork.generation())
    fork.check()  # the work of a hook may begin with it
    if not told:
        told.append(1)
        raise KeyError("interrupted by a signal handler")
fork.at_fork(hook)

def child(by, work):
    pid = by()
    if not pid:
        try:
            work()
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0

def once():
    assert ran == [], ran
    try:
        fork.check()
    except KeyError:
        fork.check()  # what was interrupted is done again
    assert len(ran) == 2 and fork.generation() > 0, ran
    fork.check()
    threads = [threading.Thread(target=fork.check) for _ in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert len(ran) == 2, ran
    own = fork.generation()
    for by in (ctypes.PyDLL(None).fork, os.fork):
        child(by, lambda: grandchild(own))

def grandchild(parent):
    fork.check()
    assert len(ran) == 3 and fork.generation() == parent + 1, (ran, fork.generation(), parent)

assert fork.generation() == 0
child(ctypes.PyDLL(None).fork, once)
told.append(1)

def told_by_python():
    assert len(ran) == 1 and fork.generation() == 1, ran
    fork.check()
    assert len(ran) == 1, ran

child(os.fork, told_by_python)
assert ran == [] and fork.generation() == 0
"""


@pytest.mark.parametrize("wiped", [True, False], ids=["as it is", "without the kernel's help"])
def test_hooks_run_once_for_each_fork(impl: str, wiped: bool) -> None:
    if not wiped and impl == "cython":
        pytest.skip("the compiled version does not need the kernel's help")
    spoiled = "" if wiped else "import sys\nsys.platform = 'elsewhere'\n"
    done = subprocess.run([sys.executable, "-W", "error", "-c", spoiled + HOOKS], capture_output=True, timeout=LIMIT)
    assert (done.returncode, done.stderr.decode()) == (0, "")
