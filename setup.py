"""Builds what is compiled, and nothing else: metadata lives in pyproject.toml, choices in the environment.

FASTLOCK_NO_EXTENSIONS=1  pure Python, nothing is compiled
FASTLOCK_NO_FASTPATH=1    compiled without the fast path: the same, slower
FASTLOCK_DEBUG=1          -O0 -g3, assertions and bounds checks on
FASTLOCK_TRACE=1          line tracing for coverage and profilers

A failed compile is an error: the build never goes on without the module. The mode is compiled in as _core.BUILD.
"""

from __future__ import annotations

import contextlib
import os
import platform
import runpy
import sys
from collections.abc import Iterator

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError

SWITCHES = {
    "FASTLOCK_NO_EXTENSIONS": "pure",
    "FASTLOCK_NO_FASTPATH": "plain",
    "FASTLOCK_DEBUG": "debug",
    "FASTLOCK_TRACE": "trace",
}
asked = [switch for switch in SWITCHES if os.environ.get(switch, "0") not in ("", "0")]
if len(asked) > 1:
    raise SystemExit(f"fastlock: one build mode at a time, not {' and '.join(asked)}")
MODE = SWITCHES[asked[0]] if asked else "release"
# The compiled modules need POSIX (<poll.h>, clock_gettime) and CPython's own C API.
PURE = MODE == "pure" or platform.python_implementation() != "CPython" or sys.platform == "win32"
SOURCES = runpy.run_path("fastlock/_build.py")
LINUX = sys.platform == "linux"
HARDEN = ["-fstack-protector-strong", "-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=2"] if LINUX else []
SPEED = [] if "-O" in os.environ.get("CFLAGS", "") else ["-O2"]  # an -O in CFLAGS wins
FLAGS = {"debug": ["-O0", "-g3", "-UNDEBUG", "-U_FORTIFY_SOURCE"]}.get(MODE, [*SPEED, *HARDEN])
TRACED = [("CYTHON_TRACE", "1"), ("CYTHON_TRACE_NOGIL", "1")] if MODE == "trace" else []
WAY_ROUND = "To install fastlock without it (pure Python, slower), set FASTLOCK_NO_EXTENSIONS=1"


class BuildCore(build_ext):
    """Cython, then C, with generated files outside the source tree; a failure says how to install without it."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.force = True  # modes differ in flags, which file times do not show

    def build_extensions(self) -> None:
        """Run Cython for one module after the other, as it is not thread-safe, and the C compiler for all at once."""
        from Cython.Build import cythonize

        for ext in self.extensions:
            with named(ext):
                (made,) = cythonize(
                    ext, build_dir=self.build_temp, force=True, quiet=True, compiler_directives=ext.cython_directives
                )
                ext.sources = made.sources
        self.parallel = self.parallel or os.cpu_count()
        super().build_extensions()

    def build_extension(self, ext: Extension) -> None:
        with named(ext):
            super().build_extension(ext)


@contextlib.contextmanager
def named(ext: Extension) -> Iterator[None]:
    from Cython.Compiler.Errors import CompileError

    try:
        yield
    except (BaseError, CCompilerError, CompileError) as error:
        raise SystemExit(f"{ext.name} was not compiled: {error}\n{WAY_ROUND}") from error


def extension(name: str) -> Extension:
    """A compiled module of the package: from its .pyx, or from its .py where there is none."""
    cython, python = (f"fastlock/{name.replace('.', '/')}{suffix}" for suffix in (".pyx", ".py"))
    return compiled(name, cython if os.path.exists(cython) else python)


def compiled(name: str, source: str) -> Extension:
    made = Extension(
        f"fastlock.{name}",
        [source],
        define_macros=[("FASTLOCK_BUILD", f'"{MODE}"'), ("FASTLOCK_SOURCES", f'"{SOURCES["digest"]()}"'), *TRACED],
        extra_compile_args=FLAGS,
        extra_link_args=["-Wl,-z,relro,-z,now"] if LINUX else [],
    )
    directives = PYTHON if source.endswith(".py") else {}
    made.cython_directives = {"boundscheck": MODE == "debug", "linetrace": MODE == "trace", **directives}
    return made


# Directives for the .py modules, which also run as Python: C types come from the .pxd, not from annotations.
PYTHON = {
    "language_level": 3,
    "binding": True,
    "annotation_typing": False,
    "auto_pickle": False,
    "embedsignature": False,
    "boundscheck": True,
    "nonecheck": True,
}
FAST = [] if MODE == "plain" or not os.path.exists("fastlock/_fastpath") else SOURCES["FAST_PATH"]
modules = [extension(name) for name in (*SOURCES["TWINS"], *SOURCES["PYTHON"], *FAST)]
if LINUX and os.path.exists("benches"):  # the benchmark's network; it needs epoll
    modules.append(compiled("benches._relay", "benches/_relay.pyx"))

print("fastlock:", "pure Python, nothing is compiled" if PURE else f"{MODE} build", file=sys.stderr)
setup(ext_modules=[] if PURE else modules, cmdclass={"build_ext": BuildCore})
