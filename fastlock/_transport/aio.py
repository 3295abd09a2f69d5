"""The transport for asyncio: one connection to one server, shared by the tasks of an event loop, and how they wait.

Never here: decisions about locks, the content of frames.
"""

from __future__ import annotations

import asyncio
import math
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, TypeVar

from fastlock import _errors as errors
from fastlock._fork import at_fork, check
from fastlock._protocol import handshake
from fastlock._protocol.acquire import queue_of
from fastlock._protocol.base_lock import BaseLock, LockRelease
from fastlock._protocol.batch_operations import InterruptedRelease
from fastlock._protocol.lease import Lease, now
from fastlock._protocol.local_queue import RECHECK_SECONDS, LocalQueues
from fastlock._protocol.release import HandOver, PlainRelease
from fastlock._protocol.renewal import Renewal, Renewals
from fastlock._protocol.stats import Stats
from fastlock._protocol.steps import (
    Answer,
    ConnectionLost,
    Driver,
    GetSession,
    Operation,
    Performed,
    Request,
    Sleep,
    Steps,
    Wait,
    backoff,
)
from fastlock._protocol.undo import SETTLE_TRIES
from fastlock._protocol.waiters import Waiter
from fastlock._stream_errors import Broken, NoReply, broken, by_handler
from fastlock._transport.aio_closing import TRANSPORTS, UNFINISHED, AsyncClosing, end_unfinished
from fastlock._transport.aio_connection import AsyncConnection
from fastlock._transport.aio_keeping import AsyncKeeping, KeepTimer
from fastlock._transport.internals import Wakeup, running_loop
from fastlock._transport.renewing import AsyncLost, RenewalTimer, task_ends
from fastlock._transport.settings import Settings
from fastlock._transport.sockets import tune_socket
from fastlock._transport.undo_delivery import UndoDelivery
from fastlock._transport.wakeups import WakeupQueue
from fastlock._transport.writing import CLOSE_SECONDS, CONNECT_ERRORS, LASTING

T = TypeVar("T")


class AsyncTransport(AsyncClosing, AsyncKeeping):
    """The connection of one client, and how its tasks wait."""

    def __init__(self, settings: Settings, impl: ModuleType) -> None:
        self.settings = settings
        self.endpoint = settings.endpoint
        self.impl = impl
        self.closed = False
        self.warned = False  # whether this client has warned that the server refuses a command
        # Whether there ever was a connection: before the first one an error is a wrong setting, not an outage
        self.ever_connected = False
        self._start()
        TRANSPORTS.add(self)

    def _start(self) -> None:
        self.pending_undos: list[UndoDelivery] = []
        self.unconfirmed, self.resent = {}, {}
        self.delayed_undos: dict[UndoDelivery, asyncio.TimerHandle] = {}  # pending undos, each sent when its timer ends
        self.connection: AsyncConnection | None = None  # the connection, if there is one now
        self.open_stream: Any = None  # its stream, as long as commands may be queued there
        self.loop: asyncio.AbstractEventLoop | None = None  # to which the client belongs, until that is closed
        self.wakeups: Any = None  # the WakeupQueue of that loop
        self._binding = threading.RLock()  # a caller that is interrupted as it enters it can enter it again
        self._loop_end: Any = None  # a generator that the loop closes when it ends: see `at_end`
        self._connecting: asyncio.Task[AsyncConnection] | None = None
        self._sleeping: set[Wakeup] = set()
        self._closing: list[Wakeup] = []  # what each `close` that is under way awaits
        self._broken = False  # whether a connection broke that no new one has replaced yet
        self._failures = 0  # connections in a row that did not come up, or broke at once
        self._connected_at = 0.0  # when the latest one came up, on the loop's clock
        self._reconnects_in: asyncio.AbstractEventLoop | None = None  # the loop whose timer calls `_reconnect_due`
        self.stats = Stats()
        self.renewals = Renewals(self.stats)
        self._renewal_timer = RenewalTimer(self)
        self._keep_timer, self.wants_recalls = KeepTimer(self), False
        self._ending: asyncio.Task[None] | None = None  # that ends a client that was closed or collected
        self._delivery_end = 0.0
        self._new_queues()

    def _new_queues(self) -> None:
        self.queues = LocalQueues(self.impl.Mutex(), self.stats)  # tasks need no mutex; a dummy would be slower
        self.queues.keeper = weakref.ref(self)
        self.queued_keys = self.queues.by_key  # names with a local queue: somebody waits, or a lease circulates
        self.expected_keys = self.queues.expected
        self.operations: set[object] = set()
        self.shared_timeouts: dict[float, Any] = {}  # of the compiled fast path, by seconds; negative: of a local wait
        self.sweep_timer: asyncio.TimerHandle | None = None
        self.turn_end = 0.0

    def begin(self) -> None:
        """Called before anything else is done: all that is kept here belongs to this process and the running loop."""
        check()
        loop = running_loop()
        if loop is not self.loop or loop is None:
            self._bind(loop)

    def _bind(self, loop: asyncio.AbstractEventLoop | None) -> None:
        if loop is None:
            raise RuntimeError(
                "fastlock.asyncio works in asyncio's event loop, and none runs here: under trio use a "
                "fastlock.Client in threads, as by trio.to_thread.run_sync or anyio.to_thread.run_sync"
            )
        with self._binding:
            if self.loop is loop:
                return
            if self.loop is not None:
                if not self.loop.is_closed():
                    raise errors.as_own(
                        RuntimeError(
                            "this fastlock.asyncio.Client belongs to another event loop, which is not closed: make "
                            "one client for each loop, or give all that use this one the same loop (of pytest-asyncio "
                            'loop_scope="session"); code without `async` is better served by fastlock.Client'
                        )
                    )
                self._forget_loop()
            end_unfinished()
            self.wakeups = WakeupQueue(loop)
            self._watch_loop()
            self._renewal_timer.restart(loop)
            self.loop = loop  # last: after an interrupt the next call does all of this again

    def _forget_loop(self) -> None:
        """The loop was closed: drop its waiters and its connection. Leases and pending undos stay."""
        self._stop_watching_loop()
        self._undelay()
        self._keep_timer.stop()
        connection, self.connection, self.open_stream = self.connection, None, None
        if connection is not None:
            connection.fail(EOFError("its event loop has ended"))
        self._renewal_timer.forget_loop()
        self._connecting = None
        self._sleeping.clear()
        self._closing, self._ending = [], None
        self.release_kept(self.queues.recalls_heard(False))
        self.queues.forget_waiters()
        self._new_queues()
        self.loop = None

    async def release(
        self,
        lock: BaseLock,
        owner: object,
        op: LockRelease | None,
        answer: object,
        leaving: bool,
        error: BaseException | None,
    ) -> None:
        """Carry out a release that the fast path hands on. Without `op` it starts anew, for the lease of `owner`, None:
        of the caller; with `op` it goes on from the answer to that."""
        try:
            if op is None:
                self.begin()
                await self.run(lock._new_release(owner))
            else:
                await self.run(op, answer)
        except errors.RedisError as problem:
            if not leaving:
                raise
            lock._report_release_error(error, problem)

    async def run(self, op: Operation[T], answer: object = Answer.NOT_ASKED) -> T:
        """Carry out an operation; returns its outcome, raises its errors. answer: from which to go on, as of
        `Operation.steps`."""
        try:
            self.begin()
            operations = self.operations
            try:
                operations.add(op)
                return await self._run(op, answer)
            finally:
                operations.discard(op)
                self.operation_ended()
        except BaseException as error:  # also raised as `drive` is entered, when the server has granted already
            try:
                self.undo_interrupted(op, error)
            except BaseException as again:
                self.undo_interrupted(op, again)
                raise
            await self.flush_if_closed(error)
            raise

    async def _run(self, op: Operation[T], answer: object) -> T:
        if answer is Answer.NOT_ASKED:
            answer = op.begin(self.queues, now())
        elif (self.unconfirmed or self.resent) and self.met_own_release(op.request, answer):
            answer = Answer.ASK_SERVER
        if answer is Answer.ASK_SERVER:
            if self.posted(op):
                return op.posted()
            answer = await self._execute(op.request)
            if (outcome := op.at_once(answer, now())) is not Answer.UNDECIDED:
                return outcome
        return await self.drive(op.steps(self.queues, now, answer))

    def was_interrupted(self, error: BaseException | None) -> bool:
        """As `Transport.was_interrupted`; but a cancelled task was not, as it leaves its undos where it waits. A task
        that is collected with its loop was: what it waits in may have been collected before it."""
        return not isinstance(error, asyncio.CancelledError) and super().was_interrupted(error)

    def undo_interrupted_batch(self, leases: Iterable[Lease | None], released: list[Any], error: BaseException) -> None:
        """As `Transport.undo_interrupted_batch`; also for a cancelled task, which may still wait for a connection, and
        have sent nothing yet."""
        super().undo_interrupted_batch(leases, released, error)
        if isinstance(error, asyncio.CancelledError):
            for undo in InterruptedRelease(leases, released).abandon(self.queues, now):
                self.undo(undo)

    async def complete(self, steps: Steps[T]) -> T:
        """As `drive`, for steps that `close` lets end."""
        operations = self.operations
        try:
            operations.add(steps)
            return await self.drive(steps)
        finally:
            operations.discard(steps)
            self.operation_ended()

    async def drive(self, steps: Steps[T]) -> T:
        """Carry out the steps of an operation; returns its outcome, raises its errors."""
        self.begin()
        driver, answer = Driver(steps, self.enqueue, self.undo), None
        try:
            while (step := driver.next(answer)) is not None:
                answer = await self._perform(step)
            return driver.outcome
        except BaseException as error:
            driver.fail(error)
            raise

    async def _perform(self, step: Performed) -> Any:
        """Carry out a step; returns its answer."""
        if isinstance(step, Request):
            return await self._execute(step)
        if isinstance(step, Wait):
            return await self._wait(step.waiter, step.until)
        if isinstance(step, Sleep):
            return await self._sleep(step)
        if isinstance(step, GetSession):
            return await self._execute(step)
        return self.protocol_violation(step)

    async def _execute(self, request: Request | GetSession) -> Any:
        if isinstance(request, GetSession) or not (self.closed and request.allowed_after_close):
            answer, meetings = await self._execute_once(request), 0
            while (
                (self.unconfirmed or self.resent)
                and isinstance(request, Request)
                and self.met_own_release(request, answer)
                and (meetings := meetings + 1) <= SETTLE_TRIES
            ):
                answer = await self._execute_once(request)
            return answer
        connection = self.connection
        if connection is not None and connection.error is None:  # `close` ends it after it has answered this
            return await self.answered(request, connection)
        try:
            answer = await self._execute_after_close(request)
        except asyncio.CancelledError:
            self._carry_out(request)
            raise
        self.end_again()  # others may have left undos to that connection
        return answer

    async def _execute_after_close(self, request: Request) -> Any:
        """Send a request of a closed client, over a connection that is opened for it alone."""
        connection = None
        try:
            connection = await self._connect(asyncio.get_running_loop(), last=True)
            return await self.answered(request, connection)
        except CONNECT_ERRORS as error:
            if by_handler(error):
                raise
            return self.not_sent(error)
        finally:
            if connection is not None:
                closed = errors.ClientClosedError("this client was closed")
                await self._end_connection(connection, closed, now() + CLOSE_SECONDS)

    async def _execute_once(self, request: Request | GetSession) -> Any:
        try:
            if self.queues.kept and isinstance(request, Request):
                self.release_kept_for(request.acquires())
            if self.unconfirmed and isinstance(request, Request) and request.settles:
                await self.settle(request)
            connection = await self._connected(request.until)
        except CONNECT_ERRORS as error:
            if by_handler(error):
                raise
            return self.not_sent(error)
        except asyncio.CancelledError:
            self._carry_out(request)
            raise
        return await self.answered(request, connection)

    def _carry_out(self, request: Request | GetSession) -> None:
        """Leave the undo of a release whose caller was cancelled before it was sent: a task that leaves a `with` does
        not release again."""
        if isinstance(request, PlainRelease | HandOver):
            request.sent = request.sent or now()
            self.undo(request.undo())

    async def answered(self, request: Request | GetSession, connection: AsyncConnection) -> Any:
        """The answer to a request over a connection; `ConnectionLost`, if that breaks; or DEADLINE_EXCEEDED."""
        if isinstance(request, GetSession):
            return connection.session
        if connection.error is not None:  # it broke in the tick since it came up
            return ConnectionLost(connection.error, self.settings.reply_timeout, sent=False)
        wakeup = connection.execute(request)
        timer = None
        if request.until is not None:
            timer = connection.loop.call_later(max(0.0, request.until - now()), wakeup, Answer.DEADLINE_EXCEEDED)
        try:
            answer = await wakeup
            if answer is Answer.DEADLINE_EXCEEDED:
                connection.cancel(request, request.sent)
            return answer
        except BaseException:
            try:
                connection.cancel(request, request.sent)
            except BaseException:  # interrupted again
                connection.cancel(request, request.sent)
                raise
            raise
        finally:
            if timer is not None:
                timer.cancel()

    async def _wait(self, waiter: Waiter, until: float | None) -> None:
        """Sleep until the waiter is woken, or it is time for it to recheck, or `until` has come."""
        if self.closed:
            raise errors.ClientClosedError("this client was closed")
        if waiter.woken:
            waiter.woken = False
            return
        at = queue_of(waiter).recheck_time(waiter)
        if until is not None and until < at:
            at = until
        loop = asyncio.get_running_loop()
        waiter.on_wake = wakeup = Wakeup().arm(self.wakeups)
        timer = loop.call_later(max(0.0, at - now()), wakeup, None) if at < math.inf else None
        self.sweep()
        try:
            await wakeup
        finally:
            waiter.on_wake, waiter.woken = None, False
            if timer is not None:
                timer.cancel()
        if self.closed:
            raise errors.ClientClosedError("this client was closed")

    def sweep(self, timer_ended: bool = False) -> None:
        """While anybody waits, check every second (RECHECK_SECONDS) whether a lease that circulates in this client has
        expired. timer_ended: the timer of this check has ended."""
        if self.loop is not None and (timer_ended or self.sweep_timer is None):
            self.sweep_timer = None
            try:
                self._schedule_sweep(self.loop)
            except BaseException:  # a signal handler raised, but the waiters still need the timer
                self._schedule_sweep(self.loop)
                raise
        if timer_ended and self.wakeups is not None:
            self.wakeups.reschedule()
            self.queues.expire(now())

    def _schedule_sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        if self.sweep_timer is None and (self.queued_keys or self.expected_keys) and not self.closed:
            self.sweep_timer = loop.call_later(RECHECK_SECONDS, self.sweep, True)

    async def _sleep(self, step: Sleep) -> None:
        """Sleep; what is not allowed after close wakes when the client is closed."""
        seconds = step.seconds
        if step.allowed_after_close:
            return await asyncio.sleep(seconds)
        if self.closed:
            return
        wakeup = Wakeup().arm(self.wakeups)
        timer = asyncio.get_running_loop().call_later(seconds, wakeup, None)
        self._sleeping.add(wakeup)
        try:
            await wakeup
        finally:
            timer.cancel()
            self._sleeping.discard(wakeup)

    def wake_renewal(self, time: float) -> None:
        self._renewal_timer.ensure(time)

    def new_event(self, renewal: Renewal) -> AsyncLost:
        return AsyncLost(renewal)

    def ends_of(self, owner: object) -> Callable[[], bool]:
        return task_ends(owner)

    def tell_lost(self, renewal: Renewal) -> None:
        self._renewal_timer.tell_lost(renewal)

    def call_apart(self, on_lost: Callable[[Lease], object], lease: Lease) -> None:
        if self.loop is not None:
            self.loop.call_soon(self._renewal_timer.call, on_lost, lease)

    # the connection

    async def _connected(self, until: float | None = None) -> AsyncConnection:
        if self.closed:
            raise errors.ClientClosedError("this client is closed")
        if self.connection is not None and self.connection.error is not None:
            self.connection.fail(self.connection.error)  # where it failed before, that was interrupted
        if self.connection is not None:
            return self.connection
        loop = asyncio.get_running_loop()
        task = self._connect_task(loop)
        try:
            async with asyncio.timeout(None if until is None else max(CLOSE_SECONDS, until - now())) as limit:
                return await asyncio.shield(task)
        except TimeoutError:
            if limit.expired():  # connecting goes on: other tasks may still wait for it
                raise NoReply("no connection came up in time") from None
            raise
        except asyncio.CancelledError:
            if task.cancelled() and self._connecting is None and self.closed:
                raise errors.ClientClosedError("this client was closed") from None
            raise

    def _connect_task(self, loop: asyncio.AbstractEventLoop) -> asyncio.Task[AsyncConnection]:
        if self._connecting is None or self._connecting.done():  # done: `_connect_done` was interrupted
            self._connecting = loop.create_task(self._connect(loop), name="fastlock: connect")
            self._connecting.add_done_callback(self._connect_done)
        return self._connecting

    def _connect_done(self, task: asyncio.Task[AsyncConnection]) -> None:
        if self._connecting is task:
            self._connecting = None
        failed = task.cancelled() or task.exception() is not None  # tasks that wait get the exception, if there are any
        self._failures += failed
        if failed and self.pending_undos:  # they are sent even if the client is never used again
            self._reconnect_later(task.get_loop())

    async def _connect(self, loop: asyncio.AbstractEventLoop, last: bool = False) -> AsyncConnection:
        """Open a connection and greet the server. last: for the last requests and undos of a closed client."""
        settings = self.settings
        credentials = await settings.credentials_async()  # a credential provider's time does not count
        connection = AsyncConnection(self, loop)
        try:
            async with asyncio.timeout(settings.connect_timeout):
                if settings.path is not None:
                    await loop.create_unix_connection(lambda: connection, settings.path)
                else:
                    host, port = settings.host, settings.port
                    await loop.create_connection(
                        lambda: connection, host, port, ssl=settings.tls, server_hostname=host if settings.tls else None
                    )
                    tune_socket(connection.byte_transport.get_extra_info("socket"), settings)
                await connection.do_handshake(settings, credentials)
            if self.closed and not last:
                raise errors.ClientClosedError("this client is closed")
            if self.connection is not None and self.connection.error is None and not last:
                connection.fail(Broken("another was first"))  # its task was not noted, as an interrupt came first
                return self.connection
            self._on_connected(connection)
        except OSError as error:
            connection.fail(error)
            if by_handler(error):
                raise
            raise broken(error) from error
        except BaseException as error:
            connection.fail(error if isinstance(error, Exception) else Broken("connecting was given up"))
            raise
        return connection

    def _on_connected(self, connection: AsyncConnection) -> None:
        self.stats.reconnects += self._broken
        self._broken = False
        if not self.ever_connected:
            self.ever_connected = True
            handshake.warn_of_eviction(connection.session, self.settings.endpoint)
        self.connection, self._connected_at = connection, connection.loop.time()
        self.open_stream = None if self.closed else connection.stream
        self._post_pending_undos(connection)
        if self.wants_recalls and not self.closed:
            connection.hear_recalls()

    def _reconnect_later(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._reconnects_in is not loop:  # else a timer runs already
            self._reconnects_in = loop
            loop.call_later(backoff(self._failures), self._reconnect_due)

    def _reconnect_due(self) -> None:
        self._reconnects_in = None
        self._reconnect()

    def _reconnect(self) -> None:
        """An undo is pending: connect to send it, if no other task does or did."""
        loop = self.loop
        if (
            not self.closed
            and self.connection is None
            and self.ever_connected
            and self._loop_end is not None  # the loop is not about to end
            and loop is not None
            and loop is running_loop()
            and not loop.is_closed()
        ):
            self._connect_task(loop)

    def discard(self, connection: AsyncConnection) -> None:
        """Forget a connection that broke, and connect again if undos are pending."""
        if self.connection is connection:
            self.connection = self.open_stream = None
            self._broken = True
        if connection.session is None:
            return
        loop = connection.loop
        self._failures = 0 if loop.time() - self._connected_at > LASTING else self._failures + 1
        if self.pending_undos and self._failures < 2:
            self._reconnect()
        elif self.pending_undos and not loop.is_closed():  # what is sent there may be what breaks them
            self._reconnect_later(loop)

    def forget_parent(self) -> None:
        """In a forked child: start without the parent's connection, pending undos and loop; nothing is sent on the
        parent's socket."""
        connection = self.connection
        if connection is not None and connection.byte_transport is not None:
            sock = connection.byte_transport.get_extra_info("socket")
            if sock is not None and sock.fileno() >= 0:
                null = os.open(os.devnull, os.O_RDWR)
                os.dup2(null, sock.fileno())  # the descriptor stays in use, until asyncio's transport closes it
                os.close(null)
        self._stop_watching_loop()
        self._start()


def _forget_parent() -> None:
    for transport in list(TRANSPORTS):
        transport.forget_parent()
    UNFINISHED.clear()


at_fork(_forget_parent)
