"""Fences, as a store checks them: a holder that was stopped for longer than its lease is refused when it wakes up.

On Redis and Valkey, and on SQLite, PostgreSQL and MariaDB; the last two where they are installed.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import pickle
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio
from support import databases

import fastlock
from fastlock import fencing
from fastlock.embedded import Server

NAME = "stock:42"
pytestmark = pytest.mark.usefixtures("no_leaks")
SQLS = {"sqlite": fencing.SQLITE, "postgresql": fencing.POSTGRESQL, "mariadb": fencing.MYSQL}


@pytest.fixture(autouse=True)
def kept(no_leaks: Any) -> None:
    """What is left on purpose: for an hour, and for a week."""
    no_leaks.allow("fastlock:fence:*")
    no_leaks.allow("fastlock:fenced:*")
    no_leaks.allow(NAME)


# ---------------------------------------------------------------------------------------------------------------- Redis


def test_a_key_is_set_by_the_same_fence_and_by_newer_ones(server: Server, probe: redis.Redis) -> None:
    for fence in (5, 5, 6, 9):
        fencing.set(probe, NAME, fence, fence)
        assert probe.get(NAME) == b"%d" % fence and probe.ttl(NAME) == -1
    for fence in (8, 1):
        with pytest.raises(fencing.StaleFenceError, match=f"fence {fence} is older than 9, by which 'stock:42'") as end:
            fencing.set(probe, NAME, "stale", fence)
        assert (end.value.fence, end.value.newest, end.value.lock_name) == (fence, 9, NAME)
        with pytest.raises(fastlock.LockNotOwnedError):
            fencing.check(probe, NAME, fence)
    fencing.check(probe, NAME, 10)
    with pytest.raises(fencing.StaleFenceError):
        fencing.set(probe, NAME, "stale", 9)
    assert probe.get(NAME) == b"9"
    fencing.set(probe, NAME, "soon gone", 11, ttl=60)
    assert 59_000 < probe.pttl(NAME) <= 60_000
    assert 6 * 86400 < probe.ttl("fastlock:fenced:{stock:42}") <= 7 * 86400


def test_fences_of_real_leases_are_told_apart(server: Server, probe: redis.Redis) -> None:
    """They are as large as a script's numbers can be told apart."""
    with fastlock.Client.from_url(server.url) as client:
        leases = []
        for _ in range(3):
            with client.lock(NAME, fence=True) as lease:
                leases.append(lease)
    for lease in leases:
        fencing.set(probe, NAME, 1, lease.fence)
    for lease in leases[:2]:
        with pytest.raises(fencing.StaleFenceError):
            fencing.set(probe, NAME, 1, lease.fence)


def test_an_asyncio_client_is_awaited(server: Server) -> None:
    async def main() -> None:
        async with redis.asyncio.Redis.from_url(server.url) as client:
            await fencing.set(client, NAME, "value", 2)
            await fencing.check(client, NAME, 2)
            with pytest.raises(fencing.StaleFenceError):
                await fencing.set(client, NAME, "stale", 1)
            assert await client.get(NAME) == b"value"

    asyncio.run(main())


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((NAME, 1, None), TypeError, "fence must be an int, not NoneType: .* fence=True"),
        ((NAME, 1, True), TypeError, "fence must be an int"),
        ((NAME, 1, 0), ValueError, "fence must be between"),
        ((NAME, 1, 2**53), ValueError, "fence must be between"),
        (("", 1, 1), ValueError, "key must not be empty"),
        ((17, 1, 1), TypeError, "key must be str"),
    ],
)
def test_arguments_that_make_no_sense(
    server: Server, probe: redis.Redis, arguments: Any, error: Any, text: str
) -> None:
    with pytest.raises(error, match=text):
        fencing.set(probe, *arguments)
    with pytest.raises(ValueError, match="ttl must be at least"):
        fencing.set(probe, NAME, 1, 1, ttl=0)


def test_a_pipeline_cannot_check(server: Server, probe: redis.Redis) -> None:
    pipelines: list[Any] = [probe.pipeline(), redis.asyncio.Redis.from_url(server.url).pipeline()]
    for pipeline in pipelines:
        with pytest.raises(TypeError, match="redis must be a client, not a Pipeline"):
            fencing.set(pipeline, NAME, 1, 1)
    with fastlock.Client.from_url(server.url) as client, pytest.raises(TypeError, match="redis must be a client of re"):
        fencing.check(client, NAME, 1)


# ------------------------------------------------------------------------------------------------------------------ SQL


@pytest.fixture(scope="module")
def servers_of_sql(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Callable[[], Any]]]:
    """Functions that connect, by kind of database, of those that are there."""
    path = tmp_path_factory.mktemp("sql") / "shop.db"
    found: dict[str, Callable[[], Any]] = {"sqlite": lambda: sqlite3.connect(path, timeout=30, isolation_level=None)}
    with ExitStack() as stack:
        if databases.postgresql_programs():
            found["postgresql"] = stack.enter_context(databases.postgresql())
        if databases.mariadb_programs():
            found["mariadb"] = stack.enter_context(databases.mariadb())
        yield found


@pytest.fixture(params=SQLS)
def database(request: pytest.FixtureRequest, servers_of_sql: dict[str, Any]) -> Iterator[tuple[Any, fencing.SQL]]:
    """A function that connects, and the statements; with the tables made."""
    if request.param not in servers_of_sql:
        pytest.skip(f"{request.param} is not installed")
    connect, sql = servers_of_sql[request.param], SQLS[request.param]
    connection = connect()
    cursor = connection.cursor()
    cursor.execute(sql.table)
    cursor.execute(sql.table)
    cursor.execute("CREATE TABLE IF NOT EXISTS written (name VARCHAR(100) PRIMARY KEY, value BIGINT)")
    for table in ("fastlock_fences", "written"):
        cursor.execute(f"DELETE FROM {table}")
    connection.commit()
    yield connect, sql
    connection.close()


def write(connection: Any, sql: fencing.SQL, name: str, value: int, fence: int) -> None:
    """A transaction as a user's: the check first, then the write."""
    cursor = connection.cursor()
    if sql is fencing.SQLITE:
        cursor.execute("BEGIN IMMEDIATE")
    try:
        fencing.check_sql(cursor, name, fence, sql)
        mark = "?" if sql is fencing.SQLITE else "%s"
        cursor.execute(f"DELETE FROM written WHERE name = {mark}", (name,))
        cursor.execute(f"INSERT INTO written (name, value) VALUES ({mark}, {mark})", (name, value))
    except BaseException:
        connection.rollback()
        raise
    connection.commit()


def value_of(connection: Any, name: str) -> Any:
    cursor = connection.cursor()
    cursor.execute(f"SELECT value FROM written WHERE name = '{name}'")
    row = cursor.fetchone()
    connection.commit()
    return row and row[0]


def test_sql_refuses_older_fences(database: tuple[Any, fencing.SQL]) -> None:
    connect, sql = database
    connection = connect()
    for fence in (5, 5, 2**52, 2**52 + 1):
        write(connection, sql, NAME, fence, fence)
        fencing.check_sql(connection.cursor(), NAME.upper(), 3, sql)  # another name
        connection.commit()
        assert value_of(connection, NAME) == fence
    for fence in (4, 2**52):
        with pytest.raises(fencing.StaleFenceError):
            write(connection, sql, NAME, -1, fence)
    assert value_of(connection, NAME) == 2**52 + 1
    connection.close()


def test_an_older_transaction_does_not_see_its_own_past(database: tuple[Any, fencing.SQL]) -> None:
    """It has read before another one wrote with a newer fence; by its snapshot nobody has."""
    connect, sql = database
    one, other = connect(), connect()
    write(one, sql, NAME, 1, 1)
    if sql is not fencing.SQLITE:
        cursor = one.cursor()
        cursor.execute("SELECT * FROM fastlock_fences")
        cursor.fetchall()
    write(other, sql, NAME, 3, 3)
    with pytest.raises(fencing.StaleFenceError):
        write(one, sql, NAME, 2, 2)
    assert value_of(other, NAME) == 3
    one.close()
    other.close()


def test_of_many_writers_at_once_the_newest_wins(database: tuple[Any, fencing.SQL]) -> None:
    connect, sql = database
    numbers = itertools.count(1)
    newest: list[int] = []
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        connection, draw = connect(), random.Random(seed)
        try:
            for _ in range(30):
                fence = next(numbers)
                time.sleep(draw.uniform(0, 0.002))
                try:
                    write(connection, sql, NAME, fence, fence)
                    newest.append(fence)
                except fencing.StaleFenceError:
                    pass
        except BaseException as error:
            errors.append(error)
        connection.close()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    connection = connect()
    assert not errors and value_of(connection, NAME) == max(newest)
    connection.close()


# ----------------------------------------------------------------------------------------------------- a stopped holder

HOLDER = """
import sqlite3, sys
import redis, fastlock
from fastlock import fencing

url, path = sys.argv[1:]
lock = fastlock.Client.from_url(url).lock("stock:42", timeout=0.5, fence=True)
lock.acquire()
print("holds", flush=True)
sys.stdin.readline()  # stopped here, for longer than the lease
for store in ("redis", "sqlite"):
    try:
        if store == "redis":
            fencing.set(redis.Redis.from_url(url), "stock:42", "stale", lock.lease.fence)
        else:
            with sqlite3.connect(path) as connection:
                fencing.check_sql(connection.cursor(), "stock:42", lock.lease.fence, fencing.SQLITE)
        print("written", flush=True)
    except fencing.StaleFenceError:
        print("refused", flush=True)
"""


@pytest.mark.parametrize("server", ["valkey"], indirect=True)
def test_a_stopped_holder_wakes_up_and_is_refused(server: Server, probe: redis.Redis, tmp_path: Path) -> None:
    path, key = str(tmp_path / "shop.db"), "resource:42"
    child = subprocess.Popen(
        [sys.executable, "-c", HOLDER.replace('"stock:42", "stale"', f'"{key}", "stale"'), server.url, path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None and child.stdin is not None
        assert child.stdout.readline() == "holds\n"
        os.kill(child.pid, signal.SIGSTOP)
        with fastlock.Client.from_url(server.url) as client, client.lock(NAME, fence=True) as lease:
            fencing.set(probe, key, "mine", lease.fence)
            with sqlite3.connect(path) as connection:
                connection.execute(fencing.SQLITE.table)
                fencing.check_sql(connection.cursor(), NAME, lease.fence, fencing.SQLITE)
            os.kill(child.pid, signal.SIGCONT)
            output, _ = child.communicate("\n", timeout=60)
        assert output.split() == ["refused", "refused"]
        assert probe.getdel(key) == b"mine"
    finally:
        child.kill()
        child.wait()


def test_the_error_of_an_older_fence_is_pickled() -> None:
    error = pickle.loads(pickle.dumps(fencing.StaleFenceError("sku", 1, 2)))
    assert (type(error), error.lock_name, error.fence, error.newest) == (fencing.StaleFenceError, "sku", 1, 2)
