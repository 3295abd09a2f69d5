"""Wire: how a task waits. One connection to one server, shared by the tasks of an event loop.

Never here: decisions about locks, the content of frames.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import math
import os
import threading
import weakref
from collections.abc import AsyncGenerator
from types import ModuleType
from typing import Any

from fastlock import _errors as errors
from fastlock import _law as law
from fastlock import _session as session
from fastlock._aio_link import Link
from fastlock._broken import Broken, NoReply, broken, by_handler
from fastlock._common import Common
from fastlock._fork import at_fork, check
from fastlock._gate import LOOK, Gates
from fastlock._lease import now
from fastlock._link import FAILED, PARTING, removed
from fastlock._sockets import tune_socket
from fastlock._stats import Stats
from fastlock._steps import BEHIND, LATE, Capabilities, Distrust, Join, Leave, Lost, Sleep, Steps, Undo, Wait, backoff
from fastlock._topology import Settings
from fastlock._turns import Turn, Turns


class Wire(Common):
    """The connection of one client, and how its tasks wait."""

    def __init__(self, settings: Settings, impl: ModuleType) -> None:
        self.settings = settings
        self.impl = impl
        self.closed = False
        self.warned = False  # that something was refused which nobody waits for
        self._met = False  # whether there ever was a connection: before that an error is a wrong setting, not an outage
        self._start()
        _WIRES.add(self)

    def _start(self) -> None:
        self.debts: list[Undo] = []
        self.put_offs: dict[Undo, asyncio.TimerHandle] = {}  # what is owed, and is said when its timer ends
        self.link: Link | None = None  # the connection, if there is one now
        self.open_pipe: Any = None  # its pipe, as long as commands may be queued there
        self.loop: asyncio.AbstractEventLoop | None = None  # to which the client belongs, until that is closed
        self.turns: Any = None  # of that loop
        self._binding = threading.Lock()
        self._end: Any = None  # closed by the loop when it comes to its end: see `_at_end`
        self._connecting: asyncio.Task[Link] | None = None
        self._sleeping: set[Turn] = set()
        self.releases = 0  # under way, of those that take more than one command
        self._broken = False  # a connection that has had no successor yet
        self._failures = 0  # to connect, in a row
        self.stats = Stats()
        self.gates = Gates(self.impl.Mutex(), self.stats)  # of no use, but faster than what does nothing
        self.crowd = self.gates.by_key  # names for which somebody waits
        self.alarms: dict[float, Any] = {}  # of the compiled hot path, by the time that they give
        self.ticks: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Before anything is done: all that is kept here is this process's, and the running loop's."""
        check()
        loop = asyncio._get_running_loop()
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
                    raise errors.made(
                        RuntimeError(
                            "this fastlock.asyncio.Client belongs to another event loop, which is not closed: make "
                            "one client for each loop, or give all that use this one the same loop (of pytest-asyncio "
                            'loop_scope="session"); code without `async` is better served by fastlock.Client'
                        )
                    )
                self._leave_loop()
            self.loop, self.turns = loop, Turns(loop)
            self._end = _at_end(weakref.ref(self))
            with contextlib.suppress(StopIteration):
                self._end.asend(None).send(None)  # where it waits for that

    async def part(self) -> None:
        """The loop comes to its end: what is owed is said, and the connection closed, as nobody else would."""
        self._end = None
        try:
            await self._pay()
        finally:
            if self.link is not None and self.link.dead is None:
                await self._part_from(self.link, EOFError("its event loop ends"))

    def _leave_loop(self) -> None:
        """Those who waited in the loop are gone, and the connection. Leases stay, and what is owed."""
        self._unwatch()
        self._no_longer_put_off()
        link, self.link, self.open_pipe = self.link, None, None
        if link is not None:
            link.fail(EOFError("its event loop has ended"))
        self._connecting = None
        self._sleeping.clear()
        self.gates.forget()
        self.gates = Gates(self.impl.Mutex(), self.stats)
        self.crowd = self.gates.by_key
        self.alarms = {}
        self.ticks = None

    def _unwatch(self) -> None:
        """The end of the loop is of no more interest."""
        end, self._end = self._end, None
        if end is not None:
            with contextlib.suppress(StopIteration, RuntimeError):  # which runs already
                end.aclose().send(None)

    async def release(
        self, lock: Any, owner: Any, op: Any, answer: Any, leaving: bool, error: BaseException | None
    ) -> None:
        """A release that the hot path hands on: from its start, of an owner's lease, None: the caller's; or with `op`
        from its answer."""
        self.releases += 1
        try:
            if op is None:
                self.begin()
                await self.run(lock.releasing(owner))
            elif answer is BEHIND:
                await self.run(op, answer)
            else:
                await self.go_on(op, answer)
        except errors.RedisError as problem:
            if not leaving:
                raise
            lock.left(error, problem)
        except asyncio.CancelledError:
            await self.said()
            raise
        finally:
            self.releases -= 1

    async def said(self) -> None:
        """A client that is closed says at once what it owes: nobody else would."""
        if self.closed:
            await self._last_words(asyncio.get_running_loop())

    async def run(self, op: Any, answer: Any = None) -> Any:
        """Carry out an `Acquire` or `Release`; returns its outcome, raises its errors. answer: from which to go on, a
        Waiter; BEHIND: those who wait were asked already."""
        try:
            self.begin()
            if answer is None:
                answer = op.local(self.gates, now())
            if answer is None or (answer is BEHIND and isinstance(op, law.Release)):
                answer = await self._ask(op)
            return await self.drive(op.rest(answer, now))
        except BaseException as error:  # also as `drive` is entered, when the server has granted already
            try:
                self.interrupted(op, error)
            except BaseException as again:
                self.interrupted(op, again)
                raise
            raise

    async def go_on(self, op: Any, answer: Any) -> Any:
        """Carry out an `Acquire` or `Release` from an answer that was asked for already."""
        try:
            return await self.drive(op.rest(answer, now))
        except BaseException as error:
            try:
                self.interrupted(op, error)
            except BaseException as again:
                self.interrupted(op, again)
                raise
            raise

    def struck(self, error: BaseException | None) -> bool:
        """As of threads; but who is cancelled leaves what it has where it waits. Not so who is collected with its loop:
        what it waits in may have been collected before."""
        return not isinstance(error, asyncio.CancelledError) and super().struck(error)

    def interrupted_in_many(self, leases: Any, released: list[Any], error: BaseException) -> None:
        """As of threads; and who is cancelled may have sent nothing yet, as it waits for a connection."""
        super().interrupted_in_many(leases, released, error)
        if isinstance(error, asyncio.CancelledError):
            for undo in law.LetGo(leases, released).abandon(self.gates, now):
                self.undo(undo)

    async def drive(self, steps: Steps) -> Any:
        """Carry out an operation of the law; returns its outcome, raises its errors."""
        self.begin()
        answer = None
        try:
            while True:
                try:
                    step = steps.send(answer)
                except StopIteration as end:
                    return end.value
                answer = await self._perform(step)
        except BaseException as error:
            # It raises this again: at once if it is over, else after what it leaves to be undone
            undo = steps.throw(error)
            while True:
                try:
                    self.undo(undo)
                except BaseException:  # struck once more
                    self.undo(undo)
                    raise
                undo = steps.send(None)

    async def _perform(self, step: Any) -> Any:
        kind = type(step)
        if kind is Sleep:
            await self._sleep(step.seconds)
        elif kind is Wait:
            await self._wait(step.waiter, step.until)
        elif kind is Join:
            self.gates.join(step.waiter, now())
        elif kind is Undo or kind is Leave:
            self.undo(step)
        elif kind is Distrust:
            text = f"{self.settings.place}: a reply that makes no sense: {step.reply!r:.80}"
            error = errors.made(errors.InvalidResponse(text))
            step.ask.link.fail(error)
            patience, broken = self.settings.reply_timeout, step.ask.link.session
            return Lost(error, patience, sent=True, session=broken, own=True)
        else:
            return await self._ask(step)
        return None

    async def _ask(self, ask: Any) -> Any:
        if not (self.closed and ask.parting):
            return await self._asked(ask)
        link = self.link
        if link is not None and link.dead is None:  # which is closed when this is done
            return await self.answered(ask, link)
        try:
            return await self._ask_alone(ask)
        except asyncio.CancelledError:
            self._carry_out(ask)
            await self.said()
            raise

    async def _ask_alone(self, ask: Any) -> Any:
        """Over a connection for that alone."""
        link = None
        try:
            link = await self._connect(asyncio.get_running_loop(), last=True)
            return await self.answered(ask, link)
        except FAILED as error:
            if by_handler(error):
                raise
            return self._lost(error)
        finally:
            if link is not None:
                await self._part_from(link, errors.ClientClosedError("this client was closed"))

    async def _asked(self, ask: Any) -> Any:
        try:
            link = await self._connected(ask.until)
        except FAILED as error:
            if by_handler(error):
                raise
            return self._lost(error)
        except asyncio.CancelledError:
            self._carry_out(ask)
            raise
        return await self.answered(ask, link)

    def _carry_out(self, ask: Any) -> None:
        """A release whose caller is cancelled before it was sent: who leaves a `with` does not try again."""
        if isinstance(ask, law.Release):
            ask.sent = ask.sent or now()
            self.undo(ask.undo())

    def _lost(self, error: BaseException) -> Lost:
        known = errors.broken(error, self.settings.place)
        refused = isinstance(known, (errors.AuthenticationError, errors.ResponseError, errors.InvalidResponse))
        final = refused or self.closed or not (self._met or self.settings.patient)
        return Lost(known, self.settings.reply_timeout, sent=False, final=final)

    async def answered(self, ask: Any, link: Link) -> Any:
        """The answer to a step over that connection; `Lost`, if it breaks; LATE, when it was not there in time."""
        if type(ask) is Capabilities:
            return link.session
        if link.dead is not None:  # since the connecting ended, a tick ago
            return Lost(link.dead, self.settings.reply_timeout, sent=False)
        turn = link.ask(ask)
        timer = None
        if ask.until is not None:
            timer = link.loop.call_later(max(0.0, ask.until - now()), turn, LATE)
        try:
            answer = await turn
            if answer is LATE:
                link.leave(ask, ask.sent)
            return answer
        except BaseException:
            try:
                link.leave(ask, ask.sent)
            except BaseException:  # struck once more
                link.leave(ask, ask.sent)
                raise
            raise
        finally:
            if timer is not None:
                timer.cancel()

    def owe(self, undo: Undo) -> None:
        """Keep it for the next connection, and none of those that are gone."""
        self.debts.append(undo)
        undo.link = undo.said = None

    def put_off(self, undo: Undo, seconds: float) -> None:
        """Say it so much later: the server can do nothing now."""
        undo.said = None
        if self.closed:  # no timer is left to the loop
            self.owe(undo)
        elif self.loop is not None:
            self.put_offs[undo] = self.loop.call_later(seconds, self._say, undo)

    def _say(self, undo: Undo) -> None:
        self.undo(undo)
        self.put_offs.pop(undo, None)  # last: said twice it does no harm

    def _no_longer_put_off(self) -> None:
        """No timer will end any more: what was put off is owed as the rest."""
        put_offs, self.put_offs = self.put_offs, {}
        for undo, timer in put_offs.items():
            timer.cancel()
            self.owe(undo)

    async def _pay(self) -> None:
        """Have said what is owed, if that takes a new connection and no more than a second."""
        self._no_longer_put_off()
        if self.debts and self._met:
            try:
                self._post_debts(await asyncio.wait_for(self._connected(), PARTING))
            except Exception as error:  # also a provider's: what is owed stays so
                if by_handler(error):
                    raise

    def _post_debts(self, link: Link) -> None:
        for undo in list(self.debts):
            link.post(undo)
            self.debts.remove(undo)  # last: who is struck in between says it twice, which does no harm

    def undo(self, undo: Undo) -> None:
        """Have something said that nobody waits for; over the next connection, when there is none."""
        if undo.link is not None and undo.link.dead is not None:
            undo.outlived(undo.link.session)
        if self.link is not None and self.link.loop is not asyncio._get_running_loop():
            with contextlib.suppress(RuntimeError):  # that loop is closed: for the next one
                self.link.loop.call_soon_threadsafe(self.undo, undo)
                return
            self.owe(undo)
        elif self.link is not None:
            self.link.post(undo)
        else:
            self.owe(undo)
            self._reconnect()

    async def _wait(self, waiter: Any, until: float | None) -> None:
        """Sleep until the waiter is called, or its time has come."""
        if self.closed:
            raise errors.ClientClosedError("this client was closed")
        if waiter.called:
            waiter.called = False
            return
        at = waiter.gate.wake_at(waiter)
        if until is not None and until < at:
            at = until
        loop = asyncio.get_running_loop()
        waiter.wake = turn = Turn().begin(self.turns)
        timer = loop.call_later(max(0.0, at - now()), turn, None) if at < math.inf else None
        self.tick()
        try:
            await turn
        finally:
            waiter.wake, waiter.called = None, False
            if timer is not None:
                timer.cancel()
        if self.closed:
            raise errors.ClientClosedError("this client was closed")

    def tick(self, over: bool = False) -> None:
        """While anybody waits, see every second whether a lease that goes round here has lapsed."""
        if self.loop is not None and (over or self.ticks is None):
            self.ticks = None
            try:
                self._tick_later(self.loop)
            except BaseException:  # a signal's handler raised, but all wait still
                self._tick_later(self.loop)
                raise
        if over and self.turns is not None:
            self.turns.again()
            self.gates.lapsed(now())

    def _tick_later(self, loop: asyncio.AbstractEventLoop) -> None:
        if self.ticks is None and self.crowd and not self.closed:
            self.ticks = loop.call_later(LOOK, self.tick, True)

    async def _sleep(self, seconds: float) -> None:
        """Sleep, but wake when the client is closed."""
        if self.closed:
            return
        turn = Turn().begin(self.turns)
        timer = asyncio.get_running_loop().call_later(seconds, turn, None)
        self._sleeping.add(turn)
        try:
            await turn
        finally:
            timer.cancel()
            self._sleeping.discard(turn)

    # the connection

    async def _connected(self, until: float | None = None) -> Link:
        if self.closed:
            raise errors.ClientClosedError("this client is closed")
        if self.link is not None and self.link.dead is not None:
            self.link.fail(self.link.dead)  # whoever did was interrupted in it
        if self.link is not None:
            return self.link
        loop = asyncio.get_running_loop()
        task = self._connect_task(loop)
        try:
            async with asyncio.timeout(None if until is None else max(PARTING, until - now())) as limit:
                return await asyncio.shield(task)
        except TimeoutError:
            if limit.expired():  # others may still wait for it
                raise NoReply("no connection came up in time") from None
            raise
        except asyncio.CancelledError:
            if task.cancelled() and self._connecting is None and self.closed:
                raise errors.ClientClosedError("this client was closed") from None
            raise

    def _connect_task(self, loop: asyncio.AbstractEventLoop) -> asyncio.Task[Link]:
        if self._connecting is None or self._connecting.done():  # whoever was to note that was interrupted
            self._connecting = loop.create_task(self._connect(loop), name="fastlock: connect")
            self._connecting.add_done_callback(self._connect_done)
        return self._connecting

    def _connect_done(self, task: asyncio.Task[Link]) -> None:
        if self._connecting is task:
            self._connecting = None
        failed = task.cancelled() or task.exception() is not None  # whoever waits has it, if anybody does
        self._failures = self._failures + 1 if failed else 0
        if failed and self.debts:  # nobody has to use the client again for what it owes
            task.get_loop().call_later(backoff(self._failures), self._reconnect)

    async def _connect(self, loop: asyncio.AbstractEventLoop, last: bool = False) -> Link:
        """last: for what is owed by a client that is closed."""
        settings = self.settings
        credentials = await settings.credentials_async()  # a provider's time is its own
        link = Link(self, loop)
        try:
            async with asyncio.timeout(settings.connect_timeout):
                if settings.path is not None:
                    await loop.create_unix_connection(lambda: link, settings.path)
                else:
                    host, port = settings.address()
                    await loop.create_connection(
                        lambda: link, host, port, ssl=settings.tls, server_hostname=host if settings.tls else None
                    )
                    tune_socket(link.transport.get_extra_info("socket"), settings)
                await link.greet(settings, credentials)
            if self.closed and not last:
                raise errors.ClientClosedError("this client is closed")
            if self.link is not None and self.link.dead is None and not last:
                link.fail(Broken("another was first"))  # whoever began that was interrupted before it was noted
                return self.link
            self._opened(link)
        except OSError as error:
            link.fail(error)
            if by_handler(error):
                raise
            raise broken(error) from error
        except BaseException as error:
            link.fail(error if isinstance(error, Exception) else Broken("connecting was given up"))
            raise
        return link

    def _opened(self, link: Link) -> None:
        self.stats.reconnects += self._broken
        self._broken = False
        if not self._met:
            self._met = True
            session.warn_of_eviction(link.session, self.settings.place)
        self.link = link
        self.open_pipe = None if self.closed else link.pipe
        self._post_debts(link)

    def _reconnect(self) -> None:
        """Somebody is owed an undo: connect for that alone, if nobody else does or did."""
        loop = self.loop
        if (
            not self.closed
            and self.link is None
            and self._met
            and self._end is not None  # the loop has not come to its end
            and loop is not None
            and loop is asyncio._get_running_loop()
            and not loop.is_closed()
        ):
            self._connect_task(loop)

    def dropped(self, link: Link) -> None:
        """A connection broke."""
        if self.link is link:
            self.link = self.open_pipe = None
            self._broken = True
        if self.debts and link.session is not None:
            self._reconnect()

    async def close(self) -> None:
        """End the connection, after what is in flight was answered (a second at most), and say what is owed (another
        one, or two, where the server does not answer); who waits gets ClientClosedError."""
        check()
        loop = asyncio.get_running_loop()
        if self.loop is not None:
            self._bind(loop)  # says so where another one has it
        try:
            if self.loop is not None:
                await asyncio.sleep(0)  # a release whose task was just made has begun
                await self._pay()
        finally:
            await self._shut()
            await self._last_words(loop)

    async def _last_words(self, loop: asyncio.AbstractEventLoop) -> None:
        """What is owed by a client that is closed, as nobody else would say it."""
        self._no_longer_put_off()
        while self.debts and self._met:
            owed = list(self.debts)
            try:
                link = await asyncio.wait_for(self._connect(loop, last=True), PARTING)
                await self._part_from(link, errors.ClientClosedError("this client was closed"))
            except Exception as error:  # also a provider's
                if by_handler(error):
                    raise
            left = [undo for undo in owed if removed(self.debts, undo)]
            session.warn_of_debts(self, left)

    async def _part_from(self, link: Link, error: Exception) -> None:
        """End a connection, after all that is in flight was answered."""
        try:
            await link.settle()
        finally:
            if self.link is link:
                self.link = self.open_pipe = None
            link.fail(error)
        await asyncio.sleep(0)  # the transport closes its socket in the next tick

    async def _shut(self) -> None:
        self.closed = True
        self.open_pipe = None
        self._unwatch()
        link = self.link
        connecting = self._connecting
        if connecting is not None:
            connecting.cancel()
        for turn in list(self._sleeping):
            turn(None)
        self.gates.call_all()
        until = now() + PARTING
        while self._busy() and link is not None and link.dead is None and now() < until:
            await asyncio.sleep(0)  # each leaves the queue as it goes, and releases hand over to others
        if connecting is not None:
            await asyncio.wait([connecting], timeout=PARTING)
            await asyncio.sleep(0)  # its transport closes its socket in the next tick
        if link is not None:
            await self._part_from(link, errors.ClientClosedError("this client was closed"))
        self.end_alarms()

    def _busy(self) -> bool:
        """Whether tasks have something to say yet: who waited, who releases, and who was answered and does not run."""
        return bool(self.gates.by_place or self.releases > 0 or (self.turns is not None and self.turns.over))

    def end_alarms(self) -> None:
        """Nobody waits any more: no timer is left to the loop."""
        for alarm in self.alarms.values():
            alarm.cancel()

    def abandon(self) -> None:
        """Nobody holds the client any more, in whatever thread that came out: its loop closes the connection."""
        check()
        link, self.closed, self.open_pipe = self.link, True, None
        self._unwatch()
        if link is not None and link.dead is None and link.loop.is_closed():
            link.fail(errors.ClientClosedError("nobody holds this client"))
        elif link is not None and link.dead is None:
            with contextlib.suppress(RuntimeError):  # the loop is closed in this very moment
                link.loop.call_soon_threadsafe(link.fail, errors.ClientClosedError("nobody holds this client"))

    def forget_parent(self) -> None:
        """In a forked child: the parent's connection, debts and loop are not ours; nothing is said on its socket."""
        link = self.link
        if link is not None and link.transport is not None:
            sock = link.transport.get_extra_info("socket")
            if sock is not None and sock.fileno() >= 0:
                null = os.open(os.devnull, os.O_RDWR)
                os.dup2(null, sock.fileno())  # the number stays taken, until the transport gives it back
                os.close(null)
        self._unwatch()
        self._start()


async def _at_end(wire: weakref.ref[Wire]) -> AsyncGenerator[None, None]:
    """A loop that comes to its end closes the asynchronous generators that began in it, under asyncio.run and all that
    do as it does: there is no other way to hear of it while something can still be said."""
    try:
        yield
    finally:
        found = wire()
        if found is not None and found._end is not None:
            await found.part()


_WIRES: weakref.WeakSet[Wire] = weakref.WeakSet()


def _forget_parent() -> None:
    for wire in list(_WIRES):
        wire.forget_parent()


def _settle() -> None:
    """The interpreter ends: connections whose loop was closed, which nobody else closes."""
    check()
    for wire in list(_WIRES):
        if wire.link is not None and wire.link.loop.is_closed():
            wire.abandon()


at_fork(_forget_parent)
atexit.register(_settle)
