"""Commands about saved results: ``fastlock bench compare`` and ``render``, and the page of ``--html``.

This file reads files, writes files and returns exit codes; it measures, draws and compares nothing. What is wrong with
a file is a Refusal, one line; an existing page is replaced only by a complete one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fastlock._cli.console import OK, WRONG, Refusal

from .options import writable

COMPARE = """\
Compare two results of fastlock bench --json: A is the older one. Marks what lies inside the noise of the two runs, and
says so where they differ too much in machine, versions or parameters."""

RENDER = "Make the page of --html from a result that was saved with --json."

OWN = {"command", "results", "of_a_run", "a", "b", "json", "fail_over", "result", "page"}
"""Arguments of compare and render, and those that argparse itself adds."""


def add_arguments(parser: argparse.ArgumentParser) -> argparse._SubParsersAction[argparse.ArgumentParser]:
    """Declare --html, and the commands below ``fastlock bench``, to which others may be added."""
    parser.add_argument("--html", metavar="FILE", type=writable, help="write a page with charts there, for a browser")
    parser.set_defaults(of_a_run=parser.get_default)
    commands = parser.add_subparsers(dest="results", metavar="compare | render | family", title="commands")
    compared = commands.add_parser("compare", help="compare two saved results", description=COMPARE)
    compared.add_argument("a", metavar="A.json", help="the older result")
    compared.add_argument("b", metavar="B.json", help="the newer one")
    compared.add_argument(
        "--json", metavar="FILE", type=writable, default=argparse.SUPPRESS, help="write JSON there; -: to stdout"
    )
    compared.add_argument(
        "--fail-over",
        type=percent,
        metavar="PERCENT",
        help="exit with 1 if anything of fastlock takes more than PERCENT longer in B, beyond the noise, or is gone, or"
        " B failed",
    )
    rendered = commands.add_parser("render", help="make a page from a saved result", description=RENDER)
    rendered.add_argument("result", metavar="RESULT.json")
    rendered.add_argument("page", metavar="REPORT.html", type=writable)
    return commands


def run(args: argparse.Namespace) -> int:
    """Run ``compare`` or ``render``. Raises Refusal, also for an option that only a run has."""
    for name, value in vars(args).items():
        if name not in OWN and value != args.of_a_run(name):
            raise Refusal(f"bench {args.results} measures nothing, --{name.replace('_', '-')} is for a run")
    with libraries():
        return _compare(args) if args.results == "compare" else _render(args)


@contextlib.contextmanager
def libraries() -> Iterator[None]:
    """Turn an ImportError of a library into a Refusal that names the extra which installs it."""
    try:
        yield
    except ImportError as error:
        if (error.name or "").startswith("fastlock"):
            raise
        raise Refusal(f'a library is missing ({error}); in the clone, install it: pip install ".[bench]"') from None


def load(page: bool, document: bool) -> None:
    """Import what it takes to write a page, or a document, before a run and not after it. Raises ImportError."""
    if document or page:
        from . import document as _document  # noqa: F401
    if page:
        from . import html as _html  # noqa: F401


def write_page(document: Any, path: str, name: str = "the result") -> None:
    """Write the page of a document. Raises Refusal."""
    from .html import page
    from .page.histograms import Unreadable
    from .schema import checked

    try:
        text = page(checked(document, name))
    except Unreadable as error:
        raise Refusal(f"{name}: a histogram cannot be read ({error})") from None
    write(path, text)


def write(path: str, text: str) -> None:
    """Write a file completely or not at all. Raises Refusal."""
    try:
        if not Path(path).exists() or Path(path).is_file():
            _replace(Path(path), text)
        else:  # a pipe or a device
            Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise Refusal(f"cannot write {path}: {error.strerror}") from None


def _replace(path: Path, text: str) -> None:
    target = path.resolve()
    handle, beside = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(beside, 0o666 & ~mask)
        os.replace(beside, target)
    except BaseException:
        os.unlink(beside)
        raise


def percent(text: str) -> float:
    """The argparse type of --fail-over."""
    try:
        number = float(text.removesuffix("%"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of percent") from None
    if not math.isfinite(number) or number < 0:
        raise argparse.ArgumentTypeError(f"{text} is not a number of percent from 0 on")
    return number


def _render(args: argparse.Namespace) -> int:
    from .schema import read

    result = read(args.result)
    if not result["scenarios"]:
        raise Refusal(f"{args.result}: nothing was measured")
    write_page(result, args.page, args.result)
    return OK


def _compare(args: argparse.Namespace) -> int:
    from .compare import as_json, broken, compare, judgeable, slower
    from .compared import show
    from .schema import read

    names = (args.a, args.b)
    a, b = read(args.a), read(args.b)
    for name, document in zip(names, (a, b), strict=True):
        build = (document.get("environment") or {}).get("build")
        if build not in (None, "release", "pure"):
            raise Refusal(f"{name}: it was measured on a {build} build, whose speed means nothing")
    comparison = compare(a, b)
    if not comparison.entries:
        raise Refusal(f"{args.a} and {args.b} have no rival of any scenario in common")
    if args.fail_over is not None and not judgeable(comparison):
        raise Refusal("nothing of fastlock can be compared, so --fail-over has nothing to judge")
    show(comparison, names, args.fail_over, sys.stderr if args.json == "-" else sys.stdout)
    if args.json:
        text = json.dumps(as_json(comparison, names, args.fail_over), indent=1) + "\n"
        if args.json == "-":
            sys.stdout.write(text)
        else:
            write(args.json, text)
    if args.fail_over is None:
        return OK
    return WRONG if slower(comparison, args.fail_over) or broken(comparison.b) else OK
