"""Application servers and workers as users run them: uWSGI, which forks in C; gunicorn and Celery with greenlets.

The application sells under one lock and counts the holders on the server: two at once are a violation. It makes its
client when it is loaded, as applications usually do.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import redis
from support.programs import LIMIT, Program, command, needs

pytestmark = pytest.mark.usefixtures("impl")

SELLING = """
import os
import fastlock, redis

client = fastlock.Client.from_url(os.environ["SERVER"])
probe = redis.Redis.from_url(os.environ["SERVER"])

def sell():
    with client.lock("sku", timeout=20) as lease:
        violations = probe.incr("holders") - 1
        probe.rpush("tokens", b"%d %b" % (os.getpid(), lease.token))
        violations += probe.decr("holders")
    return b"%d" % violations

def application(environ, start_response):
    body = b"up" if environ["PATH_INFO"] == "/up" else sell()
    start_response("200 OK", [("Content-Length", str(len(body)))])
    return [body]
"""


@pytest.mark.parametrize("threads", ["--disable-logging", "--threads=2"], ids=["a thread each", "two threads each"])
@pytest.mark.parametrize("server", ["valkey"], indirect=True)
def test_one_holder_under_uwsgi(tmp_path: Path, server: Any, probe: redis.Redis, no_leaks: Any, threads: str) -> None:
    """uWSGI's default: the application is loaded once, and then forked, without Python's fork hooks."""
    no_leaks.allow("holders", "tokens")
    arguments = [command("uwsgi"), "--http-socket", "127.0.0.1:PORT", "--wsgi-file", "application.py", "--master"]
    arguments += ["--processes", "4", "--need-app", "--die-on-term", "--listen", "64", threads]
    users: dict[bytes, set[bytes]] = {}
    with Program(tmp_path, server.unix_url, SELLING, arguments) as uwsgi:
        for _ in range(10):  # on a busy machine one worker may take all of them
            answers = Counter(uwsgi.many("/sell", 120))
            assert answers == {(200, "0"): 120}, uwsgi.log
            for entry in probe.lrange("tokens", 0, -1):
                pid, token = entry.split()
                users.setdefault(token, set()).add(pid)
            if len(set.union(*users.values())) > 1:
                break
    assert {len(pids) for pids in users.values()} == {1}, "a token was used by two processes"
    assert len(set.union(*users.values())) > 1, "only one worker has served"


GREENLETS = """
import os, time
import fastlock, redis

client = fastlock.Client.from_url(os.environ["SERVER"])
probe = redis.Redis.from_url(os.environ["SERVER"])

def direct():
    try:
        with client.lock("sku", timeout=20):
            time.sleep(0.02)  # other greenlets, which want the lock too, run meanwhile
    except RuntimeError as error:
        assert "native thread" in str(error)
        return "refused"
    return "sold"

def waiting(native):
    lock = client.lock("sku", timeout=20, thread_local=False)
    assert native(lock.acquire)
    try:
        violations = probe.incr("holders") - 1
        time.sleep(0.002)
        return str(violations + probe.decr("holders"))
    finally:
        lock.release()
"""
UNDER_GUNICORN = (
    GREENLETS
    + """
from gevent import get_hub

def application(environ, start_response):
    path = environ["PATH_INFO"]
    body = "up" if path == "/up" else direct() if path == "/direct" else waiting(get_hub().threadpool.apply)
    start_response("200 OK", [("Content-Length", str(len(body)))])
    return [body.encode()]
"""
)
UNDER_CELERY = (
    GREENLETS
    + """
from celery import Celery
from celery.signals import worker_ready

app = Celery(broker=os.environ["SERVER"])
app.conf.broker_connection_retry_on_startup = True

def native():
    if os.environ["POOL"] == "gevent":
        from gevent import get_hub
        return get_hub().threadpool.apply
    from eventlet import tpool
    return tpool.execute

@app.task(ignore_result=True)
def sell(how):
    try:
        outcome = direct() if how == "direct" else waiting(native())
    except BaseException as error:
        outcome = repr(error)
    probe.rpush("outcomes", outcome)

@worker_ready.connect
def begin(**_):
    for number in range(24):
        sell.delay("direct" if number < 12 else "native")
"""
)


@pytest.mark.parametrize("server", ["valkey"], indirect=True)
def test_greenlets_of_gunicorn(tmp_path: Path, server: Any, probe: redis.Redis, no_leaks: Any) -> None:
    """No greenlet waits for ever: one that would gets an error, and the way that the error names serves all, one by
    one."""
    needs("gevent")
    no_leaks.allow("holders")
    arguments = [command("gunicorn"), "--bind", "127.0.0.1:PORT", "--worker-class", "gevent", "application"]
    with Program(tmp_path, server.unix_url, UNDER_GUNICORN, arguments) as gunicorn:
        direct = Counter(gunicorn.many("/direct", 40))
        assert set(direct) == {(200, "refused"), (200, "sold")}, gunicorn.log
        assert Counter(gunicorn.many("/native", 40)) == {(200, "0"): 40}, gunicorn.log
        assert "WORKER TIMEOUT" not in gunicorn.log


@pytest.mark.parametrize("pool", ["gevent", "eventlet"])
@pytest.mark.parametrize("server", ["valkey"], indirect=True)
def test_greenlets_of_celery(
    tmp_path: Path, server: Any, probe: redis.Redis, no_leaks: Any, pool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs(pool)
    no_leaks.allow("holders", "_kombu.*", "unacked*", "celery*")
    monkeypatch.setenv("POOL", pool)
    arguments = [command("celery"), "--app", "application", "worker", "--pool", pool, "--concurrency", "8"]
    arguments += ["--without-gossip", "--without-mingle", "--without-heartbeat"]
    with Program(tmp_path, server.url, UNDER_CELERY, arguments) as worker:
        found: list[str] = []
        for _ in range(24):
            outcome = probe.blpop(["outcomes"], timeout=LIMIT)
            assert outcome is not None, f"only {found}\n{worker.log}"
            found.append(outcome[1].decode())
    counted = Counter(found)
    assert set(counted) == {"refused", "sold", "0"} and counted["0"] == 12, (counted, worker.log)
