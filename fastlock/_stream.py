"""The stream without I/O, in Python: commands into one growing buffer, replies in order to whoever waits for them.

The same as `_stream.pxi` with `_template.pxi`, `_buffer.pxi` and `_pending.pxi`. Methods are atomic towards other
threads by a mutex. Never here: a socket, an event loop.
"""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from hiredis import ProtocolError, PushNotification, Reader

from fastlock._filter import ReplyFilter
from fastlock._limits import MAX_DEPTH, MAX_FRAME
from fastlock._native import RLock
from fastlock._stream_errors import REFUSALS, by_handler

_LARGE = re.compile(rb"[$=!*%~>|][0-9]{4}")  # a header that may announce more than a reply may have: to be filtered
_NOTHING = object()  # what the reader returns while a reply is incomplete: False is a value of RESP3


class Template:
    """A command with placeholders, encoded once. Parts are bytes (literal arguments) or placeholders: 0 for the name,
    1 for the token, 2 for the milliseconds."""

    __slots__ = ("_format", "_placeholders", "parts")

    def __init__(self, *parts: bytes | int) -> None:
        if not 0 < len(parts) <= 16:
            raise ValueError("a template has 1 to 16 parts")
        self.parts = parts
        text, placeholders = b"*%d\r\n" % len(parts), []
        for part in parts:
            if isinstance(part, bytes):
                text += b"$%d\r\n%b\r\n" % (len(part), part.replace(b"%", b"%%"))
            elif part in (0, 1, 2):
                text += b"$%d\r\n%b\r\n"
                placeholders.append(part)
            else:
                raise ValueError(f"a template's part is bytes or 0, 1, 2, not {part!r}")
        if len(placeholders) > 7:
            raise ValueError("a template has too many placeholders")
        self._format = text
        self._placeholders = tuple(placeholders)

    def _encode(self, name: bytes, token: bytes, ms: int) -> bytes:
        values = (as_bytes(name), as_bytes(token), b"%d" % ms)
        filled: list[Any] = []
        for placeholder in self._placeholders:
            value = values[placeholder]
            filled += (len(value), value)
        return self._format % tuple(filled)


class PendingReply:
    """What a thread waits for: `reply` once `ready`; `wake` is the lock on which the thread sleeps, if it sleeps."""

    __slots__ = ("_thread", "cancelled", "ready", "reply", "wake")

    def __init__(self) -> None:
        self._thread = threading.get_ident()  # the thread that waits for the reply
        self.reply: object = None
        self.wake: Any = None
        self.ready = self.cancelled = False

    def done(self) -> bool:
        return self.ready

    def set_result(self, reply: object) -> None:
        self.reply = reply
        self.ready = True
        wake, self.wake = self.wake, None
        if wake is not None:
            try:  # no call before that of `release`: it could be interrupted, and the thread would not be woken
                wake.release()
            except RuntimeError as error:  # woken before: by the leader that passed leadership on
                if by_handler(error):
                    raise


class _Many:
    __slots__ = ("missing", "pending_reply", "replies")

    def __init__(self, pending_reply: Pending | None, count: int) -> None:
        self.pending_reply = pending_reply
        self.replies: list[Any] = []
        self.missing = count


class ReleaseRun:
    """Releases that follow one another, sent as one script: what stands for all of them in the order of replies, and
    among the bytes to be sent."""

    __slots__ = ("_script", "_stream", "_template", "entries")

    def __init__(self, stream: Stream, template: Template, script: bytes) -> None:
        self._stream = stream
        self._template = template  # of a single one
        self._script = script  # the SHA1 of the script
        self.entries: list[tuple[Pending | None, bytes, bytes]] = []  # of each: its pending reply, name, token

    def encode(self) -> bytes:
        """The script that does them all; or, of a single one, its command."""
        _, names, tokens = zip(*self.entries, strict=True)
        if len(names) == 1:
            return self._template._encode(names[0], tokens[0], 0)
        return _packed((b"EVALSHA", self._script, b"%d" % len(names), *names, *tokens))

    def done(self) -> bool:
        return False

    def set_result(self, reply: Any) -> None:
        """Pass on each release's reply: 1 or 0; None: it was not executed, as the script failed."""
        count = len(self.entries)
        if count == 1:
            reply = [reply]
        elif isinstance(reply, Exception):
            if str(reply).startswith(REFUSALS):
                self._stream.release_script = None  # a name that the user may not release fails the others
            reply = [None] * count
        if type(reply) is not list or len(reply) != count:
            raise ProtocolError(f"a script that released {count} locks replied {reply!r:.80}")
        for (pending_reply, _, _), each in zip(self.entries, reply, strict=True):
            if pending_reply is not None and not pending_reply.done():
                pending_reply.set_result(each)


class Pending(Protocol):
    """What waits for a reply."""

    def done(self) -> bool:
        """Whether it waits no longer."""

    def set_result(self, reply: Any, /) -> object:
        """Take the reply."""


class Stream:
    """One connection's bytes: commands out, replies in, in order, each to its pending reply. `SocketStream` and
    `TaskStream` carry them.

    A pending reply is a `PendingReply`, a future, or anything with `done()` and `set_result(reply)`; None ignores the
    reply. Error replies are results, too (`hiredis.ReplyError`). Push messages go to `on_push`.
    """

    def __init__(self) -> None:
        self._reader = Reader(notEnoughData=_NOTHING)
        self._filter = ReplyFilter()
        self._mutex = RLock()
        self._out: list[Any] = []  # bytes, and of a stream of tasks ReleaseRun
        self._pending_replies: deque[Any] = deque()
        self._missing = 0  # replies that have not come, one for each command
        self.commands = self.flushes = 0  # commands queued, and batches of them sent, since the stream was made
        self._partial = 0  # bytes of the reply that is incomplete
        self.on_push: Callable[[Any], object] | None = None  # gets the push messages
        self._pushes: list[Any] = []
        self.broken = False
        self._out_of_step = False  # replies were lost: no thread may read on, the connection must be closed
        self.templates: tuple[Template, ...] = ()  # the command table of its server
        self.release_script: bytes | None = None  # the SHA1 of the script as which releases are sent, where they are

    # encode

    def put(self, template: Template, pending_reply: Pending | None, name: bytes, token: bytes, ms: int) -> None:
        """Queue one command; its reply goes to `pending_reply`."""
        data = template._encode(name, token, ms)
        self._queue(data, pending_reply, 1)

    def put_many(
        self, template: Template, pending_reply: Pending | None, names: list[bytes], tokens: list[bytes], ms: int
    ) -> None:
        """Queue one command per name; `pending_reply` gets the list of replies, in order."""
        if not names:
            raise ValueError("no names")
        if len(tokens) != len(names):
            raise ValueError(f"{len(names)} names but {len(tokens)} tokens")
        encode = template._encode
        data = b"".join([encode(name, token, ms) for name, token in zip(names, tokens, strict=True)])
        self._queue(data, _Many(pending_reply, len(names)), len(names))

    def put_command(self, pending_reply: Pending | None, args: tuple[bytes, ...]) -> None:
        """Queue any command, given as bytes; its reply goes to `pending_reply`."""
        data = _packed(args)
        self._queue(data, pending_reply, 1)

    def put_calls(self, pending_reply: Pending | None, calls: list[tuple[bytes, ...]]) -> None:
        """Queue any commands; `pending_reply` gets the list of replies, in order."""
        if not calls:
            raise ValueError("no calls")
        data = b"".join([_packed(args) for args in calls])
        self._queue(data, _Many(pending_reply, len(calls)), len(calls))

    def _queue(self, data: bytes, pending_reply: Pending | _Many | None, replies: int) -> None:
        with self._mutex:
            self._append(data, pending_reply, replies)

    def _append(self, data: bytes | ReleaseRun, pending_reply: Pending | _Many | None, replies: int) -> None:
        try:
            self._pending_replies.append(pending_reply)
            self._missing += replies
            self.commands += replies
            self._out.append(data)
        except BaseException:  # interrupted half-way
            self.broken = True
            raise

    def take_output(self) -> bytes:
        """The bytes to be sent, which the caller is to send: they are not kept here."""
        self.flushes += 1
        with self._mutex:
            data = b"".join([each.encode() if type(each) is ReleaseRun else each for each in self._out])
            self._out.clear()
        return data

    # order

    @property
    def pending(self) -> int:
        """How many pending replies there are."""
        return len(self._pending_replies)

    @property
    def unsent(self) -> int:
        """Bytes queued and not yet taken to be sent, without releases that are put off."""
        with self._mutex:
            return sum(len(each) for each in self._out if type(each) is bytes)

    def take_pending(self, into: list[Any]) -> list[Any]:
        """Move every pending reply into that list, in order, and return it; none is pending afterwards, and bytes that
        were not sent are dropped. A caller that is interrupted in it calls again, and may find some twice."""
        with self._mutex:
            into += self._getters()
            self._pending_replies.clear()
            self._out.clear()
            self._missing = 0
        return into

    def _getters(self) -> list[Any]:
        """What gets each reply, or list of replies, that has not come, in order."""
        getters: list[Any] = []
        for each in self._pending_replies.copy() if self._pending_replies else ():
            if type(each) is ReleaseRun:
                getters += [pending_reply for pending_reply, _, _ in each.entries]
            else:
                getters.append(each.pending_reply if type(each) is _Many else each)
        return getters

    # replies

    def _within_reply(self) -> bool:
        """Whether the rest of a reply is still to come."""
        return self._partial > 0 or self._filter.within()

    def expect_long(self) -> None:
        """Let long replies pass from now on, which no command of a lock has."""
        self._filter.expect_long()

    def feed(self, data: Any) -> None:
        """Parse bytes from the server. ProtocolError: they make no sense, the connection must be closed."""
        if self._out_of_step:
            raise ProtocolError("the connection is out of step: bytes were lost, or made no sense")
        try:
            for reply in self._understood(data):
                self._deliver(reply)
            if self._pushes:
                pushes, self._pushes = self._pushes, []
                for push in pushes:
                    if self.on_push is not None:
                        self.on_push(push)
        except BaseException:
            self.broken = self._out_of_step = True
            raise

    def _understood(self, data: Any) -> list[Any]:
        """Parse all of a chunk before any reply is delivered: one reply too many makes those beside it suspect."""
        plain = not self._filter.within() and data[-1:] == b"\n" and _LARGE.search(data) is None
        if not plain:
            data = self._filter.passed(bytes(data))
        self._reader.feed(data)
        self._partial += len(data)
        replies: list[Any] = []
        while (reply := self._next()) is not _NOTHING:
            self._partial = 0
            kind = type(reply)
            if kind is PushNotification and reply[:1] != [b"subscribe"]:  # that is the reply to SUBSCRIBE
                self._pushes.append(reply)
                continue
            if kind is list or kind is dict:
                _check_depth(reply, MAX_DEPTH)
            replies.append(reply)
        if self._partial > self._filter.longest + MAX_FRAME:
            raise ProtocolError(f"a reply of more than {self._filter.longest + MAX_FRAME} bytes")
        if plain and self._reader.has_data():
            self._filter.passed(bytes(data))  # the chunk ends within a string: the filter has to know where
        with self._mutex:
            if len(replies) > self._missing:
                raise ProtocolError(f"a reply that nobody asked for, among {replies!r:.80}")
            self._missing -= len(replies)
        return replies

    def _next(self) -> Any:
        try:
            return self._reader.gets()
        except TypeError as error:  # a map whose key is a list or a map
            raise ProtocolError(f"a reply that makes no sense: {error}") from None

    def _deliver(self, reply: object) -> None:
        with self._mutex:
            if not self._pending_replies:  # they were taken, as the connection failed meanwhile
                return
            pending_reply = self._pending_replies[0]
            if type(pending_reply) is _Many:
                pending_reply.replies.append(reply)
                pending_reply.missing -= 1
                if pending_reply.missing:
                    return
                reply = pending_reply.replies
        getter = pending_reply.pending_reply if type(pending_reply) is _Many else pending_reply
        if getter is not None and not getter.done():
            getter.set_result(reply)
        with self._mutex:  # only now: if a signal handler raised in `set_result`, `take_pending` still finds it
            if self._pending_replies and self._pending_replies[0] is pending_reply:
                self._pending_replies.popleft()


def _packed(args: tuple[bytes, ...]) -> bytes:
    return b"*%d\r\n" % len(args) + b"".join([b"$%d\r\n%b\r\n" % (len(as_bytes(arg)), arg) for arg in args])


def as_bytes(value: object) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError(f"bytes expected, not {type(value).__name__}")
    return value


def _check_depth(reply: list[Any] | dict[Any, Any], left: int) -> None:
    if not left:
        raise ProtocolError("a reply nested too deeply")
    for item in reply.values() if isinstance(reply, dict) else reply:
        if type(item) is list or type(item) is dict:
            _check_depth(item, left - 1)
