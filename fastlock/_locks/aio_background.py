"""A task of a client that works until it is stopped: an election, a job. `background.py` is the same for threads.

It ends with the client, and with the event loop. Never here: what it works.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self

from fastlock._errors import ClientClosedError
from fastlock._fork import generation
from fastlock._locks.background import CLOSE_SECONDS, LONGEST_SLEEP
from fastlock._locks.copying import Uncopyable
from fastlock._protocol.arguments import Name, as_wait
from fastlock._protocol.losses import LOG, abbreviated
from fastlock._transport.internals import running_loop

if TYPE_CHECKING:
    from fastlock._locks.aio_client import Client


class Background(Uncopyable):
    """The task, and how it is started, woken and stopped."""

    _client: Any
    _transport: Any
    _name: Any
    _stopping: bool

    def __init__(self, client: Client, name: Name) -> None:
        self._client = client
        self._transport = client._transport
        self._name = name
        self._stopping = False
        self._task: asyncio.Task[None] | None = None
        self._generation = 0  # the process that started it
        self._inner: asyncio.Task[Any] | None = None  # in which a user's function runs, where that may be cancelled
        self._sleeping: set[asyncio.Future[None]] = set()  # the task, and whoever waits for what it does

    async def _work(self) -> None:
        """Work until `_stopping`."""
        raise NotImplementedError

    @property
    def running(self) -> bool:
        """Whether it was started in a loop that lives, and has not ended."""
        task = self._task
        if task is None or self._generation != generation():
            return False
        return not (task.done() or task.get_loop().is_closed())

    def start(self) -> Self:
        """Begin in a task, if it does not run already; also after it was stopped, and in another event loop.

        Raises ClientClosedError: the client was closed. RuntimeError: it was stopped and has not ended yet, or no event
        loop runs.
        """
        if self._client.closed:
            raise ClientClosedError("this client is closed")
        if (loop := running_loop()) is None:
            raise RuntimeError(
                f"{type(self).__name__} {abbreviated(self._name)} runs in an event loop, and none runs here: make it "
                "in a coroutine, or with start=False, and start it there"
            )
        self._transport.begin()
        if self.running:
            if self._stopping:
                raise RuntimeError(f"{self!r} is still being stopped")
            return self
        self._stopping, self._inner, self._generation = False, None, generation()
        self._sleeping.clear()
        self._client._background.add(self)
        self._task = loop.create_task(self._run(), name=f"fastlock: {type(self).__name__} {abbreviated(self._name)}")
        return self

    async def stop(self, timeout: float | None = None) -> bool:
        """End it: what is under way is carried out, nothing more is begun. Waits for that, `timeout` seconds at most,
        unless it is called from within. Returns whether it has ended."""
        seconds = LONGEST_SLEEP if timeout is None else as_wait(timeout, "timeout")
        self._signal()
        if self.running and self._task is not None and not self._within():
            await asyncio.wait([self._task], timeout=seconds)
        return not self.running

    def _within(self) -> bool:
        """Whether the running task is this one, or that of a user's function."""
        return asyncio.current_task() in (self._task, self._inner)

    def _signal(self) -> None:
        """Have it end, without waiting for that."""
        self._stopping = True
        self._tell()

    def _tell(self) -> None:
        """Wake the task, and whoever waits for what it does, to check again."""
        for future in list(self._sleeping):
            if not future.done():
                future.set_result(None)

    async def _run(self) -> None:
        try:
            await self._work()
        except asyncio.CancelledError:
            raise
        except Exception:
            LOG.exception("%r has ended by an error that nobody expected", self)
        finally:
            self._client._background.discard(self)
            self._tell()

    async def _sleep(self, seconds: float) -> None:
        """Sleep so long, or until something has changed. The caller checks what."""
        if self._stopping:
            return
        await self._change(seconds)

    async def _change(self, seconds: float) -> None:
        future = asyncio.get_running_loop().create_future()
        self._sleeping.add(future)
        try:
            await asyncio.wait([future], timeout=min(seconds, LONGEST_SLEEP))
        finally:
            self._sleeping.discard(future)

    async def __aenter__(self) -> Self:
        return self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    if not TYPE_CHECKING:  # a type checker refuses it by itself

        def __enter__(self) -> NoReturn:
            raise TypeError("this is for asyncio: use `async with`, or a fastlock.Client")

        def __exit__(self, *exc: object) -> None: ...

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {abbreviated(self._name)}, {'running' if self.running else 'not running'}>"


async def stop_all(running: Iterable[Background]) -> None:
    """Cancel them, and wait a moment for their end: what they do on loss, and a release, should be done."""
    tasks: list[asyncio.Task[None]] = []
    for one in list(running):
        one._signal()
        if one.running and one._task is not None and not one._within():
            one._task.cancel()
            tasks.append(one._task)
    if tasks:
        await asyncio.wait(tasks, timeout=CLOSE_SECONDS)
