"""What a client for asyncio does about kept leases: it hears recalls, and a timer of its loop releases them in time.

Never here: which leases are kept (`_protocol/kept.py`).
"""

from __future__ import annotations

import asyncio
import math
import weakref
from typing import TYPE_CHECKING

from fastlock._protocol.lease import now
from fastlock._transport.base import Transport
from fastlock._transport.internals import running_loop

if TYPE_CHECKING:
    from fastlock._transport.aio import AsyncTransport
    from fastlock._transport.aio_connection import AsyncConnection

TURN_SECONDS = 0.001  # for which tasks may take kept leases before the loop runs, which hears recalls
LONGEST_PAUSE = 1e6


class KeepTimer:
    """The timer of one client. It keeps no client alive."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = weakref.ref(transport)
        self._timer: asyncio.TimerHandle | None = None
        self._time = math.inf  # when it ends

    def ensure(self) -> None:
        """See to it that kept leases are looked for in time."""
        transport = self._transport()
        if transport is None or transport.loop is None or transport.closed:
            return
        at = transport.queues.next_lapse
        if at < self._time:
            self.stop()
            time = now()
            pause = min(transport.queues.lapse_time(time) - time, LONGEST_PAUSE)
            self._timer = transport.loop.call_later(pause, self._run)
            self._time = at  # last: who was interrupted before calls this again

    def stop(self) -> None:
        """Look no more, until `ensure`."""
        timer, self._timer, self._time = self._timer, None, math.inf
        if timer is not None:
            timer.cancel()

    def _run(self) -> None:
        try:
            self._timer, self._time = None, math.inf
            transport = self._transport()
            if transport is not None:
                transport.release_kept(transport.queues.lapsed(now()))
        finally:  # also if a signal handler raised
            try:
                self.ensure()
            except BaseException:  # in that
                self.ensure()
                raise


class AsyncKeeping(Transport):
    """What an `AsyncTransport` does about kept leases."""

    loop: asyncio.AbstractEventLoop | None
    connection: AsyncConnection | None
    wants_recalls: bool  # whether recalls are to be heard
    _keep_timer: KeepTimer

    def turn_is_over(self, time: float) -> bool:
        """Whether tasks have taken kept leases for long enough, so that the loop has to run: it hears recalls."""
        if not self.turn_end and self.loop is not None:
            self.turn_end = time + TURN_SECONDS
            self.loop.call_soon(self._begin_turn)
        return time >= self.turn_end

    def _begin_turn(self) -> None:
        self.turn_end = 0.0

    def hear_recalls(self) -> None:
        self.wants_recalls = True  # over the next connection, if there is none
        if self.connection is not None and self.connection.loop is running_loop():
            self.connection.hear_recalls()

    def wake_keeper(self) -> None:
        self._keep_timer.ensure()
