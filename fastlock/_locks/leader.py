"""`client.leader` for threads: an election. `aio_leader.py` is the same for asyncio, and shares what stands here first.

Never here: how a lock is acquired, renewed or released.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fastlock import _native as native
from fastlock._errors import ClientClosedError, LockError
from fastlock._locks.background import LONGEST_SLEEP, Background
from fastlock._locks.once import refuse_async
from fastlock._protocol.arguments import Name, as_name, as_wait
from fastlock._protocol.base_lock import LockAcquire
from fastlock._protocol.lease import Lease, now
from fastlock._protocol.losses import LOG, abbreviated, shown
from fastlock._protocol.renewal import check_timeout
from fastlock._protocol.steps import backoff

if TYPE_CHECKING:
    from fastlock._locks.client import Client

LEASE_SECONDS = 15  # of the leader: so long there is none after it died. Kubernetes' clients have the same
PAUSE = 1.0  # seconds before who could not lead competes again: others should get the chance

Callback = Callable[[Lease], object]


class Candidacy:
    """What an election knows in threads as in asyncio: its settings, and whether it leads."""

    _client: Any
    _name: Any
    _stopping: bool
    _lock: Any = None  # by which it leads, or competes
    _op: LockAcquire | None = None  # the acquire by which it competes now
    _lease: Lease | None = None  # while it leads
    _resigning = False

    def _set_up(self, timeout: float, on_gain: Callback | None, on_loss: Callback | None) -> None:
        as_name(self._name)
        check_timeout(timeout)
        for what, function in (("on_gain", on_gain), ("on_loss", on_loss)):
            if function is not None and not callable(function):
                raise TypeError(f"{what} must be a function of the lease, not {type(function).__name__}")
        self._timeout = timeout
        self._on_gain = on_gain
        self._on_loss = on_loss
        self._last_error: BaseException | None = None

    @property
    def name(self) -> Any:
        """The name of the lock whose holder is the leader."""
        return self._name

    @property
    def lease(self) -> Lease | None:
        """The lease by which this one leads, with a `fence`; None: it does not lead."""
        return self._lease if self.is_leader else None

    @property
    def is_leader(self) -> bool:
        """Whether this one leads. No I/O: false from when its lease may have been lost, by this process's clock."""
        lease = self._lease
        if lease is None or self._resigning or self._stopping:
            return False
        return lease.valid and not lease.lost.is_set()

    @property
    def last_error(self) -> BaseException | None:
        """The last error by which it could not compete or lead; None since it has led after that."""
        return self._last_error

    def _new_acquire(self, on_lost: Callback) -> LockAcquire:
        """The acquire by which it competes: in the queue, behind the other candidates."""
        self._lock = lock = self._client.lock(
            self._name,
            self._timeout,
            thread_local=False,
            fence=True,
            fair=self._client._queue,
            auto_renew=True,
            on_lost=on_lost,
        )
        self._op = op = lock._new_acquire(None, False)
        if self._stopping:  # it was set before there was an acquire to interrupt
            op.until = now()
        return op  # type: ignore[no-any-return]  # of a compiled module

    def _interrupt(self) -> None:
        """Have it compete no longer."""
        if (op := self._op) is not None:
            op.until = now()
            self._client._transport.wake_waiters()

    def _failed(self, error: Exception, failures: int) -> float:
        """Note an error of the server. Returns the seconds to wait before the next try."""
        self._last_error = error
        if failures == 1:
            LOG.warning("the election %s goes on when the server is back: %s", abbreviated(self._name), shown(error))
        return backoff(failures)

    def _not_led(self, error: BaseException) -> None:
        LOG.error("on_gain of election %s failed: it resigns", abbreviated(self._name), exc_info=error)
        self._last_error = error

    def _log_release(self, error: Exception) -> None:
        if not isinstance(error, LockError):  # a loss was logged where it was found
            LOG.warning("the leader of %s could not resign, its lease ends by itself: %s", self._name, shown(error))


class Election(Candidacy, Background):
    """One candidate of an election, made by `Client.leader()`: a thread competes for the lock of that name, holds it by
    renewal while it leads, and competes again when it has lost it."""

    def __init__(
        self, client: Client, name: Name, timeout: float, on_gain: Callback | None, on_loss: Callback | None
    ) -> None:
        Background.__init__(self, client, name)
        self._set_up(timeout, on_gain, on_loss)
        for function in (on_gain, on_loss):
            if function is not None:
                refuse_async(function)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until this one leads, the election is stopped, or `timeout` seconds have passed. Returns whether it
        leads."""
        until = now() + (LONGEST_SLEEP if timeout is None else as_wait(timeout, "timeout"))
        if self._thread == threading.get_ident():
            return self.is_leader
        native.refuse_greenlet("another one leads")
        while True:
            changes = self._changes
            wake = changes.expect()
            left = until - now()
            over = self.is_leader or left <= 0 or not self.running
            changes.wait(wake, 0.0 if over else min(left, LONGEST_SLEEP))
            if over:
                return self.is_leader

    def resign(self) -> None:
        """Lead no longer: `is_leader` is false from now on, and when `on_loss` has returned, the next candidate leads.
        This one competes again, behind all others. Does nothing where it does not lead."""
        if self._lease is not None:
            self._resigning = True
            self._changes.tell()

    def _signal(self) -> None:
        super()._signal()
        self._interrupt()

    def _work(self) -> None:
        failures = 0
        while not self._stopping:
            try:
                op = self._new_acquire(lambda _: self._changes.tell())
                try:
                    lease = self._transport.run(op)
                finally:
                    self._op = None
                failures = 0
            except ClientClosedError:
                return
            except Exception as error:
                if not self._stopping:
                    failures += 1
                    self._sleep(self._failed(error, failures))
                continue
            if lease is not None:
                self._lead(lease)

    def _lead(self, lease: Lease) -> None:
        """Lead, until the lease is lost, or this one resigns or is stopped."""
        self._lease, self._resigning = lease, False
        self._changes.tell()
        try:
            leads = self._call_on_gain(lease)
            while leads and self.is_leader:
                wake = self._changes.expect()
                over = not self.is_leader
                self._changes.wait(wake, 0.0 if over else min(lease._renewal.lost_from() - now(), LONGEST_SLEEP))
        finally:
            self._lease, self._resigning = None, False
            try:
                self._call_on_loss(lease)
            finally:
                self._release()
        if not leads:
            self._pause(now() + PAUSE)

    def _call_on_gain(self, lease: Lease) -> bool:
        """Whether the leader can lead."""
        try:
            if self._on_gain is not None:
                self._on_gain(lease)
        except BaseException as error:
            self._not_led(error)
            return False
        self._last_error = None
        return True

    def _call_on_loss(self, lease: Lease) -> None:
        try:
            if self._on_loss is not None:
                self._on_loss(lease)
        except BaseException:
            LOG.exception("on_loss of election %s failed", abbreviated(self._name))

    def _release(self) -> None:
        lock, self._lock = self._lock, None
        try:
            lock.release()
        except Exception as error:
            self._log_release(error)

    def _pause(self, until: float) -> None:
        while not self._stopping and (left := until - now()) > 0:
            self._sleep(left)
