"""One test body for both APIs: a plain value of the threads API and an awaitable of the asyncio API look the same here.

A test is an `async def` that takes `api`, one of the two APIs. With asyncio it runs in an event loop; with threads it
is driven by hand, without any loop, and must never suspend: `get`, `together`, `start` see to that.

    async def test_two(api, server):
        client = api.client(server.url)
        assert await api.get(client.lock("a").acquire(blocking=False))
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import inspect
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
_WAIT = 30.0


class Job:
    """Something started by `Api.start` that runs beside the test's body."""

    def __init__(self, api: Api, call: Callable[[], Any]) -> None:
        self._api = api
        self.finished = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None
        self.task: asyncio.Task[None] | None = None
        if api.is_async:
            self.task = asyncio.get_running_loop().create_task(self._run_in_loop(call))
        else:
            context = contextvars.copy_context()
            thread = threading.Thread(target=context.run, args=(self._run_in_thread, call), name="job", daemon=True)
            thread.start()

    async def get(self, timeout: float = _WAIT) -> Any:
        """The job's result, or its exception; AssertionError when it takes longer than `timeout` seconds."""
        if self.task is not None:
            await asyncio.wait([self.task], timeout=timeout)
        else:
            self.finished.wait(timeout)
        assert self.finished.is_set(), f"a job did not end within {timeout:g} seconds"
        if self.error is not None:
            raise self.error
        return self.result

    def cancel(self) -> None:
        """Cancel the job (asyncio only: a thread cannot be cancelled)."""
        assert self.task is not None, "a thread cannot be cancelled"
        self.task.cancel()

    async def _run_in_loop(self, call: Callable[[], Any]) -> None:
        try:
            self.result = await self._api.get(call())
        except (Exception, asyncio.CancelledError) as error:
            self.error = error
        self.finished.set()

    def _run_in_thread(self, call: Callable[[], Any]) -> None:
        try:
            self.result = drive(self._api.get(call()))
        except BaseException as error:
            self.error = error
        self.finished.set()


class Api:
    """One API under test, "threads" or "asyncio"; uvloop: which event loop."""

    def __init__(self, name: str, *, uvloop: bool = False) -> None:
        self.name, self.uvloop = name, uvloop
        self.is_async = name == "asyncio"
        self._clients: list[Any] = []

    def __repr__(self) -> str:
        return f"<Api {self.name}{'+uvloop' if self.uvloop else ''}>"

    @property
    def module(self) -> Any:
        """fastlock or fastlock.asyncio."""
        import fastlock
        import fastlock.asyncio

        return fastlock.asyncio if self.is_async else fastlock

    def client(self, url: str, **keywords: Any) -> Any:
        """A client of this API; it is closed when the test's body ends."""
        client = self.module.Client.from_url(url, **keywords)
        self._clients.append(client)
        return client

    async def get(self, value: Any) -> Any:
        """The value, awaited if it is awaitable."""
        return await value if inspect.isawaitable(value) else value

    async def enter(self, manager: Any) -> Any:
        """`with manager as result` for both APIs; pair it with `leave`."""
        return await manager.__aenter__() if self.is_async else manager.__enter__()

    async def leave(self, manager: Any, error: BaseException | None = None) -> Any:
        """The end of that `with`, by `error` if one is given."""
        about = (type(error), error, error.__traceback__) if error else (None, None, None)
        return await manager.__aexit__(*about) if self.is_async else manager.__exit__(*about)

    @contextlib.asynccontextmanager
    async def within(self, manager: Any) -> AsyncIterator[Any]:
        """`async with api.within(manager) as result`: a `with` for both APIs, entered and left as there."""
        result = await self.enter(manager)
        try:
            yield result
        except BaseException as error:
            await self.leave(manager, error)
            raise
        else:
            await self.leave(manager)

    def native(self, function: Callable[..., Coroutine[Any, Any, T]]) -> Callable[..., Any]:
        """A coroutine function as a user of this API would write it: for threads a plain function that drives it."""

        @functools.wraps(function)
        def plain(*args: Any, **kwargs: Any) -> T:
            return drive(function(*args, **kwargs))

        if self.is_async:
            return function
        plain.__dict__.update(__signature__=inspect.signature(function))
        del plain.__dict__["__wrapped__"]  # by which it would pass for a coroutine function
        return plain

    def start(self, call: Callable[[], Any]) -> Job:
        """Run `call` beside the body, in a thread or as a task; `call` may be a plain function or `async def`."""
        return Job(self, call)

    async def together(self, calls: Sequence[Callable[[], Any]], timeout: float = _WAIT) -> list[Any]:
        """Run all calls at once; their results in order, an exception standing for itself."""
        queue = threading.Barrier(len(calls)) if calls and not self.is_async else None

        def at_once(call: Callable[[], Any]) -> Callable[[], Any]:
            def run() -> Any:
                if queue is not None:
                    queue.wait(timeout)
                return call()

            return run

        jobs = [self.start(at_once(call)) for call in calls]
        results: list[Any] = []
        for job in jobs:
            try:
                results.append(await job.get(timeout))
            except (Exception, asyncio.CancelledError) as error:
                if not job.finished.is_set():
                    raise
                results.append(error)
        return results

    async def checkpoint(self) -> None:
        """Let other tasks run once; does nothing for threads, which run anyway."""
        if self.is_async:
            await asyncio.sleep(0)

    def run(self, body: Coroutine[Any, Any, T]) -> T:
        """Run a test's body to its end and close its clients; fails on tasks left behind and on unhandled errors."""
        if not self.is_async:
            return drive(self._closing(body))
        unhandled: list[dict[str, Any]] = []
        with asyncio.Runner(loop_factory=_uvloop_factory() if self.uvloop else None) as runner:
            runner.get_loop().set_exception_handler(lambda _, context: unhandled.append(context))
            result = runner.run(self._closing(body))
        assert not unhandled, f"errors that nobody handled: {unhandled}"
        return result

    async def _closing(self, body: Coroutine[Any, Any, T]) -> T:
        try:
            result = await body
        finally:
            for client in self._clients:
                await self.get(client.close())
            self._clients.clear()
        if self.is_async:
            # A closed transport tells its protocol in the next iteration of the loop.
            await asyncio.sleep(0)
            left = asyncio.all_tasks() - {asyncio.current_task()}
            assert not left, f"tasks left behind: {left}"
        return result


def drive(body: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never suspends, without an event loop."""
    try:
        body.send(None)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
    body.close()
    raise AssertionError("a body awaited something of asyncio while running for threads")


def _uvloop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    import uvloop

    return uvloop.new_event_loop
