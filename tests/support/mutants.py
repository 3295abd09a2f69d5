"""Mistakes planted in what is compiled: a copy of the package that contains them all, each behind a switch.

The copy is compiled once; what is not changed keeps its compiled module. `MISTAKE`, a variable of each changed module,
says which mistake is made: `tests.walks --plant` sets it, and `test_walks.py` wants each to be found.
"""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent
BOTH = ("threads", "asyncio")
QUEUE, LOCK = "_protocol/local_queue.py", "_protocol/base_lock.py"
THREADS, WAITING, TASKS = "_fastpath/threads.py", "_transport/waiting.py", "_fastpath/tasks.pyx"
PARKER, WAITERS = "_transport/parker.pyx", "_protocol/waiters.py"


class Mistake(NamedTuple):
    """In a file of the package, `new` instead of `old`, which stands there once. THIS stands for: it is planted.
    `first`: the walk to begin with, where it takes thousands to find the mistake."""

    file: str
    old: str
    new: str
    apis: tuple[str, ...] = BOTH
    first: int = 1


MISTAKES = {
    "a lease that lapsed is handed over": Mistake(
        QUEUE,
        "        waiter = self.successor_for(lease, now)\n        if waiter",
        "        if THIS and lease._deadline <= now:\n"
        "            lease._deadline, self.confirmed_at = now + 1000, now\n"
        "            for each in self.waiters:\n                each.ms = 1_000_000\n"
        "        waiter = self.successor_for(lease, now)\n        if waiter",
    ),
    "a lease that ended before its new holder ran is not taken back": Mistake(
        QUEUE, "if lease is None or now < lease._deadline:", "if lease is None or now < lease._deadline or THIS:"
    ),
    "who comes back sends the entry that another has sent": Mistake(
        QUEUE, "queue.first() if queue.entry_sent else None", "queue.first() if queue.entry_sent and not THIS else None"
    ),
    "a lease is handed over though the next waiter has entered": Mistake(
        QUEUE, "if self.entry_sent:\n", "if self.entry_sent and not THIS:\n", first=700
    ),
    "a waiter is not woken": Mistake(
        WAITERS, "        self.woken = True\n", "        if THIS:\n            return\n        self.woken = True\n"
    ),
    "a grant is believed though its moment may be over": Mistake(
        QUEUE,
        "if end - now < self.moment * _BELIEVED_PART or",
        "if (not THIS and end - now < self.moment * _BELIEVED_PART) or",
    ),
    "what a message said of an entry is believed of the next": Mistake(
        QUEUE,
        "self.was_queued = self.granted = False",
        "self.was_queued = False\n        self.granted = THIS and self.granted",
    ),
    "a queue keeps its entry": Mistake(
        QUEUE,
        "        self.queues.forget_entry(self.entry)\n",
        "        if THIS:\n            return\n        self.queues.forget_entry(self.entry)\n",
    ),
    "a waiter believes in a lease that has ended": Mistake(
        QUEUE,
        "if self.circulating is not None and self.circulating._deadline <= now:\n",
        "if self.circulating is not None and self.circulating._deadline <= now and not THIS:\n",
    ),
    "messages are not heard": Mistake(QUEUE, "self.by_entry.get(entry)", "None if THIS else self.by_entry.get(entry)"),
    "waiters do not enter after a cut": Mistake(
        QUEUE,
        "            for queue in list(self.by_entry.values()):\n",
        "            for queue in [] if THIS else list(self.by_entry.values()):\n",
    ),
    "a release to the server forgets the first waiter": Mistake(
        QUEUE, "        elif not self.queued_early:\n", "        elif not self.queued_early and not THIS:\n"
    ),
    "a caller that leaves keeps the lease that it was handed": Mistake(
        QUEUE, "passed = lease._deadline == ENDED or", "passed = lease._deadline == ENDED or THIS or"
    ),
    "a caller that leaves forgets its entry": Mistake(
        QUEUE, "queue.entry if queue.entry_sent and", "queue.entry if not THIS and queue.entry_sent and"
    ),
    "a lock does not look when the lease that it was handed ended": Mistake(
        LOCK,
        "if lease is None or time >= lease._deadline:",
        "if lease is None or (time >= lease._deadline and not THIS):",
    ),
    "a lock keeps the lease that it released": Mistake(
        LOCK,
        "        if self._leases.get(owner) is lease:\n            self._leases.pop(owner, None)\n",
        "        if THIS:\n            return\n"
        "        if self._leases.get(owner) is lease:\n            self._leases.pop(owner, None)\n",
    ),
    "a release is sent to the server though the next waiter has the lease": Mistake(
        LOCK, "if route == _LOCAL:", "if route == _LOCAL and not THIS:"
    ),
    "an acquire of a task does not look in the local queue": Mistake(
        TASKS,
        "        if transport.queued_keys or transport.expected_keys or lock.fair:\n            waiter = lock",
        "        if not THIS and (transport.queued_keys or transport.expected_keys or lock.fair):\n"
        "            waiter = lock",
        ("asyncio",),
    ),
    "a release of a task does not look in the local queue": Mistake(
        TASKS,
        "(<Transport>lock._transport).queued_keys and not not_releasable(lease)",
        "(<Transport>lock._transport).queued_keys and not THIS and not not_releasable(lease)",
        ("asyncio",),
    ),
    "a release of a task forgets who waits elsewhere": Mistake(
        TASKS, "or lease._contended or", "or (lease._contended and not THIS) or", ("asyncio",)
    ),
    "a release of a task forgets how the queue wants it": Mistake(
        TASKS,
        "new_release(lock, lease, route == SCRIPT)",
        "new_release(lock, lease, route == SCRIPT and not THIS)",
        ("asyncio",),
    ),
    "a task that is handed a lease is not woken": Mistake(
        TASKS,
        "    if type(wake) is _Acquire:\n",
        "    if THIS:\n        pass\n    elif type(wake) is _Acquire:\n",
        ("asyncio",),
    ),
    "a task that is woken goes on sleeping": Mistake(
        TASKS,
        "        if not self.ready:\n            self.set",
        "        if not self.ready and not THIS:\n            self.set",
        ("asyncio",),
    ),
    "a task that is cancelled stays in the local queue": Mistake(
        TASKS,
        "            self.lock._transport.cancel_wait(self._op(), self.waiter)\n",
        "            THIS or self.lock._transport.cancel_wait(self._op(), self.waiter)\n",
        ("asyncio",),
    ),
    "an acquire of a task that is cancelled is not undone": Mistake(
        TASKS,
        "        if self.wakeups is not None:\n            self.stream.connection.cancel",
        "        if self.wakeups is not None and not THIS:\n            self.stream.connection.cancel",
        ("asyncio",),
    ),
    "an acquire of a thread does not look in the local queue": Mistake(
        THREADS,
        "    if transport.queued_keys or transport.expected_keys or lock.fair:\n        transport.queues.sweep",
        "    if not THIS and (transport.queued_keys or transport.expected_keys or lock.fair):\n"
        "        transport.queues.sweep",
        ("threads",),
    ),
    "a release of a thread does not look in the local queue": Mistake(
        THREADS,
        "        if transport.queued_keys:\n            route",
        "        if transport.queued_keys and not THIS:\n            route",
        ("threads",),
    ),
    "a release of a thread forgets who waits elsewhere": Mistake(
        THREADS,
        "contended, told, lease._releasing = lease._contended, _NOT_ASKED, True",
        "contended, told, lease._releasing = lease._contended and not THIS, _NOT_ASKED, True",
        ("threads",),
    ),
    "a release of a thread wakes nobody": Mistake(
        PARKER,
        "wake, queues.pending_wake = queues.pending_wake, None",
        "wake, queues.pending_wake = (None, queues.pending_wake) if THIS else (queues.pending_wake, None)",
        ("threads",),
    ),
    "a release of a thread forgets how the queue wants it": Mistake(
        THREADS,
        "contended = contended or route == _SCRIPT",
        "contended = contended or (route == _SCRIPT and not THIS)",
        ("threads",),
    ),
    "a thread enters without end": Mistake(
        THREADS,
        "        wait(transport, waiter, until)\n",
        "        if not THIS:\n            wait(transport, waiter, until)\n",
        ("threads",),
    ),
    "a thread enters where the queue says no": Mistake(
        THREADS,
        "if transport.queues.may_enter_now(waiter, sent):",
        "if transport.queues.may_enter_now(waiter, sent) or THIS:",
        ("threads",),
    ),
    "a thread does not undo a late grant": Mistake(
        THREADS,
        "or queue.judge(waiter, reply, sent, clock()) is not None:",
        "or (queue.judge(waiter, reply, sent, clock()) is not None and not THIS):",
        ("threads",),
    ),
    "a thread that is interrupted stays in the local queue": Mistake(
        THREADS,
        "            transport.cancel_wait(op or lock._new_acquire(None, required), waiter, error)\n",
        "            if not THIS:\n"
        "                transport.cancel_wait(op or lock._new_acquire(None, required), waiter, error)\n",
        ("threads",),
    ),
    "a thread forgets that it was woken before it slept": Mistake(
        WAITING,
        "if waiter.woken and not transport.closed:",
        "if waiter.woken and not transport.closed and not THIS:",
        ("threads",),
    ),
    "no thread reads what the server pushes": Mistake(
        WAITING,
        "connection.error is None and queue.reads(waiter)",
        "connection.error is None and not THIS and queue.reads(waiter)",
        ("threads",),
    ),
    "a thread that listens does not notice a cut": Mistake(
        WAITING,
        "    except STREAM_ERRORS as error:\n        connection.fail(error)\n    finally:\n",
        "    except STREAM_ERRORS as error:\n        if not THIS:\n            connection.fail(error)\n    finally:\n",
        ("threads",),
    ),
}


def build(folder: Path) -> None:
    """A copy of the package with all mistakes, compiled, in this folder."""
    ignored = shutil.ignore_patterns("__pycache__", "benches", "*.html")
    shutil.copytree(ROOT / "fastlock", folder / "fastlock", ignore=ignored)
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, folder)
    files = sorted({mistake.file for mistake in MISTAKES.values()})
    for file in files:
        path = folder / "fastlock" / file
        path.write_text(planted(file, path.read_text()))
    _compile_only(folder, [file.rpartition(".")[0].replace("/", ".") for file in files])


def planted(file: str, text: str) -> str:
    """The text of a file of the package with its mistakes."""
    for name, mistake in MISTAKES.items():
        if mistake.file == file:
            assert text.count(mistake.old) == 1, (
                f"{name}: {mistake.old!r} stands {text.count(mistake.old)} times in {file}"
            )
            text = text.replace(mistake.old, mistake.new.replace("THIS", f"MISTAKE == {name!r}"))
    future = text.find("\nfrom __future__")
    first = text.index("\n\n", future) if future >= 0 else text.index("\nfrom fastlock.")  # before all code
    return f"{text[:first]}\nMISTAKE = ''{text[first:]}"


def _compile_only(folder: Path, modules: list[str]) -> None:
    """Compile these modules by the project's own build, which finds no others in its list; they count as made from the
    same sources as the rest."""
    source = folder / "fastlock" / "_build.py"
    text, lists = source.read_text(), runpy.run_path(str(source))
    twins, python = (tuple(name for name in lists[kind] if name in modules) for kind in ("TWINS", "PYTHON"))
    whole = subprocess.run(
        [sys.executable, "-c", "import fastlock._core as core; print(core.SOURCES)"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    same = f"\n\ndef digest() -> str:\n    return {whole!r}\n"
    source.write_text(f"{text}\nTWINS, PYTHON = {twins!r}, {python!r}{same}")
    environment = {**os.environ, "CFLAGS": "-O0", "PYTHONPATH": ""}
    done = subprocess.run(
        [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"],
        cwd=folder, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    source.write_text(text + same)
