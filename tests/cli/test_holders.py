"""`fastlock ls`, `show`, `break` and `watch` as users run them: a process, its exit code, its two streams."""

from __future__ import annotations

import io
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

import fastlock as library
from fastlock import embedded
from fastlock._cli import console, shown
from fastlock._protocol.description import Description, Holder, QueuedWaiter
from fastlock.embedded import Server

ROOT = Path(__file__).resolve().parents[2]
ODD = b"\xff\n[red]\x1b[1m"  # a name that is no text, and would write on a terminal
SPELLED = "\\xff\\n[red]\\x1b[1m"
STREAMS: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
SURROUNDINGS: dict[str, Any] = {"text": True, "env": {**os.environ, "PYTHONPATH": str(ROOT)}}


def fastlock(command: str, url: str, *args: str | bytes, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own."""
    call = [sys.executable, "-m", "fastlock", command, "--url", url, *args]
    return subprocess.run(call, **{**SURROUNDINGS, **STREAMS, "stdin": subprocess.DEVNULL, **more}, timeout=40)


def document(command: str, url: str, *args: str | bytes) -> dict[str, Any]:
    """The JSON of a command that went well."""
    done = fastlock(command, url, "--json", *args)
    assert (done.returncode, done.stderr) == (0, ""), done
    found: dict[str, Any] = json.loads(done.stdout)
    assert (found["schema"], found["kind"], found["url"]) == (1, command, url)
    return found


@pytest.fixture
def client(server: Server) -> Iterator[library.Client]:
    with library.Client.from_url(server.url) as client:
        yield client


class TestShow:
    def test_json(self, client: library.Client, server: Server, impl: str) -> None:
        with client.semaphore("a", 5, n=2, timeout=60):
            found = document("show", server.url, "a")["found"]
        (holder,) = found["holders"]
        assert 0 < holder["left"] <= 60 and holder["pid"] == os.getpid() and holder["connected"] is True
        assert (found["name"], found["kind"], found["permits"], found["used"]) == ("a", "semaphore", 5, 2)
        assert (holder["permits"], holder["owner"], holder["mine"]) == (2, None, False)

    def test_text(self, client: library.Client, server: Server) -> None:
        with client.rw_lock("a", timeout=None).read, client.lock("b", fence=True) as lease:
            one, other = (fastlock("show", server.url, name).stdout.splitlines() for name in "ab")
        assert one[:2] == ["name        a", "kind        read-write"]
        assert one[2].startswith(f"holder      {os.getpid()}@") and one[2].endswith(", reads, no end")
        assert other[-1] == f"last fence  {lease.fence}"

    def test_nobody(self, server: Server) -> None:
        done = fastlock("show", server.url, "a")
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.splitlines() == ["name        a", "kind        nobody holds it"]

    def test_a_name_that_is_no_text(self, client: library.Client, server: Server) -> None:
        with client.lock(ODD):
            found = document("show", server.url, ODD)["found"]
            done = fastlock("show", server.url, ODD)
        assert (found["name"], bytes.fromhex(found["name_hex"])) == (SPELLED, ODD) and found["holders"]
        assert done.stdout.splitlines()[0] == f"name        {SPELLED}"

    def test_a_narrow_encoding(self, client: library.Client, server: Server) -> None:
        env = {**SURROUNDINGS["env"], "PYTHONIOENCODING": "ascii"}
        with client.lock("ü"):
            for command, args in (("show", ["ü"]), ("ls", [])):
                done = fastlock(command, server.url, *args, env=env)
                assert done.returncode == 0 and "\\xfc" in done.stdout, done


class TestLs:
    def test_json(self, client: library.Client, server: Server, impl: str) -> None:
        with client.lock("a"), client.rw_lock("b").write, client.lock(ODD, timeout=None):
            everything = document("ls", server.url)
            some = document("ls", server.url, "--match", "[ab]", "--limit", "1")
        assert [each["name"] for each in everything["found"]] == ["a", "b", SPELLED]
        assert [each["holders"][0]["mode"] for each in everything["found"]] == [None, "write", None]
        assert everything["found"][2]["holders"][0]["left"] is None and everything["complete"] is True
        assert [each["name"] for each in some["found"]] == ["a"] and some["complete"] is False

    def test_table(self, client: library.Client, server: Server) -> None:
        with client.lock("a"), client.semaphore("b", 5, n=2), client.lock(ODD, timeout=None):
            done = fastlock("ls", server.url)
        rows = [line.split() for line in done.stdout.splitlines()]
        assert (done.returncode, done.stderr) == (0, "") and rows[0] == ["name", "kind", "holder", "left", "waiters"]
        assert [row[:2] for row in rows[1:]] == [["a", "lock"], ["b", "semaphore"], [SPELLED, "lock"]]
        assert all(row[2].startswith(f"{os.getpid()}@") for row in rows[1:])
        assert rows[2][3:5] == ["2", "permits"] and rows[3][3:] == ["no", "end", "0"] and rows[1][4:] == ["s", "0"]

    def test_a_part_of_them(self, client: library.Client, server: Server) -> None:
        client.acquire_many(["a", "b", "c"])
        done = fastlock("ls", server.url, "--limit", "2")
        assert done.returncode == 0 and len(done.stdout.splitlines()) == 3
        assert done.stderr == "fastlock: only 2 names are shown: --limit for more, --match for others\n"

    def test_nothing(self, server: Server) -> None:
        assert fastlock("ls", server.url).stdout.split() == ["name", "kind", "holder", "left", "waiters"]

    def test_output_that_nobody_reads_to_its_end(self, client: library.Client, server: Server) -> None:
        client.acquire_many([f"{'x' * 500}{i}" for i in range(500)])
        call = [sys.executable, "-m", "fastlock", "ls", "--json", "--url", server.url]
        with subprocess.Popen(call, **SURROUNDINGS, **STREAMS) as process:
            assert process.stdout is not None and process.stderr is not None
            assert process.stdout.read(10) == '{"schema":'
            process.stdout.close()
            assert (process.stderr.read(), process.wait(20)) == ("", 1)


class TestBreak:
    def test_it_is_not_asked_for_where_nobody_can_answer(self, client: library.Client, server: Server) -> None:
        with client.lock("a") as lease:
            done = fastlock("break", server.url, "a")
            assert (done.returncode, done.stdout) == (console.REFUSED, "") and "give --yes" in done.stderr
            assert client.describe("a").holders and lease.valid

    def test_without_a_question(self, client: library.Client, server: Server, impl: str) -> None:
        lock = client.lock("a")
        assert lock.acquire()
        done = fastlock("break", server.url, "a", "--yes")
        assert (done.returncode, done.stderr) == (0, "") and f"{os.getpid()}@" in done.stdout
        assert done.stdout.splitlines()[-1] == "a: broken, and free"
        with pytest.raises(library.LockNotOwnedError):
            lock.release()

    @pytest.mark.parametrize(("answer", "broken"), [("yes", True), ("no", False), ("", False), ("\x04", False)])
    def test_it_asks_first(self, client: library.Client, server: Server, answer: str, broken: bool) -> None:
        client.acquire_many(["a"])
        ours, theirs = pty.openpty()
        call = [sys.executable, "-m", "fastlock", "break", "a", "--url", server.url]
        with subprocess.Popen(call, stdin=theirs, **SURROUNDINGS, **STREAMS) as process:
            os.close(theirs)
            os.write(ours, answer.encode() + b"\n" * (answer != "\x04"))
            stdout, stderr = process.communicate(timeout=20)
            os.close(ours)
        assert process.returncode == (0 if broken else 1), stderr
        assert "yes/no" in stdout + stderr and f"{os.getpid()}@" in stdout
        assert ("not broken" in stderr) is not broken and bool(client.describe("a").holders) is not broken

    def test_nobody_holds_it(self, server: Server) -> None:
        done = fastlock("break", server.url, "a", "--yes")
        assert done.returncode == 1 and "nobody holds it" in done.stdout

    def test_a_key_that_is_no_lock(self, server: Server, probe: redis.Redis) -> None:
        probe.rpush("a", "x")
        done = fastlock("break", server.url, "a", "--yes")
        assert done.returncode == 1 and "no lock" in done.stderr and probe.exists("a")


class TestWatch:
    def test_json(self, client: library.Client, server: Server, impl: str) -> None:
        with client.lock(ODD):
            done = fastlock("watch", server.url, "--json", "--count", "3", "--interval", "0.01")
        looks = [json.loads(line) for line in done.stdout.splitlines()]
        assert done.returncode == 0 and len(looks) == 3
        assert all(look["kind"] == "watch" and look["found"][0]["name"] == SPELLED for look in looks)
        assert looks[0]["time"] < looks[1]["time"] < looks[2]["time"]

    def test_text(self, client: library.Client, server: Server) -> None:
        with client.lock("a"):
            done = fastlock("watch", server.url, "--count", "2", "--interval", "0.01", "--match", "a")
        assert (done.returncode, done.stderr) == (0, "")
        assert [line.split()[0] for line in done.stdout.splitlines()][1::3] == ["name", "name"]
        assert [line.split()[0] for line in done.stdout.splitlines()][2::3] == ["a", "a"]

    @pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
    def test_until_it_is_told_to_end(self, server: Server, number: signal.Signals, code: int) -> None:
        call = [sys.executable, "-m", "fastlock", "watch", "--json", "--url", server.url, "--interval", "60"]
        with subprocess.Popen(call, **SURROUNDINGS, **STREAMS) as process:
            assert process.stdout is not None
            assert json.loads(process.stdout.readline())["found"] == []
            process.send_signal(number)
            assert process.communicate(timeout=20) == ("", "") and process.returncode == code

    @pytest.mark.parametrize("rich", [True, False])
    def test_on_a_terminal(self, client: library.Client, server: Server, rich: bool) -> None:
        """By rich, or as text where that is not installed; markup in a name is none."""
        code = "" if rich else "sys.modules['rich'] = sys.modules['rich.live'] = sys.modules['rich.table'] = None\n"
        args = ["watch", "--url", server.url, "--count", "2", "--interval", "0.01"]
        code = f"import sys\n{code}from fastlock._cli import main as cli\nsys.exit(cli.main({args}))"
        ours, theirs = pty.openpty()
        with client.lock("[red]a"):
            call = [sys.executable, "-c", code]
            with subprocess.Popen(call, **SURROUNDINGS, stdout=theirs, stderr=subprocess.PIPE) as process:
                os.close(theirs)
                written = b"".join(iter(lambda: read(ours), b"")).decode()
                assert process.stderr is not None
                stderr = process.stderr.read()
                assert process.wait(20) == 0, stderr
        os.close(ours)
        assert "[red]a" in written and f"{os.getpid()}@" in written
        assert ("install rich" in stderr) is not rich


def read(terminal: int) -> bytes:
    """What came to a terminal; nothing, when its other side was closed."""
    try:
        return os.read(terminal, 65536)
    except OSError:
        return b""


SECRET = "s3cret-%40tail"


@pytest.mark.parametrize("command", [("ls",), ("show", "a"), ("break", "a", "--yes"), ("watch",)], ids=lambda c: c[0])
class TestRefusals:
    def test_no_server(self, command: tuple[str, ...], tmp_path: Path) -> None:
        done = fastlock(command[0], f"unix://me:{SECRET}@{tmp_path}/s", *command[1:])
        (line,) = done.stderr.splitlines()
        assert (done.returncode, done.stdout) == (console.REFUSED, "") and "cannot use unix://me:***@" in line
        assert "s3cret" not in line and "tail" not in line

    def test_a_right_that_is_missing(self, command: tuple[str, ...], server: Server, probe: redis.Redis) -> None:
        probe.execute_command("ACL", "SETUSER", "operator", "reset", "on", f">{SECRET[:6]}", "~*", "+get")
        try:
            done = fastlock(command[0], f"unix://operator:{SECRET[:6]}@{server.path}", *command[1:])
        finally:
            probe.execute_command("ACL", "DELUSER", "operator")
        (line,) = done.stderr.splitlines()
        assert done.returncode == console.REFUSED and "s3cret" not in line
        assert "'scan'" in line if command[0] in ("ls", "watch") else "needs +evalsha" in line, line

    def test_help(self, command: tuple[str, ...]) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "fastlock", command[0], "--help"], **SURROUNDINGS, **STREAMS, timeout=40
        )
        assert (done.returncode, done.stderr) == (0, "") and "exit codes: 0" in done.stdout
        assert "redis://localhost:6379/0" in done.stdout


@pytest.mark.parametrize(
    "args",
    [
        ("show",),
        ("break",),
        ("ls", "--limit", "0"),
        ("watch", "--interval", "0"),
        ("watch", "--count", "-1"),
        ("ls", "--url", "a"),
    ],
    ids=" ".join,
)
def test_bad_usage(args: tuple[str, ...]) -> None:
    done = subprocess.run([sys.executable, "-m", "fastlock", *args], **SURROUNDINGS, **STREAMS, timeout=40)
    (line,) = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (console.REFUSED, "") and line.startswith("fastlock")


def test_passwords(tmp_path: Path) -> None:
    with embedded.Server(tcp=True, password="s3cret-@tail") as server:
        for command in (("ls",), ("show", "a"), ("watch", "--count", "1")):
            done = fastlock(command[0], server.url, "--json", *command[1:])
            assert done.returncode == 0 and ":***@127.0.0.1" in done.stdout
            assert "s3cret" not in done.stdout + done.stderr


# -------------------------------------------------------------------------------------------------------- what is shown


def holder(**values: Any) -> Holder:
    nothing = dict.fromkeys(
        ("process", "host", "pid", "connected", "owner", "since", "left", "mode", "permits", "depth")
    )
    return Holder(**{**nothing, "mine": False, "kept": False, **values})


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({}, "unknown"),
        ({"process": "12ab"}, "process 12ab (not connected, or the server does not tell)"),
        ({"process": "12ab", "connected": False}, "process 12ab (not connected)"),
        ({"process": "12ab", "connected": True, "host": "web", "pid": 7}, "7@web"),
    ],
)
def test_who(values: dict[str, Any], text: str) -> None:
    assert shown.who(holder(**values)) == text


def test_all_that_is_known() -> None:
    where = {"process": "12ab", "host": "web", "pid": 7, "connected": True}
    waiter = QueuedWaiter(**where, mode="write", permits=None, mine=False)
    one = holder(**where, owner="Thread-\x1b1", depth=2, mode="read", left=1.25)
    lines = shown.lines(Description(b"a", "rw_lock", (one,), (waiter,), 5, None, None))
    assert lines[2:] == [
        "holder      7@web, process 12ab, Thread-\\x1b1, 2 deep, reads, 1.2 s left",
        "waiter 1    7@web, to write",
        "last fence  5",
    ]


@pytest.mark.parametrize(("depth", "text"), [(0, "unknown (kept, nobody is in it)"), (None, "unknown (may be kept)")])
def test_a_row_says_that_a_lease_is_kept(depth: int | None, text: str) -> None:
    found = Description(b"a", "lock", (holder(left=2.0, kept=True, depth=depth),), (), None, None, None)
    assert shown.row(found)[2] == text


def test_a_row_stays_short() -> None:
    found = Description(b"x" * 1000, "rw_lock", (holder(left=2.0, mode="read"),) * 9, (), None, None, None)
    name, kind, who, left, waiters = shown.row(found)
    assert name == "x" * 60 + "..." and (kind, left, waiters) == ("read-write", "2.0 s", "0")
    assert who == "unknown reads, unknown reads, and 7 more"
    table = io.StringIO()
    shown.print_table([shown.row(found)], table)
    assert len(table.getvalue().splitlines()) == 2
