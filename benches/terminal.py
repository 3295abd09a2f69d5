"""Tables for a terminal: by rich where it is installed, plain otherwise.

Plain characters only, whatever a result file says: no control codes, no markup, nothing that a narrow encoding lacks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

SPELLED = str.maketrans(
    {
        "\N{MICRO SIGN}": "u",
        "\N{MULTIPLICATION SIGN}": "x",
        "\N{ALMOST EQUAL TO}": "~",
        "\N{EM DASH}": "-",
        "\N{EN DASH}": "..",
    }
)


def plain(text: object) -> str:
    """Spell ``text`` in one line of ASCII."""
    spelled = "".join(each if each.isprintable() else " " for each in str(text).translate(SPELLED))
    return spelled.encode("ascii", "replace").decode()


def table(title: str, headings: Sequence[str], lines: Sequence[Sequence[str]], words: int, stream: TextIO) -> None:
    """Print a table under its title; its first ``words`` columns are text, the others numbers."""
    print(f"\n{plain(title)}", file=stream)  # not by rich, which breaks it to the width of the table
    print_rows((headings, *lines), words, stream)


def print_rows(
    lines: Sequence[Sequence[str]], words: int, stream: TextIO, *, pretty: bool = True, tight: bool = True
) -> None:
    """Print rows, the first of them the headings. No cell is cut short.

    words: columns of text, the others are numbers. pretty: by rich, if it is installed. tight: rich pads the outer
    columns and the space between columns less.
    """
    rows = [[plain(cell) for cell in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if not (pretty and _by_rich(rows, widths, words, stream, tight)):
        _plain(rows, widths, words, stream)


def _by_rich(rows: list[list[str]], widths: list[int], words: int, stream: TextIO, tight: bool) -> bool:
    """Print the rows by rich; False where rich is not installed."""
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return False
    made = Table(box=box.SIMPLE_HEAD, pad_edge=not tight, collapse_padding=tight)
    for at, heading in enumerate(rows[0]):
        made.add_column(Text(heading), justify="left" if at < words else "right", no_wrap=True)
    for line in rows[1:]:
        made.add_row(*map(Text, line), style="bold" if "fastlock" in line[:words] else None)
    console = Console(file=stream)  # rich itself knows NO_COLOR
    needed = sum(widths) + 3 * len(widths) + 2  # a terminal wraps what rich would cut short
    console.width = max(console.width if console.is_terminal else 0, needed)
    console.print(made)
    return True


def _plain(rows: list[list[str]], widths: list[int], words: int, stream: TextIO) -> None:
    for row in rows:
        cells = (
            cell.ljust(width) if at < words else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        print("  ".join(cells).rstrip(), file=stream)
