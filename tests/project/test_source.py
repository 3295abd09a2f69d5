"""Tests that read the source: layers, sizes, headers, words, and twins that must not drift apart.

Each rule is a function from text (or objects) to a list of complaints; the tests run it over the tree and demand none.
Each rule is also run on planted offences: one that has gone blind fails too. A new module needs its place in LAYERS.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import inspect
import itertools
import re
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import fastlock
import fastlock._fallback
import fastlock.asyncio
from fastlock._protocol import commands, local_queue, moments
from fastlock._protocol.lease import new_token

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "fastlock"
CYTHON = (".pyx", ".pxi", ".pxd")
MODULES = sorted(path for path in PACKAGE.rglob("*.p*") if path.suffix in (".py", *CYTHON))
FOLDERS = ("fastlock", "tests", "benches", "examples")
SOURCES = sorted([ROOT / "setup.py", *(path for folder in FOLDERS for path in ROOT.glob(f"{folder}/**/*.p*"))])
SOURCES = [path for path in SOURCES if path.suffix in (".py", *CYTHON)]
SCRIPTS = sorted(PACKAGE.glob("_protocol/scripts/*.lua"))

LONGEST_FUNCTION, LONGEST_FILE, LONGEST_HEADER = 60, 700, 10
SCRIPT_HEADER = ("KEYS", "ARGV", "returns", "cost")


@dataclass(frozen=True)
class Layer:
    """Modules of one layer, or folders of them, and what they must not import from outside; layers may import those
    before them only."""

    modules: str
    never: set[str] = field(default_factory=set)


IMPURE = {"asyncio", "redis", "threading", "time.sleep", "socket", "select", "selectors", "ssl", "subprocess"}
LAYERS = [
    Layer("_build _stream_errors _libc _mutex _fork _native", never={"asyncio", "redis", "time.sleep"}),
    Layer("_limits _template _buffer _pending _filter _stream _task_stream", never=IMPURE - {"threading"}),
    Layer("_socket_stream _core _fallback _implementation", never={"asyncio", "redis", "time.sleep"}),
    Layer(
        "_errors"
    ),  # values that each later layer may raise; with _transport.settings the only one that knows redis-py
    Layer("_version _protocol", never=IMPURE),
    Layer("_transport.settings"),
    Layer("_transport", never={"redis"}),
    Layer("_fastpath", never={"redis"}),
    Layer("_locks __init__ asyncio embedded fencing", never={"redis", "hiredis"}),
    Layer("_cli __main__"),
]
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer.modules.split()}

WORDS = {
    r"\b(TODO|FIXME|XXX|HACK)\b": "do it now, or write it down where plans are kept",
    r"(?<![\w.])/(home|root|Users)/\w": "a path of one machine",
    r"\bissues?\s+#?\d+|(?<![\w&])#\d+\b": "a number that only its tracker explains",
    r"\bbreakpoint\(\)|\bpdb\b": "a debugger left behind",
    r"\b(blazing|lightning[- ]fast|world[- ]class|bulletproof)\b": "praise instead of a figure",
}

# Words that the package has left behind, and what it says instead (docs/architecture.md): one word for one thing.
LEFT_BEHIND = {
    r"gates?|crowds?": "local queue, cohort",
    r"faces?": "API",
    r"inbox(es)?|ears?": "channel, push connection",
    r"heirs?": "successor, the next waiter",
    r"markable": "contended token",
    r"dialects?|verbs?|holes?|(?<!session )tickets?": "command table, opcode or action, placeholder, pending reply",
    r"(?<!broken )pipes?|wires?": "stream, connection",
    r"laws?|trials?|innards?": "protocol, operation, internals",
    r"doubt(s|ed|ful)?|patien(ce|t)|debts?|ow(e|es|ed)": "outcome unknown, retry, pending undo",
    r"(?<!false )alarms?": "timer, shared timeout",
    r"hot paths?|brisk(ness|ly)?": "fast path",
    r"naps?|dozes?|dozing": "park, sleep",
    r"prolongs?|lets? go|letting go": "extend, release",
}
MAY_SPEAK_OF_PIPES = "fastlock/embedded.py"  # those of the operating system, to the processes that it starts

# Of CPython and its asyncio, and where alone they may be named.
INTERNALS = (
    r"\basyncio(\.\w+)*\._[a-z]|\bfrom asyncio\S* c?import .*\b_[a-z]|"
    r"_asyncio_future_blocking|_current_tasks|(?<!self)\._sock\b|[\"']_sock[\"']|\b(am_\w+|tp_\w+|Py\w*TypeObject)\b"
)
MAY_NAME_INTERNALS = ("fastlock/_transport/internals.py", "fastlock/_transport/internals.pxd")


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes that run; what stands under TYPE_CHECKING does not."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        yield from statements(node)


def imports(text: str) -> Iterator[str]:
    """Dotted names that a Python module of the package imports, relative ones spelled out; any use of time.sleep."""
    for node in statements(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(filter(None, ["fastlock" if node.level else "", node.module]))
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "time.sleep":
            yield "time.sleep"


def cython_imports(text: str) -> Iterator[str]:
    """The same for Cython, line by line; a sleep counts in C as well."""
    for line in re.sub(r"(import\s+\()([^)]*)\)", lambda found: " ".join(found[0].split()), text).splitlines():
        if found := re.match(r"\s*from\s+([\w.]+)\s+c?import\s+(.+)", line):
            base = re.sub(r"^\.", "fastlock.", found[1]).rstrip(".")
            yield from (f"{base}.{name.split()[0]}" for name in found[2].strip("()").split(",") if name.strip())
        elif found := re.match(r"\s*c?import\s+(.+)", line):
            yield from (name.split()[0] for name in found[1].split(","))
        elif re.search(r"\b(u|nano)?sleep\s*\(", line):
            yield "time.sleep"


def module_of(path: Path) -> str:
    """The dotted name of a module within the package; of a folder's own `__init__` the folder's."""
    name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    return name if name == "__init__" else name.removesuffix(".__init__")


def rank_of(module: str) -> int | None:
    """The layer of a module: its own, or that of its folder."""
    return RANK.get(module, RANK.get(module.partition(".")[0]))


def layer_faults(module: str, names: Iterator[str]) -> list[str]:
    """What a module imports although its layer forbids it."""
    mine = rank_of(module)
    if mine is None:
        return [f"{module} is in no layer: give it its line in LAYERS"]
    faults = []
    for name in names:
        head, _, rest = name.partition(".")
        if head == "fastlock":
            theirs = rank_of(".".join(rest.split(".")[:2]))
            if (RANK["__init__"] if theirs is None else theirs) > mine:
                faults.append(f"{module} imports {rest or head}, which is in a later layer")
        elif {head, name} & LAYERS[mine].never:
            faults.append(f"{module} must not use {name}")
    return faults


def import_circles(imported: dict[str, set[str]]) -> list[str]:
    """Modules that import each other, by whatever way round."""
    done: set[str] = set()
    circles = []

    def visit(module: str, way: tuple[str, ...]) -> None:
        if module in way:
            circles.append(" -> ".join([*way[way.index(module) :], module]))
        elif module not in done:
            for other in sorted(imported.get(module, ())):
                visit(other, (*way, module))
            done.add(module)

    for module in sorted(imported):
        visit(module, ())
    return circles


def functions(path: str, text: str) -> Iterator[tuple[str, int]]:
    """Name and number of lines of each function."""
    if path.endswith(".py"):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1
        return
    lines = [line for line in text.splitlines() if line.strip()]
    for at, line in enumerate(lines):
        if found := re.match(r"(\s*)(?:def|cdef(?! class)|cpdef|async def)\b[^=]*?(\w+)\(.*:\s*(#.*)?$", line):
            inside = itertools.takewhile(lambda rest: re.match(rf"{found[1]}\s", rest), lines[at + 1 :])
            yield found[2], 1 + len(list(inside))


def size_faults(path: str, text: str) -> list[str]:
    faults = [f"{path}: {text.count(chr(10))} lines"] if text.count("\n") > LONGEST_FILE else []
    return faults + [f"{path}: {name} has {n} lines" for name, n in functions(path, text) if n > LONGEST_FUNCTION]


def header_faults(path: str, text: str) -> list[str]:
    """A file opens with its rule: a docstring, or comments where there is none, short enough to be read."""
    docstring, comments = r'(?:#.*\n|\s)*r?"""(.+?)"""', r"((?:#[^\n]*\n)+)"
    found = re.match(comments if path.endswith((".pxi", ".pxd")) else docstring, text, re.DOTALL)
    if not found:
        return [f"{path} does not say what lives here"]
    lines = found[1].strip().count("\n") + 1
    return [f"{path}: a header of {lines} lines is not read"] if lines > LONGEST_HEADER else []


def script_faults(path: str, text: str) -> list[str]:
    """A script's header names KEYS, ARGV, what it returns and what it costs."""
    header = "\n".join(itertools.takewhile(lambda line: line.startswith("--"), text.splitlines()))
    missing = [word for word in SCRIPT_HEADER if not re.search(rf"(?i)\b{word}\b", header)]
    return [f"{path}: no line on {word}" for word in missing]


def word_faults(path: str, text: str) -> list[str]:
    return [
        f"{path}:{at}: {line.strip()[:80]!r}: {why}"
        for at, line in enumerate(text.splitlines(), 1)
        for pattern, why in WORDS.items()
        if re.search(pattern, line)
    ]


def left_behind_faults(path: str, text: str) -> list[str]:
    """Old words in comments, docstrings, messages and identifiers, also as a part of one: `_heir`, `LastHeir`."""
    faults = []
    for at, line in enumerate(text.splitlines(), 1):
        words = re.sub(r"_|(?<=[a-z0-9])(?=[A-Z])", " ", line).lower()
        for pattern, instead in LEFT_BEHIND.items():
            found = re.search(rf"\b({pattern})\b", words)
            if found and not (path == MAY_SPEAK_OF_PIPES and found[0].startswith("pipe")):
                faults.append(f"{path}:{at}: {found[0]!r} is a word of the past, say instead: {instead}")
    return faults


def internals_faults(path: str, text: str) -> list[str]:
    """Internals of the interpreter that are named outside the module that has the plain way beside each."""
    if path in MAY_NAME_INTERNALS:
        return []
    lines = enumerate(text.splitlines(), 1)
    return [f"{path}:{at}: {line.strip()[:80]!r}" for at, line in lines if re.search(INTERNALS, line)]


def shape(thing: object) -> object:
    """What must be equal in twins: parameters without annotations, or that it takes none."""
    if isinstance(thing, property) or inspect.isdatadescriptor(thing):
        return "attribute"
    if isinstance(thing, staticmethod | classmethod):
        thing = thing.__func__
    if not callable(thing):
        return "attribute"
    return [(p.name, p.kind.name, repr(p.default)) for p in inspect.signature(thing).parameters.values()]


def surface(cls: type) -> dict[str, object]:
    """Public methods and attributes of a class and its bases, asynchronous dunders under their plain names."""
    dunders = {"__enter__", "__exit__", "__aenter__", "__aexit__", "__init__"}
    members = {name: value for base in reversed(cls.__mro__[:-1]) for name, value in vars(base).items()}
    public = {name: value for name, value in members.items() if not name.startswith("_") or name in dunders}
    return {name.replace("__a", "__"): shape(value) for name, value in public.items()}


def differences(left: dict[str, object], right: dict[str, object]) -> list[str]:
    return [
        f"{name}: {left.get(name, 'missing')} / {right.get(name, 'missing')}"
        for name in sorted(left.keys() | right.keys())
        if left.get(name, "missing") != right.get(name, "missing")
    ]


def twin_faults(one: type, other: type) -> list[str]:
    """Where two classes that should look the same do not.

    In any order of parameters: redis-py's own two locks take those of `acquire` in different ones. What only tasks can
    do is left out: a thread cannot be cancelled.
    """
    return differences(unordered(surface(one)), unordered(surface(other)))


def unordered(shapes: dict[str, object]) -> dict[str, object]:
    return {
        name: sorted(each for each in shape if each[0] != "cancel_on_loss") if isinstance(shape, list) else shape
        for name, shape in shapes.items()
    }


def implementation_faults(one: object, other: object) -> list[str]:
    """Where objects of the two implementations differ: methods and their parameters, and the names of attributes.

    Objects, not classes: what is declared in Cython exists in Python only once the constructor has run, and the
    parameters of a compiled constructor cannot be read, so it is called.
    """
    return differences(methods(one), methods(other))


def methods(thing: object) -> dict[str, object]:
    names = [name for name in dir(thing) if not name.startswith("_")]
    return {name: shape(getattr(type(thing), name, None)) for name in names}


def own_names(module: types.ModuleType) -> dict[str, object]:
    """What a module itself defines for others: classes, functions, constants."""

    def own(name: str, value: object) -> bool:
        constant = name.isupper() and (isinstance(value, int | str | bytes) or type(value) is object)
        return constant or getattr(value, "__module__", None) == module.__name__

    return {name: value for name, value in vars(module).items() if not name.startswith("_") and own(name, value)}


def complaints(rule: Callable[[str, str], list[str]], paths: list[Path]) -> list[str]:
    assert paths, "nothing to read"
    return [fault for path in paths for fault in rule(str(path.relative_to(ROOT)), path.read_text())]


@pytest.mark.parametrize("path", MODULES, ids=module_of)
def test_layers(path: Path) -> None:
    read = cython_imports if path.suffix in CYTHON else imports
    assert layer_faults(module_of(path), read(path.read_text())) == []


def test_layers_name_no_module_that_is_gone() -> None:
    there = {module_of(path) for path in MODULES}
    assert [name for name in RANK if name not in there] == []


@pytest.mark.parametrize("part", ["_template", "_buffer", "_pending", "_filter", "_stream", "_task_stream"])
def test_only_the_stream_of_threads_makes_system_calls(part: str) -> None:
    """The parts of the compiled core have no imports of their own, by which a layer could be seen."""
    assert system_calls((PACKAGE / f"{part}.pxi").read_text()) == []


def system_calls(text: str) -> list[str]:
    return re.findall(r"\b(?:c_\w+|fastlock_set_recv_timeout)\(", text)


def test_system_call_rule_sees() -> None:
    found = system_calls((PACKAGE / "_socket_stream.pxi").read_text())
    assert set(found) == {"c_poll(", "c_recv(", "c_send(", "fastlock_set_recv_timeout("}


def test_no_two_modules_import_each_other() -> None:
    there = {module_of(path) for path in MODULES}
    imported: dict[str, set[str]] = {}
    for path in MODULES:
        read = cython_imports if path.suffix in CYTHON else imports
        for name in read(path.read_text()):
            inside = name.removeprefix("fastlock.") if name.startswith("fastlock.") else ""
            target = inside if inside in there else inside.rpartition(".")[0]
            if target in there and target != module_of(path):
                imported.setdefault(module_of(path), set()).add(target)
    assert import_circles(imported) == []


def test_circle_rule_sees() -> None:
    assert import_circles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b -> c -> b"]
    assert import_circles({"a": {"b", "c"}, "b": {"c"}}) == []


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("_protocol.acquire", "import threading"),
        ("_protocol.acquire", "def f():\n    from redis import Redis"),
        ("_protocol.acquire", "import time\ntime.sleep(1)"),
        ("_protocol.acquire", "from time import sleep"),
        ("_protocol.acquire", "from fastlock._transport.sync import SyncTransport"),
        ("_protocol.lease", "from fastlock import Client"),
        ("_transport.sync", "from redis.connection import parse_url"),
        ("_transport.aio", "import fastlock.asyncio"),
        ("_transport.settings", "from fastlock import Client"),
        ("_locks.lock", "import hiredis"),
        ("_fastpath.fastpath", "from fastlock._locks import lock"),
        ("_unheard_of", ""),
    ],
)
def test_layer_rule_sees(module: str, text: str) -> None:
    assert len(layer_faults(module, imports(text))) == 1


@pytest.mark.parametrize(
    "text",
    [
        "from redis import Redis",
        "import asyncio",
        "cimport x, asyncio",
        "  usleep(5)",
        "from fastlock._protocol.local_queue import LocalQueue",
        "from fastlock._transport.base cimport (\n    Transport,\n)",
    ],
)
def test_layer_rule_sees_in_cython(text: str) -> None:
    assert len(layer_faults("_core", cython_imports(text))) == 1


def test_layer_rule_lets_types_pass() -> None:
    assert (
        layer_faults("_protocol.acquire", imports("if TYPE_CHECKING:\n    import redis\nimport time\ntime.monotonic()"))
        == []
    )


def test_sizes() -> None:
    assert complaints(size_faults, SOURCES) == []


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("a.py", "\n" * 701),
        ("a.py", "class A:\n    async def f(self):\n" + "        x = 1\n" * 60),
        ("a.pyx", "cdef class A:\n    cdef int f(self) except -1:\n" + "        x = 1\n" * 60),
        ("a.pyx", "def f(a, b=None):  # why\n" + "    x = 1\n\n" * 60 + "y = 1"),
    ],
)
def test_size_rule_sees(path: str, text: str) -> None:
    assert len(size_faults(path, text)) == 1


def test_headers() -> None:
    assert complaints(header_faults, SOURCES) == []


@pytest.mark.parametrize("text", ["", "import os\n", "# only a comment\nx = 1\n", '"""' + "line\n" * 11 + '"""'])
def test_header_rule_sees(text: str) -> None:
    assert len(header_faults("a.py", text)) == 1


@pytest.mark.parametrize("text", ["", "import cython\n", "\n# too late\n", "# line\n" * 11])
def test_header_rule_sees_in_declarations(text: str) -> None:
    assert len(header_faults("a.pxd", text)) == 1
    assert header_faults("a.pxi", "# What the core takes from C.\n\n# No part of it.\n" + "x\n" * 20) == []


def test_scripts_say_what_they_take_return_and_cost() -> None:
    assert complaints(script_faults, SCRIPTS) == []


@pytest.mark.parametrize("word", SCRIPT_HEADER)
def test_script_rule_sees(word: str) -> None:
    header = "".join(f"-- {other}: x\n" for other in SCRIPT_HEADER if other != word)
    assert script_faults("a.lua", header + f"return 1 -- {word}") == [f"a.lua: no line on {word}"]


def script_parts(text: str) -> list[str]:
    """The names of the files that scripts are made of, from how a module makes them."""
    return re.findall(r'"(\w+)"', "".join(re.findall(r"= (?:commands\.)?(?:Script|script_text)\(([^)]*)\)", text)))


def test_each_script_is_made_of_the_files_that_are_there() -> None:
    used = [part for path in PACKAGE.glob("_protocol/*.py") for part in script_parts(path.read_text())]
    assert set(used) == {path.stem for path in SCRIPTS}
    assert script_parts('A = Script("a", "b")\nB = Script("c")') == ["a", "b", "c"]


def test_a_part_of_scripts_does_nothing_by_itself() -> None:
    """It stands before each of them, so it may only define."""
    parts = [path for path in SCRIPTS if path.read_text().startswith("-- Part of other scripts:")]
    known = "ends grant no_lock publish recall shared shared_reply tokens"
    assert [path.stem for path in parts] == known.split()
    first = [path for path in SCRIPTS if path.read_text().startswith("-- Beginning of other scripts:")]
    assert [path.stem for path in first] == ["all_free", "all_mine", "join_free", "release_alone"], (
        "these stand before the parts"
    )
    whole = [path for path in SCRIPTS if path not in parts]
    assert [path for path in parts if part_faults(path.read_text())] == []
    assert [path for path in whole if not part_faults(path.read_text())] == []


def part_faults(text: str) -> list[str]:
    """Lines at the top level that do something: in a part they would run in every script."""
    lines = [line for line in text.splitlines() if line and not line.startswith((" ", "--"))]
    return [line for line in lines if not re.match(r"local (function \w+\(|[A-Z_]+ = [\d'{])|end\b", line)]


@pytest.mark.parametrize(
    "line", ["redis.call('DEL', KEYS[1])", "return 1", "local held = redis.pcall('GET', 'x')", "x = 1"]
)
def test_part_rule_sees(line: str) -> None:
    assert part_faults(f"-- Part\nlocal ROOM = 5 -- bytes\nlocal function f()\n  return 1\nend\n{line}\n") == [line]


def test_what_scripts_and_modules_both_know_is_the_same() -> None:
    """Numbers and prefixes that stand in both languages, as a script takes no constants."""
    lua = {path.stem: path.read_text() for path in SCRIPTS}
    channel = local_queue.LocalQueues(contextlib.nullcontext()).channel
    named = [pair for text in lua.values() for pair in re.findall(r"local ([A-Z_]+) = (\d+)", text)]
    numbers = {name: int(value) for name, value in named}
    assert numbers.pop("SOON") == round(moments.LEAST_MOMENT * 1000)
    assert numbers.pop("FENCE_KEPT") == commands.FENCE_KEPT_MS
    assert numbers == {"CHANNEL_SIZE": len(channel), "ADDRESS_SIZE": commands.ADDRESS_SIZE}
    keys = (commands.queue_key, commands.fence_key, commands.size_key)
    said = set(re.findall(r"'(fastlock:.*?)'", "".join(lua.values())))
    assert said == {key(b"").decode()[:-2] for key in keys} | {commands.KEEP_CHANNEL.decode()}
    assert re.findall(r"#token == (\d+)", lua["tokens"]) == [str(commands.TOKEN_SIZE)] == [str(len(new_token()))]
    said = {prefix for text in lua.values() for prefix in re.findall(r"'(f[a-z]:)'", text)}
    assert said == {commands.PLAIN_PREFIX.decode(), commands.KEPT_PREFIX.decode()}
    assert new_token().startswith(commands.PLAIN_PREFIX)


def test_words() -> None:
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "pyproject.toml", ROOT / "Makefile"]
    this = Path(__file__).resolve()  # holds the planted offences
    assert complaints(word_faults, [path for path in [*SOURCES, *SCRIPTS, *pages] if path != this]) == []


@pytest.mark.parametrize(
    "text", ["# TODO later", "open('/home/x')", "see issue 12", "fixes #7", "breakpoint()", "blazing speed"]
)
def test_word_rule_sees(text: str) -> None:
    assert len(word_faults("a.py", text)) == 1


def test_no_word_of_the_past_comes_back() -> None:
    assert complaints(left_behind_faults, [*MODULES, *SCRIPTS]) == []


OLD = ["def _heir(self): ...", "class LastHeir: ...", "MAX_DEBTS = 3", '"""The gate of a name."""', "# on the hot path"]
OLD += ["local function markable(token)", "-- Let go of a lock.", "cdef object _pipe", "for alarm in alarms:"]
NEW = ["a pipeline", "investigate", "a false alarm", "except BrokenPipeError:", "no_hotel", "snap", "session tickets"]


@pytest.mark.parametrize("text", OLD)
def test_rule_of_left_behind_words_sees(text: str) -> None:
    assert len(left_behind_faults("fastlock/a.py", text)) == 1


@pytest.mark.parametrize("text", NEW)
def test_rule_of_left_behind_words_lets_pass(text: str) -> None:
    assert left_behind_faults("fastlock/a.py", text) == []
    assert left_behind_faults(MAY_SPEAK_OF_PIPES, "a shell that waits on a pipe") == []


def bare_any(text: str) -> tuple[int, int]:
    """(Parameters whose type is just Any, all parameters) of a module."""
    functions = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    kinds = [(f.args.posonlyargs, f.args.args, f.args.kwonlyargs, [f.args.vararg, f.args.kwarg]) for f in functions]
    given = [each for kind in kinds for each in itertools.chain(*kind) if each and each.arg not in ("self", "cls")]
    return sum(isinstance(each.annotation, ast.Name) and each.annotation.id == "Any" for each in given), len(given)


def test_parameters_have_types() -> None:
    """Any is for foreign objects: of redis-py, of the interpreter, of settings that descriptors check."""
    bare, total = map(sum, zip(*(bare_any(path.read_text()) for path in PACKAGE.rglob("*.py")), strict=True))
    assert bare < 0.03 * total, f"{bare} of {total} parameters are a bare Any"
    assert bare_any("def f(self, a: Any, *b: Any, c: int, **d: list[Any]): ...") == (2, 4)


def test_internals_of_the_interpreter_are_named_in_one_module() -> None:
    assert complaints(internals_faults, MODULES) == []


@pytest.mark.parametrize(
    "text",
    [
        "loop = asyncio._get_running_loop()",
        "asyncio.tasks._current_tasks.get(loop)",
        "from asyncio.coroutines import _is_coroutine",
        "future._asyncio_future_blocking = True",
        "transport._sock.close()",
        "getattr(transport, '_sock')",
        "(<PyTypeObject *>kind).tp_iternext = step",
        "methods.am_send = send",
    ],
)
def test_internals_rule_sees(text: str) -> None:
    assert len(internals_faults("fastlock/a.pyx", f"import asyncio\n{text}\n")) == 1
    assert internals_faults(MAY_NAME_INTERNALS[0], text) == []
    assert internals_faults("fastlock/a.py", "self._sock.close()\nasyncio.run(_main())\n") == []


def test_apis_export_the_same_names() -> None:
    apart = {"IMPLEMENTATION", "__version__", "embedded"}  # of the package, not of an API
    assert set(fastlock.__all__) - apart == set(fastlock.asyncio.__all__)


@pytest.mark.parametrize("name", ["Client", "Lock"])
def test_apis_have_the_same_methods(name: str) -> None:
    one, other = getattr(fastlock, name), getattr(fastlock.asyncio, name)
    assert one is not other
    assert twin_faults(one, other) == []


class Twin:
    def act(self, name: str, timeout: float = 1) -> None: ...


@pytest.mark.parametrize(
    "other",
    [
        type("Other", (), {}),
        type("Other", (), {"act": lambda self, name, timeout=2: None}),
        type("Other", (), {"act": lambda self, names, timeout=1: None}),
        type("Other", (), {"act": property(lambda self: None)}),
        type("Other", (Twin,), {"more": lambda self: None}),
    ],
)
def test_twin_rule_sees(other: type) -> None:
    assert len(twin_faults(Twin, other)) == 1
    assert twin_faults(Twin, Twin) == []


@pytest.fixture
def core() -> types.ModuleType:
    """The compiled core; where it was not built there is nothing to compare."""
    if importlib.util.find_spec("fastlock._core") is None:
        pytest.skip("fastlock._core is not built")
    return importlib.import_module("fastlock._core")


@pytest.fixture
def fast_path() -> tuple[types.ModuleType, types.ModuleType]:
    """The fast path of tasks, compiled and in Python: the latter by another name, where the process uses the former."""
    if fastlock.IMPLEMENTATION != "cython":
        pytest.skip("what is not compiled is not used here")
    spec = importlib.util.spec_from_file_location("fastlock._fastpath.in_python", PACKAGE / "_fastpath" / "tasks.py")
    assert spec is not None and spec.loader is not None
    plain = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plain)
    return importlib.import_module("fastlock._fastpath.tasks"), plain


def constants(names: Mapping[str, object]) -> dict[str, object]:
    """Their values; one that is but itself, as BUSY, is equal to none but its twin."""
    found = {name: value for name, value in names.items() if name.isupper() and not name.startswith("_")}
    own = {name: name if type(value) is object else value for name, value in found.items()}
    return {name: value for name, value in own.items() if name not in ("IMPLEMENTATION", "BUILD", "SOURCES")}


def test_core_and_fallback_export_the_same(core: types.ModuleType) -> None:
    assert own_names(core).keys() == set(fastlock._fallback.__all__)
    assert constants(own_names(core)) == constants(vars(fastlock._fallback))


def test_core_and_fallback_have_the_same_methods(core: types.ModuleType, ends: Any) -> None:
    arguments: dict[str, tuple[Any, ...]] = {  # of constructors
        "Template": (b"GET", 0),
        "PendingReply": (),
        "Stream": (),
        "SocketStream": ends[:1],
        "TaskStream": (None, None, 0, print),
    }
    classes = {name for name, value in own_names(core).items() if isinstance(value, type)}
    assert classes == {*arguments, "Mutex"}, "of a mutex nothing is used but `with`"
    for name, given in arguments.items():
        compiled, plain = getattr(core, name)(*given), getattr(fastlock._fallback, name)(*given)
        assert implementation_faults(compiled, plain) == [], name


def test_the_fast_path_of_tasks_is_the_same_in_both(fast_path: tuple[types.ModuleType, types.ModuleType]) -> None:
    """What a task awaits is a class when it is compiled, and the parameters of that cannot be read."""
    compiled, plain = ({name: v for name, v in own_names(module).items() if callable(v)} for module in fast_path)
    apis = {"aio_enter_lease", "aio_exit_lock"}
    assert compiled.keys() == plain.keys() == apis | {"aio_acquire", "aio_release"}
    assert fast_path[0].__spec__.origin != fast_path[1].__spec__.origin == str(PACKAGE / "_fastpath" / "tasks.py")  # type: ignore[union-attr]
    functions = {name for name, value in compiled.items() if not isinstance(value, type)}
    assert functions == apis
    for name in functions:
        assert shape(compiled[name]) == shape(plain[name]), name


@pytest.mark.parametrize("name", ["aio_acquire", "aio_release"])
def test_what_tasks_await_takes_the_same_arguments_in_both(
    fast_path: tuple[types.ModuleType, types.ModuleType], name: str
) -> None:
    compiled, plain = (getattr(module, name) for module in fast_path)
    lock = fastlock.asyncio.Client().lock("a")
    values = {"lock": lock, "required": True, "leaving": False, "error": None, "owner": None, "noted": None}
    parameters = inspect.signature(plain).parameters
    given = {parameter: values[parameter] for parameter in parameters}
    needed = {name: values[name] for name, parameter in parameters.items() if parameter.default is parameter.empty}
    for arguments in (given, needed):
        compiled(**arguments).close()
        compiled(*arguments.values()).close()
    for missing in needed:
        with pytest.raises(TypeError):
            compiled(**{key: value for key, value in given.items() if key != missing})
    for wrong in ({**given, "more": 1}, {**given, "lock": None}, {**given, "lock": "a"}):
        with pytest.raises(TypeError):
            compiled(**wrong)


class Plain:
    def __init__(self) -> None:
        self.extra = 1

    def act(self, name: str, timeout: float = 1) -> None: ...


@pytest.mark.parametrize(
    "other", [type("Other", (), {}), type("Other", (), {"act": lambda self, name: None, "extra": 1})]
)
def test_implementation_rule_sees(other: type) -> None:
    assert implementation_faults(Plain(), other())
    assert implementation_faults(Plain(), Plain()) == []
