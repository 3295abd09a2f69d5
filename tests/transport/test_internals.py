"""The internals of CPython that fastlock uses, and the plain way beside them: which of the two an interpreter gets, and
that tasks behave the same in the plain way. `test_source.py` checks that no other module names such an internal.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import redis

from fastlock._transport import internals
from fastlock._transport.internals import TRIED, VARIABLE, may_use
from fastlock.embedded import Server
from tests import matrix

ROOT = Path(__file__).resolve().parents[2]
BUILD = "3.13.0 (main, Oct  7 2024, 10:00:00) [GCC 13.2.0]"
FREE_THREADED = "3.13.0 experimental free-threading build (main, Oct  7 2024, 10:00:00) [GCC 13.2.0]"

# Prints what a task awaits while an acquire waits for its reply: an object of fastlock, or a future of asyncio's own.
YIELDED = """
import asyncio, sys
import redis, redis.asyncio, hiredis  # before the version is another
{lie}
import fastlock.asyncio

async def main():
    async with fastlock.asyncio.Client.from_url(sys.argv[1]) as client:
        await client.server_info()
        entering = client.lock("sku", timeout=10).__aenter__()
        steps = entering.__await__()
        print(fastlock.IMPLEMENTATION, isinstance(next(steps), asyncio.Future))
        steps.close()

asyncio.run(main())
"""
LIES = {
    "": "",
    "a later version": "sys.version_info = (3, 99, 0, 'final', 0)",
    "another implementation": "sys.implementation.name = 'another'",
    "free-threaded": f"sys.version = {FREE_THREADED!r}",
}

# What waits in tasks, is cancelled, interrupted, or goes from loop to loop; with a server, in asyncio's own loop only.
WHOLE = ("transport/test_wakeups.py", "transport/test_loops.py", "fastpath/test_tasks.py")
FILES = [f"tests/{name}" for name in (*WHOLE, "locks/test_waiting.py", "interrupts/test_interrupted_loops.py")]
CHOSEN = (
    "test_wakeups or not (uvloop or threads or any_point) and (fastpath or test_loops or cancelled or woken"
    " or dropped or replies_lost or cancellable or leave_no_key and cohort)"
)


@pytest.mark.parametrize(
    ("implementation", "version", "build", "asked", "uses"),
    [
        *(("cpython", (*version, 0, "final", 0), BUILD, "", True) for version in TRIED),
        *(("cpython", (*version, 0, "final", 0), BUILD, "0", False) for version in TRIED),
        *(("pypy", (*version, 0, "final", 0), BUILD, "", False) for version in TRIED),
        *(("cpython", (3, minor, 0, "alpha", 1), BUILD, "", False) for minor in (10, 14, 15, 110)),
        ("cpython", (4, 11, 0, "final", 0), BUILD, "", False),
        ("cpython", (3, 13, 0, "final", 0), FREE_THREADED, "", False),
    ],
)
def test_internals_are_used_where_they_were_tried(
    implementation: str, version: tuple[Any, ...], build: str, asked: str, uses: bool
) -> None:
    assert may_use(implementation, version, build, asked) is uses


@pytest.mark.parametrize("asked", ["1", "no", "00"])
def test_another_value_of_the_variable_is_refused(asked: str) -> None:
    """Otherwise users would believe that they got what they asked for."""
    with pytest.raises(ValueError, match=f"{VARIABLE}.*'{asked}'"):
        may_use("cpython", (3, 13, 0), BUILD, asked)


def test_tried_is_what_the_matrix_runs_and_what_is_promised() -> None:
    versions = {".".join(map(str, version)) for version in TRIED}
    assert versions == {label.partition(" ")[0] for label in matrix.WANTED}
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    assert versions == {each.rpartition(" ")[2] for each in classifiers if re.search(r":: 3\.\d+$", each)}
    assert set(WHOLE) <= set(matrix.TESTS)


@pytest.mark.parametrize("server", ["valkey"], indirect=True)
@pytest.mark.parametrize(("lie", "asked"), [("", "0"), *((lie, "") for lie in LIES)])
def test_an_interpreter_that_was_not_tried_gets_the_plain_way(server: Server, impl: str, lie: str, asked: str) -> None:
    program = [sys.executable, "-W", "error", "-c", YIELDED.format(lie=LIES[lie]), server.unix_url]
    done = subprocess.run(program, env={**os.environ, VARIABLE: asked}, capture_output=True, text=True, timeout=50)
    tried = not lie and sys.version_info[:2] in TRIED
    assert (done.stdout.split(), done.stderr) == ([impl, str(asked == "0" or not tried)], "")


@pytest.mark.skipif(not internals.used(), reason="this session runs in the plain way")
def test_tasks_behave_the_same_in_the_plain_way(impl: str) -> None:
    """A closed loop's transport then closes its socket as it is collected, and says so."""
    session = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore::ResourceWarning"]
    chosen = ["--servers=valkey", "--apis=asyncio", "--only-impl", "-k", CHOSEN]
    done = subprocess.run(
        [*session, *chosen, *FILES], cwd=ROOT, env={**os.environ, VARIABLE: "0"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
    summary = done.stdout.splitlines()[-1]
    passed, skipped = (sum(map(int, re.findall(rf"(\d+) {word}", summary))) for word in ("passed", "skipped"))
    assert passed > 100 and skipped < 15, "what depends on the internals is skipped, the rest is not"


STRUCK_IN_LOOK_UPS = """
import asyncio, sys

class Struck(Exception):
    "As a signal handler raises it, where the running task is looked up in Python."

look_up, left, struck = asyncio.current_task, 0, 0

def current_task(loop=None):
    global left, struck
    left -= 1
    if not left:
        struck += 1
        raise Struck
    return look_up(loop)

asyncio.current_task = current_task
import fastlock.asyncio

async def main():
    global left
    async with fastlock.asyncio.Client.from_url(sys.argv[1]) as client:
        for at in range(1, 9):
            async with client.lock(f"warm:{at}", timeout=60):
                pass
            try:
                left = at
                async with client.lock(f"struck:{at}", timeout=60):
                    pass
            except Struck:
                pass
            left = 0

asyncio.run(main())
print(struck)
"""


@pytest.mark.usefixtures("impl")
@pytest.mark.parametrize("server", ["valkey"], indirect=True)
def test_a_signal_in_the_look_up_of_the_running_task_leaves_no_key(server: Server, probe: redis.Redis) -> None:
    """The plain way looks it up in Python on some versions, where a handler may raise: also as an `async with` ends."""
    done = subprocess.run(
        [sys.executable, "-c", STRUCK_IN_LOOK_UPS, server.unix_url],
        cwd=ROOT, env={**os.environ, VARIABLE: "0"}, capture_output=True, text=True, timeout=40,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 2, "an acquire and a release look the task up"
    assert probe.keys("struck:*") == []
