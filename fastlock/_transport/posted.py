"""A release that nobody waits for, as the fast path sends it.

Nearly all of them are answered as expected, so what is sent, its delivery and the pending reply are one small object.
Of whatever else becomes of it an `UndoDelivery` takes care. Never here: which release may be sent so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fastlock._protocol.lease import Lease, now
from fastlock._protocol.undo import UnconfirmedRelease
from fastlock._transport.undo_delivery import UndoDelivery

if TYPE_CHECKING:
    from fastlock._protocol.handshake import Session


class PostedRelease:
    """A release of `lease` that was sent over the connection `carrier`: the pending reply to it, which is among the
    transport's `unconfirmed` releases."""

    __slots__ = ("carrier", "end", "key", "lease", "on_lost", "transport")

    def __init__(
        self, transport: Any, carrier: Any, lease: Lease, on_lost: Callable[[Lease], object] | None, end: float
    ) -> None:
        self.transport = transport
        self.carrier = carrier
        self.lease = lease
        self.key = lease._key
        self.on_lost = on_lost
        self.end = end  # when the lease ends: until then it is sent again

    @property
    def undo(self) -> UnconfirmedRelease:
        """What was sent, once, as an undo."""
        undo = UnconfirmedRelease(self.lease, self.on_lost, now, self.transport.release_told, self.end)
        undo.sends = 1
        return undo

    def done(self) -> bool:
        return False

    def set_result(self, reply: object) -> None:
        """Take the reply: 1, or what is to be thought about."""
        unconfirmed = self.transport.unconfirmed
        if reply == 1:
            if unconfirmed.get(self.key) is self:
                unconfirmed.pop(self.key, None)
        else:
            self._delivery().answered([reply])

    def connection_broke(self, transport: Any, session: Session | None) -> None:
        """Defer the release, as its connection broke."""
        delivery = self._delivery()
        delivery.outlived_by(session)
        transport.defer(delivery)

    def _delivery(self) -> UndoDelivery:
        """What delivers it from now on."""
        delivery = UndoDelivery(self.undo)
        delivery.carrier = self.carrier
        if self.transport.unconfirmed.get(self.key) is self:
            self.transport.unconfirmed[self.key] = delivery
        return delivery
