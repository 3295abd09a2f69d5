"""The command ``fastlock bench``: its options, what it refuses, how it ends.

Law: no measuring here. A debug or traced build is refused, because its numbers would be believed. Exit codes: 0 all is
well; 1 a scenario was not true, or --check missed a budget; 2 refused; 130 Ctrl-C, after printing what was measured.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fastlock._console import OK, WRONG, Refusal, mask, scrub, seconds, whole

if TYPE_CHECKING:
    from .session import Plan, Session
    from .target import Target

DESCRIPTION = """\
Measure fastlock, its fallback and redis-py on the same server, in turns: pairs of acquire and release per second,
latencies, server and client CPU. Only ratios taken in one run mean something. Keys carry a prefix of the run and are
removed."""

SCENARIO_NAMES = ("pair", "threads", "tasks", "tasks-uvloop", "batch")
"""As in ``scenarios``, which is not loaded for --help."""

FULL, QUICK = (5, 0.5), (3, 0.15)
"""Rounds, and seconds of one run."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``fastlock bench``."""
    parser.description = DESCRIPTION
    parser.add_argument("--url", help="server to measure, such as redis://localhost:6379/0; default: an embedded one")
    parser.add_argument("--server", metavar="PATH", help="program of the embedded server; default: the best one found")
    parser.add_argument(
        "--scenario", action="append", choices=SCENARIO_NAMES, help="measure this one only; may be given several times"
    )
    parser.add_argument("--rounds", type=whole(1, 1000), metavar="N", help=f"default {FULL[0]}, quick {QUICK[0]}")
    parser.add_argument(
        "--seconds",
        type=seconds(0.01, 600),
        metavar="S",
        help=f"of one run; default {FULL[1]}, quick {QUICK[1]}",
    )
    parser.add_argument("--quick", action="store_true", help="short runs and few rounds: a first look, noisy")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a budget of the acceptance list is missed")
    parser.add_argument("--json", metavar="FILE", help="write JSON there; -: to stdout, and the table to stderr")


def run(args: argparse.Namespace) -> int:
    """Run the benchmark: 0 or 1. Raises Refusal if it cannot be run, KeyboardInterrupt after printing what there is."""
    refuse_slow_build(_core())
    if args.url is not None and args.server is not None:
        raise Refusal("--url and --server exclude each other: a server is either there or started")
    try:
        from .session import Plan
    except ImportError as error:
        raise Refusal(f"a library is missing ({error}); install fastlock[bench]") from None
    rounds, length = QUICK if args.quick else FULL
    chosen = tuple(name for name in SCENARIO_NAMES if name in (args.scenario or SCENARIO_NAMES))
    plan = Plan(chosen, args.rounds or rounds, args.seconds or length)
    with _target(args.url, args.server) as target:
        return _measure(args, target, plan)


def refuse_slow_build(core: Any) -> None:
    """Raise Refusal unless ``core`` (None: not compiled) is a release build."""
    if core is not None and core.BUILD != "release":
        raise Refusal(f"the core is a {core.BUILD} build, whose speed means nothing; compile a release build")


def _core() -> ModuleType | None:
    try:
        return importlib.import_module("fastlock._core")
    except ImportError:
        return None


@contextlib.contextmanager
def _target(url: str | None, server: str | None) -> Iterator[Target]:
    """The server to measure, or a Refusal that says why there is none."""
    import redis

    from fastlock import embedded

    from .target import open_target

    with contextlib.ExitStack() as stack:
        try:
            target = stack.enter_context(open_target(url, server))
        except embedded.EmbeddedServerError as error:
            raise Refusal(str(error).partition("\n")[0]) from None
        except (redis.RedisError, OSError, ValueError, TypeError) as error:
            if url is None:
                raise
            raise Refusal(f"cannot use {mask(url)}: {scrub(str(error), url)}") from None
        yield target


def _measure(args: argparse.Namespace, target: Target, plan: Plan) -> int:
    from .session import Session

    server, session = target.describe(), Session(target, plan)
    stopped: KeyboardInterrupt | None = None
    try:
        session.run()
    except KeyboardInterrupt as interrupt:  # SIGTERM too: the command line makes it one
        stopped = interrupt
    finally:
        session.end()
    code = _report(args, session, server, stopped is not None)
    if stopped is not None:
        raise stopped
    return code


def _report(args: argparse.Namespace, session: Session, server: dict[str, str], interrupted: bool) -> int:
    from .budgets import judge
    from .report import document, show

    verdicts = judge(session.rows(), session.plan.scenarios) if args.check else []
    show(session, server, verdicts, interrupted, sys.stderr if args.json == "-" else sys.stdout)
    if args.json:
        text = json.dumps(document(session, server, verdicts, interrupted), indent=1) + "\n"
        if args.json == "-":
            sys.stdout.write(text)
        else:
            with open(args.json, "w", encoding="utf-8") as file:
                file.write(text)
    good = not session.failures and all(verdict.met for verdict in verdicts)
    return OK if good else WRONG
