"""The one door between the compiled core and its fallback in Python.

Unset, FASTLOCK_IMPL takes the core, and the fallback only where the core cannot be imported. Asked for by name
("cython" or "python") it obeys or raises. A core whose interface is not the one of this version is refused.
"""

from __future__ import annotations

import importlib
import logging
import os
from types import ModuleType

from fastlock import _fallback

_MODULES = {"cython": "fastlock._core", "python": "fastlock._fallback"}


def load(name: str | None = None) -> ModuleType:
    """The bytes layer by name, or the best there is. ValueError: no such name. ImportError: not built, or stale."""
    if name is not None:
        if name not in _MODULES:
            raise ValueError(f"the implementation must be 'cython' or 'python', not {name!r} (FASTLOCK_IMPL)")
        return _checked(importlib.import_module(_MODULES[name]))
    try:
        core = importlib.import_module(_MODULES["cython"])
    except ImportError as error:
        logging.getLogger("fastlock").info("the compiled core is not there, using pure Python: %s", error)
        return _fallback
    return _checked(core)


def _checked(module: ModuleType) -> ModuleType:
    if module.ABI != _fallback.ABI:
        raise ImportError(
            f"{module.__name__} is stale (interface {module.ABI}, not {_fallback.ABI}): build fastlock again"
        )
    return module


default = load(os.environ.get("FASTLOCK_IMPL") or None)
