"""Names reach the server unchanged; invalid settings are refused with the argument's name, before anything is sent.

The server itself counts what was sent.
"""

from __future__ import annotations

import array
import contextlib
import decimal
import math
import time
from collections.abc import Callable
from typing import Any

import pytest
import redis
import redis.asyncio
from support.apis import Api

import fastlock
import fastlock.asyncio
from fastlock._protocol import commands
from fastlock.embedded import Server

pytestmark = pytest.mark.usefixtures("no_leaks")

# ---------------------------------------------------------------------------------------------------------------- names

NAMES = {
    "text": ("sku:42", b"sku:42"),
    "utf8": ("ключ 鍵 🔑", "ключ 鍵 🔑".encode()),
    "nul": ("a\0b", b"a\0b"),
    "crlf": (b"a\r\n$3\r\nfoo\r\n", b"a\r\n$3\r\nfoo\r\n"),
    "braces": ("{tag}:{x}%s%d{}", b"{tag}:{x}%s%d{}"),
    "spaces": (" a  b ", b" a  b "),
    "binary": (bytes(range(256)), bytes(range(256))),
    "bytearray": (bytearray(b"\xff\xfe"), b"\xff\xfe"),
    "memoryview": (memoryview(b"--view--")[2:6], b"view"),
    "strided": (memoryview(b"a-b-c-")[::2], b"abc"),
    "items": (memoryview(array.array("H", [1, 2])), array.array("H", [1, 2]).tobytes()),
    "longest": ("n" * 65536, b"n" * 65536),
}


@pytest.mark.parametrize(("name", "key"), NAMES.values(), ids=NAMES)
async def test_name_reaches_the_server_unchanged_in_every_command(
    api: Api, server: Server, probe: redis.Redis, name: Any, key: bytes
) -> None:
    client = api.client(server.unix_url)
    lock = client.lock(name)
    assert await api.get(lock.acquire())
    assert probe.keys() == [key] and probe.get(key) == lock.lease.token
    assert lock.lease.name is name and lock.name is name
    assert await api.get(client.lock(key).acquire(blocking=False)) is False, (
        "bytes and text of one name are the same lock"
    )
    assert await api.get(lock.owned()) and await api.get(lock.locked()) and await api.get(lock.extend(10))
    assert probe.pttl(key) > 10_000 and probe.keys() == [key]
    await api.get(lock.release())
    assert probe.keys() == []
    leases = await api.get(client.acquire_many([name, b"another"]))
    assert sorted(probe.keys()) == sorted([key, b"another"])
    assert await api.get(client.release_many(leases)) == [True, True]
    assert probe.keys() == []


@pytest.mark.parametrize(("name", "key"), NAMES.values(), ids=NAMES)
async def test_name_reaches_the_server_unchanged_where_others_wait(
    api: Api, server: Server, probe: redis.Redis, name: Any, key: bytes
) -> None:
    """The key of the queue has the same bytes, in a hash tag if the name has none."""
    lock, other = api.client(server.unix_url).lock(name), api.client(server.unix_url).lock(name)
    await api.get(lock.acquire())
    waiting = api.start(other.acquire)
    end = time.monotonic() + 20
    while len(probe.keys()) < 2:
        assert time.monotonic() < end, "no queue"
        await api.checkpoint()
    assert sorted(probe.keys()) == sorted([key, commands.queue_key(key)]) and probe.zcard(commands.queue_key(key)) == 1
    assert await api.get(lock.owned()) and await api.get(lock.extend(10))
    await api.get(lock.release())
    assert await waiting.get() is True and probe.keys() == [key]
    probe.delete(key)


@pytest.mark.parametrize(
    ("settings", "given"),
    [({}, {}), ({"fair": True}, {}), ({}, {"token": b"given"}), ({"fair": True}, {"token": b"given"})],
)
async def test_fair_waiter_has_its_own_entry_and_a_given_token_polls(
    api: Api, server: Server, settings: dict[str, Any], given: dict[str, Any]
) -> None:
    lock = api.client(server.unix_url).lock("a", **settings)
    arguments = {"sleep": None, "blocking": None, "blocking_timeout": None, "token": None}
    acquire = lock._acquire_with(**{**arguments, **given})
    assert (acquire.alone, acquire.polls) == (bool(settings), bool(given))
    assert (lock._new_acquire().alone, lock._new_acquire().polls) == (bool(settings), False)


async def test_name_is_copied_from_a_mutable_buffer(api: Api, server: Server, probe: redis.Redis) -> None:
    name = bytearray(b"before")
    lock = api.client(server.unix_url).lock(name)
    name[:] = b"after!"
    await api.get(lock.acquire())
    assert probe.keys() == [b"before"]
    await api.get(lock.release())


async def test_changed_settings_apply_from_then_on(api: Api, server: Server, probe: redis.Redis) -> None:
    lock = api.client(server.unix_url).lock("before")
    lock.name, lock.timeout, lock.sleep, lock.blocking_timeout = "after", 60, 1.5, 30
    assert await api.get(lock.acquire())
    assert probe.keys() == [b"after"] and 10_000 < probe.pttl("after") <= 60_000
    assert lock._new_acquire().sleep == 1.5 and "60" in repr(lock)
    kept = lock._client.lock("after", keep=2.5, confirm_release=False)
    assert "keep 2.5, confirm_release False" in repr(kept) and "keep" not in repr(lock)
    other = lock._client.lock("after", blocking_timeout=60)
    other.blocking_timeout = 0.01
    assert await api.get(other.acquire()) is False
    await api.get(lock.release())
    lock.timeout = None
    assert await api.get(lock.acquire()) and probe.pttl("after") == -1
    await api.get(lock.release())
    wrong: dict[str, Any] = {"name": "", "timeout": 0, "sleep": "soon", "blocking_timeout": -1}
    for name, value in wrong.items():
        before = getattr(lock, name)
        with pytest.raises((ValueError, TypeError), match=name):
            setattr(lock, name, value)
        assert getattr(lock, name) == before


# ------------------------------------------------------------------------------------------------------------- settings


def commands_sent(probe: redis.Redis) -> int:
    """How many commands the server has executed, with this one."""
    return int(probe.info("stats")["total_commands_processed"])


class Bad:
    """A call that must be refused, the exception it must raise, and the argument that its message must name."""

    def __init__(self, call: Callable[[Any], Any], error: type[Exception], named: str) -> None:
        self.call, self.error, self.named = call, error, named


def lock_settings(argument: str, values: list[Any], error: type[Exception]) -> list[Bad]:
    return [Bad(lambda client, v=v: client.lock("a", **{argument: v}), error, argument) for v in values]


def acquire_settings(argument: str, values: list[Any], error: type[Exception]) -> list[Bad]:
    return [Bad(lambda client, v=v: client.lock("a").acquire(**{argument: v}), error, argument) for v in values]


NO_NUMBER = [True, False, "1", b"1", [1], decimal.Decimal(1), 1j]
NOT_FINITE = [math.nan, math.inf, -math.inf]
NO_LEASE = [0, 0.0, -0.0, -1, -0.001, 0.0009, 5e-324, *NOT_FINITE, 2**53, 9.1e12, 1e300, 10**400]
NO_WAIT = [-1, -0.001, *NOT_FINITE]
NO_NAME = [
    "",
    b"",
    memoryview(b""),
    "n" * 65537,
    b"n" * 65537,
    "é" * 40_000,
    "\ud800",
    "fastlock:fence:{a}",
    "fastlock:queue:{a}",
    b"fastlock:x",
]
NO_BYTES = [None, 5, 1.5, ["a"], object()]

URL = "redis://localhost:1"
BAD = [
    *lock_settings("timeout", NO_LEASE, ValueError),
    *lock_settings("timeout", NO_NUMBER, TypeError),
    *lock_settings("sleep", NO_WAIT, ValueError),
    *lock_settings("sleep", [None, *NO_NUMBER], TypeError),
    *lock_settings("blocking_timeout", NO_WAIT, ValueError),
    *lock_settings("blocking_timeout", NO_NUMBER, TypeError),
    *acquire_settings("sleep", NO_WAIT, ValueError),
    *acquire_settings("sleep", NO_NUMBER, TypeError),
    *acquire_settings("blocking_timeout", NO_WAIT, ValueError),
    *acquire_settings("blocking_timeout", NO_NUMBER, TypeError),
    *acquire_settings("token", ["", b"", "t" * 65537, "\udcff"], ValueError),
    *acquire_settings("token", [5, ["t"], True], TypeError),
    *[Bad(lambda client, v=v: client.lock(v), ValueError, "name") for v in NO_NAME],
    *[Bad(lambda client, v=v: client.lock(v), TypeError, "name") for v in NO_BYTES],
    *[Bad(lambda client, v=v: client.acquire_many(["ok", v]), ValueError, "name") for v in NO_NAME],
    *[Bad(lambda client, v=v: client.acquire_many(["ok", v]), TypeError, "name") for v in NO_BYTES],
    *[Bad(lambda client, v=v: client.acquire_many(["ok"], timeout=v), ValueError, "timeout") for v in NO_LEASE],
    *[Bad(lambda client, v=v: client.acquire_many(["ok"], timeout=v), TypeError, "timeout") for v in NO_NUMBER],
    *[
        Bad(lambda client, v=v: client.acquire_many(v), TypeError, "names")
        for v in ("ab", b"ab", memoryview(b"ab"), None, 5)
    ],
    *[Bad(lambda client, v=v: client.acquire_many(v), ValueError, "names") for v in (["a", "b", "a"], ["a", b"a"])],
    *[
        Bad(lambda client, v=v: client.release_many(v), TypeError, "leases")
        for v in (None, 5, ["a"], [b"t"], "ab", [object()])
    ],
    Bad(lambda client: client.lock("a", blocking=False, blocking_timeout=1), ValueError, "blocking_timeout"),
    Bad(lambda client: client.lock("a", blocking=False).acquire(blocking_timeout=1), ValueError, "blocking_timeout"),
    Bad(lambda client: client.lock("a").acquire(blocking=False, blocking_timeout=1), ValueError, "blocking_timeout"),
    Bad(lambda client: client.lock("a").acquire(timeout=1), TypeError, "timeout"),
    Bad(lambda client: client.lock("a", time_out=1), TypeError, "time_out"),
    Bad(lambda client: client.lock("a", keep=0), ValueError, "keep must be at least 0.001 seconds, or None"),
    Bad(lambda client: client.lock("a", confirm_release="no"), TypeError, "confirm_release must be True or False"),
    *(
        Bad(lambda client, flag=flag, value=value: client.lock("a", **{flag: value}), TypeError, f"{flag} must be True")
        for flag in ("fair", "fence", "queue", "confirm_release", "auto_renew")
        for value in ("no", 1)
    ),
    Bad(lambda client: type(client).from_url(URL, confirm_release=None), TypeError, "confirm_release must be True"),
    *(
        Bad(lambda client, value=value: client.lock("a", auto_renew=value), TypeError, "auto_renew must be True")
        for value in (0, None, "")
    ),
    Bad(
        lambda client: type(client).from_url(URL + "?confirm_release=0"), TypeError, "of the client, as in Client.from"
    ),
    Bad(lambda client: type(client).from_url(URL + "?keep=3"), TypeError, "a setting of each lock"),
    Bad(lambda client: type(client)(queue="no"), TypeError, "queue must be True"),
    Bad(lambda client: type(client).from_url(URL, timeout=3), TypeError, "client.lock(name, timeout=...)"),
    Bad(lambda client: type(client)(timeout=3), TypeError, "client.lock(name, timeout=...)"),
    Bad(lambda client: type(client).from_url(URL, keep=3), TypeError, "client.lock(name, keep=...)"),
    Bad(lambda client: type(client)(fair=True), TypeError, "client.lock(name, fair=...)"),
    Bad(lambda client: client.lock(), TypeError, "name"),
]


async def test_invalid_argument_is_named_and_nothing_is_sent(api: Api, server: Server, probe: redis.Redis) -> None:
    client = api.client(server.unix_url)
    for name in ("a", "b"):  # connect, and send what follows the handshake
        assert await api.get(client.lock(name).locked()) is False
    before = commands_sent(probe)
    for number, bad in enumerate(BAD):
        with pytest.raises(bad.error) as caught:
            await api.get(bad.call(client))
        assert bad.named in str(caught.value), f"number {number} of BAD"
        assert len(str(caught.value)) < 1000, "the message must not repeat a long value"
    assert commands_sent(probe) == before + 1


EXTENSIONS = [*[(v, ValueError) for v in NO_LEASE], *[(v, TypeError) for v in (None, *NO_NUMBER)]]


async def test_invalid_extension_leaves_the_lease_unchanged(api: Api, server: Server, probe: redis.Redis) -> None:
    lock = api.client(server.unix_url).lock("a")
    await api.get(lock.acquire())
    before, deadline = commands_sent(probe), lock.lease._deadline
    for value, error in EXTENSIONS:
        for replace in (False, True):
            with pytest.raises(error, match="additional_time"):
                await api.get(lock.extend(value, replace_ttl=replace))
    assert commands_sent(probe) == before + 1 and lock.lease._deadline == deadline
    await api.get(lock.release())


@pytest.mark.parametrize("seconds", [0.001, 0.0015, 0.29, 1, 1.0, 3600, 86_400 * 365, 2**53 / 1000], ids=str)
async def test_lease_is_never_a_millisecond_longer_than_asked(
    api: Api, server: Server, probe: redis.Redis, seconds: float
) -> None:
    """0.29 * 1000 is 289.99..., 2**53 ms has to survive scripts."""
    lock = api.client(server.unix_url).lock("a", timeout=seconds)
    with probe.monitor() as monitor:
        acquired = await api.get(lock.acquire(blocking=False))  # False: the lease of 1 ms ended before the reply
        for event in monitor.listen():
            args = event["command"].split()
            if args[0].upper() == "SET":
                break
    assert int(args[args.index("PX") + 1]) == int(seconds * 1000 + 1e-6)
    if acquired:
        with contextlib.suppress(fastlock.LockNotOwnedError):  # it may have ended by now
            await api.get(lock.release())


async def test_extreme_valid_settings_work(api: Api, server: Server, probe: redis.Redis) -> None:
    client = api.client(server.unix_url)
    longest = client.lock("a", timeout=2**53 / 1000, sleep=0, blocking_timeout=0)
    assert await api.get(longest.acquire())
    assert 2**53 - 60_000 < probe.pttl("a") <= 2**53
    assert await api.get(longest.extend(2**53 / 1000, replace_ttl=True)) and await api.get(longest.reacquire())
    assert probe.pttl("a") > 2**53 - 60_000
    brief = client.lock("a", timeout=0.001, sleep=0, blocking_timeout=0.003)
    assert await api.get(brief.acquire()) is False
    await api.get(longest.release())


SETTINGS = {"name", "timeout", "sleep", "blocking", "blocking_timeout", "thread_local", "raise_on_release_error"}
METHODS = {"acquire", "release", "extend", "reacquire", "locked", "owned", "lease"}


@pytest.mark.parametrize("module", [fastlock, fastlock.asyncio], ids=["threads", "asyncio"])
def test_a_lock_shows_what_is_for_its_user_only(module: Any) -> None:
    with_settings = module.Client().lock("a")
    assert public(with_settings) == SETTINGS | METHODS | {"fence", "fair", "queue", "confirm_release", "keep"}
    redis_client = redis.asyncio.Redis() if module is fastlock.asyncio else redis.Redis()
    theirs = {"redis", "local"}  # as redis-py's own lock has them
    assert public(module.Lock(redis_client, "a")) == SETTINGS | METHODS | theirs | {
        "fence",
        "fair",
        "queue",
        "confirm_release",
        "keep",
    }


def public(thing: object) -> set[str]:
    """Its public names; those in whose place redis-py's scripts would be raise AttributeError, and do not count."""
    return {name for name in dir(thing) if not name.startswith("_") and hasattr(thing, name)}
