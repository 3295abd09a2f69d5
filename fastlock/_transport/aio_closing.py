"""How a client for asyncio ends, by `close`, with its event loop, or as it is collected: what is in flight is answered,
and what is pending is delivered, which is tried again for as long as `Transport.delivery_end` says.

Never here: what is pending, and whether it is tried again (`_protocol/undo.py`).
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import weakref
from collections.abc import AsyncGenerator, Coroutine
from typing import Any

from fastlock import _errors as errors
from fastlock._fork import check
from fastlock._protocol.lease import now
from fastlock._protocol.steps import backoff
from fastlock._stream_errors import by_handler
from fastlock._transport.aio_connection import AsyncConnection
from fastlock._transport.aio_keeping import KeepTimer
from fastlock._transport.aio_undos import AsyncUndos
from fastlock._transport.internals import Wakeup, running_loop
from fastlock._transport.renewing import RenewalTimer
from fastlock._transport.writing import CLOSE_SECONDS, CONNECT_ERRORS, removed

SHORTEST = 0.1  # seconds that each try gets at least


class AsyncClosing(AsyncUndos):
    """How an `AsyncTransport` ends."""

    wakeups: Any
    operations: set[object]  # under way, except acquires and releases that the fast path sends as one command
    _closing: list[Wakeup]  # what each `close` that is under way awaits
    _connecting: asyncio.Task[AsyncConnection] | None
    _delivery_end: float  # until when what is pending is delivered, once the client ends
    _ending: asyncio.Task[None] | None  # that ends the connection of a client that was closed or collected
    _keep_timer: KeepTimer
    _loop_end: Any  # a generator that the loop closes when it ends: see `at_end`
    _renewal_timer: RenewalTimer
    _sleeping: set[Wakeup]

    def _bind(self, loop: asyncio.AbstractEventLoop | None) -> None:
        raise NotImplementedError

    def _connect(self, loop: asyncio.AbstractEventLoop, last: bool = False) -> Coroutine[Any, Any, AsyncConnection]:
        raise NotImplementedError

    def forget_parent(self) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        """End the connection, after what is in flight was answered, and send the pending undos: 1 or 2 seconds where
        the server does not answer, and where releases are among it that nobody waited for, up to `reply_timeout`.
        Waiters get ClientClosedError."""
        check()
        loop = asyncio.get_running_loop()
        if self.loop is not None:
            self._bind(loop)  # raises if the client belongs to another loop
        ending = self._ending_now()
        if ending is None:
            self._ending = ending = loop.create_task(self._end(), name="fastlock: close")
        # A caller that is cancelled leaves, and what is pending is delivered all the same
        await asyncio.shield(ending)

    def _ending_now(self) -> asyncio.Task[None] | None:
        """The task of the running loop that ends this client just now, if there is one."""
        ending = self._ending
        return None if ending is None or ending.done() or ending.get_loop() is not running_loop() else ending

    async def _end(self) -> None:
        """What `close` does, once for all that call it meanwhile. Cancelled, as by `asyncio.run` when its loop ends, it
        leaves the rest to `leave_loop`."""
        self._delivery_end = end = self.delivery_end()
        try:
            if self.loop is not None:
                await asyncio.sleep(0)  # lets a release begin whose task was just created
                self.queues.ended = True
                self._delivery_end = end = self.delivery_end()
                self.release_kept(self.queues.recalls_heard(False))
                await self._flush_undos()
        finally:
            await self._shut(end)
            await self._flush_after_close()
        self._stop_watching_loop()
        UNFINISHED.discard(self)

    async def _flush_after_close(self) -> None:
        """Send the pending undos of a closed client, as nothing else would."""
        self._undelay()
        if self.pending_undos and self.ever_connected:
            end = max(self._delivery_end, now() + CLOSE_SECONDS)
            await self._deliver(errors.ClientClosedError("this client was closed"), end)
            self.give_up([each.undo for each in list(self.pending_undos) if removed(self.pending_undos, each)])

    async def flush_if_closed(self, error: BaseException) -> None:
        """An operation has ended by this error: if the client is closed, send its pending undos."""
        # Other errors end the loop, or this coroutine
        if isinstance(error, Exception | asyncio.CancelledError) and (ending := self.end_again()) is not None:
            await asyncio.shield(ending)

    def end_again(self) -> asyncio.Task[None] | None:
        """Begin to send the pending undos of a closed client, as nothing else would. Returns the task that does, which
        lives on where its caller is cancelled; None: there are none, or somebody ends the client just now."""
        if not self.closed or not self.pending_undos or self._ending_now() is not None:
            return None
        self._watch_loop()
        self._ending = asyncio.get_running_loop().create_task(self._end_again(), name="fastlock: close")
        return self._ending

    async def _end_again(self) -> None:
        """Send what a closed client has left since. Cancelled, as by `asyncio.run` when its loop ends, that is left to
        `leave_loop`."""
        await self._flush_after_close()
        self._stop_watching_loop()

    async def _deliver(self, ended: Exception, end: float) -> None:
        """Send the pending undos over connections for them alone, once, and again before `end`, until all are
        answered."""
        tries, latest = 0, max(end, now() + CLOSE_SECONDS)
        while self.pending_undos:
            try:
                connecting = self._connect(asyncio.get_running_loop(), last=True)
                timeout = min(CLOSE_SECONDS, max(SHORTEST, latest - now()))
                await self._end_connection(await asyncio.wait_for(connecting, timeout), ended, latest)
            except Exception as error:
                if by_handler(error):
                    raise
                if not isinstance(error, (*CONNECT_ERRORS, TimeoutError)):  # a credential provider's
                    return
            self._undelay()
            tries += 1
            if not self.pending_undos or now() >= end:
                return
            await asyncio.sleep(max(0.0, min(backoff(tries), end - now())))

    async def _end_connection(self, connection: AsyncConnection, error: Exception, end: float) -> None:
        """End a connection, after all that is in flight was answered, or at `end`."""
        try:
            await connection.drain(end)
        finally:
            if self.connection is connection:
                self.connection = self.open_stream = None
            connection.fail(error)
        await asyncio.sleep(0)  # asyncio's transport closes its socket in the next tick

    async def _shut(self, end: float) -> None:
        self.closed, self.open_stream = True, None
        self._renewal_timer.stop()
        self._keep_timer.stop()
        connection, connecting = self.connection, self._connecting
        if connecting is not None:
            connecting.cancel()
        for wakeup in list(self._sleeping):
            wakeup(None)
        self.wake_waiters()
        until = now() + CLOSE_SECONDS
        if self.loop is not None:
            await self._await_operations(until)
        await self._stop_connecting(connecting)
        if connection is not None:
            error = errors.ClientClosedError("this client was closed")
            await self._end_connection(connection, error, max(until, self.drain_end(connection, end)))
        await self._renewal_timer.join(CLOSE_SECONDS)
        self.cancel_shared_timeouts()

    async def _stop_connecting(self, cancelled: asyncio.Task[AsyncConnection] | None = None) -> None:
        """End the task that connects, if it was not cancelled before, and let it close its socket."""
        connecting = cancelled or self._connecting
        if connecting is not None:
            if cancelled is None:
                connecting.cancel()
            await asyncio.wait([connecting], timeout=CLOSE_SECONDS)
            await asyncio.sleep(0)  # as in `_end_connection`

    def wake_waiters(self) -> None:
        """Wake all waiters, to check again whether they are to wait."""
        self.queues.wake_all()

    async def _await_operations(self, until: float) -> None:
        """Wait until tasks have nothing to send any more: waiters have left the server's queues, releases have handed
        over, and tasks that got an answer, or have lost the connection, have run again."""
        self.queues.on_empty = self._no_longer_busy
        while now() < until:
            queued = self.connection is not None and self.connection.error is None and self.queues.by_entry
            if queued or self.operations:
                wakeup = Wakeup().arm(self.wakeups)
                self._closing.append(wakeup)
                timer = asyncio.get_running_loop().call_later(until - now(), wakeup, None)
                try:
                    await wakeup
                finally:
                    timer.cancel()
                    removed(self._closing, wakeup)
            elif self.wakeups.due:
                await asyncio.sleep(0)  # lets the tasks run that are to be woken
            else:
                break

    def _no_longer_busy(self) -> None:
        """End the wait of `close`: nobody waits at the server any more, or an operation has ended."""
        for wakeup in list(self._closing):
            wakeup(None)

    def operation_ended(self) -> None:
        """One of the operations has ended."""
        if self._closing:
            self._no_longer_busy()

    def cancel_shared_timeouts(self) -> None:
        """Leave no timer to the loop, when nobody waits any more."""
        for timeout in self.shared_timeouts.values():
            timeout.cancel()

    async def leave_loop(self) -> None:
        """The loop is about to end: send the pending undos and close the connection, as nothing else would."""
        if (ending := self._ending_now()) is not None:
            await asyncio.wait([ending])
        self._ending = asyncio.current_task()  # a client that is collected meanwhile needs no other
        self._loop_end = None
        self._renewal_timer.stop()
        self._keep_timer.stop()
        ended, until = EOFError("its event loop ends"), now() + CLOSE_SECONDS
        if not self.closed:
            self._delivery_end = self.delivery_end()
        end = self._delivery_end  # else who closed it was cancelled
        self.release_kept(self.queues.recalls_heard(False))
        try:
            await self._flush_undos()
        finally:
            if self.connection is not None and self.connection.error is None:
                await self._end_connection(self.connection, ended, max(until, self.drain_end(self.connection, end)))
        self._undelay()
        await self._stop_connecting()  # of which `_deliver` knows nothing
        if self.closed:
            await self._flush_after_close()
        elif self.ever_connected:  # undos may wait for the next loop, but not a release that was sent
            await self._deliver(ended, end if self.unheard() else 0.0)
            self.warn_of_unheard()
        await self._renewal_timer.join(CLOSE_SECONDS)
        await self._stop_connecting()

    def _watch_loop(self) -> None:
        """Have `leave_loop` called when the running loop is about to end."""
        self._stop_watching_loop()
        self._loop_end = at_end(weakref.ref(self))
        with contextlib.suppress(StopIteration):
            self._loop_end.asend(None).send(None)  # to its `yield`, where it waits for the loop's end

    def _stop_watching_loop(self) -> None:
        """Close the generator that waits for the loop's end."""
        end, self._loop_end = self._loop_end, None
        if end is not None:
            with contextlib.suppress(StopIteration, RuntimeError):  # RuntimeError: it runs already
                end.aclose().send(None)

    def close_collected(self) -> None:
        """The client was collected, in whatever thread: have its loop close the connection."""
        check()
        connection, self.closed, self.open_stream = self.connection, True, None
        undos = self.ever_connected and (self.pending_undos or self.delayed_undos)
        pending: object = self.queues.kept or self.unconfirmed or undos
        if connection is not None and connection.error is None:
            pending = pending or connection.stream.pending  # an undo may be in flight, and have to be sent again
        loop = self.loop if connection is None else connection.loop
        end_unfinished()
        if pending and loop is not None and not loop.is_closed():
            UNFINISHED.add(self)
            try:
                loop.call_soon_threadsafe(self._begin_to_end)
                return
            except RuntimeError:  # the loop was closed
                UNFINISHED.discard(self)
        if loop is None or loop.is_closed():
            self.loop_was_closed()
            return
        self._stop_watching_loop()
        if connection is None or connection.error is not None:
            return
        error = errors.ClientClosedError("nobody holds this client")
        with contextlib.suppress(RuntimeError):  # the loop was closed
            connection.loop.call_soon_threadsafe(connection.fail, error)

    def loop_was_closed(self) -> None:
        """Close the connection, and give up what is pending: nobody closed this client, nor ended its loop in order."""
        self._stop_watching_loop()
        if self.connection is not None:
            self.connection.fail(errors.ClientClosedError("nobody holds this client"))
        self._undelay()
        if self.ever_connected:
            self.give_up([each.undo for each in list(self.pending_undos) if removed(self.pending_undos, each)])

    def _begin_to_end(self) -> None:
        if self.loop is not None and self._ending_now() is None:  # for a caller that was cancelled
            self._delivery_end = self.delivery_end()  # here: the task may be cancelled before it has begun
            self._ending = self.loop.create_task(self._end_collected(), name="fastlock: end")

    async def _end_collected(self) -> None:
        """Deliver what is pending of a client that was collected. Cancelled, as by `asyncio.run` when its loop ends,
        that is left to `leave_loop`."""
        error = errors.ClientClosedError("nobody holds this client")
        until = now() + CLOSE_SECONDS
        self.release_kept(self.queues.recalls_heard(False))
        if (connection := self.connection) is not None:
            await self._end_connection(connection, error, max(until, self.drain_end(connection, self._delivery_end)))
        await self._end_again()
        UNFINISHED.discard(self)


async def at_end(transport: weakref.ref[AsyncClosing]) -> AsyncGenerator[None, None]:
    """Calls `leave_loop` when the loop is about to end. A loop then closes the asynchronous generators that began in
    it, under asyncio.run and all that work alike: there is no other notice while commands can still be sent."""
    try:
        yield
    finally:
        found = transport()
        if found is not None and found._loop_end is not None:
            await found.leave_loop()
            UNFINISHED.discard(found)


UNFINISHED: set[AsyncClosing] = set()  # that were collected, while something was pending


def end_unfinished() -> None:
    """Close the connections of clients that were collected, whose loop was closed before it could do that."""
    for transport in list(UNFINISHED):
        if transport.loop is None or transport.loop.is_closed():
            UNFINISHED.discard(transport)
            transport.loop_was_closed()


TRANSPORTS: weakref.WeakSet[AsyncClosing] = weakref.WeakSet()


def _close_leftovers() -> None:
    """As the interpreter ends, close the connections whose loop was closed: nothing else closes them."""
    check()
    end_unfinished()
    for transport in list(TRANSPORTS):
        if transport.connection is not None and transport.connection.loop.is_closed():
            transport.close_collected()


atexit.register(_close_leftovers)
