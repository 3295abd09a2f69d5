"""Private PostgreSQL and MariaDB servers, on unix sockets in a folder of their own, ended by their pid.

They refuse to run as root, so then they run as `nobody`.
"""

from __future__ import annotations

import contextlib
import glob
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

START = 60.0  # seconds for a server to come up


def postgresql_programs() -> Path | None:
    """The folder of PostgreSQL's programs, of which Debian puts none on the PATH; None: it is not installed."""
    found = shutil.which("initdb") or next(iter(sorted(glob.glob("/usr/lib/postgresql/*/bin/initdb"))), None)
    return None if found is None else Path(found).parent


def mariadb_programs() -> tuple[str, str] | None:
    """(mariadb-install-db, mariadbd); None: it is not installed."""
    path = os.environ.get("PATH", "") + ":/usr/sbin"
    install, server = (shutil.which(name, path=path) for name in ("mariadb-install-db", "mariadbd"))
    return (install, server) if install and server else None


@contextlib.contextmanager
def postgresql() -> Iterator[Callable[[], Any]]:
    """A server; the value is a function that connects to it, by psycopg."""
    import psycopg

    programs = postgresql_programs()
    assert programs is not None, "it is installed"
    with _folder() as (folder, options):
        data = str(folder / "data")
        made = [str(programs / "initdb"), "-D", data, "-U", "shop", "-A", "trust", "--no-sync"]
        subprocess.run(made, check=True, capture_output=True, **options)
        command = [str(programs / "postgres"), "-D", data, "-k", str(folder), "-h", "", "-F"]
        with _running(command, options):
            yield _waiting(lambda: psycopg.connect(host=str(folder), user="shop", dbname="postgres"))


@contextlib.contextmanager
def mariadb() -> Iterator[Callable[[], Any]]:
    """A server; the value is a function that connects to it, by PyMySQL."""
    import pymysql

    programs = mariadb_programs()
    assert programs is not None, "it is installed"
    install, server = programs
    with _folder() as (folder, options):
        data, sock = f"--datadir={folder / 'data'}", str(folder / "server.sock")
        made = [install, "--no-defaults", data, "--auth-root-authentication-method=normal", "--skip-test-db"]
        subprocess.run(made, check=True, capture_output=True, **options)
        command = [server, "--no-defaults", data, f"--socket={sock}", "--skip-networking", f"--pid-file={sock}.pid"]
        with _running([*command, "--innodb-flush-log-at-trx-commit=0"], options):
            _waiting(lambda: _connected(sock))  # PyMySQL leaves a socket open where it cannot connect
            connect = _waiting(lambda: pymysql.connect(unix_socket=sock, user="root"))
            with connect() as first, first.cursor() as cursor:
                cursor.execute("CREATE DATABASE shop")
            yield lambda: pymysql.connect(unix_socket=sock, user="root", database="shop")


@contextlib.contextmanager
def _folder() -> Iterator[tuple[Path, dict[str, Any]]]:
    """A folder, and the options by which a process is started that may write there."""
    folder = Path(tempfile.mkdtemp(prefix="fastlock-db-"))
    options: dict[str, Any] = {"cwd": str(folder), "stdin": subprocess.DEVNULL}
    try:
        if os.geteuid() == 0:
            user = pwd.getpwnam("nobody")
            os.chown(folder, user.pw_uid, user.pw_gid)
            options |= {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
        yield folder, options
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _running(command: list[str], options: dict[str, Any]) -> Iterator[None]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **options)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(START)
        finally:
            process.kill()
            process.wait()


def _connected(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.connect(path)
    except BaseException:
        sock.close()
        raise
    return sock


def _waiting(connect: Callable[[], Any]) -> Callable[[], Any]:
    """The same function, once it has worked."""
    end = time.monotonic() + START
    while True:
        try:
            connect().close()
        except Exception:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)
        else:
            return connect
