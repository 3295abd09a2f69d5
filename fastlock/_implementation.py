"""The one place that chooses between the compiled modules and the same in Python.

Without FASTLOCK_IMPL the compiled modules are used, and Python only where nothing was compiled. With it ("cython" or
"python") that one is used, or an error raised. A build whose sources have changed since is refused. The core is two
texts (`_core`, `_fallback`); of the modules in COMPILED the Python version is a source file of the same name. The fast
path may be missing. Never here: what is compiled (`_build.py`).
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import logging
import os
import sys
from pathlib import Path
from types import ModuleType

from fastlock import _fallback
from fastlock._build import FAST_PATH, PYTHON, TWINS, digest

COMPILED = (*PYTHON, *TWINS[1:])
_NAMES = ("cython", "python")


class _Plain:
    """Import hook that finds the source of the modules in COMPILED, also where a compiled module lies beside it."""

    @staticmethod
    def find_spec(name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        package, _, module = name.partition(".")
        if package != __package__ or module not in (*COMPILED, *FAST_PATH):
            return None
        return importlib.util.spec_from_file_location(name, _source(module))


def choose(name: str | None) -> ModuleType:
    """The core by name; None: the compiled one if there is one. ValueError: no such name. ImportError: not built, or
    its sources have changed."""
    if name is not None and name not in _NAMES:
        raise ValueError(f"the implementation must be 'cython' or 'python', not {name!r} (FASTLOCK_IMPL)")
    if name != "python":
        try:
            return _compiled()
        except ModuleNotFoundError as error:
            if name is not None:
                raise
            logging.getLogger("fastlock").info("nothing compiled is there, using pure Python: %s", error)
    sys.meta_path.insert(0, _Plain)
    return _fallback


def fast_path(name: str) -> ModuleType | None:
    """A module of the fast path, `threads` or `tasks`. None: it was left out, or Python has none; all works without."""
    module = f"_fastpath.{name}"
    there = _source(module).exists() if default is _fallback else default.BUILD != "plain" and _is_compiled(module)
    return importlib.import_module(f"{__package__}.{module}") if there else None


def _source(module: str) -> Path:
    return Path(__file__).parent / f"{module.replace('.', '/')}.py"


def _is_compiled(module: str) -> bool:
    name = f"{__package__}.{module}"
    spec = importlib.util.find_spec(name) if importlib.util.find_spec(name.rpartition(".")[0]) else None
    return spec is not None and isinstance(spec.loader, importlib.machinery.ExtensionFileLoader)


def _compiled() -> ModuleType:
    fast = FAST_PATH if any(map(_is_compiled, FAST_PATH)) else ()  # all of it, or nothing
    for module in (*COMPILED, *fast):
        if not _is_compiled(module):
            raise ModuleNotFoundError(f"fastlock.{module} is not compiled")
    core = importlib.import_module("fastlock._core")
    if (sources := digest()) is not None and sources != core.SOURCES:
        raise ImportError("what was compiled is stale, its sources have changed: build fastlock again (make build)")
    return core


default = choose(os.environ.get("FASTLOCK_IMPL") or None)
