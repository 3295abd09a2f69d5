"""Which locks may keep their leases, and the tokens of such leases (`kept.py`). Never here: state, I/O."""

from __future__ import annotations

from fastlock._protocol.arguments import as_ms
from fastlock._protocol.commands import KEPT_PREFIX


def kept_token(token: bytes) -> bytes:
    """A fresh token as one by which a lease can be recalled."""
    return KEPT_PREFIX + token[len(KEPT_PREFIX) :]


def check_timeout(timeout: float | None) -> None:
    """Raise ValueError for a lock without timeout."""
    if timeout is None:
        raise ValueError("keep needs a timeout: a lease without end would be kept for ever, should the process die")


def checked_ms(keep: float, timeout: float | None, fence: bool, fair: bool, queue: bool, renewed: bool) -> int:
    """The milliseconds of a lock's `keep`. Raises ValueError or TypeError where it makes no sense."""
    ms = as_ms(keep, "keep")
    check_timeout(timeout)
    if queue and not (fence or fair or renewed):
        return ms
    for name, given, why in (
        ("fence=True", fence, "each of its leases has a new number, which only the server can give"),
        ("fair=True", fair, "a kept lease is given out before those who wait elsewhere are asked"),
        ("queue=False", not queue, "who polls learns of no recall"),
        ("auto_renew=True", renewed, "a renewed lease has no end until which it can be kept"),
    ):
        if given:
            raise ValueError(f"keep and {name} contradict each other: {why}")
    raise AssertionError("one of them was given")
