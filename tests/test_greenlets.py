"""Greenlets: who would wait in one is refused at once, and nothing is left behind; in a native thread of gevent's or
eventlet's pool all works. In scripts of their own, as both replace half of the standard library; under gunicorn and
Celery they run in `test_application_servers.py`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import redis
from support.programs import LIMIT, needs
from support.tls import Authority, TlsFront

# Where the server's kind is no matter.
pytestmark = [pytest.mark.usefixtures("impl"), pytest.mark.parametrize("server", ["valkey"], indirect=True)]

# What the scripts know: `patch`, `spawn`, `native`, `pause`, `client`.
WORLDS = {
    "gevent": """
import warnings
warnings.simplefilter("ignore")
import gevent
from gevent import monkey
def patch():
    monkey.patch_all()
def together(functions):
    jobs = [gevent.spawn(function) for function in functions]
    gevent.joinall(jobs, timeout=20)
    return [job.get(block=False) for job in jobs]
def native(function, *args):
    return gevent.get_hub().threadpool.apply(function, args)
def pause():
    gevent.sleep(0)
""",
    "eventlet": """
import warnings
warnings.simplefilter("ignore")
import eventlet, eventlet.tpool
def patch():
    eventlet.monkey_patch()
def together(functions):
    with eventlet.Timeout(20):
        return [job.wait() for job in [eventlet.spawn(function) for function in functions]]
def native(function, *args):
    return eventlet.tpool.execute(function, *args)
def pause():
    eventlet.sleep(0)
""",
}
FIRST = """
patch()
import fastlock, os
client = fastlock.Client.from_url(os.environ["SERVER"])
"""
UNPATCHED = """
import fastlock, os
client = fastlock.Client.from_url(os.environ["SERVER"])
"""
LATER = """
import fastlock, os
client = fastlock.Client.from_url(os.environ["SERVER"])
patch()
"""
OVER_TLS = """
patch()
import fastlock, os
client = fastlock.Client.from_url(os.environ["SERVER"], ssl_ca_certs=os.environ["AUTHORITY"], max_connections=4)
def free(number):
    for _ in range(10):
        with client.lock(f"free:{number}"):
            pass
together([lambda number=number: free(number) for number in range(4)])
"""
REFUSED = """
lock = client.lock("sku", timeout=30, **OPTIONS)
def try_it(wait):
    try:
        wait()
    except RuntimeError as error:
        assert "'sku' is held" in str(error) or "the lock is held" in str(error), error
        assert "threadpool.apply" in str(error) or "tpool.execute" in str(error), error
        return "refused"
    return "got it"

def holder():
    with lock:
        waits = [lambda: client.lock("sku", **OPTIONS).acquire(), lambda: client.lock("sku", **OPTIONS).__enter__()]
        waits += [lambda: client.lock("sku", blocking_timeout=10, **OPTIONS).acquire()]
        waits += [lambda: client.lock("sku").acquire(sleep=0.05), lambda: client.lock("sku").acquire(token="mine")]
        waits += [lambda: client.lock("sku", fair=True).acquire()]
        found = together([lambda wait=wait: try_it(wait) for wait in waits])
        assert found == ["refused"] * len(waits), found
        assert client.lock("sku").acquire(blocking=False) is False
        assert client.lock("sku", blocking_timeout=0).acquire() is False

together([holder])
for fair in (False, True):
    with client.lock("sku", fair=fair, timeout=30):  # what is free can be had
        pass
assert client._transport.queues.by_key == {} == client._transport.queues.by_entry
client.close()
print("well")
"""
NATIVE = """
inside, violations, done = [], [], []
def check():
    if inside:
        violations.append(1)
    inside.append(1)
    pause()
    inside.pop()
    done.append(1)

def whole():
    for _ in range(10):
        with client.lock("sku", timeout=20):
            check()

def half():
    for _ in range(10):
        lock = client.lock("sku", timeout=20, thread_local=False)
        assert native(lock.acquire)
        check()
        lock.release()

together([lambda: native(whole)] * 4 + [half] * 4)
assert (len(done), violations) == (80, []), (len(done), len(violations))
stats = client.get_stats()
assert stats["waits"] > 0 and stats["local_handovers"] > 0, stats
client.close()
print("well")
"""

PLAIN = """
import greenlet, threading
holder, seen = client.lock("sku", timeout=30, thread_local=False), []
assert holder.acquire()
if "pause" in globals():
    pause()

def wait():
    with client.lock("sku", timeout=30):
        seen.append("granted")

waiter = threading.Thread(target=lambda: greenlet.greenlet(wait).switch())
waiter.start()
while client.get_stats()["waits"] == 0:
    pass
holder.release()
waiter.join(20)
assert seen == ["granted"], seen
client.close()
print("well")
"""


def run(world: str | None, url: str, script: str) -> None:
    """The script ends well, in time, and says nothing else."""
    if world is not None:
        needs(world)
        script = WORLDS[world] + script
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "SERVER": url}, capture_output=True, text=True, timeout=LIMIT,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "well\n", "")


@pytest.mark.parametrize(
    ("order", "options"),
    [(FIRST, "{}"), (FIRST, "{'fair': True}"), (LATER, "{}"), (UNPATCHED, "{}")],
    ids=["patched", "patched, in strict order", "patched later", "never patched"],
)
@pytest.mark.parametrize("world", WORLDS)
def test_who_would_wait_is_refused_and_leaves_nothing(
    server: Any, probe: redis.Redis, no_leaks: Any, world: str, order: str, options: str
) -> None:
    run(world, server.unix_url, f"{order}OPTIONS = {options}\n{REFUSED}")


@pytest.mark.parametrize("world", [None, *WORLDS])
def test_a_greenlet_that_shares_its_thread_with_nobody_waits(server: Any, no_leaks: Any, world: str | None) -> None:
    """As those in which SQLAlchemy runs what is written for threads; also where others have a hub in their thread."""
    needs("greenlet")
    run(world, server.unix_url, UNPATCHED + PLAIN)


@pytest.mark.parametrize("order", [FIRST, LATER, UNPATCHED], ids=["patched", "patched later", "never patched"])
@pytest.mark.parametrize("world", WORLDS)
def test_native_threads_wait(server: Any, probe: redis.Redis, no_leaks: Any, world: str, order: str) -> None:
    """All of it in a thread of the pool, or the acquire alone."""
    run(world, server.unix_url if order is FIRST else server.tcp_url, order + NATIVE)


@pytest.mark.parametrize("world", WORLDS)
def test_native_threads_wait_over_tls(
    server: Any, probe: redis.Redis, no_leaks: Any, world: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has no TLS without the hub goes on in others' threads."""
    authority = Authority(tmp_path, "localhost")
    monkeypatch.setenv("AUTHORITY", authority.file)
    with TlsFront(authority, server.path) as front:
        run(world, f"rediss://localhost:{front.port}/0", OVER_TLS + NATIVE)
