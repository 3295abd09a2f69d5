"""The command line as users run it: a process, its exit code, its two streams. Real servers, no mocks.

Bad input is one line on stderr and exit code 2; a password is on neither stream, whatever happens.
"""

from __future__ import annotations

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from fastlock import __version__, embedded
from fastlock._cli import console

ROOT = Path(__file__).resolve().parents[2]
SECRET = "s3cret-@/#:tail"
QUOTED = "s3cret-%40%2F%23%3Atail"
COMMANDS = ("server", "info", "bench", "flash-sale", "ls", "show", "break", "watch")


def fastlock(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "fastlock", *args], **_surroundings(env), capture_output=True, timeout=40
    )


def start(*args: str) -> subprocess.Popen[str]:
    """Start the command line and leave it running."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-m", "fastlock", *args], **_surroundings({}), **streams)


def _surroundings(env: dict[str, str]) -> dict[str, object]:
    return {"text": True, "env": {**os.environ, "PYTHONPATH": str(ROOT), **env}}


def refused(done: subprocess.CompletedProcess[str]) -> str:
    """The one line of a command that was refused."""
    assert done.returncode == console.REFUSED, done
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("fastlock")
    return line


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with embedded.Server() as server:
        yield server.url


@pytest.fixture(scope="module")
def guarded() -> Iterator[embedded.Server]:
    """A server whose password has all the characters that make trouble in a URL."""
    with embedded.Server(tcp=True, password=SECRET) as server:
        yield server


class TestInfo:
    def test_json(self, url: str) -> None:
        done = fastlock("info", "--json", "--url", url)
        assert (done.returncode, done.stderr) == (0, "")
        about = json.loads(done.stdout)
        assert about["implementation"] in ("cython", "python")
        assert about["server"]["server"] in ("valkey", "redis")
        assert about["url"] == url
        assert about["warnings"] == []
        assert 0 < about["server"]["round_trip_us"] < 1e6

    def test_text(self, url: str) -> None:
        done = fastlock("info", "--url", url)
        assert (done.returncode, done.stderr) == (0, "")
        labels = [line.split()[0] for line in done.stdout.splitlines()]
        assert re.search(r"^round trip +[0-9]+\.[0-9]{2} ms$", done.stdout, re.MULTILINE)
        assert labels[:7] == ["fastlock", "implementation", "python", "redis-py", "hiredis", "server", "capabilities"]

    def test_version_alone(self) -> None:
        done = fastlock("--version")
        assert (done.returncode, done.stdout, done.stderr) == (0, f"fastlock {__version__}\n", "")

    def test_fallback_has_no_build(self, url: str) -> None:
        about = json.loads(fastlock("info", "--json", "--url", url, FASTLOCK_IMPL="python").stdout)
        assert (about["implementation"], about["build"]) == ("python", None)

    def test_starts_a_server_of_its_own(self) -> None:
        about = json.loads(fastlock("info", "--json").stdout)
        assert about["server"]["version"] == embedded.find_server().version

    def test_no_server_to_start(self) -> None:
        done = fastlock("info", FASTLOCK_SERVER="/nowhere/valkey-server")
        assert done.returncode == 0
        assert "server          none: no --url was given" in done.stdout

    def test_warns_of_eviction(self) -> None:
        with embedded.Server(args=("--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru")) as server:
            done = fastlock("info", "--json", "--url", server.url)
        assert done.returncode == 0
        (warning,) = json.loads(done.stdout)["warnings"]
        assert "allkeys-lru" in warning
        assert done.stderr == f"fastlock: warning: {warning}\n"


class TestRefusals:
    @pytest.mark.parametrize(
        ("args", "hint"),
        [
            ((), "COMMAND"),
            (("flash-sales",), "invalid choice"),
            (("info", "--url", "localhost:6379"), "must start with one of"),
            (("info", "--url", f"http://:{QUOTED}@localhost"), "must start with one of"),
            (("info", "--url", f"redis://:{QUOTED}@localhost:port"), "port must be"),
            (("info", "--url", f"redis://:{QUOTED}@localhost:65536"), "port must be"),
            (("info", "--url", f"redis://:{SECRET}@localhost"), "percent-encoded"),
            (("info", "--url", f"redis://:{QUOTED}@localhost/zero"), "db must be"),
            (("info", "--url", "unix://?db=0"), "path of a socket"),
            (("info", "--url", "redis://localhost?speed=high"), "speed"),
            (("info", f"redis://:{SECRET}@localhost"), "unrecognized arguments: redis://:***@localhost"),
            (("info", "--ur", "redis://localhost"), "unrecognized arguments"),
            (("server", "--server", "/nowhere/valkey-server"), "/nowhere/valkey-server"),
            (("server", "--server", ""), "server must be"),
            (("flash-sale", "--stock", "0"), "not between 1 and"),
            (("flash-sale", "--stock", "many"), "not a whole number"),
            (("flash-sale", "--think", "nan"), "not between 0 and"),
            (("flash-sale", "--think", "-1"), "not between 0 and"),
            (("flash-sale", "--timeout", "0"), "not between 0.001 and"),
            (("flash-sale", "--timeout", "soon"), "not a number of seconds"),
            (("flash-sale", "--processes", "100000"), "not between 1 and 128"),
            (("flash-sale", "--rivals", "fastlock,redlock"), "'redlock' is none of"),
            (("flash-sale", "--threads", "2", "--tasks", "2"), "not allowed with"),
        ],
        ids=lambda value: " ".join(value) or "nothing" if isinstance(value, tuple) else None,
    )
    def test_bad_usage(self, args: tuple[str, ...], hint: str) -> None:
        line = refused(fastlock(*args))
        assert hint in line
        assert "s3cret" not in line
        assert "tail" not in line

    def test_uvloop_without_tasks(self, url: str) -> None:
        assert "--uvloop needs --tasks" in refused(fastlock("flash-sale", "--uvloop", "--url", url))

    @pytest.mark.parametrize("command", ["info", "flash-sale"])
    def test_unreachable_server(self, command: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        line = refused(fastlock(command, "--url", f"redis://me:{QUOTED}@127.0.0.1:{port}/0"))
        assert f"cannot use redis://me:***@127.0.0.1:{port}/0: " in line
        assert "s3cret" not in line

    def test_no_socket(self, tmp_path: Path) -> None:
        assert f"cannot use unix://{tmp_path}/s" in refused(fastlock("info", "--url", f"unix://{tmp_path}/s"))

    def test_wrong_password(self, guarded: embedded.Server) -> None:
        line = refused(fastlock("info", "--url", f"redis://:{QUOTED}-not@127.0.0.1:{guarded.port}"))
        assert "s3cret" not in line
        assert "***@127.0.0.1" in line

    def test_no_server_to_start(self) -> None:
        line = refused(fastlock("flash-sale", FASTLOCK_SERVER="/nowhere/valkey-server"))
        assert "no --url was given, and FASTLOCK_SERVER=" in line


class TestPasswords:
    def test_info(self, guarded: embedded.Server) -> None:
        done = fastlock("info", "--url", guarded.url)
        assert (done.returncode, done.stderr) == (0, "")
        assert f"redis://:***@127.0.0.1:{guarded.port}/0" in done.stdout
        assert "s3cret" not in done.stdout

    def test_flash_sale(self, guarded: embedded.Server) -> None:
        url = guarded.url.replace("redis://", "valkey://")
        done = fastlock("flash-sale", "--json", "--stock", "5", "--processes", "1", "--url", url)
        assert done.returncode == 0, done
        assert "s3cret" not in done.stdout + done.stderr

    @pytest.mark.parametrize(
        ("text", "masked"),
        [
            ("redis://localhost:6379/0", "redis://localhost:6379/0"),
            ("redis://:pw@h", "redis://:***@h"),
            ("redis://me:pw@h", "redis://me:***@h"),
            ("redis://token@h", "redis://:***@h"),
            ("redis://me:p@w/x@h:1/0", "redis://me:***@h:1/0"),
            ("unix://:p w@/run/s?db=0", "unix://:***@/run/s?db=0"),
            ("unix:///run/s?password=pw&db=0", "unix:///run/s?password=***&db=0"),
        ],
    )
    def test_mask(self, text: str, masked: str) -> None:
        assert console.mask(text) == masked

    def test_scrub(self) -> None:
        url = f"redis://:{QUOTED}@h"
        said = f"bad {url},\n {SECRET} and {QUOTED}"
        assert console.scrub(said, url) == "bad redis://:***@h, *** and ***"


class TestServer:
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    @pytest.mark.parametrize("tcp", [False, True])
    def test_runs_until_it_is_signalled(self, number: signal.Signals, tcp: bool) -> None:
        with start("server", "--json", *(["--tcp"] if tcp else [])) as process:
            about = json.loads(process.stdout.readline())
            with redis.Redis.from_url(about["url"]) as client:
                assert client.ping()
                assert about["url"].startswith("redis://127.0.0.1:" if tcp else "unix://")
                assert client.info("server")["process_id"] == about["pid"]
                process.send_signal(number)
                rest = process.communicate(timeout=20)
            assert (process.returncode, *rest) == (0, "", "")
            with pytest.raises(ProcessLookupError):
                os.kill(about["pid"], 0)

    def test_text_is_the_url(self) -> None:
        with start("server") as process:
            with redis.Redis.from_url(process.stdout.readline().strip()) as client:
                assert client.ping()
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0

    def test_reports_that_the_server_has_ended(self) -> None:
        with start("server") as process:
            with redis.Redis.from_url(process.stdout.readline().strip()) as client:
                client.shutdown(nosave=True)
            _, stderr = process.communicate(timeout=20)
            assert process.returncode == 1
            assert "ended by itself" in stderr


class TestHelp:
    @pytest.mark.parametrize("command", COMMANDS[:2] + COMMANDS[3:])
    def test_help_lists_the_exit_codes(self, command: str) -> None:
        done = fastlock(command, "--help")
        assert (done.returncode, done.stderr) == (0, "")
        assert "exit codes: 0" in done.stdout

    def test_lists_all_commands(self) -> None:
        done = fastlock("--help")
        assert done.returncode == 0
        assert all(command in done.stdout for command in COMMANDS)

    @pytest.mark.parametrize(
        ("args", "heavy"),
        [
            (["--help"], ("rich", "hdrh", "uvloop", "fastlock.benches")),
            (["flash-sale", "--help"], ("rich", "hdrh", "uvloop", "fastlock.benches.cli", "fastlock.benches.stats")),
        ],
    )
    def test_loads_nothing_heavy(self, args: list[str], heavy: tuple[str, ...]) -> None:
        code = (
            "import sys; from fastlock._cli import main as cli\n"
            f"try: cli.main({args})\n"
            "except SystemExit: pass\n"
            f"print([name for name in {heavy} if name in sys.modules])"
        )
        done = subprocess.run([sys.executable, "-c", code], **_surroundings({}), capture_output=True, timeout=40)
        assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("command", ["bench", "flash-sale"])
def test_missing_benchmarks_are_refused(command: str) -> None:
    code = "import sys; sys.modules['fastlock.benches'] = None; from fastlock._cli import main as cli; "
    code += f"sys.exit(cli.main(['{command}']))"
    done = subprocess.run([sys.executable, "-c", code], **_surroundings({}), capture_output=True, timeout=40)
    assert 'pip install ".[bench]"' in refused(done)


def test_flash_sale_needs_no_library_of_the_benchmarks(url: str) -> None:
    code = "import sys; sys.modules.update(hdrh=None, rich=None); from fastlock._cli import main as cli; "
    code += f"sys.exit(cli.main(['flash-sale', '--stock', '5', '--processes', '1', '--url', {url!r}]))"
    done = subprocess.run([sys.executable, "-c", code], **_surroundings({}), capture_output=True, timeout=40)
    assert done.returncode == 0 and "Error" not in done.stderr, done.stderr


def test_a_closed_stdout_is_no_crash(url: str) -> None:
    with start("info", "--url", url) as process:
        process.stdout.close()
        stderr = process.stderr.read()
        assert process.wait(20) == 1
    assert stderr == ""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class TestProgress:
    def test_is_quiet_about_short_work(self) -> None:
        stream, now = Terminal(), [0.0]
        progress = console.Progress(stream, lambda: now[0])
        now[0] = 1.9
        progress.show("at work")
        progress.clear()
        assert stream.getvalue() == ""

    def test_rewrites_its_line_on_a_terminal(self) -> None:
        stream, now = Terminal(), [0.0]
        progress = console.Progress(stream, lambda: now[0])
        now[0] = 2.0
        progress.show("three left")
        progress.show("one left")
        progress.clear()
        assert stream.getvalue() == "\rthree left\rone left  \r        \r"

    def test_shows_how_much_is_done(self) -> None:
        for stream, shown in (
            (Terminal(), "\r[#####...............] at work"),
            (io.StringIO(), "at work (25%)\n"),
        ):
            now = [0.0]
            progress = console.Progress(stream, lambda now=now: now[0])
            now[0] = 2.0
            progress.show("at work", 0.25)
            assert stream.getvalue() == shown

    def test_writes_a_line_now_and_then_elsewhere(self) -> None:
        stream, now = io.StringIO(), [0.0]
        progress = console.Progress(stream, lambda: now[0])
        for second in range(13):
            now[0] = float(second)
            progress.show(f"second {second}")
        progress.clear()
        assert stream.getvalue() == "second 2\nsecond 7\nsecond 12\n"
