"""Locks, sockets and `poll` as the system has them for threads, whatever gevent or eventlet put in their place; and the
refusal of greenlets, which cannot wait with these.

fastlock waits in threads. A greenlet that waits so stops all others of its thread, also the one that is to release the
lock: so it is refused, before it waits. In a native thread of gevent's or eventlet's pool all works, if nothing that it
waits with belongs to the hub of another thread. Never here: how a greenlet could wait.
"""

from __future__ import annotations

import atexit
import importlib
import os
import sys
import time

# gevent and eventlet replace the names in `socket`, and not those in `_socket`.
from _socket import getaddrinfo, socket
from typing import TYPE_CHECKING, Any

from fastlock._stream_errors import by_handler

if TYPE_CHECKING:
    from _thread import LockType
    from collections.abc import Callable

__all__ = ["Changes", "RLock", "allocate_lock", "getaddrinfo", "poll", "refuse_greenlet", "socket", "start_new_thread"]

GEVENT, EVENTLET = "gevent", "eventlet"
_WAY = {
    GEVENT: "gevent.get_hub().threadpool.apply(lock.acquire)",
    EVENTLET: "eventlet.tpool.execute(lock.acquire)",
}


def _original(module: str, name: str) -> Any:
    """A name of the standard library as it was before it was replaced; None: this system does not have it."""
    try:
        if monkey := sys.modules.get("gevent.monkey"):
            return monkey.get_original(module, name)
        if patcher := sys.modules.get("eventlet.patcher"):
            return getattr(patcher.original(module), name)
        return getattr(importlib.import_module(module), name)
    except AttributeError:
        return None


allocate_lock = _original("_thread", "allocate_lock")
RLock = _original("_thread", "RLock")
_start_new_thread = _original("_thread", "start_new_thread")
poll = _original("select", "poll")

_BEGIN_SECONDS = 5.0  # for how long the end of the interpreter waits for threads that have not begun
_starting: list[LockType] = []  # of threads that were started and have not begun: held until they do


def start_new_thread(function: Callable[..., object], args: tuple[Any, ...]) -> None:
    """Start a thread of the system. CPython, 3.11.2 at least, uses memory that it has freed where a thread begins after
    the interpreter has ended: so that waits for it to begin."""
    begun = allocate_lock()
    begun.acquire()
    try:
        _starting.append(begun)
        _start_new_thread(_begin, (begun, function, args))
    except BaseException:
        _forget(begun)
        raise


def _begin(begun: LockType, function: Callable[..., object], args: tuple[Any, ...]) -> None:
    _forget(begun)
    begun.release()
    function(*args)


def _forget(begun: LockType) -> None:
    try:
        _starting.remove(begun)
    except ValueError as gone:  # it was forgotten before: a signal handler raised as its thread, which begins, started
        if by_handler(gone):
            raise


def await_begun() -> None:
    """Wait until the threads that were started have begun. At exit this comes after all of ours that starts some."""
    until = time.monotonic() + _BEGIN_SECONDS
    for begun in list(_starting):
        begun.acquire(timeout=max(0.0, until - time.monotonic()))


atexit.register(await_begun)  # first, as this module is imported first: it is called last of ours
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_starting.clear)  # those threads are the parent's


class Changes:
    """Like a condition variable, but a thread sleeps without its mutex: so a thread that is interrupted holds nothing,
    and no other thread depends on it to be woken."""

    def __init__(self) -> None:
        self._expected: list[Any] = []

    def expect(self) -> Any:
        """What to give to `wait`; a `tell` from now on ends that wait. The caller holds the mutex."""
        wake = allocate_lock()
        wake.acquire()
        self._expected.append(wake)
        return wake

    def wait(self, wake: LockType, seconds: float) -> bool:
        """Sleep until `tell`; False when `seconds` have passed first."""
        try:
            return wake.acquire(timeout=max(0.0, seconds))
        finally:
            self._expected.remove(wake)

    def tell(self) -> None:
        """Wake all threads that wait, to check again. May be called again, after an interrupt."""
        for wake in list(self._expected):
            try:
                wake.release()
            except RuntimeError as error:  # this thread was woken before
                if by_handler(error):
                    raise


def refuse_greenlet(what: str) -> None:
    """Raise RuntimeError where the caller, which is about to wait, is a greenlet that shares its thread with others."""
    world = GEVENT if _in_gevent() else EVENTLET if _in_eventlet() else None
    if world is not None:
        raise RuntimeError(
            f"{what}, and a greenlet cannot wait for that: it would stop its whole thread, with whoever is to release "
            f"the lock. Wait in a native thread: {_WAY[world]}, of a lock with thread_local=False, and with a "
            "blocking_timeout"
        )


def in_event_loop() -> bool:
    """Whether the calling thread runs an event loop of asyncio just now: the caller is part of a coroutine, or is
    called by one."""
    events = sys.modules.get("asyncio.events")
    return events is not None and events._get_running_loop() is not None


def _in_gevent() -> bool:
    """Whether the calling thread runs gevent's hub, and either the caller is a greenlet beside the hub, or gevent has
    replaced what threads wait with. False in the threads of gevent's pools, where each runs one function at a time."""
    local = sys.modules.get("gevent._hub_local")
    if local is None or local.get_hub_if_exists() is None:
        return False
    current, pool = sys.modules[GEVENT].getcurrent(), sys.modules.get("gevent.threadpool")
    if pool is not None and isinstance(current, pool._WorkerGreenlet):
        return False
    monkey = sys.modules.get("gevent.monkey")
    patched = monkey is not None and (monkey.is_module_patched("socket") or monkey.is_module_patched("threading"))
    return patched or current.parent is not None


def _in_eventlet() -> bool:
    """Whether the calling thread runs eventlet's hub, and either the caller is a greenlet beside the hub, or eventlet
    has replaced what threads wait with. False in the threads of eventlet's pool."""
    hubs, pool = sys.modules.get("eventlet.hubs"), sys.modules.get("eventlet.tpool")
    if hubs is None or getattr(hubs._threadlocal, "hub", None) is None:
        return False
    if pool is not None and pool.threading.current_thread() in pool._threads:
        return False
    patcher = sys.modules["eventlet.patcher"]
    patched = patcher.is_monkey_patched("socket") or patcher.is_monkey_patched("thread")
    return patched or hubs.greenlet.getcurrent().parent is not None
