"""Believed grants: who is told of a grant holds the name at once, and has the server confirm that behind its back.

The server grants a name for a moment, counted from when it grants. A waiter knows that its entry was in the queue when
it looked last, so the grant came later than it sent that look: until then and the moment, nobody else is granted the
name. A look, which is sent at once and not waited for, sets the lease that was asked for. Nothing is believed while
another look of that entry is not answered: the waiter that sent it may be gone, and the look may have confirmed the
grant already, with the lease of that waiter. Never here: sockets, who is next.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, cast

from fastlock import _errors as errors
from fastlock._protocol import commands
from fastlock._protocol import lease as leases
from fastlock._protocol.handshake import Purpose
from fastlock._protocol.undo import ScriptUndo, Undo

if TYPE_CHECKING:
    from fastlock._protocol.lease import Lease
    from fastlock._protocol.local_queue import LocalQueue


class Confirmation:
    """What a believed grant still waits for: the reply to the look that confirms it."""

    __slots__ = ("address", "carrier", "lease", "ms", "queue", "sent")

    def __init__(self, queue: LocalQueue, lease: Lease, ms: int) -> None:
        self.queue = queue
        self.lease = lease  # whose end it tells: the next holder's, once the lease was handed over
        self.ms = ms
        self.sent = 0.0  # first: from then on the server may count the lease; 0: it was not sent
        self.address = queue.address
        self.carrier: Any = None  # the connection that the fast path of threads has sent it over

    def undo(self) -> ConfirmationUndo:
        """The look, as what nobody waits for and a transport delivers."""
        return ConfirmationUndo(self)

    def answered(self, reply: list[int], sent: float) -> None:
        """Take the reply to a look that was sent then."""
        if reply[0] == 1:
            self.queue.note_confirmed(self, reply[1], sent, self.end_from(sent))
        else:
            self.queue.note_refuted(self, leases.now())

    def end_from(self, sent: float) -> float:
        """When the lease ends, if a look confirms it that was sent then."""
        return sent + self.ms / 1000 if self.ms else math.inf

    def read(self) -> None:
        """Take the reply, if it has come, where no event loop does that."""
        self.queue.queues.read_replies()


class ConfirmationUndo(Undo):
    """Step: the look that confirms a believed grant. Nobody waits for it; it is sent again if its connection breaks,
    which does no harm: it takes nothing."""

    __slots__ = ("call", "confirmation")
    purpose = Purpose("confirm a grant", (commands.ENTER_LUA,))
    matters = False  # the lease ends early then
    urgent = True

    def __init__(self, confirmation: Confirmation) -> None:
        queue, lease, ms = confirmation.queue, confirmation.lease, b"%d" % confirmation.ms
        super().__init__([], [], queue.stale, queue.connection)
        self.confirmation = confirmation
        self.call = commands.enter(lease._key, confirmation.address, False, commands.CONFIRM, lease._raw_token, ms)

    def untied(self) -> Undo:
        self.connection = None
        return self

    def commands(self, capabilities: frozenset[str], again: bool) -> list[commands.RawCommand]:
        confirmation = self.confirmation
        if confirmation.lease._confirmation is not confirmation:  # the lease has ended, or its end was moved
            return [(b"PING",)]
        confirmation.sent = confirmation.sent or leases.now()
        return [*commands.ENTER_LUA.loads, self.call] if again else [self.call]

    def unfinished(self, replies: list[object], again: bool) -> tuple[Undo, Exception] | None:
        reply = replies[-1]
        if reply == b"PONG":
            return None
        if isinstance(reply, Exception):
            return self, reply
        if not commands.is_enter_reply(reply):
            return self, errors.senseless_reply("the server", reply)
        said, confirmation = cast("list[int]", reply), self.confirmation
        confirmation.answered(said, confirmation.sent)
        if said[0]:
            return None
        # The entry still waits, so the message was no grant, or the server has forgotten that
        leave = commands.leave(confirmation.lease._key, confirmation.address + confirmation.lease._raw_token)
        return ScriptUndo(leave, self.stale, None), errors.senseless_reply("the server", reply)
