"""Every Python example of README, docs and docstrings runs as it is written, against a real server on a TCP port.

The examples use redis://localhost:6379/0. `namespace` runs an example where a server listens on just that port;
`redirected` on any machine (see support/bare_machine.py). An example ends by itself, prints nothing and leaves no key.
"""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import bare_machine, state_diagrams

import fastlock
from fastlock.embedded import Server

ROOT = Path(__file__).resolve().parents[2]
TEXTS = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("benches/*.md"))]
NAMESPACE = bare_machine.namespace()
pytestmark = pytest.mark.usefixtures("impl")


def blocks(text: str) -> Iterator[tuple[int, str]]:
    """(line, source) of each fenced block of Python."""
    for found in re.finditer(r"^```(?:python|py)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield text.count("\n", 0, found.start()) + 2, found[1]


def prompts(text: str) -> Iterator[tuple[int, str]]:
    """(line, source) of the lines that a module shows behind >>> prompts, all of them as one program."""
    if examples := doctest.DocTestParser().get_examples(text):
        yield examples[0].lineno + 1, "".join(example.source for example in examples)


def examples() -> dict[str, str]:
    found = {f"{path.relative_to(ROOT)}:{line}": code for path in TEXTS for line, code in blocks(path.read_text())}
    for path in sorted(ROOT.glob("fastlock/**/*.py")):
        found |= {f"{path.relative_to(ROOT)}:{line}": code for line, code in prompts(path.read_text())}
    return found


EXAMPLES = examples()
RUN = [name for name in EXAMPLES if fastlock.IMPLEMENTATION == "cython" or name.startswith("README.md")]
WHERE = "namespace" if NAMESPACE else "redirected"


def test_the_parser_finds_examples() -> None:
    assert list(blocks("a\n\n```python\nx = 1\ny\n```\n```\nno\n```\n")) == [(4, "x = 1\ny\n")]
    assert list(prompts('"""Text.\n\n>>> a = 1\n>>> a\n1\n"""')) == [(3, "a = 1\na\n")]
    assert sum(name.startswith("README.md") for name in EXAMPLES) >= 3


@pytest.mark.parametrize("server", ["valkey"], indirect=True)
@pytest.mark.parametrize(("where", "example"), [*((WHERE, name) for name in RUN), ("redirected", RUN[-1])])
def test_an_example_runs_as_it_is_written(example: str, where: str, server: Server, tmp_path: Path) -> None:
    program = tmp_path / "example.py"
    program.write_text(EXAMPLES[example])
    place, prefix = (server.binary.path, NAMESPACE) if where == "namespace" else (str(server.port), [])
    done = subprocess.run(
        [*prefix, sys.executable, "-W", "error", bare_machine.__file__, place, str(program)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"},
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=50,
    )
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("of", ["queue", "waiter"])
def test_states_are_drawn_as_the_code_has_them(of: str) -> None:
    assert state_diagrams.both()[of] in Path("docs/waiting.md").read_text(encoding="utf-8"), state_diagrams.both()[of]
