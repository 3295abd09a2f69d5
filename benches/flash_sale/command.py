"""`fastlock flash-sale`: many processes buy from one stock under a lock, and the books are audited afterwards.

What lives here: the options, one sale after the other, each on a fresh stock, the lock keys, the exit code. Never here:
the shop, the buyers, their processes and the report, which are files of their own. Only keys of this run's own prefix
are ever read or deleted.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import platform
import secrets
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastlock._cli.console import INTERRUPTED, OK, WRONG, Progress, Refusal, scrub, seconds, whole

from ..rivals import redis_url
from ..terminal import print_rows
from .buyers import Plan
from .report import JSON_SHAPE, SCHEMA, Outcome, as_json, table
from .shop import Shop, audit, open_shop
from .workers import Event, Workers

RIVALS = ("fastlock", "redis-py", "mixed", "no-lock")

DESCRIPTION = """\
Sell a stock to buyers in several processes, each purchase under a lock, and
audit the books. A buyer reads the stock from SQLite, thinks, and writes what it
read minus one, together with an order: without a lock that oversells. Every
rival gets a fresh stock on the same server:

  fastlock  its Lock with its defaults
  redis-py  its Lock with its defaults
  mixed     both on the same names, every other process uses redis-py
  no-lock   no lock; this one is expected to fail"""

CHECK_SECONDS = 0.25  # without any event, after which the books are checked while the sale runs
STALLED_SECONDS = 30.0  # without any purchase (or three leases, if that is longer) a sale is stalled
OVERSOLD_ENOUGH = 3  # times the stock: a sale without a lock may put the stock up as often as down
LEAVE_SECONDS = 10.0  # beyond the lease: how long buyers may take to leave after "stop"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the flash sale on `parser`."""
    parser.description = DESCRIPTION
    parser.epilog = f"{JSON_SHAPE}\n\n{parser.epilog}"
    add = parser.add_argument
    add("--stock", type=whole(1, 10**7), default=500, metavar="N", help="pieces of each article (default 500)")
    add("--skus", type=whole(1, 10**4), default=1, metavar="N", help="articles, each with its own lock (default 1)")
    add("--processes", type=whole(1, 128), default=4, metavar="N", help="worker processes (default 4)")
    buyers = parser.add_mutually_exclusive_group()
    buyers.add_argument("--threads", type=whole(1, 1024), metavar="N", help="threads, buyers of a process (default 8)")
    buyers.add_argument(
        "--tasks", type=whole(1, 10**5), metavar="N", help="asyncio tasks, the same, instead of threads"
    )
    add("--uvloop", action="store_true", help="run the tasks on uvloop, if it is installed")
    add("--think", type=seconds(0, 60), default=0.0005, metavar="S", help="from reading to writing (default 0.0005 s)")
    add("--timeout", type=seconds(0.001, 3600), default=10.0, metavar="S", help="lease time of the lock (default 10 s)")
    add("--rivals", type=rivals, default=("fastlock", "redis-py"), metavar="A,B", help=f"some of {', '.join(RIVALS)}")
    add("--no-lock", action="store_true", help="also sell without a lock, to see it oversell")


def rivals(text: str) -> tuple[str, ...]:
    """The argparse type of --rivals."""
    chosen = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in chosen:
        if name not in RIVALS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(RIVALS)}")
    return chosen


def run(args: argparse.Namespace, url: str, server: dict[str, Any], progress: Progress) -> int:
    """Run the sales that `args` asks for on the server at `url`, print the results, and return the exit code.

    `server` is the result of `Client.server_info()`, for the report.
    """
    if args.uvloop and args.tasks is None:
        raise Refusal("--uvloop needs --tasks")
    if args.uvloop and importlib.util.find_spec("uvloop") is None:
        print("fastlock: uvloop is not installed, the tasks run on asyncio's own loop", file=sys.stderr)
        args.uvloop = False
    if args.uvloop:
        # The timers of uvloop know whole milliseconds, and 0.5 would become 0.
        args.think = math.ceil(args.think * 1000) / 1000
    outcomes: list[Outcome] = []
    code = OK
    for rival in dict.fromkeys((*args.rivals, *(["no-lock"] if args.no_lock else []))):
        sale = Sale(args, rival, url, progress)
        outcomes.append(sale.run())
        if sale.signal is not None:
            # 128 + the signal's number, as a shell reports it: 130 for Ctrl-C, 143 for SIGTERM.
            code = INTERRUPTED if sale.signal == signal.SIGINT else 128 + sale.signal
            break
    code = code or (OK if all(outcome.ok for outcome in outcomes) else WRONG)
    (_print_json if args.json else _print_text)(args, server, outcomes)
    return code


@dataclass
class Sale:
    """One rival's sale, from the opening of the shop to the audit of its books."""

    args: argparse.Namespace
    rival: str
    url: str
    progress: Progress
    prefix: str = field(default_factory=lambda: f"flash-sale:{secrets.token_hex(6)}:")
    waits: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    accidents: list[str] = field(default_factory=list)
    stopped: str | None = None
    signal: int | None = None  # number of the signal that ended it
    began: float | None = None

    def run(self) -> Outcome:
        """Run the sale; the keys and the folder of this run are removed afterwards, whatever happens."""
        with tempfile.TemporaryDirectory(prefix="fastlock-flash-sale-") as folder:
            path = str(Path(folder, "shop.sqlite"))
            open_shop(path, skus=self.args.skus, stock=self.args.stock)
            workers = Workers(self._plans(path), Path(folder))
            try:
                with workers.signals(), workers, closing(Shop(path)) as shop:
                    self._follow(workers, shop)
            finally:
                self.progress.clear()
                keys_left = self._sweep()
            return Outcome(
                rival=self.rival,
                books=audit(path, stock=self.args.stock),
                buyers=self.args.processes * self._buyers(),
                began=self.began,
                waits=sorted(self.waits),
                errors=self.errors,
                examples=self.examples,
                keys_left=keys_left,
                stopped=self.stopped,
                accidents=tuple(self.accidents),
            )

    def _buyers(self) -> int:
        return int(self.args.tasks or self.args.threads or 8)

    def _plans(self, path: str) -> list[Plan]:
        def lock_of(worker: int) -> str:
            return ("fastlock", "redis-py")[worker % 2] if self.rival == "mixed" else self.rival

        return [
            Plan(
                rival=lock_of(worker),
                url=self.url,
                path=path,
                prefix=self.prefix,
                worker=worker,
                buyers=self._buyers(),
                tasks=self.args.tasks is not None,
                uvloop=self.args.uvloop,
                skus=self.args.skus,
                think=self.args.think,
                timeout=self.args.timeout,
            )
            for worker in range(self.args.processes)
        ]

    def _follow(self, workers: Workers, shop: Shop) -> None:
        """Follow the workers to their end: start the sale when all are ready, stop it if there is a reason."""
        missing, working = set(range(self.args.processes)), set(range(self.args.processes))
        done: set[int] = set()
        watch = Watch(shop, self.args)
        while working:
            event = workers.next_event(CHECK_SECONDS)
            match event:
                case None:
                    self._check(workers, watch, waiting_for=len(missing))
                case Event("signal"):
                    self.signal = event.message["number"]
                    self._stop(workers, watch, "interrupted")
                case Event("ready"):
                    missing.discard(event.worker)
                case Event("done"):
                    self._note(event.message)
                    done.add(event.worker)
                case Event("ended"):
                    working.discard(event.worker)
                    missing.discard(event.worker)
                    if event.worker not in done:
                        how = scrub(workers.how_it_ended(event.worker), self.url)
                        self.accidents.append(f"worker {event.worker} {how}")
            if not missing and self.began is None:
                self.began = time.monotonic()
                workers.order("go" if self.stopped is None else "stop")

    def _check(self, workers: Workers, watch: Watch, waiting_for: int) -> None:
        """No event has come for a while: show how the sale goes, and stop it if it has gone on for long enough."""
        text, reason = watch.check()
        if waiting_for:
            text = f"waiting for {waiting_for} of {self.args.processes} workers"
        self.progress.show(f"{self.rival}: {text}")
        if self.stopped is not None and time.monotonic() > watch.deadline:
            self.accidents.append("workers that did not leave were killed")
            workers.kill()
            watch.deadline = float("inf")
        elif self.stopped is None and reason is not None:
            if reason == "stalled":
                self.accidents.append(f"no purchase for {watch.limit:g} seconds, {text}")
            self._stop(workers, watch, reason)

    def _stop(self, workers: Workers, watch: Watch, reason: str) -> None:
        self.stopped = reason
        # A waiter leaves when it is granted the lock; behind a holder that died it waits for a whole lease.
        watch.deadline = time.monotonic() + self.args.timeout + LEAVE_SECONDS
        workers.order("stop")

    def _note(self, tally: dict[str, Any]) -> None:
        self.waits += tally["waits"]
        self.errors.update(tally["errors"])
        for kind, example in tally["examples"].items():
            self.examples.setdefault(kind, scrub(example, self.url))

    def _sweep(self) -> int | None:
        """Count the lock keys that are left, delete all keys of this run; None if the server does not answer."""
        import redis

        names = [f"{self.prefix}{sku}" for sku in range(self.args.skus)]
        try:
            with redis.Redis.from_url(redis_url(self.url)) as client:
                left = sum(int(client.exists(name)) for name in names)
                # The names of keys that belong to a lock (its queue and the like) contain the name of the lock.
                for key in client.scan_iter(match=f"*{self.prefix}*", count=1000):
                    client.delete(key)
        except (redis.RedisError, OSError) as error:
            self.accidents.append(f"the server could not be asked: {scrub(str(error), self.url)}")
            return None
        return left


class Watch:
    """Checks the books while the sale runs, and says when it is stalled or oversold."""

    def __init__(self, shop: Shop, args: argparse.Namespace) -> None:
        self._shop = shop
        self._stock = args.stock * args.skus
        self._start = self._moved = time.monotonic()
        self._orders = 0
        self.limit = max(STALLED_SECONDS, 3 * args.timeout, 3 * args.think)
        self.deadline = float("inf")  # time.monotonic() at which workers that were sent "stop" are killed

    def check(self) -> tuple[str, str | None]:
        """The state of the sale in words, and why it should stop now, if it should."""
        now = time.monotonic()
        orders, left = self._shop.progress()
        if orders != self._orders:
            self._orders, self._moved = orders, now
        text = f"{orders} of {self._stock} sold, {left} left, {now - self._start:.0f} s"
        if orders > OVERSOLD_ENOUGH * self._stock:
            return text, "oversold"
        return text, "stalled" if now - self._moved > self.limit else None


def _versions() -> dict[str, str]:
    import redis

    import fastlock

    return {
        "fastlock": fastlock.__version__,
        "implementation": fastlock.IMPLEMENTATION,
        "python": platform.python_version(),
        "redis_py": redis.__version__,
    }


def _parameters(args: argparse.Namespace) -> dict[str, Any]:
    names = ("stock", "skus", "processes", "tasks", "uvloop", "think", "timeout")
    threads = None if args.tasks else args.threads or 8
    return {"threads": threads, **{name: getattr(args, name) for name in names}}


def _print_json(args: argparse.Namespace, server: dict[str, Any], outcomes: list[Outcome]) -> None:
    document = {
        "schema": SCHEMA,
        "kind": "flash-sale",
        "ok": all(outcome.ok for outcome in outcomes),
        **_versions(),
        "server": server,
        "parameters": _parameters(args),
        "runs": [as_json(outcome) for outcome in outcomes],
    }
    print(json.dumps(document))


def _print_text(args: argparse.Namespace, server: dict[str, Any], outcomes: list[Outcome]) -> None:
    for line in _heading(args, server):
        print(line)
    print()
    print_rows(table(outcomes), 1, sys.stdout, pretty=sys.stdout.isatty(), tight=False)
    for outcome in outcomes:
        for finding in outcome.findings:
            print(f"{outcome.rival}: {finding}")


def _heading(args: argparse.Namespace, server: dict[str, Any]) -> Iterator[str]:
    versions = _versions()
    many = f"{args.tasks} tasks{' on uvloop' if args.uvloop else ''}" if args.tasks else f"{args.threads or 8} threads"
    yield f"flash sale: {args.stock} pieces of {args.skus} articles, {args.processes} processes x {many}"
    yield f"thinking {args.think:g} s, lease {args.timeout:g} s, {server.get('server')} {server.get('version')}"
    yield (
        f"fastlock {versions['fastlock']} ({versions['implementation']}), redis-py {versions['redis_py']}, "
        f"Python {versions['python']}"
    )
