"""Which names of a database are held or waited for, and how a name is taken away from its holders: what an operator
does, with no lock of his own.

Never here: sockets, what is shown of a name.
"""

from __future__ import annotations

import re
from typing import Any

from fastlock._errors import RedisError
from fastlock._protocol import commands
from fastlock._protocol.commands import Script
from fastlock._protocol.describe import OTHER, PLAIN, Found, kind_of
from fastlock._protocol.lease import ID_DIGITS
from fastlock._protocol.retry import RetryState, execute, run_script
from fastlock._protocol.steps import Clock, LongReply, RawCommands, Steps
from fastlock._stream_errors import by_handler

FIND_LOCKS_LUA = Script("find_locks")
SHARED_BREAK_LUA = Script("ends", "publish", "shared", "shared_break")
QUEUE_PREFIX = b"fastlock:queue:"
BATCH = 1000  # keys that one step looks at: the server does nothing else meanwhile (1.5 ms)
_PLAIN = re.compile(rb"f[lk][:+][0-9a-f]{32}")


def patterns(match: bytes) -> list[bytes]:
    """The patterns of the keys of all names that match, and of their queues: a name may only be waited for."""
    return [match] if match == b"*" else [match, QUEUE_PREFIX + b"{" + match + b"}", QUEUE_PREFIX + b":" + match]


def scan(cursor: bytes, pattern: bytes, clock: Clock) -> Steps[tuple[bytes, list[bytes]]]:
    """Look at the next keys. Returns the next cursor, b"0" at the end, and the names among them that are held or waited
    for; a name may be found several times. Locks of redis-py are not found: their tokens are any strings.

    Raises the redis-py exception of an error reply.
    """
    call = b"SCAN", cursor, b"MATCH", pattern, b"COUNT", b"%d" % BATCH
    request = LongReply([call])
    reply: Any = yield from run_script(request, (yield request), _is_page, RetryState(clock))
    following, keys = reply
    if not keys:
        return following, []
    request = LongReply([(b"EVALSHA", FIND_LOCKS_LUA.sha, b"%d" % len(keys), *keys)])
    beginnings = yield from run_script(request, (yield request), _is_list, RetryState(clock))
    found = [_name(key, beginning) for key, beginning in zip(keys, beginnings, strict=True)]
    return following, [name for name in found if name is not None]


def _name(key: bytes, beginning: bytes | None) -> bytes | None:
    """The name whose key, or whose queue's key, begins so; None: it is another key."""
    if beginning is None:
        return None
    if _PLAIN.fullmatch(beginning) or kind_of(beginning) != OTHER:
        return key
    return _of_queue(key) if key.startswith(QUEUE_PREFIX) else None


def _of_queue(key: bytes) -> bytes | None:
    rest = key[len(QUEUE_PREFIX) :]
    name = rest[1:] if rest.startswith(b":") else rest[1:-1]
    return name if commands.queue_key(name) == key else None


def break_locks(key: bytes, found: Found, clock: Clock) -> Steps[int]:
    """Take a name away from the holders that were found, and grant it to those who wait, as a release would: by one
    script. Returns from how many it was taken: who has acquired it since keeps it.

    Raises the redis-py exception of an error reply.
    """
    tokens = [token for token, _ in found.holders]
    if found.kind == PLAIN:
        request = LongReply([commands.hand_over(key, token) for token in tokens])
    else:
        keys = key, commands.queue_key(key), commands.size_key(key)
        request = LongReply([(b"EVALSHA", SHARED_BREAK_LUA.sha, b"3", *keys, *tokens)])
    reply: Any = yield from run_script(request, (yield request), _is_outcome, RetryState(clock))
    for token in tokens if found.kind == PLAIN else ():
        yield from _recall(key, token, clock)
    return sum(reply) if isinstance(reply, list) else int(reply)


def _recall(key: bytes, token: bytes, clock: Clock) -> Steps[None]:
    """Tell the client that keeps a lease by this token that it is gone, as an enter tells that somebody waits."""
    plain = commands.as_plain(token)
    if plain is not None and plain.startswith(commands.KEPT_PREFIX):
        channel = commands.KEEP_CHANNEL + plain[len(commands.KEPT_PREFIX) :][:ID_DIGITS]
        try:
            yield from execute(RawCommands([(b"PUBLISH", channel, plain + key)]), RetryState(clock))
        except RedisError as error:  # the lock is broken all the same
            if by_handler(error):
                raise


def _is_page(reply: object) -> bool:
    return type(reply) is list and len(reply) == 2 and type(reply[0]) is bytes and type(reply[1]) is list


def _is_list(reply: object) -> bool:
    return type(reply) is list


def _is_outcome(reply: object) -> bool:
    return type(reply) is int or (type(reply) is list and all(type(each) is int for each in reply))
