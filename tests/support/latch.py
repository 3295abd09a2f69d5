"""A session that dies in the middle of a test (crash, kill, timeout) must not be forgotten by the next session.

pytest writes its cache at the end of a session, so after a crash `--lf` or a run of another test would hide it. Here
each session keeps a note of the test that it runs; a note whose process is gone means that the session died. From then
on every session that collects that test and does not bring it to its end fails, until one does, or --clear-crash.
"""

from __future__ import annotations

import faulthandler
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest


class Latch:
    """The notes of all sessions in one folder, one file per process."""

    def __init__(self, folder: Path, clear: bool = False) -> None:
        self._note = folder / f"{os.getpid()}.json"
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        if clear:
            for note in self._dead_notes():
                note.unlink(missing_ok=True)
        self.died_in: dict[str, list[Path]] = {}
        for note in self._dead_notes():
            self.died_in.setdefault(_read(note), []).append(note)
        self._collected: set[str] = set()

    def _dead_notes(self) -> Iterator[Path]:
        for note in sorted(self._folder.glob("*.json")):
            if note.stem != str(os.getpid()) and not _alive(int(note.stem)):
                yield note

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self._collected = {item.nodeid for item in items}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._note.write_text(json.dumps(item.nodeid))
        result = yield
        self._note.unlink(missing_ok=True)
        for note in self.died_in.pop(item.nodeid, []):
            note.unlink(missing_ok=True)
        return result

    def unsettled(self) -> list[str]:
        """Tests in which a session died, which this session knows and has not run to their end."""
        return sorted(set(self.died_in) & self._collected)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self._note.unlink(missing_ok=True)
        if self.unsettled() and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_report_header(self) -> list[str]:
        if not faulthandler.is_enabled():
            faulthandler.enable()
        return [f"CRASH LATCH: an earlier session died in {test}" for test in self.died_in]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for test in self.unsettled():
            terminalreporter.write_line(
                f"CRASH LATCH: an earlier session died in {test}, and this one did not run it. "
                "Run it, or give --clear-crash.",
                red=True,
            )


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _read(note: Path) -> str:
    try:
        return str(json.loads(note.read_text()))
    except (OSError, ValueError):
        return "(an unreadable note)"
