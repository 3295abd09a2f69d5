"""The client for asyncio; `client.py` is the same for threads. Never here: decisions, frames, replies."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from types import TracebackType
from typing import Any, Literal, NoReturn, ParamSpec, Self, TypeVar, Unpack, overload

from fastlock import _implementation
from fastlock._errors import LockNotAcquiredError
from fastlock._fork import check
from fastlock._locks import once, refill
from fastlock._locks.aio_background import Background, stop_all
from fastlock._locks.aio_every import Job
from fastlock._locks.aio_leader import Election
from fastlock._locks.aio_lock import ClientLock, GuardedLock, GuardedReentrantLock, ReentrantLock
from fastlock._locks.aio_multi import MultiLock
from fastlock._locks.aio_shared import (
    GuardedReadLock,
    GuardedSemaphore,
    GuardedWriteLock,
    ReadLock,
    ReadWriteLock,
    Semaphore,
    WriteLock,
)
from fastlock._locks.copying import Uncopyable
from fastlock._locks.decorator import answered, name_maker, refuse_call, when_busy
from fastlock._locks.every import JobOptions, check_schedule
from fastlock._locks.leader import LEASE_SECONDS as LEADER_SECONDS
from fastlock._locks.leader import Callback
from fastlock._locks.multi import checked_names
from fastlock._locks.once import MAKER_SECONDS, NameOrMaker, OnBusy, OnceOptions
from fastlock._locks.own import own_leases
from fastlock._locks.reentrant import OwnersByName
from fastlock._locks.refill import RefillOptions
from fastlock._locks.shared import as_preference
from fastlock._protocol import arguments, base_lock, batch, handshake, values
from fastlock._protocol.batch_operations import AcquireMany, release_many
from fastlock._protocol.description import Description, describe_names
from fastlock._protocol.lease import Lease, new_token, now
from fastlock._protocol.multi import MultiLease
from fastlock._protocol.renewal import LEASE_SECONDS, settings_for
from fastlock._protocol.retry import get_session
from fastlock._protocol.values import Dumps, Loads
from fastlock._transport.aio import AsyncTransport
from fastlock._transport.settings import client_options, settings_from_options, settings_from_url

P = ParamSpec("P")
R = TypeVar("R")


class Client(Uncopyable):
    """Locks on one Redis or Valkey server, for asyncio.

    One client serves all tasks of one event loop over one connection; make one and keep it. Options are
    redis-py's (`host`, `port`, `db`, `username`, `password`, `credential_provider`, `unix_socket_path`, `client_name`,
    `ssl` and `ssl_*`, `socket_keepalive`), and, in seconds, `connect_timeout` and `reply_timeout` (5 each; also as
    `socket_connect_timeout` and `socket_timeout`). The first connection is opened by the first call that needs one.
    queue, confirm_release: whether its locks wait in the queue, and their releases for the server, unless they set it;
    see `lock`.

    When its event loop has ended, a client goes on in the next one; as long as its loop lives, use in another loop
    raises RuntimeError.
    Raises ValueError or TypeError for an option that makes no sense, and names it.
    """

    def __init__(
        self,
        host: str = "localhost",
        port: int = 6379,
        db: int = 0,
        *,
        queue: bool = True,
        confirm_release: bool = True,
        **options: object,
    ) -> None:
        settings: Any = options.pop("_settings", None)  # given by `from_url` and by a drop-in
        if settings is None:
            settings = settings_from_options({"host": host, "port": port, "db": db, **client_options(options)})
        self._queue = arguments.as_flag(queue, "queue")
        self._confirm_release = arguments.as_flag(confirm_release, "confirm_release")
        self._settings = settings
        self._cross_slot = False  # whether the server has refused a command for names in several hash slots
        self._transport = AsyncTransport(settings, _implementation.default)
        self._background: set[Background] = set()  # elections and jobs that run
        self._owners = OwnersByName(contextlib.nullcontext)
        self._rw_owners = OwnersByName(contextlib.nullcontext)

    @classmethod
    def from_url(cls, url: str, *, queue: bool = True, confirm_release: bool = True, **options: object) -> Self:
        """A client from redis:// rediss:// unix:// valkey:// or valkeys://, with redis-py's query options.

        Keyword arguments win over the URL. Raises ValueError for a URL that cannot be right, and says why.
        """
        settings = settings_from_url(url, **client_options(options))
        return cls(queue=queue, confirm_release=confirm_release, _settings=settings)

    def lock(
        self,
        name: arguments.Name,
        timeout: float | None = base_lock.DEFAULT_TIMEOUT,
        sleep: float = base_lock.DEFAULT_SLEEP,
        blocking: bool = True,
        blocking_timeout: float | None = None,
        thread_local: bool = True,
        raise_on_release_error: bool = True,
        fence: bool = False,
        fair: bool = False,
        queue: bool | None = None,
        auto_renew: bool = False,
        max_hold: float | None = None,
        on_lost: Callable[[Lease], object] | None = None,
        cancel_on_loss: bool = False,
        confirm_release: bool | None = None,
        keep: float | None = None,
    ) -> ClientLock:
        """A lock on `name`, exactly these bytes, for `timeout` seconds at a time (None: without end).

        sleep: seconds between two tries of a name that is held, where it has to be polled. blocking, blocking_timeout:
        whether to wait, and how many seconds at most. thread_local: each task has its own lease; False lets one task
        release what another acquired. raise_on_release_error: whether leaving an `async with` raises when the lock was
        lost meanwhile. fence: give each lease a `fence`, a number greater than that of every earlier holder. fair:
        strictly first come, first served over all clients, also where a lease could be handed over within the process.
        queue: whether to wait in the queue; False tries every `sleep` seconds instead, as redis-py does (None: the
        client's setting).

        auto_renew: renew each lease (of 30 seconds, unless `timeout` is given) until it is released, so that a long job
        keeps the lock; should it be lost, `lease.lost` is set before anybody else can have the lock. max_hold: seconds
        after which it is not renewed any more; nor is it once the task that acquired it has ended, or nobody refers to
        the lock any more. on_lost: called with a lease that was lost; it may be a coroutine function. cancel_on_loss:
        cancel the body of the `async with` then; leaving it raises LockLostError.

        confirm_release: whether a release waits for the server's answer (None: the client's setting). With False it
        returns when it is written, and costs no round trip; a loss that it finds is logged, counted, and told by
        `on_lost`.

        keep: for how many seconds the client may keep a lease that was released, counted from when the server granted
        it: within these the next acquire of the name takes no command. Until then, or until another client of fastlock
        waits for it, the name counts as held; its lease on the server lasts `timeout` and `keep`. See docs/keep.md.

        Raises ValueError or TypeError for a setting that makes no sense, and names it.
        """
        queue = self._queue if queue is None else queue
        confirm = self._confirm_release if confirm_release is None else confirm_release
        plain = max_hold is None and on_lost is None and confirm is True
        if not plain or auto_renew is not False or cancel_on_loss is not False:
            if auto_renew and timeout is base_lock.DEFAULT_TIMEOUT:
                timeout = LEASE_SECONDS
            renewal = settings_for(auto_renew, timeout, max_hold, on_lost, cancel_on_loss, confirm_release=confirm)
            return (GuardedLock if cancel_on_loss else ClientLock)(
                *(self, name, timeout, sleep, blocking, blocking_timeout, thread_local, raise_on_release_error),
                *(fence, fair, queue, "utf-8", renewal, confirm, on_lost, keep),
            )
        # Nothing more: many callers make a lock for each acquire
        more = () if keep is None else ("utf-8", None, True, None, keep)
        return ClientLock(self, name, timeout, sleep, blocking, blocking_timeout, thread_local, raise_on_release_error,
                          fence, fair, queue, *more)  # fmt: skip

    def reentrant_lock(
        self,
        name: arguments.Name,
        timeout: float | None = base_lock.DEFAULT_TIMEOUT,
        sleep: float = base_lock.DEFAULT_SLEEP,
        blocking: bool = True,
        blocking_timeout: float | None = None,
        raise_on_release_error: bool = True,
        fence: bool = False,
        fair: bool = False,
        queue: bool | None = None,
        auto_renew: bool = False,
        max_hold: float | None = None,
        on_lost: Callable[[Lease], object] | None = None,
        cancel_on_loss: bool = False,
        confirm_release: bool | None = None,
    ) -> ReentrantLock:
        """A lock that its holder, a task, may acquire again, by this lock or another reentrant one of this client.

        Each acquire takes a release; only the first and the last take a command. `lease.depth` counts. The lease is
        that of the first acquire, with its timeout; it is renewed if one of the acquires wants that. On the server this
        is a lock like any other, which excludes plain locks of that name, also those of the same task. The arguments
        are those of `lock`, and so are the errors.
        """
        if auto_renew and timeout is base_lock.DEFAULT_TIMEOUT:
            timeout = LEASE_SECONDS
        confirm = self._confirm_release if confirm_release is None else confirm_release
        lock = (GuardedReentrantLock if cancel_on_loss else ReentrantLock)(
            self,
            name,
            timeout,
            sleep,
            blocking,
            blocking_timeout,
            True,
            raise_on_release_error,
            fence,
            fair,
            self._queue if queue is None else queue,
            renewal=settings_for(auto_renew, timeout, max_hold, on_lost, cancel_on_loss, confirm_release=confirm),
            confirm_release=confirm,
            on_lost=on_lost,
        )
        lock._share(self._owners.of(lock._key))
        return lock

    def rw_lock(
        self,
        name: arguments.Name,
        timeout: float | None = base_lock.DEFAULT_TIMEOUT,
        sleep: float = base_lock.DEFAULT_SLEEP,
        blocking: bool = True,
        blocking_timeout: float | None = None,
        raise_on_release_error: bool = True,
        fence: bool = False,
        prefer: Literal["writer"] | None = None,
        queue: bool | None = None,
        auto_renew: bool = False,
        max_hold: float | None = None,
        on_lost: Callable[[Lease], object] | None = None,
        cancel_on_loss: bool = False,
    ) -> ReadWriteLock:
        """A read-write lock: `rw_lock(name).read` and `.write` are locks. Many may read at once, or one may write.

        Readers and writers are served in order of arrival, and readers that stand together are admitted together.
        prefer: "writer" for writers before all readers that wait. Each reader has its own lease, and a dead one keeps
        writers waiting for that long at most. The other arguments are those of `lock`, for both sides, and so are the
        errors; a name in use by another kind of lock is a LockKindError.
        """
        if auto_renew and timeout is base_lock.DEFAULT_TIMEOUT:
            timeout = LEASE_SECONDS
        renewal = settings_for(auto_renew, timeout, max_hold, on_lost, cancel_on_loss)
        first = as_preference(prefer)
        queue = self._queue if queue is None else queue
        more = (True, raise_on_release_error, fence, False, queue)
        sides = (GuardedReadLock, GuardedWriteLock) if cancel_on_loss else (ReadLock, WriteLock)
        read = sides[0](self, name, timeout, sleep, blocking, blocking_timeout, *more, renewal=renewal)
        write = sides[1](self, name, timeout, sleep, blocking, blocking_timeout, *more, renewal=renewal)
        owners, write.first = self._rw_owners.of(read._key), first
        read._share(owners)
        write._share(owners)
        return ReadWriteLock(read, write)

    def semaphore(
        self,
        name: arguments.Name,
        permits: int,
        n: int = 1,
        timeout: float | None = base_lock.DEFAULT_TIMEOUT,
        sleep: float = base_lock.DEFAULT_SLEEP,
        blocking: bool = True,
        blocking_timeout: float | None = None,
        thread_local: bool = True,
        raise_on_release_error: bool = True,
        queue: bool | None = None,
        auto_renew: bool = False,
        max_hold: float | None = None,
        on_lost: Callable[[Lease], object] | None = None,
        cancel_on_loss: bool = False,
    ) -> Semaphore:
        """A semaphore: at most `permits` of the name are held at once, by all clients together.

        n: how many permits an acquire takes, all or none. Each acquire has a lease of its own, and is served in order
        of arrival. permits is what this client goes by, until `resize` has set a number for all. The other arguments
        are those of `lock`, and so are the errors; a name in use by another kind of lock is a LockKindError.
        """
        if auto_renew and timeout is base_lock.DEFAULT_TIMEOUT:
            timeout = LEASE_SECONDS
        kind = GuardedSemaphore if cancel_on_loss else Semaphore
        semaphore = kind(
            *(self, name, timeout, sleep, blocking, blocking_timeout, thread_local, raise_on_release_error),
            *(False, False, self._queue if queue is None else queue),
            renewal=settings_for(auto_renew, timeout, max_hold, on_lost, cancel_on_loss),
        )
        semaphore._set_permits(permits, n)
        return semaphore

    def multi_lock(
        self,
        names: Iterable[arguments.Name],
        timeout: float | None = base_lock.DEFAULT_TIMEOUT,
        sleep: float = base_lock.DEFAULT_SLEEP,
        blocking: bool = True,
        blocking_timeout: float | None = None,
        thread_local: bool = True,
        raise_on_release_error: bool = True,
        fence: bool = False,
        fair: bool = False,
        queue: bool | None = None,
        auto_renew: bool = False,
        max_hold: float | None = None,
        on_lost: Callable[[MultiLease], object] | None = None,
        cancel_on_loss: bool = False,
        *,
        atomic: bool = False,
    ) -> MultiLock:
        """A lock on all of these names, or none: it is acquired when nobody else holds any of them.

        Names that share a server are acquired by one command. Where one is held, the lock waits for that one, in order
        of arrival; no two such locks can wait for each other. A `with` that was not entered raises
        LockNotAcquiredError, which says which name somebody else holds, its holder, and for how long. atomic: refuse
        names that are in several hash slots of a cluster, where each takes a command of its own, in a fixed order, and
        is undone where another one is held.

        The other arguments are those of `lock`; `fence` is refused, and each wait is `fair`. `on_lost` is called once,
        with the MultiLease.
        """
        given, keys = checked_names(names, atomic, fence)
        told: Any = on_lost
        one = self.lock(
            *(given[0], timeout, sleep, blocking, blocking_timeout, thread_local, raise_on_release_error, False),
            *(fair, queue, auto_renew, max_hold, told, cancel_on_loss),
        )
        return MultiLock(one, given, keys)

    async def acquire_many(self, names: Iterable[arguments.Name], timeout: float | None = 10) -> list[Lease | None]:
        """Acquire each of these names that is free now, all in one flush; never waits for a name that is held.

        Returns a lease, or None where somebody else holds the name, in the order of names. If the server answers one of
        them with an error, it is raised and nothing is held. Raises ValueError or TypeError for a name or timeout that
        makes no sense.
        """
        given, keys, ms = batch.asked(names, timeout)
        if not given:
            return []
        self._transport.begin()
        op = AcquireMany(given, keys, new_token(), ms, self._transport.stats)
        leases: list[Lease | None] = await self._transport.run(op)
        return leases

    async def release_many(self, leases: Iterable[Lease | None]) -> list[bool]:
        """Release these leases, all in one flush. Returns whether each was still the caller's (False for None)."""
        given: list[Lease | None] = []
        mine: list[Lease] = []
        released: list[Any] = []
        try:
            mine = batch.owned(leases, given)
            self._transport.begin()
            await self._transport.complete(release_many(mine, self._transport.queues, now, released))
            outcome = batch.merge(given, mine, released)
        except BaseException as error:  # a signal handler may have raised it
            self._transport.undo_interrupted_batch(mine or given or leases, released, error)
            await self._transport.flush_if_closed(error)
            raise
        return outcome

    def locked(
        self,
        name: str | Callable[..., Any],
        timeout: float | None = base_lock.DEFAULT_TIMEOUT,
        *,
        on_busy: OnBusy = "wait",
        **lock_options: Any,
    ) -> Callable[[Callable[P, Coroutine[Any, Any, R]]], Callable[P, Coroutine[Any, Any, R]]]:
        """Decorator: run the function under a lock.

        name: a template over the call's arguments (`"order:{order_id}"`), or a callable of them that returns the name.
        on_busy: what a call does while somebody else holds the lock: "wait" for it, "raise" LockNotAcquiredError,
        "skip" the function and return None, or call a function with the same arguments instead. All but "wait" wait for
        `blocking_timeout` only, if that is given. The other arguments are those of `lock`.

        A call raises LockNotAcquiredError when it waited and the lock was not acquired.
        """

        def decorate(
            function: Callable[P, Coroutine[Any, Any, R]], *others: object, **more: object
        ) -> Callable[P, Coroutine[Any, Any, R]]:
            refuse_call(function, others, more)
            named = name_maker(name, function)
            if not inspect.iscoroutinefunction(function):
                raise TypeError(f"{function.__qualname__} is not async: decorate it with a fastlock.Client")
            instead = when_busy(on_busy, lock_options)
            self.lock("terms", timeout, **lock_options)  # bad settings raise now, not at the first call

            @functools.wraps(function)
            async def call(*args: P.args, **kwargs: P.kwargs) -> R:
                lock = self.lock(named(*args, **kwargs), timeout, **lock_options)
                try:
                    async with lock:
                        return await function(*args, **kwargs)
                except LockNotAcquiredError as error:
                    if instead is None or error.lock_id != id(lock):  # of another lock, within the function
                        raise
                result: R = await answered(instead(*args, **kwargs))
                return result

            return call

        return decorate

    @overload
    def once(
        self,
        name: arguments.Name,
        function: Callable[[], Awaitable[R]],
        *,
        ttl: float,
        **settings: Unpack[OnceOptions],
    ) -> Coroutine[Any, Any, R]: ...

    @overload
    def once(
        self,
        name: arguments.Name,
        function: Callable[[], R],
        *,
        ttl: float,
        **settings: Unpack[OnceOptions],
    ) -> Coroutine[Any, Any, R]: ...

    @overload
    def once(
        self,
        name: arguments.Name | Callable[..., Any],
        function: None = None,
        *,
        ttl: float,
        **settings: Unpack[OnceOptions],
    ) -> Callable[[Callable[P, Coroutine[Any, Any, R]]], Callable[P, Coroutine[Any, Any, R]]]: ...

    def once(
        self,
        name: NameOrMaker,
        function: Callable[..., Any] | None = None,
        *,
        ttl: float,
        on_busy: OnBusy = "wait",
        timeout: float = MAKER_SECONDS,
        blocking_timeout: float | None = None,
        dumps: Dumps | None = None,
        loads: Loads | None = None,
    ) -> Any:
        """Call `function`, in one of all callers, and return its result: the others wait for it, and for `ttl` seconds
        all get it without a call. Without a function this is a decorator, whose name is a template as of `locked`.

        The result is kept on the server as JSON, unless `dumps` and `loads` are given (as pickle's). All callers get
        what `loads` makes of it. on_busy: what a call does while the function runs elsewhere, as of `locked`.
        blocking_timeout: seconds to wait for it at most. timeout: seconds of the lock's lease, which is renewed while
        the function runs: so long the others wait when its process dies.

        What the function raises is raised to its own caller; the next one runs it again. Raises LockNotAcquiredError
        where it may not wait, or not longer; LockLostError: the lock was lost meanwhile, and nothing is kept.
        """
        settings = once.settings_for(ttl, on_busy, timeout, blocking_timeout, dumps, loads)
        if function is None:
            return once.aio_decorator(self, settings, name)
        return once.aio_run(self, settings, name, once.function_of(function))

    async def forget(self, name: arguments.Name) -> bool:
        """Forget the result that `once` keeps for a name. Returns whether there was one. A run that is under way is
        not stopped, and its result is kept."""
        return await self._transport.drive(values.forget(values.result_key(arguments.as_name(name)), now))

    @overload
    def refill(
        self, key: arguments.Name, loader: Callable[[], Awaitable[R]], ttl: float, **settings: Unpack[RefillOptions]
    ) -> Coroutine[Any, Any, R]: ...

    @overload
    def refill(
        self, key: arguments.Name, loader: Callable[[], R], ttl: float, **settings: Unpack[RefillOptions]
    ) -> Coroutine[Any, Any, R]: ...

    @overload
    def refill(
        self,
        key: arguments.Name | Callable[..., Any],
        loader: None = None,
        *,
        ttl: float,
        **settings: Unpack[RefillOptions],
    ) -> Callable[[Callable[P, Coroutine[Any, Any, R]]], Callable[P, Coroutine[Any, Any, R]]]: ...

    def refill(
        self,
        key: NameOrMaker,
        loader: Callable[..., Any] | None = None,
        ttl: float | None = None,
        *,
        stale: float = 0,
        timeout: float = MAKER_SECONDS,
        blocking_timeout: float | None = None,
        dumps: Dumps | None = None,
        loads: Loads | None = None,
    ) -> Any:
        """The value of `key`; where there is none, `loader` makes it, in one of all callers, and the others wait for
        it. It is kept for `ttl` seconds. Without a loader this is a decorator, whose key is a template as of `locked`.

        stale: for so many seconds more the old value is returned at once, and one caller loads a new one, in its own
        call; where that fails, it gets the old value as well. The value is what `dumps` makes of it, JSON if it is not
        given; all callers get what `loads` makes of that. What cannot be read counts as missing. blocking_timeout:
        seconds to wait at most for a value that another caller loads. timeout: seconds of the lock's lease, which is
        renewed while the value is loaded: so long the others wait when its process dies.

        What the loader raises is raised to its own caller; the next one tries. Raises LockNotAcquiredError where no
        value came within blocking_timeout.
        """
        settings = refill.settings_for(ttl, stale, timeout, blocking_timeout, dumps, loads)
        if loader is None:
            return refill.aio_decorator(self, settings, key)
        return refill.aio_run(self, settings, key, once.function_of(loader, "loader"))

    async def invalidate(self, key: arguments.Name) -> bool:
        """Delete a value of `refill`; one that is being loaded now will not be kept. Returns whether there was one."""
        return await self._transport.drive(values.discard(arguments.as_name(key, what="key"), now))

    def leader(
        self,
        name: arguments.Name,
        *,
        on_gain: Callback | None = None,
        on_loss: Callback | None = None,
        timeout: float = LEADER_SECONDS,
        start: bool = True,
    ) -> Election:
        """Compete to be the leader: the holder of the lock `name`, of whom there is one in all processes.

        A task competes in the queue, renews the lock while it leads, and competes again when it has lost it.
        on_gain: called with the lease, which has a `fence`, when this one leads; it may be a coroutine function, which
        is cancelled when this one leads no longer. on_loss: called with the lease then, before anybody else leads;
        it may be a coroutine function. timeout: seconds of the lease, which is
        how long there is no leader after one has died. start: False waits for `start()` or `async with`.

        Raises ValueError or TypeError for an argument that makes no sense, and names it.
        """
        election = Election(self, name, timeout, on_gain, on_loss)
        return election.start() if start else election

    @overload
    def every(
        self, name: arguments.Name, seconds: float, function: Callable[..., Any], **settings: Unpack[JobOptions]
    ) -> Job: ...

    @overload
    def every(
        self, name: arguments.Name, seconds: float, function: None = None, **settings: Unpack[JobOptions]
    ) -> Callable[[Callable[..., Any]], Job]: ...

    def every(
        self,
        name: arguments.Name,
        seconds: float,
        function: Callable[..., Any] | None = None,
        *,
        timeout: float | None = None,
        at_once: bool = True,
        start: bool = True,
    ) -> Any:
        """Run `function` once in each period of so many seconds, in one process of all that have this job. Without a
        function this is a decorator.

        Periods are counted by the server's clock: those of 3600 seconds begin with each hour. A task of each client
        asks whether it is to run the job. It runs under the lock `name`, which is renewed; a period that begins
        meanwhile is skipped. timeout: seconds of that lock's lease, a period unless it is given, 1 to 30: so long the
        job may be late after a process that ran it has died. at_once: whether the period that has begun already is run,
        if nobody has run it. start: False waits for `start()` or `async with`.

        What the function raises is logged, and is the job's `last_error`. Raises ValueError or TypeError for an
        argument that makes no sense, and names it.
        """

        def make(function: Callable[..., Any]) -> Job:
            job = Job(self, name, seconds, function, timeout, at_once)
            return job.start() if start else job

        check_schedule(name, seconds, timeout)
        return make if function is None else make(function)

    def get_stats(self) -> dict[str, int]:
        """What this client counted since it was made, or since its process forked. Costs nothing, sends nothing.

        The counts are those of `fastlock.Client.get_stats`.
        """
        check()
        connection = self._transport.connection
        counts = self._transport.stats.as_dict([] if connection is None else [connection.stream])
        return {**counts, "round_trip_us": round(1e6 * self._transport.queues.round_trip)}

    async def describe(self, name: arguments.Name) -> Description:
        """Who holds a name, since when and for how long still, and who waits for it, asked of the server.

        Raises ValueError or TypeError for a name that makes no sense, redis-py's exceptions for error replies of the
        server, and ConnectionError or TimeoutError when it stays away.
        """
        keys = [arguments.as_name(name)]
        return (await self._transport.drive(describe_names([name], keys, own_leases, time.time, now)))[0]

    async def server_info(self) -> dict[str, Any]:
        """What the server is: server, version, mode, role, capabilities, maxmemory_policy. Connects if need be."""
        return handshake.describe(await self._transport.drive(get_session(now)))

    @property
    def closed(self) -> bool:
        """Whether this client was closed."""
        return self._transport.closed

    async def close(self) -> None:
        """Close all connections, after releases that are under way: that takes a second or two at most, and where
        nobody has waited for them `reply_timeout`. It goes on where its caller is cancelled. A task that waits gets
        ClientClosedError. Held locks stay until they are released or their leases end. Elections and jobs are
        cancelled, and have a second to end."""
        await stop_all(self._background)
        await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __enter__(self) -> NoReturn:
        raise TypeError("this client is for asyncio: use `async with`, or fastlock.Client")

    def __exit__(self, *exc: object) -> None: ...

    def __del__(self, ends: Callable[[], bool] = sys.is_finalizing) -> None:
        transport = getattr(self, "_transport", None)
        if transport is not None and not ends():  # when the interpreter ends, so do the connections
            transport.close_collected()

    def __repr__(self) -> str:
        return f"<fastlock.asyncio.Client of {self._settings.endpoint}, db {self._settings.db}>"
