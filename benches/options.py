"""The options of ``fastlock bench``, and what each of their values may be.

What lives here: options, declared without loading the benchmarks, so that --help needs nothing installed; a value that
cannot be right is refused. Never here: combinations of options, which ``plan`` refuses.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path

from fastlock._cli.console import number, seconds, server_url, whole

DESCRIPTION = """\
Measure fastlock and its rivals on the same server, in turns: alone, and with
several processes that want the same names. Rates, latencies, handovers,
fairness, server and client CPU, and whether ever more than one held a name.
Only ratios taken in one run mean something. Keys carry a prefix of the run and
are removed."""

SCENARIO_NAMES = (
    *("pair", "threads", "tasks", "tasks-uvloop", "batch"),
    *("hot", "zipf", "handover", "recall", "crowd", "crowd-uvloop", "crowd-threads", "flash-sale", "crash", "storm"),
    *("waiters", "load"),
)
"""The names of all scenarios, as in ``plan``, which is not loaded for --help."""

MOST_WAITERS, MOST_PROCESSES = 10_000, 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``fastlock bench``."""
    parser.description = DESCRIPTION
    add = parser.add_argument
    add("--url", type=server_url, help="server to measure, such as redis://localhost:6379/0; default: an embedded one")
    add("--server", metavar="PATH", help="program of the embedded server; default: the best one found")
    add(
        "--scenario",
        action="append",
        choices=SCENARIO_NAMES,
        metavar="NAME",
        help=f"measure this one only; may be given several times: {', '.join(SCENARIO_NAMES)}",
    )
    add(
        "--rival",
        action="append",
        metavar="NAME",
        default=[],
        help="run this one only; may be given several times, fastlock twice to compare it with itself;"
        " NAME=MODULE: a lock of your own (see benches/README.md)",
    )
    add("--rounds", type=whole(1, 1000), metavar="N", help="default 5; quick: 3, or 1 where a run is long")
    add("--seconds", type=seconds(0.01, 600), metavar="S", help="of one run; default: as the scenario says")
    add("--quick", action="store_true", help="short runs, few rounds, small sweeps: a first look, noisy")
    add("--check", action="store_true", help="judge the acceptance list; exit with 1 if a bound of it is missed")
    add(
        "--rtt",
        type=several(number(0.01, 1000)),
        metavar="LIST",
        default=(),
        help="milliseconds of a round trip, such as 0.2,1,5: puts a network before the server",
    )
    add("--tls", action="store_true", help="reach the embedded server by TLS, of a program that has it")
    add("--json", metavar="FILE", type=writable, help="write JSON there; -: to stdout, and the table to stderr")
    _add_contention(parser.add_argument_group("contention (scenarios from hot to load)"))


def _add_contention(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--processes", type=whole(1, MOST_PROCESSES), metavar="N", help="worker processes of each rival")
    api = group.add_mutually_exclusive_group()
    api.add_argument("--threads", type=whole(1, 1024), metavar="N", help="callers of a process, as threads")
    api.add_argument("--tasks", type=whole(1, MOST_WAITERS), metavar="N", help="callers of a process, as asyncio tasks")
    add("--names", type=names, metavar="N", help="names of locks; unique: each caller its own")
    add("--zipf", type=number(0, 10), metavar="S", help="exponent of the names' popularity; 0: all alike")
    add("--hold", type=number(0, 4_999), metavar="MS", help="milliseconds that a lock is held")
    add(
        "--waiters",
        type=several(whole(1, MOST_WAITERS)),
        metavar="LIST",
        default=(),
        help="callers of waiters, such as 1,10,100, at most 10000; storm takes the largest",
    )
    add(
        "--rate",
        type=several(number(0.1, 1_000_000)),
        metavar="LIST",
        default=(),
        help="arrivals per second of load, such as 1000,4000; one of them makes hot, zipf, flash-sale an open loop",
    )
    add("--try", dest="try_lock", action="store_true", help="try-locks that do not wait")


def writable(path: str) -> str:
    """The argparse type of a file to be written, ``-``: stdout. A file that cannot be written is refused before
    anything is measured."""
    target = Path(path)
    if path == "-":
        return path
    if not path or target.is_dir():
        raise argparse.ArgumentTypeError(f"{path or 'an empty name'} is a directory, not a file")
    if not target.resolve().parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no directory {target.parent}")
    if not os.access(target if target.exists() else target.resolve().parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{path} cannot be written")
    return path


def names(text: str) -> int:
    """The argparse type of --names: 0 stands for ``unique``."""
    return 0 if text == "unique" else whole(1, 100_000)(text)


def several(one: Callable[[str], float]) -> Callable[[str], tuple[float, ...]]:
    """An argparse type for a list of values of the type ``one``, separated by commas: in rising order, each once."""

    def parse(text: str) -> tuple[float, ...]:
        return tuple(sorted({one(part.strip()) for part in text.split(",")}))

    return parse
