"""Who renews leases, and how their holders learn that one is lost: in threads by a thread of the client, in asyncio by
a timer of its loop.

Never here: which lease is due, what a reply means.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from types import CodeType
from typing import TYPE_CHECKING, Any, TypeVar

from fastlock import _native as native
from fastlock._protocol.arguments import as_wait
from fastlock._protocol.lease import Lease, now
from fastlock._protocol.losses import LOG, abbreviated
from fastlock._protocol.renewal import SHORTEST_RETRY, Renewal, Renewals
from fastlock._stream_errors import by_handler

if TYPE_CHECKING:
    from _thread import LockType

    from fastlock._transport.aio import AsyncTransport
    from fastlock._transport.sync import SyncTransport

F = TypeVar("F", bound=Any)
LATE = 1.0  # seconds after which a timer that should have run is not relied on any more
PAUSE = 1.0  # seconds after an error at most
LONGEST_SLEEP = 1e6  # seconds: the system's functions take no infinite ones


class SyncLost:
    """The event `lease.lost` of a lease that is renewed, for threads."""

    def __init__(self, renewal: Renewal) -> None:
        self._renewal = renewal
        self._changes = native.Changes()

    def is_set(self) -> bool:
        """Whether the lease was lost."""
        return self._renewal.is_lost()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the lease is lost or released, or `timeout` seconds have passed. Returns whether it was lost."""
        until = math.inf if timeout is None else now() + as_wait(timeout, "timeout")
        native.refuse_greenlet("the lease is held")
        while True:
            wake = self._changes.expect()
            seconds = min(self._renewal.lost_from(), until) - now()
            self._changes.wait(wake, min(seconds, LONGEST_SLEEP))
            if seconds <= 0:
                return self._renewal.is_lost()

    def wake(self) -> None:
        """Wake who waits: the lease is lost, or was released."""
        self._changes.tell()


class AsyncLost:
    """The event `lease.lost` of a lease that is renewed, for asyncio."""

    def __init__(self, renewal: Renewal) -> None:
        self._renewal = renewal
        self._waiting: set[asyncio.Future[None]] = set()

    def is_set(self) -> bool:
        """Whether the lease was lost."""
        return self._renewal.is_lost()

    async def wait(self, timeout: float | None = None) -> bool:
        """Wait until the lease is lost or released, or `timeout` seconds have passed. Returns whether it was lost."""
        until = math.inf if timeout is None else now() + as_wait(timeout, "timeout")
        while True:
            seconds = min(self._renewal.lost_from(), until) - now()
            if seconds <= 0:
                return self._renewal.is_lost()
            future = asyncio.get_running_loop().create_future()
            self._waiting.add(future)
            try:
                await asyncio.wait([future], timeout=min(seconds, LONGEST_SLEEP))
            finally:
                self._waiting.discard(future)

    def wake(self) -> None:
        """Wake who waits: the lease is lost, or was released."""
        for future in list(self._waiting):
            if not future.done() and not future.get_loop().is_closed():
                future.set_result(None)


def call_on_lost(renewal: Renewal) -> Any:
    """Call what the lock's user wants to be called when a lease is lost. Returns what that returns, or None; an error
    is logged, as there is nobody to raise it for, also that of sys.exit(), and of a task that was cancelled."""
    lease, on_lost = renewal.lease(), renewal.settings.on_lost
    return None if lease is None or on_lost is None else call_safely(on_lost, lease)


def call_safely(on_lost: Callable[[Lease], object], lease: Lease) -> Any:
    """Call a user's function as `call_on_lost` does."""
    try:
        return on_lost(lease)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) or by_handler(error):
            raise
        LOG.exception("on_lost of lock %s failed", abbreviated(lease.name))
        return None


async def await_on_lost(pending: Awaitable[object], name: object) -> None:
    """Await what `on_lost` returned, if that is a coroutine function's; an error is logged."""
    try:
        await pending
    except Exception as error:
        if by_handler(error):
            raise
        LOG.exception("on_lost of lock %s failed", abbreviated(name))


def never() -> bool:
    """Says of an owner that may be anybody that it has not ended."""
    return False


_ACQUIRES: set[CodeType] = set()


def acquires(function: F) -> F:
    """Decorator of a coroutine function that acquires a lock, in which a task may do nothing else."""
    _ACQUIRES.add(function.__code__)
    return function


def task_ends(owner: object) -> Callable[[], bool]:
    """A function that says whether a task has ended (None: it may be any). A task that does nothing but acquire, as
    `wait_for` makes one until Python 3.12, is not the one that holds the lease."""
    if not isinstance(owner, asyncio.Task) or getattr(owner.get_coro(), "cr_code", None) in _ACQUIRES:
        return never
    return owner.done


def _wake(sleep: LockType) -> None:
    try:
        sleep.release()
    except RuntimeError as error:  # it was woken before
        if by_handler(error):
            raise


def after_error(renewals: Renewals) -> float:
    """When to go on after an error that nobody expected, such as a credential provider's: in time to tell who loses a
    lease, and not again and again at once."""
    next_time = now() if renewals.added else renewals.wake_time()
    return max(min(next_time, now() + PAUSE), now() + SHORTEST_RETRY)


class RenewalThread:
    """The thread that renews the leases of one client for threads; started when the first is to be renewed. It ends
    with the client. It keeps no client alive."""

    def __init__(self, transport: SyncTransport) -> None:
        self._mutex = native.RLock()
        self._started = False
        self._runs = native.allocate_lock()  # held by the thread
        self._sleep = sleep = native.allocate_lock()  # held while there is nothing to do
        sleep.acquire()
        # No name of this module: it may be cleared by then, as the interpreter ends
        self._transport = weakref.ref(transport, lambda _: sleep.locked() and sleep.release())
        self.wake_time = -math.inf  # until when it sleeps; -inf: it does not sleep, or is about to look again

    def ensure(self, time: float) -> None:
        """See to it that the thread runs, and looks by then for leases to renew."""
        if not self._started:
            with self._mutex:
                if not self._started:
                    native.start_new_thread(self._run, ())
                    self._started = True
        if time < self.wake_time:
            self.wake()

    def wake(self) -> None:
        """Have the thread look for what is to be done."""
        _wake(self._sleep)

    def _run(self) -> None:
        if not self._runs.acquire(blocking=False):
            return  # a signal handler raised as the first was started, before that was noted
        while (transport := self._transport()) is not None and not transport.closed:
            try:
                transport.renew_due()
                self.wake_time = transport.renewals.wake_time()
                if transport.renewals.added:  # since `renew_due` looked; later ones wake this thread
                    self.wake_time = -math.inf
                    continue
            except BaseException:  # whatever it is, it must not end all renewals
                LOG.exception("leases could not be renewed; trying again")
                self.wake_time = now() + PAUSE  # leases that are added from now on wake this thread
                self.wake_time = after_error(transport.renewals)
            del transport
            self._sleep.acquire(timeout=max(0.0, min(self.wake_time - now(), LONGEST_SLEEP)))
            self.wake_time = -math.inf


class RenewalTimer:
    """The timer that renews the leases of one client for asyncio. It keeps no client alive."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = weakref.ref(transport)
        self._timer: asyncio.TimerHandle | None = None
        self._time = math.inf  # when it ends
        # Tasks that renew now, each with what it renews, or that run what a user's `on_lost` returned
        self._tasks: dict[asyncio.Task[None], list[Renewal]] = {}

    def ensure(self, time: float) -> None:
        """See to it that leases to renew are looked for by then."""
        transport = self._transport()
        if transport is None or transport.loop is None or transport.closed:
            return
        # A timer that has ended, and is about to run, is left alone: else each tick could set another one in its place
        if max(time, now()) < self._time:
            self._schedule(transport.loop, time)
        elif self._time < now() - LATE:  # perhaps a signal handler raised as `_run` began
            transport.loop.call_soon(self._run)
            self._time = now()

    def _schedule(self, loop: asyncio.AbstractEventLoop, time: float) -> None:
        timer = loop.call_later(max(0.0, min(time - now(), LONGEST_SLEEP)), self._run)
        self.stop()  # not before: an interrupt leaves one timer too many, and never none
        self._timer, self._time = timer, time

    def stop(self) -> None:
        """Renew nothing more, until `ensure`."""
        timer, self._timer, self._time = self._timer, None, math.inf
        if timer is not None:
            timer.cancel()

    async def join(self, seconds: float) -> None:
        """Wait until what was begun has ended, for so many seconds at most."""
        if tasks := self._tasks.keys() - {asyncio.current_task()}:
            await asyncio.wait(tasks, timeout=seconds)

    def restart(self, loop: asyncio.AbstractEventLoop) -> None:
        """Go on with the leases that are held, in another loop, to which the client is bound next."""
        if (transport := self._transport()) is not None and (transport.renewals.heap or transport.renewals.added):
            self._schedule(loop, now())

    def forget_loop(self) -> None:
        """The loop was closed: what was being renewed there is to be renewed again."""
        self.stop()
        transport = self._transport()
        for task, due in list(self._tasks.items()):
            if due and (steps := task.get_coro()) is not None:
                steps.close()  # notes what it has sent
            if transport is not None:
                transport.renewals.ended(due, now())  # also if it had not begun
        self._tasks.clear()

    def _run(self) -> None:
        try:
            self.stop()  # also a timer that is one too many
            self._renew_due()
            self._ensure_next()
        except BaseException:  # a signal handler's, also in `on_lost`
            try:
                self._go_on()
            except BaseException:  # in that
                self._go_on()
                raise
            raise

    def _renew_due(self) -> None:
        transport = self._transport()
        if transport is None or transport.loop is None or transport.closed:
            return
        renewals = transport.renewals
        if due := renewals.take_due(time := now()):
            try:
                until = renewals.attempt_end(time, due)
                self._start(transport.loop, transport.drive(renewals.renew(due, until, now)), due)
            except BaseException:  # a signal handler's
                renewals.ended(due, now())
                raise

    def _go_on(self) -> None:
        self.stop()
        if (transport := self._transport()) is not None:
            self.ensure(after_error(transport.renewals))

    def _ensure_next(self) -> None:
        if (transport := self._transport()) is not None:
            renewals = transport.renewals
            self.ensure(now() if renewals.added else renewals.wake_time())

    def _start(
        self, loop: asyncio.AbstractEventLoop, steps: Coroutine[Any, Any, None], due: list[Renewal] | None = None
    ) -> None:
        task = loop.create_task(steps, name="fastlock: renew")
        self._tasks[task] = due or []
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        try:
            self._note_done(task)
        except BaseException:  # a signal handler's
            self._note_done(task)
            raise

    def _note_done(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if (transport := self._transport()) is not None:
            renewals = transport.renewals
            renewals.ended(self._tasks.get(task, []), now())  # where it was cancelled before it had begun
            if error is None and not task.cancelled():
                self._ensure_next()
            else:
                self.ensure(after_error(renewals))
        self._tasks.pop(task, None)
        if error is not None:
            LOG.error("leases could not be renewed; trying again", exc_info=error)

    def tell_lost(self, renewal: Renewal) -> None:
        """Tell the holder of a lease that it is lost."""
        if renewal.body is not None:
            renewal.body.cancel()
        if (lease := renewal.lease()) is not None and renewal.settings.on_lost is not None:
            self.call(renewal.settings.on_lost, lease)

    def call(self, on_lost: Callable[[Lease], object], lease: Lease) -> None:
        """Call a user's function, and await what it returns, if that is a coroutine function's."""
        returned, transport = call_safely(on_lost, lease), self._transport()
        loop = None if transport is None else transport.loop
        if inspect.isawaitable(returned) and loop is not None and not loop.is_closed():
            self._start(loop, await_on_lost(returned, lease.name))


class Body:
    """The body of an `async with` whose task is cancelled if the lease is lost, as `asyncio.timeout` does it."""

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self._task = task
        self._cancelling = task.cancelling()
        self._cancelled = False

    def cancel(self) -> None:
        """The lease is lost: cancel the body."""
        self._cancelled = True
        if not self._task.get_loop().is_closed():
            self._task.cancel()

    async def was_cancelled(self, error: BaseException | None) -> bool:
        """Whether the body ended by `error`, or without, because the lease was lost. Raises CancelledError: it was
        cancelled by others as well."""
        if not self._cancelled:
            return False
        arrived = isinstance(error, asyncio.CancelledError)
        if error is None:  # the cancellation comes where the task waits next
            try:
                await asyncio.sleep(0)
            except asyncio.CancelledError:
                arrived = True
        others = self._task.uncancel() > self._cancelling
        if others and arrived and error is None:
            raise asyncio.CancelledError
        return not others and arrived
