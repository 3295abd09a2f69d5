"""`fastlock bench family`: what it refuses, which parts it runs, how it ends.

Exit codes are those of `fastlock bench`: 0 all is well; 1 the run failed, or --check missed a bound; 2 refused; 130
Ctrl-C, after printing what was measured. Never here: measuring, printing.
"""

from __future__ import annotations

import argparse
import json
import sys

from fastlock._cli.console import OK, WRONG, Progress, Refusal

from .. import cli, results
from ..target import Target
from . import contests, pairs, renewals
from .judge import judge
from .options import APIS, PARTS, SHARED
from .session import Session, Settings

OWN = {"command", "results", "of_a_run", "part", "api", "rtt", "readers", "writers", "callers", "permits", "leases"}
"""Arguments of this command, beside the shared ones, and those that argparse itself adds."""

Found = tuple[pairs.PairPart, contests.ContestPart, renewals.RenewalPart]
"""What was measured, by part."""


def run(args: argparse.Namespace) -> int:
    """Run the benchmark and return 0 or 1. Raises Refusal if it cannot be run, KeyboardInterrupt after printing what
    was measured."""
    for name, value in vars(args).items():
        if name not in {*OWN, *SHARED, "lease"} and value != args.of_a_run(name):
            raise Refusal(f"--{name.replace('_', '-')} is for fastlock bench, bench family has no such option")
    cli.refuse_slow_build(cli._core())
    if args.url is not None and args.server is not None:
        raise Refusal("--url and --server exclude each other: a server is either there or started")
    with results.libraries():
        from . import document as _document  # noqa: F401  # its libraries, before a run and not after it
    with cli.open_or_refuse(args.url, args.server) as target:
        return _measure(args, target)


def settings_of(args: argparse.Namespace) -> Settings:
    """What the arguments ask for."""
    quick = args.quick

    def either(name: str, full: float, short: float) -> float:
        given = getattr(args, name)
        return given if given is not None else short if quick else full

    return Settings(
        quick=quick,
        parts=tuple(part for part in PARTS if part in (args.part or PARTS)),
        apis=tuple(api for api in APIS if api in (args.api or APIS)),
        rounds=int(either("rounds", 5, 3)),
        contest_rounds=int(either("rounds", 5, 1)),
        seconds=either("seconds", 0.5, 0.05),
        contest_seconds=either("seconds", 1.0, 0.3),
        rtt=args.rtt / 1e3,
        processes=args.processes or 4,
        hold=(1.0 if args.hold is None else args.hold) / 1e3,
        readers=args.readers,
        writers=args.writers,
        callers=args.callers,
        permits=args.permits,
        leases=args.leases,
        lease=either("lease", 30.0, 3.0),
    )


def _measure(args: argparse.Namespace, target: Target) -> int:
    session = Session(target, settings_of(args), Progress(sys.stderr))
    server, found = target.describe(), (pairs.PairPart(), contests.ContestPart(), renewals.RenewalPart())
    stopped: KeyboardInterrupt | None = None
    try:
        with cli.signals_noted(session):
            _run_parts(session, found)
    except KeyboardInterrupt as interrupt:  # SIGTERM too: the command line makes it one
        stopped = interrupt
    finally:
        with cli.signals_ignored():
            session.end()
    code = _report(args, session, server, found, stopped is not None)
    if stopped is not None:
        raise stopped
    return code


def _run_parts(session: Session, found: Found) -> None:
    chosen = session.settings.parts
    if "pairs" in chosen:
        pairs.measure(session, found[0])
    if "contention" in chosen:
        contests.measure(session, found[1])
    if "renewal" in chosen:
        renewals.measure(session, found[2])


def _report(args: argparse.Namespace, session: Session, server: dict[str, str], found: Found, stopped: bool) -> int:
    from .document import document
    from .report import show

    verdicts = judge(session.settings, found[0], found[2]) if args.check else []
    facts = document(session, server, found, verdicts, stopped)
    show(session, facts, found, verdicts, stopped, sys.stderr if args.json == "-" else sys.stdout)
    if args.json:
        text = json.dumps(facts, indent=1) + "\n"
        if args.json == "-":
            sys.stdout.write(text)
        else:
            results.write(args.json, text)
    good = not session.failures and all(verdict.met for verdict in verdicts)
    return OK if good else WRONG
