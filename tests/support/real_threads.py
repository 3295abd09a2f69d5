"""A client for threads under a random walk: its callers are threads, of which the walk knows when all of them sleep.

Below the real connections are streams of the test: a thread that asks the server blocks there until the walk answers.
Other threads sleep as they do in use, parked or listening, and are asleep for the walk once `on_wake` is set and they
have left the mutex of the local queues: what wakes them then is remembered. A thread gives up the interpreter only
where it blocks (`walks.py` sees to that). A thread that was handed a lease is held back where it reads the clock.
No decisions about locks are made here.
"""

from __future__ import annotations

import contextlib
import threading
from _thread import allocate_lock
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import fastlock
from fastlock import _implementation
from fastlock._stream_errors import Broken
from fastlock._transport import writing
from support.handover import ASKING
from support.real_client import REPLY_TIMEOUT, Call, Line, RealCaller, RealClient, Request, decoded
from support.run_steps import Clock

HANGS = 5.0  # seconds without any change, after which a thread that should run counts as hanging
RESTLESS = 200  # times that a thread takes the mutex in a row, after which it counts as hanging
Real = _implementation.default


class Gone(BaseException):
    """The caller was interrupted."""


class Words:
    """A template: the words of a command, and numbers in place of name, token and ms."""

    def __init__(self, *parts: bytes | int) -> None:
        self.parts = parts

    def call(self, name: bytes, token: bytes, ms: int) -> Call:
        given = name, token, b"%d" % ms
        return tuple(part if isinstance(part, bytes) else given[part] for part in self.parts)


@dataclass(eq=False)
class ThreadCaller(RealCaller):
    """A caller that is a thread. `state`: "runs" until it is known to sleep."""

    state: str = "done"
    baton: Any = field(default_factory=allocate_lock)  # on which it sleeps, where the walk wakes it
    reply: Any = None  # to its request
    error: BaseException | None = None  # that it raises instead, or where it next comes by
    answered: bool = False  # whether it runs as it got a reply: then it was not handed a lease
    pending: Any = None  # the pending reply for which it sleeps in a stream
    thread: Any = None
    restless: int = 0  # how often it came by since the walk let it run

    def __post_init__(self) -> None:
        self.baton.acquire()

    def asleep(self) -> bool:
        if self.state == "passed":
            waiter = self.waiter
            if waiter is None or self.phase != "waits" or waiter.lease is not None:
                return False
            return waiter.on_wake is not None and not waiter.woken
        if self.state == "listens":
            return not self.pending.ready
        return self.state != "runs"

    def raised(self) -> None:
        error, self.error = self.error, None
        if error is not None:
            raise error


class Stream:
    """The stream of one connection: all that is sent becomes requests on a line."""

    templates: Any = None
    commands = flushes = 0

    def __init__(self, client: ThreadClient, sock: Any) -> None:
        self.client = client
        self.on_push: Callable[[Any], object] | None = None
        self.line = Line(sock)
        self.broken = False
        self.leader: Any = None
        self.listeners: list[Any] = []
        self.greeting: list[tuple[Any, list[Call]]] = []
        client.lines.append(self.line)
        client.streams[self.line] = self

    @property
    def pending(self) -> int:
        return len(self.line.requests) + len(self.line.arrived)

    def put(self, template: Words, pending: Any, name: bytes, token: bytes, ms: int) -> None:
        self._sent([template.call(name, token, ms)], (pending, False))

    def put_many(self, template: Words, pending: Any, names: list[bytes], tokens: list[bytes], ms: int) -> None:
        self._sent([template.call(*each, ms) for each in zip(names, tokens, strict=True)], (pending, True))

    def put_command(self, pending: Any, call: Call) -> None:
        self._sent([call], (pending, False))

    def put_calls(self, pending: Any, calls: list[Call]) -> None:
        self._sent(calls, (pending, True))

    def _sent(self, calls: list[Call], pending: tuple[Any, bool]) -> Request | None:
        if self.templates is None:
            replies = [decoded(frame) for frame in self.line.execute(*calls)]
            pending[0].set_result(replies if pending[1] else replies[0])
            return None
        return self.client.intake(self.line, calls, pending)

    def round_trip(self, template: Words, name: bytes, token: bytes, ms: int, timeout: float, spin: float) -> Any:
        if self.leader is not None:
            return Real.BUSY
        caller = self.client.me()
        self.leader = caller
        try:
            self._sent([template.call(name, token, ms)], (None, False))
            return self.client.block(caller, "asks")
        finally:
            self.leader = None

    def lead(self, pending: Any, wake: Any) -> bool:
        pending.wake = None if pending.ready else wake
        if self.leader is None:
            self.leader = pending
        caller = self.client.me()
        caller.state, caller.pending, caller.reply = "listens", pending, wake
        self.client.tell()
        return self.leader is pending

    def leads(self, pending: Any) -> bool:
        caller = self.client.me()
        if pending.ready:
            self.client.runs(caller)
            caller.raised()
        return self.leader is pending

    def exchange(self, pending: Any, timeout: float, spin: float) -> bool:
        if self.templates is None:
            return True
        caller = self.client.me()
        if not pending.ready and caller.error is None and timeout > 0:
            caller.reply.acquire()  # the lock that its pending reply releases
        self.client.runs(caller)
        caller.raised()
        return True

    def resign(self, pending: Any) -> None:
        self.client.runs(self.client.me())
        if self.leader is pending:
            self.leader = None

    def listen(self, pending: Any) -> None:
        self.listeners.append(pending)

    def unlisten(self, pending: Any) -> None:
        if pending in self.listeners:
            self.listeners.remove(pending)

    def flush(self, timeout: float) -> None: ...

    def receive(self, timeout: float, spin: float) -> None:
        """Nothing: the walk delivers replies, also those for which nobody waits."""

    def usable(self) -> bool:
        return not self.broken

    def in_use_by_caller(self, locks: bool) -> bool:
        return False

    def half_changed(self) -> bool:
        return False

    def take_pending(self, into: list[Any]) -> list[Any]:
        requests = [*self.line.requests, *(request for request, _ in self.line.arrived if request is not None)]
        ahead = [pending for request in requests for _, pending in request.ahead] + [p for _, p in self.line.ahead]
        into += [pending[0] for pending in [*(r.pending for r in requests), *ahead] if pending and pending[0]]
        into += self.listeners
        self.line.requests, self.line.arrived, self.broken = [], [], True
        return into


class Mutex:
    """A mutex that tells when a thread has left it. `inner`: what it is made of."""

    def __init__(self, client: ThreadClient, inner: Any) -> None:
        self.client, self.inner = client, inner

    def mine(self) -> bool:
        return False

    def __enter__(self) -> None:
        caller = self.client.me()
        self.client.runs(caller)
        caller.raised()
        caller.restless += 1
        assert caller.restless < RESTLESS, "a thread neither asks nor sleeps"
        self.inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.inner.__exit__(*error)
        caller = self.client.me()
        caller.state = "passed"
        self.client.note_waiters()
        if caller.asleep():
            caller.answered = False
            if caller.waiter.queue.recheck_time(caller.waiter) <= self.client.clock():
                caller.state = "runs"  # its sleep ends at once
        self.client.tell()


class Marked(Mutex):
    """The mutex of the transport: a thread that has left it runs on."""

    def _is_owned(self) -> bool:
        return bool(self.inner._is_owned())

    def __exit__(self, *error: Any) -> None:
        self.inner.__exit__(*error)


class Parts:
    """The implementation that the transport uses: the real one, but for what the walk has to see."""

    PendingReply, BUSY = Real.PendingReply, Real.BUSY
    Template = Words

    def __init__(self, client: ThreadClient) -> None:
        self.SocketStream = lambda sock: Stream(client, sock)
        self.Mutex = lambda: Mutex(client, Real.Mutex())


class ThreadClient(RealClient):
    """A client for threads. In one half of the walks it has waited for another name before, so that the connection on
    which messages come is there already."""

    caller = ThreadCaller

    def __init__(self, path: str, clock: Clock, dice: Any) -> None:
        self.streams: dict[Line, Stream] = {}
        self.driver = ThreadCaller()  # stands for the thread of the walk
        self.by_thread: dict[int, ThreadCaller] = {}
        self.changed = allocate_lock()
        client = fastlock.Client.from_url(f"unix://{path}", reply_timeout=REPLY_TIMEOUT, max_connections=64)
        self.transport: Any = client._transport
        self.transport.impl = self.parts = Parts(self)
        self.callers = []
        self.lines = []
        self.transport._start()
        self.transport.queues.poll = None  # replies for which nobody waits are delivered at once
        self.transport._mutex = Marked(self, self.transport._mutex)
        super().__init__(clock, client)
        if dice.random() < 0.7:
            client.server_info()
        if dice.random() < 0.5:
            self.subscribe()

    def subscribe(self) -> None:
        transport = self.transport
        connection, _ = transport._get_connection()
        transport.push_connection, transport.push_connection_lent = connection, 1
        connection.stream.on_push, connection.subscribed = self.queues.on_push, True
        connection.stream.put_command(self.queues, (b"SUBSCRIBE", self.queues.channel))

    # the threads

    def me(self) -> ThreadCaller:
        return self.by_thread.get(threading.get_ident(), self.driver)

    def tell(self) -> None:
        with contextlib.suppress(RuntimeError):
            self.changed.release()

    def runs(self, caller: ThreadCaller) -> None:
        caller.state = "runs"
        if self.dead and caller is not self.driver:
            caller.error = Gone()

    def block(self, caller: ThreadCaller, state: str) -> Any:
        """Sleep until the walk wakes this caller. Returns the reply that it was given."""
        assert caller is not self.driver, "the walk would wait for itself"
        self.runs(caller)
        caller.raised()
        caller.state = state
        self.note_waiters()
        self.tell()
        caller.baton.acquire()
        caller.raised()
        return caller.reply

    def wake(self, caller: ThreadCaller, reply: Any = None) -> None:
        caller.state, caller.reply = "runs", reply
        caller.baton.release()

    def read_clock(self) -> float:
        caller = self.me()
        if caller is not self.driver:
            if caller.error is not None:
                self.runs(caller)
                caller.raised()
            lease = None if caller.waiter is None or caller.phase != "waits" else caller.waiter.lease
            if lease is not None and lease._confirmation is not None and not lease._confirmation.sent:
                caller.answered = True  # it believes a message, and sends the confirmation now
            if lease is not None and not caller.answered:
                self.block(caller, "held")
                caller.answered = True
        return self.clock()

    def run(self) -> None:
        for caller in [self.driver, *self.callers]:
            caller.restless = 0
        while not all(caller.asleep() for caller in self.callers):
            if not self.changed.acquire(timeout=HANGS):
                raise AssertionError("a thread sleeps on, though it was woken")
        self.lines = [line for line in self.lines if not self.streams[line].broken]

    def live(self, caller: ThreadCaller) -> None:
        self.by_thread[threading.get_ident()] = caller
        try:
            assert caller.lock.acquire()
            self.acquired(caller, caller.lock.lease)
            self.block(caller, "holds")
            if caller.batch:
                self.client.release_many([caller.lease])
            else:
                with contextlib.suppress(fastlock.LockNotOwnedError):  # its lease had lapsed
                    caller.lock.release()
        except Gone:
            pass
        except BaseException as error:
            caller.trouble = error
        caller.phase, caller.state = "gone", "done"
        self.tell()

    # what the walk does

    def start(self, caller: RealCaller) -> None:
        assert isinstance(caller, ThreadCaller)
        caller.state = "runs"
        caller.thread = threading.Thread(target=self.live, args=(caller,))
        caller.thread.start()

    def order_release(self, caller: RealCaller) -> None:
        assert isinstance(caller, ThreadCaller)
        self.wake(caller)

    def cancel(self, caller: RealCaller) -> None:
        assert isinstance(caller, ThreadCaller)
        caller.error = Gone()
        self.rouse(caller)

    def rouse(self, caller: ThreadCaller) -> None:
        """End a caller's sleep, whatever it sleeps for."""
        if caller.state in ("asks", "held", "holds"):
            self.wake(caller)
        elif caller.state != "done":
            waiter = caller.waiter
            wake = caller.pending.set_result if caller.state == "listens" else None
            if wake is None and waiter is not None:
                wake = waiter.on_wake or self.queues.pending_wake  # which a mistake may have left there
            caller.state = "runs"
            if wake is not None:
                wake(None)

    def resume(self, token: int) -> None:
        self.wake(next(who for who in self.handed_over() if self.number(self.handed(who)._raw_token) == token))

    def recheck(self) -> None:
        self.rouse(self.first())

    def deliver(self, request: Request, frames: list[bytes]) -> None:
        replies = [decoded(frame) for frame in frames]
        for _, ahead in request.ahead:
            answer = replies.pop(0)
            if ahead[0] is not None:
                ahead[0].set_result(answer)
        pending, many = request.pending
        if pending is not None:
            for caller in self.callers:
                if caller.state == "listens" and caller.pending is pending:
                    caller.state, caller.answered = "runs", True
            pending.set_result(replies if many else replies[0])
        elif request.asker is not None and request.asker.state == "asks":
            request.asker.answered = True
            self.wake(request.asker, replies[0])

    def push(self, line: Line, frame: bytes) -> None:
        stream = self.streams[line]
        if stream.leader is not None:  # else no thread reads there
            assert stream.on_push is not None
            stream.on_push(decoded(frame))

    def intake(self, line: Line, calls: list[Call], pending: Any = None) -> Request | None:
        request = super().intake(line, calls, pending)
        if request is not None:
            request.asker, request.sender_known = self.me(), True
            if request.verb in ("SET", *ASKING, "EXTEND"):
                request.caller = request.asker
        return request

    def break_lines(self, lines: list[Line]) -> None:
        asking = [caller for caller in self.callers if caller.state == "asks"]
        reading = [caller for caller in self.callers if caller.state == "listens"]
        for connection in list(self.transport.connections):
            if connection.stream.leader is None:
                connection.fail(Broken("cut"))  # as who uses it next would find
        for caller in asking + reading:
            caller.error = Broken("cut")
        for caller in reading:
            caller.state = "runs"
            caller.reply.release()
        for caller in asking:
            self.wake(caller)
        self.run()
        self.transport.flush_pending_undos()  # another caller uses the client: undos do not wait for ever

    def die(self) -> None:
        self.dead = True
        for line in self.lines:
            line.close()
        for connection in list(self.transport.connections):
            connection.failed = True
            connection.error = Broken("dead")
        for caller in self.callers:
            if caller.state != "done":
                caller.error = Gone()
                self.rouse(caller)
        for caller in self.callers:
            if caller.thread is not None:
                caller.thread.join()
        self.transport.pending_undos.clear()
        self.lines = []

    def close(self) -> None:
        self.die()
        self.transport.closed = True
        for key in [key for key in writing._TEMPLATES if key[0] is self.parts]:
            del writing._TEMPLATES[key]
