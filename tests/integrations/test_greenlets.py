"""Greenlets: a greenlet that would have to wait is refused at once, and leaves nothing behind; in a native thread of
gevent's or eventlet's pool everything works. Each test runs a script in a process of its own, as both libraries replace
half of the standard library; `test_application_servers.py` runs them under gunicorn and Celery.
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

# The kind of server makes no difference here.
pytestmark = [pytest.mark.usefixtures("impl"), pytest.mark.parametrize("server", ["valkey"], indirect=True)]

# What each library gives to the scripts: `patch`, `together`, `native`, `pause`.
LIBRARIES = {
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
    with client.lock("sku", fair=fair, timeout=30):  # a free lock can be acquired without a wait
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


def run(library: str | None, url: str, script: str) -> None:
    """Run a script, which has to succeed in time and to print nothing but "well"."""
    if library is not None:
        needs(library)
        script = LIBRARIES[library] + script
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
@pytest.mark.parametrize("library", LIBRARIES)
def test_greenlet_that_would_wait_is_refused_and_leaves_nothing(
    server: Any, probe: redis.Redis, no_leaks: Any, library: str, order: str, options: str
) -> None:
    run(library, server.unix_url, f"{order}OPTIONS = {options}\n{REFUSED}")


@pytest.mark.parametrize("library", [None, *LIBRARIES])
def test_greenlet_alone_in_its_thread_may_wait(server: Any, no_leaks: Any, library: str | None) -> None:
    """SQLAlchemy runs code written for threads in such greenlets; they may wait even if another thread has a hub."""
    needs("greenlet")
    run(library, server.unix_url, UNPATCHED + PLAIN)


@pytest.mark.parametrize("order", [FIRST, LATER, UNPATCHED], ids=["patched", "patched later", "never patched"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_native_threads_wait(server: Any, probe: redis.Redis, no_leaks: Any, library: str, order: str) -> None:
    """Threads of the pool run the whole `with` block, or only the acquire."""
    run(library, server.unix_url if order is FIRST else server.tcp_url, order + NATIVE)


@pytest.mark.parametrize("library", LIBRARIES)
def test_native_threads_wait_over_tls(
    server: Any, probe: redis.Redis, no_leaks: Any, library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greenlets open TLS connections while the hub runs, and native threads, which have no hub, go on using them."""
    authority = Authority(tmp_path, "localhost")
    monkeypatch.setenv("AUTHORITY", authority.file)
    with TlsFront(authority, server.path) as front:
        run(library, f"rediss://localhost:{front.port}/0", OVER_TLS + NATIVE)
