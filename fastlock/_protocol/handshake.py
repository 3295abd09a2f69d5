"""The handshake of a connection: what is sent first, all in one write, and what is learned from the replies.

A session is what a connection knows of its server: its own client id there (by which another connection ends it, should
this one break with commands in flight), and which commands the server has. Bytes and values only. Never here: sockets.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

from fastlock import _errors as errors
from fastlock._protocol import commands, identity
from fastlock._protocol.commands import Script
from fastlock._protocol.losses import NAMED, named
from fastlock._version import __version__

FLOOR = (6, 2)  # the oldest version of Redis that is supported
_SERIAL = itertools.count()


class Purpose(NamedTuple):
    """What a command is for, for the warning of a refusal."""

    task: str
    scripts: tuple[Script, ...]  # those that the user needs to be allowed


class Warned(Protocol):
    """A client that is warned once of what its server refuses."""

    warned: bool

    @property
    def endpoint(self) -> str: ...


class Session(NamedTuple):
    """One connection as its server sees it."""

    hello: dict[bytes, Any]
    capabilities: frozenset[str]
    id: bytes  # the connection's client id at the server; empty when the server did not tell
    address: bytes  # the connection's address at the server; empty when the server did not tell
    policy: str  # maxmemory-policy; empty when the server did not tell
    serial: int = 0  # number of this session among those of this process, in order
    run_id: bytes = b""  # the server's run id, another one after each start; empty when the server did not tell


def greeting(client_name: str | None, db: int, credentials: tuple[str | None, str | None]) -> list[tuple[bytes, ...]]:
    """The calls that open a connection, with these credentials (user, password). Both names tell whose it is: that of
    the client, which every server knows, is often the user's own."""
    user, password = credentials
    told = identity.told()
    hello: list[bytes] = [b"HELLO", b"3"]
    if password is not None or user is not None:
        hello += [b"AUTH", (user or "default").encode(), (password or "").encode()]
    hello += [b"SETNAME", client_name.encode() if client_name else told]
    calls: list[tuple[bytes, ...]] = [
        tuple(hello),
        (b"CLIENT", b"INFO"),
        (b"COMMAND", b"INFO", b"DELIFEQ", b"DELEX"),
        (b"CONFIG", b"GET", b"maxmemory-policy"),
        (b"CLIENT", b"SETINFO", b"LIB-NAME", told),
        (b"CLIENT", b"SETINFO", b"LIB-VER", __version__.encode()),
        (b"INFO", b"server"),
    ]
    if db:  # else SELECT would only be one more permission to give
        calls.append((b"SELECT", b"%d" % db))
    return calls


def refused(hello: object) -> None:
    """Raise the error with which the server refused the handshake, if it sent one."""
    if isinstance(hello, Exception):
        if str(hello).startswith("NOAUTH"):  # the server's own text tells how to send HELLO
            why = "the server asks for a password, and none was given: password=, or redis://:password@host"
            raise errors.as_own(errors.AuthenticationError(why))
        raise errors.from_reply(hello)


def read_greeting(replies: list[Any]) -> Session:
    """The session that the replies describe. Only HELLO and SELECT must succeed; the rest may be forbidden, or unknown
    to an old server.

    Raises redis-py's exceptions: AuthenticationError, ResponseError, InvalidResponse.
    """
    hello, info, known_commands, policy = replies[:4]
    refused(hello)
    for select in replies[7:]:
        refused(select)
    if not isinstance(hello, dict):
        raise errors.InvalidResponse("the server's reply to HELLO is not a map: is this a Redis or Valkey server?")
    if hello.get(b"server") == b"redis" and (0,) < commands.version(hello) < FLOOR:
        raise errors.ResponseError(f"Redis {hello[b'version'].decode()} is too old: fastlock needs Redis 6.2 or Valkey")
    capabilities, server = commands.capabilities(hello, known_commands), replies[6] if len(replies) > 6 else None
    return Session(hello, capabilities, *_identity(info), _policy(policy), next(_SERIAL), _run_id(server))


def _identity(info: object) -> tuple[bytes, bytes]:
    found = re.match(rb"id=(\d+) addr=(\S+) ", info) if isinstance(info, bytes) else None
    return (found[1], found[2]) if found else (b"", b"")


def _run_id(info: object) -> bytes:
    found = re.search(rb"^run_id:(\w+)", info, re.MULTILINE) if isinstance(info, bytes) else None
    return found[1] if found else b""


def _policy(reply: object) -> str:
    if isinstance(reply, dict) and b"maxmemory-policy" in reply:
        policy = reply[b"maxmemory-policy"]
        return str(policy, "ascii", "replace") if isinstance(policy, bytes) else ""
    return ""


def end(session: Session, current: Session) -> tuple[bytes, ...] | None:
    """The call by which the current session's connection ends another, so that no command sent over that one can still
    be executed; None: there is nothing to end.

    It names the client id and the address, and is sent only to the same server, by its run id: another server, as after
    a restart, has none of those commands, and may have given the id to somebody else. Where the run id is not known,
    the address has to tell servers apart, which that of a unix socket cannot: all its clients have the same. Client ids
    only grow while a server runs: a later connection with a smaller id talks to a server that was restarted.
    """
    if not session.id or session is current:  # not known, or what follows is executed behind its commands anyway
        return None
    if session.run_id and current.run_id:
        same = session.run_id == current.run_id
    else:
        younger = not current.id or current.serial < session.serial or int(current.id) > int(session.id)
        same = younger and not session.address.endswith(b":0")
    return (b"CLIENT", b"KILL", b"ID", session.id, b"ADDR", session.address) if same else None


def loaded(client: Warned, scripts: list[Script], replies: list[Any]) -> None:
    """Warn if the replies to SCRIPT LOAD say that the user may acquire locks, but not release them."""
    refused = [errors.from_reply(reply) for reply in replies if isinstance(reply, Exception)]
    if forbidden := [error for error in refused if errors.is_forbidden(error)]:
        _warn(client, "may refuse to release locks", "they stay until their leases end", forbidden[0], scripts)


def warn_of_refusal(client: Warned, purpose: Purpose, error: errors.RedisError) -> None:
    """Warn that the server refused what a command is for: what a caller left behind stays until its lease ends, or the
    next holder is not told."""
    _warn(client, f"refuses to {purpose.task}", "others wait longer", error, purpose.scripts)


def _warn(client: Warned, trouble: str, effect: str, error: errors.RedisError, scripts: Iterable[Script]) -> None:
    """Log a warning, once a client."""
    if client.warned:
        return
    client.warned = True
    rights = " ".join(dict.fromkeys(" ".join(script.rights for script in scripts).split()))
    beside = "beside the keys of its locks those of fastlock:*, and the channels of fastlock:*"
    remedy = f": its user needs {rights}, and {beside}" if errors.is_forbidden(error) else ""
    logging.getLogger("fastlock").warning("%s %s (%s), so that %s%s", client.endpoint, trouble, error, effect, remedy)


def warn_of_refused_recalls(endpoint: str, reply: Exception) -> bool:
    """Warn that the user may not hear recalls, if this reply says so. Returns whether it does."""
    error = errors.from_reply(reply)
    if forbidden := errors.is_forbidden(error):
        logging.getLogger("fastlock").warning(
            "%s refuses to tell who wants a lease that is kept (%s), so that none is kept: its user needs +subscribe "
            "and the channels &%s*",
            endpoint,
            error,
            commands.KEEP_CHANNEL.decode(),
        )
    return forbidden


def warn_of_pending_undos(endpoint: str, names: Iterable[bytes]) -> None:
    """Warn that a client ended before the server had answered what releases these names."""
    if names := sorted(set(names)):
        logging.getLogger("fastlock").warning(
            "%s may stay locked until the lease ends: the client ended before %s had answered the release",
            ", ".join(map(named, names[:NAMED])) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else ""),
            endpoint,
        )


def warn_of_eviction(session: Session, endpoint: str) -> None:
    """Warn, once a client, of a server that may evict keys: it drops held locks, and nobody is told."""
    if session.policy not in ("", "noeviction"):
        logging.getLogger("fastlock").warning(
            "%s may evict locks that are held (maxmemory-policy %s): use noeviction for a server of locks",
            endpoint,
            session.policy,
        )


def describe(session: Session) -> dict[str, Any]:
    """What `Client.server_info()` shows of a session."""

    def text(key: bytes) -> str:
        value = session.hello.get(key, b"")
        return str(value, "utf-8", "replace") if isinstance(value, bytes) else str(value)

    return {
        "server": text(b"server"),
        "version": text(b"version"),
        "mode": text(b"mode"),
        "role": text(b"role"),
        "capabilities": sorted(session.capabilities),
        "maxmemory_policy": session.policy,
    }
