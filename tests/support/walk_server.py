"""A real server on a clock that a walk sets: its keys, and the time that its scripts see, move along with that clock.

No decisions about locks are made here.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import hiredis
import pytest
import redis

from fastlock._protocol import commands, lease
from support.run_steps import Clock

EPOCH = 1_700_000_000.0  # the server's time when the clock reads 0
STALL = 0.15  # seconds: where this process stood still for longer, keys may have ended that had time left by the clock
TOLERANCE = 0.2  # seconds by which the server's keys may end beside their time by the clock
OFTEN = 0.02  # seconds of real time after which the server's keys are set right
SECONDS_KEY, MICROS_KEY = b"walk:seconds", b"walk:micros"
SHIFT = """for _, name in ipairs(redis.call('KEYS', '*')) do
  local left = redis.call('PTTL', name)
  if left >= 0 and left <= tonumber(ARGV[1]) then
    redis.call('DEL', name)
  elseif left >= 0 then
    redis.call('PEXPIRE', name, left - ARGV[1])
  end
end
redis.call('MSET', 'walk:seconds', ARGV[2], 'walk:micros', ARGV[3])"""
LOOK = """local found = {}
for _, name in ipairs(redis.call('KEYS', '*')) do
  local held = redis.pcall('GET', name)
  if type(held) == 'table' then
    held = redis.call('ZRANGE', name, 0, -1, 'WITHSCORES')
  end
  found[#found + 1] = {name, held, redis.call('PTTL', name)}
end
return found"""
# What a script asks the server's clock for, and what it asks instead
CLOCKS = {
    "redis.call('TIME')": "redis.call('MGET', 'walk:seconds', 'walk:micros')",
    "'PEXPIREAT', name, last[2]": "'PEXPIRE', name, last[2] - clock()",
    "'PEXPIREAT', KEYS[1], ending": "'PEXPIRE', KEYS[1], ARGV[3] + 1",
    "left > moment": "left > moment + 100",  # `sync` may move the end of a key that is younger than it takes it for
}


class Stalled(Exception):
    """This process stood still for so long that the walk proves nothing."""


class Entry(NamedTuple):
    """What stands on the server under a key: a string, or the members of a zset with their scores; and the milliseconds
    for which it will (-1: without end)."""

    value: Any
    left: int


class WalkServer:
    """The server of one walk. executed: called with each command, the state before it, and its reply."""

    def __init__(self, path: str, clock: Clock, executed: Callable[[Any, dict[bytes, Entry], Any], None]) -> None:
        self.path, self.clock, self.executed = path, clock, executed
        self.connection = self.connect()
        self.raw("FLUSHALL")
        self.texts = {script.sha: with_clock(script.text.decode()) for script in commands.SCRIPTS}
        self.shas = self.load_scripts()
        self.synced, self.real, self.carry = clock(), time.monotonic(), 0.0
        self.state: dict[bytes, Entry] = {}
        self.sync()

    def connect(self) -> Any:
        connection = redis.UnixDomainSocketConnection(path=self.path, protocol=2)
        connection.connect()
        return connection

    def load_scripts(self) -> dict[bytes, bytes]:
        """Load all scripts, with another clock. Returns their SHA1s there, by those that the package knows."""
        calls = [("SCRIPT", "LOAD", text) for text in self.texts.values()]
        self.connection.send_packed_command(self.connection.pack_commands(calls))
        return {sha: self.connection.read_response() for sha in self.texts}

    def raw(self, *args: Any) -> Any:
        """The server's reply to a command; an error reply as the core returns it."""
        self.connection.send_command(*args)
        try:
            return self.connection.read_response()
        except redis.exceptions.NoScriptError as error:  # whose text lacks its code
            return hiredis.ReplyError(f"NOSCRIPT {error}")
        except redis.ResponseError as error:
            return hiredis.ReplyError(str(error))

    def ms(self) -> float:
        """The server's time in milliseconds."""
        return (EPOCH + self.clock()) * 1000

    def sync(self) -> None:
        """Move the server's keys along with the clock, and not with the time that has really passed."""
        real = time.monotonic()
        drift, self.real = real - self.real, real
        if drift > STALL:
            raise Stalled
        due = (self.clock() - self.synced - drift) * 1000 + self.carry
        self.synced, self.carry = self.clock(), due - round(due)
        seconds, micros = divmod(round(self.ms() * 1000), 1_000_000)
        self.raw("EVAL", SHIFT, 0, round(due), seconds, micros)

    def look(self) -> None:
        """Note what stands on the server."""
        found = self.raw("EVAL", LOOK, 0)
        pairs = lambda held: {held[i]: float(held[i + 1]) for i in range(0, len(held), 2)}  # noqa: E731
        self.state = {
            name: Entry(pairs(held) if isinstance(held, list) else held, left)
            for name, held, left in found
            if name not in (SECONDS_KEY, MICROS_KEY)
        }

    def left(self, key: bytes, token: bytes) -> float:
        """Seconds for which a token will hold a name; below 0: it does not hold it."""
        entry = self.state.get(key)
        if entry is None:
            return -math.inf
        if isinstance(entry.value, dict):
            return (entry.value.get(token, -math.inf) - self.ms()) / 1000
        if not commands.token_matches(entry.value, token):
            return -math.inf
        return math.inf if entry.left < 0 else entry.left / 1000

    def holds(self, key: bytes, token: bytes) -> bool:
        """Whether a token holds a name."""
        return self.left(key, token) > -TOLERANCE

    def run(self, call: tuple[bytes, ...]) -> Any:
        """Have the server execute a command."""
        if time.monotonic() - self.real > OFTEN:
            self.sync()
        if call[0] == b"TIME":
            seconds, micros = divmod(round(self.ms() * 1000), 1_000_000)
            return [b"%d" % seconds, b"%d" % micros]
        sent = call
        if call[0] == b"EVALSHA":
            sent = (call[0], self.shas[call[1]], *call[2:])
        elif call[0] == b"SCRIPT":
            sent = (*call[:2], with_clock(call[2].decode()).encode())
        before, reply = self.state, self.raw(*sent)
        self.look()
        self.executed(call, before, reply)
        return reply


def with_clock(script: str) -> str:
    """The text of a script that asks the walk's clock."""
    for theirs, ours in CLOCKS.items():
        script = script.replace(theirs, ours)
    assert "'TIME'" not in script and "EXPIREAT" not in script, "it asks another clock"
    return script


def set_clock(patch: pytest.MonkeyPatch, clock: Clock) -> None:
    """Have all modules of the package read this clock."""
    real = lease.now
    for name, module in list(sys.modules.items()):
        if name.startswith("fastlock.") and getattr(module, "now", None) is real:
            patch.setattr(module, "now", clock)
