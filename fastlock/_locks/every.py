"""`client.every` for threads: a job that one of the fleet runs in each period. `aio_every.py` is the same for asyncio,
and shares what stands here first.

Never here: how a period is claimed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypedDict

from fastlock._errors import ClientClosedError, LockError
from fastlock._locks.background import Background
from fastlock._locks.once import refuse_async, refuse_coroutine
from fastlock._protocol import periods
from fastlock._protocol.arguments import Name, as_ms, as_name
from fastlock._protocol.lease import Lease, new_token, now
from fastlock._protocol.losses import LOG, abbreviated, shown
from fastlock._protocol.periods import Claim
from fastlock._protocol.renewal import check_timeout
from fastlock._protocol.steps import Steps, backoff

if TYPE_CHECKING:
    from fastlock._locks.client import Client

SHORTEST_LEASE, LONGEST_LEASE = 1.0, 30.0  # seconds of the lock while the job runs, which is renewed; between: a period


class JobOptions(TypedDict, total=False):
    """The keyword arguments of `every`, for type checkers."""

    timeout: float | None
    at_once: bool
    start: bool


def check_schedule(name: Name, seconds: float, timeout: float | None) -> tuple[bytes, int, float]:
    """The key of a job, its period in milliseconds and the seconds of its lease. ValueError or TypeError: they make no
    sense."""
    key, period = as_name(name), as_ms(seconds, "seconds")
    if timeout is None:
        return key, period, min(max(float(seconds), SHORTEST_LEASE), LONGEST_LEASE)
    check_timeout(timeout)
    return key, period, timeout


class Schedule:
    """What a job knows in threads as in asyncio: its settings, and what it ran."""

    _client: Any
    _transport: Any
    _name: Any
    _lock: Any = None  # of the run that is under way
    _lease: Lease | None = None

    def _set_up(self, seconds: float, function: Callable[..., Any], timeout: float | None, at_once: bool) -> None:
        self._key, self._period, self._timeout = check_schedule(self._name, seconds, timeout)
        self._first = 0 if at_once else -1  # no period that began before is run; -1: to be asked
        self._function = function
        self._runs = 0
        self._last_error: BaseException | None = None
        functools.update_wrapper(self, function, updated=())

    @property
    def name(self) -> Any:
        """The name of the lock under which the job runs."""
        return self._name

    @property
    def runs(self) -> int:
        """How often this process has run the job, also where the function raised."""
        return self._runs

    @property
    def last_error(self) -> BaseException | None:
        """What the last run in this process raised, or what the server answered since; None: all went well."""
        return self._last_error

    @property
    def lease(self) -> Lease | None:
        """The lease of the run that is under way in this process, with a `fence`; None: none is."""
        return self._lease

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Call the function now, without a lock: a decorated function stays what it was."""
        return self._function(*args, **kwargs)

    def _claim(self) -> Steps[Claim]:
        if self._first < 0:
            self._first = yield from periods.end_of_period(self._period, now)
        ms, token = as_ms(self._timeout), new_token()
        claim = yield from periods.claim(self._name, self._key, token, ms, self._period, self._first, now)
        if claim.lease is not None:
            self._lock = self._client.lock(self._name, self._timeout, thread_local=False, fence=True, auto_renew=True)
            self._lock._keep_lease(None, claim.lease)
            self._lease = claim.lease
            self._transport.stats.acquires += 1
        return claim

    def _lapsed(self, claim: Claim) -> bool:
        """Whether the process was stopped for so long since the claim that another one may be running the job."""
        return claim.lease is None or not claim.lease.valid

    def _after_run(self, claim: Claim) -> Steps[float]:
        """When the next period begins. One that began during the run is skipped."""
        lease = self._lease
        if now() < claim.time or lease is None or not lease.valid:
            return claim.time
        return (yield from periods.skip(lease, self._period, now))

    def _failed(self, error: Exception, failures: int) -> float:
        """Note an error of the server. Returns the seconds to wait before the next try."""
        self._last_error = error
        if failures == 1:
            LOG.warning("the job %s goes on when the server is back: %s", abbreviated(self._name), shown(error))
        return backoff(failures)

    def _run_failed(self, error: BaseException) -> None:
        self._last_error = error
        LOG.error("the job %s failed", abbreviated(self._name), exc_info=error)

    def _release_failed(self, error: Exception) -> None:
        if not isinstance(error, LockError):  # a loss was logged where it was found
            LOG.warning("the lock of job %s ends by itself: %s", abbreviated(self._name), shown(error))


class Job(Schedule, Background):
    """A function that one of the fleet runs in each period, made by `Client.every()`: a thread of each process asks the
    server whether it is to run it."""

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
        self._set_up(seconds, refuse_async(function), timeout, at_once)

    def _work(self) -> None:
        failures, seconds = 0, 0.0
        while True:
            if seconds > 0:
                self._sleep(seconds)
            if self._stopping:
                return
            try:
                claim = self._transport.drive(self._claim())
                failures = 0
                time = claim.time if claim.lease is None else self._run_claimed(claim)
                seconds = periods.wait_before(time, now())
            except ClientClosedError:
                return
            except Exception as error:
                failures += 1
                seconds = self._failed(error, failures)

    def _run_claimed(self, claim: Claim) -> float:
        """Run the function. Returns when to ask again, by this process's clock."""
        try:
            if self._lapsed(claim):
                return claim.time
            try:
                refuse_coroutine(self._function())
                self._last_error = None
            except BaseException as error:
                self._run_failed(error)
            self._runs += 1
            time: float = self._transport.drive(self._after_run(claim))
            return time
        finally:
            lock, self._lock, self._lease = self._lock, None, None  # the next one may run before the answer
            try:
                lock.release()
            except Exception as error:
                self._release_failed(error)
