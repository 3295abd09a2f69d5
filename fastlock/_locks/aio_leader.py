"""`client.leader` for asyncio: an election. `leader.py` is the same for threads.

Never here: how a lock is acquired, renewed or released.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from fastlock._errors import ClientClosedError
from fastlock._locks.aio_background import Background
from fastlock._locks.background import LONGEST_SLEEP
from fastlock._locks.decorator import answered, is_cancelled
from fastlock._locks.leader import PAUSE, Callback, Candidacy
from fastlock._protocol.arguments import Name, as_wait
from fastlock._protocol.lease import Lease, now
from fastlock._protocol.losses import LOG, abbreviated

if TYPE_CHECKING:
    from fastlock._locks.aio_client import Client


class Election(Candidacy, Background):
    """One candidate of an election, made by `fastlock.asyncio.Client.leader()`: a task competes for the lock of that
    name, holds it by renewal while it leads, and competes again when it has lost it."""

    _told = False  # whether `on_gain` was begun: it may be cancelled before that, and then there is no loss to tell

    def __init__(
        self, client: Client, name: Name, timeout: float, on_gain: Callback | None, on_loss: Callback | None
    ) -> None:
        Background.__init__(self, client, name)
        self._set_up(timeout, on_gain, on_loss)

    async def wait(self, timeout: float | None = None) -> bool:
        """Wait until this one leads, the election is stopped, or `timeout` seconds have passed. Returns whether it
        leads."""
        until = now() + (LONGEST_SLEEP if timeout is None else as_wait(timeout, "timeout"))
        while not self.is_leader and self.running and not self._within() and (left := until - now()) > 0:
            await self._change(left)
        return self.is_leader

    async def resign(self) -> None:
        """Lead no longer: `is_leader` is false from now on, and when `on_loss` has returned, the next candidate leads.
        This one competes again, behind all others. Does nothing where it does not lead."""
        if self._lease is not None:
            self._resigning = True
            self._tell()

    def _signal(self) -> None:
        super()._signal()
        self._interrupt()

    async def _work(self) -> None:
        failures = 0
        while not self._stopping:
            try:
                op = self._new_acquire(lambda _: self._tell())
                try:
                    lease = await self._transport.run(op)
                finally:
                    self._op = None
                failures = 0
            except ClientClosedError:
                return
            except Exception as error:
                if not self._stopping:
                    failures += 1
                    await self._sleep(self._failed(error, failures))
                continue
            if lease is not None:
                await self._lead(lease)

    async def _lead(self, lease: Lease) -> None:
        """Lead, until the lease is lost, or this one resigns or is stopped. `on_gain` runs beside, and is cancelled
        then."""
        self._lease, self._resigning = lease, False
        self._last_error, self._told = None, False
        self._tell()
        body = self._inner = asyncio.get_running_loop().create_task(self._call_on_gain(lease))
        body.add_done_callback(lambda _: self._tell())
        try:
            while self.is_leader and _can_lead(body):
                await self._change(min(lease._renewal.lost_from() - now(), LONGEST_SLEEP))
        finally:
            self._lease, self._resigning = None, False
            cancelled = await self._end(body)
            try:
                if self._told:
                    await self._call_on_loss(lease)
            finally:
                await self._release()
            if cancelled is not None:
                raise cancelled
        if not _can_lead(body):
            await self._pause(now() + PAUSE)

    async def _end(self, body: asyncio.Task[bool]) -> asyncio.CancelledError | None:
        """Cancel what `on_gain` still does, and wait for its end. Returns the error of who cancels this meanwhile, as
        the client is closed: `on_loss` is called all the same."""
        cancelled = None
        body.cancel()
        while not body.done():
            try:
                await asyncio.wait([body])
            except asyncio.CancelledError as error:
                cancelled = error
        return cancelled

    async def _call_on_gain(self, lease: Lease) -> bool:
        """Whether the leader can lead."""
        self._told = True
        try:
            if self._on_gain is not None:
                await answered(self._on_gain(lease))
        except asyncio.CancelledError as error:
            if is_cancelled():
                raise
            self._not_led(error)
            return False
        except Exception as error:
            self._not_led(error)
            return False
        return True

    async def _call_on_loss(self, lease: Lease) -> None:
        try:
            if self._on_loss is not None:
                await answered(self._on_loss(lease))
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            LOG.exception("on_loss of election %s failed", abbreviated(self._name))
        except Exception:
            LOG.exception("on_loss of election %s failed", abbreviated(self._name))

    async def _release(self) -> None:
        lock, self._lock = self._lock, None
        try:
            await lock.release()
        except Exception as error:
            self._log_release(error)

    async def _pause(self, until: float) -> None:
        while not self._stopping and (left := until - now()) > 0:
            await self._sleep(left)


def _can_lead(body: asyncio.Task[bool]) -> bool:
    """Whether `on_gain` did not fail."""
    return not body.done() or body.cancelled() or body.result()
