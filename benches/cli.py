"""The command ``fastlock bench``: what it refuses, how it ends.

What lives here: the way from arguments to an exit code. A debug or traced build is refused, because its numbers would
be believed. Exit codes: 0 all is well; 1 the run failed, or --check missed a budget; 2 refused; 130 Ctrl-C, after
printing what was measured. Never here: measuring.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from fastlock._cli.console import OK, WRONG, Refusal, mask, scrub

from . import options, results
from .family import options as family

if TYPE_CHECKING:
    from .plan import Plan
    from .session import Session
    from .target import Target


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options, and the commands below ``fastlock bench``."""
    options.add_arguments(parser)
    commands = results.add_arguments(parser)
    family.add_arguments(
        commands.add_parser("family", help="each kind of lock beside the plain one, and what users have today")
    )


def run(args: argparse.Namespace) -> int:
    """Run the benchmark and return 0 or 1. Raises Refusal if it cannot be run, KeyboardInterrupt after printing what
    was measured."""
    if args.results == "family":
        with results.libraries():
            from .family import command
        return command.run(args)
    if args.results:
        return results.run(args)
    refuse_slow_build(_core())
    if args.url is not None and args.server is not None:
        raise Refusal("--url and --server exclude each other: a server is either there or started")
    if args.url is not None and args.tls:
        raise Refusal("--tls is for the server that is started: a URL says so by rediss://")
    with results.libraries():
        from .budgets import NETWORK_MS
        from .plan import Options, make_plan
        from .relay import why_not as why_no_relay

        results.load(page=bool(args.html), document=bool(args.json))
    if args.check and args.rtt and NETWORK_MS not in args.rtt:
        raise Refusal(f"--check judges through a network of {NETWORK_MS:g} ms: --rtt has to name it, too")
    plan = make_plan(
        Options(
            scenarios=args.scenario or (),
            rivals=args.rival,
            **{
                name: getattr(args, name)
                for name in ("quick", "rounds", "seconds", "processes", "threads", "tasks", "names", "zipf", "hold")
            },
            waiters=args.waiters,
            rate=args.rate,
            rtt=args.rtt,
            try_lock=args.try_lock,
        )
    )
    with open_or_refuse(args.url, args.server, args.tls) as target:
        if args.rtt and (why := why_no_relay(target.url)):
            raise Refusal(f"--rtt: {why}")
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
def open_or_refuse(url: str | None, server: str | None, tls: bool = False) -> Iterator[Target]:
    """The server to measure, or a Refusal that says why there is none."""
    import redis

    from fastlock import embedded

    from .target import Unusable, open_target

    with contextlib.ExitStack() as stack:
        try:
            target = stack.enter_context(open_target(url, server, tls))
            target.check()
        except embedded.EmbeddedServerError as error:
            raise Refusal(str(error).partition("\n")[0]) from None
        except Unusable as error:
            raise Refusal(f"cannot measure {mask(url or 'this server')}: {scrub(str(error), url or '')}") from None
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
        with signals_noted(session):
            session.run()
    except KeyboardInterrupt as interrupt:  # SIGTERM too: the command line makes it one
        stopped = interrupt
    finally:
        with signals_ignored():
            session.end()
    code = _report(args, session, server, stopped is not None)
    if stopped is not None:
        raise stopped
    return code


class Stoppable(Protocol):
    """What is told of Ctrl-C."""

    stopped: KeyboardInterrupt | None


@contextlib.contextmanager
def signals_noted(session: Stoppable) -> Iterator[None]:
    """Record Ctrl-C and SIGTERM in the session as well as raising them: a library may swallow what is raised in it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def note(number: int, frame: FrameType | None) -> None:
        try:
            before[number](number, frame)
        except KeyboardInterrupt as interrupt:
            session.stopped = interrupt
            raise

    before: dict[int, Any] = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    replaced = [number for number in before if callable(before[number])]
    try:
        for number in replaced:
            signal.signal(number, note)
        yield
    finally:
        for number in replaced:
            signal.signal(number, before[number])


@contextlib.contextmanager
def signals_ignored() -> Iterator[None]:
    """Ignore Ctrl-C and SIGTERM: a second one must not cut short the cleanup after the first, which takes seconds."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread gets signals
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _report(args: argparse.Namespace, session: Session, server: dict[str, str], interrupted: bool) -> int:
    from .budgets import ScenarioResult, deletes_natively, judge
    from .document import document
    from .report import show

    found = {
        name: ScenarioResult({x: measured.rows(x) for x in measured.samples}, measured.stage.parameters)
        for name, measured in session.measured.items()
    }
    verdicts = judge(found, session.plan.scenarios, bool(args.rtt), deletes_natively(server)) if args.check else []
    show(session, server, verdicts, interrupted, sys.stderr if args.json == "-" else sys.stdout)
    result = document(session, server, verdicts, interrupted) if args.json or args.html else None
    if args.html:
        results.write_page(result, args.html)
    if args.json:
        text = json.dumps(result, indent=1) + "\n"
        if args.json == "-":
            sys.stdout.write(text)
        else:
            results.write(args.json, text)
    good = not session.failures and all(verdict.met for verdict in verdicts)
    return OK if good else WRONG
