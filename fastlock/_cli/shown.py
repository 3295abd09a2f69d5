"""How a description of a name is shown: as JSON, as lines of text, as rows of a table by rich or in plain characters.

Names and hosts are bytes that anybody may have written: nothing of them reaches a terminal but printable characters.
Never here: what is asked of the server.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Sequence
from typing import Any, TextIO

from fastlock._protocol.description import Description, Holder, QueuedWaiter

HEADINGS = ("name", "kind", "holder", "left", "waiters")
LONGEST = 60  # characters of a name in a table
KINDS = {"lock": "lock", "rw_lock": "read-write", "semaphore": "semaphore", "other": "no lock", None: "-"}
DOES = {"read": "reads", "write": "writes"}
WANTS = {"read": "to read", "write": "to write"}


def printable(name: bytes | str) -> str:
    """A name, or a part of one, as text: what cannot be printed is spelled as in a Python string."""
    text = name.decode("utf-8", "backslashreplace") if isinstance(name, bytes) else name
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def document(found: Description) -> dict[str, Any]:
    """A description for JSON. A name that is no UTF-8 is there in hexadecimal digits, too."""
    values = dataclasses.asdict(found)
    try:
        values["name"] = found.name.decode()
    except UnicodeDecodeError:
        values |= {"name": printable(found.name), "name_hex": found.name.hex()}
    return values


def lines(found: Description) -> list[str]:
    """All of a description, as text."""
    rows = [("name", printable(found.name)), ("kind", KINDS[found.kind] if found.kind else "nobody holds it")]
    rows += [("holder", _all_of(each)) for each in found.holders]
    if found.permits is not None:
        rows.append(("permits", f"{found.used} of {found.permits} held"))
    rows += [(f"waiter {at}", _waiter(each)) for at, each in enumerate(found.waiters, 1)]
    if found.fence is not None:
        rows.append(("last fence", str(found.fence)))
    return [f"{label:<12}{value}" for label, value in rows]


def who(one: Holder | QueuedWaiter) -> str:
    """Where somebody runs, as far as that is known."""
    if one.process is None:
        return "unknown"
    if one.host is None:
        unknown = {False: " (not connected)", None: " (not connected, or the server does not tell)", True: ""}
        return f"process {one.process}{unknown[one.connected]}"
    return f"{one.pid}@{one.host}"


def _all_of(holder: Holder) -> str:
    parts = [who(holder)]
    if holder.host is not None:
        parts.append(f"process {holder.process}")
    if holder.owner is not None:
        parts.append(printable(holder.owner))
    if holder.since is not None:
        parts.append(f"for {max(0.0, time.time() - holder.since):.1f} s")
    if holder.depth is not None and holder.depth > 1:
        parts.append(f"{holder.depth} deep")
    return ", ".join([*parts, *_kept(holder), *_part_of(holder), _left(holder)])


def _kept(holder: Holder) -> list[str]:
    if not holder.kept:
        return []
    return ["kept, nobody is in it" if holder.depth == 0 else "may be kept"]


def _part_of(holder: Holder) -> list[str]:
    permits = [] if holder.permits is None else [f"{holder.permits} permit{'s'[: holder.permits != 1]}"]
    return [DOES[holder.mode]] if holder.mode else permits


def _waiter(waiter: QueuedWaiter) -> str:
    wants = WANTS[waiter.mode] if waiter.mode else f"for {waiter.permits}" if waiter.permits else ""
    return ", ".join(filter(None, [who(waiter), wants]))


def _left(holder: Holder) -> str:
    return "no end" if holder.left is None else f"{holder.left:.1f} s left"


def row(found: Description) -> tuple[str, ...]:
    """A description as a row of a table."""
    name, holders = printable(found.name), found.holders
    shown = [" ".join([who(each), *_part_of(each), *map("({})".format, _kept(each))]) for each in holders[:2]]
    more = [f"and {len(holders) - 2} more"] if len(holders) > 2 else []
    ends = [each.left for each in holders]
    left = "" if not ends else "no end" if None in ends else f"{max(end for end in ends if end is not None):.1f} s"
    name = name if len(name) <= LONGEST else f"{name[:LONGEST]}..."
    return name, KINDS[found.kind], ", ".join([*shown, *more]) or "-", left, str(len(found.waiters))


def rich_table(rows: Sequence[tuple[str, ...]], title: str | None = None) -> Any:
    """A table of rich's. None: rich is not installed."""
    try:
        from rich import box
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return None
    table = Table(title=None if title is None else Text(title), box=box.SIMPLE_HEAD, title_justify="left")
    for heading in HEADINGS:
        table.add_column(heading, justify="right" if heading in ("left", "waiters") else "left", overflow="fold")
    for each in rows:
        table.add_row(*map(Text, each))  # as text: a name may look like markup
    return table


def print_table(rows: Sequence[tuple[str, ...]], stream: TextIO) -> None:
    """Print a table: by rich on a terminal, if that is installed, else in plain characters."""
    table = rich_table(rows) if stream.isatty() else None
    if table is not None:
        from rich.console import Console

        Console(file=stream).print(table)
        return
    widths = [max(map(len, column)) for column in zip(HEADINGS, *rows, strict=True)]
    for cells in (HEADINGS, *rows):
        put("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip(), stream)


def put(text: str, stream: TextIO | None = None) -> None:
    """Print a line, also where the stream's encoding lacks some of its characters."""
    stream = stream or sys.stdout
    encoding = stream.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), file=stream, flush=True)
