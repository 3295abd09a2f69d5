"""Kept leases: released, and given out again without a command, until another client wants them."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import itertools
import math
import multiprocessing
import os
import select
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import redis
from support.apis import Api
from support.child_client import LONG, NAME, ROOT, SOON, queued, until, wait_with, waits
from support.faultproxy import FaultProxy, swallow

import fastlock
import fastlock.asyncio
from fastlock._protocol import commands, local_queue
from fastlock.embedded import Server

pytestmark = pytest.mark.usefixtures("no_leaks", "no_waiters")
KEEP = 300.0  # seconds: longer than any test
SHORT = 0.05
two_servers = pytest.mark.parametrize("server", ["valkey", "floor"], indirect=True)


async def keeper_of(api: Api, client: Any, keep: float = KEEP, **settings: Any) -> Any:
    """A lock of the client that keeps its leases, once recalls are heard."""
    lock = client.lock(NAME, **{"timeout": LONG, "thread_local": False, "keep": keep, **settings})
    other = client.lock("other", timeout=LONG, keep=keep)
    await pair(api, other)  # which begins to listen
    await until(api, lambda: client._transport.queues.hears_recalls, "recalls are heard")
    return lock


async def pair(api: Api, lock: Any) -> Any:
    """Acquire and release; returns the lease."""
    await api.get(lock.acquire())
    lease = lock.lease
    await api.get(lock.release())
    return lease


def kept(client: Any) -> list[bytes]:
    """The names that the client keeps, but that of `keeper_of`, which it may keep, too."""
    return [key for key in client._transport.queues.kept if key != b"other"]


async def gone(api: Api, probe: redis.Redis, name: str = NAME) -> None:
    await until(api, lambda: not probe.exists(name), f"{name} is free")


@two_servers
async def test_the_next_acquires_take_no_command(api: Api, server: Server, probe: redis.Redis) -> None:
    client = api.client(server.unix_url)
    lock = await keeper_of(api, client)
    first = await pair(api, lock)
    value = probe.get(NAME)
    assert kept(client) == [NAME.encode()] and value == first._raw_token
    before = client.get_stats()
    for _ in range(100):
        async with api.within(lock) as lease:
            assert lease.valid and LONG <= lease.remaining <= LONG + KEEP and probe.get(NAME) == value
            assert await api.get(lock.owned())
        assert not lease.valid and lock.lease is None
    after = client.get_stats()
    assert after["kept_acquires"] - before["kept_acquires"] == after["acquires"] - before["acquires"] == 100
    assert after["commands"] - before["commands"] == 100, "those of owned()"
    assert await api.get(lock.locked()), "others see it as held"
    await api.get(client.close())
    assert not probe.exists(NAME)


@pytest.mark.parametrize("given", [{"blocking": False}, {"blocking": True}, {"blocking_timeout": LONG}])
async def test_a_lease_is_kept_however_it_was_acquired(api: Api, server: Server, given: dict[str, Any]) -> None:
    client, key = api.client(server.unix_url), NAME.encode()
    lock = await keeper_of(api, client)
    for token in ("of the caller", "x", None):  # what a caller gives may be the token of other acquires, too
        assert key not in kept(client) and await api.get(lock.acquire(**given, token=token))
        longest = LONG + (KEEP if token is None else 0)
        assert longest - SOON < lock.lease.remaining <= longest
        await api.get(lock.release())
    assert key in kept(client)
    before = client.get_stats()["commands"]
    assert await api.get(lock.acquire(**given))
    await api.get(lock.release())
    assert client.get_stats()["commands"] == before
    await api.get(client.close())


@pytest.mark.parametrize("given", [{"blocking": False}, {"blocking_timeout": 0}, {}])
async def test_a_name_that_was_recalled_is_kept_again_after_a_while(
    api: Api, server: Server, given: dict[str, Any]
) -> None:
    """Also by callers that do not wait."""
    client, other, key = api.client(server.unix_url), api.client(server.unix_url), NAME.encode()
    lock = await keeper_of(api, client)
    queues = client._transport.queues
    queues.forget_at, expected = math.inf, queues.expected  # not forgotten for the time that has passed
    await pair(api, lock)
    await pair(api, other.lock(NAME, timeout=LONG))
    await until(api, lambda: expected and key not in kept(client), "it is noted that the lease was recalled")
    for _ in range(local_queue.JOINS):
        assert key not in kept(client) and await api.get(lock.acquire(**given))
        await api.get(lock.release())
    await until(api, lambda: not expected, "the recall is forgotten")
    await pair(api, lock)
    assert key in kept(client)
    await api.get(client.close())
    await api.get(other.close())


@pytest.mark.parametrize("move", [lambda lock: lock.extend(1), lambda lock: lock.reacquire()])
async def test_a_lease_whose_end_was_moved_is_not_kept(
    api: Api, server: Server, probe: redis.Redis, move: Callable[[Any], Any]
) -> None:
    client, key = api.client(server.unix_url), NAME.encode()
    lock = await keeper_of(api, client)
    for _ in range(2):  # of a fresh lease, and of one that was kept before
        assert await api.get(lock.acquire())
        await api.get(move(lock))
        await api.get(lock.release())
        assert key not in kept(client) and not probe.exists(NAME)
        await pair(api, lock)
        assert key in kept(client)
    await api.get(client.close())


async def test_an_acquire_that_met_a_kept_lease_as_it_was_released_asks_again(
    api: Api, server: Server, probe: redis.Redis
) -> None:
    """Also where the release of another thread, sent behind it, is answered before its own answer is judged."""
    client, key = api.client(server.unix_url), NAME.encode()
    transport: Any = client._transport
    lock = await keeper_of(api, client)
    await pair(api, lock)
    request = lock._new_acquire().request
    (lease,) = transport.queues.stop_keeping([key])
    noted: list[Any] = []
    transport.release_kept([lease], lambda delivery: noted.append(transport.unconfirmed[key] is delivery))
    assert noted == [True] and transport.met_own_release(request, lease._raw_token), "it is about to be sent"
    transport.deliver(transport.unconfirmed[key])
    await gone(api, probe)
    await pair(api, client.lock("other", timeout=LONG))  # reads the answer
    await until(api, lambda: not transport.unconfirmed, "it is answered")
    assert transport.met_own_release(request, lease._raw_token)
    assert not transport.met_own_release(request, lease._raw_token), "once"
    await api.get(client.close())


async def test_a_lease_that_was_granted_to_an_entry_is_not_kept(api: Api, server: Server, probe: redis.Redis) -> None:
    """Also where the entry is the token of a try whose reply was lost: others may wait for it."""
    with FaultProxy(server.unix_url) as proxy:
        client, other, key = api.client(proxy.url), api.client(server.unix_url), NAME.encode()
        lock, held = await keeper_of(api, client), other.lock(NAME, timeout=LONG, thread_local=False)
        assert await api.get(held.acquire())
        lost = proxy.arm(swallow(), after=b"fk:")
        waiting = api.start(lock.acquire)
        await until(api, lambda: probe.zcard(commands.queue_key(key)), "it waits")
        assert lost.fired
        await api.get(held.release())
        assert await waiting.get()
        await api.get(lock.release())
        assert key not in kept(client) and not probe.exists(NAME)
        await api.get(client.close())
        await api.get(other.close())


async def test_a_lease_is_kept_for_so_long_and_no_longer(api: Api, server: Server, probe: redis.Redis) -> None:
    """Though the client does nothing more; and who holds it then, holds it for its whole timeout."""
    client = api.client(server.unix_url)
    lock = await keeper_of(api, client, SHORT)
    await pair(api, lock)
    await gone(api, probe)
    await until(api, lambda: not kept(client), "nothing is kept")
    before = client.get_stats()["kept_acquires"]
    for _ in range(50):
        async with api.within(lock) as lease:
            assert lease.remaining > LONG - 1
            probe.ping()
    assert client.get_stats()["kept_acquires"] > before
    await gone(api, probe)
    assert client.get_stats()["losses"] == 0


async def test_who_asks_sees_that_a_name_is_kept(api: Api, server: Server, probe: redis.Redis) -> None:
    client = api.client(server.unix_url)
    lock = await keeper_of(api, client)
    await pair(api, lock)
    (holder,) = (await api.get(client.describe(NAME))).holders
    assert (holder.kept, holder.depth, holder.owner, holder.mine) == (True, 0, None, True)
    shown = subprocess.run(
        [sys.executable, "-m", "fastlock", "show", NAME, "--url", server.unix_url],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert "may be kept" in shown.stdout
    await api.get(lock.acquire())
    (holder,) = (await api.get(client.describe(NAME))).holders
    assert (holder.kept, holder.depth) == (True, 1)
    await api.get(lock.release())
    async with api.within(client.lock("plain", timeout=LONG)):
        (holder,) = (await api.get(client.describe("plain"))).holders
        assert not holder.kept


@two_servers
async def test_another_client_gets_it_at_once(api: Api, server: Server, probe: redis.Redis) -> None:
    client, other = api.client(server.unix_url), api.client(server.unix_url)
    await pair(api, await keeper_of(api, client))
    lock, job = wait_with(api, other)
    assert await job.get(SOON) is True
    await until(api, lambda: not kept(client), "it is noted that it was released")
    assert client.get_stats()["recalls"] == 1
    await api.get(lock.release())
    await gone(api, probe)
    assert client.get_stats()["losses"] == 0


@two_servers
async def test_a_lease_that_is_held_goes_over_when_it_is_released(api: Api, server: Server, probe: redis.Redis) -> None:
    client, other = api.client(server.unix_url), api.client(server.unix_url)
    mine = await keeper_of(api, client)
    await pair(api, mine)
    await api.get(mine.acquire())
    lock, job = wait_with(api, other)
    await queued(api, probe, 1)
    await until(api, lambda: client.get_stats()["recalls"] == 1, "the recall")
    assert mine.lease.valid and not job.finished.is_set()
    await api.get(mine.release())
    assert not kept(client) and await job.get(SOON) is True
    await api.get(lock.release())


async def test_who_waits_in_the_client_gets_it_without_a_command(api: Api, server: Server, probe: redis.Redis) -> None:
    client = api.client(server.unix_url)
    mine = await keeper_of(api, client)
    await pair(api, mine)
    await api.get(mine.acquire())
    before = client.get_stats()["commands"]
    lock, job = wait_with(api, client, keep=KEEP)
    await waits(api, client, 1)
    await api.get(mine.release())
    assert await job.get(SOON) is True and lock.lease.remaining > LONG
    await api.get(lock.release())
    assert client.get_stats()["commands"] == before and kept(client) == [NAME.encode()]


async def test_a_recalled_lease_goes_round_first_and_then_over(
    api: Api, server: Server, probe: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_queue, "LOCAL_SECONDS", LONG)
    client, other = api.client(server.unix_url), api.client(server.unix_url)
    mine = await keeper_of(api, client)
    await pair(api, mine)
    await api.get(mine.acquire())
    near, job = wait_with(api, client, keep=KEEP)
    await waits(api, client, 1)
    far, remote = wait_with(api, other)
    await until(api, lambda: client.get_stats()["recalls"] == 1, "the recall")
    await api.get(mine.release())
    assert await job.get(SOON) is True and not remote.finished.is_set()
    later, last = wait_with(api, client, keep=KEEP)
    await waits(api, client, 2)
    await api.get(near.release())
    assert await remote.get(SOON) is True and not last.finished.is_set()
    await api.get(far.release())
    assert await last.get(SOON) is True
    await api.get(later.release())


async def test_a_client_of_redis_py_waits_until_it_is_kept_no_longer(
    api: Api, server: Server, probe: redis.Redis
) -> None:
    client = api.client(server.unix_url)
    await pair(api, await keeper_of(api, client, SHORT))
    lock = probe.lock(NAME, timeout=LONG, sleep=0.01, blocking_timeout=SOON, thread_local=False)
    assert await asyncio.to_thread(lock.acquire) if api.is_async else lock.acquire()
    lock.release()


async def test_what_others_may_release_is_not_kept(api: Api, server: Server, probe: redis.Redis) -> None:
    client = api.client(server.unix_url)
    lock = await keeper_of(api, client)
    await pair(api, lock)
    await api.get(lock.acquire())
    assert lock.lease.token.startswith(commands.KEPT_PREFIX)
    await api.get(lock.release())
    assert not kept(client) and not probe.exists(NAME)
    await pair(api, lock)
    assert kept(client) == [NAME.encode()]


@pytest.mark.parametrize("how", ["extend", "shorten", "reacquire"])
async def test_who_takes_a_lease_whose_end_was_moved_has_its_whole_timeout(
    api: Api, server: Server, probe: redis.Redis, how: str
) -> None:
    client = api.client(server.unix_url)
    lock = await keeper_of(api, client)
    await pair(api, lock)
    await api.get(lock.acquire())
    moves = {"extend": lambda: lock.extend(5), "shorten": lambda: lock.extend(5, replace_ttl=True)}
    await api.get(moves.get(how, lock.reacquire)())
    await api.get(lock.release())
    async with api.within(lock) as lease:
        assert LONG - 1 < lease.remaining <= probe.pttl(NAME) / 1000 + 0.1


OTHERS: dict[str, Callable[[Any], Any]] = {
    "without keep": lambda client: client.lock(NAME, timeout=LONG, blocking=False),
    "shorter": lambda client: client.lock(NAME, timeout=1, blocking=False),
    "kept for less": lambda client: client.lock(NAME, timeout=1, blocking=False, keep=1),
    "longer": lambda client: client.lock(NAME, timeout=2 * (LONG + KEEP), blocking=False, keep=KEEP),
    "fenced": lambda client: client.lock(NAME, timeout=LONG, blocking=False, fence=True),
    "fair": lambda client: client.lock(NAME, timeout=LONG, fair=True, blocking_timeout=SOON),
    "reentrant": lambda client: client.reentrant_lock(NAME, timeout=LONG, blocking=False),
    "several": lambda client: client.multi_lock([NAME, "more"], timeout=LONG, blocking=False),
}


@pytest.mark.parametrize("other", OTHERS)
async def test_other_locks_of_the_client_get_the_name(api: Api, server: Server, probe: redis.Redis, other: str) -> None:
    client = api.client(server.unix_url)
    lock = await keeper_of(api, client)
    await pair(api, lock)
    found = OTHERS[other](client)
    assert await api.get(found.acquire()), "nobody holds it"
    assert not kept(client)
    await api.get(found.release())
    assert (found.__class__ is lock.__class__ and found._keep_ms) or not probe.exists(NAME)
    probe.delete("fastlock:fence:{" + NAME + "}")
    await pair(api, lock)
    assert kept(client) == [NAME.encode()]


async def test_a_try_that_does_not_wait_takes_it(api: Api, server: Server, probe: redis.Redis) -> None:
    client = api.client(server.unix_url)
    lock = await keeper_of(api, client)
    await pair(api, lock)
    before = client.get_stats()["commands"]
    assert await api.get(lock.acquire(blocking=False)) is True
    assert await api.get(client.lock(NAME, keep=KEEP, blocking=False).acquire()) is False
    await api.get(lock.release())
    assert client.get_stats()["commands"] <= before + 1


async def test_batches_get_the_name(api: Api, server: Server, probe: redis.Redis) -> None:
    client = api.client(server.unix_url)
    await pair(api, await keeper_of(api, client))
    leases = await api.get(client.acquire_many([NAME, "more"], timeout=LONG))
    assert all(leases)
    await api.get(client.release_many(leases))
    assert not probe.exists(NAME)


@two_servers
async def test_nothing_is_kept_where_recalls_may_be_lost(
    api: Api, server: Server, proxy: FaultProxy, probe: redis.Redis
) -> None:
    client = api.client(proxy.url)
    lock = await keeper_of(api, client)
    await pair(api, lock)
    proxy.cut()
    await until(api, lambda: not kept(client), "the cut is noticed")
    if not api.is_async:  # who uses the client next sends what it owes
        await pair(api, client.lock("third", timeout=LONG))
    await gone(api, probe)

    await pair(api, lock)
    await until(api, lambda: client._transport.queues.hears_recalls, "they are heard over the next connection")
    await pair(api, lock)
    assert NAME.encode() in kept(client)


async def test_a_recall_that_is_lost_comes_again(api: Api, server: Server, probe: redis.Redis) -> None:
    """With each look of who waits."""
    client, other = api.client(server.unix_url), api.client(server.unix_url)
    await pair(api, await keeper_of(api, client))
    queues = client._transport.queues
    hidden, queues.kept = queues.kept, {}  # as if the first recall came to nobody
    lock, job = wait_with(api, other)
    await until(api, lambda: queues.unknown, "the first recall")
    queues.kept = hidden
    assert await job.get(SOON) is True
    await api.get(lock.release())


async def test_a_client_that_is_forgotten_keeps_nothing(api: Api, server: Server, probe: redis.Redis) -> None:
    client = api.module.Client.from_url(server.unix_url)
    lock = await keeper_of(api, client)
    await pair(api, lock)
    assert kept(client)
    del client, lock
    gc.collect()
    await gone(api, probe)
    if api.is_async:
        await until(api, lambda: len(asyncio.all_tasks()) == 1, "its connection has ended")


PROGRAM = """
import asyncio, sys
import fastlock, fastlock.asyncio

def threads(url):
    client = fastlock.Client.from_url(url)
    lock = client.lock("sku", timeout=60, keep=300)
    while not client._transport.queues.kept:
        with lock: pass
    if sys.argv[3] == "exit":
        globals()["kept"] = client

async def tasks(url):
    client = fastlock.asyncio.Client.from_url(url)
    lock = client.lock("sku", timeout=60, keep=300)
    while not client._transport.queues.kept:
        async with lock: await asyncio.sleep(0)
    globals()["kept"] = client

asyncio.run(tasks(sys.argv[2])) if sys.argv[1] == "asyncio" else threads(sys.argv[2])
"""


async def test_a_program_that_ends_keeps_nothing(api: Api, server: Server, probe: redis.Redis) -> None:
    """Neither as its loop ends, nor as the interpreter does."""
    command = [sys.executable, "-c", PROGRAM, api.name, server.unix_url, "exit"]
    ended = subprocess.run(command, cwd=ROOT, timeout=60, capture_output=True, text=True, check=False)
    assert ended.returncode == 0 and not ended.stderr, ended.stderr
    assert not probe.exists(NAME)


@pytest.mark.parametrize("api", ["threads"], indirect=True)  # a running loop is not forked
@pytest.mark.parametrize("fork", [os.fork, ctypes.PyDLL(None).fork], ids=["os", "C"])
async def test_a_forked_child_has_nothing_of_what_its_parent_keeps(
    api: Api, server: Server, probe: redis.Redis, fork: Callable[[], int]
) -> None:
    client = api.client(server.unix_url)
    lock = await keeper_of(api, client)
    await pair(api, lock)
    heard = client._transport.keep_connection.sock.fileno()

    def exit_code_of_a_child() -> int:
        if (child := fork()) == 0:
            status = 1
            with contextlib.suppress(BaseException):
                status = int(client.lock(NAME, blocking=False).acquire() or bool(kept(client)))
                client.close()
                with contextlib.suppress(OSError):
                    status = status or int(stat.S_ISSOCK(os.fstat(heard).st_mode))
            os._exit(status)
        ends = os.pidfd_open(child)
        if not select.select([ends], [], [], SOON / 2)[0]:
            os.kill(child, signal.SIGKILL)
        os.close(ends)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    # Forked by C, while another thread waits for the interpreter, the child may never get that: it proves nothing then
    tries = 1 if fork is os.fork else 5
    codes = list(itertools.takewhile(bool, (exit_code_of_a_child() for _ in range(tries))))
    assert len(codes) < tries and set(codes) <= {-signal.SIGKILL}
    assert kept(client) and probe.exists(NAME)


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"keep": 0}, "keep must be at least 0.001"),
        ({"keep": -1.0}, "keep must be at least 0.001"),
        ({"keep": float("nan")}, "keep must be a finite number"),
        ({"keep": 1, "timeout": None}, "keep needs a timeout"),
        ({"keep": 1, "fence": True}, "keep and fence=True contradict"),
        ({"keep": 1, "fair": True}, "keep and fair=True contradict"),
        ({"keep": 1, "queue": False}, "keep and queue=False contradict"),
        ({"keep": 1, "auto_renew": True}, "keep and auto_renew=True contradict"),
    ],
)
async def test_settings_that_make_no_sense_are_refused(
    api: Api, server: Server, settings: dict[str, Any], what: str
) -> None:
    client = api.client(server.unix_url)
    with pytest.raises(ValueError, match=what):
        client.lock(NAME, **settings)
    with pytest.raises(TypeError, match="keep must be a number of seconds"):
        client.lock(NAME, keep="1")
    lock = client.lock(NAME, keep=1)
    with pytest.raises(ValueError, match="keep needs a timeout"):
        lock.timeout = None


async def test_a_key_that_was_lost_is_told_when_it_is_kept_no_longer(
    api: Api, server: Server, probe: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    """Somebody may have held it then."""
    client = api.client(server.unix_url)
    lock = await keeper_of(api, client)
    await pair(api, lock)
    probe.delete(NAME)
    await pair(api, lock)
    await api.get(client.close())
    assert (
        client.get_stats()["losses"] == 1
        and "was lost before it was given back (it was kept, and nobody held it)" in caplog.text
    )


async def test_a_name_that_was_broken_is_not_given_out(api: Api, server: Server, probe: redis.Redis) -> None:
    client = api.client(server.unix_url)
    lock = await keeper_of(api, client)
    await pair(api, lock)
    command = [sys.executable, "-m", "fastlock", "break", NAME, "--yes", "--url", server.unix_url]
    subprocess.run(command, cwd=ROOT, timeout=60, capture_output=True, check=True)
    await until(api, lambda: not kept(client), "it is told")
    other = api.client(server.unix_url).lock(NAME, timeout=LONG, thread_local=False)
    assert await api.get(other.acquire(blocking=False)) is True
    assert await api.get(lock.acquire(blocking=False)) is False
    await api.get(other.release())


@pytest.mark.parametrize("which", ["normal", "pubsub", None])
async def test_whichever_connection_breaks_the_name_is_free_in_time(
    api: Api, server: Server, probe: redis.Redis, which: str
) -> None:
    """In threads nobody reads on an idle connection: what is kept is released over another."""
    client = api.client(server.unix_url, client_name="keeper")
    await pair(api, await keeper_of(api, client))
    kinds = ["normal", "pubsub"] if which is None else [which]
    victims = [each["id"] for kind in kinds for each in probe.client_list(_type=kind) if each["name"] == "keeper"]
    for victim in victims:
        probe.client_kill_filter(_id=victim)
    assert victims or api.is_async
    lock, job = wait_with(api, api.client(server.unix_url))
    assert await job.get(SOON) is True
    await api.get(lock.release())


@two_servers
async def test_what_lapses_is_released_though_the_server_has_forgotten_the_scripts(
    api: Api, server: Server, probe: redis.Redis
) -> None:
    client = api.client(server.unix_url)
    lock = await keeper_of(api, client, SHORT)
    for _ in range(2):
        await pair(api, lock)
        probe.script_flush()
        await gone(api, probe)
    assert client.get_stats()["losses"] == 0


async def test_close_releases_all_of_very_many(api: Api, server: Server, probe: redis.Redis) -> None:
    client = api.client(server.unix_url)
    await keeper_of(api, client)
    for number in range(3000):
        await pair(api, client.lock(f"many:{number}", timeout=LONG, keep=KEEP))
    assert len(kept(client)) >= 3000
    await api.get(client.close())
    assert not probe.keys("many:*")


@pytest.mark.parametrize("refused", ["-@scripting", "-get"])
@pytest.mark.parametrize("server", ["valkey"], indirect=True)  # elsewhere each release is a script
async def test_who_lacks_a_right_leaves_nothing(api: Api, server: Server, probe: redis.Redis, refused: str) -> None:
    probe.acl_setuser("plain", enabled=True, nopass=True, keys="*", channels="*", commands=["+@all", refused])
    try:
        client = api.client(server.unix_url, username="plain", password="any")
        await pair(api, lock := await keeper_of(api, client, SHORT))
        await gone(api, probe)
        for name in "one", "two":  # the second goes over a connection that has sent the scripts
            await pair(api, client.lock(name, timeout=LONG, keep=KEEP))
            theirs = api.client(server.unix_url).lock(name, thread_local=False)
            assert await api.get(theirs.acquire(blocking_timeout=SOON)), "who waits has it recalled"
            await api.get(theirs.release())
        probe.set(NAME, "somebody else's")
        assert await api.get(lock.acquire(blocking=False)) is False
        probe.delete(NAME)
        await api.get(client.close())
    finally:
        probe.acl_deluser("plain")


async def test_a_name_that_was_recalled_is_not_kept_for_a_while(api: Api, server: Server, probe: redis.Redis) -> None:
    client = api.client(server.unix_url)
    lock = await keeper_of(api, client, blocking=False)
    await pair(api, lock)
    client._transport.queues.forget_at = math.inf  # not forgotten for the time that has passed
    found, job = wait_with(api, api.client(server.unix_url))
    assert await job.get(SOON) is True
    await api.get(found.release())
    await until(api, lambda: not kept(client), "it is noted that it was released")
    for _ in range(local_queue.JOINS - 1):
        await pair(api, lock)
        assert not kept(client)
    await pair(api, lock)
    await pair(api, lock)
    assert kept(client) == [NAME.encode()]


def test_a_client_goes_on_in_another_loop(server: Server, impl: str) -> None:
    client = fastlock.asyncio.Client.from_url(server.unix_url)

    async def use(close: bool) -> None:
        async with client.lock(NAME, timeout=LONG, keep=KEEP):
            pass
        if close:
            await client.close()

    for close in (False, True):
        loop = asyncio.new_event_loop()
        loop.run_until_complete(use(close))
        loop.close()


async def test_an_order_that_is_asked_for_later_counts(api: Api, server: Server, probe: redis.Redis) -> None:
    client = api.client(server.unix_url)
    lock = await keeper_of(api, client)
    await pair(api, lock)
    lock.fence = True
    assert (await pair(api, lock)).fence
    probe.delete("fastlock:fence:{" + NAME + "}")


def end_of_child(url: str) -> None:
    client = fastlock.Client.from_url(url)
    lock = client.lock(NAME, timeout=LONG, keep=KEEP)
    while not kept(client):
        with lock:
            pass
    globals()["client"] = client


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_a_process_of_multiprocessing_that_ends_keeps_nothing(
    impl: str, server: Server, probe: redis.Redis, method: str
) -> None:
    """It ends without what `atexit` has."""
    process = multiprocessing.get_context(method).Process(target=end_of_child, args=(server.unix_url,))
    process.start()
    process.join(60)
    assert process.exitcode == 0 and not probe.exists(NAME)


@pytest.mark.parametrize("api", ["asyncio"], indirect=True)
async def test_tasks_that_do_nothing_else_let_the_loop_run(api: Api, server: Server, probe: redis.Redis) -> None:
    client, other = api.client(server.unix_url), api.client(server.unix_url)
    lock = await keeper_of(api, client)
    stop = False

    async def spin() -> int:
        pairs = 0
        while not stop:
            await pair(api, lock)
            pairs += 1
        return pairs

    spinning = asyncio.create_task(spin())
    await until(api, lambda: client.get_stats()["kept_acquires"] > 1000, "they take it")
    found, job = wait_with(api, other)
    assert await job.get(SOON) is True
    await api.get(found.release())
    stop = True
    assert await spinning > 1000


@two_servers
async def test_never_two_holders(api: Api, server: Server, probe: redis.Redis) -> None:
    """Two clients fight for a name that both would keep, with several callers each."""
    inside, most, turns = 0, 0, 0
    clients = [api.client(server.unix_url) for _ in range(2)]
    locks = [await keeper_of(api, client) for client in clients]

    async def work(client: Any) -> None:
        nonlocal inside, most, turns
        lock = client.lock(NAME, timeout=LONG, keep=KEEP)
        for _ in range(100):
            await api.get(lock.acquire())
            inside += 1
            most = max(most, inside)
            await api.checkpoint()
            turns += 1
            inside -= 1
            await api.get(lock.release())

    jobs = [api.start(partial(work, client)) for client in clients for _ in range(3)]
    for job in jobs:
        await job.get(60)
    assert (most, turns) == (1, 600)
    for client, lock in zip(clients, locks, strict=True):
        await pair(api, lock)
        await api.get(client.close())
    await gone(api, probe)
