"""Mistakes that one chaos worker makes in a kind of lock, which the judge has to find: in a script, or in the package.

What a worker does beside (`callers.ACTED`) is planted there.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

import fastlock
import fastlock.asyncio
from fastlock._protocol import commands

from .scripts import in_scripts


def forget_depth(patch: pytest.MonkeyPatch) -> None:
    """Whoever leaves an inner acquire releases the lock."""
    for client in (fastlock.Client(), fastlock.asyncio.Client()):
        patch.setattr(type(client.reentrant_lock("a")), "_leave_inner", lambda *_: False)


MISTAKES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    # Readers do not wait for a writer
    "reader": in_scripts(
        "(mode(token) == 'r' and mode(first) == 'r')",
        "mode(token) == 'r'",
        *(commands.SHARED_JOIN_LUA, commands.SHARED_LOOK_LUA, commands.SHARED_RELEASE_LUA),
    ),
    # One permit more than there are
    "permit": in_scripts(
        "<= size(token)",
        "<= size(token) + 1",
        *(commands.SHARED_JOIN_LUA, commands.SHARED_LOOK_LUA, commands.SHARED_RELEASE_LUA),
    ),
    # The last of several names is not acquired
    "name": in_scripts("for i = 1, last do", "for i = 1, last - 1 do", commands.ACQUIRE_ALL_LUA),
    "depth": forget_depth,
    # A renewal moves the end of a lease in the client only
    "renewal": in_scripts(
        "redis.call('PEXPIRE', name, ARGV[#KEYS + i])", "redis.call('PTTL', name)", commands.RENEW_MANY_LUA
    ),
}


def plant(name: str) -> None:
    """Make this process make a mistake, for good."""
    if name in MISTAKES:
        MISTAKES[name](pytest.MonkeyPatch())
