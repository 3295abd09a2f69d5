"""Bytes: locks, sockets and `poll` as the system gives them to threads, whatever gevent or eventlet put in their place;
and whom that does not serve.

fastlock waits in threads. A greenlet that waits so stops all others of its thread, also the one that is to release the
lock: so it is refused, before it waits. In a native thread of gevent's or eventlet's pool all works, if nothing that it
waits with belongs to the hub of another thread. Never here: how a greenlet could wait.
"""

from __future__ import annotations

import importlib
import sys

# gevent and eventlet replace the names in `socket`, and not what stands behind them.
from _socket import getaddrinfo, socket
from typing import Any

__all__ = ["Condition", "RLock", "allocate_lock", "getaddrinfo", "poll", "refuse_greenlet", "socket"]

GEVENT, EVENTLET = "gevent.monkey", "eventlet.patcher"  # without these modules nothing has been replaced
_WAY = {
    GEVENT: "gevent.get_hub().threadpool.apply(lock.acquire)",
    EVENTLET: "eventlet.tpool.execute(lock.acquire)",
}


def _original(module: str, name: str) -> Any:
    """A name of the standard library as it was before anybody replaced it; None: this system has no such thing."""
    try:
        if monkey := sys.modules.get(GEVENT):
            return monkey.get_original(module, name)
        if patcher := sys.modules.get(EVENTLET):
            return getattr(patcher.original(module), name)
        return getattr(importlib.import_module(module), name)
    except AttributeError:
        return None


allocate_lock = _original("_thread", "allocate_lock")
RLock = _original("_thread", "RLock")
poll = _original("select", "poll")


class Condition:
    """As `threading.Condition` of a mutex that the caller holds when it calls; without `with`, for the one wait there
    is."""

    def __init__(self, mutex: Any) -> None:
        self._mutex = mutex
        self._waiting: list[Any] = []

    def wait(self, seconds: float) -> bool:
        """Sleep until `notify_all`; False when the time is over first. Lets go of the mutex meanwhile."""
        wake = allocate_lock()
        wake.acquire()
        self._waiting.append(wake)
        self._mutex.release()
        try:
            return wake.acquire(timeout=max(0.0, seconds))  # type: ignore[no-any-return]
        finally:
            self._mutex.acquire()
            if wake in self._waiting:
                self._waiting.remove(wake)

    def notify_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        for wake in waiting:
            wake.release()


def refuse_greenlet(what: str) -> None:
    """RuntimeError, where the caller is a greenlet that shares its thread with others, and would wait now."""
    world = GEVENT if _in_gevent() else EVENTLET if _in_eventlet() else None
    if world is not None:
        raise RuntimeError(
            f"{what}, and a greenlet cannot wait for that: it would stop its whole thread, with whoever is to release "
            f"the lock. Wait in a native thread: {_WAY[world]}, of a lock with thread_local=False"
        )


def _in_gevent() -> bool:
    """Whether gevent replaced what threads wait with, and the calling thread runs a hub; but for the threads of its
    pools, where each runs one function at a time."""
    monkey = sys.modules.get(GEVENT)
    if monkey is None or not (monkey.is_module_patched("socket") or monkey.is_module_patched("threading")):
        return False
    worker = getattr(sys.modules.get("gevent.threadpool"), "_WorkerGreenlet", ())
    if isinstance(sys.modules["gevent"].getcurrent(), worker):
        return False
    return sys.modules["gevent._hub_local"].get_hub_if_exists() is not None


def _in_eventlet() -> bool:
    """The same for eventlet."""
    patcher = sys.modules.get(EVENTLET)
    if patcher is None or not (patcher.is_monkey_patched("socket") or patcher.is_monkey_patched("thread")):
        return False
    hubs, pool = sys.modules["eventlet.hubs"], sys.modules.get("eventlet.tpool")
    if getattr(hubs._threadlocal, "hub", None) is None:
        return False
    return pool is None or pool.threading.current_thread() not in pool._threads
