"""confirm_release=False on real servers: a release that nobody waits for is carried out all the same, before the next
acquire of the name by the same client, and what becomes of it is told.
"""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import threading
from typing import Any

import pytest
import redis
from support.apis import Api
from support.child_client import NAME, ROOT, SOON, away_from_push, two_connections, until, waits
from support.faultproxy import FaultProxy, stall, swallow

import fastlock
import fastlock.asyncio
from fastlock._protocol import batch, commands
from fastlock._transport import aio_closing, base, closing
from fastlock._transport.aio_connection import AsyncConnection
from fastlock._transport.base import MOST_UNREAD
from fastlock._transport.sync_connection import Connection
from fastlock.embedded import Server

one_server = pytest.mark.parametrize("server", ["valkey"], indirect=True)  # where its kind makes no difference
threads_only = pytest.mark.parametrize("api", ["threads"], indirect=True)


@pytest.fixture(autouse=True)
def fences_stay(no_leaks: Any) -> None:
    no_leaks.allow("fastlock:fence:*")


@pytest.fixture(autouse=True, params=[False, True], ids=["first", "later"])
def known(request: pytest.FixtureRequest, server: Server, probe: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the script was sent before over each connection: from then on the fast path sends releases."""
    if not request.param:
        return
    probe.script_load(commands.HAND_OVER_LUA.text)
    for kind in (Connection, AsyncConnection):
        made = kind.__init__

        def make(self: Any, *args: Any, made: Any = made, **more: Any) -> None:
            made(self, *args, **more)
            self.loaded.update(commands.HAND_OVER_LUA.loads)
            self.knows_release = True

        monkeypatch.setattr(kind, "__init__", make)


async def test_a_release_does_not_wait_for_the_server(api: Api, proxy: FaultProxy, probe: redis.Redis) -> None:
    client = api.client(proxy.url, confirm_release=False)
    lock = client.lock(NAME)
    await api.enter(lock)
    armed = proxy.arm(stall(), command="EVALSHA")
    await api.leave(lock)  # else this would time out
    assert lock.lease is None
    await until(api, lambda: armed.fired and not probe.exists(NAME), "the release")
    armed.resume()
    assert await api.get(lock.acquire(blocking=False))
    await api.get(lock.release())


async def test_the_next_acquire_comes_behind_it(api: Api, server: Server) -> None:
    client = api.client(server.url, confirm_release=False)
    for number in range(100):
        lock = client.lock(NAME, fence=number % 3 == 0, blocking=False, thread_local=False)
        assert await api.get(lock.acquire()), "it met its own release"
        await api.get(lock.release())
    assert client.get_stats()["losses"] == client.get_stats()["waits"] == 0


@threads_only
@pytest.mark.parametrize("settings", [{}, {"fence": True}], ids=["plain", "fence"])
async def test_the_next_acquire_goes_over_the_connection_of_the_release(
    api: Api, proxy: FaultProxy, settings: dict[str, bool]
) -> None:
    """Whichever is the next idle one, and without waiting for the answer to the release."""
    client = api.client(proxy.url, confirm_release=False)
    two_connections(client)
    for _ in range(3):
        async with api.within(client.lock(NAME, **settings)):
            pass
    lock = client.lock(NAME, **settings)
    await api.enter(lock)
    armed = proxy.arm(stall(), command="EVALSHA")
    await api.leave(lock)
    await until(api, lambda: armed.fired, "the release")
    client._transport.idle.reverse()
    sent = {each: len(each.commands) for each in proxy.connections}
    (carrier,) = [each for each in sent if each.commands[-1][0] == b"EVALSHA" and NAME.encode() in each.commands[-1]]
    following = client.lock(NAME, thread_local=False, **settings)
    job = api.start(following.acquire)
    await until(api, lambda: any(len(each.commands) > count for each, count in sent.items()), "the acquire")
    assert [each for each in proxy.connections if len(each.commands) > sent.get(each, 0)] == [carrier]
    armed.resume()
    assert await job.get(SOON)
    following.release()
    assert client.get_stats()["losses"] == 0


@threads_only
async def test_another_thread_acquires_behind_it(api: Api, server: Server) -> None:
    """Whichever connections the threads use, while others are busy."""
    client, ended = api.client(server.url, confirm_release=False), threading.Event()

    def busy(number: int) -> None:
        while not ended.is_set():
            with client.lock(f"busy:{number}"):
                pass

    others = [threading.Thread(target=busy, args=(number,)) for number in range(3)]
    for each in others:
        each.start()
    baton, failures = threading.Semaphore(1), []

    def take_turns() -> None:
        for number in range(150):
            with baton:
                lock = client.lock(NAME, blocking=False, fence=number % 2 == 0)
                if not lock.acquire():
                    failures.append(number)
                    return
                lock.release()

    turns = [threading.Thread(target=take_turns) for _ in range(3)]
    for each in turns:
        each.start()
    for each in turns:
        each.join()
    ended.set()
    for each in others:
        each.join()
    assert failures == []


@threads_only
async def test_many_names_are_acquired_behind_their_releases(api: Api, server: Server) -> None:
    """Which go over several connections."""
    client = api.client(server.url, confirm_release=False)
    names = [f"n{number}" for number in range(8)]
    for _ in range(10):
        held, done = threading.Barrier(len(names)), threading.Barrier(len(names))

        def hold(name: str, held: threading.Barrier = held, done: threading.Barrier = done) -> None:
            with client.lock(name):
                held.wait(SOON)
            done.wait(SOON)

        await api.together([lambda name=name: hold(name) for name in names])
        leases = client.acquire_many(names)
        assert None not in leases
        client.release_many(leases)
        with client.multi_lock(names, blocking=False):
            pass


@pytest.mark.parametrize("side", ["request", "reply"])
async def test_it_is_sent_again_where_its_connection_breaks(
    api: Api, proxy: FaultProxy, probe: redis.Redis, side: str
) -> None:
    client = api.client(proxy.url, confirm_release=False)
    lock = client.lock(NAME, blocking=False)
    for _ in range(3):
        await api.enter(lock)
        armed = proxy.arm(swallow() if side == "reply" else stall("request"), command="EVALSHA", times=1)
        await api.leave(lock)
        await until(api, lambda armed=armed: armed.fired, "the release")
        proxy.cut()
        assert await api.get(lock.acquire()), "it met its own release"
        await api.get(lock.release())
    await until(api, lambda: not probe.exists(NAME), "the release")
    assert client.get_stats()["losses"] == 0


@one_server
async def test_a_loss_is_told(api: Api, server: Server, probe: redis.Redis, caplog: pytest.LogCaptureFixture) -> None:
    told: list[Any] = []
    client = api.client(server.url, confirm_release=False)
    lock = client.lock(NAME, on_lost=told.append)
    lease = await api.enter(lock)
    probe.set(NAME, "somebody else")
    await api.leave(lock)
    assert not await api.get(client.lock(NAME, blocking=False).acquire())  # behind it
    await until(api, lambda: told == [lease], "on_lost")
    assert client.get_stats()["losses"] == 1
    (record,) = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert record.getMessage().startswith(f"lock '{NAME}' was lost before it was released")
    probe.delete(NAME)


@one_server
@threads_only
@pytest.mark.parametrize("unread", [False, True], ids=["all is read", "a release is not answered yet"])
async def test_a_loss_is_told_that_came_with_the_end_of_the_connection(
    api: Api, server: Server, probe: redis.Redis, unread: bool
) -> None:
    """What is sent over a connection that the server has closed is not executed: a release that is sent again would
    count what it finds as its own doing."""
    client = api.client(server.unix_url, confirm_release=False)
    for name in (NAME, "another"):  # the script is loaded with the first release
        with client.lock(name):
            pass
    lock = client.lock(NAME)
    await api.enter(lock)
    if unread:
        with client.lock("another"):
            pass
    probe.set(NAME, "somebody else")
    probe.client_kill_filter(_type="normal", skipme=True)
    for connection in client._transport.connections:
        await until(api, lambda connection=connection: not connection.stream.usable(), "its end")
    with pytest.raises(fastlock.LockNotOwnedError):
        await api.leave(lock)
    assert client.get_stats()["losses"] == 1
    probe.delete(NAME)


async def test_a_waiter_of_another_client_is_granted_it(api: Api, server: Server, probe: redis.Redis) -> None:
    client, other = api.client(server.url, confirm_release=False), api.client(server.url)
    lock = client.lock(NAME)
    await api.enter(lock)
    waiting = api.start(other.lock(NAME, blocking_timeout=SOON).acquire)
    await waits(api, other, 1)
    await api.leave(lock)
    assert await waiting.get()
    probe.delete(NAME)


@one_server
async def test_closing_delivers_it(api: Api, proxy: FaultProxy, probe: redis.Redis) -> None:
    client = api.client(proxy.url, confirm_release=False)
    lock = client.lock(NAME)
    await api.enter(lock)
    armed = proxy.arm(stall("request"), command="EVALSHA", times=1)
    await api.leave(lock)
    await until(api, lambda: armed.fired, "the release")
    proxy.cut()
    await api.get(client.close())
    assert not probe.exists(NAME)


async def closing_meanwhile(api: Api, client: Any) -> Any:
    """A job that closes the client, as soon as that has begun."""
    job = api.start(client.close)
    await until(api, lambda: client._transport.queues.ended, "it closes")
    return job


@one_server
async def test_closing_tries_again_while_the_server_is_away(
    api: Api, proxy: FaultProxy, probe: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = api.client(proxy.url, confirm_release=False)
    lock, tries = client.lock(NAME), []

    def back_at_the_third(failures: int) -> float:
        tries.append(failures)
        if failures == 2:
            proxy.admit()
        return 0.0

    for module in (closing, aio_closing):
        monkeypatch.setattr(module, "backoff", back_at_the_third)
    await api.enter(lock)
    armed = proxy.arm(stall("request"), command="EVALSHA", times=1)
    await api.leave(lock)
    await until(api, lambda: armed.fired, "the release")
    proxy.refuse()
    proxy.cut()
    await api.get(client.close())
    assert not probe.exists(NAME) and tries == [1, 2]


@one_server
async def test_closing_waits_for_a_server_that_hangs_as_for_any_release(
    api: Api, proxy: FaultProxy, probe: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For `reply_timeout`, not only as long as for what nobody counts on."""
    for module in (base, closing, aio_closing):
        monkeypatch.setattr(module, "CLOSE_SECONDS", 0.01)
    client = api.client(proxy.url, confirm_release=False)
    lock, ended = client.lock(NAME), threading.Event()
    await api.enter(lock)
    armed = proxy.arm(stall("request"), command="EVALSHA", times=1)
    await api.leave(lock)
    await until(api, lambda: armed.fired, "the release")
    job = await closing_meanwhile(api, client)
    timer = threading.Timer(0.1, ended.set)  # what is tested: that it takes longer than CLOSE_SECONDS
    timer.start()
    await until(api, ended.is_set, "more than CLOSE_SECONDS")
    assert not job.finished.is_set()
    armed.resume()
    await job.get(SOON)
    assert not probe.exists(NAME)


async def test_closing_tries_again_while_the_server_is_read_only(api: Api, server: Server, probe: redis.Redis) -> None:
    """As in a failover."""
    client = api.client(server.unix_url, confirm_release=False)
    lock = client.lock(NAME)
    await api.enter(lock)

    def sent() -> int:
        return int(probe.info("commandstats").get("cmdstat_evalsha", {"calls": 0})["calls"])

    before = sent()
    probe.replicaof("127.0.0.1", 1)
    try:
        await api.leave(lock)
        job = await closing_meanwhile(api, client)
        await until(api, lambda: sent() > before + 2, "it tries again")
    finally:
        probe.replicaof("NO", "ONE")
    await job.get(SOON)
    assert not probe.exists(NAME)


UNDELIVERED = {
    "threads": """
client = fastlock.Client.from_url(os.environ["SERVER"], confirm_release=False, reply_timeout=1)
lock = client.lock("sku")
lock.acquire()
input()
lock.release()
""",
    "asyncio": """
async def main():
    clients.append(fastlock.asyncio.Client.from_url(os.environ["SERVER"], confirm_release=False, reply_timeout=1))
    lock = clients[0].lock("sku")
    await lock.acquire()
    input()
    await lock.release()
clients = []
asyncio.run(main())
""",
}


@one_server
@pytest.mark.parametrize("program", UNDELIVERED)
async def test_a_process_that_cannot_deliver_it_says_so(
    proxy: FaultProxy, probe: redis.Redis, impl: str, program: str
) -> None:
    """The server hangs as the interpreter, or the event loop, ends."""
    environment = {**os.environ, "SERVER": proxy.url, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", "import asyncio, os, fastlock, fastlock.asyncio\n" + UNDELIVERED[program]],
        env=environment, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        while not probe.exists(NAME):
            assert process.poll() is None
        armed = proxy.arm(stall("request"), command="EVALSHA")
        _, said = process.communicate("\n", timeout=50)
    assert armed.fired and probe.delete(NAME) == 1
    assert process.returncode == 0 and "'sku' may stay locked until the lease ends" in said


MEANWHILE = {
    "the scripts are lost": lambda probe: probe.script_flush(),
    "the connection breaks": lambda probe: probe.client_kill_filter(_type="normal", skipme=True),
}


@one_server
@pytest.mark.parametrize("api", ["asyncio"], indirect=True)
@pytest.mark.parametrize("what", MEANWHILE)
async def test_a_client_that_is_dropped_as_its_loop_ends_delivers_it(
    api: Api, server: Server, probe: redis.Redis, what: str
) -> None:
    async def main() -> None:
        client = fastlock.asyncio.Client.from_url(server.unix_url, confirm_release=False)  # gone as this returns
        async with client.lock("other"):
            pass
        async with client.lock(NAME):
            MEANWHILE[what](probe)

    await asyncio.to_thread(asyncio.run, main())
    assert not probe.exists(NAME) and not aio_closing.UNFINISHED


@one_server
@pytest.mark.parametrize("api", ["asyncio"], indirect=True)
async def test_a_client_that_is_dropped_delivers_it(api: Api, server: Server, probe: redis.Redis) -> None:
    client = fastlock.asyncio.Client.from_url(server.unix_url, confirm_release=False)
    async with client.lock(NAME):
        probe.script_flush()
    del client
    await until(api, lambda: not probe.exists(NAME) and not aio_closing.UNFINISHED, "the release")


PROGRAMS = {
    "threads": """
lock = fastlock.Client.from_url(os.environ["SERVER"], confirm_release=False).lock("sku")
lock.acquire()
lock.release()
""",
    "asyncio": """
async def main():
    lock = fastlock.asyncio.Client.from_url(os.environ["SERVER"], confirm_release=False).lock("sku")
    await lock.acquire()
    await lock.release()
asyncio.run(main())
""",
}


@one_server
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_process_that_ends_delivers_it(server: Server, impl: str, probe: redis.Redis, program: str) -> None:
    code = "import asyncio, os, fastlock, fastlock.asyncio\n" + PROGRAMS[program]
    environment = {**os.environ, "SERVER": server.url, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=50, check=False
    )
    assert (done.returncode, done.stderr, probe.exists(NAME)) == (0, "", 0)


async def test_a_lease_that_has_ended_is_reported_all_the_same(api: Api, server: Server, probe: redis.Redis) -> None:
    lock = api.client(server.url, confirm_release=False).lock(NAME, timeout=0.01)
    await api.get(lock.acquire())
    await until(api, lambda: not lock.lease.valid and not probe.exists(NAME), "its end")
    with pytest.raises(fastlock.LockNotOwnedError):
        await api.get(lock.release())
    with pytest.raises(fastlock.LockError):
        await api.get(lock.release())


@one_server
async def test_a_reentrant_lock_is_released_so_at_last(api: Api, server: Server, probe: redis.Redis) -> None:
    client = api.client(server.url)
    lock = client.reentrant_lock(NAME, confirm_release=False)
    async with api.within(lock), api.within(lock):
        assert lock.lease.depth == 2
    assert lock.lease is None and await api.get(client.lock(NAME, blocking=False).acquire())
    probe.delete(NAME)


@one_server
async def test_the_lock_says_otherwise_than_its_client(api: Api, server: Server, probe: redis.Redis) -> None:
    client = api.client(server.url, confirm_release=False)
    lock = client.lock(NAME, confirm_release=True)
    await api.get(lock.acquire())
    probe.delete(NAME)
    with pytest.raises(fastlock.LockNotOwnedError):
        await api.get(lock.release())
    with pytest.raises(ValueError, match="on_lost is of leases that are renewed"):
        client.lock(NAME, confirm_release=True, on_lost=print)


async def test_a_server_that_has_forgotten_the_script(api: Api, server: Server, probe: redis.Redis) -> None:
    """The next acquire meets its own release, which is sent again, and is asked again behind that."""
    client = api.client(server.url, confirm_release=False)
    lock = client.lock(NAME, blocking=False)
    for fence in (False, True, False):
        lock = client.lock(NAME, blocking=False, fence=fence)
        assert await api.get(lock.acquire())
        probe.script_flush()
        await api.get(lock.release())
        assert await api.get(lock.acquire())
        await api.get(lock.release())
    await until(api, lambda: not probe.exists(NAME), "the release")
    assert client.get_stats()["losses"] == 0


@pytest.mark.parametrize("server", ["valkey", "redis"], indirect=True)
@pytest.mark.parametrize("fence", [False, True])
async def test_a_release_that_is_sent_again_and_answered_with_the_acquire(
    api: Api, server: Server, proxy: FaultProxy, probe: redis.Redis, fence: bool
) -> None:
    """The acquire was told that the lease still holds the name, and hears in the same breath that it does not."""
    client = api.client(proxy.url, confirm_release=False)
    lock = client.lock(NAME, blocking=False, fence=fence, thread_local=False)
    assert await api.get(lock.acquire())
    await api.get(lock.release())  # which loads its script
    assert await api.get(lock.acquire())
    probe.script_flush()
    for script in commands.SCRIPTS:
        if script is not commands.HAND_OVER_LUA:
            probe.execute_command(*script.load)
    await api.get(lock.release())
    armed = proxy.arm(stall(), after=commands.FENCED_LUA.sha if fence else b"\r\nNX\r\n")
    job = api.start(lock.acquire)
    await until(api, lambda: armed.fired and not probe.exists(NAME), "the release, sent again")
    armed.resume()
    assert await job.get() is True
    await api.get(lock.release())
    await until(api, lambda: not probe.exists(NAME), "the release")


@one_server
async def test_a_user_that_may_not_run_scripts(
    api: Api, server: Server, probe: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    probe.acl_setuser("limited", enabled=True, nopass=True, keys="*", channels="*", commands=["+@all", "-evalsha"])
    client = api.client(server.url, username="limited", password="any", confirm_release=False)
    lock = client.lock(NAME)
    await api.enter(lock)
    await api.leave(lock)
    while client._transport.unconfirmed:  # until its answer was read
        assert not await api.get(client.lock(NAME, blocking=False).acquire())
    assert client.get_stats()["losses"] == 0 and "evalsha" in caplog.text
    probe.acl_deluser("limited")
    probe.delete(NAME)


@one_server
async def test_who_releases_it_by_release_many_at_the_same_time_loses_nothing(api: Api, proxy: FaultProxy) -> None:
    client, told = api.client(proxy.url, confirm_release=False), []
    lock = client.lock(NAME, thread_local=False, on_lost=told.append)
    lease = await api.enter(lock)
    armed = proxy.arm(stall(), command="DELIFEQ")
    releasing = api.start(lambda: client.release_many([lease]))
    await until(api, lambda: armed.fired, "the release")
    await api.leave(lock)
    armed.resume()
    assert await releasing.get() == [True]
    assert not await api.get(client.lock(NAME).locked())  # in threads it reads what was answered
    await api.get(client.close())
    assert told == [] and client.get_stats()["losses"] == 0 and not client._transport.unconfirmed


@threads_only
@one_server
async def test_of_two_threads_that_release_it_one_waits(api: Api, proxy: FaultProxy) -> None:
    client, told = api.client(proxy.url, confirm_release=False), []
    for _ in range(30):
        lock = client.lock(NAME, thread_local=False, on_lost=told.append)
        await api.enter(lock)
        both = threading.Barrier(2)

        def release(lock: Any = lock, both: threading.Barrier = both) -> bool:
            both.wait(SOON)
            try:
                lock.release()
            except fastlock.LockError:
                return False
            return True

        assert any(await api.together([release, release]))
    client.close()
    assert told == [] and client.get_stats()["losses"] == 0


@one_server
@threads_only
@pytest.mark.parametrize("fault", ["flush", "cut"])
async def test_a_waiter_reads_what_became_of_it(api: Api, server: Server, probe: redis.Redis, fault: str) -> None:
    """Where the waiter listens nobody reads the answer to the release, which went over another connection."""
    client = api.client(server.url, confirm_release=False)
    two_connections(client)
    for _ in range(3):
        with client.lock(NAME, fair=True, timeout=60):
            pass
    lock = client.lock(NAME, fair=True, timeout=60)
    await api.enter(lock)
    if fault == "flush":
        probe.script_flush()
        probe.script_load(commands.ENTER_LUA.text)  # the join is answered, and the release is refused
    away_from_push(client)
    await api.leave(lock)
    if fault == "cut":
        for each in client._transport.connections:
            if each is not client._transport.push_connection:
                each.sock.shutdown(2)
    assert await api.get(client.lock(NAME, fair=True, blocking_timeout=SOON / 2).acquire())
    probe.delete(NAME)


@one_server
@threads_only
@pytest.mark.parametrize("fair", [False, True])
async def test_answers_that_nobody_reads_do_not_pile_up(api: Api, proxy: FaultProxy, fair: bool) -> None:
    client, most = api.client(proxy.url, confirm_release=False, reply_timeout=60), []
    two_connections(client)
    locks = [client.lock(f"{NAME}:{number}", fair=fair) for number in range(200)]

    def unread() -> int:
        return int(max(connection.stream.pending for connection in client._transport.connections))

    def work() -> None:
        for each in locks:
            each.acquire()
        armed.append(proxy.arm(stall()))
        for each in locks:
            each.release()
            most.append(unread())

    armed: list[Any] = []
    job = api.start(work)
    await until(api, lambda: unread() > MOST_UNREAD, "one that waits")
    armed[0].resume()
    await job.get(SOON)
    assert most[MOST_UNREAD - 1] == MOST_UNREAD == max(most)


@one_server
@pytest.mark.parametrize("names", [["a"], ["a", "b"]])
@pytest.mark.parametrize("how", ["batch", "multi"])
async def test_several_names_do_not_meet_a_release_that_is_sent_again(
    api: Api, server: Server, probe: redis.Redis, names: list[str], how: str
) -> None:
    client = api.client(server.url, confirm_release=False)
    for _ in range(2):
        async with api.within(client.lock("a")):
            pass
        async with api.within(client.lock("a")):
            probe.script_flush()
        if how == "batch":
            leases = await api.get(client.acquire_many(names))
            assert None not in leases
            await api.get(client.release_many(leases))
        else:
            async with api.within(client.multi_lock(names, blocking=False)):
                pass
    assert client.get_stats()["losses"] == 0


@one_server
async def test_a_token_of_the_callers_own_is_released_as_by_default(api: Api, server: Server) -> None:
    client = api.client(server.url, confirm_release=False)
    lock = client.lock(NAME)
    assert await api.get(lock.acquire(token="job-7"))
    await api.get(lock.release())
    assert not client._transport.unconfirmed


@one_server
async def test_a_batch_that_failed_hides_no_loss(api: Api, server: Server, probe: redis.Redis) -> None:
    client, told = api.client(server.url, confirm_release=False), []
    lock = client.lock(NAME, thread_local=False, on_lost=told.append)
    lease = await api.enter(lock)
    lease._releases += 1
    batch.unreported([lease], [False])
    probe.set(NAME, "another", px=60_000)
    await api.leave(lock)
    await api.get(client.close())
    await until(api, lambda: told, "on_lost")
    assert client.get_stats()["losses"] == 1
    probe.delete(NAME)


BROKEN = {
    "threads": """
import os, sys, fastlock
client = fastlock.Client.from_url(os.environ["SERVER"], confirm_release=False)
lock = client.lock("sku", timeout=60)
lock.acquire()
lock.release()
print("released", flush=True)
sys.stdin.readline()
""",
    "asyncio": """
import asyncio, os, sys, fastlock.asyncio

async def main():
    global client
    client = fastlock.asyncio.Client.from_url(os.environ["SERVER"], confirm_release=False)
    lock = client.lock("sku", timeout=60)
    await lock.acquire()
    await lock.release()
    await asyncio.sleep(0.01)
    print("released", flush=True)
    sys.stdin.readline()

asyncio.run(main())
""",
}


@pytest.mark.parametrize("program", BROKEN)
@one_server
def test_a_process_that_ends_delivers_what_broke(
    server: Server, proxy: FaultProxy, impl: str, probe: redis.Redis, program: str
) -> None:
    armed = proxy.arm(stall("request"), command="EVALSHA", times=1)
    child = subprocess.Popen(
        [sys.executable, "-c", BROKEN[program]],
        env={**os.environ, "PYTHONPATH": str(ROOT), "FASTLOCK_IMPL": impl, "SERVER": proxy.url},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None and child.stdout.readline() == "released\n"
    armed.wait()
    proxy.cut()
    assert child.communicate("\n", timeout=30) == ("", "") and child.returncode == 0
    assert not probe.exists("sku")
