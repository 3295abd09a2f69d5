"""Users, passwords and permissions; and that no secret is ever shown.

README and docs name the permissions that a user needs: the tests try them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from support.apis import Api
from support.child_client import until
from support.holding import Holder

import fastlock
from fastlock._protocol import commands, describe, inventory, local_queue, renewal
from fastlock._protocol.lease import now, process_id
from fastlock._transport import aio, aio_connection, sync_connection, waiting
from fastlock.embedded import Server

SECRET = "corr3ct-h0rse"
WRONG = "b4ttery-st4ple"
SetUser = Callable[..., str]

# All commands that fastlock can send, but for fences, which need more.
NEEDED = {
    "valkey": "set get delifeq pttl exists command|info",
    "redis": "set get del pttl exists pexpire evalsha script|load",
    "floor": "set get del pttl exists pexpire evalsha script|load",
}
RENEWED = "evalsha script|load pexpire"
FENCED = ["+evalsha", "+script|load", "+time"]
QUEUED = "evalsha script|load del pexpire publish subscribe zadd zcard zpopmin zrange zrank zrem"
MADE = "evalsha script|load set get del pttl strlen getrange watch multi exec exists incr pexpire"  # once, refill
CLAIMED = "evalsha script|load set get pttl pexpire time"  # every, leader: what fences need
SHARED = (  # read-write locks, semaphores
    "evalsha script|load set get del exists type time persist pexpireat pexpire publish subscribe zadd zcard zincrby"
    " zrange zrangebyscore zrank zrem zrevrangebyscore zscore pttl"
)
DESCRIBED = "evalsha script|load type get pttl time zrange"  # describe
LISTED = f"{DESCRIBED} scan getrange"  # ls, watch
USEFUL = {"client", "config", "command", "info", "pubsub"}  # and not needed
KINDS = pytest.mark.parametrize(("server", "kind"), [(kind, kind) for kind in NEEDED], indirect=["server"])


@pytest.fixture
def set_user(server: Server, probe: redis.Redis) -> Iterator[SetUser]:
    """set_user("+get", "~a"): makes the user "locker" anew, with its password and these rules; returns its URL."""

    def set_it(*rules: str) -> str:
        probe.execute_command("ACL", "SETUSER", "locker", "reset", "on", f">{SECRET}", *rules)
        return f"unix://locker:{SECRET}@{server.path}"

    yield set_it
    probe.execute_command("ACL", "DELUSER", "locker")


# ------------------------------------------------------------------------------------------------------- permissions


async def everything(api: Api, client: Any, probe: redis.Redis) -> None:
    """Use everything that a client offers, but for fences."""
    lock, other = client.lock("app:a"), client.lock("app:a", sleep=0.002)
    assert await api.get(lock.acquire())
    assert await api.get(other.acquire(blocking=False)) is False
    assert await api.get(other.acquire(blocking_timeout=0.02)) is False
    assert await api.get(lock.extend(5)) and await api.get(lock.extend(5, replace_ttl=True))
    assert await api.get(lock.reacquire()) and await api.get(lock.owned()) and await api.get(lock.locked())
    await api.get(lock.release())
    endless = client.lock("app:endless", timeout=None)
    assert await api.get(endless.acquire())
    await api.get(endless.release())
    ended = client.lock("app:ended", timeout=0.15)
    assert await api.get(ended.acquire())
    probe.persist("app:ended")
    probe.pexpire("app:ended", 10_000)
    time.sleep(ended.lease.remaining)
    assert await api.get(ended.extend(5))
    await api.get(ended.release())
    leases = await api.get(client.acquire_many(["app:a", "app:b"]))
    assert await api.get(client.release_many(leases)) == [True, True]
    assert (await api.get(client.server_info()))["maxmemory_policy"] == ""


@KINDS
async def test_a_user_needs_these_permissions_and_no_more(
    api: Api, server: Server, kind: str, probe: redis.Redis, set_user: SetUser, no_leaks: Any
) -> None:
    allowed = [f"+{command}" for command in NEEDED[kind].split()]
    await everything(api, api.client(set_user("~app:*", *allowed)), probe)
    assert probe.keys() == []
    no_leaks.allow("fastlock:fence:*")
    fenced = api.client(set_user("~app:*", "~fastlock:fence:*", *allowed, *FENCED)).lock("app:a", fence=True)
    assert await api.get(fenced.acquire()) and fenced.lease.fence
    await api.get(fenced.release())


@KINDS
@pytest.mark.parametrize("scripts", [True, False], ids=["by script", "by single commands"])
async def test_a_user_needs_these_permissions_to_renew(
    api: Api,
    server: Server,
    kind: str,
    probe: redis.Redis,
    set_user: SetUser,
    scripts: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not scripts and kind != "valkey":
        pytest.skip("its other commands are scripts as well")
    monkeypatch.setattr(renewal, "DUE_PART", 0.01)
    allowed = [f"+{command}" for command in [*NEEDED[kind].split(), *(RENEWED.split() if scripts else [])]]
    client = api.client(set_user("~app:*", *allowed))
    locks = [client.lock(f"app:{i}", 5, auto_renew=True) for i in range(2)]
    leases = [await api.enter(lock) for lock in locks]
    await until(api, lambda: client.get_stats()["renewals"] >= 6, "renewals")
    assert not any(lease.lost.is_set() for lease in leases)
    for lock in locks:
        await api.leave(lock)


@KINDS
async def test_a_user_needs_these_permissions_to_wait_in_the_queue(
    api: Api, server: Server, kind: str, probe: redis.Redis, set_user: SetUser
) -> None:
    """A waiter enters the queue, is served by a message, and leaves the queue when it gives up."""
    allowed = [f"+{command}" for command in [*NEEDED[kind].split(), *QUEUED.split()]]
    probe.acl_log_reset()
    url = set_user("~app:*", "~fastlock:queue:*", "resetchannels", "&fastlock:*", *allowed)

    async def in_the_queue(count: int) -> None:
        end = time.monotonic() + 10
        while probe.zcard("fastlock:queue:{app:a}") != count:
            assert time.monotonic() < end, f"never {count}"
            await api.checkpoint()

    holder, client = (api.client(url) for _ in range(2))
    lock = holder.lock("app:a")
    await api.get(lock.acquire())
    assert await api.get(client.lock("app:a", blocking_timeout=0.03).acquire()) is False
    await in_the_queue(0)
    waiting = client.lock("app:a", thread_local=False)
    job = api.start(waiting.acquire)
    await in_the_queue(1)
    assert probe.get("app:a") == b"fl+" + lock.lease.token[3:], "the holder's token is marked"
    await api.get(lock.release())
    assert await job.get() and probe.get("app:a") == waiting.lease.token
    assert client.get_stats()["remote_handovers"] == 1 and not client._transport.queues.push_refused
    await api.get(waiting.release())
    refused = {entry["object"].partition("|")[0] for entry in probe.acl_log()}
    assert probe.keys() == [] and refused <= USEFUL, "only useful commands may be refused"


@KINDS
@pytest.mark.parametrize("fair", [True, False])
@pytest.mark.parametrize("timeout", [None, 10])
async def test_a_refused_acquire_leaves_no_key(
    api: Api, server: Server, kind: str, probe: redis.Redis, set_user: SetUser, fair: bool, timeout: float | None
) -> None:
    """Refused for lack of one right, or because the fence counter has the wrong type: a failed script is not rolled
    back."""
    allowed = {*f"{NEEDED[kind]} {QUEUED} time client|info client|kill info".split()}
    refused = set()
    for lacking in [*sorted(allowed), "the counter"]:
        rights = [f"+{command}" for command in sorted(allowed - {lacking})]
        url = set_user("~*", "resetchannels", "&fastlock:*", *rights)
        if lacking == "the counter":
            probe.sadd("fastlock:fence:{a}", "x")
        client = api.client(url)
        lock = client.lock("a", timeout=timeout, fence=True, fair=fair, blocking_timeout=0.5)
        try:
            assert await api.get(lock.acquire()), lacking
        except redis.ResponseError as error:
            refused.add(lacking)
            assert isinstance(error, redis.exceptions.NoPermissionError) == (lacking != "the counter"), lacking
            assert probe.get("a") is None and lock.lease is None, lacking
            assert lacking == "the counter" or "needs +evalsha +script|load +get" in shown_text(error), lacking
        await api.get(client.close())
        probe.flushall()
    assert {"the counter", "time", "evalsha", "set", "get"} <= refused


@KINDS
async def test_helpers_need_only_the_documented_rights(
    api: Api, server: Server, kind: str, probe: redis.Redis, set_user: SetUser
) -> None:
    rights = {*NEEDED[kind].split(), *QUEUED.split(), *MADE.split(), *CLAIMED.split()}
    kept = [f"~fastlock:{what}:*" for what in ("once", "load", "version", "every", "fence", "queue")]
    url = set_user("~app:*", *kept, "resetchannels", "&fastlock:*", *(f"+{right}" for right in sorted(rights)))
    client, other = api.client(url), api.client(url)

    async def make() -> str:
        return "x" * 100_000

    async def make_what_is_invalidated_meanwhile() -> str:
        await api.get(other.invalidate("app:long"))
        return await make()

    for stale in (0, 5):
        for load in (make_what_is_invalidated_meanwhile, make, make):
            assert len(await api.get(client.refill("app:long", api.native(load), 60, stale=stale))) == 100_000
        assert await api.get(client.invalidate("app:long")) is True
    for _ in range(2):
        assert len(await api.get(client.once("app:once", api.native(make), ttl=60))) == 100_000
    assert await api.get(client.forget("app:once")) is True
    for at_once in (True, False):
        async with api.within(client.every("app:job", 0.05, api.native(make), at_once=at_once)) as job:
            await until(api, lambda job=job: job.runs, "a run")
        assert job.last_error is None
    async with api.within(client.leader("app:leader")) as election:
        assert await api.get(election.wait(10)) is True
        async with api.within(other.leader("app:leader")) as second:
            await until(api, lambda: probe.exists("fastlock:queue:{app:leader}"), "its entry")
            await api.get(election.resign())
            assert await api.get(second.wait(10)) is True


@KINDS
async def test_shared_locks_need_only_the_documented_rights(
    api: Api, server: Server, kind: str, probe: redis.Redis, set_user: SetUser
) -> None:
    probe.execute_command("ACL", "LOG", "RESET")
    rights = [f"+{right}" for right in SHARED.split()]
    keys = [f"~fastlock:{what}:*" for what in ("queue", "size", "fence")]
    client, other = (api.client(set_user("~app:*", *keys, "resetchannels", "&fastlock:*", *rights)) for _ in range(2))
    for lock, next_lock in (
        (client.rw_lock("app:rw").write, other.rw_lock("app:rw").read),
        (client.rw_lock("app:rw").read, other.rw_lock("app:rw", prefer="writer").write),
        (client.semaphore("app:s", 2, n=2, auto_renew=True), other.semaphore("app:s", 2, timeout=None)),
    ):
        async with api.within(lock):
            assert await api.get(lock.extend(5)) and await api.get(lock.locked()) and await api.get(lock.owned())
            holder = Holder(api, next_lock)
            await until(api, lambda: probe.keys("fastlock:queue:*"), "its entry")
        await holder.entered()
        assert not client._transport.queues.push_refused
        await holder.leave()
    async with api.within(client.rw_lock("app:rw").write):
        assert await api.get(client.rw_lock("app:rw").read.acquire())
    await api.get(client.rw_lock("app:rw").read.release())
    await api.get(client.semaphore("app:s", 2).resize(3))
    await api.get(client.semaphore("app:s", 2).resize(None))
    refused = {entry["object"].partition("|")[0] for entry in probe.acl_log()}
    assert probe.keys() == [] and refused <= USEFUL, "only useful commands may be refused"


@KINDS
async def test_describe_needs_only_the_documented_rights(
    api: Api, server: Server, kind: str, probe: redis.Redis, set_user: SetUser
) -> None:
    """Without the right to list clients it is not known where a holder runs."""
    keys = [f"~fastlock:{what}:*" for what in ("queue", "fence", "size")]
    locks = [api.client(server.url).lock("app:a"), api.client(server.url).semaphore("app:s", 3)]
    for lock in locks:
        await api.enter(lock)
    for more in ([], ["client|list" if kind != "floor" else "client"]):
        rights = [f"+{command}" for command in [*DESCRIBED.split(), *more]]
        client = api.client(set_user("~app:*", *keys, *rights))
        for name in ("app:a", "app:s"):
            (holder,) = (await api.get(client.describe(name))).holders
            assert holder.process == process_id().decode() and holder.mine and holder.depth == 1
            assert (holder.pid, holder.connected) == ((os.getpid(), True) if more else (None, None))
        await api.get(client.close())
    client = api.client(set_user("~app:*", *keys, "+evalsha", "+script|load"))
    with pytest.raises(redis.exceptions.NoPermissionError) as refused:
        await api.get(client.describe("app:a"))
    assert "needs +evalsha +script|load +" in shown_text(refused.value)
    for lock in locks:
        await api.leave(lock)


@KINDS
async def test_operators_need_only_the_documented_rights(
    api: Api, server: Server, kind: str, probe: redis.Redis, set_user: SetUser
) -> None:
    keys = [f"~fastlock:{what}:*" for what in ("queue", "size", "fence")]
    locks = [api.client(server.url).lock("app:a"), api.client(server.url).rw_lock("app:b").read]
    for lock in locks:
        await api.enter(lock)
    listing = api.client(set_user("~app:*", *keys, *(f"+{command}" for command in LISTED.split())))
    cursor, names = await api.get(listing._transport.drive(inventory.scan(b"0", b"*", now)))
    assert (cursor, set(names)) == (b"0", {b"app:a", b"app:b"})
    breaks = [*DESCRIBED.split(), *QUEUED.split(), *SHARED.split()]
    client = api.client(set_user("~app:*", *keys, "resetchannels", "&fastlock:*", *(f"+{each}" for each in breaks)))
    for lock in locks:
        found = await api.get(client._transport.drive(describe.find(lock._key, now)))
        assert await api.get(client._transport.drive(inventory.break_locks(lock._key, found, now))) == 1
        with pytest.raises(fastlock.LockNotOwnedError):
            await api.get(lock.release())


def test_scripts_need_only_the_documented_rights() -> None:
    documented = {f"+{command}" for command in [*QUEUED.split(), *NEEDED["redis"].split(), "pubsub|numsub"]}
    for script in commands.SCRIPTS:
        more = [*MADE.split(), *CLAIMED.split(), *SHARED.split(), *LISTED.split(), "mget"]
        helpers = {f"+{command}" for command in more}
        assert {*script.rights.split()} <= documented | {*FENCED} | helpers, script.name
    assert commands.RELEASE_LUA.rights == "+evalsha +script|load +del +get"


@KINDS
@pytest.mark.parametrize("connections", [1, 2])
async def test_a_waiter_that_gives_up_reloads_forgotten_scripts(
    api: Api,
    server: Server,
    kind: str,
    probe: redis.Redis,
    set_user: SetUser,
    monkeypatch: pytest.MonkeyPatch,
    connections: int,
) -> None:
    """No caller waits for the LEAVE command, EVAL is not allowed, and other connections may be used than the one on
    which the command was refused."""

    def post(connection: Any, undo: Any) -> None:
        if not forgotten:  # not before: the last recheck would load the scripts
            forgotten.append(probe.script_flush())
        real(connection, undo)

    connection: Any = sync_connection.Connection if api.name == "threads" else aio_connection.AsyncConnection
    real, forgotten = connection.post, []
    monkeypatch.setattr(connection, "post", post)
    allowed = [f"+{command}" for command in [*NEEDED[kind].split(), *QUEUED.split()]]
    client = api.client(set_user("~*", "resetchannels", "&fastlock:*", *allowed))
    probe.set("a", "fl:" + "0" * 32)
    job = api.start(lambda: client.lock("a", blocking_timeout=0.3).acquire())
    while not probe.zcard("fastlock:queue:{a}"):
        await api.checkpoint()
    if connections > 1:  # of threads: the waiter has the first connection
        await api.get(client.lock("b").locked())
    assert await job.get() is False and forgotten
    await api.get(client.lock("a").locked())
    end = time.monotonic() + 5
    while probe.zcard("fastlock:queue:{a}"):
        await api.get(client.lock("a").locked())
        assert time.monotonic() < end, "its entry stays until the queue expires"


@pytest.mark.parametrize("server", ["redis", "floor"], indirect=True)
@pytest.mark.parametrize("missing", ["evalsha script|load", "script|load", None])
async def test_a_user_that_may_not_release_is_warned_on_connect(
    api: Api,
    server: Server,
    probe: redis.Redis,
    set_user: SetUser,
    caplog: pytest.LogCaptureFixture,
    missing: str | None,
) -> None:
    needed = {*NEEDED["redis"].split(), *QUEUED.split()} - {*(missing or "").split()}
    rights = [f"+{command}" for command in needed]
    lock = api.client(set_user("~*", *rights)).lock("a")
    with contextlib.suppress(redis.exceptions.ResponseError):  # below 7.0 the user may not acquire either
        await api.get(lock.acquire())
    warnings = [record.getMessage() for record in caplog.records if "may refuse to release" in record.getMessage()]
    assert len(warnings) == (missing is not None), warnings
    assert all("needs +evalsha +script|load +" in text and server.path in text for text in warnings)
    probe.flushall()


@KINDS
async def test_who_may_not_hear_recalls_keeps_nothing_and_is_told_once(
    api: Api, server: Server, kind: str, set_user: SetUser, caplog: pytest.LogCaptureFixture
) -> None:
    client = api.client(set_user("~*", *[f"+{command}" for command in [*NEEDED[kind].split(), "evalsha"]]))
    lock = client.lock("a", keep=60, thread_local=False)
    told = lambda: [each.getMessage() for each in caplog.records if "kept" in each.getMessage()]  # noqa: E731
    for _ in range(20):
        await api.get(lock.acquire())
        await api.get(lock.release())
        await until(api, told, "it is told")
    (text,) = told()
    assert "needs +subscribe and the channels &fastlock:keep:*" in text and client.get_stats()["kept_acquires"] == 0


@KINDS
async def test_a_lasting_refusal_is_logged_once_per_client(
    api: Api, server: Server, kind: str, probe: redis.Redis, set_user: SetUser, caplog: pytest.LogCaptureFixture
) -> None:
    allowed = [f"+{command}" for command in [*NEEDED[kind].split(), *QUEUED.split()] if command != "zpopmin"]
    client = api.client(set_user("~*", "resetchannels", "&fastlock:*", *allowed))
    for _ in range(3):
        lock = client.lock("a", thread_local=False)
        await api.get(lock.acquire())
        probe.set("a", commands.as_contended(lock.lease.token), keepttl=True)
        await api.get(lock.release())
    (record,) = caplog.records
    assert record.levelname == "WARNING" and server.path in record.getMessage()
    assert "+zpopmin" in record.getMessage() and "refuses to hand" in record.getMessage()


@pytest.fixture
def quick_rechecks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiters recheck often: the next holder gets no message here, as the user that releases may not publish."""
    for module in (local_queue, waiting, aio):
        monkeypatch.setattr(module, "RECHECK_SECONDS", 0.02)


WARNED = ("all", "zcard", "zpopmin")


@KINDS
@pytest.mark.parametrize("missing", ["all", "zpopmin", "zcard", "publish", "zadd", "zrem"])
async def test_a_user_without_queue_rights_waits_and_releases(
    api: Api,
    server: Server,
    kind: str,
    probe: redis.Redis,
    set_user: SetUser,
    quick_rechecks: None,
    caplog: pytest.LogCaptureFixture,
    missing: str,
) -> None:
    """A script is refused only when it runs the command, which old servers report in words of their own."""
    queued = [] if missing == "all" else [command for command in QUEUED.split() if command != missing]
    allowed = [*{f"+{command}" for command in [*NEEDED[kind].split(), *queued]}, *FENCED]
    url = set_user("~*", "resetchannels", "&fastlock:*", *allowed)
    client, others = api.client(url), api.client(server.url)

    async def take(lock: Any) -> int | None:
        assert await api.get(lock.acquire()) is True
        fence: int | None = lock.lease.fence
        await api.get(lock.release())
        return fence

    def lock_of(client: Any, **settings: Any) -> Any:
        return client.lock("a", sleep=0.002, thread_local=False, **settings)

    async def until_contended(lease: Any) -> None:
        end = time.monotonic() + 10
        while probe.get("a") != commands.as_contended(lease.token):
            assert time.monotonic() < end, "the holder's token is not marked"
            await api.checkpoint()

    theirs = lock_of(others)
    await api.get(theirs.acquire())
    jobs = [api.start(lambda given=given: take(lock_of(client, **given))) for given in ({}, {"fence": True})]
    while client.get_stats()["commands"] < 20:  # they ask again and again
        await api.checkpoint()
    if missing not in ("all", "zadd", "zcard", "zrem"):
        await until_contended(theirs.lease)
    await api.get(theirs.release())
    assert [fence is not None for fence in [await job.get() for job in jobs]] == [False, True]

    ours = lock_of(client)
    await api.get(ours.acquire())
    (also,) = await api.get(client.acquire_many(["b"]))
    job = api.start(lambda: take(lock_of(others)))
    await until_contended(ours.lease)
    assert await api.get(ours.extend(5)) and await api.get(ours.reacquire()) and await api.get(ours.owned())
    await api.get(ours.release())
    await job.get()
    if missing in WARNED:
        (text,) = {record.getMessage() for record in caplog.records}
        assert "refuses to hand a lock over" in text and "its user needs +evalsha +script|load" in text

    batch = await api.get(client.acquire_many(["a", "c"]))
    job = api.start(lambda: take(lock_of(others)))
    await until_contended(batch[0])
    assert await api.get(client.release_many([*batch, also])) == [True] * 3
    await job.get()
    await api.get(client.close())
    assert [key for key in probe.scan_iter() if not key.startswith(b"fastlock:")] == []


@KINDS
async def test_no_answer_is_made_up_where_a_command_is_forbidden(
    api: Api, server: Server, kind: str, probe: redis.Redis, set_user: SetUser
) -> None:
    """For each command that is forbidden: what a call returns or raises is still true."""
    commands = NEEDED[kind].split()
    for missing in commands:
        allowed = [f"+{command}" for command in commands if command != missing]
        client = api.client(set_user("~app:*", *allowed))
        probe.flushall()
        probe.script_flush()
        lock = client.lock("app:a")
        try:
            acquired = await api.get(lock.acquire(blocking=False))
        except redis.exceptions.ResponseError:
            assert lock.lease is None
            probe.delete("app:a")
            continue
        assert acquired and probe.get("app:a") == lock.lease.token, missing
        for question in (lock.locked, lock.owned, lambda lock=lock: lock.extend(5), lock.reacquire):
            with contextlib.suppress(redis.exceptions.ResponseError):
                assert await api.get(question()) is True, missing
        try:
            await api.get(lock.release())
        except redis.exceptions.ResponseError:
            assert probe.get("app:a") == lock.lease.token, (
                f"without {missing}: the release failed, so the lock is still held"
            )
        else:
            assert probe.keys() == [], missing
        probe.delete("app:a", "app:b")
        with contextlib.suppress(redis.exceptions.ResponseError):
            leases = await api.get(client.acquire_many(["app:a", "app:b"]))
            assert probe.dbsize() == 2 and None not in leases, missing
            assert await api.get(client.release_many(leases)) == [True, True], missing
            assert probe.keys() == [], missing
        probe.flushall()


async def test_a_forbidden_name_is_refused_and_the_client_still_works(
    api: Api, server: Server, probe: redis.Redis, set_user: SetUser, no_leaks: Any
) -> None:
    client = api.client(set_user("~app:*", "+@all"))
    for call in (
        client.lock("other").acquire,
        lambda: client.acquire_many(["app:a", "other"]),
        client.lock("other").owned,
    ):
        with pytest.raises(redis.exceptions.NoPermissionError):
            await api.get(call())
    lock = client.lock("app:a")
    assert await api.get(lock.acquire(blocking=False)), "the refused batch must have released what it had"
    await api.get(lock.release())


async def test_losing_permissions_leaves_a_held_lock_held(
    api: Api, server: Server, probe: redis.Redis, set_user: SetUser, no_leaks: Any
) -> None:
    client = api.client(set_user("~*", "+@all"))
    lock = client.lock("a")
    assert await api.get(lock.acquire())
    probe.execute_command("ACL", "SETUSER", "locker", "resetkeys", "~b")
    for call in (lock.release, lambda: lock.extend(5), lock.owned):
        with pytest.raises(redis.exceptions.ResponseError) as caught:
            await api.get(call())
        assert not isinstance(caught.value, redis.exceptions.LockError)
    assert lock.lease is not None and probe.get("a") == lock.lease.token
    probe.execute_command("ACL", "SETUSER", "locker", "~*")
    await api.get(lock.release())


# ------------------------------------------------------------------------------------------------------ credentials


async def test_wrong_credentials_are_an_authentication_error(
    api: Api, server: Server, probe: redis.Redis, set_user: SetUser, no_leaks: Any
) -> None:
    set_user("~*", "+@all")
    client = api.client(f"unix://locker:{WRONG}@{server.path}")
    for _ in range(2):
        with pytest.raises(redis.exceptions.AuthenticationError):
            await api.get(client.lock("a").acquire())
    probe.execute_command("ACL", "SETUSER", "locker", f">{WRONG}")
    lock = client.lock("a")
    assert await api.get(lock.acquire())
    await api.get(lock.release())


@pytest.mark.parametrize("kind", list(NEEDED))
async def test_a_server_with_a_password_requires_it(api: Api, start_server: Callable[..., Server], kind: str) -> None:
    server = start_server(kind, tcp=True, password="sp ce/ü:@#%")
    for url in (f"unix://{server.path}", f"redis://127.0.0.1:{server.port}"):
        with pytest.raises(redis.exceptions.AuthenticationError):
            await api.get(api.client(url).lock("a").acquire())
        lock = api.client(url, password="sp ce/ü:@#%").lock("a")
        assert await api.get(lock.acquire())
        await api.get(lock.release())
    for url in (server.unix_url, server.tcp_url):
        assert await api.get(api.client(url).lock("a").locked()) is False
    given = redis.UsernamePasswordCredentialProvider("default", "sp ce/ü:@#%")
    assert await api.get(api.client(f"unix://{server.path}", credential_provider=given).lock("a").locked()) is False


# ----------------------------------------------------------------------------------------------------------- secrets


def shown_text(error: BaseException) -> str:
    """All that a log would show of an exception and of its causes."""
    return "".join(traceback.format_exception(error)) + repr(error) + str(vars(error))


BAD_URLS = [
    f"redis://user:{SECRET}@localhost:99999/0",
    f"redis://user:{SECRET}@localhost:port/0",
    f"redis://user:{SECRET}@localhost:6379/db",
    f"redis://:1234/{SECRET}@localhost:6379/0",
    f"redis://:1234#{SECRET}@localhost:6379/0",
    f"redis://:1234?{SECRET}@localhost:6379/0",
    f"redis://:12[34{SECRET}@localhost:6379/0",
    f"redis://user:{SECRET}@localhost:6379/0?db=1&db=2",
    f"redis://localhost?password={SECRET}&password={SECRET}",
    f"redis://user:{SECRET}@local host:6379/0",
    f"unix://user:{SECRET}@/nowhere?db=x",
    f"unix://user:{SECRET}@",
    f"http://user:{SECRET}@localhost",
    f"user:{SECRET}@localhost",
    f"redis://user:{SECRET}@localhost?nonsense={SECRET}",
    f"redis://user:{SECRET}@localhost?socket_timeout=soon",
    f"redis://user:{SECRET}@localhost?max_connections=many",
]


@pytest.mark.parametrize("url", BAD_URLS, ids=range(len(BAD_URLS)))
async def test_a_bad_url_is_refused_without_repeating_a_password(
    api: Api, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG), pytest.raises((ValueError, TypeError)) as caught:
        api.client(url)
    assert SECRET not in shown_text(caught.value) and SECRET not in caplog.text


async def test_no_password_is_ever_shown(
    api: Api, server: Server, probe: redis.Redis, set_user: SetUser, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    shown: list[str] = []
    url = set_user("~app:*", "+@all", "-config")
    for bad in (
        url.replace(SECRET, WRONG),
        f"unix://nobody:{SECRET}@{server.path}",
        f"unix://:{SECRET}@{server.path}nowhere",
        f"redis://:{SECRET}@127.0.0.1:1/0",
    ):
        client = api.client(bad)
        lock = client.lock("app:a")
        with pytest.raises(redis.exceptions.ConnectionError) as caught:  # AuthenticationError is one
            await api.get(lock.acquire())
        shown += [shown_text(caught.value), repr(client), str(client), repr(lock), repr(vars(client))]
    client = api.client(url)
    lock = client.lock("app:a")
    await api.get(lock.acquire())
    with pytest.raises(redis.exceptions.NoPermissionError) as refused:
        await api.get(client.lock("other").acquire())
    shown += [shown_text(refused.value), repr(client), repr(vars(client)), repr(lock), repr(lock.lease)]
    shown.append(str(await api.get(client.server_info())))
    await api.get(lock.release())
    await api.get(client.close())
    with pytest.raises(fastlock.ClientClosedError) as closed:
        await api.get(lock.acquire())
    shown += [shown_text(closed.value), repr(client), caplog.text]
    everything_shown = "\n".join(shown)
    assert SECRET not in everything_shown and WRONG not in everything_shown
    assert server.path in everything_shown, "the server's address may be shown, and helps"
