"""What all subcommands have in common: how they are declared, progress, refusals, argument types, and the masking of
passwords.

Standard library only, except for the one function that parses a server's URL: every command loads this file. Never
here: what a subcommand does.
"""

from __future__ import annotations

import argparse
import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO
from urllib.parse import unquote, urlsplit

from fastlock._transport.settings import settings_from_url

OK, WRONG, REFUSED, INTERRUPTED = 0, 1, 2, 130  # exit codes; --help says what they mean

QUIET_SECONDS = 2.0  # work that is shorter shows no progress
LINE_SECONDS = 5.0  # between lines where no terminal can rewrite one
BAR = 20  # characters

# Greedy up to the last @: a password with a raw @ or / in it is masked whole, at worst with some text behind it.
_USERINFO = re.compile(r"://(?:([^:@/\s]+)(?=:))?.*@", re.DOTALL)
_SECRET_PARAMETER = re.compile(r"([?&](?:ssl_)?password=)[^&#\s]*")


@dataclass(frozen=True, slots=True)
class Command:
    """One subcommand: the line in the list, what declares its options, what runs it."""

    summary: str
    declare: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


class Refusal(Exception):
    """The command cannot run as asked: one line on stderr and exit code 2, never a traceback."""


def mask(text: str) -> str:
    """`text` with the credentials of the URL in it replaced by ***; the user name stays."""
    masked = _USERINFO.sub(lambda found: f"://{found[1] or ''}:***@", text)
    return _SECRET_PARAMETER.sub(r"\1***", masked)


def scrub(text: str, url: str) -> str:
    """`text`, of an error about `url`, in one line and without the password of `url` in any of its spellings."""
    try:
        password = urlsplit(url).password
    except ValueError:
        password = None
    text = text.replace(url, mask(url))
    for secret in filter(None, {password, unquote(password or "")}):
        text = text.replace(secret, "***")
    return " ".join(mask(text).split())


class Progress:
    """What a long command is doing, on stderr: one line rewritten on a terminal, else a plain line now and then."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._tty = stream.isatty()
        self._next = clock() + QUIET_SECONDS
        self._width = 0

    def show(self, text: str, part: float | None = None) -> None:
        """Show `text`, if the time has come for it; `part`: how much is done, of 1, as a bar or in per cent."""
        if self._clock() < self._next:
            return
        if part is not None:
            done = round(part * BAR)
            text = f"[{'#' * done}{'.' * (BAR - done)}] {text}" if self._tty else f"{text} ({part:.0%})"
        if self._tty:
            self._stream.write("\r" + text.ljust(self._width))
            self._width = len(text)
        else:
            self._stream.write(text + "\n")
            self._next = self._clock() + LINE_SECONDS
        self._stream.flush()

    def clear(self) -> None:
        """Erase the line, before something else is printed or another piece of work begins."""
        if self._width:
            self._stream.write("\r" + " " * self._width + "\r")
            self._stream.flush()
            self._width = 0
        self._next = self._clock() + QUIET_SECONDS


def whole(low: int, high: int) -> Callable[[str], int]:
    """An argparse type: a whole number from `low` to `high`."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if not low <= number <= high:
            raise argparse.ArgumentTypeError(f"{number} is not between {low} and {high}")
        return number

    return parse


def number(low: float, high: float, unit: str = "") -> Callable[[str], float]:
    """An argparse type: a number from `low` to `high`, of the unit that errors name."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number{unit and ' of ' + unit}") from None
        if not math.isfinite(value) or not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text} is not between {low:g} and {high:g}{unit and ' ' + unit}")
        return value

    return parse


def seconds(low: float, high: float) -> Callable[[str], float]:
    """An argparse type: a number of seconds from `low` to `high`."""
    return number(low, high, "seconds")


def server_url(text: str) -> str:
    """The argparse type of --url: refuses an invalid URL before anything connects; its errors quote no password."""

    try:
        parts = urlsplit(text)
        # A raw character has ended the password early here, and its rest would be taken for something else.
        if parts.fragment or (parts.scheme != "unix" and "@" in parts.path):
            raise ValueError("an @, / or # in the password must be percent-encoded")
        settings_from_url(text)
    except (ValueError, TypeError, OSError) as error:
        raise argparse.ArgumentTypeError(scrub(str(error).removeprefix("url: "), text)) from None
    return text
