"""`client.every` for asyncio: a job that one of the fleet runs in each period. `every.py` is the same for threads.

Never here: how a period is claimed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fastlock._errors import ClientClosedError
from fastlock._locks.aio_background import Background
from fastlock._locks.decorator import answered, is_cancelled
from fastlock._locks.every import Schedule
from fastlock._locks.once import function_of
from fastlock._protocol import periods
from fastlock._protocol.arguments import Name
from fastlock._protocol.lease import now
from fastlock._protocol.periods import Claim

if TYPE_CHECKING:
    from fastlock._locks.aio_client import Client


class Job(Schedule, Background):
    """A function that one of the fleet runs in each period, made by `fastlock.asyncio.Client.every()`: a task of each
    process asks the server whether it is to run it."""

    def __init__(
        self,
        client: Client,
        name: Name,
        seconds: float,
        function: Callable[..., Any],
        timeout: float | None,
        at_once: bool,
    ) -> None:
        Background.__init__(self, client, name)
        self._set_up(seconds, function_of(function), timeout, at_once)

    async def _work(self) -> None:
        failures, seconds = 0, 0.0
        while True:
            if seconds > 0:
                await self._sleep(seconds)
            if self._stopping:
                return
            try:
                claim = await self._transport.drive(self._claim())
                failures = 0
                time = claim.time if claim.lease is None else await self._run_claimed(claim)
                seconds = periods.wait_before(time, now())
            except ClientClosedError:
                return
            except Exception as error:
                failures += 1
                seconds = self._failed(error, failures)

    async def _run_claimed(self, claim: Claim) -> float:
        """Run the function. Returns when to ask again, by this process's clock."""
        try:
            if self._lapsed(claim):
                return claim.time
            try:
                await answered(self._function())
                self._last_error = None
            except asyncio.CancelledError as error:
                if is_cancelled():
                    raise
                self._run_failed(error)  # the function's own, as of a task that it awaits
            except Exception as error:
                self._run_failed(error)
            self._runs += 1
            time: float = await self._transport.drive(self._after_run(claim))
            return time
        finally:
            lock, self._lock, self._lease = self._lock, None, None  # the next one may run before the answer
            try:
                await lock.release()
            except Exception as error:
                self._release_failed(error)
