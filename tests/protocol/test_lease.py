"""A lease's time, computed without I/O from a clock that the test sets; and tokens.

Leases as threads and asyncio get them, and after a fork, are tested elsewhere.
"""

from __future__ import annotations

import ast
import copy
import math
import os
import pickle
import re
import threading
import time
from pathlib import Path

import pytest
from support.run_steps import Clock

import fastlock
from fastlock._protocol import commands
from fastlock._protocol.lease import ENDED, Lease, new_token, now, process_id

pytestmark = pytest.mark.usefixtures("impl")
SOURCE = Path(fastlock.__file__).parent / "_protocol" / "lease.py"
TOKEN = b"0123456789abcdef" * 2


def test_lease_is_valid_until_its_deadline_and_not_a_moment_longer(clock: Clock) -> None:
    lease = Lease("name", b"name", TOKEN, clock() + 2.0, fence=7)
    assert (lease.name, lease._key, lease.token, lease.fence) == ("name", b"name", TOKEN, 7)
    assert (lease.remaining, lease.valid) == (2.0, True)
    clock.go(1.5)
    assert (lease.remaining, lease.valid) == (0.5, True)
    clock.go(0.5)
    assert (lease.remaining, lease.valid) == (0.0, False)
    clock.go(1e9)
    assert (lease.remaining, lease.valid) == (0.0, False)


def test_lease_without_timeout_does_not_end(clock: Clock) -> None:
    lease = Lease("name", b"name", TOKEN, math.inf)
    clock.go(1e12)
    assert (lease.remaining, lease.valid, lease.fence) == (math.inf, True, None)


def test_remaining_and_valid_cannot_be_set(clock: Clock) -> None:
    lease = Lease("name", b"name", TOKEN, clock() + 1)
    with pytest.raises(AttributeError):
        lease.remaining = 5.0  # type: ignore[misc]
    with pytest.raises(AttributeError):
        lease.valid = True  # type: ignore[misc]


def test_unknown_release_counts_only_if_sent_before_the_deadline(clock: Clock) -> None:
    lease = Lease("name", b"name", TOKEN, clock() + 1)
    assert lease._release_unknown is False
    lease._note_unknown_release(clock() + 1)
    assert lease._release_unknown is False
    lease._note_unknown_release(clock() + 0.999)
    lease._note_unknown_release(clock() + 5)
    assert lease._release_unknown is True


def test_lease_is_not_valid_once_it_may_have_been_released(clock: Clock) -> None:
    lease = Lease("sku", b"sku", b"fl:1", clock() + 10)
    lease._note_unknown_release(clock())
    assert not lease.valid and lease.remaining == 0.0 and "ended" in repr(lease)
    assert lease._deadline == clock() + 10, "the release can be repeated, and extended by what is left"


def test_token_of_a_released_lease_no_longer_matches(clock: Clock) -> None:
    """The next local holder may have the raw token."""
    token = new_token()
    lease, given = Lease("name", b"name", token, clock() + 10), Lease("name", b"name", b"given", clock() + 10)
    assert (lease.token, lease._token_read, given.token) == (token, True, b"given")
    lease._deadline = given._deadline = ENDED
    assert (lease.token, given.token) == (token.replace(b"fl:", b"fl-"), b"given")
    assert pickle.loads(pickle.dumps(lease)).token == lease.token != token


def test_token_is_never_shown(clock: Clock) -> None:
    for name, deadline in (("n\r\n", clock() + 1.23456), (b"\0", math.inf), ("x", clock() - 1)):
        lease = Lease(name, b"key", TOKEN, deadline)
        for text in (repr(lease), str(lease), f"{lease}", f"{[lease]}"):
            assert TOKEN.decode() not in text
            assert repr(name) in text
            assert "\n" not in text
    assert repr(Lease("x", b"x", TOKEN, clock() + 1.2344)) == "<Lease of 'x': 1.234 s left>"
    assert repr(Lease("x", b"x", TOKEN, clock())) == "<Lease of 'x': ended>"
    assert repr(Lease("x", b"x", TOKEN, math.inf)) == "<Lease of 'x': without end>"


def test_leases_compare_by_identity(clock: Clock) -> None:
    one, other = (Lease("x", b"x", TOKEN, 1.0) for _ in range(2))
    assert one != other
    assert len({one, other}) == 2


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, lambda lease: pickle.loads(pickle.dumps(lease))])
def test_copy_of_a_lease_is_valid_no_longer_than_the_lease(clock: Clock, how: object) -> None:
    lease = Lease("x", b"x", TOKEN, clock() + 2)
    twin = how(lease)  # type: ignore[operator]
    assert twin._deadline <= lease._deadline
    assert twin.remaining <= 2


def test_nothing_of_a_lease_can_be_set(clock: Clock) -> None:
    lease = Lease("x", b"key", TOKEN, clock() + 2, fence=7)
    for name in ("name", "token", "fence", "remaining", "valid", "inherited", "lost", "depth", "of_my_own"):
        with pytest.raises(AttributeError):
            setattr(lease, name, None)
    public = {name for name in dir(lease) if not name.startswith("_")}
    assert public == {"name", "token", "fence", "remaining", "valid", "inherited", "lost", "depth"}


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, lambda lease: pickle.loads(pickle.dumps(lease))])
def test_copy_of_a_lease_is_released_and_extended_as_the_lease(clock: Clock, how: object) -> None:
    """A copy keeps every field that matters for that: each has a value of its own here."""
    lease = Lease("x", b"key", TOKEN, clock() + 2, fence=7)
    lease._contended, lease._stale_sessions = True, (b"broken",)
    lease._note_unknown_release(clock())
    twin = how(lease)  # type: ignore[operator]
    fields = (
        "_name",
        "_key",
        "_raw_token",
        "_deadline",
        "_contended",
        "_release_unknown",
        "_stale_sessions",
        "fence",
        "inherited",
    )
    assert [getattr(twin, field) for field in fields] == [getattr(lease, field) for field in fields]
    assert (lease._contended, lease._release_unknown) == (True, True)


@pytest.mark.parametrize("sender", ["parent", "child"])
def test_lease_sent_to_or_by_a_forked_child_is_valid_there(clock: Clock, sender: str) -> None:
    """A lease that was sent is valid in the child; one that was inherited is not, nor is a copy of it."""
    held = Lease("x", b"x", TOKEN, clock() + 1000)
    pickled = pickle.dumps(held)
    read, write = os.pipe()
    if not (pid := os.fork()):
        twin = copy.copy(held)
        mine = Lease("x", b"x", TOKEN, clock() + 1000)
        right = pickle.loads(pickled).valid and not held.valid and not twin.valid and twin.inherited
        os.write(write, pickle.dumps((right, mine)))
        os._exit(0)
    os.waitpid(pid, 0)
    right, sent = pickle.loads(os.read(read, 65536))
    os.close(read)
    os.close(write)
    assert right if sender == "parent" else sent.valid and not sent.inherited


def test_lease_is_not_contended_by_default(clock: Clock) -> None:
    assert Lease("name", b"name", TOKEN, math.inf)._contended is False


def test_clock_ignores_the_system_time_and_never_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 0.0)
    first = now()
    assert first <= now()
    if hasattr(time, "CLOCK_BOOTTIME"):  # this clock goes on while the machine is suspended
        assert first <= time.clock_gettime(time.CLOCK_BOOTTIME) <= now()


# --------------------------------------------------------------------------------------------------------------- tokens


def test_tokens_have_the_prefix_and_32_hex_digits_and_are_unique() -> None:
    tokens = [new_token() for _ in range(100_000)]
    assert len(set(tokens)) == len(tokens)
    assert all(type(token) is bytes and re.fullmatch(rb"fl:[0-9a-f]{32}", token) for token in tokens)
    assert all(commands.can_be_contended(token) for token in tokens[:1000])


def test_tokens_use_all_their_bits() -> None:
    """All but the id of their process, which takes the first half."""
    tokens = [int(new_token().removeprefix(commands.PLAIN_PREFIX), 16) for _ in range(4000)]
    assert {f"{token >> 64:016x}".encode() for token in tokens} == {process_id()}
    for bit in range(64):
        ones = sum(token >> bit & 1 for token in tokens)
        assert 1600 < ones < 2400  # 12 standard deviations


def test_threads_never_get_the_same_token() -> None:
    found: list[list[bytes]] = [[] for _ in range(8)]
    start = threading.Barrier(len(found))

    def generate(mine: list[bytes]) -> None:
        start.wait(30)
        mine.extend(new_token() for _ in range(5000))

    threads = [threading.Thread(target=generate, args=(mine,)) for mine in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len({token for mine in found for token in mine}) == 8 * 5000


def token_sources(text: str) -> set[str]:
    """Forbidden modules and calls that `text` uses to make tokens."""
    tree = ast.parse(text)
    bad = {"random", "uuid", "secrets", "numpy", "hashlib"}
    found = {
        (alias.name if isinstance(node, ast.Import) else str(node.module)).partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    } & bad
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == "new_token":
            calls = [ast.unparse(call.func) for call in ast.walk(node) if isinstance(call, ast.Call)]
            found |= {call for call in calls if call.startswith(("time.", "random.", "uuid.", "now", "id", "hash"))}
            found |= set() if "os.urandom" in calls else {"no os.urandom"}
    return found


def test_tokens_come_from_the_systems_randomness_only() -> None:
    assert token_sources(SOURCE.read_text()) == set()


@pytest.mark.parametrize(
    "text",
    [
        "import random\ndef new_token(): return os.urandom(16)",
        "from uuid import uuid4\ndef new_token(): return os.urandom(16)",
        "def new_token(): return os.urandom(8) + str(time.time())",
        "def new_token(): return b'0' * 32",
    ],
)
def test_check_of_token_sources_detects_violations(text: str) -> None:
    assert len(token_sources(text)) == 1


def test_only_the_lease_module_makes_tokens() -> None:
    sources = [path for path in SOURCE.parent.parent.rglob("*") if path.suffix in (".py", ".pyx", ".pxi", ".pxd")]
    makers = [path.name for path in sources if re.search(r"urandom|uuid|token_(hex|bytes)", path.read_text())]
    assert makers == ["lease.py"]
