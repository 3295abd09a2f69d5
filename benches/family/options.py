"""The options of `fastlock bench family`, declared without loading the benchmarks; those that `fastlock bench` has too
may stand before the word `family` as well."""

from __future__ import annotations

import argparse

from fastlock._cli.console import number, seconds, server_url, whole

from ..options import writable

PARTS = ("pairs", "contention", "renewal")
APIS = ("threads", "tasks")

DESCRIPTION = """\
Measure each kind of lock (reentrant, read-write, semaphore, several names,
renewed) beside the plain lock and beside what users have today: a pair that
nobody contends, here and through a network of 1 ms; readers and writers, and
few permits for many callers, in several processes; 10,000 leases under renewal.
Only ratios taken in one run mean something. Keys carry a prefix of the run and
are removed."""

SHARED = ("url", "server", "rounds", "seconds", "quick", "check", "json", "processes", "hold")
"""Options that `fastlock bench` declares as well, by the names of their values."""

CHOICES = {"part": PARTS, "api": APIS}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options. What is shared keeps the value that stood before `family`, if none is given after it."""
    parser.description = DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    absent = argparse.SUPPRESS
    add = parser.add_argument
    add("--url", type=server_url, default=absent, help="server to measure; default: an embedded one")
    add("--server", metavar="PATH", default=absent, help="program of the embedded server; default: the best one found")
    for name, values in CHOICES.items():
        add(f"--{name}", action="append", choices=values, metavar="NAME",
            help=f"measure this one only; may be given several times: {', '.join(values)}")  # fmt: skip
    add("--rounds", type=whole(1, 1000), default=absent, metavar="N", help="default 5; quick: 3, of contention 1")
    add("--seconds", type=seconds(0.01, 600), default=absent, metavar="S", help="of one run; default 0.5 or 1")
    add("--quick", action="store_true", default=absent, help="short runs, few rounds, short leases: a minute, noisy")
    add("--check", action="store_true", default=absent, help="judge the bounds; exit with 1 if one is missed")
    add("--json", metavar="FILE", type=writable, default=absent, help="write JSON there; -: to stdout")
    add("--rtt", type=number(0, 1000, "milliseconds"), default=1.0, metavar="MS",
        help="round trip of the network that the pairs are measured through, too (default 1; 0: none)")  # fmt: skip
    add("--processes", type=whole(1, 64), default=absent, metavar="N", help="of contention (default 4)")
    add("--hold", type=number(0, 4_999), default=absent, metavar="MS", help="held in contention (default 1)")
    add("--readers", type=whole(1, 10_000), default=64, metavar="N", help="default 64")
    add("--writers", type=whole(0, 10_000), default=4, metavar="N", help="default 4")
    add("--callers", type=whole(1, 10_000), default=64, metavar="N", help="of the semaphore (default 64)")
    add("--permits", type=whole(1, 10_000), default=8, metavar="N", help="of the semaphore (default 8)")
    add("--leases", type=whole(1, 100_000), default=10_000, metavar="N", help="under renewal (default 10000)")
    add("--lease", type=seconds(0.3, 3600), metavar="S", help="length of these (default 30; quick: 3)")
