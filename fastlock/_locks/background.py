"""A thread of a client that works until it is stopped: an election, a job. `aio_background.py` is the same for asyncio.

It ends with the client, and is given a moment to end with the interpreter; a forked child does not have it. Never here:
what it works.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import weakref
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self

from fastlock import _native as native
from fastlock._errors import ClientClosedError
from fastlock._fork import check, generation
from fastlock._locks.copying import Uncopyable
from fastlock._protocol.arguments import Name, as_wait
from fastlock._protocol.lease import now
from fastlock._protocol.losses import LOG, abbreviated

if TYPE_CHECKING:
    from _thread import LockType
    from collections.abc import Iterable

    from fastlock._locks.client import Client

CLOSE_SECONDS = 1.0  # for which a client that is closed, or an interpreter that ends, waits for its threads
LONGEST_SLEEP = 1e6  # seconds: the system's functions take no infinite ones


class Background(Uncopyable):
    """The thread, and how it is started, woken and stopped."""

    _client: Any
    _transport: Any
    _name: Any
    _stopping: bool

    def __init__(self, client: Client, name: Name) -> None:
        self._client = client
        self._transport = client._transport
        self._name = name
        self._stopping = False
        self._changes = native.Changes()  # wakes the thread, and whoever waits for what it does
        self._ended: Any = None  # a lock that is held while the thread runs
        self._thread = 0  # its number
        self._generation = 0  # the process that started it

    def _work(self) -> None:
        """Work until `_stopping`."""
        raise NotImplementedError

    @property
    def running(self) -> bool:
        """Whether it was started in this process, and has not ended."""
        return self._ended is not None and self._generation == generation() and bool(self._ended.locked())

    def start(self) -> Self:
        """Begin in a thread, if it does not run already; also after it was stopped, and in a forked child.

        Raises ClientClosedError: the client was closed. RuntimeError: it was stopped and has not ended yet.
        """
        check()
        if self._client.closed:
            raise ClientClosedError("this client is closed")
        with self._transport._mutex:
            if self.running:
                if self._stopping:
                    raise RuntimeError(f"{self!r} is still being stopped")
                return self
            self._stopping, self._generation, self._changes = False, generation(), native.Changes()
            self._ended = native.allocate_lock()
            self._ended.acquire()
            self._client._background.add(self)
            _RUNNING.add(self)
            try:
                native.start_new_thread(self._run, (self._ended,))
            except BaseException:
                self._forget(self._ended)
                raise
        return self

    def stop(self, timeout: float | None = None) -> bool:
        """End it: what is under way is carried out, nothing more is begun. Waits for that, `timeout` seconds at most,
        unless it is called from within. Returns whether it has ended."""
        seconds = LONGEST_SLEEP if timeout is None else as_wait(timeout, "timeout")
        self._signal()
        if self._thread != threading.get_ident():
            self._join(now() + seconds)
        return not self.running

    def _signal(self) -> None:
        """Have it end, without waiting for that."""
        self._stopping = True
        self._changes.tell()

    def _join(self, until: float) -> None:
        if self.running and self._ended.acquire(timeout=max(0.0, min(until - now(), LONGEST_SLEEP))):
            self._ended.release()

    def _run(self, ended: LockType) -> None:
        self._thread = threading.get_ident()
        with contextlib.suppress(Exception):
            threading.current_thread().name = f"fastlock: {type(self).__name__} {abbreviated(self._name)}"
        try:
            self._work()
        except BaseException:
            LOG.exception("%r has ended by an error that nobody expected", self)
        finally:
            self._thread = 0
            self._forget(ended)

    def _forget(self, ended: LockType) -> None:
        self._client._background.discard(self)
        _RUNNING.discard(self)
        ended.release()
        self._changes.tell()

    def _sleep(self, seconds: float) -> None:
        """Sleep so long, or until something has changed. The caller checks what."""
        wake = self._changes.expect()
        self._changes.wait(wake, 0.0 if self._stopping else min(seconds, LONGEST_SLEEP))

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    if not TYPE_CHECKING:  # a type checker refuses it by itself

        async def __aenter__(self) -> NoReturn:
            raise TypeError("this is for threads: use `with`, or a fastlock.asyncio.Client")

        async def __aexit__(self, *exc: object) -> None: ...

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {abbreviated(self._name)}, {'running' if self.running else 'not running'}>"


def stop_all(running: Iterable[Background]) -> None:
    """Have them end, and wait a moment for that: what they do on loss, and a release, should be done."""
    each = list(running)
    for one in each:
        one._signal()
    until = now() + CLOSE_SECONDS
    for one in each:
        if one._thread != threading.get_ident():
            one._join(until)


_RUNNING: weakref.WeakSet[Background] = weakref.WeakSet()


def _at_exit() -> None:
    """As the interpreter ends: who leads should hand over, instead of leaving the others to wait for its lease."""
    check()
    stop_all(_RUNNING)


atexit.register(_at_exit)
