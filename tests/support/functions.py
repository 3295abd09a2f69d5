"""Functions of the package with a planted mistake. No decisions about locks are made here."""

from __future__ import annotations
import __future__

import inspect
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest


def in_function(function: Any, old: str, new: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Replaces `old` by `new` in a function of a module, or of a class in it, which contains it once."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        module = sys.modules[function.__module__]
        text = textwrap.dedent(inspect.getsource(function))
        assert text.count(old) == 1, function.__qualname__
        found: dict[str, Any] = {}
        flags = __future__.annotations.compiler_flag
        exec(compile(text.replace(old, new), module.__file__ or "", "exec", flags), vars(module), found)
        owner: Any = module
        *classes, name = function.__qualname__.split(".")
        for each in classes:
            owner = getattr(owner, each)
        patch.setattr(owner, name, found[name])

    return plant


def together(*plants: Callable[[pytest.MonkeyPatch], None]) -> Callable[[pytest.MonkeyPatch], None]:
    """Plants all of these."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        for each in plants:
            each(patch)

    return plant
