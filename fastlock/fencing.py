"""The checking side of fences: a store that refuses a writer whose lock another one has had since.

A holder that was stopped for longer than its lease (a suspended machine, a long pause) writes in its first moments
afterwards as if it still held the lock. No lock can prevent that; whoever stores what is written can, if each write
comes with the fence of its lease (`fence=True`), a number that grows from holder to holder: M. Kleppmann, "How to do
distributed locking", 2016. Here: that check for Redis, PostgreSQL, MySQL and SQLite. Never here: connections.
"""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any

from fastlock._errors import LockNotOwnedError, as_own
from fastlock._protocol.arguments import as_ms, as_name
from fastlock._protocol.commands import CHECK_FENCE, fenced_key

__all__ = ["MYSQL", "POSTGRESQL", "SQL", "SQLITE", "StaleFenceError", "check", "check_sql", "set"]

KEPT_SECONDS = 7 * 86400.0  # how long Redis keeps the newest fence of a resource after its last use


class StaleFenceError(LockNotOwnedError):
    """A write was refused: another holder, whose fence is newer, has written since. `lock_name` names the resource."""

    __module__ = "fastlock.fencing"

    def __init__(self, resource: object, fence: int, newest: int) -> None:
        super().__init__(f"fence {fence} is older than {newest}, by which {resource!r} was written", resource)
        self.fence = fence
        self.newest = newest

    def __reduce__(self) -> tuple[type[StaleFenceError], tuple[object, int, int]]:
        return type(self), (self.lock_name, self.fence, self.newest)


# ---------------------------------------------------------------------------------------------------------------- Redis


def set(redis: Any, key: str | bytes, value: str | bytes | float, fence: int, *, ttl: float | None = None) -> Any:
    """Set a key, unless it was written with a newer fence, in one command of a redis-py client.

    ttl: seconds until the key ends. With a `redis.asyncio` client, await the outcome. The newest fence of the key is
    kept in `fastlock:fenced:...`, for a week after its last use.

    Raises StaleFenceError: somebody with a newer fence has written it. ValueError or TypeError: an argument makes no
    sense.
    """
    return _checked(redis, key, fence, [value] if ttl is None else [value, as_ms(ttl, "ttl")])


def check(redis: Any, key: str | bytes, fence: int) -> Any:
    """Raise StaleFenceError if the resource `key` was checked or set with a newer fence; from now on, refuse older ones
    than this. For what is not a key of Redis; call it right before each write. Else as `set`."""
    return _checked(redis, key, fence, [])


def _checked(redis: Any, key: str | bytes, fence: int, more: list[str | bytes | float]) -> Any:
    raw, number = as_name(key, what="key"), as_fence(fence)
    if hasattr(redis, "command_stack"):
        raise TypeError(f"redis must be a client, not a {type(redis).__name__}, which executes nothing yet")
    if not hasattr(redis, "register_script"):
        raise TypeError(f"redis must be a client of redis-py, not a {type(redis).__module__}.{type(redis).__name__}")
    script = redis.register_script(CHECK_FENCE)
    newest = script([raw, fenced_key(raw)], [number, as_ms(KEPT_SECONDS), *more])
    return _awaited(newest, key, number) if isinstance(newest, Awaitable) else _judge(newest, key, number)


async def _awaited(newest: Awaitable[Any], key: object, fence: int) -> None:
    _judge(await newest, key, fence)


def _judge(newest: bytes | str | int | None, resource: object, fence: int) -> None:
    if newest is not None and int(newest) > fence:
        raise as_own(StaleFenceError(resource, fence, int(newest)))


def as_fence(fence: object) -> int:
    """A checked fence. TypeError: it is none, as of a lock without `fence=True`."""
    if not isinstance(fence, int) or isinstance(fence, bool):
        raise TypeError(
            f"fence must be an int, not {type(fence).__name__}: `lease.fence` is one if the lock has fence=True"
        )
    if not 0 < fence < 2**53:
        raise ValueError(f"fence must be between 1 and 2**53, not {fence}")
    return fence


# ----------------------------------------------------------------------------------------------------------------- SQL


@dataclass(frozen=True)
class SQL:
    """The statements for one kind of database, to be run in the transaction that writes.

    table: makes the table. advance: takes (name, fence), and notes the fence unless a newer one is noted. newest: takes
    (name,), and gives the newest fence. In `advance` the database locks the row, so that of two transactions at once
    the second one waits for the first.
    """

    table: str
    advance: str
    newest: str


_TABLE = "CREATE TABLE IF NOT EXISTS fastlock_fences (name {text} PRIMARY KEY, fence BIGINT NOT NULL)"
_UPSERT = (
    "INSERT INTO fastlock_fences (name, fence) VALUES ({0}, {0}) ON CONFLICT (name) DO UPDATE SET fence = "
    "CASE WHEN excluded.fence > fastlock_fences.fence THEN excluded.fence ELSE fastlock_fences.fence END"
)
_NEWEST = "SELECT fence FROM fastlock_fences WHERE name = {0}"
POSTGRESQL = SQL(_TABLE.format(text="TEXT"), _UPSERT.format("%s"), _NEWEST.format("%s"))
SQLITE = SQL(_TABLE.format(text="TEXT"), _UPSERT.format("?"), _NEWEST.format("?"))
MYSQL = SQL(  # its names compare as bytes: `a` and `A` are two
    _TABLE.format(text="VARBINARY(512)"),
    "INSERT INTO fastlock_fences (name, fence) VALUES (%s, %s) "
    "ON DUPLICATE KEY UPDATE fence = GREATEST(fence, VALUES(fence))",
    _NEWEST.format("%s") + " FOR UPDATE",  # the row as it is, not as it was when the transaction began
)


def check_sql(cursor: Any, name: str, fence: int, sql: SQL = POSTGRESQL) -> None:
    """Refuse to write what was written with a newer fence; call it first in the transaction that writes.

    cursor: of a connection to the database, as the DB-API (PEP 249) has it. name: of the resource. sql: POSTGRESQL,
    MYSQL or SQLITE; with Django's cursor POSTGRESQL for SQLite, too. The table `fastlock_fences` must be there:
    `cursor.execute(sql.table)` makes it. With an asynchronous driver run `sql.advance` and `sql.newest` yourself, and
    compare.

    Raises StaleFenceError: somebody with a newer fence has written. Roll the transaction back then.
    """
    raw, number = as_name(name), as_fence(fence)
    if not hasattr(cursor, "fetchone"):
        raise TypeError(f"cursor must be a cursor of the database, as connection.cursor(), not {cursor!r}")
    given: Any = raw if sql is MYSQL else raw.decode()
    cursor.execute(sql.advance, (given, number))
    cursor.execute(sql.newest, (given,))
    (newest,) = cursor.fetchone()
    _judge(newest, name, number)
