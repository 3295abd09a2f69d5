"""Scripts with a planted mistake. No decisions about locks are made here."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import pytest

from fastlock._protocol import commands


def in_scripts(old: str, new: str, *scripts: commands.Script) -> Callable[[pytest.MonkeyPatch], None]:
    """Replaces `old` by `new` in these scripts, each of which contains it once."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        for script in scripts:
            assert script.text.count(old.encode()) == 1, script.name
            text = script.text.replace(old.encode(), new.encode())
            monkeypatch.setattr(script, "text", text)
            monkeypatch.setattr(script, "sha", hashlib.sha1(text, usedforsecurity=False).hexdigest().encode())

    return plant
