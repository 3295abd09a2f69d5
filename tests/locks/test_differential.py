"""redis-py's lock and the drop-in side by side on two names of one server: random calls, the same outcomes.

The table in docs/drop-in.md lists every intended difference: only its rows excuse a difference here, by their names,
and a scene of its own shows that each row is true.
"""

from __future__ import annotations

import inspect
import random
import re
import threading
import time
from collections.abc import Awaitable, Callable
from decimal import Decimal
from fractions import Fraction
from operator import methodcaller
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from support.apis import Api
from support.redispy import ending, module, theirs

from fastlock._protocol.commands import token_matches
from fastlock.embedded import Server

pytestmark = pytest.mark.usefixtures("impl")
TABLE = Path(__file__).resolve().parents[2] / "docs" / "drop-in.md"
ROWS = set(re.findall(r"^\| `([a-z-]+)` \|", TABLE.read_text(), re.MULTILINE))
NEAR = 2000  # milliseconds by which two leases may differ that were set one after the other
# Seconds: a lease that outlives a walk; a wait for a name that stays held; a wait that a reply never takes.
LONG, SHORT, ENOUGH = 1000, 0.02, 20
Outcome = tuple[str, Any]


def outcome_of(error: Exception) -> Outcome:
    """The outcome, by redis-py's exception types: code that catches them must catch ours."""
    for kind in (redis.exceptions.LockNotOwnedError, redis.exceptions.LockError):
        if isinstance(error, kind):
            return "raises", kind.__name__
    return "raises", type(error).__name__


async def outcome(api: Api, call: Callable[[], Any]) -> Outcome:
    try:
        return "returns", await api.get(call())
    except Exception as error:
        return outcome_of(error)


# ------------------------------------------------------------------------------------------------------- random calls

SETTINGS: dict[str, list[Any]] = {
    "timeout": [None, LONG, LONG + 0.5, Decimal(LONG), Fraction(LONG), 0],
    "sleep": [0.001, 0.01, Fraction(1, 100), False, None],
    "blocking": [True, False, 0, 1, None],
    "blocking_timeout": [None, 0, ENOUGH, -1, Fraction(ENOUGH), False, float("inf"), 1e12],
    "thread_local": [True, False, 0],
    "raise_on_release_error": [True, False],
}
ARGUMENTS: dict[str, list[Any]] = {
    "sleep": [0.001, Fraction(1, 100), None],
    "blocking": [True, False, 0, 1, None],
    "blocking_timeout": [None, 0, ENOUGH, -1, Fraction(ENOUGH), False, float("inf")],
    "token": [None, "text", "tökén", b"bytes", 5, 2.5, memoryview],
}
SECONDS = [5, 2.5, True, Decimal("2.5"), Fraction(5, 2), 0, 0.0004, -1, -2.5, -2 * LONG]
NAMES: list[Any] = ["text", "ünï", b"bytes\x00\xff", 5, 2.5, -0.0, 10**30]
CALLS = ["acquire"] * 5 + ["release"] * 3 + ["extend"] * 3 + ["enter"] * 2
CALLS += ["reacquire"] * 2 + ["change"] * 3 + ["locked", "owned", "set token", "lose", "steal"]


def some(rng: random.Random, choices: dict[str, list[Any]], chance: float) -> dict[str, Any]:
    return {name: rng.choice(values) for name, values in choices.items() if rng.random() < chance}


class Walk:
    """Both locks, and the calls that are drawn for them."""

    def __init__(self, api: Api, client: Any, probe: redis.Redis, rng: random.Random) -> None:
        self.api, self.client, self.probe, self.rng = api, client, probe, rng
        # redis-py 5.0 lacks some
        self.known = [name for name in SETTINGS if name in inspect.signature(theirs(api)).parameters]
        self.log: list[str] = []
        self.excused: set[str] = set()
        self.tokens = 0
        self.settings: dict[str, Any] = {}
        self.locks: list[Any] = []

    def keys(self) -> list[str]:
        return ["theirs", "ours"]

    async def make(self) -> None:
        """New locks. Settings that ours refuses are drawn again."""
        while True:
            self.probe.delete(*self.keys())
            self.settings = some(self.rng, {name: SETTINGS[name] for name in self.known}, 0.4)
            self.log = [f"Lock({self.settings})"]
            kinds = zip((theirs(self.api), self.api.module.Lock), self.keys(), strict=True)
            if self.settings.get("timeout", 1) == 0:
                with pytest.raises(ValueError, match="timeout"):
                    self.api.module.Lock(self.client, "ours", **self.settings)
                self.excused.add("zero-timeout")
                continue
            self.locks = [kind(self.client, key, **self.settings) for kind, key in kinds]
            return

    async def both(
        self, call: Callable[[Any], Any], excuse: Callable[[Outcome, Outcome], str] = lambda a, b: ""
    ) -> None:
        """Have both locks do the same, and compare the outcomes, and the keys left."""
        results = [await outcome(self.api, lambda lock=lock: call(lock)) for lock in self.locks]  # type: ignore[misc]
        if results[0] != results[1] and (row := excuse(*results)):
            self.excused.add(row)
        else:
            assert results[0] == results[1], "\n".join(self.log)
        self.log[-1] += f" -> {results[1]}"
        self.compare()

    def compare(self) -> None:
        """Both names are held, or free; for as long; by a token that the locks know, or by none."""
        deadline = time.monotonic() + 5
        while self.probe.exists("ours") != self.probe.exists("theirs") and time.monotonic() < deadline:
            time.sleep(0.001)  # `ended-by-extend`: a millisecond later than redis-py
        left = [self.probe.pttl(key) for key in self.keys()]
        assert (left[0] < 0) == (left[1] < 0), (self.log, left)
        assert (left[0] < 0 and left[0] == left[1]) or abs(left[0] - left[1]) < NEAR, (self.log, left)
        known = [lock.local.token for lock in self.locks]
        assert (known[0] is None) == (known[1] is None), (self.log, known)
        mine = [not isinstance(token, str) and token is not None and token_matches(self.probe.get(key), bytes(token))
                for key, token in zip(self.keys(), known, strict=True)]  # fmt: skip
        assert mine[0] == mine[1] or isinstance(known[0], str), (self.log, mine)

    def would_wait_long(self, given: dict[str, Any]) -> bool:
        """Whether this call would wait for long: the name is held, and nobody will release it."""
        blocking = given.get("blocking") if given.get("blocking") is not None else self.settings.get("blocking", True)
        limit = given.get("blocking_timeout")
        limit = self.settings.get("blocking_timeout") if limit is None else limit
        return bool(self.probe.exists("ours") and blocking and (limit is None or limit > SHORT))

    def pauses(self, one: Outcome, other: Outcome, sleep: Any = None) -> str:
        sleep = self.settings.get("sleep", 1) if sleep is None else sleep
        return "odd-pauses" if one == ("raises", "TypeError") and not isinstance(sleep, (int, float)) else ""

    # the calls

    async def acquire(self) -> None:
        given = some(self.rng, ARGUMENTS, 0.35)
        if self.api.is_async:
            given.pop("sleep", None)
        if self.would_wait_long(given):
            given["blocking_timeout"] = SHORT
        if (token := given.get("token")) is not None:  # `fresh-token`: never the same token twice
            self.tokens += 1
            fresh = {
                str: f"{token}{self.tokens}",
                bytes: b"bytes%d" % self.tokens,
                type: memoryview(b"%d" % self.tokens),
            }
            given["token"] = fresh[type(token)] if type(token) in fresh else token + self.tokens
        self.log.append(f"acquire({given})")
        await self.both(
            lambda lock: lock.acquire(**given), lambda one, other: self.pauses(one, other, given.get("sleep"))
        )

    async def release(self) -> None:
        self.log.append("release()")
        await self.both(lambda lock: lock.release())

    async def extend(self) -> None:
        seconds = self.rng.choice(SECONDS)
        arguments = self.rng.choice([(seconds,), (seconds, True), (seconds, False), (seconds, 1)])
        self.log.append(f"extend{arguments}")
        await self.both(lambda lock: lock.extend(*arguments))

    async def reacquire(self) -> None:
        self.log.append("reacquire()")
        await self.both(lambda lock: lock.reacquire())

    async def locked(self) -> None:
        self.log.append("locked()")
        await self.both(lambda lock: lock.locked())

    async def owned(self) -> None:
        self.log.append("owned()")
        text = isinstance(self.locks[0].local.token, str)
        await self.both(lambda lock: lock.owned(), lambda one, other: "text-token" if text else "")

    async def set_token(self) -> None:
        what = self.rng.choice(["none", "guess", "bytes", "text"])
        self.log.append(f"local.token = {what}")
        for lock, key in zip(self.locks, self.keys(), strict=True):
            there = self.probe.get(key) or b"nobody's"
            lock.local.token = {"none": None, "guess": b"guess", "bytes": there, "text": there.decode()}[what]
        self.compare()

    async def adopt(self) -> None:
        """Set the token, as sent by another process that holds the lock."""
        self.log.append("local.token = its own")
        for lock, key in zip(self.locks, self.keys(), strict=True):
            lock.local.token = self.probe.get(key)
        self.compare()

    async def change(self) -> None:
        """Change a setting: settings are read when they are needed."""
        name = self.rng.choice(["timeout", *(name for name in self.known if name != "thread_local")])
        self.set(name, self.rng.choice([each for each in SETTINGS[name] if (name, each) != ("timeout", 0)]))

    def set(self, name: str, value: Any) -> None:
        self.log.append(f"{name} = {value!r}")
        self.settings[name] = value
        for lock in self.locks:
            setattr(lock, name, value)

    async def lose(self) -> None:
        self.log.append("lose")
        self.probe.delete(*self.keys())

    async def steal(self) -> None:
        self.log.append("steal")
        for key in self.keys():
            self.probe.set(key, "somebody else's", px=LONG * 1000)

    async def enter(self) -> None:
        if self.would_wait_long({}):
            return
        raising, losing = self.rng.random() < 0.3, self.rng.random() < 0.3
        self.log.append(f"with: {'lose ' * losing}{'raise' * raising}")

        async def body(lock: Any) -> str:
            assert await self.api.enter(lock) is lock
            error = ZeroDivisionError("of the body") if raising else None
            if losing:
                self.probe.delete(*self.keys())
            try:
                if not await self.api.leave(lock, error) and error is not None:
                    raise error
            except redis.exceptions.LockError as problem:
                raise problem from None
            return "left"

        def excuse(one: Outcome, other: Outcome) -> str:
            first = raising and losing and other == ("raises", "ZeroDivisionError")
            return "body-first" if first and one == ("raises", "LockNotOwnedError") else self.pauses(one, other)

        await self.both(body, excuse)


@pytest.mark.parametrize("seed", range(6))
async def test_random_calls_have_the_same_outcome(
    api: Api, server: Server, probe: redis.Redis, seed: int, no_leaks: Any
) -> None:
    rng = random.Random(seed)
    async with ending(api, module(api).Redis(port=server.port)) as client:
        walk = Walk(api, client, probe, rng)
        try:
            for _ in range(8):
                await walk.make()
                for _ in range(rng.randrange(4, 24)):
                    await getattr(walk, rng.choice(CALLS).replace(" ", "_"))()
        finally:
            probe.delete(*walk.keys())
        assert walk.excused <= ROWS


EXTENDS: list[tuple[Any, ...]] = [(5,), (5, True), (0,), (-1,), (-1, True), (-2 * LONG,)]
CHANGES = [(None, LONG), (LONG, None), (None, LONG, None), (LONG, None, LONG), (LONG, 2 * LONG, None)]


@pytest.mark.parametrize("timeouts", CHANGES, ids=str)
async def test_changing_the_timeout_of_a_held_lock_is_the_same(
    api: Api, server: Server, probe: redis.Redis, timeouts: tuple[Any, ...], no_leaks: Any
) -> None:
    """Whether the lease was acquired here, or its token comes from elsewhere; for each extension, and for extensions
    after `reacquire`, and after a loss."""
    async with ending(api, module(api).Redis(port=server.port)) as client:
        walk = Walk(api, client, probe, random.Random(0))
        for arguments in EXTENDS:
            for before in ([], ["reacquire"], ["adopt"], ["lose"], ["steal"], ["lose", "extend"]):
                await walk.make()
                walk.set("timeout", timeouts[0])
                walk.log.append("acquire()")
                await walk.both(lambda lock: lock.acquire(blocking=False))
                for timeout in timeouts[1:]:
                    walk.set("timeout", timeout)
                    for name in before:
                        await getattr(walk, name)()
                    walk.log.append(f"extend{arguments}")
                    await walk.both(methodcaller("extend", *arguments))
                for name in ("owned", "reacquire", "extend", "owned", "release", "locked"):
                    await getattr(walk, name)()
        probe.delete(*walk.keys())
        assert walk.excused <= ROWS


@pytest.mark.parametrize("name", NAMES, ids=repr)
async def test_a_name_is_the_same_key_for_both(
    api: Api, server: Server, probe: redis.Redis, name: Any, no_leaks: Any
) -> None:
    async with ending(api, module(api).Redis(port=server.port)) as client:
        for first, second in ((theirs(api), api.module.Lock), (api.module.Lock, theirs(api))):
            one, other = first(client, name, timeout=5), second(client, name, timeout=5)
            assert one.name == other.name == name
            assert await api.get(one.acquire(blocking=False)) is True
            assert await api.get(other.acquire(blocking=False)) is False
            (key,) = probe.keys()
            assert key == (name if isinstance(name, bytes) else str(name).encode())
            await api.get(one.release())


# ------------------------------------------------------------------------------------- the table, row by row


class Scene:
    """One kind of lock in a scene: `kind` is redis-py's class, or ours."""

    def __init__(self, api: Api, client: Any, probe: redis.Redis, kind: Any) -> None:
        self.api, self.client, self.probe, self.kind = api, client, probe, kind

    def lock(self, name: Any = "a", **settings: Any) -> Any:
        return self.kind(self.client, name, **settings)

    async def get(self, value: Any) -> Any:
        return await self.api.get(value)


async def zero_timeout(on: Scene) -> Any:
    return on.lock(timeout=0).timeout


async def nonsense(on: Scene) -> Any:
    outcomes = []
    for wrong in ({"name": None}, {"name": ""}, {"name": True}, {"name": object()}):
        outcomes.append(await outcome(on.api, lambda wrong=wrong: on.lock(**wrong) and None))  # type: ignore[misc]
    for name in ("timeout", "sleep", "blocking_timeout"):
        for value in ("1", float("nan"), *([] if name == "blocking_timeout" else [-1, float("inf")])):
            outcomes.append(await outcome(on.api, lambda of={name: value}: on.lock(**of) and None))  # type: ignore[misc]
    outcomes.append(await outcome(on.api, lambda: on.lock(timeout=0.0001) and None))
    return set(outcomes)


async def reserved(on: Scene) -> Any:
    outcomes = [await outcome(on.api, lambda name=name: on.lock(name) and None) for name in ("fastlock:a", "x" * 65537)]  # type: ignore[misc]
    return set(outcomes)


async def last_try(on: Scene) -> Any:
    on.probe.set("a", "somebody else's", px=400)
    lock = on.lock(timeout=5, sleep=10, blocking_timeout=1)
    got = await on.get(lock.acquire())
    on.probe.delete("a")
    return got


async def late_answer(on: Scene) -> Any:
    lock = on.lock(timeout=5, blocking_timeout=0.05)
    assert await on.get(lock.acquire(blocking_timeout=5))  # connects, which may take long on a busy machine
    await on.get(lock.release())
    on.probe.client_pause(150)
    return await on.get(lock.acquire())


async def fresh_token(on: Scene) -> Any:
    lock = on.lock(timeout=5)
    assert await on.get(lock.acquire(token="mine"))
    on.probe.client_pause(150)
    assert await on.get(lock.acquire(token="mine", blocking_timeout=0.05)) is False
    return await on.get(lock.owned())


async def odd_pauses(on: Scene) -> Any:
    on.probe.set("a", "somebody else's", px=5000)
    calls = [lambda: on.lock(sleep=None, blocking_timeout=SHORT).acquire()]
    calls.append(lambda: on.lock(sleep=0.001, blocking_timeout=Decimal("0.01")).acquire())
    outcomes = [await outcome(on.api, call) for call in calls]
    on.probe.delete("a")
    return set(outcomes)


async def body_first(on: Scene) -> Any:
    lock = on.lock(timeout=5)
    await on.api.enter(lock)
    on.probe.delete("a")
    error = ZeroDivisionError()
    await on.api.leave(lock, error)
    return error.__notes__ != []


async def no_token_elsewhere(on: Scene) -> Any:
    lock, seen = on.lock(timeout=5), []

    def read_token() -> None:
        try:
            seen.append(lock.local.token)
        except AttributeError as error:
            seen.append(type(error).__name__)

    thread = threading.Thread(target=read_token)
    thread.start()
    thread.join()
    return seen[0]


async def text_token(on: Scene) -> Any:
    lock = on.lock(timeout=5)
    await on.get(lock.acquire(token=b"token"))
    lock.local.token = "token"
    owned = await on.get(lock.owned())
    await on.get(lock.release())
    return owned


async def ended_by_extend(on: Scene) -> Any:
    lock = on.lock(timeout=5)
    await on.get(lock.acquire())
    done = await on.get(lock.extend(-10))
    deadline = time.monotonic() + 5
    while on.probe.exists("a") and time.monotonic() < deadline:
        time.sleep(0.001)
    return done, on.probe.exists("a"), await outcome(on.api, lock.release)


async def release_again(on: Scene) -> Any:
    if on.api.is_async:
        pytest.skip("redis-py's lock for asyncio keeps the token, too")
    with Server(tcp=True) as server:
        client = redis.Redis(port=server.port, socket_timeout=0.3, retry=Retry(NoBackoff(), 0))
        async with ending(on.api, client):
            lock = on.kind(client, "a", timeout=5)
            assert await on.get(lock.acquire())
            server.stop()
            assert await outcome(on.api, lock.release) == ("raises", "ConnectionError")
            return lock.local.token is not None


async def task_leases(on: Scene) -> Any:
    if not on.api.is_async:
        pytest.skip("for tasks only")
    lock = on.lock(timeout=5)
    assert await on.get(lock.acquire())

    async def other() -> bool:
        return lock.local.token is not None

    seen = await on.api.start(other).get()
    await on.get(lock.release())
    return seen


async def persisted(on: Scene) -> Any:
    lock = on.lock(timeout=5)
    await on.get(lock.acquire())
    on.probe.persist("a")
    done = await on.get(lock.extend(10))
    await on.get(lock.release())
    return done


async def stays_lost(on: Scene) -> Any:
    lock = on.lock(timeout=5)
    await on.get(lock.acquire(token=b"token"))
    on.probe.delete("a")
    outcomes = [await outcome(on.api, lock.reacquire)]
    on.probe.set("a", b"token", px=5000)
    calls = (lock.owned, lock.reacquire, lambda: lock.extend(5), lock.release)
    outcomes += [await outcome(on.api, call) for call in calls]
    on.probe.delete("a")
    assert await on.get(lock.acquire()) and await on.get(lock.owned())
    return outcomes


async def wrong_type(on: Scene) -> Any:
    on.probe.hset("a", "field", 1)
    lock = on.lock(timeout=5, blocking_timeout=0.05)
    calls = (lambda: lock.acquire(blocking=False), lock.acquire, lock.locked, lock.owned)
    return [await outcome(on.api, call) for call in calls]


NO = {("raises", "ValueError"), ("raises", "TypeError")}
LOST = ("raises", "LockNotOwnedError")
WRONG = ("raises", "ResponseError")
SCENES: dict[str, tuple[Callable[[Scene], Awaitable[Any]], Any, Any]] = {
    "zero-timeout": (zero_timeout, ("returns", 0), ("raises", "ValueError")),
    "nonsense": (nonsense, ("returns", {("returns", None)}), ("returns", NO)),
    "reserved": (reserved, ("returns", {("returns", None)}), ("returns", {("raises", "ValueError")})),
    "last-look": (last_try, ("returns", False), ("returns", True)),
    "late-answer": (late_answer, ("returns", True), ("returns", False)),
    "fresh-token": (fresh_token, ("returns", True), ("returns", False)),
    "odd-pauses": (odd_pauses, ("returns", {("raises", "TypeError")}), ("returns", {("returns", False)})),
    "body-first": (body_first, LOST, ("returns", True)),
    "no-token-elsewhere": (no_token_elsewhere, ("returns", "AttributeError"), ("returns", None)),
    "text-token": (text_token, ("returns", False), ("returns", True)),
    "ended-by-extend": (ended_by_extend, ("returns", (True, 0, LOST)), ("returns", (True, 0, LOST))),
    "release-again": (release_again, ("returns", False), ("returns", True)),
    "task-leases": (task_leases, ("returns", True), ("returns", False)),
    "wrong-type": (
        wrong_type,
        ("returns", [("returns", False), ("returns", False), WRONG, WRONG]),
        ("returns", [WRONG, WRONG, ("returns", True), ("returns", False)]),
    ),
    "persisted": (persisted, LOST, ("returns", True)),
    "stays-lost": (
        stays_lost,
        ("returns", [LOST, ("returns", True), ("returns", True), ("returns", True), ("returns", None)]),
        ("returns", [LOST, ("returns", False), LOST, LOST, LOST]),
    ),
}


def test_the_table_and_the_scenes_name_the_same_rows() -> None:
    assert set(SCENES) == ROWS


@pytest.mark.parametrize("row", SCENES)
async def test_each_difference_is_as_the_table_says(api: Api, server: Server, probe: redis.Redis, row: str) -> None:
    scene, *expected = SCENES[row]
    async with ending(api, module(api).Redis(port=server.port)) as client:
        outcomes = []
        for kind in (theirs(api), api.module.Lock):
            outcomes.append(await outcome(api, lambda kind=kind: scene(Scene(api, client, probe, kind))))  # type: ignore[misc]
            probe.delete("a")
    assert outcomes == expected
