"""The undos and the unconfirmed releases of a client for asyncio: sent over its connection, kept while there is none.

Never here: what is undone, who connects.
"""

from __future__ import annotations

import asyncio
import contextlib

from fastlock._protocol.steps import RawCommands, Request
from fastlock._protocol.undo import SETTLE_TRIES, UnconfirmedRelease, Undo
from fastlock._stream_errors import by_handler
from fastlock._transport.aio_connection import AsyncConnection
from fastlock._transport.base import Transport
from fastlock._transport.internals import running_loop
from fastlock._transport.undo_delivery import UndoDelivery
from fastlock._transport.writing import CLOSE_SECONDS


class AsyncUndos(Transport):
    """What an `AsyncTransport` does for whom nobody waits."""

    loop: asyncio.AbstractEventLoop | None
    connection: AsyncConnection | None
    delayed_undos: dict[UndoDelivery, asyncio.TimerHandle]

    async def _connected(self, until: float | None = None) -> AsyncConnection:
        raise NotImplementedError

    def _reconnect(self) -> None:
        raise NotImplementedError

    async def answered(self, request: Request, connection: AsyncConnection) -> object:
        raise NotImplementedError

    def defer(self, delivery: UndoDelivery) -> None:
        """Keep an undo for the next connection; it is tied to none that is gone."""
        self.pending_undos.append(delivery)
        delivery.carrier = delivery.reply = None

    def delay_undo(self, delivery: UndoDelivery, seconds: float) -> None:
        """Send an undo after so many seconds: the server can do nothing now."""
        delivery.reply = None
        if self.closed:  # a closed client leaves no timer to the loop
            self.defer(delivery)
        elif self.loop is not None:
            self.delayed_undos[delivery] = self.loop.call_later(seconds, self._deliver_delayed, delivery)

    def _deliver_delayed(self, delivery: UndoDelivery) -> None:
        self.deliver(delivery)
        self.delayed_undos.pop(delivery, None)  # last: to send it twice does no harm

    def _undelay(self) -> None:
        """Cancel the timers of delayed undos, which become pending undos like the rest."""
        delayed, self.delayed_undos = self.delayed_undos, {}
        for delivery, timer in delayed.items():
            timer.cancel()
            self.defer(delivery)

    async def _flush_undos(self) -> None:
        """Send the pending undos, over a new connection where needed, if that comes up within CLOSE_SECONDS."""
        self._undelay()
        if self.pending_undos and self.ever_connected:
            try:
                self._post_pending_undos(await asyncio.wait_for(self._connected(), CLOSE_SECONDS))
            except Exception as error:  # also from a credential provider: the undos stay pending
                if by_handler(error):
                    raise

    def _post_pending_undos(self, connection: AsyncConnection) -> None:
        for delivery in list(self.pending_undos):
            connection.post(delivery)
            self.pending_undos.remove(delivery)  # last: after an interrupt it is sent twice, which does no harm

    def undo(self, undo: Undo) -> None:
        """Send an undo, for whose reply nobody waits; where there is no connection, it is sent over the next one."""
        connection = undo.connection
        delivery = UndoDelivery(undo)
        if isinstance(connection, AsyncConnection) and connection.error is not None:
            delivery.outlived_by(connection.session)
        self.deliver(delivery)
        if undo.urgent and self.connection is not None and self.connection.loop is running_loop():
            self.connection.flush()

    def deliver(self, delivery: UndoDelivery) -> None:
        if self.connection is not None and self.connection.loop is not running_loop():
            with contextlib.suppress(RuntimeError):  # the connection's loop is closed: keep it for the next connection
                self.connection.loop.call_soon_threadsafe(self.deliver, delivery)
                return
            self.defer(delivery)
        elif self.connection is not None:
            self.connection.post(delivery)
        else:
            self.defer(delivery)
            self._reconnect()

    async def settle(self, request: Request) -> None:
        """Wait until the releases are answered that the request must not overtake, whatever has to be sent again."""
        for _ in range(SETTLE_TRIES):
            if not any(key in self.unconfirmed for key in request.acquires()):
                return
            last = RawCommands([(b"PING",)])
            last.until = request.until
            await self.answered(last, await self._connected(request.until))

    def post_unconfirmed(self, unconfirmed: UnconfirmedRelease) -> bool:
        return self.post_over(self.connection, unconfirmed)
