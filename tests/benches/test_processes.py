"""Worker processes that exchange JSON lines with their parent: what arrives in pieces, and workers that hang or die.

No benchmark runs here; the workers are modules of a few lines.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fastlock.benches.processes import Lines, Process, end_all, readable
from fastlock.benches.rivals import Entry
from fastlock.benches.workers import RivalMissing, WorkerError, WorkerProcess

ECHO = """
from fastlock.benches.processes import to_parent
parent = to_parent()
print("of a library")
while True:
    try:
        parent.send({"echo": parent.receive()})
    except EOFError:
        break
"""

Start = Callable[[str], Process]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts a worker whose module has this text. It is found by the parent's `sys.path`."""
    monkeypatch.syspath_prepend(tmp_path)
    started: list[Process] = []

    def begin(text: str) -> Process:
        name = f"worker_{len(started)}"
        (tmp_path / f"{name}.py").write_text(text)
        started.append(Process(name))
        return started[-1]

    yield begin
    end_all(started, 0)


@pytest.fixture
def lines() -> Iterator[tuple[int, Lines]]:
    """Lines, and the file descriptor from which they read."""
    source, feed = os.pipe()
    with open(os.devnull, "wb") as nowhere:
        yield feed, Lines(source, nowhere)
    os.close(source)


def test_nothing_is_received_from_a_process_that_was_ended(start: Start) -> None:
    process = start(ECHO)
    process.leave()
    process.end()
    source, feed = os.pipe()  # in the place of the process's own
    os.write(feed, b'{"of": "somebody else"}\n')
    with pytest.raises(EOFError):
        process.receive(1)
    os.close(source)
    os.close(feed)


def test_messages_go_both_ways_and_what_a_library_prints_is_none(start: Start) -> None:
    process = start(ECHO)
    for message in ({"a": "ä\n"}, {"b": [1.5, None]}, {"large": "x" * 300_000}):
        process.send(message)
        assert process.receive(20) == {"echo": message}
    process.leave()
    with pytest.raises(EOFError):
        process.receive(20)
    assert process.end() == 0


def test_lines_that_come_together_or_in_pieces(lines: tuple[int, Lines]) -> None:
    feed, end = lines
    os.write(feed, b'{"a": 1}\n{"a": 2}\n{"a"')
    assert [end.receive(0), end.receive(0), end.receive(0)] == [{"a": 1}, {"a": 2}, None]
    os.write(feed, b": 3}\n{")
    assert end.receive(0) == {"a": 3}
    before = time.monotonic()
    assert end.receive(0.05) is None  # half a line blocks no reader
    assert time.monotonic() - before < 10
    os.close(feed)
    with pytest.raises(EOFError):
        end.receive()


def test_dead_worker_is_readable_and_can_still_be_sent_to(start: Start) -> None:
    dead, alive = start(ECHO), start(ECHO)
    dead.kill()
    assert readable([dead, alive], 20) == [dead]
    dead.send({"a": "x" * 300_000})
    with pytest.raises(EOFError):
        dead.receive(20)
    assert (dead.end(), dead.end()) == (-signal.SIGKILL, -signal.SIGKILL)
    assert readable([alive], 0) == []


def test_worker_that_does_not_leave_is_killed(start: Start) -> None:
    process = start("import time; time.sleep(1000)")
    end_all([process], 0.1)
    assert process.end() == -signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


class TestWorkerProcess:
    """A rival's worker as its parent sees it. The program is that of the scenario pair; the rivals are planted."""

    @pytest.fixture
    def worker(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], WorkerProcess]]:
        monkeypatch.syspath_prepend(tmp_path)
        started: list[WorkerProcess] = []

        def begin(text: str) -> WorkerProcess:
            (tmp_path / "planted.py").write_text(text)
            started.append(WorkerProcess("it", Entry("planted"), "worker"))
            return started[-1]

        yield begin
        end_all(started, 0)

    @pytest.mark.parametrize(
        ("text", "kind", "said"),
        [
            ("import no_such_library", RivalMissing, "it: ModuleNotFoundError: .*no_such_library"),
            ("1 / 0", WorkerError, "it: ZeroDivisionError: "),
            ("import os; os._exit(3)", WorkerError, "it: the worker ended with 3"),
            ("import os; os.kill(os.getpid(), 9)", WorkerError, "it: the worker ended with -9"),
            ("def versions(): 1 / 0", WorkerError, "it: ZeroDivisionError: "),
        ],
    )
    def test_reports_why_it_cannot_work(
        self, worker: Callable[[str], WorkerProcess], text: str, kind: type[WorkerError], said: str
    ) -> None:
        with pytest.raises(WorkerError, match=said) as found:
            worker(text).greet()
        assert found.type is kind

    def test_hanging_one_is_killed(self, worker: Callable[[str], WorkerProcess]) -> None:
        process, calls = worker("import time; time.sleep(1000)"), []
        process.order("hello")
        with pytest.raises(WorkerError, match="it: no answer from the worker"):
            process.answer(0.2, lambda: calls.append(1))
        assert process.end() == -signal.SIGKILL
        assert 1 <= len(calls) <= 10  # every 20 ms

    def test_prints_of_a_rival_are_no_answer(self, worker: Callable[[str], WorkerProcess]) -> None:
        process = worker("print('hello')\ndef versions(): print('there'); return {'it': '1'}")
        assert process.greet()["it"] == "1"
        with pytest.raises(WorkerError, match="it: KeyError"):
            process.ask("no such action")
