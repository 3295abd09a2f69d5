"""What was compiled, and from which text: the list for the build, the digest by which a stale build is known.

Run by setup.py as it is, before the package can be imported: standard library only.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

TWINS = ("_core", "_fork", "_hot")  # compiled from a .pyx; in Python `_fallback`, `_fork.py` and `_hot.py` are the same
# From their .py; a .pxd names the types.
PYTHON = ("_checks", "_lease", "_stats", "_gate", "_batch", "_terms", "_turns", "_common")


def digest() -> str | None:
    """Of all that the compiled modules are made from; None in an installation, where the sources are not."""
    here = Path(__file__).parent
    paths = sorted([*here.glob("*.pyx"), *here.glob("*.pxi"), *here.glob("*.pxd"), *(here / f"{m}.py" for m in PYTHON)])
    if not (here / "_core.pyx").exists():
        return None
    total = hashlib.sha256()
    for path in paths:
        total.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()[:16]
