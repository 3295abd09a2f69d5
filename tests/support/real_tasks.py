"""A client for asyncio under a random walk: its callers are tasks of an event loop that the walk steps.

The connection of the client is a real one, with the real stream, above a byte transport that is a `Line`. The loop's
timers end when the walk says so. A task that was handed a lease is held back until it is to run (`HeldBack`).
No decisions about locks are made here.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import fastlock
import fastlock.asyncio
from fastlock._protocol import commands
from support.real_client import REPLY_TIMEOUT, Line, RealCaller, RealClient, Request, greets
from support.resp import Framer, command_end, words
from support.run_steps import Clock

RESTLESS = 200  # iterations of an event loop in a row, after which a task counts as hanging


def undoes(call: tuple[bytes, ...], token: bytes) -> bool:
    """Whether this is a deletion that goes with the hand-over of an undo, for the token in either form."""
    deletes = call[0] in (b"DELIFEQ", b"DELEX") or call[1:2] == (commands.RELEASE_LUA.sha,)
    return deletes and call[-1] in (token, commands.as_contended(token))


class NoSelector:
    """The selector of an event loop that has no sockets."""

    def select(self, timeout: float | None) -> list[Any]:
        return []


class HandLoop(asyncio.BaseEventLoop):
    """An event loop that is stepped by hand. It knows no sockets, and no time passes in it."""

    def __init__(self, dial: Callable[[Any], asyncio.Transport | None]) -> None:
        super().__init__()
        self._selector = NoSelector()
        self.dial = dial

    def time(self) -> float:
        return 0.0

    def _process_events(self, event_list: list[Any]) -> None: ...

    def _write_to_self(self) -> None: ...

    async def create_unix_connection(self, protocol_factory: Any, path: Any = None, **options: Any) -> Any:
        protocol = protocol_factory()
        transport = self.dial(protocol)
        if transport is None:  # its process is dead: whoever connects gets no further
            await self.create_future()
        protocol.connection_made(transport)
        return transport, protocol

    def run_until_quiet(self) -> None:
        """Run until nothing is ready, and no timer is due at once."""
        scheduled: list[Any] = self._scheduled  # type: ignore[attr-defined]
        for _ in range(RESTLESS):
            if not (self._ready or (scheduled and scheduled[0]._when <= self.time())):  # type: ignore[attr-defined]
                return
            self.call_soon(self.stop)
            self.run_forever()
        raise AssertionError("a task neither sends a request nor sleeps")

    def end_timers(self, *callbacks: Any) -> None:
        """End the timers that have one of these callbacks."""
        for timer in list(self._scheduled):  # type: ignore[attr-defined]
            if not timer.cancelled() and timer._callback in callbacks:
                self.call_soon(timer._callback, *timer._args)
                timer.cancel()


class LineTransport(asyncio.Transport):
    """What a real connection writes to: it cuts the bytes into requests on a line."""

    def __init__(self, client: TaskClient, line: Line, protocol: Any) -> None:
        super().__init__()
        self.client, self.line, self.protocol = client, line, protocol
        self.framer = Framer(command_end)

    def write(self, data: Any) -> None:
        if self.line.closed:
            return
        calls = [tuple(words(frame)) for frame in self.framer.feed(bytes(data))]
        while calls:
            call = calls.pop(0)
            if self.line.greeting and greets(call):
                self.feed(b"".join(self.line.execute(call)))
                continue
            request = [call]
            if call[1:2] == (commands.HAND_OVER_LUA.sha,):
                while calls and undoes(calls[0], call[-1]):
                    request.append(calls.pop(0))
            self.client.intake(self.line, request)

    def feed(self, data: bytes) -> None:
        """Give bytes to the connection, in the loop."""
        self.client.loop.call_soon(self._fed, data)

    def _fed(self, data: bytes) -> None:
        room = self.protocol.get_buffer(-1)
        room[: len(data)] = data
        self.protocol.buffer_updated(len(data))

    def abort(self) -> None:
        self.line.close()

    def close(self) -> None:
        self.line.close()

    def is_closing(self) -> bool:
        return self.line.closed

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default


class HeldBack:
    """Awaits what a caller awaits. A caller that was handed a lease is not resumed before the walk says so."""

    def __init__(self, client: TaskClient, caller: TaskCaller, inner: Any) -> None:
        self.client, self.caller, self.inner = client, caller, inner

    def __await__(self) -> Generator[Any, Any, Any]:
        inner, error = self.inner.__await__(), None
        try:
            while True:
                step = inner.send(None) if error is None else inner.throw(error)
                error = None
                try:
                    yield step
                    if self.caller in self.client.handed_over():
                        self.caller.resume_signal = self.client.loop.create_future()
                        yield from self.caller.resume_signal
                except BaseException as raised:
                    error = raised
        except StopIteration as end:
            return end.value


@dataclass(eq=False)
class TaskCaller(RealCaller):
    """A caller that is a task."""

    task: Any = None
    resume_signal: Any = None  # the future for which it waits with a lease that it was handed
    release_signal: Any = None  # the future for which it waits as a holder


class TaskClient(RealClient):
    """A client for asyncio with an event loop of its own."""

    caller = TaskCaller

    def __init__(self, path: str, clock: Clock, rng: Any) -> None:
        self.loop = HandLoop(self.dial)
        self.path = path
        super().__init__(clock, fastlock.asyncio.Client.from_url(f"unix://{path}", reply_timeout=REPLY_TIMEOUT))
        self.transport: Any = self.client._transport
        self.byte_transports: dict[Line, LineTransport] = {}
        connecting = self.loop.create_task(self.client.server_info())
        self.run()
        connecting.result()

    def dial(self, protocol: Any) -> LineTransport | None:
        if self.dead:
            return None
        line = Line.to(self.path)
        self.lines.append(line)
        self.byte_transports[line] = LineTransport(self, line, protocol)
        return self.byte_transports[line]

    def run(self) -> None:
        self.loop.run_until_quiet()
        self.lines = [line for line in self.lines if not line.closed]

    def deliver(self, request: Request, frames: list[bytes]) -> None:
        self.byte_transports[request.line].feed(b"".join(frames))

    def push(self, line: Line, frame: bytes) -> None:
        self.byte_transports[line].feed(frame)

    def start(self, caller: RealCaller) -> None:
        assert isinstance(caller, TaskCaller)
        caller.release_signal = self.loop.create_future()
        caller.task = self.loop.create_task(self.live(caller))

    async def live(self, caller: TaskCaller) -> None:
        try:
            assert await HeldBack(self, caller, caller.lock.acquire())
            self.acquired(caller, caller.lock.lease)
            await caller.release_signal
            if caller.batch:
                await self.client.release_many([caller.lease])
            else:
                with contextlib.suppress(fastlock.LockNotOwnedError):  # its lease had expired
                    await caller.lock.release()
        except asyncio.CancelledError:
            pass
        except BaseException as error:
            caller.trouble = error
        caller.phase = "gone"

    def order_release(self, caller: RealCaller) -> None:
        assert isinstance(caller, TaskCaller)
        caller.release_signal.set_result(None)

    def cancel(self, caller: RealCaller) -> None:
        assert isinstance(caller, TaskCaller)
        caller.task.cancel()

    def resume(self, token: int) -> None:
        who = next(who for who in self.handed_over() if self.number(self.handed(who)._raw_token) == token)
        assert who.resume_signal is not None, "a task that was handed a lease is not woken"
        who.resume_signal.set_result(None)

    def recheck(self) -> None:
        self.loop.end_timers(self.first().waiter.on_wake, self.transport.sweep)

    def break_lines(self, lines: list[Line]) -> None:
        for line in lines:
            self.loop.call_soon(self.byte_transports[line].protocol.connection_lost, ConnectionResetError("cut"))

    def die(self) -> None:
        """The process is killed. Here its tasks end instead, and whatever they send as they end is lost."""
        self.dead = True
        for line in self.lines:
            line.close()
        for caller in self.callers:
            if caller.task is not None:
                caller.task.cancel()
        transport, connection = self.transport, self.transport.connection
        transport.closed, transport.open_stream = True, None
        transport._stop_watching_loop()
        if connection is not None:
            self.loop.call_soon(connection.fail, ConnectionResetError("the process is killed"))
        self.loop.run_until_quiet()

    def close(self) -> None:
        self.die()
        self.loop.close()
