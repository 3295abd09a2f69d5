"""What is compiled, and from which text: the one list, for the build, the tests and the digest of a stale build.

Run as it is, by setup.py before the package can be imported and by make: standard library only.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

# From a .pyx; beside it lies the same in Python (of `_core`: `_fallback`).
TWINS = ("_core", "_fork", "_transport.parker")
# From their .py; a .pxd names the types.
PYTHON = (
    *("_protocol.arguments", "_protocol.lease", "_protocol.stats", "_protocol.moments", "_protocol.waiters"),
    *("_protocol.belief", "_protocol.kept", "_protocol.local_queue", "_protocol.batch", "_protocol.base_lock"),
    *("_transport.internals", "_transport.wakeups", "_transport.base", "_transport.owners", "_transport.waiting"),
    "_transport.posted",
)
# The fast path, which may be left out: its folder, or its compilation (FASTLOCK_NO_FASTPATH=1).
FAST_PATH = ("_fastpath.threads", "_fastpath.tasks")


def sources() -> list[Path]:
    """All files that the compiled modules are made from; none in an installation, where they are not."""
    here = Path(__file__).parent
    if not (here / "_core.pyx").exists():
        return []
    cython = [path for suffix in ("pyx", "pxi", "pxd") for path in here.rglob(f"*.{suffix}")]
    python = [here.joinpath(*module.split(".")).with_suffix(".py") for module in (*PYTHON, *FAST_PATH)]
    return sorted([*cython, *filter(Path.exists, python)])


def digest() -> str | None:
    """Of all that the compiled modules are made from; None in an installation, where the sources are not."""
    total = hashlib.sha256()
    for path in (paths := sources()):
        total.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()[:16] if paths else None


if __name__ == "__main__":
    print(*(path.relative_to(Path.cwd()) for path in sources()))
