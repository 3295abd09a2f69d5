"""What both transports do with a connection: write requests and undos into its stream, and count an item out of a list.

Never here: how to wait, decisions, the content of frames (the protocol's).
"""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from hiredis import ProtocolError

from fastlock import _errors as errors
from fastlock._protocol import commands, handshake
from fastlock._protocol.steps import Command, CommandBatch, RawCommands, Request
from fastlock._stream_errors import Broken, by_handler
from fastlock._transport.undo_delivery import UndoDelivery, UndoReply

if TYPE_CHECKING:
    from fastlock._stream import Pending, Stream
    from fastlock._transport.aio_connection import AsyncConnection
    from fastlock._transport.sync_connection import Connection

T = TypeVar("T")
CLOSE_SECONDS = 1.0  # for how long closing waits for what is in flight; a new connection gets as long at least
LASTING = 1.0  # seconds after which a connection that breaks is replaced at once
STREAM_ERRORS = (Broken, ProtocolError)
CONNECT_ERRORS = (*STREAM_ERRORS, errors.RedisError)
POP: Any = list.pop  # for `(item,) = map(POP, (items,))`: no signal handler runs between popped and kept
INSERT, REMOVE = list.insert, list.remove  # as POP


def compile_templates(impl: ModuleType, capabilities: frozenset[str]) -> tuple[Any, ...]:
    """The command table of a server, as templates of an implementation; kept, as a process meets few kinds of
    servers."""
    key = impl, capabilities
    if key not in _TEMPLATES:
        _TEMPLATES[key] = tuple(impl.Template(*template) for template in commands.command_table(capabilities))
    return _TEMPLATES[key]


_TEMPLATES: dict[tuple[ModuleType, frozenset[str]], tuple[Any, ...]] = {}


def write_request(stream: Stream, session: handshake.Session, request: Request, pending_reply: Pending) -> None:
    """Write a request into the stream of a connection; `pending_reply` gets the answer."""
    end_sessions(stream, session, request.stale)
    if request.long_reply:
        stream.expect_long()
    if isinstance(request, Command):
        stream.put(stream.templates[request.opcode], pending_reply, request.key, request.token, request.ms)
    elif isinstance(request, CommandBatch) and (calls := request.calls(session.capabilities)):
        stream.put_calls(pending_reply, calls)
    elif isinstance(request, CommandBatch):
        stream.put_many(stream.templates[request.opcode], pending_reply, request.names, request.tokens, request.ms)
    elif isinstance(request, RawCommands):
        stream.put_calls(pending_reply, request.calls)


def end_sessions(stream: Stream, session: handshake.Session, ended: Iterable[handshake.Session]) -> None:
    """Write the commands by which this session ends broken ones: nothing that they sent is executed after these."""
    for broken in ended:
        if (call := handshake.end(broken, session)) is not None:
            stream.put_command(None, call)


def write_undo(connection: Connection | AsyncConnection, delivery: UndoDelivery) -> None:
    """Write an undo into a connection's stream."""
    end_sessions(connection.stream, connection.session, delivery.stale)
    calls = delivery.calls(connection)
    connection.stream.put_calls(UndoReply(delivery), calls)
    delivery.written(calls)


def removed(these: list[T], one: T) -> bool:
    """Remove an item from a list; False: another thread, which needs no mutex for that, removed it first."""
    found = False
    try:
        (_,), found = map(these.remove, (one,)), True  # no signal handler runs in between
    except ValueError as gone:
        if by_handler(gone):
            raise
    return found
