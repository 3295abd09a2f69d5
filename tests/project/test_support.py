"""The other helpers of the tests: frames, fake server, both APIs, leak check, crash latch, the test session itself.

A helper that detects nothing would make every test that uses it pass, so each helper is given a mistake to detect.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import redis
from support import resp
from support.apis import Api, drive
from support.fakeserver import CLOSE, SILENCE, FakeServer, Reply
from support.raw_client import RawClient
from support.resp import encode

from fastlock import embedded
from fastlock.embedded import Server

SET_A, GET_A = encode("SET", "a", "1"), encode("GET", "a")
TESTS = Path(__file__).parents[1]
THIS = Path(__file__).relative_to(TESTS)
PACKAGE = str(Path(embedded.__file__).parent.parent)


# --------------------------------------------------------------------------------------------------------------- frames


FRAMES = [
    b"+OK\r\n", b"-ERR x\r\n", b":-5\r\n", b"$3\r\nabc\r\n", b"$0\r\n\r\n", b"$-1\r\n", b"*-1\r\n", b"*0\r\n",
    b"_\r\n", b"#t\r\n", b",1.5\r\n", b"(12345678901234567890\r\n", b"=7\r\ntxt:abc\r\n", b"!5\r\nERR x\r\n",
    b"*2\r\n*1\r\n:1\r\n$2\r\n\r\n\r\n",
    b"%1\r\n+a\r\n*2\r\n:1\r\n:2\r\n", b"~2\r\n:1\r\n:2\r\n", b">2\r\n+a\r\n+b\r\n", b"|1\r\n+ttl\r\n:5\r\n$1\r\nx\r\n",
]  # fmt: skip


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_frames_whole_and_in_pieces(size: int) -> None:
    stream, framer = b"".join(FRAMES), resp.Framer(resp.frame_end)
    cut = [frame for at in range(0, len(stream), size) for frame in framer.feed(stream[at : at + size])]
    assert cut == FRAMES and framer.take() == b"" and not framer.opaque


def test_garbage_makes_a_stream_opaque() -> None:
    framer = resp.Framer(resp.frame_end)
    assert framer.feed(b"+OK\r\nwhat\r\n+O") == [b"+OK\r\n", b"what\r\n+O"]
    assert framer.opaque and framer.feed(b"K") == [b"K"]


def test_commands_are_read_back() -> None:
    args = [b"SET", b"a\r\nb", b"", b"7"]
    assert resp.words(encode(*args)) == args and resp.words(b"PING  x\r\n") == [b"PING", b"x"]
    assert resp.command_end(b"PING\r\nPING\r\n") == 6 and resp.command_end(b"PIN") == -1


# ---------------------------------------------------------------------------------------------------------- fake server


@pytest.mark.parametrize("server", ["redis", "floor"], indirect=True)
def test_fake_server_answers_a_handshake_like_a_real_one(server: Server) -> None:
    commands = [
        encode(*line.split())
        for line in ("HELLO 3", "CLIENT SETNAME x", "SELECT 0", "SUBSCRIBE a b", "CONFIG GET maxmemory-policy",
                      "SCRIPT LOAD return", "COMMAND INFO nope", "PING")
    ]  # fmt: skip
    received = []
    with FakeServer(kind="redis", version=server.version) as fake:
        for url in (server.unix_url, fake.url):
            client = RawClient(url)
            with client.socket:
                client.send(*commands)
                text = b""
                while b"+PONG\r\n" not in text:
                    text += client.socket.recv(4096)
                received.append(text.partition(b"+PONG\r\n")[0])
    theirs, ours = [resp.Framer(resp.frame_end).feed(text) for text in received]
    assert [without_id(frame) for frame in ours] == [without_id(frame) for frame in theirs]


def without_id(frame: bytes) -> bytes:
    head, found, tail = frame.partition(b"$2\r\nid\r\n:")
    return head + found + tail.partition(b"\r\n")[2]


def test_fake_server_follows_its_script() -> None:
    script: list[Reply] = [b"+ONE\r\n", (b"+T", b"WO\r\n"), SILENCE, lambda args: b"+%b\r\n" % args[1], CLOSE]
    with FakeServer(script, handshake={"CLIENT ID": b":77\r\n"}) as fake:
        client = RawClient(fake.url)
        with client.socket:
            client.send(encode("CLIENT", "ID"), SET_A, SET_A, SET_A, GET_A)
            assert client.receive(21) == b":77\r\n+ONE\r\n+TWO\r\n+a\r\n"
            fake.send(b">stray")
            assert client.receive(6) == b">stray"
            client.send(GET_A)
            assert client.receive_end() == b""
        with RawClient(fake.url).socket as other:
            other.sendall(GET_A)
            fake.wait_for(lambda each: each.unexpected == [[b"GET", b"a"]])
            fake.send(b"+MORE\r\n")
            other.sendall(GET_A)
            assert other.recv(64) == b"+MORE\r\n"
        assert fake.accepted == 2


# -------------------------------------------------------------------------------------------------- threads and asyncio


async def test_body_runs_for_threads_and_for_asyncio(api: Api) -> None:
    async def three() -> int:
        return int(await api.get(3))

    def four() -> int:
        return 4

    def fails() -> None:
        raise KeyError("five")

    results = await api.together([three, four, fails])
    assert results[:2] == [3, 4] and isinstance(results[2], KeyError)
    assert await api.start(four).get() == 4
    with pytest.raises(KeyError):
        await api.start(fails).get()


def test_body_that_suspends_fails_for_threads() -> None:
    with pytest.raises(AssertionError, match="awaited something of asyncio"):
        drive(asyncio.sleep(0))


def test_task_left_behind_fails_the_test() -> None:
    async def forgetful() -> None:
        forgetful.task = asyncio.get_running_loop().create_task(asyncio.Event().wait())  # type: ignore[attr-defined]

    with pytest.raises(AssertionError, match="tasks left behind"):
        Api("asyncio").run(forgetful())


def test_error_that_only_the_loop_reports_fails_the_test() -> None:
    async def careless() -> None:
        asyncio.get_running_loop().call_soon(lambda: 1 // 0)
        await asyncio.sleep(0)

    with pytest.raises(AssertionError, match=r"nobody handled.*ZeroDivisionError"):
        Api("asyncio").run(careless())


def test_bodies_can_run_under_uvloop() -> None:
    pytest.importorskip("uvloop")

    async def which() -> str:
        return type(asyncio.get_running_loop()).__module__

    assert Api("asyncio", uvloop=True).run(which()) == "uvloop"
    assert "uvloop" not in Api("asyncio").run(which())


# -------------------------------------------------------------------------------------------------------- clean servers


def test_each_test_gets_an_empty_server(server: Server, probe: redis.Redis, servers: Any) -> None:
    probe.set("a", "1")
    (sha,) = [probe.script_load("return 1")]
    with RawClient(server.unix_url).socket as stranger:
        stranger.settimeout(20)
        stranger.sendall(encode("PING"))
        assert stranger.recv(64) == b"+PONG\r\n"
        assert servers.clean({"8": "valkey", "9": "valkey", "7": "redis", "6": "floor"}[server.version[0]]) is server
        assert stranger.recv(64) == b"", "connections of earlier tests are ended"
    assert probe.dbsize() == 0 and probe.script_exists(sha) == [False]


def test_no_leaks_detects_keys_that_are_left(no_leaks: Any, probe: redis.Redis, server: Server) -> None:
    with RawClient(server.unix_url).socket as client:
        client.sendall(encode("SELECT", "3") + encode("SET", "other", "1"))
    probe.set("left", "1", px=60_000)
    with pytest.raises(AssertionError, match=r"b'left' \(b'string' in database 0, \d+ ms left\)"):
        no_leaks.check(probe)
    no_leaks.allow("le?t")
    with pytest.raises(AssertionError, match=r"b'other' .* in database 3"):
        no_leaks.check(probe)
    no_leaks.allow("other*")


# -------------------------------------------------------------------------------------------------------- test sessions


def session(folder: Path, *arguments: str, prelude: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run pytest in a process of its own in `folder`; `prelude` is run before it."""
    code = f"import sys, pytest\nsys.path.insert(0, {str(TESTS)!r})\n{prelude}\nsys.exit(pytest.main(sys.argv[1:]))"
    plain = ["-p", "no:cacheprovider", "-p", "no:benchmark", "-p", "no:hypothesispytest", "-q"]
    return subprocess.run(
        [sys.executable, "-c", code, *plain, *arguments], cwd=folder, capture_output=True, text=True, timeout=50,
        env={**os.environ, **environment},
    )  # fmt: skip


def test_crash_makes_the_next_sessions_fail(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "from pathlib import Path\nfrom support.latch import Latch\n"
        "def pytest_configure(config): config.pluginmanager.register(Latch(Path('notes')))\n"
    )
    (tmp_path / "test_it.py").write_text(
        "import os, signal\ndef test_fine(): pass\n"
        "def test_crash():\n    if os.path.exists('crash'): os.kill(os.getpid(), signal.SIGSEGV)\n"
    )
    (tmp_path / "crash").touch()
    assert session(tmp_path).returncode == -signal.SIGSEGV
    (tmp_path / "crash").unlink()
    without = session(tmp_path, "-k", "fine")
    assert without.returncode == 1 and "died in test_it.py::test_crash, and this one did not run it" in without.stdout
    assert session(tmp_path).returncode == 0
    assert session(tmp_path, "-k", "fine").returncode == 0


NO_FLOOR = """
import support.servers
found = support.servers.binaries()
support.servers.binaries = lambda: {**found, "floor": "missing: for this test"}
"""


@pytest.mark.parametrize("in_ci", [True, False])
def test_missing_server_fails_in_ci_and_is_reported_locally(in_ci: bool) -> None:
    this = f"{THIS}::test_each_test_gets_an_empty_server"
    environment = {"CI": "true" if in_ci else "", "PYTHONPATH": PACKAGE}
    ended = session(TESTS, this, "-rs", "-v", prelude=NO_FLOOR, **environment)
    if in_ci:
        assert ended.returncode == pytest.ExitCode.USAGE_ERROR and "CI is set, so every cell must run" in ended.stderr
    else:
        assert ended.returncode == 0 and "WILL NOT RUN: floor: missing: for this test" in ended.stdout
        assert "2 passed, 1 skipped" in ended.stdout


def test_cells_can_be_chosen() -> None:
    this = f"{THIS}::test_each_test_gets_an_empty_server"
    ended = session(TESTS, this, "--servers=redis", "-v", CI="", PYTHONPATH=PACKAGE)
    assert ended.returncode == 0 and "1 passed, 2 deselected" in ended.stdout
    ended = session(TESTS, this, "--servers=redis,nonsense", CI="", PYTHONPATH=PACKAGE)
    assert ended.returncode == pytest.ExitCode.USAGE_ERROR
    assert "nonsense is none of valkey, redis, floor" in ended.stderr


OTHER = """
import os
os.environ["FASTLOCK_IMPL"] = "python"
import fastlock
"""


@pytest.mark.parametrize("asked", ["cython", None], ids=["asked for", "default"])
@pytest.mark.parametrize("in_ci", [True, False], ids=["in CI", "locally"])
def test_other_implementation_than_asked_for_fails_the_session(asked: str | None, in_ci: bool) -> None:
    """Nothing could be compiled, for example: CI must not test the other implementation instead."""
    this = f"{THIS}::test_commands_are_read_back"
    then = 'del os.environ["FASTLOCK_IMPL"]' if asked is None else f'os.environ["FASTLOCK_IMPL"] = "{asked}"'
    ended = session(TESTS, this, prelude=OTHER + then, CI="true" if in_ci else "", PYTHONPATH=PACKAGE)
    if asked is None and not in_ci:
        assert ended.returncode == 0 and "1 passed" in ended.stdout
    else:
        assert ended.returncode == pytest.ExitCode.USAGE_ERROR
        assert "the implementation is 'python', 'cython' was asked for" in ended.stderr


def test_only_impl_runs_what_depends_on_the_implementation() -> None:
    both = f"{THIS}::test_body_runs_for_threads_and_for_asyncio"
    neither = f"{THIS}::test_each_test_gets_an_empty_server"
    environment = {"CI": "", "PYTHONPATH": PACKAGE, "FASTLOCK_IMPL": "python"}
    ended = session(TESTS, both, neither, "--only-impl", "-v", **environment)
    assert ended.returncode == 0 and "2 passed, 3 deselected" in ended.stdout
    assert "cells: valkey/redis/floor x threads/asyncio x python, only what depends on" in ended.stdout
    assert "threads x python" in ended.stdout and "asyncio x python" in ended.stdout
    ended = session(TESTS, neither, "--only-impl", **environment)
    assert ended.returncode == pytest.ExitCode.NO_TESTS_COLLECTED and "3 deselected" in ended.stdout


def test_each_test_may_run_on_one_of_its_servers() -> None:
    this, environment = f"{THIS}::test_each_test_gets_an_empty_server", {"CI": "", "PYTHONPATH": PACKAGE}
    ended = session(TESTS, this, "--one-server-each", **environment)
    assert ended.returncode == 0 and "1 passed, 2 deselected" in ended.stdout
    both = f"{THIS}::test_body_runs_for_threads_and_for_asyncio"
    ended = session(TESTS, both, "--one-server-each", **environment)
    assert ended.returncode == 0 and "2 passed" in ended.stdout and "deselected" not in ended.stdout
