"""The command line, `fastlock` and `python -m fastlock`: its commands, where their server comes from, how they end.

Each command imports what it needs when it runs; `bench` and `flash-sale` live in `fastlock.benches`, which is
loaded only when one of them is the command. No command prints a password, and whatever is wrong with what
the user gave is one line on stderr.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import platform
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

from fastlock._cli import holders
from fastlock._cli.console import (
    INTERRUPTED,
    OK,
    REFUSED,
    WRONG,
    Command,
    Progress,
    Refusal,
    mask,
    scrub,
    server_url,
)
from fastlock._version import __version__

ROUND_TRIPS = 5  # of which `fastlock info` shows the shortest
ALIVE_SECONDS = 1.0  # between two checks whether the server that `fastlock server` started still accepts connections

EXIT_CODES = """\
exit codes: 0 all is well; 1 the run found something wrong; 2 bad usage, or no
usable server (one line on stderr); 130 ended by Ctrl-C (watch: 0), 143 by SIGTERM."""

INFO = "Versions of what is installed here, how the core was built, and what the server can do."
SERVER = """\
Start a private, empty Valkey or Redis server, print its URL, and keep it until
Ctrl-C or SIGTERM (which is its normal end: exit code 0). It keeps nothing on
disk and ends with this command, however that ends."""


class Parser(argparse.ArgumentParser):
    """argparse, with one line for an error, and no credentials in it."""

    def error(self, message: str) -> NoReturn:
        self.exit(REFUSED, f"{self.prog}: {' '.join(mask(message).split())} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own) and return the exit code.

    Raises SystemExit for --help and bad usage, as argparse does.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    # A command prints what it finds, in its own words; what the library logs of the same would be printed as well.
    logging.getLogger("fastlock").addHandler(logging.NullHandler())
    try:
        with _terminated_like_interrupted():
            args = _parser(given).parse_args(given)
            code = COMMANDS[args.command].run(args)
            sys.stdout.flush()
            return code
    except Refusal as refusal:
        print(f"fastlock: {refusal}", file=sys.stderr)
        return REFUSED
    except Terminated:
        return 128 + signal.SIGTERM
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of the output has gone, as `head` does: nothing more is printed, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return WRONG


class Terminated(KeyboardInterrupt):
    """SIGTERM, raised as an exception so that what was started is stopped on the way out."""


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    def terminated(number: int, frame: FrameType | None) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """The parser for `argv`: lists all commands, but declares only the options of the one that is named in it."""
    wanted = next((word for word in argv if word in COMMANDS), None)
    parser = Parser(
        prog="fastlock",
        description="A fast distributed lock for Redis and Valkey.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"fastlock {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        one = commands.add_parser(
            name,
            help=command.summary,
            epilog=EXIT_CODES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        if name == wanted:
            command.declare(one)
    return parser


def _declare_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url",
        type=server_url,
        help="server to use, redis:// rediss:// unix:// valkey:// valkeys://; default: embedded",
    )
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout instead of text")


# ------------------------------------------------------------------------------------------------------ the server


@contextmanager
def _server_of(args: argparse.Namespace) -> Iterator[str]:
    """The URL of the server that the user named, or of an embedded one that lives as long as the block."""
    if args.url is not None:
        yield args.url
        return
    from fastlock import embedded

    try:
        server = embedded.Server()
    except embedded.EmbeddedServerError as error:
        raise Refusal(f"no --url was given, and {_first_line(error)}") from None
    with server:
        yield server.url


def _ask(url: str) -> dict[str, Any]:
    """The server information of the server at `url`; raises Refusal if that cannot be used."""
    from redis.exceptions import RedisError

    import fastlock

    try:
        with fastlock.Client.from_url(url) as client:
            found = dict(client.server_info())
            with suppress(RedisError):  # a user may be refused it
                lock = client.lock("info")  # any name: nothing is changed
                found["round_trip_us"] = min(_microseconds(lock.locked) for _ in range(ROUND_TRIPS))
            return found
    except (RedisError, OSError, ValueError, TypeError) as error:
        raise Refusal(f"cannot use {mask(url)}: {scrub(str(error), url)}") from None


def _microseconds(ask: Callable[[], object]) -> int:
    """How long the answer takes."""
    began = time.perf_counter()
    ask()
    return round(1e6 * (time.perf_counter() - began))


def _evicts(server: dict[str, Any]) -> list[str]:
    """A warning for a server that may evict locks when it runs short of memory, else nothing."""
    policy = server.get("maxmemory_policy")
    if policy in (None, "noeviction"):
        return []
    return [f"maxmemory-policy is {policy}: under memory pressure this server may evict locks; use noeviction"]


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


# ---------------------------------------------------------------------------------------------------- fastlock server


def _declare_server(parser: argparse.ArgumentParser) -> None:
    parser.description = SERVER
    parser.add_argument("--tcp", action="store_true", help="listen on a free port of 127.0.0.1 too, without a password")
    parser.add_argument("--server", metavar="PATH", help="program to run; default: the first that is found")
    parser.add_argument("--json", action="store_true", help="print one line of JSON: url, pid, version, kind")


def _run_server(args: argparse.Namespace) -> int:
    from fastlock import embedded

    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: stopped.set())
    try:
        server = embedded.Server(args.server, tcp=args.tcp)
    except (embedded.EmbeddedServerError, ValueError) as error:
        raise Refusal(_first_line(error)) from None
    with server:
        about = {"url": server.url, "pid": server.pid, "version": server.version, "kind": server.kind}
        print(json.dumps(about) if args.json else server.url, flush=True)
        while not stopped.wait(ALIVE_SECONDS):
            if not _listens(server.path):
                print(f"fastlock: {server.kind} {server.version} (pid {server.pid}) ended by itself", file=sys.stderr)
                return WRONG
    return OK


def _listens(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(path) == 0


# ------------------------------------------------------------------------------------------------------ fastlock info


def _declare_info(parser: argparse.ArgumentParser) -> None:
    parser.description = INFO
    _declare_common(parser)


def _run_info(args: argparse.Namespace) -> int:
    about = _installed()
    try:
        with _server_of(args) as url:
            about |= {"url": mask(url), "server": _ask(url)}
    except Refusal as refusal:
        if args.url is not None:
            raise
        about |= {"url": None, "server": None, "no_server": str(refusal)}
    about["warnings"] = _evicts(about["server"] or {})
    if args.json:
        print(json.dumps(about))
    else:
        _print_info(about)
    for warning in about["warnings"]:
        print(f"fastlock: warning: {warning}", file=sys.stderr)
    return OK


def _installed() -> dict[str, Any]:
    import hiredis
    import redis

    import fastlock

    return {
        "schema": 1,
        "kind": "info",
        "fastlock": fastlock.__version__,
        "implementation": fastlock.IMPLEMENTATION,
        "build": _build(),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "redis_py": redis.__version__,
        "hiredis": hiredis.__version__,
    }


def _build() -> str | None:
    """How the core in use was compiled: release, debug or trace; None where the fallback is in use."""
    from fastlock import _implementation

    return str(_implementation.default.BUILD) if _implementation.default.IMPLEMENTATION == "cython" else None


def _print_info(about: dict[str, Any]) -> None:
    server = about["server"]
    print(f"fastlock        {about['fastlock']}")
    print(f"implementation  {about['implementation']}" + (f" ({about['build']} build)" if about["build"] else ""))
    print(f"python          {about['python']}")
    print(f"redis-py        {about['redis_py']}")
    print(f"hiredis         {about['hiredis']}")
    if server is None:
        print(f"server          none: {about['no_server']}")
        return
    print(f"server          {server['server']} {server['version']} ({server['mode']}) at {about['url']}")
    print(f"capabilities    {', '.join(server['capabilities']) or 'none beyond the oldest'}")
    if "round_trip_us" in server:
        print(f"round trip      {server['round_trip_us'] / 1e3:.2f} ms")
    if policy := server.get("maxmemory_policy"):
        print(f"maxmemory       {policy}")


# ------------------------------------------------------------------------------ fastlock bench, fastlock flash-sale


def _declare_bench(parser: argparse.ArgumentParser) -> None:
    _benches("cli").add_arguments(parser)


def _run_bench(args: argparse.Namespace) -> int:
    return int(_benches("cli").run(args))


def _benches(module: str) -> Any:
    # By name: in a source tree the benchmarks are a folder beside the package; only an installation puts them into it.
    try:
        return importlib.import_module(f"fastlock.benches.{module}")
    except ImportError as error:
        how = 'in the clone, install what they need: pip install ".[bench]"'
        raise Refusal(f"the benchmarks cannot be loaded ({error}); {how}") from None


def _declare_flash_sale(parser: argparse.ArgumentParser) -> None:
    _declare_common(parser)
    _benches("flash_sale.command").add_arguments(parser)


def _run_flash_sale(args: argparse.Namespace) -> int:
    with _server_of(args) as url:
        server = _ask(url)
        for warning in _evicts(server):
            print(f"fastlock: warning: {warning}", file=sys.stderr)
        return int(_benches("flash_sale.command").run(args, url, server, Progress(sys.stderr)))


COMMANDS = {
    "server": Command("start a private server and print its URL", _declare_server, _run_server),
    "info": Command("versions, build, and what the server can do", _declare_info, _run_info),
    **holders.COMMANDS,
    "bench": Command("measure fastlock and its rivals", _declare_bench, _run_bench),
    "flash-sale": Command("sell a stock under a lock and audit the books", _declare_flash_sale, _run_flash_sale),
}
