"""What the fast path sends and does not wait for: a release, and the look that confirms a believed grant.

Nearly all of them are answered as expected, so what is sent, its delivery and the pending reply are one small object.
Of whatever else becomes of it an `UndoDelivery` takes care. Never here: what may be sent so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fastlock._protocol.belief import Confirmation
from fastlock._protocol.lease import Lease, now
from fastlock._protocol.undo import UnconfirmedRelease
from fastlock._transport.undo_delivery import UndoDelivery

if TYPE_CHECKING:
    from fastlock._protocol.handshake import Session


class Posted:
    """The pending reply to what was sent over the connection `carrier`, and of which an undo takes care if need be."""

    __slots__ = ("carrier",)
    carrier: Any

    def done(self) -> bool:
        return False

    def connection_broke(self, transport: Any, session: Session | None) -> None:
        """Defer it, as its connection broke."""
        delivery = self._delivery()
        delivery.outlived_by(session)
        transport.defer(delivery)

    def _delivery(self) -> UndoDelivery:
        """What delivers it from now on."""
        raise NotImplementedError


class PostedRelease(Posted):
    """A release of `lease` that was sent over the connection `carrier`: the pending reply to it, which is among the
    transport's `unconfirmed` releases."""

    __slots__ = ("awaited", "end", "key", "lease", "on_lost", "transport")

    def __init__(
        self, transport: Any, carrier: Any, lease: Lease, on_lost: Callable[[Lease], object] | None, end: float
    ) -> None:
        self.transport = transport
        self.carrier = carrier
        self.lease = lease
        self.key = lease._key
        self.on_lost = on_lost
        self.end = end  # when the lease ends: until then it is sent again
        self.awaited = 0.0  # as of an UndoDelivery

    @property
    def undo(self) -> UnconfirmedRelease:
        """What was sent, once, as an undo."""
        undo = UnconfirmedRelease(self.lease, self.on_lost, now, self.transport.release_told, self.end)
        undo.sends = 1
        return undo

    def set_result(self, reply: object) -> None:
        """Take the reply: 1, or what is to be thought about."""
        unconfirmed = self.transport.unconfirmed
        if reply == 1:
            if unconfirmed.get(self.key) is self:
                unconfirmed.pop(self.key, None)
        else:
            self._delivery().answered([reply])

    def _delivery(self) -> UndoDelivery:
        """What delivers it from now on."""
        delivery = UndoDelivery(self.undo)
        delivery.carrier = self.carrier
        if self.transport.unconfirmed.get(self.key) is self:
            self.transport.unconfirmed[self.key] = delivery
        return delivery


class PostedConfirmation(Posted):
    """The look of a confirmation that was sent over the connection `carrier`: the pending reply to it."""

    __slots__ = ("confirmation",)

    def __init__(self, carrier: Any, confirmation: Confirmation) -> None:
        self.carrier = carrier
        self.confirmation = confirmation

    def set_result(self, reply: object) -> None:
        """Take the reply: that the name is held, or what is to be thought about."""
        if type(reply) is list and len(reply) == 3 and reply[0] == 1 and type(reply[1]) is int:
            self.confirmation.answered(reply, self.confirmation.sent)
        else:
            self._delivery().answered([reply])

    def _delivery(self) -> UndoDelivery:
        """What delivers it from now on."""
        self.confirmation.carrier = None
        delivery = UndoDelivery(self.confirmation.undo())
        delivery.carrier = self.carrier
        return delivery
