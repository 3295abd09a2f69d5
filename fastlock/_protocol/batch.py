"""Law: what a batch does for each of its names: checks before, and values made of the replies. No I/O, no waiting.

Compiled from this same text where a compiler is (`_batch.pxd` names the types): with hundreds of names these loops are
most of what a batch costs on this side of the wire.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fastlock._errors import as_own
from fastlock._protocol import commands
from fastlock._protocol.arguments import as_ms, as_name
from fastlock._protocol.lease import ENDED, Lease, is_inherited

_ENDED: float = ENDED  # typed, where it is compiled: compared for each lease of a batch


def asked(names: Iterable[Any], timeout: float | None) -> tuple[list[Any], list[bytes], int]:
    """The checked arguments of acquire_many: names as given, as keys, and the lease in milliseconds."""
    if isinstance(names, (str, bytes, bytearray, memoryview)):
        raise TypeError("names must be a list of names, not a single one")
    if not isinstance(names, Iterable):
        raise as_own(TypeError(f"names must be a list, not {type(names).__name__}"))
    given = list(names)
    keys = [as_name(name) for name in given]
    if len(set(keys)) != len(keys):
        for key in keys:
            if keys.count(key) > 1:
                raise ValueError(f"names must not hold a name twice, as {key!r:.200}")
    return given, keys, 0 if timeout is None else as_ms(timeout)


def granted(
    names: list[Any], keys: list[bytes], token: bytes, deadline: float, replies: list[Any]
) -> tuple[list[Any], list[int]]:
    """A lease for each name that was free, None where another token holds it; and where the reply does not say all."""
    leases: list[Any] = []
    odd: list[int] = []
    for i, reply in enumerate(replies):
        if reply is None:
            leases.append(Lease(names[i], keys[i], token, deadline))
        else:
            leases.append(None)
            if type(reply) is not bytes or commands.token_matches(reply, token):
                odd.append(i)
    return leases, odd


def owned(leases: Iterable[Any], given: list[Any]) -> list[Lease]:
    """The checked argument of release_many: once each, those that can be released, or were without a word.

    Appends them to `given` as they are given, which an iterator does once.
    """
    if not isinstance(leases, Iterable):
        raise as_own(TypeError(f"leases must be a list, not {type(leases).__name__}"))
    given.extend(leases)
    mine: list[Any] = []
    for lease in given:
        if type(lease) is Lease:
            one = lease  # typed, where it is compiled
            if not is_inherited(one) and (one._deadline != _ENDED or one._unreported):  # else it may be another's now
                mine.append(one)
        elif lease is not None:
            raise as_own(TypeError(f"leases must be a list of Lease or None, not of {type(lease).__name__}"))
    once = dict.fromkeys(mine)
    return mine if len(once) == len(mine) else list(once)


def unended(leases: list[Any], at: list[int]) -> list[int]:
    """Which of these nobody has let go of."""
    left = len(at)
    for i in at:
        lease = leases[i]
        left -= lease._deadline == _ENDED
    return at if left == len(at) else [i for i in at if leases[i]._deadline != _ENDED]


def reported(leases: list[Any]) -> tuple[list[Any], list[int]]:
    """Whether each was released by a release_many that failed for others, which is told now; and where not."""
    released: list[bool] = []
    rest: list[int] = []
    for i, lease in enumerate(leases):
        released.append(lease._unreported)
        if lease._unreported:
            lease._unreported = False
        else:
            rest.append(i)
    return released, rest


def unreported(leases: list[Any], released: list[bool]) -> None:
    """A release_many fails that has released some of them."""
    for i, lease in enumerate(leases):
        lease._unreported = released[i]


def keys_and_tokens(leases: list[Any]) -> tuple[list[bytes], list[bytes]]:
    """What proves each of them."""
    keys: list[bytes] = []
    tokens: list[bytes] = []
    for lease in leases:
        lease._releasing = True
        keys.append(lease._key)
        tokens.append(lease._raw_token)
    return keys, tokens


def ended(leases: list[Any], replies: list[Any], at: list[int], released: list[bool]) -> list[int]:
    """Note which of them, each `at` its place in `released`, were the caller's and are over now. Returns the places
    where the reply does not say, as somebody may wait for it."""
    odd: list[int] = []
    for i, lease in enumerate(leases):
        reply = replies[i]
        if type(reply) is int and reply:
            released[at[i]] = True
            lease._deadline = _ENDED
        else:
            odd.append(at[i])
    return odd


def merge(given: list[Any], mine: list[Any], released: list[Any]) -> list[bool]:
    """One bool for each entry that release_many was given."""
    for each in released:
        if each is None:
            released = [each is True for each in released]
            break
    if len(given) == len(mine):
        return released
    outcome = dict(zip(mine, released, strict=True))
    return [outcome.get(lease, False) for lease in given]
