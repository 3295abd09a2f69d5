"""What a batch does for each of its names: checks before it is sent, and values made of the replies.

Compiled from this same text where a compiler is (`batch.pxd` names the types): with hundreds of names these loops are
most of what a batch costs in the client. Never here: I/O, waiting.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fastlock._errors import as_own
from fastlock._protocol import commands
from fastlock._protocol.arguments import as_ms, as_name
from fastlock._protocol.lease import ENDED, Lease, is_inherited
from fastlock._protocol.losses import abbreviated

_ENDED: float = ENDED  # typed, where this is compiled: it is compared for each lease of a batch


def asked(names: Iterable[Any], timeout: float | None) -> tuple[list[Any], list[bytes], int]:
    """The checked arguments of acquire_many: names as given, as keys, and the lease in milliseconds."""
    if isinstance(names, (str, bytes, bytearray, memoryview)):
        raise TypeError("names must be a list of names, not a single one")
    if not isinstance(names, Iterable):
        raise as_own(TypeError(f"names must be a list, not {type(names).__name__}"))
    given = list(names)
    keys = [as_name(name) for name in given]
    if len(set(keys)) != len(keys):
        for name, key in zip(given, keys, strict=True):
            if keys.count(key) > 1:
                raise ValueError(f"names must not hold a name twice, as {abbreviated(name)}")
    return given, keys, 0 if timeout is None else as_ms(timeout)


def granted(
    names: list[Any], keys: list[bytes], token: bytes, sent: float, deadline: float, replies: list[Any]
) -> tuple[list[Any], list[int]]:
    """(A lease for each name that was free, None where another token holds it; the indexes of the names whose reply
    does not say all)."""
    leases: list[Any] = []
    odd: list[int] = []
    for i, reply in enumerate(replies):
        if reply is None:
            lease = Lease(names[i], keys[i], token, deadline)
            lease._since = sent
            leases.append(lease)
        else:
            leases.append(None)
            if type(reply) is not bytes or commands.token_matches(reply, token):
                odd.append(i)
    return leases, odd


def owned(leases: Iterable[Any], given: list[Any]) -> list[Lease]:
    """The checked argument of release_many: each lease once, if it can be released, or was released unreported.

    Appends all that `leases` has to `given`, as an iterator can be read only once.
    """
    if not isinstance(leases, Iterable):
        raise as_own(TypeError(f"leases must be a list, not {type(leases).__name__}"))
    given.extend(leases)
    mine: list[Any] = []
    for lease in given:
        if type(lease) is Lease:
            one = lease  # typed, where this is compiled
            # Of another lease that ended, somebody else may hold the name by now
            if not is_inherited(one) and (one._deadline != _ENDED or one._unreported):
                mine.append(one)
        elif lease is not None:
            raise as_own(TypeError(f"leases must be a list of Lease or None, not of {type(lease).__name__}"))
    once = dict.fromkeys(mine)
    return mine if len(once) == len(mine) else list(once)


def begin_releases(leases: list[Any], at: list[int]) -> list[int]:
    """Note that a release begins of those leases at these indexes that have not ended. Returns their indexes."""
    begun: list[int] = []
    for i in at:
        lease = leases[i]
        # First, as in `Lease.token`: it may be another client's, which must not hand it over any more
        lease._token_read = True
        if lease._deadline != _ENDED:
            lease._releases += 1
            begun.append(i)
    return begun


def reported(leases: list[Any]) -> tuple[list[Any], list[int]]:
    """(Whether each lease was released by a release_many that failed for others, and is reported now; the indexes of
    the leases that were not)."""
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
    """Note which leases a release_many has released that fails now, for a later one to report. Of the others it counts
    as not begun."""
    for i, lease in enumerate(leases):
        lease._unreported = released[i]
        if released[i] is False and lease._releases > 0:
            lease._releases -= 1


def keys_and_tokens(leases: list[Any]) -> tuple[list[bytes], list[bytes]]:
    """The keys and tokens of these leases, of which a release begins now."""
    keys: list[bytes] = []
    tokens: list[bytes] = []
    for lease in leases:
        lease._releasing = True
        keys.append(lease._key)
        tokens.append(lease._raw_token)
    return keys, tokens


def ended(leases: list[Any], replies: list[Any], at: list[int], released: list[bool]) -> list[int]:
    """Note in `released`, at the indexes `at`, which leases the replies say were the caller's and are released now.
    Returns the indexes of those whose reply does not say, as somebody may wait for the name."""
    odd: list[int] = []
    for i, lease in enumerate(leases):
        reply = replies[i]
        if type(reply) is int and reply:
            released[at[i]] = True
            lease._deadline = _ENDED
            if lease._renewal is not None:
                lease._renewal.end()
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
