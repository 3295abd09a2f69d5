"""A pause of the garbage collector, for models that keep a million states, none of them in a cycle: each collection
would look at all of them, which takes up to a third of the time."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """No collection of cycles within."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
