"""Callers that are interrupted: in threads by an exception of a signal handler, in asyncio by cancellation. What they
may have acquired is released.

Threads: real signals at seeded random moments in a program of its own (support/interrupted.py). asyncio: cancelled at
every step of the event loop in turn. What must never happen: a key that stays although nobody owns it, a reply for the
wrong caller, a task or an error left behind, a caller that hangs.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import enum
import functools
import gc
import inspect
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import types
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from support import interrupted
from support.apis import Api
from support.fakeserver import FakeServer
from support.faultproxy import FaultProxy, stall
from support.interrupted import EXIT_IS_PYTHON, PYTHON_EXITS
from support.servers import leftovers
from support.streams import LONG, raise_at

import fastlock
import fastlock.asyncio
from fastlock import _fallback, _native, _stream_errors
from fastlock._stream_errors import Broken, by_handler
from fastlock.embedded import Server

ROOT = Path(__file__).resolve().parents[2]
NAME = "sku"
NAME_IN_COMMAND = b"\r\nsku\r\n"
HITS = 120
STEPS = 60  # of the event loop; an uncontended operation over a unix socket needs fewer
asyncio_only = pytest.mark.parametrize("api", ["asyncio"], indirect=True)
both_loops = pytest.mark.parametrize("api", ["asyncio", "asyncio+uvloop"], indirect=True)


@pytest.fixture(autouse=True)
def no_unretrieved_errors(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """asyncio logs futures and tasks whose exceptions were never retrieved when they are garbage-collected."""
    yield
    gc.collect()
    bad = [record.getMessage() for record in caplog.records if record.name == "asyncio" and record.levelno >= 30]
    assert not bad


# --------------------------------------------------------------------------------------------------------------- Ctrl-C


@pytest.mark.parametrize("api", ["threads"], indirect=True)
@pytest.mark.parametrize("step", ["wait", "run", "drive"])
async def test_ctrl_c_on_the_way_into_the_queue_leaves_no_waiter(
    api: Api, server: Server, no_leaks: Any, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Ctrl-C arrives at the entry of a function. A waiter that has joined the local queue leaves it, as later waiters
    would wait for it otherwise."""
    client, holder = api.client(server.unix_url), api.client(server.unix_url).lock(NAME)
    holder.acquire()
    client.server_info()

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(client._transport, step, interrupted)
        with pytest.raises(KeyboardInterrupt):
            client.lock(NAME).acquire()
    assert not client._transport.queued_keys and not client._transport.queues.by_entry
    holder.release()
    lock = client.lock(NAME)
    assert lock.acquire(blocking=False)
    lock.release()


def run_program(server: Server, mode: str, hits: int, mistake: str = "") -> dict[str, Any]:
    """The report of support/interrupted.py; `mistake` is code that changes some of fastlock first."""
    call = f"from support import interrupted\n{mistake}\ninterrupted.main()"
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", call, server.unix_url, mode, "7", str(hits)],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@pytest.mark.parametrize("server", ["valkey"], indirect=True)
@pytest.mark.parametrize("mode", interrupted.MODES)
def test_interrupted_threads_leave_no_key(server: Server, probe: redis.Redis, impl: str, mode: str) -> None:
    """For the modes see support/interrupted.py. The handler's exception reaches the caller, even an OSError."""
    report = run_program(server, mode, HITS)
    assert report["implementation"] == impl and report["hits"] == HITS, report
    assert report["wrong"] == [] and report["leaks"] == report["lost"] == 0, str(report)
    # Where `__exit__` is Python, a signal can interrupt `__exit__` at its entry: that lease runs out.
    assert report["unleft"] <= (HITS // 10 if EXIT_IS_PYTHON or mode in PYTHON_EXITS else 0), report
    owned = [key for key, _ in leftovers(probe) if not key.startswith(b"fastlock:fence:")]
    assert len(owned) == report["unleft"], owned


@pytest.mark.parametrize("server", ["redis"], indirect=True)
@pytest.mark.parametrize("mode", ["wait", "many"])
def test_interrupted_threads_leave_no_key_where_scripts_release(server: Server, impl: str, mode: str) -> None:
    report = run_program(server, mode, HITS)
    assert report["wrong"] == [] and report["leaks"] == report["lost"] == 0, str(report)


def test_interrupt_as_the_grant_comes_undoes_the_grant(impl: str) -> None:
    """The signal arrives while this thread spins, and no system call reports it. It has to be raised inside `acquire`:
    after that, no code would know that the lock is held."""

    def granted(args: list[bytes]) -> bytes:
        signal.pthread_kill(threading.get_ident(), signal.SIGALRM)
        return b"_\r\n"

    def handler(*_: Any) -> None:
        raise interrupted.Soft

    def dropped(*_: Any) -> bytes:
        return b":1\r\n"

    with FakeServer([granted, *[dropped] * 4]) as fake, fastlock.Client.from_url(fake.url) as client:
        client.server_info()
        lock = client.lock(NAME)
        with handled_by(handler), pytest.raises(interrupted.Soft):
            lock.acquire()
        assert lock.lease is None


# By name: the mode that detects the mistake, and code that makes it, in what is Python in both implementations.
MISTAKES = {
    "an interrupted operation stays": ("with", "sync.SyncTransport.undo_interrupted = lambda self, op, error: None"),
    "a handler's Exception is taken for fastlock's own": (
        "with",
        "base.is_own = lambda error: isinstance(error, Exception)",
    ),
    "a second interrupt ends the undo": (
        "twice",
        "real, seen = sync.SyncTransport.undo_interrupted, set()\n"
        "def once(self, op, error):\n"
        "    if op.token not in seen:\n"
        "        seen.add(op.token)\n"
        "        real(self, op, error)\n"
        "sync.SyncTransport.undo_interrupted = once",
    ),
    "a batch is not undone": ("many", "batch_operations.AcquireMany.abandon = lambda self, queues, clock: []"),
    # a release that nobody waits for: in most other modes one signal in 300 reveals the mistake, or none
    "a release is not carried out": ("unconfirmed", "release.Release.abandon = lambda self, queues, clock: []"),
    "a popped connection is not kept": ("fence", "sync.POP = lambda idle: (idle.pop(), sum(range(500)))[0]"),
    "an interrupted waiter stays": ("wait", "acquire.Acquire.leave = lambda self, waiter, lease, clock: None"),
    "a handler's OSError is taken for the connection's": ("connect", "sockets.by_handler = lambda error: False"),
}
IMPORTS = """
from fastlock._protocol import acquire, batch_operations, release
from fastlock._transport import base, sockets, sync
"""


@pytest.mark.long
@pytest.mark.parametrize("server", ["valkey"], indirect=True)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_program_detects_a_mistake(server: Server, impl: str, mistake: str) -> None:
    mode, program = MISTAKES[mistake]
    if mistake == "a release is not carried out" and EXIT_IS_PYTHON:
        pytest.skip("an `__exit__` in Python leaves some releases undone anyway: the program cannot tell the two apart")
    report = run_program(server, mode, 1500, f"{IMPORTS}\n{program}\ninterrupted.TIMEOUT = 0.3")
    allowed = report["hits"] // 10 if EXIT_IS_PYTHON else 0
    assert report["wrong"] or report["leaks"] or report["lost"] or report["unleft"] > allowed, report


def test_name_lookup_does_not_go_through_the_idna_codec(impl: str, server: Server) -> None:
    """The codec would replace a handler's exception by one of the same type which says that encoding failed."""
    codec = codecs.lookup("idna").encode.__code__.co_filename  # type: ignore[attr-defined]
    with fastlock.Client(host="localhost", port=server.port) as client:
        assert not raise_at(1, {codec}, client.server_info)


@contextlib.contextmanager
def handled_by(handler: Any) -> Iterator[None]:
    previous = signal.signal(signal.SIGALRM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, previous)


def refused() -> None:
    """Raise an OSError whose last frame is of the module `socket`."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        socket.create_connection(nobody.getsockname(), timeout=LONG)


class Watchdog:
    def __call__(self, number: int, frame: Any) -> None:
        refused()

    def limit(self, number: int, frame: Any) -> None:
        del frame
        refused()


def dropped(number: int, frame: Any) -> None:
    """Some handlers walk the frames and keep none of them, as a kept frame keeps all locals of its function alive."""
    while frame is not None:
        frame = frame.f_back
    refused()


HANDLERS = {
    "function": lambda number, frame: refused(),
    "object": Watchdog(),
    "any arguments": lambda *arguments: refused(),
    "partial": functools.partial(lambda tag, number, frame: refused(), "tag"),
    "without its frame": dropped,
    "method": Watchdog().limit,
    "partial without its frame": functools.partial(dropped),
}


@pytest.mark.parametrize("handler", HANDLERS)
def test_socket_error_raised_in_a_handler_counts_as_the_handlers(handler: str) -> None:
    with handled_by(HANDLERS[handler]):
        with pytest.raises(ConnectionRefusedError) as caught:
            signal.raise_signal(signal.SIGALRM)
        assert by_handler(caught.value)


def test_error_of_a_socket_wrapper_counts_as_the_connections() -> None:
    """Such a wrapper may verify certificates by itself, in frames of its own."""

    def wrapped(sock: Any, frame: Any = None) -> None:
        raise ssl.SSLCertVerificationError("not trusted")

    def connect() -> None:
        wrapped(5)

    for call in (connect, refused):
        with pytest.raises(OSError) as caught:
            call()
        assert not by_handler(caught.value)
    assert not by_handler(OSError())


def test_search_for_a_handler_swallows_no_exception_of_another() -> None:
    """`signal` turns its results into enums, and takes a ValueError to mean that a number has no enum member."""
    assert not raise_at(1, {signal.__file__, enum.__file__}, _stream_errors._codes)


def test_handler_may_raise_the_error_of_a_lock_released_twice(ends: Any) -> None:
    """Pure Python wakes a parked thread by releasing a lock; a second release raises RuntimeError."""

    class Wake:
        def release(self) -> None:
            frame: Any = inspect.currentframe()
            handler(signal.SIGALRM, frame.f_back)

    def handler(number: int, frame: types.FrameType) -> None:
        raise RuntimeError("struck")

    stream = _fallback.SocketStream(ends[0])
    pending_reply, sleeps = _fallback.PendingReply(), _fallback.PendingReply()
    pending_reply.wake = Wake()
    with pytest.raises(RuntimeError, match="struck"):
        pending_reply.set_result(None)
    assert stream.lead(pending_reply, None)
    sleeps.wake = Wake()
    stream.listen(sleeps)
    with pytest.raises(RuntimeError, match="struck"):
        stream.resign(pending_reply)
    changes = _native.Changes()
    changes._expected.append(Wake())
    with pytest.raises(RuntimeError, match="struck"):
        changes.tell()


# ------------------------------------------------------------------------------------------------ cancelled at any step


class Subject:
    """One operation to be cancelled, and what may be left of it."""

    def __init__(self, client: Any, probe: redis.Redis, operation: str) -> None:
        self.client, self.probe, self.operation = client, probe, operation
        self.lock = client.lock(NAME, thread_local=False, sleep=0.0002, fence=operation == "fenced")
        self.leases: list[Any] = []

    async def prepare(self) -> None:
        self.probe.delete(NAME)
        if self.operation == "wait":
            self.probe.set(NAME, "another")
        elif self.operation in ("release", "extend", "leave"):
            assert await self.lock.acquire()
        elif self.operation == "release many":
            self.leases = await self.client.acquire_many([NAME, "b", "c"])

    @property
    def call(self) -> Callable[[], Awaitable[Any]]:
        """What to run as a task: the bare awaitable where possible, without a coroutine around it."""
        bare = {"enter": self.lock.__aenter__, "leave": lambda: self.lock.__aexit__(None, None, None)}
        return bare.get(self.operation, self.run)

    async def run(self) -> None:
        if self.operation in ("acquire", "fenced", "wait"):
            await self.lock.acquire()
        elif self.operation == "release":
            await self.lock.release()
        elif self.operation == "extend":
            await self.lock.extend(5)
        elif self.operation == "with":
            async with self.lock as lease:
                assert lease.valid
                await asyncio.sleep(0)
        elif self.operation == "many":
            self.leases = await self.client.acquire_many([NAME, "b", "c"])
        else:
            await self.client.release_many(self.leases)

    async def release_owned(self) -> None:
        """Release what the caller finds that it owns; a release can be repeated without an error."""
        if self.lock.lease is not None:
            await self.lock.release()
        if self.operation in ("many", "release many"):
            await self.client.release_many(self.leases)
        await self.client.lock("barrier").locked()
        if self.operation == "wait":
            assert self.probe.get(NAME) == b"another"
            self.probe.delete(NAME)
        assert not self.probe.exists(NAME, "b", "c")


async def cancelled_after(steps: int, call: Callable[[], Awaitable[Any]], times: int = 1) -> bool:
    """Run it as a task and cancel it after so many steps of the loop, `times` times; whether the task was cancelled."""
    task = asyncio.ensure_future(call())
    for _ in range(steps):
        await asyncio.sleep(0)
    for _ in range(times):
        task.cancel()
        await asyncio.sleep(0)
    (outcome,) = await asyncio.gather(task, return_exceptions=True)
    assert outcome is None or isinstance(outcome, (fastlock.Lease, asyncio.CancelledError)), outcome
    return isinstance(outcome, asyncio.CancelledError)


@both_loops
@pytest.mark.parametrize("times", [1, 2], ids=["once", "twice"])
@pytest.mark.parametrize(
    "operation", ["acquire", "fenced", "wait", "release", "extend", "with", "enter", "leave", "many", "release many"]
)
async def test_cancelled_at_any_step(
    api: Api, server: Server, probe: redis.Redis, no_leaks: Any, operation: str, times: int
) -> None:
    no_leaks.allow("fastlock:fence:*")
    client = api.client(server.unix_url)
    await client.server_info()
    subject = Subject(client, probe, operation)
    hits = 0
    for steps in range(STEPS):
        await subject.prepare()
        hits += await cancelled_after(steps, subject.call, times)
        await subject.release_owned()
    assert hits > 2
    assert len(probe.client_list()) == 2, "a cancellation must not cost a connection"


@both_loops
@pytest.mark.parametrize("operation", ["acquire", "with", "many"])
async def test_cancelled_at_any_step_of_connecting(
    api: Api, server: Server, probe: redis.Redis, no_leaks: Any, operation: str
) -> None:
    for steps in range(0, STEPS, 2):
        async with fastlock.asyncio.Client.from_url(server.unix_url) as client:
            subject = Subject(client, probe, operation)
            await cancelled_after(steps, subject.run)
            await subject.release_owned()


@both_loops
@pytest.mark.parametrize("ends", ["loop goes on", "client is closed"])
@pytest.mark.parametrize("operation", ["leave", "release", "release many"])
async def test_release_cancelled_as_it_connects_is_carried_out(
    api: Api,
    server: Server,
    probe: redis.Redis,
    no_leaks: Any,
    monkeypatch: pytest.MonkeyPatch,
    operation: str,
    ends: str,
) -> None:
    """This happens in a task group that fails while the server restarts: its task will not try again."""
    client = api.client(server.unix_url)
    lock, transport, reachable = client.lock(NAME, None, thread_local=False), client._transport, asyncio.Event()
    leases = await client.acquire_many([NAME, "b"], timeout=None) if operation == "release many" else []
    calls = {
        "leave": lambda: lock.__aexit__(None, None, None),
        "release": lock.release,
        "release many": lambda: client.release_many(leases),
    }
    if not leases:
        await lock.acquire()

    async def connect(*args: Any, **keywords: Any) -> Any:
        await reachable.wait()
        return await real(*args, **keywords)

    real = transport._connect
    monkeypatch.setattr(transport, "_connect", connect)
    transport.connection.fail(Broken("cut"))
    task = asyncio.ensure_future(calls[operation]())
    while transport._connecting is None:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    reachable.set()
    async with asyncio.timeout(5):
        if ends == "client is closed":
            await client.close()
        while probe.exists(NAME, "b"):
            await asyncio.sleep(0.001)


@both_loops
async def test_cancelled_caller_ends_at_once_and_others_get_their_replies(
    api: Api, proxy: FaultProxy, probe: redis.Redis, no_leaks: Any
) -> None:
    """The reply is held back: the cancelled caller does not wait for it, and the others get theirs later."""
    client = api.client(proxy.url, reply_timeout=20)
    await client.server_info()
    for _ in range(3):
        armed = proxy.arm(stall(), after=NAME_IN_COMMAND, times=1)
        gone = [asyncio.ensure_future(client.lock(NAME).acquire()) for _ in range(2)]
        locks = [client.lock(f"other:{number}", thread_local=False) for number in range(4)]
        others = [asyncio.ensure_future(lock.acquire(token=f"token {n}")) for n, lock in enumerate(locks)]
        while not armed.fired:
            await asyncio.sleep(0.001)
        for task in gone:
            task.cancel()
        assert all(
            isinstance(each, asyncio.CancelledError) for each in await asyncio.gather(*gone, return_exceptions=True)
        )
        assert not any(task.done() for task in others)
        armed.resume()
        assert await asyncio.gather(*others) == [True] * 4
        assert [probe.get(lock.name) for lock in locks] == [b"token %d" % number for number in range(4)]
        for lock in locks:
            await lock.release()
        assert not probe.exists(NAME)
    assert len(proxy.connections) == 1


@asyncio_only
async def test_release_that_was_cancelled_can_be_repeated(
    api: Api, proxy: FaultProxy, probe: redis.Redis, no_leaks: Any
) -> None:
    """Executed or not, the lease is the caller's until the reply arrives: a second release raises no error."""
    client = api.client(proxy.url, reply_timeout=20)
    lock = client.lock(NAME, thread_local=False)
    for side in ("request", "reply"):
        await lock.acquire()
        armed = proxy.arm(stall(side), after=NAME_IN_COMMAND, times=1)  # type: ignore[arg-type]
        task = asyncio.ensure_future(lock.release())
        while not armed.fired:
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        armed.resume()
        if lock.lease is not None:
            await lock.release()
        assert not probe.exists(NAME) and lock.lease is None


# -------------------------------------------------------------------------------------------- how asyncio cancels tasks


@both_loops
async def test_timeout_of_asyncio(api: Api, proxy: FaultProxy, probe: redis.Redis, no_leaks: Any) -> None:
    client = api.client(proxy.url, reply_timeout=20)
    await client.server_info()
    armed = proxy.arm(stall(), after=NAME_IN_COMMAND, times=1)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            async with client.lock(NAME):
                raise AssertionError("its reply is held back")
    armed.resume()
    probe.set("held", "another")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await client.lock("held", sleep=0.001).acquire()
    assert not await client.lock(NAME).locked()
    probe.delete("held")


@both_loops
async def test_failure_in_a_task_group(api: Api, server: Server, probe: redis.Redis, no_leaks: Any) -> None:
    """One task fails: the tasks that wait, hold and release are cancelled, and every lock is released."""
    client = api.client(server.unix_url)
    names = [f"group:{number}" for number in range(5)]

    async def user(number: int) -> None:
        while True:
            async with client.lock(names[number % 5], sleep=0.001):
                await asyncio.sleep(0)

    async def fail_after(steps: int) -> None:
        for _ in range(steps):
            await asyncio.sleep(0)
        raise ZeroDivisionError

    for steps in range(1, 40, 3):
        with pytest.raises(ExceptionGroup) as caught:
            async with asyncio.TaskGroup() as group:
                for number in range(20):
                    group.create_task(user(number))
                group.create_task(fail_after(steps))
        assert caught.group_contains(ZeroDivisionError) and len(caught.value.exceptions) == 1
        end = time.monotonic() + 10
        while left := [(name, token, probe.pttl(name)) for name in names if (token := probe.get(name))]:
            # An undo is sent again where the server does not know its script yet
            assert time.monotonic() < end, (steps, left, client.get_stats())
            await asyncio.sleep(0)


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # the client is left open on purpose
@pytest.mark.parametrize("uvloop", [False, True], ids=["asyncio", "uvloop"])
def test_run_that_ends_while_tasks_wait(
    server: Server, probe: redis.Redis, impl: str, no_leaks: Any, uvloop: bool
) -> None:
    """asyncio.run cancels what still waits, before it closes the loop."""
    api = Api("asyncio", uvloop=uvloop)
    probe.set("held", "another")
    waiting = []

    async def main() -> None:
        client = fastlock.asyncio.Client.from_url(server.unix_url)
        await client.server_info()
        waiting.extend(asyncio.ensure_future(client.lock("held").acquire()) for _ in range(3))
        waiting.append(asyncio.ensure_future(client.lock(NAME, timeout=60).acquire()))
        await asyncio.sleep(0)
        main.client = client  # type: ignore[attr-defined]

    with asyncio.Runner(loop_factory=_factory(api)) as runner:
        runner.run(main())
        runner.run(asyncio.sleep(0.01))
        probe.delete(NAME)  # it may have been acquired before the loop was closed
    assert all(task.done() for task in waiting)
    del main.client, waiting[:]  # type: ignore[attr-defined]
    gc.collect()
    probe.delete("held")


def _factory(api: Api) -> Callable[[], asyncio.AbstractEventLoop] | None:
    if not api.uvloop:
        return None
    import uvloop

    return uvloop.new_event_loop  # type: ignore[no-any-return]


def test_loop_that_is_closed_under_a_client(server: Server, impl: str) -> None:
    """The loop is closed without closing the client: the client goes on in the next loop."""
    loop = asyncio.new_event_loop()
    client = fastlock.asyncio.Client.from_url(server.unix_url)

    async def connect() -> asyncio.BaseTransport:
        await client.server_info()
        return client._transport.connection.byte_transport  # type: ignore[no-any-return,union-attr]

    transport = loop.run_until_complete(connect())
    transport.abort()  # type: ignore[attr-defined]
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()

    async def use() -> None:
        async with client.lock(NAME):
            pass
        await client.close()

    asyncio.run(use())


@asyncio_only
async def test_client_closed_under_its_waiters(api: Api, server: Server, probe: redis.Redis, no_leaks: Any) -> None:
    probe.set("held", "another")
    for steps in range(0, 30, 2):
        client = fastlock.asyncio.Client.from_url(server.unix_url)
        tasks = [asyncio.ensure_future(client.lock("held").acquire()) for _ in range(5)]
        for _ in range(steps):
            await asyncio.sleep(0)
        await client.close()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(outcome, fastlock.ClientClosedError) for outcome in outcomes), outcomes
    probe.delete("held")
