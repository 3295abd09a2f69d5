"""How an undo is delivered: sent over one connection after another, until the server has answered it or refused it.

Nobody waits for its reply. Never here: what is undone, and whether it is tried again (`_protocol/undo.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from fastlock import _errors as errors
from fastlock._protocol.commands import HAND_OVER_LUA
from fastlock._protocol.handshake import Purpose, Session
from fastlock._protocol.steps import backoff
from fastlock._protocol.undo import Resend, Undo, after_error

if TYPE_CHECKING:
    from fastlock._protocol.commands import RawCommand


class Carrier(Protocol):
    """What a delivery uses of the connection that it is sent over."""

    loaded: set[RawCommand]  # what loads scripts, and was sent over it; empty once the server may know none
    knows_release: bool  # whether the script of an unconfirmed release is among them

    @property
    def session(self) -> Session | None: ...

    def post(self, delivery: UndoDelivery) -> None:
        """Send the undo, at once."""

    def post_later(self, delivery: UndoDelivery, seconds: float) -> None:
        """Send the undo after so many seconds, over whichever connection there is then."""

    def warn_refused(self, purpose: Purpose, error: errors.RedisError) -> None:
        """Warn that the server refuses for good what a command is for."""


class Deferrer(Protocol):
    """What a delivery uses of its transport."""

    def defer(self, delivery: UndoDelivery) -> None:
        """Keep the undo for the next connection."""


class UndoDelivery:
    """One undo on its way to the server."""

    __slots__ = (
        "__weakref__",
        "again",
        "awaited",
        "behind",
        "carrier",
        "followed",
        "refusals",
        "reply",
        "stale",
        "undo",
    )

    def __init__(self, undo: Undo) -> None:
        self.undo = undo.untied()  # it must not keep a connection alive that is gone
        self.followed = undo.followed  # over that session it needs no scripts
        self.stale = undo.stale  # sessions to be ended before it is sent, as of a Request
        self.again = False  # whether it was refused: it is sent behind its scripts, which the server may have forgotten
        self.behind = False  # whether its latest send was one `again`, as of `Undo.commands`
        self.refusals = 0  # error replies to it
        self.awaited = 0.0  # since when somebody looks for its reply, on the clock `now`; 0: nobody does
        self.carrier: Carrier | None = None  # the connection over which it was sent
        self.reply: UndoReply | None = None  # the pending reply to its latest send

    def calls(self, carrier: Carrier) -> list[RawCommand]:
        """What to send over this connection."""
        self.carrier, self.awaited = carrier, 0.0
        assert carrier.session is not None, "the connection has come up"
        # Nobody may read that a script is not known: that the server was started anew, say, since a connection broke
        known = carrier.session is self.followed or (carrier.knows_release and not self.undo.in_full)
        self.behind = self.again or (self.undo.matters and not known)
        calls = self.undo.commands(carrier.session.capabilities, self.behind)
        if not self.behind or self.again:
            return calls
        return [call for call in calls if call not in carrier.loaded]

    def written(self, calls: list[RawCommand]) -> None:
        """Note that these calls were written: with them their scripts are loaded, if they do load them."""
        if self.carrier is not None and self.behind:
            self.carrier.loaded.update(call for call in calls if call[0] == b"SCRIPT")
            self.carrier.knows_release = HAND_OVER_LUA.load in self.carrier.loaded

    def outlived_by(self, session: Session | None) -> None:
        """Note a session that broke with this undo in flight: it is to be ended before the undo is sent again."""
        if session is not None and session not in self.stale:
            self.stale = (*self.stale, session)

    def answered(self, replies: list[object]) -> None:
        """Take the replies: what they left to be undone is sent again, or given up."""
        sent, carrier = self.undo, self.carrier
        left = sent.unfinished(replies, self.behind)
        if carrier is not None and any(isinstance(reply, Exception) for reply in replies):
            carrier.loaded.clear()  # the server may have refused to load the scripts, too, or has lost them since
            carrier.knows_release = False
        if left is None or carrier is None:
            return
        self.undo, error = left
        self.stale = ()  # these sessions were ended before the undo was executed
        self.refusals += 1
        what = after_error(error, self.refusals, self.behind)
        if type(self.undo) is not type(sent):  # the error was another's
            what = Resend.AT_ONCE
        if what is Resend.LATER:
            carrier.post_later(self, backoff(self.refusals))
        elif what is Resend.AT_ONCE:
            self.again = True
            carrier.post(self)
        else:
            self.undo.given_up()
            if self.undo.matters:
                carrier.warn_refused(self.undo.purpose, errors.from_reply(error))


class UndoReply:
    """The pending reply to an undo. A connection that breaks gives the undo back, to be sent over the next one. It is
    ignored once the undo was sent again, or is deferred."""

    __slots__ = ("delivery",)

    def __init__(self, delivery: UndoDelivery) -> None:
        self.delivery = delivery
        delivery.reply = self

    def done(self) -> bool:
        return False

    def set_result(self, replies: list[object]) -> None:
        if self.delivery.reply is self:
            self.delivery.answered(replies)
        if self.delivery.reply is self:  # else the two would keep each other alive, and the connection of the undo
            self.delivery.reply = None

    def connection_broke(self, transport: Deferrer, session: Session | None) -> None:
        """Defer the undo, as its connection broke."""
        if self.delivery.reply is self:
            self.delivery.outlived_by(session)
            transport.defer(self.delivery)
        if self.delivery.reply is self:  # as above
            self.delivery.reply = None
