"""Undos: what releases, or takes out of the server's queue, whatever a caller that is gone may have left there.

An undo is a value. A transport sends it, however late it gets, because the server counts a lease from when it executes
the acquire, which may be long after that was sent. The transport sends an undo again for as long as `unfinished` and
`after_error` say so. Never here: sockets, asyncio, threads, sleep.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from fastlock import _errors as errors
from fastlock._protocol import commands
from fastlock._protocol.handshake import Purpose, Session

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastlock._protocol.lease import Lease
    from fastlock._protocol.steps import Clock, Connection

SETTLE_TRIES = 5  # how often an answer is waited for that nobody waited for: it may say that it has to be sent again
RELOADS = 10  # how often scripts are loaded for one command at most: somebody may flush them all the time


class Undo:
    """Step: release these names if their tokens still hold them; nobody waits for the reply."""

    __slots__ = ("connection", "names", "stale", "tokens")
    purpose = Purpose("forget a caller that is gone", (commands.HAND_OVER_LUA, commands.RELEASE_LUA))
    matters = True  # whether anybody is worse off if it is refused
    urgent = False  # whether it is written at once, before the caller goes on, which may block the event loop

    def __init__(
        self,
        names: list[bytes],
        tokens: list[bytes],
        stale: tuple[Session, ...] = (),
        connection: Connection | None = None,
    ) -> None:
        self.names = names
        self.tokens = tokens
        self.stale = stale  # sessions to be ended before it is sent, as of a Request
        self.connection = connection  # the connection that it has to go over, as long as that is there

    @property
    def in_full(self) -> bool:
        """Whether all of it is sent each time, but for scripts that were loaded: it is of a lock that several may hold,
        which has scripts of its own, or of a lease that was kept, which a user without scripts deletes in either form.
        """
        return any(commands.is_shared(token) or token.startswith(commands.KEPT_PREFIX) for token in self.tokens)

    @property
    def followed(self) -> Session | None:
        """The session in which this follows what it undoes: its server knows the scripts that it takes. None: none."""
        return None if self.stale or self.connection is None else self.connection.session

    def untied(self) -> Undo:
        """This undo, to go over any connection."""
        return Undo(self.names, self.tokens, self.stale)

    def commands(self, capabilities: frozenset[str], again: bool) -> list[commands.RawCommand]:
        """The commands for a server with these capabilities. `again`: their scripts, which the server may have
        forgotten, are loaded first."""
        if not self.names:
            return [(b"PING",)]  # it is sent only to end the stale sessions
        return commands.undo_commands(self.names, self.tokens, capabilities, again)

    def unfinished(self, replies: list[object], again: bool) -> tuple[Undo, Exception] | None:
        """What the replies leave to be undone, and the error that left it; None: nothing."""
        outcomes = commands.undo_outcomes(replies, len(self.names), again)
        left = [i for i, outcome in enumerate(outcomes) if isinstance(outcome, Exception)]
        return (
            (Undo([self.names[i] for i in left], [self.tokens[i] for i in left]), outcomes[left[0]]) if left else None
        )

    def given_up(self) -> None:
        """The server refuses it for good."""


class ScriptUndo(Undo):
    """Step: carry out the call of a script, however late: it takes an entry out of the server's queue, or downgrades
    a writer. `matters`: as of an Undo; False for a user that may not queue."""

    __slots__ = ("call", "matters")
    purpose = Purpose(Undo.purpose.task, (commands.LEAVE_LUA,))

    def __init__(
        self, call: commands.RawCommand, stale: tuple[Session, ...], connection: Connection | None, matters: bool = True
    ) -> None:
        super().__init__([], [], stale, connection)
        self.call = call
        self.matters = matters

    @property
    def in_full(self) -> bool:
        return commands.script_of(self.call) is not commands.LEAVE_LUA

    @property
    def followed(self) -> Session | None:
        """As of an Undo; also where a plain lock's waiter leaves with its latest command in flight: a server that does
        not know how to leave cannot execute that either, and whom it granted the name has it for a moment only."""
        if self.connection is None or commands.script_of(self.call) is commands.DOWNGRADE_LUA:
            return None
        session = self.connection.session
        if not self.in_full and self.stale == (session,):
            return session
        return super().followed

    def untied(self) -> Undo:
        return ScriptUndo(self.call, self.stale, None, self.matters)

    def commands(self, capabilities: frozenset[str], again: bool) -> list[commands.RawCommand]:
        return [*commands.script_of(self.call).loads, self.call] if again else [self.call]

    def unfinished(self, replies: list[object], again: bool) -> tuple[Undo, Exception] | None:
        return (self, replies[-1]) if isinstance(replies[-1], Exception) else None


class UnconfirmedRelease(Undo):
    """Step: release a lease whose holder does not wait for that. It is sent again until the lease has ended.

    told: called with this and whether the lease was released; False: the name was not the holder's any more; None: it
    ends by itself.
    """

    __slots__ = ("_call", "_clock", "_told", "end", "lease", "on_lost", "refused", "sends")
    purpose = Purpose("release a lock", (commands.HAND_OVER_LUA,))
    in_full = False  # it is one call, of the script for plain locks

    def __init__(
        self,
        lease: Lease,
        on_lost: Callable[[Lease], object] | None,
        clock: Clock,
        told: Callable[[UnconfirmedRelease, bool | None], object],
        end: float,
    ) -> None:
        super().__init__([lease._key], [lease._raw_token])
        self.lease = lease
        self.on_lost = on_lost  # called with the lease, if it was lost
        self.sends = 0
        self.refused = 0  # how many of them the server did not execute
        self._call = commands.hand_over(lease._key, lease._raw_token)
        self.end = end  # when the lease ends
        self._clock = clock
        self._told = told

    def untied(self) -> Undo:
        return self

    def commands(self, capabilities: frozenset[str], again: bool) -> list[commands.RawCommand]:
        if self.sends and self._clock() >= self.end:
            return [(b"PING",)]
        self.sends += 1
        return [*commands.script_of(self._call).loads, self._call] if again else [self._call]

    def unfinished(self, replies: list[object], again: bool) -> tuple[Undo, Exception] | None:
        reply = replies[-1]
        if isinstance(reply, Exception):
            self.refused += str(reply).startswith(("NOSCRIPT", "NOPERM")) or errors.is_lasting(reply)
            return self, reply
        self._told(self, None if reply == b"PONG" else reply != 0 or self.maybe_earlier)
        return None

    @property
    def maybe_earlier(self) -> bool:
        """Whether an earlier send, whose reply was lost, may have released it."""
        return self.sends - self.refused > 1

    def given_up(self) -> None:
        self._told(self, None)


class KeptRelease(UnconfirmedRelease):
    """Step: release a lease that was kept."""

    __slots__ = ("instead",)
    instead: Callable[[Undo], object]  # carries out what does it for a user who may not run scripts

    def commands(self, capabilities: frozenset[str], again: bool) -> list[commands.RawCommand]:
        # Whoever held it has released it: how late this is sent, is no loss
        return [(b"PING",)] if self._clock() >= self.end else super().commands(capabilities, again)

    def given_up(self) -> None:
        super().given_up()
        self.instead(Undo(self.names, self.tokens))


class Resend(enum.Enum):
    """What to do about an undo that the server answered by an error."""

    LATER = enum.auto()  # the server can do nothing now: after a pause
    AT_ONCE = enum.auto()  # behind its scripts
    NEVER = enum.auto()  # the server refuses it for good


def after_error(error: Exception, refusals: int, again: bool) -> Resend:
    """What to do after this error, the `refusals`-th in a row; `again`: the scripts were loaded before it."""
    if errors.is_lasting(error):
        return Resend.LATER
    if not again or (str(error).startswith("NOSCRIPT") and refusals < RELOADS):
        return Resend.AT_ONCE
    return Resend.NEVER
