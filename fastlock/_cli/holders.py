"""Who holds what, for operators: `fastlock ls`, `show`, `break` and `watch`.

They connect as any client does, acquire nothing, and change nothing but by `break`. Never here: what is known of a name
and how it is found out (the protocol's), how it is shown.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from fastlock._cli.console import OK, WRONG, Command, Progress, Refusal, mask, scrub, seconds, server_url, whole

if TYPE_CHECKING:
    from fastlock import Client, Description
    from fastlock._protocol.describe import Found

URL = "redis://localhost:6379/0"
CHUNK = 100  # names that are described at a time

LS = """\
List the names that are held or waited for. It looks at all keys of the database
(SCAN); locks of redis-py are not found, as their values may be anything."""
SHOW = "Tell all that is known of one name: who holds it, for how long still, who waits for it."
BREAK = """\
Take a lock away from those who hold it, and grant it to who waits next. It shows
them and asks first. Who acquires it meanwhile keeps it. The holder of a renewed
lease is told by its next renewal, any other by its release or extension."""
WATCH = "Show what `ls` shows again and again, until Ctrl-C, which is its normal end."


def _declare_server(parser: argparse.ArgumentParser, about: str, json: bool = True) -> None:
    parser.description = about
    parser.add_argument(
        "--url",
        type=server_url,
        default=URL,
        help="server to ask, redis:// rediss:// unix:// valkey:// valkeys://; default: %(default)s",
    )
    if json:
        parser.add_argument("--json", action="store_true", help="JSON on stdout instead of text")


def _declare_names(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--match", metavar="PATTERN", default="*", help="only these names, * ? [] as in Redis")
    parser.add_argument(
        "--limit", metavar="N", type=whole(1, 10**9), default=1000, help="names at most; default: %(default)s"
    )


def _declare_ls(parser: argparse.ArgumentParser) -> None:
    _declare_server(parser, LS)
    _declare_names(parser)


def _declare_show(parser: argparse.ArgumentParser) -> None:
    _declare_server(parser, SHOW)
    parser.add_argument("name", metavar="NAME", help="the name of the lock")


def _declare_break(parser: argparse.ArgumentParser) -> None:
    _declare_server(parser, BREAK, json=False)
    parser.add_argument("name", metavar="NAME", help="the name of the lock")
    parser.add_argument("--yes", action="store_true", help="do not ask")


def _declare_watch(parser: argparse.ArgumentParser) -> None:
    _declare_server(parser, WATCH)
    _declare_names(parser)
    parser.add_argument(
        "--interval",
        metavar="SECONDS",
        type=seconds(0.01, 86400),
        default=1.0,
        help="seconds between two looks; default: %(default)s",
    )
    parser.add_argument("--count", metavar="N", type=whole(1, 10**9), help="end after so many looks")


# ---------------------------------------------------------------------------------------------------------- the server


@contextmanager
def _client_of(args: argparse.Namespace) -> Iterator[Client]:
    """A client of the server; what goes wrong there raises Refusal."""
    from redis.exceptions import RedisError

    import fastlock

    try:
        with fastlock.Client.from_url(args.url) as client:
            yield client
    except BrokenPipeError:  # of stdout
        raise
    except (RedisError, OSError, ValueError, TypeError) as error:
        text = " ".join([str(error), *getattr(error, "__notes__", [])])
        raise Refusal(f"cannot use {mask(args.url)}: {scrub(text, args.url)}") from None


def _names(client: Client, args: argparse.Namespace, progress: Progress) -> tuple[list[bytes], bool]:
    """The names that are held or waited for, sorted; and whether these are all."""
    from fastlock._protocol import inventory
    from fastlock._protocol.lease import now

    names: set[bytes] = set()
    for pattern in inventory.patterns(os.fsencode(args.match)):
        cursor = b"0"
        while True:
            cursor, found = client._transport.drive(inventory.scan(cursor, pattern, now))
            names.update(found)
            progress.show(f"looking for locks: {len(names)} found")
            if len(names) > args.limit:
                return sorted(names)[: args.limit], False
            if cursor == b"0":
                break
    return sorted(names), True


def _described(client: Client, keys: list[bytes], found: list[Found] | None = None) -> list[Description]:
    from fastlock._locks.own import own_leases
    from fastlock._protocol import describe
    from fastlock._protocol.description import describe_found
    from fastlock._protocol.lease import now

    if found is None:
        parts = [keys[at : at + CHUNK] for at in range(0, len(keys), CHUNK)]
        found = [each for part in parts for each in client._transport.drive(describe.find_all(part, now))]
    names: list[Any] = list(keys)
    steps = describe_found(names, keys, found, own_leases, time.time, now)
    return client._transport.drive(steps)


def _look(client: Client, args: argparse.Namespace, progress: Progress) -> tuple[list[Description], bool]:
    """All that are held or waited for, and whether these are all."""
    names, complete = _names(client, args, progress)
    found = [each for each in _described(client, names) if each.holders or each.waiters]
    progress.clear()
    return found, complete


def _warn_of_more(args: argparse.Namespace, complete: bool) -> None:
    if not complete:
        print(f"fastlock: only {args.limit} names are shown: --limit for more, --match for others", file=sys.stderr)


def _document(args: argparse.Namespace, kind: str, **values: object) -> str:
    return json.dumps({"schema": 1, "kind": kind, "url": mask(args.url), **values})


# -------------------------------------------------------------------------------------------------------- the commands


def _run_ls(args: argparse.Namespace) -> int:
    from fastlock._cli import shown

    with _client_of(args) as client:
        found, complete = _look(client, args, Progress(sys.stderr))
    if args.json:
        print(_document(args, "ls", found=[*map(shown.document, found)], complete=complete))
    else:
        shown.print_table([*map(shown.row, found)], sys.stdout)
        _warn_of_more(args, complete)
    return OK


def _run_show(args: argparse.Namespace) -> int:
    from fastlock._cli import shown

    with _client_of(args) as client:
        (found,) = _described(client, [os.fsencode(args.name)])
    if args.json:
        print(_document(args, "show", found=shown.document(found)))
    else:
        shown.put("\n".join(shown.lines(found)))
    return OK


def _run_break(args: argparse.Namespace) -> int:
    from fastlock._cli import shown
    from fastlock._protocol import describe, inventory
    from fastlock._protocol.lease import now

    if not (args.yes or sys.stdin.isatty()):
        raise Refusal("break asks before it breaks a lock, and there is no terminal to ask at: give --yes")
    key, name = os.fsencode(args.name), shown.printable(os.fsencode(args.name))
    with _client_of(args) as client:
        found = client._transport.drive(describe.find(key, now))
        (before,) = _described(client, [key], [found])
        shown.put("\n".join(shown.lines(before)))
        if before.kind == "other":
            print("fastlock: its key holds something that is no lock: break does not touch it", file=sys.stderr)
            return WRONG
        if not before.holders or not (args.yes or _confirmed()):
            return WRONG
        taken = client._transport.drive(inventory.break_locks(key, found, now))
        (after,) = _described(client, [key])
    if not taken:
        print("fastlock: nothing was broken: those who held it do not hold it any more", file=sys.stderr)
        return WRONG
    holder = ", ".join(map(shown.who, after.holders))
    shown.put(f"{name}: broken{f', and held by {holder} now' if holder else ', and free'}")
    return OK


def _confirmed() -> bool:
    try:
        answer = input("Those who hold it go on, without a lock. Break it? yes/no: ")
    except EOFError:
        answer = ""
    if answer.strip().lower() in ("y", "yes"):
        return True
    print("fastlock: not broken", file=sys.stderr)
    return False


def _run_watch(args: argparse.Namespace) -> int:
    progress, looks = Progress(sys.stderr), itertools.count() if args.count is None else range(args.count)
    try:
        with _client_of(args) as client, _screen(args) as screen:
            for at in looks:
                if at:
                    time.sleep(args.interval)
                screen.show(*_look(client, args, progress))
    except KeyboardInterrupt as error:
        if type(error) is not KeyboardInterrupt:  # SIGTERM
            raise
    return OK


class _Screen:
    """Where `watch` shows what it sees: each look as a line of JSON, or as a table."""

    def __init__(self, args: argparse.Namespace, live: Any = None) -> None:
        self.args = args
        self.live = live  # of rich

    def show(self, found: list[Description], complete: bool) -> None:
        from fastlock._cli import shown

        if self.args.json:
            documents = [*map(shown.document, found)]
            print(_document(self.args, "watch", time=time.time(), found=documents, complete=complete), flush=True)
            return
        title = f"{time.strftime('%H:%M:%S')}  {len(found)}{'' if complete else ' or more'} names"
        rows = [*map(shown.row, found)]
        if self.live is not None:
            self.live.update(shown.rich_table(rows, title), refresh=True)
        else:
            shown.put(title)
            shown.print_table(rows, sys.stdout)


@contextmanager
def _screen(args: argparse.Namespace) -> Iterator[_Screen]:
    """The screen of `watch`: a live one on a terminal, where rich is installed."""
    live: Any = nullcontext()
    if sys.stdout.isatty() and not args.json:
        try:
            from rich.live import Live
        except ImportError:
            print("fastlock: for a live table install rich: pip install rich", file=sys.stderr)
        else:
            live = Live(auto_refresh=False, screen=args.count is None)
    with live as entered:
        yield _Screen(args, entered)


COMMANDS = {
    "ls": Command("list the locks that are held or waited for", _declare_ls, _run_ls),
    "show": Command("who holds a lock, and who waits for it", _declare_show, _run_show),
    "break": Command("take a lock away from who holds it", _declare_break, _run_break),
    "watch": Command("list the locks again and again", _declare_watch, _run_watch),
}
