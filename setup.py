"""Builds fastlock._core, and nothing else: metadata lives in pyproject.toml, choices in the environment.

FASTLOCK_NO_EXTENSIONS=1  pure Python, nothing is compiled
FASTLOCK_DEBUG=1          -O0 -g3, assertions and bounds checks on
FASTLOCK_TRACE=1          line tracing for coverage and profilers

A compile that fails is an error, never a quieter kind of success. The mode is compiled in as _core.BUILD.
"""

from __future__ import annotations

import os
import platform
import sys

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError

SWITCHES = {"FASTLOCK_NO_EXTENSIONS": "pure", "FASTLOCK_DEBUG": "debug", "FASTLOCK_TRACE": "trace"}
asked = [switch for switch in SWITCHES if os.environ.get(switch, "0") not in ("", "0")]
if len(asked) > 1:
    raise SystemExit(f"fastlock: one build mode at a time, not {' and '.join(asked)}")
MODE = SWITCHES[asked[0]] if asked else "release"
PURE = MODE == "pure" or platform.python_implementation() != "CPython"
LINUX = sys.platform == "linux"
HARDEN = ["-fstack-protector-strong", "-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=2"] if LINUX else []
FLAGS = {"debug": ["-O0", "-g3", "-UNDEBUG", "-U_FORTIFY_SOURCE"]}.get(MODE, ["-O2", *HARDEN])
TRACED = [("CYTHON_TRACE", "1"), ("CYTHON_TRACE_NOGIL", "1")] if MODE == "trace" else []
WAY_ROUND = "To install fastlock without it (pure Python, slower), set FASTLOCK_NO_EXTENSIONS=1"


class BuildCore(build_ext):
    """Cython, then C, with generated files outside the source tree; a failure names the way round it."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.cython_c_in_temp = True
        self.force = True  # modes differ in flags, which file times do not show

    def build_extension(self, ext: Extension) -> None:
        from Cython.Compiler.Errors import CompileError

        try:
            super().build_extension(ext)
        except (BaseError, CCompilerError, CompileError) as error:
            raise SystemExit(f"{ext.name} was not compiled: {error}\n{WAY_ROUND}") from error


core = Extension(
    "fastlock._core",
    ["fastlock/_core.pyx"],
    define_macros=[("FASTLOCK_BUILD", f'"{MODE}"'), *TRACED],
    extra_compile_args=FLAGS if sys.platform != "win32" else [],
    extra_link_args=["-Wl,-z,relro,-z,now"] if LINUX else [],
)
core.cython_directives = {"boundscheck": MODE == "debug", "linetrace": MODE == "trace"}

print("fastlock:", "pure Python, nothing is compiled" if PURE else f"{MODE} build of fastlock._core", file=sys.stderr)
setup(ext_modules=[] if PURE else [core], cmdclass={"build_ext": BuildCore})
