"""Threads whose acquire or release is interrupted at any point at all, one after the other: no key stays, and the
connection remains usable. Every exception counts, also one that fastlock expects of its own calls."""

from __future__ import annotations

import _thread
import contextlib
import itertools
import threading
import time
from functools import partial
from typing import Any

import pytest
import redis
from support.interrupted import EXIT_IS_PYTHON
from support.streams import Interrupt, call_at, raise_at
from support.strikes import STACK

import fastlock
from fastlock._stream_errors import Broken
from fastlock.embedded import Server

NAME = "sku"
EXPECTED = (IndexError, ValueError, RuntimeError, BlockingIOError, redis.exceptions.ConnectionError, fastlock.LockError)


def _alone_or_shared(value: Any) -> str:
    return {False: "alone", True: "shared"}.get(value) or getattr(value, "__name__", value)


def nobody_reads(connection: Any) -> bool:
    """Whether the connection has no reader, so that a thread may become its reader."""
    pending_reply, wake = connection.impl.PendingReply(), threading.Lock()
    wake.acquire()
    free: bool = connection.stream.lead(pending_reply, wake)
    connection.stream.resign(pending_reply)
    return free


BATCHES = "release many", "release a view", "release an iterator"
OPERATIONS = (
    *("acquire", "fenced", "many", "acquire behind", "release", "release unconfirmed", "leave", "leave unconfirmed"),
    *BATCHES,
)

ALIKE = "fenced", "release a view", "release an iterator"  # whose code is nearly that of others
RARE = ValueError, RuntimeError, fastlock.LockError  # which few lines expect


@pytest.mark.parametrize("server", ["valkey"], indirect=True)
@pytest.mark.parametrize(
    ("operation", "shared", "kind"),
    [(operation, shared, Interrupt) for operation in OPERATIONS for shared in (False, True)]
    + [
        pytest.param(operation, False, kind, marks=[pytest.mark.long] if operation in ALIKE or kind in RARE else [])
        for operation in OPERATIONS
        for kind in EXPECTED
    ],
    ids=_alone_or_shared,
)
def test_thread_interrupted_at_any_point(
    impl: str, server: Server, probe: redis.Redis, no_leaks: Any, operation: str, shared: bool, kind: Any
) -> None:
    """A signal handler may raise any exception, also one that fastlock expects, at any point: no key stays, and the
    connection remains usable."""
    no_leaks.allow("fastlock:fence:*")
    for step in itertools.count(1):
        with fastlock.Client.from_url(server.unix_url, max_connections=1) as client:
            confirmed = not operation.endswith(("unconfirmed", "behind"))
            lock = client.lock(NAME, timeout=60, fence=operation == "fenced", confirm_release=confirmed)
            leases = client.acquire_many([NAME]) if operation in BATCHES else []
            views = {"release a view": dict(enumerate(leases)).values(), "release an iterator": iter(leases)}
            given = views.get(operation, leases)
            calls = dict.fromkeys(views, lambda client=client, given=given: client.release_many(given)) | {
                "many": lambda client=client: client.acquire_many([NAME]),
                **dict.fromkeys(("release", "release unconfirmed"), lock.release),
                **dict.fromkeys(("leave", "leave unconfirmed"), lambda lock=lock: lock.__exit__(None, None, None)),
                "release many": lambda client=client, leases=leases: client.release_many(leases),
            }
            if operation.startswith(("release", "leave")) and operation not in BATCHES:
                lock.acquire()
            elif operation == "acquire behind":
                with lock:
                    pass
            else:
                client.server_info()
            borrowed = client._transport.idle.pop() if shared else None  # as if another thread used it
            raised = raise_at(step, STACK, calls.get(operation, lock.acquire), kind)
            if borrowed is not None and borrowed.error is None:
                client._transport.idle.append(borrowed)
            assert all(nobody_reads(each) for each in client._transport.connections), f"point {step}"
            assert client._transport.connections == client._transport.idle, (
                f"point {step}: a connection is neither in use nor idle"
            )
            # if `__exit__` is interrupted at its entry, the lease runs out
            leaves = operation.startswith("leave")
            if lock.lease is not None and (not leaves or (EXIT_IS_PYTHON and step == 1)):
                lock.release()
            late = []
            if step == 1 or operation == "release an iterator":  # it had not begun, or had not read the iterator
                late = client.release_many(given)
            assert not client.lock("barrier").locked()
            if not raised:
                probe.delete(NAME)
                break
            assert not probe.exists(NAME), f"point {step}"
            assert step == 1 or all(late or client.release_many(leases)), f"point {step}: the lease was the caller's"
    assert step > 2 or (operation.startswith("leave") and not EXIT_IS_PYTHON)


@pytest.mark.parametrize("server", ["valkey"], indirect=True)
def test_wait_for_a_connection_interrupted_at_any_point(impl: str, server: Server, no_leaks: Any) -> None:
    """While another thread connects: the mutex is free afterwards, and this thread does not count as connecting."""
    for step in itertools.count(1):
        with fastlock.Client.from_url(server.unix_url, max_connections=1, connect_timeout=0.001) as client:
            transport: Any = client._transport
            transport._opening.add((0, "another"))
            raised = False
            with contextlib.suppress(Broken):
                raised = raise_at(step, STACK, transport._get_connection)
            assert not transport._mutex._is_owned() and transport._opening == {(0, "another")}, f"point {step}"
        if not raised:
            break
    assert step > 10


@pytest.mark.parametrize("server", ["valkey"], indirect=True)
@pytest.mark.parametrize("operation", ["take", "first", "release", "leave", "lapse"])
@pytest.mark.parametrize("kind", [Interrupt, pytest.param(ValueError, marks=pytest.mark.long)])
def test_a_kept_lease_interrupted_at_any_point(
    impl: str, server: Server, probe: redis.Redis, no_leaks: Any, operation: str, kind: Any
) -> None:
    """The name is kept or free afterwards, and what is kept can be taken; a client that is closed keeps nothing."""
    for step in itertools.count(1):
        with fastlock.Client.from_url(server.unix_url, max_connections=1) as client:
            transport: Any = client._transport
            lock = client.lock(NAME, timeout=60, keep=60)
            while not transport.queues.kept:
                with lock:
                    pass
            if operation == "first":
                transport.release_kept(transport.queues.stop_keeping())
            if operation in ("release", "leave"):
                lock.acquire()
            if operation == "lapse":
                transport.queues.kept[NAME.encode()].keep_until = -1.0
            calls = {
                "release": lock.release,
                "leave": lambda lock=lock: lock.__exit__(None, None, None),
                "lapse": lambda transport=transport: transport.release_kept(transport.queues.lapsed(0.0)),
            }
            raised = raise_at(step, STACK, calls.get(operation, lock.acquire), kind)
            assert transport.connections == transport.idle, f"point {step}"
            if lock.lease is not None and (operation != "leave" or (EXIT_IS_PYTHON and step == 1)):
                lock.release()
            assert lock.acquire(blocking=False), f"point {step}: nobody holds it"
            lock.release()
        assert not probe.exists(NAME), f"point {step}"
        if not raised:
            break
    assert step > 1 or (operation == "leave" and not EXIT_IS_PYTHON)


@pytest.mark.parametrize("server", ["valkey"], indirect=True)
@pytest.mark.parametrize("operation", ["release", "leave"])
def test_a_kept_lease_lapses_though_its_release_is_interrupted_at_any_point(
    impl: str, server: Server, probe: redis.Redis, no_leaks: Any, operation: str
) -> None:
    """The thread that is to release it in time sleeps for longer: it is woken in any case."""
    with fastlock.Client.from_url(server.unix_url) as client:
        long, lock = client.lock("long", timeout=600, keep=600), client.lock(NAME, timeout=600, keep=0.005)
        while not client._transport.queues.kept:
            with long:
                pass
        for step in itertools.count(1):
            lock.acquire()
            leave = partial(lock.__exit__, None, None, None)
            files = {file for file in STACK if file.endswith(("keeping.py", "kept.py", "sync_connection.py"))}
            raised = raise_at(step, files, lock.release if operation == "release" else leave)
            while probe.exists(NAME):  # the test's timeout ends this
                time.sleep(0.001)
            if not raised:
                break
    assert step > 1


@pytest.mark.parametrize("server", ["valkey"], indirect=True)
@pytest.mark.parametrize("settings", [{"keep": 60}, {"auto_renew": True}], ids=["keep", "auto_renew"])
def test_no_thread_is_left_though_its_start_is_interrupted(
    impl: str, server: Server, no_leaks: Any, settings: dict[str, Any]
) -> None:
    """A handler that raises as a client starts its thread, before it has noted that: it would start another one."""
    before = _thread._count()
    for step in itertools.count(1):
        with fastlock.Client.from_url(server.unix_url) as client:
            client.server_info()
            lock = client.lock(NAME, timeout=60, **settings)
            raised = raise_at(step, STACK, lock.acquire)
            if lock.lease is not None:
                lock.release()
            with lock:
                pass
            while _thread._count() > before + 1:  # the test's timeout ends this
                time.sleep(0.001)
        while _thread._count() > before:
            time.sleep(0.001)
        if not raised:
            break
    assert step > 1


@pytest.mark.parametrize("server", ["valkey"], indirect=True)
@pytest.mark.parametrize(
    "operation", [pytest.param("release kept", marks=pytest.mark.long), "release unconfirmed", "acquire behind"]
)
def test_a_handler_that_wants_the_name_does_not_wait_for_whom_it_interrupts(
    impl: str, server: Server, no_leaks: Any, operation: str
) -> None:
    """The name may be held by a release that the interrupted code is about to send, or whose answer it waits for."""
    for step in itertools.count(1):
        with fastlock.Client.from_url(server.unix_url, reply_timeout=600) as client:
            lock = client.lock(NAME, timeout=600, keep=600 if operation == "release kept" else None)
            unconfirmed = client.lock(NAME, timeout=600, confirm_release=False)
            fair = client.lock(NAME, timeout=600, fair=True)
            with fair, client.lock("other"):  # so that there are two connections
                pass
            while operation == "release kept" and not client._transport.queues.kept:
                with lock:
                    pass
            if operation != "release kept":
                unconfirmed.acquire()
            if operation == "acquire behind":
                unconfirmed.release()

            def wanted(client: fastlock.Client = client) -> None:
                other = client.lock(NAME, timeout=600, blocking=False, thread_local=False)
                try:
                    if other.acquire():
                        other.release()
                except RuntimeError as error:
                    assert "max_connections" in str(error)

            calls = {"release unconfirmed": unconfirmed.release, "acquire behind": fair.acquire}
            called = call_at(step, STACK, calls.get(operation, unconfirmed.acquire), wanted)
            if operation != "release unconfirmed":
                (fair if operation == "acquire behind" else unconfirmed).release()
            assert lock.acquire(blocking=False), f"point {step}: nobody holds it"
            lock.release()
            found = client.get_stats()
            assert found["losses"] == 0, f"point {step}"
        if not called:
            break
    assert step > 1


@pytest.mark.parametrize("server", ["valkey"], indirect=True)
@pytest.mark.parametrize("operation", ["acquire", pytest.param("acquire kept", marks=pytest.mark.long)])
def test_a_handler_gets_what_is_free_and_what_it_releases_is_delivered(
    impl: str, server: Server, probe: redis.Redis, no_leaks: Any, operation: str
) -> None:
    """Whatever connection the interrupted code is about to send over."""
    for step in itertools.count(1):
        with fastlock.Client.from_url(server.unix_url, reply_timeout=600) as client:
            kept = client.lock(NAME, timeout=600, keep=600)
            before = client.lock("before", timeout=600, confirm_release=False)
            before.acquire()
            while not client._transport.queues.kept:
                with kept:
                    pass

            def handler(client: fastlock.Client = client, before: Any = before) -> None:
                free = client.lock("free" if operation == "acquire kept" else NAME, timeout=600, blocking=False)
                assert free.acquire(), "nobody holds it"
                free.release()
                before.release()

            lock = client.lock(NAME if operation == "acquire kept" else "other", timeout=600)
            called = call_at(step, STACK, lock.acquire, handler)
            lock.release()
            found = client.get_stats()
            assert (found["losses"], found["reconnects"]) == (0, 0), f"point {step}"
        assert not called or not probe.exists("before"), f"point {step}"
        probe.delete("before")
        if not called:
            break
    assert step > 1


@pytest.mark.parametrize("server", ["valkey"], indirect=True)
def test_a_handler_on_the_only_connection_does_not_mix_up_whom_it_interrupts(
    impl: str, server: Server, no_leaks: Any
) -> None:
    """It wants a name that is kept, whose release cannot be sent before the interrupted code is done."""
    for step in itertools.count(1):
        with fastlock.Client.from_url(server.unix_url, reply_timeout=600, max_connections=1) as client:
            kept, lock = client.lock(NAME, timeout=600, keep=600), client.lock("free", timeout=600)
            while not client._transport.queues.kept:
                with kept:
                    pass

            def wanted(client: fastlock.Client = client) -> None:
                try:
                    with client.lock(NAME, timeout=600, blocking=False, thread_local=False):
                        pass
                except (RuntimeError, fastlock.LockNotAcquiredError) as error:
                    assert "max_connections" in str(error) or isinstance(error, fastlock.LockError)

            called = call_at(step, STACK, lambda lock=lock: lock.acquire(blocking=False), wanted)
            assert lock.owned(), f"point {step}: nobody else wants it"
            lock.release()
        if not called:
            break
    assert step > 1
